/* The engine serves one model on one or several replicas; each replica has its own backend and
 * thread. This header is everything that the server may know about the engine.
 *
 * Life: engine_open (loads, blocking, reports progress) -> engine_start -> submit jobs ->
 * engine_drain -> engine_close. Text functions work on immutable data and may be called from any
 * thread between open and close. engine_submit and the queue functions belong to one thread, the
 * loop. tests/fake_engine.c implements this header without a model.
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
 * every choice as if nothing was shared. The streams of choice 0 are kept as the conversation.
 *
 * Conversations. A request that extends a conversation continues a copy-on-write fork of it. The
 * conversation itself stays, so that a retry, another last turn or several questions on one history
 * each compute only their new tokens. Once the new turn is kept, the conversation that it continued
 * is `superseded`: it is removed first when room is needed. A dialogue keeps at most one superseded
 * conversation. A conversation that several turns continued is not superseded. With `state_dir`
 * conversations outlive the process, see engine/disk/store.h.
 *
 * Replicas. Each replica has its own queue. A job goes to the replica whose conversation saves it
 * most tokens; if no replica has such a conversation, to the least loaded. A replica whose queue is
 * full receives no jobs: the job then starts on another replica, without a conversation if
 * necessary, and is refused only when every queue is full. From the same starting state every
 * replica gives the same answer. */
#ifndef KEEPD_ENGINE_ENGINE_H
#define KEEPD_ENGINE_ENGINE_H

#include <cjson/cJSON.h>
#include <math.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"
#include "base/hist.h"
#include "constrain/constrain.h"
#include "picture/picture.h"

struct engine;

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

/* The engine chooses the value of a text option that is absent or "auto". */
static inline bool engine_chooses(const char *option) {
    return !option || strcmp(option, "auto") == 0;
}

#define ENGINE_ENDS_MAX 18 /* tokens that end an answer: of the configuration and of the texts */

/* A text to be put in front of texts that become vectors, and its name. */
struct engine_prompt {
    const char *name, *text;
};

/* How a text becomes one vector: the last layer's outputs behind the final norm, of its last token,
 * of its first, or their mean over all tokens. NONE: a text is read to be answered. */
enum engine_pooling {
    ENGINE_POOL_NONE,
    ENGINE_POOL_LAST,
    ENGINE_POOL_MEAN,
    ENGINE_POOL_CLS,
    ENGINE_POOL_NEXT,  /* no vector: how likely some tokens are next (engine_request.judged) */
    ENGINE_POOL_LABELS /* no vector: the logits of engine_info.labels */
};

/* Facts about a model, found by a check of the options (check_only). */
struct engine_found {
    char kv_policy[32], kv_dtype[8];
    int kv_budget; /* 0: none */
    bool has_gates;
    const char *gates_from;  /* as in engine_info */
    char gates_cached[4096]; /* where gates_cache has this model's gates, whether or not they are
                                there; "" = nowhere, or not looked for */
    int trained_budget;      /* the budget that the gates were trained for; 0 = unknown */
    bool whole_texts;        /* as in engine_info */
    int max_model_len;
    int64_t pool_bytes; /* the cache of one rank; a start with this as kv_pool_bytes is the same */
    int64_t memory_bytes;         /* the most that a start takes: weights, caches, buffers, texts */
    int64_t conversation_bytes;   /* at the budget, or at max_model_len without one */
    struct picture_form pictures; /* how the model sees them; of kind NONE it takes none */
    int draft_places; /* tokens that the draft model remembers of a text; 0: there is none */
    int64_t draft_text_bytes;
    int32_t eos[ENGINE_ENDS_MAX];
    int eos_count;
    char *tool_template; /* template of chats with tools; the caller frees it. NULL: none */
};

/* The end of a text that needs more positions than the model has: the request is refused, or its
 * sequence is shifted (kernels/places.h). DEFAULT of a request: the engine's. DEFAULT of the
 * engine: shift where a request's policy and settings can be shifted, otherwise error. */
enum engine_overflow { ENGINE_OVERFLOW_DEFAULT, ENGINE_OVERFLOW_ERROR, ENGINE_OVERFLOW_SHIFT };

/* How tokens are chosen by requests that do not say it; NAN and, of top_k, -1: not said here. */
struct engine_sampling {
    float temperature, top_p, min_p, repetition;
    int top_k; /* 0 = all tokens */
};

#define ENGINE_DRAFT_NONE "none" /* engine_options.draft_model */

