/* Measured worths of entries (model/worth.h) against its definition in double: the change of the
 * residual stream when one entry is left out of the softmax of a head and everything behind it is
 * computed again, from the queries, keys, values, gates and residuals that the layer loop
 * computed. */
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
#include "tests/sample.h"

#define TOKENS    (WORTH_ROWS + 2 * WORTH_WINDOW) /* two steps */
#define ENTRIES   40
#define WIDTH_MAX 64 /* for the models and their values */

struct opened {
    struct kern *kern;
    struct model *model;
    struct worth *worth;
    const struct kern_given *given; /* rows of pictures in the text */
    int given_count;
};

static void open_model(struct opened *o, const char *name, const char *path, int threads,
                       enum quantization quantization, enum kern_dtype kv_type) {
    char dir[512];
    struct fault fault = {0};
    const struct cpu_options cpu = {.path = path, .activations = CPU_F32, .threads = threads};
    const struct model_options model = {.dir = dir,
                                        .gates = "",
                                        .rows_max = TOKENS,
                                        .logits_max = 1,
                                        .quantization = quantization,
                                        .threads = 1};
    const struct worth_options options = {
        .tokens = TOKENS, .entries = ENTRIES, .rows = WORTH_ROWS, .kv_type = kv_type};
    snprintf(dir, sizeof dir, "%s/tests/data/models/%s", KEEPD_SOURCE_DIR, name);
    *o = (struct opened){0};
    cr_assert_eq(cpu_open(&cpu, &o->kern, &fault), 0, "%s", fault.text);
    cr_assert_eq(model_open(o->kern, &model, &o->model, &fault), 0, "%s", fault.text);
    cr_assert_eq(worth_open(o->kern, o->model, &options, &o->worth, &fault), 0, "%s", fault.text);
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

static int measure_first(struct opened *o, const int32_t *tokens, int count,
                         struct worth_text *text, struct fault *fault) {
    const struct worth_input input = {.tokens = tokens, .count = count};
    return worth_measure(o->worth, &input, 1, text, fault);
}

static void measure(struct opened *o, struct worth_text *text) {
    int32_t tokens[TOKENS];
    struct fault fault = {0};
    const struct worth_input input = {
        .tokens = tokens, .count = TOKENS, .given = o->given, .given_count = o->given_count};
    draw_tokens(tokens, TOKENS);
    cr_assert_eq(worth_measure(o->worth, &input, 5, text, &fault), 0, "%s", fault.text);
}

/* ---- The definition ---- */

/* Arrays that the layer loop computed for a text, [layers][TOKENS][width]. */
struct seen {
    struct model *model;
    const struct kern_given *given; /* rows of pictures in the text */
    int given_count;
    float **x, **normed, **qkv, **gates, **mixed;
};

static void keep_rows(float *to, const float *from, int width, int rows) {
    memcpy(to, from, (size_t)(rows * width) * sizeof *from);
}

static void keep(void *arg, int layer, enum role role, const float *inputs, int rows) {
    struct seen *s = arg;
    struct model *m = s->model;
    const struct model_config *c = &m->config;
    const struct layer *parts = &m->layers[layer];
    if (role == ROLE_Q) {
        keep_rows(s->x[layer], m->scratch.x, c->d_model, rows);
        keep_rows(s->normed[layer], inputs, c->d_model, rows);
    }
    if (role != ROLE_O) return;
    keep_rows(s->qkv[layer], m->scratch.qkv, attend_width(c, layer), rows);
    if (parts->attn_gate) keep_rows(s->gates[layer], m->scratch.gates, q_width(c, layer), rows);
    if (parts->state_out)
        m->kern->ops->matmul(m->kern, s->mixed[layer], m->scratch.mixed, parts->state_out, NULL,
                             rows, KERN_SET);
}

static float **open_rows(const struct model_config *c,
                         int width(const struct model_config *, int)) {
    float **rows = mem_must_alloc((size_t)c->layers, sizeof *rows);
    for (int l = 0; l < c->layers; l++)
        rows[l] = mem_must_alloc((size_t)TOKENS * (size_t)(width ? width(c, l) : c->d_model) + 1,
                                 sizeof **rows);
    return rows;
}

static void close_rows(const struct model_config *c, float **rows) {
    for (int l = 0; l < c->layers; l++) mem_free(rows[l]);
    mem_free(rows);
}

/* The last token that the one at t sees. */
static int last_seen(const struct seen *s, int t) {
    for (int g = 0; g < s->given_count; g++)
        if (s->given[g].together && t >= s->given[g].row && t < s->given[g].row + s->given[g].count)
            return s->given[g].row + s->given[g].count - 1;
    return t;
}

/* Reads the text in one step, so that no rows are parted. */
static void watch_text(struct seen *s, const struct opened *o) {
    struct model *model = o->model;
    const struct model_config *c = &model->config;
    int32_t tokens[TOKENS];
    const float *logits;
    *s = (struct seen){.model = model,
                       .given = o->given,
                       .given_count = o->given_count,
                       .x = open_rows(c, NULL),
                       .normed = open_rows(c, NULL),
                       .qkv = open_rows(c, attend_width),
                       .gates = open_rows(c, q_width),
                       .mixed = open_rows(c, NULL)};
    draw_tokens(tokens, TOKENS);
    model->watch = keep;
    model->watch_arg = s;
    const struct kern_span span = {.count = TOKENS};
    const struct kern_batch batch = {.tokens = tokens,
                                     .spans = &span,
                                     .rows = TOKENS,
                                     .span_count = 1,
                                     .given = o->given,
                                     .given_count = o->given_count};
    cr_assert_eq(model_step(model, &batch, NULL, 0, &logits), 0);
    model->watch = NULL;
    model->kern->ops->release(model->kern, 0);
}

static void forget(struct seen *s) {
    float **const all[] = {s->x, s->normed, s->qkv, s->gates, s->mixed};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) close_rows(&s->model->config, all[i]);
}

