/* For tests of policies: sequences played to the CPU's reference path and to the emulated device
 * alike, and what must agree afterwards. Keys come in families, so that there are look-alikes;
 * queries ask for keys, so that attention is uneven. Activations are bf16 numbers, queries of
 * rotated pages once they are rotated, and narrower pages are rounded alike: both sides multiply
 * the same ones. */
#ifndef KEEPD_TESTS_EMU_PLAY_H
#define KEEPD_TESTS_EMU_PLAY_H

#include "both.h"
#include "kernels/number.h"
#include "kernels/row.h"
#include "paging/policy.h"

#define SLOTS     4
#define POSITIONS 1400
#define FAMILIES  9

struct pair {
    struct kern *kern[BACKENDS];
    struct kern_cache_options options;
    uint64_t seed;
    int sliding_window;         /* 0: none */
    float cap;                  /* soft cap; 0: none */
    float *sinks[BACKENDS];     /* learned sinks, per backend; NULL: none */
    struct kern_given together; /* rows of a step that see each other; count 0: none do */
};

static inline struct pair open_pair(struct kern_cache_options shape, int64_t entries,
                                    uint64_t seed) {
    struct pair p = {.options = shape, .seed = seed};
    if (p.options.dtype == KERN_F32) p.options.dtype = KERN_BF16;
    p.options.slots = SLOTS;
    p.options.max_positions = POSITIONS;
    emu_set_seed(seed);
    both_open(p.kern);
    both_cache(p.kern, p.options, entries);
    return p;
}

static inline int streams_of(const struct pair *p) {
    return (int)kern_streams(&p->options);
}

/* Numbers of a row of queries of a layer, and of a whole row. */
static inline int query_width(const struct pair *p, int layer) {
    return p->options.heads_q * kern_heads_of(&p->options, layer).dim;
}

static inline int row_width(const struct pair *p, int layer) {
    const struct kern_heads heads = kern_heads_of(&p->options, layer);
    return (p->options.heads_q + 2 * heads.kv) * heads.dim;
}

/* Numbers of a row's outputs of all layers. */
static inline size_t all_outputs(const struct pair *p) {
    int all = 0;
    for (int layer = 0; layer < p->options.layers; layer++) all += query_width(p, layer);
    return (size_t)all;
}

/* The numbers of a stream's keys. */
static inline int stream_dim(const struct pair *p, int stream) {
    int layer = 0;
    for (; stream >= kern_heads_of(&p->options, layer).kv; layer++)
        stream -= kern_heads_of(&p->options, layer).kv;
    return kern_heads_of(&p->options, layer).dim;
}

/* ---- Feeding ---- */

/* Dimension d of a family of keys. */
static inline float family(const struct pair *p, int layer, int which, int d) {
    return noise(p->seed * 31 + (uint64_t)(layer * FAMILIES + which), (uint64_t)d);
}

static inline int family_at(const struct pair *p, int slot, int layer, int pos) {
    return (int)(mix(p->seed + (uint64_t)(slot * 7919 + layer * 104729 + pos)) % FAMILIES);
}

/* One row of qkv: the queries want a family that changes with the position and the head. */
static inline void make_row(const struct pair *p, int slot, int layer, int pos, float *row) {
    const struct kern_cache_options *o = &p->options;
    const int heads_kv = kern_heads_of(o, layer).kv, dim = kern_heads_of(o, layer).dim;
    int heads = o->heads_q + 2 * heads_kv, key = family_at(p, slot, layer, pos);
    for (int h = 0; h < heads; h++) {
        bool query = h < o->heads_q, value = h >= o->heads_q + heads_kv;
        int which = query ? (key + h + pos / 3) % FAMILIES : (key + (h - o->heads_q)) % FAMILIES;
        uint64_t place = (uint64_t)(((slot * POSITIONS + pos) * 8 + layer) * 64 + h);
        float part = query ? 1 : 0.5f, *x = row + h * dim;
        for (int d = 0; d < dim; d++) {
            float own = noise(p->seed + 17, place * 256 + (uint64_t)d);
            x[d] = value ? own : family(p, layer, which, d) * 0.8f + own * part;
        }
        const bool scaled = query && row_scaled(o->dtype);
        if (scaled) row_rotate(x, dim);
        for (int d = 0; d < dim; d++) x[d] = number_from_bf16(number_to_bf16(x[d]));
        if (scaled) row_rotate(x, dim);
    }
}

