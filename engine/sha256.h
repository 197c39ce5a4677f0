/* SHA-256 (FIPS 180-4) of a buffer, as lower-case hex: to tell whether gates belong to a base. */
#ifndef KEEPD_ENGINE_SHA256_H
#define KEEPD_ENGINE_SHA256_H

#include <stddef.h>

#define SHA256_HEX 65 /* with the NUL */

void sha256_hex(const void *data, size_t size, char out[SHA256_HEX]);

#endif
