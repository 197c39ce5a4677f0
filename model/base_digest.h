/* Digests of a model's numbers. Gates name the model that they were trained for by them (gates.h).
 * A GGUF file and a directory with the same numbers have the same digests, whatever their types.
 *
 *   vectors   SHA-256 of every vector of factors and biases: the final norm, then each layer's, in
 *             the order of layer_slots (tensors.h). Quantised files store vectors in full, so every
 *             quantisation of a model has the same `vectors`.
 *   matrices  SHA-256 of the rows 0, n / 2 and n - 1 of every matrix of n rows: the embeddings,
 *             then each layer's. The LM head, matrices of experts and matrices in fp8 are left out.
 *
 * A model that keepd saved with rounded matrices has the `matrices` of its source, which the
 * directory's config.json or the GGUF file's BASE_MATRICES_KEY states (save.h).
 *
 * Each number enters as float32, little-endian. Rows are numbered as in a directory of Hugging
 * Face, also those of q and k that converters to GGUF reorder; the weights of Gemma's norms enter
 * with their 1 added. */
#ifndef KEEPD_MODEL_BASE_DIGEST_H
#define KEEPD_MODEL_BASE_DIGEST_H

#include "base/err.h"
#include "base/sha256.h"
#include "model/model.h"
#include "model/weights.h"

/* The key of a GGUF file that keepd saved: `matrices` of its source, before rounding. */
#define BASE_MATRICES_KEY "keepd.base.matrices"

struct base_digest {
    char vectors[SHA256_HEX], matrices[SHA256_HEX]; /* lower case; "" = unknown */
};

/* Computes the digests. `weights` belong to a model with this configuration and were checked by
 * model_load_weights. Reads a few rows of each matrix. ERR_NOMEM leaves nothing to free. */
int base_digest(const struct model_config *config, const struct weights *weights,
                struct base_digest *out);

/* Computes the digests of the model at `path`, a directory or a GGUF file that keepd can load;
 * `context` as in model_options. */
int base_digest_of(const char *path, int context, struct base_digest *out, struct fault *fault);

#endif
