/* The HTTP API as data: bodies of requests in, texts of answers out. Pure functions for any thread,
 * without sockets. Field names in errors are JSON paths ("kv.budget"). */
#ifndef KEEPD_SERVER_OAI_OAI_H
#define KEEPD_SERVER_OAI_OAI_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"
#include "engine/engine.h"
#include "engine/engine_conversations.h"
#include "engine/engine_stats.h"
#include "engine/engine_text.h"
#include "server/limits.h"
#include "server/oai/records.h"
#include "server/oai/tool_calls.h"

/* ---- Errors ---- */

/* The error object of an answer. Strings without an array are static. */
struct oai_error {
    int status;       /* HTTP; 0 = none */
    const char *type; /* "invalid_request_error", ... */
    const char *code; /* NULL renders as null */
    char param[128];  /* "" renders as null */
    char message[512];
    /* For a prompt that is too long: its tokens and those of the context. 0 = another error. */
    size_t prompt_tokens, context_tokens;
};

/* Fills *error and returns -1, so that `return oai_refuse(...)` reads well. */
int oai_refuse(struct oai_error *error, int status, const char *code, const char *param,
               const char *format, ...) __attribute__((format(printf, 5, 6)));
/* Marks the error as that of a prompt of `count` tokens, which do not fit the context. Returns -1.
 */
int oai_refuse_context(struct oai_error *error, size_t count, size_t context);
/* Fills *error from a fault of base, engine or JSON; returns -1. */
int oai_refuse_fault(struct oai_error *error, const struct fault *fault);
void oai_render_error(struct buf *out, const struct oai_error *error); /* {"error":{...}} */

/* ---- Requests ---- */

struct oai_kind; /* server/oai/kind.h */

/* The tags around a model's reasoning: token ids, or -1 if the vocabulary has none. */
struct oai_think {
    int32_t begin, end;
};
/* Looks up the tags. A model has them if <think> and </think> are one token each. */
struct oai_think oai_find_think(const struct engine *engine);

/* The special tokens of answers in channels (channels.c). A token that the vocabulary lacks is -1.
 */
struct oai_channels {
    bool known; /* the vocabulary has those that headers need */
    bool split; /* reasoning is returned separately; set by the server */
    int32_t start, channel, constrain, message, end, called, returned;
};
struct oai_channels oai_find_channels(const struct engine *engine);

/* The tokens around the parts of a text with a gap, in the order prefix, suffix, middle. */
struct oai_fim {
    bool known; /* the vocabulary has these three */
    int32_t prefix, suffix, middle;
    int32_t file; /* begins a file; -1 = the vocabulary has none */
};
struct oai_fim oai_find_fim(const struct engine *engine);

/* The tokens with which a model says whether a text answers a query: "yes", "no". Both -1: its
 * vocabulary does not tell them apart. */
struct oai_verdict {
    int32_t ids[2];
};
struct oai_verdict oai_find_verdict(const struct engine *engine);

/* How a chat template takes the messages of a chat. */
struct oai_turns {
    bool has_system; /* shows messages of the system */
    bool alternate;  /* refuses two turns of the user in a row, so these are joined (turns.c) */
    /* Where turns alternate: */
    bool system_between; /* shows messages of the system between two turns of the user */
    bool results_last;   /* takes results of tools, but no turn of the user behind them */
};
struct oai_turns oai_find_turns(const struct engine *engine);
/* The same by a template's source, without an engine; NULL: there is none. */
struct oai_turns oai_turns_of(const char *chat_template);

/* How a model is shown tools and calls them. */
struct oai_tool_style {
    const struct tool_form *form; /* NULL: answers do not call tools */
    bool generic; /* the template does not show tools in a form that is read, so a message describes
                     them (tool_prompt.c) */
    bool hides_calls;         /* the template shows no calls, so they are written into the text of
                                 the assistant's messages (tool_prompt.c) */
    struct tool_derived *own; /* owns the form if it was found by rendering; else NULL */
};
/* Finds the style of a model, and makes special tokens among its marks part of answers. `parser`:
 * "none"; the name of a form that the template shows; or "auto", which finds that form and
 * otherwise takes the generic form. */
