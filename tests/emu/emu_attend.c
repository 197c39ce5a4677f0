/* Attention of the CUDA kernels against float64 over the very numbers the kernels use (keys and
 * values in bf16, e4m3 or codes with a factor, queries in what they are multiplied as), and the
 * promise of kern.h: a row's answer is bitwise the same however its prompt was split, whoever
 * shares the step, and in whatever order blocks and threads run. */
#include <criterion/criterion.h>

#include "both.h"
#include "kernels/number.h"
#include "kernels/row.h"

#define SLOTS 3

struct shape {
    int head_dim, heads_q, heads_kv, sliding_window;
    enum kern_dtype dtype;
    bool sinks;
    int latent; /* numbers of a key that are its value; 0: values are apart */
};

/* Groups of 1, 2, 4, 8, 7 and 16 query heads; some with learned sinks, as gpt-oss has. Then latent
 * vectors: those of DeepSeek and Mistral Small 4, and smaller ones that end within a panel of a
 * page; groups that fill a part of a block's rows, and more than one block. The last ones are the
 * wide heads of Gemma 4. */
static const struct shape shapes[] = {
    {64, 2, 2, 0, KERN_BF16, false, 0},     {64, 4, 2, 0, KERN_BF16, false, 0},
    {64, 14, 2, 0, KERN_BF16, false, 0},    {64, 4, 2, 37, KERN_BF16, false, 0},
    {128, 2, 2, 0, KERN_BF16, false, 0},    {128, 8, 2, 0, KERN_BF16, false, 0},
    {128, 8, 1, 0, KERN_BF16, false, 0},    {128, 4, 2, 1, KERN_BF16, false, 0},
    {128, 16, 1, 0, KERN_BF16, false, 0},   {256, 2, 1, 0, KERN_BF16, false, 0},
    {256, 8, 1, 0, KERN_BF16, false, 0},    {256, 2, 1, 300, KERN_BF16, false, 0},
    {64, 4, 2, 0, KERN_E4M3, false, 0},     {64, 14, 2, 37, KERN_E4M3, false, 0},
    {128, 8, 2, 0, KERN_E4M3, false, 0},    {128, 8, 1, 40, KERN_E4M3, false, 0},
    {256, 2, 1, 0, KERN_E4M3, false, 0},    {256, 8, 1, 300, KERN_E4M3, false, 0},
    {64, 16, 2, 0, KERN_BF16, true, 0},     {64, 16, 2, 128, KERN_BF16, true, 0},
    {128, 6, 2, 0, KERN_E4M3, true, 0},     {256, 3, 1, 300, KERN_BF16, true, 0},
    {64, 2, 2, 0, KERN_ROW8, false, 0},     {64, 14, 2, 37, KERN_ROW8, false, 0},
    {128, 8, 2, 0, KERN_ROW8, false, 0},    {128, 16, 1, 40, KERN_ROW8, false, 0},
    {256, 2, 1, 300, KERN_ROW8, false, 0},  {128, 6, 2, 0, KERN_ROW8, true, 0},
    {576, 20, 1, 0, KERN_BF16, false, 512}, {320, 8, 1, 0, KERN_BF16, false, 256},
    {72, 33, 1, 300, KERN_BF16, true, 64},  {32, 4, 1, 37, KERN_BF16, false, 24},
    {512, 2, 2, 0, KERN_BF16, false, 0},    {512, 3, 1, 300, KERN_BF16, true, 0},
    {512, 16, 1, 0, KERN_BF16, false, 0}};

#define SHAPE_COUNT ((int)(sizeof shapes / sizeof *shapes))
#define TOKENS      600
#define HEADS_MAX   33
#define DIM_MAX     576

struct bench {
    struct kern *kern;
    const struct shape *shape;
    int stride, out_size;
    float *table;               /* [SLOTS][TOKENS][stride]: what a sequence has at a position */
    float *sinks;               /* the device's, [heads_q]; NULL: none */
    float *kept[SLOTS];         /* [TOKENS][out_size] */
    struct kern_given together; /* rows of a step that see each other; count 0: none do */
    int seen_from, seen_to;     /* positions of these rows, in slot 0 */
};

/* From far below the logits to above them. */
static float sink_of(int head) {
    return (float)(head % 5) * 3 - 6;
}

