/* Translates the metadata of a GGUF file to the words of config.json, so that one parser reads and
 * checks both formats. Faults are translated back to the keys of the file. */
#include "model/config_gguf.h"

#include <cjson/cJSON.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/gguf.h"
#include "base/json.h"
#include "base/mem.h"
#include "model/base_digest.h"
#include "model/digest_field.h"
#include "model/internal.h"
#include "model/tensors.h"

#define ARCHITECTURE_MAX 32
#define TEXT_MAX         80 /* a digest in hex fits */
#define KEY_MAX          128
#define FUSED            "blk.0.attn_qkv.weight" /* q, k and v in one tensor */
#define FUSED_BIAS       "blk.0.attn_qkv.bias"
#define FACTORS_MAX      512 /* half of the largest head */
#define LAYERS_MAX       512 /* as in config.c */

/* Architectures by the names that files and config.json (model_type) have for them. */
static const struct architecture {
    const char *name, *type;
    const char *mixture;     /* the model_type of a file with experts; NULL: the same */
    const char *windowed;    /* the model_type of a file with windows; NULL: the same */
    bool permuted;           /* converters put the two numbers that a rotation turns side by side */
    bool windows_said;       /* a file without a window has none, whatever its family's default */
    const char *logit_scale; /* config.json's name of a factor on logits; NULL: it is refused */
    bool yarn_untruncated;   /* config.json says so ("truncate": false), files do not */
    bool norm_after_attention; /* see struct model_config */
    bool unnormalised;         /* the weights of the chosen experts are not divided by their sum */
    bool sections;             /* rotations have sections for pictures, alike in text */
    bool sigmoid;              /* sigmoids of a router's logits decide, not their softmax */
    bool qk_norm_told;         /* files may have norms of queries and keys */
    bool still_globals;        /* layers without a window do not rotate */
    const char *headless;      /* the type of layers without key/value heads, "layer_types" */
    bool delta;                /* files may list layers with a recurrent state */
    bool mamba;                /* layers of Mamba-2 */
    bool falcon;               /* Mamba-2 beside attention in every layer */
    bool nemotron;             /* layers have either a mixer or a network; none rotates */
    bool kinds;                /* heads and widths of networks differ by kind of layer */
    bool latent;               /* latent attention */
    int heads_scale; /* Gemma: with so many layers, queries are scaled by the mean size of a
                        head in the embeddings, else by the head's own (llama.cpp's rule) */
} architectures[] = {
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
    {.name = "mistral3", .type = "ministral3", .permuted = true, .windows_said = true},
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
    {.name = "mistral4", .type = "mistral4", .latent = true},
    {.name = "falcon-h1", .type = "falcon_h1", .mamba = true, .falcon = true},
    {.name = "nemotron_h", .type = "nemotron_h", .permuted = true, .mamba = true, .nemotron = true},
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

/* How a value is read. */
enum kind {
    KIND_INT,
    KIND_NUM,
    KIND_MORE, /* a count that means something where it is above 0 */
    KIND_TOKEN /* a token's id, or none */
};

struct row {
    const char *gguf; /* the key after the architecture; beginning with a letter: the whole key */
    const char *json;
    enum kind kind;
};

static const struct row config_rows[] = {
    {".block_count", "num_hidden_layers", KIND_INT},
    {".context_length", "max_position_embeddings", KIND_INT},
    {".embedding_length", "hidden_size", KIND_INT},
    {".attention.head_count", "num_attention_heads", KIND_INT},
    {".attention.layer_norm_rms_epsilon", "rms_norm_eps", KIND_NUM},
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

static const struct row yarn_rows[] = {
    {".rope.scaling.original_context_length", "original_max_position_embeddings", KIND_INT},
    {".rope.scaling.yarn_beta_fast", "beta_fast", KIND_NUM},
    {".rope.scaling.yarn_beta_slow", "beta_slow", KIND_NUM},
    {".attention.temperature_scale", "llama_4_scaling_beta", KIND_NUM},
};

#define KV_HEADS ".attention.head_count_kv"
#define WIDTH    ".feed_forward_length"
#define SHARED   ".attention.shared_kv_layers"
#define EACH     ".embedding_length_per_layer_input"

/* Names of faults that no row has. */
static const struct row other_names[] = {
    {"general.architecture", "model_type", KIND_INT},
    {".rope.scaling.type", "rope_scaling.rope_type", KIND_INT},
    {".rope.scaling.factor", "rope_scaling.factor", KIND_NUM},
    {".rope.dimension_count", "partial_rotary_factor", KIND_NUM},
    {".attention.key_length", "head_dim", KIND_INT},
    {KV_HEADS, "num_key_value_heads", KIND_INT},
    {KV_HEADS, "layer_types", KIND_INT},
    {KV_HEADS, "num_global_key_value_heads", KIND_INT},
    {WIDTH, "intermediate_size", KIND_INT},
    {SHARED, "num_kv_shared_layers", KIND_INT},
    {EACH, "hidden_size_per_layer_input", KIND_INT},
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

/* Factors for contexts up to the original length and beyond (Phi-3). */
#define LONG_FACTORS  "rope_factors_long.weight"
#define SHORT_FACTORS "rope_factors_short.weight"

#define LOG_MULTIPLIER ".rope.scaling.yarn_log_multiplier"

struct translation {
    const struct architecture *row;
    const struct weights *weights;
    const struct gguf *gguf;
    char architecture[ARCHITECTURE_MAX];
    cJSON *config, *generation;
    struct fault *fault;
};

static const char *key_of(const struct translation *t, const char *name, char out[KEY_MAX]) {
    snprintf(out, KEY_MAX, "%s%s", name[0] == '.' ? t->architecture : "", name);
    return out;
}

static int no_memory(const struct translation *t) {
    return fault_set(t->fault, ERR_NOMEM, NULL, "not enough memory for the configuration");
}

static int set_num(const struct translation *t, cJSON *object, const char *name, double value) {
    return cJSON_AddNumberToObject(object, name, value) ? 0 : no_memory(t);
}

static bool has_key(const struct translation *t, const char *name) {
    char key[KEY_MAX];
    return gguf_find(t->gguf, key_of(t, name, key)) != NULL;
}

static int get_int(const struct translation *t, const char *name, int64_t *value) {
    char key[KEY_MAX];
    return gguf_int(t->gguf, key_of(t, name, key), INT32_MIN, INT32_MAX, value, t->fault);
}

/* 0 counts as absent. */
static int get_more(const struct translation *t, const char *name, int64_t *value) {
    int64_t found = 0;
    int rc = get_int(t, name, &found);
    if (!rc && found) *value = found;
    return rc;
}

static int get_num(const struct translation *t, const char *name, double *value) {
    char key[KEY_MAX];
    return gguf_num(t->gguf, key_of(t, name, key), -DBL_MAX, DBL_MAX, value, t->fault);
}

/* NUL-terminated; "" where it is absent. */
static int get_text(const struct translation *t, const char *name, char out[TEXT_MAX]) {
    char key[KEY_MAX];
    struct gguf_string text = {.data = ""};
    int rc = gguf_str(t->gguf, key_of(t, name, key), &text, t->fault);
    if (!rc && (text.size >= TEXT_MAX || memchr(text.data, '\0', text.size)))
        rc = fault_set(t->fault, ERR_INVALID, key, "expected a short string");
    snprintf(out, TEXT_MAX, "%.*s", rc ? 0 : (int)text.size, text.data);
    return rc;
}

static int copy_rows(const struct translation *t, const struct row *rows, size_t count,
                     cJSON *object) {
    int rc = 0;
    for (size_t i = 0; i < count && !rc; i++) {
        int64_t whole = -1;
        double number = 0;
        if (!has_key(t, rows[i].gguf)) continue;
        const bool num = rows[i].kind == KIND_NUM, token = rows[i].kind == KIND_TOKEN;
        rc = num     ? get_num(t, rows[i].gguf, &number)
             : token ? gguf_token(t->gguf, rows[i].gguf, &whole, t->fault)
                     : get_int(t, rows[i].gguf, &whole);
        if (!num) number = (double)whole;
        const bool none = (rows[i].kind == KIND_MORE && whole <= 0) || (token && whole < 0);
        if (!rc && !none) rc = set_num(t, object, rows[i].json, number);
    }
    return rc;
}

#define COPY_ROWS(t, rows, object) copy_rows(t, rows, sizeof(rows) / sizeof(rows)[0], object)

/* ---- Tensors ---- */

static const struct tensor *find_role(const struct translation *t, enum role role) {
    char name[TENSOR_NAME_MAX];
    tensor_name(name, NAMING_GGUF, role, 0, 0);
    return weights_find(t->weights, name);
}

static int read_tensors(const struct translation *t) {
    const struct tensor *embed = find_role(t, ROLE_EMBED);
    bool tied = !find_role(t, ROLE_HEAD);
    bool bias = find_role(t, ROLE_Q_BIAS) || weights_find(t->weights, FUSED_BIAS);
    if (!embed || embed->dims != 2 || embed->shape[0] > INT32_MAX)
        return fault_set(t->fault, ERR_NOTFOUND, "token_embd.weight",
                         "tensor is missing, or no matrix");
    int rc = set_num(t, t->config, "vocab_size", (double)embed->shape[0]);
    if (!rc && !cJSON_AddBoolToObject(t->config, "tie_word_embeddings", tied)) rc = no_memory(t);
    if (!rc && !cJSON_AddBoolToObject(t->config, "attention_bias", bias)) rc = no_memory(t);
    if (!rc && t->row->qk_norm_told &&
        !cJSON_AddBoolToObject(t->config, "use_qk_norm", find_role(t, ROLE_Q_NORM) != NULL))
        rc = no_memory(t);
    return rc;
}

/* ---- Values of each layer ---- */

/* Finds an array with an element for each layer; NULL: the file has one value for all, or none. */
static int find_list(const struct translation *t, const char *name, enum gguf_type type,
                     const struct gguf_value **list) {
    char key[KEY_MAX];
    *list = gguf_find(t->gguf, key_of(t, name, key));
    if (!*list || !(*list)->array) {
        *list = NULL;
        return 0;
    }
    int rc = gguf_array(t->gguf, key, type, list, t->fault);
    if (!rc && (*list)->count > LAYERS_MAX)
        rc = fault_set(t->fault, ERR_INVALID, key, "more elements than a model has layers");
    return rc;
}

/* Layers that have a network have one of the same width. */
static int read_only_width(const struct translation *t) {
    const struct gguf_value *list;
    char key[KEY_MAX];
    int64_t width = 0;
    int rc = find_list(t, WIDTH, GGUF_I32, &list);
    for (size_t i = 0; !rc && list && i < list->count; i++) {
        const int64_t own = gguf_element_int(list, i);
        if (own && width && own != width)
            rc = fault_set(t->fault, ERR_UNSUPPORTED, key_of(t, WIDTH, key),
                           "%lld in layer %zu is not supported beside %lld", (long long)own, i,
                           (long long)width);
        if (own) width = own;
    }
    return rc || !width ? rc : set_num(t, t->config, "intermediate_size", (double)width);
}

/* transformers, Gemma4: layers that read the keys and values of others may have networks of twice
 * the width, and files then list the widths. */
static int read_widths(const struct translation *t) {
    const struct gguf_value *list;
    char key[KEY_MAX];
    int64_t width = 0, shared = 0;
    if (!has_key(t, WIDTH)) return 0;
    if (t->row->nemotron) return read_only_width(t);
    int rc = t->row->kinds ? find_list(t, WIDTH, GGUF_I32, &list) : (list = NULL, 0);
    if (!rc && list) rc = get_int(t, SHARED, &shared);
    if (!rc && !list) rc = get_int(t, WIDTH, &width);
    if (!rc && list && list->count > 0) width = gguf_element_int(list, 0);
    const int64_t apart = list ? (int64_t)list->count - shared : 0;
    bool wide = false;
    for (int64_t i = 0; !rc && list && i < (int64_t)list->count; i++) {
        const int64_t own = gguf_element_int(list, (size_t)i);
        if (i == apart) wide = own == 2 * width;
        if (own != (i >= apart && wide ? 2 * width : width))
            rc = fault_set(t->fault, ERR_UNSUPPORTED, key_of(t, WIDTH, key),
                           "%lld in layer %lld is not supported beside %lld", (long long)own,
                           (long long)i, (long long)width);
    }
    if (!rc && wide && !cJSON_AddBoolToObject(t->config, "use_double_wide_mlp", true))
        rc = no_memory(t);
    return rc ? rc : set_num(t, t->config, "intermediate_size", (double)width);
}

/* ---- Experts ---- */

enum { GATING_SOFTMAX = 1, GATING_SIGMOID, GATING_SOFTMAX_OF_CHOSEN }; /* llama.cpp's numbers */

/* Files of "deepseek2" are of DeepSeek V2, or of V3 and the families that choose experts as it
 * does.
 */
static bool latent_is_sigmoid(const struct translation *t) {
    int64_t function = 0;
    return t->row->latent && get_int(t, ".expert_gating_func", &function) == 0 &&
           function == GATING_SIGMOID;
}

static int read_experts(const struct translation *t) {
    const bool sigmoid = t->row->sigmoid || latent_is_sigmoid(t);
    const int64_t own = sigmoid ? GATING_SIGMOID : GATING_SOFTMAX;
    double scale = 1;
    int64_t function = own;
    bool normalised = !t->row->unnormalised;
    char key[KEY_MAX];
    int rc = get_num(t, ".expert_weights_scale", &scale);
    if (!rc && scale != 0 && scale != 1) rc = set_num(t, t->config, "routed_scaling_factor", scale);
    if (!rc) rc = get_more(t, ".expert_gating_func", &function);
    if (!rc && function != own && (sigmoid || function != GATING_SOFTMAX_OF_CHOSEN))
        rc = fault_set(t->fault, ERR_UNSUPPORTED, key_of(t, ".expert_gating_func", key),
                       "%lld is not supported", (long long)function);
    if (!rc) rc = gguf_bool(t->gguf, key_of(t, ".expert_weights_norm", key), &normalised, t->fault);
    if (rc || !json_get(t->config, "num_local_experts")) return rc;
    /* Files of ERNIE have a width beside the count that says the same. */
    if (json_get(t->config, "n_shared_experts"))
        cJSON_DeleteItemFromObjectCaseSensitive(t->config, "shared_expert_intermediate_size");
    return cJSON_AddBoolToObject(t->config, "norm_topk_prob", normalised) ? 0 : no_memory(t);
}

/* Layers that predict further tokens are counted among the others. */
static void read_mtp(const struct translation *t) {
    cJSON *layers = cJSON_GetObjectItemCaseSensitive(t->config, "num_hidden_layers");
    const cJSON *mtp = json_get(t->config, "num_nextn_predict_layers");
    if (layers && mtp) cJSON_SetNumberValue(layers, layers->valuedouble - mtp->valuedouble);
}

/* ---- Layers with a recurrent state ---- */

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
static int translate_nemotron(const struct translation *t) {
    const cJSON *layers = json_get(t->config, "num_hidden_layers");
    const struct gguf_value *heads = NULL, *widths = NULL;
    const bool routed = json_get(t->config, "num_local_experts");
    double eps = 0;
    int64_t shared = 0;
    char key[KEY_MAX];
    cJSON_DeleteItemFromObjectCaseSensitive(t->config, "shared_expert_intermediate_size");
    int rc = get_int(t, ".expert_shared_feed_forward_length", &shared);
    if (!rc && shared)
        rc = set_num(t, t->config, "moe_shared_expert_intermediate_size", (double)shared);
    if (!rc) rc = find_list(t, KV_HEADS, GGUF_I32, &heads);
    if (!rc) rc = find_list(t, WIDTH, GGUF_I32, &widths);
    if (!rc && !(layers && heads && widths && (double)heads->count >= layers->valuedouble &&
                 (double)widths->count >= layers->valuedouble))
        rc = fault_set(t->fault, ERR_INVALID, key_of(t, heads ? WIDTH : KV_HEADS, key),
                       "expected a number for each layer");
    if (!rc) rc = get_num(t, ".attention.layer_norm_epsilon", &eps);
    if (!rc && eps > 0 && !json_get(t->config, "rms_norm_eps"))
        rc = set_num(t, t->config, "rms_norm_eps", eps);
    cJSON *types = rc ? NULL : cJSON_AddArrayToObject(t->config, "layer_types");
    for (size_t i = 0; types && (double)i < layers->valuedouble; i++) {
        const bool network = gguf_element_int(widths, i) > 0;
        const bool attends = !network && gguf_element_int(heads, i) > 0;
        cJSON *type = cJSON_CreateString(attends    ? "attention"
                                         : !network ? "mamba"
                                         : routed   ? "moe"
                                                    : "mlp");
        if (!type || !cJSON_AddItemToArray(types, type)) return no_memory(t);
    }
    return rc || types ? rc : no_memory(t);
}

/* Sizes. Files have the width of all heads together. */
static int translate_states(const struct translation *t) {
    const bool mamba = t->row->mamba;
    int64_t width = 0;
    if (!mamba && !t->row->delta) return 0;
    int rc = mamba ? COPY_ROWS(t, mamba_rows, t->config) : COPY_ROWS(t, delta_rows, t->config);
    if (!rc) rc = get_int(t, ".ssm.inner_size", &width);
    if (mamba &&
        !cJSON_AddBoolToObject(t->config, "mamba_conv_bias", in_a_layer(t, ROLE_MAMBA_CONV_BIAS)))
        return no_memory(t);
    const cJSON *heads = json_get(t->config, mamba ? "mamba_n_heads" : "linear_num_value_heads");
    if (rc || !heads || width <= 0) return rc;
    return set_num(t, t->config, mamba ? "mamba_d_head" : "linear_value_head_dim",
                   (double)width / heads->valuedouble);
}

/* Layers that predict further tokens are listed behind the others. */
static int translate_delta(const struct translation *t) {
    static const char list[] = ".attention.recurrent_layers";
    const cJSON *layers = json_get(t->config, "num_hidden_layers");
    const struct gguf_value *value = NULL;
    int rc = translate_states(t);
    if (!rc && t->row->delta) rc = find_list(t, list, GGUF_BOOL, &value);
    if (rc || !value) return rc;
    cJSON *types = rc ? NULL : cJSON_AddArrayToObject(t->config, "layer_types");
    for (size_t i = 0; types && layers && i < value->count && (double)i < layers->valuedouble;
         i++) {
        cJSON *type = cJSON_CreateString(value->data[i] ? "linear_attention" : "full_attention");
        if (!type || !cJSON_AddItemToArray(types, type)) return no_memory(t);
    }
    return rc || types ? rc : no_memory(t);
}

/* Factors are in the numbers of the file. */
static int translate_falcon(const struct translation *t) {
    const bool norm = in_a_layer(t, ROLE_MAMBA_NORM);
    return cJSON_AddBoolToObject(t->config, "mamba_rms_norm", norm) &&
                   cJSON_AddBoolToObject(t->config, "mamba_norm_before_gate", false)
               ? 0
               : no_memory(t);
}

/* Files of Granite 4-H have one width of networks, of experts where there are any, and that of the
 * network beside them. A switch says that attention does not rotate. */
static int translate_granite(const struct translation *t) {
    const bool routed = json_get(t->config, "num_local_experts");
    bool rotates = true;
    char key[KEY_MAX];
    int64_t width = 0;
    int rc = gguf_bool(t->gguf, key_of(t, ".rope.scaling.finetuned", key), &rotates, t->fault);
    if (!rc)
        rc = get_int(t, routed ? ".expert_shared_feed_forward_length" : ".feed_forward_length",
                     &width);
    if (rc) return rc;
    cJSON_DeleteItemFromObjectCaseSensitive(t->config, "shared_expert_intermediate_size");
    if (!cJSON_AddStringToObject(t->config, "position_embedding_type", rotates ? "rope" : "nope") ||
        (!routed && !cJSON_AddNullToObject(t->config, "num_local_experts")))
        return no_memory(t);
    return set_num(t, t->config, "shared_intermediate_size", (double)width);
}

/* ---- Heads and the rotation ---- */

/* Reads a value that is one number, or one for each layer: all equal, or 0 where the layer has a
 * recurrent state. */
static int read_kv_heads(const struct translation *t) {
    char key[KEY_MAX];
    const struct gguf_value *list;
    int64_t heads = 0;
    cJSON *types = NULL;
    if (!has_key(t, KV_HEADS)) return 0;
    int rc = find_list(t, KV_HEADS, GGUF_I32, &list);
    if (!rc && !list) rc = get_int(t, KV_HEADS, &heads);
    if (!rc && list && t->row->headless) {
        types = cJSON_AddArrayToObject(t->config, "layer_types");
        if (!types) return no_memory(t);
    }
    for (size_t i = 0; !rc && list && i < list->count; i++) {
        const int64_t own = gguf_element_int(list, i);
        cJSON *type = types ? cJSON_CreateString(own ? "full_attention" : t->row->headless) : NULL;
        if (types && !(type && cJSON_AddItemToArray(types, type))) return no_memory(t);
        if ((own && heads && own != heads) || (!own && !types && !t->row->nemotron))
            rc = fault_set(t->fault, ERR_UNSUPPORTED, key_of(t, KV_HEADS, key),
                           "layers with different numbers of key/value heads are not supported");
        if (own) heads = own;
    }
    return rc ? rc : set_num(t, t->config, "num_key_value_heads", (double)heads);
}

/* The size of a head is always said: families have their own when config.json says none. */
static int read_head(const struct translation *t) {
    int64_t width = 0, heads = 0, key = 0, value = 0, rotated = 0;
    int rc = get_int(t, ".embedding_length", &width);
    if (!rc) rc = get_int(t, ".attention.head_count", &heads);
    if (rc || width < 1 || heads < 1 || width % heads) return rc; /* refused by the reader */
    key = value = width / heads;
    rc = get_more(t, ".attention.key_length", &key);
    if (!rc) rc = get_more(t, ".attention.value_length", &value);
    if (rc) return rc;
    if (key != value)
        return fault_set(t->fault, ERR_UNSUPPORTED, "attention.value_length",
                         "values of %lld beside keys of %lld are not supported", (long long)value,
                         (long long)key);
    rotated = key;
    if (t->row->heads_scale) {
        int64_t layers = 0;
        rc = get_int(t, ".block_count", &layers);
        int64_t scalar = layers == t->row->heads_scale ? width / heads : key;
        if (!rc) rc = set_num(t, t->config, "query_pre_attn_scalar", (double)scalar);
        if (rc) return rc;
    }
    if (!t->row->nemotron) rc = get_more(t, ".rope.dimension_count", &rotated);
    if (!rc) rc = set_num(t, t->config, "head_dim", (double)key);
    if (!rc && key > 0)
        rc = set_num(t, t->config, "partial_rotary_factor", (double)rotated / (double)key);
    return rc;
}

static int add_factors(const struct translation *t, cJSON *scaling, const char *tensor_name_,
                       const char *json) {
    const struct tensor *tensor = weights_find(t->weights, tensor_name_);
    float factors[FACTORS_MAX];
    double wide[FACTORS_MAX];
    if (!tensor) return 0;
    size_t count =
        tensor->dims == 1 && tensor->shape[0] <= FACTORS_MAX ? (size_t)tensor->shape[0] : 0;
    if (!count || !tensor_read_floats(tensor, 0, count, factors))
        return fault_set(t->fault, ERR_UNSUPPORTED, tensor_name_,
                         "expected 1 to %d numbers, F32, F16 or BF16", FACTORS_MAX);
    for (size_t i = 0; i < count; i++) {
        wide[i] = (double)factors[i];
        if (!isfinite(wide[i]) || wide[i] <= 0)
            return fault_set(t->fault, ERR_INVALID, tensor_name_, "element %zu is no factor", i);
    }
    cJSON *list = cJSON_CreateDoubleArray(wide, (int)count);
    return list && cJSON_AddItemToObject(scaling, json, list) ? 0 : no_memory(t);
}

/* Converters of latent attention write a tenth of "mscale_all_dim", which "mscale" is, too, in all
 * published models. */
static int read_latent_yarn(const struct translation *t, cJSON *scaling) {
    double tenth = 0, attention = 1;
    char key[KEY_MAX];
    int rc = get_num(t, LOG_MULTIPLIER, &tenth);
    if (!rc) rc = get_num(t, ".rope.scaling.attn_factor", &attention);
    if (!rc && has_key(t, ".rope.scaling.yarn_attn_factor"))
        rc = get_num(t, ".rope.scaling.yarn_attn_factor", &attention);
    if (!rc && attention != 1)
        rc = fault_set(t->fault, ERR_UNSUPPORTED, key_of(t, ".rope.scaling.attn_factor", key),
                       "%g is not supported with latent attention", attention);
    if (rc || tenth == 0) return rc;
    const double scale = round(tenth * 1e6) / 1e5; /* the file has it in float32 */
    rc = set_num(t, scaling, "mscale", scale);
    return rc ? rc : set_num(t, scaling, "mscale_all_dim", scale);
}

static int read_yarn(const struct translation *t, cJSON *scaling, double factor) {
    double attention = 1;
    double log_multiplier = 1;
    char key[KEY_MAX];
    int rc = COPY_ROWS(t, yarn_rows, scaling);
    if (!rc && t->row->yarn_untruncated && !cJSON_AddBoolToObject(scaling, "truncate", false))
        rc = no_memory(t);
    if (!rc && t->row->latent) return read_latent_yarn(t, scaling);
    if (!rc) rc = get_num(t, ".rope.scaling.attn_factor", &attention);
    if (!rc && has_key(t, ".rope.scaling.yarn_attn_factor"))
        rc = get_num(t, ".rope.scaling.yarn_attn_factor", &attention);
    if (!rc) rc = get_num(t, LOG_MULTIPLIER, &log_multiplier);
    if (!rc && log_multiplier != 1)
        rc = fault_set(t->fault, ERR_UNSUPPORTED, key_of(t, LOG_MULTIPLIER, key),
                       "%g is not supported", log_multiplier);
    /* Yarn divides its own factor by the same. */
    if (!rc && has_key(t, LOG_MULTIPLIER)) return set_num(t, scaling, "attention_factor", 1);
    if (rc || attention == 1) return rc;
    /* In the file the factor multiplies what yarn has by itself, but for OLMo 3, whose converter
     * copies config.json's. */
    if (t->row->windowed) return set_num(t, scaling, "attention_factor", attention);
    return set_num(t, scaling, "attention_factor", attention * (0.1 * log(factor) + 1));
}

/* Converters name no kind beside these tensors, but the scale and the original length. */
static int read_longrope(const struct translation *t) {
    double attention = 0;
    int64_t original = 0;
    cJSON *scaling = cJSON_AddObjectToObject(t->config, "rope_scaling");
    if (!scaling || !cJSON_AddStringToObject(scaling, "rope_type", "longrope")) return no_memory(t);
    int rc = add_factors(t, scaling, LONG_FACTORS, "long_factor");
    if (!rc) rc = add_factors(t, scaling, SHORT_FACTORS, "short_factor");
    if (!rc) rc = get_int(t, ".rope.scaling.original_context_length", &original);
    if (!rc) rc = get_num(t, ".rope.scaling.attn_factor", &attention);
    if (!rc && original)
        rc = set_num(t, scaling, "original_max_position_embeddings", (double)original);
    if (!rc && attention > 0) rc = set_num(t, scaling, "attention_factor", attention);
    return rc;
}

static int read_rope(const struct translation *t) {
    char kind[TEXT_MAX], key[KEY_MAX];
    double factor = 1;
    int rc = get_text(t, ".rope.scaling.type", kind);
    if (!rc) rc = get_num(t, ".rope.scaling.factor", &factor);
    if (!rc && !kind[0] && has_key(t, ".rope.scale_linear")) {
        snprintf(kind, sizeof kind, "linear");
        rc = get_num(t, ".rope.scale_linear", &factor);
    }
    if (rc) return rc;
    if (factor == 0) factor = 1; /* none */
    bool plain = !kind[0] || !strcmp(kind, "none"), yarn = !strcmp(kind, "yarn");
    bool longrope = !strcmp(kind, "longrope");
    if (weights_find(t->weights, LONG_FACTORS) && (plain || longrope)) return read_longrope(t);
    if (longrope)
        return fault_set(t->fault, ERR_UNSUPPORTED, key_of(t, ".rope.scaling.type", key),
                         "\"longrope\" without " LONG_FACTORS " is not supported");
    double attention = 1;
    if (has_key(t, ".rope.dimension_sections") && !t->row->sections)
        return fault_set(t->fault, ERR_UNSUPPORTED, key_of(t, ".rope.dimension_sections", key),
                         "rotations for images are not supported");
    rc = yarn ? 0 : get_num(t, ".rope.scaling.attn_factor", &attention);
    if (!rc && attention != 1)
        rc = fault_set(t->fault, ERR_UNSUPPORTED, key_of(t, ".rope.scaling.attn_factor", key),
                       "%g is not supported with this scaling", attention);
    if (rc) return rc;
    bool factors = weights_find(t->weights, "rope_freqs.weight") != NULL;
    if (plain && !factors) return 0;
    if (factors && !plain)
        return fault_set(t->fault, ERR_UNSUPPORTED, "rope_freqs.weight",
                         "together with rope.scaling.type \"%.32s\" is not supported", kind);
    cJSON *scaling = cJSON_AddObjectToObject(t->config, "rope_scaling");
    if (!scaling || !cJSON_AddStringToObject(scaling, "rope_type", factors ? "factors" : kind))
        return no_memory(t);
    if (!factors) rc = set_num(t, scaling, "factor", factor);
    if (!rc) rc = add_factors(t, scaling, "rope_freqs.weight", "factors");
    if (!rc && yarn) rc = read_yarn(t, scaling, factor);
    return rc;
}

/* ---- Layers of two kinds ---- */

/* Does the layer have a window? */
static bool is_sliding(const struct translation *t, int layer) {
    const cJSON *type = cJSON_GetArrayItem(json_get(t->config, "layer_types"), layer);
    return type && strcmp(type->valuestring, "sliding_attention") == 0;
}

/* Sets the numbers of KV heads of the layers with a window and of the others. Where their values
 * are their keys, the others have no matrix for them; the last `shared` layers read those of
 * others. */
static int translate_kv_kinds(const struct translation *t, int64_t shared) {
    const struct gguf_value *list;
    const cJSON *layers = json_get(t->config, "num_hidden_layers");
    const int count = layers && layers->valuedouble < LAYERS_MAX ? layers->valueint : 0;
    int64_t heads[2] = {0}; /* without a window, with one */
    char key[KEY_MAX], name[TENSOR_NAME_MAX];
    bool equal = false;
    int rc = find_list(t, KV_HEADS, GGUF_I32, &list);
    if (!rc && !list) rc = get_int(t, KV_HEADS, &heads[1]);
    if (!rc && !list) heads[0] = heads[1];
    for (int i = 0; !rc && i < count; i++) {
        const bool sliding = is_sliding(t, i);
        const int64_t own =
            list && (size_t)i < list->count ? gguf_element_int(list, (size_t)i) : heads[sliding];
        if (heads[sliding] && own != heads[sliding])
            rc = fault_set(t->fault, ERR_UNSUPPORTED, key_of(t, KV_HEADS, key),
                           "layers of one kind with different numbers are not supported");
        heads[sliding] = own;
        tensor_name(name, NAMING_GGUF, ROLE_V, i, 0);
        if (!sliding && i < count - shared && !weights_find(t->weights, name)) equal = true;
    }
    if (!rc && heads[0] != heads[1] && !equal)
        rc = fault_set(t->fault, ERR_UNSUPPORTED, key_of(t, KV_HEADS, key),
                       "numbers that differ are not supported where values have a matrix");
    if (!rc) rc = set_num(t, t->config, "num_key_value_heads", (double)heads[1]);
    if (!rc) rc = set_num(t, t->config, "num_global_key_value_heads", (double)heads[0]);
    if (!rc && !cJSON_AddBoolToObject(t->config, "attention_k_eq_v", equal)) rc = no_memory(t);
    return rc;
}

/* Files say which pairs of a wide head rotate by factors: 1, and for the others one that stops
 * them. Returns the part that does. */
static int read_proportion(const struct translation *t, double *part) {
    static const char name[] = "rope_freqs.weight";
    const struct tensor *tensor = weights_find(t->weights, name);
    float factors[FACTORS_MAX];
    size_t turning = 0, count = tensor && tensor->dims == 1 && tensor->shape[0] <= FACTORS_MAX
                                    ? (size_t)tensor->shape[0]
                                    : 0;
    if (!count || !tensor_read_floats(tensor, 0, count, factors))
        return fault_set(t->fault, tensor ? ERR_UNSUPPORTED : ERR_NOTFOUND, name,
                         "expected 1 to %d numbers, F32, F16 or BF16", FACTORS_MAX);
    while (turning < count && factors[turning] == 1) turning++;
    for (size_t i = turning; i < count; i++)
        if (!(factors[i] >= 1e20f))
            return fault_set(t->fault, ERR_UNSUPPORTED, name,
                             "element %zu: only 1, and then at least 1e20, are supported", i);
    *part = (double)turning / (double)count;
    return 0;
}

static int add_kind_of_rope(const struct translation *t, cJSON *ropes, const char *layers,
                            const char *type, const char *key, double part) {
    cJSON *rope = cJSON_AddObjectToObject(ropes, layers);
    double theta = 0;
    if (!rope || !cJSON_AddStringToObject(rope, "rope_type", type)) return no_memory(t);
    int rc = get_num(t, key, &theta);
    if (!rc && theta > 0) rc = set_num(t, rope, "rope_theta", theta);
    return rc ? rc : set_num(t, rope, "partial_rotary_factor", part);
}

/* transformers, Gemma4: heads, rotations and networks. */
static int translate_kinds(const struct translation *t) {
    static const char *const lengths[] = {".attention.key_length", ".attention.value_length",
                                          ".attention.key_length_swa",
                                          ".attention.value_length_swa"};
    int64_t length[4] = {0}, shared = 0, each = 0;
    double part = 1;
    char key[KEY_MAX];
    int rc = 0;
    for (int i = 0; i < 4 && !rc; i++) rc = get_int(t, lengths[i], &length[i]);
    for (int i = 0; i < 4 && !rc; i += 2)
        if (length[i] != length[i + 1] || length[i] <= 0)
            rc = fault_set(t->fault, ERR_UNSUPPORTED, key_of(t, lengths[i + 1], key),
                           "values of %lld beside keys of %lld are not supported",
                           (long long)length[i + 1], (long long)length[i]);
    if (!rc) rc = get_int(t, SHARED, &shared);
    if (!rc) rc = get_int(t, EACH, &each);
    if (!rc) rc = read_proportion(t, &part);
    if (!rc) rc = set_num(t, t->config, "global_head_dim", (double)length[0]);
    if (!rc) rc = set_num(t, t->config, "head_dim", (double)length[2]);
    if (!rc && shared) rc = set_num(t, t->config, "num_kv_shared_layers", (double)shared);
    if (!rc) rc = set_num(t, t->config, "hidden_size_per_layer_input", (double)each);
    if (!rc && json_get(t->config, "num_local_experts") &&
        !cJSON_AddBoolToObject(t->config, "enable_moe_block", true))
        rc = no_memory(t);
    if (!rc) rc = translate_kv_kinds(t, shared);
    cJSON *ropes = rc ? NULL : cJSON_AddObjectToObject(t->config, "rope_parameters");
    if (!ropes) return rc ? rc : no_memory(t);
    rc = add_kind_of_rope(t, ropes, "full_attention", "proportional", ".rope.freq_base", part);
    if (rc) return rc;
    return add_kind_of_rope(t, ropes, "sliding_attention", "default", ".rope.freq_base_swa", 1);
}

/* ---- Latent attention ---- */

/* The model_type of a file with latent attention. */
static const char *latent_type(const struct translation *t) {
    if (latent_is_sigmoid(t)) return "deepseek_v3";
    return has_key(t, ".attention.temperature_scale") ? "mistral4" : t->row->type;
}

/* Does a layer have the tensor? */
static bool gguf_has_tensor(const struct translation *t, const char *name) {
    char full[TENSOR_NAME_MAX];
    for (int i = 0; i < LAYERS_MAX; i++) {
        snprintf(full, sizeof full, "blk.%d.%s", i, name);
        if (weights_find(t->weights, full)) return true;
    }
    return false;
}

/* Older files have the heads' sizes under the names of what is cached in newer ones. A 0 means that
 * the model has none, whatever its family has where config.json says nothing. */
static int translate_latent(const struct translation *t) {
    static const char *const counts[][2] = {{".leading_dense_block_count", "first_k_dense_replace"},
                                            {".expert_shared_count", "n_shared_experts"}};
    int64_t rank = 0, down = 0, turned = 0, key = 0, value = 0;
    int rc = get_int(t, ".attention.key_length", &key);
    if (!rc) rc = get_int(t, ".attention.value_length", &value);
    if (!rc) rc = get_int(t, ".attention.key_length_mla", &key);
    if (!rc) rc = get_int(t, ".attention.value_length_mla", &value);
    if (!rc) rc = get_int(t, ".attention.kv_lora_rank", &rank);
    if (!rc) rc = get_int(t, ".attention.q_lora_rank", &down);
    if (!rc) rc = get_int(t, ".rope.dimension_count", &turned);
    if (!rc) rc = set_num(t, t->config, "kv_lora_rank", (double)rank);
    if (!rc && down) rc = set_num(t, t->config, "q_lora_rank", (double)down);
    if (!rc) rc = set_num(t, t->config, "qk_rope_head_dim", (double)turned);
    if (!rc) rc = set_num(t, t->config, "qk_nope_head_dim", (double)(key - turned));
    if (!rc) rc = set_num(t, t->config, "v_head_dim", (double)value);
    for (size_t i = 0; i < 2 && !rc; i++)
        if (!json_get(t->config, counts[i][1]) && !cJSON_AddNullToObject(t->config, counts[i][1]))
            rc = no_memory(t);
    if (!rc && strcmp(latent_type(t), "deepseek_v2") == 0 &&
        !cJSON_AddStringToObject(t->config, "topk_method",
                                 json_get(t->config, "n_group") ? "group_limited_greedy"
                                                                : "greedy"))
        rc = no_memory(t);
    return rc;
}

/* ---- Tokens ---- */

enum { TOKEN_CONTROL = 3 };

/* Files name one end; a chat ends with others, too. */
static bool is_token(const struct gguf_string *token, const char *name) {
    return token->size == strlen(name) && memcmp(token->data, name, token->size) == 0;
}

/* In a vocabulary with channels (gpt-oss) <|end|> ends a message, and another follows. */
static bool ends_a_turn(const struct gguf_string *token, bool channels) {
    static const char *const names[] = {
        "<|im_end|>", "<|endoftext|>",   "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>",
        "<|end|>",    "<end_of_turn>",   "<EOT>",      "<|EOT|>",    "<|return|>",
        "<|call|>",   "<|end_of_turn|>", "<turn|>",
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (is_token(token, names[i])) return !channels || strcmp(names[i], "<|end|>") != 0;
    return false;
}

static bool add_id(cJSON *list, int64_t id) {
    cJSON *number = cJSON_CreateNumber((double)id);
    return number && cJSON_AddItemToArray(list, number);
}

static int add_named_ends(const struct translation *t, cJSON *list) {
    const struct gguf_value *tokens, *types;
    const char *at = NULL;
    struct gguf_string token;
    bool channels = false;
    int rc = gguf_array(t->gguf, "tokenizer.ggml.tokens", GGUF_STRING, &tokens, t->fault);
    if (!rc) rc = gguf_array(t->gguf, "tokenizer.ggml.token_type", GGUF_I32, &types, t->fault);
    if (rc || !tokens || !types || types->count != tokens->count) return rc;
    while (!channels && gguf_next(tokens, &at, &token)) channels = is_token(&token, "<|channel|>");
    at = NULL;
    for (size_t i = 0; gguf_next(tokens, &at, &token); i++)
        if (gguf_element_int(types, i) == TOKEN_CONTROL && ends_a_turn(&token, channels) &&
            !add_id(list, (int64_t)i))
            return no_memory(t);
    return 0;
}

static int read_ends(const struct translation *t) {
    static const char *const keys[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                                       "tokenizer.ggml.eom_token_id"};
    cJSON *list = cJSON_AddArrayToObject(t->config, "eos_token_id");
    if (!list) return no_memory(t);
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        int64_t id = -1;
        int rc = gguf_token(t->gguf, keys[i], &id, t->fault);
        if (rc) return rc;
        if (id >= 0 && !add_id(list, id)) return no_memory(t);
    }
    return add_named_ends(t, list);
}

/* ---- The whole ---- */

/* The layers that have the window: a bool for each, or every n-th has none. */
static int read_pattern(const struct translation *t) {
    static const char name[] = ".attention.sliding_window_pattern";
    const struct gguf_value *value;
    if (!has_key(t, name)) return 0;
    int rc = find_list(t, name, GGUF_BOOL, &value);
    if (!rc && !value) {
        int64_t every = 0;
        rc = get_int(t, name, &every);
        return rc ? rc : set_num(t, t->config, "sliding_window_pattern", (double)every);
    }
    cJSON *types = rc ? NULL : cJSON_AddArrayToObject(t->config, "layer_types");
    cJSON *turns =
        rc || !t->row->still_globals ? NULL : cJSON_AddArrayToObject(t->config, "no_rope_layers");
    for (size_t i = 0; types && i < value->count; i++) {
        bool sliding = value->data[i] != 0; /* one byte each */
        if (turns && !add_id(turns, sliding)) return no_memory(t);
        cJSON *type = cJSON_CreateString(sliding ? "sliding_attention" : "full_attention");
        if (!type || !cJSON_AddItemToArray(types, type)) return no_memory(t);
    }
    return rc || types ? rc : no_memory(t);
}

static int read_windows(const struct translation *t) {
    bool window = json_get(t->config, "sliding_window") != NULL;
    if (!window && t->row->windows_said && !cJSON_AddNullToObject(t->config, "sliding_window"))
        return no_memory(t);
    if (!has_key(t, ".attention.sliding_window")) return 0;
    if (!cJSON_AddBoolToObject(t->config, "use_sliding_window", window)) return no_memory(t);
    return window ? read_pattern(t) : 0;
}

static const char *model_type(const struct translation *t) {
    if (t->row->latent) return latent_type(t);
    if (t->row->mixture && json_get(t->config, "num_local_experts")) return t->row->mixture;
    if (t->row->windowed && json_get(t->config, "sliding_window")) return t->row->windowed;
    return t->row->type;
}

/* A file that keepd saved says which matrices it was rounded from. */
static int read_base(const struct translation *t, struct packing *out) {
    char text[TEXT_MAX];
    int rc = get_text(t, BASE_MATRICES_KEY, text);
    return rc || !text[0] ? rc : digest_read(text, BASE_MATRICES_KEY, out->base_matrices, t->fault);
}

/* The key of the scale of logits; the architecture may have a name of its own for it. */
static struct row logit_row(const struct translation *t) {
    const char *name = t->row ? t->row->logit_scale : NULL;
    return (struct row){".logit_scale", name ? name : "logit_scale", KIND_NUM};
}

static int translate(struct translation *t) {
    char architecture[TEXT_MAX];
    int rc = get_text(t, "general.architecture", architecture);
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
            "granitehybrid, gemma4, deepseek2, mistral4, nemotron_h, nemotron_h_moe, falcon-h1",
            architecture);
    rc = COPY_ROWS(t, config_rows, t->config);
    if (!rc) rc = read_widths(t);
    if (!rc && !t->row->kinds) rc = read_kv_heads(t);
    if (!rc && t->row->headless && !t->row->mamba &&
        !cJSON_AddBoolToObject(t->config, "block_auto_adjust_ff_dim", false))
        return no_memory(t);
    const struct row logits = logit_row(t);
    if (!rc) rc = copy_rows(t, &logits, 1, t->config);
    if (!rc && !cJSON_AddStringToObject(t->config, "model_type", model_type(t)))
        return no_memory(t);
    if (!rc) rc = read_experts(t);
    if (!rc) read_mtp(t);
    if (!rc) rc = translate_delta(t);
    if (!rc && t->row->mamba)
        rc = t->row->falcon     ? translate_falcon(t)
             : t->row->nemotron ? translate_nemotron(t)
                                : translate_granite(t);
    if (!rc) rc = COPY_ROWS(t, generation_rows, t->generation);
    if (!rc) rc = read_windows(t);
    if (!rc) rc = read_tensors(t);
    if (!rc && t->row->kinds) rc = translate_kinds(t);
    if (!rc && t->row->latent) rc = translate_latent(t);
    if (!rc && !t->row->kinds && !t->row->latent) rc = read_head(t);
    if (!rc && !t->row->kinds) rc = read_rope(t);
    if (!rc) rc = read_ends(t);
    return rc;
}

static bool rename_in(const struct translation *t, const struct row *rows, size_t count) {
    struct fault *fault = t->fault;
    for (size_t i = 0; i < count; i++) {
        char key[KEY_MAX];
        if (strcmp(fault->field, rows[i].json) != 0) continue;
        snprintf(fault->field, sizeof fault->field, "%s", key_of(t, rows[i].gguf, key));
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
    int rc = t.config && t.generation ? translate(&t) : no_memory(&t);
    if (!rc) {
        rc = model_config_read(t.config, t.generation, context, out, fault);
        if (rc) rename_field(&t);
    }
    if (!rc) rc = read_base(&t, &out->packing);
    if (!rc) {
        out->permuted_qk = t.row->permuted;
        out->norm_after_attention = t.row->norm_after_attention;
        out->latent_joined = t.row->latent && gguf_has_tensor(&t, "attn_kv_b.weight");
        out->experts_joined = t.row->latent && gguf_has_tensor(&t, "ffn_gate_up_exps.weight");
        if (out->glm_names) out->fused = weights_find(weights, FUSED) != NULL;
        out->norm_offset = 0; /* converters add Gemma's 1 */
    }
    cJSON_Delete(t.config);
    cJSON_Delete(t.generation);
    return rc;
}
