/* How a model's texts become vectors, as its files say: modules.json and 1_Pooling/config.json of a
 * directory of sentence-transformers, {architecture}.pooling_type of a GGUF file. */
#ifndef KEEPD_MODEL_POOLING_H
#define KEEPD_MODEL_POOLING_H

#include "base/err.h"

enum model_pooling {
    MODEL_POOL_UNSAID, /* the files do not say it */
    MODEL_POOL_LAST,   /* the last token's output */
    MODEL_POOL_MEAN,   /* the mean over all tokens */
    MODEL_POOL_CLS     /* the first token's */
};

struct gguf;

struct pooling {
    enum model_pooling how;
    /* The part that the files ask for and keepd has not, for people; "": nothing. Such a model
     * still answers chats, and gives vectors where the pooling is chosen. */
    char other[96];
    /* sentence-transformers' max_seq_length: longer texts are cut there; 0: the files say nothing
     */
    int tokens_max;
};

/* A directory without modules.json has what 1_Pooling/config.json says. A file that cannot be read,
 * or is no JSON, is a fault. */
int pooling_of_directory(const char *dir, struct pooling *out, struct fault *fault);
int pooling_of_gguf(const struct gguf *gguf, struct pooling *out, struct fault *fault);

#endif
