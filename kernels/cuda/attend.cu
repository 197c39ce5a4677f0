/* Attention over pages, flash-attention style, on tensor cores: the plan of a step, decoding, and
 * the host's side. attend.cuh has the arithmetic, prefill.cu the prompts.
 *
 * What a row gets does not depend on who computes it. The decode kernel gives chunks to warps and a
 * second kernel folds (split over keys as in Flash-Decoding); the prompt kernel folds in registers:
 * the same operations in the same order, so answers are bitwise equal however a prompt was split
 * and whoever shares the step.
 *
 * The plan of a step is made on the device from the lengths: for every layer the list of
 * (decoding row, head, chunk), whole chunks first. Warps take items by number: equal shares. */
#include "kernels/cuda/attend.cuh"
#include "kernels/cuda/block.cuh"
#include "kernels/cuda/several.cuh"

#define PLAN_THREADS  256
#define COMBINE_WARPS 4
#define COMBINE_PARTS 4 /* chunks that are read together, before the first is folded */
/* Numbers of a partial result: o, m, l, and two that align the next one for reads of 128 bits. */
#define PARTIAL_ROW(head_dim) ((head_dim) + 4)

/* ---- Decoding ---- */

/* The place of a result in 16 bits; NULL: there is none. */
static __device__ __forceinline__ uint16_t *rounded_at(const struct attend_args &a,
                                                       const float *result) {
    return a.round.x ? (uint16_t *)a.round.x + (result - a.out) : NULL;
}

template <int D, int E>
static __device__ __forceinline__ void write_chunk(const struct attend_args &a,
                                                   const struct tile<D> &t, int head, float *rows,
                                                   int stride, bool whole, int lane) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float l = row_sum(t.l[i]);
        int own = (lane >> 2) + 8 * i;
        if (own >= a.group) continue;
        struct fold f = fold_start(a, head, own);
        struct fold_weights w = fold_chunk(f, t.m[i], l);
        float *to = rows + own * stride;
        uint16_t *half = whole ? rounded_at(a, to) : NULL;
        for (int n = 0; n < D / 8; n++) {
            float2 pair = tile_pair<D, E>(t.o, n, i);
            if (whole) {
                pair.x = fold_end(f, fold_value(w, 0, pair.x));
                pair.y = fold_end(f, fold_value(w, 0, pair.y));
            }
            const int dim = tile_dim<E>(n, lane);
            write_rounded<2>(to + dim, half ? half + dim : NULL, {pair.x, pair.y}, a.round.dtype);
        }
        if (!whole && (lane & 3) == 0) {
            to[D] = t.m[i];
            to[D + 1] = l;
        }
    }
}

/* The rows of a decoding token: its query heads, which all see the same entries, and the lane's
 * queries. Rows without a query see them, too, and their results are not written. */
static __device__ __forceinline__ struct rows decode_rows(const struct attend_args &a,
                                                          const struct span &s, int low, int length,
                                                          int head, const float *queries[2],
                                                          int lane) {
    const struct rows r = {NULL, length, low, a.cap > 0 ? 0 : length};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int own = (lane >> 2) + 8 * i;
        int64_t at = s.row * a.stride + (head * a.heads + a.query + own) * a.pages.head_dim;
        queries[i] = own < a.group ? a.queries + at : NULL;
    }
    return r;
}

/* One item: a chunk of a decoding row's stream, through this warp's own ring of stages. `use`
 * counts the stages used since the kernel began. */
