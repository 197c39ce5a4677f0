/* Conversations: what outlives a request. A turn ends, its streams stay in their cache slot, and
 * the next request that extends the same tokens continues them.
 *
 * Match: the longest common token prefix within one space (key, salt, model) and equal kv
 * parameters. Only tokens after the previous prompt's end may be dropped (templates strip
 * reasoning, text does not always re-tokenise alike, users edit the last answer); an earlier
 * divergence recomputes, because what the earlier tokens would have kept was decided with the
 * whole prompt in view. At least one prompt token is always left to compute.
 *
 * Owner: the scheduler, on the engine thread. Slots belong to the scheduler too; this table only
 * remembers them. */
#ifndef KEEPD_ENGINE_CONVERSATION_H
#define KEEPD_ENGINE_CONVERSATION_H

#include <stdbool.h>
#include <stdint.h>

#include "paging/policy.h"

struct conversation {
    uint64_t id; /* 0 = free entry */
    uint8_t space[16];
    struct kv_params kv;
    int32_t *tokens;     /* appended so far, owned; [token_count] */
    int32_t token_count; /* T */
    int32_t prompt_end;  /* tokens of the last prompt: nothing before this may be dropped */
    int32_t held;        /* entries per stream on average, rounded up */
    int64_t entries;     /* exact, over all streams */
    int64_t pages;       /* exact */
    int32_t slot;
    int64_t last_used_ns;
    uint64_t use; /* order of last use; the smallest goes first */
};

struct conversation_table {
    struct conversation *rows;
    int capacity, count;
    int64_t pages; /* sum over rows */
    int64_t entries;
    uint64_t next_id, next_use;
    uint64_t changes; /* grows with every row added or taken */
};

void conversation_table_open(struct conversation_table *table, int capacity);
void conversation_table_close(struct conversation_table *table);

/* Copies *row in (taking row->tokens), gives it an id. The table must have room. */
void conversation_add(struct conversation_table *table, const struct conversation *row,
                      int64_t now_ns);

/* Takes a row out: the caller then owns tokens and slot. */
struct conversation conversation_take(struct conversation_table *table, struct conversation *row);

struct conversation *conversation_oldest(struct conversation_table *table,
                                         const struct conversation *except);

/* Why a prompt could not continue a conversation it shares tokens with. */
enum conversation_miss {
    CONVERSATION_HIT,
    CONVERSATION_NONE,     /* nothing in this space with these kv parameters shares a token */
    CONVERSATION_DIVERGED, /* differs before the previous prompt's end */
    CONVERSATION_WHOLE     /* the prompt adds no token */
};

/* The conversation `prompt` extends, and how many of its tokens stay (*common). */
struct conversation *conversation_find(struct conversation_table *table, const uint8_t *space,
                                       const struct kv_params *kv, const int32_t *prompt,
                                       int32_t prompt_count, int32_t *common,
                                       enum conversation_miss *miss);

#endif
