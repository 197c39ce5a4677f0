/* Seeded random numbers of the fit (splitmix64). Pure. */
#ifndef KEEPD_FIT_RANDOM_H
#define KEEPD_FIT_RANDOM_H

#include <math.h>
#include <stdint.h>

static inline uint64_t fit_random(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

/* Evenly in [0, 1). */
static inline double fit_random_even(uint64_t *state) {
    return (double)(fit_random(state) >> 11) * 0x1p-53;
}

/* Normal, mean 0, deviation 1 (Box and Muller). */
static inline float fit_random_normal(uint64_t *state) {
    const double r = sqrt(-2 * log(1 - fit_random_even(state)));
    return (float)(r * cos(6.283185307179586 * fit_random_even(state)));
}

#endif
