/* Eviction of one sequence: score every entry, share the total, find the lowest rank that is kept,
 * merge, close the gaps.
 *
 * Scores are uint32 keys in the same order. What is shared and cut between streams of several ranks
 * is decided by each of them from the same numbers (evict_tell, cut.c). All but the shares runs
 * stream by stream and may run in parallel; what is kept does not depend on the schedule. */
#include "kernels/cpu/evict.h"

#include <math.h>

#include "base/check.h"

static void each_stream(const struct evict_job *job, cpu_item *fn) {
    struct cpu_cache *cache = job->cache;
    if (cache->parallel) {
        cache->parallel(cache->parallel_ctx, cache->streams, fn, (void *)(uintptr_t)job);
        return;
    }
    for (int stream = 0; stream < cache->streams; stream++) fn((void *)(uintptr_t)job, stream, 0);
}

/* ---- Who stays -------------------------------------------------------------------------------
 */

/* Most entries are judged by their key alone; only ties look at the page. */
static bool is_above(const struct evict_job *job, int stream, const uint32_t *table,
                     int32_t index) {
    const struct cpu_evict_stream *plan = &job->cache->evict[stream];
    uint32_t key = job->cache->keys[plan->first + (size_t)index];
    if (key != plan->cut.key) return key > plan->cut.key;
    int32_t pos = cpu_cache_entry_pos(job->cache, table, index);
    if (pos != plan->cut.pos) return pos > plan->cut.pos;
    return cpu_cache_model_stream(job->cache, stream) <= plan->cut.stream;
}

bool evict_keeps(const struct evict_job *job, int stream, const uint32_t *table, int32_t index) {
    size_t at = job->cache->evict[stream].first + (size_t)index;
    return job->cache->keys[at] >= job->least && is_above(job, stream, table, index);
}

/* ---- Pools ---------------------------------------------------------------------------------- */

/* A stream by itself concerns no other rank. */
static void cut_stream(void *arg, int stream, int worker) {
    (void)worker;
    const struct evict_job *job = arg;
    struct cpu_evict_stream *plan = &job->cache->evict[stream];
    struct cpu_evict_pool pool = {.from = stream, .to = stream + 1, .keep = plan->keep};
    uint32_t bins[CPU_EVICT_BINS];
    pool.held = (int64_t)(plan[1].first - plan->first);
    const struct evict_cuts cuts = {job, &comm_none, true, &pool, 1, bins};
    (void)evict_find_cuts(&cuts); /* only communicators fail */
    plan->cut = pool.cut;
}

/* Pools of several streams, each with its places. */
static int open_pools(const struct evict_job *job) {
    const struct cpu_cache *cache = job->cache;
    int layers = cache->options.layers, heads = cache->options.heads_kv;
    bool all = job->due->rule->pool == KERN_POOL_SEQUENCE;
    int count = all ? 1 : layers, size = all ? layers : 1;
    for (int p = 0; p < count; p++) {
        struct cpu_evict_pool *pool = &cache->pools[p];
        *pool = (struct cpu_evict_pool){.from = p * size * heads, .to = (p + 1) * size * heads};
        pool->keep = cache->evict[pool->from].keep;
        for (int layer = p * size; layer < (p + 1) * size; layer++)
            for (int head = 0; head < cache->heads_model; head++)
                pool->held += evict_fact(job, layer, head)->length;
    }
    return count;
}

/* A stream's entries among the best of its pool. */
static void count_best(void *arg, int stream, int worker) {
    (void)worker;
    const struct evict_job *job = arg;
    const uint32_t *table = cpu_cache_table(job->cache, job->due->slot, stream);
    int32_t length = *cpu_cache_length(job->cache, job->due->slot, stream);
    int64_t count = 0;
    for (int32_t i = 0; i < length; i++) count += is_above(job, stream, table, i);
    job->cache->evict[stream].best = count;
}

static int cut_pools(const struct evict_job *job, int count) {
    struct cpu_cache *cache = job->cache;
    const struct evict_cuts cuts = {job,          cache->comm, cache->shard.speaks,
                                    cache->pools, count,       cache->bins};
    int rc = evict_find_cuts(&cuts);
    for (int p = 0; p < count && !rc; p++)
        for (int stream = cache->pools[p].from; stream < cache->pools[p].to; stream++)
            cache->evict[stream].cut = cache->pools[p].cut;
    return rc;
}

