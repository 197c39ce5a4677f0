/* The process that decodes: this program starts itself, as the daemon does. What the process does
 * is said by a file that bears the parent's number, because its environment is empty. */
#include <fcntl.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "picture/decoder.h"
#include "picture/sandbox.h"
#include "samples.h"

static const char *const deeds[] = {"crash", "lie", "socket", "exec", "open", "silence", "end"};

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
    static const int32_t ready[3 + 96] = {0};
    static char *const none[] = {NULL};
    if (strcmp(deed, "end") == 0) return;
    CHECK(write(0, ready, sizeof ready) == sizeof ready);
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

static int read_within(const void *file, size_t size, int ms, struct picture_rgb *rgb,
                       struct fault *fault) {
    return picture_read(file, size, clock_ns() + (int64_t)ms * 1000000, rgb, fault);
}

static void expect_sample(const uint8_t *file, size_t size) {
    struct picture_rgb rgb, wanted = sample_picture(40, 30);
    struct fault fault = {0};
    CHECK_MSG(read_within(file, size, PICTURES_DECODE_MS, &rgb, &fault) == 0, "%s", fault.text);
    CHECK(rgb.width == 40 && rgb.height == 30);
    CHECK(memcmp(rgb.pixels, wanted.pixels, 40 * 30 * 3) == 0);
    mem_free(rgb.pixels);
    mem_free(wanted.pixels);
}

static void expect_failure(const char *deed, const uint8_t *file, size_t size, int ms, int rc) {
    struct picture_rgb rgb;
    struct fault fault = {0};
    char path[64];
    name_file(getpid(), deed, path);
    FILE *asked = fopen(path, "w");
    CHECK(asked && fclose(asked) == 0);
    const int found = read_within(file, size, ms, &rgb, &fault);
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
    CHECK(read_within("hello", 5, PICTURES_DECODE_MS, &rgb, &fault) == ERR_MALFORMED &&
          strstr(fault.text, "PNG"));
    CHECK(read_within(file, PICTURE_FILE_MAX + 1, 0, &rgb, &fault) == ERR_LIMIT);
    for (size_t i = 0; i + 3 < sizeof deeds / sizeof *deeds; i++)
        if (!is_call(deeds[i]) || sandbox_filters())
            expect_failure(deeds[i], file, size, PICTURES_DECODE_MS, ERR_MALFORMED);
    /* Opening is refused, and does not end the process: libraries look at what the machine has. */
    expect_failure("open", file, size, PICTURES_DECODE_MS, ERR_LIMIT);
    expect_failure("silence", file, size, 300, ERR_LIMIT);
    /* A process that ends before it is ready says nothing about the picture. */
    expect_failure("end", file, size, PICTURES_DECODE_MS, ERR_IO);
    CHECK(read_within(file, size, 0, &rgb, &fault) == ERR_LIMIT);
    expect_sample(file, size);
    mem_free(file);
    mem_free(sample.pixels);
    return 0;
}
