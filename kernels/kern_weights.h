/* Weights as callers describe them to a backend (kernels/kern.h): matrices, how ranks split them,
 * experts and retention gates. The backend copies what it loads into its own layout. */
#ifndef KEEPD_KERNELS_KERN_WEIGHTS_H
#define KEEPD_KERNELS_KERN_WEIGHTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/kern_types.h"

/* How tensor parallelism splits a matrix over ranks (kernels/ranks.h). Callers describe matrices,
 * gates and the cache as a whole; each rank's backend takes its part (kernels/shard.h). */
enum kern_shard {
    KERN_SHARD_NONE,
    KERN_SHARD_ROWS, /* split outputs; results stay split */
    KERN_SHARD_COLS, /* split inputs; the input rows are split, too. Results are summed over ranks
                        before bias and KERN_ADD and are whole */
    KERN_SHARD_VOCAB /* split outputs; looked-up rows are whole. Products (KERN_SET, no bias) are
                        whole on rank 0, where they are sampled */
};

struct block; /* kernels/blocks.h */

/* Makes rows of a matrix in blocks when a backend wants them, so that a large matrix does not lie
 * in memory a second time on its way there. Any thread may call it. A row is made more than once: a
 * backend first looks at all of them. */
struct kern_reader {
    void (*read)(struct kern_reader *reader, int64_t row, struct block *to /* [row_blocks] */);
    /* Rows [first, first + count) will hardly be wanted again: their memory may go. */
    void (*done)(struct kern_reader *reader, int64_t first, int64_t count);
    int64_t row_blocks;
};

/* A matrix in the file's layout: [rows = outputs, cols = inputs], row-major. `data` may be
 * unaligned and is read only during weight_load, as is `reader`. */
struct kern_matrix {
    const void *data;
    struct kern_reader *reader;     /* not NULL: makes the rows, and data is NULL */
    int64_t first_row, first_block; /* with a reader: where the matrix begins in what it makes */
    enum kern_dtype dtype;
    int64_t rows, cols;
    int64_t groups; /* KERN_SHARD_ROWS: number of groups of rows that stay together, such as the
                       rows of a KV head; fewer groups than ranks are shared by ranks. 0: every row
                       is a group */
    int64_t stride; /* elements from one row to the next; 0: cols, in blocks whole ones */
    /* E4M3: [rows][scales] factors, each of `group` inputs of a row; otherwise NULL. The first
       input is number `skipped` of its group. group 0: one factor for a whole row. */
    const float *scale;
    int64_t scales, group, skipped;
    /* Above 0: products with these rows are multiplied by it, before bias and KERN_ADD. A device
       may multiply it into the numbers instead, which it then rounds once more. */
    float factor;
};

/* Factors from one row of an E4M3 matrix to the next. */
static inline int64_t kern_row_scales(const struct kern_matrix *matrix) {
    return matrix->group ? matrix->scales : 1;
}

/* Facts about a model that a backend gets before anything is loaded. */
struct kern_shape {
    int layers, d_model, d_ff, heads_q, heads_kv, head_dim, vocab;
    int heads_kv_least;     /* where layers have different numbers of KV heads: the least; else 0 */
    int experts, expert_ff; /* 0: no layer is a mixture of experts; d_ff 0: every layer is */
    int shared_ff;          /* width of the network that every token uses beside experts; 0: none */
    int conv_channels;      /* channels of layers with a short convolution; 0: there is none */
    int delta_heads;        /* key heads of layers with a gated delta rule; 0: there is none */
    int mamba_heads;        /* heads of Mamba-2 layers; 0: there is none */
};

/* Mixture of experts: a layer's feed-forward network as `count` gated networks, of which each row
 * uses `used`: those with the largest router logits (ties: the lower expert).
 *
 *   y += sum over the chosen e, ascending, of s[e] down_e(glu(gate_up_e(x)))
 *
 * s is the softmax of the logits of all experts, or with `sigmoid` the sigmoid of each, times
 * `scale`; with `normalise` the chosen ones are first divided by their sum. With `select_bias`
 * (DeepSeek-V3, arXiv 2412.19437) those with the largest s + bias are chosen, s being what it is
 * without the two factors. With groups, experts of groups_used groups alone may be chosen: of
 * `groups` equal parts, those whose two largest s + bias have the largest sum (ties: the lower
 * group); with `group_best` (DeepSeek-V2, arXiv 2405.04434) those with the largest. Biases are
 * added to each product; `factors` multiply s[e] behind all else. With `sets` there is nothing in y
 * that the sum is added to. Experts that are `ungated` have one product in front, which is its own
 * gate: glu(x, x). Tensor parallelism splits every expert like a dense network, by d_ff, and every
 * rank chooses for itself. */
#define KERN_EXPERTS_MAX       1024
#define KERN_EXPERT_GROUPS_MAX 32
struct kern_experts_spec {
    int count, used; /* 1 <= used <= count <= KERN_EXPERTS_MAX */
    int d_model, d_ff;
    bool normalise, sigmoid;
    float scale;              /* 0 is 1 */
    int groups, groups_used;  /* groups 0 or 1: no groups; else count / groups >= 2, and the used
                                 groups have `used` experts or more */
    bool group_best;          /* a group counts as much as its best expert */
    const float *select_bias; /* [count] backend memory, or NULL */
    enum kern_activation activation;
    bool ungated, sets;
    const float *factors;               /* [count] backend memory, or NULL */
    struct kern_weight *const *gate_up; /* [count] [gate; up], or [up], KERN_SHARD_ROWS */
    struct kern_weight *const *down;    /* [count] KERN_SHARD_COLS */
    const float *gate_up_bias;          /* [count, 2 d_ff] backend memory, or NULL */
    const float *down_bias;             /* [count, d_model] backend memory, or NULL */
};
struct kern_experts;

/* Retention gate of one layer (TRIM-KV, arXiv 2512.03324; global gates, arXiv 2605.09649):
 *   h = silu(w1 x + b1);  rg10 only: h = silu(w2 h + b2)
 *   log_beta[head] = logsigmoid(last[row[head]] . h + bias[row[head]])       (<= 0)
 * With per-head embeddings (paper tying) w1 is [H * width, d] and head j reads its own slice of h.
 * All float32 on the host, copied by the backend at gate_load. */
struct kern_gate_spec {
    const float *w1, *b1;     /* [embeddings * width, d_model], [embeddings * width] */
    const float *w2, *b2;     /* rg10: [width, width], [width]; otherwise NULL */
    const float *last, *bias; /* [rows, width], [rows] */
    const int32_t *row;       /* [heads_kv]: row of `last` for each head of this layer */
    int width, d_model, heads_kv, row_count;
    int embeddings; /* 1, or heads_kv with paper tying */
};
struct kern_gate;

#endif
