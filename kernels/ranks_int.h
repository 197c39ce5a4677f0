/* Shared by the files of ranks: ranks.c gives operations to all ranks and maps their memory,
 * ranks_cache.c makes one cache of theirs. Nobody else includes it. */
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

/* ranks_cache.c */
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
