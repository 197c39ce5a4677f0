/* The content of /metrics: counts of finished requests (loop thread) and the status of each
 * replica, written as Prometheus text. Names and buckets are vLLM's where vLLM has the notion, so
 * that existing dashboards and routers work; the others start with keepd_. As in vLLM, the label
 * `engine` is the replica's number; metrics of the whole process have engine="0". */
#ifndef KEEPD_SERVER_STATS_H
#define KEEPD_SERVER_STATS_H

#include <stdint.h>

#include "base/buf.h"
#include "base/hist.h"
#include "engine/engine.h"
#include "engine/engine_stats.h"
#include "server/keys.h"
#include "server/otlp.h"

/* Why a request was refused before any work, with 429 or 503: one list makes enum and labels. */
#define STATS_REJECT_MAP(X)                                                                        \
    X(OTHER, "other")                                                                              \
    X(FULL, "queue_full")                                                                          \
    X(DRAINING, "draining")                                                                        \
    X(MEMORY, "memory")                                                                            \
    X(TOKENS, "queue_tokens")                                                                      \
    X(RATE, "rate_limit")                                                                          \
    X(REQUESTS, "key_requests")                                                                    \
    X(CLIENT_MEMORY, "client_memory")                                                              \
    X(CLIENT_QUEUE, "client_queue")                                                                \
    X(BACKGROUND, "background")                                                                    \
    X(MODEL, "model")

enum stats_reject {
#define X(name, label) STATS_REJECT_##name,
    STATS_REJECT_MAP(X)
#undef X
        STATS_REJECTS
};

/* Requests of one replica. */
struct stats_requests {
    uint64_t finished[ENGINE_FINISH_COUNT];
    struct hist ttft, inter_token, per_output_token;
    struct hist e2e, queue, inference, prefill, decode;
    struct hist prompt_tokens, generation_tokens, max_tokens, computed_tokens, params_n;
    struct hist preemptions;
};

struct stats {
    struct stats_requests *replicas; /* [replica_count] */
    int replica_count;
    double length_bounds[HIST_MAX_BOUNDS]; /* 1, 2, 5, 10, ... up to the model's length */
    double finish_interval;                /* seconds of work between finished requests, smoothed */
    int64_t last_finish_ns, busy_since_ns;
    int unfinished; /* submitted */
};

/* The struct must not be moved afterwards. */
void stats_open(struct stats *stats, int replicas, int max_model_len);
void stats_close(struct stats *stats);

/* Counts `count` more tokens of a stream whose last ones came at `last_ns` (0: these are the
 * first). */
void stats_tokens(struct stats *stats, const struct engine_job *job, uint32_t count,
                  int64_t received_ns, int64_t last_ns, int64_t now_ns);
/* Counts a job that was submitted to the engine; stats_finished ends it. */
void stats_submitted(struct stats *stats, int64_t now_ns);
void stats_finished(struct stats *stats, const struct engine_job *job, int64_t received_ns);
/* Estimates when a full queue has a free place, from the rate at which requests finish under load:
 * milliseconds, 100 to 30,000. */
int stats_retry_ms(const struct stats *stats);

/* A model's part of the metrics. */
struct stats_model {
    const char *name;
    const struct stats *stats;
    const struct engine_info *info;       /* NULL: it is not loaded */
    const struct engine_status *statuses; /* [stats->replica_count] */
    int waiting;                          /* requests that wait until it is loaded */
    int64_t memory_bytes;
    uint64_t loads, unloads, failures;
    const struct engine_adapter_row *adapters; /* [adapter_count] of a loaded model */
    int adapter_count;
};

struct stats_input {
    const struct stats_model *models; /* [model_count] */
    int model_count;
    const uint64_t *rejected; /* [STATS_REJECTS] */
    const struct keys *keys;  /* the settings and counts of those with names; NULL = none */
    struct otlp_counts spans;
    int64_t queue_tokens;
    int64_t picture_bytes;
    int connections;
    uint64_t connections_total;
    int64_t start_seconds;  /* unix */
    int64_t resident_bytes; /* resident memory of the process; 0 = unknown */
};
/* Share of the page pool that running requests reserve, 0 to 1. */
double stats_cache_usage(const struct engine_status *status);
void stats_render(struct buf *out, const struct stats_input *input);

#endif
