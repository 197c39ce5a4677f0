#include "fit/net.h"

#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "fit/random.h"
#include "kernels/number.h"
#include "kernels/product.h"

/* The parts of a layer's numbers. */
struct net_parts {
    float *w1, *b1, *last, *c;
};

static struct net_parts net_parts_at(const struct fit_net *net, float *numbers, int layer) {
    struct net_parts p = {.w1 = numbers + (size_t)layer * net->each};
    p.b1 = p.w1 + (size_t)net->inputs * FIT_WIDTH;
    p.last = p.b1 + FIT_WIDTH;
    p.c = p.last + (size_t)net->heads * FIT_WIDTH;
    return p;
}

/* ---- Opening ---- */

static void net_draw_layer(struct fit_net *net, int layer, float bias, uint64_t *random) {
    const struct net_parts p = net_parts_at(net, net->values, layer);
    const float size = 1 / sqrtf((float)net->d_model);
    for (int i = 0; i < net->d_model * FIT_WIDTH; i++) p.w1[i] = size * fit_random_normal(random);
    for (int i = 0; i < net->heads * FIT_WIDTH; i++) p.last[i] = 0.02f * fit_random_normal(random);
    for (int h = 0; h < net->heads; h++) p.c[h] = bias;
    net->scale[layer] = 1;
}

int fit_net_open(struct fit_net *net, int layers, int heads, int d_model, float bias,
                 uint64_t seed) {
    const int inputs = fit_net_rows(d_model);
    *net = (struct fit_net){.layers = layers, .heads = heads, .d_model = d_model, .inputs = inputs};
    net->each = (size_t)(inputs + 1 + heads) * FIT_WIDTH + (size_t)heads;
    float **const arrays[] = {&net->values, &net->slopes, &net->mean, &net->square};
    net->scale = mem_try_alloc((size_t)layers, sizeof *net->scale);
    bool enough = net->scale != NULL;
    for (int i = 0; i < 4 && enough; i++) {
        *arrays[i] = mem_try_alloc((size_t)layers * net->each, sizeof(float));
        enough = *arrays[i] != NULL;
    }
    for (int l = 0; l < layers && enough; l++) net_draw_layer(net, l, bias, &seed);
    if (!enough) fit_net_close(net);
    return enough ? 0 : ERR_NOMEM;
}

void fit_net_close(struct fit_net *net) {
    mem_free(net->values);
    mem_free(net->slopes);
    mem_free(net->mean);
    mem_free(net->square);
    mem_free(net->scale);
    *net = (struct fit_net){0};
}

static int net_heads(const struct fit_net *net, int layer) {
    return net->layer_heads ? net->layer_heads[layer] : net->heads;
}

/* ---- Forward ---- */

size_t fit_net_scratch(const struct fit_net *net, int entries) {
    return (size_t)fit_net_rows(entries) * (size_t)(net->inputs + FIT_WIDTH);
}

/* Inputs as floats, times the scale: to[entry][input]. */
static void net_widen(const struct fit_net *net, int layer, const uint16_t *x, int entries,
                      float *to) {
    const float scale = net->scale[layer];
    memset(to, 0, (size_t)fit_net_rows(entries) * (size_t)net->inputs * sizeof *to);
    for (int i = 0; i < entries; i++)
        for (int d = 0; d < net->d_model; d++)
            to[(size_t)i * (size_t)net->inputs + (size_t)d] =
                scale * number_from_bf16(x[(size_t)i * (size_t)net->d_model + (size_t)d]);
}

/* The same as to[input][entry]. 16 entries at a time fill a line of the processor's cache. */
static void net_widen_columns(const struct fit_net *net, int layer, const uint16_t *x, int entries,
                              float *to) {
    const float scale = net->scale[layer];
    const size_t rows = (size_t)fit_net_rows(entries), width = (size_t)net->d_model;
    memset(to, 0, rows * (size_t)net->inputs * sizeof *to);
    for (size_t first = 0; first < (size_t)entries; first += 16) {
        const size_t end = first + 16 < (size_t)entries ? first + 16 : (size_t)entries;
        for (size_t d = 0; d < width; d++)
            for (size_t i = first; i < end; i++)
                to[d * rows + i] = scale * number_from_bf16(x[i * width + d]);
    }
}

static float net_sigmoid(float z) {
    return 1 / (1 + expf(-z));
}

static float net_rate(float z) {
    return z > 15 ? -z : logf(z < -15 ? -z : log1pf(expf(-z)));
}

/* The derivative of net_rate. */
static float net_rate_slope(float z) {
    return z > 15 ? -1 : z < -15 ? 1 / z : -net_sigmoid(-z) / log1pf(expf(-z));
}

static float net_score(const struct net_parts *p, int head, const float *hidden) {
    const float *last = p->last + (size_t)head * FIT_WIDTH;
    float z = 0;
    for (int m = 0; m < FIT_WIDTH; m++) z += last[m] * hidden[m];
    return z + p->c[head];
}

