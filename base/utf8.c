#include "base/utf8.h"

#include "base/json.h"

enum utf8_kind utf8_step(const char *s, size_t n, size_t *length) {
    const unsigned char *u = (const unsigned char *)s;
    size_t need;
    /* The range of the second byte excludes overlong forms, surrogates and values past U+10FFFF. */
    unsigned char low = 0x80, high = 0xBF;
    *length = 1;
    if (u[0] < 0x80) return UTF8_CHAR;
    if (u[0] >= 0xC2 && u[0] <= 0xDF) {
        need = 2;
    } else if (u[0] >= 0xE0 && u[0] <= 0xEF) {
        need = 3;
        if (u[0] == 0xE0) low = 0xA0;
        if (u[0] == 0xED) high = 0x9F;
    } else if (u[0] >= 0xF0 && u[0] <= 0xF4) {
        need = 4;
        if (u[0] == 0xF0) low = 0x90;
        if (u[0] == 0xF4) high = 0x8F;
    } else {
        return UTF8_BAD;
    }
    for (; *length < need; ++*length, low = 0x80, high = 0xBF) {
        if (*length == n) return UTF8_SHORT;
        if (u[*length] < low || u[*length] > high) return UTF8_BAD;
    }
    return UTF8_CHAR;
}

size_t utf8_encode(uint32_t scalar, char out[4]) {
    if (scalar < 0x80) {
        out[0] = (char)scalar;
        return 1;
    }
    size_t length = scalar < 0x800 ? 2 : scalar < 0x10000 ? 3 : 4;
    for (size_t i = length - 1; i > 0; i--, scalar >>= 6) out[i] = (char)(0x80 | (scalar & 0x3F));
    out[0] = (char)((0xF00 >> length & 0xFF) | scalar);
    return length;
}

bool utf8_valid(const char *s, size_t n) {
    size_t length;
    for (size_t i = 0; i < n; i += length)
        if (utf8_step(s + i, n - i, &length) != UTF8_CHAR) return false;
    return true;
}

size_t utf8_complete(const char *s, size_t n) {
    size_t length;
    for (size_t back = 1; back <= 3 && back <= n; back++)
        if (utf8_step(s + n - back, back, &length) == UTF8_SHORT && length == back) return n - back;
    return n;
}