template <int D, int E>
static __device__ void decode_item(const struct attend_args &a, int item, char *ring,
                                   uint64_t *barriers, uint32_t &use, int lane) {
    typedef shape<D, E> S;
    const int KEYS = S::DECODE_PAGES * S::P, BYTES = S::DECODE_PAGES * S::PAGE;
    const struct fetchers warp = {lane, 32};
    const struct plan_item it = a.items[item];
    int head = it.stream % a.pages.heads_kv, stream = a.first + head;
    const struct span s = a.spans[a.decode[it.stream / a.pages.heads_kv]];
    const int32_t *table = pages_table(a.pages, s.slot, stream);
    int length = *pages_length(a.pages, s.slot, stream);
    const int low = window_start(a, s, table, length, 0);
    int from = it.chunk * CHUNK_KEYS, to = from + CHUNK_KEYS < length ? from + CHUNK_KEYS : length;
    if (to <= low) return; /* nor does k_attend_combine read it */
    if (from < low) from = low / KEYS * KEYS;
    int page = from / S::P, page_end = pages_for(a.pages, to);
    int stages = (to - from + KEYS - 1) / KEYS;
    uint32_t first = use;
    use += (uint32_t)stages;
    for (int i = 0; i < S::DECODE_STAGES && i < stages; i++) {
        uint32_t at = (first + (uint32_t)i) % S::DECODE_STAGES;
        fetch<S::DECODE_PAGES, S::PAGE>(warp, a.pages, table, page + i * S::DECODE_PAGES, page_end,
                                        ring + at * BYTES, &barriers[at]);
    }
    const float *queries[2];
    const struct rows r = decode_rows(a, s, low, length, head, queries, lane);
    struct tile<D> t;
    tile_load_queries<D, E>(t, queries, lane);
    tile_start<D>(t);
    for (int i = 0; i < stages; i++) {
        uint32_t count = first + (uint32_t)i, at = count % S::DECODE_STAGES;
        ptx_barrier_wait(&barriers[at], count / S::DECODE_STAGES & 1);
        for (int key = 0; key < KEYS && from + i * KEYS + key < to; key += TILE_KEYS)
            tile_step<D, E>(t, r, a, ring + at * BYTES, key, from + i * KEYS + key, length, lane);
        __syncwarp();
        if (i + S::DECODE_STAGES < stages)
            fetch<S::DECODE_PAGES, S::PAGE>(warp, a.pages, table,
                                            page + (i + S::DECODE_STAGES) * S::DECODE_PAGES,
                                            page_end, ring + at * BYTES, &barriers[at]);
    }
    /* The item and its head are read a second time, so that no registers hold them in the loop. */
    const struct plan_item same = a.items[item];
    head = same.stream % a.pages.heads_kv;
    const int row = a.spans[a.decode[same.stream / a.pages.heads_kv]].row;
    const bool whole = length <= CHUNK_KEYS; /* the rows' results, not parts of them */
    const int64_t result = (int64_t)row * a.pages.heads_kv + head, group = a.group;
    write_chunk<D, E>(a, t, head,
                      whole ? a.out + result * group * D
                            : a.partials + (uint32_t)item * group * PARTIAL_ROW(D),
                      whole ? D : PARTIAL_ROW(D), whole, lane);
}

template <int D, int E, int WARPS>
static __global__ void __launch_bounds__(WARPS * 32, 1)
    k_attend_decode(const struct attend_args a) {
    typedef shape<D, E> S;
    SHARED_MEMORY(shared);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int BYTES = S::DECODE_STAGES * S::DECODE_PAGES * S::PAGE;
    char *ring = shared + warp * BYTES;
    uint64_t *barriers = (uint64_t *)(shared + WARPS * BYTES) + warp * S::DECODE_STAGES;
    if (lane == 0) fetch_open(barriers, S::DECODE_STAGES, 32);
    __syncwarp();
    ptx_overlap_grids();
    if (pages_failed(a.pages)) return;
    int workers = gridDim.x * WARPS;
    uint32_t use = 0;
    /* Neighbouring items go to different blocks, so that a few streams use the whole machine. */
    for (int item = warp * gridDim.x + blockIdx.x; item < *a.item_count; item += workers)
        decode_item<D, E>(a, item, ring, barriers, use, lane);
}

/* A lane's part of a chunk's result; undefined and unused after the last chunk. The lane has PIECE
 * consecutive dimensions of every 32 * PIECE, which it reads at once. */
template <int D> struct part {
    static constexpr int PIECE = D / 32 < 4 ? D / 32 : 4, PIECES = D / 32 / PIECE;
    float m, l;
    struct several<PIECE> o[PIECES];
};

