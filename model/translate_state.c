/* Layers with a recurrent state, and latent attention, in a GGUF file. */
#include <string.h>

#include "base/json.h"
#include "model/translation.h"

/* Does any layer have the tensor? */
static bool in_a_layer(const struct translation *t, enum role role) {
    char name[TENSOR_NAME_MAX];
    for (int i = 0; i < LAYERS_MAX; i++) {
        tensor_name(name, NAMING_GGUF_MAMBA, role, i, 0);
        if (weights_find(t->weights, name)) return true;
    }
    return false;
}

/* Layers without KV heads are Mamba-2 or, where they have a width, a network. */
int translate_nemotron(const struct translation *t) {
    const cJSON *layers = json_get(t->config, "num_hidden_layers");
    const struct gguf_value *heads = NULL, *widths = NULL;
    const bool routed = json_get(t->config, "num_local_experts");
    double eps = 0;
    int64_t shared = 0;
    char key[KEY_MAX];
    cJSON_DeleteItemFromObjectCaseSensitive(t->config, "shared_expert_intermediate_size");
    int rc = translation_int(t, ".expert_shared_feed_forward_length", &shared);
    if (!rc && shared)
        rc = translation_set(t, t->config, "moe_shared_expert_intermediate_size", (double)shared);
    if (!rc) rc = translation_list(t, KEY_KV_HEADS, GGUF_I32, &heads);
    if (!rc) rc = translation_list(t, KEY_WIDTH, GGUF_I32, &widths);
    if (!rc && !(layers && heads && widths && (double)heads->count >= layers->valuedouble &&
                 (double)widths->count >= layers->valuedouble))
        rc = fault_set(t->fault, ERR_INVALID,
                       translation_key(t, heads ? KEY_WIDTH : KEY_KV_HEADS, key),
                       "expected a number for each layer");
    if (!rc) rc = translation_num(t, ".attention.layer_norm_epsilon", &eps);
    if (!rc && eps > 0 && !json_get(t->config, "rms_norm_eps"))
        rc = translation_set(t, t->config, "rms_norm_eps", eps);
    cJSON *types = rc ? NULL : cJSON_AddArrayToObject(t->config, "layer_types");
    for (size_t i = 0; types && (double)i < layers->valuedouble; i++) {
        const bool network = gguf_element_int(widths, i) > 0;
        const bool attends = !network && gguf_element_int(heads, i) > 0;
        cJSON *type = cJSON_CreateString(attends    ? "attention"
                                         : !network ? "mamba"
                                         : routed   ? "moe"
                                                    : "mlp");
        if (!type || !cJSON_AddItemToArray(types, type)) return translation_no_memory(t);
    }
    return rc || types ? rc : translation_no_memory(t);
}

/* Files have the width of all heads together. */
static int translate_states(const struct translation *t) {
    const bool mamba = t->row->mamba;
    int64_t width = 0;
    if (!mamba && !t->row->delta) return 0;
    int rc = translation_int(t, ".ssm.inner_size", &width);
    if (mamba &&
        !cJSON_AddBoolToObject(t->config, "mamba_conv_bias", in_a_layer(t, ROLE_MAMBA_CONV_BIAS)))
        return translation_no_memory(t);
    const cJSON *heads = json_get(t->config, mamba ? "mamba_n_heads" : "linear_num_value_heads");
    if (rc || !heads || width <= 0) return rc;
    return translation_set(t, t->config, mamba ? "mamba_d_head" : "linear_value_head_dim",
                           (double)width / heads->valuedouble);
}

/* Layers that predict further tokens are listed behind the others. */
int translate_delta(const struct translation *t) {
    static const char list[] = ".attention.recurrent_layers";
    const cJSON *layers = json_get(t->config, "num_hidden_layers");
    const struct gguf_value *value = NULL;
    int rc = translate_states(t);
    if (!rc && t->row->delta) rc = translation_list(t, list, GGUF_BOOL, &value);
    if (rc || !value) return rc;
    cJSON *types = rc ? NULL : cJSON_AddArrayToObject(t->config, "layer_types");
    for (size_t i = 0; types && layers && i < value->count && (double)i < layers->valuedouble;
         i++) {
        cJSON *type = cJSON_CreateString(value->data[i] ? "linear_attention" : "full_attention");
        if (!type || !cJSON_AddItemToArray(types, type)) return translation_no_memory(t);
    }
    return rc || types ? rc : translation_no_memory(t);
}

