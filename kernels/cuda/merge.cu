/* Merging evicted entries into those that stay, D2O (arXiv 2406.13035), enum kern_merge;
 * kernels/cpu/merge.c is the oracle. All entries still lie in their old places.
 *
 *   k_merge_gone   the evicted entries of a stream, in order
 *   k_key_norms    1 / |k|                                                    (redundancy.cu)
 *   k_merge_find   PRODUCT_ROWS evicted keys with all of their stream: the most alike that stays
 *   k_merge_link   the stream's threshold; the members of each target as a list, oldest first
 *   k_merge_rows   a warp per target: its key and value with those of its members
 *
 * links[entry]: of one that stays, STAYS or its first member; of one that goes, GOES or the next
 * member of the same list. */
#include <math.h>

#include "kernels/cuda/block.cuh"
#include "kernels/cuda/evict.cuh"
#include "kernels/cuda/keys.cuh"
#include "kernels/cuda/row8.cuh"

#define THREADS     256
#define BLOCKS_EACH 2
#define STAYS       MERGE_STAYS
#define GOES        (-1)
#define NOBODY      MERGE_NOBODY

static __device__ __forceinline__ bool merges(const struct due &d,
                                              const struct stream_state &state) {
    return d.rule.merge != KERN_MERGE_NONE && state.kept > 0 && state.kept < state.length;
}

/* ---- Evicted entries ---- */

/* Does an evicted entry look for a target? */
static __device__ __forceinline__ bool seeks(const struct evict_args &a, const struct due &d,
                                             const struct stream_state &state, int64_t side) {
    const struct pages &p = a.streams.pages;
    if (d.reach.scopes == 0) return true;
    return compare_rank(p, side, state.stream, a.cutoffs[d.reach.first_cutoff + state.stream],
                        FIELDS) >= 0;
}

/* Block (state). Sets the state's work to the number of blocks of entries that look for a
 * target. */
static __global__ void k_merge_gone(const struct evict_args a) {
    SHARED_MEMORY(shared);
    int *room = (int *)shared;
    const struct pages &p = a.streams.pages;
    if (pages_failed(p)) return;
    struct stream_state &state = a.streams.states[blockIdx.x];
    const struct due &d = a.due[state.subject];
    bool on = merges(d, state);
    if (threadIdx.x == 0) state.gone = state.work = 0;
    if (!on) return;
    const int32_t *table = pages_table(p, d.slot, state.stream);
    const struct cutoff cutoff = final_cutoff(a, d, state.stream);
    int at = 0, more;
    for (int first = 0; first < state.length; first += (int)blockDim.x) {
        int i = first + (int)threadIdx.x;
        bool held = i < state.length;
        int64_t side = held ? pages_side(p, table, i) : 0;
        bool stays = held && is_kept(p, side, state.stream, cutoff, d.least);
        bool looks = held && !stays && seeks(a, d, state, side);
        int place = at + block_scan(looks ? 1 : 0, room, &more);
        at += more;
        if (!held) continue;
        a.links[state.first + i] = stays ? STAYS : GOES;
        if (looks) a.gone[state.first + place] = i;
    }
    const int rows = d.reach.scopes > 0 ? JOIN_ROWS : PRODUCT_ROWS;
    if (threadIdx.x == 0) state.gone = at;
    if (threadIdx.x == 0) state.work = (at + rows - 1) / rows;
}

/* ---- Targets ---- */

struct seekers {
    struct product product;
    float *norms;          /* shared, [PRODUCT_KEYS]: norms of keys that are kept; NaN for others */
    struct likeness *best; /* shared, [PRODUCT_ROWS] */
    const struct stream_state *state;
    const int32_t *table;
    int first, rows; /* evicted entries of the stream */
};

