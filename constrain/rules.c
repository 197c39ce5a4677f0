#include "constrain/rules.h"

#include <string.h>

#include "base/mem.h"

#define NODES_PER_WORK 8    /* nodes and children that one unit of work pays for in a pass */
#define INLINE_MAX     64   /* the most parts of a rule's body that may replace its name */
#define INLINE_PASSES  32   /* how many inlined rules may lie inside each other */
#define SEARCH_DEPTH   4096 /* how deep a search goes into rules and groups */

/* Facts about nodes and rules, by id. Nodes refer only to nodes made before them, and to rules. */
struct facts {
    struct node_pool *pool;
    bool *ends;     /* [nodes] the node's language has a string, if rules are followed */
    bool *empty;    /* [nodes] the node's language has "" */
    uint32_t *made; /* [nodes] 1 + the new node, without the parts that can never end */
    uint32_t count; /* number of nodes in the arrays */
    uint8_t *mark;  /* [rules] 1: on the path of the search; 2: finished */
    int depth;
};

/* ---- Parts that end ---- */

static bool fact_of(const struct facts *f, const struct node *node, const bool *known,
                    bool of_repeat) {
    const struct node_pool *pool = f->pool;
    bool any = false;
    switch ((enum node_kind)node->kind) {
    case NODE_KIND_SEQ:
        return known[node->a] && known[node->b];
    case NODE_KIND_ALT:
        for (uint32_t i = 0; i < node->b; i++) any = any || known[pool->children[node->a + i]];
        return any;
    case NODE_KIND_REPEAT:
        return of_repeat || known[node->a];
    case NODE_KIND_RULE:
        return known[pool->rules[node->a]];
    default:
        return false;
    }
}

/* Finds the facts: repeats passes over all nodes until nothing changes. A pass settles everything
 * but the nodes that need a rule with a higher number. So few passes are needed in practice, and at
 * most one for each rule. */
static void find_facts(struct facts *f) {
    struct node_pool *pool = f->pool;
    bool changed = true;
    for (uint32_t i = 0; i < f->count; i++) {
        const struct node *node = &pool->nodes[i];
        f->ends[i] = node->regular && i != NODE_NONE;
        f->empty[i] = node->regular && node->nullable;
    }
    while (changed && pool->rc == 0) {
        changed = false;
        for (uint32_t i = 0; i < f->count; i++) {
            const struct node *node = &pool->nodes[i];
            if (node->regular) continue;
            bool ends = fact_of(f, node, f->ends, node->min == 0);
            bool empty = fact_of(f, node, f->empty, node->min == 0);
            changed = changed || ends != f->ends[i] || empty != f->empty[i];
            f->ends[i] = ends;
            f->empty[i] = empty;
        }
        (void)node_work(pool, f->count / NODES_PER_WORK + pool->child_count / NODES_PER_WORK);
    }
}

/* ---- Removing rules that are not needed ---- */

/* Returns whether a rule's body may replace its name. Only short bodies may, because each use
 * copies them. */
static bool is_inline(const struct node_pool *pool, uint32_t id) {
    const struct node *node = &pool->nodes[id];
    if (!node->regular || (node->kind == NODE_KIND_ALT && node->b > INLINE_MAX)) return false;
    for (int i = 0; node->kind == NODE_KIND_SEQ; i++) {
        if (i == INLINE_MAX) return false;
        node = &pool->nodes[node->b];
    }
    return true;
}

static uint32_t count_inline(const struct node_pool *pool) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < pool->rule_count; i++) count += is_inline(pool, pool->rules[i]);
    return count;
}

/* Makes the new nodes in the order of the old ids, so that the parts of a node are made before it.
 */
static void make_all(struct facts *f) {
    struct node_pool *pool = f->pool;
    for (uint32_t i = 0; i < f->count && pool->rc == 0; i++) {
        struct node node = pool->nodes[i];
        uint32_t made = i, list;
        if (!f->ends[i]) {
            made = NODE_NONE;
        } else if (!node.regular) {
            switch ((enum node_kind)node.kind) {
            case NODE_KIND_SEQ:
                made = node_seq(pool, f->made[node.a] - 1, f->made[node.b] - 1);
                break;
            case NODE_KIND_ALT:
                list = node_list_open(pool);
                for (uint32_t k = 0; k < node.b; k++)
                    node_list_add(pool, f->made[pool->children[node.a + k]] - 1);
                made = node_list_alt(pool, list);
                break;
            case NODE_KIND_REPEAT:
                made = node_repeat(pool, f->made[node.a] - 1, node.min, node.max);
                break;
            case NODE_KIND_RULE:
                if (is_inline(pool, pool->rules[node.a])) made = pool->rules[node.a];
                break;
            default:
                break;
            }
        }
        f->made[i] = made + 1;
    }
    for (uint32_t i = 0; i < pool->rule_count && pool->rc == 0; i++)
        pool->rules[i] = f->made[pool->rules[i]] - 1;
}

/* ---- Left recursion ---- */

static bool rules_begins_with(const struct node_pool *pool, uint32_t id, uint32_t rule) {
    const struct node *node = &pool->nodes[id];
    if (node->kind == NODE_KIND_SEQ) node = &pool->nodes[node->a];
    return node->kind == NODE_KIND_RULE && node->a == rule;
}

