/* Shared by the seeded simulations of the cache. Each has a `struct sim` with `seed` and `random`,
 * and a print_where(sim) that prints its position. */
#ifndef KEEPD_TESTS_SIM_EXPECT_H
#define KEEPD_TESTS_SIM_EXPECT_H

#include <stdio.h>
#include <stdlib.h>

#include "tests/unit/kernels/cache_content.h"

/* On failure: prints seed, place, condition and the message, and exits. */
#define EXPECT(sim, condition, ...)                                                                \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "seed %llu ", (unsigned long long)(sim)->seed);                        \
            print_where(sim);                                                                      \
            fprintf(stderr, ": %s: ", #condition);                                                 \
            fprintf(stderr, __VA_ARGS__);                                                          \
            fprintf(stderr, "\n");                                                                 \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static inline int32_t pick_from(uint64_t *random, int32_t low, int32_t high) {
    return low + (int32_t)content_random(random, (uint32_t)(high - low + 1));
}

#endif
