#include "base/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define LINE_BYTES 2048

static const struct {
    const char *name;
    int syslog; /* journald's <N> */
} levels[] = {
    [LOG_LEVEL_ERROR] = {"error", 3},
    [LOG_LEVEL_WARN] = {"warn", 4},
    [LOG_LEVEL_INFO] = {"info", 6},
    [LOG_LEVEL_DEBUG] = {"debug", 7},
};

static atomic_int max_level = LOG_LEVEL_INFO;

void log_set_level(enum log_level level) {
    atomic_store_explicit(&max_level, (int)level, memory_order_relaxed);
}

/* systemd sets JOURNAL_STREAM=device:inode; it also reaches children whose stderr was redirected,
 * so the numbers must be those of our stderr. */
static bool stderr_is_journal(void) {
    const char *stream = getenv("JOURNAL_STREAM");
    unsigned long long device, inode;
    struct stat st;
    return stream && sscanf(stream, "%llu:%llu", &device, &inode) == 2 &&
           fstat(STDERR_FILENO, &st) == 0 && st.st_dev == device && st.st_ino == inode;
}

static size_t line_prefix(char *line, size_t size, enum log_level level) {
    if (stderr_is_journal()) return (size_t)snprintf(line, size, "<%d>", levels[level].syslog);
    struct timespec now;
    struct tm utc;
    char stamp[32];
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%S", &utc);
    return (size_t)snprintf(line, size, "%s.%03ldZ %-5s ", stamp, now.tv_nsec / 1000000,
                            levels[level].name);
}

void log_write(enum log_level level, const char *format, ...) {
    if ((int)level > atomic_load_explicit(&max_level, memory_order_relaxed)) return;
    char line[LINE_BYTES];
    size_t start = line_prefix(line, sizeof line, level);
    size_t room = sizeof line - start - 1; /* the last byte is the newline's */
    va_list args;
    va_start(args, format);
    int wanted = vsnprintf(line + start, room, format, args);
    va_end(args);
    size_t size = start + strlen(line + start);
    bool cut = wanted >= 0 && (size_t)wanted >= room;
    for (size_t i = start; i < size; i++) {
        if ((unsigned char)line[i] < 0x20 || line[i] == 0x7f) line[i] = '?';
        if (cut && i + 3 >= size) line[i] = '.';
    }
    line[size++] = '\n';
    /* A log that cannot be written is nowhere to be reported. */
    ssize_t ignored = write(STDERR_FILENO, line, size);
    (void)ignored;
}
