/* The mask of a state: the tokens whose bytes the automaton can read from there.
 *
 * Most steps of a structured answer are inside strings, where nearly every token is allowed. There
 * a walk through the whole vocabulary is avoided: if every plain character (constrain/tokens.h)
 * leads from a state to one and the same next state, and so on for n characters, then all plain
 * tokens of at most n characters are allowed, and their mask was made when the vocabulary was
 * opened. Only the tokens with other characters are walked.
 *
 * A token sees no farther than it is long. So the tokens are in tiers by their length, and the
 * masks of a tier are kept for states as near as its tokens see (automaton_near): the tenth
 * character of a name of at most 64 has the same mask as the eleventh, and the second element of an
 * array has the masks of the first. */
#ifndef KEEPD_CONSTRAIN_MASK_H
#define KEEPD_CONSTRAIN_MASK_H

#include "constrain/automaton.h"
#include "constrain/tokens.h"

struct mask_owner {
    uint32_t state;
    int tier;
};

struct mask_maker {
    const struct constrain_tokens *tokens; /* borrowed */
    uint32_t *path;                        /* [depth + 1] states along a token */
    uint32_t **kept;          /* [capacity] masks of states, a ring; NULL: no mask yet */
    struct mask_owner *owner; /* [capacity] */
    uint32_t capacity, next, count;
    uint32_t made; /* masks in memory */
};

int mask_maker_open(struct mask_maker *maker, const struct constrain_tokens *tokens);
void mask_maker_close(struct mask_maker *maker);
void mask_maker_forget(struct mask_maker *maker); /* after automaton_reset */
int mask_maker_prepare(struct mask_maker *maker); /* makes room for a first answer; ERR_NOMEM */
void mask_maker_shrink(struct mask_maker *maker); /* also frees the masks' memory */
size_t mask_maker_bytes(const struct mask_maker *maker);

/* Writes the mask of a state that is not dead. false: the automaton's pool has the error. */
bool mask_make(struct mask_maker *maker, struct automaton *automaton, uint32_t state,
               uint32_t *mask);

#endif
