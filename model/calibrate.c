#include "model/calibrate.h"

#include "base/log.h"
#include "base/mem.h"
#include "base/splitmix.h"
#include "kernels/cpu/cpu.h"
#include "kernels/moments.h"
#include "model/internal.h"
#include "model/rounding.h"

#define SEQUENCE 256 /* tokens that are computed together, as one text */
#define TEXTS    16  /* texts that the model writes together */
#define SEED     0x63616c6962ull

/* The products of a dense layer that are measured, each by the role of its first part. */
static const enum role measured[] = {ROLE_Q, ROLE_O, ROLE_GATE, ROLE_UP, ROLE_DOWN};
#define PRODUCTS (sizeof measured / sizeof measured[0])

struct calibration {
    struct cpu_team *team; /* borrowed */
    int layers;
    float *(*moments)[PRODUCTS]; /* [layers] squares, later factors; NULL: not measured */
    int64_t (*cols)[PRODUCTS];   /* [layers] number of inputs of each product */
    struct kern *kern;           /* while the tokens are computed */
    float *rows;                 /* [SEQUENCE][largest cols], inputs downloaded from the backend */
    int rc;                      /* the first error */
};

static size_t product_of(enum role role) {
    size_t i = 0;
    while (i < PRODUCTS && measured[i] != role) i++;
    return i;
}

static void see(void *arg, int layer, enum role role, const float *inputs, int rows) {
    struct calibration *c = arg;
    const size_t product = product_of(role);
    float *moments = product < PRODUCTS ? c->moments[layer][product] : NULL;
    if (!moments || c->rc) return;
    const int64_t cols = c->cols[layer][product];
    c->rc = c->kern->ops->download(c->kern, c->rows, inputs,
                                   (size_t)rows * (size_t)cols * sizeof *c->rows);
    if (!c->rc) moments_add(moments, cols, c->rows, rows, c->team);
}

/* ---- Room ---- */

static bool open_product(struct calibration *c, const struct model_config *config, int layer,
                         const struct slot *slot, enum quantization wanted) {
    const size_t product = product_of(slot->parts[0]);
    if (product == PRODUCTS || !slot_wanted(slot, config, layer) ||
        rounding_format(config, slot, layer, wanted) != QUANTIZE_Q4 ||
        c->cols[layer][product] % KERN_BLOCK)
        return true;
    float *room = mem_try_alloc(moments_bytes(c->cols[layer][product]), 1);
    c->moments[layer][product] = room;
    return room != NULL;
}

static int open_room(struct calibration *c, const struct model_config *config,
                     enum quantization wanted, struct fault *fault) {
    int64_t widest = 0, rows;
    c->layers = config->layers;
    c->cols = mem_try_alloc((size_t)config->layers, sizeof *c->cols);
    for (int l = 0; l < config->layers && c->cols; l++)
        for (size_t i = 0; i < PRODUCTS; i++) {
            tensor_shape(config, measured[i], l, &rows, &c->cols[l][i]);
            if (c->cols[l][i] > widest) widest = c->cols[l][i];
        }
    c->rows = mem_try_alloc((size_t)widest, SEQUENCE * sizeof *c->rows);
    c->moments = mem_try_alloc((size_t)config->layers, sizeof *c->moments);
    bool enough = c->cols && c->rows && c->moments;
    for (int l = 0; l < config->layers && enough; l++)
        for (size_t i = 0; i < layer_slot_count && enough; i++)
            enough = open_product(c, config, l, &layer_slots[i], wanted);
    if (enough) return 0;
    return fault_set(fault, ERR_NOMEM, "quantize-calibrate", "no memory for what is measured");
}

static int open_cache(struct kern *kern, const struct model_config *config, struct fault *fault) {
    struct kern_cache_info info;
    struct kern_cache_options cache = model_cache_options(config);
    cache.dtype = KERN_F32;
    kern->ops->cache_info(&cache, &info);
    cache.pages = model_pages(config, &info, SEQUENCE) * TEXTS;
    cache.slots = TEXTS;
    cache.max_positions = SEQUENCE;
    return kern->ops->cache_open(kern, &cache, fault);
}

/* ---- Tokens ---- */

static int32_t random_token(uint64_t *random, int vocab) {
    return (int32_t)(splitmix_next(random) % (uint64_t)vocab);
}

static int fail(struct fault *fault, int rc) {
    return fault_set(fault, rc, "quantize-calibrate", "cannot compute the model's inputs");
}

static void draw_random(int32_t *tokens, uint64_t *random, int vocab) {
    for (int i = 0; i < SEQUENCE; i++) tokens[i] = random_token(random, vocab);
}

