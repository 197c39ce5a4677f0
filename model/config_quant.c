/* Every field that changes how weights are read is either executed or refused by name. Modules that
 * are not quantised ("ignore", "modules_to_not_convert", "dynamic") need no list here: the files
 * say it, by the tensors that they have. */
#include "model/config_quant.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/json.h"
#include "kernels/kern.h"
#include "model/digest_field.h"

#define PATH "quantization_config"

/* Numbers of one kind in a compressed-tensors group: E4M3 whole, or per channel, or dynamic per
 * token. */
static bool is_e4m3(const cJSON *numbers, bool activations) {
    const char *type = "", *strategy = "";
    int64_t bits = 0;
    bool dynamic = false, symmetric = true;
    struct fault ignored = {0};
    if (json_str(numbers, NULL, "type", &type, &ignored) ||
        json_str(numbers, NULL, "strategy", &strategy, &ignored) ||
        json_int(numbers, NULL, "num_bits", 0, 64, &bits, &ignored) ||
        json_bool(numbers, NULL, "dynamic", &dynamic, &ignored) ||
        json_bool(numbers, NULL, "symmetric", &symmetric, &ignored))
        return false;
    if (bits != 8 || strcmp(type, "float") != 0 || !symmetric || dynamic != activations)
        return false;
    if (activations) return strcmp(strategy, "token") == 0;
    return strcmp(strategy, "channel") == 0 || strcmp(strategy, "tensor") == 0;
}

static bool is_compressed_fp8(const cJSON *quantization) {
    const cJSON *groups = json_get(quantization, "config_groups"), *group;
    const char *format = "";
    struct fault ignored = {0};
    if (json_str(quantization, NULL, "format", &format, &ignored) ||
        strcmp(format, "float-quantized") != 0 || json_get(quantization, "kv_cache_scheme") ||
        !cJSON_IsObject(groups))
        return false;
    cJSON_ArrayForEach(group, groups) {
        const cJSON *inputs = json_get(group, "input_activations");
        if (!is_e4m3(json_get(group, "weights"), false) || (inputs && !is_e4m3(inputs, true)) ||
            json_get(group, "output_activations"))
            return false;
    }
    return true;
}

/* ---- 4 bits ---------------------------------------------------------------------------------- */

static int refuse(struct fault *fault, const char *field, const char *why) {
    return fault_set(fault, ERR_UNSUPPORTED, field, "%s", why);
}

/* Some files write a field's older name. */
static int read_int(const cJSON *object, const char *path, const char *key, const char *older,
                    int64_t *value, struct fault *fault) {
    const char *name = older && !json_get(object, key) ? older : key;
    return json_int(object, path, name, -1, 1 << 20, value, fault);
}

static int read_bits(const cJSON *object, const char *path, const char *key, const char *older,
                     struct fault *fault) {
    char field[96];
    int64_t bits = 0;
    int rc = read_int(object, path, key, older, &bits, fault);
    snprintf(field, sizeof field, "%s.%s", path, key);
    if (rc || bits == 4) return rc;
    return fault_set(fault, ERR_UNSUPPORTED, field, "weights of %lld bits are not supported: 4",
                     (long long)bits);
}

static int read_group(const cJSON *object, const char *path, const char *older, struct packing *out,
                      struct fault *fault) {
    char field[96];
    int64_t group = 0;
    int rc = read_int(object, path, "group_size", older, &group, fault);
    snprintf(field, sizeof field, "%s.group_size", path);
    if (rc) return rc;
    if (group != -1 && (group < KERN_BLOCK || group % KERN_BLOCK))
        return fault_set(fault, ERR_UNSUPPORTED, field,
                         "groups of %lld are not supported: multiples of %d, or -1",
                         (long long)group, KERN_BLOCK);
    out->group = group < 0 ? 0 : (int)group;
    return 0;
}

static int read_awq(const cJSON *q, struct packing *out, struct fault *fault) {
    const char *version = "gemm";
    bool zero_point = true;
    int rc = read_bits(q, PATH, "bits", "w_bit", fault);
    if (!rc) rc = read_group(q, PATH, "q_group_size", out, fault);
    if (!rc) rc = json_str(q, PATH, "version", &version, fault);
    if (!rc) rc = json_bool(q, PATH, "zero_point", &zero_point, fault);
    if (rc) return rc;
    if (strcasecmp(version, "gemm") != 0)
        return refuse(fault, PATH ".version", "only the layout \"gemm\" is supported");
    return zero_point ? 0 : refuse(fault, PATH ".zero_point", "AWQ without zero points");
}

static int read_gptq(const cJSON *q, struct packing *out, struct fault *fault) {
    const char *format = "gptq";
    bool marlin = false;
    int rc = read_bits(q, PATH, "bits", NULL, fault);
    if (!rc) rc = read_group(q, PATH, NULL, out, fault);
    if (!rc) rc = json_bool(q, PATH, "sym", &out->symmetric, fault);
    if (!rc) rc = json_bool(q, PATH, "desc_act", &out->reordered, fault);
    if (!rc) rc = json_bool(q, PATH, "is_marlin_format", &marlin, fault);
    if (!rc) rc = json_str(q, PATH, "checkpoint_format", &format, fault);
    if (rc) return rc;
    out->less_one = strcmp(format, "gptq") == 0;
    if (marlin || (!out->less_one && strcmp(format, "gptq_v2") != 0))
        return refuse(fault, PATH ".checkpoint_format",
                      "only the layouts \"gptq\" and \"gptq_v2\" are supported");
    return 0;
}

