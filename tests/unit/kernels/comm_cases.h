/* Cases that every communicator (kernels/comm.h) must pass: order of sums, exact integers, odd
 * sizes, any number of rounds, and no rank waits for one that has failed. Each case runs on all
 * ranks' threads at once. C and C++. */
#ifndef KEEPD_TESTS_UNIT_KERNELS_COMM_CASES_H
#define KEEPD_TESTS_UNIT_KERNELS_COMM_CASES_H

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "kernels/comm.h"

#define MUST(what)                                                                                 \
    do {                                                                                           \
        if (!(what)) {                                                                             \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what);                             \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

/* A kind of communicator and the memory of its ranks; all but `open` on the rank's thread. */
struct comm_kind {
    const char *name;
    int times; /* how often as much what repeats does: few where ranks are slow */
    int (*open)(int ranks, const struct comm **out);
    void *(*begin)(const struct comm *comm);            /* -> its device, if it has one */
    void (*end)(const struct comm *comm, void *device); /* closes both */
    void *(*alloc)(void *device, size_t bytes);
    void (*release)(void *device, void *mem);
    void (*put)(void *device, void *to, const void *from, size_t bytes);
    int (*take)(void *device, void *to, const void *from, size_t bytes); /* waits */
};

/* Where a case runs. */
struct comm_seat {
    const struct comm_kind *kind;
    const struct comm *comm;
    void *device;
    void *arg;
};

typedef void comm_case(const struct comm_seat *seat);

/* ---- Ranks ---- */

struct comm_thread {
    pthread_t thread;
    struct comm_seat seat;
    comm_case *run;
};

static inline void *comm_thread_main(void *arg) {
    struct comm_thread *own = (struct comm_thread *)arg;
    own->seat.device = own->seat.kind->begin(own->seat.comm);
    own->run(&own->seat);
    own->seat.kind->end(own->seat.comm, own->seat.device);
    return NULL;
}

static inline void comm_run(const struct comm_kind *kind, int ranks, comm_case *run, void *arg) {
    struct comm_thread all[COMM_RANKS_MAX];
    const struct comm *comm[COMM_RANKS_MAX];
    memset(all, 0, sizeof all);
    MUST(kind->open(ranks, comm) == 0);
    for (int r = 0; r < ranks; r++) {
        MUST(comm[r]->rank == r && comm[r]->ranks == ranks && comm[r]->ops->ordered);
        all[r].run = run;
        all[r].seat.kind = kind;
        all[r].seat.comm = comm[r];
        all[r].seat.arg = arg;
        MUST(pthread_create(&all[r].thread, NULL, comm_thread_main, &all[r]) == 0);
    }
    for (int r = 0; r < ranks; r++) pthread_join(all[r].thread, NULL);
}

/* ---- Arrays ---- */

#define COMM_GUARD 64 /* bytes before and after an array that nobody may touch */

/* A copy of x in the rank's memory, guarded. */
static inline char *comm_put(const struct comm_seat *seat, const void *x, size_t bytes) {
    size_t all = bytes + 2 * COMM_GUARD;
    char *image = (char *)malloc(all), *array = (char *)seat->kind->alloc(seat->device, all);
    MUST(image && array);
    memset(image, 0x5a, all);
    if (bytes) memcpy(image + COMM_GUARD, x, bytes);
    seat->kind->put(seat->device, array, image, all);
    free(image);
    return array + COMM_GUARD;
}

/* Back into x; the array is gone. */
static inline void comm_take(const struct comm_seat *seat, void *x, char *array, size_t bytes) {
    size_t all = bytes + 2 * COMM_GUARD;
    char *image = (char *)malloc(all);
    MUST(image && seat->kind->take(seat->device, image, array - COMM_GUARD, all) == 0);
    for (size_t i = 0; i < COMM_GUARD; i++) MUST(image[i] == 0x5a && image[all - 1 - i] == 0x5a);
    if (bytes) memcpy(x, image + COMM_GUARD, bytes);
    seat->kind->release(seat->device, array - COMM_GUARD);
    free(image);
}

static inline void comm_drop(const struct comm_seat *seat, char *array) {
    seat->kind->release(seat->device, array - COMM_GUARD);
}

static inline void comm_reduce(const struct comm_seat *seat, void *x, size_t count,
                               enum comm_type type, enum comm_op op) {
    size_t bytes = count * comm_type_bytes(type);
    char *array = comm_put(seat, x, bytes);
    MUST(seat->comm->ops->all_reduce(seat->comm, array, count, type, op) == 0);
    comm_take(seat, x, array, bytes);
}

/* Magnitudes far apart, so that another order of sums gives other bits. */
static inline float comm_noise(int rank, size_t i) {
    uint32_t h = (uint32_t)rank * 0x9e3779b9u + (uint32_t)i * 0x85ebca6bu + 1;
    h = (h ^ h >> 16) * 0x7feb352du;
    h = (h ^ h >> 15) * 0x846ca68bu;
    float x = (float)(int32_t)h * 0x1p-31f;
    return h & 64 ? x * 4096 : x;
}

/* ---- Reductions ---- */

static inline float comm_tree_f32(int from, int count, size_t i) {
    if (count == 1) return comm_noise(from, i);
    float left = comm_tree_f32(from, count / 2, i);
    return left + comm_tree_f32(from + count / 2, count / 2, i);
}

/* A third: digits that a float has not. */
static inline double comm_tree_f64(int from, int count, size_t i) {
    if (count == 1) return (double)comm_noise(from, i) / 3;
    double left = comm_tree_f64(from, count / 2, i);
    return left + comm_tree_f64(from + count / 2, count / 2, i);
}

static inline void comm_sums_are_a_tree(const struct comm_seat *seat) {
    static const size_t counts[] = {0, 1, 2, 3, 7, 63, 64, 65, 255, 257, 1000, 4097};
    int rank = seat->comm->rank, ranks = seat->comm->ranks;
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        float *x = (float *)malloc((counts[c] + 1) * sizeof *x);
        double *y = (double *)malloc((counts[c] + 1) * sizeof *y);
        MUST(x && y);
        for (size_t i = 0; i < counts[c]; i++) {
            x[i] = comm_noise(rank, i);
            y[i] = (double)comm_noise(rank, i) / 3;
        }
        comm_reduce(seat, x, counts[c], COMM_F32, COMM_SUM);
        comm_reduce(seat, y, counts[c], COMM_F64, COMM_SUM);
        for (size_t i = 0; i < counts[c]; i++) {
            float want = comm_tree_f32(0, ranks, i);
            double wide = comm_tree_f64(0, ranks, i);
            MUST(memcmp(&x[i], &want, sizeof want) == 0 && memcmp(&y[i], &wide, sizeof wide) == 0);
        }
        free(x), free(y);
    }
}

