/* Matrices that kernels multiply number by number, not on tensor cores: many small ones, such as
 * those of experts and of the heads of latent attention. */
#ifndef KEEPD_KERNELS_CUDA_MATRIX_CUH
#define KEEPD_KERNELS_CUDA_MATRIX_CUH

#include "kernels/cuda/packed.cuh"

#define MATRIX_ROWS 8 /* rows that are multiplied with a number of the matrix together */

/* A weight in device memory. */
struct matrix {
    const void *data;
    const float *scale; /* E4M3: [rows]; in blocks: factors; or NULL */
    int32_t dtype;
};

/* experts.cu: the matrices as an array in device memory, which the caller frees; NULL: there is no
 * memory. */
struct matrix *matrices_upload(struct cuda *cuda, struct kern_weight *const *weights, int count);

static __device__ __forceinline__ float matrix_number(const struct matrix &m, int64_t row,
                                                      int column, int cols) {
    const int64_t i = row * cols + column;
    if (m.dtype >= KERN_Q8)
        return packed_number(
            {static_cast<const uint8_t *>(m.data), m.scale, m.dtype, cols / KERN_BLOCK, 0}, row,
            column);
    if (m.dtype == KERN_F32) return static_cast<const float *>(m.data)[i];
    if (m.dtype == KERN_BF16)
        return __uint_as_float((uint32_t) static_cast<const uint16_t *>(m.data)[i] << 16);
    if (m.dtype == KERN_F16) return ptx_unpack_f16(static_cast<const uint16_t *>(m.data)[i]).x;
    return ptx_unpack_f16(ptx_f16_of_e4m3(static_cast<const uint8_t *>(m.data)[i])).x;
}

/* MATRIX_ROWS rows times row `at` of the matrix: lane u gets the product of row u, whose sum has an
 * order that depends on the matrix alone. All lanes of a warp; `rows`: their first numbers. */
static __device__ float matrix_multiply(const struct matrix &m, int64_t at,
                                        const float *const rows[MATRIX_ROWS], int cols, int lane) {
    float sum[MATRIX_ROWS] = {0}, mine = 0;
    for (int i = lane; i < cols; i += 32) {
        float w = matrix_number(m, at, i, cols);
#pragma unroll
        for (int u = 0; u < MATRIX_ROWS; u++) sum[u] = fmaf(w, rows[u][i], sum[u]);
    }
#pragma unroll
    for (int u = 0; u < MATRIX_ROWS; u++) {
        for (int by = 16; by > 0; by /= 2) sum[u] += __shfl_xor_sync(WARP_ALL, sum[u], by);
        if (lane == u) mine = sum[u];
    }
    return m.dtype == KERN_E4M3 ? mine * m.scale[at] : mine;
}

#endif
