/* The pool of expressions: memory, interning, simplifying constructors. */
#include "constrain/node.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "constrain/node_int.h"

#define TABLE_MIN 1024u

/* ---- Memory ---- */

bool node_reserve(struct node_pool *pool, void *array, uint32_t count, uint32_t *capacity,
                  size_t size, uint32_t more) {
    void **at = array;
    uint64_t wanted = (uint64_t)count + more, room = *capacity > 0 ? *capacity : 64;
    if (wanted <= *capacity) return true;
    while (room < wanted) room *= 2;
    void *grown = room <= UINT32_MAX ? mem_try_realloc(*at, *capacity * size, room * size) : NULL;
    if (grown == NULL) {
        pool->rc = ERR_NOMEM;
        return false;
    }
    *at = grown;
    *capacity = (uint32_t)room;
    return true;
}

void node_push(struct node_pool *pool, uint32_t value) {
    if (!node_reserve(pool, &pool->scratch, pool->scratch_count, &pool->scratch_capacity,
                      sizeof *pool->scratch, 1))
        return;
    pool->scratch[pool->scratch_count++] = value;
}

void node_prepare(struct node_pool *pool, void *array, uint32_t count, uint32_t *capacity,
                  size_t size, uint32_t more) {
    void **at = array;
    if (node_reserve(pool, array, count, capacity, size, more))
        memset((char *)*at + count * size, 0, more * size);
}

static void add_constant(struct node_pool *pool, enum node_kind kind) {
    bool nullable = kind != NODE_KIND_NONE;
    pool->nodes[pool->count++] = (struct node){.kind = (uint8_t)kind,
                                               .nullable = nullable,
                                               .regular = true,
                                               .exact = true,
                                               .alive = nullable ? NODE_ALIVE : NODE_DEAD};
}

bool node_pool_open(struct node_pool *pool, uint32_t limit) {
    *pool = (struct node_pool){
        .limit = limit, .levels_limit = CONSTRAIN_LEVELS_MAX, .work_limit = UINT64_MAX};
    pool->table = mem_try_alloc(TABLE_MIN, sizeof *pool->table);
    pool->table_size = TABLE_MIN;
    if (pool->table == NULL ||
        !node_reserve(pool, &pool->nodes, 0, &pool->capacity, sizeof *pool->nodes, 3)) {
        node_pool_close(pool);
        return false;
    }
    add_constant(pool, NODE_KIND_NONE);
    add_constant(pool, NODE_KIND_EMPTY);
    add_constant(pool, NODE_KIND_ALL);
    return true;
}

void node_pool_close(struct node_pool *pool) {
    mem_free(pool->nodes);
    mem_free(pool->children);
    mem_free(pool->sets);
    mem_free(pool->table);
    node_derivatives_free(pool);
    mem_free(pool->rules);
    mem_free(pool->scratch);
    *pool = (struct node_pool){0};
}

/* ---- Interning ---- */

static bool has_list(uint8_t kind) {
    return kind == NODE_KIND_ALT || kind == NODE_KIND_AND;
}

/* A node that is searched for or added. `list`: the children of ALT and AND; `set`: the bytes of
 * BYTES. */
struct wanted {
    struct node node;
    const uint32_t *list;
    const struct byte_set *set;
};

static struct wanted as_wanted(const struct node_pool *pool, const struct node *node) {
    struct wanted wanted = {.node = *node};
    if (has_list(node->kind)) wanted.list = pool->children + node->a;
    if (node->kind == NODE_KIND_BYTES) wanted.set = &pool->sets[node->a];
    return wanted;
}

static uint32_t hash_of(const struct wanted *wanted) {
    const struct node *node = &wanted->node;
    uint32_t hash = node_mix(node->kind, node->b);
    for (int i = 0; wanted->set != NULL && i < 4; i++)
        hash = node_mix(node_mix(hash, (uint32_t)wanted->set->bits[i]),
                        (uint32_t)(wanted->set->bits[i] >> 32));
    for (uint32_t i = 0; wanted->list != NULL && i < node->b; i++)
        hash = node_mix(hash, wanted->list[i]);
    if (wanted->set != NULL || wanted->list != NULL) return hash;
    return node_mix(node_mix(node_mix(hash, node->a), node->min), node->max);
}

