/* Exchanges: one request and its answer.
 *
 * An exchange is reference-counted: its connection (until libmicrohttpd reports completion), its
 * work on a worker thread of libuv and its jobs in the engine each hold a reference. It owns its
 * body, answer, arena and jobs, and frees them with the last reference. A client may disconnect at
 * any moment: then the jobs are cancelled at once, and `conn` and `connection` become NULL.
 *
 * Thread: the loop, except for the work: from works_add to exchange_prepared a worker owns the
 * members marked so, and reads the body and who the client is. The loop then changes no more of
 * the exchange than `state`, `conn`, `connection`, `suspended` and when the answer ended. */
#ifndef KEEPD_SERVER_EXCHANGE_H
#define KEEPD_SERVER_EXCHANGE_H

#include <microhttpd.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "base/arena.h"
#include "base/buf.h"
#include "engine/engine.h"
#include "engine/engine_conversations.h"
#include "server/keys.h"
#include "server/ledger.h"
#include "server/oai/kind.h"
#include "server/spans.h"
#include "server/stats.h"

struct conn;
struct served_model;
struct server;

#define ID_BYTES         48  /* "chatcmpl-" and 32 digits */
#define REQUEST_ID_BYTES 132 /* the client's, echoed */

/* The states of an exchange; exchange.c lists which may follow which. While the engine works for an
 * exchange (RUNNING, STREAMING, BACKGROUND and CANCELLED) it is in server->jobs. */
enum exchange_state {
    EXCHANGE_RECEIVING, /* the body arrives */
    EXCHANGE_WAITING,   /* the model is being loaded, or makes room for another */
    EXCHANGE_PREPARING, /* a worker parses and tokenises the body, or moves a conversation's file */
    EXCHANGE_RUNNING,   /* the engine has its jobs or its order; no answer is queued yet */
    EXCHANGE_FINISHED,  /* the engine has ended them; no answer is queued yet */
    EXCHANGE_READY,     /* `answer` must be queued; the rest of the body is discarded */
    EXCHANGE_STREAMING, /* an answer is queued, and the engine works on */
    EXCHANGE_SENDING,   /* an answer is queued, and the engine will add nothing to it */
    EXCHANGE_BACKGROUND, /* the client has its answer, and the engine works for the response to be
                            stored */
    EXCHANGE_CANCELLED,  /* the client is gone, and the engine ends the jobs */
    EXCHANGE_OVER        /* the client is gone; a worker may still read the body */
};

/* Why the engine must end jobs whose client is there, or has been answered. */
enum exchange_cut {
    EXCHANGE_CUT_NONE,
    EXCHANGE_CUT_TIME,   /* the request exceeded its time limit */
    EXCHANGE_CUT_DELETED /* the response in the background was deleted and is not stored */
};

struct answer {
    int status;
    const char *content_type; /* NULL = JSON */
    const char *allow;        /* header of a 405 */
    const char *policy;       /* Content-Security-Policy of a page; NULL = no page */
    int retry_ms;             /* Retry-After when > 0 */
    bool close;               /* close the connection after the answer */
    const char *origin;       /* origin whose pages may read the answer; NULL = none */
    bool preflight;           /* answers a CORS preflight request */
    struct buf body;
};

/* How much of one choice has been rendered as events. */
struct stream_choice {
    struct stream *stream;
    const struct engine_choice *source;
    int index;             /* as in struct oai_answer */
    uint32_t tokens_seen;  /* tokens processed */
    uint32_t tokens_shown; /* tokens whose scores were sent */
    uint32_t tokens_sent;  /* tokens whose ids were sent */
    size_t text_shown;
    struct oai_offset offset;
    struct oai_voice voice;
    struct tool_reader calls; /* reads calls in the text of the answering voice */
    bool reading;             /* the voice has begun and not ended */
    int finish;               /* how the engine ended it; ENGINE_RUNNING: not yet */
    struct oai_delta held;    /* a delta that is sent with the choice's end, if `holds` */
    bool holds;
    bool begun, ended; /* ended: the events of the choice have ended, too */
};

/* The events of one client. Those of a response in the background can have several readers, each
 * with a stream of its own. */
struct stream {
    struct exchange *owner; /* has the jobs: the exchange itself, or one in the background, to which
                               this one holds a reference; NULL: there is no stream */
    struct oai_events events;
    size_t out_at;          /* position in events.out */
    size_t out_most;        /* no more tokens are rendered into events.out beyond it */
    uint64_t turn_end;      /* number of events.tokens at which a turn of rendering ends */
    uint64_t progress_sent; /* prompt tokens; UINT64_MAX = nothing yet */
    struct stream_choice *choices;
    int next; /* the choice to render first (round robin) */
    int left; /* choices that have not ended */
    bool ping, ended;
    bool hurried; /* the rest was rendered at once: stream_hurry */
    int64_t last_output_ns;
};

