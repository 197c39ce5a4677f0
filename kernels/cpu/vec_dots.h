/* Queries times rows, and rows times weights, for attention and its observation. Include only from
 * files compiled per path.
 *
 * A dot product has sixteen running sums. Sum j adds the products of elements j, j + 16, j + 32,
 * ... in this order; at the end the sixteen are added in the order of v16_sum. Two methods compute
 * this with bitwise equal results:
 *
 * - few: one query and one row at a time. The sixteen sums are the lanes of one vector.
 *
 * - many: sixteen queries at a time, one in each lane. The sums are sixteen vectors, added in the
 *   same order; no sum crosses lanes.
 *
 * So the faster method can be chosen for each call, and a result does not depend on how many other
 * queries there are.
 *
 * Files compiled for AVX512_BF16 multiply rows in bf16 as pairs of numbers (v16_dot), twice as many
 * an instruction. There a row in bf16 is a row of words, each a pair: neighbours of a key, or the
 * numbers of two neighbouring values (mix_rows). What is multiplied with it is words, too: queries
 * and weights rounded to bf16. All above is true with "word" for "element". */
#ifndef KEEPD_KERNELS_CPU_VEC_DOTS_H
#define KEEPD_KERNELS_CPU_VEC_DOTS_H

#include "kernels/cpu/simd.h"
#include "kernels/cpu/vec.h"

/* As many sums at a time as registers allow: queries by rows, and queries by vectors of a row. */
#if defined(__AVX512F__)
#define TILE      4
#define TILE_ROWS 4
#elif defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
#define TILE      2
#define TILE_ROWS 2
#else
#define TILE      2
#define TILE_ROWS 1
#endif

#define MANY     16 /* queries packed, one per lane */
#define MANY_MIN 10 /* from this number on, packing pays */

/* Loads as v16_load does, where the numbers were just stored four at a time. A processor passes a
 * stored value on to a load only if one store wrote all of it. Otherwise the load waits until the
 * stores have reached the cache, which they may only after all earlier instructions are complete.
 */
SIMD v16 v16_load_fours(const float *p) {
#if defined(__AVX512F__)
    __m512 a = _mm512_castps128_ps512(_mm_loadu_ps(p));
    a = _mm512_insertf32x4(a, _mm_loadu_ps(p + 4), 1);
    a = _mm512_insertf32x4(a, _mm_loadu_ps(p + 8), 2);
    return _mm512_insertf32x4(a, _mm_loadu_ps(p + 12), 3);
#elif defined(__AVX2__)
    return V16(_mm256_set_m128(_mm_loadu_ps(p + 4), _mm_loadu_ps(p)),
               _mm256_set_m128(_mm_loadu_ps(p + 12), _mm_loadu_ps(p + 8)));
#else
    return v16_load(p);
#endif
}

/* Consecutive rows, `stride` elements apart; elements past `dim` count as 0. Rows with factors
 * (kernels/row.h) are widened first. */
struct rows {
    const void *at;
    int64_t stride;
    int dim;
    enum kern_dtype dtype;
    const uint16_t *factors;
};

/* Returns whether rows of this dtype are read as words of two numbers each. */
SIMD bool paired(enum kern_dtype dtype) {
#if defined(__AVX512BF16__)
    return dtype == KERN_BF16;
#else
    (void)dtype;
    return false;
#endif
}

static inline struct rows rows_of(struct cpu_rows rows) {
    const int each = paired(rows.dtype) ? 2 : 1;
    return (struct rows){rows.at, cpu_rows_stride(&rows) / each, rows.dim / each, rows.dtype,
                         rows.factors};
}

static inline int padded(int dim) {
    return (dim + 15) / 16 * 16;
}

/* out[l * out_stride + j] = q[l] . row[j]
 * This and struct weighing are passed on by pointer and never copied. A copy would be made with
 * wide loads right after narrow stores, and would wait as described at v16_load_fours. Until then
 * the processor would not know which addresses to read next. */
struct dots {
    float *out;
    int64_t out_stride;
    const float *q;
    int64_t q_stride;
    const struct rows *rows;
};

void VEC(dots_few)(const struct dots *p, int lanes, int count);

/* packed[d * MANY + j] = row[j][d] of `count` rows for d below padded(dim), 0 past the end. */
void VEC(pack_many)(float *packed, const struct rows *rows, int count);

/* out[j * MANY + l] = q[l] . row[j], queries packed, rows widened or words; or with the roles
 * exchanged. */
void VEC(dots_many)(float *out, const float *packed, const struct rows *rows, int count);

/* Rows as floats, each of padded(dim) elements with zeros behind: in place if they already are,
 * otherwise a copy. */
const float *VEC(widen_rows)(const struct rows *rows, int count, float *copy);

/* Levels of rows with factors as floats, rows of padded(dim). */
void VEC(widen_levels)(const struct rows *rows, int count, float *copy);

/* out[l] = keep[l] out[l] + sum_j p[l][j] row[j], rows in ascending order. If rows have factors, p
 * already includes them. If rows are read as words, row[j] and p[l][j] are those of two rows. */
struct weighing {
    float *out;
    int64_t out_stride;
    const float *keep; /* NULL: 1 */
    const float *p;
    int64_t p_lane, p_row; /* strides from lane to lane and from weight to weight of one lane */
    const struct rows *rows;
    bool mixed; /* the rows are words already, made by mix_rows from bf16 */
    int chunks; /* mixed rows: so many arrays `rows`, one after the other, with the strides below */
    int64_t p_chunk, keep_chunk, row_chunk;
};

/* Adds rows [from, to) for `lanes` lanes. */
void VEC(weigh_rows)(const struct weighing *w, int lanes, int from, int to);

/* Makes words from `count` rows in bf16: each word has a number of one row and of the next. A
 * result has `width` words, with zeros behind the numbers and in place of a missing last row. */
void VEC(mix_rows)(float *words, int width, const struct rows *rows, int count);

#endif
