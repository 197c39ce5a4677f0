/* From schemas to expressions: everything above the single types. References, allOf, anyOf and
 * oneOf are resolved here: a schema becomes a conjunction of plain schemas, and alternatives are
 * distributed over it. A conjunction that occurs inside itself becomes a rule. */
#include "constrain/schema.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "constrain/number.h"
#include "constrain/schema_int.h"
#include "constrain/schema_refs.h"

#define ARENA_BYTES ((size_t)64 << 20)
#define MEMO_CHAINS 16384u
#define ONE_OF_MAX  256 /* all pairs of branches are compared */
#define NOT_ASKED   UINT32_MAX

/* ---- Faults ---- */

/* Appends the path of a node below `tree` to `path`; false: it is not there. */
static bool find_path(const cJSON *tree, const cJSON *node, char *path, size_t size, int depth) {
    size_t used = strlen(path);
    const cJSON *child;
    int index = 0;
    if (tree == node) return true;
    if (depth > JSON_MAX_DEPTH) return false;
    cJSON_ArrayForEach(child, tree) {
        if (cJSON_IsArray(tree))
            snprintf(path + used, size - used, "[%d]", index++);
        else
            snprintf(path + used, size - used, ".%s", child->string);
        if (find_path(child, node, path, size, depth + 1)) return true;
    }
    path[used] = '\0';
    return false;
}

uint32_t schema_refuse(struct schema *s, int rc, const cJSON *at, const char *keyword,
                       const char *format, ...) {
    char path[128], text[384];
    va_list args;
    if (s->rc != 0) return NODE_NONE;
    snprintf(path, sizeof path, "%s", s->field);
    if (at != NULL) find_path(s->root, at, path, sizeof path, 0);
    size_t used = strlen(path);
    if (keyword != NULL) snprintf(path + used, sizeof path - used, ".%s", keyword);
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    s->rc = fault_set(s->fault, rc, path, "%s", text);
    return NODE_NONE;
}

void *schema_alloc(struct schema *s, size_t count, size_t size) {
    void *memory = s->rc == 0 ? arena_alloc(&s->arena, count > 0 ? count : 1, size) : NULL;
    if (memory == NULL)
        schema_refuse(s, s->arena.full ? ERR_LIMIT : ERR_NOMEM, NULL, NULL,
                      "the schema needs too much memory");
    return memory;
}

const char *schema_text(struct schema *s, const char *string, size_t *size) {
    const char *text = s->rc == 0 ? json_arena_text(&s->arena, string, size) : NULL;
    if (text == NULL) schema_refuse(s, ERR_LIMIT, NULL, NULL, "the schema needs too much memory");
    return text;
}

/* ---- Conjunctions ---- */

struct conjunction schema_open(struct schema *s, int count) {
    return (struct conjunction){.list = schema_alloc(s, (size_t)count, sizeof(struct conjunct))};
}

static void add_conjunct(struct schema *s, struct conjunction *c, struct conjunct one) {
    struct conjunct *list = (struct conjunct *)(uintptr_t)c->list;
    (void)node_work(s->pool, (uint64_t)c->count / 8);
    for (int i = 0; i < c->count; i++)
        if (list[i].schema == one.schema) {
            list[i].skip |= one.skip;
            return;
        }
    list[c->count++] = one;
}

void schema_add(struct schema *s, struct conjunction *c, const cJSON *schema) {
    if (schema == NULL || cJSON_IsTrue(schema) || s->rc != 0) return;
    if (cJSON_IsFalse(schema))
        c->never = true;
    else if (cJSON_IsObject(schema))
        add_conjunct(s, c, (struct conjunct){.schema = schema});
    else
        schema_refuse(s, ERR_INVALID, schema, NULL, "expected a schema, found %s",
                      json_type_name(schema));
}

/* Copies a conjunction. In the copy, conjunct `at` also skips the keywords in `skip`, and the
 * schema `more` is added (NULL: none). */
static struct conjunction with(struct schema *s, const struct conjunction *c, int at, unsigned skip,
                               const cJSON *more) {
    struct conjunction next = schema_open(s, c->count + 1);
    if (s->rc != 0) return next;
    struct conjunct *list = (struct conjunct *)(uintptr_t)next.list;
    if (c->count > 0) memcpy(list, c->list, (size_t)c->count * sizeof *list);
    if (c->count > 0) list[at].skip |= skip;
    next.count = c->count;
    next.never = c->never;
    (void)node_work(s->pool, (uint64_t)c->count / 4);
    schema_add(s, &next, more);
    return next;
}

