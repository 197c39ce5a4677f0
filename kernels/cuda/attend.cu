/* Attention over pages, flash-attention style, on tensor cores (Dao et al., arXiv 2307.08691; split
 * over keys as in Flash-Decoding; tensor cores for one query because G query heads share a KV head
 * and a CUDA core cannot keep up with the memory, see FlashInfer's use_tensor_cores).
 *
 * A row of attention is one (token, query head). The G rows of a token that share a KV head, and
 * the tokens of a prompt, are packed into tiles of 16 rows: one mma tile of one warp.
 *
 * What a row gets does not depend on who computes it. Keys are taken 16 at a time in the order of
 * the stream; a chunk is CHUNK_KEYS entries counted from the stream's start; within a chunk softmax
 * runs online, and chunks are folded together from the first to the last. The decode kernel gives
 * chunks to warps and a second kernel folds; the prompt kernel folds in registers: the same
 * operations in the same order, so answers are bitwise equal however a prompt was split and whoever
 * shares the step. Masked keys change nothing: p = 0, and a maximum that does not move multiplies
 * by one.
 *
 * The plan of a step is made on the device from the lengths: for every layer the list of
 * (decoding row, head, chunk), whole chunks first. Warps take items by number: equal shares. */
#include "kernels/cuda/block.cuh"
#include "kernels/cuda/internal.h"
#include "kernels/cuda/logits.cuh"

#define CHUNK_KEYS    256
#define TILE_KEYS     16
#define TILE_ROWS     16
#define PLAN_THREADS  256
#define COMBINE_WARPS 4
#define COMBINE_PARTS 4 /* chunks that are read together, before the first is folded */

/* Per head size and bytes of a number, 2 for bf16 and 1 for e4m3: pages of one pipeline stage. */
template <int D, int E> struct shape {
    static const int ROW = D * E;
    static const int P = PAGE_SIDE / ROW;
    static const int DECODE_PAGES = P < TILE_KEYS ? TILE_KEYS / P : 1;
    static const int DECODE_WARPS = D == 256 ? 4 : 8; /* half on devices with less shared memory */
    static const int DECODE_STAGES = 3;
    static const int DECODE_SHARED = DECODE_STAGES * (DECODE_PAGES * PAGE_BYTES + 8); /* a warp's */
    static const int PREFILL_PAGES = (D == 256 ? 32 : 64) / P;
    static const int PREFILL_WARPS = PREFILL_ROWS / TILE_ROWS;
    static const int PREFILL_STAGES = 3;
    static const int PREFILL_SHARED = PREFILL_STAGES * (PREFILL_PAGES * PAGE_BYTES + 8);
};

struct attend_args {
    struct pages pages;
    const struct span *spans;
    const int32_t *decode;
    const struct prefill_tile *tiles;
    const float *qkv;
    float *out;
    const struct plan_item *items; /* items of this layer */
    const struct plan_stream *streams;
    const int32_t *item_count;
    float *partials;
    int decode_count, layer, sliding_window;
    int heads_q; /* query heads in a row of qkv */
    int heads, query,
        group; /* query heads per KV head; this rank computes [query, query + group) of them */
    float scale, cap;   /* kern_attend_options, times log2(e) */
    const float *sinks; /* the same, of all query heads of this rank's KV heads; NULL: none */
};

/* ---- The tile: 16 rows, in the fragments of mma.m16n8k16 ------------------------------------- */

/* The two rows of this lane (g and g + 8). */
struct rows {
    const float *q[2]; /* NULL: no such row */
    float *out[2];
    int low[2], high[2]; /* entries [low, high) are visible; empty where there is no row */
    int most;            /* largest `high` of the tile's 16 rows */
};

template <int D> struct tile {
    uint32_t q[D / 16][4];
    float o[D / 8][4];
    float m[2], l[2]; /* l: this lane's part of the sum */
};

/* Packs two numbers for a product with the pages'. */
template <int E> static __device__ __forceinline__ uint32_t pack(float low, float high) {
    return E == 1 ? ptx_pack_f16(low, high) : ptx_pack_bf16(low, high);
}

template <int D> static __device__ __forceinline__ void tile_start(struct tile<D> &t) {
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) t.o[n][i] = 0;
    t.m[0] = t.m[1] = -INFINITY;
    t.l[0] = t.l[1] = 0;
}

/* In bf16, register i of a fragment of keys has dims 2 t + 8 i, + 1 of 16. In e4m3, one register of
 * ldmatrix has four dims, 4 t + 2 i, + 1 for i = 0 and 1, so queries are arranged the same way: a
 * product does not depend on the order of dims. E4m3 is multiplied as float16, which represents its
 * numbers and keeps more digits of the queries. */
