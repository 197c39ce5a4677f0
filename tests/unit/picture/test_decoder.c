/* The process that decodes: this program starts itself, as the daemon does. What the process does
 * is said by a file that bears the parent's number, because its environment is empty. */
#include <fcntl.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/check.h"
#include "picture/decoder.h"
#include "picture/sandbox.h"
#include "samples.h"

static const char *const deeds[] = {"crash", "lie", "socket", "exec", "open", "silence"};

static bool is_call(const char *deed) {
    return strcmp(deed, "socket") == 0 || strcmp(deed, "exec") == 0;
}

static void name_file(pid_t parent, const char *deed, char path[64]) {
    snprintf(path, 64, "/tmp/keepd-test-decoder-%d-%s", (int)parent, deed);
}

static bool is_asked(const char *deed) {
    char path[64];
    name_file(getppid(), deed, path);
    return access(path, F_OK) == 0;
}

static void do_deed(const char *deed) {
    static const int32_t lie[3 + 96] = {0, 1 << 20, 1 << 20};
    static char *const none[] = {NULL};
    if (strcmp(deed, "lie") == 0) {
        CHECK(write(0, lie, sizeof lie) == sizeof lie);
        return;
    }
    CHECK(sandbox_enter() == 0);
    if (strcmp(deed, "crash") == 0) abort();
    if (strcmp(deed, "open") == 0 && open("/proc/cpuinfo", 0) >= 0) abort();
    if (strcmp(deed, "socket") == 0) (void)!socket(AF_INET, SOCK_STREAM, 0);
    if (strcmp(deed, "exec") == 0) (void)!execve("/bin/true", none, none);
    for (volatile int forever = 1; strcmp(deed, "silence") == 0 && forever;) {
    }
    static const int32_t still_here[3 + 96] = {ERR_LIMIT};
    (void)!write(0, still_here, sizeof still_here);
}

static int run_child(void) {
    for (size_t i = 0; i < sizeof deeds / sizeof *deeds; i++) {
        if (!is_asked(deeds[i])) continue;
        do_deed(deeds[i]);
        return 0;
    }
    return picture_decoder_main();
}

static void expect_sample(const uint8_t *file, size_t size) {
    struct picture_rgb rgb, wanted = sample_picture(40, 30);
    struct fault fault = {0};
    CHECK_MSG(picture_read(file, size, &rgb, &fault) == 0, "%s", fault.text);
    CHECK(rgb.width == 40 && rgb.height == 30);
    CHECK(memcmp(rgb.pixels, wanted.pixels, 40 * 30 * 3) == 0);
    mem_free(rgb.pixels);
    mem_free(wanted.pixels);
}

static void expect_failure(const char *deed, const uint8_t *file, size_t size, int rc) {
    struct picture_rgb rgb;
    struct fault fault = {0};
    char path[64];
    name_file(getpid(), deed, path);
    FILE *asked = fopen(path, "w");
    CHECK(asked && fclose(asked) == 0);
    const int found = picture_read(file, size, &rgb, &fault);
    CHECK(unlink(path) == 0);
    CHECK_MSG(found == rc && !rgb.pixels, "%s: %d, %s", deed, found, fault.text);
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], PICTURE_DECODER) == 0) _exit(run_child());
    struct picture_rgb sample = sample_picture(40, 30), rgb;
    struct fault fault = {0};
    size_t size;
    uint8_t *file = sample_png(sample.pixels, 40, 30, PNG_FORMAT_RGB, &size);
    expect_sample(file, size);
    CHECK(picture_read("hello", 5, &rgb, &fault) == ERR_MALFORMED && strstr(fault.text, "PNG"));
    CHECK(picture_read(file, PICTURE_FILE_MAX + 1, &rgb, &fault) == ERR_LIMIT);
    for (size_t i = 0; i + 2 < sizeof deeds / sizeof *deeds; i++)
        if (!is_call(deeds[i]) || sandbox_filters())
            expect_failure(deeds[i], file, size, ERR_MALFORMED);
    /* Opening is refused, and does not end the process: libraries look at what the machine has. */
    expect_failure("open", file, size, ERR_LIMIT);
    picture_decode_ms = 300;
    expect_failure("silence", file, size, ERR_LIMIT);
    picture_decode_ms = PICTURE_DECODE_MS;
    expect_sample(file, size);
    mem_free(file);
    mem_free(sample.pixels);
    return 0;
}
