/* The log: each event is one line on stderr with time, level and text. Under journald the line
 * begins with journald's level prefix instead of time and level. With JSON each line is an object:
 * {"time", "level", "text"} and the event's fields. Thread-safe: each line is one write(2). Control
 * characters, which a client may have sent, become '?'; long lines are cut. */
#ifndef KEEPD_BASE_LOG_H
#define KEEPD_BASE_LOG_H

#include <stdbool.h>
#include <stddef.h>

enum log_level { LOG_LEVEL_ERROR, LOG_LEVEL_WARN, LOG_LEVEL_INFO, LOG_LEVEL_DEBUG };

enum log_format { LOG_FORMAT_PLAIN, LOG_FORMAT_JSON };

void log_set_level(enum log_level level);
bool log_shows(enum log_level level); /* false: writing an event of it would change nothing */
void log_set_format(enum log_format format);
void log_write(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* A fact about an event: ` name=value` after the text, in JSON a member of its own. */
struct log_field {
    const char *name;
    const char *text; /* NULL: the number; "" is left out */
    long long number;
};
void log_event(enum log_level level, const char *text, const struct log_field *fields,
               size_t count);

#define log_error(...) log_write(LOG_LEVEL_ERROR, __VA_ARGS__)
#define log_warn(...)  log_write(LOG_LEVEL_WARN, __VA_ARGS__)
#define log_info(...)  log_write(LOG_LEVEL_INFO, __VA_ARGS__)
#define log_debug(...) log_write(LOG_LEVEL_DEBUG, __VA_ARGS__)

#endif