/* compressed-tensors "pack-quantized": one group of modules for all. */
static int read_tensors(const cJSON *q, struct packing *out, struct fault *fault) {
    static const char path[] = PATH ".config_groups.weights";
    const cJSON *groups = json_get(q, "config_groups");
    const cJSON *group = cJSON_IsObject(groups) ? groups->child : NULL;
    const cJSON *weights = group ? json_get(group, "weights") : NULL;
    const char *type = "int", *strategy = "";
    bool dynamic = false;
    if (!weights || group->next || json_get(group, "input_activations") ||
        json_get(group, "output_activations") || json_get(q, "kv_cache_scheme"))
        return refuse(fault, PATH ".config_groups",
                      "expected one group of weights, without activations and caches");
    int rc = read_bits(weights, path, "num_bits", NULL, fault);
    if (!rc) rc = json_str(weights, path, "type", &type, fault);
    if (!rc) rc = json_str(weights, path, "strategy", &strategy, fault);
    if (!rc) rc = json_bool(weights, path, "symmetric", &out->symmetric, fault);
    if (!rc) rc = json_bool(weights, path, "dynamic", &dynamic, fault);
    if (rc) return rc;
    const bool channel = strcmp(strategy, "channel") == 0;
    if (strcmp(type, "int") != 0 || dynamic || (!channel && strcmp(strategy, "group") != 0))
        return refuse(fault, PATH ".config_groups",
                      "expected static integers with a scale per group or channel");
    return channel ? 0 : read_group(weights, path, NULL, out, fault);
}

static bool is_packed_tensors(const cJSON *quantization) {
    const char *format = "";
    struct fault ignored = {0};
    return json_str(quantization, NULL, "format", &format, &ignored) == 0 &&
           strcmp(format, "pack-quantized") == 0;
}

/* As keepd saves a model. */
static int read_own(const cJSON *q, struct packing *out, struct fault *fault) {
    static const struct {
        const char *name;
        enum kern_dtype dtype;
    } dtypes[] = {{"F32", KERN_F32}, {"F16", KERN_F16}, {"BF16", KERN_BF16}};
    const char *format = "", *dtype = "BF16";
    int rc = json_str(q, PATH, "format", &format, fault);
    if (!rc) rc = json_str(q, PATH, "dtype", &dtype, fault);
    if (!rc) rc = digest_field_read(q, PATH, "base_matrices", out->base_matrices, fault);
    if (rc) return rc;
    if (strcmp(format, "blocks") != 0)
        return refuse(fault, PATH ".format", "only \"blocks\" is supported");
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        out->dtype = dtypes[i].dtype;
        if (strcmp(dtype, dtypes[i].name) == 0) return 0;
    }
    return refuse(fault, PATH ".dtype", "expected F32, F16 or BF16");
}

/* ---- The whole ------------------------------------------------------------------------------- */

/* Weights in E4M3 with a scale each or one per output (`weight_scale`), and activations without a
 * scale of their own: quant_method "fp8", or compressed-tensors' "float-quantized". */
static bool is_fp8(const cJSON *quantization, const char *method, const char *scheme) {
    if (strcmp(method, "compressed-tensors") == 0) return is_compressed_fp8(quantization);
    return strcmp(method, "fp8") == 0 && strcmp(scheme, "dynamic") == 0 &&
           !json_get(quantization, "weight_block_size");
}

int model_config_read_quantization(const cJSON *root, bool mxfp4, struct packing *out,
                                   struct fault *fault) {
    const cJSON *quantization = json_get(root, PATH);
    const char *method = "", *scheme = "dynamic";
    *out = (struct packing){0};
    if (!quantization) return 0;
    int rc = json_str(quantization, PATH, "quant_method", &method, fault);
    if (!rc) rc = json_str(quantization, PATH, "activation_scheme", &scheme, fault);
    if (rc) return rc;
    const cJSON *transform = json_get(quantization, "transform_config");
    if (transform && !(cJSON_IsObject(transform) && !transform->child))
        return refuse(fault, PATH ".transform_config", "transformed weights are not supported");
    if ((strcmp(method, "mxfp4") == 0 && mxfp4) || is_fp8(quantization, method, scheme)) return 0;
    out->symmetric = true;
    out->kind = strcmp(method, "awq") == 0     ? PACKING_AWQ
                : strcmp(method, "gptq") == 0  ? PACKING_GPTQ
                : strcmp(method, "keepd") == 0 ? PACKING_OWN
                : strcmp(method, "compressed-tensors") == 0 && is_packed_tensors(quantization)
                    ? PACKING_TENSORS
                    : PACKING_NONE;
    if (out->kind == PACKING_AWQ) return read_awq(quantization, out, fault);
    if (out->kind == PACKING_GPTQ) return read_gptq(quantization, out, fault);
    if (out->kind == PACKING_TENSORS) return read_tensors(quantization, out, fault);
    if (out->kind == PACKING_OWN) return read_own(quantization, out, fault);
    return fault_set(
        fault, ERR_UNSUPPORTED, PATH,
        "weights of \"%.32s\" are not supported, but for fp8 with one scale per tensor or per "
        "channel and dynamic activations, and for 4 bits of awq, gptq and compressed-tensors",
        method);
}
