/* Finds the cutoff of every scope (struct cpu_evict_scope): the lowest-ranking entry that is kept.
 *
 * An entry ranks by its key, then by its position (newer first), then by its stream (lower first).
 * Each of the three is found by a radix select over 11, 11 and 10 bits, from the top: every pass
 * narrows the search to one of 2,048 bins, whatever the values. The ranks add up their histograms,
 * so all of them find the same cutoff as a single rank would. Positions and streams are searched
 * only where entries with equal keys lie on both sides of the cutoff. */
#include <string.h>

#include "base/check.h"
#include "kernels/cpu/evict.h"

enum stage { BY_KEY, BY_POS, BY_STREAM, STAGES };

/* Common to all histograms of one pass. */
struct pass {
    enum stage stage;
    int shift;
    uint32_t mask;
    uint32_t decided; /* bits of the value that are known */
};

static void count_keys(const struct evict_job *job, const struct cpu_evict_scope *scope, int stream,
                       const struct pass *pass, uint32_t *bins) {
    const struct cpu_cache *cache = job->cache;
    size_t first = cache->evict[stream].first, end = cache->evict[stream + 1].first;
    for (size_t i = first; i < end; i++) {
        uint32_t key = cache->keys[i];
        if ((key & pass->decided) == scope->value) bins[key >> pass->shift & pass->mask]++;
    }
}

/* Counts entries with the cutoff's key; in the stage by stream, also with its position. */
static void count_ties(const struct evict_job *job, const struct cpu_evict_scope *scope, int stream,
                       const struct pass *pass, uint32_t *bins) {
    const struct cpu_cache *cache = job->cache;
    const struct cpu_stream view = evict_stream(job, stream);
    const uint32_t *keys = cache->keys + cache->evict[stream].first;
    for (int32_t i = 0; i < view.length; i++) {
        if (keys[i] != scope->cutoff.key) continue;
        int32_t pos = cpu_cache_entry_pos(cache, &view, i);
        if (pass->stage == BY_STREAM && pos != scope->cutoff.pos) continue;
        uint32_t value = pass->stage == BY_POS ? (uint32_t)pos
                                               : ~(uint32_t)cpu_cache_model_stream(cache, stream);
        if ((value & pass->decided) == scope->value) bins[value >> pass->shift & pass->mask]++;
    }
}

static void count_scope(const struct evict_search *search, const struct cpu_evict_scope *scope,
                        const struct pass *pass, uint32_t *bins) {
    for (int stream = scope->from; stream < scope->to; stream++) {
        if (!search->counts && !cpu_cache_layer(search->job->cache, stream)->shard.speaks) continue;
        if (pass->stage == BY_KEY)
            count_keys(search->job, scope, stream, pass, bins);
        else
            count_ties(search->job, scope, stream, pass, bins);
    }
}

static void cutoff_narrow(struct cpu_evict_scope *scope, const struct pass *pass,
                          const uint32_t *bins) {
    uint32_t bin = pass->mask;
    while (bins[bin] < scope->wanted) {
        CHECK(bin > 0);
        scope->wanted -= bins[bin--];
    }
    scope->value |= bin << pass->shift;
    scope->equal = bins[bin];
}

static int select_stage(const struct evict_search *search, enum stage stage) {
    static const struct { int shift, bits; } passes[] = {{21, 11}, {10, 11}, {0, 10}};
    struct pass pass = {.stage = stage};
    for (int p = 0; p < search->count; p++) search->scopes[p].value = 0;
    for (size_t i = 0; i < sizeof passes / sizeof *passes; i++) {
        pass.shift = passes[i].shift;
        pass.mask = (1u << passes[i].bits) - 1;
        size_t bins = (size_t)search->count * CPU_EVICT_BINS;
        memset(search->bins, 0, bins * sizeof *search->bins);
        for (int p = 0; p < search->count; p++)
            if (search->scopes[p].open && !(search->scopes[p].capped & search->own))
                count_scope(search, &search->scopes[p], &pass,
                            search->bins + (size_t)p * CPU_EVICT_BINS);
        int rc =
            search->comm->ops->all_reduce(search->comm, search->bins, bins, COMM_U32, COMM_SUM);
        if (rc) return rc;
        for (int p = 0; p < search->count; p++)
            if (search->scopes[p].open)
                cutoff_narrow(&search->scopes[p], &pass, search->bins + (size_t)p * CPU_EVICT_BINS);
        pass.decided |= pass.mask << pass.shift;
    }
    return 0;
}

/* A cutoff that keeps all or nothing is known without a search. */
static bool cutoff_begin(struct cpu_evict_scope *scope) {
    CHECK(scope->allotment >= 0 && scope->allotment <= UINT32_MAX);
    scope->open = scope->allotment > 0 && scope->allotment < scope->held;
    scope->wanted = (uint32_t)scope->allotment;
    if (scope->allotment == 0)
        scope->cutoff =
            (struct cpu_evict_cutoff){.key = UINT32_MAX, .pos = INT32_MAX, .stream = -1};
    else /* fields that no stage decides keep these values */
        scope->cutoff = (struct cpu_evict_cutoff){.key = 0, .pos = 0, .stream = INT32_MAX};
    return scope->open;
}

/* Stores the result of the stage. Returns whether the search is still open. */
static bool settle(struct cpu_evict_scope *scope, enum stage stage) {
    if (stage == BY_KEY) scope->cutoff.key = scope->value;
    if (stage == BY_POS) scope->cutoff.pos = (int32_t)scope->value;
    if (stage == BY_STREAM) scope->cutoff.stream = (int32_t)~scope->value;
    CHECK(scope->wanted > 0 && scope->wanted <= scope->equal);
    scope->open = scope->wanted < scope->equal;
    return scope->open;
}

int evict_find_cutoffs(const struct evict_search *search) {
    int open = 0, rc = 0;
    for (int p = 0; p < search->count; p++) open += cutoff_begin(&search->scopes[p]);
    for (int stage = BY_KEY; stage < STAGES && open > 0 && !rc; stage++) {
        rc = select_stage(search, stage);
        open = 0;
        for (int p = 0; p < search->count && !rc; p++)
            if (search->scopes[p].open) open += settle(&search->scopes[p], stage);
    }
    return rc;
}
