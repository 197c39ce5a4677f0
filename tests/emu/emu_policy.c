/* Every bounded policy and its variants on the device beside the CPU's reference path: the same
 * tokens in the same batches, the same evictions; what is kept and what it remembers agree. */
#include <criterion/criterion.h>

#include "play.h"

/* ---- The list of methods ---- */

static void published(struct kern_rule *rule) {
    rule->published = true;
}
static void published_step(struct kern_rule *rule) {
    rule->published = true;
    rule->horizon = 1;
}
static void forever(struct kern_rule *rule) {
    rule->horizon = INFINITY;
}
static void floored(struct kern_rule *rule) {
    rule->floor = 0.25f;
}
static void threshold(struct kern_rule *rule) {
    rule->retain = 0.8f;
}
static void history_mean(struct kern_rule *rule) {
    rule->observe.history = KERN_HISTORY_MEAN;
}
static void history_sum(struct kern_rule *rule) {
    rule->observe.history = KERN_HISTORY_SUM;
}
static void artefact(struct kern_rule *rule) {
    rule->redundancy.index_zero = true;
}
static void paper(struct kern_rule *rule) {
    rule->redundancy.candidates_only = rule->redundancy.own = rule->observe.smooth_first = true;
}
static void without_redundancy(struct kern_rule *rule) {
    rule->redundancy.on = false;
}
static void smoothed(struct kern_rule *rule) {
    rule->observe.smooth = KERN_SMOOTH_MAX;
    rule->observe.smooth_width = 5;
}
static void reduce_max(struct kern_rule *rule) {
    rule->observe.reduce = KERN_REDUCE_MAX;
}
static void reduce_std(struct kern_rule *rule) {
    rule->observe.reduce = KERN_REDUCE_MEAN_STD;
}
static void taus(struct kern_rule *rule) {
    rule->tau1 = 1.6f;
    rule->tau2 = 0.4f;
}
static void group_max(struct kern_rule *rule) {
    rule->observe.group = KERN_GROUP_MAX;
}
/* Other readings of a policy, those of tests/python/policies/table.py. */
static const struct method variants[] = {
    {"trimkv", published},   {"global", published},       {"global", published_step},
    {"global", forever},     {"global", floored},         {"global", threshold},
    {"gkv", history_mean},   {"gkv", history_sum},        {"rkv", artefact},
    {"rkv", paper},          {"gkv", without_redundancy}, {"gkv", smoothed},
    {"morphkv", reduce_max}, {"cake", reduce_std},        {"cake", taus},
    {"adakv", group_max},
};

/* Every bounded row of paging/policy.c that the device runs, as it is, then the variants. */
static int all_methods(struct method *methods, int max) {
    struct kern *kern[BACKENDS];
    int count = 0;
    both_open(kern);
    for (int i = 0; policy_at(i); i++) {
        bool runs = kern[EMULATED]->ops->rule_check(&policy_at(i)->rule, NULL) == 0;
        if (policy_at(i)->bounded && runs && count < max)
            methods[count++] = (struct method){policy_at(i)->name, as_it_is};
    }
    both_close(kern);
    for (size_t i = 0; i < sizeof variants / sizeof *variants && count < max; i++)
        methods[count++] = variants[i];
    cr_assert(count < max, "room for all");
    return count;
}

/* ---- Two sequences side by side ---- */

/* Tokens of both sequences before each eviction; the second has prompts while the first decodes. */
static const int rounds[][2] = {{75, 81}, {1, 34}, {23, 1}};
#define ROUNDS ((int)(sizeof rounds / sizeof *rounds))

