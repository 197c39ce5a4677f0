/* Builds each line in a buffer of its own and writes it with one write(2), so that lines of several
 * threads do not mix and no lock is held while stderr blocks. A line that does not fit is cut; a
 * JSON line stays valid JSON. */
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

#include "base/utf8.h"

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
static atomic_int line_format = LOG_FORMAT_PLAIN;

void log_set_level(enum log_level level) {
    atomic_store_explicit(&max_level, (int)level, memory_order_relaxed);
}

bool log_shows(enum log_level level) {
    return (int)level <= atomic_load_explicit(&max_level, memory_order_relaxed);
}

void log_set_format(enum log_format format) {
    atomic_store_explicit(&line_format, (int)format, memory_order_relaxed);
}

/* Returns whether stderr goes to the journal. systemd sets JOURNAL_STREAM=device:inode. Children
 * whose stderr was redirected inherit the variable, so its numbers must be those of our stderr. */
static bool stderr_is_journal(void) {
    const char *stream = getenv("JOURNAL_STREAM");
    unsigned long long device, inode;
    struct stat st;
    return stream && sscanf(stream, "%llu:%llu", &device, &inode) == 2 &&
           fstat(STDERR_FILENO, &st) == 0 && st.st_dev == device && st.st_ino == inode;
}

/* --- one line --- */

struct line {
    char text[LINE_BYTES];
    size_t size;
    bool json, cut;
};

#define LINE_LIMIT (LINE_BYTES - 8) /* leaves room for the end of an object and the newline */

static void put_log_char(struct line *line, char c) {
    if (line->size < LINE_LIMIT)
        line->text[line->size++] = c;
    else
        line->cut = true;
}

static void put_plain(struct line *line, const char *text) {
    for (; *text; text++) put_log_char(line, *text);
}

static uint32_t scalar_of(const char *s, size_t size) {
    static const unsigned char masks[] = {0, 0x7f, 0x1f, 0x0f, 0x07};
    uint32_t scalar = (unsigned char)s[0] & masks[size];
    for (size_t i = 1; i < size; i++) scalar = scalar << 6 | ((unsigned char)s[i] & 0x3f);
    return scalar;
}

/* Returns false for control characters, line ends, and marks that change the direction of the text
 * after them. */
static bool is_shown(uint32_t c) {
    return c >= 0x20 && (c < 0x7f || c > 0x9f) && c != 0x61c && c != 0x200e && c != 0x200f &&
           (c < 0x2028 || c > 0x202e) && (c < 0x2066 || c > 0x2069) && c != 0xfeff;
}

/* Appends text that may come from a client. Control characters, which could forge a line, and
 * invalid UTF-8 are replaced; in JSON, quotes and backslashes are escaped. No character is cut in
 * half. */
static void put_log_text(struct line *line, const char *text) {
    size_t left = strlen(text), size;
    for (; left > 0; text += size, left -= size) {
        bool whole = utf8_step(text, left, &size) == UTF8_CHAR;
        bool shown = whole && is_shown(scalar_of(text, size));
        bool escaped = line->json && (*text == '"' || *text == '\\');
        size_t needed = !shown ? 1 : size + escaped;
        if (line->size + needed > LINE_LIMIT) line->cut = true;
        if (line->cut) return;
        if (escaped) put_log_char(line, '\\');
        for (size_t i = 0; shown && i < size; i++) put_log_char(line, text[i]);
        if (!shown) put_log_char(line, '?');
    }
}

static void put_name(struct line *line, const char *name) {
    put_plain(line, line->json ? ",\"" : " ");
    put_plain(line, name);
    put_plain(line, line->json ? "\":" : "=");
}

static void put_field(struct line *line, const struct log_field *field) {
    char number[32];
    if (field->text && !*field->text) return;
    put_name(line, field->name);
    if (field->text) {
        if (line->json) put_log_char(line, '"');
        put_log_text(line, field->text);
        if (line->json) put_log_char(line, '"');
    } else {
        snprintf(number, sizeof number, "%lld", field->number);
        put_plain(line, number);
    }
}

static void put_stamp(struct line *line) {
    struct timespec now;
    struct tm utc;
    char stamp[32], ms[32];
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%S", &utc);
    snprintf(ms, sizeof ms, ".%03ldZ", now.tv_nsec / 1000000);
    put_plain(line, stamp);
    put_plain(line, ms);
}

static void begin_line(struct line *line, enum log_level level) {
    char level_text[16];
    line->size = 0;
    line->cut = false;
    line->json = atomic_load_explicit(&line_format, memory_order_relaxed) == LOG_FORMAT_JSON;
    if (stderr_is_journal()) {
        snprintf(level_text, sizeof level_text, "<%d>", levels[level].syslog);
        put_plain(line, level_text);
    }
    if (line->json) {
        put_plain(line, "{\"time\":\"");
        put_stamp(line);
        put_plain(line, "\",\"level\":\"");
        put_plain(line, levels[level].name);
        put_plain(line, "\",\"text\":\"");
    } else if (!line->size) {
        put_stamp(line);
        snprintf(level_text, sizeof level_text, " %-5s ", levels[level].name);
        put_plain(line, level_text);
    }
}

/* Marks a line that was cut. As JSON it is still an object if only its text was too long. */
static void end_log_line(struct line *line, bool in_string) {
    char *at = line->text + line->size;
    if (line->cut) at = stpcpy(at, "...");
    if (line->json && in_string) *at++ = '"';
    if (line->json) *at++ = '}';
    *at++ = '\n';
    /* There is no other place to report that the log cannot be written. */
    ssize_t ignored = write(STDERR_FILENO, line->text, (size_t)(at - line->text));
    (void)ignored;
}

void log_write(enum log_level level, const char *format, ...) {
    char text[LINE_BYTES];
    struct line line;
    va_list args;
    if (!log_shows(level)) return;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    begin_line(&line, level);
    put_log_text(&line, text);
    end_log_line(&line, true);
}

void log_event(enum log_level level, const char *text, const struct log_field *fields,
               size_t count) {
    struct line line;
    if (!log_shows(level)) return;
    begin_line(&line, level);
    put_log_text(&line, text);
    if (line.json) put_log_char(&line, '"');
    /* A field that does not fit is left out whole, so that the line is still an object. */
    for (size_t i = 0; i < count; i++) {
        size_t before = line.size;
        put_field(&line, &fields[i]);
        if (!line.cut) continue;
        line.size = before;
        line.cut = false;
    }
    end_log_line(&line, false);
}
