/* Tests files that the tokenizer rejects, distinguishes, and survives. */
#include <criterion/criterion.h>

#include "base/file.h"
#include "tests/unit/text/tok/tok_support.h"

static struct arena arena;

static void open_arena(void) {
    arena_open(&arena, (size_t)1 << 28);
}

static void close_arena(void) {
    mem_fail_after(-1);
    arena_close(&arena);
}

TestSuite(tok_load, .init = open_arena, .fini = close_arena);

static struct tok *open_small(const struct small_tok *t) {
    struct fault fault = {0};
    struct tok *tok;
    int rc = small_tok_open(t, &tok, &fault);
    cr_assert_eq(rc, 0, "%s: %s", fault.field, fault.text);
    return tok;
}

/* Ids as text: "1 2 3". */
static const char *ids_text(const struct tok *tok, const char *text, unsigned flags,
                            const struct tok_span *spans, size_t span_count) {
    static char line[8192];
    struct fault fault = {0};
    struct tok_ids ids;
    size_t used = 0;
    int rc =
        tok_encode(tok, text, strlen(text), flags, spans, span_count, 1000, &arena, &ids, &fault);
    if (rc) return err_name(rc);
    line[0] = '\0';
    for (size_t i = 0; i < ids.count; i++)
        used += (size_t)snprintf(line + used, sizeof line - used, "%s%d", i ? " " : "", ids.ids[i]);
    return line;
}

/* ---- Refusals ---- */

#define UNSUPPORTED ERR_UNSUPPORTED
#define MALFORMED   ERR_MALFORMED
#define BYTES       "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}"
#define SPLIT(p, b) "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"" p "\"},\"behavior\":\"" b "\"}"
#define CHAIN(a)    "{\"type\":\"Sequence\",\"pretokenizers\":[" a "," BYTES "]}"

/* Each step makes a text twice as long: sixteen of them 65,536 times. */
#define GROW  "{\"type\":\"Replace\",\"pattern\":{\"String\":\"a\"},\"content\":\"aa\"}"
#define GROW4 GROW "," GROW "," GROW "," GROW

/* Each step makes it eight times as long. */
#define MORE  "{\"type\":\"Replace\",\"pattern\":{\"String\":\"a\"},\"content\":\"aaaaaaaa\"}"
#define MORE4 MORE "," MORE "," MORE "," MORE

/* A step behind WordPiece. */
#define BEHIND(step) "{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"WordPiece\"}," step "]}"

#define CHARSMAP(text) "{\"type\":\"Precompiled\",\"precompiled_charsmap\":\"" text "\"}"

