/* The Content-Security-Policy (CSP level 3, 2.3.1) of the page. The hashes are computed from the
 * text that is served, so that they cannot differ from it. */
#include "server/page/page.h"

#include <nettle/base64.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/sha256.h"

#define HASH_BYTES (BASE64_ENCODE_RAW_LENGTH(SHA256_BYTES) + 1)

static const char *page_find(const char *text, const char *part) {
    const char *at = memmem(text, page_size - (size_t)(text - page_text), part, strlen(part));
    CHECK(at);
    return at;
}

/* Writes the hash of the text between the two tags, in the form that a policy has. */
static void hash_element(const char *open, const char *close, char out[HASH_BYTES]) {
    uint8_t digest[SHA256_BYTES];
    const char *begin = page_find(page_text, open) + strlen(open);
    sha256(begin, (size_t)(page_find(begin, close) - begin), digest);
    base64_encode_raw(out, sizeof digest, digest);
    out[HASH_BYTES - 1] = '\0';
}

void page_policy(char out[PAGE_POLICY_BYTES]) {
    char style[HASH_BYTES], script[HASH_BYTES];
    hash_element("<style>", "</style>", style);
    hash_element("<script>", "</script>", script);
    int size = snprintf(out, PAGE_POLICY_BYTES,
                        "default-src 'none'; style-src 'sha256-%s'; script-src 'sha256-%s'; "
                        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
                        "frame-ancestors 'none'",
                        style, script);
    CHECK(size > 0 && size < PAGE_POLICY_BYTES);
}
