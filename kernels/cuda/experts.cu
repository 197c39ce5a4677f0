/* Mixtures of experts (kern_weights.h): rows choose their experts on the device, uses are sorted by
 * expert, and a block multiplies up to GROUP rows of one expert with some of its outputs, so that a
 * weight is read once for all of them. Sorting counts: a warp counts PIECE uses, one block adds up
 * the counts of all warps, and each warp then knows where its uses go.
 *
 * An output of a row is one sum, in an order that depends on the matrix alone, and a row adds its
 * experts in ascending order: neither depends on what other rows chose. Activations stay float32.
 * No count leaves the device: launches are as large as any choice could need, and blocks without
 * work end at once. */
#include <string.h>

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/block.cuh"
#include "kernels/cuda/experts.h"
#include "kernels/cuda/matrix.cuh"

#define THREADS 256
#define WARPS   (THREADS / 32)
#define GROUP   MATRIX_ROWS /* rows of one expert that are multiplied together */
#define PIECE   256         /* uses that one warp sorts */
#define SORTERS 4           /* warps of a block that sorts */

#define SUM_LEAST 1e-20f /* added to a sum that scores are divided by: all may be 0 */

/* Where a bias of the model has the numbers of this rank's outputs. */
struct bias {
    const float *all; /* [count, stride], or NULL */
    int32_t stride, first[2];
};

struct kern_experts {
    struct kern_experts_spec spec; /* without its arrays of weights */
    int d_ff;                      /* this rank's */
    struct matrix *gate_up, *down; /* device, [count] */
    struct bias gate_up_bias;
};

struct group {
    int32_t expert, first, count; /* uses [first, first + count) of the sorted ones */
};

/* Arrays of a step in cuda->hidden. A use is one expert of one row. */
struct routes {
    int32_t *chosen; /* [rows, used] ascending */
    float *weight;   /* [rows, used] */
    int32_t *place;  /* [rows, used] the use's place among the sorted ones */
    int32_t *source; /* [rows * used] row of a sorted use */
    float *ff;       /* [rows * used, d_ff] */
    float *out;      /* [rows * used, d_model] */
    struct group *groups;
    int32_t *group_count;
    int32_t *counts; /* [pieces][experts] uses of a piece; then the place of the first */
};

/* ---- Loading ---- */

static size_t groups_max(int count, size_t uses) {
    size_t most = (size_t)count + uses / GROUP;
    return most < uses ? most : uses;
}

static size_t pieces_of(size_t uses) {
    return (uses + PIECE - 1) / PIECE;
}

/* Scratch of one row; with more rows there are fewer groups and pieces for each. */
static size_t row_bytes(const struct kern_experts *experts) {
    const struct kern_experts_spec *spec = &experts->spec;
    size_t numbers = (size_t)(experts->d_ff + spec->d_model + 1) * sizeof(float);
    size_t group = sizeof(struct group) + 3 * sizeof(int32_t);
    size_t counts = pieces_of((size_t)spec->used) * (size_t)spec->count;
    return (size_t)spec->used * (numbers + group) + (1 + counts) * sizeof(int32_t);
}

struct matrix *matrices_upload(struct cuda *cuda, struct kern_weight *const *weights, int count) {
    size_t bytes = (size_t)count * sizeof(struct matrix);
    struct matrix *host = static_cast<struct matrix *>(mem_try_alloc((size_t)count, sizeof *host));
    void *to = host ? device_alloc(cuda->device, bytes) : NULL;
    for (int e = 0; host && e < count; e++) {
        host[e].data = weights[e]->data;
        host[e].scale = weights[e]->scale;
        host[e].dtype = weights[e]->dtype;
    }
    if (to) device_upload(cuda->device, to, host, bytes);
    mem_free(host);
    return static_cast<struct matrix *>(to);
}

