/* Sixteen floats at a time, for whatever instruction set the file is compiled: one AVX-512
 * register, two of AVX2, four of NEON (simd_neon.h), or four quarters in the compiler's own vectors
 * (SSE2, ...).
 *
 * Sums inside a vector always pair lanes l and l+8, then +4, +2, +1, so a result does not depend on
 * how many vectors were summed together. `fma` is fused where the instruction exists; two paths may
 * therefore differ in the last bits, one path never does. Include only from files compiled per
 * path: no function here may be shared between files. */
#ifndef KEEPD_KERNELS_CPU_SIMD_H
#define KEEPD_KERNELS_CPU_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels/cpu/internal.h"

#define SIMD   static inline __attribute__((always_inline, unused))
#define UNROLL _Pragma("GCC unroll 4")

#define LOG2_E    1.44269504f
#define E4M3_UNIT 0x1p-8f /* v16_load_e4m3_pairs: its result for a 1 */

#if defined(__AVX2__)

#include <immintrin.h>

/* Converts sixteen e4m3 numbers to f16, scaled by 2^-8. The scale makes the conversion a shift of
 * the bits: e4m3's subnormal numbers, below 2^-6, become subnormal in f16, too. Only NaN is handled
 * separately. */
SIMD __m256i f16_of_e4m3(const uint8_t *p) {
    __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
    __m256i bits = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xbf80));
    __m256i size = _mm256_and_si256(bits, _mm256_set1_epi16(0x7fff));
    __m256i nan = _mm256_cmpeq_epi16(size, _mm256_set1_epi16(0x3f80));
    return _mm256_or_si256(bits, _mm256_and_si256(nan, _mm256_set1_epi16(0x7c00)));
}
/* The same for sixteen pairs, first and second numbers separately, none of them NaN. */
SIMD void f16_of_e4m3_pairs(const void *p, __m256i *first, __m256i *second) {
    __m256i pairs = _mm256_loadu_si256((const __m256i *)p);
    __m256i mask = _mm256_set1_epi16((short)0xbf80);
    *first = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(pairs, 8), 1), mask);
    *second = _mm256_and_si256(_mm256_srai_epi16(pairs, 1), mask);
}

#endif

#if defined(__AVX512F__)

typedef __m512 v16;

SIMD v16 v16_set(float x) {
    return _mm512_set1_ps(x);
}
SIMD v16 v16_load(const float *p) {
    return _mm512_loadu_ps(p);
}
SIMD void v16_store(float *p, v16 a) {
    _mm512_storeu_ps(p, a);
}
SIMD v16 v16_add(v16 a, v16 b) {
    return _mm512_add_ps(a, b);
}
SIMD v16 v16_sub(v16 a, v16 b) {
    return _mm512_sub_ps(a, b);
}
SIMD v16 v16_mul(v16 a, v16 b) {
    return _mm512_mul_ps(a, b);
}
SIMD v16 v16_div(v16 a, v16 b) {
    return _mm512_div_ps(a, b);
}
SIMD v16 v16_max(v16 a, v16 b) {
    return _mm512_max_ps(a, b);
}
SIMD v16 v16_min(v16 a, v16 b) {
    return _mm512_min_ps(a, b);
}
SIMD v16 v16_fma(v16 a, v16 b, v16 c) {
    return _mm512_fmadd_ps(a, b, c);
}

SIMD v16 v16_load_n(const float *p, int n) {
    return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
}
SIMD void v16_store_n(float *p, v16 a, int n) {
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), a);
}
/* Sixteen levels of kernels/row.h: of ROW8, and of ROW4's bytes of sixteen, the low bits or, if
 * `high`, the high ones. */
SIMD v16 v16_load_row8(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
/* Returns sixteen numbers, each a power of two or 0, from their exponents as in float32. */
SIMD v16 v16_load_power(const uint8_t *p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)), 23));
}
/* Returns the low or the high half of each of sixteen bytes. */
SIMD v16 v16_load_nibble(const uint8_t *p, bool high) {
    const __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm512_cvtepi32_ps(high ? _mm512_srli_epi32(pairs, 4)
                                   : _mm512_and_si512(pairs, _mm512_set1_epi32(15)));
}
SIMD v16 v16_load_row4(const uint8_t *p, bool high) {
    const v16 levels =
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)row_levels)));
    __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm512_permutexvar_ps(high ? _mm512_srli_epi32(pairs, 4) : pairs, levels);
}
SIMD v16 v16_load_bf16(const uint16_t *p) {
    __m256i half = _mm256_loadu_si256((const __m256i *)p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
SIMD v16 v16_load_f16(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
/* Loads sixteen pairs of bf16: their first numbers and their second ones. */
SIMD void v16_load_pairs(const void *p, v16 *first, v16 *second) {
    __m512i pairs = _mm512_loadu_si512(p);
    *first = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    *second = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)));
}
/* Does the same for sixteen pairs of E4M3 without NaN; the results are E4M3_UNIT times the numbers.
 */
