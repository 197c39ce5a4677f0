/* Rotation of queries and keys (RoFormer, arXiv 2104.09864; rotate-half pairs), with the optional
 * RMSNorm per head before it, and writing keys and values into their pages. */
#include "kernels/cuda/internal.h"
#include "kernels/cuda/row8.cuh"

#define THREADS 256

/* ---- Rotation ---- */

/* cos and sin of place * inv_freq[j], once per step: all layers and heads need the same. `places`,
 * `axes`: of steps with rows whose three places differ; NULL: rows have one place each. */
static __global__ void k_angles(const struct span *spans, const int32_t *row_span,
                                const struct kern_place *places, const uint8_t *axes, int rows,
                                int half, const float *freq, float scale, float *angles) {
    ptx_overlap_grids();
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (int64_t)rows * half) return;
    int row = (int)(i / half), j = (int)(i % half);
    const struct span s = spans[row_span[row]];
    const int place = places ? places[row].axis[axes ? axes[j] : 0] : s.place + row - s.row;
    float angle = __fmul_rn((float)place, freq[j]);
    if (!(freq[j] > 0)) scale = 1;
    angles[(int64_t)row * 2 * half + j] = cosf(angle) * scale;
    angles[(int64_t)row * 2 * half + half + j] = sinf(angle) * scale;
}

