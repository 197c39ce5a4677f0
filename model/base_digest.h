/* Digests of a model's numbers, by which gates name the model that they were trained for (gates.h).
 * A GGUF file and a directory with the same numbers have the same digests, whatever the types.
 *
 *   vectors   SHA-256 of every vector of factors and biases: the final norm, then each layer's, in
 *             the order of layer_slots (tensors.h). Quantised files have them in full, so every
 *             quantisation of a model has the same `vectors`.
 *   matrices  SHA-256 of the rows 0, n / 2 and n - 1 of every matrix of n rows: the embeddings,
 *             then each layer's. The LM head and matrices of experts are left out, and those in
 *             fp8.
 *
 * A model that keepd saved with rounded matrices has the `matrices` of its source, which the
 * directory's config.json or the GGUF file's BASE_MATRICES_KEY states (save.h).
 *
 * A number enters as float32, little-endian. Rows are numbered as in a directory of Hugging Face,
 * also those of q and k that converters to GGUF reorder; Gemma's norms enter with their 1 added. */
#ifndef KEEPD_MODEL_BASE_DIGEST_H
#define KEEPD_MODEL_BASE_DIGEST_H

#include "base/err.h"
#include "base/sha256.h"
#include "model/model.h"
#include "model/weights.h"

/* The key of a GGUF file that keepd saved: `matrices` before they were rounded. */
#define BASE_MATRICES_KEY "keepd.base.matrices"

struct base_digest {
    char vectors[SHA256_HEX], matrices[SHA256_HEX]; /* lower case; "" = unknown */
};

/* `weights`: of the model with this configuration, checked by model_load_weights. Reads a few rows
 * of each matrix. ERR_NOMEM leaves nothing behind. */
int base_digest(const struct model_config *config, const struct weights *weights,
                struct base_digest *out);

/* The same, of the model at `path`, a directory or a GGUF file, that loads; `context` as in
 * model_options. */
int base_digest_of(const char *path, int context, struct base_digest *out, struct fault *fault);

#endif
