/* Rewrites a configuration in one vocabulary, because files differ: where the text model's fields
 * are, the names of families, and how they say "none". */
#include <string.h>

#include "base/json.h"
#include "model/config_family.h"

/* ---- The text part of a multimodal checkpoint ---- */

/* Checkpoints that see pictures: the fields of their language model are in "text_config". */
static const struct multimodal {
    const char *architecture, *model_type;
    const char *text; /* model_type of the language model, where "text_config" names none */
} multimodal[] = {
    {"Qwen3VLForConditionalGeneration", "qwen3_vl", "qwen3_vl_text"},
    {"Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", "qwen3_vl_moe_text"},
    {"Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", "qwen2_5_vl_text"},
    {"Qwen3_5ForConditionalGeneration", "qwen3_5", "qwen3_5_text"},
    {"Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", "qwen3_5_moe_text"},
    {"Gemma3ForConditionalGeneration", "gemma3", "gemma3_text"},
    {"Mistral3ForConditionalGeneration", "mistral3", "mistral"},
    {"LlavaForConditionalGeneration", "llava", "llama"},
    {"MuseGlimmerForConditionalGeneration", "muse_glimmer", "muse_glimmer_text"},
    {"Gemma4ForConditionalGeneration", "gemma4", "gemma4_text"},
    {"Gemma4UnifiedForConditionalGeneration", "gemma4_unified", "gemma4_unified_text"},
    {"Idefics3ForConditionalGeneration", "idefics3", "llama"},
    {"SmolVLMForConditionalGeneration", "smolvlm", "llama"},
    {"KimiK25ForConditionalGeneration", "kimi_k25", "kimi_k2"},
};

int model_config_no_memory(struct fault *fault) {
    return fault_set(fault, ERR_NOMEM, "config.json", "not enough memory");
}

/* Fields that the whole checkpoint has for its language model. Those in front decide also where
 * "text_config" has them. */
static int inherit_fields(cJSON *root, cJSON *text, struct fault *fault) {
    static const char *const fields[] = {
        "tie_word_embeddings", "quantization_config", "quantization", "dtype",
        "torch_dtype",         "bos_token_id",        "eos_token_id"};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        cJSON *field = cJSON_DetachItemFromObjectCaseSensitive(root, fields[i]);
        if (field && i < 3) cJSON_DeleteItemFromObjectCaseSensitive(text, fields[i]);
        if (field && cJSON_GetObjectItemCaseSensitive(text, fields[i])) {
            cJSON_Delete(field);
        } else if (field && !cJSON_AddItemToObject(text, fields[i], field)) {
            cJSON_Delete(field);
            return model_config_no_memory(fault);
        }
    }
    return 0;
}

/* Makes of a multimodal checkpoint's tree that of its language model. Older files of Qwen2.5-VL
 * have the fields of both side by side. */
int model_config_take_text(cJSON *root, struct fault *fault) {
    const struct multimodal *row = NULL;
    const char *architecture = NULL, *outer = NULL, *type = NULL;
    int rc = model_config_find_architecture(root, &architecture, fault);
    if (!rc) rc = json_str(root, NULL, "model_type", &outer, fault);
    for (size_t i = 0; i < sizeof multimodal / sizeof multimodal[0] && !rc; i++)
        if (architecture ? !strcmp(architecture, multimodal[i].architecture)
                         : outer && !strcmp(outer, multimodal[i].model_type))
            row = &multimodal[i];
    if (rc || !row) return rc;
    cJSON *text = json_get(root, "text_config")
                      ? cJSON_DetachItemFromObjectCaseSensitive(root, "text_config")
                      : NULL;
    if (text && !cJSON_IsObject(text)) {
        rc = fault_set(fault, ERR_INVALID, "text_config", "expected an object, found %s",
                       json_type_name(text));
        cJSON_Delete(text);
        return rc;
    }
    if (text) {
        rc = inherit_fields(root, text, fault);
        cJSON *outside = root->child;
        root->child = text->child;
        text->child = outside;
        cJSON_Delete(text);
    }
    if (!rc) rc = json_str(root, NULL, "model_type", &type, fault);
    if (rc) return rc;
    const bool says = type && strcmp(type, row->model_type) != 0;
    cJSON_DeleteItemFromObjectCaseSensitive(root, "architectures");
    if (says) return 0;
    cJSON_DeleteItemFromObjectCaseSensitive(root, "model_type");
    return cJSON_AddStringToObject(root, "model_type", row->text) ? 0
                                                                  : model_config_no_memory(fault);
}

/* ---- LFM2's own words ---- */

