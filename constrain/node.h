/* Expressions that describe sets of byte strings ("languages"), and their derivatives.
 *
 * An expression is a node in a pool. Equal nodes are one node (hash-consing), so comparing ids
 * compares expressions, and every later table is indexed by ids. Constructors simplify: a node that
 * holds no AND or NOT is NODE_NONE exactly if its language is empty.
 *
 * The derivative of L by a byte c is {s : c s in L} (Brzozowski, "Derivatives of regular
 * expressions", JACM 1964; Owens, Reppy, Turon, "Regular-expression derivatives re-examined", JFP
 * 2009). Derivatives of regular nodes are regular nodes. Nodes that refer to rules are not regular:
 * constrain/automaton.h runs them on a stack.
 *
 * Byte classes: bytes that no node tells apart have one class. Derivatives by bytes of one class
 * are equal, so tables have a column per class, not per byte.
 *
 * Errors stick: after a failure (`rc`: ERR_NOMEM, ERR_LIMIT) constructors return NODE_NONE, and the
 * caller tests `rc` once at the end. A pool belongs to one thread at a time. */
#ifndef KEEPD_CONSTRAIN_NODE_H
#define KEEPD_CONSTRAIN_NODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "constrain/limits.h"

enum node_kind {
    NODE_KIND_NONE,   /* no string */
    NODE_KIND_EMPTY,  /* "" */
    NODE_KIND_ALL,    /* every byte string */
    NODE_KIND_BYTES,  /* one byte of a set */
    NODE_KIND_SEQ,    /* a, then b */
    NODE_KIND_ALT,    /* any of the children */
    NODE_KIND_AND,    /* every child at once; regular */
    NODE_KIND_NOT,    /* not a; regular */
    NODE_KIND_REPEAT, /* a, min to max times */
    NODE_KIND_MOD, /* decimal digits that, appended to a number with remainder b, give a multiple of
                      a; '.' and '-' are skipped */
    NODE_KIND_RULE, /* the language of rule a */
};

/* Ids of the nodes that every pool has. */
enum { NODE_NONE = 0, NODE_EMPTY = 1, NODE_ALL = 2 };
#define NODE_ENDLESS      UINT32_MAX /* max of a repetition without one */
#define NODE_SHORTEST_MAX 255
#define NODE_WIDE         16

struct byte_set {
    uint64_t bits[4];
};

struct node {
    uint8_t kind;
    bool nullable : 1; /* holds ""; of regular nodes only */
    bool regular : 1;  /* refers to no rule */
    bool exact : 1;    /* holds no AND and no NOT */
    bool wide : 1;     /* a string may begin with any of NODE_WIDE bytes, by a rough count */
    uint8_t alive;     /* enum node_alive */
    uint8_t shortest;  /* no string has fewer bytes; NODE_SHORTEST_MAX: or more */
    uint16_t levels;   /* depth of recursion of a derivative or of a search for a string */
    uint32_t a, b; /* by kind; ALT and AND: first child in `children`, number of children; BYTES:
                        set */
    uint32_t min, max; /* REPEAT */
    uint32_t next;     /* next node with the same hash; 0 = none */
};

/* VISITED: unknown, and seen by the search that is running. */
enum node_alive { NODE_UNKNOWN, NODE_ALIVE, NODE_DEAD, NODE_VISITED };

struct node_memo {
    uint64_t key; /* node << 8 | class, or a question (node_derive.c); 0 = empty */
    uint32_t value;
    uint32_t alike; /* set of node_pool.alikes */
};

struct node_alikes; /* node_derive.c */

