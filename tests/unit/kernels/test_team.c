/* The worker team: each worker runs each piece of work once, its writes are seen after the barrier,
 * teams of all sizes open and close, with and without work, and any number of the workers may be
 * left out. A plain main, for ThreadSanitizer. */
#include "kernels/cpu/team.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/check.h"
#include "kernels/cpu/cpu.h"

struct tally {
    int runs[CPU_TEAM_THREADS_MAX]; /* plain: the barrier must order them */
    long sum[CPU_TEAM_THREADS_MAX];
    struct cpu_tickets tickets;
    int *done; /* [tickets.count] */
};

static void work(void *arg, int worker) {
    struct tally *tally = arg;
    tally->runs[worker]++;
    int64_t end;
    for (int64_t i; (i = cpu_tickets_take(&tally->tickets, 3, &end)) >= 0;)
        for (; i < end; i++) {
            tally->done[i]++;
            tally->sum[worker] += i;
        }
}

static void check_team(int threads, int rounds, int items, int pause_every) {
    struct cpu_team *team;
    CHECK(cpu_team_open(threads, &team) == 0);
    int count = cpu_team_threads(team);
    CHECK(threads == 0 || count == threads);
    struct tally tally = {.done = calloc((size_t)items + 1, sizeof(int))};
    for (int round = 0; round < rounds; round++) {
        cpu_tickets_set(&tally.tickets, items);
        cpu_team_run(team, work, &tally);
        /* An elastic team leaves workers out while another program computes. */
        for (int w = 0; w < count; w++)
            CHECK(threads ? tally.runs[w] == round + 1 : tally.runs[w] <= round + 1);
        for (int i = 0; i < items; i++) CHECK(tally.done[i] == round + 1);
        if (pause_every && round % pause_every == 0) usleep(2000); /* long enough to fall asleep */
    }
    long sum = 0;
    for (int w = 0; w < count; w++) sum += tally.sum[w];
    CHECK(sum == (long)rounds * items * (items - 1) / 2);
    cpu_team_close(team);
    free(tally.done);
}

/* Workers [0, n) take part in a run, for other n each time; the others sleep or are on their way.
 */
static void check_some_workers(int threads, int rounds) {
    struct cpu_team *team;
    CHECK(cpu_team_open(threads, &team) == 0);
    enum { ITEMS = 40 };
    int runs[CPU_TEAM_THREADS_MAX] = {0}, done[ITEMS] = {0};
    struct tally tally = {.done = done};
    uint32_t random = 1;
    for (int round = 0; round < rounds; round++) {
        random = random * 1664525 + 1013904223;
        const int workers = 1 + (int)((random >> 16) % (uint32_t)threads);
        cpu_tickets_set(&tally.tickets, ITEMS);
        cpu_team_run_on(team, workers, work, &tally);
        for (int w = 0; w < threads; w++) CHECK(tally.runs[w] == (runs[w] += w < workers));
        for (int i = 0; i < ITEMS; i++) CHECK(done[i] == round + 1);
        if (round % 100 == 0) usleep(1000); /* all fall asleep */
    }
    cpu_team_close(team);
}

/* The next window of an elastic team, in which the caller waits `waited` ms for workers, of them
 * `interrupted` for interrupted ones, and `own` ms for a core. Returns how many take part then. */
static int next_window(struct cpu_elastic *e, int waited, int interrupted, int own) {
    enum { MS = 1000000, WINDOW = 100 };
    const int64_t now = e->since + (int64_t)WINDOW * MS;
    CHECK(!cpu_elastic_is_due(e, e->since + MS) && cpu_elastic_is_due(e, now));
    cpu_elastic_wait(e, (int64_t)(waited - interrupted) * MS, false);
    cpu_elastic_wait(e, (int64_t)interrupted * MS, true);
    cpu_elastic_decide(e, e->own + (int64_t)own * MS, now);
    return e->members;
}

