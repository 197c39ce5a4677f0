#include "kernels/ranks.h"

#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "kernels/cpu/pool.h"
#include "kernels/shard.h"
#include "kernels/snapshot.h"

/* A weight or gate here is one of each rank's. */
struct kern_weight {
    enum kern_shard shard;
    struct kern_weight *rank[COMM_RANKS_MAX];
};

struct kern_gate {
    struct kern_gate *rank[COMM_RANKS_MAX];
};

/* Memory that was handed out: [base, base + size) stands for rank[r][size] on rank r. */
struct region {
    char *base;
    size_t size;
    void *rank[COMM_RANKS_MAX];
    bool split; /* each rank has its part of every row */
};

struct ranks {
    struct kern base; /* first: a struct kern * is a struct ranks * */
    struct kern_ops ops;
    char name[64];
    int count;
    struct kern *rank[COMM_RANKS_MAX];
    struct cpu_pool *team; /* a thread for each rank; the caller is rank 0's */

    struct region *regions; /* by address */
    size_t region_count, region_room;
    const struct ranks *owner; /* of memory that this instance may read: kern_ops.share */

    struct kern_cache_options whole; /* once the cache is open */
    struct kern_cache_options own;   /* of every rank */
    int page_slots;
    struct shard_heads heads[COMM_RANKS_MAX];
    int32_t *lengths; /* [count][own streams], of reports and traces */
};

static struct ranks *ranks_of(struct kern *kern) {
    return (struct ranks *)kern;
}

/* ---- All ranks at once ------------------------------------------------------------------------
 */

/* What a call is to a rank: its backend, its number, and what the call needs. */
typedef void rank_work(struct ranks *ranks, struct kern *kern, int rank, void *arg);

struct call {
    struct ranks *ranks;
    rank_work *work;
    void *arg;
};

static void do_call(void *arg, int worker) {
    const struct call *call = arg;
    call->work(call->ranks, call->ranks->rank[worker], worker, call->arg);
}

static void each_rank(struct ranks *ranks, rank_work *work, void *arg) {
    struct call call = {ranks, work, arg};
    cpu_pool_run(ranks->team, do_call, &call);
}

/* Errors are the same on all ranks, or one rank's alone. */
static int first_error(const struct ranks *ranks, const int *codes) {
    for (int r = 0; r < ranks->count; r++)
        if (codes[r]) return codes[r];
    return 0;
}

/* ---- Memory ---------------------------------------------------------------------------------- */

/* The last region that begins at or before p. */
static struct region *region_before(const struct ranks *ranks, const void *p) {
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

static struct region *region_of(const struct ranks *ranks, const void *p) {
    for (; ranks; ranks = ranks->owner) {
        struct region *region = region_before(ranks, p);
        if (region && (size_t)((const char *)p - region->base) < region->size) return region;
    }
    CHECK_MSG(false, "memory that no rank has");
    return NULL;
}

/* An argument of an operation; of none, all zero. */
struct view {
    struct region *region;
    size_t offset;
};

static struct view view_of(const struct ranks *ranks, const void *p) {
    if (!p) return (struct view){0};
    struct region *region = region_of(ranks, p);
    return (struct view){region, (size_t)((const char *)p - region->base)};
}

/* Rows that come whole, or that come split. */
static struct view view_as(const struct ranks *ranks, const void *p, bool split) {
    struct view view = view_of(ranks, p);
    CHECK(!view.region || view.region->split == split);
    return view;
}

/* Rows that are about to be written so. */
static struct view view_to(const struct ranks *ranks, const void *p, bool split) {
    struct view view = view_of(ranks, p);
    view.region->split = split;
    return view;
}

/* Where a rank has it. */
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
    struct region *regions = mem_try_alloc(room, sizeof *regions);
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
    if (all) each_rank(ranks, alloc_on, &memory);
    for (int r = 0; r < ranks->count; r++) all = all && memory.rank[r];
    if (!all) {
        each_rank(ranks, free_on, &memory);
        return NULL;
    }
    struct region *before = region_before(ranks, memory.rank[0]);
    size_t at = before ? (size_t)(before - ranks->regions) + 1 : 0;
    memmove(ranks->regions + at + 1, ranks->regions + at,
            (ranks->region_count - at) * sizeof *ranks->regions);
    ranks->region_count++;
    ranks->regions[at] = (struct region){.base = memory.rank[0], .size = memory.bytes};
    memcpy(ranks->regions[at].rank, memory.rank, sizeof memory.rank);
    return memory.rank[0];
}