static const struct refusal {
    struct small_tok tok;
    int rc;
    const char *field;
} refusals[] = {
    {{.normalizer = "{\"type\":\"CharNormalizer\"}"}, UNSUPPORTED, "normalizer"},
    {{.normalizer = "{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFC\"},{\"type\":"
                    "\"Replace\",\"pattern\":{\"Regex\":\"(\"},\"content\":\"\"}]}"},
     UNSUPPORTED,
     "normalizer.normalizers[1]"},
    {{.normalizer = "{\"type\":\"Replace\",\"pattern\":{\"String\":\"\"}}"},
     MALFORMED,
     "normalizer"},
    {{.normalizer = "{\"type\":\"Prepend\",\"prepend\":7}"}, ERR_INVALID, "normalizer.prepend"},
    {{.normalizer = "{\"type\":\"Sequence\",\"normalizers\":[" MORE4 "," MORE4 "," MORE4 "]}"},
     ERR_LIMIT,
     "normalizer"},
    {{.normalizer = "[]"}, MALFORMED, "normalizer"},
    {{.normalizer = "{}"}, MALFORMED, "normalizer"},
    {{.normalizer = "{\"type\":\"Sequence\"}"}, MALFORMED, "normalizer"},
    {{.pre_tokenizer = "null", .decoder = "null"}, UNSUPPORTED, "decoder"},
    {{.pre_tokenizer = "{\"type\":\"UnicodeScripts\"}"}, UNSUPPORTED, "pre_tokenizer"},
    {{.pre_tokenizer = "{\"type\":\"Metaspace\"}"}, MALFORMED, "pre_tokenizer"},
    {{.pre_tokenizer = "{\"type\":\"Metaspace\",\"replacement\":\"ab\"}"},
     MALFORMED,
     "pre_tokenizer"},
    {{.pre_tokenizer = "{\"type\":\"Metaspace\",\"replacement\":\"_\",\"prepend_scheme\":\"x\"}"},
     UNSUPPORTED,
     "pre_tokenizer"},
    {{.pre_tokenizer = CHAIN(BYTES)}, UNSUPPORTED, "pre_tokenizer.pretokenizers[1]"},
    {{.pre_tokenizer = CHAIN(SPLIT("a", "Sideways"))},
     UNSUPPORTED,
     "pre_tokenizer.pretokenizers[0]"},
    {{.pre_tokenizer = CHAIN("{\"type\":\"Split\",\"behavior\":\"Isolated\"}")},
     MALFORMED,
     "pre_tokenizer.pretokenizers[0]"},
    {{.pre_tokenizer = CHAIN(SPLIT("(", "Isolated"))},
     UNSUPPORTED,
     "pre_tokenizer.pretokenizers[0]"},
    {{.post_processor = "{\"type\":\"Other\"}"}, UNSUPPORTED, "post_processor"},
    {{.post_processor = "{\"type\":\"BertProcessing\"}"}, MALFORMED, "post_processor"},
    {{.post_processor = "{\"type\":\"RobertaProcessing\",\"cls\":[\"a\",97],\"sep\":[\"b\",256]}"},
     MALFORMED,
     "post_processor"},
    {{.post_processor = "{\"type\":\"TemplateProcessing\",\"single\":[]}"},
     MALFORMED,
     "post_processor"},
    {{.post_processor = "{\"type\":\"TemplateProcessing\",\"single\":[{\"Sequence\":{\"id\":\"B\"}}"
                        "]}"},
     UNSUPPORTED,
     "post_processor"},
    {{.post_processor = "{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":"
                        "\"<s>\"}},{\"Sequence\":{\"id\":\"A\"}}],\"special_tokens\":{\"<s>\":"
                        "{\"ids\":[256]}}}"},
     MALFORMED,
     "post_processor"},
    {{.decoder = "{\"type\":\"CTC\"}"}, UNSUPPORTED, "decoder"},
    {{.decoder = "{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"ByteLevel\"},{\"type\":\"CTC\""
                 "}]}"},
     UNSUPPORTED,
     "decoder.decoders[1]"},
    {{.decoder = "{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Fuse\"},{\"type\":\"Strip\","
                 "\"content\":\" \",\"start\":2}]}"},
     UNSUPPORTED,
     "decoder.decoders[1]"},
    {{.decoder = "{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Fuse\"},{\"type\":\"Strip\","
                 "\"content\":\"ab\",\"start\":1}]}"},
     MALFORMED,
     "decoder.decoders[1]"},
    {{.decoder = "{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Fuse\"},"
                 "{\"type\":\"ByteFallback\"}]}"},
     UNSUPPORTED,
     "decoder.decoders[1]"},
    {{.decoder = "{\"type\":\"Replace\",\"pattern\":{\"Regex\":\"a\"},\"content\":\"\"}"},
     UNSUPPORTED,
     "decoder"},
    {{.vocab = "\"aaaaaaaaaaaaaaaaaaaa\":256",
      .decoder = "{\"type\":\"Sequence\",\"decoders\":[" GROW4 "," GROW4 "," GROW4 "," GROW4 "]}"},
     ERR_LIMIT,
     "decoder"},
    {{.decoder = BEHIND("{\"type\":\"Replace\",\"pattern\":{\"String\":\"a\"},\"content\":\"\"}")},
     UNSUPPORTED,
     "decoder.decoders[1]"},
    {{.decoder = BEHIND("{\"type\":\"Strip\",\"content\":\" \"}")},
     UNSUPPORTED,
     "decoder.decoders[1]"},
    {{.decoder = BEHIND("{\"type\":\"Metaspace\",\"replacement\":\"_\"}")},
     UNSUPPORTED,
     "decoder.decoders[1]"},
    {{.decoder = BEHIND("{\"type\":\"WordPiece\"}")}, UNSUPPORTED, "decoder.decoders[1]"},
    {{.decoder = BEHIND("{\"type\":\"Fuse\"}")}, UNSUPPORTED, "decoder.decoders[1]"},
    {{.normalizer = CHARSMAP("AAA")}, MALFORMED, "normalizer"},
    {{.normalizer = CHARSMAP("AA*A")}, MALFORMED, "normalizer"},
    {{.normalizer = CHARSMAP("CAAAAAAAAAA=")}, MALFORMED, "normalizer"}, /* shorter than its trie */
    {{.normalizer = CHARSMAP("BAAAAAAAAAD/")}, MALFORMED, "normalizer"}, /* texts of no UTF-8 */
    {{.normalizer = "{\"type\":\"Strip\",\"strip_left\":1}"}, ERR_INVALID, "normalizer.strip_left"},
    {{.model = "\"dropout\":0.1"}, UNSUPPORTED, "model.dropout"},
    {{.model = "\"dropout\":\"x\""}, ERR_INVALID, "model.dropout"},
    {{.model = "\"continuing_subword_prefix\":\"##\""},
     UNSUPPORTED,
     "model.continuing_subword_prefix"},
    {{.model = "\"end_of_word_suffix\":\"</w>\""}, UNSUPPORTED, "model.end_of_word_suffix"},
    {{.model = "\"ignore_merges\":1"}, ERR_INVALID, "model.ignore_merges"},
    {{.merges = "\"a\""}, MALFORMED, "model.merges[0]"},
    {{.merges = "\"a b c\""}, MALFORMED, "model.merges[0]"},
    {{.merges = "7"}, MALFORMED, "model.merges[0]"},
    {{.merges = "[\"a\"]"}, MALFORMED, "model.merges[0]"},
    {{.merges = "[\"a\",\"b\",\"c\"]"}, MALFORMED, "model.merges[0]"},
    {{.merges = "[\"a\",\"b\"]"}, MALFORMED, "model.merges[0]"}, /* ab is no token */
    {{.vocab = "\"ab\":256", .merges = "\"a b\",\"a zz\""}, MALFORMED, "model.merges[1]"},
    {{.vocab = "\"ab\":-1"}, MALFORMED, "model.vocab"},
    {{.vocab = "\"ab\":1048576"}, MALFORMED, "model.vocab"},
    {{.vocab = "\"ab\":2.5"}, MALFORMED, "model.vocab"},
    {{.vocab = "\"ab\":\"256\""}, MALFORMED, "model.vocab"},
    {{.added = "{}"}, MALFORMED, "added_tokens"},
    {{.added = "[{\"id\":300}]"}, MALFORMED, "added_tokens[0]"},
    {{.added = "[{\"content\":\"x\"}]"}, MALFORMED, "added_tokens[0]"},
    {{.added = "[7]"}, MALFORMED, "added_tokens[0]"},
    {{.added = "[{\"id\":1048576,\"content\":\"x\"}]"}, ERR_INVALID, "added_tokens[0].id"},
    {{.added = "[{\"id\":300,\"content\":\"a\"}]"}, MALFORMED, "added_tokens"}, /* a is 97 */
    {{.added = "[{\"id\":300,\"content\":\"x1\"},{\"id\":300,\"content\":\"x2\"}]"},
     MALFORMED,
     "added_tokens"},
    {{.added = "[{\"id\":300,\"content\":\"x1\"},{\"id\":301,\"content\":\"x1\"}]"},
     MALFORMED,
     "added_tokens"},
    {{.added = "[{\"id\":300,\"content\":\"x1\",\"special\":\"yes\"}]"},
     ERR_INVALID,
     "added_tokens[0].special"},
};

