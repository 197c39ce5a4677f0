/* Python's three ways to format: "%s" % x, "{}".format(x), and strftime. */
#ifndef KEEPD_TEXT_JINJA_FORMAT_H
#define KEEPD_TEXT_JINJA_FORMAT_H

#include "text/jinja/text.h"

/* `values`: a tuple, a dict for %(name)s, or one value. */
int jinja_format_percent(struct jinja_run *run, const struct jinja_value *format,
                         const struct jinja_value *values, struct jinja_value *out);
int jinja_format_braces(struct jinja_run *run, const struct jinja_value *format,
                        const struct jinja_args *args, struct jinja_value *out);
/* In UTC, in the C locale. */
int jinja_format_time(struct jinja_run *run, const struct jinja_value *format, int64_t now,
                      struct jinja_value *out);

#endif
