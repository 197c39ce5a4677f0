/* Arguments of calls that are written as tags: see SCHEMA_TAGGED. The texts built here must be
 * those that server/oai/tool_tags.c reads. */
#include <string.h>

#include "base/json.h"
#include "constrain/constrain.h"
#include "constrain/regex.h"
#include "constrain/schema_int.h"

#define BLANKS "[ \\t\\r\\n]*"

#define TYPE_STEPS 1024 /* how many schemas and definitions constrain_types visits at most */

struct look {
    const cJSON *root;
    int left; /* steps that are left; a schema visited after the last has all types */
};

/* Returns the definition that a $ref names. NULL: the $ref has another form, or names nothing. */
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

static unsigned types_of_schema(struct look *look, const cJSON *schema);

/* Returns the types that all schemas of a list allow or, without `all`, those that at least one
 * allows. */
static unsigned types_of_list(struct look *look, const cJSON *schemas, bool all) {
    unsigned types = all ? CONSTRAIN_TYPES_ALL : 0;
    const cJSON *child;
    if (!cJSON_IsArray(schemas) || schemas->child == NULL) return CONSTRAIN_TYPES_ALL;
    cJSON_ArrayForEach(child, schemas) {
        unsigned one = types_of_schema(look, child);
        types = all ? types & one : types | one;
    }
    return types;
}

