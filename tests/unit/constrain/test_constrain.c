/* Masks of regular expressions against PCRE2, whose partial matching says independently which texts
 * can still become a match; and grammars, limits, sharing. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdio.h>

#include "base/mem.h"
#include "language.h"

/* ---- Regular expressions ---- */

static bool may_go_on(const pcre2_code *code, const char *text, size_t size) {
    pcre2_match_data *data = pcre2_match_data_create_from_pattern(code, NULL);
    int rc = pcre2_match(code, (PCRE2_SPTR)text, size, 0, PCRE2_PARTIAL_HARD, data, NULL);
    pcre2_match_data_free(data);
    return rc >= 0 || rc == PCRE2_ERROR_PARTIAL;
}

static bool is_match(const pcre2_code *code, const char *text, size_t size) {
    pcre2_match_data *data = pcre2_match_data_create_from_pattern(code, NULL);
    int rc = pcre2_match(code, (PCRE2_SPTR)text, size, 0, 0, data, NULL);
    pcre2_match_data_free(data);
    return rc >= 0;
}

/* Every token after `text`. Tokens with bytes above 127 are left out: PCRE2 reads bytes here. */
static void compare_masks(struct language *l, const pcre2_code *code, const char *pattern,
                          const char *text, size_t size) {
    struct constrain_at at = {0};
    struct constrain_next next;
    char longer[512];
    cr_assert_eq(constrain_next(l->constrain, &at, text, size, l->mask, &next), 0);
    cr_assert_eq(next.accepts, is_match(code, text, size), "%s after '%.*s'", pattern, (int)size,
                 text);
    memcpy(longer, text, size);
    for (int32_t id = 0; id < LANGUAGE_TOKENS; id++) {
        const char *bytes = "";
        size_t more = language_bytes(NULL, id, &bytes);
        bool plain = more > 0;
        for (size_t i = 0; i < more; i++) plain = plain && (unsigned char)bytes[i] < 128;
        if (!plain) continue;
        memcpy(longer + size, bytes, more);
        cr_assert_eq(language_allows(l, id), may_go_on(code, longer, size + more),
                     "%s after '%.*s': token %d", pattern, (int)size, text, id);
    }
    cr_assert_not(language_allows(l, LANGUAGE_TOKENS - 1), "a special token has no text");
}

/* Walks through the language by tokens that a counter picks. */
static void walk(struct language *l, const pcre2_code *code, const char *pattern, uint32_t seed) {
    char text[256];
    size_t size = 0;
    for (int step = 0; step < 12 && size < 64; step++) {
        compare_masks(l, code, pattern, text, size);
        int32_t chosen = -1;
        for (int32_t i = 0; i < LANGUAGE_TOKENS && chosen < 0; i++) {
            int32_t id = (int32_t)((seed + (uint32_t)i * 101u) % LANGUAGE_TOKENS);
            const char *bytes = "";
            if (language_allows(l, id) && language_bytes(NULL, id, &bytes) > 0 &&
                (unsigned char)bytes[0] < 128)
                chosen = id;
        }
        if (chosen < 0) return;
        const char *bytes = "";
        size_t more = language_bytes(NULL, chosen, &bytes);
        memcpy(text + size, bytes, more);
        size += more;
        seed = seed * 1664525u + 1013904223u;
    }
}

