/* Errors: one list makes the enum, the name and the text.
 *
 * Functions that can fail return int: 0 is success, a negative `enum err` is failure.
 * "Full" and "not now" are expected results (ERR_FULL, ERR_BUSY), not failures.
 * Where a person will read the reason (start-up, a request), the function also fills a
 * `struct fault`: the code, the field or tensor at fault, and one sentence. */
#ifndef KEEPD_BASE_ERR_H
#define KEEPD_BASE_ERR_H

#define ERR_MAP(X)                                                                                 \
    X(NOMEM, -1, "out of memory")                                                                  \
    X(IO, -2, "cannot read or write")                                                              \
    X(INVALID, -3, "invalid value")                                                                \
    X(MALFORMED, -4, "malformed input")                                                            \
    X(UNSUPPORTED, -5, "not supported")                                                            \
    X(NOTFOUND, -6, "not found")                                                                   \
    X(LIMIT, -7, "limit exceeded")                                                                 \
    X(FULL, -8, "full")                                                                            \
    X(BUSY, -9, "busy")                                                                            \
    X(STOPPED, -10, "stopped")                                                                     \
    X(CONTEXT, -11, "context length exceeded")                                                     \
    X(DEVICE, -12, "device failure")                                                               \
    X(INTERNAL, -13, "internal error")

enum err {
    ERR_OK = 0,
#define X(name, value, text) ERR_##name = (value),
    ERR_MAP(X)
#undef X
};

/* An error in words. `field` names the JSON path, option, file or tensor at fault and may be "". */
struct fault {
    int code; /* enum err; 0 = none */
    char field[128];
    char text[384];
};

/* Static strings; never NULL. */
const char *err_name(int rc); /* "ERR_NOMEM" */
const char *err_text(int rc); /* "out of memory" */

/* Fills *fault (may be NULL) and returns `rc`, so that `return fault_set(...)` reads well.
 * `field` may be NULL. Long texts are cut, never overrun. */
int fault_set(struct fault *fault, int rc, const char *field, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

#endif
