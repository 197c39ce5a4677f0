/* Attention where a warp's registers do not hold the sums of 16 rows: heads of WIDE_DIM numbers,
 * and latent vectors, entries whose first numbers are their value (struct kern_latent), which all
 * query heads share, so that the packed rows (token, query head) of a token are many. Prompts and
 * decoding have one kernel: a row's bits are the same however its prompt was split, as in
 * attend.cuh, whose chunks and folds these are.
 *
 * A block has TILES tiles of 16 packed rows of a KV head, and PARTS warps for each. A stage is
 * STAGE_KEYS keys, or their values where those are apart (SIDES 2), copied once. Each warp of a
 * tile multiplies 16 of the keys with the tile's queries, whose numbers are in shared memory, too;
 * the scores pass through shared memory, so that every warp of the tile has the softmax of all;
 * each adds up the values' numbers of its own slices, 16 numbers each, every PARTS-th. The sums of
 * all chunks so far are in the rows' places of the output.
 *
 * Rows of DeepSeek's 576 numbers, 1,152 bytes: two stages take 147,456 bytes, queries 37,376,
 * scores 9,216: 194,064 with the barriers, of the 232,448 that a block of 9.0 has; with one stage
 * 120,336, of the 166,912 of 8.0. Heads of 512 numbers: two stages take 133,120 bytes, queries
 * 33,280, together 175,632, so that keys arrive while values are added; with one stage 109,072.
 * Not measured. */
#include "kernels/cuda/attend.cuh"

#define TILES      2
#define PARTS      4
#define THREADS    (TILES * PARTS * 32)
#define STAGE_KEYS (PARTS * TILE_KEYS)
#define STAGES     2 /* fewer on devices with less shared memory */
#define BLOCK_ROWS (TILES * TILE_ROWS)
#define SLICE      16                                  /* numbers of values */
#define SLICES     (LATENT_VALUES_MAX / SLICE / PARTS) /* slices of a warp */
/* Numbers from one row of scores to the next: free of conflicts */
#define SCORES_ROW (STAGE_KEYS + 8)
#define LANE_KEYS  (STAGE_KEYS / 4) /* scores of a row that a lane has */
/* Rows of WIDE_DIM numbers: entries of a page, and bytes from one side of a page in shared memory
 * to that of the next. Four rows fill half of the banks, those of the next page the other half. */
#define WIDE_SLOTS (PAGE_SIDE / (2 * WIDE_DIM))
#define WIDE_APART (PAGE_SIDE + PANEL_BYTES / 2)

static_assert(CHUNK_KEYS % STAGE_KEYS == 0, "chunks are whole stages");
static_assert(PREFILL_ROWS % BLOCK_ROWS == 0, "tiles of prompts are whole blocks");
static_assert(WIDE_DIM <= LATENT_VALUES_MAX, "warps have slices for all numbers of a value");

struct wide_args {
    struct attend_args a;
    int values;  /* numbers of a value */
    int stages;  /* in shared memory */
    int prompts; /* blocks of prompts, before those of decoding rows */
    int each;    /* blocks of a decoding row */
};

/* Bytes from one row of queries in shared memory to the next, free of conflicts for ldmatrix. */
static __host__ __device__ __forceinline__ int query_row_bytes(int row_bytes) {
    return row_bytes + 16;
}

template <int SIDES> static __host__ __device__ __forceinline__ int stage_bytes(int row_bytes) {
    return SIDES == 1 ? STAGE_KEYS * row_bytes : STAGE_KEYS / WIDE_SLOTS * WIDE_APART;
}

template <int SIDES>
static __host__ __device__ __forceinline__ int wide_shared(int row_bytes, int stages) {
    return stages * stage_bytes<SIDES>(row_bytes) + BLOCK_ROWS * query_row_bytes(row_bytes) +
           BLOCK_ROWS * SCORES_ROW * (int)sizeof(float) + STAGES * (int)sizeof(uint64_t);
}

/* ---- Rows and entries of a block ---- */

/* Packed rows [first, first + BLOCK_ROWS) of a span, as far as it has them, of a KV head. */
struct wide_place {
    struct span span;
    int first, head;
};

