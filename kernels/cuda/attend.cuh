/* The arithmetic of attention that decoding (attend.cu) and prompts (prefill.cu) share, so that
 * both perform the same operations in the same order: tiles of 16 rows, chunks, and their folding.
 *
 * A row of attention is one (token, query head). The G rows of a token that share a KV head, and
 * the tokens of a prompt, are packed into tiles of 16 rows: one mma tile of one warp. Tensor cores
 * serve a single query, too, because G query heads share a KV head and a CUDA core cannot keep up
 * with the memory (see FlashInfer's use_tensor_cores).
 *
 * Keys are taken 16 at a time in the order of the stream; a chunk is CHUNK_KEYS entries counted
 * from the stream's start; within a chunk softmax runs online (Dao et al., arXiv 2307.08691), and
 * chunks are folded together from the first to the last. Masked keys change nothing: p = 0, and a
 * maximum that does not move multiplies by one. */
#ifndef KEEPD_KERNELS_CUDA_ATTEND_CUH
#define KEEPD_KERNELS_CUDA_ATTEND_CUH

#include "kernels/cuda/attend_row8.cuh"
#include "kernels/cuda/fetch.cuh"
#include "kernels/cuda/internal.h"
#include "kernels/cuda/logits.cuh"

#define CHUNK_KEYS 256
#define TILE_KEYS  16
#define TILE_ROWS  16

#define NOTHING_SEEN -1e30f /* the maximum before the first score */

/* The part of the stream that a block of a prompt reads: the entries that some row of its tile
 * sees. Pages before a sliding window or after the last token are not read. */
struct reach {
    const int32_t *table;
    int length;         /* entries of the stream */
    int begin, end;     /* entries; begin is the start of a stage */
    int page, page_end; /* pages with these entries, of those the stream has */
    int stages;
};

/* The entries that a row of a prompt sees, and the place of its result. */
struct row_place {
    float *out; /* NULL: there is no such row, but its entries are those of the span's last one */
    int low, high; /* entries [low, high) are visible */
};

/* Kept in shared memory by a prompt's block: registers would hold it through the loop over keys. */
struct prefill_kept {
    struct reach reach;
    struct row_place rows[PREFILL_ROWS];
};

/* Per head size and format E of the pages, 2 for bf16, 1 for e4m3 and 0 for codes with factors:
 * pages of one pipeline stage. */
template <int D, int E> struct shape {
    static const int ROW = E == 2 ? 2 * D : D;
    static const int P = PAGE_SIDE / ROW;
    static const int PAGE = PAGE_BYTES + (E == 0 ? 2 * P * (int)sizeof(uint16_t) : 0);
    static const int DECODE_PAGES = P < TILE_KEYS ? TILE_KEYS / P : 1;
    static const int DECODE_WARPS = D == 256 ? 4 : 8;
    /* On devices with less shared memory. */
    static const int DECODE_FEW = E > 0 ? DECODE_WARPS / 2 : D == 64 ? 3 : 4;
    static const int DECODE_STAGES = 3;
    static const int DECODE_SHARED = DECODE_STAGES * (DECODE_PAGES * PAGE + 8); /* a warp's */
    static const int PREFILL_PAGES = (D == 256 ? 32 : 64) / P;
    static const int PREFILL_WARPS = PREFILL_ROWS / TILE_ROWS;
    static const int PREFILL_STAGES = 3;
    static const int PREFILL_KEYS = PREFILL_PAGES * P; /* keys of a stage */
    static const int PREFILL_BYTES = PREFILL_PAGES * PAGE;
    static const int PREFILL_SHARED =
        PREFILL_STAGES * (PREFILL_BYTES + 8) + (int)sizeof(struct prefill_kept);
};

struct attend_args {
    struct pages pages;
    const struct span *spans;
    const int32_t *decode;
    const struct prefill_tile *tiles;
    const int32_t *ahead; /* as in struct step */
    const float *queries;
    int64_t stride; /* from the queries of a row to those of the next */
    float *out;
    struct rounded round;          /* the same in 16 bits, in steps that only decode; or none */
    const struct plan_item *items; /* items of this layer */
    const struct plan_stream *streams;
    const int32_t *item_count;
    float *partials;
    int decode_count, sliding_window;
    int first; /* the first stream of the layer; `pages` are as they are for the layer */
    int heads, query,
        group; /* query heads per KV head; this rank computes [query, query + group) of them */
    float scale, cap;   /* kern_attend_options, times log2(e) */
    const float *sinks; /* the same, of all query heads of this rank's KV heads; NULL: none */
};

