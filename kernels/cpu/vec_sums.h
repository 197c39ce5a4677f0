/* Sixteen running sums of products of whole numbers, for vec_block.c. Include only from files
 * compiled per path: each instruction set defines its types and functions here.
 *
 * `whole`: sixteen running sums. `codes`: 64 bytes of a panel, or unpacked: for each sum four
 * numbers of 8 bits or, where activations are `wide` (int16), two of 16 bits, those at even bytes
 * or those at odd ones (codes_wide). `input`: the activations that all sums multiply with them.
 * Numbers are unsigned, so the sums contain an offset. `start` is its correction; whole_open or
 * whole_close applies it. A sum of int16 is converted to float32; one of int8 begins or ends with
 * the bits of `back`, which is then subtracted (block.h). */
#ifndef KEEPD_KERNELS_CPU_VEC_SUMS_H
#define KEEPD_KERNELS_CPU_VEC_SUMS_H

#include "kernels/cpu/block.h"
#include "kernels/cpu/vec.h"

/* The portable path holds a vector in four registers, so its sums are in memory anyway. Unrolling
 * its loops would make them no faster, but take ten times as long to compile. */
#if defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
#define UNROLL_8 _Pragma("GCC unroll 8")
#else
#define UNROLL_8
#endif
#define EACH(count, i) UNROLL_8 for (int i = 0; i < (count); i++)

#define SMALL 7 /* the bits of a form with unpacked codes of 6 bits at most (unpack_panel) */

/* A loop is compiled for a form of blocks (block.h), for one part of a block, by its number, and
 * for int8 or int16. */
struct form {
    int bits, offset;
    bool least;
    int parts;
    enum cpu_factors factors;
    enum cpu_values values;
    int part;
    bool wide;
};

/* Each instruction set defines MIXED: whether it multiplies unsigned codes of 8 bits exactly with
 * signed activations. I8MM also multiplies two rows at once (dot_pairs); TWO_AT_ONCE says that. */

SIMD int number_bits_of(const struct form f) {
    return cpu_number_bits(f.bits, f.values);
}

#if defined(__AVX512VNNI__)

/* An input is broadcast once for all panels of a tile. 24 of 32 registers hold sums. One row reads
 * two panels side by side, and what comes next is fetched into the first-level cache: on Zen 5 that
 * was 1.10 to 1.16 times as fast as four panels fetched into the second level (bench/SPEED.md). */
#define PANELS_MOST   4
#define PANELS_OF_ONE 2
#define ONE_ROW_FETCH 3 /* locality of __builtin_prefetch */
#define MIXED         true
#define ROWS          6
#define PANELS        2
#define PANELS_OF_TWO 4

typedef __m512i whole;
typedef __m512i codes;
typedef __m512i input;

SIMD whole whole_open(int32_t start, float back, const struct form f) {
    (void)back, (void)f;
    return _mm512_set1_epi32(start);
}
SIMD input input_load(const char *x) {
    int32_t some;
    memcpy(&some, x, sizeof some);
    return _mm512_set1_epi32(some);
}
SIMD codes codes_load(const char *at) {
    return _mm512_loadu_si512(at);
}
SIMD void codes_store(char *at, codes all) {
    _mm512_storeu_si512(at, all);
}
/* Moves `count` bits of each byte that begin at `from` to `to`. */
SIMD codes codes_bits(codes all, const int from, const int count, const int to) {
    if (from > to) all = _mm512_srli_epi16(all, (unsigned)(from - to));
    if (from < to) all = _mm512_slli_epi16(all, (unsigned)(to - from));
    return _mm512_and_si512(all, _mm512_set1_epi8((char)(((1 << count) - 1) << to)));
}
/* Does the same for to = 0 where `from` is not a constant. */
SIMD codes codes_from(codes all, int from, const int count) {
    all = _mm512_srl_epi16(all, _mm_cvtsi32_si128(from));
    return _mm512_and_si512(all, _mm512_set1_epi8((char)((1 << count) - 1)));
}
SIMD codes codes_or(codes a, codes b) {
    return _mm512_or_si512(a, b);
}
/* Replaces codes of 4 bits by the values that they stand for, plus the offset. */
SIMD codes codes_values(codes all, const struct form f) {
    const __m512i table = _mm512_broadcast_i32x4(_mm_add_epi8(
        _mm_loadu_si128((const __m128i *)cpu_values[f.values]), _mm_set1_epi8((char)f.offset)));
    return _mm512_shuffle_epi8(table, all);
}
SIMD codes codes_wide(codes all, const int odd) {
    return odd ? _mm512_srli_epi16(all, 8) : _mm512_and_si512(all, _mm512_set1_epi16(255));
}
SIMD whole whole_dot(whole sum, codes w, input x, const struct form f) {
    return f.wide ? _mm512_dpwssd_epi32(sum, w, x) : _mm512_dpbusd_epi32(sum, w, x);
}
SIMD whole whole_dots(whole sum, codes a, input xa, codes b, input xb, const struct form f) {
    return whole_dot(whole_dot(sum, a, xa, f), b, xb, f);
}
SIMD v16 whole_close(whole sum, int32_t start, float back, const struct form f) {
    (void)start;
    return f.wide ? _mm512_cvtepi32_ps(sum) : v16_sub(_mm512_castsi512_ps(sum), v16_set(back));
}
SIMD v16 fused(v16 a, v16 b, v16 c) {
    return v16_fma(a, b, c);
}

