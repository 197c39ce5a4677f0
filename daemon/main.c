/* The program: chooses between the daemon (daemon/serve.h), the commands `keepd bench` and `keepd
 * fit` (daemon/commands.h), `keepd pull` (daemon/hub.h), `keepd chat`, and what the options print.
 */
#include <errno.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/commands.h"
#include "daemon/hub.h"
#include "daemon/serve.h"
#include "daemon/start.h"
#include "picture/decoder.h"

/* Makes glibc return memory. A long dialogue resends its whole history each turn, and by default
 * glibc answers growing blocks with more heaps and a growing threshold: the process grows by a few
 * per cent in twenty turns although nothing is in use. With one heap, large blocks are returned at
 * once. */
static void give_memory_back(void) {
    mallopt(M_ARENA_MAX, 1);
    mallopt(M_MMAP_THRESHOLD, 64 << 10);
    mallopt(M_TRIM_THRESHOLD, 64 << 10);
}

/* Starts the client, which is a program of its own in the daemon's folder (client/chat.c). */
static int run_chat(char **argv) {
    static const char name[] = "/keepd-chat";
    char path[4096];
    ssize_t size = readlink("/proc/self/exe", path, sizeof path - sizeof name);
    char *end = size > 0 ? memrchr(path, '/', (size_t)size) : NULL;
    snprintf(end ? end : path, sizeof name, "%s", name);
    execv(path, argv + 1);
    fprintf(stderr, "keepd: chat: cannot start %s: %s\n", path, strerror(errno));
    return EXIT_FAILURE;
}

int main(int argc, char **argv) {
    struct config config = {0};
    struct fault fault = {0};
    if (argc > 1 && strcmp(argv[1], PICTURE_DECODER) == 0) _exit(picture_decoder_main());
    give_memory_back();
    if (argc > 1 && strcmp(argv[1], "chat") == 0) return run_chat(argv);
    if (argc > 1 && strcmp(argv[1], "bench") == 0) return command_bench(argc, argv);
    if (argc > 1 && strcmp(argv[1], "fit") == 0) return command_fit(argc, argv);
    if (argc > 1 && strcmp(argv[1], "pull") == 0) return hub_command(argc, argv);
    int status = start_load_options(0, argc, argv, "--help lists the options", &config, &fault);
    if (status) return status;
    if (config.help) {
        config_help(stdout);
    } else if (config.man) {
        config_man(stdout, KEEPD_VERSION);
    } else if (config.completion) {
        config_complete(stdout, config.completion);
    } else if (config.version) {
        printf("keepd %s\n", KEEPD_VERSION);
    } else {
        start_set_log(&config);
        start_log_notes(&config);
        status = serve_run(&config, argc, argv);
    }
    config_close(&config);
    return status;
}
