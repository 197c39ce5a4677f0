/* Pages on the device against the CPU's: appends at page edges, forks, truncation, release, a full
 * pool; after every operation both hold the same and every page is in one place. */
#include <criterion/criterion.h>

#include "both.h"

#define LAYERS 2
#define HEADS  2
#define SLOTS  4

struct pair {
    struct kern *kern[BACKENDS];
    int head_dim, stride;
    float *log_beta[BACKENDS], *qkv[BACKENDS];
};

#define ROWS_MAX 80

static struct pair open_pair(int head_dim, int64_t entries) {
    struct pair p = {.head_dim = head_dim, .stride = 3 * HEADS * head_dim};
    struct kern_cache_options options = {.layers = LAYERS,
                                         .heads_q = HEADS,
                                         .heads_kv = HEADS,
                                         .head_dim = head_dim,
                                         .dtype = KERN_BF16,
                                         .slots = SLOTS,
                                         .max_positions = 400};
    both_open(p.kern);
    both_cache(p.kern, options, entries);
    for (int b = 0; b < BACKENDS; b++) {
        float *beta = fresh(ROWS_MAX * HEADS, 3);
        float *qkv = fresh((size_t)(ROWS_MAX * p.stride), 4);
        p.log_beta[b] = put(p.kern[b], beta, ROWS_MAX * HEADS);
        p.qkv[b] = put(p.kern[b], qkv, (size_t)(ROWS_MAX * p.stride));
        free(beta), free(qkv);
    }
    return p;
}

static void close_pair(struct pair *p) {
    for (int b = 0; b < BACKENDS; b++) {
        p->kern[b]->ops->mem_free(p->kern[b], p->log_beta[b]);
        p->kern[b]->ops->mem_free(p->kern[b], p->qkv[b]);
    }
    both_close(p->kern);
}

/* One step of these spans; rows are given out in order. Returns the backends' common answer. */
static int append(struct pair *p, struct kern_span *spans, int count) {
    struct kern_batch batch = {.spans = spans, .span_count = count};
    int rc[BACKENDS];
    for (int i = 0; i < count; i++) {
        spans[i].row = batch.rows;
        batch.rows += spans[i].count;
    }
    cr_assert(batch.rows <= ROWS_MAX);
    for (int b = 0; b < BACKENDS; b++) {
        const struct kern_ops *ops = p->kern[b]->ops;
        rc[b] = ops->begin_step(p->kern[b], &batch);
        for (int layer = 0; layer < LAYERS && !rc[b]; layer++)
            ops->write_kv(p->kern[b], layer, p->qkv[b], p->log_beta[b], &batch);
        int later = ops->sync(p->kern[b]);
        if (!rc[b]) rc[b] = later;
    }
    cr_assert_eq(rc[ORACLE], rc[EMULATED], "%d, not %d", rc[EMULATED], rc[ORACLE]);
    return rc[ORACLE];
}

static int append_one(struct pair *p, int slot, int pos, int count) {
    struct kern_span span = {.slot = slot, .count = count, .pos = pos};
    return append(p, &span, 1);
}

static void expect_same(struct pair *p, const char *what) {
    struct kern_cache_stats a, b;
    for (int slot = 0; slot < SLOTS; slot++) expect_same_held(p->kern, slot, LAYERS * HEADS, what);
    p->kern[ORACLE]->ops->cache_stats(p->kern[ORACLE], &a);
    p->kern[EMULATED]->ops->cache_stats(p->kern[EMULATED], &b);
    cr_assert_eq(a.pages_used, b.pages_used, "%s: %lld pages used, not %lld", what,
                 (long long)b.pages_used, (long long)a.pages_used);
}

static const int head_dims[] = {64, 128, 256, 512};