struct oai_tool_style oai_find_tools(struct engine *engine, const char *parser);
void oai_close_tools(struct oai_tool_style *style);
/* Return the style's name for people: that of the form, "template" for one that was found by
 * rendering, or "generic". `chat_template` NULL: none.
 */
const char *oai_tool_style_name(const struct oai_tool_style *style);
const char *oai_tool_style_of(const char *chat_template);

/* Refuses a --tool-call-parser if the template (NULL: none) shows no tools, because no answer would
 * call one in this form: ERR_INVALID, field "tool-call-parser". Warns if the template teaches
 * another form. */
int oai_check_parser(const char *tool_template, const char *parser, struct fault *fault);

/* Returns the sampling of requests that say nothing about it; every member is set. */
struct engine_sampling oai_default_sampling(const struct engine_info *info);

/* Rules for requests. Borrowed; constant while the server runs. */
struct oai_rules {
    const struct engine_info *info;
    const char *names[OAI_NAMES_MAX]; /* served model names, the first is the real one */
    int name_count;
    int default_max_tokens; /* for chat without max_tokens; 0 = up to the context */
    int repetition_count;   /* repetitions that end an answer; 0 = none */
    int64_t seed;           /* the seed of requests without one; -1 = random */
    bool strict;            /* unknown fields are refused */
    bool fetches;           /* pictures may have http(s) addresses */
    bool include_usage;     /* streams have the usage, whether asked for or not */
    size_t body_bytes;
    struct engine *engine;  /* for texts in fields that stand for tokens, and for adapters */
    struct oai_think think; /* both -1: answers are not split */
    struct oai_channels channels;
    struct oai_turns turns;
    struct oai_tool_style tools;
    struct oai_fim fim;
    struct oai_verdict verdict;
    struct oai_records *records; /* stored responses; NULL: none can be stored */
};

/* Two texts whose fit the model judges, and what for; they point into the tree (rerank.c). */
struct oai_pair {
    const char *task, *query, *document;
};
/* The chat that asks about it, for engine_render_chat; NULL: no memory. The caller frees it. */
cJSON *oai_pair_context(const struct oai_pair *pair);

/* A text in the arena; it may hold any bytes. */
struct oai_text {
    const char *text;
    size_t size;
};

/* A prompt that is not a chat: text, token ids, both in turns, or a pair of texts. Exactly one of
 * the four pointers is set. */
struct oai_prompt {
    const char *text;
    const cJSON *mixed; /* a list of texts and valid ids; points into the tree */
    const int32_t *ids; /* in the arena, or static where there are none */
    size_t id_count;
    const struct oai_pair *pair; /* in the arena; a chat is made of it */
};

/* A tool of a request whose form is not a chat's, as its client knows it (rewrite.h). Its texts lie
 * in the arena once the request is read. */
struct oai_tool_origin {
    const char *path;  /* where the client wrote it: "tools[3].tools[0]" */
    const char *name;  /* the client's name for it */
    const char *space; /* namespace; NULL: none */
    bool is_text;      /* calls have one text instead of arguments */
    const cJSON
        *deferred;     /* the body's tool, until a message has shown it; NULL: the list shows it */
    const char *known; /* the model's name for it; set by oai_rewrite_tool */
};

/* A file that the model reads before a text with a gap. Both point into the tree. */
struct oai_file {
    const char *name, *text;
};

/* A picture of a chat: base64, or an http(s) address, of which nothing is checked. It points into
 * the tree. */
struct oai_picture {
    const char *base64;
    size_t size;
    bool remote;                    /* `base64` is an address */
    bool low;                       /* the client wants few details of it: "detail": "low" */
    const char *field;              /* the place in the body; in the arena */
    const struct picture *prepared; /* once it is decoded; the exchange's */
};

/* Decodes a picture's base64 into memory of its own: mem_free. The fault has no field: ERR_LIMIT,
 * ERR_MALFORMED, ERR_NOMEM. */
