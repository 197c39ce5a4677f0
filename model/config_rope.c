/* The rotary embedding: each frequency of the rotation, from theta and one of several scalings.
 *
 * A family's defaults come in by struct model_rope; everything else is read from config.json. The
 * formulas are those of transformers (modeling_rope_utils), which published files assume. */
#include "model/config_rope.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"

struct rope {
    const cJSON *node; /* rope_parameters, rope_scaling or NULL */
    const char *path;
    double theta;
    int dims;          /* dimensions of a head that rotate */
    double proportion; /* proportional scaling: the part of the dimensions that rotate */
    int max_positions, context;
    double factor, low, high, original; /* llama3; the others share factor and original */
    const cJSON *factors;               /* longrope, factors: [dims / 2] */
    bool whole;  /* rope_parameters without partial_rotary_factor rotate whole heads */
    bool nested; /* rope_parameters may have one object for each layer type */
    double ramp_low, ramp_high; /* yarn, in frequency indexes */
    double attention;
    double products; /* yarn, latent attention: factor on products of queries and keys */
    double reach;    /* positions that the scaling was made for; 0: the file does not say */
};

static int rope_number(const struct rope *rope, const char *key, double min, double max,
                       double *value, struct fault *fault) {
    if (!json_get(rope->node, key)) {
        char field[64];
        snprintf(field, sizeof field, "%s.%s", rope->path, key);
        return fault_set(fault, ERR_INVALID, field, "missing");
    }
    return json_num(rope->node, rope->path, key, min, max, value, fault);
}

static int rope_read_factor(struct rope *rope, struct fault *fault) {
    return rope_number(rope, "factor", 1, 1e6, &rope->factor, fault);
}

/* Reads linear scaling. max_position_embeddings is raised only if the file says what was scaled: in
 * many files it is scaled already. */
static int rope_read_linear(struct rope *rope, struct fault *fault) {
    double original = 0;
    int rc = rope_read_factor(rope, fault);
    if (!rc)
        rc = json_num(rope->node, rope->path, "original_max_position_embeddings", 1,
                      MODEL_POSITIONS_MAX, &original, fault);
    rope->reach = original * rope->factor;
    return rc;
}

static int rope_read_llama3(struct rope *rope, struct fault *fault) {
    int rc = rope_read_factor(rope, fault);
    if (!rc) rc = rope_number(rope, "low_freq_factor", 1e-6, 1e6, &rope->low, fault);
    if (!rc) rc = rope_number(rope, "high_freq_factor", 1e-6, 1e6, &rope->high, fault);
    if (!rc)
        rc = rope_number(rope, "original_max_position_embeddings", 1, MODEL_POSITIONS_MAX,
                         &rope->original, fault);
    if (!rc && rope->high <= rope->low)
        rc = fault_set(fault, ERR_INVALID, "high_freq_factor",
                       "%g must be above low_freq_factor %g", rope->high, rope->low);
    return rc;
}

/* Returns the frequency index that turns `turns` times over the original context. */
static double yarn_index(const struct rope *rope, double turns) {
    return rope->dims * log(rope->original / (turns * 2 * M_PI)) / (2 * log(rope->theta));
}

/* Returns yarn's factor on cosine and sine; some files use a quotient of two of them. */
static double yarn_mscale(const struct rope *rope, double mscale) {
    return rope->factor <= 1 ? 1 : 0.1 * mscale * log(rope->factor) + 1;
}

static int rope_read_mscale(struct rope *rope, struct fault *fault) {
    double own = 0, all = 0;
    int rc = json_num(rope->node, rope->path, "mscale", 0, 1e6, &own, fault);
    if (!rc) rc = json_num(rope->node, rope->path, "mscale_all_dim", 0, 1e6, &all, fault);
    if (all > 0) rope->products = yarn_mscale(rope, all) * yarn_mscale(rope, all);
    rope->attention =
        own > 0 && all > 0 ? yarn_mscale(rope, own) / yarn_mscale(rope, all) : yarn_mscale(rope, 1);
    return rc;
}

