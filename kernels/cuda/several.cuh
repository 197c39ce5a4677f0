/* Reads and writes of several consecutive numbers by one instruction: up to 128 bits. */
#ifndef KEEPD_KERNELS_CUDA_SEVERAL_CUH
#define KEEPD_KERNELS_CUDA_SEVERAL_CUH

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

#endif
