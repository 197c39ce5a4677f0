/* Attention over the paged cache, on every path: against double arithmetic, and the promise that a
 * token's output does not depend on how its prompt was split over steps nor on who shares them. */
#include <criterion/criterion.h>

#include "paths.h"
#include "tests/sample.h"

#define MUST(rc) cr_assert_eq((rc), 0)

struct shape {
    int head_dim, heads_q, heads_kv, sliding_window;
    enum kern_dtype dtype;
    bool sinks;
    float cap;
};

static const struct shape shapes[] = {
    {16, 4, 2, 0, KERN_F32, false, 0},   {16, 2, 2, 0, KERN_BF16, false, 0},
    {32, 4, 2, 0, KERN_BF16, false, 0},  {64, 8, 4, 0, KERN_BF16, false, 0},
    {64, 14, 2, 0, KERN_BF16, false, 0}, {64, 4, 4, 0, KERN_F32, false, 0},
    {80, 4, 2, 0, KERN_BF16, false, 0},  {80, 4, 2, 0, KERN_F32, false, 0},
    {128, 4, 2, 0, KERN_BF16, false, 0}, {128, 4, 2, 0, KERN_F32, false, 0},
    {128, 8, 1, 0, KERN_BF16, false, 0}, {6, 2, 1, 0, KERN_BF16, false, 0},
    {64, 4, 2, 37, KERN_BF16, false, 0}, {64, 4, 2, 37, KERN_F32, false, 0},
    {128, 4, 2, 1, KERN_BF16, false, 0}, {256, 2, 1, 0, KERN_BF16, false, 0},
    {256, 2, 1, 5, KERN_F32, false, 0},  {32, 4, 2, 0, KERN_E4M3, false, 0},
    {64, 14, 2, 0, KERN_E4M3, false, 0}, {128, 8, 1, 0, KERN_E4M3, false, 0},
    {80, 4, 2, 0, KERN_E4M3, false, 0},  {6, 2, 1, 0, KERN_E4M3, false, 0},
    {64, 4, 2, 37, KERN_E4M3, false, 0}, {64, 9, 3, 0, KERN_ROW8, false, 0},
    {128, 4, 2, 0, KERN_ROW8, false, 0}, {80, 4, 2, 37, KERN_ROW8, false, 0},
    {20, 2, 1, 0, KERN_ROW8, true, 0},   {64, 9, 3, 37, KERN_ROW4, false, 0},
    {128, 8, 1, 0, KERN_ROW4, true, 0},  {96, 4, 2, 0, KERN_ROW4, false, 0},
    {256, 2, 1, 5, KERN_ROW4, false, 0}, {6, 2, 1, 0, KERN_ROW4, false, 0},
    {64, 8, 2, 37, KERN_BF16, true, 0},  {64, 8, 4, 0, KERN_F32, true, 0},
    {96, 6, 2, 0, KERN_BF16, true, 0},   {80, 6, 1, 5, KERN_BF16, true, 0},
    {64, 4, 2, 0, KERN_BF16, true, 3},   {128, 4, 2, 37, KERN_BF16, false, 2},
    {64, 4, 2, 0, KERN_F32, false, 3},
};

/* One for each query head, some above all logits. */
static const float sink_table[8] = {1, -3, 12, 0, 2.5f, -60, 40, 5};

#define SHAPE_COUNT (sizeof shapes / sizeof *shapes)
#define LAYERS      2
#define TOKENS      300

/* The content of sequence `slot` at a position of a layer: one table per shape, made once. */
static const struct shape *table_shape;
static float *table;  /* [2 slots][LAYERS][TOKENS][stride] */
static float *stored; /* the same keys and values, as the cache rounds them */

static int stride_of(const struct shape *s) {
    return (s->heads_q + 2 * s->heads_kv) * s->head_dim;
}

/* To the cache's format and back. */
static void round_row(const struct shape *s, float *x) {
    char row[256 * sizeof *x];
    uint16_t factor;
    if (!row_scaled(s->dtype)) {
        number_write_row(row, x, s->head_dim, s->dtype);
        number_read_row(x, row, s->head_dim, s->dtype);
        return;
    }
    row_rotate(x, s->head_dim);
    row_write(row, &factor, x, s->head_dim, s->dtype);
    row_read(x, row, factor, s->head_dim, s->dtype);
    row_rotate(x, s->head_dim);
}

