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

static int refuse(struct fault *fault, const char *field, const char *why) {
    return fault_set(fault, ERR_UNSUPPORTED, field, "%s", why);
}

/* Returns the member's text; "" if it is absent or not a string. */
static const char *quant_text_of(const cJSON *object, const char *key) {
    const cJSON *node = json_get(object, key);
    return cJSON_IsString(node) ? node->valuestring : "";
}

/* ---- FP8 ---- */

#define BLOCK_SIZE 128 /* the size of blocks, if the file does not name one */
#define BLOCK_MAX  (1 << 20)

/* Reads a scheme with weights in E4M3 and scales, one per output or one per block. The numbers that
 * the weights stand for are multiplied as they are. How the scheme would round activations and the
 * cache (dynamically, or with scales of their own) is ignored: that saves time and changes numbers.
 */
static int quant_read_block(const cJSON *object, const char *key, struct packing *out,
                            struct fault *fault) {
    const cJSON *list = json_get(object, key);
    int64_t sizes[2] = {BLOCK_SIZE, BLOCK_SIZE};
    char field[96];
    snprintf(field, sizeof field, PATH ".%s", key);
    if (list && (!cJSON_IsArray(list) || cJSON_GetArraySize(list) != 2 ||
                 json_node_int(list->child, 1, BLOCK_MAX, &sizes[0]) ||
                 json_node_int(list->child->next, 1, BLOCK_MAX, &sizes[1])))
        return fault_set(fault, ERR_INVALID, field, "expected two sizes, [outputs, inputs]");
    out->kind = PACKING_FP8;
    out->block_rows = (int)sizes[0];
    out->block_cols = (int)sizes[1];
    return 0;
}

/* Reads Hugging Face's and vLLM's scheme. */
static int read_fp8(const cJSON *q, struct packing *out, struct fault *fault) {
    const char *format = "e4m3";
    int rc = json_str(q, PATH, "fmt", &format, fault);
    if (rc) return rc;
    if (strcmp(format, "e4m3") != 0 && strcmp(format, "float8_e4m3fn") != 0)
        return fault_set(fault, ERR_UNSUPPORTED, PATH ".fmt",
                         "\"%.32s\" is not supported: only \"e4m3\"", format);
    return quant_read_block(q, "weight_block_size", out, fault);
}

#define WEIGHTS PATH ".config_groups.weights"

/* Reads a group of modules of compressed-tensors, which must have static, symmetric floats of
 * `wanted` bits. */
static int read_group_floats(const cJSON *group, int wanted, const char **strategy,
                             struct fault *fault) {
    const cJSON *weights = json_get(group, "weights");
    const char *type = "float";
    int64_t bits = wanted;
    bool dynamic = false, symmetric = true;
    int rc = json_str(weights, WEIGHTS, "type", &type, fault);
    if (!rc) rc = json_str(weights, WEIGHTS, "strategy", strategy, fault);
    if (!rc) rc = json_int(weights, WEIGHTS, "num_bits", 0, 64, &bits, fault);
    if (!rc) rc = json_bool(weights, WEIGHTS, "dynamic", &dynamic, fault);
    if (!rc) rc = json_bool(weights, WEIGHTS, "symmetric", &symmetric, fault);
    if (rc || (weights && bits == wanted && strcmp(type, "float") == 0 && symmetric && !dynamic &&
               !json_get(group, "output_activations")))
        return rc;
    return fault_set(fault, ERR_UNSUPPORTED, WEIGHTS,
                     "%lld bits of type \"%.16s\" are not supported here: static, symmetric floats "
                     "of %d bits",
                     (long long)bits, type, wanted);
}

/* Reads compressed-tensors "float-quantized"; all groups of modules must be alike. */
static int quant_read_floats(const cJSON *q, struct packing *out, struct fault *fault) {
    const cJSON *groups = json_get(q, "config_groups"), *group;
    if (!cJSON_IsObject(groups) || !groups->child)
        return refuse(fault, PATH ".config_groups", "expected groups of modules");
    cJSON_ArrayForEach(group, groups) {
        const char *strategy = "tensor";
        int rc = read_group_floats(group, 8, &strategy, fault);
        if (rc) return rc;
        if (strcmp(strategy, "tensor") != 0 && strcmp(strategy, "channel") != 0 &&
            strcmp(strategy, "block") != 0)
            return fault_set(fault, ERR_UNSUPPORTED, WEIGHTS,
                             "a scale per %.32s is not supported: per tensor, channel or block",
                             strategy);
        rc = quant_read_block(json_get(group, "weights"), "block_structure", out, fault);
        if (rc) return rc;
    }
    return 0;
}

