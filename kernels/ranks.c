/* Tensor parallelism as a backend (kernels/ranks.h): hands every operation to all ranks at once,
 * translates addresses, and checks that the arrays it gets are split as the operation expects. Rank
 * 0's addresses stand for the array on all ranks, so the layer loop needs no knowledge of ranks. */
#include "kernels/ranks.h"

#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "kernels/ranks_int.h"

/* A weight, gate or stage of experts: the parts of all ranks. */
struct kern_weight {
    enum kern_shard shard;
    struct kern_weight *rank[COMM_RANKS_MAX];
};

struct kern_gate {
    struct kern_gate *rank[COMM_RANKS_MAX];
};

struct kern_experts {
    struct kern_experts *rank[COMM_RANKS_MAX];
};

/* An allocation: [base, base + size) stands for rank[r][size] on rank r. */
struct ranks_region {
    char *base;
    size_t size;
    void *rank[COMM_RANKS_MAX];
    bool split; /* each rank holds a part of every row */
};

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
    cpu_team_run(ranks->team, do_call, &call);
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

/* ---- Memory ---- */

/* The last region that begins at or before p. */
static struct ranks_region *region_before(const struct ranks *ranks, const void *p) {
    size_t lo = 0, hi = ranks->region_count;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (ranks->regions[mid].base <= (const char *)p)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo > 0 ? &ranks->regions[lo - 1] : NULL;
}

static struct ranks_region *region_of(const struct ranks *ranks, const void *p) {
    for (; ranks; ranks = ranks->owner) {
        struct ranks_region *region = region_before(ranks, p);
        if (region && (size_t)((const char *)p - region->base) < region->size) return region;
    }
    CHECK_MSG(false, "memory that no rank has");
    return NULL;
}

/* An argument of an operation; all zero for NULL. */
struct view {
    struct ranks_region *region;
    size_t offset;
};

static struct view view_of(const struct ranks *ranks, const void *p) {
    if (!p) return (struct view){0};
    struct ranks_region *region = region_of(ranks, p);
    return (struct view){region, (size_t)((const char *)p - region->base)};
}

/* View of rows that must be whole, or split. */
static struct view view_as(const struct ranks *ranks, const void *p, bool split) {
    struct view view = view_of(ranks, p);
    CHECK(!view.region || view.region->split == split);
    return view;
}

/* View of rows that are about to be written, whole or split. */
static struct view view_to(const struct ranks *ranks, const void *p, bool split) {
    struct view view = view_of(ranks, p);
    CHECK(view.region);
    view.region->split = split;
    return view;
}

/* The array's address on a rank. */
static float *on(struct view view, int rank) {
    if (!view.region) return NULL;
    return (float *)(void *)((char *)view.region->rank[rank] + view.offset);
}

struct memory {
    size_t bytes;
    void *rank[COMM_RANKS_MAX];
    const void *from;
    int codes[COMM_RANKS_MAX];
};

static void alloc_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct memory *memory = arg;
    memory->rank[rank] = kern->ops->mem_alloc(kern, memory->bytes);
}

static void free_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct memory *memory = arg;
    if (memory->rank[rank]) kern->ops->mem_free(kern, memory->rank[rank]);
}

static bool room_for_region(struct ranks *ranks) {
    if (ranks->region_count < ranks->region_room) return true;
    size_t room = ranks->region_room ? 2 * ranks->region_room : 64;
    struct ranks_region *regions = mem_try_alloc(room, sizeof *regions);
    if (!regions) return false;
    if (ranks->region_count) memcpy(regions, ranks->regions, ranks->region_count * sizeof *regions);
    mem_free(ranks->regions);
    ranks->regions = regions;
    ranks->region_room = room;
    return true;
}

