/* Jobs: a request with the answers that the engine writes.
 *
 * Jobs. The submitter fills `struct engine_job`, submits it, and must keep it (and all it points
 * to) until `finished` is set. After that the engine never touches the job again, and
 * engine_job_close frees what the engine allocated in it. Readers load `finished` or a choice's
 * `finish` first and the counts second; the other order loses tokens. Cancel, deadline and a
 * vanished client all store 1 to `cancel`; the engine applies it between steps and sets `finished`
 * in any case. Output arrays are sized at submit and append-only: they cannot overflow, and a slow
 * reader costs the engine nothing.
 *
 * Choices. A request for n answers computes its prompt once. Each choice then continues with its
 * own streams, which share pages copy-on-write. Choice i is bitwise the answer of the same request
 * with n = 1 and seed + i. All choices run or none: admission needs n places and reserves pages for
 * every choice as if nothing was shared. The streams of choice 0 are kept as the conversation. */
#ifndef KEEPD_ENGINE_ENGINE_JOB_H
#define KEEPD_ENGINE_ENGINE_JOB_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "engine/engine_request.h"

/* Why no tokens of an answer are guessed although they may be. One list makes enum and names. */
#define ENGINE_UNDRAFTED_MAP(X)                                                                    \
    X(NOT, NULL)                                                                                   \
    X(POLICY, "policy") /* records of the last queries cannot be taken back */                     \
    X(STATES, "states") /* nor can the model's recurrent states */                                 \
    X(MEMORY, "memory")

enum engine_undrafted {
#define X(name, label) ENGINE_UNDRAFTED_##name,
    ENGINE_UNDRAFTED_MAP(X)
#undef X
        ENGINE_UNDRAFTED_COUNT
};

static inline const char *engine_undrafted_name(enum engine_undrafted undrafted) {
    static const char *const names[ENGINE_UNDRAFTED_COUNT] = {
#define X(name, label) label,
        ENGINE_UNDRAFTED_MAP(X)
#undef X
    };
    return names[undrafted];
}

/* Why a choice ended; the second argument is the metrics label. One list makes enum and names. */
#define ENGINE_FINISH_MAP(X)                                                                       \
    X(STOP, "stop")             /* a stop string or token, or the model's own end */               \
    X(LENGTH, "length")         /* max_tokens */                                                   \
    X(REPETITION, "repetition") /* the answer went round in circles: struct engine_loops */        \
    X(ABORT, "abort")           /* cancelled, or the engine is closing */                          \
    X(ERROR, "error")           /* see job->fault */

enum engine_finish {
    ENGINE_RUNNING = 0, /* not finished */
#define X(name, label) ENGINE_FINISH_##name,
    ENGINE_FINISH_MAP(X)
#undef X
        ENGINE_FINISH_COUNT
};

struct engine_top {
    int32_t token;
    float logprob;
};

struct engine_token {
    int32_t token;
    float logprob;
    int32_t rank;      /* rank by the model's raw logits, 1 = first; also for prompt tokens */
    uint32_t text_end; /* bytes of choice->text after this token */
};

struct engine_choice {
    struct engine_token *tokens; /* [max_tokens] */
    struct engine_top *top;      /* [max_tokens * top_logprobs] */
    char *text;                  /* bytes of the answer; special tokens add none */
    atomic_uint_fast32_t token_count;
    atomic_uint_fast32_t text_safe; /* bytes that may be shown: whole characters, no beginning of a
                                       stop string. Final (cut at a stop string) once finished */
    atomic_int finish;              /* enum engine_finish; release-stored last */
    int32_t stop_index;             /* index of the stop string that ended the choice, -1 none */
    int32_t stop_token;             /* id of the stop or EOS token that ended the choice, -1 none */
    /* Drafted tokens that the model drew and did not draw; valid once finished. */
    int32_t drafts_confirmed, drafts_rejected;
    enum engine_undrafted undrafted; /* likewise */
    /* Used by the engine only. */
    enum engine_finish ending; /* decided, not yet published */
    struct engine_choice *next;
};

