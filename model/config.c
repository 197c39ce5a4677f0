/* config.json and generation_config.json: what differs between families, as data.
 *
 * The rule for fields: one that changes the computation is either executed or refused by name;
 * defaults are those of the transformers classes, which is what published files assume. */
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "model/config_quant.h"
#include "model/config_rope.h"
#include "model/internal.h"

#define CONFIG_BYTES_MAX ((size_t)4 << 20)
#define CONFIG_NODES_MAX 100000
#define CONFIG_DEPTH_MAX 64
#define LAYERS_MAX       512

/* The layers that have the sliding window in files without "layer_types". */
enum windows {
    WINDOWS_NONE,       /* the family has no sliding windows */
    WINDOWS_ALL,        /* every layer */
    WINDOWS_PATTERN,    /* all but every n-th layer, sliding_window_pattern */
    WINDOWS_BY_FLAG,    /* with use_sliding_window, layers from max_window_layers on */
    WINDOWS_LATE,       /* layers from max_window_layers on */
    WINDOWS_BY_TYPES,   /* only as "layer_types" says */
    WINDOWS_ALL_BY_FLAG /* with use_sliding_window, every layer */
};

/* Mixtures of experts. */
enum experts {
    EXPERTS_NONE,
    EXPERTS_SOME_LAYERS, /* layers of decoder_sparse_step but for mlp_only_layers, of their own
                            width moe_intermediate_size; norm_topk_prob */
    EXPERTS_ALL_LAYERS,  /* width intermediate_size; the chosen weights add up to 1 */
    EXPERTS_ALL_BY_FLAG, /* the same, but norm_topk_prob decides what they add up to */
    EXPERTS_AFTER_DENSE, /* but for the first ones, of their own width; norm_topk_prob */
    EXPERTS_ERNIE,       /* the same, every n-th layer up to a last one; they add up to 1 */
    EXPERTS_BESIDE,      /* with enable_moe_block, every layer, beside its network */
    EXPERTS_BY_TYPES     /* as "layer_types" says, of their own width; norm_topk_prob */
};

struct family {
    const char *architecture, *model_type;
    int head_dim; /* when the file has none; 0 = hidden_size / num_attention_heads */
    bool qk_norm;
    bool qkv_bias_always; /* else attention_bias decides for q, k, v and o alike */
    bool qkv_bias;        /* attention_bias, when the file does not say */
    bool o_bias_apart;    /* attention_out_bias decides for o; absent: it has none */
    bool interleaved;     /* rotation turns the numbers 2 i and 2 i + 1 of a head together */
    enum windows windows;
    bool fused;                 /* see struct model_config */
    bool factors;               /* Granite's four multipliers */
    int unrotated_layers_every; /* without "no_rope_layers": every n-th layer; 0 = none */
    double rms_eps;             /* when the file has none; 0 = 1e-6 */
    double rope_theta;          /* when the file has none; 0 = 10000 */
    double partial_rotary;      /* the same, partial_rotary_factor; 0 = 1 */
    int sliding_window;         /* when the file has no "sliding_window"; null in it means none */
    bool tied_embeddings;       /* when the file does not say */
    enum experts experts;
    bool experts_normalised; /* norm_topk_prob, when the file does not say */
    bool glm_names;          /* see struct model_config */
    bool norms_around;       /* norms of the inputs and of the outputs of both blocks */
    bool gemma;              /* norms by 1 + w, on both sides of a block; scaled embeddings; GELU */
    int pattern;             /* WINDOWS_PATTERN, when the file has no sliding_window_pattern */
    bool local_rope;         /* layers with windows rotate without scaling */
    double local_theta;      /* theirs; 0 = as the others */
    bool still_globals;      /* where layers have windows, those without one do not rotate */
    double attend_cap, logit_cap; /* soft caps, when the file does not say; 0: it has none */
    bool norms_behind;    /* norms of the outputs of attention and feed-forward network, not their
                             inputs */
    bool wide_qk_norm;    /* see struct model_config */
    bool gpt_oss;         /* biases, learned sinks, clamped SwiGLU, experts in MXFP4 */
    bool stacked_experts; /* see struct model_config */
    bool query_scale;     /* rope_parameters may have "llama_4_scaling_beta" */
    bool from_last;       /* every n-th layer is counted from the last one */
    bool sigmoid, select_bias; /* see struct model_config */
    bool shared_experts;       /* n_shared_experts of them, as wide together */
    int shared_gate_ff;        /* or one with a gate, of a width of its own, when the file does not
                                  say: shared_expert_intermediate_size */
    bool groups;               /* n_group, topk_group */
    bool scaled;               /* routed_scaling_factor */
    bool dense_first;          /* first_k_dense_replace */
    int first_dense;           /* EXPERTS_AFTER_DENSE, when the file does not say */
    int shared_count;          /* the same, of shared experts */
    bool qk_norm_by_flag;      /* use_qk_norm decides */
    bool mixtral_names;        /* see struct model_config */
    bool lfm2;                 /* layers with a short convolution; names of its own */
    bool delta;          /* gated delta rules; a gate beside each head's query; norms by 1 + w */
    bool qwen3_next;     /* see struct model_config */
    bool mamba;          /* layers of Mamba-2 */
    bool granite_hybrid; /* names of its own, and position_embedding_type says whether layers rotate
                          */
    bool falcon;         /* Mamba-2 beside attention in every layer, and factors */
    bool embed_factor;   /* embedding_multiplier */
    bool nemotron;       /* layers have either a mixer or a network, which has no gate */
    const char *shared_width; /* the field that has the width of the network beside experts */
    bool
        gemma4; /* heads by kind of layer, keys and values that layers share, embeddings for each */
    bool latent;     /* latent attention */
    bool group_best; /* topk_method says whether groups are chosen, by their best expert; the
                        weights of the chosen experts are as they are */
    bool muse;       /* gates, fixed norms of embeddings, queries and keys, scaled logits */
    /* sizes of a file that has none */
    int each_embed; /* hidden_size_per_layer_input */
    int heads_q, heads_kv, vocab, positions;
};

