/* A team of worker threads with a spin-then-futex barrier. Decoding runs dozens of operations per
 * layer, each shorter than a wake-up, so workers spin briefly before they sleep. */
#include "kernels/cpu/team.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/available.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/err.h"
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

/* A worker that waited so long for its core was interrupted. It is less than a time slice of the
 * system's scheduler (milliseconds), and more than a wake-up takes. */
#define INTERRUPTED_NS 500000

/* A window has several time slices. A longer one was mostly idle, and decides nothing. */
#define WINDOW_NS 50000000
#define STALE_NS  250000000

/* Times between trials: at first short, because other programs may compute briefly; in the end so
 * long that what a window of a trial costs is lost in it. */
#define HOLD_LEAST_NS 50000000
#define HOLD_MOST_NS  2000000000

/* The number of a run, and in the lower bits how many workers take part in it; 0: the team closes.
 * Workers sleep on its lower half: a worker that takes part cannot miss a run, so the next value
 * differs in it. */
#define WORKER_BITS 16
_Static_assert(CPU_TEAM_THREADS_MAX < 1 << WORKER_BITS, "workers fit");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the lower half comes first");

struct cpu_team {
    /* Written by the caller before it raises `epoch`, read by workers of the run after they see the
     * new value. */
    cpu_work *work;
    void *arg;

    int threads, spin;
    bool is_elastic;
    struct cpu_elastic elastic; /* only the caller uses it */

    _Alignas(64) _Atomic uint64_t epoch; /* raised by every run of more than one worker */
    _Atomic uint32_t sleepers;           /* workers that may be in futex_wait on epoch */
    _Alignas(64) _Atomic uint32_t busy;  /* workers that have not finished this run */
    _Atomic uint32_t caller_sleeps;
    _Atomic bool was_interrupted;          /* a worker, while the caller slept */
    _Alignas(64) _Atomic uint32_t growths; /* raised when workers that were left out may be in */

    pthread_t *thread; /* [threads - 1] */
    int started;
};

struct start {
    struct cpu_team *team;
    int worker;
};

static void futex_wait(void *word, uint32_t while_value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, while_value, NULL, NULL, 0);
}

