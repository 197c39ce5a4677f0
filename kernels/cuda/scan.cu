/* Gated delta rules and Mamba-2: a block of four warps for KERN_STATE_COLUMNS columns of a head's
 * matrix of one span. Columns do not depend on each other. Eight lanes share a column and keep its
 * rows in registers while all tokens of the span go through it, one after the other:
 *
 *   known = decay (k . S)  (delta rules; otherwise 0),  change = rate (v - known),
 *   S <- decay S + k change,  y = q . S
 *
 * Vectors of SCAN_TOKENS tokens at a time are in shared memory. */
#include "kernels/cuda/state.cuh"

#define SCAN_LANES   8 /* so many share a column */
#define SCAN_COLUMNS (32 / SCAN_LANES)
#define SCAN_WARPS   (KERN_STATE_COLUMNS / SCAN_COLUMNS)
#define SCAN_TOKENS  16
#define SCAN_ROWS    (4 * SCAN_LANES) /* numbers of a column, four of each lane */

/* Tokens in shared memory; `rows`: SCAN_ROWS times CHUNKS, zeros behind the matrix's. */
struct scan_tokens {
    float *k, *q;        /* [SCAN_TOKENS][rows] */
    float *v;            /* [SCAN_TOKENS][KERN_STATE_COLUMNS] */
    float *decay, *rate; /* [SCAN_TOKENS] */
};

static constexpr size_t scan_shared(int rows) {
    return (size_t)SCAN_TOKENS * (size_t)(2 * rows + KERN_STATE_COLUMNS + 2) * sizeof(float);
}
static_assert(SCAN_TOKENS * 2 * SCAN_ROWS >= SCAN_ROWS * (KERN_STATE_COLUMNS + 1),
              "vectors of tokens leave room for a block of columns");

static __device__ __forceinline__ struct scan_tokens scan_tokens_at(char *shared, int rows) {
    struct scan_tokens t;
    t.k = (float *)shared;
    t.q = t.k + SCAN_TOKENS * rows;
    t.v = t.q + SCAN_TOKENS * rows;
    t.decay = t.v + SCAN_TOKENS * KERN_STATE_COLUMNS;
    t.rate = t.decay + SCAN_TOKENS;
    return t;
}

static __device__ __forceinline__ float softplus(float x) {
    return x > 20 ? x : log1pf(expf(x));
}

/* A warp reads the vectors of the token in row `row` of the batch to place `to`. Delta rules have
 * keys and queries of length 1, queries divided by sqrt(dim). */
template <int CHUNKS, bool CORRECTS>
static __device__ __forceinline__ void read_token(const struct scan_args &a,
                                                  const struct scan_tokens &t, int to, int64_t row,
                                                  int head, int block) {
    const int lane = (int)threadIdx.x % 32, rows = SCAN_ROWS * CHUNKS;
    const int64_t vector = (int64_t)((a.vectors_first + head) / a.heads_vector) * a.dim;
    const float *k = a.k + row * a.vectors_stride + vector;
    const float *q = a.q + row * a.vectors_stride + vector;
    float keys[CHUNKS], queries[CHUNKS], by_k = 1, by_q = 1;
#pragma unroll
    for (int j = 0; j < CHUNKS; j++) {
        const int i = 32 * j + lane;
        keys[j] = i < a.dim ? k[i] : 0;
        queries[j] = i < a.dim ? q[i] : 0;
    }
    if (CORRECTS) {
        float kk = 0, qq = 0;
#pragma unroll
        for (int j = 0; j < CHUNKS; j++) {
            kk = fmaf(keys[j], keys[j], kk);
            qq = fmaf(queries[j], queries[j], qq);
        }
        by_k = 1 / sqrtf(state_warp_sum(kk) + 1e-6f);
        by_q = 1 / sqrtf((state_warp_sum(qq) + 1e-6f) * (float)a.dim);
    }
#pragma unroll
    for (int j = 0; j < CHUNKS; j++) {
        t.k[to * rows + 32 * j + lane] = keys[j] * by_k;
        t.q[to * rows + 32 * j + lane] = queries[j] * by_q;
    }
    const int column = block * KERN_STATE_COLUMNS + lane;
    if (lane < KERN_STATE_COLUMNS)
        t.v[to * KERN_STATE_COLUMNS + lane] =
            column < a.columns ? a.v[row * a.v_stride + (int64_t)head * a.columns + column] : 0;
    if (lane > 0) return;
    const int of_model = a.first + head;
    const float rate = a.rates[row * a.rates_stride + of_model];
    const float from = CORRECTS ? a.decays[row * a.rates_stride + of_model] : rate;
    const float soft = softplus(from + a.bias[of_model]);
    t.decay[to] = expf(a.decay[of_model] * soft);
    t.rate[to] = CORRECTS ? 1 / (1 + expf(-rate)) : soft;
}

