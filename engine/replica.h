/* One replica of the model: a backend, a scheduler with its pool, and the thread that runs them.
 *
 * An engine has one or several (data parallelism); they share the text and the state directory, and
 * nothing else that changes. What others may see of a replica (counts, running sequences,
 * conversations) is copied under its lock after every step, and when jobs are admitted.
 *
 * Threads: open, start, stop and close belong to the engine's owner; submit and order to the loop;
 * the rest of the functions to anybody. `sched`, `kern` and `model` are the replica's thread's
 * after replica_start, but for sched.options, which never changes. */
#ifndef KEEPD_ENGINE_REPLICA_H
#define KEEPD_ENGINE_REPLICA_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/ring.h"
#include "engine/adapters.h"
#include "engine/backend.h"
#include "engine/engine_conversations.h"
#include "engine/engine_job.h"
#include "engine/engine_stats.h"
#include "engine/steps/sched.h"
#include "model/model.h"
#include "model/vision.h"

/* Shared by the replicas of an engine; it outlives them. */
struct replica_common {
    void (*wake)(void *arg); /* after a step that changed some job */
    void *arg;
    int max_queue;     /* jobs that may wait for each of them */
    atomic_int orders; /* orders that some replica has not answered */
    struct adapter_table *adapters;
    atomic_bool draining, stopping;
};

/* The last published form of a conversation: what lists show, and what a prompt is compared with to
 * find its replica. */
struct conversation_copy {
    struct engine_conversation_row row; /* id 0 = none */
    struct conversation of;             /* without its tokens */
    uint64_t *marks;                    /* owned; NULL: too short, or no memory */
};

/* The encoder of pictures and its backend; NULL: there is none. */
struct encoder {
    struct kern *kern;
    struct vision *vision;
};

struct replica {
    int index;
    struct replica_common *common;
    struct store *store; /* the replica's access to the state directory; NULL without one */
    struct kern *kern;
    struct model *model;
    struct kern *draft_kern; /* the draft model's; NULL: there is none */
    struct model *draft_model;
    struct encoder encoder;
    struct sched sched;
    struct ring submits, orders;                    /* loop -> replica */
    struct engine_order *writes[ENGINE_ORDERS_MAX]; /* orders whose file is not written yet */
    int write_count;
    unsigned adapter_changes; /* the table's `changes` when it was last looked at */
    atomic_int waiting;       /* submitted jobs that have not been admitted, < max_queue */
    atomic_int pending;       /* submitted jobs that have not finished: what drain waits for */
    atomic_llong busy_ns;     /* when a job was last submitted to a replica that had none */
    atomic_llong tokens;      /* computed at most by the pending jobs: the replica's load */
    atomic_bool unsaved;      /* whether something is not on disk yet that could be */
    bool started;
    pthread_t thread;
    pthread_mutex_t lock; /* for sleeping while idle and for all below */
    pthread_cond_t work;
    bool drain_seen;     /* by the thread: it has begun to write everything */
    bool woken;          /* since the thread looked last */
    uint64_t progress;   /* sched_progress when it was read last */
    int64_t progress_ns; /* time when that grew, or when there was nothing to do */
    struct engine_status status;
    struct engine_sequence_row *sequence_rows;
    int sequence_count;
    struct conversation_copy *conversation_copies; /* [copy_count], as they lie in the table */
    int copy_count;
    uint64_t conversation_changes; /* the table's `changes` when it was copied */
};

/* Life: open; kern, model and store are opened by the caller; ready; start; stop; close, which may
 * follow any of them. */
void replica_open(struct replica *replica, int index, struct replica_common *common);
/* Takes the scheduler's options, of which kern, model and store are filled in here; `drafter` and
 * `pictures` are this replica's. */
void replica_ready(struct replica *replica, const struct sched_options *options);
int replica_start(struct replica *replica); /* ERR_NOMEM */
void replica_stop(struct replica *replica); /* common->stopping is set: its thread has ended */
void replica_close(struct replica *replica);

void replica_signal(struct replica *replica); /* something has changed that the thread must see */
void replica_wake(void *replica);             /* a file or a mask may have come */
bool replica_has_capacity(
    const struct replica *replica); /* in its queue; stays true until submit */
void replica_submit(struct replica *replica, struct engine_job *job);
/* Hands over an order, which every replica gets; the last one to carry it out says so. The ring has
 * space for it. */
void replica_order(struct replica *replica, struct engine_order *order);
/* Returns whether its thread carries out orders. */
bool replica_runs(struct replica *replica);
/* Notes how well its best conversation in memory serves the search. */
void replica_affinity(struct replica *replica, struct conversation_search *search,
                      struct conversation_affinity *best);

bool replica_idle(struct replica *replica); /* see engine_idle */
void replica_status(struct replica *replica, struct engine_status *out);
int replica_sequences(struct replica *replica, struct engine_sequence_row *rows, int max);
int replica_conversations(struct replica *replica, const struct engine_conversation_filter *filter,
                          struct engine_conversation_row *rows, int max);

#endif
