#include "base/sha1.h"

#include <nettle/sha1.h>

_Static_assert(SHA1_BYTES == SHA1_DIGEST_SIZE, "one digest");
_Static_assert(sizeof(struct sha1_ctx) <= sizeof(struct sha1_stream), "the context fits");

void sha1_begin(struct sha1_stream *stream) {
    sha1_init((struct sha1_ctx *)stream->state);
}

void sha1_add(struct sha1_stream *stream, const void *data, size_t size) {
    sha1_update((struct sha1_ctx *)stream->state, size, data);
}

void sha1_end(struct sha1_stream *stream, uint8_t out[SHA1_BYTES]) {
    sha1_digest((struct sha1_ctx *)stream->state, SHA1_BYTES, out);
}
