/* Converts a row to E4M3, over simd.h. A maximum is the same in any order and a rounding concerns
 * one number alone, so every path gives the same result. */
#include "kernels/cpu/simd.h"
#include "kernels/cpu/vec.h"
#include "kernels/quantize.h"

/* Loads sixteen elements in the file's dtype, unaligned. */
SIMD v16 load_whole(const char *at, const enum kern_dtype dtype) {
    float whole[16];
    uint16_t half[16];
    if (dtype == KERN_F32) {
        memcpy(whole, at, sizeof whole);
        return v16_load(whole);
    }
    memcpy(half, at, sizeof half);
    return dtype == KERN_BF16 ? v16_load_bf16(half) : v16_load_f16(half);
}

/* Loads `left` elements; the others are 0. */
static v16 load_part(const char *at, enum kern_dtype dtype, int64_t left) {
    float part[16] = {0};
    for (int64_t i = 0; i < left; i++)
        part[i] = number_element(at + (size_t)i * kern_dtype_bytes(dtype), dtype);
    return v16_load(part);
}

/* The largest magnitude; not finite if any number is not, because 0 times such a number is NaN. The
 * remainder after whole vectors is loaded first, so that no call interrupts the loop's use of
 * registers. */
SIMD float vec_quantize_largest(const char *row, int64_t cols, const enum kern_dtype dtype) {
    const size_t size = kern_dtype_bytes(dtype);
    const int64_t whole = cols / 16 * 16;
    v16 zero = v16_set(0), rest = load_part(row + (size_t)whole * size, dtype, cols - whole);
    v16 most = v16_max(rest, v16_sub(zero, rest)), none = v16_mul(rest, zero);
    for (int64_t i = 0; i < whole; i += 16) {
        v16 x = load_whole(row + (size_t)i * size, dtype);
        most = v16_max(most, v16_max(x, v16_sub(zero, x)));
        none = v16_fma(x, zero, none);
    }
    return v16_sum(none) == 0 ? v16_most(most) : NAN;
}

SIMD void vec_quantize_write_codes(uint8_t *codes, const char *row, int64_t cols,
                                   const enum kern_dtype dtype, float scale) {
    const size_t size = kern_dtype_bytes(dtype);
    const int64_t whole = cols / 16 * 16;
    uint8_t last[16];
    v16 rest = load_part(row + (size_t)whole * size, dtype, cols - whole), by = v16_set(1 / scale);
    v16_store_e4m3(last, v16_mul(rest, by));
    memcpy(codes + whole, last, (size_t)(cols - whole));
    for (int64_t i = 0; i < whole; i += 16)
        v16_store_e4m3(codes + i, v16_mul(load_whole(row + (size_t)i * size, dtype), by));
}

SIMD float quantize(uint8_t *codes, const char *row, int64_t cols, const enum kern_dtype dtype) {
    float most = vec_quantize_largest(row, cols, dtype);
    if (!isfinite(most)) return most;
    float scale = quantize_scale(most);
    vec_quantize_write_codes(codes, row, cols, dtype, scale);
    return scale;
}

float VEC(quantize_row)(uint8_t *codes, const void *row, int64_t cols, enum kern_dtype dtype) {
    return dtype == KERN_F32    ? quantize(codes, row, cols, KERN_F32)
           : dtype == KERN_BF16 ? quantize(codes, row, cols, KERN_BF16)
                                : quantize(codes, row, cols, KERN_F16);
}
