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
    /* [rows][d_model] what attention adds, in the backend's memory; `normed` behind a norm,
     * NULL: there is none */
    float *branch, *normed;
    float *rows, *added; /* [rows][d_model] host memory */
    float *factors;      /* [rows] */
    float *out;          /* [rows / WORTH_WINDOW][heads_kv][entries] */
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
    const struct model_layer_config *its = &w->model->config.per_layer[layer];
    if (its->reads) return 0; /* gates read the inputs of the layer that has the entries */
    int rc = download_rows(w, w->rows, inputs, rows);
    if (!rc) keep_inputs(w, its->index, rows);
    return rc;
}

/* Computes a second time what a product adds to the residual stream, and leaves it in `added`. */
static int compute_branch(struct worth *w, const float *in, const struct kern_weight *weight,
                          const float *bias, const float *post_norm, int rows) {
    const struct model_config *c = &w->model->config;
    const struct kern_ops *ops = w->kern->ops;
    ops->matmul(w->kern, w->branch, in, weight, bias, rows, KERN_SET);
    if (post_norm)
        ops->rms_norm(w->kern, w->normed, w->branch, post_norm, rows, c->d_model, c->post_eps);
    return download_rows(w, w->added, post_norm ? w->normed : w->branch, rows);
}

/* The norm after attention changes the size of what attention adds. */
static int scale_by_norm(struct worth *w, int rows) {
    int rc = download_rows(w, w->rows, w->branch, rows);
    if (rc) return rc;
    scale_factors(w, rows, true);
    memcpy(w->rows, w->added, (size_t)rows * (size_t)w->model->config.d_model * sizeof *w->rows);
    scale_factors(w, rows, false);
    return 0;
}

static void worth_add_branch(struct worth *w, int rows) {
    const size_t numbers = (size_t)rows * (size_t)w->model->config.d_model;
    for (size_t i = 0; i < numbers; i++) w->rows[i] += w->added[i];
}

/* The stream behind attention is also behind a recurrent state beside it. */
static int compute_factors(struct worth *w, int index, const float *heads, int rows) {
    const struct layer *layer = &w->model->layers[index];
    const struct scratch *s = &w->model->scratch;
    const float *norm = layer->attn_post_norm;
    for (int r = 0; r < rows; r++) w->factors[r] = 1;
    int rc = compute_branch(w, heads, layer->o, layer->o_bias, norm, rows);
    if (!rc && norm) rc = scale_by_norm(w, rows);
    if (!rc) rc = download_rows(w, w->rows, s->x, rows);
    if (rc) return rc;
    worth_add_branch(w, rows);
    if (layer->state_out) {
        rc = compute_branch(w, s->mixed, layer->state_out, NULL, norm, rows);
        if (rc) return rc;
        worth_add_branch(w, rows);
    }
    scale_factors(w, rows, true);
    return 0;
}

/* Adds what was measured in a layer to what its entries are worth; layers that read them come after
 * the one that has them. */
static void add_worths(struct worth *w, const struct model_layer_config *its, int rows) {
    struct worth_text *text = w->text;
    const size_t entries = (size_t)text->entries, each = (size_t)its->heads_kv * entries;
    const size_t first = (size_t)worth_text_stream(text, its->index) * entries;
    const size_t window_worths = (size_t)worth_text_stream(text, text->layers) * entries;
    for (int i = 0; i < rows / WORTH_WINDOW; i++) {
        const int window = w->batch->spans->pos / WORTH_WINDOW + i;
        const float *from = w->out + (size_t)i * each;
        float *to = text->worths + (size_t)window * window_worths + first;
        for (size_t k = 0; k < each; k++) to[k] = its->reads ? to[k] + from[k] : from[k];
    }
}

static int after_attention(struct worth *w, int layer, const float *heads, int rows) {
    const struct layer *parts = &w->model->layers[layer];
    const struct model_layer_config *its = &w->model->config.per_layer[layer];
    const struct kern_latent latent = model_latent(w->model, layer);
    const struct kern_worth what = {.o = parts->o,
                                    .latent = latent.rank ? &latent : NULL,
                                    .gates = parts->attn_gate ? w->model->scratch.gates : NULL,
                                    .entries = w->text->at,
                                    .count = w->text->entries,
                                    .window = WORTH_WINDOW,
                                    .factors = w->factors,
                                    .out = w->out};
    const struct kern_attend_options attend = model_attend_options(w->model, layer);
    int rc = compute_factors(w, layer, heads, rows);
    if (!rc)
        rc = w->kern->ops->worth(w->kern, its->index, &what, heads, w->model->scratch.qkv, w->batch,
                                 &attend);
    if (!rc) add_worths(w, its, rows);
    return rc;
}

