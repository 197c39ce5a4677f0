/* The engine: one model, served by one or several replicas, each with a backend and a thread of its
 * own; everything the server may know about it.
 *
 * Life: engine_open (loads, blocking, reports progress) -> engine_start -> submit jobs ->
 * engine_drain -> engine_close. Text functions work on immutable data and may be called from any
 * thread between open and close. engine_submit and the queue functions belong to one thread, the
 * loop. tests/fake_engine.c implements this header without a model.
 *
 * Jobs. The submitter fills `struct engine_job`, submits it, and must keep it (and all it points
 * to) until `finished` is set; then the engine never touches it again and engine_job_close frees
 * what the engine put in. Readers load `finished` or a choice's `finish` first and the counts
 * second: the other order loses tokens. Cancel, deadline and a vanished client all store 1 to
 * `cancel`; the engine applies it between steps and sets `finished` in any case. Output arrays are
 * sized at submit and append-only: they cannot overflow and a slow reader costs the engine nothing.
 *
 * Choices. A request for n answers reads its prompt once; then each choice goes on with streams of
 * its own, sharing pages copy-on-write. Choice i is, bit for bit, what the same request with n = 1
 * and seed + i would answer. All of them run or none: admission needs n places and reserves for
 * every choice as if nothing was shared. Choice 0's streams stay as the conversation.
 *
 * Conversations. A request that extends a conversation goes on with a copy-on-write fork of it; the
 * conversation stays, so that a retry, another last turn or several questions on one history each
 * pay only for what is new. Once the new turn is kept, the one it came from is `superseded`: the
 * first to go when room is needed, and a dialogue keeps at most one of them, unless several turns
 * went on from it. With `state_dir` conversations outlive the process, see engine/store.h.
 *
 * Replicas. Each has a queue of its own. A job goes to the replica whose conversation it can
 * continue furthest; where none has one, to the least loaded. A replica whose queue is full gets
 * nothing more: the job starts elsewhere, from nothing if need be, and is refused only where every
 * queue is full. From the same starting state every replica gives the same answer. */
#ifndef KEEPD_ENGINE_ENGINE_H
#define KEEPD_ENGINE_ENGINE_H

#include <cjson/cJSON.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"
#include "base/hist.h"

struct engine;

/* Options that are words leave the choice to the engine when they are absent or "auto". */
static inline bool engine_chooses(const char *option) {
    return option == NULL || strcmp(option, "auto") == 0;
}

/* A model and the options, checked. */
struct engine_found {
    char kv_policy[32], kv_dtype[8];
    int kv_budget; /* 0: none */
    bool has_gates;
    int trained_budget; /* of the gates; 0 = unknown */
    int max_model_len;
    int64_t conversation_bytes; /* at the budget, else at max_model_len */
    int32_t eos[16];
    int eos_count;
};

struct engine_options {
    const char *model_dir;
    const char *gates;     /* NULL = the model directory's, "" = none */
    const char *kv_policy; /* "auto": global if the model has gates, otherwise full */
    int kv_budget, kv_buffer, kv_chunk;
    int kv_budget_max;          /* cap for requests; 0 = none */
    int64_t kv_pool_bytes;      /* 0 = what is free on the device; on the host by max_num_seqs and
                                   the budget, at most half of what is free */
    const char *kv_dtype;       /* "auto" (the weights'; bf16 for f16), "f32", "bf16", "fp8" or
                                   "fp8_e4m3" */
    int max_num_seqs;           /* sequences running at once */
    int max_num_batched_tokens; /* rows per step */
    int max_model_len;          /* 0 = the model's */
    int max_queue;              /* jobs waiting, bounded */
    int max_conversations;      /* retained between turns */
    int max_choices;            /* n of one request; 0 = as many as may run at once */
    int data_parallel_size;     /* replicas of the model, 0 = 1; the numbers above are each one's */
    int tensor_parallel_size;   /* ranks that each replica is split over: 1, 2, 4, 8; 0 = 1 */
    int kv_rank_cap;            /* percent of an even share, see kern_cache_options; 0 = none */
    int threads;                /* of all replicas; 0 = the cores */
    const char *device;         /* "auto", "cpu", "cuda": see engine/backend.h */
    const char *cpu_path;       /* see kernels/cpu/cpu.h */
    bool random_weights;
    const char *quantization; /* of the weights: NULL or "none" as the files have them, "fp8" */
    bool check_only; /* engine_open refuses whatever it would refuse without loading weights; when
                        it finds nothing it returns 0 with *out = NULL */
    const char *state_dir;  /* conversations outlive the process there; NULL or "" = they do not */
    int64_t state_bytes;    /* all files there together; the oldest go */
    int state_idle_seconds; /* a conversation is written when nobody used it for so long */
    struct engine_found *found; /* with check_only: filled in where nothing is refused; or NULL */
    void (*progress)(void *arg, double fraction, const char *what); /* during open; may be NULL */
    void (*wake)(void *arg); /* a replica's thread, after a step that changed some job:
                                uv_async_send */
    void *arg;
};

