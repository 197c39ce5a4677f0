/* Attention as policies observe it (kernels/cpu/observe.c is the reference): the attention of the
 * window's queries when a sequence evicts, and of every query as it arrives for rules that add up
 * attention.
 *
 * Attention stores the last queries of sequences with a window in a ring, as bf16: the numbers that
 * it multiplied itself. Both uses then run the same kernels over chunks of keys: k_look_sees finds
 * the entries that each query sees, by binary search; k_look_stats computes, per chunk and softmax,
 * the largest logit and the sum (reads the keys); k_look_fold joins the chunks of a stream, in
 * their order; k_look_add computes, per entry and query after query: group, smooth, reduce (reads
 * the keys again).
 *
 * A softmax belongs to a query head, or to a query where the group's logits are combined first;
 * both are called a vector. As many queries are processed at a time as whole groups fit
 * the rows of a product. An entry belongs to one thread, which adds queries in their order, so that
 * mass does not depend on how a prompt was split into steps. No kernel holds more of a prompt in
 * memory than these rows of one chunk. */
#include <math.h>
#include <string.h>

#include "kernels/cuda/block.cuh"
#include "kernels/cuda/look.cuh"

#define THREADS       256
#define BLOCKS_EACH   2  /* blocks per multiprocessor: shared memory allows two at head_dim 128 */
#define SMOOTH_MARGIN 32 /* upper bound of a smoothing's reach */

/* ---- Rings ---- */

static int ring_size(int32_t window) {
    int size = 0;
    while ((8 << size) < window) size++;
    return size;
}

static size_t ring_rows(const struct cuda *cuda) {
    return (size_t)cuda->queries * sizeof(uint16_t);
}

size_t ring_bytes(const struct cuda *cuda, int32_t window) {
    return (size_t)window * ring_rows(cuda);
}

void ring_give(struct cuda *cuda, struct slot *slot) {
    int size = ring_size(slot->window);
    if (slot->ring && cuda->ring_count[size] < RINGS_SPARE)
        cuda->rings[size][cuda->ring_count[size]++] = slot->ring;
    else
        device_free(cuda->device, slot->ring);
    slot->ring = NULL;
    slot->window = 0;
}

bool rings_close(struct cuda *cuda) {
    bool any = false;
    for (int size = 0; size < RING_SIZES; size++)
        while (cuda->ring_count[size] > 0) {
            device_free(cuda->device, cuda->rings[size][--cuda->ring_count[size]]);
            any = true;
        }
    return any;
}

int ring_take(struct cuda *cuda, struct slot *slot, int32_t window) {
    CHECK(window >= 0 && window <= KERN_WINDOW_MAX);
    if (window == slot->window) return 0;
    ring_give(cuda, slot);
    if (window == 0) return 0;
    int size = ring_size(window);
    size_t bytes = ring_bytes(cuda, 8 << size);
    if (cuda->ring_count[size] > 0)
        slot->ring = cuda->rings[size][--cuda->ring_count[size]];
    else
        slot->ring = static_cast<uint16_t *>(device_alloc(cuda->device, bytes));
    if (!slot->ring && rings_close(cuda)) /* frees spare rings of other sizes */
        slot->ring = static_cast<uint16_t *>(device_alloc(cuda->device, bytes));
    if (!slot->ring) return ERR_NOMEM;
    device_zero(cuda->device, slot->ring, bytes);
    slot->window = window;
    memset(slot->ring_pos, 0xff, sizeof slot->ring_pos); /* -1 */
    return 0;
}

static size_t product_shared(int head_dim) {
    return (size_t)(head_dim == 64    ? product_shape<64>::SHARED
                    : head_dim == 128 ? product_shape<128>::SHARED
                    : head_dim == 256 ? product_shape<256>::SHARED
                                      : product_shape<WIDE_DIM>::SHARED);
}

/* Bytes of shared memory that a block needs for a rule that looks at keys; 0: it does not. */
static size_t rule_shared(const struct cuda *cuda, const struct kern_rule *rule) {
    const int parts = rule_window(rule) ? cuda->group_most : 1;
    bool looks = rule_window(rule) || rule_adds(rule);
    if (!looks && !rule->redundancy.on) return 0;
    size_t sums = (size_t)(2 * parts + 1) * PRODUCT_KEYS * sizeof(float);
    return product_shared(cuda->options.head_dim) + (size_t)work_bytes() + sums;
}

