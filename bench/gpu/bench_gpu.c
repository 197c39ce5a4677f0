/* Times the CUDA backend's operations, one JSON object per line: what, number, unit, prediction.
 * Shapes are Llama-3.1-8B's. Random numbers everywhere: nothing here depends on values.
 *
 *     bench_gpu [small]      small: sizes for a dry run under the emulator
 */
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/cuda/cuda.h"

#define HEADS_Q  32
#define HEADS_KV 8
#define DIM      128
#define MODEL    4096

static bool small;
static struct kern *kern;

static int scaled(int size, int dry) {
    return small ? dry : size;
}

static void fail(const char *what, int code, const struct fault *fault) {
    fprintf(stderr, "bench_gpu: %s: %s %s\n", what, err_text(code), fault ? fault->text : "");
    exit(1);
}

static void must(int code, const char *what) {
    if (code) fail(what, code, NULL);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void row(const char *name, double value, const char *unit, const char *prediction) {
    printf("{\"name\": \"%s\", \"value\": %.6g, \"unit\": \"%s\", \"prediction\": \"%s\"}\n", name,
           value, unit, prediction);
    fflush(stdout);
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

/* ---- Bandwidth and products --------------------------------------------------------------------
 */

struct copy {
    float *to, *from;
    int32_t *index;
    int rows;
};

static void do_copy(void *arg) {
    struct copy *c = arg;
    kern->ops->gather_rows(kern, c->to, c->from, c->index, c->rows, MODEL);
}

static void time_copy(void) {
    struct copy c = {.rows = scaled(65536, 4)};
    size_t count = (size_t)c.rows * MODEL;
    c.to = numbers(count);
    c.from = numbers(count);
    c.index = malloc((size_t)c.rows * sizeof *c.index);
    for (int i = 0; i < c.rows; i++) c.index[i] = i;
    row("copy of rows", 2e-12 * (double)count * 4 / seconds(do_copy, &c), "TB/s", "4.3 (H200)");
    kern->ops->mem_free(kern, c.to);
    kern->ops->mem_free(kern, c.from);
    free(c.index);
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

static void time_product(const char *name, int outputs, int inputs) {
    static const int rows[] = {1, 64, 256, 512};
    struct product p;
    size_t count = (size_t)outputs * (size_t)inputs;
    uint16_t *file = calloc(count, sizeof *file);
    for (size_t i = 0; i < count; i++) file[i] = (uint16_t)(0x3c00 + i * 37 % 256);
    const struct kern_matrix matrix = {
        .data = file, .dtype = KERN_BF16, .rows = outputs, .cols = inputs};
    must(kern->ops->weight_load(kern, &matrix, 1, KERN_SHARD_NONE, &p.weight, NULL), "weight");
    free(file);
    p.x = numbers((size_t)512 * (size_t)inputs);
    p.y = numbers((size_t)512 * (size_t)outputs);
    for (int i = 0; i < (small ? 1 : 4); i++) {
        char label[96];
        p.rows = rows[i];
        double t = seconds(do_product, &p);
        snprintf(label, sizeof label, "product %s, %d rows: weights read", name, rows[i]);
        row(label, 2e-12 * (double)count / t, "TB/s", rows[i] == 1 ? "3.9 to 4.3" : "");
        snprintf(label, sizeof label, "product %s, %d rows: arithmetic", name, rows[i]);
        row(label, 2e-12 * (double)count * rows[i] / t, "TFLOP/s", rows[i] == 512 ? "600" : "");
    }
    kern->ops->weight_free(kern, p.weight);
    kern->ops->mem_free(kern, p.x);
    kern->ops->mem_free(kern, p.y);
}

/* ---- Attention
 * ----------------------------------------------------------------------------------- */

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

static const size_t width = (size_t)(HEADS_Q + 2 * HEADS_KV) * DIM;

/* Prompts of these lengths, then one row each; a fresh backend per case keeps pools apart. */
static void time_decode(const char *name, const int *lengths, int count, const char *prediction) {
    struct attention a = {.spans = calloc((size_t)count, sizeof *a.spans)};
    double entries = 0;
    int longest = 0;
    for (int i = 0; i < count; i++) {
        entries += lengths[i] + 1;
        longest = lengths[i] > longest ? lengths[i] : longest;
    }
    a.qkv = numbers(width * (size_t)(longest > count ? longest : count));
    a.out = numbers((size_t)count * HEADS_Q * DIM);
    for (int i = 0; i < count; i++) {
        struct kern_span prompt = {.slot = i, .count = lengths[i]};
        append(&prompt, 1, a.qkv, &a.batch);
        a.spans[i] = (struct kern_span){.slot = i, .count = 1, .pos = lengths[i]};
        must(kern->ops->sync(kern), "prompt");
    }
    append(a.spans, count, a.qkv, &a.batch);
    double t = seconds(do_attend, &a);
    row(name, 1e-12 * entries * HEADS_KV * DIM * 4 / t, "TB/s", prediction);
    for (int i = 0; i < count; i++) kern->ops->release(kern, i);
    kern->ops->mem_free(kern, a.qkv);
    kern->ops->mem_free(kern, a.out);
    free(a.spans);
}

static void time_decodes(void) {
    static const int counts[] = {1, 8, 64, 256};
    static const char *const predictions[] = {"", "", ">= 3.0", ">= 3.0"};
    int lengths[256];
    for (int c = 0; c < (small ? 1 : 4); c++) {
        char name[96];
        for (int i = 0; i < counts[c]; i++) lengths[i] = scaled(1088, 40) - 1;
        snprintf(name, sizeof name, "decode attention, %d x %d entries", counts[c], lengths[0] + 1);
        time_decode(name, lengths, counts[c], predictions[c]);
    }
    for (int i = 0; i < 64; i++) /* 40 to 4,000, evenly in the logarithm */
        lengths[i] = (int)(40 * pow(100, (double)(i * 29 % 64) / 63));
    if (!small)
        time_decode("decode attention, 64 sequences of 40 to 4,000 entries", lengths, 64,
                    "within 5 % of even lengths");
}

static void time_prefill(int tokens, const char *prediction) {
    struct kern_span span = {.slot = 0, .count = tokens};
    struct attention a = {.qkv = numbers(width * (size_t)tokens),
                          .out = numbers((size_t)tokens * HEADS_Q * DIM)};
    char name[64];
    append(&span, 1, a.qkv, &a.batch);
    double t = seconds(do_attend, &a);
    snprintf(name, sizeof name, "prefill attention, causal, %d tokens", tokens);
    row(name, 1e-12 * 2 * (double)tokens * tokens * HEADS_Q * DIM / t, "TFLOP/s", prediction);
    kern->ops->release(kern, 0);
    kern->ops->mem_free(kern, a.qkv);
    kern->ops->mem_free(kern, a.out);
}

/* ---- Eviction
 * ------------------------------------------------------------------------------------ */

/* Once: evicting changes what there is to evict. The whole sequence, all layers. */
static void time_evict(int layers, int sequences, int entries, int keep) {
    const struct kern_rule rule = {
        .score = KERN_SCORE_RETENTION, .pool = KERN_POOL_SEQUENCE, .sinks = 4, .horizon = 128};
    struct kern_evict due[64];
    float *beta = numbers((size_t)entries * HEADS_KV), *qkv = numbers(width * (size_t)entries);
    for (int i = 0; i < sequences; i++) {
        struct kern_span span = {.slot = i, .count = entries};
        struct kern_batch batch = {.spans = &span, .span_count = 1, .rows = entries};
        must(kern->ops->begin_step(kern, &batch), "begin_step");
        for (int layer = 0; layer < layers; layer++)
            kern->ops->write_kv(kern, layer, qkv, beta, &batch);
        must(kern->ops->sync(kern), "entries");
        due[i] = (struct kern_evict){.slot = i, .tokens = entries, .keep = keep, .rule = &rule};
    }
    char name[96];
    double start = now();
    must(kern->ops->evict(kern, due, sequences), "evict");
    must(kern->ops->sync(kern), "evict");
    snprintf(name, sizeof name, "eviction of %d sequence(s), %d streams, %d to %d entries",
             sequences, layers * HEADS_KV, entries, keep);
    row(name, 1e6 * (now() - start), "us", sequences == 1 ? "15 + 62 (one wait included)" : "");
    for (int i = 0; i < sequences; i++) kern->ops->release(kern, i);
    kern->ops->mem_free(kern, beta);
    kern->ops->mem_free(kern, qkv);
}

static void open_backend(int layers, int64_t entries) {
    const struct cuda_options cuda = {.device = 0};
    struct fault fault = {0};
    struct kern_cache_options options = {.layers = layers,
                                         .heads_q = HEADS_Q,
                                         .heads_kv = HEADS_KV,
                                         .head_dim = DIM,
                                         .dtype = KERN_BF16,
                                         .pages = entries / 16,
                                         .slots = 256,
                                         .max_positions = 16384};
    int code = cuda_probe(&fault);
    if (!code) code = cuda_open(&cuda, &kern, &fault);
    if (!code) code = kern->ops->cache_open(kern, &options, &fault);
    if (code) fail("open", code, &fault);
}

int main(int argc, char **argv) {
    small = argc > 1 && strcmp(argv[1], "small") == 0;
    open_backend(1, small ? 8192 : (int64_t)256 * 1200 * HEADS_KV);
    time_copy();
    if (small) {
        time_product("small", 32, 64);
    } else {
        time_product("qkv", 6144, MODEL);
        time_product("o", MODEL, MODEL);
        time_product("gate_up", 28672, MODEL);
        time_product("down", MODEL, 14336);
    }
    time_decodes();
    time_prefill(scaled(2048, 32), "200 or more");
    if (!small) time_prefill(8192, "250 to 320");
    kern->ops->close(kern);
    open_backend(scaled(32, 2), small ? 8192 : (int64_t)8 * 1300 * 32 * HEADS_KV);
    time_evict(scaled(32, 2), 1, scaled(1152, 48), scaled(1024, 40));
    if (!small) time_evict(32, 4, 1152, 1024);
    kern->ops->close(kern);
    return 0;
}
