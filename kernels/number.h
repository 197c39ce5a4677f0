/* Conversion of the number formats of weights and caches to float32 and back. Pure; used by every
 * backend. */
#ifndef KEEPD_KERNELS_NUMBER_H
#define KEEPD_KERNELS_NUMBER_H

#include <stdint.h>
#include <string.h>

#include "kernels/kern_types.h"

static inline float number_from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t number_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float number_from_bf16(uint16_t x) {
    return number_from_bits((uint32_t)x << 16);
}

/* To nearest even; NaN stays NaN (quiet). */
static inline uint16_t number_to_bf16(float x) {
    uint32_t bits = number_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Exact: float32 has every value of float16, subnormal ones included. */
static inline float number_from_f16(uint16_t x) {
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, exponent = x >> 10 & 31, mantissa = x & 1023;
    if (exponent == 31) return number_from_bits(sign | 0x7f800000u | mantissa << 13);
    if (exponent) return number_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    float tiny = (float)mantissa * 0x1p-24f;
    return sign ? -tiny : tiny;
}

/* To nearest even; beyond the largest, 65504, infinity; NaN stays NaN. */
static inline uint16_t number_to_f16(float x) {
    uint32_t bits = number_bits(x), size = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000, half;
    if (size > 0x7f800000u) return (uint16_t)(sign | 0x7e00);
    if (size < 113u << 23) /* below 2^-14: at 0.5 the spacing of float32 is 2^-24 */
        half = number_bits(number_from_bits(size) + 0.5f) - number_bits(0.5f);
    else
        half = ((size + 0xfff + (size >> 13 & 1)) >> 13) - (112u << 10);
    return (uint16_t)(sign | (half < 0x7c00 ? half : 0x7c00));
}

/* Exact, subnormal codes (below 2^-6) and NaN included. */
static inline float number_from_e4m3(uint8_t x) {
    uint32_t magnitude = x & 0x7f, sign = (uint32_t)(x & 0x80) << 24;
    float value = magnitude == 0x7f ? number_from_bits(0x7fc00000u)
                  : magnitude < 8   ? (float)magnitude * 0x1p-9f
                                    : number_from_bits((magnitude << 20) + (120u << 23));
    return number_from_bits(number_bits(value) | sign);
}

/* To nearest even; larger magnitudes, infinities included, become the largest number; NaN becomes
 * 0x7f. Equal to cvt.rn.satfinite.e4m3x2.f32. */
static inline uint8_t number_to_e4m3(float x) {
    uint32_t bits = number_bits(x), size = bits & 0x7fffffffu, sign = bits >> 24 & 0x80, code;
    if (size > 0x7f800000u) return 0x7f;
    if (size < 121u << 23) /* below 2^-6: at 2^14 the spacing of float32 is 2^-9 */
        code = number_bits(number_from_bits(size) + 0x1p14f) - number_bits(0x1p14f);
    else
        code = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120u << 3);
    return (uint8_t)(sign | (code < 0x7e ? code : 0x7e));
}

/* Converts one element; `at` may be unaligned. */
static inline float number_element(const void *at, enum kern_dtype dtype) {
    uint16_t half;
    float whole;
    if (dtype == KERN_F32) {
        memcpy(&whole, at, sizeof whole);
        return whole;
    }
    if (dtype == KERN_E4M3) return number_from_e4m3(*(const uint8_t *)at);
    memcpy(&half, at, sizeof half);
    return dtype == KERN_BF16 ? number_from_bf16(half) : number_from_f16(half);
}

/* Converts a key or value from a cache's dtype, F32, BF16 or E4M3, to floats; and back, to
 * nearest. */
static inline void number_read_row(float *to, const void *row, int count, enum kern_dtype dtype) {
    const uint16_t *half = (const uint16_t *)row;
    const uint8_t *byte = (const uint8_t *)row;
    if (dtype == KERN_F32)
        memcpy(to, row, (size_t)count * sizeof *to);
    else if (dtype == KERN_BF16)
        for (int i = 0; i < count; i++) to[i] = number_from_bf16(half[i]);
    else
        for (int i = 0; i < count; i++) to[i] = number_from_e4m3(byte[i]);
}

static inline void number_write_row(void *row, const float *from, int count,
                                    enum kern_dtype dtype) {
    uint16_t *half = (uint16_t *)row;
    uint8_t *byte = (uint8_t *)row;
    if (dtype == KERN_F32)
        memcpy(row, from, (size_t)count * sizeof *from);
    else if (dtype == KERN_BF16)
        for (int i = 0; i < count; i++) half[i] = number_to_bf16(from[i]);
    else
        for (int i = 0; i < count; i++) byte[i] = number_to_e4m3(from[i]);
}

#endif