/* Small whole numbers, which every type has. */
static inline int64_t comm_number(int rank, size_t i, enum comm_type type) {
    int64_t x = (int64_t)(((size_t)rank * 37 + i * 11) % 101);
    return type == COMM_U32 || type == COMM_U64 ? x : x - 50;
}

static inline void comm_set(void *x, size_t i, enum comm_type type, int64_t value) {
    if (type == COMM_F32) ((float *)x)[i] = (float)value;
    if (type == COMM_F64) ((double *)x)[i] = (double)value;
    if (type == COMM_U32) ((uint32_t *)x)[i] = (uint32_t)value;
    if (type == COMM_U64) ((uint64_t *)x)[i] = (uint64_t)value;
    if (type == COMM_I64) ((int64_t *)x)[i] = value;
}

static inline int64_t comm_get(const void *x, size_t i, enum comm_type type) {
    if (type == COMM_F32) return (int64_t)((const float *)x)[i];
    if (type == COMM_F64) return (int64_t)((const double *)x)[i];
    if (type == COMM_U32) return (int64_t)((const uint32_t *)x)[i];
    if (type == COMM_U64) return (int64_t)((const uint64_t *)x)[i];
    return ((const int64_t *)x)[i];
}

static inline int64_t comm_wanted(int ranks, size_t i, enum comm_type type, enum comm_op op) {
    int64_t all = comm_number(0, i, type);
    for (int r = 1; r < ranks; r++) {
        int64_t x = comm_number(r, i, type);
        if (op == COMM_SUM) all += x;
        if (op == COMM_MAX && x > all) all = x;
        if (op == COMM_MIN && x < all) all = x;
    }
    return all;
}

