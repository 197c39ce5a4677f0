/* Token strings and merges: storage and look-up.
 *
 * All strings lie in one text, and tables of open addressing hold ids: a vocabulary of 250,000
 * tokens takes some 20 MB and no allocation of its own for each. Names are looked up by their two
 * halves too, because a merge is given as two strings whose concatenation is the token. */
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "base/utf8.h"
#include "text/tok/internal.h"

/* GPT-2's alphabet writes each byte as one printable character: printable Latin-1 stands for
 * itself, the other bytes follow in order from U+0100. */
int tok_byte_of(uint32_t scalar) {
    if ((scalar >= 33 && scalar <= 126) || (scalar >= 161 && scalar <= 172) ||
        (scalar >= 174 && scalar <= 255))
        return (int)scalar;
    if (scalar >= 256 && scalar <= 288) return (int)(scalar - 256);
    if (scalar >= 289 && scalar <= 322) return (int)(scalar - 289 + 127);
    return scalar == 323 ? 173 : -1;
}

uint32_t tok_char_of(uint32_t byte) {
    if (byte <= 32) return 256 + byte;
    if (byte >= 127 && byte <= 160) return 289 + byte - 127;
    return byte == 173 ? 323 : byte;
}

/* FNV-1a; the pair form gives the hash of the concatenation. */
static uint64_t hash_more(uint64_t hash, const char *s, size_t n) {
    for (size_t i = 0; i < n; i++) hash = (hash ^ (unsigned char)s[i]) * 0x100000001B3u;
    return hash;
}

static uint32_t hash_end(uint64_t hash) {
    hash *= 0x9E3779B97F4A7C15u;
    return (uint32_t)(hash >> 32);
}

#define HASH_START 0xCBF29CE484222325u

/* At most 2/3 full. */
static uint32_t slots_for(size_t count) {
    uint32_t slots = 16;
    while (slots < count + count / 2) slots *= 2;
    return slots;
}

static int table_open(struct tok_table *table, size_t count, bool by_bytes) {
    uint32_t slots = slots_for(count);
    mem_free(table->slots);
    table->slots = mem_try_alloc(slots, sizeof *table->slots);
    if (!table->slots) return ERR_NOMEM;
    table->mask = slots - 1;
    table->by_bytes = by_bytes;
    return 0;
}

static bool same_string(const struct tok *tok, const struct tok_table *table, int32_t id,
                        const char *a, size_t a_size, const char *b, size_t b_size) {
    const struct tok_token *token = &tok->tokens[id];
    uint32_t size = table->by_bytes ? token->bytes_size : token->name_size;
    const char *s = tok->text + (table->by_bytes ? token->bytes : token->name);
    return size == a_size + b_size && memcmp(s, a, a_size) == 0 &&
           (b_size == 0 || memcmp(s + a_size, b, b_size) == 0);
}

static int32_t table_find(const struct tok *tok, const struct tok_table *table, const char *a,
                          size_t a_size, const char *b, size_t b_size) {
    uint32_t at = hash_end(hash_more(hash_more(HASH_START, a, a_size), b, b_size)) & table->mask;
    for (; table->slots[at]; at = (at + 1) & table->mask) {
        int32_t id = (int32_t)(table->slots[at] - 1);
        if (same_string(tok, table, id, a, a_size, b, b_size)) return id;
    }
    return -1;
}

static void table_put(const struct tok *tok, struct tok_table *table, int32_t id) {
    const struct tok_token *token = &tok->tokens[id];
    const char *s = tok->text + (table->by_bytes ? token->bytes : token->name);
    size_t size = table->by_bytes ? token->bytes_size : token->name_size;
    uint32_t at = hash_end(hash_more(HASH_START, s, size)) & table->mask;
    while (table->slots[at]) {
        if (same_string(tok, table, (int32_t)(table->slots[at] - 1), s, size, "", 0)) {
            /* Unigram's list may name a token twice: the last counts. */
            if (tok->scores && !(token->flags & TOK_OUTSIDE)) break;
            return;
        }
        at = (at + 1) & table->mask;
    }
    table->slots[at] = (uint32_t)id + 1;
}

