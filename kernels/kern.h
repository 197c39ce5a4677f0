/* The backend: a vtable of operations on arrays. One static table per backend; the CPU's reference
 * path is the standard that all others are compared with.
 *
 * A backend owns its weights, its activations and the whole paged key/value cache: page tables,
 * lengths, free pages, reference counts and side arrays. Callers pass numbers and arrays, never
 * engine types, and learn the length of a stream only through `report`.
 *
 * Threads: one engine thread calls everything here; the backend may use workers inside a call.
 * Operations may be queued; `sync` waits and returns the first error since the last `sync`.
 * `sample` includes a `sync`: a step that samples waits once, there. Activations are backend memory
 * that the host does not read, except through `download`.
 *
 * Shapes: row-major; "rows" are the tokens of one step. T = number of tokens a sequence has seen.
 *
 * Every backend promises: the result for one row depends only on that row's sequence, never on the
 * other rows of the step, on how a prompt is split over steps, or on the thread schedule. This
 * holds bitwise, for one backend on one kind of machine and one thread count. */
#ifndef KEEPD_KERNELS_KERN_H
#define KEEPD_KERNELS_KERN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "kernels/kern_cache.h"
#include "kernels/kern_recurrent.h"
#include "kernels/kern_rule.h"
#include "kernels/kern_sample.h"
#include "kernels/kern_step.h"
#include "kernels/kern_types.h"
#include "kernels/kern_weights.h"

struct kern_worth; /* kernels/worth.h */

struct kern_ops {
    const char *name; /* "cpu-reference", "cpu-amx", ... */
    /* How products round activations, for people; lives as long as the instance. NULL: in one way
     * for all weights. */
    const char *activations;
    bool blocks;       /* weight_load takes matrices in blocks */
    bool scale_groups; /* and E4M3 matrices with several factors for a row, of groups of a multiple
                          of KERN_BLOCK inputs */
    bool peeks;        /* recurrent states can stay what they are before a step's tokens */
    bool both_ways;    /* attend has kern_attend_options.both_ways */
    bool reads_latent; /* rules that read keys (rule_reads_keys) run where keys hold the values */
    void (*close)(struct kern *kern);
    /* From now on the calling thread uses the instance; opening binds, too. A thread that uses
     * several instances binds each before using it. NULL: any thread may use any instance. */
    void (*bind)(struct kern *kern);

    /* Zeroed memory; NULL when the device's memory is exhausted. */
    void *(*mem_alloc)(struct kern *kern, size_t bytes);
    void (*mem_free)(struct kern *kern, void *mem);
    int (*upload)(struct kern *kern, void *to, const void *from, size_t bytes);
    int (*download)(struct kern *kern, void *to, const void *from, size_t bytes);

    /* Can the backend compute such a model? ERR_UNSUPPORTED names the obstacle. NULL: any model. */
    int (*shape_check)(struct kern *kern, const struct kern_shape *shape, struct fault *fault);

    /* Weights. Several parts with equal `cols` are joined by rows ([q; k; v], [gate; up]); either
     * all of them are in blocks or none. ERR_UNSUPPORTED: also when a rank's part of the inputs
     * would cut blocks. On ERR_UNSUPPORTED or ERR_NOMEM nothing is left behind. */
    int (*weight_load)(struct kern *kern, const struct kern_matrix *parts, int part_count,
                       enum kern_shard shard, struct kern_weight **out, struct fault *fault);
    void (*weight_free)(struct kern *kern, struct kern_weight *weight);
    int (*gate_load)(struct kern *kern, const struct kern_gate_spec *spec, struct kern_gate **out,
                     struct fault *fault);
    void (*gate_free)(struct kern *kern, struct kern_gate *gate);
    /* Makes one stage of loaded matrices and biases, which outlive it. The arrays of the spec are
     * read only during the call. ERR_NOMEM leaves nothing behind. */
    int (*experts_load)(struct kern *kern, const struct kern_experts_spec *spec,
                        struct kern_experts **out, struct fault *fault);
    void (*experts_free)(struct kern *kern, struct kern_experts *experts);
    /* From now on the instance may use everything that `owner`, of the same kind, has loaded so
     * far: weights, gates, experts and read-only memory. The owner keeps them and outlives this
     * instance. ERR_NOMEM. NULL: every instance loads its own. */
    int (*borrow)(struct kern *kern, const struct kern *owner);

