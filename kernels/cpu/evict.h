/* The stages of an eviction, in the order they run. Each takes one stream, so that streams run side
 * by side, except where the whole sequence is looked at. What one stage leaves for the next lies in
 * the cache's room for eviction, at evict[stream].first. */
#ifndef KEEPD_KERNELS_CPU_EVICT_H
#define KEEPD_KERNELS_CPU_EVICT_H

#include "kernels/cpu/cache.h"
#include "kernels/share.h"

struct evict_job {
    struct cpu_cache *cache;
    const struct kern_evict *due;
    uint32_t least; /* entries with a lower key go in any case */
};

#define EVICT_KEY_PROTECTED UINT32_MAX /* above every score; no float has this key */

/* Order-preserving: a < b as floats exactly if key(a) < key(b). NaN, which only a broken model
 * gives, ranks lowest. */
uint32_t evict_key(float score);

static inline struct cpu_stream evict_stream(const struct evict_job *job, int stream) {
    return (struct cpu_stream){.pages = cpu_cache_table(job->cache, job->due->slot, stream),
                               .length = *cpu_cache_length(job->cache, job->due->slot, stream)};
}

/* ---- Scores: evict_score.c --------------------------------------------------------------------
 */

/* keys[], and where the rule has a history fresh[]: what the candidates will remember. */
void evict_score_stream(void *arg, int stream, int worker);

/* now[count], fresh scores, become what is remembered: divided by the largest if the rule says so,
 * then mixed with past[count], CPU_SCORE_NONE where there is none (enum kern_history). */
void evict_remember(const struct kern_observe *observe, const float *past, float *now,
                    int32_t count);
/* candidates and fixed of the stream, before anything is scored. */
void evict_count_stream(void *arg, int stream, int worker);

/* ---- Attention: observe.c ---------------------------------------------------------------------
 */

/* What the window's queries say of the first `candidates` entries of a stream -> out[candidates].
 */
void evict_observe(const struct evict_job *job, int stream, int32_t candidates,
                   struct cpu_work *work, float *out);

/* CAKE's two sums over the stream's query heads. */
struct evict_preference {
    double entropy, variance;
};
struct evict_preference evict_preference(const struct evict_job *job, int stream,
                                         int32_t candidates, struct cpu_work *work);

/* x[count] -> out[count]; they do not overlap. */
void evict_smooth(const struct kern_observe *observe, const float *x, int32_t count, float *out);

/* ---- Redundancy: redundancy.c -----------------------------------------------------------------
 */

/* R of the first `candidates` entries -> out. Needs O(n) memory; compares pairs of keys only until
 * the newest look-alike of each is found. */
void evict_redundancy(const struct cpu_cache *cache, const struct kern_redundancy *rule,
                      const struct cpu_stream *stream, int32_t candidates, struct cpu_work *work,
                      float *out);

/* ---- Shares: share.c --------------------------------------------------------------------------
 */

/* Runs fn(job, stream, worker) for every stream. */
typedef void evict_each(const struct evict_job *job, cpu_item *fn);

/* Tells all ranks what this one knows of its streams. Before a decision that looks at more streams
 * than its own; where that is said, 0 or the communicator's error. */
int evict_tell(const struct evict_job *job);
/* Head `head` of the model, of a layer. */
struct cpu_evict_fact *evict_fact(const struct evict_job *job, int layer, int head);

/* The layers' weights, unless the sequence has them already. The slot counts as measured only when
 * the eviction cannot fail any more. */
int evict_measure(const struct evict_job *job, evict_each *each);
/* evict[stream].keep of the first stream of each pool: its places. Uniform layers have keep places
 * per stream, whatever the streams hold. */
int evict_share(const struct evict_job *job);

/* ---- Cuts: cut.c ------------------------------------------------------------------------------
 */

struct evict_cuts {
    const struct evict_job *job;
    const struct comm *comm; /* the ranks whose streams compete */
    bool counts;             /* are this rank's streams counted here, not on a lower rank? */
    uint32_t own;            /* its bit in `capped` */
    struct cpu_evict_pool *pools;
    int count;
    uint32_t *bins; /* [count][CPU_EVICT_BINS] */
};

/* The cut of every pool; 0 or the communicator's error. */
int evict_find_cuts(const struct evict_cuts *cuts);

/* ---- Selection: evict.c -----------------------------------------------------------------------
 */

/* Does entry `index` stay? When the cuts are known and before anything moves. */
bool evict_keeps(const struct evict_job *job, int stream, const uint32_t *table, int32_t index);

/* Does its rank reach the cut? */
bool evict_reaches(const struct evict_job *job, int stream, const struct cpu_evict_cut *cut,
                   const uint32_t *table, int32_t index);

/* ---- Merging: merge.c -------------------------------------------------------------------------
 */

/* Evicted entries into those that stay, all still in their old places. */
void evict_merge_stream(void *arg, int stream, int worker);

/* ---- Classes: classes.c ---------------------------------------------------------------------- */

/* Evicted entries into the classes of those that stay, all still in their old places; the row of
 * members has room for all there can be, and evict[stream].members says how many there are. */
void evict_join_stream(void *arg, int stream, int worker);

/* A stream whose entries may have classes. */
struct cpu_classes {
    struct cpu_stream entries, members;
    const int32_t *centres; /* [members.length] the entry that is each member's centre */
    bool positions;         /* kern_classes */
    int32_t newest;         /* the largest position of a member; -1 without any */
};

/* Fills work->centres, which the result points to. */
struct cpu_classes cpu_classes_open(const struct cpu_cache *cache, struct cpu_stream entries,
                                    struct cpu_stream members, bool positions,
                                    struct cpu_work *work);
/* The logits of `lanes` scaled queries with every member -> work->logits[lane][member], where those
 * with the entries follow: [lane][members.length + entry]. */
void cpu_classes_logits(const struct cpu_cache *cache, const struct cpu_classes *classes,
                        const float *q, int lanes, struct cpu_work *work);
/* -INFINITY in a query's logits where it does not see the member: `pos` is its own position,
 * `window` as in kern_attend_options, `sees` the number of entries it sees. */
void cpu_classes_mask(const struct cpu_cache *cache, const struct cpu_classes *classes, int32_t pos,
                      int window, int32_t sees, float *logits);
/* Adds what each member got to its centre. */
void cpu_classes_fold(const struct cpu_classes *classes, float *p);

#endif
