/* Times the CPU backend's operations and a whole model's worth of them, as shares of what this
 * machine can do, measured in the same process: its streaming read bandwidth and, for many rows,
 * its best product.
 *
 *   bench_kernels [--path P] [--threads N] [--seconds S] [--thin N]
 *                 [--only products|attention|decode|prompt|policies]
 *                 [--weights bf16|e4m3|q8|q4|q4m] [--kv-dtype bf16|f32|fp8|q8|q4]
 *                 [--activations int8|int16|bf16|auto]
 *
 * The model is a Qwen3-0.6B shape with random weights: no engine, no tokenizer. Results and dropped
 * experiments: README.md. */
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "kernels/blocks.h"
#include "kernels/cpu/alloc.h"
#include "kernels/cpu/internal.h"
#include "paging/policy.h"

struct shape {
    int layers, d_model, d_ff, heads_q, heads_kv, head_dim, vocab;
};

static struct {
    const char *path, *only;
    int threads;
    double seconds; /* per measurement */
    struct shape shape;
    enum kern_dtype weights; /* format of the layers' weights and, in blocks, of the vocabulary's */
    enum kern_dtype cache;   /* format of keys and values */
    enum cpu_activations activations;
    struct kern *kern;
    double bandwidth; /* bytes per second, read by all threads */
} bench = {.path = "auto",
           .seconds = 1,
           .weights = KERN_BF16,
           .cache = KERN_BF16,
           .shape = {.layers = 28,
                     .d_model = 1024,
                     .d_ff = 3072,
                     .heads_q = 16,
                     .heads_kv = 8,
                     .head_dim = 128,
                     .vocab = 151936}};