static void op_mem_free(struct kern *kern, void *mem) {
    struct ranks *ranks = ranks_of(kern);
    struct region *region = region_before(ranks, mem);
    CHECK(region && region->base == mem);
    struct memory memory = {0};
    memcpy(memory.rank, region->rank, sizeof memory.rank);
    each_rank(ranks, free_on, &memory);
    size_t after = ranks->region_count - (size_t)(region - ranks->regions) - 1;
    memmove(region, region + 1, after * sizeof *region);
    ranks->region_count--;
}

static void upload_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct memory *memory = arg;
    memory->codes[rank] = kern->ops->upload(kern, memory->rank[rank], memory->from, memory->bytes);
}

/* The same on all ranks. */
static int op_upload(struct kern *kern, void *to, const void *from, size_t bytes) {
    struct ranks *ranks = ranks_of(kern);
    struct view view = view_to(ranks, to, false);
    struct memory memory = {.bytes = bytes, .from = from};
    for (int r = 0; r < ranks->count; r++) memory.rank[r] = on(view, r);
    each_rank(ranks, upload_on, &memory);
    return first_error(ranks, memory.codes);
}

static int op_download(struct kern *kern, void *to, const void *from, size_t bytes) {
    struct ranks *ranks = ranks_of(kern);
    struct kern *first = ranks->rank[0];
    return first->ops->download(first, to, on(view_as(ranks, from, false), 0), bytes);
}

/* ---- Weights and gates ------------------------------------------------------------------------
 */

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

/* The fault of the first rank that has one. */
static int load_result(const struct ranks *ranks, const struct load *load, struct fault *fault) {
    for (int r = 0; r < ranks->count; r++)
        if (load->codes[r])
            return fault_set(fault, load->codes[r], load->faults[r].field, "%s",
                             load->faults[r].text);
    return 0;
}

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
    each_rank(ranks_of(kern), free_weight_on, weight);
    mem_free(weight);
}

static int op_weight_load(struct kern *kern, const struct kern_matrix *parts, int part_count,
                          enum kern_shard shard, struct kern_weight **out, struct fault *fault) {
    struct load load = {.parts = parts, .part_count = part_count};
    load.weight = mem_try_alloc(1, sizeof *load.weight);
    if (!load.weight) return fault_set(fault, ERR_NOMEM, "", "no memory for a weight");
    load.weight->shard = shard;
    each_rank(ranks_of(kern), weight_on, &load);
    int rc = load_result(ranks_of(kern), &load, fault);
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
    each_rank(ranks_of(kern), free_gate_on, gate);
    mem_free(gate);
}

static int op_gate_load(struct kern *kern, const struct kern_gate_spec *spec,
                        struct kern_gate **out, struct fault *fault) {
    struct load load = {.spec = spec};
    load.gate = mem_try_alloc(1, sizeof *load.gate);
    if (!load.gate) return fault_set(fault, ERR_NOMEM, "", "no memory for a gate");
    each_rank(ranks_of(kern), gate_load_on, &load);
    int rc = load_result(ranks_of(kern), &load, fault);
    if (rc)
        op_gate_free(kern, load.gate);
    else
        *out = load.gate;
    return rc;
}

struct sharing {
    const struct ranks *owner;
    int codes[COMM_RANKS_MAX];
};

static void share_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct sharing *sharing = arg;
    sharing->codes[rank] = kern->ops->share(kern, sharing->owner->rank[rank]);
}

static int op_share(struct kern *kern, const struct kern *owner) {
    struct ranks *ranks = ranks_of(kern);
    struct sharing sharing = {.owner = (const struct ranks *)owner};
    CHECK(ranks->count == sharing.owner->count);
    each_rank(ranks, share_on, &sharing);
    ranks->owner = sharing.owner;
    return first_error(ranks, sharing.codes);
}

/* ---- Layer operations -------------------------------------------------------------------------
 */

