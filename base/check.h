/* Checks for programmer errors: kept in release builds, log and abort.
 * Never used on anything a client, a file or the machine can cause; those return an error. */
#ifndef KEEPD_BASE_CHECK_H
#define KEEPD_BASE_CHECK_H

__attribute__((noreturn, format(printf, 4, 5))) void
check_failed(const char *file, int line, const char *condition, const char *format, ...);

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (__builtin_expect(!(condition), 0)) check_failed(__FILE__, __LINE__, #condition, " ");  \
    } while (0)

#define CHECK_MSG(condition, ...)                                                                  \
    do {                                                                                           \
        if (__builtin_expect(!(condition), 0))                                                     \
            check_failed(__FILE__, __LINE__, #condition, __VA_ARGS__);                             \
    } while (0)

#endif
