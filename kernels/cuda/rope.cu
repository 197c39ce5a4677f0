/* Rotation of queries and keys (RoFormer, arXiv 2104.09864; rotate-half pairs), with the optional
 * RMSNorm per head before it, and writing keys and values into their pages. */
#include "kernels/cuda/internal.h"
#include "kernels/cuda/row8.cuh"

#define THREADS 256

/* ---- Rotation ---- */

/* cos and sin of pos * inv_freq[j], once per step: all layers and heads need the same. */
static __global__ void k_angles(const struct span *spans, const int32_t *row_span, int rows,
                                int half, const float *freq, float scale, float *angles) {
    ptx_overlap_grids();
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (int64_t)rows * half) return;
    int row = (int)(i / half), j = (int)(i % half);
    const struct span s = spans[row_span[row]];
    float angle = __fmul_rn((float)(s.pos + row - s.row), freq[j]);
    if (!(freq[j] > 0)) scale = 1;
    angles[(int64_t)row * 2 * half + j] = cosf(angle) * scale;
    angles[(int64_t)row * 2 * half + half + j] = sinf(angle) * scale;
}

struct rope_args {
    float *qkv;
    const float *angles, *q_norm, *k_norm; /* norms may be NULL */
    int rows, heads_q, heads_kv, head_dim;
    float eps;
};

static __device__ float warp_sum(float x) {
    for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(WARP_ALL, x, by);
    return x;
}

/* Kernels with a warp per (row, head): the warp's own, and the thread's lane in it. Warps behind
 * the last row have nothing to do. */
struct warp_head {
    int64_t row;
    int head, lane;
};

static __device__ struct warp_head warp_head_of(int heads) {
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    return {i / heads, (int)(i % heads), (int)(threadIdx.x % 32)};
}

static unsigned warp_head_blocks(int64_t rows, int heads) {
    return blocks_for(rows * heads, THREADS / 32);
}

/* The numbers of head `head` of a row of qkv: query heads, key heads, value heads. */
static __device__ float *head_at(float *qkv, int64_t row, int head, int heads_q, int heads_kv,
                                 int head_dim) {
    return qkv + (row * (heads_q + 2 * heads_kv) + head) * head_dim;
}

static __device__ __forceinline__ float4 times(float4 a, float4 b, float scale) {
    return {a.x * scale * b.x, a.y * scale * b.y, a.z * scale * b.z, a.w * scale * b.w};
}

static __device__ __forceinline__ float squares_of(float4 a) {
    return a.x * a.x + a.y * a.y + a.z * a.z + a.w * a.w;
}

/* D / 8 lanes per (row, head), four pairs each: every read and write is one of 128 bits, and all
 * reads come first. Lanes behind the last row follow the last head, for the sums of their warp. */
template <int D> static __global__ void k_rope(const struct rope_args a) {
    ptx_overlap_grids();
    constexpr int LANES = D / 8, HALF = D / 2;
    const int heads = a.heads_q + a.heads_kv, items = a.rows * heads;
    const int own = (int)((blockIdx.x * blockDim.x + threadIdx.x) / LANES);
    const int item = own < items ? own : items - 1, row = item / heads, head = item % heads;
    const int j = (int)threadIdx.x % LANES * 4;
    float *x = head_at(a.qkv, row, head, a.heads_q, a.heads_kv, D) + j;
    const float *norm = head < a.heads_q ? a.q_norm : a.k_norm;
    const float *angles = a.angles + (int64_t)row * D + j;
    float4 u = *(const float4 *)x, v = *(const float4 *)(x + HALF);
    const float4 c = *(const float4 *)angles, s = *(const float4 *)(angles + HALF);
    if (a.q_norm) {
        const float4 by_u = *(const float4 *)(norm + j), by_v = *(const float4 *)(norm + j + HALF);
        float sum = squares_of(u) + squares_of(v);
#pragma unroll
        for (int by = LANES / 2; by > 0; by /= 2) sum += __shfl_xor_sync(WARP_ALL, sum, by);
        const float scale = 1 / sqrtf(sum / (float)D + a.eps);
        u = times(u, by_u, scale);
        v = times(v, by_v, scale);
    }
    if (own >= items) return;
    const float4 low = {u.x * c.x - v.x * s.x, u.y * c.y - v.y * s.y, u.z * c.z - v.z * s.z,
                        u.w * c.w - v.w * s.w};
    const float4 high = {v.x * c.x + u.x * s.x, v.y * c.y + u.y * s.y, v.z * c.z + u.z * s.z,
                         v.w * c.w + u.w * s.w};
    *(float4 *)x = low;
    *(float4 *)(x + HALF) = high;
}