int op_experts_load(struct kern *kern, const struct kern_experts_spec *spec,
                    struct kern_experts **out, struct fault *fault) {
    struct cuda *cuda = cuda_of(kern);
    const struct kern_weight *first = spec->gate_up[0];
    CHECK(spec->used >= 1 && spec->used <= spec->count && spec->count <= KERN_EXPERTS_MAX);
    const int parts = spec->ungated ? 1 : 2;
    CHECK(first->parts == parts && first->part[0].count == first->part[parts - 1].count);
    CHECK(!spec->ungated || !spec->gate_up_bias);
    struct kern_experts *experts =
        static_cast<struct kern_experts *>(mem_try_alloc(1, sizeof *experts));
    if (!experts) return fault_set(fault, ERR_NOMEM, "", "no memory for a layer's experts");
    experts->spec = *spec;
    experts->spec.gate_up = experts->spec.down = NULL;
    experts->d_ff = (int)(first->rows / parts);
    experts->gate_up_bias = {spec->gate_up_bias,
                             2 * spec->d_ff,
                             {(int)first->part[0].first, (int)first->part[parts - 1].first}};
    experts->gate_up = matrices_upload(cuda, spec->gate_up, spec->count);
    experts->down = matrices_upload(cuda, spec->down, spec->count);
    int rc = experts->gate_up && experts->down ? device_sync(cuda->device) : ERR_NOMEM;
    if (rc) {
        op_experts_free(kern, experts);
        return fault_set(fault, rc, "", "no device memory for a layer's experts, or %s",
                         err_text(rc));
    }
    if (row_bytes(experts) > cuda->hidden_row) cuda->hidden_row = row_bytes(experts);
    *out = experts;
    return 0;
}

void op_experts_free(struct kern *kern, struct kern_experts *experts) {
    if (!experts) return;
    device_free(cuda_of(kern)->device, experts->gate_up);
    device_free(cuda_of(kern)->device, experts->down);
    mem_free(experts);
}

/* ---- Choosing ---- */

struct choose_args {
    const float *logits, *bias; /* bias: select_bias */
    const float *factors;       /* one for each expert, or NULL */
    struct routes r;
    int rows, count, used, groups, groups_used;
    bool normalise, sigmoid, group_best;
    float scale;
};

/* The scores of a row's experts, as its warp computes them. */
struct scores {
    const float *logits, *bias; /* bias NULL: none */
    bool plain;                 /* logits decide, and weights are powers of e */
    bool sigmoid;
    float most, sum; /* powers of e are relative to `most`, and add up to `sum` */
    int group;       /* experts of a group */
    uint32_t open;   /* groups whose experts may be chosen */
};

struct choice {
    float by;
    int expert; /* -1: none */
};

static __device__ __forceinline__ float score_of(const struct scores &s, int expert) {
    const float logit = s.logits[expert];
    return s.sigmoid ? 1.0f / (1.0f + expf(-logit)) : expf(logit - s.most) / s.sum;
}

static __device__ __forceinline__ float rank_of(const struct scores &s, int expert) {
    if (s.plain) return s.logits[expert];
    if (!(s.open >> (expert / s.group) & 1)) return -INFINITY;
    return score_of(s, expert) + (s.bias ? s.bias[expert] : 0);
}

/* The best of the lanes' choices: the largest, then the lowest number. NaN gives an arbitrary one,
 * but the same to every lane; such a step fails when it is sampled. */
static __device__ struct choice best_of(struct choice best) {
    for (int by = 16; by > 0; by /= 2) {
        float other = __shfl_xor_sync(WARP_ALL, best.by, by);
        int expert = __shfl_xor_sync(WARP_ALL, best.expert, by);
        bool wins =
            best.expert < 0 || other > best.by || (other == best.by && expert < best.expert);
        if (expert >= 0 && wins) best = {other, expert};
    }
    best.by = __shfl_sync(WARP_ALL, best.by, 0);
    best.expert = __shfl_sync(WARP_ALL, best.expert, 0);
    return best;
}

