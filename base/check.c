#include "base/check.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/log.h"

void check_failed(const char *file, int line, const char *condition, const char *format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    log_error("check failed: %s at %s:%d %s", condition, file, line, text);
    abort();
}