static const struct family families[] = {
    {"Qwen3ForCausalLM", "qwen3", 128, .qk_norm = true, .windows = WINDOWS_BY_FLAG},
    {"Qwen2ForCausalLM", "qwen2", 0, .qkv_bias_always = true, .windows = WINDOWS_BY_FLAG},
    {"LlamaForCausalLM", "llama", 0, .windows = WINDOWS_NONE},
    {"MistralForCausalLM", "mistral", 0, .sliding_window = 4096, .windows = WINDOWS_ALL},
    {"Phi3ForCausalLM", "phi3", 0, .windows = WINDOWS_ALL, .fused = true, .rms_eps = 1e-5},
    {"SmolLM3ForCausalLM", "smollm3", 0, .rope_theta = 2e6, .windows = WINDOWS_BY_TYPES,
     .unrotated_layers_every = 4, .tied_embeddings = true},
    {"GraniteForCausalLM", "granite", 0, .factors = true, .embed_factor = true},
    {"Qwen3MoeForCausalLM", "qwen3_moe", 0, .sliding_window = 4096, .qk_norm = true,
     .windows = WINDOWS_ALL_BY_FLAG, .experts = EXPERTS_SOME_LAYERS},
    {"GptOssForCausalLM", "gpt_oss", 64, .rms_eps = 1e-5, .rope_theta = 150000,
     .sliding_window = 128, .windows = WINDOWS_PATTERN, .pattern = 2, .experts = EXPERTS_ALL_LAYERS,
     .gpt_oss = true},
    {"MixtralForCausalLM", "mixtral", 0, .rms_eps = 1e-5, .rope_theta = 1e6, .windows = WINDOWS_ALL,
     .experts = EXPERTS_ALL_LAYERS, .mixtral_names = true},
    {"Gemma3ForCausalLM", "gemma3_text", 256, .rope_theta = 1e6, .sliding_window = 4096,
     .qk_norm = true, .windows = WINDOWS_PATTERN, .pattern = 6, .local_rope = true,
     .local_theta = 10000, .tied_embeddings = true, .gemma = true, .heads_q = 8, .heads_kv = 4,
     .vocab = 262208, .positions = 131072},
    {"Gemma2ForCausalLM", "gemma2", 256, .sliding_window = 4096, .windows = WINDOWS_PATTERN,
     .pattern = 2, .tied_embeddings = true, .gemma = true, .attend_cap = 50, .logit_cap = 30},
    {"Olmo2ForCausalLM", "olmo2", 0, .rms_eps = 1e-5, .qk_norm = true, .wide_qk_norm = true,
     .norms_behind = true},
    {"Olmo3ForCausalLM", "olmo3", 0, .rms_eps = 1e-5, .rope_theta = 5e5, .sliding_window = 4096,
     .windows = WINDOWS_PATTERN, .pattern = 4, .local_rope = true, .qk_norm = true,
     .wide_qk_norm = true, .norms_behind = true},
    {"MinistralForCausalLM", "ministral", 0, .sliding_window = 4096, .windows = WINDOWS_ALL},
    {"SeedOssForCausalLM", "seed_oss", 128, .qkv_bias = true, .o_bias_apart = true},
    {"Ernie4_5ForCausalLM", "ernie4_5", 128, .interleaved = true, .rms_eps = 1e-5,
     .rope_theta = 5e5, .tied_embeddings = true},
    {"GlmForCausalLM", "glm", 128, .interleaved = true, .o_bias_apart = true, .rms_eps = 1.5625e-7,
     .partial_rotary = 0.5, .glm_names = true},
    {"Glm4ForCausalLM", "glm4", 128, .interleaved = true, .o_bias_apart = true,
     .rms_eps = 1.5625e-7, .partial_rotary = 0.5, .glm_names = true, .norms_around = true},
    {"OlmoeForCausalLM", "olmoe", 0, .rms_eps = 1e-5, .qk_norm = true, .wide_qk_norm = true,
     .experts = EXPERTS_ALL_BY_FLAG},
    {"Exaone4ForCausalLM", "exaone4", 0, .rms_eps = 1e-5, .sliding_window = 4096,
     .windows = WINDOWS_PATTERN, .pattern = 4, .still_globals = true, .qk_norm = true,
     .norms_behind = true},
    {"Qwen3VLForConditionalGeneration", "qwen3_vl_text", 128, .rope_theta = 5e5, .qk_norm = true},
    {"Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text", 0, .rope_theta = 5e5,
     .qk_norm = true, .experts = EXPERTS_SOME_LAYERS, .experts_normalised = true,
     .stacked_experts = true},
    {"Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", 0, .rms_eps = 1e-5, .rope_theta = 1e6,
     .qkv_bias_always = true, .windows = WINDOWS_BY_FLAG},
    {"MuseGlimmerForConditionalGeneration", "muse_glimmer_text", 128, .rms_eps = 1e-5,
     .sliding_window = 2048, .windows = WINDOWS_PATTERN, .pattern = 4, .unrotated_layers_every = 4,
     .from_last = true, .qk_norm = true, .norms_around = true, .logit_cap = 20, .muse = true},
    {"Qwen2MoeForCausalLM", "qwen2_moe", 0, .qkv_bias_always = true, .sliding_window = 4096,
     .windows = WINDOWS_BY_TYPES, .experts = EXPERTS_SOME_LAYERS, .shared_gate_ff = 5632},
    {"Glm4MoeForCausalLM", "glm4_moe", 0, .rms_eps = 1e-5, .o_bias_apart = true,
     .partial_rotary = 0.5, .qk_norm_by_flag = true, .experts = EXPERTS_AFTER_DENSE,
     .experts_normalised = true, .first_dense = 1, .shared_count = 1, .sigmoid = true,
     .select_bias = true, .shared_experts = true, .groups = true, .scaled = true,
     .dense_first = true},
    {"Dots1ForCausalLM", "dots1", 0, .qk_norm = true, .sliding_window = 4096,
     .windows = WINDOWS_LATE, .experts = EXPERTS_AFTER_DENSE, .sigmoid = true, .select_bias = true,
     .shared_experts = true, .groups = true, .scaled = true, .dense_first = true},
    {"Ernie4_5_MoeForCausalLM", "ernie4_5_moe", 0, .interleaved = true, .rms_eps = 1e-5,
     .rope_theta = 5e5, .tied_embeddings = true, .experts = EXPERTS_ERNIE, .first_dense = 1,
     .shared_count = 2, .select_bias = true, .shared_experts = true, .dense_first = true},
    {"MiniMaxM2ForCausalLM", "minimax_m2", 128, .rope_theta = 5e6, .qk_norm = true,
     .wide_qk_norm = true, .experts = EXPERTS_ALL_LAYERS, .sigmoid = true, .select_bias = true,
     .mixtral_names = true},
    {"Lfm2ForCausalLM", "lfm2", 0, .rms_eps = 1e-5, .rope_theta = 1e6, .tied_embeddings = true,
     .qk_norm = true, .lfm2 = true},
    {"Lfm2MoeForCausalLM", "lfm2_moe", 0, .rms_eps = 1e-5, .rope_theta = 1e6,
     .tied_embeddings = true, .qk_norm = true, .experts = EXPERTS_AFTER_DENSE,
     .experts_normalised = true, .first_dense = 2, .sigmoid = true, .select_bias = true,
     .scaled = true, .dense_first = true, .lfm2 = true},
    {"Qwen3NextForCausalLM", "qwen3_next", 256, .partial_rotary = 0.25, .qk_norm = true,
     .experts = EXPERTS_SOME_LAYERS, .experts_normalised = true, .shared_gate_ff = 512,
     .delta = true, .qwen3_next = true},
    {"Qwen3_5ForCausalLM", "qwen3_5_text", 256, .partial_rotary = 0.25, .qk_norm = true,
     .delta = true},
    {"Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", 256, .partial_rotary = 0.25, .qk_norm = true,
     .experts = EXPERTS_SOME_LAYERS, .experts_normalised = true, .stacked_experts = true,
     .shared_gate_ff = 512, .delta = true},
    {"GraniteMoeHybridForCausalLM", "granitemoehybrid", 0, .factors = true, .embed_factor = true,
     .experts = EXPERTS_ALL_LAYERS, .mamba = true, .granite_hybrid = true,
     .shared_width = "shared_intermediate_size"},
    {"FalconH1ForCausalLM", "falcon_h1", 0, .rms_eps = 1e-5, .mamba = true, .falcon = true,
     .embed_factor = true},
    {"NemotronHForCausalLM", "nemotron_h", 128, .rms_eps = 1e-5, .experts = EXPERTS_BY_TYPES,
     .experts_normalised = true, .sigmoid = true, .select_bias = true, .groups = true,
     .scaled = true, .mamba = true, .nemotron = true,
     .shared_width = "moe_shared_expert_intermediate_size"},
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
     .query_scale = true},
    {"DeepseekV2ForCausalLM", "deepseek_v2", 0, .experts = EXPERTS_AFTER_DENSE, .shared_count = 2,
     .shared_experts = true, .groups = true, .scaled = true, .dense_first = true, .latent = true,
     .group_best = true},
    {"DeepseekV3ForCausalLM", "deepseek_v3", 0, .experts = EXPERTS_AFTER_DENSE,
     .experts_normalised = true, .first_dense = 3, .shared_count = 1, .sigmoid = true,
     .select_bias = true, .shared_experts = true, .groups = true, .scaled = true,
     .dense_first = true, .latent = true},
    {"DeepseekV3ForCausalLM", "kimi_k2", 0, .experts = EXPERTS_AFTER_DENSE,
     .experts_normalised = true, .first_dense = 3, .shared_count = 1, .sigmoid = true,
     .select_bias = true, .shared_experts = true, .groups = true, .scaled = true,
     .dense_first = true, .latent = true},
    {"Glm4MoeLiteForCausalLM", "glm4_moe_lite", 0, .rms_eps = 1e-5, .experts = EXPERTS_AFTER_DENSE,
     .experts_normalised = true, .first_dense = 1, .shared_count = 1, .sigmoid = true,
     .select_bias = true, .shared_experts = true, .groups = true, .scaled = true,
     .dense_first = true, .latent = true},
    {"Mistral4ForCausalLM", "mistral4", 0, .experts = EXPERTS_AFTER_DENSE,
     .experts_normalised = true, .stacked_experts = true, .shared_count = 1, .shared_experts = true,
     .groups = true, .scaled = true, .dense_first = true, .latent = true, .query_scale = true},
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
        "%s is not supported%s; supported: Qwen3, Qwen2, Llama, Mistral, Phi3, SmolLM3, "
        "Granite, Gemma2, Gemma3, Olmo2, Olmo3, Exaone4, Ministral, Ministral3, SeedOss, Ernie4_5, "
        "Glm, Glm4, Glm4Moe, Dots1, Ernie4_5_Moe, MiniMaxM2, Qwen2Moe, Qwen3Moe, Mixtral, Olmoe, "
        "Lfm2, Lfm2Moe, Qwen3Next, Qwen3_5, Qwen3_5Moe, GraniteMoeHybrid, NemotronH, FalconH1, "
        "GptOss, DeepseekV2, DeepseekV3, Glm4MoeLite, Mistral4 (ForCausalLM); "
        "the text of Qwen3VL, "
        "Qwen3VLMoe, Qwen2_5_VL, Qwen3_5, Qwen3_5Moe, Gemma3, Gemma4, Gemma4Unified, "
        "Mistral3, MuseGlimmer "
        "(ForConditionalGeneration)",
        value, reason_of(value));
}

