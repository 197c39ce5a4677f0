/* Several ranks of the CUDA backend on one device. From equal statistics all of them keep what one
 * keeps, to the last bit, whatever the method: numbers that ranks do not sum (the first layers'
 * queries, keys, values, gates) are fed exactly, in numbers whose products are exact in any order.
 * What they do sum is compared within roundings. */
#include <criterion/criterion.h>

#include "both.h"
#include "kernels/number.h"
#include "kernels/ranks.h"
#include "paging/policy.h"
#include "tests/sample.h"
#include "tests/unit/record.h"

enum { LAYERS = 2, DIM = 64, INNER = 16, OUT = 24, SLOTS = 4, POSITIONS = 400, BUDGET = 24 };

/* ---- A model of nothing but attention ---- */

struct shape {
    int heads_q, heads_kv; /* heads_kv: the most of a layer */
    float rank_cap;
    int64_t pages;
    const struct kern_heads *heads; /* [LAYERS], where layers differ; NULL: DIM numbers in all */
};

struct layer {
    struct kern_weight *qkv, *o;
    struct kern_gate *gate;
};

struct net {
    struct kern *kern;
    struct shape shape;
    struct layer layers[LAYERS];
    struct record *record;
};

static struct kern_heads heads_of(const struct shape *shape, int layer) {
    return shape->heads ? shape->heads[layer] : (struct kern_heads){shape->heads_kv, DIM};
}

static struct kern_cache_options options_of(const struct shape *shape) {
    struct kern_cache_options options = {.layers = LAYERS,
                                         .heads_q = shape->heads_q,
                                         .heads_kv = shape->heads_kv,
                                         .head_dim = DIM,
                                         .heads = shape->heads,
                                         .dtype = KERN_BF16,
                                         .pages = shape->pages,
                                         .slots = SLOTS,
                                         .max_positions = POSITIONS,
                                         .rank_cap = shape->rank_cap};
    for (int i = 0; i < LAYERS; i++)
        if (heads_of(shape, i).dim > options.head_dim) options.head_dim = heads_of(shape, i).dim;
    return options;
}

/* Multiples of 1/16 in [-1, 1]: sums of INNER products of two are exact. */
static float grain(uint64_t seed, uint64_t place) {
    return (float)((int)(mix(seed * 977 + place) % 33) - 16) / 16;
}

static uint16_t *grains(size_t count, uint64_t seed) {
    uint16_t *to = malloc(count * sizeof *to);
    for (size_t i = 0; i < count; i++) to[i] = number_to_bf16(grain(seed, i));
    return to;
}

static struct kern_weight *load_qkv(struct net *net, int layer) {
    const struct kern_heads own = heads_of(&net->shape, layer);
    const int heads[] = {net->shape.heads_q, own.kv, own.kv};
    struct kern_matrix parts[3];
    struct kern_weight *weight;
    struct fault fault = {0};
    for (int i = 0; i < 3; i++)
        parts[i] = (struct kern_matrix){
            .data = grains((size_t)(heads[i] * own.dim * INNER), (uint64_t)(10 * layer + i)),
            .dtype = KERN_BF16,
            .rows = heads[i] * own.dim,
            .cols = INNER,
            .groups = own.kv};
    int rc = net->kern->ops->weight_load(net->kern, parts, 3, KERN_SHARD_ROWS, &weight, &fault);
    cr_assert_eq(rc, 0, "%s", fault.text);
    for (int i = 0; i < 3; i++) free((void *)(uintptr_t)parts[i].data);
    return weight;
}

static struct kern_weight *load_o(struct net *net, int layer) {
    int width = net->shape.heads_q * heads_of(&net->shape, layer).dim;
    uint16_t *data = grains((size_t)(OUT * width), (uint64_t)(10 * layer + 5));
    const struct kern_matrix part = {.data = data, .dtype = KERN_BF16, .rows = OUT, .cols = width};
    struct kern_weight *weight;
    MUST(net->kern->ops->weight_load(net->kern, &part, 1, KERN_SHARD_COLS, &weight, NULL));
    free(data);
    return weight;
}

