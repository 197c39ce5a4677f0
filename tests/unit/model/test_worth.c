/* Measured worths of entries (model/worth.h) against its definition in double: the change of the
 * residual stream when one entry is left out of a head's attention, from the queries, keys, values
 * and residuals that the layer loop computed. */
#include <criterion/criterion.h>
#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "kernels/cpu/built.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/internal.h"
#include "kernels/cpu/isa.h"
#include "model/internal.h"
#include "model/worth.h"

#define TOKENS  (WORTH_ROWS + 2 * WORTH_WINDOW) /* two steps */
#define ENTRIES 40

struct opened {
    struct kern *kern;
    struct model *model;
    struct worth *worth;
};

/* False: the model gates attention's output, which is refused. */
static bool open_model(struct opened *o, const char *name, const char *path, int threads,
                       enum quantization quantization, enum kern_dtype kv_type) {
    char dir[512];
    struct fault fault = {0};
    const struct cpu_options cpu = {.path = path, .activations = CPU_F32, .threads = threads};
    const struct model_options model = {.dir = dir,
                                        .gates = "",
                                        .rows_max = WORTH_ROWS,
                                        .logits_max = 1,
                                        .quantization = quantization,
                                        .threads = 1};
    const struct worth_options options = {.tokens = TOKENS, .entries = ENTRIES, .kv_type = kv_type};
    snprintf(dir, sizeof dir, "%s/tests/data/models/%s", KEEPD_SOURCE_DIR, name);
    o->worth = NULL;
    cr_assert_eq(cpu_open(&cpu, &o->kern, &fault), 0, "%s", fault.text);
    cr_assert_eq(model_open(o->kern, &model, &o->model, &fault), 0, "%s", fault.text);
    const int rc = worth_open(o->kern, o->model, &options, &o->worth, &fault);
    const struct model_config *config = model_config(o->model);
    bool refused = config->attn_gate || config->layer_scales || config->latent.rank;
    for (int l = 0; l < config->layers; l++) refused |= config->per_layer[l].attends_too;
    cr_assert_eq(rc, refused ? ERR_UNSUPPORTED : 0, "%s", fault.text);
    return !refused;
}

static void close_model(struct opened *o) {
    worth_close(o->worth);
    model_close(o->model);
    o->kern->ops->close(o->kern);
}

/* Runs of a few tokens that come again, so that some attention is sharp. */
static void draw_tokens(int32_t *tokens, int count) {
    uint32_t state = 7;
    for (int i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        tokens[i] = i > 60 && state >> 30 ? tokens[i - 37] : (int32_t)(state >> 8) % 500;
    }
}

static void measure(struct opened *o, struct worth_text *text) {
    int32_t tokens[TOKENS];
    struct fault fault = {0};
    draw_tokens(tokens, TOKENS);
    cr_assert_eq(worth_measure(o->worth, tokens, TOKENS, 5, text, &fault), 0, "%s", fault.text);
}

/* ---- The definition ---- */

/* Arrays that the layer loop computed for a text. */
struct seen {
    struct model *model;
    int pos;           /* the step's first */
    float *x, *normed; /* [layers][TOKENS][d_model] */
    float *qkv;        /* [layers][TOKENS][qkv_width] */
};

static void keep(void *arg, int layer, enum role role, const float *inputs, int rows) {
    struct seen *s = arg;
    const struct model_config *c = &s->model->config;
    const size_t at = (size_t)(layer * TOKENS + s->pos), d = (size_t)c->d_model;
    const size_t width = (size_t)qkv_width(c, 0);
    if (role == ROLE_Q) {
        memcpy(s->x + at * d, s->model->scratch.x, (size_t)rows * d * sizeof(float));
        memcpy(s->normed + at * d, inputs, (size_t)rows * d * sizeof(float));
    }
    if (role == ROLE_O)
        memcpy(s->qkv + at * width, s->model->scratch.qkv, (size_t)rows * width * sizeof(float));
}

