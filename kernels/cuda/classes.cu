/* Classes of entries: EMS (arXiv 2412.08521), kern.h, struct kern_classes; kernels/cpu/classes.c is
 * the oracle. How queries meet members is classes.cuh and look.cuh; here are the answers of
 * attention, and how evicted entries join the classes of those that stay.
 *
 * Attention of such sequences is what is added up (observe.cu): softmax sums of chunks, folded in
 * their order, then
 *
 *   k_class_out      a block of queries with all chunks of its stream: attention to whole classes,
 *                    in bf16, times values
 *
 * and at an eviction, one sequence at a time, while all entries still lie in their old places,
 *
 *   k_class_own      pages for the members there can be
 *   k_class_lengths  |k| and |v| of every entry
 *   k_merge_gone     the evicted entries that reach a class, in order              (merge.cu)
 *   k_class_find     JOIN_ROWS of them with all candidates that stay: the most alike
 *   k_merge_link     those that join each class as a list, oldest first            (merge.cu)
 *   k_class_rows     a warp per class that somebody joins: its key, value and mass
 *   k_class_members  a block per stream: the new row of members */
#include <math.h>

#include "kernels/cuda/block.cuh"
#include "kernels/cuda/look.cuh"

#define THREADS     256
#define BLOCKS_EACH 2

/* ---- Attention ---- */

/* o[16 rows of the warp][D] += attention of the chunk times its values, which are in the keys'
 * memory. */
template <int D>
static __device__ __forceinline__ void out_add(const struct work &w, bool factors,
                                               float o[D / 8][4], int row, int lane) {
    for (int key = 0; key < w.keys; key += 16) {
        uint32_t p[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = key + 2 * (lane & 3) + 8 * (i >> 1);
            float2 pair =
                *(const float2 *)(w.product.out +
                                  (row + (lane >> 2) + 8 * (i & 1)) * PRODUCT_STRIDE + at);
            if (factors)
                pair = {__fmul_rn(pair.x, w.product.factors[at]),
                        __fmul_rn(pair.y, w.product.factors[at + 1])};
            p[i] = ptx_pack_bf16(pair.x, pair.y);
        }
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            uint32_t b[4];
            ptx_load_matrix_transposed(b, product_key<D>(w.product,
                                                         key + (lane & 7) + 8 * (lane >> 3 & 1),
                                                         2 * n + (lane >> 4)));
            ptx_mma(o[2 * n], p, b[0], b[1]);
            ptx_mma(o[2 * n + 1], p, b[2], b[3]);
        }
    }
}

/* Copies the chunk's values into the keys' memory; stale ones, which may be NaN, become 0. */
template <int D> static __device__ void out_fetch(struct work &w, const struct look_args &a) {
    product_fetch<D>(w.product, a.streams.pages, w.table, w.base, w.keys, 1);
    product_wait<D>(w.product, a.streams.pages);
    int stale = (16 - w.keys % 16) % 16;
    for (int i = threadIdx.x; i < stale * (D / CHUNK_DIMS); i += PRODUCT_THREADS)
        *(uint4 *)product_key<D>(w.product, w.keys + i / (D / CHUNK_DIMS),
                                 i % (D / CHUNK_DIMS)) = {0, 0, 0, 0};
    ptx_shared_fence();
    __syncthreads();
}

template <int D>
static __device__ void out_write(const struct work &w, const struct look_args &a,
                                 const float o[D / 8][4], int first, int vectors, int row,
                                 int lane) {
    int heads = a.streams.pages.heads_kv, head = w.state->stream % heads;
    for (int i = 0; i < 2; i++) {
        int v = row + (lane >> 2) + 8 * i, own = v % a.group - a.query;
        if (v >= vectors || own < 0 || own >= a.queries) continue;
        int64_t token = w.look.row + first + v / a.group;
        int64_t at = (token * heads + head) * a.queries + own;
        for (int n = 0; n < D / 8; n++) {
            float2 pair = {o[n][2 * i], o[n][2 * i + 1]};
            *(float2 *)(a.out + at * D + 8 * n + 2 * (lane & 3)) = pair;
        }
    }
}