static bool node_is_same(const struct node_pool *pool, const struct node *x,
                         const struct wanted *wanted) {
    const struct node *y = &wanted->node;
    if (x->kind != y->kind || x->b != y->b) return false;
    if (wanted->set != NULL)
        return memcmp(&pool->sets[x->a], wanted->set, sizeof *wanted->set) == 0;
    if (!has_list(x->kind)) return x->a == y->a && x->min == y->min && x->max == y->max;
    return memcmp(pool->children + x->a, wanted->list, x->b * sizeof *wanted->list) == 0;
}

static void chain_node(struct node_pool *pool, uint32_t id) {
    struct node *node = &pool->nodes[id];
    const struct wanted wanted = as_wanted(pool, node);
    uint32_t at = hash_of(&wanted) & (pool->table_size - 1);
    node->next = pool->table[at];
    pool->table[at] = id;
}

/* Rebuilds the hash chains. The first three nodes are not in them: nothing looks them up. */
static void link_all(struct node_pool *pool) {
    memset(pool->table, 0, pool->table_size * sizeof *pool->table);
    for (uint32_t i = NODE_ALL + 1; i < pool->count; i++) chain_node(pool, i);
}

static void grow_table(struct node_pool *pool) {
    if (pool->count < pool->table_size || pool->table_size >= 1u << 30) return;
    uint32_t *table = mem_try_alloc((size_t)pool->table_size * 2, sizeof *table);
    if (table == NULL) return; /* the old table is slower, but still right */
    mem_free(pool->table);
    pool->table = table;
    pool->table_size *= 2;
    link_all(pool);
}

bool node_work(struct node_pool *pool, uint64_t amount) {
    if (pool->rc != 0) return false;
    pool->work += amount;
    if (pool->work > pool->work_limit) pool->rc = ERR_LIMIT;
    return pool->rc == 0;
}

bool node_pool_resume(struct node_pool *pool) {
    if (pool->rc != ERR_LIMIT || pool->work <= pool->work_limit) return false;
    pool->rc = 0;
    pool->scratch_count = 0;
    return true;
}

/* Copies the parts of a node that lie in other arrays: its children, or its set. */
static bool add_outside(struct node_pool *pool, const struct wanted *wanted, struct node *node) {
    if (wanted->list != NULL) {
        if (pool->child_count > CONSTRAIN_CHILDREN_MAX - node->b) pool->rc = ERR_LIMIT;
        if (pool->rc != 0 || !node_reserve(pool, &pool->children, pool->child_count,
                                           &pool->child_capacity, sizeof *wanted->list, node->b))
            return false;
        memcpy(pool->children + pool->child_count, wanted->list, node->b * sizeof *wanted->list);
        node->a = pool->child_count;
        pool->child_count += node->b;
    } else if (wanted->set != NULL) {
        if (!node_reserve(pool, &pool->sets, pool->set_count, &pool->set_capacity,
                          sizeof *wanted->set, 1))
            return false;
        node->a = pool->set_count;
        pool->sets[pool->set_count++] = *wanted->set;
    }
    return true;
}

/* Adds a node that is not in the pool yet. The list may lie in scratch. */
static uint32_t add_to_pool(struct node_pool *pool, const struct wanted *wanted) {
    struct node node = wanted->node;
    if (pool->count >= pool->limit || node.levels > pool->levels_limit) pool->rc = ERR_LIMIT;
    if (pool->rc != 0 ||
        !node_reserve(pool, &pool->nodes, pool->count, &pool->capacity, sizeof node, 1) ||
        !add_outside(pool, wanted, &node))
        return NODE_NONE;
    pool->nodes[pool->count] = node;
    grow_table(pool);
    chain_node(pool, pool->count);
    return pool->count++;
}

static uint32_t find_or_add(struct node_pool *pool, const struct wanted *wanted) {
    if (!node_work(pool, 1)) return NODE_NONE;
    uint32_t id = pool->table[hash_of(wanted) & (pool->table_size - 1)];
    while (id != 0 && !node_is_same(pool, &pool->nodes[id], wanted)) id = pool->nodes[id].next;
    return id != 0 ? id : add_to_pool(pool, wanted);
}

static uint32_t intern(struct node_pool *pool, const struct node *node) {
    return find_or_add(pool, &(struct wanted){.node = *node});
}

struct node_mark node_pool_mark(const struct node_pool *pool) {
    return (struct node_mark){pool->count, pool->child_count, pool->set_count};
}