/* One form for all of them: what each needs of it is written at its call. */
struct op {
    struct view y, x, a, b;
    const struct kern_weight *weight;
    const struct kern_gate *gate;
    const int32_t *index; /* host memory: tokens or rows */
    int rows, dim, layer;
    float eps;
    enum kern_matmul_mode mode;
    const struct kern_rope *rope;
    const struct kern_batch *batch;
    const struct kern_attend_options *attend;
};

static void embed_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->embed(kern, on(op->y, rank), op->weight->rank[rank], op->index, op->rows);
}

static void op_embed(struct kern *kern, float *x, const struct kern_weight *table,
                     const int32_t *tokens, int rows) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.y = view_to(ranks, x, false), .weight = table, .index = tokens, .rows = rows};
    each_rank(ranks, embed_on, &op);
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
    each_rank(ranks, norm_on, &op);
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
    each_rank(ranks, matmul_on, &op);
}

static void glu_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->glu(kern, on(op->y, rank), on(op->x, rank), op->rows, op->dim);
}

static void op_glu(struct kern *kern, float *y, const float *gate_up, int rows, int d_ff) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.x = view_as(ranks, gate_up, true),
                    .y = view_to(ranks, y, true),
                    .rows = rows,
                    .dim = d_ff / ranks->count};
    each_rank(ranks, glu_on, &op);
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
    each_rank(ranks, gather_on, &op);
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
    each_rank(ranks, gate_on, &op);
}

/* ---- The cache: a step ------------------------------------------------------------------------
 */

struct cache_opening {
    const struct kern_cache_options *options;
    int codes[COMM_RANKS_MAX];
    struct fault faults[COMM_RANKS_MAX];
};

static void open_cache_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct cache_opening *opening = arg;
    opening->codes[rank] = kern->ops->cache_open(kern, opening->options, &opening->faults[rank]);
}

static size_t own_streams(const struct ranks *ranks) {
    return (size_t)ranks->own.layers * (size_t)ranks->own.heads_kv;
}

static int op_cache_open(struct kern *kern, const struct kern_cache_options *options,
                         struct fault *fault) {
    struct ranks *ranks = ranks_of(kern);
    struct cache_opening opening = {.options = options};
    struct kern_cache_info info;
    kern->ops->cache_info(options->dtype, options->head_dim, &info);
    ranks->whole = ranks->own = *options;
    ranks->page_slots = info.page_slots;
    for (int r = 0; r < ranks->count; r++) {
        const struct comm place = {.rank = r, .ranks = ranks->count};
        ranks->heads[r] = shard_heads(&place, options->heads_q, options->heads_kv);
    }
    ranks->own.heads_q = ranks->heads[0].heads_q;
    ranks->own.heads_kv = ranks->heads[0].heads_kv;
    ranks->lengths = mem_try_alloc((size_t)ranks->count * own_streams(ranks), sizeof(int32_t));
    if (!ranks->lengths) return fault_set(fault, ERR_NOMEM, "", "no memory beside the cache");
    each_rank(ranks, open_cache_on, &opening);
    for (int r = 0; r < ranks->count; r++)
        if (opening.codes[r])
            return fault_set(fault, opening.codes[r], opening.faults[r].field, "%s",
                             opening.faults[r].text);
    return 0;
}

struct stepping {
    const struct kern_batch *batch;
    int codes[COMM_RANKS_MAX];
};

static void begin_step_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct stepping *stepping = arg;
    stepping->codes[rank] = kern->ops->begin_step(kern, stepping->batch);
}

static int op_begin_step(struct kern *kern, const struct kern_batch *batch) {
    struct stepping stepping = {.batch = batch};
    each_rank(ranks_of(kern), begin_step_on, &stepping);
    return first_error(ranks_of(kern), stepping.codes);
}

static void rope_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->qk_rope(kern, on(op->y, rank), on(op->a, rank), on(op->b, rank), op->eps, op->rope,
                       op->batch);
}

static void op_qk_rope(struct kern *kern, float *qkv, const float *q_norm, const float *k_norm,
                       float eps, const struct kern_rope *rope, const struct kern_batch *batch) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.y = view_as(ranks, qkv, true),
                    .a = view_as(ranks, q_norm, false),
                    .b = view_as(ranks, k_norm, false),
                    .eps = eps,
                    .rope = rope,
                    .batch = batch};
    each_rank(ranks, rope_on, &op);
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
    each_rank(ranks, write_on, &op);
}

