/* Checkpoints that are fp8 already: a scale per output or per tensor, as they are published; made
 * here from a small bf16 model. What is wrong with them is refused by tensor. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/file.h"
#include "base/mem.h"
#include "kernels/number.h"
#include "kernels/quantize.h"
#include "model/weights.h"
#include "tests/golden/replay.h"
#include "tests/unit/parts.h"

#define SOURCE KEEPD_SOURCE_DIR "/tests/data/models/qwen3"
#define LAYERS 3
#define COUNT  24
#define VOCAB  512

/* How a file has its scales, and what is wrong with it. */
struct kind {
    const char *dtype,
        *shape;          /* type and shape of weight_scale; "" shape: one per output, [rows, 1] */
    float scale;         /* 0: what the rows need; else this one for all */
    const char *without; /* a tensor that is left out */
    bool nan;            /* one element is none */
};

struct file {
    struct buf header, data;
};

static void add_tensor(struct file *f, const char *name, const char *dtype, const char *shape,
                       const void *data, size_t bytes) {
    size_t begin = f->data.size;
    buf_add(&f->data, data, bytes);
    buf_fmt(&f->header, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}",
            f->header.size > 1 ? "," : "", name, dtype, shape, begin, f->data.size);
}

static void add_scale(struct file *f, const char *weight, const struct kind *kind,
                      const float *scales, int64_t rows) {
    char name[160], shape[32];
    bool each = kind->shape[0] == '\0', half = strcmp(kind->dtype, "BF16") == 0;
    size_t count = each ? (size_t)rows : 1;
    uint16_t *halves = malloc(count * sizeof *halves);
    snprintf(name, sizeof name, "%s_scale", weight);
    snprintf(shape, sizeof shape, "%lld,1", (long long)rows);
    if (!each) snprintf(shape, sizeof shape, "%s", kind->shape[0] == '-' ? "" : kind->shape);
    for (size_t i = 0; i < count; i++) halves[i] = number_to_bf16(scales[i]);
    if (!kind->without || strcmp(kind->without, name) != 0)
        add_tensor(f, name, kind->dtype, shape, half ? (const void *)halves : scales,
                   count * (half ? 2 : 4));
    free(halves);
}

static void add_linear(struct file *f, const char *name, const struct tensor *t,
                       const struct kind *kind) {
    size_t count = (size_t)(t->shape[0] * t->shape[1]);
    uint8_t *codes = malloc(count);
    float *scales = malloc((size_t)t->shape[0] * sizeof *scales);
    char shape[32];
    const struct kern_matrix m = {
        .data = t->data, .dtype = KERN_BF16, .rows = t->shape[0], .cols = t->shape[1]};
    cr_assert_eq(quantize_rows(&m, codes, scales, NULL, NULL), 0);
    for (size_t i = 0; kind->scale != 0 && i < count; i++)
        codes[i] = number_to_e4m3(number_element((const char *)t->data + 2 * i, KERN_BF16) /
                                  fabsf(kind->scale));
    for (int64_t r = 0; kind->scale != 0 && r < t->shape[0]; r++) scales[r] = kind->scale;
    if (kind->nan) codes[7] = 0xff;
    snprintf(shape, sizeof shape, "%lld,%lld", (long long)t->shape[0], (long long)t->shape[1]);
    add_tensor(f, name, "F8_E4M3", shape, codes, count);
    add_scale(f, name, kind, scales, t->shape[0]);
    free(codes), free(scales);
}

static void add_plain(struct file *f, const char *name, const struct tensor *t) {
    char shape[32];
    if (t->dims == 2)
        snprintf(shape, sizeof shape, "%lld,%lld", (long long)t->shape[0], (long long)t->shape[1]);
    else
        snprintf(shape, sizeof shape, "%lld", (long long)t->shape[0]);
    add_tensor(f, name, "BF16", shape, t->data, t->bytes);
}

static void add_model(struct file *f, const struct kind *kind) {
    static const char *const linears[] = {
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj",    "mlp.up_proj",      "mlp.down_proj"};
    static const char *const vectors[] = {"input_layernorm", "post_attention_layernorm",
                                          "self_attn.q_norm", "self_attn.k_norm"};
    struct weights *w;
    char name[128];
    cr_assert_eq(weights_open(SOURCE, &w, NULL), 0);
    add_plain(f, "model.embed_tokens.weight", weights_find(w, "model.embed_tokens.weight"));
    add_plain(f, "model.norm.weight", weights_find(w, "model.norm.weight"));
    for (int l = 0; l < LAYERS; l++) {
        for (size_t i = 0; i < 7; i++) {
            snprintf(name, sizeof name, "model.layers.%d.%s.weight", l, linears[i]);
            add_linear(f, name, weights_find(w, name), kind);
        }
        for (size_t i = 0; i < 4; i++) {
            snprintf(name, sizeof name, "model.layers.%d.%s.weight", l, vectors[i]);
            add_plain(f, name, weights_find(w, name));
        }
    }
    weights_close(w);
}

/* The source's config.json, saying in front what its weights are. */
static void write_config(const char *dir) {
    char *text;
    size_t size;
    struct buf out;
    cr_assert_eq(file_read(SOURCE "/config.json", 1 << 16, &text, &size, NULL), 0);
    buf_open(&out, 1 << 16);
    buf_str(&out, "{\"quantization_config\": {\"quant_method\": \"fp8\", "
                  "\"activation_scheme\": \"dynamic\"},");
    buf_str(&out, strchr(text, '{') + 1);
    write_parts(dir, "config.json", &out, 1);
    buf_close(&out);
    mem_free(text);
}

static void make(char dir[64], const struct kind *kind) {
    struct file f;
    struct buf size;
    snprintf(dir, 64, "/tmp/keepd-fp8-XXXXXX");
    cr_assert_not_null(mkdtemp(dir));
    buf_open(&f.header, 1 << 20);
    buf_open(&f.data, 1 << 24);
    buf_open(&size, 64);
    buf_char(&f.header, '{');
    add_model(&f, kind);
    buf_char(&f.header, '}');
    while (f.header.size % 8) buf_char(&f.header, ' ');
    uint64_t bytes = f.header.size;
    buf_add(&size, &bytes, sizeof bytes);
    const struct buf parts[] = {size, f.header, f.data};
    write_parts(dir, "model.safetensors", parts, 3);
    write_config(dir);
    buf_close(&size);
    buf_close(&f.header);
    buf_close(&f.data);
}

static void drop(const char *dir) {
    static const char *const names[] = {"config.json", "model.safetensors"};
    char path[256];
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        unlink(path);
    }
    rmdir(dir);
}

