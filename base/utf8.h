/* One step of UTF-8 decoding, and the white space of JSON. */
#ifndef KEEPD_BASE_UTF8_H
#define KEEPD_BASE_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum utf8_kind {
    UTF8_CHAR,  /* one whole character */
    UTF8_BAD,   /* bytes that no continuation can complete: one U+FFFD (Unicode's "maximal subpart")
                 */
    UTF8_SHORT, /* a correct beginning, cut off by the end of the text */
};

/* Decodes one step of `n` > 0 bytes. *length: 1 to 4, the bytes of the character or of the faulty
 * part. */
enum utf8_kind utf8_step(const char *s, size_t n, size_t *length);

/* Writes a scalar value (below 0x110000, not a surrogate) and returns its 1 to 4 bytes. */
size_t utf8_encode(uint32_t scalar, char out[4]);

/* White space as JSON has it: space, tab and the ends of lines. */
static inline bool utf8_is_blank(char c) {
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

#endif
