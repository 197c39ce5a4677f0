/* A GGUF file's metadata as a configuration. */
#ifndef KEEPD_MODEL_CONFIG_GGUF_H
#define KEEPD_MODEL_CONFIG_GGUF_H

#include "model/model.h"
#include "model/weights.h"

/* Pure: the metadata, and what only tensors tell: the vocabulary's size, biases, tied embeddings,
 * frequencies of the rotation. The metadata is put in the words of config.json first, so both are
 * read, checked and refused by the same code; faults name the key of the file. `weights` of a GGUF
 * file; `context` as for model_config_parse. */
int model_config_from_gguf(const struct weights *weights, int context, struct model_config *out,
                           struct fault *fault);

/* Finds whether files of this architecture ("llama") put the two numbers that a rotation turns side
 * by side. false: it is none of this family's (model_config.family), or its files have factors in
 * the numbers of their matrices, so that an adapter's would have to have them, too. */
bool model_gguf_permutes(const char *architecture, const char *family, bool *permutes);

#endif