struct engine_options {
    const char *model_dir;
    const char *chat_template; /* as text_open has it; NULL or "" = the model's */
    const char *gates;         /* NULL = found: beside the model, else in gates_cache; "" = none */
    const char *gates_cache;   /* folder of gates that were fitted here; NULL or "" = none */
    bool gates_fitted;         /* `gates`, or those in gates_cache, were fitted by this start */
    const char *kv_policy;     /* "auto": global if the model has gates, otherwise full */
    int kv_budget, kv_buffer, kv_chunk;
    bool kv_budget_given;  /* the budget was asked for: a policy without one is worth a warning */
    int kv_budget_max;     /* cap for requests; 0 = none */
    int64_t kv_pool_bytes; /* 0 = chosen: all free memory of a device; on the host by max_num_seqs
                              and the budget, at most half of the free memory */
    int64_t kv_pool_most;  /* bound on the size that is chosen; 0 = none */
    enum engine_overflow kv_overflow; /* SHIFT: refused if the default policy cannot be shifted */
    const struct engine_sampling *sampling; /* in place of the model's; NULL = the model's */
    const char *kv_dtype; /* "auto" (as weights; bf16 for f16), "f32", "bf16", "fp8", "fp8_e4m3",
                             "q8", "q4" */
    int max_num_seqs;     /* sequences running at once */
    int max_num_batched_tokens; /* rows per step */
    int step_stretch; /* percent: the duration of a step with prompts beside answers; 0 = as long as
                         its rows take */
    int max_model_len;           /* 0 = the model's */
    int max_queue;               /* bound on waiting jobs */
    int max_conversations;       /* retained between turns */
    int max_choices;             /* n of one request; 0 = as many as may run at once */
    int max_logprobs;            /* alternatives of one token; 0 = ENGINE_TOP_MAX */
    int data_parallel_size;      /* number of replicas, each with the limits above; 0 counts as 1 */
    int tensor_parallel_size;    /* ranks of each replica: 1, 2, 4 or 8; 0 counts as 1 */
    int kv_rank_cap;             /* percent of an even share, see kern_cache_options; 0 = none */
    int threads;                 /* compute threads of all replicas together; 0 = one per core */
    const char *device;          /* "auto", "cpu", "cuda": see engine/backend.h */
    const char *cpu_path;        /* see kernels/cpu/cpu.h */
    const char *cpu_activations; /* a name of enum cpu_activations; NULL: auto */
    int drafts; /* drafted tokens of a sequence in one step: engine/steps/sched_draft.c;
                   0..DRAFT_MAX */
    /* guesses tokens: engine/steps/drafter.h; NULL or "" = the block of the model's own files that
     * predicts further tokens, if they have one; ENGINE_DRAFT_NONE = nothing */
    const char *draft_model;
    int draft_tokens;   /* tokens that it remembers of a text */
    const char *mmproj; /* GGUF file with an encoder of pictures; NULL or "" = that of the model's
                           directory, if it has one that keepd can use */
    /* LoRA adapters (model/adapter.h) that are loaded with the model, [adapter_count], "NAME=PATH";
     * the folder from which more may be loaded later, NULL or "" = none; bounds on all together. */
    char *const *adapters;
    size_t adapter_count;
    const char *adapter_dir;
    int max_adapters;
    int64_t adapter_bytes;
    bool random_weights;
    const char *pooling;      /* "auto" or NULL: as the model's files say, otherwise last; "last",
                                 "mean", "cls": enum engine_pooling */
    const char *quantization; /* weight format: NULL or "none" as in the files, "fp8", "q8", "q4" */
    int calibrate;            /* see model_options; of engine_save */
    bool gates_follow;        /* with check_only: a start will have gates */
    bool check_only; /* engine_open checks without loading weights: it refuses the same options, and
                        returns 0 with *out = NULL when it finds no error */
    const uint8_t *space_key; /* [16] engine_info.space_key; NULL = as it says */
    const char *state_dir;    /* keeps conversations across restarts; NULL or "" = none */
    int64_t state_bytes;      /* bound on all files in state_dir together; the oldest are deleted */
    int state_idle_seconds;   /* a conversation is written after it was unused for this long */
    struct engine_found *found; /* filled in by a check_only call that succeeds; may be NULL */
    /* Bytes of the model that were read, of all, during open; false: open ends with ERR_STOPPED
     * before more of them are read. May be NULL. */
    bool (*progress)(void *arg, uint64_t done, uint64_t total, const char *what);
    void (*wake)(void *arg); /* called on a replica's thread after a step that changed a job, for
                                uv_async_send */
    void *arg;
};

/* Loads the model and opens the replicas. On failure fault->field is the option's name without its
 * dashes ("kv-policy") or, for a fault of the model, the name of a file, field or tensor. */
int engine_open(const struct engine_options *options, struct engine **out, struct fault *fault);
/* Returns the bytes that are free where a model with these options (device, replicas, ranks) would
 * be held: on its devices together, or in the host's memory. */
int64_t engine_unused_memory(const struct engine_options *options);
int engine_start(struct engine *engine);
void engine_drain(struct engine *engine); /* finishes accepted jobs only; returns at once */
bool engine_idle(struct engine *engine);  /* no job is queued or running */
void engine_close(struct engine *engine); /* aborts the remaining jobs (ABORT), joins, frees */

/* The key of spaces that engines with this state_dir (NULL or "" = none) have in common: that of
 * the directory, which is made if it is not there, or a random one. */
