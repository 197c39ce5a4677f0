/* Shared by attention and its observation: queries times rows, and rows times weights. Include only
 * from files compiled per path.
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

/* Returns sixteen elements of a row, as v16_load_row does, or sixteen words of it. */
SIMD v16 dot_load(const void *row, int64_t at, int left, const enum kern_dtype dtype) {
    if (paired(dtype) && left >= 16) return v16_load_halves((const float *)row + at);
    return v16_load_row(row, at, left, paired(dtype) ? KERN_F32 : dtype);
}

/* Returns the element at p in every lane. For a single product a float is better: v16_fma reads it
 * from memory itself. */
SIMD v16 dot_set(const float *p, const enum kern_dtype dtype) {
    return paired(dtype) ? v16_word(p) : v16_set(*p);
}

/* Returns sum + a b, for rows of this dtype. */
SIMD v16 dot_add(v16 a, v16 b, v16 sum, const enum kern_dtype dtype) {
    return paired(dtype) ? v16_dot(a, b, sum) : v16_fma(a, b, sum);
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

/* ---- Few queries ---- */

SIMD void few_step(const struct dots *p, v16 (*sum)[4], int lane, const int lanes, int row,
                   const int rows, int d, int left, const enum kern_dtype dtype) {
    v16 key[4];
    UNROLL for (int j = 0; j < rows; j++) key[j] =
        dot_load(p->rows->at, (row + j) * p->rows->stride + d, left, dtype);
    UNROLL for (int l = 0; l < lanes; l++) {
        v16 q = v16_load_row(p->q, (lane + l) * p->q_stride + d, left, KERN_F32);
        UNROLL for (int j = 0; j < rows; j++) sum[l][j] = dot_add(q, key[j], sum[l][j], dtype);
    }
}

SIMD void few_tile(const struct dots *p, int lane, const int lanes, int row, const int rows,
                   const enum kern_dtype dtype) {
    v16 sum[TILE][4];
    int d = 0, dim = p->rows->dim;
    UNROLL for (int l = 0; l < lanes; l++) UNROLL for (int j = 0; j < rows; j++) sum[l][j] =
        v16_set(0);
    for (; d + 16 <= dim; d += 16) few_step(p, sum, lane, lanes, row, rows, d, 16, dtype);
    if (d < dim) few_step(p, sum, lane, lanes, row, rows, d, dim - d, dtype);
    UNROLL for (int l = 0; l < lanes; l++) {
        float *out = p->out + (lane + l) * p->out_stride + row;
        if (rows == 4)
            v16_sum4(sum[l], out);
        else
            UNROLL for (int j = 0; j < rows; j++) out[j] = v16_sum(sum[l][j]);
    }
}

SIMD void few_rows(const struct dots *p, int lanes, int row, const int rows,
                   const enum kern_dtype dtype) {
    int lane = 0;
    for (; lane + TILE <= lanes; lane += TILE) few_tile(p, lane, TILE, row, rows, dtype);
    for (; lane + 2 <= lanes; lane += 2) few_tile(p, lane, 2, row, rows, dtype);
    for (; lane < lanes; lane++) few_tile(p, lane, 1, row, rows, dtype);
}

SIMD void few_typed(const struct dots *p, int lanes, int count, const enum kern_dtype dtype) {
    int row = 0;
    for (; row + TILE_ROWS <= count; row += TILE_ROWS) few_rows(p, lanes, row, TILE_ROWS, dtype);
    for (; row < count; row++) few_rows(p, lanes, row, 1, dtype);
}

static inline void dots_few(const struct dots *p, int lanes, int count) {
    if (p->rows->dtype == KERN_F32)
        few_typed(p, lanes, count, KERN_F32);
    else if (p->rows->dtype == KERN_BF16)
        few_typed(p, lanes, count, KERN_BF16);
    else
        few_typed(p, lanes, count, KERN_E4M3);
}

/* ---- Many queries ---- */

static inline int padded(int dim) {
    return (dim + 15) / 16 * 16;
}

/* Packs sixteen elements of each of `count` rows, from element `d` on. */
SIMD void pack_columns(float *packed, const struct rows *rows, const int count, int d, int left,
                       const enum kern_dtype dtype) {
    v16 column[MANY];
    _Pragma("GCC unroll 16") for (int j = 0; j < MANY; j++) column[j] =
        j < count ? v16_load_row(rows->at, j * rows->stride + d, left, dtype) : v16_set(0);
    v16_transpose(column);
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++)
        v16_store(packed + (d + i) * MANY, column[i]);
}

