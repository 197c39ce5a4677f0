/* Every bounded policy and its variants on the device beside the CPU's reference path: the same
 * tokens in the same batches, the same evictions; what is kept, what it remembers and what merging
 * made of it agree. Keys come in families, so that there are look-alikes; queries ask for keys, so
 * that attention is uneven. Activations are bf16 numbers: both sides multiply the same ones. */
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
};

static struct pair open_pair(struct kern_cache_options shape, int64_t entries, uint64_t seed) {
    struct pair p = {.options = shape, .seed = seed};
    p.options.dtype = KERN_BF16;
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

/* One row of qkv: the queries want a family that changes with the position and the head. */
static void make_row(const struct pair *p, int slot, int layer, int pos, float *row) {
    const struct kern_cache_options *o = &p->options;
    int heads = o->heads_q + 2 * o->heads_kv, key = family_at(p, slot, layer, pos);
    for (int h = 0; h < heads; h++) {
        bool query = h < o->heads_q, value = h >= o->heads_q + o->heads_kv;
        int which = query ? (key + h + pos / 3) % FAMILIES : (key + (h - o->heads_q)) % FAMILIES;
        uint64_t place = (uint64_t)(((slot * POSITIONS + pos) * 8 + layer) * 64 + h);
        for (int d = 0; d < o->head_dim; d++) {
            float own = noise(p->seed + 17, place * 256 + (uint64_t)d);
            float x = value ? own : family(p, layer, which, d) * 0.8f + own * (query ? 1 : 0.5f);
            row[h * o->head_dim + d] = number_from_bf16(number_to_bf16(x));
        }
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
    const struct kern_attend_options attend = {.scale = 1 / sqrtf((float)o->head_dim)};
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

/* Scores, where the rule has any, and keys and values within two bf16 roundings: a sum that is
 * rounded once. */
static void expect_same_entries(struct pair *p, int slot, bool scored, const char *what) {
    int dim = p->options.head_dim;
    for (int stream = 0; stream < streams_of(p); stream++) {
        size_t size[BACKENDS];
        char *bytes[BACKENDS];
        for (int b = 0; b < BACKENDS; b++)
            bytes[b] = block_of(p->kern[b], slot, 1 + stream, &size[b]);
        cr_assert(size[ORACLE] == size[EMULATED], "%s: stream %d", what, stream);
        int32_t length;
        memcpy(&length, bytes[ORACLE], sizeof length);
        const float *scores[BACKENDS];
        const uint16_t *rows[BACKENDS];
        for (int b = 0; b < BACKENDS; b++) {
            scores[b] = (const float *)(bytes[b] + 4) + 2 * (size_t)length;
            rows[b] = (const uint16_t *)(scores[b] + length);
        }
        if (scored) expect_near(scores[ORACLE], scores[EMULATED], (size_t)length, 1e-6, 2e-4, what);
        for (int i = 0; i < 2 * length * dim; i++) {
            float x = number_from_bf16(rows[ORACLE][i]), y = number_from_bf16(rows[EMULATED][i]);
            cr_assert(fabsf(x - y) <= fabsf(x) / 128 + 1e-6f, "%s: stream %d number %d: %g, not %g",
                      what, stream, i, (double)y, (double)x);
        }
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

static void play(const struct method *a, const struct method *b, int index) {
    const int budget = 48;
    const struct kern_rule rules[2] = {rule_of(a, budget), rule_of(b, budget)};
    struct pair p = open_pair(shapes[index % 3], 8192, (uint64_t)(index + 1));
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
                .slot = 1 + i, .tokens = tokens[i], .keep = budget, .rule = &rules[i]};
        }
        feed(&p, spans, 2, what);
        evict(&p, due, 2, what);
    }
    both_close(p.kern);
}

/* Every method is the first of a pair once and the second once. */
Test(emu_policy, methods_side_by_side) {
    for (int i = 0; i < METHODS; i++) play(&methods[i], &methods[(i + 7) % METHODS], i);
}
