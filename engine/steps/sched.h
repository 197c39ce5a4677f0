/* The scheduler: which sequences run, how many tokens each gets in a step, which of them evict, and
 * what is retained.
 *
 * One step (sched_step):
 *   1. cancelled jobs end; waiting jobs are admitted by fair shares between clients while their
 *      reservations fit (sched_admit.c), and retained conversations are displaced for them
 *      (engine/kept/keeper.h);
 *   2. generating sequences whose next append would exceed M + buffer evict; then sequences that
 *      have used up the model's positions are shifted (sched_evict.c);
 *   3. of the pictures in prompts, a part of a tile is encoded (sched_pictures.c);
 *   4. a batch: one row for every generating sequence, and rows for the tokens with which it
 *      probably goes on (sched_draft.c), then prompt rows, oldest first, up to the row budget of
 *      the step (beside answers a smaller one, pace.h) and never past a sequence's next eviction
 *      point or border; clients that run more than their part take turns (sched_turns.c);
 *   5. the model runs; wanted rows are sampled or scored; tokens are published;
 *   6. sequences at an eviction point evict, after readers were woken for first tokens; the
 *      streams of finished ones become a conversation or return to the pool.
 * Other requests change when a token is computed, never which token: eviction points depend on the
 * request alone (paging/due.h) and the backend's rows are independent (kernels/kern.h).
 *
 * Reservations cover whatever a sequence may come to hold (paging/due.h), so begin_step cannot run
 * out of pages and nothing is ever preempted; if it does, that is a bug: the sequences of the step
 * fail, a counter records it, and the others continue. Any other failure of the backend ends the
 * running requests too, and only those.
 *
 * A job with n choices is n sequences, admitted together or not at all. The first reads the prompt;
 * with its last token all sample their first token from the same logits, each with its own seed,
 * and after the eviction due then the others become copy-on-write forks of it. Every one of them
 * reserved as if it shared nothing, so whatever is shared later only adds to what is free. The same
 * holds for conversations that are continued: the fork reserves in full, the conversation keeps
 * counting its own pages, and pages that both refer to are counted twice but held once.
 *
 * A constrained sequence takes part in a step when the mask of its next token is known. Masks that
 * cost more than a step may spend are made beside the steps (engine/steps/mask_thread.h), so it may
 * miss some; a prompt waits with its last row.
 *
 * Each running sequence has one row of logits for its next token. Drafts, and prompts that are to
 * be scored, share the remaining rows of logits, so scoring a long prompt delays no answer.
 *
 * Thread: the engine thread. The scheduler knows nothing of HTTP or of the format of files, and
 * uses the clock only to measure durations. With step_stretch these decide how many prompt rows and
 * drafted rows a step has, and whose turn it is. */
#ifndef KEEPD_ENGINE_STEPS_SCHED_H
#define KEEPD_ENGINE_STEPS_SCHED_H

#include "engine/engine_job.h"
#include "engine/engine_stats.h"
#include "engine/kept/keeper.h"
#include "engine/steps/drafter.h"
#include "engine/steps/pace.h"
#include "engine/steps/pictures.h"
#include "engine/steps/queue.h"
#include "engine/steps/sched_kv.h"
#include "engine/steps/seq.h"
#include "kernels/kern.h"

/* Runs one step of the model and leaves logits [want_count, vocab] and, with `hidden` not NULL,
 * hidden states [batch->rows, width]; see model_step_hidden. The simulation passes a model of its
 * own. */
typedef int (*sched_model_step)(void *model, const struct kern_batch *batch, const int32_t *want,
                                int want_count, const float **logits, const float **hidden);

/* Number of steps during which other jobs may pass the head of the queue:
 * engine/steps/sched_admit.c. */
#define SCHED_PASS_STEPS 128

/* Rows of eviction work that a client may spend a step for each of its running sequences, while
 * others run (sched_evict.c). A default request spends about 1 with most policies, 5 with rkv. */
#define SCHED_EVICT_ROWS 8

/* Clients' served tokens are compared in units of this many when prompt rows are given out. */
#define SCHED_PROMPT_TURN 4096

/* Drafted tokens in one step of a model with recurrent states, and the rows of their sequences. */
#define SCHED_STATE_DRAFTS 16
#define SCHED_PEEK_ROWS    (2 * SCHED_STATE_DRAFTS)

