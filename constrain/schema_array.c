/* Arrays of a schema. `prefixItems` and `items` are today's names; an array in `items` with
 * `additionalItems` behind it is the older spelling. */
#include <string.h>

#include "base/json.h"
#include "constrain/schema_int.h"

struct element_rules {
    const cJSON *prefix; /* array of schemas, or NULL */
    const cJSON *rest;   /* schema, or NULL */
    const cJSON *next;   /* the first schema of the prefix that has not been used yet */
};

static struct element_rules rules_of(struct schema *s, const cJSON *schema) {
    const cJSON *prefix = json_get(schema, "prefixItems"), *items = json_get(schema, "items");
    struct element_rules rules = {.prefix = prefix, .rest = items};
    if (prefix != NULL && !cJSON_IsArray(prefix))
        schema_refuse(s, ERR_INVALID, schema, "prefixItems", "expected an array of schemas");
    if (cJSON_IsArray(items)) {
        rules.prefix = items;
        rules.rest = json_get(schema, "additionalItems");
    }
    return rules;
}

/* Returns the rules of every conjunct, and the length of the longest prefix. NULL: a fault was
 * noted. */
static struct element_rules *all_rules(struct schema *s, const struct conjunction *c,
                                       uint32_t *longest) {
    struct element_rules *rules = schema_alloc(s, (size_t)c->count, sizeof *rules);
    *longest = 0;
    for (int i = 0; i < c->count && s->rc == 0; i++) {
        rules[i] = rules_of(s, c->list[i].schema);
        if (rules[i].prefix == NULL) continue;
        uint32_t size = (uint32_t)cJSON_GetArraySize(rules[i].prefix);
        rules[i].next = rules[i].prefix->child;
        (void)node_work(s->pool, size / 4);
        if (size > *longest) *longest = size;
    }
    return s->rc == 0 ? rules : NULL;
}

/* Returns what the next element has to satisfy. */
static struct conjunction next_element(struct schema *s, const struct conjunction *c,
                                       struct element_rules *rules) {
    struct conjunction all = schema_open(s, c->count);
    for (int i = 0; i < c->count && s->rc == 0; i++) {
        const cJSON *own = rules[i].next;
        schema_add(s, &all, own != NULL ? own : rules[i].rest);
        if (own != NULL) rules[i].next = own->next;
    }
    return all;
}

/* Returns what an element behind every prefix has to satisfy. */
static struct conjunction rest_element(struct schema *s, const struct conjunction *c,
                                       struct element_rules *rules) {
    for (int i = 0; i < c->count; i++) rules[i].next = NULL;
    return next_element(s, c, rules);
}

/* Returns an element that satisfies the conjunction. */
static uint32_t element_node(struct schema *s, struct conjunction all) {
    uint32_t node = schema_node(s, all);
    return schema_nests(s) ? schema_tag(s, s->tags->item, s->tags->value, node) : node;
}

/* Returns the only schema of the conjunction with `contains`; NULL: there is none, or it was
 * refused. */
static const cJSON *find_contains(struct schema *s, const struct conjunction *c) {
    const cJSON *found = NULL, *schema;
    for (int i = 0; i < c->count; i++) {
        schema = c->list[i].schema;
        const cJSON *min = json_get(schema, "minContains");
        bool all = cJSON_IsNumber(min) && strcmp(min->valuestring, "0") == 0 &&
                   json_get(schema, "maxContains") == NULL && schema_counts_contains(s);
        if (json_get(schema, "contains") == NULL || all) continue;
        if (found != NULL)
            schema_refuse(s, ERR_UNSUPPORTED, schema, "contains",
                          "several 'contains' for one array are not supported");
        found = schema;
    }
    return found;
}

static const cJSON *find_unique(const struct conjunction *c, uint32_t max) {
    for (int i = 0; i < c->count && max > 1; i++)
        if (cJSON_IsTrue(json_get(c->list[i].schema, "uniqueItems"))) return c->list[i].schema;
    return NULL;
}

/* Builds the elements from `index` on, the last one first; if index > 0, others stand before them.
 * `prefix`: expressions of the first `size` elements; `rest`: of the others. */
