/* Times the CUDA backend's operations, one JSON object per line: what, number, unit, prediction,
 * and for rows that a goal is about their key. Random numbers everywhere: nothing here depends on
 * values.
 *
 *     gpu_bench SHAPE PART MIB      MIB: the device's memory; the longest caches take what a model
 *                                   leaves of it
 *     gpu_bench SHAPE PART small    sizes for a dry run under the emulator
 *
 * Without a part that it knows it lists the shapes and the parts. */
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/cuda/cuda.h"
#include "kernels/quantize.h"

/* Models whose shapes are timed; weights and activations are made up. */
struct shape {
    const char *name;
    int layers, heads_q, heads_kv, head_dim, d, ff, vocab;
    float theta;
    bool qk_norm;
};

static const struct shape shapes[] = {
    {"llama-3.1-8b", 32, 32, 8, 128, 4096, 14336, 128256, 500000, false},
    {"qwen3-0.6b", 28, 16, 8, 128, 1024, 3072, 151936, 1000000, true}};

#define SHAPE_COUNT ((int)(sizeof shapes / sizeof *shapes))

#define POSITIONS 16640 /* longest sequence: 16,384 and the tokens of a row */

static const struct shape *shape = &shapes[0];
static bool small;
static struct kern *kern;

static int scaled(int size, int dry) {
    return small ? dry : size;
}

static void fail(const char *what, int rc, const struct fault *fault) {
    fprintf(stderr, "gpu_bench: %s: %s %s\n", what, err_text(rc), fault ? fault->text : "");
    exit(1);
}