template <int D>
static __device__ __forceinline__ struct part<D>
read_part(const struct attend_args &a, const struct plan_stream &plan, int chunk, int length,
          int own, int lane) {
    typedef struct part<D> P;
    P got = {};
    if (chunk * CHUNK_KEYS >= length) return got;
    int item = (chunk + 1) * CHUNK_KEYS <= length ? plan.full + chunk : plan.tail;
    const float *from = a.partials + ((int64_t)item * a.group + own) * PARTIAL_ROW(D);
    const struct several<2> sums = read_several<2>(from + D);
    got.m = sums.of[0];
    got.l = sums.of[1];
#pragma unroll
    for (int i = 0; i < P::PIECES; i++)
        got.o[i] = read_several<P::PIECE>(from + (lane + 32 * i) * P::PIECE);
    return got;
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
    int length = *pages_length(a.pages, s.slot, a.first + head);
    if (length <= CHUNK_KEYS) return;
    const struct plan_stream plan = a.streams[row * a.pages.heads_kv + head];
    struct fold f = fold_start(a, head, head_q % a.group);
    constexpr int PIECE = part<D>::PIECE, PIECES = part<D>::PIECES;
    struct several<PIECE> o[PIECES] = {};
    const int32_t *table = pages_table(a.pages, s.slot, a.first + head);
    const int begin = window_start(a, s, table, length, 0) / CHUNK_KEYS;
    for (int chunk = begin; chunk * CHUNK_KEYS < length; chunk += COMBINE_PARTS) {
        struct part<D> parts[COMBINE_PARTS];
#pragma unroll
        for (int k = 0; k < COMBINE_PARTS; k++)
            parts[k] = read_part<D>(a, plan, chunk + k, length, head_q % a.group, lane);
#pragma unroll
        for (int k = 0; k < COMBINE_PARTS; k++) {
            if ((chunk + k) * CHUNK_KEYS >= length) break;
            struct fold_weights w = fold_chunk(f, parts[k].m, parts[k].l);
#pragma unroll
            for (int i = 0; i < D / 32; i++) {
                float &sum = o[i / PIECE].of[i % PIECE];
                sum = fold_value(w, sum, parts[k].o[i / PIECE].of[i % PIECE]);
            }
        }
    }
    float *out = a.out + ((int64_t)s.row * heads + head_q) * D + lane * PIECE;
    uint16_t *half = rounded_at(a, out);
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
#pragma unroll
        for (int k = 0; k < PIECE; k++) o[i].of[k] = fold_end(f, o[i].of[k]);
        const int at = 32 * i * PIECE;
        write_rounded<PIECE>(out + at, half ? half + at : NULL, o[i], a.round.dtype);
    }
}

/* ---- The plan ---- */

struct plan_args {
    struct pages pages;
    const struct span *spans;
    const int32_t *decode;
    int decode_count;
    uint32_t kinds; /* bit k: layers with heads of kind k have a plan */
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
    int layer = blockIdx.x, total;
    const struct layer_place own = a.pages.layer_places[layer];
    if (!(a.kinds >> own.kind & 1)) return;
    const int heads = own.heads, streams = a.decode_count * heads;
    struct plan_item *items = a.items + layer * a.items_max;
    struct plan_stream *plan = a.streams + layer * a.streams_max;
    int at = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (int first = 0; first < streams; first += (int)blockDim.x) {
            int i = first + (int)threadIdx.x, mine = 0;
            if (i < streams) {
                int slot = a.spans[a.decode[i / heads]].slot;
                int length = *pages_length(a.pages, slot, own.first + i % heads);
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
                int slot = a.spans[a.decode[i / heads]].slot;
                int length = *pages_length(a.pages, slot, own.first + i % heads);
                if (mine) items[place] = {i, length / CHUNK_KEYS};
            }
        }
    }
    if (threadIdx.x == 0) a.counts[layer] = at;
}

/* ---- The host's side ---- */

/* The kinds of heads whose layers have a plan. Latent vectors have none: their sums of all heads
 * would take as much memory as the entries. */
static uint32_t kinds_with_plan(const struct cuda *cuda) {
    uint32_t kinds = 0;
    for (int k = 0; k < cuda->kind_count; k++)
        if (!kind_is_wide(cuda, &cuda->kinds[k])) kinds |= 1u << k;
    return kinds;
}

/* Bytes of the largest partial result of an item. */
static size_t partial_bytes_most(const struct cuda *cuda) {
    size_t most = 0;
    for (int k = 0; k < cuda->kind_count; k++) {
        const struct heads_kind *kind = &cuda->kinds[k];
        const size_t floats = (size_t)kind->group * (size_t)PARTIAL_ROW(kind->head_dim);
        if (!kind_is_wide(cuda, kind) && floats > most) most = floats;
    }
    return most * sizeof(float);
}

