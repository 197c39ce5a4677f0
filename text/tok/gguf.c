/* The tokenizer of a GGUF file.
 *
 * A file holds tokens with types and either merges (`gpt2`: byte-level BPE; `gemma4`: BPE over
 * characters) or scores (`llama`: SentencePiece's BPE). It does not say how text is split into
 * words, but names a row of the table below. The rows have the patterns of the models' own
 * tokenizer.json. The names are those of llama.cpp, whose table approximates some of the patterns,
 * because its regular expressions can do less.
 *
 * Scores become merges: wherever two adjacent tokens together are a third one, they may merge, the
 * highest score first. SentencePiece describes the same in other words, so one algorithm (bpe.c)
 * serves both.
 *
 * A file does not say which tokens swallow white space beside them. The only supported family with
 * such tokens is Phi-3; its tokens are named here, as in llama.cpp. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/gguf.h"
#include "base/json.h"
#include "base/mem.h"
#include "text/tok/internal.h"

enum token_type { NORMAL = 1, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE };

#define KEY(name) "tokenizer.ggml." name
#define MARK      "\xE2\x96\x81" /* U+2581 stands for a space */

/* ---- How text is split ---- */

#define CONTRACTIONS "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define TAIL         "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define UPPER        "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOWER        "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define CASED(after)                                                                               \
    "[^\\r\\n\\p{L}\\p{N}]?" UPPER "*" LOWER "+" after "|[^\\r\\n\\p{L}\\p{N}]?" UPPER "+" LOWER   \
    "*" after

static const char llama3[] =
    CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" TAIL;
static const char seed[] =
    CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}\\r\\n]+|" TAIL;
static const char qwen35[] = CONTRACTIONS
    "|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|" TAIL;
static const char tekken[] = CASED("") "|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|" TAIL;
static const char gpt4o[] =
    CASED(CONTRACTIONS "?") "|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|" TAIL;