Test(constrain, masks_of_regular_expressions_are_those_of_partial_matches) {
    static const char *const patterns[] = {"[a-c]+x{2,3}",
                                           "(ab|abc|hello)*z?",
                                           "a[^\\n\\r]*b",
                                           "[^\"]{3,7}\"",
                                           "-?(0|[1-9][0-9]*)(\\.[0-9]+)?",
                                           "(a|b)*a(a|b){4}",
                                           "(?:[a-z]{2} ?){2,}",
                                           "(?!ab)[a-z]{1,4}",
                                           "(?=[a-z0-9]*1)[a-z0-9]{2,90}",
                                           "\\w+\\s\\d*",
                                           "(?i)HeLLo|x y",
                                           "(a?){5}b",
                                           "[\\s\\S]{0,20}",
                                           "\\x41\\u0062\\t*"};
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        char whole[128];
        int error;
        PCRE2_SIZE offset;
        snprintf(whole, sizeof whole, "\\A(?:%s)\\z", patterns[i]);
        pcre2_code *code =
            pcre2_compile((PCRE2_SPTR)whole, PCRE2_ZERO_TERMINATED,
                          PCRE2_ALT_BSUX | PCRE2_DOLLAR_ENDONLY, &error, &offset, NULL);
        cr_assert_not_null(code, "%s", whole);
        struct language l = language_text(CONSTRAIN_REGEX, patterns[i]);
        cr_assert_eq(l.rc, 0, "%s: %s", patterns[i], l.fault.text);
        for (uint32_t seed = 1; seed <= 6; seed++) walk(&l, code, patterns[i], seed * 7919);
        pcre2_code_free(code);
        language_close(&l);
    }
}

Test(constrain, characters_are_whole_in_utf_8) {
    struct language l = language_text(CONSTRAIN_REGEX, "日.[é-ü]");
    cr_assert_eq(l.rc, 0);
    cr_assert(language_holds(&l, "日本é") && language_holds(&l, "日xü"));
    cr_assert(!language_holds(&l, "日xe") && !language_holds(&l, "日\x80\xC3\xA9"));
    struct constrain_at at = {0};
    struct constrain_next next;
    cr_assert_eq(constrain_next(l.constrain, &at, "", 0, l.mask, &next), 0);
    cr_assert(language_allows(&l, 0xE6), "the first byte of the character");
    cr_assert(language_allows(&l, 256 + 16) && language_allows(&l, 256 + 17), "and its tokens");
    cr_assert(!next.accepts && next.continues);
    language_close(&l);
}

Test(constrain, refused_expressions_are_named) {
    static const struct {
        const char *pattern, *word;
        int rc;
    } cases[] = {{"a(?<=b)", "look-behind", ERR_UNSUPPORTED},
                 {"(a)\\1", "back reference", ERR_UNSUPPORTED},
                 {"\\bword", "word border", ERR_UNSUPPORTED},
                 {"\\p{L}", "Unicode property", ERR_UNSUPPORTED},
                 {"(^a)*", "assertion", ERR_UNSUPPORTED},
                 {"a{2000000}", "repetition", ERR_LIMIT},
                 {"a{5,2}", "bounds", ERR_INVALID},
                 {"(a", "')'", ERR_INVALID},
                 {"a)", "'('", ERR_INVALID},
                 {"[a", "']'", ERR_INVALID},
                 {"[z-a]", "wrong order", ERR_INVALID},
                 {"*a", "quantifier", ERR_INVALID},
                 {"(?=b)a", "no text", ERR_INVALID}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct language l = language_text(CONSTRAIN_REGEX, cases[i].pattern);
        cr_assert_eq(l.rc, cases[i].rc, "%s: %s", cases[i].pattern, l.fault.text);
        cr_assert_str_eq(l.fault.field, "f");
        cr_assert_not_null(strstr(l.fault.text, cases[i].word), "%s: %s", cases[i].pattern,
                           l.fault.text);
        language_close(&l);
    }
}

/* ---- Limits ---- */

/* Reads a text up to `size` in steps, as an answer does, with a mask at each. */
static void answer(struct language *l, struct constrain_at *at, const char *text, size_t size,
                   size_t step) {
    struct constrain_next next;
    for (size_t end = at->read + step; end <= size; end += step) {
        int rc = constrain_next(l->constrain, at, text, end, l->mask, &next);
        cr_assert_eq(rc, 0, "%d after %zu bytes", rc, end);
        cr_assert(end == size || language_allows(l, (unsigned char)text[end]), "byte %zu", end);
    }
}