static int rope_read_yarn(struct rope *rope, struct fault *fault) {
    double fast = 32, slow = 1;
    bool truncate = true;
    rope->original = rope->max_positions;
    int rc = rope_read_factor(rope, fault);
    if (rc) return rc;
    rc = json_num(rope->node, rope->path, "original_max_position_embeddings", 1,
                  MODEL_POSITIONS_MAX, &rope->original, fault);
    if (!rc) rc = json_num(rope->node, rope->path, "beta_fast", 1e-6, 1e6, &fast, fault);
    if (!rc) rc = json_num(rope->node, rope->path, "beta_slow", 1e-6, 1e6, &slow, fault);
    if (!rc) rc = rope_read_mscale(rope, fault);
    if (!rc)
        rc = json_num(rope->node, rope->path, "attention_factor", 1e-6, 1e6, &rope->attention,
                      fault);
    if (!rc) rc = json_bool(rope->node, rope->path, "truncate", &truncate, fault);
    if (rc) return rc;
    rope->reach = rope->original * rope->factor;
    const double low = yarn_index(rope, fast), high = yarn_index(rope, slow);
    rope->ramp_low = fmax(truncate ? floor(low) : low, 0);
    rope->ramp_high = fmin(truncate ? ceil(high) : high, rope->dims - 1);
    if (rope->ramp_high == rope->ramp_low) rope->ramp_high += 0.001;
    return 0;
}

static int rope_read_list(struct rope *rope, const char *key, struct fault *fault) {
    char field[64];
    snprintf(field, sizeof field, "%s.%s", rope->path, key);
    rope->factors = json_get(rope->node, key);
    if (!cJSON_IsArray(rope->factors) || cJSON_GetArraySize(rope->factors) != rope->dims / 2)
        return fault_set(fault, ERR_INVALID, field, "expected an array of %d numbers",
                         rope->dims / 2);
    const cJSON *item;
    cJSON_ArrayForEach(item, rope->factors) {
        if (!cJSON_IsNumber(item) || !(item->valuedouble >= 1e-3 && item->valuedouble <= 1e6))
            return fault_set(fault, ERR_INVALID, field, "expected numbers above 0");
    }
    return 0;
}

/* Reads two sets of factors: one for contexts within the original one, one for longer contexts. The
 * set is chosen once, by the longest context that is served, because cached keys cannot be rotated
 * again. */
static int rope_read_longrope(struct rope *rope, struct fault *fault) {
    int rc = json_num(rope->node, rope->path, "original_max_position_embeddings", 1,
                      MODEL_POSITIONS_MAX, &rope->original, fault);
    if (rc) return rc;
    double stretch = 1;
    if (rope->original > 0)
        stretch = rope->max_positions / rope->original;
    else
        rc = json_num(rope->node, rope->path, "factor", 1, 1e6, &stretch, fault);
    if (rc) return rc;
    if (rope->original <= 0) rope->original = rope->max_positions;
    const char *key = rope->context > rope->original ? "long_factor" : "short_factor";
    if (stretch > 1 && rope->original <= 1 && !json_get(rope->node, "attention_factor"))
        return fault_set(fault, ERR_INVALID, "original_max_position_embeddings",
                         "longrope without attention_factor needs more than 1 position");
    rope->attention = stretch <= 1 ? 1 : sqrt(1 + log(stretch) / log(rope->original));
    rc = json_num(rope->node, rope->path, "attention_factor", 1e-6, 1e6, &rope->attention, fault);
    if (rc) return rc;
    return rope_read_list(rope, key, fault);
}

/* Reads a divisor for each frequency. GGUF files have these in place of llama3's four numbers. */
static int rope_read_factors(struct rope *rope, struct fault *fault) {
    return rope_read_list(rope, "factors", fault);
}

static double rope_by_factors(const struct rope *rope, int j, double inv) {
    return inv / cJSON_GetArrayItem(rope->factors, j)->valuedouble;
}

static double rope_linear(const struct rope *rope, int j, double inv) {
    (void)j;
    return inv / rope->factor;
}

static double rope_llama3(const struct rope *rope, int j, double inv) {
    (void)j;
    double wave = 2 * M_PI / inv;
    if (wave < rope->original / rope->high) return inv;
    if (wave > rope->original / rope->low) return inv / rope->factor;
    double s = (rope->original / wave - rope->low) / (rope->high - rope->low);
    return (1 - s) * inv / rope->factor + s * inv;
}

static double rope_yarn(const struct rope *rope, int j, double inv) {
    double ramp = (j - rope->ramp_low) / (rope->ramp_high - rope->ramp_low);
    ramp = fmin(fmax(ramp, 0), 1);
    return inv / rope->factor * ramp + inv * (1 - ramp);
}

