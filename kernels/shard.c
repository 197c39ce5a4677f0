#include "kernels/shard.h"

#include "base/check.h"
#include "kernels/blocks.h"

struct shard_range shard_range(const struct comm *comm, int64_t total) {
    CHECK(comm->rank >= 0 && comm->rank < comm->ranks);
    int64_t first = total * comm->rank / comm->ranks;
    return (struct shard_range){first, total * (comm->rank + 1) / comm->ranks - first};
}

struct shard_heads shard_heads(const struct comm *comm, int heads_q, int heads_kv) {
    int group = heads_q / heads_kv;
    if (heads_kv >= comm->ranks) {
        int count = heads_kv / comm->ranks;
        CHECK(count * comm->ranks == heads_kv);
        return (struct shard_heads){.heads_q = heads_q / comm->ranks,
                                    .heads_kv = count,
                                    .first = comm->rank * count,
                                    .queries = group,
                                    .speaks = true};
    }
    int sharing = comm->ranks / heads_kv, queries = group / sharing;
    CHECK(sharing * heads_kv == comm->ranks);
    return (struct shard_heads){.heads_q = group,
                                .heads_kv = 1,
                                .first = comm->rank / sharing,
                                .query_first = comm->rank % sharing * queries,
                                .queries = queries,
                                .speaks = comm->rank % sharing == 0};
}

/* Whole groups; if there are more ranks than groups, ranks share a group. */
static struct shard_range own_rows(const struct comm *comm, const struct kern_matrix *whole) {
    int64_t groups = whole->groups > 0 ? whole->groups : whole->rows;
    int64_t size = whole->rows / groups;
    struct shard_range own = {groups * comm->rank / comm->ranks, 1};
    if (groups >= comm->ranks) own = shard_range(comm, groups);
    return (struct shard_range){own.first * size, own.count * size};
}

struct kern_matrix shard_matrix(const struct comm *comm, const struct kern_matrix *whole,
                                enum kern_shard shard, struct shard_range *rows) {
    struct shard_range cols = {0, whole->cols};
    struct kern_matrix own = *whole;
    *rows = (struct shard_range){0, whole->rows};
    if (shard == KERN_SHARD_ROWS) *rows = own_rows(comm, whole);
    if (shard == KERN_SHARD_VOCAB) *rows = shard_range(comm, whole->rows);
    if (shard == KERN_SHARD_COLS) cols = shard_range(comm, whole->cols);
    own.stride = whole->stride > 0 ? whole->stride : whole->cols;
    if (kern_dtype_blocks(whole->dtype)) own.stride = blocks_of(own.stride) * KERN_BLOCK;
    CHECK(rows->first >= 0 && rows->first + rows->count <= whole->rows);
    CHECK(cols.first >= 0 && cols.first + cols.count <= whole->cols);
    own.rows = rows->count;
    own.cols = cols.count;
    size_t first = (size_t)(rows->first * own.stride + cols.first);
    own.first_row += rows->first;
    own.first_block += cols.first / KERN_BLOCK;
    if (own.data)
        own.data = (const char *)whole->data + (kern_dtype_blocks(whole->dtype)
                                                    ? first / KERN_BLOCK * sizeof(struct block)
                                                    : first * kern_dtype_bytes(whole->dtype));
    if (own.scale) own.scale += rows->first * kern_row_scales(whole);
    if (own.group) {
        own.scale += (whole->skipped + cols.first) / own.group;
        own.skipped = (whole->skipped + cols.first) % own.group;
    }
    return own;
}

void shard_gate(const struct comm *comm, struct kern_gate_spec *spec) {
    struct shard_heads own = shard_heads(comm, spec->heads_kv, spec->heads_kv);
    spec->row += own.first;
    spec->heads_kv = own.heads_kv;
    if (spec->embeddings == 1) return;
    size_t skipped = (size_t)own.first * (size_t)spec->width;
    spec->embeddings = own.heads_kv;
    spec->w1 += skipped * (size_t)spec->d_model;
    spec->b1 += skipped;
}

static int shard_refuse(struct fault *fault, int ranks, int count, const char *what) {
    return fault_set(fault, ERR_UNSUPPORTED, "tensor-parallel-size",
                     "the model's %d %s cannot be split over %d ranks", count, what, ranks);
}

int shard_check(int ranks, const struct kern_shape *shape, struct fault *fault) {
    int heads = shape->heads_kv;
    if (heads >= ranks ? heads % ranks : ranks % heads)
        return shard_refuse(fault, ranks, heads, "key/value heads");
    if (shape->heads_kv_least && shape->heads_kv_least % ranks)
        return shard_refuse(fault, ranks, shape->heads_kv_least, "key/value heads of some layers");
    if (shape->heads_q % ranks) return shard_refuse(fault, ranks, shape->heads_q, "query heads");
    if (shape->d_ff % ranks) return shard_refuse(fault, ranks, shape->d_ff, "feed-forward units");
    if (shape->expert_ff % ranks)
        return shard_refuse(fault, ranks, shape->expert_ff, "feed-forward units of an expert");
    if (shape->shared_ff % ranks)
        return shard_refuse(fault, ranks, shape->shared_ff, "feed-forward units beside experts");
    if (shape->conv_channels % ranks)
        return shard_refuse(fault, ranks, shape->conv_channels, "channels of short convolutions");
    if (shape->delta_heads % ranks)
        return shard_refuse(fault, ranks, shape->delta_heads, "key heads of gated delta rules");
    if (shape->mamba_heads % ranks)
        return shard_refuse(fault, ranks, shape->mamba_heads, "heads of Mamba-2 layers");
    if (shape->vocab < ranks) return shard_refuse(fault, ranks, shape->vocab, "tokens");
    return 0;
}
