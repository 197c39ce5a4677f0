/* A team of worker threads with a spin-then-futex barrier. Decoding runs dozens of operations per
 * layer, each shorter than a wake-up, so workers spin briefly before they sleep. */
#include "kernels/cpu/team.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/check.h"
#include "base/mem.h"
#include "kernels/cpu/alloc.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define relax() _mm_pause()
#else
#define relax() ((void)0)
#endif

/* About 50 us: longer than the serial work between two operations of a layer, short enough that an
 * idle daemon does not visibly use a core. */
#define SPIN_TURNS 1500

struct cpu_team {
    /* Written by the caller before it raises `epoch`, read by workers after they see the new
     * value. */
    cpu_work *work;
    void *arg;
    bool stop;
    int threads, spin;

    _Alignas(64) _Atomic uint32_t epoch; /* incremented by every run */
    _Atomic uint32_t sleepers;           /* workers that may be in futex_wait on epoch */
    _Alignas(64) _Atomic uint32_t busy;  /* workers that have not finished this run */
    _Atomic uint32_t caller_sleeps;

    pthread_t *thread; /* [threads - 1] */
    int started;
};

struct start {
    struct cpu_team *team;
    int worker;
};

static void futex_wait(_Atomic uint32_t *word, uint32_t while_value) {
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAIT_PRIVATE, while_value, NULL, NULL, 0);
}

static void futex_wake_all(_Atomic uint32_t *word) {
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

/* ---- Worker ---- */

static uint32_t wait_epoch(struct cpu_team *team, uint32_t seen) {
    for (int turn = 0; turn < team->spin; turn++) {
        uint32_t now = atomic_load_explicit(&team->epoch, memory_order_acquire);
        if (now != seen) return now;
        relax();
    }
    /* Sequentially consistent on both sides: either the caller sees this sleeper and wakes it, or
     * this load sees the new epoch; futex_wait itself refuses a value that has changed. */
    atomic_fetch_add(&team->sleepers, 1);
    uint32_t now;
    while ((now = atomic_load(&team->epoch)) == seen) futex_wait(&team->epoch, seen);
    atomic_fetch_sub(&team->sleepers, 1);
    return now;
}

static void finish_share(struct cpu_team *team) {
    if (atomic_fetch_sub(&team->busy, 1) == 1 && atomic_load(&team->caller_sleeps))
        futex_wake_all(&team->busy);
}

static void *worker_main(void *arg) {
    struct start start = *(struct start *)arg;
    mem_free(arg);
    uint32_t seen = 0;
    for (;;) {
        seen = wait_epoch(start.team, seen);
        if (start.team->stop) return NULL;
        start.team->work(start.team->arg, start.worker);
        finish_share(start.team);
    }
}

/* ---- Caller ---- */

static void raise_epoch(struct cpu_team *team) {
    atomic_fetch_add(&team->epoch, 1);
    if (atomic_load(&team->sleepers)) futex_wake_all(&team->epoch);
}

static void wait_idle(struct cpu_team *team) {
    for (int turn = 0; turn < team->spin; turn++) {
        if (!atomic_load_explicit(&team->busy, memory_order_acquire)) return;
        relax();
    }
    atomic_store(&team->caller_sleeps, 1);
    uint32_t left;
    while ((left = atomic_load(&team->busy))) futex_wait(&team->busy, left);
    atomic_store(&team->caller_sleeps, 0);
}

void cpu_team_run(struct cpu_team *team, cpu_work *work, void *arg) {
    if (team->threads == 1) {
        work(arg, 0);
        return;
    }
    CHECK(atomic_load_explicit(&team->busy, memory_order_relaxed) == 0); /* one caller at a time */
    team->work = work;
    team->arg = arg;
    atomic_store_explicit(&team->busy, (uint32_t)team->threads - 1, memory_order_relaxed);
    raise_epoch(team);
    work(arg, 0);
    wait_idle(team);
}

int cpu_team_threads(const struct cpu_team *team) {
    return team->threads;
}

int cpu_team_cores(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set)) return 1;
    int count = CPU_COUNT(&set);
    return count < 1 ? 1 : count;
}

static int start_worker(struct cpu_team *team, int worker) {
    struct start *start = mem_try_alloc(1, sizeof *start);
    if (!start) return ERR_NOMEM;
    *start = (struct start){team, worker};
    if (pthread_create(&team->thread[worker - 1], NULL, worker_main, start)) {
        mem_free(start);
        return ERR_NOMEM;
    }
    team->started++;
    return 0;
}

int cpu_team_open(int threads, struct cpu_team **out) {
    CHECK(threads >= 0);
    int cores = cpu_team_cores();
    if (threads == 0) threads = cores;
    if (threads > CPU_TEAM_THREADS_MAX) threads = CPU_TEAM_THREADS_MAX;
    struct cpu_team *team = cpu_alloc(sizeof *team);
    if (!team) return ERR_NOMEM;
    int rc = ERR_NOMEM;
    team->threads = threads;
    team->spin = threads <= cores ? SPIN_TURNS : 0;
    team->thread = mem_try_alloc((size_t)threads, sizeof *team->thread);
    if (!team->thread) goto fail;
    for (int worker = 1; worker < threads; worker++) {
        rc = start_worker(team, worker);
        if (rc) goto fail;
    }
    *out = team;
    return 0;
fail:
    cpu_team_close(team);
    return rc;
}

void cpu_team_close(struct cpu_team *team) {
    if (!team) return;
    team->stop = true;
    raise_epoch(team);
    for (int i = 0; i < team->started; i++) pthread_join(team->thread[i], NULL);
    mem_free(team->thread);
    cpu_free(team);
}
