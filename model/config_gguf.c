/* Translates the metadata of a GGUF file to the words of config.json, so that one parser reads and
 * checks both formats. Faults are translated back to the keys of the file. */
#include "model/config_gguf.h"

#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "model/base_digest.h"
#include "model/digest_field.h"
#include "model/internal.h"
#include "model/translation.h"

#define FUSED      "blk.0.attn_qkv.weight" /* q, k and v in one tensor */
#define FUSED_BIAS "blk.0.attn_qkv.bias"

/* Architectures by the names that files and config.json (model_type) have for them. */
static const struct architecture architectures[] = {
    {.name = "llama", .type = "llama", .mixture = "mixtral", .permuted = true},
    {.name = "qwen2", .type = "qwen2"},
    {.name = "qwen3", .type = "qwen3"},
    {.name = "qwen3moe", .type = "qwen3_moe"},
    {.name = "phi3", .type = "phi3"},
    {.name = "gemma2", .type = "gemma2", .heads_scale = 46},
    {.name = "gemma3", .type = "gemma3_text", .heads_scale = 62},
    {.name = "granite", .type = "granite", .permuted = true, .logit_scale = "logits_scaling"},
    {.name = "smollm3", .type = "smollm3", .permuted = true},
    {.name = "olmo2", .type = "olmo2", .windowed = "olmo3"},
    {.name = "exaone4", .type = "exaone4", .windows_said = true},
    {.name = "ernie4_5", .type = "ernie4_5", .permuted = true}, /* as the published weights are */
    {.name = "olmoe", .type = "olmoe", .unnormalised = true},
    {.name = "gpt-oss", .type = "gpt_oss", .yarn_untruncated = true, .norm_after_attention = true},
    {.name = "seed_oss", .type = "seed_oss", .norm_after_attention = true},
    {.name = "chatglm", .type = "glm", .permuted = true}, /* as the published weights are */
    {.name = "glm4", .type = "glm4", .permuted = true},
    {.name = "qwen2vl", .type = "qwen2_5_vl_text", .sections = true},
    {.name = "qwen3vl", .type = "qwen3_vl_text", .sections = true},
    {.name = "qwen3vlmoe", .type = "qwen3_vl_moe_text", .sections = true},
    {.name = "qwen2moe", .type = "qwen2_moe", .unnormalised = true},
    {.name = "glm4moe",
     .type = "glm4_moe",
     .norm_after_attention = true,
     .sigmoid = true,
     .qk_norm_told = true},
    {.name = "dots1", .type = "dots1", .windows_said = true, .unnormalised = true, .sigmoid = true},
    {.name = "ernie4_5-moe", .type = "ernie4_5_moe", .permuted = true},
    {.name = "minimax-m2", .type = "minimax_m2", .sigmoid = true},
    {.name = "muse-glimmer",
     .type = "muse_glimmer_text",
     .permuted = true,
     .logit_scale = "output_multiplier",
     .still_globals = true},
    {.name = "mistral3",
     .type = "ministral3",
     .permuted = true,
     .windows_said = true,
     .rope_told = true},
    {.name = "lfm2", .type = "lfm2", .headless = "conv"},
    {.name = "lfm2moe", .type = "lfm2_moe", .sigmoid = true, .headless = "conv"},
    {.name = "qwen3next", .type = "qwen3_next", .delta = true},
    {.name = "qwen35", .type = "qwen3_5_text", .sections = true, .delta = true},
    {.name = "qwen35moe", .type = "qwen3_5_moe_text", .sections = true, .delta = true},
    {.name = "granitehybrid",
     .type = "granitemoehybrid",
     .permuted = true,
     .logit_scale = "logits_scaling",
     .headless = "mamba",
     .mamba = true},
    {.name = "gemma4", .type = "gemma4_text", .kinds = true},
    /* one name for several families: latent_type */
    {.name = "deepseek2", .type = "deepseek_v2", .unnormalised = true, .latent = true},
    {.name = "mistral4", .type = "mistral4", .latent = true, .rope_told = true},
    {.name = "falcon-h1", .type = "falcon_h1", .mamba = true, .falcon = true},
    {.name = "nemotron_h", .type = "nemotron_h", .permuted = true, .mamba = true, .nemotron = true},
    {.name = "bert", .type = "bert", .encoder = true},
    {.name = "nomic-bert", .type = "nomic_bert", .encoder = true},
    {.name = "modern-bert", .type = "modernbert", .encoder = true},
    {.name = "gemma-embedding", .type = "gemma3_text", .both_ways = true, .heads_scale = 62},
    {.name = "nemotron_h_moe",
     .type = "nemotron_h",
     .permuted = true,
     .sigmoid = true,
     .mamba = true,
     .nemotron = true},
};

