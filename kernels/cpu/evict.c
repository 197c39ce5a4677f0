/* Eviction of one sequence: score every entry, share the total, find the lowest rank that is kept,
 * merge, close the gaps.
 *
 * Scores are uint32 keys in the same order, so that the cut is found by radix select: three passes
 * over the keys whatever their values, and ties that cross the cut are broken by a second select on
 * positions. All but the shares runs stream by stream and may run in parallel; what is kept does
 * not depend on the schedule. */
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

/* ---- The cut -------------------------------------------------------------------------------- */

struct selected {
    uint32_t value;
    size_t equal;  /* how many values equal it */
    size_t wanted; /* how many of those belong to the `rank` largest; the rest is larger */
};

/* The rank-th largest value, 1 <= rank <= count: from the top 11 bits down, each pass narrows the
 * candidates to one of 2,048 bins. */
static struct selected select_largest(const uint32_t *values, size_t count, size_t rank) {
    static const struct { int shift, bits; } passes[] = {{21, 11}, {10, 11}, {0, 10}};
    struct selected out = {.value = 0, .equal = count, .wanted = rank};
    uint32_t decided = 0; /* mask of the bits of `value` that are final */
    for (int pass = 0; pass < 3; pass++) {
        uint32_t bins[2048] = {0}, mask = (1u << passes[pass].bits) - 1;
        int shift = passes[pass].shift;
        for (size_t i = 0; i < count; i++)
            if ((values[i] & decided) == out.value) bins[values[i] >> shift & mask]++;
        uint32_t bin = mask;
        while (bins[bin] < out.wanted) out.wanted -= bins[bin--];
        out.value |= bin << shift;
        out.equal = bins[bin];
        decided |= mask << shift;
    }
    return out;
}

/* The positions of all entries with this key in streams [from, to). */
static void collect_ties(const struct evict_job *job, int from, int to, uint32_t key,
                         uint32_t *ties) {
    const struct cpu_cache *cache = job->cache;
    for (int stream = from; stream < to; stream++) {
        const uint32_t *table = cpu_cache_table(cache, job->due->slot, stream);
        const uint32_t *keys = cache->keys + cache->evict[stream].first;
        int32_t length = *cpu_cache_length(cache, job->due->slot, stream);
        for (int32_t i = 0; i < length; i++)
            if (keys[i] == key) *ties++ = (uint32_t)cpu_cache_entry_pos(cache, table, i);
    }
}

/* The stream of the wanted-th entry, 1 being the first, with this key at this position. A position
 * occurs at most once in a stream. */
static int tied_stream(const struct evict_job *job, int from, uint32_t key, int32_t pos,
                       size_t wanted) {
    const struct cpu_cache *cache = job->cache;
    for (int stream = from;; stream++) {
        CHECK(stream < cache->streams);
        const uint32_t *table = cpu_cache_table(cache, job->due->slot, stream);
        const uint32_t *keys = cache->keys + cache->evict[stream].first;
        int32_t length = *cpu_cache_length(cache, job->due->slot, stream);
        for (int32_t i = 0; i < length; i++)
            if (keys[i] == key && cpu_cache_entry_pos(cache, table, i) == pos && --wanted == 0)
                return stream;
    }
}

/* The lowest rank among the `keep` highest of streams [from, to), which compete. */
static struct cpu_evict_cut find_cut(const struct evict_job *job, int from, int to, size_t keep) {
    const struct cpu_cache *cache = job->cache;
    size_t first = cache->evict[from].first, count = cache->evict[to].first - first;
    if (keep >= count) return (struct cpu_evict_cut){.key = 0, .pos = 0, .stream = to};
    if (keep == 0) return (struct cpu_evict_cut){.key = UINT32_MAX, .pos = INT32_MAX, .stream = -1};
    struct selected key = select_largest(cache->keys + first, count, keep);
    if (key.equal == key.wanted)
        return (struct cpu_evict_cut){.key = key.value, .pos = 0, .stream = to};
    uint32_t *ties = cache->ties + first;
    collect_ties(job, from, to, key.value, ties);
    struct selected pos = select_largest(ties, key.equal, key.wanted);
    return (struct cpu_evict_cut){
        .key = key.value,
        .pos = (int32_t)pos.value,
        .stream = tied_stream(job, from, key.value, (int32_t)pos.value, pos.wanted),
    };
}

/* Most entries are judged by their key alone; only ties look at the page. */
static bool is_above(const struct evict_job *job, int stream, const uint32_t *table,
                     int32_t index) {
    const struct cpu_evict_stream *plan = &job->cache->evict[stream];
    uint32_t key = job->cache->keys[plan->first + (size_t)index];
    if (key != plan->cut.key) return key > plan->cut.key;
    int32_t pos = cpu_cache_entry_pos(job->cache, table, index);
    if (pos != plan->cut.pos) return pos > plan->cut.pos;
    return stream <= plan->cut.stream;
}

