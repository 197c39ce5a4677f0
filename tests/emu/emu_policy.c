/* Every bounded policy and its variants on the device beside the CPU's reference path: the same
 * tokens in the same batches, the same evictions; what is kept, what it remembers and what merging
 * made of it agree. Keys come in families, so that there are look-alikes; queries ask for keys, so
 * that attention is uneven. Activations are bf16 numbers, and pages of e4m3 are rounded alike: both
 * sides multiply the same ones. */
#include <criterion/criterion.h>

#include "both.h"
#include "kernels/number.h"
#include "paging/policy.h"

#define SLOTS     4
#define POSITIONS 1400
#define FAMILIES  9

struct pair {
    struct kern *kern[BACKENDS];
    struct kern_cache_options options;
    uint64_t seed;
    bool turned[SLOTS]; /* queries and keys are rotated, and values come in families, too */
    int window;         /* of attention; 0: none */
};

/* Slots whose rule has classes get rotated keys: look-alikes are alike at position 0. */
static void turn_slot(struct pair *p, int slot, const struct kern_rule *rule) {
    p->turned[slot] = rule->merge == KERN_MERGE_CLASSES;
}

/* Of a rotation; a cache that reads them is open no longer than the next call. */
static const float *frequencies(int head_dim) {
    static float inv_freq[128];
    for (int j = 0; j < head_dim / 2; j++)
        inv_freq[j] = powf(10000, -2 * (float)j / (float)head_dim);
    return inv_freq;
}

static struct pair open_pair(struct kern_cache_options shape, int64_t entries, uint64_t seed) {
    struct pair p = {.options = shape, .seed = seed};
    p.options.inv_freq = frequencies(shape.head_dim);
    if (p.options.dtype != KERN_E4M3) p.options.dtype = KERN_BF16;
    p.options.slots = SLOTS;
    p.options.max_positions = POSITIONS;
    emu_set_seed(seed);
    both_open(p.kern);
    both_cache(p.kern, p.options, entries);
    return p;
}

static int streams_of(const struct pair *p) {
    return p->options.layers * p->options.heads_kv;
}

/* ---- Feeding ----------------------------------------------------------------------------------
 */

/* Dimension d of a family of keys. */
static float family(const struct pair *p, int layer, int which, int d) {
    return noise(p->seed * 31 + (uint64_t)(layer * FAMILIES + which), (uint64_t)d);
}

static int family_at(const struct pair *p, int slot, int layer, int pos) {
    return (int)(mix(p->seed + (uint64_t)(slot * 7919 + layer * 104729 + pos)) % FAMILIES);
}

static void rotate(const struct pair *p, int pos, float *x) {
    int half = p->options.head_dim / 2;
    for (int j = 0; j < half; j++) {
        float angle = (float)pos * p->options.inv_freq[j], a = x[j], b = x[half + j];
        x[j] = a * cosf(angle) - b * sinf(angle);
        x[half + j] = b * cosf(angle) + a * sinf(angle);
    }
}

/* One row of qkv: the queries want a family that changes with the position and the head. */
static void make_row(const struct pair *p, int slot, int layer, int pos, float *row) {
    const struct kern_cache_options *o = &p->options;
    int heads = o->heads_q + 2 * o->heads_kv, key = family_at(p, slot, layer, pos);
    for (int h = 0; h < heads; h++) {
        bool query = h < o->heads_q, value = h >= o->heads_q + o->heads_kv;
        int which = query ? (key + h + pos / 3) % FAMILIES : (key + (h - o->heads_q)) % FAMILIES;
        uint64_t place = (uint64_t)(((slot * POSITIONS + pos) * 8 + layer) * 64 + h);
        float part = query ? 1 : p->turned[slot] ? 0.3f : 0.5f, *x = row + h * o->head_dim;
        for (int d = 0; d < o->head_dim; d++) {
            float own = noise(p->seed + 17, place * 256 + (uint64_t)d);
            bool alone = value && !p->turned[slot];
            x[d] = alone ? own : family(p, layer + value, which, d) * 0.8f + own * part;
        }
        if (p->turned[slot] && !value) rotate(p, pos, x);
        for (int d = 0; d < o->head_dim; d++) x[d] = number_from_bf16(number_to_bf16(x[d]));
    }
}