SIMD void pack_typed(float *packed, const struct rows *rows, int count,
                     const enum kern_dtype dtype) {
    int d = 0, dim = count == MANY ? rows->dim : 0;
    for (; d + 16 <= dim; d += 16) pack_columns(packed, rows, MANY, d, 16, dtype);
    for (; d < rows->dim; d += 16) pack_columns(packed, rows, count, d, rows->dim - d, dtype);
}

/* packed[d * MANY + j] = row[j][d] of `count` rows for d below padded(dim), 0 past the end. */
static inline void pack_many(float *packed, const struct rows *rows, int count) {
    if (rows->dtype == KERN_F32)
        pack_typed(packed, rows, count, KERN_F32);
    else if (rows->dtype == KERN_BF16)
        pack_typed(packed, rows, count, KERN_BF16);
    else
        pack_typed(packed, rows, count, KERN_E4M3);
}

/* Returns sixteen levels of row j from d on, a multiple of sixteen. */
SIMD v16 load_levels(const struct rows *rows, int64_t j, int d, const enum kern_dtype dtype) {
    const char *row = (const char *)rows->at + j * (int64_t)row_code_bytes(dtype, rows->dim);
    if (dtype == KERN_ROW8) return v16_load_row8((const int8_t *)row + d);
    return v16_load_row4((const uint8_t *)row + d / ROW_STEP * 16, d & 16);
}

/* Converts rows with factors to floats; `levels`: without multiplying them by the factors. */
SIMD void widen_scaled(const struct rows *rows, int count, float *copy, bool levels,
                       const enum kern_dtype dtype) {
    const int64_t width = padded(rows->dim);
    for (int64_t j = 0; j < count; j++) {
        const v16 factor = v16_set(levels ? 1 : number_from_bf16(rows->factors[j]));
        for (int d = 0; d < rows->dim; d += 16) {
            const v16 x = v16_mul(load_levels(rows, j, d, dtype), factor);
            v16_store(copy + j * width + d,
                      d + 16 <= rows->dim ? x : v16_keep(x, 0, rows->dim - d, 0));
        }
    }
}

/* Rows as floats, each of padded(dim) elements with zeros behind: in place if they already are,
 * otherwise a copy. */
static inline const float *widen_rows(const struct rows *rows, int count, float *copy) {
    int64_t width = padded(rows->dim);
    if (rows->dtype == KERN_ROW8) widen_scaled(rows, count, copy, false, KERN_ROW8);
    if (rows->dtype == KERN_ROW4) widen_scaled(rows, count, copy, false, KERN_ROW4);
    if (row_scaled(rows->dtype)) return copy;
    if (rows->dtype == KERN_F32 && rows->stride == width && rows->dim == width) return rows->at;
    for (int64_t j = 0; j < count; j++) {
        int d = 0;
        for (; d + 16 <= rows->dim; d += 16)
            v16_store(copy + j * width + d,
                      v16_load_row(rows->at, j * rows->stride + d, 16, rows->dtype));
        if (d < rows->dim)
            v16_store(copy + j * width + d,
                      v16_load_row(rows->at, j * rows->stride + d, rows->dim - d, rows->dtype));
    }
    return copy;
}

struct many {
    const float *packed, *rows; /* rows of `width` floats or words */
    int64_t width;
    enum kern_dtype dtype;
};

SIMD void many_step(const struct many *m, v16 *sum, int64_t d, const int rows) {
    v16 q = v16_load(m->packed + d * MANY);
    UNROLL for (int j = 0; j < rows; j++) sum[j] =
        dot_add(q, dot_set(m->rows + d + j * m->width, m->dtype), sum[j], m->dtype);
}

SIMD void many_add(v16 *sum, const v16 *other, const int rows) {
    UNROLL for (int j = 0; j < rows; j++) sum[j] = v16_add(sum[j], other[j]);
}

/* The tree of v16_sum: sums 8 apart, then 4, 2 and 1. The first two of a few rows are made at once
 * where there are registers for both: a single one would wait for its own additions. */
SIMD void many_pair(const struct many *m, v16 *sum, int at, const int rows) {
    v16 other[4];
    int64_t d = at;
    UNROLL for (int j = 0; j < rows; j++) sum[j] = other[j] = v16_set(0);
#if defined(__AVX512F__)
    for (; d + 8 < m->width; d += 16) {
        many_step(m, sum, d, rows);
        many_step(m, other, d + 8, rows);
    }
    if (d < m->width) many_step(m, sum, d, rows);
#else
    for (; d < m->width; d += 16) many_step(m, sum, d, rows);
    for (d = at + 8; d < m->width; d += 16) many_step(m, other, d, rows);
#endif
    many_add(sum, other, rows);
}