/* Returns the type with this name; all types for another name. */
static unsigned type_named(const char *name) {
    static const struct {
        const char *name;
        unsigned type;
    } types[] = {{"null", CONSTRAIN_TYPE_NULL},      {"boolean", CONSTRAIN_TYPE_BOOLEAN},
                 {"integer", CONSTRAIN_TYPE_NUMBER}, {"number", CONSTRAIN_TYPE_NUMBER},
                 {"string", CONSTRAIN_TYPE_STRING},  {"array", CONSTRAIN_TYPE_ARRAY},
                 {"object", CONSTRAIN_TYPE_OBJECT}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (strcmp(types[i].name, name) == 0) return types[i].type;
    return CONSTRAIN_TYPES_ALL;
}

static unsigned types_of_keyword(const cJSON *type) {
    unsigned types = 0;
    const cJSON *child;
    if (cJSON_IsString(type)) return type_named(type->valuestring);
    if (!cJSON_IsArray(type) || type->child == NULL) return CONSTRAIN_TYPES_ALL;
    cJSON_ArrayForEach(child, type) {
        types |= cJSON_IsString(child) ? type_named(child->valuestring) : CONSTRAIN_TYPES_ALL;
    }
    return types;
}

static unsigned types_of_values(const cJSON *values) {
    unsigned types = 0;
    const cJSON *child;
    if (!cJSON_IsArray(values) || values->child == NULL) return CONSTRAIN_TYPES_ALL;
    cJSON_ArrayForEach(child, values) types |= type_named(json_type_name(child));
    return types;
}

static unsigned types_of_schema(struct look *look, const cJSON *schema) {
    const cJSON *ref = json_get(schema, "$ref"), *only = json_get(schema, "const");
    if (!cJSON_IsObject(schema) || look->left-- <= 0) return CONSTRAIN_TYPES_ALL;
    unsigned types = types_of_keyword(json_get(schema, "type")) &
                     types_of_values(json_get(schema, "enum")) &
                     types_of_list(look, json_get(schema, "allOf"), true) &
                     types_of_list(look, json_get(schema, "anyOf"), false) &
                     types_of_list(look, json_get(schema, "oneOf"), false);
    if (only != NULL) types &= type_named(json_type_name(only));
    if (cJSON_IsString(ref)) types &= types_of_schema(look, definition(look, ref->valuestring));
    return types;
}

unsigned constrain_types(const cJSON *root, const cJSON *schema) {
    struct look look = {.root = root, .left = TYPE_STEPS};
    return types_of_schema(&look, schema);
}

/* Writes the texts that are read as a value of one of the types rather than as a string:
 * alternatives of a regular expression, each after a '|'. */
static void write_values(struct buf *out, unsigned types) {
    static const struct {
        unsigned type;
        const char *pattern;
    } values[] = {
        {CONSTRAIN_TYPE_NULL, "(null|None)" BLANKS},
        {CONSTRAIN_TYPE_BOOLEAN, "([Tt]rue|[Ff]alse)" BLANKS},
        {CONSTRAIN_TYPE_NUMBER, "-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][-+]?[0-9]+)?" BLANKS},
        {CONSTRAIN_TYPE_ARRAY, "[\\[(][\\s\\S]*"},
        {CONSTRAIN_TYPE_OBJECT, "\\{[\\s\\S]*"},
    };
    if (types == CONSTRAIN_TYPES_ALL) buf_str(out, "|" BLANKS "[\"'][\\s\\S]*");
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        if (types & values[i].type) buf_fmt(out, "|" BLANKS "%s", values[i].pattern);
}

static uint32_t node_of(struct schema *s, const char *text) {
    return node_text(s->pool, text, strlen(text));
}

/* Builds strings between the marks around raw text. */
static uint32_t raw_text(struct schema *s, uint32_t content) {
    uint32_t end = node_of(s, s->tags->raw[1]), any = s->nodes->any_text;
    uint32_t without = node_not(s->pool, node_seq3(s->pool, any, end, any));
    uint32_t inner = node_live(s->pool, node_and2(s->pool, content, without));
    return node_seq3(s->pool, node_of(s, s->tags->raw[0]), inner, end);
}

/* Builds texts with a tag in them that ends a value or, where values nest, begins one. */
static uint32_t texts_with_tags(struct schema *s) {
    const uint32_t any = s->nodes->any_text;
    const char *tag = s->tags->item != NULL ? s->tags->open : s->tags->close;
    return node_seq3(s->pool, any, node_of(s, tag), any);
}

/* Builds the strings that are read back as strings after a tag whose value has one of these types.
 */
static uint32_t texts_of(struct schema *s, unsigned types) {
    struct fault fault = {0};
    uint32_t any = s->nodes->any_text, value = NODE_NONE;
    uint32_t closed = texts_with_tags(s);
    if (s->tags->raw[0] != NULL)
        closed = node_alt2(s->pool, closed, node_seq(s->pool, node_of(s, s->tags->raw[0]), any));
    struct buf values;
    int rc = 0;
    buf_open(&values, 4096);
    write_values(&values, types);
    if (values.failed) s->pool->rc = ERR_NOMEM;
    if (!values.failed && types != CONSTRAIN_TYPE_STRING)
        rc = regex_compile(s->pool, values.data + 1, values.size - 1, REGEX_WHOLE, &value, &fault);
    buf_close(&values);
    if (rc != 0 || s->pool->rc != 0) return NODE_NONE; /* the expressions are valid */
    return node_and2(s->pool, s->nodes->any_text,
                     node_not(s->pool, node_alt2(s->pool, closed, value)));
}

uint32_t schema_tag_text(struct schema *s, uint32_t content) {
    uint32_t *texts = &s->texts[s->types & CONSTRAIN_TYPES_ALL];
    if (*texts == NODE_NONE) *texts = texts_of(s, s->types);
    uint32_t plain = node_live(s->pool, node_and2(s->pool, content, *texts));
    /* strings that all look like other values may have quotes, where quotes mean a string */
    if (plain == NODE_NONE && s->types == CONSTRAIN_TYPES_ALL)
        plain = json_string(s->nodes,
                            node_and2(s->pool, content, node_not(s->pool, texts_with_tags(s))));
    return s->tags->raw[0] != NULL ? node_alt2(s->pool, plain, raw_text(s, content)) : plain;
}

const char *schema_tag_fault(const struct constrain_tags *tags, const char *name) {
    const size_t open = strlen(tags->open);
    if (strstr(name, tags->named) != NULL) return tags->named;
    /* behind the tag's beginning, such a name would make it the end of a tag */
    const bool ends = tags->behind_close != NULL && strncmp(tags->close, tags->open, open) == 0 &&
                      strncmp(name, tags->close + open, strlen(tags->close + open)) == 0;
    return ends ? tags->close + open : NULL;
}

uint32_t schema_tag(struct schema *s, const char *name, const char *mark, uint32_t value) {
    const struct constrain_tags *tags = s->tags;
    struct node_pool *pool = s->pool;
    size_t size;
    const char *text = schema_text(s, name, &size);
    if (value == NODE_NONE || text == NULL) return NODE_NONE;
    const char *fault = schema_tag_fault(tags, name);
    if (fault != NULL)
        return schema_refuse(s, ERR_UNSUPPORTED, NULL, NULL,
                             "the name '%.64s' cannot be written as a tag, because of its '%s'",
                             name, fault);
    uint32_t close = node_of(s, tags->close);
    if (tags->behind_close != NULL)
        close = node_seq3(pool, close, node_text(pool, text, size), node_of(s, tags->behind_close));
    uint32_t end = node_seq3(pool, node_of(s, tags->line), close, node_of(s, tags->after));
    uint32_t begin =
        node_seq3(pool, node_of(s, tags->gap), node_of(s, mark), node_of(s, tags->line));
    uint32_t named = node_seq3(pool, node_of(s, tags->open), node_text(pool, text, size),
                               node_of(s, tags->named));
    return node_seq3(pool, named, begin, node_seq(pool, value, end));
}

#define TYPE(text)                                                                                 \
    {                                                                                              \
        .type = cJSON_String, .valuestring = (char[]){text}, .string = (char[]) {                  \
            "type"                                                                                 \
        }                                                                                          \
    }
static cJSON type_names[CONSTRAIN_TYPE_COUNT] = {TYPE("null"),   TYPE("boolean"), TYPE("number"),
                                                 TYPE("string"), TYPE("array"),   TYPE("object")};
const cJSON schema_of_type[CONSTRAIN_TYPE_COUNT] = {
    {.type = cJSON_Object, .child = &type_names[0]},
    {.type = cJSON_Object, .child = &type_names[1]},
    {.type = cJSON_Object, .child = &type_names[2]},
    {.type = cJSON_Object, .child = &type_names[3]},
    {.type = cJSON_Object, .child = &type_names[4]},
    {.type = cJSON_Object, .child = &type_names[5]},
};
