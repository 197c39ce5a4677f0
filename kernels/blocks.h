/* Matrices in blocks: 32 consecutive inputs of one output are whole numbers n with a common factor
 * and, in some formats, a common term.
 *
 *   KERN_Q8   w = scale n            n in -128..127
 *   KERN_Q8M  w = scale n + least    n in -128..127
 *   KERN_Q4   w = scale n            n in -8..7
 *   KERN_Q4M  w = scale n + least    n in 0..15
 *
 * A matrix of these types is [rows][blocks of a row] struct block; every backend packs them into a
 * layout of its own. A row whose length is no multiple of 32 ends with a block whose other numbers
 * are zero. Products scale n of the formats that files use are exact in float32, so w is rounded
 * once, by the addition. Pure. */
#ifndef KEEPD_KERNELS_BLOCKS_H
#define KEEPD_KERNELS_BLOCKS_H

#ifdef __cplusplus
extern "C" {
#endif

#include "kernels/kern.h"

#define BLOCK_NO_LEAST (-0.0f) /* added, it changes nothing, not even the sign of a zero */

struct block {
    float scale, least; /* least: BLOCK_NO_LEAST in KERN_Q8 and KERN_Q4 */
    int8_t n[KERN_BLOCK];
};

static inline int64_t blocks_of(int64_t count) {
    return (count + KERN_BLOCK - 1) / KERN_BLOCK;
}

/* Bytes of a row of `count` numbers without alignment, with factors in float16. */
static inline size_t blocks_bytes(enum kern_dtype dtype, int64_t count) {
    size_t bits = dtype == KERN_Q4 || dtype == KERN_Q4M ? 4 : 8;
    size_t factors = dtype == KERN_Q8M || dtype == KERN_Q4M ? 2 : 1;
    return (size_t)blocks_of(count) * (KERN_BLOCK / 8 * bits + 2 * factors);
}

static inline float block_number(const struct block *block, int i) {
    return block->scale * (float)block->n[i] + block->least;
}

#ifdef __cplusplus
}
#endif

#endif
