/* Layers with a recurrent state, and what their families have beside: LFM2's short convolution, the
 * gated delta rules of Qwen3-Next and Qwen3.5, Mamba-2 of Granite 4-H, Falcon-H1 and Nemotron-H. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "base/json.h"
#include "model/config_family.h"

/* transformers, Lfm2MLP: the width of the networks is 2/3 of what the file says, times a factor,
 * rounded up to a multiple. */
static int adjust_width(const cJSON *root, struct model_config *out, struct fault *fault) {
    bool adjusts = true;
    double factor = 1;
    int64_t multiple = 256;
    int rc = json_bool(root, NULL, "block_auto_adjust_ff_dim", &adjusts, fault);
    if (!rc) rc = json_num(root, NULL, "block_ffn_dim_multiplier", 1e-3, 1e3, &factor, fault);
    if (!rc) rc = json_int(root, NULL, "block_multiple_of", 1, 1 << 16, &multiple, fault);
    if (rc || !adjusts) return rc;
    const double width = floor(factor * floor(2.0 * out->d_ff / 3));
    if (width < 1 || width > 1 << 20)
        return fault_set(fault, ERR_INVALID, "block_ffn_dim_multiplier",
                         "a feed-forward width of %g", width);
    out->d_ff = (int)(((int64_t)width + multiple - 1) / multiple * multiple);
    return 0;
}

static int read_lfm2(const cJSON *root, const struct family *family, struct model_config *out,
                     struct fault *fault) {
    int64_t width = 3;
    bool bias = false;
    int rc = json_int(root, NULL, "conv_L_cache", 2, KERN_TAPS_MAX, &width, fault);
    if (!rc) rc = json_bool(root, NULL, "conv_bias", &bias, fault);
    if (!rc && bias) rc = fault_set(fault, ERR_UNSUPPORTED, "conv_bias", "true is not supported");
    out->lfm2_names = true;
    out->conv_width = out->state_layers ? (int)width : 0;
    return rc || family->experts ? rc : adjust_width(root, out, fault);
}

/* transformers, Qwen3Next and Qwen3_5: norms by 1 + w, a gate beside each head's query. */
static int read_delta(const cJSON *root, const struct family *family, struct model_config *out,
                      struct fault *fault) {
    static const struct {
        const char *key;
        int64_t absent, most;
    } sizes[] = {{"linear_num_key_heads", 16, 1024},
                 {"linear_num_value_heads", 32, 1024},
                 {"linear_key_head_dim", 128, KERN_STATE_ROWS_MAX},
                 {"linear_value_head_dim", 128, 1024},
                 {"linear_conv_kernel_dim", 4, KERN_TAPS_MAX}};
    int64_t n[5];
    bool gate = true;
    int rc = json_bool(root, NULL, "attn_output_gate", &gate, fault);
    for (size_t i = 0; i < 5 && !rc; i++) {
        n[i] = sizes[i].absent;
        rc = json_int(root, NULL, sizes[i].key, i == 4 ? 2 : 1, sizes[i].most, &n[i], fault);
    }
    if (rc) return rc;
    if (!gate || out->qkv_bias)
        return fault_set(fault, ERR_UNSUPPORTED, gate ? "attention_bias" : "attn_output_gate",
                         "%s is not supported in %s models", gate ? "true" : "false",
                         family->model_type);
    if (n[1] % n[0])
        return fault_set(fault, ERR_INVALID, "linear_num_value_heads",
                         "%lld value heads cannot share %lld key heads", (long long)n[1],
                         (long long)n[0]);
    if (n[2] % 4)
        return fault_set(fault, ERR_UNSUPPORTED, "linear_key_head_dim",
                         "%lld is not a multiple of 4", (long long)n[2]);
    out->attn_gate = out->qwen35_names = true;
    out->qwen3_next_names = family->qwen3_next;
    out->norm_offset = 1;
    if (!out->state_layers) return 0;
    out->conv_width = (int)n[4];
    out->delta = (struct kern_delta){.heads_k = (int)n[0],
                                     .heads_v = (int)n[1],
                                     .dim_k = (int)n[2],
                                     .dim_v = (int)n[3],
                                     .width = (int)n[4]};
    return 0;
}

