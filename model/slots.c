/* The table of slots: what a step uses, the tensors that each is made of, and the layers that have
 * it. */
#include <stddef.h>

#include "model/internal.h"
#include "model/tensors.h"

#define VECTOR(owner, member, is_norm, ...)                                                        \
    .offset = offsetof(struct owner, member), .parts = {__VA_ARGS__}, .norm = (is_norm)
#define MATRIX(owner, member, split, ...)                                                          \
    .offset = offsetof(struct owner, member), .parts = {__VA_ARGS__}, .shard = KERN_SHARD_##split, \
    .matrix = true
#define WANTED(flag)   .wanted = offsetof(struct model_config, flag)
#define UNWANTED(flag) .unwanted = offsetof(struct model_config, flag)
#define GROUPS(member) .groups = offsetof(struct model_config, member)

const struct slot slot_head = {MATRIX(model, head, VOCAB, ROLE_HEAD), .count = 1};

const struct slot end_slots[] = {
    [END_EMBED] = {MATRIX(model, embed, VOCAB, ROLE_EMBED), .count = 1},
    [END_FINAL_NORM] = {VECTOR(model, final_norm, true, ROLE_FINAL_NORM), .count = 1,
                        .scaled = offsetof(struct model_config, logit_scale),
                        UNWANTED(norms_of_sums)},
    {VECTOR(model, embed_norm, true, ROLE_EMBED_NORM), .count = 1, WANTED(embed_norms),
     .fixed = offsetof(struct model_config, embed_norm)},
    {VECTOR(model, embed_norm_bias, false, ROLE_EMBED_NORM_BIAS), .count = 1, WANTED(norm_bias)},
    {MATRIX(model, positions, VOCAB, ROLE_POSITIONS), .count = 1, WANTED(learned_positions)},
    {MATRIX(model, types, VOCAB, ROLE_TYPES), .count = 1, WANTED(typed)},
    {MATRIX(model, ending[0], NONE, ROLE_CLASSIFIER_IN), .count = 1, WANTED(classifies)},
    {VECTOR(model, ending_bias[0], false, ROLE_CLASSIFIER_IN_BIAS), .count = 1, WANTED(classifies)},
    {MATRIX(model, ending[1], NONE, ROLE_CLASSIFIER_OUT), .count = 1, WANTED(classifies)},
    {VECTOR(model, ending_bias[1], false, ROLE_CLASSIFIER_OUT_BIAS), .count = 1,
     WANTED(classifies)},
    {MATRIX(model, ending[0], NONE, ROLE_DENSE_1), .count = 1, WANTED(pooling.dense[0].there)},
    {VECTOR(model, ending_bias[0], false, ROLE_DENSE_1_BIAS), .count = 1,
     WANTED(pooling.dense[0].bias)},
    {MATRIX(model, ending[1], NONE, ROLE_DENSE_2), .count = 1, WANTED(pooling.dense[1].there)},
    {VECTOR(model, ending_bias[1], false, ROLE_DENSE_2_BIAS), .count = 1,
     WANTED(pooling.dense[1].bias)},
    {MATRIX(model, each_embed, VOCAB, ROLE_EACH_EMBED), .count = 1, WANTED(embeds_each)},
    {MATRIX(model, each_in, NONE, ROLE_EACH_IN), .count = 1, WANTED(embeds_each)},
    {VECTOR(model, each_in_norm, true, ROLE_EACH_IN_NORM), .count = 1, WANTED(embeds_each),
     .scaled = offsetof(struct model_config, each_norm_scale)},
};
const size_t end_slot_count = sizeof end_slots / sizeof *end_slots;

const struct slot slot_block[SLOT_BLOCK_COUNT] = {
    {MATRIX(model, block_in, NONE, ROLE_BLOCK_IN), .count = 1},
    {VECTOR(model, block_embed_norm, true, ROLE_BLOCK_EMBED_NORM), .count = 1},
    {VECTOR(model, block_hidden_norm, true, ROLE_BLOCK_HIDDEN_NORM), .count = 1},
};
const struct slot slot_block_norm = {VECTOR(model, final_norm, true, ROLE_BLOCK_NORM), .count = 1,
                                     .scaled = offsetof(struct model_config, logit_scale)};

