/* Expressions that describe sets of byte strings ("languages"), and their derivatives.
 *
 * An expression is a node in a pool. Equal nodes are one node (hash-consing), so comparing ids
 * compares expressions, and tables can be indexed by ids. Constructors simplify: a node that holds
 * no AND or NOT is NODE_NONE exactly if its language is empty.
 *
 * The derivative of L by a byte c is {s : c s in L} (Brzozowski, "Derivatives of regular
 * expressions", JACM 1964; Owens, Reppy, Turon, "Regular-expression derivatives re-examined", JFP
 * 2009). Derivatives of regular nodes are regular nodes. Nodes that refer to rules are not regular:
 * constrain/automaton.h runs them on a stack.
 *
 * Byte classes: bytes that every node treats alike form one class. Derivatives by bytes of one
 * class are equal, so tables have a column for each class, not for each byte.
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
#define NODE_ENDLESS      UINT32_MAX /* `max` of a repetition that has no upper bound */
#define NODE_SHORTEST_MAX 255
#define NODE_WIDE         16

struct byte_set {
    uint64_t bits[4];
};

struct node {
    uint8_t kind;
    bool nullable : 1; /* the language holds ""; set for regular nodes only */
    bool regular : 1;  /* refers to no rule */
    bool exact : 1;    /* holds no AND and no NOT */
    bool wide : 1;    /* a string may begin with any of NODE_WIDE bytes or more, by a rough count */
    uint8_t alive;    /* enum node_alive */
    uint8_t shortest; /* no string has fewer bytes; NODE_SHORTEST_MAX: or more */
    uint16_t levels;  /* depth of recursion of a derivative or of a search for a string */
    uint32_t a, b;    /* by kind; ALT and AND: first child in `children`, number of children; BYTES:
                           set */
    uint32_t min, max; /* REPEAT */
    uint32_t next;     /* next node with the same hash; 0 = none */
};

/* NODE_VISITED: not known yet, but the search that is running has reached the node. */
enum node_alive { NODE_UNKNOWN, NODE_ALIVE, NODE_DEAD, NODE_VISITED };

struct node_memo {
    uint64_t key; /* node << 8 | class, or the key of an answer (node_derive.c); 0 = this place is
                     free */
    uint32_t value;
    uint32_t alike; /* number in node_pool.alikes of the set of bytes with the same derivative */
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
    struct node_alikes *alikes; /* the sets that `memo` refers to; both are forgotten together */
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

/* Makes room for `more` elements after the `count` of an array that belongs to the pool or its user
 * (`array`: address of the pointer). The array grows by doubling. false: pool->rc is ERR_NOMEM and
 * the array is as before. */
bool node_reserve(struct node_pool *pool, void *array, uint32_t count, uint32_t *capacity,
                  size_t size, uint32_t more);

/* Makes room as node_reserve does, and writes zeros to it. */
void node_prepare(struct node_pool *pool, void *array, uint32_t count, uint32_t *capacity,
                  size_t size, uint32_t more);

/* Frees the room after `count` elements. If the allocator cannot make an array smaller, it stays as
 * it is. */
void node_shrink(void *array, uint32_t count, uint32_t *capacity, size_t size);

/* Counts work of the pool or of its user: one unit is about the time in which a node is found.
 * false: too much (rc is ERR_LIMIT), or an earlier error. */
bool node_work(struct node_pool *pool, uint64_t amount);

/* Opens an empty pool; false: no memory. */
bool node_pool_open(struct node_pool *pool, uint32_t limit);
void node_pool_close(struct node_pool *pool);

/* How much a pool holds at one time. A reset to a mark forgets everything that was made later. */
struct node_mark {
    uint32_t nodes, children, sets;
};
struct node_mark node_pool_mark(const struct node_pool *pool);
void node_pool_reset(struct node_pool *pool, const struct node_mark *mark);
/* Resets the pool to a mark, but keeps some later nodes and the nodes that they are built of.
 * ids[i] belongs to node mark->nodes + i, for all nodes after the mark: before the call, not 0 if
 * the node is to be kept; after it, the node's new id, or 0 if it was forgotten. The order of ids
 * is kept. */
void node_pool_keep(struct node_pool *pool, const struct node_mark *mark, uint32_t *ids);

size_t node_pool_bytes(const struct node_pool *pool);
void node_pool_shrink(struct node_pool *pool); /* frees what is not in use */
/* Makes room for the nodes that a first answer adds, and writes to it, so that the system provides
 * the memory now and not between two tokens. */
void node_pool_prepare(struct node_pool *pool);

/* Makes the pool usable again, with another limit, after work_limit was reached; false: rc has
 * another cause. Nodes, derivatives and answers are recorded when they are complete, so whatever
 * was finished is kept, and the rest is as if it had not begun. */
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
/* A list under construction: open it, add any number of nodes, close it as alternatives. Lists
 * nest. */
uint32_t node_list_open(const struct node_pool *pool);
void node_list_add(struct node_pool *pool, uint32_t node);
uint32_t node_list_alt(struct node_pool *pool, uint32_t list);
/* A stack of nodes, for parts that are built from their end; lists and stacks nest. */
void node_push(struct node_pool *pool, uint32_t node);
uint32_t node_pop(struct node_pool *pool);
uint32_t node_option(struct node_pool *pool, uint32_t a); /* a or "" */
/* Conjunctions and complements of regular nodes. Their results may be empty without being
 * NODE_NONE: see node_live. */
uint32_t node_and(struct node_pool *pool, const uint32_t *list, size_t count);
uint32_t node_and2(struct node_pool *pool, uint32_t a, uint32_t b);
uint32_t node_not(struct node_pool *pool, uint32_t a);
uint32_t node_repeat(struct node_pool *pool, uint32_t a, uint32_t min, uint32_t max);
uint32_t node_mod(struct node_pool *pool, uint32_t modulus, uint32_t remainder);
/* Builds alternatives of texts that share their beginnings, so that many texts cost few
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
/* Returns the derivative of a node by the bytes of a class. Classes separate bytes that any node of
 * the pool treats differently, and few of these differences matter to one node. So the call also
 * removes from pool->alike the bytes whose derivative may differ. */
uint32_t node_derive(struct node_pool *pool, uint32_t node, int class);
/* Returns a node that agrees with this one for the next `bytes` bytes: both languages have the same
 * texts of at most this length, and the same ones can be continued. Repetitions that end farther
 * away become endless, and parts that begin farther away become NODE_ALL; so places of a language
 * that differ only there share one node. */
uint32_t node_near(struct node_pool *pool, uint32_t node, uint32_t bytes);
#define NODE_NEAR_MAX 254u /* the most bytes; for more, the node itself is returned */
/* Returns the derivative by any one plain character (constrain/tokens.h) if all plain characters
 * have the same; NODE_NONE if none may follow; NODE_DIFFERS if they do not have the same, or if the
 * structure does not show it. */
uint32_t node_plain(struct node_pool *pool, uint32_t node);
#define NODE_DIFFERS UINT32_MAX
/* Returns whether the language of a regular node holds a string. Searches its derivatives where AND
 * or NOT leave that open; ERR_LIMIT when the search becomes too long. */
bool node_is_alive(struct node_pool *pool, uint32_t node);
/* Returns the node, or NODE_NONE if its language is empty. Brings the classes up to date. */
uint32_t node_live(struct node_pool *pool, uint32_t node);
/* Returns whether the text is in the language of the regular node. */
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