/* Block (state, block of queries). */
template <int D>
static __global__ void __launch_bounds__(PRODUCT_THREADS) k_class_out(const struct look_args a) {
    SHARED_MEMORY(shared);
    struct work w = work_open<D>(shared);
    class_open(w, shared + product_shape<D>::SHARED + work_bytes());
    if (pages_failed(a.streams.pages)) return;
    work_begin(w, a, blockIdx.x);
    int first = (int)blockIdx.y * w.queries, count = w.look.query_count - first;
    if (count > w.queries) count = w.queries;
    if (!w.look.classes || count <= 0) return;
    int row = threadIdx.x / 32 * 16, lane = threadIdx.x % 32, vectors = count * a.group;
    float o[D / 8][4];
    for (int n = 0; n < D / 8; n++)
        for (int i = 0; i < 4; i++) o[n][i] = 0;
    work_queries<D>(w, a, first, count);
    const struct look_stat *stats = look_stats(a, w.look, w.index) + first * a.group;
    for (int v = threadIdx.x; v < vectors; v += PRODUCT_THREADS) w.stat[v] = stats[v];
    __syncthreads();
    int end = w.sees[count - 1].high;
    for (int base = 0; base < end; base += PRODUCT_KEYS) {
        work_chunk(w, a, base);
        product_fetch<D>(w.product, a.streams.pages, w.table, base, w.keys);
        product_wait<D>(w.product, a.streams.pages);
        work_multiply<D>(w, a, vectors);
        __syncthreads();
        class_attention<D>(w, a, count);
        out_fetch<D>(w, a);
        if (row < vectors) out_add<D>(w, a.streams.pages.scaled, o, row, lane);
        __syncthreads();
    }
    if (row < vectors) out_write<D>(w, a, o, first, vectors, row, lane);
}

template <int D> static void out(struct cuda *cuda, const struct look_args &args) {
    const size_t shared = product_shape<D>::SHARED + work_bytes() + class_bytes();
    dim3 grid((unsigned)args.streams.state_count,
              blocks_for(args.queries_max, PRODUCT_ROWS / args.group));
    LAUNCH(cuda->device, (k_class_out<D>), grid, PRODUCT_THREADS, shared, args);
}

void classes_attend(struct cuda *cuda, const struct look_args &args) {
    if (cuda->options.head_dim == 64) out<64>(cuda, args);
    if (cuda->options.head_dim == 128) out<128>(cuda, args);
    if (cuda->options.head_dim == 256) out<256>(cuda, args);
}

/* ---- Pages for members ---- */

static __device__ __forceinline__ bool joins(const struct stream_state &state) {
    return state.kept < state.length;
}

/* Block (state). Does not change the row's length. */
static __global__ void k_class_own(const struct evict_args a) {
    SHARED_MEMORY(shared);
    const struct pages &p = a.streams.pages;
    if (pages_failed(p)) return;
    const struct stream_state &state = a.streams.states[blockIdx.x];
    const struct due &d = a.due[state.subject];
    if (!joins(state)) return;
    int32_t *table = members_table(p, d.slot, state.stream);
    int members = *members_length(p, d.slot, state.stream), held = members_pages_for(members);
    int pages = members_pages_for(classes_most(d, state, members));
    pages_own(p, table, 0, held, (int32_t *)shared);
    if (threadIdx.x != 0 || pages == held) return;
    unsigned long long place = pages_take(p, pages - held);
    for (int page = held; page < pages; page++) table[page] = pages_taken(p, place++);
}

void classes_own(struct cuda *cuda, const struct evict_args &args) {
    LAUNCH(cuda->device, k_class_own, (unsigned)args.streams.state_count, THREADS, sizeof(int32_t),
           args);
}

/* ---- Lengths ---- */

static __device__ __forceinline__ double warp_total(double x) {
    for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(WARP_ALL, x, by);
    return x;
}

/* Reads dimension `dim` of a row. */
static __device__ __forceinline__ float read_number(const struct pages &p, const int32_t *table,
                                                    int side, int entry, int dim) {
    return pages_read_number(p, table[entry / p.page_slots], side, entry % p.page_slots, dim);
}

/* A warp: the length of a key or value. */
template <int D>
static __device__ float row_length(const struct pages &p, const int32_t *table, int side, int entry,
                                   int lane) {
    double squares = 0;
    for (int dim = lane; dim < D; dim += 32) {
        double x = (double)read_number(p, table, side, entry, dim);
        squares += x * x;
    }
    return (float)sqrt(warp_total(squares));
}

