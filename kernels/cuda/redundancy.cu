/* Key redundancy, R-KV (arXiv 2505.24133) and G-KV (arXiv 2512.00504); kernels/cpu/redundancy.c is
 * the reference and defines the result:
 *
 * rho[j] = (khat_j . sum_i khat_i - khat_j . khat_j - sum_{i: l(i) = j} C[i,j]) / n
 *
 * k_key_norms reads every key once: norms, the terms khat_j . khat_j, and the sum of a chunk's
 * khat. k_forgive processes up to PRODUCT_ROWS keys at a time, completes the linear part with the
 * sum of all chunks, and compares the keys with the stream, newest first, until each has found its
 * newest look-alike. The amounts that look-alikes subtract from an entry are added as integers.
 * Memory: O(n). */
#include <math.h>

#include "kernels/cuda/block.cuh"
#include "kernels/cuda/evict.cuh"
#include "kernels/cuda/keys.cuh"

#define THREADS     256
#define BLOCKS_EACH 2
#define FIXED       4294967296.0 /* 2^32 */

/* ---- Norms ---- */

/* Number of entries that are compared: the range of i and j. */
static __device__ __forceinline__ int compared(const struct kern_redundancy &rule,
                                               const struct stream_state &state) {
    return rule.candidates_only ? state.candidates : state.length;
}

/* Sum of squares of the key at place `at`, or of its codes. */
template <int D> static __device__ float key_squares(const struct product &p, int at) {
    float sum = 0;
    for (int chunk = 0; chunk < D / CHUNK_DIMS; chunk++) {
        const uint4 piece = *(const uint4 *)product_key<D>(p, at, chunk);
        const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float low = __uint_as_float(words[i] << 16),
                  high = __uint_as_float(words[i] & 0xffff0000u);
            sum = fmaf(high, high, fmaf(low, low, sum));
        }
    }
    return sum;
}

/* totals[d] = sum over the chunk's keys of khat[d]. A thread per dimension. */
template <int D>
static __device__ void chunk_total(const struct product &p, const float *norm, int count,
                                   float *total) {
    for (int d = threadIdx.x; d < D; d += PRODUCT_THREADS) {
        float sum = 0;
        for (int at = 0; at < count; at++) {
            const uint16_t *chunk = (const uint16_t *)product_key<D>(p, at, d / CHUNK_DIMS);
            sum = fmaf(bf16_float(chunk[d % CHUNK_DIMS]), norm[at], sum);
        }
        total[d] = sum;
    }
}

/* A thread per key. Where keys are codes with a factor, khat and products are made of codes, so a
 * norm contains the factor. */
template <int D>
static __global__ void __launch_bounds__(PRODUCT_THREADS)
    k_key_norms(const struct evict_args a, int kind) {
    SHARED_MEMORY(shared);
    struct product product = product_open<D>(shared);
    float *norms = product.out;
    const struct pages &p = a.streams.pages;
    if (pages_failed(p)) return;
    int count = *a.streams.item_count, key = threadIdx.x;
    for (int i = blockIdx.x; i < count; i += (int)gridDim.x) {
        const struct item item = a.streams.items[i];
        const struct stream_state &state = a.streams.states[item.state];
        const struct due &d = a.due[state.subject];
        if (!d.rule.redundancy.on || state.place.kind != kind) continue;
        int most = compared(d.rule.redundancy, state), base = item.chunk * PRODUCT_KEYS;
        int keys = most - base < PRODUCT_KEYS ? most - base : PRODUCT_KEYS;
        if (keys <= 0) continue;
        __syncthreads(); /* the previous chunk is no longer needed */
        product_fetch<D>(product, p, pages_table(p, d.slot, state.stream), base, keys);
        product_wait<D>(product, p);
        float squares = key < keys ? key_squares<D>(product, key) : 0;
        float factor = p.scaled ? product.factors[key] : 1;
        squares = __fmul_rn(squares, __fmul_rn(factor, factor));
        double length = sqrt((double)squares) + (double)d.rule.redundancy.eps;
        double norm = squares > 0 ? 1 / length : 0;
        norms[key] = norm > 0 ? (float)(norm * (double)factor) : 0;
        __syncthreads();
        chunk_total<D>(product, norms, keys, a.totals + (int64_t)i * D);
        if (key >= keys) continue;
        int64_t at = state.first + base + key;
        a.norm[at] = norms[key];
        if (d.rule.redundancy.measure == KERN_MEASURE_LENGTH) {
            a.alike[at] = __fsqrt_rn(squares);
            continue;
        }
        a.alike[at] = (float)(-(double)squares * norm * norm);
        a.forgiven[at] = 0;
    }
}

/* ---- Look-alikes ---- */

