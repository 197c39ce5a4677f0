/* Values as text: Python's str and repr, and JSON as json.dumps writes it. Templates print lists
 * and numbers into prompts, so every quote, escape and digit has to be Python's. */
#include "text/jinja/print.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/jinja/ast.h"
#include "text/jinja/builtins.h"
#include "text/jinja/unicode.h"

/* The shortest digits that read back, as Python lays them out: fixed from 1e-4 to 1e16. */
void jinja_float_repr(double f, char out[JINJA_FLOAT_BYTES]) {
    if (!isfinite(f)) {
        snprintf(out, JINJA_FLOAT_BYTES, "%s", isnan(f) ? "nan" : f > 0 ? "inf" : "-inf");
        return;
    }
    char digits[32];
    for (int precision = 0; precision <= 16; precision++) {
        snprintf(digits, sizeof digits, "%.*e", precision, f);
        if (strtod(digits, NULL) == f) break;
    }
    char *e = strchr(digits, 'e');
    int exponent = atoi(e + 1);
    if (exponent < -4 || exponent >= 16) { /* "1e+16" and "1e-05" are C's layout too */
        snprintf(out, JINJA_FLOAT_BYTES, "%s", digits);
        return;
    }
    const char *point = strchr(digits, '.');
    int decimals = (point ? (int)(e - point) - 1 : 0) - exponent;
    snprintf(out, JINJA_FLOAT_BYTES, "%.*f", decimals < 1 ? 1 : decimals, f);
}

static int print_int(struct jinja_run *run, struct jinja_text *text, int64_t i) {
    char digits[24];
    snprintf(digits, sizeof digits, "%" PRId64, i);
    return jinja_text_puts(run, text, digits);
}

static int print_float(struct jinja_run *run, struct jinja_text *text, double f) {
    char digits[JINJA_FLOAT_BYTES];
    jinja_float_repr(f, digits);
    return jinja_text_puts(run, text, digits);
}

static int print_escape(struct jinja_run *run, struct jinja_text *text, uint32_t code,
                        bool marked) {
    char escape[16];
    if (code == '\n' || code == '\r' || code == '\t')
        snprintf(escape, sizeof escape, "\\%c", code == '\n' ? 'n' : code == '\r' ? 'r' : 't');
    else if (code < 0x100)
        snprintf(escape, sizeof escape, "\\x%02x", (unsigned)code);
    else if (code < 0x10000)
        snprintf(escape, sizeof escape, "\\u%04x", (unsigned)code);
    else
        snprintf(escape, sizeof escape, "\\U%08x", (unsigned)code);
    return jinja_text_add(run, text, escape, strlen(escape), marked);
}

static int repr_str(struct jinja_run *run, struct jinja_text *text, const struct jinja_value *s) {
    bool single = s->size && memchr(jinja_str_data(s), '\'', s->size);
    bool twice = s->size && memchr(jinja_str_data(s), '"', s->size);
    char quote = single && !twice ? '"' : '\'';
    struct jinja_cursor c;
    jinja_cursor_open(&c, s);
    int rc = jinja_charge_chars(run, s->size);
    if (!rc) rc = jinja_text_add(run, text, &quote, 1, false);
    while (!rc && jinja_cursor_step(&c)) {
        if (c.code == (unsigned char)quote || c.code == '\\')
            rc = jinja_text_add(run, text, "\\", 1, c.marked);
        if (rc) break;
        if (jinja_is_printable(c.code))
            rc = jinja_text_add(run, text, s->text->data + c.at, c.length, c.marked);
        else
            rc = print_escape(run, text, c.code, c.marked);
    }
    return rc ? rc : jinja_text_add(run, text, &quote, 1, false);
}

static int repr_safe(struct jinja_run *run, struct jinja_text *text, const struct jinja_value *s) {
    int rc = jinja_text_puts(run, text, "Markup(");
    if (!rc) rc = repr_str(run, text, s);
    return rc ? rc : jinja_text_puts(run, text, ")");
}

