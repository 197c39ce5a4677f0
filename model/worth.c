#include "model/worth.h"

#include <math.h>
#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "base/splitmix.h"
#include "kernels/number.h"
#include "kernels/worth.h"
#include "model/internal.h"

struct worth {
    struct kern *kern;
    struct model *model;
    struct worth_options options;
    /* [WORTH_ROWS][d_model] what attention adds, in the backend's memory; `normed` behind a norm,
     * NULL: there is none */
    float *branch, *normed;
    float *rows, *added; /* [WORTH_ROWS][d_model] host memory */
    float *factors;      /* [WORTH_ROWS] */
    float *out;          /* [WORTH_ROWS / WORTH_WINDOW][heads_kv][entries] */
    /* The present step. */
    const struct kern_batch *batch;
    struct worth_text *text;
    int rc; /* the first error */
};

/* ---- One layer ---- */

static int download_rows(const struct worth *w, float *to, const float *from, int rows) {
    const size_t width = (size_t)w->model->config.d_model;
    return w->kern->ops->download(w->kern, to, from, (size_t)rows * width * sizeof *from);
}

static double row_square(const struct worth *w, int row) {
    const int width = w->model->config.d_model;
    double sum = 0;
    for (int i = 0; i < width; i++) {
        const double x = (double)w->rows[(size_t)row * (size_t)width + (size_t)i];
        sum += x * x;
    }
    return sum;
}

/* Multiplies the rows' factors by their squared norms, or divides them; `rows`: downloaded. */
static void scale_factors(struct worth *w, int rows, bool divide) {
    for (int r = 0; r < rows; r++) {
        const double square = row_square(w, r);
        w->factors[r] *= (float)(divide ? 1 / fmax(square, 1e-20) : square);
    }
}

/* Keeps the inputs of the gates, of the entries that this step has. */
static void keep_inputs(struct worth *w, int layer, int rows) {
    struct worth_text *text = w->text;
    const size_t width = (size_t)text->d_model;
    const int32_t first = w->batch->spans->pos;
    for (int i = 0; i < text->entries; i++) {
        if (text->at[i] < first || text->at[i] >= first + rows) continue;
        const float *from = w->rows + (size_t)(text->at[i] - first) * width;
        uint16_t *to = text->x + ((size_t)layer * (size_t)text->entries + (size_t)i) * width;
        for (size_t d = 0; d < width; d++) to[d] = number_to_bf16(from[d]);
    }
}

static int before_layer(struct worth *w, int layer, const float *inputs, int rows) {
    int rc = download_rows(w, w->rows, inputs, rows);
    if (!rc) keep_inputs(w, w->model->config.per_layer[layer].index, rows);
    return rc;
}

/* The norm after attention changes the size of what attention adds. */
static int scale_by_norm(struct worth *w, const struct layer *layer, int rows) {
    const struct model_config *c = &w->model->config;
    struct kern *kern = w->kern;
    int rc = download_rows(w, w->rows, w->branch, rows);
    if (rc) return rc;
    scale_factors(w, rows, true);
    kern->ops->rms_norm(kern, w->normed, w->branch, layer->attn_post_norm, rows, c->d_model,
                        c->post_eps);
    rc = download_rows(w, w->rows, w->normed, rows);
    if (!rc) scale_factors(w, rows, false);
    return rc;
}

/* Computes a second time what attention adds to the residual stream. */
static int compute_factors(struct worth *w, int index, const float *heads, int rows) {
    const struct layer *layer = &w->model->layers[index];
    const size_t numbers = (size_t)rows * (size_t)w->model->config.d_model;
    const bool norm = layer->attn_post_norm;
    int rc = 0;
    for (int r = 0; r < rows; r++) w->factors[r] = 1;
    w->kern->ops->matmul(w->kern, w->branch, heads, layer->o, layer->o_bias, rows, KERN_SET);
    if (norm) rc = scale_by_norm(w, layer, rows);
    if (!rc) rc = download_rows(w, w->added, norm ? w->normed : w->branch, rows);
    if (!rc) rc = download_rows(w, w->rows, w->model->scratch.x, rows);
    if (rc) return rc;
    for (size_t i = 0; i < numbers; i++) w->rows[i] += w->added[i];
    scale_factors(w, rows, true);
    return 0;
}