/* ---- Keeping queries ---- */

struct keep_args {
    const struct span *spans;
    const int32_t *row_span;
    const float *queries;
    uint16_t *now;   /* [rows][width]: the step's queries, for mass; or NULL */
    int rows, width; /* width: heads_q * head_dim of the layer */
    int64_t before;  /* a ring's numbers of a query in earlier layers */
    int64_t stride;  /* from the queries of a row to those of the next */
};

/* A thread per two elements. */
static __global__ void k_keep_queries(const struct keep_args a) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int each = a.width / 2, row = (int)(i / each), at = 2 * (int)(i % each);
    if (row >= a.rows) return;
    const struct span s = a.spans[a.row_span[row]];
    bool remembered = s.ring && row - s.row >= s.count - s.window;
    if (!remembered && !s.adds) return;
    float2 pair = *(const float2 *)(a.queries + row * a.stride + at);
    uint32_t packed = ptx_pack_bf16(pair.x, pair.y);
    int pos = s.pos + row - s.row;
    if (remembered)
        *(uint32_t *)(s.ring + a.before * s.window + (int64_t)(pos % s.window) * a.width + at) =
            packed;
    if (s.adds) *(uint32_t *)(a.now + (int64_t)row * a.width + at) = packed;
}

/* ---- Visible entries ---- */

static __device__ __forceinline__ struct attended attended_of(const struct look_args &a,
                                                              int layer) {
    return a.attended ? a.attended[layer] : a.same;
}

/* A thread per query; blocks (state, part). */
static __global__ void k_look_sees(const struct look_args a) {
    if (pages_failed(a.streams.pages)) return;
    const struct stream_state &st = a.streams.states[blockIdx.x];
    const struct pages p = pages_with(a.streams.pages, st.place.slots);
    const struct look &look = a.looks[st.subject];
    int query = (int)(blockIdx.y * blockDim.x + threadIdx.x);
    if (look.kind == LOOK_NONE || query >= look.query_count) return;
    const int32_t *table = pages_table(p, a.streams.subjects[st.subject].slot, st.stream);
    int pos = query_at(look, query), ahead = a.ahead ? a.ahead[look.row + query] : 0;
    struct sight sight = {0, pages_before(p, table, st.length, pos + 1 + ahead)};
    if (look.observe.support == KERN_SUPPORT_CANDIDATES && sight.high > st.candidates)
        sight.high = st.candidates;
    int visible = attended_of(a, st.place.layer).sliding_window;
    if (visible > 0) sight.low = pages_before(p, table, st.length, pos - visible + 1);
    look_sees(a, look, blockIdx.x)[query] = sight;
}

/* ---- The first pass ---- */

/* A warp: the chunk's part of one softmax. */
static __device__ struct look_stat vector_stat(const struct work &w, const struct look_args &a,
                                               int vector, int lane) {
    float x[PRODUCT_KEYS / 32];
    int low = w.sees[vector / w.width].low - w.base, high = w.sees[vector / w.width].high - w.base;
#pragma unroll
    for (int i = 0; i < PRODUCT_KEYS / 32; i++) {
        int key = lane + 32 * i;
        x[i] = key >= low && key < high ? vector_logit(w, a, vector, key) : -INFINITY;
    }
    float most = -INFINITY, sum = 0;
#pragma unroll
    for (int i = 0; i < PRODUCT_KEYS / 32; i++) most = fmaxf(most, x[i]);
    for (int by = 16; by > 0; by /= 2) most = fmaxf(most, __shfl_xor_sync(WARP_ALL, most, by));
    float base = most == -INFINITY ? 0 : most;
#pragma unroll
    for (int i = 0; i < PRODUCT_KEYS / 32; i++)
        sum = __fadd_rn(sum, ptx_exp2(__fadd_rn(x[i], -base)));
    for (int by = 16; by > 0; by /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(WARP_ALL, sum, by));
    return {most, sum};
}

/* Joins two parts of one softmax. */
static __device__ __forceinline__ struct look_stat stat_fold(struct look_stat x,
                                                             struct look_stat y) {
    float top = fmaxf(x.most, y.most), base = top == -INFINITY ? 0 : top;
    return {top, fmaf(y.scale, ptx_exp2(__fadd_rn(y.most, -base)),
                      __fmul_rn(x.scale, ptx_exp2(__fadd_rn(x.most, -base))))};
}

