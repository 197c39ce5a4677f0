/* Retention gates, in float32 because scores decide what is kept: an entry's rank must not depend
 * on the rounding of its inputs.
 *
 * A layer is silu(w x + b). Tensor cores multiply no float32, but a float32 number is the sum of
 * three bf16 (8 + 8 + 8 of its 24 bits), and three of the nine products of two such sums are below
 * 2^-24 of the whole and left out. So 16 inputs take six mma. Inputs are cut into parts of 128. The
 * sum of each part is formed alone, and the parts are added in order: with few rows every part has
 * blocks of its own, and the kernel that needs the sums adds them; with many rows a block has all
 * parts and adds them itself. An output's operations are the same in both cases, so a row's scores
 * do not depend on the other rows. */
#include <string.h>

#include "kernels/cuda/internal.h"

#define THREADS      128 /* threads of a product: four warps */
#define STEP         16  /* inputs of an mma */
#define PART_STEPS   8
#define TILE         64 /* outputs of a block, and rows of a block that has many */
#define FEW_ROWS     8  /* rows of a block where there are not more */
#define APART_TILES  64 /* up to 64 tiles, every part has blocks of its own */
#define LAST_THREADS 512

struct gate_layer {
    float *w; /* device, [outputs][stride]: zeros follow the inputs */
    float *b; /* device, [outputs] */
    int outputs, inputs, stride;
};

struct kern_gate {
    int width, heads_kv, embeddings;
    struct gate_layer first, second; /* second: rg10, otherwise zeros */
    float *last;                     /* device, [heads_kv][last_stride]: the row of each head */
    float *bias;                     /* device, [heads_kv] */
    int last_stride;                 /* width, rounded up; zeros follow the numbers */
};

/* ---- Loading ---- */

static int round_up(int count, int step) {
    return (count + step - 1) / step * step;
}

static float *copy_floats(struct cuda *cuda, const float *from, size_t count) {
    float *to = static_cast<float *>(device_alloc(cuda->device, count * sizeof *to));
    if (to) device_upload(cuda->device, to, from, count * sizeof *to);
    return to;
}

/* A device copy of [rows][cols] in rows of `stride`; row[i] is row i's place in `from`, NULL: i. */
static float *copy_rows(struct cuda *cuda, const float *from, const int32_t *row, int rows,
                        int cols, int stride) {
    size_t wide = (size_t)cols, step = (size_t)stride;
    float *all = static_cast<float *>(mem_try_alloc((size_t)rows * step, sizeof *all));
    if (!all) return NULL;
    for (int r = 0; r < rows; r++)
        memcpy(all + (size_t)r * step, from + (size_t)(row ? row[r] : r) * wide,
               wide * sizeof *all);
    float *to = copy_floats(cuda, all, (size_t)rows * step);
    mem_free(all);
    return to;
}

static int parts_of(const struct gate_layer *layer) {
    return (layer->stride / STEP + PART_STEPS - 1) / PART_STEPS;
}

/* Parts whose sums are written for so many rows: all, or one that is the sum of all. */
static int parts_apart(const struct gate_layer *layer, int64_t rows) {
    int64_t tiles = (int64_t)blocks_for(layer->outputs, TILE) * blocks_for(rows, TILE);
    return tiles <= APART_TILES ? parts_of(layer) : 1;
}

/* Notes the memory that a layer's sums need; see gate_bytes. */
static void note_layer(struct cuda *cuda, const struct gate_layer *layer) {
    size_t parts = (size_t)parts_of(layer), row = parts * (size_t)layer->outputs * sizeof(float);
    size_t most = parts * APART_TILES * TILE * TILE * sizeof(float);
    if (row > cuda->gate_parts_row) cuda->gate_parts_row = row;
    if (most > cuda->gate_parts_most) cuda->gate_parts_most = most;
}

