/* Seeded simulation of sequences over several ranks: what admission reserves of a rank's pool
 * (paging/due.h) is never less than what any rank holds, and no more than it needs.
 *
 * Random shapes, caps, scopes, floors and protections; entries whose scores favour one rank after
 * the other, or none; turns that go on from what the last one left, some after dropping tokens.
 * Every rank runs the same script on its own thread, as backends do, and after every step and
 * eviction counts its own entries and pages.
 *
 * sim_ranks [FIRST [COUNT]]: the seeds; a failure prints its seed. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/comm_host.h"
#include "paging/due.h"
#include "tests/sim/expect.h"

enum { POSITIONS = 400, TURNS = 4 };

/* How close the fullest rank came to its reservation, over all turns that evicted. */
struct tightness {
    double shared, capped, apart;
};

struct sim {
    uint64_t seed, random;
    const struct comm *comm;
    struct cpu_cache cache;
    struct kern_cache_options options;
    struct reserve_shape shape;
    struct kv_params kv;
    struct due_state due;
    int64_t fullest;     /* as known to the scheduler: at the end of the last turn */
    int32_t prompt_end;  /* tokens before it may not be dropped */
    int64_t peak, pages; /* reserved: entries per stream of a rank, and its pages */
    int64_t most;        /* entries that this rank ever had of the turn */
    int favoured;        /* head; -1: none */
    bool evicted;
    struct tightness *tightness; /* rank 0's */
};

static void print_where(const struct sim *sim) {
    fprintf(stderr, "rank %d of %d", sim->comm->rank, sim->comm->ranks);
}

static int32_t pick(struct sim *sim, int32_t low, int32_t high) {
    return pick_from(&sim->random, low, high);
}

/* ---- State of all ranks ---- */

static int64_t own_entries(struct sim *sim) {
    struct kern_report report = {0};
    EXPECT(sim, cpu_cache_report(&sim->cache, 0, &report) == 0, "report");
    EXPECT(sim, report.pages <= sim->pages, "%lld pages of %lld", (long long)report.pages,
           (long long)sim->pages);
    return (int64_t)report.entries;
}

static int64_t over_ranks(struct sim *sim, int64_t own, enum comm_op op) {
    int rc = sim->comm->ops->all_reduce(sim->comm, &own, 1, COMM_I64, op);
    EXPECT(sim, rc == 0, "%s", err_name(rc));
    return own;
}

/* A head held by several ranks counts for the lowest one. */
static int64_t all_entries(struct sim *sim) {
    return over_ranks(sim, sim->cache.layers[0].shard.speaks ? own_entries(sim) : 0, COMM_SUM);
}

static int64_t per_stream(int64_t entries, int64_t streams) {
    return (entries + streams - 1) / streams;
}

static void check(struct sim *sim) {
    int64_t own = own_entries(sim);
    EXPECT(sim, own <= sim->peak * sim->cache.streams, "%lld entries, %lld a stream reserved",
           (long long)own, (long long)sim->peak);
    if (own > sim->most) sim->most = own;
}

/* ---- Steps ---- */

/* Favoured heads decay hardly at all, so they win every competition. */
static float log_beta(const struct sim *sim, int stream, int32_t pos) {
    const struct cpu_layer *layer = cpu_cache_layer(&sim->cache, stream);
    int heads = layer->heads_model, head = layer->shard.first + stream - layer->first;
    int all = cpu_cache_model_stream(&sim->cache, stream);
    double noise = content_hash((uint32_t)sim->seed, all, pos, 2) * 0x1p-32;
    if (sim->favoured < 0) return (float)(-0.5 * noise);
    bool near =
        head * sim->shape.ranks / heads == sim->favoured * sim->shape.ranks / sim->options.heads_kv;
    return (float)(near ? -1e-6 * noise : -1 - noise);
}

static void append(struct sim *sim, int32_t count) {
    struct cpu_cache *cache = &sim->cache;
    const struct kern_span span = {.count = count, .pos = sim->due.tokens};
    const struct kern_batch batch = {.spans = &span, .span_count = 1, .rows = count};
    int rc = cpu_cache_begin_step(cache, &batch);
    EXPECT(sim, rc == 0, "%s", err_name(rc));
    for (int stream = 0; stream < cache->streams; stream++) {
        const uint32_t *table = cpu_cache_table(cache, 0, stream);
        int32_t length = *cpu_cache_length(cache, 0, stream);
        const int32_t slots = cpu_cache_layer(cache, stream)->page_slots;
        for (int32_t i = length - count; i < length; i++)
            cpu_cache_log_beta(cache, table[i / slots])[i % slots] =
                log_beta(sim, stream, sim->due.tokens + i - length + count);
    }
    due_append(&sim->due, count);
    check(sim);
}