static const struct architecture *find_architecture(const char *name) {
    for (size_t i = 0; i < sizeof architectures / sizeof architectures[0]; i++)
        if (!strcmp(architectures[i].name, name)) return &architectures[i];
    return NULL;
}

bool model_gguf_permutes(const char *architecture, const char *family, bool *permutes) {
    const struct architecture *row = find_architecture(architecture);
    if (!row || row->falcon || row->still_globals) return false;
    const char *const types[] = {row->type, row->mixture, row->windowed};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (!types[i] || strcmp(types[i], family) != 0) continue;
        *permutes = row->permuted;
        return true;
    }
    return false;
}

static const struct row config_rows[] = {
    {".block_count", "num_hidden_layers", KIND_INT},
    {".context_length", "max_position_embeddings", KIND_INT},
    {".embedding_length", "hidden_size", KIND_INT},
    {".attention.head_count", "num_attention_heads", KIND_INT},
    {".attention.layer_norm_rms_epsilon", "rms_norm_eps", KIND_NUM},
    {".attention.layer_norm_epsilon", "rms_norm_eps", KIND_NUM},
    {".attention.sliding_window", "sliding_window", KIND_MORE},
    {".attn_logit_softcapping", "attn_logit_softcapping", KIND_NUM},
    {".final_logit_softcapping", "final_logit_softcapping", KIND_NUM},
    {".attention.scale", "attention_multiplier", KIND_NUM},
    {".embedding_scale", "embedding_multiplier", KIND_NUM},
    {".residual_scale", "residual_multiplier", KIND_NUM},
    {".expert_count", "num_local_experts", KIND_MORE},
    {".expert_used_count", "num_experts_per_tok", KIND_MORE},
    {".expert_feed_forward_length", "moe_intermediate_size", KIND_MORE},
    {".expert_shared_count", "n_shared_experts", KIND_MORE},
    {".expert_group_count", "n_group", KIND_MORE},
    {".expert_group_used_count", "topk_group", KIND_MORE},
    {".leading_dense_block_count", "first_k_dense_replace", KIND_MORE},
    {".interleave_moe_layer_step", "moe_layer_interval", KIND_MORE},
    {".nextn_predict_layers", "num_nextn_predict_layers", KIND_MORE},
    {".expert_shared_feed_forward_length", "shared_expert_intermediate_size", KIND_MORE},
    {".moe_latent_size", "moe_latent_size", KIND_MORE},
    {".shortconv.l_cache", "conv_L_cache", KIND_MORE},
    {".full_attention_interval", "full_attention_interval", KIND_MORE},
    {".rope.freq_base", "rope_theta", KIND_NUM},
    {".rope.freq_base_swa", "rope_local_base_freq", KIND_NUM},
    {"tokenizer.ggml.bos_token_id", "bos_token_id", KIND_TOKEN},
};

static const struct row delta_rows[] = {
    {".ssm.group_count", "linear_num_key_heads", KIND_MORE},
    {".ssm.time_step_rank", "linear_num_value_heads", KIND_MORE},
    {".ssm.state_size", "linear_key_head_dim", KIND_MORE},
    {".ssm.conv_kernel", "linear_conv_kernel_dim", KIND_MORE},
};

static const struct row mamba_rows[] = {
    {".ssm.group_count", "mamba_n_groups", KIND_MORE},
    {".ssm.time_step_rank", "mamba_n_heads", KIND_MORE},
    {".ssm.state_size", "mamba_d_state", KIND_MORE},
    {".ssm.conv_kernel", "mamba_d_conv", KIND_MORE},
};

static const struct row generation_rows[] = {
    {"general.sampling.temp", "temperature", KIND_NUM},
    {"general.sampling.top_p", "top_p", KIND_NUM},
    {"general.sampling.min_p", "min_p", KIND_NUM},
    {"general.sampling.top_k", "top_k", KIND_INT},
    {"general.sampling.penalty_repeat", "repetition_penalty", KIND_NUM},
};