/* A trie whose links lead out of it, and a value behind its texts: the characters stay. */
Test(tok_load, faulty_charsmaps_change_nothing) {
    static const char *const maps[] = {CHARSMAP("BAAAAP////9h"), CHARSMAP("BAAAAAAEAABh"),
                                       CHARSMAP("BAAAAAAAAABh")};
    for (size_t i = 0; i < sizeof maps / sizeof *maps; i++) {
        struct fault fault = {0};
        struct tok_ids ids;
        struct tok *tok;
        cr_assert_eq(small_tok_open(&(struct small_tok){.normalizer = maps[i]}, &tok, &fault), 0,
                     "%s", fault.text);
        cr_expect_eq(tok_encode(tok, "ab\r\n", 4, 0, NULL, 0, 8, &arena, &ids, &fault), 0);
        cr_expect_eq(ids.count, 4);
        tok_close(tok);
    }
}

Test(tok_load, refuses_by_name) {
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        struct fault fault = {0};
        struct tok *tok = (struct tok *)1;
        int rc = small_tok_open(&refusals[i].tok, &tok, &fault);
        cr_expect_eq(rc, refusals[i].rc, "case %zu (%s): %s", i, refusals[i].field, err_name(rc));
        cr_expect_eq(fault.code, rc);
        cr_expect_str_eq(fault.field, refusals[i].field, "case %zu: field %s", i, fault.field);
        cr_expect(fault.text[0]);
        cr_expect_null(tok);
    }
}

/* Patterns that Oniguruma and PCRE2 would read differently and that no rewriting mends. */
Test(tok_load, refuses_patterns_read_differently) {
    static const char *const patterns[] = {
        "[a-z&&[^b]]", "[^\\\\W]",     "[a[^b]]", "(?s:.)",       "(?x) a",
        "\\\\Qa\\\\E", "(?<n>a)",      "(*UCP)a", "a{2}?",        "\\\\C",
        "\\\\u12",     "[[:word:]]",   "[a-[b]]", "[[a]-z]",      "\\\\p{Zz",
        "a\\\\",       "\\\\p{Emoji}", "\\\\pL",  "[\\\\P{Nope}]"};
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        char pre[256];
        struct fault fault = {0};
        struct tok *tok;
        snprintf(pre, sizeof pre, CHAIN(SPLIT("%s", "Isolated")), patterns[i]);
        cr_expect_eq(small_tok_open(&(struct small_tok){.pre_tokenizer = pre}, &tok, &fault),
                     ERR_UNSUPPORTED, "%s", patterns[i]);
        cr_expect_null(tok);
    }
}

Test(tok_load, refuses_other_files) {
    static const struct {
        const char *text;
        int rc;
    } files[] = {
        {"", ERR_MALFORMED},
        {"[]", ERR_MALFORMED},
        {"{}", ERR_MALFORMED},
        {"{\"model\":{}}", ERR_UNSUPPORTED},
        {"{\"model\":{\"type\":\"WordLevel\"}}", ERR_UNSUPPORTED},
        {"{\"model\":{\"type\":\"WordPiece\"}}", ERR_MALFORMED},
        {"{\"model\":{\"type\":\"WordPiece\",\"vocab\":{\"a\":0}}}", ERR_MALFORMED},
        {"{\"model\":{\"type\":\"Unigram\"}}", ERR_MALFORMED},
        {"{\"model\":{\"type\":\"Unigram\",\"vocab\":[]}}", ERR_MALFORMED},
        {"{\"model\":{\"vocab\":[[\"a\"]],\"unk_id\":0}}", ERR_MALFORMED},
        {"{\"model\":{\"vocab\":[[\"a\",1,2]],\"unk_id\":0}}", ERR_MALFORMED},
        {"{\"model\":{\"vocab\":[[\"a\",-1]]}}", ERR_UNSUPPORTED},
        {"{\"model\":{\"vocab\":[[\"a\",-1]],\"unk_id\":1}}", ERR_INVALID},
        {"{\"model\":{\"vocab\":{},\"merges\":[]}}", ERR_MALFORMED},
        {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0}}}", ERR_MALFORMED},
        {"{\"model\":{\"vocab\":{\"a\":0}}}", ERR_UNSUPPORTED},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[],\"unk_token\":\"b\"}}", ERR_MALFORMED},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[]}", ERR_MALFORMED},
    };
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        struct fault fault = {0};
        struct tok *tok;
        int rc = tok_open(files[i].text, strlen(files[i].text), &tok, &fault);
        cr_expect_eq(rc, files[i].rc, "%s: %s", files[i].text, err_name(rc));
        cr_expect_null(tok);
    }
}

/* The reason is one that a person can act on. */
Test(tok_load, says_what_an_absent_type_means) {
    struct fault fault = {0};
    struct tok *tok;
    const char *file = "{\"model\":{\"unk_token\":\"a\"}}";
    cr_expect_eq(tok_open(file, strlen(file), &tok, &fault), ERR_UNSUPPORTED);
    cr_expect_str_eq(fault.field, "model.type");
    cr_expect_not_null(strstr(fault.text, "is absent"));
}