/* Processes one chunk with all queries. */
template <int D>
static __device__ void stats_chunk(struct work &w, const struct look_args &a, int item) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    struct look_stat *to = look_partial(a, w.look, w.index, item);
    bool fetched = false;
    for (int first = 0; first < w.look.query_count; first += w.queries) {
        int count = w.look.query_count - first;
        if (count > w.queries) count = w.queries;
        __syncthreads(); /* rows, sees and products have been read */
        work_queries<D>(w, a, first, count);
        __syncthreads();
        bool seen = w.sees[count - 1].high > w.base; /* the last query sees most */
        if (seen && !fetched) {
            product_fetch<D>(w.product, a.streams.pages, w.table, w.base, w.keys);
            product_wait<D>(w.product, a.streams.pages);
            fetched = true;
        }
        if (seen) work_multiply<D>(w, a, count * a.group);
        __syncthreads();
        for (int v = warp; v < count * w.width; v += PRODUCT_WARPS) {
            struct look_stat stat = vector_stat(w, a, v, lane);
            if (lane == 0) to[first * w.width + v] = stat;
        }
    }
}

template <int D>
static __global__ void __launch_bounds__(PRODUCT_THREADS, 1)
    k_look_stats(const struct look_args a) {
    SHARED_MEMORY(shared);
    struct work w = work_open<D>(shared);
    if (pages_failed(a.streams.pages)) return;
    int count = *a.streams.item_count;
    for (int i = blockIdx.x; i < count; i += (int)gridDim.x) {
        const struct item item = a.streams.items[i];
        work_begin<D>(w, a, item.state);
        if (w.look.kind == LOOK_NONE || w.state->place.kind != a.kind) continue;
        work_chunk(w, item.chunk * PRODUCT_KEYS);
        stats_chunk<D>(w, a, i);
    }
}

/* The part of one softmax that is not an entry's: the learned sink of vector `vector`, or nothing.
 */
static __device__ struct look_stat sink_stat(const struct look_args &a, const struct look &look,
                                             const struct stream_place &place, int vector) {
    const float *sinks = attended_of(a, place.layer).sinks;
    if (!sinks) return {-INFINITY, 0};
    sinks += place.head * a.group;
    if (!of_logits(look)) return {__fmul_rn(sinks[vector % a.group], LOG2_E), 1};
    float sink = sinks[0];
    for (int r = 1; r < a.group; r++)
        sink = look.observe.group == KERN_GROUP_MAX_LOGIT ? fmaxf(sink, sinks[r])
                                                          : __fadd_rn(sink, sinks[r]);
    return {__fmul_rn(sink, LOG2_E), 1};
}

/* A thread per vector; blocks (state, part). */
static __global__ void k_look_fold(const struct look_args a) {
    if (pages_failed(a.streams.pages)) return;
    const struct stream_state &st = a.streams.states[blockIdx.x];
    const struct look &look = a.looks[st.subject];
    int vectors = look.query_count * (of_logits(look) ? 1 : a.group);
    int v = (int)(blockIdx.y * blockDim.x + threadIdx.x);
    if (look.kind == LOOK_NONE || v >= vectors || st.place.kind != a.kind) return;
    struct look_stat all = sink_stat(a, look, st.place, v);
    for (int chunk = 0; chunk < st.work; chunk++)
        all = stat_fold(all, look_partial(a, look, blockIdx.x, st.item + chunk)[v]);
    all = {all.most == -INFINITY ? 0 : all.most, all.scale > 0 ? __fdiv_rn(1, all.scale) : 0};
    look_stats(a, look, blockIdx.x)[v] = all;
}

/* ---- The second pass ---- */

/* The contribution of a query to an entry: p[t, i], or one query head's part of it. */
static __device__ float vector_value(const struct work &w, const struct look_args &a, int query,
                                     int part, int key) {
    enum kern_group group = w.look.observe.group;
    bool each = group == KERN_GROUP_EACH && w.look.kind != LOOK_MASS;
    float x = 0;
    for (int r = 0; r < w.width; r++) {
        if (each && r != part) continue;
        int v = query * w.width + r;
        float p = vector_share(w, v, vector_logit(w, a, v, key));
        if (group == KERN_GROUP_SQUARES) p = __fmul_rn(p, p);
        x = group == KERN_GROUP_MAX ? fmaxf(x, p) : __fadd_rn(x, p);
    }
    return group == KERN_GROUP_MEAN && a.group > 1 ? __fdiv_rn(x, (float)a.group) : x;
}