static int load_layer(struct cuda *cuda, struct gate_layer *layer, const float *w, const float *b,
                      int outputs, int inputs) {
    layer->outputs = outputs;
    layer->inputs = inputs;
    layer->stride = round_up(inputs, STEP);
    layer->w = copy_rows(cuda, w, NULL, outputs, inputs, layer->stride);
    layer->b = copy_floats(cuda, b, (size_t)outputs);
    note_layer(cuda, layer);
    return layer->w && layer->b ? 0 : ERR_NOMEM;
}

static int load_heads(struct cuda *cuda, struct kern_gate *gate,
                      const struct kern_gate_spec *spec) {
    for (int head = 0; head < gate->heads_kv; head++)
        CHECK(spec->row[head] >= 0 && spec->row[head] < spec->row_count);
    gate->last_stride = round_up(gate->width, 4);
    gate->last =
        copy_rows(cuda, spec->last, spec->row, gate->heads_kv, gate->width, gate->last_stride);
    gate->bias = copy_rows(cuda, spec->bias, spec->row, gate->heads_kv, 1, 1);
    return gate->last && gate->bias ? 0 : ERR_NOMEM;
}

int op_gate_load(struct kern *kern, const struct kern_gate_spec *whole, struct kern_gate **out,
                 struct fault *fault) {
    struct cuda *cuda = cuda_of(kern);
    struct kern_gate_spec own = *whole;
    const struct kern_gate_spec *spec = &own;
    CHECK(spec->width > 0 && spec->d_model > 0 && spec->heads_kv > 0);
    CHECK(spec->embeddings == 1 || spec->embeddings == spec->heads_kv);
    CHECK(!spec->w2 || spec->embeddings == 1);
    shard_gate(cuda->comm, &own);
    struct kern_gate *gate = static_cast<struct kern_gate *>(mem_try_alloc(1, sizeof *gate));
    if (!gate) return fault_set(fault, ERR_NOMEM, "", "no memory for a gate");
    gate->width = spec->width;
    gate->heads_kv = spec->heads_kv;
    gate->embeddings = spec->embeddings;
    int first = spec->embeddings * spec->width;
    size_t row = (size_t)(first + (spec->w2 ? round_up(first, STEP) : 0)) * sizeof(float);
    if (row > cuda->hidden_row) cuda->hidden_row = row;
    int rc = load_layer(cuda, &gate->first, spec->w1, spec->b1, first, spec->d_model);
    if (!rc && spec->w2)
        rc = load_layer(cuda, &gate->second, spec->w2, spec->b2, spec->width, spec->width);
    if (!rc) rc = load_heads(cuda, gate, spec);
    if (!rc) rc = device_sync(cuda->device);
    if (rc) {
        fault_set(fault, rc, "", "no device memory for a gate, or %s", err_text(rc));
        op_gate_free(kern, gate);
    } else {
        *out = gate;
    }
    return rc;
}

void op_gate_free(struct kern *kern, struct kern_gate *gate) {
    if (!gate) return;
    struct device *device = cuda_of(kern)->device;
    float *arrays[] = {gate->first.w,  gate->first.b, gate->second.w,
                       gate->second.b, gate->last,    gate->bias};
    for (float *array : arrays) device_free(device, array);
    mem_free(gate);
}

/* ---- Products ---- */

struct gate_args {
    const float *x, *w;
    float *y; /* [parts written][rows][outputs] */
    int64_t x_stride;
    int rows, outputs;
    int inputs; /* ALIGNED: rounded up to 4s; rows of x have finite numbers up to there */
    int stride; /* stride of w: whole steps; zeros follow the inputs */
    int apart;  /* parts written: all, or 1 */
};

/* A lane's numbers of one step. In an mma, lane t of four has columns 2t, 2t + 1, 2t + 8 and 2t + 9
 * of both operands; here these are inputs 4t to 4t + 3, one read of 128 bits, because a sum does
 * not depend on which column an input is, as long as both operands agree. */
template <int M, int N> struct numbers { float4 w[M][2], x[N]; };