static struct kern_gate *load_gate(struct net *net, int layer) {
    enum { WIDTH = 8, HEADS_MAX = 8 };
    float w1[WIDTH * INNER], b1[WIDTH], last[HEADS_MAX * WIDTH], bias[HEADS_MAX];
    int32_t row[HEADS_MAX];
    for (int i = 0; i < WIDTH * INNER; i++) w1[i] = grain(50 + (uint64_t)layer, (uint64_t)i);
    for (int i = 0; i < WIDTH; i++) b1[i] = grain(60 + (uint64_t)layer, (uint64_t)i);
    for (int i = 0; i < HEADS_MAX * WIDTH; i++) last[i] = 3 * grain(70, (uint64_t)(i + layer));
    for (int i = 0; i < HEADS_MAX; i++) {
        bias[i] = (float)i; /* later heads forget less: ranks become unequal */
        row[i] = i;
    }
    const struct kern_gate_spec spec = {.w1 = w1,
                                        .b1 = b1,
                                        .last = last,
                                        .bias = bias,
                                        .row = row,
                                        .width = WIDTH,
                                        .d_model = INNER,
                                        .heads_kv = heads_of(&net->shape, layer).kv,
                                        .row_count = HEADS_MAX,
                                        .embeddings = 1};
    struct kern_gate *gate;
    MUST(net->kern->ops->gate_load(net->kern, &spec, &gate, NULL));
    return gate;
}

static void open_net(struct net *net, struct kern *kern, const struct shape *shape,
                     struct record *record) {
    struct fault fault = {0};
    const struct kern_cache_options options = options_of(shape);
    *net = (struct net){.kern = kern, .shape = *shape, .record = record};
    for (int i = 0; i < LAYERS; i++)
        net->layers[i] = (struct layer){load_qkv(net, i), load_o(net, i), load_gate(net, i)};
    cr_assert_eq(kern->ops->cache_open(kern, &options, &fault), 0, "%s", fault.text);
}

static void close_net(struct net *net) {
    for (int i = 0; i < LAYERS; i++) {
        net->kern->ops->weight_free(net->kern, net->layers[i].qkv);
        net->kern->ops->weight_free(net->kern, net->layers[i].o);
        net->kern->ops->gate_free(net->kern, net->layers[i].gate);
    }
    net->kern->ops->close(net->kern);
}

static const int one_device[COMM_RANKS_MAX] = {0};

static struct kern *open_cuda(int ranks) {
    struct kern *kern = NULL;
    struct fault fault = {0};
    const struct cuda_options cuda = {0};
    int rc = cuda_open_ranks(&cuda, one_device, ranks, &kern, &fault);
    cr_assert_eq(rc, 0, "%d ranks: %s", ranks, fault.text);
    return kern;
}

static struct kern *open_cpu(int ranks) {
    struct kern *kern = NULL;
    const struct cpu_options cpu = {.path = "reference", .threads = 1};
    MUST(ranks_open_cpu(&cpu, ranks, &kern, NULL));
    return kern;
}

/* ---- Steps ---- */

/* Five families of inputs, so that there are look-alikes. */
static void make_input(float *x, int slot, int layer, int pos) {
    uint64_t family = mix((uint64_t)(slot * 131 + pos)) % 5;
    uint64_t place = (uint64_t)((slot * POSITIONS + pos) * LAYERS + layer);
    for (int i = 0; i < INNER; i++) {
        float own = grain(7, place * INNER + (uint64_t)i) / 4;
        float shared = grain(8, (family * LAYERS + (uint64_t)layer) * INNER + (uint64_t)i);
        x[i] = number_from_bf16(number_to_bf16((shared + own) / 2));
    }
}