/* Reads Gemma 4's rotation: the frequencies are those of a whole head, but only the first pairs
 * rotate. */
static int rope_read_proportional(struct rope *rope, struct fault *fault) {
    rope->factor = 1;
    if (rope->proportion * rope->dims < 2)
        return fault_set(fault, ERR_UNSUPPORTED, "partial_rotary_factor",
                         "%g of %d numbers are not a pair", rope->proportion, rope->dims);
    return json_num(rope->node, rope->path, "factor", 1, 1e6, &rope->factor, fault);
}

static double rope_proportional(const struct rope *rope, int j, double inv) {
    return j < (int)(rope->proportion * rope->dims / 2) ? inv / rope->factor : 0;
}

/* The kinds of scaling. "dynamic" is missing on purpose: it would change keys that are cached
 * already. */
static const struct rope_kind {
    const char *name;
    int (*read)(struct rope *rope, struct fault *fault);
    double (*scale)(const struct rope *rope, int j, double inv);
} rope_kinds[] = {
    {"default", NULL, NULL},
    {"mrope", NULL, NULL}, /* "default", with "mrope_section" */
    {"linear", rope_read_linear, rope_linear},
    {"llama3", rope_read_llama3, rope_llama3},
    {"yarn", rope_read_yarn, rope_yarn},
    {"longrope", rope_read_longrope, rope_by_factors},
    {"su", rope_read_longrope, rope_by_factors}, /* former name of longrope */
    {"factors", rope_read_factors, rope_by_factors},
    {"proportional", rope_read_proportional, rope_proportional},
};

/* Finds the object with the rotation. Old files have rope_theta and rope_scaling {type | rope_type,
 * ...}, new ones rope_parameters with all of it. Phi keeps original_max_position_embeddings outside
 * of it; MiniMax says rotary_dim. */
static int rope_find(const cJSON *root, int head_dim, double *rotary, struct rope *rope,
                     struct fault *fault) {
    double dims = 0;
    int rc = json_num(root, NULL, "rope_theta", 1.5, 1e12, &rope->theta, fault);
    if (!rc) rc = json_num(root, NULL, "rotary_dim", 2, head_dim, &dims, fault);
    if (dims > 0) *rotary = dims / head_dim;
    if (!rc) rc = json_num(root, NULL, "partial_rotary_factor", 0, 1, rotary, fault);
    if (!rc)
        rc = json_num(root, NULL, "original_max_position_embeddings", 1, MODEL_POSITIONS_MAX,
                      &rope->original, fault);
    if (rc) return rc;
    rope->path = json_get(root, "rope_parameters") ? "rope_parameters" : "rope_scaling";
    rope->node = json_get(root, rope->path);
    if (!rope->node) return 0;
    if (!cJSON_IsObject(rope->node))
        return fault_set(fault, ERR_INVALID, rope->path, "expected an object, found %s",
                         json_type_name(rope->node));
    static const char *const nested[] = {"full_attention", "sliding_attention"};
    for (size_t i = 0; i < 2; i++) {
        if (!json_get(rope->node, nested[i])) continue;
        if (!rope->nested)
            return fault_set(fault, ERR_UNSUPPORTED, rope->path,
                             "parameters per layer type (%s) are not supported", nested[i]);
        rope->node = json_get(rope->node, nested[0]);
        break;
    }
    if (rope->node && !cJSON_IsObject(rope->node))
        return fault_set(fault, ERR_INVALID, rope->path, "expected an object per layer type");
    if (!rope->node) return 0;
    if (rope->whole) *rotary = 1;
    rc = json_num(rope->node, rope->path, "rope_theta", 1.5, 1e12, &rope->theta, fault);
    return rc ? rc : json_num(rope->node, rope->path, "partial_rotary_factor", 0, 1, rotary, fault);
}

static int refuse_kind(const struct rope *rope, const char *key, const char *name,
                       const char *supported, struct fault *fault) {
    char field[64];
    snprintf(field, sizeof field, "%s.%s", rope->path, key);
    return fault_set(fault, ERR_UNSUPPORTED, field, "\"%.64s\" is not supported: %s", name,
                     supported);
}