static void *op_mem_alloc(struct kern *kern, size_t bytes) {
    struct ranks *ranks = ranks_of(kern);
    struct memory memory = {.bytes = bytes > 0 ? bytes : 1};
    bool all = room_for_region(ranks);
    if (all) ranks_each(ranks, alloc_on, &memory);
    for (int r = 0; r < ranks->count; r++) all = all && memory.rank[r];
    if (!all) {
        ranks_each(ranks, free_on, &memory);
        return NULL;
    }
    struct ranks_region *before = region_before(ranks, memory.rank[0]);
    size_t at = before ? (size_t)(before - ranks->regions) + 1 : 0;
    memmove(ranks->regions + at + 1, ranks->regions + at,
            (ranks->region_count - at) * sizeof *ranks->regions);
    ranks->region_count++;
    ranks->regions[at] = (struct ranks_region){.base = memory.rank[0], .size = memory.bytes};
    memcpy(ranks->regions[at].rank, memory.rank, sizeof memory.rank);
    return memory.rank[0];
}

static void op_mem_free(struct kern *kern, void *mem) {
    struct ranks *ranks = ranks_of(kern);
    struct ranks_region *region = region_before(ranks, mem);
    CHECK(region && region->base == mem);
    struct memory memory = {0};
    memcpy(memory.rank, region->rank, sizeof memory.rank);
    ranks_each(ranks, free_on, &memory);
    size_t after = ranks->region_count - (size_t)(region - ranks->regions) - 1;
    memmove(region, region + 1, after * sizeof *region);
    ranks->region_count--;
}

static void upload_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct memory *memory = arg;
    memory->codes[rank] = kern->ops->upload(kern, memory->rank[rank], memory->from, memory->bytes);
}

/* Uploads the same data to all ranks. */
static int op_upload(struct kern *kern, void *to, const void *from, size_t bytes) {
    struct ranks *ranks = ranks_of(kern);
    struct view view = view_to(ranks, to, false);
    struct memory memory = {.bytes = bytes, .from = from};
    for (int r = 0; r < ranks->count; r++) memory.rank[r] = on(view, r);
    ranks_each(ranks, upload_on, &memory);
    return ranks_error(ranks, memory.codes);
}

static int op_download(struct kern *kern, void *to, const void *from, size_t bytes) {
    struct ranks *ranks = ranks_of(kern);
    struct kern *first = ranks->rank[0];
    return first->ops->download(first, to, on(view_as(ranks, from, false), 0), bytes);
}

/* ---- Weights and gates ---- */

static int op_shape_check(struct kern *kern, const struct kern_shape *shape, struct fault *fault) {
    struct ranks *ranks = ranks_of(kern);
    struct kern *first = ranks->rank[0];
    int rc = shard_check(ranks->count, shape, fault);
    if (rc || !first->ops->shape_check) return rc;
    return first->ops->shape_check(first, shape, fault);
}

struct load {
    const struct kern_matrix *parts;
    int part_count;
    const struct kern_gate_spec *spec;
    struct kern_weight *weight;
    struct kern_gate *gate;
    int codes[COMM_RANKS_MAX];
    struct fault faults[COMM_RANKS_MAX];
};

static void weight_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct load *load = arg;
    load->codes[rank] =
        kern->ops->weight_load(kern, load->parts, load->part_count, load->weight->shard,
                               &load->weight->rank[rank], &load->faults[rank]);
}

static void free_weight_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct kern_weight *weight = arg;
    if (weight->rank[rank]) kern->ops->weight_free(kern, weight->rank[rank]);
}

static void op_weight_free(struct kern *kern, struct kern_weight *weight) {
    if (!weight) return;
    ranks_each(ranks_of(kern), free_weight_on, weight);
    mem_free(weight);
}

static int op_weight_load(struct kern *kern, const struct kern_matrix *parts, int part_count,
                          enum kern_shard shard, struct kern_weight **out, struct fault *fault) {
    struct load load = {.parts = parts, .part_count = part_count};
    load.weight = mem_try_alloc(1, sizeof *load.weight);
    if (!load.weight) return fault_set(fault, ERR_NOMEM, "", "no memory for a weight");
    load.weight->shard = shard;
    ranks_each(ranks_of(kern), weight_on, &load);
    int rc = ranks_fault(ranks_of(kern), load.codes, load.faults, fault);
    if (rc)
        op_weight_free(kern, load.weight);
    else
        *out = load.weight;
    return rc;
}

static void gate_load_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct load *load = arg;
    load->codes[rank] =
        kern->ops->gate_load(kern, load->spec, &load->gate->rank[rank], &load->faults[rank]);
}