static void play(const struct method *a, const struct method *b, int index,
                 struct kern_cache_options shape) {
    const int budget = 48;
    const struct kern_rule rules[2] = {rule_of(a, budget), rule_of(b, budget)};
    struct pair p = open_pair(shape, 8192, (uint64_t)(index + 1));
    char what[96];
    int tokens[2] = {0};
    for (int round = 0; round < ROUNDS; round++) {
        struct kern_span spans[2];
        struct kern_evict due[2];
        snprintf(what, sizeof what, "methods %d, %s beside %s, round %d", index, a->policy,
                 b->policy, round);
        for (int i = 0; i < 2; i++) {
            int count = rounds[round][i];
            spans[i] = (struct kern_span){.slot = 1 + i,
                                          .row = i ? rounds[round][0] : 0,
                                          .count = count,
                                          .pos = tokens[i],
                                          .rule = &rules[i]};
            tokens[i] += count;
            due[i] = (struct kern_evict){
                .slot = 1 + i, .tokens = tokens[i], .budget = budget, .rule = &rules[i]};
        }
        feed(&p, spans, 2, what);
        evict(&p, due, 2, what);
    }
    both_close(p.kern);
}

/* Every method is the first of a pair once and the second once. */
Test(emu_policy, methods_side_by_side) {
    struct method methods[64];
    int count = all_methods(methods, 64);
    for (int i = 0; i < count; i++) play(&methods[i], &methods[(i + 7) % count], i, shapes[i % 3]);
}

/* The same where layers differ in heads: every second method, and some of them with wide heads. */
Test(emu_policy, methods_where_layers_differ) {
    struct method methods[64];
    int count = all_methods(methods, 64);
    for (int i = 0; i < count; i++)
        if (i % 2 == 0)
            play(&methods[i], &methods[(i + 7) % count], 300 + i, uneven_shapes[i % 8 == 0]);
}

/* Every kernel that reads keys by copies of threads, with pages of all formats. */
Test(emu_policy, methods_without_bulk_copies) {
    static const struct method some[] = {
        {"rkv", artefact}, {"gkv", as_it_is}, {"cake", as_it_is}, {"h2o", as_it_is}};
    const int count = sizeof some / sizeof *some;
    setenv("KEEPD_EMU_CAPABILITY", "80", 1);
    for (int i = 0; i < count; i++) {
        struct kern_cache_options shape = shapes[i % 2];
        if (i >= 2) shape.dtype = KERN_E4M3;
        play(&some[i], &some[(i + 1) % count], 100 + i, shape);
        shape.dtype = KERN_ROW8;
        play(&some[i], &some[(i + 1) % count], 200 + i, shape);
    }
}

/* Narrower pages: keys that are compared, observed and moved. */
static void play_narrow(enum kern_dtype dtype, int first) {
    static const struct method some[] = {{"global", as_it_is}, {"rkv", as_it_is}, {"rkv", paper},
                                         {"cake", as_it_is},   {"h2o", as_it_is}, {"gkv", as_it_is},
                                         {"keydiff", as_it_is}};
    const int count = sizeof some / sizeof *some;
    for (int i = 0; i < count; i++) {
        struct kern_cache_options shape = shapes[i % 3];
        shape.dtype = dtype;
        if (i == 1)
            shape = (struct kern_cache_options){
                .layers = 1, .heads_q = 2, .heads_kv = 1, .head_dim = 256, .dtype = dtype};
        play(&some[i], &some[(i + 3) % count], first + i, shape);
    }
}

Test(emu_policy, methods_on_fp8_pages) {
    play_narrow(KERN_E4M3, 60);
}

Test(emu_policy, methods_on_pages_of_codes) {
    play_narrow(KERN_ROW8, 160);
}

/* ---- Long and unequal streams ---- */

/* Streams of several chunks, cut at none of their bounds, beside one that has just begun. */
Test(emu_policy, long_streams) {
    static const int counts[] = {297, 41};
    static const struct method long_ones[] = {
        {"rkv", paper}, {"cake", as_it_is}, {"kvcompress", as_it_is}};
    const struct kern_cache_options shape = {
        .layers = 1, .heads_q = 2, .heads_kv = 1, .head_dim = 64};
    for (int i = 0; i < 3; i++) {
        struct kern_rule rule = rule_of(&long_ones[i], 200);
        struct pair p = open_pair(shape, 4096, (uint64_t)(40 + i));
        play_one(&p, 1, &rule, 200, counts, 2, long_ones[i].policy);
        both_close(p.kern);
    }
}

