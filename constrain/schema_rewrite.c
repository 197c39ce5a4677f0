/* Keywords that are rewritten as others: not, if, dependencies, and oneOf of branches that overlap.
 * All of them need the opposite of a schema: a schema of the instances that it rejects. An opposite
 * is built only if it is exact, from keywords that have an opposite; otherwise the keyword is
 * refused. New schemas are trees in the arena whose leaves are shared with the document. Each is
 * made once for its place in the document. Because the same place gives the same pointer, the
 * rewriting of recursive schemas ends. */
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "constrain/schema_int.h"
#include "constrain/schema_refs.h"

#define CHAINS    256u
#define DEPTH_MAX 16 /* how deeply the negated schemas may be nested */
#define NODE_COST 4  /* work that one new value counts as */

struct rewrite_row {
    const cJSON *key, *made; /* made: NULL = nothing to rewrite */
    bool done;
    struct rewrite_row *next;
};

enum { REWRITTEN, ONLY, OPPOSITE, CONST, TABLES };

struct schema_rewrites {
    struct rewrite_row *chains[TABLES][CHAINS];
};

/* ---- New values ---- */

static cJSON *new_value(struct schema *s, int type) {
    cJSON *node = node_work(s->pool, NODE_COST) ? schema_alloc(s, 1, sizeof *node) : NULL;
    if (node != NULL) node->type = type;
    return node;
}

/* Copies a value under a new head, which may get another name and other neighbours; its children
 * are shared. */
static cJSON *share(struct schema *s, const cJSON *node) {
    cJSON *copy = node != NULL ? new_value(s, node->type) : NULL;
    if (copy == NULL) return NULL;
    *copy = *node;
    copy->next = copy->prev = NULL;
    copy->string = NULL;
    schema_note_copy(s, copy, node);
    return copy;
}

/* Adds a member or an element; `child` is new. */
static void rewrite_put(cJSON *parent, const char *name, cJSON *child) {
    if (parent == NULL || child == NULL) return;
    child->string = (char *)(uintptr_t)name;
    if (parent->child == NULL) {
        parent->child = child->prev = child;
        return;
    }
    child->prev = parent->child->prev;
    child->prev->next = child;
    parent->child->prev = child;
}

static cJSON *rewrite_new_text(struct schema *s, const char *text) {
    cJSON *node = new_value(s, cJSON_String);
    if (node != NULL) node->valuestring = (char *)(uintptr_t)text;
    return node;
}

/* Makes {"type": `type`}. */
static cJSON *new_typed(struct schema *s, const char *type) {
    cJSON *node = new_value(s, cJSON_Object);
    rewrite_put(node, "type", rewrite_new_text(s, type));
    return node;
}

static cJSON *new_count(struct schema *s, int64_t count) {
    cJSON *node = new_value(s, cJSON_Number);
    char *text = schema_alloc(s, 24, 1);
    if (node == NULL || text == NULL) return NULL;
    snprintf(text, 24, "%lld", (long long)count);
    node->valuestring = text;
    node->valuedouble = (double)count;
    return node;
}

/* Makes {`keyword`: []}; *list is the array. */
static cJSON *new_list(struct schema *s, const char *keyword, cJSON **list) {
    cJSON *node = new_value(s, cJSON_Object);
    rewrite_put(node, keyword, *list = new_value(s, cJSON_Array));
    return node;
}

/* ---- Opposites ---- */

static const cJSON *negate(struct schema *s, const cJSON *schema, int depth);

static bool is_annotation(const char *name) {
    static const char *const names[] = {
        "title",   "description", "default", "examples", "$comment",    "readOnly",  "writeOnly",
        "$schema", "$id",         "id",      "$defs",    "definitions", "deprecated"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(names[i], name) == 0) return true;
    return false;
}

/* Makes {"not": {keyword: value}}, in a form that needs no rewriting. */
static cJSON *new_not(struct schema *s, const char *keyword, cJSON *value) {
    cJSON *node = new_value(s, cJSON_Object), *inner = new_value(s, cJSON_Object);
    rewrite_put(inner, keyword, value);
    rewrite_put(node, "not", inner);
    return node;
}

