/* Opens, describes and closes a model. Where the backend can share weights, a further replica
 * borrows those of the first; activations are always its own, allocated once for the largest step.
 */
#include "model/model.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "model/config_gguf.h"
#include "model/config_quant.h"
#include "model/internal.h"

#define CONFIG_FILE_MAX ((size_t)16 << 20)

/* ---- Opening ---- */

static int load_config(struct model_config *out, const char *dir, int context,
                       struct fault *fault) {
    char path[PATH_MAX], *config = NULL, *generation = NULL;
    size_t config_size = 0, generation_size = 0;
    int n = snprintf(path, sizeof path, "%s/generation_config.json", dir);
    if (n < 0 || (size_t)n >= sizeof path)
        return fault_set(fault, ERR_INVALID, "model", "directory name is too long");
    int rc = 0;
    if (access(path, F_OK) == 0)
        rc = file_read(path, CONFIG_FILE_MAX, &generation, &generation_size, fault);
    snprintf(path, sizeof path, "%s/config.json", dir);
    if (!rc) rc = file_read(path, CONFIG_FILE_MAX, &config, &config_size, fault);
    if (!rc)
        rc = model_config_parse(config, config_size, generation, generation_size, context, out,
                                fault);
    mem_free(config);
    mem_free(generation);
    return rc;
}

/* Reads hf_quant_config.json: modelopt's older directories say nothing in config.json and
 * everything in this file. */
static int load_quantization(struct model_config *config, const char *dir, struct fault *fault) {
    static const char name[] = "hf_quant_config.json";
    static const struct json_limits limits = {
        .bytes = CONFIG_FILE_MAX, .depth = 64, .nodes = 100000, .file = true};
    char path[PATH_MAX], *text = NULL;
    size_t size = 0;
    struct fault inner = {0};
    cJSON *root = NULL, *outer = NULL;
    const int n = snprintf(path, sizeof path, "%s/%s", dir, name);
    if (n < 0 || (size_t)n >= sizeof path || access(path, F_OK) != 0 ||
        config->packing.kind != PACKING_NONE)
        return 0;
    int rc = file_read(path, CONFIG_FILE_MAX, &text, &size, &inner);
    if (!rc) rc = json_parse(text, size, &limits, &root, &inner);
    outer = cJSON_CreateObject();
    if (!rc && (!outer || !cJSON_AddItemReferenceToObject(outer, "quantization_config", root)))
        rc = fault_set(&inner, ERR_NOMEM, NULL, "not enough memory");
    if (!rc) rc = model_config_read_quantization(outer, false, &config->packing, &inner);
    if (rc)
        fault_set(fault, rc, name, "%s%s%s", inner.field, inner.field[0] ? ": " : "", inner.text);
    cJSON_Delete(outer);
    json_free(root);
    mem_free(text);
    return rc;
}

/* Returns the least number of KV heads of a layer if layers differ in it; else 0. */
static int least_heads(const struct model_config *c) {
    int least = c->heads_kv;
    for (int i = 0; i < c->cache_layers && c->heads; i++)
        least = c->heads[i].kv < least ? c->heads[i].kv : least;
    return least < c->heads_kv ? least : 0;
}

