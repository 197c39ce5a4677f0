/* Recurrent states on the CUDA backend: short convolutions, gated delta rules and Mamba-2 beside
 * the CPU's reference path, the same bits for every split of a text and beside other texts; and
 * states in the pages: forks, copies, counts, snapshots, and what is refused. */
#include <criterion/criterion.h>

#include "both.h"

enum { STATES = 2, TOKENS = 40, SLOTS = 4, POSITIONS = 160 };

enum kind { CONV, DELTA, MAMBA };

/* A layer and what it is made of: numbers on the host, and copies in a backend's memory. */
struct layer {
    enum kind kind;
    int channels, width; /* CONV */
    struct kern_delta delta;
    struct kern_mamba mamba;
    float *arrays[6];
};

static const struct layer layers[] = {
    {.kind = CONV, .channels = 37, .width = 3},
    {.kind = CONV, .channels = 300, .width = 4},
    {.kind = CONV, .channels = 5, .width = 6},
    {.kind = DELTA, .delta = {.heads_k = 2, .heads_v = 6, .dim_k = 8, .dim_v = 20, .width = 4}},
    {.kind = DELTA, .delta = {.heads_k = 1, .heads_v = 2, .dim_k = 128, .dim_v = 32, .width = 4}},
    {.kind = DELTA, .delta = {.heads_k = 2, .heads_v = 2, .dim_k = 60, .dim_v = 16, .width = 2}},
    {.kind = MAMBA,
     .mamba = {.heads = 6, .groups = 2, .dim = 20, .dim_state = 12, .width = 4, .eps = 1e-5f}},
    {.kind = MAMBA,
     .mamba = {.heads = 2, .groups = 1, .dim = 16, .dim_state = 256, .width = 4, .eps = 1e-5f}},
    {.kind = MAMBA,
     .mamba = {.heads = 4, .groups = 4, .dim = 33, .dim_state = 128, .width = 5, .eps = 1e-5f}},
};
#define LAYERS (sizeof layers / sizeof *layers)

/* Numbers of a row: of the larger inputs, of the others, of the results; and of a state. */
struct sizes {
    int in, rates, out, state;
};

static struct sizes sizes_of(const struct layer *l) {
    const struct kern_delta *d = &l->delta;
    const struct kern_mamba *m = &l->mamba;
    if (l->kind == CONV)
        return (struct sizes){3 * l->channels, 0, l->channels, l->channels * (l->width - 1)};
    if (l->kind == DELTA)
        return (struct sizes){2 * (d->heads_k * d->dim_k + d->heads_v * d->dim_v), 2 * d->heads_v,
                              d->heads_v * d->dim_v, d->heads_k * kern_delta_head_floats(d)};
    return (struct sizes){2 * m->heads * m->dim, 2 * m->groups * m->dim_state + m->heads,
                          m->heads * m->dim,
                          kern_mamba_shared_floats(m) + m->heads * kern_mamba_head_floats(m)};
}

/* A copy of `count` numbers in the backend's memory; decays from slow to fast where `falls`. */
static float *numbers(struct kern *kern, size_t count, uint64_t seed, bool falls) {
    float *x = fresh(count, seed);
    for (size_t i = 0; i < count && falls; i++) x[i] = -0.05f * (float)(1 << i % 7);
    float *copy = put(kern, x, count);
    free(x);
    return copy;
}

/* `whole`: Mamba-2 has biases of its convolutions, and a norm. */
static struct layer layer_on(struct kern *kern, const struct layer *shape, bool whole) {
    struct layer l = *shape;
    struct kern_delta *d = &l.delta;
    struct kern_mamba *m = &l.mamba;
    float **a = l.arrays;
    if (l.kind == CONV) a[0] = numbers(kern, (size_t)(l.channels * l.width), 1, false);
    if (l.kind == DELTA) {
        const size_t channels = (size_t)(2 * d->heads_k * d->dim_k + d->heads_v * d->dim_v);
        d->eps = 1e-6f;
        d->taps = a[0] = numbers(kern, channels * (size_t)d->width, 2, false);
        d->decay = a[1] = numbers(kern, (size_t)d->heads_v, 3, true);
        d->bias = a[2] = numbers(kern, (size_t)d->heads_v, 4, false);
        d->norm = a[3] = numbers(kern, (size_t)d->dim_v, 5, false);
    }
    if (l.kind == MAMBA) {
        const size_t inner = (size_t)(m->heads * m->dim);
        const size_t channels = inner + 2 * (size_t)(m->groups * m->dim_state);
        m->taps = a[0] = numbers(kern, channels * (size_t)m->width, 6, false);
        m->decay = a[1] = numbers(kern, (size_t)m->heads, 7, true);
        m->bias = a[2] = numbers(kern, (size_t)m->heads, 8, false);
        m->skip = a[3] = numbers(kern, (size_t)m->heads, 9, false);
        if (whole) m->conv_bias = a[4] = numbers(kern, channels, 10, false);
        if (whole) m->norm = a[5] = numbers(kern, inner, 11, false);
    }
    return l;
}