int oai_decode_base64(const struct oai_picture *from, uint8_t **bytes, size_t *size,
                      struct fault *fault);

/* The parts of a prompt that edits of the context have left out (edits.h), and their tokens. */
struct oai_edits {
    bool asked;
    size_t uses, use_tokens, turns, turn_tokens;
};

struct oai_request {
    const struct oai_kind *kind;
    /* The prompt: a chat, or one or more texts or lists of ids. */
    cJSON *context;               /* for engine_render_chat; owned, freed by oai_request_close */
    struct oai_picture *pictures; /* the chat's, in the order of its messages; in the arena */
    int picture_count;
    struct oai_prompt *prompts; /* in the arena */
    int prompt_count;           /* 1 for a chat */
    bool prompt_list;           /* errors about the i-th prompt name prompt[i] */
    int32_t *added; /* [prompt_count], in the arena: tokens in front of each prompt that the
                       tokenizer has added, which an echo leaves out; NULL: none */
    const char *prompt_field; /* "messages" or "prompt", for errors about length */
    bool add_special, parse_special;
    const char *suffix;           /* text behind the answer, NULL = none; points into the tree */
    const struct oai_file *files; /* in the arena */
    int file_count;
    const char *salt;    /* cache_salt, or "": separates conversations */
    const char *session; /* session_id, prompt_cache_key or user, or "": a hint that helps to find a
                            conversation and gives access to none */
    int32_t n;           /* choices per prompt */
    int32_t longest;     /* tokens that a prompt and its answer may have together */
    int32_t max_tokens;  /* -1 = not given */
    bool endless;        /* max_tokens is whatever the context leaves */
    int32_t truncate; /* tokens kept of a longer prompt's end; 0 = all, -1 = what the context has */
    int32_t logprobs, prompt_logprobs; /* alternatives shown for each token; -1 = no scores */
    double think_share; /* the part of the answer that may be reasoning, if the request bounds it
                           so; 0: it does not */
    bool background;    /* the answer is stored, and the client asks for it later */
    int32_t top;        /* ranked documents that are returned */
    bool bare_ranking;  /* the ranking is an array alone, as of Text Embeddings Inference */
    const struct oai_text *documents; /* [prompt_count] in the arena; NULL: not returned */
    int32_t dimensions;               /* numbers of a vector that are kept, the first ones */
    bool base64, raw_vectors;         /* written so; not normalised */
    bool raw_labels;                  /* scores without the sigmoid */
    int query_count; /* the last prompts, with whose vectors those of the others are compared;
                        0: none */
    const char *query_field; /* names queries in errors, as prompt_field and prompt_list */
    bool query_list;
    bool stream, include_usage, continuous_usage, include_progress, echo;
    bool split_reasoning, hide_reasoning;
    bool include_stop;          /* the stop string is shown */
    bool timings;               /* how long the answer took */
    bool verbose;               /* the answer in llama.cpp's form beside OpenAI's */
    bool return_token_ids;      /* ids of prompt and answer beside the texts */
    bool tokens_as_ids;         /* scores name tokens "token_id:5" */
    bool return_token_strs;     /* tokenize */
    bool with_pieces;           /* tokenize: each token with its text */
    const char *const *members; /* the members of a native answer that are wanted; in the arena */
    int member_count;           /* 0 = all */
    const char *echo_text;      /* a chat's last message, in front of the answer; in the arena */
    size_t echo_size;
    const struct constrain_part *constraint; /* the language of answers, in the arena and the trees;
                                                NULL = anything */
    const char *constraint_field; /* the field to which errors about it belong; in the arena */
    cJSON *schema;                /* a schema that a field has as text; owned, as `context` is */
    cJSON *chat;            /* the body rewritten as a chat's, if its form is another; owned */
    struct oai_owner owner; /* the owner of stored responses; in the arena */
    const int32_t *earlier; /* ids of the stored response that is continued, in the arena; NULL:
                               none */
    size_t earlier_count;
    const int32_t *front; /* ids in front of a chat, in the arena; NULL: none */
    size_t front_count;
    const char *own_items; /* the items of a response that is to be stored (records.h); NULL: it is
                              not stored. In the arena */
    const char *repeated;  /* the members of a response that repeat the request; in the arena */
    bool call_promised;    /* the answer is a call */
    bool clamps; /* if the context has too few tokens left, the answer becomes shorter instead of
                    being refused */
    const struct oai_tool_origin *origins; /* [tools of the chat], in their order; in the arena.
                                              NULL: the chat's tools are the body's */
    int origin_count;
    struct oai_edits edits;
    int named_tool;        /* index of the only tool that may be called; -1 = any */
    struct tool_set tools; /* tools that the answer may call; names in the arena */
    /* All members are set except prompt, prompt_count, max_tokens and space. seed_given: the client
     * gave sampling.seed. */
    struct engine_request sampling;
    bool seed_given;
    /* The adapter that the model's name asks for, or that is to be loaded or unloaded, and where it
     * is; they point into the tree. NULL: none. */
    const char *adapter, *adapter_path;
};