/* fault->field is an option's name without its dashes ("kv-policy") or, when the model is at fault,
 * a file, field or tensor of it. */
int engine_open(const struct engine_options *options, struct engine **out, struct fault *fault);
int engine_start(struct engine *engine);
void engine_drain(
    struct engine *engine);              /* finish accepted jobs, accept no more; returns at once */
bool engine_idle(struct engine *engine); /* nothing queued or running */
void engine_close(struct engine *engine); /* aborts what is left (finish = ABORT), joins, frees */

/* Describes a model for people, a line for each fact, as far as it can be read, and what start
 * would refuse. *tool_template: the template of chats with tools, freed by the caller; NULL where
 * there is none. Failure: as engine_open's, and the last line says it. Loads no weights. */
int engine_inspect(const struct engine_options *options, struct buf *out, char **tool_template,
                   struct fault *fault);

/* Constant facts, valid from open to close. */
struct engine_info {
    const char *model_dir;
    char family[32];
    char backend[32];   /* "cpu-amx" */
    char kv_policy[32]; /* the default in force */
    int kv_budget, kv_buffer, kv_chunk, kv_budget_max;
    char kv_dtype[8];
    bool has_gates;
    int trained_budget; /* of the gates; 0 = unknown */
    int layers, heads_kv, head_dim, vocab;
    int max_model_len, max_num_seqs, max_queue;
    int max_choices;
    uint8_t
        space_key[16]; /* secret: the key to hash request.space with. Random; with a state_dir it
                          comes from the key there, so that spaces mean the same after a restart */
    int replicas;
    int threads;
    int64_t pages_total, page_bytes; /* of one rank of a replica */
    int page_slots;
    int pool_ranks; /* of a replica, with such a pool each for its own heads; 0 = 1 */
    size_t weight_bytes;
    bool has_chat_template;
    const char *chat_template;         /* its source; NULL = none */
    const char *tool_template;         /* of chats with tools: another one, or the same */
    const char *bos_token, *eos_token; /* "" = none */
    /* request defaults of the model's generation_config; NAN / -1 where absent */
    float temperature, top_p, min_p, repetition;
    int top_k;
};
const struct engine_info *engine_info(const struct engine *engine);

/* ---- Text (any thread) --------------------------------------------------------------------- */

struct engine_ids {
    int32_t *ids; /* in the caller's arena */
    size_t count;
};

/* Plain text as a completion prompt: special tokens in the text are NOT recognised unless
 * `parse_special`; `add_special` runs the model's post-processor (BOS). */
int engine_tokenize(const struct engine *engine, const char *text, size_t size, bool add_special,
                    bool parse_special, struct arena *arena, struct engine_ids *out,
                    struct fault *fault);

/* Chat template, then tokens. `context` holds messages, tools, chat_template_kwargs' members and
 * add_generation_prompt; bos_token and eos_token are added by the engine. With
 * continue_final_message true the text ends with the last message's own (not blank). */
int engine_render_chat(const struct engine *engine, const cJSON *context, struct arena *arena,
                       struct engine_ids *out, struct fault *fault);