static cJSON *layer_types_of(const cJSON *indices, int layers) {
    cJSON *types = cJSON_CreateArray();
    for (int i = 0; types && i < layers; i++) {
        const cJSON *index;
        bool attends = false;
        cJSON_ArrayForEach(index, indices) {
            attends = attends || (cJSON_IsNumber(index) && index->valuedouble == i);
        }
        cJSON *type = cJSON_CreateString(attends ? "full_attention" : "conv");
        if (type && cJSON_AddItemToArray(types, type)) continue;
        cJSON_Delete(type);
        cJSON_Delete(types);
        return NULL;
    }
    return types;
}

/* A field's name in a family, and in the others. */
struct own_name {
    const char *own, *other;
};

/* The family's own name decides where both are there. */
static int rename_fields(cJSON *root, const struct own_name *names, size_t count,
                         struct fault *fault) {
    for (size_t i = 0; i < count; i++) {
        cJSON *field = cJSON_DetachItemFromObjectCaseSensitive(root, names[i].own);
        if (!field) continue;
        cJSON_DeleteItemFromObjectCaseSensitive(root, names[i].other);
        if (cJSON_AddItemToObject(root, names[i].other, field)) continue;
        cJSON_Delete(field);
        return model_config_no_memory(fault);
    }
    return 0;
}

/* Files without "layer_types" list the layers with attention. */
static int rename_lfm2(cJSON *root, struct fault *fault) {
    static const struct own_name names[] = {{"norm_eps", "rms_norm_eps"},
                                            {"block_ff_dim", "intermediate_size"},
                                            {"num_dense_layers", "first_k_dense_replace"},
                                            {"tie_embedding", "tie_word_embeddings"}};
    int64_t layers = 0;
    if (rename_fields(root, names, sizeof names / sizeof *names, fault)) return ERR_NOMEM;
    const cJSON *indices = json_get(root, "full_attn_idxs");
    if (json_get(root, "layer_types") || !indices) return 0;
    int rc = json_int(root, NULL, "num_hidden_layers", 1, LAYERS_MAX, &layers, fault);
    cJSON *types = rc ? NULL : layer_types_of(indices, (int)layers);
    if (rc) return rc;
    cJSON_DeleteItemFromObjectCaseSensitive(root, "layer_types");
    if (types && cJSON_AddItemToObject(root, "layer_types", types)) return 0;
    cJSON_Delete(types);
    return model_config_no_memory(fault);
}

/* ---- Nemotron-H's own words ---- */

/* A letter for each layer. */
static cJSON *types_of_pattern(const char *pattern) {
    cJSON *types = cJSON_CreateArray();
    for (; types && *pattern; pattern++) {
        const char *name = *pattern == 'M'   ? "mamba"
                           : *pattern == '*' ? "attention"
                           : *pattern == '-' ? "mlp"
                           : *pattern == 'E' ? "moe"
                                             : "?";
        cJSON *type = cJSON_CreateString(name);
        if (type && cJSON_AddItemToArray(types, type)) continue;
        cJSON_Delete(type);
        cJSON_Delete(types);
        return NULL;
    }
    return types;
}

static int replace_field(cJSON *root, const char *name, cJSON *value, struct fault *fault) {
    cJSON_DeleteItemFromObjectCaseSensitive(root, name);
    if (value && cJSON_AddItemToObject(root, name, value)) return 0;
    cJSON_Delete(value);
    return model_config_no_memory(fault);
}

/* transformers, NemotronHConfig: the list of layers decides how many there are. One shared expert
 * is all that there is; its width is a field of its own. */
static int rename_nemotron(cJSON *root, struct fault *fault) {
    static const struct own_name names[] = {
        {"layer_norm_epsilon", "rms_norm_eps"}, {"attention_head_dim", "head_dim"},
        {"layers_block_type", "layer_types"},   {"mamba_num_heads", "mamba_n_heads"},
        {"mamba_head_dim", "mamba_d_head"},     {"n_groups", "mamba_n_groups"},
        {"ssm_state_size", "mamba_d_state"},    {"conv_kernel", "mamba_d_conv"},
        {"use_conv_bias", "mamba_conv_bias"}};
    const char *pattern = NULL;
    int rc = json_str(root, NULL, "hybrid_override_pattern", &pattern, fault);
    if (!rc && pattern && strlen(pattern) > LAYERS_MAX)
        rc = fault_set(fault, ERR_INVALID, "hybrid_override_pattern", "more than %d layers",
                       LAYERS_MAX);
    if (!rc) rc = rename_fields(root, names, sizeof names / sizeof *names, fault);
    if (!rc && pattern && !json_get(root, "layer_types"))
        rc = replace_field(root, "layer_types", types_of_pattern(pattern), fault);
    const cJSON *types = json_get(root, "layer_types"),
                *shared = json_get(root, "n_shared_experts");
    if (!rc && !types) rc = fault_set(fault, ERR_INVALID, "layers_block_type", "missing");
    if (!rc && shared && cJSON_IsNumber(shared) && shared->valuedouble == 1)
        cJSON_DeleteItemFromObjectCaseSensitive(root, "n_shared_experts");
    if (rc || !cJSON_IsArray(types)) return rc;
    return replace_field(root, "num_hidden_layers", cJSON_CreateNumber(cJSON_GetArraySize(types)),
                         fault);
}