/* A block per chunk of entries, a warp per entry. */
template <int D> static __global__ void k_class_lengths(const struct evict_args a) {
    const struct pages &p = a.streams.pages;
    if (pages_failed(p)) return;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, count = *a.streams.item_count;
    for (int i = blockIdx.x; i < count; i += (int)gridDim.x) {
        const struct item item = a.streams.items[i];
        const struct stream_state &state = a.streams.states[item.state];
        if (!joins(state)) continue;
        const int32_t *table = pages_table(p, a.due[state.subject].slot, state.stream);
        int end = (item.chunk + 1) * PRODUCT_KEYS;
        if (end > state.length) end = state.length;
        for (int entry = item.chunk * PRODUCT_KEYS + warp; entry < end; entry += PRODUCT_WARPS) {
            float key = row_length<D>(p, table, 0, entry, lane);
            float value = row_length<D>(p, table, 1, entry, lane);
            if (lane != 0) continue;
            a.norm[state.first + entry] = key;
            a.value_norm[state.first + entry] = value;
        }
    }
}

/* ---- Targets ---- */

/* Rows: JOIN_ROWS evicted entries, high halves, then low ones. Places of keys: CLASS_KEYS
 * candidates, in the same way. All are keys rotated back to position 0, or values, scaled to length
 * 1. */
struct finder {
    struct product product;
    float *cosines;        /* shared, [JOIN_ROWS][CLASS_KEYS]: cosines of keys */
    struct likeness *best; /* shared, [JOIN_ROWS] */
    bool *stays;           /* shared, [CLASS_KEYS] */
    const struct stream_state *state;
    const int32_t *table;
    int first, rows; /* the evicted entries in hand */
};

/* A piece of an entry's key or value, scaled to length 1; zeros stay zeros. All lanes of the warp.
 */
template <int D>
static __device__ __forceinline__ struct piece_pair
unit_piece(const struct evict_args &a, const struct finder &f, int side, int entry, int chunk) {
    const struct pages &p = a.streams.pages;
    float length = (side ? a.value_norm : a.norm)[f.state->first + entry];
    struct piece_pair x = piece_load<D>(p, f.table, side, entry, chunk);
    if (side == 0) piece_rotate<D>(x, p);
    if (side == 0) piece_turn(x, p, -p.pos[pages_side(p, f.table, entry)], chunk);
    for (int i = 0; i < CHUNK_DIMS; i++) {
        x.a[i] = length > 0 ? __fdiv_rn(x.a[i], length) : 0;
        x.b[i] = length > 0 ? __fdiv_rn(x.b[i], length) : 0;
    }
    return x;
}

template <int D>
static __device__ void unit_rows(const struct evict_args &a, const struct finder &f, int side,
                                 int base, int keys) {
    const int HALF = D / CHUNK_DIMS / 2;
    for (int k = threadIdx.x; k < piece_lanes(f.rows * HALF); k += PRODUCT_THREADS) {
        int row = k / HALF < f.rows ? k / HALF : 0, chunk = k % HALF, low = JOIN_ROWS + row;
        int entry = a.gone[f.state->first + f.first + row];
        struct piece_pair x = unit_piece<D>(a, f, side, entry, chunk);
        if (k >= f.rows * HALF) continue;
        piece_split(x.a, product_row<D>(f.product, row, chunk),
                    product_row<D>(f.product, low, chunk));
        piece_split(x.b, product_row<D>(f.product, row, chunk + HALF),
                    product_row<D>(f.product, low, chunk + HALF));
    }
    for (int k = threadIdx.x; k < piece_lanes(keys * HALF); k += PRODUCT_THREADS) {
        int at = k / HALF < keys ? k / HALF : 0, chunk = k % HALF, low = CLASS_KEYS + at;
        struct piece_pair x = unit_piece<D>(a, f, side, base + at, chunk);
        if (k >= keys * HALF) continue;
        piece_split(x.a, (char *)product_key<D>(f.product, at, chunk),
                    (char *)product_key<D>(f.product, low, chunk));
        piece_split(x.b, (char *)product_key<D>(f.product, at, chunk + HALF),
                    (char *)product_key<D>(f.product, low, chunk + HALF));
    }
}