/* Ada-KV: see kern_rule.floor. */
static int share_by_count(const struct evict_job *job, int count) {
    struct cpu_cache *cache = job->cache;
    int heads = cache->heads_model, own = cache->options.heads_kv;
    struct cpu_share_part *parts = cache->parts + cache->options.layers;
    double floor = (double)job->due->rule->floor;
    int rc = cut_pools(job, count);
    if (!rc) each_stream(job, count_best);
    if (!rc) rc = evict_tell(job);
    for (int layer = 0; layer < count && !rc; layer++) {
        int64_t room = cache->pools[layer].keep;
        double even = (double)room / heads;
        for (int i = 0; i < heads; i++) {
            const struct cpu_evict_fact *fact = evict_fact(job, layer, i);
            double weight = (1 - floor) * (double)fact->best + floor * even;
            parts[i] = (struct cpu_share_part){.weight = weight, .most = fact->length};
        }
        share_split(parts, heads, room);
        for (int i = 0; i < own; i++)
            cache->evict[layer * own + i].keep = parts[cache->shard.first + i].part;
    }
    return rc;
}

/* Global gates: see kern_rule.floor. */
static int share_above_floor(const struct evict_job *job, int count) {
    struct cpu_cache *cache = job->cache;
    struct cpu_evict_pool *pool = cache->pools;
    int64_t streams = (int64_t)cache->options.layers * cache->heads_model;
    int64_t least = (int64_t)(job->due->rule->floor * (float)pool->keep / (float)streams);
    pool->keep -= least * streams;
    int rc = cut_pools(job, count);
    if (!rc) each_stream(job, count_best);
    for (int i = 0; i < cache->streams && !rc; i++) {
        int64_t places = cache->evict[i].best + least;
        int32_t length = *cpu_cache_length(cache, job->due->slot, i);
        cache->evict[i].keep = places < length ? places : length;
    }
    return rc;
}

/* Of a pool's places, streams may have some for themselves. */
static int cut_streams(const struct evict_job *job) {
    const struct kern_rule *rule = job->due->rule;
    int rc = 0;
    if (rule->pool != KERN_POOL_STREAM) {
        int count = open_pools(job);
        rc = rule->floor <= 0                ? cut_pools(job, count)
             : rule->pool == KERN_POOL_LAYER ? share_by_count(job, count)
                                             : share_above_floor(job, count);
    }
    if (!rc && (rule->pool == KERN_POOL_STREAM || rule->floor > 0)) each_stream(job, cut_stream);
    return rc;
}

/* ---- Compaction ----------------------------------------------------------------------------- */

static void count_stream(void *arg, int stream, int worker) {
    (void)worker;
    const struct evict_job *job = arg;
    struct cpu_evict_stream *plan = &job->cache->evict[stream];
    const uint32_t *table = cpu_cache_table(job->cache, job->due->slot, stream);
    int32_t length = *cpu_cache_length(job->cache, job->due->slot, stream);
    plan->kept = 0;
    plan->lead = length;
    for (int32_t i = 0; i < length; i++) {
        if (evict_keeps(job, stream, table, i))
            plan->kept++;
        else if (plan->lead == length)
            plan->lead = i;
    }
}

static bool remembers(const struct kern_rule *rule) {
    return cpu_rule_window(rule) > 0 && rule->observe.history != KERN_HISTORY_NONE;
}

/* Pages [from, to) of a stream are written: where its gaps close; where entries remember their
 * score, all that stay; where they merge, all. */
static void written_pages(const struct evict_job *job, int stream, int32_t *from, int32_t *to) {
    const struct cpu_cache *cache = job->cache;
    const struct cpu_evict_stream *plan = &cache->evict[stream];
    bool merges = job->due->rule->merge != KERN_MERGE_NONE,
         all = merges || remembers(job->due->rule);
    int32_t length = *cpu_cache_length(cache, job->due->slot, stream);
    *from = all ? 0 : plan->lead / cache->page_slots;
    *to = plan->lead < plan->kept || all ? cpu_cache_pages_for(cache, plan->kept) : *from;
    if (merges && plan->kept < length) *to = cpu_cache_pages_for(cache, length);
}

/* All this is written in place, so pages shared with a fork become private first. */
static int own_pages(const struct evict_job *job) {
    struct cpu_cache *cache = job->cache;
    int64_t need = 0;
    int32_t from, to;
    for (int stream = 0; stream < cache->streams; stream++) {
        const uint32_t *table = cpu_cache_table(cache, job->due->slot, stream);
        written_pages(job, stream, &from, &to);
        for (int32_t i = from; i < to; i++) need += cache->refs[table[i]] > 1;
    }
    int rc = cache->comm->ops->agree(cache->comm, need > cache->free_count ? ERR_FULL : 0);
    if (rc || need == 0) return rc;
    for (int stream = 0; stream < cache->streams; stream++) {
        uint32_t *table = cpu_cache_table(cache, job->due->slot, stream);
        written_pages(job, stream, &from, &to);
        for (int32_t i = from; i < to; i++) cpu_cache_own_page(cache, &table[i]);
    }
    return 0;
}