/* Raw bytes of a token, possibly part of a character. 0 for ids outside the vocabulary. */
size_t engine_token_bytes(const struct engine *engine, int32_t id, const char **bytes);
/* The same for the first token of a text: SentencePiece's tokenizers put a space in front of a
 * text, and their decoders drop it again. */
size_t engine_first_bytes(const struct engine *engine, int32_t id, const char **bytes);
bool engine_token_is_special(const struct engine *engine, int32_t id);

/* ---- Requests ------------------------------------------------------------------------------ */

#define ENGINE_REPLICAS_MAX 64
#define ENGINE_TOP_MAX      20
#define ENGINE_CHOICES_MAX  128

/* Each includes those before it. */
enum engine_report {
    ENGINE_REPORT_NONE,
    ENGINE_REPORT_LENGTHS,
    ENGINE_REPORT_POSITIONS,
    ENGINE_REPORT_TRACE
};

struct engine_bias {
    int32_t token;
    float bias;
};

struct engine_stop {
    const char *text;
    size_t size;
};

/* A parameter of a policy by its name in requests: a number (truths: 0 or 1), or a word. Which
 * policy has which, and their ranges: paging/policy.c. */
struct engine_kv_option {
    const char *name;
    double number;    /* INFINITY allowed */
    const char *text; /* NULL for numbers */
};
#define ENGINE_KV_OPTIONS 16

/* The kv object of a request: absent members are -1 or NULL and take the engine's defaults. */
struct engine_kv {
    const char *policy;
    int32_t budget, buffer, chunk, sinks, recent;
    struct engine_kv_option options[ENGINE_KV_OPTIONS];
    int32_t option_count;
    bool reuse;  /* default true: continue a retained conversation where one matches */
    bool retain; /* default true: keep the state for the next turn */
    enum engine_report report;
};

struct engine_request {
    const int32_t *prompt;
    int32_t prompt_count; /* >= 1 */
    int32_t max_tokens;   /* >= 0; 0 only scores the prompt (echo) */
    int32_t min_tokens;
    float temperature, top_p, min_p, repetition, presence, frequency;
    int32_t top_k;
    uint64_t seed;        /* choice i is sampled with seed + i */
    int32_t choices;      /* n; 0 counts as 1 */
    int32_t top_logprobs; /* alternatives per token, <= ENGINE_TOP_MAX; -1 = no logprobs */
    bool prompt_logprobs; /* score the prompt too (echo); never reuses a conversation */
    bool ignore_eos;
    const struct engine_bias *bias;
    int32_t bias_count;
    const struct engine_stop *stops;
    int32_t stop_count;
    const int32_t *stop_ids;
    int32_t stop_id_count;
    struct engine_kv kv;
    uint8_t space[16];  /* conversations are found only within one space (key, salt, model name) */
    uint64_t hint;      /* of a client's session name, 0 = none: of conversations that serve equally
                           well the one with the same hint is continued; never a key */
    uint8_t client[16]; /* who asks, for fair shares; changes when the request runs, never its
                           answer */
};

/* Why a choice ended; the name is the label of metrics. One list makes enum and names. */
#define ENGINE_FINISH_MAP(X)                                                                       \
    X(STOP, "stop")     /* a stop string or token, or the model's own end */                       \
    X(LENGTH, "length") /* max_tokens */                                                           \
    X(ABORT, "abort")   /* cancelled, or the engine is closing */                                  \
    X(ERROR, "error")   /* see job->fault */

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
    int32_t rank;      /* by the raw model's logits, 1 = first; also for prompt tokens */
    uint32_t text_end; /* bytes of choice->text after this token */
};

struct engine_choice {
    struct engine_token *tokens; /* [max_tokens] */
    struct engine_top *top;      /* [max_tokens * top_logprobs] */
    char *text;                  /* answer bytes; special tokens give none */
    atomic_uint_fast32_t token_count;
    atomic_uint_fast32_t text_safe; /* bytes that may be shown: whole characters, no stop string in
                                       the making. Final (cut at a stop string) once finished */
    atomic_int finish;              /* enum engine_finish; release-stored last */
    int32_t stop_index;             /* which stop string ended it, -1 none */
    int32_t stop_token;             /* which stop or EOS token ended it, -1 none */
    /* the engine's */
    enum engine_finish ending; /* decided, not yet published */
    struct engine_choice *next;
};