static void set_counts(struct node_pool *pool, const struct node_mark *mark) {
    pool->count = mark->nodes;
    pool->child_count = mark->children;
    pool->set_count = mark->sets;
}

/* Forgets the tables that refer to nodes by ids, which are no longer valid. */
static void forget_ids(struct node_pool *pool) {
    pool->scratch_count = 0;
    pool->rc = 0;
    node_derivatives_forget(pool);
    link_all(pool);
}

void node_pool_reset(struct node_pool *pool, const struct node_mark *mark) {
    set_counts(pool, mark);
    forget_ids(pool);
}

/* Returns the place of the node's i-th part; NULL: it has fewer. A rule's body is no part: it was
 * compiled with the language, so it is kept anyway. */
static uint32_t *part_at(struct node_pool *pool, struct node *node, uint32_t i) {
    if (has_list(node->kind)) return i < node->b ? &pool->children[node->a + i] : NULL;
    bool two = node->kind == NODE_KIND_SEQ;
    bool one = two || node->kind == NODE_KIND_NOT || node->kind == NODE_KIND_REPEAT;
    if (i == 0 && one) return &node->a;
    return i == 1 && two ? &node->b : NULL;
}

/* Moves a node, with its children or its set, to the end of the nodes that were kept. */
static uint32_t move_node(struct node_pool *pool, const struct node_mark *mark, const uint32_t *ids,
                          struct node node) {
    if (has_list(node.kind)) {
        memmove(pool->children + pool->child_count, pool->children + node.a,
                node.b * sizeof *pool->children);
        node.a = pool->child_count;
        pool->child_count += node.b;
    } else if (node.kind == NODE_KIND_BYTES) {
        pool->sets[pool->set_count] = pool->sets[node.a];
        node.a = pool->set_count++;
    }
    uint32_t *part;
    for (uint32_t i = 0; (part = part_at(pool, &node, i)) != NULL; i++)
        if (*part >= mark->nodes) *part = ids[*part - mark->nodes];
    pool->nodes[pool->count] = node;
    return pool->count++;
}

/* Keeps the marked nodes and their parts. A node is younger than its parts, and the same order
 * holds for the children and sets in their arrays; so everything moves towards the beginning and
 * nothing is overwritten before it was moved. */
void node_pool_keep(struct node_pool *pool, const struct node_mark *mark, uint32_t *ids) {
    uint32_t first = mark->nodes, end = pool->count, *part;
    for (uint32_t id = end; id-- > first;)
        for (uint32_t i = 0;
             ids[id - first] != 0 && (part = part_at(pool, &pool->nodes[id], i)) != NULL; i++)
            if (*part >= first) ids[*part - first] = 1;
    set_counts(pool, mark);
    for (uint32_t id = first; id < end; id++)
        if (ids[id - first] != 0) ids[id - first] = move_node(pool, mark, ids, pool->nodes[id]);
    forget_ids(pool);
}

size_t node_pool_bytes(const struct node_pool *pool) {
    return pool->capacity * sizeof *pool->nodes + pool->child_capacity * sizeof *pool->children +
           pool->set_capacity * sizeof *pool->sets + pool->table_size * sizeof *pool->table +
           node_derivatives_bytes(pool) + pool->rule_capacity * sizeof *pool->rules +
           pool->scratch_capacity * sizeof *pool->scratch;
}

void node_shrink(void *array, uint32_t count, uint32_t *capacity, size_t size) {
    void **at = array, *smaller = NULL;
    if (count >= *capacity) return;
    if (count == 0)
        mem_free(*at);
    else if ((smaller = mem_try_realloc(*at, *capacity * size, count * size)) == NULL)
        return;
    *at = smaller;
    *capacity = count;
}

void node_pool_shrink(struct node_pool *pool) {
    node_shrink(&pool->nodes, pool->count, &pool->capacity, sizeof *pool->nodes);
    node_shrink(&pool->children, pool->child_count, &pool->child_capacity, sizeof *pool->children);
    node_shrink(&pool->sets, pool->set_count, &pool->set_capacity, sizeof *pool->sets);
    node_shrink(&pool->scratch, pool->scratch_count + 1, &pool->scratch_capacity,
                sizeof *pool->scratch);
    node_derivatives_free(pool);
}

