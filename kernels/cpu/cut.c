/* Finds the cut of every group of competing streams (struct cpu_evict_pool): the lowest-ranking
 * entry that is kept. An entry ranks by its key, then by its position (newer first), then by its
 * stream (lower first). Each of the three is found by a radix select: 11, 11 and 10 bits from the
 * top, every pass narrows the candidates to one of 2,048 bins, whatever the values. Ranks add up
 * their histograms, so all of them find the same cut, and the cut that a single rank would find.
 * The later selects run only where equal entries cross the cut. */
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

static void count_keys(const struct evict_job *job, const struct cpu_evict_pool *pool,
                       const struct pass *pass, uint32_t *bins) {
    const struct cpu_cache *cache = job->cache;
    size_t first = cache->evict[pool->from].first, end = cache->evict[pool->to].first;
    for (size_t i = first; i < end; i++) {
        uint32_t key = cache->keys[i];
        if ((key & pass->decided) == pool->value) bins[key >> pass->shift & pass->mask]++;
    }
}

/* Counts entries with the cut's key; in the stage by stream, also with its position. */
static void count_ties(const struct evict_job *job, const struct cpu_evict_pool *pool, int stream,
                       const struct pass *pass, uint32_t *bins) {
    const struct cpu_cache *cache = job->cache;
    const uint32_t *table = cpu_cache_table(cache, job->due->slot, stream);
    const uint32_t *keys = cache->keys + cache->evict[stream].first;
    int32_t length = *cpu_cache_length(cache, job->due->slot, stream);
    for (int32_t i = 0; i < length; i++) {
        if (keys[i] != pool->cut.key) continue;
        int32_t pos = cpu_cache_entry_pos(cache, table, i);
        if (pass->stage == BY_STREAM && pos != pool->cut.pos) continue;
        uint32_t value = pass->stage == BY_POS ? (uint32_t)pos
                                               : ~(uint32_t)cpu_cache_model_stream(cache, stream);
        if ((value & pass->decided) == pool->value) bins[value >> pass->shift & pass->mask]++;
    }
}

static void count(const struct evict_job *job, const struct cpu_evict_pool *pool,
                  const struct pass *pass, uint32_t *bins) {
    if (pass->stage == BY_KEY) {
        count_keys(job, pool, pass, bins);
        return;
    }
    for (int stream = pool->from; stream < pool->to; stream++)
        count_ties(job, pool, stream, pass, bins);
}

static void narrow(struct cpu_evict_pool *pool, const struct pass *pass, const uint32_t *bins) {
    uint32_t bin = pass->mask;
    while (bins[bin] < pool->wanted) {
        CHECK(bin > 0);
        pool->wanted -= bins[bin--];
    }
    pool->value |= bin << pass->shift;
    pool->equal = bins[bin];
}

static int select_stage(const struct evict_cuts *cuts, enum stage stage) {
    static const struct { int shift, bits; } passes[] = {{21, 11}, {10, 11}, {0, 10}};
    struct pass pass = {.stage = stage};
    for (int p = 0; p < cuts->count; p++) cuts->pools[p].value = 0;
    for (size_t i = 0; i < sizeof passes / sizeof *passes; i++) {
        pass.shift = passes[i].shift;
        pass.mask = (1u << passes[i].bits) - 1;
        size_t bins = (size_t)cuts->count * CPU_EVICT_BINS;
        memset(cuts->bins, 0, bins * sizeof *cuts->bins);
        for (int p = 0; p < cuts->count && cuts->counts; p++)
            if (cuts->pools[p].open && !(cuts->pools[p].capped & cuts->own))
                count(cuts->job, &cuts->pools[p], &pass, cuts->bins + (size_t)p * CPU_EVICT_BINS);
        int rc = cuts->comm->ops->all_reduce(cuts->comm, cuts->bins, bins, COMM_U32, COMM_SUM);
        if (rc) return rc;
        for (int p = 0; p < cuts->count; p++)
            if (cuts->pools[p].open)
                narrow(&cuts->pools[p], &pass, cuts->bins + (size_t)p * CPU_EVICT_BINS);
        pass.decided |= pass.mask << pass.shift;
    }
    return 0;
}

/* A cut that keeps all or nothing is known without a search. */
static bool begin(struct cpu_evict_pool *pool) {
    CHECK(pool->keep >= 0 && pool->keep <= UINT32_MAX);
    pool->open = pool->keep > 0 && pool->keep < pool->held;
    pool->wanted = (uint32_t)pool->keep;
    if (pool->keep == 0)
        pool->cut = (struct cpu_evict_cut){.key = UINT32_MAX, .pos = INT32_MAX, .stream = -1};
    else /* also the value of what the stages leave undecided */
        pool->cut = (struct cpu_evict_cut){.key = 0, .pos = 0, .stream = INT32_MAX};
    return pool->open;
}

/* Stores the result of the stage; is the search still open? */
static bool settle(struct cpu_evict_pool *pool, enum stage stage) {
    if (stage == BY_KEY) pool->cut.key = pool->value;
    if (stage == BY_POS) pool->cut.pos = (int32_t)pool->value;
    if (stage == BY_STREAM) pool->cut.stream = (int32_t)~pool->value;
    CHECK(pool->wanted > 0 && pool->wanted <= pool->equal);
    pool->open = pool->wanted < pool->equal;
    return pool->open;
}

int evict_find_cuts(const struct evict_cuts *cuts) {
    int open = 0, rc = 0;
    for (int p = 0; p < cuts->count; p++) open += begin(&cuts->pools[p]);
    for (int stage = BY_KEY; stage < STAGES && open > 0 && !rc; stage++) {
        rc = select_stage(cuts, stage);
        open = 0;
        for (int p = 0; p < cuts->count && !rc; p++)
            if (cuts->pools[p].open) open += settle(&cuts->pools[p], stage);
    }
    return rc;
}
