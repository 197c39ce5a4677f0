/* Byte-pair merging of one piece: always the pair of lowest rank, leftmost first. */
#include <string.h>

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
        if (!merge || merge->rank != best.rank) continue;
        left->id = best.id;
        right->id = -1; /* gone */
        left->next = right->next;
        if (left->next >= 0) e->symbols[left->next].previous = (int32_t)best.at;
        push_pair(e, &heap_size, left->previous);
        push_pair(e, &heap_size, (int32_t)best.at);
    }
}

/* Bytes the vocabulary lacks give no symbol, as in huggingface/tokenizers without unk_token. */
static size_t fill_symbols(struct tok_encoder *e, const char *piece, size_t size) {
    size_t count = 0;
    for (size_t i = 0; i < size; i++) {
        int32_t id = e->tok->byte_ids[(unsigned char)piece[i]];
        if (id < 0) continue;
        e->symbols[count] = (struct tok_symbol){id, (int32_t)count - 1, (int32_t)count + 1};
        count++;
    }
    if (count) e->symbols[count - 1].next = -1;
    return count;
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

static int merge_cached(struct tok_encoder *e, const char *piece, size_t size) {
    struct tok_cached *cached = cache_place(e, piece, size);
    int rc = 0;
    if (cached->size == size && memcmp(cached->piece, piece, size) == 0) {
        for (uint32_t i = 0; i < cached->count && !rc; i++)
            rc = tok_emit(e, e->ids[cached->first + i]);
        return rc;
    }
    size_t first = e->count;
    rc = merge_piece(e, piece, size);
    *cached = (struct tok_cached){piece, (uint32_t)size, (uint32_t)(e->count - first), first};
    return rc;
}

int tok_bpe(struct tok_encoder *e, const char *piece, size_t size) {
    const struct tok *tok = e->tok;
    if (size == 1) {
        int32_t id = tok->byte_ids[(unsigned char)*piece];
        return id < 0 ? 0 : tok_emit(e, id);
    }
    if (tok->ignore_merges) {
        int32_t id = tok_vocab_find_whole(tok, piece, size);
        if (id >= 0) return tok_emit(e, id);
    }
    /* No token is longer than bytes_max, so a hopeless piece is refused before any work. */
    if (tok->all_bytes && size / tok->bytes_max > e->max)
        return fault_set(e->fault, ERR_LIMIT, NULL, "more than %zu tokens", e->max);
    return e->cache && size <= CACHED_BYTES ? merge_cached(e, piece, size)
                                            : merge_piece(e, piece, size);
}