SIMD void many_four(const struct many *m, v16 *sum, int at, const int rows) {
    v16 other[4];
    many_pair(m, sum, at, rows);
    many_pair(m, other, at + 4, rows);
    many_add(sum, other, rows);
}

SIMD void many_eight(const struct many *m, v16 *sum, int at, const int rows) {
    v16 other[4];
    many_four(m, sum, at, rows);
    many_four(m, other, at + 2, rows);
    many_add(sum, other, rows);
}

SIMD void many_rows(const struct many *m, float *out, const int rows) {
    v16 sum[4], other[4];
    many_eight(m, sum, 0, rows);
    many_eight(m, other, 1, rows);
    many_add(sum, other, rows);
    UNROLL for (int j = 0; j < rows; j++) v16_store(out + j * MANY, sum[j]);
}

SIMD void many_typed(float *out, const float *packed, const struct rows *rows, int count,
                     const enum kern_dtype dtype) {
    struct many m = {packed, rows->at, rows->stride, dtype};
    for (; count >= 4; count -= 4, m.rows += 4 * m.width, out += 4 * MANY) many_rows(&m, out, 4);
    for (; count > 0; count--, m.rows += m.width, out += MANY) many_rows(&m, out, 1);
}

/* out[j * MANY + l] = q[l] . row[j], queries packed, rows widened or words; or with the roles
 * exchanged. */
static void dots_many(float *out, const float *packed, const struct rows *rows, int count) {
    if (paired(rows->dtype))
        many_typed(out, packed, rows, count, KERN_BF16);
    else
        many_typed(out, packed, rows, count, KERN_F32);
}

/* ---- Weighing rows ---- */

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

/* Makes words from `count` rows in bf16: each word has a number of one row and of the next. A
 * result has `width` words, with zeros behind the numbers and in place of a missing last row. */
static inline void mix_rows(float *words, int width, const struct rows *rows, int count) {
    const int dim = 2 * rows->dim;
    const int64_t stride = 2 * rows->stride;
    for (int j = 0; j < count; j += 2, words += width) {
        const bool both = j + 1 < count;
        const uint16_t *first = (const uint16_t *)rows->at + j * stride;
        const uint16_t *second = both ? first + stride : first;
        for (int d = 0; d < width; d += 32) {
            v16 mixed[2];
            v16_mix(first + d, true, second + d, both, dim - d, mixed);
            v16_store(words + d, mixed[0]);
            if (d + 16 < width) v16_store(words + d + 16, mixed[1]);
        }
    }
}

/* Returns sixteen numbers of a row, or its levels if it has factors. */
SIMD v16 weigh_load(const struct rows *rows, int j, int d, int left, const enum kern_dtype dtype) {
    if (dtype == KERN_ROW8 || dtype == KERN_ROW4) return load_levels(rows, j, d, dtype);
    return v16_load_row(rows->at, j * rows->stride + d, left, dtype);
}

/* Returns words of rows 2j and 2j + 1, with zeros in place of a row outside [from, to). `mixed`:
 * mix_rows has made them. */
SIMD void weigh_words(v16 *row, const struct rows *rows, int j, int d, const int vectors, int left,
                      int from, int to, const bool mixed) {
    const bool first = 2 * j >= from, second = 2 * j + 1 < to;
    if (mixed) {
        const float *words = (const float *)rows->at + j * rows->stride + d;
        UNROLL for (int i = 0; i < vectors; i++) row[i] = v16_load(words + 16 * i);
        if (first && second) return;
        UNROLL for (int i = 0; i < vectors; i++) row[i] = v16_half(row[i], !first);
        return;
    }
    const int64_t size = 2 * rows->stride, next = second ? size : 0;
    const uint16_t *at = (const uint16_t *)rows->at + 2 * j * size + d;
    UNROLL for (int i = 0; i < vectors; i += 2) {
        v16 two[2];
        v16_mix(at + 16 * i, first, at + next + 16 * i, second, vectors > 1 ? 32 : left, two);
        row[i] = two[0];
        if (i + 1 < vectors) row[i + 1] = two[1];
    }
}

SIMD bool all_kept(const float *keep, const int lanes) {
    bool all = true;
    UNROLL for (int l = 0; l < lanes; l++) all &= keep[l] == 1;
    return all;
}

/* Multiplies the sums of lanes by their factors. A factor of 1 changes nothing. */
SIMD void weigh_keep(v16 (*sum)[4], const float *keep, const int lanes, const int vectors) {
    if (all_kept(keep, lanes)) return;
    UNROLL for (int l = 0; l < lanes; l++) UNROLL for (int i = 0; i < vectors; i++) sum[l][i] =
        v16_mul(sum[l][i], v16_set(keep[l]));
}