/* ---- Keywords ---- */

static bool schema_is_neutral(const cJSON *value) {
    if (cJSON_IsTrue(value) || cJSON_IsNull(value)) return true;
    return (cJSON_IsObject(value) || cJSON_IsArray(value)) && value->child == NULL;
}

/* Refuses keywords that could make an instance invalid and that nothing here enforces. */
static void check_keywords(struct schema *s, const cJSON *schema) {
    static const char *const refused[] = {"unevaluatedItems", "unevaluatedProperties",
                                          "$dynamicRef", "$recursiveRef"};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        const cJSON *value = json_get(schema, refused[i]);
        bool neutral = value == NULL || (refused[i][0] != '$' && schema_is_neutral(value));
        if (!neutral)
            schema_refuse(s, ERR_UNSUPPORTED, schema, refused[i],
                          "the keyword '%s' is not supported", refused[i]);
    }
}

/* ---- References ---- */

/* Adds the schemas that a conjunct refers to by $ref and allOf, until no such keyword is left. */
struct conjunction schema_flatten(struct schema *s, const struct conjunction *c) {
    int room = c->count + 8;
    struct conjunction all = schema_open(s, room);
    all.never = c->never;
    if (s->rc != 0) return all;
    if (c->count > 0)
        memcpy((void *)(uintptr_t)all.list, c->list, (size_t)c->count * sizeof *all.list);
    all.count = c->count;
    for (int i = 0; i < all.count && s->rc == 0; i++) {
        struct conjunct *one = (struct conjunct *)(uintptr_t)&all.list[i];
        const cJSON *schema = one->schema, *ref = json_get(schema, "$ref"), *child;
        const cJSON *parts = json_get(schema, "allOf");
        int more = (parts != NULL ? cJSON_GetArraySize(parts) : 0) + 2;
        if (!node_work(s->pool, 1 + (uint64_t)cJSON_GetArraySize(schema) / 2)) break;
        check_keywords(s, schema);
        unsigned skip = one->skip;
        one->skip |= SKIP_REF | SKIP_ALL;
        if (all.count + more > room) {
            struct conjunction grown = schema_open(s, room = (all.count + more) * 2);
            if (s->rc != 0) break;
            memcpy((void *)(uintptr_t)grown.list, all.list, (size_t)all.count * sizeof *all.list);
            all.list = grown.list;
        }
        if (ref != NULL && !(skip & SKIP_REF)) schema_add(s, &all, schema_resolve(s, schema, ref));
        if (!(skip & SKIP_ALL)) schema_add(s, &all, schema_rewritten(s, schema));
        if (parts == NULL || (skip & SKIP_ALL)) continue;
        if (!cJSON_IsArray(parts))
            schema_refuse(s, ERR_INVALID, schema, "allOf", "expected an array of schemas");
        else
            cJSON_ArrayForEach(child, parts) schema_add(s, &all, child);
        if (all.count > CONSTRAIN_BRANCHES_MAX)
            schema_refuse(s, ERR_LIMIT, schema, "allOf", "more than %d schemas apply at once",
                          CONSTRAIN_BRANCHES_MAX);
    }
    return all;
}

/* ---- Types ---- */

static unsigned type_of_name(const char *name) {
    static const struct {
        const char *name;
        unsigned types;
    } names[] = {{"null", SCHEMA_NULL},       {"boolean", SCHEMA_BOOLEAN},
                 {"integer", SCHEMA_INTEGER}, {"number", SCHEMA_INTEGER | SCHEMA_FRACTION},
                 {"string", SCHEMA_STRING},   {"array", SCHEMA_ARRAY},
                 {"object", SCHEMA_OBJECT}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(names[i].name, name) == 0) return names[i].types;
    return 0;
}

static unsigned named_types(struct schema *s, const cJSON *schema, const cJSON *type) {
    unsigned types = 0;
    const cJSON *child, *single = cJSON_IsArray(type) ? NULL : type;
    if (type == NULL) return SCHEMA_TYPES;
    for (child = single != NULL ? single : type->child; child != NULL;
         child = single != NULL ? NULL : child->next) {
        unsigned one = cJSON_IsString(child) ? type_of_name(child->valuestring) : 0;
        if (one == 0) {
            schema_refuse(s, ERR_INVALID, schema, "type", "expected the name of a JSON type");
            return 0;
        }
        types |= one;
    }
    return types;
}