/* Makes a schema of the instances that differ from a value which is not a string. */
static cJSON *other_value(struct schema *s, const cJSON *value) {
    if (cJSON_IsNull(value)) return new_not(s, "type", rewrite_new_text(s, "null"));
    if (!cJSON_IsNumber(value) && !cJSON_IsBool(value)) return NULL;
    cJSON *list, *node = new_list(s, "anyOf", &list), *one;
    if (cJSON_IsBool(value)) {
        rewrite_put(list, NULL, new_not(s, "type", rewrite_new_text(s, "boolean")));
        one = new_value(s, cJSON_Object);
        rewrite_put(one, "const", new_value(s, cJSON_IsTrue(value) ? cJSON_False : cJSON_True));
        rewrite_put(list, NULL, one);
        return node;
    }
    rewrite_put(list, NULL, new_not(s, "type", rewrite_new_text(s, "number")));
    one = new_typed(s, "number");
    rewrite_put(one, "exclusiveMinimum", share(s, value));
    rewrite_put(list, NULL, one);
    one = new_typed(s, "number");
    rewrite_put(one, "exclusiveMaximum", share(s, value));
    rewrite_put(list, NULL, one);
    return node;
}

static const cJSON *negate_values(struct schema *s, const cJSON *values) {
    cJSON *list, *node = new_list(s, "allOf", &list), *strings = new_value(s, cJSON_Array);
    const cJSON *child;
    cJSON_ArrayForEach(child, values) {
        cJSON *one = cJSON_IsString(child) ? share(s, child) : other_value(s, child);
        if (one == NULL) return NULL;
        rewrite_put(cJSON_IsString(child) ? strings : list, NULL, one);
    }
    if (strings != NULL && strings->child != NULL)
        rewrite_put(list, NULL, new_not(s, "enum", strings));
    return node;
}

static const cJSON *negate_const(struct schema *s, const cJSON *value) {
    return cJSON_IsString(value) ? new_not(s, "const", share(s, value)) : other_value(s, value);
}

/* Makes a schema of the objects that lack one of the names. */
static const cJSON *negate_required(struct schema *s, const cJSON *names) {
    cJSON *list, *node = new_list(s, "anyOf", &list);
    const cJSON *child;
    if (!cJSON_IsArray(names)) return NULL;
    cJSON_ArrayForEach(child, names) {
        if (!cJSON_IsString(child)) return NULL;
        cJSON *one = new_typed(s, "object"), *properties = new_value(s, cJSON_Object);
        rewrite_put(properties, child->valuestring, new_value(s, cJSON_False));
        rewrite_put(one, "properties", properties);
        rewrite_put(list, NULL, one);
    }
    return node;
}

/* Makes a schema of the objects in which one of the members is present with another value. */
static const cJSON *negate_properties(struct schema *s, const cJSON *members, int depth) {
    cJSON *list, *node = new_list(s, "anyOf", &list);
    const cJSON *child;
    if (!cJSON_IsObject(members)) return NULL;
    cJSON_ArrayForEach(child, members) {
        const cJSON *other = negate(s, child, depth + 1);
        if (other == NULL) return NULL;
        if (cJSON_IsFalse(other)) continue;
        cJSON *one = new_typed(s, "object"), *properties = new_value(s, cJSON_Object);
        cJSON *required = new_value(s, cJSON_Array);
        rewrite_put(properties, child->string, share(s, other));
        rewrite_put(required, NULL, rewrite_new_text(s, child->string));
        rewrite_put(one, "required", required);
        rewrite_put(one, "properties", properties);
        rewrite_put(list, NULL, one);
    }
    return node;
}

/* Makes a schema of the instances that one schema of an allOf rejects (`keyword`: anyOf), or that
 * all schemas of an anyOf reject (allOf). */