#define SCHED_COPY_BYTES ((size_t)16 << 20) /* a few milliseconds of copying */

struct sched_options {
    struct sched_kv kv;
    struct kern *kern; /* with an open cache of sequences_max + conversations_max slots */
    void *model;
    sched_model_step model_step;
    /* Brings recurrent states forward behind a step with drafts (model_bring_states). NULL: states
     * cannot wait, so there are no drafts. */
    void (*bring_states)(void *model, const struct kern_span *spans, int count);
    struct seq_text text;
    struct reserve_shape shape;
    int vocab;
    int width; /* numbers of a hidden state; 0: no request may want vectors */
    /* The model sees a text both ways: it is read in one step, and nothing is generated. No text is
     * longer than rows_max. */
    bool whole_texts;
    /* Makes a text's vector, or a number for each label, [vector_width], of its pooled hidden
     * states [width]; host memory (model_end_vector). NULL: they are the vector. */
    int (*end_vector)(void *model, const float *pooled, float *out);
    int vector_width;
    int top_max; /* alternatives of one token that requests may want */
    int64_t pages_total, page_bytes;
    struct store *store;  /* conversations go there and come back; NULL = nowhere */
    int64_t save_idle_ns; /* idle time after which a conversation is written */
    size_t copy_bytes;    /* copied out of the cache, and into it, in one step, at least */
    int sequences_max, conversations_max, rows_max, logits_max;
    int drafts; /* drafted tokens of a sequence in one step, at most; 0..DRAFT_MAX */
    struct drafter_options drafter;   /* the draft model; all 0: there is none */
    struct pictures_options pictures; /* the encoder of pictures; all 0: there is none */
    /* The hidden states of the rows that the last step wanted, in their order, [.., drafter.width]
     * in the backend's memory; for a drafter with a width. */
    const float *(*wanted_hidden)(void *model);
    int step_stretch;              /* the percentage of pace_rows; 0: steps do not depend on time */
    int64_t (*clock)(void *model); /* measures steps; NULL: clock_ns. Simulations have their own. */
    int row_entries;               /* see kv_eviction_rows */
    int clients_max;               /* rows of the queue, see engine/steps/queue.h */
    struct mask_wake mask_wake;    /* for a scheduler that is stalled; may be {NULL} */
    atomic_int *queue_places;      /* given back when a job leaves the waiting list; may be NULL */
    atomic_int *pending_jobs;      /* counted down when a job finishes; may be NULL */
    atomic_llong *pending_tokens;  /* counted down by sched_job_tokens; may be NULL */
    /* Called in a step that has published first tokens and goes on with their evictions; may be
     * NULL. */
    void (*answered)(void *arg);
    void *answered_arg;
    /* Called in a step that has admitted jobs, before the model runs; may be NULL. */
    void (*admitted)(void *arg);
    void *admitted_arg;
};

/* The owner of a job: its submitter, the scheduler's queue, its running sequences, or, after its
 * end, the list that sched_publish_finished hands back to the submitters. */
enum sched_stage { SCHED_SUBMITTER, SCHED_QUEUED, SCHED_RUNNING, SCHED_ENDED };

/* The plan of a step, see engine/steps/sched_turns.c. */
struct sched_turns {
    bool reads;      /* the step is for prompts of crowding clients */
    bool apart;      /* prompts of clients that do not crowd are read in a step of their own */
    int32_t rest;    /* rows of all prompts that are read apart */
    double bound_ns; /* the longest that a step with work of crowding clients may take; 0: any */
    int streams;     /* answers that go on, whether or not they sit out */
    uint64_t number; /* the number of turns of answers so far */
    uint64_t apart_steps;   /* counts steps for prompts that are read apart */
    uint64_t divided_steps; /* counts other steps in which some answers sat out */
};

/* The state of admission (engine/steps/sched_admit.c). */
struct sched_admission {
    uint64_t head_step;           /* counters.steps when the head was chosen */
    struct engine_job *past_head; /* the last one that gave way and waits; NULL: none */
    uint64_t past_head_step;
    struct queue_capacity passed; /* taken by clients that ran nothing, while the head waited */
    uint64_t head_changes;        /* keeper.head_changes when the head was tried last */
    uint64_t others_tried; /* keeper.changes when every job that may pass the head was tried */
    uint64_t wait_ends;    /* number of the step in which the first wait for a prefix is over */
};

