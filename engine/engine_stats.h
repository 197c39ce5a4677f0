/* Counters of an engine, and its present state, for /metrics, GET /kv and logs. Any thread. */
#ifndef KEEPD_ENGINE_ENGINE_STATS_H
#define KEEPD_ENGINE_ENGINE_STATS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/hist.h"

struct engine;

struct engine_sequence_row {
    int replica;
    int32_t tokens, held; /* tokens: T; held: entries per stream on average */
    int32_t prompt_count, output_count;
    char policy[32];
    int32_t budget;
    int64_t pages_reserved;
    bool prefilling;
};

/* Why a request that could have continued a conversation started from nothing, or from fewer tokens
 * than it repeats. One list makes enum and names. */
#define ENGINE_MISS_MAP(X)                                                                         \
    X(NEW, "new")               /* no conversation in its space shares its first tokens */         \
    X(DIVERGED, "diverged")     /* prompt differs before the end of the answered prompt */         \
    X(WHOLE, "whole")           /* prompt adds no token to the answered prompt */                  \
    X(SETTINGS, "settings")     /* a conversation with these tokens has other kv settings */       \
    X(FORGOTTEN, "forgotten")   /* the conversation was removed to make room */                    \
    X(TOO_LARGE, "too_large")   /* continuing would need more pages than there are */              \
    X(DAMAGED, "damaged")       /* state file was refused */                                       \
    X(UNREADABLE, "unreadable") /* state file could not be read: no memory, a disk error */

enum engine_miss {
#define X(name, label) ENGINE_MISS_##name,
    ENGINE_MISS_MAP(X)
#undef X
        ENGINE_MISS_COUNT
};

static inline const char *engine_miss_name(enum engine_miss miss) { /* for logs, metric labels */
    static const char *const names[ENGINE_MISS_COUNT] = {
#define X(name, label) label,
        ENGINE_MISS_MAP(X)
#undef X
    };
    return names[miss];
}

/* Counters of one replica's scheduler: member, metric, help. One list makes the members, their sum
 * over replicas and the rows of /metrics; a new counter is a row here and the line that counts.
 * server/stats.c shows a counter whose metric is NULL in another form, or not at all. */
#define ENGINE_COUNTER_MAP(X)                                                                      \
    X(steps, "keepd_steps_total", "Engine steps.")                                                 \
    X(computed_tokens, NULL, NULL) /* prompt tokens computed */                                    \
    X(cached_tokens, NULL, NULL)   /* prompt tokens found in conversations */                      \
    X(generation_tokens, NULL, NULL)                                                               \
    X(drafted_tokens, "keepd_drafted_tokens_total",                                                \
      "Tokens that were computed because answers would probably go on with them.")                 \
    X(confirmed_tokens, "keepd_confirmed_tokens_total",                                            \
      "Of these, tokens with which the answers went on.")                                          \
    X(model_drafted_tokens, "keepd_model_drafted_tokens_total",                                    \
      "Those of the drafted tokens that the draft model guessed.")                                 \
    X(model_confirmed_tokens, "keepd_model_confirmed_tokens_total",                                \
      "Of these, tokens with which the answers went on.")                                          \
    X(encoded_tiles, "keepd_picture_tiles_total", "Tiles of pictures that were encoded.")          \
    X(drafter_steps, "keepd_draft_model_steps_total", "Steps of the draft model.")                 \
    X(drafter_failures, "keepd_draft_model_failures_total",                                        \
      "Failures of the draft model; answers went on without it.")                                  \
    X(evictions, "keepd_evictions_total", "Evictions: one sequence brought down to its budget.")   \
    X(masks_deferred, "keepd_masks_deferred_total",                                                \
      "Masks of constrained answers that cost more than a step may spend, made beside the steps.") \
    X(mask_work, NULL, NULL) /* units of work that steps spent on masks */                         \
    X(shifts, "keepd_shifts_total",                                                                \
      "Shifts: a sequence that had used up the model's positions got room for more.")              \
    X(preemptions, "keepd_preemptions_total", "Always 0: reservations are exact.")                 \
    X(conversation_hits, "keepd_conversation_hits_total",                                          \
      "Requests that continued a conversation.")                                                   \
    X(conversation_cuts, "keepd_conversation_cuts_total",                                          \
      "Of these, requests that shared only the first tokens of the conversation.")                 \
    X(prefixes, "keepd_prefixes_total",                                                            \
      "States kept in the middle of a prompt, for other prompts that begin alike.")                \
    X(prefix_hits, "keepd_prefix_hits_total", "Requests that continued such a state.")             \
    X(prefix_waits, "keepd_prefix_waits_total",                                                    \
      "Requests that waited while another request read the beginning of their prompt.")            \
    X(searches, "keepd_conversation_searches_total",                                               \
      "Searches of the retained conversations, each for one waiting request.")                     \
    X(prefixes_dropped, "keepd_prefixes_dropped_total",                                            \
      "Such states that were removed to make room.")                                               \
    X(conversation_misses, "keepd_conversation_misses_total",                                      \
      "Requests that started without a conversation.")                                             \
    X(conversations_expired, "keepd_conversations_expired_total",                                  \
      "Conversations deleted at the end of their time to live.")                                   \
    X(pins_refused, "keepd_pins_refused_total",                                                    \
      "Turns that were kept without the pin they asked for, because pins have a bound.")           \
    X(state_restored, "keepd_state_restored_total", "Conversations read back from disk.")          \
    X(state_failed, "keepd_state_failed_total", "Conversations that could not be written.")        \
    X(state_lost, "keepd_state_lost_total",                                                        \
      "Conversations that had to leave memory and could not be written.")                          \
    X(copied, NULL, NULL) /* blocks of conversations copied out of the cache and into it */