/* The numbers that rotate behind latent vectors: a thread per (row, head) and pair. */
static __global__ void k_rope_latent(const struct rope_args a, int latent, int64_t count) {
    ptx_overlap_grids();
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const int half = (a.head_dim - latent) / 2, heads = a.heads_q + a.heads_kv;
    if (i >= count) return;
    const int64_t head = i / half, row = head / heads, j = i % half;
    float *x = a.qkv + head * a.head_dim + latent + j;
    const float *angles = a.angles + row * 2 * half + j;
    const float u = x[0], v = x[half], c = angles[0], s = angles[half];
    x[0] = u * c - v * s;
    x[half] = v * c + u * s;
}

/* A thread per number of a query. */
static __global__ void k_query_scale(const struct span *spans, const int32_t *row_span, float *qkv,
                                     int64_t count, int width, int stride,
                                     const struct kern_query_scale by) {
    ptx_overlap_grids();
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const int row = (int)(i / width);
    const struct span s = spans[row_span[row]];
    const int place = s.pos + row - s.row;
    qkv[(int64_t)row * stride + i % width] *= 1 + by.beta * logf((float)(1 + place / by.period));
}

/* The entry of this rotation; a new one takes a free entry, or the first. */
static int rope_index(const struct cuda *cuda, const float *inv_freq) {
    int free_entry = 0;
    for (int i = CUDA_ROPES - 1; i >= 0; i--) {
        if (cuda->ropes[i].inv_freq == inv_freq) return i;
        if (!cuda->ropes[i].inv_freq) free_entry = i;
    }
    return free_entry;
}

/* Updates the frequencies on the device and this step's angles. */
static const float *angles_of(struct cuda *cuda, const struct step *step,
                              const struct kern_rope *rope) {
    int half = (cuda->options.head_dim - cuda->options.latent) / 2;
    int index = rope_index(cuda, rope->inv_freq);
    size_t bytes = (size_t)half * sizeof(float);
    struct cuda_rope *own = &cuda->ropes[index];
    if (own->inv_freq != rope->inv_freq) {
        if (!own->freq) own->freq = static_cast<float *>(device_alloc(cuda->device, bytes));
        if (!own->freq) {
            device_failed(cuda->device, ERR_NOMEM);
            return NULL;
        }
        device_upload(cuda->device, own->freq, rope->inv_freq, bytes);
        cuda->step.has_angles[index] = false;
    }
    if (step->has_angles[index] && own->scale == rope->scale)
        return static_cast<const float *>(own->angles.mem);
    own->inv_freq = rope->inv_freq;
    own->scale = rope->scale;
    float *angles =
        static_cast<float *>(room_take(cuda, &own->angles, (size_t)step->rows * 2 * bytes));
    if (!angles || !step->spans) return NULL;
    LAUNCH_OVERLAPPED(cuda->device, k_angles, blocks_for((int64_t)step->rows * half, THREADS),
                      THREADS, 0, step->spans, step->row_span, step->rows, half, own->freq,
                      rope->scale, angles);
    cuda->step.has_angles[index] = true;
    return angles;
}

void op_qk_rope(struct kern *kern, float *qkv, const float *q_norm, const float *k_norm, float eps,
                const struct kern_rope *rope, const struct kern_batch *batch) {
    struct cuda *cuda = cuda_of(kern);
    const struct kern_cache_options *o = &cuda->options;
    CHECK(cuda->has_cache);
    const struct step *step = step_of(cuda, batch);
    const float *angles = angles_of(cuda, step, rope);
    if (!angles) return;
    struct rope_args args = {qkv,        angles,      q_norm,      k_norm, batch->rows,
                             o->heads_q, o->heads_kv, o->head_dim, eps};
    const int64_t heads = (int64_t)batch->rows * (o->heads_q + o->heads_kv);
    const int64_t lanes = heads * (o->head_dim / 8), pairs = heads * (o->head_dim - o->latent) / 2;
    CHECK(!q_norm == !k_norm && lanes <= INT32_MAX && (!o->latent || !q_norm));
    const unsigned blocks = blocks_for(lanes, THREADS);
    if (o->latent)
        LAUNCH_OVERLAPPED(cuda->device, k_rope_latent, blocks_for(pairs, THREADS), THREADS, 0, args,
                          o->latent, pairs);
    else if (o->head_dim == 64)
        LAUNCH_OVERLAPPED(cuda->device, k_rope<64>, blocks, THREADS, 0, args);
    else if (o->head_dim == 128)
        LAUNCH_OVERLAPPED(cuda->device, k_rope<128>, blocks, THREADS, 0, args);
    else
        LAUNCH_OVERLAPPED(cuda->device, k_rope<256>, blocks, THREADS, 0, args);
    if (rope->query_scale.beta == 0) return;
    const int width = o->heads_q * o->head_dim, stride = (int)cuda_row_width(cuda);
    const int64_t count = (int64_t)batch->rows * width;
    LAUNCH_OVERLAPPED(cuda->device, k_query_scale, blocks_for(count, THREADS), THREADS, 0,
                      step->spans, step->row_span, qkv, count, width, stride, rope->query_scale);
}

