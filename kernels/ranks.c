/* Tensor parallelism as a backend (kernels/ranks.h): hands every operation to all ranks at once,
 * translates addresses (ranks_memory.c), and checks that the arrays it gets are split as the
 * operation expects. Rank 0's addresses stand for the array on all ranks, so the layer loop needs
 * no knowledge of ranks. */
#include "kernels/ranks.h"

#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "kernels/ranks_int.h"

/* ---- All ranks at once ---- */

struct call {
    struct ranks *ranks;
    rank_work *work;
    void *arg;
};

static void do_call(void *arg, int worker) {
    const struct call *call = arg;
    call->work(call->ranks, call->ranks->rank[worker], worker, call->arg);
}

void ranks_each(struct ranks *ranks, rank_work *work, void *arg) {
    struct call call = {ranks, work, arg};
    cpu_team_run_on(ranks->team, ranks->count, do_call, &call);
}

int ranks_error(const struct ranks *ranks, const int *codes) {
    for (int r = 0; r < ranks->count; r++)
        if (codes[r]) return codes[r];
    return 0;
}

int ranks_fault(const struct ranks *ranks, const int *codes, const struct fault *faults,
                struct fault *fault) {
    int first = -1;
    for (int r = ranks->count - 1; r >= 0; r--)
        if (codes[r] && (first < 0 || faults[r].text[0] || !faults[first].text[0])) first = r;
    if (first < 0) return 0;
    return fault_set(fault, codes[first], faults[first].field, "%s",
                     faults[first].text[0] ? faults[first].text : err_text(codes[first]));
}

/* ---- Layer operations ---- */

/* The arguments of all operations; each call states which ones it uses. */
struct op {
    struct ranks_view y, x, a, b;
    const struct kern_weight *weight;
    const struct kern_gate *gate;
    const struct kern_experts *experts;
    const int32_t *index; /* host memory: tokens or rows */
    int rows, dim, layer, width;
    int64_t stride;
    float eps, scale;
    enum kern_matmul_mode mode;
    enum kern_activation activation;
    bool one;
    const struct kern_rope *rope;
    const struct kern_batch *batch;
    const struct kern_attend_options *attend;
};

static void embed_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->embed(kern, ranks_view_on(op->y, rank), op->weight->rank[rank], op->scale, op->index,
                     op->rows);
}

static void op_embed(struct kern *kern, float *x, const struct kern_weight *table, float scale,
                     const int32_t *tokens, int rows) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.y = ranks_view_to(ranks, x, false),
                    .weight = table,
                    .scale = scale,
                    .index = tokens,
                    .rows = rows};
    ranks_each(ranks, embed_on, &op);
}

static void norm_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->rms_norm(kern, ranks_view_on(op->y, rank), ranks_view_on(op->x, rank),
                        ranks_view_on(op->a, rank), op->rows, op->dim, op->eps);
}

static void op_rms_norm(struct kern *kern, float *y, const float *x, const float *weight, int rows,
                        int dim, float eps) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.x = ranks_view_as(ranks, x, false),
                    .y = ranks_view_to(ranks, y, false),
                    .a = ranks_view_as(ranks, weight, false),
                    .rows = rows,
                    .dim = dim,
                    .eps = eps};
    ranks_each(ranks, norm_on, &op);
}

static void layer_norm_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->layer_norm(kern, ranks_view_on(op->y, rank), ranks_view_on(op->x, rank),
                          ranks_view_on(op->a, rank), ranks_view_on(op->b, rank), op->rows, op->dim,
                          op->eps);
}

static void op_layer_norm(struct kern *kern, float *y, const float *x, const float *weight,
                          const float *bias, int rows, int dim, float eps) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.x = ranks_view_as(ranks, x, false),
                    .y = ranks_view_to(ranks, y, false),
                    .a = ranks_view_as(ranks, weight, false),
                    .b = ranks_view_as(ranks, bias, false),
                    .rows = rows,
                    .dim = dim,
                    .eps = eps};
    ranks_each(ranks, layer_norm_on, &op);
}

static void add_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->add(kern, ranks_view_on(op->y, rank), ranks_view_on(op->x, rank), op->rows, op->dim);
}

static void op_add(struct kern *kern, float *y, const float *x, int rows, int dim) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.x = ranks_view_as(ranks, x, false),
                    .y = ranks_view_as(ranks, y, false),
                    .rows = rows,
                    .dim = dim};
    ranks_each(ranks, add_on, &op);
}

