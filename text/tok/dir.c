/* A model directory's tokenizer: tokenizer.json, or the files that came before it.
 *
 * The older files hold the vocabulary and the merges, and leave the rest to a class of
 * transformers. Two classes are known here, Qwen2's and GPT-2's; both are byte-level BPE. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "text/tok/internal.h"

static const struct json_limits limits = {
    .bytes = TOK_FILE_MAX, .depth = 64, .nodes = TOK_NODES_MAX, .file = true};

/* ---- vocab.json, merges.txt, tokenizer_config.json ---- */

/* Keys of added_tokens_decoder are ids. */
static int dir_read_key(const char *key, int32_t *id) {
    char *end;
    long value = strtol(key, &end, 10);
    if (key[0] < '0' || key[0] > '9' || *end || value >= TOK_ID_MAX) return ERR_INVALID;
    *id = (int32_t)value;
    return 0;
}

static int dir_read_entries(const cJSON *decoder, struct tok_entry *entries, struct fault *fault) {
    const cJSON *node;
    size_t i = 0;
    cJSON_ArrayForEach(node, decoder) {
        char path[64];
        int32_t id;
        snprintf(path, sizeof path, "added_tokens_decoder.%.32s", node->string);
        if (dir_read_key(node->string, &id))
            return fault_set(fault, ERR_MALFORMED, path, "expected an id below %d", TOK_ID_MAX);
        int rc = tok_load_entry(node, path, id, &entries[i++], fault);
        if (rc) return rc;
    }
    return 0;
}

static int load_parts_vocab(struct tok *tok, const cJSON *vocab, const cJSON *config,
                            struct fault *fault) {
    const cJSON *decoder = json_get(config, "added_tokens_decoder");
    if (!cJSON_IsObject(decoder))
        return fault_set(fault, ERR_NOTFOUND, "added_tokens_decoder",
                         "needed in tokenizer_config.json where there is no tokenizer.json");
    size_t count = (size_t)cJSON_GetArraySize(decoder);
    struct tok_entry *entries = mem_try_alloc(count, sizeof *entries);
    if (!entries) return fault_set(fault, ERR_NOMEM, NULL, "not enough memory for the tokenizer");
    int rc = dir_read_entries(decoder, entries, fault);
    if (!rc) rc = tok_load_vocab(tok, vocab, entries, count, fault);
    mem_free(entries);
    return rc;
}

static size_t line_size(const char *at, const char *end) {
    const char *newline = memchr(at, '\n', (size_t)(end - at));
    return (size_t)((newline ? newline : end) - at);
}

static int add_line(struct tok *tok, const char *line, size_t size, uint32_t *rank,
                    struct fault *fault) {
    if (size && line[size - 1] == '\r') size--;
    if (size == 0 || (size >= 8 && memcmp(line, "#version", 8) == 0)) return 0;
    const char *space = memchr(line, ' ', size);
    size_t left = space ? (size_t)(space - line) : 0;
    if (!space || memchr(space + 1, ' ', size - left - 1))
        return fault_set(fault, ERR_MALFORMED, "merges.txt", "merge %u: expected two token strings",
                         *rank);
    return tok_merges_add(tok, line, left, space + 1, size - left - 1, (*rank)++, fault);
}

static int load_merge_lines(struct tok *tok, const char *text, size_t size, struct fault *fault) {
    const char *end = text + size;
    size_t lines = 1;
    if (size >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) text += 3; /* a byte-order mark */
    for (const char *p = text; p < end; p += line_size(p, end) + 1) lines++;
    int rc = tok_merges_reserve(tok, lines, fault);
    uint32_t rank = 0;
    for (const char *p = text; p < end && !rc; p += line_size(p, end) + 1)
        rc = add_line(tok, p, line_size(p, end), &rank, fault);
    return rc;
}