static int after_attention(struct worth *w, int layer, const float *heads, int rows) {
    const struct layer *parts = &w->model->layers[layer];
    struct worth_text *text = w->text;
    const struct kern_worth what = {.o = parts->o,
                                    .entries = text->at,
                                    .count = text->entries,
                                    .window = WORTH_WINDOW,
                                    .factors = w->factors,
                                    .out = w->out};
    const struct kern_attend_options attend = model_attend_options(w->model, layer);
    const int stored = w->model->config.per_layer[layer].index;
    int rc = compute_factors(w, layer, heads, rows);
    if (!rc)
        rc = w->kern->ops->worth(w->kern, stored, &what, heads, w->model->scratch.qkv, w->batch,
                                 &attend);
    if (rc) return rc;
    const size_t each = (size_t)text->heads * (size_t)text->entries;
    for (int i = 0; i < rows / WORTH_WINDOW; i++) {
        const int window = w->batch->spans->pos / WORTH_WINDOW + i;
        float *to = text->worths + ((size_t)window * (size_t)text->layers + (size_t)stored) * each;
        memcpy(to, w->out + (size_t)i * each, each * sizeof *to);
    }
    return 0;
}

static void watch_layer(void *arg, int layer, enum role role, const float *inputs, int rows) {
    struct worth *w = arg;
    if (w->rc) return;
    if (role == ROLE_Q) w->rc = before_layer(w, layer, inputs, rows);
    if (role == ROLE_O) w->rc = after_attention(w, layer, inputs, rows);
}

/* ---- One text ---- */

size_t worth_text_bytes(const struct model_config *config, int tokens, int entries) {
    const size_t streams = (size_t)config->cache_layers * (size_t)config->heads_kv;
    const size_t x = (size_t)config->cache_layers * (size_t)config->d_model * sizeof(uint16_t);
    return (size_t)entries *
           (sizeof(int32_t) + x + (size_t)(tokens / WORTH_WINDOW) * streams * sizeof(float));
}

void worth_text_close(struct worth_text *text) {
    mem_free(text->at);
    mem_free(text->x);
    mem_free(text->worths);
    *text = (struct worth_text){0};
}

static int worth_open_text(const struct worth *w, int tokens, struct worth_text *text) {
    const struct model_config *c = &w->model->config;
    const int entries = tokens < w->options.entries ? tokens : w->options.entries;
    *text = (struct worth_text){.layers = c->cache_layers,
                                .heads = c->heads_kv,
                                .d_model = c->d_model,
                                .tokens = tokens,
                                .windows = tokens / WORTH_WINDOW,
                                .entries = entries};
    const size_t numbers = (size_t)c->cache_layers * (size_t)entries;
    text->at = mem_try_alloc((size_t)entries, sizeof *text->at);
    text->x = mem_try_alloc(numbers * (size_t)c->d_model, sizeof *text->x);
    text->worths =
        mem_try_alloc(numbers * (size_t)c->heads_kv * (size_t)text->windows, sizeof *text->worths);
    return text->at && text->x && text->worths ? 0 : ERR_NOMEM;
}

/* Every set of positions is equally likely. */
static void draw_entries(struct worth_text *text, uint64_t seed) {
    int drawn = 0;
    for (int32_t pos = 0; drawn < text->entries; pos++)
        if (splitmix_next(&seed) % (uint64_t)(text->tokens - pos) <
            (uint64_t)(text->entries - drawn))
            text->at[drawn++] = pos;
}

/* No row wants logits, so that the last layer ends with attention. */
static int worth_step(struct worth *w, const int32_t *tokens, int pos, int rows) {
    const struct kern_span span = {.count = rows, .pos = pos};
    const struct kern_batch batch = {tokens + pos, &span, rows, 1};
    const float *logits;
    w->batch = &batch;
    w->rc = 0;
    w->model->watch = watch_layer;
    w->model->watch_arg = w;
    int rc = model_step(w->model, &batch, NULL, 0, &logits);
    if (!rc) rc = w->kern->ops->sync(w->kern);
    w->model->watch = NULL;
    return rc ? rc : w->rc;
}