static void make_tables(const struct shape *s) {
    size_t stride = (size_t)stride_of(s), count = 2 * LAYERS * TOKENS * stride;
    free(table), free(stored);
    table = fresh(count, (uint64_t)(s - shapes) + 1);
    stored = malloc(count * sizeof *stored);
    for (size_t i = 0; i < count; i++) stored[i] = table[i] *= 2;
    for (size_t row = 0; row < count; row += stride)
        for (int head = s->heads_q; head < s->heads_q + 2 * s->heads_kv; head++)
            round_row(s, stored + row + (size_t)(head * s->head_dim));
    table_shape = s;
}

static size_t row_at(const struct shape *s, int slot, int layer, int pos) {
    if (table_shape != s) make_tables(s);
    return (size_t)((slot * LAYERS + layer) * TOKENS + pos) * (size_t)stride_of(s);
}

static const float *row_of(const struct shape *s, int slot, int layer, int pos) {
    size_t at = row_at(s, slot, layer, pos);
    return table + at;
}

static const float *stored_row(const struct shape *s, int slot, int layer, int pos) {
    size_t at = row_at(s, slot, layer, pos);
    return stored + at;
}

struct bench {
    struct kern *kern;
    const struct shape *shape;
    int stride, out_size;
    float *qkv, *out; /* buffers of one step */
    float *kept[2];   /* [slot]: outputs [LAYERS][TOKENS][out_size] */
    int spoiled;      /* keys and values of this position are not numbers; 0: none */
    bool both_ways;
    struct kern_given together; /* rows of a step that see each other; count 0: none do */
    int32_t seen_from, seen_to; /* positions of these rows, in slot 0 */
};

static bool bench_open(struct bench *b, int way, const struct shape *s) {
    *b = (struct bench){.kern = way_open(way, 1 + (int)(s - shapes) % 2), .shape = s};
    if (!b->kern) return false;
    struct kern_cache_options options = {.layers = LAYERS,
                                         .heads_q = s->heads_q,
                                         .heads_kv = s->heads_kv,
                                         .head_dim = s->head_dim,
                                         .dtype = s->dtype,
                                         .slots = 2,
                                         .max_positions = 2 * TOKENS};
    struct kern_cache_info info;
    b->kern->ops->cache_info(&options, &info);
    options.pages = 2 * LAYERS * s->heads_kv * (2 * TOKENS / info.page_slots + 1);
    MUST(b->kern->ops->cache_open(b->kern, &options, NULL));
    b->stride = stride_of(s);
    b->out_size = s->heads_q * s->head_dim;
    b->qkv = fresh((size_t)(2 * TOKENS * b->stride), 0);
    b->out = fresh((size_t)(2 * TOKENS * b->out_size), 0);
    for (int i = 0; i < 2; i++) b->kept[i] = fresh((size_t)(LAYERS * TOKENS * b->out_size), 0);
    return true;
}

static void bench_close(struct bench *b) {
    b->kern->ops->close(b->kern);
    free(b->qkv), free(b->out), free(b->kept[0]), free(b->kept[1]);
}

static void make_row(struct bench *b, const struct kern_span *span, int i, int layer) {
    float *row = b->qkv + (span->row + i) * b->stride;
    memcpy(row, row_of(b->shape, span->slot, layer, span->pos + i),
           (size_t)b->stride * sizeof *row);
    for (int j = b->out_size; j < b->stride && b->spoiled && span->pos + i == b->spoiled; j++)
        row[j] = j % 3 ? NAN : INFINITY;
}

