/* Products of queries with keys in ROW8 and ROW4, and weights with such values (kernels/row.h).
 * Include only from files compiled per path.
 *
 * A query becomes whole numbers of 16 bits with one factor, its largest magnitude over 32767. The
 * product of whole numbers and levels fits in 32 bits and is exact, so
 *
 *   score = float(sum_d query[d] * level[d]) * factor of the query * factor of the key
 *
 * has the same bits however many queries are multiplied together, with either method of vec_dots.h.
 * Weights are multiplied with the values' factors first; levels, as floats, are then added in the
 * order of rows. */
#ifndef KEEPD_KERNELS_CPU_VEC_ROWS_H
#define KEEPD_KERNELS_CPU_VEC_ROWS_H

#include <float.h>

#include "kernels/cpu/vec_dots.h"

#define WORDS 32 /* levels or numbers of a query in one vector */

/* w32: a vector of WORDS whole numbers of 16 bits; n16: sixteen of 32 bits. */
#if defined(__AVX512F__)

typedef __m512i w32;
typedef __m512i n16;

SIMD w32 w32_load(const int16_t *p) {
    return _mm512_loadu_si512(p);
}
SIMD void w32_store(int16_t *p, w32 a) {
    _mm512_storeu_si512(p, a);
}
SIMD n16 n16_zero(void) {
    return _mm512_setzero_si512();
}
/* Adds the sum of each two neighbouring products. */
SIMD n16 n16_madd(n16 sum, w32 a, w32 b) {
#if defined(__AVX512VNNI__)
    return _mm512_dpwssd_epi32(sum, a, b);
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}
SIMD n16 n16_add(n16 a, n16 b) {
    return _mm512_add_epi32(a, b);
}
/* Returns the two numbers at p, over and over. */
SIMD w32 w32_pair(const int16_t *p) {
    int32_t pair;
    memcpy(&pair, p, sizeof pair);
    return _mm512_set1_epi32(pair);
}
SIMD v16 v16_of(n16 a) {
    return _mm512_cvtepi32_ps(a);
}
SIMD int32_t n16_sum(n16 a) {
    return _mm512_reduce_add_epi32(a);
}
SIMD void n16_sum4(const n16 a[4], int32_t to[4]) {
    __m512i ab =
        _mm512_add_epi32(_mm512_unpacklo_epi32(a[0], a[1]), _mm512_unpackhi_epi32(a[0], a[1]));
    __m512i cd =
        _mm512_add_epi32(_mm512_unpacklo_epi32(a[2], a[3]), _mm512_unpackhi_epi32(a[2], a[3]));
    __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    _mm_storeu_si128((__m128i *)to, _mm_add_epi32(_mm256_castsi256_si128(half),
                                                  _mm256_extracti128_si256(half, 1)));
}

/* Levels of ROW4 are taken from 32 bytes at a time: the low bits of all, then the high ones. */
SIMD int word_place(int d, const enum kern_dtype dtype) {
    if (dtype == KERN_ROW8) return d;
    return (d & ~63) + (d & 16 ? 32 : 0) + (d & 32 ? 16 : 0) + d % 16;
}
SIMD void row_words(const char *row, int at, const enum kern_dtype dtype, w32 *first, w32 *second) {
    if (dtype == KERN_ROW8) {
        *first = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(row + at)));
        *second = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(row + at + WORDS)));
        return;
    }
    const __m512i levels = _mm512_cvtepi8_epi16(
        _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)row_levels)));
    __m512i pairs = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(row + at / 2)));
    *first = _mm512_permutexvar_epi16(pairs, levels); /* by the low five bits */
    *second = _mm512_permutexvar_epi16(_mm512_srli_epi16(pairs, 4), levels);
}

#else

#if defined(__AVX2__)

typedef struct {
    __m256i lo, hi;
} w32;
typedef w32 n16;