/* Everything but one head's entries goes: streams are as unequal as they get. */
Test(emu_policy, unequal_streams) {
    static const int counts[] = {150, 150, 40};
    const struct kern_cache_options shape = {
        .layers = 2, .heads_q = 2, .heads_kv = 2, .head_dim = 64};
    struct kern_rule rule = {.score = KERN_SCORE_ATTENTION,
                             .scope = KERN_SCOPE_SEQUENCE,
                             .sinks = 1,
                             .recent = 2,
                             .observe = {.window = 2,
                                         .reduce = KERN_REDUCE_MAX,
                                         .history = KERN_HISTORY_MAX,
                                         .decay = 1},
                             .redundancy = {.on = true, .lambda = 0.9f, .threshold = 0.9f}};
    struct pair p = open_pair(shape, 4096, 11);
    play_one(&p, 1, &rule, 60, counts, 3, "unequal");
    both_close(p.kern);
}

/* Groups that do not divide a block of rows, and the largest: 7 and 16 query heads. */
Test(emu_policy, wide_groups) {
    static const int counts[] = {51, 9};
    static const struct method wide[] = {
        {"cake", as_it_is}, {"morphkv", as_it_is}, {"h2o", as_it_is}};
    for (int i = 0; i < 6; i++) {
        const struct kern_cache_options shape = {
            .layers = 1, .heads_q = i % 2 ? 16 : 7, .heads_kv = 1, .head_dim = 64};
        struct kern_rule rule = rule_of(&wide[i / 2], 40);
        struct pair p = open_pair(shape, 4096, (uint64_t)(20 + i));
        play_one(&p, 1, &rule, 40, counts, 2, wide[i / 2].policy);
        both_close(p.kern);
    }
}

/* Rows that see each other are observed as they see, where every query is: in front of and behind
 * an eviction, the second time beside another text, and with a window. */
Test(emu_policy, rows_that_see_each_other) {
    static const struct method some[] = {
        {"h2o", as_it_is}, {"h2o", as_it_is}, {"snapkv", as_it_is}, {"cake", as_it_is}};
    for (int i = 0; i < (int)(sizeof some / sizeof *some); i++) {
        struct kern_rule rule = rule_of(&some[i], 24);
        struct pair p = open_pair(shapes[i % 3], 8192, (uint64_t)(120 + i));
        struct kern_span spans[] = {{.slot = 2, .count = 9, .rule = &rule},
                                    {.slot = 1, .count = 60, .rule = &rule}};
        struct kern_evict due = {.slot = 1, .tokens = 60, .budget = 24, .rule = &rule};
        p.sliding_window = i == 1 ? 11 : 0;
        p.together = (struct kern_given){.row = 7, .count = 30, .together = true};
        feed(&p, spans + 1, 1, some[i].policy);
        evict(&p, &due, 1, some[i].policy);
        spans[1] = (struct kern_span){.slot = 1, .row = 9, .count = 40, .pos = 60, .rule = &rule};
        p.together.row = 9 + 10;
        feed(&p, spans, 2, some[i].policy);
        due.tokens = 100;
        evict(&p, &due, 1, some[i].policy);
        both_close(p.kern);
    }
}

/* ---- Any combination ---- */

static uint32_t pick(uint64_t *state, uint32_t below) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((*state >> 33) % below);
}

static float real(uint64_t *state, float low, float high) {
    return low + (high - low) * (float)pick(state, 1000) / 1000;
}