void node_pool_prepare(struct node_pool *pool) {
    node_prepare(pool, &pool->nodes, pool->count, &pool->capacity, sizeof *pool->nodes,
                 CONSTRAIN_PREPARED);
    node_prepare(pool, &pool->children, pool->child_count, &pool->child_capacity,
                 sizeof *pool->children, CONSTRAIN_PREPARED);
    node_prepare(pool, &pool->scratch, pool->scratch_count, &pool->scratch_capacity,
                 sizeof *pool->scratch, CONSTRAIN_PREPARED);
    node_derivatives_prepare(pool);
}

/* ---- Sets ---- */

void byte_set_range(struct byte_set *set, unsigned first, unsigned last) {
    for (unsigned byte = first; byte <= last; byte++) byte_set_add(set, byte);
}

bool byte_set_empty(const struct byte_set *set) {
    return (set->bits[0] | set->bits[1] | set->bits[2] | set->bits[3]) == 0;
}

static int count_bytes(const struct byte_set *set) {
    int count = 0;
    for (int k = 0; k < 4; k++) count += __builtin_popcountll(set->bits[k]);
    return count;
}

uint32_t node_bytes(struct node_pool *pool, const struct byte_set *set) {
    if (byte_set_empty(set) || pool->rc != 0) return NODE_NONE;
    struct node node = {.kind = NODE_KIND_BYTES,
                        .regular = true,
                        .exact = true,
                        .alive = NODE_ALIVE,
                        .wide = count_bytes(set) >= NODE_WIDE,
                        .shortest = 1};
    return find_or_add(pool, &(struct wanted){.node = node, .set = set});
}

uint32_t node_range(struct node_pool *pool, unsigned first, unsigned last) {
    struct byte_set set = {0};
    byte_set_range(&set, first, last);
    return node_bytes(pool, &set);
}

uint32_t node_text(struct node_pool *pool, const char *text, size_t size) {
    uint32_t node = NODE_EMPTY;
    while (size > 0) {
        unsigned byte = (unsigned char)text[--size];
        node = node_seq(pool, node_range(pool, byte, byte), node);
    }
    return node;
}

/* ---- Constructors ---- */

/* Returns the levels of a node whose parts have at most `most`. A limit that fits 16 bits holds for
 * every node. */
static uint16_t levels_around(uint16_t most) {
    return (uint16_t)(most + 1);
}

static uint16_t node_larger(uint16_t x, uint16_t y) {
    return x > y ? x : y;
}

/* Two functions recurse into a sequence's second part: the derivative, if the first part matches
 * the empty string; and the search for a string, if the second part is neither nullable nor exact.
 * Neither recurses along a chain of sequences. */
static uint16_t seq_levels(const struct node *x, const struct node *y) {
    bool enters = x->nullable || (!y->nullable && !y->exact);
    uint16_t second = y->kind == NODE_KIND_SEQ ? y->levels : levels_around(y->levels);
    return node_larger(levels_around(x->levels), enters ? second : 0);
}

static uint8_t shortest_of(uint64_t bytes) {
    return (uint8_t)(bytes < NODE_SHORTEST_MAX ? bytes : NODE_SHORTEST_MAX);
}

static uint32_t make_seq(struct node_pool *pool, uint32_t a, uint32_t b) {
    if (a == NODE_NONE || b == NODE_NONE) return NODE_NONE;
    if (a == NODE_EMPTY) return b;
    if (b == NODE_EMPTY) return a;
    const struct node *x = &pool->nodes[a], *y = &pool->nodes[b];
    if (a == NODE_ALL && (b == NODE_ALL || (y->kind == NODE_KIND_SEQ && y->a == NODE_ALL)))
        return b;
    struct node node = {.kind = NODE_KIND_SEQ,
                        .nullable = x->nullable && y->nullable,
                        .regular = x->regular && y->regular,
                        .exact = x->exact && y->exact,
                        .wide = x->wide || (x->nullable && y->wide),
                        .shortest = shortest_of((uint64_t)x->shortest + y->shortest),
                        .levels = seq_levels(x, y),
                        .a = a,
                        .b = b};
    return intern(pool, &node);
}