static unsigned type_of_value(const cJSON *value) {
    if (cJSON_IsNull(value)) return SCHEMA_NULL;
    if (cJSON_IsBool(value)) return SCHEMA_BOOLEAN;
    if (cJSON_IsString(value)) return SCHEMA_STRING;
    if (cJSON_IsArray(value)) return SCHEMA_ARRAY;
    if (cJSON_IsObject(value)) return SCHEMA_OBJECT;
    int64_t whole;
    bool integer = json_node_int(value, INT64_MIN, INT64_MAX, &whole) == 0;
    return integer ? SCHEMA_INTEGER : SCHEMA_INTEGER | SCHEMA_FRACTION;
}

/* Returns the types that a simple `not` excludes; schema_string excludes its strings. Other forms
 * of `not` were rewritten (schema_rewrite.c). */
static unsigned excluded_types(struct schema *s, const cJSON *schema) {
    const cJSON *not = json_get(schema, "not");
    if (!schema_not_is_plain(not ) || not == NULL || cJSON_IsFalse(not )) return 0;
    if (cJSON_IsTrue(not ) || (cJSON_IsObject(not ) && not ->child == NULL)) return SCHEMA_TYPES;
    bool only = cJSON_IsObject(not ) && not ->child->next == NULL;
    const cJSON *type = only ? json_get(not, "type") : NULL;
    if (type != NULL) {
        unsigned types = named_types(s, not, type);
        /* "not an integer" leaves the other numbers; but 1.0 is an integer, so the form of a number
         * does not show which it is. */
        if ((types & SCHEMA_INTEGER) && !(types & SCHEMA_FRACTION))
            schema_refuse(s, ERR_UNSUPPORTED, schema, "not", "'not' of integers is not supported");
        return types;
    }
    return only && json_get(not, "pattern") != NULL ? SCHEMA_TYPES & ~(unsigned)SCHEMA_STRING : 0;
}

static unsigned schema_types_of(struct schema *s, const struct conjunction *c) {
    unsigned types = SCHEMA_TYPES;
    for (int i = 0; i < c->count; i++) {
        const cJSON *schema = c->list[i].schema;
        types &= named_types(s, schema, json_get(schema, "type"));
        types &= ~excluded_types(s, schema);
    }
    return types;
}

/* ---- Numbers ---- */

static bool read_bound(struct schema *s, const cJSON *schema, const char *keyword,
                       struct decimal *out) {
    const cJSON *value = json_get(schema, keyword);
    if (value == NULL || cJSON_IsBool(value)) return false;
    if (!cJSON_IsNumber(value))
        schema_refuse(s, ERR_INVALID, schema, keyword, "expected a number, found %s",
                      json_type_name(value));
    else if (decimal_read(value->valuestring, out) != 0)
        schema_refuse(s, ERR_LIMIT, schema, keyword, "expected at most %d digits",
                      CONSTRAIN_DIGITS_MAX);
    return s->rc == 0;
}

static void note_min(struct number_rules *r, const struct decimal *bound, bool open) {
    int order = r->has_min ? decimal_compare(bound, &r->min) : 1;
    if (order > 0 || (order == 0 && open)) {
        r->min = *bound;
        r->above_min = open;
    }
    r->has_min = true;
}

static void note_max(struct number_rules *r, const struct decimal *bound, bool open) {
    int order = r->has_max ? decimal_compare(bound, &r->max) : -1;
    if (order < 0 || (order == 0 && open)) {
        r->max = *bound;
        r->below_max = open;
    }
    r->has_max = true;
}

/* In older drafts exclusiveMinimum and exclusiveMaximum are booleans. */
static void note_bounds(struct schema *s, const cJSON *schema, struct number_rules *r) {
    struct decimal bound;
    if (read_bound(s, schema, "minimum", &bound))
        note_min(r, &bound, cJSON_IsTrue(json_get(schema, "exclusiveMinimum")));
    if (read_bound(s, schema, "maximum", &bound))
        note_max(r, &bound, cJSON_IsTrue(json_get(schema, "exclusiveMaximum")));
    if (read_bound(s, schema, "exclusiveMinimum", &bound)) note_min(r, &bound, true);
    if (read_bound(s, schema, "exclusiveMaximum", &bound)) note_max(r, &bound, true);
}