/* Fields beside Mamba-2 that have one value only. */
static int refuse_mamba(const cJSON *root, struct fault *fault) {
    static const char *const biases[] = {"mamba_proj_bias", "projectors_bias"};
    /* from 0 to infinity, which is null here, or transformers' object */
    const cJSON *limit = json_get(root, "time_step_limit"), *item;
    const char *act = "silu";
    bool bias = false, limited = false;
    int rc = json_str(root, NULL, "mamba_hidden_act", &act, fault);
    for (size_t i = 0; i < sizeof biases / sizeof *biases && !rc; i++) {
        rc = json_bool(root, NULL, biases[i], &bias, fault);
        if (!rc && bias) rc = fault_set(fault, ERR_UNSUPPORTED, biases[i], "true is not supported");
    }
    if (rc) return rc;
    if (strcmp(act, "silu") != 0)
        return fault_set(fault, ERR_UNSUPPORTED, "mamba_hidden_act",
                         "\"%.64s\" is not supported, only \"silu\"", act);
    cJSON_ArrayForEach(item, limit) {
        const bool least = item == limit->child && cJSON_IsNumber(item) && item->valuedouble <= 0;
        const bool most = item != limit->child && cJSON_IsNumber(item) &&
                          item->valuedouble > (double)FLT_MAX; /* Nemotron 3 Ultra */
        limited = limited || !(least || most || cJSON_IsNull(item) || cJSON_IsObject(item));
    }
    if (!limited) return 0;
    return fault_set(fault, ERR_UNSUPPORTED, "time_step_limit",
                     "a limit of steps is not supported");
}

/* Reads the Mamba-2 layers of transformers' GraniteMoeHybrid, FalconH1 and NemotronH. */
static int read_mamba(const cJSON *root, const struct family *family, struct model_config *out,
                      struct fault *fault) {
    static const struct {
        const char *key;
        int64_t absent, most, nemotron;
    } sizes[] = {{"mamba_n_heads", 128, 4096, 0},
                 {"mamba_n_groups", 1, 4096, 8},
                 {"mamba_d_state", 256, KERN_STATE_ROWS_MAX, 128},
                 {"mamba_d_conv", 4, KERN_TAPS_MAX, 0},
                 {"mamba_expand", 2, 64, 0}};
    const cJSON *head = json_get(root, "mamba_d_head");
    int64_t n[5], dim = family->nemotron ? 64 : 0;
    int rc = refuse_mamba(root, fault);
    for (size_t i = 0; i < 5 && !rc; i++) {
        n[i] = family->nemotron && sizes[i].nemotron ? sizes[i].nemotron : sizes[i].absent;
        rc = json_int(root, NULL, sizes[i].key, i == 3 ? 2 : 1, sizes[i].most, &n[i], fault);
    }
    if (!rc && !(head && cJSON_IsString(head))) /* "auto" */
        rc = json_int(root, NULL, "mamba_d_head", 1, 1024, &dim, fault);
    out->conv_bias = true;
    if (!rc) rc = json_bool(root, NULL, "mamba_conv_bias", &out->conv_bias, fault);
    if (rc) return rc;
    int64_t inner = n[4] * out->d_model;
    if (family->falcon) rc = json_int(root, NULL, "mamba_d_ssm", 1, 1 << 20, &inner, fault);
    if (rc) return rc;
    if (!dim) dim = inner / n[0];
    if (n[0] % n[1] || !dim)
        return fault_set(fault, ERR_INVALID, "mamba_n_heads", "%lld heads in %lld groups",
                         (long long)n[0], (long long)n[1]);
    if (n[2] % 4)
        return fault_set(fault, ERR_UNSUPPORTED, "mamba_d_state", "%lld is not a multiple of 4",
                         (long long)n[2]);
    out->mamba_names = family->granite_hybrid;
    out->nemotron_names = out->ungated = family->nemotron;
    out->falcon_names = family->falcon;
    out->mamba_norm = !family->falcon;
    if (family->nemotron) out->activation = KERN_RELU;
    if (!out->state_layers) return 0;
    out->conv_width = (int)n[3];
    out->mamba = (struct kern_mamba){.heads = (int)n[0],
                                     .groups = (int)n[1],
                                     .dim = (int)dim,
                                     .dim_state = (int)n[2],
                                     .width = (int)n[3],
                                     .eps = out->post_eps};
    return 0;
}