/* The sum of the lanes of a column, to each of them. */
static __device__ __forceinline__ float column_sum(const float sums[4]) {
    float x = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    for (int by = SCAN_LANES / 2; by > 0; by /= 2) x += __shfl_xor_sync(WARP_ALL, x, by);
    return x;
}

/* Four sums that grow side by side, because one would wait for itself. */
static __device__ __forceinline__ void add_products(float4 a, const float *b, float sums[4]) {
    sums[0] = fmaf(a.x, b[0], sums[0]);
    sums[1] = fmaf(a.y, b[1], sums[1]);
    sums[2] = fmaf(a.z, b[2], sums[2]);
    sums[3] = fmaf(a.w, b[3], sums[3]);
}

/* The place of a number of a block of columns in shared memory: rows of an odd length, so that
 * neither rows nor columns meet in a bank. */
static __device__ __forceinline__ int scan_place(int row, int column) {
    return row * (KERN_STATE_COLUMNS + 1) + column;
}

/* Rows of the column that the lane keeps. */
static __device__ __forceinline__ int scan_row(int j, int i) {
    return SCAN_ROWS * j + 4 * ((int)threadIdx.x % SCAN_LANES) + i;
}

/* A block of columns out of the pages into the lanes' registers, and back. Both go through shared
 * memory, so that the pages are read and written in the order of their numbers. `at`: the first
 * number of the columns in the state; `own`: the thread's column. */
template <int CHUNKS>
static __device__ __forceinline__ void read_columns(const struct scan_args &a, const int32_t *table,
                                                    int at, int own, float (*state)[4],
                                                    float *room) {
    const int count = a.dim * KERN_STATE_COLUMNS;
#pragma unroll 8
    for (int i = (int)threadIdx.x; i < count; i += 32 * SCAN_WARPS)
        room[scan_place(i / KERN_STATE_COLUMNS, i % KERN_STATE_COLUMNS)] =
            *pages_number(a.pages, table, at + i);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < CHUNKS; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            state[j][i] = scan_row(j, i) < a.dim ? room[scan_place(scan_row(j, i), own)] : 0;
}