const struct slot layer_slots[] = {
    {VECTOR(layer, attn_norm, true, ROLE_ATTN_NORM), .count = 1, .layers = SLOT_NORMED,
     WANTED(pre_norms)},
    {MATRIX(layer, qkv, ROWS, ROLE_Q, ROLE_K, ROLE_V), .count = 3, .layers = SLOT_ATTENTION,
     .source = SLOT_KV, GROUPS(heads_kv)},
    {MATRIX(layer, qkv, ROWS, ROLE_Q, ROLE_K, ROLE_K), .count = 3, .layers = SLOT_ATTENTION,
     .source = SLOT_K, GROUPS(heads_kv)},
    {MATRIX(layer, qkv, ROWS, ROLE_Q), .count = 1, .layers = SLOT_ATTENTION, .source = SLOT_READS,
     GROUPS(heads_kv)},
    {MATRIX(layer, q_down, NONE, ROLE_LATENT_Q_DOWN), .count = 1, .layers = SLOT_ATTENTION,
     .source = SLOT_LATENT, WANTED(q_latent)},
    {VECTOR(layer, q_down_norm, true, ROLE_LATENT_Q_NORM), .count = 1, .layers = SLOT_ATTENTION,
     .source = SLOT_LATENT, WANTED(q_latent)},
    {MATRIX(layer, q_up, NONE, ROLE_LATENT_Q_UP), .count = 1, .layers = SLOT_ATTENTION,
     .source = SLOT_LATENT, WANTED(q_latent)},
    {MATRIX(layer, q_up, NONE, ROLE_Q), .count = 1, .layers = SLOT_ATTENTION, .source = SLOT_LATENT,
     WANTED(q_from_input)},
    {MATRIX(layer, entry, NONE, ROLE_LATENT_ENTRY), .count = 1, .layers = SLOT_ATTENTION,
     .source = SLOT_LATENT},
    {VECTOR(layer, entry_norm, true, ROLE_LATENT_NORM), .count = 1, .layers = SLOT_ATTENTION,
     .source = SLOT_LATENT},
    {MATRIX(layer, up_k, NONE, ROLE_LATENT_K), .count = 1, .heads = true, .layers = SLOT_ATTENTION,
     .source = SLOT_LATENT},
    {MATRIX(layer, up_v, NONE, ROLE_LATENT_V), .count = 1, .heads = true, .layers = SLOT_ATTENTION,
     .source = SLOT_LATENT},
    {VECTOR(layer, qkv_bias, false, ROLE_Q_BIAS, ROLE_K_BIAS, ROLE_V_BIAS), .count = 3,
     .layers = SLOT_ATTENTION, WANTED(qkv_bias)},
    {VECTOR(layer, q_norm, true, ROLE_Q_NORM), .count = 1, .layers = SLOT_ATTENTION,
     WANTED(qk_norm), .fixed = offsetof(struct model_config, q_norm)},
    {VECTOR(layer, v_norm, true, ROLE_V_NORM), .count = 1, .layers = SLOT_ATTENTION,
     .source = SLOT_OWN, WANTED(v_norms), .fixed = offsetof(struct model_config, v_norm)},
    {VECTOR(layer, k_norm, true, ROLE_K_NORM), .count = 1, .layers = SLOT_ATTENTION,
     .source = SLOT_OWN, WANTED(qk_norm), .fixed = offsetof(struct model_config, k_norm)},
    {MATRIX(layer, attn_gate, ROWS, ROLE_ATTN_GATE), .count = 1, .layers = SLOT_ATTENTION,
     WANTED(attn_gate)},
    {MATRIX(layer, o, COLS, ROLE_O), .count = 1, .layers = SLOT_ATTENTION},
    {VECTOR(layer, o_bias, false, ROLE_O_BIAS), .count = 1, .layers = SLOT_ATTENTION,
     WANTED(o_bias)},
    {MATRIX(layer, state_in, ROWS, ROLE_CONV_B, ROLE_CONV_C, ROLE_CONV_X), .count = 3,
     .layers = SLOT_CONV},
    {VECTOR(layer, taps, false, ROLE_CONV_TAPS), .count = 1, .layers = SLOT_CONV},
    {MATRIX(layer, state_out, COLS, ROLE_CONV_OUT), .count = 1, .layers = SLOT_CONV},
    {MATRIX(layer, state_in, ROWS, ROLE_DELTA_Q, ROLE_DELTA_K, ROLE_DELTA_V, ROLE_DELTA_Z),
     .count = 4, .layers = SLOT_DELTA, GROUPS(delta.heads_k)},
    {MATRIX(layer, state_rates, NONE, ROLE_DELTA_B, ROLE_DELTA_A), .count = 2,
     .layers = SLOT_DELTA},
    {VECTOR(layer, taps, false, ROLE_DELTA_TAPS_QK, ROLE_DELTA_TAPS_V), .count = 2,
     .layers = SLOT_DELTA},
    {VECTOR(layer, decay, false, ROLE_DELTA_DECAY), .count = 1, .layers = SLOT_DELTA,
     .negated_exp = true},
    {VECTOR(layer, state_bias, false, ROLE_DELTA_BIAS), .count = 1, .layers = SLOT_DELTA},
    {VECTOR(layer, state_norm, true, ROLE_DELTA_NORM), .count = 1, .layers = SLOT_DELTA,
     .plain = true},
    {MATRIX(layer, state_out, COLS, ROLE_DELTA_OUT), .count = 1, .layers = SLOT_DELTA},
    {MATRIX(layer, state_in, ROWS, ROLE_MAMBA_Z, ROLE_MAMBA_X), .count = 2, .layers = SLOT_MAMBA,
     GROUPS(mamba.heads)},
    {MATRIX(layer, state_rates, NONE, ROLE_MAMBA_B, ROLE_MAMBA_C, ROLE_MAMBA_DT), .count = 3,
     .layers = SLOT_MAMBA},
    {VECTOR(layer, taps, false, ROLE_MAMBA_TAPS), .count = 1, .layers = SLOT_MAMBA},
    {VECTOR(layer, conv_bias, false, ROLE_MAMBA_CONV_BIAS), .count = 1, .layers = SLOT_MAMBA,
     WANTED(conv_bias)},
    {VECTOR(layer, decay, false, ROLE_MAMBA_DECAY), .count = 1, .layers = SLOT_MAMBA,
     .negated_exp = true},
    {VECTOR(layer, state_bias, false, ROLE_MAMBA_BIAS), .count = 1, .layers = SLOT_MAMBA},
    {VECTOR(layer, skip, false, ROLE_MAMBA_SKIP), .count = 1, .layers = SLOT_MAMBA},
    {VECTOR(layer, state_norm, true, ROLE_MAMBA_NORM), .count = 1, .layers = SLOT_MAMBA,
     WANTED(mamba_norm)},
    {MATRIX(layer, state_out, COLS, ROLE_MAMBA_OUT), .count = 1, .layers = SLOT_MAMBA},
    {VECTOR(layer, attn_post_norm, true, ROLE_ATTN_POST_NORM), .count = 1, WANTED(post_norms)},
    {VECTOR(layer, attn_post_bias, false, ROLE_ATTN_POST_BIAS), .count = 1, WANTED(norm_bias)},
    {VECTOR(layer, ffn_norm, true, ROLE_FFN_NORM), .count = 1, .layers = SLOT_BEHIND,
     WANTED(pre_norms)},
    {VECTOR(layer, ffn_norm, true, ROLE_ATTN_NORM), .count = 1, .layers = SLOT_ALONE,
     WANTED(pre_norms)},
    {MATRIX(layer, gate_up, ROWS, ROLE_GATE, ROLE_UP), .count = 2, .layers = SLOT_DENSE,
     UNWANTED(ungated)},
    {MATRIX(layer, gate_up, ROWS, ROLE_UP), .count = 1, .layers = SLOT_DENSE, WANTED(ungated)},
    {VECTOR(layer, up_bias, false, ROLE_UP_BIAS), .count = 1, .layers = SLOT_DENSE,
     WANTED(ff_bias)},
    {MATRIX(layer, down, COLS, ROLE_DOWN), .count = 1, .layers = SLOT_DENSE},
    {VECTOR(layer, down_bias, false, ROLE_DOWN_BIAS), .count = 1, .layers = SLOT_DENSE,
     WANTED(ff_bias)},
    {VECTOR(layer, sinks, false, ROLE_SINKS), .count = 1, .layers = SLOT_ATTENTION, WANTED(sinks)},
    {MATRIX(layer, router, NONE, ROLE_ROUTER), .count = 1, .layers = SLOT_ROUTED},
    {MATRIX(layer, gate_up, ROWS, ROLE_SHARED_GATE, ROLE_SHARED_UP), .count = 2,
     .layers = SLOT_ROUTED, WANTED(shared_experts), UNWANTED(ungated)},
    {MATRIX(layer, gate_up, ROWS, ROLE_SHARED_UP), .count = 1, .layers = SLOT_ROUTED,
     WANTED(ungated)},
    {MATRIX(layer, down, COLS, ROLE_SHARED_DOWN), .count = 1, .layers = SLOT_ROUTED,
     WANTED(shared_experts)},
    {MATRIX(layer, shared_gate, NONE, ROLE_SHARED_OPEN), .count = 1, .layers = SLOT_ROUTED,
     WANTED(shared_gate)},
    {VECTOR(layer, select_bias, false, ROLE_SELECT_BIAS), .count = 1, .layers = SLOT_ROUTED,
     WANTED(select_bias)},
    {VECTOR(layer, router_bias, false, ROLE_ROUTER_BIAS), .count = 1, .layers = SLOT_ROUTED,
     WANTED(expert_bias)},
    {VECTOR(layer, expert_gate_up_bias, false, ROLE_EXPERT_GATE_BIAS, ROLE_EXPERT_UP_BIAS),
     .count = 2, .experts = true, .layers = SLOT_ROUTED, WANTED(expert_bias)},
    {VECTOR(layer, expert_down_bias, false, ROLE_EXPERT_DOWN_BIAS), .count = 1, .experts = true,
     .layers = SLOT_ROUTED, WANTED(expert_bias)},
    {MATRIX(layer, experts_in, NONE, ROLE_EXPERTS_IN), .count = 1, .layers = SLOT_ROUTED,
     WANTED(experts_narrow)},
    {MATRIX(layer, experts_out, NONE, ROLE_EXPERTS_OUT), .count = 1, .layers = SLOT_ROUTED,
     WANTED(experts_narrow)},
    {MATRIX(layer, expert_gate_up, ROWS, ROLE_EXPERT_GATE, ROLE_EXPERT_UP), .count = 2,
     .experts = true, .layers = SLOT_ROUTED, UNWANTED(ungated)},
    {MATRIX(layer, expert_gate_up, ROWS, ROLE_EXPERT_UP), .count = 1, .experts = true,
     .layers = SLOT_ROUTED, WANTED(ungated)},
    {MATRIX(layer, expert_down, COLS, ROLE_EXPERT_DOWN), .count = 1, .experts = true,
     .layers = SLOT_ROUTED},
    {VECTOR(layer, shared_post_norm, true, ROLE_SHARED_POST_NORM), .count = 1,
     .layers = SLOT_ROUTED, WANTED(gemma4_experts)},
    {VECTOR(layer, router_norm, true, ROLE_ROUTER_NORM), .count = 1, .layers = SLOT_ROUTED,
     WANTED(gemma4_experts), .scaled = offsetof(struct model_config, router_scale)},
    {VECTOR(layer, experts_norm, true, ROLE_EXPERTS_NORM), .count = 1, .layers = SLOT_ROUTED,
     WANTED(gemma4_experts)},
    {VECTOR(layer, experts_post_norm, true, ROLE_EXPERTS_POST_NORM), .count = 1,
     .layers = SLOT_ROUTED, WANTED(gemma4_experts)},
    {VECTOR(layer, experts_factors, true, ROLE_EXPERTS_FACTORS), .count = 1, .layers = SLOT_ROUTED,
     WANTED(gemma4_experts), .plain = true},
    {VECTOR(layer, ffn_post_norm, true, ROLE_FFN_POST_NORM), .count = 1, WANTED(post_norms)},
    {VECTOR(layer, ffn_post_bias, false, ROLE_FFN_POST_BIAS), .count = 1, WANTED(norm_bias)},
    {MATRIX(layer, each_gate, NONE, ROLE_EACH_GATE), .count = 1, WANTED(embeds_each)},
    {MATRIX(layer, each_out, NONE, ROLE_EACH_OUT), .count = 1, WANTED(embeds_each)},
    {VECTOR(layer, each_post_norm, true, ROLE_EACH_POST_NORM), .count = 1, WANTED(embeds_each)},
    {VECTOR(layer, out_scale, true, ROLE_LAYER_SCALE), .count = 1, WANTED(layer_scales),
     .plain = true},
};
const size_t layer_slot_count = sizeof layer_slots / sizeof layer_slots[0];