int worth_measure(struct worth *w, const int32_t *tokens, int count, uint64_t seed,
                  struct worth_text *out, struct fault *fault) {
    if (count > w->options.tokens) count = w->options.tokens;
    count -= count % WORTH_WINDOW;
    if (count < 2 * WORTH_WINDOW)
        return fault_set(fault, ERR_INVALID, "text", "has less than %d tokens", 2 * WORTH_WINDOW);
    int rc = worth_open_text(w, count, out);
    if (!rc) draw_entries(out, seed);
    w->text = out;
    for (int pos = 0; pos < count && !rc; pos += WORTH_ROWS)
        rc = worth_step(w, tokens, pos, count - pos < WORTH_ROWS ? count - pos : WORTH_ROWS);
    w->kern->ops->release(w->kern, 0);
    if (!rc) return 0;
    worth_text_close(out);
    return fault_set(fault, rc, "", "a text of %d tokens cannot be measured: %s", count,
                     err_text(rc));
}

/* ---- Opening ---- */

static int worth_open_cache(struct worth *w, struct fault *fault) {
    const struct model_config *c = &w->model->config;
    struct kern_cache_info info;
    struct kern_cache_options cache = model_cache_options(c);
    cache.dtype = w->options.kv_type;
    w->kern->ops->cache_info(&cache, &info);
    cache.pages = model_pages(c, &info, w->options.tokens);
    cache.slots = 1;
    cache.max_positions = w->options.tokens;
    cache.rows_max = WORTH_ROWS;
    cache.vocab = 0; /* nothing is sampled */
    return w->kern->ops->cache_open(w->kern, &cache, fault);
}

static int worth_open_arrays(struct worth *w, struct fault *fault) {
    const struct model_config *c = &w->model->config;
    const size_t width = (size_t)c->d_model, bytes = WORTH_ROWS * width * sizeof(float);
    const size_t windows = WORTH_ROWS / WORTH_WINDOW;
    w->rows = mem_try_alloc(width, WORTH_ROWS * sizeof *w->rows);
    w->added = mem_try_alloc(width, WORTH_ROWS * sizeof *w->added);
    w->factors = mem_try_alloc(WORTH_ROWS, sizeof *w->factors);
    w->out =
        mem_try_alloc(windows * (size_t)c->heads_kv, (size_t)w->options.entries * sizeof *w->out);
    w->branch = w->kern->ops->mem_alloc(w->kern, bytes);
    if (c->post_norms) w->normed = w->kern->ops->mem_alloc(w->kern, bytes);
    if (w->rows && w->added && w->factors && w->out && w->branch && (!c->post_norms || w->normed))
        return 0;
    return fault_set(fault, ERR_NOMEM, "", "no memory for activations of %d tokens", WORTH_ROWS);
}

static bool mixes_twice(const struct model_config *c) {
    for (int i = 0; i < c->layers; i++)
        if (c->per_layer[i].attends_too) return true;
    return false;
}

int worth_open(struct kern *kern, struct model *model, const struct worth_options *options,
               struct worth **out, struct fault *fault) {
    CHECK(options->tokens > 0 && options->entries > 0 && model->rows_max >= WORTH_ROWS);
    if (model->config.attn_gate || model->config.layer_scales)
        return fault_set(fault, ERR_UNSUPPORTED, "model",
                         "gates cannot be fitted to models that gate attention's output, or scale "
                         "what layers hand on");
    if (model->config.latent.rank)
        return fault_set(fault, ERR_UNSUPPORTED, "model",
                         "gates cannot be fitted to models with latent attention");
    if (mixes_twice(&model->config))
        return fault_set(fault, ERR_UNSUPPORTED, "model",
                         "gates cannot be fitted to models whose layers have a recurrent state "
                         "beside attention");
    if (!kern->ops->worth)
        return fault_set(fault, ERR_UNSUPPORTED, "device",
                         "the %s backend does not measure what entries are worth; use device cpu "
                         "and one rank",
                         kern->ops->name);
    struct worth *w = mem_must_alloc(1, sizeof *w);
    w->kern = kern;
    w->model = model;
    w->options = *options;
    int rc = worth_open_arrays(w, fault);
    if (!rc) rc = worth_open_cache(w, fault);
    if (rc)
        worth_close(w);
    else
        *out = w;
    return rc;
}

void worth_close(struct worth *w) {
    if (!w) return;
    if (w->branch) w->kern->ops->mem_free(w->kern, w->branch);
    if (w->normed) w->kern->ops->mem_free(w->kern, w->normed);
    mem_free(w->rows);
    mem_free(w->added);
    mem_free(w->factors);
    mem_free(w->out);
    mem_free(w);
}