static void compare_with_fresh(struct language *l, struct language *fresh,
                               const struct constrain_at *at, const char *text) {
    struct constrain_at to = *at, from = {0};
    struct constrain_next next, same;
    cr_assert_eq(constrain_next(l->constrain, &to, text, at->read, l->mask, &next), 0);
    cr_assert_eq(constrain_next(fresh->constrain, &from, text, at->read, fresh->mask, &same), 0);
    cr_assert(next.accepts == same.accepts && next.continues == same.continues);
    cr_assert_arr_eq(l->mask, fresh->mask, sizeof l->mask);
}

/* Each byte teaches a state or more: the answer goes on where all but its place is forgotten. */
Test(constrain, long_answers_outlive_the_states) {
    enum { SIZE = 3 * CONSTRAIN_STATES_MAX / 2 };
    static const char *const schemas[] = {
        "{\"type\":\"string\",\"maxLength\":30000}",
        "{\"type\":\"array\",\"maxItems\":5000,\"items\":{\"type\":\"object\",\"properties\":{"
        "\"a\":{\"type\":\"string\",\"maxLength\":60},\"b\":{\"type\":\"integer\",\"maximum\":"
        "1000000}},\"required\":[\"a\",\"b\"]}}"};
    static const char *const parts[] = {"ab c", "{\"a\": \"hello world\", \"b\": 17}, "};
    static char text[SIZE + 1];
    for (size_t i = 0; i < sizeof schemas / sizeof *schemas; i++) {
        struct language l = language_schema(schemas[i]), fresh = language_schema(schemas[i]);
        struct constrain_at at = {0}, whole = {0};
        text[0] = i == 0 ? '"' : '[';
        for (size_t k = 0; k < SIZE - 1; k++) text[1 + k] = parts[i][k % strlen(parts[i])];
        answer(&l, &at, text, SIZE, 1);
        compare_with_fresh(&l, &fresh, &at, text);
        cr_assert_eq(constrain_read(l.constrain, &whole, text, SIZE), 0, "read in one piece");
        language_close(&l);
        language_close(&fresh);
    }
}

/* Counts to a bound: an answer that lost its place would end earlier or later. */
Test(constrain, a_long_answer_ends_at_its_bound) {
    static char text[40001];
    struct language l = language_text(CONSTRAIN_REGEX, "a{0,40000}");
    struct constrain_at at = {0};
    memset(text, 'a', sizeof text);
    answer(&l, &at, text, 40000, 100);
    cr_assert_not(language_allows(&l, 'a'));
    cr_assert_eq(constrain_read(l.constrain, &at, text, 40001), ERR_INVALID);
    language_close(&l);
}

/* Rules with stacks, alternatives and sets are kept exactly. */
Test(constrain, nested_answers_outlive_the_states) {
    enum { SIZE = 3 * CONSTRAIN_STATES_MAX };
    static const char grammar[] =
        "root ::= \"(\" root \")\" | [a-c]{3,30000} (\"x\" | \"yz\") root?";
    static char text[SIZE];
    struct language l = language_text(CONSTRAIN_GRAMMAR, grammar);
    struct language fresh = language_text(CONSTRAIN_GRAMMAR, grammar);
    struct constrain_at at = {0};
    memset(text, 'b', sizeof text);
    memset(text, '(', 40);
    memset(text + 29000, 'x', 1);
    memset(text + 29001, '(', 500);
    answer(&l, &at, text, SIZE, 64);
    compare_with_fresh(&l, &fresh, &at, text);
    language_close(&l);
    language_close(&fresh);
}

/* An answer makes the language forget, in which others have their places. */
Test(constrain, answers_that_share_a_language_keep_their_places) {
    enum { SIZE = 2 * CONSTRAIN_STATES_MAX };
    static char text[2][SIZE];
    struct language l = language_text(CONSTRAIN_REGEX, "(a{0,100000}|b{0,100000})c");
    struct constrain_at at[2] = {0}, idle = {0};
    memset(text[0], 'a', SIZE);
    memset(text[1], 'b', SIZE);
    answer(&l, &idle, text[1], 5000, 1000);
    for (size_t end = 64; end <= SIZE; end += 64)
        for (int i = 0; i < 2; i++) answer(&l, &at[i], text[i], end, 64);
    answer(&l, &idle, text[1], 7000, 1000);
    language_close(&l);
}