/* Choices and jobs that have ended and are not published yet, in the order of their ends. */
struct sched_ended {
    struct engine_choice *first, *last;
    struct engine_job *first_job, *last_job; /* jobs whose choices have all ended */
};

struct sched {
    struct sched_options options;
    struct sequence *sequences; /* [sequences_max] */
    int *order;                 /* indices of running sequences, oldest first */
    int running;
    struct keeper keeper;
    struct queue queue;      /* the waiting jobs */
    struct engine_job *head; /* waits and is next, until it runs or ends; NULL: not chosen */
    struct sched_admission admission;
    struct sched_turns turns;
    struct pace pace;
    struct drafter drafter;
    struct pictures pictures;
    struct sched_ended ended;
    struct engine_counters counters;
    struct constraint_work mask_work; /* budget of the step for masks */
    int64_t mask_ns;                  /* time that the step has spent on them */
    bool all_wait; /* the last step had no row: all running sequences wait for masks */
    bool encoded;  /* a part of a tile was encoded before the last step */
    /* Scratch of one step. */
    struct kern_span *spans;
    struct sequence **span_sequences; /* the sequence of spans[i] */
    struct sequence **sorted;         /* running sequences in another order */
    int32_t *rows, *want;
    struct kern_given *given;  /* [rows_max]; NULL: there are no pictures */
    struct kern_place *places; /* [rows_max]; NULL: no pictures, or they have plain places */
    struct sched_want *wants;
    struct kern_sample *samples;
    struct kern_sampled *sampled;
    float *pool_rows; /* [SCHED_POOL_ROWS, width] hidden states from the backend; NULL: no width */
    float *pool_vector; /* [vector_width] of one text; NULL: no options.end_vector */
    float *wide_row;    /* [vocab] logits from the backend; NULL: no request may want it */
    void *wide_scratch; /* for kern_alternatives */
};

void sched_open(struct sched *sched, const struct sched_options *options);
void sched_close(struct sched *sched); /* every job finishes with ABORT; slots are released */

/* Ends every job, running or waiting, with ABORT, or with ERROR and the text of `rc`. */
void sched_abandon(struct sched *sched, enum engine_finish finish, int rc);

/* Tokens that a job may make a scheduler compute, at most: what it weighs when the load of several
 * is compared. */
static inline int64_t sched_job_tokens(const struct engine_job *job) {
    const struct engine_request *request = &job->request;
    return request->prompt_count + (int64_t)request->max_tokens * seq_job_choices(request);
}

/* Appends to the waiting list. The job's kv parameters are resolved (sched_resolve_job) and its
 * arrays are allocated. */
void sched_submit(struct sched *sched, struct engine_job *job);

/* Fills in by which conversations a job could continue; its kv parameters are resolved. Returns
 * false if it continues none: it wants none, or the scores of its whole prompt. Pure. */
bool sched_query(const struct engine_job *job, struct conversation_query *out);

/* ERR_LIMIT: the pages that a resolved job may need, the same number that admission uses, can never
 * fit the pool. Pure. */
int sched_check(const struct sched_options *options, const struct engine_job *job,
                struct fault *fault);

/* Takes one step. Returns true when there was anything to do. *device_failed is set when the
 * backend reported ERR_DEVICE: running jobs have failed, and later steps would fail too. */
bool sched_step(struct sched *sched, bool *device_failed);
bool sched_idle(const struct sched *sched);
/* Returns true if everything that runs waits for masks, and every waiting job for the store. */
bool sched_stalled(const struct sched *sched);
/* Grows while requests make progress: with every step and every block that is copied, read or
 * written. While the head of the queue waits for the store it grows with the blocks alone, because
 * steps do not help the head. */
uint64_t sched_progress(const struct sched *sched);

/* Stores `finish` in the choices that ended and `finished` in the jobs that ended, in the order of
 * their ends. This hands the jobs back, so the caller first publishes everything that readers of a
 * finished job may expect, such as the counters. */
void sched_publish_finished(struct sched *sched);

#endif
