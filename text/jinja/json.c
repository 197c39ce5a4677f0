#include "text/jinja/json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "text/jinja/ops.h"
#include "text/jinja/text.h"

int jinja_json_string(struct jinja_run *run, const char *s, bool marked, bool copies,
                      struct jinja_value *out) {
    size_t size = strlen(s);
    if (strstr(s, JSON_NUL)) {
        char *text = jinja_alloc(run, size, 1);
        if (!text) return jinja_fail_memory(run);
        json_text(s, text, &size);
        s = text;
    }
    if (!utf8_valid(s, size)) return jinja_fail(run, ERR_INVALID, "a string is not UTF-8");
    return copies ? jinja_str(run, s, size, marked, out)
                  : jinja_str_borrow(run, s, size, marked, out);
}

/* The text decides, as in Python: 1 is an int, 1.0 a float. A tree made by hand has no text. */
static int number(struct jinja_run *run, const cJSON *node, struct jinja_value *out) {
    const char *text = node->valuestring;
    if (!text) {
        double f = node->valuedouble;
        bool whole = trunc(f) == f && fabs(f) < 9007199254740992.0;
        *out = whole ? jinja_int((int64_t)f) : jinja_float(f);
        return 0;
    }
    bool integer = strspn(text, "-0123456789") == strlen(text);
    if (integer) return jinja_int_from_digits(run, text, strlen(text), out);
    *out = jinja_float(strtod(text, NULL));
    return 0;
}

static int array(struct jinja_run *run, const cJSON *node, bool marked, bool copies,
                 struct jinja_value *out) {
    const cJSON *child;
    struct jinja_value item;
    int rc = jinja_list_open(run, JINJA_LIST, 0, out);
    cJSON_ArrayForEach(child, node) {
        if (!rc) rc = jinja_from_json(run, child, marked, copies, &item);
        if (!rc) rc = jinja_list_add(run, out->list, &item);
        if (rc) break;
    }
    return rc;
}

static int object(struct jinja_run *run, const cJSON *node, bool marked, bool copies,
                  struct jinja_value *out) {
    const cJSON *child;
    struct jinja_value key, item;
    int rc = jinja_dict_open(run, JINJA_DICT, out);
    cJSON_ArrayForEach(child, node) {
        if (!rc)
            rc = jinja_json_string(run, child->string ? child->string : "", marked, copies, &key);
        if (!rc) rc = jinja_from_json(run, child, marked, copies, &item);
        if (!rc) rc = jinja_dict_set(run, out->dict, &key, &item);
        if (rc) break;
    }
    return rc;
}

int jinja_from_json(struct jinja_run *run, const cJSON *node, bool marked, bool copies,
                    struct jinja_value *out) {
    int rc = jinja_enter(run);
    if (rc) return rc;
    switch (node->type & 0xff) {
    case cJSON_False:
    case cJSON_True:
        *out = jinja_bool((node->type & 0xff) == cJSON_True);
        break;
    case cJSON_Number:
        rc = number(run, node, out);
        break;
    case cJSON_String:
        rc =
            jinja_json_string(run, node->valuestring ? node->valuestring : "", marked, copies, out);
        break;
    case cJSON_Array:
        rc = array(run, node, marked, copies, out);
        break;
    case cJSON_Object:
        rc = object(run, node, marked, copies, out);
        break;
    default:
        *out = jinja_none();
    }
    jinja_leave(run);
    return rc;
}

int jinja_json_parse(struct jinja_run *run, const struct jinja_value *source,
                     struct jinja_value *out) {
    static const struct json_limits limits = {
        .bytes = JINJA_TEXT_MAX, .depth = 128, .nuls = true, .nodes = JINJA_STEPS_MAX / 40};
    struct fault fault = {0};
    cJSON *tree;
    int rc = jinja_charge_bytes(run, source->size);
    if (rc) return rc;
    rc = json_parse(jinja_str_data(source), source->size, &limits, &tree, &fault);
    if (rc)
        return jinja_fail(run, rc == ERR_MALFORMED ? ERR_INVALID : rc, "from_json: %s", fault.text);
    rc = jinja_from_json(run, tree, jinja_str_marked(source), true, out);
    json_free(tree);
    return rc;
}