int slot_groups(const struct slot *slot, const struct model_config *config, int layer) {
    if (slot->groups == offsetof(struct model_config, heads_kv))
        return config->per_layer[layer].heads_kv;
    return slot->groups ? *(const int *)(const void *)((const char *)config + slot->groups) : 0;
}

static bool has_kind(enum slot_layers kind, const struct model_layer_config *layer) {
    const bool mixes = layer->mixer != MIXER_NONE;
    switch (kind) {
    case SLOT_ALL:
        return true;
    case SLOT_NORMED:
        return mixes && !layer->plain_inputs;
    case SLOT_BEHIND:
        return mixes && !layer->no_network;
    case SLOT_ALONE:
        return !mixes;
    case SLOT_DENSE:
        return has_dense(layer);
    case SLOT_ROUTED:
        return layer->routed;
    case SLOT_ATTENTION:
        return layer_attends(layer);
    default:
        return (int)layer->mixer == (int)kind - SLOT_ATTENTION;
    }
}

bool slot_wanted_outside(const struct slot *slot, const struct model_config *config) {
    const bool *flags = (const bool *)config;
    return (!slot->wanted || flags[slot->wanted]) && (!slot->unwanted || !flags[slot->unwanted]);
}

bool slot_wanted(const struct slot *slot, const struct model_config *config, int layer) {
    const struct model_layer_config *its = &config->per_layer[layer];
    if (!has_kind(slot->layers, its)) return false;
    if (slot->source == SLOT_LATENT ? !config->latent.rank : slot->source && config->latent.rank)
        return false;
    if (slot->source == SLOT_READS ? !its->reads : slot->source && its->reads) return false;
    if (slot->source == SLOT_K ? !its->keys_are_values
                               : slot->source == SLOT_KV && its->keys_are_values)
        return false;
    return slot_wanted_outside(slot, config);
}

