/* Encoders: BERT (arXiv 1810.04805), RoBERTa and XLM-R, which are the same from another first
 * position on, nomic-bert (arXiv 2402.01613), which rotates and has gated networks, and ModernBERT
 * (arXiv 2412.13663), which also has norms in front of its blocks, and windows in most layers. */
#include <string.h>

#include "base/json.h"
#include "model/config_family.h"

/* Fields with the one value that is supported; other values mean another computation. */
static int refuse_others(const cJSON *root, struct fault *fault) {
    static const struct {
        const char *name;
        bool value;
    } flags[] = {
        {"is_decoder", false},        {"add_cross_attention", false},    {"causal", false},
        {"prenorm", false},           {"parallel_block", false},         {"use_rms_norm", false},
        {"qkv_proj_bias", false},     {"mlp_fc1_bias", false},           {"mlp_fc2_bias", false},
        {"scale_attn_weights", true}, {"rotary_emb_interleaved", false},
    };
    const char *positions = "absolute";
    int rc = json_str(root, NULL, "position_embedding_type", &positions, fault);
    if (!rc && strcmp(positions, "absolute") != 0)
        rc = fault_set(fault, ERR_UNSUPPORTED, "position_embedding_type",
                       "\"%.64s\" is not supported, only \"absolute\"", positions);
    for (size_t i = 0; i < sizeof flags / sizeof *flags && !rc; i++) {
        bool value = flags[i].value;
        rc = json_bool(root, NULL, flags[i].name, &value, fault);
        if (!rc && value != flags[i].value)
            rc = fault_set(fault, ERR_UNSUPPORTED, flags[i].name, "%s is not supported",
                           value ? "true" : "false");
    }
    return rc;
}

/* Biases that ModernBERT may have, and no published file has. */
static int refuse_biases(const cJSON *root, struct fault *fault) {
    static const char *const names[] = {"attention_bias", "norm_bias"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        bool bias = false;
        int rc = json_bool(root, NULL, names[i], &bias, fault);
        if (rc) return rc;
        if (bias) return fault_set(fault, ERR_UNSUPPORTED, names[i], "true is not supported");
    }
    return 0;
}

/* transformers, RobertaEmbeddings: rows up to that of the padding token are no positions. */
static int read_positions(const cJSON *root, const struct family *family, struct model_config *out,
                          struct fault *fault) {
    int64_t pad = 1;
    out->position_rows = out->max_positions;
    if (!family->padded_positions) return 0;
    int rc = json_int(root, NULL, "pad_token_id", 0, INT32_MAX - 1, &pad, fault);
    if (!rc && pad + 2 > out->max_positions)
        rc = fault_set(fault, ERR_INVALID, "max_position_embeddings",
                       "%d leave no position behind pad_token_id %lld", out->max_positions,
                       (long long)pad);
    if (rc) return rc;
    out->position_first = (int)pad + 1;
    out->max_positions -= out->position_first;
    return 0;
}

static bool ends_with(const char *text, const char *end) {
    const size_t size = strlen(text), tail = strlen(end);
    return size >= tail && strcmp(text + size - tail, end) == 0;
}

/* transformers, PretrainedConfig: two labels, unless they are listed or counted. What a score of
 * one label is, sentence-transformers' CrossEncoder says; without it, its sigmoid. */
static int read_labels(const cJSON *root, const struct family *family, struct model_config *out,
                       struct fault *fault) {
    const cJSON *list = json_get(root, "id2label"), *own = json_get(root, "sentence_transformers");
    const char *what = "Sigmoid";
    int64_t labels = cJSON_IsObject(list) ? cJSON_GetArraySize(list) : 2;
    int rc = json_int(root, NULL, "num_labels", 1, 4096, &labels, fault);
    if (!rc) rc = json_str(root, NULL, "sbert_ce_default_activation_function", &what, fault);
    if (!rc && cJSON_IsObject(own))
        rc = json_str(own, "sentence_transformers", "activation_fn", &what, fault);
    if (!rc && (labels < 1 || labels > 4096))
        rc = fault_set(fault, ERR_INVALID, "id2label", "expected 1 to 4096 labels");
    if (!rc && !ends_with(what, "Sigmoid") && !ends_with(what, "Identity"))
        rc = fault_set(fault, ERR_UNSUPPORTED, "activation_fn",
                       "\"%.64s\" is not supported: Sigmoid, Identity", what);
    out->classifies = true;
    out->classifier = (struct model_classifier){.labels = (int)labels,
                                                .sigmoid = ends_with(what, "Sigmoid"),
                                                .roberta_names = family->padded_positions};
    return rc;
}

/* Encoders read texts both ways, and so does Gemma 3 where its file says so (EmbeddingGemma, arXiv
 * 2509.20354). "vision" is about pictures. */
int model_config_read_direction(const cJSON *root, const struct family *family,
                                struct model_config *out, struct fault *fault) {
    static const char name[] = "use_bidirectional_attention";
    const cJSON *both = json_get(root, name);
    bool bidirectional = false;
    if (cJSON_IsString(both) && strcmp(both->valuestring, "vision") == 0) return 0;
    int rc = json_bool(root, NULL, name, &bidirectional, fault);
    if (!rc && bidirectional && !(family->gemma && family->qk_norm))
        rc = fault_set(fault, ERR_UNSUPPORTED, name, "true is not supported in %s models",
                       family->model_type);
    out->both_ways = family->bert || bidirectional;
    return rc;
}

int model_config_read_encoder(const cJSON *root, const struct family *family,
                              struct model_config *out, struct fault *fault) {
    const bool modern = family->modern, plain = !family->nomic && !modern;
    int64_t types = plain ? 2 : 0;
    int rc = refuse_others(root, fault);
    if (!rc && modern) rc = refuse_biases(root, fault);
    if (!rc && !modern) rc = json_int(root, NULL, "type_vocab_size", 0, 1024, &types, fault);
    if (!rc && plain) rc = read_positions(root, family, out, fault);
    out->type_rows = (int)types;
    out->typed = types > 0;
    out->bert_names = !modern;
    out->nomic_names = family->nomic;
    out->modern_names = modern;
    out->layer_norms = out->embed_norms = true;
    out->norm_bias = out->norms_of_sums = out->post_norms = !modern;
    out->pre_norms = out->per_layer[0].plain_inputs = modern;
    out->learned_positions = out->ungated = plain;
    out->qkv_bias = out->o_bias = out->ff_bias = plain;
    if (!family->nomic) out->activation = modern ? KERN_GELU : KERN_NORMAL;
    for (int i = 0; i < out->layers; i++) out->per_layer[i].rotated = !plain;
    return rc || !family->labels ? rc : read_labels(root, family, out, fault);
}