/* log_beta of a head at a position. */
static inline float gate_at(const struct pair *p, int slot, int layer, int pos, int head) {
    uint64_t place = (uint64_t)(((slot * POSITIONS + pos) * 8 + layer) * 64 + head);
    return -expf(6 * noise(p->seed + 99, place) - 5);
}

struct layer_rows {
    float *qkv, *gates;
};

static inline struct layer_rows make_layer(const struct pair *p, const struct kern_batch *batch,
                                           int layer) {
    const int stride = row_width(p, layer), heads = kern_heads_of(&p->options, layer).kv;
    struct layer_rows rows = {.qkv = malloc((size_t)(batch->rows * stride) * sizeof(float)),
                              .gates = malloc((size_t)(batch->rows * heads) * sizeof(float))};
    for (int i = 0; i < batch->span_count; i++) {
        const struct kern_span *s = &batch->spans[i];
        for (int k = 0; k < s->count; k++) {
            make_row(p, s->slot, layer, s->pos + k, rows.qkv + (s->row + k) * stride);
            for (int h = 0; h < heads; h++)
                rows.gates[(s->row + k) * heads + h] = gate_at(p, s->slot, layer, s->pos + k, h);
        }
    }
    return rows;
}

/* A step of all spans on one backend; -> attention's output of every layer, the caller's. */
static inline float *run_step(struct pair *p, struct kern *kern, const struct kern_batch *batch) {
    const struct kern_cache_options *o = &p->options;
    const struct kern_attend_options attend = {.sliding_window = p->sliding_window,
                                               .scale = 1 / sqrtf((float)o->head_dim),
                                               .cap = p->cap,
                                               .sinks = p->sinks[kern == p->kern[EMULATED]]};
    float *all = malloc((size_t)batch->rows * all_outputs(p) * sizeof *all), *to = all;
    MUST(kern->ops->begin_step(kern, batch));
    for (int layer = 0; layer < o->layers; layer++) {
        const size_t out_size = (size_t)(batch->rows * query_width(p, layer));
        struct layer_rows rows = make_layer(p, batch, layer);
        float *qkv = put(kern, rows.qkv, (size_t)(batch->rows * row_width(p, layer)));
        float *gates = put(kern, rows.gates, (size_t)(batch->rows * kern_heads_of(o, layer).kv));
        float *out = put(kern, NULL, out_size);
        kern->ops->write_kv(kern, layer, qkv, gates, batch);
        kern->ops->attend(kern, layer, out, qkv, batch, &attend);
        float *got = take(kern, out, out_size);
        memcpy(to, got, out_size * sizeof *all);
        to += out_size;
        free(got);
        kern->ops->mem_free(kern, qkv);
        kern->ops->mem_free(kern, gates);
        free(rows.qkv);
        free(rows.gates);
    }
    return all;
}

/* The next `count` tokens of the slots in one batch. Attention reads what is held, so its answers
 * agree only if keys and values do. */
static inline void feed(struct pair *p, const struct kern_span *spans, int span_count,
                        const char *what) {
    struct kern_batch batch = {.spans = spans,
                               .span_count = span_count,
                               .given = &p->together,
                               .given_count = p->together.count > 0};
    float *out[BACKENDS];
    for (int i = 0; i < span_count; i++) batch.rows += spans[i].count;
    for (int b = 0; b < BACKENDS; b++) out[b] = run_step(p, p->kern[b], &batch);
    expect_near(out[ORACLE], out[EMULATED], (size_t)batch.rows * all_outputs(p), 0.02, 0.01, what);
    for (int b = 0; b < BACKENDS; b++) free(out[b]);
}

/* ---- Comparing ---- */

/* Bytes of a slot's block. */
static inline char *block_of(struct kern *kern, int slot, int block, size_t *size) {
    *size = kern->ops->snapshot_size(kern, slot, block);
    cr_assert(*size > 0);
    char *bytes = malloc(*size);
    MUST(kern->ops->snapshot_export(kern, slot, block, bytes));
    return bytes;
}

/* Number `at` of the keys, then values, of a stream of `length` entries of `dim` numbers, and the
 * distance of codes. */