static void drop_layer(struct kern *kern, struct layer *l) {
    for (size_t i = 0; i < sizeof l->arrays / sizeof *l->arrays; i++)
        kern->ops->mem_free(kern, l->arrays[i]);
}

/* Caches for the layer's states, with pages of 2,048 numbers on both. */
static void open_states(struct kern *kern[BACKENDS], const struct layer *l, int64_t pages) {
    const struct kern_cache_options options = {.layers = 1,
                                               .heads_q = 1,
                                               .heads_kv = 1,
                                               .head_dim = 64,
                                               .dtype = KERN_BF16,
                                               .states = STATES,
                                               .state_floats = sizes_of(l).state,
                                               .slots = SLOTS,
                                               .pages = pages,
                                               .max_positions = POSITIONS};
    both_open(kern);
    for (int b = 0; b < BACKENDS; b++) {
        struct fault fault = {0};
        struct kern_cache_info info;
        kern[b]->ops->cache_info(&options, &info);
        cr_assert_eq(info.state_slots, 2048);
        cr_assert_eq(kern[b]->ops->cache_open(kern[b], &options, &fault), 0, "%s", fault.text);
    }
}

struct part {
    int slot, text, pos, count;
};

/* One step of some texts, whose rows follow each other; the caller frees the results of all states.
 * NULL: the step was refused, as the only one with *rc. */
static float *step(struct kern *kern, const struct layer *l, const struct part *parts, int count,
                   int *rc) {
    const struct sizes size = sizes_of(l);
    struct kern_span spans[SLOTS];
    int rows = 0;
    for (int i = 0; i < count; i++) {
        spans[i] = (struct kern_span){
            .slot = parts[i].slot, .row = rows, .count = parts[i].count, .pos = parts[i].pos};
        rows += parts[i].count;
    }
    const struct kern_batch batch = {.spans = spans, .rows = rows, .span_count = count};
    const size_t out = (size_t)rows * (size_t)size.out;
    float *in = malloc((size_t)rows * (size_t)size.in * sizeof *in);
    float *rates = malloc((size_t)rows * (size_t)(size.rates + 1) * sizeof *rates);
    float *all = malloc(STATES * out * sizeof *all);
    *rc = kern->ops->begin_step(kern, &batch);
    for (int state = 0; state < STATES && !*rc; state++) {
        for (int i = 0; i < count; i++)
            for (int t = 0; t < parts[i].count; t++) {
                const size_t row = (size_t)(spans[i].row + t);
                const uint64_t seed =
                    (uint64_t)((parts[i].text * STATES + state) * POSITIONS + parts[i].pos + t);
                fill(in + row * (size_t)size.in, (size_t)size.in, 3 * seed + 1);
                fill(rates + row * (size_t)size.rates, (size_t)size.rates, 3 * seed + 2);
            }
        float *x = put(kern, in, (size_t)rows * (size_t)size.in);
        float *r = put(kern, rates, (size_t)rows * (size_t)size.rates + 1);
        float *y = put(kern, NULL, out);
        if (l->kind == CONV)
            kern->ops->short_conv(kern, state, y, x, l->arrays[0], l->channels, l->width, &batch);
        else if (l->kind == DELTA)
            kern->ops->delta(kern, state, y, x, r, &l->delta, &batch);
        else
            kern->ops->mamba(kern, state, y, x, r, &l->mamba, &batch);
        *rc = kern->ops->sync(kern);
        kern->ops->mem_free(kern, x);
        kern->ops->mem_free(kern, r);
        if (*rc) {
            kern->ops->mem_free(kern, y);
            continue;
        }
        float *got = take(kern, y, out);
        memcpy(all + (size_t)state * out, got, out * sizeof *all);
        free(got);
    }
    free(in), free(rates);
    if (!*rc) return all;
    free(all);
    return NULL;
}

