/* tokenizer.json: model, vocabulary, added tokens and merges.
 *
 * The file's JSON tree lives only while loading. Everything that a file can get wrong is refused
 * here with the name of its field: at a request it would be too late, and a vocabulary that was
 * read in part would give a model other tokens than it was trained with. */
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "text/tok/internal.h"

/* Memory in which a short text must be encoded. */
#define TRY_BYTES ((size_t)16 << 20)

static const struct json_limits limits = {
    .bytes = TOK_FILE_MAX, .depth = 64, .nodes = TOK_NODES_MAX, .file = true};

static int load_no_memory(struct fault *fault) {
    return fault_set(fault, ERR_NOMEM, NULL, "not enough memory for the tokenizer");
}

/* ---- Vocabulary and added tokens ---- */

static int bad_id(const char *name, struct fault *fault) {
    return fault_set(fault, ERR_MALFORMED, "model.vocab",
                     "the id of '%.64s' is not an integer below %d", name, TOK_ID_MAX);
}

/* Highest id + 1. BPE: {"name": id, ...}; Unigram: [["name", score], ...], ids in order. */
static int count_ids(const cJSON *vocab, int64_t *ids, struct fault *fault) {
    const cJSON *entry;
    if (cJSON_IsArray(vocab)) {
        *ids = cJSON_GetArraySize(vocab);
        return *ids <= TOK_ID_MAX
                   ? 0
                   : fault_set(fault, ERR_LIMIT, "model.vocab", "more than %d tokens", TOK_ID_MAX);
    }
    cJSON_ArrayForEach(entry, vocab) {
        int64_t id;
        if (json_node_int(entry, 0, TOK_ID_MAX - 1, &id)) return bad_id(entry->string, fault);
        if (id >= *ids) *ids = id + 1;
    }
    return 0;
}

static int put_names(struct tok *tok, const cJSON *vocab, struct fault *fault) {
    const cJSON *entry;
    int rc = 0;
    cJSON_ArrayForEach(entry, vocab) {
        int64_t id = 0;
        json_node_int(entry, 0, TOK_ID_MAX - 1, &id);
        rc = tok_vocab_put(tok, (int32_t)id, entry->string, strlen(entry->string), 0, fault);
        if (rc) break;
    }
    return rc;
}

static int put_scored(struct tok *tok, const cJSON *vocab, struct fault *fault) {
    const cJSON *entry;
    int32_t id = 0;
    int rc = 0;
    tok->scores = mem_try_alloc((size_t)tok->vocab_size, sizeof *tok->scores);
    if (!tok->scores) return load_no_memory(fault);
    cJSON_ArrayForEach(entry, vocab) {
        const cJSON *name = cJSON_IsArray(entry) ? entry->child : NULL;
        const cJSON *score = name ? name->next : NULL;
        if (!cJSON_IsString(name) || !cJSON_IsNumber(score) || score->next)
            return fault_set(fault, ERR_MALFORMED, "model.vocab",
                             "entry %d: expected a token string and its score", id);
        tok->scores[id] = score->valuedouble;
        rc = tok_vocab_put(tok, id++, name->valuestring, strlen(name->valuestring), 0, fault);
        if (rc) break;
    }
    return rc;
}

static int put_entries(struct tok *tok, const struct tok_entry *entries, size_t count,
                       struct fault *fault) {
    for (size_t i = 0; i < count; i++) {
        struct tok_added added = entries[i].flags;
        size_t size = strlen(entries[i].content);
        if (size == 0) continue;
        uint32_t flags = TOK_ADDED | (added.special ? TOK_SPECIAL : 0);
        if (!(tok->tokens[added.id].flags & TOK_PRESENT)) flags |= TOK_OUTSIDE;
        int rc = tok_vocab_put(tok, added.id, entries[i].content, size, flags, fault);
        if (rc) return rc;
        added.pattern = tok->tokens[added.id].name;
        added.pattern_size = tok->tokens[added.id].name_size;
        tok_added_put(tok, &added);
    }
    return 0;
}

static int check_entries(const struct tok *tok, const struct tok_entry *entries, size_t count,
                         struct fault *fault) {
    for (size_t i = 0; i < count; i++) {
        const char *content = entries[i].content;
        if (*content && tok_vocab_find(tok, content, strlen(content)) != entries[i].flags.id)
            return fault_set(fault, ERR_MALFORMED, "added_tokens",
                             "'%.64s' and id %d do not belong to each other alone", content,
                             entries[i].flags.id);
    }
    return 0;
}