/* Names of faults that no row has. */
static const struct row other_names[] = {
    {"general.architecture", "model_type", KIND_INT},
    {".rope.scaling.type", "rope_scaling.rope_type", KIND_INT},
    {".rope.scaling.factor", "rope_scaling.factor", KIND_NUM},
    {".rope.dimension_count", "partial_rotary_factor", KIND_NUM},
    {".attention.key_length", "head_dim", KIND_INT},
    {KEY_KV_HEADS, "num_key_value_heads", KIND_INT},
    {KEY_KV_HEADS, "layer_types", KIND_INT},
    {KEY_KV_HEADS, "num_global_key_value_heads", KIND_INT},
    {KEY_WIDTH, "intermediate_size", KIND_INT},
    {KEY_SHARED, "num_kv_shared_layers", KIND_INT},
    {KEY_EACH, "hidden_size_per_layer_input", KIND_INT},
    {".expert_count", "enable_moe_block", KIND_INT},
    {".attention.key_length", "global_head_dim", KIND_INT},
    {".ssm.inner_size", "linear_value_head_dim", KIND_INT},
    {".ssm.inner_size", "mamba_d_head", KIND_INT},
    {".expert_weights_scale", "routed_scaling_factor", KIND_NUM},
    {".attention.kv_lora_rank", "kv_lora_rank", KIND_INT},
    {".attention.q_lora_rank", "q_lora_rank", KIND_INT},
    {".rope.dimension_count", "qk_rope_head_dim", KIND_INT},
    {".attention.key_length_mla", "qk_nope_head_dim", KIND_INT},
    {".attention.value_length_mla", "v_head_dim", KIND_INT},
    {"tokenizer.ggml.eos_token_id", "eos_token_id", KIND_INT},
};

static int translate_tensors(const struct translation *t) {
    const struct tensor *embed = translation_tensor(t, ROLE_EMBED);
    bool tied = !translation_tensor(t, ROLE_HEAD);
    bool bias = translation_tensor(t, ROLE_Q_BIAS) || weights_find(t->weights, FUSED_BIAS);
    if (!embed || embed->dims != 2 || embed->shape[0] > INT32_MAX)
        return fault_set(t->fault, ERR_NOTFOUND, "token_embd.weight",
                         "tensor is missing, or no matrix");
    int rc = translation_set(t, t->config, "vocab_size", (double)embed->shape[0]);
    if (!rc && !cJSON_AddBoolToObject(t->config, "tie_word_embeddings", tied))
        rc = translation_no_memory(t);
    if (!rc && !cJSON_AddBoolToObject(t->config, "attention_bias", bias))
        rc = translation_no_memory(t);
    if (!rc && t->row->qk_norm_told &&
        !cJSON_AddBoolToObject(t->config, "use_qk_norm",
                               translation_tensor(t, ROLE_Q_NORM) != NULL))
        rc = translation_no_memory(t);
    return rc;
}

/* Tables of types have as many rows as their tensor. */
static int translate_encoder(const struct translation *t) {
    const struct tensor *types = weights_find(t->weights, "token_types.weight");
    char key[KEY_MAX];
    bool causal = false;
    const char *name = translation_key(t, ".attention.causal", key);
    int rc = gguf_bool(t->gguf, name, &causal, t->fault);
    if (!rc && causal) rc = fault_set(t->fault, ERR_UNSUPPORTED, name, "true is not supported");
    if (!rc)
        rc = translation_set(t, t->config, "type_vocab_size",
                             types && types->dims == 2 ? (double)types->shape[0] : 0);
    const struct tensor *labels = weights_find(t->weights, "cls.output.weight");
    if (rc || !labels || strcmp(t->row->type, "bert") != 0) return rc;
    cJSON *names = cJSON_AddArrayToObject(t->config, "architectures");
    cJSON *name_of = cJSON_CreateString("BertForSequenceClassification");
    if (!names || !name_of || !cJSON_AddItemToArray(names, name_of)) {
        cJSON_Delete(name_of);
        return translation_no_memory(t);
    }
    return translation_set(t, t->config, "num_labels",
                           labels->dims == 2 ? (double)labels->shape[0] : 1);
}