int engine_space_key(const char *state_dir, uint8_t key[16], struct fault *fault);

/* Describes a model for people, one line for each fact that can be read, and reports the fault that
 * engine_open would report. *tool_template: the template of chats with tools, freed by the caller;
 * NULL where there is none. On failure returns engine_open's code, and the last line of `out`
 * states the fault. Loads no weights. */
int engine_inspect(const struct engine_options *options, struct buf *out, char **tool_template,
                   struct fault *fault);

/* Saves the model with its matrices rounded as `quantization` says (model/save.h), after the checks
 * of engine_open on a CPU. *bytes: of the weights that were written. */
int engine_save(const struct engine_options *options, const char *to, size_t *bytes,
                struct fault *fault);

/* ---- Fitting gates ---- */

#define ENGINE_FIT_TOKENS 1024 /* most tokens of a text */

enum engine_fit_work { ENGINE_FIT_WAITING, ENGINE_FIT_MEASURING, ENGINE_FIT_FITTING };

/* The file that is written: a new one, under a name that is not taken; one that takes the place of
 * an older one; or one that is fitted once for all: the file that another process has written in
 * the meantime will do. */
enum engine_fit_out { ENGINE_FIT_NEW, ENGINE_FIT_REPLACE, ENGINE_FIT_ONCE };

/* Text that the model reads: UTF-8, divided into texts of ENGINE_FIT_TOKENS tokens. */
struct engine_fit_source {
    const char *text;
    size_t size;
    bool chats; /* the text is chats: what a template gets, JSON on a line for each, with line
                   ends */
    struct picture *const *pictures; /* [picture_count] all chats' pictures, in order */
    int picture_count;
};

struct engine_fit {
    const struct engine_fit_source *sources; /* [source_count] */
    int source_count;
    const char *out; /* the gates' file */
    enum engine_fit_out how;
    /* File of measurements (engine/fit_work.h), with which a later fit of this model goes on; NULL:
     * none. While another process uses it, a fit with ENGINE_FIT_NEW goes without it, and others
     * wait. */
    const char *work;
    int minutes; /* 0: as long as it takes; otherwise measuring ends after three quarters */
    uint64_t seed;
    /* Called once where it waits, when measuring and fitting begin, and after every text that it
     * measures and every step: then false ends the work with what there is. `lost`: the part of
     * what entries of texts held out are worth that soft evictions lose, INFINITY: unknown. May be
     * NULL. */
    bool (*progress)(void *arg, enum engine_fit_work work, int done, int total, double lost);
    void *arg;
};

/* A text that the fit has not learnt from. */
struct engine_fit_text {
    int32_t *ids;
    int count;
    struct picture **pictures; /* [picture_count] each with a count that the text holds */
    struct picture_rows *picture_rows;
    int picture_count, picture_row_count; /* as in struct engine_request */
};

struct engine_fitted {
    bool found;         /* another process has written the file, ENGINE_FIT_ONCE; the rest is 0 */
    int texts, entries; /* measured, and entries of each */
    int resumed;        /* texts that an earlier fit had measured */
    int steps, best;    /* as in struct fit_result (fit/fit.h), also the next two */
    double before, lost;
    struct engine_fit_text *held_out; /* [held_out_count] freed by engine_fitted_close */
    int held_out_count;
};

/* Fits retention gates to the model (fit/fit.h), as it is served with these options, and writes
 * them. Memory: that of the model, one text's cache, and at most ENGINE_FIT_BYTES of measurements;
 * with a work file that of one text instead, until the model is closed, and then of all of them, at
 * most what the model took, ENGINE_FIT_BYTES more, and ENGINE_FIT_FILE_BYTES.
 * Texts with pictures also take the encoder, and the rows of one text's tiles.
 * On failure fault->field is as in engine_open, or "text" or "out", and nothing is written. */
#define ENGINE_FIT_BYTES      ((size_t)160 << 20)
#define ENGINE_FIT_FILE_BYTES ((size_t)768 << 20)
int engine_fit_gates(const struct engine_options *options, const struct engine_fit *fit,
                     struct engine_fitted *out, struct fault *fault);
void engine_fitted_close(struct engine_fitted *fitted);
/* Asks for a policy that needs gates: by its name, or by a budget where the engine chooses. */
bool engine_wants_gates(const struct engine_options *options);
/* Checks what engine_fit_gates would refuse, and says what a start would find: found->gates_from
 * and gates_cached. The caller frees found->tool_template. */
int engine_find_gates(const struct engine_options *options, struct engine_found *found,
                      struct fault *fault);
/* Takes out of the options what bounds the requests of a server and would refuse those of a fit:
 * the cap on budgets, and what happens beyond the model's positions. */
static inline void engine_fit_options(struct engine_options *own) {
    own->kv_budget_max = 0;
    own->kv_budget_given = false;
    own->kv_overflow = ENGINE_OVERFLOW_DEFAULT;
}