SIMD void v16_load_e4m3_pairs(const void *p, v16 *first, v16 *second) {
    __m256i low, high;
    f16_of_e4m3_pairs(p, &low, &high);
    *first = _mm512_cvtph_ps(low);
    *second = _mm512_cvtph_ps(high);
}
/* Rounds to nearest even; keeps NaN. */
SIMD void v16_store_bf16(uint16_t *p, v16 a) {
    __m512i bits = _mm512_castps_si512(a);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
SIMD v16 v16_load_e4m3(const uint8_t *p) {
    return v16_mul(_mm512_cvtph_ps(f16_of_e4m3(p)), v16_set(0x1p8f));
}
/* Vector form of number_to_e4m3. */
SIMD void v16_store_e4m3(uint8_t *p, v16 a) {
    const __m512i step = _mm512_castps_si512(v16_set(0x1p14f));
    __m512i bits = _mm512_castps_si512(a);
    __m512i size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(size, 20), _mm512_set1_epi32(1));
    __m512i code = _mm512_add_epi32(size, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7ffff)));
    code = _mm512_sub_epi32(_mm512_srli_epi32(code, 20), _mm512_set1_epi32(120 << 3));
    __m512i tiny = _mm512_castps_si512(v16_add(_mm512_castsi512_ps(size), v16_set(0x1p14f)));
    __mmask16 below = _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(121 << 23));
    code = _mm512_mask_sub_epi32(code, below, tiny, step);
    code = _mm512_or_si512(_mm512_min_epi32(code, _mm512_set1_epi32(0x7e)), sign);
    __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    code = _mm512_mask_mov_epi32(code, nan, _mm512_set1_epi32(0x7f));
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(code));
}
/* Replaces lanes outside [lo, hi) by `other`. */
SIMD v16 v16_keep(v16 a, int lo, int hi, float other) {
    __mmask16 mask = (__mmask16)((hi >= 16 ? 0xffffu : (1u << hi) - 1) & ~((1u << lo) - 1));
    return _mm512_mask_mov_ps(_mm512_set1_ps(other), mask, a);
}
/* Returns x where a >= limit, and 0 elsewhere. */
SIMD v16 v16_unless_below(v16 a, float limit, v16 x) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, _mm512_set1_ps(limit), _CMP_GE_OQ), x);
}
SIMD v16 v16_round(v16 a) {
    return _mm512_roundscale_ps(a, 8);
}
SIMD v16 v16_exp2_whole(v16 n) { /* 2^n for integers n in [-126, 127] */
    __m512i bits = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 23));
}
SIMD float v16_sum(v16 a) {
    __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
/* Returns v16_sum of four vectors at once: first of halves, then of quarters, with one vector's in
 * each lane. */
SIMD void v16_sum4(const v16 a[4], float to[4]) {
    __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a[0], a[1], 0x44),
                              _mm512_shuffle_f32x4(a[0], a[1], 0xee));
    __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(a[2], a[3], 0x44),
                              _mm512_shuffle_f32x4(a[2], a[3], 0xee));
    __m512 all =
        _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    all = _mm512_add_ps(all, _mm512_permute_ps(all, 0x4e));
    all = _mm512_add_ps(all, _mm512_permute_ps(all, 0xb1));
    __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_permutexvar_ps(first, all)));
}
SIMD float v16_most(v16 a) {
    return _mm512_reduce_max_ps(a);
}
/* Transposes sixteen vectors. */
SIMD void v16_transpose(v16 a[16]) {
    v16 b[16];
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_shuffle_ps(b[i], b[i + 2], 0x44);
        a[i + 1] = _mm512_shuffle_ps(b[i], b[i + 2], 0xee);
        a[i + 2] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0x44);
        a[i + 3] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        b[i] = _mm512_shuffle_f32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        a[i] = _mm512_shuffle_f32x4(b[i], b[i + 8], 0x88);
        a[i + 4] = _mm512_shuffle_f32x4(b[i + 4], b[i + 12], 0x88);
        a[i + 8] = _mm512_shuffle_f32x4(b[i], b[i + 8], 0xdd);
        a[i + 12] = _mm512_shuffle_f32x4(b[i + 4], b[i + 12], 0xdd);
    }
}