static int find_architecture(const cJSON *root, const char **name, struct fault *fault) {
    const cJSON *list = json_get(root, "architectures");
    if (!list) return 0;
    const cJSON *first = cJSON_IsArray(list) ? list->child : NULL;
    if (!first || !cJSON_IsString(first))
        return fault_set(fault, ERR_INVALID, "architectures", "expected an array of strings");
    *name = first->valuestring;
    return 0;
}

static int find_family(const cJSON *root, const struct family **out, struct fault *fault) {
    const char *architecture = NULL, *type = NULL;
    int rc = find_architecture(root, &architecture, fault);
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
        if (!*out || (type && !strcmp(type, row->model_type))) *out = row;
    }
    if (!*out)
        return unsupported(fault, architecture ? "architectures" : "model_type",
                           architecture ? architecture : type);
    if (type && strcmp(type, (*out)->model_type) != 0)
        return unsupported(fault, "model_type", type);
    return 0;
}

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
    {"MuseGlimmerForConditionalGeneration", "muse_glimmer", "muse_glimmer_text"},
    {"Gemma4ForConditionalGeneration", "gemma4", "gemma4_text"},
    {"Gemma4UnifiedForConditionalGeneration", "gemma4_unified", "gemma4_unified_text"},
    {"KimiK25ForConditionalGeneration", "kimi_k25", "kimi_k2"},
};

static int no_memory(struct fault *fault) {
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
            return no_memory(fault);
        }
    }
    return 0;
}

/* Makes of a multimodal checkpoint's tree that of its language model. Older files of Qwen2.5-VL
 * have the fields of both side by side. */
