/* Arrays whose elements depend on each other: `contains` and `uniqueItems`. Each is a table of the
 * texts that may follow, filled from its end, with a row for each state of the elements written so
 * far. */
#include <string.h>

#include "base/json.h"
#include "constrain/schema_int.h"

#define TABLE_MAX  8192 /* entries of a table */
#define ANY_ORDER  8    /* values that may stand in any order; more keep the order of the enum */
#define VALUES_MAX 512
#define DEPTH_MAX  8 /* how deeply alternatives may be nested whose values are collected */

static uint32_t separated(struct schema *s, bool first, uint32_t element, uint32_t tail) {
    uint32_t node = node_seq(s->pool, element, tail);
    return first ? node : node_seq(s->pool, s->nodes->comma, node);
}

static bool list_fits(struct schema *s, const struct element_list *list, const char *keyword,
                      uint64_t entries) {
    if (entries > TABLE_MAX)
        schema_refuse(s, ERR_LIMIT, list->at, keyword,
                      "the numbers of elements that it has to tell apart are too large");
    return entries <= TABLE_MAX;
}

/* ---- contains ---- */

struct contains {
    struct schema *s;
    const struct element_list *list;
    const cJSON *schema, *opposite; /* opposite: NULL without an upper bound */
    uint32_t min, max;
    uint32_t most; /* number of elements that are counted; later ones are treated alike */
    uint32_t top;  /* the highest count of elements that satisfy the schema */
};

/* Builds the element at a place. `satisfies`: it satisfies the schema; otherwise it need not or,
 * with an upper bound, must not. */
static uint32_t element_at(struct contains *c, uint32_t place, bool satisfies) {
    const struct element_list *list = c->list;
    const struct conjunction *base = place < list->size ? &list->elements[place] : list->rest;
    if (base == NULL) return NODE_NONE;
    struct conjunction all = schema_open(c->s, base->count + 1);
    if (c->s->rc != 0) return NODE_NONE;
    for (int i = 0; i < base->count; i++) schema_add(c->s, &all, base->list[i].schema);
    all.never = base->never;
    schema_add(c->s, &all, satisfies ? c->schema : c->opposite);
    return schema_node(c->s, all);
}

/* Fills the row after `c->most` elements. If the number of elements has an upper bound, nothing
 * follows. */
static void last_row(struct contains *c, uint32_t *row) {
    struct node_pool *pool = c->s->pool;
    bool more = c->list->max == NODE_ENDLESS;
    uint32_t comma = c->s->nodes->comma, loop = NODE_EMPTY, element = NODE_NONE;
    if (more) {
        loop = node_repeat(pool, node_seq(pool, comma, element_at(c, c->most, false)), 0,
                           NODE_ENDLESS);
        element = element_at(c, c->most, true);
    }
    for (uint32_t count = c->top + 1; count-- > 0;) {
        uint32_t end = count >= c->min ? NODE_EMPTY : NODE_NONE;
        if (count < c->top)
            end = node_alt2(pool, end, separated(c->s, false, element, row[count + 1]));
        row[count] = node_seq(pool, loop, end);
    }
}

static void list_fill_row(struct contains *c, uint32_t place, const uint32_t *below,
                          uint32_t *row) {
    uint32_t any = element_at(c, place, false), element = element_at(c, place, true);
    for (uint32_t count = 0; count <= c->top; count++) {
        bool may_end = place > 0 && place >= c->list->min && count >= c->min;
        uint32_t list = node_list_open(c->s->pool);
        if (may_end) node_list_add(c->s->pool, NODE_EMPTY);
        node_list_add(c->s->pool, separated(c->s, place == 0, any, below[count]));
        if (count < c->top)
            node_list_add(c->s->pool, separated(c->s, place == 0, element, below[count + 1]));
        row[count] = node_list_alt(c->s->pool, list);
    }
}

bool schema_counts_contains(const struct schema *s) {
    static const char *const without[] = {"/draft-04/", "/draft-06/", "/draft-07/"};
    const cJSON *draft = json_get(s->root, "$schema");
    for (size_t i = 0; i < sizeof without / sizeof *without && cJSON_IsString(draft); i++)
        if (strstr(draft->valuestring, without[i]) != NULL) return false;
    return true;
}