    /* Layer operations; all activations are float32. */
    void (*embed)(struct kern *kern, float *x, const struct kern_weight *table, float scale,
                  const int32_t *tokens, int rows); /* x = scale * table[token]; the engine has
                                                       checked the range of the ids */
    void (*rms_norm)(struct kern *kern, float *y, const float *x, const float *weight, int rows,
                     int dim, float eps);
    /* y = (x - mean) / sqrt(variance + eps) * weight + bias, of each row (arXiv 1607.06450); the
     * variance is divided by dim. bias NULL: none. NULL: this backend has none. */
    void (*layer_norm)(struct kern *kern, float *y, const float *x, const float *weight,
                       const float *bias, int rows, int dim, float eps);
    /* y[r, j] += x[r, j]. NULL: this backend has none. */
    void (*add)(struct kern *kern, float *y, const float *x, int rows, int dim);
    void (*matmul)(struct kern *kern, float *y, const float *x, const struct kern_weight *weight,
                   const float *bias /* [outputs] or NULL */, int rows, enum kern_matmul_mode mode);
    /* y[r] += up down x[r] for the rows r = rows[0..count), no row twice. NULL: this backend has
     * none. */
    void (*low_rank)(struct kern *kern, float *y, const float *x,
                     const struct kern_low_rank *products, const int32_t *rows, int count);
    /* y += rms_norm(x) * weight, of each row; x is left as what was added. */
    void (*add_norm)(struct kern *kern, float *y, float *x, const float *weight, int rows, int dim,
                     float eps);
    void (*glu)(struct kern *kern, float *y, const float *gate_up, int rows, int d_ff,
                enum kern_activation activation); /* y[r, j] = activation(gate_up[r, j]) *
                                                     gate_up[r, d_ff + j] */
    /* y[r, j] = activation(gate[r, j]) * up[r, j]; rows of `up` begin up_stride numbers after one
     * another. NULL: this backend has none. */
    void (*glu_apart)(struct kern *kern, float *y, const float *gate, const float *up,
                      int64_t up_stride, int rows, int dim, enum kern_activation activation);
    /* x[r, j] *= *factor, backend memory. NULL: this backend has none. */
    void (*scale)(struct kern *kern, float *x, const float *factor, int rows, int dim);
    /* x[r, j] *= sigmoid(gates[r, j]), or sigmoid(gates[r]) with one gate for each row. */
    void (*open_gates)(struct kern *kern, float *x, const float *gates, int rows, int dim,
                       bool one);
    /* See struct kern_experts_spec. `logits`: [rows, count] of the router, whole on every rank. */
    void (*experts)(struct kern *kern, float *y /* [rows, d_model] */, const float *x,
                    const float *logits, const struct kern_experts *experts, int rows);
    /* x = cap tanh(x / cap), of logits: memory that a product with KERN_SHARD_VOCAB has filled. */
    void (*soft_cap)(struct kern *kern, float *x, int rows, int dim, float cap);
    void (*gather_rows)(struct kern *kern, float *y, const float *x, const int32_t *index,
                        int count, int dim);
    void (*gate)(struct kern *kern, float *log_beta /* [rows, heads_kv] */, const float *x,
                 const struct kern_gate *gate, int rows);