static void free_gate_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct kern_gate *gate = arg;
    if (gate->rank[rank]) kern->ops->gate_free(kern, gate->rank[rank]);
}

static void op_gate_free(struct kern *kern, struct kern_gate *gate) {
    if (!gate) return;
    ranks_each(ranks_of(kern), free_gate_on, gate);
    mem_free(gate);
}

static int op_gate_load(struct kern *kern, const struct kern_gate_spec *spec,
                        struct kern_gate **out, struct fault *fault) {
    struct load load = {.spec = spec};
    load.gate = mem_try_alloc(1, sizeof *load.gate);
    if (!load.gate) return fault_set(fault, ERR_NOMEM, "", "no memory for a gate");
    ranks_each(ranks_of(kern), gate_load_on, &load);
    int rc = ranks_fault(ranks_of(kern), load.codes, load.faults, fault);
    if (rc)
        op_gate_free(kern, load.gate);
    else
        *out = load.gate;
    return rc;
}

struct experts_load {
    const struct kern_experts_spec *spec;
    struct view gate_up_bias, down_bias, select_bias, factors;
    struct kern_experts *experts;
    int codes[COMM_RANKS_MAX];
    struct fault faults[COMM_RANKS_MAX];
};

static void experts_load_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct experts_load *load = arg;
    struct kern_experts_spec own = *load->spec;
    const size_t count = (size_t)own.count;
    struct kern_weight **weights = mem_try_alloc(2 * count, sizeof *weights);
    load->codes[rank] = weights ? 0 : ERR_NOMEM;
    if (!weights) return;
    for (size_t e = 0; e < count; e++) {
        weights[e] = own.gate_up[e]->rank[rank];
        weights[count + e] = own.down[e]->rank[rank];
    }
    own.gate_up = weights;
    own.down = weights + count;
    own.gate_up_bias = on(load->gate_up_bias, rank);
    own.down_bias = on(load->down_bias, rank);
    own.select_bias = on(load->select_bias, rank);
    own.factors = on(load->factors, rank);
    load->codes[rank] =
        kern->ops->experts_load(kern, &own, &load->experts->rank[rank], &load->faults[rank]);
    mem_free(weights);
}

static void free_experts_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct kern_experts *experts = arg;
    if (experts->rank[rank]) kern->ops->experts_free(kern, experts->rank[rank]);
}

static void op_experts_free(struct kern *kern, struct kern_experts *experts) {
    if (!experts) return;
    ranks_each(ranks_of(kern), free_experts_on, experts);
    mem_free(experts);
}

static int op_experts_load(struct kern *kern, const struct kern_experts_spec *spec,
                           struct kern_experts **out, struct fault *fault) {
    struct ranks *ranks = ranks_of(kern);
    struct experts_load load = {.spec = spec,
                                .gate_up_bias = view_as(ranks, spec->gate_up_bias, false),
                                .down_bias = view_as(ranks, spec->down_bias, false),
                                .select_bias = view_as(ranks, spec->select_bias, false),
                                .factors = view_as(ranks, spec->factors, false)};
    load.experts = mem_try_alloc(1, sizeof *load.experts);
    if (!load.experts) return fault_set(fault, ERR_NOMEM, "", "no memory for a layer's experts");
    ranks_each(ranks, experts_load_on, &load);
    int rc = ranks_fault(ranks, load.codes, load.faults, fault);
    if (rc)
        op_experts_free(kern, load.experts);
    else
        *out = load.experts;
    return rc;
}

struct borrowing {
    const struct ranks *owner;
    int codes[COMM_RANKS_MAX];
};

static void borrow_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct borrowing *borrowing = arg;
    borrowing->codes[rank] = kern->ops->borrow(kern, borrowing->owner->rank[rank]);
}

static int op_borrow(struct kern *kern, const struct kern *owner) {
    struct ranks *ranks = ranks_of(kern);
    struct borrowing borrowing = {.owner = (const struct ranks *)owner};
    CHECK(ranks->count == borrowing.owner->count);
    ranks_each(ranks, borrow_on, &borrowing);
    ranks->owner = borrowing.owner;
    return ranks_error(ranks, borrowing.codes);
}

/* ---- Layer operations ---- */

