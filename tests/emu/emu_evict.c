/* Eviction on the device keeps exactly what the CPU keeps, position by position, over random
 * sequences, rules, ties and forks; and says so when it does not know a method. */
#include <criterion/criterion.h>

#include "both.h"
#include "tests/sample.h"

#define SLOTS    3
#define ROWS_MAX 260
#define SHIFTS   97 /* rows that steps begin with, one after the other */

/* Does this entry of this head go? */
typedef bool pattern(int pos, int count, int head);

struct pair {
    struct kern *kern[BACKENDS];
    int layers, heads, head_dim, stride;
    uint64_t seed;
    float *qkv[BACKENDS];
    pattern *goes; /* NULL: gates are noise */
    int count;
};

static uint32_t pick(uint64_t *state, uint32_t below) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((*state >> 33) % below);
}

static struct pair open_shape(struct kern_cache_options options, int64_t entries, uint64_t seed) {
    struct pair p = {.layers = options.layers,
                     .heads = options.heads_kv,
                     .head_dim = options.head_dim,
                     .stride = (options.latent ? 2 : 3) * options.heads_kv * options.head_dim,
                     .seed = seed};
    options.heads_q = options.heads_kv;
    options.slots = SLOTS;
    both_open(p.kern);
    both_cache(p.kern, options, entries);
    size_t count = (size_t)((ROWS_MAX + SHIFTS) * p.stride);
    float *qkv = fresh(count, seed + 77);
    for (int b = 0; b < BACKENDS; b++) p.qkv[b] = put(p.kern[b], qkv, count);
    free(qkv);
    return p;
}

static struct pair open_pair(int layers, int heads, int head_dim, int64_t entries, uint64_t seed) {
    struct kern_cache_options options = {.layers = layers,
                                         .heads_kv = heads,
                                         .head_dim = head_dim,
                                         .dtype = KERN_BF16,
                                         .max_positions = 600};
    return open_shape(options, entries, seed);
}

static void close_pair(struct pair *p) {
    for (int b = 0; b < BACKENDS; b++) p->kern[b]->ops->mem_free(p->kern[b], p->qkv[b]);
    both_close(p->kern);
}

/* log_beta by layer, position and head; every fourth seed has many ties, every eighth broken
 * numbers. */
static float log_beta_of(const struct pair *p, int layer, int pos, int head) {
    static const float broken[] = {NAN, -INFINITY, 0.0f, -0.0f, 1.0f, -1e-30f, -3e38f, INFINITY};
    if (p->goes) return p->goes(pos, p->count, head) ? -1 : 0;
    uint64_t h = mix(p->seed * 1000003 + (uint64_t)((layer * 1000 + pos) * 64 + head));
    double z = (double)(h >> 40) * 0x1p-24 * 24 - 4; /* logits of a trained gate */
    if (p->seed % 4 == 1) return -(float)(h % 3) / 64;
    if (p->seed % 8 == 2 && h % 4 == 0) return broken[h / 4 % 8];
    return (float)-log1p(exp(-z));
}

static void append_step(struct pair *p, int slot, int pos, int count) {
    int first = pos / ROWS_MAX % SHIFTS * p->stride; /* far entries differ, too */
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
            ops->write_kv(p->kern[b], layer, p->qkv[b] + first, there, &batch);
            MUST(ops->sync(p->kern[b]));
            ops->mem_free(p->kern[b], there);
        }
    }
    free(beta);
}

static void append(struct pair *p, int slot, int pos, int count) {
    for (int end = pos + count; pos < end; pos += ROWS_MAX)
        append_step(p, slot, pos, end - pos < ROWS_MAX ? end - pos : ROWS_MAX);
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
    rule.scope = (enum kern_scope)pick(random, 3); /* stream, layer, sequence */
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
                                         .budget = 1 + (int32_t)pick(&random, 40),
                                         .rule = &rules[i]};
        }
        evict(&p, due, 2, what);
    }
    close_pair(&p);
}