/* log_beta of a head at a position. */
static float gate_at(const struct pair *p, int slot, int layer, int pos, int head) {
    uint64_t place = (uint64_t)(((slot * POSITIONS + pos) * 8 + layer) * 64 + head);
    return -expf(6 * noise(p->seed + 99, place) - 5);
}

struct layer_rows {
    float *qkv, *gates;
};

static struct layer_rows make_layer(const struct pair *p, const struct kern_batch *batch,
                                    int layer) {
    const struct kern_cache_options *o = &p->options;
    int stride = (o->heads_q + 2 * o->heads_kv) * o->head_dim;
    struct layer_rows rows = {.qkv = malloc((size_t)(batch->rows * stride) * sizeof(float)),
                              .gates = malloc((size_t)(batch->rows * o->heads_kv) * sizeof(float))};
    for (int i = 0; i < batch->span_count; i++) {
        const struct kern_span *s = &batch->spans[i];
        for (int k = 0; k < s->count; k++) {
            make_row(p, s->slot, layer, s->pos + k, rows.qkv + (s->row + k) * stride);
            for (int h = 0; h < o->heads_kv; h++)
                rows.gates[(s->row + k) * o->heads_kv + h] =
                    gate_at(p, s->slot, layer, s->pos + k, h);
        }
    }
    return rows;
}

/* A step of all spans on one backend; -> attention's output of every layer, the caller's. */
static float *run_step(struct pair *p, struct kern *kern, const struct kern_batch *batch) {
    const struct kern_cache_options *o = &p->options;
    const struct kern_attend_options attend = {.window = p->window,
                                               .scale = 1 / sqrtf((float)o->head_dim)};
    size_t out_size = (size_t)(batch->rows * o->heads_q * o->head_dim);
    size_t qkv_size = (size_t)(batch->rows * (o->heads_q + 2 * o->heads_kv) * o->head_dim);
    float *all = malloc((size_t)o->layers * out_size * sizeof *all);
    MUST(kern->ops->begin_step(kern, batch));
    for (int layer = 0; layer < o->layers; layer++) {
        struct layer_rows rows = make_layer(p, batch, layer);
        float *qkv = put(kern, rows.qkv, qkv_size);
        float *gates = put(kern, rows.gates, (size_t)(batch->rows * o->heads_kv));
        float *out = put(kern, NULL, out_size);
        kern->ops->write_kv(kern, layer, qkv, gates, batch);
        kern->ops->attend(kern, layer, out, qkv, batch, &attend);
        float *got = take(kern, out, out_size);
        memcpy(all + (size_t)layer * out_size, got, out_size * sizeof *all);
        free(got);
        kern->ops->mem_free(kern, qkv);
        kern->ops->mem_free(kern, gates);
        free(rows.qkv);
        free(rows.gates);
    }
    return all;
}

/* The next `count` tokens of the slots in one batch. Attention reads what is held, so its answers
 * agree only if keys and values do, merged ones included. */
static void feed(struct pair *p, const struct kern_span *spans, int span_count, const char *what) {
    struct kern_batch batch = {.spans = spans, .span_count = span_count};
    float *out[BACKENDS];
    for (int i = 0; i < span_count; i++) batch.rows += spans[i].count;
    for (int b = 0; b < BACKENDS; b++) out[b] = run_step(p, p->kern[b], &batch);
    size_t count =
        (size_t)(p->options.layers * batch.rows * p->options.heads_q) * (size_t)p->options.head_dim;
    expect_near(out[ORACLE], out[EMULATED], count, 0.02, 0.01, what);
    for (int b = 0; b < BACKENDS; b++) free(out[b]);
}

/* ---- Comparing --------------------------------------------------------------------------------
 */

/* Bytes of a slot's block. */
static char *block_of(struct kern *kern, int slot, int block, size_t *size) {
    *size = kern->ops->snapshot_size(kern, slot, block);
    cr_assert(*size > 0);
    char *bytes = malloc(*size);
    MUST(kern->ops->snapshot_export(kern, slot, block, bytes));
    return bytes;
}