    /* Cache. qkv rows are [q (heads_q * D) | k (heads_kv * D) | v (heads_kv * D)], with the numbers
     * of the layer; without v where keys hold the values (kern_cache_options.latent). */
    int (*cache_open)(struct kern *kern, const struct kern_cache_options *options,
                      struct fault *fault);
    /* Describes a cache of these layers, heads and dtype. */
    void (*cache_info)(const struct kern_cache_options *options, struct kern_cache_info *info);
    /* The largest number of pages that a cache of this shape could have in addition to present
     * allocations, on a device without other users; options->pages is ignored. ERR_NOMEM: no page
     * fits; the fault says why. NULL: the cache is in host memory. */
    int (*cache_fit)(struct kern *kern, const struct kern_cache_options *options, int64_t *pages,
                     struct fault *fault);
    /* Can this backend run the rule? ERR_UNSUPPORTED names the unsupported member of kern_rule.
     * begin_step and evict answer the same, but without reads_latent they also refuse rules that
     * read keys in a cache of latent vectors. Pure, any thread. */
    int (*rule_check)(const struct kern_rule *rule, struct fault *fault);
    /* Allocates what the rule needs for the slot in addition to its `pages` pages, the most that it
     * will have (on a device: its query ring, and the rooms of its evictions and of attention that
     * is added up), before the slot's first step with the rule; release gives it back. ERR_NOMEM
     * concerns this sequence alone, whereas a step that has to allocate it fails as a whole. A fork
     * allocates its own ring unless its slot was prepared. NULL: nothing is needed. */
    int (*prepare)(struct kern *kern, int slot, const struct kern_rule *rule, int64_t pages);
    int (*begin_step)(
        struct kern *kern,
        const struct kern_batch *batch); /* takes the pages for all layers; ERR_FULL takes none (a
                                            broken reservation: the caller logs it) */
    void (*qk_rope)(struct kern *kern, float *qkv, const float *q_norm, const float *k_norm,
                    float eps, const struct kern_rope *rope,
                    const struct kern_batch *batch); /* optional per-head RMSNorm, then rotation */
    /* RMSNorm over the queries of all heads together, and over the keys of all heads, in place:
     * q_norm [heads_q * D], k_norm [heads_kv * D] of the model. Squares are added per head, then in
     * the order of the heads, so that the result does not depend on the number of ranks. */
    void (*qk_norm)(struct kern *kern, float *qkv, const float *q_norm, const float *k_norm,
                    float eps, const struct kern_batch *batch);
    void (*write_kv)(struct kern *kern, int layer, const float *qkv,
                     const float *log_beta /* [rows, heads_kv] or NULL = 0 */,
                     const struct kern_batch *batch);
    void (*attend)(struct kern *kern, int layer,
                   float *out /* [rows, heads_q * numbers of a value] */, const float *qkv,
                   const struct kern_batch *batch,
                   const struct kern_attend_options *options); /* after write_kv of the layer */
    /* Makes room for products of loaded matrices, one for each head (latent_in, latent_out).
     * ERR_NOMEM. NULL: this backend has neither. */
    int (*latent_reserve)(struct kern *kern, struct kern_weight *const *weights /* [heads] */,
                          int heads);
    /* Makes rows of qkv for latent attention, before rotation: of rows of q, [still | turned] of
     * each head, and of rows of `entries`, c before its norm and what rotates. NULL: this backend
     * has none. */
    void (*latent_in)(struct kern *kern, float *qkv, const float *q, const float *entries,
                      const struct kern_latent *latent, int rows);
    /* y[r, h] = up_v[h] x[r, h], of the results of attention, [rows, heads * rank]. NULL: this
     * backend has none. */
    void (*latent_out)(struct kern *kern, float *y /* [rows, heads * dim_v] */, const float *x,
                       const struct kern_latent *latent, int rows);
    /* A short convolution (LFM2, arXiv 2511.23404) of each channel c by itself:
     *   u[t] = B[t] x[t],  y[t] = C[t] (taps[c][0] u[t - width + 1] + ... + taps[c][width - 1]
     * u[t]) in ascending order of the tokens. u of tokens before the step is in the recurrent state
     * `state` of each span's slot, whose units are channels of width - 1 numbers, the oldest first;
     * the state is brought forward by the step. Rows of bcx are [B | C | x]. NULL: this backend
     * has none. */
    void (*short_conv)(struct kern *kern, int state, float *y /* [rows, channels] */,
                       const float *bcx, const float *taps /* [channels, width] */, int channels,
                       int width, const struct kern_batch *batch);
    /* A gated delta rule. Rows of `in` are [q | k | v | z] of all heads, rows of `rates` [b | a],
     * [2 heads_v], whole on every rank; both are used up. q, k and v become SiLU of their short
     * convolutions, q and k are divided by their lengths, q by sqrt(dim_k). For each token,
     *   S <- exp(decay softplus(a + bias)) S,  S <- S + k (x) sigmoid(b) (v - S k),  y = S q,
     * then y <- norm rms(y) SiLU(z) of each head. States as for short_conv; their units are key
     * heads (kern_delta_head_floats). NULL: this backend has none. */
    void (*delta)(struct kern *kern, int state, float *y /* [rows, heads_v * dim_v] */, float *in,
                  float *rates, const struct kern_delta *delta, const struct kern_batch *batch);
    /* Mamba-2. Rows of `in` are [z | x] of all heads; rows of `shared`, whole on every rank, are
     * [B | C] of all groups, then [dt] of all heads; both are used up. x, B and C become SiLU of
     * their short convolutions. For each token and head, with r = softplus(dt + bias),
     *   S <- exp(decay r) S + B (x) r x,  y = C S + skip x,
     * then y <- y SiLU(z) and, with a norm, y <- norm rms(y) over the heads of a group together.
     * States as for short_conv; their units are heads (kern_mamba_head_floats), in front of which
     * are the numbers of B's and C's channels. NULL: this backend has none. */
    void (*mamba)(struct kern *kern, int state, float *y /* [rows, heads * dim] */, float *in,
                  float *shared, const struct kern_mamba *mamba, const struct kern_batch *batch);
    /* Measures what the layer's entries are worth to the step's queries: kernels/worth.h. NULL:
     * this backend cannot. */
    int (*worth)(struct kern *kern, int layer, const struct kern_worth *worth, const float *heads,
                 const float *qkv, const struct kern_batch *batch,
                 const struct kern_attend_options *options);
    int (*evict)(struct kern *kern, const struct kern_evict *due, int count);
    /* Drops entries at or after pos. ERR_UNSUPPORTED: the slot has recurrent states that such
     * tokens have brought forward. After a step that peeks it must come before the slot's next
     * step, and the caller then calls short_conv, delta and mamba again for the tokens that are
     * left. */
    int (*truncate)(struct kern *kern, int slot, int32_t pos);
    /* NULL: this backend cannot shift. ERR_FULL (no free pages for copies of shared pages) changes
     * nothing. */
    int (*shift)(struct kern *kern, const struct kern_shift *shift);
    int (*fork)(struct kern *kern, int from,
                int to);                          /* shares all pages, copy on write; `to` empty */
    void (*release)(struct kern *kern, int slot); /* frees all pages of the slot */
    int (*report)(struct kern *kern, int slot, struct kern_report *report);
    /* Snapshots, block by block, so that a large one can be copied over many steps: a slot that no
     * batch names does not change, not even through its forks. */
    size_t (*snapshot_size)(struct kern *kern, int slot, int block); /* 0: the device failed */
    int (*snapshot_export)(struct kern *kern, int slot, int block, void *to);
    /* Are these the blocks of a slot that has seen `tokens` tokens? Reads nothing beyond them,
     * whatever they hold. ERR_MALFORMED, ERR_UNSUPPORTED, ERR_LIMIT (more positions than this cache
     * has) or ERR_NOMEM say why they cannot be imported; otherwise *report holds entries, pages and
     * members. Any thread, once the cache is open. */
    int (*snapshot_check)(struct kern *kern, const struct kern_block *blocks, int count,
                          int32_t tokens, struct kern_report *report, struct fault *fault);
    /* Imports one of the checked blocks, so that a large snapshot can be imported over many steps:
     * block 0 first, into an unused slot, then every other block once; the slot is usable when it
     * has all. After ERR_FULL, ERR_NOMEM or ERR_DEVICE, release frees what was imported. */
    int (*snapshot_import)(struct kern *kern, int slot, int block, const struct kern_block *from);
    void (*cache_stats)(struct kern *kern, struct kern_cache_stats *stats);
    int (*cache_check)(struct kern *kern,
                       struct fault *fault); /* every page is in exactly one place; for tests */

    /* Samples tokens and returns the result of `sync`: if there was no error, `out` is filled. */
    int (*sample)(struct kern *kern, const float *logits /* [rows, vocab] */, int rows, int vocab,
                  const struct kern_sample *params, struct kern_sampled *out);
    int (*sync)(struct kern *kern);
};

struct kern {
    const struct kern_ops *ops;
};

#endif