template <bool ALIGNED>
static __device__ __forceinline__ float4 inputs_at(const float *x, int at, int inputs) {
    float4 v = {0, 0, 0, 0};
    if (ALIGNED) return at < inputs ? *(const float4 *)(x + at) : v;
    if (at < inputs) v.x = x[at];
    if (at + 1 < inputs) v.y = x[at + 1];
    if (at + 2 < inputs) v.z = x[at + 2];
    if (at + 3 < inputs) v.w = x[at + 3];
    return v;
}

/* Two numbers as sums of three bf16 each, the largest first: exact. */
static __device__ __forceinline__ void split(uint32_t out[3], float low, float high) {
#pragma unroll
    for (int i = 0; i < 3; i++) {
        out[i] = ptx_pack_bf16(low, high);
        low -= __uint_as_float(out[i] << 16);
        high -= __uint_as_float(out[i] & 0xffff0000u);
    }
}

/* An operand's registers for each of the three bf16. */
template <int REGISTERS> struct operand { uint32_t of[3][REGISTERS]; };

template <int REGISTERS>
static __device__ __forceinline__ void put_pair(struct operand<REGISTERS> &to, int i, float low,
                                                float high) {
    uint32_t three[3];
    split(three, low, high);
#pragma unroll
    for (int k = 0; k < 3; k++) to.of[k][i] = three[k];
}

/* high += the product of the largest bf16; low += five others, from small to large. */
static __device__ __forceinline__ void
multiply_tile(float high[4], float low[4], const struct operand<4> &w, const struct operand<2> &x) {
    ptx_mma(low, w.of[2], x.of[0][0], x.of[0][1]);
    ptx_mma(low, w.of[1], x.of[1][0], x.of[1][1]);
    ptx_mma(low, w.of[0], x.of[2][0], x.of[2][1]);
    ptx_mma(low, w.of[1], x.of[0][0], x.of[0][1]);
    ptx_mma(low, w.of[0], x.of[1][0], x.of[1][1]);
    ptx_mma(high, w.of[0], x.of[0][0], x.of[0][1]);
}

template <int M, int N>
static __device__ __forceinline__ void multiply_step(float high[M][N][4], float low[M][N][4],
                                                     const struct numbers<M, N> &in) {
    struct operand<4> w[M];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            put_pair(w[m], i, in.w[m][i].x, in.w[m][i].y);
            put_pair(w[m], i + 2, in.w[m][i].z, in.w[m][i].w);
        }
#pragma unroll
    for (int n = 0; n < N; n++) {
        struct operand<2> x;
        put_pair(x, 0, in.x[n].x, in.x[n].y);
        put_pair(x, 1, in.x[n].z, in.x[n].w);
#pragma unroll
        for (int m = 0; m < M; m++) multiply_tile(high[m][n], low[m][n], w[m], x);
    }
}

static __device__ __forceinline__ int lesser(int a, int b) {
    return a < b ? a : b;
}

/* The first output and row of a warp, and this lane's rows of both operands. Rows behind the last
 * one are the last one. */
template <int M, int N> struct place {
    int output, row;
    const float *w[M][2], *x[N];
};

template <int M, int N>
static __device__ __forceinline__ struct place<M, N> place_of(const struct gate_args &a) {
    constexpr int ALONG = TILE / (16 * M); /* warps along the outputs */
    constexpr int ROWS = THREADS / 32 / ALONG * 8 * N;
    const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4;
    struct place<M, N> p;
    p.output = (int)blockIdx.x * TILE + warp % ALONG * 16 * M;
    p.row = (int)blockIdx.y / a.apart * ROWS + warp / ALONG * 8 * N;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int at = lesser(p.output + 16 * m + 8 * i + group, a.outputs - 1);
            p.w[m][i] = a.w + (int64_t)at * a.stride;
        }
#pragma unroll
    for (int n = 0; n < N; n++)
        p.x[n] = a.x + lesser(p.row + 8 * n + group, a.rows - 1) * a.x_stride;
    return p;
}

/* Adds the sum of one part to `total`; the first one is the total. A thread reads AHEAD steps
 * before it multiplies the first, because the compiler moves no read across an mma. */
