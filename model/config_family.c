/* The families: their defaults, which are those of the transformers classes, and the fields that
 * only some of them may have. */
#include "model/config_family.h"

#include <stddef.h>
#include <string.h>

#include "base/json.h"

#define GEMMA3                                                                                     \
    .rope_theta = 1e6, .sliding_window = 4096, .qk_norm = true, .windows = WINDOWS_PATTERN,        \
    .pattern = 6, .local_rope = true, .local_theta = 10000, .tied_embeddings = true,               \
    .gemma = true, .heads_q = 8, .heads_kv = 4, .vocab = 262208, .positions = 131072
#define MODERN_BERT                                                                                \
    .bert = true, .modern = true, .rms_eps = 1e-5, .rope_theta = 160000, .sliding_window = 128,    \
    .windows = WINDOWS_PATTERN, .pattern = 3, .from_first = true, .local_rope = true,              \
    .local_theta = 10000

static const struct family families[] = {
    {"Qwen3ForCausalLM", "qwen3", 128, .qk_norm = true, .windows = WINDOWS_BY_FLAG, .heads_kv = 32},
    {"Qwen2ForCausalLM", "qwen2", 0, .qkv_bias_always = true, .windows = WINDOWS_BY_FLAG,
     .heads_kv = 32},
    {"MiMoForCausalLM", "mimo", 0, .qkv_bias_always = true, .windows = WINDOWS_BY_FLAG,
     .heads_kv = 32},
    {"LlamaForCausalLM", "llama", 0, .windows = WINDOWS_NONE},
    {"MistralForCausalLM", "mistral", 0, .sliding_window = 4096, .windows = WINDOWS_ALL,
     .heads_kv = 8},
    {"Phi3ForCausalLM", "phi3", 0, .windows = WINDOWS_ALL, .fused = true, .rms_eps = 1e-5},
    {"SmolLM3ForCausalLM", "smollm3", 0, .rope_theta = 2e6, .windows = WINDOWS_BY_TYPES,
     .unrotated_layers_every = 4, .tied_embeddings = true, .heads_kv = 4},
    {"GraniteForCausalLM", "granite", 0, .factors = true, .embed_factor = true},
    {"Qwen3MoeForCausalLM", "qwen3_moe", 0, .sliding_window = 4096, .qk_norm = true,
     .windows = WINDOWS_ALL_BY_FLAG, .experts = EXPERTS_SOME_LAYERS, .heads_kv = 4},
    {"GptOssForCausalLM", "gpt_oss", 64, .rms_eps = 1e-5, .rope_theta = 150000,
     .sliding_window = 128, .windows = WINDOWS_PATTERN, .pattern = 2, .experts = EXPERTS_ALL_LAYERS,
     .gpt_oss = true, .heads_kv = 8},
    {"MixtralForCausalLM", "mixtral", 0, .rms_eps = 1e-5, .rope_theta = 1e6, .windows = WINDOWS_ALL,
     .experts = EXPERTS_ALL_LAYERS, .mixtral_names = true, .heads_kv = 8},
    {"Gemma3ForCausalLM", "gemma3_text", 256, GEMMA3},
    {"Gemma3TextModel", "gemma3_text", 256, GEMMA3},
    {"Gemma2ForCausalLM", "gemma2", 256, .sliding_window = 4096, .windows = WINDOWS_PATTERN,
     .pattern = 2, .tied_embeddings = true, .gemma = true, .attend_cap = 50, .logit_cap = 30,
     .heads_kv = 4},
    {"Olmo2ForCausalLM", "olmo2", 0, .rms_eps = 1e-5, .qk_norm = true, .wide_qk_norm = true,
     .norms_behind = true},
    {"Olmo3ForCausalLM", "olmo3", 0, .rms_eps = 1e-5, .rope_theta = 5e5, .sliding_window = 4096,
     .windows = WINDOWS_PATTERN, .pattern = 4, .local_rope = true, .qk_norm = true,
     .wide_qk_norm = true, .norms_behind = true},
    {"MinistralForCausalLM", "ministral", 0, .sliding_window = 4096, .windows = WINDOWS_ALL,
     .heads_kv = 8},
    {"SeedOssForCausalLM", "seed_oss", 128, .qkv_bias = true, .o_bias_apart = true, .heads_kv = 8},
    {"Ernie4_5ForCausalLM", "ernie4_5", 128, .interleaved = true, .rms_eps = 1e-5,
     .rope_theta = 5e5, .tied_embeddings = true, .heads_kv = 2},
    {"GlmForCausalLM", "glm", 128, .interleaved = true, .o_bias_apart = true, .rms_eps = 1.5625e-7,
     .partial_rotary = 0.5, .glm_names = true, .heads_kv = 2, .qkv_bias = true},
    {"Glm4ForCausalLM", "glm4", 128, .interleaved = true, .o_bias_apart = true,
     .rms_eps = 1.5625e-7, .partial_rotary = 0.5, .glm_names = true, .norms_around = true,
     .heads_kv = 2, .qkv_bias = true},
    {"OlmoeForCausalLM", "olmoe", 0, .rms_eps = 1e-5, .qk_norm = true, .wide_qk_norm = true,
     .experts = EXPERTS_ALL_BY_FLAG},
    {"Exaone4ForCausalLM", "exaone4", 0, .rms_eps = 1e-5, .sliding_window = 4096,
     .windows = WINDOWS_PATTERN, .pattern = 4, .still_globals = true, .qk_norm = true,
     .norms_behind = true, .heads_kv = 32},
    {"Qwen3VLForConditionalGeneration", "qwen3_vl_text", 128, .rope_theta = 5e5, .qk_norm = true,
     .sections = {AXES_INTERLEAVED, {24, 20, 20}}, .heads_kv = 32},
    {"Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text", 0, .rope_theta = 5e5,
     .qk_norm = true, .experts = EXPERTS_SOME_LAYERS, .experts_normalised = true,
     .sections = {AXES_INTERLEAVED, {24, 20, 20}}, .stacked_experts = true, .heads_kv = 16,
     .d_ff = 5632},
    {"Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", 0, .rms_eps = 1e-5, .rope_theta = 1e6,
     .sections = {AXES_APART, {16, 24, 24}}, .qkv_bias_always = true, .windows = WINDOWS_BY_FLAG,
     .heads_kv = 8},
    {"MuseGlimmerForConditionalGeneration", "muse_glimmer_text", 128, .rms_eps = 1e-5,
     .sliding_window = 2048, .windows = WINDOWS_PATTERN, .pattern = 4, .unrotated_layers_every = 4,
     .from_last = true, .qk_norm = true, .norms_around = true, .logit_cap = 20, .muse = true,
     .heads_kv = 2},
    {"Qwen2MoeForCausalLM", "qwen2_moe", 0, .qkv_bias_always = true, .sliding_window = 4096,
     .windows = WINDOWS_BY_TYPES, .experts = EXPERTS_SOME_LAYERS, .shared_gate_ff = 5632,
     .heads_kv = 16},
    {"Glm4MoeForCausalLM", "glm4_moe", 0, .rms_eps = 1e-5, .o_bias_apart = true,
     .partial_rotary = 0.5, .qk_norm_by_flag = true, .experts = EXPERTS_AFTER_DENSE,
     .experts_normalised = true, .first_dense = 1, .shared_count = 1, .sigmoid = true,
     .select_bias = true, .shared_experts = true, .groups = true, .scaled = true,
     .dense_first = true, .heads_kv = 8, .mtp_layers = 1},
    {"Dots1ForCausalLM", "dots1", 0, .qk_norm = true, .sliding_window = 4096,
     .windows = WINDOWS_LATE, .experts = EXPERTS_AFTER_DENSE, .sigmoid = true, .select_bias = true,
     .shared_experts = true, .groups = true, .scaled = true, .dense_first = true, .heads_kv = 32},
    {"Ernie4_5_MoeForCausalLM", "ernie4_5_moe", 0, .interleaved = true, .rms_eps = 1e-5,
     .rope_theta = 5e5, .tied_embeddings = true, .experts = EXPERTS_ERNIE, .first_dense = 1,
     .shared_count = 2, .select_bias = true, .shared_experts = true, .dense_first = true,
     .heads_kv = 4},
    {"MiniMaxM2ForCausalLM", "minimax_m2", 128, .rope_theta = 5e6, .qk_norm = true,
     .wide_qk_norm = true, .experts = EXPERTS_ALL_LAYERS, .sigmoid = true, .select_bias = true,
     .mixtral_names = true, .heads_kv = 8},
    {"Lfm2ForCausalLM", "lfm2", 0, .rms_eps = 1e-5, .rope_theta = 1e6, .tied_embeddings = true,
     .qk_norm = true, .lfm2 = true, .heads_kv = 8},
    {"Lfm2MoeForCausalLM", "lfm2_moe", 0, .rms_eps = 1e-5, .rope_theta = 1e6,
     .tied_embeddings = true, .qk_norm = true, .experts = EXPERTS_AFTER_DENSE,
     .experts_normalised = true, .first_dense = 2, .sigmoid = true, .select_bias = true,
     .scaled = true, .dense_first = true, .lfm2 = true, .heads_kv = 8},
    {"Qwen3NextForCausalLM", "qwen3_next", 256, .partial_rotary = 0.25, .qk_norm = true,
     .experts = EXPERTS_SOME_LAYERS, .experts_normalised = true, .shared_gate_ff = 512,
     .delta = true, .qwen3_next = true, .heads_kv = 2},
    {"Qwen3_5ForCausalLM", "qwen3_5_text", 256, .partial_rotary = 0.25, .qk_norm = true,
     .sections = {AXES_INTERLEAVED, {11, 11, 10}}, .delta = true, .heads_kv = 4},
    {"Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", 256, .partial_rotary = 0.25, .qk_norm = true,
     .sections = {AXES_INTERLEAVED, {11, 11, 10}}, .experts = EXPERTS_SOME_LAYERS,
     .experts_normalised = true, .stacked_experts = true, .shared_gate_ff = 512, .delta = true,
     .heads_kv = 2},
    {"GraniteMoeHybridForCausalLM", "granitemoehybrid", 0, .factors = true, .embed_factor = true,
     .experts = EXPERTS_ALL_LAYERS, .mamba = true, .granite_hybrid = true,
     .shared_width = "shared_intermediate_size", .shared_ff = 1024},
    {"FalconH1ForCausalLM", "falcon_h1", 0, .rms_eps = 1e-5, .mamba = true, .falcon = true,
     .embed_factor = true, .heads_kv = 8},
    {"NemotronHForCausalLM", "nemotron_h", 128, .rms_eps = 1e-5, .experts = EXPERTS_BY_TYPES,
     .experts_normalised = true, .sigmoid = true, .select_bias = true, .groups = true,
     .scaled = true, .mamba = true, .nemotron = true,
     .shared_width = "moe_shared_expert_intermediate_size", .heads_kv = 8},
    {"Gemma4ForCausalLM",
     "gemma4_text",
     256,
     .rope_theta = 1e6,
     .partial_rotary = 0.25,
     .sliding_window = 512,
     .qk_norm = true,
     .windows = WINDOWS_PATTERN,
     .pattern = 6,
     .local_rope = true,
     .local_theta = 10000,
     .tied_embeddings = true,
     .norms_around = true,
     .logit_cap = -1,
     .experts = EXPERTS_BESIDE,
     .gemma4 = true,
     .each_embed = 256,
     .heads_q = 8,
     .heads_kv = 4,
     .vocab = 262144,
     .positions = 131072},
    {"Gemma4UnifiedForCausalLM", "gemma4_unified_text", 256, .rope_theta = 1e6,
     .partial_rotary = 0.25, .sliding_window = 1024, .qk_norm = true, .windows = WINDOWS_PATTERN,
     .pattern = 6, .local_rope = true, .local_theta = 10000, .tied_embeddings = true,
     .norms_around = true, .logit_cap = -1, .gemma4 = true, .heads_q = 8, .heads_kv = 4,
     .vocab = 262144, .positions = 262144},
    {"Ministral3ForCausalLM", "ministral3", 128, .rms_eps = 1e-5, .windows = WINDOWS_ALL,
     .query_scale = true, .heads_kv = 8},
    {"DeepseekV2ForCausalLM", "deepseek_v2", 0, .experts = EXPERTS_AFTER_DENSE, .shared_count = 2,
     .shared_experts = true, .groups = true, .scaled = true, .dense_first = true, .latent = true,
     .group_best = true, .q_rank = 1536},
    {"DeepseekV3ForCausalLM", "deepseek_v3", 0, .experts = EXPERTS_AFTER_DENSE,
     .experts_normalised = true, .first_dense = 3, .shared_count = 1, .sigmoid = true,
     .select_bias = true, .shared_experts = true, .groups = true, .scaled = true,
     .dense_first = true, .latent = true, .q_rank = 1536, .group_count = 8, .groups_used = 4,
     .expert_scale = 2.5, .mtp_layers = 1},
    {"DeepseekV3ForCausalLM", "kimi_k2", 0, .experts = EXPERTS_AFTER_DENSE,
     .experts_normalised = true, .first_dense = 3, .shared_count = 1, .sigmoid = true,
     .select_bias = true, .shared_experts = true, .groups = true, .scaled = true,
     .dense_first = true, .latent = true, .q_rank = 1536},
    {"Glm4MoeLiteForCausalLM", "glm4_moe_lite", 0, .rms_eps = 1e-5, .experts = EXPERTS_AFTER_DENSE,
     .experts_normalised = true, .first_dense = 1, .shared_count = 1, .sigmoid = true,
     .select_bias = true, .shared_experts = true, .groups = true, .scaled = true,
     .dense_first = true, .latent = true, .q_rank = 768, .expert_scale = 1.8},
    {"BertModel", "bert", .bert = true, .rms_eps = 1e-12},
    {"BertForMaskedLM", "bert", .bert = true, .rms_eps = 1e-12},
    {"RobertaModel", "roberta", .bert = true, .padded_positions = true, .rms_eps = 1e-12},
    {"RobertaForMaskedLM", "roberta", .bert = true, .padded_positions = true, .rms_eps = 1e-12},
    {"XLMRobertaModel", "xlm-roberta", .bert = true, .padded_positions = true, .rms_eps = 1e-12},
    {"XLMRobertaForMaskedLM", "xlm-roberta", .bert = true, .padded_positions = true,
     .rms_eps = 1e-12},
    {"BertForSequenceClassification", "bert", .bert = true, .rms_eps = 1e-12, .labels = true},
    {"RobertaForSequenceClassification", "roberta", .bert = true, .padded_positions = true,
     .rms_eps = 1e-12, .labels = true},
    {"XLMRobertaForSequenceClassification", "xlm-roberta", .bert = true, .padded_positions = true,
     .rms_eps = 1e-12, .labels = true},
    {"NomicBertModel", "nomic_bert", .bert = true, .nomic = true, .rms_eps = 1e-12},
    {"ModernBertModel", "modernbert", MODERN_BERT},
    {"ModernBertForMaskedLM", "modernbert", MODERN_BERT},
    {"Mistral4ForCausalLM", "mistral4", 0, .experts = EXPERTS_AFTER_DENSE,
     .experts_normalised = true, .stacked_experts = true, .shared_count = 1, .shared_experts = true,
     .groups = true, .scaled = true, .dense_first = true, .latent = true, .query_scale = true,
     .q_rank = 1024, .d_ff = 12288},
};

