/* Arrays of a schema. `prefixItems` and `items` are today's names; an array in `items` with
 * `additionalItems` behind it is the older spelling. */
#include "base/json.h"
#include "constrain/schema_int.h"

struct element_rules {
    const cJSON *prefix; /* array of schemas, or NULL */
    const cJSON *rest;   /* schema, or NULL */
    const cJSON *next;   /* the first schema of the prefix that was not used yet */
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

/* Returns the rules of every conjunct, and the length of the longest prefix. NULL: noted. */
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

/* Builds the next element. */
static uint32_t element_node(struct schema *s, const struct conjunction *c,
                             struct element_rules *rules) {
    struct conjunction all = schema_open(s, c->count);
    for (int i = 0; i < c->count && s->rc == 0; i++) {
        const cJSON *own = rules[i].next;
        schema_add(s, &all, own != NULL ? own : rules[i].rest);
        if (own != NULL) rules[i].next = own->next;
    }
    return schema_node(s, all);
}

/* Builds an element behind every prefix. */
static uint32_t rest_node(struct schema *s, const struct conjunction *c,
                          struct element_rules *rules) {
    for (int i = 0; i < c->count; i++) rules[i].next = NULL;
    return element_node(s, c, rules);
}

static void check_unique(struct schema *s, const struct conjunction *c, uint32_t max) {
    for (int i = 0; i < c->count && max > 1; i++)
        if (cJSON_IsTrue(json_get(c->list[i].schema, "uniqueItems")))
            schema_refuse(s, ERR_UNSUPPORTED, c->list[i].schema, "uniqueItems",
                          "the keyword 'uniqueItems' is not supported");
}

/* Builds the elements from `index` on, from the last one to the first; with index > 0 others stand
 * before them. `prefix`: expressions of the first `size` elements; `rest`: of the others. */
static uint32_t list_node(struct schema *s, const uint32_t *prefix, uint32_t size, uint32_t rest,
                          uint32_t min, uint32_t max) {
    struct node_pool *pool = s->pool;
    uint32_t comma = s->nodes->comma, tail = NODE_EMPTY;
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

uint32_t schema_array(struct schema *s, const struct conjunction *c) {
    uint32_t min = 0, max = NODE_ENDLESS, size = 0, count;
    struct element_rules *rules = all_rules(s, c, &count);
    schema_count(s, c, "minItems", false, &min);
    schema_count(s, c, "maxItems", true, &max);
    check_unique(s, c, max);
    if (rules == NULL || s->rc != 0 || min > max) return NODE_NONE;
    uint32_t *prefix = schema_alloc(s, count, sizeof *prefix);
    if (prefix == NULL) return NODE_NONE;
    while (size < count && size < max) {
        prefix[size] = element_node(s, c, rules);
        if (s->rc != 0 || prefix[size] == NODE_NONE) break;
        size++;
    }
    if (size < count && size < max) max = size; /* no element can stand there */
    uint32_t rest = size < max ? rest_node(s, c, rules) : NODE_NONE;
    if (s->rc != 0 || s->pool->rc != 0) return NODE_NONE;
    if (rest == NODE_NONE && max > size) max = size;
    if (min > max) return NODE_NONE;
    uint32_t inner = list_node(s, prefix, size, rest, min, max);
    return json_brackets(s->nodes, inner, min == 0 && max > 0);
}
