/* JSON to values. */
#ifndef KEEPD_TEXT_JINJA_JSON_H
#define KEEPD_TEXT_JINJA_JSON_H

#include <cjson/cJSON.h>

#include "text/jinja/value.h"

/* `marked`: its strings and keys came from the request. Strings are borrowed from the tree, which
 * must outlive the render, unless `copies`. */
int jinja_from_json(struct jinja_run *run, const cJSON *node, bool marked, bool copies,
                    struct jinja_value *out);
int jinja_json_string(struct jinja_run *run, const char *s, bool marked, bool copies,
                      struct jinja_value *out);
/* json.loads(); what came from the request stays marked. */
int jinja_json_parse(struct jinja_run *run, const struct jinja_value *source,
                     struct jinja_value *out);

#endif