static uint32_t list_node(struct schema *s, const uint32_t *prefix, uint32_t size, uint32_t rest,
                          uint32_t min, uint32_t max) {
    struct node_pool *pool = s->pool;
    uint32_t comma = schema_nests(s) ? NODE_EMPTY : s->nodes->comma, tail = NODE_EMPTY;
    if (max == 0) return NODE_EMPTY;
    uint32_t first = size > 0 ? prefix[0] : rest, used = size > 0 ? size : 1;
    uint32_t more = max == NODE_ENDLESS ? NODE_ENDLESS : max - used;
    if (rest != NODE_NONE && more > 0)
        tail = node_repeat(pool, node_seq(pool, comma, rest), min > used ? min - used : 0, more);
    for (uint32_t i = size; i-- > 1;) {
        tail = node_seq3(pool, comma, prefix[i], tail);
        if (i >= min) tail = node_option(pool, tail);
    }
    return node_seq(pool, first, tail);
}

static uint32_t bracketed(struct schema *s, uint32_t inner, bool may_be_empty) {
    if (inner != NODE_NONE) return json_brackets(s->nodes, inner, may_be_empty);
    return may_be_empty ? json_brackets(s->nodes, NODE_EMPTY, false) : NODE_NONE;
}

/* Builds an array whose elements depend on each other. false: an expression cannot compare these
 * elements, so the reader has to check `uniqueItems`. */
static bool list_of(struct schema *s, struct element_list *list, const cJSON *contains,
                    const cJSON *unique, uint32_t *node) {
    bool may_be_empty = list->min == 0;
    uint32_t inner = NODE_NONE;
    list->at = contains != NULL ? contains : unique;
    if (contains != NULL)
        inner = schema_contains(s, list, &may_be_empty);
    else if (list->size > 0)
        return false;
    else if (list->rest != NULL && !schema_unique(s, list, &inner))
        return false;
    *node = s->rc == 0 ? bracketed(s, inner, may_be_empty) : NODE_NONE;
    return true;
}

uint32_t schema_array(struct schema *s, const struct conjunction *c) {
    uint32_t min = 0, max = NODE_ENDLESS, size = 0, count, rest = NODE_NONE;
    struct element_rules *rules = all_rules(s, c, &count);
    schema_count(s, c, "minItems", false, &min);
    schema_count(s, c, "maxItems", true, &max);
    const cJSON *contains = find_contains(s, c), *unique = find_unique(c, max);
    if (rules == NULL || s->rc != 0 || min > max) return NODE_NONE;
    const bool compared = contains != NULL || (unique != NULL && max > 1);
    if (compared) s->form = SCHEMA_JSON; /* elements that depend on each other are no tags */
    uint32_t *prefix = schema_alloc(s, count, sizeof *prefix);
    struct conjunction *elements = schema_alloc(s, (size_t)count + 1, sizeof *elements);
    if (prefix == NULL || elements == NULL) return NODE_NONE;
    while (size < count && size < max) {
        elements[size] = next_element(s, c, rules);
        prefix[size] = element_node(s, elements[size]);
        if (s->rc != 0 || prefix[size] == NODE_NONE) break;
        size++;
    }
    if (size < count && size < max) max = size; /* no element may stand after the prefix */
    if (size < max) {
        elements[count] = rest_element(s, c, rules);
        rest = element_node(s, elements[count]);
    }
    if (s->rc != 0 || s->pool->rc != 0) return NODE_NONE;
    if (rest == NODE_NONE && max > size) max = size;
    if (min > max) return NODE_NONE;
    struct element_list list = {.elements = elements,
                                .size = size,
                                .rest = rest != NODE_NONE ? &elements[count] : NULL,
                                .min = min,
                                .max = max};
    uint32_t node;
    if (compared && list_of(s, &list, contains, unique, &node)) return node;
    uint32_t inner = list_node(s, prefix, size, rest, min, max);
    if (schema_nests(s)) {
        const uint32_t empty = min == 0 ? node_text(s->pool, "[]", 2) : NODE_NONE;
        return inner == NODE_EMPTY ? empty : node_alt2(s->pool, inner, empty);
    }
    return json_brackets(s->nodes, inner, min == 0 && max > 0);
}