/* One step of these spans; outputs go to `kept` by slot and position. */
static void step(struct bench *b, const struct kern_span *spans, int count) {
    const struct kern_ops *ops = b->kern->ops;
    struct kern_batch batch = {.spans = spans, .span_count = count};
    for (int s = 0; s < count; s++) batch.rows += spans[s].count;
    if (b->together.count) batch.given = &b->together, batch.given_count = 1;
    struct kern_attend_options options = {.sliding_window = b->shape->sliding_window,
                                          .scale = 1 / sqrtf((float)b->shape->head_dim),
                                          .cap = b->shape->cap,
                                          .both_ways = b->both_ways,
                                          .sinks = b->shape->sinks ? sink_table : NULL};
    MUST(ops->begin_step(b->kern, &batch));
    for (int layer = 0; layer < LAYERS; layer++) {
        for (int s = 0; s < count; s++)
            for (int i = 0; i < spans[s].count; i++) make_row(b, &spans[s], i, layer);
        ops->write_kv(b->kern, layer, b->qkv, NULL, &batch);
        ops->attend(b->kern, layer, b->out, b->qkv, &batch, &options);
        for (int s = 0; s < count; s++)
            memcpy(b->kept[spans[s].slot] + (layer * TOKENS + spans[s].pos) * b->out_size,
                   b->out + spans[s].row * b->out_size,
                   (size_t)(spans[s].count * b->out_size) * sizeof *b->out);
    }
    MUST(ops->sync(b->kern));
}

static void append(struct bench *b, int slot, int from, int to) {
    struct kern_span span = {.slot = slot, .row = 0, .count = to - from, .pos = from};
    step(b, &span, 1);
}

/* ---- Against double ---- */

/* Does this path round queries, in log2 units, and weights to bf16? Tiles also do with rows that
 * have factors, but after rotations. */
static bool rounds(const struct bench *b) {
    const struct shape *s = b->shape;
    if (!cpu_of(b->kern)->kernels->attention) return false;
    if (strncmp(b->kern->ops->name, "cpu-amx", strlen("cpu-amx"))) return s->dtype == KERN_BF16;
    return (s->dtype == KERN_BF16 || s->dtype == KERN_E4M3) &&
           (s->head_dim == 32 || s->head_dim == 64 || s->head_dim == 128);
}

/* A query's number as the path multiplies it, times the scale. */
static double query_number(const struct bench *b, float q) {
    const float scale = 1 / sqrtf((float)b->shape->head_dim), log2_e = 1.44269504f;
    if (!rounds(b)) return (double)q / sqrt(b->shape->head_dim);
    return (double)number_from_bf16(number_to_bf16(q * (scale * log2_e))) / M_LOG2E;
}

/* Positions `held` of a stream, all at most `pos` (the window is applied here). */
static void attend_exact(const struct bench *b, int slot, int layer, int head, int pos,
                         const int32_t *held, int count, double *out, double *reach) {
    const struct shape *s = b->shape;
    int d = s->head_dim, group = s->heads_q / s->heads_kv, kv = head / group;
    const double sink = s->sinks ? (double)sink_table[head] : -INFINITY;
    double weight[2 * TOKENS], most = sink;
    const float *q = row_of(s, slot, layer, pos);
    *reach = 0;
    for (int e = 0; e < count; e++) {
        double dot = 0, size = 0;
        const float *other = stored_row(s, slot, layer, held[e]);
        for (int i = 0; i < d; i++) {
            double p = query_number(b, q[head * d + i]) * (double)other[(s->heads_q + kv) * d + i];
            dot += p;
            size += fabs(p);
        }
        const int apart = pos - held[e], far = b->both_ways ? abs(apart) : apart;
        const bool together = slot == 0 && pos >= b->seen_from && pos < b->seen_to &&
                              held[e] >= b->seen_from && held[e] < b->seen_to;
        bool seen = (b->both_ways || together || apart >= 0) &&
                    (!s->sliding_window || far < s->sliding_window);
        if (s->cap > 0) dot = (double)s->cap * tanh(dot / (double)s->cap);
        weight[e] = seen ? dot : -INFINITY;
        most = fmax(most, weight[e]);
        *reach = fmax(*reach, size);
    }
    for (int i = 0; i < d; i++) out[i] = 0;
    double sum = exp(sink - most);
    for (int e = 0; e < count; e++) {
        double p = exp(weight[e] - most);
        sum += p;
        const float *other = stored_row(s, slot, layer, held[e]);
        for (int i = 0; i < d; i++)
            out[i] += p * (double)other[(s->heads_q + s->heads_kv + kv) * d + i];
    }
    for (int i = 0; i < d; i++) out[i] /= sum;
}

/* float32: a score is off by at most (d + 2) * 2^-24 of its reach, e^score by twice that, sums by
 * the same order; values are below 2. Weights in bf16 are off by 2^-9 of themselves. The tiles'
 * queries in bf16, of rows with factors, are not in `exact`. */
