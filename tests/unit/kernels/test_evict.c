/* Eviction against a brute-force sort: random caches, several rounds each, every entry compared. */
#include <criterion/criterion.h>
#include <stdlib.h>

#include "kernels/score.h"
#include "tests/unit/kernels/cache_content.h"

#define ENTRIES_MAX 4096

static void check(const struct cpu_cache *cache) {
    struct fault fault = {0};
    cr_assert_eq(cpu_cache_check(cache, &fault), 0, "%s", fault.text);
}

static struct cpu_cache open_cache(int layers, int heads, int head_dim, enum kern_dtype dtype,
                                   int64_t pages) {
    struct cpu_cache cache;
    struct kern_cache_options options = {.layers = layers,
                                         .heads_q = heads,
                                         .heads_kv = heads,
                                         .head_dim = head_dim,
                                         .dtype = dtype,
                                         .pages = pages,
                                         .slots = 3,
                                         .max_positions = 512};
    cr_assert_eq(cpu_cache_open(&cache, &options, 1, NULL), 0);
    return cache;
}

static void append(struct cpu_cache *cache, int slot, int32_t pos, int32_t count, uint32_t salt) {
    struct kern_span span = {.slot = slot, .count = count, .pos = pos};
    struct kern_batch batch = {.spans = &span, .span_count = 1, .rows = count};
    cr_assert_eq(cpu_cache_begin_step(cache, &batch), 0);
    content_write(cache, slot, salt, count);
}

/* ---- The oracle: sort everything ---- */

enum rank_class { RANK_BROKEN, RANK_SCORED, RANK_PROTECTED };

struct entry {
    enum rank_class class;
    float score;
    int32_t pos;
    int stream;
    size_t index; /* in the report */
};

static int compare_ranks(const void *left, const void *right) {
    const struct entry *a = left, *b = right;
    if (a->class != b->class) return a->class > b->class ? -1 : 1;
    if (a->score != b->score) return a->score > b->score ? -1 : 1;
    if (a->pos != b->pos) return a->pos > b->pos ? -1 : 1;
    return a->stream - b->stream;
}

static struct entry rank_of(const struct kern_evict *due, int32_t pos, float log_beta) {
    struct entry entry = {.class = RANK_SCORED, .pos = pos};
    if (due->rule->score == KERN_SCORE_RECENCY)
        entry.score = (float)pos;
    else
        entry.score = score_retention(log_beta, due->tokens - pos, due->rule->horizon);
    if (isnan(entry.score)) entry.class = RANK_BROKEN;
    if (pos < due->rule->sinks || pos >= due->tokens - due->rule->recent)
        entry.class = RANK_PROTECTED;
    if (entry.class != RANK_SCORED) entry.score = 0;
    return entry;
}

struct held {
    int32_t lengths[64], positions[ENTRIES_MAX];
    float log_beta[ENTRIES_MAX];
    size_t count;
};

static void read_held(const struct cpu_cache *cache, int slot, struct held *held) {
    struct kern_report report = {.lengths = held->lengths,
                                 .positions = held->positions,
                                 .log_beta = held->log_beta,
                                 .entries_max = ENTRIES_MAX};
    cr_assert_eq(cpu_cache_report(cache, slot, &report), 0);
    held->count = report.entries;
}

/* Marks the `keep` best of entries [0, count). */
static void mark_best(struct entry *entries, size_t count, size_t keep, bool *kept) {
    qsort(entries, count, sizeof *entries, compare_ranks);
    for (size_t i = 0; i < count && i < keep; i++) kept[entries[i].index] = true;
}