SIMD void weigh_chunk(const struct weighing *w, v16 (*sum)[4], const float *p,
                      const struct rows *rows, const int lanes, int from, int to, int d,
                      const int vectors, int left, const bool mixed) {
    const enum kern_dtype dtype = rows->dtype;
    const int first = paired(dtype) ? from / 2 : from, last = paired(dtype) ? (to + 1) / 2 : to;
    for (int j = first; j < last; j++) {
        v16 row[4];
        if (paired(dtype))
            weigh_words(row, rows, j, d, vectors, left, from, to, mixed);
        else
            UNROLL for (int i = 0; i < vectors; i++) row[i] =
                weigh_load(rows, j, d + 16 * i, left, dtype);
        UNROLL for (int l = 0; l < lanes; l++) {
            v16 weight = v16_word(p + l * w->p_lane + j * w->p_row);
            UNROLL for (int i = 0; i < vectors; i++) sum[l][i] =
                dot_add(weight, row[i], sum[l][i], dtype);
        }
    }
}

SIMD void weigh_tile(const struct weighing *w, int lane, const int lanes, int from, int to, int d,
                     const int vectors, int left, const enum kern_dtype dtype, const bool mixed) {
    v16 sum[TILE][4];
    float *to_lane = w->out + lane * w->out_stride;
    const int chunks = mixed ? w->chunks : 1;
    struct rows rows = {w->rows->at, w->rows->stride, w->rows->dim, dtype, NULL};
    UNROLL for (int l = 0; l < lanes; l++) UNROLL for (int i = 0; i < vectors; i++) sum[l][i] =
        v16_load_row(to_lane, l * w->out_stride + d + 16 * i, left, KERN_F32);
    for (int c = 0; c < chunks; c++) {
        if (c > 0) rows.at = (const float *)rows.at + w->row_chunk;
        if (w->keep) weigh_keep(sum, w->keep + lane + c * w->keep_chunk, lanes, vectors);
        weigh_chunk(w, sum, w->p + lane * w->p_lane + c * w->p_chunk, &rows, lanes, from, to, d,
                    vectors, left, mixed);
    }
    UNROLL for (int l = 0; l < lanes; l++) UNROLL for (int i = 0; i < vectors; i++) {
        float *out = to_lane + l * w->out_stride + d + 16 * i;
        if (left >= 16)
            v16_store(out, sum[l][i]);
        else
            v16_store_n(out, sum[l][i], left);
    }
}

SIMD void weigh_typed(const struct weighing *w, int lane, const int lanes, int from, int to,
                      const enum kern_dtype dtype, const bool mixed) {
    int d = 0, dim = paired(dtype) && !mixed ? 2 * w->rows->dim : w->rows->dim;
    for (; d + 16 * TILE_ROWS <= dim; d += 16 * TILE_ROWS)
        weigh_tile(w, lane, lanes, from, to, d, TILE_ROWS, 16, dtype, mixed);
    for (; d + 16 <= dim; d += 16) weigh_tile(w, lane, lanes, from, to, d, 1, 16, dtype, mixed);
    if (d < dim) weigh_tile(w, lane, lanes, from, to, d, 1, dim - d, dtype, mixed);
}

SIMD void weigh_lanes(const struct weighing *w, int lane, const int lanes, int from, int to) {
    if (w->rows->dtype == KERN_F32)
        weigh_typed(w, lane, lanes, from, to, KERN_F32, false);
    else if (w->rows->dtype == KERN_BF16 && paired(KERN_BF16) && w->mixed)
        weigh_typed(w, lane, lanes, from, to, KERN_BF16, true);
    else if (w->rows->dtype == KERN_BF16)
        weigh_typed(w, lane, lanes, from, to, KERN_BF16, false);
    else if (w->rows->dtype == KERN_ROW8)
        weigh_typed(w, lane, lanes, from, to, KERN_ROW8, false);
    else if (w->rows->dtype == KERN_ROW4)
        weigh_typed(w, lane, lanes, from, to, KERN_ROW4, false);
    else
        weigh_typed(w, lane, lanes, from, to, KERN_E4M3, false);
}

/* Adds rows [from, to) for `lanes` lanes. */
static void weigh_rows(const struct weighing *w, int lanes, int from, int to) {
    for (int lane = 0, n; lane < lanes; lane += n) {
        n = lanes - lane < TILE ? lanes - lane : TILE;
        if (n == TILE)
            weigh_lanes(w, lane, TILE, from, to);
        else if (n == 3)
            weigh_lanes(w, lane, 3, from, to);
        else if (n == 2)
            weigh_lanes(w, lane, 2, from, to);
        else
            weigh_lanes(w, lane, 1, from, to);
    }
}

#endif
