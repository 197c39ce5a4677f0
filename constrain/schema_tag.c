/* Arguments of calls that are written as tags: see SCHEMA_TAGGED. What is built here is what
 * server/oai/tool_tags.c reads. */
#include <string.h>

#include "base/json.h"
#include "constrain/constrain.h"
#include "constrain/regex.h"
#include "constrain/schema_int.h"

#define PARAMETER_CLOSES "</parameter>"

#define TEXT_STEPS 1024 /* schemas and definitions that are looked at for one answer */

struct look {
    const cJSON *root;
    int left; /* steps; a schema looked at after the last is no text */
};

/* Returns the definition that a $ref names; NULL: the $ref has another form, or nothing is there.
 */
static const cJSON *definition(struct look *look, const char *ref) {
    static const char *const places[] = {"$defs", "definitions"};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        const cJSON *all = json_get(look->root, places[i]), *child;
        size_t size = strlen(places[i]);
        if (strncmp(ref, "#/", 2) != 0 || strncmp(ref + 2, places[i], size) != 0 ||
            ref[2 + size] != '/' || !cJSON_IsObject(all))
            continue;
        cJSON_ArrayForEach(child, all) {
            if (look->left-- <= 0) return NULL;
            if (strcmp(child->string, ref + 3 + size) == 0) return child;
        }
    }
    return NULL;
}

static bool is_text(struct look *look, const cJSON *schema);

/* Returns whether all schemas of a list are texts, or, without `all`, whether one is. */
static bool are_texts(struct look *look, const cJSON *schemas, bool all) {
    const cJSON *child;
    if (!cJSON_IsArray(schemas) || schemas->child == NULL) return false;
    cJSON_ArrayForEach(child, schemas) {
        if (is_text(look, child) != all) return !all;
    }
    return all;
}

static bool are_strings(const cJSON *values) {
    const cJSON *child;
    cJSON_ArrayForEach(child, values) {
        if (!cJSON_IsString(child)) return false;
    }
    return cJSON_IsArray(values) && values->child != NULL;
}

static bool is_text(struct look *look, const cJSON *schema) {
    const cJSON *type = json_get(schema, "type"), *ref = json_get(schema, "$ref");
    if (schema == NULL || look->left-- <= 0) return false;
    if (cJSON_IsArray(type) && type->child != NULL && type->child->next == NULL) type = type->child;
    if (type != NULL) return cJSON_IsString(type) && strcmp(type->valuestring, "string") == 0;
    return are_strings(json_get(schema, "enum")) || cJSON_IsString(json_get(schema, "const")) ||
           (cJSON_IsString(ref) && is_text(look, definition(look, ref->valuestring))) ||
           are_texts(look, json_get(schema, "allOf"), false) ||
           are_texts(look, json_get(schema, "anyOf"), true) ||
           are_texts(look, json_get(schema, "oneOf"), true);
}

bool constrain_is_text(const cJSON *root, const cJSON *schema) {
    struct look look = {.root = root, .left = TEXT_STEPS};
    return is_text(&look, schema);
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