static void check_elastic(void) {
    const int64_t second = 1000000000;
    struct cpu_elastic e;
    cpu_elastic_set(&e, 3);
    cpu_elastic_decide(&e, 0, 1000 * second);
    CHECK(e.members == 3 && !e.trial);
    /* Unequal shares, or losses that are smaller than what the third worker does. */
    CHECK(next_window(&e, 60, 5, 0) == 3 && next_window(&e, 30, 30, 2) == 3 && !e.trial);
    /* Two do more than three that lose 40 %, and lose nothing themselves: they stay two. */
    CHECK(next_window(&e, 20, 15, 20) == 2 && e.trial == -1);
    CHECK(next_window(&e, 1, 0, 0) == 2 && !e.trial);
    /* The third comes back on trial, finds the same, and leaves; later and later. */
    int64_t longest = 0;
    for (int attempts = 0; attempts < 12;) {
        const bool on_trial = e.trial;
        CHECK(next_window(&e, on_trial ? 40 : 0, on_trial ? 40 : 0, 0) == (e.trial ? 3 : 2));
        if (!on_trial) continue;
        attempts++;
        CHECK(e.try_at - e.since >= longest && e.try_at - e.since <= 2 * second);
        longest = e.try_at - e.since;
    }
    CHECK(longest == 2 * second);
    /* A window that was mostly idle decides nothing. */
    cpu_elastic_decide(&e, e.own, e.since + 9 * second);
    CHECK(e.members == 2 && !e.trial);
    /* The other program has ended: the third stays. */
    CHECK(next_window(&e, 0, 0, 0) == 3 && e.trial == 1);
    CHECK(next_window(&e, 2, 0, 0) == 3 && !e.trial);
    /* All cores are busy: two are slower than three, so the team stays at three. */
    cpu_elastic_decide(&e, e.own, e.since + 9 * second);
    CHECK(next_window(&e, 20, 20, 20) == 2 && e.trial == -1);
    CHECK(next_window(&e, 0, 0, 45) == 3 && !e.trial);
    /* Never none. */
    cpu_elastic_set(&e, 2);
    cpu_elastic_decide(&e, 0, second);
    CHECK(next_window(&e, 0, 0, 60) == 1 && next_window(&e, 0, 0, 10) == 1);
    for (int i = 0; i < 30; i++) CHECK(next_window(&e, 90, 90, 9) >= 1);
}

/* Whole operations under the sanitizer: packing, sharing of panels and rows. */
static void check_backend(const char *path) {
    struct cpu_options options = {.path = path, .threads = 3};
    struct kern *kern;
    if (cpu_open(&options, &kern, NULL)) return;
    enum { ROWS = 300, COLS = 64, OUTS = 200 };
    float *w = malloc(OUTS * COLS * sizeof *w), *x = malloc(ROWS * COLS * sizeof *x);
    float *y = malloc(ROWS * OUTS * sizeof *y), *z = malloc(ROWS * OUTS / 2 * sizeof *z);
    CHECK(w && x && y && z);
    for (int i = 0; i < OUTS * COLS; i++) w[i] = (float)(i % 7);
    for (int i = 0; i < ROWS * COLS; i++) x[i] = (float)(i % 5);
    struct kern_matrix matrix = {.data = w, .dtype = KERN_F32, .rows = OUTS, .cols = COLS};
    struct kern_weight *weight;
    CHECK(kern->ops->weight_load(kern, &matrix, 1, KERN_SHARD_NONE, &weight, NULL) == 0);
    for (int round = 0; round < 20; round++) {
        kern->ops->matmul(kern, y, x, weight, NULL, ROWS, KERN_SET);
        float first = 0;
        for (int k = 0; k < COLS; k++) first += x[k] * w[k];
        CHECK(y[0] == first); /* small whole numbers: exact in any order */
        kern->ops->glu(kern, z, y, ROWS, OUTS / 2, KERN_SILU);
    }
    kern->ops->weight_free(kern, weight);
    kern->ops->close(kern);
    free(w), free(x), free(y), free(z);
}

int main(void) {
    check_team(1, 5, 10, 0);
    check_team(0, 50, 100, 0);
    check_team(2, 2000, 50, 0);
    check_team(7, 300, 200, 10);
    check_team(3, 40, 1000, 1);
    for (int i = 0; i < 20; i++) check_team(5, 0, 0, 0);
    check_some_workers(2, 2000);
    check_some_workers(6, 1000);
    check_elastic();
    check_backend("portable");
    check_backend("auto");
    puts("ok");
    return 0;
}
