/* How a model's texts become vectors, as its files say: modules.json and the modules' config.json
 * of a directory of sentence-transformers, {architecture}.pooling_type and .dense_2_feat_out,
 * .dense_3_feat_out of a GGUF file. */
#ifndef KEEPD_MODEL_POOLING_H
#define KEEPD_MODEL_POOLING_H

#include <stdbool.h>

#include "base/err.h"

enum model_pooling {
    MODEL_POOL_UNSAID, /* the files do not say it */
    MODEL_POOL_LAST,   /* the last token's output */
    MODEL_POOL_MEAN,   /* the mean over all tokens */
    MODEL_POOL_CLS     /* the first token's */
};

struct gguf;

#define POOLING_DENSE_MAX   2
#define POOLING_FOLDER_SIZE 64

/* A Dense module: a product of the pooled vector, perhaps a bias, and tanh or nothing. */
struct pooling_dense {
    bool there, bias, tanh;
    int width;                        /* numbers that it gives */
    char folder[POOLING_FOLDER_SIZE]; /* folder with its files, in the directory */
};

#define POOLING_PROMPTS_MAX 64

/* A text that files name, to be put in front of those that become vectors. */
struct pooling_prompt {
    const char *name, *text;
};

struct pooling {
    enum model_pooling how;
    struct pooling_dense dense[POOLING_DENSE_MAX];
    /* The part that the files ask for and keepd has not, for people; "": nothing. Such a model
     * still answers chats, and gives vectors where the pooling is chosen. */
    char other[96];
    /* sentence-transformers' max_seq_length: longer texts are cut there; 0: the files say nothing
     */
    int tokens_max;
    struct pooling_prompt *prompts; /* [prompt_count], owned, with their texts */
    int prompt_count;
};

void pooling_close(struct pooling *pooling);
/* A directory without modules.json has what 1_Pooling/config.json says. A file that cannot be read,
 * or is no JSON, is a fault. */
int pooling_of_directory(const char *dir, struct pooling *out, struct fault *fault);
int pooling_of_gguf(const struct gguf *gguf, struct pooling *out, struct fault *fault);

#endif