static double attend_bound(const struct bench *b, double reach) {
    const struct shape *s = b->shape;
    const bool tiles = !strncmp(b->kern->ops->name, "cpu-amx", strlen("cpu-amx"));
    double unit = 0x1p-24 * (s->head_dim + TOKENS);
    if (tiles && row_scaled(s->dtype)) unit += 0x1.1p-9;
    if (row_scaled(s->dtype)) unit = 2 * unit + 0x1p-15; /* rotations; queries of 16 bits */
    return 2 * 2 * unit * (1 + reach) + (rounds(b) ? 2 * 0x1p-9 : 0);
}

static void check_token(const struct bench *b, int slot, int layer, int pos, const int32_t *held,
                        int count) {
    double exact[256], reach;
    for (int head = 0; head < b->shape->heads_q; head++) {
        attend_exact(b, slot, layer, head, pos, held, count, exact, &reach);
        const float *got =
            b->kept[slot] + (layer * TOKENS + pos) * b->out_size + head * b->shape->head_dim;
        for (int i = 0; i < b->shape->head_dim; i++)
            cr_assert(fabs(got[i] - exact[i]) <= attend_bound(b, reach),
                      "%s D %d dtype %d window %d: layer %d pos %d head %d [%d]: %.8g not %.8g",
                      b->kern->ops->name, b->shape->head_dim, (int)b->shape->dtype,
                      b->shape->sliding_window, layer, pos, head, i, got[i], exact[i]);
    }
}

static void check_exact(int path, const struct shape *shape) {
    struct bench b;
    int32_t held[TOKENS];
    for (int i = 0; i < TOKENS; i++) held[i] = i;
    if (!bench_open(&b, path, shape)) return;
    append(&b, 0, 0, 130);
    append(&b, 1, 0, 1);
    struct kern_span both[] = {{.slot = 1, .row = 0, .count = 40, .pos = 1},
                               {.slot = 0, .row = 40, .count = 1, .pos = 130}};
    step(&b, both, 2);
    append(&b, 0, 131, 140);
    static const int some[] = {0, 1, 15, 16, 17, 63, 64, 100, 129, 130, 131, 139};
    for (int layer = 0; layer < LAYERS; layer++) {
        for (size_t i = 0; i < sizeof some / sizeof *some; i++)
            check_token(&b, 0, layer, some[i], held, some[i] + 1);
        check_token(&b, 1, layer, 0, held, 1);
        check_token(&b, 1, layer, 40, held, 41);
    }
    bench_close(&b);
}

/* A sample (tests/sample.h) has every path and every shape, with a part of each other: the code of
 * a path depends on the type of the cache, the size of heads and their number for one of keys, and
 * each of these is in several shapes. */
Test(attend, exact) {
    for (size_t i = 0; i < SHAPE_COUNT; i++)
        for (int path = 0; path < WAYS; path++)
            if (!test_leaves_out(i + (size_t)path, 3)) check_exact(path, &shapes[i]);
}

/* ---- Splits and company ---- */

static void same_as(const struct bench *b, int slot, const float *want, const char *what) {
    size_t size = (size_t)(LAYERS * TOKENS * b->out_size) * sizeof *want;
    cr_assert(!memcmp(b->kept[slot], want, size), "%s, D %d, dtype %d, window %d: %s",
              b->kern->ops->name, b->shape->head_dim, (int)b->shape->dtype,
              b->shape->sliding_window, what);
}

static void check_splits(int path, const struct shape *shape) {
    struct bench b;
    if (!bench_open(&b, path, shape)) return;
    size_t size = (size_t)(LAYERS * TOKENS * b.out_size);
    float *whole = fresh(size, 0);
    append(&b, 0, 0, TOKENS);
    memcpy(whole, b.kept[0], size * sizeof *whole);

    b.kern->ops->release(b.kern, 0);
    append(&b, 0, 0, 100);
    append(&b, 0, 100, TOKENS);
    same_as(&b, 0, whole, "100 + 200 is not 300");

    b.kern->ops->release(b.kern, 0);
    for (int pos = 0; pos < TOKENS; pos++) append(&b, 0, pos, pos + 1);
    same_as(&b, 0, whole, "one by one is not 300");

    b.kern->ops->release(b.kern, 0); /* with another sequence before it in every step */
    for (int pos = 0, n; pos < TOKENS; pos += n) {
        n = TOKENS - pos < 77 ? TOKENS - pos : 77;
        struct kern_span spans[] = {{.slot = 1, .row = 0, .count = n > 5 ? 5 : 1, .pos = pos},
                                    {.slot = 0, .row = n > 5 ? 5 : 1, .count = n, .pos = pos}};
        step(&b, spans, 2);
    }
    same_as(&b, 0, whole, "company changes it");
    free(whole);
    bench_close(&b);
}

