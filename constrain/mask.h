/* The mask of a state: the tokens whose bytes the automaton can read from there.
 *
 * Most steps of a structured answer are inside strings, where nearly every token is allowed. There
 * a walk through the whole vocabulary is avoided: if every plain character (constrain/tokens.h)
 * leads from a state to one and the same next state, and so on for n characters, then all plain
 * tokens of at most n characters are allowed, and their mask was made when the vocabulary was
 * opened. Only the tokens with other characters are walked. */
#ifndef KEEPD_CONSTRAIN_MASK_H
#define KEEPD_CONSTRAIN_MASK_H

#include "constrain/automaton.h"
#include "constrain/tokens.h"

struct mask_maker {
    const struct constrain_tokens *tokens; /* borrowed */
    uint32_t *path;                        /* [depth + 1] states along a token */
    uint32_t **kept; /* [capacity] masks of states, a ring; NULL: no mask yet */
    uint32_t *owner; /* [capacity] their states */
    uint32_t capacity, next, count;
    uint32_t made; /* masks in memory */
};

int mask_maker_open(struct mask_maker *maker, const struct constrain_tokens *tokens);
void mask_maker_close(struct mask_maker *maker);
void mask_maker_forget(struct mask_maker *maker); /* after automaton_reset */
void mask_maker_shrink(struct mask_maker *maker); /* also frees the masks' memory */
size_t mask_maker_bytes(const struct mask_maker *maker);

/* The mask of a state that is not dead; valid until the next call. NULL: the automaton's pool has
 * the error. */
const uint32_t *mask_make(struct mask_maker *maker, struct automaton *automaton, uint32_t state);

#endif