/* Factors are in the numbers of the file. */
int translate_falcon(const struct translation *t) {
    const bool norm = in_a_layer(t, ROLE_MAMBA_NORM);
    return cJSON_AddBoolToObject(t->config, "mamba_rms_norm", norm) &&
                   cJSON_AddBoolToObject(t->config, "mamba_norm_before_gate", false)
               ? 0
               : translation_no_memory(t);
}

/* Files of Granite 4-H have one width of networks, of experts where there are any, and that of the
 * network beside them. A switch says that attention does not rotate. */
int translate_granite(const struct translation *t) {
    const bool routed = json_get(t->config, "num_local_experts");
    bool rotates = true;
    char key[KEY_MAX];
    int64_t width = 0;
    int rc =
        gguf_bool(t->gguf, translation_key(t, ".rope.scaling.finetuned", key), &rotates, t->fault);
    if (!rc)
        rc = translation_int(
            t, routed ? ".expert_shared_feed_forward_length" : ".feed_forward_length", &width);
    if (rc) return rc;
    cJSON_DeleteItemFromObjectCaseSensitive(t->config, "shared_expert_intermediate_size");
    if (!cJSON_AddStringToObject(t->config, "position_embedding_type", rotates ? "rope" : "nope") ||
        (!routed && !cJSON_AddNullToObject(t->config, "num_local_experts")))
        return translation_no_memory(t);
    return translation_set(t, t->config, "shared_intermediate_size", (double)width);
}

/* ---- Latent attention ---- */

/* Files of "deepseek2" are of DeepSeek V2, or of V3 and the families that choose experts as it
 * does.
 */
bool translate_latent_sigmoid(const struct translation *t) {
    int64_t function = 0;
    return t->row->latent && translation_int(t, ".expert_gating_func", &function) == 0 &&
           function == GATING_SIGMOID;
}

/* The model_type of a file with latent attention. */
const char *translate_latent_type(const struct translation *t) {
    if (translate_latent_sigmoid(t)) return "deepseek_v3";
    return translation_has(t, ".attention.temperature_scale") ? "mistral4" : t->row->type;
}

/* Older files have the heads' sizes under the names of what is cached in newer ones. A 0 means that
 * the model has none, whatever its family has where config.json says nothing. */
int translate_latent(const struct translation *t) {
    static const char *const counts[] = {
        "first_k_dense_replace", "n_shared_experts",     "n_group", "topk_group",
        "q_lora_rank",           "routed_scaling_factor"};
    int64_t rank = 0, down = 0, turned = 0, key = 0, value = 0;
    int rc = translation_int(t, ".attention.key_length", &key);
    if (!rc) rc = translation_int(t, ".attention.value_length", &value);
    if (!rc) rc = translation_int(t, ".attention.key_length_mla", &key);
    if (!rc) rc = translation_int(t, ".attention.value_length_mla", &value);
    if (!rc) rc = translation_int(t, ".attention.kv_lora_rank", &rank);
    if (!rc) rc = translation_int(t, ".attention.q_lora_rank", &down);
    if (!rc) rc = translation_int(t, ".rope.dimension_count", &turned);
    if (!rc) rc = translation_set(t, t->config, "kv_lora_rank", (double)rank);
    if (!rc && down) rc = translation_set(t, t->config, "q_lora_rank", (double)down);
    if (!rc) rc = translation_set(t, t->config, "qk_rope_head_dim", (double)turned);
    if (!rc) rc = translation_set(t, t->config, "qk_nope_head_dim", (double)(key - turned));
    if (!rc) rc = translation_set(t, t->config, "v_head_dim", (double)value);
    for (size_t i = 0; i < sizeof counts / sizeof *counts && !rc; i++)
        if (!json_get(t->config, counts[i]) && !cJSON_AddNullToObject(t->config, counts[i]))
            rc = translation_no_memory(t);
    if (!rc && strcmp(translate_latent_type(t), "deepseek_v2") == 0 &&
        !cJSON_AddStringToObject(t->config, "topk_method",
                                 json_get(t->config, "n_group") ? "group_limited_greedy"
                                                                : "greedy"))
        rc = translation_no_memory(t);
    return rc;
}
