/* The values of the keyword `format`. */
#ifndef KEEPD_CONSTRAIN_FORMATS_H
#define KEEPD_CONSTRAIN_FORMATS_H

enum format_use {
    FORMAT_PATTERN, /* *pattern is the whole string */
    FORMAT_EMAIL,   /* *pattern is the part after the local part */
    FORMAT_UNKNOWN, /* the format is not of the standard, or no expression describes it: it is not
                       enforced */
};

enum format_use format_find(const char *name, const char **pattern);

#endif