/* Keeps the head of a sequence from being a sequence, so that equal sequences are equal nodes. */
uint32_t node_seq(struct node_pool *pool, uint32_t a, uint32_t b) {
    uint32_t mark = pool->scratch_count;
    while (pool->nodes[a].kind == NODE_KIND_SEQ) {
        node_push(pool, pool->nodes[a].a);
        a = pool->nodes[a].b;
    }
    b = make_seq(pool, a, b);
    while (pool->scratch_count > mark) b = make_seq(pool, pool->scratch[--pool->scratch_count], b);
    return pool->rc == 0 ? b : NODE_NONE;
}

uint32_t node_seq3(struct node_pool *pool, uint32_t a, uint32_t b, uint32_t c) {
    return node_seq(pool, a, node_seq(pool, b, c));
}

static int compare_ids(const void *a, const void *b) {
    uint32_t x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return (x > y) - (x < y);
}

/* Sorts scratch[mark, ...) and drops equal elements. */
static void sort_scratch(struct node_pool *pool, uint32_t mark) {
    uint32_t count = pool->scratch_count - mark, kept = 0, *list = pool->scratch + mark;
    if (count < 2 || !node_work(pool, count / LIST_PER_WORK)) return;
    qsort(list, count, sizeof *list, compare_ids);
    for (uint32_t i = 0; i < count; i++)
        if (kept == 0 || list[kept - 1] != list[i]) list[kept++] = list[i];
    pool->scratch_count = mark + kept;
}

void node_push_flat(struct node_pool *pool, enum node_kind kind, uint32_t id) {
    const struct node *node = &pool->nodes[id];
    if (node->kind != kind) {
        node_push(pool, id);
        return;
    }
    for (uint32_t i = 0; i < node->b; i++) node_push(pool, pool->children[node->a + i]);
}

struct list_facts {
    bool nullable, regular, exact, wide;
    uint8_t shortest;
    uint16_t levels;
};

static struct list_facts facts_of(const struct node_pool *pool, uint32_t mark, bool conjunction) {
    struct list_facts facts = {.nullable = conjunction,
                               .regular = true,
                               .exact = !conjunction,
                               .shortest = conjunction ? 0 : NODE_SHORTEST_MAX};
    for (uint32_t i = mark; i < pool->scratch_count; i++) {
        const struct node *node = &pool->nodes[pool->scratch[i]];
        facts.nullable =
            conjunction ? facts.nullable && node->nullable : facts.nullable || node->nullable;
        facts.regular = facts.regular && node->regular;
        facts.exact = facts.exact && node->exact;
        facts.wide = facts.wide || node->wide;
        if (conjunction ? node->shortest > facts.shortest : node->shortest < facts.shortest)
            facts.shortest = node->shortest;
        facts.levels = node_larger(facts.levels, levels_around(node->levels));
    }
    return facts;
}

static uint32_t intern_list(struct node_pool *pool, enum node_kind kind, uint32_t mark) {
    uint32_t count = pool->scratch_count - mark, id;
    if (pool->rc != 0) return NODE_NONE;
    if (count == 1) {
        id = pool->scratch[mark];
    } else {
        struct list_facts facts = facts_of(pool, mark, kind == NODE_KIND_AND);
        struct node node = {.kind = (uint8_t)kind,
                            .nullable = facts.nullable,
                            .regular = facts.regular,
                            .exact = facts.exact,
                            .wide = facts.wide,
                            .shortest = facts.shortest,
                            .levels = facts.levels,
                            .b = count};
        id = find_or_add(pool, &(struct wanted){.node = node, .list = pool->scratch + mark});
    }
    return id;
}

/* Replaces the sets of single bytes in the list by one: their union or, in a conjunction, what they
 * have in common. */
static void merge_bytes(struct node_pool *pool, uint32_t mark, bool conjunction) {
    struct byte_set all = {0};
    uint32_t kept = mark, found = 0, last = 0;
    for (uint32_t i = mark; i < pool->scratch_count; i++) {
        const struct node *node = &pool->nodes[pool->scratch[i]];
        if (node->kind != NODE_KIND_BYTES) {
            pool->scratch[kept++] = pool->scratch[i];
            continue;
        }
        const struct byte_set *set = &pool->sets[node->a];
        last = pool->scratch[i];
        for (int k = 0; k < 4; k++)
            all.bits[k] = found == 0    ? set->bits[k]
                          : conjunction ? all.bits[k] & set->bits[k]
                                        : all.bits[k] | set->bits[k];
        found++;
    }
    pool->scratch_count = kept;
    if (found > 0) node_push(pool, found == 1 ? last : node_bytes(pool, &all));
}

