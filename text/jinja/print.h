/* Values to text: Python's str(), repr() and json.dumps(), to the byte. */
#ifndef KEEPD_TEXT_JINJA_PRINT_H
#define KEEPD_TEXT_JINJA_PRINT_H

#include "text/jinja/text.h"

int jinja_print(struct jinja_run *run, struct jinja_text *text, const struct jinja_value *v);
int jinja_print_repr(struct jinja_run *run, struct jinja_text *text, const struct jinja_value *v);

struct jinja_json {
    bool ensure_ascii, sort_keys;
    bool indents;
    struct jinja_value indent; /* one level of it, a string */
    struct jinja_value item_separator, key_separator;
};

int jinja_print_json(struct jinja_run *run, struct jinja_text *text, const struct jinja_value *v,
                     const struct jinja_json *json);

#define JINJA_FLOAT_BYTES 40
void jinja_float_repr(double f, char out[JINJA_FLOAT_BYTES]);

#endif