int tok_load_vocab(struct tok *tok, const cJSON *vocab, const struct tok_entry *entries,
                   size_t entry_count, struct fault *fault) {
    bool scored = tok->model == TOK_MODEL_UNIGRAM;
    int64_t ids = 0;
    if (scored ? !cJSON_IsArray(vocab) : !cJSON_IsObject(vocab))
        return fault_set(fault, ERR_MALFORMED, "model.vocab", "expected an %s, found %s",
                         scored ? "array" : "object", vocab ? json_type_name(vocab) : "nothing");
    int rc = count_ids(vocab, &ids, fault);
    if (rc) return rc;
    for (size_t i = 0; i < entry_count; i++)
        if (entries[i].flags.id >= ids) ids = entries[i].flags.id + 1;
    if (ids == 0) return fault_set(fault, ERR_MALFORMED, "model.vocab", "is empty");
    rc = tok_vocab_reserve(tok, (int32_t)ids, fault);
    if (!rc) rc = tok_added_reserve(tok, entry_count, fault);
    if (!rc) rc = scored ? put_scored(tok, vocab, fault) : put_names(tok, vocab, fault);
    if (!rc) rc = put_entries(tok, entries, entry_count, fault);
    if (!rc) rc = tok_vocab_index(tok, fault);
    return rc ? rc : check_entries(tok, entries, entry_count, fault);
}

int tok_load_entry(const cJSON *node, const char *path, int32_t id, struct tok_entry *entry,
                   struct fault *fault) {
    struct tok_added *flags = &entry->flags;
    entry->content = NULL;
    int rc = json_str(node, path, "content", &entry->content, fault);
    if (!rc && !entry->content)
        rc = fault_set(fault, ERR_MALFORMED, path, "an added token needs a content");
    if (rc) return rc;
    if (strlen(entry->content) > TOK_ADDED_BYTES)
        return fault_set(fault, ERR_LIMIT, path, "added token of more than %d bytes",
                         TOK_ADDED_BYTES);
    *flags = (struct tok_added){.id = id};
    if ((rc = json_bool(node, path, "special", &flags->special, fault))) return rc;
    flags->normalized = !flags->special;
    if ((rc = json_bool(node, path, "normalized", &flags->normalized, fault))) return rc;
    if ((rc = json_bool(node, path, "single_word", &flags->single_word, fault))) return rc;
    if ((rc = json_bool(node, path, "lstrip", &flags->lstrip, fault))) return rc;
    return json_bool(node, path, "rstrip", &flags->rstrip, fault);
}

static int load_read_entries(const cJSON *list, struct tok_entry *entries, struct fault *fault) {
    const cJSON *node;
    size_t i = 0;
    cJSON_ArrayForEach(node, list) {
        char path[48];
        int64_t id = -1;
        snprintf(path, sizeof path, "added_tokens[%zu]", i);
        int rc = json_int(node, path, "id", 0, TOK_ID_MAX - 1, &id, fault);
        if (!rc && id < 0) rc = fault_set(fault, ERR_MALFORMED, path, "an added token needs an id");
        if (!rc) rc = tok_load_entry(node, path, (int32_t)id, &entries[i++], fault);
        if (rc) return rc;
    }
    return 0;
}

/* ---- Merges ---- */

/* "a b", or ["a", "b"]. */
static int add_merge(struct tok *tok, const cJSON *node, uint32_t rank, struct fault *fault) {
    char field[48];
    if (cJSON_IsString(node)) {
        const char *left = node->valuestring, *space = strchr(left, ' ');
        if (space && !strchr(space + 1, ' '))
            return tok_merges_add(tok, left, (size_t)(space - left), space + 1, strlen(space + 1),
                                  rank, fault);
    } else if (cJSON_IsArray(node) && cJSON_IsString(node->child)) {
        const cJSON *left = node->child, *right = left->next;
        if (cJSON_IsString(right) && !right->next)
            return tok_merges_add(tok, left->valuestring, strlen(left->valuestring),
                                  right->valuestring, strlen(right->valuestring), rank, fault);
    }
    snprintf(field, sizeof field, "model.merges[%u]", rank);
    return fault_set(fault, ERR_MALFORMED, field, "expected two token strings");
}

static int load_merges(struct tok *tok, const cJSON *merges, struct fault *fault) {
    if (!cJSON_IsArray(merges))
        return fault_set(fault, ERR_MALFORMED, "model.merges", "expected an array, found %s",
                         merges ? json_type_name(merges) : "nothing");
    int rc = tok_merges_reserve(tok, (size_t)cJSON_GetArraySize(merges), fault);
    uint32_t rank = 0;
    const cJSON *node;
    if (rc) return rc;
    cJSON_ArrayForEach(node, merges) {
        if ((rc = add_merge(tok, node, rank++, fault))) return rc;
    }
    return 0;
}

