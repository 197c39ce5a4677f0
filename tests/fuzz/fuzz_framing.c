/* The bytes of a connection before libmicrohttpd. The first byte sets how they are cut into reads.
 * However they are cut, the same comes out; and what comes out is in normal form: read again, it
 * passes unchanged. */
#include <string.h>

#include "base/check.h"
#include "server/framing.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const struct framing_limits limits = {.head_bytes = 1024, .body_bytes = 256};

static void feed(struct framing *f, const char *data, size_t size, size_t step, struct buf *out) {
    for (size_t at = 0; at < size; at += step) {
        size_t part = size - at < step ? size - at : step;
        if (framing_passes(f, part))
            buf_add(out, data + at, part);
        else
            CHECK(framing_feed(f, &limits, data + at, part, out) == 0);
        CHECK(f->held_size <= limits.head_bytes + 1);
        CHECK((f->state == FRAMING_OVER) == (f->refusal.status != 0));
        CHECK(!f->refusal.status || f->refusal.text);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct framing whole = {0}, cut = {0}, again = {0};
    struct framing_limits wide = {.head_bytes = 1 << 20, .body_bytes = 256};
    struct buf a, b, c;
    if (size < 2 || size > 1 << 16) return 0;
    const char *text = (const char *)data + 1;
    buf_open(&a, 1 << 22);
    buf_open(&b, 1 << 22);
    buf_open(&c, 1 << 22);
    feed(&whole, text, size - 1, size, &a);
    feed(&cut, text, size - 1, 1 + data[0] % 64, &b);
    CHECK(a.size == b.size && (!a.size || memcmp(a.data, b.data, a.size) == 0));
    CHECK(whole.requests == cut.requests && whole.refusal.status == cut.refusal.status);
    if (a.size) CHECK(framing_feed(&again, &wide, a.data, a.size, &c) == 0);
    CHECK(!again.refusal.status && again.requests == whole.requests);
    CHECK(a.size == c.size && (!a.size || memcmp(a.data, c.data, a.size) == 0));
    framing_close(&whole);
    framing_close(&cut);
    framing_close(&again);
    buf_close(&a);
    buf_close(&b);
    buf_close(&c);
    return 0;
}
