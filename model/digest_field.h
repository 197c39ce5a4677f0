/* Fields of JSON that hold a SHA-256 digest in hex. Pure. */
#ifndef KEEPD_MODEL_DIGEST_FIELD_H
#define KEEPD_MODEL_DIGEST_FIELD_H

#include <cjson/cJSON.h>

#include "base/err.h"
#include "base/sha256.h"

/* A digest in hex, a string of `object`; absent: *out stays. `path` is the object's name in errors:
 * ERR_INVALID. */
int digest_field_read(const cJSON *object, const char *path, const char *key, char out[SHA256_HEX],
                      struct fault *fault);
/* Likewise from text; `field` names it in errors. */
int digest_read(const char *hex, const char *field, char out[SHA256_HEX], struct fault *fault);

#endif