template <int D, int E>
static __device__ __forceinline__ void tile_load_queries(struct tile<D> &t, const struct rows &r,
                                                         int lane) {
#pragma unroll
    for (int k = 0; k < D / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *q = r.q[i & 1];
            int dim = 16 * k + (E == 1 ? 2 : 8) * (i >> 1) + 4 / E * (lane & 3);
            float2 pair = {0, 0};
            if (q) pair = *(const float2 *)(q + dim);
            t.q[k][i] = pack<E>(pair.x, pair.y);
        }
}

/* Row `key`, chunk `chunk` of a side of the pages that lie one after the other at `stage`. */
template <int D, int E>
static __device__ __forceinline__ const char *stage_row(const char *stage, int side, int key,
                                                        int chunk) {
    typedef shape<D, E> S;
    return stage + key / S::P * PAGE_BYTES + page_chunk(S::ROW, side, key % S::P, chunk);
}

/* c += a b with the four e4m3 numbers of a lane, arranged as in tile_load_queries. */
static __device__ __forceinline__ void mma_e4m3(float c[4], const uint32_t a[4], uint32_t four) {
    ptx_mma_f16(c, a, ptx_f16_of_e4m3(four & 0xffff), ptx_f16_of_e4m3(four >> 16));
}

/* s[n][i]: score of row g + 8 (i >> 1) and key 8 n + 2 t + (i & 1), in units of log 2. */
template <int D, int E>
static __device__ __forceinline__ void tile_scores(const struct tile<D> &t, const char *stage,
                                                   int key, int lane, float s[2][4]) {
    int row = key + (lane & 7) + 8 * (lane >> 4), half = lane >> 3 & 1;
#pragma unroll
    for (int i = 0; i < 4; i++) s[0][i] = s[1][i] = 0;
#pragma unroll
    for (int k = 0; k < D * E / 32; k++) {
        uint32_t b[4];
        ptx_load_matrix(b, stage_row<D, E>(stage, 0, row, 2 * k + half));
        if (E == 1) {
            mma_e4m3(s[0], t.q[2 * k], b[0]);
            mma_e4m3(s[0], t.q[2 * k + 1], b[1]);
            mma_e4m3(s[1], t.q[2 * k], b[2]);
            mma_e4m3(s[1], t.q[2 * k + 1], b[3]);
        } else {
            ptx_mma(s[0], t.q[k], b[0], b[1]);
            ptx_mma(s[1], t.q[k], b[2], b[3]);
        }
    }
}

static __device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(WARP_ALL, x, 1));
    return fmaxf(x, __shfl_xor_sync(WARP_ALL, x, 2));
}

static __device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(WARP_ALL, x, 1);
    return x + __shfl_xor_sync(WARP_ALL, x, 2);
}

/* Turns scores into probabilities relative to the new maximum; returns the factor of the old
 * sums. */
static __device__ __forceinline__ float row_softmax(float &m, float &l, float s0[2], float s1[2]) {
    float top = fmaxf(m, row_max(fmaxf(fmaxf(s0[0], s0[1]), fmaxf(s1[0], s1[1]))));
    float base = top == -INFINITY ? 0 : top;
    float keep = ptx_exp2(__fadd_rn(m, -base));
    s0[0] = ptx_exp2(__fadd_rn(s0[0], -base));
    s0[1] = ptx_exp2(__fadd_rn(s0[1], -base));
    s1[0] = ptx_exp2(__fadd_rn(s1[0], -base));
    s1[1] = ptx_exp2(__fadd_rn(s1[1], -base));
    m = top;
    l = fmaf(l, keep, __fadd_rn(__fadd_rn(s0[0], s0[1]), __fadd_rn(s1[0], s1[1])));
    return keep;
}

/* Values at or after the stream's end may be NaN, and 0 * NaN is NaN. */
static __device__ __forceinline__ uint32_t mask_pair(uint32_t pair, int entry, int length) {
    if (entry >= length) return 0;
    return entry + 1 >= length ? pair & 0xffffu : pair;
}

/* Layout of the tile's sums: tile_pair is the pair of dims from tile_dim on of row g + 8 row. A
 * transposed matrix of e4m3 has two dims of two keys in a register: the even dims of 16 form one
 * fragment, the odd ones the next. */
template <int E> static __device__ __forceinline__ int tile_dim(int n, int lane) {
    return E == 1 ? 16 * (n >> 1) + 4 * (lane & 3) + 2 * (n & 1) : 8 * n + 2 * (lane & 3);
}

template <int D, int E>
static __device__ __forceinline__ float2 tile_pair(const float o[D / 8][4], int n, int row) {
    int odd = n & 1;
    float2 pair = {o[n][2 * row], o[n][2 * row + 1]};
    if (E == 1) pair = {o[n - odd][2 * row + odd], o[n - odd + 1][2 * row + odd]};
    return pair;
}

static __device__ __forceinline__ uint32_t even_dims(uint32_t four) {
    return ptx_f16_of_e4m3((four & 0xff) | (four >> 8 & 0xff00));
}

