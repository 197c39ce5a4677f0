/* Blocks that predict further tokens: see model_has_block. */
#include <stdio.h>

#include "base/mem.h"
#include "model/internal.h"

/* Returns the last layer with attention of its own, as which the block is made; -1: none. */
static int find_pattern(const struct model_config *c) {
    for (int i = c->layers - 1; i >= 0; i--)
        if (c->per_layer[i].mixer == MIXER_ATTENTION && holds_entries(&c->per_layer[i])) return i;
    return -1;
}

static bool has_part(const struct weights *weights, enum naming naming, enum role role, int layer,
                     const char *other) {
    char name[TENSOR_NAME_MAX];
    tensor_name(name, naming, role, layer, 0);
    return weights_find(weights, name) || (other && weights_find(weights, other));
}

bool model_find_block(const struct model_config *c, const struct weights *weights) {
    if (!weights || find_pattern(c) < 0 || c->heads || c->embeds_each || c->embed_norm > 0 ||
        c->mamba.heads)
        return false;
    const enum naming naming = tensor_naming(c, weights_gguf(weights) != NULL);
    return has_part(weights, naming, ROLE_BLOCK_IN, c->layers, "mtp.fc.weight") &&
           has_part(weights, naming, ROLE_BLOCK_EMBED_NORM, c->layers,
                    "mtp.pre_fc_norm_embedding.weight") &&
           has_part(weights, naming, ROLE_BLOCK_HIDDEN_NORM, c->layers,
                    "mtp.pre_fc_norm_hidden.weight") &&
           has_part(weights, naming, ROLE_O, c->layers, "mtp.layers.0.self_attn.o_proj.weight");
}

int model_take_block(struct model_config *c, struct weights *weights, int *layer,
                     struct fault *fault) {
    const int pattern = find_pattern(c);
    struct model_layer_config one = c->per_layer[pattern];
    one.routed = c->per_layer[c->layers - 1].routed;
    *layer = c->layers;
    c->rotations[0] = c->rotations[one.index];
    one.index = 0;
    c->per_layer[0] = one;
    c->layers = c->cache_layers = 1;
    c->state_layers = 0;
    int rc = weights_gguf(weights) ? 0 : weights_take_block(weights, *layer, fault);
    if (!rc && c->stacked_experts && c->qwen35_names && !weights_gguf(weights)) {
        char name[TENSOR_NAME_MAX];
        tensor_name(name, NAMING_HF_QWEN35_STACKED, ROLE_EXPERT_DOWN, *layer, 0);
        c->stacked_experts = weights_find(weights, name) != NULL;
    }
    return rc;
}

int model_enter_block(struct model *model, int rows) {
    const struct model_config *c = &model->config;
    struct scratch *s = &model->scratch;
    struct kern *kern = model->kern;
    const size_t size = (size_t)rows * (size_t)c->d_model;
    float *hidden = s->pairs + size;
    int rc = kern->ops->upload(kern, hidden, model->block_hidden, size * sizeof *hidden);
    if (rc) return rc;
    kern->ops->rms_norm(kern, s->pairs, s->x, model->block_embed_norm, rows, c->d_model,
                        c->rms_eps);
    kern->ops->rms_norm(kern, hidden, hidden, model->block_hidden_norm, rows, c->d_model,
                        c->rms_eps);
    int32_t *order = model->block_order;
    for (int32_t i = 0; i < rows; i++) {
        *order++ = i;
        *order++ = rows + i;
    }
    kern->ops->gather_rows(kern, s->joined, s->pairs, model->block_order, 2 * rows, c->d_model);
    kern->ops->matmul(kern, s->x, s->joined, model->block_in, NULL, rows, KERN_SET);
    return 0;
}

int model_step_block(struct model *block, const struct kern_batch *batch, const float *hidden,
                     const int32_t *want, int want_count, const float **logits) {
    block->block_hidden = hidden;
    return model_step(block, batch, want, want_count, logits);
}