/* ---- The tile: 16 rows, in the fragments of mma.m16n8k16 ---- */

/* The 16 rows of a tile. A lane has two, g and g + 8. */
struct rows {
    const struct row_place
        *places;         /* the lane's two are [0] and [8], in shared memory, because only
                            some tiles of keys need them; NULL: all see [clear, length) */
    int most;            /* largest `high` of the rows */
    int clear, clear_to; /* all see [clear, clear_to); empty where scores are capped */
};

template <int D> struct tile {
    uint32_t q[D / 16][4];
    float o[D / 8][4];
    float m[2], l[2]; /* l: this lane's part of the sum */
    float by[2];      /* codes: the factors of the rows' queries */
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
    t.m[0] = t.m[1] = NOTHING_SEEN;
    t.l[0] = t.l[1] = 0;
}

/* In bf16, register i of a fragment of keys has dims 2 t + 8 i, + 1 of 16. In e4m3, one register of
 * ldmatrix has four dims, 4 t + 2 i, + 1 for i = 0 and 1, so queries are arranged the same way: a
 * product does not depend on the order of dims. E4m3 is multiplied as float16, which represents its
 * numbers and keeps more digits of the queries. */
template <int D, int E>
static __device__ __forceinline__ void tile_pack_queries(struct tile<D> &t,
                                                         const float *const rows[2], int lane) {
#pragma unroll
    for (int k = 0; k < D / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *q = rows[i & 1];
            int dim = 16 * k + (E == 1 ? 2 : 8) * (i >> 1) + (E == 1 ? 4 : 2) * (lane & 3);
            float2 pair = {0, 0};
            if (q) pair = *(const float2 *)(q + dim);
            t.q[k][i] = pack<E>(pair.x, pair.y);
        }
}

template <int D, int E>
static __device__ __forceinline__ void tile_load_queries(struct tile<D> &t,
                                                         const float *const rows[2], int lane) {
    if (E == 0)
        row8_load_queries<D>(t.q, t.by, rows, lane);
    else
        tile_pack_queries<D, E>(t, rows, lane);
}

/* The page of key `key`, of the pages that lie one after the other at `stage`. */
template <int D, int E>
static __device__ __forceinline__ const char *stage_page(const char *stage, int key) {
    typedef shape<D, E> S;
    return stage + key / S::P * S::PAGE;
}

/* Row `key`, chunk `chunk` of a side. */
template <int D, int E>
static __device__ __forceinline__ const char *stage_row(const char *stage, int side, int key,
                                                        int chunk) {
    typedef shape<D, E> S;
    return stage_page<D, E>(stage, key) + page_chunk(S::ROW, side, key % S::P, chunk);
}

/* c += a b with the four e4m3 numbers of a lane, arranged as in tile_pack_queries. */
static __device__ __forceinline__ void mma_e4m3(float c[4], const uint32_t a[4], uint32_t four) {
    ptx_mma_f16(c, a, ptx_f16_of_e4m3(four & 0xffff), ptx_f16_of_e4m3(four >> 16));
}

/* s[n][i]: product of row g + 8 (i >> 1) and key 8 n + 2 t + (i & 1). */
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

static __device__ __forceinline__ float most_of_row(const float s[2][4], int i) {
    return fmaxf(fmaxf(s[0][2 * i], s[0][2 * i + 1]), fmaxf(s[1][2 * i], s[1][2 * i + 1]));
}

/* Moves the rows' maxima to those of their scores; keep: the factors of the sums so far. */
template <int D>
static __device__ __forceinline__ void tile_rescale(struct tile<D> &t, const float s[2][4],
                                                    float keep[2]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float top = fmaxf(t.m[i], row_max(most_of_row(s, i)));
        keep[i] = ptx_exp2(__fadd_rn(t.m[i], -top));
        t.m[i] = top;
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) t.o[n][2 * i + j] = __fmul_rn(t.o[n][2 * i + j], keep[i]);
    }
}

/* Turns scores into exponentials relative to the rows' maxima, and adds them up. One vote tells
 * whether a maximum moves, so lanes exchange maxima only then. */
