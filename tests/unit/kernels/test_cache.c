#include <criterion/criterion.h>

#include "base/mem.h"
#include "tests/unit/kernels/cache_content.h"

/* head_dim 256 in float32: 4 entries per page. */
static const struct kern_cache_options small = {.layers = 2,
                                                .heads_q = 4,
                                                .heads_kv = 3,
                                                .head_dim = 256,
                                                .dtype = KERN_F32,
                                                .pages = 60,
                                                .slots = 4,
                                                .max_positions = 100};
#define STREAMS 6
#define P       4

static struct cpu_cache open_small(int64_t pages) {
    struct cpu_cache cache;
    struct kern_cache_options options = small;
    struct fault fault = {0};
    options.pages = pages;
    cr_assert_eq(cpu_cache_open(&cache, &options, 1, &fault), 0, "%s", fault.text);
    cr_assert_eq(cache.page_slots, P);
    return cache;
}

static void check(const struct cpu_cache *cache) {
    struct fault fault = {0};
    cr_assert_eq(cpu_cache_check(cache, &fault), 0, "%s", fault.text);
}

static int64_t used(const struct cpu_cache *cache) {
    struct kern_cache_stats stats;
    cpu_cache_stats(cache, &stats);
    return stats.pages_used;
}

static int append(struct cpu_cache *cache, int slot, int32_t pos, int32_t count, uint32_t salt) {
    struct kern_span span = {.slot = slot, .count = count, .pos = pos};
    struct kern_batch batch = {.spans = &span, .span_count = 1, .rows = count};
    int rc = cpu_cache_begin_step(cache, &batch);
    if (rc == 0) content_write(cache, slot, salt, count);
    check(cache);
    return rc;
}

/* Every stream holds positions [0, length), written with `salt` before `change`, `later` from it.
 */
static void expect(const struct cpu_cache *cache, int slot, int32_t length, uint32_t salt,
                   int32_t change, uint32_t later) {
    for (int stream = 0; stream < STREAMS; stream++) {
        cr_assert_eq(*cpu_cache_length(cache, slot, stream), length);
        const struct cpu_stream view = cpu_cache_stream_at(cache, slot, stream);
        for (int32_t i = 0; i < length; i++) {
            cr_assert_eq(cpu_cache_entry_pos(cache, &view, i), i);
            cr_assert(content_holds(cache, slot, stream, i, i < change ? salt : later),
                      "slot %d stream %d entry %d", slot, stream, i);
        }
    }
}

Test(cache, page_layout) {
    static const struct {
        enum kern_dtype dtype;
        int head_dim, slots;
        int64_t bytes;
    } cases[] = {
        {KERN_BF16, 128, 16, 8192 + 16 * 12}, {KERN_F32, 128, 8, 8192 + 8 * 12},
        {KERN_BF16, 64, 32, 8192 + 32 * 12},  {KERN_F32, 64, 16, 8192 + 16 * 12},
        {KERN_F32, 1024, 1, 8192 + 12},       {KERN_F32, 4096, 1, 32768 + 12},
        {KERN_F32, 80, 12, 7680 + 12 * 12},   {KERN_BF16, 20, 102, 8192 + 102 * 12},
        {KERN_E4M3, 128, 32, 8192 + 32 * 12}, {KERN_E4M3, 64, 64, 8192 + 64 * 12},
        {KERN_E4M3, 80, 51, 8192 + 51 * 12},  {KERN_E4M3, 4096, 1, 8192 + 12},
        {KERN_ROW8, 64, 64, 8448 + 64 * 12},  {KERN_ROW8, 128, 32, 8320 + 32 * 12},
        {KERN_ROW8, 80, 42, 8256 + 42 * 12},  {KERN_ROW4, 64, 128, 8704 + 128 * 12},
        {KERN_ROW4, 128, 64, 8448 + 64 * 12}, {KERN_ROW4, 512, 16, 8256 + 16 * 12},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct kern_cache_info info;
        const struct kern_cache_options options = {.dtype = cases[i].dtype,
                                                   .head_dim = cases[i].head_dim};
        cpu_cache_info(&options, &info);
        cr_assert_eq(info.page_slots, cases[i].slots);
        cr_assert_eq(info.page_bytes, cases[i].bytes, "D %d: %lld", cases[i].head_dim,
                     (long long)info.page_bytes);
    }
}

Test(cache, arrays_are_apart_aligned_and_zeroed) {
    struct cpu_cache cache = open_small(60);
    cr_assert_eq((uintptr_t)cache.pool % 64, 0);
    cr_assert_eq((char *)cpu_cache_v(&cache, &cache.layers[0], 3) - (char *)cpu_cache_k(&cache, 3),
                 4096);
    cr_assert_eq((char *)cpu_cache_k(&cache, 4) - (char *)cpu_cache_k(&cache, 3), 8192);
    cr_assert_geq((char *)cache.pos, cache.pool + 60 * 8192);
    for (size_t i = 0; i < 60 * 8192; i += 512) cr_assert_eq(cache.pool[i], 0);
    cr_assert_eq(used(&cache), 0);
    check(&cache);
    cpu_cache_close(&cache);
    cpu_cache_close(&cache);
}