static uint32_t schema_number(struct schema *s, const struct conjunction *c, bool integer) {
    struct number_rules rules = {.integer = integer};
    struct decimal *divisors = schema_alloc(s, (size_t)c->count, sizeof *divisors);
    uint32_t node = NODE_NONE;
    if (divisors == NULL) return NODE_NONE;
    for (int i = 0; i < c->count; i++) {
        const cJSON *schema = c->list[i].schema;
        note_bounds(s, schema, &rules);
        if (read_bound(s, schema, "multipleOf", &divisors[rules.divisor_count]))
            rules.divisor_count++;
    }
    rules.divisors = divisors;
    if (s->rc != 0) return NODE_NONE;
    int rc = number_node(s->nodes, &rules, &node);
    if (rc != 0 && s->pool->rc == 0)
        schema_refuse(s, rc, c->list[0].schema, "multipleOf",
                      rc == ERR_LIMIT ? "expected at most %d without the decimal point"
                                      : "expected a number above 0",
                      CONSTRAIN_DIVISOR_MAX);
    return node;
}

static uint32_t typed_node(struct schema *s, const struct conjunction *c, unsigned types) {
    struct node_pool *pool = s->pool;
    if (s->form == SCHEMA_PLAIN) return types & SCHEMA_STRING ? schema_content(s, c) : NODE_NONE;
    uint32_t list = node_list_open(pool);
    if (types & SCHEMA_NULL) node_list_add(pool, s->nodes->null);
    if (types & SCHEMA_BOOLEAN) node_list_add(pool, s->nodes->boolean);
    if (types & (SCHEMA_INTEGER | SCHEMA_FRACTION))
        node_list_add(pool, schema_number(s, c, !(types & SCHEMA_FRACTION)));
    enum schema_form form = s->form;
    if (types & SCHEMA_STRING)
        node_list_add(pool, form == SCHEMA_JSON ? schema_string(s, c)
                                                : schema_tag_text(s, schema_content(s, c)));
    /* unless values nest, the elements and members of a value are JSON in any case */
    const enum schema_form inner = schema_nests(s) ? form : SCHEMA_JSON;
    const unsigned outer = s->types;
    if (inner != SCHEMA_JSON) s->types = CONSTRAIN_TYPES_ALL;
    s->form = inner;
    if (types & SCHEMA_ARRAY) node_list_add(pool, schema_array(s, c));
    s->form = inner; /* some arrays change it */
    if (types & SCHEMA_OBJECT) node_list_add(pool, schema_object(s, c, form));
    s->form = form;
    s->types = outer;
    return node_list_alt(pool, list);
}

/* ---- Given values ---- */

/* Returns whether any keyword besides `type` limits objects or arrays. */
static bool limits_structures(const struct conjunction *c) {
    static const char *const keywords[] = {"properties",
                                           "patternProperties",
                                           "additionalProperties",
                                           "required",
                                           "propertyNames",
                                           "minProperties",
                                           "maxProperties",
                                           "items",
                                           "prefixItems",
                                           "minItems",
                                           "maxItems",
                                           "uniqueItems",
                                           "contains"};
    for (int i = 0; i < c->count; i++)
        for (size_t k = 0; k < sizeof keywords / sizeof *keywords; k++)
            if (json_get(c->list[i].schema, keywords[k]) != NULL) return true;
    return false;
}

/* The values that the enum and const of a conjunction allow, filtered by its other keywords. The
 * keywords are compiled once and not for each value. */
struct given {
    const struct conjunction *c;
    const cJSON *at; /* the schema whose values are listed */
    unsigned types;
    bool limits_structures;
    const struct value_set **others; /* [other_count] values of the other enum and const */
    int other_count;
    uint32_t content, number; /* the other keywords' strings and numbers; NOT_ASKED until needed */
    struct node_word *words;
    size_t word_count;
    uint32_t list; /* node list: objects, arrays, and strings of a tagged form */
};

/* false: a fault was noted, or the pool has an error. */
static bool collect_others(struct schema *s, struct given *g) {
    g->others = schema_alloc(s, 2 * (size_t)g->c->count, sizeof(const struct value_set *));
    if (g->others == NULL) return false;
    for (int i = 0; i < g->c->count; i++) {
        const cJSON *schema = g->c->list[i].schema, *values = json_get(schema, "enum");
        const cJSON *only = json_get(schema, "const");
        if (cJSON_IsArray(values) && (schema != g->at || only != NULL) &&
            (g->others[g->other_count++] = schema_values(s, values, true)) == NULL)
            return false;
        if (only != NULL && schema != g->at &&
            (g->others[g->other_count++] = schema_values(s, only, false)) == NULL)
            return false;
    }
    return true;
}