static struct replay_options options_of(const char *dir, bool fp8) {
    return (struct replay_options){.dir = dir,
                                   .path = "auto",
                                   .threads = 1,
                                   .rows_max = COUNT,
                                   .positions_max = COUNT,
                                   .slots = 1,
                                   .quantization = fp8 ? QUANTIZE_FP8 : QUANTIZE_NONE};
}

static int open_replay(const char *dir, bool fp8, struct replay *replay, struct fault *fault) {
    const struct replay_options options = options_of(dir, fp8);
    *fault = (struct fault){0};
    return replay_open(&options, replay, fault);
}

static float *run(const struct replay_options *options) {
    struct replay replay;
    struct fault fault = {0};
    int32_t ids[COUNT];
    const int whole = COUNT;
    float *logits = malloc(sizeof(float) * COUNT * VOCAB);
    for (int i = 0; i < COUNT; i++) ids[i] = i * 37 % 500;
    cr_assert_eq(replay_open(options, &replay, &fault), 0, "%s: %s", fault.field, fault.text);
    cr_assert_eq(replay_run(&replay, 0, ids, COUNT, &whole, 1, logits), 0);
    replay_close(&replay);
    return logits;
}

static float *logits_of(const char *dir, bool fp8) {
    const struct replay_options options = options_of(dir, fp8);
    return run(&options);
}

static float *logits_of_kind(const struct kind *kind, bool fp8) {
    char dir[64];
    make(dir, kind);
    float *logits = logits_of(dir, fp8);
    drop(dir);
    return logits;
}

static void expect_same(float *a, float *b, const char *what) {
    cr_assert(!memcmp(a, b, sizeof(float) * COUNT * VOCAB), "%s", what);
    free(a), free(b);
}

Test(fp8, a_checkpoint_is_what_its_source_becomes_when_it_is_loaded) {
    const struct kind channels = {.dtype = "F32", .shape = ""};
    expect_same(logits_of(SOURCE, true), logits_of_kind(&channels, false), "scales per channel");
    expect_same(logits_of(SOURCE, true), logits_of_kind(&channels, true), "loaded as fp8");
}

Test(fp8, one_scale_is_that_of_every_output) {
    const struct kind all = {.dtype = "F32", .shape = "", .scale = 0x1p-11f};
    const struct kind none = {.dtype = "F32", .shape = "-", .scale = 0x1p-11f};
    const struct kind one = {.dtype = "BF16", .shape = "1", .scale = 0x1p-11f};
    expect_same(logits_of_kind(&all, false), logits_of_kind(&none, false), "a number");
    expect_same(logits_of_kind(&all, false), logits_of_kind(&one, false), "one of one");
}

Test(fp8, what_is_wrong_is_refused_by_tensor) {
    static const struct {
        struct kind kind;
        int rc;
        const char *field, *text;
    } cases[] = {
        {{.dtype = "F32", .shape = "", .without = "model.layers.1.self_attn.v_proj.weight_scale"},
         ERR_NOTFOUND,
         "model.layers.1.self_attn.v_proj.weight_scale",
         "missing"},
        {{.dtype = "F32", .shape = "", .nan = true},
         ERR_INVALID,
         "model.layers.0.self_attn.q_proj.weight",
         "element 7"},
        {{.dtype = "F32", .shape = "", .scale = -1},
         ERR_INVALID,
         "model.layers.0.self_attn.q_proj.weight_scale",
         "no scale"},
        {{.dtype = "F32", .shape = "", .scale = 0x1p120f},
         ERR_INVALID,
         "model.layers.0.self_attn.q_proj.weight_scale",
         "no scale"},
        {{.dtype = "I32", .shape = "1"},
         ERR_UNSUPPORTED,
         "model.layers.0.self_attn.q_proj.weight_scale",
         "one number or 128"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char dir[64];
        struct replay replay;
        struct fault fault;
        make(dir, &cases[i].kind);
        cr_assert_eq(open_replay(dir, false, &replay, &fault), cases[i].rc, "%zu: %s: %s", i,
                     fault.field, fault.text);
        cr_assert_str_eq(fault.field, cases[i].field);
        cr_assert(strstr(fault.text, cases[i].text), "%s", fault.text);
        drop(dir);
    }
}

Test(fp8, threads_change_no_weight) {
    struct replay_options options = options_of(SOURCE, true);
    options.random_weights = true;
    for (int threads = 2; threads <= 5; threads += 3) {
        options.threads = 1;
        float *one = run(&options);
        options.threads = threads;
        expect_same(one, run(&options), "random weights, quantised");
    }
}