#elif defined(__AVX2__)

typedef struct {
    __m256 lo, hi;
} v16;

#define V16(expression_lo, expression_hi) ((v16){(expression_lo), (expression_hi)})

SIMD v16 v16_set(float x) {
    return V16(_mm256_set1_ps(x), _mm256_set1_ps(x));
}
SIMD v16 v16_load(const float *p) {
    return V16(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8));
}
SIMD void v16_store(float *p, v16 a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
SIMD v16 v16_add(v16 a, v16 b) {
    return V16(_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi));
}
SIMD v16 v16_sub(v16 a, v16 b) {
    return V16(_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi));
}
SIMD v16 v16_mul(v16 a, v16 b) {
    return V16(_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi));
}
SIMD v16 v16_div(v16 a, v16 b) {
    return V16(_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi));
}
SIMD v16 v16_max(v16 a, v16 b) {
    return V16(_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi));
}
SIMD v16 v16_min(v16 a, v16 b) {
    return V16(_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi));
}
SIMD v16 v16_fma(v16 a, v16 b, v16 c) {
    return V16(_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi));
}
SIMD v16 v16_load_n(const float *p, int n) {
    float room[16] = {0};
    memcpy(room, p, (size_t)n * sizeof *room);
    return v16_load(room);
}
SIMD void v16_store_n(float *p, v16 a, int n) {
    float room[16];
    v16_store(room, a);
    memcpy(p, room, (size_t)n * sizeof *room);
}
SIMD __m256 bf16_half(const uint16_t *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
SIMD v16 row8_floats(__m128i codes) {
    return V16(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)),
               _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8))));
}
SIMD v16 v16_load_row8(const int8_t *p) {
    return row8_floats(_mm_loadu_si128((const __m128i *)p));
}
SIMD __m256 power_half(__m128i exponents) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(exponents), 23));
}
SIMD v16 v16_load_power(const uint8_t *p) {
    const __m128i exponents = _mm_loadu_si128((const __m128i *)p);
    return V16(power_half(exponents), power_half(_mm_srli_si128(exponents, 8)));
}
SIMD __m128i nibbles(const uint8_t *p, bool high) {
    const __m128i pairs = _mm_loadu_si128((const __m128i *)p);
    return _mm_and_si128(high ? _mm_srli_epi16(pairs, 4) : pairs, _mm_set1_epi8(15));
}
SIMD v16 v16_load_nibble(const uint8_t *p, bool high) {
    return row8_floats(nibbles(p, high));
}
SIMD v16 v16_load_row4(const uint8_t *p, bool high) {
    return row8_floats(
        _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)row_levels), nibbles(p, high)));
}
SIMD v16 v16_load_bf16(const uint16_t *p) {
    return V16(bf16_half(p), bf16_half(p + 8));
}
SIMD void v16_load_pairs(const void *p, v16 *first, v16 *second) {
    __m256i lo = _mm256_loadu_si256(p), hi = _mm256_loadu_si256((const __m256i *)p + 1);
    __m256i mask = _mm256_set1_epi32((int)0xffff0000);
    *first = V16(_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)),
                 _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16)));
    *second = V16(_mm256_castsi256_ps(_mm256_and_si256(lo, mask)),
                  _mm256_castsi256_ps(_mm256_and_si256(hi, mask)));
}
SIMD v16 f16_wide(__m256i half) {
    return V16(_mm256_cvtph_ps(_mm256_castsi256_si128(half)),
               _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)));
}
SIMD v16 v16_load_f16(const uint16_t *p) {
    return f16_wide(_mm256_loadu_si256((const __m256i *)p));
}
SIMD void v16_load_e4m3_pairs(const void *p, v16 *first, v16 *second) {
    __m256i low, high;
    f16_of_e4m3_pairs(p, &low, &high);
    *first = f16_wide(low);
    *second = f16_wide(high);
}
SIMD __m128i bf16_round_half(__m256 a) {
    __m256i bits = _mm256_castps_si256(a);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    __m256i top = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
}
SIMD void v16_store_bf16(uint16_t *p, v16 a) {
    _mm_storeu_si128((__m128i *)p, bf16_round_half(a.lo));
    _mm_storeu_si128((__m128i *)(p + 8), bf16_round_half(a.hi));
}
SIMD v16 v16_load_e4m3(const uint8_t *p) {
    return v16_mul(f16_wide(f16_of_e4m3(p)), v16_set(0x1p8f));
}
SIMD __m256i e4m3_round_half(__m256 a) {
    const __m256i step = _mm256_castps_si256(_mm256_set1_ps(0x1p14f));
    __m256i bits = _mm256_castps_si256(a);
    __m256i size = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80));
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(size, 20), _mm256_set1_epi32(1));
    __m256i code = _mm256_add_epi32(size, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7ffff)));
    code = _mm256_sub_epi32(_mm256_srli_epi32(code, 20), _mm256_set1_epi32(120 << 3));
    __m256 tiny = _mm256_add_ps(_mm256_castsi256_ps(size), _mm256_set1_ps(0x1p14f));
    __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(121 << 23), size);
    code = _mm256_blendv_epi8(code, _mm256_sub_epi32(_mm256_castps_si256(tiny), step), below);
    code = _mm256_or_si256(_mm256_min_epi32(code, _mm256_set1_epi32(0x7e)), sign);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(code, _mm256_set1_epi32(0x7f), nan);
}
SIMD void v16_store_e4m3(uint8_t *p, v16 a) {
    __m256i pairs = _mm256_packus_epi32(e4m3_round_half(a.lo), e4m3_round_half(a.hi));
    pairs = _mm256_permute4x64_epi64(pairs, 0xd8);
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi16(_mm256_castsi256_si128(pairs),
                                                    _mm256_extracti128_si256(pairs, 1)));
}
SIMD __m256 keep_half(__m256 a, int at, int lo, int hi, __m256 other) {
    __m256i lane =
        _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(at));
    __m256i inside = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(lo), lane),
                                         _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), lane));
    return _mm256_blendv_ps(other, a, _mm256_castsi256_ps(inside));
}
SIMD v16 v16_keep(v16 a, int lo, int hi, float other) {
    __m256 fill = _mm256_set1_ps(other);
    return V16(keep_half(a.lo, 0, lo, hi, fill), keep_half(a.hi, 8, lo, hi, fill));
}
SIMD v16 v16_unless_below(v16 a, float limit, v16 x) {
    __m256 least = _mm256_set1_ps(limit);
    return V16(_mm256_and_ps(_mm256_cmp_ps(a.lo, least, _CMP_GE_OQ), x.lo),
               _mm256_and_ps(_mm256_cmp_ps(a.hi, least, _CMP_GE_OQ), x.hi));
}
SIMD v16 v16_round(v16 a) {
    return V16(_mm256_round_ps(a.lo, 8), _mm256_round_ps(a.hi, 8));
}
SIMD __m256 exp2_half(__m256 n) {
    __m256i bits = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23));
}
SIMD v16 v16_exp2_whole(v16 n) {
    return V16(exp2_half(n.lo), exp2_half(n.hi));
}
SIMD float v16_sum(v16 a) {
    __m256 b = _mm256_add_ps(a.lo, a.hi);
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
/* Adds halves, then pairs, so that the last two steps add four sums at once. */
SIMD __m128 sum_quarters(v16 a) {
    __m256 b = _mm256_add_ps(a.lo, a.hi);
    return _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
}
SIMD void v16_sum4(const v16 a[4], float to[4]) {
    __m128 p = sum_quarters(a[0]), q = sum_quarters(a[1]);
    __m128 r = sum_quarters(a[2]), s = sum_quarters(a[3]);
    __m128 pq = _mm_add_ps(_mm_unpacklo_ps(p, q), _mm_unpackhi_ps(p, q));
    __m128 rs = _mm_add_ps(_mm_unpacklo_ps(r, s), _mm_unpackhi_ps(r, s));
    _mm_storeu_ps(to, _mm_add_ps(_mm_movelh_ps(pq, rs), _mm_movehl_ps(rs, pq)));
}
SIMD float v16_most(v16 a) {
    __m256 b = _mm256_max_ps(a.lo, a.hi);
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}
/* Transposes eight by eight, one half or the other. */
SIMD void transpose_half(__m256 a[8]) {
    __m256 b[8];
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
        a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
        a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
        a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        __m256 low = a[i], high = a[i + 4];
        a[i] = _mm256_permute2f128_ps(low, high, 0x20);
        a[i + 4] = _mm256_permute2f128_ps(low, high, 0x31);
    }
}
/* Transposes sixteen vectors. */
SIMD void v16_transpose(v16 a[16]) {
    __m256 part[4][8];
    for (int i = 0; i < 8; i++) {
        part[0][i] = a[i].lo, part[1][i] = a[i].hi;
        part[2][i] = a[i + 8].lo, part[3][i] = a[i + 8].hi;
    }
    for (int i = 0; i < 4; i++) transpose_half(part[i]);
    for (int i = 0; i < 8; i++) {
        a[i] = V16(part[0][i], part[2][i]);
        a[i + 8] = V16(part[1][i], part[3][i]);
    }
}