/* Sum, maximum, or Welford's running mean and sum of squared deviations, of one entry. */
struct moments {
    float *sum, *squares; /* shared, [parts][PRODUCT_KEYS]; the thread's own column */
};

static __device__ __forceinline__ bool has_spread(const struct kern_observe &observe) {
    return observe.reduce == KERN_REDUCE_MEAN_VAR || observe.reduce == KERN_REDUCE_MEAN_STD;
}

static __device__ __forceinline__ void moments_add(const struct kern_observe &observe,
                                                   const struct moments &m, int at, float p,
                                                   int seen) {
    float sum = m.sum[at];
    if (observe.reduce == KERN_REDUCE_MAX) {
        m.sum[at] = fmaxf(sum, p);
    } else if (has_spread(observe)) {
        float delta = __fadd_rn(p, -sum), mean = __fadd_rn(sum, __fdiv_rn(delta, (float)seen));
        m.sum[at] = mean;
        m.squares[at] = __fadd_rn(m.squares[at], __fmul_rn(delta, __fadd_rn(p, -mean)));
    } else {
        m.sum[at] = __fadd_rn(sum, p);
    }
}

static __device__ float moments_end(const struct kern_observe &observe, const struct moments &m,
                                    int at, int seen) {
    float x = m.sum[at];
    if (observe.reduce == KERN_REDUCE_MEAN && seen > 0) return __fdiv_rn(x, (float)seen);
    if (!has_spread(observe) || seen < 2) return x;
    float variance = __fdiv_rn(m.squares[at], (float)(seen - 1));
    if (observe.reduce == KERN_REDUCE_MEAN_STD) variance = __fsqrt_rn(variance);
    return __fadd_rn(x, __fmul_rn(observe.gamma, variance));
}

/* One query's smoothed vector at place `key`, of entry `entry`; line[key - entry + i] is entry i,
 * and entries end with the candidates. */
static __device__ float smooth_at(const struct kern_observe &observe, const float *line, int key,
                                  int entry, int candidates) {
    int side = observe.smooth_width / 2;
    int from = entry < side ? -entry : -side;
    int to = candidates - entry <= side ? candidates - entry : side + 1;
    float most = line[key + from], sum = 0;
    for (int i = from; i < to; i++) {
        sum = __fadd_rn(sum, line[key + i]);
        most = fmaxf(most, line[key + i]);
    }
    return observe.smooth == KERN_SMOOTH_MAX ? most : __fdiv_rn(sum, (float)observe.smooth_width);
}

/* Entries [from, to) are added up here; the rest of shared memory is margin. */
struct add {
    struct moments moments;
    float *line; /* shared, [PRODUCT_KEYS] */
    int from, to, parts;
    bool smooth;
    double entropy; /* entropy of this thread's entry */
};

/* Adds the current queries, beginning with `first`, at this thread's key. */
static __device__ void add_queries(const struct work &w, const struct look_args &a, struct add &d,
                                   int first, int count) {
    int key = threadIdx.x, entry = w.base + key;
    bool held = entry < w.base + w.keys && entry < d.to + SMOOTH_MARGIN;
    bool mine = entry >= d.from && entry < d.to;
    for (int t = 0; t < count; t++)
        for (int part = 0; part < d.parts; part++) {
            bool sees = held && entry < w.sees[t].high && entry >= w.sees[t].low;
            float p = sees ? vector_value(w, a, t, part, key) : 0;
            if (d.smooth) {
                d.line[key] = p;
                __syncthreads();
                if (mine) p = smooth_at(w.look.observe, d.line, key, entry, w.state->candidates);
                __syncthreads();
            }
            if (!mine) continue;
            if (w.look.kind == LOOK_PREFERENCE) d.entropy -= (double)p * log((double)p + 1e-10);
            moments_add(w.look.observe, d.moments, part * PRODUCT_KEYS + key, p, first + t + 1);
        }
}

