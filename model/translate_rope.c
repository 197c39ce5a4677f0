/* Heads and the rotation in a GGUF file. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "model/translation.h"

static const struct row yarn_rows[] = {
    {".rope.scaling.original_context_length", "original_max_position_embeddings", KIND_INT},
    {".rope.scaling.yarn_beta_fast", "beta_fast", KIND_NUM},
    {".rope.scaling.yarn_beta_slow", "beta_slow", KIND_NUM},
    {".attention.temperature_scale", "llama_4_scaling_beta", KIND_NUM},
};

/* Factors for contexts up to the original length and beyond (Phi-3). */
#define LONG_FACTORS  "rope_factors_long.weight"
#define SHORT_FACTORS "rope_factors_short.weight"

#define SECTIONS       ".rope.dimension_sections"
#define LOG_MULTIPLIER ".rope.scaling.yarn_log_multiplier"

/* The size of a head is always said: families have their own when config.json says none. */
int translate_head(const struct translation *t) {
    int64_t width = 0, heads = 0, key = 0, value = 0, rotated = 0;
    int rc = translation_int(t, ".embedding_length", &width);
    if (!rc) rc = translation_int(t, ".attention.head_count", &heads);
    if (rc || width < 1 || heads < 1 || width % heads) return rc; /* refused by the reader */
    key = value = width / heads;
    rc = translation_more(t, ".attention.key_length", &key);
    if (!rc) rc = translation_more(t, ".attention.value_length", &value);
    if (rc) return rc;
    if (key != value)
        return fault_set(t->fault, ERR_UNSUPPORTED, "attention.value_length",
                         "values of %lld beside keys of %lld are not supported", (long long)value,
                         (long long)key);
    rotated = key;
    if (t->row->heads_scale) {
        int64_t layers = 0;
        rc = translation_int(t, ".block_count", &layers);
        int64_t scalar = layers == t->row->heads_scale ? width / heads : key;
        if (!rc) rc = translation_set(t, t->config, "query_pre_attn_scalar", (double)scalar);
        if (rc) return rc;
    }
    if (!t->row->nemotron) rc = translation_more(t, ".rope.dimension_count", &rotated);
    if (!rc) rc = translation_set(t, t->config, "head_dim", (double)key);
    if (!rc && key > 0)
        rc = translation_set(t, t->config, "partial_rotary_factor", (double)rotated / (double)key);
    return rc;
}

static int add_rope_factors(const struct translation *t, cJSON *scaling, const char *tensor_name_,
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
    return list && cJSON_AddItemToObject(scaling, json, list) ? 0 : translation_no_memory(t);
}

/* Reads the scaling of latent attention. The file has a tenth of "mscale_all_dim", and in all
 * published models "mscale" equals "mscale_all_dim". */
static int read_latent_yarn(const struct translation *t, cJSON *scaling) {
    double tenth = 0, attention = 1;
    char key[KEY_MAX];
    int rc = translation_num(t, LOG_MULTIPLIER, &tenth);
    if (!rc) rc = translation_num(t, ".rope.scaling.attn_factor", &attention);
    if (!rc && translation_has(t, ".rope.scaling.yarn_attn_factor"))
        rc = translation_num(t, ".rope.scaling.yarn_attn_factor", &attention);
    if (!rc && attention != 1)
        rc = fault_set(t->fault, ERR_UNSUPPORTED,
                       translation_key(t, ".rope.scaling.attn_factor", key),
                       "%g is not supported with latent attention", attention);
    if (rc || tenth == 0) return rc;
    const double scale = round(tenth * 1e6) / 1e5; /* the file has it in float32 */
    rc = translation_set(t, scaling, "mscale", scale);
    return rc ? rc : translation_set(t, scaling, "mscale_all_dim", scale);
}

static int read_yarn(const struct translation *t, cJSON *scaling, double factor) {
    double attention = 1;
    double log_multiplier = 1;
    char key[KEY_MAX];
    int rc = COPY_ROWS(t, yarn_rows, scaling);
    if (!rc && t->row->yarn_untruncated && !cJSON_AddBoolToObject(scaling, "truncate", false))
        rc = translation_no_memory(t);
    if (!rc && t->row->latent) return read_latent_yarn(t, scaling);
    if (!rc) rc = translation_num(t, ".rope.scaling.attn_factor", &attention);
    if (!rc && translation_has(t, ".rope.scaling.yarn_attn_factor"))
        rc = translation_num(t, ".rope.scaling.yarn_attn_factor", &attention);
    if (!rc) rc = translation_num(t, LOG_MULTIPLIER, &log_multiplier);
    if (!rc && log_multiplier != 1)
        rc = fault_set(t->fault, ERR_UNSUPPORTED, translation_key(t, LOG_MULTIPLIER, key),
                       "%g is not supported", log_multiplier);
    /* Yarn divides its own factor by the same. */
    if (!rc && translation_has(t, LOG_MULTIPLIER))
        return translation_set(t, scaling, "attention_factor", 1);
    if (rc || attention == 1) return rc;
    /* In the file the factor multiplies what yarn has by itself, but for OLMo 3, whose converter
     * copies config.json's. */
    if (t->row->windowed) return translation_set(t, scaling, "attention_factor", attention);
    return translation_set(t, scaling, "attention_factor", attention * (0.1 * log(factor) + 1));
}