static int value_dim(const struct shape *s) {
    return s->latent ? s->latent : s->head_dim;
}

static struct bench open_bench(const struct shape *s) {
    struct bench b = {.shape = s};
    struct cuda_options cuda = {.device = 0};
    struct kern_cache_options options = {.layers = 1,
                                         .heads_q = s->heads_q,
                                         .heads_kv = s->heads_kv,
                                         .head_dim = s->head_dim,
                                         .latent = s->latent,
                                         .dtype = s->dtype,
                                         .slots = SLOTS,
                                         .max_positions = TOKENS};
    struct kern_cache_info info;
    b.stride = (s->heads_q + (s->latent ? 1 : 2) * s->heads_kv) * s->head_dim;
    b.out_size = s->heads_q * value_dim(s);
    MUST(cuda_open(&cuda, &b.kern, NULL));
    b.kern->ops->cache_info(&options, &info);
    options.pages = SLOTS * s->heads_kv * (TOKENS / info.page_slots + 1);
    MUST(b.kern->ops->cache_open(b.kern, &options, NULL));
    b.table = fresh((size_t)(SLOTS * TOKENS * b.stride), (uint64_t)(s - shapes) + 1);
    for (int i = 0; i < SLOTS * TOKENS * b.stride; i++) b.table[i] *= 2;
    for (int i = 0; i < SLOTS; i++) b.kept[i] = fresh((size_t)(TOKENS * b.out_size), 0);
    float sinks[HEADS_MAX];
    for (int head = 0; head < s->heads_q; head++) sinks[head] = sink_of(head);
    if (s->sinks) b.sinks = put(b.kern, sinks, (size_t)s->heads_q);
    return b;
}

static void close_bench(struct bench *b) {
    b->kern->ops->mem_free(b->kern, b->sinks);
    b->kern->ops->close(b->kern);
    free(b->table);
    for (int i = 0; i < SLOTS; i++) free(b->kept[i]);
}

static const float *row_of(const struct bench *b, int slot, int pos) {
    return b->table + (size_t)(slot * TOKENS + pos) * (size_t)b->stride;
}

/* One step; rows are given out in order, outputs go to `kept` by slot and position. */
static void step(struct bench *b, struct kern_span *spans, int count) {
    const struct kern_ops *ops = b->kern->ops;
    struct kern_batch batch = {.spans = spans,
                               .span_count = count,
                               .given = &b->together,
                               .given_count = b->together.count > 0};
    struct kern_attend_options options = {.sliding_window = b->shape->sliding_window,
                                          .scale = 1 / sqrtf((float)b->shape->head_dim),
                                          .sinks = b->sinks};
    for (int s = 0; s < count; s++) {
        spans[s].row = batch.rows;
        batch.rows += spans[s].count;
    }
    float *rows = fresh((size_t)(batch.rows * b->stride), 0);
    for (int s = 0; s < count; s++)
        memcpy(rows + spans[s].row * b->stride, row_of(b, spans[s].slot, spans[s].pos),
               (size_t)(spans[s].count * b->stride) * sizeof *rows);
    float *qkv = put(b->kern, rows, (size_t)(batch.rows * b->stride));
    float *out = put(b->kern, NULL, (size_t)(batch.rows * b->out_size));
    MUST(ops->begin_step(b->kern, &batch));
    ops->write_kv(b->kern, 0, qkv, NULL, &batch);
    ops->attend(b->kern, 0, out, qkv, &batch, &options);
    out = take(b->kern, out, (size_t)(batch.rows * b->out_size));
    for (int s = 0; s < count; s++)
        memcpy(b->kept[spans[s].slot] + spans[s].pos * b->out_size,
               out + spans[s].row * b->out_size,
               (size_t)(spans[s].count * b->out_size) * sizeof *out);
    ops->mem_free(b->kern, qkv);
    free(rows);
    free(out);
}

static void append(struct bench *b, int slot, int from, int to) {
    struct kern_span span = {.slot = slot, .count = to - from, .pos = from};
    step(b, &span, 1);
}

/* ---- Against float64 ---- */

/* The numbers of a row, as a cache of this dtype has them; queries are float16 beside e4m3, whole
 * numbers of 16 bits beside codes, nearer to what they are than bf16. */