static float *must_step(struct kern *kern, const struct layer *l, const struct part *parts,
                        int count) {
    int rc;
    float *y = step(kern, l, parts, count, &rc);
    cr_assert_eq(rc, 0);
    expect_sound(kern);
    return y;
}

/* A text of TOKENS tokens in steps of `most`: the results of state 1, [TOKENS][out]. */
static float *run(struct kern *kern, const struct layer *l, int slot, int text, int most) {
    const size_t out = (size_t)sizes_of(l).out;
    float *all = malloc(TOKENS * out * sizeof *all);
    for (int pos = 0, n; pos < TOKENS; pos += n) {
        n = TOKENS - pos < most ? TOKENS - pos : most;
        const struct part part = {slot, text, pos, n};
        float *y = must_step(kern, l, &part, 1);
        memcpy(all + (size_t)pos * out, y + (size_t)n * out, (size_t)n * out * sizeof *y);
        free(y);
    }
    return all;
}

/* The numbers of a state of a slot. */
static float *state_of(struct kern *kern, int slot, int state, size_t *count) {
    const int block = 2 + state; /* behind the slot's and a stream's */
    const size_t size = kern->ops->snapshot_size(kern, slot, block);
    float *numbers = malloc(size);
    MUST(kern->ops->snapshot_export(kern, slot, block, numbers));
    *count = size / sizeof *numbers;
    return numbers;
}

static void compare_states(struct kern *kern[BACKENDS], int slot, double bound) {
    for (int state = 0; state < STATES; state++) {
        size_t count[BACKENDS];
        float *of[BACKENDS];
        for (int b = 0; b < BACKENDS; b++) of[b] = state_of(kern[b], slot, state, &count[b]);
        cr_assert_eq(count[ORACLE], count[EMULATED]);
        expect_near(of[ORACLE], of[EMULATED], count[ORACLE], bound, bound, "state");
        for (int b = 0; b < BACKENDS; b++) free(of[b]);
    }
}

/* Sums of up to 256 products of numbers of about 1, in another order. */
#define BOUND 2e-5

static void check_layer(const struct layer *shape, bool whole) {
    struct kern *kern[BACKENDS];
    float *y[BACKENDS];
    const size_t count = (size_t)TOKENS * (size_t)sizes_of(shape).out;
    open_states(kern, shape, 400);
    for (int b = 0; b < BACKENDS; b++) {
        struct layer l = layer_on(kern[b], shape, whole);
        y[b] = run(kern[b], &l, 0, 1, b == ORACLE ? TOKENS : 23);
        for (int most = 1; b == EMULATED && most <= TOKENS; most += most < 3 ? 1 : 37) {
            kern[b]->ops->release(kern[b], 1);
            float *split = run(kern[b], &l, 1, 1, most);
            cr_assert_eq(memcmp(y[b], split, count * sizeof *split), 0, "steps of %d", most);
            free(split);
        }
        drop_layer(kern[b], &l);
    }
    expect_near(y[ORACLE], y[EMULATED], count, BOUND, BOUND, "results");
    compare_states(kern, 0, BOUND);
    for (int b = 0; b < BACKENDS; b++) free(y[b]);
    both_close(kern);
}

Test(emu_states, layers_beside_the_reference_in_any_split) {
    for (size_t i = 0; i < LAYERS; i++) {
        emu_set_seed(i);
        check_layer(&layers[i], true);
        if (layers[i].kind == MAMBA) check_layer(&layers[i], false);
    }
}

static int64_t pages_used(struct kern *kern) {
    struct kern_cache_stats stats;
    MUST(kern->ops->sync(kern));
    kern->ops->cache_stats(kern, &stats);
    return stats.pages_used;
}

static int64_t state_pages(const struct layer *l) {
    return STATES * ((sizes_of(l).state + 2047) / 2048);
}