static __device__ __forceinline__ float cosine(const struct finder &f, int row, int at) {
    const float *high = f.product.out + row * PRODUCT_STRIDE + at;
    const float *low = high + JOIN_ROWS * PRODUCT_STRIDE;
    return __fadd_rn(__fadd_rn(high[0], high[CLASS_KEYS]), __fadd_rn(low[0], low[CLASS_KEYS]));
}

/* A warp: the best of the current candidates for one row, entries `base` on. */
static __device__ struct likeness find_row(const struct finder &f, int row, int base, int keys,
                                           int lane) {
    struct likeness best = {0, MERGE_NOBODY};
    for (int at = lane; at < keys; at += 32) {
        float alike = __fmul_rn(f.cosines[row * CLASS_KEYS + at], cosine(f, row, at));
        if (f.stays[at] && alike == alike) best = better(best, {alike, base + at});
    }
    for (int by = 16; by > 0; by /= 2) {
        struct likeness other = {__shfl_xor_sync(WARP_ALL, best.alike, by),
                                 __shfl_xor_sync(WARP_ALL, best.entry, by)};
        best = better(best, other);
    }
    return best;
}

/* Compares the current rows with the candidates [base, base + keys). */
template <int D>
static __device__ void find_block(const struct evict_args &a, const struct finder &f, int base,
                                  int keys) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int side = 0; side < 2; side++) {
        __syncthreads(); /* rows, keys and products have been read */
        unit_rows<D>(a, f, side, base, keys);
        for (int at = threadIdx.x; at < keys; at += PRODUCT_THREADS)
            f.stays[at] = a.links[f.state->first + base + at] == MERGE_STAYS;
        __syncthreads();
        product_all<D>(f.product, JOIN_ROWS + f.rows, CLASS_KEYS + keys);
        __syncthreads();
        for (int k = threadIdx.x; side == 0 && k < f.rows * CLASS_KEYS; k += PRODUCT_THREADS)
            f.cosines[k] = cosine(f, k / CLASS_KEYS, k % CLASS_KEYS);
    }
    for (int row = warp; row < f.rows; row += PRODUCT_WARPS) {
        struct likeness found = find_row(f, row, base, keys, lane);
        if (lane == 0) f.best[row] = better(f.best[row], found);
    }
}

template <int D>
static __global__ void __launch_bounds__(PRODUCT_THREADS) k_class_find(const struct evict_args a) {
    SHARED_MEMORY(shared);
    struct finder f;
    f.product = product_open<D>(shared);
    f.cosines = (float *)(shared + product_shape<D>::SHARED);
    f.best = (struct likeness *)(f.cosines + JOIN_ROWS * CLASS_KEYS);
    f.stays = (bool *)(f.best + JOIN_ROWS);
    const struct pages &p = a.streams.pages;
    if (pages_failed(p)) return;
    int count = *a.streams.item_count, row = threadIdx.x;
    for (int i = blockIdx.x; i < count; i += (int)gridDim.x) {
        const struct item item = a.streams.items[i];
        f.state = &a.streams.states[item.state];
        f.table = pages_table(p, a.due[f.state->subject].slot, f.state->stream);
        f.first = item.chunk * JOIN_ROWS;
        f.rows = f.state->gone - f.first < JOIN_ROWS ? f.state->gone - f.first : JOIN_ROWS;
        __syncthreads();
        if (row < JOIN_ROWS) f.best[row] = {0, MERGE_NOBODY};
        for (int base = 0; base < f.state->candidates; base += CLASS_KEYS) {
            int left = f.state->candidates - base;
            find_block<D>(a, f, base, left < CLASS_KEYS ? left : CLASS_KEYS);
        }
        __syncthreads();
        if (row >= f.rows) continue;
        int64_t at = f.state->first + f.first + row;
        a.target[at] = f.best[row].entry;
        a.alike[f.state->first + a.gone[at]] = f.best[row].alike;
    }
}

/* ---- The new classes ---- */

/* A warp and a class; lane l has dimensions l, l + 32 ... of both halves. */
template <int D> struct sum { float a[D / 64], b[D / 64]; };

template <int D> static __device__ __forceinline__ void sum_scale(struct sum<D> &s, float by) {
    for (int i = 0; i < D / 64; i++) {
        s.a[i] = __fmul_rn(s.a[i], by);
        s.b[i] = __fmul_rn(s.b[i], by);
    }
}

