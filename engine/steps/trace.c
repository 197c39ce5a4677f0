#include "engine/steps/trace.h"

#include "base/mem.h"

/* Allocates for all entries of the sequence: a rule may evict more than the budget asks for. */
struct kern_trace *trace_begin(struct sequence *seq, const struct reserve_shape *shape) {
    if (seq->index != 0 || seq->job->request.kv.report != ENGINE_REPORT_TRACE) return NULL;
    size_t count = (size_t)reserve_all_streams(shape);
    size_t entries = (size_t)due_entries(shape, &seq->kv, &seq->due);
    struct engine_eviction *eviction = NULL;
    if (entries < SIZE_MAX / sizeof(int32_t))
        eviction = mem_try_alloc(1, sizeof *eviction + count * sizeof *eviction->lengths);
    if (eviction) eviction->positions = mem_try_alloc(entries + 1, sizeof(int32_t));
    if (!eviction || !eviction->positions) {
        mem_free(eviction);
        seq->job->kv.evictions_lost++;
        return NULL;
    }
    eviction->tokens = seq->due.tokens;
    seq->eviction = eviction;
    seq->trace = (struct kern_trace){
        .lengths = eviction->lengths, .positions = eviction->positions, .entries_max = entries};
    return &seq->trace;
}

static void free_eviction(struct engine_eviction *eviction) {
    mem_free(eviction->positions);
    mem_free(eviction);
}

void trace_drop(struct sequence *seq) {
    if (seq->eviction) free_eviction(seq->eviction);
    seq->eviction = NULL;
}

void trace_end(struct sequence *seq) {
    struct engine_eviction *eviction = seq->eviction;
    if (!eviction) return;
    if (seq->trace.lost) {
        seq->job->kv.evictions_lost++;
        trace_drop(seq);
        return;
    }
    size_t used = (seq->trace.entries + 1) * sizeof *eviction->positions;
    int32_t *positions = mem_try_realloc(eviction->positions, used, used);
    if (positions) eviction->positions = positions;
    struct engine_eviction **link = &seq->job->kv.evictions;
    while (*link) link = &(*link)->next;
    *link = eviction;
    seq->eviction = NULL;
}

void trace_close(struct engine_kv_details *details) {
    struct engine_eviction *next;
    for (; details->evictions; details->evictions = next) {
        next = details->evictions->next;
        free_eviction(details->evictions);
    }
}