static void stored(float *to, const float *x, int d, enum kern_dtype dtype) {
    _Alignas(float) char row[DIM_MAX * sizeof *x];
    uint16_t factor;
    if (!row_scaled(dtype)) {
        number_write_row(row, x, d, dtype);
        number_read_row(to, row, d, dtype);
        return;
    }
    memcpy(to, x, (size_t)d * sizeof *to);
    row_rotate(to, d);
    row_write(row, &factor, to, d, dtype);
    row_read(to, row, factor, d, dtype);
    row_rotate(to, d);
}

/* The output of one query head over the positions `held` that it sees. */
static void exact(const struct bench *b, int slot, int pos, int head, const int32_t *held,
                  int count, double *out) {
    const struct shape *s = b->shape;
    int d = s->head_dim, values = value_dim(s), kv = head / (s->heads_q / s->heads_kv);
    int side = s->latent ? 0 : s->heads_kv; /* heads between a key and its value */
    const bool together = slot == 0 && pos >= b->seen_from && pos < b->seen_to;
    const int last = together ? b->seen_to - 1 : pos;
    double weight[TOKENS], most = -INFINITY, sum = 0;
    float q[DIM_MAX], k[DIM_MAX], v[DIM_MAX];
    stored(q, row_of(b, slot, pos) + head * d, d, s->dtype == KERN_BF16 ? KERN_BF16 : KERN_F32);
    for (int e = 0; e < count; e++) {
        stored(k, row_of(b, slot, held[e]) + (s->heads_q + kv) * d, d, s->dtype);
        bool seen = held[e] <= last && (!s->sliding_window || held[e] > pos - s->sliding_window);
        double dot = 0;
        for (int i = 0; i < d; i++) dot += (double)q[i] * (double)k[i];
        weight[e] = seen ? dot / sqrt(d) : -INFINITY;
        most = fmax(most, weight[e]);
    }
    for (int i = 0; i < values; i++) out[i] = 0;
    if (s->sinks) sum = exp((double)sink_of(head) - most);
    for (int e = 0; e < count; e++) {
        double p = exp(weight[e] - most);
        stored(v, row_of(b, slot, held[e]) + (s->heads_q + side + kv) * d, d, s->dtype);
        sum += p;
        for (int i = 0; i < values; i++) out[i] += p * (double)v[i];
    }
    for (int i = 0; i < values; i++) out[i] /= sum;
}

/* Probabilities are rounded to bf16 (2^-9 of each) or float16, values are below 2: the error of a
 * mean of values is below 2 * 2^-9; scores, in float32, of queries in float16, add less than half
 * of that again. */
#define BOUND (3 * 0x1p-9)

static void check_token(const struct bench *b, int slot, int pos, const int32_t *held, int count) {
    const struct shape *s = b->shape;
    double want[DIM_MAX];
    for (int head = 0; head < s->heads_q; head++) {
        const float *got = b->kept[slot] + pos * b->out_size + head * value_dim(s);
        exact(b, slot, pos, head, held, count, want);
        for (int i = 0; i < value_dim(s); i++)
            cr_assert(
                fabs(got[i] - want[i]) <= BOUND,
                "D %d dtype %d, %d / %d heads, window %d: slot %d pos %d head %d [%d]: %g, not %g",
                s->head_dim, s->dtype, s->heads_q, s->heads_kv, s->sliding_window, slot, pos, head,
                i, (double)got[i], want[i]);
    }
}

/* Page edges for 4, 8, 16 and 32 entries, chunk edges, and the middle. */
static const int edges[] = {0,  1,  7,   8,   9,   15,  16,  17,  31,  32,
                            33, 63, 127, 128, 254, 255, 256, 257, 511, 512};

#define EDGE_COUNT ((int)(sizeof edges / sizeof *edges))

static void identity(int32_t held[TOKENS]) {
    for (int i = 0; i < TOKENS; i++) held[i] = i;
}

/* Two chunks and one entry where that is quick, one chunk and some where rows are wide. */
static int prompt_of(const struct shape *s) {
    return s->heads_q * s->head_dim < 1024 ? 513 : 265;
}

