/* Operations on rows: each by itself, sums in an order that depends on the row's width alone. */
#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/block.cuh"
#include "kernels/cuda/packed.cuh"
#include "kernels/cuda/several.cuh"
#include "kernels/quantize.h"

#define NORM_BATCH  4 /* reads of a thread at a time */
#define NARROW_EACH 8
#define THREADS     256
#define GLU_THREADS                                                                                \
    512 /* for a row that is rounded with a scale: one block processes all of it                   \
         */

/* ---- Embedding and gathering ---- */

/* F32, BF16 or F16. */
static __device__ __forceinline__ float element(const void *at, int64_t i, enum kern_dtype dtype) {
    if (dtype == KERN_F32) return static_cast<const float *>(at)[i];
    uint32_t bits = static_cast<const uint16_t *>(at)[i];
    return dtype == KERN_F16 ? ptx_unpack_f16(bits).x : __uint_as_float(bits << 16);
}

/* This rank holds tokens [first, first + count) of the vocabulary. */
static __global__ void k_embed(float *x, const void *table, enum kern_dtype dtype, float scale,
                               const int32_t *tokens, int cols, int first, int count) {
    ptx_overlap_grids();
    int64_t row = blockIdx.x, at = tokens[row] - first;
    bool here = at >= 0 && at < count;
    for (int i = threadIdx.x; i < cols; i += (int)blockDim.x)
        x[row * cols + i] = here ? scale * element(table, at * cols + i, dtype) : 0;
}

/* The same for a vocabulary in blocks. */
static __global__ void k_embed_packed(float *x, const struct packed table, float scale,
                                      const int32_t *tokens, int cols, int first, int count) {
    ptx_overlap_grids();
    int64_t row = blockIdx.x, at = tokens[row] - first;
    bool here = at >= 0 && at < count;
    for (int i = threadIdx.x; i < cols; i += (int)blockDim.x)
        x[row * cols + i] = here ? scale * packed_number(table, at, i) : 0;
}

void op_embed(struct kern *kern, float *x, const struct kern_weight *table, float scale,
              const int32_t *tokens, int rows) {
    struct cuda *cuda = cuda_of(kern);
    CHECK(table->dtype != KERN_E4M3); /* vocabularies keep the file's numbers */
    const void *ids = device_stage(cuda->device, tokens, (size_t)rows * sizeof *tokens);
    if (ids && kern_dtype_blocks(table->dtype))
        LAUNCH_OVERLAPPED(cuda->device, k_embed_packed, (unsigned)rows, THREADS, 0, x,
                          packed_of(table), scale, static_cast<const int32_t *>(ids),
                          (int)table->cols, (int)table->part[0].first, (int)table->rows);
    else if (ids)
        LAUNCH_OVERLAPPED(cuda->device, k_embed, (unsigned)rows, THREADS, 0, x, table->data,
                          table->dtype, scale, static_cast<const int32_t *>(ids), (int)table->cols,
                          (int)table->part[0].first, (int)table->rows);
    /* Bits that are zero everywhere else. */
    join_reduce(cuda, x, (size_t)rows * (size_t)table->cols, COMM_U32, COMM_SUM);
}

static __global__ void k_gather_rows(float *y, const float *x, const int32_t *index, int dim) {
    ptx_overlap_grids();
    int64_t to = blockIdx.x, from = index[to];
    for (int i = threadIdx.x; i < dim; i += (int)blockDim.x) y[to * dim + i] = x[from * dim + i];
}

void op_gather_rows(struct kern *kern, float *y, const float *x, const int32_t *index, int count,
                    int dim) {
    struct cuda *cuda = cuda_of(kern);
    const void *rows = device_stage(cuda->device, index, (size_t)count * sizeof *index);
    if (!rows) return;
    LAUNCH_OVERLAPPED(cuda->device, k_gather_rows, (unsigned)count, THREADS, 0, y, x,
                      static_cast<const int32_t *>(rows), dim);
}

/* ---- Rounding for products ---- */

static __device__ __forceinline__ float most_of(float most, float4 v) {
    return fmaxf(fmaxf(most, fmaxf(fabsf(v.x), fabsf(v.y))), fmaxf(fabsf(v.z), fabsf(v.w)));
}

/* Rounds the block's row to E4M3, with the same result as quantize_rows on the host. `most`: the
 * largest magnitude that the thread has seen; `shared`: a float per warp. */