static void add_norm_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->add_norm(kern, ranks_view_on(op->y, rank), ranks_view_on(op->x, rank),
                        ranks_view_on(op->a, rank), op->rows, op->dim, op->eps);
}

static void op_add_norm(struct kern *kern, float *y, float *x, const float *weight, int rows,
                        int dim, float eps) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.x = ranks_view_as(ranks, x, false),
                    .y = ranks_view_as(ranks, y, false),
                    .a = ranks_view_as(ranks, weight, false),
                    .rows = rows,
                    .dim = dim,
                    .eps = eps};
    ranks_each(ranks, add_norm_on, &op);
}

/* Logits are whole on rank 0 alone. */
static void soft_cap_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    if (rank == 0)
        kern->ops->soft_cap(kern, ranks_view_on(op->y, rank), op->rows, op->dim, op->scale);
}

static void op_soft_cap(struct kern *kern, float *x, int rows, int dim, float cap) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.y = ranks_view_as(ranks, x, false), .rows = rows, .dim = dim, .scale = cap};
    ranks_each(ranks, soft_cap_on, &op);
}

static void matmul_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->matmul(kern, ranks_view_on(op->y, rank), ranks_view_on(op->x, rank),
                      op->weight->rank[rank], ranks_view_on(op->a, rank), op->rows, op->mode);
}

static void op_matmul(struct kern *kern, float *y, const float *x, const struct kern_weight *weight,
                      const float *bias, int rows, enum kern_matmul_mode mode) {
    struct ranks *ranks = ranks_of(kern);
    bool splits = weight->shard == KERN_SHARD_ROWS, joins = weight->shard == KERN_SHARD_COLS;
    struct op op = {.x = ranks_view_as(ranks, x, joins),
                    .y = mode == KERN_ADD ? ranks_view_as(ranks, y, splits)
                                          : ranks_view_to(ranks, y, splits),
                    .a = ranks_view_as(ranks, bias, false),
                    .weight = weight,
                    .rows = rows,
                    .mode = mode};
    ranks_each(ranks, matmul_on, &op);
}

struct low_rank {
    struct ranks_view y, x, in, low, out;
    const struct kern_low_rank *products;
    const int32_t *rows;
    int count;
};

static void low_rank_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct low_rank *op = arg;
    const struct kern_low_rank own = {.down = op->products->down->rank[rank],
                                      .up = op->products->up->rank[rank],
                                      .in = ranks_view_on(op->in, rank),
                                      .low = ranks_view_on(op->low, rank),
                                      .out = ranks_view_on(op->out, rank)};
    kern->ops->low_rank(kern, ranks_view_on(op->y, rank), ranks_view_on(op->x, rank), &own,
                        op->rows, op->count);
}

static void op_low_rank(struct kern *kern, float *y, const float *x,
                        const struct kern_low_rank *products, const int32_t *rows, int count) {
    struct ranks *ranks = ranks_of(kern);
    const bool splits = products->up->shard == KERN_SHARD_ROWS;
    const bool joins = products->down->shard == KERN_SHARD_COLS;
    struct low_rank op = {.x = ranks_view_as(ranks, x, joins),
                          .y = ranks_view_as(ranks, y, splits),
                          .in = ranks_view_to(ranks, products->in, joins),
                          .low = ranks_view_to(ranks, products->low, false),
                          .out = ranks_view_to(ranks, products->out, splits),
                          .products = products,
                          .rows = rows,
                          .count = count};
    ranks_each(ranks, low_rank_on, &op);
}

static void glu_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->glu(kern, ranks_view_on(op->y, rank), ranks_view_on(op->x, rank), op->rows, op->dim,
                   op->activation);
}

static void op_glu(struct kern *kern, float *y, const float *gate_up, int rows, int d_ff,
                   enum kern_activation activation) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.x = ranks_view_as(ranks, gate_up, true),
                    .y = ranks_view_to(ranks, y, true),
                    .rows = rows,
                    .dim = d_ff / ranks->count,
                    .activation = activation};
    ranks_each(ranks, glu_on, &op);
}

