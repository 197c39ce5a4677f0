/* Eviction of one sequence, in stages: score every entry, split the total, find the lowest-ranking
 * entry that is kept, merge, compact.
 *
 * Scores are uint32 keys in the same order. Every rank makes the decisions that concern several
 * ranks by itself, from the same numbers (evict_tell, cut.c). Except for the split, every stage
 * runs stream by stream and may run in parallel; the result does not depend on the schedule. */
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

/* ---- Selection -------------------------------------------------------------------------------
 */

/* The key decides for most entries; only ties read the page. */
bool evict_reaches(const struct evict_job *job, int stream, const struct cpu_evict_cut *cut,
                   const uint32_t *table, int32_t index) {
    uint32_t key = job->cache->keys[job->cache->evict[stream].first + (size_t)index];
    if (key != cut->key) return key > cut->key;
    int32_t pos = cpu_cache_entry_pos(job->cache, table, index);
    if (pos != cut->pos) return pos > cut->pos;
    return cpu_cache_model_stream(job->cache, stream) <= cut->stream;
}

static bool is_above(const struct evict_job *job, int stream, const uint32_t *table,
                     int32_t index) {
    return evict_reaches(job, stream, &job->cache->evict[stream].cut, table, index);
}

bool evict_keeps(const struct evict_job *job, int stream, const uint32_t *table, int32_t index) {
    size_t at = job->cache->evict[stream].first + (size_t)index;
    return job->cache->keys[at] >= job->least && is_above(job, stream, table, index);
}

/* ---- Pools ---------------------------------------------------------------------------------- */

/* The cut of streams of this rank alone; no other rank is involved. */
static struct cpu_evict_cut own_cut(const struct evict_job *job, int from, int to, int64_t keep) {
    const struct cpu_evict_stream *plan = job->cache->evict;
    struct cpu_evict_pool pool = {.from = from, .to = to, .keep = keep};
    uint32_t bins[CPU_EVICT_BINS];
    pool.held = (int64_t)(plan[to].first - plan[from].first);
    const struct evict_cuts cuts = {
        .job = job, .comm = &comm_none, .counts = true, .pools = &pool, .count = 1, .bins = bins};
    (void)evict_find_cuts(&cuts); /* only communicators fail */
    return pool.cut;
}

static void cut_stream(void *arg, int stream, int worker) {
    (void)worker;
    const struct evict_job *job = arg;
    struct cpu_evict_stream *plan = &job->cache->evict[stream];
    plan->cut = own_cut(job, stream, stream + 1, plan->keep);
}

/* One pool per layer, or one for the sequence, each with its places. */
static int open_pools(const struct evict_job *job) {
    const struct cpu_cache *cache = job->cache;
    int layers = cache->options.layers, heads = cache->options.heads_kv;
    bool all = job->due->rule->pool == KERN_POOL_SEQUENCE;
    int count = all ? 1 : layers, size = all ? layers : 1;
    for (int p = 0; p < count; p++) {
        struct cpu_evict_pool *pool = &cache->pools[p];
        *pool = (struct cpu_evict_pool){.from = p * size * heads, .to = (p + 1) * size * heads};
        pool->places = pool->keep = cache->evict[pool->from].keep;
        for (int layer = p * size; layer < (p + 1) * size; layer++)
            for (int head = 0; head < cache->heads_model; head++)
                pool->held += evict_fact(job, layer, head)->length;
    }
    return count;
}

/* Counts the stream's entries above the cut of its pool. */
static void count_best(void *arg, int stream, int worker) {
    (void)worker;
    const struct evict_job *job = arg;
    const uint32_t *table = cpu_cache_table(job->cache, job->due->slot, stream);
    int32_t length = *cpu_cache_length(job->cache, job->due->slot, stream);
    int64_t count = 0;
    for (int32_t i = 0; i < length; i++) count += is_above(job, stream, table, i);
    job->cache->evict[stream].best = count;
}

/* The rank that speaks for this rank's heads. */
static int own_rank(const struct cpu_cache *cache) {
    return shard_owner(cache->comm->ranks, cache->heads_model, cache->shard.first);
}

/* Entries of a pool on each rank, from the facts of all ranks. */
struct rank_part {
    int64_t kept, held, fixed;
};

static void rank_parts(const struct evict_job *job, const struct cpu_evict_pool *pool,
                       struct rank_part parts[COMM_RANKS_MAX]) {
    const struct cpu_cache *cache = job->cache;
    int heads = cache->options.heads_kv;
    memset(parts, 0, COMM_RANKS_MAX * sizeof *parts);
    for (int layer = pool->from / heads; layer < pool->to / heads; layer++)
        for (int head = 0; head < cache->heads_model; head++) {
            const struct cpu_evict_fact *fact = evict_fact(job, layer, head);
            struct rank_part *part =
                &parts[shard_owner(cache->comm->ranks, cache->heads_model, head)];
            part->kept += fact->best;
            part->held += fact->length;
            part->fixed += fact->fixed;
        }
}

/* Ranks above the pool's limit keep `limit` of their own entries; the remaining ranks compete for
 * the other places. Returns true if another rank was capped. */
