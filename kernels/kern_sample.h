/* Sampling: the parameters of one row, and what is reported of its token. */
#ifndef KEEPD_KERNELS_KERN_SAMPLE_H
#define KEEPD_KERNELS_KERN_SAMPLE_H

#include <stdbool.h>
#include <stdint.h>

struct kern_logit_bias {
    int32_t token;
    float bias;
};

/* A token of a sequence, with the number of its occurrences in the answer. */
struct kern_seen {
    int32_t token, outputs;
};

/* How a row's token is drawn. Order: penalties (repetition over prompt and output; presence and
 * frequency over output only) -> logit_bias -> banned, allowed -> temperature -> top_k -> top_p ->
 * min_p -> xtc; then argmax(logit + Gumbel(Philox4x32-10(seed; position, token id))), ties to the
 * lowest id. temperature 0 is the plain argmax after penalties and bias. */
struct kern_sample {
    const struct kern_seen *seen; /* prompt and output, each token once; read for penalties */
    int32_t seen_count;
    const struct kern_logit_bias *bias;
    int32_t bias_count;
    const int32_t
        *banned; /* tokens that must not be chosen (min_tokens, ignore_eos); may be NULL */
    int32_t banned_count;
    /* Tokens that may be chosen: bit t % 32 of word t / 32, (vocab + 31) / 32 words, at least one
     * bit of a token in the vocabulary. NULL: all. */
    const uint32_t *allowed;
    float temperature, top_p, min_p;
    float repetition, presence, frequency; /* 1, 0, 0 = off */
    int32_t top_k;                         /* 0 = off */
    /* XTC ("exclude top choices", github.com/oobabooga/text-generation-webui, pull request 6335):
     * with this probability all tokens are left out, except the last in order, that have at least
     * the threshold as their part of what the cuts before have left. The draw is the noise of token
     * KERN_XTC_NOISE at the position. */
    float xtc_probability, xtc_threshold; /* 0 = off; above 0.5 no two tokens reach it */
    uint64_t seed;
    int32_t position;  /* position of the token being sampled */
    int32_t top_count; /* number of alternatives to report, <= KERN_TOP_MAX; -1 = no log-probability
                          at all */
    int32_t forced;    /* >= 0: report this token's log-probability instead of sampling (echo) */
};

#define KERN_TOP_MAX   20
#define KERN_XTC_NOISE UINT32_MAX /* no vocabulary has this id */

struct kern_sampled {
    int32_t token;
    float logprob; /* log softmax of the raw logits */
    int32_t rank;  /* 1 = most likely by the raw logits; without a logprob 0, or -1
                      where the token's logit is not a finite number */
    int32_t top_token[KERN_TOP_MAX]; /* by raw logit, highest first, ties to the lowest id */
    float top_logprob[KERN_TOP_MAX];
};

#endif
