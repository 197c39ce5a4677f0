/* A lazily built automaton: which bytes may follow a text so that it can still become a string of a
 * language. Language: an expression of constrain/node.h whose rules may be recursive.
 *
 * An item is one reading of the text so far: what remains of a regular expression, and a stack of
 * expressions to be matched after it. A state is a set of items. Items, stacks and states are
 * interned, so each transition is computed once. A recursive language has infinitely many states;
 * only those that texts reach are built. A rule that ends with a reference to a rule pushes nothing
 * (a tail call), so repetition does not grow the stack. Left recursion would never end:
 * constrain/constrain.c removes or refuses it.
 *
 * Every state but AUTOMATON_DEAD has a continuation to a whole string, because expressions without
 * any string are dropped where they arise (node_is_alive).
 *
 * Limits: when there are too many states, stacks or expressions, everything learned is forgotten,
 * except for the states that are to be kept: `generation` changes, and earlier state numbers are
 * void. One thread at a time. */
#ifndef KEEPD_CONSTRAIN_AUTOMATON_H
#define KEEPD_CONSTRAIN_AUTOMATON_H

#include "constrain/node.h"

enum { AUTOMATON_UNKNOWN = 0, AUTOMATON_DEAD = 1 };
#define AUTOMATON_DIFFERS   UINT32_MAX
#define AUTOMATON_DISTANCES 3

struct automaton_item {
    uint32_t node; /* a regular node other than NODE_EMPTY and NODE_NONE */
    uint32_t stack;
};

struct automaton_stack {
    uint32_t node, below;
    uint32_t next; /* hash chain */
};

struct automaton_state {
    uint32_t first, count;              /* items */
    uint32_t next;                      /* hash chain */
    uint32_t near[AUTOMATON_DISTANCES]; /* results of automaton_near; 0 = not known yet */
    uint32_t plain;                     /* result of automaton_plain; 0 = not known yet */
    uint32_t mask[AUTOMATON_DISTANCES]; /* 1 + index of the state's masks in the caller's cache; 0 =
                                           none */
    uint8_t free;                       /* belongs to the caller: see mask.c */
    bool accepts;                       /* the text so far is a string of the language */
};

struct automaton_seen {
    uint32_t stamp, index;
};

struct automaton {
    struct node_pool pool;     /* the expressions of the language and their derivatives */
    struct node_mark compiled; /* how much of the pool is the compiled language */
    uint32_t root;
    uint32_t start; /* state of the empty text; 0 = not built */
    uint64_t generation;
    struct automaton_stack *stacks;
    uint32_t stack_count, stack_capacity, *stack_table, stack_table_size;
    struct automaton_item *items;
    uint32_t item_count, item_capacity;
    struct automaton_state *states;
    uint32_t *moves; /* [states][classes] */
    uint32_t state_count, state_capacity, *state_table, state_table_size;
    struct automaton_item *open; /* items under construction: results, then those still to follow */
    uint32_t open_count, open_capacity, work_count;
    bool accepts;                /* the items under construction accept the text */
    struct automaton_seen *seen; /* finds an item among the open ones; NULL until there are many */
    uint32_t stamp;              /* marks this construction's entries */
};

/* Takes over a pool whose rules are complete, and `root`. ERR_NOMEM leaves the pool with the
 * caller. */
int automaton_open(struct automaton *automaton, struct node_pool *pool, uint32_t root);
void automaton_close(struct automaton *automaton);

/* Forgets all states. */
void automaton_reset(struct automaton *automaton);
/* Forgets all states but these, and writes their new numbers in their place. If there is no memory
 * for that, all are forgotten and the numbers are 0. The kept states count as work. */
void automaton_keep(struct automaton *automaton, uint32_t *states, int count);
/* Returns whether the kept states leave so little room that a limit would soon be reached again. */
bool automaton_is_full(const struct automaton *automaton);
void automaton_shrink(struct automaton *automaton);  /* frees memory that is not in use */
void automaton_prepare(struct automaton *automaton); /* see node_pool_prepare */
size_t automaton_bytes(const struct automaton *automaton);
/* Returns the state of the empty text, 0 on failure (pool.rc). */
uint32_t automaton_start(struct automaton *automaton);
/* Returns the state after one more byte of a class; 0 on failure: pool.rc is ERR_LIMIT or
 * ERR_NOMEM, and nothing but node_pool_resume and automaton_reset may be called. */
uint32_t automaton_step(struct automaton *automaton, uint32_t state, int class);

/* Returns a state that agrees with this one for the next `bytes` bytes and that many others share
 * (node_near). It is remembered as the state's near state of distance `i`. 0 on failure. */
uint32_t automaton_near(struct automaton *automaton, uint32_t state, int i, uint32_t bytes);
/* Returns the state after any one plain character (constrain/tokens.h); AUTOMATON_DEAD if no plain
 * character may follow; AUTOMATON_DIFFERS if plain characters lead to different states, or if the
 * expressions do not show cheaply that they lead to one. 0 on failure. */
uint32_t automaton_plain(struct automaton *automaton, uint32_t state);

static inline uint32_t automaton_move(struct automaton *a, uint32_t state, unsigned byte) {
    int class = a->pool.class_of[byte];
    uint32_t next = a->moves[(size_t)state * (size_t)a->pool.classes + (size_t) class];
    return next != AUTOMATON_UNKNOWN ? next : automaton_step(a, state, class);
}

#endif
