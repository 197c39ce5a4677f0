/* Layers in a GGUF file: widths of networks, KV heads, windows, both kinds of Gemma 4's. */
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "model/translation.h"

/* Layers that have a network have one of the same width. */
static int read_only_width(const struct translation *t) {
    const struct gguf_value *list;
    char key[KEY_MAX];
    int64_t width = 0;
    int rc = translation_list(t, KEY_WIDTH, GGUF_I32, &list);
    for (size_t i = 0; !rc && list && i < list->count; i++) {
        const int64_t own = gguf_element_int(list, i);
        if (own && width && own != width)
            rc = fault_set(t->fault, ERR_UNSUPPORTED, translation_key(t, KEY_WIDTH, key),
                           "%lld in layer %zu is not supported beside %lld", (long long)own, i,
                           (long long)width);
        if (own) width = own;
    }
    return rc || !width ? rc : translation_set(t, t->config, "intermediate_size", (double)width);
}

/* transformers, Gemma4: layers that read the keys and values of others may have networks of twice
 * the width, and files then list the widths. */
int translate_widths(const struct translation *t) {
    const struct gguf_value *list;
    char key[KEY_MAX];
    int64_t width = 0, shared = 0;
    if (!translation_has(t, KEY_WIDTH)) return 0;
    if (t->row->nemotron) return read_only_width(t);
    int rc = t->row->kinds ? translation_list(t, KEY_WIDTH, GGUF_I32, &list) : (list = NULL, 0);
    if (!rc && list) rc = translation_int(t, KEY_SHARED, &shared);
    if (!rc && !list) rc = translation_int(t, KEY_WIDTH, &width);
    if (!rc && list && list->count > 0) width = gguf_element_int(list, 0);
    const int64_t apart = list ? (int64_t)list->count - shared : 0;
    bool wide = false;
    for (int64_t i = 0; !rc && list && i < (int64_t)list->count; i++) {
        const int64_t own = gguf_element_int(list, (size_t)i);
        if (i == apart) wide = own == 2 * width;
        if (own != (i >= apart && wide ? 2 * width : width))
            rc = fault_set(t->fault, ERR_UNSUPPORTED, translation_key(t, KEY_WIDTH, key),
                           "%lld in layer %lld is not supported beside %lld", (long long)own,
                           (long long)i, (long long)width);
    }
    if (!rc && wide && !cJSON_AddBoolToObject(t->config, "use_double_wide_mlp", true))
        rc = translation_no_memory(t);
    return rc ? rc : translation_set(t, t->config, "intermediate_size", (double)width);
}

/* Reads a value that is one number, or one for each layer: all equal, or 0 where the layer has a
 * recurrent state. */
int translate_kv_heads(const struct translation *t) {
    char key[KEY_MAX];
    const struct gguf_value *list;
    int64_t heads = 0;
    cJSON *types = NULL;
    if (!translation_has(t, KEY_KV_HEADS)) /* as many as of queries */
        return cJSON_AddNullToObject(t->config, "num_key_value_heads") ? 0
                                                                       : translation_no_memory(t);
    int rc = translation_list(t, KEY_KV_HEADS, GGUF_I32, &list);
    if (!rc && !list) rc = translation_int(t, KEY_KV_HEADS, &heads);
    if (!rc && list && t->row->headless) {
        types = cJSON_AddArrayToObject(t->config, "layer_types");
        if (!types) return translation_no_memory(t);
    }
    for (size_t i = 0; !rc && list && i < list->count; i++) {
        const int64_t own = gguf_element_int(list, i);
        cJSON *type = types ? cJSON_CreateString(own ? "full_attention" : t->row->headless) : NULL;
        if (types && !(type && cJSON_AddItemToArray(types, type))) return translation_no_memory(t);
        if ((own && heads && own != heads) || (!own && !types && !t->row->nemotron))
            rc = fault_set(t->fault, ERR_UNSUPPORTED, translation_key(t, KEY_KV_HEADS, key),
                           "layers with different numbers of key/value heads are not supported");
        if (own) heads = own;
    }
    return rc ? rc : translation_set(t, t->config, "num_key_value_heads", (double)heads);
}

/* The layers that have the window: a bool for each, or every n-th has none. */
static int translate_pattern(const struct translation *t) {
    static const char name[] = ".attention.sliding_window_pattern";
    const struct gguf_value *value;
    if (!translation_has(t, name)) return 0;
    int rc = translation_list(t, name, GGUF_BOOL, &value);
    if (!rc && !value) {
        int64_t every = 0;
        rc = translation_int(t, name, &every);
        return rc ? rc : translation_set(t, t->config, "sliding_window_pattern", (double)every);
    }
    cJSON *types = rc ? NULL : cJSON_AddArrayToObject(t->config, "layer_types");
    cJSON *turns =
        rc || !t->row->still_globals ? NULL : cJSON_AddArrayToObject(t->config, "no_rope_layers");
    for (size_t i = 0; types && i < value->count; i++) {
        bool sliding = value->data[i] != 0; /* one byte each */
        if (turns && !translation_add_id(turns, sliding)) return translation_no_memory(t);
        cJSON *type = cJSON_CreateString(sliding ? "sliding_attention" : "full_attention");
        if (!type || !cJSON_AddItemToArray(types, type)) return translation_no_memory(t);
    }
    return rc || types ? rc : translation_no_memory(t);
}

