/* The identity of a model and its gates: SHA-256 of their files. State files are tied to it. */
#ifndef KEEPD_MODEL_IDENTITY_H
#define KEEPD_MODEL_IDENTITY_H

#include <stdbool.h>

#include "base/err.h"
#include "base/sha256.h"
#include "kernels/quantize.h"

/* config.json and, unless they are `random`, all weight files of the directory, names and sizes
 * included; of a GGUF model its file, or all of them in order; with quantised weights another than
 * without. Reads them whole: seconds per ten gigabytes.
 */
int identity_model(const char *dir, bool random, enum quantization quantization,
                   uint8_t out[SHA256_BYTES], struct fault *fault);

/* The gates file; zero for "", no gates. */
int identity_gates(const char *path, uint8_t out[SHA256_BYTES], struct fault *fault);

#endif