/* ---- The file ---- */

static int refuse_string(const cJSON *model, const char *key, struct fault *fault) {
    const char *value = NULL;
    int rc = json_str(model, "model", key, &value, fault);
    if (rc || !value || !*value) return rc;
    char field[64];
    snprintf(field, sizeof field, "model.%s", key);
    return fault_set(fault, ERR_UNSUPPORTED, field, "'%.64s' is not supported", value);
}

/* Files of older versions leave the type out; then the other members tell it. */
static int read_model_kind(struct tok *tok, const cJSON *model, struct fault *fault) {
    const char *type = NULL;
    const cJSON *vocab = json_get(model, "vocab");
    int rc = json_str(model, "model", "type", &type, fault);
    if (rc) return rc;
    if (!type && cJSON_IsObject(vocab) && json_get(model, "merges")) type = "BPE";
    if (!type && cJSON_IsArray(vocab)) type = "Unigram";
    if (!type)
        return fault_set(fault, ERR_UNSUPPORTED, "model.type",
                         "is absent, and the model has neither vocab with merges (BPE) nor a list "
                         "of tokens with scores (Unigram)");
    bool unigram = strcmp(type, "Unigram") == 0, words = strcmp(type, "WordPiece") == 0;
    if (!unigram && !words && strcmp(type, "BPE") != 0)
        return fault_set(fault, ERR_UNSUPPORTED, "model.type",
                         "'%.64s' is not supported, only BPE, Unigram and WordPiece", type);
    tok->model = unigram ? TOK_MODEL_UNIGRAM : words ? TOK_MODEL_WORDS : TOK_MODEL_CHARS;
    return 0;
}

static int check_bpe(const cJSON *model, struct fault *fault) {
    double dropout = 0;
    int rc = json_num(model, "model", "dropout", 0, 1, &dropout, fault);
    if (rc) return rc;
    if (dropout > 0)
        return fault_set(fault, ERR_UNSUPPORTED, "model.dropout",
                         "random merges are not supported");
    if ((rc = refuse_string(model, "continuing_subword_prefix", fault))) return rc;
    return refuse_string(model, "end_of_word_suffix", fault);
}

static int load_bpe(struct tok *tok, const cJSON *model, struct fault *fault) {
    const char *unknown = NULL;
    int rc = json_str(model, "model", "unk_token", &unknown, fault);
    if (!rc) rc = json_bool(model, "model", "fuse_unk", &tok->fuse_unknown, fault);
    if (!rc) rc = json_bool(model, "model", "ignore_merges", &tok->ignore_merges, fault);
    if (rc) return rc;
    /* With all 256 bytes in the vocabulary nothing is ever unknown, and the name says nothing. */
    if (unknown) tok->unknown = tok_vocab_find(tok, unknown, strlen(unknown));
    if (unknown && tok->unknown < 0 && !tok->all_bytes)
        return fault_set(fault, ERR_MALFORMED, "model.unk_token",
                         "'%.64s' is not in the vocabulary", unknown);
    return load_merges(tok, json_get(model, "merges"), fault);
}

static int load_unigram(struct tok *tok, const cJSON *model, struct fault *fault) {
    int64_t unknown = -1;
    int rc = json_int(model, "model", "unk_id", 0, tok->vocab_size - 1, &unknown, fault);
    tok->unknown = (int32_t)unknown;
    return rc ? rc : tok_unigram_index(tok, fault);
}

static int load_words(struct tok *tok, const cJSON *model, struct fault *fault) {
    const char *unknown = "[UNK]", *prefix = "##";
    int64_t most = 100;
    int rc = json_str(model, "model", "unk_token", &unknown, fault);
    if (!rc) rc = json_str(model, "model", "continuing_subword_prefix", &prefix, fault);
    if (!rc) rc = json_int(model, "model", "max_input_chars_per_word", 0, INT32_MAX, &most, fault);
    if (rc) return rc;
    tok->word_chars_max = (int32_t)most;
    tok->word_prefix_size = (uint32_t)strlen(prefix);
    tok->unknown = tok_vocab_find(tok, unknown, strlen(unknown));
    if (tok->unknown < 0)
        return fault_set(fault, ERR_MALFORMED, "model.unk_token",
                         "'%.64s' is not in the vocabulary", unknown);
    return tok_text_add(tok, prefix, tok->word_prefix_size, &tok->word_prefix, fault);
}

