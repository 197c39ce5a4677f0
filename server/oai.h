/* The OpenAI surface as data: request bodies in, answer texts out. Pure functions, any thread;
 * nothing here knows a socket. Field names in errors are JSON paths ("kv.budget"). */
#ifndef KEEPD_SERVER_OAI_H
#define KEEPD_SERVER_OAI_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"
#include "engine/engine.h"

/* ---- Errors -------------------------------------------------------------------------------- */

/* The error object of an answer. Strings without an array are static. */
struct oai_error {
    int status;       /* HTTP; 0 = none */
    const char *type; /* "invalid_request_error", ... */
    const char *code; /* NULL renders as null */
    char param[128];  /* "" renders as null */
    char message[512];
};

/* Fills *error and returns -1, so that `return oai_refuse(...)` reads well. */
int oai_refuse(struct oai_error *error, int status, const char *code, const char *param,
               const char *format, ...) __attribute__((format(printf, 5, 6)));
/* What a fault of base, engine or JSON means to a client; returns -1. */
int oai_refuse_fault(struct oai_error *error, const struct fault *fault);
void oai_render_error(struct buf *out, const struct oai_error *error); /* {"error":{...}} */

/* ---- Requests ------------------------------------------------------------------------------ */

enum oai_kind { OAI_CHAT, OAI_COMPLETION, OAI_TOKENIZE, OAI_DETOKENIZE };

#define OAI_STOPS_MAX         16
#define OAI_STOP_BYTES        1024
#define OAI_STOP_IDS_MAX      256
#define OAI_BIAS_MAX          1024
#define OAI_LOGPROBS_MAX      20 /* ENGINE_TOP_MAX */
#define OAI_JSON_DEPTH        64
#define OAI_SALT_BYTES        1024
#define OAI_NAMES_MAX         16
#define OAI_REPETITION_MAX    100.0
#define OAI_COMPLETION_TOKENS 16 /* OpenAI's max_tokens of /v1/completions when absent */

/* What a request is judged by. Borrowed; constant while the server runs. */
struct oai_rules {
    const struct engine_info *info;
    const char *names[OAI_NAMES_MAX]; /* served model names, the first is the real one */
    int name_count;
    int default_max_tokens; /* for chat without max_tokens; 0 = up to the context */
    bool strict;            /* unknown fields are refused */
    size_t body_bytes;
};

struct oai_request {
    enum oai_kind kind;
    /* the prompt: exactly one of the three, by kind and body */
    cJSON *context; /* for engine_render_chat; owned, freed by oai_request_close */
    const char *text;
    const int32_t *ids; /* in the arena */
    size_t id_count;
    const char *prompt_field; /* "messages" or "prompt", for errors about length */
    bool add_special, parse_special;
    const char *salt;   /* cache_salt, else prompt_cache_key, else "" */
    int32_t max_tokens; /* -1 = not given */
    bool stream, include_usage, continuous_usage, echo;
    bool return_token_strs; /* tokenize */
    /* Complete but for prompt, prompt_count, max_tokens and space. seed_given says whether
     * sampling.seed is the client's. */
    struct engine_request sampling;
    bool seed_given;
};

/* The body's text -> tree. Refuses with OpenAI's wording. */
int oai_parse_json(const char *data, size_t size, const struct oai_rules *rules, cJSON **tree,
                   struct oai_error *error);

/* The body's tree -> request. `text` and `salt` point into the tree; `sampling` and `ids` lie in
 * the arena and outlive it. 0, or -1 with *error. Close the request in both cases. */
int oai_parse(enum oai_kind kind, const cJSON *body, const struct oai_rules *rules,
              struct arena *arena, struct oai_request *out, struct oai_error *error);
void oai_request_close(struct oai_request *request);

/* Lengths against the context, after the prompt became `count` tokens; sets
 * request->sampling.max_tokens. */
int oai_fit(struct oai_request *request, size_t count, const struct oai_rules *rules,
            struct oai_error *error);

/* ---- Answers ------------------------------------------------------------------------------- */

/* What all texts of one answer share. */
struct oai_answer {
    const struct engine *engine;
    const struct engine_info *info;
    const struct oai_request *request;
    const struct engine_job *job; /* its prompt is the prompt of the answer */
    const char *id;               /* "chatcmpl-..." or "cmpl-..." */
    const char *model;
    int64_t created;
};

/* A finished job as chat.completion or text_completion. */
void oai_render_answer(struct buf *out, const struct oai_answer *answer);
/* prompt, completion and total tokens, details; kv_details once the job is finished. */
void oai_render_usage(struct buf *out, const struct oai_answer *answer, uint32_t completion_tokens,
                      bool finished);
/* choices[].logprobs for tokens [begin, end) of the answer; `echo` puts the prompt's before them.
 * *offset is the next token's place in the text, in characters (completions). */
void oai_render_logprobs(struct buf *out, const struct oai_answer *answer, uint32_t begin,
                         uint32_t end, bool echo, uint64_t *offset);
/* The prompt as echoed: token bytes without special tokens. */
void oai_render_prompt_text(struct buf *out, const struct oai_answer *answer);
/* ,"finish_reason":...,"stop_reason":... of a finished job (leading comma included) */
void oai_render_finish(struct buf *out, const struct oai_answer *answer);
const char *oai_finish_name(int finish); /* "stop", "length" */

void oai_render_models(struct buf *out, const struct oai_rules *rules, int64_t created);
/* false: no such model */
bool oai_render_model(struct buf *out, const struct oai_rules *rules, const char *id,
                      int64_t created);
void oai_render_tokens(struct buf *out, const struct engine *engine, const struct engine_ids *ids,
                       bool strings);
void oai_render_text(struct buf *out, const struct engine *engine, const int32_t *ids,
                     size_t count); /* detokenize */
void oai_render_kv(struct buf *out, const struct engine_info *info,
                   const struct engine_snapshot *snapshot, const struct engine_sequence_row *rows,
                   int row_count, const struct engine_conversation_row *conversations,
                   int conversation_count);

#endif
