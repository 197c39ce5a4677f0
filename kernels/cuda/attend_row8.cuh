/* Attention over pages of codes with factors (KERN_ROW8), for the tiles of attend.cu: 16 rows of
 * one warp and 16 keys. Queries are rotated as the pages' rows are, and so are the results.
 *
 * Queries and keys are multiplied as whole numbers, which needs no conversion of keys: a row of
 * codes in shared memory is what mma.m16n8k32 takes. A query becomes numbers of 16 bits with one
 * factor, its largest magnitude over 32767, as on the CPU (kernels/cpu/vec_rows.h), and two
 * products of bytes, with the high halves and with the low ones. Their sum fits in 32 bits, so
 *
 *   score = float(sum_d query[d] * code[d]) * factor of the query * factor of the key
 *
 * is exact up to the two last multiplications. Attention times the values' factors is rounded to
 * bf16, as attention is where pages are bf16, and the codes become bf16, which is exact: float16
 * would hold more digits, but small attention times a small factor leaves its range. */
#ifndef KEEPD_KERNELS_CUDA_ATTEND_ROW8_CUH
#define KEEPD_KERNELS_CUDA_ATTEND_ROW8_CUH

#include "kernels/cuda/row8.cuh"

#define ROW8_QUERY 32767.0f /* the largest whole number of a query */

/* The queries of this lane's two rows, in the fragments of mma.m16n8k32: q[2 k] has the high bytes
 * of dims 32 k to 32 k + 31, q[2 k + 1] the low ones. by: the rows' factors. Rows without a query
 * are zeros. */
template <int D>
static __device__ __forceinline__ void row8_load_queries(uint32_t q[D / 16][4], float by[2],
                                                         const float *const rows[2], int lane) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float x[D / 16][4];
#pragma unroll
        for (int c = 0; c < D / 16; c++) {
            float4 four = {0, 0, 0, 0};
            if (rows[i]) four = *(const float4 *)(rows[i] + 16 * c + 4 * (lane & 3));
            x[c][0] = four.x, x[c][1] = four.y, x[c][2] = four.z, x[c][3] = four.w;
        }
        float most = row8_most(&x[0][0], D / 4);
        most = fmaxf(most, __shfl_xor_sync(WARP_ALL, most, 1));
        most = fmaxf(most, __shfl_xor_sync(WARP_ALL, most, 2));
        by[i] = __fdiv_rn(most, ROW8_QUERY);
        float times = most > 0 ? __fdiv_rn(ROW8_QUERY, most) : 0;
#pragma unroll
        for (int c = 0; c < D / 16; c++) {
            uint32_t high = 0, low = 0;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint32_t whole = __float_as_uint(
                    __fadd_rn(__fmul_rn(x[c][j], times), ROW8_ROUNDING)); /* low 16 bits */
                low |= (whole & 255) << 8 * j;
                high |= (whole >> 8 & 255) << 8 * j;
            }
            q[c & ~1][i + 2 * (c & 1)] = high;
            q[c | 1][i + 2 * (c & 1)] = low;
        }
    }
}

/* The factors of keys (side 1: of values) `key` and key + 1 of a page in shared memory. */
template <int D>
static __device__ __forceinline__ float2 row8_factors(const char *page, int side, int key) {
    const int P = PAGE_SIDE / D;
    uint32_t pair = *(const uint32_t *)(page + PAGE_BYTES + 2 * (side * P + key));
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

/* s[n][i]: product of row g + 8 (i >> 1) and key 8 n + 2 t + (i & 1) of those from `key` on. */
template <int D>
static __device__ __forceinline__ void row8_scores(const uint32_t q[D / 16][4], const float by[2],
                                                   const char *page, int key, int lane,
                                                   float s[2][4]) {
    int row = key + (lane & 7) + 8 * (lane >> 4), half = lane >> 3 & 1;
    int32_t high[2][4] = {}, low[2][4] = {};
#pragma unroll
    for (int k = 0; k < D / 32; k++) {
        uint32_t b[4];
        ptx_load_matrix(b, page + page_chunk(D, 0, row, 2 * k + half));
#pragma unroll
        for (int n = 0; n < 2; n++) {
            ptx_mma_s8(high[n], q[2 * k], b[2 * n], b[2 * n + 1]);
            ptx_mma_u8(low[n], q[2 * k + 1], b[2 * n], b[2 * n + 1]);
        }
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
        float2 factors = row8_factors<D>(page, 0, key + 8 * n + 2 * (lane & 3));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float whole = __fmul_rn((float)(256 * high[n][i] + low[n][i]), by[i >> 1]);
            s[n][i] = __fmul_rn(whole, i & 1 ? factors.y : factors.x);
        }
    }
}

/* Attention p times a value's factor; where there is none the factor may be stale, and NaN. */
static __device__ __forceinline__ float row8_weight(float p, float factor) {
    return p > 0 ? __fmul_rn(p, factor) : 0;
}

/* o += s times the values of 16 keys, in the layout of e4m3's sums (tile_dim in attend.cuh). */
template <int D>
static __device__ __forceinline__ void row8_add_values(float o[D / 8][4], const char *page, int key,
                                                       int lane, const float s[2][4]) {
    int row = key + (lane & 7) + 8 * (lane >> 3 & 1);
    uint32_t p[4];
#pragma unroll
    for (int n = 0; n < 2; n++) {
        float2 by = row8_factors<D>(page, 1, key + 8 * n + 2 * (lane & 3));
#pragma unroll
        for (int i = 0; i < 2; i++)
            p[2 * n + i] =
                ptx_pack_bf16(row8_weight(s[n][2 * i], by.x), row8_weight(s[n][2 * i + 1], by.y));
    }
#pragma unroll
    for (int n = 0; n < D / 32; n++) {
        uint32_t b[4];
        ptx_load_matrix_transposed(b, page + page_chunk(D, 1, row, 2 * n + (lane >> 4)));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t first = b[2 * i], second = b[2 * i + 1];
            ptx_mma(o[4 * n + 2 * i], p, bf16_of_codes(first), bf16_of_codes(second));
            ptx_mma(o[4 * n + 2 * i + 1], p, bf16_of_codes(first >> 8), bf16_of_codes(second >> 8));
        }
    }
}

#endif
