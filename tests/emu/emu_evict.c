/* Eviction on the device keeps exactly what the CPU keeps, position by position, over random
 * sequences, rules, ties and forks; and says so when it does not know a method. */
#include <criterion/criterion.h>

#include "both.h"

#define SLOTS    3
#define ROWS_MAX 260

struct pair {
    struct kern *kern[BACKENDS];
    int layers, heads, head_dim, stride;
    uint64_t seed;
    float *qkv[BACKENDS];
};

static uint32_t pick(uint64_t *state, uint32_t below) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((*state >> 33) % below);
}

static struct pair open_pair(int layers, int heads, int head_dim, int64_t entries, uint64_t seed) {
    struct pair p = {.layers = layers,
                     .heads = heads,
                     .head_dim = head_dim,
                     .stride = 3 * heads * head_dim,
                     .seed = seed};
    struct kern_cache_options options = {.layers = layers,
                                         .heads_q = heads,
                                         .heads_kv = heads,
                                         .head_dim = head_dim,
                                         .dtype = KERN_BF16,
                                         .slots = SLOTS,
                                         .max_positions = 600};
    both_open(p.kern);
    both_cache(p.kern, options, entries);
    size_t count = (size_t)(ROWS_MAX * p.stride);
    float *qkv = fresh(count, seed + 77);
    for (int b = 0; b < BACKENDS; b++) p.qkv[b] = put(p.kern[b], qkv, count);
    free(qkv);
    return p;
}

static void close_pair(struct pair *p) {
    for (int b = 0; b < BACKENDS; b++) p->kern[b]->ops->mem_free(p->kern[b], p->qkv[b]);
    both_close(p->kern);
}

/* log_beta by layer, position and head; every fourth seed has many ties, every eighth broken
 * numbers. */
static float log_beta_of(const struct pair *p, int layer, int pos, int head) {
    static const float broken[] = {NAN, -INFINITY, 0.0f, -0.0f, 1.0f, -1e-30f, -3e38f, INFINITY};
    uint64_t h = mix(p->seed * 1000003 + (uint64_t)((layer * 1000 + pos) * 64 + head));
    double z = (double)(h >> 40) * 0x1p-24 * 24 - 4; /* logits of a trained gate */
    if (p->seed % 4 == 1) return -(float)(h % 3) / 64;
    if (p->seed % 8 == 2 && h % 4 == 0) return broken[h / 4 % 8];
    return (float)-log1p(exp(-z));
}

static void append(struct pair *p, int slot, int pos, int count) {
    struct kern_span span = {.slot = slot, .count = count, .pos = pos};
    struct kern_batch batch = {.spans = &span, .span_count = 1, .rows = count};
    size_t floats = (size_t)(count * p->heads);
    float *beta = malloc(floats * sizeof *beta);
    cr_assert(count <= ROWS_MAX);
    for (int b = 0; b < BACKENDS; b++) {
        const struct kern_ops *ops = p->kern[b]->ops;
        MUST(ops->begin_step(p->kern[b], &batch));
        for (int layer = 0; layer < p->layers; layer++) {
            for (int i = 0; i < count; i++)
                for (int h = 0; h < p->heads; h++)
                    beta[i * p->heads + h] = log_beta_of(p, layer, pos + i, h);
            float *there = put(p->kern[b], beta, floats);
            ops->write_kv(p->kern[b], layer, p->qkv[b], there, &batch);
            MUST(ops->sync(p->kern[b]));
            ops->mem_free(p->kern[b], there);
        }
    }
    free(beta);
}

static void evict(struct pair *p, const struct kern_evict *due, int count, const char *what) {
    for (int b = 0; b < BACKENDS; b++) {
        struct kern_cache_stats before, after;
        p->kern[b]->ops->cache_stats(p->kern[b], &before);
        MUST(p->kern[b]->ops->evict(p->kern[b], due, count));
        MUST(p->kern[b]->ops->sync(p->kern[b]));
        p->kern[b]->ops->cache_stats(p->kern[b], &after);
        cr_assert_geq(after.entries_evicted, before.entries_evicted);
    }
    for (int slot = 0; slot < SLOTS; slot++)
        expect_same_held(p->kern, slot, p->layers * p->heads, what);
}

static struct kern_rule random_rule(uint64_t *random) {
    static const float horizons[] = {1, 2, 128, 1e30f, INFINITY};
    struct kern_rule rule = {.horizon = horizons[pick(random, 5)]};
    rule.sinks = (int32_t)pick(random, 5);
    rule.recent = (int32_t)pick(random, 6);
    rule.score = pick(random, 4) == 0 ? KERN_SCORE_RECENCY : KERN_SCORE_RETENTION;
    rule.pool = (enum kern_pool)pick(random, 3); /* stream, layer, sequence */
    return rule;
}