/* The loop's view of a job. */
struct job_progress {
    uint32_t tokens_counted;
    int64_t last_token_ns;
    bool finished;
};

/* The part of a request's path that follows the route's path. */
enum route_end {
    ROUTE_WHOLE,  /* nothing */
    ROUTE_NAME,   /* a name, which may have slashes */
    ROUTE_ID,     /* an id, without slashes */
    ROUTE_ITEMS,  /* an id and /input_items */
    ROUTE_CANCEL, /* an id and /cancel */
    ROUTE_STATE   /* an id and /state */
};

/* The route of a request: a row of routes.c, or made from a kind of request. */
struct route {
    const char *path;
    enum route_end end;
    const char *method;                     /* "GET" also answers HEAD */
    void (*act)(struct exchange *exchange); /* no body: answers, or waits for the engine */
    const struct oai_kind *kind; /* kind of the body. If `act` and `kind` are NULL, the body is a
                                    file that passes through (server/move.h) */
    bool open;                   /* needs no key */
};

/* The sender of a request. */
struct exchange_client {
    uint8_t id[16];               /* identity for fair queueing, see set_client */
    uint8_t owner[16];            /* the same identity, but without the connection */
    uint8_t key_id[16];           /* hash of the API key, or of ""; part of a space */
    uint8_t key_digest[16];       /* the digest of the key in server->keys */
    uint64_t key_added;           /* struct key.added of its key; 0 = no key counts the request */
    struct key_settings settings; /* the key's settings when the request came */
    bool other_keys;              /* the server has other keys */
};

struct exchange {
    struct server *server;
    struct served_model *model;        /* the engine that works for it is the model's */
    struct conn *conn;                 /* NULL once libmicrohttpd has released it */
    struct MHD_Connection *connection; /* NULL at the same time as `conn` */
    struct exchange *next, *prev;      /* in server->jobs, while the engine works for it */
    bool holds;                        /* the model stays loaded for it: exchange_rendered */
    int refs;
    struct route found;
    const struct route *route; /* `found`; NULL = there is none */
    enum exchange_state state;
    enum exchange_cut cut;
    bool is_head;        /* the method is HEAD */
    bool suspended;      /* libmicrohttpd calls nothing for `connection` until exchange_resume */
    int places;          /* queue places that the request still holds */
    int64_t deadline_ns; /* 0 = none */
    struct exchange_client client;
    char path[288]; /* long enough for the longest model name */
    char id[ID_BYTES], request_id[REQUEST_ID_BYTES];
    char session[OAI_KEY_BYTES + 1]; /* the client's X-Session-ID, or "" */
    int64_t received_ns, created;
    int64_t ended_ns; /* the answer's end; 0: not yet */
    int status;       /* final, with ended_ns */
    struct spans_context trace;
    struct buf body;
    size_t body_seen;
    struct ledger_entry entry; /* body and large tree, or a text answer; its part of the queue */
    size_t values;             /* upper bound for the JSON values of the body */
    struct answer answer;
    uv_work_t work;
    struct exchange *work_next; /* in a queue of works, loads_waiting or its model's `waiting` */
    atomic_bool left; /* set by the loop: nobody waits for the answer, so the worker may give up */
    /* written by the libuv worker */
    cJSON *tree;
    struct arena arena;
    struct oai_request request;
    struct engine_constraint *constraint; /* for all jobs; NULL = none */
    struct picture **pictures; /* [picture_count] of the chat, in order; each with a count */
    int picture_count;
    struct engine_adapter adapter; /* number 0: none */
    char adapter_name[ENGINE_ADAPTER_NAME];
    bool again; /* other languages are being compiled, or the work is large: queue it once more */
    /* The body is large, or it has pictures; some of them are fetched: see works.c. Final when
     * `again` is false. */
    bool large, fetches;
    struct oai_error error;
    int64_t retry_ns;         /* until a refused request may be sent again; 0: estimated */
    enum stats_reject reject; /* reason of a 429 or 503; OTHER unless set before it */
    /* the jobs: one per prompt, allocated by the libuv worker */
    struct engine_job *jobs;
    struct job_progress *progress; /* [job_count] */
    int job_count, jobs_submitted, jobs_finished;
    int jobs_at_once; /* the most that are in the engine at a time: a part of many texts that become
                         vectors, so that others find places and tokens of the queue free */
    bool submits;     /* more jobs are submitted as others end; counts in server->accepted */
    uint32_t tokens_counted;
    struct oai_answer facts;   /* once the jobs are submitted */
    struct engine_order order; /* about a conversation; see exchange_order */
    struct move *move;         /* a conversation that comes or leaves; NULL = none */
    struct stream stream;
    struct exchange *followers;     /* list of the exchanges that follow this one */
    struct exchange *next_follower; /* in the list of stream.owner */
};