static __device__ struct wide_place place_of_block(const struct wide_args &l) {
    const int index = (int)blockIdx.x - l.prompts, head = (int)blockIdx.y;
    if (index >= 0)
        return {l.a.spans[l.a.decode[index / l.each]], index % l.each * BLOCK_ROWS, head};
    const int each = PREFILL_ROWS / BLOCK_ROWS;
    const struct prefill_tile tile = l.a.tiles[blockIdx.x / each];
    return {l.a.spans[tile.span], tile.first + (int)blockIdx.x % each * BLOCK_ROWS, head};
}

/* The entries that the block's rows see, and their pages. */
struct wide_reach {
    const int32_t *table;
    int length;     /* entries of the stream */
    int begin, end; /* begin is the start of a chunk */
    int stages;
};

static __device__ struct wide_reach wide_reach_of(const struct attend_args &a,
                                                  const struct wide_place &place) {
    const struct span &s = place.span;
    const int last = place.first + BLOCK_ROWS - 1, all = s.count * a.group - 1;
    struct wide_reach r;
    r.table = pages_table(a.pages, s.slot, a.first + place.head);
    r.length = *pages_length(a.pages, s.slot, a.first + place.head);
    r.begin = 0;
    r.end = sight_end(a, s, r.length, (last < all ? last : all) / a.group);
    if (a.sliding_window)
        r.begin = pages_before(a.pages, r.table, r.length,
                               s.pos + place.first / a.group - a.sliding_window + 1) /
                  CHUNK_KEYS * CHUNK_KEYS;
    r.stages = (r.end - r.begin + STAGE_KEYS - 1) / STAGE_KEYS;
    return r;
}

/* The two rows of this lane (g and g + 8 of its tile). */
struct wide_rows {
    float *out[2]; /* NULL: no such row */
    int low[2], high[2];
};

static __device__ struct wide_rows wide_rows_of(const struct wide_args &l,
                                                const struct wide_place &place,
                                                const struct wide_reach &reach, int tile,
                                                int lane) {
    const struct attend_args &a = l.a;
    const struct span &s = place.span;
    struct wide_rows r = {};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int index = place.first + tile * TILE_ROWS + (lane >> 2) + 8 * i;
        if (index >= s.count * a.group) continue;
        const int token = index / a.group, own = index % a.group;
        const int64_t to = (int64_t)(s.row + token) * a.pages.heads_kv + place.head;
        r.out[i] = a.out + (to * a.group + own) * l.values;
        r.high[i] = sight_end(a, s, reach.length, token);
        if (a.sliding_window)
            r.low[i] = pages_before(a.pages, reach.table, reach.length,
                                    s.pos + token - a.sliding_window + 1);
    }
    return r;
}

/* The block's queries, in bf16, with zeros behind the last number and where there is no row. */
static __device__ void load_block_queries(const struct attend_args &a,
                                          const struct wide_place &place, char *to) {
    const struct span &s = place.span;
    const int words = a.pages.row_bytes / 4, dim = a.pages.head_dim,
              first = place.head * a.heads + a.query;
    for (int i = threadIdx.x; i < BLOCK_ROWS * words; i += THREADS) {
        const int row = i / words, at = 2 * (i % words), index = place.first + row;
        float2 pair = {0, 0};
        if (index < s.count * a.group && at < dim)
            pair = *(const float2 *)(a.queries + (s.row + index / a.group) * a.stride +
                                     (first + index % a.group) * dim + at);
        *(uint32_t *)(to + row * query_row_bytes(a.pages.row_bytes) + 2 * at) =
            ptx_pack_bf16(pair.x, pair.y);
    }
}

/* Starts the copy of stage `i`, if there is one, to its place in the ring. Where values are apart,
 * every second stage has those of the keys before. */
template <int SIDES>
static __device__ void fetch_stage(const struct wide_args &l, const struct wide_reach &r, int i,
                                   char *ring, uint64_t *barriers) {
    const struct pages &p = l.a.pages;
    const struct fetchers block = {(int)threadIdx.x, THREADS};
    const int slots = SIDES == 1 ? p.page_slots : WIDE_SLOTS;
    const int at = i % l.stages, most = STAGE_KEYS / slots;
    const int page = r.begin / slots + i / SIDES * most, count = (r.end + slots - 1) / slots - page;
    const struct page_part whole = {0, p.page_bytes, p.page_bytes},
                           side = {i % SIDES * PAGE_SIDE, PAGE_SIDE, WIDE_APART};
    if (i < SIDES * r.stages)
        fetch_pages(block, p, r.table + page, count < most ? count : most,
                    SIDES == 1 ? whole : side, ring + at * stage_bytes<SIDES>(p.row_bytes),
                    &barriers[at]);
}