/* With all bytes in the vocabulary nothing can be unknown. */
Test(tok_load, accepts_unknown_tokens_that_cannot_happen) {
    tok_close(open_small(&(struct small_tok){.model = "\"unk_token\":\"a\",\"dropout\":0.0,"
                                                      "\"byte_fallback\":true,\"fuse_unk\":true"}));
}

/* ---- Tokens ---- */

#define SPECIAL(id, s)                                                                             \
    "{\"id\":" #id ",\"content\":\"" s "\",\"special\":true,\"normalized\":false}"
#define PLAIN(id, s) "{\"id\":" #id ",\"content\":\"" s "\",\"special\":false,\"normalized\":false}"

Test(tok_load, tells_tokens_apart) {
    struct tok *tok = open_small(
        &(struct small_tok){.vocab = "\"ab\":256,\"\\u0120ab\":257,\"\\u4e2d\":258",
                            .merges = "\"a b\"",
                            .added = "[" SPECIAL(300, "<|x|>") "," PLAIN(302, "\\u0120 y") "]"});
    const char *bytes;
    cr_expect_eq(tok_vocab_size(tok), 303);
    cr_expect_eq(tok_bytes(tok, 257, &bytes), 3);
    cr_expect_eq(memcmp(bytes, " ab", 3), 0);
    cr_expect_eq(tok_bytes(tok, 258, &bytes), 3); /* outside the byte alphabet: itself */
    cr_expect_eq(memcmp(bytes, "\xE4\xB8\xAD", 3), 0);
    cr_expect_eq(tok_bytes(tok, 302, &bytes), 4); /* added tokens are literal */
    cr_expect_eq(memcmp(bytes, "\xC4\xA0 y", 4), 0);
    cr_expect_eq(tok_bytes(tok, 0, &bytes), 1);
    cr_expect_eq(bytes[0], '\0');
    cr_expect_eq(tok_bytes(tok, 301, &bytes), 0); /* a hole */
    cr_expect_eq(tok_bytes(tok, 303, &bytes), 0);
    cr_expect_eq(tok_bytes(tok, -1, &bytes), 0);
    cr_expect_eq(tok_bytes_max(tok), 5);
    const char *name;
    cr_expect_eq(tok_name(tok, 257, &name), 4); /* as the file spells it */
    cr_expect_eq(memcmp(name,
                        "\xC4\xA0"
                        "ab",
                        4),
                 0);
    cr_expect(tok_name(tok, 301, &name) == 0 && tok_name(tok, 303, &name) == 0 &&
              tok_name(tok, -1, &name) == 0);
    cr_expect(tok_is_special(tok, 300));
    cr_expect(!tok_is_special(tok, 302) && !tok_is_special(tok, 301) && !tok_is_special(tok, -1) &&
              !tok_is_special(tok, 303));
    cr_expect_eq(id_of(tok, "<|x|>"), 300);
    cr_expect_eq(id_of(tok, "\xC4\xA0"
                            "ab"),
                 257);
    cr_expect_eq(id_of(tok, " ab"), -1);
    cr_expect_eq(id_of(tok, ""), -1);
    tok_close(tok);
}

Test(tok_load, merges_by_rank_then_from_the_left) {
    struct tok *tok = open_small(
        &(struct small_tok){.vocab = "\"ab\":256,\"bc\":257,\"abc\":258,\"aa\":259,\"bcbc\":260",
                            .merges = "[\"b\",\"c\"],\"a b\",[\"a\",\"bc\"],\"a a\",\"bc bc\""});
    cr_expect_str_eq(ids_text(tok, "abc", 0, NULL, 0), "258");
    cr_expect_str_eq(ids_text(tok, "aab", 0, NULL, 0), "97 256");
    cr_expect_str_eq(ids_text(tok, "aaa", 0, NULL, 0), "259 97");
    cr_expect_str_eq(ids_text(tok, "bcbcbc", 0, NULL, 0), "260 257");
    cr_expect_str_eq(ids_text(tok, "\xC3\xA9", 0, NULL, 0), "195 169");
    cr_expect_str_eq(ids_text(tok, "", 0, NULL, 0), "");
    tok_close(tok);
}

/* A pair listed twice takes the later place. */
Test(tok_load, counts_the_last_of_double_merges) {
    struct tok *tok = open_small(
        &(struct small_tok){.vocab = "\"ab\":256,\"bc\":257", .merges = "\"a b\",\"b c\",\"a b\""});
    cr_expect_str_eq(ids_text(tok, "abc", 0, NULL, 0), "97 257");
    tok_close(tok);
}

/* Words repeat and are longer than one cache line of the text; both ways must agree. */
Test(tok_load, cached_words_give_the_same_ids) {
    struct tok *tok = open_small(&(struct small_tok){
        .vocab = "\"ab\":256,\"abab\":257",
        .merges = "\"a b\",\"ab ab\"",
        .pre_tokenizer = "{\"type\":\"ByteLevel\",\"add_prefix_space\":false}"});
    char text[4001];
    struct tok_ids all, one;
    struct fault fault = {0};
    for (int i = 0; i < 400; i++) memcpy(text + 10 * i, i % 3 ? " ababa abb" : " bbabab ab", 10);
    text[4000] = '\0';
    cr_assert_eq(tok_encode(tok, text, 4000, 0, NULL, 0, 10000, &arena, &all, &fault), 0);
    size_t at = 0;
    for (int i = 0; i < 400; i++) {
        cr_assert_eq(tok_encode(tok, text + 10 * i, 10, 0, NULL, 0, 100, &arena, &one, &fault), 0);
        cr_assert_leq(at + one.count, all.count);
        cr_expect_eq(memcmp(all.ids + at, one.ids, one.count * sizeof *one.ids), 0, "part %d", i);
        at += one.count;
    }
    cr_expect_eq(at, all.count);
    tok_close(tok);
}