static int repr_items(struct jinja_run *run, struct jinja_text *text, const struct jinja_list *list,
                      const char *open, const char *close) {
    int rc = jinja_text_puts(run, text, open);
    for (uint32_t i = 0; i < list->count && !rc; i++) {
        if (i) rc = jinja_text_puts(run, text, ", ");
        if (!rc) rc = jinja_print_repr(run, text, &list->items[i]);
    }
    return rc ? rc : jinja_text_puts(run, text, close);
}

static int repr_list(struct jinja_run *run, struct jinja_text *text, const struct jinja_value *v) {
    const struct jinja_list *list = v->list;
    char label[160];
    switch (v->kind) {
    case JINJA_LIST:
        return repr_items(run, text, list, "[", "]");
    case JINJA_TUPLE:
        return repr_items(run, text, list, "(", list->count == 1 ? ",)" : ")");
    case JINJA_VIEW:
        snprintf(label, sizeof label, "%s([", list->label);
        return repr_items(run, text, list, label, "])");
    case JINJA_RANGE:
        snprintf(label, sizeof label, "range(%" PRId64 ", %" PRId64, list->first, list->end);
        if (list->step != 1)
            snprintf(label + strlen(label), sizeof label - strlen(label), ", %" PRId64, list->step);
        strcat(label, ")");
        return jinja_text_puts(run, text, label);
    default:
        return jinja_text_puts(run, text, "<generator object>");
    }
}

static int repr_dict(struct jinja_run *run, struct jinja_text *text,
                     const struct jinja_dict *dict) {
    int rc = jinja_text_puts(run, text, "{");
    for (uint32_t i = 0; i < dict->count && !rc; i++) {
        if (i) rc = jinja_text_puts(run, text, ", ");
        if (!rc) rc = jinja_print_repr(run, text, &dict->pairs[i].key);
        if (!rc) rc = jinja_text_puts(run, text, ": ");
        if (!rc) rc = jinja_print_repr(run, text, &dict->pairs[i].value);
    }
    return rc ? rc : jinja_text_puts(run, text, "}");
}

static int repr_deep(struct jinja_run *run, struct jinja_text *text, const struct jinja_value *v) {
    int rc = jinja_enter(run);
    if (rc) return rc;
    if (jinja_is_listlike(v)) {
        rc = repr_list(run, text, v);
    } else {
        bool is_namespace = v->kind == JINJA_NAMESPACE;
        if (is_namespace) rc = jinja_text_puts(run, text, "<Namespace ");
        if (!rc) rc = repr_dict(run, text, v->dict);
        if (!rc && is_namespace) rc = jinja_text_puts(run, text, ">");
    }
    jinja_leave(run);
    return rc;
}

static int repr_macro(struct jinja_run *run, struct jinja_text *text, const struct jinja_value *v) {
    struct jinja_value name;
    int rc = jinja_macro_name(run, v, &name);
    if (!rc) rc = jinja_text_puts(run, text, "<Macro ");
    if (!rc) rc = jinja_print_repr(run, text, &name);
    return rc ? rc : jinja_text_puts(run, text, ">");
}

int jinja_print_repr(struct jinja_run *run, struct jinja_text *text, const struct jinja_value *v) {
    switch (v->kind) {
    case JINJA_MISSING:
    case JINJA_UNDEFINED:
        return jinja_text_puts(run, text, "Undefined");
    case JINJA_NONE:
        return jinja_text_puts(run, text, "None");
    case JINJA_BOOL:
        return jinja_text_puts(run, text, v->boolean ? "True" : "False");
    case JINJA_INT:
        return print_int(run, text, v->integer);
    case JINJA_FLOAT:
        return print_float(run, text, v->real);
    case JINJA_BIG:
        return jinja_text_add_str(run, text, v);
    case JINJA_STR:
        return v->flags & JINJA_SAFE ? repr_safe(run, text, v) : repr_str(run, text, v);
    case JINJA_MACRO:
        return repr_macro(run, text, v);
    case JINJA_FUNCTION:
        return jinja_text_puts(run, text, "<built-in function>");
    case JINJA_LOOP:
        return jinja_text_puts(run, text, "<LoopContext>");
    default:
        return repr_deep(run, text, v);
    }
}