/* ---- Norms of all heads together ---- */

struct norm_args {
    float *qkv;
    float *squares; /* [rows][query heads, then key heads, of the model] */
    const float *q_norm, *k_norm;
    int rows, heads_q, heads_kv, head_dim;
    int all_q, all_kv; /* heads of the model */
    int first_q, first_kv;
    bool speaks;
    float eps;
};

/* A warp per (row, head). Heads that other ranks speak for are zeros. */
static __global__ void k_head_squares(const struct norm_args a) {
    ptx_overlap_grids();
    const struct warp_head item = warp_head_of(a.all_q + a.all_kv);
    if (item.row >= a.rows) return;
    int own = item.head - a.first_q, count = a.heads_q, before = 0;
    if (item.head >= a.all_q) {
        own = item.head - a.all_q - a.first_kv;
        count = a.heads_kv;
        before = a.heads_q;
    }
    float sum = 0;
    if (a.speaks && own >= 0 && own < count) {
        const float *x = head_at(a.qkv, item.row, before + own, a.heads_q, a.heads_kv, a.head_dim);
        for (int j = 4 * item.lane; j < a.head_dim; j += 4 * 32)
            sum += squares_of(*(const float4 *)(x + j));
        sum = warp_sum(sum);
    }
    if (item.lane == 0) a.squares[item.row * (a.all_q + a.all_kv) + item.head] = sum;
}

/* A warp per (row, head of this rank). */
static __global__ void k_qk_norm(const struct norm_args a) {
    ptx_overlap_grids();
    const struct warp_head own = warp_head_of(a.heads_q + a.heads_kv);
    int64_t row = own.row;
    int head = own.head;
    if (row >= a.rows) return;
    bool key = head >= a.heads_q;
    const float *sums = a.squares + row * (a.all_q + a.all_kv) + (key ? a.all_q : 0);
    const float *norm = key ? a.k_norm + (head - a.heads_q + a.first_kv) * a.head_dim
                            : a.q_norm + (head + a.first_q) * a.head_dim;
    float *x = head_at(a.qkv, row, head, a.heads_q, a.heads_kv, a.head_dim), sum = 0;
    int all = key ? a.all_kv : a.all_q;
    for (int h = 0; h < all; h++) sum += sums[h];
    float by = 1 / sqrtf(sum / (float)(all * a.head_dim) + a.eps);
    for (int j = 4 * own.lane; j < a.head_dim; j += 4 * 32)
        *(float4 *)(x + j) = times(*(const float4 *)(x + j), *(const float4 *)(norm + j), by);
}

void op_qk_norm(struct kern *kern, float *qkv, const float *q_norm, const float *k_norm, float eps,
                const struct kern_batch *batch) {
    struct cuda *cuda = cuda_of(kern);
    const struct kern_cache_options *o = &cuda->options;
    CHECK(cuda->has_cache && !o->latent);
    int group = o->heads_q / o->heads_kv, all = cuda->pages.heads_model;
    size_t count = (size_t)batch->rows * (size_t)(all * (group + 1));
    float *squares = static_cast<float *>(room_take(cuda, &cuda->squares, count * sizeof(float)));
    struct norm_args args = {qkv,
                             squares,
                             q_norm,
                             k_norm,
                             batch->rows,
                             o->heads_q,
                             o->heads_kv,
                             o->head_dim,
                             all * group,
                             all,
                             cuda->shard.first * group,
                             cuda->shard.first,
                             cuda->shard.speaks,
                             eps};
    if (squares)
        LAUNCH_OVERLAPPED(cuda->device, k_head_squares,
                          warp_head_blocks(batch->rows, all * (group + 1)), THREADS, 0, args);
    join_reduce(cuda, squares, count, COMM_F32, COMM_SUM);
    if (!squares) return;
    LAUNCH_OVERLAPPED(cuda->device, k_qk_norm,
                      warp_head_blocks(batch->rows, o->heads_q + o->heads_kv), THREADS, 0, args);
}

