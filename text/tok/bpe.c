/* Byte-pair merging of one piece: always the pair of lowest rank, leftmost first.
 *
 * The first symbols are the piece's bytes, or its characters. A character that the vocabulary lacks
 * becomes the tokens of its bytes (byte_fallback), else the unknown token, else nothing. The order
 * in which a pending unknown token and the bytes after it appear is huggingface/tokenizers' own.
 *
 * SentencePiece-style files have no pre-tokenizer: a piece is all text up to the next added token.
 * Where no merge makes a token that has a word's beginning (U+2581) inside, such a piece is cut
 * there first. The tokens are the same, and the work and memory are those of words. */
#include <string.h>

#include "base/utf8.h"
#include "text/tok/internal.h"

/* A min-heap of candidates beside a linked list of symbols: O(n log n) for any piece. A candidate
 * whose symbols have changed since is recognised when it comes up and dropped. */

static bool comes_first(const struct tok_candidate *a, const struct tok_candidate *b) {
    return a->rank != b->rank ? a->rank < b->rank : a->at < b->at;
}

static void heap_push(struct tok_candidate *heap, size_t *size, struct tok_candidate item) {
    size_t i = (*size)++;
    while (i > 0 && comes_first(&item, &heap[(i - 1) / 2])) {
        heap[i] = heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    heap[i] = item;
}

static struct tok_candidate heap_pop(struct tok_candidate *heap, size_t *size) {
    struct tok_candidate top = heap[0], last = heap[--*size];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < *size; i = child) {
        if (child + 1 < *size && comes_first(&heap[child + 1], &heap[child])) child++;
        if (!comes_first(&heap[child], &last)) break;
        heap[i] = heap[child];
    }
    heap[i] = last;
    return top;
}

static void push_pair(const struct tok_encoder *e, size_t *heap_size, int32_t left) {
    int32_t right = left < 0 ? -1 : e->symbols[left].next;
    if (right < 0) return;
    const struct tok_merge *merge =
        tok_merges_find(e->tok, e->symbols[left].id, e->symbols[right].id);
    if (merge)
        heap_push(
            e->heap, heap_size,
            (struct tok_candidate){.rank = merge->rank, .at = (uint32_t)left, .id = merge->id});
}

/* The heap never exceeds its room: n - 1 pairs at first, and each merge, of which there are at
 * most n - 1, takes one candidate and gives at most two. */
static void merge_symbols(struct tok_encoder *e, size_t count) {
    size_t heap_size = 0;
    for (size_t i = 0; i + 1 < count; i++) push_pair(e, &heap_size, (int32_t)i);
    while (heap_size) {
        struct tok_candidate best = heap_pop(e->heap, &heap_size);
        struct tok_symbol *left = &e->symbols[best.at];
        if (left->id < 0 || left->next < 0) continue;
        struct tok_symbol *right = &e->symbols[left->next];
        const struct tok_merge *merge = tok_merges_find(e->tok, left->id, right->id);
        if (!merge || merge->id != best.id) continue;
        left->id = best.id;
        right->id = -1; /* gone */
        left->next = right->next;
        if (left->next >= 0) e->symbols[left->next].previous = (int32_t)best.at;
        push_pair(e, &heap_size, left->previous);
        push_pair(e, &heap_size, (int32_t)best.at);
    }
}

struct filler {
    struct tok_symbol *symbols;
    size_t count;
};

static void add_symbol(struct filler *f, int32_t id) {
    f->symbols[f->count] = (struct tok_symbol){id, (int32_t)f->count - 1, (int32_t)f->count + 1};
    f->count++;
}

/* Bytes the vocabulary lacks give no symbol, as in huggingface/tokenizers without unk_token. */
static void fill_bytes(const struct tok *tok, struct filler *f, const char *piece, size_t size) {
    for (size_t i = 0; i < size; i++) {
        int32_t id = tok->byte_ids[(unsigned char)piece[i]];
        if (id >= 0) add_symbol(f, id);
    }
}

