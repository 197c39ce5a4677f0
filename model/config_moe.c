/* Mixtures of experts: which layers are routed, how experts are chosen, what is beside them. */
#include <math.h>
#include <string.h>

#include "base/json.h"
#include "model/config_family.h"
#include "model/internal.h"

/* transformers, Glm4MoeLite, lists the layers; files of DeepSeek say that every one is routed. */
static int read_mlp_types(const cJSON *root, struct model_config *out, struct fault *fault) {
    static const char name[] = "mlp_layer_types";
    const cJSON *list = json_get(root, name), *item;
    int64_t every = 1;
    int layer = 0;
    int rc = json_int(root, NULL, "moe_layer_freq", 1, INT32_MAX, &every, fault);
    if (!rc && every != 1)
        rc = fault_set(fault, ERR_UNSUPPORTED, "moe_layer_freq", "%lld is not supported",
                       (long long)every);
    if (rc || !list) return rc;
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) != out->layers)
        return fault_set(fault, ERR_INVALID, name, "expected an array of %d types", out->layers);
    cJSON_ArrayForEach(item, list) {
        const char *type = cJSON_IsString(item) ? item->valuestring : "";
        const bool routed = strcmp(type, "sparse") == 0;
        if (!routed && strcmp(type, "dense") != 0)
            return fault_set(fault, ERR_UNSUPPORTED, name, "\"%.64s\" is not supported", type);
        out->per_layer[layer++].routed = routed;
    }
    return 0;
}

/* The layers that are routed. */
static int read_routed(const cJSON *root, const struct family *family, struct model_config *out,
                       struct fault *fault) {
    const bool some = family->experts == EXPERTS_SOME_LAYERS;
    const bool ernie = family->experts == EXPERTS_ERNIE;
    const cJSON *list = some ? json_get(root, "mlp_only_layers") : NULL, *item;
    int64_t every = 1, layer, first = family->first_dense, last = -1;
    int rc = some ? json_int(root, NULL, "decoder_sparse_step", 1, INT32_MAX, &every, fault) : 0;
    if (!rc && model_config_has(root, "first_k_dense_replace")) first = 0;
    if (!rc) rc = json_int(root, NULL, "first_k_dense_replace", 0, INT32_MAX, &first, fault);
    if (!rc && ernie)
        rc = json_int(root, NULL, "moe_layer_start_index", 0, INT32_MAX, &first, fault);
    if (!rc && ernie) rc = json_int(root, NULL, "moe_layer_end_index", -1, INT32_MAX, &last, fault);
    if (!rc && ernie) rc = json_int(root, NULL, "moe_layer_interval", 1, INT32_MAX, &every, fault);
    if (rc) return rc;
    for (int i = 0; i < out->layers; i++)
        out->per_layer[i].routed = (i + 1) % every == 0 && i >= first && (last < 0 || i <= last);
    if (family->latent) return read_mlp_types(root, out, fault);
    if (list && !cJSON_IsArray(list))
        return fault_set(fault, ERR_INVALID, "mlp_only_layers", "expected an array");
    cJSON_ArrayForEach(item, list) {
        if (json_node_int(item, 0, INT32_MAX, &layer))
            return fault_set(fault, ERR_INVALID, "mlp_only_layers", "expected numbers of layers");
        if (layer < out->layers) out->per_layer[layer].routed = false;
    }
    return 0;
}

/* The field that the file has; `last` where it has none of them. */
static const char *first_key(const cJSON *root, const char *a, const char *b, const char *c,
                             const char *last) {
    return a && json_get(root, a)   ? a
           : b && json_get(root, b) ? b
           : c && json_get(root, c) ? c
                                    : last;
}