/* One eviction: which entries each stream lost. */
struct engine_eviction {
    struct engine_eviction *next; /* the next in time */
    int32_t tokens;               /* T when it happened */
    int32_t *positions;           /* ascending, stream after stream */
    int32_t lengths[];            /* [layers * heads_kv]: how many of each stream */
};

/* What choice 0 keeps, for usage.kv_details; valid once the job is finished. */
struct engine_kv_details {
    char policy[32];
    int32_t budget;          /* -1 for full */
    int32_t seen_tokens;     /* T */
    int64_t kept_entries;    /* over all layers and heads */
    int64_t evicted_entries; /* by this conversation so far */
    int32_t dropped_tokens;  /* of a previous turn, dropped because the new prompt differs */
    int64_t bytes;           /* memory held: pages * page_bytes */
    int32_t *lengths;        /* [layers * heads_kv] when reported, else NULL */
    int32_t *positions;      /* concatenated, stream after stream, or NULL */
    struct engine_eviction *evictions; /* of this request, when its report is the trace */
    int32_t evictions_lost;            /* those without memory for a record */
};

struct engine_job {
    struct engine_request request;
    atomic_int cancel;
    atomic_int admitted;              /* 1 once it has its pages and its places */
    atomic_uint_fast32_t prompt_read; /* prompt tokens computed or found; grows step by step */
    atomic_int
        finished; /* 1 once every choice has its `finish`: the job is the submitter's again */
    struct engine_choice *choice; /* [choice_count], allocated by engine_submit, NULL before */
    int choice_count;
    int replica;                        /* which one computes it; set by engine_submit */
    struct engine_token *prompt_tokens; /* [prompt_count] when prompt_logprobs; [0] is unscored */
    struct engine_top *prompt_top;      /* [prompt_count * top_logprobs] */
    /* valid once finished */
    struct fault fault;
    int32_t cached_tokens; /* prompt tokens not computed */
    bool cut; /* cached tokens are a conversation's first or a snapshot's, no whole turn */
    struct engine_kv_details kv;
    int64_t queued_ns, admitted_ns, first_token_ns, finished_ns; /* clock_ns; 0 = never */
    int64_t evict_ns; /* time spent evicting for this job */
    /* the engine's */
    struct engine_job *next;
    int choices_left; /* not ended yet */
    int stage;        /* enum sched_stage: who has the job, checked where it changes hands */
    int client;       /* its client's row, see engine/queue.h */
    uint64_t arrival; /* its number among the jobs of its replica */
    uint64_t round;   /* of admission, in which it was tried last */
    int64_t pages;    /* that each choice needs from a fresh start; 0 = unknown */
};

/* What a reader sees of a choice. `finish` is loaded before the counts: a count that was loaded
 * first could be older than the end, and the tokens between the two would be lost. */
struct engine_seen {
    int finish;      /* enum engine_finish; once it is set the others are final */
    uint32_t tokens; /* of choice->tokens */
    size_t text;     /* bytes of choice->text that may be shown */
};

static inline struct engine_seen engine_see_choice(const struct engine_choice *choice) {
    struct engine_seen seen;
    seen.finish = atomic_load_explicit(&choice->finish, memory_order_acquire);
    seen.tokens = (uint32_t)atomic_load_explicit(&choice->token_count, memory_order_acquire);
    seen.text = (size_t)atomic_load_explicit(&choice->text_safe, memory_order_acquire);
    return seen;
}

/* Is the job finished? Then *tokens, of all its choices, is final; it is loaded second, likewise.
 */
static inline bool engine_see_job(const struct engine_job *job, uint32_t *tokens) {
    bool finished = atomic_load_explicit(&job->finished, memory_order_acquire) != 0;
    *tokens = 0;
    for (int i = 0; i < job->choice_count; i++)
        *tokens += engine_see_choice(&job->choice[i]).tokens;
    return finished;
}