/* With one thread, CPU time: the time that other processes take does not count. */
static double now(void) {
    struct timespec t;
    if (bench.threads != 1) return (double)clock_ns() * 1e-9;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void fail(const char *what, int rc, const struct fault *fault) {
    fprintf(stderr, "bench_kernels: %s: %s %s\n", what, err_text(rc), fault ? fault->text : "");
    exit(1);
}

static void *memory(size_t bytes) {
    void *mem = cpu_alloc(bytes);
    if (!mem) fail("memory", ERR_NOMEM, NULL);
    return mem;
}

static float *floats(size_t count) {
    float *mem = memory(count * sizeof *mem);
    uint32_t x = 12345;
    for (size_t i = 0; i < count; i++) {
        x = x * 1664525 + 1013904223;
        mem[i] = (float)(int32_t)x * 0x1p-33f;
    }
    return mem;
}

static bool wanted(const char *what) {
    return !bench.only || strstr(what, bench.only);
}

/* ---- Limits of the machine ---- */

#define READ_BYTES   ((size_t)2 << 30)
#define WINDOW_BYTES ((size_t)64 << 20)
#define STREAMS      4

struct reading {
    const char *data; /* start of the window that is read */
    struct cpu_tickets tickets;
    uint64_t sum[CPU_TEAM_THREADS_MAX][8];
};

typedef uint64_t words __attribute__((vector_size(64)));

/* Portions of 1 MiB, each read as four streams fetched ahead. */
static void read_portion(void *arg, int worker) {
    struct reading *r = arg;
    const int64_t portion = 1 << 20, step = portion / STREAMS;
    words sum[STREAMS] = {0};
    int64_t end;
    for (int64_t i; (i = cpu_tickets_take(&r->tickets, 1, &end)) >= 0;) {
        const char *from = r->data + i * portion;
        for (int64_t at = 0; at < step; at += 64)
            for (int s = 0; s < STREAMS; s++) {
                __builtin_prefetch(from + s * step + at + 2048);
                sum[s] += *(const words *)(from + s * step + at);
            }
    }
    words all = sum[0] + sum[1] + sum[2] + sum[3];
    memcpy(r->sum[worker], &all, sizeof all);
}

/* The best window of 64 MiB out of 2 GiB read in turn: as long as the operations timed below, and
 * never in a cache. */
static double measure_bandwidth(void) {
    struct cpu *cpu = cpu_of(bench.kern);
    static char *data;
    if (!data) {
        data = memory(READ_BYTES);
        memset(data, 1, READ_BYTES);
    }
    double best = 0, begin = now();
    for (size_t at = 0; now() - begin < bench.seconds; at = (at + WINDOW_BYTES) % READ_BYTES) {
        static struct reading r;
        r.data = data + at;
        cpu_tickets_set(&r.tickets, (int64_t)(WINDOW_BYTES >> 20));
        double start = now();
        cpu_team_run(cpu->team, read_portion, &r);
        best = fmax(best, (double)WINDOW_BYTES / (now() - start));
    }
    return best;
}

/* ---- Timing: the best of many, so that a busy neighbour does not count ---- */

typedef void piece(void *arg);

static double best_time(piece *run, void *arg) {
    double best = 1e9, begin = now();
    int runs = 0;
    while (runs < 3 || now() - begin < bench.seconds) {
        double start = now();
        run(arg);
        best = fmin(best, now() - start);
        runs++;
    }
    return best;
}

static char *random_blocks(int rows, int cols, enum kern_dtype dtype) {
    size_t count = (size_t)rows * (size_t)blocks_of(cols);
    struct block *data = memory(count * sizeof *data);
    uint32_t x = 777;
    for (size_t i = 0; i < count; i++) {
        block_set_factors(&data[i], block_is_narrow(dtype) ? 0x1p-8f : 0x1p-12f,
                          dtype == KERN_Q4M ? -0x1p-5f : BLOCK_NO_LEAST);
        for (int k = 0; k < KERN_BLOCK; k++) {
            x = x * 1664525 + 1013904223;
            data[i].n[k] = (int8_t)(dtype == KERN_Q4    ? (int)(x >> 28) - 8
                                    : dtype == KERN_Q4M ? (int)(x >> 28)
                                                        : (int)(x >> 24) - 128);
        }
    }
    return (char *)data;
}

static char *random_matrix(int rows, int cols, enum kern_dtype dtype) {
    if (kern_dtype_blocks(dtype)) return random_blocks(rows, cols, dtype);
    size_t count = (size_t)rows * (size_t)cols;
    char *data = memory(count * kern_dtype_bytes(dtype));
    uint32_t x = 777;
    for (size_t i = 0; i < count; i++) {
        x = x * 1664525 + 1013904223;
        float value = (float)(int32_t)x * 0x1p-36f;
        uint16_t half = number_to_bf16(value);
        if (dtype == KERN_F32)
            memcpy(data + 4 * i, &value, 4);
        else if (dtype == KERN_E4M3)
            data[i] = (char)number_to_e4m3(value * 0x1p12f);
        else
            memcpy(data + 2 * i, &half, 2);
    }
    return data;
}

/* In memory, with the factors of blocks. */
static size_t weight_bytes(int rows, int cols, enum kern_dtype dtype) {
    if (kern_dtype_blocks(dtype)) return (size_t)rows * blocks_bytes(dtype, cols);
    return (size_t)rows * (size_t)cols * kern_dtype_bytes(dtype);
}

static const char *dtype_name(enum kern_dtype dtype) {
    static const char *const names[] = {
        [KERN_F32] = "f32", [KERN_F16] = "f16", [KERN_BF16] = "bf16", [KERN_E4M3] = "e4m3",
        [KERN_Q8] = "q8",   [KERN_Q8M] = "q8m", [KERN_Q4] = "q4",     [KERN_Q4M] = "q4m"};
    return names[dtype];
}

static struct kern_weight *load_weight(const char *data, int rows, int cols,
                                       enum kern_dtype dtype) {
    float *scale = dtype == KERN_E4M3 ? floats((size_t)rows) : NULL;
    struct kern_matrix m = {
        .data = data, .dtype = dtype, .rows = rows, .cols = cols, .scale = scale};
    struct kern_weight *w;
    struct fault fault;
    int rc = bench.kern->ops->weight_load(bench.kern, &m, 1, KERN_SHARD_NONE, &w, &fault);
    if (rc) fail("weight", rc, &fault);
    cpu_free(scale);
    return w;
}

static struct kern_weight *random_weight(int rows, int cols, enum kern_dtype dtype) {
    char *data = random_matrix(rows, cols, dtype);
    struct kern_weight *w = load_weight(data, rows, cols, dtype);
    cpu_free(data);
    return w;
}

/* ---- Products ---- */

/* Weights in turn, so that none stays in a second-level cache */
#define COPIES_BYTES ((size_t)1 << 30)

struct product {
    struct kern_weight **weight;
    int copies, each, turn, rows;
    float *x, *y;
};

/* A few at a time, about a window of weights, going round all copies. */
static void run_product(void *arg) {
    struct product *p = arg;
    for (int i = 0; i < p->each; i++, p->turn = (p->turn + 1) % p->copies)
        bench.kern->ops->matmul(bench.kern, p->y, p->x, p->weight[p->turn], NULL, p->rows,
                                KERN_SET);
}

static void bench_product(int rows, int outputs, int cols, enum kern_dtype dtype) {
    size_t bytes = weight_bytes(outputs, cols, dtype);
    size_t window = rows > 64 ? bytes : WINDOW_BYTES / 4;
    struct product p = {
        .rows = rows, .copies = (int)(COPIES_BYTES / bytes) + 1, .each = (int)(window / bytes) + 1};
    p.weight = memory((size_t)p.copies * sizeof *p.weight);
    char *data = random_matrix(outputs, cols, dtype);
    for (int i = 0; i < p.copies; i++) p.weight[i] = load_weight(data, outputs, cols, dtype);
    cpu_free(data);
    p.x = floats((size_t)rows * (size_t)cols);
    p.y = floats((size_t)rows * (size_t)outputs);
    double each = best_time(run_product, &p) / p.each;
    double rate = (double)bytes / each;
    printf("%-5s %4d rows %6d x %4d  %9.1f us  %6.1f GB/s (%3.0f%% of reading)  %7.1f GFLOP/s\n",
           dtype_name(dtype), rows, outputs, cols, each * 1e6, rate * 1e-9,
           100 * rate / bench.bandwidth, 2.0 * rows * outputs * cols / each * 1e-9);
    for (int i = 0; i < p.copies; i++) bench.kern->ops->weight_free(bench.kern, p.weight[i]);
    cpu_free(p.weight), cpu_free(p.x), cpu_free(p.y);
}

static void bench_products(void) {
    static const enum kern_dtype dtypes[] = {KERN_BF16, KERN_E4M3, KERN_Q8, KERN_Q4, KERN_Q4M};
    static const int rows[] = {1, 8, 16, 32, 64, 128, 512};
    static const int sizes[][2] = {{4096, 1024}, {1024, 2048}, {6144, 1024}, {1024, 3072}};
    for (size_t s = 0; s < 4; s++)
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
            for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++)
                bench_product(rows[i], sizes[s][0], sizes[s][1], dtypes[d]);
    bench_product(1, 4096, 1024, KERN_F32);
    bench_product(512, 4096, 1024, KERN_F32);
}

