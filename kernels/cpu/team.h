/* Worker threads of the CPU backend: one team, one piece of work at a time.
 *
 * `cpu_team_run` calls work(arg, worker) at most once on every worker (worker 0 is the caller, and
 * always takes part) and returns when all calls have returned: the return is a barrier, with its
 * memory ordering. The work must not depend on how many workers take part: they share it by
 * tickets. One thread at a time may call it.
 *
 * Workers spin briefly, then wait on a futex, so an idle backend costs nothing and back-to-back
 * operations do not pay for wake-ups. A team with more threads than cores does not spin, because
 * spinning would keep its own threads from running.
 *
 * A team of one thread per core is *elastic*. Where other programs compute, a thread loses its core
 * for milliseconds in the middle of an operation that takes microseconds, and all others wait for
 * it. Such a team tries how fast it is with one worker less, and later with one more. */
#ifndef KEEPD_KERNELS_CPU_TEAM_H
#define KEEPD_KERNELS_CPU_TEAM_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"

#define CPU_TEAM_THREADS_MAX 256

typedef void cpu_work(void *arg, int worker);

struct cpu_team;

/* threads = 0: one per core (available_cores), elastic; otherwise all threads take part in all
 * runs. ERR_NOMEM: a thread could not be started. */
int cpu_team_open(int threads, struct cpu_team **out);
void cpu_team_close(struct cpu_team *team); /* NULL allowed; no run may be in progress */
int cpu_team_threads(const struct cpu_team *team);
void cpu_team_run(struct cpu_team *team, cpu_work *work, void *arg);
/* The same on exactly the workers [0, workers), for work that is divided by worker. */
void cpu_team_run_on(struct cpu_team *team, int workers, cpu_work *work, void *arg);

/* How many workers of an elastic team take part. Pure; times are ns.
 *
 * In a window of time, `members` workers did members * (passed - lost) / passed seconds of work in
 * a second, where time is lost while the caller has no core, or waits for a worker. Idle time
 * counts as work, which makes no difference where it matters. */
struct cpu_elastic {
    int threads, members; /* 1 <= members <= threads */
    /* The window. Of `waited`, `interrupted` was for workers whose core was taken. */
    int64_t since, waited, interrupted, own;
    int trial; /* 1 or -1: the team was changed by so many, and had this rate before */
    double before;
    int64_t hold, try_at; /* how long the team stays as it is after a trial, and until when */
};

void cpu_elastic_set(struct cpu_elastic *elastic, int threads);
/* Counts a wait of the caller for its workers. */
void cpu_elastic_wait(struct cpu_elastic *elastic, int64_t waited, bool interrupted);
/* Whether a window has passed at `now`. */
bool cpu_elastic_is_due(const struct cpu_elastic *elastic, int64_t now);
/* Ends the window. `own`: how long the caller has waited for a core since it started. A change that
 * did not make the team faster is undone, and the next trial comes later: after two seconds at
 * most. */
void cpu_elastic_decide(struct cpu_elastic *elastic, int64_t own, int64_t now);

/* Hands out items [0, count) on demand: a slow core takes fewer. Set before the run. */
struct cpu_tickets {
    _Atomic int64_t next;
    int64_t count;
};

static inline void cpu_tickets_set(struct cpu_tickets *tickets, int64_t count) {
    tickets->count = count;
    atomic_store_explicit(&tickets->next, 0, memory_order_relaxed); /* published by cpu_team_run */
}

/* Claims up to `grain` items; returns the first one, or -1 if none are left. *end is past the last.
 * Relaxed: the counter only divides work; the barrier publishes results. */
static inline int64_t cpu_tickets_take(struct cpu_tickets *tickets, int64_t grain, int64_t *end) {
    int64_t first = atomic_fetch_add_explicit(&tickets->next, grain, memory_order_relaxed);
    if (first >= tickets->count) return -1;
    *end = first + grain < tickets->count ? first + grain : tickets->count;
    return first;
}

#endif