template <int D>
static __device__ void sum_turn(struct sum<D> &s, const struct pages &p, int positions, bool back,
                                int lane) {
    for (int i = 0; i < D / 64; i++) {
        float2 turn = pages_turn(p, positions, lane + 32 * i);
        float x = s.a[i], y = s.b[i], sine = back ? -turn.y : turn.y;
        s.a[i] = __fadd_rn(__fmul_rn(x, turn.x), -__fmul_rn(y, sine));
        s.b[i] = __fadd_rn(__fmul_rn(y, turn.x), __fmul_rn(x, sine));
    }
}

/* Rotates as the cache's rows are, there and back (kernels/row.h). */
template <int D> static __device__ void sum_rotate(struct sum<D> &s, int lane) {
    for (int by = 1; by < 32; by *= 2)
        for (int i = 0; i < D / 64; i++) {
            float a = __shfl_xor_sync(WARP_ALL, s.a[i], by);
            float b = __shfl_xor_sync(WARP_ALL, s.b[i], by);
            s.a[i] = __fadd_rn(lane & by ? -s.a[i] : s.a[i], a);
            s.b[i] = __fadd_rn(lane & by ? -s.b[i] : s.b[i], b);
        }
    for (int half = 1; half < D / 64; half *= 2)
        for (int i = 0; i < D / 64; i++) {
            if (i & half) continue;
            float a = s.a[i], b = s.b[i];
            s.a[i] = __fadd_rn(a, s.a[i + half]), s.a[i + half] = __fadd_rn(a, -s.a[i + half]);
            s.b[i] = __fadd_rn(b, s.b[i + half]), s.b[i + half] = __fadd_rn(b, -s.b[i + half]);
        }
    for (int i = 0; i < D / 64; i++) {
        float a = s.a[i], b = s.b[i];
        s.a[i] = __fadd_rn(a, b);
        s.b[i] = __fadd_rn(a, -b);
    }
    sum_scale<D>(s, row8_scale(D));
}

template <int D>
static __device__ struct sum<D> sum_load(const struct pages &p, const int32_t *table, int side,
                                         int entry, int lane) {
    struct sum<D> s;
    for (int i = 0; i < D / 64; i++) {
        int dim = lane + 32 * i;
        s.a[i] = read_number(p, table, side, entry, dim);
        s.b[i] = read_number(p, table, side, entry, dim + D / 2);
    }
    return s;
}

/* Codes with their factor, of a row that is rotated already. */
template <int D>
static __device__ void sum_store_codes(const struct sum<D> &s, const struct pages &p, int32_t page,
                                       int side, int row, int lane) {
    float most = fmaxf(row8_most(s.a, D / 64), row8_most(s.b, D / 64));
    for (int by = 16; by > 0; by /= 2) most = fmaxf(most, __shfl_xor_sync(WARP_ALL, most, by));
    uint16_t factor = row8_factor(most);
    for (int i = 0; i < D / 64; i++)
        for (int half = 0; half < 2; half++) {
            int dim = lane + 32 * i + half * (D / 2);
            char *to = pages_piece(p, page, side, row, dim / CHUNK_DIMS) + dim % CHUNK_DIMS;
            *(uint8_t *)to = (uint8_t)row8_code(half ? s.b[i] : s.a[i], factor);
        }
    if (lane == 0) *pages_factor(p, page, side, row) = factor;
}

template <int D>
static __device__ void sum_store(const struct sum<D> &s, const struct pages &p,
                                 const int32_t *table, int side, int entry, int lane) {
    int32_t page = table[entry / p.page_slots];
    int row = entry % p.page_slots;
    if (p.scaled) {
        sum_store_codes<D>(s, p, page, side, row, lane);
        return;
    }
    for (int i = 0; i < D / 64; i++) {
        int dim = lane + 32 * i;
        pages_write_number(p, page, side, row, dim, s.a[i]);
        pages_write_number(p, page, side, row, dim + D / 2, s.b[i]);
    }
}

struct one_class {
    const struct evict_args *args;
    const struct stream_state *state;
    const int32_t *table;
    int centre;
};

/* The first entry that joins, or the next of the list. */
static __device__ __forceinline__ int next_joining(const struct one_class &c, int entry) {
    return c.args->links[c.state->first + entry];
}

static __device__ __forceinline__ float *mass_of(const struct one_class &c, int entry) {
    const struct pages &p = c.args->streams.pages;
    return &p.score[pages_side(p, c.table, entry)];
}

