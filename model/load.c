/* Loads weights into the backend, from files or from a generator. tensors.h says which tensors
 * there are. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/log.h"
#include "base/mem.h"
#include "model/loader.h"

/* ---- Vectors ---- */

/* Reads rows of `width` numbers each. */
static int read_floats(struct loader *loader, const char *name, const struct rows *rows,
                       int64_t width, float *out) {
    for (int64_t i = 0; i < rows->count; i++, out += width) {
        const int64_t from = (rows->first + rows_source(rows, i)) * width;
        CHECK(tensor_read_floats(rows->tensor, (size_t)from, (size_t)width, out));
        for (int64_t k = 0; k < width; k++)
            if (!isfinite(out[k])) return load_refuse_element(loader, name, from + k);
    }
    return 0;
}

/* Returns the length of the slot's vector, for one expert or for the layer. */
static int64_t vector_width(const struct loader *loader, const struct slot *slot, int layer) {
    int64_t rows, cols, width = 0;
    for (int i = 0; i < slot->count; i++) {
        tensor_shape(&loader->model->config, slot->parts[i], layer, &rows, &cols);
        width += cols ? rows * cols : rows;
    }
    return width;
}

/* Reads one part of the slot's vector into `host`, for every expert if the slot belongs to experts.
 */
static int read_part(struct loader *loader, int layer, const struct slot *slot, int part,
                     float *host, size_t *bytes) {
    const struct model_config *config = &loader->model->config;
    const int experts = slot->experts ? config->experts : 1;
    const enum role role = slot->parts[part];
    const struct tensor_rows place = tensor_rows_of(config, loader->naming, role, layer);
    const int64_t width = vector_width(loader, slot, layer);
    struct rows rows = {
        .place = &place, .order = load_order(loader, role), .head = config->head_dim};
    char name[TENSOR_NAME_MAX];
    int64_t cols;
    load_name(loader, role, layer, name);
    tensor_shape(config, role, layer, &rows.count, &cols);
    int rc = load_find_tensor(loader, name, slot->experts ? experts : 0, place.all, cols, false,
                              &rows.tensor);
    for (int e = 0; e < experts && !rc; e++) {
        rows.first = e * place.all + place.first;
        rc = read_floats(loader, name, &rows, cols ? cols : 1, host + e * width);
    }
    if (rc) return rc;
    const size_t read = rows.tensor->bytes / (size_t)place.all * (size_t)rows.count;
    loader->read += read;
    *bytes += read;
    return 0;
}

static int read_vector(struct loader *loader, int layer, const struct slot *slot, float *host,
                       size_t *bytes) {
    int rc = 0;
    for (int i = 0; i < slot->count && !rc; i++) {
        int64_t rows, cols;
        rc = read_part(loader, layer, slot, i, host, bytes);
        tensor_shape(&loader->model->config, slot->parts[i], layer, &rows, &cols);
        host += cols ? rows * cols : rows;
    }
    return rc;
}

