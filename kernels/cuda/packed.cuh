/* Weights in blocks (kernels/blocks.h) on the device, packed for mma.m16n8k16.
 *
 * A tile is PACKED_OUTPUTS outputs of one block of 32 inputs: the A operand of two mma, one for
 * each half of the block. Lane l of a warp finds its part of a tile in consecutive bytes, so that a
 * warp reads a tile by one instruction: 16 bytes a lane in 8 bits, 8 in 4 bits. Numbers are stored
 * without sign: n + PACKED_MIDDLE, or n where it is not negative. Tiles lie one after the other by
 * inputs, then by outputs; the last outputs may be padded with zeros. Factors of a tile: scales
 * [PACKED_OUTPUTS], those of the second half where halves differ, then terms alike, in float32. */
#ifndef KEEPD_KERNELS_CUDA_PACKED_CUH
#define KEEPD_KERNELS_CUDA_PACKED_CUH

#include "kernels/blocks.h"
#include "kernels/cuda/internal.h"

#define PACKED_OUTPUTS 16
#define PACKED_WARP    32

/* A weight as kernels see it. */
struct packed {
    const uint8_t *codes;
    const float *factors;
    int32_t dtype;  /* KERN_Q8 to KERN_Q8SM */
    int32_t blocks; /* blocks of a row */
    int64_t outputs;
};

static __host__ __device__ __forceinline__ bool packed_narrow(int dtype) {
    return dtype == KERN_Q4 || dtype == KERN_Q4M;
}

static __host__ __device__ __forceinline__ bool packed_split(int dtype) {
    return dtype == KERN_Q8S || dtype == KERN_Q8SM;
}

static __host__ __device__ __forceinline__ bool packed_least(int dtype) {
    return dtype == KERN_Q8M || dtype == KERN_Q4M || dtype == KERN_Q8SM;
}

/* Subtracted from a stored number. */
static __host__ __device__ __forceinline__ int packed_middle(int dtype) {
    return dtype == KERN_Q4 ? 8 : dtype == KERN_Q4M ? 0 : 128;
}

static __host__ __device__ __forceinline__ int packed_lane_bytes(int dtype) {
    return packed_narrow(dtype) ? 8 : 16;
}

static __host__ __device__ __forceinline__ int packed_factors(int dtype) {
    return PACKED_OUTPUTS * (1 + packed_split(dtype)) * (1 + packed_least(dtype));
}

/* Where the number of output `out` and input `in` of a tile lies: lane, and its number of 16. With
 * g, t, a[i] of ptx.cuh: inputs 4t to 4t + 3 of each half are columns 2t, 2t + 1, 2t + 8, 2t + 9 of
 * its mma, so that a lane reads consecutive activations. */
static __host__ __device__ __forceinline__ int packed_lane(int out, int in) {
    return out % 8 * 4 + in % 16 / 4;
}

static __host__ __device__ __forceinline__ int packed_place(int out, int in) {
    return in / 16 * 8 + (in % 4 / 2 * 2 + out / 8) * 2 + in % 2;
}

/* Bits of a number in the 8 or 16 bytes of its lane: a step's eight numbers of 4 bits are one word,
 * first of pairs in the low half. */
static __host__ __device__ __forceinline__ int packed_bit(int dtype, int place) {
    if (!packed_narrow(dtype)) return 8 * place;
    return place / 8 * 32 + 16 * (place % 2) + 4 * (place % 8 / 2);
}

static __device__ __forceinline__ int64_t packed_tile(const struct packed &w, int64_t out,
                                                      int block) {
    return out / PACKED_OUTPUTS * w.blocks + block;
}

/* Unpacks one number, for uses other than matrix products. */
static __device__ __forceinline__ float packed_number(const struct packed &w, int64_t out,
                                                      int64_t in) {
    int o = (int)(out % PACKED_OUTPUTS), i = (int)(in % KERN_BLOCK);
    int64_t tile = packed_tile(w, out, (int)(in / KERN_BLOCK));
    int bytes = packed_lane_bytes(w.dtype), bit = packed_bit(w.dtype, packed_place(o, i));
    uint32_t code = w.codes[(tile * PACKED_WARP + packed_lane(o, i)) * bytes + bit / 8];
    if (packed_narrow(w.dtype)) code = code >> bit % 8 & 15;
    const int half = packed_split(w.dtype) ? i / 16 * PACKED_OUTPUTS : 0;
    const float *factors = w.factors + tile * packed_factors(w.dtype) + half + o;
    float value = __fmul_rn(*factors, (float)((int)code - packed_middle(w.dtype)));
    if (packed_least(w.dtype))
        value = __fadd_rn(value, factors[(1 + packed_split(w.dtype)) * PACKED_OUTPUTS]);
    return value;
}

/* packed.cu */
struct packed packed_of(const struct kern_weight *weight);
/* The format that parts of one weight have together, without loss. */
enum kern_dtype packed_join(enum kern_dtype a, enum kern_dtype b);
size_t packed_code_bytes(const struct kern_weight *weight);
size_t packed_factor_count(const struct kern_weight *weight);
/* Packs the parts into the weight's memory; ERR_NOMEM. */
int packed_upload(struct cuda *cuda, const struct kern_weight *weight,
                  const struct kern_matrix *parts);
/* Sums of activations that products of a row need as scratch; 0: the format has no terms. */
size_t packed_sums(const struct kern_weight *weight);
/* y[rows][outputs] (+)= x w^T (+ bias), with x in float16. An output's sum depends on its row
 * alone. `sums`: scratch, [rows][packed_sums]. */
void packed_multiply(struct cuda *cuda, float *y, const void *x, const struct kern_weight *weight,
                     const float *bias, float *sums, int rows, bool add);

#endif