static void watch_layer(void *arg, int layer, enum role role, const float *inputs, int rows) {
    struct worth *w = arg;
    if (w->rc) return;
    if (role == ROLE_Q) w->rc = before_layer(w, layer, inputs, rows);
    if (role == ROLE_O) w->rc = after_attention(w, layer, inputs, rows);
}

/* ---- One text ---- */

int worth_text_stream(const struct worth_text *text, int layer) {
    int stream = 0;
    if (!text->layer_heads) return layer * text->heads;
    for (int l = 0; l < layer; l++) stream += text->layer_heads[l];
    return stream;
}

int worth_layer_heads(const struct model_config *config, int32_t **out) {
    bool differ = false;
    for (int l = 0; l < config->cache_layers && config->heads; l++)
        differ |= config->heads[l].kv != config->heads_kv;
    if (differ) {
        int32_t *heads = mem_try_alloc((size_t)config->cache_layers, sizeof *heads);
        if (!heads) return ERR_NOMEM;
        for (int l = 0; l < config->cache_layers; l++) heads[l] = config->heads[l].kv;
        *out = heads;
    } else
        *out = NULL;
    return 0;
}

size_t worth_text_bytes(const struct model_config *config, int tokens, int entries) {
    const size_t streams = (size_t)config->cache_layers * (size_t)config->heads_kv;
    const size_t x = (size_t)config->cache_layers * (size_t)config->d_model * sizeof(uint16_t);
    return (size_t)entries *
           (sizeof(int32_t) + x + (size_t)(tokens / WORTH_WINDOW) * streams * sizeof(float));
}

int worth_text_alloc(struct worth_text *text) {
    const size_t entries = (size_t)text->entries;
    const size_t streams = (size_t)worth_text_stream(text, text->layers);
    text->at = mem_try_alloc(entries, sizeof *text->at);
    text->x =
        mem_try_alloc((size_t)text->layers * entries, (size_t)text->d_model * sizeof *text->x);
    text->worths = mem_try_alloc(streams * entries, (size_t)text->windows * sizeof *text->worths);
    return text->at && text->x && text->worths ? 0 : ERR_NOMEM;
}

void worth_text_free(struct worth_text *text) {
    mem_free(text->at);
    mem_free(text->x);
    mem_free(text->worths);
    text->at = NULL;
    text->x = NULL;
    text->worths = NULL;
}

void worth_text_close(struct worth_text *text) {
    worth_text_free(text);
    mem_free(text->layer_heads);
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
    int rc = worth_layer_heads(c, &text->layer_heads);
    if (rc) return rc;
    return worth_text_alloc(text);
}

/* Every set of positions is equally likely. */
static void draw_entries(struct worth_text *text, uint64_t seed) {
    int drawn = 0;
    for (int32_t pos = 0; drawn < text->entries; pos++)
        if (splitmix_next(&seed) % (uint64_t)(text->tokens - pos) <
            (uint64_t)(text->entries - drawn))
            text->at[drawn++] = pos;
}

/* Returns the last end of a window up to `end` that parts no rows which see each other; not behind
 * `pos`: there is none. */
static int worth_undivided_end(const struct worth_input *input, int pos, int end) {
    for (int g = input->given_count - 1; g >= 0 && end > pos; g--) {
        const struct kern_given *given = &input->given[g];
        if (given->together && given->row < end && given->row + given->count > end)
            end = given->row / WORTH_WINDOW * WORTH_WINDOW;
    }
    return end;
}

int worth_tokens(const struct worth_input *input) {
    return worth_undivided_end(input, 0, input->count - input->count % WORTH_WINDOW);
}

/* Gives the step the part of `from` that lies in its rows, those from position `pos` on. */
static void give_part(struct kern_batch *batch, struct kern_given *given, int pos,
                      const struct kern_given *from, int width) {
    const int first = from->row > pos ? from->row : pos;
    const int past = from->row + from->count, end = pos + batch->rows;
    const int last = past < end ? past : end;
    if (first >= last) return;
    struct kern_given *part = &given[batch->given_count++];
    *part = *from;
    part->row = first - pos;
    part->count = last - first;
    part->rows += (size_t)(first - from->row) * (size_t)(1 + from->deep) * (size_t)width;
}

