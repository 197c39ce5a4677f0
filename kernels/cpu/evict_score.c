/* Scores of a stream's entries as keys: the first half of an eviction. */
#include <math.h>

#include "kernels/cpu/evict.h"
#include "kernels/score.h"

/* Adding 0 turns -0 into 0. */
uint32_t evict_key(float score) {
    if (isnan(score)) return EVICT_KEY_LEAST;
    uint32_t bits;
    score += 0.0f;
    memcpy(&bits, &score, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

static bool is_protected(const struct evict_job *job, int32_t pos) {
    const struct kern_rule *rule = job->due->rule;
    return pos < rule->sinks || pos >= job->due->tokens - rule->recent;
}

/* Entries of the stream up to this position have expired (struct kern_evict); -1: none. */
static int32_t expired_up_to(const struct evict_job *job, int stream) {
    const struct cpu_cache *cache = job->cache;
    int visible = cache->attended[cache->layer_of[stream]].sliding_window;
    bool merges = job->due->rule->merge != KERN_MERGE_NONE;
    return visible > 0 && !merges && job->due->tokens >= visible ? job->due->tokens - visible : -1;
}

/* ---- Recency and retention ---- */

static uint32_t entry_key(const struct evict_job *job, int32_t pos, float log_beta) {
    const struct kern_rule *rule = job->due->rule;
    if (rule->score == KERN_SCORE_RECENCY) return EVICT_KEY_LEAST + (uint32_t)pos;
    int32_t age = job->due->tokens - pos;
    return evict_key(rule->published ? score_published(log_beta, age, rule->horizon)
                                     : score_retention(log_beta, age, rule->horizon));
}

/* ---- Attention ---- */

/* Reads the remembered scores of the candidates. */
static void read_scores(const struct evict_job *job, const struct cpu_stream *view, int32_t count,
                        float *out) {
    int32_t slots = view->layer->page_slots;
    for (int32_t i = 0; i < count; i += slots) {
        int32_t n = count - i < slots ? count - i : slots;
        memcpy(out + i, cpu_cache_score(job->cache, view->pages[i / slots]),
               (size_t)n * sizeof *out);
    }
}

static void divide_by_most(float *x, int32_t count) {
    float most = 0;
    for (int32_t i = 0; i < count; i++) most = x[i] > most ? x[i] : most;
    for (int32_t i = 0; i < count && most > 0; i++) x[i] /= most;
}

void evict_remember(const struct kern_observe *observe, const float *past, float *now,
                    int32_t count) {
    float decay = observe->decay;
    if (observe->normalise) divide_by_most(now, count);
    if (observe->history == KERN_HISTORY_NONE) return;
    for (int32_t i = 0; i < count; i++) {
        float new_entry = observe->history == KERN_HISTORY_SUM ? 0 : now[i];
        float old = past[i] < 0 ? new_entry : past[i];
        if (observe->history == KERN_HISTORY_MAX)
            now[i] = decay * old > now[i] ? decay * old : now[i];
        else if (observe->history == KERN_HISTORY_MEAN)
            now[i] = decay * old + (1 - decay) * now[i];
        else
            now[i] = decay * old + now[i];
    }
}

/* local[count] <- the larger of itself and the attention of all queries, scaled to the same sum. */
static void align_global(const float *global, float *local, int32_t count) {
    double sum_local = 0, sum_global = 0;
    for (int32_t i = 0; i < count; i++) {
        sum_local += (double)local[i];
        sum_global += (double)global[i];
    }
    if (!(sum_global > 0)) return;
    float scale = (float)(sum_local / sum_global);
    for (int32_t i = 0; i < count; i++)
        local[i] = global[i] * scale > local[i] ? global[i] * scale : local[i];
}

/* Scores of the candidates -> out; `fresh`: the scores they will remember. */
static void judge(const struct evict_job *job, int stream, struct cpu_work *work, float *fresh,
                  float *out) {
    const struct kern_rule *rule = job->due->rule;
    const struct kern_observe *observe = &rule->observe;
    struct cpu_stream view = evict_stream(job, stream);
    int32_t count = job->cache->evict[stream].candidates;
    int32_t sinks = job->cache->evict[stream].fixed - (view.length - count);
    if (observe->expect > 0) {
        evict_expect(job, stream, sinks, count, work, fresh);
        memcpy(out, fresh, (size_t)count * sizeof *out);
        return;
    }
    if (observe->window > 0)
        evict_observe(job, stream, count, work, fresh);
    else
        read_scores(job, &view, count, fresh);
    read_scores(job, &view, count, work->smooth);
    if (observe->global) align_global(work->smooth, fresh, count);
    evict_remember(observe, work->smooth, fresh, count);
    if (observe->smooth != KERN_SMOOTH_NONE && !observe->smooth_first)
        evict_smooth(observe, fresh, count, out);
    else
        memcpy(out, fresh, (size_t)count * sizeof *out);
    if (!rule->redundancy.on || count == 0) return;
    float lambda = rule->redundancy.lambda, *redundancy = work->squares;
    if (rule->redundancy.measure == KERN_MEASURE_LAG)
        evict_lag(job->cache, rule->redundancy.lag, &view, sinks, count, work, redundancy);
    else
        evict_redundancy(job->cache, &rule->redundancy, &view, count, work, redundancy);
    for (int32_t i = 0; i < count; i++) out[i] = lambda * out[i] - (1 - lambda) * redundancy[i];
}

/* ---- A stream ---- */

static int32_t count_candidates(const struct evict_job *job, const struct cpu_stream *view) {
    int32_t limit = job->due->tokens - job->due->rule->recent, count = view->length;
    while (count > 0 && cpu_cache_entry_pos(job->cache, view, count - 1) >= limit) count--;
    return count;
}

void evict_count_stream(void *arg, int stream, int worker) {
    (void)worker;
    const struct evict_job *job = arg;
    struct cpu_stream view = evict_stream(job, stream);
    struct cpu_evict_stream *plan = &job->cache->evict[stream];
    int32_t candidates = count_candidates(job, &view), sinks = 0;
    while (sinks < candidates &&
           cpu_cache_entry_pos(job->cache, &view, sinks) < job->due->rule->sinks)
        sinks++;
    plan->candidates = candidates;
    plan->fixed = sinks + view.length - candidates;
}

void evict_score_stream(void *arg, int stream, int worker) {
    const struct evict_job *job = arg;
    const struct cpu_cache *cache = job->cache;
    const struct cpu_evict_stream *plan = &cache->evict[stream];
    struct cpu_stream view = evict_stream(job, stream);
    uint32_t *keys = cache->keys + plan->first;
    const int32_t expired = expired_up_to(job, stream), slots = view.layer->page_slots;
    float *scores = NULL;
    if (job->due->rule->score == KERN_SCORE_ATTENTION) {
        struct cpu_work work = cpu_cache_work(cache, worker);
        scores = work.sum;
        judge(job, stream, &work, cache->fresh + plan->first, scores);
    }
    for (int32_t i = 0; i < view.length; i++) {
        uint32_t page = view.pages[i / slots];
        int32_t at = i % slots, pos = cpu_cache_pos(cache, page)[at];
        if (pos <= expired)
            keys[i] = EVICT_KEY_EXPIRED;
        else if (is_protected(job, pos))
            keys[i] = EVICT_KEY_PROTECTED;
        else
            keys[i] = scores ? evict_key(scores[i])
                             : entry_key(job, pos, cpu_cache_log_beta(cache, page)[at]);
    }
}
