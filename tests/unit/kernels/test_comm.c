/* The communicator of threads: what every communicator does (comm_cases.h), and the CPU's caches
 * that decide together. Plain main, so that ThreadSanitizer can watch. */
#include "kernels/comm_host.h"
#include "kernels/cpu/cache.h"
#include "tests/unit/kernels/comm_cases.h"

static void *host_begin(const struct comm *comm) {
    (void)comm;
    return NULL;
}

static void host_end(const struct comm *comm, void *device) {
    (void)device;
    comm->ops->close(comm);
}

static void *host_alloc(void *device, size_t bytes) {
    (void)device;
    return malloc(bytes);
}

static void host_release(void *device, void *mem) {
    (void)device;
    free(mem);
}

static void host_put(void *device, void *to, const void *from, size_t bytes) {
    (void)device;
    memcpy(to, from, bytes);
}

static int host_take(void *device, void *to, const void *from, size_t bytes) {
    (void)device;
    memcpy(to, from, bytes);
    return 0;
}

static const struct comm_kind host = {.name = "host",
                                      .times = 5,
                                      .open = comm_host_open,
                                      .begin = host_begin,
                                      .end = host_end,
                                      .alloc = host_alloc,
                                      .release = host_release,
                                      .put = host_put,
                                      .take = host_take};

/* ---- A pool that is full on one rank ---- */

static void step(struct cpu_cache *cache, int32_t pos, int want) {
    const struct kern_span span = {.count = 16, .pos = pos};
    const struct kern_batch batch = {.spans = &span, .rows = 16, .span_count = 1};
    struct kern_report report = {0};
    MUST(cpu_cache_begin_step(cache, &batch) == want);
    MUST(cpu_cache_report(cache, 0, &report) == 0);
    MUST(report.entries == (size_t)cache->streams * (size_t)(want ? pos : pos + 16));
}

static void refuse_together(const struct comm_seat *seat) {
    const struct comm *comm = seat->comm;
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

/* ---- A cap on what a rank keeps ---- */

enum { TOKENS = 90, KEEP = 20, LAYERS = 3, HEADS = 8 };

/* Lower ranks have the better scores, so that without a cap they would keep nearly everything. */
static void fill(struct cpu_cache *cache, int rank) {
    const struct kern_span span = {.count = TOKENS};
    const struct kern_batch batch = {.spans = &span, .rows = TOKENS, .span_count = 1};
    MUST(cpu_cache_begin_step(cache, &batch) == 0);
    for (int stream = 0; stream < cache->streams; stream++)
        for (int i = 0; i < TOKENS; i++) {
            uint32_t page = cpu_cache_table(cache, 0, stream)[i / cache->page_slots];
            float x = comm_noise(stream, (size_t)(rank * TOKENS + i)) / 8192;
            cpu_cache_log_beta(cache, page)[i % cache->page_slots] =
                -0.001f * (float)(rank + 1) - 0.0005f * x * x;
        }
}

static void evict(struct cpu_cache *cache, enum kern_scope scope) {
    const struct kern_rule rule = {
        .score = KERN_SCORE_RETENTION, .scope = scope, .sinks = 2, .recent = 3, .horizon = 128};
    const struct kern_evict due = {.tokens = TOKENS, .budget = KEEP, .rule = &rule};
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
static void even_shares(const struct comm_seat *seat) {
    const struct comm *comm = seat->comm;
    const enum kern_scope *scope = seat->arg;
    int32_t got[LAYERS * HEADS * TOKENS], alone[LAYERS * HEADS * TOKENS];
    struct cpu_cache cache;
    struct kern_cache_stats stats;
    open_capped(&cache, comm, HEADS, 1);
    evict(&cache, *scope);
    size_t count = positions(&cache, got);
    MUST(count == (size_t)(LAYERS * HEADS / comm->ranks * KEEP));
    cpu_cache_stats(&cache, &stats);
    MUST(stats.rank_cap_hits == (comm->ranks == 1 ? 0 : *scope == KERN_SCOPE_LAYER ? LAYERS : 1));
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
    evict(&cache, *scope);
    MUST(positions(&cache, alone) == count);
    MUST(memcmp(got, alone, count * sizeof *got) == 0);
    cpu_cache_close(&cache);
}

/* In between: nobody above the limit, nothing lost, and the best ranks at their limit. */
static void uneven_shares(const struct comm_seat *seat) {
    const struct comm *comm = seat->comm;
    int32_t got[LAYERS * HEADS * TOKENS];
    struct cpu_cache cache;
    int64_t total = LAYERS * HEADS * KEEP, limit = total * 5 / 4 / comm->ranks;
    open_capped(&cache, comm, HEADS, 1.25f);
    evict(&cache, KERN_SCOPE_SEQUENCE);
    int64_t sum[2] = {(int64_t)positions(&cache, got), 0};
    MUST(comm->ranks == 1 || sum[0] <= limit);
    if (comm->ranks > 1 && comm->rank == 0) MUST(sum[0] == limit);
    sum[1] = sum[0];
    MUST(comm->ops->all_reduce(comm, sum, 1, COMM_I64, COMM_SUM) == 0);
    MUST(sum[0] == total);
    cpu_cache_close(&cache);
}

int main(void) {
    comm_opening_fails_cleanly(&host);
    for (int ranks = 1; ranks <= COMM_RANKS_MAX; ranks *= 2) {
        comm_run_cases(&host, ranks);
        if (ranks > 1) comm_run(&host, ranks, refuse_together, NULL);
        for (enum kern_scope scope = KERN_SCOPE_LAYER; scope <= KERN_SCOPE_SEQUENCE; scope++)
            comm_run(&host, ranks, even_shares, &scope);
        comm_run(&host, ranks, uneven_shares, NULL);
    }
    return 0;
}