static void random_case(uint64_t seed) {
    static const int dims[] = {64, 128, 256};
    uint64_t random = seed;
    char what[32];
    snprintf(what, sizeof what, "seed %d", (int)seed);
    emu_set_seed(seed);
    struct pair p = open_pair(1 + (int)pick(&random, 3), 1 + (int)pick(&random, 4),
                              dims[pick(&random, 3)], 16384, seed);
    int32_t tokens[SLOTS] = {0};
    for (int round = 0; round < 3; round++) {
        struct kern_rule rules[2];
        struct kern_evict due[2];
        for (int i = 0; i < 2; i++) { /* slots 1 and 2 together */
            int count = 1 + (int)pick(&random, 70);
            append(&p, 1 + i, tokens[1 + i], count);
            tokens[1 + i] += count;
            rules[i] = random_rule(&random);
            due[i] = (struct kern_evict){.slot = 1 + i,
                                         .tokens = tokens[1 + i],
                                         .keep = 1 + (int32_t)pick(&random, 40),
                                         .rule = &rules[i]};
        }
        evict(&p, due, 2, what);
    }
    close_pair(&p);
}

Test(emu_evict, keeps_what_the_cpu_keeps) {
    for (uint64_t seed = 1; seed <= 60; seed++) random_case(seed);
}

/* All scores equal: everything is decided by positions and streams. */
Test(emu_evict, ties_everywhere) {
    struct kern_rule rule = {
        .score = KERN_SCORE_RECENCY, .pool = KERN_POOL_SEQUENCE, .sinks = 1, .horizon = 1};
    for (int keep = 1; keep <= 13; keep += 3) {
        emu_set_seed((uint64_t)keep);
        struct pair p = open_pair(3, 5, 64, 8192, 0);
        append(&p, 1, 0, 13);
        struct kern_evict due = {.slot = 1, .tokens = 13, .keep = keep, .rule = &rule};
        evict(&p, &due, 1, "ties");
        evict(&p, &due, 1, "again");
        close_pair(&p);
    }
}

/* More streams than blocks of a select, several tiles of compaction, whole pages freed. */
Test(emu_evict, many_streams) {
    struct kern_rule rule = {
        .score = KERN_SCORE_RETENTION, .pool = KERN_POOL_SEQUENCE, .sinks = 4, .horizon = 128};
    emu_set_seed(3);
    struct pair p = open_pair(6, 8, 64, 32768, 6);
    append(&p, 1, 0, 250);
    struct kern_evict due = {.slot = 1, .tokens = 250, .keep = 100, .rule = &rule};
    evict(&p, &due, 1, "250 to 100");
    append(&p, 1, 250, 33);
    due.tokens = 283;
    evict(&p, &due, 1, "133 to 100");
    close_pair(&p);
}

Test(emu_evict, forks_do_not_see_each_other) {
    for (uint64_t seed = 1; seed <= 12; seed++) {
        uint64_t random = seed;
        emu_set_seed(seed);
        struct pair p = open_pair(2, 2, 256, 4096, seed);
        int32_t tokens = 1 + (int32_t)pick(&random, 60);
        append(&p, 1, 0, tokens);
        for (int b = 0; b < BACKENDS; b++) MUST(p.kern[b]->ops->fork(p.kern[b], 1, 0));
        struct kern_rule rules[2] = {random_rule(&random), random_rule(&random)};
        struct kern_evict due[2] = {
            {.slot = 1, .tokens = tokens, .keep = 1 + (int)pick(&random, 30), .rule = &rules[0]},
            {.slot = 0, .tokens = tokens, .keep = 1 + (int)pick(&random, 30), .rule = &rules[1]}};
        evict(&p, due, 2, "forks");
        append(&p, 0, tokens, 5);
        evict(&p, &due[1], 1, "one fork again");
        close_pair(&p);
    }
}

/* A fork that cannot be written without copies, and no page for them: it stays as it was. */
Test(emu_evict, a_full_pool_leaves_the_fork_unchanged) {
    struct kern_rule rule = {.score = KERN_SCORE_RETENTION, .horizon = 128};
    struct kern_evict due = {.slot = 1, .tokens = 20, .keep = 12, .rule = &rule};
    int failures = 0;
    for (int64_t pages = 12; pages <= 22; pages++) {
        struct pair p = open_pair(2, 2, 256, 8 * pages, 4);
        append(&p, 1, 0, 20);
        for (int b = 0; b < BACKENDS; b++) MUST(p.kern[b]->ops->fork(p.kern[b], 1, 0));
        int rc[BACKENDS];
        for (int b = 0; b < BACKENDS; b++) {
            rc[b] = p.kern[b]->ops->evict(p.kern[b], &due, 1);
            int later = p.kern[b]->ops->sync(p.kern[b]);
            if (!rc[b]) rc[b] = later;
        }
        cr_assert_eq(rc[ORACLE], rc[EMULATED], "%d pages: %d, not %d", (int)pages, rc[EMULATED],
                     rc[ORACLE]);
        failures += rc[EMULATED] == ERR_FULL;
        for (int slot = 0; slot < SLOTS; slot++) expect_same_held(p.kern, slot, 4, "full pool");
        close_pair(&p);
    }
    cr_assert(failures > 0 && failures < 11, "%d", failures);
}

