/* The stages of an eviction, in the order they run. Each processes one stream, so streams can run
 * in parallel; only some stages consider the whole sequence. Stages pass their results on in
 * the cache's scratch arrays, at evict[stream].first. */
#ifndef KEEPD_KERNELS_CPU_EVICT_H
#define KEEPD_KERNELS_CPU_EVICT_H

#include "kernels/allot.h"
#include "kernels/cpu/cache.h"

struct evict_job {
    struct cpu_cache *cache;
    const struct kern_evict *due;
    uint32_t least; /* entries with a lower key are evicted in any case */
};

#define EVICT_KEY_PROTECTED UINT32_MAX /* above every score; no float has this key */
#define EVICT_KEY_EXPIRED   0u         /* below every score */
#define EVICT_KEY_LEAST     1u         /* NaN, and the lowest key that may be kept */

/* Order-preserving: a < b as floats exactly if key(a) < key(b). NaN, which only a broken model
 * produces, ranks lowest. */
uint32_t evict_key(float score);

static inline struct cpu_stream evict_stream(const struct evict_job *job, int stream) {
    return cpu_cache_stream_at(job->cache, job->due->slot, stream);
}

/* ---- Scores: evict_score.c ---- */

/* Fills keys[] and, if the rule has a history, fresh[]: the scores to be stored with the
 * candidates. */
void evict_score_stream(void *arg, int stream, int worker);

/* Computes the scores to be stored, in place in now[count], from the new scores there: divides them
 * by the largest if the rule normalises, then combines them with the stored scores past[count]
 * (enum kern_history). past[i] is CPU_SCORE_NONE if entry i has no stored score. */
void evict_remember(const struct kern_observe *observe, const float *past, float *now,
                    int32_t count);
/* Fills candidates and fixed of the stream, before anything is scored. */
void evict_count_stream(void *arg, int stream, int worker);

/* ---- Attention: observe.c ---- */

/* The attention of the window's queries to the first `candidates` entries of a stream ->
 * out[candidates]. */
void evict_observe(const struct evict_job *job, int stream, int32_t candidates,
                   struct cpu_work *work, float *out);

/* The logarithms of the attention that the first `candidates` entries, of which the first `sinks`
 * are sinks, can expect of coming queries -> out[candidates], which is not
 * work->sum (kern_observe.expect). */
void evict_expect(const struct evict_job *job, int stream, int32_t sinks, int32_t candidates,
                  struct cpu_work *work, float *out);

/* CAKE's two sums over the stream's query heads. */
struct evict_preference {
    double entropy, variance;
};
struct evict_preference evict_preference(const struct evict_job *job, int stream,
                                         int32_t candidates, struct cpu_work *work);

/* x[count] -> out[count]; must not overlap. */
void evict_smooth(const struct kern_observe *observe, const float *x, int32_t count, float *out);

/* ---- Redundancy: redundancy.c ---- */

/* R of the first `candidates` entries -> out. Uses O(n) memory; compares pairs of keys only until
 * the newest similar key of every key is known. */
void evict_redundancy(const struct cpu_cache *cache, const struct kern_redundancy *rule,
                      const struct cpu_stream *stream, int32_t candidates, struct cpu_work *work,
                      float *out);

/* ---- Lag: lag.c ---- */

/* R of the first `candidates` entries, of which the first `sinks` are sinks -> out
 * (KERN_MEASURE_LAG). */
void evict_lag(const struct cpu_cache *cache, int32_t lag, const struct cpu_stream *stream,
               int32_t sinks, int32_t candidates, struct cpu_work *work, float *out);

/* ---- Allotments: allot.c ---- */

/* Runs fn(job, stream, worker) for every stream. */
typedef void evict_each(const struct evict_job *job, cpu_item *fn);

/* Sends the measurements of this rank's streams (struct cpu_evict_fact) to all ranks. Required
 * before a decision over streams of other ranks. Returns 0 or the communicator's error. */