static void net_silu(const float *hidden, float *to) {
    for (int m = 0; m < FIT_WIDTH; m++) to[m] = hidden[m] * net_sigmoid(hidden[m]);
}

void fit_net_rates(const struct fit_net *net, int layer, const uint16_t *x, int entries,
                   float *scratch, float *hidden, float *rates) {
    const struct net_parts p = net_parts_at(net, net->values, layer);
    const int rows = fit_net_rows(entries);
    const struct product product = {hidden, scratch, p.w1, FIT_WIDTH, rows, FIT_WIDTH};
    float *active = scratch + (size_t)rows * (size_t)net->inputs;
    net_widen_columns(net, layer, x, entries, scratch);
    for (int i = 0; i < rows; i++)
        memcpy(hidden + (size_t)i * FIT_WIDTH, p.b1, FIT_WIDTH * sizeof *hidden);
    product_add(&product, rows, FIT_WIDTH, net->inputs);
    for (int i = 0; i < entries; i++) {
        net_silu(hidden + (size_t)i * FIT_WIDTH, active);
        for (int h = 0; h < net_heads(net, layer); h++)
            rates[(size_t)h * (size_t)entries + (size_t)i] = net_rate(net_score(&p, h, active));
    }
}

/* ---- Backward ---- */

/* One entry: the slopes of last and c, and of hidden -> to. */
static void net_learn_entry(const struct net_parts *p, const struct net_parts *slopes, int heads,
                            const float *hidden, const float *rate_slopes, int stride, float *to) {
    float active[FIT_WIDTH];
    net_silu(hidden, active);
    memset(to, 0, FIT_WIDTH * sizeof *to);
    for (int h = 0; h < heads; h++) {
        const float *last = p->last + (size_t)h * FIT_WIDTH;
        float *last_slopes = slopes->last + (size_t)h * FIT_WIDTH;
        const float by = rate_slopes[(size_t)h * (size_t)stride];
        const float slope = by * net_rate_slope(net_score(p, h, active));
        slopes->c[h] += slope;
        for (int m = 0; m < FIT_WIDTH; m++) {
            last_slopes[m] += slope * active[m];
            to[m] += slope * last[m];
        }
    }
    for (int m = 0; m < FIT_WIDTH; m++) {
        const float s = net_sigmoid(hidden[m]);
        to[m] *= s * (1 + hidden[m] * (1 - s));
        slopes->b1[m] += to[m];
    }
}

void fit_net_learn(struct fit_net *net, int layer, const uint16_t *x, int entries, float *scratch,
                   const float *hidden, const float *rate_slopes) {
    const struct net_parts p = net_parts_at(net, net->values, layer);
    const struct net_parts slopes = net_parts_at(net, net->slopes, layer);
    float *changes = scratch + (size_t)fit_net_rows(entries) * (size_t)net->inputs;
    net_widen(net, layer, x, entries, scratch);
    for (int i = 0; i < entries; i++)
        net_learn_entry(&p, &slopes, net_heads(net, layer), hidden + (size_t)i * FIT_WIDTH,
                        rate_slopes + i, entries, changes + (size_t)i * FIT_WIDTH);
    const struct product product = {slopes.w1, scratch, changes, FIT_WIDTH, net->inputs, FIT_WIDTH};
    product_add(&product, net->inputs, FIT_WIDTH, entries);
}

void fit_net_step(struct fit_net *net, int layer, float speed, int step) {
    const size_t first = (size_t)layer * net->each;
    const float part = 1 - (float)pow(0.9, step), part_square = 1 - (float)pow(0.98, step);
    for (size_t i = first; i < first + net->each; i++) {
        const float slope = net->slopes[i];
        net->mean[i] = 0.9f * net->mean[i] + 0.1f * slope;
        net->square[i] = 0.98f * net->square[i] + 0.02f * slope * slope;
        net->values[i] -=
            speed * (net->mean[i] / part) / (sqrtf(net->square[i] / part_square) + 1e-8f);
        net->slopes[i] = 0;
    }
}

void fit_net_numbers(const struct fit_net *net, int layer, float *w1, float *b1, float *last,
                     float *c) {
    const struct net_parts p = net_parts_at(net, net->values, layer);
    for (size_t m = 0; m < FIT_WIDTH; m++)
        for (size_t d = 0; d < (size_t)net->d_model; d++)
            w1[m * (size_t)net->d_model + d] = net->scale[layer] * p.w1[d * FIT_WIDTH + m];
    memcpy(b1, p.b1, FIT_WIDTH * sizeof *b1);
    memcpy(last, p.last, (size_t)net->heads * FIT_WIDTH * sizeof *last);
    memcpy(c, p.c, (size_t)net->heads * sizeof *c);
}