/* Constant facts, valid from open to close. */
struct engine_info {
    const char *model_dir;
    char family[32];
    char backend[32];        /* "cpu-amx" */
    const char *activations; /* how products round activations, until the engine is closed; NULL:
                                in one way for all weights */
    char kv_policy[32];      /* the default policy of requests */
    int kv_budget, kv_buffer, kv_chunk, kv_budget_max;
    char kv_dtype[8];
    int speculate;           /* tokens that are guessed for a step, at most */
    const char *draft_model; /* path; NULL: there is none */
    int64_t draft_bytes;     /* memory of weights, and of a replica's cache */
    int draft_tokens;        /* tokens that it remembers of a text */
    bool has_gates;
    const char *gates_from; /* none, given, beside, cache, fitted, random: engine_options.gates */
    int trained_budget;     /* the budget that the gates were trained for; 0 = unknown */
    int layers, heads_kv, head_dim, vocab; /* layers that hold entries; heads_kv: the most in one */
    const int *layer_heads; /* [layers] KV heads of each, where they differ; NULL: heads_kv */
    int width;              /* numbers of a text's vector */
    bool whole_texts;       /* the model sees texts both ways: vectors alone, no answers */
    int labels;             /* a model that judges texts, or pairs of them, by so many numbers and
                               makes no vectors; 0: it does not */
    bool label_sigmoid;     /* the score of a single label is its sigmoid, else the number itself */
    enum engine_pooling
        pooling; /* the way of requests for vectors; NONE: they are refused, because */
    const char *pooling_other; /* the model's files ask for this, which keepd has not */
    bool loads_adapters;       /* engine_adapter_load has a folder */
    int max_adapters;
    const struct engine_prompt *prompts; /* [prompt_count] that the model's files name */
    int prompt_count;
    int max_model_len, max_num_seqs, max_queue;
    int max_choices;
    int max_logprobs; /* alternatives of one token, at most the vocabulary */
    uint8_t
        space_key[16]; /* secret key for hashing request.space. Random; with a state_dir it is
                          derived from the key there, so that spaces stay valid after a restart */
    int replicas;
    int threads;
    int64_t pages_total, page_bytes; /* pages_total: of one rank of a replica */
    int page_slots;                  /* entries of a page; where layers differ, the most */
    int64_t token_entries;           /* such entries that a token takes of a rank's pool */
    int pool_ranks; /* ranks of a replica that hold different heads, each with its own pool; 0 = 1
                     */
    size_t weight_bytes;
    bool has_chat_template;
    const char *chat_template;           /* source of the template; NULL = none */
    const char *tool_template;           /* template of chats with tools; may be the same */
    const struct picture_form *pictures; /* how the model sees pictures; NULL: it does not */
    const char *bos_token, *eos_token;   /* "" = none */
    const int32_t *eos;                  /* [eos_count] the tokens that end an answer */
    int eos_count;
    struct engine_sampling sampling; /* the options' values, else the model's */
};

/* Returns `own`, with the members that `chosen` (NULL: none) says in their place. */
static inline struct engine_sampling engine_choose_sampling(struct engine_sampling own,
                                                            const struct engine_sampling *chosen) {
    if (!chosen) return own;
    if (!isnan(chosen->temperature)) own.temperature = chosen->temperature;
    if (!isnan(chosen->top_p)) own.top_p = chosen->top_p;
    if (!isnan(chosen->min_p)) own.min_p = chosen->min_p;
    if (!isnan(chosen->repetition)) own.repetition = chosen->repetition;
    if (chosen->top_k >= 0) own.top_k = chosen->top_k;
    return own;
}

const struct engine_info *engine_info(const struct engine *engine);

/* ---- Adapters (any thread) ---- */

#define ENGINE_ADAPTER_NAME 129 /* bytes, with the NUL */

/* A LoRA adapter that a request uses, from engine_adapter_take to engine_adapter_leave, which comes
 * after the request's last job is finished. `digest` is that of its numbers: part of the space of
 * its conversations, so that none is continued with another adapter, or without it. */
struct engine_adapter {
    int32_t number; /* 0: none */
    uint8_t digest[32];
};

struct engine_adapter_row {
    char name[ENGINE_ADAPTER_NAME];
    uint8_t digest[32];
    int rank;
    int64_t bytes; /* on each replica */
    int users;     /* requests that use it now */
    uint64_t requests;
};

/* Finds an adapter by its name; false: there is none. `out` NULL: it is not taken. */
bool engine_adapter_take(struct engine *engine, const char *name, struct engine_adapter *out);
void engine_adapter_leave(struct engine *engine, int32_t number);
/* Loads an adapter from a file or directory in options.adapter_dir, by its path in it or a whole
 * one, and waits until all replicas have it: seconds. A replica makes no step while it copies the
 * numbers to its backend. The fault names files by their paths in the folder. ERR_UNSUPPORTED:
 * there is no such folder; ERR_NOTFOUND of "lora_path": the folder has no such path; ERR_INVALID:
 * the name is taken; ERR_LIMIT; ERR_STOPPED; the faults of adapter_read. */
