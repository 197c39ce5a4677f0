/* JSON files of a model's directory. Any thread. */
#ifndef KEEPD_MODEL_JSON_FILE_H
#define KEEPD_MODEL_JSON_FILE_H

#include <cjson/cJSON.h>

#include "base/err.h"

/* Reads DIR/NAME. *out is its tree, freed with json_free; NULL if there is no such file. Faults
 * name the file. */
int json_file_read(const char *dir, const char *name, cJSON **out, struct fault *fault);

#endif