Test(emu_states, texts_do_not_change_each_other) {
    for (size_t i = 1; i < LAYERS; i += 3) { /* a layer of each kind */
        struct kern *kern[BACKENDS];
        const size_t out = (size_t)sizes_of(&layers[i]).out;
        emu_set_seed(50 + i);
        open_states(kern, &layers[i], 400);
        struct kern *device = kern[EMULATED];
        struct layer l = layer_on(device, &layers[i], true);
        float *alone[2];
        for (int text = 0; text < 2; text++) alone[text] = run(device, &l, text, text, TOKENS);
        for (int slot = 0; slot < 2; slot++) device->ops->release(device, slot);
        cr_assert_eq(pages_used(device), 0);
        for (int pos = 0; pos < TOKENS; pos += 10) {
            const struct part parts[] = {{1, 1, pos, 10}, {0, 0, pos, 10}};
            float *both = must_step(device, &l, parts, 2);
            for (int text = 0; text < 2; text++) /* state 1, behind the rows of state 0 */
                cr_assert_eq(memcmp(both + (size_t)(20 + (1 - text) * 10) * out,
                                    alone[text] + (size_t)pos * out, 10 * out * sizeof *both),
                             0, "text %d from token %d", text, pos);
            free(both);
        }
        for (int text = 0; text < 2; text++) free(alone[text]);
        drop_layer(device, &l);
        both_close(kern);
    }
}

Test(emu_states, forks_share_pages_until_they_write) {
    const struct layer *shape = &layers[4]; /* several pages a state */
    const int64_t each = 1 + state_pages(shape);
    const size_t out = (size_t)sizes_of(shape).out;
    struct kern *kern[BACKENDS];
    struct kern_report report = {0};
    emu_set_seed(70);
    open_states(kern, shape, 1 + 4 * each); /* the test uses all pages */
    struct kern *device = kern[EMULATED];
    struct layer l = layer_on(device, shape, true);
    float *first = run(device, &l, 0, 1, TOKENS);
    /* TOKENS entries of one stream lie in two pages of 32. */
    cr_assert_eq(pages_used(device), 1 + each);
    MUST(device->ops->fork(device, 0, 1));
    MUST(device->ops->fork(device, 0, 2));
    cr_assert_eq(pages_used(device), 1 + each);
    MUST(device->ops->report(device, 1, &report));
    cr_assert_eq(report.pages, 1 + each);
    cr_assert_eq(report.state_bytes,
                 (size_t)STATES * (size_t)sizes_of(shape).state * sizeof(float));
    /* Both forks write in one step: each needs pages of its own, as slot 0 keeps the shared. */
    const struct part parts[] = {{1, 1, TOKENS, 1}, {2, 3, TOKENS, 1}};
    float *rows = must_step(device, &l, parts, 2);
    cr_assert_eq(pages_used(device), 1 + 3 * each);
    cr_assert_neq(memcmp(rows, rows + out, out * sizeof *rows), 0);
    /* Slot 0 did not change: what it gives next is what the fork of the same text gave. */
    const struct part next = {0, 1, TOKENS, 1};
    float *own = must_step(device, &l, &next, 1);
    cr_assert_eq(pages_used(device), 1 + 3 * each);
    cr_assert_eq(memcmp(rows, own, out * sizeof *own), 0);
    /* And the last owners of shared pages keep them: two forks and their source step together. */
    MUST(device->ops->fork(device, 0, 3));
    const struct part last[] = {{0, 1, TOKENS + 1, 1}, {3, 1, TOKENS + 1, 1}};
    float *two = must_step(device, &l, last, 2);
    cr_assert_eq(pages_used(device), 1 + 4 * each);
    cr_assert_eq(memcmp(two, two + out, out * sizeof *two), 0);
    for (int slot = 0; slot < SLOTS; slot++) device->ops->release(device, slot);
    cr_assert_eq(pages_used(device), 0);
    float *again = run(device, &l, 2, 1, TOKENS); /* pages of zeros, whatever was in them */
    cr_assert_eq(memcmp(first, again, TOKENS * out * sizeof *again), 0);
    free(first), free(rows), free(own), free(two), free(again);
    drop_layer(device, &l);
    both_close(kern);
}