/* Sums mass times unit key at position 0, or times value, over the centre and the joining
 * entries. */
template <int D>
static __device__ struct sum<D> sum_class(const struct one_class &c, int side, int lane) {
    const struct pages &p = c.args->streams.pages;
    struct sum<D> all = {};
    for (int entry = c.centre; entry >= 0; entry = next_joining(c, entry)) {
        struct sum<D> s = sum_load<D>(p, c.table, side, entry, lane);
        float mass = *mass_of(c, entry), length = c.args->norm[c.state->first + entry];
        if (side == 0 && p.scaled) sum_rotate<D>(s, lane);
        if (side == 0) sum_turn<D>(s, p, p.pos[pages_side(p, c.table, entry)], true, lane);
        for (int i = 0; i < D / 64; i++) {
            if (side == 0) s.a[i] = length > 0 ? __fdiv_rn(s.a[i], length) : 0;
            if (side == 0) s.b[i] = length > 0 ? __fdiv_rn(s.b[i], length) : 0;
            all.a[i] = __fadd_rn(all.a[i], __fmul_rn(mass, s.a[i]));
            all.b[i] = __fadd_rn(all.b[i], __fmul_rn(mass, s.b[i]));
        }
    }
    return all;
}

template <int D>
static __device__ void merge_class(const struct one_class &c, int lane) {
    const struct pages &p = c.args->streams.pages;
    float total = *mass_of(c, c.centre);
    for (int i = next_joining(c, c.centre); i >= 0; i = next_joining(c, i))
        total = __fadd_rn(total, *mass_of(c, i));
    struct sum<D> key = sum_class<D>(c, 0, lane), value = sum_class<D>(c, 1, lane);
    double squares = 0;
    for (int i = 0; i < D / 64; i++)
        squares += (double)key.a[i] * (double)key.a[i] + (double)key.b[i] * (double)key.b[i];
    float length = (float)sqrt(warp_total(squares));
    __syncwarp(); /* everything has been read */
    if (length > 0) {
        sum_scale<D>(key, __fdiv_rn(c.args->norm[c.state->first + c.centre], length));
        sum_turn<D>(key, p, p.pos[pages_side(p, c.table, c.centre)], false, lane);
        if (p.scaled) sum_rotate<D>(key, lane);
        sum_store<D>(key, p, c.table, 0, c.centre, lane);
    }
    if (!(total > 0)) return;
    for (int i = 0; i < D / 64; i++) {
        value.a[i] = __fdiv_rn(value.a[i], total);
        value.b[i] = __fdiv_rn(value.b[i], total);
    }
    sum_store<D>(value, p, c.table, 1, c.centre, lane);
    if (lane == 0) *mass_of(c, c.centre) = total;
}

/* A block per JOIN_ROWS evicted entries, a warp per first one of a list. */
template <int D> static __global__ void k_class_rows(const struct evict_args a) {
    const struct pages &p = a.streams.pages;
    if (pages_failed(p)) return;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, count = *a.streams.item_count;
    for (int i = blockIdx.x; i < count; i += (int)gridDim.x) {
        const struct item item = a.streams.items[i];
        const struct stream_state &state = a.streams.states[item.state];
        const int32_t *table = pages_table(p, a.due[state.subject].slot, state.stream);
        int end = (item.chunk + 1) * JOIN_ROWS;
        if (end > state.gone) end = state.gone;
        for (int k = item.chunk * JOIN_ROWS + warp; k < end; k += PRODUCT_WARPS) {
            int target = a.target[state.first + k], entry = a.gone[state.first + k];
            if (target < 0 || a.links[state.first + target] != entry) continue;
            const struct one_class c = {&a, &state, table, target};
            merge_class<D>(c, lane);
        }
    }
}

/* ---- Members ---- */

/* A stream's old row of members, and the classes that its entries will have. Arrays belong to the
 * stream. */
struct members {
    const struct pages *pages;
    const struct stream_state *state;
    const int32_t *table; /* table of the entries */
    struct member *old;   /* [count] */
    const int32_t *links, *gone;
    int32_t *joined, *first, *place; /* target or NOBODY; index of its first old member; for a kept
                                        class, the place of its members */
    const float *norm;
    int count;
};

static __device__ __forceinline__ int pos_of(const struct members &m, int entry) {
    return m.pages->pos[pages_side(*m.pages, m.table, entry)];
}