/* What follows the entries in both blocks, `from` in the first one. */
static void expect_same_members(char *const bytes[BACKENDS], const void *from, size_t size,
                                const char *what) {
    size_t at = (size_t)((const char *)from - bytes[ORACLE]);
    for (at += at < size ? 4 : 0; at < size; at += 12) {
        int32_t place[BACKENDS][2];
        float gain[BACKENDS];
        for (int b = 0; b < BACKENDS; b++) {
            memcpy(place[b], bytes[b] + at, sizeof place[b]);
            memcpy(&gain[b], bytes[b] + at + 8, sizeof gain[b]);
        }
        cr_assert(!memcmp(place[ORACLE], place[EMULATED], sizeof place[0]),
                  "%s: a member of %d at %d, not of %d at %d", what, place[EMULATED][0],
                  place[EMULATED][1], place[ORACLE][0], place[ORACLE][1]);
        expect_near(&gain[ORACLE], &gain[EMULATED], 1, 0, 0.01, what);
    }
}

/* Scores, where the rule has any, and keys and values within two roundings of numbers around 1: a
 * merged one is rounded once, and merged again it is made of such. */
static void expect_same_entries(struct pair *p, int slot, bool scored, const char *what) {
    int dim = p->options.head_dim;
    enum kern_dtype dtype = p->options.dtype;
    float step = dtype == KERN_E4M3 ? 1.0f / 8 : 1.0f / 128;
    for (int stream = 0; stream < streams_of(p); stream++) {
        size_t size[BACKENDS];
        char *bytes[BACKENDS];
        for (int b = 0; b < BACKENDS; b++)
            bytes[b] = block_of(p->kern[b], slot, 1 + stream, &size[b]);
        cr_assert(size[ORACLE] == size[EMULATED], "%s: stream %d", what, stream);
        int32_t length;
        memcpy(&length, bytes[ORACLE], sizeof length);
        const float *scores[BACKENDS];
        const char *rows[BACKENDS];
        for (int b = 0; b < BACKENDS; b++) {
            scores[b] = (const float *)(bytes[b] + 4) + 2 * (size_t)length;
            rows[b] = (const char *)(scores[b] + length);
        }
        if (scored) expect_near(scores[ORACLE], scores[EMULATED], (size_t)length, 1e-6, 2e-4, what);
        for (int i = 0; i < 2 * length * dim; i++) {
            size_t at = (size_t)i * kern_dtype_bytes(dtype);
            float x = number_element(rows[ORACLE] + at, dtype),
                  y = number_element(rows[EMULATED] + at, dtype);
            cr_assert(fabsf(x - y) <= fabsf(x) * step + 1e-3f,
                      "%s: stream %d number %d: %g, not %g", what, stream, i, (double)y, (double)x);
        }
        size_t row = (size_t)dim * kern_dtype_bytes(dtype);
        expect_same_members(bytes, rows[ORACLE] + 2 * (size_t)length * row, size[ORACLE], what);
        for (int b = 0; b < BACKENDS; b++) free(bytes[b]);
    }
}

static void evict(struct pair *p, const struct kern_evict *due, int count, const char *what) {
    for (int b = 0; b < BACKENDS; b++) {
        MUST(p->kern[b]->ops->evict(p->kern[b], due, count));
        MUST(p->kern[b]->ops->sync(p->kern[b]));
    }
    for (int i = 0; i < count; i++) {
        expect_same_held(p->kern, due[i].slot, streams_of(p), what);
        expect_same_entries(p, due[i].slot, due[i].rule->score == KERN_SCORE_ATTENTION, what);
    }
}

/* ---- The list of methods ----------------------------------------------------------------------
 */

static void as_it_is(struct kern_rule *rule) {
    (void)rule;
}
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
    rule->redundancy.candidates_only = rule->observe.smooth_first = true;
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
static void merge_code(struct kern_rule *rule) {
    rule->merge = KERN_MERGE_CODE;
    rule->merge_beta = 0.5f;
}

static void unturned(struct kern_rule *rule) {
    rule->classes.positions = false;
}
static void loose(struct kern_rule *rule) {
    rule->classes.tau = 0.1f;
    rule->recent = 8;
}
static void narrow(struct kern_rule *rule) {
    rule->classes.gamma = 1.5f;
    rule->recent = 8;
}
static void apart(struct kern_rule *rule) {
    rule->merge = KERN_MERGE_NONE;
}
static void mass_alone(struct kern_rule *rule) {
    rule->observe.window = 0;
    rule->observe.global = false;
    rule->recent = 6;
}