/* The columns of a matrix, by its products with unit vectors: [cols][rows]. */
static double *columns_of(const struct seen *s, const struct kern_weight *w) {
    const size_t rows = (size_t)w->rows, cols = (size_t)w->cols;
    float *units = mem_must_alloc(cols * cols, sizeof *units);
    float *products = mem_must_alloc(cols * rows, sizeof *products);
    double *out = mem_must_alloc(rows * cols, sizeof *out);
    for (size_t i = 0; i < cols; i++) units[i * cols + i] = 1;
    s->model->kern->ops->matmul(s->model->kern, products, units, w, NULL, (int)cols, KERN_SET);
    for (size_t i = 0; i < rows * cols; i++) out[i] = (double)products[i];
    mem_free(units);
    mem_free(products);
    return out;
}

/* One query head of a layer. */
struct attended {
    int head, dim;          /* dim: numbers of a value */
    double *e, *sum;        /* [TOKENS][TOKENS] exponentials, [TOKENS] their sums */
    double *values, *means; /* [TOKENS][dim] */
    double *gates;          /* [TOKENS][dim] factors of the outputs; 1 where the model has none */
};

/* The layer whose entries a layer attends to. */
static int layer_read_by(const struct model_config *c, int layer) {
    int l = 0;
    while (c->per_layer[l].index != c->per_layer[layer].index || c->per_layer[l].reads) l++;
    return l;
}

static int values_of(const struct model_config *c, int layer) {
    return c->latent.rank ? c->latent.dim_v : c->per_layer[layer].head_dim;
}

static const float *query_at(const struct seen *s, int layer, int t, int head) {
    const struct model_config *c = &s->model->config;
    return s->qkv[layer] + t * attend_width(c, layer) + head * c->per_layer[layer].head_dim;
}