static const cJSON *negate_all(struct schema *s, const cJSON *schemas, const char *keyword,
                               int depth) {
    cJSON *list, *node = new_list(s, keyword, &list);
    const cJSON *child;
    if (!cJSON_IsArray(schemas)) return NULL;
    cJSON_ArrayForEach(child, schemas) {
        const cJSON *other = negate(s, child, depth + 1);
        if (other == NULL) return NULL;
        rewrite_put(list, NULL, share(s, other));
    }
    return node;
}

/* Keywords about sizes: the type that each applies to, and the keyword of its opposite. */
static const struct size_keyword {
    const char *name, *type, *opposite;
    int step; /* the opposite adds this to a count; 0: the keyword bounds numbers, and its opposite
                 has the same value */
} size_keywords[] = {
    {"minLength", "string", "maxLength", -1},
    {"maxLength", "string", "minLength", 1},
    {"minItems", "array", "maxItems", -1},
    {"maxItems", "array", "minItems", 1},
    {"minProperties", "object", "maxProperties", -1},
    {"maxProperties", "object", "minProperties", 1},
    {"minimum", "number", "exclusiveMaximum", 0},
    {"maximum", "number", "exclusiveMinimum", 0},
    {"exclusiveMinimum", "number", "maximum", 0},
    {"exclusiveMaximum", "number", "minimum", 0},
};

static const cJSON *negate_size(struct schema *s, const cJSON *member) {
    for (size_t i = 0; i < sizeof size_keywords / sizeof *size_keywords; i++) {
        const struct size_keyword *k = &size_keywords[i];
        int64_t count;
        if (strcmp(k->name, member->string) != 0) continue;
        if (!cJSON_IsNumber(member)) return NULL; /* was a boolean in older drafts */
        cJSON *node = new_typed(s, k->type);
        if (k->step == 0) {
            rewrite_put(node, k->opposite, share(s, member));
            return node;
        }
        if (json_node_int(member, 0, CONSTRAIN_REPEAT_MAX, &count) != 0) return NULL;
        if (count + k->step < 0) return new_value(s, cJSON_False);
        rewrite_put(node, k->opposite, new_count(s, count + k->step));
        return node;
    }
    return NULL;
}

/* Makes the opposite of `type`. "integer" alone has none: 1.0 is an integer, so the form of a
 * number does not show that it is not one. */
static const cJSON *negate_type(struct schema *s, const cJSON *type) {
    const cJSON *child;
    bool integer = cJSON_IsString(type) && strcmp(type->valuestring, "integer") == 0;
    bool number = false;
    cJSON_ArrayForEach(child, type) {
        if (!cJSON_IsString(child)) return NULL;
        integer = integer || strcmp(child->valuestring, "integer") == 0;
        number = number || strcmp(child->valuestring, "number") == 0;
    }
    return integer && !number ? NULL : new_not(s, "type", share(s, type));
}

/* Makes the opposite of one keyword, `member`, of `schema`; NULL: it has none. */
static const cJSON *negate_member(struct schema *s, const cJSON *schema, const cJSON *member,
                                  int depth) {
    const char *name = member->string;
    if (strcmp(name, "type") == 0) return negate_type(s, member);
    if (strcmp(name, "const") == 0) return negate_const(s, member);
    if (strcmp(name, "enum") == 0) return cJSON_IsArray(member) ? negate_values(s, member) : NULL;
    if (strcmp(name, "required") == 0) return negate_required(s, member);
    if (strcmp(name, "properties") == 0) return negate_properties(s, member, depth);
    if (strcmp(name, "allOf") == 0) return negate_all(s, member, "anyOf", depth);
    if (strcmp(name, "anyOf") == 0) return negate_all(s, member, "allOf", depth);
    if (strcmp(name, "not") == 0) return schema_is_rewritten(s, member) ? NULL : share(s, member);
    if (strcmp(name, "pattern") == 0)
        return cJSON_IsString(member) ? new_not(s, "pattern", share(s, member)) : NULL;
    if (strcmp(name, "$ref") == 0) {
        const cJSON *target = schema_resolve(s, schema, member);
        return target != NULL && !schema_is_rewritten(s, target) ? negate(s, target, depth + 1)
                                                                 : NULL;
    }
    return negate_size(s, member);
}