/* The arguments of all operations; each call states which ones it uses. */
struct op {
    struct view y, x, a, b;
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
    kern->ops->embed(kern, on(op->y, rank), op->weight->rank[rank], op->scale, op->index, op->rows);
}

static void op_embed(struct kern *kern, float *x, const struct kern_weight *table, float scale,
                     const int32_t *tokens, int rows) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.y = view_to(ranks, x, false),
                    .weight = table,
                    .scale = scale,
                    .index = tokens,
                    .rows = rows};
    ranks_each(ranks, embed_on, &op);
}

static void norm_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->rms_norm(kern, on(op->y, rank), on(op->x, rank), on(op->a, rank), op->rows, op->dim,
                        op->eps);
}

static void op_rms_norm(struct kern *kern, float *y, const float *x, const float *weight, int rows,
                        int dim, float eps) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.x = view_as(ranks, x, false),
                    .y = view_to(ranks, y, false),
                    .a = view_as(ranks, weight, false),
                    .rows = rows,
                    .dim = dim,
                    .eps = eps};
    ranks_each(ranks, norm_on, &op);
}

static void layer_norm_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->layer_norm(kern, on(op->y, rank), on(op->x, rank), on(op->a, rank), on(op->b, rank),
                          op->rows, op->dim, op->eps);
}

static void op_layer_norm(struct kern *kern, float *y, const float *x, const float *weight,
                          const float *bias, int rows, int dim, float eps) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.x = view_as(ranks, x, false),
                    .y = view_to(ranks, y, false),
                    .a = view_as(ranks, weight, false),
                    .b = view_as(ranks, bias, false),
                    .rows = rows,
                    .dim = dim,
                    .eps = eps};
    ranks_each(ranks, layer_norm_on, &op);
}

static void add_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->add(kern, on(op->y, rank), on(op->x, rank), op->rows, op->dim);
}

static void op_add(struct kern *kern, float *y, const float *x, int rows, int dim) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {
        .x = view_as(ranks, x, false), .y = view_as(ranks, y, false), .rows = rows, .dim = dim};
    ranks_each(ranks, add_on, &op);
}

static void add_norm_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->add_norm(kern, on(op->y, rank), on(op->x, rank), on(op->a, rank), op->rows, op->dim,
                        op->eps);
}

static void op_add_norm(struct kern *kern, float *y, float *x, const float *weight, int rows,
                        int dim, float eps) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.x = view_as(ranks, x, false),
                    .y = view_as(ranks, y, false),
                    .a = view_as(ranks, weight, false),
                    .rows = rows,
                    .dim = dim,
                    .eps = eps};
    ranks_each(ranks, add_norm_on, &op);
}

/* Logits are whole on rank 0 alone. */
static void soft_cap_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    if (rank == 0) kern->ops->soft_cap(kern, on(op->y, rank), op->rows, op->dim, op->scale);
}

static void op_soft_cap(struct kern *kern, float *x, int rows, int dim, float cap) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.y = view_as(ranks, x, false), .rows = rows, .dim = dim, .scale = cap};
    ranks_each(ranks, soft_cap_on, &op);
}

static void matmul_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->matmul(kern, on(op->y, rank), on(op->x, rank), op->weight->rank[rank],
                      on(op->a, rank), op->rows, op->mode);
}

static void op_matmul(struct kern *kern, float *y, const float *x, const struct kern_weight *weight,
                      const float *bias, int rows, enum kern_matmul_mode mode) {
    struct ranks *ranks = ranks_of(kern);
    bool splits = weight->shard == KERN_SHARD_ROWS, joins = weight->shard == KERN_SHARD_COLS;
    struct op op = {.x = view_as(ranks, x, joins),
                    .y = mode == KERN_ADD ? view_as(ranks, y, splits) : view_to(ranks, y, splits),
                    .a = view_as(ranks, bias, false),
                    .weight = weight,
                    .rows = rows,
                    .mode = mode};
    ranks_each(ranks, matmul_on, &op);
}

static void glu_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->glu(kern, on(op->y, rank), on(op->x, rank), op->rows, op->dim, op->activation);
}