static const float *key_at(const struct seen *s, int layer, int t, int head) {
    const struct model_config *c = &s->model->config;
    const int heads_kv = c->per_layer[layer].heads_kv;
    return query_at(s, layer_read_by(c, layer), t, c->heads_q + head / (c->heads_q / heads_kv));
}

static void find_values(const struct seen *s, int layer, struct attended *at) {
    const struct model_config *c = &s->model->config;
    const struct kern_weight *up = c->latent.rank ? s->model->layers[layer].up_v[at->head] : NULL;
    double *w = up ? columns_of(s, up) : NULL;
    for (int t = 0; t < TOKENS; t++) {
        const float *key = key_at(s, layer, t, at->head);
        const float *value = key + kv_width(c, layer);
        for (int d = 0; d < at->dim; d++) {
            double *to = &at->values[t * at->dim + d];
            *to = up ? 0 : (double)value[d];
            for (int j = 0; j < c->latent.rank; j++) *to += w[j * at->dim + d] * (double)key[j];
        }
    }
    mem_free(w);
}

static void attend(const struct seen *s, int layer, struct attended *at) {
    const struct model_config *c = &s->model->config;
    const struct model_layer_config *its = &c->per_layer[layer];
    const float *sinks = s->model->layers[layer].sinks;
    find_values(s, layer, at);
    memset(at->means, 0, (size_t)(TOKENS * at->dim) * sizeof *at->means);
    for (int t = 0; t < TOKENS; t++) {
        double *e = at->e + (size_t)t * TOKENS, *mean = at->means + (size_t)(t * at->dim);
        const float *q = query_at(s, layer, t, at->head);
        at->sum[t] = sinks ? exp((double)sinks[at->head]) : 0;
        for (int i = 0; i <= last_seen(s, t); i++) {
            const float *k = key_at(s, layer, i, at->head);
            double z = 0;
            for (int j = 0; j < its->head_dim; j++) z += (double)q[j] * (double)k[j];
            z *= (double)c->attend_scale;
            if (c->attend_cap > 0) z = (double)c->attend_cap * tanh(z / (double)c->attend_cap);
            e[i] = its->sliding_window && i <= t - its->sliding_window ? 0 : exp(z);
            at->sum[t] += e[i];
            for (int d = 0; d < at->dim; d++) mean[d] += e[i] * at->values[i * at->dim + d];
        }
        for (int d = 0; d < at->dim; d++) mean[d] /= at->sum[t];
    }
}

static void find_gates(const struct seen *s, int layer, struct attended *at) {
    const struct model_config *c = &s->model->config;
    const int from = at->head * c->per_layer[layer].head_dim;
    for (int t = 0; t < TOKENS; t++) {
        const float *gates = s->gates[layer] + t * q_width(c, layer) + from;
        for (int d = 0; d < at->dim; d++)
            at->gates[t * at->dim + d] =
                s->model->layers[layer].attn_gate ? 1 / (1 + exp(-(double)gates[d])) : 1;
    }
}

/* The squared norm of the change of what the head adds at t, without entry i. */
static double change_without(const struct seen *s, const struct attended *at, const double *w,
                             int t, int i) {
    const struct model_config *c = &s->model->config;
    const double e = at->e[(size_t)t * TOKENS + (size_t)i], sum = at->sum[t];
    const double least = fmin(1, (1 - e / sum) / 0.01); /* KERN_WORTH_REST */
    double outputs[WIDTH_MAX] = {0}, change = 0;
    if (e == 0) return 0;
    for (int d = 0; d < at->dim; d++) {
        const double mean = at->means[t * at->dim + d], value = at->values[i * at->dim + d];
        const double without = (mean * sum - e * value) / (sum - e);
        const double moved = at->gates[t * at->dim + d] * (without - mean) * least;
        const double *column = w + (at->head * at->dim + d) * c->d_model;
        for (int r = 0; r < c->d_model; r++) outputs[r] += column[r] * moved;
    }
    for (int r = 0; r < c->d_model; r++) change += outputs[r] * outputs[r];
    return change;
}