/* A warp: the best of the current keys for one row, entries `base` on. */
static __device__ struct likeness seek(const struct evict_args &a, const struct seekers &s, int row,
                                       int base, int keys, int lane) {
    float norm = a.norm[s.state->first + a.gone[s.state->first + s.first + row]];
    struct likeness best = {0, NOBODY};
    for (int at = lane; at < keys; at += 32) {
        float alike =
            __fmul_rn(__fmul_rn(s.product.out[row * PRODUCT_STRIDE + at], norm), s.norms[at]);
        if (alike == alike) best = better(best, {alike, base + at});
    }
    for (int by = 16; by > 0; by /= 2) {
        struct likeness other = {__shfl_xor_sync(WARP_ALL, best.alike, by),
                                 __shfl_xor_sync(WARP_ALL, best.entry, by)};
        best = better(best, other);
    }
    return best;
}

template <int D> static __device__ void seek_all(const struct evict_args &a, struct seekers &s) {
    const struct pages &p = a.streams.pages;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float nan = __uint_as_float(0x7fc00000u);
    for (int base = 0; base < s.state->length; base += PRODUCT_KEYS) {
        int keys = s.state->length - base < PRODUCT_KEYS ? s.state->length - base : PRODUCT_KEYS;
        product_fetch<D>(s.product, p, s.table, base, keys);
        for (int i = threadIdx.x; i < keys; i += PRODUCT_THREADS) {
            int64_t at = s.state->first + base + i;
            s.norms[i] = a.links[at] == STAYS ? a.norm[at] : nan;
        }
        product_wait<D>(s.product, p);
        __syncthreads();
        product_all<D>(s.product, s.rows, keys);
        __syncwarp(); /* rows are not shared between warps */
        for (int row = 16 * warp; row < 16 * warp + 16 && row < s.rows; row++) {
            struct likeness found = seek(a, s, row, base, keys, lane);
            if (lane == 0) s.best[row] = better(s.best[row], found);
        }
        __syncthreads();
    }
}

template <int D>
static __global__ void __launch_bounds__(PRODUCT_THREADS) k_merge_find(const struct evict_args a) {
    const int CHUNKS = D / CHUNK_DIMS;
    SHARED_MEMORY(shared);
    struct seekers s;
    s.product = product_open<D>(shared);
    s.norms = (float *)(shared + product_shape<D>::SHARED);
    s.best = (struct likeness *)(s.norms + PRODUCT_KEYS);
    const struct pages &p = a.streams.pages;
    if (pages_failed(p)) return;
    int count = *a.streams.item_count, row = threadIdx.x;
    for (int i = blockIdx.x; i < count; i += (int)gridDim.x) {
        const struct item item = a.streams.items[i];
        s.state = &a.streams.states[item.state];
        s.table = pages_table(p, a.due[s.state->subject].slot, s.state->stream);
        s.first = item.chunk * PRODUCT_ROWS;
        s.rows = s.state->gone - s.first < PRODUCT_ROWS ? s.state->gone - s.first : PRODUCT_ROWS;
        __syncthreads();
        for (int k = threadIdx.x; k < s.rows * CHUNKS; k += PRODUCT_THREADS)
            product_take_key<D>(s.product, k / CHUNKS, p, s.table,
                                a.gone[s.state->first + s.first + k / CHUNKS], k % CHUNKS);
        if (row < PRODUCT_ROWS) s.best[row] = {0, NOBODY};
        __syncthreads();
        seek_all<D>(a, s);
        if (row >= s.rows) continue;
        int64_t at = s.state->first + s.first + row;
        a.target[at] = s.best[row].entry;
        a.alike[s.state->first + a.gone[at]] = s.best[row].alike;
    }
}

/* ---- Lists ---- */