static int check_shape(const struct model *model, struct fault *fault) {
    const struct model_config *c = &model->config;
    const struct kern_shape shape = {.layers = c->layers,
                                     .d_model = c->d_model,
                                     .d_ff = dense_width(c),
                                     .heads_q = c->heads_q,
                                     .heads_kv = c->heads_kv,
                                     .head_dim = c->head_dim,
                                     .heads_kv_least = least_heads(c),
                                     .vocab = c->vocab,
                                     .experts = c->experts,
                                     .expert_ff = c->expert_ff,
                                     .shared_ff = c->shared_ff,
                                     .conv_channels = c->lfm2_names ? c->d_model : 0,
                                     .delta_heads = c->delta.heads_k,
                                     .mamba_heads = c->mamba.heads};
    const struct kern_ops *ops = model->kern->ops;
    const bool computed = c->mamba.heads     ? ops->mamba != NULL
                          : c->delta.heads_k ? ops->delta != NULL
                                             : ops->short_conv != NULL;
    if (c->state_layers && !computed)
        return fault_set(fault, ERR_UNSUPPORTED, "model",
                         "%s models have layers with a recurrent state, which the %s backend does "
                         "not compute: serve it with --device cpu",
                         c->family, ops->name);
    if (c->latent.rank && !(ops->latent_in && ops->latent_out))
        return fault_set(fault, ERR_UNSUPPORTED, "model",
                         "%s models have latent attention, which the %s backend does not compute: "
                         "serve it with --device cpu",
                         c->family, ops->name);
    if ((c->embeds_each || c->layer_scales) && !(ops->glu_apart && ops->scale))
        return fault_set(
            fault, ERR_UNSUPPORTED, "model",
            "%s models have embeddings for each layer, or factors of layers, which the "
            "%s backend does not compute: serve it with --device cpu",
            c->family, ops->name);
    if ((c->both_ways && !ops->both_ways) || (c->layer_norms && !(ops->layer_norm && ops->add)))
        return fault_set(fault, ERR_UNSUPPORTED, "model",
                         "%s models read texts both ways, which the %s backend does not compute: "
                         "serve it with --device cpu",
                         c->family, ops->name);
    if (c->ungated && !ops->glu_apart)
        return fault_set(fault, ERR_UNSUPPORTED, "model",
                         "%s models have networks without gates, which the %s backend does not "
                         "compute: serve it with --device cpu",
                         c->family, ops->name);
    return ops->shape_check ? ops->shape_check(model->kern, &shape, fault) : 0;
}

static int widest_layer(const struct model_config *c,
                        int (*width)(const struct model_config *c, int layer)) {
    int widest = 0;
    for (int i = 0; i < c->layers; i++)
        if (width(c, i) > widest) widest = width(c, i);
    return widest;
}

/* The widest vector between a text's pooled hidden states and its own; 0: they are the same. */
static int ending_width(const struct model_config *c) {
    const struct model_ending ending = model_ending(c);
    int widest = ending.count ? c->d_model : 0;
    for (int i = 0; i < ending.count; i++)
        if (ending.width[i] > widest) widest = ending.width[i];
    return widest;
}

/* With `check_only` counts the memory alone. */
static int open_scratch(struct model *model, bool check_only, struct fault *fault) {
    const struct model_config *c = &model->config;
    struct scratch *s = &model->scratch;
    int ff = dense_width(c) > c->shared_ff ? dense_width(c) : c->shared_ff;
    if (c->each_embed > ff) ff = c->each_embed;
    const int heads = widest_layer(c, heads_width), mixed = widest_layer(c, mixed_width);
    const int states = widest_layer(c, state_width), rates = widest_layer(c, rates_width);
    int in = widest_layer(c, attend_width);
    int gates = c->attn_gate ? c->heads_q * c->head_dim : c->shared_gate;
    in = states > in ? states : in;
    gates = rates > gates ? rates : gates;
    int latent = c->latent.rank;
    if (latent) {
        gates = gates > c->q_rank ? gates : c->q_rank;
        gates = gates > c->head_dim ? gates : c->head_dim;
        latent = latent > latent_query_dim(c) ? latent : latent_query_dim(c);
    }
    const int ended = ending_width(c);
    const struct {
        float **out;
        int rows, width;
    } arrays[] = {
        {&s->pooled, 1, ended},
        {&s->ended, 1, ended},
        {&s->x, model->rows_max, c->d_model},
        {&s->norm, model->rows_max, c->d_model},
        {&s->qkv, model->rows_max, in},
        {&s->heads, model->rows_max, heads},
        {&s->mixed, model->rows_max, mixed},
        {&s->gates, model->rows_max, gates},
        {&s->gate_up, model->rows_max, 2 * ff},
        {&s->ff, model->rows_max, ff},
        {&s->beside, 2 * model->rows_max, c->gemma4_experts ? c->d_model : c->expert_latent},
        {&s->router, model->rows_max, c->experts},
        {&s->latent, model->rows_max, c->heads_q * latent},
        {&s->each, model->rows_max, c->layers * c->each_embed},
        {&s->each_in, model->rows_max, c->layers * c->each_embed},
        {&s->last_each, model->logits_max, c->layers * c->each_embed},
        {&s->log_beta, model->rows_max, c->heads_kv},
        {&s->last_x, model->logits_max, c->d_model},
        {&s->last_heads, model->logits_max, heads},
        {&s->last_mixed, model->logits_max, mixed},
        {&s->logits, model->logits_max, c->both_ways ? 0 : c->vocab},
        {&s->pairs, model->block_of ? 2 * model->rows_max : 0, c->d_model},
        {&s->joined, model->block_of ? 2 * model->rows_max : 0, c->d_model},
    };
    s->rows = mem_must_alloc((size_t)model->rows_max, sizeof *s->rows);
    if (ended) s->between = mem_must_alloc((size_t)ended, sizeof *s->between);
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) {
        size_t bytes = (size_t)arrays[i].rows * (size_t)arrays[i].width * sizeof(float);
        model->step_bytes += bytes;
        if (!bytes || check_only) continue;
        *arrays[i].out = model->kern->ops->mem_alloc(model->kern, bytes);
        if (!*arrays[i].out)
            return fault_set(fault, ERR_NOMEM, "max-num-batched-tokens",
                             "no memory for activations of %d tokens", model->rows_max);
    }
    return 0;
}