/* Loads the thread's entry. */
static __device__ void add_begin(const struct work &w, const struct look_args &a, struct add &d) {
    const struct pages p = pages_with(a.streams.pages, w.state->place.slots);
    int key = threadIdx.x, entry = w.base + key;
    float start = 0;
    d.entropy = 0;
    if (w.look.kind == LOOK_MASS && entry >= d.from && entry < d.to)
        start = p.score[pages_side(p, w.table, entry)];
    for (int part = 0; part < d.parts; part++) {
        d.moments.sum[part * PRODUCT_KEYS + key] = start;
        d.moments.squares[part * PRODUCT_KEYS + key] = 0;
    }
}

static __device__ void add_end(const struct work &w, const struct look_args &a, struct add &d,
                               int item) {
    int key = threadIdx.x, entry = w.base + key, seen = w.look.query_count;
    bool mine = entry >= d.from && entry < d.to;
    if (w.look.kind == LOOK_MASS) {
        const struct pages p = pages_with(a.streams.pages, w.state->place.slots);
        if (mine) p.score[pages_side(p, w.table, entry)] = d.moments.sum[key];
    } else if (w.look.kind == LOOK_WINDOW) {
        float x = d.parts == 1 ? moments_end(w.look.observe, d.moments, key, seen) : 0;
        for (int part = 0; part < d.parts && d.parts > 1; part++)
            x = __fadd_rn(x, __fdiv_rn(moments_end(w.look.observe, d.moments,
                                                   part * PRODUCT_KEYS + key, seen),
                                       (float)a.group));
        if (mine) a.fresh[w.state->first + entry] = x;
    } else {
        double spread = 0, *room = (double *)w.stat; /* the stats are no longer needed */
        for (int part = 0; part < d.parts && mine && seen > 1; part++)
            spread += (double)d.moments.squares[part * PRODUCT_KEYS + key] / (seen - 1);
        double entropy = block_total(mine ? d.entropy : 0, room);
        spread = block_total(spread, room);
        if (threadIdx.x == 0) a.sums[2 * (int64_t)item] = entropy;
        if (threadIdx.x == 0) a.sums[2 * (int64_t)item + 1] = spread;
    }
}

/* Processes entries [d.from, d.to) with all queries. */
template <int D>
static __device__ void add_entries(struct work &w, const struct look_args &a, struct add &d,
                                   int item) {
    bool fetched = false;
    add_begin(w, a, d);
    for (int first = 0; first < w.look.query_count; first += w.queries) {
        int count = w.look.query_count - first;
        if (count > w.queries) count = w.queries;
        __syncthreads();
        work_queries<D>(w, a, first, count);
        const struct look_stat *stats = look_stats(a, w.look, w.index) + first * w.width;
        for (int v = threadIdx.x; v < count * w.width; v += PRODUCT_THREADS) w.stat[v] = stats[v];
        __syncthreads();
        bool seen = w.sees[count - 1].high > w.base;
        if (!seen && w.look.kind == LOOK_MASS) continue; /* nothing to add */
        if (seen && !fetched) {
            product_fetch<D>(w.product, a.streams.pages, w.table, w.base, w.keys);
            product_wait<D>(w.product, a.streams.pages);
            fetched = true;
        }
        if (seen) work_multiply<D>(w, a, count * a.group);
        __syncthreads();
        add_queries(w, a, d, first, count);
    }
    __syncthreads();
    add_end(w, a, d, item);
}

/* At least one block: shared memory decides how many there are, and for more than fit the compiler
 * would spill registers. */