/* -> what the layers put out, [LAYERS][rows][OUT], the caller's; NULL: the step failed, *rc. */
static float *step(struct net *net, const struct kern_span *spans, int count, int *rc) {
    struct kern *kern = net->kern;
    const struct shape *s = &net->shape;
    const struct kern_attend_options attend = {.scale = 0.125f};
    struct kern_batch batch = {.spans = spans, .span_count = count};
    for (int i = 0; i < count; i++) batch.rows += spans[i].count;
    size_t rows = (size_t)batch.rows;
    float *all = malloc(LAYERS * rows * OUT * sizeof *all), *in = malloc(rows * INNER * sizeof *in);
    *rc = kern->ops->begin_step(kern, &batch);
    for (int layer = 0; layer < LAYERS && !*rc; layer++) {
        for (int i = 0; i < count; i++)
            for (int k = 0; k < spans[i].count; k++)
                make_input(in + (spans[i].row + k) * INNER, spans[i].slot, layer, spans[i].pos + k);
        float *x = put(kern, in, rows * INNER), *y = put(kern, NULL, rows * OUT);
        const struct kern_heads own = heads_of(s, layer);
        const size_t dim = (size_t)own.dim;
        float *qkv = put(kern, NULL, rows * (size_t)(s->heads_q + 2 * own.kv) * dim);
        float *heads = put(kern, NULL, rows * (size_t)s->heads_q * dim);
        float *gates = put(kern, NULL, rows * (size_t)own.kv);
        kern->ops->matmul(kern, qkv, x, net->layers[layer].qkv, NULL, batch.rows, KERN_SET);
        kern->ops->gate(kern, gates, x, net->layers[layer].gate, batch.rows);
        kern->ops->write_kv(kern, layer, qkv, gates, &batch);
        kern->ops->attend(kern, layer, heads, qkv, &batch, &attend);
        kern->ops->matmul(kern, y, heads, net->layers[layer].o, NULL, batch.rows, KERN_SET);
        *rc = kern->ops->sync(kern);
        if (!*rc)
            MUST(kern->ops->download(kern, all + (size_t)layer * rows * OUT, y,
                                     rows * OUT * sizeof *y));
        float *arrays[] = {x, y, qkv, heads, gates};
        for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
            kern->ops->mem_free(kern, arrays[i]);
    }
    free(in);
    if (*rc) free(all);
    return *rc ? NULL : all;
}

/* Keeps what the layers put out, to be compared as numbers. */
struct outputs {
    float *x;
    size_t count;
};

static void append(struct net *net, struct outputs *outputs, const struct kern_span *spans,
                   int count) {
    int rc, rows = 0;
    for (int i = 0; i < count; i++) rows += spans[i].count;
    float *y = step(net, spans, count, &rc);
    cr_assert_eq(rc, 0, "%s: %d", net->kern->ops->name, rc);
    size_t more = (size_t)(LAYERS * rows * OUT);
    outputs->x = realloc(outputs->x, (outputs->count + more) * sizeof *y);
    memcpy(outputs->x + outputs->count, y, more * sizeof *y);
    outputs->count += more;
    free(y);
}

/* ---- Results of a run ---- */

static int streams_of(const struct net *net) {
    const struct kern_cache_options options = options_of(&net->shape);
    return (int)kern_streams(&options);
}

static void note_held(struct net *net, int slot) {
    static struct held h;
    read_held(net->kern, slot, &h);
    note(net->record, "lengths", h.lengths, (size_t)streams_of(net) * sizeof *h.lengths);
    note(net->record, "positions", h.positions, h.report.entries * sizeof *h.positions);
    note(net->record, "log_beta", h.log_beta, h.report.entries * sizeof *h.log_beta);
    note(net->record, "pages", &h.report.pages, sizeof h.report.pages);
}

static void evict(struct net *net, const struct kern_evict *due, int count) {
    int32_t lengths[64], *positions = malloc(HELD_MAX * sizeof *positions);
    struct kern_trace trace = {.lengths = lengths, .positions = positions, .entries_max = HELD_MAX};
    struct kern_evict own[2];
    memcpy(own, due, (size_t)count * sizeof *own);
    if (count == 1) own->trace = &trace;
    MUST(net->kern->ops->evict(net->kern, own, count));
    MUST(net->kern->ops->sync(net->kern));
    if (count == 1) {
        note(net->record, "evicted lengths", lengths, (size_t)streams_of(net) * sizeof *lengths);
        note(net->record, "evicted positions", positions, trace.entries * sizeof *positions);
    }
    for (int i = 0; i < count; i++) note_held(net, due[i].slot);
    free(positions);
}

static void evict_slot(struct net *net, int slot, int tokens, const struct kern_rule *rule) {
    const struct kern_evict due = {.slot = slot, .tokens = tokens, .budget = BUDGET, .rule = rule};
    evict(net, &due, 1);
}

/* Expects the counts in the blocks, of all ranks and of the fullest, to equal the slot's own. */
static void expect_counts_of(struct net *net, int slot, const struct kern_report *blocks) {
    struct kern_report report = {0};
    MUST(net->kern->ops->report(net->kern, slot, &report));
    cr_assert_eq(blocks->entries, report.entries);
    cr_assert_eq(blocks->pages, report.pages);
    cr_assert_eq(blocks->rank_entries, report.rank_entries);
    cr_assert_eq(blocks->rank_pages, report.rank_pages);
    cr_assert(report.rank_pages > 0 && report.rank_pages <= report.pages);
}

