/* Attention of prompts: the kernel of tiles of PREFILL_ROWS rows. attend.cuh has the arithmetic. */
#include "kernels/cuda/attend.cuh"

#define TOTAL_PAIRS 8 /* pairs of sums that are read together */

template <int D, int E>
static __device__ __forceinline__ struct reach reach_of(const struct attend_args &a,
                                                        const struct span &s, int first, int head) {
    typedef shape<D, E> S;
    struct reach r;
    int stream = a.first + head;
    r.table = pages_table(a.pages, s.slot, stream);
    r.length = *pages_length(a.pages, s.slot, stream);
    int last = first + PREFILL_ROWS - 1, all = s.count * a.group - 1;
    r.end = sight_end(a, s, r.length, (last < all ? last : all) / a.group);
    r.begin =
        window_start(a, s, r.table, r.length, first / a.group) / S::PREFILL_KEYS * S::PREFILL_KEYS;
    /* Whole tiles of keys, up to the end of the stream: masked keys are multiplied by zero. */
    int tiles_end = (r.end + TILE_KEYS - 1) / TILE_KEYS * TILE_KEYS;
    r.page = r.begin / S::P;
    r.page_end = pages_for(a.pages, tiles_end < r.length ? tiles_end : r.length);
    r.stages = (r.end - r.begin + S::PREFILL_KEYS - 1) / S::PREFILL_KEYS;
    return r;
}

/* Starts the copy of stage `i`, if there is one, to its place in the ring. */
template <int D, int E>
static __device__ __forceinline__ void prefill_fetch(const struct attend_args &a,
                                                     const struct reach &r, int i, char *ring,
                                                     uint64_t *barriers) {
    typedef shape<D, E> S;
    int at = i % S::PREFILL_STAGES;
    const struct fetchers block = {(int)threadIdx.x, S::PREFILL_WARPS * 32};
    if (i < r.stages)
        fetch<S::PREFILL_PAGES, S::PAGE>(block, a.pages, r.table, r.page + i * S::PREFILL_PAGES,
                                         r.page_end, ring + at * S::PREFILL_BYTES, &barriers[at]);
}

/* All chunks so far, of the two rows of this lane, in the pairs of tile_pair. Heads of 256 numbers
 * leave no registers for these sums beside those of the current chunk, so they are in the rows'
 * places of the output: each number is read and written by one thread, once per chunk. */
template <int D> struct total {
    static const bool IN_OUTPUT = D > 128;
    struct fold f[2];
    float2 o[2][IN_OUTPUT ? 1 : D / 8];
    bool begun; /* a chunk has been folded */
};

template <int D>
static __device__ __forceinline__ void total_start(struct total<D> &all,
                                                   const struct attend_args &a, int row) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        all.f[i] = fold_start(a, blockIdx.y, (row + 8 * i) % a.group);
#pragma unroll
        for (int n = 0; n < (all.IN_OUTPUT ? 1 : D / 8); n++) all.o[i][n] = {0, 0};
    }
    all.begun = false;
}

/* Folds the chunk's pairs of row i, from `first` on, into the total. END: the row is written. The
 * pairs are read together, before the first is written. Whether there is such a row is a predicate
 * of loads and stores: with a branch around them, registers are spilled. */
template <int D, int E, bool END>
static __device__ __forceinline__ void total_pairs(struct total<D> &all, const struct tile<D> &t,
                                                   struct fold_weights w, float *out, int i,
                                                   int first, int lane) {
    const bool IN_OUTPUT = total<D>::IN_OUTPUT, there = out != NULL;
    float2 sum[TOTAL_PAIRS];
#pragma unroll
    for (int n = 0; n < TOTAL_PAIRS; n++) {
        sum[n] = {0, 0};
        if (!IN_OUTPUT)
            sum[n] = all.o[i][first + n];
        else if (all.begun && there)
            sum[n] = *(const float2 *)(out + tile_dim<E>(first + n, lane));
    }
#pragma unroll
    for (int n = 0; n < TOTAL_PAIRS; n++) {
        float2 add = tile_pair<D, E>(t.o, first + n, i);
        sum[n] = {fold_value(w, sum[n].x, add.x), fold_value(w, sum[n].y, add.y)};
        if (!IN_OUTPUT) all.o[i][first + n] = sum[n];
        if (END) sum[n] = {fold_end(all.f[i], sum[n].x), fold_end(all.f[i], sum[n].y)};
        if ((END || IN_OUTPUT) && there) *(float2 *)(out + tile_dim<E>(first + n, lane)) = sum[n];
    }
}