static void add_changes(const struct seen *s, const struct worth_text *text, int layer,
                        const struct attended *at, const double *w, const double *factors,
                        double *worths) {
    const struct model_config *c = &s->model->config;
    const int heads_kv = c->per_layer[layer].heads_kv, kv = at->head / (c->heads_q / heads_kv);
    for (int i = 0; i < text->entries; i++)
        for (int t = (text->at[i] / WORTH_WINDOW + 1) * WORTH_WINDOW; t < TOKENS; t++)
            worths[(t / WORTH_WINDOW * heads_kv + kv) * text->entries + i] +=
                change_without(s, at, w, t, text->at[i]) * factors[t];
}

/* The output of attention before its norm: W (g o) + b of all heads. */
static void find_output(const struct seen *s, int layer, const struct attended *heads,
                        const double *w, int t, double *y) {
    const struct model_config *c = &s->model->config;
    const float *bias = s->model->layers[layer].o_bias;
    const int dim = heads->dim, width = c->heads_q * dim;
    for (int r = 0; r < c->d_model; r++) {
        y[r] = bias ? (double)bias[r] : 0;
        for (int j = 0; j < width; j++)
            y[r] += w[j * c->d_model + r] * heads[j / dim].gates[t * dim + j % dim] *
                    heads[j / dim].means[t * dim + j % dim];
    }
}

/* 1 / |x + f(y) + m|^2, y what attention adds and m what a recurrent state beside it adds; with a
 * norm f after attention times |f(y)|^2 / |y|^2. */
static void find_factors(const struct seen *s, int layer, const struct attended *heads,
                         const double *w, double *factors) {
    const struct model_config *c = &s->model->config;
    const struct layer *parts = &s->model->layers[layer];
    double *y = mem_must_alloc((size_t)c->d_model, sizeof *y);
    for (int t = 0; t < TOKENS; t++) {
        double branch = 0, normed = 0, after = 0;
        find_output(s, layer, heads, w, t, y);
        for (int r = 0; r < c->d_model; r++) branch += y[r] * y[r];
        const double size = sqrt(branch / c->d_model + (double)c->post_eps);
        for (int r = 0; r < c->d_model; r++) {
            const int at = t * c->d_model + r;
            if (parts->attn_post_norm) y[r] *= (double)parts->attn_post_norm[r] / size;
            normed += y[r] * y[r];
            const double sum = (double)s->x[layer][at] + y[r] +
                               (parts->state_out ? (double)s->mixed[layer][at] : 0);
            after += sum * sum;
        }
        factors[t] = (parts->attn_post_norm ? normed / branch : 1) / after;
    }
    mem_free(y);
}

/* Adds what a layer finds; layers that read the entries of others add to those. */
static void add_expected(const struct seen *s, const struct worth_text *text, int layer,
                         double *worths) {
    const struct model_config *c = &s->model->config;
    const size_t dim = (size_t)values_of(c, layer), heads = (size_t)c->heads_q;
    double *w = columns_of(s, s->model->layers[layer].o), factors[TOKENS];
    struct attended *at = mem_must_alloc(heads, sizeof *at);
    cr_assert(c->d_model <= WIDTH_MAX);
    for (size_t h = 0; h < heads; h++) {
        at[h] = (struct attended){.head = (int)h,
                                  .dim = (int)dim,
                                  .e = mem_must_alloc((size_t)TOKENS * TOKENS, sizeof(double)),
                                  .sum = mem_must_alloc(TOKENS, sizeof(double)),
                                  .values = mem_must_alloc(TOKENS * dim, sizeof(double)),
                                  .means = mem_must_alloc(TOKENS * dim, sizeof(double)),
                                  .gates = mem_must_alloc(TOKENS * dim, sizeof(double))};
        attend(s, layer, &at[h]);
        find_gates(s, layer, &at[h]);
    }
    find_factors(s, layer, at, w, factors);
    for (size_t h = 0; h < heads; h++) {
        add_changes(s, text, layer, &at[h], w, factors, worths);
        mem_free(at[h].e);
        mem_free(at[h].sum);
        mem_free(at[h].values);
        mem_free(at[h].means);
        mem_free(at[h].gates);
    }
    mem_free(at);
    mem_free(w);
}