static void watch_text(struct seen *s, struct model *model) {
    const struct model_config *c = &model->config;
    const size_t rows = (size_t)c->layers * TOKENS;
    int32_t tokens[TOKENS];
    const float *logits;
    *s = (struct seen){.model = model,
                       .x = mem_must_alloc(rows * (size_t)c->d_model, sizeof(float)),
                       .normed = mem_must_alloc(rows * (size_t)c->d_model, sizeof(float)),
                       .qkv = mem_must_alloc(rows * (size_t)qkv_width(c, 0), sizeof(float))};
    draw_tokens(tokens, TOKENS);
    model->watch = keep;
    model->watch_arg = s;
    for (int count; s->pos < TOKENS; s->pos += count) {
        count = TOKENS - s->pos < WORTH_ROWS ? TOKENS - s->pos : WORTH_ROWS;
        const struct kern_span span = {.count = count, .pos = s->pos};
        const struct kern_batch batch = {tokens + s->pos, &span, count, 1};
        cr_assert_eq(model_step(model, &batch, NULL, 0, &logits), 0);
    }
    model->watch = NULL;
    model->kern->ops->release(model->kern, 0);
}

static void forget(struct seen *s) {
    mem_free(s->x);
    mem_free(s->normed);
    mem_free(s->qkv);
}

/* One query head of a layer: attention [TOKENS][TOKENS] and outputs [TOKENS][D]. */
struct attended {
    double *a, *o;
};

static const float *head_at(const struct seen *s, int layer, int t, int head) {
    const struct model_config *c = &s->model->config;
    return s->qkv + (size_t)(layer * TOKENS + t) * (size_t)qkv_width(c, 0) +
           (size_t)head * (size_t)c->head_dim;
}

static void attend(const struct seen *s, int layer, int head, struct attended *out) {
    const struct model_config *c = &s->model->config;
    const struct layer *parts = &s->model->layers[layer];
    const int d = c->head_dim, kv = head / (c->heads_q / c->heads_kv);
    const int window = c->per_layer[layer].sliding_window;
    for (int t = 0; t < TOKENS; t++) {
        double *a = out->a + (size_t)t * TOKENS, *o = out->o + (size_t)(t * d);
        double sum = parts->sinks ? exp((double)parts->sinks[head]) : 0;
        memset(a, 0, TOKENS * sizeof *a);
        memset(o, 0, (size_t)d * sizeof *o);
        for (int i = 0; i <= t; i++) {
            const float *q = head_at(s, layer, t, head), *k = head_at(s, layer, i, c->heads_q + kv);
            double z = 0;
            for (int j = 0; j < d; j++) z += (double)q[j] * (double)k[j];
            z *= (double)c->attend_scale;
            if (c->attend_cap > 0) z = (double)c->attend_cap * tanh(z / (double)c->attend_cap);
            a[i] = window && i <= t - window ? 0 : exp(z);
            sum += a[i];
        }
        for (int i = 0; i <= t; i++) {
            const float *v = head_at(s, layer, i, c->heads_q + c->heads_kv + kv);
            a[i] /= sum;
            for (int j = 0; j < d; j++) o[j] += a[i] * (double)v[j];
        }
    }
}

/* The output projection's row `row`, as it is served. */
static void projection(const struct seen *s, int layer, double *out) {
    const struct kern_weight *o = s->model->layers[layer].o;
    float *row = mem_must_alloc((size_t)o->cols, sizeof *row);
    for (int64_t r = 0; r < o->rows; r++) {
        cpu_weight_row(o, r, row);
        for (int64_t i = 0; i < o->cols; i++) out[r * o->cols + i] = (double)row[i];
    }
    mem_free(row);
}

