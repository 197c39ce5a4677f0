/* Loops of one answer: does its end repeat one block of tokens, again and again?
 *
 * For each size up to engine_loops.longest the length of the run of tokens is counted that equal
 * the token so many places before them. A run of size * (count - 1) tokens is a block of that size
 * that stands there `count` times. So a token costs one comparison for each size, and no text is
 * read twice. The meaning is that of vLLM's repetition_detection. Thread: the engine's. */
#ifndef KEEPD_ENGINE_STEPS_LOOPS_H
#define KEEPD_ENGINE_STEPS_LOOPS_H

#include "engine/engine_request.h"

struct loops {
    int32_t *runs; /* [sizes] owned; NULL: closed */
    int32_t sizes;
    bool found; /* the last result of loops_note */
};

/* For an answer of up to `room` tokens. A rule without a count leaves it closed. ERR_NOMEM. */
int loops_open(struct loops *loops, const struct engine_loops *rule, int32_t room);
void loops_close(struct loops *loops); /* a zeroed one is closed */
/* Takes the last token of the answer tokens[0, count). Returns whether the answer ends with a loop.
 * To be called once for each token, in order; a closed one finds none. */
bool loops_note(struct loops *loops, const struct engine_loops *rule, const int32_t *tokens,
                int32_t count);

#endif