/* Returns what follows one of these names and a colon, the name of an adapter ("base:adapter");
 * NULL: the name begins with none of them. */
const char *oai_adapter_part(const char *const *names, int count, const char *name);

/* Parses a body into a tree. Errors use OpenAI's wording. */
int oai_parse_json(const char *data, size_t size, const struct oai_rules *rules, cJSON **tree,
                   struct oai_error *error);
/* Finds the model's name in a body, before it is parsed. "": it has none, or is no JSON object. */
#define OAI_NAME_BYTES 257
void oai_find_model(const char *data, size_t size, char name[OAI_NAME_BYTES]);
/* Returns a bound on the values of the tree that a request may make the server build. */
size_t oai_json_nodes(const struct oai_rules *rules);

/* Reads a request from the body's tree. Texts of prompts, `salt` and `session` point into the tree;
 * `sampling`, `prompts` and ids lie in the arena and outlive it. `key`: hash of the client's key,
 * which owns responses. 0, or -1 with *error. Close the request in both cases. */
int oai_parse(const struct oai_kind *kind, const cJSON *body, const struct oai_rules *rules,
              const uint8_t key[16], struct arena *arena, struct oai_request *out,
              struct oai_error *error);
void oai_request_close(struct oai_request *request);

/* Replaces ids of a prompt that continues an earlier text: as far as both have the same bytes and
 * special tokens, the earlier ids take the place of the prompt's. So the model continues the tokens
 * that it wrote, not others with the same text. ERR_NOMEM. */
int oai_continue_ids(const struct engine *engine, const int32_t *earlier, size_t count,
                     struct arena *arena, struct engine_ids *ids);

#define OAI_PATH 128 /* size of struct oai_error.param; longer paths are cut */
/* Writes the field that holds the i-th prompt: "messages", "prompt" or "prompt[3]". */
void oai_prompt_path(const struct oai_request *request, int i, char path[OAI_PATH]);

/* Drops the beginning of the i-th prompt where it is longer than the request allows; of a text that
 * becomes a vector the end. */
void oai_truncate(const struct oai_request *request, const struct oai_rules *rules, int i,
                  struct engine_ids *ids);

/* Returns a blank and a sentence that tells a request of too many tokens how a text may go on; ""
 * if it already may. */
const char *oai_overflow_hint(const struct oai_request *request, const struct oai_rules *rules);

/* Turns the share of the answer that reasoning_effort permits for reasoning into tokens, once
 * max_tokens is known. Does nothing if the request names no effort, or a budget of its own. */
void oai_bound_thought(const struct oai_request *request, struct engine_request *job);

/* Checks the lengths against the context, once the prompt in `field` has become `count` tokens.
 * *max_tokens: the most tokens of the answer. */
int oai_fit(const struct oai_request *request, const char *field, size_t count,
            const struct oai_rules *rules, int32_t *max_tokens, struct oai_error *error);