/* Converters name no kind beside these tensors, but the scale and the original length. */
static int read_longrope(const struct translation *t) {
    double attention = 0;
    int64_t original = 0;
    cJSON *scaling = cJSON_AddObjectToObject(t->config, "rope_scaling");
    if (!scaling || !cJSON_AddStringToObject(scaling, "rope_type", "longrope"))
        return translation_no_memory(t);
    int rc = add_rope_factors(t, scaling, LONG_FACTORS, "long_factor");
    if (!rc) rc = add_rope_factors(t, scaling, SHORT_FACTORS, "short_factor");
    if (!rc) rc = translation_int(t, ".rope.scaling.original_context_length", &original);
    if (!rc) rc = translation_num(t, ".rope.scaling.attn_factor", &attention);
    if (!rc && original)
        rc = translation_set(t, scaling, "original_max_position_embeddings", (double)original);
    if (!rc && attention > 0) rc = translation_set(t, scaling, "attention_factor", attention);
    return rc;
}

/* Files have four numbers, of which config.json has the first three. */
static int add_sections(const struct translation *t, cJSON *scaling) {
    char key[KEY_MAX];
    const struct gguf_value *list;
    int rc = gguf_array(t->gguf, translation_key(t, SECTIONS, key), GGUF_I32, &list, t->fault);
    cJSON *out = rc ? NULL : cJSON_AddArrayToObject(scaling, "mrope_section");
    if (!rc && !out) rc = translation_no_memory(t);
    for (size_t i = 0; !rc && i < list->count; i++) {
        const int64_t pairs = gguf_element_int(list, i);
        cJSON *number = i < 3 ? cJSON_CreateNumber((double)pairs) : NULL;
        if (i >= 3 && pairs != 0)
            rc = fault_set(t->fault, ERR_UNSUPPORTED, key, "%lld pairs of a fourth dimension",
                           (long long)pairs);
        else if (i < 3 && (!number || !cJSON_AddItemToArray(out, number)))
            rc = translation_no_memory(t);
    }
    return rc;
}

int translate_rope(const struct translation *t) {
    char kind[TEXT_MAX], key[KEY_MAX];
    double factor = 1;
    int rc = translation_text(t, ".rope.scaling.type", kind);
    if (!rc) rc = translation_num(t, ".rope.scaling.factor", &factor);
    if (!rc && !kind[0] && translation_has(t, ".rope.scale_linear")) {
        snprintf(kind, sizeof kind, "linear");
        rc = translation_num(t, ".rope.scale_linear", &factor);
    }
    if (rc) return rc;
    if (factor == 0) factor = 1; /* none */
    bool plain = !kind[0] || !strcmp(kind, "none"), yarn = !strcmp(kind, "yarn");
    bool longrope = !strcmp(kind, "longrope");
    if (weights_find(t->weights, LONG_FACTORS) && (plain || longrope)) return read_longrope(t);
    if (longrope)
        return fault_set(t->fault, ERR_UNSUPPORTED, translation_key(t, ".rope.scaling.type", key),
                         "\"longrope\" without " LONG_FACTORS " is not supported");
    double attention = 1;
    const bool sections = translation_has(t, SECTIONS);
    if (sections && !t->row->sections)
        return fault_set(t->fault, ERR_UNSUPPORTED, translation_key(t, SECTIONS, key),
                         "rotations for images are not supported");
    rc = yarn ? 0 : translation_num(t, ".rope.scaling.attn_factor", &attention);
    if (!rc && attention != 1)
        rc = fault_set(t->fault, ERR_UNSUPPORTED,
                       translation_key(t, ".rope.scaling.attn_factor", key),
                       "%g is not supported with this scaling", attention);
    if (rc) return rc;
    bool factors = weights_find(t->weights, "rope_freqs.weight") != NULL;
    if (plain && !factors && !t->row->rope_told && !sections) return 0;
    if (factors && !plain)
        return fault_set(t->fault, ERR_UNSUPPORTED, "rope_freqs.weight",
                         "together with rope.scaling.type \"%.32s\" is not supported", kind);
    cJSON *scaling = cJSON_AddObjectToObject(t->config, "rope_scaling");
    if (!scaling || !cJSON_AddStringToObject(scaling, "rope_type",
                                             factors ? "factors"
                                             : plain ? "default"
                                                     : kind))
        return translation_no_memory(t);
    if (sections) rc = add_sections(t, scaling);
    if (rc || (plain && !factors)) return rc;
    if (!factors) rc = translation_set(t, scaling, "factor", factor);
    if (!rc) rc = add_rope_factors(t, scaling, "rope_freqs.weight", "factors");
    if (!rc && yarn) rc = read_yarn(t, scaling, factor);
    return rc;
}