/* The best expert of [first, end) that is not taken. A lane keeps which of its 32 experts are taken
 * in one word. */
static __device__ struct choice choose_best(const struct scores &s, int first, int end,
                                            uint32_t taken, int lane) {
    struct choice best = {0, -1};
    for (int i = first / 32, e = first / 32 * 32 + lane; e < end; i++, e += 32) {
        if (e < first || (taken >> i & 1)) continue;
        float by = rank_of(s, e);
        if (best.expert < 0 || by > best.by) best = {by, e};
    }
    return best_of(best);
}

/* The groups that are used, as bits: a lane per group. */
static __device__ uint32_t open_groups(const struct scores &s, const struct choose_args &a,
                                       int lane) {
    float mine = 0;
    uint32_t open = 0;
    for (int g = 0; g < a.groups; g++) {
        const int from = g * s.group, to = from + s.group;
        const struct choice first = choose_best(s, from, to, 0, lane);
        const uint32_t taken = first.expert % 32 == lane ? 1u << (first.expert / 32) : 0;
        const struct choice second = choose_best(s, from, to, taken, lane);
        if (lane == g) mine = a.group_best ? first.by : first.by + second.by;
    }
    for (int k = 0; k < a.groups_used; k++) {
        const bool may = lane < a.groups && !(open >> lane & 1);
        open |= 1u << best_of({mine, may ? lane : -1}).expert;
    }
    return open;
}

static __device__ struct scores score_row(const struct choose_args &a, const float *logits,
                                          int lane) {
    struct scores s = {logits,  a.bias, !a.sigmoid && !a.bias && a.groups < 2, a.sigmoid, 0, 0,
                       a.count, 1};
    if (s.plain) return s;
    float most = -INFINITY, sum = 0;
    for (int e = lane; e < a.count && !a.sigmoid; e += 32) most = fmaxf(most, logits[e]);
    for (int by = 16; by > 0; by /= 2) most = fmaxf(most, __shfl_xor_sync(WARP_ALL, most, by));
    for (int e = lane; e < a.count && !a.sigmoid; e += 32) sum += expf(logits[e] - most);
    for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(WARP_ALL, sum, by);
    s.most = most;
    s.sum = sum;
    if (a.groups < 2) return s;
    s.group = a.count / a.groups;
    s.open = UINT32_MAX;
    s.open = open_groups(s, a, lane);
    return s;
}

/* Sorts a row's choices by expert and divides their weights: few, by one thread. */
static __device__ void order_row(const struct choose_args &a, int32_t *chosen, float *weight,
                                 float sum) {
    for (int k = 0; k < a.used; k++) {
        int expert = chosen[k], to = k;
        float w = weight[k] / sum * a.scale;
        if (a.factors) w *= a.factors[expert];
        for (; to > 0 && chosen[to - 1] > expert; to--) {
            chosen[to] = chosen[to - 1];
            weight[to] = weight[to - 1];
        }
        chosen[to] = expert;
        weight[to] = w;
    }
}

/* A warp per row. */
static __global__ void k_choose(const struct choose_args a) {
    ptx_overlap_grids();
    int64_t row = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    int lane = threadIdx.x % 32;
    if (row >= a.rows) return;
    const float *logits = a.logits + row * a.count;
    int32_t *chosen = a.r.chosen + row * a.used;
    float *weight = a.r.weight + row * a.used, most = 0, sum = 0;
    uint32_t taken = 0;
    const struct scores s = score_row(a, logits, lane);
    for (int k = 0; k < a.used; k++) {
        struct choice best = choose_best(s, 0, a.count, taken, lane);
        if (k == 0) most = best.by;
        if (best.expert % 32 == lane) taken |= 1u << (best.expert / 32);
        float w = s.plain ? expf(best.by - most) : score_of(s, best.expert);
        sum += w;
        if (lane > 0) continue;
        chosen[k] = best.expert;
        weight[k] = w;
    }
    float rest = 0;
    for (int i = 0, e = lane; e < a.count && !a.normalise && s.plain; i++, e += 32)
        if (!(taken >> i & 1)) rest += expf(logits[e] - most);
    for (int by = 16; by > 0; by /= 2) rest += __shfl_xor_sync(WARP_ALL, rest, by);
    if (!s.plain) sum = a.normalise ? sum + SUM_LEAST : 1;
    if (lane == 0) order_row(a, chosen, weight, sum + rest);
}

