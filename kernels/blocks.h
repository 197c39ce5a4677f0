/* Matrices in blocks: 32 consecutive inputs of one output are integers n with a common factor and,
 * in some formats, a common term, or one of each for each half of them.
 *
 *   KERN_Q8   w = scale n            n in -128..127
 *   KERN_Q8M  w = scale n + least    n in -128..127
 *   KERN_Q4   w = scale n            n in -8..7
 *   KERN_Q4M  w = scale n + least    n in 0..15
 *   KERN_Q8S  w = scale n            n in -128..127, a scale for each half of the block
 *   KERN_Q8SM w = scale n + least    n in -128..127, a scale and a term for each half of the block
 *
 * A matrix of these types is [rows][blocks of a row] struct block; every backend packs them into a
 * layout of its own. A row whose length is no multiple of 32 ends with a block whose other numbers
 * are zero. Products scale n of the formats that files use are exact in float32, so w is rounded
 * once, by the addition; only those of NVFP4 are rounded themselves.
 *
 * A type names a set of numbers, and files use a part of it: Q5_0 has n in -16..15, IQ4_NL those of
 * BLOCK_IQ4, MXFP4 those of BLOCK_E2M1 and scales that are powers of two. A backend may choose the
 * smallest layout that holds the numbers which a matrix has. Pure. */
#ifndef KEEPD_KERNELS_BLOCKS_H
#define KEEPD_KERNELS_BLOCKS_H

#ifdef __cplusplus
extern "C" {
#endif

#include "kernels/kern_weights.h"

/* n of the codes 0 to 15 in IQ4_NL and IQ4_XS (ggml). */
#define BLOCK_IQ4 -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
/* Twice the numbers of E2M1 (OCP Microscaling Formats 1.0), by their codes; n has no zero with a
 * sign. */
#define BLOCK_E2M1 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12

#define BLOCK_NO_LEAST (-0.0f) /* added, it changes nothing, not even the sign of a zero */

/* Blocks of a group have the same units, of which their factors are multiples, in some formats. */
#define BLOCK_GROUP 8

struct block {
    float scale[2]; /* one for each half; equal but in KERN_Q8S and KERN_Q8SM */
    float least[2]; /* the same; BLOCK_NO_LEAST in KERN_Q8, KERN_Q4 and KERN_Q8S */
    /* Not 0: the scales are numbers of 8 bits, whole or of E4M3, times the first, and the terms are
       whole ones times the second. The file has the same units in each BLOCK_GROUP
       blocks of a row, counted from its beginning. */
    float unit[2];
    int8_t n[KERN_BLOCK];
};

/* Sets factors that both halves have, and no units. */
static inline void block_set_factors(struct block *block, float scale, float least) {
    for (int i = 0; i < 2; i++)
        block->scale[i] = scale, block->least[i] = least, block->unit[i] = 0;
}

/* The blocks of a row. `to`: room for what a reader makes, unused without one. */
static inline const struct block *blocks_of_row(const struct kern_matrix *matrix, int64_t row,
                                                struct block *to) {
    if (!matrix->reader)
        return (const struct block *)matrix->data + row * (matrix->stride / KERN_BLOCK);
    matrix->reader->read(matrix->reader, matrix->first_row + row, to);
    return to + matrix->first_block;
}

static inline int64_t blocks_of(int64_t count) {
    return (count + KERN_BLOCK - 1) / KERN_BLOCK;
}

static inline bool block_has_least(enum kern_dtype dtype) {
    return dtype == KERN_Q8M || dtype == KERN_Q4M || dtype == KERN_Q8SM;
}

static inline bool block_is_split(enum kern_dtype dtype) {
    return dtype == KERN_Q8S || dtype == KERN_Q8SM;
}

static inline bool block_is_narrow(enum kern_dtype dtype) { /* n fits 4 bits */
    return dtype == KERN_Q4 || dtype == KERN_Q4M;
}

static inline size_t block_factors(enum kern_dtype dtype) {
    return (size_t)(1 + block_is_split(dtype)) * (size_t)(1 + block_has_least(dtype));
}

/* Bytes of a row of `count` numbers without alignment, with factors in float16. */
static inline size_t blocks_bytes(enum kern_dtype dtype, int64_t count) {
    size_t bits = block_is_narrow(dtype) ? 4 : 8;
    return (size_t)blocks_of(count) * (KERN_BLOCK / 8 * bits + 2 * block_factors(dtype));
}

static inline float block_number(const struct block *block, int i) {
    const int half = i / (KERN_BLOCK / 2);
    return block->scale[half] * (float)block->n[i] + block->least[half];
}

#ifdef __cplusplus
}
#endif

#endif