/* ---- Tests ---- */

/* Errors relative to the entry's worth, and to the largest of its stream and window. */
static double compare(const struct worth_text *text, int layer, const double *want, int *count) {
    const int streams = worth_text_stream(text, text->layers), entries = text->entries;
    const int first = worth_text_stream(text, layer);
    const int heads = worth_text_stream(text, layer + 1) - first;
    double worst = 0;
    for (int i = 0; i < text->windows * heads; i++) {
        const float *found = text->worths + (i / heads * streams + first + i % heads) * entries;
        const double *wanted = want + i * entries;
        double most = 0;
        for (int k = 0; k < entries; k++) most = fmax(most, wanted[k]);
        for (int k = 0; k < entries; k++) {
            const double error = fabs((double)found[k] - wanted[k]);
            worst = fmax(worst, most > 0 ? error / (wanted[k] + most / 100) : error);
            *count += wanted[k] > 0;
        }
    }
    return worst;
}

/* Gates read the inputs of the layer that has the entries. */
static void check_inputs(const struct seen *s, const struct worth_text *text, int layer) {
    const int width = s->model->config.d_model;
    const int stored = s->model->config.per_layer[layer].index;
    for (int i = 0; i < text->entries; i++)
        for (int d = 0; d < width; d++)
            cr_assert_eq(text->x[(stored * text->entries + i) * width + d],
                         number_to_bf16(s->normed[layer][text->at[i] * width + d]));
}

static void check_opened(struct opened *o, const char *name, const char *path, double bar) {
    struct worth_text text;
    struct seen seen;
    double worst = 0;
    int count = 0;
    const struct model_config *c = &o->model->config;
    measure(o, &text);
    watch_text(&seen, o);
    for (int stored = 0; stored < c->cache_layers; stored++) {
        double *want = mem_must_alloc((size_t)text.windows * (size_t)(text.heads * text.entries),
                                      sizeof *want);
        for (int l = 0; l < c->layers; l++)
            if (c->per_layer[l].index == stored) add_expected(&seen, &text, l, want);
        worst = fmax(worst, compare(&text, stored, want, &count));
        mem_free(want);
    }
    for (int l = 0; l < c->layers; l++)
        if (holds_entries(&c->per_layer[l])) check_inputs(&seen, &text, l);
    printf("worth %-8s %-9s: %d above 0, worst %.1e\n", name, path, count, worst);
    cr_assert(count > 100, "%s: %d worths above 0", name, count);
    cr_assert(worst < bar, "%s on %s: %g", name, path, worst);
    forget(&seen);
    worth_text_close(&text);
}

static void check_model(const char *name, const char *path, enum quantization quantization,
                        enum kern_dtype kv_type, double bar) {
    struct opened o;
    open_model(&o, name, path, 2, quantization, kv_type);
    check_opened(&o, name, path, bar);
    close_model(&o);
}

/* Rows of pictures: with embeddings of their own, and, in Gemma's, seeing each other. The last ones
 * would be parted between two steps. */
Test(worth, pictures) {
    enum { PLAIN = 40, TOGETHER = 100 };
    static float rows[(PLAIN + TOGETHER) * WIDTH_MAX];
    uint32_t state = 11;
    struct opened o;
    open_model(&o, "gemma3", "reference", 2, QUANTIZE_NONE, KERN_F32);
    const int width = o.model->config.d_model;
    cr_assert(width <= WIDTH_MAX);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        state = state * 1664525u + 1013904223u;
        rows[i] = (float)(state >> 8) / (float)(1 << 24) - 0.5f;
    }
    const struct kern_given given[] = {{.row = 90, .count = PLAIN, .rows = rows},
                                       {.row = WORTH_ROWS - 70,
                                        .count = TOGETHER,
                                        .together = true,
                                        .rows = rows + PLAIN * width}};
    o.given = given;
    o.given_count = 2;
    check_opened(&o, "pictures", "reference", 2e-5);
    close_model(&o);
}