/* Returns whether all other enum and const keywords have the value too. `text`: its canonical form.
 */
static bool schema_is_given(struct schema *s, const struct given *g, const char *text) {
    (void)node_work(s->pool, (uint64_t)g->other_count);
    for (int i = 0; i < g->other_count; i++)
        if (!value_set_has(g->others[i], text)) return false;
    return true;
}

/* Returns whether a string or a number satisfies the other keywords. */
static bool satisfies(struct schema *s, struct given *g, const cJSON *value, const char *text) {
    size_t size;
    if (cJSON_IsString(value)) {
        if (g->content == NOT_ASKED) g->content = schema_content(s, g->c);
        const char *string = schema_text(s, value->valuestring, &size);
        return string != NULL && (g->content == s->nodes->any_text ||
                                  node_matches(s->pool, g->content, string, size));
    }
    char plain[3 * CONSTRAIN_DIGITS_MAX];
    struct decimal decimal;
    bool integer = !(g->types & SCHEMA_FRACTION);
    if (g->number == NOT_ASKED) g->number = schema_number(s, g->c, integer);
    if (decimal_read(value->valuestring, &decimal) != 0) /* too long: compared as written */
        return node_matches(s->pool, g->number, text, strlen(text));
    size = decimal_write(&decimal, plain);
    return node_matches(s->pool, g->number, plain, size);
}

static void schema_add_plain(struct schema *s, struct buf *out, const char *string) {
    size_t size;
    const char *text = schema_text(s, string, &size);
    if (text != NULL) buf_add(out, text, size);
}

static void add_given(struct schema *s, struct given *g, const cJSON *value) {
    if (s->form == SCHEMA_TAGGED || s->form == SCHEMA_ARGUMENTS) {
        schema_refuse(s, ERR_UNSUPPORTED, g->at, "enum",
                      "enum and const of all arguments are not supported where they are not JSON");
        return;
    }
    unsigned type = type_of_value(value);
    const char *canonical = schema_canonical(s, value);
    if (canonical == NULL || !(g->types & type) || !schema_is_given(s, g, canonical)) return;
    if (type & (SCHEMA_OBJECT | SCHEMA_ARRAY)) {
        if (g->limits_structures)
            schema_refuse(s, ERR_UNSUPPORTED, g->at, "enum",
                          "objects and arrays in enum or const are supported only without other "
                          "keywords about objects and arrays");
        node_list_add(s->pool, json_literal(s->nodes, value));
        return;
    }
    bool plain = type & (SCHEMA_NULL | SCHEMA_BOOLEAN);
    if (!plain && !satisfies(s, g, value, canonical)) return;
    if (type == SCHEMA_STRING && s->form != SCHEMA_JSON && s->form != SCHEMA_PLAIN) {
        size_t size;
        const char *string = schema_text(s, value->valuestring, &size);
        uint32_t node = string != NULL ? node_text(s->pool, string, size) : NODE_NONE;
        node_list_add(s->pool, schema_tag_text(s, node));
        return;
    }
    if (s->nodes->notation != NULL && s->form != SCHEMA_PLAIN) {
        node_list_add(s->pool, json_literal(s->nodes, value));
        return;
    }
    struct buf text;
    buf_open(&text, (size_t)64 << 20);
    if (s->form == SCHEMA_PLAIN)
        schema_add_plain(s, &text, value->valuestring);
    else if (type == SCHEMA_STRING)
        json_add_quoted(&text, value->valuestring);
    else
        json_write_node(&text, value);
    char *copy = text.failed ? NULL : arena_strndup(&s->arena, text.data, text.size);
    if (copy == NULL)
        schema_refuse(s, ERR_LIMIT, g->at, "enum", "the schema needs too much memory");
    else
        g->words[g->word_count++] = (struct node_word){copy, text.size};
    buf_close(&text);
}

/* Builds the values that enum and const allow. As texts that share their beginnings, many of them
 * cost few states. */
