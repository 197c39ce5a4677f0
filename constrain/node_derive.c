/* Byte classes, derivatives, and the search for a string where AND and NOT hide whether there is
 * one. */
#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "constrain/node.h"
#include "constrain/node_int.h"

#define MEMO_MIN      1024u
#define MEMO_PREPARED (8u * CONSTRAIN_PREPARED)
#define MEMO_MAX      524288u /* derivatives remembered; when there are more, all are forgotten */
#define ALIKES_MAX    1024u   /* different `alike` sets; beyond them a class stands for itself */
#define TEXT_PER_WORK 8u      /* bytes of a text that one unit of work derives by */

/* Sets of bytes with the same derivative, interned. Set 0 stands for the bytes of one class. */
struct node_alikes {
    struct byte_set sets[ALIKES_MAX];
    uint16_t slots[2 * ALIKES_MAX]; /* hash table of sets; 0 = free */
    uint32_t count;                 /* number of sets; they count from 1 on */
};

void node_derivatives_forget(struct node_pool *pool) {
    if (pool->memo != NULL) memset(pool->memo, 0, pool->memo_size * sizeof *pool->memo);
    if (pool->alikes != NULL) memset(pool->alikes, 0, sizeof *pool->alikes);
    pool->memo_count = 0;
}

void node_derivatives_free(struct node_pool *pool) {
    mem_free(pool->memo);
    mem_free(pool->alikes);
    pool->memo = NULL;
    pool->alikes = NULL;
    pool->memo_size = pool->memo_count = 0;
}

size_t node_derivatives_bytes(const struct node_pool *pool) {
    return pool->memo_size * sizeof *pool->memo + (pool->alikes != NULL ? sizeof *pool->alikes : 0);
}

/* ---- Classes ---- */

/* Splits the classes by one set after another. Each digit is a class of its own, apart from '.' and
 * '-', because NODE_KIND_MOD treats them differently. */
static void split_classes(uint8_t class_of[256], int *classes, const struct byte_set *set) {
    int split[256];
    for (int i = 0; i < 256; i++) split[i] = -1;
    bool in[256] = {0}, out[256] = {0};
    for (unsigned byte = 0; byte < 256; byte++)
        *(byte_set_has(set, byte) ? &in[class_of[byte]] : &out[class_of[byte]]) = true;
    for (unsigned byte = 0; byte < 256; byte++) {
        int class = class_of[byte];
        if (!in[class] || !out[class] || !byte_set_has(set, byte)) continue;
        if (split[class] < 0) split[class] = (*classes)++;
        class_of[byte] = (uint8_t)split[class];
    }
}

void node_classes(struct node_pool *pool) {
    if (pool->classes > 0 && pool->classed_sets == pool->set_count) return;
    int before = pool->classes;
    if (pool->classes == 0) {
        pool->classes = 1;
        for (const char *c = "0123456789.-"; *c != '\0'; c++) {
            struct byte_set set = {0};
            byte_set_add(&set, (unsigned char)*c);
            split_classes(pool->class_of, &pool->classes, &set);
        }
    }
    if (!node_work(pool, pool->set_count - pool->classed_sets)) return;
    for (uint32_t i = pool->classed_sets; i < pool->set_count; i++)
        split_classes(pool->class_of, &pool->classes, &pool->sets[i]);
    pool->classed_sets = pool->set_count;
    for (unsigned byte = 256; byte-- > 0;) pool->example[pool->class_of[byte]] = (uint8_t)byte;
    if (pool->classes != before) node_derivatives_forget(pool);
}

/* ---- Derivatives ---- */

static uint64_t memo_key(uint32_t node, int class) {
    return (uint64_t)node << 8 | (uint64_t) class;
}

static struct node_memo *memo_find(const struct node_pool *pool, uint64_t key) {
    uint32_t at = (uint32_t)(key * 0x9E3779B97F4A7C15u >> 32) & (pool->memo_size - 1);
    while (pool->memo[at].key != 0 && pool->memo[at].key != key)
        at = (at + 1) & (pool->memo_size - 1);
    return &pool->memo[at];
}

static void memo_grow(struct node_pool *pool, uint32_t size) {
    struct node_memo *old = pool->memo;
    uint32_t old_size = pool->memo_size;
    if (size > MEMO_MAX) {
        node_derivatives_forget(pool);
        return;
    }
    struct node_memo *grown = mem_try_alloc(size, sizeof *grown);
    if (grown == NULL) {
        pool->rc = ERR_NOMEM;
        return;
    }
    pool->memo = grown;
    pool->memo_size = size;
    for (uint32_t i = 0; i < old_size; i++)
        if (old[i].key != 0) *memo_find(pool, old[i].key) = old[i];
    mem_free(old);
}

