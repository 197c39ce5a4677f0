/* Two functions that let a mask serve several places of a language: derivatives by whole
 * characters, and expressions that agree with others for some bytes. Both work on the structure of
 * an expression, so they cost less than derivatives by bytes. */
#include <assert.h>

#include "constrain/node.h"
#include "constrain/node_int.h"
#include "constrain/tokens.h"

#define CHILDREN_PER_WORK 4u /* children of a list that one unit of work looks at */
#define ASK_PLAIN         255u
static_assert(NODE_NEAR_MAX < ASK_PLAIN, "keys of remembered answers differ");

/* ---- Near expressions ---- */

/* Returns a repetition that agrees with this one for `bytes` bytes, within which at most `most`
 * rounds can end. */
static uint32_t near_repeat(struct node_pool *pool, uint32_t id, uint32_t bytes) {
    struct node node = pool->nodes[id];
    const struct node *body = &pool->nodes[node.a];
    if (body->shortest == 0 || !node_surely_alive(pool, node.a)) return id;
    uint32_t most = bytes / body->shortest;
    uint32_t min = node.min > most ? most + 1 : node.min;
    uint32_t max = node.max > most ? NODE_ENDLESS : node.max;
    return node_repeat(pool, node_near(pool, node.a, bytes), min, max);
}

/* Builds a near sequence: goes on to the next part until that begins too far away or its result is
 * known. A part that is too far away is kept if it might have no string, because then the whole
 * sequence has none. */
static uint32_t near_seq(struct node_pool *pool, uint32_t id, uint32_t bytes) {
    uint32_t mark = pool->scratch_count, near;
    int64_t left = bytes;
    bool known = false;
    while (left >= 0 && pool->nodes[id].kind == NODE_KIND_SEQ && pool->rc == 0 && !known) {
        struct node node = pool->nodes[id];
        uint32_t head = node_near(pool, node.a, (uint32_t)left);
        node_push(pool, id);
        node_push(pool, (uint32_t)left);
        node_push(pool, head);
        left -= pool->nodes[node.a].shortest;
        id = node.b;
        known = left >= 0 && node_recall(pool, id, (uint32_t)left, &near);
    }
    if (left < 0)
        near = node_surely_alive(pool, id) ? NODE_ALL : id;
    else if (!known)
        near = node_near(pool, id, (uint32_t)left);
    while (pool->scratch_count > mark && pool->rc == 0) {
        near = node_seq(pool, node_pop(pool), near);
        left = node_pop(pool);
        node_note(pool, node_pop(pool), (uint32_t)left, near);
    }
    return near;
}

static uint32_t near_alt(struct node_pool *pool, uint32_t id, uint32_t bytes) {
    struct node node = pool->nodes[id];
    uint32_t list = node_list_open(pool);
    (void)node_work(pool, node.b / CHILDREN_PER_WORK);
    for (uint32_t i = 0; i < node.b && pool->rc == 0; i++)
        node_list_add(pool, node_near(pool, pool->children[node.a + i], bytes));
    return node_list_alt(pool, list);
}

uint32_t node_near(struct node_pool *pool, uint32_t id, uint32_t bytes) {
    enum node_kind kind = (enum node_kind)pool->nodes[id].kind;
    uint32_t near = id;
    if (kind != NODE_KIND_SEQ && kind != NODE_KIND_ALT && kind != NODE_KIND_REPEAT) return id;
    if (pool->rc != 0 || bytes > NODE_NEAR_MAX || node_recall(pool, id, bytes, &near)) return near;
    if (!node_work(pool, 1)) return id;
    if (kind == NODE_KIND_SEQ) return near_seq(pool, id, bytes);
    near = kind == NODE_KIND_ALT ? near_alt(pool, id, bytes) : near_repeat(pool, id, bytes);
    node_note(pool, id, bytes, near);
    return pool->rc == 0 ? near : id;
}

/* ---- Plain characters ---- */

/* The parts of an expression can be treated alone, because no part has a string that ends inside of
 * a plain character; so the part after it begins with a whole character, too. */

/* Derives by all characters of a row of tokens_plain_rows, from byte `at` on. *common: the
 * derivative that all have so far; NODE_DIFFERS before the first. false: the derivatives differ, or
 * a string ends inside of a character. */