#elif defined(__ARM_FEATURE_DOTPROD)

#include "kernels/cpu/simd_neon.h"

#else

typedef float v4 __attribute__((vector_size(16)));
typedef uint32_t u4 __attribute__((vector_size(16)));
typedef int32_t i4 __attribute__((vector_size(16)));
typedef struct {
    v4 a, b, c, d;
} v16;

#define V16_EACH(x, y, op) ((v16){x.a op y.a, x.b op y.b, x.c op y.c, x.d op y.d})

SIMD v4 v4_set(float x) {
    return (v4){x, x, x, x};
}
SIMD v4 v4_select(i4 mask, v4 yes, v4 no) {
    return (v4)((mask & (i4)yes) | (~mask & (i4)no));
}
SIMD v4 v4_max(v4 a, v4 b) {
    return v4_select(a > b, a, b);
}
SIMD v4 v4_min(v4 a, v4 b) {
    return v4_select(a < b, a, b);
}
SIMD v4 v4_load(const float *p) {
    v4 a;
    memcpy(&a, p, sizeof a);
    return a;
}

SIMD v16 v16_set(float x) {
    v4 a = v4_set(x);
    return (v16){a, a, a, a};
}
SIMD v16 v16_load(const float *p) {
    return (v16){v4_load(p), v4_load(p + 4), v4_load(p + 8), v4_load(p + 12)};
}
SIMD void v16_store(float *p, v16 a) {
    memcpy(p, &a, sizeof a);
}
SIMD v16 v16_add(v16 a, v16 b) {
    return V16_EACH(a, b, +);
}
SIMD v16 v16_sub(v16 a, v16 b) {
    return V16_EACH(a, b, -);
}
SIMD v16 v16_mul(v16 a, v16 b) {
    return V16_EACH(a, b, *);
}
SIMD v16 v16_div(v16 a, v16 b) {
    return V16_EACH(a, b, /);
}
SIMD v16 v16_max(v16 a, v16 b) {
    return (v16){v4_max(a.a, b.a), v4_max(a.b, b.b), v4_max(a.c, b.c), v4_max(a.d, b.d)};
}
SIMD v16 v16_min(v16 a, v16 b) {
    return (v16){v4_min(a.a, b.a), v4_min(a.b, b.b), v4_min(a.c, b.c), v4_min(a.d, b.d)};
}
SIMD v16 v16_fma(v16 a, v16 b, v16 c) {
    return (v16){a.a * b.a + c.a, a.b * b.b + c.b, a.c * b.c + c.c, a.d * b.d + c.d};
}
SIMD v16 v16_load_n(const float *p, int n) {
    float room[16] = {0};
    memcpy(room, p, (size_t)n * sizeof *room);
    return v16_load(room);
}
SIMD void v16_store_n(float *p, v16 a, int n) {
    float room[16];
    v16_store(room, a);
    memcpy(p, room, (size_t)n * sizeof *room);
}
SIMD v4 bf16_quarter(const uint16_t *p) {
    u4 bits = {p[0], p[1], p[2], p[3]};
    return (v4)(bits << 16);
}
SIMD v16 v16_load_row8(const int8_t *p) {
    float x[16];
    for (int i = 0; i < 16; i++) x[i] = (float)p[i];
    return v16_load(x);
}
SIMD v16 v16_load_power(const uint8_t *p) {
    float x[16];
    for (int i = 0; i < 16; i++) x[i] = number_from_bits((uint32_t)p[i] << 23);
    return v16_load(x);
}
SIMD v16 v16_load_nibble(const uint8_t *p, bool high) {
    float x[16];
    for (int i = 0; i < 16; i++) x[i] = (float)(high ? p[i] >> 4 : p[i] & 15);
    return v16_load(x);
}
SIMD v16 v16_load_row4(const uint8_t *p, bool high) {
    float x[16];
    for (int i = 0; i < 16; i++) x[i] = (float)row_levels[high ? p[i] >> 4 : p[i] & 15];
    return v16_load(x);
}
SIMD v16 v16_load_bf16(const uint16_t *p) {
    return (v16){bf16_quarter(p), bf16_quarter(p + 4), bf16_quarter(p + 8), bf16_quarter(p + 12)};
}
SIMD v16 v16_load_f16(const uint16_t *p) {
    float room[16];
    for (int i = 0; i < 16; i++) room[i] = number_from_f16(p[i]);
    return v16_load(room);
}
SIMD void v16_load_pairs(const void *p, v16 *first, v16 *second) {
    u4 pair[4];
    memcpy(pair, p, sizeof pair);
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pairs of bf16 are read as little-endian words"
#endif
    *first =
        (v16){(v4)(pair[0] << 16), (v4)(pair[1] << 16), (v4)(pair[2] << 16), (v4)(pair[3] << 16)};
    *second = (v16){(v4)(pair[0] & 0xffff0000u), (v4)(pair[1] & 0xffff0000u),
                    (v4)(pair[2] & 0xffff0000u), (v4)(pair[3] & 0xffff0000u)};
}
SIMD void v16_store_bf16(uint16_t *p, v16 a) {
    float room[16];
    v16_store(room, a);
    for (int i = 0; i < 16; i++) p[i] = number_to_bf16(room[i]);
}
SIMD v4 e4m3_quarter(const uint8_t *p) {
    u4 code = {p[0], p[1], p[2], p[3]}, size = code & 0x7f;
    v4 tiny = __builtin_convertvector((i4)size, v4) * v4_set(0x1p-9f);
    v4 value = v4_select((i4)(size < 8), tiny, (v4)((size << 20) + (120u << 23)));
    value = v4_select((i4)(size == 0x7f), v4_set(NAN), value);
    return (v4)((u4)value | (code & 0x80) << 24);
}
SIMD v16 v16_load_e4m3(const uint8_t *p) {
    return (v16){e4m3_quarter(p), e4m3_quarter(p + 4), e4m3_quarter(p + 8), e4m3_quarter(p + 12)};
}
SIMD void v16_load_e4m3_pairs(const void *p, v16 *first, v16 *second) {
    uint8_t low[16], high[16];
    const uint8_t *at = (const uint8_t *)p;
    for (int i = 0; i < 16; i++) low[i] = at[2 * i], high[i] = at[2 * i + 1];
    *first = v16_mul(v16_load_e4m3(low), v16_set(E4M3_UNIT));
    *second = v16_mul(v16_load_e4m3(high), v16_set(E4M3_UNIT));
}
SIMD void v16_store_e4m3(uint8_t *p, v16 a) {
    float room[16];
    v16_store(room, a);
    for (int i = 0; i < 16; i++) p[i] = number_to_e4m3(room[i]);
}
SIMD v16 v16_keep(v16 a, int lo, int hi, float other) {
    float room[16];
    v16_store(room, a);
    for (int i = 0; i < 16; i++)
        if (i < lo || i >= hi) room[i] = other;
    return v16_load(room);
}
SIMD v4 v4_unless_below(v4 a, float limit, v4 x) {
    return v4_select(a >= v4_set(limit), x, v4_set(0));
}
SIMD v16 v16_unless_below(v16 a, float limit, v16 x) {
    return (v16){v4_unless_below(a.a, limit, x.a), v4_unless_below(a.b, limit, x.b),
                 v4_unless_below(a.c, limit, x.c), v4_unless_below(a.d, limit, x.d)};
}
/* Adding 1.5 * 2^23 leaves no bits for a fraction; correct for |a| < 2^22. */
SIMD v16 v16_round(v16 a) {
    v16 magic = v16_set(0x1.8p23f);
    return v16_sub(v16_add(a, magic), magic);
}
SIMD v4 v4_exp2_whole(v4 n) {
    i4 whole = __builtin_convertvector(n, i4);
    return (v4)((whole + 127) << 23);
}
SIMD v16 v16_exp2_whole(v16 n) {
    return (v16){v4_exp2_whole(n.a), v4_exp2_whole(n.b), v4_exp2_whole(n.c), v4_exp2_whole(n.d)};
}
SIMD float v16_sum(v16 a) {
    v4 b = (a.a + a.c) + (a.b + a.d);
    return (b[0] + b[2]) + (b[1] + b[3]);
}
SIMD void v16_sum4(const v16 a[4], float to[4]) {
    for (int i = 0; i < 4; i++) to[i] = v16_sum(a[i]);
}
SIMD float v16_most(v16 a) {
    v4 b = v4_max(v4_max(a.a, a.c), v4_max(a.b, a.d));
    float x = b[0] > b[2] ? b[0] : b[2], y = b[1] > b[3] ? b[1] : b[3];
    return x > y ? x : y;
}
/* Transposes sixteen vectors. */
SIMD void v16_transpose(v16 a[16]) {
    float to[16][16];
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 4; j++) {
            to[j][i] = a[i].a[j], to[j + 4][i] = a[i].b[j];
            to[j + 8][i] = a[i].c[j], to[j + 12][i] = a[i].d[j];
        }
    for (int i = 0; i < 16; i++) a[i] = v16_load(to[i]);
}

