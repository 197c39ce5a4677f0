/* Tokenizers of GGUF files: what is read, what is refused, and what the types of tokens mean. */
#include <criterion/criterion.h>

#include "tests/unit/gguf_file.h"
#include "tests/unit/text/tok/tok_support.h"

static struct arena arena;

static void open_arena(void) {
    arena_open(&arena, (size_t)1 << 26);
}

static void close_arena(void) {
    mem_fail_after(-1);
    arena_close(&arena);
}

TestSuite(tok_gguf, .init = open_arena, .fini = close_arena);

enum { NORMAL = 1, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE };

struct entry {
    const char *name;
    int type;
    float score;
};

/* The 256 bytes follow the entries: in the byte alphabet (gpt2), or as "<0x0A>" (llama). */
struct vocab {
    const char *model, *pre;
    const struct entry *entries;
    size_t count;
    const char *const *merges;
    size_t merge_count;
    const char *flag; /* a key that is true */
    const char *architecture;
    bool no_scores, few_types;
    int bos; /* -1: none */
};

static void byte_name(const struct vocab *v, unsigned byte, char out[16]) {
    if (strcmp(v->model, "llama") == 0)
        snprintf(out, 16, "<0x%02X>", byte);
    else
        small_byte_name(byte, out);
}

static void put_vocab(struct buf *file, const struct vocab *v) {
    char name[16];
    size_t total = v->count + 256;
    put_array(file, "tokenizer.ggml.tokens", GGUF_STRING, total);
    for (size_t i = 0; i < v->count; i++) put_string(file, v->entries[i].name);
    for (unsigned byte = 0; byte < 256; byte++) {
        byte_name(v, byte, name);
        put_string(file, name);
    }
    size_t types = v->few_types ? v->count : total;
    put_array(file, "tokenizer.ggml.token_type", GGUF_I32, types);
    for (size_t i = 0; i < types; i++)
        put(file, i < v->count ? (uint64_t)v->entries[i].type : BYTE, 4);
}

static void put_scores(struct buf *file, const struct vocab *v) {
    put_array(file, "tokenizer.ggml.scores", GGUF_F32, v->count + 256);
    for (size_t i = 0; i < v->count + 256; i++) {
        float score = i < v->count ? v->entries[i].score : 0;
        buf_add(file, (const char *)&score, sizeof score);
    }
}

static void write_vocab(struct buf *file, const struct vocab *v) {
    uint64_t values = 4 + (v->pre != NULL) + (v->flag != NULL) + !v->no_scores +
                      (v->architecture != NULL) + (v->bos >= 0);
    buf_open(file, 1 << 20);
    put_head(file, 3, 0, values);
    put_text(file, "tokenizer.ggml.model", v->model);
    if (v->pre) put_text(file, "tokenizer.ggml.pre", v->pre);
    put_vocab(file, v);
    if (!v->no_scores) put_scores(file, v);
    put_array(file, "tokenizer.ggml.merges", GGUF_STRING, v->merge_count);
    for (size_t i = 0; i < v->merge_count; i++) put_string(file, v->merges[i]);
    if (v->flag) put_int(file, v->flag, GGUF_BOOL, 1, 1);
    if (v->architecture) put_text(file, "general.architecture", v->architecture);
    if (v->bos >= 0) put_u32(file, "tokenizer.ggml.bos_token_id", (uint32_t)v->bos);
}

static int open_vocab(const struct vocab *v, struct tok **tok, struct fault *fault) {
    struct buf file;
    struct gguf gguf;
    write_vocab(&file, v);
    cr_assert_eq(gguf_parse(file.data, file.size, &gguf, fault), 0, "%s", fault->text);
    int rc = tok_open_gguf(&gguf, tok, fault);
    gguf_close(&gguf);
    buf_close(&file);
    return rc;
}

static struct tok *open_good(const struct vocab *v) {
    struct fault fault = {0};
    struct tok *tok;
    cr_assert_eq(open_vocab(v, &tok, &fault), 0, "%s: %s", fault.field, fault.text);
    return tok;
}

static void expect_ids(const struct tok *tok, const char *text, unsigned flags,
                       const char *expected) {
    char line[512] = "";
    struct fault fault = {0};
    struct tok_ids ids;
    size_t used = 0;
    cr_assert_eq(tok_encode(tok, text, strlen(text), flags, NULL, 0, 100, &arena, &ids, &fault), 0,
                 "%s", fault.text);
    for (size_t i = 0; i < ids.count; i++)
        used += (size_t)snprintf(line + used, sizeof line - used, "%s%d", i ? " " : "", ids.ids[i]);
    cr_expect_str_eq(line, expected, "\"%s\": %s, not %s", text, line, expected);
}