static void random_observe(uint64_t *r, struct kern_observe *o) {
    static const int windows[] = {0, 1, 2, 5, 16, 64}, widths[] = {1, 3, 7, 31};
    o->window = windows[pick(r, 6)];
    o->normalise = pick(r, 2);
    o->smooth = (enum kern_smooth)pick(r, 3);
    o->smooth_width = widths[pick(r, 4)];
    o->group = (enum kern_group)pick(r, o->window ? 7 : 4);
    o->reduce = KERN_REDUCE_SUM;
    if (!o->window) return;
    o->support = (enum kern_support)pick(r, 2);
    o->smooth_first = pick(r, 2);
    o->reduce = (enum kern_reduce)pick(r, 5);
    o->gamma = real(r, 1, 50);
    o->history = (enum kern_history)pick(r, 4);
    o->decay = real(r, 0, 1);
}

static struct kern_rule random_rule(uint64_t *r) {
    static const float floors[] = {0, 0.1f, 0.5f, 1};
    struct kern_rule rule = {.score = KERN_SCORE_ATTENTION};
    random_observe(r, &rule.observe);
    rule.scope = (enum kern_scope)pick(r, 3);
    if (rule.scope != KERN_SCOPE_SEQUENCE) rule.layers = (enum kern_layers)pick(r, 3);
    rule.sinks = (int32_t)pick(r, 6);
    rule.recent = (int32_t)pick(r, 20);
    rule.floor = floors[pick(r, 4)];
    rule.pyramid_beta = real(r, 1, 30);
    rule.tau1 = real(r, 0.4f, 2);
    rule.tau2 = real(r, 0.4f, 2);
    rule.redundancy = (struct kern_redundancy){.on = pick(r, 2),
                                               .lambda = real(r, 0, 1),
                                               .threshold = real(r, 0.05f, 0.9f),
                                               .eps = 1e-6f,
                                               .normalise = pick(r, 2),
                                               .candidates_only = pick(r, 2),
                                               .own = pick(r, 2),
                                               .index_zero = pick(r, 2)};
    return rule;
}

Test(emu_policy, any_rule) {
    static const int counts[] = {53, 9};
    for (uint64_t seed = 1; seed <= 24; seed++) {
        uint64_t r = seed;
        char what[32];
        struct kern_cache_options shape = {.layers = 1 + (int)pick(&r, 3),
                                           .heads_kv = 1 + (int)pick(&r, 2),
                                           .head_dim = seed % 6 == 0 ? 256 : 64};
        shape.heads_q = shape.heads_kv * (1 + (int)pick(&r, 3));
        struct kern_rule rule = random_rule(&r);
        struct pair p = open_pair(shape, 8192, 100 + seed);
        snprintf(what, sizeof what, "rule %d", (int)seed);
        play_one(&p, 2, &rule, 26 + (int)pick(&r, 10), counts, 2, what);
        both_close(p.kern);
    }
}

/* ---- Promises ---- */

/* Slot 1's 40 tokens and an eviction, in one prompt alone, or in pieces beside slot 2. */
static char *play_alone(struct kern_cache_options shape, const struct kern_rule *rule, bool alone,
                        size_t *size) {
    struct pair p = open_pair(shape, 4096, 7);
    const struct kern_evict due[] = {{.slot = 2, .tokens = 25, .budget = 12, .rule = rule},
                                     {.slot = 1, .tokens = 40, .budget = 20, .rule = rule}};
    static const int pieces[] = {40, 0, 13, 1, 26, 0};
    emu_set_seed(alone ? 3 : 8);
    struct kern *kern = p.kern[EMULATED];
    for (int i = alone ? 0 : 2, pos = 0, other = 0; pos < 40; i++) {
        int beside = alone ? 0 : i == 3 ? 5 : 10;
        struct kern_span spans[] = {
            {.slot = 2, .count = beside, .pos = other, .rule = rule},
            {.slot = 1, .row = beside, .count = pieces[i], .pos = pos, .rule = rule}};
        struct kern_batch batch = {
            .spans = spans + alone, .span_count = 2 - alone, .rows = beside + pieces[i]};
        free(run_step(&p, kern, &batch));
        pos += pieces[i];
        other += beside;
    }
    MUST(kern->ops->evict(kern, due + alone, 2 - alone));
    char *bytes = bytes_of(&p, kern, 1, size);
    both_close(p.kern);
    return bytes;
}