static __device__ void round_row(const struct rounded &to, const float *row, int64_t cols,
                                 float most, char *shared) {
    const float4 *x = (const float4 *)row;
    uint32_t *codes = (uint32_t *)to.x + blockIdx.x * (cols / 4);
    /* waits for the block, which may have just written the row */
    float scale = fmaxf(block_most(most, (float *)shared) / QUANTIZE_MOST, QUANTIZE_LEAST);
    float by = 1 / scale;
    for (int64_t i = threadIdx.x; i < cols / 4; i += (int)blockDim.x) {
        float4 v = x[i];
        codes[i] = ptx_pack_e4m3(v.x * by, v.y * by) | ptx_pack_e4m3(v.z * by, v.w * by) << 16;
    }
    if (threadIdx.x == 0) to.scale[blockIdx.x] = scale;
}

/* A block per row. */
static __global__ void k_narrow_rows(const struct rounded to, const float *from, int64_t cols) {
    ptx_overlap_grids();
    SHARED_MEMORY(shared);
    const float *row = from + blockIdx.x * cols;
    float most = 0;
    for (int64_t i = threadIdx.x; i < cols / 4; i += (int)blockDim.x)
        most = most_of(most, ((const float4 *)row)[i]);
    round_row(to, row, cols, most, shared);
}

/* Rounds to 16 bits, eight numbers a thread; fewer at the end. */
static __global__ void k_narrow(const struct rounded round, const float *from, int64_t count) {
    ptx_overlap_grids();
    uint16_t *to = (uint16_t *)round.x;
    int64_t i = NARROW_EACH * ((int64_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (i + NARROW_EACH <= count) {
        const float4 a = *(const float4 *)(from + i), b = *(const float4 *)(from + i + 4);
        const uint4 all = {pack_pair(a.x, a.y, round.dtype), pack_pair(a.z, a.w, round.dtype),
                           pack_pair(b.x, b.y, round.dtype), pack_pair(b.z, b.w, round.dtype)};
        *(uint4 *)(to + i) = all;
        return;
    }
#pragma unroll 1
    for (; i < count; i++) to[i] = (uint16_t)pack_pair(from[i], 0, round.dtype);
}

void narrow(struct cuda *cuda, struct rounded to, const float *x, int rows, int64_t cols) {
    int64_t count = rows * cols;
    CHECK(!to.scale || cols % 4 == 0);
    if (to.scale)
        LAUNCH_OVERLAPPED(cuda->device, k_narrow_rows, (unsigned)rows, THREADS,
                          THREADS / 32 * sizeof(float), to, x, cols);
    else
        LAUNCH_OVERLAPPED(cuda->device, k_narrow, blocks_for(count, NARROW_EACH * THREADS), THREADS,
                          0, to, x, count);
}

/* ---- Norm and activation ---- */

/* A block per row; `round`: y rounded, or none. WIDTH divides dim. A thread reads NORM_BATCH times
 * before it uses the first numbers, and keeps the row's first NORM_BATCH * blockDim.x * WIDTH
 * numbers, all of most models' rows, in registers between the sum and the result. */
template <int WIDTH>
static __global__ void k_rms_norm(float *y, const struct rounded round, const float *x,
                                  const float *weight, int dim, float eps) {
    ptx_overlap_grids();
    SHARED_MEMORY(shared);
    const int64_t first = (int64_t)blockIdx.x * dim;
    const int step = WIDTH * (int)blockDim.x;
    uint16_t *half = round.scale ? NULL : (uint16_t *)round.x;
    struct several<WIDTH> kept[NORM_BATCH] = {};
    float sum = 0, most = 0;
    for (int begin = WIDTH * (int)threadIdx.x; begin < dim; begin += NORM_BATCH * step) {
        struct several<WIDTH> read[NORM_BATCH] = {};
#pragma unroll
        for (int k = 0; k < NORM_BATCH; k++)
            if (begin + k * step < dim) read[k] = read_several<WIDTH>(x + first + begin + k * step);
#pragma unroll
        for (int k = 0; k < NORM_BATCH; k++) {
#pragma unroll
            for (int i = 0; i < WIDTH; i++) sum += read[k].of[i] * read[k].of[i];
            if (begin < step) kept[k] = read[k];
        }
    }
    sum = block_total(sum, (float *)shared);
    float scale = 1.0f / sqrtf(sum / (float)dim + eps);
    for (int begin = WIDTH * (int)threadIdx.x; begin < dim; begin += NORM_BATCH * step) {
        struct several<WIDTH> by[NORM_BATCH] = {};
#pragma unroll
        for (int k = 0; k < NORM_BATCH; k++) {
            int at = begin + k * step;
            if (at >= dim) break;
            by[k] = read_several<WIDTH>(weight + at);
            if (begin >= step) kept[k] = read_several<WIDTH>(x + first + at);
        }
#pragma unroll
        for (int k = 0; k < NORM_BATCH; k++) {
            int at = begin + k * step;
            if (at >= dim) break;
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                by[k].of[i] = kept[k].of[i] * scale * by[k].of[i];
                most = fmaxf(most, fabsf(by[k].of[i]));
            }
            write_rounded<WIDTH>(y + first + at, half ? half + first + at : NULL, by[k],
                                 round.dtype);
        }
    }
    if (round.scale) round_row(round, y + first, dim, most, shared);
}

static void rms_norm(struct cuda *cuda, float *y, struct rounded round, const float *x,
                     const float *weight, int rows, int dim, float eps) {
    const size_t shared = THREADS / 32 * sizeof(float);
    if (dim % 4 == 0)
        LAUNCH_OVERLAPPED(cuda->device, k_rms_norm<4>, (unsigned)rows, THREADS, shared, y, round, x,
                          weight, dim, eps);
    else
        LAUNCH_OVERLAPPED(cuda->device, k_rms_norm<1>, (unsigned)rows, THREADS, shared, y, round, x,
                          weight, dim, eps);
}

void op_rms_norm(struct kern *kern, float *y, const float *x, const float *weight, int rows,
                 int dim, float eps) {
    struct cuda *cuda = cuda_of(kern);
    CHECK(rows >= 0 && dim > 0);
    struct rounded round = rounded_take(cuda, rows, dim);
    rms_norm(cuda, y, round, x, weight, rows, dim, eps);
    rounded_put(cuda, round, y, rows, dim);
}

static __global__ void k_add(float *y, const float *x, int64_t count) {
    ptx_overlap_grids();
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) y[i] += x[i];
}