/* Squared norms of the change of what head `head` adds, for all measured entries and queries. */
static void add_changes(const struct seen *s, const struct worth_text *text, int layer, int head,
                        const struct attended *at, const double *w, const double *factors,
                        double *worths) {
    const struct model_config *c = &s->model->config;
    const int d = c->head_dim, kv = head / (c->heads_q / c->heads_kv);
    for (int i = 0; i < text->entries; i++) {
        const float *v = head_at(s, layer, text->at[i], c->heads_q + c->heads_kv + kv);
        for (int t = (text->at[i] / WORTH_WINDOW + 1) * WORTH_WINDOW; t < TOKENS; t++) {
            const double a = at->a[(size_t)t * TOKENS + (size_t)text->at[i]];
            const double rest = fmax(1 - a, 0.01);
            const double *o = at->o + (size_t)(t * d);
            double change = 0;
            for (int r = 0; r < c->d_model && a > 0; r++) {
                double moved = 0;
                for (int j = 0; j < d; j++)
                    moved += w[r * q_width(c, 0) + head * d + j] * a / rest * (o[j] - (double)v[j]);
                change += moved * moved;
            }
            worths[(t / WORTH_WINDOW * c->heads_kv + kv) * text->entries + i] +=
                change * factors[t];
        }
    }
}

/* 1 / |x + f(y)|^2, y = W o + b; with a norm f after attention times |f(y)|^2 / |y|^2. */
static void find_factors(const struct seen *s, int layer, const double *outputs, const double *w,
                         double *factors) {
    const struct model_config *c = &s->model->config;
    const struct layer *parts = &s->model->layers[layer];
    const int width = q_width(c, 0), d = c->d_model;
    double *y = mem_must_alloc((size_t)d, sizeof *y);
    for (int t = 0; t < TOKENS; t++) {
        const float *x = s->x + (size_t)(layer * TOKENS + t) * (size_t)d;
        double branch = 0, normed = 0, after = 0;
        for (int r = 0; r < d; r++) {
            y[r] = parts->o_bias ? (double)parts->o_bias[r] : 0;
            for (int j = 0; j < width; j++)
                y[r] += w[r * width + j] *
                        outputs[(size_t)(j / c->head_dim * TOKENS + t) * (size_t)c->head_dim +
                                (size_t)(j % c->head_dim)];
            branch += y[r] * y[r];
        }
        const double size = sqrt(branch / d + (double)c->rms_eps);
        for (int r = 0; r < d; r++) {
            if (parts->attn_post_norm) y[r] *= (double)parts->attn_post_norm[r] / size;
            normed += y[r] * y[r];
            after += ((double)x[r] + y[r]) * ((double)x[r] + y[r]);
        }
        factors[t] = (parts->attn_post_norm ? normed / branch : 1) / after;
    }
    mem_free(y);
}

static void expected_worths(const struct seen *s, const struct worth_text *text, int layer,
                            double *worths) {
    const struct model_config *c = &s->model->config;
    const size_t d = (size_t)c->head_dim, heads = (size_t)c->heads_q;
    double *a = mem_must_alloc(heads * TOKENS * TOKENS, sizeof *a);
    double *o = mem_must_alloc(heads * TOKENS * d, sizeof *o), factors[TOKENS];
    double *w = mem_must_alloc((size_t)c->d_model * heads * d, sizeof *w);
    projection(s, layer, w);
    for (int h = 0; h < c->heads_q; h++)
        attend(s, layer, h,
               &(struct attended){a + (size_t)h * TOKENS * TOKENS, o + (size_t)h * TOKENS * d});
    find_factors(s, layer, o, w, factors);
    for (int h = 0; h < c->heads_q; h++)
        add_changes(s, text, layer, h,
                    &(struct attended){a + (size_t)h * TOKENS * TOKENS, o + (size_t)h * TOKENS * d},
                    w, factors, worths);
    mem_free(a);
    mem_free(o);
    mem_free(w);
}

/* ---- Tests ---- */