static void copy_by_snapshot(struct net *net, int from, int to, int tokens) {
    const struct kern_ops *ops = net->kern->ops;
    struct kern_block blocks[65];
    struct kern_report report = {0};
    int count = 1 + streams_of(net);
    for (int b = 0; b < count; b++) {
        size_t size = ops->snapshot_size(net->kern, from, b);
        char *data = malloc(size);
        MUST(ops->snapshot_export(net->kern, from, b, data));
        note(net->record, b ? "a stream's block" : "the slot's block", data, size);
        blocks[b] = (struct kern_block){data, size};
    }
    MUST(ops->snapshot_check(net->kern, blocks, count, tokens, &report, NULL));
    expect_counts_of(net, from, &report);
    for (int b = 0; b < count; b++) {
        MUST(ops->snapshot_import(net->kern, to, b, &blocks[b]));
        free((void *)(uintptr_t)blocks[b].data);
    }
}

/* Two sequences that evict together, a fork beside them, tokens dropped, and a copy that goes on.
 */
static struct outputs live(struct net *net, const struct kern_rule *rule, bool evicts) {
    const struct kern_ops *ops = net->kern->ops;
    struct outputs outputs = {0};
    int pos = 0;
    for (int round = 0; round < 3; round++) {
        int count = 61 - 19 * round;
        const struct kern_span spans[] = {
            {.slot = 0, .row = 0, .count = count, .pos = pos, .rule = rule},
            {.slot = 3, .row = count, .count = count, .pos = pos, .rule = rule}};
        append(net, &outputs, spans, 2);
        pos += count;
        const struct kern_evict due[] = {
            {.slot = 0, .tokens = pos, .budget = BUDGET, .rule = rule},
            {.slot = 3, .tokens = pos, .budget = BUDGET, .rule = rule}};
        if (evicts) evict(net, due, 2);
    }
    MUST(ops->fork(net->kern, 0, 1));
    for (int i = 0; i < 3; i++, pos++) {
        const struct kern_span spans[] = {
            {.slot = 0, .count = 1, .pos = pos, .rule = rule},
            {.slot = 1, .row = 1, .count = 1, .pos = pos, .rule = rule}};
        append(net, &outputs, spans, 2);
    }
    if (evicts) evict_slot(net, 1, pos, rule);
    MUST(ops->truncate(net->kern, 1, pos - 2));
    note_held(net, 1);
    copy_by_snapshot(net, 0, 2, pos);
    ops->release(net->kern, 0);
    const struct kern_span last = {.slot = 2, .count = 4, .pos = pos, .rule = rule};
    append(net, &outputs, &last, 1);
    if (evicts) evict_slot(net, 2, pos + 4, rule);
    expect_sound(net->kern);
    struct kern_cache_stats stats;
    ops->cache_stats(net->kern, &stats);
    cr_assert(stats.rank_pages_used > 0 && stats.rank_pages_used <= stats.pages_used);
    stats.rank_pages_used = 0; /* the more ranks, the fewer on each */
    note(net->record, "statistics", &stats, sizeof stats);
    return outputs;
}

static struct outputs run(struct kern *kern, const struct shape *shape,
                          const struct kern_rule *rule, bool evicts, struct record *record) {
    struct net net;
    *record = (struct record){0};
    open_net(&net, kern, shape, record);
    struct outputs outputs = live(&net, rule, evicts);
    close_net(&net);
    return outputs;
}

/* ---- Every method ---- */

static const int two_ranks[] = {2, 0}, two_and_four_ranks[] = {2, 4, 0},
                 two_and_eight_ranks[] = {2, 8, 0}, every_rank_count[] = {2, 4, 8, 0};

/* Compares each of `counts` of ranks with one. Attention's products are summed over ranks in
 * another order, of bf16 numbers around 1. */