Test(emu_cache, appends_at_page_edges) {
    for (size_t d = 0; d < sizeof head_dims / sizeof *head_dims; d++) {
        emu_set_seed((uint64_t)d);
        struct pair p = open_pair(head_dims[d], 4 * 1024);
        int page = 2048 / head_dims[d];
        const int steps[] = {1, page - 2, 1, 1, page, page + 1, 3 * page - 2};
        int pos = 0;
        expect_same(&p, "empty");
        for (size_t i = 0; i < sizeof steps / sizeof *steps && pos + steps[i] <= 79; i++) {
            MUST(append_one(&p, 1, pos, steps[i]));
            pos += steps[i];
            expect_same(&p, "append");
        }
        struct kern_span three[] = {{.slot = 3, .count = page, .pos = 5},
                                    {.slot = 1, .count = 1, .pos = pos + 2},
                                    {.slot = 0, .count = 2, .pos = 0}};
        MUST(append(&p, three, 3));
        expect_same(&p, "three at once");
        for (int b = 0; b < BACKENDS; b++) p.kern[b]->ops->release(p.kern[b], 1);
        expect_same(&p, "release");
        close_pair(&p);
    }
}

static void both_truncate(struct pair *p, int slot, int pos) {
    for (int b = 0; b < BACKENDS; b++) MUST(p->kern[b]->ops->truncate(p->kern[b], slot, pos));
}

static void both_fork(struct pair *p, int from, int to) {
    for (int b = 0; b < BACKENDS; b++) MUST(p->kern[b]->ops->fork(p->kern[b], from, to));
}

Test(emu_cache, truncation_gives_pages_back) {
    struct pair p = open_pair(128, 4 * 1024);
    MUST(append_one(&p, 2, 0, 60));
    for (int pos = 60; pos > 0; pos -= pos % 7 + 1) {
        both_truncate(&p, 2, pos);
        expect_same(&p, "truncate");
    }
    MUST(append_one(&p, 2, 30, 20));
    expect_same(&p, "append after truncation");
    both_truncate(&p, 2, 0);
    expect_same(&p, "truncate to nothing");
    close_pair(&p);
}

Test(emu_cache, forks_copy_what_they_write) {
    for (uint64_t seed = 0; seed < 6; seed++) {
        emu_set_seed(seed);
        struct pair p = open_pair(256, 4 * 1024);
        MUST(append_one(&p, 0, 0, 21));
        both_fork(&p, 0, 1);
        both_fork(&p, 1, 2);
        expect_same(&p, "fork");
        both_truncate(&p, 1, 19); /* the forks now go on at different places of one page */
        struct kern_span all[] = {{.slot = 0, .count = 1, .pos = 21},
                                  {.slot = 1, .count = 4, .pos = 19},
                                  {.slot = 2, .count = 9, .pos = 21}};
        MUST(append(&p, all, 3)); /* one fork may keep the page */
        expect_same(&p, "forks append together");
        MUST(append_one(&p, 2, 30, 1));
        expect_same(&p, "one goes on");
        for (int slot = 0; slot < 3; slot++) {
            for (int b = 0; b < BACKENDS; b++) p.kern[b]->ops->release(p.kern[b], slot);
            expect_same(&p, "release of a fork");
        }
        close_pair(&p);
    }
}

/* A step that does not fit takes nothing, with shared pages and without, and the next one is fine.
 * The emulated backend answers with sync, so what follows must find both as they were. */
Test(emu_cache, a_step_that_does_not_fit_takes_nothing) {
    const int entries = 16 * LAYERS * HEADS * 3; /* three pages per stream */
    struct pair p = open_pair(128, entries);
    MUST(append_one(&p, 0, 0, 40));
    struct kern_span two[] = {{.slot = 0, .count = 1, .pos = 40},
                              {.slot = 1, .count = 1, .pos = 0}};
    cr_assert_eq(append(&p, two, 2), ERR_FULL);
    for (int b = 0; b < BACKENDS; b++) {
        p.kern[b]->ops->release(p.kern[b], 1);
        expect_sound(p.kern[b]);
    }
    expect_same(&p, "refused");
    both_fork(&p, 0, 2); /* the next append needs copies, and there is no page */
    struct kern_span fork = {.slot = 2, .count = 1, .pos = 41};
    cr_assert_eq(append(&p, &fork, 1), ERR_FULL);
    expect_same(&p, "refused after a fork");
    for (int b = 0; b < BACKENDS; b++) p.kern[b]->ops->release(p.kern[b], 0);
    struct kern_span again = {.slot = 2, .count = 2, .pos = 42};
    MUST(append(&p, &again, 1));
    expect_same(&p, "the last owner keeps the page");
    cr_assert_eq(append_one(&p, 2, 399, 2), ERR_LIMIT);
    close_pair(&p);
}