/* Errors relative to the entry's worth, and to the largest of its stream and window. */
static double compare(const struct worth_text *text, int layer, const double *want, int *count) {
    const int each = text->heads * text->entries;
    double worst = 0;
    for (int i = 0; i < text->windows * text->heads; i++) {
        const int c = i / text->heads, h = i % text->heads;
        const float *found = text->worths + (c * text->layers + layer) * each + h * text->entries;
        const double *wanted = want + c * each + h * text->entries;
        double most = 0;
        for (int k = 0; k < text->entries; k++) most = fmax(most, wanted[k]);
        for (int k = 0; k < text->entries; k++) {
            const double error = fabs((double)found[k] - wanted[k]);
            worst = fmax(worst, most > 0 ? error / (wanted[k] + most / 100) : error);
            *count += wanted[k] > 0;
        }
    }
    return worst;
}

static void check_model(const char *name, const char *path, enum quantization quantization,
                        enum kern_dtype kv_type, double bar) {
    struct opened o;
    struct worth_text text;
    struct seen seen;
    double worst = 0;
    int count = 0;
    open_model(&o, name, path, 2, quantization, kv_type);
    const struct model_config *c = &o.model->config;
    measure(&o, &text);
    watch_text(&seen, o.model);
    for (int l = 0; l < c->layers; l++) {
        double *want = mem_must_alloc((size_t)text.windows * (size_t)(text.heads * text.entries),
                                      sizeof *want);
        expected_worths(&seen, &text, l, want);
        worst = fmax(worst, compare(&text, l, want, &count));
        for (int i = 0; i < text.entries; i++)
            for (int d = 0; d < c->d_model; d++) {
                const size_t row = (size_t)(l * TOKENS + text.at[i]);
                const float x = seen.normed[row * (size_t)c->d_model + (size_t)d];
                cr_assert_eq(text.x[(l * text.entries + i) * c->d_model + d], number_to_bf16(x));
            }
        mem_free(want);
    }
    printf("worth %-8s %-9s: %d above 0, worst %.1e\n", name, path, count, worst);
    cr_assert(count > 100, "%s: %d worths above 0", name, count);
    cr_assert(worst < bar, "%s on %s: %g", name, path, worst);
    forget(&seen);
    worth_text_close(&text);
    close_model(&o);
}