/* Takes memory for inputs of a state, or counts it alone. */
static int open_inputs(struct model *model, int width, float **out, bool check_only,
                       struct fault *fault) {
    const size_t bytes = (size_t)model->peek_rows * (size_t)width * sizeof(float);
    model->step_bytes += bytes;
    if (!bytes || check_only) return 0;
    *out = model->kern->ops->mem_alloc(model->kern, bytes);
    return *out ? 0
                : fault_set(fault, ERR_NOMEM, "speculate",
                            "no memory for the states' inputs of %d tokens", model->peek_rows);
}

static int open_peeked(struct model *model, bool check_only, struct fault *fault) {
    const struct model_config *c = &model->config;
    struct peeked *peeked = &model->peeked;
    const size_t layers = (size_t)c->state_layers;
    int rc = 0;
    if (model->peek_rows == 0) return 0;
    peeked->rows = mem_must_alloc((size_t)model->peek_rows, sizeof *peeked->rows);
    peeked->in = mem_must_alloc(layers, sizeof *peeked->in);
    peeked->rates = mem_must_alloc(layers, sizeof *peeked->rates);
    for (int i = 0; i < c->layers && !rc; i++) {
        const int state = c->per_layer[i].state;
        if (state < 0) continue;
        rc = open_inputs(model, state_width(c, i), &peeked->in[state], check_only, fault);
        if (!rc)
            rc = open_inputs(model, rates_width(c, i), &peeked->rates[state], check_only, fault);
    }
    return rc;
}

static void close_peeked(struct model *model) {
    struct kern *kern = model->kern;
    struct peeked *peeked = &model->peeked;
    for (int i = 0; peeked->rates && i < model->config.state_layers; i++) {
        if (peeked->in[i]) kern->ops->mem_free(kern, peeked->in[i]);
        if (peeked->rates[i]) kern->ops->mem_free(kern, peeked->rates[i]);
    }
    mem_free(peeked->rows);
    mem_free(peeked->in);
    mem_free(peeked->rates);
}

/* Finds whether the files have one tensor for all experts, as those of Qwen3.5 do; files in fewer
 * bits may have one for each. */
static void find_stacked(struct model_config *config, const struct weights *weights) {
    char name[TENSOR_NAME_MAX];
    config->stacked_experts = false;
    for (int i = 0; i < config->layers; i++) {
        tensor_name(name, NAMING_HF_QWEN35_STACKED, ROLE_EXPERT_DOWN, i, 0);
        if (weights_find(weights, name)) config->stacked_experts = true;
    }
}

/* A classifier's own products take the place of Dense modules. */
static void leave_dense_out(struct model_config *config) {
    if (config->classifies) memset(config->pooling.dense, 0, sizeof config->pooling.dense);
}

/* Without the files of its Dense modules a model makes no vectors. */
static int take_dense(struct weights *weights, const char *path, struct pooling *pooling,
                      struct fault *fault) {
    for (int i = 0; i < POOLING_DENSE_MAX && pooling->dense[i].there; i++) {
        int rc = weights_add_dense(weights, path, pooling->dense[i].folder, i, fault);
        if (rc && rc != ERR_NOTFOUND) return rc;
        if (rc == 0) continue;
        snprintf(pooling->other, sizeof pooling->other, "%s/model.safetensors, which is missing",
                 pooling->dense[i].folder);
        memset(pooling->dense, 0, sizeof pooling->dense);
    }
    return 0;
}

