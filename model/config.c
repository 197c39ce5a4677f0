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
#include "model/config_family.h"
#include "model/config_quant.h"
#include "model/config_rope.h"
#include "model/internal.h"

#define CONFIG_BYTES_MAX ((size_t)4 << 20)
#define CONFIG_NODES_MAX 100000
#define CONFIG_DEPTH_MAX 64

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
    {"intermediate_size", offsetof(struct model_config, d_ff), 1, 1 << 20, true,
     offsetof(struct family, d_ff)},
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
        /* transformers: no number of KV heads is that of the query heads */
        if (field->offset == offsetof(struct model_config, heads_kv) &&
            model_config_has(root, field->key))
            value = 0;
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

/* Refuses MiniMax models before M2. Their attn_type_list has 1 for each layer with attention over
 * all tokens; in M2 all layers are of this type. */
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

/* Fields that transformers' classes do not read, and that mean another computation where they do
 * not have the value of all published files. */
static int refuse_unread(const cJSON *root, struct fault *fault) {
    const char *norms = "per_layer";
    bool routing_bias = true, mrope = false;
    int rc = json_str(root, NULL, "qk_norm_type", &norms, fault);
    if (!rc) rc = json_bool(root, NULL, "use_routing_bias", &routing_bias, fault);
    if (!rc) rc = json_bool(root, NULL, "use_mrope", &mrope, fault);
    if (rc) return rc;
    if (strcmp(norms, "per_layer") != 0)
        return fault_set(fault, ERR_UNSUPPORTED, "qk_norm_type",
                         "\"%.64s\" is not supported, only \"per_layer\"", norms);
    if (routing_bias && !mrope) return 0;
    return fault_set(fault, ERR_UNSUPPORTED, mrope ? "use_mrope" : "use_routing_bias",
                     "%s is not supported", mrope ? "true" : "false");
}

static int refuse_values(const cJSON *root, const struct family *family, struct fault *fault) {
    const char *known = family->gemma || family->gemma4 ? "gelu_pytorch_tanh"
                        : family->nemotron              ? "relu2"
                        : family->nomic                 ? "swiglu"
                        : family->bert                  ? "gelu"
                                                        : "silu";
    const char *act = known;
    const char *key = family->gemma || family->gemma4 || family->muse ? "hidden_activation"
                      : family->nemotron                              ? "mlp_hidden_act"
                                                                      : "hidden_act";
    bool mlp_bias = false, use_bias = false;
    int rc = json_bool(root, NULL, "mlp_bias", &mlp_bias, fault);
    if (!rc) rc = json_bool(root, NULL, "use_bias", &use_bias, fault);
    if (!rc) rc = json_str(root, NULL, key, &act, fault);
    if (!rc) rc = refuse_attention_types(root, fault);
    if (!rc) rc = refuse_unread(root, fault);
    if (rc) return rc;
    if (mlp_bias || use_bias)
        return fault_set(fault, ERR_UNSUPPORTED, mlp_bias ? "mlp_bias" : "use_bias",
                         "true is not supported");
    if (strcmp(act, known) != 0)
        return fault_set(fault, ERR_UNSUPPORTED, key, "\"%.64s\" is not supported, only \"%s\"",
                         act, known);
    return 0;
}

/* Layers behind the last one, which predict further tokens. */
static int read_mtp(const cJSON *root, const struct family *family, struct model_config *out,
                    struct fault *fault) {
    static const char name[] = "num_nextn_predict_layers";
    int64_t layers = model_config_has(root, name) ? 0 : family->mtp_layers;
    int rc = json_int(root, NULL, name, 1, 64, &layers, fault);
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
    if (out->both_ways) out->tied_embeddings = false; /* there is no head */
    out->rms_eps = out->post_eps = (float)eps;
    out->qk_norm = family->qk_norm;
    if (!rc) rc = json_bool(root, NULL, "use_qk_norm", &out->qk_norm, fault);
    if (!rc && !family->qk_norm_by_flag && out->qk_norm != family->qk_norm)
        rc = fault_set(fault, ERR_UNSUPPORTED, "use_qk_norm", "is not supported in %s models",
                       family->model_type);
    if (!rc) rc = read_mtp(root, family, out, fault);
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
    if (!rc && family->latent) rc = model_config_check_latent(family, out, fault);
    if (!rc) rc = model_config_read_scales(root, family, out, fault);
    if (!rc && family->bert) rc = model_config_read_encoder(root, family, out, fault);
    if (!rc) rc = model_config_read_states(root, family, out, fault);
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
    int rc = model_config_find_family(root, &family, fault);
    if (rc) return rc;
    memcpy(out->family, family->model_type, strlen(family->model_type) + 1);
    rc = model_config_rename(root, family, fault);
    if (!rc) rc = read_sizes(root, family, out, fault);
    if (!rc && family->latent) rc = model_config_read_latent(root, family, out, fault);
    if (!rc) rc = check_heads(out, fault);
    if (!rc) rc = model_config_refuse_fields(root, family, fault);
    if (!rc) rc = model_config_read_quantization(root, family->gpt_oss, &out->packing, fault);
    if (!rc) rc = refuse_values(root, family, fault);
    if (!rc) rc = model_config_read_direction(root, family, out, fault);
    if (!rc) rc = model_config_read_layers(root, family, out, fault);
    if (!rc) rc = read_flags(root, family, out, fault);
    if (!rc && family->experts) rc = model_config_read_experts(root, family, out, fault);
    if (!rc) rc = read_dtype(root, out, fault);
    if (!rc) rc = read_tokens(root, out, fault);
    if (rc) return rc;
    const struct model_rope rope = {.theta = family->rope_theta,
                                    .local = family->local_rope,
                                    .local_theta = family->local_theta,
                                    .rotary = family->partial_rotary,
                                    .query_scale = family->query_scale,
                                    .kind = family->gemma4 ? "proportional" : "default",
                                    .sections = family->sections};
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
    model_config_none_to_null(config,
                              4); /* text_config; rope_parameters has objects for kinds of layers */
    model_config_none_to_null(generation, 1);
    *out = (struct model_config){.bos = -1, .top_k = -1};
    out->temperature = out->top_p = out->min_p = out->repetition = NAN;
    int rc = model_config_take_text(config, fault);
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