static void glu_apart_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->glu_apart(kern, ranks_view_on(op->y, rank), ranks_view_on(op->a, rank),
                         ranks_view_on(op->b, rank), op->stride, op->rows, op->dim, op->activation);
}

/* Every rank computes its part of split rows, and all of whole ones. */
static void op_glu_apart(struct kern *kern, float *y, const float *gate, const float *up,
                         int64_t up_stride, int rows, int dim, enum kern_activation activation) {
    struct ranks *ranks = ranks_of(kern);
    const struct ranks_view a = ranks_view_of(ranks, gate);
    const bool split = ranks_view_split(a);
    const int parts = split ? ranks->count : 1;
    struct op op = {.a = a,
                    .b = ranks_view_as(ranks, up, split),
                    .y = ranks_view_to(ranks, y, split),
                    .stride = up_stride / parts,
                    .rows = rows,
                    .dim = dim / parts,
                    .activation = activation};
    ranks_each(ranks, glu_apart_on, &op);
}

static void scale_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->scale(kern, ranks_view_on(op->y, rank), ranks_view_on(op->a, rank), op->rows,
                     op->dim);
}

static void op_scale(struct kern *kern, float *x, const float *factor, int rows, int dim) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.y = ranks_view_as(ranks, x, false),
                    .a = ranks_view_as(ranks, factor, false),
                    .rows = rows,
                    .dim = dim};
    ranks_each(ranks, scale_on, &op);
}

static void open_gates_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->open_gates(kern, ranks_view_on(op->y, rank), ranks_view_on(op->a, rank), op->rows,
                          op->dim, op->one);
}

/* With one gate for each row, every rank has all gates. */
static void op_open_gates(struct kern *kern, float *x, const float *gates, int rows, int dim,
                          bool one) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.y = ranks_view_as(ranks, x, true),
                    .a = ranks_view_as(ranks, gates, !one),
                    .rows = rows,
                    .dim = dim / ranks->count,
                    .one = one};
    ranks_each(ranks, open_gates_on, &op);
}

static void experts_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->experts(kern, ranks_view_on(op->y, rank), ranks_view_on(op->x, rank),
                       ranks_view_on(op->a, rank), op->experts->rank[rank], op->rows);
}

static void op_experts(struct kern *kern, float *y, const float *x, const float *logits,
                       const struct kern_experts *experts, int rows) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.x = ranks_view_as(ranks, x, false),
                    .y = ranks_view_as(ranks, y, false),
                    .a = ranks_view_as(ranks, logits, false),
                    .experts = experts,
                    .rows = rows};
    ranks_each(ranks, experts_on, &op);
}

static void gather_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->gather_rows(kern, ranks_view_on(op->y, rank), ranks_view_on(op->x, rank), op->index,
                           op->rows, op->dim);
}

static void op_gather_rows(struct kern *kern, float *y, const float *x, const int32_t *index,
                           int count, int dim) {
    struct ranks *ranks = ranks_of(kern);
    struct ranks_view from = ranks_view_of(ranks, x);
    bool split = ranks_view_split(from);
    struct op op = {.x = from,
                    .y = ranks_view_to(ranks, y, split),
                    .index = index,
                    .rows = count,
                    .dim = split ? dim / ranks->count : dim};
    ranks_each(ranks, gather_on, &op);
}

static void gate_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->gate(kern, ranks_view_on(op->y, rank), ranks_view_on(op->x, rank),
                    op->gate->rank[rank], op->rows);
}

static void op_gate(struct kern *kern, float *log_beta, const float *x,
                    const struct kern_gate *gate, int rows) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.x = ranks_view_as(ranks, x, false),
                    .y = ranks_view_to(ranks, log_beta, true),
                    .gate = gate,
                    .rows = rows};
    ranks_each(ranks, gate_on, &op);
}

/* ---- Attention ---- */

static void rope_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    struct kern_rope rope = *op->rope;
    rope.v_norm = ranks_view_on(op->x, rank);
    kern->ops->qk_rope(kern, ranks_view_on(op->y, rank), ranks_view_on(op->a, rank),
                       ranks_view_on(op->b, rank), op->eps, &rope, op->batch);
}