static int take_text(cJSON *root, struct fault *fault) {
    const struct multimodal *row = NULL;
    const char *architecture = NULL, *outer = NULL, *type = NULL;
    int rc = find_architecture(root, &architecture, fault);
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
    return cJSON_AddStringToObject(root, "model_type", row->text) ? 0 : no_memory(fault);
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
        return no_memory(fault);
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
    return no_memory(fault);
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
    return no_memory(fault);
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

static bool is_optional(const char *name) {
    for (size_t i = 0; name && i < sizeof optional_fields / sizeof optional_fields[0]; i++)
        if (strcmp(name, optional_fields[i]) == 0) return true;
    return false;
}

/* Every way to say "none" becomes null, so that the readers below know one. They tell null from a
 * field that is absent where the family has a default. `depth`: of objects inside each other. */
static void none_to_null(cJSON *object, int depth) {
    cJSON *node;
    cJSON_ArrayForEach(node, object) {
        if (cJSON_IsObject(node) && depth > 1) none_to_null(node, depth - 1);
        if (is_optional(node->string) && is_none(node)) node->type = cJSON_NULL;
    }
}

/* ---- Fields ---- */

/* Bounds keep every product of two sizes inside int64 and every row width inside int32. */
static const struct size_field {
    const char *key;
    size_t offset;
    int64_t min, max;
    bool required;
    size_t absent; /* offset in struct family of the number of a file that has none; 0: none */
} size_fields[] = {
    {"num_hidden_layers", offsetof(struct model_config, layers), 1, LAYERS_MAX, true, 0},
    {"hidden_size", offsetof(struct model_config, d_model), 1, 1 << 16, true, 0},
    {"intermediate_size", offsetof(struct model_config, d_ff), 1, 1 << 20, true, 0},
    {"num_attention_heads", offsetof(struct model_config, heads_q), 1, 1024, true,
     offsetof(struct family, heads_q)},
    {"num_key_value_heads", offsetof(struct model_config, heads_kv), 1, 1024, false,
     offsetof(struct family, heads_kv)},
    {"head_dim", offsetof(struct model_config, head_dim), 2, 1024, false,
     offsetof(struct family, head_dim)},
    {"vocab_size", offsetof(struct model_config, vocab), 1, 1 << 22, true,
     offsetof(struct family, vocab)},
    {"max_position_embeddings", offsetof(struct model_config, max_positions), 1,
     MODEL_POSITIONS_MAX, true, offsetof(struct family, positions)},
};

static int read_sizes(const cJSON *root, const struct family *family, struct model_config *out,
                      struct fault *fault) {
    for (size_t i = 0; i < sizeof size_fields / sizeof size_fields[0]; i++) {
        const struct size_field *field = &size_fields[i];
        int64_t value = field->absent ? *(const int *)((const char *)family + field->absent) : 0;
        /* A file whose layers are all routed may have no width of others. */
        const bool spared = field->offset == offsetof(struct model_config, d_ff) &&
                            family->stacked_experts && json_get(root, "moe_intermediate_size");
        if (field->required && !value && !spared && !json_get(root, field->key))
            return fault_set(fault, ERR_INVALID, field->key, "missing");
        int rc = json_int(root, NULL, field->key, field->min, field->max, &value, fault);
        if (rc) return rc;
        *(int *)((char *)out + field->offset) = (int)value;
    }
    return 0;
}

/* transformers, DeepseekV3: all heads read one entry, whatever number of them the file says. The
 * two norms inside have an epsilon of their own. */
static int read_latent(const cJSON *root, struct model_config *out, struct fault *fault) {
    static const char *const keys[] = {"kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
                                       "v_head_dim"};
    int64_t n[4] = {0}, rank = 0;
    bool neighbours = true;
    int rc = 0;
    for (size_t i = 0; i < 4 && !rc; i++) {
        if (!json_get(root, keys[i])) return fault_set(fault, ERR_INVALID, keys[i], "missing");
        rc = json_int(root, NULL, keys[i], 1, 1024, &n[i], fault);
    }
    if (!rc) rc = json_int(root, NULL, "q_lora_rank", 1, 1 << 16, &rank, fault);
    if (!rc) rc = json_bool(root, NULL, "rope_interleave", &neighbours, fault);
    if (rc) return rc;
    if (n[0] % 2 || n[2] % 2)
        return fault_set(fault, ERR_UNSUPPORTED, n[0] % 2 ? keys[0] : keys[2],
                         "an odd number, %lld, is not supported",
                         (long long)(n[0] % 2 ? n[0] : n[2]));
    out->latent = (struct kern_latent){.heads = out->heads_q,
                                       .rank = (int)n[0],
                                       .still = (int)n[1],
                                       .turned = (int)n[2],
                                       .dim_v = (int)n[3],
                                       .neighbours = neighbours,
                                       .eps = 1e-6f};
    out->q_rank = (int)rank;
    out->q_latent = rank > 0;
    out->q_from_input = !rank;
    out->heads_kv = 1;
    out->head_dim = (int)(n[0] + n[2]);
    return 0;
}

static int check_heads(struct model_config *out, struct fault *fault) {
    if (!out->heads_kv) out->heads_kv = out->heads_q;
    if (out->heads_q % out->heads_kv)
        return fault_set(fault, ERR_INVALID, "num_key_value_heads",
                         "%d query heads cannot share %d key/value heads", out->heads_q,
                         out->heads_kv);
    if (!out->head_dim) {
        if (out->d_model % out->heads_q)
            return fault_set(fault, ERR_INVALID, "hidden_size",
                             "%d is not a multiple of %d heads and head_dim is missing",
                             out->d_model, out->heads_q);
        out->head_dim = out->d_model / out->heads_q;
    }
    if (out->head_dim < 2 || out->head_dim > 1024 || out->head_dim % 2)
        return fault_set(fault, ERR_INVALID, "head_dim",
                         "expected an even number from 2 to 1024, "
                         "found %d",
                         out->head_dim);
    return 0;
}

/* Fields of one family, which mean another computation in a file of the others. */
static const struct own_field {
    const char *name;
    size_t family; /* offset of the member that says whose it is: a number or bool, not 0 */
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
static int refuse_present(const cJSON *root, const struct family *family, struct fault *fault) {
    static const char *const fields[] = {
        "quantization", "text_config", "logit_scale", "clip_qkv", "moe_latent_size",
    };
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

/* MiniMax: 1 for each layer with attention over all tokens, which all have in M2. */
static int refuse_attention_types(const cJSON *root, struct fault *fault) {
    const cJSON *types = json_get(root, "attn_type_list"), *item;
    bool all = true;
    cJSON_ArrayForEach(item, types) {
        all = all && cJSON_IsNumber(item) && item->valuedouble == 1;
    }
    if (all) return 0;
    return fault_set(fault, ERR_UNSUPPORTED, "attn_type_list",
                     "only layers of type 1 are supported");
}

static int refuse_values(const cJSON *root, const struct family *family, struct fault *fault) {
    const char *known = family->gemma || family->gemma4 ? "gelu_pytorch_tanh"
                        : family->nemotron              ? "relu2"
                                                        : "silu";
    const char *act = known;
    const char *key = family->gemma || family->gemma4 || family->muse ? "hidden_activation"
                      : family->nemotron                              ? "mlp_hidden_act"
                                                                      : "hidden_act";
    const cJSON *both = json_get(root, "use_bidirectional_attention");
    const bool of_pictures = cJSON_IsString(both) && strcmp(both->valuestring, "vision") == 0;
    bool mlp_bias = false, bidirectional = false, use_bias = false;
    int rc = json_bool(root, NULL, "mlp_bias", &mlp_bias, fault);
    if (!rc) rc = json_bool(root, NULL, "use_bias", &use_bias, fault);
    if (!rc) rc = json_str(root, NULL, key, &act, fault);
    if (!rc && !of_pictures)
        rc = json_bool(root, NULL, "use_bidirectional_attention", &bidirectional, fault);
    if (!rc) rc = refuse_attention_types(root, fault);
    if (rc) return rc;
    if (mlp_bias || use_bias)
        return fault_set(fault, ERR_UNSUPPORTED, mlp_bias ? "mlp_bias" : "use_bias",
                         "true is not supported");
    if (bidirectional)
        return fault_set(fault, ERR_UNSUPPORTED, "use_bidirectional_attention",
                         "true is not supported");
    if (strcmp(act, known) != 0)
        return fault_set(fault, ERR_UNSUPPORTED, key, "\"%.64s\" is not supported, only \"%s\"",
                         act, known);
    return 0;
}

/* ---- Layers ---- */

/* "layer_types" decides where the file has it, else the family's rule. */
static int read_layer_types(const cJSON *types, const struct family *family, int window,
                            struct model_config *out, struct fault *fault) {
    const cJSON *type;
    int layer = 0;
    if (!cJSON_IsArray(types))
        return fault_set(fault, ERR_INVALID, "layer_types", "expected an array");
    if (cJSON_GetArraySize(types) != out->layers)
        return fault_set(fault, ERR_INVALID, "layer_types", "expected %d types, found %d",
                         out->layers, cJSON_GetArraySize(types));
    cJSON_ArrayForEach(type, types) {
        const char *name = cJSON_IsString(type) ? type->valuestring : "";
        bool sliding = strcmp(name, "sliding_attention") == 0;
        const bool conv = family->lfm2 && strcmp(name, "conv") == 0;
        const bool linear = strcmp(name, "linear_attention") == 0;
        const bool mamba = family->mamba && (linear || strcmp(name, "mamba") == 0);
        if (conv || mamba || (family->delta && linear)) {
            out->per_layer[layer++].mixer = conv ? MIXER_CONV : mamba ? MIXER_MAMBA : MIXER_DELTA;
            continue;
        }
        if (family->nemotron && (strcmp(name, "mlp") == 0 || strcmp(name, "moe") == 0)) {
            out->per_layer[layer].routed = name[1] == 'o';
            out->per_layer[layer++].mixer = MIXER_NONE;
            continue;
        }
        if (family->mamba && strcmp(name, "attention") == 0) name = "full_attention";
        if (sliding ? family->windows == WINDOWS_NONE : strcmp(name, "full_attention") != 0)
            return fault_set(fault, ERR_UNSUPPORTED, "layer_types",
                             "\"%.64s\" is not supported in %s models", name, family->model_type);
        if (sliding && window == 0)
            return fault_set(fault, ERR_INVALID, "layer_types",
                             "sliding_attention needs a sliding_window");
        out->per_layer[layer++].sliding_window = sliding ? window : 0;
    }
    return 0;
}

static int read_windows(const cJSON *root, const struct family *family, struct model_config *out,
                        struct fault *fault) {
    bool pattern = family->windows == WINDOWS_PATTERN;
    const bool late = family->windows == WINDOWS_LATE;
    bool use = family->windows == WINDOWS_ALL || late || pattern;
    bool absent = !cJSON_GetObjectItemCaseSensitive(root, "sliding_window");
    int64_t window = absent ? family->sliding_window : 0, every = family->pattern;
    int64_t first = late ? 62 : 0;
    const cJSON *types = json_get(root, "layer_types");
    int rc = json_bool(root, NULL, "use_sliding_window", &use, fault);
    if (!rc) rc = json_int(root, NULL, "sliding_window", 1, INT32_MAX, &window, fault);
    if (!rc && (late || family->windows == WINDOWS_BY_FLAG))
        rc = json_int(root, NULL, "max_window_layers", 0, INT32_MAX, &first, fault);
    if (!rc && pattern && !types)
        rc = json_int(root, NULL, "sliding_window_pattern", 1, INT32_MAX, &every, fault);
    if (rc) return rc;
    if (family->windows == WINDOWS_NONE && (use || window))
        return fault_set(fault, ERR_UNSUPPORTED, use ? "use_sliding_window" : "sliding_window",
                         "sliding windows are not supported in %s models", family->model_type);
    if (use && !window &&
        (family->windows == WINDOWS_BY_FLAG || family->windows == WINDOWS_BY_TYPES))
        return fault_set(fault, ERR_INVALID, "sliding_window",
                         "missing: use_sliding_window is true");
    if (use && family->windows == WINDOWS_BY_TYPES && !types)
        return fault_set(fault, ERR_UNSUPPORTED, "use_sliding_window",
                         "true is not supported without \"layer_types\" in %s models",
                         family->model_type);
    if (types) return read_layer_types(types, family, use ? (int)window : 0, out, fault);
    const int64_t shift = family->from_last ? out->layers % every : 0;
    for (int i = 0; i < out->layers; i++)
        out->per_layer[i].sliding_window =
            use && i >= first && !(pattern && (i + 1 - shift) % every == 0) ? (int)window : 0;
    return 0;
}

/* "layer_rope_theta" has 0 for a layer that does not rotate; the others rotate alike. */
static int read_thetas(const cJSON *root, struct model_config *out, struct fault *fault) {
    static const char name[] = "layer_rope_theta";
    const cJSON *list = json_get(root, name), *item;
    double theta = 0;
    int layer = 0;
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) != out->layers)
        return fault_set(fault, ERR_INVALID, name, "expected an array of %d numbers", out->layers);
    cJSON_ArrayForEach(item, list) {
        if (!cJSON_IsNumber(item) || !(item->valuedouble >= 0))
            return fault_set(fault, ERR_INVALID, name, "expected numbers from 0 on");
        out->per_layer[layer++].rotated = item->valuedouble > 0;
        if (item->valuedouble == 0) continue;
        if (theta > 0 && item->valuedouble != theta)
            return fault_set(fault, ERR_UNSUPPORTED, name, "%g beside %g is not supported",
                             item->valuedouble, theta);
        theta = item->valuedouble;
    }
    return 0;
}

/* transformers, GraniteMoeHybrid: all layers rotate, or none. */
static int read_positions(const cJSON *root, struct model_config *out, struct fault *fault) {
    static const char name[] = "position_embedding_type";
    const char *type = "nope";
    int rc = json_str(root, NULL, name, &type, fault);
    if (!rc && strcmp(type, "nope") != 0 && strcmp(type, "rope") != 0)
        rc = fault_set(fault, ERR_UNSUPPORTED, name,
                       "\"%.64s\" is not supported: \"nope\" or \"rope\"", type);
    for (int i = 0; i < out->layers && !rc; i++)
        out->per_layer[i].rotated = strcmp(type, "rope") == 0;
    return rc;
}

/* "no_rope_layers" has 1 for a layer that rotates, in spite of its name. */
static int read_rotated(const cJSON *root, const struct family *family, struct model_config *out,
                        struct fault *fault) {
    const cJSON *list = json_get(root, "no_rope_layers"), *item;
    int64_t every = family->unrotated_layers_every, rotated;
    int layer = 0;
    int rc = json_int(root, NULL, "no_rope_layer_interval", 1, INT32_MAX, &every, fault);
    if (rc) return rc;
    const int64_t shift = family->from_last ? out->layers % every : 0;
    for (int i = 0; i < out->layers; i++)
        out->per_layer[i].rotated = !every || (i + 1 - shift) % every != 0;
    for (int i = 0; i < out->layers && family->nemotron; i++) out->per_layer[i].rotated = false;
    if (family->granite_hybrid) return read_positions(root, out, fault);
    if (json_get(root, "layer_rope_theta")) return read_thetas(root, out, fault);
    if (!list) return 0;
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) != out->layers)
        return fault_set(fault, ERR_INVALID, "no_rope_layers", "expected an array of %d numbers",
                         out->layers);
    cJSON_ArrayForEach(item, list) {
        if (json_node_int(item, 0, 1, &rotated))
            return fault_set(fault, ERR_INVALID, "no_rope_layers",
                             "expected 0 or 1 for each layer");
        out->per_layer[layer++].rotated = rotated != 0;
    }
    return 0;
}