Test(cache, open_refuses_what_cannot_be) {
    struct cpu_cache cache;
    struct fault fault;
#define REFUSES(code, field_name, member, value)                                                   \
    do {                                                                                           \
        struct kern_cache_options options = small;                                                 \
        options.member = (value);                                                                  \
        cr_assert_eq(cpu_cache_open(&cache, &options, 1, &fault), code, #member);                  \
        cr_assert_str_eq(fault.field, field_name);                                                 \
        cr_assert_null(cache.map);                                                                 \
        cpu_cache_close(&cache);                                                                   \
    } while (0)
    REFUSES(ERR_UNSUPPORTED, "kv_dtype", dtype, KERN_F16);
    REFUSES(ERR_UNSUPPORTED, "kv_dtype", dtype, KERN_Q8);
    REFUSES(ERR_INVALID, "cache", layers, 0);
    REFUSES(ERR_INVALID, "cache", head_dim, -1);
    REFUSES(ERR_INVALID, "cache", slots, 0);
    REFUSES(ERR_INVALID, "cache", max_positions, 0);
    REFUSES(ERR_INVALID, "kv_pool_bytes", pages, 0);
    REFUSES(ERR_INVALID, "kv_pool_bytes", pages, (int64_t)1 << 32);
    REFUSES(ERR_LIMIT, "cache", layers, INT32_MAX);
    REFUSES(ERR_LIMIT, "cache", max_positions, INT32_MAX);
    struct kern_cache_options huge = small; /* 32 PiB: more than an address space */
    huge.pages = UINT32_MAX;
    huge.head_dim = 1 << 20;
    cr_assert_eq(cpu_cache_open(&cache, &huge, 1, &fault), ERR_NOMEM);
    cr_assert_str_eq(fault.field, "kv_pool_bytes");
    cr_assert(strstr(fault.text, "--kv-pool-bytes") && strstr(fault.text, "ulimit -v"));
}

Test(cache, append_takes_pages_as_needed) {
    struct cpu_cache cache = open_small(60);
    static const struct {
        int32_t count;
        int64_t pages;
    } steps[] = {{1, 6}, {2, 6}, {1, 6}, {1, 12}, {7, 18}, {1, 24}, {11, 36}};
    int32_t pos = 0;
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        cr_assert_eq(append(&cache, 1, pos, steps[i].count, 8), 0);
        pos += steps[i].count;
        cr_assert_eq(used(&cache), steps[i].pages);
        expect(&cache, 1, pos, 8, pos, 0);
    }
    cpu_cache_release(&cache, 1);
    cpu_cache_release(&cache, 1);
    cr_assert_eq(used(&cache), 0);
    check(&cache);
    cpu_cache_close(&cache);
}

Test(cache, pages_come_back_warm) {
    struct cpu_cache cache = open_small(60);
    cr_assert_eq(append(&cache, 0, 0, 4, 0), 0);
    for (int turn = 0; turn < 50; turn++) { /* the same pages again: the resident size stays */
        for (int stream = 0; stream < STREAMS; stream++)
            cr_assert_lt(*cpu_cache_table(&cache, 0, stream), STREAMS);
        cpu_cache_release(&cache, 0);
        cr_assert_eq(append(&cache, 0, 0, 4, 0), 0);
    }
    cpu_cache_close(&cache);
}

Test(cache, a_full_pool_changes_nothing) {
    struct cpu_cache cache = open_small(17); /* 3 streams short of 3 pages each */
    cr_assert_eq(append(&cache, 0, 0, 6, 4), 0);
    struct kern_span spans[] = {{.slot = 1, .count = 2, .pos = 0},
                                {.slot = 0, .count = 2, .pos = 6}};
    struct kern_batch batch = {.spans = spans, .span_count = 2, .rows = 4};
    cr_assert_eq(cpu_cache_begin_step(&cache, &batch), ERR_FULL);
    expect(&cache, 0, 6, 4, 6, 0);
    expect(&cache, 1, 0, 0, 0, 0);
    cr_assert_eq(used(&cache), 12);
    check(&cache);
    batch.spans = &spans[1], batch.span_count = 1;
    cr_assert_eq(cpu_cache_begin_step(&cache, &batch), 0);
    cr_assert_eq(append(&cache, 0, 8, 1, 4), ERR_FULL);
    cpu_cache_close(&cache);
}