static uint32_t values_node(struct schema *s, const struct conjunction *c, unsigned types,
                            const cJSON *at) {
    const cJSON *values = json_get(at, "enum"), *only = json_get(at, "const"), *child;
    struct given given = {.c = c,
                          .at = at,
                          .types = types,
                          .limits_structures = limits_structures(c),
                          .content = NOT_ASKED,
                          .number = NOT_ASKED};
    if (values != NULL && !cJSON_IsArray(values))
        return schema_refuse(s, ERR_INVALID, at, "enum", "expected an array");
    if (!collect_others(s, &given)) return NODE_NONE;
    size_t count = only != NULL ? 1 : (size_t)cJSON_GetArraySize(values);
    given.words = schema_alloc(s, count, sizeof *given.words);
    given.list = node_list_open(s->pool);
    if (given.words != NULL && only != NULL) add_given(s, &given, only);
    if (only == NULL) cJSON_ArrayForEach(child, values) {
            if (s->rc != 0 || s->pool->rc != 0) break;
            add_given(s, &given, child);
        }
    uint32_t words = s->rc == 0 ? node_words(s->pool, given.words, given.word_count) : NODE_NONE;
    node_list_add(s->pool, words);
    return node_list_alt(s->pool, given.list);
}

/* A `const` of null is a value, but json_get treats null as absent. */
static const cJSON *null_const(const cJSON *schema) {
    const cJSON *child;
    cJSON_ArrayForEach(child, schema) {
        if (strcmp(child->string, "const") == 0 && cJSON_IsNull(child)) return child;
    }
    return NULL;
}

static uint32_t schema_plain_node(struct schema *s, const struct conjunction *c) {
    unsigned types = schema_types_of(s, c);
    if (s->rc != 0) return NODE_NONE;
    for (int i = 0; i < c->count; i++)
        if (null_const(c->list[i].schema) != NULL) types &= SCHEMA_NULL;
    if (s->form == SCHEMA_PLAIN) types &= SCHEMA_STRING;
    for (int i = 0; i < c->count; i++) {
        const cJSON *schema = c->list[i].schema;
        if (json_get(schema, "enum") != NULL || json_get(schema, "const") != NULL)
            return values_node(s, c, types, schema);
    }
    if (c->count == 0 && s->form == SCHEMA_JSON) return s->nodes->value;
    return typed_node(s, c, types);
}

/* ---- Alternatives ---- */

static uint32_t branches(struct schema *s, const struct conjunction *c, int at, const char *keyword,
                         unsigned skip) {
    const cJSON *schema = c->list[at].schema, *list = json_get(schema, keyword), *child;
    if (!cJSON_IsArray(list))
        return schema_refuse(s, ERR_INVALID, schema, keyword, "expected an array of schemas");
    if (skip == SKIP_ONE && cJSON_GetArraySize(list) > ONE_OF_MAX)
        return schema_refuse(s, ERR_LIMIT, schema, keyword, "expected at most %d branches",
                             ONE_OF_MAX);
    uint32_t nodes = node_list_open(s->pool);
    cJSON_ArrayForEach(child, list) {
        if (++s->branches > CONSTRAIN_BRANCHES_MAX)
            schema_refuse(s, ERR_LIMIT, schema, keyword,
                          "the schema has more than %d combinations of alternatives",
                          CONSTRAIN_BRANCHES_MAX);
        if (s->rc != 0 || s->pool->rc != 0) return NODE_NONE;
        const cJSON *branch = skip == SKIP_ONE ? schema_only(s, schema, child, list) : child;
        node_list_add(s->pool, schema_node(s, with(s, c, at, skip, branch)));
    }
    return node_list_alt(s->pool, nodes);
}

static uint32_t resolved_node(struct schema *s, const struct conjunction *c) {
    for (int i = 0; i < c->count; i++) {
        const struct conjunct *one = &c->list[i];
        if (!(one->skip & SKIP_ANY) && json_get(one->schema, "anyOf") != NULL)
            return branches(s, c, i, "anyOf", SKIP_ANY);
        if (!(one->skip & SKIP_ONE) && json_get(one->schema, "oneOf") != NULL)
            return branches(s, c, i, "oneOf", SKIP_ONE);
    }
    return schema_plain_node(s, c);
}

/* ---- Conjunctions seen before ---- */