/* Computes the entries that must remain, in order. */
static void oracle(const struct kern_evict *due, int streams, struct held *held) {
    static struct entry entries[ENTRIES_MAX];
    static bool kept[ENTRIES_MAX];
    size_t first = 0, left = 0, at = 0;
    memset(kept, 0, sizeof kept);
    for (int stream = 0; stream < streams; stream++) {
        size_t length = (size_t)held->lengths[stream];
        for (size_t i = first; i < first + length; i++) {
            entries[i] = rank_of(due, held->positions[i], held->log_beta[i]);
            entries[i].stream = stream;
            entries[i].index = i;
        }
        if (due->rule->scope == KERN_SCOPE_STREAM)
            mark_best(entries + first, length, (size_t)due->budget, kept);
        first += length;
    }
    if (due->rule->scope == KERN_SCOPE_SEQUENCE)
        mark_best(entries, held->count, (size_t)due->budget * (size_t)streams, kept);
    for (int stream = 0; stream < streams; stream++) {
        int32_t length = 0;
        for (int32_t i = 0; i < held->lengths[stream]; i++, at++) {
            if (!kept[at]) continue;
            held->positions[left] = held->positions[at];
            held->log_beta[left++] = held->log_beta[at];
            length++;
        }
        held->lengths[stream] = length;
    }
    held->count = left;
}

static void expect_held(const struct cpu_cache *cache, int slot, const struct held *want,
                        uint32_t salt) {
    static struct held got;
    size_t at = 0;
    read_held(cache, slot, &got);
    cr_assert_eq(got.count, want->count);
    for (int stream = 0; stream < cache->streams; stream++) {
        cr_assert_eq(got.lengths[stream], want->lengths[stream], "stream %d", stream);
        for (int32_t i = 0; i < got.lengths[stream]; i++, at++) {
            cr_assert_eq(got.positions[at], want->positions[at], "stream %d entry %d", stream, i);
            cr_assert(content_holds(cache, slot, stream, i, salt), "stream %d entry %d", stream, i);
        }
    }
}

/* ---- Random cases ---- */

/* Streams in a scrambled order: what is kept must not depend on the schedule. */
static void scrambled(void *ctx, int items, cpu_item *fn, void *arg) {
    (void)ctx;
    int step = items % 7 == 0 ? 5 : 7;
    if (items % step == 0) step = 1;
    for (int i = 0, item = items / 2; i < items; i++, item = (item + step) % items)
        fn(arg, item, 0);
}

static struct kern_evict random_due(uint64_t *random, int32_t tokens, struct kern_rule *rule) {
    static const float horizons[] = {1, 2, 128, 1e30f, INFINITY};
    struct kern_evict due = {.slot = 1, .tokens = tokens, .rule = rule};
    *rule = (struct kern_rule){0};
    due.budget = 1 + (int32_t)content_random(random, 24);
    rule->sinks = (int32_t)content_random(random, 5);
    rule->recent = (int32_t)content_random(random, 6);
    if (rule->sinks + rule->recent > due.budget && content_random(random, 4) > 0)
        rule->sinks = rule->recent = 0; /* else: more is protected than may be kept */
    rule->score = content_random(random, 4) == 0 ? KERN_SCORE_RECENCY : KERN_SCORE_RETENTION;
    rule->scope = content_random(random, 3) == 0 ? KERN_SCOPE_STREAM : KERN_SCOPE_SEQUENCE;
    rule->horizon = horizons[content_random(random, 5)];
    return due;
}