static void must(int rc, const char *what) {
    if (rc) fail(what, rc, NULL);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void print_row(const char *key, const char *name, double value, const char *unit,
                      const char *prediction) {
    printf("{\"key\": \"%s\", \"name\": \"%s: %s\", \"value\": %.6g, \"unit\": \"%s\", "
           "\"prediction\": "
           "\"%s\"}\n",
           key, shape->name, name, value, unit, prediction);
    fflush(stdout);
}

/* `key`: what bench/gpu/check knows it by; "": no goal is about it. Goals and predictions are those
 * of the first shape. */
static void keyed_row(const char *key, const char *name, double value, const char *unit,
                      const char *prediction) {
    bool first = shape == &shapes[0];
    print_row(first ? key : "", name, value, unit, first ? prediction : "");
}

static void row(const char *name, double value, const char *unit, const char *prediction) {
    keyed_row("", name, value, unit, prediction);
}

/* Backend memory with noise. */
static float *numbers(size_t count) {
    float *host = malloc(count * sizeof *host);
    float *there = kern->ops->mem_alloc(kern, count * sizeof *there);
    if (!host || !there) fail("memory", ERR_NOMEM, NULL);
    uint32_t state = 1;
    for (size_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        host[i] = (float)(state >> 8) * 0x1p-23f - 1;
    }
    must(kern->ops->upload(kern, there, host, count * sizeof *there), "upload");
    free(host);
    return there;
}

/* Seconds per call: a warm-up, then as many calls as fill a fifth of a second, queued at once. */
static double seconds(void (*call)(void *arg), void *arg) {
    call(arg);
    must(kern->ops->sync(kern), "warm-up");
    int count = 1;
    for (;;) {
        double start = now();
        for (int i = 0; i < count; i++) call(arg);
        must(kern->ops->sync(kern), "timing");
        double took = now() - start;
        if (small || took > 0.2) return took / count;
        count = took < 0.01 ? count * 10 : (int)(count * 0.25 / took) + 1;
    }
}

/* ---- Bandwidth and products ---- */

struct copy {
    float *to, *from;
    int32_t *index;
    int rows;
};

static void do_copy(void *arg) {
    struct copy *c = arg;
    kern->ops->gather_rows(kern, c->to, c->from, c->index, c->rows, shape->d);
}

static void time_copy(void) {
    struct copy c = {.rows = scaled(65536, 4)};
    size_t count = (size_t)c.rows * shape->d;
    c.to = numbers(count);
    c.from = numbers(count);
    c.index = malloc((size_t)c.rows * sizeof *c.index);
    for (int i = 0; i < c.rows; i++) c.index[i] = i;
    keyed_row("copy", "copy of rows", 2e-12 * (double)count * 4 / seconds(do_copy, &c), "TB/s",
              "4.3 (H200)");
    kern->ops->mem_free(kern, c.to);
    kern->ops->mem_free(kern, c.from);
    free(c.index);
}

/* Formats of weights: their names in labels, and bytes of a number in the device's memory. */
static const char *const in_formats[] = {
    [QUANTIZE_FP8] = " in fp8", [QUANTIZE_Q8] = " in 8 bits", [QUANTIZE_Q4] = " in 4 bits"};
static const double format_bytes[] = {
    [QUANTIZE_NONE] = 2, [QUANTIZE_FP8] = 1, [QUANTIZE_Q8] = 36.0 / 32, [QUANTIZE_Q4] = 24.0 / 32};

static const char *in_format(enum quantization to) {
    return in_formats[to] ? in_formats[to] : "";
}

static void fill_blocks(struct block *blocks, size_t count, bool narrow) {
    for (size_t b = 0; b < count; b++) {
        block_set_factors(&blocks[b], 0x1p-7f, narrow ? -0x1p-4f : BLOCK_NO_LEAST);
        for (int i = 0; i < KERN_BLOCK; i++)
            blocks[b].n[i] = (int8_t)((int)(b * 5 + (size_t)i * 7) % (narrow ? 16 : 100));
    }
}

/* A matrix that every row of is like every other, as --quantization loads it. */
static int load_weight(int outputs, int inputs, enum quantization to, struct kern_weight **out) {
    size_t rows = (size_t)outputs, count = rows * (size_t)inputs;
    uint16_t *file = malloc(count * sizeof *file);
    void *codes = malloc(to == QUANTIZE_FP8 ? count : count / KERN_BLOCK * sizeof(struct block));
    float *scales = malloc(rows * sizeof *scales);
    struct fault fault = {0};
    if (!file || !scales || !codes) fail("memory", ERR_NOMEM, NULL);
    for (size_t i = 0; i < count; i++) file[i] = (uint16_t)(0x3c00 + i * 37 % 256 + (i % 2 << 15));
    struct kern_matrix m = {.data = file, .dtype = KERN_BF16, .rows = outputs, .cols = inputs};
    if (to == QUANTIZE_FP8) {
        must(quantize_rows(&m, codes, scales, NULL, NULL), "fp8");
        m.scale = scales;
        m.dtype = KERN_E4M3;
    } else if (to != QUANTIZE_NONE) {
        fill_blocks(codes, count / KERN_BLOCK, to == QUANTIZE_Q4);
        m.dtype = to == QUANTIZE_Q8 ? KERN_Q8 : KERN_Q4M;
    }
    if (to != QUANTIZE_NONE) m.data = codes;
    int rc = kern->ops->weight_load(kern, &m, 1, KERN_SHARD_NONE, out, &fault);
    if (rc) fprintf(stderr, "gpu_bench: weight: %s\n", fault.text);
    if (rc && rc != ERR_UNSUPPORTED) fail("weight", rc, &fault);
    free(file), free(codes), free(scales);
    return rc;
}

static bool has_fp8(void) {
    struct kern_weight *weight;
    if (load_weight(64, 64, QUANTIZE_FP8, &weight)) return false;
    kern->ops->weight_free(kern, weight);
    return true;
}

struct product {
    float *x, *y;
    struct kern_weight *weight;
    int rows;
};

static void do_product(void *arg) {
    struct product *p = arg;
    kern->ops->matmul(kern, p->y, p->x, p->weight, NULL, p->rows, KERN_SET);
}

/* Outputs of a row with so many others: those of `most` rows at once are `all`. */
static double equal_outputs(struct product *p, int rows, int most, int64_t outputs,
                            const float *all) {
    float *some = malloc((size_t)(rows * outputs) * sizeof *some);
    int64_t equal = 0;
    if (!some) fail("memory", ERR_NOMEM, NULL);
    p->rows = rows;
    do_product(p);
    must(kern->ops->download(kern, some, p->y, (size_t)(rows * outputs) * sizeof *some), "product");
    for (int64_t i = 0; i < rows * outputs; i++) equal += memcmp(&some[i], &all[i], 4) == 0;
    free(some);
    return most > 0 ? (double)equal / (double)(rows * outputs) : 0;
}

/* A row's bits must not depend on how many rows are multiplied with it. */
static void compare_products(const char *name, struct product *p, int outputs, int most) {
    static const int rows[] = {1, 64, 256};
    size_t count = (size_t)most * (size_t)outputs;
    float *all = malloc(count * sizeof *all);
    if (!all) fail("memory", ERR_NOMEM, NULL);
    p->rows = most;
    do_product(p);
    must(kern->ops->download(kern, all, p->y, count * sizeof *all), "product");
    for (int i = 0; i < 3 && rows[i] < most; i++) {
        char label[160];
        snprintf(label, sizeof label, "product %s, %d rows: outputs with the bits of %d rows", name,
                 rows[i], most);
        keyed_row("product_bits", label, equal_outputs(p, rows[i], most, outputs, all), "of 1",
                  "1");
    }
    free(all);
}

/* How the library computes what has been loaded; a line for each shape and number of rows. */
static void list_products(void) {
    static struct cuda_product list[512];
    int count = cuda_products(kern, list, sizeof list / sizeof *list);
    for (int i = 0; i < count; i++) {
        const struct cuda_product *p = &list[i];
        char label[128];
        snprintf(label, sizeof label,
                 "product %lld x %lld, up to %lld rows: tile %d, stages %d, split %d%s",
                 (long long)p->n, (long long)p->k, (long long)p->rows, p->tile, p->stages, p->split,
                 p->own ? ", as for 64 rows" : "");
        row(label, (double)p->waves, "waves", "");
    }
}

static void time_product(const char *name, int outputs, int inputs, enum quantization to) {
    static const int rows[] = {1, 64, 256, 512};
    const int most = scaled(2048, 70);
    struct product p;
    double count = (double)outputs * inputs;
    must(load_weight(outputs, inputs, to, &p.weight), "weight");
    p.x = numbers((size_t)most * (size_t)inputs);
    p.y = numbers((size_t)most * (size_t)outputs);
    for (int i = 0; i < (small ? 1 : 4); i++) {
        char label[96];
        p.rows = rows[i];
        double t = seconds(do_product, &p);
        const char *in = in_format(to), *best = to == QUANTIZE_NONE  ? "600"
                                                : to == QUANTIZE_FP8 ? "1,000 to 1,400"
                                                                     : "100";
        snprintf(label, sizeof label, "product %s%s, %d rows: weights read", name, in, rows[i]);
        row(label, 1e-12 * format_bytes[to] * count / t, "TB/s", rows[i] == 1 ? "3.9 to 4.3" : "");
        snprintf(label, sizeof label, "product %s%s, %d rows: arithmetic", name, in, rows[i]);
        keyed_row(to == QUANTIZE_NONE ? "products" : "", label, 2e-12 * count * rows[i] / t,
                  "TFLOP/s", rows[i] == 512 ? best : "");
    }
    char label[64];
    snprintf(label, sizeof label, "%s%s", name, in_format(to));
    compare_products(label, &p, outputs, most);
    kern->ops->weight_free(kern, p.weight);
    kern->ops->mem_free(kern, p.x);
    kern->ops->mem_free(kern, p.y);
}

/* ---- Attention ---- */

struct attention {
    struct kern_span *spans;
    struct kern_batch batch;
    float *qkv, *out;
};

static void do_attend(void *arg) {
    struct attention *a = arg;
    const struct kern_attend_options options = {.scale = 0.088f};
    kern->ops->attend(kern, 0, a->out, a->qkv, &a->batch, &options);
}

static void append(struct kern_span *spans, int count, float *qkv, struct kern_batch *batch) {
    *batch = (struct kern_batch){.spans = spans, .span_count = count};
    for (int i = 0; i < count; i++) {
        spans[i].row = batch->rows;
        batch->rows += spans[i].count;
    }
    must(kern->ops->begin_step(kern, batch), "begin_step");
    for (int layer = 0; qkv && layer < 1; layer++)
        kern->ops->write_kv(kern, layer, qkv, NULL, batch);
}

/* Numbers of a row of queries, keys and values. */
static size_t qkv_width(void) {
    return (size_t)(shape->heads_q + 2 * shape->heads_kv) * (size_t)shape->head_dim;
}

static size_t heads_width(void) {
    return (size_t)shape->heads_q * (size_t)shape->head_dim;
}

/* Prompts of these lengths, then one row each; a fresh backend per case keeps pools apart. */
static void time_decode(const char *key, const char *name, const struct kern_rule *rule,
                        const int *lengths, int count, const char *prediction) {
    struct attention a = {.spans = calloc((size_t)count, sizeof *a.spans)};
    double entries = 0;
    int longest = 0;
    for (int i = 0; i < count; i++) {
        entries += lengths[i] + 1;
        longest = lengths[i] > longest ? lengths[i] : longest;
    }
    a.qkv = numbers(qkv_width() * (size_t)(longest > count ? longest : count));
    a.out = numbers((size_t)count * heads_width());
    for (int i = 0; i < count; i++) {
        struct kern_span prompt = {.slot = i, .count = lengths[i], .rule = rule};
        append(&prompt, 1, a.qkv, &a.batch);
        a.spans[i] = (struct kern_span){.slot = i, .count = 1, .pos = lengths[i], .rule = rule};
        must(kern->ops->sync(kern), "prompt");
    }
    append(a.spans, count, a.qkv, &a.batch);
    double t = seconds(do_attend, &a);
    keyed_row(key, name, 1e-12 * entries * shape->heads_kv * shape->head_dim * 4 / t, "TB/s",
              prediction);
    for (int i = 0; i < count; i++) kern->ops->release(kern, i);
    kern->ops->mem_free(kern, a.qkv);
    kern->ops->mem_free(kern, a.out);
    free(a.spans);
}

static void time_decodes(void) {
    static const struct kern_rule mass = {
        .score = KERN_SCORE_ATTENTION,
        .observe = {.group = KERN_GROUP_SUM, .reduce = KERN_REDUCE_SUM}};
    static const int counts[] = {1, 8, 64, 256};
    static const char *const predictions[] = {"", "", ">= 3.0", ">= 3.0"};
    static const char *const keys[] = {"", "", "decode_even", ""};
    int lengths[256], sizes = small ? 1 : 4;
    for (int c = 0; c < sizes; c++) {
        char name[96];
        for (int i = 0; i < counts[c]; i++) lengths[i] = scaled(1088, 40) - 1;
        snprintf(name, sizeof name, "decode attention, %d x %d entries", counts[c], lengths[0] + 1);
        time_decode(small ? "decode_even" : keys[c], name, NULL, lengths, counts[c],
                    predictions[c]);
    }
    int uneven = scaled(64, 2);
    double longest = scaled(4000, 80), ratio = scaled(100, 4); /* evenly in the logarithm */
    for (int i = 0; i < uneven; i++)
        lengths[i] = (int)(longest / ratio * pow(ratio, (double)(i * 29 % uneven) / (uneven - 1)));
    char name[96];
    snprintf(name, sizeof name, "decode attention, %d sequences of %.0f to %.0f entries", uneven,
             longest / ratio, longest);
    time_decode("decode_uneven", name, NULL, lengths, uneven, "within 5 % of even lengths");
    time_decode("", "the same with every query's attention added up", &mass, lengths, uneven,
                "0.4 of it");
}

static void time_prefill(const char *key, int tokens, const char *prediction) {
    struct kern_span span = {.slot = 0, .count = tokens};
    struct attention a = {.qkv = numbers(qkv_width() * (size_t)tokens),
                          .out = numbers((size_t)tokens * heads_width())};
    char name[64];
    append(&span, 1, a.qkv, &a.batch);
    double t = seconds(do_attend, &a);
    snprintf(name, sizeof name, "prefill attention, causal, %d tokens", tokens);
    keyed_row(key, name, 1e-12 * 2 * (double)tokens * tokens * shape->heads_q * shape->head_dim / t,
              "TFLOP/s", prediction);
    kern->ops->release(kern, 0);
    kern->ops->mem_free(kern, a.qkv);
    kern->ops->mem_free(kern, a.out);
}

/* ---- Eviction ---- */

/* Prompts whose layers all get the same numbers; attention runs where a rule wants to see it. */
static void fill(const struct kern_rule *rule, int layers, int sequences, int entries) {
    float *beta = numbers((size_t)entries * (size_t)shape->heads_kv),
          *qkv = numbers(qkv_width() * (size_t)entries);
    float *out = numbers((size_t)entries * heads_width());
    const struct kern_attend_options options = {.scale = 0.088f};
    for (int i = 0; i < sequences; i++) {
        struct kern_span span = {.slot = i, .count = entries, .rule = rule};
        struct kern_batch batch = {.spans = &span, .span_count = 1, .rows = entries};
        must(kern->ops->begin_step(kern, &batch), "begin_step");
        for (int layer = 0; layer < layers; layer++) {
            kern->ops->write_kv(kern, layer, qkv, beta, &batch);
            if (rule->score == KERN_SCORE_ATTENTION)
                kern->ops->attend(kern, layer, out, qkv, &batch, &options);
        }
        must(kern->ops->sync(kern), "entries");
    }
    kern->ops->mem_free(kern, beta);
    kern->ops->mem_free(kern, qkv);
    kern->ops->mem_free(kern, out);
}

/* Once: evicting changes what there is to evict. The whole sequence, all layers. Of two, so that no
 * memory is taken in the second, which is timed. */
static void time_evict(const char *key, const char *what, const struct kern_rule *rule, int layers,
                       int sequences, int entries, int keep, const char *prediction) {
    struct kern_evict due[64];
    double took = 0;
    for (int i = 0; i < sequences; i++)
        due[i] = (struct kern_evict){.slot = i, .tokens = entries, .budget = keep, .rule = rule};
    for (int round = 0; round < 2; round++) {
        fill(rule, layers, sequences, entries);
        double start = now();
        must(kern->ops->evict(kern, due, sequences), "evict");
        must(kern->ops->sync(kern), "evict");
        took = now() - start;
        for (int i = 0; i < sequences; i++) kern->ops->release(kern, i);
    }
    char name[128];
    snprintf(name, sizeof name, "eviction, %s, of %d sequence(s), %d streams, %d to %d entries",
             what, sequences, layers * shape->heads_kv, entries, keep);
    keyed_row(key, name, 1e6 * took, "us", prediction);
}

/* Predictions: kernels/cuda/README.md; a wait is in each. */
static void time_evictions(void) {
    static const struct {
        const char *key, *what;
        struct kern_rule rule;
        const char *prediction;
    } cases[] = {
        {"evict_retention",
         "retention",
         {.score = KERN_SCORE_RETENTION, .scope = KERN_SCOPE_SEQUENCE, .sinks = 4, .horizon = 128},
         "105"},
        {"evict_window",
         "window of 32",
         {.score = KERN_SCORE_ATTENTION,
          .sinks = 4,
          .recent = 32,
          .observe = {.window = 32, .reduce = KERN_REDUCE_SUM}},
         "180"},
        {"",
         "window of 8 and redundancy",
         {.score = KERN_SCORE_ATTENTION,
          .sinks = 4,
          .recent = 8,
          .observe = {.window = 8, .group = KERN_GROUP_MAX_LOGIT},
          .redundancy = {.on = true, .lambda = 0.1f, .threshold = 0.5f, .eps = 1e-8f}},
         "660: no key has a look-alike"},
        {"",
         "accumulated attention",
         {.score = KERN_SCORE_ATTENTION,
          .sinks = 4,
          .recent = 256,
          .observe = {.group = KERN_GROUP_SUM, .reduce = KERN_REDUCE_SUM}},
         ""},
    };
    int layers = scaled(32, 2), entries = scaled(1152, 48), keep = scaled(1024, 40);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        time_evict(cases[i].key, cases[i].what, &cases[i].rule, layers, 1, entries, keep,
                   cases[i].prediction);
    if (!small) time_evict("", cases[0].what, &cases[0].rule, layers, 4, entries, keep, "");
}

static void open_backend(int layers, int64_t entries, const struct cuda_options *cuda) {
    struct fault fault = {0};
    struct kern_cache_options options = {.layers = layers,
                                         .heads_q = shape->heads_q,
                                         .heads_kv = shape->heads_kv,
                                         .head_dim = shape->head_dim,
                                         .dtype = KERN_BF16,
                                         .pages = entries / 16,
                                         .slots = 256,
                                         .max_positions = POSITIONS};
    int rc = cuda_probe(&fault);
    if (!rc) rc = cuda_open(cuda, &kern, &fault);
    if (!rc) rc = kern->ops->cache_open(kern, &options, &fault);
    if (rc) fail("open", rc, &fault);
}

/* ---- A whole step ---- */
/* Decoding in bf16, as the daemon does it: one row per sequence, all layers, the head, a greedy
 * token each, one wait. The layers share one set of weights, which is larger than any cache, so
 * that as many bytes are read as if each had its own. */

#define STEPS      24
#define STEP_CACHE 1024  /* entries of every stream before the first step */
#define FULL_CACHE 16384 /* and of a sequence of which everything is kept */

#define DAEMON_BYTES 7e9                         /* device memory of a daemon beside its weights */
#define ENTRY_BYTES  (2.0 * 2 * shape->head_dim) /* key and value in bf16 */

/* Numbers of the layers' matrices, and of the head's. */
static double layer_weights(void) {
    double each = (double)qkv_width() * shape->d + (double)heads_width() * shape->d;
    return shape->layers * (each + 3.0 * shape->ff * shape->d);
}

static double head_weights(void) {
    return (double)shape->vocab * shape->d;
}

/* How a step is timed: what is left out, what is added. */
struct mode {
    const char *how;
    bool eager, apart;
    enum quantization to;
    bool keyed; /* goals are about these */
};

/* Predicted milliseconds of a step on an H200 that reads 4.3 TB/s and multiplies at
 * 790 TFLOP/s, 1,400 in fp8. The layers' matrices and the head (always bf16) take the longer of
 * reading and multiplying; every sequence's entries are read. */
static double roofline(const struct mode *mode, int count, int entries) {
    const double layers = layer_weights(), head = head_weights(), read = 4.3e12;
    double rate = mode->to == QUANTIZE_FP8 ? 1400e12 : 790e12;
    double body = fmax(layers * format_bytes[mode->to] / read, 2 * layers * count / rate);
    double last = fmax(head * 2 / read, 2 * head * count / 790e12);
    return 1e3 * (body + last +
                  (double)count * entries * shape->layers * shape->heads_kv * ENTRY_BYTES / read);
}

struct step_model {
    int layers, d, ff, vocab, entries;
    struct kern_weight *embed, *qkv, *o, *gate_up, *down, *head;
    float *norm_weight, *x, *norm, *rows, *heads, *gate_up_out, *ff_out, *logits;
    struct kern_gate *gate;
    float *log_beta;
    float inv_freq[64]; /* heads have 128 numbers */
    float *qk_norm;     /* NULL: not in this model */
};

static struct kern_weight *weight(int outputs, int inputs, enum quantization to) {
    struct kern_weight *loaded;
    must(load_weight(outputs, inputs, to, &loaded), "weight");
    return loaded;
}

/* Opens a layer's retention gate, of the size of published ones. */
static struct kern_gate *open_gate(int d) {
    enum { WIDTH = 512 };
    const size_t kv = (size_t)shape->heads_kv;
    const size_t first = (size_t)WIDTH * (size_t)d, last = kv * WIDTH;
    float *numbers_of = calloc(first + WIDTH + last + kv, sizeof *numbers_of);
    int32_t row_of[16];
    struct kern_gate *gate;
    struct fault fault = {0};
    if (!numbers_of) fail("memory", ERR_NOMEM, NULL);
    for (size_t i = 0; i < first + WIDTH + last; i++) numbers_of[i] = (float)(i % 17) * 0x1p-10f;
    for (int h = 0; h < shape->heads_kv; h++) row_of[h] = h;
    const struct kern_gate_spec spec = {.w1 = numbers_of,
                                        .b1 = numbers_of + first,
                                        .last = numbers_of + first + WIDTH,
                                        .bias = numbers_of + first + WIDTH + last,
                                        .row = row_of,
                                        .width = WIDTH,
                                        .d_model = d,
                                        .heads_kv = shape->heads_kv,
                                        .row_count = shape->heads_kv,
                                        .embeddings = 1};
    int rc = kern->ops->gate_load(kern, &spec, &gate, &fault);
    if (rc) fail("gate", rc, &fault);
    free(numbers_of);
    return gate;
}

static void open_step_model(struct step_model *m, int rows, int entries, enum quantization to) {
    size_t n = (size_t)rows;
    *m = (struct step_model){.layers = scaled(shape->layers, 2),
                             .d = scaled(shape->d, 64),
                             .ff = scaled(shape->ff, 128),
                             .vocab = scaled(shape->vocab, 256),
                             .entries = entries};
    m->embed = weight(m->vocab, m->d, QUANTIZE_NONE);
    m->qkv = weight((int)qkv_width(), m->d, to);
    m->o = weight(m->d, shape->heads_q * shape->head_dim, to);
    m->gate_up = weight(2 * m->ff, m->d, to);
    m->down = weight(m->d, m->ff, to);
    m->head = weight(m->vocab, m->d, QUANTIZE_NONE);
    m->gate = open_gate(m->d);
    m->log_beta = numbers(n * (size_t)shape->heads_kv);
    m->norm_weight = numbers((size_t)m->d);
    m->qk_norm = shape->qk_norm ? numbers((size_t)shape->head_dim) : NULL;
    m->x = numbers(n * (size_t)m->d);
    m->norm = numbers(n * (size_t)m->d);
    m->rows = numbers(n * qkv_width());
    m->heads = numbers(n * heads_width());
    m->gate_up_out = numbers(n * 2 * (size_t)m->ff);
    m->ff_out = numbers(n * (size_t)m->ff);
    m->logits = numbers(n * (size_t)m->vocab);
    for (int i = 0; i < shape->head_dim / 2; i++)
        m->inv_freq[i] = powf(shape->theta, -2.0f * (float)i / shape->head_dim);
}

/* The next one, and the longest caches, need the room. */
static void close_step_model(struct step_model *m) {
    struct kern_weight *weights[] = {m->embed, m->qkv, m->o, m->gate_up, m->down, m->head};
    kern->ops->gate_free(kern, m->gate);
    float *arrays[] = {m->log_beta, m->norm_weight, m->x,      m->norm,   m->rows,
                       m->heads,    m->gate_up_out, m->ff_out, m->logits, m->qk_norm};
    for (size_t i = 0; i < sizeof weights / sizeof *weights; i++)
        kern->ops->weight_free(kern, weights[i]);
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        if (arrays[i]) kern->ops->mem_free(kern, arrays[i]);
}

static void run_layer(struct step_model *m, int layer, const struct kern_batch *batch) {
    const struct kern_rope rope = {.inv_freq = m->inv_freq, .scale = 1};
    const struct kern_attend_options options = {.scale = 0.088f};
    const struct kern_ops *ops = kern->ops;
    int rows = batch->rows;
    ops->rms_norm(kern, m->norm, m->x, m->norm_weight, rows, m->d, 1e-5f);
    ops->matmul(kern, m->rows, m->norm, m->qkv, NULL, rows, KERN_SET);
    ops->gate(kern, m->log_beta, m->norm, m->gate, rows);
    ops->qk_rope(kern, m->rows, m->qk_norm, m->qk_norm, 1e-5f, &rope, batch);
    ops->write_kv(kern, layer, m->rows, m->log_beta, batch);
    ops->attend(kern, layer, m->heads, m->rows, batch, &options);
    ops->matmul(kern, m->x, m->heads, m->o, NULL, rows, KERN_ADD);
    ops->rms_norm(kern, m->norm, m->x, m->norm_weight, rows, m->d, 1e-5f);
    ops->matmul(kern, m->gate_up_out, m->norm, m->gate_up, NULL, rows, KERN_SET);
    ops->glu(kern, m->ff_out, m->gate_up_out, rows, m->ff, KERN_SILU);
    ops->matmul(kern, m->x, m->ff_out, m->down, NULL, rows, KERN_ADD);
}

static void run_step(struct step_model *m, const struct kern_batch *batch) {
    struct kern_sample samples[256];
    static struct kern_sampled sampled[256];
    for (int i = 0; i < batch->rows; i++)
        samples[i] =
            (struct kern_sample){.top_p = 1, .repetition = 1, .top_count = -1, .forced = -1};
    must(kern->ops->begin_step(kern, batch), "begin_step");
    kern->ops->embed(kern, m->x, m->embed, 1, batch->tokens, batch->rows);
    for (int layer = 0; layer < m->layers; layer++) run_layer(m, layer, batch);
    kern->ops->rms_norm(kern, m->norm, m->x, m->norm_weight, batch->rows, m->d, 1e-5f);
    kern->ops->matmul(kern, m->logits, m->norm, m->head, NULL, batch->rows, KERN_SET);
    must(kern->ops->sample(kern, m->logits, batch->rows, m->vocab, samples, sampled), "sample");
}

/* Entries without content: only their number matters. */
static void fill_slots(const struct step_model *m, int count) {
    for (int i = 0; i < count; i++) {
        struct kern_span span = {.slot = i, .count = m->entries};
        struct kern_batch batch = {.spans = &span, .span_count = 1, .rows = m->entries};
        must(kern->ops->begin_step(kern, &batch), "begin_step");
        must(kern->ops->sync(kern), "entries");
    }
}

/* Reports `steps` steps that took `ms` each. */
static void step_rows(const struct step_model *m, int count, const struct mode *mode, double ms,
                      double graphs, double queued) {
    char how[64], name[128], key[32], predicted[48];
    double best = roofline(mode, count, m->entries);
    bool full = m->entries == scaled(FULL_CACHE, 160), first = shape == &shapes[0];
    bool keyed = mode->keyed && first && !full;
    snprintf(how, sizeof how, "%d x %d entries%s", count, m->entries, mode->how);
    snprintf(name, sizeof name, "decoding, %s: steps launched as a graph", how);
    snprintf(key, sizeof key, "graphs_%d", count);
    keyed_row(keyed ? key : "", name, graphs, "of 1", mode->eager ? "0" : "1");
    snprintf(name, sizeof name, "decoding, %s: operations", how);
    row(name, queued, "a step", "");
    snprintf(name, sizeof name, "decoding, %s", how);
    snprintf(key, sizeof key, "step_ms_%d", count);
    snprintf(predicted, sizeof predicted, "%.2f at the roofline of an H200", best);
    print_row(keyed ? key : "", name, ms, "ms", predicted);
    snprintf(name, sizeof name, "decoding, %s: output", how);
    snprintf(key, sizeof key, "output_%d", count);
    snprintf(predicted, sizeof predicted, "%.0f at the roofline of an H200", 1e3 * count / best);
    print_row(full && first ? "full"
              : keyed       ? key
                            : "",
              name, 1e3 * count / ms, "tokens/s", predicted);
}

/* One token of each sequence, all at position `pos`. */
static void one_step(struct step_model *m, int count, int pos) {
    static int32_t tokens[256];
    struct kern_span spans[256];
    const struct kern_batch batch = {
        .tokens = tokens, .spans = spans, .rows = count, .span_count = count};
    for (int i = 0; i < count; i++)
        spans[i] = (struct kern_span){.slot = i, .row = i, .count = 1, .pos = pos};
    run_step(m, &batch);
}

static void time_step(struct step_model *m, int count, const struct mode *mode) {
    int steps = scaled(STEPS, 3), warm = 3;
    double start = 0;
    uint64_t graphs = 0, queued = 0, waits = 0;
    fill_slots(m, count);
    for (int step = 0; step < warm + steps; step++) {
        if (step == warm)
            start = now(), queued = cuda_queued(kern), graphs = cuda_replays(kern),
            waits = cuda_waits(kern);
        one_step(m, count, m->entries + step);
    }
    step_rows(m, count, mode, 1e3 * (now() - start) / steps,
              (double)(cuda_replays(kern) - graphs) / steps,
              (double)(cuda_queued(kern) - queued) / steps);
    if (mode->keyed && count == 1)
        keyed_row("waits", "decoding: times that the host waits",
                  (double)(cuda_waits(kern) - waits) / steps, "a step",
                  "1: errors, counts and tokens");
    for (int i = 0; i < count; i++) kern->ops->release(kern, i);
}

/* Sequences of `entries`, as many as `most`, at each of `counts` that are not more. */
static void time_steps(const struct mode *mode, const int *counts, int sizes, int entries) {
    struct step_model m;
    const struct cuda_options cuda = {.eager = mode->eager, .apart = mode->apart};
    int most = counts[sizes - 1];
    open_backend(scaled(shape->layers, 2),
                 (int64_t)most * (entries + scaled(64, 24)) * scaled(shape->layers, 2) *
                     shape->heads_kv,
                 &cuda);
    if (mode->to != QUANTIZE_FP8 || has_fp8()) {
        open_step_model(&m, most, entries, mode->to);
        for (int i = 0; i < sizes; i++) time_step(&m, counts[i], mode);
        close_step_model(&m);
    }
    kern->ops->close(kern);
}

/* The full cache at its best: as many long sequences as a device of `mib` holds beside a model. */
static void time_full(double mib, const struct mode *mode) {
    double bytes = FULL_CACHE * shape->layers * shape->heads_kv * ENTRY_BYTES;
    int count = small ? 2
                      : (int)fmin(256, (mib * 1048576 - DAEMON_BYTES -
                                        2 * (layer_weights() + 2 * head_weights())) /
                                           bytes);
    if (count < 1) return;
    keyed_row("full_count", "sequences of 16,384 that fit beside the model", count, "", "59");
    time_steps(mode, &count, 1, scaled(FULL_CACHE, 160));
}

static void time_products(const enum quantization *formats, int count) {
    for (int i = 0; i < count; i++) {
        enum quantization to = formats[i];
        if (to == QUANTIZE_FP8 && !has_fp8()) continue;
        if (small) {
            time_product("small", 32, 64, to);
            continue;
        }
        time_product("qkv", (int)qkv_width(), shape->d, to);
        time_product("o", shape->d, (int)heads_width(), to);
        time_product("gate_up", 2 * shape->ff, shape->d, to);
        time_product("down", shape->d, shape->ff, to);
    }
    list_products();
}

/* ---- Parts: each a run of this program, so that one that fails takes no other with it ---- */

static const int counts[] = {1, 64, 256}, few[] = {1, 2, 3};

static void run_steps(const struct mode *mode) {
    time_steps(mode, small ? few : counts, 3, scaled(STEP_CACHE, 40));
}

/* Operations without a whole model: a backend with one layer. */
static void open_operations(void) {
    const struct cuda_options plain = {.device = 0};
    open_backend(1, small ? 8192 : (int64_t)256 * 1200 * shape->heads_kv, &plain);
}

static void part_products(double mib) {
    (void)mib;
    open_operations();
    time_copy();
    time_products((const enum quantization[]){QUANTIZE_NONE}, 1);
    kern->ops->close(kern);
}

static void part_attention(double mib) {
    (void)mib;
    open_operations();
    time_decodes();
    time_prefill("", scaled(2048, 32), "200 or more");
    time_prefill("prefill", scaled(8192, 48), "250 to 320");
    kern->ops->close(kern);
}

/* ---- Recurrent states ---- */

/* One layer of these shapes: LFM2-1.2B; Qwen3-Next; Nemotron 3 Nano. */
struct recurrent {
    const char *name;
    int channels, width; /* a short convolution's; 0: there is none */
    struct kern_delta delta;
    struct kern_mamba mamba;
    float *numbers; /* for every array of the layer */
    float *y, *in, *rates;
    struct kern_batch batch;
};

static int recurrent_floats(const struct recurrent *r) {
    if (r->channels) return r->channels * (r->width - 1);
    if (r->delta.heads_k) return r->delta.heads_k * kern_delta_head_floats(&r->delta);
    return kern_mamba_shared_floats(&r->mamba) + r->mamba.heads * kern_mamba_head_floats(&r->mamba);
}

static void do_recurrent(void *arg) {
    struct recurrent *r = arg;
    if (r->channels)
        kern->ops->short_conv(kern, 0, r->y, r->in, r->numbers, r->channels, r->width, &r->batch);
    else if (r->delta.heads_k)
        kern->ops->delta(kern, 0, r->y, r->in, r->rates, &r->delta, &r->batch);
    else
        kern->ops->mamba(kern, 0, r->y, r->in, r->rates, &r->mamba, &r->batch);
}

static void open_recurrent(const struct recurrent *r, int slots, int positions) {
    const int64_t state = (recurrent_floats(r) + 2047) / 2048, entries = (positions + 31) / 32;
    const struct kern_cache_options options = {.layers = 1,
                                               .heads_q = 1,
                                               .heads_kv = 1,
                                               .head_dim = 64,
                                               .dtype = KERN_BF16,
                                               .states = 1,
                                               .state_floats = recurrent_floats(r),
                                               .state_heads = r->mamba.heads,
                                               .rows_max = positions,
                                               .pages = slots * (state + entries),
                                               .slots = slots,
                                               .max_positions = positions};
    const struct cuda_options plain = {.device = 0};
    struct fault fault = {0};
    int rc = cuda_probe(&fault);
    if (!rc) rc = cuda_open(&plain, &kern, &fault);
    if (!rc) rc = kern->ops->cache_open(kern, &options, &fault);
    if (rc) fail("open", rc, &fault);
}

/* `count` sequences of `rows` rows each in one call. */
static double recurrent_seconds(struct recurrent *r, int count, int rows) {
    struct kern_span spans[64];
    for (int i = 0; i < count; i++) spans[i] = (struct kern_span){.slot = i, .count = rows};
    append(spans, count, NULL, &r->batch);
    double t = seconds(do_recurrent, r);
    for (int i = 0; i < count; i++) kern->ops->release(kern, i);
    return t;
}

static void time_recurrent(struct recurrent *r) {
    const int sequences = scaled(64, 2), tokens = scaled(2048, 24);
    const double bytes = 4.0 * recurrent_floats(r);
    char name[96];
    open_recurrent(r, sequences, tokens);
    r->numbers = numbers((size_t)1 << 18);
    r->delta.taps = r->delta.decay = r->delta.bias = r->delta.norm = r->numbers;
    r->mamba.taps = r->mamba.decay = r->mamba.bias = r->mamba.skip = r->mamba.norm = r->numbers;
    r->y = numbers((size_t)tokens * 8192);
    r->in = numbers((size_t)tokens * 16384);
    r->rates = numbers((size_t)tokens * 4096);
    snprintf(name, sizeof name, "%s, a row of %d sequences", r->name, sequences);
    row(name, 1e-12 * 2 * bytes * sequences / recurrent_seconds(r, sequences, 1), "TB/s",
        r->channels ? "" : "2.5 or more");
    snprintf(name, sizeof name, "%s, a prompt of %d", r->name, tokens);
    row(name, 1e3 * recurrent_seconds(r, 1, tokens), "ms", r->channels ? "0.1" : "0.5");
    kern->ops->mem_free(kern, r->numbers);
    kern->ops->mem_free(kern, r->y);
    kern->ops->mem_free(kern, r->in);
    kern->ops->mem_free(kern, r->rates);
    kern->ops->close(kern);
}

static void part_states(double mib) {
    (void)mib;
    struct recurrent conv = {.name = "short convolution", .channels = 2048, .width = 3};
    struct recurrent delta = {
        .name = "gated delta rule",
        .delta = {.heads_k = 16, .heads_v = 32, .dim_k = 128, .dim_v = 128, .width = 4}};
    struct recurrent mamba = {
        .name = "Mamba-2",
        .mamba = {.heads = 64, .groups = 8, .dim = 64, .dim_state = 128, .width = 4}};
    if (small) {
        conv.channels = 64;
        delta.delta.heads_k = delta.delta.heads_v = 1;
        mamba.mamba.heads = mamba.mamba.groups = 1;
    }
    time_recurrent(&conv);
    time_recurrent(&delta);
    time_recurrent(&mamba);
}

static void part_steps(double mib) {
    (void)mib;
    run_steps(&(const struct mode){"", .keyed = true});
}

/* Every kernel of a step by itself: the sum is more than a step's time, in which they overlap and
 * are launched as a graph. */
static void time_each(int count) {
    enum { ROUNDS = 4, KINDS = 64 };
    static struct cuda_time kinds[KINDS];
    struct step_model m;
    const struct cuda_options cuda = {.timed = true};
    int entries = scaled(STEP_CACHE, 40), layers = scaled(shape->layers, 2), found = 0;
    double all = 0;
    char name[160];
    open_backend(layers, (int64_t)count * (entries + scaled(64, 24)) * layers * shape->heads_kv,
                 &cuda);
    open_step_model(&m, count, entries, QUANTIZE_NONE);
    fill_slots(&m, count);
    uint64_t queued = 0;
    for (int step = 0; step < 2 + ROUNDS; step++) {
        if (step == 2) (void)cuda_times(kern, kinds, KINDS), queued = cuda_queued(kern);
        one_step(&m, count, entries + step);
    }
    snprintf(name, sizeof name, "a step of %d x %d entries, kernel by kernel: operations", count,
             entries);
    row(name, (double)(cuda_queued(kern) - queued) / ROUNDS, "a step", "");
    found = cuda_times(kern, kinds, KINDS);
    for (int i = 0; i < found; i++) {
        snprintf(name, sizeof name, "a step of %d x %d entries: %.79s, %g times", count, entries,
                 kinds[i].name, (double)kinds[i].count / ROUNDS);
        row(name, kinds[i].us / ROUNDS, "us", "");
        all += kinds[i].us / ROUNDS;
    }
    snprintf(name, sizeof name, "a step of %d x %d entries: all kernels", count, entries);
    if (found) row(name, all, "us", "");
    for (int i = 0; i < count; i++) kern->ops->release(kern, i);
    close_step_model(&m);
    kern->ops->close(kern);
}

static void part_each(double mib) {
    (void)mib;
    time_each(1);
    time_each(scaled(64, 2));
}

static void part_modes(double mib) {
    (void)mib;
    run_steps(&(const struct mode){", nothing overlapping", .apart = true});
    run_steps(&(const struct mode){", graphs off", .eager = true});
}

static void part_eviction(double mib) {
    const struct cuda_options plain = {.device = 0};
    (void)mib;
    open_backend(scaled(shape->layers, 2), small ? 8192 : (int64_t)8 * 1300 * 32 * shape->heads_kv,
                 &plain);
    time_evictions();
    kern->ops->close(kern);
}

static void part_formats(double mib) {
    (void)mib;
    open_operations();
    time_products((const enum quantization[]){QUANTIZE_FP8, QUANTIZE_Q8, QUANTIZE_Q4}, 3);
    kern->ops->close(kern);
    run_steps(&(const struct mode){", weights in fp8", .to = QUANTIZE_FP8});
    run_steps(&(const struct mode){", weights in 4 bits", .to = QUANTIZE_Q4});
}

static void part_full(double mib) {
    time_full(mib, &(const struct mode){"", .keyed = true});
}

static const struct part {
    const char *name;
    void (*run)(double mib);
} parts[] = {{"products", part_products}, {"each", part_each},   {"attention", part_attention},
             {"steps", part_steps},       {"modes", part_modes}, {"eviction", part_eviction},
             {"formats", part_formats},   {"full", part_full},   {"states", part_states}};

#define PART_COUNT ((int)(sizeof parts / sizeof *parts))

static int print_usage(void) {
    fprintf(stderr, "usage: gpu_bench SHAPE PART MIB|small\nshapes:");
    for (int i = 0; i < SHAPE_COUNT; i++) fprintf(stderr, " %s", shapes[i].name);
    fprintf(stderr, "\nparts:");
    for (int i = 0; i < PART_COUNT; i++) fprintf(stderr, " %s", parts[i].name);
    fputc('\n', stderr);
    return 64;
}

int main(int argc, char **argv) {
    const struct part *part = NULL;
    if (argc != 4) return print_usage();
    shape = NULL;
    for (int i = 0; i < SHAPE_COUNT; i++)
        if (strcmp(argv[1], shapes[i].name) == 0) shape = &shapes[i];
    for (int i = 0; i < PART_COUNT; i++)
        if (strcmp(argv[2], parts[i].name) == 0) part = &parts[i];
    double mib = strtod(argv[3], NULL);
    small = strcmp(argv[3], "small") == 0;
    if (!shape || !part || (!small && mib <= 0)) return print_usage();
    part->run(mib);
    return 0;
}
