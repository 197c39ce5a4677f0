/* The random numbers of splitmix64 (Steele, Lea and Flood, 2014; the code is in the public domain):
 * a counter in steps of SPLITMIX_STEP, and a mixer that makes its values look random. Not for
 * secrets. Pure. */
#ifndef KEEPD_BASE_SPLITMIX_H
#define KEEPD_BASE_SPLITMIX_H

#include <stdint.h>

#define SPLITMIX_STEP 0x9e3779b97f4a7c15u

/* Maps different numbers to different numbers (it is a bijection). */
static inline uint64_t splitmix_mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static inline uint64_t splitmix_next(uint64_t *state) {
    return splitmix_mix(*state += SPLITMIX_STEP);
}

#endif
