/* Two fuzzers in one, told apart by the first byte.
 *
 * '{': a tokenizer.json up to the first NUL, which opens or is refused; then a text for it.
 * Else: flags, a count of untrusted spans, (gap, length) of each, and a text for two tokenizers
 * made here. Decoding gives the text back, and untrusted text never gives a special token. */
#include <string.h>

#include "base/arena.h"
#include "base/check.h"
#include "tests/unit/text/tok/tok_support.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define SPANS_MAX          8
#define ADDED(id, s, more) "{\"id\":" #id ",\"content\":\"" s "\"" more "}"
#define SPECIAL            ",\"special\":true,\"normalized\":false"

static const char sample[] =
    "Hello w\xC3\xB6rld 123 <|x|><y>  \n\n\xE4\xB8\xAD\xE6\x96\x87 e\xCC\x81";

static void open_arena(struct arena *arena) {
    arena_open(arena, (size_t)64 << 20);
}

/* ---- A tokenizer from outside ---------------------------------------------------------------- */

static void use(const struct tok *tok, const char *text, size_t size) {
    struct arena arena;
    struct tok_ids ids;
    open_arena(&arena);
    for (unsigned flags = 0; flags < 4; flags++) {
        if (tok_encode(tok, text, size, flags, NULL, 0, 1 << 16, &arena, &ids, NULL)) continue;
        for (size_t i = 0; i < ids.count; i++) {
            const char *bytes;
            CHECK(ids.ids[i] >= 0 && ids.ids[i] < tok_vocab_size(tok));
            CHECK(tok_bytes(tok, ids.ids[i], &bytes) <= tok_bytes_max(tok));
        }
        arena_reset(&arena);
    }
    arena_close(&arena);
}

static void fuzz_file(const char *data, size_t size) {
    const char *end = memchr(data, '\0', size);
    size_t json_size = end ? (size_t)(end - data) : size;
    struct fault fault = {0};
    struct tok *tok;
    int rc = tok_open(data, json_size, &tok, &fault);
    CHECK((rc == 0) == (tok != NULL) && rc == fault.code);
    if (rc) return;
    if (end)
        use(tok, end + 1, size - json_size - 1);
    else
        use(tok, sample, sizeof sample - 1);
    tok_close(tok);
}

/* ---- A text from outside --------------------------------------------------------------------- */

// clang-format off
/* Whatever it cuts it gives back: no normalizer, nothing swallowed, all bytes known. */
static const struct small_tok faithful = {
    .vocab = "\"he\":256,\"ll\":257,\"hell\":258,\"\\u0120w\":259,\"12\":260,"
             "\"\\u00e4\\u00b8\":261",
    .merges = "\"l l\",\"h e\",\"he ll\",\"\\u0120 w\",\"1 2\",\"\\u00e4 \\u00b8\"",
    .added = "["
        ADDED(300, "<|x|>", SPECIAL) ","
        ADDED(301, "<|x|>|>", SPECIAL) ","
        ADDED(302, "<y>", ",\"normalized\":false") ","
        ADDED(303, "|y", ",\"normalized\":true") ","
        ADDED(304, "y|", ",\"special\":true,\"normalized\":true") "]",
    .pre_tokenizer =
        "{\"type\":\"Sequence\",\"pretokenizers\":["
        "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(?i:'s|'t)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?"
        "\\\\p{L}+|\\\\p{N}{1,3}|\\\\s+(?!\\\\S)|\\\\s+\"},\"behavior\":\"MergedWithNext\"},"
        "{\"type\":\"Digits\",\"individual_digits\":true},"
        "{\"type\":\"ByteLevel\",\"add_prefix_space\":false}]}"};

static const struct small_tok lossy = {
    .vocab = "\"he\":256,\"ll\":257",
    .merges = "\"l l\",\"h e\"",
    .added = "["
        ADDED(300, "<|x|>", SPECIAL ",\"lstrip\":true") ","
        ADDED(301, "<y>", SPECIAL ",\"rstrip\":true") ","
        ADDED(302, "ww", ",\"single_word\":true,\"normalized\":false") ","
        ADDED(303, "\\u00e9x", ",\"special\":true,\"normalized\":true") "]",
    .normalizer = "{\"type\":\"NFC\"}",
    .pre_tokenizer = "{\"type\":\"ByteLevel\",\"add_prefix_space\":true}",
    .model = "\"ignore_merges\":true"};
// clang-format on

static struct tok *open_once(const struct small_tok *small) {
    struct fault fault = {0};
    struct tok *tok;
    CHECK_MSG(small_tok_open(small, &tok, &fault) == 0, "%s: %s", fault.field, fault.text);
    return tok;
}

struct request {
    unsigned flags;
    struct tok_span spans[SPANS_MAX];
    size_t span_count;
    const char *text;
    size_t size;
};

static bool read_request(const uint8_t *data, size_t size, struct request *r) {
    size_t at = 2, place = 0;
    if (size < 2) return false;
    r->flags = data[0] & 3;
    r->span_count = data[1] % (SPANS_MAX + 1);
    if (size < at + 2 * r->span_count) return false;
    r->text = (const char *)data + at + 2 * r->span_count;
    r->size = size - at - 2 * r->span_count;
    for (size_t i = 0; i < r->span_count; i++, at += 2) {
        size_t begin = place + data[at], end = begin + data[at + 1];
        r->spans[i].begin = begin < r->size ? begin : r->size;
        r->spans[i].end = place = end < r->size ? end : r->size;
    }
    return true;
}

static void check_faithful(const struct tok *tok, const struct request *r,
                           const struct tok_ids *ids) {
    size_t at = 0, span = 0;
    for (size_t i = 0; i < ids->count; i++) {
        const char *bytes;
        size_t n = tok_bytes(tok, ids->ids[i], &bytes);
        CHECK(n > 0 && n <= r->size - at && memcmp(r->text + at, bytes, n) == 0);
        while (span < r->span_count &&
               (r->spans[span].end <= at || r->spans[span].begin == r->spans[span].end))
            span++;
        bool asked = span < r->span_count && r->spans[span].begin < at + n;
        CHECK(!tok_is_special(tok, ids->ids[i]) || (!asked && (r->flags & TOK_SPECIALS)));
        at += n;
    }
    CHECK(at == r->size);
}

static void fuzz_text(const uint8_t *data, size_t size) {
    static struct tok *toks[2];
    struct request r;
    struct arena arena;
    if (!toks[0]) toks[0] = open_once(&faithful);
    if (!toks[1]) toks[1] = open_once(&lossy);
    if (!read_request(data, size, &r)) return;
    open_arena(&arena);
    for (int i = 0; i < 2; i++) {
        struct tok_ids ids;
        struct fault fault = {0};
        int rc = tok_encode(toks[i], r.text, r.size, r.flags, r.spans, r.span_count, 1 << 20,
                            &arena, &ids, &fault);
        CHECK(rc == fault.code);
        CHECK((rc == 0) == utf8_valid(r.text, r.size));
        if (rc == 0 && i == 0) check_faithful(toks[i], &r, &ids);
        arena_reset(&arena);
    }
    arena_close(&arena);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size && data[0] == '{')
        fuzz_file((const char *)data, size);
    else
        fuzz_text(data, size);
    return 0;
}
