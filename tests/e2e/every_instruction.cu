/* Every function of kernels/cuda/ptx.cuh and fetch.cuh: a short compilation shows that an
 * architecture has them all (test_cuda_build.py). Nothing runs it. */
#include "kernels/cuda/fetch.cuh"

__global__ void k_every_instruction(struct pages pages, const int32_t *table, uint32_t *out) {
    SHARED_MEMORY(shared);
    uint64_t *barrier = (uint64_t *)(shared + PAGE_BYTES);
    ptx_overlap_grids();
    if (threadIdx.x == 0) fetch_open(barrier, 1, (int)blockDim.x);
    __syncthreads();
    fetch_pages({(int)threadIdx.x, (int)blockDim.x}, pages, table, 1, {0, PAGE_BYTES, PAGE_BYTES},
                shared, barrier);
    ptx_barrier_wait(barrier, 0);
    uint32_t a[4], b[4];
    float c[4] = {0, 0, 0, 0};
    ptx_load_matrix(a, shared + 16 * threadIdx.x);
    ptx_load_matrix_transposed(b, shared + 16 * threadIdx.x);
    ptx_mma(c, a, b[0], b[1]);
    ptx_mma_f16(c, a, b[2], b[3]);
    int32_t whole[4] = {0, 0, 0, 0};
    ptx_mma_s8(whole, a, b[0], b[1]);
    ptx_mma_u8(whole, a, b[2], b[3]);
    ptx_named_barrier(1, (int)blockDim.x);
    float2 wide = ptx_unpack_f16(ptx_f16_of_e4m3(ptx_pack_e4m3(c[0], c[1])));
    out[0] = ptx_pack_bf16(wide.x, wide.y) ^ ptx_pack_f16(c[2], ptx_exp2(c[3]));
    out[1] = ptx_mul_f16(ptx_sub_f16(a[0], a[1]), ptx_f16_of_bytes(a[2], true));
    out[2] = ptx_sub_bf16((uint32_t)whole[0], (uint32_t)whole[1]);
    ptx_shared_fence();
}