static __device__ __forceinline__ uint32_t odd_dims(uint32_t four) {
    return ptx_f16_of_e4m3((four >> 8 & 0xff) | (four >> 16 & 0xff00));
}

/* 16 keys, 2 t, + 1 and 8 further, of 16 dims. */
template <bool TAIL>
static __device__ __forceinline__ void add_values_e4m3(float o[2][4], const uint32_t p[4],
                                                       uint32_t low, uint32_t high, int mine,
                                                       int length) {
    uint32_t b[4] = {even_dims(low), even_dims(high), odd_dims(low), odd_dims(high)};
    if (TAIL) {
#pragma unroll
        for (int i = 0; i < 4; i++) b[i] = mask_pair(b[i], mine + 8 * (i & 1), length);
    }
    ptx_mma_f16(o[0], p, b[0], b[1]);
    ptx_mma_f16(o[1], p, b[2], b[3]);
}

/* TAIL: some of the keys are beyond the end of the stream. A parameter of the template, because in
 * one loop for both the branch would keep each product behind its own load. */
template <int D, int E, bool TAIL>
static __device__ __forceinline__ void tile_add_values(struct tile<D> &t, const char *stage,
                                                       int key, int lane, const uint32_t p[4],
                                                       int entry, int length) {
    int mine = entry + 2 * (lane & 3), row = key + (lane & 7) + 8 * (lane >> 3 & 1);
#pragma unroll
    for (int n = 0; n < D * E / 32; n++) {
        uint32_t b[4];
        ptx_load_matrix_transposed(b, stage_row<D, E>(stage, 1, row, 2 * n + (lane >> 4)));
        if (E == 1) {
            add_values_e4m3<TAIL>(t.o + 4 * n, p, b[0], b[1], mine, length);
            add_values_e4m3<TAIL>(t.o + 4 * n + 2, p, b[2], b[3], mine, length);
            continue;
        }
        if (TAIL) {
#pragma unroll
            for (int i = 0; i < 4; i++) b[i] = mask_pair(b[i], mine + 8 * (i & 1), length);
        }
        ptx_mma(t.o[2 * n], p, b[0], b[1]);
        ptx_mma(t.o[2 * n + 1], p, b[2], b[3]);
    }
}

/* Processes 16 keys: from row `key` of the stage and entry `entry` of the stream on. All lanes of a
 * warp. */
template <int D, int E>
static __device__ __forceinline__ void tile_step(struct tile<D> &t, const struct rows &r,
                                                 const char *stage, int key, int entry, int length,
                                                 float scale, float cap, int lane) {
    float s[2][4], keep[2];
    tile_scores<D, E>(t, stage, key, lane, s);
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int e = entry + 8 * n + 2 * (lane & 3) + (i & 1);
            bool seen = e >= r.low[i >> 1] && e < r.high[i >> 1];
            s[n][i] = seen ? logit_of(s[n][i], scale, cap) : -INFINITY;
        }
    keep[0] = row_softmax(t.m[0], t.l[0], &s[0][0], &s[1][0]);
    keep[1] = row_softmax(t.m[1], t.l[1], &s[0][2], &s[1][2]);
    if (__any_sync(WARP_ALL, keep[0] != 1 || keep[1] != 1)) {
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) t.o[n][i] = __fmul_rn(t.o[n][i], keep[i >> 1]);
    }
    const uint32_t p[4] = {pack<E>(s[0][0], s[0][1]), pack<E>(s[0][2], s[0][3]),
                           pack<E>(s[1][0], s[1][1]), pack<E>(s[1][2], s[1][3])};
    if (entry + TILE_KEYS > length)
        tile_add_values<D, E, true>(t, stage, key, lane, p, entry, length);
    else
        tile_add_values<D, E, false>(t, stage, key, lane, p, entry, length);
}

/* ---- Folding chunks -------------------------------------------------------------------------- */

struct fold {
    float m, l; /* over all chunks so far */
};

/* The fold before the first chunk: a learned sink has no value, but its term in the sum. `own`: the
 * query head among those of its KV head that this rank computes. */
static __device__ __forceinline__ struct fold fold_start(const struct attend_args &a, int head,
                                                         int own) {
    if (!a.sinks) return {-INFINITY, 0};
    return {__fmul_rn(a.sinks[head * a.heads + a.query + own], LOG2_E), 1};
}

struct fold_weights {
    float old, add; /* o = o * old + chunk's o * add */
};

static __device__ __forceinline__ struct fold_weights fold_chunk(struct fold &f, float m, float l) {
    float top = fmaxf(f.m, m), base = top == -INFINITY ? 0 : top;
    struct fold_weights w = {ptx_exp2(__fadd_rn(f.m, -base)), ptx_exp2(__fadd_rn(m, -base))};
    f.m = top;
    f.l = fmaf(l, w.add, __fmul_rn(f.l, w.old));
    return w;
}

static __device__ __forceinline__ float fold_value(struct fold_weights w, float o, float add) {
    return fmaf(add, w.add, __fmul_rn(o, w.old));
}

