/* The communicator of threads: order of sums, exact integers, every rank's error is everybody's,
 * and nobody waits for a rank that will not come. Plain main, so that ThreadSanitizer can watch. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/comm_host.h"
#include "kernels/cpu/cache.h"

#define MUST(what)                                                                                 \
    do {                                                                                           \
        if (!(what)) {                                                                             \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what);                             \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

/* ---- Ranks ------------------------------------------------------------------------------------
 */

typedef void rank_test(const struct comm *comm, void *arg);

struct rank {
    pthread_t thread;
    const struct comm *comm;
    rank_test *test;
    void *arg;
};

static void *rank_main(void *arg) {
    struct rank *rank = arg;
    rank->test(rank->comm, rank->arg);
    rank->comm->ops->close(rank->comm);
    return NULL;
}

static void run(int ranks, rank_test *test, void *arg) {
    struct rank all[COMM_RANKS_MAX];
    const struct comm *comm[COMM_RANKS_MAX];
    MUST(comm_host_open(ranks, comm) == 0);
    for (int r = 0; r < ranks; r++) {
        all[r] = (struct rank){.comm = comm[r], .test = test, .arg = arg};
        MUST(pthread_create(&all[r].thread, NULL, rank_main, &all[r]) == 0);
    }
    for (int r = 0; r < ranks; r++) pthread_join(all[r].thread, NULL);
}

/* Magnitudes far apart, so that another order of sums gives other bits. */
static float noise(int rank, size_t i) {
    uint32_t h = (uint32_t)rank * 0x9e3779b9u + (uint32_t)i * 0x85ebca6bu + 1;
    h = (h ^ h >> 16) * 0x7feb352du;
    h = (h ^ h >> 15) * 0x846ca68bu;
    float x = (float)(int32_t)h * 0x1p-31f;
    return h & 64 ? x * 4096 : x;
}

/* ---- Reductions -------------------------------------------------------------------------------
 */

static float tree(int from, int count, size_t i) {
    if (count == 1) return noise(from, i);
    float left = tree(from, count / 2, i), right = tree(from + count / 2, count / 2, i);
    return left + right;
}

static void check_float_sums(const struct comm *comm, void *arg) {
    (void)arg;
    static const size_t counts[] = {0, 1, 63, 64, 65, 1000, 4097};
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        float *x = malloc((counts[c] + 1) * sizeof *x);
        MUST(x);
        for (size_t i = 0; i < counts[c]; i++) x[i] = noise(comm->rank, i);
        x[counts[c]] = 7;
        MUST(comm->ops->all_reduce(comm, x, counts[c], COMM_F32, COMM_SUM) == 0);
        for (size_t i = 0; i < counts[c]; i++) {
            float want = tree(0, comm->ranks, i);
            MUST(memcmp(&x[i], &want, sizeof want) == 0);
        }
        MUST(x[counts[c]] == 7);
        free(x);
    }
}

static void check_types(const struct comm *comm, void *arg) {
    (void)arg;
    int n = comm->ranks, r = comm->rank;
    uint32_t u[2] = {UINT32_MAX - (uint32_t)r, (uint32_t)r};
    MUST(comm->ops->all_reduce(comm, u, 2, COMM_U32, COMM_SUM) == 0);
    MUST(u[1] == (uint32_t)(n * (n - 1) / 2) && u[0] == 0u - (uint32_t)n - u[1]);
    uint64_t w[2] = {1ull << 40, (uint64_t)r};
    MUST(comm->ops->all_reduce(comm, w, 2, COMM_U64, COMM_SUM) == 0);
    MUST(w[0] == (uint64_t)n << 40);
    int64_t s[3] = {-r, r, r - 5};
    MUST(comm->ops->all_reduce(comm, s, 3, COMM_I64, COMM_MIN) == 0);
    MUST(s[0] == 1 - n && s[1] == 0 && s[2] == -5);
    double d[2] = {r, -r};
    MUST(comm->ops->all_reduce(comm, d, 2, COMM_F64, COMM_MAX) == 0);
    MUST(d[0] == n - 1 && d[1] == 0);
}

static void check_gather(const struct comm *comm, void *arg) {
    (void)arg;
    enum { BYTES = 100 };
    char all[COMM_RANKS_MAX * BYTES];
    for (int round = 0; round < 300; round++) {
        memset(all, 0xee, sizeof all);
        memset(all + comm->rank * BYTES, comm->rank * 16 + round % 16, BYTES);
        MUST(comm->ops->all_gather(comm, all, BYTES) == 0);
        for (int i = 0; i < comm->ranks * BYTES; i++)
            MUST((unsigned char)all[i] == i / BYTES * 16 + round % 16);
        int code = round % comm->ranks == comm->rank ? ERR_FULL : 0;
        MUST(comm->ops->agree(comm, code) == ERR_FULL);
        MUST(comm->ops->agree(comm, -1 - comm->rank) == -comm->ranks);
        MUST(comm->ops->agree(comm, 0) == 0);
    }
}