template <int D>
static __global__ void __launch_bounds__(PRODUCT_THREADS, 1) k_look_add(const struct look_args a) {
    SHARED_MEMORY(shared);
    struct work w = work_open<D>(shared);
    struct add d;
    d.moments.sum = (float *)(w.stat + PRODUCT_ROWS);
    d.moments.squares = d.moments.sum + a.parts_max * PRODUCT_KEYS;
    d.line = d.moments.squares + a.parts_max * PRODUCT_KEYS;
    if (pages_failed(a.streams.pages)) return;
    int count = *a.streams.item_count;
    for (int i = blockIdx.x; i < count; i += (int)gridDim.x) {
        const struct item item = a.streams.items[i];
        work_begin<D>(w, a, item.state);
        if (w.look.kind == LOOK_NONE || w.state->place.kind != a.kind) continue;
        const struct kern_observe &observe = w.look.observe;
        int begin = item.chunk * PRODUCT_KEYS, end = begin + PRODUCT_KEYS;
        int most = w.look.kind == LOOK_MASS ? w.state->length : w.state->candidates;
        if (end > most) end = most;
        if (begin >= end && w.look.kind != LOOK_PREFERENCE) continue;
        d.parts = observe.group == KERN_GROUP_EACH && w.look.kind != LOOK_MASS ? a.group : 1;
        d.smooth = w.look.kind == LOOK_WINDOW && observe.smooth_first &&
                   observe.smooth != KERN_SMOOTH_NONE;
        /* Chunks begin with a page; if pages are larger than the margin, up to a page before the
         * entries. */
        int slots = w.state->place.slots, margin = d.smooth ? SMOOTH_MARGIN : 0;
        int step = PRODUCT_KEYS - 2 * margin;
        if (slots > SMOOTH_MARGIN && d.smooth) step = PRODUCT_KEYS - margin - slots;
        for (d.from = begin; d.from < end || d.from == begin; d.from += step) {
            d.to = d.from + step < end ? d.from + step : end;
            work_chunk(w, d.from > margin ? (d.from - margin) / slots * slots : 0);
            add_entries<D>(w, a, d, i);
        }
    }
}

/* ---- The host's side ---- */

void look_at_window(const struct slot *slot, int32_t tokens, struct look *look,
                    int32_t *positions) {
    look->query_count = 0;
    look->origin = 0;
    look->modulus = slot->window ? slot->window : 1;
    look->queries = slot->ring;
    for (int32_t pos = tokens - slot->window; pos < tokens; pos++)
        if (pos >= 0 && slot->ring_pos[pos % slot->window] == pos)
            positions[look->query_count++] = pos;
}

static size_t add_bytes(const struct look_args &args) {
    return (size_t)work_bytes() + (size_t)(2 * args.parts_max + 1) * PRODUCT_KEYS * sizeof(float);
}

/* All streams with heads of one kind. */
template <int D> static void look_keys(struct cuda *cuda, const struct look_args &args) {
    const size_t shared = product_shape<D>::SHARED, stats = shared + work_bytes(),
                 add = shared + add_bytes(args);
    unsigned blocks = (unsigned)(BLOCKS_EACH * device_processors(cuda->device));
    unsigned states = (unsigned)args.streams.state_count;
    LAUNCH(cuda->device, (k_look_stats<D>), blocks, PRODUCT_THREADS, stats, args);
    LAUNCH(cuda->device, k_look_fold, dim3(states, blocks_for(args.vectors_max, THREADS)), THREADS,
           0, args);
    LAUNCH(cuda->device, (k_look_add<D>), blocks, PRODUCT_THREADS, add, args);
}

static void look_kind(struct cuda *cuda, const struct look_args &all, int kind) {
    const int head_dim = cuda->kinds[kind].head_dim;
    struct look_args args = all;
    args.kind = kind;
    args.group = cuda->kinds[kind].group;
    if (head_dim == 64) look_keys<64>(cuda, args);
    if (head_dim == 128) look_keys<128>(cuda, args);
    if (head_dim == 256) look_keys<256>(cuda, args);
    if (head_dim == WIDE_DIM) look_keys<WIDE_DIM>(cuda, args);
}

void look_all(struct cuda *cuda, const struct look_args &args) {
    unsigned states = (unsigned)args.streams.state_count;
    LAUNCH(cuda->device, k_look_sees, dim3(states, blocks_for(args.queries_max, THREADS)), THREADS,
           0, args);
    for (int k = 0; k < cuda->kind_count; k++)
        if (args.attended || k == args.kind) look_kind(cuda, args, k);
}

void look_place(struct look *look, int64_t streams, int64_t items, int group,
                struct look_sizes *sizes) {
    int64_t queries = look->query_count;
    look->partial_first = sizes->partial;
    look->stats_first = sizes->stats;
    look->sees_first = sizes->sees;
    sizes->partial += items * queries * group;
    sizes->stats += streams * queries * group;
    sizes->sees += streams * queries;
}

void look_room(struct pieces *room, struct look_args *args, const struct look_sizes *sizes) {
    args->stats = piece<struct look_stat>(room, (size_t)sizes->stats);
    args->sees = piece<struct sight>(room, (size_t)sizes->sees);
    args->partial = piece<struct look_stat>(room, (size_t)sizes->partial);
}