/* No row wants logits, so that the last layer ends with attention. `given` has room for the
 * input's. */
static int worth_step(struct worth *w, const struct worth_input *input, int pos, int rows,
                      struct kern_given *given) {
    const struct kern_span span = {.count = rows, .pos = pos};
    struct kern_batch batch = {.tokens = input->tokens + pos,
                               .spans = &span,
                               .rows = rows,
                               .span_count = 1,
                               .given = given,
                               .places = input->places ? input->places + pos : NULL};
    const float *logits;
    for (int g = 0; g < input->given_count; g++)
        give_part(&batch, given, pos, &input->given[g], w->model->config.d_model);
    w->batch = &batch;
    w->rc = 0;
    w->model->watch = watch_layer;
    w->model->watch_arg = w;
    int rc = model_step(w->model, &batch, NULL, 0, &logits);
    if (!rc) rc = w->kern->ops->sync(w->kern);
    w->model->watch = NULL;
    return rc ? rc : w->rc;
}

static int worth_read_text(struct worth *w, const struct worth_input *input, int count,
                           struct kern_given *given) {
    int rc = 0;
    for (int pos = 0, end; pos < count && !rc; pos = end) {
        end = count - pos < w->options.rows ? count : pos + w->options.rows;
        end = worth_undivided_end(input, pos, end);
        rc = end > pos ? worth_step(w, input, pos, end - pos, given) : ERR_INVALID;
    }
    w->kern->ops->release(w->kern, 0);
    return rc;
}

int worth_measure(struct worth *w, const struct worth_input *input, uint64_t seed,
                  struct worth_text *out, struct fault *fault) {
    struct worth_input read = *input;
    if (read.count > w->options.tokens) read.count = w->options.tokens;
    const int count = worth_tokens(&read);
    if (count < 2 * WORTH_WINDOW)
        return fault_set(fault, ERR_INVALID, "text", "has less than %d tokens", 2 * WORTH_WINDOW);
    struct kern_given *given = mem_try_alloc((size_t)read.given_count + 1, sizeof *given);
    *out = (struct worth_text){0};
    int rc = given ? worth_open_text(w, count, out) : ERR_NOMEM;
    if (!rc) {
        draw_entries(out, seed);
        w->text = out;
        rc = worth_read_text(w, &read, count, given);
    }
    mem_free(given);
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
    cache.rows_max = w->options.rows;
    cache.vocab = 0; /* nothing is sampled */
    return w->kern->ops->cache_open(w->kern, &cache, fault);
}

static int worth_open_arrays(struct worth *w, struct fault *fault) {
    const struct model_config *c = &w->model->config;
    const size_t width = (size_t)c->d_model, rows = (size_t)w->options.rows;
    const size_t bytes = rows * width * sizeof(float), windows = rows / WORTH_WINDOW;
    w->rows = mem_try_alloc(width, rows * sizeof *w->rows);
    w->added = mem_try_alloc(width, rows * sizeof *w->added);
    w->factors = mem_try_alloc(rows, sizeof *w->factors);
    w->out =
        mem_try_alloc(windows * (size_t)c->heads_kv, (size_t)w->options.entries * sizeof *w->out);
    w->branch = w->kern->ops->mem_alloc(w->kern, bytes);
    if (c->post_norms) w->normed = w->kern->ops->mem_alloc(w->kern, bytes);
    if (w->rows && w->added && w->factors && w->out && w->branch && (!c->post_norms || w->normed))
        return 0;
    return fault_set(fault, ERR_NOMEM, "", "no memory for activations of %d tokens",
                     w->options.rows);
}

int worth_open(struct kern *kern, struct model *model, const struct worth_options *options,
               struct worth **out, struct fault *fault) {
    CHECK(options->tokens > 0 && options->entries > 0 && options->rows % WORTH_WINDOW == 0 &&
          model->rows_max >= options->rows);
    if (!kern->ops->worth)
        return fault_set(fault, ERR_UNSUPPORTED, "device",
                         "the %s backend does not measure what entries are worth; use device cpu",
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