#elif defined(__AVX2__)

#define PANELS_MOST   4
#define MIXED         false
#define ROWS          3
#define PANELS        1
#define PANELS_OF_ONE PANELS_MOST
#define ONE_ROW_FETCH 2
#define PANELS_OF_TWO 1

typedef struct {
    __m256i lo, hi;
} whole;
typedef whole codes;
typedef __m256i input;

/* Products of int8 with codes of 2 to 4 bits are summed in 16 bits, which whole_close converts: at
 * most 8 x 2 x 15 x 127 = 30480. Of products with codes of 5 or 6 bits, 16 bits hold the sum of
 * four: at most 2 x 2 x 63 x 127 = 32004. */
SIMD whole whole_open(int32_t start, float back, const struct form f) {
    const int bits = number_bits_of(f);
    const __m256i all = f.wide      ? _mm256_set1_epi32(start)
                        : bits == 8 ? _mm256_set1_epi32((int32_t)number_bits(back))
                        : bits <= 4 ? _mm256_setzero_si256()
                                    : _mm256_set1_epi32(start);
    return (whole){all, all};
}
SIMD input input_load(const char *x) {
    int32_t some;
    memcpy(&some, x, sizeof some);
    return _mm256_set1_epi32(some);
}
SIMD codes codes_load(const char *at) {
    return (codes){_mm256_loadu_si256((const __m256i *)at),
                   _mm256_loadu_si256((const __m256i *)at + 1)};
}
SIMD void codes_store(char *at, codes all) {
    _mm256_storeu_si256((__m256i *)at, all.lo);
    _mm256_storeu_si256((__m256i *)at + 1, all.hi);
}
SIMD __m256i half_bits(__m256i all, const int from, const int count, const int to) {
    if (from > to) all = _mm256_srli_epi16(all, from - to);
    if (from < to) all = _mm256_slli_epi16(all, to - from);
    return _mm256_and_si256(all, _mm256_set1_epi8((char)(((1 << count) - 1) << to)));
}
SIMD codes codes_bits(codes all, const int from, const int count, const int to) {
    return (codes){half_bits(all.lo, from, count, to), half_bits(all.hi, from, count, to)};
}
SIMD codes codes_from(codes all, int from, const int count) {
    const __m128i by = _mm_cvtsi32_si128(from);
    const __m256i mask = _mm256_set1_epi8((char)((1 << count) - 1));
    return (codes){_mm256_and_si256(_mm256_srl_epi16(all.lo, by), mask),
                   _mm256_and_si256(_mm256_srl_epi16(all.hi, by), mask)};
}
SIMD codes codes_or(codes a, codes b) {
    return (codes){_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}
SIMD codes codes_values(codes all, const struct form f) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_add_epi8(
        _mm_loadu_si128((const __m128i *)cpu_values[f.values]), _mm_set1_epi8((char)f.offset)));
    return (codes){_mm256_shuffle_epi8(table, all.lo), _mm256_shuffle_epi8(table, all.hi)};
}
SIMD codes codes_wide(codes all, const int odd) {
    const __m256i mask = _mm256_set1_epi16(255);
    if (odd) return (codes){_mm256_srli_epi16(all.lo, 8), _mm256_srli_epi16(all.hi, 8)};
    return (codes){_mm256_and_si256(all.lo, mask), _mm256_and_si256(all.hi, mask)};
}
/* With int8 and unsigned codes, a sum of two products would overflow 16 bits (255 x 127 x 2); with
 * signed codes it does not (128 x 127 x 2). So the offset is subtracted from the code, whose sign
 * is moved to x, and `start` has nothing to correct. */