/* ---- A rank that does not come ----------------------------------------------------------------
 */

static void leave_at_once(const struct comm *comm, void *arg) {
    (void)arg;
    float x[70] = {0};
    if (comm->rank == comm->ranks - 1)
        comm->ops->abort(comm);
    else
        MUST(comm->ops->all_reduce(comm, x, 70, COMM_F32, COMM_SUM) == ERR_STOPPED);
    MUST(comm->ops->all_gather(comm, x, 4) == ERR_STOPPED);
    MUST(comm->ops->agree(comm, 0) == ERR_STOPPED);
    MUST(comm->ops->agree(comm, ERR_NOMEM) == ERR_NOMEM);
}

/* Arrays are gone as soon as a rank has been told to stop: nobody may touch them then. */
static void leave_somewhere(const struct comm *comm, void *arg) {
    const int *turn = arg;
    int rc = 0;
    for (int i = 0; !rc; i++) {
        uint32_t *x = malloc(200 * sizeof *x);
        MUST(x);
        for (int k = 0; k < 200; k++) x[k] = 1;
        if (comm->rank == *turn % comm->ranks && i == *turn % 11) comm->ops->abort(comm);
        rc = comm->ops->all_reduce(comm, x, 200, COMM_U32, COMM_SUM);
        MUST(rc == ERR_STOPPED || (rc == 0 && x[199] == (uint32_t)comm->ranks));
        free(x);
    }
}

/* ---- A pool that is full on one rank ----------------------------------------------------------
 */

static void step(struct cpu_cache *cache, int32_t pos, int want) {
    const struct kern_span span = {.count = 16, .pos = pos};
    const struct kern_batch batch = {.spans = &span, .rows = 16, .span_count = 1};
    struct kern_report report = {0};
    MUST(cpu_cache_begin_step(cache, &batch) == want);
    MUST(cpu_cache_report(cache, 0, &report) == 0);
    MUST(report.entries == (size_t)cache->streams * (size_t)(want ? pos : pos + 16));
}

static void refuse_together(const struct comm *comm, void *arg) {
    (void)arg;
    struct cpu_cache cache;
    const struct kern_cache_options options = {.layers = 2,
                                               .heads_q = 8,
                                               .heads_kv = 8,
                                               .head_dim = 128,
                                               .dtype = KERN_BF16,
                                               .pages = comm->rank == 1 ? 18 : 400,
                                               .slots = 2,
                                               .max_positions = 512};
    MUST(cpu_cache_open_rank(&cache, &options, comm, 1, NULL) == 0);
    MUST(cache.page_slots == 16 && cache.streams == 16 / comm->ranks);
    int32_t pos = 0;
    for (; pos / 16 < 18 / cache.streams; pos += 16) step(&cache, pos, 0);
    step(&cache, pos, ERR_FULL);
    MUST(cpu_cache_fork(&cache, 0, 1) == 0);
    cpu_cache_release(&cache, 0);
    cpu_cache_release(&cache, 1);
    step(&cache, 0, 0);
    MUST(cpu_cache_check(&cache, NULL) == 0);
    cpu_cache_close(&cache);
}

/* ---- A cap on what a rank keeps ---------------------------------------------------------------
 */

enum { TOKENS = 90, KEEP = 20, LAYERS = 3, HEADS = 8 };

/* Lower ranks have the better scores, so that without a cap they would keep nearly everything. */
static void fill(struct cpu_cache *cache, int rank) {
    const struct kern_span span = {.count = TOKENS};
    const struct kern_batch batch = {.spans = &span, .rows = TOKENS, .span_count = 1};
    MUST(cpu_cache_begin_step(cache, &batch) == 0);
    for (int stream = 0; stream < cache->streams; stream++)
        for (int i = 0; i < TOKENS; i++) {
            uint32_t page = cpu_cache_table(cache, 0, stream)[i / cache->page_slots];
            float x = noise(stream, (size_t)(rank * TOKENS + i)) / 8192;
            cpu_cache_log_beta(cache, page)[i % cache->page_slots] =
                -0.001f * (float)(rank + 1) - 0.0005f * x * x;
        }
}