/* ---- Special tokens and requests ---- */

static const struct small_tok guarded = {
    .vocab = "\"<|\":256,\"<|x|>\":300",
    .merges = "\"< |\"",
    .added = "[" SPECIAL(300, "<|x|>") "," PLAIN(301, "<y>") "," SPECIAL(302, "<y>!") "]",
    .model = "\"ignore_merges\":true"};

Test(tok_load, special_tokens_only_where_text_is_trusted) {
    struct tok *tok = open_small(&guarded);
    const char *x = "256 120 124 62"; /* <|x|> in pieces */
    cr_expect_str_eq(ids_text(tok, "<|x|>", TOK_SPECIALS, NULL, 0), "300");
    cr_expect_str_eq(ids_text(tok, "<|x|>", 0, NULL, 0), x);
    struct tok_span all = {0, 5}, none = {0, 0}, before = {0, 1}, middle = {2, 3}, after = {4, 5};
    cr_expect_str_eq(ids_text(tok, "<|x|>", TOK_SPECIALS, &all, 1), x);
    cr_expect_str_eq(ids_text(tok, "<|x|>", TOK_SPECIALS, &before, 1), x);
    cr_expect_str_eq(ids_text(tok, "<|x|>", TOK_SPECIALS, &middle, 1), x);
    cr_expect_str_eq(ids_text(tok, "<|x|>", TOK_SPECIALS, &after, 1), x);
    cr_expect_str_eq(ids_text(tok, "<|x|>", TOK_SPECIALS, &none, 1), "300");
    /* an empty span hides no other */
    struct tok_span two[] = {{0, 0}, {2, 2}, {2, 3}};
    cr_expect_str_eq(ids_text(tok, "<|x|>", TOK_SPECIALS, two, 3), x);
    struct tok_span first = {0, 5};
    cr_expect_str_eq(ids_text(tok, "<|x|><|x|>", TOK_SPECIALS, &first, 1), "256 120 124 62 300");
    struct tok_span second = {5, 10};
    cr_expect_str_eq(ids_text(tok, "<|x|><|x|>", TOK_SPECIALS, &second, 1), "300 256 120 124 62");
    tok_close(tok);
}

/* Tokens that are not special are matched everywhere, but not inside a special one that is text
 * here. A request cannot hide the template's own token by what it writes behind it. */
Test(tok_load, plain_added_tokens_everywhere) {
    struct tok *tok = open_small(&guarded);
    struct tok_span all = {0, 4}, last = {3, 4}, halves[] = {{0, 2}, {2, 4}};
    const char *text = "60 121 62 33";
    cr_expect_str_eq(ids_text(tok, "<y>!", TOK_SPECIALS, NULL, 0), "302");
    cr_expect_str_eq(ids_text(tok, "<y>!", TOK_SPECIALS, &all, 1), text);
    cr_expect_str_eq(ids_text(tok, "<y>!", TOK_SPECIALS, halves, 2), text);
    cr_expect_str_eq(ids_text(tok, "<y>!", TOK_SPECIALS, &last, 1), "301 33");
    cr_expect_str_eq(ids_text(tok, "<y>!", 0, NULL, 0), text);
    cr_expect_str_eq(ids_text(tok, "<y>?", 0, NULL, 0), "301 63");
    tok_close(tok);
}

/* Two spaces as a token that swallows white space on both sides: the first takes all four. */
Test(tok_load, swallowed_tokens_give_no_id) {
    struct tok *tok = open_small(&(struct small_tok){
        .added = "[{\"id\":300,\"content\":\"  \",\"lstrip\":true,\"rstrip\":true,"
                 "\"normalized\":false}]"});
    cr_expect_str_eq(ids_text(tok, "    H", 0, NULL, 0), "300 72");
    cr_expect_str_eq(ids_text(tok, "     H    ", 0, NULL, 0), "300 72 300");
    tok_close(tok);
}

/* No border of words where trusted and untrusted text meet. */
Test(tok_load, spans_do_not_cut_words) {
    struct tok *tok = open_small(&guarded);
    struct tok_span second = {1, 2};
    cr_expect_str_eq(ids_text(tok, "<|", TOK_SPECIALS, &second, 1), "256");
    tok_close(tok);
}

/* Neither merges nor whole pieces may give what was not matched as a special token. */
Test(tok_load, merges_never_make_special_tokens) {
    struct tok *tok = open_small(&(struct small_tok){.vocab = "\"ab\":256,\"abc\":257",
                                                     .merges = "\"a b\",\"ab c\"",
                                                     .added = "[" SPECIAL(257, "abc") "]"});
    struct tok_span all = {0, 3};
    cr_expect_str_eq(ids_text(tok, "abc", TOK_SPECIALS, NULL, 0), "257");
    cr_expect_str_eq(ids_text(tok, "abc", TOK_SPECIALS, &all, 1), "256 99");
    cr_expect_str_eq(ids_text(tok, "abc", 0, NULL, 0), "256 99");
    tok_close(tok);
}

