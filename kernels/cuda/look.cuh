/* Multiplies queries with a chunk of a stream: shared by the kernels of observe.cu and classes.cu.
 * A block of PRODUCT_THREADS processes PRODUCT_KEYS entries, with their members where entries have
 * classes, and as many queries at a time as whole groups fit PRODUCT_ROWS. */
#ifndef KEEPD_KERNELS_CUDA_LOOK_CUH
#define KEEPD_KERNELS_CUDA_LOOK_CUH

#include "kernels/cuda/classes.cuh"
#include "kernels/cuda/evict.cuh"

static __device__ __forceinline__ int query_at(const struct look &look, int query) {
    return look.query_pos ? look.query_pos[query] : look.origin + query;
}

static __device__ __forceinline__ bool of_logits(const struct look &look) {
    return look.observe.group == KERN_GROUP_MAX_LOGIT || look.observe.group == KERN_GROUP_SUM_LOGIT;
}

/* The current members: at most CLASS_KEYS. All in shared memory. */
struct class_work {
    float *out; /* [PRODUCT_ROWS][PRODUCT_STRIDE]: products with the high halves of keys, and from
                   CLASS_KEYS on with the low halves */
    int32_t *centre;     /* place of the centre among the current keys */
    int32_t *pos, *away; /* position of the member; distance from its centre, or 0 */
    float *gain;
};

/* State of both passes for the current chunk. */
struct work {
    struct product product;
    struct sight *sees;     /* shared, [PRODUCT_ROWS]: of the current queries */
    struct look_stat *stat; /* shared, [PRODUCT_ROWS] vectors */
    struct look look;
    const struct stream_state *state;
    const int32_t *table;
    int index;      /* index of the state */
    int queries;    /* queries per block */
    int width;      /* vectors per query */
    int base, keys; /* entries [base, base + keys) are in shared memory */

