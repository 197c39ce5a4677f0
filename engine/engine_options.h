/* Options of an engine, and the facts about one that was opened or checked. */
#ifndef KEEPD_ENGINE_ENGINE_OPTIONS_H
#define KEEPD_ENGINE_ENGINE_OPTIONS_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "picture/picture.h"

struct engine;

#define ENGINE_REPLICAS_MAX 64

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

/* Asks for a policy that needs gates: by its name, or by a budget where the engine chooses. */
bool engine_wants_gates(const struct engine_options *options);

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

#endif