/* A warp's 32 uses from use `first` on: those before this lane's that have its expert, and whether
 * it is the first of them. */
struct peers {
    int64_t use; /* -1: none */
    int expert, before, all;
};

static __device__ __forceinline__ struct peers peers_of(const struct choose_args &a, int64_t first,
                                                        int64_t end, int lane) {
    struct peers p = {first + lane < end ? first + lane : -1, 0, 0, 0};
    p.expert = p.use < 0 ? -1 - lane : a.r.chosen[p.use]; /* a lane without a use is alone */
    uint32_t same = __match_any_sync(WARP_ALL, p.expert);
    p.before = __popc(same & ((1u << lane) - 1));
    p.all = __popc(same);
    return p;
}

/* The warp's piece: uses [first, end), none if first is not below end, and its counts. */
struct piece {
    int64_t first, end;
    int32_t *counts; /* [experts] */
};

static __device__ __forceinline__ struct piece piece_of(const struct choose_args &a) {
    int64_t index = (int64_t)blockIdx.x * SORTERS + threadIdx.x / 32;
    int64_t uses = (int64_t)a.rows * a.used, first = index * PIECE;
    return {first, first + PIECE < uses ? first + PIECE : uses, a.r.counts + index * a.count};
}

/* A warp per piece: -> counts of its uses of each expert. */
static __global__ void k_count(const struct choose_args a) {
    ptx_overlap_grids();
    const struct piece piece = piece_of(a);
    int lane = threadIdx.x % 32;
    if (piece.first >= piece.end) return;
    for (int e = lane; e < a.count; e += 32) piece.counts[e] = 0;
    __syncwarp();
    for (int64_t first = piece.first; first < piece.end; first += 32) {
        struct peers p = peers_of(a, first, piece.end, lane);
        if (p.use >= 0 && p.before == 0) piece.counts[p.expert] += p.all;
        __syncwarp();
    }
}

/* A thread per expert: -> place of the first use of each piece, and the groups. The grid is one
 * block. */
static __global__ void k_place(const struct choose_args a) {
    ptx_overlap_grids();
    SHARED_MEMORY(shared);
    int64_t pieces = ((int64_t)a.rows * a.used + PIECE - 1) / PIECE;
    int *room = (int *)shared, at = 0, groups = 0, total;
    for (int first = 0; first < a.count; first += (int)blockDim.x) {
        int expert = first + (int)threadIdx.x, mine = 0;
        for (int64_t i = 0; expert < a.count && i < pieces; i++)
            mine += a.r.counts[i * a.count + expert];
        int begin = at + block_scan(mine, room, &total), place = begin;
        at += total;
        int parts = (mine + GROUP - 1) / GROUP, part = groups + block_scan(parts, room, &total);
        groups += total;
        for (int done = 0; done < mine; done += GROUP)
            a.r.groups[part++] = {expert, begin + done, mine - done < GROUP ? mine - done : GROUP};
        for (int64_t i = 0; expert < a.count && i < pieces; i++) {
            int32_t *count = &a.r.counts[i * a.count + expert], of_piece = *count;
            *count = place;
            place += of_piece;
        }
    }
    if (threadIdx.x == 0) *a.r.group_count = groups;
}