/* A text ends before rows that see each other and would be parted, also where another picture ends
 * at the end that this makes. */
Test(worth, texts_end_before_pictures_that_would_be_parted) {
    const struct kern_given given[] = {{.row = 200, .count = 100, .together = true},
                                       {.row = 310, .count = 100, .together = true}};
    struct worth_input input = {.count = 330, .given = given, .given_count = 2};
    cr_assert_eq(worth_tokens(&input), 192);
    input.count = 450;
    cr_assert_eq(worth_tokens(&input), 448);
    input.given_count = 0;
    cr_assert_eq(worth_tokens(&input), 448);
}

/* Rows that see each other and do not fit a step are refused. */
Test(worth, rows_together_that_do_not_fit_a_step_are_refused) {
    static const float rows[WORTH_ROWS * WIDTH_MAX];
    static const int32_t tokens[TOKENS];
    const struct kern_given given = {
        .row = 65, .count = WORTH_ROWS, .together = true, .rows = rows};
    const struct worth_input input = {
        .tokens = tokens, .count = TOKENS, .given = &given, .given_count = 1};
    struct worth_text text;
    struct fault fault = {0};
    struct opened o;
    open_model(&o, "gemma3", "auto", 1, QUANTIZE_NONE, KERN_BF16);
    cr_assert_eq(worth_measure(o.worth, &input, 1, &text, &fault), ERR_INVALID);
    close_model(&o);
}