#endif

/* ---- Words: pairs of bf16 ---- */
/* A v16 of words holds sixteen pairs of bf16, the first number of each in the low bits. The
 * instructions of AVX512_BF16 read subnormal numbers as zeros, write zeros instead of subnormal
 * results, and round the two additions of a word in a way of their own. Without them the functions
 * below compile, but are never called. */

/* Does what v16_load does, in two halves. When whole lines are loaded, Zen 4 fetches fewer of them
 * ahead: one query's attention over 8,192 entries then took 1.4 times as long (bench/SPEED.md). */
SIMD v16 v16_load_halves(const void *p) {
#if defined(__AVX512F__)
    const __m256i *half = p;
    const __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256(half));
    return (v16)_mm512_inserti64x4(low, _mm256_loadu_si256(half + 1), 1);
#else
    return v16_load(p);
#endif
}

/* Returns the number or word at p in every lane. It is loaded as an integer: on Zen 4, a broadcast
 * of a float from memory costs a third of a product's time in addition to the load; one of an
 * integer costs only the load. */
SIMD v16 v16_word(const float *p) {
#if defined(__AVX512F__)
    int32_t word;
    memcpy(&word, p, sizeof word);
    return _mm512_castsi512_ps(_mm512_set1_epi32(word));
#else
    return v16_set(*p);
#endif
}

