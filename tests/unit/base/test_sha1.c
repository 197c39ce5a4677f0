#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "base/sha1.h"

static void expect_sha1(const char *text, size_t first, const char *wanted) {
    struct sha1_stream stream;
    uint8_t digest[SHA1_BYTES];
    char hex[2 * SHA1_BYTES + 1];
    sha1_begin(&stream);
    sha1_add(&stream, text, first);
    sha1_add(&stream, text + first, strlen(text) - first);
    sha1_end(&stream, digest);
    for (size_t i = 0; i < SHA1_BYTES; i++) snprintf(hex + 2 * i, 3, "%02x", digest[i]);
    cr_expect_str_eq(hex, wanted);
}

/* FIPS 180-4's examples, in one piece and in two. */
Test(sha1, known_digests) {
    const char *two = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
    expect_sha1("", 0, "da39a3ee5e6b4b0d3255bfef95601890afd80709");
    expect_sha1("abc", 0, "a9993e364706816aba3e25717850c26c9cd0d89d");
    expect_sha1("abc", 2, "a9993e364706816aba3e25717850c26c9cd0d89d");
    expect_sha1(two, 55, "84983e441c3bd26ebaae4aa1f95129e5e54670f1");
}
