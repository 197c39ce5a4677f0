/* Snapshots are the same bytes on the CPU and on the device, and each takes what the other made. */
#include <criterion/criterion.h>

#include "both.h"

#define LAYERS  2
#define HEADS   2
#define STREAMS (LAYERS * HEADS)
#define BLOCKS  (1 + STREAMS)
#define SLOTS   4
#define TOKENS  70

struct pair {
    struct kern *kern[BACKENDS];
    int row;           /* numbers of a row of queries, keys and values */
    int layers, heads; /* STREAMS together */
};

/* latent: as in kern_cache_options; it has one head in each layer. */
static struct pair open_latent(int head_dim, int latent, enum kern_dtype dtype, int64_t entries) {
    const int heads = latent ? 1 : HEADS;
    struct pair p = {.row = (HEADS + (latent ? 1 : 2) * heads) * head_dim,
                     .layers = STREAMS / heads,
                     .heads = heads};
    struct kern_cache_options options = {.layers = p.layers,
                                         .heads_q = HEADS,
                                         .heads_kv = heads,
                                         .head_dim = head_dim,
                                         .latent = latent,
                                         .dtype = dtype,
                                         .slots = SLOTS,
                                         .max_positions = 200};
    both_open(p.kern);
    both_cache(p.kern, options, entries);
    return p;
}

static struct pair open_pair(int head_dim, enum kern_dtype dtype, int64_t entries) {
    return open_latent(head_dim, 0, dtype, entries);
}

/* `count` tokens from `pos` on, every layer with content of its own. */
static void append(struct pair *p, int slot, int pos, int count) {
    struct kern_span span = {.slot = slot, .count = count, .pos = pos};
    struct kern_batch batch = {.spans = &span, .span_count = 1, .rows = count};
    size_t floats = (size_t)(count * p->row), betas = (size_t)(count * p->heads);
    for (int b = 0; b < BACKENDS; b++) {
        const struct kern_ops *ops = p->kern[b]->ops;
        MUST(ops->begin_step(p->kern[b], &batch));
        for (int layer = 0; layer < p->layers; layer++) {
            float *qkv = fresh(floats, (uint64_t)(pos * 7 + layer));
            float *beta = fresh(betas, (uint64_t)(pos * 11 + layer));
            for (size_t i = 0; i < betas; i++) beta[i] = -fabsf(beta[i]);
            float *there = put(p->kern[b], qkv, floats), *gates = put(p->kern[b], beta, betas);
            ops->write_kv(p->kern[b], layer, there, gates, &batch);
            MUST(ops->sync(p->kern[b]));
            ops->mem_free(p->kern[b], there);
            ops->mem_free(p->kern[b], gates);
            free(qkv), free(beta);
        }
    }
}

/* Streams of different lengths, a fork that shares pages, a cut end. */
static void fill_slots(struct pair *p) {
    const struct kern_rule rule = {
        .score = KERN_SCORE_RETENTION, .scope = KERN_SCOPE_SEQUENCE, .sinks = 2, .horizon = 9};
    const struct kern_evict due = {.slot = 1, .tokens = TOKENS, .budget = 31, .rule = &rule};
    append(p, 1, 0, TOKENS);
    for (int b = 0; b < BACKENDS; b++) {
        MUST(p->kern[b]->ops->evict(p->kern[b], &due, 1));
        MUST(p->kern[b]->ops->fork(p->kern[b], 1, 2));
        MUST(p->kern[b]->ops->truncate(p->kern[b], 1, TOKENS - 3));
    }
    append(p, 1, TOKENS - 3, 2);
}

static void export_slot(struct kern *kern, int slot, struct kern_block *blocks) {
    for (int i = 0; i < BLOCKS; i++) {
        size_t size = kern->ops->snapshot_size(kern, slot, i);
        cr_assert_gt(size, 0);
        char *data = malloc(size); /* a block of its own: overruns are seen */
        memset(data, 0x5a, size);
        MUST(kern->ops->snapshot_export(kern, slot, i, data));
        blocks[i] = (struct kern_block){data, size};
    }
}

static void free_blocks(struct kern_block *blocks) {
    for (int i = 0; i < BLOCKS; i++) free((void *)(uintptr_t)blocks[i].data);
}

static void expect_same_bytes(const struct kern_block *a, const struct kern_block *b,
                              const char *what) {
    for (int i = 0; i < BLOCKS; i++) {
        cr_assert_eq(a[i].size, b[i].size, "%s: block %d has %zu bytes, not %zu", what, i,
                     b[i].size, a[i].size);
        for (size_t at = 0; at < a[i].size; at++)
            cr_assert_eq(((const char *)a[i].data)[at], ((const char *)b[i].data)[at],
                         "%s: block %d differs at byte %zu of %zu", what, i, at, a[i].size);
    }
}

/* Block by block, until one is refused. */
static int try_import(struct kern *kern, int slot, const struct kern_block *blocks) {
    int rc = 0;
    for (int i = 0; i < BLOCKS && rc == 0; i++)
        rc = kern->ops->snapshot_import(kern, slot, i, &blocks[i]);
    return rc;
}