static int translate_experts(const struct translation *t) {
    const bool sigmoid = t->row->sigmoid || translate_latent_sigmoid(t);
    const int64_t own = sigmoid ? GATING_SIGMOID : GATING_SOFTMAX;
    double scale = 1;
    int64_t function = own;
    bool normalised = !t->row->unnormalised;
    char key[KEY_MAX];
    int rc = translation_num(t, ".expert_weights_scale", &scale);
    if (!rc && scale != 0 && scale != 1)
        rc = translation_set(t, t->config, "routed_scaling_factor", scale);
    if (!rc) rc = translation_more(t, ".expert_gating_func", &function);
    if (!rc && function != own && (sigmoid || function != GATING_SOFTMAX_OF_CHOSEN))
        rc = fault_set(t->fault, ERR_UNSUPPORTED, translation_key(t, ".expert_gating_func", key),
                       "%lld is not supported", (long long)function);
    if (!rc)
        rc = gguf_bool(t->gguf, translation_key(t, ".expert_weights_norm", key), &normalised,
                       t->fault);
    if (rc || !json_get(t->config, "num_local_experts")) return rc;
    /* Files of ERNIE have a width beside the count that says the same. */
    if (json_get(t->config, "n_shared_experts"))
        cJSON_DeleteItemFromObjectCaseSensitive(t->config, "shared_expert_intermediate_size");
    return cJSON_AddBoolToObject(t->config, "norm_topk_prob", normalised)
               ? 0
               : translation_no_memory(t);
}

/* Layers that predict further tokens are counted among the others. A file that counts none has
 * none. */
static int translate_mtp(const struct translation *t) {
    static const char name[] = "num_nextn_predict_layers";
    cJSON *layers = cJSON_GetObjectItemCaseSensitive(t->config, "num_hidden_layers");
    const cJSON *mtp = json_get(t->config, name);
    if (!mtp) return cJSON_AddNullToObject(t->config, name) ? 0 : translation_no_memory(t);
    if (layers) cJSON_SetNumberValue(layers, layers->valuedouble - mtp->valuedouble);
    return 0;
}

static const char *translated_type(const struct translation *t) {
    if (t->row->latent) return translate_latent_type(t);
    if (t->row->mixture && json_get(t->config, "num_local_experts")) return t->row->mixture;
    if (t->row->windowed && json_get(t->config, "sliding_window")) return t->row->windowed;
    return t->row->type;
}

/* A file that keepd saved says which matrices it was rounded from. */
static int read_base(const struct translation *t, struct packing *out) {
    char text[TEXT_MAX];
    int rc = translation_text(t, BASE_MATRICES_KEY, text);
    return rc || !text[0] ? rc : digest_read(text, BASE_MATRICES_KEY, out->base_matrices, t->fault);
}

/* The key of the scale of logits; the architecture may have a name of its own for it. */
static struct row logit_row(const struct translation *t) {
    const char *name = t->row ? t->row->logit_scale : NULL;
    return (struct row){".logit_scale", name ? name : "logit_scale", KIND_NUM};
}

