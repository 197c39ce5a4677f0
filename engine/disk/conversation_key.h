/* Conversations as files and the tables of other threads know them: by the hashes of their tokens.
 * Pure functions. */
#ifndef KEEPD_ENGINE_DISK_CONVERSATION_KEY_H
#define KEEPD_ENGINE_DISK_CONVERSATION_KEY_H

#include <stdbool.h>
#include <stdint.h>

#include "paging/policy.h"

/* The parts of a request that the search needs. */
struct conversation_query {
    const uint8_t *space; /* [16] */
    const struct kv_params *kv;
    const int32_t *prompt;
    int32_t prompt_count;
    uint64_t hint; /* 0 = none */
};

/* Extends a hash by `count` tokens; CONVERSATION_HASH is the hash of no tokens. */
#define CONVERSATION_HASH 0x6b65657064u
uint64_t conversation_hash(uint64_t hash, const int32_t *tokens, int32_t count);

/* A conversation described without its tokens: for files and for the tables of other threads. */
struct conversation_key {
    const uint8_t *space; /* [16] */
    const struct kv_params *kv;
    int32_t prompt_end, token_count;
    uint64_t prompt_hash, token_hash;
};

/* A query and the hashes of its prompt's prefixes, made when they are first needed. */
struct conversation_search {
    const struct conversation_query *query;
    uint64_t *hashes; /* hashes[i] is that of the first i tokens */
};
/* Returns the hashes, [prompt_count + 1], owned by the search; NULL: no memory. */
const uint64_t *conversation_search_hashes(struct conversation_search *search);
void conversation_search_close(struct conversation_search *search);

/* Returns the number of tokens of the conversation that the query would certainly use; 0 = it does
 * not serve, or there was no memory. Hashes are known only at the prompt's end and at the end of
 * all tokens, so a common prefix that ends between the two counts up to the prompt's end. */
int32_t conversation_usable(struct conversation_search *search, const struct conversation_key *key);

/* How well one of several tables serves a query, by its best conversation. */
struct conversation_affinity {
    int32_t usable; /* tokens; 0 = not at all */
    bool hinted;    /* the conversation has the query's hint */
};

static inline void conversation_affinity_note(struct conversation_affinity *best, int32_t usable,
                                              bool hinted) {
    if (usable < best->usable || (usable == best->usable && !hinted)) return;
    *best = (struct conversation_affinity){usable, hinted};
}

#endif
