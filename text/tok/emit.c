/* Adds ids to the result of an encoder. */
#include <string.h>

#include "text/tok/internal.h"

int tok_no_memory(struct tok_encoder *e) {
    if (e->arena->full)
        return fault_set(e->fault, ERR_LIMIT, "tokenizer",
                         "the text needs more than %zu MiB of memory", e->arena->limit >> 20);
    return fault_set(e->fault, ERR_NOMEM, NULL, "not enough memory for this text");
}

static int grow_ids(struct tok_encoder *e) {
    size_t capacity = e->capacity ? e->capacity * 2 : 32;
    if (capacity > e->max) capacity = e->max;
    int32_t *ids = arena_alloc(e->arena, capacity, sizeof *ids);
    if (!ids) return tok_no_memory(e);
    if (e->count) memcpy(ids, e->ids, e->count * sizeof *ids);
    e->ids = ids;
    e->capacity = capacity;
    return 0;
}

int tok_emit(struct tok_encoder *e, int32_t id) {
    if (e->count == e->max)
        return fault_set(e->fault, ERR_LIMIT, NULL, "more than %zu tokens", e->max);
    if (e->count == e->capacity) {
        int rc = grow_ids(e);
        if (rc) return rc;
    }
    e->ids[e->count++] = id;
    return 0;
}