/* The new score of entry `from`, which now lies at `to`; recent entries have none yet. */
static void remember(const struct evict_job *job, int stream, const uint32_t *table, int32_t to,
                     int32_t from) {
    const struct cpu_cache *cache = job->cache;
    const struct cpu_evict_stream *plan = &cache->evict[stream];
    if (from >= plan->candidates) return;
    cpu_cache_score(cache, table[to / cache->page_slots])[to % cache->page_slots] =
        cache->fresh[plan->first + (size_t)from];
}

/* Front to back: the destination never overtakes the source. */
static void move_stream(void *arg, int stream, int worker) {
    (void)worker;
    const struct evict_job *job = arg;
    struct cpu_cache *cache = job->cache;
    const struct cpu_evict_stream *plan = &cache->evict[stream];
    const uint32_t *table = cpu_cache_table(cache, job->due->slot, stream);
    bool history = remembers(job->due->rule);
    int32_t slots = cache->page_slots;
    for (int32_t i = 0; history && i < plan->lead; i++) remember(job, stream, table, i, i);
    for (int32_t to = plan->lead, from = to + 1; to < plan->kept; from++) {
        if (!evict_keeps(job, stream, table, from)) continue;
        cpu_cache_move_entry(cache, table[to / slots], to % slots, table[from / slots],
                             from % slots);
        if (history) remember(job, stream, table, to, from);
        to++;
    }
}

/* ---- The trace ------------------------------------------------------------------------------ */

static void trace_stream(const struct evict_job *job, int stream) {
    struct kern_trace *trace = job->due->trace;
    const uint32_t *table = cpu_cache_table(job->cache, job->due->slot, stream);
    int32_t length = *cpu_cache_length(job->cache, job->due->slot, stream);
    trace->lengths[stream] = length - job->cache->evict[stream].kept;
    for (int32_t i = job->cache->evict[stream].lead; i < length; i++) {
        if (evict_keeps(job, stream, table, i)) continue;
        if (trace->entries < trace->entries_max)
            trace->positions[trace->entries] = cpu_cache_entry_pos(job->cache, table, i);
        trace->entries++;
    }
}

/* ---- One sequence --------------------------------------------------------------------------- */

/* Where each stream's keys begin; returns the number of entries. */
static size_t place_keys(struct cpu_cache *cache, int slot) {
    size_t total = 0;
    for (int stream = 0; stream < cache->streams; stream++) {
        cache->evict[stream].first = total;
        total += (size_t)*cpu_cache_length(cache, slot, stream);
    }
    cache->evict[cache->streams].first = total;
    return total;
}

/* Reads only: what follows either happens in full or, for want of pages, not at all. */
static int choose(const struct evict_job *job) {
    int rc = 0;
    each_stream(job, evict_count_stream);
    each_stream(job, evict_score_stream);
    if (job->due->rule->layers != KERN_LAYERS_UNIFORM) rc = evict_measure(job, each_stream);
    if (!rc) rc = evict_share(job);
    if (!rc) rc = cut_streams(job);
    if (!rc) each_stream(job, count_stream);
    return rc;
}

static int evict_slot(struct cpu_cache *cache, const struct kern_evict *due) {
    CHECK(due->slot >= 0 && due->slot < cache->options.slots && due->keep > 0);
    struct evict_job job = {.cache = cache, .due = due};
    if (due->rule->score == KERN_SCORE_RETENTION && due->rule->retain > 0)
        job.least = evict_key(logf(due->rule->retain));
    size_t total = place_keys(cache, due->slot), kept = 0;
    int rc = choose(&job);
    if (!rc) rc = own_pages(&job);
    if (rc < 0) return rc;
    cache->slots[due->slot].measured = true;
    if (due->trace) due->trace->entries = 0;
    for (int stream = 0; stream < cache->streams && due->trace; stream++)
        trace_stream(&job, stream);
    if (due->rule->merge != KERN_MERGE_NONE) each_stream(&job, evict_merge_stream);
    each_stream(&job, move_stream);
    for (int stream = 0; stream < cache->streams; stream++) {
        cpu_cache_shorten(cache, due->slot, stream, cache->evict[stream].kept);
        kept += (size_t)cache->evict[stream].kept;
    }
    cache->entries_evicted += total - kept;
    return 0;
}

int cpu_cache_evict(struct cpu_cache *cache, const struct kern_evict *due, int count) {
    for (int i = 0; i < count; i++) {
        int rc = evict_slot(cache, &due[i]);
        if (rc < 0) return rc;
    }
    return 0;
}
