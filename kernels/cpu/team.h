/* Worker threads of the CPU backend: one team, one piece of work at a time.
 *
 * `cpu_team_run` calls work(arg, worker) once on every worker (worker 0 is the caller) and returns
 * when all have returned: the return is a barrier, with its memory ordering. One thread at a time
 * may call it. Workers spin briefly, then wait on a futex, so an idle backend costs nothing and
 * back-to-back operations do not pay for wake-ups. A team with more threads than cores does not
 * spin, because spinning would keep its own threads from running. */
#ifndef KEEPD_KERNELS_CPU_TEAM_H
#define KEEPD_KERNELS_CPU_TEAM_H

#include <stdatomic.h>
#include <stdint.h>

#include "base/err.h"

#define CPU_TEAM_THREADS_MAX 256

typedef void cpu_work(void *arg, int worker);

struct cpu_team;

/* threads = 0: one per core that this process may use. ERR_NOMEM: a thread could not be started. */
int cpu_team_open(int threads, struct cpu_team **out);
void cpu_team_close(struct cpu_team *team); /* NULL allowed; no run may be in progress */
int cpu_team_cores(void);                   /* cores that this process may use */
int cpu_team_threads(const struct cpu_team *team);
void cpu_team_run(struct cpu_team *team, cpu_work *work, void *arg);

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