/* Bitwise the same however the prompt was split, whoever shares step and eviction, and in whatever
 * order blocks and threads run. */
Test(emu_policy, company_and_pieces_change_nothing) {
    static const char *const names[] = {"h2o", "gkv", "rkv", "cake", "kvcompress"};
    for (int i = 0; i < 10; i++) {
        const char *name = names[i % 5];
        struct method method = {name, as_it_is};
        struct kern_rule rule = rule_of(&method, 12);
        size_t size[2];
        char *bytes[2];
        for (int k = 0; k < 2; k++)
            bytes[k] =
                play_alone(i < 5 ? shapes[0] : uneven_shapes[i == 7], &rule, k == 0, &size[k]);
        cr_assert(size[0] == size[1], "%s", name);
        cr_assert(memcmp(bytes[0], bytes[1], size[0]) == 0, "%s", name);
        for (int k = 0; k < 2; k++) free(bytes[k]);
    }
}

/* A fork takes its memory along, and neither writes what the other reads: mass goes into every
 * page, remembered scores into those that stay. */
Test(emu_policy, forks) {
    static const char *const names[] = {"h2o", "gkv", "cake"};
    for (int i = 0; i < 5; i++) {
        const char *name = names[i % 3];
        struct method method = {name, as_it_is};
        struct kern_rule rule = rule_of(&method, 24);
        struct pair p =
            open_pair(i < 3 ? shapes[1] : uneven_shapes[i == 4], 8192, (uint64_t)(60 + i));
        struct kern_span span = {.slot = 1, .count = 50, .rule = &rule};
        struct kern_evict due[] = {{.slot = 1, .tokens = 50, .budget = 24, .rule = &rule},
                                   {.slot = 0, .tokens = 52, .budget = 24, .rule = &rule}};
        feed(&p, &span, 1, name);
        evict(&p, due, 1, name);
        for (int b = 0; b < BACKENDS; b++) MUST(p.kern[b]->ops->fork(p.kern[b], 1, 0));
        struct kern_span both[] = {{.slot = 0, .count = 2, .pos = 50, .rule = &rule},
                                   {.slot = 1, .row = 2, .count = 1, .pos = 50, .rule = &rule}};
        feed(&p, both, 2, name);
        due[0].tokens = 51;
        evict(&p, due, 2, name);
        for (int b = 0; b < BACKENDS; b++) p.kern[b]->ops->release(p.kern[b], 0);
        expect_same_held(p.kern, 1, streams_of(&p), name);
        both_close(p.kern);
    }
}

