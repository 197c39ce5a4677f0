/* The set of models that a server serves, and which of them are in memory.
 *
 * A request names its model. Where that one is not loaded, the request waits in the model's queue
 * with its body, which other limits bound, and a worker loads the model; one model is loaded or
 * unloaded at a time. The memory that a model takes is known before (served.h), so models are
 * loaded only where there is room for them beside those that stay: what leaves is the model that
 * was used least recently.
 *
 *   hold       Every exchange that uses an engine holds its model until its answer is rendered
 *              (exchange_rendered). A held model stays, so no answer is cut. A client that reads
 *              slowly holds none: its answer is in the connection's memory by then, or, of a
 *              stream, is put there when another model needs the room (stream_hurry).
 *   turns      For a model that waits for room, a model in use gets no new requests: they wait, and
 *              it leaves when its running ones have ended. The model whose first request has waited
 *              longest is loaded next. So each gets its turn.
 *   thrashing  A model stays `model_residence` seconds at least, and `model_loads` bounds the loads
 *              of a minute: beyond it requests for models that are not there get a 503 at once.
 *
 * Thread: the loop, but for the work of served_run. */
#ifndef KEEPD_SERVER_MODELS_H
#define KEEPD_SERVER_MODELS_H

#include <uv.h>

#include "server/served.h"

#define MODELS_MAX 256

struct models {
    struct served_model *items; /* the first is that of requests that name none */
    int count;
    struct oai_listed *listed; /* [count] their descriptions, filled by each models_render */
    struct engine_adapter_row *adapters; /* [count][ENGINE_ADAPTERS_MAX] those of `listed` */
    double allowance;                    /* loads that may begin now, refilled by model_loads */
    int64_t refilled_ns;
    bool changed; /* for models_look: a model is free, or a request waits no longer */
    struct served_model *working; /* a worker loads or unloads it; NULL: none */
    struct served_work task;
    uv_work_t work;
};

/* Takes the options' models. ERR_INVALID, ERR_LIMIT. */
int models_open(struct server *server, struct fault *fault);
/* Starts with an engine of the first model, or NULL: all are loaded when they are asked for. */
int models_start(struct server *server, struct engine *engine, struct fault *fault);
void models_close(struct server *server); /* no worker is at work: models_busy */

/* Finds a model by one of its names. NULL: there is none. Any thread. */
struct served_model *models_named(const struct server *server, const char *name);
/* Finds a model by one of its names, or by that of one of its adapters (served_has_name). NULL:
 * there is none. */
struct served_model *models_find(const struct server *server, const char *name,
                                 const char **adapter);
/* Finds the model of a request in its body, and enters it. false: the exchange has an error. */
bool models_choose(struct exchange *exchange);
enum models_entry { MODELS_ENTERED, MODELS_WAITS, MODELS_REFUSED };
/* Holds the exchange's model. WAITS: the connection is suspended, and exchange_begin follows when
 * the model is loaded, unless its client leaves. REFUSED: the exchange has an error. */
enum models_entry models_enter(struct exchange *exchange);
/* Holds a loaded model for a request without a body: the one that ?model= names, or else the first
 * one that is loaded. NULL: refused, and the request is answered. */
struct served_model *models_take(struct exchange *exchange);
/* Returns that model, or else the first one, without holding it. NULL: as above. */
struct served_model *models_ask(struct exchange *exchange);
/* Counts a request that is accepted no longer, because its jobs are submitted or refused. With the
 * last one of a drain the engines end. */
void models_one_submitted(struct server *server);

/* Decides what is loaded next, if something has changed on which that depends. */
void models_look(struct server *server);
void models_tick(struct server *server, int64_t now_ns);
void models_drain(struct server *server);      /* no more requests: engines, and loads, end */
void models_abort(struct server *server);      /* requests that wait are refused */
bool models_idle(const struct server *server); /* engines have written what outlives them */
bool models_busy(const struct server *server); /* a worker has a model */

/* Writes a list of the models, such as that of GET /v1/models. */
typedef void models_list_fn(struct buf *out, const struct oai_listed *models, int count,
                            int64_t created);
void models_render(struct buf *out, const struct server *server, models_list_fn *write);
/* Writes one of them. false: there is none with this id. */
bool models_render_one(struct buf *out, const struct server *server, const char *id);

#endif