bool evict_keeps(const struct evict_job *job, int stream, const uint32_t *table, int32_t index) {
    size_t at = job->cache->evict[stream].first + (size_t)index;
    return job->cache->keys[at] >= job->least && is_above(job, stream, table, index);
}

/* ---- Pools ---------------------------------------------------------------------------------- */

static void cut_stream(void *arg, int stream, int worker) {
    (void)worker;
    const struct evict_job *job = arg;
    struct cpu_evict_stream *plan = &job->cache->evict[stream];
    plan->cut = find_cut(job, stream, stream + 1, (size_t)plan->keep);
}

static void cut_pool(const struct evict_job *job, int from, int to, int64_t keep) {
    struct cpu_evict_cut cut = find_cut(job, from, to, (size_t)keep);
    for (int stream = from; stream < to; stream++) job->cache->evict[stream].cut = cut;
}

/* A stream's entries among the best of its pool. */
static int64_t count_best(const struct evict_job *job, int stream) {
    const uint32_t *table = cpu_cache_table(job->cache, job->due->slot, stream);
    int32_t length = *cpu_cache_length(job->cache, job->due->slot, stream);
    int64_t count = 0;
    for (int32_t i = 0; i < length; i++) count += is_above(job, stream, table, i);
    return count;
}

/* Ada-KV: see kern_rule.floor. */
static void share_by_count(const struct evict_job *job, int from, int to, int64_t room) {
    struct cpu_cache *cache = job->cache;
    struct cpu_share_part *parts = cache->parts + cache->options.layers;
    double floor = (double)job->due->rule->floor, even = (double)room / (to - from);
    cut_pool(job, from, to, room);
    for (int i = from; i < to; i++)
        parts[i - from] = (struct cpu_share_part){
            .weight = (1 - floor) * (double)count_best(job, i) + floor * even,
            .most = *cpu_cache_length(cache, job->due->slot, i)};
    share_split(parts, to - from, room);
    for (int i = from; i < to; i++) cache->evict[i].keep = parts[i - from].part;
}

/* Global gates: see kern_rule.floor. */
static void share_above_floor(const struct evict_job *job, int from, int to, int64_t room) {
    const struct cpu_cache *cache = job->cache;
    int64_t streams = to - from;
    int64_t least = (int64_t)(job->due->rule->floor * (float)room / (float)streams);
    cut_pool(job, from, to, room - least * streams);
    for (int i = from; i < to; i++) {
        int64_t places = count_best(job, i) + least;
        int32_t length = *cpu_cache_length(cache, job->due->slot, i);
        cache->evict[i].keep = places < length ? places : length;
    }
}

/* Streams [from, to) compete for evict[from].keep places, of which each has some for itself. */
static void share_pool(const struct evict_job *job, int from, int to) {
    const struct kern_rule *rule = job->due->rule;
    int64_t room = job->cache->evict[from].keep;
    if (rule->floor <= 0)
        cut_pool(job, from, to, room);
    else if (rule->pool == KERN_POOL_LAYER)
        share_by_count(job, from, to, room);
    else
        share_above_floor(job, from, to, room);
}

static void cut_streams(const struct evict_job *job) {
    const struct kern_rule *rule = job->due->rule;
    int streams = job->cache->streams, heads = job->cache->options.heads_kv;
    int size = rule->pool == KERN_POOL_SEQUENCE ? streams : heads;
    for (int from = 0; from < streams && rule->pool != KERN_POOL_STREAM; from += size)
        share_pool(job, from, from + size);
    if (rule->pool == KERN_POOL_STREAM || rule->floor > 0) each_stream(job, cut_stream);
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
    if (need == 0) return 0;
    if (need > cache->free_count) return ERR_FULL;
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
static void choose(const struct evict_job *job) {
    each_stream(job, evict_count_stream);
    each_stream(job, evict_score_stream);
    if (job->due->rule->layers != KERN_LAYERS_UNIFORM) evict_measure(job, each_stream);
    evict_share(job);
    cut_streams(job);
    each_stream(job, count_stream);
}

static int evict_slot(struct cpu_cache *cache, const struct kern_evict *due) {
    CHECK(due->slot >= 0 && due->slot < cache->options.slots && due->keep > 0);
    struct evict_job job = {.cache = cache, .due = due};
    if (due->rule->score == KERN_SCORE_RETENTION && due->rule->retain > 0)
        job.least = evict_key(logf(due->rule->retain));
    size_t total = place_keys(cache, due->slot), kept = 0;
    choose(&job);
    int rc = own_pages(&job);
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