static void compare(const struct shape *shape, const struct kern_rule *rule, bool evicts,
                    const int *counts, const char *what) {
    struct record one, many;
    char name[128];
    struct outputs alone = run(open_cuda(1), shape, rule, evicts, &one);
    for (; *counts; counts++) {
        snprintf(name, sizeof name, "%s, %d heads, %d ranks", what, shape->heads_kv, *counts);
        struct outputs all = run(open_cuda(*counts), shape, rule, evicts, &many);
        check_same(&one, &many, name);
        cr_assert_eq(all.count, alone.count, "%s", name);
        expect_near(alone.x, all.x, all.count, 1e-4, 1e-5, name);
        free(all.x), free(many.data);
    }
    free(alone.x), free(one.data);
}

static struct kern_rule rule_of(const struct policy *policy, bool *runs) {
    struct kv_params params = {.budget = BUDGET, .buffer = 16, .chunk = 64};
    struct fault fault = {0};
    kv_params_set_policy(&params, policy);
    kv_params_fit(&params, 0);
    struct kern *kern = open_cuda(1);
    *runs = kern->ops->rule_check(&params.rule, &fault) == 0;
    kern->ops->close(kern);
    return params.rule;
}

/* Heads more and fewer than ranks. Methods take turns: each has one shape, with two ranks and with
 * four or eight. */
static const struct shape shapes[] = {
    {8, 4, 0, 2000, NULL}, {16, 8, 0, 2000, NULL}, {8, 1, 0, 2000, NULL}};

Test(emu_ranks, every_method_keeps_the_same) {
    int count = 0;
    emu_set_seed(3);
    for (int i = 0; policy_at(i); i++) {
        bool runs;
        const struct kern_rule rule = rule_of(policy_at(i), &runs);
        if (runs)
            compare(&shapes[i % 3], &rule, policy_at(i)->bounded,
                    i / 3 % 2 ? two_and_four_ranks : two_and_eight_ranks, policy_at(i)->name);
        count += runs;
    }
    cr_assert(count >= 14, "%d methods", count);
}

/* The same where layers differ in the number and size of their heads. */
Test(emu_ranks, methods_keep_the_same_where_layers_differ) {
    static const struct kern_heads heads[LAYERS] = {{4, 64}, {2, 128}};
    static const struct shape shape = {8, 4, 0, 2000, heads};
    emu_set_seed(4);
    for (int i = 0; policy_at(i); i++) {
        bool runs;
        const struct kern_rule rule = rule_of(policy_at(i), &runs);
        if (runs && !test_leaves_out((size_t)i, 3))
            compare(&shape, &rule, policy_at(i)->bounded, two_ranks, policy_at(i)->name);
    }
}

/* Floors, in both scopes that have them. */
Test(emu_ranks, floors) {
    static const enum kern_scope scopes[] = {KERN_SCOPE_SEQUENCE, KERN_SCOPE_LAYER};
    for (int i = 0; i < 2; i++) {
        const struct kern_rule rule = {.score = KERN_SCORE_RETENTION,
                                       .scope = scopes[i],
                                       .sinks = 2,
                                       .recent = 3,
                                       .horizon = 64,
                                       .floor = 0.3f};
        compare(&shapes[0], &rule, true, every_rank_count, i ? "layer" : "sequence");
    }
}

/* ---- The cap ---- */

/* One eviction on either; -> how often a rank was held to the cap. */
static uint64_t capped(struct kern *kern, int ranks, const struct kern_rule *rule,
                       struct record *record) {
    const struct shape shape = {8, 4, 1.125f, 2000, NULL};
    const struct kern_span span = {.slot = 1, .count = 90, .rule = rule};
    struct outputs outputs = {0};
    struct kern_cache_stats stats;
    struct net net;
    *record = (struct record){0};
    open_net(&net, kern, &shape, record);
    append(&net, &outputs, &span, 1);
    evict_slot(&net, 1, 90, rule);
    kern->ops->cache_stats(kern, &stats);
    close_net(&net);
    free(outputs.x);
    cr_assert(stats.rank_cap_hits > 0, "%d ranks: no cap bound", ranks);
    return stats.rank_cap_hits;
}

/* The CPU's ranks decide from the same numbers; gates agree but for the last bits of log_beta. */
static void expect_same_places(const struct record *cpu, const struct record *cuda,
                               const char *what) {
    size_t from = 0;
    cr_assert_eq(cpu->marks, cuda->marks, "%s", what);
    for (int i = 0; i < cpu->marks; i++) {
        cr_assert_eq(cpu->mark[i].end, cuda->mark[i].end, "%s: %s", what, cpu->mark[i].what);
        bool gates = !strcmp(cpu->mark[i].what, "log_beta");
        size_t size = cpu->mark[i].end - from;
        cr_assert(gates || !memcmp(cpu->data + from, cuda->data + from, size), "%s: %s differs",
                  what, cpu->mark[i].what);
        from = cpu->mark[i].end;
    }
}