static void op_glu(struct kern *kern, float *y, const float *gate_up, int rows, int d_ff,
                   enum kern_activation activation) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.x = view_as(ranks, gate_up, true),
                    .y = view_to(ranks, y, true),
                    .rows = rows,
                    .dim = d_ff / ranks->count,
                    .activation = activation};
    ranks_each(ranks, glu_on, &op);
}

static void glu_apart_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->glu_apart(kern, on(op->y, rank), on(op->a, rank), on(op->b, rank), op->stride,
                         op->rows, op->dim, op->activation);
}

/* Every rank computes its part of split rows, and all of whole ones. */
static void op_glu_apart(struct kern *kern, float *y, const float *gate, const float *up,
                         int64_t up_stride, int rows, int dim, enum kern_activation activation) {
    struct ranks *ranks = ranks_of(kern);
    const struct view a = view_of(ranks, gate);
    const bool split = a.region->split;
    const int parts = split ? ranks->count : 1;
    struct op op = {.a = a,
                    .b = view_as(ranks, up, split),
                    .y = view_to(ranks, y, split),
                    .stride = up_stride / parts,
                    .rows = rows,
                    .dim = dim / parts,
                    .activation = activation};
    ranks_each(ranks, glu_apart_on, &op);
}

static void scale_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->scale(kern, on(op->y, rank), on(op->a, rank), op->rows, op->dim);
}

static void op_scale(struct kern *kern, float *x, const float *factor, int rows, int dim) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.y = view_as(ranks, x, false),
                    .a = view_as(ranks, factor, false),
                    .rows = rows,
                    .dim = dim};
    ranks_each(ranks, scale_on, &op);
}

static void open_gates_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->open_gates(kern, on(op->y, rank), on(op->a, rank), op->rows, op->dim, op->one);
}

/* With one gate for each row, every rank has all gates. */
static void op_open_gates(struct kern *kern, float *x, const float *gates, int rows, int dim,
                          bool one) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.y = view_as(ranks, x, true),
                    .a = view_as(ranks, gates, !one),
                    .rows = rows,
                    .dim = dim / ranks->count,
                    .one = one};
    ranks_each(ranks, open_gates_on, &op);
}

static void experts_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->experts(kern, on(op->y, rank), on(op->x, rank), on(op->a, rank),
                       op->experts->rank[rank], op->rows);
}

static void op_experts(struct kern *kern, float *y, const float *x, const float *logits,
                       const struct kern_experts *experts, int rows) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.x = view_as(ranks, x, false),
                    .y = view_as(ranks, y, false),
                    .a = view_as(ranks, logits, false),
                    .experts = experts,
                    .rows = rows};
    ranks_each(ranks, experts_on, &op);
}

static void gather_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->gather_rows(kern, on(op->y, rank), on(op->x, rank), op->index, op->rows, op->dim);
}

static void op_gather_rows(struct kern *kern, float *y, const float *x, const int32_t *index,
                           int count, int dim) {
    struct ranks *ranks = ranks_of(kern);
    struct view from = view_of(ranks, x);
    bool split = from.region->split;
    struct op op = {.x = from,
                    .y = view_to(ranks, y, split),
                    .index = index,
                    .rows = count,
                    .dim = split ? dim / ranks->count : dim};
    ranks_each(ranks, gather_on, &op);
}

static void gate_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->gate(kern, on(op->y, rank), on(op->x, rank), op->gate->rank[rank], op->rows);
}

static void op_gate(struct kern *kern, float *log_beta, const float *x,
                    const struct kern_gate *gate, int rows) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.x = view_as(ranks, x, false),
                    .y = view_to(ranks, log_beta, true),
                    .gate = gate,
                    .rows = rows};
    ranks_each(ranks, gate_on, &op);
}

/* ---- Attention ---- */

static void rope_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    struct kern_rope rope = *op->rope;
    rope.v_norm = on(op->x, rank);
    kern->ops->qk_rope(kern, on(op->y, rank), on(op->a, rank), on(op->b, rank), op->eps, &rope,
                       op->batch);
}

static void op_qk_rope(struct kern *kern, float *qkv, const float *q_norm, const float *k_norm,
                       float eps, const struct kern_rope *rope, const struct kern_batch *batch) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.y = view_as(ranks, qkv, true),
                    .a = view_as(ranks, q_norm, false),
                    .b = view_as(ranks, k_norm, false),
                    .x = view_as(ranks, rope->v_norm, false),
                    .eps = eps,
                    .rope = rope,
                    .batch = batch};
    ranks_each(ranks, rope_on, &op);
}