static bool open_alikes(struct node_pool *pool) {
    if (pool->alikes == NULL) pool->alikes = mem_try_alloc(1, sizeof *pool->alikes);
    if (pool->alikes == NULL) pool->rc = ERR_NOMEM;
    return pool->alikes != NULL;
}

/* Writes to the tables: the system may provide memory of the allocator only when it is written to.
 */
void node_derivatives_prepare(struct node_pool *pool) {
    if (pool->memo_size < MEMO_PREPARED) memo_grow(pool, MEMO_PREPARED);
    if (pool->rc == 0 && open_alikes(pool)) node_derivatives_forget(pool);
}

/* Returns the number of a set; 0: there are too many. */
static uint32_t find_alike(struct node_alikes *alikes, const struct byte_set *set) {
    uint64_t hash = 0;
    for (int k = 0; k < 4; k++) hash = (hash ^ set->bits[k]) * 0x9E3779B97F4A7C15u;
    uint32_t at = (uint32_t)(hash >> 32) & (2 * ALIKES_MAX - 1);
    while (alikes->slots[at] != 0) {
        if (memcmp(&alikes->sets[alikes->slots[at]], set, sizeof *set) == 0)
            return alikes->slots[at];
        at = (at + 1) & (2 * ALIKES_MAX - 1);
    }
    if (alikes->count + 1 == ALIKES_MAX) return 0;
    alikes->sets[++alikes->count] = *set;
    return alikes->slots[at] = (uint16_t)alikes->count;
}

static void keep_alike(struct node_pool *pool, const struct byte_set *set) {
    for (int k = 0; k < 4; k++) pool->alike.bits[k] &= set->bits[k];
}

/* Removes from pool->alike the bytes that are not on the same side of the set as `byte`; returns
 * whether `byte` is in the set. */
static bool keep_side(struct node_pool *pool, const struct byte_set *set, unsigned byte) {
    bool has = byte_set_has(set, byte);
    for (int k = 0; k < 4; k++) pool->alike.bits[k] &= has ? set->bits[k] : ~set->bits[k];
    return has;
}

static void keep_class(struct node_pool *pool, int class) {
    struct byte_set one = {0};
    byte_set_add(&one, pool->example[class]);
    keep_alike(pool, &one);
}

/* `alike` is NULL for answers to questions about nodes. */
static void memo_add(struct node_pool *pool, uint64_t key, uint32_t value,
                     const struct byte_set *alike) {
    if (pool->memo_count + 1 > pool->memo_size / 2)
        memo_grow(pool, pool->memo_size > 0 ? pool->memo_size * 2 : MEMO_MIN);
    if (pool->rc != 0 || !open_alikes(pool)) return;
    uint32_t set = alike != NULL ? find_alike(pool->alikes, alike) : 0;
    *memo_find(pool, key) = (struct node_memo){key, value, set};
    pool->memo_count++;
}

#define QUESTION (UINT64_C(1) << 63) /* a bit in the keys of answers */

bool node_recall(const struct node_pool *pool, uint32_t id, uint32_t question, uint32_t *answer) {
    if (pool->memo_size == 0) return false;
    const struct node_memo *memo = memo_find(pool, QUESTION | (uint64_t)id << 8 | question);
    if (memo->key == 0) return false;
    *answer = memo->value;
    return true;
}

void node_note(struct node_pool *pool, uint32_t id, uint32_t question, uint32_t answer) {
    if (pool->rc == 0) memo_add(pool, QUESTION | (uint64_t)id << 8 | question, answer, NULL);
}

/* Derives a sequence: goes on to its next part for as long as the parts before it hold "". */
static uint32_t derive_seq(struct node_pool *pool, uint32_t id, int class) {
    uint32_t mark = pool->scratch_count;
    bool nullable = true;
    while (nullable && pool->nodes[id].kind == NODE_KIND_SEQ) {
        struct node node = pool->nodes[id];
        uint32_t head = node_derive(pool, node.a, class);
        node_push_flat(pool, NODE_KIND_ALT, node_seq(pool, head, node.b));
        nullable = pool->nodes[node.a].nullable;
        id = node.b;
    }
    if (nullable) node_push_flat(pool, NODE_KIND_ALT, node_derive(pool, id, class));
    return node_list_alt(pool, mark);
}