void op_add(struct kern *kern, float *y, const float *x, int rows, int dim) {
    const int64_t count = (int64_t)rows * dim;
    LAUNCH_OVERLAPPED(cuda_of(kern)->device, k_add, blocks_for(count, THREADS), THREADS, 0, y, x,
                      count);
}

void op_add_norm(struct kern *kern, float *y, float *x, const float *weight, int rows, int dim,
                 float eps) {
    struct cuda *cuda = cuda_of(kern);
    const struct rounded none = {};
    rms_norm(cuda, x, none, x, weight, rows, dim, eps);
    op_add(kern, y, x, rows, dim);
}

static __global__ void k_soft_cap(float *x, int64_t count, float cap) {
    ptx_overlap_grids();
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) x[i] = cap * tanhf(x[i] / cap);
}

void op_soft_cap(struct kern *kern, float *x, int rows, int dim, float cap) {
    int64_t count = (int64_t)rows * dim;
    LAUNCH_OVERLAPPED(cuda_of(kern)->device, k_soft_cap, blocks_for(count, THREADS), THREADS, 0, x,
                      count, cap);
}

/* Rows of gates and of what they open, strides apart. */
struct gated_rows {
    const float *gate, *up;
    int64_t gate_stride, up_stride;
};

/* A thread per WIDTH numbers, which divides d_ff; `round`: y in 16 bits, or none. */
template <enum kern_activation ACTIVATION, int WIDTH>
static __global__ void k_glu(float *y, const struct rounded round, const struct gated_rows x,
                             int64_t count, int d_ff) {
    ptx_overlap_grids();
    int64_t i = WIDTH * ((int64_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= count) return;
    int64_t row = i / d_ff, at = i % d_ff;
    const struct several<WIDTH> gate = read_several<WIDTH>(x.gate + row * x.gate_stride + at);
    struct several<WIDTH> up = read_several<WIDTH>(x.up + row * x.up_stride + at);
#pragma unroll
    for (int k = 0; k < WIDTH; k++) up.of[k] = gated(gate.of[k], up.of[k], ACTIVATION);
    write_rounded<WIDTH>(y + i, round.x ? (uint16_t *)round.x + i : NULL, up, round.dtype);
}

/* A block per row, because the row's largest number must be known before the first is rounded. */
template <enum kern_activation ACTIVATION>
static __global__ void k_glu_rows(float *y, const struct rounded round, const struct gated_rows x,
                                  int64_t d_ff) {
    ptx_overlap_grids();
    SHARED_MEMORY(shared);
    const float4 *gate = (const float4 *)(x.gate + blockIdx.x * x.gate_stride);
    const float4 *up = (const float4 *)(x.up + blockIdx.x * x.up_stride);
    float *row = y + blockIdx.x * d_ff, most = 0;
    for (int64_t i = threadIdx.x; i < d_ff / 4; i += (int)blockDim.x) {
        float4 g = gate[i], u = up[i];
        float4 v = {gated(g.x, u.x, ACTIVATION), gated(g.y, u.y, ACTIVATION),
                    gated(g.z, u.z, ACTIVATION), gated(g.w, u.w, ACTIVATION)};
        ((float4 *)row)[i] = v;
        most = most_of(most, v);
    }
    round_row(round, row, d_ff, most, shared);
}

template <enum kern_activation ACTIVATION>
static void glu_as(struct cuda *cuda, float *y, const struct gated_rows &x, int rows, int d_ff) {
    int64_t count = (int64_t)rows * d_ff;
    /* All reads of four numbers are aligned. */
    const bool wide = (d_ff | x.gate_stride | x.up_stride) % 4 == 0 &&
                      ((uintptr_t)x.gate | (uintptr_t)x.up) % sizeof(float4) == 0;
    const struct rounded none = {};
    struct rounded round = rounded_take(cuda, rows, d_ff);
    if (round.scale && !wide) round = none;
    if (round.scale)
        LAUNCH_OVERLAPPED(cuda->device, k_glu_rows<ACTIVATION>, (unsigned)rows, GLU_THREADS,
                          GLU_THREADS / 32 * sizeof(float), y, round, x, (int64_t)d_ff);
    else if (wide)
        LAUNCH_OVERLAPPED(cuda->device, (k_glu<ACTIVATION, 4>), blocks_for(count, 4 * THREADS),
                          THREADS, 0, y, round, x, count, d_ff);
    else
        LAUNCH_OVERLAPPED(cuda->device, (k_glu<ACTIVATION, 1>), blocks_for(count, THREADS), THREADS,
                          0, y, round, x, count, d_ff);
    rounded_put(cuda, round, y, rows, d_ff);
}

static void glu(struct cuda *cuda, float *y, const struct gated_rows &x, int rows, int d_ff,
                enum kern_activation activation) {
    if (activation == KERN_SILU)
        glu_as<KERN_SILU>(cuda, y, x, rows, d_ff);
    else if (activation == KERN_GELU_TANH)
        glu_as<KERN_GELU_TANH>(cuda, y, x, rows, d_ff);
    else if (activation == KERN_RELU)
        glu_as<KERN_RELU>(cuda, y, x, rows, d_ff);
    else
        glu_as<KERN_SWIGLU_CLAMPED>(cuda, y, x, rows, d_ff);
}

void op_glu(struct kern *kern, float *y, const float *gate_up, int rows, int d_ff,
            enum kern_activation activation) {
    const int64_t stride = 2 * (int64_t)d_ff;
    const struct gated_rows x = {gate_up, gate_up + d_ff, stride, stride};
    glu(cuda_of(kern), y, x, rows, d_ff, activation);
}

void op_glu_apart(struct kern *kern, float *y, const float *gate, const float *up,
                  int64_t up_stride, int rows, int dim, enum kern_activation activation) {
    const struct gated_rows x = {gate, up, dim, up_stride};
    glu(cuda_of(kern), y, x, rows, dim, activation);
}

static __global__ void k_scale(float *x, const float *factor, int64_t count) {
    ptx_overlap_grids();
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) x[i] *= *factor;
}