/* Returns sum + the products of both numbers of each word. */
SIMD v16 v16_dot(v16 a, v16 b, v16 sum) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
    v16 a_first, a_second, b_first, b_second;
    v16_load_pairs(&a, &a_first, &a_second);
    v16_load_pairs(&b, &b_first, &b_second);
    return v16_fma(a_first, b_first, v16_fma(a_second, b_second, sum));
#endif
}

/* Returns words of two vectors' numbers, rounded to bf16. */
SIMD v16 v16_pair(v16 first, v16 second) {
#if defined(__AVX512BF16__)
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (v16)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first));
#else
    uint16_t half[2][16], mixed[32];
    v16_store_bf16(half[0], first);
    v16_store_bf16(half[1], second);
    for (int i = 0; i < 32; i++) mixed[i] = half[i % 2][i / 2];
    return v16_load((const float *)(const void *)mixed);
#endif
}

/* Makes words of the numbers of two rows: of 32 numbers or of the last `left`, with zeros behind
 * them. A row that is not wanted is not read, and its numbers are zeros. */
SIMD void v16_mix(const uint16_t *a, bool want_a, const uint16_t *b, bool want_b, int left,
                  v16 to[2]) {
#if defined(__AVX512BF16__)
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40,
                                         8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    __m512i first, second;
    if (left >= 32 && want_a && want_b) {
        first = (__m512i)v16_load_halves(a);
        second = (__m512i)v16_load_halves(b);
    } else {
        const __mmask32 own = left >= 32 ? ~0u : (1u << left) - 1;
        first = _mm512_maskz_loadu_epi16(want_a ? own : 0, a);
        second = _mm512_maskz_loadu_epi16(want_b ? own : 0, b);
    }
    to[0] = (v16)_mm512_permutex2var_epi16(first, low, second);
    to[1] = (v16)_mm512_permutex2var_epi16(first, high, second);
#else
    uint16_t mixed[64] = {0};
    for (int i = 0; i < 32 && i < left; i++) {
        if (want_a) mixed[2 * i] = a[i];
        if (want_b) mixed[2 * i + 1] = b[i];
    }
    to[0] = v16_load((const float *)(const void *)mixed);
    to[1] = v16_load((const float *)(const void *)(mixed + 32));
#endif
}