Test(attend, splits) {
    for (size_t i = 0; i < SHAPE_COUNT; i++)
        for (int path = 0; path < WAYS; path++)
            if (!test_leaves_out(i + (size_t)path, 12)) check_splits(path, &shapes[i]);
}

/* ---- Both ways ---- */

/* Texts of one step each, alone and in company. */
static void check_both_ways(int path, const struct shape *shape) {
    struct bench b;
    int32_t held[TOKENS];
    for (int i = 0; i < TOKENS; i++) held[i] = i;
    if (!bench_open(&b, path, shape)) return;
    b.both_ways = true;
    const struct kern_span both[] = {{.slot = 1, .row = 0, .count = 41, .pos = 0},
                                     {.slot = 0, .row = 41, .count = 150, .pos = 0}};
    step(&b, both, 2);
    static const int some[] = {0, 1, 15, 16, 37, 63, 64, 100, 129, 148, 149};
    for (int layer = 0; layer < LAYERS; layer++) {
        for (size_t i = 0; i < sizeof some / sizeof *some; i++)
            check_token(&b, 0, layer, some[i], held, 150);
        check_token(&b, 1, layer, 0, held, 41);
        check_token(&b, 1, layer, 40, held, 41);
    }
    size_t size = (size_t)(LAYERS * TOKENS * b.out_size);
    float *company = fresh(size, 0);
    memcpy(company, b.kept[0], size * sizeof *company);
    b.kern->ops->release(b.kern, 0);
    append(&b, 0, 0, 150);
    same_as(&b, 0, company, "company changes a text that is read both ways");
    free(company);
    bench_close(&b);
}

Test(attend, both_ways) {
    for (size_t i = 0; i < SHAPE_COUNT; i++)
        for (int path = 0; path < WAYS; path++)
            if (!test_leaves_out(i + (size_t)path, 8)) check_both_ways(path, &shapes[i]);
}

/* ---- Rows that see each other ---- */

/* Rows 37 to 76 of a text see each other, in one step with rows around them and with another text's
 * in front; then the last 24 of them alone, as after a cut. */
static void check_together(int path, const struct shape *shape) {
    struct bench b;
    int32_t held[TOKENS];
    for (int i = 0; i < TOKENS; i++) held[i] = i;
    if (!bench_open(&b, path, shape)) return;
    const struct kern_span both[] = {{.slot = 1, .row = 0, .count = 41, .pos = 0},
                                     {.slot = 0, .row = 41, .count = 100, .pos = 20}};
    append(&b, 0, 0, 20);
    b.seen_from = 37, b.seen_to = 77;
    b.together = (struct kern_given){.row = 41 + 17, .count = 40, .together = true};
    step(&b, both, 2);
    static const int some[] = {0, 19, 20, 36, 37, 38, 52, 63, 64, 75, 76, 77, 119};
    for (int layer = 0; layer < LAYERS; layer++) {
        for (size_t i = 0; i < sizeof some / sizeof *some; i++)
            check_token(&b, 0, layer, some[i], held, 120);
        check_token(&b, 1, layer, 40, held, 41);
    }
    size_t size = (size_t)(LAYERS * TOKENS * b.out_size);
    float *whole = fresh(size, 0);
    memcpy(whole, b.kept[0], size * sizeof *whole);
    b.kern->ops->release(b.kern, 0);
    b.together.count = 0;
    append(&b, 0, 0, 30);
    b.together = (struct kern_given){.row = 7, .count = 40, .together = true};
    append(&b, 0, 30, 77);
    b.together.count = 0;
    append(&b, 0, 77, 120);
    same_as(&b, 0, whole, "other steps change rows that see each other");
    MUST(b.kern->ops->truncate(b.kern, 0, 53));
    b.together = (struct kern_given){.row = 0, .count = 24, .together = true};
    append(&b, 0, 53, 120);
    same_as(&b, 0, whole, "a cut changes rows that see each other");
    free(whole);
    bench_close(&b);
}