/* Folds the chunk in `t` into the total, and starts the next one. END: it was the last chunk,
 * partial or without entries, which changes nothing, and the rows are written. */
template <int D, int E, bool END>
static __device__ __forceinline__ void total_fold(struct total<D> &all, struct tile<D> &t,
                                                  const struct rows &r, int lane) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        struct fold_weights w = fold_chunk(all.f[i], t.m[i], row_sum(t.l[i]));
#pragma unroll
        for (int n = 0; n < D / 8; n += TOTAL_PAIRS)
            total_pairs<D, E, END>(all, t, w, r.places[8 * i].out, i, n, lane);
    }
    all.begun = true;
    tile_start<D>(t);
}

/* Block (tile, head): 8 warps of 16 rows read every page together. */
template <int D, int E>
static __global__ void __launch_bounds__(shape<D, E>::PREFILL_WARPS * 32, 1)
    k_attend_prefill(const struct attend_args a) {
    typedef shape<D, E> S;
    SHARED_MEMORY(shared);
    uint64_t *barriers = (uint64_t *)(shared + S::PREFILL_STAGES * S::PREFILL_BYTES);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    struct prefill_kept *kept = (struct prefill_kept *)(barriers + S::PREFILL_STAGES);
    if (threadIdx.x == 0) fetch_open(barriers, S::PREFILL_STAGES, S::PREFILL_WARPS * 32);
    ptx_overlap_grids();
    if (pages_failed(a.pages)) return;
    const struct prefill_tile place = a.tiles[blockIdx.x];
    const struct span s = a.spans[place.span];
    if (threadIdx.x == 0) kept->reach = reach_of<D, E>(a, s, place.first, blockIdx.y);
    __syncthreads();
    const struct reach &reach = kept->reach;
    for (int i = 0; i < S::PREFILL_STAGES; i++) prefill_fetch<D, E>(a, reach, i, shared, barriers);
    const float *queries[2];
    struct tile<D> t;
    struct total<D> all;
    int first = place.first + warp * TILE_ROWS;
    total_start<D>(all, a, first + (lane >> 2));
    const struct rows r = rows_of(a, s, reach.table, reach.length, blockIdx.y, first,
                                  kept->rows + warp * TILE_ROWS, queries, lane);
    tile_load_queries<D, E>(t, queries, lane);
    tile_start<D>(t);
    for (int i = 0; i < reach.stages; i++) {
        int at = i % S::PREFILL_STAGES, entry = reach.begin + i * S::PREFILL_KEYS;
        ptx_barrier_wait(&barriers[at], (uint32_t)(i / S::PREFILL_STAGES) & 1);
        for (int key = 0; key < S::PREFILL_KEYS && entry + key < r.most; key += TILE_KEYS) {
            tile_step<D, E>(t, r, a, shared + at * S::PREFILL_BYTES, key, entry + key, reach.length,
                            lane);
        }
        if ((entry + S::PREFILL_KEYS) % CHUNK_KEYS == 0 && entry < r.most)
            total_fold<D, E, false>(all, t, r, lane);
        __syncthreads();
        prefill_fetch<D, E>(a, reach, i + S::PREFILL_STAGES, shared, barriers);
    }
    total_fold<D, E, true>(all, t, r, lane);
}

template <int D, int E>
static void prompts_as(struct cuda *cuda, const struct attend_args &args, int tile_count) {
    typedef shape<D, E> S;
    LAUNCH_OVERLAPPED(cuda->device, (k_attend_prefill<D, E>),
                      dim3((unsigned)tile_count, (unsigned)args.pages.heads_kv),
                      S::PREFILL_WARPS * 32, S::PREFILL_SHARED, args);
}

template <int D>
static void prompts(struct cuda *cuda, const struct attend_args &args, int tile_count) {
    if (cuda->options.dtype == KERN_ROW8)
        prompts_as<D, 0>(cuda, args, tile_count);
    else if (cuda->options.dtype == KERN_E4M3)
        prompts_as<D, 1>(cuda, args, tile_count);
    else
        prompts_as<D, 2>(cuda, args, tile_count);
}

void attend_prompts(struct cuda *cuda, const struct attend_args &args, int tile_count) {
    if (args.pages.head_dim == 64) prompts<64>(cuda, args, tile_count);
    if (args.pages.head_dim == 128) prompts<128>(cuda, args, tile_count);
    if (args.pages.head_dim == 256) prompts<256>(cuda, args, tile_count);
}
