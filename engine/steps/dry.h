/* The DRY penalty ("don't repeat yourself") of one sequence: tokens that would go on with something
 * that the text has said before get a lower logit, the lower the longer the repetition is.
 *
 * Of the last `last` tokens of prompt and answer, every place is compared with the end of the text.
 * Where at least `allowed` tokens before a place are the text's last ones, the token at the place
 * would repeat; its penalty is multiplier * base^(length - allowed), of the longest such length. A
 * repetition counts only from the last sequence breaker on (a text such as a line end, wherever
 * tokens have it), and tokens that hold a breaker get no penalty. The definition is that of
 * llama.cpp's sampler, with one difference: breakers are found in the text, however it was cut into
 * tokens.
 *
 * Penalties depend on the text alone, so drafted tokens do not change them. They are computed from
 * the text anew for each token, in a time that grows with `last` alone (the Z algorithm, then one
 * look-up for each place); which tokens hold breakers is found once for each token of the text.
 * Memory for that is taken when it is opened. Thread: the engine's. */
#ifndef KEEPD_ENGINE_STEPS_DRY_H
#define KEEPD_ENGINE_STEPS_DRY_H

#include <limits.h>

#include "engine/engine_request.h"
#include "kernels/kern_sample.h"

#define DRY_POWERS 64 /* penalties that are computed once */

typedef size_t dry_bytes_fn(const void *arg, int32_t id, const char **bytes);

struct dry {
    const struct engine_request *request; /* borrowed; NULL: closed */
    dry_bytes_fn *token_bytes;
    const void *arg;
    int32_t window;                 /* tokens that are compared, at most */
    int32_t *lengths;               /* [window] owned */
    struct kern_logit_bias *bias;   /* [request->bias_count + window] owned */
    int32_t bias_count;             /* entries of `bias` after the last call */
    int32_t asked;                  /* tokens of the text at the last call */
    bool *holds;                    /* [window] owned: does the token at place p % window hold a
                                       breaker? */
    uint16_t *found;                /* owned: hash table of the tokens in `bias` */
    float power[DRY_POWERS];        /* penalties of repetitions, from the shortest on */
    uint32_t starts[UCHAR_MAX + 1]; /* bit i % 32: breaker i begins with the byte */
    size_t longest;                 /* bytes of the longest breaker */
    int32_t known;                  /* tokens of the text in which breakers were looked for */
    int32_t begins;                 /* tokens up to the end of the last breaker */
    char tail[ENGINE_BREAKER_MAX];
    size_t tail_size; /* bytes of the text before `known` that a breaker may begin in */
};

/* For texts of up to `room` tokens. A request without the penalty leaves it closed. ERR_NOMEM. */
int dry_open(struct dry *dry, const struct engine_request *request, dry_bytes_fn *token_bytes,
             const void *arg, int32_t room);
void dry_close(struct dry *dry); /* a zeroed one is closed */
/* Returns the request's biases and behind them one for each penalised token; valid until the next
 * call. tokens[0, count): prompt and answer, never fewer than at the last call. */
const struct kern_logit_bias *dry_biases(struct dry *dry, const int32_t *tokens, int32_t count,
                                         int32_t *bias_count);

#endif