/* Places in the bounded queues, one for each job of a request, taken before any work is done for
 * it: all or none, false = full (503). The engine gives a place back when its job is admitted or
 * ends; jobs that are never submitted give theirs back with engine_queue_leave. Loop thread. */
bool engine_queue_enter(struct engine *engine, int jobs);
void engine_queue_leave(struct engine *engine, int jobs);

/* Checks a request without side effects (any thread): token ids in range, lengths against
 * max_model_len (ERR_CONTEXT), kv parameters, pool size (ERR_LIMIT). fault->field names the OpenAI
 * request field. */
int engine_check(const struct engine *engine, const struct engine_request *request,
                 struct fault *fault);

/* Takes the job (its queue place was entered). The engine allocates the output arrays here:
 * ERR_NOMEM, ERR_STOPPED leave the job with the caller and the place entered. Loop thread. */
int engine_submit(struct engine *engine, struct engine_job *job);
void engine_job_close(struct engine_job *job); /* frees what submit and the engine allocated */

/* ---- Observation (any thread) -------------------------------------------------------------- */

struct engine_sequence_row {
    int replica;
    int32_t tokens, held; /* T; entries per stream on average */
    int32_t prompt_count, output_count;
    char policy[32];
    int32_t budget;
    int64_t pages_reserved;
    bool prefilling;
};

struct engine_conversation_row {
    uint64_t id;
    int replica; /* in whose memory it is; -1 = only on disk */
    int32_t tokens, held;
    char policy[32];
    int32_t budget;
    int64_t pages;   /* in memory; 0 = only on disk */
    int64_t idle_ns; /* since its last use, here or in an earlier process */
    uint8_t space[16];
    uint64_t hint;
    bool superseded;    /* a later turn went on from it */
    int64_t disk_bytes; /* its file in the state directory; 0 = none */
};

/* Why a request that could have continued a conversation started from nothing, or from fewer tokens
 * than it repeats. One list makes enum and names. */
#define ENGINE_MISS_MAP(X)                                                                         \
    X(NEW, "new")               /* nothing in its space shares its first tokens */                 \
    X(DIVERGED, "diverged")     /* it differs before the end of the prompt that was answered */    \
    X(WHOLE, "whole")           /* it adds no token to a prompt that was answered */               \
    X(SETTINGS, "settings")     /* a conversation with these tokens has other kv settings */       \
    X(FORGOTTEN, "forgotten")   /* the conversation was removed to make room */                    \
    X(TOO_LARGE, "too_large")   /* continuing would need more pages than there are */              \
    X(DAMAGED, "damaged")       /* its state file was refused */                                   \
    X(UNREADABLE, "unreadable") /* its state file could not be read: no memory, a disk error */

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
 * over replicas and the rows of /metrics; a new counter is a row here and the line that counts. A
 * counter whose metric is NULL is shown by server/stats.c in a form of its own, or not at all. */
#define ENGINE_COUNTER_MAP(X)                                                                      \
    X(steps, "keepd_steps_total", "Engine steps.")                                                 \
    X(computed_tokens, NULL, NULL) /* of prompts */                                                \
    X(cached_tokens, NULL, NULL)   /* of prompts: found in conversations */                        \
    X(generation_tokens, NULL, NULL)                                                               \
    X(evictions, "keepd_evictions_total", "Evictions: one sequence brought down to its budget.")   \
    X(preemptions, "keepd_preemptions_total", "Always 0: reservations are exact.")                 \
    X(conversation_hits, "keepd_conversation_hits_total",                                          \
      "Requests that went on from a conversation.")                                                \
    X(conversation_cuts, "keepd_conversation_cuts_total",                                          \
      "Of these: from its first tokens only, as another dialogue that begins alike.")              \
    X(conversation_misses, "keepd_conversation_misses_total",                                      \
      "Requests that started without a conversation.")                                             \
    X(state_restored, "keepd_state_restored_total", "Conversations read back from disk.")          \
    X(state_failed, "keepd_state_failed_total", "Conversations that could not be written.")        \
    X(state_lost, "keepd_state_lost_total",                                                        \
      "Conversations that had to leave memory and could not be written.")                          \
    X(copied, NULL, NULL) /* blocks of conversations, out of the cache and into it */

