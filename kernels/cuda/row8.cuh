/* Keys and values as codes with a factor, KERN_ROW8, by the lanes of a warp: what kernels/row.c
 * defines, bit for bit, for heads of a power of two of numbers. A row is in the hands of
 * head_dim / 8 neighbouring lanes, eight numbers each; a warp has whole rows, and all of its lanes
 * call these functions together. */
#ifndef KEEPD_KERNELS_CUDA_ROW8_CUH
#define KEEPD_KERNELS_CUDA_ROW8_CUH

#include <float.h>

#include "kernels/cuda/pages.cuh"

#define ROW8_LEVEL    127.0f      /* ROW_LEVEL of kernels/row.h */
#define ROW8_ROUNDING 12582912.0f /* 3 * 2^22: adding it leaves the nearest whole number */

/* Sums and differences of numbers 1, 2, 4 ... apart, of 8 `lanes` numbers. */
static __device__ __forceinline__ void row8_sums(float x[CHUNK_DIMS], int lanes) {
#pragma unroll
    for (int half = 1; half < CHUNK_DIMS; half *= 2)
#pragma unroll
        for (int i = 0; i < CHUNK_DIMS; i++) {
            if (i & half) continue;
            float a = x[i], b = x[i + half];
            x[i] = __fadd_rn(a, b);
            x[i + half] = __fadd_rn(a, -b);
        }
    for (int by = 1; by < lanes; by *= 2)
#pragma unroll
        for (int i = 0; i < CHUNK_DIMS; i++) {
            float other = __shfl_xor_sync(WARP_ALL, x[i], by);
            x[i] = __fadd_rn(threadIdx.x & by ? -x[i] : x[i], other);
        }
}

/* The factor that makes the matrix of `dim` rows orthogonal. */
static __device__ __forceinline__ float row8_scale(int dim) {
    return __fdiv_rn(1, __fsqrt_rn((float)dim));
}

/* Rotates a row, there and back. */
static __device__ __forceinline__ void row8_rotate(float x[CHUNK_DIMS], int lanes) {
    float by = row8_scale(CHUNK_DIMS * lanes);
    row8_sums(x, lanes);
#pragma unroll
    for (int i = 0; i < CHUNK_DIMS; i++) x[i] = __fmul_rn(x[i], by);
}

/* The largest magnitude of `count` numbers; INFINITY if one of them is not finite. */
static __device__ __forceinline__ float row8_most(const float *x, int count) {
    float most = 0;
#pragma unroll
    for (int i = 0; i < count; i++)
        most = fmaxf(most, fabsf(x[i]) <= FLT_MAX ? fabsf(x[i]) : INFINITY);
    return most;
}

/* The factor of a row, from its largest magnitude. */
static __device__ __forceinline__ uint16_t row8_factor(float most) {
    if (most > FLT_MAX) return 0x7fc0; /* NaN */
    return (uint16_t)((__float_as_uint(__fdiv_rn(most, ROW8_LEVEL)) + 0xffffu) >> 16);
}

/* The code of a number of a row with this factor, in the low byte. */
static __device__ __forceinline__ uint32_t row8_code(float x, uint16_t factor) {
    if (factor == 0 || factor > 0x7f80) return 0;
    float t = __fdiv_rn(x, bf16_float(factor));
    t = fminf(fmaxf(t, -ROW8_LEVEL), ROW8_LEVEL);
    return (uint32_t)(int32_t)__fadd_rn(__fadd_rn(t, ROW8_ROUNDING), -ROW8_ROUNDING) & 255;
}

/* Rounds and writes piece `piece` of a rotated row; `writes` is false in lanes without one, which
 * have zeros. */
static __device__ __forceinline__ void row8_write(const struct pages &p, int32_t page, int side,
                                                  int row, int piece, const float x[CHUNK_DIMS],
                                                  bool writes) {
    float most = row8_most(x, CHUNK_DIMS);
    for (int by = 1; by < p.head_dim / CHUNK_DIMS; by *= 2)
        most = fmaxf(most, __shfl_xor_sync(WARP_ALL, most, by));
    uint16_t factor = row8_factor(most);
    uint2 codes = {0, 0};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        codes.x |= row8_code(x[i], factor) << 8 * i;
        codes.y |= row8_code(x[4 + i], factor) << 8 * i;
    }
    if (!writes) return;
    *(uint2 *)pages_piece(p, page, side, row, piece) = codes;
    if (piece == 0) *pages_factor(p, page, side, row) = factor;
}

#endif