struct rope_args {
    float *qkv;
    const float *angles, *q_norm, *k_norm; /* norms may be NULL */
    int rows, heads_q, heads_kv, head_dim; /* heads_kv: that rotate; 0: rows have queries alone */
    float eps;
    const float *v_norm; /* k_rope with VALUES */
    int64_t stride;      /* numbers from one row to the next */
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

/* Lanes that share a head of D numbers, and groups of four pairs that each has. */
template <int D> struct rope_shape {
    static const int LANES = D / 8 < 32 ? D / 8 : 32, FOURS = D / 8 / LANES;
};

/* A few lanes per (row, head), four pairs each, or eight: every read and write is one of 128 bits,
 * and all reads come first. Lanes behind the last row follow the last head, for the sums of their
 * warp. VALUES: values have a norm, as queries and keys do, and do not rotate. */
template <int D, bool VALUES> static __global__ void k_rope(const struct rope_args a) {
    ptx_overlap_grids();
    constexpr int LANES = rope_shape<D>::LANES, FOURS = rope_shape<D>::FOURS, HALF = D / 2;
    const int rotate = a.heads_q + a.heads_kv, heads = rotate + (VALUES ? a.heads_kv : 0);
    const int items = a.rows * heads;
    const int own = (int)((blockIdx.x * blockDim.x + threadIdx.x) / LANES);
    const int item = own < items ? own : items - 1, row = item / heads, head = item % heads;
    const bool value = VALUES && head >= rotate;
    const int j = (int)threadIdx.x % LANES * 4;
    float *x = a.qkv + row * a.stride + head * D + j;
    const float *norm = value ? a.v_norm : head < a.heads_q ? a.q_norm : a.k_norm;
    const float *angles = a.angles + (int64_t)row * D + j;
    float4 u[FOURS], v[FOURS], c[FOURS], s[FOURS];
#pragma unroll
    for (int f = 0; f < FOURS; f++) {
        u[f] = *(const float4 *)(x + 4 * LANES * f);
        v[f] = *(const float4 *)(x + 4 * LANES * f + HALF);
        c[f] = *(const float4 *)(angles + 4 * LANES * f);
        s[f] = *(const float4 *)(angles + 4 * LANES * f + HALF);
    }
    if (a.q_norm) {
        float4 by_u[FOURS], by_v[FOURS];
#pragma unroll
        for (int f = 0; f < FOURS; f++) {
            by_u[f] = *(const float4 *)(norm + j + 4 * LANES * f);
            by_v[f] = *(const float4 *)(norm + j + 4 * LANES * f + HALF);
        }
        float sum = squares_of(u[0]) + squares_of(v[0]);
#pragma unroll
        for (int f = 1; f < FOURS; f++) sum += squares_of(u[f]) + squares_of(v[f]);
#pragma unroll
        for (int by = LANES / 2; by > 0; by /= 2) sum += __shfl_xor_sync(WARP_ALL, sum, by);
        const float scale = 1 / sqrtf(sum / (float)D + a.eps);
#pragma unroll
        for (int f = 0; f < FOURS; f++) {
            u[f] = times(u[f], by_u[f], scale);
            v[f] = times(v[f], by_v[f], scale);
        }
    }
    if (own >= items) return;
#pragma unroll
    for (int f = 0; f < FOURS; f++) {
        float4 low = {u[f].x * c[f].x - v[f].x * s[f].x, u[f].y * c[f].y - v[f].y * s[f].y,
                      u[f].z * c[f].z - v[f].z * s[f].z, u[f].w * c[f].w - v[f].w * s[f].w};
        float4 high = {v[f].x * c[f].x + u[f].x * s[f].x, v[f].y * c[f].y + u[f].y * s[f].y,
                       v[f].z * c[f].z + u[f].z * s[f].z, v[f].w * c[f].w + u[f].w * s[f].w};
        if (value) {
            low = u[f];
            high = v[f];
        }
        *(float4 *)(x + 4 * LANES * f) = low;
        *(float4 *)(x + 4 * LANES * f + HALF) = high;
    }
}

template <int D> static void rope_as(struct cuda *cuda, const struct rope_args &args, bool values) {
    const int64_t heads = args.heads_q + (int64_t)(values ? 2 : 1) * args.heads_kv;
    const int64_t lanes = args.rows * heads * rope_shape<D>::LANES;
    const unsigned blocks = blocks_for(lanes, THREADS);
    CHECK(lanes <= INT32_MAX);
    if (values)
        LAUNCH_OVERLAPPED(cuda->device, (k_rope<D, true>), blocks, THREADS, 0, args);
    else
        LAUNCH_OVERLAPPED(cuda->device, (k_rope<D, false>), blocks, THREADS, 0, args);
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
    const int place = s.place + row - s.row;
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

/* Axes are uploaded with the first step that needs them. */
static bool has_axes(struct cuda *cuda, struct cuda_rope *own, const struct kern_rope *rope,
                     int half) {
    if (own->axes || !rope->axes) return true;
    own->axes =
        static_cast<uint8_t *>(device_alloc(cuda->device, (size_t)cuda->options.head_dim / 2));
    if (own->axes)
        device_upload(cuda->device, own->axes, rope->axes, (size_t)half);
    else
        device_failed(cuda->device, ERR_NOMEM);
    return own->axes != NULL;
}

/* Updates the frequencies on the device and this step's angles: `half` pairs of numbers. */
static const float *angles_of(struct cuda *cuda, const struct step *step,
                              const struct kern_rope *rope, int half) {
    int index = rope_index(cuda, rope->inv_freq);
    size_t bytes = (size_t)half * sizeof(float);
    const size_t most = (size_t)cuda->options.head_dim / 2 * sizeof(float);
    struct cuda_rope *own = &cuda->ropes[index];
    if (own->inv_freq != rope->inv_freq) {
        if (!own->freq) own->freq = static_cast<float *>(device_alloc(cuda->device, most));
        if (!own->freq) {
            device_failed(cuda->device, ERR_NOMEM);
            return NULL;
        }
        device_upload(cuda->device, own->freq, rope->inv_freq, bytes);
        device_free(cuda->device, own->axes);
        own->axes = NULL;
        cuda->step.has_angles[index] = false;
    }
    if (step->has_angles[index] && own->scale == rope->scale)
        return static_cast<const float *>(own->angles.mem);
    own->inv_freq = rope->inv_freq;
    own->scale = rope->scale;
    float *angles =
        static_cast<float *>(room_take(cuda, &own->angles, (size_t)step->rows * 2 * bytes));
    if (!angles || !step->spans) return NULL;
    if (step->places && !has_axes(cuda, own, rope, half)) return NULL;
    LAUNCH_OVERLAPPED(cuda->device, k_angles, blocks_for((int64_t)step->rows * half, THREADS),
                      THREADS, 0, step->spans, step->row_span, step->places, own->axes, step->rows,
                      half, own->freq, rope->scale, angles);
    cuda->step.has_angles[index] = true;
    return angles;
}

void op_qk_rope(struct kern *kern, float *qkv, const float *q_norm, const float *k_norm, float eps,
                const struct kern_rope *rope, const struct kern_batch *batch) {
    struct cuda *cuda = cuda_of(kern);
    CHECK(cuda->has_cache && rope->layer >= 0 && rope->layer < cuda->options.layers);
    const struct heads_kind *kind = kind_of_layer(cuda, rope->layer);
    const int latent = cuda->options.latent, half = (kind->head_dim - latent) / 2;
    const struct step *step = step_of(cuda, batch);
    const float *angles = angles_of(cuda, step, rope, half);
    if (!angles) return;
    const struct rope_args args = {qkv,
                                   angles,
                                   q_norm,
                                   k_norm,
                                   batch->rows,
                                   kind->shard.heads_q,
                                   rope->queries ? 0 : kind->shard.heads_kv,
                                   kind->head_dim,
                                   eps,
                                   rope->v_norm,
                                   kind_row_width(cuda, kind, rope->queries)};
    const bool values = rope->v_norm && !rope->queries;
    const int64_t pairs = (int64_t)batch->rows * (args.heads_q + args.heads_kv) * half;
    CHECK((rope->queries || !q_norm == !k_norm) && (!values || q_norm) && (!latent || !q_norm));
    if (latent)
        LAUNCH_OVERLAPPED(cuda->device, k_rope_latent, blocks_for(pairs, THREADS), THREADS, 0, args,
                          latent, pairs);
    if (!latent && args.head_dim == 64) rope_as<64>(cuda, args, values);
    if (!latent && args.head_dim == 128) rope_as<128>(cuda, args, values);
    if (!latent && args.head_dim == 256) rope_as<256>(cuda, args, values);
    if (!latent && args.head_dim == WIDE_DIM) rope_as<WIDE_DIM>(cuda, args, values);
    if (rope->query_scale.beta == 0) return;
    const int width = (int)kind_query_width(kind), stride = (int)args.stride;
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
                  int heads, int head_dim) {
    struct rotate_args args = {from.at, to.at, from.stride, to.stride, rows, heads, head_dim};
    LAUNCH_OVERLAPPED(cuda->device, k_rotate_heads,
                      blocks_for((int64_t)rows * heads * (head_dim / CHUNK_DIMS), THREADS), THREADS,
                      0, args);
}

/* ---- Writing ---- */

struct write_args {
    struct pages pages; /* as they are for the layer */
    const struct span *spans;
    const int32_t *row_span;
    const float *qkv;
    const float *log_beta;    /* [rows][heads_kv] or NULL: 0 */
    int rows, first, heads_q; /* first: the layer's first stream */
    int sides;                /* 2, or 1: keys alone */
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
    int stream = a.first + head;
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
        p.log_beta[pages_side_at(p, page, at)] =
            a.log_beta ? a.log_beta[(int64_t)row * p.heads_kv + head] : 0.0f;
}

void op_write_kv(struct kern *kern, int layer, const float *qkv, const float *log_beta,
                 const struct kern_batch *batch) {
    struct cuda *cuda = cuda_of(kern);
    CHECK(cuda->has_cache && layer >= 0 && layer < cuda->options.layers);
    const struct step *step = step_of(cuda, batch);
    if (!step->spans) return;
    const struct heads_kind *kind = kind_of_layer(cuda, layer);
    const struct pages p = layer_pages(cuda, layer);
    struct write_args args = {p,
                              step->spans,
                              step->row_span,
                              qkv,
                              log_beta,
                              batch->rows,
                              cuda->layers[layer].first,
                              kind->shard.heads_q,
                              p.latent ? 1 : 2};
    int64_t items = (int64_t)batch->rows * args.sides * p.heads_kv * (p.head_dim / CHUNK_DIMS);
    LAUNCH_OVERLAPPED(cuda->device, k_write_kv, blocks_for(items, THREADS), THREADS, 0, args);
}
