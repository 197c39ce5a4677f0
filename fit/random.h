/* Seeded random numbers of the fit. Pure. */
#ifndef KEEPD_FIT_RANDOM_H
#define KEEPD_FIT_RANDOM_H

#include <math.h>
#include <stdint.h>

#include "base/splitmix.h"

/* Evenly in [0, 1). */
static inline double fit_random_even(uint64_t *state) {
    return (double)(splitmix_next(state) >> 11) * 0x1p-53;
}

/* Normal, mean 0, deviation 1 (Box and Muller). */
static inline float fit_random_normal(uint64_t *state) {
    const double r = sqrt(-2 * log(1 - fit_random_even(state)));
    return (float)(r * cos(6.283185307179586 * fit_random_even(state)));
}

#endif