static void attend_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    const struct op *op = arg;
    kern->ops->attend(kern, op->layer, on(op->y, rank), on(op->x, rank), op->batch, op->attend);
}

static void op_attend(struct kern *kern, int layer, float *out, const float *qkv,
                      const struct kern_batch *batch, const struct kern_attend_options *options) {
    struct ranks *ranks = ranks_of(kern);
    struct op op = {.x = view_as(ranks, qkv, true),
                    .y = view_to(ranks, out, true),
                    .layer = layer,
                    .batch = batch,
                    .attend = options};
    each_rank(ranks, attend_on, &op);
}

/* ---- The cache: slots -------------------------------------------------------------------------
 */

struct slot_call {
    int slot, other;
    int32_t pos;
    int codes[COMM_RANKS_MAX];
};

static void truncate_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct slot_call *call = arg;
    call->codes[rank] = kern->ops->truncate(kern, call->slot, call->pos);
}

static int op_truncate(struct kern *kern, int slot, int32_t pos) {
    struct slot_call call = {.slot = slot, .pos = pos};
    each_rank(ranks_of(kern), truncate_on, &call);
    return first_error(ranks_of(kern), call.codes);
}

static void fork_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct slot_call *call = arg;
    call->codes[rank] = kern->ops->fork(kern, call->slot, call->other);
}

static int op_fork(struct kern *kern, int from, int to) {
    struct slot_call call = {.slot = from, .other = to};
    each_rank(ranks_of(kern), fork_on, &call);
    return first_error(ranks_of(kern), call.codes);
}

static void release_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks, (void)rank;
    const struct slot_call *call = arg;
    kern->ops->release(kern, call->slot);
}

static void op_release(struct kern *kern, int slot) {
    struct slot_call call = {.slot = slot};
    each_rank(ranks_of(kern), release_on, &call);
}

/* ---- Streams of the model and of ranks --------------------------------------------------------
 */

static int owner_of(const struct ranks *ranks, int stream) {
    return shard_owner(ranks->count, ranks->whole.heads_kv, stream % ranks->whole.heads_kv);
}

/* Its number on the rank that speaks for it, and on any that shares its head. */
static int own_number(const struct ranks *ranks, int stream) {
    int heads = ranks->own.heads_kv, head = stream % ranks->whole.heads_kv;
    return stream / ranks->whole.heads_kv * heads + head % heads;
}

static int stream_count(const struct ranks *ranks) {
    return ranks->whole.layers * ranks->whole.heads_kv;
}

static int32_t own_length(const struct ranks *ranks, int stream) {
    size_t first = (size_t)owner_of(ranks, stream) * own_streams(ranks);
    return ranks->lengths[first + (size_t)own_number(ranks, stream)];
}

/* Lists that ranks have made for their streams, [first[r], first[r + 1]) being rank r's, in the
 * order of the model's streams. Each rank's streams keep their order. */
static void merge_lists(const struct ranks *ranks, const size_t *first, const void *lists,
                        size_t size, size_t most, void *out) {
    size_t at[COMM_RANKS_MAX], done = 0;
    memcpy(at, first, sizeof at);
    for (int stream = 0; stream < stream_count(ranks); stream++) {
        int owner = owner_of(ranks, stream);
        size_t length = (size_t)own_length(ranks, stream);
        size_t count = length < most - done ? length : most - done;
        memcpy((char *)out + done * size, (const char *)lists + at[owner] * size, count * size);
        at[owner] += length;
        done += count;
    }
}

/* Where each rank's list begins in a common one; returns the entries of all. A rank that does not
 * speak has its own place too: it makes the list that nobody reads. */
static size_t place_lists(const struct ranks *ranks, size_t *first, size_t *all) {
    size_t total = 0, counted = 0;
    for (int r = 0; r < ranks->count; r++) {
        const int32_t *lengths = ranks->lengths + (size_t)r * own_streams(ranks);
        first[r] = total;
        for (size_t i = 0; i < own_streams(ranks); i++) total += (size_t)lengths[i];
        if (ranks->heads[r].speaks) counted += total - first[r];
    }
    *all = total;
    return counted;
}