/* Pages for what a step or an eviction writes are missing: both say so, and change nothing. */
Test(emu_policy, a_full_pool) {
    static const char *const names[] = {"h2o", "gkv"};
    const struct kern_cache_options shape = {
        .layers = 1, .heads_q = 2, .heads_kv = 2, .head_dim = 256};
    int full = 0;
    for (int i = 0; i < 2; i++)
        for (int pages = 7; pages <= 15; pages += 2) {
            struct method method = {names[i], as_it_is};
            struct kern_rule rule = rule_of(&method, 20);
            struct pair p = open_pair(shape, 8 * pages, 5);
            struct kern_span span = {.slot = 1, .count = 24, .rule = &rule};
            struct kern_span more = {.slot = 1, .count = 1, .pos = 24, .rule = &rule};
            struct kern_batch batch = {.spans = &more, .span_count = 1, .rows = 1};
            struct kern_evict due = {.slot = 1, .tokens = 24, .budget = 20, .rule = &rule};
            int rc[BACKENDS];
            feed(&p, &span, 1, names[i]);
            for (int b = 0; b < BACKENDS; b++) {
                const struct kern_ops *ops = p.kern[b]->ops;
                MUST(ops->fork(p.kern[b], 1, 0));
                rc[b] =
                    i == 0 ? ops->begin_step(p.kern[b], &batch) : ops->evict(p.kern[b], &due, 1);
                int later = ops->sync(p.kern[b]);
                if (!rc[b]) rc[b] = later;
                full += rc[b] == ERR_FULL;
                if (i == 0) MUST(ops->truncate(p.kern[b], 1, 24));
            }
            cr_assert(rc[ORACLE] == rc[EMULATED], "%s, %d pages: %d, not %d", names[i], pages,
                      rc[EMULATED], rc[ORACLE]);
            for (int slot = 0; slot < 2; slot++)
                expect_same_held(p.kern, slot, streams_of(&p), names[i]);
            both_close(p.kern);
        }
    cr_assert(full > 10 && full < 35, "%d", full);
}

/* A conversation comes back with its queries, scores and weights, on either side. */
Test(emu_policy, snapshots) {
    static const char *const names[] = {"cake", "h2o", "gkv"};
    for (int i = 0; i < 6; i++) {
        const char *name = names[i % 3];
        struct method method = {name, as_it_is};
        struct kern_rule rule = rule_of(&method, 24);
        struct pair p =
            open_pair(i < 3 ? shapes[2] : uneven_shapes[i == 5], 8192, (uint64_t)(80 + i));
        struct kern_block blocks[1 + 64] = {0};
        struct fault fault = {0};
        int count = 1 + streams_of(&p);
        play_one(&p, 1, &rule, 24, (const int[]){40}, 1, name);
        for (int k = 0; k < count; k++)
            blocks[k].data = block_of(p.kern[EMULATED], 1, k, &blocks[k].size);
        for (int b = 0; b < BACKENDS; b++) {
            struct kern_report report = {0};
            int rc = p.kern[b]->ops->snapshot_check(p.kern[b], blocks, count, 40, &report, &fault);
            cr_assert_eq(rc, 0, "%s", fault.text);
            for (int k = 0; k < count; k++)
                MUST(p.kern[b]->ops->snapshot_import(p.kern[b], 3, k, &blocks[k]));
        }
        struct kern_span span = {.slot = 3, .count = 5, .pos = 40, .rule = &rule};
        struct kern_evict due = {.slot = 3, .tokens = 45, .budget = 24, .rule = &rule};
        size_t size;
        char *again = block_of(p.kern[EMULATED], 3, 0, &size);
        cr_assert(size == blocks[0].size && memcmp(again, blocks[0].data, size) == 0, "%s", name);
        free(again);
        feed(&p, &span, 1, name);
        evict(&p, &due, 1, name);
        for (int k = 0; k < count; k++) free((void *)(uintptr_t)blocks[k].data);
        both_close(p.kern);
    }
}

/* ---- A sliding window ---- */

/* Queries that an eviction asks again see what they saw, which may be none of the candidates. */
Test(emu_policy, window_queries_end_with_the_sliding_window) {
    static const struct method askers[] = {{"snapkv", as_it_is},    {"gkv", smoothed},
                                           {"rkv", paper},          {"cake", as_it_is},
                                           {"adakv", group_max},    {"morphkv", as_it_is},
                                           {"pyramidkv", as_it_is}, {"morphkv", reduce_max}};
    for (int i = 0; i < 8; i++) {
        struct kern_rule rule = rule_of(&askers[i], 40);
        struct pair p = open_pair(shapes[i % 3], 8192, (uint64_t)(110 + i));
        p.sliding_window = i % 2 ? 12 : 40;
        play_one(&p, 1, &rule, 40, (const int[]){70, 17, 1}, 3, askers[i].policy);
        both_close(p.kern);
    }
}