/* A special token that is shown is part of answers, but no more than before of a request's text. */
Test(tok_load, shown_tokens_stay_special_in_texts) {
    struct tok *tok = open_small(&(struct small_tok){.vocab = "\"<|x|>\":256",
                                                     .added = "[" SPECIAL(256, "<|x|>") "]",
                                                     .pre_tokenizer = "null",
                                                     .decoder = "{\"type\":\"Fuse\"}",
                                                     .model = "\"ignore_merges\":true"});
    struct tok_span all = {0, 5};
    for (int shown = 0; shown < 2; shown++) {
        cr_expect_eq(tok_is_special(tok, 256), !shown);
        cr_expect_str_eq(ids_text(tok, "<|x|>", TOK_SPECIALS, NULL, 0), "256");
        cr_expect_str_eq(ids_text(tok, "<|x|>", TOK_SPECIALS, &all, 1), "60 124 120 124 62");
        cr_expect_str_eq(ids_text(tok, "<|x|>", 0, NULL, 0), "60 124 120 124 62");
        tok_show(tok, 256);
    }
    tok_close(tok);
}

/* Special tokens that are matched after normalising: spans follow the text through NFC. */
Test(tok_load, spans_survive_normalising) {
    struct tok *tok = open_small(
        &(struct small_tok){.normalizer = "{\"type\":\"NFC\"}",
                            .added = "[{\"id\":300,\"content\":\"[\\u00e9]\",\"special\":true,"
                                     "\"normalized\":true}]"});
    const char *text = "e\xCC\x81[e\xCC\x81][\xC3\xA9]"; /* 3 + 5 + 4 bytes, the last two alike */
    cr_expect_str_eq(ids_text(tok, text, TOK_SPECIALS, NULL, 0), "195 169 300 300");
    struct tok_span before = {0, 3}, first = {5, 6}, second = {8, 9}, both = {7, 9};
    cr_expect_str_eq(ids_text(tok, text, TOK_SPECIALS, &before, 1), "195 169 300 300");
    cr_expect_str_eq(ids_text(tok, text, TOK_SPECIALS, &first, 1), "195 169 91 195 169 93 300");
    cr_expect_str_eq(ids_text(tok, text, TOK_SPECIALS, &second, 1), "195 169 300 91 195 169 93");
    cr_expect_str_eq(ids_text(tok, text, TOK_SPECIALS, &both, 1),
                     "195 169 91 195 169 93 91 195 169 93");
    tok_close(tok);
}

Test(tok_load, template_adds_its_tokens) {
    struct tok *tok = open_small(&(struct small_tok){
        .added = "[" SPECIAL(300, "<s>") "," SPECIAL(301, "</s>") "]",
        .post_processor =
            "{\"type\":\"Sequence\",\"processors\":[{\"type\":\"ByteLevel\"},{\"type\":"
            "\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"s\"}},{\"Sequence\":"
            "{\"id\":\"A\"}},{\"SpecialToken\":{\"id\":\"e\"}}],\"special_tokens\":{\"s\":{\"ids\":"
            "[300,300]},\"e\":{\"ids\":[301]}}}]}"});
    cr_expect_str_eq(ids_text(tok, "a", TOK_TEMPLATE, NULL, 0), "300 300 97 301");
    cr_expect_str_eq(ids_text(tok, "", TOK_TEMPLATE, NULL, 0), "300 300 301");
    cr_expect_str_eq(ids_text(tok, "<s>", TOK_TEMPLATE | TOK_SPECIALS, NULL, 0), "300 300 300 301");
    cr_expect_str_eq(ids_text(tok, "a", TOK_SPECIALS, NULL, 0), "97");
    tok_close(tok);
}

/* ---- Bounds ---- */

Test(tok_load, refuses_bad_text) {
    struct tok *tok = open_small(&(struct small_tok){0});
    struct tok_span beyond = {0, 2}, backwards = {1, 0}, unordered[] = {{0, 1}, {0, 1}};
    cr_expect_str_eq(ids_text(tok, "\xFF", 0, NULL, 0), "ERR_INVALID");
    cr_expect_str_eq(ids_text(tok, "\xC3", 0, NULL, 0), "ERR_INVALID");
    cr_expect_str_eq(ids_text(tok, "\xED\xA0\x80", 0, NULL, 0), "ERR_INVALID");
    cr_expect_str_eq(ids_text(tok, "\xC0\x80", 0, NULL, 0), "ERR_INVALID");
    cr_expect_str_eq(ids_text(tok, "a", 0, &beyond, 1), "ERR_INVALID");
    cr_expect_str_eq(ids_text(tok, "a", 0, &backwards, 1), "ERR_INVALID");
    cr_expect_str_eq(ids_text(tok, "a", 0, unordered, 2), "ERR_INVALID");
    tok_close(tok);
}

Test(tok_load, stops_at_the_token_limit) {
    struct tok *tok = open_small(&(struct small_tok){.added = "[" SPECIAL(300, "<s>") "]"});
    struct tok_ids ids;
    struct fault fault = {0};
    cr_expect_eq(tok_encode(tok, "abc", 3, 0, NULL, 0, 3, &arena, &ids, &fault), 0);
    cr_expect_eq(ids.count, 3);
    cr_expect_eq(tok_encode(tok, "abcd", 4, 0, NULL, 0, 3, &arena, &ids, &fault), ERR_LIMIT);
    cr_expect_eq(ids.count, 0);
    cr_expect_eq(tok_encode(tok, "ab<s><s>", 8, TOK_SPECIALS, NULL, 0, 3, &arena, &ids, &fault),
                 ERR_LIMIT);
    cr_expect_eq(tok_encode(tok, "", 0, 0, NULL, 0, 0, &arena, &ids, &fault), 0);
    cr_expect_eq(tok_encode(tok, "a", 1, 0, NULL, 0, 0, &arena, &ids, &fault), ERR_LIMIT);
    tok_close(tok);
}