uint32_t schema_contains(struct schema *s, const struct element_list *list, bool *may_be_empty) {
    struct contains c = {.s = s, .list = list, .schema = json_get(list->at, "contains")};
    struct conjunction one = schema_open(s, 1);
    if (s->rc != 0) return NODE_NONE;
    schema_add(s, &one, list->at);
    bool counts = schema_counts_contains(s);
    c.min = counts && json_get(list->at, "minContains") != NULL ? 0 : 1;
    c.max = NODE_ENDLESS;
    if (counts) schema_count(s, &one, "minContains", false, &c.min);
    if (counts) schema_count(s, &one, "maxContains", true, &c.max);
    bool bounded = c.max != NODE_ENDLESS;
    if (bounded) c.opposite = schema_opposite(s, c.schema);
    if (bounded && c.opposite == NULL)
        schema_refuse(s, ERR_UNSUPPORTED, list->at, "maxContains",
                      "'maxContains' is supported where the opposite of 'contains' can be written");
    c.top = bounded ? c.max : c.min;
    c.most = list->max != NODE_ENDLESS ? list->max
             : list->min > list->size  ? list->min
                                       : list->size;
    *may_be_empty = list->min == 0 && c.min == 0;
    if (s->rc != 0 || c.min > c.top ||
        !list_fits(s, list, "contains", ((uint64_t)c.most + 1) * ((uint64_t)c.top + 1)))
        return NODE_NONE;
    uint32_t *below = schema_alloc(s, (size_t)c.top + 1, sizeof *below);
    uint32_t *row = schema_alloc(s, (size_t)c.top + 1, sizeof *row);
    if (below == NULL || row == NULL) return NODE_NONE;
    if (c.most == 0 && list->max == NODE_ENDLESS) c.most = 1; /* the first one has no comma */
    last_row(&c, below);
    for (uint32_t place = c.most; place-- > 0 && s->rc == 0 && s->pool->rc == 0;) {
        list_fill_row(&c, place, below, row);
        uint32_t *swap = below;
        below = row;
        row = swap;
    }
    return c.most > 0 ? below[0] : NODE_NONE;
}

/* ---- uniqueItems ---- */

/* The different values that elements may have. */
struct values {
    uint32_t nodes[VALUES_MAX];
    const char *texts[VALUES_MAX];
    uint32_t count;
};

/* Adds a value to the list, if elements may have it. false: there are too many, or an error. */
static bool list_add_value(struct schema *s, const struct element_list *list, const cJSON *value,
                           struct values *out) {
    const struct conjunction *elements = list->rest;
    const char *text = schema_canonical(s, value);
    struct conjunction all = schema_open(s, elements->count + 1);
    if (text == NULL || s->rc != 0) return false;
    (void)node_work(s->pool, out->count / 8);
    for (uint32_t i = 0; i < out->count; i++)
        if (strcmp(out->texts[i], text) == 0) return true;
    for (int i = 0; i < elements->count; i++) schema_add(s, &all, elements->list[i].schema);
    schema_add(s, &all, schema_const(s, value));
    uint32_t node = schema_node(s, all);
    if (s->rc != 0 || s->pool->rc != 0) return false;
    if (node == NODE_NONE) return true;
    if (out->count == VALUES_MAX) return false;
    out->texts[out->count] = text;
    out->nodes[out->count++] = node;
    return true;
}

static bool collect_values(struct schema *s, const struct element_list *list,
                           const struct conjunction *c, int depth, struct values *out);

/* Collects the values of the branches of anyOf and oneOf. false: the values of a branch are not
 * given, or are too many. */
static bool collect_branches(struct schema *s, const struct element_list *list,
                             const cJSON *branches, int depth, struct values *out) {
    const cJSON *child;
    if (!cJSON_IsArray(branches) || depth == DEPTH_MAX) return false;
    cJSON_ArrayForEach(child, branches) {
        struct conjunction one = schema_open(s, 1);
        if (s->rc != 0) return false;
        schema_add(s, &one, child);
        if (!collect_values(s, list, &one, depth + 1, out)) return false;
    }
    return true;
}

/* Collects null, false and true. false: the schema names no types or others, or there are too many
 * values. */