static bool cap_pool(const struct evict_job *job, struct cpu_evict_pool *pool) {
    struct cpu_cache *cache = job->cache;
    int ranks = cache->comm->ranks;
    int sharing = ranks < cache->heads_model ? ranks : cache->heads_model;
    struct rank_part parts[COMM_RANKS_MAX];
    uint32_t before = pool->capped;
    rank_parts(job, pool, parts);
    pool->limit = (int64_t)((double)cache->options.rank_cap * (double)pool->places / sharing);
    for (int r = 0; r < ranks; r++)
        if (parts[r].fixed > pool->limit) pool->limit = parts[r].fixed;
    for (int r = 0; r < ranks; r++) {
        if (pool->capped >> r & 1 || parts[r].kept <= pool->limit) continue;
        pool->capped |= 1u << r;
        pool->keep -= pool->limit;
        pool->held -= parts[r].held;
    }
    CHECK(pool->keep >= 0 && pool->held >= 0);
    if (before == 0 && pool->capped != 0) cache->rank_cap_hits++;
    return pool->capped != before;
}

static void note_cuts(const struct evict_job *job, int count) {
    struct cpu_cache *cache = job->cache;
    for (int p = 0; p < count; p++) {
        const struct cpu_evict_pool *pool = &cache->pools[p];
        struct cpu_evict_cut cut = pool->cut;
        if (pool->capped >> own_rank(cache) & 1)
            cut = own_cut(job, pool->from, pool->to, pool->limit);
        for (int stream = pool->from; stream < pool->to; stream++) cache->evict[stream].cut = cut;
    }
}

/* With a cap, repeats the search without the ranks that have reached it, until no rank exceeds it.
 * Every round caps at least one more rank, so there are at most as many rounds as ranks. */
static int cut_pools(const struct evict_job *job, int count) {
    struct cpu_cache *cache = job->cache;
    const struct evict_cuts cuts = {.job = job,
                                    .comm = cache->comm,
                                    .counts = cache->shard.speaks,
                                    .own = 1u << own_rank(cache),
                                    .pools = cache->pools,
                                    .count = count,
                                    .bins = cache->bins};
    bool again = true;
    int rc = 0;
    while (again && !rc) {
        rc = evict_find_cuts(&cuts);
        if (rc) break;
        note_cuts(job, count);
        again = false;
        if (cache->options.rank_cap <= 0 || cache->comm->ranks == 1) break;
        each_stream(job, count_best);
        rc = evict_tell(job);
        for (int p = 0; p < count && !rc; p++) again = cap_pool(job, &cache->pools[p]) || again;
    }
    return rc;
}

/* Ada-KV: see kern_rule.floor. */
static int share_by_count(const struct evict_job *job, int count) {
    struct cpu_cache *cache = job->cache;
    int heads = cache->heads_model, own = cache->options.heads_kv;
    struct share_part *parts = cache->parts + cache->options.layers;
    double floor = (double)job->due->rule->floor;
    int rc = cut_pools(job, count);
    if (!rc) each_stream(job, count_best);
    if (!rc) rc = evict_tell(job);
    for (int layer = 0; layer < count && !rc; layer++) {
        int64_t room = cache->pools[layer].places;
        double even = (double)room / heads;
        for (int i = 0; i < heads; i++) {
            const struct cpu_evict_fact *fact = evict_fact(job, layer, i);
            double weight = (1 - floor) * (double)fact->best + floor * even;
            parts[i] = (struct share_part){.weight = weight, .most = fact->length};
        }
        share_split(parts, heads, room);
        for (int i = 0; i < own; i++) {
            const struct share_part *part = &parts[cache->shard.first + i];
            CHECK(part->part >= 0 && part->part <= part->most);
            cache->evict[layer * own + i].keep = part->part;
        }
    }
    return rc;
}

/* Global gates: see kern_rule.floor. */
static int share_above_floor(const struct evict_job *job, int count) {
    struct cpu_cache *cache = job->cache;
    struct cpu_evict_pool *pool = cache->pools;
    int64_t streams = (int64_t)cache->options.layers * cache->heads_model;
    int64_t least = (int64_t)(job->due->rule->floor * (float)pool->keep / (float)streams);
    pool->places -= least * streams;
    pool->keep = pool->places;
    int rc = cut_pools(job, count);
    if (!rc) each_stream(job, count_best);
    for (int i = 0; i < cache->streams && !rc; i++) {
        int64_t places = cache->evict[i].best + least;
        int32_t length = *cpu_cache_length(cache, job->due->slot, i);
        cache->evict[i].keep = places < length ? places : length;
    }
    return rc;
}

/* Finds the cuts of pools, then those of streams that have places of their own. */
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
    CHECK(plan->lead <= plan->kept);
}

/* For a stream with classes: the lowest-ranking entry that may join one, and the number of
 * members. */