/* ---- A model's worth ---- */

#define STEP_ROWS 512
#define CONTEXT   8192
#define SLOTS     32

struct layer {
    struct kern_weight *qkv, *o, *gate_up, *down;
};

struct model {
    struct layer *layer;
    struct kern_weight *vocab;
    float *norm, *noise, *x, *h, *qkv, *att, *ff, *act, *logits;
    float inv_freq[64];
    size_t bytes; /* size of all weights, each read once per step */
};

/* Where a step's time goes. */
enum stage { NORM, QKV, ROPE, ATTEND, O, GATE_UP, GLU, DOWN, LOGITS, STAGES };
static const char *const stage_names[STAGES] = {"norm",    "qkv", "rope", "attend", "o",
                                                "gate_up", "glu", "down", "logits"};
static struct {
    double spent[STAGES];
    double best[STAGES]; /* the shortest call */
} stages;

static double stage(enum stage which, double since) {
    double t = now();
    stages.spent[which] += t - since;
    stages.best[which] = fmin(stages.best[which], t - since);
    return t;
}

static void step(struct model *m, const struct kern_batch *batch, const int32_t *want, int wants) {
    const struct kern_ops *ops = bench.kern->ops;
    const struct shape *s = &bench.shape;
    struct kern *k = bench.kern;
    int rows = batch->rows;
    struct kern_attend_options attend = {.scale = 1 / sqrtf((float)s->head_dim)};
    struct kern_rope rope = {.inv_freq = m->inv_freq, .scale = 1};
    if (ops->begin_step(k, batch)) fail("begin_step", ERR_FULL, NULL);
    ops->embed(k, m->x, m->vocab, 1, batch->tokens, rows);
    double t = now();
    for (int i = 0; i < s->layers; i++) {
        ops->rms_norm(k, m->h, m->x, m->norm, rows, s->d_model, 1e-6f);
        t = stage(NORM, t);
        ops->matmul(k, m->qkv, m->h, m->layer[i].qkv, NULL, rows, KERN_SET);
        t = stage(QKV, t);
        ops->qk_rope(k, m->qkv, m->norm, m->norm, 1e-6f, &rope, batch);
        ops->write_kv(k, i, m->qkv, NULL, batch);
        t = stage(ROPE, t);
        ops->attend(k, i, m->att, m->qkv, batch, &attend);
        t = stage(ATTEND, t);
        ops->matmul(k, m->x, m->att, m->layer[i].o, NULL, rows, KERN_ADD);
        t = stage(O, t);
        ops->rms_norm(k, m->h, m->x, m->norm, rows, s->d_model, 1e-6f);
        t = stage(NORM, t);
        ops->matmul(k, m->ff, m->h, m->layer[i].gate_up, NULL, rows, KERN_SET);
        t = stage(GATE_UP, t);
        ops->glu(k, m->act, m->ff, rows, s->d_ff, KERN_SILU);
        t = stage(GLU, t);
        ops->matmul(k, m->x, m->act, m->layer[i].down, NULL, rows, KERN_ADD);
        t = stage(DOWN, t);
    }
    ops->gather_rows(k, m->h, m->x, want, wants, s->d_model);
    ops->rms_norm(k, m->h, m->h, m->norm, wants, s->d_model, 1e-6f);
    t = now();
    ops->matmul(k, m->logits, m->h, m->vocab, NULL, wants, KERN_SET);
    stage(LOGITS, t);
}