/* Makes a schema of the instances that the schema rejects; NULL: no exact one can be written. */
static const cJSON *negate(struct schema *s, const cJSON *schema, int depth) {
    const cJSON *child;
    if (depth > DEPTH_MAX || s->rc != 0 || !node_work(s->pool, NODE_COST)) return NULL;
    if (cJSON_IsBool(schema)) return new_value(s, cJSON_IsTrue(schema) ? cJSON_False : cJSON_True);
    if (!cJSON_IsObject(schema)) return NULL;
    cJSON *list, *node = new_list(s, "anyOf", &list);
    bool refers = json_get(schema, "$ref") != NULL;
    int count = 0;
    cJSON_ArrayForEach(child, schema) {
        if (is_annotation(child->string)) continue;
        /* In older drafts a reader ignores keywords beside $ref, so a schema with both has no
         * certain opposite. */
        if (++count > 1 && refers) return NULL;
        const cJSON *one = negate_member(s, schema, child, depth);
        if (one == NULL) return NULL;
        rewrite_put(list, NULL, share(s, one));
    }
    if (list == NULL) return NULL;
    return list->child != NULL ? node : new_value(s, cJSON_False);
}

/* ---- Rewriting ---- */

static struct rewrite_row *row_of(struct schema *s, int table, const cJSON *key) {
    if (s->rewrites == NULL) s->rewrites = schema_alloc(s, 1, sizeof *s->rewrites);
    if (s->rewrites == NULL) return NULL;
    struct rewrite_row **chain =
        &s->rewrites->chains[table][(uint64_t)(uintptr_t)key * 0x9E3779B97F4A7C15u >> 56];
    struct rewrite_row *row = *chain;
    while (row != NULL && row->key != key) row = row->next;
    if (row != NULL) return row;
    row = schema_alloc(s, 1, sizeof *row);
    if (row == NULL) return NULL;
    *row = (struct rewrite_row){.key = key, .next = *chain};
    *chain = row;
    return row;
}

/* Returns whether the schema, or the one that it refers to, is being rewritten. It would depend on
 * its own opposite. */
bool schema_is_rewritten(struct schema *s, const cJSON *schema) {
    for (int i = 0; i < DEPTH_MAX && schema != NULL; i++) {
        for (struct rewrite_row *row = s->rewriting; row != NULL; row = row->next)
            if (row->key == schema) return true;
        const cJSON *ref = json_get(schema, "$ref");
        if (ref == NULL || s->rc != 0) return false;
        schema = schema_resolve(s, schema, ref);
    }
    return true;
}

bool schema_not_is_plain(const cJSON * not ) {
    const cJSON *child, *values;
    if (not == NULL || cJSON_IsBool(not )) return true;
    if (!cJSON_IsObject(not )) return false;
    if (not ->child == NULL) return true;
    if (not ->child->next != NULL) return false;
    if (json_get(not, "type") != NULL || cJSON_IsString(json_get(not, "pattern"))) return true;
    if (cJSON_IsString(json_get(not, "const"))) return true;
    values = json_get(not, "enum");
    bool strings = cJSON_IsArray(values);
    cJSON_ArrayForEach(child, values) strings = strings && cJSON_IsString(child);
    return strings;
}

static void rewrite_refuse(struct schema *s, const cJSON *at, const char *keyword) {
    schema_refuse(s, ERR_UNSUPPORTED, at, keyword,
                  "'%s' is supported where its opposite can be written: with types, values, "
                  "bounds, patterns, required, properties, and combinations of these",
                  keyword);
}

