/* Operations of a whole block. Every thread of the block calls them. */
#ifndef KEEPD_KERNELS_CUDA_BLOCK_CUH
#define KEEPD_KERNELS_CUDA_BLOCK_CUH

#include "kernels/cuda/ptx.cuh"

/* Sum of `value` over the threads before this one; *total over all. `room`: a T per warp. */
template <class T> static __device__ T block_scan(T value, T *room, T *total) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    T sum = value, before = 0, all = 0;
    for (int by = 1; by < 32; by *= 2) {
        T other = __shfl_up_sync(WARP_ALL, sum, by);
        if (lane >= by) sum += other;
    }
    __syncthreads(); /* `room` may still be read from an earlier call */
    if (lane == 31) room[warp] = sum;
    __syncthreads();
    for (int w = 0; w < (int)blockDim.x / 32; w++) {
        if (w < warp) before += room[w];
        all += room[w];
    }
    *total = all;
    return before + sum - value;
}

/* The bin that holds the `wanted`-th item counted from the last of BINS bins, starting at 1;
 * *before = items in the bins after it. At least `wanted` items must exist. Threads: a divisor of
 * BINS. `bins`: Ts by number; `room`: a T per warp; `found`: the result. All in shared memory. */
template <int BINS, class Bins, class T>
static __device__ int block_pick(const Bins &bins, T wanted, T *room, int *found, T *before) {
    const int each = BINS / (int)blockDim.x, top = BINS - 1 - (int)threadIdx.x * each;
    T mine = 0, total;
    for (int i = 0; i < each; i++) mine += bins[top - i];
    T above = block_scan(mine, room, &total);
    __syncthreads();
    if (above < wanted && wanted <= above + mine) {
        int bin = top;
        while (above + bins[bin] < wanted) above += bins[bin--];
        *found = bin;
        room[0] = above;
    }
    __syncthreads();
    *before = room[0];
    int bin = *found;
    __syncthreads();
    return bin;
}

/* The sum over the block, to every thread: always in the same order. `room`: a T per warp. */
template <class T> static __device__ T block_total(T x, T *room) {
    for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(WARP_ALL, x, by);
    __syncthreads(); /* `room` may still be read from an earlier call */
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
    __syncthreads();
    T sum = 0;
    for (int w = 0; w < (int)blockDim.x / 32; w++) sum += room[w];
    return sum;
}

template <class T> static __device__ __forceinline__ T larger(T a, T b) {
    return b > a ? b : a;
}

/* Ignores NaN. */
template <> __device__ __forceinline__ float larger(float a, float b) {
    return fmaxf(a, b);
}

/* The largest value of the block, returned to every thread. `room`: a T per warp. */
template <class T> static __device__ T block_most(T x, T *room) {
    for (int by = 16; by > 0; by /= 2) x = larger<T>(x, __shfl_xor_sync(WARP_ALL, x, by));
    __syncthreads();
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
    __syncthreads();
    for (int w = 0; w < (int)blockDim.x / 32; w++) x = larger<T>(x, room[w]);
    return x;
}

#endif