/* An eviction is described by the entries that each stream lost. */
struct engine_eviction {
    struct engine_eviction *next; /* the next eviction in time */
    int32_t tokens;               /* T at the eviction */
    int32_t *positions;           /* ascending, stream after stream */
    int32_t lengths[];            /* [streams]: entries that each stream lost */
};

/* Cache contents of choice 0, for usage.kv_details; valid once the job is finished. */
struct engine_kv_details {
    char policy[32];
    int32_t budget;          /* -1 for full */
    int32_t seen_tokens;     /* T */
    int64_t kept_entries;    /* over all layers and heads */
    int64_t evicted_entries; /* by this conversation so far */
    int32_t dropped_tokens;  /* tokens of a previous turn that were dropped because the new prompt
                                differs */
    bool pinned;             /* the kept state is pinned */
    int32_t shifts;          /* times that its places were used up (kernels/places.h) */
    int64_t bytes;           /* memory held: pages * page_bytes */
    int64_t state_bytes;     /* the part of them in recurrent states; 0: the model has none */
    int32_t *lengths;        /* [streams] when reported, else NULL */
    int32_t *positions;      /* concatenated, stream after stream, or NULL */
    struct engine_eviction *evictions; /* evictions of this request, when its report is the trace */
    int32_t evictions_lost;            /* evictions not recorded for lack of memory */
};

/* The lengths of choice 0's streams when it has seen `tokens` tokens. Each further token adds one
 * entry to every stream, until an eviction or a shift, after which the next report comes. */
struct engine_held {
    int32_t tokens;
    int32_t *lengths; /* [streams] */
};

/* Three reports go round between the engine, which writes one, and one reader, so that neither
 * waits for the other: the newest whole one lies between the two. */
#define ENGINE_LIVE_REPORTS 3
struct engine_live {
    struct engine_held held[ENGINE_LIVE_REPORTS];
    atomic_uint between; /* index of the report between the two, and ENGINE_LIVE_NEW */
    unsigned writing, reading;
    int32_t lengths[]; /* all three reports have theirs here */
};
#define ENGINE_LIVE_NEW 4u /* the reader has not seen it */

/* Why a waiting job was not admitted when it was last tried. */
enum engine_wait {
    ENGINE_WAIT_NOTHING, /* not tried yet */
    ENGINE_WAIT_PLACES,
    ENGINE_WAIT_PAGES,
    ENGINE_WAIT_QUOTA,   /* the client's quota has too few pages; others may pass the job */
    ENGINE_WAIT_STORE,   /* a file is read, or a conversation that has to go is written first */
    ENGINE_WAIT_ARRIVAL, /* a conversation is copied into the cache, or can be for the head alone */
    ENGINE_WAIT_LIST,    /* the directory is listed */
    ENGINE_WAIT_PREFIX   /* a running sequence reads what its prompt begins with */
};