int engine_adapter_load(struct engine *engine, const char *name, const char *path,
                        struct fault *fault);
/* No request finds it from here on; its memory is free when the last one that has it has ended.
 * ERR_NOTFOUND. */
int engine_adapter_unload(struct engine *engine, const char *name);
/* Returns the number of rows written. */
int engine_adapters(struct engine *engine, struct engine_adapter_row *rows, int max);
#define ENGINE_ADAPTERS_MAX 64

/* Names of the eviction policies that this model can be served with on this backend; NULL past the
 * end. */
const char *engine_policy_at(const struct engine *engine, int index);

/* ---- Text (any thread) ---- */

struct engine_ids {
    int32_t *ids; /* in the caller's arena */
    size_t count;
    size_t second;                     /* the place of a pair's second text; else 0 */
    struct picture_rows *picture_rows; /* [picture_row_count] of a chat, in the caller's arena */
    int picture_row_count;
};

/* Tokenizes plain text as a completion prompt. Special tokens in the text are NOT recognised unless
 * `parse_special`; `add_special` runs the model's post-processor (BOS). */
int engine_tokenize(const struct engine *engine, const char *text, size_t size, bool add_special,
                    bool parse_special, struct arena *arena, struct engine_ids *out,
                    struct fault *fault);

/* A member of the context below, which the template does not see: true where the chat stands behind
 * other tokens, so that bos_token is "". */
#define ENGINE_CHAT_LATER "begins_later"

/* Tokenizes two texts as the model's tokenizer joins them. `most` above 0: the second text is
 * shortened at its end so that there are no more tokens, if the first one leaves room for it.
 * ERR_UNSUPPORTED: the tokenizer joins none. */
int engine_tokenize_pair(const struct engine *engine, const char *first, const char *second,
                         size_t most, struct arena *arena, struct engine_ids *out,
                         struct fault *fault);

/* A member of a message with pictures: for each of them, in order, how many bytes of the content
 * are behind it. */
#define ENGINE_CHAT_PICTURE_ENDS "picture_ends"

/* A chat. `context` holds messages, whose contents are strings, tools, chat_template_kwargs'
 * members and add_generation_prompt; the engine adds bos_token and eos_token. With
 * continue_final_message true the text ends with that of the last message, which must not be blank.
 */
struct engine_chat {
    const cJSON *context;
    const struct picture *const *pictures; /* all messages' pictures, in order */
    int picture_count;
    int longest; /* tokens */
};

/* Renders the chat template and tokenizes the result. ERR_LIMIT: it has more than `longest` tokens.
 */
int engine_render_chat(const struct engine *engine, const struct engine_chat *chat,
                       struct arena *arena, struct engine_ids *out, struct fault *fault);

/* Renders a template's source, without the model's strings. The text is in the arena. */
int engine_render_template(const char *source, const cJSON *context, struct arena *arena,
                           const char **out, struct fault *fault);

/* Returns how many tokens of the rendered chat its system messages and tools fix: the border of a
 * request (struct engine_request); 0: none worth keeping. */
int32_t engine_chat_border(const struct engine *engine, const cJSON *context,
                           const struct engine_ids *ids);

/* Returns the raw bytes of a token, possibly part of a character; 0: the id is not in the
 * vocabulary. */
size_t engine_token_bytes(const struct engine *engine, int32_t id, const char **bytes);
/* Returns the bytes of the first token of a text: SentencePiece's tokenizers put a space in front
 * of a text, and their decoders drop it again. */
size_t engine_first_bytes(const struct engine *engine, int32_t id, const char **bytes);
bool engine_token_is_special(const struct engine *engine, int32_t id);
/* Makes the special tokens of a text, such as the tags of calls, part of answers from now on: their
 * bytes are in the text, and constraints may allow them. Tokens that end answers stay special. Only
 * before the first request. */
void engine_show_tokens(struct engine *engine, const char *text, size_t size);
/* Returns whether no token of a text ends answers, so that all of it can be part of them. */
bool engine_can_show(const struct engine *engine, const char *text, size_t size);
/* Returns the vocabulary's own spelling of a token, which is valid UTF-8; 0 for ids outside the
 * vocabulary. */
size_t engine_token_name(const struct engine *engine, int32_t id, const char **name);
/* Writes the ids of rows that show a part of a tile, [rows->count]. Each holds 29 bits
 * of SHA-256 sums of the encoder's weights, the picture's digest, and the tile and its row; the
 * first one's mostly say how the rows stand (engine_grid_of). So equal ids mean equal entries, in
 * any process with this model: prompts, conversations and their files are compared by ids alone.
 * Needs engine_info.pictures. Any thread. */
void engine_picture_ids(const struct engine *engine, const struct picture *picture,
                        const struct picture_rows *rows, int32_t *ids);