static void qk_norm_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->qk_norm(kern, on(op->y, rank), on(op->a, rank), on(op->b, rank), op->eps, op->batch);
}

static void op_qk_norm(struct kern *kern, float *qkv, const float *q_norm, const float *k_norm,
                       float eps, const struct kern_batch *batch) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.y = view_as(ranks, qkv, true),
                    .a = view_as(ranks, q_norm, false),
                    .b = view_as(ranks, k_norm, false),
                    .eps = eps,
                    .batch = batch};
    ranks_each(ranks, qk_norm_on, &op);
}

static void write_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->write_kv(kern, op->layer, on(op->x, rank), on(op->a, rank), op->batch);
}

static void op_write_kv(struct kern *kern, int layer, const float *qkv, const float *log_beta,
                        const struct kern_batch *batch) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.x = view_as(ranks, qkv, true),
                    .a = view_as(ranks, log_beta, true),
                    .layer = layer,
                    .batch = batch};
    ranks_each(ranks, write_on, &op);
}

static void attend_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    struct kern_attend_options options = *op->attend;
    options.sinks = on(op->a, rank);
    kern->ops->attend(kern, op->layer, on(op->y, rank), on(op->x, rank), op->batch, &options);
}

static void op_attend(struct kern *kern, int layer, float *out, const float *qkv,
                      const struct kern_batch *batch, const struct kern_attend_options *options) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.x = view_as(ranks, qkv, true),
                    .y = view_to(ranks, out, true),
                    .a = view_as(ranks, options->sinks, false),
                    .layer = layer,
                    .batch = batch,
                    .attend = options};
    ranks_each(ranks, attend_on, &op);
}

/* ---- Latent attention: the heads' products ---- */

struct latent_op {
    struct view y, x, entries, norm;
    const struct kern_latent *latent;
    int rows;
};

/* The rank's weights of the heads [first, first + count). */
static void own_heads(struct kern_weight *const *weights, int first, int count, int rank,
                      struct kern_weight **own) {
    for (int h = 0; h < count; h++) own[h] = weights[first + h]->rank[rank];
}

/* All heads' products on every rank: each may observe the whole group. */
static void latent_in_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct latent_op *op = arg;
    struct kern_weight *up_k[KERN_LATENT_HEADS_MAX];
    struct kern_latent latent = *op->latent;
    own_heads(latent.up_k, 0, latent.heads, rank, up_k);
    latent.up_k = up_k;
    latent.up_v = NULL;
    latent.norm = on(op->norm, rank);
    kern->ops->latent_in(kern, on(op->y, rank), on(op->x, rank), on(op->entries, rank), &latent,
                         op->rows);
}

static void op_latent_in(struct kern *kern, float *qkv, const float *q, const float *entries,
                         const struct kern_latent *latent, int rows) {
    struct ranks *ranks = ranks_of(kern);
    struct latent_op op = {.x = view_as(ranks, q, false),
                           .entries = view_as(ranks, entries, false),
                           .y = view_to(ranks, qkv, true),
                           .norm = view_as(ranks, latent->norm, false),
                           .latent = latent,
                           .rows = rows};
    ranks_each(ranks, latent_in_on, &op);
}

static void latent_out_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    const struct latent_op *op = arg;
    struct kern_weight *up_v[KERN_LATENT_HEADS_MAX];
    struct kern_latent latent = *op->latent;
    latent.heads /= ranks->count;
    own_heads(latent.up_v, rank * latent.heads, latent.heads, rank, up_v);
    latent.up_k = NULL;
    latent.up_v = up_v;
    kern->ops->latent_out(kern, on(op->y, rank), on(op->x, rank), &latent, op->rows);
}

static void op_latent_out(struct kern *kern, float *y, const float *x,
                          const struct kern_latent *latent, int rows) {
    struct ranks *ranks = ranks_of(kern);
    struct latent_op op = {
        .x = view_as(ranks, x, true), .y = view_to(ranks, y, true), .latent = latent, .rows = rows};
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
    own_heads(room->weights, 0, room->heads, rank, own);
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
    kern->ops->short_conv(kern, op->layer, on(op->y, rank), on(op->x, rank), on(op->a, rank),
                          op->dim, op->width, op->batch);
}