Test(emu_ranks, a_cap_holds_as_on_the_cpu) {
    for (int i = 0; i < 4; i++) {
        const struct kern_rule rule = {.score = KERN_SCORE_RETENTION,
                                       .scope = i % 2 ? KERN_SCOPE_LAYER : KERN_SCOPE_SEQUENCE,
                                       .sinks = 2,
                                       .recent = 3,
                                       .horizon = 64,
                                       .floor = i < 2 ? 0 : 0.2f};
        for (int ranks = 2; ranks <= 8; ranks *= 2) {
            char what[64];
            struct record cpu, cuda;
            snprintf(what, sizeof what, "case %d, %d ranks", i, ranks);
            uint64_t want = capped(open_cpu(ranks), ranks, &rule, &cpu);
            cr_assert_eq(want, capped(open_cuda(ranks), ranks, &rule, &cuda), "%s", what);
            expect_same_places(&cpu, &cuda, what);
            free(cpu.data), free(cuda.data);
        }
    }
}

/* ---- Refusals and losses ---- */

/* Twenty tokens at a time until they are refused; what was held before that is in *before. */
static int fill_up(struct net *net, const struct kern_rule *rule, int pos, struct record *before) {
    int rc = 0;
    for (; !rc; pos += 20) {
        const struct kern_span more = {.slot = 0, .count = 20, .pos = pos, .rule = rule};
        cr_assert(pos < POSITIONS - 20, "never full");
        free(before->data);
        *before = (struct record){0};
        net->record = before;
        note_held(net, 0);
        free(step(net, &more, 1, &rc));
    }
    return rc;
}

/* One rank is full where another has room: nobody takes anything, and the step is refused. */
Test(emu_ranks, what_one_rank_cannot_hold_nobody_takes) {
    const struct kern_rule rule = {
        .score = KERN_SCORE_RETENTION, .scope = KERN_SCOPE_SEQUENCE, .horizon = 64};
    const struct kern_span first = {.slot = 0, .count = 60, .rule = &rule};
    const struct kern_evict due = {.slot = 0, .tokens = 60, .budget = 40, .rule = &rule};
    for (int ranks = 2; ranks <= 4; ranks *= 2) {
        const struct shape shape = {8, 4, 0, 32 / ranks,
                                    NULL}; /* four pages for each of its streams */
        struct net net;
        struct record before = {0}, after = {0};
        struct outputs outputs = {0};
        struct kern_cache_stats stats;
        open_net(&net, open_cuda(ranks), &shape, &before);
        append(&net, &outputs, &first, 1);
        MUST(net.kern->ops->evict(net.kern, &due, 1)); /* the last heads keep most */
        cr_assert_eq(fill_up(&net, &rule, 60, &before), ERR_FULL, "%d ranks", ranks);
        net.record = &after;
        note_held(&net, 0);
        check_same(&before, &after, "a refused step");
        expect_sound(net.kern);
        net.kern->ops->cache_stats(net.kern, &stats);
        cr_assert(stats.pages_used < 32, "%d ranks: none has room", ranks);
        net.kern->ops->release(net.kern, 0);
        net.kern->ops->cache_stats(net.kern, &stats);
        cr_assert_eq((int)stats.pages_used, 0);
        close_net(&net);
        free(outputs.x), free(before.data), free(after.data);
    }
}

Test(emu_ranks, ranks_that_cannot_be_are_refused_by_name) {
    static const int wrong[] = {3, 6, 16, -1, 0};
    struct kern *kern = NULL;
    const struct cuda_options cuda = {0};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct fault fault = {0};
        int devices[COMM_RANKS_MAX];
        cr_assert_eq(cuda_open_ranks(&cuda, one_device, wrong[i], &kern, &fault), ERR_INVALID);
        cr_assert_str_eq(fault.field, "tensor-parallel-size");
        cr_assert_eq(cuda_place_ranks(1, wrong[i], 0, devices, &fault), ERR_INVALID);
    }
}