/* Joins the slot's vectors and loads them as float32 into backend memory. */
static int load_vector(struct loader *loader, int layer, const struct slot *slot, float **out) {
    struct kern *kern = loader->model->kern;
    char name[TENSOR_NAME_MAX];
    size_t total = (size_t)vector_width(loader, slot, layer), bytes = 0;
    if (slot->experts) total *= (size_t)loader->model->config.experts;
    load_name(loader, slot->parts[0], layer, name);
    float *host = mem_try_alloc(total, sizeof *host);
    if (!host) return fault_set(loader->fault, ERR_NOMEM, name, "out of memory");
    const float fixed = slot_fixed(slot, &loader->model->config);
    const bool read = loader->weights && !(fixed > 0 && !weights_find(loader->weights, name));
    for (size_t i = 0; fixed > 0 && i < total; i++) host[i] = fixed;
    if (!loader->weights && !(fixed > 0))
        random_vector(&loader->random, host, total, slot->norm ? 1 : 0);
    int rc = read ? read_vector(loader, layer, slot, host, &bytes) : 0;
    float scale = slot_scale(slot, &loader->model->config);
    const float offset = read ? slot_offset(slot, &loader->model->config) : 0;
    const bool exp_of = slot->negated_exp && !naming_is_gguf(loader->naming);
    for (size_t i = 0; i < total && !rc; i++) {
        host[i] = (host[i] + offset) * scale;
        if (exp_of) host[i] = (float)-exp((double)host[i]);
    }
    if (!rc) {
        *out = kern->ops->mem_alloc(kern, total * sizeof *host);
        rc = *out ? kern->ops->upload(kern, *out, host, total * sizeof *host) : ERR_NOMEM;
        if (rc) fault_set(loader->fault, rc, name, "%s", err_text(rc));
    }
    mem_free(host);
    if (!rc) rc = load_report(loader, bytes);
    return rc;
}

/* ---- The whole ---- */

/* Loads a slot. `owner`: the struct layer or struct model that has it as a member. */
static int load_slot(struct loader *loader, int layer, const struct slot *slot, void *owner) {
    void *member = (char *)owner + slot->offset;
    if (!slot->matrix) return load_vector(loader, layer, slot, member);
    if (slot->heads) return load_head_matrices(loader, layer, slot, member);
    return slot->experts ? load_experts(loader, layer, slot, member)
                         : load_matrix(loader, layer, slot, member);
}

static const char *description(const struct loader *loader) {
    return naming_is_gguf(loader->naming) ? "its metadata" : "config.json";
}

static int refuse_tensor(struct loader *loader, const char *name) {
    if (!weights_find(loader->weights, name)) return 0;
    return fault_set(loader->fault, ERR_UNSUPPORTED, name,
                     "tensor is in the file but %s has no use for it", description(loader));
}

/* Refuses tensors that should not exist, by the configuration. Files that have them belong to
 * another computation, and ignoring them would silently give wrong answers. The exception: a layer
 * with attention that reads the entries of another layer may have keys and values of its own, which
 * are not used. */
static int refuse_extra(struct loader *loader, int layer) {
    char name[TENSOR_NAME_MAX];
    int rc = 0;
    for (size_t i = 0; i < layer_slot_count && !rc; i++) {
        const struct slot *slot = &layer_slots[i];
        if (slot_wanted(slot, &loader->model->config, layer)) continue;
        for (int k = 0; k < slot->count && !rc; k++) {
            if (role_wanted(slot->parts[k], &loader->model->config, layer)) continue;
            load_name(loader, slot->parts[k], layer, name);
            if (slot->source && layer_attends(&loader->model->config.per_layer[layer]))
                load_note_used(loader, weights_find(loader->weights, name));
            else
                rc = refuse_tensor(loader, name);
        }
    }
    layer += loader->model->block_layer;
    for (size_t i = 0; !rc && tensor_refused(name, loader->naming, i, layer); i++)
        rc = refuse_tensor(loader, name);
    return rc;
}

/* Makes a routed layer's stage of experts from its loaded matrices. */
static int make_experts(struct loader *loader, struct layer *layer) {
    const struct model_config *c = &loader->model->config;
    struct kern *kern = loader->model->kern;
    const struct kern_experts_spec spec = {.count = c->experts,
                                           .used = c->experts_used,
                                           .d_model = experts_width(c),
                                           .d_ff = c->expert_ff,
                                           .normalise = c->experts_normalised,
                                           .sigmoid = c->experts_sigmoid,
                                           .scale = c->expert_scale,
                                           .groups = c->expert_groups,
                                           .groups_used = c->expert_groups_used,
                                           .group_best = c->expert_group_best,
                                           .select_bias = layer->select_bias,
                                           .activation = c->activation,
                                           .ungated = c->ungated,
                                           .sets = c->gemma4_experts || c->experts_narrow,
                                           .factors = layer->experts_factors,
                                           .gate_up = layer->expert_gate_up,
                                           .down = layer->expert_down,
                                           .gate_up_bias = layer->expert_gate_up_bias,
                                           .down_bias = layer->expert_down_bias};
    return kern->ops->experts_load(kern, &spec, &layer->experts, loader->fault);
}