/* transformers, DeepseekV2: "greedy" chooses no groups. */
static int read_topk_method(const cJSON *root, struct model_config *out, int64_t *groups,
                            struct fault *fault) {
    static const char name[] = "topk_method";
    const char *method = "greedy";
    int rc = json_str(root, NULL, name, &method, fault);
    if (rc) return rc;
    const bool limited = strcmp(method, "group_limited_greedy") == 0;
    if (!limited && strcmp(method, "greedy") != 0)
        return fault_set(fault, ERR_UNSUPPORTED, name, "\"%.64s\" is not supported", method);
    if (out->experts_normalised)
        return fault_set(fault, ERR_UNSUPPORTED, "norm_topk_prob",
                         "true is not supported in deepseek_v2 models");
    if (!limited) *groups = 1;
    out->expert_group_best = limited;
    return 0;
}

/* How experts are chosen. */
static int moe_read_choice(const cJSON *root, const struct family *family, struct model_config *out,
                           struct fault *fault) {
    const char *function = family->sigmoid ? "sigmoid" : "softmax", *found = function;
    int64_t groups = 1, used = 1;
    double scale = 1;
    if (family->group_count && !model_config_has(root, "n_group")) groups = family->group_count;
    if (family->expert_scale > 0 && !model_config_has(root, "routed_scaling_factor"))
        scale = family->expert_scale;
    int rc = json_str(root, NULL, "scoring_func", &found, fault);
    if (!rc) rc = json_int(root, NULL, "n_group", 1, KERN_EXPERT_GROUPS_MAX, &groups, fault);
    if (groups > 1 && family->groups_used && !model_config_has(root, "topk_group"))
        used = family->groups_used < groups ? family->groups_used : groups;
    if (!rc) rc = json_int(root, NULL, "topk_group", 1, groups, &used, fault);
    if (!rc) rc = json_num(root, NULL, "routed_scaling_factor", 1e-3, 1e3, &scale, fault);
    if (rc) return rc;
    /* "noaux_tc" is a sigmoid with a bias that only selects. */
    if (strcmp(found, function) != 0 && !(family->sigmoid && strcmp(found, "noaux_tc") == 0))
        return fault_set(fault, ERR_UNSUPPORTED, "scoring_func",
                         "\"%.64s\" is not supported in %s models", found, family->model_type);
    if (groups > 1 && (out->experts % groups || out->experts / groups < 2 ||
                       used * (out->experts / groups) < out->experts_used))
        return fault_set(fault, ERR_INVALID, "n_group",
                         "%lld of %lld groups of %d experts, of which %d are used", (long long)used,
                         (long long)groups, out->experts, out->experts_used);
    if (family->group_best) rc = read_topk_method(root, out, &groups, fault);
    if (rc) return rc;
    out->expert_groups = (int)groups;
    out->expert_groups_used = (int)used;
    out->expert_scale = (float)scale;
    return 0;
}

/* The network that every token uses beside experts. */
static int read_shared(const cJSON *root, const struct family *family, struct model_config *out,
                       struct fault *fault) {
    const char *key = first_key(root, "moe_num_shared_experts", NULL, NULL, "n_shared_experts");
    int64_t count = model_config_has(root, key) ? 0 : family->shared_count,
            width = family->shared_gate_ff;
    if (family->shared_ff && !model_config_has(root, family->shared_width))
        width = family->shared_ff;
    int rc = json_int(root, NULL, key, 1, 1024, &count, fault);
    const char *width_key =
        family->shared_gate_ff ? "shared_expert_intermediate_size" : family->shared_width;
    if (!rc && width_key) rc = json_int(root, NULL, width_key, 1, 1 << 20, &width, fault);
    if (!rc && family->nemotron && width == 0)
        rc = fault_set(fault, ERR_INVALID, family->shared_width, "missing");
    if (rc) return rc;
    if (family->shared_experts) width = count * out->expert_ff;
    if (width > 1 << 20)
        return fault_set(fault, ERR_INVALID, key, "%lld experts are too wide", (long long)count);
    out->shared_ff = (int)width;
    out->shared_experts = width > 0;
    out->shared_gate = family->shared_gate_ff > 0;
    return 0;
}

/* Reads the network that every token uses beside the experts. In transformers' Gemma4 it is as wide
 * as the network of a layer without experts. */