static void model_make(struct model *m) {
    const struct shape *s = &bench.shape;
    int qkv = (s->heads_q + 2 * s->heads_kv) * s->head_dim, att = s->heads_q * s->head_dim;
    m->layer = memory((size_t)s->layers * sizeof *m->layer);
    for (int i = 0; i < s->layers; i++)
        m->layer[i] = (struct layer){random_weight(qkv, s->d_model, bench.weights),
                                     random_weight(s->d_model, att, bench.weights),
                                     random_weight(2 * s->d_ff, s->d_model, bench.weights),
                                     random_weight(s->d_model, s->d_ff, bench.weights)};
    const enum kern_dtype vocab = kern_dtype_blocks(bench.weights) ? bench.weights : KERN_BF16;
    m->vocab = random_weight(s->vocab, s->d_model, vocab);
    m->bytes =
        (size_t)s->layers * weight_bytes(qkv + att + 3 * s->d_ff, s->d_model, bench.weights) +
        weight_bytes(s->vocab, s->d_model, vocab);
    m->norm = floats((size_t)(s->d_model > s->head_dim ? s->d_model : s->head_dim));
    for (int i = 0; i < s->d_model; i++) m->norm[i] = 1;
    for (int i = 0; i < s->head_dim / 2; i++)
        m->inv_freq[i] = (float)pow(1e6, -2.0 * i / s->head_dim);
    m->noise = floats((size_t)STEP_ROWS * (size_t)qkv);
    m->x = floats((size_t)STEP_ROWS * (size_t)s->d_model);
    m->h = floats((size_t)STEP_ROWS * (size_t)s->d_model);
    m->qkv = floats((size_t)STEP_ROWS * (size_t)qkv);
    m->att = floats((size_t)STEP_ROWS * (size_t)att);
    m->ff = floats((size_t)STEP_ROWS * 2 * (size_t)s->d_ff);
    m->act = floats((size_t)STEP_ROWS * (size_t)s->d_ff);
    m->logits = floats((size_t)SLOTS * (size_t)s->vocab);
}

/* Bytes of a token's keys and values in one layer. */
static double token_bytes(const struct shape *s) {
    return 2.0 * s->heads_kv *
           (double)(row_code_bytes(bench.cache, s->head_dim) + row_factor_bytes(bench.cache));
}

static void cache_make(void) {
    const struct shape *s = &bench.shape;
    struct kern_cache_info info;
    struct kern_cache_options o = {.layers = s->layers,
                                   .heads_q = s->heads_q,
                                   .heads_kv = s->heads_kv,
                                   .head_dim = s->head_dim,
                                   .dtype = bench.cache,
                                   .slots = SLOTS + 1,
                                   .max_positions = CONTEXT + 2 * STEP_ROWS};
    bench.kern->ops->cache_info(&o, &info);
    int64_t entries = 1100 * (SLOTS + 1);
    if (entries < o.max_positions + 1100) entries = o.max_positions + 1100;
    o.pages = (int64_t)s->layers * s->heads_kv * (entries / info.page_slots + SLOTS + 1);
    struct fault fault;
    int rc = bench.kern->ops->cache_open(bench.kern, &o, &fault);
    if (rc) fail("cache", rc, &fault);
}