/* Returns how many special tokens engine_tokenize adds in front of a text. */
int engine_added_before(const struct engine *engine);
int engine_added_after(const struct engine *engine); /* and behind it */

/* ---- Constraints (any thread) ---- */

/* A language that answers must belong to (constrain/constrain.h), compiled for this vocabulary. */
struct engine_constraint;

/* Compiles it, or finds it among those compiled before. Errors as constrain_open. Takes up to
 * seconds: not on the loop. The constraint stays valid until engine_constraint_close, which comes
 * after the last job that uses it is closed and before engine_close. ERR_BUSY, without a fault: as
 * many as may be are compiled now; ask again later, from a thread that others need meanwhile. */
int engine_constraint_open(struct engine *engine, const struct constrain_part *part,
                           struct engine_constraint **out, struct fault *fault);
void engine_constraint_close(struct engine *engine, struct engine_constraint *constraint);

/* ---- Requests ---- */

#define ENGINE_REPLICAS_MAX 64
#define ENGINE_TOP_MAX      20 /* max_logprobs, unless the options have another number */
#define ENGINE_CHOICES_MAX  128
#define ENGINE_JUDGED_MAX   4

/* How much a job reports about its cache. Each level includes the levels before it. */
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

/* The DRY penalty: engine/steps/dry.h. */
#define ENGINE_BREAKER_MAX  40   /* bytes of a sequence breaker */
#define ENGINE_DRY_LAST_MAX 8192 /* tokens that are compared */
struct engine_dry {
    float multiplier, base; /* 0: none; below 1: none */
    int32_t allowed, last;  /* tokens that may repeat; last tokens that are compared, -1: all */
    const struct engine_stop *breakers; /* texts of 1 to ENGINE_BREAKER_MAX bytes */
    int32_t breaker_count;
};

/* A loop, which ends an answer: engine/steps/loops.h. A block of `shortest` to `longest`
 * tokens that stands at the end `count` times, one behind the other. */
struct engine_loops {
    int32_t shortest, longest, count; /* count 0: none is looked for */
};

/* A parameter of a policy, by its name in requests: a number (booleans: 0 or 1) or a word.
 * paging/policy.c lists the parameters of each policy and their ranges. */
struct engine_kv_option {
    const char *name;
    double number;    /* INFINITY allowed */
    const char *text; /* NULL for numbers */
};
#define ENGINE_KV_OPTIONS 16

/* The most tokens of prompt and answer together, where sequences are shifted. */
#define ENGINE_SHIFTED_TOKENS (1 << 20)

/* The kv object of a request: absent members are -1 or NULL and take the engine's defaults. */
struct engine_kv {
    const char *policy;
    int32_t budget, buffer, chunk, sinks, recent;
    struct engine_kv_option options[ENGINE_KV_OPTIONS];
    int32_t option_count;
    bool reuse;  /* default true: continue a retained conversation that matches */
    bool retain; /* default true: keep the state for the next turn */
    int32_t ttl; /* seconds after its last use at which the kept state is deleted; 0 = none */
    bool pin;    /* other requests cannot displace the kept state, within pins_max */
    enum engine_overflow overflow;
    enum engine_report report;
    bool live; /* reports what choice 0 holds while it runs, too: struct engine_live */
};

/* The ids of a prompt's rows that show pictures, from this one on, lie beyond every vocabulary. */
#define ENGINE_PICTURE_IDS (1 << 30)

static inline bool engine_is_picture_id(int32_t id) {
    return id >= ENGINE_PICTURE_IDS;
}

/* A tile's rows of embeddings stand in rows and columns. The first one's id says in how many,
 * unless it is the only one: 10 bits for each below the flag, above ENGINE_GRID_DIGEST bits of the
 * digest. */
#define ENGINE_GRID_IDS    (3 << 29) /* with the flag, which other ids do not have */
#define ENGINE_GRID_SIDE   1023
#define ENGINE_GRID_DIGEST 9

struct engine_grid {
    int32_t rows, columns; /* 1 to ENGINE_GRID_SIDE; any other token stands alone */
};

static inline struct engine_grid engine_grid_of(int32_t id) {
    struct engine_grid grid = {1, 1};
    if (id < ENGINE_GRID_IDS) return grid;
    grid.rows = id >> (ENGINE_GRID_DIGEST + 10) & ENGINE_GRID_SIDE;
    grid.columns = id >> ENGINE_GRID_DIGEST & ENGINE_GRID_SIDE;
    if (grid.rows == 0) grid.rows = 1; /* no tile's: a damaged file's */
    if (grid.columns == 0) grid.columns = 1;
    return grid;
}