static void import(struct kern *kern, int slot, const struct kern_block *blocks, int tokens) {
    struct fault fault = {0};
    struct kern_report checked = {0}, held = {0};
    cr_assert_eq(kern->ops->snapshot_check(kern, blocks, BLOCKS, tokens, &checked, &fault), 0, "%s",
                 fault.text);
    MUST(try_import(kern, slot, blocks));
    MUST(kern->ops->report(kern, slot, &held));
    cr_assert(held.entries == checked.entries && held.pages == checked.pages);
    expect_sound(kern);
}

static const struct {
    int head_dim, latent;
    enum kern_dtype dtype;
} rows[] = {{64, 0, KERN_BF16},  {128, 0, KERN_BF16},   {256, 0, KERN_BF16}, {64, 0, KERN_E4M3},
            {128, 0, KERN_E4M3}, {256, 0, KERN_E4M3},   {64, 0, KERN_ROW8},  {128, 0, KERN_ROW8},
            {256, 0, KERN_ROW8}, {576, 512, KERN_BF16}, {40, 32, KERN_BF16}, {128, 96, KERN_BF16},
            {512, 0, KERN_BF16}};

Test(emu_snapshot, the_same_bytes_and_each_takes_the_others) {
    for (size_t d = 0; d < sizeof rows / sizeof *rows; d++) {
        struct kern_block out[BACKENDS][BLOCKS], back[BACKENDS][BLOCKS];
        emu_set_seed(d);
        struct pair p = open_latent(rows[d].head_dim, rows[d].latent, rows[d].dtype, 2048);
        fill_slots(&p);
        for (int slot = 1; slot < 3; slot++) { /* cut, forked */
            for (int b = 0; b < BACKENDS; b++) export_slot(p.kern[b], slot, out[b]);
            expect_same_bytes(out[ORACLE], out[EMULATED], "out");
            for (int b = 0; b < BACKENDS; b++) {
                import(p.kern[b], 3, out[1 - b], slot == 1 ? TOKENS - 1 : TOKENS);
                export_slot(p.kern[b], 3, back[b]);
                expect_same_bytes(out[1 - b], back[b], "back");
                free_blocks(back[b]);
            }
            /* Pages of other latent vectors do not hold equally many. */
            if (!rows[d].latent || rows[d].head_dim == 128)
                expect_same_held(p.kern, 3, STREAMS, "imported");
            for (int b = 0; b < BACKENDS; b++) {
                p.kern[b]->ops->release(p.kern[b], 3);
                free_blocks(out[b]);
            }
        }
        both_close(p.kern);
    }
}

static void go_on(int latent, enum kern_dtype dtype) {
    struct kern_block out[BLOCKS], there[BACKENDS][BLOCKS], original[BLOCKS];
    struct pair p = open_latent(128, latent, dtype, 2048);
    fill_slots(&p);
    export_slot(p.kern[ORACLE], 1, out);
    for (int b = 0; b < BACKENDS; b++) {
        import(p.kern[b], 3, out, TOKENS - 1);
        MUST(p.kern[b]->ops->fork(p.kern[b], 3, 0));
    }
    append(&p, 3, TOKENS + 5, 20);
    expect_same_held(p.kern, 3, STREAMS, "went on");
    for (int b = 0; b < BACKENDS; b++) export_slot(p.kern[b], 3, there[b]);
    expect_same_bytes(there[ORACLE], there[EMULATED], "went on");
    export_slot(p.kern[EMULATED], 0, original);
    expect_same_bytes(out, original, "the fork of it");
    for (int b = 0; b < BACKENDS; b++) free_blocks(there[b]);
    free_blocks(original);
    free_blocks(out);
    both_close(p.kern);
}

/* An imported slot continues like its original, and neither affects the other. */
Test(emu_snapshot, an_imported_slot_goes_on) {
    go_on(0, KERN_E4M3);
    go_on(0, KERN_ROW8);
    go_on(96, KERN_BF16);
}

static void refused(struct kern *kern, const struct kern_block *blocks, int rc) {
    cr_assert_eq(try_import(kern, 0, blocks), rc);
    kern->ops->release(kern, 0);
    expect_sound(kern); /* no entry without a slot in use, every page in one place */
}

/* The checks are kernels/snapshot.c's, tested with the CPU's cache. */
Test(emu_snapshot, what_does_not_fit_goes_again) {
    struct kern_block out[BLOCKS];
    struct pair p = open_pair(128, KERN_BF16, 2048),
                small = open_pair(128, KERN_BF16, STREAMS * 16);
    fill_slots(&p);
    export_slot(p.kern[ORACLE], 1, out);
    refused(small.kern[EMULATED], out, ERR_FULL);
    if (strstr(p.kern[EMULATED]->ops->name, "emulated")) { /* a GPU has room */
        mem_fail_after(0);
        refused(p.kern[EMULATED], out, ERR_NOMEM);
        mem_fail_after(-1);
    }
    import(p.kern[EMULATED], 0, out, TOKENS - 1);
    free_blocks(out);
    both_close(p.kern);
    both_close(small.kern);
}