static inline void comm_every_type_and_operation(const struct comm_seat *seat) {
    enum { COUNT = 129 };
    int64_t x[COUNT]; /* room for any type */
    for (int type = COMM_F32; type <= COMM_I64; type++)
        for (int op = COMM_SUM; op <= COMM_MIN; op++) {
            enum comm_type t = (enum comm_type)type;
            enum comm_op o = (enum comm_op)op;
            for (size_t i = 0; i < COUNT; i++)
                comm_set(x, i, t, comm_number(seat->comm->rank, i, t));
            comm_reduce(seat, x, COUNT, t, o);
            for (size_t i = 0; i < COUNT; i++)
                MUST(comm_get(x, i, t) == comm_wanted(seat->comm->ranks, i, t, o));
        }
}

/* Exact sums of extreme integers, and special values in sums of floats. */
static inline void comm_extremes(const struct comm_seat *seat) {
    int n = seat->comm->ranks, r = seat->comm->rank;
    uint32_t u[2] = {UINT32_MAX - (uint32_t)r, (uint32_t)r};
    comm_reduce(seat, u, 2, COMM_U32, COMM_SUM);
    MUST(u[1] == (uint32_t)(n * (n - 1) / 2) && u[0] == 0u - (uint32_t)n - u[1]);
    uint64_t w[2] = {1ull << 60, (1ull << 63) + (uint64_t)r};
    comm_reduce(seat, w, 1, COMM_U64, COMM_SUM);
    MUST(w[0] == (uint64_t)n << 60);
    comm_reduce(seat, w + 1, 1, COMM_U64, COMM_MAX);
    MUST(w[1] == (1ull << 63) + (uint64_t)(n - 1));
    int64_t s[2] = {INT64_MIN + r, INT64_MAX - r};
    comm_reduce(seat, s, 2, COMM_I64, COMM_MIN);
    MUST(s[0] == INT64_MIN && s[1] == INT64_MAX - (n - 1));
    float f[2] = {r == n - 1 ? NAN : 1, 1};
    comm_reduce(seat, f, 2, COMM_F32, COMM_SUM);
    MUST(isnan(f[0]) && f[1] == (float)n);
}

/* ---- Gathering, agreeing, again and again ---- */

static inline void comm_gathers(const struct comm_seat *seat) {
    static const size_t sizes[] = {0, 1, 3, 16, 100, 4099};
    const struct comm *comm = seat->comm;
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        size_t bytes = sizes[s], all = bytes * (size_t)comm->ranks;
        unsigned char *x = (unsigned char *)malloc(all + 1);
        MUST(x);
        memset(x, 0xee, all + 1);
        for (size_t i = 0; i < bytes; i++)
            x[(size_t)comm->rank * bytes + i] = (unsigned char)((size_t)comm->rank * 31 + i);
        char *array = comm_put(seat, x, all);
        MUST(comm->ops->all_gather(comm, array, bytes) == 0);
        comm_take(seat, x, array, all);
        for (size_t i = 0; i < all; i++) MUST(x[i] == (unsigned char)(i / bytes * 31 + i % bytes));
        free(x);
    }
}

static inline void comm_agrees(const struct comm_seat *seat) {
    const struct comm *comm = seat->comm;
    for (int round = 0; round < 30 * seat->kind->times; round++) {
        int rc = round % comm->ranks == comm->rank ? ERR_FULL : 0;
        MUST(comm->ops->agree(comm, rc) == ERR_FULL);
        MUST(comm->ops->agree(comm, -1 - comm->rank) == -comm->ranks);
        MUST(comm->ops->agree(comm, 0) == 0);
    }
}

/* The same array through collectives of every kind, whose results are what the next one begins
 * with: a rank that runs ahead, or reads too late, spoils the number. */
static inline void comm_rounds(const struct comm_seat *seat) {
    enum { COUNT = 200 };
    const int rounds = 60 * seat->kind->times;
    const struct comm *comm = seat->comm;
    uint32_t x[COMM_RANKS_MAX * COUNT], want = 1;
    size_t part = COUNT * sizeof *x, own = (size_t)comm->rank;
    for (size_t i = 0; i < COMM_RANKS_MAX * COUNT; i++) x[i] = 1;
    char *array = comm_put(seat, x, sizeof x);
    for (int round = 0; round < rounds; round++) {
        size_t count = 1 + (size_t)(round * 7) % COUNT;
        char *mine = array + own * part;
        MUST(comm->ops->all_reduce(comm, array, COUNT, COMM_U32, COMM_MAX) == 0);
        MUST(comm->ops->all_reduce(comm, mine, count, COMM_U32, COMM_MIN) == 0);
        MUST(comm->ops->all_gather(comm, array, part) == 0);
        MUST(comm->ops->all_reduce(comm, array, (size_t)comm->ranks * COUNT, COMM_U32, COMM_SUM) ==
             0);
        want *= (uint32_t)comm->ranks;
        if (round % 20 == 0) MUST(comm->ops->agree(comm, 0) == 0);
    }
    comm_take(seat, x, array, sizeof x);
    for (size_t i = 0; i < (size_t)comm->ranks * COUNT; i++) MUST(x[i] == want);
}

