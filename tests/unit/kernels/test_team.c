/* The worker team: each worker runs each piece of work once, its writes are seen after the barrier,
 * teams of all sizes open and close, with and without work. A plain main, for ThreadSanitizer. */
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
        for (int w = 0; w < count; w++) CHECK(tally.runs[w] == round + 1);
        for (int i = 0; i < items; i++) CHECK(tally.done[i] == round + 1);
        if (pause_every && round % pause_every == 0) usleep(2000); /* long enough to fall asleep */
    }
    long sum = 0;
    for (int w = 0; w < count; w++) sum += tally.sum[w];
    CHECK(sum == (long)rounds * items * (items - 1) / 2);
    cpu_team_close(team);
    free(tally.done);
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
    check_backend("portable");
    check_backend("auto");
    puts("ok");
    return 0;
}
