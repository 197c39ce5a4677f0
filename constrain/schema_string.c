/* Strings of a schema. Lengths alone are counted on the JSON text, where any escape may stand;
 * other conditions are expressions over characters that are quoted afterwards. */
#include <string.h>

#include "base/json.h"
#include "constrain/formats.h"
#include "constrain/regex.h"
#include "constrain/schema_int.h"
#include "constrain/unicode.h"

#define LOCAL_PART_MAX 64

void schema_count(struct schema *s, const struct conjunction *c, const char *keyword, bool smallest,
                  uint32_t *value) {
    for (int i = 0; i < c->count; i++) {
        const cJSON *node = json_get(c->list[i].schema, keyword);
        int64_t count;
        if (node == NULL) continue;
        if (json_node_int(node, 0, INT64_MAX, &count) != 0) {
            schema_refuse(s, ERR_INVALID, c->list[i].schema, keyword,
                          "expected an integer of at least 0");
            return;
        }
        if (count > CONSTRAIN_REPEAT_MAX) {
            /* An answer could not reach such a large upper bound, so it is dropped. */
            if (smallest) continue;
            schema_refuse(s, ERR_LIMIT, c->list[i].schema, keyword, "expected at most %d",
                          CONSTRAIN_REPEAT_MAX);
            return;
        }
        if (smallest ? count < *value : count > *value) *value = (uint32_t)count;
    }
}

uint32_t schema_pattern(struct schema *s, const cJSON *at, const char *keyword,
                        const char *pattern) {
    struct fault fault = {0};
    uint32_t node = NODE_NONE;
    size_t size;
    const char *text = schema_text(s, pattern, &size);
    if (text == NULL) return NODE_NONE;
    int rc = regex_compile(s->pool, text, size, REGEX_WITHIN, &node, &fault);
    if (rc != 0 && s->pool->rc == 0)
        schema_refuse(s, rc, at, keyword, "%s", fault.code != 0 ? fault.text : err_text(rc));
    return node;
}

/* Builds the local part of an address: at most 64 characters, with dots only between others. A
 * conjunction of the two conditions would have the same strings, but needs many states. */
static uint32_t local_part(struct node_pool *pool) {
    static const char others[] = "!#$%&'*+/=?^_`{|}~-";
    struct byte_set set = {0};
    byte_set_range(&set, 'A', 'Z');
    byte_set_range(&set, 'a', 'z');
    byte_set_range(&set, '0', '9');
    for (const char *c = others; *c != '\0'; c++) byte_set_add(&set, (unsigned char)*c);
    uint32_t atom = node_bytes(pool, &set), dot = node_range(pool, '.', '.');
    uint32_t before = NODE_EMPTY, rest = node_option(pool, atom); /* with 0 and 1 characters left */
    for (int left = 2; left <= LOCAL_PART_MAX - 1; left++) {
        uint32_t dotted = node_seq3(pool, dot, atom, before);
        before = rest;
        rest = node_option(pool, node_alt2(pool, node_seq(pool, atom, rest), dotted));
    }
    return node_seq(pool, atom, rest);
}

static uint32_t format_node(struct schema *s, const cJSON *schema, const cJSON *format) {
    const char *pattern = NULL;
    struct fault fault = {0};
    uint32_t node = NODE_NONE, begin = NODE_EMPTY;
    if (!cJSON_IsString(format))
        return schema_refuse(s, ERR_INVALID, schema, "format", "expected a string");
    switch (format_find(format->valuestring, &pattern)) {
    case FORMAT_UNKNOWN:
        return s->nodes->any_text;
    case FORMAT_EMAIL:
        begin = local_part(s->pool);
        break;
    case FORMAT_PATTERN:
        break;
    }
    int rc = regex_compile(s->pool, pattern, strlen(pattern), REGEX_WHOLE, &node, &fault);
    if (rc != 0 && s->pool->rc == 0) schema_refuse(s, rc, schema, "format", "%s", fault.text);
    return node_seq(s->pool, begin, node);
}