/* ---- Reports ----------------------------------------------------------------------------------
 */

struct reporting {
    int slot;
    struct kern_report rank[COMM_RANKS_MAX];
    int codes[COMM_RANKS_MAX];
};

static void report_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct reporting *reporting = arg;
    reporting->codes[rank] = kern->ops->report(kern, reporting->slot, &reporting->rank[rank]);
}

/* Lengths of all streams of a slot, on every rank. */
static int report_lengths(struct ranks *ranks, struct reporting *reporting) {
    for (int r = 0; r < ranks->count; r++)
        reporting->rank[r] =
            (struct kern_report){.lengths = ranks->lengths + (size_t)r * own_streams(ranks)};
    each_rank(ranks, report_on, reporting);
    return first_error(ranks, reporting->codes);
}

static int report_entries(struct ranks *ranks, struct reporting *reporting,
                          struct kern_report *report) {
    size_t first[COMM_RANKS_MAX], all;
    (void)place_lists(ranks, first, &all);
    int32_t *positions = report->positions ? mem_try_alloc(all + 1, sizeof *positions) : NULL;
    float *log_beta = report->log_beta ? mem_try_alloc(all + 1, sizeof *log_beta) : NULL;
    int rc = ERR_NOMEM;
    if ((report->positions && !positions) || (report->log_beta && !log_beta)) goto out;
    for (int r = 0; r < ranks->count; r++) {
        reporting->rank[r].positions = positions ? positions + first[r] : NULL;
        reporting->rank[r].log_beta = log_beta ? log_beta + first[r] : NULL;
        reporting->rank[r].entries_max = reporting->rank[r].entries;
    }
    each_rank(ranks, report_on, reporting);
    rc = first_error(ranks, reporting->codes);
    if (!rc && positions)
        merge_lists(ranks, first, positions, sizeof *positions, report->entries_max,
                    report->positions);
    if (!rc && log_beta)
        merge_lists(ranks, first, log_beta, sizeof *log_beta, report->entries_max,
                    report->log_beta);
out:
    mem_free(positions);
    mem_free(log_beta);
    return rc;
}

static int op_report(struct kern *kern, int slot, struct kern_report *report) {
    struct ranks *ranks = ranks_of(kern);
    struct reporting reporting = {.slot = slot};
    int rc = report_lengths(ranks, &reporting);
    if (rc) return rc;
    report->entries = 0;
    report->pages = 0;
    for (int r = 0; r < ranks->count; r++) {
        if (!ranks->heads[r].speaks) continue;
        report->entries += reporting.rank[r].entries;
        report->pages += reporting.rank[r].pages;
    }
    for (int stream = 0; report->lengths && stream < stream_count(ranks); stream++)
        report->lengths[stream] = own_length(ranks, stream);
    if (!report->positions && !report->log_beta) return 0;
    if (report->entries > report->entries_max) return ERR_LIMIT;
    return report_entries(ranks, &reporting, report);
}

/* ---- Eviction ---------------------------------------------------------------------------------
 */

struct evicting {
    struct kern_evict due[COMM_RANKS_MAX];
    struct kern_trace trace[COMM_RANKS_MAX];
    int codes[COMM_RANKS_MAX];
};

static void evict_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct evicting *evicting = arg;
    evicting->codes[rank] = kern->ops->evict(kern, &evicting->due[rank], 1);
}

static int evict_one(struct ranks *ranks, struct evicting *evicting) {
    each_rank(ranks, evict_on, evicting);
    return first_error(ranks, evicting->codes);
}

