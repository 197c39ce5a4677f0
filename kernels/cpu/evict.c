/* Eviction of one sequence, in stages: score every entry, split the total, find the lowest-ranking
 * entry that is kept, merge, compact.
 *
 * Scores are uint32 keys in the same order. Every rank makes the decisions that concern several
 * ranks by itself, from the same numbers (evict_tell, cutoff.c). Except for the split, every stage
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

/* ---- Scopes ---- */

/* The cutoff of streams of this rank alone; no other rank is involved. */
static struct cpu_evict_cutoff own_cutoff(const struct evict_job *job, int from, int to,
                                          int64_t allotment) {
    const struct cpu_evict_stream *plan = job->cache->evict;
    struct cpu_evict_scope scope = {.from = from, .to = to, .allotment = allotment};
    uint32_t bins[CPU_EVICT_BINS];
    scope.held = (int64_t)(plan[to].first - plan[from].first);
    const struct evict_search search = {
        .job = job, .comm = &comm_none, .counts = true, .scopes = &scope, .count = 1, .bins = bins};
    (void)evict_find_cutoffs(&search); /* only communicators fail */
    return scope.cutoff;
}

static void find_stream_cutoff(void *arg, int stream, int worker) {
    (void)worker;
    const struct evict_job *job = arg;
    struct cpu_evict_stream *plan = &job->cache->evict[stream];
    plan->cutoff = own_cutoff(job, stream, stream + 1, plan->allotment);
}

/* One scope per layer, or one for the sequence; evict_allot has set their totals. */
static int open_scopes(const struct evict_job *job) {
    const struct cpu_cache *cache = job->cache;
    int layers = cache->options.layers;
    bool all = job->due->rule->scope == KERN_SCOPE_SEQUENCE;
    int count = all ? 1 : layers, size = all ? layers : 1;
    for (int p = 0; p < count; p++) {
        struct cpu_evict_scope *scope = &cache->scopes[p];
        const struct cpu_layer *first = &cache->layers[(ptrdiff_t)p * size],
                               *last = first + size - 1;
        *scope = (struct cpu_evict_scope){.from = first->first,
                                          .to = last->first + last->heads_kv,
                                          .first_layer = p * size,
                                          .layers = size,
                                          .total = scope->total,
                                          .allotment = scope->total};
        for (int layer = p * size; layer < (p + 1) * size; layer++)
            for (int head = 0; head < cache->layers[layer].heads_model; head++)
                scope->held += evict_fact(job, layer, head)->length;
    }
    return count;
}

/* Counts the stream's entries above the cutoff of its scope. */
static void count_best(void *arg, int stream, int worker) {
    (void)worker;
    const struct evict_job *job = arg;
    int32_t length = *cpu_cache_length(job->cache, job->due->slot, stream);
    int64_t count = 0;
    for (int32_t i = 0; i < length; i++)
        count += evict_reaches(job, stream, &job->cache->evict[stream].cutoff, i);
    job->cache->evict[stream].best = count;
}

/* The lowest rank that has this rank's heads of a layer: it alone reports them. */
static int own_rank(const struct cpu_cache *cache, int layer) {
    const struct cpu_layer *l = &cache->layers[layer];
    return shard_owner(cache->comm->ranks, l->heads_model, l->shard.first);
}

/* Entries of a scope on each rank, from the facts of all ranks. */
struct rank_part {
    int64_t kept, held, fixed;
};

static void rank_parts(const struct evict_job *job, const struct cpu_evict_scope *scope,
                       struct rank_part parts[COMM_RANKS_MAX]) {
    const struct cpu_cache *cache = job->cache;
    memset(parts, 0, COMM_RANKS_MAX * sizeof *parts);
    for (int i = 0; i < scope->layers; i++) {
        const int layer = scope->first_layer + i, heads = cache->layers[layer].heads_model;
        for (int head = 0; head < heads; head++) {
            const struct cpu_evict_fact *fact = evict_fact(job, layer, head);
            struct rank_part *part = &parts[shard_owner(cache->comm->ranks, heads, head)];
            part->kept += fact->best;
            part->held += fact->length;
            part->fixed += fact->fixed;
        }
    }
}

/* Ranks above the scope's limit keep `limit` of their own entries; the remaining ranks compete for
 * the rest of the allotment. Returns true if another rank was capped. */