static void random_case(uint64_t seed) {
    static const int dims[] = {64, 128, 256, 512};
    static const enum kern_dtype dtypes[] = {KERN_F32, KERN_BF16, KERN_E4M3, KERN_ROW8, KERN_ROW4};
    static struct held held;
    uint64_t random = seed;
    int layers = 1 + (int)content_random(&random, 3), heads = 1 + (int)content_random(&random, 4);
    struct cpu_cache cache =
        open_cache(layers, heads, dims[content_random(&random, 4)], dtypes[seed % 5], 1200);
    if (seed % 4 == 0) cache.parallel = scrambled;
    uint32_t salt = (uint32_t)seed * 4 + content_random(&random, 4);
    int32_t tokens = 0;
    for (int round = 0; round < 4; round++) {
        int32_t count = 1 + (int32_t)content_random(&random, 60);
        append(&cache, 1, tokens, count, salt);
        tokens += count;
        struct kern_rule rule;
        struct kern_evict due = random_due(&random, tokens, &rule);
        uint64_t evicted = cache.entries_evicted;
        read_held(&cache, 1, &held);
        size_t before = held.count;
        oracle(&due, cache.streams, &held);
        cr_assert_eq(cpu_cache_evict(&cache, &due, 1), 0);
        check(&cache);
        expect_held(&cache, 1, &held, salt);
        cr_assert_eq(cache.entries_evicted - evicted, before - held.count);
        if (due.rule->scope == KERN_SCOPE_SEQUENCE) {
            size_t most = (size_t)due.budget * (size_t)cache.streams;
            cr_assert_eq(held.count, before < most ? before : most);
        }
    }
    cpu_cache_close(&cache);
}

Test(evict, equals_a_sort_in_thousands_of_cases) {
    for (uint64_t seed = 1; seed <= 3000; seed++) random_case(seed);
}

/* ---- Particular cases ---- */

/* The rule stays good until the next call. */
static struct kern_evict global(int32_t tokens, int32_t keep, int32_t sinks) {
    static struct kern_rule rule;
    rule = (struct kern_rule){.score = KERN_SCORE_RETENTION,
                              .scope = KERN_SCOPE_SEQUENCE,
                              .sinks = sinks,
                              .horizon = 128};
    return (struct kern_evict){.slot = 1, .tokens = tokens, .budget = keep, .rule = &rule};
}

static void expect_positions(const struct cpu_cache *cache, int slot, int stream, int count,
                             const int32_t *positions) {
    const struct cpu_stream view = cpu_cache_stream_at(cache, slot, stream);
    cr_assert_eq(view.length, count);
    for (int32_t i = 0; i < count; i++)
        cr_assert_eq(cpu_cache_entry_pos(cache, &view, i), positions[i], "stream %d entry %d",
                     stream, i);
}

Test(evict, ties_go_to_the_newer_position) {
    struct cpu_cache cache = open_cache(2, 2, 256, KERN_F32, 100);
    append(&cache, 1, 0, 11, CONTENT_EQUAL);
    struct kern_evict due = global(11, 2, 1); /* four of the 8 are sinks */
    cr_assert_eq(cpu_cache_evict(&cache, &due, 1), 0);
    for (int stream = 0; stream < 4; stream++)
        expect_positions(&cache, 1, stream, 2, (int32_t[]){0, 10});
    cpu_cache_close(&cache);
}

Test(evict, ties_at_one_position_go_to_the_lower_layer_then_head) {
    struct cpu_cache cache = open_cache(2, 3, 256, KERN_F32, 100);
    append(&cache, 1, 0, 2, CONTENT_EQUAL);
    for (int stream = 0; stream < 6; stream++)
        for (int i = 0; i < 2; i++)
            cpu_cache_log_beta(&cache, *cpu_cache_table(&cache, 1, stream))[i] = -1;
    cpu_cache_log_beta(&cache, *cpu_cache_table(&cache, 1, 4))[0] = 0; /* the one above all */
    struct kern_evict due = global(2, 1, 0);
    cr_assert_eq(cpu_cache_evict(&cache, &due, 1), 0); /* beside it, 5 of 6 at position 1 */
    for (int stream = 0; stream < 4; stream++)
        expect_positions(&cache, 1, stream, 1, (int32_t[]){1});
    expect_positions(&cache, 1, 4, 2, (int32_t[]){0, 1});
    expect_positions(&cache, 1, 5, 0, NULL);
    check(&cache);
    cpu_cache_close(&cache);
}

