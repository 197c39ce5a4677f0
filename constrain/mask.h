/* The mask of a state: the tokens whose bytes the automaton can read from there.
 *
 * Most steps of a structured answer are inside strings, where nearly every token is allowed. There
 * a walk through the whole vocabulary is avoided: if every plain character (constrain/tokens.h)
 * leads from a state to one and the same next state, and so on for n characters, then all plain
 * tokens of at most n characters are allowed, and their mask was made when the vocabulary was
 * opened. Only the tokens with other characters are walked.
 *
 * Whether a token is allowed depends on no more bytes than it has. So tokens are divided into tiers
 * by their length, and a tier's masks are kept for states that agree over that length
 * (automaton_near): in a name of at most 64 characters the tenth has the same mask as the eleventh,
 * and the second element of an array has the masks of the first. */
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
    uint32_t *path;                        /* [depth + 1] the states along the bytes of a token */
    uint32_t **kept;          /* [capacity] masks of states, as a ring; NULL: not allocated */
    struct mask_owner *owner; /* [capacity] the state that each mask belongs to */
    uint32_t capacity, next, count;
    uint32_t made; /* masks that are allocated */
};

int mask_maker_open(struct mask_maker *maker, const struct constrain_tokens *tokens);
void mask_maker_close(struct mask_maker *maker);
void mask_maker_forget(struct mask_maker *maker); /* after automaton_reset */
int mask_maker_prepare(struct mask_maker *maker); /* allocates the first masks; ERR_NOMEM */
void mask_maker_shrink(struct mask_maker *maker); /* also frees the masks' memory */
size_t mask_maker_bytes(const struct mask_maker *maker);

/* Writes the mask of a state that is not dead. false: the automaton's pool has the error. */
bool mask_make(struct mask_maker *maker, struct automaton *automaton, uint32_t state,
               uint32_t *mask);

#endif