/* The stream's threshold, including this eviction's mean; NaN if no entry found a target. */
static __device__ float threshold(const struct evict_args &a, const struct due &d,
                                  const struct stream_state &state, double *room) {
    double sum = 0, found = 0;
    for (int k = threadIdx.x; k < state.gone; k += (int)blockDim.x) {
        if (a.target[state.first + k] == NOBODY) continue;
        sum += (double)a.alike[state.first + a.gone[state.first + k]];
        found += 1;
    }
    sum = block_total(sum, room);
    found = block_total(found, room);
    float mean = (float)(sum / found), beta = d.rule.merge_beta;
    float *tau = &a.streams.pages.tau[(int64_t)d.slot * a.streams.pages.streams + state.stream];
    float old = *tau;
    if (!isnan(mean) && !isnan(old))
        mean = __fadd_rn(__fmul_rn(beta, mean), __fmul_rn(__fadd_rn(1, -beta), old));
    __syncthreads();
    if (threadIdx.x == 0 && !isnan(mean)) *tau = mean;
    return mean;
}

/* One warp: links 32 evicted entries at the head of their lists. Tiles are processed from newer to
 * older entries, so lists end up in ascending order. */
static __device__ void link_tile(const struct evict_args &a, const struct stream_state &state,
                                 int first, float tau, bool above, int lane) {
    int k = first + lane, gone = state.gone;
    int32_t *links = a.links + state.first;
    int32_t entry = k < gone ? a.gone[state.first + k] : 0;
    int32_t target = k < gone ? a.target[state.first + k] : NOBODY;
    if (k < gone && !(a.alike[state.first + entry] >= tau)) target = NOBODY;
    if (k < gone && above && a.alike[state.first + entry] == tau) target = NOBODY;
    uint32_t same = __match_any_sync(WARP_ALL, target < 0 ? -1 - lane : target);
    uint32_t newer = same & ~((2u << lane) - 1);
    int32_t next = newer ? a.gone[state.first + first + __ffs((int)newer) - 1] : NOBODY;
    if (target >= 0 && !newer) next = links[target]; /* MERGE_STAYS: the end of the list */
    __syncwarp();
    if (target >= 0) links[entry] = next;
    if (target >= 0 && lane == __ffs((int)same) - 1) links[target] = entry;
    __syncwarp();
}

/* Block (state). */
static __global__ void k_merge_link(const struct evict_args a) {
    SHARED_MEMORY(shared);
    if (pages_failed(a.streams.pages)) return;
    const struct stream_state &state = a.streams.states[blockIdx.x];
    const struct due &d = a.due[state.subject];
    if (!merges(d, state) || state.gone == 0) return;
    bool classes = d.reach.scopes > 0;
    float tau = classes ? d.rule.classes.tau : threshold(a, d, state, (double *)shared);
    if (isnan(tau) || threadIdx.x >= 32) return;
    for (int first = (state.gone - 1) / 32 * 32; first >= 0; first -= 32)
        link_tile(a, state, first, tau, classes, (int)threadIdx.x);
}

/* ---- Rows ---- */

/* Adds eight numbers of an entry's key, or, past the key, of its value. */
static __device__ __forceinline__ void add_piece(float sum[8], const struct pages &p,
                                                 const int32_t *table, int entry, int piece,
                                                 float weight) {
    int pieces = p.head_dim / CHUNK_DIMS, side = piece / pieces, row = entry % p.page_slots;
    int32_t page = table[entry / p.page_slots];
    uint4 from = pages_read_piece(p, page, side, row, piece % pieces);
    const uint32_t words[4] = {from.x, from.y, from.z, from.w};
    const float by = pages_scale(p, page, side, row);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float low = __fmul_rn(by, __uint_as_float(words[i] << 16));
        float high = __fmul_rn(by, __uint_as_float(words[i] & 0xffff0000u));
        sum[2 * i] = __fadd_rn(sum[2 * i], __fmul_rn(weight, low));
        sum[2 * i + 1] = __fadd_rn(sum[2 * i + 1], __fmul_rn(weight, high));
    }
}

