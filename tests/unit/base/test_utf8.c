#include <criterion/criterion.h>
#include <string.h>

#include "base/json.h"
#include "base/utf8.h"

static bool valid(const char *s) {
    return utf8_valid(s, strlen(s));
}

Test(utf8, what_is_valid) {
    cr_assert(valid("") && valid("abc") && valid("\xC3\xA9\xE2\x82\xAC\xF0\x9D\x84\x9E"));
    cr_assert(valid("\xEF\xBF\xBF\xF4\x8F\xBF\xBF") && valid("\xED\x9F\xBF\xEE\x80\x80"));
    cr_assert(utf8_valid("a\0b", 3));
}

Test(utf8, what_is_not) {
    static const char *const bad[] = {
        "\x80",
        "\xBF",
        "\xC0\xAF",
        "\xC1\xBF",
        "\xE0\x80\x80",
        "\xE0\x9F\xBF",
        "\xED\xA0\x80",
        "\xED\xBF\xBF",
        "\xF0\x80\x80\x80",
        "\xF0\x8F\xBF\xBF",
        "\xF4\x90\x80\x80",
        "\xF5\x80\x80\x80",
        "\xFF",
        "\xC3(",
        "\xE2\x82",
        "a\xF0\x9D\x84",
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) cr_assert_not(valid(bad[i]), "%zu", i);
}

/* Against the definition: the bytes of every scalar value are one character; surrogates are not. */
Test(utf8, every_code_point) {
    for (uint32_t c = 0; c < 0x110000; c++) {
        char bytes[4];
        size_t length, n = utf8_encode(c, bytes);
        enum utf8_kind kind = utf8_step(bytes, n, &length);
        bool surrogate = c >= 0xD800 && c <= 0xDFFF;
        cr_assert_eq(kind, surrogate ? UTF8_BAD : UTF8_CHAR, "U+%X", c);
        if (surrogate) continue;
        cr_assert_eq(length, n);
        uint32_t back = (unsigned char)bytes[0];
        if (n > 1) back &= 0xFFu >> (n + 1);
        for (size_t i = 1; i < n; i++) back = back << 6 | ((unsigned char)bytes[i] & 0x3F);
        cr_assert_eq(back, c);
        for (size_t cut = 1; cut < n; cut++) {
            cr_assert_eq(utf8_step(bytes, cut, &length), UTF8_SHORT);
            cr_assert_eq(length, cut);
            cr_assert_eq(utf8_complete(bytes, cut), 0);
        }
        cr_assert_eq(utf8_complete(bytes, n), n);
    }
}

Test(utf8, complete_waits_only_for_what_can_still_come) {
    cr_assert_eq(utf8_complete("", 0), 0);
    cr_assert_eq(utf8_complete("ab\xE2\x82", 4), 2);
    cr_assert_eq(utf8_complete("ab\xF0\x9D\x84", 5), 2);
    cr_assert_eq(utf8_complete("ab\xC3", 3), 2);
    cr_assert_eq(utf8_complete("ab\xE2(", 4), 4);
    cr_assert_eq(utf8_complete("ab\x80\x80\x80", 5), 5); /* never to be mended */
    cr_assert_eq(utf8_complete("ab\xE0\x80", 4), 4);
    cr_assert_eq(utf8_complete("\xC3\xA9\xC3", 3), 2);
}