static void evict(struct sim *sim) {
    const struct kern_evict due = {
        .tokens = sim->due.tokens, .budget = sim->kv.budget, .rule = &sim->kv.rule};
    int rc = cpu_cache_evict(&sim->cache, &due, 1);
    EXPECT(sim, rc == 0, "%s", err_name(rc));
    due_evicted(&sim->kv, &sim->due);
    sim->evicted = true;
    check(sim);
}

/* ---- Turns ---- */

static void reserve(struct sim *sim, int32_t first, int32_t prompt_new, int32_t max_new) {
    int64_t held = sim->due.held < first ? sim->due.held : first;
    const struct reserve_turn turn = {.held = held,
                                      .fullest = sim->fullest < first ? sim->fullest : first,
                                      .drops = first < sim->due.tokens,
                                      .tokens = first,
                                      .added = prompt_new + max_new};
    int64_t whole = reserve_peak(&sim->kv, held, prompt_new, max_new);
    sim->peak = reserve_rank_peak(&sim->shape, &sim->kv, &turn, whole);
    sim->pages = reserve_pages(&sim->shape, &sim->kv, sim->peak, turn.tokens + turn.added);
    EXPECT(sim, sim->peak >= turn.fullest || turn.drops, "less than there is");
    EXPECT(sim, sim->peak <= sim->shape.ranks * whole, "more than all");
}

static void begin_turn(struct sim *sim, int32_t first, int32_t prompt_new) {
    int64_t streams = reserve_all_streams(&sim->shape);
    if (first < sim->due.tokens)
        EXPECT(sim, cpu_cache_truncate(&sim->cache, 0, first) == 0, "truncate");
    sim->due = (struct due_state){.tokens = first,
                                  .held = (int32_t)per_stream(all_entries(sim), streams),
                                  .prompt_new = prompt_new};
    sim->most = 0;
    sim->evicted = false;
    check(sim);
}

/* As sched_retain. */
static void end_turn(struct sim *sim) {
    int64_t streams = reserve_all_streams(&sim->shape);
    const struct kern_rule *rule = &sim->kv.rule;
    double *best = rule->scope == KERN_SCOPE_STREAM ? &sim->tightness->apart
                   : sim->shape.rank_cap > 0        ? &sim->tightness->capped
                                                    : &sim->tightness->shared;
    sim->due.held = (int32_t)per_stream(all_entries(sim), streams);
    sim->fullest = per_stream(over_ranks(sim, own_entries(sim), COMM_MAX), sim->cache.streams);
    double part =
        (double)over_ranks(sim, sim->most, COMM_MAX) / (double)(sim->peak * sim->cache.streams);
    if (sim->comm->rank == 0 && sim->evicted && part > *best) *best = part;
}

static void play_turn(struct sim *sim) {
    int32_t first = sim->due.tokens, prompt_new = pick(sim, 1, 60), max_new = pick(sim, 0, 40);
    if (pick(sim, 0, 2) == 0) first = pick(sim, sim->prompt_end, sim->due.tokens);
    reserve(sim, first, prompt_new, max_new);
    begin_turn(sim, first, prompt_new);
    sim->favoured = pick(sim, -1, sim->options.heads_kv - 1);
    for (int32_t room; (room = due_prompt_limit(&sim->kv, &sim->due)) > 0;) {
        append(sim, pick(sim, 1, room));
        if (due_after_append(&sim->kv, &sim->due)) evict(sim);
    }
    for (int32_t i = 0; i < max_new; i++) {
        if (due_before_generate(&sim->kv, &sim->due)) evict(sim);
        append(sim, 1);
    }
    sim->prompt_end = first + prompt_new;
    end_turn(sim);
}

/* ---- Seeds ---- */

static void choose_rule(struct sim *sim) {
    static const float floors[] = {0, 0, 0.2f, 0.55f};
    struct kv_params *kv = &sim->kv;
    struct kern_rule *rule = &kv->rule;
    *kv = (struct kv_params){
        .budget = pick(sim, 1, 24), .buffer = pick(sim, 0, 8), .chunk = pick(sim, 1, 30)};
    kv_params_set_policy(kv, policy_find(pick(sim, 0, 9) == 0 ? "full" : "global"));
    if (!kv->policy->bounded) return;
    rule->scope = (enum kern_scope)pick(sim, KERN_SCOPE_STREAM, KERN_SCOPE_SEQUENCE);
    rule->layers = pick(sim, 0, 2) == 0 ? KERN_LAYERS_PYRAMID : KERN_LAYERS_UNIFORM;
    rule->pyramid_beta = 3;
    rule->horizon = pick(sim, 0, 1) ? 128 : INFINITY;
    rule->floor = rule->scope == KERN_SCOPE_STREAM ? 0 : floors[pick(sim, 0, 3)];
    rule->sinks = pick(sim, 0, kv->budget < 4 ? kv->budget : 4);
    rule->recent = pick(sim, 0, kv->budget - rule->sinks);
    if (pick(sim, 0, 1) && rule->recent > 4) rule->recent = 4;
    struct fault fault = {0};
    EXPECT(sim, kv_params_check(kv, &fault) == 0, "%s", fault.text);
}