int tok_text_reserve(struct tok *tok, size_t size, struct fault *fault) {
    if (size > UINT32_MAX - tok->text_size)
        return fault_set(fault, ERR_LIMIT, NULL, "the tokens' texts are more than 4 GiB");
    if (size > tok->text_capacity - tok->text_size) {
        size_t capacity = tok->text_capacity * 2 + size + 4096;
        char *text = mem_try_realloc(tok->text, tok->text_capacity, capacity);
        if (!text) return fault_set(fault, ERR_NOMEM, NULL, "not enough memory for the vocabulary");
        tok->text = text;
        tok->text_capacity = capacity;
    }
    return 0;
}

int tok_text_add(struct tok *tok, const char *s, size_t size, uint32_t *at, struct fault *fault) {
    int rc = tok_text_reserve(tok, size, fault);
    if (rc) return rc;
    if (size) memcpy(tok->text + tok->text_size, s, size);
    *at = (uint32_t)tok->text_size;
    tok->text_size += size;
    return 0;
}

int tok_vocab_reserve(struct tok *tok, int32_t ids, struct fault *fault) {
    tok->tokens = mem_try_alloc((size_t)ids, sizeof *tok->tokens);
    if (!tok->tokens)
        return fault_set(fault, ERR_NOMEM, NULL, "not enough memory for %d tokens", ids);
    tok->vocab_size = ids;
    return 0;
}

int tok_vocab_put(struct tok *tok, int32_t id, const char *name, size_t size, uint32_t flags,
                  struct fault *fault) {
    CHECK(id >= 0 && id < tok->vocab_size);
    struct tok_token *token = &tok->tokens[id];
    token->name_size = (uint32_t)size;
    token->flags = TOK_PRESENT | flags;
    return tok_text_add(tok, name, size, &token->name, fault);
}

/* As huggingface/tokenizers writes byte tokens: two upper-case hexadecimal digits. */
static void fallback_name(unsigned byte, char name[8]) {
    snprintf(name, 8, "<0x%02X>", byte);
}

int tok_fallback_of(const char *name, size_t size) {
    unsigned byte = 0;
    if (size != 6 || memcmp(name, "<0x", 3) != 0 || name[5] != '>') return -1;
    for (int i = 3; i < 5; i++) {
        char c = name[i];
        bool digit = c >= '0' && c <= '9', letter = (c | 32) >= 'a' && (c | 32) <= 'f';
        if (!digit && !letter) return -1;
        byte = byte * 16 + (unsigned)(digit ? c - '0' : (c | 32) - 'a' + 10);
    }
    return (int)byte;
}

int tok_vocab_index(struct tok *tok, struct fault *fault) {
    if (table_open(&tok->names, (size_t)tok->vocab_size, false))
        return fault_set(fault, ERR_NOMEM, NULL, "not enough memory for the vocabulary's index");
    for (int32_t id = 0; id < tok->vocab_size; id++) {
        if (!(tok->tokens[id].flags & TOK_PRESENT)) continue;
        table_put(tok, &tok->names, id);
        if (tok->tokens[id].name_size > tok->names_max) tok->names_max = tok->tokens[id].name_size;
    }
    tok->all_bytes = tok->all_fallback = true;
    for (uint32_t byte = 0; byte < 256; byte++) {
        char name[8];
        tok->byte_ids[byte] = tok_vocab_find(tok, name, utf8_encode(tok_char_of(byte), name));
        if (tok->byte_ids[byte] < 0) tok->all_bytes = false;
        fallback_name(byte, name);
        tok->fallback_ids[byte] = tok_vocab_find_plain(tok, name, 6);
        if (tok->fallback_ids[byte] < 0) tok->all_fallback = false;
    }
    return 0;
}

/* Tokens that a whole piece may become without merging. A special token of several bytes is left
 * out, as in tok_merges_add: text that was not matched as a special token must never turn into one.
 */
