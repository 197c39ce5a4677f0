/* Says in words what is at a path that should be a model: most models that do not start are not at
 * fault themselves, but incomplete, of another format, or in another folder. Any thread. */
#ifndef KEEPD_MODEL_PATH_H
#define KEEPD_MODEL_PATH_H

#include <stdbool.h>

#include "base/err.h"

/* 0: a GGUF file, or a folder that holds the files of a model; or nothing that can be read, which
 * is the opener's to say. Otherwise the fault, of the field "model", says what is there instead and
 * what to do. `config_only`: a folder needs no weights. Reads names, and the first bytes of a file.
 */
int model_path_check(const char *path, bool config_only, struct fault *fault);

#endif