Test(emu_evict, keeps_what_the_cpu_keeps) {
    for (uint64_t seed = 1; seed <= 60; seed++)
        if (!test_leaves_out(seed, 10)) random_case(seed);
}

/* All scores equal: everything is decided by positions and streams. */
Test(emu_evict, ties_everywhere) {
    struct kern_rule rule = {
        .score = KERN_SCORE_RECENCY, .scope = KERN_SCOPE_SEQUENCE, .sinks = 1, .horizon = 1};
    for (int keep = 1; keep <= 13; keep += 3) {
        emu_set_seed((uint64_t)keep);
        struct pair p = open_pair(3, 5, 64, 8192, 0);
        append(&p, 1, 0, 13);
        struct kern_evict due = {.slot = 1, .tokens = 13, .budget = keep, .rule = &rule};
        evict(&p, &due, 1, "ties");
        evict(&p, &due, 1, "again");
        close_pair(&p);
    }
}

/* More streams than blocks of a select, several tiles of compaction, whole pages freed. */
Test(emu_evict, many_streams) {
    struct kern_rule rule = {
        .score = KERN_SCORE_RETENTION, .scope = KERN_SCOPE_SEQUENCE, .sinks = 4, .horizon = 128};
    emu_set_seed(3);
    struct pair p = open_pair(6, 8, 64, 32768, 6);
    append(&p, 1, 0, 250);
    struct kern_evict due = {.slot = 1, .tokens = 250, .budget = 100, .rule = &rule};
    evict(&p, &due, 1, "250 to 100");
    append(&p, 1, 250, 33);
    due.tokens = 283;
    evict(&p, &due, 1, "133 to 100");
    close_pair(&p);
}

Test(emu_evict, forks_do_not_see_each_other) {
    for (uint64_t seed = 1; seed <= 12; seed++) {
        uint64_t random = seed;
        if (test_leaves_out(seed, 3)) continue;
        emu_set_seed(seed);
        struct pair p = open_pair(2, 2, 256, 4096, seed);
        int32_t tokens = 1 + (int32_t)pick(&random, 60);
        append(&p, 1, 0, tokens);
        for (int b = 0; b < BACKENDS; b++) MUST(p.kern[b]->ops->fork(p.kern[b], 1, 0));
        struct kern_rule rules[2] = {random_rule(&random), random_rule(&random)};
        struct kern_evict due[2] = {
            {.slot = 1, .tokens = tokens, .budget = 1 + (int)pick(&random, 30), .rule = &rules[0]},
            {.slot = 0, .tokens = tokens, .budget = 1 + (int)pick(&random, 30), .rule = &rules[1]}};
        evict(&p, due, 2, "forks");
        append(&p, 0, tokens, 5);
        evict(&p, &due[1], 1, "one fork again");
        close_pair(&p);
    }
}

/* A fork that cannot be written without copies, and no page for them: it stays as it was. */
Test(emu_evict, a_full_pool_leaves_the_fork_unchanged) {
    struct kern_rule rule = {.score = KERN_SCORE_RETENTION, .horizon = 128};
    const struct kern_rule alike = {.score = KERN_SCORE_ATTENTION,
                                    .redundancy = {.on = true, .threshold = 0.5f, .eps = 1e-6f}};
    struct kern_evict due = {.slot = 1, .tokens = 20, .budget = 12, .rule = &rule};
    int failures = 0;
    for (int64_t pages = 12; pages <= 22; pages += test_sample() ? 5 : 1) {
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
        for (int b = 0; b < BACKENDS; b++) p.kern[b]->ops->release(p.kern[b], 0);
        due.rule =
            &alike; /* the room for it is as large as the slot may be: still 20 entries a stream */
        evict(&p, &due, 1, "after a full pool");
        due.rule = &rule;
        close_pair(&p);
    }
    cr_assert(failures > 0 && failures < (test_sample() ? 3 : 11), "%d", failures);
}