/* Numbers above 0; absent: 1 each. */
static int read_factor_list(const cJSON *root, const char *name, int count, double *out,
                            struct fault *fault) {
    const cJSON *list = json_get(root, name), *item;
    int found = 0;
    for (int i = 0; i < count; i++) out[i] = 1;
    if (!list) return 0;
    cJSON_ArrayForEach(item, list) {
        if (found < count && cJSON_IsNumber(item) && item->valuedouble >= 1e-6 &&
            item->valuedouble <= 1e6)
            out[found++] = item->valuedouble;
    }
    if (cJSON_IsArray(list) && cJSON_GetArraySize(list) == count && found == count) return 0;
    return fault_set(fault, ERR_INVALID, name, "expected %d numbers from 1e-6 to 1e6", count);
}

/* transformers, FalconH1: factors on what enters and leaves attention, Mamba-2 and the network, on
 * embeddings and logits. */
static int read_falcon(const cJSON *root, struct model_config *out, struct fault *fault) {
    static const char *const names[] = {"embedding_multiplier",    "lm_head_multiplier",
                                        "attention_in_multiplier", "attention_out_multiplier",
                                        "key_multiplier",          "ssm_in_multiplier",
                                        "ssm_out_multiplier"};
    double f[7] = {1, 1, 1, 1, 1, 1, 1}, ssm[5], mlp[2];
    bool norm = false, before = true;
    int rc = read_factor_list(root, "ssm_multipliers", 5, ssm, fault);
    if (!rc) rc = read_factor_list(root, "mlp_multipliers", 2, mlp, fault);
    for (size_t i = 0; i < 7 && !rc; i++)
        rc = json_num(root, NULL, names[i], 1e-6, 1e6, &f[i], fault);
    if (!rc) rc = json_bool(root, NULL, "mamba_rms_norm", &norm, fault);
    if (!rc) rc = json_bool(root, NULL, "mamba_norm_before_gate", &before, fault);
    if (rc) return rc;
    if (norm && before)
        return fault_set(fault, ERR_UNSUPPORTED, "mamba_norm_before_gate",
                         "true is not supported beside mamba_rms_norm");
    bool bias = false; /* transformers multiplies it by these factors, too */
    if ((rc = json_bool(root, NULL, "attention_bias", &bias, fault))) return rc;
    if (bias && (f[3] != 1 || f[4] != 1))
        return fault_set(fault, ERR_UNSUPPORTED, "attention_bias",
                         "true is not supported beside %s",
                         f[4] != 1 ? "key_multiplier" : "attention_out_multiplier");
    out->mamba_norm = norm;
    out->embed_scale = (float)f[0];
    out->logit_scale = (float)f[1];
    out->factors = (struct model_factors){.q = (float)f[2],
                                          .k = (float)(f[2] * f[4]),
                                          .v = (float)f[2],
                                          .o = (float)f[3],
                                          .z = (float)(f[5] * ssm[0]),
                                          .x = (float)(f[5] * ssm[1]),
                                          .b = (float)(f[5] * ssm[2]),
                                          .c = (float)(f[5] * ssm[3]),
                                          .dt = (float)(f[5] * ssm[4]),
                                          .state_out = (float)f[6],
                                          .gate = (float)mlp[0],
                                          .down = (float)mlp[1]};
    return 0;
}

/* transformers, GraniteMoeHybrid: without experts the network beside them is the only one. */
static int read_granite_width(const cJSON *root, struct model_config *out, struct fault *fault) {
    int64_t width = 1024;
    int rc = json_int(root, NULL, "shared_intermediate_size", 1, 1 << 20, &width, fault);
    if (!rc) out->d_ff = (int)width;
    return rc;
}

int model_config_read_states(const cJSON *root, const struct family *family,
                             struct model_config *out, struct fault *fault) {
    int rc = family->lfm2 ? read_lfm2(root, family, out, fault) : 0;
    if (!rc && family->delta) rc = read_delta(root, family, out, fault);
    if (!rc && family->mamba) rc = read_mamba(root, family, out, fault);
    if (!rc && family->granite_hybrid) rc = read_granite_width(root, out, fault);
    if (!rc && family->falcon) rc = read_falcon(root, out, fault);
    return rc;
}
