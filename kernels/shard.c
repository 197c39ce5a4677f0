#include "kernels/shard.h"

struct shard_range shard_range(const struct comm *comm, int64_t total) {
    int64_t first = total * comm->rank / comm->ranks;
    return (struct shard_range){first, total * (comm->rank + 1) / comm->ranks - first};
}

struct shard_heads shard_heads(const struct comm *comm, int heads_q, int heads_kv) {
    int group = heads_q / heads_kv;
    if (heads_kv >= comm->ranks) {
        int count = heads_kv / comm->ranks;
        return (struct shard_heads){.heads_q = heads_q / comm->ranks,
                                    .heads_kv = count,
                                    .first = comm->rank * count,
                                    .queries = group,
                                    .speaks = true};
    }
    int sharing = comm->ranks / heads_kv, queries = group / sharing;
    return (struct shard_heads){.heads_q = group,
                                .heads_kv = 1,
                                .first = comm->rank / sharing,
                                .query_first = comm->rank % sharing * queries,
                                .queries = queries,
                                .speaks = comm->rank % sharing == 0};
}
