/* Fields of JSON that hold a SHA-256 digest in hex. Pure. */
#ifndef KEEPD_MODEL_DIGEST_FIELD_H
#define KEEPD_MODEL_DIGEST_FIELD_H

#include <cjson/cJSON.h>

#include "base/err.h"
#include "base/sha256.h"

/* Reads a digest in hex, a string member of `object`. If it is absent, `out` is unchanged. `path`
 * is the object's name in errors: ERR_INVALID. */
int digest_field_read(const cJSON *object, const char *path, const char *key, char out[SHA256_HEX],
                      struct fault *fault);
/* Reads a digest from text; `field` is its name in errors. */
int digest_read(const char *hex, const char *field, char out[SHA256_HEX], struct fault *fault);

#endif