Test(attend, together) {
    for (size_t i = 0; i < SHAPE_COUNT; i++)
        for (int path = 0; path < WAYS; path++)
            if (!test_leaves_out(i + (size_t)path, 8)) check_together(path, &shapes[i]);
}

/* ---- After eviction ---- */

static void check_evicted(int path, const struct shape *shape) {
    struct bench b;
    if (!bench_open(&b, path, shape)) return;
    append(&b, 0, 0, 200);
    struct kern_rule rule = {.score = KERN_SCORE_RECENCY, .sinks = 4, .recent = 10};
    struct kern_evict due = {.slot = 0, .tokens = 200, .budget = 70, .rule = &rule};
    MUST(b.kern->ops->evict(b.kern, &due, 1));
    append(&b, 0, 200, 230);
    append(&b, 0, 230, 231);
    int streams = LAYERS * shape->heads_kv;
    int visible = shape->sliding_window ? shape->sliding_window - 1
                                        : TOKENS; /* the next query sees so many */
    int kept = visible < 70 ? visible : 70;
    int32_t lengths[16], positions[16 * 2 * TOKENS], held[2 * TOKENS];
    struct kern_report report = {
        .lengths = lengths, .positions = positions, .entries_max = 16 * 2 * TOKENS};
    MUST(b.kern->ops->report(b.kern, 0, &report));
    cr_assert_eq((int)report.entries, streams * (kept + 31));
    memcpy(held, positions, (size_t)lengths[0] * sizeof *held);
    for (int layer = 0; layer < LAYERS; layer++)
        for (int pos = 200; pos < 231; pos += 15) {
            int count = kept + pos - 200 + 1;
            check_token(&b, 0, layer, pos, held, count);
        }
    struct fault fault = {0};
    cr_assert_eq(b.kern->ops->cache_check(b.kern, &fault), 0, "%s", fault.text);
    bench_close(&b);
}

Test(attend, after_eviction) {
    for (size_t i = 0; i < SHAPE_COUNT; i++)
        for (int path = 0; path < WAYS; path++)
            if (!test_leaves_out(i + (size_t)path, 4)) check_evicted(path, &shapes[i]);
}

/* A page that comes back from a sequence full of NaN must not leak into the next one. */
Test(attend, stale_entries_do_not_count) {
    for (size_t i = 0; i < SHAPE_COUNT; i++) {
        for (int path = 0; path < WAYS; path++) {
            struct bench b;
            if (test_leaves_out(i + (size_t)path, 4) || !bench_open(&b, path, &shapes[i])) continue;
            struct kern_span span = {.slot = 1, .row = 0, .count = TOKENS, .pos = 0};
            struct kern_batch batch = {.spans = &span, .rows = TOKENS, .span_count = 1};
            MUST(b.kern->ops->begin_step(b.kern, &batch));
            for (int j = 0; j < TOKENS * b.stride; j++) b.qkv[j] = NAN;
            for (int layer = 0; layer < LAYERS; layer++)
                b.kern->ops->write_kv(b.kern, layer, b.qkv, NULL, &batch);
            b.kern->ops->release(b.kern, 1);
            append(&b, 0, 0, 21);
            append(&b, 0, 21, 22);
            for (int j = 0; j < 22 * b.out_size; j++)
                cr_assert(isfinite(b.kept[0][j]), "%s", b.kern->ops->name);
            bench_close(&b);
        }
    }
}

/* Prompts in one step and token by token, of which one token has no numbers: what does not see it
 * stays the same. */
static void check_spoiled(int path, const struct shape *shape, int spoiled) {
    struct bench b;
    if (!bench_open(&b, path, shape)) return;
    size_t size = (size_t)(LAYERS * TOKENS * b.out_size);
    float *whole = fresh(size, 0);
    append(&b, 0, 0, 70);
    memcpy(whole, b.kept[0], size * sizeof *whole);
    b.spoiled = spoiled;
    for (int step = 70; step > 0; step -= 69) {
        b.kern->ops->release(b.kern, 0);
        for (int pos = 0; pos < 70; pos += step) append(&b, 0, pos, pos + step);
        for (int layer = 0; layer < LAYERS; layer++)
            for (int pos = 0; pos < 70; pos++) {
                const int past = shape->sliding_window ? spoiled + shape->sliding_window : TOKENS;
                int64_t at = (int64_t)(layer * TOKENS + pos) * b.out_size;
                if (pos >= spoiled && pos < past) continue;
                cr_assert(!memcmp(b.kept[0] + at, whole + at, (size_t)b.out_size * sizeof *whole),
                          "%s, D %d, window %d: %d changes %d", b.kern->ops->name, shape->head_dim,
                          shape->sliding_window, spoiled, pos);
            }
    }
    free(whole);
    bench_close(&b);
}