static uint32_t derive_list(struct node_pool *pool, const struct node *node, int class) {
    uint32_t mark = pool->scratch_count;
    enum node_kind kind = (enum node_kind)node->kind;
    (void)node_work(pool, node->b / LIST_PER_WORK);
    for (uint32_t i = 0; i < node->b && pool->rc == 0; i++)
        node_push_flat(pool, kind, node_derive(pool, pool->children[node->a + i], class));
    return kind == NODE_KIND_ALT ? node_list_alt(pool, mark) : node_list_and(pool, mark);
}

static uint32_t derive_mod(struct node_pool *pool, const struct node *node, uint32_t id,
                           int class) {
    unsigned byte = pool->example[class];
    keep_class(pool, class);
    if (byte == '.' || byte == '-') return id;
    if (byte < '0' || byte > '9') return NODE_NONE;
    uint64_t value = (uint64_t)node->b * 10 + (byte - '0');
    return node_mod(pool, node->a, (uint32_t)(value % node->a));
}

static uint32_t derive(struct node_pool *pool, uint32_t id, int class) {
    struct node node = pool->nodes[id]; /* a copy: the array may move */
    switch ((enum node_kind)node.kind) {
    case NODE_KIND_SEQ:
        return derive_seq(pool, id, class);
    case NODE_KIND_ALT:
    case NODE_KIND_AND:
        return derive_list(pool, &node, class);
    case NODE_KIND_NOT:
        return node_not(pool, node_derive(pool, node.a, class));
    case NODE_KIND_REPEAT: {
        uint32_t head = node_derive(pool, node.a, class);
        uint32_t min = node.min > 0 ? node.min - 1 : 0;
        uint32_t max = node.max == NODE_ENDLESS ? NODE_ENDLESS : node.max - 1;
        return head == NODE_NONE ? head : node_seq(pool, head, node_repeat(pool, node.a, min, max));
    }
    case NODE_KIND_MOD:
        return derive_mod(pool, &node, id, class);
    default:
        CHECK_MSG(false, "a node of kind %d has no derivative", node.kind);
    }
}

/* Returns a derivative that is remembered, and limits pool->alike as deriving it did. */
static bool recall(struct node_pool *pool, uint32_t id, int class, uint32_t *value) {
    if (pool->memo_size == 0) return false;
    const struct node_memo *memo = memo_find(pool, memo_key(id, class));
    if (memo->key == 0) return false;
    if (memo->alike == 0)
        keep_class(pool, class);
    else
        keep_alike(pool, &pool->alikes->sets[memo->alike]);
    *value = memo->value;
    return true;
}

uint32_t node_derive(struct node_pool *pool, uint32_t id, int class) {
    const struct node *node = &pool->nodes[id];
    struct byte_set before = pool->alike;
    uint32_t result;
    if (pool->rc != 0 || id == NODE_NONE || id == NODE_EMPTY) return NODE_NONE;
    if (id == NODE_ALL) return NODE_ALL;
    if (node->kind == NODE_KIND_BYTES)
        return keep_side(pool, &pool->sets[node->a], pool->example[class]) ? NODE_EMPTY : NODE_NONE;
    if (recall(pool, id, class, &result)) return result;
    if (!node_work(pool, 1)) return NODE_NONE;
    pool->alike = byte_set_all();
    result = derive(pool, id, class);
    if (pool->rc == 0) memo_add(pool, memo_key(id, class), result, &pool->alike);
    keep_alike(pool, &before);
    return pool->rc == 0 ? result : NODE_NONE;
}

/* ---- Is there a string? ---- */

static enum node_alive derive_look(struct node_pool *pool, uint32_t id);

static enum node_alive look_alt(struct node_pool *pool, const struct node *node) {
    enum node_alive all = NODE_DEAD;
    for (uint32_t i = 0; i < node->b; i++) {
        enum node_alive one = derive_look(pool, pool->children[node->a + i]);
        if (one == NODE_ALIVE) return one;
        if (one == NODE_UNKNOWN) all = one;
    }
    return all;
}

/* Goes along the sequence in a loop, not by recursion, because it may be as long as a text. */
static enum node_alive look_seq(struct node_pool *pool, const struct node *node) {
    bool sure = true;
    uint32_t id;
    do {
        enum node_alive head = derive_look(pool, node->a);
        if (head == NODE_DEAD) return NODE_DEAD;
        sure = sure && head == NODE_ALIVE;
        id = node->b;
        node = &pool->nodes[id];
    } while (node->kind == NODE_KIND_SEQ && node->alive != NODE_ALIVE && node->alive != NODE_DEAD &&
             !node->nullable && !node->exact);
    enum node_alive tail = derive_look(pool, id);
    if (tail == NODE_DEAD) return NODE_DEAD;
    return sure && tail == NODE_ALIVE ? NODE_ALIVE : NODE_UNKNOWN;
}