/* http.c: libmicrohttpd's callbacks */
enum MHD_Result http_access(void *cls, struct MHD_Connection *connection, const char *url,
                            const char *method, const char *version, const char *upload_data,
                            size_t *upload_data_size, void **con_cls);
void http_completed(void *cls, struct MHD_Connection *connection, void **con_cls,
                    enum MHD_RequestTerminationCode code);

/* exchange.c */
struct exchange *exchange_open(struct server *server, struct conn *conn,
                               struct MHD_Connection *connection);
void exchange_unref(struct exchange *exchange);
/* Writes the prefix and 32 random digits. */
void exchange_make_id(char *id, size_t size, const char *prefix);
void exchange_suspend(struct exchange *exchange);
void exchange_resume(struct exchange *exchange);
/* Changes the state. A change that exchange.c does not allow ends the process. */
void exchange_set_state(struct exchange *exchange, enum exchange_state state);
void exchange_ready(struct exchange *exchange);  /* `answer` is complete */
void exchange_queued(struct exchange *exchange); /* libmicrohttpd has the answer, or its reader */
/* Lets go of the model where neither the engine nor what renders the answer needs it any longer,
 * however slowly its clients read what is rendered. Otherwise nothing happens. The model of a
 * stream is its owner's. */
void exchange_rendered(struct exchange *exchange);
void exchange_gone(struct exchange *exchange); /* the client left, or took too long */
static inline bool exchange_is_gone(const struct exchange *exchange) {
    return exchange->state >= EXCHANGE_CANCELLED;
}
/* The engine has ended all jobs. */
static inline bool exchange_has_finished(const struct exchange *exchange) {
    return exchange->jobs_finished == exchange->job_count;
}
void exchange_cancel(struct exchange *exchange); /* all its jobs end soon */
/* Answer with exchange->error. exchange_refuse is for requests that are refused before the engine
 * works for them: it counts a 429 or 503 under exchange->reject, and returns -1. exchange_fail
 * counts nothing. */
int exchange_refuse(struct exchange *exchange);
void exchange_fail(struct exchange *exchange);
/* Set error and reject. Any thread. */
void exchange_refuse_memory(struct exchange *exchange);
void exchange_refuse_draining(struct exchange *exchange);
/* Takes the adapter with this name of the exchange's model. Any thread. */
bool exchange_take_adapter(struct exchange *exchange, const char *name);
/* Reserves `size` more bytes of the memory that bodies and text answers share (server/ledger.h).
 * false: refused, and exchange->error has the reason. The reservation ends with the body, or with
 * the exchange. */
bool exchange_hold(struct exchange *exchange, size_t size);
/* Reserves memory for a text answer until its client has read it, after the body's memory has been
 * given back. If there is too little, the request is refused. */
void exchange_hold_text(struct exchange *exchange);
void exchange_refuse_text(struct exchange *exchange); /* in place of an unwritten text */
void exchange_drop_body(struct exchange *exchange);

/* dispatch.c: the way of a request */
void exchange_dispatch(struct exchange *exchange); /* the body is complete */
void exchange_begin(struct exchange *exchange);    /* and its model is loaded */
void exchange_prepared(struct exchange *exchange); /* prepare.c has finished with the body */
/* Gives the engine an order about a conversation and waits for its end; refuses the request if that
 * is impossible. */
void exchange_order(struct exchange *exchange, enum engine_order_kind kind, uint64_t conversation);
void exchange_poll(struct exchange *exchange, int64_t now_ns); /* after a wake or a tick */
bool exchange_stream_ready(const struct exchange *exchange, int64_t now_ns);
void exchange_answer_wait(struct exchange *exchange); /* the engine has finished */

/* background.c: responses that their clients ask for later. Such an exchange lives on without a
 * connection until the engine has finished; then the response is stored. It has places in the queue
 * and a deadline as other requests. If it is streamed, its own client reads the events, and others
 * may follow it: they read the same events from any one on, each at its own pace. Nothing is kept
 * for them while it runs, because every stream renders the arrays of the jobs. Afterwards the
 * events are stored with the response (OAI_RECORD_PART bounds both), and a follower that has not
 * read to the end holds the arrays. */
void background_answer(struct exchange *exchange); /* says "queued" */
/* Returns whether the exchange goes on without its client. `answered`: the client has its whole
 * answer; one of a stream may leave earlier. */
