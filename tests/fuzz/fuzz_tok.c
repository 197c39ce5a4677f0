/* Three fuzzers in one, told apart by the first byte.
 *
 * '{': a tokenizer.json up to the first NUL, which opens or is refused; then a text for it.
 * 'G': the same with a GGUF file, whose tokenizer opens or is refused.
 * Else: flags, a count of untrusted spans, (gap, length) of each, and a text for the tokenizers
 * made here. Decoding gives the text back, and untrusted text never gives a special token. */
#include <string.h>

#include "base/arena.h"
#include "base/check.h"
#include "base/gguf.h"
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

/* ---- A tokenizer from outside ---- */

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

static void fuzz_gguf(const char *data, size_t size) {
    struct fault fault = {0};
    struct gguf gguf;
    struct tok *tok;
    if (gguf_parse(data, size, &gguf, &fault)) return;
    int rc = tok_open_gguf(&gguf, &tok, &fault);
    gguf_close(&gguf);
    CHECK((rc == 0) == (tok != NULL) && rc == fault.code);
    if (rc) return;
    use(tok, sample, sizeof sample - 1);
    tok_close(tok);
}

/* ---- A text from outside ---- */

// clang-format off
/* A lossless tokenizer: no normalizer, nothing removed, all bytes known. */
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

/* All steps of the normalizer that need no table of the file. */
static const struct small_tok normalizing = {
    .vocab = "\"he\":256",
    .merges = "\"h e\"",
    .added = "["
        ADDED(300, "<|x|>", SPECIAL) ","
        ADDED(301, "\\u00c9X", ",\"special\":true,\"normalized\":true") "]",
    .normalizer =
        "{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Nmt\"},{\"type\":\"NFKD\"},"
        "{\"type\":\"StripAccents\"},{\"type\":\"Lowercase\"},"
        "{\"type\":\"Strip\",\"strip_left\":true,\"strip_right\":true},"
        "{\"type\":\"Replace\",\"pattern\":{\"Regex\":\" {2,}\"},\"content\":\"he\"}]}"};
// clang-format on

/* SentencePiece-style: characters, byte fallback, added tokens on both sides of the normalizer.
 * Both models give back what they cut, with U+2581 as a space. */
#define PIECES_MODEL_BPE                                                                           \
    "\"type\":\"BPE\",\"unk_token\":\"<unk>\",\"fuse_unk\":true,\"byte_fallback\":true,"           \
    "\"merges\":[\"l l\",\"h e\",\"he ll\",\"\\u2581 \\u2581\",\"\\u2581 w\",\"\\u00e9 x\"]"
#define PIECES_MODEL_UNIGRAM "\"type\":\"Unigram\",\"unk_id\":0,\"byte_fallback\":true"

static void pieces_json(struct buf *json, bool unigram) {
    static const char *const names[] = {
        "<unk>",         "h",        "e",   "l",        "w",
        "\\u2581",       "x",        "ll",  "he",       "hell",
        "\\u00e9",       "\\u00e9x", "<y>", "\\u2581w", "\\u2581\\u2581",
        "\\u4e2d\\u6587"};
    enum { COUNT = sizeof names / sizeof *names };
    buf_open(json, 1 << 16);
    buf_fmt(json, "{\"model\":{%s,\"vocab\":%s", unigram ? PIECES_MODEL_UNIGRAM : PIECES_MODEL_BPE,
            unigram ? "[" : "{");
    for (int i = 0; i < COUNT + 256; i++) {
        char name[16];
        if (i < COUNT)
            snprintf(name, sizeof name, "%s", names[i]);
        else
            snprintf(name, sizeof name, "<0x%02X>", (unsigned)(i - COUNT));
        buf_fmt(json, unigram ? "%s[\"%s\",%d]" : "%s\"%s\":%d", i ? "," : "", name,
                unigram ? -(i % 7) - 1 : i);
    }
    buf_fmt(
        json,
        "%s},\"added_tokens\":[" ADDED(300, "<|x|>", SPECIAL) "," ADDED(
            301, "<s> w", ",\"special\":true,\"normalized\":true") "," ADDED(12, "<y>",
                                                                             ",\"normalized\":"
                                                                             "false") "],"
                                                                                      "\"normalizer"
                                                                                      "\":{"
                                                                                      "\"type\":"
                                                                                      "\"Replace\","
                                                                                      "\"pattern\":"
                                                                                      "{\"String\":"
                                                                                      "\" "
                                                                                      "\"},"
                                                                                      "\"content\":"
                                                                                      "\"\\u2581\"}"
                                                                                      ","
                                                                                      "\"decoder\":"
                                                                                      "{\"type\":"
                                                                                      "\"Sequence\""
                                                                                      ",\"decoders"
                                                                                      "\":[{"
                                                                                      "\"type\":"
                                                                                      "\"Replace\","
                                                                                      "\"pattern\":"
                                                                                      "{\"String\":"
                                                                                      "\"\\u2581\"}"
                                                                                      ",\"content\""
                                                                                      ":\" "
                                                                                      "\"},{"
                                                                                      "\"type\":"
                                                                                      "\"ByteFallba"
                                                                                      "ck\"},"
                                                                                      "{\"type\":"
                                                                                      "\"Fuse\"}]}"
                                                                                      "}",
        unigram ? "]" : "}");
}