static int rope_find_kind(const struct rope *rope, const char *absent, const struct rope_kind **out,
                          struct fault *fault) {
    const char *key = json_get(rope->node, "rope_type") ? "rope_type" : "type", *name = absent;
    int rc = json_str(rope->node, rope->path, key, &name, fault);
    if (rc) return rc;
    for (size_t i = 0; i < sizeof rope_kinds / sizeof rope_kinds[0]; i++) {
        if (!strcmp(name, rope_kinds[i].name)) {
            *out = &rope_kinds[i];
            return 0;
        }
    }
    return refuse_kind(rope, key, name, "default, linear, llama3, yarn, longrope, proportional",
                       fault);
}

/* Computes how many numbers of a head rotate, in pairs; at least one pair does. */
static int read_rotary_dims(double rotary, struct model_config *out, struct fault *fault) {
    out->rotary_dims = out->latent.rank ? out->latent.turned : (int)(out->head_dim * rotary);
    if (out->rotary_dims >= 2 && out->rotary_dims % 2 == 0) return 0;
    return fault_set(fault, ERR_UNSUPPORTED, "partial_rotary_factor",
                     "%g of %d numbers is not an even number of them", rotary, out->head_dim);
}

static int fill_freq(const struct rope *rope, double (*scale)(const struct rope *, int, double),
                     int half, float **out, struct fault *fault) {
    *out = mem_try_alloc((size_t)half, sizeof **out);
    if (!*out) return fault_set(fault, ERR_NOMEM, "head_dim", "out of memory");
    for (int j = 0; j < rope->dims / 2; j++) {
        double inv = pow(rope->theta, -2.0 * j / rope->dims);
        (*out)[j] = (float)(scale ? scale(rope, j, inv) : inv);
    }
    return 0;
}

/* Computes the rotation of layers with windows, which has no scaling. */
static int read_local_rope(const cJSON *root, double theta, struct model_config *out,
                           struct fault *fault) {
    struct rope rope = {.theta = theta, .dims = out->local_dim ? out->local_dim : out->rotary_dims};
    const cJSON *own = json_get(json_get(root, "rope_parameters"), "sliding_attention");
    const char *kind = "default";
    int rc = json_num(root, NULL, "rope_local_base_freq", 1.5, 1e12, &rope.theta, fault);
    if (!rc && own)
        rc = json_num(own, "rope_parameters", "rope_theta", 1.5, 1e12, &rope.theta, fault);
    if (!rc && own) rc = json_str(own, "rope_parameters", "rope_type", &kind, fault);
    if (!rc && strcmp(kind, "default") != 0)
        rc = fault_set(fault, ERR_UNSUPPORTED, "rope_parameters.sliding_attention",
                       "\"%.64s\" is not supported, only \"default\"", kind);
    return rc ? rc : fill_freq(&rope, NULL, out->head_dim / 2, &out->inv_freq_local, fault);
}

/* Reads the scale of queries of Ministral 3, as in Llama 4: queries grow with every original
 * context that lies before them. */
static int read_query_scale(const struct rope *rope, bool may, struct model_config *out,
                            struct fault *fault) {
    double beta = 0;
    int rc = json_num(rope->node, rope->path, "llama_4_scaling_beta", 0, 1e3, &beta, fault);
    if (rc || beta == 0) return rc;
    if (!may || rope->original < 1)
        return fault_set(fault, ERR_UNSUPPORTED, "llama_4_scaling_beta",
                         may ? "without original_max_position_embeddings is not supported"
                             : "is not supported in models of this family");
    out->query_scale = (struct kern_query_scale){(float)beta, (int32_t)rope->original};
    return 0;
}

