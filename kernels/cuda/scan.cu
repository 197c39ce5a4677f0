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
static __device__ __forceinline__ float column_sum(float x) {
    for (int by = SCAN_LANES / 2; by > 0; by /= 2) x += __shfl_xor_sync(WARP_ALL, x, by);
    return x;
}

static __device__ __forceinline__ float dot4(float4 a, const float *b, float sum) {
    return fmaf(a.w, b[3], fmaf(a.z, b[2], fmaf(a.y, b[1], fmaf(a.x, b[0], sum))));
}

/* The column's numbers that the lane keeps, out of the pages or into them. `at`: the column's first
 * number in the state. */
template <int CHUNKS, bool IN>
static __device__ __forceinline__ void move_column(const struct scan_args &a, const int32_t *table,
                                                   int at, float (*state)[4]) {
#pragma unroll
    for (int j = 0; j < CHUNKS; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = SCAN_ROWS * j + 4 * ((int)threadIdx.x % SCAN_LANES) + i;
            if (IN) state[j][i] = 0;
            if (row >= a.dim) continue;
            float *number = pages_number(a.pages, table, at + row * KERN_STATE_COLUMNS);
            if (IN)
                state[j][i] = *number;
            else
                *number = state[j][i];
        }
}

/* One token in a column: brings the lane's numbers forward and returns the column's result. k, q:
 * the lane's first four numbers of the vectors. */
template <int CHUNKS, bool CORRECTS>
static __device__ __forceinline__ float
scan_token(float (*state)[4], const float4 *k, const float4 *q, float v, float decay, float rate) {
    float known = 0, y = 0;
    if (CORRECTS) {
#pragma unroll
        for (int j = 0; j < CHUNKS; j++) known = dot4(k[SCAN_LANES * j], state[j], known);
        known = decay * column_sum(known);
    }
    const float change = (v - known) * rate;
#pragma unroll
    for (int j = 0; j < CHUNKS; j++) {
        const float4 key = k[SCAN_LANES * j];
        state[j][0] = fmaf(key.x, change, decay * state[j][0]);
        state[j][1] = fmaf(key.y, change, decay * state[j][1]);
        state[j][2] = fmaf(key.z, change, decay * state[j][2]);
        state[j][3] = fmaf(key.w, change, decay * state[j][3]);
        y = dot4(q[SCAN_LANES * j], state[j], y);
    }
    return column_sum(y);
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
                   (head % a.unit_heads * blocks + block) * floats + own;
    float state[CHUNKS][4];
    move_column<CHUNKS, true>(a, table, at, state);
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
            a.y[row * a.heads * a.columns + number] = y;
        }
    }
    move_column<CHUNKS, false>(a, table, at, state);
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