/* On a busy machine a whole step is always disturbed, but hardly ever each call of an operation. */
static void report_stages(double whole) {
    double all = 0;
    for (int i = 0; i < STAGES; i++) all += stages.spent[i];
    printf("      ");
    for (int i = 0; i < STAGES; i++)
        printf(" %s %.0f%%", stage_names[i], 100 * stages.spent[i] / all);
    printf(" of %.2f ms\n       best calls, us:", whole * 1e3);
    double best = 0;
    for (int i = 0; i < STAGES; i++) {
        double calls = i == LOGITS ? 1 : i == NORM ? 2 * bench.shape.layers : bench.shape.layers;
        best += calls * stages.best[i];
        printf(" %s %.1f", stage_names[i], stages.best[i] * 1e6);
    }
    printf("; a step of them: %.2f ms\n", best * 1e3);
}

/* `count` tokens of `batch_size` sequences at position pos each; the best of several steps. The
 * position is the same every time: the cache is cut back after each step. */
static void bench_step(struct model *m, const char *what, int batch_size, int count, int pos) {
    static int32_t tokens[STEP_ROWS], want[SLOTS];
    struct kern_span spans[SLOTS];
    int rows = batch_size * count;
    for (int i = 0; i < rows; i++)
        tokens[i] = (int32_t)((unsigned)i * 7919u % (unsigned)bench.shape.vocab);
    for (int i = 0; i < batch_size; i++) {
        spans[i] = (struct kern_span){.slot = i, .row = i * count, .count = count, .pos = pos};
        want[i] = (i + 1) * count - 1;
    }
    struct kern_batch batch = {
        .tokens = tokens, .spans = spans, .rows = rows, .span_count = batch_size};
    double best = 1e9, begin = now();
    for (int i = 0; i < STAGES; i++) stages.best[i] = 1e9;
    for (int runs = 0; runs < 3 || now() - begin < bench.seconds; runs++) {
        double kept[STAGES];
        memcpy(kept, stages.spent, sizeof kept);
        memset(stages.spent, 0, sizeof stages.spent);
        double start = now();
        step(m, &batch, want, batch_size);
        double took = now() - start;
        if (took < best)
            best = took;
        else
            memcpy(stages.spent, kept, sizeof kept);
        for (int i = 0; i < batch_size; i++) bench.kern->ops->truncate(bench.kern, i, pos);
    }
    const struct shape *s = &bench.shape;
    double kv = (double)s->layers * token_bytes(s) * pos * batch_size;
    double floor_seconds = ((double)m->bytes + kv) / bench.bandwidth;
    printf("%-8s batch %2d x %3d tokens at %4d: %8.1f tokens/s, %3.0f%% of the read bandwidth\n",
           what, batch_size, count, pos, rows / best, 100 * floor_seconds / best);
    report_stages(best);
}

/* `count` entries of random keys and values, unseen by any query. */
static void append_noise(const struct model *m, int slot, int pos, int count) {
    struct kern_span span = {.slot = slot, .row = 0, .count = count, .pos = pos};
    struct kern_batch batch = {.spans = &span, .rows = count, .span_count = 1};
    if (bench.kern->ops->begin_step(bench.kern, &batch)) fail("fill", ERR_FULL, NULL);
    for (int i = 0; i < bench.shape.layers; i++)
        bench.kern->ops->write_kv(bench.kern, i, m->noise, NULL, &batch);
}

/* Gives slots [0, count) `length` positions. */
static void fill_cache(const struct model *m, int count, int length) {
    for (int slot = 0; slot < count; slot++) {
        bench.kern->ops->release(bench.kern, slot);
        for (int pos = 0; pos < length; pos += STEP_ROWS)
            append_noise(m, slot, pos, length - pos < STEP_ROWS ? length - pos : STEP_ROWS);
    }
}

/* ---- Attention alone ---- */

#define ATTENTION_BYTES 256e6 /* the cache of CONTEXT tokens, larger than a processor has */
#define PROMPT_LAYERS   4

struct attention {
    struct model m;
    struct kern_batch batch;
    int layers;
};

static void attend_layers(void *arg) {
    struct attention *a = arg;
    struct kern_attend_options options = {.scale = 1 / sqrtf((float)bench.shape.head_dim)};
    for (int i = 0; i < a->layers; i++)
        bench.kern->ops->attend(bench.kern, i, a->m.att, a->m.noise, &a->batch, &options);
}