/* An upper bound of items for all decoding rows of one layer: streams have no more chunks than
 * positions, and no more entries than the pool and those that forks share, each counted again. */
static int64_t plan_items_max(const struct cuda *cuda, int64_t forked_entries) {
    const struct kern_cache_options *o = &cuda->options;
    int64_t streams = (int64_t)o->slots * o->heads_kv;
    if (!kinds_with_plan(cuda)) return 1;
    int64_t by_positions = streams * ((o->max_positions + CHUNK_KEYS - 1) / CHUNK_KEYS);
    int64_t entries = o->pages * cuda->pages.page_slots + forked_entries;
    int64_t by_pool = streams + entries / CHUNK_KEYS;
    return by_positions < by_pool ? by_positions : by_pool;
}

int attend_grow(struct cuda *cuda, int64_t forked_entries) {
    int64_t items = plan_items_max(cuda, forked_entries);
    if (items <= cuda->items_max) return 0;
    items = plan_items_max(cuda, 2 * forked_entries); /* so that few forks in a row grow it */
    void *plan = device_alloc(cuda->device,
                              (size_t)cuda->options.layers * (size_t)items * sizeof *cuda->items);
    void *partials = device_alloc(cuda->device, (size_t)items * partial_bytes_most(cuda));
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
    size_t items = (size_t)cuda->items_max, partial = partial_bytes_most(cuda);
    const struct region own[] = {
        {(void **)&cuda->items, layers * items, sizeof *cuda->items, false},
        {(void **)&cuda->streams, layers * streams, sizeof *cuda->streams, false},
        {(void **)&cuda->item_counts, layers, sizeof *cuda->item_counts, false},
        {(void **)&cuda->partials, items, partial ? partial : sizeof(float), false},
    };
    memcpy(regions, own, sizeof own);
    return sizeof own / sizeof *own;
}

void attend_plan(struct cuda *cuda) {
    const struct step *step = &cuda->step;
    int64_t streams_max = (int64_t)cuda->options.slots * cuda->options.heads_kv;
    const uint32_t kinds = kinds_with_plan(cuda);
    if (step->decode_count == 0 || !step->spans || !kinds) return;
    struct plan_args args = {cuda->pages,   step->spans,      step->decode, step->decode_count,
                             kinds,         cuda->items_max,  streams_max,  cuda->items,
                             cuda->streams, cuda->item_counts};
    LAUNCH(cuda->device, k_plan, (unsigned)cuda->options.layers, PLAN_THREADS,
           PLAN_THREADS / 32 * sizeof(int), args);
}

template <int D, int E> static size_t shared_as(void) {
    typedef shape<D, E> S;
    int decode = S::DECODE_FEW * S::DECODE_SHARED;
    return (size_t)(decode > S::PREFILL_SHARED ? decode : S::PREFILL_SHARED);
}

template <int D> static size_t shared_of(enum kern_dtype dtype) {
    if (dtype == KERN_ROW8) return shared_as<D, 0>();
    return dtype == KERN_E4M3 ? shared_as<D, 1>() : shared_as<D, 2>();
}

static size_t shared_of_kind(const struct cuda *cuda, const struct heads_kind *kind) {
    const enum kern_dtype dtype = cuda->options.dtype;
    if (kind_is_wide(cuda, kind)) return attend_wide_shared(cuda, kind);
    if (kind->head_dim == 64) return shared_of<64>(dtype);
    if (kind->head_dim == 128) return shared_of<128>(dtype);
    return shared_of<256>(dtype);
}

size_t attend_shared(const struct cuda *cuda) {
    size_t most = 0;
    for (int k = 0; k < cuda->kind_count; k++) {
        const size_t needs = shared_of_kind(cuda, &cuda->kinds[k]);
        if (needs > most) most = needs;
    }
    return most;
}

