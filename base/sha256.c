#include "base/sha256.h"

#include <nettle/hmac.h>
#include <nettle/sha2.h>
#include <stdio.h>

_Static_assert(SHA256_BYTES == SHA256_DIGEST_SIZE, "one digest");

void sha256(const void *data, size_t size, uint8_t out[SHA256_BYTES]) {
    struct sha256_ctx ctx;
    sha256_init(&ctx);
    sha256_update(&ctx, size, data);
    sha256_digest(&ctx, SHA256_BYTES, out);
}

_Static_assert(sizeof(struct sha256_ctx) <= sizeof(struct sha256_stream), "the context fits");

void sha256_begin(struct sha256_stream *stream) {
    sha256_init((struct sha256_ctx *)stream->state);
}

void sha256_add(struct sha256_stream *stream, const void *data, size_t size) {
    sha256_update((struct sha256_ctx *)stream->state, size, data);
}

void sha256_end(struct sha256_stream *stream, uint8_t out[SHA256_BYTES]) {
    sha256_digest((struct sha256_ctx *)stream->state, SHA256_BYTES, out);
}

void sha256_hex(const void *data, size_t size, char out[SHA256_HEX]) {
    uint8_t digest[SHA256_BYTES];
    sha256(data, size, digest);
    for (size_t i = 0; i < SHA256_BYTES; i++) snprintf(out + 2 * i, 3, "%02x", digest[i]);
}

void sha256_hmac(const uint8_t key[SHA256_BYTES], const void *data, size_t size,
                 uint8_t out[SHA256_BYTES]) {
    struct hmac_sha256_ctx ctx;
    hmac_sha256_set_key(&ctx, SHA256_BYTES, key);
    hmac_sha256_update(&ctx, size, data);
    hmac_sha256_digest(&ctx, SHA256_BYTES, out);
}