int evict_tell(const struct evict_job *job);
/* The fact of the model's head `head` in a layer. */
struct cpu_evict_fact *evict_fact(const struct evict_job *job, int layer, int head);

/* Measures the layer weights unless the slot is marked as measured. evict.c sets the mark later,
 * when the eviction can no longer fail. */
int evict_measure(const struct evict_job *job, evict_each *each);
/* Computes the allotments before any competition: scopes[].total or, with STREAM scopes,
 * evict[stream].allotment. With uniform layers they do not depend on what the streams hold. */
int evict_allot(const struct evict_job *job);

/* ---- Cutoffs: cutoff.c ---- */

struct evict_search {
    const struct evict_job *job;
    const struct comm *comm; /* ranks whose streams compete */
    bool counts;  /* true: this rank counts all its streams; false: but for those that a lower rank
                     has, too */
    uint32_t own; /* this rank's bit in `capped` */
    struct cpu_evict_scope *scopes;
    int count;
    uint32_t *bins; /* [count][CPU_EVICT_BINS] */
};

/* Finds the cutoff of every scope; returns 0 or the communicator's error. */
int evict_find_cutoffs(const struct evict_search *search);

/* ---- Selection ---- */

/* Returns whether the entry ranks at or above the cutoff. The key decides for most entries; only
 * ties read the page. */
static inline bool evict_reaches(const struct evict_job *job, int stream,
                                 const struct cpu_evict_cutoff *cutoff, int32_t index) {
    uint32_t key = job->cache->keys[job->cache->evict[stream].first + (size_t)index];
    if (key != cutoff->key) return key > cutoff->key;
    const struct cpu_stream view = evict_stream(job, stream);
    int32_t pos = cpu_cache_entry_pos(job->cache, &view, index);
    if (pos != cutoff->pos) return pos > cutoff->pos;
    return cpu_cache_model_stream(job->cache, stream) <= cutoff->stream;
}

/* Returns whether entry `index` is kept. Valid once the cutoffs are known and before anything
 * moves. */
static inline bool evict_keeps(const struct evict_job *job, int stream, int32_t index) {
    const struct cpu_evict_stream *plan = &job->cache->evict[stream];
    return job->cache->keys[plan->first + (size_t)index] >= job->least &&
           evict_reaches(job, stream, &plan->cutoff, index);
}

/* ---- Merging: merge.c ---- */

/* Merges evicted entries into kept ones; all entries are still in their old places. */
void evict_merge_stream(void *arg, int stream, int worker);

/* ---- Classes: classes.c ---- */

/* Adds evicted entries to the classes of kept ones; all entries are still in their old places. The
 * row of members has room for the upper bound; evict[stream].members receives their number. */
void evict_join_stream(void *arg, int stream, int worker);

/* A stream whose entries may have classes. */
struct cpu_classes {
    struct cpu_stream entries, members;
    const int32_t *centres; /* [members.length] index of each member's centre */
    bool positions;         /* kern_classes */
    int32_t newest;         /* the largest position of a member; -1 if there are none */
};

/* Fills work->centres; the result points to it. */
struct cpu_classes cpu_classes_open(const struct cpu_cache *cache, struct cpu_stream entries,
                                    struct cpu_stream members, bool positions,
                                    struct cpu_work *work);
/* The logits of `lanes` scaled queries with every member -> work->logits[lane][member]; the logits
 * of the entries follow them: [lane][members.length + entry]. */
void cpu_classes_logits(const struct cpu_cache *cache, const struct cpu_classes *classes,
                        const float *q, int lanes, struct cpu_work *work);
/* Sets a query's logits to -INFINITY for members it does not see: `pos` is its position, `window`
 * as in kern_attend_options, `sees` the number of entries it sees. */
void cpu_classes_mask(const struct cpu_cache *cache, const struct cpu_classes *classes, int32_t pos,
                      int sliding_window, int32_t sees, float *logits);
/* Adds the attention of each member to that of its centre. */
void cpu_classes_fold(const struct cpu_classes *classes, float *p);

#endif