/* Returns the fields of a body, in the order of the table that parsing uses; NULL past the end.
 * /openapi.json must describe exactly these. */
const char *oai_field_at(const struct oai_kind *kind, int index);

/* ---- Answers ---- */

/* Facts that all texts of one answer share. Choices are numbered across prompts: those of the first
 * prompt, then those of the second, ... */
struct oai_answer {
    const struct engine *engine;
    const struct oai_rules *rules;
    const struct oai_request *request;
    const struct engine_job *jobs; /* one per prompt */
    int job_count;
    const char *id; /* "chatcmpl-..." or "cmpl-..." */
    const char *model;
    int64_t created;
    bool cancelled; /* in the background, by its client */
};

const struct engine_job *oai_job_of(const struct oai_answer *answer, int index);
const struct engine_choice *oai_choice_of(const struct oai_answer *answer, int index);
int oai_choice_count(const struct oai_answer *answer);
/* Returns the number of tokens of a choice so far. */
uint32_t oai_token_count(const struct engine_choice *choice);
/* Returns how many tokens of a finished choice are shown with scores: all, or those before a stop
 * string. */
uint32_t oai_shown_count(const struct oai_answer *answer, int index);

/* Returns how many bytes of a finished choice's text are shown: up to its stop string, or including
 * it. */
size_t oai_shown_size(const struct oai_answer *answer, int index);

/* Where the next token begins in a text, in characters. A token that begins inside a character
 * counts as beginning where the character does. Zero-initialised. */
struct oai_offset {
    uint64_t characters; /* number of complete characters */
    char part[4];        /* the bytes of an incomplete character */
    uint8_t part_size;
};

#define OAI_HEADER_BYTES (OAI_TOOL_NAME_BYTES + 128) /* a message in a channel */

/* The voice of a text: the model thinks, or it answers. In models without channels all members but
 * the first three are zero. */
struct oai_voice {
    bool thinking;
    bool may_begin; /* only white space so far */
    bool fresh;     /* the text follows a tag: line breaks belong to the tag */
    uint32_t reasoning_tokens;
    bool channels; /* tokens of the format say what a text is (channels.c) */
    bool hidden;   /* the text is a header, which is not shown */
    bool calling;  /* the text is the arguments of a call of the request's tool `tool` */
    bool bare;     /* the call has no arguments yet */
    int tool;
    uint16_t header_size;
    char header[OAI_HEADER_BYTES];
};
/* Returns the state before the first token of choice `index`; the template may have opened the tag
 * already. */
struct oai_voice oai_voice_open(const struct oai_answer *answer, int index);
/* Takes the next token. Returns true if it is a tag, whose text is not shown. */
bool oai_voice_step(struct oai_voice *voice, const struct oai_answer *answer, int32_t token);
/* Returns how many bytes at the beginning of the voice's next text are not shown. */
size_t oai_voice_skip(struct oai_voice *voice, const char *text, size_t size);
bool oai_splits_reasoning(const struct oai_answer *answer);
bool oai_reads_channels(const struct oai_answer *answer);
struct oai_voice oai_channels_open(const struct oai_answer *answer,
                                   const struct engine_request *request);
bool oai_channels_step(struct oai_voice *voice, const struct oai_answer *answer, int32_t token);
/* Returns whether the model or the template began a thought, even if it is empty. */
bool oai_has_thought(const struct oai_answer *answer, int index);
/* Returns whether later tokens may be reasoning. */
bool oai_voice_may_think(const struct oai_voice *voice);

/* Returns the client's form of the tool that the model calls by this name; NULL: it has no other
 * form. */
const struct oai_tool_origin *oai_origin_of(const struct oai_request *request, const char *name,
                                            size_t size);
/* Returns whether answers are searched for calls: the request has tools and does not forbid calls.
 */
bool oai_reads_calls(const struct oai_answer *answer);
/* Write a delta's tool_calls: the beginning of call `call` (from 0) of choice `index`, and later
 * parts. */
void oai_render_call_begin(struct buf *out, const struct oai_answer *answer, int index,
                           uint32_t call, const char *name, size_t size);
