#include "kernels/cuda/reduce.h"

#define THREADS 256

template <class T> static __device__ __forceinline__ T combine(T a, T b, int op) {
    if (op == COMM_SUM) return a + b;
    return (op == COMM_MAX ? b > a : b < a) ? b : a;
}

/* A thread per element; pair by pair up the tree. */
template <class T, int RANKS> static __global__ void k_reduce(const struct reduce_args a) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    T level[RANKS];
    if (i >= a.count) return;
#pragma unroll
    for (int r = 0; r < RANKS; r++) level[r] = static_cast<const T *>(a.from[r])[i];
#pragma unroll
    for (int left = RANKS / 2; left > 0; left /= 2)
#pragma unroll
        for (int r = 0; r < left; r++) level[r] = combine(level[r + r], level[r + r + 1], a.op);
    for (int r = 0; r < a.to_count; r++) static_cast<T *>(a.to[r])[i] = level[0];
}

template <class T> static void reduce(struct device *device, const struct reduce_args &args) {
    unsigned blocks = blocks_for(args.count, THREADS);
    if (args.ranks == 2) LAUNCH(device, (k_reduce<T, 2>), blocks, THREADS, 0, args);
    if (args.ranks == 4) LAUNCH(device, (k_reduce<T, 4>), blocks, THREADS, 0, args);
    if (args.ranks == 8) LAUNCH(device, (k_reduce<T, 8>), blocks, THREADS, 0, args);
}

void device_reduce(struct device *device, const struct reduce_args *args, enum comm_type type) {
    switch (type) {
    case COMM_F32:
        reduce<float>(device, *args);
        break;
    case COMM_F64:
        reduce<double>(device, *args);
        break;
    case COMM_U32:
        reduce<uint32_t>(device, *args);
        break;
    case COMM_U64:
        reduce<unsigned long long>(device, *args);
        break;
    case COMM_I64:
        reduce<long long>(device, *args);
        break;
    }
}

/* A thread per four numbers. */
static __global__ void k_add_parts(float *y, const float *parts, int part_count, int64_t count,
                                   bool add) {
    ptx_overlap_grids();
    int64_t i = 4 * ((int64_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= count) return;
    float4 sum = *(const float4 *)(add ? y + i : parts + i);
#pragma unroll 8
    for (int part = add ? 0 : 1; part < part_count; part++) {
        const float4 more = *(const float4 *)(parts + part * count + i);
        sum = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
    }
    *(float4 *)(y + i) = sum;
}

void device_add_parts(struct device *device, float *y, const float *parts, int part_count,
                      int64_t count, bool add) {
    CHECK(count % 4 == 0);
    LAUNCH_OVERLAPPED(device, k_add_parts, blocks_for(count, 4 * THREADS), THREADS, 0, y, parts,
                      part_count, count, add);
}