/* Adds (if and then) or (not if and else). */
static void rewrite_if(struct schema *s, const cJSON *schema, cJSON *all) {
    const cJSON *condition = json_get(schema, "if"), *yes = json_get(schema, "then");
    const cJSON *no = json_get(schema, "else"), *other;
    if (condition == NULL || (yes == NULL && no == NULL)) return;
    other = negate(s, condition, 0);
    if (other == NULL) {
        rewrite_refuse(s, schema, "if");
        return;
    }
    cJSON *list, *node = new_list(s, "anyOf", &list), *parts;
    rewrite_put(list, NULL, new_list(s, "allOf", &parts));
    rewrite_put(parts, NULL, share(s, condition));
    if (yes != NULL) rewrite_put(parts, NULL, share(s, yes));
    rewrite_put(list, NULL, new_list(s, "allOf", &parts));
    rewrite_put(parts, NULL, share(s, other));
    if (no != NULL) rewrite_put(parts, NULL, share(s, no));
    rewrite_put(all, NULL, node);
}

/* Adds, for each name in the keyword: either the name is absent, or its condition holds. */
static void rewrite_dependencies(struct schema *s, const cJSON *schema, const char *keyword,
                                 cJSON *all) {
    const cJSON *members = json_get(schema, keyword), *child;
    if (members == NULL) return;
    if (!cJSON_IsObject(members))
        schema_refuse(s, ERR_INVALID, schema, keyword, "expected an object");
    cJSON_ArrayForEach(child, members) {
        cJSON *list, *node = new_list(s, "anyOf", &list), *without = new_value(s, cJSON_Object);
        cJSON *properties = new_value(s, cJSON_Object), *with = share(s, child);
        rewrite_put(properties, child->string, new_value(s, cJSON_False));
        rewrite_put(without, "properties", properties);
        rewrite_put(list, NULL, without);
        if (cJSON_IsString(child)) { /* draft 3 names a single member */
            with = new_value(s, cJSON_Array);
            rewrite_put(with, NULL, share(s, child));
        }
        if (cJSON_IsArray(with)) {
            cJSON *required = new_value(s, cJSON_Object);
            rewrite_put(required, "required", with);
            with = required;
        }
        rewrite_put(list, NULL, with);
        rewrite_put(all, NULL, node);
    }
}

static void rewrite_not(struct schema *s, const cJSON *schema, cJSON *all) {
    const cJSON *not = json_get(schema, "not");
    if (schema_not_is_plain(not )) return;
    const cJSON *other = cJSON_IsObject(not ) ? negate(s, not, 0) : NULL;
    if (other == NULL)
        rewrite_refuse(s, schema, "not");
    else
        rewrite_put(all, NULL, share(s, other));
}

const cJSON *schema_rewritten(struct schema *s, const cJSON *schema) {
    struct rewrite_row *row = row_of(s, REWRITTEN, schema),
                       mark = {.key = schema, .next = s->rewriting};
    if (row == NULL || row->done) return row != NULL ? row->made : NULL;
    cJSON *all, *node = new_list(s, "allOf", &all);
    if (node == NULL || all == NULL) return NULL;
    s->rewriting = &mark;
    rewrite_if(s, schema, all);
    rewrite_not(s, schema, all);
    rewrite_dependencies(s, schema, "dependencies", all);
    rewrite_dependencies(s, schema, "dependentRequired", all);
    rewrite_dependencies(s, schema, "dependentSchemas", all);
    s->rewriting = mark.next;
    row->done = true;
    row->made = all->child != NULL ? node : NULL;
    return row->made;
}

/* ---- Single schemas ---- */

const cJSON *schema_opposite(struct schema *s, const cJSON *schema) {
    struct rewrite_row *row = row_of(s, OPPOSITE, schema);
    if (row == NULL || row->done) return row != NULL ? row->made : NULL;
    row->made = negate(s, schema, 0);
    row->done = true;
    return row->made;
}

const cJSON *schema_const(struct schema *s, const cJSON *value) {
    struct rewrite_row *row = row_of(s, CONST, value);
    if (row == NULL || row->done) return row != NULL ? row->made : NULL;
    cJSON *node = new_value(s, cJSON_Object);
    rewrite_put(node, "const", share(s, value));
    row->made = node;
    row->done = true;
    return node;
}

/* ---- oneOf ---- */