/* ---- Rotation as the cache's rows ---- */

struct rotate_args {
    const float *from;
    float *to;
    int64_t from_stride, to_stride;
    int rows, heads, head_dim;
};

/* A thread per eight numbers. */
static __global__ void k_rotate_heads(const struct rotate_args a) {
    ptx_overlap_grids();
    int pieces = a.head_dim / CHUNK_DIMS, each = a.heads * pieces;
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const bool writes = i < (int64_t)a.rows * each;
    int64_t row = i / each, at = i % each * CHUNK_DIMS;
    const float4 *from = (const float4 *)(a.from + row * a.from_stride + at);
    float4 low = {0, 0, 0, 0}, high = low;
    if (writes) low = from[0], high = from[1];
    float x[CHUNK_DIMS] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    row8_rotate(x, pieces);
    float4 *to = (float4 *)(a.to + row * a.to_stride + at);
    if (!writes) return;
    to[0] = {x[0], x[1], x[2], x[3]};
    to[1] = {x[4], x[5], x[6], x[7]};
}

void rotate_heads(struct cuda *cuda, struct heads_array to, struct heads_array from, int rows,
                  int heads) {
    const int dim = cuda->options.head_dim;
    struct rotate_args args = {from.at, to.at, from.stride, to.stride, rows, heads, dim};
    LAUNCH_OVERLAPPED(cuda->device, k_rotate_heads,
                      blocks_for((int64_t)rows * heads * (dim / CHUNK_DIMS), THREADS), THREADS, 0,
                      args);
}

/* ---- Writing ---- */

struct write_args {
    struct pages pages;
    const struct span *spans;
    const int32_t *row_span;
    const float *qkv;
    const float *log_beta; /* [rows][heads_kv] or NULL: 0 */
    int rows, layer, heads_q;
    int sides; /* 2, or 1: keys alone */
};

/* A thread per eight numbers of a key or value; where rows are rotated, neighbouring threads have a
 * row, and all threads of a warp take part. */
static __global__ void k_write_kv(const struct write_args a) {
    ptx_overlap_grids();
    const struct pages &p = a.pages;
    int pieces = p.head_dim / CHUNK_DIMS, each = a.sides * p.heads_kv * pieces;
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const bool writes = i < (int64_t)a.rows * each;
    if (pages_failed(p) || (!writes && !p.scaled)) return;
    if (!writes) i = 0;
    int row = (int)(i / each), rest = (int)(i % each);
    int side = rest / (p.heads_kv * pieces), head = rest / pieces % p.heads_kv;
    int piece = rest % pieces;
    const struct span s = a.spans[a.row_span[row]];
    int stream = a.layer * p.heads_kv + head;
    int entry = *pages_length(p, s.slot, stream) - s.count + row - s.row;
    int32_t page = pages_table(p, s.slot, stream)[entry / p.page_slots];
    int at = entry % p.page_slots;
    int64_t width = (int64_t)(a.heads_q + a.sides * p.heads_kv) * p.head_dim;
    const float4 *from =
        (const float4 *)(a.qkv + row * width +
                         (int64_t)(a.heads_q + side * p.heads_kv + head) * p.head_dim +
                         piece * CHUNK_DIMS);
    float4 low = from[0], high = from[1];
    float x[CHUNK_DIMS] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    if (p.scaled) {
        row8_rotate(x, pieces);
        row8_write(p, page, side, at, piece, x, writes);
    } else {
        pages_write_piece(p, page, side, at, piece, x);
    }
    if (writes && side == 0 && piece == 0)
        p.log_beta[(int64_t)page * p.page_slots + at] =
            a.log_beta ? a.log_beta[(int64_t)row * p.heads_kv + head] : 0.0f;
}

void op_write_kv(struct kern *kern, int layer, const float *qkv, const float *log_beta,
                 const struct kern_batch *batch) {
    struct cuda *cuda = cuda_of(kern);
    CHECK(cuda->has_cache && layer >= 0 && layer < cuda->options.layers);
    const struct step *step = step_of(cuda, batch);
    if (!step->spans) return;
    const struct pages *p = &cuda->pages;
    struct write_args args = {
        *p,    step->spans,           step->row_span,   qkv, log_beta, batch->rows,
        layer, cuda->options.heads_q, p->latent ? 1 : 2};
    int64_t items = (int64_t)batch->rows * args.sides * p->heads_kv * (p->head_dim / CHUNK_DIMS);
    LAUNCH_OVERLAPPED(cuda->device, k_write_kv, blocks_for(items, THREADS), THREADS, 0, args);
}