/* A rank notes what leaves its streams, at most what they hold. */
static int evict_traced(struct ranks *ranks, struct evicting *evicting, struct kern_trace *trace) {
    struct reporting reporting = {.slot = evicting->due[0].slot};
    size_t first[COMM_RANKS_MAX], all;
    int rc = report_lengths(ranks, &reporting);
    if (rc) return rc;
    (void)place_lists(ranks, first, &all);
    int32_t *positions = mem_try_alloc(all + 1, sizeof *positions);
    if (!positions) return ERR_NOMEM;
    for (int r = 0; r < ranks->count; r++) {
        evicting->trace[r] = (struct kern_trace){.lengths = reporting.rank[r].lengths,
                                                 .positions = positions + first[r],
                                                 .entries_max = reporting.rank[r].entries};
        evicting->due[r].trace = &evicting->trace[r];
    }
    rc = evict_one(ranks, evicting);
    if (!rc) {
        trace->entries = 0;
        for (int stream = 0; stream < stream_count(ranks); stream++) {
            trace->lengths[stream] = own_length(ranks, stream);
            trace->entries += (size_t)trace->lengths[stream];
        }
        merge_lists(ranks, first, positions, sizeof *positions, trace->entries_max,
                    trace->positions);
    }
    mem_free(positions);
    return rc;
}

static int op_evict(struct kern *kern, const struct kern_evict *due, int count) {
    struct ranks *ranks = ranks_of(kern);
    int rc = 0;
    for (int i = 0; i < count && !rc; i++) {
        struct evicting evicting = {0};
        for (int r = 0; r < ranks->count; r++) evicting.due[r] = due[i];
        rc = due[i].trace ? evict_traced(ranks, &evicting, due[i].trace)
                          : evict_one(ranks, &evicting);
    }
    return rc;
}

/* ---- Snapshots --------------------------------------------------------------------------------
 */

struct copying {
    int slot, block;
    int only; /* this rank, or -1: all */
    size_t size[COMM_RANKS_MAX];
    void *to[COMM_RANKS_MAX];
    struct kern_block from[COMM_RANKS_MAX];
    int codes[COMM_RANKS_MAX];
};

static bool takes_part(const struct copying *copying, int rank) {
    return copying->only < 0 || copying->only == rank;
}

static void size_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct copying *copying = arg;
    if (takes_part(copying, rank))
        copying->size[rank] = kern->ops->snapshot_size(kern, copying->slot, copying->block);
}

static void export_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct copying *copying = arg;
    if (takes_part(copying, rank))
        copying->codes[rank] =
            kern->ops->snapshot_export(kern, copying->slot, copying->block, copying->to[rank]);
}

static void import_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct copying *copying = arg;
    if (takes_part(copying, rank) && copying->from[rank].data)
        copying->codes[rank] =
            kern->ops->snapshot_import(kern, copying->slot, copying->block, &copying->from[rank]);
}

static struct snapshot_shape whole_shape(const struct ranks *ranks) {
    return (struct snapshot_shape){&ranks->whole, ranks->page_slots};
}

static struct snapshot_shape own_shape(const struct ranks *ranks) {
    return (struct snapshot_shape){&ranks->own, ranks->page_slots};
}

/* A stream's block is its rank's. */
static struct copying stream_block(const struct ranks *ranks, int slot, int block) {
    return (struct copying){.slot = slot,
                            .block = 1 + own_number(ranks, block - 1),
                            .only = owner_of(ranks, block - 1)};
}

/* Block 0 of all ranks, each `own` bytes. */
static int export_parts(struct ranks *ranks, struct copying *copying, char **parts, size_t *own) {
    each_rank(ranks, size_on, copying);
    *own = copying->size[0];
    *parts = mem_try_alloc((size_t)ranks->count, *own);
    if (!*parts) return ERR_NOMEM;
    for (int r = 0; r < ranks->count; r++) copying->to[r] = *parts + (size_t)r * *own;
    each_rank(ranks, export_on, copying);
    return first_error(ranks, copying->codes);
}

/* All parts are equally long, and only the window makes them longer. */
static size_t size_of_whole(const struct ranks *ranks, size_t own) {
    struct snapshot_shape whole = whole_shape(ranks), part = own_shape(ranks);
    for (int32_t window = 0; window <= KERN_WINDOW_MAX; window++)
        if (snapshot_arrays(&part, window).size == own) return snapshot_arrays(&whole, window).size;
    CHECK_MSG(false, "a block of %zu bytes", own);
    return 0;
}

static size_t op_snapshot_size(struct kern *kern, int slot, int block) {
    struct ranks *ranks = ranks_of(kern);
    struct copying copying = {.slot = slot, .only = 0};
    if (block > 0) copying = stream_block(ranks, slot, block);
    each_rank(ranks, size_on, &copying);
    return block > 0 ? copying.size[copying.only] : size_of_whole(ranks, copying.size[0]);
}