int jinja_print(struct jinja_run *run, struct jinja_text *text, const struct jinja_value *v) {
    if (v->kind == JINJA_STR) return jinja_text_add_str(run, text, v);
    if (v->kind == JINJA_UNDEFINED || v->kind == JINJA_MISSING) return 0;
    return jinja_print_repr(run, text, v);
}

int jinja_to_str(struct jinja_run *run, const struct jinja_value *v, struct jinja_value *out) {
    if (v->kind == JINJA_STR) {
        *out = *v;
        return 0;
    }
    if (v->kind == JINJA_UNDEFINED) {
        *out = jinja_str_empty();
        return 0;
    }
    struct jinja_text *text;
    int rc = jinja_text_open(run, 0, &text);
    if (!rc) rc = jinja_print(run, text, v);
    if (!rc) *out = jinja_text_value(text);
    return rc;
}

/* How json.dumps writes a character; NULL: as it is. */
static const char *json_escape(uint32_t code, bool ensure_ascii, char escape[16]) {
    static const char from[] = "\"\\\n\r\t\b\f", to[] = "\"\\nrtbf";
    const char *known = code && code < 0x80 ? strchr(from, (int)code) : NULL;
    if (known)
        snprintf(escape, 16, "\\%c", to[known - from]);
    else if (code < 0x20 || (ensure_ascii && code >= 0x7f && code < 0x10000))
        snprintf(escape, 16, "\\u%04x", (unsigned)code);
    else if (ensure_ascii && code >= 0x10000)
        snprintf(escape, 16, "\\u%04x\\u%04x", (unsigned)(0xd800 + ((code - 0x10000) >> 10)),
                 (unsigned)(0xdc00 + (code & 0x3ff)));
    else
        return NULL;
    return escape;
}

static int json_str(struct jinja_run *run, struct jinja_text *text, const struct jinja_value *s,
                    const struct jinja_json *json) {
    struct jinja_cursor c;
    jinja_cursor_open(&c, s);
    int rc = jinja_charge_bytes(run, s->size);
    if (!rc) rc = jinja_text_puts(run, text, "\"");
    uint32_t plain = c.next; /* where the characters begin that need no escape */
    while (!rc && jinja_cursor_step(&c)) {
        char bytes[16];
        const char *escape = json_escape(c.code, json->ensure_ascii, bytes);
        if (!escape) continue;
        struct jinja_value before = jinja_str_view(s, plain - s->begin, c.at - s->begin);
        rc = jinja_text_add_str(run, text, &before);
        if (!rc) rc = jinja_text_add(run, text, escape, strlen(escape), c.marked);
        plain = c.next;
    }
    struct jinja_value rest = jinja_str_view(s, plain - s->begin, s->size);
    if (!rc) rc = jinja_text_add_str(run, text, &rest);
    return rc ? rc : jinja_text_puts(run, text, "\"");
}

static int json_float(struct jinja_run *run, struct jinja_text *text, double f) {
    if (isnan(f)) return jinja_text_puts(run, text, "NaN");
    if (isinf(f)) return jinja_text_puts(run, text, f > 0 ? "Infinity" : "-Infinity");
    return print_float(run, text, f);
}

static int json_newline(struct jinja_run *run, struct jinja_text *text,
                        const struct jinja_json *json, int level) {
    if (!json->indents) return 0;
    int rc = jinja_text_puts(run, text, "\n");
    return rc ? rc : jinja_text_pad(run, text, &json->indent, level);
}

static int json_value(struct jinja_run *run, struct jinja_text *text, const struct jinja_value *v,
                      const struct jinja_json *json, int level);

static int json_list(struct jinja_run *run, struct jinja_text *text, const struct jinja_list *list,
                     const struct jinja_json *json, int level) {
    if (!list->count) return jinja_text_puts(run, text, "[]");
    int rc = jinja_text_puts(run, text, "[");
    for (uint32_t i = 0; i < list->count && !rc; i++) {
        if (i) rc = jinja_text_add_str(run, text, &json->item_separator);
        if (!rc) rc = json_newline(run, text, json, level + 1);
        if (!rc) rc = json_value(run, text, &list->items[i], json, level + 1);
    }
    if (!rc) rc = json_newline(run, text, json, level);
    return rc ? rc : jinja_text_puts(run, text, "]");
}