Test(emu_evict, traces_name_what_went) {
    struct kern_rule rule = {
        .score = KERN_SCORE_RETENTION, .scope = KERN_SCOPE_SEQUENCE, .horizon = 8};
    int32_t lengths[4], positions[400];
    struct kern_trace trace = {.lengths = lengths, .positions = positions, .entries_max = 400};
    struct kern_evict due = {.slot = 1, .tokens = 50, .budget = 20, .rule = &rule, .trace = &trace};
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

/* A rule that the device does not run is refused by the name of the member, and changes nothing. */
Test(emu_evict, rules_run_or_are_refused_by_name) {
    static const struct kern_rule rules[] = {
        {.score = KERN_SCORE_RECENCY},
        {.score = KERN_SCORE_RETENTION, .scope = KERN_SCOPE_SEQUENCE, .horizon = 128},
        {.score = KERN_SCORE_ATTENTION, .observe = {.window = 8}},
        {.score = KERN_SCORE_ATTENTION, .redundancy = {.on = true}},
        {.score = KERN_SCORE_RECENCY, .layers = KERN_LAYERS_PYRAMID, .pyramid_beta = 20},
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
    static const struct {
        const char *field;
        struct kern_rule rule;
    } refused[] = {
        {"merge", {.score = KERN_SCORE_RECENCY, .merge = KERN_MERGE_CODE}},
        {"merge", {.score = KERN_SCORE_ATTENTION, .merge = KERN_MERGE_CLASSES}},
        {"layers", {.score = KERN_SCORE_ATTENTION, .layers = KERN_LAYERS_DENSITY}},
        {"observe.global",
         {.score = KERN_SCORE_ATTENTION, .observe = {.window = 8, .global = true}}},
        {"redundancy.measure",
         {.score = KERN_SCORE_ATTENTION,
          .redundancy = {.on = true, .measure = KERN_MEASURE_LAG, .lag = 8}}},
        {"observe.expect", {.score = KERN_SCORE_ATTENTION, .observe = {.window = 8, .expect = 16}}},
    };
    for (int i = 0; i < (int)(sizeof refused / sizeof *refused); i++) {
        struct kern *kern = p.kern[EMULATED];
        struct fault fault = {0};
        struct kern_span span = {.slot = 2, .count = 1, .rule = &refused[i].rule};
        struct kern_batch batch = {.spans = &span, .span_count = 1, .rows = 1};
        struct kern_evict due = {.slot = 1, .tokens = 9, .budget = 4, .rule = &refused[i].rule};
        cr_assert_eq(kern->ops->rule_check(&refused[i].rule, &fault), ERR_UNSUPPORTED);
        cr_assert_str_eq(fault.field, refused[i].field);
        cr_assert_eq(kern->ops->begin_step(kern, &batch), ERR_UNSUPPORTED);
        cr_assert_eq(kern->ops->evict(kern, &due, 1), ERR_UNSUPPORTED);
    }
    for (int slot = 1; slot < 3; slot++) expect_same_held(p.kern, slot, 1, "refused");
    close_pair(&p);
}

/* Attention to latent vectors is not observed, nor are they compared. */
Test(emu_evict, latent_vectors_are_not_read) {
    static const struct kern_rule refused[] = {
        {.score = KERN_SCORE_ATTENTION, .observe = {.window = 8}},
        {.score = KERN_SCORE_ATTENTION, .observe = {.reduce = KERN_REDUCE_SUM}},
        {.score = KERN_SCORE_ATTENTION, .redundancy = {.on = true}},
    };
    static const struct kern_rule runs = {.score = KERN_SCORE_RECENCY};
    const struct kern_cache_options options = {.layers = 1,
                                               .heads_kv = 1,
                                               .head_dim = 128,
                                               .latent = 96,
                                               .max_positions = 600,
                                               .dtype = KERN_BF16};
    struct pair p = open_shape(options, 1024, 5);
    const struct kern_ops *ops = p.kern[EMULATED]->ops;
    cr_assert(p.kern[ORACLE]->ops->reads_latent && !ops->reads_latent);
    append(&p, 1, 0, 9);
    for (int i = 0; i < (int)(sizeof refused / sizeof *refused); i++) {
        struct kern_span span = {.slot = 2, .count = 1, .rule = &refused[i]};
        struct kern_batch batch = {.spans = &span, .span_count = 1, .rows = 1};
        struct kern_evict due = {.slot = 1, .tokens = 9, .budget = 4, .rule = &refused[i]};
        cr_assert_eq(ops->prepare(p.kern[EMULATED], 2, &refused[i], 1), ERR_UNSUPPORTED);
        cr_assert_eq(ops->begin_step(p.kern[EMULATED], &batch), ERR_UNSUPPORTED);
        cr_assert_eq(ops->evict(p.kern[EMULATED], &due, 1), ERR_UNSUPPORTED);
    }
    const struct kern_evict due = {.slot = 1, .tokens = 9, .budget = 4, .rule = &runs};
    evict(&p, &due, 1, "recency");
    close_pair(&p);
}

/* ---- Gaps ---- */

static bool none_goes(int pos, int count, int head) {
    (void)pos, (void)count, (void)head;
    return false;
}
static bool all_go(int pos, int count, int head) {
    (void)pos, (void)count, (void)head;
    return true;
}
static bool every_second(int pos, int count, int head) {
    (void)count;
    return (pos + head) % 2 == 0;
}
static bool first_goes(int pos, int count, int head) {
    (void)count;
    return pos == head;
}
static bool last_goes(int pos, int count, int head) {
    return pos == count - 1 - head;
}
static bool last_stays(int pos, int count, int head) {
    return pos < count - 1 - head;
}
static bool few_go(int pos, int count, int head) {
    (void)count;
    return mix((uint64_t)(pos * 2 + head)) % 9 == 0;
}
static bool most_go(int pos, int count, int head) {
    (void)count;
    return mix((uint64_t)(pos * 2 + head)) % 9 != 0;
}
/* Whole chunks and pages go, and whole ones stay; one head loses nothing. */
static bool blocks_go(int pos, int count, int head) {
    (void)count;
    return head == 0 && (pos / 128 % 3 == 1 || (pos / 128 % 3 == 2 && pos / 16 % 2 == 0));
}

static const struct {
    pattern *goes;
    const char *name;
} patterns[] = {
    {none_goes, "nothing"},    {all_go, "everything"},  {every_second, "every second"},
    {first_goes, "the first"}, {last_goes, "the last"}, {last_stays, "all but the last"},
    {few_go, "few"},           {most_go, "most"},       {blocks_go, "whole blocks"}};
#define PATTERNS ((int)(sizeof patterns / sizeof *patterns))

/* Expects a slot's whole content to be the same, byte by byte. */
static void expect_same_bytes(struct pair *p, int slot, const char *what) {
    for (int block = 1; block <= p->layers * p->heads; block++) {
        char *bytes[BACKENDS];
        size_t size[BACKENDS];
        for (int b = 0; b < BACKENDS; b++) {
            struct kern *kern = p->kern[b];
            size[b] = kern->ops->snapshot_size(kern, slot, block);
            bytes[b] = malloc(size[b]);
            MUST(kern->ops->snapshot_export(kern, slot, block, bytes[b]));
        }
        cr_assert_eq(size[ORACLE], size[EMULATED], "%s", what);
        cr_assert(!memcmp(bytes[ORACLE], bytes[EMULATED], size[ORACLE]), "%s: block %d", what,
                  block);
        for (int b = 0; b < BACKENDS; b++) free(bytes[b]);
    }
}

/* Exactly what the pattern says: gates are 0 or -1, and what is below a half goes. */
static const struct kern_rule by_pattern = {
    .score = KERN_SCORE_RETENTION, .horizon = 1, .retain = 0.5f};

static void expect_pattern(struct pair *p, int slot, const char *what) {
    static struct held h;
    read_held(p->kern[EMULATED], slot, &h);
    for (int head = 0, at = 0; head < p->heads; head++)
        for (int pos = 0; pos < p->count; pos++)
            if (!p->goes(pos, p->count, head))
                cr_assert_eq(h.positions[at++], pos, "%s: head %d", what, head);
}

/* `count` entries, of which the pattern's go; with a fork, which then goes another way. */
static void gaps(struct kern_cache_options shape, int which, int count, bool fork) {
    char what[96];
    snprintf(what, sizeof what, "%s of %d go, head size %d, dtype %d%s", patterns[which].name,
             count, shape.head_dim, shape.dtype, fork ? ", forked" : "");
    emu_set_seed((uint64_t)(count * 16 + which));
    shape.layers = 1;
    shape.heads_kv = shape.latent ? 1 : 2;
    shape.max_positions = count + 8;
    struct pair p = open_shape(shape, 2 * (count + 512) * (fork ? 2 : 1), 3);
    const struct kern_rule recent = {.score = KERN_SCORE_RECENCY, .sinks = 3};
    struct kern_evict due = {.slot = 1, .tokens = count, .budget = count, .rule = &by_pattern};
    p.goes = patterns[which].goes;
    p.count = count;
    append(&p, 1, 0, count);
    for (int b = 0; b < BACKENDS && fork; b++) MUST(p.kern[b]->ops->fork(p.kern[b], 1, 0));
    evict(&p, &due, 1, what);
    expect_pattern(&p, 1, what);
    expect_same_bytes(&p, 1, what);
    if (fork) {
        expect_same_bytes(&p, 0, what);
        due = (struct kern_evict){
            .slot = 0, .tokens = count, .budget = count / 2 + 1, .rule = &recent};
        evict(&p, &due, 1, what);
        for (int slot = 0; slot < 2; slot++) expect_same_bytes(&p, slot, what);
    }
    append(&p, 1, count, 8); /* returned pages can be reused */
    expect_same_bytes(&p, 1, what);
    close_pair(&p);
}

static const struct kern_cache_options rows[] = {
    {.head_dim = 64, .dtype = KERN_BF16},
    {.head_dim = 128, .dtype = KERN_BF16},
    {.head_dim = 256, .dtype = KERN_BF16},
    {.head_dim = 64, .dtype = KERN_E4M3},
    {.head_dim = 128, .dtype = KERN_E4M3},
    {.head_dim = 256, .dtype = KERN_E4M3},
    {.head_dim = 64, .dtype = KERN_ROW8},
    {.head_dim = 128, .dtype = KERN_ROW8},
    {.head_dim = 256, .dtype = KERN_ROW8},
    {.head_dim = 512, .latent = 448, .dtype = KERN_BF16},
    {.head_dim = 128, .latent = 96, .dtype = KERN_BF16},
    {.head_dim = 512, .dtype = KERN_BF16}};
#define ROWS ((int)(sizeof rows / sizeof *rows))

Test(emu_evict, gaps_at_the_edges_of_chunks) {
    static const int counts[] = {1, 2, 16, 127, 128, 129, 257};
    for (int i = 0; i < 7; i++)
        for (int which = 0; which < PATTERNS; which++)
            gaps(rows[(i + which) % ROWS], which, counts[i], false);
}

/* A sample has every pattern and every kind of page, with a third of each other. */
Test(emu_evict, gaps_in_every_kind_of_page) {
    for (int i = 0; i < ROWS; i++)
        for (int which = 0; which < PATTERNS; which++)
            if (!test_leaves_out((size_t)(i + which), 3))
                gaps(rows[i], which, 330, which % 2 == i % 2);
}

/* Pages that the fork still has are copied where they are written, all others stay shared. */
Test(emu_evict, gaps_of_forks) {
    for (int which = 0; which < PATTERNS; which++) {
        gaps(rows[which % ROWS], which, 300 + which, true);
        gaps(rows[(which + 3) % ROWS], which, 1 + which, true);
    }
}

Test(emu_evict, gaps_of_long_streams) {
    static const int counts[] = {700, 1500, 4000, 9000, 2500, 20000, 3000, 16000, 5000};
    for (int which = 0; which < PATTERNS; which++)
        gaps(rows[which == 6 ? 4 : which % 2 * 3], which, counts[which], which == 2);
}
