/* The waiting jobs of a scheduler, by client: whose turn it is, by fair shares.
 *
 * Each client has a record: its waiting jobs in the order of arrival, and `served`, the work done
 * for it, divided by the client's weight. Next is the client that was served least, ties by arrival
 * (the virtual token counter of Sheng et al., OSDI 2024). Work is counted in tokens: one for each
 * prompt token computed and each token generated, more for evictions (paging/policy.h) and for
 * places that stay empty for its job (engine/steps/sched_admit.c). A cost is charged when it
 * arises, so an answer that ends early costs less.
 *
 * A client that comes back, or is new, starts no lower than the active client served least: being
 * away earns nothing. A record is kept for as long as its client has jobs here, waiting or running;
 * afterwards until another client needs it, so that leaving loses no debt.
 *
 * Bounds: `records_max` records. When all are taken by active clients, a new client shares the
 * record that its key falls on. Joining reads every record; a choice reads every waiting job at
 * most.
 *
 * Thread: the engine thread. */
#ifndef KEEPD_ENGINE_STEPS_QUEUE_H
#define KEEPD_ENGINE_STEPS_QUEUE_H

#include "base/check.h"
#include "engine/engine_job.h"

struct queue_client {
    uint8_t key[16];
    int jobs;                        /* waiting or running; 0: only `served` is of interest */
    int waiting;                     /* the waiting ones of `jobs` */
    int running;                     /* sequences of the others; the scheduler's */
    int places;                      /* wanted by its jobs, see queue_plan_places */
    int peak;                        /* the most `places` lately */
    uint64_t peak_step;              /* when */
    int32_t weight;                  /* 1 and more; that of the newest job */
    int64_t served;                  /* tokens for each unit of weight */
    int64_t rest;                    /* tokens not yet in `served`, fewer than the weight */
    int64_t prompts_waiting;         /* tokens of its waiting jobs' prompts */
    int64_t prompts_ahead;           /* and what its running ones still read; the scheduler's */
    int64_t pages;                   /* reserved by its running sequences; the scheduler's */
    int64_t pages_max;               /* the client's quota, 0 = none; that of the newest job */
    int64_t wants_pages;             /* reserved for all choices of its newest job */
    int64_t evict_rows;              /* eviction work not paid for yet; the scheduler's */
    uint64_t seen_step;              /* when a job of it last came or ended */
    int32_t reads;                   /* mean of its latest prompts: tokens to compute; 0: none */
    bool crowds;                     /* see queue_find_crowd */
    bool goes_first;                 /* before wide jobs of others, see queue_plan_places */
    uint64_t first_border;           /* the `border` for which `first_places` counts */
    int first_places;                /* places of its jobs that went first */
    struct engine_job *first, *last; /* waiting, linked by job->next */
};

struct queue_capacity {
    int places;
    int64_t pages;
};

struct queue {
    struct queue_client *records; /* [records_max]; the first `record_count` have had a client */
    int records_max, record_count;
    int waiting;      /* jobs */
    int clients;      /* clients with jobs, waiting or running */
    int64_t least;    /* `served` of a client that begins; never falls */
    uint64_t arrived; /* number of jobs so far; the next job's number */
    int places;       /* the most sequences that run at once */
    uint64_t step;    /* see queue_plan_places */
    int64_t weights;  /* sum of the weights of the clients that have a share of the places */
    int kept;         /* places kept free for clients below their shares */
    bool several;     /* there is more than one client, seen or not */
    struct queue_capacity guest; /* see queue_plan_places */
    uint64_t border;             /* number of jobs that had arrived when the last wide job ended */
    int first;                   /* clients that go before wide jobs of others */
};

/* Number of steps for which a client still counts after its last job ended. */
#define QUEUE_KEEP_STEPS 256

void queue_open(struct queue *queue, int records_max, int places);
void queue_close(struct queue *queue); /* no job may wait */

/* Appends the job to those of its client (job->request.client). */
void queue_join(struct queue *queue, struct engine_job *job);
/* Takes a waiting job out; it still counts as its client's. */
void queue_remove(struct queue *queue, struct engine_job *job);
/* The job has ended; it does not wait. */
void queue_end(struct queue *queue, struct engine_job *job);

