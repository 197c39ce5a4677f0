/* Shared by the files of ranks: ranks.c gives operations to all ranks, ranks_memory.c makes one
 * memory of theirs, ranks_cache.c one cache. Nobody else includes it. */
#ifndef KEEPD_KERNELS_RANKS_INT_H
#define KEEPD_KERNELS_RANKS_INT_H

#include "kernels/cpu/team.h"
#include "kernels/ranks.h"
#include "kernels/shard.h"
#include "kernels/snapshot.h"

struct ranks {
    struct kern base; /* first: a struct kern * is a struct ranks * */
    struct kern_ops ops;
    char name[64];
    int count;
    struct kern *rank[COMM_RANKS_MAX];
    struct cpu_team *team; /* a thread for each rank; the caller is rank 0's */

    struct ranks_region *regions; /* sorted by address */
    size_t region_count, region_room;
    const struct ranks *owner; /* owner of memory that this instance may read: kern_ops.borrow */

    struct kern_cache_options whole; /* options of the whole cache, once it is open */
    struct kern_cache_options own;   /* options of every rank */
    int member_slots, state_pages;
    struct shard_heads heads[COMM_RANKS_MAX];   /* in the layers with the most KV heads; all layers
                                                   are shared alike */
    struct snapshot_layer *layers, *own_layers; /* [layers] of the whole and of every rank */
    int32_t *lengths;                           /* [count][own streams], for reports and traces */
};

static inline struct ranks *ranks_of(struct kern *kern) {
    return (struct ranks *)kern;
}

/* Work of one rank in a call: its backend, its number, and the call's arguments. */
typedef void rank_work(struct ranks *ranks, struct kern *kern, int rank, void *arg);

void ranks_each(struct ranks *ranks, rank_work *work, void *arg);
/* The error of a call: errors are equal on all ranks, or one rank's alone. */
int ranks_error(const struct ranks *ranks, const int *codes);
/* The same with the reason: that of the first rank that gives one. */
int ranks_fault(const struct ranks *ranks, const int *codes, const struct fault *faults,
                struct fault *fault);

/* ---- ranks_memory.c ---- */

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

/* An argument of an operation: the allocation that holds the array, and where the array begins. All
 * zero for NULL. */
struct ranks_view {
    struct ranks_region *region;
    size_t offset;
};

struct ranks_view ranks_view_of(const struct ranks *ranks, const void *p);
/* Views of rows that must be whole or, if `split`, of which each rank must hold a part. */
struct ranks_view ranks_view_as(const struct ranks *ranks, const void *p, bool split);
/* Views of rows that are about to be written; they are whole or split from now on. */
struct ranks_view ranks_view_to(const struct ranks *ranks, const void *p, bool split);
bool ranks_view_split(struct ranks_view view);
/* Returns the array's address on a rank. */
float *ranks_view_on(struct ranks_view view, int rank);

/* Functions of struct kern_ops. */
void *ranks_mem_alloc(struct kern *kern, size_t bytes);
void ranks_mem_free(struct kern *kern, void *mem);
int ranks_upload(struct kern *kern, void *to, const void *from, size_t bytes);
int ranks_download(struct kern *kern, void *to, const void *from, size_t bytes);
int ranks_shape_check(struct kern *kern, const struct kern_shape *shape, struct fault *fault);
void ranks_weight_free(struct kern *kern, struct kern_weight *weight);
int ranks_weight_load(struct kern *kern, const struct kern_matrix *parts, int part_count,
                      enum kern_shard shard, struct kern_weight **out, struct fault *fault);
void ranks_gate_free(struct kern *kern, struct kern_gate *gate);
int ranks_gate_load(struct kern *kern, const struct kern_gate_spec *spec, struct kern_gate **out,
                    struct fault *fault);
void ranks_experts_free(struct kern *kern, struct kern_experts *experts);
int ranks_experts_load(struct kern *kern, const struct kern_experts_spec *spec,
                       struct kern_experts **out, struct fault *fault);
int ranks_borrow(struct kern *kern, const struct kern *owner);

/* ---- ranks_cache.c ---- */

int ranks_cache_open(struct kern *kern, const struct kern_cache_options *options,
                     struct fault *fault);
int ranks_cache_fit(struct kern *kern, const struct kern_cache_options *options, int64_t *pages,
                    struct fault *fault);
int ranks_begin_step(struct kern *kern, const struct kern_batch *batch);
int ranks_prepare(struct kern *kern, int slot, const struct kern_rule *rule, int64_t pages);
int ranks_truncate(struct kern *kern, int slot, int32_t pos);
int ranks_shift(struct kern *kern, const struct kern_shift *shift);
int ranks_fork(struct kern *kern, int from, int to);
void ranks_release(struct kern *kern, int slot);
int ranks_report(struct kern *kern, int slot, struct kern_report *report);
int ranks_evict(struct kern *kern, const struct kern_evict *due, int count);
size_t ranks_snapshot_size(struct kern *kern, int slot, int block);
int ranks_snapshot_export(struct kern *kern, int slot, int block, void *to);
int ranks_snapshot_check(struct kern *kern, const struct kern_block *blocks, int count,
                         int32_t tokens, struct kern_report *report, struct fault *fault);
int ranks_snapshot_import(struct kern *kern, int slot, int block, const struct kern_block *from);
void ranks_cache_stats(struct kern *kern, struct kern_cache_stats *stats);
int ranks_cache_check(struct kern *kern, struct fault *fault);

#endif
