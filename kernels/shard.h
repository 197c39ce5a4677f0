/* A rank's part of a model (kernels/comm.h): pure arithmetic, the same on every rank.
 *
 *   what                                   split by
 *   q, k, v (rows), streams, gate heads    KV heads, whole groups of query heads with each
 *   gate, up (rows); glu                   d_ff, of every expert, too
 *   short convolutions; recurrent states   channels
 *   delta rules (rows); recurrent states   their key heads, whole groups of value heads with each
 *   Mamba-2 (rows of z and x); states      heads
 *   latent attention: up_v                 query heads; their products with queries, up_k, and the
 *                                          entries' stream are on every rank
 *   o, down (columns)                      query heads, d_ff: results are sums over ranks
 *   embedding, LM head (rows)              vocabulary: results are gathered
 *   norms, residual, router, Mamba-2's B, C and dt,
 *   gate's hidden layer                    not at all: every rank has all of it
 *
 * More ranks than KV heads share each head: all of them hold its entries and observe the attention
 * of its whole group, so that all of them evict the same, but each computes the attention of its
 * own query heads alone. The lowest of them speaks for the head where heads are counted. */
#ifndef KEEPD_KERNELS_SHARD_H
#define KEEPD_KERNELS_SHARD_H

#ifdef __cplusplus
extern "C" {
#endif

#include "base/err.h"
#include "kernels/comm.h"
#include "kernels/kern_weights.h"

struct shard_heads {
    int heads_q, heads_kv;    /* heads of this rank, whole groups */
    int first;                /* the rank's first KV head in the model */
    int query_first, queries; /* query heads of each group whose attention this rank computes */
    bool speaks;
};

/* The rank's part of `heads_q` and `heads_kv`, which shard_check has accepted. */
struct shard_heads shard_heads(const struct comm *comm, int heads_q, int heads_kv);

#ifdef __CUDACC__
#define SHARD_FUNCTION static inline __host__ __device__
#else
#define SHARD_FUNCTION static inline
#endif

/* The lowest rank that holds a KV head. */
SHARD_FUNCTION int shard_owner(int ranks, int heads_kv, int head) {
    return heads_kv >= ranks ? head / (heads_kv / ranks) : head * (ranks / heads_kv);
}
#undef SHARD_FUNCTION

/* A rank's part of `total` things: even parts if the number of ranks divides it, otherwise parts
 * that differ by one. */
struct shard_range {
    int64_t first, count;
};
struct shard_range shard_range(const struct comm *comm, int64_t total);

/* A rank's part of a matrix; `rows`: its outputs. */
struct kern_matrix shard_matrix(const struct comm *comm, const struct kern_matrix *whole,
                                enum kern_shard shard, struct shard_range *rows);
/* Reduces `spec` to the rank's heads of a gate. */
void shard_gate(const struct comm *comm, struct kern_gate_spec *spec);

/* Can `ranks` ranks split the model? ERR_UNSUPPORTED names the dimension that cannot be split. */
int shard_check(int ranks, const struct kern_shape *shape, struct fault *fault);

#ifdef __cplusplus
}
#endif

#endif
