/* SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104), by libnettle. */
#ifndef KEEPD_BASE_SHA256_H
#define KEEPD_BASE_SHA256_H

#include <stddef.h>
#include <stdint.h>

#define SHA256_BYTES 32
#define SHA256_HEX   65 /* with the NUL */

/* A digest of data that comes in pieces. */
struct sha256_stream {
    _Alignas(8) unsigned char state[128]; /* libnettle's context */
};
void sha256_begin(struct sha256_stream *stream);
void sha256_add(struct sha256_stream *stream, const void *data, size_t size);
void sha256_end(struct sha256_stream *stream, uint8_t out[SHA256_BYTES]);

void sha256(const void *data, size_t size, uint8_t out[SHA256_BYTES]);
void sha256_hex(const void *data, size_t size, char out[SHA256_HEX]); /* lower case */
void sha256_hmac(const uint8_t key[SHA256_BYTES], const void *data, size_t size,
                 uint8_t out[SHA256_BYTES]);

#endif
