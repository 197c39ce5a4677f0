/* Tells kinds of files apart by their first bytes, for messages about a file that is not what it
 * should be: people save web pages, pointers and archives under the names of models. Pure; any
 * thread. */
#ifndef KEEPD_BASE_KIND_H
#define KEEPD_BASE_KIND_H

#include <stddef.h>

#include "base/err.h"

enum file_kind { KIND_GGUF, KIND_SAFETENSORS, KIND_JSON };

#define KIND_BYTES 512 /* first bytes of a file that are enough to know its kind */

/* Returns 0 if the bytes are of the wanted kind or of no known kind. Otherwise ERR_UNSUPPORTED: the
 * fault's text says what `name`, "the file" or a path, is, and what to do. A file that is empty or
 * begins with zeros is ERR_MALFORMED. */
int kind_check(const void *data, size_t size, enum file_kind wanted, const char *field,
               const char *name, struct fault *fault);

/* Makes the fault for a file that ends before the end that its own header promises: ERR_MALFORMED,
 * "the file is incomplete: 93 of 98 MB". `needed` is 0 if the full size is not known. */
int kind_incomplete(const char *field, size_t size, size_t needed, struct fault *fault);

#endif