static bool bpe_fall_back(const struct tok *tok, struct filler *f, const char *s, size_t size) {
    if (!tok->byte_fallback) return false;
    for (size_t i = 0; i < size; i++)
        if (tok->fallback_ids[(unsigned char)s[i]] < 0) return false;
    for (size_t i = 0; i < size; i++) add_symbol(f, tok->fallback_ids[(unsigned char)s[i]]);
    return true;
}

static void fill_chars(const struct tok *tok, struct filler *f, const char *piece, size_t size) {
    bool pending = false; /* an unknown token that is not written yet */
    for (size_t i = 0, n; i < size; i += n) {
        if (utf8_step(piece + i, size - i, &n) != UTF8_CHAR) continue; /* pieces are valid UTF-8 */
        int32_t id = tok_vocab_find_plain(tok, piece + i, n);
        if (id < 0 && bpe_fall_back(tok, f, piece + i, n)) continue;
        if (id < 0 && tok->unknown < 0) continue;
        if (pending && (id >= 0 || !tok->fuse_unknown)) add_symbol(f, tok->unknown);
        pending = id < 0;
        if (id >= 0) add_symbol(f, id);
    }
    if (pending) add_symbol(f, tok->unknown);
}

/* As many symbols as bytes at most. */
static size_t fill_symbols(struct tok_encoder *e, const char *piece, size_t size) {
    struct filler f = {.symbols = e->symbols};
    if (e->tok->model == TOK_MODEL_BYTES)
        fill_bytes(e->tok, &f, piece, size);
    else
        fill_chars(e->tok, &f, piece, size);
    if (f.count) f.symbols[f.count - 1].next = -1;
    return f.count;
}

static int reserve_work(struct tok_encoder *e, size_t size) {
    if (size <= e->work_capacity) return 0;
    size_t capacity = e->work_capacity ? e->work_capacity : 64;
    while (capacity < size) capacity *= 2;
    e->symbols = arena_alloc(e->arena, capacity, sizeof *e->symbols);
    e->heap = arena_alloc(e->arena, capacity, 2 * sizeof *e->heap);
    if (!e->symbols || !e->heap) return tok_no_memory(e);
    e->work_capacity = capacity;
    return 0;
}

static int merge_piece(struct tok_encoder *e, const char *piece, size_t size) {
    int rc = reserve_work(e, size);
    if (rc) return rc;
    size_t count = fill_symbols(e, piece, size);
    if (count == 0) return 0;
    merge_symbols(e, count);
    for (int32_t i = 0; i >= 0 && !rc; i = e->symbols[i].next) rc = tok_emit(e, e->symbols[i].id);
    return rc;
}

/* --- cache: what the same piece gave earlier in this text, in a direct-mapped table --- */

#define CACHED_BYTES 64

static struct tok_cached *cache_place(const struct tok_encoder *e, const char *piece, size_t size) {
    uint64_t hash = size;
    for (size_t i = 0; i < size; i++) hash = (hash ^ (unsigned char)piece[i]) * 0x9E3779B97F4A7C15u;
    return &e->cache[(hash >> 40) & e->cache_mask];
}

static int encode_new(struct tok_encoder *e, const char *piece, size_t size) {
    switch (e->tok->model) {
    case TOK_MODEL_UNIGRAM:
        return tok_unigram(e, piece, size);
    case TOK_MODEL_WORDS:
        return tok_wordpiece(e, piece, size);
    case TOK_MODEL_BYTES:
    case TOK_MODEL_CHARS:
        break;
    }
    return merge_piece(e, piece, size);
}

static int merge_cached(struct tok_encoder *e, const char *piece, size_t size) {
    struct tok_cached *cached = cache_place(e, piece, size);
    int rc = 0;
    if (cached->size == size && memcmp(cached->piece, piece, size) == 0) {
        for (uint32_t i = 0; i < cached->count && !rc; i++)
            rc = tok_emit(e, e->ids[cached->first + i]);
        return rc;
    }
    size_t first = e->count;
    rc = encode_new(e, piece, size);
    *cached = (struct tok_cached){piece, (uint32_t)size, (uint32_t)(e->count - first), first};
    return rc;
}

