#include "tests/emu/ptx_play.h"

#include "kernels/cuda/internal.h"

#define THREADS 64

static __device__ __forceinline__ uint32_t play_word(int which, uint32_t a, uint32_t b) {
    const float x = __uint_as_float(a), y = __uint_as_float(b);
    switch (which) {
    case PTX_EXP2:
        return __float_as_uint(ptx_exp2(x));
    case PTX_PACK_BF16:
        return ptx_pack_bf16(x, y);
    case PTX_PACK_F16:
        return ptx_pack_f16(x, y);
    case PTX_PACK_E4M3:
        return ptx_pack_e4m3(x, y);
    case PTX_F16_OF_E4M3:
        return ptx_f16_of_e4m3(a);
    case PTX_UNPACK_F16_LOW:
        return __float_as_uint(ptx_unpack_f16(a).x);
    case PTX_UNPACK_F16_HIGH:
        return __float_as_uint(ptx_unpack_f16(a).y);
    case PTX_MUL_F16:
        return ptx_mul_f16(a, b);
    case PTX_SUB_F16:
        return ptx_sub_f16(a, b);
    case PTX_SUB_BF16:
        return ptx_sub_bf16(a, b);
    default:
        return ptx_f16_of_bytes(a, which == PTX_F16_OF_HIGH_BYTES);
    }
}

static __global__ void k_words(int which, uint32_t *out, const uint32_t *a, const uint32_t *b,
                               int count) {
    ptx_overlap_grids();
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < count) out[i] = play_word(which, a[i], b[i]);
}

/* Fragments come from shared memory by ldmatrix, as in the attention kernels. A row of a has 32
 * bytes; one of b has 16 bytes of numbers, or 32 of bytes. */
static __global__ void k_product(int which, uint32_t *out, const uint32_t *a, const uint32_t *b) {
    SHARED_MEMORY(shared);
    uint32_t *words = (uint32_t *)shared, fragment_a[4], fragment_b[4], c[4];
    const int lane = (int)threadIdx.x, i = lane / 8, r = lane % 8, g = lane / 4, t = lane % 4;
    const bool bytes = which == PTX_MMA_S8 || which == PTX_MMA_U8;
    ptx_overlap_grids();
    for (int w = lane; w < 128; w += 32) words[w] = a[w];
    for (int w = lane; w < 64; w += 32) words[128 + w] = b[w];
    __syncthreads();
    ptx_load_matrix(fragment_a, shared + 32 * (r + 8 * (i & 1)) + 16 * (i >> 1));
    if (bytes)
        ptx_load_matrix(fragment_b, shared + 512 + 32 * r + 16 * (i & 1));
    else
        ptx_load_matrix_transposed(fragment_b, shared + 512 + 16 * (r + 8 * (i & 1)));
    for (int n = 0; n < 4; n++) c[n] = out[(g + 8 * (n >> 1)) * 8 + 2 * t + (n & 1)];
    float *sums = (float *)c;
    int32_t *counts = (int32_t *)c;
    if (which == PTX_MMA_BF16) ptx_mma(sums, fragment_a, fragment_b[0], fragment_b[1]);
    if (which == PTX_MMA_F16) ptx_mma_f16(sums, fragment_a, fragment_b[0], fragment_b[1]);
    if (which == PTX_MMA_S8) ptx_mma_s8(counts, fragment_a, fragment_b[0], fragment_b[1]);
    if (which == PTX_MMA_U8) ptx_mma_u8(counts, fragment_a, fragment_b[0], fragment_b[1]);
    for (int n = 0; n < 4; n++) out[(g + 8 * (n >> 1)) * 8 + 2 * t + (n & 1)] = c[n];
}

/* Two phases of one barrier. */
static __global__ void k_copy(bool bulk, char *to, const char *from, int bytes) {
    SHARED_MEMORY(shared);
    uint64_t *barrier = (uint64_t *)shared;
    char *part = shared + 128;
    const int thread = (int)threadIdx.x;
    const bool one = bulk && ptx_has_bulk();
    ptx_overlap_grids();
    if (thread == 0) {
        ptx_barrier_init(barrier, one ? 1 : THREADS);
        ptx_barrier_init_fence();
    }
    __syncthreads();
    for (uint32_t phase = 0; phase < 2; phase++) {
        const char *source = from + phase * (size_t)bytes;
        if (one && thread == 0) {
            ptx_barrier_expect(barrier, (uint32_t)bytes);
            ptx_bulk_copy(part, source, (uint32_t)bytes, barrier);
        }
        if (!one) {
            for (int at = 16 * thread; at < bytes; at += 16 * THREADS)
                ptx_async_copy(part + at, source + at);
            ptx_async_arrive(barrier);
        }
        ptx_barrier_wait(barrier, phase);
        for (int at = thread; at < bytes; at += THREADS) to[phase * (size_t)bytes + at] = part[at];
        ptx_shared_fence();
        ptx_named_barrier(1, THREADS);
    }
}

void ptx_play_words(struct kern *kern, enum ptx_word which, uint32_t *out, const uint32_t *a,
                    const uint32_t *b, int count) {
    LAUNCH_OVERLAPPED(cuda_of(kern)->device, k_words, blocks_for(count, THREADS), THREADS, 0,
                      (int)which, out, a, b, count);
}

void ptx_play_product(struct kern *kern, enum ptx_product which, uint32_t *c, const void *a,
                      const void *b) {
    LAUNCH_OVERLAPPED(cuda_of(kern)->device, k_product, 1, 32, 768, (int)which, c,
                      static_cast<const uint32_t *>(a), static_cast<const uint32_t *>(b));
}

void ptx_play_copy(struct kern *kern, bool bulk, void *to, const void *from, int bytes) {
    LAUNCH_OVERLAPPED(cuda_of(kern)->device, k_copy, 1, THREADS, 128 + (size_t)bytes, bulk,
                      static_cast<char *>(to), static_cast<const char *>(from), bytes);
}