/* EXAONE 4: the file decides by "sliding_window", whatever its layers are. */
static int stop_globals(const cJSON *root, const struct family *family, struct model_config *out,
                        struct fault *fault) {
    int64_t window =
        cJSON_GetObjectItemCaseSensitive(root, "sliding_window") ? 0 : family->sliding_window;
    int rc = json_int(root, NULL, "sliding_window", 1, INT32_MAX, &window, fault);
    for (int i = 0; i < out->layers && window > 0; i++)
        out->per_layer[i].rotated = out->per_layer[i].sliding_window > 0;
    return rc;
}

/* Layers that do not rotate but have norms of queries and keys turn by these. */
static int fill_still(struct model_config *out, struct fault *fault) {
    bool any = false;
    for (int i = 0; i < out->layers; i++) any = any || !out->per_layer[i].rotated;
    if (!any) return 0;
    out->inv_freq_none = mem_try_alloc((size_t)out->head_dim / 2, sizeof *out->inv_freq_none);
    return out->inv_freq_none ? 0 : fault_set(fault, ERR_NOMEM, "head_dim", "out of memory");
}

static int number_layers(struct model_config *out, struct fault *fault) {
    for (int i = 0; i < out->layers; i++) {
        struct model_layer_config *layer = &out->per_layer[i];
        if (layer->reads) continue; /* the index of the layer that it reads */
        layer->index = layer_attends(layer) ? out->cache_layers++ : -1;
        layer->state = layer_has_state(layer) ? out->state_layers++ : -1;
        if (layer->heads_kv) continue;
        layer->heads_kv = out->heads_kv;
        layer->head_dim = out->head_dim;
    }
    if (out->cache_layers) return 0;
    return fault_set(fault, ERR_UNSUPPORTED, "layer_types",
                     "models without a layer with attention are not supported");
}

/* transformers, Gemma4: the last layers attend to the keys and values of the last one of their kind
 * before them. */
static int share_entries(struct model_config *out, int64_t shared, struct fault *fault) {
    const int first = out->layers - (int)shared;
    for (int i = first; i < out->layers; i++) {
        const bool sliding = out->per_layer[i].sliding_window > 0;
        int from = first - 1;
        while (from >= 0 && (out->per_layer[from].sliding_window > 0) != sliding) from--;
        if (from < 0)
            return fault_set(fault, ERR_INVALID, "num_kv_shared_layers",
                             "no layer of the kind of layer %d has keys and values", i);
        out->per_layer[i].reads = true;
        out->per_layer[i].index = from; /* layers that read are behind all others */
    }
    return 0;
}

/* The heads of layers that have others, as transformers 5.24 writes them; else *dim and *heads stay
 * what they are. All layers of a kind have equal ones. */
static int read_layer_heads(const cJSON *root, const struct model_config *c, int64_t *dim,
                            int64_t *heads, struct fault *fault) {
    static const char name[] = "per_layer_config";
    const cJSON *list = json_get(root, name);
    bool first = true;
    for (int i = 0; i < c->layers && list; i++) {
        int64_t own[2] = {c->head_dim, c->heads_kv};
        char index[16];
        snprintf(index, sizeof index, "%d", i);
        const cJSON *layer = json_get(list, index);
        const bool sliding = c->per_layer[i].sliding_window > 0;
        int rc = json_int(layer, name, "head_dim", 2, 1024, &own[0], fault);
        if (!rc) rc = json_int(layer, name, "num_key_value_heads", 1, 1024, &own[1], fault);
        if (rc) return rc;
        if (!sliding && first) {
            *dim = own[0];
            *heads = own[1];
            first = false;
        }
        if (sliding ? own[0] != c->head_dim || own[1] != c->heads_kv
                    : own[0] != *dim || own[1] != *heads)
            return fault_set(fault, ERR_UNSUPPORTED, name,
                             "layers of one kind with heads that differ (%d) are not supported", i);
    }
    return 0;
}

/* transformers, Gemma4TextConfig: heads of another size, and perhaps another number of KV heads, in
 * layers without a window. */
static int read_kinds(const cJSON *root, struct model_config *out, struct fault *fault) {
    int64_t dim = 512, heads = out->heads_kv, shared = 0;
    bool equal = false, wide = false;
    int rc = json_bool(root, NULL, "attention_k_eq_v", &equal, fault);
    if (!rc) rc = json_bool(root, NULL, "use_double_wide_mlp", &wide, fault);
    if (!rc) rc = json_int(root, NULL, "global_head_dim", 2, 1024, &dim, fault);
    if (!rc && equal)
        rc = json_int(root, NULL, "num_global_key_value_heads", 1, 1024, &heads, fault);
    if (!rc) rc = json_int(root, NULL, "num_kv_shared_layers", 1, out->layers - 1, &shared, fault);
    if (!rc) {
        out->per_layer[out->layers - 1].sliding_window = 0; /* also where the file says otherwise */
        out->per_layer[out->layers - 1].local = false;
        rc = read_layer_heads(root, out, &dim, &heads, fault);
    }
    if (rc) return rc;
    if (dim % 2 || out->heads_q % heads)
        return fault_set(
            fault, ERR_INVALID, dim % 2 ? "global_head_dim" : "num_global_key_value_heads",
            "%lld does not suit %d query heads", (long long)(dim % 2 ? dim : heads), out->heads_q);
    for (int i = 0; i < out->layers; i++) {
        struct model_layer_config *layer = &out->per_layer[i];
        const bool sliding = layer->sliding_window > 0;
        layer->heads_kv = sliding ? out->heads_kv : (int)heads;
        layer->head_dim = sliding ? out->head_dim : (int)dim;
        layer->keys_are_values = equal && !sliding;
        layer->wide_ff = wide && i >= out->layers - (int)shared;
    }
    out->global_dim = (int)dim;
    out->local_dim = out->head_dim;
    if (dim > out->head_dim) out->head_dim = (int)dim;
    if (heads > out->heads_kv) out->heads_kv = (int)heads;
    return share_entries(out, shared, fault);
}

/* Without "layer_types" every n-th layer has attention. */
static int read_interval(const cJSON *root, struct model_config *out, struct fault *fault) {
    int64_t every = 4;
    int rc = json_int(root, NULL, "full_attention_interval", 1, INT32_MAX, &every, fault);
    for (int i = 0; i < out->layers && !rc && !json_get(root, "layer_types"); i++)
        if ((i + 1) % every) out->per_layer[i].mixer = MIXER_DELTA;
    return rc;
}

