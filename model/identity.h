/* The identity of a model and its gates: SHA-256 of their files. State files are tied to it. */
#ifndef KEEPD_MODEL_IDENTITY_H
#define KEEPD_MODEL_IDENTITY_H

#include <stdbool.h>

#include "base/err.h"
#include "base/sha256.h"
#include "kernels/quantize.h"

/* Computes the identity of a model. A directory enters with config.json and, unless the weights are
 * `random`, all weight files, with their names and sizes; a GGUF model with its file, or all of
 * them in order. Quantised weights give another identity. Reads the files whole: seconds for ten
 * gigabytes. */
int identity_model(const char *dir, bool random, enum quantization quantization,
                   uint8_t out[SHA256_BYTES], struct fault *fault);

/* Computes the identity of a gates file; all zeros for "", no gates. */
int identity_gates(const char *path, uint8_t out[SHA256_BYTES], struct fault *fault);

#endif