int tok_vocab_index_whole(struct tok *tok, struct fault *fault) {
    if (table_open(&tok->whole, (size_t)tok->vocab_size, true))
        return fault_set(fault, ERR_NOMEM, NULL, "not enough memory for the vocabulary's index");
    for (int32_t id = 0; id < tok->vocab_size; id++) {
        const struct tok_token *token = &tok->tokens[id];
        bool usable = (token->flags & TOK_PRESENT) && !(token->flags & (TOK_LITERAL | TOK_SPECIAL));
        if (usable) table_put(tok, &tok->whole, id);
    }
    return 0;
}

int32_t tok_vocab_find(const struct tok *tok, const char *name, size_t size) {
    return table_find(tok, &tok->names, name, size, "", 0);
}

int32_t tok_vocab_find_plain(const struct tok *tok, const char *name, size_t size) {
    int32_t id = tok_vocab_find(tok, name, size);
    if (id < 0 || id == tok->unknown) return id;
    return tok->tokens[id].flags & (TOK_SPECIAL | TOK_OUTSIDE) ? -1 : id;
}

int32_t tok_vocab_find_pair(const struct tok *tok, const char *a, size_t a_size, const char *b,
                            size_t b_size) {
    return table_find(tok, &tok->names, a, a_size, b, b_size);
}

int32_t tok_vocab_find_whole(const struct tok *tok, const char *bytes, size_t size) {
    return table_find(tok, &tok->whole, bytes, size, "", 0);
}

/* --- merges --- */

static uint64_t pair_key(int32_t left, int32_t right) {
    return ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) + 1;
}

static uint32_t pair_slot(const struct tok_merges *merges, uint64_t pair) {
    return hash_end(pair ^ pair >> 29) & merges->mask;
}

int tok_merges_reserve(struct tok *tok, size_t count, struct fault *fault) {
    uint32_t slots = slots_for(count);
    tok->merges.slots = mem_try_alloc(slots, sizeof *tok->merges.slots);
    if (!tok->merges.slots)
        return fault_set(fault, ERR_NOMEM, NULL, "not enough memory for %zu merges", count);
    tok->merges.mask = slots - 1;
    return 0;
}

const struct tok_merge *tok_merges_find(const struct tok *tok, int32_t left, int32_t right) {
    const struct tok_merges *merges = &tok->merges;
    uint64_t pair = pair_key(left, right);
    uint32_t at = pair_slot(merges, pair);
    for (; merges->slots[at].pair; at = (at + 1) & merges->mask)
        if (merges->slots[at].pair == pair) return &merges->slots[at];
    return NULL;
}

static int32_t find_or_refuse(const struct tok *tok, const char *a, size_t a_size, const char *b,
                              size_t b_size, uint32_t rank, struct fault *fault) {
    char field[48];
    int32_t id = tok_vocab_find_pair(tok, a, a_size, b, b_size);
    if (id >= 0) return id;
    snprintf(field, sizeof field, "model.merges[%u]", rank);
    return fault_set(fault, ERR_MALFORMED, field, "'%.*s%.*s' is not in the vocabulary",
                     (int)(a_size < 64 ? a_size : 64), a, (int)(b_size < 64 ? b_size : 64), b);
}

int tok_merges_add(struct tok *tok, const char *left, size_t left_size, const char *right,
                   size_t right_size, uint32_t rank, struct fault *fault) {
    int32_t a = find_or_refuse(tok, left, left_size, "", 0, rank, fault);
    if (a < 0) return a;
    int32_t b = find_or_refuse(tok, right, right_size, "", 0, rank, fault);
    if (b < 0) return b;
    int32_t id = find_or_refuse(tok, left, left_size, right, right_size, rank, fault);
    if (id < 0) return id;
    if (tok->tokens[id].flags & TOK_SPECIAL) return 0;
    uint64_t pair = pair_key(a, b);
    uint32_t at = pair_slot(&tok->merges, pair);
    while (tok->merges.slots[at].pair && tok->merges.slots[at].pair != pair)
        at = (at + 1) & tok->merges.mask;
    /* A pair listed twice counts where it is listed last. */
    tok->merges.slots[at] = (struct tok_merge){.pair = pair, .rank = rank, .id = id};
    return 0;
}