template <int D, int E> static void decode_as(struct cuda *cuda, const struct attend_args &args) {
    typedef shape<D, E> S;
    const unsigned blocks = (unsigned)device_processors(cuda->device);
    const int warps = S::DECODE_WARPS, few = S::DECODE_FEW;
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

template <int D> static void decode(struct cuda *cuda, const struct attend_args &args) {
    if (cuda->options.dtype == KERN_ROW8)
        decode_as<D, 0>(cuda, args);
    else if (cuda->options.dtype == KERN_E4M3)
        decode_as<D, 1>(cuda, args);
    else
        decode_as<D, 2>(cuda, args);
}

/* The queries of the step's rows, rotated as the cache's rows are; NULL: there is no memory. */
static struct heads_array queries_of(struct cuda *cuda, const struct heads_kind *kind,
                                     const float *qkv, int rows, bool alone) {
    const int64_t width = kind_query_width(kind);
    const struct heads_array from = {const_cast<float *>(qkv), kind_row_width(cuda, kind, alone)};
    if (!cuda->pages.scaled) return from;
    size_t bytes = (size_t)rows * (size_t)width * sizeof(float);
    const struct heads_array to = {static_cast<float *>(room_take(cuda, &cuda->rotated, bytes)),
                                   width};
    if (to.at) rotate_heads(cuda, to, from, rows, kind->shard.heads_q, kind->head_dim);
    return to;
}

/* All rows, where warps have registers for the sums of a tile. */
static void attend_narrow(struct cuda *cuda, const struct attend_args &args, int tile_count) {
    if (tile_count > 0) attend_prompts(cuda, args, tile_count);
    if (args.decode_count == 0) return;
    if (args.pages.head_dim == 64) decode<64>(cuda, args);
    if (args.pages.head_dim == 128) decode<128>(cuda, args);
    if (args.pages.head_dim == 256) decode<256>(cuda, args);
}

void op_attend(struct kern *kern, int layer, float *out, const float *qkv,
               const struct kern_batch *batch, const struct kern_attend_options *options) {
    struct cuda *cuda = cuda_of(kern);
    CHECK(cuda->has_cache && layer >= 0 && layer < cuda->options.layers);
    const struct step *step = step_of(cuda, batch);
    if (!step->spans) return;
    const struct layer_place *place = &cuda->layers[layer];
    const struct heads_kind *kind = kind_of_layer(cuda, layer);
    const int first_head = kind->shard.first * kind->group;
    const float *sinks = options->sinks ? options->sinks + first_head : NULL;
    const struct prefill_tiles *tiles = &step->tiles[place->kind];
    cuda->scale = options->scale;
    cuda->cap = options->cap;
    const struct heads_array queries = queries_of(cuda, kind, qkv, batch->rows, options->queries);
    if (!queries.at) return;
    if (!options->queries) {
        cuda->attended[layer] = {sinks, options->sliding_window};
        keep_queries(cuda, layer, queries.at, queries.stride);
    }
    struct attend_args args = {};
    args.pages = layer_pages(cuda, layer);
    args.spans = step->spans;
    args.decode = step->decode;
    args.tiles = tiles->list;
    args.ahead = step->ahead;
    args.queries = queries.at;
    args.stride = queries.stride;
    args.out = out;
    /* Kernels of prompts have no registers left for it, and the numbers of E4M3 need a row's
     * largest. */
    const int64_t cols = (int64_t)place->heads * kind->shard.queries * kind->head_dim;
    if (tiles->count == 0 && !args.pages.scaled && !kind_is_wide(cuda, kind) &&
        cuda->layers_dtype != KERN_E4M3)
        args.round = rounded_take(cuda, batch->rows, cols);
    args.items = cuda->items + layer * cuda->items_max;
    args.streams = cuda->streams + (int64_t)layer * cuda->options.slots * cuda->options.heads_kv;
    args.item_count = cuda->item_counts + layer;
    args.partials = cuda->partials;
    args.decode_count = step->decode_count;
    args.first = place->first;
    args.heads = kind->group;
    args.query = kind->shard.query_first;
    args.group = kind->shard.queries;
    args.sliding_window = options->sliding_window;
    args.scale = options->scale * LOG2_E;
    args.cap = options->cap * LOG2_E;
    args.sinks = sinks;
    if (kind_is_wide(cuda, kind))
        attend_wide(cuda, args, tiles->count);
    else
        attend_narrow(cuda, args, tiles->count);
    if (!options->queries) add_mass(cuda, layer);
    if (args.round.x) rounded_put(cuda, args.round, out, batch->rows, cols);
    if (!args.pages.scaled) return;
    const struct heads_array results = {out, cols};
    rotate_heads(cuda, results, results, batch->rows, place->heads * args.group, kind->head_dim);
}