static bool cap_scope(const struct evict_job *job, struct cpu_evict_scope *scope) {
    struct cpu_cache *cache = job->cache;
    int ranks = cache->comm->ranks, heads = cache->layers[scope->first_layer].heads_model;
    int sharing = ranks < heads ? ranks : heads;
    struct rank_part parts[COMM_RANKS_MAX];
    uint32_t before = scope->capped;
    rank_parts(job, scope, parts);
    scope->limit = (int64_t)((double)cache->options.rank_cap * (double)scope->total / sharing);
    for (int r = 0; r < ranks; r++)
        if (parts[r].fixed > scope->limit) scope->limit = parts[r].fixed;
    for (int r = 0; r < ranks; r++) {
        if (scope->capped >> r & 1 || parts[r].kept <= scope->limit) continue;
        scope->capped |= 1u << r;
        scope->allotment -= scope->limit;
        scope->held -= parts[r].held;
    }
    CHECK(scope->allotment >= 0 && scope->held >= 0);
    if (before == 0 && scope->capped != 0) cache->rank_cap_hits++;
    return scope->capped != before;
}

static void note_cutoffs(const struct evict_job *job, int count) {
    struct cpu_cache *cache = job->cache;
    for (int p = 0; p < count; p++) {
        const struct cpu_evict_scope *scope = &cache->scopes[p];
        struct cpu_evict_cutoff cutoff = scope->cutoff;
        if (scope->capped >> own_rank(cache, scope->first_layer) & 1)
            cutoff = own_cutoff(job, scope->from, scope->to, scope->limit);
        for (int stream = scope->from; stream < scope->to; stream++)
            cache->evict[stream].cutoff = cutoff;
    }
}

/* With a cap, repeats the search without the ranks that have reached it, until no rank exceeds it.
 * Every round caps at least one more rank, so there are at most as many rounds as ranks. */
static int find_scope_cutoffs(const struct evict_job *job, int count) {
    struct cpu_cache *cache = job->cache;
    const struct evict_search search = {.job = job,
                                        .comm = cache->comm,
                                        .own = 1u << own_rank(cache, 0),
                                        .scopes = cache->scopes,
                                        .count = count,
                                        .bins = cache->bins};
    bool again = true;
    int rc = 0;
    while (again && !rc) {
        rc = evict_find_cutoffs(&search);
        if (rc) break;
        note_cutoffs(job, count);
        again = false;
        if (cache->options.rank_cap <= 0 || cache->comm->ranks == 1) break;
        each_stream(job, count_best);
        rc = evict_tell(job);
        for (int p = 0; p < count && !rc; p++) again = cap_scope(job, &cache->scopes[p]) || again;
    }
    return rc;
}

/* Ada-KV: see kern_rule.floor. */
static int allot_by_count(const struct evict_job *job, int count) {
    struct cpu_cache *cache = job->cache;
    struct allot_part *parts = cache->parts + cache->options.layers;
    int64_t floor = rule_floor(job->due->rule);
    int rc = find_scope_cutoffs(job, count);
    if (!rc) each_stream(job, count_best);
    if (!rc) rc = evict_tell(job);
    for (int layer = 0; layer < count && !rc; layer++) {
        const struct cpu_layer *l = &cache->layers[layer];
        const int heads = l->heads_model;
        int64_t room = cache->scopes[layer].total;
        for (int i = 0; i < heads; i++) {
            const struct cpu_evict_fact *fact = evict_fact(job, layer, i);
            int64_t weight = (RULE_FLOOR_PARTS - floor) * fact->best * heads + floor * room;
            parts[i] = (struct allot_part){.weight = (double)weight, .most = fact->length};
        }
        allot_split(parts, heads, room);
        for (int i = 0; i < l->heads_kv; i++) {
            const struct allot_part *part = &parts[l->shard.first + i];
            CHECK(part->part >= 0 && part->part <= part->most);
            cache->evict[l->first + i].allotment = part->part;
        }
    }
    return rc;
}

/* Global gates: see kern_rule.floor. */
static int allot_above_floor(const struct evict_job *job, int count) {
    struct cpu_cache *cache = job->cache;
    struct cpu_evict_scope *scope = cache->scopes;
    int64_t streams = cache->streams_model;
    int64_t least = rule_floor(job->due->rule) * scope->allotment / (RULE_FLOOR_PARTS * streams);
    scope->total -= least * streams;
    scope->allotment = scope->total;
    int rc = find_scope_cutoffs(job, count);
    if (!rc) each_stream(job, count_best);
    for (int i = 0; i < cache->streams && !rc; i++) {
        int64_t allotment = cache->evict[i].best + least;
        int32_t length = *cpu_cache_length(cache, job->due->slot, i);
        cache->evict[i].allotment = allotment < length ? allotment : length;
    }
    return rc;
}