SIMD w32 w32_load(const int16_t *p) {
    return (w32){_mm256_loadu_si256((const __m256i *)p),
                 _mm256_loadu_si256((const __m256i *)(p + 16))};
}
SIMD void w32_store(int16_t *p, w32 a) {
    _mm256_storeu_si256((__m256i *)p, a.lo);
    _mm256_storeu_si256((__m256i *)(p + 16), a.hi);
}
SIMD n16 n16_zero(void) {
    return (n16){_mm256_setzero_si256(), _mm256_setzero_si256()};
}
SIMD n16 n16_madd(n16 sum, w32 a, w32 b) {
    return (n16){_mm256_add_epi32(sum.lo, _mm256_madd_epi16(a.lo, b.lo)),
                 _mm256_add_epi32(sum.hi, _mm256_madd_epi16(a.hi, b.hi))};
}
SIMD n16 n16_add(n16 a, n16 b) {
    return (n16){_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
SIMD w32 w32_pair(const int16_t *p) {
    int32_t pair;
    memcpy(&pair, p, sizeof pair);
    return (w32){_mm256_set1_epi32(pair), _mm256_set1_epi32(pair)};
}
SIMD v16 v16_of(n16 a) {
    return V16(_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi));
}
SIMD int32_t n16_sum(n16 a) {
    __m256i all = _mm256_add_epi32(a.lo, a.hi);
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
}
SIMD w32 words_of(__m128i low, __m128i high) {
    return (w32){_mm256_cvtepi8_epi16(low), _mm256_cvtepi8_epi16(high)};
}
SIMD w32 row_words_32(const char *row, int at, const enum kern_dtype dtype) {
    if (dtype == KERN_ROW8)
        return words_of(_mm_loadu_si128((const __m128i *)(row + at)),
                        _mm_loadu_si128((const __m128i *)(row + at + 16)));
    __m128i levels = _mm_loadu_si128((const __m128i *)row_levels), mask = _mm_set1_epi8(15);
    __m128i pairs = _mm_loadu_si128((const __m128i *)(row + at / 2));
    return words_of(_mm_shuffle_epi8(levels, _mm_and_si128(pairs, mask)),
                    _mm_shuffle_epi8(levels, _mm_and_si128(_mm_srli_epi16(pairs, 4), mask)));
}

#elif defined(__ARM_FEATURE_DOTPROD)

typedef struct {
    int16x8_t a, b, c, d;
} w32;
typedef struct {
    int32x4_t a, b, c, d;
} n16;

SIMD w32 w32_load(const int16_t *p) {
    return (w32){vld1q_s16(p), vld1q_s16(p + 8), vld1q_s16(p + 16), vld1q_s16(p + 24)};
}
SIMD void w32_store(int16_t *p, w32 x) {
    vst1q_s16(p, x.a), vst1q_s16(p + 8, x.b);
    vst1q_s16(p + 16, x.c), vst1q_s16(p + 24, x.d);
}
SIMD n16 n16_zero(void) {
    const int32x4_t zero = vdupq_n_s32(0);
    return (n16){zero, zero, zero, zero};
}
SIMD int32x4_t quarter_madd(int32x4_t sum, int16x8_t x, int16x8_t y) {
    return vaddq_s32(sum,
                     vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y)));
}
SIMD n16 n16_madd(n16 sum, w32 x, w32 y) {
    return (n16){quarter_madd(sum.a, x.a, y.a), quarter_madd(sum.b, x.b, y.b),
                 quarter_madd(sum.c, x.c, y.c), quarter_madd(sum.d, x.d, y.d)};
}
SIMD n16 n16_add(n16 x, n16 y) {
    return (n16){vaddq_s32(x.a, y.a), vaddq_s32(x.b, y.b), vaddq_s32(x.c, y.c),
                 vaddq_s32(x.d, y.d)};
}
SIMD w32 w32_pair(const int16_t *p) {
    int32_t pair;
    memcpy(&pair, p, sizeof pair);
    const int16x8_t all = vreinterpretq_s16_s32(vdupq_n_s32(pair));
    return (w32){all, all, all, all};
}
SIMD v16 v16_of(n16 x) {
    return V16_EACH(vcvtq_f32_s32, x);
}
SIMD int32_t n16_sum(n16 x) {
    return vaddvq_s32(vaddq_s32(vaddq_s32(x.a, x.b), vaddq_s32(x.c, x.d)));
}
SIMD w32 row_words_32(const char *row, int at, const enum kern_dtype dtype) {
    int8x16_t low, high;
    if (dtype == KERN_ROW8) {
        low = vld1q_s8((const int8_t *)row + at);
        high = vld1q_s8((const int8_t *)row + at + 16);
    } else {
        const int8x16_t levels = vld1q_s8(row_levels);
        low = vqtbl1q_s8(levels, nibbles((const uint8_t *)row + at / 2, false));
        high = vqtbl1q_s8(levels, nibbles((const uint8_t *)row + at / 2, true));
    }
    return (w32){vmovl_s8(vget_low_s8(low)), vmovl_high_s8(low), vmovl_s8(vget_low_s8(high)),
                 vmovl_high_s8(high)};
}

#else

typedef struct {
    int16_t x[WORDS];
} w32;
typedef struct {
    int32_t x[16];
} n16;