static void refused(struct kern_cache_options options, int rc, const char *field) {
    struct kern *kern;
    struct fault fault = {0};
    struct cuda_options cuda = {.device = 0};
    MUST(cuda_open(&cuda, &kern, &fault));
    cr_assert_eq(kern->ops->cache_open(kern, &options, &fault), rc);
    cr_assert_str_eq(fault.field, field);
    kern->ops->close(kern);
}

Test(emu_cache, refuses_what_it_cannot_hold) {
    struct kern_cache_options good = {.layers = 1,
                                      .heads_q = 16,
                                      .heads_kv = 1,
                                      .head_dim = 128,
                                      .dtype = KERN_BF16,
                                      .pages = 10,
                                      .slots = 1,
                                      .max_positions = 100};
    struct kern_cache_options bad = good;
    bad.head_dim = 80;
    refused(bad, ERR_UNSUPPORTED, "head_dim");
    bad = good;
    bad.dtype = KERN_F32;
    refused(bad, ERR_UNSUPPORTED, "kv_dtype");
    bad.dtype = KERN_ROW4;
    refused(bad, ERR_UNSUPPORTED, "kv_dtype");
    bad = good;
    bad.heads_q = 17;
    refused(bad, ERR_UNSUPPORTED, "cache");
    bad = good;
    bad.pages = 0;
    refused(bad, ERR_INVALID, "kv_pool_bytes");
    static const struct kern_heads five[] = {{1, 64}, {2, 64}, {4, 64}, {1, 128}, {1, 256}},
                                   odd[] = {{2, 64}, {1, 80}, {1, 64}};
    bad = good;
    bad.head_dim = 512;
    bad.dtype = KERN_E4M3;
    refused(bad, ERR_UNSUPPORTED, "kv_dtype");
    bad = good;
    bad.layers = 5;
    bad.heads = five;
    refused(bad, ERR_UNSUPPORTED, "cache");
    bad.layers = 3;
    bad.rank_cap = 2;
    refused(bad, ERR_UNSUPPORTED, "rank_cap");
    bad.heads = odd;
    refused(bad, ERR_UNSUPPORTED, "head_dim");
    good.heads_q = 128;
    good.head_dim = 576;
    good.latent = 512;
    bad = good;
    bad.dtype = KERN_E4M3;
    refused(bad, ERR_UNSUPPORTED, "kv_dtype");
    bad = good;
    bad.latent = 520;
    refused(bad, ERR_UNSUPPORTED, "kv_lora_rank");
    bad = good;
    bad.head_dim = 574;
    refused(bad, ERR_UNSUPPORTED, "kv_lora_rank");
    bad = good;
    bad.heads_kv = 2;
    refused(bad, ERR_INVALID, "cache");
}

/* The largest cache that fits is opened, and one page of every stream more is not offered. */
Test(emu_cache, as_large_as_the_device_allows) {
    struct kern_cache_options options = {.layers = 2,
                                         .heads_q = 4,
                                         .heads_kv = 2,
                                         .head_dim = 128,
                                         .dtype = KERN_BF16,
                                         .slots = 3,
                                         .max_positions = 100};
    struct kern_cache_info info;
    struct cuda_options cuda = {.device = 0};
    struct fault fault = {0};
    struct kern *kern, *second;
    int64_t pages = 0, left = 0, fewer = 0;
    MUST(cuda_open(&cuda, &kern, &fault));
    kern->ops->cache_info(&options, &info);
    cr_assert_eq(kern->ops->cache_fit(kern, &options, &pages, &fault), 0, "%s", fault.text);
    options.slots = 300; /* tables take their part */
    MUST(kern->ops->cache_fit(kern, &options, &fewer, &fault));
    cr_assert(fewer > 0 && fewer < pages);
    options.slots = 3;
    options.rows_max = options.logits_max = 64; /* so do the rooms that are taken with it */
    options.vocab = 65536;
    MUST(kern->ops->cache_fit(kern, &options, &fewer, &fault));
    cr_assert((pages - fewer) * info.page_bytes > 16 << 20);
    options.rows_max = options.logits_max = 0;
    options.pages = pages;
    cr_assert_eq(kern->ops->cache_open(kern, &options, &fault), 0, "%s", fault.text);
    MUST(cuda_open(&cuda, &second, &fault));
    cr_assert_eq(second->ops->cache_fit(second, &options, &left, &fault), ERR_NOMEM);
    cr_assert(strstr(fault.text, "lower max-model-len"), "%s", fault.text);
    cr_assert(left * info.page_bytes < 1 << 20);
    second->ops->close(second);
    kern->ops->close(kern);
}