/* Finds the cutoffs of scopes, then those of streams that have an allotment of their own. */
static int find_cutoffs(const struct evict_job *job) {
    const struct kern_rule *rule = job->due->rule;
    int rc = 0;
    if (rule->scope != KERN_SCOPE_STREAM) {
        int count = open_scopes(job);
        rc = rule->floor <= 0                  ? find_scope_cutoffs(job, count)
             : rule->scope == KERN_SCOPE_LAYER ? allot_by_count(job, count)
                                               : allot_above_floor(job, count);
    }
    if (!rc && (rule->scope == KERN_SCOPE_STREAM || rule->floor > 0))
        each_stream(job, find_stream_cutoff);
    return rc;
}

/* ---- Compaction ---- */

static void evict_count_kept(void *arg, int stream, int worker) {
    (void)worker;
    const struct evict_job *job = arg;
    struct cpu_evict_stream *plan = &job->cache->evict[stream];
    int32_t length = *cpu_cache_length(job->cache, job->due->slot, stream);
    plan->kept = 0;
    plan->lead = length;
    for (int32_t i = 0; i < length; i++) {
        if (evict_keeps(job, stream, i))
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
    plan->merged = own_cutoff(job, stream, stream + 1,
                              plan->kept + kern_members_max(job->due->rule, job->due->budget));
    plan->members = *cpu_cache_length(cache, job->due->slot, cache->streams + stream);
}

/* Upper bound of the members after the eviction; they are written where entries are evicted. */
static int32_t members_most(const struct evict_job *job, int stream) {
    const struct cpu_cache *cache = job->cache;
    const struct cpu_evict_stream *plan = &cache->evict[stream];
    int64_t most = kern_members_max(job->due->rule, job->due->budget);
    int64_t all = (int64_t)plan->members + *cpu_cache_length(cache, job->due->slot, stream);
    if (all - plan->kept < most) most = all - plan->kept;
    return most > plan->members ? (int32_t)most : plan->members;
}

static bool writes_members(const struct evict_job *job, int stream) {
    const struct cpu_evict_stream *plan = &job->cache->evict[stream];
    return rule_classes(job->due->rule) &&
           plan->kept < *cpu_cache_length(job->cache, job->due->slot, stream);
}

static bool remembers(const struct kern_rule *rule) {
    return rule_window(rule) > 0 && rule->observe.history != KERN_HISTORY_NONE;
}

/* Pages [from, to) of a stream that the eviction writes: pages behind the first gap; all kept pages
 * where entries remember their score; all pages where entries merge. */
static void evict_written_pages(const struct evict_job *job, int stream, int32_t *from,
                                int32_t *to) {
    const struct cpu_cache *cache = job->cache;
    const struct cpu_evict_stream *plan = &cache->evict[stream];
    const struct cpu_layer *layer = cpu_cache_layer(cache, stream);
    bool merges = job->due->rule->merge != KERN_MERGE_NONE,
         all = merges || remembers(job->due->rule);
    int32_t length = *cpu_cache_length(cache, job->due->slot, stream);
    *from = all ? 0 : plan->lead / layer->page_slots;
    *to = plan->lead < plan->kept || all ? cpu_cache_pages_for(layer, plan->kept) : *from;
    if (merges && plan->kept < length) *to = cpu_cache_pages_for(layer, length);
}

/* Eviction writes in place, so pages shared with a fork are copied first. */
static int evict_own_pages(const struct evict_job *job) {
    struct cpu_cache *cache = job->cache;
    int64_t need = 0;
    int32_t from, to;
    for (int stream = 0; stream < cache->streams; stream++) {
        const uint32_t *table = cpu_cache_table(cache, job->due->slot, stream);
        evict_written_pages(job, stream, &from, &to);
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
        evict_written_pages(job, stream, &from, &to);
        for (int32_t i = from; i < to; i++) cpu_cache_own_page(cache, &table[i]);
        if (writes_members(job, stream))
            cpu_cache_extend(cache, job->due->slot, cache->streams + stream,
                             members_most(job, stream));
    }
    CHECK(free_before - cache->free_count == need);
    return 0;
}

/* Stores the new score of entry `from` at its new place `to`; recent entries have no score yet. */
static void remember(const struct evict_job *job, int stream, const struct cpu_stream *view,
                     int32_t to, int32_t from) {
    const struct cpu_cache *cache = job->cache;
    const struct cpu_evict_stream *plan = &cache->evict[stream];
    const int32_t slots = view->layer->page_slots;
    if (from >= plan->candidates) return;
    cpu_cache_score(cache, view->pages[to / slots])[to % slots] =
        cache->fresh[plan->first + (size_t)from];
}

/* Moves front to back: the destination never overtakes the source. */
static void move_stream(void *arg, int stream, int worker) {
    (void)worker;
    const struct evict_job *job = arg;
    struct cpu_cache *cache = job->cache;
    const struct cpu_evict_stream *plan = &cache->evict[stream];
    const struct cpu_stream view = evict_stream(job, stream);
    bool history = remembers(job->due->rule);
    int32_t slots = view.layer->page_slots;
    for (int32_t i = 0; history && i < plan->lead; i++) remember(job, stream, &view, i, i);
    for (int32_t to = plan->lead, from = to + 1; to < plan->kept; from++) {
        if (!evict_keeps(job, stream, from)) continue;
        cpu_cache_move_entry(cache, view.layer, view.pages[to / slots], to % slots,
                             view.pages[from / slots], from % slots);
        if (history) remember(job, stream, &view, to, from);
        to++;
    }
}

/* ---- The trace ---- */

static void trace_stream(const struct evict_job *job, int stream) {
    struct kern_trace *trace = job->due->trace;
    const struct cpu_stream view = evict_stream(job, stream);
    trace->lengths[stream] = view.length - job->cache->evict[stream].kept;
    for (int32_t i = job->cache->evict[stream].lead; i < view.length; i++) {
        if (evict_keeps(job, stream, i)) continue;
        if (trace->entries < trace->entries_max)
            trace->positions[trace->entries] = cpu_cache_entry_pos(job->cache, &view, i);
        trace->entries++;
    }
}

/* ---- One sequence ---- */

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
static int evict_choose(const struct evict_job *job) {
    int rc = 0;
    each_stream(job, evict_count_stream);
    each_stream(job, evict_score_stream);
    if (job->due->rule->layers != KERN_LAYERS_UNIFORM) rc = evict_measure(job, each_stream);
    if (!rc) rc = evict_allot(job);
    if (!rc) rc = find_cutoffs(job);
    if (!rc) each_stream(job, evict_count_kept);
    if (!rc && rule_classes(job->due->rule)) each_stream(job, plan_classes);
    return rc;
}

static int evict_slot(struct cpu_cache *cache, const struct kern_evict *due) {
    CHECK(due->slot >= 0 && due->slot < cache->options.slots && due->budget > 0);
    struct evict_job job = {.cache = cache, .due = due, .least = EVICT_KEY_LEAST};
    if (due->rule->score == KERN_SCORE_RETENTION && due->rule->retain > 0)
        job.least = evict_key(logf(due->rule->retain));
    size_t total = place_keys(cache, due->slot), kept = 0;
    int rc = evict_choose(&job);
    if (!rc) rc = evict_own_pages(&job);
    if (rc < 0) return rc;
    cache->slots[due->slot].measured = true;
    if (due->trace) due->trace->entries = 0;
    for (int stream = 0; stream < cache->streams && due->trace; stream++)
        trace_stream(&job, stream);
    if (rule_classes(due->rule))
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

int cpu_cache_keep_best(struct cpu_cache *cache, const struct kern_evict *due, int32_t most) {
    const struct evict_job job = {.cache = cache, .due = due, .least = EVICT_KEY_EXPIRED};
    size_t total = place_keys(cache, due->slot), kept = 0;
    each_stream(&job, evict_score_stream);
    for (int stream = 0; stream < cache->streams; stream++) {
        int32_t length = *cpu_cache_length(cache, due->slot, stream);
        cache->evict[stream].allotment = length < most ? length : most;
    }
    each_stream(&job, find_stream_cutoff);
    each_stream(&job, evict_count_kept);
    int rc = evict_own_pages(&job);
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