static bool collect_words(struct schema *s, const struct element_list *list, const cJSON *schema,
                          struct values *out) {
    static const cJSON words[] = {
        {.type = cJSON_NULL}, {.type = cJSON_False}, {.type = cJSON_True}};
    const cJSON *type = json_get(schema, "type"), *child;
    const cJSON *single = cJSON_IsArray(type) ? NULL : type;
    if (type == NULL) return false;
    for (child = single != NULL ? single : type->child; child != NULL;
         child = single != NULL ? NULL : child->next) {
        if (!cJSON_IsString(child) ||
            (strcmp(child->valuestring, "null") != 0 && strcmp(child->valuestring, "boolean") != 0))
            return false;
    }
    for (size_t i = 0; i < sizeof words / sizeof *words && s->rc == 0; i++)
        if (!list_add_value(s, list, &words[i], out)) return false;
    return true;
}

/* Collects those values of a conjunction of schemas that elements may have. false: the values are
 * not given, or are too many. */
static bool collect_values(struct schema *s, const struct element_list *list,
                           const struct conjunction *c, int depth, struct values *out) {
    struct conjunction all = schema_flatten(s, c);
    if (all.never) return true;
    for (int i = 0; i < all.count && s->rc == 0; i++) {
        const cJSON *schema = all.list[i].schema, *child;
        const cJSON *values = json_get(schema, "enum"), *only = json_get(schema, "const");
        if (only != NULL) return list_add_value(s, list, only, out);
        if (!cJSON_IsArray(values)) continue;
        cJSON_ArrayForEach(child, values) {
            if (!list_add_value(s, list, child, out)) return false;
        }
        return true;
    }
    uint32_t before = out->count;
    for (int i = 0; i < all.count && s->rc == 0; i++) {
        const cJSON *schema = all.list[i].schema;
        if (collect_words(s, list, schema, out) ||
            collect_branches(s, list, json_get(schema, "anyOf"), depth, out) ||
            collect_branches(s, list, json_get(schema, "oneOf"), depth, out))
            return true;
        out->count = before;
    }
    return false;
}

/* Builds a row for each set of values that may have been written. */
static uint32_t any_order(struct schema *s, const struct element_list *list,
                          const struct values *v) {
    struct node_pool *pool = s->pool;
    uint32_t rows[1 << ANY_ORDER], sets = 1u << v->count;
    for (uint32_t set = sets; set-- > 0;) {
        uint32_t written = (uint32_t)__builtin_popcount(set), open = node_list_open(pool);
        if (set != 0 && written >= list->min) node_list_add(pool, NODE_EMPTY);
        for (uint32_t i = 0; i < v->count && written < list->max; i++)
            if (!(set >> i & 1))
                node_list_add(pool, separated(s, set == 0, v->nodes[i], rows[set | 1u << i]));
        rows[set] = node_list_alt(pool, open);
    }
    return rows[0];
}

/* Builds a row for each value, with a column for each number of values written so far. */
static uint32_t one_order(struct schema *s, const struct element_list *list,
                          const struct values *v) {
    struct node_pool *pool = s->pool;
    uint32_t most = list->max != NODE_ENDLESS ? list->max : list->min > 1 ? list->min : 1;
    if (most > v->count) most = v->count;
    uint32_t *row = schema_alloc(s, (size_t)most + 1, sizeof *row);
    if (row == NULL) return NODE_NONE;
    for (uint32_t n = 0; n <= most; n++) row[n] = n > 0 && n >= list->min ? NODE_EMPTY : NODE_NONE;
    for (uint32_t i = v->count; i-- > 0;)
        for (uint32_t n = 0; n <= most; n++) {
            uint32_t next = n < most ? n + 1 : list->max > most ? n : 0;
            if (next == 0) continue;
            row[n] = node_alt2(pool, row[n], separated(s, n == 0, v->nodes[i], row[next]));
        }
    return row[0];
}

/* Returns whether the table of one_order would be too large. */
static bool exceeds_table(const struct element_list *list, const struct values *v) {
    uint64_t most = list->max != NODE_ENDLESS ? list->max : list->min;
    if (most > v->count) most = v->count;
    return v->count > ANY_ORDER && (most + 2) * (v->count + 1) > TABLE_MAX;
}

bool schema_unique(struct schema *s, const struct element_list *list, uint32_t *node) {
    struct values *values = schema_alloc(s, 1, sizeof *values);
    *node = NODE_NONE;
    if (values == NULL) return true;
    values->count = 0;
    bool given = collect_values(s, list, list->rest, 0, values);
    if (s->rc != 0 || s->pool->rc != 0) return true;
    if (!given || exceeds_table(list, values)) return false;
    *node = values->count <= ANY_ORDER ? any_order(s, list, values) : one_order(s, list, values);
    return true;
}
