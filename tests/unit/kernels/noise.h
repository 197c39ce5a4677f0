/* Repeatable random numbers for the tests of every backend. */
#ifndef KEEPD_TESTS_UNIT_KERNELS_NOISE_H
#define KEEPD_TESTS_UNIT_KERNELS_NOISE_H

#include <stdint.h>
#include <stdlib.h>

#include "base/splitmix.h"

/* Random: a counter through a mixer (splitmix64), so that a value depends on its place alone. */
static inline uint64_t mix(uint64_t x) {
    return splitmix_next(&x);
}

/* In (-1, 1). */
static inline float noise(uint64_t seed, uint64_t place) {
    return (float)((double)(int64_t)mix(seed * 0x100000001b3u + place) * 0x1p-63);
}

static inline void fill(float *to, size_t count, uint64_t seed) {
    for (size_t i = 0; i < count; i++) to[i] = noise(seed, i);
}

/* Host memory, filled with noise; the caller frees it. */
static inline float *fresh(size_t count, uint64_t seed) {
    float *to = calloc(count ? count : 1, sizeof *to);
    if (!to) abort();
    fill(to, count, seed);
    return to;
}

#endif