static int op_snapshot_export(struct kern *kern, int slot, int block, void *to) {
    struct ranks *ranks = ranks_of(kern);
    if (block > 0) {
        struct copying copying = stream_block(ranks, slot, block);
        copying.to[copying.only] = to;
        each_rank(ranks, export_on, &copying);
        return copying.codes[copying.only];
    }
    struct copying copying = {.slot = slot, .only = -1};
    struct snapshot_shape whole = whole_shape(ranks), part = own_shape(ranks);
    char *parts = NULL;
    size_t own;
    int rc = export_parts(ranks, &copying, &parts, &own);
    for (int r = 0; r < ranks->count && !rc; r++)
        if (ranks->heads[r].speaks)
            snapshot_join(&whole, &part, ranks->heads[r].first, parts + (size_t)r * own, to);
    mem_free(parts);
    return rc;
}

static int op_snapshot_check(struct kern *kern, const struct kern_block *blocks, int count,
                             int32_t tokens, struct kern_report *report, struct fault *fault) {
    struct snapshot_shape whole = whole_shape(ranks_of(kern));
    struct snapshot_slot slot;
    return snapshot_check(&whole, blocks, count, tokens, &slot, report, fault);
}

/* All that share the stream's head take its block. */
static int import_stream(struct ranks *ranks, int slot, int block, const struct kern_block *from) {
    struct copying copying = stream_block(ranks, slot, block);
    int head = (block - 1) % ranks->whole.heads_kv;
    copying.only = -1;
    for (int r = 0; r < ranks->count; r++) {
        int first = ranks->heads[r].first;
        if (head >= first && head < first + ranks->heads[r].heads_kv) copying.from[r] = *from;
    }
    each_rank(ranks, import_on, &copying);
    return first_error(ranks, copying.codes);
}

static int op_snapshot_import(struct kern *kern, int slot, int block,
                              const struct kern_block *from) {
    struct ranks *ranks = ranks_of(kern);
    if (block > 0) return import_stream(ranks, slot, block, from);
    struct snapshot_shape whole = whole_shape(ranks), part = own_shape(ranks);
    size_t own = snapshot_arrays(&part, snapshot_read_slot(from).window).size;
    struct copying copying = {.slot = slot, .only = -1};
    char *parts = mem_try_alloc((size_t)ranks->count, own);
    if (!parts) return ERR_NOMEM;
    for (int r = 0; r < ranks->count; r++) {
        copying.from[r] = (struct kern_block){parts + (size_t)r * own, own};
        snapshot_split(&whole, &part, ranks->heads[r].first, from->data, parts + (size_t)r * own);
    }
    each_rank(ranks, import_on, &copying);
    mem_free(parts);
    return first_error(ranks, copying.codes);
}

/* ---- Statistics, sampling, the end ------------------------------------------------------------
 */

struct asking {
    struct kern_cache_stats stats[COMM_RANKS_MAX];
    struct fault faults[COMM_RANKS_MAX];
    int codes[COMM_RANKS_MAX];
};

static void stats_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct asking *asking = arg;
    kern->ops->cache_stats(kern, &asking->stats[rank]);
}

static void op_cache_stats(struct kern *kern, struct kern_cache_stats *stats) {
    struct ranks *ranks = ranks_of(kern);
    struct asking asking = {0};
    each_rank(ranks, stats_on, &asking);
    *stats = (struct kern_cache_stats){0};
    for (int r = 0; r < ranks->count; r++) {
        if (!ranks->heads[r].speaks) continue;
        stats->pages_used += asking.stats[r].pages_used;
        stats->entries_evicted += asking.stats[r].entries_evicted;
    }
    stats->rank_cap_hits = asking.stats[0].rank_cap_hits; /* all have found the same */
}

static void check_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct asking *asking = arg;
    asking->codes[rank] = kern->ops->cache_check(kern, &asking->faults[rank]);
}

static int op_cache_check(struct kern *kern, struct fault *fault) {
    struct ranks *ranks = ranks_of(kern);
    struct asking asking = {0};
    each_rank(ranks, check_on, &asking);
    for (int r = 0; r < ranks->count; r++)
        if (asking.codes[r])
            return fault_set(fault, asking.codes[r], asking.faults[r].field, "rank %d: %s", r,
                             asking.faults[r].text);
    return 0;
}