SIMD __m256i dot_half(__m256i sum, __m256i w, input x, const struct form f) {
    if (f.wide) return _mm256_add_epi32(sum, _mm256_madd_epi16(w, x));
    if (number_bits_of(f) <= 4) return _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x));
    if (number_bits_of(f) < 8)
        return _mm256_add_epi32(
            sum, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
    __m256i n = _mm256_xor_si256(w, _mm256_set1_epi8((char)0x80));
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(n), _mm256_sign_epi8(x, n));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
SIMD whole whole_dot(whole sum, codes w, input x, const struct form f) {
    return (whole){dot_half(sum.lo, w.lo, x, f), dot_half(sum.hi, w.hi, x, f)};
}
SIMD __m256i dots_half(__m256i sum, __m256i a, input xa, __m256i b, input xb, const struct form f) {
    if (number_bits_of(f) == 8 || f.wide) return dot_half(dot_half(sum, a, xa, f), b, xb, f);
    const __m256i pairs =
        _mm256_add_epi16(_mm256_maddubs_epi16(a, xa), _mm256_maddubs_epi16(b, xb));
    if (number_bits_of(f) <= 4) return _mm256_add_epi16(sum, pairs);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
SIMD whole whole_dots(whole sum, codes a, input xa, codes b, input xb, const struct form f) {
    return (whole){dots_half(sum.lo, a.lo, xa, b.lo, xb, f),
                   dots_half(sum.hi, a.hi, xa, b.hi, xb, f)};
}
SIMD __m256 close_half(__m256i sum, int32_t start, float back, const struct form f) {
    if (f.wide) return _mm256_cvtepi32_ps(sum);
    if (number_bits_of(f) <= 4)
        sum = _mm256_add_epi32(_mm256_madd_epi16(sum, _mm256_set1_epi16(1)),
                               _mm256_set1_epi32(start));
    return _mm256_sub_ps(_mm256_castsi256_ps(sum), _mm256_set1_ps(back));
}
SIMD v16 whole_close(whole sum, int32_t start, float back, const struct form f) {
    return V16(close_half(sum.lo, start, back, f), close_half(sum.hi, start, back, f));
}
SIMD v16 fused(v16 a, v16 b, v16 c) {
    return v16_fma(a, b, c);
}

#elif defined(__ARM_FEATURE_DOTPROD)

#if defined(__ARM_FEATURE_MATMUL_INT8)
#define TWO_AT_ONCE true
#define ROWS        4 /* two pairs: 16 of 32 registers hold whole sums */
#else
#define ROWS 3
#endif
#define PANELS_MOST   2
#define PANELS        1
#define PANELS_OF_ONE PANELS_MOST
#define ONE_ROW_FETCH 2
#define PANELS_OF_TWO 1

/* Sums of int8 are in `a` to `d`. For int16, `a` to `d` have the products of the high bytes, which
 * are signed, and `low_a` to `low_d` those of the low bytes, which are in `lows`. */
typedef struct {
    int32x4_t a, b, c, d;
    uint32x4_t low_a, low_b, low_c, low_d, lows;
} whole;
typedef struct {
    uint8x16_t a, b, c, d;
} codes;
typedef int8x16_t input;

/* Without MIXED, the offset is subtracted from codes of 8 bits; smaller codes can be read as signed
 * numbers without a change. */
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define MIXED true
SIMD int32x4_t dot_quarter(int32x4_t sum, uint8x16_t w, int8x16_t x, const struct form f) {
    (void)f;
    return vusdotq_s32(sum, w, x);
}
#else
#define MIXED false
SIMD int32x4_t dot_quarter(int32x4_t sum, uint8x16_t w, int8x16_t x, const struct form f) {
    if (number_bits_of(f) == 8) w = veorq_u8(w, vdupq_n_u8(0x80));
    return vdotq_s32(sum, vreinterpretq_s8_u8(w), x);
}
#endif

/* Returns whether the offset has been subtracted from the codes. */
SIMD bool without_offset(const struct form f) {
    return !MIXED && number_bits_of(f) == 8;
}
SIMD whole whole_open(int32_t start, float back, const struct form f) {
    const int32_t first = without_offset(f) ? (int32_t)number_bits(back) : start;
    const int32x4_t all = vdupq_n_s32(f.wide ? 0 : first);
    const uint32x4_t none = vdupq_n_u32(0);
    return (whole){all, all, all, all, none, none, none, none, none};
}
SIMD input input_load(const char *x) {
    int32_t some;
    memcpy(&some, x, sizeof some);
    return vreinterpretq_s8_s32(vdupq_n_s32(some));
}
SIMD codes codes_load(const char *at) {
    const uint8_t *p = (const uint8_t *)at;
    return (codes){vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)};
}
SIMD void codes_store(char *at, codes all) {
    uint8_t *p = (uint8_t *)at;
    vst1q_u8(p, all.a), vst1q_u8(p + 16, all.b);
    vst1q_u8(p + 32, all.c), vst1q_u8(p + 48, all.d);
}
SIMD codes codes_from(codes all, int from, const int count) {
    const uint8x16_t mask = vdupq_n_u8((uint8_t)((1 << count) - 1));
    return (codes){all.a >> from & mask, all.b >> from & mask, all.c >> from & mask,
                   all.d >> from & mask};
}
SIMD codes codes_bits(codes all, const int from, const int count, const int to) {
    all = from + count == 8 ? (codes){all.a >> from, all.b >> from, all.c >> from, all.d >> from}
                            : codes_from(all, from, count);
    return (codes){all.a << to, all.b << to, all.c << to, all.d << to};
}
SIMD codes codes_or(codes x, codes y) {
    return (codes){x.a | y.a, x.b | y.b, x.c | y.c, x.d | y.d};
}
SIMD codes codes_values(codes all, const struct form f) {
    const uint8x16_t table =
        vaddq_u8(vld1q_u8((const uint8_t *)cpu_values[f.values]), vdupq_n_u8((uint8_t)f.offset));
    return (codes){vqtbl1q_u8(table, all.a), vqtbl1q_u8(table, all.b), vqtbl1q_u8(table, all.c),
                   vqtbl1q_u8(table, all.d)};
}
/* Leaves the bytes as they are: whole_dots_wide brings the activations into their order. */
SIMD codes codes_wide(codes all, const int odd) {
    (void)odd;
    return all;
}
SIMD whole whole_dot(whole sum, codes w, input x, const struct form f) {
    sum.a = dot_quarter(sum.a, w.a, x, f);
    sum.b = dot_quarter(sum.b, w.b, x, f);
    sum.c = dot_quarter(sum.c, w.c, x, f);
    sum.d = dot_quarter(sum.d, w.d, x, f);
    return sum;
}
/* `first` and `other` have the inputs with even numbers and those with odd ones (codes_wide). */
SIMD whole whole_dots_wide(whole sum, codes w, input first, input other, const struct form f) {
    const uint8x16_t low = vreinterpretq_u8_s8(vtrn1q_s8(first, other));
    sum = whole_dot(sum, w, vtrn2q_s8(first, other), f);
    sum.low_a = vdotq_u32(sum.low_a, w.a, low);
    sum.low_b = vdotq_u32(sum.low_b, w.b, low);
    sum.low_c = vdotq_u32(sum.low_c, w.c, low);
    sum.low_d = vdotq_u32(sum.low_d, w.d, low);
    if (without_offset(f)) sum.lows = vdotq_u32(sum.lows, vdupq_n_u8(1), low);
    return sum;
}
SIMD whole whole_dots(whole sum, codes x, input of_x, codes y, input of_y, const struct form f) {
    if (f.wide) return whole_dots_wide(sum, x, of_x, of_y, f);
    return whole_dot(whole_dot(sum, x, of_x, f), y, of_y, f);
}
SIMD float32x4_t close_quarter(int32x4_t sum, uint32x4_t low, int32x4_t start, float back,
                               const struct form f) {
    if (!f.wide) return vsubq_f32(vreinterpretq_f32_s32(sum), vdupq_n_f32(back));
    const int32x4_t all = vaddq_s32(vshlq_n_s32(sum, 8), vreinterpretq_s32_u32(low));
    return vcvtq_f32_s32(vaddq_s32(all, start));
}
SIMD v16 whole_close(whole sum, int32_t start, float back, const struct form f) {
    const int32x4_t lows = vreinterpretq_s32_u32(sum.lows), offset = vdupq_n_s32(f.offset);
    const int32x4_t first =
        without_offset(f) ? vnegq_s32(vmulq_s32(lows, offset)) : vdupq_n_s32(start);
    return (v16){close_quarter(sum.a, sum.low_a, first, back, f),
                 close_quarter(sum.b, sum.low_b, first, back, f),
                 close_quarter(sum.c, sum.low_c, first, back, f),
                 close_quarter(sum.d, sum.low_d, first, back, f)};
}
SIMD v16 fused(v16 a, v16 b, v16 c) {
    return v16_fma(a, b, c);
}