static void futex_wake_all(void *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

static int workers_of(uint64_t epoch) {
    return (int)(epoch & ((1 << WORKER_BITS) - 1));
}

/* ---- How many take part ---- */

void cpu_elastic_set(struct cpu_elastic *e, int threads) {
    *e = (struct cpu_elastic){.threads = threads, .members = threads, .hold = HOLD_LEAST_NS};
}

void cpu_elastic_wait(struct cpu_elastic *e, int64_t waited, bool interrupted) {
    e->waited += waited;
    if (interrupted) e->interrupted += waited;
}

bool cpu_elastic_is_due(const struct cpu_elastic *e, int64_t now) {
    return now - e->since >= WINDOW_NS;
}

/* The end of a trial: undoes the change if the team became no faster. */
static void judge_trial(struct cpu_elastic *e, double rate, int64_t now) {
    const bool is_better = rate > e->before;
    if (!is_better) e->members -= e->trial;
    e->hold = is_better ? e->hold / 2 : e->hold * 4;
    if (e->hold < HOLD_LEAST_NS) e->hold = HOLD_LEAST_NS;
    if (e->hold > HOLD_MOST_NS) e->hold = HOLD_MOST_NS;
    e->try_at = now + e->hold;
    e->trial = 0;
}

/* With one worker less the team could have the rate members - 1, if it loses no time then. Waits
 * alone are no reason to try: shares of an operation are never quite equal. */
static int choose_trial(const struct cpu_elastic *e, double rate, int64_t own, int64_t now) {
    const bool is_contended = 2 * (e->interrupted + own) > e->waited + own;
    if (now < e->try_at) return 0;
    if (is_contended && rate < e->members - 1) return -1;
    return e->members < e->threads ? 1 : 0;
}

void cpu_elastic_decide(struct cpu_elastic *e, int64_t own, int64_t now) {
    const int64_t passed = now - e->since, own_waited = own - e->own;
    const double lost = (double)(e->waited + own_waited) / (double)passed;
    const double rate = lost < 1 ? e->members * (1 - lost) : 0;
    if (passed < STALE_NS && e->trial) {
        judge_trial(e, rate, now);
    } else if (passed < STALE_NS) {
        e->trial = choose_trial(e, rate, own_waited, now);
        e->before = rate;
        e->members += e->trial;
    }
    e->since = now;
    e->waited = e->interrupted = 0;
    e->own = own;
}

/* ---- Worker ---- */

static uint64_t wait_epoch(struct cpu_team *team, uint64_t seen) {
    for (int turn = 0; turn < team->spin; turn++) {
        uint64_t now = atomic_load_explicit(&team->epoch, memory_order_acquire);
        if (now != seen) return now;
        relax();
    }
    /* Sequentially consistent on both sides: either the caller sees this sleeper and wakes it, or
     * this load sees the new epoch; futex_wait itself refuses a value that has changed. */
    atomic_fetch_add(&team->sleepers, 1);
    uint64_t now;
    while ((now = atomic_load(&team->epoch)) == seen) futex_wait(&team->epoch, (uint32_t)seen);
    atomic_fetch_sub(&team->sleepers, 1);
    return now;
}

/* Waits until the team has grown, for a worker that takes no part in the run `seen`. The caller
 * raises `growths` after the epoch: either this load sees the epoch, or futex_wait the growth. */
static void wait_growth(struct cpu_team *team, uint64_t seen) {
    uint32_t growths = atomic_load(&team->growths);
    const int workers = workers_of(atomic_load(&team->epoch));
    if (workers && workers <= workers_of(seen)) futex_wait(&team->growths, growths);
}

/* Waits for the next run in which the worker takes part; 0: the team closes. */
static uint64_t wait_run(struct cpu_team *team, int worker, uint64_t seen) {
    for (;;) {
        seen = wait_epoch(team, seen);
        if (!workers_of(seen) || workers_of(seen) > worker) return seen;
        wait_growth(team, seen);
    }
}

static int open_schedstat(void) {
    return open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
}

/* Returns the ns that the calling thread has waited for a core so far, while others ran on it: the
 * second number of its schedstat (Documentation/scheduler/sched-stats.rst); 0: not known. */
static int64_t waited_for_core(int schedstat) {
    char text[80];
    long long waited = 0;
    const ssize_t size = schedstat < 0 ? 0 : pread(schedstat, text, sizeof text - 1, 0);
    if (size <= 0) return 0;
    text[size] = '\0';
    return sscanf(text, "%*d %lld", &waited) == 1 ? waited : 0;
}

static void finish_share(struct cpu_team *team, int schedstat, int64_t *waited) {
    if (schedstat >= 0 && atomic_load(&team->caller_sleeps)) {
        const int64_t before = *waited;
        *waited = waited_for_core(schedstat);
        if (*waited - before > INTERRUPTED_NS) atomic_store(&team->was_interrupted, true);
    }
    if (atomic_fetch_sub(&team->busy, 1) == 1 && atomic_load(&team->caller_sleeps))
        futex_wake_all(&team->busy);
}

static void *worker_main(void *arg) {
    struct start start = *(struct start *)arg;
    mem_free(arg);
    uint64_t seen = 1; /* as cpu_team_open sets it */
    int64_t waited = 0;
    const int schedstat = start.team->is_elastic ? open_schedstat() : -1;
    for (;;) {
        seen = wait_run(start.team, start.worker, seen);
        if (!workers_of(seen)) break;
        start.team->work(start.team->arg, start.worker);
        finish_share(start.team, schedstat, &waited);
    }
    if (schedstat >= 0) close(schedstat);
    return NULL;
}

/* ---- Caller ---- */

static void raise_epoch(struct cpu_team *team, int workers) {
    const uint64_t last = atomic_load_explicit(&team->epoch, memory_order_relaxed);
    atomic_store(&team->epoch, (((last >> WORKER_BITS) + 1) << WORKER_BITS) | (uint64_t)workers);
    if (atomic_load(&team->sleepers)) futex_wake_all(&team->epoch);
    if (workers && workers <= workers_of(last)) return;
    atomic_fetch_add(&team->growths, 1);
    futex_wake_all(&team->growths);
}

static void wait_idle(struct cpu_team *team) {
    for (int turn = 0; turn < team->spin; turn++) {
        if (!atomic_load_explicit(&team->busy, memory_order_acquire)) return;
        relax();
    }
    const int64_t since = clock_ns();
    atomic_store(&team->caller_sleeps, 1);
    uint32_t left;
    while ((left = atomic_load(&team->busy))) futex_wait(&team->busy, left);
    atomic_store(&team->caller_sleeps, 0);
    cpu_elastic_wait(&team->elastic, clock_ns() - since, atomic_load(&team->was_interrupted));
    atomic_store(&team->was_interrupted, false);
}

void cpu_team_run_on(struct cpu_team *team, int workers, cpu_work *work, void *arg) {
    CHECK(workers >= 1 && workers <= team->threads);
    if (workers == 1) {
        work(arg, 0);
        return;
    }
    CHECK(atomic_load_explicit(&team->busy, memory_order_relaxed) == 0); /* one caller at a time */
    team->work = work;
    team->arg = arg;
    atomic_store_explicit(&team->busy, (uint32_t)workers - 1, memory_order_relaxed);
    raise_epoch(team, workers);
    work(arg, 0);
    wait_idle(team);
}

/* A team that waits for no worker and lacks none has no question. */
static void resize(struct cpu_team *team) {
    struct cpu_elastic *elastic = &team->elastic;
    if (!elastic->waited && !elastic->trial && elastic->members == elastic->threads) return;
    const int64_t now = clock_ns();
    if (!cpu_elastic_is_due(elastic, now)) return;
    const int schedstat = open_schedstat();
    if (schedstat < 0) return;
    cpu_elastic_decide(elastic, waited_for_core(schedstat), now);
    close(schedstat);
}

void cpu_team_run(struct cpu_team *team, cpu_work *work, void *arg) {
    cpu_team_run_on(team, team->elastic.members, work, arg);
    if (team->is_elastic) resize(team);
}

int cpu_team_threads(const struct cpu_team *team) {
    return team->threads;
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
    const int cores = available_cores("");
    const bool is_elastic = threads == 0;
    if (is_elastic) threads = cores;
    if (threads > CPU_TEAM_THREADS_MAX) threads = CPU_TEAM_THREADS_MAX;
    struct cpu_team *team = cpu_alloc(sizeof *team);
    if (!team) return ERR_NOMEM;
    int rc = ERR_NOMEM;
    team->threads = threads;
    team->is_elastic = is_elastic;
    cpu_elastic_set(&team->elastic, threads);
    atomic_init(&team->epoch, 1);
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
    raise_epoch(team, 0);
    for (int i = 0; i < team->started; i++) pthread_join(team->thread[i], NULL);
    mem_free(team->thread);
    cpu_free(team);
}