Test(evict, streaming_keeps_first_and_last) {
    struct cpu_cache cache = open_cache(2, 2, 256, KERN_F32, 100);
    append(&cache, 1, 0, 20, CONTENT_BROKEN);
    struct kern_rule rule = {.score = KERN_SCORE_RECENCY, .sinks = 2};
    struct kern_evict due = {.slot = 1, .tokens = 20, .budget = 6, .rule = &rule};
    cr_assert_eq(cpu_cache_evict(&cache, &due, 1), 0);
    for (int stream = 0; stream < 4; stream++)
        expect_positions(&cache, 1, stream, 6, (int32_t[]){0, 1, 16, 17, 18, 19});
    cpu_cache_close(&cache);
}

Test(evict, one_head_may_hold_everything) {
    struct cpu_cache cache = open_cache(1, 3, 256, KERN_F32, 100);
    append(&cache, 1, 0, 12, CONTENT_EQUAL);
    for (int stream = 0; stream < 2; stream++)
        for (int i = 0; i < 12; i++)
            cpu_cache_log_beta(&cache, cpu_cache_table(&cache, 1, stream)[i / 4])[i % 4] = -1;
    struct kern_evict due = global(12, 4, 0);
    cr_assert_eq(cpu_cache_evict(&cache, &due, 1), 0);
    expect_positions(&cache, 1, 0, 0, NULL);
    expect_positions(&cache, 1, 1, 0, NULL);
    cr_assert_eq(*cpu_cache_length(&cache, 1, 2), 12);
    check(&cache);
    append(&cache, 1, 12, 1, CONTENT_EQUAL); /* empty streams go on */
    check(&cache);
    cpu_cache_close(&cache);
}

Test(evict, below_the_budget_nothing_moves) {
    struct cpu_cache cache = open_cache(2, 2, 256, KERN_F32, 100);
    append(&cache, 1, 0, 6, CONTENT_SMOOTH);
    struct kern_evict due = global(6, 6, 4);
    cr_assert_eq(cpu_cache_evict(&cache, &due, 1), 0);
    for (int stream = 0; stream < 4; stream++)
        expect_positions(&cache, 1, stream, 6, (int32_t[]){0, 1, 2, 3, 4, 5});
    cr_assert_eq(cache.entries_evicted, 0);
    due.slot = 2; /* an empty sequence is fine too */
    cr_assert_eq(cpu_cache_evict(&cache, &due, 1), 0);
    cpu_cache_close(&cache);
}

/* Entries that a window hides from every later query go first, the protected ones too, and leave
 * their places to others. */
Test(evict, expired_entries_leave_first) {
    static const struct kern_rule rules[] = {
        {.score = KERN_SCORE_RECENCY, .sinks = 2},
        {.score = KERN_SCORE_RETENTION, .sinks = 2, .recent = 12, .horizon = 128},
        {.score = KERN_SCORE_RETENTION, .scope = KERN_SCOPE_LAYER, .sinks = 2, .horizon = 128},
        {.score = KERN_SCORE_RETENTION, .scope = KERN_SCOPE_SEQUENCE, .sinks = 2, .horizon = 128},
    };
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        for (int budget = 14; budget <= 40; budget += 26) { /* 40: nothing else has to go */
            struct cpu_cache cache = open_cache(2, 2, 256, KERN_F32, 100);
            append(&cache, 1, 0, 30, CONTENT_SMOOTH);
            cache.attended[1].sliding_window = 9;
            struct kern_evict due = {.slot = 1, .tokens = 30, .budget = budget, .rule = &rules[i]};
            cr_assert_eq(cpu_cache_evict(&cache, &due, 1), 0);
            bool one = rules[i].scope == KERN_SCOPE_SEQUENCE, all = budget == 40;
            int32_t length[4];
            for (int stream = 0; stream < 4; stream++)
                length[stream] = *cpu_cache_length(&cache, 1, stream);
            for (int stream = 2; stream < 4; stream++) {
                const struct cpu_stream view = cpu_cache_stream_at(&cache, 1, stream);
                cr_assert(all || one ? length[stream] <= 8 : length[stream] == 8);
                cr_assert(length[stream] == 0 || cpu_cache_entry_pos(&cache, &view, 0) >= 22);
            }
            int32_t held = length[0] + length[1] + length[2] + length[3];
            cr_expect_eq(held, all ? 60 + 16 : one ? 4 * 14 : 28 + 16, "rule %zu", i);
            check(&cache);
            append(&cache, 1, 30, 1, CONTENT_SMOOTH);
            check(&cache);
            cpu_cache_close(&cache);
        }
}

