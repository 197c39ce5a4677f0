/* SHA-1 (FIPS 180-4), by libnettle: the name that git gives to a file. It says that a file has
 * arrived as it was sent; it proves nothing against somebody who made two files with one sum. */
#ifndef KEEPD_BASE_SHA1_H
#define KEEPD_BASE_SHA1_H

#include <stddef.h>
#include <stdint.h>

#define SHA1_BYTES 20

/* A digest of data that comes in pieces. */
struct sha1_stream {
    _Alignas(8) unsigned char state[128]; /* libnettle's context */
};
void sha1_begin(struct sha1_stream *stream);
void sha1_add(struct sha1_stream *stream, const void *data, size_t size);
void sha1_end(struct sha1_stream *stream, uint8_t out[SHA1_BYTES]);

#endif