/* Appends to every text the token that is sampled from the model's own probabilities. */
static int write_token(struct calibration *c, struct model *model, int32_t (*texts)[SEQUENCE],
                       int pos) {
    int32_t tokens[TEXTS], want[TEXTS];
    struct kern_span spans[TEXTS];
    struct kern_sample params[TEXTS];
    struct kern_sampled next[TEXTS];
    const struct kern_batch batch = {
        .tokens = tokens, .spans = spans, .rows = TEXTS, .span_count = TEXTS};
    const float *logits;
    for (int i = 0; i < TEXTS; i++) {
        tokens[i] = texts[i][pos];
        want[i] = i;
        spans[i] = (struct kern_span){.slot = i, .row = i, .count = 1, .pos = pos};
        params[i] = (struct kern_sample){.temperature = 1,
                                         .top_p = 1,
                                         .repetition = 1,
                                         .seed = SEED + (uint64_t)i,
                                         .position = pos + 1,
                                         .top_count = -1,
                                         .forced = -1};
    }
    int rc = model_step(model, &batch, want, TEXTS, &logits);
    if (!rc) rc = c->kern->ops->sample(c->kern, logits, TEXTS, model->config.vocab, params, next);
    for (int i = 0; i < TEXTS && !rc; i++) texts[i][pos + 1] = next[i].token;
    return rc;
}

/* Lets the model write texts. Each begins with the model's first token or, if it has none, with a
 * random one. */
static int write_texts(struct calibration *c, struct model *model, int32_t (*texts)[SEQUENCE],
                       uint64_t *random) {
    const int32_t bos = model->config.bos;
    int rc = 0;
    for (int i = 0; i < TEXTS; i++)
        texts[i][0] = bos >= 0 ? bos : random_token(random, model->config.vocab);
    for (int pos = 0; pos + 1 < SEQUENCE && !rc; pos++) rc = write_token(c, model, texts, pos);
    for (int i = 0; i < TEXTS; i++) c->kern->ops->release(c->kern, i);
    return rc;
}

/* Computes a text and measures the inputs. All rows want logits, so that the last layer computes
 * all of them, too. */
static int compute_text(struct calibration *c, struct model *model, const int32_t *tokens) {
    int32_t want[SEQUENCE];
    const struct kern_span span = {.count = SEQUENCE};
    const struct kern_batch batch = {
        .tokens = tokens, .spans = &span, .rows = SEQUENCE, .span_count = 1};
    const float *logits;
    for (int i = 0; i < SEQUENCE; i++) want[i] = i;
    model->watch = see;
    model->watch_arg = c;
    int rc = model_step(model, &batch, want, SEQUENCE, &logits);
    if (!rc) rc = c->kern->ops->sync(c->kern);
    model->watch = NULL;
    c->kern->ops->release(c->kern, 0);
    return rc ? rc : c->rc;
}

static int compute(struct calibration *c, struct model *model, int tokens, struct fault *fault) {
    const int count = (tokens + SEQUENCE - 1) / SEQUENCE;
    int32_t texts[TEXTS][SEQUENCE], drawn[SEQUENCE];
    uint64_t random = SEED;
    int rc = 0;
    for (int i = 0; i < count && !rc; i++) {
        if (i % TEXTS == 0) rc = write_texts(c, model, texts, &random);
        if (!rc) rc = compute_text(c, model, texts[i % TEXTS]);
        draw_random(drawn, &random, model->config.vocab);
        if (!rc) rc = compute_text(c, model, drawn);
    }
    for (int l = 0; l < c->layers && !rc; l++)
        for (size_t i = 0; i < PRODUCTS; i++)
            if (c->moments[l][i]) moments_factor(c->moments[l][i], c->cols[l][i], c->team);
    return rc ? fail(fault, rc) : 0;
}

/* ---- The whole ---- */

static int measure(struct calibration *c, const struct model_options *options, int tokens,
                   struct fault *fault) {
    struct model_options exact = *options;
    struct model *model = NULL;
    const struct cpu_options cpu = {.activations = CPU_INT16, .threads = options->threads};
    exact.quantization = QUANTIZE_NONE;
    exact.gates = "";
    exact.rows_max = exact.logits_max = SEQUENCE;
    exact.progress = NULL;
    log_info("calibrating with %d tokens that the model writes, and as many random ones", tokens);
    int rc = cpu_open(&cpu, &c->kern, fault);
    if (!rc) rc = model_open(c->kern, &exact, &model, fault);
    if (!rc) rc = open_cache(c->kern, &model->config, fault);
    if (!rc) rc = open_room(c, &model->config, options->quantization, fault);
    if (!rc) rc = compute(c, model, tokens, fault);
    model_close(model);
    if (c->kern) c->kern->ops->close(c->kern);
    c->kern = NULL;
    mem_free(c->rows);
    c->rows = NULL;
    return rc;
}

int calibration_open(const struct model_options *options, int tokens, struct cpu_team *team,
                     struct calibration **out, struct fault *fault) {
    struct calibration *c = mem_must_alloc(1, sizeof *c);
    c->team = team;
    int rc = measure(c, options, tokens, fault);
    if (rc)
        calibration_close(c);
    else
        *out = c;
    return rc;
}

void calibration_close(struct calibration *c) {
    if (!c) return;
    for (int l = 0; c->moments && l < c->layers; l++)
        for (size_t i = 0; i < PRODUCTS; i++) mem_free(c->moments[l][i]);
    mem_free(c->moments);
    mem_free(c->cols);
    mem_free(c->rows);
    mem_free(c);
}

const float *calibration_factors(const struct calibration *c, const struct slot *slot, int layer) {
    const size_t product = product_of(slot->parts[0]);
    return c && layer >= 0 && product < PRODUCTS ? c->moments[layer][product] : NULL;
}