int translate_windows(const struct translation *t) {
    bool window = json_get(t->config, "sliding_window") != NULL;
    if (!window && t->row->windows_said && !cJSON_AddNullToObject(t->config, "sliding_window"))
        return translation_no_memory(t);
    if (!translation_has(t, ".attention.sliding_window")) return 0;
    if (!cJSON_AddBoolToObject(t->config, "use_sliding_window", window))
        return translation_no_memory(t);
    return window ? translate_pattern(t) : 0;
}

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
    int rc = translation_list(t, KEY_KV_HEADS, GGUF_I32, &list);
    if (!rc && !list) rc = translation_int(t, KEY_KV_HEADS, &heads[1]);
    if (!rc && !list) heads[0] = heads[1];
    for (int i = 0; !rc && i < count; i++) {
        const bool sliding = is_sliding(t, i);
        const int64_t own =
            list && (size_t)i < list->count ? gguf_element_int(list, (size_t)i) : heads[sliding];
        if (heads[sliding] && own != heads[sliding])
            rc = fault_set(t->fault, ERR_UNSUPPORTED, translation_key(t, KEY_KV_HEADS, key),
                           "layers of one kind with different numbers are not supported");
        heads[sliding] = own;
        tensor_name(name, NAMING_GGUF, ROLE_V, i, 0);
        if (!sliding && i < count - shared && !weights_find(t->weights, name)) equal = true;
    }
    if (!rc && heads[0] != heads[1] && !equal)
        rc = fault_set(t->fault, ERR_UNSUPPORTED, translation_key(t, KEY_KV_HEADS, key),
                       "numbers that differ are not supported where values have a matrix");
    if (!rc) rc = translation_set(t, t->config, "num_key_value_heads", (double)heads[1]);
    if (!rc) rc = translation_set(t, t->config, "num_global_key_value_heads", (double)heads[0]);
    if (!rc && !cJSON_AddBoolToObject(t->config, "attention_k_eq_v", equal))
        rc = translation_no_memory(t);
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
    if (!rope || !cJSON_AddStringToObject(rope, "rope_type", type)) return translation_no_memory(t);
    int rc = translation_num(t, key, &theta);
    if (!rc && theta > 0) rc = translation_set(t, rope, "rope_theta", theta);
    return rc ? rc : translation_set(t, rope, "partial_rotary_factor", part);
}

/* transformers, Gemma4: heads, rotations and networks. */
int translate_kinds(const struct translation *t) {
    static const char *const lengths[] = {".attention.key_length", ".attention.value_length",
                                          ".attention.key_length_swa",
                                          ".attention.value_length_swa"};
    int64_t length[4] = {0}, shared = 0, each = 0;
    double part = 1;
    char key[KEY_MAX];
    int rc = 0;
    for (int i = 0; i < 4 && !rc; i++) rc = translation_int(t, lengths[i], &length[i]);
    for (int i = 0; i < 4 && !rc; i += 2)
        if (length[i] != length[i + 1] || length[i] <= 0)
            rc = fault_set(t->fault, ERR_UNSUPPORTED, translation_key(t, lengths[i + 1], key),
                           "values of %lld beside keys of %lld are not supported",
                           (long long)length[i + 1], (long long)length[i]);
    if (!rc) rc = translation_int(t, KEY_SHARED, &shared);
    if (!rc) rc = translation_int(t, KEY_EACH, &each);
    if (!rc) rc = read_proportion(t, &part);
    if (!rc) rc = translation_set(t, t->config, "global_head_dim", (double)length[0]);
    if (!rc) rc = translation_set(t, t->config, "head_dim", (double)length[2]);
    if (!rc && shared) rc = translation_set(t, t->config, "num_kv_shared_layers", (double)shared);
    if (!rc) rc = translation_set(t, t->config, "hidden_size_per_layer_input", (double)each);
    if (!rc && json_get(t->config, "num_local_experts") &&
        !cJSON_AddBoolToObject(t->config, "enable_moe_block", true))
        rc = translation_no_memory(t);
    if (!rc) rc = translate_kv_kinds(t, shared);
    cJSON *ropes = rc ? NULL : cJSON_AddObjectToObject(t->config, "rope_parameters");
    if (!ropes) return rc ? rc : translation_no_memory(t);
    rc = add_kind_of_rope(t, ropes, "full_attention", "proportional", ".rope.freq_base", part);
    if (rc) return rc;
    return add_kind_of_rope(t, ropes, "sliding_attention", "default", ".rope.freq_base_swa", 1);
}