/* ---- Sixteen rows ---- */

/* A key of a stage, for the lane that names it to ldmatrix. */
struct wide_key {
    const char *row;
    int panel, swizzle; /* panel: bytes from one panel of its page to the next */
};

template <int SIDES>
static __device__ __forceinline__ struct wide_key key_of_stage(const struct pages &p,
                                                               const char *stage, int key) {
    const int slots = SIDES == 1 ? p.page_slots : WIDE_SLOTS, row = key % slots;
    const int apart = SIDES == 1 ? p.page_bytes : WIDE_APART;
    return {stage + key / slots * apart + row * PANEL_BYTES, slots * PANEL_BYTES, row & 7};
}

static __device__ __forceinline__ const char *chunk_of_key(const struct wide_key &key, int chunk) {
    return key.row + (chunk >> 3) * key.panel + (((chunk & 7) ^ key.swizzle) << 4);
}

/* A warp holds the maximum and the sum of each row of its tile, and the values of its own slices.
 */
struct wide_tile {
    float o[SLICES][2][4];
    float m[2], l[2]; /* l: this lane's part of the sum */
};

static __device__ __forceinline__ void wide_start(struct wide_tile &t) {
#pragma unroll
    for (int j = 0; j < SLICES; j++)
#pragma unroll
        for (int i = 0; i < 8; i++) t.o[j][i >> 2][i & 3] = 0;
    t.m[0] = t.m[1] = -INFINITY;
    t.l[0] = t.l[1] = 0;
}

/* Writes the scores of 16 keys, from `key` of the stage and `entry` of the stream on, in units of
 * log 2; -INFINITY where a row does not see one. */