static int load_layer(struct loader *loader, int index, struct layer *layer) {
    int rc = loader->weights ? refuse_extra(loader, index) : 0;
    for (size_t i = 0; i < layer_slot_count && !rc; i++)
        if (slot_wanted(&layer_slots[i], &loader->model->config, index))
            rc = load_slot(loader, index, &layer_slots[i], layer);
    bool routed = loader->model->config.per_layer[index].routed;
    return rc || !routed || loader->options->check_only ? rc : make_experts(loader, layer);
}

static bool has_tensor(const struct loader *loader, enum role role, int layer) {
    char name[TENSOR_NAME_MAX];
    load_name(loader, role, layer, name);
    return weights_find(loader->weights, name) != NULL;
}

static int load_ends(struct loader *loader) {
    struct model *model = loader->model;
    struct model_config *c = &model->config;
    const int behind = c->layers + c->mtp_layers;
    static const enum role last[] = {ROLE_O, ROLE_CONV_OUT, ROLE_DELTA_OUT, ROLE_MAMBA_OUT};
    for (size_t i = 0; i < sizeof last / sizeof last[0]; i++) {
        char next[TENSOR_NAME_MAX];
        if (!loader->weights || !has_tensor(loader, last[i], behind)) continue;
        load_name(loader, last[i], behind, next);
        return fault_set(loader->fault, ERR_INVALID, next,
                         "tensor is in the file but %s has %d layers", description(loader),
                         c->layers);
    }
    int rc = 0;
    for (size_t i = 0; i < end_slot_count && !rc; i++)
        if (slot_wanted_outside(&end_slots[i], c)) rc = load_slot(loader, -1, &end_slots[i], model);
    if (rc || c->both_ways) return rc;
    char head[TENSOR_NAME_MAX];
    load_name(loader, ROLE_HEAD, -1, head);
    if (!c->tied_embeddings && loader->weights && !has_tensor(loader, ROLE_HEAD, -1) &&
        !weights_absent(loader->weights, head)) {
        log_warn("no lm_head.weight in the model files: using model.embed_tokens.weight");
        c->tied_embeddings = true;
    }
    if (!c->tied_embeddings) return load_slot(loader, -1, &slot_head, model);
    model->head = model->embed;
    return 0;
}

/* Loads what is in front of a block's layer and behind it. */
static int load_block_ends(struct loader *loader) {
    struct model *model = loader->model;
    int rc = 0;
    model->embed = model->block_of->embed;
    model->head = model->block_of->head;
    for (int i = 0; i < SLOT_BLOCK_COUNT && !rc; i++)
        rc = load_slot(loader, 0, &slot_block[i], model);
    if (rc) return rc;
    const bool own = has_tensor(loader, ROLE_BLOCK_NORM, 0);
    return load_slot(loader, own ? 0 : -1, own ? &slot_block_norm : &end_slots[END_FINAL_NORM],
                     model);
}

/* Makes loader->order. It stays NULL if files have the rows in the backend's order. */
static int make_order(struct loader *loader) {
    const struct model_config *config = &loader->model->config;
    if (!tensor_heads_reordered(config)) return 0;
    loader->order = mem_try_alloc((size_t)config->head_dim, sizeof *loader->order);
    if (!loader->order)
        return fault_set(loader->fault, ERR_NOMEM, "model", "no memory for a table");
    for (int i = 0; i < config->head_dim; i++) loader->order[i] = tensor_loaded_row(config, i);
    return 0;
}