/* The class must be a known one: these files do not say how it splits text. */
static int load_class(struct tok *tok, const cJSON *config, struct fault *fault) {
    const char *class = "";
    bool prefix_space = false, bos = false;
    int rc = json_str(config, NULL, "tokenizer_class", &class, fault);
    if (!rc) rc = json_bool(config, NULL, "add_prefix_space", &prefix_space, fault);
    if (!rc) rc = json_bool(config, NULL, "add_bos_token", &bos, fault);
    if (rc) return rc;
    bool qwen2 = strncmp(class, "Qwen2Tokenizer", 14) == 0;
    if (!qwen2 && strncmp(class, "GPT2Tokenizer", 13) != 0)
        return fault_set(fault, ERR_UNSUPPORTED, "tokenizer_class",
                         "'%.64s' without tokenizer.json is not supported", class);
    if (bos)
        return fault_set(fault, ERR_UNSUPPORTED, "add_bos_token",
                         "is not supported without tokenizer.json");
    struct tok_step nfc = {.kind = TOK_STEP_FORM, .form = TOK_NFC};
    if (qwen2) rc = tok_add_step(tok, &nfc, NULL, false, "", "tokenizer_class", fault);
    if (!rc && prefix_space)
        rc = tok_add_stage(tok, &(struct tok_stage){.kind = TOK_STAGE_PREFIX_SPACE}, NULL, false,
                           "add_prefix_space", fault);
    struct tok_stage split = {.kind = TOK_STAGE_SPLIT, .behavior = TOK_ISOLATED};
    if (!rc)
        rc = tok_add_stage(tok, &split, qwen2 ? tok_regex_qwen2 : tok_regex_gpt2, false,
                           "tokenizer_class", fault);
    tok->bytes_at = tok->stage_count;
    tok->decoder.byte_level = true;
    return rc;
}

int tok_open_parts(const struct tok_parts *parts, struct tok **out, struct fault *fault) {
    cJSON *vocab = NULL, *config = NULL;
    *out = NULL;
    struct tok *tok = tok_make();
    if (!tok) return fault_set(fault, ERR_NOMEM, NULL, "not enough memory for the tokenizer");
    int rc = json_parse(parts->vocab, parts->vocab_size, &limits, &vocab, fault);
    if (!rc) rc = json_parse(parts->config, parts->config_size, &limits, &config, fault);
    if (!rc && !cJSON_IsObject(config))
        rc = fault_set(fault, ERR_MALFORMED, "tokenizer_config.json", "expected an object");
    if (!rc) rc = load_class(tok, config, fault);
    if (!rc) rc = load_parts_vocab(tok, vocab, config, fault);
    if (!rc) rc = load_merge_lines(tok, parts->merges, parts->merges_size, fault);
    if (!rc) rc = tok_finish(tok, fault);
    json_free(vocab);
    json_free(config);
    if (rc)
        tok_close(tok);
    else
        *out = tok;
    return rc;
}

/* ---- Directories ---- */

static int read_in(const char *dir, const char *name, char **data, size_t *size,
                   struct fault *fault) {
    char path[4096];
    *data = NULL;
    int n = snprintf(path, sizeof path, "%s/%s", dir, name);
    if (n < 0 || (size_t)n >= sizeof path)
        return fault_set(fault, ERR_LIMIT, name, "the path of the model directory is too long");
    return file_read(path, TOK_FILE_MAX, data, size, fault);
}

static int open_dir_parts(const char *dir, struct tok **out, struct fault *fault) {
    char *vocab = NULL, *merges = NULL, *config = NULL;
    struct tok_parts parts = {0};
    int rc = read_in(dir, "vocab.json", &vocab, &parts.vocab_size, fault);
    if (rc == ERR_NOTFOUND)
        rc = fault_set(fault, ERR_NOTFOUND, "tokenizer.json",
                       "not in %.200s, and no vocab.json with merges.txt either", dir);
    if (!rc) rc = read_in(dir, "merges.txt", &merges, &parts.merges_size, fault);
    if (!rc) rc = read_in(dir, "tokenizer_config.json", &config, &parts.config_size, fault);
    parts.vocab = vocab;
    parts.merges = merges;
    parts.config = config;
    if (!rc) rc = tok_open_parts(&parts, out, fault);
    mem_free(vocab);
    mem_free(merges);
    mem_free(config);
    return rc;
}

int tok_open_dir(const char *dir, struct tok **out, struct fault *fault) {
    struct fault first = {0};
    char *data;
    size_t size;
    *out = NULL;
    int rc = read_in(dir, "tokenizer.json", &data, &size, &first);
    if (rc == ERR_NOTFOUND) return open_dir_parts(dir, out, fault);
    if (rc) {
        if (fault) *fault = first;
        return rc;
    }
    rc = tok_open(data, size, out, &first);
    mem_free(data);
    return rc ? fault_set(fault, rc, "tokenizer.json", "%s%s%.300s", first.field,
                          first.field[0] ? ": " : "", first.text)
              : 0;
}
