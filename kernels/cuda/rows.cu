/* Operations on rows: each by itself, sums in an order that depends on the row's width alone. */
#include "kernels/cuda/internal.h"
#include "kernels/quantize.h"

#define THREADS 256

/* ---- Embedding and gathering ---------------------------------------------------------------- */

static __device__ __forceinline__ float element(const void *at, int64_t i, bool wide) {
    if (wide) return static_cast<const float *>(at)[i];
    return __uint_as_float((uint32_t) static_cast<const uint16_t *>(at)[i] << 16);
}

/* Tokens [first, first + count) of the vocabulary are here. */
static __global__ void k_embed(float *x, const void *table, bool wide, const int32_t *tokens,
                               int cols, int first, int count) {
    ptx_overlap_grids();
    int64_t row = blockIdx.x, at = tokens[row] - first;
    bool here = at >= 0 && at < count;
    for (int i = threadIdx.x; i < cols; i += (int)blockDim.x)
        x[row * cols + i] = here ? element(table, at * cols + i, wide) : 0;
}

void op_embed(struct kern *kern, float *x, const struct kern_weight *table, const int32_t *tokens,
              int rows) {
    struct cuda *cuda = cuda_of(kern);
    CHECK(table->dtype != KERN_E4M3); /* vocabularies keep the file's numbers */
    const void *ids = device_stage(cuda->device, tokens, (size_t)rows * sizeof *tokens);
    if (ids)
        LAUNCH_OVERLAPPED(cuda->device, k_embed, (unsigned)rows, THREADS, 0, x, table->data,
                          table->dtype == KERN_F32, static_cast<const int32_t *>(ids),
                          (int)table->cols, (int)table->part[0].first, (int)table->rows);
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

/* ---- Norm and activation --------------------------------------------------------------------- */

/* The largest over the block, to every thread; `room` has a float per warp. */
static __device__ float block_max(float x, float *room) {
    for (int by = 16; by > 0; by /= 2) x = fmaxf(x, __shfl_xor_sync(WARP_ALL, x, by));
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
    __syncthreads();
    float most = room[0];
    for (int warp = 1; warp < (int)blockDim.x / 32; warp++) most = fmaxf(most, room[warp]);
    return most;
}

/* The sum over the block, to every thread; `room` has a float per warp. */
static __device__ float block_sum(float x, float *room) {
    for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(WARP_ALL, x, by);
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0;
    for (int warp = 0; warp < (int)blockDim.x / 32; warp++) sum += room[warp];
    return sum;
}

/* `half`: y as bf16, or NULL. */
static __global__ void k_rms_norm(float *y, uint16_t *half, const float *x, const float *weight,
                                  int dim, float eps) {
    ptx_overlap_grids();
    SHARED_MEMORY(shared);
    const float *from = x + (int64_t)blockIdx.x * dim;
    float *to = y + (int64_t)blockIdx.x * dim, sum = 0;
    for (int i = threadIdx.x; i < dim; i += (int)blockDim.x) sum += from[i] * from[i];
    sum = block_sum(sum, (float *)shared);
    float scale = 1.0f / sqrtf(sum / (float)dim + eps);
    for (int i = threadIdx.x; i < dim; i += (int)blockDim.x) {
        float value = from[i] * scale * weight[i];
        to[i] = value;
        if (half) half[(int64_t)blockIdx.x * dim + i] = (uint16_t)ptx_pack_bf16(value, 0);
    }
}

void op_rms_norm(struct kern *kern, float *y, const float *x, const float *weight, int rows,
                 int dim, float eps) {
    struct cuda *cuda = cuda_of(kern);
    CHECK(rows >= 0 && dim > 0);
    int64_t count = (int64_t)rows * dim;
    uint16_t *half = rounded_take(cuda, count);
    LAUNCH_OVERLAPPED(cuda->device, k_rms_norm, (unsigned)rows, THREADS,
                      THREADS / 32 * sizeof(float), y, half, x, weight, dim, eps);
    if (half) rounded_put(cuda, y, count);
}

static __global__ void k_glu(float *y, uint16_t *half, const float *gate_up, int64_t count,
                             int d_ff) {
    ptx_overlap_grids();
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    int64_t at = i / d_ff * 2 * d_ff + i % d_ff;
    float gate = gate_up[at];
    float value = gate / (1.0f + expf(-gate)) * gate_up[at + d_ff];
    y[i] = value;
    if (half) half[i] = (uint16_t)ptx_pack_bf16(value, 0);
}

void op_glu(struct kern *kern, float *y, const float *gate_up, int rows, int d_ff) {
    struct cuda *cuda = cuda_of(kern);
    int64_t count = (int64_t)rows * d_ff;
    uint16_t *half = rounded_take(cuda, count);
    LAUNCH_OVERLAPPED(cuda->device, k_glu, blocks_for(count, THREADS), THREADS, 0, y, half, gate_up,
                      count, d_ff);
    if (half) rounded_put(cuda, y, count);
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

/* ---- float32 to bf16 and E4M3 ------------------------------------------------------------------
 */

/* Two at a time; `count` may be odd. */
static __global__ void k_narrow(uint16_t *to, const float *from, int64_t count) {
    ptx_overlap_grids();
    int64_t i = 2 * ((int64_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= count) return;
    uint32_t pair = ptx_pack_bf16(from[i], i + 1 < count ? from[i + 1] : 0);
    if (i + 1 < count)
        *(uint32_t *)(to + i) = pair;
    else
        to[i] = (uint16_t)pair;
}

void narrow(struct cuda *cuda, uint16_t *to, const float *from, int64_t count) {
    LAUNCH_OVERLAPPED(cuda->device, k_narrow, blocks_for(count, 2 * THREADS), THREADS, 0, to, from,
                      count);
}

/* A block per row; the same numbers as quantize_rows makes on the host. */
static __global__ void k_narrow_rows(uint8_t *to, float *scale, const float *from, int64_t cols) {
    ptx_overlap_grids();
    SHARED_MEMORY(shared);
    const float4 *x = (const float4 *)(from + blockIdx.x * cols);
    uint32_t *codes = (uint32_t *)(to + blockIdx.x * cols);
    float most = 0;
    for (int64_t i = threadIdx.x; i < cols / 4; i += (int)blockDim.x) {
        float4 v = x[i];
        most = fmaxf(fmaxf(most, fmaxf(fabsf(v.x), fabsf(v.y))), fmaxf(fabsf(v.z), fabsf(v.w)));
    }
    most = block_max(most, (float *)shared);
    float own = fmaxf(most / QUANTIZE_MOST, QUANTIZE_LEAST), by = 1 / own;
    for (int64_t i = threadIdx.x; i < cols / 4; i += (int)blockDim.x) {
        float4 v = x[i];
        codes[i] = ptx_pack_e4m3(v.x * by, v.y * by) | ptx_pack_e4m3(v.z * by, v.w * by) << 16;
    }
    if (threadIdx.x == 0) scale[blockIdx.x] = own;
}

void narrow_rows(struct cuda *cuda, uint8_t *to, float *scale, const float *from, int rows,
                 int64_t cols) {
    CHECK(cols % 4 == 0);
    LAUNCH_OVERLAPPED(cuda->device, k_narrow_rows, (unsigned)rows, THREADS,
                      THREADS / 32 * sizeof(float), to, scale, from, cols);
}