int model_read(const char *path, int context, bool random, struct model_config *config,
               struct weights **weights, struct fault *fault) {
    *weights = NULL;
    if (!gguf_is_path(path)) {
        int rc = load_config(config, path, context, fault);
        if (!rc) rc = load_quantization(config, path, fault);
        if (!rc) rc = pooling_of_directory(path, &config->pooling, fault);
        leave_dense_out(config);
        const int most = config->pooling.tokens_max;
        if (!rc && config->both_ways && most > 0 && most < config->max_positions)
            config->max_positions = most; /* longer texts were not seen in training */
        if (!rc && !random) rc = weights_open(path, weights, fault);
        if (rc || random) return rc;
        rc = weights_take_text(*weights, fault);
        if (!rc) rc = take_dense(*weights, path, &config->pooling, fault);
        if (!rc) rc = weights_join(*weights, &config->packing, fault);
        if (!rc && config->stacked_experts && config->qwen35_names) find_stacked(config, *weights);
        if (!rc && config->stacked_experts) {
            weights_turn(*weights, ".experts.gate_up_proj", config->d_model);
            weights_turn(*weights, ".experts.down_proj", config->expert_ff);
        }
        return rc;
    }
    if (random)
        return fault_set(fault, ERR_UNSUPPORTED, "model",
                         "random weights need a directory with config.json");
    int rc = weights_open(path, weights, fault);
    if (!rc) rc = model_config_from_gguf(*weights, context, config, fault);
    if (!rc) rc = pooling_of_gguf(weights_gguf(*weights), &config->pooling, fault);
    leave_dense_out(config);
    if (!rc && config->both_ways && !config->layer_norms && !config->pooling.dense[0].there)
        log_warn("the file has no dense_2.weight: vectors are the pooled outputs of the last "
                 "layer, without the products that the model's own directory has behind them");
    return rc;
}

/* Returns the memory of weights that were only checked. A model's count has all tensors of its
 * files, those of a block, too. */
static size_t count_weights(const struct model *model, const struct weights *weights,
                            enum quantization quantization) {
    if (model->block_of) return 0;
    return weights ? model_loaded_bytes(weights, quantization)
                   : (size_t)model_count_numbers(&model->config).all * sizeof(uint16_t);
}

static int load_all(struct model *model, const struct model_options *options, struct fault *fault) {
    struct weights *weights = NULL;
    int rc = model_read(options->dir, options->context, options->random_weights, &model->config,
                        &weights, fault);
    if (!rc && model->block_of && model->kern->ops->borrow(model->kern, model->block_of->kern))
        rc = fault_set(fault, ERR_NOMEM, "model", "no memory for a block's products");
    if (!rc && model->block_of)
        rc = model_take_block(&model->config, weights, &model->block_layer, fault);
    else if (!rc)
        model->has_block = model_find_block(&model->config, weights);
    if (!rc) rc = check_shape(model, fault);
    if (!rc) model->layers = mem_must_alloc((size_t)model->config.layers, sizeof *model->layers);
    if (!rc) rc = model_load_weights(model, options, weights, fault);
    if (!rc && !model->block_of) rc = model_load_gates(model, options, weights, fault);
    if (!rc && options->check_only)
        model->weight_bytes = count_weights(model, weights, options->quantization);
    weights_close(weights);
    return rc;
}

static int borrow_all(struct model *model, const struct model *owner, struct fault *fault) {
    struct kern *kern = model->kern;
    int rc = kern->ops->borrow(kern, owner->kern);
    if (rc) return fault_set(fault, rc, "model", "its weights cannot be shared");
    *model = *owner;
    model->kern = kern;
    model->borrowed = true;
    model->scratch = (struct scratch){0};
    model->step_bytes = 0;
    model->peeked = (struct peeked){0};
    model->adapted = (struct adapted){0};
    model->block_order = NULL;
    return 0;
}