template <int M, int N, int AHEAD, bool ALIGNED>
static __device__ __forceinline__ void add_part(float total[M][N][4], const struct gate_args &a,
                                                const struct place<M, N> &p, int part, bool first) {
    const int end = lesser((part + 1) * PART_STEPS, a.stride / STEP), lane = threadIdx.x % 4;
    float high[M][N][4] = {}, low[M][N][4] = {};
    for (int step = part * PART_STEPS; step < end; step += AHEAD) {
        struct numbers<M, N> in[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int at = (step + i) * STEP + 4 * lane;
            if (step + i >= end) break;
#pragma unroll
            for (int m = 0; m < M; m++) {
                in[i].w[m][0] = *(const float4 *)(p.w[m][0] + at);
                in[i].w[m][1] = *(const float4 *)(p.w[m][1] + at);
            }
#pragma unroll
            for (int n = 0; n < N; n++) in[i].x[n] = inputs_at<ALIGNED>(p.x[n], at, a.inputs);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (step + i >= end) break;
            multiply_step<M, N>(high, low, in[i]);
        }
    }
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float sum = high[m][n][i] + low[m][n][i];
                total[m][n][i] = first ? sum : total[m][n][i] + sum;
            }
}

/* Blocks (outputs, rows x parts written). A warp multiplies 16 M outputs with 8 N rows. */
template <int M, int N, int AHEAD, bool ALIGNED>
static __global__ void __launch_bounds__(THREADS) k_gate_product(const struct gate_args a) {
    ptx_overlap_grids();
    const struct place<M, N> p = place_of<M, N>(a);
    const int lane = threadIdx.x % 32, part = (int)blockIdx.y % a.apart;
    const int parts = (a.stride / STEP + PART_STEPS - 1) / PART_STEPS;
    float total[M][N][4];
    if (p.output >= a.outputs || p.row >= a.rows) return;
    add_part<M, N, AHEAD, ALIGNED>(total, a, p, part, true);
    if (a.apart == 1)
        for (int next = 1; next < parts; next++)
            add_part<M, N, AHEAD, ALIGNED>(total, a, p, next, false);
    float *y = a.y + (int64_t)part * a.rows * a.outputs;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int output = p.output + 16 * m + lane / 4 + 8 * (i / 2);
                int row = p.row + 8 * n + 2 * (lane % 4) + i % 2;
                if (output < a.outputs && row < a.rows)
                    y[(int64_t)row * a.outputs + output] = total[m][n][i];
            }
}

template <int M, int N, int AHEAD>
static void launch_product(struct cuda *cuda, const struct gate_args &args, int rows_each) {
    dim3 grid(blocks_for(args.outputs, TILE),
              blocks_for(args.rows, rows_each) * (unsigned)args.apart);
    if (args.x_stride % 4 == 0)
        LAUNCH_OVERLAPPED(cuda->device, (k_gate_product<M, N, AHEAD, true>), grid, THREADS, 0,
                          args);
    else
        LAUNCH_OVERLAPPED(cuda->device, (k_gate_product<M, N, AHEAD, false>), grid, THREADS, 0,
                          args);
}

/* The sums of a layer, of one or several parts. */
struct gate_sums {
    const float *y; /* [parts][rows][outputs] */
    const float *b; /* [outputs] */
    int64_t apart;  /* numbers of a part */
    int parts, outputs;
};

static struct gate_sums multiply(struct cuda *cuda, const struct gate_layer *layer, float *y,
                                 const float *x, int64_t x_stride, int rows) {
    const int inputs = x_stride % 4 ? layer->inputs : round_up(layer->inputs, 4);
    const struct gate_args args = {x,        layer->w,      y,
                                   x_stride, rows,          layer->outputs,
                                   inputs,   layer->stride, parts_apart(layer, rows)};
    if (rows <= FEW_ROWS)
        launch_product<1, 1, PART_STEPS>(cuda, args, FEW_ROWS);
    else
        launch_product<2, 4, 2>(cuda, args, TILE);
    return {y, layer->b, (int64_t)rows * layer->outputs, args.apart, layer->outputs};
}