void op_scale(struct kern *kern, float *x, const float *factor, int rows, int dim) {
    const int64_t count = (int64_t)rows * dim;
    LAUNCH_OVERLAPPED(cuda_of(kern)->device, k_scale, blocks_for(count, THREADS), THREADS, 0, x,
                      factor, count);
}

static __global__ void k_open_gates(float *x, const float *gates, int64_t count, int each) {
    ptx_overlap_grids();
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) x[i] = gated(gates[i / each], x[i], KERN_SIGMOID);
}

void op_open_gates(struct kern *kern, float *x, const float *gates, int rows, int dim, bool one) {
    int64_t count = (int64_t)rows * dim;
    LAUNCH_OVERLAPPED(cuda_of(kern)->device, k_open_gates, blocks_for(count, THREADS), THREADS, 0,
                      x, gates, count, one ? dim : 1);
}

static __global__ void k_add_bias(float *y, const float *bias, int64_t count, int64_t cols) {
    ptx_overlap_grids();
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) y[i] += bias[i % cols];
}

void add_bias(struct cuda *cuda, float *y, const float *bias, int rows, int64_t cols) {
    int64_t count = rows * cols;
    LAUNCH_OVERLAPPED(cuda->device, k_add_bias, blocks_for(count, THREADS), THREADS, 0, y, bias,
                      count, cols);
}