/* ---- Scores ---- */

#define M "\xE2\x96\x81"

static const struct entry pieces[] = {
    {"<unk>", UNKNOWN, 0}, {"<s>", CONTROL, 0}, {"</s>", CONTROL, 0}, {"<t>", USER_DEFINED, 0},
    {M, NORMAL, -9},       {"a", NORMAL, -9},   {"b", NORMAL, -9},    {"c", NORMAL, -9},
    {"ab", NORMAL, -2},    {"bc", NORMAL, -1},  {M "a", NORMAL, -2},  {"<", NORMAL, -9},
    {"s", NORMAL, -9},     {">", NORMAL, -9},   {"<s", NORMAL, -1}};

#define PIECES                                                                                     \
    .model = "llama", .entries = pieces, .count = sizeof pieces / sizeof *pieces, .bos = -1

Test(tok_gguf, the_highest_score_merges_first) {
    struct tok *tok = open_good(&(struct vocab){PIECES});
    expect_ids(tok, "abc", 0, "10 9"); /* bc before ab and before the mark with a */
    expect_ids(tok, "ab", 0, "10 6");  /* equal scores: from the left */
    expect_ids(tok, "cab", 0, "4 7 8");
    expect_ids(tok, "\n", 0, "4 25");     /* a byte */
    expect_ids(tok, "<s>", 0, "4 14 13"); /* text never becomes a control token */
    expect_ids(tok, "<s>", TOK_SPECIALS, "1");
    expect_ids(tok, "a<t>a", 0, "10 3 10"); /* a user's token is matched everywhere */
    expect_ids(tok, "a", TOK_TEMPLATE, "1 10");
    const char *bytes;
    cr_expect_eq(tok_bytes(tok, 10, &bytes), 2);
    cr_expect_eq(tok_bytes_first(tok, 10, &bytes), 1);
    cr_expect_eq(tok_bytes(tok, 25, &bytes), 1);
    cr_expect_eq(*bytes, '\n');
    cr_expect(tok_is_special(tok, 1) && !tok_is_special(tok, 3));
    tok_close(tok);
}

Test(tok_gguf, phi_3_tokens_swallow_white_space) {
    struct tok *tok = open_good(&(struct vocab){PIECES, .architecture = "phi3"});
    expect_ids(tok, "</s> \n a", TOK_SPECIALS, "2 10");
    expect_ids(tok, "<s> a", TOK_SPECIALS, "1 4 10");
    tok_close(tok);
}

/* ---- Merges ---- */

static const struct entry words[] = {{"<|end|>", CONTROL, 0}, {"ab", NORMAL, 0}, {"12", NORMAL, 0}};
static const char *const merges[] = {"a b", "1 2"};

#define WORDS                                                                                      \
    .model = "gpt2", .entries = words, .count = 3, .merges = merges, .merge_count = 2, .bos = 0,   \
    .no_scores = true

Test(tok_gguf, words_by_name) {
    struct tok *tok = open_good(&(struct vocab){WORDS, .pre = "gpt-2"});
    expect_ids(tok, "ab12<|end|>", TOK_SPECIALS | TOK_TEMPLATE, "1 2 0");
    tok_close(tok);
    tok = open_good(&(struct vocab){WORDS, .pre = "smollm"});
    expect_ids(tok, "ab12", TOK_TEMPLATE, "1 52 53"); /* every digit alone */
    tok_close(tok);
    tok = open_good(&(struct vocab){WORDS, .pre = "seed-coder"});
    expect_ids(tok, "ab12", TOK_TEMPLATE, "1 52 53");
    tok_close(tok);
    tok = open_good(&(struct vocab){WORDS, .pre = "glm4"});
    expect_ids(tok, "ab12", TOK_TEMPLATE, "1 2");
    tok_close(tok);
    tok = open_good(&(struct vocab){WORDS, .pre = "deepseek-llm"});
    expect_ids(tok, "ab12", TOK_TEMPLATE, "1 2");
    expect_ids(tok, "ab ab\n12", TOK_TEMPLATE, "1 35 1 13 2");
    tok_close(tok);
    tok = open_good(&(struct vocab){WORDS, .pre = "kimi-k2"});
    expect_ids(tok, "ab12", TOK_TEMPLATE, "1 2");
    tok_close(tok);
    tok = open_good(&(struct vocab){WORDS, .pre = "llama-bpe"});
    expect_ids(tok, "ab12", TOK_TEMPLATE, "0 1 2"); /* begins with a token unless told otherwise */
    tok_close(tok);
    tok = open_good(&(struct vocab){WORDS, .pre = "qwen2", .flag = "tokenizer.ggml.add_bos_token"});
    expect_ids(tok, "e\xCC\x81", TOK_TEMPLATE, "0 198 172"); /* composed */
    tok_close(tok);
}