#else

#define PANELS_MOST   4
#define MIXED         true
#define ROWS          1
#define PANELS        1
#define PANELS_OF_ONE PANELS_MOST
#define ONE_ROW_FETCH 2
#define PANELS_OF_TWO 1

typedef struct {
    int32_t at[16];
} whole;
typedef struct {
    uint8_t at[64];
} codes;
typedef const char *input;

SIMD whole whole_open(int32_t start, float back, const struct form f) {
    whole sum;
    (void)back, (void)f;
    for (int i = 0; i < 16; i++) sum.at[i] = start;
    return sum;
}
SIMD input input_load(const char *x) {
    return x;
}
SIMD codes codes_load(const char *at) {
    codes w;
    memcpy(w.at, at, sizeof w.at);
    return w;
}
SIMD void codes_store(char *at, codes all) {
    memcpy(at, all.at, sizeof all.at);
}
SIMD codes codes_from(codes all, int from, const int count) {
    for (int i = 0; i < 64; i++) all.at[i] = all.at[i] >> from & ((1 << count) - 1);
    return all;
}
SIMD codes codes_bits(codes all, const int from, const int count, const int to) {
    all = codes_from(all, from, count);
    for (int i = 0; i < 64; i++) all.at[i] = (uint8_t)(all.at[i] << to);
    return all;
}
SIMD codes codes_or(codes a, codes b) {
    for (int i = 0; i < 64; i++) a.at[i] |= b.at[i];
    return a;
}
SIMD codes codes_values(codes all, const struct form f) {
    for (int i = 0; i < 64; i++) all.at[i] = (uint8_t)(cpu_values[f.values][all.at[i]] + f.offset);
    return all;
}
/* Unpacked numbers have one byte each, even if activations have 16 bits. Sum i multiplies the four
 * numbers from 4 i on or, after codes_wide, the two from 2 i on. */