static inline float number_of(const struct pair *p, const char *rows, int32_t length, int dim,
                              int at, float *step) {
    const struct kern_cache_options *o = &p->options;
    int row = at / dim, d = at % dim;
    size_t bytes = row_code_bytes(o->dtype, dim);
    *step = 0;
    if (!row_scaled(o->dtype))
        return number_element(rows + (size_t)at * kern_dtype_bytes(o->dtype), o->dtype);
    uint16_t factor;
    memcpy(&factor, rows + 2 * (size_t)length * bytes + (size_t)row * sizeof factor, sizeof factor);
    *step = number_from_bf16(factor);
    return *step * (float)row_level(rows + (size_t)row * bytes, d, o->dtype);
}

/* Scores, where the rule has any, and keys and values, which the two sides round alike up to one
 * step. */
static inline void expect_same_entries(struct pair *p, int slot, bool scored, const char *what) {
    enum kern_dtype dtype = p->options.dtype;
    float step = dtype == KERN_E4M3 ? 1.0f / 8 : 1.0f / 128;
    for (int stream = 0; stream < streams_of(p); stream++) {
        const int dim = stream_dim(p, stream);
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
            float codes, x = number_of(p, rows[ORACLE], length, dim, i, &codes),
                         y = number_of(p, rows[EMULATED], length, dim, i, &codes);
            cr_assert(fabsf(x - y) <= fabsf(x) * step + 2 * codes + 1e-3f,
                      "%s: stream %d number %d: %g, not %g", what, stream, i, (double)y, (double)x);
        }
        for (int b = 0; b < BACKENDS; b++) free(bytes[b]);
    }
}

static inline void evict(struct pair *p, const struct kern_evict *due, int count,
                         const char *what) {
    for (int b = 0; b < BACKENDS; b++) {
        MUST(p->kern[b]->ops->evict(p->kern[b], due, count));
        MUST(p->kern[b]->ops->sync(p->kern[b]));
    }
    for (int i = 0; i < count; i++) {
        expect_same_held(p->kern, due[i].slot, streams_of(p), what);
        expect_same_entries(p, due[i].slot, due[i].rule->score == KERN_SCORE_ATTENTION, what);
    }
}

/* ---- Methods ---- */

/* A policy's rule, changed. */
struct method {
    const char *policy;
    void (*change)(struct kern_rule *rule);
};

static inline void as_it_is(struct kern_rule *rule) {
    (void)rule;
}

static inline struct kern_rule rule_of(const struct method *m, int budget) {
    struct kv_params params = {.budget = budget, .buffer = 16, .chunk = 64};
    kv_params_set_policy(&params, policy_find(m->policy));
    kv_params_fit(&params, 0);
    m->change(&params.rule);
    return params.rule;
}

/* ---- Sequences ---- */

static const struct kern_cache_options shapes[] = {
    {.layers = 2, .heads_q = 4, .heads_kv = 2, .head_dim = 64},
    {.layers = 2, .heads_q = 3, .heads_kv = 3, .head_dim = 64},
    {.layers = 3, .heads_q = 6, .heads_kv = 2, .head_dim = 128},
};

/* Layers that differ in heads: in their number and size, and those of Gemma 4's sizes. */
static const struct kern_heads uneven_heads[] = {{2, 64}, {1, 128}, {2, 64}},
                               wide_heads[] = {{2, 256}, {1, 512}};
static const struct kern_cache_options uneven_shapes[] = {
    {.layers = 3, .heads_q = 4, .heads_kv = 2, .head_dim = 128, .heads = uneven_heads},
    {.layers = 2, .heads_q = 2, .heads_kv = 2, .head_dim = 512, .heads = wide_heads},
};

/* One sequence in uneven pieces with an eviction after each. */
static inline void play_one(struct pair *p, int slot, const struct kern_rule *rule, int keep,
                            const int *counts, int count, const char *what) {
    int32_t tokens = 0;
    for (int i = 0; i < count; i++) {
        struct kern_span span = {.slot = slot, .count = counts[i], .pos = tokens, .rule = rule};
        feed(p, &span, 1, what);
        tokens += counts[i];
        struct kern_evict due = {.slot = slot, .tokens = tokens, .budget = keep, .rule = rule};
        evict(p, &due, 1, what);
    }
}

/* Returns a slot's content, all blocks one after the other; the caller frees it. */
static inline char *bytes_of(struct pair *p, struct kern *kern, int slot, size_t *size) {
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

#endif
