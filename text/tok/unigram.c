/* Unigram: of all ways to cut a piece into tokens the one with the best sum of scores (Viterbi), as
 * in huggingface/tokenizers, whose order of sums and of ties it keeps: scores are doubles added
 * from the left, and of two equal ways the one found first stays, the one whose last token is
 * longest.
 *
 * A character that is no token by itself costs the lowest score less 10, and neighbours of that
 * kind become one unknown token, or the tokens of their bytes.
 *
 * The tokens that begin at a place are found in the list of all names in order: each further byte
 * narrows a range of it. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "text/tok/internal.h"

#define UNKNOWN_PENALTY 10.0

static int unigram_compare_names(const void *a, const void *b, void *arg) {
    const struct tok *tok = arg;
    const struct tok_token *x = &tok->tokens[*(const int32_t *)a];
    const struct tok_token *y = &tok->tokens[*(const int32_t *)b];
    uint32_t size = x->name_size < y->name_size ? x->name_size : y->name_size;
    int order = memcmp(tok->text + x->name, tok->text + y->name, size);
    return order ? order : (x->name_size > y->name_size) - (x->name_size < y->name_size);
}

/* Special tokens but the unknown one are left out: text that was not matched as one must never
 * become one. Of a name that stands twice the last counts. */
int tok_unigram_index(struct tok *tok, struct fault *fault) {
    double lowest = INFINITY;
    if (tok->unknown < 0)
        return fault_set(fault, ERR_UNSUPPORTED, "model.unk_id",
                         "is absent: characters that no token holds would have no token");
    tok->sorted = mem_try_alloc((size_t)tok->vocab_size, sizeof *tok->sorted);
    if (!tok->sorted) return fault_set(fault, ERR_NOMEM, NULL, "not enough memory for the tokens");
    for (int32_t id = 0; id < tok->vocab_size; id++) {
        const struct tok_token *token = &tok->tokens[id];
        const char *name = tok->text + token->name;
        if (!(token->flags & TOK_PRESENT) || (token->flags & TOK_OUTSIDE)) continue;
        if (tok->scores[id] < lowest) lowest = tok->scores[id];
        if (token->name_size && tok_vocab_find_plain(tok, name, token->name_size) == id)
            tok->sorted[tok->sorted_count++] = id;
    }
    tok->unknown_score = lowest - UNKNOWN_PENALTY;
    qsort_r(tok->sorted, (size_t)tok->sorted_count, sizeof *tok->sorted, unigram_compare_names,
            tok);
    for (int32_t byte = 0, i = 0; byte <= 256; byte++) {
        while (i < tok->sorted_count &&
               (unsigned char)tok->text[tok->tokens[tok->sorted[i]].name] < byte)
            i++;
        tok->by_byte[byte] = i;
    }
    return 0;
}

/* ---- The best way ---- */

/* The first of sorted[low, high) whose byte at `depth` is `byte` or more. These names share
 * `depth` bytes; one that ends there comes first. */
static int32_t lower(const struct tok *tok, int32_t low, int32_t high, uint32_t depth, int byte) {
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        const struct tok_token *token = &tok->tokens[tok->sorted[middle]];
        int value = depth < token->name_size ? (unsigned char)tok->text[token->name + depth] : -1;
        if (value < byte)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void offer(struct tok_node *node, double score, int32_t id, size_t from) {
    if (node->id >= 0 && score <= node->score) return;
    *node = (struct tok_node){score, id, (uint32_t)from};
}

static size_t char_size(char c) {
    unsigned char byte = (unsigned char)c;
    return byte < 0x80 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}

static void step_from(const struct tok *tok, struct tok_node *nodes, const char *piece, size_t size,
                      size_t at, size_t single) {
    int32_t low = 0, high = tok->sorted_count;
    double score = nodes[at].score;
    bool known = false;
    for (uint32_t depth = 0; at + depth < size; depth++) {
        int byte = (unsigned char)piece[at + depth];
        if (depth == 0) {
            low = tok->by_byte[byte];
            high = tok->by_byte[byte + 1];
        } else {
            low = lower(tok, low, high, depth, byte);
            high = lower(tok, low, high, depth, byte + 1);
        }
        if (low == high) break;
        int32_t id = tok->sorted[low];
        if (tok->tokens[id].name_size != depth + 1) continue;
        offer(&nodes[at + depth + 1], tok->scores[id] + score, id, at);
        known |= depth + 1 == single;
    }
    if (!known) offer(&nodes[at + single], tok->unknown_score + score, tok->unknown, at);
}

/* Turns the links, which lead to the left, so that they lead from each place to the next. */
static void turn_links(struct tok_node *nodes, size_t size) {
    size_t end = size, from = nodes[end].from;
    while (end > 0) {
        size_t start = from;
        from = nodes[start].from;
        nodes[start].from = (uint32_t)end;
        end = start;
    }
}

/* A run of unknown characters is a token after all where its whole text is one. */
static int emit_unknown(struct tok_encoder *e, const char *s, size_t size) {
    const struct tok *tok = e->tok;
    int32_t id = tok_vocab_find_plain(tok, s, size);
    bool bytes = id < 0 && tok->byte_fallback;
    for (size_t i = 0; i < size && bytes; i++) bytes = tok->fallback_ids[(unsigned char)s[i]] >= 0;
    if (!bytes) return tok_emit(e, id < 0 ? tok->unknown : id);
    int rc = 0;
    for (size_t i = 0; i < size && !rc; i++)
        rc = tok_emit(e, tok->fallback_ids[(unsigned char)s[i]]);
    return rc;
}

static int emit_way(struct tok_encoder *e, const struct tok_node *nodes, const char *piece,
                    size_t size) {
    int rc = 0;
    for (size_t at = 0, end; at < size && !rc; at = end) {
        end = nodes[at].from;
        int32_t id = nodes[end].id;
        if (id != e->tok->unknown) {
            rc = tok_emit(e, id);
            continue;
        }
        while (end < size && nodes[nodes[end].from].id == id) end = nodes[end].from;
        rc = emit_unknown(e, piece + at, end - at);
    }
    return rc;
}

int tok_unigram(struct tok_encoder *e, const char *piece, size_t size) {
    if (size + 1 > e->node_capacity) {
        size_t capacity = 2 * e->node_capacity + size + 64;
        e->nodes = arena_alloc(e->arena, capacity, sizeof *e->nodes);
        if (!e->nodes) return tok_no_memory(e);
        e->node_capacity = capacity;
    }
    for (size_t i = 0; i <= size; i++) e->nodes[i] = (struct tok_node){0, -1, 0};
    for (size_t at = 0, single; at < size; at += single) {
        single = char_size(piece[at]);
        step_from(e->tok, e->nodes, piece, size, at, single);
    }
    turn_links(e->nodes, size);
    return emit_way(e, e->nodes, piece, size);
}