static void evict(struct cpu_cache *cache, enum kern_pool pool) {
    const struct kern_rule rule = {
        .score = KERN_SCORE_RETENTION, .pool = pool, .sinks = 2, .recent = 3, .horizon = 128};
    const struct kern_evict due = {.tokens = TOKENS, .keep = KEEP, .rule = &rule};
    MUST(cpu_cache_evict(cache, &due, 1) == 0);
    MUST(cpu_cache_check(cache, NULL) == 0);
}

static size_t positions(struct cpu_cache *cache, int32_t *out) {
    struct kern_report report = {.positions = out, .entries_max = LAYERS * HEADS * TOKENS};
    MUST(cpu_cache_report(cache, 0, &report) == 0);
    return report.entries;
}

static void open_capped(struct cpu_cache *cache, const struct comm *comm, int heads, float cap) {
    const struct kern_cache_options options = {.layers = LAYERS,
                                               .heads_q = heads,
                                               .heads_kv = heads,
                                               .head_dim = 64,
                                               .dtype = KERN_BF16,
                                               .pages = 400,
                                               .slots = 1,
                                               .max_positions = 128,
                                               .rank_cap = cap};
    MUST(cpu_cache_open_rank(cache, &options, comm, 1, NULL) == 0);
    fill(cache, comm->ranks > 1 ? comm->rank : 0);
}

/* Even shares: each rank keeps what it would keep if it were alone in the world. */
static void even_shares(const struct comm *comm, void *arg) {
    const enum kern_pool *pool = arg;
    int32_t got[LAYERS * HEADS * TOKENS], alone[LAYERS * HEADS * TOKENS];
    struct cpu_cache cache;
    struct kern_cache_stats stats;
    open_capped(&cache, comm, HEADS, 1);
    evict(&cache, *pool);
    size_t count = positions(&cache, got);
    MUST(count == (size_t)(LAYERS * HEADS / comm->ranks * KEEP));
    cpu_cache_stats(&cache, &stats);
    MUST(stats.rank_cap_hits == (comm->ranks == 1 ? 0 : *pool == KERN_POOL_LAYER ? LAYERS : 1));
    cpu_cache_close(&cache);
    const struct kern_cache_options options = {.layers = LAYERS,
                                               .heads_q = HEADS / comm->ranks,
                                               .heads_kv = HEADS / comm->ranks,
                                               .head_dim = 64,
                                               .dtype = KERN_BF16,
                                               .pages = 400,
                                               .slots = 1,
                                               .max_positions = 128};
    MUST(cpu_cache_open(&cache, &options, 1, NULL) == 0);
    fill(&cache, comm->rank);
    evict(&cache, *pool);
    MUST(positions(&cache, alone) == count);
    MUST(memcmp(got, alone, count * sizeof *got) == 0);
    cpu_cache_close(&cache);
}

/* In between: nobody above the limit, nothing lost, and the best ranks at their limit. */
static void uneven_shares(const struct comm *comm, void *arg) {
    (void)arg;
    int32_t got[LAYERS * HEADS * TOKENS];
    struct cpu_cache cache;
    int64_t total = LAYERS * HEADS * KEEP, limit = total * 5 / 4 / comm->ranks;
    open_capped(&cache, comm, HEADS, 1.25f);
    evict(&cache, KERN_POOL_SEQUENCE);
    int64_t sum[2] = {(int64_t)positions(&cache, got), 0};
    MUST(comm->ranks == 1 || sum[0] <= limit);
    if (comm->ranks > 1 && comm->rank == 0) MUST(sum[0] == limit);
    sum[1] = sum[0];
    MUST(comm->ops->all_reduce(comm, sum, 1, COMM_I64, COMM_SUM) == 0);
    MUST(sum[0] == total);
    cpu_cache_close(&cache);
}

int main(void) {
    const struct comm *none[COMM_RANKS_MAX];
    static const int wrong[] = {-1, 0, 3, 5, 7, 16};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        MUST(comm_host_open(wrong[i], none) == ERR_INVALID);
    for (int ranks = 1; ranks <= COMM_RANKS_MAX; ranks *= 2) {
        run(ranks, check_float_sums, NULL);
        run(ranks, check_types, NULL);
        run(ranks, check_gather, NULL);
        run(ranks, leave_at_once, NULL);
        for (int turn = 0; turn < 40; turn++) run(ranks, leave_somewhere, &turn);
        if (ranks > 1) run(ranks, refuse_together, NULL);
        for (enum kern_pool pool = KERN_POOL_LAYER; pool <= KERN_POOL_SEQUENCE; pool++)
            run(ranks, even_shares, &pool);
        run(ranks, uneven_shares, NULL);
    }
    return 0;
}