/* A text that was read in steps is read again, although that costs more than a mask may. */
Test(constrain, costly_texts_are_read_again) {
    static const char pattern[] = "(?:(?:(?:(?:, ){2,9}){16,40}){16,40}|a{0,100000})";
    static char text[2][3 * CONSTRAIN_STATES_MAX / 2];
    struct language l = language_text(CONSTRAIN_REGEX, pattern);
    cr_assert_eq(l.rc, 0, "%s", l.fault.text);
    struct constrain_at at = {0}, others[CONSTRAIN_KEPT_MAX + 1] = {0}, once = {0};
    for (size_t i = 0; i < sizeof text[0]; i++) text[0][i] = ", "[i % 2];
    memset(text[1], 'a', sizeof text[1]);
    answer(&l, &at, text[0], 850, 1);
    for (int i = 0; i <= CONSTRAIN_KEPT_MAX; i++) answer(&l, &others[i], text[1], 1, 1);
    answer(&l, &others[0], text[1], sizeof text[1], 512);
    cr_assert_eq(constrain_read(l.constrain, &once, text[0], 850), ERR_LIMIT, "it is costly");
    answer(&l, &at, text[0], 860, 1);
    language_close(&l);
}

Test(constrain, hostile_languages_cost_at_most_their_limits) {
    static const char *const patterns[] = {
        "((((a{1000}){1000}){1000}){1000})", "(a|b)*a(a|b){1000}(?=(a|b)*c)d",
        "(?=(a|b)*a(a|b){60}$)(?=(a|b)*b(a|b){61}$)(?!(a|b)*a(a|b){62}$)[abc]*"};
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        struct language l = language_text(CONSTRAIN_REGEX, patterns[i]);
        struct constrain_at at = {0};
        struct constrain_next next;
        cr_assert(l.rc == 0 || l.rc == ERR_LIMIT || l.rc == ERR_INVALID, "%s", patterns[i]);
        if (l.rc == 0) {
            int rc = constrain_next(l.constrain, &at, "ababab", 6, l.mask, &next);
            cr_assert(rc == 0 || rc == ERR_LIMIT || rc == ERR_INVALID);
        }
        language_close(&l);
    }
}

/* ---- Parts ---- */

Test(constrain, parts_are_put_together) {
    const struct constrain_part call[] = {{.kind = CONSTRAIN_TEXT, .text = "<c>", .size = 3},
                                          {.kind = CONSTRAIN_REGEX, .text = "[0-9]+", .size = 6},
                                          {.kind = CONSTRAIN_TEXT, .text = "</c>", .size = 4}};
    const struct constrain_part free_text = {.kind = CONSTRAIN_WITHOUT, .text = "<c>", .size = 3};
    const struct constrain_part whole = {.kind = CONSTRAIN_SEQ, .children = call, .count = 3};
    const struct constrain_part next[] = {whole, free_text};
    const struct constrain_part pair = {.kind = CONSTRAIN_SEQ, .children = next, .count = 2};
    const struct constrain_part list[] = {
        free_text, {.kind = CONSTRAIN_REPEAT, .children = &pair, .count = 1, .max = -1}};
    struct language l =
        language_of(&(struct constrain_part){.kind = CONSTRAIN_SEQ, .children = list, .count = 2});
    cr_assert_eq(l.rc, 0);
    cr_assert(language_holds(&l, "") && language_holds(&l, "text <c text"));
    cr_assert(language_holds(&l, "a<c>12</c>b<c>3</c>"));
    cr_assert(!language_holds(&l, "a<c>x</c>") && !language_holds(&l, "<c>1"));
    language_close(&l);
}