/* Replaces the first numbers of words by zeros or, unless `second`, the second ones. */
SIMD v16 v16_half(v16 words, bool second) {
#if defined(__AVX512BF16__)
    return (v16)_mm512_maskz_mov_epi16(second ? 0xaaaaaaaau : 0x55555555u, (__m512i)words);
#else
    uint16_t half[32];
    memcpy(half, &words, sizeof half);
    for (int i = second ? 0 : 1; i < 32; i += 2) half[i] = 0;
    memcpy(&words, half, sizeof half);
    return words;
#endif
}

/* ---- Rows, functions ---- */

/* Loads sixteen elements of a row in a cache's dtype, from element `at` of `row` on; only `left`
 * elements belong to the row, the others count as 0. */
SIMD v16 v16_load_row(const void *row, int64_t at, int left, enum kern_dtype dtype) {
    const float *floats = (const float *)row + at;
    if (dtype == KERN_F32) return left >= 16 ? v16_load(floats) : v16_load_n(floats, left);
    if (left >= 16)
        return dtype == KERN_BF16 ? v16_load_bf16((const uint16_t *)row + at)
                                  : v16_load_e4m3((const uint8_t *)row + at);
    float tail[16] = {0};
    number_read_row(tail, (const char *)row + at * (int64_t)kern_dtype_bytes(dtype), left, dtype);
    return v16_load(tail);
}