static bool derive_row(struct node_pool *pool, uint32_t id, const struct utf8_row *row, int at,
                       uint32_t *common) {
    int last_class = -1;
    for (unsigned byte = row->first[at]; byte <= row->last[at]; byte++) {
        if (pool->class_of[byte] == last_class) continue;
        last_class = pool->class_of[byte];
        uint32_t next = node_derive(pool, id, last_class);
        if (pool->rc != 0) return false;
        if (next != NODE_NONE && at < 3 && at + 1 < row->bytes) {
            if (pool->nodes[next].nullable || !derive_row(pool, next, row, at + 1, common))
                return false;
        } else if (*common == NODE_DIFFERS) {
            *common = next;
        } else if (*common != next) {
            return false;
        }
    }
    return true;
}

static uint32_t derive_rows(struct node_pool *pool, uint32_t id) {
    uint32_t common = NODE_DIFFERS;
    for (int i = 0; i < TOKENS_UTF8_ROWS; i++)
        if (!derive_row(pool, id, &tokens_plain_rows[i], 0, &common)) return NODE_DIFFERS;
    return common;
}

/* Adds the plain derivatives of a sequence to the list: those of its first part, and of each later
 * part that follows parts that may be empty. */
static bool list_seq(struct node_pool *pool, uint32_t id) {
    bool nullable = true;
    while (nullable && pool->nodes[id].kind == NODE_KIND_SEQ) {
        struct node node = pool->nodes[id];
        uint32_t head = node_plain(pool, node.a);
        if (head == NODE_DIFFERS) return false;
        node_list_add(pool, node_seq(pool, head, node.b));
        nullable = pool->nodes[node.a].nullable;
        id = node.b;
    }
    uint32_t last = nullable ? node_plain(pool, id) : NODE_NONE;
    if (last != NODE_DIFFERS) node_list_add(pool, last);
    return last != NODE_DIFFERS;
}

static bool list_children(struct node_pool *pool, uint32_t id) {
    struct node node = pool->nodes[id];
    (void)node_work(pool, node.b / CHILDREN_PER_WORK);
    for (uint32_t i = 0; i < node.b && pool->rc == 0; i++) {
        uint32_t next = node_plain(pool, pool->children[node.a + i]);
        if (next == NODE_DIFFERS) return false;
        node_push_flat(pool, (enum node_kind)node.kind, next);
    }
    return true;
}

static uint32_t plain_list(struct node_pool *pool, uint32_t id) {
    enum node_kind kind = (enum node_kind)pool->nodes[id].kind;
    uint32_t mark = pool->scratch_count;
    if (kind == NODE_KIND_SEQ ? list_seq(pool, id) : list_children(pool, id))
        return kind == NODE_KIND_AND ? node_list_and(pool, mark) : node_list_alt(pool, mark);
    if (pool->rc == 0) pool->scratch_count = mark;
    return kind == NODE_KIND_SEQ ? NODE_DIFFERS : derive_rows(pool, id);
}

static uint32_t plain_repeat(struct node_pool *pool, uint32_t id) {
    struct node node = pool->nodes[id];
    uint32_t head = node_plain(pool, node.a);
    uint32_t min = node.min > 0 ? node.min - 1 : 0;
    uint32_t max = node.max == NODE_ENDLESS ? NODE_ENDLESS : node.max - 1;
    if (head == NODE_DIFFERS || head == NODE_NONE) return head;
    return node_seq(pool, head, node_repeat(pool, node.a, min, max));
}

static uint32_t find_plain(struct node_pool *pool, uint32_t id) {
    switch ((enum node_kind)pool->nodes[id].kind) {
    case NODE_KIND_NONE:
    case NODE_KIND_EMPTY:
        return NODE_NONE;
    case NODE_KIND_BYTES:
        return derive_rows(pool, id);
    case NODE_KIND_SEQ:
    case NODE_KIND_ALT:
    case NODE_KIND_AND:
        return plain_list(pool, id);
    case NODE_KIND_REPEAT:
        return plain_repeat(pool, id);
    default: /* strings of ALL and NOT may end inside of characters */
        return NODE_DIFFERS;
    }
}

uint32_t node_plain(struct node_pool *pool, uint32_t id) {
    uint32_t next = NODE_DIFFERS;
    if (pool->rc != 0 || node_recall(pool, id, ASK_PLAIN, &next) || !node_work(pool, 1))
        return next;
    next = find_plain(pool, id);
    node_note(pool, id, ASK_PLAIN, next);
    return pool->rc == 0 ? next : NODE_DIFFERS;
}
