/* Saves a model with its matrices rounded, so that later starts need not round them. */
#ifndef KEEPD_MODEL_SAVE_H
#define KEEPD_MODEL_SAVE_H

#include "model/model.h"

/* Writes the model of options->dir to `to`, which must not exist, as a start with
 * options->quantization (Q8 or Q4) would hold it: a directory becomes a directory with tokenizer,
 * template and gates, a GGUF file becomes one GGUF file with the same metadata. Unless
 * options->calibrate, a start from `to` then has bitwise the same weights; the default of the
 * cache's type is the same but for a GGUF file in F32. Rows that are no whole blocks are
 * ERR_UNSUPPORTED, and so is a model whose matrices are all in few bits already. What is written
 * appears whole, by a rename, or not at all; an interrupted run leaves TO.partial. *bytes: of the
 * weights that were written. Errors name the option, tensor or file; the model's own faults are
 * found before (model_open with check_only). */
int model_save(const struct model_options *options, const char *to, size_t *bytes,
               struct fault *fault);

#endif
