/* Saves a model with its matrices rounded, so that later starts need not round them. */
#ifndef KEEPD_MODEL_SAVE_H
#define KEEPD_MODEL_SAVE_H

#include "model/model.h"

/* Writes the model of options->dir to `to`, which must not exist, in the form in which a start with
 * options->quantization (Q8 or Q4) would hold it. A directory becomes a directory with tokenizer,
 * template and gates; a GGUF file becomes one GGUF file with the same metadata. Unless
 * options->calibrate is set, a start from `to` has bitwise the same weights; the default type of
 * the cache is the same, too, except for a GGUF file in F32. ERR_UNSUPPORTED: rows that are not
 * whole blocks, or a model whose matrices are all in few bits already. The result appears whole, by
 * a rename, or not at all; an interrupted run leaves TO.partial. *bytes: size of the written
 * weights. Errors name the option, tensor or file; faults of the model are found before, by
 * model_open with check_only. */
int model_save(const struct model_options *options, const char *to, size_t *bytes,
               struct fault *fault);

#endif