static __device__ __forceinline__ bool stays(const struct members &m, int entry) {
    return m.joined[entry] < 0 && m.links[entry] != MERGE_NOBODY;
}

/* Number of old members [from, to), all of one class, before a position. */
static __device__ __forceinline__ int older(const struct members &m, int from, int to, int pos) {
    int low = from, high = to;
    while (low < high) {
        int middle = (low + high) / 2;
        if (m.old[middle].pos < pos)
            low = middle + 1;
        else
            high = middle;
    }
    return low - from;
}

static __device__ __forceinline__ int end_of(const struct members &m, int entry) {
    return entry + 1 < m.state->length ? m.first[entry + 1] : m.count;
}

/* Members of a class before a position after the eviction: its own, the joining entries and their
 * members. */
static __device__ int class_before(const struct members &m, int centre, int pos) {
    int count = older(m, m.first[centre], end_of(m, centre), pos);
    for (int i = m.links[centre]; i >= 0; i = m.links[i])
        count += (pos_of(m, i) < pos) + older(m, m.first[i], end_of(m, i), pos);
    return count;
}

/* The same over all kept classes. Called by every thread of the block. */
static __device__ int all_before(const struct members &m, int pos, int *room) {
    int mine = 0;
    for (int i = threadIdx.x; i < m.state->length; i += (int)blockDim.x)
        if (stays(m, i)) mine += class_before(m, i, pos);
    return block_total(mine, room);
}

