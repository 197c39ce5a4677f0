/* Arguments of calls that are written as tags: see SCHEMA_TAGGED. What is built here is what
 * server/oai/tool_tags.c reads. */
#include <string.h>

#include "base/json.h"
#include "constrain/constrain.h"
#include "constrain/regex.h"
#include "constrain/schema_int.h"

#define PARAMETER_CLOSES "</parameter>"

bool constrain_is_text(const cJSON *schema) {
    const cJSON *type = json_get(schema, "type"), *values = json_get(schema, "enum"), *child;
    if (type != NULL) return cJSON_IsString(type) && strcmp(type->valuestring, "string") == 0;
    if (!cJSON_IsArray(values) || values->child == NULL)
        return cJSON_IsString(json_get(schema, "const"));
    cJSON_ArrayForEach(child, values) {
        if (!cJSON_IsString(child)) return false;
    }
    return true;
}

/* Builds the strings that are read as they are. Behind MIXED tags, a string that reads as another
 * value is that value. */
static uint32_t texts_of(struct schema *s, bool mixed) {
    static const char closes[] = "[\\s\\S]*" PARAMETER_CLOSES "[\\s\\S]*";
    static const char values[] =
        "[ \\t\\r\\n]*([{\\[][\\s\\S]*|(true|True|false|False|null|None|-?(0|[1-9][0-9]*)"
        "(\\.[0-9]+)?([eE][-+]?[0-9]+)?)[ \\t\\r\\n]*)";
    struct fault fault = {0};
    uint32_t closed = NODE_NONE, value = NODE_NONE;
    int rc = regex_compile(s->pool, closes, strlen(closes), REGEX_WHOLE, &closed, &fault);
    if (rc == 0 && mixed)
        rc = regex_compile(s->pool, values, strlen(values), REGEX_WHOLE, &value, &fault);
    if (rc != 0) return NODE_NONE; /* the pool's error: the expressions are right */
    return node_and2(s->pool, s->nodes->any_text,
                     node_not(s->pool, node_alt2(s->pool, closed, value)));
}

uint32_t schema_tag_text(struct schema *s, uint32_t content) {
    bool mixed = s->form == SCHEMA_MIXED;
    if (s->texts[mixed] == NODE_NONE) s->texts[mixed] = texts_of(s, mixed);
    return node_live(s->pool, node_and2(s->pool, content, s->texts[mixed]));
}

uint32_t schema_tag(struct schema *s, const char *name, uint32_t value) {
    static const char opens[] = "<parameter=", begins[] = ">\n",
                      closes[] = "\n" PARAMETER_CLOSES "\n";
    struct node_pool *pool = s->pool;
    size_t size;
    const char *text = schema_text(s, name, &size);
    if (value == NODE_NONE || text == NULL) return NODE_NONE;
    if (memchr(text, '>', size) != NULL)
        return schema_refuse(s, ERR_UNSUPPORTED, NULL, NULL,
                             "a name with '>' cannot be written as a tag");
    value = node_seq(pool, value, node_text(pool, closes, sizeof closes - 1));
    value = node_seq3(pool, node_text(pool, text, size), node_text(pool, begins, sizeof begins - 1),
                      value);
    return node_seq(pool, node_text(pool, opens, sizeof opens - 1), value);
}