bool role_wanted(enum role role, const struct model_config *config, int layer) {
    for (size_t i = 0; i < layer_slot_count; i++)
        for (int k = 0; k < layer_slots[i].count; k++)
            if (layer_slots[i].parts[k] == role && slot_wanted(&layer_slots[i], config, layer))
                return true;
    return false;
}

float slot_offset(const struct slot *slot, const struct model_config *config) {
    const bool plain =
        slot->plain || (slot == &end_slots[END_FINAL_NORM] && config->final_norm_plain);
    return slot->norm && !plain ? config->norm_offset : 0;
}

float slot_scale(const struct slot *slot, const struct model_config *config) {
    return slot->scaled ? *(const float *)(const void *)((const char *)config + slot->scaled) : 1;
}

float role_factor(const struct model_config *config, enum role role) {
    const struct model_factors *f = &config->factors;
    switch (role) {
    case ROLE_Q:
        return f->q;
    case ROLE_K:
        return f->k;
    case ROLE_V:
        return f->v;
    case ROLE_O:
        return f->o;
    case ROLE_MAMBA_Z:
        return f->z;
    case ROLE_MAMBA_X:
        return f->x;
    case ROLE_MAMBA_B:
        return f->b;
    case ROLE_MAMBA_C:
        return f->c;
    case ROLE_MAMBA_DT:
        return f->dt;
    case ROLE_MAMBA_OUT:
        return f->state_out;
    case ROLE_GATE:
        return f->gate;
    case ROLE_DOWN:
        return f->down;
    default:
        return 0;
    }
}