static int read_layers(const cJSON *root, const struct family *family, struct model_config *out,
                       struct fault *fault) {
    out->per_layer = mem_try_alloc((size_t)out->layers, sizeof *out->per_layer);
    if (!out->per_layer) return fault_set(fault, ERR_NOMEM, "num_hidden_layers", "out of memory");
    int rc = read_windows(root, family, out, fault);
    for (int i = 0; i < out->layers && !rc; i++)
        out->per_layer[i].local = family->local_rope && out->per_layer[i].sliding_window > 0;
    if (!rc) rc = read_rotated(root, family, out, fault);
    if (!rc && family->still_globals) rc = stop_globals(root, family, out, fault);
    if (!rc && family->delta) rc = read_interval(root, out, fault);
    if (!rc && family->gemma4) rc = read_kinds(root, out, fault);
    for (int i = 0; i < out->layers && family->nemotron; i++)
        out->per_layer[i].no_network = out->per_layer[i].mixer != MIXER_NONE;
    for (int i = 0; i < out->layers && family->falcon; i++) {
        out->per_layer[i].mixer = MIXER_MAMBA;
        out->per_layer[i].attends_too = true;
    }
    if (!rc) rc = number_layers(out, fault);
    return rc ? rc : fill_still(out, fault);
}

/* A field that says none has been made null. */
static bool has_field(const cJSON *root, const char *name) {
    return cJSON_GetObjectItemCaseSensitive(root, name) != NULL;
}

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
    if (!rc && has_field(root, "first_k_dense_replace")) first = 0;
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
static int read_choice(const cJSON *root, const struct family *family, struct model_config *out,
                       struct fault *fault) {
    const char *function = family->sigmoid ? "sigmoid" : "softmax", *found = function;
    int64_t groups = 1, used = 1;
    double scale = 1;
    int rc = json_str(root, NULL, "scoring_func", &found, fault);
    if (!rc) rc = json_int(root, NULL, "n_group", 1, KERN_EXPERT_GROUPS_MAX, &groups, fault);
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
    int64_t count = has_field(root, key) ? 0 : family->shared_count, width = family->shared_gate_ff;
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

/* transformers, Gemma4: the network beside experts has the width of one without them. */
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
static int read_experts(const cJSON *root, const struct family *family, struct model_config *out,
                        struct fault *fault) {
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
    const bool says_none = !json_get(root, count_key) &&
                           (has_field(root, "num_experts") || has_field(root, "num_local_experts"));
    const bool by_types = family->experts == EXPERTS_BY_TYPES;
    if (says_none && (some || family->granite_hybrid)) return 0; /* every layer is dense */
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
    int rc = family->lfm2 ? json_bool(root, NULL, "use_expert_bias", &out->select_bias, fault) : 0;
    if (rc) return rc;
    rc = says ? json_bool(root, NULL, "norm_topk_prob", &out->experts_normalised, fault) : 0;
    if (rc) return rc;
    if (!by_types) rc = read_routed(root, family, out, fault);
    if (!rc) rc = read_choice(root, family, out, fault);
    if (!rc) rc = read_shared(root, family, out, fault);
    if (!rc && out->gemma4_experts) rc = read_beside(out, fault);
    if (!rc && routed_layers(out) == 0) {
        out->experts = out->experts_used = out->expert_ff = out->shared_ff = 0;
        out->shared_experts = out->shared_gate = out->select_bias = false;
    }
    if (!rc && !out->d_ff && routed_layers(out) < out->layers)
        rc = fault_set(fault, ERR_INVALID, "intermediate_size", "missing");
    return rc;
}

/* Granite: x = e E; x += r f(norm(x)) in every branch; logits / s. The residual stream is kept
 * divided by r: then branches are added as they are, embeddings are multiplied by e / r, and the
 * norms see the same numbers with an epsilon of eps / r^2. (transformers, GraniteModel) */
static int read_factors(const cJSON *root, struct model_config *out, struct fault *fault) {
    double embedding = 1, residual = 1, attention = 1, logits = 1;
    int rc = json_num(root, NULL, "embedding_multiplier", 1e-6, 1e6, &embedding, fault);
    if (!rc) rc = json_num(root, NULL, "residual_multiplier", 1e-3, 1e3, &residual, fault);
    if (!rc) rc = json_num(root, NULL, "attention_multiplier", 1e-6, 1e6, &attention, fault);
    if (!rc) rc = json_num(root, NULL, "logits_scaling", 1e-6, 1e6, &logits, fault);
    if (rc) return rc;
    out->embed_scale = (float)(embedding / residual);
    out->rms_eps = (float)((double)out->rms_eps / (residual * residual));
    out->attend_scale = (float)attention;
    out->logit_scale = (float)(1 / logits);
    return 0;
}

/* transformers, Gemma3: embeddings times sqrt(hidden_size), queries by query_pre_attn_scalar. */
static int read_gemma(const cJSON *root, struct model_config *out, struct fault *fault) {
    double scalar = 256;
    out->embed_scale = sqrtf((float)out->d_model);
    out->norm_offset = 1;
    out->activation = KERN_GELU_TANH;
    int rc = json_num(root, NULL, "query_pre_attn_scalar", 1e-3, 1e6, &scalar, fault);
    out->attend_scale = (float)(1 / sqrt(scalar));
    return rc;
}

/* transformers, Gemma4: norms by w, also of values, without weights; products of queries and keys
 * as they are. */
static int read_gemma4(const cJSON *root, const struct family *family, struct model_config *out,
                       struct fault *fault) {
    const char *each = "hidden_size_per_layer_input";
    int64_t size = has_field(root, each) ? 0 : family->each_embed, vocab = out->vocab;
    int rc = json_int(root, NULL, each, 1, 1 << 16, &size, fault);
    if (!rc) rc = json_int(root, NULL, "vocab_size_per_layer_input", 1, 1 << 22, &vocab, fault);
    if (!rc) rc = json_bool(root, NULL, "enable_moe_block", &out->gemma4_experts, fault);
    if (rc) return rc;
    if ((out->gemma4_experts && family->experts != EXPERTS_BESIDE) || out->qkv_bias)
        return fault_set(fault, ERR_UNSUPPORTED,
                         out->qkv_bias ? "attention_bias" : "enable_moe_block",
                         "true is not supported in %s models", family->model_type);
    if (size && vocab != out->vocab)
        return fault_set(fault, ERR_UNSUPPORTED, "vocab_size_per_layer_input",
                         "%lld beside a vocabulary of %d is not supported", (long long)vocab,
                         out->vocab);
    out->embed_scale = sqrtf((float)out->d_model);
    out->attend_scale = 1;
    out->activation = KERN_GELU_TANH;
    out->v_norms = out->layer_scales = true;
    out->v_norm = 1;
    out->each_embed = (int)size;
    out->embeds_each = size > 0;
    out->each_norm_scale = sqrtf(0.5f);
    return 0;
}

/* transformers, MuseGlimmer: norms by 1 + w but for the last one; norms without weights of the
 * embeddings, of keys, and of queries, which are scaled after theirs. */
static int read_muse(const cJSON *root, struct model_config *out, struct fault *fault) {
    double scale = 3.87, multiplier = 0.19611613513818404, eps = 1e-8;
    int rc = json_num(root, NULL, "qk_scale_factor", 1e-3, 1e3, &scale, fault);
    if (!rc) rc = json_num(root, NULL, "output_multiplier", 1e-6, 1e6, &multiplier, fault);
    if (!rc) rc = json_num(root, NULL, "post_norm_eps", 0, 0.1, &eps, fault);
    out->attn_gate = out->final_norm_plain = true;
    out->norm_offset = out->embed_norm = out->k_norm = 1;
    out->q_norm = (float)scale;
    out->logit_scale = (float)multiplier;
    out->post_eps = (float)eps;
    return rc;
}

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
        limited = limited || !(least || cJSON_IsNull(item) || cJSON_IsObject(item));
    }
    if (!limited) return 0;
    return fault_set(fault, ERR_UNSUPPORTED, "time_step_limit",
                     "a limit of steps is not supported");
}

/* transformers, the Mamba-2 layers of GraniteMoeHybrid, FalconH1 and NemotronH. */
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

/* Null means none; an absent cap is the family's. */
static int read_cap(const cJSON *root, const char *key, double absent, float *out,
                    struct fault *fault) {
    double cap = cJSON_GetObjectItemCaseSensitive(root, key) ? 0 : absent;
    int rc = json_num(root, NULL, key, 1e-3, 1e6, &cap, fault);
    *out = (float)cap;
    return rc;
}