SIMD w32 w32_load(const int16_t *p) {
    w32 a;
    memcpy(a.x, p, sizeof a.x);
    return a;
}
SIMD void w32_store(int16_t *p, w32 a) {
    memcpy(p, a.x, sizeof a.x);
}
SIMD n16 n16_zero(void) {
    return (n16){{0}};
}
SIMD n16 n16_madd(n16 sum, w32 a, w32 b) {
    for (int i = 0; i < 16; i++)
        sum.x[i] += a.x[2 * i] * b.x[2 * i] + a.x[2 * i + 1] * b.x[2 * i + 1];
    return sum;
}
SIMD n16 n16_add(n16 a, n16 b) {
    for (int i = 0; i < 16; i++) a.x[i] += b.x[i];
    return a;
}
SIMD w32 w32_pair(const int16_t *p) {
    w32 a;
    for (int i = 0; i < WORDS; i++) a.x[i] = p[i % 2];
    return a;
}
SIMD v16 v16_of(n16 a) {
    float x[16];
    for (int i = 0; i < 16; i++) x[i] = (float)a.x[i];
    return v16_load(x);
}
SIMD int32_t n16_sum(n16 a) {
    int32_t sum = 0;
    for (int i = 0; i < 16; i++) sum += a.x[i];
    return sum;
}
SIMD w32 row_words_32(const char *row, int at, const enum kern_dtype dtype) {
    w32 a;
    for (int i = 0; i < WORDS; i++) a.x[i] = (int16_t)row_level(row, at + i, dtype);
    return a;
}

#endif

SIMD void n16_sum4(const n16 a[4], int32_t to[4]) {
    for (int i = 0; i < 4; i++) to[i] = n16_sum(a[i]);
}
SIMD int word_place(int d, const enum kern_dtype dtype) {
    (void)dtype;
    return d;
}
SIMD void row_words(const char *row, int at, const enum kern_dtype dtype, w32 *first, w32 *second) {
    *first = row_words_32(row, at, dtype);
    *second = row_words_32(row, at + WORDS, dtype);
}

#endif

/* Returns how many words the numbers of a query fill: whole pairs of vectors. Codes of a row may
 * end before; what follows them in the page is then multiplied by zeros. */
static inline int row_width(int dim) {
    return (dim + 2 * WORDS - 1) / (2 * WORDS) * 2 * WORDS;
}

/* Does what v16_load_fours does, for whole numbers. */
SIMD n16 n16_load_fours(const int32_t *p) {
    const v16 a = v16_load_fours((const float *)p);
    n16 to;
    memcpy(&to, &a, sizeof to);
    return to;
}

/* ---- Queries ---- */

/* Rounds a query to whole numbers. Returns their factor; NaN if a number is not finite. */
static inline float pack_query(int16_t *to, const float *q, int dim, enum kern_dtype dtype) {
    float most = 0;
    bool finite = true;
    memset(to, 0, (size_t)row_width(dim) * sizeof *to);
    for (int i = 0; i < dim; i++) {
        const float size = fabsf(q[i]);
        most = size > most ? size : most;
        finite &= size <= FLT_MAX;
    }
    const float factor = most / INT16_MAX;
    if (!finite) return NAN;
    for (int i = 0; i < dim && factor > 0; i++)
        to[word_place(i, dtype)] =
            (int16_t)rintf(fminf(fmaxf(q[i] / factor, -INT16_MAX), INT16_MAX));
    return factor;
}

/* ---- Scores ---- */

SIMD void row_tile(int32_t *out, const int16_t *q, const char *row, size_t size, int width,
                   const int lanes, const int rows, const enum kern_dtype dtype) {
    n16 sum[4][4];
    UNROLL for (int l = 0; l < lanes; l++) UNROLL for (int j = 0; j < rows; j++) sum[l][j] =
        n16_zero();
    for (int at = 0; at < width; at += 2 * WORDS) {
        w32 first[4], second[4];
        UNROLL for (int j = 0; j < rows; j++)
            row_words(row + (size_t)j * size, at, dtype, &first[j], &second[j]);
        UNROLL for (int l = 0; l < lanes; l++) {
            const w32 a = w32_load(q + l * width + at), b = w32_load(q + l * width + at + WORDS);
            UNROLL for (int j = 0; j < rows; j++) sum[l][j] =
                n16_madd(n16_madd(sum[l][j], a, first[j]), b, second[j]);
        }
    }
    UNROLL for (int l = 0; l < lanes; l++) {
        if (rows == 4)
            n16_sum4(sum[l], out + l * MANY);
        else
            out[l * MANY] = n16_sum(sum[l][0]);
    }
}