struct engine_job {
    struct engine_request request;
    atomic_int cancel;
    atomic_int admitted;              /* 1 once the job has its pages and places */
    atomic_uint_fast32_t prompt_read; /* prompt tokens computed or found; grows step by step */
    atomic_int finished; /* 1 once every choice has ended: the job belongs to the submitter again */
    struct engine_choice *choice; /* [choice_count], allocated by engine_submit, NULL before */
    int choice_count;
    struct engine_live *live; /* NULL: not asked for */
    int replica;              /* index of the replica that computes the job; set by engine_submit */
    struct engine_token *prompt_tokens; /* [prompt_count] when prompt_logprobs; [0] and rows of
                                           pictures are unscored: NAN */
    struct engine_top *prompt_top;      /* [prompt_count * prompt_top_logprobs] */
    int32_t cached_tokens;              /* prompt tokens not computed; valid once admitted */
    float *pooled; /* [dimensions] the prompt's vector, as long as it comes; with ENGINE_POOL_NEXT
                      [judged_count] log-probabilities of the tokens behind the prompt. Valid once
                      finished. NULL: the request wants none */
    /* Valid once finished. */
    struct fault fault;
    bool cut; /* the job continued a checkpoint, or a conversation cut before the end of its turn */
    struct engine_kv_details kv;
    /* clock_ns; 0 = never. Readable before the end: first_token_ns after a count above 0. */
    int64_t queued_ns, admitted_ns, first_token_ns, finished_ns;
    int64_t evict_ns; /* time spent evicting for this job */
    /* Used by the engine only. */
    struct kv_params *params; /* the request's kv parameters, resolved; NULL: not yet */
    struct engine_job *next;
    int choices_left;      /* choices that have not ended yet */
    int stage;             /* enum sched_stage: the job's owner, checked where it changes hands */
    int client;            /* record of the job's client, see engine/steps/queue.h */
    uint64_t arrival;      /* number of the job in its replica's order of arrival */
    uint64_t round;        /* keeper.changes when the job was last tried; 0: it is tried next */
    enum engine_wait wait; /* why it was not admitted then */
    int64_t pages;         /* pages that each choice needs when started from nothing; 0 = unknown */
    double *pooled_sum;    /* [dimensions] of the rows so far, for a mean, or [width] of a hidden
                              state where a vector is a product of it; NULL once it is made */
    uint64_t
        saves; /* count of saves that the job waits to change, see sched_admit.c; 0: it does not */
    /* The wait for a prefix that a running sequence reads: engine/steps/sched_checkpoint.c. */
    struct {
        uint64_t since;  /* number of the step in which the job first waited; 0: never */
        uint64_t reader; /* arrival of the job that reads the prefix */
        int sequence;    /* index of its sequence */
        int32_t border;  /* tokens of the prefix; 0: the job does not wait */
    } prefix;
};

/* A reader's view of a choice. `finish` is loaded before the counts: a count that was loaded first
 * could be older than the end, and the tokens between the two would be lost. */
struct engine_seen {
    int finish;      /* enum engine_finish; once it is set the other members are final */
    uint32_t tokens; /* number of valid choice->tokens */
    size_t text;     /* bytes of choice->text that may be shown */
};

static inline struct engine_seen engine_see_choice(const struct engine_choice *choice) {
    struct engine_seen seen;
    seen.finish = atomic_load_explicit(&choice->finish, memory_order_acquire);
    seen.tokens = (uint32_t)atomic_load_explicit(&choice->token_count, memory_order_acquire);
    seen.text = (size_t)atomic_load_explicit(&choice->text_safe, memory_order_acquire);
    return seen;
}

/* Is the job finished? If so, *tokens, the sum over all choices, is final: as in engine_see_choice,
 * it is loaded second. */
static inline bool engine_see_job(const struct engine_job *job, uint32_t *tokens) {
    bool finished = atomic_load_explicit(&job->finished, memory_order_acquire) != 0;
    *tokens = 0;
    for (int i = 0; i < job->choice_count; i++)
        *tokens += engine_see_choice(&job->choice[i]).tokens;
    return finished;
}

/* Is there a report that engine_see_held has not returned? */
static inline bool engine_held_is_new(const struct engine_job *job) {
    return job->live &&
           (atomic_load_explicit(&job->live->between, memory_order_relaxed) & ENGINE_LIVE_NEW) != 0;
}

/* Returns the newest report, valid until the next call; NULL: there is no new one. */
static inline const struct engine_held *engine_see_held(struct engine_job *job) {
    struct engine_live *live = job->live;
    if (!engine_held_is_new(job)) return NULL;
    live->reading = atomic_exchange_explicit(&live->between, live->reading, memory_order_acq_rel) &
                    ~ENGINE_LIVE_NEW;
    return &live->held[live->reading];
}

/* Frees what check, submit and the engine allocated. */
void engine_job_close(struct engine_job *job);

#endif