static const char deepseek3[] =
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{"
    "M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*|" TAIL;

/* Letters with a case, as Unicode defined them when the model was made. */
static const char deepseek_letters[] =
    "\\s?[A-Za-z\\x{b5}\\x{c0}-\\x{d6}\\x{d8}-\\x{f6}\\x{f8}-\\x{1ba}\\x{1bc}-\\x{1bf}"
    "\\x{1c4}-\\x{293}\\x{295}-\\x{2af}\\x{370}-\\x{373}\\x{376}\\x{377}\\x{37b}-\\x{37d}"
    "\\x{37f}\\x{386}\\x{388}-\\x{38a}\\x{38c}\\x{38e}-\\x{3a1}\\x{3a3}-\\x{3f5}"
    "\\x{3f7}-\\x{481}\\x{48a}-\\x{52f}\\x{531}-\\x{556}\\x{10a0}-\\x{10c5}\\x{13a0}-\\x{13f5}"
    "\\x{13f8}-\\x{13fd}\\x{1c90}-\\x{1cba}\\x{1cbd}-\\x{1cbf}\\x{1d00}-\\x{1d2b}"
    "\\x{1d6b}-\\x{1d77}\\x{1d79}-\\x{1d9a}\\x{1e00}-\\x{1f15}\\x{1f18}-\\x{1f1d}"
    "\\x{1f20}-\\x{1f45}\\x{1f48}-\\x{1f4d}\\x{1f50}-\\x{1f57}\\x{1f59}\\x{1f5b}\\x{1f5d}"
    "\\x{1f5f}-\\x{1f7d}\\x{1f80}-\\x{1fb4}\\x{1fb6}-\\x{1fbc}\\x{1fbe}\\x{1fc2}-\\x{1fc4}"
    "\\x{1fc6}-\\x{1fcc}\\x{1fd0}-\\x{1fd3}\\x{1fd6}-\\x{1fdb}\\x{1fe0}-\\x{1fec}"
    "\\x{1ff2}-\\x{1ff4}\\x{1ff6}-\\x{1ffc}\\x{2102}\\x{2107}\\x{210a}-\\x{2113}\\x{2115}"
    "\\x{2119}-\\x{211d}\\x{2124}\\x{2126}\\x{2128}\\x{212a}-\\x{212d}\\x{212f}-\\x{2134}"
    "\\x{2139}\\x{213c}-\\x{213f}\\x{2145}-\\x{2149}\\x{214e}\\x{2183}\\x{2184}"
    "\\x{2c00}-\\x{2c7b}\\x{2c7e}-\\x{2ce4}\\x{2ceb}-\\x{2cee}\\x{2cf2}\\x{2cf3}"
    "\\x{a640}-\\x{a66d}\\x{a680}-\\x{a69b}\\x{a722}-\\x{a76f}\\x{a771}-\\x{a787}"
    "\\x{a78b}-\\x{a78e}\\x{ab70}-\\x{abbf}\\x{fb00}-\\x{fb06}\\x{fb13}-\\x{fb17}"
    "\\x{ff21}-\\x{ff3a}\\x{ff41}-\\x{ff5a}\\x{10400}-\\x{1044f}\\x{104b0}-\\x{104d3}"
    "\\x{104d8}-\\x{104fb}\\x{10c80}-\\x{10cb2}\\x{10cc0}-\\x{10cf2}\\x{118a0}-\\x{118df}"
    "\\x{1e900}-\\x{1e943}]+";

/* Excludes Chinese characters, which are separate from words. */
#define HAN(what) "(?:(?!\\p{Han})" what ")"
static const char kimi[] = "\\p{Han}+|[^\\r\\n\\p{L}\\p{N}]?" HAN(UPPER) "*" HAN(
    LOWER) "+" CONTRACTIONS
           "?|[^\\r\\n\\p{L}\\p{N}]?" HAN(UPPER) "+" HAN(
               LOWER) "*" CONTRACTIONS "?|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" TAIL;

#define DIGITS    "\\p{N}"
#define WORDS_MAX 6

static const struct words {
    const char *names; /* between spaces */
    const char *patterns[WORDS_MAX];
    bool nfc, ignore_merges, add_bos;
} table[] = {
    {" llama-bpe llama3 llama-v3 falcon3 pixtral lfm2 falcon-h1 ", {llama3}, false, true, true},
    {" smaug-bpe dbrx chatglm-bpe ", {llama3}, false, false, false},
    {" glm4 ", {llama3}, false, true, false},
    {" seed-coder ", {seed}, false, false, false},
    {" qwen2 deepseek-r1-qwen ", {tok_regex_qwen2}, true, false, false},
    {" stablelm2 ", {tok_regex_qwen2}, false, false, false},
    {" qwen35 ", {qwen35}, true, false, false},
    {" smollm starcoder refact command-r codeshell ",
     {DIGITS, tok_regex_gpt2},
     false,
     false,
     false},
    {" gpt-2 gpt2 phi-2 mpt olmo exaone4 ", {tok_regex_gpt2}, false, false, false},
    {" modern-bert ", {tok_regex_gpt2}, true, false, true},
    {" tekken ", {tekken}, false, true, true},
    {" gpt-4o llama4 ", {gpt4o}, false, false, false},
    {" deepseek-coder ",
     {"[\\r\\n]", "\\s?\\p{L}+", "\\s?\\p{P}+",
      "[\\x{4e00}-\\x{9fa5}\\x{800}-\\x{4e00}\\x{ac00}-\\x{d7ff}]+", DIGITS},
     false,
     false,
     false},
    {" deepseek-llm ",
     {"[\\r\\n]", deepseek_letters,
      "\\s?[!-/:-~\\x{ff01}-\\x{ff0f}\\x{ff1a}-\\x{ff5e}\\x{2018}-\\x{201f}\\x{3000}-\\x{3002}]+",
      "\\s+\\z", "[\\x{4e00}-\\x{9fa5}\\x{800}-\\x{4e00}\\x{ac00}-\\x{d7ff}]+", "\\p{N}+"},
     false,
     false,
     false},
    {" kimi-k2 ", {kimi}, false, false, false},
    {" deepseek-v3 ",
     {"\\p{N}{1,3}", "[\\x{4e00}-\\x{9fa5}\\x{3040}-\\x{309f}\\x{30a0}-\\x{30ff}]+", deepseek3},
     false,
     false,
     false},
};

static bool names_row(const struct words *row, const struct gguf_string *pre) {
    const char *at = memmem(row->names, strlen(row->names), pre->data, pre->size);
    return pre->size > 0 && !memchr(pre->data, ' ', pre->size) && at && at[-1] == ' ' &&
           at[pre->size] == ' ';
}

static int gguf_load_words(struct tok *tok, const struct gguf *gguf, bool *add_bos,
                           struct fault *fault) {
    struct gguf_string pre = {0};
    const struct words *row = NULL;
    int rc = gguf_str(gguf, KEY("pre"), &pre, fault);
    if (rc) return rc;
    if (!pre.data)
        return fault_set(fault, ERR_UNSUPPORTED, KEY("pre"),
                         "is absent: the file does not say how text is split into words. Files "
                         "converted since May 2024 do");
    for (size_t i = 0; i < sizeof table / sizeof *table && !row; i++)
        if (names_row(&table[i], &pre)) row = &table[i];
    if (!row)
        return fault_set(fault, ERR_UNSUPPORTED, KEY("pre"), "'%.*s' is not supported",
                         (int)(pre.size < 64 ? pre.size : 64), pre.data);
    struct tok_step nfc = {.kind = TOK_STEP_FORM, .form = TOK_NFC};
    struct tok_stage split = {.kind = TOK_STAGE_SPLIT, .behavior = TOK_ISOLATED};
    if (row->nfc) rc = tok_add_step(tok, &nfc, NULL, false, "", KEY("pre"), fault);
    for (int i = 0; i < WORDS_MAX && row->patterns[i] && !rc; i++)
        rc = tok_add_stage(tok, &split, row->patterns[i], false, KEY("pre"), fault);
    tok->bytes_at = tok->stage_count;
    tok->decoder.byte_level = true;
    tok->ignore_merges = row->ignore_merges;
    *add_bos = row->add_bos;
    return rc;
}

/* ---- Tokens ---- */

struct arrays {
    const struct gguf_value *tokens, *types, *scores, *merges;
};

static int read_arrays(const struct gguf *gguf, struct arrays *a, struct fault *fault) {
    int rc = gguf_array(gguf, KEY("tokens"), GGUF_STRING, &a->tokens, fault);
    if (!rc) rc = gguf_array(gguf, KEY("token_type"), GGUF_I32, &a->types, fault);
    if (!rc) rc = gguf_array(gguf, KEY("scores"), GGUF_F32, &a->scores, fault);
    if (!rc) rc = gguf_array(gguf, KEY("merges"), GGUF_STRING, &a->merges, fault);
    if (rc) return rc;
    if (!a->tokens || a->tokens->count == 0)
        return fault_set(fault, ERR_MALFORMED, KEY("tokens"), "the file has no tokens");
    if (a->tokens->count > TOK_ID_MAX)
        return fault_set(fault, ERR_LIMIT, KEY("tokens"), "more than %d tokens", TOK_ID_MAX);
    if (a->types && a->types->count != a->tokens->count)
        return fault_set(fault, ERR_MALFORMED, KEY("token_type"), "%zu types of %zu tokens",
                         a->types->count, a->tokens->count);
    if (a->scores && a->scores->count != a->tokens->count)
        return fault_set(fault, ERR_MALFORMED, KEY("scores"), "%zu scores of %zu tokens",
                         a->scores->count, a->tokens->count);
    return 0;
}

static int gguf_type_of(const struct arrays *a, int32_t id) {
    return a->types ? (int)gguf_element_int(a->types, (size_t)id) : NORMAL;
}

static bool is(const struct gguf_string *s, const char *text) {
    return s->size == strlen(text) && memcmp(s->data, text, s->size) == 0;
}

/* Returns whether a token swallows the white space behind it, as Phi-3's own tokens do, except
 * three. */
static bool swallows(const struct gguf_string *name, int type) {
    if (is(name, "</s>")) return true;
    return type == CONTROL && !is(name, "<s>") && !is(name, "<|endoftext|>");
}

static int put_token(struct tok *tok, int32_t id, int type, bool phi3,
                     const struct gguf_string *name, struct fault *fault) {
    struct tok_added added = {.id = id,
                              .special = type == CONTROL || type == UNKNOWN,
                              .rstrip = phi3 && swallows(name, type)};
    bool matched = (added.special || type == USER_DEFINED) && name->size > 0;
    uint32_t flags = matched ? TOK_ADDED : 0;
    if (name->size > TOK_ADDED_BYTES && matched)
        return fault_set(fault, ERR_LIMIT, KEY("tokens"), "token %d has more than %d bytes", id,
                         TOK_ADDED_BYTES);
    if (added.special) flags |= TOK_SPECIAL;
    int rc = tok_vocab_put(tok, id, name->data, name->size, flags, fault);
    if (rc || !matched) return rc;
    added.pattern = tok->tokens[id].name;
    added.pattern_size = tok->tokens[id].name_size;
    tok_added_put(tok, &added);
    return 0;
}

/* Converters of WordPiece put a mark in front of tokens that begin a word, in place of the "##" in
 * front of the others. Control tokens, and names in brackets, are as they were. */
static struct gguf_string word_name(const struct gguf_string *name, int type,
                                    char own[TOK_ADDED_BYTES + 2]) {
    const size_t mark = sizeof MARK - 1;
    if (name->size >= mark && memcmp(name->data, MARK, mark) == 0)
        return (struct gguf_string){name->data + mark, name->size - mark};
    const bool bracketed =
        name->size > 2 && name->data[0] == '[' && name->data[name->size - 1] == ']';
    if (type == CONTROL || type == UNKNOWN || bracketed || name->size > TOK_ADDED_BYTES)
        return *name;
    own[0] = own[1] = '#';
    memcpy(own + 2, name->data, name->size);
    return (struct gguf_string){own, name->size + 2};
}

static int load_tokens(struct tok *tok, const struct gguf *gguf, const struct arrays *a, bool words,
                       struct fault *fault) {
    char own[TOK_ADDED_BYTES + 2];
    struct gguf_string arch = {0}, name;
    const char *at = NULL;
    int32_t id = 0;
    int rc = gguf_str(gguf, "general.architecture", &arch, fault);
    if (!rc) rc = tok_vocab_reserve(tok, (int32_t)a->tokens->count, fault);
    if (!rc) rc = tok_added_reserve(tok, a->tokens->count, fault);
    bool phi3 = !rc && is(&arch, "phi3");
    while (!rc && gguf_next(a->tokens, &at, &name)) {
        int type = gguf_type_of(a, id);
        if (tok->unknown < 0 && type == UNKNOWN) tok->unknown = id;
        if (words) name = word_name(&name, type, own);
        rc = put_token(tok, id++, type, phi3, &name, fault);
    }
    return rc ? rc : tok_vocab_index(tok, fault);
}

/* ---- Merges ---- */

/* Reads merges "a b"; a may itself begin with a space. */
static int gguf_load_merges(struct tok *tok, const struct arrays *a, struct fault *fault) {
    struct gguf_string pair;
    struct fault inner = {0};
    const char *at = NULL;
    uint32_t rank = 0;
    if (!a->merges) return fault_set(fault, ERR_MALFORMED, KEY("merges"), "the file has no merges");
    int rc = tok_merges_reserve(tok, a->merges->count, fault);
    while (!rc && gguf_next(a->merges, &at, &pair)) {
        const char *space = pair.size > 1 ? memchr(pair.data + 1, ' ', pair.size - 1) : NULL;
        size_t left = space ? (size_t)(space - pair.data) : 0;
        if (!space)
            return fault_set(fault, ERR_MALFORMED, KEY("merges"),
                             "merge %u is not two tokens with a space between", rank);
        rc = tok_merges_add(tok, pair.data, left, space + 1, pair.size - left - 1, rank++, &inner);
        if (rc) rc = fault_set(fault, rc, KEY("merges"), "%s", inner.text);
    }
    return rc;
}

static int compare_scores(const void *a, const void *b, void *arg) {
    const struct gguf_value *scores = arg;
    double x = gguf_element_num(scores, (size_t) * (const int32_t *)a);
    double y = gguf_element_num(scores, (size_t) * (const int32_t *)b);
    return (x < y) - (x > y);
}

/* Returns whether merges may make the token. Byte, control and unknown tokens are no text, so
 * nothing merges into them. */
static bool is_merged(const struct arrays *a, int32_t id) {
    int type = gguf_type_of(a, id);
    return type != BYTE && type != CONTROL && type != UNKNOWN;
}

/* Finds every way to cut the token into two others. Counts them and, if `rank` is given, adds them
 * as merges. */
static int cut_token(struct tok *tok, int32_t id, const uint32_t *rank, size_t *count,
                     struct fault *fault) {
    const struct tok_token *token = &tok->tokens[id];
    const char *name = tok->text + token->name;
    for (uint32_t i = 1; i < token->name_size; i++) {
        if (((unsigned char)name[i] & 0xC0) == 0x80) continue;
        if (tok_vocab_find_plain(tok, name, i) < 0 ||
            tok_vocab_find_plain(tok, name + i, token->name_size - i) < 0)
            continue;
        ++*count;
        int rc =
            rank ? tok_merges_add(tok, name, i, name + i, token->name_size - i, *rank, fault) : 0;
        if (rc) return rc;
    }
    return 0;
}

/* Adds the merges of tokens with scores. Tokens of equal score have one rank: of their pairs, the
 * leftmost merges first. */
static int add_scored(struct tok *tok, const struct arrays *a, const int32_t *order,
                      struct fault *fault) {
    size_t count = 0;
    uint32_t rank = 0;
    int rc = 0;
    for (int32_t id = 0; id < tok->vocab_size; id++)
        if (is_merged(a, id)) cut_token(tok, id, NULL, &count, fault);
    rc = tok_merges_reserve(tok, count, fault);
    for (int32_t i = 0; i < tok->vocab_size && !rc; i++) {
        if (i > 0 && compare_scores(&order[i - 1], &order[i], (void *)(uintptr_t)a->scores)) rank++;
        if (is_merged(a, order[i])) rc = cut_token(tok, order[i], &rank, &count, fault);
    }
    return rc;
}

static int load_scores(struct tok *tok, const struct arrays *a, struct fault *fault) {
    if (!a->scores) return fault_set(fault, ERR_MALFORMED, KEY("scores"), "the file has no scores");
    int32_t *order = mem_try_alloc((size_t)tok->vocab_size, sizeof *order);
    if (!order) return fault_set(fault, ERR_NOMEM, NULL, "not enough memory for the tokenizer");
    for (int32_t id = 0; id < tok->vocab_size; id++) {
        order[id] = id;
        if (isfinite(gguf_element_num(a->scores, (size_t)id))) continue;
        mem_free(order);
        return fault_set(fault, ERR_MALFORMED, KEY("scores"), "the score of token %d is no number",
                         id);
    }
    qsort_r(order, (size_t)tok->vocab_size, sizeof *order, compare_scores,
            (void *)(uintptr_t)a->scores);
    int rc = add_scored(tok, a, order, fault);
    mem_free(order);
    return rc;
}

/* ---- SentencePiece's text ---- */

static int load_spaces(struct tok *tok, const struct gguf *gguf, bool prefix, struct fault *fault) {
    struct tok_step prepend = {.kind = TOK_STEP_PREPEND}, replace = {.kind = TOK_STEP_REPLACE};
    struct tok_decoder *d = &tok->decoder;
    int rc = gguf_bool(gguf, KEY("add_space_prefix"), &prefix, fault);
    if (!rc && prefix) rc = tok_add_step(tok, &prepend, NULL, false, MARK, NULL, fault);
    if (!rc) rc = tok_add_step(tok, &replace, " ", true, MARK, NULL, fault);
    if (rc) return rc;
    struct tok_step *back = &d->replaces[d->replace_count++];
    back->find_size = sizeof MARK - 1;
    back->content_size = 1;
    rc = tok_text_add(tok, MARK, back->find_size, &back->find, fault);
    if (!rc) rc = tok_text_add(tok, " ", 1, &back->content, fault);
    d->byte_fallback = d->fused = true;
    if (prefix) d->strip[0] = ' ';
    d->strip_size = prefix;
    tok->byte_fallback = tok->fuse_unknown = true;
    return rc;
}

/* ---- Before and after a text ---- */

static int load_end(struct tok *tok, const struct gguf *gguf, const char *flag, const char *key,
                    bool add, int64_t id, int32_t *to, int *count, struct fault *fault) {
    int rc = gguf_bool(gguf, flag, &add, fault);
    if (!rc) rc = gguf_token(gguf, key, &id, fault);
    if (rc || !add) return rc;
    if (id < 0) return fault_set(fault, ERR_MALFORMED, key, "is absent, but %s is true", flag);
    if (id >= tok->vocab_size)
        return fault_set(fault, ERR_INVALID, key, "expected 0 to %d, found %lld",
                         tok->vocab_size - 1, (long long)id);
    to[(*count)++] = (int32_t)id;
    return 0;
}

/* Reads the tokens that begin and end texts. If a file of SentencePiece's kind names none, they
 * have SentencePiece's own ids. */
static int gguf_load_ends(struct tok *tok, const struct gguf *gguf, bool pieces, bool add_bos,
                          struct fault *fault) {
    int rc = load_end(tok, gguf, KEY("add_bos_token"), KEY("bos_token_id"), add_bos,
                      pieces ? 1 : -1, tok->template_before, &tok->before_count, fault);
    if (rc) return rc;
    return load_end(tok, gguf, KEY("add_eos_token"), KEY("eos_token_id"), false, pieces ? 2 : -1,
                    tok->template_after, &tok->after_count, fault);
}

/* ---- WordPiece ---- */

/* A vocabulary with a capital letter tells capitals from small letters; the file does not say so.
 */
static bool has_capitals(const struct tok *tok) {
    for (int32_t id = 0; id < tok->vocab_size; id++) {
        const struct tok_token *token = &tok->tokens[id];
        const char *name = tok->text + token->name;
        if (token->flags & TOK_SPECIAL || (token->name_size > 0 && name[0] == '[')) continue;
        for (uint32_t i = 0; i < token->name_size; i++)
            if (name[i] >= 'A' && name[i] <= 'Z') return true;
    }
    return false;
}

static int load_wordpiece(struct tok *tok, const struct gguf *gguf, struct fault *fault) {
    static const struct json_limits limits = {.bytes = 1024, .depth = 8, .nodes = 64, .file = true};
    int64_t first = 101, last = 102, unknown = 100;
    char text[512];
    cJSON *root = NULL;
    int rc = gguf_token(gguf, KEY("bos_token_id"), &first, fault);
    if (!rc) rc = gguf_token(gguf, KEY("cls_token_id"), &first, fault);
    if (!rc) rc = gguf_token(gguf, KEY("eos_token_id"), &last, fault);
    if (!rc) rc = gguf_token(gguf, KEY("seperator_token_id"), &last, fault); /* so it is spelled */
    if (!rc) rc = gguf_token(gguf, KEY("unknown_token_id"), &unknown, fault);
    if (rc) return rc;
    if (unknown < 0 || unknown >= tok->vocab_size)
        return fault_set(fault, ERR_INVALID, KEY("unknown_token_id"),
                         "expected 0 to %d, found %lld", tok->vocab_size - 1, (long long)unknown);
    tok->model = TOK_MODEL_WORDS;
    tok->unknown = (int32_t)unknown;
    tok->word_chars_max = 100;
    tok->word_prefix_size = 2;
    rc = tok_text_add(tok, "##", 2, &tok->word_prefix, fault);
    snprintf(text, sizeof text,
             "{\"normalizer\":{\"type\":\"BertNormalizer\",\"lowercase\":%s},\"pre_tokenizer\":"
             "{\"type\":\"BertPreTokenizer\"},\"decoder\":{\"type\":\"WordPiece\"},"
             "\"post_processor\":{\"type\":\"BertProcessing\",\"cls\":[\"\",%lld],"
             "\"sep\":[\"\",%lld]}}",
             has_capitals(tok) ? "false" : "true", (long long)first, (long long)last);
    if (!rc) rc = json_parse(text, strlen(text), &limits, &root, fault);
    if (!rc) rc = tok_load_pipeline(tok, root, fault);
    json_free(root);
    return rc;
}

/* ---- The file ---- */

static int load(struct tok *tok, const struct gguf *gguf, struct fault *fault) {
    struct gguf_string model = {0};
    struct arrays a = {0};
    bool add_bos = true;
    int rc = gguf_str(gguf, KEY("model"), &model, fault);
    if (rc) return rc;
    if (!model.data)
        return fault_set(fault, ERR_MALFORMED, KEY("model"), "the file has no tokenizer");
    const bool pieces = is(&model, "llama"), spaces = pieces || is(&model, "gemma4");
    const bool words = is(&model, "bert");
    if (!spaces && !words && !is(&model, "gpt2"))
        return fault_set(fault, ERR_UNSUPPORTED, KEY("model"),
                         "'%.*s' is not supported, only 'gpt2' (byte-level BPE), 'llama' "
                         "(SentencePiece BPE), 'gemma4' and 'bert' (WordPiece)",
                         (int)(model.size < 64 ? model.size : 64), model.data);
    rc = read_arrays(gguf, &a, fault);
    if (!rc) rc = load_tokens(tok, gguf, &a, words, fault);
    if (!rc && words) {
        rc = load_wordpiece(tok, gguf, fault);
        return rc ? rc : tok_finish(tok, fault);
    }
    if (!rc)
        rc = spaces ? load_spaces(tok, gguf, pieces, fault)
                    : gguf_load_words(tok, gguf, &add_bos, fault);
    if (!rc) rc = pieces ? load_scores(tok, &a, fault) : gguf_load_merges(tok, &a, fault);
    if (!rc) rc = gguf_load_ends(tok, gguf, pieces, add_bos, fault);
    return rc ? rc : tok_finish(tok, fault);
}

int tok_open_gguf(const struct gguf *gguf, struct tok **out, struct fault *fault) {
    *out = NULL;
    struct tok *tok = tok_make();
    if (!tok) return fault_set(fault, ERR_NOMEM, NULL, "not enough memory for the tokenizer");
    int rc = load(tok, gguf, fault);
    if (rc)
        tok_close(tok);
    else
        *out = tok;
    return rc;
}