/* Returns the id of row number `row` of a tile; `digest`: bits of its identity. */
static inline int32_t engine_picture_id(struct engine_grid grid, int row, uint32_t digest) {
    const uint32_t sides = (uint32_t)grid.rows << 10 | (uint32_t)grid.columns;
    if (row > 0 || grid.rows * grid.columns == 1)
        return (int32_t)(ENGINE_PICTURE_IDS |
                         (digest & (ENGINE_GRID_IDS - ENGINE_PICTURE_IDS - 1)));
    return (int32_t)(ENGINE_GRID_IDS | sides << ENGINE_GRID_DIGEST |
                     (digest & ((1 << ENGINE_GRID_DIGEST) - 1)));
}

struct engine_request {
    const int32_t *prompt;
    int32_t prompt_count; /* >= 1 */
    /* The prompt's pictures, and which of its rows have the embeddings of which tile, ascending and
     * apart. The prompt has engine_picture_ids there. Like the prompt they are the submitter's. */
    const struct picture *const *pictures;
    int picture_count, picture_row_count;
    const struct picture_rows *picture_rows;
    int32_t border;     /* the first tokens of the prompt that other prompts may have, too, such as
                           those of a system message; a hint; 0 = unknown */
    int32_t max_tokens; /* >= 0; 0 only scores the prompt (echo) */
    int32_t min_tokens;
    /* Not NONE: the job ends when its prompt is read, and gives the prompt's vector. max_tokens is
     * 0 and choices at most 1. What kv says of policy and budget is not looked at: such a prompt
     * keeps all of its entries until its end. */
    enum engine_pooling pooling;
    int32_t second;        /* as in kern_span */
    int32_t dimensions;    /* the first numbers of the vector, which are kept; 0: all */
    const int32_t *judged; /* [judged_count] with ENGINE_POOL_NEXT, at most ENGINE_JUDGED_MAX */
    int32_t judged_count;
    float temperature, top_p, min_p, repetition, presence, frequency;
    int32_t top_k;
    float xtc_probability, xtc_threshold; /* struct kern_sample; 0 = off */
    uint64_t seed;                        /* choice i is sampled with seed + i */
    int32_t choices;                      /* n; 0 counts as 1 */
    int32_t top_logprobs;        /* alternatives per token, <= max_logprobs; -1 = no logprobs */
    bool prompt_logprobs;        /* score the prompt too (echo); never reuses a conversation */
    int32_t prompt_top_logprobs; /* alternatives per token of a scored prompt, 0 to max_logprobs */
    bool ignore_eos;
    /* Tokens that may be drafted in a step (engine/steps/sched_draft.c), and a text that the answer
     * probably resembles. They change when the answer comes, not the answer. */
    int32_t drafts; /* at most; 0: none, -1: as many as the options say */
    const int32_t *predicted;
    int32_t predicted_count;
    /* The language of the answers; NULL = anything. The end of an answer is possible where the text
     * is whole; where nothing may follow, the answer ends. Reasoning in front of the answer,
     * between the tokens think_begin and think_end (-1: the model has none), is free. */
    const struct engine_constraint *constraint;
    const char *constraint_field; /* name of the request field that gives it; NULL: unknown */
    int32_t think_begin, think_end;
    /* With think_bounded, and tokens of reasoning: after think_budget of them think_end follows. */
    bool think_bounded;
    int32_t think_budget;
    const struct engine_bias *bias;
    int32_t bias_count;
    struct engine_dry dry;
    struct engine_loops loops;
    const struct engine_stop *stops;
    int32_t stop_count;
    const int32_t *stop_ids;
    int32_t stop_id_count;
    struct engine_kv kv;
    int32_t adapter;   /* number of engine_adapter_take; 0: the model alone */
    uint8_t space[16]; /* only conversations of this space are found (key, salt, model name,
                          digest of the adapter) */
    uint64_t hint; /* hash of the client's session name, 0 = none: among conversations that serve
                      equally well, the one with this hint is continued; never a key */
    uint8_t client[16]; /* identifies the client for fair shares; affects when the request runs,
                           never its answer */
    uint8_t owner[16];  /* the client as its retained conversations know it, which outlive its
                           connections */
    bool others;        /* the server knows other clients, seen by the engine or not */
    int32_t weight;     /* the client's share in proportion to others'; 0 counts as 1 */
    int64_t pages_max;  /* pages that the client's running requests and retained conversations may
                           have together, on each replica; 0 = any */
    int64_t pins_max;   /* pages that the client's pinned conversations may have, on each replica */
};

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

/* One eviction: the entries that each stream lost. */
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

/* Takes places in the bounded queues, one for each job of a request, before any work is done for
 * it: all or none, false = full (503). The engine gives a place back when its job is admitted or
 * ends; the caller gives back the places of jobs that are never submitted with engine_queue_leave.
 * Loop thread. */
bool engine_queue_enter(struct engine *engine, int jobs);
void engine_queue_leave(struct engine *engine, int jobs);

/* The most tokens of a prompt and its answer together, with this kv object: the model's positions,
 * or ENGINE_SHIFTED_TOKENS where the sequence is shifted. An answer alone has at most
 * max_model_len. Any thread. */
int engine_longest(const struct engine *engine, const struct engine_kv *kv);