Test(emu_states, a_pool_without_pages_refuses_the_step) {
    const struct layer *shape = &layers[4];
    const int64_t each = 1 + state_pages(shape);
    struct kern *kern[BACKENDS];
    int rc;
    emu_set_seed(71);
    open_states(kern, shape, each + 1);
    struct kern *device = kern[EMULATED];
    struct layer l = layer_on(device, shape, true);
    const struct part parts[] = {{0, 1, 0, 5}, {1, 2, 0, 5}}, next = {1, 1, 5, 1};
    free(must_step(device, &l, parts, 1));
    cr_assert_eq(pages_used(device), each);
    cr_assert(!step(device, &l, parts + 1, 1, &rc));
    cr_assert_eq(rc, ERR_FULL);
    expect_sound(device);
    size_t count;
    float *none = state_of(device, 1, 0, &count); /* the slot has begun, but no step was taken */
    for (size_t i = 0; i < count; i++) cr_assert_eq(none[i], 0);
    free(none);
    device->ops->release(device, 1);
    MUST(device->ops->fork(device, 0, 1));
    cr_assert(!step(device, &l, &next, 1, &rc)); /* copies of all pages, one is free */
    cr_assert_eq(rc, ERR_FULL);
    expect_sound(device);
    cr_assert_eq(pages_used(device), each);
    device->ops->release(device, 0);
    cr_assert_eq(pages_used(device), each);
    const struct part after = {1, 1, 6, 1};
    free(must_step(device, &l, &after, 1)); /* nobody shares them now */
    drop_layer(device, &l);
    both_close(kern);
}

Test(emu_states, a_state_cannot_go_back) {
    struct kern *kern[BACKENDS];
    emu_set_seed(72);
    open_states(kern, &layers[0], 64);
    struct kern *device = kern[EMULATED];
    struct layer l = layer_on(device, &layers[0], true);
    const struct part part = {0, 1, 0, 5}, next = {0, 1, 5, 1};
    free(must_step(device, &l, &part, 1));
    cr_assert_eq(device->ops->truncate(device, 0, 4), ERR_UNSUPPORTED);
    cr_assert_eq(device->ops->truncate(device, 0, 5), 0);
    free(must_step(device, &l, &next, 1));
    device->ops->release(device, 0);
    cr_assert_eq(pages_used(device), 0);
    drop_layer(device, &l);
    both_close(kern);
}

/* The CPU's snapshot goes on on the device, which gives the same bytes back. */
Test(emu_states, snapshots_hold_them) {
    enum { BLOCKS = 2 + STATES };
    const struct layer *shape = &layers[4];
    const size_t out = (size_t)sizes_of(shape).out;
    struct kern *kern[BACKENDS];
    struct layer l[BACKENDS];
    struct kern_block blocks[BLOCKS];
    struct kern_report report = {0};
    struct fault fault = {0};
    emu_set_seed(73);
    open_states(kern, shape, 400);
    for (int b = 0; b < BACKENDS; b++) l[b] = layer_on(kern[b], shape, true);
    free(run(kern[ORACLE], &l[ORACLE], 0, 1, TOKENS));
    struct kern *device = kern[EMULATED];
    for (int b = 0; b < BLOCKS; b++) {
        const size_t size = kern[ORACLE]->ops->snapshot_size(kern[ORACLE], 0, b);
        void *data = malloc(size);
        MUST(kern[ORACLE]->ops->snapshot_export(kern[ORACLE], 0, b, data));
        blocks[b] = (struct kern_block){data, size};
    }
    cr_assert_eq(device->ops->snapshot_check(device, blocks, BLOCKS, TOKENS, &report, &fault), 0,
                 "%s", fault.text);
    cr_assert_eq(report.pages, 2 + state_pages(shape));
    for (int b = 0; b < BLOCKS; b++) MUST(device->ops->snapshot_import(device, 2, b, &blocks[b]));
    expect_sound(device);
    cr_assert_eq(pages_used(device), 2 + state_pages(shape));
    for (int b = 0; b < BLOCKS; b++) {
        cr_assert_eq(device->ops->snapshot_size(device, 2, b), blocks[b].size);
        void *data = malloc(blocks[b].size);
        MUST(device->ops->snapshot_export(device, 2, b, data));
        cr_assert_eq(memcmp(data, blocks[b].data, blocks[b].size), 0, "block %d", b);
        free(data);
    }
    float *y[BACKENDS];
    for (int b = 0; b < BACKENDS; b++) {
        const struct part next = {b == ORACLE ? 0 : 2, 1, TOKENS, 1};
        y[b] = must_step(kern[b], &l[b], &next, 1);
    }
    expect_near(y[ORACLE], y[EMULATED], STATES * out, BOUND, BOUND, "the next token");
    for (int i = 0; i < BLOCKS; i++) free((void *)(uintptr_t)blocks[i].data);
    for (int b = 0; b < BACKENDS; b++) {
        free(y[b]);
        drop_layer(kern[b], &l[b]);
    }
    both_close(kern);
}
