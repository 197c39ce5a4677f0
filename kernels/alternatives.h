/* The alternatives of a token, from its whole row of logits: for requests that want more than
 * `sample` reports (KERN_TOP_MAX), up to the whole vocabulary. Runs on the host, on a row that was
 * copied from the backend. */
#ifndef KEEPD_KERNELS_ALTERNATIVES_H
#define KEEPD_KERNELS_ALTERNATIVES_H

#include <stddef.h>
#include <stdint.h>

struct kern_alternative {
    int32_t token; /* -1: the vocabulary has no more */
    float logprob; /* log softmax of the raw logits */
};

/* Bytes of scratch memory for a vocabulary. */
size_t kern_alternatives_scratch(int vocab);

/* Writes the `count` best tokens of a row in the order of struct kern_sampled: by logit, highest
 * first, ties to the lowest id, NaN last. Takes time in proportion to `vocab`, whatever `count` is.
 * Members of `list` beyond the vocabulary get -1 and -inf. */
void kern_alternatives(const float *logits, int vocab, void *scratch, struct kern_alternative *list,
                       int count);

#endif