static void op_short_conv(struct kern *kern, int state, float *y, const float *bcx,
                          const float *taps, int channels, int width,
                          const struct kern_batch *batch) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.x = view_as(ranks, bcx, true),
                    .y = view_to(ranks, y, true),
                    .a = view_as(ranks, taps, false),
                    .layer = state,
                    .dim = channels / ranks->count,
                    .width = width,
                    .batch = batch};
    ranks_each(ranks, short_conv_on, &op);
}

struct delta_op {
    struct view in, rates, y, taps, decay, bias, norm;
    const struct kern_delta *delta;
    const struct kern_batch *batch;
    int state;
};

static void delta_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct delta_op *op = arg;
    struct kern_delta delta = *op->delta;
    delta.taps = on(op->taps, rank);
    delta.decay = on(op->decay, rank);
    delta.bias = on(op->bias, rank);
    delta.norm = on(op->norm, rank);
    kern->ops->delta(kern, op->state, on(op->y, rank), on(op->in, rank), on(op->rates, rank),
                     &delta, op->batch);
}

static void op_delta(struct kern *kern, int state, float *y, float *in, float *rates,
                     const struct kern_delta *delta, const struct kern_batch *batch) {
    struct ranks *ranks = ranks_of(kern);
    struct delta_op op = {.in = view_as(ranks, in, true),
                          .rates = view_as(ranks, rates, false),
                          .y = view_to(ranks, y, true),
                          .taps = view_as(ranks, delta->taps, false),
                          .decay = view_as(ranks, delta->decay, false),
                          .bias = view_as(ranks, delta->bias, false),
                          .norm = view_as(ranks, delta->norm, false),
                          .delta = delta,
                          .batch = batch,
                          .state = state};
    ranks_each(ranks, delta_on, &op);
}

struct mamba_op {
    struct view in, shared, y, taps, conv_bias, decay, bias, skip, norm;
    const struct kern_mamba *mamba;
    const struct kern_batch *batch;
    int state;
};

static void mamba_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct mamba_op *op = arg;
    struct kern_mamba mamba = *op->mamba;
    mamba.taps = on(op->taps, rank);
    mamba.conv_bias = on(op->conv_bias, rank);
    mamba.decay = on(op->decay, rank);
    mamba.bias = on(op->bias, rank);
    mamba.skip = on(op->skip, rank);
    mamba.norm = on(op->norm, rank);
    kern->ops->mamba(kern, op->state, on(op->y, rank), on(op->in, rank), on(op->shared, rank),
                     &mamba, op->batch);
}

static void op_mamba(struct kern *kern, int state, float *y, float *in, float *shared,
                     const struct kern_mamba *mamba, const struct kern_batch *batch) {
    struct ranks *ranks = ranks_of(kern);
    struct mamba_op op = {.in = view_as(ranks, in, true),
                          .shared = view_as(ranks, shared, false),
                          .y = view_to(ranks, y, true),
                          .taps = view_as(ranks, mamba->taps, false),
                          .conv_bias = view_as(ranks, mamba->conv_bias, false),
                          .decay = view_as(ranks, mamba->decay, false),
                          .bias = view_as(ranks, mamba->bias, false),
                          .skip = view_as(ranks, mamba->skip, false),
                          .norm = view_as(ranks, mamba->norm, false),
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
    struct sampling sampling = {.logits = on(view_as(ranks, logits, false), 0),
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
    .mem_alloc = op_mem_alloc,
    .mem_free = op_mem_free,
    .upload = op_upload,
    .download = op_download,
    .shape_check = op_shape_check,
    .weight_load = op_weight_load,
    .weight_free = op_weight_free,
    .gate_load = op_gate_load,
    .gate_free = op_gate_free,
    .experts_load = op_experts_load,
    .experts_free = op_experts_free,
    .borrow = op_borrow,
    .embed = op_embed,
    .rms_norm = op_rms_norm,
    .layer_norm = op_layer_norm,
    .add = op_add,
    .matmul = op_matmul,
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