/* Decides from the structure alone whether the language holds a string, and remembers the result.
 * NODE_UNKNOWN: the structure does not tell. */
static enum node_alive derive_look(struct node_pool *pool, uint32_t id) {
    struct node *node = &pool->nodes[id];
    enum node_alive known = NODE_UNKNOWN;
    if (node->alive == NODE_ALIVE || node->alive == NODE_DEAD) return (enum node_alive)node->alive;
    if (node->nullable || node->exact)
        return NODE_ALIVE; /* an exact node other than NODE_NONE has a string */
    if (!node_work(pool, 1)) return NODE_UNKNOWN;
    if (node->kind == NODE_KIND_REPEAT) known = derive_look(pool, node->a);
    if (node->kind == NODE_KIND_ALT) known = look_alt(pool, node);
    if (node->kind == NODE_KIND_SEQ) known = look_seq(pool, node);
    if (known != NODE_UNKNOWN && pool->rc == 0) node->alive = (uint8_t)known;
    return known;
}

bool node_surely_alive(struct node_pool *pool, uint32_t id) {
    return derive_look(pool, id) == NODE_ALIVE;
}

/* A breadth-first search through derivatives. Its queue consists of pairs in scratch: a node, and
 * the place of the pair that it was derived from. Visited nodes are marked while it runs. */
static void search_visit(struct node_pool *pool, uint32_t mark, uint32_t id, uint32_t from,
                         bool *alive) {
    enum node_alive known = derive_look(pool, id);
    if (*alive || known == NODE_DEAD || pool->nodes[id].alive == NODE_VISITED) return;
    if (known == NODE_ALIVE) {
        *alive = true;
        for (uint32_t at = from; at != UINT32_MAX; at = pool->scratch[at + 1])
            pool->nodes[pool->scratch[at]].alive = NODE_ALIVE;
        return;
    }
    if (pool->scratch_count - mark >= 2 * CONSTRAIN_SEARCH_MAX) pool->rc = ERR_LIMIT;
    if (pool->rc != 0) return;
    pool->nodes[id].alive = NODE_VISITED;
    node_push(pool, id);
    node_push(pool, from);
}

/* Visits the derivatives of the node at `at`, once for all bytes that have the same one. */
static void search_from(struct node_pool *pool, uint32_t mark, uint32_t at, bool *alive) {
    struct byte_set done = {0};
    for (int class = 0; class < pool->classes && !*alive && pool->rc == 0; class ++) {
        if (byte_set_has(&done, pool->example[class])) continue;
        pool->alike = byte_set_all();
        uint32_t next = node_derive(pool, pool->scratch[at], class);
        for (int k = 0; k < 4; k++) done.bits[k] |= pool->alike.bits[k];
        if (pool->rc == 0) search_visit(pool, mark, next, at, alive);
    }
}

/* Returns whether the language holds a string. If the search ends without one, no visited node
 * holds any. If it finds one, visited nodes that are not on the path to it stay unknown. */
static bool derive_search(struct node_pool *pool, uint32_t id) {
    uint32_t mark = pool->scratch_count;
    bool alive = false;
    search_visit(pool, mark, id, UINT32_MAX, &alive);
    for (uint32_t at = mark; at + 1 < pool->scratch_count && !alive && pool->rc == 0; at += 2)
        search_from(pool, mark, at, &alive);
    enum node_alive others = alive || pool->rc != 0 ? NODE_UNKNOWN : NODE_DEAD;
    for (uint32_t at = mark; at + 1 < pool->scratch_count; at += 2) {
        struct node *node = &pool->nodes[pool->scratch[at]];
        if (node->alive == NODE_VISITED) node->alive = (uint8_t)others;
    }
    pool->scratch_count = mark;
    return alive;
}

bool node_is_alive(struct node_pool *pool, uint32_t id) {
    enum node_alive known = derive_look(pool, id);
    if (pool->rc != 0) return false;
    return known == NODE_UNKNOWN ? derive_search(pool, id) && pool->rc == 0 : known == NODE_ALIVE;
}

uint32_t node_live(struct node_pool *pool, uint32_t id) {
    if (pool->nodes[id].exact) return id;
    node_classes(pool);
    return node_is_alive(pool, id) ? id : NODE_NONE;
}

bool node_matches(struct node_pool *pool, uint32_t id, const char *text, size_t size) {
    node_classes(pool);
    (void)node_work(pool, size / TEXT_PER_WORK + 1);
    for (size_t i = 0; i < size && id != NODE_NONE; i++)
        id = node_derive(pool, id, pool->class_of[(unsigned char)text[i]]);
    return pool->rc == 0 && pool->nodes[id].nullable;
}