void oai_render_call_arguments(struct buf *out, uint32_t call, const char *text, size_t size);
/* Writes, with quotes, the id of a part of an answer: "prefix...", as unique as the answer's own
 * id. */
void oai_render_part_id(struct buf *out, const struct oai_answer *answer, const char *prefix,
                        unsigned a, unsigned b);
/* Writes the id of a call; ids of mistral are 9 letters and digits without a prefix. */
void oai_render_call_id(struct buf *out, const struct oai_answer *answer, const char *prefix,
                        unsigned index, unsigned call);

/* The parts of answers that several kinds share. */

/* Writes the members of a whole answer before its choices:
 * {"id":...,"object":...,"created":...,"model":... */
void oai_render_answer_head(struct buf *out, const struct oai_answer *answer, const char *object);
/* Returns the tokens of all choices so far. */
uint64_t oai_tokens_total(const struct oai_answer *answer);
void oai_render_prompt_ids(struct buf *out, const struct oai_answer *answer, int index);
/* Returns the bytes of the prompt's i-th token in an echo of the prompt. */
size_t oai_echo_bytes(const struct oai_answer *answer, int index, uint32_t i, const char **bytes);
/* Writes [ids] of generated tokens, including one that ended the answer without text. */
void oai_render_ids(struct buf *out, const struct engine_choice *choice, uint32_t begin,
                    uint32_t end);
/* Writes ,"token_ids":[ids]. */
void oai_render_answer_ids(struct buf *out, const struct engine_choice *choice, uint32_t begin,
                           uint32_t end);
/* Sums over all prompts the tokens read so far, those of them found in conversations, and all
 * tokens. A prompt that has not begun counts only in the last sum. */
uint64_t oai_prompt_read(const struct oai_answer *answer);
uint64_t oai_prompt_cached(const struct oai_answer *answer);
uint64_t oai_prompt_total(const struct oai_answer *answer);
/* Writes "kv_progress":{...}: how many entries the first choice's heads hold. */
void oai_render_held(struct buf *out, const struct oai_answer *answer,
                     const struct engine_held *held);
/* Writes "prompt_progress":{...} in llama.cpp's form; `read`: tokens so far. */
void oai_render_progress(struct buf *out, const struct oai_answer *answer, uint64_t read);
/* Writes the last members of an answer, whole or streamed: ,"timings":{...} on request. All jobs
 * are finished. */
void oai_render_timings(struct buf *out, const struct oai_answer *answer);
/* Writes ,"__verbose":... if it was asked for: the whole answer in llama.cpp's form, with the
 * prompt as the model read it. */
void oai_render_verbose(struct buf *out, const struct oai_answer *answer);
/* Writes prompt, completion and total tokens, and, once all choices are finished, details and
 * kv_details. */
void oai_render_usage(struct buf *out, const struct oai_answer *answer, uint64_t completion,
                      bool finished);
/* Returns the tokens of reasoning in all choices so far. */
uint64_t oai_reasoning_total(const struct oai_answer *answer);
/* Writes ,"kv_details":{...} of a finished answer. */
void oai_render_kv_details(struct buf *out, const struct oai_answer *answer);
/* Writes [scores] as in chats; [] if none were requested. */
void oai_render_token_logprobs(struct buf *out, const struct oai_answer *answer, int index,
                               uint32_t begin, uint32_t end);
/* Write choices[].logprobs for tokens [begin, end) of choice `index`, in the form of chats and in
 * that of completions, where `echo` puts the prompt's before them. null if none were asked for. */
void oai_render_chat_logprobs(struct buf *out, const struct oai_answer *answer, int index,
                              uint32_t begin, uint32_t end);
void oai_render_text_logprobs(struct buf *out, const struct oai_answer *answer, int index,
                              uint32_t begin, uint32_t end, bool echo, struct oai_offset *offset);
/* Writes [scores] of tokens [begin, end) of choice `index`, in llama.cpp's form. */
void oai_render_native_logprobs(struct buf *out, const struct oai_answer *answer, int index,
                                uint32_t begin, uint32_t end);