Test(emu_attend, prompts_and_decoding_are_exact) {
    int32_t held[TOKENS];
    identity(held);
    for (int i = 0; i < SHAPE_COUNT; i++) {
        emu_set_seed((uint64_t)i);
        struct bench b = open_bench(&shapes[i]);
        int prompt = prompt_of(&shapes[i]);
        append(&b, 0, 0, prompt);
        for (int e = 0; e < EDGE_COUNT && edges[e] < prompt; e++)
            check_token(&b, 0, edges[e], held, edges[e] + 1);
        append(&b, 1, 0, 1);
        struct kern_span three[] = {{.slot = 1, .count = 40, .pos = 1},
                                    {.slot = 0, .count = 1, .pos = prompt},
                                    {.slot = 2, .count = 1, .pos = 0}};
        step(&b, three, 3);
        check_token(&b, 0, prompt, held, prompt + 1);
        check_token(&b, 1, 0, held, 1);
        check_token(&b, 1, 40, held, 41);
        check_token(&b, 2, 0, held, 1);
        close_bench(&b);
    }
}

/* ---- The promise ---- */

static void same_rows(const struct bench *b, int slot, const float *want, int from, int to,
                      const char *what) {
    for (int pos = from; pos < to; pos++)
        cr_assert(!memcmp(b->kept[slot] + pos * b->out_size, want + pos * b->out_size,
                          (size_t)b->out_size * sizeof *want),
                  "D %d, group %d, window %d: %s: position %d", b->shape->head_dim,
                  b->shape->heads_q / b->shape->heads_kv, b->shape->sliding_window, what, pos);
}

static void check_splits(const struct shape *shape) {
    struct bench b = open_bench(shape);
    const int end = prompt_of(shape);
    float *whole = fresh((size_t)(TOKENS * b.out_size), 0);
    emu_set_seed(0);
    append(&b, 0, 0, end);
    memcpy(whole, b.kept[0], (size_t)(end * b.out_size) * sizeof *whole);

    b.kern->ops->release(b.kern, 0);
    emu_set_seed(7);
    for (int pos = 0, n = 61; pos < end; pos += n) {
        if (n > end - pos) n = end - pos;
        append(&b, 0, pos, pos + n);
    }
    same_rows(&b, 0, whole, 0, end, "in pieces of 61");

    b.kern->ops->release(b.kern, 0); /* as decoding does it, in company, around every edge */
    emu_set_seed(12);
    append(&b, 1, 0, 300);
    int at = 0;
    for (int e = 0, other = 300; e < EDGE_COUNT && edges[e] < end; e++, other++) {
        if (edges[e] > at) append(&b, 0, at, edges[e]);
        struct kern_span two[] = {{.slot = 1, .count = 1, .pos = other},
                                  {.slot = 0, .count = 1, .pos = edges[e]}};
        step(&b, two, 2);
        at = edges[e] + 1;
    }
    same_rows(&b, 0, whole, 0, at, "one by one, in company");
    free(whole);
    close_bench(&b);
}

Test(emu_attend, splits_and_company_change_nothing) {
    static const int some[] = {1,  3,  5,  11, 13, 14, 16, 19, 20, 22,
                               23, 24, 26, 27, 29, 30, 31, 32, 33};
    for (size_t i = 0; i < sizeof some / sizeof *some; i++) check_splits(&shapes[some[i]]);
}

/* ---- Rows that see each other ---- */

/* Rows 230 to 269 of a text see each other, across a chunk's end, in one step with rows around them
 * and with another text's in front; in other steps; then the last 17 of them alone, as after a
 * cut. */
static void check_together(const struct shape *shape) {
    struct bench b = open_bench(shape);
    int32_t held[TOKENS];
    identity(held);
    struct kern_span both[] = {{.slot = 1, .count = 41, .pos = 0},
                               {.slot = 0, .count = 100, .pos = 190}};
    append(&b, 0, 0, 190);
    b.seen_from = 230, b.seen_to = 270;
    b.together = (struct kern_given){.row = 41 + 40, .count = 40, .together = true};
    step(&b, both, 2);
    static const int some[] = {189, 190, 229, 230, 231, 254, 255, 256, 268, 269, 270, 289};
    for (size_t i = 0; i < sizeof some / sizeof *some; i++) check_token(&b, 0, some[i], held, 290);
    check_token(&b, 1, 40, held, 41);
    float *whole = fresh((size_t)(TOKENS * b.out_size), 0);
    memcpy(whole, b.kept[0], (size_t)(290 * b.out_size) * sizeof *whole);
    b.kern->ops->release(b.kern, 0);
    b.together.count = 0;
    append(&b, 0, 0, 223);
    b.together = (struct kern_given){.row = 7, .count = 40, .together = true};
    append(&b, 0, 223, 270);
    b.together.count = 0;
    append(&b, 0, 270, 290);
    same_rows(&b, 0, whole, 0, 290, "rows that see each other, in other steps");
    MUST(b.kern->ops->truncate(b.kern, 0, 253));
    b.together = (struct kern_given){.row = 0, .count = 17, .together = true};
    append(&b, 0, 253, 290);
    same_rows(&b, 0, whole, 0, 290, "rows that see each other, after a cut");
    free(whole);
    close_bench(&b);
}

