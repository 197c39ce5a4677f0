/* The paged key/value cache as callers see it: its options, evictions, shifts, reports, pieces of
 * snapshots, and statistics. Page tables and pages are the backend's alone. */
#ifndef KEEPD_KERNELS_KERN_CACHE_H
#define KEEPD_KERNELS_KERN_CACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/kern_rule.h"
#include "kernels/kern_types.h"

/* The KV heads of a layer with attention, and the numbers of each of their keys and values. */
struct kern_heads {
    int kv, dim;
};

/* A recurrent state is all that a layer without attention remembers of a sequence: state_floats
 * float32 numbers, zeros before its first token. It lies in pages of the pool, so that it is shared
 * by forks, copied before it is written, counted and freed as entries are. Its numbers belong to
 * units (channels, heads), one unit's numbers after another's; with several ranks each has an equal
 * number of consecutive units, and all have the numbers before the first unit (state_shared).
 * Evictions, budgets and shifts concern entries alone. A state cannot go back, but it can be left
 * where it is (kern_span.peeks): otherwise `truncate` refuses slots that have one.
 *
 * With latent attention (struct kern_latent) an entry has no row of its own for the value.
 *
 * A page holds `page_slots` entries of ONE (layer, KV head) of one sequence: keys after RoPE at
 * the place of their token, values, and side records that move with the entry: pos int32, log_beta
 * float32, score float32 (stored by the rule). All pages have the same size; where heads differ in
 * their numbers, pages of the larger ones hold fewer entries. page_bytes counts K, V and side
 * records. A query ring of [layers][KERN_WINDOW_MAX][heads_q * head_dim] float32 per slot is not
 * included; its memory is resident only as far as rules with a window use it. */
struct kern_cache_options {
    int layers; /* with attention and entries of their own: the cache numbers them alone */
    int heads_q, heads_kv, head_dim;
    /* The heads of each layer, [layers], where they differ; heads_kv and head_dim are then the
     * largest numbers. Valid as long as the cache. NULL: they are equal. */
    const struct kern_heads *heads;
    enum kern_dtype dtype;
    /* Above 0: the first `latent` numbers of a key are its value, too, and do not rotate. Entries
     * have no other value; rules that merge entries cannot run. */
    int latent;
    /* Layers with a recurrent state, which the cache numbers by themselves, and the numbers of each
     * state. */
    int states, state_floats;
    int state_shared;  /* numbers of a state in front of its units */
    int state_heads;   /* heads of which a step keeps a number for each row (kern_ops.mamba); 0 */
    int64_t pages;     /* pages of each rank's pool (kernels/ranks.h); zeroed once */
    int slots;         /* sequences plus retained conversations */
    int max_positions; /* places of the model: upper bound of a stream's length and, in sequences
                          that are not shifted, of positions */
    float rank_cap;    /* where the streams of a scope are on several ranks, one rank gets at most
                          rank_cap (>= 1) times an even part of the allotment, rounded down, or its
                          protected entries; the others get the rest. 0: no cap, so that results do
                          not depend on the number of ranks */
    /* The rotation of the keys, [(head_dim - latent) / 2], for rules with classes; valid as long as
     * the cache. NULL: keys are not rotated. */
    const float *inv_freq;
    /* The rotation of the keys in every layer, [layers] of as many numbers, for shifts and
     * observe.expect; valid as long as the cache. NULL, or NULL for a layer: keys are not rotated.
     */
    const float *const *rotations;
    /* The largest step: its rows, how many of them are sampled, and the vocabulary. Opening
     * allocates everything such steps need in addition to pages, so that none runs out of memory.
     * 0: unknown; allocated by the step. `qk_norm_wide`: steps contain qk_norm. */
    int rows_max, logits_max, vocab;
    bool qk_norm_wide;
};

/* The numbers of a state on each of `ranks` ranks. */
static inline int kern_state_part(const struct kern_cache_options *options, int ranks) {
    return options->state_shared + (options->state_floats - options->state_shared) / ranks;
}