static struct tok *open_pieces(bool unigram) {
    struct buf json;
    struct fault fault = {0};
    struct tok *tok;
    pieces_json(&json, unigram);
    CHECK_MSG(tok_open(json.data, json.size, &tok, &fault) == 0, "%s: %s", fault.field, fault.text);
    buf_close(&json);
    return tok;
}

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

/* Three bytes E2 96 81 of the text are one space of a token. Unigram takes "<0x41>" in a text for
 * the token of that name, as huggingface/tokenizers does: such texts do not come back. */
static void check_pieces(const struct tok *tok, const struct request *r,
                         const struct tok_ids *ids) {
    size_t at = 0;
    if (memmem(r->text, r->size, "<0x", 3)) return;
    for (size_t i = 0; i < ids->count; i++) {
        const char *bytes;
        size_t n = tok_bytes(tok, ids->ids[i], &bytes), begin = at;
        for (size_t k = 0; k < n; k++) {
            bool mark = r->size - at >= 3 && memcmp(r->text + at, "\xE2\x96\x81", 3) == 0;
            CHECK(at < r->size && bytes[k] == (mark ? ' ' : r->text[at]));
            at += mark ? 3 : 1;
        }
        for (size_t k = 0; tok_is_special(tok, ids->ids[i]) && k < r->span_count; k++)
            CHECK(r->spans[k].begin == r->spans[k].end || r->spans[k].end <= begin ||
                  r->spans[k].begin >= at);
    }
    CHECK(at == r->size);
}

enum { FAITHFUL, LOSSY, NORMALIZING, PIECES_BPE, PIECES_UNIGRAM, TOKS };

static void fuzz_text(const uint8_t *data, size_t size) {
    static struct tok *toks[TOKS];
    struct request r;
    struct arena arena;
    if (!toks[0]) {
        toks[FAITHFUL] = open_once(&faithful);
        toks[LOSSY] = open_once(&lossy);
        toks[NORMALIZING] = open_once(&normalizing);
        toks[PIECES_BPE] = open_pieces(false);
        toks[PIECES_UNIGRAM] = open_pieces(true);
    }
    if (!read_request(data, size, &r)) return;
    open_arena(&arena);
    for (int i = 0; i < TOKS; i++) {
        struct tok_ids ids;
        struct fault fault = {0};
        int rc = tok_encode(toks[i], r.text, r.size, r.flags, r.spans, r.span_count, 1 << 20,
                            &arena, &ids, &fault);
        CHECK(rc == fault.code);
        CHECK((rc == 0) == utf8_valid(r.text, r.size));
        if (rc == 0 && i == FAITHFUL) check_faithful(toks[i], &r, &ids);
        if (rc == 0 && i >= PIECES_BPE) check_pieces(toks[i], &r, &ids);
        arena_reset(&arena);
    }
    arena_close(&arena);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size && data[0] == '{')
        fuzz_file((const char *)data, size);
    else if (size && data[0] == 'G')
        fuzz_gguf((const char *)data, size);
    else
        fuzz_text(data, size);
    return 0;
}