int model_config_rename(cJSON *root, const struct family *family, struct fault *fault) {
    static const struct own_name granite[] = {{"layers_block_type", "layer_types"}};
    static const struct own_name bert[] = {{"layer_norm_eps", "rms_norm_eps"}};
    static const struct own_name nomic[] = {{"n_layer", "num_hidden_layers"},
                                            {"n_embd", "hidden_size"},
                                            {"n_head", "num_attention_heads"},
                                            {"n_inner", "intermediate_size"},
                                            {"n_positions", "max_position_embeddings"},
                                            {"layer_norm_epsilon", "rms_norm_eps"},
                                            {"activation_function", "hidden_act"},
                                            {"rotary_emb_base", "rope_theta"},
                                            {"rotary_emb_fraction", "partial_rotary_factor"}};
    static const struct own_name modern[] = {
        {"norm_eps", "rms_norm_eps"},
        {"hidden_activation", "hidden_act"},
        {"local_attention", "sliding_window"},
        {"global_attn_every_n_layers", "sliding_window_pattern"},
        {"global_rope_theta", "rope_theta"},
        {"local_rope_theta", "rope_local_base_freq"}};
    int rc = family->lfm2 ? rename_lfm2(root, fault) : 0;
    if (!rc && family->granite_hybrid) rc = rename_fields(root, granite, 1, fault);
    if (!rc && family->nemotron) rc = rename_nemotron(root, fault);
    if (!rc && family->bert) rc = rename_fields(root, bert, 1, fault);
    if (!rc && family->nomic) rc = rename_fields(root, nomic, sizeof nomic / sizeof *nomic, fault);
    if (!rc && family->modern)
        rc = rename_fields(root, modern, sizeof modern / sizeof *modern, fault);
    return rc;
}

/* ---- Fields that may say "none" ---- */

/* Parts that a model may be without. Files say so by leaving the field out, by null, by 0 or false,
 * or by an empty list. Numbers of which 0 is one like any other ("max_window_layers") are not here.
 */
static const char *const optional_fields[] = {
    "num_key_value_heads",
    "head_dim",
    "quantization",
    "quantization_config",
    "text_config",
    "logit_scale",
    "n_routed_experts",
    "n_shared_experts",
    "moe_num_shared_experts",
    "shared_intermediate_size",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "first_k_dense_replace",
    "q_lora_rank",
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "shared_expert_intermediate_size",
    "clip_qkv",
    "moe_latent_size",
    "moe_shared_expert_intermediate_size",
    "query_pre_attn_scalar",
    "rope_local_base_freq",
    "sliding_window",
    "sliding_window_pattern",
    "layer_types",
    "use_bidirectional_attention",
    "num_global_key_value_heads",
    "num_kv_shared_layers",
    "hidden_size_per_layer_input",
    "enable_moe_block",
    "top_k_experts",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "no_rope_layers",
    "no_rope_layer_interval",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
    "attention_out_bias",
    "swiglu_alpha",
    "swiglu_limit",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "rope_scaling",
    "rope_parameters",
    "original_max_position_embeddings",
    /* members of rope_scaling and rope_parameters */
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    /* members of quantization_config */
    "weight_block_size",
    "kv_cache_scheme",
    "transform_config",
    /* members of generation_config.json */
    "repetition_penalty",
};

static bool is_none(const cJSON *node) {
    if (cJSON_IsArray(node) || cJSON_IsObject(node)) return !node->child;
    return cJSON_IsFalse(node) || (cJSON_IsNumber(node) && node->valuedouble == 0);
}

static bool is_optional_field(const char *name) {
    for (size_t i = 0; name && i < sizeof optional_fields / sizeof optional_fields[0]; i++)
        if (strcmp(name, optional_fields[i]) == 0) return true;
    return false;
}

void model_config_none_to_null(cJSON *object, int depth) {
    cJSON *node;
    cJSON_ArrayForEach(node, object) {
        if (cJSON_IsObject(node) && depth > 1) model_config_none_to_null(node, depth - 1);
        if (is_optional_field(node->string) && is_none(node)) node->type = cJSON_NULL;
    }
}