/* ---- Forks of a long beginning ---- */

enum { FORKS = 24, BEGINNING = 576, WIDTH = 3 * 64 };

/* Decodes one token in slots [0, count), all with the same row; returns attention's rows. */
static float *decode_alike(struct kern *kern, const float *row, int count) {
    struct kern_span spans[FORKS];
    const struct kern_attend_options options = {.scale = 0.125f};
    float rows[FORKS * WIDTH];
    for (int i = 0; i < count; i++) {
        spans[i] = (struct kern_span){.slot = i, .row = i, .count = 1, .pos = BEGINNING};
        memcpy(rows + i * WIDTH, row, WIDTH * sizeof *row);
    }
    const struct kern_batch batch = {.spans = spans, .rows = count, .span_count = count};
    float *qkv = put(kern, rows, (size_t)(count * WIDTH));
    float *out = put(kern, NULL, (size_t)(count * 64));
    MUST(kern->ops->begin_step(kern, &batch));
    kern->ops->write_kv(kern, 0, qkv, NULL, &batch);
    kern->ops->attend(kern, 0, out, qkv, &batch, &options);
    kern->ops->mem_free(kern, qkv);
    return take(kern, out, (size_t)(count * 64));
}

/* Together the forks have many times the entries of the pool, and each attends to all of its own.
 */
Test(emu_cache, forks_have_more_entries_than_the_pool) {
    const struct cuda_options cuda = {.device = 0};
    const struct kern_cache_options options = {.layers = 1,
                                               .heads_q = 1,
                                               .heads_kv = 1,
                                               .head_dim = 64,
                                               .dtype = KERN_BF16,
                                               .pages = BEGINNING / 32 + FORKS,
                                               .slots = FORKS,
                                               .max_positions = 8192};
    float *rows = fresh((BEGINNING + 1) * WIDTH, 9), *alone = NULL;
    for (int forks = 1; forks <= FORKS; forks += FORKS - 1) {
        struct kern *kern;
        const struct kern_span span = {.slot = 0, .count = BEGINNING};
        const struct kern_batch batch = {.spans = &span, .rows = BEGINNING, .span_count = 1};
        MUST(cuda_open(&cuda, &kern, NULL));
        MUST(kern->ops->cache_open(kern, &options, NULL));
        float *qkv = put(kern, rows, BEGINNING * WIDTH);
        MUST(kern->ops->begin_step(kern, &batch));
        kern->ops->write_kv(kern, 0, qkv, NULL, &batch);
        for (int i = 1; i < forks; i++) MUST(kern->ops->fork(kern, 0, i));
        float *out = decode_alike(kern, rows + BEGINNING * WIDTH, forks);
        for (int i = 0; i < forks && alone; i++)
            cr_assert_eq(memcmp(out + i * 64, alone, 64 * sizeof *out), 0, "fork %d", i);
        if (alone)
            free(out);
        else
            alone = out;
        for (int i = 0; i < forks; i++) kern->ops->release(kern, i);
        expect_sound(kern);
        kern->ops->mem_free(kern, qkv);
        kern->ops->close(kern);
    }
    free(rows), free(alone);
}