static bool is_universe(const struct node_pool *pool, uint32_t id) {
    return id > NODE_ALL && (id == pool->universe[0] || id == pool->universe[1]);
}

uint32_t node_list_alt(struct node_pool *pool, uint32_t mark) {
    uint32_t kept = mark;
    bool nullable = false, empty = false;
    uint32_t all = NODE_NONE;
    merge_bytes(pool, mark, false);
    sort_scratch(pool, mark);
    for (uint32_t i = mark; i < pool->scratch_count; i++) {
        uint32_t id = pool->scratch[i];
        if (id == NODE_ALL || (all == NODE_NONE && is_universe(pool, id))) all = id;
        if (id == NODE_EMPTY) empty = true;
        if (id == NODE_NONE || id == NODE_EMPTY) continue;
        nullable = nullable || (pool->nodes[id].regular && pool->nodes[id].nullable);
        pool->scratch[kept++] = id;
    }
    pool->scratch_count = kept;
    if (empty && !nullable) node_push(pool, NODE_EMPTY); /* out of order, but always last */
    uint32_t id = all;
    if (all == NODE_NONE && pool->scratch_count > mark) id = intern_list(pool, NODE_KIND_ALT, mark);
    pool->scratch_count = mark;
    return pool->rc == 0 ? id : NODE_NONE;
}

uint32_t node_alt(struct node_pool *pool, const uint32_t *list, size_t count) {
    uint32_t mark = pool->scratch_count;
    for (size_t i = 0; i < count; i++) node_push_flat(pool, NODE_KIND_ALT, list[i]);
    return node_list_alt(pool, mark);
}

uint32_t node_list_open(const struct node_pool *pool) {
    return pool->scratch_count;
}

void node_list_add(struct node_pool *pool, uint32_t node) {
    node_push_flat(pool, NODE_KIND_ALT, node);
}

uint32_t node_pop(struct node_pool *pool) {
    return pool->scratch[--pool->scratch_count];
}

uint32_t node_alt2(struct node_pool *pool, uint32_t a, uint32_t b) {
    const uint32_t list[] = {a, b};
    return node_alt(pool, list, 2);
}

uint32_t node_option(struct node_pool *pool, uint32_t a) {
    return node_alt2(pool, a, NODE_EMPTY);
}

uint32_t node_list_and(struct node_pool *pool, uint32_t mark) {
    uint32_t kept = mark, id;
    bool none = false, empty = false, nullable = true;
    merge_bytes(pool, mark, true);
    sort_scratch(pool, mark);
    for (uint32_t i = mark; i < pool->scratch_count; i++) {
        id = pool->scratch[i];
        CHECK(pool->nodes[id].regular);
        none = none || id == NODE_NONE;
        empty = empty || id == NODE_EMPTY;
        nullable = nullable && pool->nodes[id].nullable;
        if (id != NODE_ALL) pool->scratch[kept++] = id;
    }
    pool->scratch_count = kept;
    if (none || (empty && !nullable))
        id = NODE_NONE;
    else if (empty)
        id = NODE_EMPTY;
    else
        id = kept == mark ? NODE_ALL : intern_list(pool, NODE_KIND_AND, mark);
    pool->scratch_count = mark;
    return pool->rc == 0 ? id : NODE_NONE;
}

uint32_t node_and(struct node_pool *pool, const uint32_t *list, size_t count) {
    uint32_t mark = pool->scratch_count;
    for (size_t i = 0; i < count; i++) node_push_flat(pool, NODE_KIND_AND, list[i]);
    return node_list_and(pool, mark);
}

uint32_t node_and2(struct node_pool *pool, uint32_t a, uint32_t b) {
    const uint32_t list[] = {a, b};
    return node_and(pool, list, 2);
}

uint32_t node_not(struct node_pool *pool, uint32_t a) {
    const struct node *x = &pool->nodes[a];
    CHECK(x->regular);
    if (pool->rc != 0 || a == NODE_ALL || is_universe(pool, a)) return NODE_NONE;
    if (a == NODE_NONE) return NODE_ALL;
    if (x->kind == NODE_KIND_NOT) return x->a;
    struct node node = {.kind = NODE_KIND_NOT,
                        .nullable = !x->nullable,
                        .regular = true,
                        .exact = false,
                        .wide = true,
                        .levels = levels_around(x->levels),
                        .a = a};
    return intern(pool, &node);
}

