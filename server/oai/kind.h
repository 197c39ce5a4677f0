/* Kinds of requests: one row for each route with a body. Everything that differs between kinds is
 * in a row and its functions; a new endpoint is a file with its row and a line in kinds.c.
 *
 * Functions of a row are pure and may run on any thread. They write into buffers, which note if
 * memory was short. They keep no state between calls except in their arguments. */
#ifndef KEEPD_SERVER_OAI_KIND_H
#define KEEPD_SERVER_OAI_KIND_H

#include "server/oai/items.h"
#include "server/oai/oai.h"

struct oai_reader; /* server/oai/fields.h */
struct oai_field;

/* The events of one stream. */
struct oai_events {
    const struct oai_answer *answer; /* borrowed */
    struct buf head;                 /* the beginning of an event, up to its choices */
    struct buf out;                  /* rendered events that were not taken yet */
    struct buf note;                 /* members of the next event about progress, without braces */
    uint64_t tokens; /* sum over the choices of the tokens shown in events; independent of timing */
    struct oai_items items; /* used by forms that answer with items */
    uint64_t sequence;      /* events so far, where they are numbered */
    uint64_t from;          /* number of the first event that is written */
};

/* One delta of one choice. */
struct oai_delta {
    int index;
    enum tool_piece_kind kind; /* the type of `text` */
    bool thinking;             /* for TOOL_TEXT: the text is reasoning, not the answer */
    bool echo;                 /* the text belongs to the prompt */
    uint32_t call;             /* for the other types: the call's number, from 0 */
    const char *text;
    size_t size;
    uint32_t begin, end;         /* the tokens whose scores are sent with it */
    uint32_t ids_begin, ids_end; /* the tokens whose ids are sent with it */
    struct oai_offset *offset;   /* where the choice's next token begins */
};

/* Receives the parts of an answer in order. */
struct oai_sink {
    void (*take)(void *to, const struct oai_delta *delta);
    void *to;
};

/* Divides a finished answer into its parts (parts.c). All members but the first three are zero
 * before the first text. */
struct oai_divider {
    const struct oai_answer *answer; /* borrowed */
    int index;
    struct oai_sink sink;
    struct tool_reader calls;
    uint32_t tokens_begin, tokens_end; /* the tokens of the next text */
};
/* Divides text[begin, end), which is all reasoning or all answer. */
void oai_divide_text(struct oai_divider *divider, const struct oai_voice *voice, const char *text,
                     size_t begin, size_t end);
/* Passes all parts of a finished choice to the sink. Returns true if it ends with a call. */
bool oai_divide(const struct oai_answer *answer, int index, struct oai_sink sink);

/* Divides a whole answer's text into content and calls, as chats have it (tools.c). */
struct oai_calls {
    const struct oai_answer *answer; /* borrowed */
    int index;
    struct buf content, list; /* list: the calls as JSON, without brackets; "" = none */
    struct buf arguments;     /* arguments of the call that is being read */
};
void oai_calls_open(struct oai_calls *calls, const struct oai_answer *answer, int index,
                    size_t limit);
void oai_calls_close(struct oai_calls *calls);
void oai_calls_take(struct oai_calls *calls, const struct oai_delta *delta);
void oai_calls_end(struct oai_calls *calls);
bool oai_calls_failed(const struct oai_calls *calls); /* memory was short */

/* How generated answers are written. */
struct oai_form {
    const char *id_prefix; /* "chatcmpl-" */
    int preset_tokens;     /* max_tokens when absent; 0 = the server's default */
    bool may_be_empty;     /* max_tokens 0 reads the prompt and answers nothing */
    /* Whether a stream's last token and the reason of its end are one event, if both are known at
     * the same time. NULL: they are two events, as in OpenAI's streams. */
    bool (*joins_end)(const struct oai_request *request);
    const char *stream_type; /* NULL: the media type of server-sent events */
    const char *ping;        /* an event that says that a stream lives; NULL: a comment */
    void (*answer)(struct buf *out, const struct oai_answer *answer); /* all choices finished */
    /* Stores an answer whose choices have all finished, before its last bytes are sent. An answer
     * in the background is also stored if it failed (`error`; NULL: it did not) or was cancelled,
     * and the events of its stream with it, if there is room for them (`events`; NULL: it has
     * none). Returns false if it should be stored and is not. May be NULL. */
    bool (*keep)(const struct oai_answer *answer, const struct oai_error *error,
                 const struct buf *events);
    /* Writes an answer in the background that has not finished, or was cancelled. NULL: this kind
     * has no such answers. `begun`: the engine works for it. */
    void (*unfinished)(struct buf *out, const struct oai_answer *answer, bool begun);
    /* A stream calls open; for each choice begin, finish and between them the deltas; then end.
     * Between any two of these it calls progress, if the client asked for it. */
    void (*open)(struct oai_events *events);     /* writes `head` */
    void (*progress)(struct oai_events *events); /* writes `note` in an event */
    /* Moves `offset` to the first token after the text that `begin` writes. */
    void (*begin)(struct oai_events *events, int index, struct oai_offset *offset);
    void (*delta)(struct oai_events *events, const struct oai_delta *delta);
    /* `rest`: the part of the choice that no delta had. That is the ids of its last tokens and, if
     * the last token and the end are one event (`joins_end`), that token's text and scores. May be
     * NULL. */
    void (*finish)(struct oai_events *events, const struct oai_delta *rest, bool called);
    void (*end)(struct oai_events *events, const struct oai_error *error); /* NULL: no failure */
};