/* ---- A rank that does not come ---- */

static inline void comm_expect_stopped(const struct comm_seat *seat) {
    const struct comm *comm = seat->comm;
    char x[COMM_RANKS_MAX * 4] = {0}, *array = comm_put(seat, x, sizeof x);
    MUST(comm->ops->all_reduce(comm, array, 1, COMM_F32, COMM_SUM) == ERR_STOPPED);
    MUST(comm->ops->all_gather(comm, array, 4) == ERR_STOPPED);
    MUST(comm->ops->agree(comm, 0) == ERR_STOPPED);
    MUST(comm->ops->agree(comm, ERR_NOMEM) == ERR_NOMEM);
    comm_drop(seat, array);
}

static inline void comm_one_leaves(const struct comm_seat *seat) {
    if (seat->comm->rank == seat->comm->ranks - 1) seat->comm->ops->abort(seat->comm);
    comm_expect_stopped(seat);
}

static inline void *comm_abort_main(void *arg) {
    const struct comm *comm = (const struct comm *)arg;
    comm->ops->abort(comm);
    return NULL;
}

/* One never comes: another thread says so for it. */
static inline void comm_one_never_comes(const struct comm_seat *seat) {
    pthread_t other;
    if (seat->comm->rank > 0) {
        comm_expect_stopped(seat);
        return;
    }
    MUST(pthread_create(&other, NULL, comm_abort_main, (void *)(uintptr_t)seat->comm) == 0);
    pthread_join(other, NULL);
}

/* Arrays are gone as soon as a rank has been told to stop: nobody may touch them then. */
static inline void comm_one_leaves_somewhere(const struct comm_seat *seat) {
    const struct comm *comm = seat->comm;
    int turn = *(const int *)seat->arg, rc = 0;
    for (int i = 0; !rc; i++) {
        uint32_t x[200];
        for (int k = 0; k < 200; k++) x[k] = 1;
        char *array = comm_put(seat, x, sizeof x);
        if (comm->rank == turn % comm->ranks && i == turn % 11) comm->ops->abort(comm);
        rc = comm->ops->all_reduce(comm, array, 200, COMM_U32, COMM_SUM);
        MUST(rc == 0 || rc == ERR_STOPPED);
        if (rc == 0) {
            comm_take(seat, x, array, sizeof x);
            MUST(x[0] == (uint32_t)comm->ranks && x[199] == (uint32_t)comm->ranks);
        } else {
            comm_drop(seat, array);
        }
    }
}

/* ---- All cases ---- */

/* Numbers of ranks that cannot be, and every allocation failing in turn. */
static inline void comm_opening_fails_cleanly(const struct comm_kind *kind) {
    static const int wrong[] = {-1, 0, 3, 5, 7, 16};
    const struct comm *comm[COMM_RANKS_MAX];
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        MUST(kind->open(wrong[i], comm) == ERR_INVALID);
    for (int n = 0, rc = ERR_NOMEM; rc; n++) {
        MUST(n < 2 * COMM_RANKS_MAX);
        mem_fail_after(n);
        rc = kind->open(4, comm);
        mem_fail_after(-1);
        MUST(rc == 0 || rc == ERR_NOMEM);
        for (int r = 0; r < 4 && rc == 0; r++) comm[r]->ops->close(comm[r]);
    }
}

static inline void comm_run_cases(const struct comm_kind *kind, int ranks) {
    static comm_case *const cases[] = {comm_sums_are_a_tree, comm_every_type_and_operation,
                                       comm_extremes,        comm_gathers,
                                       comm_agrees,          comm_rounds,
                                       comm_one_never_comes};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) comm_run(kind, ranks, cases[i], NULL);
    comm_run(kind, ranks, comm_one_leaves, NULL);
    for (int turn = 0; turn < 22 * kind->times; turn++)
        comm_run(kind, ranks, comm_one_leaves_somewhere, &turn);
}

#endif
