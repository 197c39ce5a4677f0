/* Masks that are made before an answer needs them: when a language has been compiled, one text of
 * it is followed, as an answer might write it, and the masks along the way are made. So the first
 * answer finds most masks of punctuation and of the beginnings of strings and numbers; they were
 * made while nobody waited for a token. */
#ifndef KEEPD_CONSTRAIN_AHEAD_H
#define KEEPD_CONSTRAIN_AHEAD_H

#include "constrain/mask.h"

/* Spends at most `work`. An error leaves the automaton as if nothing had been learned. */
void ahead_learn(struct automaton *automaton, struct mask_maker *maker, uint64_t work);

#endif