static void plan_classes(void *arg, int stream, int worker) {
    (void)worker;
    const struct evict_job *job = arg;
    const struct cpu_cache *cache = job->cache;
    struct cpu_evict_stream *plan = &cache->evict[stream];
    plan->merged = own_cut(job, stream, stream + 1,
                           plan->kept + kern_members_max(job->due->rule, job->due->keep));
    plan->members = *cpu_cache_length(cache, job->due->slot, cache->streams + stream);
}

/* Upper bound of the members after the eviction; they are written where entries are evicted. */
static int32_t members_most(const struct evict_job *job, int stream) {
    const struct cpu_cache *cache = job->cache;
    const struct cpu_evict_stream *plan = &cache->evict[stream];
    int64_t most = kern_members_max(job->due->rule, job->due->keep);
    int64_t all = (int64_t)plan->members + *cpu_cache_length(cache, job->due->slot, stream);
    if (all - plan->kept < most) most = all - plan->kept;
    return most > plan->members ? (int32_t)most : plan->members;
}

static bool writes_members(const struct evict_job *job, int stream) {
    const struct cpu_evict_stream *plan = &job->cache->evict[stream];
    return cpu_rule_classes(job->due->rule) &&
           plan->kept < *cpu_cache_length(job->cache, job->due->slot, stream);
}

static bool remembers(const struct kern_rule *rule) {
    return cpu_rule_window(rule) > 0 && rule->observe.history != KERN_HISTORY_NONE;
}

/* Pages [from, to) of a stream that the eviction writes: pages behind the first gap; all kept pages
 * where entries remember their score; all pages where entries merge. */
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

/* Eviction writes in place, so pages shared with a fork are copied first. */
static int own_pages(const struct evict_job *job) {
    struct cpu_cache *cache = job->cache;
    int64_t need = 0;
    int32_t from, to;
    for (int stream = 0; stream < cache->streams; stream++) {
        const uint32_t *table = cpu_cache_table(cache, job->due->slot, stream);
        written_pages(job, stream, &from, &to);
        for (int32_t i = from; i < to; i++) need += cache->refs[table[i]] > 1;
        if (writes_members(job, stream))
            need += cpu_cache_lacks(cache, job->due->slot, cache->streams + stream,
                                    members_most(job, stream));
    }
    int64_t free_before = cache->free_count;
    int rc = cache->comm->ops->agree(cache->comm, need > free_before ? ERR_FULL : 0);
    if (rc) return rc;
    for (int stream = 0; stream < cache->streams; stream++) {
        uint32_t *table = cpu_cache_table(cache, job->due->slot, stream);
        written_pages(job, stream, &from, &to);
        for (int32_t i = from; i < to; i++) cpu_cache_own_page(cache, &table[i]);
        if (writes_members(job, stream))
            cpu_cache_extend(cache, job->due->slot, cache->streams + stream,
                             members_most(job, stream));
    }
    CHECK(free_before - cache->free_count == need);
    return 0;
}

/* Stores the new score of entry `from` at its new place `to`; recent entries have no score yet. */
static void remember(const struct evict_job *job, int stream, const uint32_t *table, int32_t to,
                     int32_t from) {
    const struct cpu_cache *cache = job->cache;
    const struct cpu_evict_stream *plan = &cache->evict[stream];
    if (from >= plan->candidates) return;
    cpu_cache_score(cache, table[to / cache->page_slots])[to % cache->page_slots] =
        cache->fresh[plan->first + (size_t)from];
}

/* Moves front to back: the destination never overtakes the source. */
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

/* Assigns each stream its first key; returns the number of entries. */
static size_t place_keys(struct cpu_cache *cache, int slot) {
    size_t total = 0;
    for (int stream = 0; stream < cache->streams; stream++) {
        cache->evict[stream].first = total;
        total += (size_t)*cpu_cache_length(cache, slot, stream);
    }
    cache->evict[cache->streams].first = total;
    CHECK(total <= (size_t)cache->options.pages * (size_t)cache->page_slots);
    return total;
}

/* Decides without writing: the rest of the eviction happens completely or, for lack of pages, not
 * at all. */
static int choose(const struct evict_job *job) {
    int rc = 0;
    each_stream(job, evict_count_stream);
    each_stream(job, evict_score_stream);
    if (job->due->rule->layers != KERN_LAYERS_UNIFORM) rc = evict_measure(job, each_stream);
    if (!rc) rc = evict_share(job);
    if (!rc) rc = cut_streams(job);
    if (!rc) each_stream(job, count_stream);
    if (!rc && cpu_rule_classes(job->due->rule)) each_stream(job, plan_classes);
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
    if (cpu_rule_classes(due->rule))
        each_stream(&job, evict_join_stream);
    else if (due->rule->merge != KERN_MERGE_NONE)
        each_stream(&job, evict_merge_stream);
    each_stream(&job, move_stream);
    for (int stream = 0; stream < cache->streams; stream++) {
        if (writes_members(&job, stream))
            cpu_cache_shorten(cache, due->slot, cache->streams + stream,
                              cache->evict[stream].members);
        cpu_cache_shorten(cache, due->slot, stream, cache->evict[stream].kept);
        kept += (size_t)cache->evict[stream].kept;
    }
    CHECK(kept <= total && (!due->trace || due->trace->entries == total - kept));
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