/* `count` tokens of `batch_size` sequences at `pos`: one token in all layers, more in a few. */
static void bench_attend(struct attention *a, int batch_size, int count, int pos) {
    const struct shape *s = &bench.shape;
    struct kern_span spans[SLOTS];
    for (int i = 0; i < batch_size; i++)
        spans[i] = (struct kern_span){.slot = i, .row = i * count, .count = count, .pos = pos};
    a->batch =
        (struct kern_batch){.spans = spans, .rows = batch_size * count, .span_count = batch_size};
    a->layers = count == 1 || s->layers < PROMPT_LAYERS ? s->layers : PROMPT_LAYERS;
    fill_cache(&a->m, batch_size, pos);
    if (bench.kern->ops->begin_step(bench.kern, &a->batch)) fail("begin_step", ERR_FULL, NULL);
    for (int i = 0; i < s->layers; i++)
        bench.kern->ops->write_kv(bench.kern, i, a->m.noise, NULL, &a->batch);
    double best = best_time(attend_layers, a);
    double seen = (double)a->layers * batch_size * count * (pos + (count + 1) / 2.0);
    double bytes = (double)a->layers * batch_size * (pos + count) * token_bytes(s);
    printf("D %3d group %d batch %d x %3d tokens at %4d: %8.1f us  %6.2f ns per query and entry",
           s->head_dim, s->heads_q / s->heads_kv, batch_size, count, pos, best * 1e6,
           best * 1e9 / (seen * s->heads_q));
    printf("  %5.1f GFLOP/s", 4e-9 * seen * s->heads_q * s->head_dim / best);
    if (count == 1) printf("  %4.1f GB/s of %.0f MB", bytes / best * 1e-9, bytes * 1e-6);
    printf("\n");
    for (int i = 0; i < batch_size; i++) bench.kern->ops->release(bench.kern, i);
}

static void bench_attention(void) {
    static const int shapes[][3] = {{8, 4, 64}, {14, 2, 64}, {9, 3, 64}, {16, 8, 128}};
    const struct shape shape = bench.shape;
    struct kern *kern = bench.kern;
    struct cpu_options options = {
        .path = bench.path, .threads = bench.threads, .activations = bench.activations};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        bench.shape = (struct shape){
            .heads_q = shapes[i][0], .heads_kv = shapes[i][1], .head_dim = shapes[i][2]};
        bench.shape.layers = (int)ceil(ATTENTION_BYTES / CONTEXT / token_bytes(&bench.shape));
        int rc = cpu_open(&options, &bench.kern, NULL);
        if (rc) fail("open", rc, NULL);
        cache_make();
        int heads = shapes[i][0] + 2 * shapes[i][1];
        struct attention a = {
            .m = {.noise = floats((size_t)(STEP_ROWS * heads * shapes[i][2])),
                  .att = floats((size_t)(STEP_ROWS * shapes[i][0] * shapes[i][2]))}};
        bench_attend(&a, 1, 1, 1024);
        bench_attend(&a, 1, 1, CONTEXT);
        bench_attend(&a, 8, 1, 1024);
        bench_attend(&a, 1, STEP_ROWS, 0);
        bench_attend(&a, 1, STEP_ROWS, 2048);
        cpu_free(a.m.noise), cpu_free(a.m.att);
        bench.kern->ops->close(bench.kern);
    }
    bench.shape = shape;
    bench.kern = kern;
}

static void bench_decode(struct model *m) {
    static const int batches[] = {1, 8, 32};
    for (int i = 0; i < 3; i++) {
        fill_cache(m, batches[i], 16);
        bench_step(m, "decode", batches[i], 1, 16);
        fill_cache(m, batches[i], 1024);
        bench_step(m, "decode", batches[i], 1, 1024);
    }
    for (int i = 0; i < SLOTS; i++) bench.kern->ops->release(bench.kern, i);
    fill_cache(m, 1, CONTEXT);
    bench_step(m, "decode", 1, 1, CONTEXT);
}

static void bench_prompt(struct model *m) {
    fill_cache(m, 1, 0);
    bench_step(m, "prompt", 1, STEP_ROWS, 0);
    fill_cache(m, 1, STEP_ROWS);
    bench_step(m, "prompt", 1, STEP_ROWS, STEP_ROWS);
}

/* ---- Cost of policies ---- */

#define BUDGET     1024
#define BUFFER     128
#define LAST       64 /* queries that are asked before an eviction */
#define POLICY_MAX 32
#define ROUNDS_MAX 64
#define TURNS      4 /* tokens in a round, each with and without the policy */