/* The rows of paging/policy.c, and the other readings of tests/python/policies/table.py. */
static const struct method {
    const char *policy;
    void (*change)(struct kern_rule *rule);
} methods[] = {
    {"streaming", as_it_is}, {"trimkv", as_it_is},
    {"global", as_it_is},    {"gkv", as_it_is},
    {"rkv", as_it_is},       {"snapkv", as_it_is},
    {"pyramidkv", as_it_is}, {"adakv", as_it_is},
    {"morphkv", as_it_is},   {"cake", as_it_is},
    {"h2o", as_it_is},       {"kvcompress", as_it_is},
    {"d2o", as_it_is},       {"trimkv", published},
    {"global", published},   {"global", published_step},
    {"global", forever},     {"global", floored},
    {"global", threshold},   {"gkv", history_mean},
    {"gkv", history_sum},    {"rkv", artefact},
    {"rkv", paper},          {"gkv", without_redundancy},
    {"gkv", smoothed},       {"morphkv", reduce_max},
    {"cake", reduce_std},    {"cake", taus},
    {"adakv", group_max},    {"d2o", merge_code},
    {"ems", as_it_is},       {"ems", unturned},
    {"ems", loose},          {"ems", narrow},
    {"ems", mass_alone},     {"ems", apart},
};
#define METHODS ((int)(sizeof methods / sizeof *methods))

static struct kern_rule rule_of(const struct method *m, int budget) {
    struct kv_params params = {.budget = budget, .buffer = 16, .chunk = 64};
    kv_params_set_policy(&params, policy_find(m->policy));
    kv_params_fit(&params, 0);
    m->change(&params.rule);
    return params.rule;
}

/* ---- Two sequences side by side ---------------------------------------------------------------
 */

static const struct kern_cache_options shapes[] = {
    {.layers = 2, .heads_q = 4, .heads_kv = 2, .head_dim = 64},
    {.layers = 2, .heads_q = 3, .heads_kv = 3, .head_dim = 64},
    {.layers = 3, .heads_q = 6, .heads_kv = 2, .head_dim = 128},
};

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
    for (int i = 0; i < 2; i++) turn_slot(&p, 1 + i, &rules[i]);
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
                .slot = 1 + i, .tokens = tokens[i], .keep = budget, .rule = &rules[i]};
        }
        feed(&p, spans, 2, what);
        evict(&p, due, 2, what);
    }
    both_close(p.kern);
}

/* Every method is the first of a pair once and the second once. */
Test(emu_policy, methods_side_by_side) {
    for (int i = 0; i < METHODS; i++)
        play(&methods[i], &methods[(i + 7) % METHODS], i, shapes[i % 3]);
}

/* Pages of e4m3: keys that are compared, observed, merged and moved. */
Test(emu_policy, methods_on_fp8_pages) {
    static const struct method some[] = {
        {"global", as_it_is}, {"rkv", as_it_is},  {"d2o", as_it_is},
        {"rkv", paper},       {"cake", as_it_is}, {"h2o", as_it_is},
        {"ems", as_it_is},    {"gkv", as_it_is},  {"d2o", merge_code}};
    const int count = sizeof some / sizeof *some;
    for (int i = 0; i < count; i++) {
        struct kern_cache_options shape = shapes[i % 3];
        shape.dtype = KERN_E4M3;
        if (i == 1)
            shape = (struct kern_cache_options){
                .layers = 1, .heads_q = 2, .heads_kv = 1, .head_dim = 256, .dtype = KERN_E4M3};
        play(&some[i], &some[(i + 3) % count], 60 + i, shape);
    }
}

/* ---- Long and unequal streams -----------------------------------------------------------------
 */

/* One sequence in uneven pieces with an eviction after each. */
static void play_one(struct pair *p, int slot, const struct kern_rule *rule, int keep,
                     const int *counts, int count, const char *what) {
    int32_t tokens = 0;
    turn_slot(p, slot, rule);
    for (int i = 0; i < count; i++) {
        struct kern_span span = {.slot = slot, .count = counts[i], .pos = tokens, .rule = rule};
        feed(p, &span, 1, what);
        tokens += counts[i];
        struct kern_evict due = {.slot = slot, .tokens = tokens, .keep = keep, .rule = rule};
        evict(p, &due, 1, what);
    }
}

