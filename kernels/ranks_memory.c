/* The memory of several ranks (kernels/ranks_int.h): allocations, whose addresses on rank 0 stand
 * for the array on all ranks; weights, gates and experts, of which each rank has a part. */
#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "kernels/ranks_int.h"

/* An allocation: [base, base + size) stands for rank[r][size] on rank r. */
struct ranks_region {
    char *base;
    size_t size;
    void *rank[COMM_RANKS_MAX];
    bool split; /* each rank holds a part of every row */
};

/* ---- Regions ---- */

/* Returns the last region that begins at or before p. */
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

struct ranks_view ranks_view_of(const struct ranks *ranks, const void *p) {
    if (!p) return (struct ranks_view){0};
    struct ranks_region *region = region_of(ranks, p);
    return (struct ranks_view){region, (size_t)((const char *)p - region->base)};
}

struct ranks_view ranks_view_as(const struct ranks *ranks, const void *p, bool split) {
    struct ranks_view view = ranks_view_of(ranks, p);
    CHECK(!view.region || view.region->split == split);
    return view;
}

struct ranks_view ranks_view_to(const struct ranks *ranks, const void *p, bool split) {
    struct ranks_view view = ranks_view_of(ranks, p);
    CHECK(view.region);
    view.region->split = split;
    return view;
}

bool ranks_view_split(struct ranks_view view) {
    return view.region->split;
}

float *ranks_view_on(struct ranks_view view, int rank) {
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

void *ranks_mem_alloc(struct kern *kern, size_t bytes) {
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

void ranks_mem_free(struct kern *kern, void *mem) {
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
int ranks_upload(struct kern *kern, void *to, const void *from, size_t bytes) {
    struct ranks *ranks = ranks_of(kern);
    struct ranks_view view = ranks_view_to(ranks, to, false);
    struct memory memory = {.bytes = bytes, .from = from};
    for (int r = 0; r < ranks->count; r++) memory.rank[r] = ranks_view_on(view, r);
    ranks_each(ranks, upload_on, &memory);
    return ranks_error(ranks, memory.codes);
}

int ranks_download(struct kern *kern, void *to, const void *from, size_t bytes) {
    struct ranks *ranks = ranks_of(kern);
    struct kern *first = ranks->rank[0];
    return first->ops->download(first, to, ranks_view_on(ranks_view_as(ranks, from, false), 0),
                                bytes);
}

/* ---- Weights and gates ---- */

int ranks_shape_check(struct kern *kern, const struct kern_shape *shape, struct fault *fault) {
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

void ranks_weight_free(struct kern *kern, struct kern_weight *weight) {
    if (!weight) return;
    ranks_each(ranks_of(kern), free_weight_on, weight);
    mem_free(weight);
}

int ranks_weight_load(struct kern *kern, const struct kern_matrix *parts, int part_count,
                      enum kern_shard shard, struct kern_weight **out, struct fault *fault) {
    struct load load = {.parts = parts, .part_count = part_count};
    load.weight = mem_try_alloc(1, sizeof *load.weight);
    if (!load.weight) return fault_set(fault, ERR_NOMEM, "", "no memory for a weight");
    load.weight->shard = shard;
    ranks_each(ranks_of(kern), weight_on, &load);
    int rc = ranks_fault(ranks_of(kern), load.codes, load.faults, fault);
    if (rc)
        ranks_weight_free(kern, load.weight);
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

void ranks_gate_free(struct kern *kern, struct kern_gate *gate) {
    if (!gate) return;
    ranks_each(ranks_of(kern), free_gate_on, gate);
    mem_free(gate);
}

int ranks_gate_load(struct kern *kern, const struct kern_gate_spec *spec, struct kern_gate **out,
                    struct fault *fault) {
    struct load load = {.spec = spec};
    load.gate = mem_try_alloc(1, sizeof *load.gate);
    if (!load.gate) return fault_set(fault, ERR_NOMEM, "", "no memory for a gate");
    ranks_each(ranks_of(kern), gate_load_on, &load);
    int rc = ranks_fault(ranks_of(kern), load.codes, load.faults, fault);
    if (rc)
        ranks_gate_free(kern, load.gate);
    else
        *out = load.gate;
    return rc;
}

struct experts_load {
    const struct kern_experts_spec *spec;
    struct ranks_view gate_up_bias, down_bias, select_bias, factors;
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
    own.gate_up_bias = ranks_view_on(load->gate_up_bias, rank);
    own.down_bias = ranks_view_on(load->down_bias, rank);
    own.select_bias = ranks_view_on(load->select_bias, rank);
    own.factors = ranks_view_on(load->factors, rank);
    load->codes[rank] =
        kern->ops->experts_load(kern, &own, &load->experts->rank[rank], &load->faults[rank]);
    mem_free(weights);
}

static void free_experts_on(struct ranks *ranks, struct kern *kern, int rank, void *arg) {
    (void)ranks;
    struct kern_experts *experts = arg;
    if (experts->rank[rank]) kern->ops->experts_free(kern, experts->rank[rank]);
}

void ranks_experts_free(struct kern *kern, struct kern_experts *experts) {
    if (!experts) return;
    ranks_each(ranks_of(kern), free_experts_on, experts);
    mem_free(experts);
}

int ranks_experts_load(struct kern *kern, const struct kern_experts_spec *spec,
                       struct kern_experts **out, struct fault *fault) {
    struct ranks *ranks = ranks_of(kern);
    struct experts_load load = {.spec = spec,
                                .gate_up_bias = ranks_view_as(ranks, spec->gate_up_bias, false),
                                .down_bias = ranks_view_as(ranks, spec->down_bias, false),
                                .select_bias = ranks_view_as(ranks, spec->select_bias, false),
                                .factors = ranks_view_as(ranks, spec->factors, false)};
    load.experts = mem_try_alloc(1, sizeof *load.experts);
    if (!load.experts) return fault_set(fault, ERR_NOMEM, "", "no memory for a layer's experts");
    ranks_each(ranks, experts_load_on, &load);
    int rc = ranks_fault(ranks, load.codes, load.faults, fault);
    if (rc)
        ranks_experts_free(kern, load.experts);
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

int ranks_borrow(struct kern *kern, const struct kern *owner) {
    struct ranks *ranks = ranks_of(kern);
    struct borrowing borrowing = {.owner = (const struct ranks *)owner};
    CHECK(ranks->count == borrowing.owner->count);
    ranks_each(ranks, borrow_on, &borrowing);
    ranks->owner = borrowing.owner;
    return ranks_error(ranks, borrowing.codes);
}
