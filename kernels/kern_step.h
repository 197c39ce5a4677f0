/* A step of the model: the batch of new tokens, and the parameters of the operations on its rows
 * (adapters, rotation, latent attention, attention). The batch's arrays are the caller's and
 * are valid until the step's end. */
#ifndef KEEPD_KERNELS_KERN_STEP_H
#define KEEPD_KERNELS_KERN_STEP_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/kern_rule.h"
#include "kernels/kern_types.h"

/* `count` new tokens of the sequence in cache slot `slot`: rows [row, row + count) of the step's
 * activations, at positions [pos, pos + count). A slot occurs at most once in a batch. */
struct kern_span {
    int32_t slot;
    int32_t row;
    int32_t count;
    int32_t pos;
    int32_t behind; /* how far the tokens' places lie behind their positions (kernels/places.h) */
    bool peeks;     /* the slot's recurrent states stay those before these tokens, until truncate */
    int32_t second; /* for models that tell two texts apart: the position at which the second one
                       begins; 0: there is one text */
    int32_t adapter;              /* for the model: number of the adapter of these rows; 0: none */
    const struct kern_rule *rule; /* records needed for evictions; NULL: none. Constant during a
                                     sequence's life; read only during the step's calls */
};

/* Rows whose embeddings are not looked up but given; their tokens are 0. */
struct kern_given {
    int32_t row, count; /* in one span */
    bool together;      /* queries see the entries of all these rows, also those behind them: a
                           sliding window bounds only what lies in front */
    int deep; /* further vectors of each row, which are added to its hidden state behind layers 0 to
                 deep - 1 (DeepStack, arXiv 2406.04334); below the number of layers */
    const float *rows; /* [count, 1 + deep, d_model] host memory, valid until the step's end */
};

/* Places of a token in three dimensions: time, height, width (M-RoPE, arXiv 2409.12191). In text
 * the three are equal. */
enum { KERN_AXES = 3 };
struct kern_place {
    int32_t axis[KERN_AXES];
};

struct kern_batch {
    const int32_t *tokens; /* [rows] */
    const struct kern_span *spans;
    int rows;
    int span_count;
    const struct kern_given *given; /* [given_count]; of them backends read `together` alone */
    int given_count;
    /* [rows] where a row's three places differ. NULL: a row's places are its position less what its
     * span is behind. */
    const struct kern_place *places;
};

/* A product of small rank that is added to one of the model's (LoRA, arXiv 2106.09685). `down` is
 * [rank, inputs] and `up` [outputs, rank], loaded so that `up` gives what the model's own product
 * gives: NONE and SHARD_ROWS beside a matrix with SHARD_ROWS, SHARD_COLS and NONE beside one with
 * SHARD_COLS. Callers give backend memory for `count` rows of inputs, of the rank, of outputs. */
struct kern_low_rank {
    const struct kern_weight *down, *up;
    float *in, *low, *out;
};

enum kern_matmul_mode { KERN_SET, KERN_ADD }; /* y = x W^T (+ bias), or y += x W^T (+ bias) */

/* A factor on queries after their rotation: 1 + beta log(1 + floor(place / period)). beta 0: 1. */
struct kern_query_scale {
    float beta;
    int32_t period;
};

/* Rotary embedding, rotate-half pairs (j, j + D/2) of the numbers that rotate (all of a head,
 * unless kern_cache_options.latent says otherwise); cos and sin of place * inv_freq[j], both times
 * `scale` (1 unless the model says so). The place of a token is its position until the sequence is
 * shifted (struct kern_shift), and less behind pictures that have fewer places than rows (struct
 * kern_place). RoFormer, arXiv 2104.09864. */
struct kern_rope {
    const float *inv_freq; /* a number for each pair, host memory, valid as long as the model; a
                              pair with frequency 0 is not changed, not even by `scale` */
    const uint8_t *axes;   /* the place, of a row's three, by which each pair rotates; memory
                              of the host, as long; NULL: all by the first */
    float scale;
    struct kern_query_scale query_scale;
    int layer;           /* the cache's number of the layer whose heads the rows have */
    bool queries;        /* rows have queries alone */
    const float *v_norm; /* [head_dim] weights of an RMSNorm of each value, backend memory; NULL:
                            none */
};

/* Latent attention (DeepSeek-V2, arXiv 2405.04434). A token's key and value of every head are
 * products of one vector c of `rank` numbers, beside `turned` numbers that rotate and that all
 * heads share: k[h] = up_k[h]^T c | r, v[h] = up_v[h] c. The products are left to queries and to
 * results: q . k[h] = (up_k[h] q) . c + ..., so that the cache has c | r alone, one KV head whose
 * values are the first `rank` numbers of its keys (kern_cache_options.latent). */
#define KERN_LATENT_HEADS_MAX 256
struct kern_latent {
    int heads;                       /* at most KERN_LATENT_HEADS_MAX */
    int rank;                        /* numbers of c */
    int still;                       /* numbers of a head's query that do not rotate */
    int turned;                      /* and those behind them that do, even */
    int dim_v;                       /* numbers of a head's result */
    bool neighbours;                 /* the files rotate the numbers 2 i and 2 i + 1 together */
    float eps;                       /* added in the norm of c */
    const float *norm;               /* [rank] backend memory */
    struct kern_weight *const *up_k; /* [heads] of [rank, still], KERN_SHARD_NONE */
    struct kern_weight *const *up_v; /* [heads] of [dim_v, rank], the same */
};

struct kern_attend_options {
    int sliding_window; /* keys with pos <= query pos - this are masked; 0 = none */
    float scale;        /* 1/sqrt(head_dim) unless the model says otherwise */
    float cap; /* soft cap (Gemma 2, arXiv 2408.00118): a scaled product s becomes cap tanh(s / cap)
                  before the mask and the softmax, also where attention is observed; 0: none */
    /* Learned sinks (gpt-oss, arXiv 2508.10925), [heads_q] of the model, backend memory that lives
     * as long as the cache: the softmax of a head has one more term, exp(sink), which has no entry;
     * also where attention is observed. Logits that are joined before a softmax
     * (KERN_GROUP_*_LOGIT) join their sinks, too. NULL: none, as always in a backend without
     * experts. */
    const float *sinks;
    /* Rows have queries alone: the layer has no entries of its own and reads those of another one,
     * after that one's write_kv. Policies do not observe these queries. */
    bool queries;
    /* A query also sees the entries behind it that the step has appended, with a sliding window the
     * next sliding_window - 1 of them. Only for backends with kern_ops.both_ways. */
    bool both_ways;
};

#endif