    const int32_t *members; /* table */
    struct class_work classes;
    int member, member_end; /* the members of the chunk's entries */
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

static __device__ __forceinline__ void class_open(struct work &w, char *shared) {
    w.classes.out = (float *)shared;
    w.classes.gain = w.classes.out + PRODUCT_ROWS * PRODUCT_STRIDE;
    w.classes.centre = (int32_t *)(w.classes.gain + CLASS_KEYS);
    w.classes.pos = w.classes.centre + CLASS_KEYS;
    w.classes.away = w.classes.pos + CLASS_KEYS;
}

static __host__ __device__ __forceinline__ int class_bytes() {
    return (PRODUCT_ROWS * PRODUCT_STRIDE + 4 * CLASS_KEYS) * (int)sizeof(float);
}

static __device__ void work_begin(struct work &w, const struct look_args &a, int state) {
    w.index = state;
    w.state = &a.streams.states[state];
    w.look = a.looks[w.state->subject];
    int slot = a.streams.subjects[w.state->subject].slot;
    w.table = pages_table(a.streams.pages, slot, w.state->stream);
    w.members = members_table(a.streams.pages, slot, w.state->stream);
    w.queries = PRODUCT_ROWS / a.group;
    w.width = of_logits(w.look) ? 1 : a.group;
}

/* The parts of a look for a state, `index` of its streams. */
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
    int layer = w.state->stream / a.streams.pages.heads_kv;
    int head = w.state->stream % a.streams.pages.heads_kv * a.group;
    const uint16_t *from = w.look.queries + layer * w.look.layer_stride;
    for (int i = threadIdx.x; i < count * a.group * S::CHUNKS; i += PRODUCT_THREADS) {
        int row = i / S::CHUNKS, chunk = i % S::CHUNKS, query = first + row / a.group;
        int place = (query_at(w.look, query) - w.look.origin) % w.look.modulus;
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

/* Selects a chunk: entries [base, base + keys), and their members. */
static __device__ void work_chunk(struct work &w, const struct look_args &a, int base) {
    const struct pages &p = a.streams.pages;
    int end = base + PRODUCT_KEYS < w.state->length ? base + PRODUCT_KEYS : w.state->length;
    w.base = base;
    w.keys = end - base;
    w.member = w.member_end = 0;
    if (!w.look.classes || w.keys <= 0) return;
    int count = *members_length(p, a.streams.subjects[w.state->subject].slot, w.state->stream);
    if (count == 0) return;
    w.member = members_before(p, w.members, count, p.pos[pages_side(p, w.table, base)]);
    w.member_end = count;
    if (end < w.state->length)
        w.member_end = members_before(p, w.members, count, p.pos[pages_side(p, w.table, end)]);
}

/* Converts a logit to attention. */
static __device__ __forceinline__ float vector_share(const struct work &w, int vector, float z) {
    return __fmul_rn(ptx_exp2(__fadd_rn(z, -w.stat[vector].most)), w.stat[vector].scale);
}

/* ---- Members ---- */

/* Computes the keys of members [first, first + count) of the row in the places of the keys, high
 * halves first. All threads must have finished with the previous keys and members. */
template <int D>
static __device__ void members_make(const struct work &w, const struct look_args &a, int first,
                                    int count) {
    const struct pages &p = a.streams.pages;
    const int HALF = D / CHUNK_DIMS / 2;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += PRODUCT_THREADS) {
        const struct member m = *members_at(p, w.members, first + i);
        w.classes.centre[i] = pages_before(p, w.table, w.state->length, m.centre) - w.base;
        w.classes.pos[i] = m.pos;
        w.classes.away[i] = w.look.positions ? m.pos - m.centre : 0;
        w.classes.gain[i] = m.gain;
    }
    __syncthreads();
    for (int k = threadIdx.x; k < piece_lanes(count * HALF); k += PRODUCT_THREADS) {
        int i = k / HALF < count ? k / HALF : 0, chunk = k % HALF;
        struct piece_pair x = piece_load<D>(p, w.table, 0, w.base + w.classes.centre[i], chunk);
        if (w.look.positions) piece_rotate<D>(x, p);
        piece_turn(x, p, w.classes.away[i], chunk);
        if (w.look.positions) piece_rotate<D>(x, p);
        if (k >= count * HALF) continue;
        char *high[2], *low[2];
        for (int half = 0; half < 2; half++) {
            high[half] = (char *)product_key<D>(w.product, i, chunk + half * HALF);
            low[half] = (char *)product_key<D>(w.product, CLASS_KEYS + i, chunk + half * HALF);
        }
        piece_split(x.a, high[0], low[0]);
        piece_split(x.b, high[1], low[1]);
    }
    ptx_shared_fence(); /* the next keys are copied to the same memory */
}

/* The same, then multiplies them with the current `vectors` query heads. */
template <int D>
static __device__ void members_multiply(const struct work &w, const struct look_args &a, int first,
                                        int count, int vectors) {
    struct product product = w.product;
    product.out = w.classes.out;
    members_make<D>(w, a, first, count);
    __syncthreads();
    product_all<D>(product, vectors, CLASS_KEYS + count);
    __syncthreads();
}

/* The logit of query head `vector` with current member `i`; -INFINITY if the query does not see
 * it. */
static __device__ __forceinline__ float member_logit(const struct work &w,
                                                     const struct look_args &a, int vector, int i) {
    const struct sight sight = w.sees[vector / a.group];
    const float *out = w.classes.out + vector * PRODUCT_STRIDE + i;
    int pos = w.classes.pos[i];
    bool seen = pos > sight.least && pos <= sight.pos && w.base + w.classes.centre[i] < sight.high;
    float z = __fmul_rn(__fadd_rn(out[0], out[CLASS_KEYS]), w.classes.gain[i]);
    return seen ? logit_of(z, a.scale, a.cap) : -INFINITY;
}

/* Number of current members before the first whose centre is at or after place `place`. */
static __device__ __forceinline__ int members_upto(const struct work &w, int count, int place) {
    int low = 0, high = count;
    while (low < high) {
        int middle = (low + high) / 2;
        if (w.classes.centre[middle] < place)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Adds the attention of the current members to their centres': one thread per entry, in order. */
static __device__ void members_fold(const struct work &w, const struct look_args &a, int count,
                                    int vectors) {
    for (int i = threadIdx.x; i < vectors * CLASS_KEYS; i += PRODUCT_THREADS) {
        int v = i / CLASS_KEYS, at = i % CLASS_KEYS;
        if (at >= count) continue;
        float z = member_logit(w, a, v, at);
        w.classes.out[v * PRODUCT_STRIDE + at] = z == -INFINITY ? 0 : vector_share(w, v, z);
    }
    __syncthreads();
    int place = threadIdx.x, from = members_upto(w, count, place);
    int to = members_upto(w, count, place + 1);
    for (int v = 0; v < vectors && from < to; v++) {
        float *p = w.product.out + v * PRODUCT_STRIDE + place;
        for (int at = from; at < to; at++)
            *p = __fadd_rn(*p, w.classes.out[v * PRODUCT_STRIDE + at]);
    }
}

/* Turns products of the current `count` queries with the keys into attention to whole classes, 0
 * where nothing is visible; overwrites the keys. Called by every thread; synchronised before and
 * after. */
template <int D>
static __device__ void class_attention(const struct work &w, const struct look_args &a, int count) {
    int vectors = count * a.group;
    for (int i = threadIdx.x; i < vectors * PRODUCT_KEYS; i += PRODUCT_THREADS) {
        int v = i / PRODUCT_KEYS, key = i % PRODUCT_KEYS, entry = w.base + key;
        const struct sight sight = w.sees[v / a.group];
        float *z = w.product.out + v * PRODUCT_STRIDE + key;
        bool seen = key < w.keys && entry >= sight.low && entry < sight.high;
        *z = seen ? vector_share(w, v, logit_of(*z, a.scale, a.cap)) : 0;
    }
    for (int first = w.member; first < w.member_end; first += CLASS_KEYS) {
        int many = w.member_end - first < CLASS_KEYS ? w.member_end - first : CLASS_KEYS;
        members_multiply<D>(w, a, first, many, vectors);
        members_fold(w, a, many, vectors);
    }
    __syncthreads();
}

#endif