static int translate(struct translation *t) {
    char architecture[TEXT_MAX];
    int rc = translation_text(t, "general.architecture", architecture);
    if (rc) return rc;
    if (!architecture[0])
        return fault_set(t->fault, ERR_INVALID, "general.architecture",
                         "missing: which model is this?");
    snprintf(t->architecture, sizeof t->architecture, "%.*s", ARCHITECTURE_MAX - 1, architecture);
    t->row = find_architecture(architecture);
    if (strcmp(architecture, "clip") == 0)
        return fault_set(t->fault, ERR_UNSUPPORTED, "general.architecture",
                         "this file (mmproj) reads pictures for a model: name the model's own");
    if (!t->row)
        return fault_set(
            t->fault, ERR_UNSUPPORTED, "general.architecture",
            "%.32s is not supported in GGUF files: llama, qwen2, qwen3, qwen3moe, phi3, "
            "gemma2, gemma3, granite, smollm3, olmo2, exaone4, ernie4_5, olmoe, gpt-oss, seed_oss, "
            "chatglm, glm4, glm4moe, qwen2moe, dots1, ernie4_5-moe, minimax-m2, qwen2vl, qwen3vl, "
            "qwen3vlmoe, mistral3, muse-glimmer, lfm2, lfm2moe, qwen3next, qwen35, qwen35moe, "
            "granitehybrid, gemma4, deepseek2, mistral4, nemotron_h, nemotron_h_moe, falcon-h1, "
            "bert, nomic-bert, modern-bert, gemma-embedding",
            architecture);
    rc = COPY_ROWS(t, config_rows, t->config);
    if (!rc) rc = translate_widths(t);
    if (!rc && !t->row->kinds) rc = translate_kv_heads(t);
    if (!rc && t->row->headless && !t->row->mamba &&
        !cJSON_AddBoolToObject(t->config, "block_auto_adjust_ff_dim", false))
        return translation_no_memory(t);
    const struct row logits = logit_row(t);
    if (!rc) rc = translation_copy(t, &logits, 1, t->config);
    if (!rc && !cJSON_AddStringToObject(t->config, "model_type", translated_type(t)))
        return translation_no_memory(t);
    if (!rc) rc = translate_experts(t);
    if (!rc) rc = translate_mtp(t);
    if (!rc && t->row->mamba) rc = COPY_ROWS(t, mamba_rows, t->config);
    if (!rc && t->row->delta) rc = COPY_ROWS(t, delta_rows, t->config);
    if (!rc) rc = translate_delta(t);
    if (!rc && t->row->mamba)
        rc = t->row->falcon     ? translate_falcon(t)
             : t->row->nemotron ? translate_nemotron(t)
                                : translate_granite(t);
    if (!rc) rc = COPY_ROWS(t, generation_rows, t->generation);
    if (!rc) rc = translate_windows(t);
    if (!rc) rc = translate_tensors(t);
    if (!rc && t->row->encoder) rc = translate_encoder(t);
    if (!rc && t->row->both_ways &&
        !cJSON_AddBoolToObject(t->config, "use_bidirectional_attention", true))
        rc = translation_no_memory(t);
    if (!rc && t->row->kinds) rc = translate_kinds(t);
    if (!rc && t->row->latent) rc = translate_latent(t);
    if (!rc && !t->row->kinds && !t->row->latent) rc = translate_head(t);
    if (!rc && !t->row->kinds) rc = translate_rope(t);
    if (!rc) rc = translate_ends(t);
    return rc;
}

static bool rename_in(const struct translation *t, const struct row *rows, size_t count) {
    struct fault *fault = t->fault;
    for (size_t i = 0; i < count; i++) {
        char key[KEY_MAX];
        if (strcmp(fault->field, rows[i].json) != 0) continue;
        snprintf(fault->field, sizeof fault->field, "%s", translation_key(t, rows[i].gguf, key));
        return true;
    }
    return false;
}

/* A field of config.json as the key that it came from. */
static void rename_field(const struct translation *t) {
    if (!t->fault) return;
    const struct row logits = logit_row(t);
    (void)(rename_in(t, config_rows, sizeof config_rows / sizeof config_rows[0]) ||
           rename_in(t, &logits, 1) ||
           rename_in(t, delta_rows, sizeof delta_rows / sizeof delta_rows[0]) ||
           rename_in(t, mamba_rows, sizeof mamba_rows / sizeof mamba_rows[0]) ||
           rename_in(t, other_names, sizeof other_names / sizeof other_names[0]));
}

int model_config_from_gguf(const struct weights *weights, int context, struct model_config *out,
                           struct fault *fault) {
    struct translation t = {.weights = weights,
                            .gguf = weights_gguf(weights),
                            .config = cJSON_CreateObject(),
                            .generation = cJSON_CreateObject(),
                            .fault = fault};
    *out = (struct model_config){0};
    int rc = t.config && t.generation ? translate(&t) : translation_no_memory(&t);
    if (!rc) {
        rc = model_config_read(t.config, t.generation, context, out, fault);
        if (rc) rename_field(&t);
    }
    if (!rc) rc = read_base(&t, &out->packing);
    if (!rc) {
        out->permuted_qk = t.row->permuted;
        out->norm_after_attention = t.row->norm_after_attention;
        out->latent_joined = t.row->latent && translation_has_tensor(&t, "attn_kv_b.weight");
        out->experts_joined =
            t.row->latent && translation_has_tensor(&t, "ffn_gate_up_exps.weight");
        if (out->glm_names) out->fused = weights_find(weights, FUSED) != NULL;
        out->norm_offset = 0; /* converters add Gemma's 1 */
    }
    cJSON_Delete(t.config);
    cJSON_Delete(t.generation);
    return rc;
}