SIMD codes codes_wide(codes all, const int odd) {
    for (int i = 0; i < 32; i++) all.at[i] = all.at[2 * i + odd];
    return all;
}
SIMD whole whole_dot(whole sum, codes w, input x, const struct form f) {
    int16_t pair[2] = {0, 0};
    if (f.wide) memcpy(pair, x, sizeof pair);
    for (ptrdiff_t i = 0; i < 16 && f.wide; i++)
        sum.at[i] += w.at[2 * i] * pair[0] + w.at[2 * i + 1] * pair[1];
    for (ptrdiff_t i = 0; i < 16 && !f.wide; i++)
        for (ptrdiff_t j = 0; j < 4; j++) sum.at[i] += w.at[4 * i + j] * (int8_t)x[j];
    return sum;
}
SIMD whole whole_dots(whole sum, codes a, input xa, codes b, input xb, const struct form f) {
    return whole_dot(whole_dot(sum, a, xa, f), b, xb, f);
}
SIMD v16 whole_close(whole sum, int32_t start, float back, const struct form f) {
    float to[16];
    (void)start;
    for (int i = 0; i < 16; i++)
        to[i] = f.wide ? (float)sum.at[i] : number_from_bits((uint32_t)sum.at[i]) - back;
    return v16_load(to);
}
SIMD v16 fused(v16 a, v16 b, v16 c) {
    float x[16], y[16], z[16];
    v16_store(x, a), v16_store(y, b), v16_store(z, c);
    for (int i = 0; i < 16; i++) z[i] = fmaf(x[i], y[i], z[i]);
    return v16_load(z);
}

#endif

#if !defined(TWO_AT_ONCE)
#define TWO_AT_ONCE false
#endif

#endif