/* Position of the oldest member that is kept if at most `most` are: positions are unique. */
static __device__ int oldest_kept(const struct members &m, int most, int tokens, int *room,
                                  int *kept) {
    int all = all_before(m, tokens, room), low = 0, high = tokens;
    *kept = all < most ? all : most;
    while (all > most &&
           low < high) { /* finds the first position before which enough members are */
        int middle = low + (high - low) / 2;
        if (all_before(m, middle, room) < all - most)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Finds each entry's target, and where its members begin. */
static __device__ void members_find(const struct members &m, const int32_t *target,
                                    const float *alike, float tau) {
    for (int i = threadIdx.x; i < m.state->length; i += (int)blockDim.x) {
        int low = 0, high = m.count, pos = pos_of(m, i);
        while (low < high) {
            int middle = (low + high) / 2;
            if (m.old[middle].centre < pos)
                low = middle + 1;
            else
                high = middle;
        }
        m.first[i] = low;
        m.joined[i] = MERGE_NOBODY;
    }
    __syncthreads();
    for (int k = threadIdx.x; k < m.state->gone; k += (int)blockDim.x)
        if (target[k] >= 0 && alike[m.gone[k]] > tau) m.joined[m.gone[k]] = target[k];
    __syncthreads();
}

/* Finds the place of each class's members. */
static __device__ void members_place(const struct members &m, int from, int tokens, int *room) {
    int at = 0, more;
    for (int first = 0; first < m.state->length; first += (int)blockDim.x) {
        int i = first + (int)threadIdx.x, mine = 0;
        if (i < m.state->length && stays(m, i))
            mine = class_before(m, i, tokens) - class_before(m, i, from);
        int place = at + block_scan(mine, room, &more);
        at += more;
        if (i < m.state->length) m.place[i] = place;
    }
    __syncthreads();
}

/* Writes a member of the class of `centre` to its place; drops members older than `from`. */
static __device__ void member_write(const struct members &m, const int32_t *to, int centre, int pos,
                                    float gain, int from) {
    if (pos < from) return;
    int at = m.place[centre] + class_before(m, centre, pos) - class_before(m, centre, from);
    struct member *home = members_at(*m.pages, to, at);
    home->centre = pos_of(m, centre);
    home->pos = pos;
    home->gain = gain;
}

static __device__ __forceinline__ float scale_of(const struct members &m, int entry, int centre) {
    return __fdiv_rn(m.norm[entry], m.norm[centre]);
}

static __device__ void members_write(const struct members &m, const int32_t *to, int from) {
    for (int k = threadIdx.x; k < m.state->gone; k += (int)blockDim.x) {
        int entry = m.gone[k], centre = m.joined[entry];
        if (centre >= 0)
            member_write(m, to, centre, pos_of(m, entry), scale_of(m, entry, centre), from);
    }
    for (int i = threadIdx.x; i < m.count; i += (int)blockDim.x) {
        int entry = pages_before(*m.pages, m.table, m.state->length, m.old[i].centre);
        int centre = m.joined[entry];
        if (stays(m, entry))
            member_write(m, to, entry, m.old[i].pos, m.old[i].gain, from);
        else if (centre >= 0)
            member_write(m, to, centre, m.old[i].pos,
                         __fmul_rn(m.old[i].gain, scale_of(m, entry, centre)), from);
    }
    __syncthreads();
}

/* Copies the old row aside; false: no room, which is a programming error. */
static __device__ bool members_read(const struct evict_args &a, struct members &m,
                                    const int32_t *from, unsigned long long *place) {
    if (threadIdx.x == 0) *place = atomicAdd(a.old_used, (unsigned long long)m.count);
    __syncthreads();
    int64_t at = (int64_t)*place;
    if (at + m.count > a.old_max) {
        pages_fail(*m.pages, ERR_INTERNAL);
        return false;
    }
    m.old = a.old + at;
    for (int i = threadIdx.x; i < m.count; i += (int)blockDim.x)
        m.old[i] = *members_at(*m.pages, from, i);
    __syncthreads();
    return true;
}

static __device__ struct members members_of(const struct evict_args &a, const struct due &d,
                                            const struct stream_state &state) {
    struct members m = {};
    m.pages = &a.streams.pages;
    m.state = &state;
    m.table = pages_table(*m.pages, d.slot, state.stream);
    m.links = a.links + state.first;
    m.gone = a.gone + state.first;
    m.joined = a.joined + state.first;
    m.first = a.first + state.first;
    m.place = a.place + state.first;
    m.norm = a.norm + state.first;
    m.count = *members_length(*m.pages, d.slot, state.stream);
    return m;
}

/* Block (state). */
static __global__ void k_class_members(const struct evict_args a) {
    SHARED_MEMORY(shared);
    int *room = (int *)shared, kept = 0;
    const struct pages &p = a.streams.pages;
    if (pages_failed(p)) return;
    const struct stream_state &state = a.streams.states[blockIdx.x];
    const struct due &d = a.due[state.subject];
    if (!joins(state)) return;
    const int32_t *table = members_table(p, d.slot, state.stream);
    struct members m = members_of(a, d, state);
    if (!members_read(a, m, table, (unsigned long long *)shared)) return;
    if (state.kept > 0) {
        members_find(m, a.target + state.first, a.alike + state.first, d.rule.classes.tau);
        int from = oldest_kept(m, d.members_max, d.tokens, room, &kept);
        members_place(m, from, d.tokens, room);
        members_write(m, table, from);
    }
    int pages = members_pages_for(classes_most(d, state, m.count));
    for (int page = members_pages_for(kept) + (int)threadIdx.x; page < pages;
         page += (int)blockDim.x)
        pages_drop(p, table[page]);
    if (threadIdx.x == 0) *members_length(p, d.slot, state.stream) = kept;
}

/* ---- The host's side ---- */

template <int D> static void join(struct cuda *cuda, const struct evict_args &args) {
    const size_t shared = product_shape<D>::SHARED + JOIN_ROWS * CLASS_KEYS * sizeof(float) +
                          JOIN_ROWS * sizeof(struct likeness) + CLASS_KEYS * sizeof(bool);
    unsigned blocks = (unsigned)(BLOCKS_EACH * device_processors(cuda->device));
    LAUNCH(cuda->device, (k_class_lengths<D>), blocks, PRODUCT_THREADS, 0, args);
    merge_gone(cuda, args);
    LAUNCH(cuda->device, (k_class_find<D>), blocks, PRODUCT_THREADS, shared, args);
    merge_link(cuda, args);
    LAUNCH(cuda->device, (k_class_rows<D>), blocks, PRODUCT_THREADS, 0, args);
}

void classes_join(struct cuda *cuda, const struct evict_args &args) {
    device_zero(cuda->device, args.old_used, sizeof *args.old_used);
    if (cuda->options.head_dim == 64) join<64>(cuda, args);
    if (cuda->options.head_dim == 128) join<128>(cuda, args);
    if (cuda->options.head_dim == 256) join<256>(cuda, args);
    LAUNCH(cuda->device, k_class_members, (unsigned)args.streams.state_count, THREADS,
           THREADS / 32 * sizeof(unsigned long long), args);
}