/* A hopelessly long piece costs no memory: the arena could not hold its symbols. */
Test(tok_load, refuses_long_pieces_before_working_on_them) {
    struct tok *tok = open_small(&(struct small_tok){0});
    size_t size = (size_t)8 << 20;
    char *text = mem_must_alloc(size, 1);
    struct arena little;
    struct tok_ids ids;
    struct fault fault = {0};
    memset(text, 'a', size);
    arena_open(&little, (size_t)1 << 20);
    cr_expect_eq(tok_encode(tok, text, size, 0, NULL, 0, 1000, &little, &ids, &fault), ERR_LIMIT);
    cr_expect_leq(little.used, (size_t)256 << 10);
    arena_close(&little);
    mem_free(text);
    tok_close(tok);
}

/* One megabyte that is a single piece, with a merge at every step; quadratic work would take
 * hours, and more stack than the regex has at first. */
Test(tok_load, long_pieces_are_merged) {
    struct tok *tok = open_small(
        &(struct small_tok){.vocab = "\"aa\":256,\"aaaa\":257,\"aaaaaaaa\":258",
                            .merges = "\"a a\",\"aa aa\",\"aaaa aaaa\"",
                            .pre_tokenizer = CHAIN(SPLIT("(?:\\\\p{L}\\\\p{M}*)+", "Isolated"))});
    size_t size = (size_t)1 << 20;
    char *text = mem_must_alloc(size, 1);
    struct tok_ids ids;
    struct fault fault = {0};
    memset(text, 'a', size);
    cr_expect_eq(tok_encode(tok, text, size - 1, 0, NULL, 0, size, &arena, &ids, &fault), 0, "%s",
                 fault.text);
    cr_assert_eq(ids.count, size / 8 - 1 + 3);
    for (size_t i = 0; i + 3 < ids.count; i++) cr_assert_eq(ids.ids[i], 258);
    cr_expect_eq(ids.ids[ids.count - 3], 257);
    cr_expect_eq(ids.ids[ids.count - 2], 256);
    cr_expect_eq(ids.ids[ids.count - 1], 'a');
    mem_free(text);
    tok_close(tok);
}

/* A megabyte of combining marks in the wrong order: sorting them by swaps would take hours. */
Test(tok_load, marks_are_ordered_in_linear_time) {
    struct tok *tok = open_small(&(struct small_tok){.normalizer = "{\"type\":\"NFC\"}"});
    size_t count = (size_t)1 << 18, size = 1 + 4 * count;
    char *text = mem_must_alloc(size, 1);
    struct tok_ids ids;
    struct fault fault = {0};
    text[0] = 'x';
    for (size_t i = 0; i < count; i++) memcpy(text + 1 + 4 * i, "\xCC\x81\xCC\x96", 4);
    cr_expect_eq(tok_encode(tok, text, size, 0, NULL, 0, size, &arena, &ids, &fault), 0, "%s",
                 fault.text);
    cr_assert_eq(ids.count, size);
    for (size_t i = 0; i < count; i++) {
        cr_assert_eq(ids.ids[1 + 2 * i + 1], 0x96); /* class 220 first */
        cr_assert_eq(ids.ids[1 + 2 * count + 2 * i + 1], 0x81);
    }
    mem_free(text);
    tok_close(tok);
}

/* ---- Failing memory ---- */

static const struct small_tok rich = {
    .vocab = "\"ab\":256,\"bc\":257",
    .merges = "\"a b\",[\"b\",\"c\"]",
    .added =
        "[" SPECIAL(300, "<|x|>") ",{\"id\":301,\"content\":\"e\\u0301\",\"normalized\":true}]",
    .normalizer = "{\"type\":\"NFC\"}",
    .pre_tokenizer = "{\"type\":\"Sequence\",\"pretokenizers\":[" SPLIT(
        "\\\\d{2}+", "Isolated") ",{\"type\":\"ByteLevel\",\"add_prefix_space\":true}]}",
    .model = "\"ignore_merges\":true"};

/* Every place where memory may run out while a file loads; the tokenizer at last. */
static struct tok *load_without_memory(const char *json, size_t size, long *places) {
    struct tok *tok = NULL;
    int rc = ERR_NOMEM;
    for (*places = 0; rc == ERR_NOMEM && *places < 100000; ++*places) {
        struct fault fault = {0};
        mem_fail_after(*places);
        rc = tok_open(json, size, &tok, &fault);
        /* Where PCRE2 can do without, the load may succeed although something failed. */
        if (rc == 0 && !mem_fail_pending()) rc = ERR_NOMEM;
        mem_fail_after(-1);
        cr_assert(rc == 0 || rc == ERR_NOMEM, "allocation %ld: %s", *places, err_name(rc));
        if (rc) tok_close(tok);
    }
    cr_assert_eq(rc, 0);
    return tok;
}

static void encode_without_memory(const struct tok *tok, const char *text, size_t size) {
    int rc = ERR_NOMEM;
    long n = 0;
    for (; rc == ERR_NOMEM && n < 10000; n++) {
        struct tok_ids ids;
        struct fault fault = {0};
        struct arena own;
        arena_open(&own, (size_t)1 << 24);
        mem_fail_after(n);
        rc = tok_encode(tok, text, size, TOK_SPECIALS, NULL, 0, 10000, &own, &ids, &fault);
        mem_fail_after(-1);
        cr_assert(rc == 0 || rc == ERR_NOMEM, "allocation %ld: %s", n, err_name(rc));
        cr_expect_eq(fault.code, rc);
        arena_close(&own);
    }
    cr_expect_eq(rc, 0);
    cr_expect_gt(n, 5);
}

static void fill_text(char *text, size_t size) {
    for (size_t i = 0; i < size; i += 20) memcpy(text + i, "<|x|>ab\xCC\x81 e\xCC\x81  1234 ", 20);
}