/* One lane: eight numbers of the target's key or value, with all members. */
static __device__ void merge_piece(const struct evict_args &a, const struct stream_state &state,
                                   const int32_t *table, bool paper, int target, int piece,
                                   float sum[8]) {
    const struct pages &p = a.streams.pages;
    float own = paper ? 2.71828183f : 1, total = own;
    add_piece(sum, p, table, target, piece, own);
    for (int i = a.links[state.first + target]; i >= 0; i = a.links[state.first + i]) {
        float alike = a.alike[state.first + i], weight = paper ? expf(alike) : alike;
        add_piece(sum, p, table, i, piece, weight);
        total = __fadd_rn(total, paper ? weight : 1);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] = __fdiv_rn(sum[i], total);
}

/* A warp: the target's key and value, with all members. */
static __device__ void merge_target(const struct evict_args &a, const struct stream_state &state,
                                    const int32_t *table, bool paper, int target, int lane) {
    const struct pages &p = a.streams.pages;
    int pieces = p.head_dim / CHUNK_DIMS, row = target % p.page_slots;
    int32_t page = table[target / p.page_slots];
    for (int first = 0; first < 2 * pieces; first += 32) {
        const int piece = first + lane, side = piece / pieces;
        const bool writes = piece < 2 * pieces;
        float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (writes) merge_piece(a, state, table, paper, target, piece, sum);
        __syncwarp(); /* the old factors have been read */
        if (p.scaled)
            row8_write(p, page, side, row, piece % pieces, sum, writes);
        else if (writes)
            pages_write_piece(p, page, side, row, piece % pieces, sum);
    }
}

/* A block per PRODUCT_ROWS evicted entries, a warp per first member of a list. */
static __global__ void k_merge_rows(const struct evict_args a) {
    const struct pages &p = a.streams.pages;
    if (pages_failed(p)) return;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int count = *a.streams.item_count;
    for (int i = blockIdx.x; i < count; i += (int)gridDim.x) {
        const struct item item = a.streams.items[i];
        const struct stream_state &state = a.streams.states[item.state];
        const struct due &d = a.due[state.subject];
        const int32_t *table = pages_table(p, d.slot, state.stream);
        int end = (item.chunk + 1) * PRODUCT_ROWS;
        if (end > state.gone) end = state.gone;
        for (int k = item.chunk * PRODUCT_ROWS + warp; k < end; k += PRODUCT_WARPS) {
            int target = a.target[state.first + k], entry = a.gone[state.first + k];
            if (target < 0 || a.links[state.first + target] != entry) continue;
            merge_target(a, state, table, d.rule.merge == KERN_MERGE_PAPER, target, lane);
        }
    }
}

/* ---- The host's side ---- */

template <int D> static void find(struct cuda *cuda, const struct evict_args &args) {
    const size_t shared = product_shape<D>::SHARED + PRODUCT_KEYS * sizeof(float) +
                          PRODUCT_ROWS * sizeof(struct likeness);
    LAUNCH(cuda->device, (k_merge_find<D>),
           (unsigned)(BLOCKS_EACH * device_processors(cuda->device)), PRODUCT_THREADS, shared,
           args);
}

void merge_gone(struct cuda *cuda, const struct evict_args &args) {
    LAUNCH(cuda->device, k_merge_gone, (unsigned)args.streams.state_count, THREADS,
           THREADS / 32 * sizeof(int), args);
    streams_plan_work(cuda, args.streams);
}

void merge_link(struct cuda *cuda, const struct evict_args &args) {
    LAUNCH(cuda->device, k_merge_link, (unsigned)args.streams.state_count, THREADS,
           THREADS / 32 * sizeof(double), args);
}

void merge_all(struct cuda *cuda, const struct evict_args &args) {
    merge_norms(cuda, args); /* over the chunks of all entries, before the list is replaced */
    merge_gone(cuda, args);
    if (cuda->options.head_dim == 64) find<64>(cuda, args);
    if (cuda->options.head_dim == 128) find<128>(cuda, args);
    if (cuda->options.head_dim == 256) find<256>(cuda, args);
    merge_link(cuda, args);
    LAUNCH(cuda->device, k_merge_rows, (unsigned)(BLOCKS_EACH * device_processors(cuda->device)),
           PRODUCT_THREADS, 0, args);
}