/* Rank 0 has the logits, and the caller is its thread. */
static int op_sample(struct kern *kern, const float *logits, int rows, int vocab,
                     const struct kern_sample *params, struct kern_sampled *out) {
    struct ranks *ranks = ranks_of(kern);
    struct kern *first = ranks->rank[0];
    return first->ops->sample(first, on(view_as(ranks, logits, false), 0), rows, vocab, params,
                              out);
}

static void sync_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct asking *asking = arg;
    asking->codes[rank] = kern->ops->sync(kern);
}

static int op_sync(struct kern *kern) {
    struct asking asking = {0};
    each_rank(ranks_of(kern), sync_on, &asking);
    return first_error(ranks_of(kern), asking.codes);
}

static void op_bind(struct kern *kern) {
    struct kern *first = ranks_of(kern)->rank[0];
    if (first->ops->bind) first->ops->bind(first);
}

static void close_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)arg;
    if (kern) kern->ops->close(kern);
    ranks->rank[rank] = NULL;
}

static void op_close(struct kern *kern) {
    struct ranks *ranks = ranks_of(kern);
    if (ranks->team) each_rank(ranks, close_on, NULL);
    cpu_pool_close(ranks->team);
    mem_free(ranks->regions);
    mem_free(ranks->lengths);
    mem_free(ranks);
}

/* ---- Opening ----------------------------------------------------------------------------------
 */

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
    .share = op_share,
    .embed = op_embed,
    .rms_norm = op_rms_norm,
    .matmul = op_matmul,
    .glu = op_glu,
    .gather_rows = op_gather_rows,
    .gate = op_gate,
    .cache_open = op_cache_open,
    .begin_step = op_begin_step,
    .qk_rope = op_qk_rope,
    .write_kv = op_write_kv,
    .attend = op_attend,
    .evict = op_evict,
    .truncate = op_truncate,
    .fork = op_fork,
    .release = op_release,
    .report = op_report,
    .snapshot_size = op_snapshot_size,
    .snapshot_export = op_snapshot_export,
    .snapshot_check = op_snapshot_check,
    .snapshot_import = op_snapshot_import,
    .cache_stats = op_cache_stats,
    .cache_check = op_cache_check,
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

/* What a rank's backend cannot do, all together cannot. */
static void fill_ops(struct ranks *ranks) {
    const struct kern_ops *own = ranks->rank[0]->ops;
    snprintf(ranks->name, sizeof ranks->name, "%s, %d ranks", own->name, ranks->count);
    ranks->ops = table;
    ranks->ops.name = ranks->name;
    ranks->ops.cache_info = own->cache_info;
    ranks->ops.rule_check = own->rule_check;
    if (!own->share) ranks->ops.share = NULL;
    if (own->snapshot_export) return;
    ranks->ops.snapshot_size = NULL;
    ranks->ops.snapshot_export = NULL;
    ranks->ops.snapshot_check = NULL;
    ranks->ops.snapshot_import = NULL;
}

int ranks_open(const struct ranks_options *options, struct kern **out, struct fault *fault) {
    struct opening opening = {.options = options};
    CHECK(options->ranks >= 1 && options->ranks <= COMM_RANKS_MAX);
    struct ranks *ranks = mem_try_alloc(1, sizeof *ranks);
    if (!ranks) return fault_set(fault, ERR_NOMEM, "", "no memory for the ranks");
    ranks->count = options->ranks;
    int rc = cpu_pool_open(options->ranks, &ranks->team);
    if (rc)
        fault_set(fault, rc, "", "cannot start the ranks' threads");
    else
        each_rank(ranks, open_on, &opening);
    for (int r = 0; r < ranks->count && !rc; r++)
        if (opening.codes[r])
            rc = fault_set(fault, opening.codes[r], opening.faults[r].field, "%s",
                           opening.faults[r].text);
    if (rc) {
        op_close(&ranks->base);
        return rc;
    }
    fill_ops(ranks);
    ranks->base.ops = &ranks->ops;
    *out = &ranks->base;
    return 0;
}