/* e^x: range reduction by multiples of ln 2 in two parts, a polynomial of degree 5 (minimax after
 * Cephes expf), within 2 ulp; e^x = 0 below -87.33, where float32 turns subnormal, -inf included.
 */
SIMD v16 v16_exp(v16 x) {
    v16 t = v16_max(v16_min(x, v16_set(88.37f)), v16_set(-87.33f));
    v16 n = v16_round(v16_mul(t, v16_set(1.44269504f)));
    v16 r = v16_fma(n, v16_set(-0.693359375f), t);
    r = v16_fma(n, v16_set(2.12194440e-4f), r);
    v16 p = v16_fma(v16_set(1.9875691500e-4f), r, v16_set(1.3981999507e-3f));
    p = v16_fma(p, r, v16_set(8.3334519073e-3f));
    p = v16_fma(p, r, v16_set(4.1665795894e-2f));
    p = v16_fma(p, r, v16_set(1.6666665459e-1f));
    p = v16_fma(p, r, v16_set(5.0000001201e-1f));
    p = v16_add(v16_fma(v16_mul(r, r), p, r), v16_set(1.0f));
    return v16_unless_below(x, -87.33f, v16_mul(p, v16_exp2_whole(n)));
}

/* 2^x for x <= 0, exactly 0 below -126 (and for -inf): degree 6 (after Cephes exp2f), 2 ulp. No
 * intermediate value is subnormal; subnormals would cost a hundred times the rest. */
SIMD v16 v16_exp2(v16 x) {
    v16 t = v16_max(x, v16_set(-126.0f));
    v16 n = v16_round(t);
    v16 r = v16_sub(t, n);
    v16 p = v16_fma(v16_set(1.535336188319500e-4f), r, v16_set(1.339887440266574e-3f));
    p = v16_fma(p, r, v16_set(9.618437357674640e-3f));
    p = v16_fma(p, r, v16_set(5.550332471162809e-2f));
    p = v16_fma(p, r, v16_set(2.402264791363012e-1f));
    p = v16_fma(p, r, v16_set(6.931472028550421e-1f));
    p = v16_fma(p, r, v16_set(1.0f));
#if defined(__AVX512F__)
    return v16_unless_below(x, -126.0f, _mm512_scalef_ps(p, n));
#else
    return v16_unless_below(x, -126.0f, v16_mul(p, v16_exp2_whole(n)));
#endif
}

/* cap tanh(x / cap), as cap (e - 1) / (e + 1) with e = exp(2 x / cap). Adding x - x keeps
 * infinities and NaN from becoming finite. */
SIMD v16 v16_soft_cap(v16 x, float cap) {
    v16 e = v16_exp(v16_mul(x, v16_set(2 / cap)));
    v16 ratio = v16_div(v16_sub(e, v16_set(1)), v16_add(e, v16_set(1)));
    return v16_add(v16_mul(ratio, v16_set(cap)), v16_sub(x, x));
}

#endif