template <int D>
static __device__ __forceinline__ void tile_softmax(struct tile<D> &t, float s[2][4]) {
    float keep[2] = {1, 1};
    if (__any_sync(WARP_ALL, most_of_row(s, 0) > t.m[0] || most_of_row(s, 1) > t.m[1]))
        tile_rescale<D>(t, s, keep);
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[n][i] = ptx_exp2(__fadd_rn(s[n][i], -t.m[i >> 1]));
#pragma unroll
    for (int i = 0; i < 2; i++)
        t.l[i] = fmaf(t.l[i], keep[i],
                      __fadd_rn(__fadd_rn(s[0][2 * i], s[0][2 * i + 1]),
                                __fadd_rn(s[1][2 * i], s[1][2 * i + 1])));
}

/* Values at or after the stream's end may be NaN, and 0 * NaN is NaN. */
static __device__ __forceinline__ uint32_t mask_pair(uint32_t pair, int entry, int length) {
    if (entry >= length) return 0;
    return entry + 1 >= length ? pair & 0xffffu : pair;
}

/* Layout of the tile's sums: tile_pair is the pair of dims from tile_dim on of row g + 8 row. A
 * transposed matrix of e4m3 or of codes has two dims of two keys in a register: the even dims of 16
 * form one fragment, the odd ones the next. */
template <int E> static __device__ __forceinline__ int tile_dim(int n, int lane) {
    return E < 2 ? 16 * (n >> 1) + 4 * (lane & 3) + 2 * (n & 1) : 8 * n + 2 * (lane & 3);
}

template <int D, int E>
static __device__ __forceinline__ float2 tile_pair(const float o[D / 8][4], int n, int row) {
    int odd = n & 1;
    float2 pair = {o[n][2 * row], o[n][2 * row + 1]};
    if (E < 2) pair = {o[n - odd][2 * row + odd], o[n - odd + 1][2 * row + odd]};
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

/* TAIL: some of the keys may be beyond the end of the stream. A parameter of the template, because
 * in one loop for both the branch would keep each product behind its own load. */
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

/* Turns products into logits, in units of log 2; -INFINITY where a row does not see an entry. */
static __device__ __forceinline__ void tile_mask(float s[2][4], const struct rows &r,
                                                 const struct attend_args &a, int entry, int length,
                                                 int lane) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int low = r.places ? r.places[8 * i].low : r.clear;
        const int high = r.places ? r.places[8 * i].high : length;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float &score = s[k >> 1][2 * i + (k & 1)];
            const int e = entry + 8 * (k >> 1) + 2 * (lane & 3) + (k & 1);
            score = logit_of(score, a.scale, a.cap);
            if (e < low || e >= high) score = -INFINITY;
        }
    }
}

/* MASKED: some row does not see all of the keys, or scores are capped. A parameter of the template,
 * because most tiles of keys need no mask, and a branch for each score would keep the products
 * apart. Both give a row the same bits. */
template <int D, int E, bool MASKED>
static __device__ __forceinline__ void tile_step_as(struct tile<D> &t, const struct rows &r,
                                                    const struct attend_args &a, const char *stage,
                                                    int key, int entry, int length, int lane) {
    float s[2][4];
    const char *page = stage_page<D, E>(stage, key);
    const int place = key % shape<D, E>::P; /* the key's place in its page */
    if (E == 0)
        row8_scores<D>(t.q, t.by, page, place, lane, s);
    else
        tile_scores<D, E>(t, stage, key, lane, s);
    if (MASKED) tile_mask(s, r, a, entry, length, lane);
#pragma unroll
    for (int i = 0; !MASKED && i < 8; i++) s[i >> 2][i & 3] = __fmul_rn(s[i >> 2][i & 3], a.scale);
    tile_softmax<D>(t, s);
    if (E == 0) {
        row8_add_values<D>(t.o, page, place, lane, s);
        return;
    }
    const uint32_t p[4] = {pack<E>(s[0][0], s[0][1]), pack<E>(s[0][2], s[0][3]),
                           pack<E>(s[1][0], s[1][1]), pack<E>(s[1][2], s[1][3])};
    tile_add_values<D, E, MASKED>(t, stage, key, lane, p, entry, length);
}

/* Processes 16 keys: from row `key` of the stage and entry `entry` of the stream on. All lanes of a
 * warp. */