static __device__ __forceinline__ float fold_end(struct fold f, float o) {
    return f.l == 0 ? 0 : __fdiv_rn(o, f.l); /* 0 if nothing is visible */
}

/* ---- Rows of a span -------------------------------------------------------------------------- */

/* Stores packed row `index` of the span at place i of *r. */
static __device__ __forceinline__ void set_row(struct rows &r, int i, int index,
                                               const struct attend_args &a, const struct span &s,
                                               const int32_t *table, int length, int head) {
    r.q[i] = NULL;
    r.out[i] = NULL;
    r.low[i] = r.high[i] = 0;
    if (index >= s.count * a.group) return;
    int token = index / a.group, own = index % a.group;
    int width = (a.heads_q + 2 * a.pages.heads_kv) * a.pages.head_dim;
    int64_t row = s.row + token, to = row * a.pages.heads_kv + head;
    r.q[i] = a.qkv + row * width + (head * a.heads + a.query + own) * a.pages.head_dim;
    r.out[i] = a.out + (to * a.group + own) * a.pages.head_dim;
    r.high[i] = length - s.count + token + 1;
    if (a.sliding_window)
        r.low[i] = pages_before(a.pages, table, length, s.pos + token - a.sliding_window + 1);
}

static __device__ __forceinline__ void set_rows(struct rows &r, int first, int lane,
                                                const struct attend_args &a, const struct span &s,
                                                const int32_t *table, int length, int head) {
    set_row(r, 0, first + (lane >> 2), a, s, table, length, head);
    set_row(r, 1, first + (lane >> 2) + 8, a, s, table, length, head);
    int last = first + TILE_ROWS - 1, all = s.count * a.group - 1;
    r.most = first > all ? 0 : length - s.count + (last < all ? last : all) / a.group + 1;
}

/* ---- Decoding -------------------------------------------------------------------------------- */

/* Copies whole pages [page, page + pages) of the stream into `stage`, as far as the stream has
 * them. */
template <int PAGES>
static __device__ __forceinline__ void fetch(const struct pages &p, const int32_t *table, int page,
                                             int page_end, char *stage, uint64_t *barrier) {
    int count = page_end - page < PAGES ? page_end - page : PAGES;
    ptx_barrier_expect(barrier, (uint32_t)count * PAGE_BYTES);
    for (int i = 0; i < count; i++)
        ptx_bulk_copy(stage + i * PAGE_BYTES, pages_at(p, table[page + i]), PAGE_BYTES, barrier);
}

template <int D, int E>
static __device__ __forceinline__ void write_chunk(const struct attend_args &a,
                                                   const struct tile<D> &t, const struct rows &r,
                                                   int head, float *partial, bool whole, int lane) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float l = row_sum(t.l[i]);
        if (!r.q[i]) continue;
        int own = (lane >> 2) + 8 * i;
        struct fold f = fold_start(a, head, own);
        struct fold_weights w = fold_chunk(f, t.m[i], l);
        float *to = whole ? r.out[i] : partial + own * (D + 2);
        for (int n = 0; n < D / 8; n++) {
            float2 pair = tile_pair<D, E>(t.o, n, i);
            if (whole) {
                pair.x = fold_end(f, fold_value(w, 0, pair.x));
                pair.y = fold_end(f, fold_value(w, 0, pair.y));
            }
            *(float2 *)(to + tile_dim<E>(n, lane)) = pair;
        }
        if (!whole && (lane & 3) == 0) {
            to[D] = t.m[i];
            to[D + 1] = l;
        }
    }
}

/* One item: a chunk of a decoding row's stream, through this warp's own ring of stages. `use`
 * counts the stages used since the kernel began. */
