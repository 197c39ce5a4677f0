/* The weights of an encoder of pictures: names in files, and loading. Declarations for vision.c and
 * save.c alone. */
#ifndef KEEPD_MODEL_VISION_WEIGHTS_H
#define KEEPD_MODEL_VISION_WEIGHTS_H

#include "model/vision.h"

struct weights;

/* All memory is the backend's, unless said otherwise. Members that the model has not are NULL. */
struct vision_layer {
    float *attn_norm, *attn_norm_bias;
    struct kern_weight *qkv, *o; /* [3 width, width], [width, width] */
    float *qkv_bias, *o_bias;
    float *ff_norm, *ff_norm_bias;
    struct kern_weight *up, *down; /* [ff, width], or [gate; up] with `gated`; [width, ff] */
    float *up_bias, *down_bias;
};

/* Makes rows of embeddings of squares of patches. */
struct vision_merger {
    float *norm, *norm_bias;   /* [width] for each patch, or [joined] for all patches of a row */
    float *pool_norm;          /* [width] for the means of patches; NULL: they are joined */
    struct kern_weight *join;  /* [width, joined]; NULL: patches go to the next one as they are */
    struct kern_weight *first; /* [joined, joined], with `projects` [text_width, width]; NULL: there
                                  is one product */
    float *first_bias;
    struct kern_weight *last; /* [text_width, joined], or [text_width, width] of pooled ones, or
                                 with `projects` [text_width, text_width] */
    float *last_bias;
};

struct vision_weights {
    struct kern_weight *patch; /* [width, 3 patch^2], the sum over the frames */
    float *patch_bias, *patch_norm;
    float *table; /* [table_side^2, width] embeddings of positions; host memory */
    float *ones;  /* for products without gates */
    struct vision_layer *layers;
    struct vision_merger mergers[1 + VISION_DEEP_MAX]; /* the last one's, then those in between */
    uint8_t identity[SHA256_BYTES];
    size_t bytes;
};

/* Returns whether a tensor of the model's files belongs to the encoder. */
bool vision_weights_own(const struct vision_config *config, const char *tensor);

/* Loads all, or with options->check_only checks names, shapes and types. After an error, too,
 * vision_weights_close frees what is there. */
int vision_weights_load(struct kern *kern, const struct vision_config *config,
                        const struct weights *weights, const struct vision_options *options,
                        struct vision_weights *out, struct fault *fault);
void vision_weights_close(struct kern *kern, const struct vision_config *config,
                          struct vision_weights *weights);

#endif
