/* The number formats of weights and caches, as float32 and back. Pure; for every backend. */
#ifndef KEEPD_KERNELS_NUMBER_H
#define KEEPD_KERNELS_NUMBER_H

#include <stdint.h>
#include <string.h>

#include "kernels/kern.h"

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

/* Nearest even; NaN stays NaN (quiet). */
static inline uint16_t number_to_bf16(float x) {
    uint32_t bits = number_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Exact: float32 has every value of float16, small ones included. */
static inline float number_from_f16(uint16_t x) {
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, exponent = x >> 10 & 31, mantissa = x & 1023;
    if (exponent == 31) return number_from_bits(sign | 0x7f800000u | mantissa << 13);
    if (exponent) return number_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    float tiny = (float)mantissa * 0x1p-24f;
    return sign ? -tiny : tiny;
}

/* One element of a file's matrix; `at` may be unaligned. */
static inline float number_element(const void *at, enum kern_dtype dtype) {
    uint16_t half;
    float whole;
    if (dtype == KERN_F32) {
        memcpy(&whole, at, sizeof whole);
        return whole;
    }
    memcpy(&half, at, sizeof half);
    return dtype == KERN_BF16 ? number_from_bf16(half) : number_from_f16(half);
}

#endif