/* ---- Applying ---- */

static __device__ __forceinline__ float hidden_at(const struct gate_sums &s, int64_t row,
                                                  int output) {
    const float *y = s.y + row * s.outputs + output;
    float sum = y[0];
#pragma unroll 16
    for (int part = 1; part < s.parts; part++) sum += y[part * s.apart];
    sum += s.b[output];
    return sum / (1.0f + expf(-sum));
}

/* A thread per number; zeros follow a row's outputs. */
static __global__ void k_gate_hidden(float *h, const struct gate_sums sums, int rows, int stride) {
    ptx_overlap_grids();
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (int64_t)rows * stride) return;
    int output = (int)(i % stride);
    h[i] = output < sums.outputs ? hidden_at(sums, i / stride, output) : 0;
}

static __device__ float log_sigmoid(float z) {
    return fminf(z, 0.0f) - log1pf(expf(-fabsf(z)));
}

struct last_args {
    struct gate_sums sums;
    const float *last, *bias;
    float *out;
    int heads, width, stride, embeddings;
};

/* A block per (row, embedding), a warp per head. */
static __global__ void k_gate_last(const struct last_args a) {
    ptx_overlap_grids();
    SHARED_MEMORY(shared);
    float *h = (float *)shared; /* [stride] */
    const int64_t row = blockIdx.x / a.embeddings;
    const int own = (int)blockIdx.x % a.embeddings, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < a.stride; i += (int)blockDim.x)
        h[i] = i < a.width ? hidden_at(a.sums, row, own * a.width + i) : 0;
    __syncthreads();
    const int first = a.embeddings > 1 ? own : 0, end = a.embeddings > 1 ? own + 1 : a.heads;
    for (int head = first + threadIdx.x / 32; head < end; head += (int)blockDim.x / 32) {
        const float4 *last = (const float4 *)(a.last + (int64_t)head * a.stride);
        float z = 0;
        for (int i = lane; i < a.stride / 4; i += 32) {
            float4 u = ((const float4 *)h)[i], v = last[i];
            z += u.x * v.x + u.y * v.y + u.z * v.z + u.w * v.w;
        }
        for (int by = 16; by > 0; by /= 2) z += __shfl_xor_sync(WARP_ALL, z, by);
        if (lane == 0) a.out[row * a.heads + head] = log_sigmoid(z + a.bias[head]);
    }
}

size_t gate_bytes(const struct cuda *cuda, int rows) {
    size_t count = (size_t)rows, parts = count * cuda->gate_parts_row;
    if (parts > cuda->gate_parts_most) parts = cuda->gate_parts_most;
    return count * cuda->hidden_row + parts;
}

void op_gate(struct kern *kern, float *log_beta, const float *x, const struct kern_gate *gate,
             int rows) {
    struct cuda *cuda = cuda_of(kern);
    if (rows == 0) return;
    float *h = static_cast<float *>(room_take(cuda, &cuda->hidden, gate_bytes(cuda, rows)));
    if (!h) return;
    const int stride = gate->second.stride;
    float *y = h + (size_t)rows * (size_t)stride;
    struct gate_sums sums = multiply(cuda, &gate->first, y, x, gate->first.inputs, rows);
    if (gate->second.w) {
        LAUNCH_OVERLAPPED(cuda->device, k_gate_hidden,
                          blocks_for((int64_t)rows * stride, LAST_THREADS), LAST_THREADS, 0, h,
                          sums, rows, stride);
        sums = multiply(cuda, &gate->second, y, h, stride, rows);
    }
    const struct last_args args = {
        sums,           gate->last,  gate->bias,        log_beta,
        gate->heads_kv, gate->width, gate->last_stride, gate->embeddings};
    const int threads = gate->width < LAST_THREADS ? round_up(gate->width, 128) : LAST_THREADS;
    LAUNCH_OVERLAPPED(cuda->device, k_gate_last, (unsigned)(rows * gate->embeddings), threads,
                      (size_t)gate->last_stride * sizeof(float), args);
}