/* transformers, GptOss. Other numbers of the activation are refused. */
static int read_gpt_oss(const cJSON *root, struct model_config *out, struct fault *fault) {
    double alpha = 1.702, limit = 7;
    int rc = json_num(root, NULL, "swiglu_alpha", 0, 1e6, &alpha, fault);
    if (!rc) rc = json_num(root, NULL, "swiglu_limit", 0, 1e6, &limit, fault);
    if (rc) return rc;
    if (alpha != 1.702 || limit != 7)
        return fault_set(fault, ERR_UNSUPPORTED, alpha != 1.702 ? "swiglu_alpha" : "swiglu_limit",
                         "%g is not supported", alpha != 1.702 ? alpha : limit);
    if (!json_get(root, "rope_scaling") && !json_get(root, "rope_parameters"))
        return fault_set(fault, ERR_INVALID, "rope_scaling", "missing");
    out->activation = KERN_SWIGLU_CLAMPED;
    out->expert_bias = out->sinks = out->gpt_oss_names = true;
    return 0;
}

static int check_latent(const struct family *family, struct model_config *out,
                        struct fault *fault) {
    out->attend_scale = 1 / sqrtf((float)latent_query_dim(out));
    if (!out->qkv_bias) return 0;
    return fault_set(fault, ERR_UNSUPPORTED, "attention_bias", "true is not supported in %s models",
                     family->model_type);
}

/* Layers behind the last one, which predict further tokens. */
static int read_mtp(const cJSON *root, struct model_config *out, struct fault *fault) {
    int64_t layers = 0;
    int rc = json_int(root, NULL, "num_nextn_predict_layers", 1, 64, &layers, fault);
    if (!rc) rc = json_int(root, NULL, "num_mtp_layers", 1, 64, &layers, fault);
    out->mtp_layers = (int)layers;
    return rc;
}

static int read_flags(const cJSON *root, const struct family *family, struct model_config *out,
                      struct fault *fault) {
    double eps = family->rms_eps > 0 ? family->rms_eps : 1e-6;
    bool bias = family->gpt_oss || family->qkv_bias, o_bias = false;
    out->tied_embeddings = family->tied_embeddings;
    int rc = json_num(root, NULL, "rms_norm_eps", 0, 0.1, &eps, fault);
    if (!rc) rc = json_bool(root, NULL, "attention_bias", &bias, fault);
    if (!rc) rc = json_bool(root, NULL, "attention_out_bias", &o_bias, fault);
    if (!rc) rc = json_bool(root, NULL, "tie_word_embeddings", &out->tied_embeddings, fault);
    out->rms_eps = out->post_eps = (float)eps;
    out->qk_norm = family->qk_norm;
    if (!rc) rc = json_bool(root, NULL, "use_qk_norm", &out->qk_norm, fault);
    if (!rc && !family->qk_norm_by_flag && out->qk_norm != family->qk_norm)
        rc = fault_set(fault, ERR_UNSUPPORTED, "use_qk_norm", "is not supported in %s models",
                       family->model_type);
    if (!rc) rc = read_mtp(root, out, fault);
    out->qk_norm_wide = family->wide_qk_norm;
    out->pre_norms = !family->norms_behind;
    out->post_norms = family->norms_behind || family->gemma || family->norms_around;
    out->qkv_bias = bias || family->qkv_bias_always;
    out->o_bias = family->o_bias_apart ? o_bias : bias && !family->qkv_bias_always;
    bool qkv_bias = out->qkv_bias;
    if (!rc) rc = json_bool(root, NULL, "qkv_bias", &qkv_bias, fault);
    if (!rc && qkv_bias != out->qkv_bias)
        rc = fault_set(fault, ERR_UNSUPPORTED, "qkv_bias", "is not supported in %s models",
                       family->model_type);
    out->fused = family->fused;
    out->permuted_qk = family->interleaved;
    out->glm_names = family->glm_names;
    out->stacked_experts = family->stacked_experts;
    out->embed_scale = out->logit_scale = 1;
    out->attend_scale = 1 / sqrtf((float)out->head_dim);
    if (!rc && family->latent) rc = check_latent(family, out, fault);
    if (!rc && family->factors) rc = read_factors(root, out, fault);
    if (!rc && family->gemma) rc = read_gemma(root, out, fault);
    if (!rc && family->gpt_oss) rc = read_gpt_oss(root, out, fault);
    if (!rc && family->muse) rc = read_muse(root, out, fault);
    if (!rc && family->gemma4) rc = read_gemma4(root, family, out, fault);
    if (!rc && family->lfm2) rc = read_lfm2(root, family, out, fault);
    if (!rc && family->delta) rc = read_delta(root, family, out, fault);
    if (!rc && family->mamba) rc = read_mamba(root, family, out, fault);
    if (!rc && family->granite_hybrid) rc = read_granite_width(root, out, fault);
    if (!rc && family->falcon) rc = read_falcon(root, out, fault);
    if (!rc && family->attend_cap > 0)
        rc = read_cap(root, "attn_logit_softcapping", family->attend_cap, &out->attend_cap, fault);
    if (!rc && family->logit_cap != 0)
        rc = read_cap(root, "final_logit_softcapping", fmax(family->logit_cap, 0), &out->logit_cap,
                      fault);
    return rc;
}

static int read_dtype(const cJSON *root, struct model_config *out, struct fault *fault) {
    static const struct {
        const char *name;
        enum kern_dtype dtype;
    } names[] = {{"float32", KERN_F32}, {"float16", KERN_F16}, {"bfloat16", KERN_BF16}};
    const char *key = json_get(root, "dtype") ? "dtype" : "torch_dtype", *name = "float32";
    int rc = json_str(root, NULL, key, &name, fault);
    if (rc) return rc;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (!strcmp(name, names[i].name)) {
            out->dtype = names[i].dtype;
            return 0;
        }
    }
    return fault_set(fault, ERR_UNSUPPORTED, key,
                     "\"%.64s\" is not supported: float32, float16, bfloat16", name);
}

/* ---- Tokens and request defaults ---- */

static int add_eos(const cJSON *node, const char *field, struct model_config *out,
                   struct fault *fault) {
    int64_t id;
    if (json_node_int(node, -1, out->vocab - 1, &id))
        return fault_set(fault, ERR_INVALID, field,
                         "expected token ids from 0 to %d, one or a list", out->vocab - 1);
    if (id < 0) return 0; /* -1: no token */
    for (int i = 0; i < out->eos_count; i++) {
        if (out->eos[i] == (int32_t)id) return 0;
    }
    if (out->eos_count == MODEL_EOS_MAX)
        return fault_set(fault, ERR_LIMIT, field, "more than %d end-of-sequence tokens",
                         MODEL_EOS_MAX);
    out->eos[out->eos_count++] = (int32_t)id;
    return 0;
}

static int read_eos(const cJSON *root, const char *field, struct model_config *out,
                    struct fault *fault) {
    const cJSON *node = json_get(root, "eos_token_id"), *item;
    if (!node) return 0;
    if (!cJSON_IsArray(node)) return add_eos(node, field, out, fault);
    cJSON_ArrayForEach(item, node) {
        int rc = add_eos(item, field, out, fault);
        if (rc) return rc;
    }
    return 0;
}

static int read_tokens(const cJSON *root, struct model_config *out, struct fault *fault) {
    int64_t bos = -1;
    int rc = json_int(root, NULL, "bos_token_id", -1, out->vocab - 1, &bos, fault);
    out->bos = (int32_t)bos;
    return rc ? rc : read_eos(root, "eos_token_id", out, fault);
}

static int read_generation(const cJSON *root, struct model_config *out, struct fault *fault) {
    static const char path[] = "generation_config";
    double temperature = NAN, top_p = NAN, min_p = NAN, repetition = NAN;
    int64_t top_k = -1;
    bool sample = true;
    int rc = json_num(root, path, "temperature", 0, 100, &temperature, fault);
    if (!rc) rc = json_num(root, path, "top_p", 0, 1, &top_p, fault);
    if (!rc) rc = json_num(root, path, "min_p", 0, 1, &min_p, fault);
    if (!rc) rc = json_num(root, path, "repetition_penalty", 0.001, 1000, &repetition, fault);
    if (!rc) rc = json_int(root, path, "top_k", -1, INT32_MAX, &top_k, fault);
    if (!rc) rc = json_bool(root, path, "do_sample", &sample, fault);
    if (rc) return rc;
    out->temperature = sample ? (float)temperature : 0; /* the publisher's model answers greedily */
    out->top_p = (float)top_p;
    out->min_p = (float)min_p;
    out->repetition = (float)repetition;
    /* In the file -1 means off, in the struct it means absent. */
    out->top_k = json_get(root, "top_k") && top_k < 0 ? 0 : (int)top_k;
    return read_eos(root, "generation_config.eos_token_id", out, fault);
}

