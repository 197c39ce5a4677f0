#include "model/pooling.h"

#include <stdio.h>
#include <string.h>

#include "base/gguf.h"
#include "base/json.h"
#include "base/mem.h"
#include "model/json_file.h"

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

static bool is_folder(const char *name) {
    return *name && *name != '.' && *name != '/' && !strstr(name, "..") &&
           strlen(name) < POOLING_FOLDER_SIZE;
}

static struct pooling_dense *next_dense(struct pooling *out) {
    for (int i = 0; i < POOLING_DENSE_MAX; i++)
        if (!out->dense[i].there) return &out->dense[i];
    return NULL;
}

/* Finds the folders of the Pooling module and of Dense modules directly behind it, and notes
 * modules that keepd does not have. */
static const char *read_modules(const cJSON *modules, struct pooling *out) {
    const char *folder = NULL;
    const cJSON *module;
    bool normalised = false;
    cJSON_ArrayForEach(module, modules) {
        const cJSON *type = json_get(module, "type"), *path = json_get(module, "path");
        if (!cJSON_IsString(type)) continue;
        const char *name = type->valuestring, *at = cJSON_IsString(path) ? path->valuestring : "";
        struct pooling_dense *dense = next_dense(out);
        if (is_module(name, "Pooling")) {
            folder = *at ? at : "1_Pooling";
        } else if (is_module(name, "Dense") && folder && !normalised && dense && is_folder(at)) {
            dense->there = true;
            snprintf(dense->folder, sizeof dense->folder, "%s", at);
        } else if (is_module(name, "Normalize")) {
            normalised = true;
        } else if (!is_module(name, "Transformer")) {
            snprintf(out->other, sizeof out->other, "the module '%.60s'", name);
        }
    }
    return folder;
}

/* sentence-transformers, Dense: without an activation it has tanh. */
static int read_dense(const char *dir, struct pooling_dense *dense, struct pooling *out,
                      struct fault *fault) {
    char name[POOLING_FOLDER_SIZE + 32];
    cJSON *config = NULL;
    int64_t width = 0;
    const char *what = "Tanh";
    dense->bias = true;
    snprintf(name, sizeof name, "%s/config.json", dense->folder);
    int rc = json_file_read(dir, name, &config, fault);
    if (!rc && !config) {
        snprintf(out->other, sizeof out->other, "%.70s, which is missing", name);
        return 0;
    }
    if (!rc) rc = json_int(config, name, "out_features", 1, 1 << 16, &width, fault);
    if (!rc && !width) rc = fault_set(fault, ERR_INVALID, name, "out_features is missing");
    if (!rc) rc = json_bool(config, name, "bias", &dense->bias, fault);
    if (!rc) rc = json_str(config, name, "activation_function", &what, fault);
    dense->width = (int)width;
    dense->tanh = !rc && is_module(what, "Tanh");
    if (!rc && !dense->tanh && !is_module(what, "Identity"))
        snprintf(out->other, sizeof out->other, "the activation '%.60s'", what);
    json_free(config);
    return rc;
}

static bool is_prompt(const cJSON *node) {
    return cJSON_IsString(node) && node->string[0];
}

/* sentence-transformers, "prompts": texts by name. */
static int copy_prompts(const cJSON *prompts, struct pooling *out, struct fault *fault) {
    size_t bytes = 0, count = 0;
    const cJSON *node;
    cJSON_ArrayForEach(node, prompts) {
        if (!is_prompt(node)) continue;
        bytes += strlen(node->string) + strlen(node->valuestring) + 2;
        count++;
    }
    if (!cJSON_IsObject(prompts) || count == 0) return 0;
    if (count > POOLING_PROMPTS_MAX)
        return fault_set(fault, ERR_LIMIT, "config_sentence_transformers.json",
                         "more than %d prompts", POOLING_PROMPTS_MAX);
    out->prompts = mem_try_alloc(count * sizeof *out->prompts + bytes, 1);
    if (!out->prompts) return fault_set(fault, ERR_NOMEM, "prompts", "not enough memory");
    char *to = (char *)(out->prompts + count);
    cJSON_ArrayForEach(node, prompts) {
        if (!is_prompt(node)) continue;
        const size_t name = strlen(node->string) + 1, text = strlen(node->valuestring) + 1;
        out->prompts[out->prompt_count++] = (struct pooling_prompt){to, to + name};
        memcpy(to, node->string, name);
        memcpy(to + name, node->valuestring, text);
        to += name + text;
    }
    return 0;
}

static int read_prompts(const char *dir, struct pooling *out, struct fault *fault) {
    cJSON *config = NULL;
    int rc = json_file_read(dir, "config_sentence_transformers.json", &config, fault);
    if (rc == 0 && config) rc = copy_prompts(json_get(config, "prompts"), out, fault);
    json_free(config);
    return rc;
}

void pooling_close(struct pooling *pooling) {
    mem_free(pooling->prompts);
    pooling->prompts = NULL;
    pooling->prompt_count = 0;
}

int pooling_of_directory(const char *dir, struct pooling *out, struct fault *fault) {
    cJSON *modules = NULL, *config = NULL;
    char name[256];
    *out = (struct pooling){0};
    int rc = json_file_read(dir, "modules.json", &modules, fault);
    const char *folder = modules ? read_modules(modules, out) : "1_Pooling";
    if (rc == 0 && folder && !strstr(folder, "..")) {
        snprintf(name, sizeof name, "%.200s/config.json", folder);
        rc = json_file_read(dir, name, &config, fault);
    }
    if (config) read_modes(config, out);
    json_free(config);
    config = NULL;
    for (int i = 0; rc == 0 && i < POOLING_DENSE_MAX && out->dense[i].there; i++)
        rc = read_dense(dir, &out->dense[i], out, fault);
    if (out->other[0]) memset(out->dense, 0, sizeof out->dense); /* no vector is made */
    if (rc == 0) rc = read_prompts(dir, out, fault);
    if (rc == 0) rc = json_file_read(dir, "sentence_bert_config.json", &config, fault);
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
    for (int i = 0; i < POOLING_DENSE_MAX && rc == 0; i++) {
        int64_t width = 0;
        snprintf(key, sizeof key, "%.*s.dense_%d_feat_out", (int)family.size, family.data, i + 2);
        rc = gguf_int(gguf, key, 0, 1 << 16, &width, fault);
        out->dense[i] = (struct pooling_dense){.there = width > 0, .width = (int)width};
        if (i > 0 && width > 0 && !out->dense[i - 1].there)
            rc = fault_set(fault, ERR_INVALID, key,
                           "the file has dense_%d.weight but no dense_%d.weight, whose vector it "
                           "is multiplied with",
                           i + 2, i + 1);
    }
    return rc;
}