/* A field's name in a chat, and its name in the form that was rewritten as a chat (rewrite.h). "[]"
 * stands for an index. */
struct oai_alias {
    const char *chat, *own;
};

/* Writes an error in an API's own form. */
typedef void oai_error_fn(struct buf *out, const struct oai_error *error, const char *request_id);

struct oai_kind {
    const char *path;               /* the route's; the method is POST */
    const char *schema;             /* name of the body's schema in openapi.json */
    unsigned groups;                /* OAI_FIELDS_...: the fields it shares with others */
    const struct oai_field *fields; /* the kind's own, ended by a name of NULL; may be NULL */
    int (*parse)(struct oai_reader *reader); /* 0, or -1 with the reader's error */
    /* Exactly one is set: `answer` writes an answer from the prompt's tokens and what is known of
     * the model, `form` a generated one. */
    void (*answer)(struct buf *out, const struct oai_rules *rules,
                   const struct oai_request *request, const struct engine_ids *ids);
    const struct oai_form *form;
    /* Changes the engine before `answer`, on a worker; may take seconds. 0, or -1 with *error. NULL
     * where nothing is changed. */
    int (*work)(struct engine *engine, const struct oai_request *request, struct oai_error *error);
    /* Returns the kind as which the body is read, if a route has several; NULL: this one. */
    const struct oai_kind *(*choose)(const cJSON *body);
    const struct oai_alias
        *aliases;  /* ended by a name of NULL; may be NULL. The first alias that fits is used */
    bool has_tags; /* a model's name may end with ":latest", as Ollama's do */
    bool untyped; /* the body may have no type, or that of `curl -d`: see refuse_body_type in http.c
                   */
    oai_error_fn *error; /* NULL: in OpenAI's form */
};

extern const struct oai_kind oai_chat, oai_completion, oai_native, oai_infill, oai_tokenize,
    oai_detokenize, oai_template, oai_responses, oai_messages, oai_count_tokens, oai_chat_count,
    oai_invocation, oai_embeddings, oai_rerank, oai_rerank_v2, oai_score, oai_ollama_chat,
    oai_load_adapter, oai_unload_adapter, oai_ollama_generate, oai_ollama_embed,
    oai_ollama_embeddings, oai_ollama_show_kind, oai_response_count;
/* Gives the error's field the name that the request's client knows. */
void oai_rename_field(const struct oai_request *request, struct oai_error *error);
/* Returns the form of errors for a path that is a row's with another method, or that is no route
 * but among those of Ollama. NULL: OpenAI's. */
oai_error_fn *oai_error_of_path(const char *path);
/* All rows; NULL past the end. */
const struct oai_kind *oai_kind_at(int index);

/* Writes {"input_tokens": number of tokens of the prompt}. */
void oai_count_answer(struct buf *out, const struct oai_rules *rules,
                      const struct oai_request *request, const struct engine_ids *ids);

/* Writes a text's vector, shortened and normalised as the request asks (embeddings.c). */
void oai_write_vector(struct buf *out, const struct oai_request *request, const float *pooled);
/* ,"usage":{...} of an answer for which prompts were read and nothing was generated */
void oai_render_read_usage(struct buf *out, const struct oai_answer *answer);

/* Chunks in the form of OpenAI's chat and completion streams, which differ in their choices. */
void oai_chunk_open(struct oai_events *events, const char *object);
void oai_chunk_begin(struct oai_events *events);
void oai_chunk_end(struct oai_events *events); /* after the choice */
void oai_chunk_progress(struct oai_events *events);
void oai_chunk_close(struct oai_events *events); /* after the choices, which are closed */
void oai_chunks_end(struct oai_events *events, const struct oai_error *error);

#endif