static void op_qk_rope(struct kern *kern, float *qkv, const float *q_norm, const float *k_norm,
                       float eps, const struct kern_rope *rope, const struct kern_batch *batch) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.y = ranks_view_as(ranks, qkv, true),
                    .a = ranks_view_as(ranks, q_norm, false),
                    .b = ranks_view_as(ranks, k_norm, false),
                    .x = ranks_view_as(ranks, rope->v_norm, false),
                    .eps = eps,
                    .rope = rope,
                    .batch = batch};
    ranks_each(ranks, rope_on, &op);
}

static void qk_norm_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->qk_norm(kern, ranks_view_on(op->y, rank), ranks_view_on(op->a, rank),
                       ranks_view_on(op->b, rank), op->eps, op->batch);
}

static void op_qk_norm(struct kern *kern, float *qkv, const float *q_norm, const float *k_norm,
                       float eps, const struct kern_batch *batch) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.y = ranks_view_as(ranks, qkv, true),
                    .a = ranks_view_as(ranks, q_norm, false),
                    .b = ranks_view_as(ranks, k_norm, false),
                    .eps = eps,
                    .batch = batch};
    ranks_each(ranks, qk_norm_on, &op);
}

static void write_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->write_kv(kern, op->layer, ranks_view_on(op->x, rank), ranks_view_on(op->a, rank),
                        op->batch);
}

static void op_write_kv(struct kern *kern, int layer, const float *qkv, const float *log_beta,
                        const struct kern_batch *batch) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.x = ranks_view_as(ranks, qkv, true),
                    .a = ranks_view_as(ranks, log_beta, true),
                    .layer = layer,
                    .batch = batch};
    ranks_each(ranks, write_on, &op);
}

static void attend_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    struct kern_attend_options options = *op->attend;
    options.sinks = ranks_view_on(op->a, rank);
    kern->ops->attend(kern, op->layer, ranks_view_on(op->y, rank), ranks_view_on(op->x, rank),
                      op->batch, &options);
}

static void op_attend(struct kern *kern, int layer, float *out, const float *qkv,
                      const struct kern_batch *batch, const struct kern_attend_options *options) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.x = ranks_view_as(ranks, qkv, true),
                    .y = ranks_view_to(ranks, out, true),
                    .a = ranks_view_as(ranks, options->sinks, false),
                    .layer = layer,
                    .batch = batch,
                    .attend = options};
    ranks_each(ranks, attend_on, &op);
}

/* ---- Latent attention: the heads' products ---- */

struct latent_op {
    struct ranks_view y, x, entries, norm;
    const struct kern_latent *latent;
    int rows;
};

/* The rank's weights of the heads [first, first + count). */
static void ranks_own_heads(struct kern_weight *const *weights, int first, int count, int rank,
                            struct kern_weight **own) {
    for (int h = 0; h < count; h++) own[h] = weights[first + h]->rank[rank];
}

/* All heads' products on every rank: each may observe the whole group. */
static void latent_in_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct latent_op *op = arg;
    struct kern_weight *up_k[KERN_LATENT_HEADS_MAX];
    struct kern_latent latent = *op->latent;
    ranks_own_heads(latent.up_k, 0, latent.heads, rank, up_k);
    latent.up_k = up_k;
    latent.up_v = NULL;
    latent.norm = ranks_view_on(op->norm, rank);
    kern->ops->latent_in(kern, ranks_view_on(op->y, rank), ranks_view_on(op->x, rank),
                         ranks_view_on(op->entries, rank), &latent, op->rows);
}

static void op_latent_in(struct kern *kern, float *qkv, const float *q, const float *entries,
                         const struct kern_latent *latent, int rows) {
    struct ranks *ranks = ranks_of(kern);
    struct latent_op op = {.x = ranks_view_as(ranks, q, false),
                           .entries = ranks_view_as(ranks, entries, false),
                           .y = ranks_view_to(ranks, qkv, true),
                           .norm = ranks_view_as(ranks, latent->norm, false),
                           .latent = latent,
                           .rows = rows};
    ranks_each(ranks, latent_in_on, &op);
}

static void latent_out_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    const struct latent_op *op = arg;
    struct kern_weight *up_v[KERN_LATENT_HEADS_MAX];
    struct kern_latent latent = *op->latent;
    latent.heads /= ranks->count;
    ranks_own_heads(latent.up_v, rank * latent.heads, latent.heads, rank, up_v);
    latent.up_k = NULL;
    latent.up_v = up_v;
    kern->ops->latent_out(kern, ranks_view_on(op->y, rank), ranks_view_on(op->x, rank), &latent,
                          op->rows);
}