Test(cache, positions_are_limited) {
    struct cpu_cache cache = open_small(400);
    cr_assert_eq(append(&cache, 0, 0, 101, 0), ERR_LIMIT);
    cr_assert_eq(append(&cache, 0, 100, 1, 0), ERR_LIMIT);
    cr_assert_eq(append(&cache, 0, 0, 99, 0), 0);
    cr_assert_eq(append(&cache, 0, 99, INT32_MAX - 50, 0), ERR_LIMIT);
    cr_assert_eq(append(&cache, 0, 99, 1, 0), 0);
    cpu_cache_close(&cache);
}

Test(cache, truncate_drops_by_position) {
    struct cpu_cache cache = open_small(60);
    cr_assert_eq(append(&cache, 0, 0, 10, 12), 0);
    cr_assert_eq(cpu_cache_truncate(&cache, 0, 11), 0);
    expect(&cache, 0, 10, 12, 10, 0);
    cr_assert_eq(cpu_cache_truncate(&cache, 0, 8), 0);
    cr_assert_eq(used(&cache), 12);
    cr_assert_eq(cpu_cache_truncate(&cache, 0, 7), 0);
    check(&cache);
    cr_assert_eq(append(&cache, 0, 7, 3, 16), 0);
    expect(&cache, 0, 10, 12, 7, 16);
    cr_assert_eq(cpu_cache_truncate(&cache, 0, 0), 0);
    cr_assert_eq(used(&cache), 0);
    cr_assert_eq(append(&cache, 0, 0, 1, 20), 0);
    check(&cache);
    cpu_cache_close(&cache);
}

Test(cache, forks_share_until_they_write) {
    struct cpu_cache cache = open_small(60);
    cr_assert_eq(append(&cache, 0, 0, 10, 4), 0);
    cr_assert_eq(cpu_cache_fork(&cache, 0, 1), 0);
    cr_assert_eq(cpu_cache_fork(&cache, 1, 2), 0);
    cr_assert_eq(used(&cache), 18);
    check(&cache);
    cr_assert_eq(append(&cache, 1, 10, 1, 8), 0); /* copies the tail */
    cr_assert_eq(used(&cache), 24);
    cr_assert_eq(append(&cache, 0, 10, 1, 12), 0); /* copies it too */
    cr_assert_eq(used(&cache), 30);
    cr_assert_eq(append(&cache, 2, 10, 1, 16), 0); /* the last one keeps it */
    cr_assert_eq(used(&cache), 30);
    expect(&cache, 0, 11, 4, 10, 12);
    expect(&cache, 1, 11, 4, 10, 8);
    expect(&cache, 2, 11, 4, 10, 16);
    cpu_cache_release(&cache, 0);
    cpu_cache_release(&cache, 1);
    expect(&cache, 2, 11, 4, 10, 16);
    cr_assert_eq(used(&cache), 18);
    cpu_cache_close(&cache);
}

Test(cache, truncating_a_fork_leaves_the_other) {
    struct cpu_cache cache = open_small(60);
    cr_assert_eq(append(&cache, 0, 0, 11, 4), 0);
    cr_assert_eq(cpu_cache_fork(&cache, 0, 3), 0);
    cr_assert_eq(cpu_cache_truncate(&cache, 3, 6), 0);
    check(&cache);
    cr_assert_eq(used(&cache), 18);
    cr_assert_eq(append(&cache, 3, 6, 4, 8), 0);
    expect(&cache, 0, 11, 4, 11, 0);
    expect(&cache, 3, 10, 4, 6, 8);
    cpu_cache_close(&cache);
}

/* All forks append in one step: all but one copy the tail, and exactly that many pages suffice. */
Test(cache, forks_in_one_step_need_no_page_more_than_they_take) {
    for (int64_t pages = 17; pages <= 18; pages++) {
        struct cpu_cache cache = open_small(pages);
        cr_assert_eq(append(&cache, 0, 0, 3, 4), 0);
        cr_assert_eq(cpu_cache_fork(&cache, 0, 1), 0);
        cr_assert_eq(cpu_cache_fork(&cache, 0, 2), 0);
        struct kern_span spans[3] = {{.slot = 2, .count = 1, .pos = 3},
                                     {.slot = 0, .count = 1, .pos = 3},
                                     {.slot = 1, .count = 1, .pos = 3}};
        struct kern_batch batch = {.spans = spans, .span_count = 3, .rows = 3};
        int rc = cpu_cache_begin_step(&cache, &batch);
        check(&cache);
        cr_assert_eq(rc, pages == 18 ? 0 : ERR_FULL);
        cr_assert_eq(used(&cache), pages == 18 ? 18 : 6);
        cpu_cache_close(&cache);
    }
}