float slot_fixed(const struct slot *slot, const struct model_config *config) {
    return slot->fixed ? *(const float *)(const void *)((const char *)config + slot->fixed) : 0;
}

/* ---- Numbers ---- */

/* The numbers of a slot in a layer, of all experts or heads. A role may be a slot's part twice. */
static int64_t slot_numbers(const struct slot *slot, const struct model_config *config, int layer) {
    int64_t sum = 0;
    if (slot_fixed(slot, config) > 0) return 0;
    for (int i = 0; i < slot->count; i++) {
        int64_t rows, cols;
        if (i > 0 && slot->parts[i] == slot->parts[i - 1]) continue;
        tensor_shape(config, slot->parts[i], layer, &rows, &cols);
        sum += cols ? rows * cols : rows;
    }
    return sum * (slot->experts ? config->experts : slot->heads ? config->heads_q : 1);
}

struct model_numbers model_count_numbers(const struct model_config *config) {
    struct model_numbers sum = {0};
    int64_t of_experts = 0;
    for (size_t i = 0; i < end_slot_count; i++)
        if (slot_wanted_outside(&end_slots[i], config))
            sum.all += slot_numbers(&end_slots[i], config, 0);
    if (!config->tied_embeddings && !config->both_ways)
        sum.all += slot_numbers(&slot_head, config, 0);
    for (int layer = 0; layer < config->layers; layer++) {
        for (size_t i = 0; i < layer_slot_count; i++) {
            if (!slot_wanted(&layer_slots[i], config, layer)) continue;
            const int64_t numbers = slot_numbers(&layer_slots[i], config, layer);
            sum.all += numbers;
            if (layer_slots[i].experts) of_experts += numbers;
        }
    }
    sum.active = sum.all - of_experts;
    if (config->experts) sum.active += of_experts / config->experts * config->experts_used;
    return sum;
}

int64_t model_entry_numbers(const struct model_config *config) {
    int64_t sum = 0;
    for (int i = 0; i < config->layers; i++)
        if (holds_entries(&config->per_layer[i])) sum += qkv_width(config, i) - q_width(config, i);
    return sum;
}