/* Makes {"type": "object", "required": [`name`]}. */
static cJSON *new_required(struct schema *s, const char *name) {
    cJSON *node = new_typed(s, "object"), *names = new_value(s, cJSON_Array);
    rewrite_put(names, NULL, rewrite_new_text(s, name));
    rewrite_put(node, "required", names);
    return node;
}

/* Returns the discriminator values that its mapping assigns to a branch. */
static cJSON *mapped_values(struct schema *s, const cJSON *at, const cJSON *mapping,
                            const cJSON *branch) {
    cJSON *values = new_value(s, cJSON_Array);
    const cJSON *child;
    if (!cJSON_IsObject(mapping)) return values;
    cJSON_ArrayForEach(child, mapping) {
        if (!node_work(s->pool, NODE_COST)) break;
        if (cJSON_IsString(child) && schema_is_branch(s, at, branch, child->valuestring))
            rewrite_put(values, NULL, rewrite_new_text(s, child->string));
    }
    return values;
}

/* Makes a condition from OpenAPI's discriminator, which names a member and maps its values to
 * branches: the member is present and has one of the branch's values. No other branch has these
 * values. NULL: there is no such mapping. */
static cJSON *branch_by_mapping(struct schema *s, const cJSON *at, const cJSON *branch) {
    const cJSON *rule = json_get(at, "discriminator"), *name = json_get(rule, "propertyName");
    if (!cJSON_IsObject(rule) || !cJSON_IsString(name)) return NULL;
    cJSON *values = mapped_values(s, at, json_get(rule, "mapping"), branch);
    if (values == NULL || values->child == NULL) return NULL;
    cJSON *node = new_required(s, name->valuestring), *properties = new_value(s, cJSON_Object);
    cJSON *value = new_value(s, cJSON_Object);
    rewrite_put(value, "enum", values);
    rewrite_put(properties, name->valuestring, value);
    rewrite_put(node, "properties", properties);
    return node;
}

/* Adds to `all` a condition that keeps a branch apart from another one. false: refused, or an
 * error. */
static bool keep_apart(struct schema *s, const cJSON *at, const cJSON *branch, const cJSON *other,
                       cJSON *all) {
    if (schema_are_apart(s, branch, other)) return true;
    /* A member with given values is tried first: it costs little, while the opposites of many
     * branches multiply. */
    const cJSON *rule = json_get(json_get(at, "discriminator"), "propertyName");
    const char *name = NULL;
    if (cJSON_IsString(rule) && schema_member_decides(s, branch, other, rule->valuestring))
        name = rule->valuestring;
    if (name == NULL) name = schema_deciding_member(s, branch, other, true);
    const cJSON *rejected = name == NULL ? negate(s, other, 0) : NULL;
    if (s->rc != 0 || s->pool->rc != 0) return false;
    if (rejected == NULL && name == NULL) name = schema_deciding_member(s, branch, other, false);
    if (rejected != NULL || name != NULL) {
        rewrite_put(all, NULL, rejected != NULL ? share(s, rejected) : new_required(s, name));
        return true;
    }
    schema_refuse(s, ERR_UNSUPPORTED, at, "oneOf",
                  "'oneOf' is supported where its branches exclude each other, where a member that "
                  "both declare tells them apart, or where the opposite of those that overlap can "
                  "be written; 'anyOf' has no such condition");
    return false;
}

const cJSON *schema_only(struct schema *s, const cJSON *at, const cJSON *branch,
                         const cJSON *branches) {
    struct rewrite_row *row = row_of(s, ONLY, branch);
    const cJSON *other;
    if (row == NULL || row->done) return row != NULL && row->made != NULL ? row->made : branch;
    cJSON *all, *node = new_list(s, "allOf", &all), *mapped = branch_by_mapping(s, at, branch);
    rewrite_put(all, NULL, share(s, branch));
    rewrite_put(all, NULL, mapped);
    cJSON_ArrayForEach(other, branches) {
        if (mapped == NULL && other != branch && !keep_apart(s, at, branch, other, all))
            return branch;
    }
    row->done = true;
    row->made = all != NULL && all->child->next != NULL ? node : branch;
    return row->made;
}