/* ---- The whole ---- */

static int parse_object(const char *data, size_t size, const char *file, cJSON **out,
                        struct fault *fault) {
    const struct json_limits limits = {.bytes = CONFIG_BYTES_MAX,
                                       .depth = CONFIG_DEPTH_MAX,
                                       .nodes = CONFIG_NODES_MAX,
                                       .file = true};
    struct fault inner = {0};
    int rc = json_parse(data, size, &limits, out, &inner);
    if (rc) return fault_set(fault, rc, file, "%s", inner.text);
    if (!cJSON_IsObject(*out))
        return fault_set(fault, ERR_MALFORMED, file, "expected an object, found %s",
                         json_type_name(*out));
    return 0;
}

static int read_config(cJSON *root, int context, struct model_config *out, struct fault *fault) {
    const struct family *family = NULL;
    int rc = find_family(root, &family, fault);
    if (rc) return rc;
    memcpy(out->family, family->model_type, strlen(family->model_type) + 1);
    if (family->lfm2) rc = rename_lfm2(root, fault);
    if (family->nemotron) rc = rename_nemotron(root, fault);
    if (!rc) rc = read_sizes(root, family, out, fault);
    if (!rc && family->latent) rc = read_latent(root, out, fault);
    if (!rc) rc = check_heads(out, fault);
    if (!rc) rc = refuse_present(root, family, fault);
    if (!rc) rc = model_config_read_quantization(root, family->gpt_oss, &out->packing, fault);
    if (!rc) rc = refuse_values(root, family, fault);
    if (!rc) rc = read_layers(root, family, out, fault);
    if (!rc) rc = read_flags(root, family, out, fault);
    if (!rc && family->experts) rc = read_experts(root, family, out, fault);
    if (!rc) rc = read_dtype(root, out, fault);
    if (!rc) rc = read_tokens(root, out, fault);
    if (rc) return rc;
    const struct model_rope rope = {
        family->rope_theta,     family->local_rope,  family->local_theta,
        family->partial_rotary, family->query_scale, family->gemma4 ? "proportional" : "default"};
    return model_config_read_rope(root, &rope, context, out, fault);
}

/* Describes the layers with entries to the cache. */
static int fill_cache_layers(struct model_config *out, struct fault *fault) {
    bool differ = false;
    out->rotations = mem_try_alloc((size_t)out->cache_layers, sizeof *out->rotations);
    out->heads = mem_try_alloc((size_t)out->cache_layers, sizeof *out->heads);
    if (!out->rotations || !out->heads)
        return fault_set(fault, ERR_NOMEM, "num_hidden_layers", "out of memory");
    for (int i = 0; i < out->layers; i++) {
        const struct model_layer_config *layer = &out->per_layer[i];
        if (!holds_entries(layer)) continue;
        if (layer->rotated)
            out->rotations[layer->index] = layer->local ? out->inv_freq_local : out->inv_freq;
        out->heads[layer->index] = (struct kern_heads){layer->heads_kv, layer->head_dim};
        differ = differ || layer->heads_kv != out->heads_kv || layer->head_dim != out->head_dim;
    }
    if (differ) return 0;
    mem_free(out->heads);
    out->heads = NULL;
    return 0;
}

int model_config_read(cJSON *config, cJSON *generation, int context, struct model_config *out,
                      struct fault *fault) {
    none_to_null(config, 4); /* text_config; rope_parameters has objects for kinds of layers */
    none_to_null(generation, 1);
    *out = (struct model_config){.bos = -1, .top_k = -1};
    out->temperature = out->top_p = out->min_p = out->repetition = NAN;
    int rc = take_text(config, fault);
    if (!rc) rc = read_config(config, context, out, fault);
    if (!rc) rc = fill_cache_layers(out, fault);
    if (!rc && generation) rc = read_generation(generation, out, fault);
    if (rc) model_config_close(out);
    return rc;
}

int model_config_parse(const char *config, size_t config_size, const char *generation,
                       size_t generation_size, int context, struct model_config *out,
                       struct fault *fault) {
    cJSON *root = NULL, *defaults = NULL;
    *out = (struct model_config){0};
    int rc = parse_object(config, config_size, "config.json", &root, fault);
    if (!rc && generation)
        rc = parse_object(generation, generation_size, "generation_config.json", &defaults, fault);
    if (!rc) rc = model_config_read(root, defaults, context, out, fault);
    json_free(root);
    json_free(defaults);
    return rc;
}

void model_config_close(struct model_config *config) {
    mem_free(config->inv_freq);
    mem_free(config->inv_freq_local);
    mem_free(config->inv_freq_none);
    mem_free(config->per_layer);
    mem_free(config->rotations);
    mem_free(config->heads);
    config->heads = NULL;
    config->inv_freq = config->inv_freq_local = config->inv_freq_none = NULL;
    config->per_layer = NULL;
    config->rotations = NULL;
}

int routed_layers(const struct model_config *config) {
    int count = 0;
    for (int i = 0; i < config->layers; i++) count += config->per_layer[i].routed;
    return count;
}

int dense_width(const struct model_config *config) {
    int widest = 0;
    for (int i = 0; i < config->layers; i++)
        if (has_dense(&config->per_layer[i]) && ff_width(config, i) > widest)
            widest = ff_width(config, i);
    return widest;
}

bool model_config_rotates_alike(const struct model_config *config) {
    for (int i = 0; i < config->layers; i++) {
        const struct model_layer_config *layer = &config->per_layer[i];
        if (layer_attends(layer) && (!layer->rotated || layer->local)) return false;
    }
    return true;
}

int model_config_sliding_layers(const struct model_config *config) {
    int count = 0;
    for (int i = 0; i < config->layers; i++)
        count += config->per_layer[i].sliding_window > 0 && !config->per_layer[i].reads;
    return count;
}

int model_config_sliding_window(const struct model_config *config) {
    int longest = 0;
    for (int i = 0; i < config->layers; i++)
        if (config->per_layer[i].sliding_window > longest)
            longest = config->per_layer[i].sliding_window;
    return longest;
}

/* The numbers of a layer's recurrent state. */
static int state_floats(const struct model_config *config) {
    if (!config->state_layers) return 0;
    if (config->mamba.heads)
        return kern_mamba_shared_floats(&config->mamba) +
               config->mamba.heads * kern_mamba_head_floats(&config->mamba);
    return config->delta.heads_k ? config->delta.heads_k * kern_delta_head_floats(&config->delta)
                                 : config->d_model * (config->conv_width - 1);
}

struct kern_cache_options model_cache_options(const struct model_config *config) {
    return (struct kern_cache_options){
        .layers = config->cache_layers,
        .heads_q = config->heads_q,
        .heads_kv = config->heads_kv,
        .head_dim = config->head_dim,
        .heads = config->heads,
        .latent = config->latent.rank,
        .states = config->state_layers,
        .state_floats = state_floats(config),
        .state_shared = config->mamba.heads ? kern_mamba_shared_floats(&config->mamba) : 0,
        .state_heads = config->mamba.heads,
        .inv_freq = config->inv_freq,
        .rotations = config->rotations,
        .vocab = config->vocab,
        .qk_norm_wide = config->qk_norm_wide};
}

int64_t model_state_pages(const struct model_config *config, const struct kern_cache_info *info,
                          int ranks) {
    if (!config->state_layers) return 0;
    const struct kern_cache_options options = model_cache_options(config);
    const int64_t floats = kern_state_part(&options, ranks), slots = info->state_slots;
    return config->state_layers * ((floats + slots - 1) / slots);
}

uint64_t model_state_bytes(const struct model_config *config) {
    return (uint64_t)config->state_layers * (uint64_t)state_floats(config) * sizeof(float);
}

int64_t model_pages(const struct model_config *config, const struct kern_cache_info *info,
                    int64_t entries) {
    const struct kern_cache_options cache = model_cache_options(config);
    const int64_t slots = info->page_slots_least;
    return kern_streams(&cache) * ((entries + slots - 1) / slots) +
           model_state_pages(config, info, 1);
}
