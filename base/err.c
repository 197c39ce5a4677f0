#include "base/err.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char *err_name(int rc) {
    switch (rc) {
    case ERR_OK:
        return "ERR_OK";
#define X(name, value, text)                                                                       \
    case ERR_##name:                                                                               \
        return "ERR_" #name;
        ERR_MAP(X)
#undef X
    default:
        return "ERR_UNKNOWN";
    }
}

const char *err_text(int rc) {
    switch (rc) {
    case ERR_OK:
        return "success";
#define X(name, value, text)                                                                       \
    case ERR_##name:                                                                               \
        return text;
        ERR_MAP(X)
#undef X
    default:
        return "unknown error";
    }
}

/* A fault is one line, so line ends in the names of files that it quotes are replaced. */
static void one_line(char *text) {
    for (; *text; text++)
        if ((unsigned char)*text < ' ' || *text == 0x7f) *text = '?';
}

int fault_set(struct fault *fault, int rc, const char *field, const char *format, ...) {
    if (!fault) return rc;
    /* Built in a copy first: callers wrap a fault and pass its own field and text as arguments. */
    struct fault next = {.code = rc};
    if (field) snprintf(next.field, sizeof next.field, "%s", field);
    va_list args;
    va_start(args, format);
    vsnprintf(next.text, sizeof next.text, format, args);
    va_end(args);
    one_line(next.field);
    one_line(next.text);
    *fault = next;
    return rc;
}