struct engine_counters {
#define X(name, metric, help) uint64_t name;
    ENGINE_COUNTER_MAP(X)
#undef X
    uint64_t conversation_lost[ENGINE_MISS_COUNT]; /* by reason; only requests that wanted to
                                                      continue a conversation */
    struct hist eviction_seconds, mask_seconds, iteration_tokens;
};

static inline void engine_counters_add(struct engine_counters *sum,
                                       const struct engine_counters *one) {
#define X(name, metric, help) sum->name += one->name;
    ENGINE_COUNTER_MAP(X)
#undef X
    for (int i = 0; i < ENGINE_MISS_COUNT; i++)
        sum->conversation_lost[i] += one->conversation_lost[i];
    hist_merge(&sum->eviction_seconds, &one->eviction_seconds);
    hist_merge(&sum->mask_seconds, &one->mask_seconds);
    hist_merge(&sum->iteration_tokens, &one->iteration_tokens);
}

/* A copy of the state that is published after every step and when jobs are admitted: of one
 * replica, or of all. For all replicas the counts are sums, and progress_ns is that of the busy
 * replica that has been silent for longest. All replicas share one state directory; its counts are
 * in the first replica's checkpoint. */
struct engine_status {
    int jobs; /* jobs submitted and not finished */
    int running, waiting, conversations;
    /* The ranks' pools are equally large; pages are those of the fullest rank. */
    int64_t pages_total, pages_used, pages_reserved, pages_retained;
    int64_t pages_superseded; /* the part of pages_retained in superseded conversations */
    int64_t pages_pinned;     /* the part in pinned ones */
    int64_t tokens_retained;  /* tokens of retained conversations, whose numbers are kept, too */
    int64_t progress_ns; /* clock_ns of the last progress on requests: a step or, where the first
                            waiting job needs the state directory, a piece read or written there */
    bool stopped;        /* the backend failed: every job ends with an error until a restart */
    /* Gauges. entries_kept: in running sequences and in conversations that are not superseded;
     * entries_superseded: in superseded conversations, which are removed first. */
    uint64_t entries_kept, entries_superseded;
    uint64_t entries_evicted, rank_cap_hits; /* counted by the backend */
    struct engine_counters counters;
    /* The state directory; all 0 without one. */
    int conversations_on_disk;
    int64_t state_bytes;
    uint64_t state_written;
    uint64_t state_refused; /* files refused: damaged, forged or of another format */
};
void engine_status(struct engine *engine, struct engine_status *out);
void engine_replica_status(struct engine *engine, int replica, struct engine_status *out);

/* Fills rows for GET /kv; returns the number written. */
int engine_sequences(struct engine *engine, struct engine_sequence_row *rows, int max);

#endif