struct engine_counters {
#define X(name, metric, help) uint64_t name;
    ENGINE_COUNTER_MAP(X)
#undef X
    uint64_t conversation_lost[ENGINE_MISS_COUNT]; /* by reason, of requests that wanted one */
    struct hist eviction_seconds, iteration_tokens;
};

static inline void engine_counters_add(struct engine_counters *sum,
                                       const struct engine_counters *one) {
#define X(name, metric, help) sum->name += one->name;
    ENGINE_COUNTER_MAP(X)
#undef X
    for (int i = 0; i < ENGINE_MISS_COUNT; i++)
        sum->conversation_lost[i] += one->conversation_lost[i];
    hist_merge(&sum->eviction_seconds, &one->eviction_seconds);
    hist_merge(&sum->iteration_tokens, &one->iteration_tokens);
}

/* Published after every step; a copy. Of one replica, or of all: then counts are sums, and
 * progress_ns is that of the busy replica that has been silent for longest. The state directory is
 * one for all; its counts are the first replica's. */
struct engine_snapshot {
    int jobs; /* submitted and not finished */
    int running, waiting, conversations;
    /* Pools of ranks are equally large: pages are those of one, of the fullest. */
    int64_t pages_total, pages_used, pages_reserved, pages_retained;
    int64_t pages_superseded; /* of those retained: states that a later turn went on from */
    int64_t progress_ns; /* clock_ns when those who ask last got on: a step, or, where the first to
                            wait needs the state directory, a piece read or written there */
    bool stopped;        /* the backend failed: every job now ends with an error; restart */
    /* Gauges: of running sequences and last states; of superseded states, the first to go. */
    uint64_t entries_kept, entries_superseded;
    uint64_t entries_evicted, rank_cap_hits; /* counted by the backend */
    struct engine_counters counters;
    /* The state directory; all 0 without one. */
    int conversations_on_disk;
    int64_t state_bytes;
    uint64_t state_written;
    uint64_t state_refused; /* files that were damaged, forged or of another format */
};
void engine_snapshot(struct engine *engine, struct engine_snapshot *out);
void engine_replica_snapshot(struct engine *engine, int replica, struct engine_snapshot *out);

/* Rows for GET /kv; returns how many were written. */
int engine_sequences(struct engine *engine, struct engine_sequence_row *rows, int max);
/* Of one space, with one id; NULL and 0: of all. */
struct engine_conversation_filter {
    const uint8_t *space; /* [16] */
    uint64_t id;
};
static inline bool engine_conversation_is(const struct engine_conversation_filter *filter,
                                          const uint8_t space[16], uint64_t id) {
    return (filter->id == 0 || filter->id == id) &&
           (filter->space == NULL || memcmp(filter->space, space, 16) == 0);
}
int engine_conversations(struct engine *engine, const struct engine_conversation_filter *filter,
                         struct engine_conversation_row *rows, int max);

/* ---- Deleting conversations (loop thread) -------------------------------------------------- */

/* One order to delete; it must stay until `done`. */
struct engine_delete {
    uint64_t id;
    int result;      /* 0, or ERR_NOTFOUND; valid once done */
    atomic_int done; /* release-stored last; `wake` is called after it */
    /* the engine's */
    atomic_int replicas_left; /* which have not looked yet */
    atomic_bool found;
};

#define ENGINE_DELETES_MAX 64

/* Forgets the conversation and the superseded one it came from, in memory and on disk, before the
 * next step; requests that already go on from it keep what they have. ERR_FULL: too many orders
 * wait. ERR_STOPPED: the engine has not started or has ended. Neither takes the order. */
int engine_conversation_delete(struct engine *engine, struct engine_delete *order);

#endif