/* Keys that are no strings are written as the JSON text of their value. */
static int json_key(struct jinja_run *run, struct jinja_text *text, const struct jinja_value *key,
                    const struct jinja_json *json) {
    if (key->kind == JINJA_STR) return json_str(run, text, key, json);
    if (key->kind != JINJA_NONE && !jinja_is_number(key))
        return jinja_fail(run, ERR_INVALID, "keys must be str, int, float, bool or None, not %s",
                          jinja_type_name(key));
    int rc = jinja_text_puts(run, text, "\"");
    if (!rc) rc = json_value(run, text, key, json, 0);
    return rc ? rc : jinja_text_puts(run, text, "\"");
}

/* The entries in the order they are written. */
static int json_order(struct jinja_run *run, const struct jinja_dict *dict, bool sorted,
                      struct jinja_list **keys, struct jinja_list **values) {
    struct jinja_value k, v;
    int rc = jinja_list_open(run, JINJA_LIST, dict->count, &k);
    if (!rc) rc = jinja_list_open(run, JINJA_LIST, dict->count, &v);
    for (uint32_t i = 0; i < dict->count && !rc; i++) {
        rc = jinja_list_add(run, k.list, &dict->pairs[i].key);
        if (!rc) rc = jinja_list_add(run, v.list, &dict->pairs[i].value);
    }
    if (!rc && sorted) rc = jinja_sort(run, v.list, k.list, false);
    if (rc) return rc;
    *keys = k.list;
    *values = v.list;
    return 0;
}

static int json_dict(struct jinja_run *run, struct jinja_text *text, const struct jinja_dict *dict,
                     const struct jinja_json *json, int level) {
    struct jinja_list *keys, *values;
    if (!dict->count) return jinja_text_puts(run, text, "{}");
    int rc = json_order(run, dict, json->sort_keys, &keys, &values);
    if (!rc) rc = jinja_text_puts(run, text, "{");
    for (uint32_t i = 0; !rc && i < keys->count; i++) {
        if (i) rc = jinja_text_add_str(run, text, &json->item_separator);
        if (!rc) rc = json_newline(run, text, json, level + 1);
        if (!rc) rc = json_key(run, text, &keys->items[i], json);
        if (!rc) rc = jinja_text_add_str(run, text, &json->key_separator);
        if (!rc) rc = json_value(run, text, &values->items[i], json, level + 1);
    }
    if (!rc) rc = json_newline(run, text, json, level);
    return rc ? rc : jinja_text_puts(run, text, "}");
}

static int json_value(struct jinja_run *run, struct jinja_text *text, const struct jinja_value *v,
                      const struct jinja_json *json, int level) {
    int rc = 0;
    switch (v->kind) {
    case JINJA_NONE:
        return jinja_text_puts(run, text, "null");
    case JINJA_BOOL:
        return jinja_text_puts(run, text, v->boolean ? "true" : "false");
    case JINJA_INT:
        return print_int(run, text, v->integer);
    case JINJA_BIG:
        return jinja_text_add_str(run, text, v);
    case JINJA_FLOAT:
        return json_float(run, text, v->real);
    case JINJA_STR:
        return json_str(run, text, v, json);
    case JINJA_LIST:
    case JINJA_TUPLE:
    case JINJA_DICT:
        rc = jinja_enter(run);
        if (rc) return rc;
        if (v->kind == JINJA_DICT)
            rc = json_dict(run, text, v->dict, json, level);
        else
            rc = json_list(run, text, v->list, json, level);
        jinja_leave(run);
        return rc;
    default:
        return jinja_fail(run, ERR_INVALID, "Object of type %s is not JSON serializable",
                          jinja_type_name(v));
    }
}

int jinja_print_json(struct jinja_run *run, struct jinja_text *text, const struct jinja_value *v,
                     const struct jinja_json *json) {
    return json_value(run, text, v, json, 0);
}