/* Reads compressed-tensors "nvfp4-pack-quantized". */
static int read_nvfp4_groups(const cJSON *q, struct packing *out, struct fault *fault) {
    const cJSON *groups = json_get(q, "config_groups"), *group;
    (void)out;
    if (!cJSON_IsObject(groups) || !groups->child)
        return refuse(fault, PATH ".config_groups", "expected groups of modules");
    cJSON_ArrayForEach(group, groups) {
        const char *strategy = "tensor_group";
        int64_t size = 16;
        int rc = read_group_floats(group, 4, &strategy, fault);
        if (!rc)
            rc = json_int(json_get(group, "weights"), WEIGHTS, "group_size", 0, 1 << 20, &size,
                          fault);
        if (rc) return rc;
        if (strcmp(strategy, "tensor_group") != 0 || size != 16)
            return fault_set(fault, ERR_UNSUPPORTED, WEIGHTS,
                             "a scale per %.32s of %lld is not supported: per tensor_group of 16",
                             strategy, (long long)size);
    }
    return 0;
}

/* Reads the scheme of NVIDIA's modelopt. `q`: the object in config.json, or "quantization" of
 * hf_quant_config.json. */
static int read_modelopt(const cJSON *q, struct packing *out, struct fault *fault) {
    static const char *const known[] = {"FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"};
    const cJSON *inner = json_get(q, "quantization");
    const char *algorithm = quant_text_of(cJSON_IsObject(inner) ? inner : q, "quant_algo");
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (strcasecmp(algorithm, known[i]) == 0)
            return quant_read_block(q, "weight_block_size", out, fault);
    out->kind = PACKING_NVFP4;
    if (strcasecmp(algorithm, "NVFP4") == 0) return 0;
    return fault_set(fault, ERR_UNSUPPORTED, PATH ".quant_algo",
                     "weights of modelopt's \"%.32s\" are not supported: FP8, "
                     "FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, NVFP4",
                     algorithm);
}

/* ---- 4 bits ---- */

/* Reads an integer by its name or by the older name that some files have. */
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

/* Reads compressed-tensors "pack-quantized", with one group for all modules. */
static int read_tensors(const cJSON *q, struct packing *out, struct fault *fault) {
    static const char path[] = WEIGHTS;
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

/* Reads keepd's own scheme, as model_save writes it. */
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

/* ---- The whole ---- */

/* Methods by their names and, for compressed-tensors, by the format. */
static const struct method {
    const char *name, *format; /* format NULL: any */
    enum packing_kind kind;
    int (*read)(const cJSON *quantization, struct packing *out, struct fault *fault);
} methods[] = {
    {"awq", NULL, PACKING_AWQ, read_awq},
    {"gptq", NULL, PACKING_GPTQ, read_gptq},
    {"compressed-tensors", "pack-quantized", PACKING_TENSORS, read_tensors},
    {"compressed-tensors", "float-quantized", PACKING_FP8, quant_read_floats},
    {"compressed-tensors", "nvfp4-pack-quantized", PACKING_NVFP4_TENSORS, read_nvfp4_groups},
    {"compressed-tensors", "naive-quantized", PACKING_FP8, quant_read_floats},
    {"fp8", NULL, PACKING_FP8, read_fp8},
    {"modelopt", NULL, PACKING_FP8, read_modelopt},
    {"keepd", NULL, PACKING_OWN, read_own},
};

/* Returns the method. Files of modelopt name no method, but an algorithm. */
static const char *method_of(const cJSON *quantization) {
    const char *method = quant_text_of(quantization, "quant_method");
    const cJSON *inner = json_get(quantization, "quantization");
    const cJSON *algorithm = json_get(cJSON_IsObject(inner) ? inner : quantization, "quant_algo");
    return !method[0] && algorithm ? "modelopt" : method;
}

static int refuse_method(const cJSON *quantization, const char *method, struct fault *fault) {
    const char *format = quant_text_of(quantization, "format");
    if (!method[0])
        return refuse(fault, PATH ".quant_method", "missing: how were the weights quantised?");
    return fault_set(fault, ERR_UNSUPPORTED, PATH,
                     "weights of \"%.32s\"%s%.32s%s are not supported: fp8, modelopt's FP8 and "
                     "NVFP4, compressed-tensors (float-quantized, nvfp4-pack-quantized, "
                     "pack-quantized), awq and gptq in 4 bits",
                     method, format[0] ? " in the format \"" : "", format, format[0] ? "\"" : "");
}

int model_config_read_quantization(const cJSON *root, bool mxfp4, struct packing *out,
                                   struct fault *fault) {
    const cJSON *quantization = json_get(root, PATH);
    const char *method = "";
    *out = (struct packing){0};
    if (!quantization) return 0;
    int rc = json_str(quantization, PATH, "quant_method", &method, fault);
    if (rc) return rc;
    method = method_of(quantization);
    if (json_get(quantization, "transform_config"))
        return refuse(fault, PATH ".transform_config", "transformed weights are not supported");
    if (strcmp(method, "mxfp4") == 0 && mxfp4) return 0;
    for (size_t i = 0; i < sizeof methods / sizeof methods[0]; i++) {
        const struct method *row = &methods[i];
        if (strcmp(method, row->name) != 0 ||
            (row->format && strcmp(quant_text_of(quantization, "format"), row->format) != 0))
            continue;
        out->kind = row->kind;
        out->symmetric = true;
        return row->read(quantization, out, fault);
    }
    return refuse_method(quantization, method, fault);
}
