/* Layers with a recurrent state (kern_ops.short_conv, delta, mamba): what their sources share. A
 * state's numbers are in pages (pages.cuh), in the order that kern_delta_head_floats and
 * kern_mamba_head_floats describe; kernels read them when a span's rows begin and write them behind
 * the last row, and keep them in registers meanwhile. Rows of a span follow each other in one
 * thread or warp, with the same operations for each, so a state has the same bits for every split
 * of a text over steps and beside any other text. */
#ifndef KEEPD_KERNELS_CUDA_STATE_CUH
#define KEEPD_KERNELS_CUDA_STATE_CUH

#include "kernels/cuda/internal.h"

/* Channels whose convolutions lie side by side in rows and in taps and, unit after unit, in the
 * state. */
struct conv_part {
    float *x;       /* the first row's channels; results take their place (conv_args.y) */
    int32_t stride; /* numbers from one row to the next */
    int32_t channels;
    int32_t tap;             /* number of the first channel in the model */
    int32_t unit;            /* channels of a unit of the state */
    int32_t at, unit_floats; /* numbers of the state before the first channel's; of a unit */
};
#define CONV_PARTS_MAX 3

struct conv_args {
    struct pages pages;
    const struct span *spans;
    const float *taps; /* [channels, width] of the model */
    const float *bias; /* [channels] of the model, or NULL */
    /* Short convolutions alone, with one part: factors of x and of the sums, in rows as x; and
     * results apart from x. Otherwise results are SiLU of the sums. */
    const float *before, *behind;
    float *y;
    int64_t y_stride;
    struct rounded round; /* y for the next product, or none */
    int32_t width;
    int32_t row, count; /* the state's row of pages; number of parts */
    /* The last member, and without padding: gcc 12 clears padding behind an array of structs
     * (launch_put) in the wrong place. */
    struct conv_part parts[CONV_PARTS_MAX];
};

/* conv.cu: fills in pages, spans and row, and computes all channels of the batch. */
void conv_channels(struct cuda *cuda, int state, struct conv_args *args,
                   const struct kern_batch *batch);

/* Heads whose states are matrices of `dim` rows and `columns` columns, in blocks of
 * KERN_STATE_COLUMNS columns. A token of a head has vectors k and q of `dim` numbers, v of
 * `columns`; see k_scan. */
struct scan_args {
    struct pages pages;
    const struct span *spans;
    int32_t row;                         /* the state's row of pages */
    int32_t heads, first;                /* the rank's; number of the first in the model */
    int32_t dim, columns;                /* dim: a multiple of 4 */
    const float *k, *q;                  /* the first row's first vectors */
    int64_t vectors_stride;              /* numbers from one row to the next */
    int32_t vectors_first, heads_vector; /* head h has vector (vectors_first + h) / heads_vector */
    const float *v;                      /* the first row's, of all heads */
    int64_t v_stride;                    /* numbers from one row to the next */
    float *y;                            /* [rows, heads, columns] */
    struct rounded round;                /* y for the next product, or none */
    int32_t at, unit_floats, unit_heads; /* numbers of the state before the first matrix, and
                                            from one unit of so many heads to the next */
    const float *rates;                  /* the first row's of all heads of the model */
    int64_t rates_stride;                /* numbers from one row to the next */
    const float *decays;                 /* the same of what decays follow from, or NULL */
    const float *decay, *bias;           /* [heads] of the model */
    const float *skip, *gates;           /* Mamba-2 alone: of all heads of the model; rows as v */
};

/* scan.cu: fills in pages, spans and row. Corrects: a gated delta rule; otherwise Mamba-2. */
void scan_heads(struct cuda *cuda, int state, struct scan_args *args, bool corrects,
                const struct kern_batch *batch);

static __device__ __forceinline__ float state_warp_sum(float x) {
    for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(WARP_ALL, x, by);
    return x;
}

/* Memory for a layer's results in 16 bits, which its last launch writes for the product behind it;
 * none for other formats, which need a whole row. */
static inline struct rounded state_rounded(struct cuda *cuda, int rows, int64_t cols) {
    const struct rounded none = {}, round = rounded_take(cuda, rows, cols);
    return round.scale ? none : round;
}

/* Number `at` of the results, and of what is written for the product. */
static __device__ __forceinline__ void state_write(float *y, const struct rounded &round,
                                                   int64_t at, float x) {
    y[at] = x;
    if (!round.x) return;
    const uint32_t pair = round.dtype == KERN_F16 ? ptx_pack_f16(x, 0) : ptx_pack_bf16(x, 0);
    ((uint16_t *)round.x)[at] = (uint16_t)pair;
}

static __device__ __forceinline__ float silu(float x) {
    return x / (1.0f + expf(-x));
}

/* Kernels with a warp for each (row, head): the warp's own, and the thread's lane in it. */
#define STATE_THREADS 256
struct state_item {
    int64_t row;
    int head, lane;
};

static __device__ __forceinline__ struct state_item state_item_of(int heads) {
    const int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    return {i / heads, (int)(i % heads), (int)(threadIdx.x % 32)};
}

static inline unsigned state_item_blocks(int64_t rows, int heads) {
    return blocks_for(rows * heads, STATE_THREADS / 32);
}

#endif