/* Reads how pairs are divided among the three places of a token. */
static int read_sections(const struct rope *rope, struct model_sections *out, struct fault *fault) {
    static const char key[] = "mrope_section", flag[] = "mrope_interleaved";
    const cJSON *list = json_get(rope->node, key), *item;
    bool interleaved = out->axes == AXES_INTERLEAVED;
    char field[64];
    int count = 0;
    snprintf(field, sizeof field, "%s.%s", rope->path, key);
    cJSON_ArrayForEach(item, list) {
        int64_t pairs = -1;
        if (json_node_int(item, 0, rope->dims / 2, &pairs)) pairs = -1;
        if (count < 3) out->pairs[count] = (int)pairs;
        count += pairs < 0 ? 4 : 1;
    }
    if (list && (!cJSON_IsArray(list) || count != 3))
        return fault_set(fault, ERR_INVALID, field, "expected three numbers from 0 to %d",
                         rope->dims / 2);
    int rc = json_bool(rope->node, rope->path, flag, &interleaved, fault);
    if (!rc && interleaved != (out->axes == AXES_INTERLEAVED)) {
        snprintf(field, sizeof field, "%s.%s", rope->path, flag);
        rc = fault_set(fault, ERR_UNSUPPORTED, field, "%s is not supported in this family",
                       interleaved ? "true" : "false");
    }
    const int all = out->pairs[0] + out->pairs[1] + out->pairs[2];
    if (!rc && out->axes == AXES_APART && all != rope->dims / 2)
        rc = fault_set(fault, ERR_INVALID, field, "%d, %d and %d are not %d pairs in all",
                       out->pairs[0], out->pairs[1], out->pairs[2], rope->dims / 2);
    return rc;
}

static uint8_t axis_of(const struct model_sections *sections, int pair) {
    const int *s = sections->pairs;
    if (sections->axes == AXES_APART) return (uint8_t)((pair >= s[0]) + (pair >= s[0] + s[1]));
    const int axis = pair % 3;
    return (uint8_t)(axis > 0 && pair < 3 * s[axis] ? axis : 0);
}

static int fill_axes(const struct rope *rope, struct model_sections sections,
                     struct model_config *out, struct fault *fault) {
    if (sections.axes == AXES_ONE) return 0;
    int rc = read_sections(rope, &sections, fault);
    if (rc) return rc;
    out->axes = mem_try_alloc((size_t)out->head_dim / 2, sizeof *out->axes);
    if (!out->axes) return fault_set(fault, ERR_NOMEM, "head_dim", "out of memory");
    out->axes_order = sections.axes;
    for (int j = 0; j < rope->dims / 2; j++) out->axes[j] = axis_of(&sections, j);
    return 0;
}

/* Raises max_positions if the file has only added a scaling for longer texts and left
 * max_position_embeddings as it was. Files with llama3 or longrope scaling always state the scaled
 * length. */
static void rope_extend_positions(const struct rope *rope, struct model_config *out) {
    if (rope->reach > out->max_positions)
        out->max_positions = (int)fmin(rope->reach, MODEL_POSITIONS_MAX);
}

int model_config_read_rope(const cJSON *root, const struct model_rope *defaults, int context,
                           struct model_config *out, struct fault *fault) {
    struct rope rope = {.theta = defaults->theta > 0 ? defaults->theta : 10000,
                        .max_positions = out->max_positions,
                        .context = context ? context : out->max_positions,
                        .attention = 1,
                        .products = 1,
                        .whole = strcmp(defaults->kind, "default") != 0,
                        .nested = defaults->local};
    const struct rope_kind *kind = &rope_kinds[0];
    double rotary = defaults->rotary > 0 ? defaults->rotary : 1;
    int rc = rope_find(root, out->head_dim, &rotary, &rope, fault);
    if (!rc) rc = rope_find_kind(&rope, defaults->kind, &kind, fault);
    if (!rc && defaults->query_scale && !rope.node)
        rc = fault_set(fault, ERR_INVALID, "rope_parameters", "missing");
    if (!rc && out->global_dim && kind->scale != rope_proportional)
        rc = refuse_kind(&rope, "rope_type", kind->name, "proportional, where heads differ", fault);
    rope.proportion = rotary;
    if (kind->scale == rope_proportional) rotary = 1;
    if (!rc) rc = read_rotary_dims(rotary, out, fault);
    rope.dims = out->global_dim ? out->global_dim : out->rotary_dims;
    if (!rc && kind->read) rc = kind->read(&rope, fault);
    if (!rc) rc = read_query_scale(&rope, defaults->query_scale, out, fault);
    if (!rc) rc = fill_freq(&rope, kind->scale, out->head_dim / 2, &out->inv_freq, fault);
    if (!rc) rc = fill_axes(&rope, defaults->sections, out, fault);
    out->rope_scale = (float)rope.attention;
    if (out->latent.rank) out->attend_scale *= (float)rope.products;
    if (!rc) rope_extend_positions(&rope, out);
    if (!rc && rope.nested)
        rc = read_local_rope(root, defaults->local_theta > 0 ? defaults->local_theta : rope.theta,
                             out, fault);
    return rc;
}