Test(cache, fork_refuses_one_reference_too_many) {
    struct cpu_cache cache = open_small(60);
    cr_assert_eq(append(&cache, 0, 0, 5, 4), 0);
    uint32_t page = cpu_cache_table(&cache, 0, STREAMS - 1)[1];
    cache.refs[page] = UINT16_MAX;
    cr_assert_eq(cpu_cache_fork(&cache, 0, 1), ERR_LIMIT);
    cache.refs[page] = 1;
    check(&cache);
    cr_assert_not(cache.slots[1].in_use);
    cpu_cache_close(&cache);
}

Test(cache, report_has_everything_or_says_it_does_not_fit) {
    struct cpu_cache cache = open_small(60);
    int32_t lengths[STREAMS], positions[30];
    float log_beta[30];
    cr_assert_eq(append(&cache, 2, 0, 5, 4), 0);
    struct kern_report report = {.lengths = lengths, .positions = positions, .log_beta = log_beta};
    report.entries_max = 29;
    cr_assert_eq(cpu_cache_report(&cache, 2, &report), ERR_LIMIT);
    report.entries_max = 30;
    cr_assert_eq(cpu_cache_report(&cache, 2, &report), 0);
    cr_assert_eq(report.entries, 30);
    cr_assert_eq(report.pages, 12);
    for (int stream = 0; stream < STREAMS; stream++) {
        cr_assert_eq(lengths[stream], 5);
        for (int i = 0; i < 5; i++) {
            cr_assert_eq(positions[stream * 5 + i], i);
            cr_assert_eq(log_beta[stream * 5 + i], content_log_beta(4, stream, i));
        }
    }
    report = (struct kern_report){0};
    cr_assert_eq(cpu_cache_report(&cache, 1, &report), 0);
    cr_assert(report.entries == 0 && report.pages == 0);
    cpu_cache_close(&cache);
}

/* The check is only worth something if it sees each kind of damage. */
Test(cache, check_finds_damage) {
    struct fault fault;
#define FINDS(damage)                                                                              \
    do {                                                                                           \
        struct cpu_cache cache = open_small(60);                                                   \
        cr_assert_eq(append(&cache, 0, 0, 6, 4), 0);                                               \
        cr_assert_eq(append(&cache, 1, 0, 6, 4), 0);                                               \
        damage;                                                                                    \
        cr_assert_eq(cpu_cache_check(&cache, &fault), ERR_INTERNAL, #damage);                      \
        cpu_cache_close(&cache);                                                                   \
    } while (0)
    FINDS(cache.refs[cpu_cache_table(&cache, 0, 0)[0]]++);
    FINDS(cache.free_count--);
    FINDS(cache.free_pages[0] = cache.free_pages[1]);
    FINDS(cache.free_pages[0] = *cpu_cache_table(&cache, 0, 0));
    FINDS(cache.free_pages[0] = 60);
    FINDS(*cpu_cache_table(&cache, 0, 1) = *cpu_cache_table(&cache, 0, 0));
    FINDS(*cpu_cache_table(&cache, 0, 1) = 1000);
    FINDS(*cpu_cache_length(&cache, 0, 2) = 4);
    FINDS(*cpu_cache_length(&cache, 0, 2) = -1);
    FINDS(*cpu_cache_length(&cache, 3, 0) = 1);
    FINDS(cpu_cache_pos(&cache, *cpu_cache_table(&cache, 0, 0))[1] = 0);
    FINDS(cpu_cache_pos(&cache, *cpu_cache_table(&cache, 0, 0))[1] = 6);
}

Test(cache, check_survives_a_failed_allocation) {
    struct cpu_cache cache = open_small(60);
    struct fault fault;
    mem_fail_after(0);
    cr_assert_eq(cpu_cache_check(&cache, &fault), ERR_NOMEM);
    mem_fail_after(-1);
    check(&cache);
    cpu_cache_close(&cache);
}

/* Nothing but the check allocates, so there is nothing else to fail. */
Test(cache, serving_never_allocates) {
    struct cpu_cache cache = open_small(60);
    struct kern_rule rule = {
        .score = KERN_SCORE_RETENTION, .scope = KERN_SCOPE_SEQUENCE, .horizon = 128};
    mem_fail_after(0);
    struct kern_span span = {.slot = 0, .count = 20, .pos = 0};
    struct kern_batch batch = {.spans = &span, .span_count = 1, .rows = 20};
    struct kern_evict due = {.slot = 0, .tokens = 20, .budget = 7, .rule = &rule};
    cr_assert_eq(cpu_cache_begin_step(&cache, &batch), 0);
    cr_assert_eq(cpu_cache_evict(&cache, &due, 1), 0);
    cr_assert_eq(cpu_cache_fork(&cache, 0, 1), 0);
    cr_assert_eq(cpu_cache_truncate(&cache, 1, 5), 0);
    cpu_cache_release(&cache, 0);
    cr_assert(mem_fail_pending());
    mem_fail_after(-1);
    check(&cache);
    cpu_cache_close(&cache);
}