Test(emu_attend, rows_that_see_each_other) {
    static const int some[] = {1, 3, 8, 11, 13, 19, 23, 27, 30, 31, 33};
    for (size_t i = 0; i < sizeof some / sizeof *some; i++) check_together(&shapes[some[i]]);
}

/* ---- After eviction, and beside what others left ---- */

static void check_uneven(const struct shape *shape) {
    struct bench b = open_bench(shape);
    struct kern_rule rule = {.score = KERN_SCORE_RECENCY, .sinks = 4, .recent = 10};
    struct kern_evict due = {.slot = 0, .tokens = 200, .budget = 70, .rule = &rule};
    int32_t lengths[2], positions[2 * TOKENS];
    struct kern_report report = {
        .lengths = lengths, .positions = positions, .entries_max = 2 * TOKENS};
    append(&b, 0, 0, 200);
    MUST(b.kern->ops->evict(b.kern, &due, 1));
    append(&b, 0, 200, 330);
    append(&b, 0, 330, 331);
    expect_sound(b.kern);
    MUST(b.kern->ops->report(b.kern, 0, &report));
    cr_assert_eq((int)report.entries, 2 * (70 + 131));
    for (int pos = 200; pos < 331; pos += 26) check_token(&b, 0, pos, positions, 70 + pos - 199);
    close_bench(&b);
}

Test(emu_attend, uneven_streams_after_eviction) {
    static const enum kern_dtype dtypes[] = {KERN_BF16, KERN_E4M3, KERN_ROW8};
    for (int i = 0; i < 3; i++) {
        const struct shape shape = {128, 4, 2, 0, dtypes[i], false, 0};
        check_uneven(&shape);
    }
}

/* A page that comes back from a sequence full of NaN must not leak into the next one. */
Test(emu_attend, stale_entries_do_not_count) {
    for (int i = 0; i < SHAPE_COUNT; i += 4) {
        struct bench b = open_bench(&shapes[i]);
        int32_t held[TOKENS];
        identity(held);
        struct kern_span span = {.slot = 1, .count = TOKENS};
        struct kern_batch batch = {.spans = &span, .rows = TOKENS, .span_count = 1};
        float *nan = put(b.kern, NULL, (size_t)(TOKENS * b.stride));
        for (int slot = 0; slot < SLOTS; slot++) {
            span.slot = slot;
            MUST(b.kern->ops->begin_step(b.kern, &batch));
            b.kern->ops->write_kv(b.kern, 0, nan, NULL, &batch);
        }
        for (int slot = 0; slot < SLOTS; slot++) b.kern->ops->release(b.kern, slot);
        append(&b, 0, 0, 21);
        append(&b, 0, 21, 22);
        check_token(&b, 0, 20, held, 21);
        check_token(&b, 0, 21, held, 22);
        b.kern->ops->mem_free(b.kern, nan);
        close_bench(&b);
    }
}

/* Writes rows of a sequence without attention to them; NULL: NaN. */
static void write_alone(struct bench *b, int pos, int count, const float *rows) {
    struct kern_span span = {.count = count, .pos = pos};
    struct kern_batch batch = {.spans = &span, .rows = count, .span_count = 1};
    float *qkv = put(b->kern, rows, (size_t)(count * b->stride));
    MUST(b->kern->ops->begin_step(b->kern, &batch));
    b->kern->ops->write_kv(b->kern, 0, qkv, NULL, &batch);
    b->kern->ops->mem_free(b->kern, qkv);
}

/* Entries of stages wholly before a sliding window are not read: were they, their NaN would be
 * multiplied by zero. */
