/* Factors, caps, norms and activations that single families have: Granite, Gemma, Muse, gpt-oss. */
#include <math.h>

#include "base/json.h"
#include "model/config_family.h"

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
    int64_t size = model_config_has(root, each) ? 0 : family->each_embed, vocab = out->vocab;
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
    out->attn_gate = out->final_norm_plain = out->embed_norms = true;
    out->norm_offset = out->embed_norm = out->k_norm = 1;
    out->q_norm = (float)scale;
    out->logit_scale = (float)multiplier;
    out->post_eps = (float)eps;
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

int model_config_read_scales(const cJSON *root, const struct family *family,
                             struct model_config *out, struct fault *fault) {
    int rc = family->factors ? read_factors(root, out, fault) : 0;
    if (!rc && family->gemma) rc = read_gemma(root, out, fault);
    if (!rc && family->gpt_oss) rc = read_gpt_oss(root, out, fault);
    if (!rc && family->muse) rc = read_muse(root, out, fault);
    if (!rc && family->gemma4) rc = read_gemma4(root, family, out, fault);
    if (!rc && family->attend_cap > 0)
        rc = read_cap(root, "attn_logit_softcapping", family->attend_cap, &out->attend_cap, fault);
    if (!rc && family->logit_cap != 0)
        rc = read_cap(root, "final_logit_softcapping", fmax(family->logit_cap, 0), &out->logit_cap,
                      fault);
    return rc;
}