Test(emu_evict, traces_name_what_went) {
    struct kern_rule rule = {
        .score = KERN_SCORE_RETENTION, .pool = KERN_POOL_SEQUENCE, .horizon = 8};
    int32_t lengths[4], positions[400];
    struct kern_trace trace = {.lengths = lengths, .positions = positions, .entries_max = 400};
    struct kern_evict due = {.slot = 1, .tokens = 50, .keep = 20, .rule = &rule, .trace = &trace};
    static struct held was, is;
    struct pair p = open_pair(2, 2, 128, 4096, 5);
    append(&p, 1, 0, 50);
    read_held(p.kern[EMULATED], 1, &was);
    MUST(p.kern[EMULATED]->ops->evict(p.kern[EMULATED], &due, 1));
    read_held(p.kern[EMULATED], 1, &is);
    cr_assert_eq((int)trace.entries, 4 * 30);
    for (int s = 0, a = 0, b = 0, t = 0; s < 4; a += was.lengths[s], s++) {
        cr_assert_eq(lengths[s], was.lengths[s] - is.lengths[s]);
        for (int i = 0; i < was.lengths[s]; i++) /* each entry is in exactly one of the two */
            if (b < (int)is.report.entries && is.positions[b] == was.positions[a + i])
                b++;
            else
                cr_assert_eq(positions[t++], was.positions[a + i]);
    }
    close_pair(&p);
}

/* All that the CPU runs but classes of entries, which are refused by name before anything happens.
 */
Test(emu_evict, every_rule_runs) {
    static const struct kern_rule rules[] = {
        {.score = KERN_SCORE_RECENCY},
        {.score = KERN_SCORE_RETENTION, .pool = KERN_POOL_SEQUENCE, .horizon = 128},
        {.score = KERN_SCORE_ATTENTION, .observe = {.window = 8}},
        {.score = KERN_SCORE_ATTENTION, .redundancy = {.on = true}},
        {.score = KERN_SCORE_RECENCY, .layers = KERN_LAYERS_PYRAMID, .pyramid_beta = 20},
        {.score = KERN_SCORE_RECENCY, .merge = KERN_MERGE_CODE},
        {.score = KERN_SCORE_RETENTION, .horizon = 1, .published = true},
        {.score = KERN_SCORE_RETENTION, .horizon = 1, .retain = 0.5f},
        {.score = KERN_SCORE_RETENTION, .horizon = 1, .floor = 0.5f},
    };
    struct pair p = open_pair(1, 1, 128, 1024, 5);
    for (int i = 0; i < (int)(sizeof rules / sizeof *rules); i++) {
        struct fault fault = {0};
        struct kern_span span = {.slot = 1, .count = 1, .pos = i, .rule = &rules[i]};
        struct kern_batch batch = {.spans = &span, .span_count = 1, .rows = 1};
        for (int b = 0; b < BACKENDS; b++) {
            MUST(p.kern[b]->ops->rule_check(&rules[i], &fault));
            MUST(p.kern[b]->ops->begin_step(p.kern[b], &batch));
        }
    }
    const struct kern_rule classes = {
        .score = KERN_SCORE_RETENTION, .horizon = 1, .merge = KERN_MERGE_CLASSES};
    struct fault fault = {0};
    struct kern_span span = {.slot = 2, .count = 1, .rule = &classes};
    struct kern_batch batch = {.spans = &span, .span_count = 1, .rows = 1};
    struct kern_evict due = {.slot = 1, .tokens = 9, .keep = 4, .rule = &classes};
    const struct kern_ops *ops = p.kern[EMULATED]->ops;
    cr_assert_eq(ops->rule_check(&classes, &fault), ERR_UNSUPPORTED);
    cr_assert_str_eq(fault.field, "merge");
    cr_assert_eq(ops->begin_step(p.kern[EMULATED], &batch), ERR_UNSUPPORTED);
    cr_assert_eq(ops->evict(p.kern[EMULATED], &due, 1), ERR_UNSUPPORTED);
    for (int slot = 1; slot < 3; slot++) expect_same_held(p.kern, slot, 1, "refused");
    close_pair(&p);
}

/* Classes are weighed by what all queries attended to: without that they are no method. */
Test(emu_evict, classes_without_mass_are_refused_by_name) {
    const struct kern_rule rule = {.score = KERN_SCORE_ATTENTION,
                                   .merge = KERN_MERGE_CLASSES,
                                   .classes = {.gamma = 4, .tau = 0.6f},
                                   .observe = {.window = 8, .reduce = KERN_REDUCE_SUM}};
    struct pair p = open_pair(1, 1, 128, 1024, 5);
    for (int b = 0; b < BACKENDS; b++) {
        struct fault fault = {0};
        cr_assert_eq(p.kern[b]->ops->rule_check(&rule, &fault), ERR_UNSUPPORTED);
        cr_assert_str_eq(fault.field, "merge");
    }
    close_pair(&p);
}