template <int D, int E>
static __device__ __forceinline__ void tile_step(struct tile<D> &t, const struct rows &r,
                                                 const struct attend_args &a, const char *stage,
                                                 int key, int entry, int length, int lane) {
    if (entry >= r.clear && entry + TILE_KEYS <= r.clear_to)
        tile_step_as<D, E, false>(t, r, a, stage, key, entry, length, lane);
    else
        tile_step_as<D, E, true>(t, r, a, stage, key, entry, length, lane);
}

/* ---- Folding chunks ---- */

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

/* ---- Rows of a span ---- */

/* The first entry that a token of the span sees. */
static __device__ __forceinline__ int window_start(const struct attend_args &a,
                                                   const struct span &s, const int32_t *table,
                                                   int length, int token) {
    if (!a.sliding_window) return 0;
    return pages_before_last(a.pages, table, length, s.pos + token - a.sliding_window + 1,
                             s.pos + s.count - 1);
}

/* The end of the entries that a token of the span sees. Later tokens do not see fewer. */
static __device__ __forceinline__ int sight_end(const struct attend_args &a, const struct span &s,
                                                int length, int token) {
    return length - s.count + token + 1 + (a.ahead ? a.ahead[s.row + token] : 0);
}

/* Packed row `index` of a span, and *queries, its own; NULL where there is no such row. */
static __device__ __forceinline__ struct row_place
place_of_row(const struct attend_args &a, const struct span &s, const int32_t *table, int length,
             int head, int index, const float **queries) {
    const int rows = s.count * a.group, at = index < rows ? index : rows - 1;
    int token = at / a.group, own = at % a.group;
    int64_t row = s.row + token, to = row * a.pages.heads_kv + head;
    struct row_place place = {NULL, window_start(a, s, table, length, token),
                              sight_end(a, s, length, token)};
    *queries = NULL;
    if (at != index) return place;
    *queries = a.queries + row * a.stride + (head * a.heads + a.query + own) * a.pages.head_dim;
    place.out = a.out + (to * a.group + own) * a.pages.head_dim;
    return place;
}

/* Packed rows from `first` on, whose places are written to shared memory, and the lane's queries.
 * All lanes of a warp: lane 0 has the first row, which sees the fewest new entries, lane 31 the
 * last one, which sees the fewest old ones. */
static __device__ __forceinline__ struct rows
rows_of(const struct attend_args &a, const struct span &s, const int32_t *table, int length,
        int head, int first, struct row_place *places, const float *queries[2], int lane) {
    struct rows r;
    struct row_place own[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int index = (lane >> 2) + 8 * i;
        own[i] = place_of_row(a, s, table, length, head, first + index, &queries[i]);
        if ((lane & 3) == 0) places[index] = own[i];
    }
    __syncwarp();
    const int least = __shfl_sync(WARP_ALL, own[0].high, 0);
    const int most = __shfl_sync(WARP_ALL, own[1].high, 31);
    r.places = places + (lane >> 2);
    r.most = first < s.count * a.group ? most : 0;
    r.clear = __shfl_sync(WARP_ALL, own[1].low, 31);
    r.clear_to = a.cap > 0 ? 0 : least;
    return r;
}

/* Fetches pages [page, page + PAGES) of the stream, BYTES each, as far as they are before
 * page_end. */
template <int PAGES, int BYTES>
static __device__ __forceinline__ void fetch(const struct fetchers &by, const struct pages &p,
                                             const int32_t *table, int page, int page_end,
                                             char *stage, uint64_t *barrier) {
    fetch_pages(by, p, table + page, page_end - page < PAGES ? page_end - page : PAGES,
                {0, BYTES, BYTES}, stage, barrier);
}

/* prefill.cu: the rows of `tile_count` > 0 tiles. */
void attend_prompts(struct cuda *cuda, const struct attend_args &args, int tile_count);
/* attend_wide.cu: all rows, where keys hold the values or heads have WIDE_DIM numbers; the least
 * shared memory of a block. */
void attend_wide(struct cuda *cuda, const struct attend_args &args, int tile_count);
size_t attend_wide_shared(const struct cuda *cuda, const struct heads_kind *kind);
/* Do rows of such heads need attend_wide? */
static inline bool kind_is_wide(const struct cuda *cuda, const struct heads_kind *kind) {
    return cuda->pages.latent || kind->head_dim == WIDE_DIM;
}

#endif
