#include "model/pooling.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/gguf.h"
#include "base/json.h"
#include "base/mem.h"

#define POOLING_FILE_MAX ((size_t)1 << 20)

/* The file's tree; NULL in *out: there is no such file. */
static int read_tree(const char *dir, const char *name, cJSON **out, struct fault *fault) {
    static const struct json_limits limits = {
        .bytes = POOLING_FILE_MAX, .depth = 32, .nodes = 10000, .file = true};
    char path[PATH_MAX], *text = NULL;
    size_t size = 0;
    struct fault inner = {0};
    *out = NULL;
    const int n = snprintf(path, sizeof path, "%s/%s", dir, name);
    if (n < 0 || (size_t)n >= sizeof path || access(path, F_OK) != 0) return 0;
    int rc = file_read(path, POOLING_FILE_MAX, &text, &size, fault);
    if (rc == 0) {
        rc = json_parse(text, size, &limits, out, &inner);
        if (rc != 0) fault_set(fault, rc, name, "%s", inner.text);
    }
    mem_free(text);
    return rc;
}

/* The settings of sentence-transformers' Pooling: one flag for each way; what several flags ask for
 * together is joined there. Newer files have the name of the way alone. */
static void read_modes(const cJSON *config, struct pooling *out) {
    static const struct {
        const char *flag, *name;
        enum model_pooling how;
    } modes[] = {
        {"pooling_mode_cls_token", "cls", MODEL_POOL_CLS},
        {"pooling_mode_mean_tokens", "mean", MODEL_POOL_MEAN},
        {"pooling_mode_lasttoken", "lasttoken", MODEL_POOL_LAST},
        {"pooling_mode_max_tokens", "max", MODEL_POOL_UNSAID},
        {"pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens", MODEL_POOL_UNSAID},
        {"pooling_mode_weightedmean_tokens", "weightedmean", MODEL_POOL_UNSAID},
    };
    const cJSON *named = json_get(config, "pooling_mode");
    int found = 0;
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        const bool is_named =
            cJSON_IsString(named) && strcmp(named->valuestring, modes[i].name) == 0;
        if (!is_named && !cJSON_IsTrue(json_get(config, modes[i].flag))) continue;
        out->how = modes[i].how;
        if (modes[i].how == MODEL_POOL_UNSAID || ++found > 1)
            snprintf(out->other, sizeof out->other, "pooling '%s'%s", modes[i].name,
                     found > 1 ? " beside another" : "");
    }
    if (cJSON_IsString(named) && found == 0 && !out->other[0])
        snprintf(out->other, sizeof out->other, "pooling '%.40s'", named->valuestring);
}

static bool is_module(const char *type, const char *name) {
    const char *dot = strrchr(type, '.');
    return strcmp(dot ? dot + 1 : type, name) == 0;
}

/* Finds the folder of the Pooling module, and notes modules that keepd does not have. */
static const char *read_modules(const cJSON *modules, struct pooling *out) {
    const char *folder = NULL;
    const cJSON *module;
    cJSON_ArrayForEach(module, modules) {
        const cJSON *type = json_get(module, "type"), *path = json_get(module, "path");
        if (!cJSON_IsString(type)) continue;
        const char *name = type->valuestring;
        if (is_module(name, "Pooling"))
            folder = cJSON_IsString(path) ? path->valuestring : "1_Pooling";
        else if (!is_module(name, "Transformer") && !is_module(name, "Normalize"))
            snprintf(out->other, sizeof out->other, "the module '%.60s'", name);
    }
    return folder;
}

int pooling_of_directory(const char *dir, struct pooling *out, struct fault *fault) {
    cJSON *modules = NULL, *config = NULL;
    char name[256];
    *out = (struct pooling){0};
    int rc = read_tree(dir, "modules.json", &modules, fault);
    const char *folder = modules ? read_modules(modules, out) : "1_Pooling";
    if (rc == 0 && folder && !strstr(folder, "..")) {
        snprintf(name, sizeof name, "%.200s/config.json", folder);
        rc = read_tree(dir, name, &config, fault);
    }
    if (config) read_modes(config, out);
    json_free(config);
    config = NULL;
    if (rc == 0) rc = read_tree(dir, "sentence_bert_config.json", &config, fault);
    int64_t most = 0;
    if (rc == 0 && config)
        rc = json_int(config, NULL, "max_seq_length", 1, INT32_MAX, &most, fault);
    out->tokens_max = (int)most;
    json_free(config);
    json_free(modules);
    return rc;
}

int pooling_of_gguf(const struct gguf *gguf, struct pooling *out, struct fault *fault) {
    enum { NONE, MEAN, CLS, LAST }; /* llama.cpp's numbers */
    struct gguf_string family = {0};
    char key[88];
    int64_t type = NONE;
    *out = (struct pooling){0};
    int rc = gguf_str(gguf, "general.architecture", &family, fault);
    if (rc != 0 || !family.size || family.size > 64) return rc;
    snprintf(key, sizeof key, "%.*s.pooling_type", (int)family.size, family.data);
    rc = gguf_int(gguf, key, 0, INT32_MAX, &type, fault);
    if (rc != 0) return rc;
    out->how = type == MEAN   ? MODEL_POOL_MEAN
               : type == CLS  ? MODEL_POOL_CLS
               : type == LAST ? MODEL_POOL_LAST
                              : MODEL_POOL_UNSAID;
    if (type > LAST) snprintf(out->other, sizeof out->other, "pooling type %lld", (long long)type);
    return 0;
}