static uint32_t content_text(struct schema *s, const char *string) {
    size_t size;
    const char *text = schema_text(s, string, &size);
    return text != NULL ? node_text(s->pool, text, size) : NODE_NONE;
}

/* Builds the strings that a `not` excludes. */
static uint32_t excluded(struct schema *s, const cJSON * not ) {
    const cJSON *only = json_get(not, "const"), *pattern = json_get(not, "pattern"), *child;
    if (pattern != NULL) return schema_pattern(s, not, "pattern", pattern->valuestring);
    uint32_t list = node_list_open(s->pool);
    if (cJSON_IsString(only)) node_list_add(s->pool, content_text(s, only->valuestring));
    cJSON_ArrayForEach(child, json_get(not, "enum")) {
        if (cJSON_IsString(child)) node_list_add(s->pool, content_text(s, child->valuestring));
    }
    return node_list_alt(s->pool, list);
}

/* Builds all conditions on strings except lengths. *any: there is none. */
static uint32_t content_of(struct schema *s, const struct conjunction *c, bool *any) {
    uint32_t node = s->nodes->any_text;
    for (int i = 0; i < c->count && s->rc == 0; i++) {
        const cJSON *schema = c->list[i].schema, *pattern = json_get(schema, "pattern");
        const cJSON *format = json_get(schema, "format"), *not = json_get(schema, "not");
        if (pattern != NULL && !cJSON_IsString(pattern))
            return schema_refuse(s, ERR_INVALID, schema, "pattern", "expected a string");
        if (pattern != NULL)
            node = node_and2(s->pool, node,
                             schema_pattern(s, schema, "pattern", pattern->valuestring));
        if (format != NULL) node = node_and2(s->pool, node, format_node(s, schema, format));
        if (cJSON_IsObject(not ) && json_get(not, "type") == NULL && schema_not_is_plain(not ))
            node = node_and2(s->pool, node, node_not(s->pool, excluded(s, not )));
    }
    *any = node == s->nodes->any_text;
    return node;
}

/* Drops "any text" from a conjunction of patterns, which is simpler without it. */
static uint32_t without_any(struct schema *s, uint32_t node) {
    const struct node *n = node_at(s->pool, node);
    if (n->kind != NODE_KIND_AND || n->b != 2) return node;
    const uint32_t *children = node_children(s->pool, n);
    for (int i = 0; i < 2; i++)
        if (children[i] == s->nodes->any_text && node_at(s->pool, children[1 - i])->exact)
            return children[1 - i];
    return node;
}

uint32_t schema_content(struct schema *s, const struct conjunction *c) {
    uint32_t min = 0, max = NODE_ENDLESS;
    bool any;
    schema_count(s, c, "minLength", false, &min);
    schema_count(s, c, "maxLength", true, &max);
    uint32_t node = without_any(s, content_of(s, c, &any));
    if (s->rc != 0 || min > max) return NODE_NONE;
    if (min == 0 && max == NODE_ENDLESS) return node_live(s->pool, node);
    uint32_t length = node_repeat(s->pool, node_character(s->pool), min, max);
    return any ? length : node_live(s->pool, node_and2(s->pool, node, length));
}

uint32_t schema_string(struct schema *s, const struct conjunction *c) {
    uint32_t min = 0, max = NODE_ENDLESS;
    bool any;
    schema_count(s, c, "minLength", false, &min);
    schema_count(s, c, "maxLength", true, &max);
    (void)content_of(s, c, &any);
    if (s->rc != 0 || min > max) return NODE_NONE;
    if (!any || s->nodes->notation != NULL) {
        uint32_t content = schema_content(s, c);
        return content == NODE_NONE ? NODE_NONE : json_string(s->nodes, content);
    }
    uint32_t quotes = node_range(s->pool, '"', '"');
    return node_seq3(s->pool, quotes, node_repeat(s->pool, s->nodes->character, min, max), quotes);
}