SIMD void row_lanes(int32_t *out, const int16_t *q, const struct rows *rows, int count, int width,
                    const int lanes, const enum kern_dtype dtype) {
    const size_t size = row_code_bytes(dtype, rows->dim);
    const char *row = rows->at;
    int j = 0;
    for (; j + 4 <= count; j += 4, row += 4 * size)
        row_tile(out + j, q, row, size, width, lanes, 4, dtype);
    for (; j < count; j++, row += size) row_tile(out + j, q, row, size, width, lanes, 1, dtype);
}

SIMD void row_few(int32_t *out, const int16_t *q, const struct rows *rows, int lanes, int count,
                  int width, const enum kern_dtype dtype) {
    for (int n; lanes > 0; lanes -= n, out += n * MANY, q += n * width) {
        n = lanes < 4 ? lanes : 4;
        if (n == 4)
            row_lanes(out, q, rows, count, width, 4, dtype);
        else if (n == 3)
            row_lanes(out, q, rows, count, width, 3, dtype);
        else if (n == 2)
            row_lanes(out, q, rows, count, width, 2, dtype);
        else
            row_lanes(out, q, rows, count, width, 1, dtype);
    }
}

/* score[l * MANY + j] for `lanes` queries, each `width` words, and up to MANY keys. */
static void row_scores_few(float *score, const int16_t *q, const float *factors, int lanes,
                           const struct rows *rows, int count) {
    int32_t whole[MANY * MANY];
    const int width = row_width(rows->dim);
    if (rows->dtype == KERN_ROW8)
        row_few(whole, q, rows, lanes, count, width, KERN_ROW8);
    else
        row_few(whole, q, rows, lanes, count, width, KERN_ROW4);
    const v16 keys = v16_load_row(rows->factors, 0, count, KERN_BF16);
    for (int l = 0; l < lanes; l++) {
        int32_t *sums = whole + l * MANY;
        for (int j = count; j < MANY; j++) sums[j] = 0;
        v16_store(score + l * MANY,
                  v16_mul(v16_mul(v16_of(n16_load_fours(sums)), v16_set(factors[l])), keys));
    }
}

/* Levels as floats, rows of padded(dim). */
static inline void widen_levels(const struct rows *rows, int count, float *copy) {
    if (rows->dtype == KERN_ROW8)
        widen_scaled(rows, count, copy, true, KERN_ROW8);
    else
        widen_scaled(rows, count, copy, true, KERN_ROW4);
}

/* Packs queries for row_scores_many: neighbouring words of sixteen queries side by side. */
static inline void pack_words(int16_t *packed, const int16_t *q, int lanes, int width) {
    for (int i = 0; i < width; i += 2)
        for (int l = 0; l < MANY; l++, packed += 2) {
            packed[0] = l < lanes ? q[l * width + i] : 0;
            packed[1] = l < lanes ? q[l * width + i + 1] : 0;
        }
}

SIMD void row_many(float *score, const int16_t *packed, v16 factors, const struct rows *rows,
                   int count, int width, const enum kern_dtype dtype) {
    const size_t size = row_code_bytes(dtype, rows->dim);
    for (int j = 0; j < count; j++) {
        int16_t key[ROW_DIM_MAX];
        n16 even = n16_zero(), odd = n16_zero();
        for (int at = 0; at < width; at += 2 * WORDS) {
            w32 first, second;
            row_words((const char *)rows->at + (size_t)j * size, at, dtype, &first, &second);
            w32_store(key + at, first);
            w32_store(key + at + WORDS, second);
        }
        for (int i = 0; i < width; i += 4) {
            even = n16_madd(even, w32_load(packed + i * MANY), w32_pair(key + i));
            odd = n16_madd(odd, w32_load(packed + (i + 2) * MANY), w32_pair(key + i + 2));
        }
        n16 sums = n16_add(even, odd);
        v16_store(score + j * MANY, v16_mul(v16_mul(v16_of(sums), factors),
                                            v16_set(number_from_bf16(rows->factors[j]))));
    }
}

/* score[j * MANY + l] for sixteen packed queries with their factors. */
static void row_scores_many(float *score, const int16_t *packed, const float *factors,
                            const struct rows *rows, int count) {
    const int width = row_width(rows->dim);
    if (rows->dtype == KERN_ROW8)
        row_many(score, packed, v16_load(factors), rows, count, width, KERN_ROW8);
    else
        row_many(score, packed, v16_load(factors), rows, count, width, KERN_ROW4);
}

#endif