/* ---- Family ---- */

/* Families that are refused for a reason worth telling. */
static const char *reason_of(const char *name) {
    static const struct {
        const char *prefix, *reason;
    } rows[] = {
        {"DeepseekV32", " (attention to tokens that an index chooses)"},
        {"deepseek_v32", " (attention to tokens that an index chooses)"},
        {"DeepseekV4", " (attention to tokens that an index chooses, compressed entries)"},
        {"deepseek_v4", " (attention to tokens that an index chooses, compressed entries)"},
        {"GlmMoeDsa", " (attention to tokens that an index chooses)"},
        {"glm_moe_dsa", " (attention to tokens that an index chooses)"},
        {"MiniMaxM3", " (attention to blocks that an index chooses)"},
        {"minimax_m3", " (attention to blocks that an index chooses)"},
        {"KimiK3", " (Kimi delta attention, gates in latent attention)"},
        {"kimi_k3", " (Kimi delta attention, gates in latent attention)"},
        {"MiMoV2", " (values of another size than keys, and sinks in some layers)"},
        {"mimo_v2", " (values of another size than keys, and sinks in some layers)"},
        {"Step3p", " (numbers of query heads and activations that differ by layer)"},
        {"step3p", " (numbers of query heads and activations that differ by layer)"},
        {"DeciLM", " (layers that differ in size, some without attention)"},
        {"nemotron-nas", " (layers that differ in size, some without attention)"},
        {"Gemma3n", " (embeddings for each layer, keys and values shared between layers)"},
        {"Llama4", " (its shared expert, and attention in chunks)"},
        {"llama4", " (its shared expert, and attention in chunks)"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if (!strncmp(name, rows[i].prefix, strlen(rows[i].prefix))) return rows[i].reason;
    return "";
}

static int unsupported(struct fault *fault, const char *field, const char *value) {
    return fault_set(
        fault, ERR_UNSUPPORTED, field,
        "%s is not supported%s; supported: Qwen3, Qwen2, MiMo, Llama, Mistral, Phi3, SmolLM3, "
        "Granite, Gemma2, Gemma3, Olmo2, Olmo3, Exaone4, Ministral, Ministral3, SeedOss, Ernie4_5, "
        "Glm, Glm4, Glm4Moe, Dots1, Ernie4_5_Moe, MiniMaxM2, Qwen2Moe, Qwen3Moe, Mixtral, Olmoe, "
        "Lfm2, Lfm2Moe, Qwen3Next, Qwen3_5, Qwen3_5Moe, GraniteMoeHybrid, NemotronH, FalconH1, "
        "GptOss, DeepseekV2, DeepseekV3, Glm4MoeLite, Mistral4 (ForCausalLM); "
        "the text of Qwen3VL, "
        "Qwen3VLMoe, Qwen2_5_VL, Qwen3_5, Qwen3_5Moe, Gemma3, Gemma4, Gemma4Unified, "
        "Mistral3, Llava, MuseGlimmer, Idefics3, SmolVLM "
        "(ForConditionalGeneration); encoders: Bert, Roberta, XLMRoberta, NomicBert, ModernBert "
        "(Model), "
        "the first three also for SequenceClassification",
        value, reason_of(value));
}

int model_config_find_architecture(const cJSON *root, const char **name, struct fault *fault) {
    const cJSON *list = json_get(root, "architectures");
    if (!list) return 0;
    const cJSON *first = cJSON_IsArray(list) ? list->child : NULL;
    if (!first || !cJSON_IsString(first))
        return fault_set(fault, ERR_INVALID, "architectures", "expected an array of strings");
    *name = first->valuestring;
    return 0;
}

bool model_family_interleaves(const char *type, bool *interleaves) {
    for (size_t i = 0; i < sizeof families / sizeof families[0]; i++) {
        if (strcmp(families[i].model_type, type) != 0) continue;
        *interleaves = families[i].interleaved;
        return true;
    }
    return false;
}

int model_config_find_family(const cJSON *root, const struct family **out, struct fault *fault) {
    const char *architecture = NULL, *type = NULL;
    int rc = model_config_find_architecture(root, &architecture, fault);
    if (!rc) rc = json_str(root, NULL, "model_type", &type, fault);
    if (rc) return rc;
    if (!architecture && !type)
        return fault_set(fault, ERR_INVALID, "architectures", "missing: which model is this?");
    *out = NULL;
    for (size_t i = 0; i < sizeof families / sizeof families[0]; i++) {
        const struct family *row = &families[i];
        if (strcmp(architecture ? architecture : type,
                   architecture ? row->architecture : row->model_type) != 0)
            continue;
        /* Kimi K2 has DeepSeek's architecture, but a type of its own. */
        if (!*out || (architecture && type && !strcmp(type, row->model_type))) *out = row;
    }
    if (!*out)
        return unsupported(fault, architecture ? "architectures" : "model_type",
                           architecture ? architecture : type);
    if (type && strcmp(type, (*out)->model_type) != 0)
        return unsupported(fault, "model_type", type);
    return 0;
}

/* Fields of one family, which mean another computation in a file of the others. */
static const struct own_field {
    const char *name;
    size_t family; /* offset of a number or bool, which is not 0 in families that have the field */
    size_t size;
} own_fields[] = {
#define OWN(name, member)                                                                          \
    { name, offsetof(struct family, member), sizeof((struct family *)0)->member }
    OWN("query_pre_attn_scalar", gemma),
    OWN("rope_local_base_freq", local_theta),
    OWN("sliding_window_pattern", pattern),
    OWN("attn_logit_softcapping", attend_cap),
    OWN("final_logit_softcapping", logit_cap),
    OWN("qk_scale_factor", muse),
    OWN("output_multiplier", muse),
    OWN("global_head_dim", gemma4),
    OWN("per_layer_config", gemma4),
    OWN("num_global_key_value_heads", gemma4),
    OWN("num_kv_shared_layers", gemma4),
    OWN("attention_k_eq_v", gemma4),
    OWN("use_double_wide_mlp", gemma4),
    OWN("hidden_size_per_layer_input", gemma4),
    OWN("conv_L_cache", lfm2),
    OWN("num_dense_layers", lfm2),
    OWN("post_norm_eps", muse),
    OWN("layer_rope_theta", muse),
    OWN("no_rope_layers", unrotated_layers_every),
    OWN("no_rope_layer_interval", unrotated_layers_every),
    OWN("embedding_multiplier", embed_factor),
    OWN("lm_head_multiplier", falcon),
    OWN("attention_in_multiplier", falcon),
    OWN("attention_out_multiplier", falcon),
    OWN("key_multiplier", falcon),
    OWN("ssm_in_multiplier", falcon),
    OWN("ssm_out_multiplier", falcon),
    OWN("ssm_multipliers", falcon),
    OWN("mlp_multipliers", falcon),
    OWN("residual_multiplier", factors),
    OWN("attention_multiplier", factors),
    OWN("logits_scaling", factors),
    OWN("attention_out_bias", o_bias_apart),
    OWN("swiglu_alpha", gpt_oss),
    OWN("swiglu_limit", gpt_oss),
    OWN("n_routed_experts", groups),
    OWN("n_shared_experts", shared_experts),
    OWN("moe_num_shared_experts", shared_experts),
    OWN("shared_expert_intermediate_size", shared_gate_ff),
    OWN("linear_num_key_heads", delta),
    OWN("linear_num_value_heads", delta),
    OWN("linear_key_head_dim", delta),
    OWN("linear_value_head_dim", delta),
    OWN("linear_conv_kernel_dim", delta),
    OWN("full_attention_interval", delta),
    OWN("mamba_n_heads", mamba),
    OWN("shared_intermediate_size", granite_hybrid),
    OWN("moe_shared_expert_intermediate_size", nemotron),
    OWN("moe_latent_size", nemotron),
    OWN("kv_lora_rank", latent),
    OWN("q_lora_rank", latent),
    OWN("routed_scaling_factor", scaled),
    OWN("n_group", groups),
    OWN("topk_group", groups),
    OWN("first_k_dense_replace", dense_first),
    OWN("num_experts", experts),
    OWN("num_local_experts", experts),
    OWN("moe_intermediate_size", experts),
#undef OWN
};

static bool owns(const struct family *family, const struct own_field *field) {
    static const char nothing[sizeof(double)] = {0};
    return memcmp((const char *)family + field->family, nothing, field->size) != 0;
}

/* Fields that mean another computation whenever they are there at all. */
int model_config_refuse_fields(const cJSON *root, const struct family *family,
                               struct fault *fault) {
    static const char *const fields[] = {"quantization", "text_config", "logit_scale", "clip_qkv"};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        if (json_get(root, fields[i]))
            return fault_set(fault, ERR_UNSUPPORTED, fields[i], "models with %s are not supported",
                             fields[i]);
    }
    for (size_t i = 0; i < sizeof own_fields / sizeof own_fields[0]; i++) {
        const char *name = own_fields[i].name;
        if (json_get(root, name) && !owns(family, &own_fields[i]))
            return fault_set(fault, ERR_UNSUPPORTED, name, "%s models with %s are not supported",
                             family->model_type, name);
    }
    return 0;
}
