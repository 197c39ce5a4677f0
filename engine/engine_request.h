/* Requests: a prompt, how its answers are drawn, and what is kept of its cache. */
#ifndef KEEPD_ENGINE_ENGINE_REQUEST_H
#define KEEPD_ENGINE_ENGINE_REQUEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/engine_options.h"
#include "picture/picture.h"

struct engine_constraint;

#define ENGINE_TOP_MAX     20 /* max_logprobs, unless the options have another number */
#define ENGINE_CHOICES_MAX 128
#define ENGINE_JUDGED_MAX  4

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
    /* With think_bounded, and tokens of reasoning: after think_budget of them, or up to three more
     * that complete a character, think_end follows. */
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

#endif