/* ---- Every query as it comes ---- */

/* The step's spans that add up mass, as subjects of one layer: the same for all layers, apart from
 * the streams' offset. */
struct mass {
    int count; /* spans; 0: none, and the other members are unused */
    struct look_args args;
    struct look_sizes sizes;
    uint16_t *now; /* [rows][heads_q * head_dim]: queries of the current layer, with its head_dim */
};

void mass_close(struct cuda *cuda) {
    mem_free(cuda->mass);
    cuda->mass = NULL;
}

/* Rounds up to a power of two, so that repeated steps have equal arguments for long (graph.h). */
static int64_t round_up(int64_t x) {
    int64_t up = 1;
    while (up < x) up *= 2;
    return up;
}

/* The most chunks that one layer's streams of a slot can have; the bound holds before and after a
 * step that appends `count` tokens and ends before position `end`. */
static int64_t mass_items(const struct cuda *cuda, int slot, int32_t count, int32_t end) {
    int64_t entries = cuda->slots[slot].entries_most + (int64_t)cuda->pages.streams * count;
    return streams_items_max(cuda->options.heads_kv, entries, end);
}

/* Sizes from the batch. */
static void mass_measure(const struct cuda *cuda, const struct kern_batch *batch,
                         struct mass *mass) {
    const struct kern_cache_options *o = &cuda->options;
    struct look_args *args = &mass->args;
    for (int i = 0; i < batch->span_count; i++) {
        const struct kern_span *s = &batch->spans[i];
        if (!rule_adds(s->rule)) continue;
        args->streams.items_max += mass_items(cuda, s->slot, s->count, s->pos + s->count);
        args->streams.entries_max +=
            cuda->slots[s->slot].entries_most + (int64_t)cuda->pages.streams * s->count;
        if (s->count > args->queries_max) args->queries_max = s->count;
        mass->count++;
    }
    args->streams.items_max = round_up(args->streams.items_max);
    args->streams.entries_max = round_up(args->streams.entries_max);
    args->streams.pages = cuda->pages;
    args->streams.state_count = mass->count * o->heads_kv;
    args->ahead = cuda->step.ahead;
    args->group = cuda->group_most;
    args->heads_q = o->heads_q;
    args->vectors_max = args->queries_max * args->group;
    args->parts_max = 1;
}

static void mass_room(const struct cuda *cuda, int rows, struct pieces *room, struct mass *mass) {
    const struct kern_cache_options *o = &cuda->options;
    streams_room(room, &mass->args.streams);
    mass->now = piece<uint16_t>(room, (size_t)rows * (size_t)o->heads_q * (size_t)o->head_dim);
    look_room(room, &mass->args, &mass->sizes);
}

/* The room of the largest step of all prepared sequences: each has a query, and one of them, with
 * the most chunks, has all others. */
static int mass_reserve(struct cuda *cuda) {
    const struct kern_cache_options *o = &cuda->options;
    struct mass mass = {};
    int64_t items = 0, most = 0, rows = o->rows_max, group = cuda->group_most;
    for (int i = 0; i < o->slots; i++) {
        const struct slot *slot = &cuda->slots[i];
        if (!slot->adds) continue;
        int64_t each =
            streams_items_max(o->heads_kv, slot->pages * cuda->pages.page_slots, o->max_positions);
        if (each > most) most = each;
        items += each;
        mass.count++;
    }
    if (mass.count == 0 || rows == 0) return 0;
    mass.args.streams.pages = cuda->pages;
    mass.args.streams.ranks = cuda->comm->ranks;
    mass.args.streams.items_max = round_up(items);
    mass.args.streams.state_count = mass.count * o->heads_kv;
    mass.sizes = {most * rows * group, o->heads_kv * rows * group, o->heads_kv * rows};
    struct pieces room = {};
    mass_room(cuda, o->rows_max, &room, &mass);
    return room_reserve(cuda, &cuda->look, room.used);
}