template <int D, int E>
static __device__ void decode_item(const struct attend_args &a, int item, char *ring,
                                   uint64_t *barriers, uint32_t &use, int lane) {
    typedef shape<D, E> S;
    const int KEYS = S::DECODE_PAGES * S::P, BYTES = S::DECODE_PAGES * PAGE_BYTES;
    const struct plan_item it = a.items[item];
    int head = it.stream % a.pages.heads_kv, stream = a.layer * a.pages.heads_kv + head;
    const struct span s = a.spans[a.decode[it.stream / a.pages.heads_kv]];
    const int32_t *table = pages_table(a.pages, s.slot, stream);
    int length = *pages_length(a.pages, s.slot, stream);
    int from = it.chunk * CHUNK_KEYS, to = from + CHUNK_KEYS < length ? from + CHUNK_KEYS : length;
    int page = from / S::P, page_end = pages_for(a.pages, to);
    int stages = (to - from + KEYS - 1) / KEYS;
    uint32_t first = use;
    use += (uint32_t)stages;
    for (int i = 0; lane == 0 && i < S::DECODE_STAGES && i < stages; i++) {
        uint32_t at = (first + (uint32_t)i) % S::DECODE_STAGES;
        fetch<S::DECODE_PAGES>(a.pages, table, page + i * S::DECODE_PAGES, page_end,
                               ring + at * BYTES, &barriers[at]);
    }
    struct rows r;
    struct tile<D> t;
    set_rows(r, 0, lane, a, s, table, length, head);
    tile_load_queries<D, E>(t, r, lane);
    tile_start<D>(t);
    for (int i = 0; i < stages; i++) {
        uint32_t count = first + (uint32_t)i, at = count % S::DECODE_STAGES;
        ptx_barrier_wait(&barriers[at], count / S::DECODE_STAGES & 1);
        for (int key = 0; key < KEYS && from + i * KEYS + key < to; key += TILE_KEYS)
            tile_step<D, E>(t, r, ring + at * BYTES, key, from + i * KEYS + key, length, a.scale,
                            a.cap, lane);
        __syncwarp();
        if (lane == 0 && i + S::DECODE_STAGES < stages)
            fetch<S::DECODE_PAGES>(a.pages, table, page + (i + S::DECODE_STAGES) * S::DECODE_PAGES,
                                   page_end, ring + at * BYTES, &barriers[at]);
    }
    write_chunk<D, E>(a, t, r, head, a.partials + (int64_t)item * a.group * (D + 2),
                      length <= CHUNK_KEYS, lane);
}

template <int D, int E, int WARPS>
static __global__ void __launch_bounds__(WARPS * 32, 1)
    k_attend_decode(const struct attend_args a) {
    typedef shape<D, E> S;
    SHARED_MEMORY(shared);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int BYTES = S::DECODE_STAGES * S::DECODE_PAGES * PAGE_BYTES;
    char *ring = shared + warp * BYTES;
    uint64_t *barriers = (uint64_t *)(shared + WARPS * BYTES) + warp * S::DECODE_STAGES;
    if (lane == 0) {
        for (int i = 0; i < S::DECODE_STAGES; i++) ptx_barrier_init(&barriers[i], 1);
        ptx_barrier_init_fence();
    }
    __syncwarp();
    ptx_overlap_grids();
    if (pages_failed(a.pages)) return;
    int workers = gridDim.x * WARPS, count = *a.item_count;
    uint32_t use = 0;
    /* Neighbouring items go to different blocks, so that a few streams use the whole machine. */
    for (int item = warp * gridDim.x + blockIdx.x; item < count; item += workers)
        decode_item<D, E>(a, item, ring, barriers, use, lane);
}

/* A lane's part of one chunk's result; after the last chunk, undefined and unused. */
template <int D> struct part { float m, l, o[D / 32]; };

template <int D>
static __device__ __forceinline__ struct part<D>
read_part(const struct attend_args &a, const struct plan_stream &plan, int chunk, int length,
          int own, int lane) {
    struct part<D> part = {};
    if (chunk * CHUNK_KEYS >= length) return part;
    int item = (chunk + 1) * CHUNK_KEYS <= length ? plan.full + chunk : plan.tail;
    const float *from = a.partials + ((int64_t)item * a.group + own) * (D + 2);
    part.m = from[D];
    part.l = from[D + 1];
#pragma unroll
    for (int i = 0; i < D / 32; i++) part.o[i] = from[lane + 32 * i];
    return part;
}

/* A warp per (decoding row, query head): folds the chunks of streams that have several. */
template <int D>
static __global__ void k_attend_combine(const struct attend_args a) {
    ptx_overlap_grids();
    int index = (int)(blockIdx.x * COMBINE_WARPS + threadIdx.x / 32), lane = threadIdx.x % 32;
    int heads = a.pages.heads_kv * a.group;
    if (index >= a.decode_count * heads || pages_failed(a.pages)) return;
    int row = index / heads, head_q = index % heads, head = head_q / a.group;
    const struct span s = a.spans[a.decode[row]];
    int length = *pages_length(a.pages, s.slot, a.layer * a.pages.heads_kv + head);
    if (length <= CHUNK_KEYS) return;
    const struct plan_stream plan = a.streams[row * a.pages.heads_kv + head];
    struct fold f = fold_start(a, head, head_q % a.group);
    float o[D / 32] = {0};
    for (int chunk = 0; chunk * CHUNK_KEYS < length; chunk += COMBINE_PARTS) {
        struct part<D> parts[COMBINE_PARTS];
#pragma unroll
        for (int k = 0; k < COMBINE_PARTS; k++)
            parts[k] = read_part<D>(a, plan, chunk + k, length, head_q % a.group, lane);
#pragma unroll
        for (int k = 0; k < COMBINE_PARTS; k++) {
            if ((chunk + k) * CHUNK_KEYS >= length) break;
            struct fold_weights w = fold_chunk(f, parts[k].m, parts[k].l);
#pragma unroll
            for (int i = 0; i < D / 32; i++) o[i] = fold_value(w, o[i], parts[k].o[i]);
        }
    }
    float *out = a.out + ((int64_t)s.row * heads + head_q) * D;
#pragma unroll
    for (int i = 0; i < D / 32; i++) out[lane + 32 * i] = fold_end(f, o[i]);
}

