/* How the engine's thread hands results to readers, the other half of engine_see_choice and
 * engine_see_job. Everything a store announces is written before it, so a reader that sees the
 * store sees the rest: a token's contents before its count, all tokens before `finish`, all choices
 * before `finished`. tests/unit/engine/test_publish.c checks both halves against each other in
 * every order that the memory model allows. */
#ifndef KEEPD_ENGINE_STEPS_PUBLISH_H
#define KEEPD_ENGINE_STEPS_PUBLISH_H

#include "base/mem.h"
#include "engine/engine_job.h"

/* Publishes tokens[count - 1], which is written, and its text, of which `safe` bytes may be shown.
 */
static inline void publish_token(struct engine_choice *choice, uint32_t count, size_t safe) {
    atomic_store_explicit(&choice->text_safe, safe, memory_order_release);
    atomic_store_explicit(&choice->token_count, count, memory_order_release);
}

static inline void publish_choice_end(struct engine_choice *choice) {
    atomic_store_explicit(&choice->finish, (int)choice->ending, memory_order_release);
}

/* Allocates the live reports of a job, before it has a reader. */
static inline int publish_live_open(struct engine_job *job, size_t streams) {
    struct engine_live *live =
        mem_try_alloc(1, sizeof *live + ENGINE_LIVE_REPORTS * streams * sizeof *live->lengths);
    if (!live) return ERR_NOMEM;
    for (size_t i = 0; i < ENGINE_LIVE_REPORTS; i++)
        live->held[i].lengths = &live->lengths[i * streams];
    live->reading = 1;
    atomic_init(&live->between, 2);
    job->live = live;
    return 0;
}

/* Returns the report to write next; NULL: there are no live reports. */
static inline struct engine_held *publish_held_next(const struct engine_job *job) {
    return job->live ? &job->live->held[job->live->writing] : NULL;
}

/* Hands the written report over. It replaces an older one that was not read yet. */
static inline void publish_held(struct engine_job *job) {
    struct engine_live *live = job->live;
    live->writing = atomic_exchange_explicit(&live->between, live->writing | ENGINE_LIVE_NEW,
                                             memory_order_acq_rel) &
                    ~ENGINE_LIVE_NEW;
}

/* Hands the job back to its submitter, after the ends of its choices. */
static inline void publish_job_end(struct engine_job *job) {
    atomic_store_explicit(&job->finished, 1, memory_order_release);
}

#endif