static void op_latent_out(struct kern *kern, float *y, const float *x,
                          const struct kern_latent *latent, int rows) {
    struct ranks *ranks = ranks_of(kern);
    struct latent_op op = {.x = ranks_view_as(ranks, x, true),
                           .y = ranks_view_to(ranks, y, true),
                           .latent = latent,
                           .rows = rows};
    ranks_each(ranks, latent_out_on, &op);
}

struct latent_room {
    struct kern_weight *const *weights;
    int heads;
    int codes[COMM_RANKS_MAX];
};

static void latent_reserve_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct latent_room *room = arg;
    struct kern_weight *own[KERN_LATENT_HEADS_MAX];
    ranks_own_heads(room->weights, 0, room->heads, rank, own);
    room->codes[rank] = kern->ops->latent_reserve(kern, own, room->heads);
}

static int op_latent_reserve(struct kern *kern, struct kern_weight *const *weights, int heads) {
    struct latent_room room = {.weights = weights, .heads = heads};
    ranks_each(ranks_of(kern), latent_reserve_on, &room);
    return ranks_error(ranks_of(kern), room.codes);
}

/* ---- Recurrent states ---- */

static void short_conv_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->short_conv(kern, op->layer, ranks_view_on(op->y, rank), ranks_view_on(op->x, rank),
                          ranks_view_on(op->a, rank), op->dim, op->width, op->batch);
}

static void op_short_conv(struct kern *kern, int state, float *y, const float *bcx,
                          const float *taps, int channels, int width,
                          const struct kern_batch *batch) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.x = ranks_view_as(ranks, bcx, true),
                    .y = ranks_view_to(ranks, y, true),
                    .a = ranks_view_as(ranks, taps, false),
                    .layer = state,
                    .dim = channels / ranks->count,
                    .width = width,
                    .batch = batch};
    ranks_each(ranks, short_conv_on, &op);
}

struct delta_op {
    struct ranks_view in, rates, y, taps, decay, bias, norm;
    const struct kern_delta *delta;
    const struct kern_batch *batch;
    int state;
};

static void delta_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct delta_op *op = arg;
    struct kern_delta delta = *op->delta;
    delta.taps = ranks_view_on(op->taps, rank);
    delta.decay = ranks_view_on(op->decay, rank);
    delta.bias = ranks_view_on(op->bias, rank);
    delta.norm = ranks_view_on(op->norm, rank);
    kern->ops->delta(kern, op->state, ranks_view_on(op->y, rank), ranks_view_on(op->in, rank),
                     ranks_view_on(op->rates, rank), &delta, op->batch);
}

static void op_delta(struct kern *kern, int state, float *y, float *in, float *rates,
                     const struct kern_delta *delta, const struct kern_batch *batch) {
    struct ranks *ranks = ranks_of(kern);
    struct delta_op op = {.in = ranks_view_as(ranks, in, true),
                          .rates = ranks_view_as(ranks, rates, false),
                          .y = ranks_view_to(ranks, y, true),
                          .taps = ranks_view_as(ranks, delta->taps, false),
                          .decay = ranks_view_as(ranks, delta->decay, false),
                          .bias = ranks_view_as(ranks, delta->bias, false),
                          .norm = ranks_view_as(ranks, delta->norm, false),
                          .delta = delta,
                          .batch = batch,
                          .state = state};
    ranks_each(ranks, delta_on, &op);
}

struct mamba_op {
    struct ranks_view in, shared, y, taps, conv_bias, decay, bias, skip, norm;
    const struct kern_mamba *mamba;
    const struct kern_batch *batch;
    int state;
};

static void mamba_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct mamba_op *op = arg;
    struct kern_mamba mamba = *op->mamba;
    mamba.taps = ranks_view_on(op->taps, rank);
    mamba.conv_bias = ranks_view_on(op->conv_bias, rank);
    mamba.decay = ranks_view_on(op->decay, rank);
    mamba.bias = ranks_view_on(op->bias, rank);
    mamba.skip = ranks_view_on(op->skip, rank);
    mamba.norm = ranks_view_on(op->norm, rank);
    kern->ops->mamba(kern, op->state, ranks_view_on(op->y, rank), ranks_view_on(op->in, rank),
                     ranks_view_on(op->shared, rank), &mamba, op->batch);
}