/* Norms after attention, windows and caps; sinks and experts; norms of all heads together. */
Test(worth, families) {
    static const char *const names[] = {"llama", "qwen3",  "gemma2", "gemma3",
                                        "olmo2", "gptoss", "mixtral"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        check_model(names[i], "reference", QUANTIZE_NONE, KERN_F32, 2e-5);
}

/* All families, those that are not compared above, too. */
Test(worth, every_family_is_measured) {
    char path[512];
    int families = 0;
    snprintf(path, sizeof path, "%s/tests/data/models", KEEPD_SOURCE_DIR);
    DIR *dir = opendir(path);
    cr_assert_not_null(dir);
    for (const struct dirent *entry; (entry = readdir(dir));) {
        struct opened o;
        struct worth_text text;
        double sum = 0;
        /* keepd-nano is bundled/keepd-nano; here it has only what it answers. */
        if (entry->d_name[0] == '.' || !strcmp(entry->d_name, "keepd-nano")) continue;
        if (!open_model(&o, entry->d_name, "auto", 1, QUANTIZE_NONE, KERN_BF16)) {
            close_model(&o);
            continue;
        }
        measure(&o, &text);
        const size_t each = (size_t)(text.layers * text.heads * text.entries);
        for (size_t i = 0; i < each * (size_t)text.windows; i++) {
            cr_assert(isfinite(text.worths[i]) && text.worths[i] >= 0, "%s", entry->d_name);
            sum += (double)text.worths[i];
        }
        cr_assert(sum > 0, "%s", entry->d_name);
        families++;
        worth_text_close(&text);
        close_model(&o);
    }
    closedir(dir);
    cr_assert(families >= 20, "%d", families);
}

Test(worth, paths) {
    static const char *const paths[] = {"portable", "neon", "avx2", "avx512"};
    struct cpu_isa isa = cpu_isa_detect();
    const bool usable[] = {CPU_HAS_PORTABLE, CPU_HAS_NEON && isa.neon, CPU_HAS_AVX2 && isa.avx2,
                           CPU_HAS_AVX512 && isa.avx512};
    for (size_t i = 0; i < 4; i++)
        if (usable[i]) check_model("gemma2", paths[i], QUANTIZE_NONE, KERN_F32, 2e-5);
}

Test(worth, quantised_weights) {
    check_model("llama", "auto", QUANTIZE_Q8, KERN_F32, 2e-5);
    check_model("llama", "auto", QUANTIZE_Q4, KERN_F32, 2e-5);
    check_model("llama", "auto", QUANTIZE_FP8, KERN_F32, 2e-5);
}

/* The reference reads keys and values before they are rounded. */
Test(worth, rounded_cache) {
    check_model("llama", "auto", QUANTIZE_NONE, KERN_BF16, 5e-2);
    check_model("llama", "auto", QUANTIZE_NONE, KERN_ROW8, 0.1);
}

Test(worth, same_bits_for_any_number_of_threads) {
    static const char *const names[] = {"gemma3", "gptoss"};
    for (int n = 0; n < 2; n++) {
        struct worth_text first, text;
        for (int threads = 1; threads <= 4; threads++) {
            struct opened o;
            open_model(&o, names[n], "auto", threads, QUANTIZE_NONE, KERN_BF16);
            measure(&o, threads == 1 ? &first : &text);
            close_model(&o);
            if (threads == 1) continue;
            const size_t numbers = (size_t)(first.layers * first.heads * first.entries);
            cr_assert_eq(
                memcmp(first.worths, text.worths, numbers * (size_t)first.windows * sizeof(float)),
                0);
            worth_text_close(&text);
        }
        worth_text_close(&first);
    }
}

Test(worth, short_texts_and_lack_of_memory_are_refused) {
    struct opened o;
    struct worth_text text;
    struct fault fault = {0};
    const int32_t tokens[2 * WORTH_WINDOW] = {0};
    open_model(&o, "llama", "auto", 1, QUANTIZE_NONE, KERN_BF16);
    cr_assert_eq(worth_measure(o.worth, tokens, 2 * WORTH_WINDOW - 1, 1, &text, &fault),
                 ERR_INVALID);
    for (int n = 0; n < 3; n++) {
        mem_fail_after(n);
        cr_assert_eq(worth_measure(o.worth, tokens, 2 * WORTH_WINDOW, 1, &text, &fault), ERR_NOMEM);
    }
    mem_fail_after(-1);
    cr_assert_eq(worth_measure(o.worth, tokens, 2 * WORTH_WINDOW, 1, &text, &fault), 0);
    cr_assert_eq(text.windows, 2);
    worth_text_close(&text);
    close_model(&o);
}

/* A backend that does not measure, as CUDA's. */
Test(worth, backends_that_do_not_measure_are_refused) {
    struct opened o;
    struct worth *worth = NULL;
    struct fault fault = {0};
    const struct worth_options options = {.tokens = 128, .entries = 8, .kv_type = KERN_BF16};
    open_model(&o, "llama", "auto", 1, QUANTIZE_NONE, KERN_BF16);
    struct kern_ops without = *o.kern->ops;
    const struct kern_ops *had = o.kern->ops;
    without.worth = NULL;
    o.kern->ops = &without;
    cr_assert_eq(worth_open(o.kern, o.model, &options, &worth, &fault), ERR_UNSUPPORTED);
    cr_assert(strstr(fault.text, "does not measure"), "%s", fault.text);
    o.kern->ops = had;
    close_model(&o);
}