struct node_pool {
    struct node *nodes;
    uint32_t count, capacity, limit;
    uint16_t levels_limit; /* ERR_LIMIT for a node with more levels */
    uint32_t *children;
    uint32_t child_count, child_capacity;
    struct byte_set *sets;
    uint32_t set_count, set_capacity;
    uint32_t *table; /* heads of hash chains */
    uint32_t table_size;
    struct node_memo *memo; /* derivatives */
    uint32_t memo_count, memo_size;
    struct byte_set alike;      /* see node_derive */
    struct node_alikes *alikes; /* sets of bytes for the memo; as old as it */
    uint32_t *rules;            /* [rule_count] bodies */
    uint32_t rule_count, rule_capacity;
    /* The nodes for any text, and for any text as written in a JSON string. Each absorbs the other
     * alternatives of a union, and its complement is the empty language. 0 = not built yet. */
    uint32_t universe[2];
    uint32_t *scratch; /* a stack of lists under construction */
    uint32_t scratch_count, scratch_capacity;
    uint8_t class_of[256], example[256]; /* example: a byte of each class */
    int classes;
    uint32_t classed_sets; /* sets that the classes account for */
    uint64_t work;         /* work so far, in place of a clock: see node_work */
    uint64_t work_limit;   /* ERR_LIMIT above it */
    int rc;
};

/* Room for `more` elements in an array of the pool or of its user (`array`: address of the
 * pointer), which grows by doubling. false: pool->rc is ERR_NOMEM and the array is as before. */
bool node_reserve(struct node_pool *pool, void *array, uint32_t count, uint32_t *capacity,
                  size_t size, uint32_t more);

/* The same, and writes zeros to it. */
void node_prepare(struct node_pool *pool, void *array, uint32_t count, uint32_t *capacity,
                  size_t size, uint32_t more);

/* Frees room behind `count` elements. An array that cannot become smaller stays as it is. */
void node_shrink(void *array, uint32_t count, uint32_t *capacity, size_t size);

/* Counts work of the pool or of its user: one unit is about the time in which a node is found.
 * false: too much (rc is ERR_LIMIT), or an earlier error. */
bool node_work(struct node_pool *pool, uint64_t amount);

/* Opens an empty pool; false: no memory. */
bool node_pool_open(struct node_pool *pool, uint32_t limit);
void node_pool_close(struct node_pool *pool);

/* A mark: how much a pool holds at one time. A reset to it forgets everything made later. */
struct node_mark {
    uint32_t nodes, children, sets;
};
struct node_mark node_pool_mark(const struct node_pool *pool);
void node_pool_reset(struct node_pool *pool, const struct node_mark *mark);
/* The same, except for some nodes and those that they are built of. ids[i], of node mark->nodes + i
 * and for all nodes behind the mark: not 0 if the node is to be kept; then its new id, 0 for a node
 * that was forgotten. The order of ids is kept. */
void node_pool_keep(struct node_pool *pool, const struct node_mark *mark, uint32_t *ids);

size_t node_pool_bytes(const struct node_pool *pool);
void node_pool_shrink(struct node_pool *pool); /* frees what is not in use */
/* Makes room for what a first answer adds, and writes to it, so that the system provides it now and
 * not between two tokens. */
void node_pool_prepare(struct node_pool *pool);

/* After work_limit was reached: true, and the pool may be used again with another limit. Nodes,
 * derivatives and answers to questions are recorded when they are complete, so what was finished
 * stays and the rest is as if it had not begun. false: rc has another cause. */
bool node_pool_resume(struct node_pool *pool);

/* ---- Sets ---- */

static inline bool byte_set_has(const struct byte_set *set, unsigned byte) {
    return set->bits[byte >> 6] >> (byte & 63) & 1;
}
static inline struct byte_set byte_set_all(void) {
    return (struct byte_set){{UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX}};
}
static inline void byte_set_add(struct byte_set *set, unsigned byte) {
    set->bits[byte >> 6] |= (uint64_t)1 << (byte & 63);
}
void byte_set_range(struct byte_set *set, unsigned first, unsigned last);
bool byte_set_empty(const struct byte_set *set);

/* ---- Constructors ---- */

