/* Kinds of layers: the mixer of tokens, windows, rotation, heads. */
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "model/config_family.h"

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
    /* Encoders' files have the tokens on both sides together. */
    if (out->both_ways && window) window = window / 2 + 1;
    if (types) return read_layer_types(types, family, use ? (int)window : 0, out, fault);
    const int64_t shift = family->from_first ? 1 : family->from_last ? out->layers % every : 0;
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

/* The member of a layer: transformers 5.24 writes its number with as many digits as the last one
 * has. */
static const cJSON *find_layer(const cJSON *list, int layer) {
    const cJSON *item;
    cJSON_ArrayForEach(item, list) {
        const char *digits = item->string;
        if (digits[0] && strspn(digits, "0123456789") == strlen(digits) &&
            strtol(digits, NULL, 10) == layer)
            return item;
    }
    return NULL;
}

/* The heads of layers that have others, as transformers 5.24 writes them; else *dim and *heads stay
 * what they are. All layers of a kind have equal ones. */
static int read_layer_heads(const cJSON *root, const struct model_config *c, int64_t *dim,
                            int64_t *heads, struct fault *fault) {
    static const char name[] = "per_layer_config";
    const cJSON *list = json_get(root, name);
    bool first = true;
    if (list && !cJSON_IsObject(list) && !cJSON_IsNull(list))
        return fault_set(fault, ERR_INVALID, name, "expected an object, found %s",
                         json_type_name(list));
    for (int i = 0; i < c->layers && cJSON_IsObject(list); i++) {
        int64_t own[2] = {c->head_dim, c->heads_kv};
        const cJSON *layer = find_layer(list, i);
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

/* transformers, GraniteMoeHybrid: without "layer_types" no layer has attention. */
static int require_types(const cJSON *root, struct fault *fault) {
    if (json_get(root, "layer_types")) return 0;
    return fault_set(fault, ERR_INVALID, "layer_types", "missing");
}

/* Without "layer_types" every n-th layer has attention. */
static int read_interval(const cJSON *root, struct model_config *out, struct fault *fault) {
    int64_t every = 4;
    int rc = json_int(root, NULL, "full_attention_interval", 1, INT32_MAX, &every, fault);
    for (int i = 0; i < out->layers && !rc && !json_get(root, "layer_types"); i++)
        if ((i + 1) % every) out->per_layer[i].mixer = MIXER_DELTA;
    return rc;
}

int model_config_read_layers(const cJSON *root, const struct family *family,
                             struct model_config *out, struct fault *fault) {
    out->per_layer = mem_try_alloc((size_t)out->layers, sizeof *out->per_layer);
    if (!out->per_layer) return fault_set(fault, ERR_NOMEM, "num_hidden_layers", "out of memory");
    int rc = family->granite_hybrid ? require_types(root, fault) : 0;
    if (!rc) rc = read_windows(root, family, out, fault);
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