/* Turns A: A x | y into A: y x*. */
static void unwind(struct node_pool *pool, uint32_t rule) {
    uint32_t body = pool->rules[rule], own = 0, others;
    const struct node *node = &pool->nodes[body];
    uint32_t count = node->kind == NODE_KIND_ALT ? node->b : 1, first = node->a;
    bool is_alt = node->kind == NODE_KIND_ALT;
    for (uint32_t i = 0; i < count; i++)
        own += rules_begins_with(pool, is_alt ? pool->children[first + i] : body, rule);
    if (own == 0) return;
    uint32_t list = node_list_open(pool);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t child = is_alt ? pool->children[first + i] : body;
        if (!rules_begins_with(pool, child, rule)) node_list_add(pool, child);
    }
    others = node_list_alt(pool, list);
    list = node_list_open(pool);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t child = is_alt ? pool->children[first + i] : body;
        if (rules_begins_with(pool, child, rule) && pool->nodes[child].kind == NODE_KIND_SEQ)
            node_list_add(pool, pool->nodes[child].b);
    }
    uint32_t more = node_repeat(pool, node_list_alt(pool, list), 0, NODE_ENDLESS);
    pool->rules[rule] = node_seq(pool, others, more);
}

static bool finds_itself(struct facts *f, uint32_t rule, uint32_t *found);

static bool search_inside(struct facts *f, uint32_t id, uint32_t *found);

/* Returns whether a node can begin with a rule that is on the path of the search: left recursion.
 */
static bool rules_search(struct facts *f, uint32_t id, uint32_t *found) {
    f->depth++;
    bool finds = search_inside(f, id, found);
    f->depth--;
    return finds;
}

static bool search_inside(struct facts *f, uint32_t id, uint32_t *found) {
    const struct node_pool *pool = f->pool;
    const struct node *node = &pool->nodes[id];
    if (f->depth >= SEARCH_DEPTH) f->pool->rc = ERR_LIMIT;
    if (!node_work(f->pool, 1)) return false;
    while (node->kind == NODE_KIND_SEQ && !node->regular) {
        if (rules_search(f, node->a, found)) return true;
        if (node->a >= f->count || !f->empty[node->a]) return false;
        node = &pool->nodes[node->b];
    }
    if (node->regular) return false;
    if (node->kind == NODE_KIND_RULE) return finds_itself(f, node->a, found);
    if (node->kind == NODE_KIND_REPEAT) return rules_search(f, node->a, found);
    for (uint32_t i = 0; node->kind == NODE_KIND_ALT && i < node->b; i++)
        if (rules_search(f, pool->children[node->a + i], found)) return true;
    return false;
}

static bool finds_itself(struct facts *f, uint32_t rule, uint32_t *found) {
    if (f->mark[rule] == 2) return false;
    *found = rule;
    if (f->mark[rule] == 1) return true;
    f->mark[rule] = 1;
    bool finds = f->pool->rc == 0 && rules_search(f, f->pool->rules[rule], found);
    f->mark[rule] = 2;
    return finds;
}

static bool alloc_facts(struct facts *f) {
    mem_free(f->ends);
    mem_free(f->empty);
    f->count = f->pool->count;
    f->ends = mem_try_alloc(f->count, sizeof *f->ends);
    f->empty = mem_try_alloc(f->count, sizeof *f->empty);
    return f->ends != NULL && f->empty != NULL;
}

/* Makes all nodes again, without the parts that can never end, and with the bodies of short regular
 * rules in place of their names. */
static int remake(struct facts *f, uint32_t *root) {
    struct node_pool *pool = f->pool;
    if (!alloc_facts(f)) return ERR_NOMEM;
    mem_free(f->made);
    f->made = mem_try_alloc(f->count, sizeof *f->made);
    if (f->made == NULL) return ERR_NOMEM;
    find_facts(f);
    make_all(f);
    if (pool->rc == 0) *root = f->made[*root] - 1;
    return pool->rc;
}

static int rules_prepare_facts(struct facts *f, uint32_t *root, uint32_t *rule) {
    struct node_pool *pool = f->pool;
    f->mark = mem_try_alloc((size_t)pool->rule_count + 1, sizeof *f->mark);
    if (f->mark == NULL) return ERR_NOMEM;
    int rc = remake(f, root);
    for (uint32_t i = 0; i < pool->rule_count && rc == 0; i++) unwind(pool, i);
    uint32_t before = 0, count = count_inline(pool);
    for (int i = 0; i < INLINE_PASSES && count > before && rc == 0; i++) {
        rc = remake(f, root);
        before = count;
        count = count_inline(pool);
    }
    if (rc != 0 || pool->rc != 0) return rc != 0 ? rc : pool->rc;
    if (!alloc_facts(f)) return ERR_NOMEM;
    find_facts(f);
    for (uint32_t i = 0; i < pool->rule_count && pool->rc == 0; i++)
        if (finds_itself(f, i, rule)) return ERR_UNSUPPORTED;
    return pool->rc;
}

int rules_prepare(struct node_pool *pool, uint32_t root, uint32_t *out, uint32_t *rule) {
    struct facts f = {.pool = pool};
    *out = root;
    if (pool->rule_count == 0 || pool->rc != 0) return pool->rc;
    int rc = rules_prepare_facts(&f, out, rule);
    mem_free(f.ends);
    mem_free(f.empty);
    mem_free(f.made);
    mem_free(f.mark);
    return rc;
}