uint32_t node_bytes(struct node_pool *pool, const struct byte_set *set);
uint32_t node_range(struct node_pool *pool, unsigned first, unsigned last);
uint32_t node_text(struct node_pool *pool, const char *text, size_t size);
uint32_t node_seq(struct node_pool *pool, uint32_t a, uint32_t b);
uint32_t node_seq3(struct node_pool *pool, uint32_t a, uint32_t b, uint32_t c);
uint32_t node_alt(struct node_pool *pool, const uint32_t *list, size_t count);
uint32_t node_alt2(struct node_pool *pool, uint32_t a, uint32_t b);
/* A list under construction: open, add any number, close it as alternatives. Lists nest. */
uint32_t node_list_open(const struct node_pool *pool);
void node_list_add(struct node_pool *pool, uint32_t node);
uint32_t node_list_alt(struct node_pool *pool, uint32_t list);
/* A stack of nodes, for parts that are built from their end; lists and stacks nest. */
void node_push(struct node_pool *pool, uint32_t node);
uint32_t node_pop(struct node_pool *pool);
uint32_t node_option(struct node_pool *pool, uint32_t a); /* a or "" */
/* AND and NOT take regular nodes only. Their results may be empty without being NODE_NONE: see
 * node_live. */
uint32_t node_and(struct node_pool *pool, const uint32_t *list, size_t count);
uint32_t node_and2(struct node_pool *pool, uint32_t a, uint32_t b);
uint32_t node_not(struct node_pool *pool, uint32_t a);
uint32_t node_repeat(struct node_pool *pool, uint32_t a, uint32_t min, uint32_t max);
uint32_t node_mod(struct node_pool *pool, uint32_t modulus, uint32_t remainder);
/* Builds an alternative of texts that share their beginnings, so that many texts cost few
 * derivatives. Sorts the list. */
struct node_word {
    const char *text;
    size_t size;
};
uint32_t node_words(struct node_pool *pool, struct node_word *words, size_t count);

/* A rule whose body is set later: UINT32_MAX on failure. */
uint32_t node_rule_open(struct node_pool *pool);
uint32_t node_rule(struct node_pool *pool, uint32_t rule);

/* ---- Questions ---- */

/* Brings the classes up to date with the sets. If the classes change, the derivatives are
 * forgotten. After nodes were constructed, call it before node_derive, node_is_alive, node_live and
 * node_matches. */
void node_classes(struct node_pool *pool);
/* Classes tell bytes apart that any node of the pool does. Few of them matter to one node, so a
 * derivative also removes from pool->alike the examples of classes by which it might differ. */
uint32_t node_derive(struct node_pool *pool, uint32_t node, int class);
/* Returns a node that cannot be told from this one within the next `bytes` bytes: of texts that are
 * no longer, the same ones belong to both languages, and the same ones can be continued.
 * Repetitions that end farther away become endless, and what begins farther away becomes NODE_ALL;
 * so places of a language that differ only there have one node. */
uint32_t node_near(struct node_pool *pool, uint32_t node, uint32_t bytes);
#define NODE_NEAR_MAX 254u /* most bytes; with more, the node itself is returned */
/* Returns the derivative by any one plain character (constrain/tokens.h) if all characters have the
 * same; NODE_NONE if none may follow. NODE_DIFFERS: they have not, or this was not found out. */
uint32_t node_plain(struct node_pool *pool, uint32_t node);
#define NODE_DIFFERS UINT32_MAX
/* Does a regular node's language hold a string? Searches its derivatives where AND or NOT leave it
 * open; ERR_LIMIT when the search is too long. */
bool node_is_alive(struct node_pool *pool, uint32_t node);
/* Returns the node, or NODE_NONE if its language is empty. Brings the classes up to date. */
uint32_t node_live(struct node_pool *pool, uint32_t node);
/* Is the text in the regular node's language? */
bool node_matches(struct node_pool *pool, uint32_t node, const char *text, size_t size);

static inline const struct node *node_at(const struct node_pool *pool, uint32_t id) {
    return &pool->nodes[id];
}
static inline const uint32_t *node_children(const struct node_pool *pool, const struct node *node) {
    return pool->children + node->a;
}

/* Adds a number to a hash. */
static inline uint32_t node_mix(uint32_t hash, uint32_t value) {
    hash = (hash ^ value) * 0x9E3779B1u;
    return hash ^ hash >> 15;
}

#endif