struct kern_cache_info {
    int page_slots;       /* entries per page; where heads differ, the most */
    int page_slots_least; /* where they differ, the least */
    int member_slots;     /* members of classes per page; 0 if no rule of the backend has classes */
    int state_slots;      /* numbers of a recurrent state per page; 0 if the backend has none */
    int64_t page_bytes;   /* memory per page, side records included */
};

/* Entries that one eviction removed. The caller provides the arrays. */
struct kern_trace {
    int32_t *lengths;   /* [streams]: entries removed from each stream */
    int32_t *positions; /* consecutive streams, ascending within each */
    size_t
        entries_max; /* size of positions; the number of entries of the sequence always suffices */
    size_t entries;  /* out: sum of lengths; if above entries_max, positions are incomplete */
    bool lost;       /* out: the trace was lost for lack of memory; the eviction took place */
};

/* Describes one sequence to evict from. Afterwards the sequence holds at most streams * budget
 * entries, and exactly min(held, that) unless the rule drops more by itself (retain; floors and
 * caps that leave a part of an allotment empty) or entries have expired. Expired is an entry that
 * no later query can see: in a layer with a sliding window (kern_attend_options), pos <= T -
 * sliding_window. It is evicted in any case, protected or not, and ranks below all others; only a
 * rule that merges keeps such entries as any others. Sinks and recent entries are kept first and
 * count. Ties: newer pos, then lower layer, then lower head. Stable: order inside a stream is kept.
 */
struct kern_evict {
    int32_t slot;
    int32_t tokens; /* T: tokens appended so far; age = T - pos */
    int32_t budget; /* M: entries per stream on average */
    const struct kern_rule *rule;
    struct kern_trace *trace; /* NULL: none */
};

/* Moves a slot's tokens from their places after `from` shifts to those after `to` shifts
 * (kernels/places.h): rotates the stored keys, and the remembered queries, by the difference, in
 * float32 and rounded once to the stored form. A token whose place stays keeps its bits. With more
 * shifts, a stream longer than places_kept drops entries behind the sinks: with retention scores
 * those that rank lowest, as in an eviction, otherwise the oldest. Positions, ages and scores do
 * not change. Not for slots with classes. */
struct kern_shift {
    int32_t slot;
    int32_t tokens; /* kern_evict.tokens */
    int32_t from, to;
    const struct kern_rule *rule;
};

/* Contents of a sequence. The caller provides the arrays; any may be NULL. */
struct kern_report {
    int32_t *lengths;    /* [streams] */
    int32_t *positions;  /* consecutive streams, the entries of each in physical order */
    float *log_beta;     /* same order */
    size_t entries_max;  /* size of positions and log_beta */
    size_t entries;      /* out: sum of lengths */
    int64_t pages;       /* out: pages the slot refers to */
    int32_t members;     /* out, snapshot_check only: the largest number of members in a stream */
    int64_t rank_pages;  /* out: pages on the rank that has most; with one rank equal to `pages` */
    size_t rank_entries; /* out: entries on the rank that has most */
    size_t state_bytes;  /* out: numbers of all recurrent states, those of all ranks together */
};

/* The heads of a layer, and the streams of a model. */
static inline struct kern_heads kern_heads_of(const struct kern_cache_options *options, int layer) {
    return options->heads ? options->heads[layer]
                          : (struct kern_heads){options->heads_kv, options->head_dim};
}

static inline int64_t kern_streams(const struct kern_cache_options *options) {
    int64_t streams = 0;
    if (!options->heads) return (int64_t)options->layers * options->heads_kv;
    for (int i = 0; i < options->layers; i++) streams += options->heads[i].kv;
    return streams;
}

/* A piece of a snapshot. A slot's content consists of one block for the slot itself and one for
 * each stream, layer by layer, then one for each recurrent state: the same
 * bytes on every backend with equal layers, heads, head_dim, dtype and states, however its pages
 * are arranged. kernels/snapshot.h describes the format. */
struct kern_block {
    const void *data; /* may be unaligned */
    size_t size;
};

struct kern_cache_stats {
    int64_t pages_used; /* pages with a reference count above zero */
    int64_t
        rank_pages_used; /* on the rank that uses most pages; with one rank equal to pages_used */
    uint64_t entries_evicted;
    uint64_t rank_cap_hits; /* scopes of evictions in which rank_cap limited a rank */
};

#endif