Test(tok_load, survives_failing_memory) {
    struct buf json;
    char text[2000];
    long places;
    small_tok_json(&rich, &json);
    struct tok *tok = load_without_memory(json.data, json.size, &places);
    cr_expect_gt(places, 500);
    fill_text(text, sizeof text);
    encode_without_memory(tok, text, sizeof text);
    tok_close(tok);
    buf_close(&json);
}

/* The other models, stages and steps, as the fuzzer's seeds have them: a file, NUL, a text. */
Test(tok_load, survives_failing_memory_in_every_model) {
    static const char *const names[] = {"metaspace", "scores", "alphabet"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char path[512], text[2000], *data;
        size_t size;
        long places;
        snprintf(path, sizeof path, KEEPD_SOURCE_DIR "/tests/fuzz/corpus/tok/%s.json", names[i]);
        cr_assert_eq(file_read(path, 1 << 16, &data, &size, NULL), 0, "%s", path);
        struct tok *tok = load_without_memory(data, strlen(data), &places);
        cr_expect_gt(places, 100);
        fill_text(text, sizeof text);
        encode_without_memory(tok, text, sizeof text);
        tok_close(tok);
        mem_free(data);
    }
}

/* An arena that is too small is a limit of the request, which the server answers with 400. */
Test(tok_load, survives_a_full_arena) {
    struct tok *tok = open_small(&rich);
    int rc = ERR_LIMIT;
    size_t limit = 0;
    for (; rc == ERR_LIMIT && limit < 1 << 20; limit += 16) {
        struct tok_ids ids;
        struct arena own;
        struct fault fault = {0};
        arena_open(&own, limit);
        rc = tok_encode(tok, "<|x|>ab\xCC\x81 e\xCC\x81 1234", 18, 0, NULL, 0, 100, &own, &ids,
                        &fault);
        cr_assert(rc == 0 || (rc == ERR_LIMIT && strcmp(fault.field, "tokenizer") == 0), "%s",
                  fault.text);
        arena_close(&own);
    }
    cr_expect_eq(rc, 0);
    cr_expect_gt(limit, 16);
    tok_close(tok);
}

/* ---- vocab.json + merges.txt ---- */

#define CONFIG(class)                                                                              \
    "{\"tokenizer_class\":\"" class "\",\"added_tokens_decoder\":{\"9\":{\"content\":\"<|x|>\","   \
                                    "\"special\":true,\"normalized\":false}}}"
#define VOCAB "{\"a\":0,\"b\":1,\"ab\":2,\"\\u0120\":3,\"1\":4,\"\\u0120a\":5}"

static int open_parts(const char *vocab, const char *merges, const char *config, struct tok **tok,
                      struct fault *fault) {
    return tok_open_parts(
        &(struct tok_parts){vocab, merges, config, strlen(vocab), strlen(merges), strlen(config)},
        tok, fault);
}

Test(tok_load, opens_vocabulary_and_merges) {
    struct tok *tok;
    struct fault fault = {0};
    cr_assert_eq(open_parts(VOCAB, "#version: 0.2\r\na b\r\n\n\xC4\xA0 a", CONFIG("Qwen2Tokenizer"),
                            &tok, &fault),
                 0, "%s", fault.text);
    cr_expect_str_eq(ids_text(tok, "ab a11<|x|>", TOK_SPECIALS, NULL, 0), "2 5 4 4 9");
    tok_close(tok);
}

Test(tok_load, refuses_other_vocabularies_and_merges) {
    static const struct {
        const char *vocab, *merges, *config, *field;
        int rc;
    } cases[] = {
        {VOCAB, "", CONFIG("LlamaTokenizer"), "tokenizer_class", ERR_UNSUPPORTED},
        {VOCAB, "", "{}", "tokenizer_class", ERR_UNSUPPORTED},
        {VOCAB, "", "[]", "tokenizer_config.json", ERR_MALFORMED},
        {VOCAB, "", "{\"tokenizer_class\":\"GPT2Tokenizer\"}", "added_tokens_decoder",
         ERR_NOTFOUND},
        {VOCAB, "", "{\"tokenizer_class\":\"GPT2Tokenizer\",\"add_bos_token\":true}",
         "add_bos_token", ERR_UNSUPPORTED},
        {VOCAB, "a", CONFIG("GPT2Tokenizer"), "merges.txt", ERR_MALFORMED},
        {VOCAB, "a b c", CONFIG("GPT2Tokenizer"), "merges.txt", ERR_MALFORMED},
        {VOCAB, "a b\nb a", CONFIG("GPT2Tokenizer"), "model.merges[1]", ERR_MALFORMED},
        {"[]", "", CONFIG("GPT2Tokenizer"), "model.vocab", ERR_MALFORMED},
        {VOCAB, "",
         "{\"tokenizer_class\":\"GPT2Tokenizer\",\"added_tokens_decoder\":{\"x\":{\"content\":"
         "\"y\"}}}",
         "added_tokens_decoder.x", ERR_MALFORMED},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct tok *tok;
        struct fault fault = {0};
        int rc = open_parts(cases[i].vocab, cases[i].merges, cases[i].config, &tok, &fault);
        cr_expect_eq(rc, cases[i].rc, "case %zu: %s %s", i, err_name(rc), fault.text);
        cr_expect_str_eq(fault.field, cases[i].field, "case %zu: %s", i, fault.field);
        cr_expect_null(tok);
    }
}

Test(tok_load, names_a_directory_without_tokenizer) {
    struct tok *tok;
    struct fault fault = {0};
    cr_expect_eq(tok_open_dir(KEEPD_SOURCE_DIR "/tests", &tok, &fault), ERR_NOTFOUND);
    cr_expect_str_eq(fault.field, "tokenizer.json");
    cr_expect_null(tok);
}