template <int SIDES>
static __device__ void score_keys(const struct attend_args &a, const struct wide_rows &r,
                                  const char *queries, const char *stage, int key, int entry,
                                  int end, float *scores, int lane) {
    const struct wide_key mine =
        key_of_stage<SIDES>(a.pages, stage, key + (lane & 7) + 8 * (lane >> 4));
    const char *q =
        queries + ((lane & 7) + 8 * (lane >> 3 & 1)) * query_row_bytes(a.pages.row_bytes);
    float s[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
    for (int k = 0; k < a.pages.row_bytes / 32 && entry < end; k++) {
        uint32_t row[4], b[4];
        ptx_load_matrix(row, q + (2 * k + (lane >> 4)) * 16);
        ptx_load_matrix(b, chunk_of_key(mine, 2 * k + (lane >> 3 & 1)));
        ptx_mma(s[0], row, b[0], b[1]);
        ptx_mma(s[1], row, b[2], b[3]);
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int at = 8 * n + 2 * (lane & 3), low = r.low[i], high = r.high[i];
            const int e = entry + at;
            float2 pair = {-INFINITY, -INFINITY};
            if (e >= low && e < high) pair.x = logit_of(s[n][2 * i], a.scale, a.cap);
            if (e + 1 >= low && e + 1 < high) pair.y = logit_of(s[n][2 * i + 1], a.scale, a.cap);
            *(float2 *)(scores + ((lane >> 2) + 8 * i) * SCORES_ROW + key + at) = pair;
        }
}

/* Turns a row's scores of a stage into probabilities relative to the new maximum; returns the
 * factor of the old sums. */
static __device__ __forceinline__ float wide_softmax(float &m, float &l, float x[LANE_KEYS]) {
    float top = m, sum = 0;
#pragma unroll
    for (int i = 0; i < LANE_KEYS; i++) top = fmaxf(top, x[i]);
    top = row_max(top);
    const float base = top == -INFINITY ? 0 : top, keep = ptx_exp2(__fadd_rn(m, -base));
#pragma unroll
    for (int i = 0; i < LANE_KEYS; i++) {
        x[i] = ptx_exp2(__fadd_rn(x[i], -base));
        sum = __fadd_rn(sum, x[i]);
    }
    m = top;
    l = fmaf(l, keep, sum);
    return keep;
}

/* Adds 16 keys' values with the probabilities p; keys from `end` on may be NaN. */
template <int SIDES>
static __device__ __forceinline__ void
add_wide_values(struct wide_tile &t, const struct wide_args &l, const char *stage, int key,
                int entry, int end, const uint32_t p[4], int part, int lane) {
    const struct wide_key mine =
        key_of_stage<SIDES>(l.a.pages, stage, key + (lane & 7) + 8 * (lane >> 3 & 1));
#pragma unroll
    for (int j = 0; j < SLICES; j++) {
        const int slice = part + PARTS * j;
        uint32_t b[4];
        if (slice * SLICE >= l.values) continue;
        ptx_load_matrix_transposed(b, chunk_of_key(mine, 2 * slice + (lane >> 4)));
#pragma unroll
        for (int i = 0; i < 4; i++)
            b[i] = mask_pair(b[i], entry + 2 * (lane & 3) + 8 * (i & 1), end);
        ptx_mma(t.o[j][0], p, b[0], b[1]);
        ptx_mma(t.o[j][1], p, b[2], b[3]);
    }
}

/* The softmax of a stage's scores and the sums of its values; keys from `entry` of the stream on.
 */
template <int SIDES>
static __device__ void add_stage(struct wide_tile &t, const struct wide_args &l,
                                 const float *scores, const char *stage, int entry, int end,
                                 int part, int lane) {
    float x[2][LANE_KEYS], keep[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float *row = scores + ((lane >> 2) + 8 * i) * SCORES_ROW + 2 * (lane & 3);
#pragma unroll
        for (int n = 0; n < LANE_KEYS / 2; n++) {
            const float2 pair = *(const float2 *)(row + 8 * n);
            x[i][2 * n] = pair.x;
            x[i][2 * n + 1] = pair.y;
        }
        keep[i] = wide_softmax(t.m[i], t.l[i], x[i]);
    }
    if (__any_sync(WARP_ALL, keep[0] != 1 || keep[1] != 1)) {
#pragma unroll
        for (int j = 0; j < SLICES; j++)
#pragma unroll
            for (int i = 0; i < 8; i++)
                t.o[j][i >> 2][i & 3] = __fmul_rn(t.o[j][i >> 2][i & 3], keep[i >> 1 & 1]);
    }
#pragma unroll
    for (int n = 0; n < PARTS; n++) {
        const int key = n * TILE_KEYS;
        const uint32_t p[4] = {ptx_pack_bf16(x[0][4 * n], x[0][4 * n + 1]),
                               ptx_pack_bf16(x[1][4 * n], x[1][4 * n + 1]),
                               ptx_pack_bf16(x[0][4 * n + 2], x[0][4 * n + 3]),
                               ptx_pack_bf16(x[1][4 * n + 2], x[1][4 * n + 3])};
        if (entry + key < end)
            add_wide_values<SIDES>(t, l, stage, key, entry + key, end, p, part, lane);
    }
}

/* Folds the chunk in `t` into the rows' places of the output, and starts the next one. The first
 * one finds nothing there; the last one, partial or without entries, ends the rows. */
static __device__ void fold_wide_chunk(struct wide_tile &t, struct fold f[2],
                                       const struct wide_rows &r, int values, bool first, bool last,
                                       int part, int lane) {
    struct fold_weights w[2];
#pragma unroll
    for (int i = 0; i < 2; i++) w[i] = fold_chunk(f[i], t.m[i], row_sum(t.l[i]));
#pragma unroll
    for (int j = 0; j < SLICES; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = i & 1, n = i >> 1;
            const int dim = (part + PARTS * j) * SLICE + 8 * n + 2 * (lane & 3);
            float2 sum = {0, 0};
            if (!r.out[row] || dim >= values) continue;
            float2 *to = (float2 *)(r.out[row] + dim);
            if (!first) sum = *to;
            sum = {fold_value(w[row], sum.x, t.o[j][n][2 * row]),
                   fold_value(w[row], sum.y, t.o[j][n][2 * row + 1])};
            if (last) sum = {fold_end(f[row], sum.x), fold_end(f[row], sum.y)};
            *to = sum;
        }
    wide_start(t);
}

/* Waits for stage `i`. */
static __device__ __forceinline__ const char *
wide_wait(const struct wide_args &l, int i, const char *ring, int bytes, uint64_t *barriers) {
    const int at = i % l.stages;
    ptx_barrier_wait(&barriers[at], (uint32_t)(i / l.stages) & 1);
    return ring + at * bytes;
}

template <int SIDES>
static __global__ void __launch_bounds__(THREADS, 1) k_attend_wide(const struct wide_args l) {
    SHARED_MEMORY(shared);
    const struct attend_args &a = l.a;
    const int lane = threadIdx.x % 32, tile = threadIdx.x / 32 / PARTS,
              part = threadIdx.x / 32 % PARTS, bytes = stage_bytes<SIDES>(a.pages.row_bytes);
    char *queries = shared + l.stages * bytes;
    float *scores = (float *)(queries + BLOCK_ROWS * query_row_bytes(a.pages.row_bytes));
    uint64_t *barriers = (uint64_t *)(scores + BLOCK_ROWS * SCORES_ROW);
    if (threadIdx.x == 0) fetch_open(barriers, l.stages, THREADS);
    __syncthreads();
    ptx_overlap_grids();
    if (pages_failed(a.pages)) return;
    const struct wide_place place = place_of_block(l);
    if (place.first >= place.span.count * a.group) return;
    const struct wide_reach reach = wide_reach_of(a, place);
    for (int i = 0; i < l.stages; i++) fetch_stage<SIDES>(l, reach, i, shared, barriers);
    load_block_queries(a, place, queries);
    const struct wide_rows r = wide_rows_of(l, place, reach, tile, lane);
    queries += tile * TILE_ROWS * query_row_bytes(a.pages.row_bytes);
    scores += tile * TILE_ROWS * SCORES_ROW;
    struct fold f[2];
    for (int i = 0; i < 2; i++)
        f[i] = fold_start(a, place.head,
                          (place.first + tile * TILE_ROWS + (lane >> 2) + 8 * i) % a.group);
    struct wide_tile t;
    wide_start(t);
    bool first = true;
    __syncthreads(); /* the queries are there */
    for (int i = 0; i < reach.stages; i++) {
        const int entry = reach.begin + i * STAGE_KEYS, key = part * TILE_KEYS;
        const char *stage = wide_wait(l, SIDES * i, shared, bytes, barriers);
        score_keys<SIDES>(a, r, queries, stage, key, entry + key, reach.end, scores, lane);
        __syncthreads(); /* the scores are there, and keys have been read */
        if (SIDES == 2) {
            fetch_stage<SIDES>(l, reach, SIDES * i + l.stages, shared, barriers);
            stage = wide_wait(l, SIDES * i + 1, shared, bytes, barriers);
        }
        add_stage<SIDES>(t, l, scores, stage, entry, reach.end, part, lane);
        if ((entry + STAGE_KEYS) % CHUNK_KEYS == 0 && i + 1 < reach.stages) {
            fold_wide_chunk(t, f, r, l.values, first, false, part, lane);
            first = false;
        }
        __syncthreads(); /* values and scores have been read */
        fetch_stage<SIDES>(l, reach, SIDES * i + SIDES - 1 + l.stages, shared, barriers);
    }
    fold_wide_chunk(t, f, r, l.values, first, true, part, lane);
}

/* ---- The host's side ---- */

size_t attend_wide_shared(const struct cuda *cuda, const struct heads_kind *kind) {
    return (size_t)(cuda->pages.latent ? wide_shared<1>(kind->row_bytes, 1)
                                       : wide_shared<2>(kind->row_bytes, 1));
}

template <int SIDES> static void attend_sides(struct cuda *cuda, struct wide_args &l) {
    const int row_bytes = l.a.pages.row_bytes;
    l.stages = STAGES;
    while (l.stages > 1 &&
           (size_t)wide_shared<SIDES>(row_bytes, l.stages) > device_shared(cuda->device))
        l.stages--;
    LAUNCH_OVERLAPPED(
        cuda->device, (k_attend_wide<SIDES>),
        dim3((unsigned)(l.prompts + l.a.decode_count * l.each), (unsigned)l.a.pages.heads_kv),
        THREADS, (size_t)wide_shared<SIDES>(row_bytes, l.stages), l);
}

void attend_wide(struct cuda *cuda, const struct attend_args &args, int tile_count) {
    struct wide_args l = {};
    l.a = args;
    l.values = args.pages.latent ? cuda->options.latent : args.pages.head_dim;
    l.prompts = tile_count * (PREFILL_ROWS / BLOCK_ROWS);
    l.each = (args.group + BLOCK_ROWS - 1) / BLOCK_ROWS;
    if (args.pages.latent)
        attend_sides<1>(cuda, l);
    else
        attend_sides<2>(cuda, l);
}
