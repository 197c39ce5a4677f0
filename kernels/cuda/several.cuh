/* Reads and writes of several consecutive numbers by one instruction: up to 128 bits. */
#ifndef KEEPD_KERNELS_CUDA_SEVERAL_CUH
#define KEEPD_KERNELS_CUDA_SEVERAL_CUH

#include "kernels/cuda/ptx.cuh"
#include "kernels/kern.h"

/* WIDTH: 1, 2 or 4. Its address is a multiple of its size. */
template <int WIDTH> struct alignas(4 * WIDTH) several { float of[WIDTH]; };

template <int WIDTH>
static __device__ __forceinline__ struct several<WIDTH> read_several(const float *from) {
    return *(const struct several<WIDTH> *)from;
}

template <int WIDTH>
static __device__ __forceinline__ void write_several(float *to, const struct several<WIDTH> &v) {
    *(struct several<WIDTH> *)to = v;
}

/* Rounds two numbers to BF16 or F16. */
static __device__ __forceinline__ uint32_t pack_pair(float low, float high, enum kern_dtype dtype) {
    return dtype == KERN_F16 ? ptx_pack_f16(low, high) : ptx_pack_bf16(low, high);
}

/* Writes y, and y rounded to 16 bits where `half` is not NULL. */
template <int WIDTH>
static __device__ __forceinline__ void
write_rounded(float *y, uint16_t *half, const struct several<WIDTH> &v, enum kern_dtype dtype) {
    write_several<WIDTH>(y, v);
    if (!half) return;
    const uint32_t low = pack_pair(v.of[0], v.of[WIDTH > 1], dtype);
    const uint2 pairs = {low, pack_pair(v.of[WIDTH / 2], v.of[WIDTH - 1], dtype)};
    if (WIDTH == 1)
        *half = (uint16_t)low;
    else if (WIDTH == 2)
        *(uint32_t *)half = low;
    else
        *(uint2 *)half = pairs;
}

#endif
