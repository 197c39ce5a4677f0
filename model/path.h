/* Says what is at a path that should be a model: most models that do not start are not broken, but
 * incomplete, of another format, or in another folder. Any thread. */
#ifndef KEEPD_MODEL_PATH_H
#define KEEPD_MODEL_PATH_H

#include <stdbool.h>

#include "base/err.h"

/* Returns 0 for a GGUF file, for a folder with the files of a model, and if nothing can be read,
 * which the caller's open will report. Otherwise the fault, of the field "model", says what is
 * there instead and what to do. `config_only`: a folder needs no weights. Reads names, and the
 * first bytes of a file. */
int model_path_check(const char *path, bool config_only, struct fault *fault);

#endif