static int encode_piece(struct tok_encoder *e, const char *piece, size_t size) {
    if (e->cache && size <= CACHED_BYTES) return merge_cached(e, piece, size);
    return encode_new(e, piece, size);
}

/* ---- Words ---- */

static const char mark[] = "\xE2\x96\x81"; /* U+2581 */
#define MARK_SIZE 3

/* Where the next word begins: a mark behind another character; `size` where none does. */
static size_t next_word(const char *s, size_t at, size_t size) {
    for (;;) {
        const char *found = at < size ? memmem(s + at, size - at, mark, MARK_SIZE) : NULL;
        if (!found) return size;
        size_t place = (size_t)(found - s);
        bool follows = place >= MARK_SIZE && memcmp(found - MARK_SIZE, mark, MARK_SIZE) == 0;
        if (place > 0 && !follows) return place;
        at = place + MARK_SIZE;
    }
}

void tok_bpe_find_marks(struct tok *tok) {
    tok->cut_at_marks = !tok->ignore_merges && tok_vocab_find_plain(tok, mark, MARK_SIZE) >= 0;
    for (uint32_t i = 0; i <= tok->merges.mask && tok->cut_at_marks; i++) {
        const struct tok_merge *merge = &tok->merges.slots[i];
        if (!merge->pair) continue;
        const struct tok_token *token = &tok->tokens[merge->id];
        if (next_word(tok->text + token->name, 0, token->name_size) < token->name_size)
            tok->cut_at_marks = false;
    }
}

/* ---- Pieces ---- */

/* The token that a whole piece is, where such tokens go before merging; else -1. */
static int32_t find_whole(const struct tok *tok, const char *piece, size_t size) {
    if (!tok->ignore_merges) return -1;
    return tok->model == TOK_MODEL_BYTES ? tok_vocab_find_whole(tok, piece, size)
                                         : tok_vocab_find_plain(tok, piece, size);
}

/* No token is longer than the longest, so a hopeless piece is refused before any work. */
static bool is_hopeless(const struct tok_encoder *e, size_t size) {
    const struct tok *tok = e->tok;
    if (tok->model == TOK_MODEL_BYTES) return tok->all_bytes && size / tok->bytes_max > e->max;
    return tok->byte_fallback && tok->all_fallback && size / tok->names_max > e->max;
}

int tok_bpe(struct tok_encoder *e, const char *piece, size_t size) {
    const struct tok *tok = e->tok;
    if (tok->model == TOK_MODEL_BYTES && size == 1) {
        int32_t id = tok->byte_ids[(unsigned char)*piece];
        return id < 0 ? 0 : tok_emit(e, id);
    }
    int32_t whole = find_whole(tok, piece, size);
    if (whole >= 0) return tok_emit(e, whole);
    if (!tok->cut_at_marks) return encode_piece(e, piece, size);
    int rc = 0;
    for (size_t at = 0, end; at < size && !rc; at = end) {
        end = next_word(piece, at + 1, size);
        rc = encode_piece(e, piece + at, end - at);
    }
    return rc;
}

int tok_piece(struct tok_encoder *e, const char *piece, size_t size) {
    if (is_hopeless(e, size))
        return fault_set(e->fault, ERR_LIMIT, NULL, "more than %zu tokens", e->max);
    if (size > TOK_TEXT_MAX)
        return fault_set(e->fault, ERR_LIMIT, NULL, "text of more than %zu bytes", TOK_TEXT_MAX);
    return e->tok->model == TOK_MODEL_UNIGRAM || e->tok->model == TOK_MODEL_WORDS
               ? encode_piece(e, piece, size)
               : tok_bpe(e, piece, size);
}
