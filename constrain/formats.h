/* The values of the keyword `format`. */
#ifndef KEEPD_CONSTRAIN_FORMATS_H
#define KEEPD_CONSTRAIN_FORMATS_H

enum format_use {
    FORMAT_PATTERN, /* *pattern describes the whole string */
    FORMAT_EMAIL,   /* *pattern describes what follows the local part */
    FORMAT_UNKNOWN, /* an annotation: not of the standard, or one that no expression describes */
};

enum format_use format_find(const char *name, const char **pattern);

#endif