Test(constrain, memory_may_be_short_anywhere) {
    for (long n = 0; n < 400; n++) {
        mem_fail_after(n);
        const struct constrain_vocabulary v = {LANGUAGE_TOKENS, language_bytes, NULL};
        struct constrain_tokens *tokens = NULL;
        struct constrain *c = NULL;
        struct constrain_at at = {0};
        struct constrain_next next;
        uint32_t mask[(LANGUAGE_TOKENS + 31) / 32];
        struct constrain_part part = {
            .kind = CONSTRAIN_REGEX, .field = "f", .text = "(?!ab)[a-é]{2,9}", .size = 17};
        int rc = constrain_tokens_open(&v, &tokens);
        if (rc == 0) rc = constrain_open(&part, tokens, NULL, &c, NULL);
        if (rc == 0) rc = constrain_next(c, &at, "xy", 2, mask, &next);
        bool pending = mem_fail_pending();
        mem_fail_after(-1);
        cr_assert(rc == 0 || rc == ERR_NOMEM, "allocation %ld: %d", n, rc);
        constrain_close(c);
        constrain_tokens_close(tokens);
        if (pending) return;
    }
    cr_assert_fail("more allocations than expected");
}

/* ---- Masks and the reader ---- */

static void compare_with_reader(struct language *l, const char *text, size_t size) {
    char longer[512];
    memcpy(longer, text, size);
    for (int32_t id = 0; id < LANGUAGE_TOKENS - 1; id++) {
        const char *bytes = "";
        size_t more = language_bytes(NULL, id, &bytes);
        struct constrain_at at = {0};
        memcpy(longer + size, bytes, more);
        int rc = constrain_read(l->constrain, &at, longer, size + more);
        cr_assert_eq(language_allows(l, id), rc == 0, "after '%.*s': token %d", (int)size, text,
                     id);
    }
}

/* Follows one long text, so that counted repetitions are met near their ends and far from them. */
Test(constrain, masks_agree_with_the_reader_at_every_distance) {
    static const struct {
        const char *schema, *text;
    } cases[] = {
        {"{\"type\":\"string\",\"minLength\":3,\"maxLength\":28}",
         "\"abcabcabcabäabcab日bcabcabc\""},
        {"{\"type\":\"string\",\"format\":\"email\"}",
         "\"aaaaaaaa.bbbbbbbbbbbbbbbb.ccccccccccccccccccc.ddddddddddddd@abc.example\""},
        {"{\"type\":\"string\",\"pattern\":\"^[a-c]{2,9}z{0,30}$\",\"maxLength\":26}",
         "\"abcabczzzzzzzzzzzzzzzzzzzz\""},
        {"{\"type\":\"array\",\"maxItems\":3,\"items\":{\"type\":\"object\",\"properties\":{"
         "\"name\":{\"type\":"
         "\"string\"}},\"required\":[\"name\"],\"additionalProperties\":false}}",
         "[{\"name\": \"ab\"}, {\"name\": \"\"}, {\"name\": \"x y\"}]"},
        {"{\"type\":\"object\",\"additionalProperties\":{\"type\":\"integer\"},\"properties\":{"
         "\"ä\":{"
         "\"const\":1}}}",
         "{\"abc\": 12, \"ää\": -1}"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct language l = language_schema(cases[i].schema);
        struct constrain_at at = {0};
        struct constrain_next next;
        size_t size = strlen(cases[i].text);
        cr_assert_eq(l.rc, 0, "%s", l.fault.text);
        for (size_t read = 0; read <= size; read++) {
            int rc = constrain_next(l.constrain, &at, cases[i].text, read, l.mask, &next);
            cr_assert_eq(rc, 0, "%s at %zu", cases[i].text, read);
            compare_with_reader(&l, cases[i].text, read);
        }
        cr_assert(next.accepts, "%s", cases[i].text);
        language_close(&l);
    }
}