/* ---- Prompts --------------------------------------------------------------------------------- */

template <int D>
static __device__ __forceinline__ void prefill_fold(struct tile<D> &t, struct fold f[2],
                                                    float o[D / 8][4]) {
    struct fold_weights w[2];
#pragma unroll
    for (int i = 0; i < 2; i++) w[i] = fold_chunk(f[i], t.m[i], row_sum(t.l[i]));
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) o[n][i] = fold_value(w[i >> 1], o[n][i], t.o[n][i]);
    tile_start<D>(t);
}

template <int D, int E>
static __device__ __forceinline__ void prefill_write(const struct rows &r, const struct fold f[2],
                                                     const float o[D / 8][4], int lane) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (!r.q[i]) continue;
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            float2 pair = tile_pair<D, E>(o, n, i);
            pair = {fold_end(f[i], pair.x), fold_end(f[i], pair.y)};
            *(float2 *)(r.out[i] + tile_dim<E>(n, lane)) = pair;
        }
    }
}

/* Block (tile, head): 8 warps of 16 rows read every page together. Pages that no row of the tile
 * sees, before a sliding window or after the last token, are not read. */
template <int D, int E>
static __global__ void __launch_bounds__(shape<D, E>::PREFILL_WARPS * 32, 1)
    k_attend_prefill(const struct attend_args a) {
    typedef shape<D, E> S;
    const int KEYS = S::PREFILL_PAGES * S::P, BYTES = S::PREFILL_PAGES * PAGE_BYTES;
    SHARED_MEMORY(shared);
    uint64_t *barriers = (uint64_t *)(shared + S::PREFILL_STAGES * BYTES);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::PREFILL_STAGES; i++) ptx_barrier_init(&barriers[i], 1);
        ptx_barrier_init_fence();
    }
    __syncthreads();
    ptx_overlap_grids();
    if (pages_failed(a.pages)) return;
    const struct prefill_tile place = a.tiles[blockIdx.x];
    const struct span s = a.spans[place.span];
    int head = blockIdx.y, stream = a.layer * a.pages.heads_kv + head;
    const int32_t *table = pages_table(a.pages, s.slot, stream);
    int length = *pages_length(a.pages, s.slot, stream);

    int last = place.first + PREFILL_ROWS - 1, all = s.count * a.group - 1;
    int end = length - s.count + (last < all ? last : all) / a.group + 1;
    int begin = 0;
    if (a.sliding_window)
        begin = pages_before(a.pages, table, length,
                             s.pos + place.first / a.group - a.sliding_window + 1) /
                CHUNK_KEYS * CHUNK_KEYS;
    /* Whole tiles of keys, up to the end of the stream: masked keys are multiplied by zero. */
    int tiles_end = (end + TILE_KEYS - 1) / TILE_KEYS * TILE_KEYS;
    int page = begin / S::P;
    int page_end = pages_for(a.pages, tiles_end < length ? tiles_end : length);
    int stages = (end - begin + KEYS - 1) / KEYS;
    for (int i = 0; threadIdx.x == 0 && i < S::PREFILL_STAGES && i < stages; i++)
        fetch<S::PREFILL_PAGES>(a.pages, table, page + i * S::PREFILL_PAGES, page_end,
                                shared + i * BYTES, &barriers[i]);

    struct rows r;
    struct tile<D> t;
    struct fold f[2];
    float o[D / 8][4];
#pragma unroll
    for (int i = 0; i < 2; i++)
        f[i] =
            fold_start(a, head, (place.first + warp * TILE_ROWS + (lane >> 2) + 8 * i) % a.group);
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) o[n][i] = 0;
    set_rows(r, place.first + warp * TILE_ROWS, lane, a, s, table, length, head);
    tile_load_queries<D, E>(t, r, lane);
    tile_start<D>(t);
    for (int i = 0; i < stages; i++) {
        int at = i % S::PREFILL_STAGES, entry = begin + i * KEYS;
        ptx_barrier_wait(&barriers[at], (uint32_t)(i / S::PREFILL_STAGES) & 1);
        for (int key = 0; key < KEYS && entry + key < r.most; key += TILE_KEYS) {
            tile_step<D, E>(t, r, shared + at * BYTES, key, entry + key, length, a.scale, a.cap,
                            lane);
            if ((entry + key + TILE_KEYS) % CHUNK_KEYS == 0) prefill_fold<D>(t, f, o);
        }
        __syncthreads();
        if (threadIdx.x == 0 && i + S::PREFILL_STAGES < stages)
            fetch<S::PREFILL_PAGES>(a.pages, table,
                                    page + (i + S::PREFILL_STAGES) * S::PREFILL_PAGES, page_end,
                                    shared + at * BYTES, &barriers[at]);
    }
    prefill_fold<D>(t, f, o); /* the last chunk, if it is partial; otherwise no effect */
    prefill_write<D, E>(r, f, o, lane);
}

