/* The distinct tokens of one sequence, with the number of times that its answer has them: what
 * penalties need. Tokens are added as they come, so no step reads the whole text again. Memory for
 * all tokens is taken when it is opened. Thread: the engine's. */
#ifndef KEEPD_ENGINE_STEPS_TALLY_H
#define KEEPD_ENGINE_STEPS_TALLY_H

#include "kernels/kern_sample.h"

struct tally {
    struct kern_seen *list; /* [tokens_max], in the order of the first occurrences; owned */
    int32_t count;
    int32_t *place; /* hash table: 1 + index into the list, 0 = empty; owned */
    uint32_t mask;  /* the table's size - 1, a power of two */
    int32_t added;  /* tokens of the text that have been added */
};

/* For texts of up to `tokens_max` tokens. ERR_NOMEM leaves it closed. */
int tally_open(struct tally *tally, int32_t tokens_max);
void tally_close(struct tally *tally); /* a zeroed one is closed */
/* Adds what the text has beyond the tokens that were added before: tokens[0, prompt_count) is the
 * prompt, the rest up to token_count, at most tokens_max, the answer. */
void tally_add(struct tally *tally, const int32_t *tokens, int32_t prompt_count,
               int32_t token_count);

#endif