static void op_mamba(struct kern *kern, int state, float *y, float *in, float *shared,
                     const struct kern_mamba *mamba, const struct kern_batch *batch) {
    struct ranks *ranks = ranks_of(kern);
    struct mamba_op op = {.in = ranks_view_as(ranks, in, true),
                          .shared = ranks_view_as(ranks, shared, false),
                          .y = ranks_view_to(ranks, y, true),
                          .taps = ranks_view_as(ranks, mamba->taps, false),
                          .conv_bias = ranks_view_as(ranks, mamba->conv_bias, false),
                          .decay = ranks_view_as(ranks, mamba->decay, false),
                          .bias = ranks_view_as(ranks, mamba->bias, false),
                          .skip = ranks_view_as(ranks, mamba->skip, false),
                          .norm = ranks_view_as(ranks, mamba->norm, false),
                          .mamba = mamba,
                          .batch = batch,
                          .state = state};
    ranks_each(ranks, mamba_on, &op);
}

/* ---- Sampling, the end ---- */

struct syncing {
    int codes[COMM_RANKS_MAX];
};

static void sync_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct syncing *syncing = arg;
    syncing->codes[rank] = kern->ops->sync(kern);
}

static int op_sync(struct kern *kern) {
    struct syncing syncing = {0};
    ranks_each(ranks_of(kern), sync_on, &syncing);
    return ranks_error(ranks_of(kern), syncing.codes);
}

struct sampling {
    const float *logits; /* on rank 0 */
    int rows, vocab;
    const struct kern_sample *params;
    struct kern_sampled *out;
    int codes[COMM_RANKS_MAX];
};

/* Samples on rank 0, which has the logits. All ranks wait at once: each sees its own device's
 * errors, which end the others' wait. */
static void sample_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct sampling *s = arg;
    s->codes[rank] = rank
                         ? kern->ops->sync(kern)
                         : kern->ops->sample(kern, s->logits, s->rows, s->vocab, s->params, s->out);
}

static int op_sample(struct kern *kern, const float *logits, int rows, int vocab,
                     const struct kern_sample *params, struct kern_sampled *out) {
    struct ranks *ranks = ranks_of(kern);
    struct sampling sampling = {.logits = ranks_view_on(ranks_view_as(ranks, logits, false), 0),
                                .rows = rows,
                                .vocab = vocab,
                                .params = params,
                                .out = out};
    ranks_each(ranks, sample_on, &sampling);
    return ranks_error(ranks, sampling.codes);
}

/* Only the caller's instance is bound: the other ranks' threads use no other instances. */
static void op_bind(struct kern *kern) {
    struct kern *first = ranks_of(kern)->rank[0];
    first->ops->bind(first);
}

static void close_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)arg;
    if (kern) kern->ops->close(kern);
    ranks->rank[rank] = NULL;
}

static void op_close(struct kern *kern) {
    struct ranks *ranks = ranks_of(kern);
    if (ranks->team) ranks_each(ranks, close_on, NULL);
    cpu_team_close(ranks->team);
    mem_free(ranks->regions);
    mem_free(ranks->lengths);
    mem_free(ranks->layers);
    mem_free(ranks->own_layers);
    mem_free(ranks);
}

/* ---- Opening ---- */