/* Writes the scores of the prompt of choice `index`, in vLLM's form. */
void oai_render_prompt_logprobs(struct buf *out, const struct oai_answer *answer, int index);
/* Writes the text of all tokens, special tokens included. */
void oai_render_token_texts(struct buf *out, const struct engine *engine, const int32_t *ids,
                            size_t count);
/* Writes the prompt of choice `index` as an echo has it: the bytes of its tokens, without special
 * tokens. */
void oai_render_prompt_text(struct buf *out, const struct oai_answer *answer, int index);
/* Writes ,"finish_reason":...,"stop_reason":... of a finished choice, with the leading comma.
 * `called`: the choice ends with a call. */
void oai_render_finish(struct buf *out, const struct oai_answer *answer, int index, bool called);
const char *oai_finish_name(int finish, bool called); /* "stop", "length", "tool_calls" */

/* A model in the list of models. */
struct oai_listed {
    const char *const *names; /* [name_count] */
    int name_count;
    int max_model_len;
    const char *state; /* "loaded" */
    bool loading;
    double progress;      /* part that is loaded, 0 to 1 */
    int64_t memory_bytes; /* taken while it is loaded; 0: not known */
    bool pinned;
    int waiting;                               /* requests that wait until it is loaded */
    const struct fault *fault;                 /* NULL: it can be loaded, as far as is known */
    const struct engine_info *info;            /* NULL: it is not loaded */
    const struct engine_adapter_row *adapters; /* [adapter_count] of a loaded model */
    int adapter_count;
};
/* Write /api/tags and /api/ps in Ollama's form. */
void oai_render_tags(struct buf *out, const struct oai_listed *models, int count, int64_t created);
void oai_render_loaded(struct buf *out, const struct oai_listed *models, int count,
                       int64_t created);
/* Removes Ollama's usual tag from a model's name. false: it has none. */
bool oai_cut_tag(char *name);
/* Removes that tag, or adds it to a name without a tag, so that it is the other name of the same
 * model. false: the name has another tag, or is too long. */
bool oai_other_tag(char name[OAI_NAME_BYTES]);
/* Writes a time as RFC 3339 has it, in quotes. */
void oai_write_time(struct buf *out, int64_t seconds);
void oai_render_models(struct buf *out, const struct oai_listed *models, int count,
                       int64_t created);
/* Writes a model. false: there is none with this id. */
bool oai_render_model(struct buf *out, const struct oai_listed *models, int count, const char *id,
                      int64_t created);
struct oai_load {
    const struct engine_info *info;
    const struct engine_status *statuses; /* [info->replicas] */
    int64_t now;                          /* unix seconds */
};
void oai_render_loads(struct buf *out, const struct oai_load *load); /* SGLang's form */
void oai_render_server_info(struct buf *out, const struct oai_rules *rules);
void oai_render_tokenizer_info(struct buf *out, const struct engine *engine); /* vLLM's form */
/* Write /props and /slots in llama.cpp's forms. A slot is a place for a running sequence. */
void oai_render_props(struct buf *out, const struct oai_rules *rules, bool sleeps);
void oai_render_slots(struct buf *out, const struct engine_info *info,
                      const struct engine_sequence_row *rows, int row_count);
/* Writes the answer of GET /v1/conversations. */
void oai_render_conversations(struct buf *out, const struct engine_conversation_row *rows,
                              int count);
void oai_render_deleted(struct buf *out, uint64_t conversation);
/* Writes the answer of PUT /v1/conversations. */
void oai_render_uploaded(struct buf *out, const struct engine_conversation_row *row);
/* Reads an id of 16 hexadecimal digits; false: the text is none. */
bool oai_conversation_id(const char *text, uint64_t *id);
void oai_render_kv(struct buf *out, const struct engine_info *info,
                   const struct engine_status *status, const struct engine_sequence_row *rows,
                   int row_count, const struct engine_conversation_row *conversations,
                   int conversation_count);

#endif