/* Streams of several chunks, cut at none of their bounds, beside one that has just begun. */
Test(emu_policy, long_streams) {
    static const int counts[] = {297, 41};
    static const struct method long_ones[] = {{"rkv", paper},
                                              {"cake", as_it_is},
                                              {"d2o", as_it_is},
                                              {"kvcompress", as_it_is},
                                              {"ems", as_it_is}};
    const struct kern_cache_options shape = {
        .layers = 1, .heads_q = 2, .heads_kv = 1, .head_dim = 64};
    for (int i = 0; i < 5; i++) {
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
                             .pool = KERN_POOL_SEQUENCE,
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
        {"cake", as_it_is}, {"morphkv", as_it_is}, {"h2o", as_it_is}, {"ems", loose}};
    for (int i = 0; i < 8; i++) {
        const struct kern_cache_options shape = {
            .layers = 1, .heads_q = i % 2 ? 16 : 7, .heads_kv = 1, .head_dim = 64};
        struct kern_rule rule = rule_of(&wide[i / 2], 40);
        struct pair p = open_pair(shape, 4096, (uint64_t)(20 + i));
        play_one(&p, 1, &rule, 40, counts, 2, wide[i / 2].policy);
        both_close(p.kern);
    }
}

/* ---- Any combination --------------------------------------------------------------------------
 */

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
    rule.pool = (enum kern_pool)pick(r, 3);
    if (rule.pool != KERN_POOL_SEQUENCE) rule.layers = (enum kern_layers)pick(r, 4);
    rule.merge = (enum kern_merge)(pick(r, 4) % 3);
    rule.merge_beta = real(r, 0, 1);
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

/* ---- Promises ---------------------------------------------------------------------------------
 */

/* What a slot holds, all blocks one after the other; the caller's. */
static char *bytes_of(struct pair *p, struct kern *kern, int slot, size_t *size) {
    char *all = NULL;
    *size = 0;
    for (int block = 0; block <= streams_of(p); block++) {
        size_t more;
        char *bytes = block_of(kern, slot, block, &more);
        all = realloc(all, *size + more);
        memcpy(all + *size, bytes, more);
        *size += more;
        free(bytes);
    }
    return all;
}

/* Slot 1's 40 tokens and an eviction, in one prompt alone, or in pieces beside slot 2. */
static char *play_alone(const struct kern_rule *rule, bool alone, size_t *size) {
    struct pair p = open_pair(shapes[0], 4096, 7);
    const struct kern_evict due[] = {{.slot = 2, .tokens = 25, .keep = 12, .rule = rule},
                                     {.slot = 1, .tokens = 40, .keep = 20, .rule = rule}};
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
    static const char *const names[] = {"h2o", "d2o", "gkv", "rkv", "cake", "kvcompress"};
    for (int i = 0; i < 6; i++) {
        struct method method = {names[i], as_it_is};
        struct kern_rule rule = rule_of(&method, 12);
        size_t size[2];
        char *bytes[2];
        for (int k = 0; k < 2; k++) bytes[k] = play_alone(&rule, k == 0, &size[k]);
        cr_assert(size[0] == size[1], "%s", names[i]);
        cr_assert(memcmp(bytes[0], bytes[1], size[0]) == 0, "%s", names[i]);
        for (int k = 0; k < 2; k++) free(bytes[k]);
    }
}

/* A fork takes its memory along, and neither writes what the other reads: mass goes into every
 * page, remembered scores into those that stay, merging into all. */
Test(emu_policy, forks) {
    static const char *const names[] = {"d2o", "gkv", "cake", "ems"};
    for (int i = 0; i < 4; i++) {
        struct method method = {names[i], i == 3 ? loose : as_it_is};
        struct kern_rule rule = rule_of(&method, 24);
        struct pair p = open_pair(shapes[1], 8192, (uint64_t)(60 + i));
        for (int slot = 0; slot < 2; slot++) turn_slot(&p, slot, &rule);
        struct kern_span span = {.slot = 1, .count = 50, .rule = &rule};
        struct kern_evict due[] = {{.slot = 1, .tokens = 50, .keep = 24, .rule = &rule},
                                   {.slot = 0, .tokens = 52, .keep = 24, .rule = &rule}};
        feed(&p, &span, 1, names[i]);
        evict(&p, due, 1, names[i]);
        for (int b = 0; b < BACKENDS; b++) MUST(p.kern[b]->ops->fork(p.kern[b], 1, 0));
        struct kern_span both[] = {{.slot = 0, .count = 2, .pos = 50, .rule = &rule},
                                   {.slot = 1, .row = 2, .count = 1, .pos = 50, .rule = &rule}};
        feed(&p, both, 2, names[i]);
        due[0].tokens = 51;
        evict(&p, due, 2, names[i]);
        for (int b = 0; b < BACKENDS; b++) p.kern[b]->ops->release(p.kern[b], 0);
        expect_same_held(p.kern, 1, streams_of(&p), names[i]);
        both_close(p.kern);
    }
}