Test(emu_attend, nothing_before_the_window_is_read) {
    static const enum kern_dtype dtypes[] = {KERN_BF16, KERN_E4M3, KERN_ROW8};
    for (int i = 0; i < 3; i++) {
        const struct shape shape = {64, 4, 2, 37, dtypes[i], false, 0};
        struct bench b = open_bench(&shape);
        int32_t held[TOKENS];
        identity(held);
        write_alone(&b, 0, 128, NULL);
        write_alone(&b, 128, 64, row_of(&b, 0, 128));
        append(&b, 0, 192, 256);
        append(&b, 0, 256, 257); /* the window begins in the first chunk */
        check_token(&b, 0, 192, held, 193);
        check_token(&b, 0, 255, held, 256);
        check_token(&b, 0, 256, held, 257);
        close_bench(&b);
    }
}

/* Scores that climb move the maxima of rows, of each row at its own time; the bits are the same in
 * tiles of prompts and in decoding. */
Test(emu_attend, maxima_follow_climbing_scores) {
    const struct shape shape = {64, 4, 2, 0, KERN_BF16, false, 0};
    struct bench b = open_bench(&shape);
    int32_t held[TOKENS];
    identity(held);
    for (int pos = 0; pos < 70; pos++)
        for (int i = 0; i < 2 * 64; i++) {
            float *key = b.table + pos * b.stride + 4 * 64 + i;
            *key *= 1 + (float)pos / 8;
        }
    memcpy(b.table + TOKENS * b.stride, b.table, (size_t)(70 * b.stride) * sizeof *b.table);
    append(&b, 0, 0, 70);
    append(&b, 1, 0, 33);
    for (int pos = 33; pos < 70; pos++) append(&b, 1, pos, pos + 1);
    cr_assert_eq(memcmp(b.kept[0], b.kept[1], (size_t)(70 * b.out_size) * sizeof *b.kept[0]), 0);
    for (int pos = 0; pos < 70; pos += 23) check_token(&b, 0, pos, held, pos + 1);
    close_bench(&b);
}

/* ---- Devices with less shared memory ---- */

/* Compute capabilities: 9.0; as much memory, but copies by threads; less memory, with both. */
static const char *const devices[] = {"90", "80", "86", "120"};

#define DEVICE_COUNT          ((int)(sizeof devices / sizeof *devices))
#define DEVICES_PROMPT_TOKENS 265 /* one chunk and some */

/* The outputs of a prompt and of a step after it. Odd seeds: copies are late. */
static float *outputs_on(const struct shape *s, const char *device, uint64_t seed) {
    setenv("KEEPD_EMU_CAPABILITY", device, 1);
    struct bench b = open_bench(s);
    size_t numbers = (size_t)((DEVICES_PROMPT_TOKENS + 1) * b.out_size);
    float *out = fresh(numbers, 0);
    emu_set_seed(seed);
    append(&b, 0, 0, DEVICES_PROMPT_TOKENS);
    append(&b, 0, DEVICES_PROMPT_TOKENS, DEVICES_PROMPT_TOKENS + 1);
    memcpy(out, b.kept[0], numbers * sizeof *out);
    close_bench(&b);
    unsetenv("KEEPD_EMU_CAPABILITY");
    return out;
}

/* Fewer warps of a block and copies by threads give the same bits; every launch of the emulator is
 * held to the device's shared memory. Copies are late for every second pair of shape and device. */
Test(emu_attend, other_devices) {
    for (int i = 0, n = 0; i < SHAPE_COUNT; i += i < 20 ? 5 : 2, n++) {
        const struct shape *s = &shapes[i];
        size_t numbers = (size_t)((DEVICES_PROMPT_TOKENS + 1) * s->heads_q * value_dim(s));
        float *want = outputs_on(s, devices[0], 0);
        for (int d = 1; d < DEVICE_COUNT; d++) {
            bool wide = s->head_dim >= 256 && s->dtype == KERN_BF16;
            if (wide && strcmp(devices[d], "80") != 0) continue;
            float *got = outputs_on(s, devices[d], (uint64_t)(n + d) % 2);
            cr_assert(!memcmp(got, want, numbers * sizeof *got), "shape %d on %s, seed %d", i,
                      devices[d], (n + d) % 2);
            free(got);
        }
        free(want);
    }
}