bool background_stays(const struct exchange *exchange, bool answered);
void background_end(struct exchange *exchange); /* after its jobs have finished */
/* Gives back the place among its key's requests, if its jobs have finished and its client is gone,
 * and the model, if its followers have all events; the exchange lives on while they read. */
void background_release(struct exchange *exchange);
/* Makes an exchange follow a streamed response, from the event with this number on, or refuses it.
 */
void background_follow(struct exchange *exchange, struct exchange *owner, uint64_t from);
void background_unfollow(struct exchange *exchange);          /* if it follows one */
void background_wake(struct exchange *owner, int64_t now_ns); /* followers with something to send */
/* The owner's unfinished response with this id; NULL: there is none. */
struct exchange *background_find(const struct server *server, const struct oai_owner *owner,
                                 const char *id);
void background_render(struct buf *out, const struct exchange *exchange);
void background_cancel(struct exchange *exchange);

/* works.c: the order in which bodies are prepared. Of the WORKERS threads of libuv, moves take at
 * most MOVES_AT_ONCE, models that are loaded or unloaded MODELS_AT_ONCE, large bodies at most
 * LARGE_AT_ONCE, as many that fetch pictures, and loads of adapters one; small bodies may use all
 * others. So a small request never waits for large ones, however many there are, and no other
 * request waits for hosts of pictures. The next large body is one of a client that has none at
 * work, if there is one. A body with pictures is large, because a small file may have many pixels.
 */
enum {
    MOVES_AT_ONCE = 2,
    LARGE_AT_ONCE = 2,
    WORKS_AT_ONCE = 4,
    MODELS_AT_ONCE = 1,
    WORKERS = MOVES_AT_ONCE + WORKS_AT_ONCE + LARGE_AT_ONCE + MODELS_AT_ONCE
};
#define WORK_LARGE_BYTES ((size_t)64 << 10) /* a body with more is large */
/* Large bodies, or those that fetch pictures. */
struct work_queue {
    struct exchange *waiting;                /* for a thread; a list by work_next */
    struct exchange *at_work[LARGE_AT_ONCE]; /* on a thread; NULL: free */
};
/* Starts the threads. The server is ready only if they can run. */
int works_open(struct server *server, struct fault *fault);
void works_add(struct exchange *exchange); /* exchange_prepared follows, always later */

/* prepare.c: parses a body on a libuv worker; uses only the exchange and immutable data. */
void prepare_run(uv_work_t *work);           /* sets exchange->again if it must be queued again */
void prepare_end(struct exchange *exchange); /* frees what the work needed, if it is not */
/* Decodes the request's pictures (pictures.c). 0, or -1 with exchange->error. */
int prepare_pictures(struct exchange *exchange);
/* Computes the space of the client's conversations with this salt, on this server's model. */
int prepare_space(const struct exchange *exchange, const char *salt, uint8_t space[16]);

/* stream.c: events, from the arrays of the owner's jobs */
#define STREAM_BYTES_MAX ((size_t)256 << 20) /* one event with every kept position */
static inline const struct oai_form *stream_form(const struct stream *stream) {
    return stream->owner->request.kind->form;
}
int stream_open(struct stream *stream, struct exchange *owner); /* ERR_NOMEM */
void stream_close(struct stream *stream);
/* Renders the next events in place of those in events.out. */
void stream_render(struct stream *stream);
/* Appends to events.out, until its size is `most` or more. */
void stream_append(struct stream *stream, size_t most);
/* Appends all events of an exchange whose jobs have finished. */
void stream_write(struct buf *out, struct exchange *owner);
/* Returns whether a stream that is open has something to send: events, or a sign of life. */
bool stream_is_due(struct exchange *exchange, int64_t now_ns);

/* stream_reader.c */
/* Opens the exchange's stream and returns the response that reads it; NULL: there is no memory. */
struct MHD_Response *stream_begin(struct exchange *exchange);
/* Renders what is left of a stream whose jobs have finished, for a model that others wait for. */
void stream_hurry(struct exchange *exchange);

/* load.c: the load as a response header, for balancers that request it (ORCA) */
void load_add_header(struct exchange *exchange, struct MHD_Response *response);

/* routes.c */
/* Computes the space of the client's key and of the salt that it names (?cache_salt=). Not 0: the
 * request was refused. */
int exchange_space(struct exchange *exchange, uint8_t space[16]);
/* Fills *route and returns it. NULL with *allow = NULL: no such path; NULL with *allow:
 * another method. */
const struct route *route_find(const char *path, const char *method, struct route *route,
                               const char **allow);
/* Returns the path of a route that differs little from this one or has the same end; NULL: there is
 * none. */
const char *route_near(const char *path);

#endif