uint32_t node_repeat(struct node_pool *pool, uint32_t a, uint32_t min, uint32_t max) {
    const struct node *x = &pool->nodes[a];
    CHECK(min <= max);
    if (pool->rc != 0) return NODE_NONE;
    if (max == 0 || a == NODE_EMPTY) return NODE_EMPTY;
    if (a == NODE_NONE) return min == 0 ? NODE_EMPTY : NODE_NONE;
    if (min == 1 && max == 1) return a;
    if (a == NODE_ALL) return a;
    if (x->regular && x->nullable) min = 0;
    if (x->kind == NODE_KIND_REPEAT && x->min == 0 && x->max == NODE_ENDLESS) return a;
    struct node node = {.kind = NODE_KIND_REPEAT,
                        .nullable = min == 0,
                        .regular = x->regular,
                        .exact = x->exact,
                        .wide = x->wide,
                        .shortest = shortest_of((uint64_t)x->shortest * min),
                        .levels = levels_around(x->levels),
                        .a = a,
                        .min = min,
                        .max = max};
    return intern(pool, &node);
}

uint32_t node_mod(struct node_pool *pool, uint32_t modulus, uint32_t remainder) {
    struct node node = {.kind = NODE_KIND_MOD,
                        .nullable = remainder == 0,
                        .regular = true,
                        .exact = true,
                        .a = modulus,
                        .b = remainder};
    return intern(pool, &node);
}

uint32_t node_rule_open(struct node_pool *pool) {
    if (pool->rule_count >= CONSTRAIN_RULES_MAX) pool->rc = ERR_LIMIT;
    if (pool->rc != 0 || !node_reserve(pool, &pool->rules, pool->rule_count, &pool->rule_capacity,
                                       sizeof *pool->rules, 1))
        return UINT32_MAX;
    pool->rules[pool->rule_count] = NODE_NONE;
    return pool->rule_count++;
}

uint32_t node_rule(struct node_pool *pool, uint32_t rule) {
    if (rule == UINT32_MAX) return NODE_NONE;
    struct node node = {.kind = NODE_KIND_RULE, .exact = true, .a = rule};
    return intern(pool, &node);
}

/* ---- Words ---- */

static int compare_words(const void *a, const void *b) {
    const struct node_word *x = a, *y = b;
    int order = memcmp(x->text, y->text, x->size < y->size ? x->size : y->size);
    return order != 0 ? order : (x->size > y->size) - (x->size < y->size);
}

static size_t node_shared_size(const struct node_word *x, const struct node_word *y, size_t from) {
    size_t most = x->size < y->size ? x->size : y->size;
    while (from < most && x->text[from] == y->text[from]) from++;
    return from;
}

/* Builds the sorted words from byte `at` on; the bytes before it are the same in all. Recurses once
 * for each byte at which words differ. */
static uint32_t words_from(struct node_pool *pool, const struct node_word *words, size_t count,
                           size_t at, int depth) {
    if (depth > CONSTRAIN_DEPTH_MAX * 4) pool->rc = ERR_LIMIT;
    if (pool->rc != 0) return NODE_NONE;
    size_t shared = node_shared_size(&words[0], &words[count - 1],
                                     at); /* the list is sorted, so all words share it */
    uint32_t mark = pool->scratch_count;
    size_t first = 0;
    while (first < count && words[first].size == shared) first++;
    if (first > 0) node_push(pool, NODE_EMPTY);
    while (first < count) {
        size_t end = first;
        while (end < count && words[end].text[shared] == words[first].text[shared]) end++;
        uint32_t node =
            end - first == 1
                ? node_text(pool, words[first].text + shared, words[first].size - shared)
                : words_from(pool, words + first, end - first, shared, depth + 1);
        node_push(pool, node);
        first = end;
    }
    uint32_t rest = node_list_alt(pool, mark);
    return node_seq(pool, node_text(pool, words[0].text + at, shared - at), rest);
}

uint32_t node_words(struct node_pool *pool, struct node_word *words, size_t count) {
    if (count == 0 || !node_work(pool, count)) return NODE_NONE;
    qsort(words, count, sizeof *words, compare_words);
    return words_from(pool, words, count, 0, 0);
}