template <int CHUNKS>
static __device__ __forceinline__ void write_columns(const struct scan_args &a,
                                                     const int32_t *table, int at, int own,
                                                     const float (*state)[4], float *room) {
    const int count = a.dim * KERN_STATE_COLUMNS;
    __syncthreads(); /* the last tokens have been read */
#pragma unroll
    for (int j = 0; j < CHUNKS; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (scan_row(j, i) < a.dim) room[scan_place(scan_row(j, i), own)] = state[j][i];
    __syncthreads();
#pragma unroll 8
    for (int i = (int)threadIdx.x; i < count; i += 32 * SCAN_WARPS)
        *pages_number(a.pages, table, at + i) =
            room[scan_place(i / KERN_STATE_COLUMNS, i % KERN_STATE_COLUMNS)];
}

/* One token in a column: brings the lane's numbers forward and returns the column's result. k, q:
 * the lane's first four numbers of the vectors. */
template <int CHUNKS, bool CORRECTS>
static __device__ __forceinline__ float
scan_token(float (*state)[4], const float4 *k, const float4 *q, float v, float decay, float rate) {
    float sums[4] = {0, 0, 0, 0}, known = 0;
    if (CORRECTS) {
#pragma unroll
        for (int j = 0; j < CHUNKS; j++) add_products(k[SCAN_LANES * j], state[j], sums);
        known = decay * column_sum(sums);
    }
    const float change = (v - known) * rate;
    sums[0] = sums[1] = sums[2] = sums[3] = 0;
#pragma unroll
    for (int j = 0; j < CHUNKS; j++) {
        const float4 key = k[SCAN_LANES * j];
        state[j][0] = fmaf(key.x, change, decay * state[j][0]);
        state[j][1] = fmaf(key.y, change, decay * state[j][1]);
        state[j][2] = fmaf(key.z, change, decay * state[j][2]);
        state[j][3] = fmaf(key.w, change, decay * state[j][3]);
        add_products(q[SCAN_LANES * j], state[j], sums);
    }
    return column_sum(sums);
}

template <int CHUNKS, bool CORRECTS> static __global__ void k_scan(const struct scan_args a) {
    ptx_overlap_grids();
    SHARED_MEMORY(shared);
    if (pages_failed(a.pages)) return;
    const int blocks = (a.columns + KERN_STATE_COLUMNS - 1) / KERN_STATE_COLUMNS;
    const int head = (int)blockIdx.x / blocks, block = (int)blockIdx.x % blocks;
    const int warp = (int)threadIdx.x / 32, part = (int)threadIdx.x % SCAN_LANES;
    const int own = (int)threadIdx.x / SCAN_LANES, column = block * KERN_STATE_COLUMNS + own;
    const int floats = a.dim * KERN_STATE_COLUMNS, rows = SCAN_ROWS * CHUNKS;
    const struct span s = a.spans[blockIdx.y];
    const int32_t *table = pages_row(a.pages, s.slot, a.row);
    const struct scan_tokens t = scan_tokens_at(shared, rows);
    const int at = a.at + head / a.unit_heads * a.unit_floats +
                   (head % a.unit_heads * blocks + block) * floats;
    float state[CHUNKS][4];
    read_columns<CHUNKS>(a, table, at, own, state, t.k);
    for (int first = 0; first < s.count; first += SCAN_TOKENS) {
        const int left = s.count - first, count = left < SCAN_TOKENS ? left : SCAN_TOKENS;
        __syncthreads();
        for (int i = warp; i < count; i += SCAN_WARPS)
            read_token<CHUNKS, CORRECTS>(a, t, i, s.row + first + i, head, block);
        __syncthreads();
        for (int i = 0; i < count; i++) {
            const float v = t.v[i * KERN_STATE_COLUMNS + own];
            float y = scan_token<CHUNKS, CORRECTS>(state, (const float4 *)(t.k + i * rows) + part,
                                                   (const float4 *)(t.q + i * rows) + part, v,
                                                   t.decay[i], t.rate[i]);
            if (part > 0 || column >= a.columns) continue;
            const int64_t row = s.row + first + i, number = (int64_t)head * a.columns + column;
            if (!CORRECTS)
                y = fmaf(a.skip[a.first + head], v, y) * silu(a.gates[row * a.v_stride + number]);
            state_write(a.y, a.round, row * a.heads * a.columns + number, y);
        }
    }
    write_columns<CHUNKS>(a, table, at, own, state, t.k);
}

template <int CHUNKS>
static void scan_chunks(struct cuda *cuda, const struct scan_args &args, bool corrects,
                        int span_count) {
    const dim3 grid((unsigned)(args.heads * kern_state_blocks(args.columns)), (unsigned)span_count);
    const size_t shared = scan_shared(SCAN_ROWS * CHUNKS);
    if (corrects)
        LAUNCH_OVERLAPPED(cuda->device, (k_scan<CHUNKS, true>), grid, 32 * SCAN_WARPS, shared,
                          args);
    else
        LAUNCH_OVERLAPPED(cuda->device, (k_scan<CHUNKS, false>), grid, 32 * SCAN_WARPS, shared,
                          args);
}

void scan_heads(struct cuda *cuda, int state, struct scan_args *args, bool corrects,
                const struct kern_batch *batch) {
    const struct step *step = step_of(cuda, batch);
    if (!step->spans) return;
    CHECK(args->dim % 4 == 0 && args->dim <= KERN_STATE_ROWS_MAX);
    args->pages = cuda->pages;
    args->spans = step->spans;
    args->row = cuda->pages.streams + state;
    const int chunks = (args->dim + SCAN_ROWS - 1) / SCAN_ROWS;
    if (chunks <= 1)
        scan_chunks<1>(cuda, *args, corrects, step->span_count);
    else if (chunks <= 2)
        scan_chunks<2>(cuda, *args, corrects, step->span_count);
    else if (chunks <= 4)
        scan_chunks<4>(cuda, *args, corrects, step->span_count);
    else
        scan_chunks<8>(cuda, *args, corrects, step->span_count);
}