Test(tok_gguf, refuses_by_name) {
    static const char *const bad[] = {"a b", "ab"}, *const gone[] = {"a zz"};
    const struct {
        struct vocab vocab;
        int rc;
        const char *field;
    } rows[] = {
        {{.model = "rwkv", .bos = -1}, ERR_UNSUPPORTED, "tokenizer.ggml.model"},
        {{WORDS}, ERR_UNSUPPORTED, "tokenizer.ggml.pre"},
        {{WORDS, .pre = "smollm starcoder"}, ERR_UNSUPPORTED, "tokenizer.ggml.pre"},
        {{WORDS, .pre = "smol"}, ERR_UNSUPPORTED, "tokenizer.ggml.pre"},
        {{WORDS, .pre = ""}, ERR_UNSUPPORTED, "tokenizer.ggml.pre"},
        {{PIECES, .no_scores = true}, ERR_MALFORMED, "tokenizer.ggml.scores"},
        {{PIECES, .few_types = true}, ERR_MALFORMED, "tokenizer.ggml.token_type"},
        {{PIECES, .flag = "tokenizer.ggml.scores.x"}, 0, ""},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct fault fault = {0};
        struct tok *tok;
        cr_expect_eq(open_vocab(&rows[i].vocab, &tok, &fault), rows[i].rc, "row %zu: %s", i,
                     fault.text);
        cr_expect_str_eq(fault.field, rows[i].field, "row %zu: %s", i, fault.field);
        tok_close(tok);
    }
    struct vocab v = {WORDS, .pre = "gpt-2"};
    struct fault fault = {0};
    struct tok *tok;
    v.merges = bad;
    cr_expect_eq(open_vocab(&v, &tok, &fault), ERR_MALFORMED);
    cr_expect_str_eq(fault.field, "tokenizer.ggml.merges");
    v.merges = gone;
    v.merge_count = 1;
    cr_expect_eq(open_vocab(&v, &tok, &fault), ERR_MALFORMED);
    cr_expect_str_eq(fault.field, "tokenizer.ggml.merges");
    v = (struct vocab){WORDS, .pre = "tekken"};
    v.bos = -1;
    cr_expect_eq(open_vocab(&v, &tok, &fault), ERR_MALFORMED);
    cr_expect_str_eq(fault.field, "tokenizer.ggml.bos_token_id");
    v.bos = 259;
    cr_expect_eq(open_vocab(&v, &tok, &fault), ERR_INVALID);
    cr_expect_str_eq(fault.field, "tokenizer.ggml.bos_token_id");
}

Test(tok_gguf, survives_failing_memory) {
    const struct vocab vocabs[] = {{PIECES}, {WORDS, .pre = "deepseek-v3"}};
    for (size_t i = 0; i < 2; i++) {
        struct buf file;
        struct gguf gguf;
        struct fault fault = {0};
        int rc = ERR_NOMEM;
        write_vocab(&file, &vocabs[i]);
        cr_assert_eq(gguf_parse(file.data, file.size, &gguf, &fault), 0);
        for (long n = 0; rc == ERR_NOMEM && n < 10000; n++) {
            struct tok *tok;
            mem_fail_after(n);
            rc = tok_open_gguf(&gguf, &tok, &fault);
            /* Where PCRE2 can do without, the load may succeed although something failed. */
            if (rc == 0 && !mem_fail_pending()) rc = ERR_NOMEM;
            mem_fail_after(-1);
            cr_assert(rc == 0 || rc == ERR_NOMEM, "allocation %ld: %s", n, err_name(rc));
            tok_close(tok);
        }
        cr_expect_eq(rc, 0);
        gguf_close(&gguf);
        buf_close(&file);
    }
}
