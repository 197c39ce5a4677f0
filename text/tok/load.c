/* tokenizer.json: vocabulary, added tokens and merges. */
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "text/tok/internal.h"

static const struct json_limits limits = {
    .bytes = TOK_FILE_MAX, .depth = 64, .nodes = TOK_NODES_MAX};

static int no_memory(struct fault *fault) {
    return fault_set(fault, ERR_NOMEM, NULL, "not enough memory for the tokenizer");
}

/* ---- Vocabulary and added tokens ----------------------------------------------------------- */

struct measure {
    int64_t ids;  /* highest id + 1 */
    size_t bytes; /* of tok->text */
};

static int measure_vocab(const cJSON *vocab, struct measure *m, struct fault *fault) {
    const cJSON *entry;
    cJSON_ArrayForEach(entry, vocab) {
        int64_t id;
        if (json_node_int(entry, 0, TOK_ID_MAX - 1, &id))
            return fault_set(fault, ERR_MALFORMED, "model.vocab",
                             "the id of '%.64s' is not an integer below %d", entry->string,
                             TOK_ID_MAX);
        if (id >= m->ids) m->ids = id + 1;
        m->bytes += 2 * strlen(entry->string); /* the name and its bytes */
    }
    return 0;
}

static void measure_entries(const struct tok_entry *entries, size_t count, struct measure *m) {
    for (size_t i = 0; i < count; i++) {
        if (entries[i].flags.id >= m->ids) m->ids = entries[i].flags.id + 1;
        m->bytes += 4 * strlen(entries[i].content); /* NFC grows to three times at most */
    }
}

static void put_vocab(struct tok *tok, const cJSON *vocab) {
    const cJSON *entry;
    cJSON_ArrayForEach(entry, vocab) {
        int64_t id = 0;
        json_node_int(entry, 0, TOK_ID_MAX - 1, &id);
        tok_vocab_put(tok, (int32_t)id, entry->string, strlen(entry->string), 0);
    }
}

static void put_entries(struct tok *tok, const struct tok_entry *entries, size_t count) {
    for (size_t i = 0; i < count; i++) {
        struct tok_added added = entries[i].flags;
        size_t size = strlen(entries[i].content);
        if (size == 0) continue;
        tok_vocab_put(tok, added.id, entries[i].content, size,
                      TOK_ADDED | (added.special ? TOK_SPECIAL : 0));
        added.pattern = tok->tokens[added.id].name;
        added.pattern_size = tok->tokens[added.id].name_size;
        tok_added_put(tok, &added);
    }
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
    struct measure m = {0};
    if (!cJSON_IsObject(vocab))
        return fault_set(fault, ERR_MALFORMED, "model.vocab", "expected an object, found %s",
                         vocab ? json_type_name(vocab) : "nothing");
    int rc = measure_vocab(vocab, &m, fault);
    if (rc) return rc;
    measure_entries(entries, entry_count, &m);
    if (m.ids == 0) return fault_set(fault, ERR_MALFORMED, "model.vocab", "is empty");
    if ((rc = tok_vocab_reserve(tok, (int32_t)m.ids, m.bytes, fault))) return rc;
    if ((rc = tok_added_reserve(tok, entry_count, fault))) return rc;
    put_vocab(tok, vocab);
    put_entries(tok, entries, entry_count);
    if ((rc = tok_vocab_index(tok, fault))) return rc;
    return check_entries(tok, entries, entry_count, fault);
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

static int read_entries(const cJSON *list, struct tok_entry *entries, struct fault *fault) {
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

/* ---- Merges -------------------------------------------------------------------------------- */

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

/* ---- The file ------------------------------------------------------------------------------ */

static int refuse_string(const cJSON *model, const char *key, struct fault *fault) {
    const char *value = NULL;
    int rc = json_str(model, "model", key, &value, fault);
    if (rc || !value || !*value) return rc;
    char field[64];
    snprintf(field, sizeof field, "model.%s", key);
    return fault_set(fault, ERR_UNSUPPORTED, field, "'%.64s' is not supported", value);
}

static int check_model_kind(const cJSON *model, struct fault *fault) {
    const char *type = "BPE";
    double dropout = 0;
    int rc = json_str(model, "model", "type", &type, fault);
    if (rc) return rc;
    if (strcmp(type, "BPE") != 0)
        return fault_set(fault, ERR_UNSUPPORTED, "model.type", "'%.64s' is not supported, only BPE",
                         type);
    if ((rc = json_num(model, "model", "dropout", 0, 1, &dropout, fault))) return rc;
    if (dropout > 0)
        return fault_set(fault, ERR_UNSUPPORTED, "model.dropout",
                         "random merges are not supported");
    if ((rc = refuse_string(model, "continuing_subword_prefix", fault))) return rc;
    return refuse_string(model, "end_of_word_suffix", fault);
}

/* With all 256 bytes in the vocabulary nothing is ever unknown, and these say nothing. */
static int check_unknowns(const struct tok *tok, const cJSON *model, struct fault *fault) {
    bool fallback = false;
    int rc = json_bool(model, "model", "byte_fallback", &fallback, fault);
    if (rc || tok->all_bytes) return rc;
    if (fallback)
        return fault_set(fault, ERR_UNSUPPORTED, "model.byte_fallback",
                         "SentencePiece-style vocabularies are not supported, only byte-level BPE");
    return refuse_string(model, "unk_token", fault);
}

static int load_model(struct tok *tok, const cJSON *model, const cJSON *added,
                      struct fault *fault) {
    if (!cJSON_IsObject(model))
        return fault_set(fault, ERR_MALFORMED, "model", "expected an object");
    if (added && !cJSON_IsArray(added))
        return fault_set(fault, ERR_MALFORMED, "added_tokens", "expected an array");
    int rc = check_model_kind(model, fault);
    if (rc) return rc;
    size_t count = added ? (size_t)cJSON_GetArraySize(added) : 0;
    struct tok_entry *entries = mem_try_alloc(count, sizeof *entries);
    if (!entries) return no_memory(fault);
    rc = read_entries(added, entries, fault);
    if (!rc) rc = tok_load_vocab(tok, json_get(model, "vocab"), entries, count, fault);
    mem_free(entries);
    if (!rc) rc = check_unknowns(tok, model, fault);
    if (!rc) rc = json_bool(model, "model", "ignore_merges", &tok->ignore_merges, fault);
    return rc ? rc : load_merges(tok, json_get(model, "merges"), fault);
}

int tok_finish(struct tok *tok, struct fault *fault) {
    int rc = tok_added_finish(tok, fault);
    if (!rc && tok->ignore_merges) rc = tok_vocab_index_whole(tok, fault);
    return rc;
}

int tok_open(const char *data, size_t size, struct tok **out, struct fault *fault) {
    cJSON *root = NULL;
    *out = NULL;
    struct tok *tok = mem_try_alloc(1, sizeof *tok);
    if (!tok) return no_memory(fault);
    int rc = json_parse(data, size, &limits, &root, fault);
    if (!rc && !cJSON_IsObject(root))
        rc = fault_set(fault, ERR_MALFORMED, NULL, "tokenizer.json: expected an object");
    if (!rc) rc = load_model(tok, json_get(root, "model"), json_get(root, "added_tokens"), fault);
    if (!rc) rc = tok_load_pipeline(tok, root, fault);
    if (!rc) rc = tok_finish(tok, fault);
    json_free(root);
    if (rc)
        tok_close(tok);
    else
        *out = tok;
    return rc;
}