/* Keys of a stream, up to product_shape's ROWS. A block searches a look-alike (kern_rule.h) of
 * each. */
struct seekers {
    struct product product;
    float *norms; /* shared, [PRODUCT_KEYS]: norms of the current keys */
    float *total; /* shared, [D] */
    int *looking; /* shared, [PRODUCT_WARPS]: rows of each warp that still look */
    const struct stream_state *state;
    const struct kern_redundancy *rule;
    int first, rows, count; /* entries [first, first + rows) among the stream's first `count` */
};

static __device__ __forceinline__ void
forgive_entry(const struct evict_args &a, const struct seekers &s, int entry, float alike) {
    if (!(fabsf(alike) < 16)) return; /* the model is broken */
    long long fixed = (long long)((double)alike * FIXED);
    atomicAdd(&a.forgiven[s.state->first + entry], (unsigned long long)fixed);
}

/* A warp searches the current `keys` keys, entries `base` on, for one row's look-alike. */
static __device__ bool seek(const struct evict_args &a, const struct seekers &s, int row, int base,
                            int keys, int lane) {
    int self = s.first + row;
    float norm = a.norm[s.state->first + self];
    const float *out = s.product.out + row * PRODUCT_STRIDE;
    for (int at = PRODUCT_KEYS - 32 + lane; at >= 0; at -= 32) {
        float alike = at < keys ? __fmul_rn(__fmul_rn(out[at], norm), s.norms[at]) : 0;
        bool fits = at < keys && base + at != self && alike > s.rule->threshold;
        uint32_t votes = __ballot_sync(WARP_ALL, fits);
        if (!votes) continue;
        if (lane == 31 - __clz((int)votes))
            forgive_entry(a, s, s.rule->own ? self : base + at, alike);
        return true;
    }
    if (base == 0 && s.rule->index_zero && self > 0 && lane == 0)
        forgive_entry(a, s, s.rule->own ? self : 0, __fmul_rn(__fmul_rn(out[0], norm), s.norms[0]));
    return false;
}

/* The linear part of rho: khat . sum of all khat. The rows are loaded. */
template <int D>
static __device__ void add_linear(const struct evict_args &a, const struct seekers &s) {
    int chunks = (s.count + PRODUCT_KEYS - 1) / PRODUCT_KEYS;
    for (int d = threadIdx.x; d < D; d += PRODUCT_THREADS) {
        float sum = 0;
        for (int chunk = 0; chunk < chunks; chunk++)
            sum = __fadd_rn(sum, a.totals[(int64_t)(s.state->item + chunk) * D + d]);
        s.total[d] = sum;
    }
    __syncthreads();
    int row = threadIdx.x;
    if (row >= s.rows) return;
    int64_t at = s.state->first + s.first + row;
    float dot = 0;
    for (int chunk = 0; chunk < D / CHUNK_DIMS; chunk++) {
        const uint16_t *key = (const uint16_t *)product_row<D>(s.product, row, chunk);
        for (int i = 0; i < CHUNK_DIMS; i++)
            dot = fmaf(bf16_float(key[i]), s.total[chunk * CHUNK_DIMS + i], dot);
    }
    a.alike[at] = __fadd_rn(a.alike[at], __fmul_rn(dot, a.norm[at]));
}

/* Compares all rows, newest keys first, until all have found theirs. */
template <int D>
static __device__ void seek_all(const struct evict_args &a, struct seekers &s,
                                const int32_t *table) {
    const struct pages &p = a.streams.pages;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, mine = s.rows - 16 * warp;
    mine = mine < 0 ? 0 : mine > 16 ? 16 : mine;
    uint32_t open = (1u << mine) - 1; /* rows of this warp */
    for (int base = (s.count - 1) / PRODUCT_KEYS * PRODUCT_KEYS; base >= 0; base -= PRODUCT_KEYS) {
        int keys = s.count - base < PRODUCT_KEYS ? s.count - base : PRODUCT_KEYS;
        if (lane == 0) s.looking[warp] = (int)open;
        __syncthreads(); /* the previous keys are no longer needed; rows are loaded */
        int looking = 0;
        for (int w = 0; w < PRODUCT_WARPS; w++) looking |= s.looking[w];
        if (!looking) break;
        product_fetch<D>(s.product, p, table, base, keys);
        for (int i = threadIdx.x; i < keys; i += PRODUCT_THREADS)
            s.norms[i] = a.norm[s.state->first + base + i];
        product_wait<D>(s.product, p);
        __syncthreads();
        if (open) product_all<D>(s.product, s.rows, keys);
        __syncwarp(); /* rows are not shared between warps */
        for (int row = 0; row < mine; row++)
            if ((open >> row & 1) && seek(a, s, 16 * warp + row, base, keys, lane))
                open &= ~(1u << row);
        __syncthreads();
    }
}