/* Not on tiles: they multiply entries that a query does not see with weights of 0, and 0 * NaN is
 * NaN. */
Test(attend, unseen_entries_do_not_count) {
    for (size_t i = 0; i < SHAPE_COUNT; i++)
        for (int path = 0; path < WAYS; path++) {
            if (test_leaves_out(i + (size_t)path, 8)) continue;
            if (path < PATH_COUNT && path_is(path, "amx")) continue;
            for (int spoiled = 20; spoiled < 24; spoiled += 3)
                check_spoiled(path, &shapes[i], spoiled);
        }
}

/* ---- Writing, and the query ring ---- */

Test(attend, log_beta_is_kept) {
    struct bench b;
    cr_assert(bench_open(&b, 1, &shapes[3]));
    float beta[50 * 4], got[8 * 50];
    for (int i = 0; i < 200; i++) beta[i] = -(float)i;
    struct kern_span span = {.slot = 1, .row = 0, .count = 50, .pos = 0};
    struct kern_batch batch = {.spans = &span, .rows = 50, .span_count = 1};
    MUST(b.kern->ops->begin_step(b.kern, &batch));
    for (int layer = 0; layer < LAYERS; layer++)
        b.kern->ops->write_kv(b.kern, layer, b.qkv, beta, &batch);
    struct kern_report report = {.log_beta = got, .entries_max = 8 * 50};
    MUST(b.kern->ops->report(b.kern, 1, &report));
    for (int stream = 0; stream < 8; stream++)
        for (int i = 0; i < 50; i++)
            cr_assert_float_eq(got[stream * 50 + i], beta[i * 4 + stream % 4], 0);
    bench_close(&b);
}

Test(attend, query_ring) {
    enum { RING = 5, D = 16, HEADS = 2 };
    struct kern *kern = path_open(1, 1);
    struct kern_cache_options options = {.layers = 1,
                                         .heads_q = HEADS,
                                         .heads_kv = 1,
                                         .head_dim = D,
                                         .dtype = KERN_F32,
                                         .pages = 64,
                                         .slots = 2,
                                         .max_positions = 100};
    MUST(kern->ops->cache_open(kern, &options, NULL));
    float *qkv = fresh(40 * 4 * D, 71), *out = fresh(40 * 2 * D, 0);
    struct kern_attend_options attend = {.scale = 0.5f};
    struct kern_rule rule = {.score = KERN_SCORE_ATTENTION, .observe = {.window = RING}};
    for (int pos = 0, n = 7; pos < 21; pos += n) {
        struct kern_span span = {.slot = 1, .row = 0, .count = n, .pos = pos, .rule = &rule};
        struct kern_batch batch = {.spans = &span, .rows = n, .span_count = 1};
        MUST(kern->ops->begin_step(kern, &batch));
        kern->ops->write_kv(kern, 0, qkv + pos * 4 * D, NULL, &batch);
        kern->ops->attend(kern, 0, out, qkv + pos * 4 * D, &batch, &attend);
    }
    MUST(kern->ops->fork(kern, 1, 0));
    for (int slot = 0; slot < 2; slot++)
        for (int pos = 21 - RING; pos < 21; pos++) {
            const struct cpu_cache *cache = &((struct cpu *)kern)->cache;
            const float *query = cpu_cache_query(cache, slot, 0, pos % RING);
            cr_assert_eq(cache->ring_pos[slot * KERN_WINDOW_MAX + pos % RING], pos);
            for (int i = 0; i < HEADS * D; i++)
                cr_assert_float_eq(query[i], qkv[pos * 4 * D + i] * 0.5f, 0);
        }
    kern->ops->close(kern);
    free(qkv), free(out);
}
