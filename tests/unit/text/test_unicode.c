/* The Unicode tables, and that split patterns follow them whatever the machine's PCRE2 knows. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/utf8.h"
#include "text/tok/internal.h"
#include "text/unicode/unicode.h"

static struct unicode_property find(const char *name) {
    struct unicode_property property = {-1, -1};
    cr_assert(unicode_property_find(name, strlen(name), &property), "%s", name);
    return property;
}

/* Letters of Unicode 16 (Todhri), and a script that PCRE2 may read as Script_Extensions: U+3001 is
 * used with Han characters and is of the script Common. */
Test(unicode, properties) {
    cr_expect_eq(unicode_category(0x105D1), UNICODE_LO);
    cr_expect_eq(unicode_category(0x10D50), UNICODE_LU);
    cr_expect_eq(unicode_category(0x10FFFF), UNICODE_CN);
    cr_expect_eq(unicode_category(UNICODE_POINTS), UNICODE_CN);
    cr_expect(unicode_has(find("Han"), 0x4E00));
    cr_expect(unicode_has(find("hani"), 0x31350));
    cr_expect_not(unicode_has(find("Han"), 0x3001));
    cr_expect(unicode_has(find("white space"), 0x85));
    cr_expect(unicode_has(unicode_lowercase, 0xAA));
    cr_expect(unicode_has(unicode_alphabetic, 0x345));
    cr_expect_not(unicode_has(find("Letter"), 0x345));
    cr_expect_not(unicode_property_find("Hans", 4, &(struct unicode_property){0}));
    cr_expect_not(unicode_property_find("", 0, &(struct unicode_property){0}));
    cr_expect(unicode_is_digit(0x24F5));
    cr_expect_not(unicode_is_digit(0xBD));
}

static void expect_case(int map(uint32_t, uint32_t[3]), uint32_t code, const uint32_t *expected) {
    uint32_t out[3] = {0};
    int n = map(code, out);
    for (int i = 0; i < n; i++) cr_expect_eq(out[i], expected[i], "U+%04X", code);
    cr_expect(n == 3 || expected[n] == 0, "U+%04X", code);
}

Test(unicode, cases) {
    expect_case(unicode_to_upper, 0xDF, (uint32_t[4]){'S', 'S'});
    expect_case(unicode_to_title, 0xDF, (uint32_t[4]){'S', 's'});
    expect_case(unicode_to_fold, 0x1E9E, (uint32_t[4]){'s', 's'});
    expect_case(unicode_to_lower, 0x130, (uint32_t[4]){'i', 0x307});
    expect_case(unicode_to_lower, 0x3A3, (uint32_t[4]){0x3C3});
    expect_case(unicode_to_lower, 0x10D50, (uint32_t[4]){0x10D70});
    expect_case(unicode_to_title, 0x1C9, (uint32_t[4]){0x1C8});
    expect_case(unicode_to_title, 0x10D0, (uint32_t[4]){0x10D0});
    expect_case(unicode_to_upper, 0x10D0, (uint32_t[4]){0x1C90});
    expect_case(unicode_to_upper, 0x1FB7, (uint32_t[4]){0x391, 0x342, 0x399});
    expect_case(unicode_to_lower, '[', (uint32_t[4]){'['});
}

Test(unicode, decompositions) {
    uint32_t out[UNICODE_DECOMPOSED_MAX];
    cr_expect_eq(unicode_decompose(0xFDFA, true, out), 18);
    cr_expect_eq(unicode_decompose(0xFDFA, false, out), 1);
    cr_expect_eq(unicode_decompose(0xD55C, false, out), 3); /* a Hangul syllable */
    cr_expect(out[0] == 0x1112 && out[1] == 0x1161 && out[2] == 0x11AB);
    cr_expect_eq(unicode_compose(0x1112, 0x1161), 0xD558);
    cr_expect_eq(unicode_compose(0xD558, 0x11AB), 0xD55C);
    cr_expect_eq(unicode_compose(0xD558, 0x11A7), 0);
    cr_expect_eq(unicode_compose('e', 0x301), 0xE9);
    cr_expect_eq(unicode_compose(0x915, 0x93C), 0); /* excluded */
    cr_expect_eq(unicode_class(0x323), 220);
}

/* Kirat Rai, of Unicode 16: letters that compose with the one before them, in two steps, also where
 * the second one must come apart first. */
Test(unicode, letters_compose) {
    static const char text[] = "\xF0\x96\xB5\xA3\xF0\x96\xB5\xA8";
    struct tok_text in = {.s = text, .size = sizeof text - 1}, out;
    struct arena arena;
    arena_open(&arena, 1 << 20);
    cr_assert_eq(tok_form(&arena, TOK_NFC, &in, &out), 0);
    cr_expect(out.size == 4 && memcmp(out.s, "\xF0\x96\xB5\xAA", 4) == 0);
    cr_assert_eq(tok_form(&arena, TOK_NFD, &in, &out), 0);
    cr_expect_eq(out.size, 12);
    arena_close(&arena);
}

/* Matches a class of one property against every character. */
static void check_pattern(const char *pattern, struct unicode_property property, bool negated) {
    struct fault fault = {0};
    struct tok_regex *regex;
    struct tok_scratch *scratch = tok_scratch_open();
    int wrong = 0;
    cr_assert_eq(tok_regex_open(pattern, false, "test", &regex, &fault), 0, "%s", fault.text);
    for (uint32_t code = 1; code < UNICODE_POINTS; code += code < 0x3000 ? 1 : 3) {
        char text[4];
        size_t begin, end;
        if (code >= 0xD800 && code <= 0xDFFF) continue;
        size_t size = utf8_encode(code, text);
        bool found = tok_regex_find(regex, scratch, text, size, 0, &begin, &end) == 1;
        wrong += found == (unicode_has(property, code) == negated);
    }
    cr_expect_eq(wrong, 0, "%s: %d", pattern, wrong);
    tok_regex_close(regex);
    tok_scratch_close(scratch);
}

Test(unicode, patterns_follow_the_tables) {
    static const char *const names[] = {"L", "Lo", "M", "Nd", "Han", "Alphabetic", "LC"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char pattern[64];
        struct unicode_property property = find(names[i]);
        snprintf(pattern, sizeof pattern, "\\p{%s}", names[i]);
        check_pattern(pattern, property, false);
        snprintf(pattern, sizeof pattern, "\\p{^%s}", names[i]);
        check_pattern(pattern, property, true);
        snprintf(pattern, sizeof pattern, "[^\\p{%s}]", names[i]);
        check_pattern(pattern, property, true);
        snprintf(pattern, sizeof pattern, "[\\P{%s}]", names[i]);
        check_pattern(pattern, property, true);
    }
    check_pattern("\\d", find("Nd"), false);
    check_pattern("[[:alpha:]]", find("Alphabetic"), false);
}