struct schema_memo {
    struct memo_row {
        struct conjunction key; /* flattened */
        uint64_t hash;
        enum schema_form form;
        unsigned types; /* SCHEMA_TEXT: types of the parameter */
        bool done;
        uint32_t node, rule; /* rule: UINT32_MAX until the conjunction is found inside itself */
        struct memo_row *next;
    } * chains[MEMO_CHAINS];
};

static uint64_t memo_hash(const struct conjunction *c) {
    uint64_t sum = 0; /* independent of the order */
    for (int i = 0; i < c->count; i++)
        sum += ((uint64_t)(uintptr_t)c->list[i].schema ^ c->list[i].skip) * 0x9E3779B97F4A7C15u;
    return sum;
}

static bool is_equal(struct schema *s, const struct conjunction *a, const struct conjunction *b) {
    if (a->count != b->count) return false;
    (void)node_work(s->pool, (uint64_t)a->count * (uint64_t)a->count / 16);
    for (int i = 0; i < a->count; i++) {
        bool found = false;
        for (int k = 0; k < b->count && !found; k++)
            found = a->list[i].schema == b->list[k].schema && a->list[i].skip == b->list[k].skip;
        if (!found) return false;
    }
    return true;
}

static unsigned memo_types(const struct schema *s) {
    return s->form == SCHEMA_TEXT ? s->types : 0;
}

static uint32_t memo_use(struct schema *s, struct memo_row *row) {
    if (row->done) return row->node;
    if (row->rule == UINT32_MAX) row->rule = node_rule_open(s->pool);
    return node_rule(s->pool, row->rule);
}

static uint32_t memo_fill(struct schema *s, struct memo_row *row) {
    uint32_t node = resolved_node(s, &row->key);
    row->done = true;
    row->node = node;
    if (row->rule == UINT32_MAX || s->pool->rc != 0) return node;
    s->pool->rules[row->rule] = node;
    row->node = node_rule(s->pool, row->rule);
    return row->node;
}

uint32_t schema_node(struct schema *s, struct conjunction conjunction) {
    if (s->rc != 0 || s->pool->rc != 0 || conjunction.never) return NODE_NONE;
    struct conjunction all = schema_flatten(s, &conjunction);
    if (s->rc != 0 || all.never) return NODE_NONE;
    uint64_t hash = memo_hash(&all);
    struct memo_row **chain = &s->memo->chains[hash >> 32 & (MEMO_CHAINS - 1)], *row = *chain;
    while (row != NULL && (row->hash != hash || row->form != s->form ||
                           row->types != memo_types(s) || !is_equal(s, &row->key, &all)))
        row = row->next;
    if (row != NULL) return memo_use(s, row);
    row = schema_alloc(s, 1, sizeof *row);
    if (row == NULL) return NODE_NONE;
    *row = (struct memo_row){.key = all,
                             .hash = hash,
                             .form = s->form,
                             .types = memo_types(s),
                             .rule = UINT32_MAX,
                             .next = *chain};
    *chain = row;
    if (s->depth >= JSON_MAX_DEPTH)
        return schema_refuse(s, ERR_LIMIT, all.count > 0 ? all.list[0].schema : NULL, NULL,
                             "schemas are nested more than %d levels deep", JSON_MAX_DEPTH);
    s->depth++;
    uint32_t node = memo_fill(s, row);
    s->depth--;
    return node;
}

/* {"type": "object"} */
static cJSON object_name = {
    .type = cJSON_String, .valuestring = (char[]){"object"}, .string = (char[]){"type"}};
static const cJSON object_schema = {.type = cJSON_Object, .child = &object_name};

int schema_compile(struct json_nodes *nodes, const cJSON *schema,
                   const struct schema_options *options, uint32_t *out, struct fault *fault) {
    struct schema s = {.nodes = nodes,
                       .pool = nodes->pool,
                       .root = schema,
                       .form = options->form,
                       .tags = options->tags,
                       .closed = options->closed,
                       .field = options->field,
                       .fault = fault};
    *out = NODE_NONE;
    arena_open(&s.arena, ARENA_BYTES);
    s.memo = schema_alloc(&s, 1, sizeof *s.memo);
    struct conjunction whole = schema_open(&s, 2);
    if (s.rc == 0) {
        schema_add(&s, &whole, schema);
        if (options->only_objects) schema_add(&s, &whole, &object_schema);
        *out = schema_node(&s, whole);
    }
    arena_close(&s.arena);
    return s.rc != 0 ? s.rc : s.pool->rc;
}