static int load_model(struct tok *tok, const cJSON *model, const cJSON *added,
                      struct fault *fault) {
    if (!cJSON_IsObject(model))
        return fault_set(fault, ERR_MALFORMED, "model", "expected an object");
    if (added && !cJSON_IsArray(added))
        return fault_set(fault, ERR_MALFORMED, "added_tokens", "expected an array");
    int rc = read_model_kind(tok, model, fault);
    if (!rc && tok->model == TOK_MODEL_CHARS) rc = check_bpe(model, fault);
    if (rc) return rc;
    size_t count = added ? (size_t)cJSON_GetArraySize(added) : 0;
    struct tok_entry *entries = mem_try_alloc(count, sizeof *entries);
    if (!entries) return load_no_memory(fault);
    rc = load_read_entries(added, entries, fault);
    if (!rc) rc = tok_load_vocab(tok, json_get(model, "vocab"), entries, count, fault);
    mem_free(entries);
    if (!rc) rc = json_bool(model, "model", "byte_fallback", &tok->byte_fallback, fault);
    if (rc) return rc;
    return tok->model == TOK_MODEL_UNIGRAM ? load_unigram(tok, model, fault)
           : tok->model == TOK_MODEL_WORDS ? load_words(tok, model, fault)
                                           : load_bpe(tok, model, fault);
}

struct tok *tok_make(void) {
    struct tok *tok = mem_try_alloc(1, sizeof *tok);
    if (!tok) return NULL;
    tok->unknown = tok->bytes_at = -1;
    tok->model = TOK_MODEL_CHARS;
    return tok;
}

/* BPE works on bytes where it can: ByteLevel is the last stage, a decoder undoes it, and no byte is
 * missing that something else would stand for. Otherwise the stages after ByteLevel, and the model,
 * see characters of the byte alphabet, as in huggingface/tokenizers. */
static void choose_model(struct tok *tok) {
    bool complete = tok->all_bytes || (tok->unknown < 0 && !tok->byte_fallback);
    if (tok->bytes_at < 0) return;
    if (tok->model == TOK_MODEL_CHARS && tok->bytes_at == tok->stage_count && complete &&
        tok->decoder.byte_level) {
        tok->model = TOK_MODEL_BYTES;
        return;
    }
    memmove(&tok->stages[tok->bytes_at + 1], &tok->stages[tok->bytes_at],
            (size_t)(tok->stage_count - tok->bytes_at) * sizeof *tok->stages);
    tok->stages[tok->bytes_at] = (struct tok_stage){.kind = TOK_STAGE_ALPHABET};
    tok->stage_count++;
}

int tok_finish(struct tok *tok, struct fault *fault) {
    choose_model(tok);
    int rc = tok_decode_names(tok, fault);
    if (!rc) rc = tok_added_finish(tok, fault);
    if (!rc && tok->ignore_merges && tok->model == TOK_MODEL_BYTES)
        rc = tok_vocab_index_whole(tok, fault);
    if (!rc && tok->model == TOK_MODEL_CHARS) tok_bpe_find_marks(tok);
    return rc;
}

/* Encodes a short text: steps that make each other's texts longer would refuse every request for
 * its size, so the file is refused instead. */
static int try_text(const struct tok *tok, struct fault *fault) {
    static const char text[] =
        "The quick brown fox jumps over the lazy dog: 0123456789, (\"A\").\n";
    struct fault found = {0};
    struct arena arena;
    struct tok_ids ids;
    arena_open(&arena, TRY_BYTES);
    int rc = tok_encode(tok, text, sizeof text - 1, 0, NULL, 0, TOK_TEXT_MAX, &arena, &ids, &found);
    if (rc && arena.full)
        rc = fault_set(fault, ERR_LIMIT, "normalizer",
                       "a text of %zu bytes takes more than %zu MiB to encode", sizeof text - 1,
                       TRY_BYTES >> 20);
    else
        rc = rc == ERR_NOMEM ? load_no_memory(fault) : 0; /* 0: some other text may have tokens */
    arena_close(&arena);
    return rc;
}

int tok_open(const char *data, size_t size, struct tok **out, struct fault *fault) {
    cJSON *root = NULL;
    *out = NULL;
    struct tok *tok = tok_make();
    if (!tok) return load_no_memory(fault);
    int rc = json_parse(data, size, &limits, &root, fault);
    if (!rc && !cJSON_IsObject(root))
        rc = fault_set(fault, ERR_MALFORMED, NULL, "tokenizer.json: expected an object");
    if (!rc) rc = load_model(tok, json_get(root, "model"), json_get(root, "added_tokens"), fault);
    if (!rc) rc = tok_load_pipeline(tok, root, fault);
    if (!rc) rc = tok_finish(tok, fault);
    if (!rc) rc = try_text(tok, fault);
    json_free(root);
    if (rc)
        tok_close(tok);
    else
        *out = tok;
    return rc;
}