/* Pages for what a step or an eviction writes are missing: both say so, and change nothing. */
Test(emu_policy, a_full_pool) {
    static const char *const names[] = {"h2o", "gkv", "d2o", "ems"};
    const struct kern_cache_options shape = {
        .layers = 1, .heads_q = 2, .heads_kv = 2, .head_dim = 256};
    int full = 0;
    for (int i = 0; i < 4; i++)
        for (int pages = 7; pages <= 15; pages += 2) {
            struct method method = {names[i], i == 3 ? loose : as_it_is};
            struct kern_rule rule = rule_of(&method, 20);
            struct pair p = open_pair(shape, 8 * pages, 5);
            turn_slot(&p, 1, &rule);
            struct kern_span span = {.slot = 1, .count = 24, .rule = &rule};
            struct kern_span more = {.slot = 1, .count = 1, .pos = 24, .rule = &rule};
            struct kern_batch batch = {.spans = &more, .span_count = 1, .rows = 1};
            struct kern_evict due = {.slot = 1, .tokens = 24, .keep = 20, .rule = &rule};
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

/* A conversation comes back with its queries, scores, weights and thresholds, on either side. */
Test(emu_policy, snapshots) {
    static const char *const names[] = {"cake", "d2o", "gkv", "ems"};
    for (int i = 0; i < 4; i++) {
        struct method method = {names[i], i == 3 ? loose : as_it_is};
        struct kern_rule rule = rule_of(&method, 24);
        struct pair p = open_pair(shapes[2], 8192, (uint64_t)(80 + i));
        turn_slot(&p, 3, &rule);
        struct kern_block blocks[1 + 64] = {0};
        struct fault fault = {0};
        int count = 1 + streams_of(&p);
        play_one(&p, 1, &rule, 24, (const int[]){40}, 1, names[i]);
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
        struct kern_evict due = {.slot = 3, .tokens = 45, .keep = 24, .rule = &rule};
        size_t size;
        char *again = block_of(p.kern[EMULATED], 3, 0, &size);
        cr_assert(size == blocks[0].size && memcmp(again, blocks[0].data, size) == 0, "%s",
                  names[i]);
        free(again);
        feed(&p, &span, 1, names[i]);
        evict(&p, &due, 1, names[i]);
        for (int k = 0; k < count; k++) free((void *)(uintptr_t)blocks[k].data);
        both_close(p.kern);
    }
}

/* ---- Classes ----------------------------------------------------------------------------------
 */

/* Members of a slot, all streams, from its blocks. */
static int count_members(struct pair *p, struct kern *kern, int slot) {
    int count = 0;
    for (int stream = 0; stream < streams_of(p); stream++) {
        size_t size;
        int32_t length, members = 0;
        char *bytes = block_of(kern, slot, 1 + stream, &size);
        memcpy(&length, bytes, sizeof length);
        size_t end = 4 + (size_t)length * (12 + 4 * (size_t)p->options.head_dim);
        if (size > end) memcpy(&members, bytes + end, sizeof members);
        count += members;
        free(bytes);
    }
    return count;
}

/* Slot 1 has classes and sees 40 tokens more: alone at once, or in pieces beside slot 2, which has
 * classes of its own; then it evicts again. Its answers of those tokens, the caller's. */
static float *play_classes(struct pair *p, const struct kern_rule *rule, bool alone) {
    static const int pieces[] = {40, 0, 7, 1, 31, 1};
    struct kern *kern = p->kern[EMULATED];
    size_t row = (size_t)(p->options.heads_q * p->options.head_dim);
    size_t layers = (size_t)p->options.layers;
    float *answers = malloc(layers * 40 * row * sizeof *answers);
    struct kern_evict due[] = {{.slot = 2, .tokens = 50, .keep = 24, .rule = rule},
                               {.slot = 1, .tokens = 60, .keep = 24, .rule = rule}};
    emu_set_seed(alone ? 3 : 8);
    for (int slot = 1; slot < 3; slot++) {
        struct kern_span span = {.slot = slot, .count = slot == 1 ? 60 : 50, .rule = rule};
        struct kern_batch batch = {.spans = &span, .span_count = 1, .rows = span.count};
        free(run_step(p, kern, &batch));
    }
    MUST(kern->ops->evict(kern, due, 2));
    for (int i = alone ? 0 : 2, done = 0, other = 50; done < 40; i++) {
        int beside = alone ? 0 : 1 + i % 2 * 4;
        struct kern_span spans[] = {
            {.slot = 2, .count = beside, .pos = other, .rule = rule},
            {.slot = 1, .row = beside, .count = pieces[i], .pos = 60 + done, .rule = rule}};
        struct kern_batch batch = {
            .spans = spans + alone, .span_count = 2 - alone, .rows = beside + pieces[i]};
        float *out = run_step(p, kern, &batch);
        for (size_t layer = 0; layer < layers; layer++)
            memcpy(answers + (layer * 40 + (size_t)done) * row,
                   out + (layer * (size_t)batch.rows + (size_t)beside) * row,
                   (size_t)pieces[i] * row * sizeof *out);
        free(out);
        done += pieces[i];
        other += beside;
    }
    due[1].tokens = 100;
    due[0].tokens = alone ? 50 : 62;
    MUST(kern->ops->evict(kern, due, 2));
    return answers;
}

/* Bitwise the same answers and the same state, in pieces and in company. */
Test(emu_policy, classes_depend_on_their_sequence_alone) {
    struct method method = {"ems", loose};
    struct kern_rule rule = rule_of(&method, 24);
    char *bytes[2];
    float *answers[2];
    size_t size[2], count = 0;
    for (int k = 0; k < 2; k++) {
        struct pair p = open_pair(shapes[0], 4096, 7);
        for (int slot = 1; slot < 3; slot++) turn_slot(&p, slot, &rule);
        answers[k] = play_classes(&p, &rule, k == 0);
        bytes[k] = bytes_of(&p, p.kern[EMULATED], 1, &size[k]);
        count = (size_t)(p.options.layers * 40 * p.options.heads_q * p.options.head_dim);
        cr_assert_gt(count_members(&p, p.kern[EMULATED], 1), 10);
        both_close(p.kern);
    }
    cr_assert(memcmp(answers[0], answers[1], count * sizeof **answers) == 0);
    cr_assert(size[0] == size[1] && memcmp(bytes[0], bytes[1], size[0]) == 0);
    for (int k = 0; k < 2; k++) {
        free(bytes[k]);
        free(answers[k]);
    }
}

/* Dropping tokens drops members of other classes, too; a fork that shares their pages keeps its
 * own. What is left goes on. */
Test(emu_policy, classes_lose_dropped_tokens) {
    struct method method = {"ems", loose};
    struct kern_rule rule = rule_of(&method, 24);
    struct pair p = open_pair(shapes[0], 8192, 15);
    play_one(&p, 1, &rule, 24, (const int[]){60, 30}, 2, "dropped");
    turn_slot(&p, 0, &rule);
    int before = count_members(&p, p.kern[EMULATED], 1);
    for (int b = 0; b < BACKENDS; b++) {
        MUST(p.kern[b]->ops->fork(p.kern[b], 1, 0));
        MUST(p.kern[b]->ops->truncate(p.kern[b], 1, 40));
    }
    int after = count_members(&p, p.kern[EMULATED], 1);
    cr_assert(after > 0 && after < before, "%d of %d", after, before);
    cr_assert_eq(count_members(&p, p.kern[EMULATED], 0), before);
    for (int slot = 0; slot < 2; slot++) {
        struct kern_span span = {
            .slot = slot, .count = 9, .pos = slot == 1 ? 40 : 90, .rule = &rule};
        struct kern_evict due = {.slot = slot, .tokens = span.pos + 9, .keep = 24, .rule = &rule};
        expect_same_held(p.kern, slot, streams_of(&p), "dropped");
        feed(&p, &span, 1, "dropped");
        evict(&p, &due, 1, "dropped");
    }
    for (int b = 0; b < BACKENDS; b++)
        for (int slot = 0; slot < 2; slot++) {
            struct kern_cache_stats stats;
            p.kern[b]->ops->release(p.kern[b], slot);
            p.kern[b]->ops->cache_stats(p.kern[b], &stats);
            cr_assert(slot == 0 || stats.pages_used == 0, "%s", p.kern[b]->ops->name);
        }
    both_close(p.kern);
}

/* Members that come with a snapshot are forgotten by a rule without classes, and their pages go. */
Test(emu_policy, classes_under_another_rule) {
    struct method method = {"ems", loose}, other = {"h2o", as_it_is};
    struct kern_rule rule = rule_of(&method, 24), plain = rule_of(&other, 24);
    struct pair p = open_pair(shapes[0], 8192, 16);
    struct kern_block blocks[8] = {0};
    int count = 1 + streams_of(&p);
    play_one(&p, 1, &rule, 24, (const int[]){60}, 1, "another");
    for (int k = 0; k < count; k++)
        blocks[k].data = block_of(p.kern[EMULATED], 1, k, &blocks[k].size);
    for (int b = 0; b < BACKENDS; b++)
        for (int k = 0; k < count; k++)
            MUST(p.kern[b]->ops->snapshot_import(p.kern[b], 3, k, &blocks[k]));
    expect_same_held(p.kern, 3, streams_of(&p), "another");
    cr_assert_gt(count_members(&p, p.kern[EMULATED], 3), 0);
    struct kern_span span = {.slot = 3, .count = 2, .pos = 60, .rule = &plain};
    feed(&p, &span, 1, "another");
    expect_same_held(p.kern, 3, streams_of(&p), "another");
    cr_assert_eq(count_members(&p, p.kern[EMULATED], 3), 0);
    for (int k = 0; k < count; k++) free((void *)(uintptr_t)blocks[k].data);
    both_close(p.kern);
}

/* More members than a page holds: rows grow, are copied and cut across pages. */
Test(emu_policy, classes_of_several_pages) {
    const struct kern_cache_options shape = {
        .layers = 1, .heads_q = 1, .heads_kv = 1, .head_dim = 64};
    struct method method = {"ems", loose};
    struct kern_rule rule = rule_of(&method, 48);
    struct pair p = open_pair(shape, 4096, 21);
    struct kern_span span = {.slot = 0, .count = 9, .pos = 780, .rule = &rule};
    struct kern_evict due = {.slot = 0, .tokens = 789, .keep = 48, .rule = &rule};
    rule.classes.gamma = 16;
    rule.classes.tau = 0;
    play_one(&p, 1, &rule, 48, (const int[]){130, 130, 130, 130, 130, 130}, 6, "pages");
    cr_assert_gt(count_members(&p, p.kern[EMULATED], 1), 690);
    turn_slot(&p, 0, &rule);
    for (int b = 0; b < BACKENDS; b++) MUST(p.kern[b]->ops->fork(p.kern[b], 1, 0));
    feed(&p, &span, 1, "pages");
    evict(&p, &due, 1, "pages");
    for (int b = 0; b < BACKENDS; b++) MUST(p.kern[b]->ops->truncate(p.kern[b], 1, 500));
    cr_assert_lt(count_members(&p, p.kern[EMULATED], 1), 500);
    for (int slot = 0; slot < 2; slot++) expect_same_held(p.kern, slot, 1, "pages");
    expect_same_entries(&p, 1, true, "pages");
    both_close(p.kern);
}

/* ---- A sliding window -------------------------------------------------------------------------
 */

/* What is added up is the attention of the layer: keys behind its window get none. */
Test(emu_policy, mass_ends_with_the_window) {
    static const struct method adders[] = {{"h2o", as_it_is}, {"d2o", as_it_is}, {"ems", loose}};
    for (int i = 0; i < 3; i++) {
        struct kern_rule rule = rule_of(&adders[i], 40);
        struct pair p = open_pair(shapes[0], 8192, (uint64_t)(90 + i));
        p.window = 12;
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
                      "%s: %g after %g, far behind the window", p.kern[b]->ops->name,
                      (double)first[b][1], (double)first[b][0]);
        both_close(p.kern);
    }
}