int op_prepare(struct kern *kern, int index, const struct kern_rule *rule, int64_t pages) {
    struct cuda *cuda = cuda_of(kern);
    CHECK(cuda->has_cache && index >= 0 && index < cuda->options.slots && pages >= 0);
    struct slot *slot = &cuda->slots[index];
    if (rule && !rule_fits(cuda, rule)) return ERR_UNSUPPORTED;
    if (rule && rule_shared(cuda, rule) > device_shared(cuda->device)) return ERR_UNSUPPORTED;
    const int64_t states = (int64_t)cuda->options.states * cuda->pages.state_pages;
    slot->pages = pages > states ? pages - states : 0;
    slot->adds = rule_adds(rule);
    int rc = ring_take(cuda, slot, rule_window(rule));
    if (!rc && slot->adds) rc = mass_reserve(cuda);
    return rc || !rule ? rc : evict_reserve(cuda, index, rule);
}

static void mass_lists(const struct cuda *cuda, const struct kern_batch *batch, struct mass *mass,
                       struct look *looks, struct subject *subjects) {
    int heads = cuda->options.heads_kv, count = 0;
    for (int i = 0; i < batch->span_count; i++) {
        const struct kern_span *s = &batch->spans[i];
        if (!rule_adds(s->rule)) continue;
        struct look *look = &looks[count];
        look->kind = LOOK_MASS;
        look->observe.group = s->rule->observe.group;
        look->observe.reduce = KERN_REDUCE_SUM;
        look->query_count = look->modulus = s->count;
        look->origin = s->pos;
        look->row = s->row;
        look_place(look, heads, mass_items(cuda, s->slot, s->count, s->pos + s->count),
                   mass->args.group, &mass->sizes);
        subjects[count] = {s->slot, 0, INT32_MAX, 0, heads, count * heads};
        count++;
    }
}

bool mass_stage(struct cuda *cuda, const struct kern_batch *batch) {
    if (!cuda->mass) cuda->mass = static_cast<struct mass *>(mem_must_alloc(1, sizeof *cuda->mass));
    struct mass *mass = cuda->mass;
    *mass = {};
    mass_measure(cuda, batch, mass);
    if (mass->count == 0) return true;
    size_t count = (size_t)mass->count;
    struct look *looks = static_cast<struct look *>(mem_must_alloc(count, sizeof *looks));
    struct subject *subjects =
        static_cast<struct subject *>(mem_must_alloc(count, sizeof *subjects));
    mass_lists(cuda, batch, mass, looks, subjects);
    struct pieces room = {};
    mass_room(cuda, batch->rows, &room, mass);
    room = {static_cast<char *>(room_take(cuda, &cuda->look, room.used)), 0};
    if (room.base) mass_room(cuda, batch->rows, &room, mass);
    for (size_t i = 0; i < count; i++) looks[i].queries = mass->now;
    mass->args.looks =
        static_cast<const struct look *>(device_stage(cuda->device, looks, count * sizeof *looks));
    mass->args.streams.subjects = static_cast<const struct subject *>(
        device_stage(cuda->device, subjects, count * sizeof *subjects));
    mem_free(looks);
    mem_free(subjects);
    if (room.base && mass->args.looks && mass->args.streams.subjects) return true;
    *mass = {};
    return false;
}

void keep_queries(struct cuda *cuda, int layer, const float *queries, int64_t stride) {
    const struct step *step = &cuda->step;
    if (!step->keeps) return;
    const int width = (int)kind_query_width(kind_of_layer(cuda, layer));
    struct keep_args args = {step->spans,
                             step->row_span,
                             queries,
                             cuda->mass->now,
                             step->rows,
                             width,
                             cuda->layers[layer].query,
                             stride};
    LAUNCH(cuda->device, k_keep_queries, blocks_for((int64_t)step->rows * width / 2, THREADS),
           THREADS, 0, args);
}

void add_mass(struct cuda *cuda, int layer) {
    struct mass *mass = cuda->mass;
    if (!mass || mass->count == 0) return;
    mass->args.scale = cuda->scale * LOG2_E;
    mass->args.cap = cuda->cap * LOG2_E;
    mass->args.same = cuda->attended[layer];
    mass->args.kind = cuda->layers[layer].kind;
    mass->args.streams.stream_offset = cuda->layers[layer].first;
    mass->args.streams.stream_most = cuda->layers[layer].heads;
    streams_find(cuda, mass->args.streams, mass->count, cuda->options.heads_kv);
    streams_plan(cuda, mass->args.streams);
    look_all(cuda, mass->args);
}