static int open_team(struct loader *loader) {
    const struct model_options *options = loader->options;
    int rc = options->check_only ? 0 : cpu_team_open(options->threads, &loader->team);
    return rc ? fault_set(loader->fault, rc, "threads",
                          "cannot start the threads that load weights")
              : 0;
}

/* Returns whether the configuration has read the tensor. */
static bool is_known_beside(const char *name) {
    static const char *const names[] = {"rope_freqs.weight", "rope_factors_long.weight",
                                        "rope_factors_short.weight"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strcmp(name, names[i]) == 0) return true;
    return false;
}

/* Returns whether the tensor belongs to layers that predict further tokens; they follow the model's
 * layers. */
static bool is_of_mtp(const struct loader *loader, const char *name) {
    const struct model_config *c = &loader->model->config;
    int layer = -1;
    return sscanf(name, "blk.%d.", &layer) == 1 && layer >= c->layers &&
           layer < c->layers + c->mtp_layers;
}

/* Refuses tensors of a GGUF file that nothing has used: they belong to a computation that keepd
 * does not do. */
static int refuse_unused(struct loader *loader) {
    for (size_t i = 0; loader->used && i < weights_count(loader->weights); i++) {
        const char *name = weights_at(loader->weights, i)->name;
        if (!loader->used[i] && !is_known_beside(name) && !is_of_mtp(loader, name))
            return refuse_tensor(loader, name);
    }
    return 0;
}

static int open_loader(struct loader *loader) {
    const struct kern_ops *ops = loader->model->kern->ops;
    if (loader->options->quantization > QUANTIZE_FP8 && !ops->blocks)
        return fault_set(loader->fault, ERR_UNSUPPORTED, "quantization",
                         "the %s backend has no weights in blocks of 8 or 4 bits", ops->name);
    const struct weights *weights = loader->weights;
    struct model_config *config = &loader->model->config;
    int rc = open_team(loader);
    loader->total = weights ? weights_bytes(weights) : random_bytes(config);
    if (rc || !weights) {
        config->dtype = weights ? config->dtype : KERN_BF16;
        return rc;
    }
    char name[TENSOR_NAME_MAX];
    loader->naming = tensor_naming(config, weights_gguf(weights) != NULL);
    load_name(loader, ROLE_EMBED, -1, name);
    const struct tensor *embed = weights_find(weights, name);
    if (embed && tensor_is_float(embed->dtype))
        config->dtype = rows_dtype(&(struct rows){.tensor = embed});
    if (embed && embed->dtype == TENSOR_BLOCKS)
        config->dtype = config->packing.kind == PACKING_OWN
                            ? config->packing.dtype
                            : KERN_BF16; /* the cache needs no wider type */
    rc = make_order(loader);
    if (rc || !naming_is_gguf(loader->naming)) return rc;
    loader->used = mem_try_alloc(weights_count(weights), sizeof *loader->used);
    return loader->used ? 0 : fault_set(loader->fault, ERR_NOMEM, "model", "no memory for a table");
}

int model_load_weights(struct model *model, const struct model_options *options,
                       const struct weights *weights, struct fault *fault) {
    struct loader loader = {.model = model,
                            .options = options,
                            .weights = weights,
                            .random = RANDOM_SEED,
                            .fault = fault};
    int rc = open_loader(&loader);
    if (!rc) rc = model->block_of ? load_block_ends(&loader) : load_ends(&loader);
    load_room_free(&loader.codes); /* the layers need much less */
    load_room_free(&loader.rows);
    for (int i = 0; i < model->config.layers && !rc; i++)
        rc = load_layer(&loader, i, &model->layers[i]);
    if (!rc && !model->block_of) rc = refuse_unused(&loader);
    load_room_free(&loader.codes);
    load_room_free(&loader.rows);
    mem_free(loader.used);
    mem_free(loader.order);
    cpu_team_close(loader.team);
    return rc;
}
