/* A model that a server serves: its engine while it is loaded, the rules of its requests, and the
 * counts of those that have ended. What changes a model's state takes seconds, and runs on a worker
 * of libuv (models.c).
 *
 * Thread: the loop. Workers read `rules` and `engine` of an exchange's model, which stay as they
 * are while the exchange holds the model. */
#ifndef KEEPD_SERVER_SERVED_H
#define KEEPD_SERVER_SERVED_H

#include <stdatomic.h>
#include <sys/stat.h>

#include "server/oai/oai.h"
#include "server/server.h"
#include "server/stats.h"
#include "server/watchdog.h"

struct exchange;

enum served_state {
    SERVED_UNLOADED,
    SERVED_LOADING, /* a worker opens the engine */
    SERVED_LOADED,
    SERVED_UNLOADING, /* a worker closes the engine */
    SERVED_FAILED     /* `fault` says why; a later request tries again */
};
const char *served_state_name(enum served_state state);

struct served_model {
    struct server *server;
    const struct server_model *options;
    struct engine_options engine_options; /* with which the engine is opened */
    enum served_state state;
    bool checked;        /* the facts below are known */
    struct stat of_path; /* the model's file or directory, before it was checked */
    int64_t memory_bytes;
    int max_model_len;
    struct fault fault;
    struct engine *engine;   /* NULL: not loaded */
    char *names;             /* storage of rules.names */
    struct buf props, slots; /* answers of these routes after it was unloaded; empty: never */
    struct oai_rules rules;  /* names always; the others while it is loaded */
    struct stats stats;
    struct watchdog watchdog;
    struct engine_status *past;      /* [stats.replica_count] counts of engines that were closed */
    atomic_uint_fast64_t read, size; /* bytes of the weights, while it is loaded */
    atomic_bool unwanted;            /* the server stops, and its load ends before it is complete */
    int users;                       /* exchanges that hold it: it stays loaded */
    bool wanted;                     /* is to be loaded though no request waits */
    bool leaves; /* makes room for another model: new requests wait for its next turn */
    struct exchange *waiting, **waiting_end; /* requests that wait until it is loaded */
    int waiting_count;
    int64_t used_ns, loaded_ns, failed_ns;
    uint64_t loads, unloads, failures;
};

/* Reads the model's names. ERR_INVALID, ERR_LIMIT. */
int served_open(struct served_model *model, struct server *server,
                const struct server_model *options, struct fault *fault);
/* Takes the options of its engine, which are known now. */
void served_prepare(struct served_model *model);
/* Takes an engine, which is the model's from here on, whatever is returned. */
int served_use(struct served_model *model, struct engine *engine, struct fault *fault);
void served_close(struct served_model *model); /* with its engine */

/* Tasks of a worker. */
enum served_task { SERVED_CHECK, SERVED_LOAD, SERVED_UNLOAD };
struct served_work {
    enum served_task task;
    struct engine_found found;
    struct engine *engine;
    struct engine_status counted; /* SERVED_UNLOAD: the first replica's, which `past` has */
    uint64_t written, refused;    /* conversations since then */
    int rc;
    struct fault fault;
};
/* Returns whether the name is one of the model's, or an adapter's of the model: its own, or behind
 * one of the model's and a colon. *adapter: the adapter's name in it, or NULL. */
bool served_has_name(const struct served_model *model, const char *name, const char **adapter);
/* Returns whether the facts are known, and the model's file or directory is the one of which they
 * are. */
bool served_is_checked(const struct served_model *model);
/* Begins, runs (any thread, alone) and ends it. */
void served_begin(struct served_model *model, enum served_task task, struct served_work *work);
void served_run(struct served_model *model, struct served_work *work);
void served_end(struct served_model *model, struct served_work *work);

/* Notes that the model is used. Two requests do not count as uses: one that only asks about a
 * model, which a page repeats again and again, and one to a model that is being unloaded. If the
 * latter counted, the model would become the most recently used one and another would be unloaded
 * in its place, so that of two busy models neither would ever be free. */
void served_note_use(const struct exchange *exchange);
void served_leave(struct exchange *exchange);   /* holds its model no longer */
void served_unqueue(struct exchange *exchange); /* takes it out of its model's `waiting` */
void served_forget(struct exchange *exchange);  /* waits no longer, because its client left */

/* The counts of all of the model's engines, and while it is loaded the state of this one. */
void served_status(struct served_model *model, int replica, struct engine_status *out);

#endif