static inline struct queue_client *queue_client_of(const struct queue *queue,
                                                   const struct engine_job *job) {
    return &queue->records[job->client];
}
static inline void queue_charge(struct queue *queue, const struct engine_job *job, int64_t tokens) {
    struct queue_client *client = queue_client_of(queue, job);
    CHECK(tokens >= 0);
    client->rest += tokens;
    client->served += client->rest / client->weight;
    client->rest %= client->weight;
}
/* Returns the pages that the client may still reserve beside its running sequences. */
static inline int64_t queue_pages_left(const struct queue *queue, const struct engine_job *job) {
    const struct queue_client *client = queue_client_of(queue, job);
    return client->pages_max > 0 ? client->pages_max - client->pages : INT64_MAX;
}

/* Returns the waiting job whose turn it is among those that `suits` accepts (NULL: all); NULL:
 * none. */
struct engine_job *queue_next(const struct queue *queue,
                              bool (*suits)(const void *arg, const struct engine_job *job),
                              const void *arg);
/* Returns how many jobs wait for clients other than the job's own. */
int queue_others(const struct queue *queue, const struct engine_job *job);

/* Shares of places. A running job is never preempted, so a client with many jobs would take every
 * place in a moment in which no other waits, and the next question would wait for the first of them
 * to end. Hence a quarter of the places is kept for clients that hold less than their share.
 *
 * Every client that has a job, or had one in the last QUEUE_KEEP_STEPS steps, has a share of the
 * places in proportion to its weight, at least one. Below its share a client takes any free place.
 * Beyond it, a job is admitted only if enough places stay free: as many as other clients lack of
 * their shares, but of each at most as many as its jobs wanted at once lately, and of all together
 * at most a quarter of the places (with fewer than four places none). Jobs that want more places
 * than that quarter are not bound when it is their turn, and nothing is kept for them: their turn
 * is by service alone. The same holds for any job of a client that runs nothing, which may want
 * more than its share.
 *
 * Such wide jobs run one after the other, each alone or nearly so, and small jobs wait meanwhile.
 * Served work does not put a small job before the next wide one: nobody was served while it
 * waited but the one that ran. Hence, when a wide job ends, the jobs that have arrived by then go
 * before the next wide one, of each client as many as fit its share. So a small job waits for one
 * wide job that runs, however many wait; and a wide one for one share of every other client.
 *
 * A client that was away for longer has no part in this: nobody knows when it comes. Hence, where
 * several clients were ever seen or have keys, one place and the pages of a request, `guest`, are
 * left to clients that run nothing. These are the most pages that the newest request of such a
 * client wanted; engine/steps/sched_admit.c bounds them, and says who leaves them. */

/* Computes what is kept in this step. Returns whether it has changed. */
bool queue_plan_places(struct queue *queue, uint64_t step);
/* Returns the places that the job's client has a share of. */
int queue_share(const struct queue *queue, const struct engine_job *job);
/* Returns whether the job may take `free` places, or some of them; `turn`: it is the job's turn. */
bool queue_may_start(const struct queue *queue, const struct engine_job *job, int free, bool turn);

/* Crowding. Each client that has a job, or had one in the last QUEUE_CROWD_STEPS steps, has a part
 * of the sequences that run, in proportion to its weight. A client that runs more than its part
 * crowds. One client alone never does, and neither does a client with a single sequence: while the
 * others run nothing, it runs more than its part, and its prompt would be read in small pieces. */
#define QUEUE_CROWD_STEPS 4096

/* Finds out which clients crowd. Returns the fewest prompt tokens that one of the others usually
 * has read (queue_note_prompt), of those without waiting jobs: a first token that waits for a place
 * gains nothing from short steps. 0: nobody crowds, or there is no such other client. */
int32_t queue_find_crowd(struct queue *queue);
/* Notes that a job begins to run and has so many prompt tokens computed. */
void queue_note_prompt(struct queue *queue, const struct engine_job *job, int32_t tokens);

/* Returns a cancelled job, wherever it waits; NULL: there is none. */
struct engine_job *queue_cancelled(const struct queue *queue);

#endif