template <int D>
static __global__ void __launch_bounds__(PRODUCT_THREADS)
    k_forgive(const struct evict_args a, int kind) {
    const int ROWS = product_shape<D>::ROWS, PARTS = PRODUCT_KEYS / ROWS, CHUNKS = D / CHUNK_DIMS;
    SHARED_MEMORY(shared);
    struct seekers s;
    s.product = product_open<D>(shared);
    s.norms = (float *)(shared + product_shape<D>::SHARED);
    s.total = s.norms + PRODUCT_KEYS;
    s.looking = (int *)(s.total + D);
    const struct pages &p = a.streams.pages;
    if (pages_failed(p)) return;
    int count = *a.streams.item_count * PARTS;
    for (int i = blockIdx.x; i < count; i += (int)gridDim.x) {
        const struct item item = a.streams.items[i / PARTS];
        s.state = &a.streams.states[item.state];
        const struct due &d = a.due[s.state->subject];
        s.rule = &d.rule.redundancy;
        if (!s.rule->on || s.rule->measure != KERN_MEASURE_LIKENESS) continue;
        if (s.state->place.kind != kind) continue;
        s.count = compared(*s.rule, *s.state);
        s.first = item.chunk * PRODUCT_KEYS + i % PARTS * ROWS;
        s.rows = s.count - s.first < ROWS ? s.count - s.first : ROWS;
        if (s.rows <= 0) continue;
        const int32_t *table = pages_table(p, d.slot, s.state->stream);
        __syncthreads();
        for (int k = threadIdx.x; k < s.rows * CHUNKS; k += PRODUCT_THREADS)
            product_take_key<D>(s.product, k / CHUNKS, p, table, s.first + k / CHUNKS, k % CHUNKS);
        __syncthreads();
        add_linear<D>(a, s);
        if (s.rule->threshold < 1) seek_all<D>(a, s, table);
    }
}

/* ---- The softmax ---- */

/* Block (state): rho from the linear part and the forgiven amounts -> R of the candidates. */
static __global__ void k_redundancy_end(const struct evict_args a) {
    SHARED_MEMORY(shared);
    double *room = (double *)shared;
    if (pages_failed(a.streams.pages)) return;
    const struct stream_state &state = a.streams.states[blockIdx.x];
    const struct kern_redundancy rule = a.due[state.subject].rule.redundancy;
    if (!rule.on || rule.measure != KERN_MEASURE_LIKENESS) return;
    int count = compared(rule, state), among = rule.normalise ? state.candidates : count;
    float *rho = a.alike + state.first, most = -INFINITY;
    for (int i = threadIdx.x; i < count; i += (int)blockDim.x) {
        double forgiven = (double)(long long)a.forgiven[state.first + i] / FIXED;
        rho[i] = __fdiv_rn((float)((double)rho[i] - forgiven), (float)count);
        if (i < among) most = fmaxf(most, rho[i]);
    }
    most = block_most(most, (float *)room);
    double sum = 0;
    for (int i = threadIdx.x; i < count && !rule.normalise; i += (int)blockDim.x)
        sum += exp((double)rho[i] - (double)most);
    __syncthreads();
    sum = rule.normalise ? 1 : block_total(sum, room);
    for (int i = threadIdx.x; i < state.candidates; i += (int)blockDim.x)
        rho[i] = (float)(exp((double)rho[i] - (double)most) / sum);
}

/* ---- The host's side ---- */

/* All streams with heads of one kind. */
template <int D> static void find(struct cuda *cuda, const struct evict_args &args, int kind) {
    const size_t shared =
        product_shape<D>::SHARED + (PRODUCT_KEYS + D) * sizeof(float) + PRODUCT_WARPS * sizeof(int);
    const unsigned blocks = (unsigned)(BLOCKS_EACH * device_processors(cuda->device));
    LAUNCH(cuda->device, (k_key_norms<D>), blocks, PRODUCT_THREADS, product_shape<D>::SHARED, args,
           kind);
    LAUNCH(cuda->device, (k_forgive<D>), blocks, PRODUCT_THREADS, shared, args, kind);
}

void redundancy_find(struct cuda *cuda, const struct evict_args &args) {
    for (int k = 0; k < cuda->kind_count; k++) {
        const int head_dim = cuda->kinds[k].head_dim;
        if (head_dim == 64) find<64>(cuda, args, k);
        if (head_dim == 128) find<128>(cuda, args, k);
        if (head_dim == 256) find<256>(cuda, args, k);
        if (head_dim == WIDE_DIM) find<WIDE_DIM>(cuda, args, k);
    }
    LAUNCH(cuda->device, k_redundancy_end, (unsigned)args.streams.state_count, THREADS,
           THREADS / 32 * sizeof(double), args);
}