/* ---- The plan -------------------------------------------------------------------------------- */

struct plan_args {
    struct pages pages;
    const struct span *spans;
    const int32_t *decode;
    int decode_count;
    int64_t items_max, streams_max;
    struct plan_item *items;
    struct plan_stream *streams;
    int32_t *counts;
};

/* A block per layer. Whole chunks first, then the rests: the long items start early. */
static __global__ void k_plan(const struct plan_args a) {
    SHARED_MEMORY(shared);
    int *room = (int *)shared;
    if (pages_failed(a.pages)) return;
    int layer = blockIdx.x, streams = a.decode_count * a.pages.heads_kv, total;
    struct plan_item *items = a.items + layer * a.items_max;
    struct plan_stream *plan = a.streams + layer * a.streams_max;
    int at = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (int first = 0; first < streams; first += (int)blockDim.x) {
            int i = first + (int)threadIdx.x, mine = 0;
            if (i < streams) {
                int slot = a.spans[a.decode[i / a.pages.heads_kv]].slot;
                int length =
                    *pages_length(a.pages, slot, layer * a.pages.heads_kv + i % a.pages.heads_kv);
                mine = pass == 0 ? length / CHUNK_KEYS : length % CHUNK_KEYS > 0;
            }
            int place = at + block_scan(mine, room, &total);
            at += total;
            if (i >= streams) continue;
            if (place + mine > a.items_max) {
                pages_fail(a.pages, ERR_INTERNAL);
                continue;
            }
            if (pass == 0) {
                plan[i].full = place;
                for (int c = 0; c < mine; c++) items[place + c] = {i, c};
            } else {
                plan[i].tail = mine ? place : -1;
                int slot = a.spans[a.decode[i / a.pages.heads_kv]].slot;
                int length =
                    *pages_length(a.pages, slot, layer * a.pages.heads_kv + i % a.pages.heads_kv);
                if (mine) items[place] = {i, length / CHUNK_KEYS};
            }
        }
    }
    if (threadIdx.x == 0) a.counts[layer] = at;
}

/* ---- The host's side ------------------------------------------------------------------------- */

/* Upper bound of items for all decoding rows of one layer: streams have no more chunks than
 * positions, and no more entries than the pool and those that forks share, each counted again. */
static int64_t plan_items_max(const struct cuda *cuda, int64_t forked_entries) {
    const struct kern_cache_options *o = &cuda->options;
    int64_t streams = (int64_t)o->slots * o->heads_kv;
    int64_t by_positions = streams * ((o->max_positions + CHUNK_KEYS - 1) / CHUNK_KEYS);
    int64_t entries = o->pages * cuda->pages.page_slots + forked_entries;
    int64_t by_pool = streams + entries / CHUNK_KEYS;
    return by_positions < by_pool ? by_positions : by_pool;
}

int attend_grow(struct cuda *cuda, int64_t forked_entries) {
    int64_t items = plan_items_max(cuda, forked_entries);
    if (items <= cuda->items_max) return 0;
    items = plan_items_max(cuda, 2 * forked_entries); /* so that few forks in a row grow it */
    size_t row = ((size_t)cuda->options.head_dim + 2) * sizeof(float);
    void *plan = device_alloc(cuda->device,
                              (size_t)cuda->options.layers * (size_t)items * sizeof *cuda->items);
    void *partials = device_alloc(cuda->device, (size_t)items * (size_t)cuda_group(cuda) * row);
    bool good = plan && partials;
    device_free(cuda->device, good ? cuda->items : plan);
    device_free(cuda->device, good ? cuda->partials : partials);
    if (!good) return ERR_NOMEM;
    cuda->items = static_cast<struct plan_item *>(plan);
    cuda->partials = static_cast<float *>(partials);
    cuda->items_max = items;
    return 0;
}

int attend_regions(struct cuda *cuda, struct region *regions) {
    const struct kern_cache_options *o = &cuda->options;
    size_t layers = (size_t)o->layers, streams = (size_t)o->slots * (size_t)o->heads_kv;
    cuda->items_max = plan_items_max(cuda, 0);
    size_t items = (size_t)cuda->items_max, group = (size_t)cuda_group(cuda);
    size_t row = ((size_t)o->head_dim + 2) * sizeof(float);
    const struct region own[] = {
        {(void **)&cuda->items, layers * items, sizeof *cuda->items, false},
        {(void **)&cuda->streams, layers * streams, sizeof *cuda->streams, false},
        {(void **)&cuda->item_counts, layers, sizeof *cuda->item_counts, false},
        {(void **)&cuda->partials, items * group, row, false},
    };
    memcpy(regions, own, sizeof own);
    return sizeof own / sizeof *own;
}

