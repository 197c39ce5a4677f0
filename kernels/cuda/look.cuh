/* Multiplies queries with a chunk of a stream, for the kernels of observe.cu. A block of
 * PRODUCT_THREADS processes PRODUCT_KEYS entries, and as many queries at a time as whole groups fit
 * the rows of a product. */
#ifndef KEEPD_KERNELS_CUDA_LOOK_CUH
#define KEEPD_KERNELS_CUDA_LOOK_CUH

#include "kernels/cuda/evict.cuh"
#include "kernels/cuda/keys.cuh"

static __device__ __forceinline__ int query_at(const struct look &look, int query) {
    return look.query_pos ? look.query_pos[query] : look.origin + query;
}

static __device__ __forceinline__ bool of_logits(const struct look &look) {
    return look.observe.group == KERN_GROUP_MAX_LOGIT || look.observe.group == KERN_GROUP_SUM_LOGIT;
}

/* State of both passes for the current chunk. */
struct work {
    struct product product;
    struct sight *sees;     /* shared, [PRODUCT_ROWS]: what the current queries see */
    struct look_stat *stat; /* shared, [PRODUCT_ROWS] vectors */
    struct look look;
    const struct stream_state *state;
    const int32_t *table;
    int index;      /* index of the state */
    int queries;    /* queries per block */
    int width;      /* vectors per query */
    int base, keys; /* entries [base, base + keys) are in shared memory */
};

template <int D> static __device__ struct work work_open(char *shared) {
    struct work w;
    w.product = product_open<D>(shared);
    w.sees = (struct sight *)(shared + product_shape<D>::SHARED);
    w.stat = (struct look_stat *)(w.sees + PRODUCT_ROWS);
    return w;
}

static __host__ __device__ __forceinline__ int work_bytes() {
    return PRODUCT_ROWS * (int)(sizeof(struct sight) + sizeof(struct look_stat));
}

template <int D>
static __device__ void work_begin(struct work &w, const struct look_args &a, int state) {
    w.index = state;
    w.state = &a.streams.states[state];
    w.look = a.looks[w.state->subject];
    int slot = a.streams.subjects[w.state->subject].slot;
    w.table = pages_table(a.streams.pages, slot, w.state->stream);
    w.queries = product_shape<D>::ROWS / a.group;
    w.width = of_logits(w.look) ? 1 : a.group;
}

/* Returns the number of a state among those of its sequence; `index`: its number among all. */
static __device__ __forceinline__ int look_state(const struct look_args &a, int index) {
    return index - a.streams.subjects[a.streams.states[index].subject].state_first;
}

static __device__ __forceinline__ struct sight *look_sees(const struct look_args &a,
                                                          const struct look &look, int index) {
    return a.sees + look.sees_first + (int64_t)look_state(a, index) * look.query_count;
}

static __device__ __forceinline__ struct look_stat *look_stats(const struct look_args &a,
                                                               const struct look &look, int index) {
    return a.stats + look.stats_first + (int64_t)look_state(a, index) * look.query_count * a.group;
}

static __device__ __forceinline__ struct look_stat *
look_partial(const struct look_args &a, const struct look &look, int index, int item) {
    int first = a.streams.states[index - look_state(a, index)].item;
    return a.partial + look.partial_first + (int64_t)(item - first) * look.query_count * a.group;
}

/* Loads queries [first, first + count) into the rows of the product, and what they see. */
template <int D>
static __device__ void work_queries(const struct work &w, const struct look_args &a, int first,
                                    int count) {
    typedef product_shape<D> S;
    const int head = w.state->place.head * a.group;
    const int64_t before = a.streams.pages.layer_places[w.state->place.layer].query;
    const uint16_t *from = w.look.queries + before * w.look.layer_stride;
    for (int i = threadIdx.x; i < count * a.group * S::CHUNKS; i += PRODUCT_THREADS) {
        int row = i / S::CHUNKS, chunk = i % S::CHUNKS, query = first + row / a.group;
        int place = (query_at(w.look, query) - w.look.origin) % w.look.modulus + w.look.row;
        const uint16_t *q = from + ((int64_t)place * a.heads_q + head + row % a.group) * D;
        *(uint4 *)product_row<D>(w.product, row, chunk) = *(const uint4 *)(q + chunk * CHUNK_DIMS);
    }
    const struct sight *sees = look_sees(a, w.look, w.index) + first;
    for (int i = threadIdx.x; i < count; i += PRODUCT_THREADS) w.sees[i] = sees[i];
}

/* Multiplies the current `vectors` query heads with the keys. */
template <int D>
static __device__ __forceinline__ void work_multiply(const struct work &w,
                                                     const struct look_args &a, int vectors) {
    product_all<D>(w.product, vectors, w.keys, a.streams.pages.scaled);
}

/* The logit of the current vector `vector` at a key, times log2(e). */
static __device__ __forceinline__ float
vector_logit(const struct work &w, const struct look_args &a, int vector, int key) {
    const float *out = w.product.out + key;
    if (w.width != 1 || a.group == 1) return logit_of(out[vector * PRODUCT_STRIDE], a.scale, a.cap);
    out += vector * a.group * PRODUCT_STRIDE;
    float x = logit_of(out[0], a.scale, a.cap);
    for (int r = 1; r < a.group; r++) {
        float y = logit_of(out[r * PRODUCT_STRIDE], a.scale, a.cap);
        x = w.look.observe.group == KERN_GROUP_MAX_LOGIT ? fmaxf(x, y) : __fadd_rn(x, y);
    }
    return x;
}

/* Selects a chunk: entries [base, base + keys). */
static __device__ void work_chunk(struct work &w, int base) {
    int end = base + PRODUCT_KEYS < w.state->length ? base + PRODUCT_KEYS : w.state->length;
    w.base = base;
    w.keys = end - base;
}

/* Converts a logit to attention. */
static __device__ __forceinline__ float vector_share(const struct work &w, int vector, float z) {
    return __fmul_rn(ptx_exp2(__fadd_rn(z, -w.stat[vector].most)), w.stat[vector].scale);
}

#endif