/* Norms after attention, windows and caps; sinks and experts; norms of all heads together. */
Test(worth, families) {
    static const char *const names[] = {"llama", "qwen3",  "gemma2", "gemma3",
                                        "olmo2", "gptoss", "mixtral"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (!test_leaves_out(i, 5))
            check_model(names[i], "reference", QUANTIZE_NONE, KERN_F32, 2e-5);
}

/* Latent attention, with and without a product in front of queries, and with scaled queries. */
Test(worth, latent_attention) {
    static const char *const names[] = {"deepseekv2", "deepseekv2lite", "glm4moelite", "mistral4"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (!test_leaves_out(i, 4))
            check_model(names[i], "reference", QUANTIZE_NONE, KERN_F32, 2e-5);
}

/* Gates on attention's output, beside windows and beside gated delta rules. */
Test(worth, gated_outputs) {
    static const char *const names[] = {"museglimmer", "qwen3next", "qwen35"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (!test_leaves_out(i, 2))
            check_model(names[i], "reference", QUANTIZE_NONE, KERN_F32, 2e-5);
}

/* Layers that read the entries of others; heads of two sizes, more or fewer of them, and values
 * that are the keys. */
Test(worth, layers_that_differ) {
    check_model("gemma4", "reference", QUANTIZE_NONE, KERN_F32, 2e-5);
    if (!test_leaves_out(1, 2))
        check_model("gemma4dense", "reference", QUANTIZE_NONE, KERN_F32, 2e-5);
}

/* A recurrent state beside attention in every layer, with factors on products; in others, layers
 * with attention alone between them. */
Test(worth, recurrent_states) {
    static const char *const names[] = {"falconh1", "falconh1norm", "nemotronh", "granitehybrid"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (!test_leaves_out(i, 2))
            check_model(names[i], "reference", QUANTIZE_NONE, KERN_F32, 2e-5);
}

/* All families, those that are not compared above, too: with sanitizers this one has no sample. */
Test(worth, every_family_is_measured) {
    char path[512];
    int families = 0;
    snprintf(path, sizeof path, "%s/tests/data/models", KEEPD_SOURCE_DIR);
    DIR *dir = opendir(path);
    cr_assert_not_null(dir);
    for (const struct dirent *entry; (entry = readdir(dir));) {
        struct opened o;
        struct worth_text text;
        /* keepd-nano is bundled/keepd-nano; here it has only what it answers. */
        if (entry->d_name[0] == '.' || !strcmp(entry->d_name, "keepd-nano")) continue;
        open_model(&o, entry->d_name, "auto", 1, QUANTIZE_NONE, KERN_BF16);
        measure(&o, &text);
        const int streams = worth_text_stream(&text, text.layers);
        for (int l = 0; l < text.layers; l++) {
            const int first = worth_text_stream(&text, l) * text.entries;
            const int end = worth_text_stream(&text, l + 1) * text.entries;
            double sum = 0;
            for (int c = 0; c < text.windows; c++)
                for (int i = first; i < end; i++) {
                    const float worth = text.worths[c * streams * text.entries + i];
                    cr_assert(isfinite(worth) && worth >= 0, "%s", entry->d_name);
                    sum += (double)worth;
                }
            cr_assert(sum > 0, "%s, layer %d", entry->d_name, l);
        }
        families++;
        worth_text_close(&text);
        close_model(&o);
    }
    closedir(dir);
    printf("%d families' models are measured\n", families);
    cr_assert(families >= 50, "%d", families);
}

Test(worth, paths) {
    static const char *const paths[] = {"portable", "neon", "avx2", "avx512"};
    static const char *const names[] = {"gemma2", "deepseekv2", "museglimmer", "gemma4",
                                        "falconh1"};
    struct cpu_isa isa = cpu_isa_detect();
    const bool usable[] = {CPU_HAS_PORTABLE, CPU_HAS_NEON && isa.neon, CPU_HAS_AVX2 && isa.avx2,
                           CPU_HAS_AVX512 && isa.avx512};
    for (size_t i = 0; i < 4; i++)
        for (size_t n = 0; usable[i] && n < sizeof names / sizeof names[0]; n++)
            if (!test_leaves_out(i + n, 3))
                check_model(names[n], paths[i], QUANTIZE_NONE, KERN_F32, 2e-5);
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
    static const char *const names[] = {"gemma3", "gptoss",   "deepseekv3", "museglimmer",
                                        "gemma4", "falconh1", "nemotronh"};
    for (size_t n = 0; n < sizeof names / sizeof names[0]; n++) {
        struct worth_text first, text;
        if (test_leaves_out(n, 3)) continue;
        for (int threads = 1; threads <= 4; threads++) {
            struct opened o;
            open_model(&o, names[n], "auto", threads, QUANTIZE_NONE, KERN_BF16);
            measure(&o, threads == 1 ? &first : &text);
            close_model(&o);
            if (threads == 1) continue;
            const int numbers = worth_text_stream(&first, first.layers) * first.entries;
            cr_assert_eq(memcmp(first.worths, text.worths,
                                (size_t)(numbers * first.windows) * sizeof(float)),
                         0, "%s", names[n]);
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
    cr_assert_eq(measure_first(&o, tokens, 2 * WORTH_WINDOW - 1, &text, &fault), ERR_INVALID);
    for (int n = 0; n < 3; n++) {
        mem_fail_after(n);
        cr_assert_eq(measure_first(&o, tokens, 2 * WORTH_WINDOW, &text, &fault), ERR_NOMEM);
    }
    mem_fail_after(-1);
    cr_assert_eq(measure_first(&o, tokens, 2 * WORTH_WINDOW, &text, &fault), 0);
    cr_assert_eq(text.windows, 2);
    worth_text_close(&text);
    close_model(&o);
}

/* A backend that does not measure, as CUDA's. */
Test(worth, backends_that_do_not_measure_are_refused) {
    struct opened o;
    struct worth *worth = NULL;
    struct fault fault = {0};
    const struct worth_options options = {
        .tokens = 128, .entries = 8, .rows = WORTH_ROWS, .kv_type = KERN_BF16};
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