static const struct kern_ops table = {
    .close = op_close,
    .bind = op_bind,
    .mem_alloc = ranks_mem_alloc,
    .mem_free = ranks_mem_free,
    .upload = ranks_upload,
    .download = ranks_download,
    .shape_check = ranks_shape_check,
    .weight_load = ranks_weight_load,
    .weight_free = ranks_weight_free,
    .gate_load = ranks_gate_load,
    .gate_free = ranks_gate_free,
    .experts_load = ranks_experts_load,
    .experts_free = ranks_experts_free,
    .borrow = ranks_borrow,
    .embed = op_embed,
    .rms_norm = op_rms_norm,
    .layer_norm = op_layer_norm,
    .add = op_add,
    .matmul = op_matmul,
    .low_rank = op_low_rank,
    .add_norm = op_add_norm,
    .soft_cap = op_soft_cap,
    .qk_norm = op_qk_norm,
    .glu = op_glu,
    .glu_apart = op_glu_apart,
    .scale = op_scale,
    .open_gates = op_open_gates,
    .experts = op_experts,
    .gather_rows = op_gather_rows,
    .gate = op_gate,
    .cache_open = ranks_cache_open,
    .cache_fit = ranks_cache_fit,
    .begin_step = ranks_begin_step,
    .qk_rope = op_qk_rope,
    .write_kv = op_write_kv,
    .attend = op_attend,
    .latent_reserve = op_latent_reserve,
    .latent_in = op_latent_in,
    .latent_out = op_latent_out,
    .short_conv = op_short_conv,
    .delta = op_delta,
    .mamba = op_mamba,
    .evict = ranks_evict,
    .truncate = ranks_truncate,
    .shift = ranks_shift,
    .prepare = ranks_prepare,
    .fork = ranks_fork,
    .release = ranks_release,
    .report = ranks_report,
    .snapshot_size = ranks_snapshot_size,
    .snapshot_export = ranks_snapshot_export,
    .snapshot_check = ranks_snapshot_check,
    .snapshot_import = ranks_snapshot_import,
    .cache_stats = ranks_cache_stats,
    .cache_check = ranks_cache_check,
    .sample = op_sample,
    .sync = op_sync,
};

struct opening {
    const struct ranks_options *options;
    int codes[COMM_RANKS_MAX];
    struct fault faults[COMM_RANKS_MAX];
};

static void open_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)kern;
    struct opening *opening = arg;
    opening->codes[rank] = opening->options->open(opening->options->arg, rank, &ranks->rank[rank],
                                                  &opening->faults[rank]);
}

/* An operation that some rank's backend lacks is missing here. */
static void fill_ops(struct ranks *ranks) {
    const struct kern_ops *own = ranks->rank[0]->ops;
    snprintf(ranks->name, sizeof ranks->name, "%s, %d ranks", own->name, ranks->count);
    ranks->ops = table;
    ranks->ops.name = ranks->name;
    ranks->ops.activations = own->activations;
    ranks->ops.blocks = own->blocks;
    ranks->ops.scale_groups = own->scale_groups;
    ranks->ops.peeks = own->peeks;
    ranks->ops.both_ways = own->both_ways;
    ranks->ops.reads_latent = own->reads_latent;
    ranks->ops.cache_info = own->cache_info;
    ranks->ops.rule_check = own->rule_check;
    if (!own->borrow) ranks->ops.borrow = NULL;
    if (!own->prepare) ranks->ops.prepare = NULL;
    if (!own->shift) ranks->ops.shift = NULL;
    if (!own->latent_reserve) ranks->ops.latent_reserve = NULL;
    if (!own->latent_in) ranks->ops.latent_in = NULL;
    if (!own->latent_out) ranks->ops.latent_out = NULL;
    if (!own->short_conv) ranks->ops.short_conv = NULL;
    if (!own->delta) ranks->ops.delta = NULL;
    if (!own->mamba) ranks->ops.mamba = NULL;
    if (!own->glu_apart) ranks->ops.glu_apart = NULL;
    if (!own->scale) ranks->ops.scale = NULL;
    if (!own->layer_norm) ranks->ops.layer_norm = NULL;
    if (!own->add) ranks->ops.add = NULL;
    if (!own->low_rank) ranks->ops.low_rank = NULL;
    if (!own->cache_fit) ranks->ops.cache_fit = NULL;
    if (!own->bind) ranks->ops.bind = NULL;
}

int ranks_open(const struct ranks_options *options, struct kern **out, struct fault *fault) {
    struct opening opening = {.options = options};
    CHECK(options->ranks >= 1 && options->ranks <= COMM_RANKS_MAX);
    struct ranks *ranks = mem_try_alloc(1, sizeof *ranks);
    if (!ranks) return fault_set(fault, ERR_NOMEM, "", "no memory for the ranks");
    ranks->count = options->ranks;
    int rc = cpu_team_open(options->ranks, &ranks->team);
    if (rc)
        fault_set(fault, rc, "", "cannot start the ranks' threads");
    else
        ranks_each(ranks, open_on, &opening);
    if (!rc) rc = ranks_fault(ranks, opening.codes, opening.faults, fault);
    if (rc) {
        op_close(&ranks->base);
        return rc;
    }
    fill_ops(ranks);
    ranks->base.ops = &ranks->ops;
    *out = &ranks->base;
    return 0;
}