static int read_beside(struct model_config *out, struct fault *fault) {
    for (int i = 0; i < out->layers; i++)
        if (out->per_layer[i].wide_ff)
            return fault_set(fault, ERR_UNSUPPORTED, "use_double_wide_mlp",
                             "true is not supported beside enable_moe_block");
    out->shared_ff = out->d_ff;
    out->shared_experts = true;
    out->router_scale = 1 / sqrtf((float)out->d_model);
    return 0;
}

/* Files before transformers 5 say num_experts for Qwen's num_local_experts. */
int model_config_read_experts(const cJSON *root, const struct family *family,
                              struct model_config *out, struct fault *fault) {
    const bool all =
        family->experts == EXPERTS_ALL_LAYERS || family->experts == EXPERTS_ALL_BY_FLAG;
    const bool some = family->experts == EXPERTS_SOME_LAYERS;
    const char *count_key =
        first_key(root, "num_experts", "n_routed_experts", "moe_num_experts", "num_local_experts");
    const char *used_key = first_key(root, "moe_k", "top_k_experts", NULL, "num_experts_per_tok");
    const char *const keys[] = {count_key, used_key,
                                all ? "intermediate_size" : "moe_intermediate_size"};
    const int64_t most[] = {1024, 64, 1 << 20};
    int64_t values[3] = {0};
    const bool says_none =
        !json_get(root, count_key) &&
        (model_config_has(root, "num_experts") || model_config_has(root, "num_local_experts"));
    const bool by_types = family->experts == EXPERTS_BY_TYPES;
    if (says_none && (some || family->granite_hybrid)) /* every layer is dense */
        return out->d_ff ? 0 : fault_set(fault, ERR_INVALID, "intermediate_size", "missing");
    if (by_types && routed_layers(out) == 0) return 0;
    if (family->experts == EXPERTS_BESIDE && !out->gemma4_experts) return 0;
    for (size_t i = 0; i < 3; i++) {
        if (!json_get(root, keys[i])) return fault_set(fault, ERR_INVALID, keys[i], "missing");
        int rc = json_int(root, NULL, keys[i], 1, most[i], &values[i], fault);
        if (rc) return rc;
    }
    out->experts = (int)values[0];
    out->experts_used = (int)values[1];
    out->expert_ff = (int)values[2];
    int64_t latent = 0;
    int rc = json_int(root, NULL, "moe_latent_size", 1, 1 << 16, &latent, fault);
    if (rc) return rc;
    out->expert_latent = (int)latent;
    out->experts_narrow = latent > 0;
    if (out->experts_used > out->experts)
        return fault_set(fault, ERR_INVALID, keys[1], "%d of %d experts", out->experts_used,
                         out->experts);
    const bool says = some || by_types || family->experts == EXPERTS_ALL_BY_FLAG ||
                      family->experts == EXPERTS_AFTER_DENSE;
    out->experts_normalised = !says || family->experts_normalised;
    out->mixtral_names = family->mixtral_names;
    out->ernie_names = family->experts == EXPERTS_ERNIE;
    out->experts_sigmoid = family->sigmoid;
    out->select_bias = family->select_bias;
    if (family->lfm2) rc = json_bool(root, NULL, "use_expert_bias", &out->select_bias, fault);
    if (rc) return rc;
    rc = says ? json_bool(root, NULL, "norm_topk_prob", &out->experts_normalised, fault) : 0;
    if (rc) return rc;
    if (!by_types) rc = read_routed(root, family, out, fault);
    if (!rc) rc = moe_read_choice(root, family, out, fault);
    if (!rc) rc = read_shared(root, family, out, fault);
    if (!rc && out->gemma4_experts) rc = read_beside(out, fault);
    if (!rc && routed_layers(out) == 0) {
        out->experts = out->experts_used = out->expert_ff = out->shared_ff = out->expert_latent = 0;
        out->shared_experts = out->shared_gate = out->select_bias = out->experts_narrow = false;
    }
    if (!rc && !out->d_ff && routed_layers(out) < out->layers)
        rc = fault_set(fault, ERR_INVALID, "intermediate_size", "missing");
    return rc;
}
