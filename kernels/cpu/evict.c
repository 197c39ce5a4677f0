/* Eviction of one sequence: score every entry, find the lowest rank that is kept, close the gaps.
 *
 * Scores become uint32 keys in the same order, so that the cut is found by radix select: three
 * passes over the keys whatever their values, and ties that cross the cut are broken by a second
 * select on positions. Scoring and moving run stream by stream and may run in parallel; what is
 * kept does not depend on the schedule. */
#include <math.h>

#include "base/check.h"
#include "kernels/cpu/cache.h"
#include "kernels/score.h"

#define KEY_PROTECTED UINT32_MAX /* above every score; no float has this key */

struct job {
    struct cpu_cache *cache;
    const struct kern_evict *due;
};

static void each_stream(struct job *job, void (*fn)(void *arg, int stream)) {
    struct cpu_cache *cache = job->cache;
    if (cache->parallel) {
        cache->parallel(cache->parallel_ctx, cache->streams, fn, job);
        return;
    }
    for (int stream = 0; stream < cache->streams; stream++) fn(job, stream);
}

/* ---- Keys ----------------------------------------------------------------------------------- */

/* Order-preserving: a < b as floats exactly if key(a) < key(b). NaN, which only a broken model
 * gives, ranks lowest. A score is never -0, being a sum of which one term is not. */
static uint32_t float_key(float score) {
    if (isnan(score)) return 0;
    uint32_t bits;
    memcpy(&bits, &score, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

static uint32_t entry_key(const struct kern_evict *due, int32_t pos, float log_beta) {
    const struct kern_rule *rule = due->rule;
    if (pos < rule->sinks || pos >= due->tokens - rule->recent) return KEY_PROTECTED;
    if (rule->score == KERN_SCORE_RECENCY) return (uint32_t)pos;
    return float_key(score_retention(log_beta, due->tokens - pos, rule->horizon));
}

static void score_stream(void *arg, int stream) {
    const struct job *job = arg;
    const struct cpu_cache *cache = job->cache;
    const uint32_t *table = cpu_cache_table(cache, job->due->slot, stream);
    int32_t length = *cpu_cache_length(cache, job->due->slot, stream);
    uint32_t *keys = cache->keys + cache->evict[stream].first;
    for (int32_t i = 0; i < length; i += cache->page_slots) {
        const int32_t *pos = cpu_cache_pos(cache, *table);
        const float *log_beta = cpu_cache_log_beta(cache, *table++);
        int32_t count = length - i < cache->page_slots ? length - i : cache->page_slots;
        for (int32_t j = 0; j < count; j++) keys[i + j] = entry_key(job->due, pos[j], log_beta[j]);
    }
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
static void collect_ties(const struct job *job, int from, int to, uint32_t key, uint32_t *ties) {
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
static int tied_stream(const struct job *job, int from, uint32_t key, int32_t pos, size_t wanted) {
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
static struct cpu_evict_cut find_cut(const struct job *job, int from, int to, size_t keep) {
    const struct cpu_cache *cache = job->cache;
    size_t first = cache->evict[from].first, count = cache->evict[to].first - first;
    if (keep >= count) return (struct cpu_evict_cut){.key = 0, .pos = 0, .stream = to};
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

static void cut_stream(void *arg, int stream) {
    const struct job *job = arg;
    job->cache->evict[stream].cut = find_cut(job, stream, stream + 1, (size_t)job->due->keep);
}

static void cut_sequence(const struct job *job) {
    const struct cpu_cache *cache = job->cache;
    size_t keep = (size_t)cache->streams * (size_t)job->due->keep;
    struct cpu_evict_cut cut = find_cut(job, 0, cache->streams, keep);
    for (int stream = 0; stream < cache->streams; stream++) cache->evict[stream].cut = cut;
}

/* Most entries are judged by their key alone; only ties look at the page. */
static bool is_kept(const struct job *job, int stream, const uint32_t *table, int32_t index) {
    const struct cpu_evict_stream *plan = &job->cache->evict[stream];
    uint32_t key = job->cache->keys[plan->first + (size_t)index];
    if (key != plan->cut.key) return key > plan->cut.key;
    int32_t pos = cpu_cache_entry_pos(job->cache, table, index);
    if (pos != plan->cut.pos) return pos > plan->cut.pos;
    return stream <= plan->cut.stream;
}

/* ---- Compaction ----------------------------------------------------------------------------- */

static void count_stream(void *arg, int stream) {
    const struct job *job = arg;
    struct cpu_evict_stream *plan = &job->cache->evict[stream];
    const uint32_t *table = cpu_cache_table(job->cache, job->due->slot, stream);
    int32_t length = *cpu_cache_length(job->cache, job->due->slot, stream);
    plan->kept = 0;
    plan->lead = length;
    for (int32_t i = 0; i < length; i++) {
        if (is_kept(job, stream, table, i))
            plan->kept++;
        else if (plan->lead == length)
            plan->lead = i;
    }
}

/* Pages [from, to) of a stream are written when its gaps close. */
static void written_pages(const struct cpu_cache *cache, int stream, int32_t *from, int32_t *to) {
    const struct cpu_evict_stream *plan = &cache->evict[stream];
    *from = plan->lead / cache->page_slots;
    *to = plan->lead < plan->kept ? cpu_cache_pages_for(cache, plan->kept) : *from;
}

/* Compaction writes in place, so pages shared with a fork become private first. */
static int own_pages(const struct job *job) {
    struct cpu_cache *cache = job->cache;
    int64_t need = 0;
    int32_t from, to;
    for (int stream = 0; stream < cache->streams; stream++) {
        const uint32_t *table = cpu_cache_table(cache, job->due->slot, stream);
        written_pages(cache, stream, &from, &to);
        for (int32_t i = from; i < to; i++) need += cache->refs[table[i]] > 1;
    }
    if (need == 0) return 0;
    if (need > cache->free_count) return ERR_FULL;
    for (int stream = 0; stream < cache->streams; stream++) {
        uint32_t *table = cpu_cache_table(cache, job->due->slot, stream);
        written_pages(cache, stream, &from, &to);
        for (int32_t i = from; i < to; i++) cpu_cache_own_page(cache, &table[i]);
    }
    return 0;
}

/* Front to back: the destination never overtakes the source. */
static void move_stream(void *arg, int stream) {
    const struct job *job = arg;
    struct cpu_cache *cache = job->cache;
    const struct cpu_evict_stream *plan = &cache->evict[stream];
    const uint32_t *table = cpu_cache_table(cache, job->due->slot, stream);
    int32_t to = plan->lead, slots = cache->page_slots;
    for (int32_t from = to + 1; to < plan->kept; from++) {
        if (!is_kept(job, stream, table, from)) continue;
        cpu_cache_move_entry(cache, table[to / slots], to % slots, table[from / slots],
                             from % slots);
        to++;
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

static int evict_slot(struct cpu_cache *cache, const struct kern_evict *due) {
    CHECK(due->slot >= 0 && due->slot < cache->options.slots && due->keep > 0);
    struct job job = {.cache = cache, .due = due};
    size_t total = place_keys(cache, due->slot), kept = 0;
    each_stream(&job, score_stream);
    if (due->rule->pool == KERN_POOL_STREAM)
        each_stream(&job, cut_stream);
    else
        cut_sequence(&job);
    each_stream(&job, count_stream);
    int rc = own_pages(&job);
    if (rc < 0) return rc;
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