int model_open(struct kern *kern, const struct model_options *options, struct model **out,
               struct fault *fault) {
    CHECK(options->rows_max > 0 && options->logits_max > 0);
    *out = NULL;
    struct model *model = mem_must_alloc(1, sizeof *model);
    model->kern = kern;
    model->gates = gates_header_unknown;
    model->block_of = options->block_of;
    bool borrow = options->owner && kern->ops->borrow;
    int rc = borrow ? borrow_all(model, options->owner, fault) : load_all(model, options, fault);
    model->rows_max = options->rows_max;
    model->logits_max = options->logits_max;
    model->peek_rows = model->config.state_layers && kern->ops->peeks ? options->peek_rows : 0;
    if (!rc) rc = open_scratch(model, options->check_only, fault);
    if (!rc) rc = open_peeked(model, options->check_only, fault);
    if (!rc && options->adapts) rc = model_open_adapted(model, options->check_only, fault);
    if (!rc && model->block_of)
        model->block_order = mem_must_alloc(2 * (size_t)model->rows_max, sizeof(int32_t));
    if (rc)
        model_close(model);
    else
        *out = model;
    return rc;
}

static void close_weight(struct kern *kern, struct kern_weight *weight) {
    if (weight) kern->ops->weight_free(kern, weight);
}

/* Frees what was loaded into a slot of the model or of a layer. Several slots may name one member.
 */
static void close_slot(const struct model *model, void *owner, const struct slot *slot) {
    struct kern *kern = model->kern;
    void *member = (char *)owner + slot->offset;
    if (!slot->matrix) {
        float **vector = member;
        if (*vector) kern->ops->mem_free(kern, *vector);
        *vector = NULL;
    } else if (slot->experts || slot->heads) {
        struct kern_weight ***each = member;
        const int count = slot->experts ? model->config.experts : model->config.heads_q;
        for (int i = 0; *each && i < count; i++) close_weight(kern, (*each)[i]);
        mem_free(*each);
        *each = NULL;
    } else {
        struct kern_weight **weight = member;
        close_weight(kern, *weight);
        *weight = NULL;
    }
}

static void close_layer(const struct model *model, struct layer *layer) {
    struct kern *kern = model->kern;
    if (layer->experts) kern->ops->experts_free(kern, layer->experts);
    if (layer->gate) kern->ops->gate_free(kern, layer->gate);
    for (size_t i = 0; i < layer_slot_count; i++) close_slot(model, layer, &layer_slots[i]);
}

static void close_weights(struct model *model) {
    for (int i = 0; model->layers && i < model->config.layers; i++)
        close_layer(model, &model->layers[i]);
    if (model->block_of) model->embed = model->head = NULL;
    if (model->head == model->embed) model->head = NULL;
    for (size_t i = 0; i < end_slot_count; i++) close_slot(model, model, &end_slots[i]);
    close_slot(model, model, &slot_head);
    for (int i = 0; i < SLOT_BLOCK_COUNT; i++) close_slot(model, model, &slot_block[i]);
    mem_free(model->layers);
    model_config_close(&model->config);
}

void model_close(struct model *model) {
    if (!model) return;
    struct kern *kern = model->kern;
    const struct scratch *s = &model->scratch;
    float *arrays[] = {s->gates,  s->x,          s->norm,     s->qkv,     s->heads,      s->gate_up,
                       s->ff,     s->router,     s->log_beta, s->last_x,  s->last_heads, s->logits,
                       s->mixed,  s->last_mixed, s->each,     s->each_in, s->last_each,  s->latent,
                       s->beside, s->pairs,      s->joined,   s->pooled,  s->ended};
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) {
        if (arrays[i]) kern->ops->mem_free(kern, arrays[i]);
    }
    mem_free(s->rows);
    mem_free(s->between);
    close_peeked(model);
    model_close_adapted(model);
    mem_free(model->block_order);
    if (!model->borrowed) close_weights(model);
    mem_free(model);
}

/* ---- Facts ---- */

const struct model_config *model_config(const struct model *model) {
    return &model->config;
}
bool model_has_block(const struct model *model) {
    return model->has_block;
}
const float *model_wanted_hidden(const struct model *model) {
    return model->scratch.norm;
}
bool model_has_gates(const struct model *model) {
    return model->gates_from != GATES_NONE;
}
enum gates_from model_gates_from(const struct model *model) {
    return model->gates_from;
}
const char *model_gates_path(const struct model *model) {
    return model->gates_path;
}
const char *model_gates_cached(const struct model *model) {
    return model->gates_cached;
}
const struct gates_header *model_gates(const struct model *model) {
    return &model->gates;
}
size_t model_weight_bytes(const struct model *model) {
    return model->weight_bytes;
}
size_t model_step_bytes(const struct model *model) {
    return model->step_bytes;
}
