/* Keys and values in 8 or 4 bits, KERN_ROW8 and KERN_ROW4: the formats of `--kv-dtype q8` and `q4`.
 *
 * A row, which is one key or one value, is first rotated by an orthogonal matrix: neighbouring
 * blocks of 2^n numbers, the largest power of two that divides the head size, each multiplied by
 * the Hadamard matrix of that size over 2^(n/2) (Sylvester's order). The matrix is its own inverse.
 * A few large numbers of a key are spread over the whole block, so that one factor suits all
 * numbers (QuaRot, arXiv 2404.00456). Products of keys with queries do not change if queries are
 * rotated in the same way, and a weighted sum of values is rotated back once. The cache holds
 * rotated rows; lengths, cosines and weighted sums of rows need not know of the rotation, whereas
 * RoPE applies to rows that are rotated back.
 *
 * Stored are a code for each number and one factor, in bfloat16: number = factor * level(code),
 * which float32 represents exactly. Rows are padded to a multiple of ROW_STEP codes.
 *
 *   ROW8: the code is a signed byte, the level is the code, -127 .. 127. The factor is the largest
 *         magnitude over 127, rounded up.
 *   ROW4: four bits; the levels are row_levels, the numbers that represent a normal distribution
 *         with the least squared error (Max, IRE Trans. Inf. Theory 6, 1960), in whole numbers.
 *         Rotated rows are nearly normal. Byte j of each 16 has the code of number j of the
 *         ROW_STEP in its low bits and that of number j + 16 in its high bits.
 *
 * ROW8: codes are the whole numbers nearest to number / factor. ROW4: starting from the factor that
 * gives the levels the row's root mean square, twice: codes are those of the levels nearest to the
 * whole number nearest to number / factor (ties: the greater level), then the factor becomes the
 * one with the least squared error for them; it is rounded at the end. All of it in float32; sums
 * over a row have sixteen running sums, over i mod 16, added from the first to the last. A row of
 * zeros has the factor 0, and a row that contains a number that is not finite has the factor NaN.
 * Pure; any thread. */
#ifndef KEEPD_KERNELS_ROW_H
#define KEEPD_KERNELS_ROW_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/kern_types.h"

#define ROW_STEP    32
#define ROW_DIM_MAX 512 /* largest head size: products with 16-bit queries then fit in 32 bits */
#define ROW_LEVEL   127 /* the largest level */

extern const int8_t row_levels[16];

static inline bool row_scaled(enum kern_dtype dtype) {
    return dtype == KERN_ROW8 || dtype == KERN_ROW4;
}

/* Bytes of a row's numbers or codes, in any dtype of a cache. */
static inline size_t row_code_bytes(enum kern_dtype dtype, int dim) {
    size_t codes = ((size_t)dim + ROW_STEP - 1) / ROW_STEP * ROW_STEP;
    if (!row_scaled(dtype)) return (size_t)dim * kern_dtype_bytes(dtype);
    return dtype == KERN_ROW8 ? codes : codes / 2;
}

static inline size_t row_factor_bytes(enum kern_dtype dtype) {
    return row_scaled(dtype) ? sizeof(uint16_t) : 0;
}

/* The level of number d of a row. */
static inline int row_level(const void *codes, int d, enum kern_dtype dtype) {
    if (dtype == KERN_ROW8) return ((const int8_t *)codes)[d];
    const uint8_t pair = ((const uint8_t *)codes)[d / ROW_STEP * 16 + d % 16];
    return row_levels[d % ROW_STEP < 16 ? pair & 15 : pair >> 4];
}

/* Rotates a row or a query, there and back: sums and differences of numbers 1, 2, 4, ... apart,
 * then one multiplication. */
void row_rotate(float *x, int dim);

/* A rotated row of at most ROW_DIM_MAX numbers, to its stored form and back. */
void row_write(void *codes, uint16_t *factor, const float *from, int dim, enum kern_dtype dtype);
void row_read(float *to, const void *codes, uint16_t factor, int dim, enum kern_dtype dtype);

#endif