/* Results of each round, as fractions of the time per token without observation, because other
 * processes slow both alike. `bare`: an eviction without redundancy and merging. */
struct policy_cost {
    const struct policy *policy;
    double attend[ROUNDS_MAX], evict[ROUNDS_MAX], bare[ROUNDS_MAX];
    double evict_ms[ROUNDS_MAX], factor[ROUNDS_MAX]; /* per sequence; attention relative to plain */
    int rounds;
};

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(const double *values, int count) {
    double sorted[ROUNDS_MAX];
    memcpy(sorted, values, (size_t)count * sizeof *sorted);
    qsort(sorted, (size_t)count, sizeof *sorted, by_size);
    return sorted[count / 2];
}

/* `count` tokens of each of `slots` sequences at `pos`; returns the time of attention. */
static double policy_step(struct model *m, const struct kern_rule *rule, int slots, int count,
                          int pos) {
    static const int32_t tokens[STEP_ROWS];
    int32_t want[SLOTS];
    struct kern_span spans[SLOTS];
    for (int i = 0; i < slots; i++) {
        spans[i] = (struct kern_span){
            .slot = i, .row = i * count, .count = count, .pos = pos, .rule = rule};
        want[i] = (i + 1) * count - 1;
    }
    struct kern_batch batch = {
        .tokens = tokens, .spans = spans, .rows = slots * count, .span_count = slots};
    memset(stages.spent, 0, sizeof stages.spent);
    step(m, &batch, want, slots);
    return stages.spent[ATTEND];
}

/* The buffer's worth of tokens from `pos`, then an eviction; the time of that. */
static double policy_evict(struct model *m, const struct kern_rule *rule, int slots, int pos) {
    struct kern_evict due[SLOTS];
    for (int i = 0; i < slots; i++) {
        due[i] =
            (struct kern_evict){.slot = i, .tokens = pos + BUFFER, .budget = BUDGET, .rule = rule};
        append_noise(m, i, pos, BUFFER - LAST);
    }
    policy_step(m, rule, slots, LAST, pos + BUFFER - LAST);
    double start = now();
    if (bench.kern->ops->evict(bench.kern, due, slots)) fail("evict", ERR_FULL, NULL);
    return now() - start;
}

static void policy_round(struct model *m, struct policy_cost *cost, int slots) {
    struct kv_params kv = {.budget = BUDGET, .buffer = BUFFER, .chunk = STEP_ROWS};
    kv_params_set_policy(&kv, cost->policy);
    kv_params_fit(&kv, 0);
    struct kern_rule bare = kv.rule;
    bare.redundancy.on = false;
    bare.merge = KERN_MERGE_NONE;
    fill_cache(m, slots, BUDGET);
    int pos = BUDGET;
    policy_evict(m, &kv.rule, slots, pos); /* measures what is measured once */
    double all = policy_evict(m, &kv.rule, slots, pos += BUFFER);
    double some = policy_evict(m, &bare, slots, pos += BUFFER);
    double with = 0, without = 0, token = 0;
    pos += BUFFER;
    for (int i = 0; i < 2 * TURNS; i += 2) {
        with += policy_step(m, &kv.rule, slots, 1, pos + i);
        double start = now();
        without += policy_step(m, NULL, slots, 1, pos + i + 1);
        token += now() - start;
    }
    int r = cost->rounds++;
    cost->attend[r] = (with - without) / token;
    cost->factor[r] = with / without;
    cost->evict[r] = all / (BUFFER * token / TURNS);
    cost->bare[r] = some / (BUFFER * token / TURNS);
    cost->evict_ms[r] = 1e3 * all / slots;
}

static void print_policies(struct policy_cost *costs, int count, int slots, int rounds) {
    printf("\nbatch %d, budget %d, buffer %d, medians of %d rounds; %% of the time per token\n\n"
           "| policy | in attention | evicting | of that, redundancy and merging | together | "
           "attention, times | ms per eviction |\n|---|--:|--:|--:|--:|--:|--:|\n",
           slots, BUDGET, BUFFER, rounds);
    for (int i = 0; i < count; i++) {
        const struct policy_cost *c = &costs[i];
        double attend = 100 * median(c->attend, rounds), evict = 100 * median(c->evict, rounds);
        bool more = c->policy->rule.redundancy.on || c->policy->rule.merge != KERN_MERGE_NONE;
        printf("| %s | %.1f | %.1f | %.1f | %.1f | %.2f | %.1f |\n", c->policy->name, attend, evict,
               more ? evict - 100 * median(c->bare, rounds) : 0, attend + evict,
               median(c->factor, rounds), median(c->evict_ms, rounds));
    }
}