static void open_cache(struct sim *sim) {
    static const float caps[] = {0, 0, 1, 1.1f, 1.5f};
    static const int dims[] = {128, 512, 1024};
    struct kern_cache_info info;
    struct kern_cache_options *options = &sim->options;
    int heads = 2 << pick(sim, 0, 2), ranks = sim->comm->ranks;
    *options = (struct kern_cache_options){.layers = pick(sim, 1, 3),
                                           .heads_q = heads,
                                           .heads_kv = heads,
                                           .head_dim = dims[pick(sim, 0, 2)],
                                           .dtype = KERN_BF16,
                                           .slots = 1,
                                           .max_positions = POSITIONS,
                                           .rank_cap = caps[pick(sim, 0, 4)]};
    if (heads < ranks) options->heads_q = ranks; /* ranks share the query heads */
    /* Every other layer has half as many heads, of more numbers. */
    struct kern_heads layers[3] = {{heads, 128}, {heads / 2, 512}, {heads, 128}};
    const bool differ = heads / 2 >= ranks && options->rank_cap == 0 && sim->seed % 2 == 0;
    if (differ) {
        options->heads = layers;
        options->head_dim = options->layers > 1 ? 512 : 128;
    }
    cpu_cache_info(options, &info);
    sim->shape = (struct reserve_shape){.layers = options->layers,
                                        .heads_kv = heads,
                                        .page_slots = info.page_slots,
                                        .member_slots = info.member_slots,
                                        .ranks = ranks < heads ? ranks : heads,
                                        .rank_cap = options->rank_cap};
    if (differ && options->layers > 1) {
        sim->shape.sliding_layers = 1;
        sim->shape.sliding_heads_kv = heads / 2;
        sim->shape.sliding_page_slots = info.page_slots_least;
    }
    options->pages = (int64_t)options->layers * heads * POSITIONS;
    struct fault fault = {0};
    EXPECT(sim, cpu_cache_open_rank(&sim->cache, options, sim->comm, 1, &fault) == 0, "%s",
           fault.text);
    options->heads = NULL;
}

struct rank {
    pthread_t thread;
    struct sim sim;
};

static void *rank_main(void *arg) {
    struct sim *sim = &((struct rank *)arg)->sim;
    open_cache(sim);
    choose_rule(sim);
    for (int turn = 0; turn < TURNS; turn++) play_turn(sim);
    EXPECT(sim, cpu_cache_check(&sim->cache, NULL) == 0, "unsound");
    cpu_cache_close(&sim->cache);
    sim->comm->ops->close(sim->comm);
    return NULL;
}

static void simulate(uint64_t seed, int ranks, struct tightness *tightness) {
    static struct rank all[COMM_RANKS_MAX];
    const struct comm *comm[COMM_RANKS_MAX];
    memset(all, 0, sizeof all);
    if (comm_host_open(ranks, comm)) exit(1);
    for (int r = 0; r < ranks; r++) {
        all[r].sim =
            (struct sim){.seed = seed, .random = seed, .comm = comm[r], .tightness = tightness};
        if (pthread_create(&all[r].thread, NULL, rank_main, &all[r])) exit(1);
    }
    for (int r = 0; r < ranks; r++) pthread_join(all[r].thread, NULL);
}

int main(int argc, char **argv) {
    uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    uint64_t count = argc > 2 ? strtoull(argv[2], NULL, 10) : 60;
    struct tightness tightness = {0};
    for (uint64_t seed = first; seed < first + count; seed++)
        simulate(seed, 2 << seed % 3, &tightness);
    printf("%llu seeds; of what was reserved of a rank the fullest had %.2f where heads share, "
           "%.2f with a cap, %.2f where they do not\n",
           (unsigned long long)count, tightness.shared, tightness.capped, tightness.apart);
    /* Detects a formula that reserves too much. */
    if (count >= 60 && (tightness.shared < 0.9 || tightness.capped < 0.9 || tightness.apart < 0.9))
        return 1;
    return 0;
}