/* Checks the job's request (any thread): token ids in range, lengths against max_model_len
 * (ERR_CONTEXT), kv parameters, pool size (ERR_LIMIT), ERR_NOMEM. fault->field names the OpenAI
 * request field. Resolves the request's kv parameters, which the job then carries: the request must
 * not change any more. */
int engine_check(const struct engine *engine, struct engine_job *job, struct fault *fault);

/* Takes the job, which was checked and whose queue place was entered before. The engine allocates
 * the output arrays here. Any error leaves the job with the caller and the place entered. Loop
 * thread. */
int engine_submit(struct engine *engine, struct engine_job *job);
/* Frees what check, submit and the engine allocated. */
void engine_job_close(struct engine_job *job);

/* ---- Observation (any thread) ---- */

struct engine_sequence_row {
    int replica;
    int32_t tokens, held; /* tokens: T; held: entries per stream on average */
    int32_t prompt_count, output_count;
    char policy[32];
    int32_t budget;
    int64_t pages_reserved;
    bool prefilling;
};

struct engine_conversation_row {
    uint64_t id;
    int replica; /* replica that holds it in memory; -1 = only on disk */
    int32_t tokens, held;
    char policy[32];
    int32_t budget;
    int64_t pages;   /* in memory; 0 = only on disk */
    int64_t idle_ns; /* time since its last use, in this process or an earlier one */
    uint8_t space[16];
    uint64_t hint;
    bool superseded;    /* a later turn continued it */
    bool pinned;        /* makes no room for others */
    int32_t ttl;        /* seconds of idle time after which it is deleted; 0 = none */
    int64_t disk_bytes; /* size of its file in the state directory; 0 = none */
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
/* Selects conversations by space and by id; NULL and 0 select all. */
struct engine_conversation_filter {
    const uint8_t *space; /* [16] */
    uint64_t id;
};
static inline bool engine_conversation_is(const struct engine_conversation_filter *filter,
                                          const uint8_t space[16], uint64_t id) {
    return (filter->id == 0 || filter->id == id) &&
           (!filter->space || memcmp(filter->space, space, 16) == 0);
}
int engine_conversations(struct engine *engine, const struct engine_conversation_filter *filter,
                         struct engine_conversation_row *rows, int max);

/* ---- Orders about conversations (loop thread) ---- */

enum engine_order_kind {
    ENGINE_ORDER_DELETE, /* forget it, in memory and on disk */
    ENGINE_ORDER_WRITE   /* write it to the state directory now */
};

/* An order about one conversation; the caller must keep it until `done`. */
struct engine_order {
    enum engine_order_kind kind;
    uint64_t id;
    int result;      /* 0, or ERR_NOTFOUND; WRITE also ERR_UNSUPPORTED (such conversations are never
                        written), ERR_LIMIT (too large), ERR_IO, ERR_STOPPED; valid once done */
    atomic_int done; /* release-stored last; `wake` is called after it */
    /* Used by the engine only. */
    atomic_int replicas_left; /* replicas that have not answered yet */
    atomic_int
        code; /* the answer of a replica that has it, 0 before errors; ERR_NOTFOUND: none yet */
};

#define ENGINE_ORDERS_MAX 64

/* DELETE: deletes the conversation and the superseded one that it continued before the next step;
 * requests that already continue it keep their fork. WRITE: is done when the file is there. Errors
 * that do not take the order: ERR_FULL: too many orders wait; ERR_STOPPED: the engine has not
 * started or has ended. */
int engine_conversation_order(struct engine *engine, struct engine_order *order);

/* ---- Moving conversations (any thread; these calls wait for the disk) ---- */

/* A conversation leaves as its state file, and comes as one: signed, and checked before it is used.
 * All calls need a state directory: ERR_UNSUPPORTED. */

/* Opens the file of a conversation that was written; the caller closes *fd. ERR_NOTFOUND, ERR_IO.
 */
int engine_state_open(struct engine *engine, uint64_t id, int *fd, uint64_t *bytes,
                      struct fault *fault);

/* Returns the most bytes that a file may have that comes; -1: there is no state directory. */
int64_t engine_upload_max(const struct engine *engine);

struct engine_upload;
/* Begins to take a file. Only one of this space is accepted. ERR_NOMEM. */
int engine_upload_open(struct engine *engine, const uint8_t space[16], struct engine_upload **out,
                       struct fault *fault);
/* ERR_MALFORMED, ERR_INVALID, ERR_UNSUPPORTED, ERR_LIMIT, ERR_FULL, ERR_IO: see
 * engine/disk/store_move.h. After an error the upload can only be closed. */
int engine_upload_add(struct engine_upload *upload, const char *data, size_t size,
                      struct fault *fault);
/* The next request that repeats the conversation continues it. */
int engine_upload_end(struct engine_upload *upload, struct engine_conversation_row *row,
                      struct fault *fault);
void engine_upload_close(struct engine_upload *upload); /* NULL is allowed */

#endif