/* All policies in turns, so that a slow minute strikes all. */
static void bench_policies(struct model *m, int slots) {
    static struct policy_cost costs[POLICY_MAX];
    int count = 0, rounds = 0;
    const struct policy *policy;
    for (int i = 0; (policy = policy_at(i)) && count < POLICY_MAX; i++)
        if (policy->rule.score == KERN_SCORE_ATTENTION || !strcmp(policy->name, "streaming"))
            costs[count++] = (struct policy_cost){.policy = policy};
    double begin = now();
    while (rounds < 3 || (rounds < ROUNDS_MAX && now() - begin < count * bench.seconds)) {
        for (int i = 0; i < count; i++) policy_round(m, &costs[i], slots);
        rounds++;
    }
    print_policies(costs, count, slots, rounds);
    for (int i = 0; i < slots; i++) bench.kern->ops->release(bench.kern, i);
}

static void bench_model(void) {
    struct model m = {0};
    model_make(&m);
    cache_make();
    printf("model: %zu MB of weights; reading them once is %.1f steps/s\n", m.bytes >> 20,
           bench.bandwidth / (double)m.bytes);
    if (wanted("decode")) bench_decode(&m);
    if (wanted("prompt")) bench_prompt(&m);
    if (wanted("policies")) bench_policies(&m, 1), bench_policies(&m, 8);
}

/* ---- Main ---- */

/* A part of the layers and of the vocabulary: shares of a step stay what they are. */
static void thin(int by) {
    bench.shape.layers /= by;
    bench.shape.vocab /= by;
}

struct named {
    const char *name;
    enum kern_dtype dtype;
};

/* Returns KERN_BF16 for any other name. */
static enum kern_dtype named_dtype(const struct named *names, const char *name) {
    while (names->name && strcmp(name, names->name)) names++;
    return names->name ? names->dtype : KERN_BF16;
}

static const struct named cache_names[] = {
    {"f32", KERN_F32}, {"fp8", KERN_E4M3}, {"q8", KERN_ROW8}, {"q4", KERN_ROW4}, {0}};
static const struct named weight_names[] = {
    {"e4m3", KERN_E4M3}, {"q8", KERN_Q8}, {"q4", KERN_Q4}, {"q4m", KERN_Q4M}, {0}};

static void parse(int argc, char **argv) {
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--path")) bench.path = argv[i + 1];
        if (!strcmp(argv[i], "--only")) bench.only = argv[i + 1];
        if (!strcmp(argv[i], "--threads")) bench.threads = atoi(argv[i + 1]);
        if (!strcmp(argv[i], "--seconds")) bench.seconds = atof(argv[i + 1]);
        if (!strcmp(argv[i], "--thin")) thin(atoi(argv[i + 1]));
        if (!strcmp(argv[i], "--kv-dtype")) bench.cache = named_dtype(cache_names, argv[i + 1]);
        if (!strcmp(argv[i], "--weights")) bench.weights = named_dtype(weight_names, argv[i + 1]);
        if (!strcmp(argv[i], "--activations"))
            bench.activations = !strcmp(argv[i + 1], "int8")    ? CPU_INT8
                                : !strcmp(argv[i + 1], "int16") ? CPU_INT16
                                : !strcmp(argv[i + 1], "bf16")  ? CPU_BF16
                                                                : CPU_BY_WEIGHT;
    }
}

int main(int argc, char **argv) {
    parse(argc, argv);
    setvbuf(stdout, NULL, _IOLBF, 0);
    struct cpu_options options = {
        .path = bench.path, .threads = bench.threads, .activations = bench.activations};
    struct fault fault;
    int rc = cpu_open(&options, &bench.kern, &fault);
    if (rc) fail("open", rc, &fault);
    bench.bandwidth = measure_bandwidth();
    printf("%s, %d threads, reading at %.1f GB/s\n", bench.kern->ops->name,
           cpu_of(bench.kern)->threads, bench.bandwidth * 1e-9);
    if (wanted("products")) bench_products();
    if (wanted("attention")) bench_attention();
    if (wanted("decode") || wanted("prompt") || wanted("policies")) bench_model();
    bench.bandwidth = measure_bandwidth();
    printf("reading at %.1f GB/s at the end\n", bench.bandwidth * 1e-9);
    bench.kern->ops->close(bench.kern);
    return 0;
}
