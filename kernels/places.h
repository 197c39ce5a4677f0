/* Places: the numbers by which keys and queries are rotated. A model has a fixed number of them,
 * its positions; a text may have any number of tokens. Until a text has more tokens than the model
 * has positions, the place of a token is its position. Then the sequence is shifted: its tokens get
 * lower places, so that PLACES are free for new ones. Shifts change places only; a token's
 * position, by which it is aged, protected, ordered and reported, stays.
 *
 * With N positions of the model, R = N / 4 and s = the sinks, both rounded to whole blocks of
 * PLACES_BLOCK positions, a token at position p has this place after k shifts:
 *
 *   k = 0, or p is a sink   p
 *   otherwise               f(b - k R) + (p - b), with b the first position of p's block
 *   f(x) = x                           for x >= s + R: the near places
 *   f(x) = s + R - R u / (R + u)       for u = s + R - x > 0: the far places, in [s, s + R)
 *
 * So the newest tokens, at least N / 4 - PLACES_BLOCK after a shift, keep their distances to each
 * other and to new tokens. Older ones move together: the slope of f falls from 1 to 0, which keeps
 * the order of blocks, widens no distance, and ends in s + R places however long the text becomes.
 * Inside a block distances never change, so that a phrase stays a phrase; far blocks overlap.
 * (Exact near and coarse far positions are what models extend best to without training:
 * Self-Extend, arXiv 2401.01325; ReRoPE.)
 *
 * The number of shifts is a function of the tokens alone: the least k for which token N + k R fits.
 * So places are a function of (N, s, tokens, position): the same for every layer and head, on every
 * rank and backend, for forks, cuts and restored conversations, and no record of them is kept. */
#ifndef KEEPD_KERNELS_PLACES_H
#define KEEPD_KERNELS_PLACES_H

#include <stdint.h>

#define PLACES_BLOCK 32
/* Models with fewer positions cannot be shifted. */
#define PLACES_LEAST (4 * PLACES_BLOCK)

/* Places that one shift sets free: R. */
static inline int32_t places_room(int32_t positions) {
    return positions / (4 * PLACES_BLOCK) * PLACES_BLOCK;
}

/* The most sinks of a sequence that can be shifted. */
static inline int32_t places_sinks_max(int32_t positions) {
    return places_room(positions);
}

/* The most entries that a stream keeps in a shift: as many as there are places below the next
 * token's. So no stream becomes longer than `positions`. */
static inline int32_t places_kept(int32_t positions) {
    return positions - places_room(positions);
}

/* How often a text of `tokens` tokens has been shifted. */
static inline int32_t places_shifts(int32_t positions, int32_t tokens) {
    int32_t room = places_room(positions), over = tokens - positions;
    return room == 0 || over <= 0 ? 0 : (over - 1) / room + 1;
}

/* The least number of tokens with this number of shifts. */
static inline int32_t places_shifted_at(int32_t positions, int32_t shifts) {
    return shifts == 0 ? 0 : positions + (shifts - 1) * places_room(positions) + 1;
}

static inline int32_t places_of(int32_t positions, int32_t sinks, int32_t shifts, int32_t pos) {
    if (shifts == 0 || pos < sinks) return pos;
    int64_t room = places_room(positions), block = pos - pos % PLACES_BLOCK;
    int64_t near = (sinks + PLACES_BLOCK - 1) / PLACES_BLOCK * PLACES_BLOCK + room;
    int64_t at = block - shifts * room, before = near - at;
    if (before > 0) at = near - room * before / (room + before);
    return (int32_t)(at + pos % PLACES_BLOCK);
}

#endif