/* A warp per piece: -> places of its uses, those of an expert in the order of rows. */
static __global__ void k_sort(const struct choose_args a) {
    ptx_overlap_grids();
    const struct piece piece = piece_of(a);
    int lane = threadIdx.x % 32;
    int32_t *places = piece.counts;
    for (int64_t first = piece.first; first < piece.end; first += 32) {
        struct peers p = peers_of(a, first, piece.end, lane);
        int begin = p.use < 0 ? 0 : places[p.expert];
        __syncwarp();
        if (p.use < 0) continue;
        a.r.place[p.use] = begin + p.before;
        a.r.source[begin + p.before] = (int32_t)(p.use / a.used);
        if (p.before == 0) places[p.expert] = begin + p.all;
    }
}

/* ---- Products ---- */

struct expert_args {
    const struct matrix *matrices;
    const float *x;
    float *y; /* [uses, outputs] */
    struct bias bias;
    struct routes r;
    int cols, outputs;
    enum kern_activation activation;
    bool ungated; /* outputs are their own gates */
};

static __device__ __forceinline__ float bias_at(const struct bias &b, int expert, int part, int i) {
    return b.all ? b.all[(int64_t)expert * b.stride + b.first[part] + i] : 0;
}

/* Blocks (group, outputs), a warp per output: only the first dimension of a grid can count the
 * groups of a long prompt. GATED: gate and up of an output, and their activation; its rows are
 * gathered from x. Places of a group without a row repeat its first. */
template <bool GATED> static __global__ void k_product(const struct expert_args a) {
    ptx_overlap_grids();
    if ((int)blockIdx.x >= *a.r.group_count) return;
    const struct group g = a.r.groups[blockIdx.x];
    int lane = threadIdx.x % 32, out = (int)(blockIdx.y * WARPS + threadIdx.x / 32);
    if (out >= a.outputs) return;
    const struct matrix m = a.matrices[g.expert];
    const float *rows[GROUP];
#pragma unroll
    for (int u = 0; u < GROUP; u++) {
        int use = g.first + (u < g.count ? u : 0);
        rows[u] = a.x + (int64_t)(GATED ? a.r.source[use] : use) * a.cols;
    }
    float value = matrix_multiply(m, out, rows, a.cols, lane) + bias_at(a.bias, g.expert, 0, out);
    if (GATED) {
        float up = value;
        if (!a.ungated)
            up = matrix_multiply(m, (int64_t)out + a.outputs, rows, a.cols, lane) +
                 bias_at(a.bias, g.expert, 1, out);
        value = gated(value, up, a.activation);
    }
    if (lane < g.count) a.y[(int64_t)(g.first + lane) * a.outputs + out] = value;
}

/* ---- The sum ---- */

struct sum_args {
    float *y;
    struct routes r;
    int64_t count; /* rows * width */
    int width, used;
    bool add;
};

static __global__ void k_sum(const struct sum_args a) {
    ptx_overlap_grids();
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.count) return;
    int64_t row = i / a.width, column = i % a.width;
    float sum = a.add ? a.y[i] : 0;
    for (int k = 0; k < a.used; k++) {
        int64_t use = row * a.used + k;
        sum = fmaf(a.r.weight[use], a.r.out[a.r.place[use] * (int64_t)a.width + column], sum);
    }
    a.y[i] = sum;
}

static __global__ void k_add_sums(float *y, const float *sums, int64_t count) {
    ptx_overlap_grids();
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) y[i] += sums[i];
}

/* ---- The stage ---- */

static bool take_routes(struct cuda *cuda, const struct kern_experts *experts, int rows,
                        struct routes *r) {
    const struct kern_experts_spec *spec = &experts->spec;
    size_t uses = (size_t)rows * (size_t)spec->used;
    r->ff = static_cast<float *>(room_take(cuda, &cuda->hidden, (size_t)rows * row_bytes(experts)));
    if (!r->ff) return false;
    r->out = r->ff + uses * (size_t)experts->d_ff;
    r->weight = r->out + uses * (size_t)spec->d_model;
    r->chosen = reinterpret_cast<int32_t *>(r->weight + uses);
    r->place = r->chosen + uses;
    r->source = r->place + uses;
    r->group_count = r->source + uses;
    r->counts = r->group_count + 1;
    r->groups = reinterpret_cast<struct group *>(r->counts + pieces_of(uses) * (size_t)spec->count);
    return true;
}

