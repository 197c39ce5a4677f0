/* The thread that makes the masks that cost more than a step may spend on them
 * (engine/steps/constraint.h).
 *
 * A task describes one mask. It has its own copy of the text and counts as a user of the
 * constraint, so the answer it is made for may end at any time. Tasks are served in turn, a slice
 * of work each; the slices of a task grow, because a part of the work has to be done in one piece.
 * So a task waits for the slices of the others and not for their ends. The thread has a lower
 * priority than those that compute, and starts with the first task.
 *
 * Threads: any may call any function. The owner of a task alone reads its results, after
 * mask_task_done. */
#ifndef KEEPD_ENGINE_STEPS_MASK_THREAD_H
#define KEEPD_ENGINE_STEPS_MASK_THREAD_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "constrain/constrain.h"

#define MASK_SLICE_WORK 16000 /* first slice of a task; the next ones double */
#define MASK_NICE       10    /* about a tenth of a processor that others want to use, too */

/* A function that the thread calls when a task has ended; {NULL}: none. */
struct mask_wake {
    void (*call)(void *arg);
    void *arg;
};

struct mask_task {
    struct constrain *language;
    void (*release)(void *arg); /* called once, when the task no longer uses the language */
    void *release_arg;
    struct mask_wake wake;
    struct constrain_at at;
    struct constrain_next next; /* result */
    uint32_t *mask;             /* result, [words]; owned; NULL: not wanted */
    char *text;                 /* owned */
    size_t size;
    uint64_t slice;
    int rc;           /* result, after `done` */
    bool dropped;     /* no owner waits for it; guarded by the thread's lock */
    atomic_bool done; /* from now on the owner alone uses the task */
    struct mask_task *next_task;
};

struct mask_thread {
    pthread_mutex_t lock;
    pthread_cond_t work;
    struct mask_task *first, *last; /* the queue of tasks */
    bool started, stopping;
    pthread_t thread;
};

int mask_thread_open(struct mask_thread *thread); /* ERR_NOMEM */
/* Ends the thread. After it no task wakes anybody. */
void mask_thread_stop(struct mask_thread *thread);
/* Stops it, and frees the tasks that were not done. All owners have dropped theirs. */
void mask_thread_close(struct mask_thread *thread);

/* Makes a task for the text so far. The caller fills in `language`, `release` and `wake`, and posts
 * it. NULL: no memory. */
struct mask_task *mask_task_open(const struct constrain_at *at, const char *text, size_t size,
                                 size_t mask_words);
/* Hands a task over. ERR_NOMEM: there is no thread, and the task stays the caller's. */
int mask_thread_post(struct mask_thread *thread, struct mask_task *task);

static inline bool mask_task_done(const struct mask_task *task) {
    return atomic_load_explicit(&task->done, memory_order_acquire);
}

/* Gives the task up: its owner has read the result, or no longer wants it. */
void mask_task_drop(struct mask_thread *thread, struct mask_task *task);

#endif