void attend_plan(struct cuda *cuda) {
    const struct step *step = &cuda->step;
    int64_t streams_max = (int64_t)cuda->options.slots * cuda->options.heads_kv;
    if (step->decode_count == 0 || !step->spans) return;
    struct plan_args args = {cuda->pages,        step->spans,     step->decode,
                             step->decode_count, cuda->items_max, streams_max,
                             cuda->items,        cuda->streams,   cuda->item_counts};
    LAUNCH(cuda->device, k_plan, (unsigned)cuda->options.layers, PLAN_THREADS,
           PLAN_THREADS / 32 * sizeof(int), args);
}

template <int D, int E> static size_t shared_as(void) {
    typedef shape<D, E> S;
    int decode = S::DECODE_WARPS / 2 * S::DECODE_SHARED;
    return (size_t)(decode > S::PREFILL_SHARED ? decode : S::PREFILL_SHARED);
}

size_t attend_shared(const struct cuda *cuda) {
    bool narrow = cuda->options.dtype == KERN_E4M3;
    if (cuda->options.head_dim == 64) return narrow ? shared_as<64, 1>() : shared_as<64, 2>();
    if (cuda->options.head_dim == 128) return narrow ? shared_as<128, 1>() : shared_as<128, 2>();
    return narrow ? shared_as<256, 1>() : shared_as<256, 2>();
}

template <int D, int E>
static void attend_as(struct cuda *cuda, const struct attend_args &args, int tile_count) {
    typedef shape<D, E> S;
    if (tile_count > 0)
        LAUNCH_OVERLAPPED(cuda->device, (k_attend_prefill<D, E>),
                          dim3((unsigned)tile_count, (unsigned)args.pages.heads_kv),
                          S::PREFILL_WARPS * 32, S::PREFILL_SHARED, args);
    if (args.decode_count == 0) return;
    const unsigned blocks = (unsigned)device_processors(cuda->device);
    const int warps = S::DECODE_WARPS, few = warps / 2;
    if (device_shared(cuda->device) >= (size_t)(warps * S::DECODE_SHARED))
        LAUNCH_OVERLAPPED(cuda->device, (k_attend_decode<D, E, warps>), blocks, warps * 32,
                          warps * S::DECODE_SHARED, args);
    else
        LAUNCH_OVERLAPPED(cuda->device, (k_attend_decode<D, E, few>), blocks, few * 32,
                          few * S::DECODE_SHARED, args);
    LAUNCH_OVERLAPPED(
        cuda->device, (k_attend_combine<D>),
        blocks_for((int64_t)args.decode_count * args.pages.heads_kv * args.group, COMBINE_WARPS),
        COMBINE_WARPS * 32, 0, args);
}

template <int D>
static void attend(struct cuda *cuda, const struct attend_args &args, int tile_count) {
    if (cuda->options.dtype == KERN_E4M3)
        attend_as<D, 1>(cuda, args, tile_count);
    else
        attend_as<D, 2>(cuda, args, tile_count);
}

void op_attend(struct kern *kern, int layer, float *out, const float *qkv,
               const struct kern_batch *batch, const struct kern_attend_options *options) {
    struct cuda *cuda = cuda_of(kern);
    CHECK(cuda->has_cache && layer >= 0 && layer < cuda->options.layers);
    const struct step *step = step_of(cuda, batch);
    if (!step->spans) return;
    const int first_head = cuda->shard.first * cuda_group(cuda);
    cuda->attended[layer] = {options->sinks ? options->sinks + first_head : NULL,
                             options->sliding_window};
    cuda->scale = options->scale;
    cuda->cap = options->cap;
    keep_queries(cuda, layer, qkv);
    struct attend_args args = {};
    args.pages = cuda->pages;
    args.spans = step->spans;
    args.decode = step->decode;
    args.tiles = step->tiles;
    args.qkv = qkv;
    args.out = out;
    args.items = cuda->items + layer * cuda->items_max;
    args.streams = cuda->streams + (int64_t)layer * cuda->options.slots * cuda->options.heads_kv;
    args.item_count = cuda->item_counts + layer;
    args.partials = cuda->partials;
    args.decode_count = step->decode_count;
    args.layer = layer;
    args.heads_q = cuda->options.heads_q;
    args.heads = cuda_group(cuda);
    args.query = cuda->shard.query_first;
    args.group = cuda->shard.queries;
    args.sliding_window = options->sliding_window;
    args.scale = options->scale * LOG2_E;
    args.cap = options->cap * LOG2_E;
    args.sinks = cuda->attended[layer].sinks;
    if (cuda->options.head_dim == 64) attend<64>(cuda, args, step->tile_count);
    if (cuda->options.head_dim == 128) attend<128>(cuda, args, step->tile_count);
    if (cuda->options.head_dim == 256) attend<256>(cuda, args, step->tile_count);
    add_mass(cuda, layer, out);
}