/* With room for everything, as `full` evicts: what no later query sees leaves, and nothing else. */
Test(emu_policy, what_leaves_the_sliding_window_with_room_for_everything) {
    static const struct kern_rule rule = {.score = KERN_SCORE_RECENCY};
    struct pair p = open_pair(shapes[0], 8192, 77);
    p.sliding_window = 12;
    static struct held held;
    for (int pos = 0; pos < 90; pos += 30) {
        struct kern_span span = {.slot = 1, .count = 30, .pos = pos, .rule = &rule};
        struct kern_evict due = {.slot = 1, .tokens = pos + 30, .budget = pos + 30, .rule = &rule};
        feed(&p, &span, 1, "full");
        evict(&p, &due, 1, "full");
        read_held(p.kern[EMULATED], 1, &held);
        cr_assert_eq(held.report.entries, (size_t)(shapes[0].layers * shapes[0].heads_kv * 11));
    }
    both_close(p.kern);
}

/* Accumulated attention ends with the layer's sliding window: older keys get none. */
Test(emu_policy, mass_ends_with_the_sliding_window) {
    static const struct method adders[] = {{"h2o", as_it_is}, {"kvcompress", as_it_is}};
    for (int i = 0; i < 2; i++) {
        struct kern_rule rule = rule_of(&adders[i], 40);
        struct pair p = open_pair(shapes[0], 8192, (uint64_t)(90 + i));
        p.sliding_window = 12;
        play_one(&p, 1, &rule, 40, (const int[]){50, 17, 1}, 3, adders[i].policy);
        float first[BACKENDS][2];
        for (int more = 0; more < 2; more++) {
            struct kern_span span = {.slot = 1, .count = 20, .pos = 68 + 20 * more, .rule = &rule};
            feed(&p, &span, 1, adders[i].policy);
            for (int b = 0; b < BACKENDS; b++) {
                size_t size;
                int32_t length;
                char *bytes = block_of(p.kern[b], 1, 1, &size);
                memcpy(&length, bytes, sizeof length);
                memcpy(&first[b][more], bytes + 4 + 8 * (size_t)length, sizeof(float));
                free(bytes);
            }
        }
        for (int b = 0; b < BACKENDS; b++)
            cr_assert(first[b][0] > 0 && first[b][0] == first[b][1],
                      "%s: %g after %g, far behind the sliding window", p.kern[b]->ops->name,
                      (double)first[b][1], (double)first[b][0]);
        both_close(p.kern);
    }
}

/* Learned sinks take their share of every softmax, and soft caps apply in it: of each query head,
 * of joined logits, and of attention that is added up. */
Test(emu_policy, sinks_and_caps) {
    static const struct method takers[] = {{"h2o", as_it_is},  {"snapkv", as_it_is},
                                           {"rkv", as_it_is},  {"gkv", smoothed},
                                           {"cake", as_it_is}, {"morphkv", as_it_is}};
    const float sinks[] = {1.5f, -2, 3, 0.25f, -1, 2};
    for (int i = 0; i < (int)(sizeof takers / sizeof *takers); i++) {
        struct kern_rule rule = rule_of(&takers[i], 40);
        const struct kern_cache_options *shape = &shapes[i % 3];
        struct pair p = open_pair(*shape, 8192, (uint64_t)(130 + i));
        p.cap = i % 2 ? 4 : 0;
        for (int b = 0; b < BACKENDS; b++)
            p.sinks[b] = put(p.kern[b], sinks, (size_t)shape->heads_q);
        play_one(&p, 1, &rule, 40, (const int[]){70, 17, 1}, 3, takers[i].policy);
        for (int b = 0; b < BACKENDS; b++) p.kern[b]->ops->mem_free(p.kern[b], p.sinks[b]);
        both_close(p.kern);
    }
}