/* A merged entry would become part of one that later queries see. */
Test(evict, rules_that_merge_keep_expired_entries) {
    struct cpu_cache cache = open_cache(1, 1, 256, KERN_F32, 100);
    const struct kern_rule rule = {
        .score = KERN_SCORE_RECENCY, .merge = KERN_MERGE_PAPER, .merge_beta = 0.7f};
    struct kern_evict due = {.slot = 1, .tokens = 20, .budget = 20, .rule = &rule};
    append(&cache, 1, 0, 20, CONTENT_SMOOTH);
    cache.attended[0].sliding_window = 9;
    cr_assert_eq(cpu_cache_evict(&cache, &due, 1), 0);
    cr_assert_eq(*cpu_cache_length(&cache, 1, 0), 20);
    cpu_cache_close(&cache);
}

/* ---- Forks ---- */

/* Evicting one of two forks leaves the other as it was, and both may evict differently. */
Test(evict, forks_do_not_see_each_other) {
    static struct held whole, mine;
    for (uint64_t seed = 1; seed <= 300; seed++) {
        uint64_t random = seed;
        struct cpu_cache cache = open_cache(2, 2, 256, KERN_F32, 200);
        uint32_t salt = (uint32_t)seed * 4 + content_random(&random, 4);
        int32_t tokens = 1 + (int32_t)content_random(&random, 50);
        append(&cache, 1, 0, tokens, salt);
        cr_assert_eq(cpu_cache_fork(&cache, 1, 0), 0);
        read_held(&cache, 1, &whole);
        mine = whole;
        struct kern_rule rule;
        struct kern_evict due = random_due(&random, tokens, &rule);
        oracle(&due, cache.streams, &mine);
        cr_assert_eq(cpu_cache_evict(&cache, &due, 1), 0);
        check(&cache);
        expect_held(&cache, 1, &mine, salt);
        expect_held(&cache, 0, &whole, salt);
        due = random_due(&random, tokens, &rule);
        due.slot = 0;
        oracle(&due, cache.streams, &whole);
        cr_assert_eq(cpu_cache_evict(&cache, &due, 1), 0);
        check(&cache);
        expect_held(&cache, 1, &mine, salt);
        expect_held(&cache, 0, &whole, salt);
        cpu_cache_close(&cache);
    }
}

Test(evict, a_full_pool_leaves_the_fork_unchanged) {
    static struct held whole;
    int failures = 0;
    for (int64_t pages = 20; pages <= 40; pages++) {
        struct cpu_cache cache = open_cache(2, 2, 256, KERN_F32, pages);
        append(&cache, 1, 0, 20, CONTENT_SMOOTH);
        cr_assert_eq(cpu_cache_fork(&cache, 1, 0), 0);
        read_held(&cache, 1, &whole);
        struct kern_evict due = global(20, 12, 0);
        int rc = cpu_cache_evict(&cache, &due, 1);
        check(&cache);
        expect_held(&cache, 0, &whole, CONTENT_SMOOTH);
        if (rc < 0) {
            cr_assert_eq(rc, ERR_FULL);
            expect_held(&cache, 1, &whole, CONTENT_SMOOTH);
            cr_assert_eq(cache.entries_evicted, 0);
            failures++;
        }
        cpu_cache_close(&cache);
    }
    cr_assert(failures > 0 && failures < 21, "%d", failures);
}