static void multiply_all(struct cuda *cuda, const struct kern_experts *experts,
                         const struct routes &r, const float *x, int rows) {
    const struct kern_experts_spec *spec = &experts->spec;
    size_t uses = (size_t)rows * (size_t)spec->used;
    unsigned groups = (unsigned)groups_max(spec->count, uses);
    const struct expert_args in = {experts->gate_up,
                                   x,
                                   r.ff,
                                   experts->gate_up_bias,
                                   r,
                                   spec->d_model,
                                   experts->d_ff,
                                   spec->activation,
                                   spec->ungated};
    LAUNCH_OVERLAPPED(cuda->device, k_product<true>, dim3(groups, blocks_for(experts->d_ff, WARPS)),
                      THREADS, 0, in);
    /* The ranks' products are summed: the first adds the bias. */
    const float *bias = cuda->comm->rank == 0 ? spec->down_bias : NULL;
    const struct expert_args back = {experts->down,
                                     r.ff,
                                     r.out,
                                     {bias, spec->d_model, {0, 0}},
                                     r,
                                     experts->d_ff,
                                     spec->d_model,
                                     spec->activation,
                                     false};
    LAUNCH_OVERLAPPED(cuda->device, k_product<false>,
                      dim3(groups, blocks_for(spec->d_model, WARPS)), THREADS, 0, back);
}

void op_experts(struct kern *kern, float *y, const float *x, const float *logits,
                const struct kern_experts *experts, int rows) {
    struct cuda *cuda = cuda_of(kern);
    const struct kern_experts_spec *spec = &experts->spec;
    int64_t count = (int64_t)rows * spec->d_model;
    bool joins = cuda->comm->ranks > 1;
    struct routes r;
    if (rows == 0) return;
    bool has_room = take_routes(cuda, experts, rows, &r);
    float *sums = joins ? partial_take(cuda, (size_t)count) : y;
    if (has_room && sums) {
        const struct choose_args choose = {logits,
                                           spec->select_bias,
                                           spec->factors,
                                           r,
                                           rows,
                                           spec->count,
                                           spec->used,
                                           spec->groups,
                                           spec->groups_used,
                                           spec->normalise,
                                           spec->sigmoid,
                                           spec->group_best,
                                           spec->scale > 0 ? spec->scale : 1};
        LAUNCH_OVERLAPPED(cuda->device, k_choose, blocks_for(rows, WARPS), THREADS, 0, choose);
        const unsigned sorters = blocks_for((int64_t)rows * spec->used, SORTERS * PIECE);
        LAUNCH_OVERLAPPED(cuda->device, k_count, sorters, SORTERS * 32, 0, choose);
        LAUNCH_OVERLAPPED(cuda->device, k_place, 1, THREADS, WARPS * sizeof(int), choose);
        LAUNCH_OVERLAPPED(cuda->device, k_sort, sorters, SORTERS * 32, 0, choose);
        multiply_all(cuda, experts, r, x, rows);
        const struct sum_args sum = {sums,          r,          count,
                                     spec->d_model, spec->used, !joins && !spec->sets};
        LAUNCH_OVERLAPPED(cuda->device, k_sum, blocks_for(count, THREADS), THREADS, 0, sum);
    }
    if (!joins) return;
    if (!has_room) device_lose(cuda->device); /* the others wait for this rank's sums */
    join_reduce(cuda, sums, (size_t)count, COMM_F32, COMM_SUM);
    if (has_room && sums && spec->sets)
        device_copy(cuda->device, y, sums, (size_t)count * sizeof *y);
    else if (has_room && sums)
        LAUNCH_OVERLAPPED(cuda->device, k_add_sums, blocks_for(count, THREADS), THREADS, 0, y, sums,
                          count);
}
