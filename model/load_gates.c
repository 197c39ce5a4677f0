/* Loads gates: from a file that is given or found, or random ones. */
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"
#include "base/mem.h"
#include "model/gates.h"
#include "model/internal.h"

#define GATES_FILE_MAX ((size_t)4 << 30)

/* ---- The base model ---- */

/* Refuses gates of another model. Every quantisation of a model has the same `vectors`. If only the
 * matrices differ, the gates belong to the model in another quantisation, or to a fine-tuned one,
 * and may be used, unless they were fitted on this machine: then this model gets its own. */
static int check_base(const struct model *model, const struct weights *weights,
                      const struct base_digest *base, enum gates_from from, struct fault *fault) {
    struct base_digest found;
    if (!weights) return 0;
    if (!base->vectors[0] && from != GATES_GIVEN)
        return fault_set(fault, ERR_INVALID, "keepd.base",
                         "names no base model. If the gates are this model's, say so: --gates with "
                         "this file");
    if (!base->vectors[0]) return 0;
    int rc = base_digest(&model->config, weights, &found);
    if (rc) return fault_set(fault, rc, "keepd.base", "%s", err_text(rc));
    if (strcmp(found.vectors, base->vectors) != 0)
        return fault_set(fault, ERR_INVALID, "keepd.base.vectors",
                         "the gates were trained for another base model: %.16s..., the model has "
                         "%.16s...",
                         base->vectors, found.vectors);
    if (strcmp(found.matrices, base->matrices) == 0) return 0;
    if (from == GATES_CACHED)
        return fault_set(fault, ERR_INVALID, "keepd.base.matrices", "is not this model's");
    if (base->matrices[0])
        log_warn("the gates were trained for the same base model with other matrices: this one is "
                 "quantised in another way, or fine-tuned");
    return 0;
}

/* ---- One file ---- */

/* Reads the layers' numbers and, unless the file is only checked, gives them to the backend. */
static int load_gate_layers(struct model *model, struct gates *gates, bool check_only,
                            struct fault *fault) {
    struct kern *kern = model->kern;
    int rc = 0;
    for (int i = 0; i < model->config.layers && !rc; i++) {
        struct kern_gate_spec spec;
        if (!holds_entries(&model->config.per_layer[i])) continue;
        rc = gates_layer(gates, model->config.per_layer[i].index, &spec, fault);
        if (!rc && !check_only)
            rc = kern->ops->gate_load(kern, &spec, &model->layers[i].gate, fault);
    }
    return rc;
}

/* Puts the file's name in front of an error inside the file, and says what to do. */
static int in_gates_file(int rc, const char *path, enum gates_from from, struct fault *fault) {
    if (!fault) return rc;
    struct fault inside = *fault;
    const char *instead = rc == ERR_NOMEM || rc == ERR_DEVICE || from == GATES_CACHED ? ""
                          : from == GATES_GIVEN
                              ? "; name this model's gates, or leave --gates out"
                              : "; --gates FILE names others, --gates '' uses none";
    return fault_set(fault, rc, "gates", "%.200s: %s%s%.280s%s", path, inside.field,
                     inside.field[0] ? ": " : "", inside.text, instead);
}

/* Refuses gates of a model with other sizes, by the first tensor that does not fit. */
static int refuse_sizes(const struct gates_shape *shape, struct fault *fault) {
    if (!fault) return ERR_INVALID;
    struct fault inside = *fault;
    return fault_set(fault, ERR_INVALID, inside.field,
                     "%s: the gates were made for another model, or are damaged; this one has %d "
                     "layers with %d KV heads and width %d",
                     inside.text, shape->layers, shape->heads_kv, shape->d_model);
}

static int load_gates_file(struct model *model, const struct model_options *options,
                           const struct weights *weights, const char *path, enum gates_from from,
                           struct fault *fault) {
    const struct model_config *c = &model->config;
    const struct gates_shape shape = {c->cache_layers, c->heads_kv, c->d_model, c->heads};
    struct gates gates;
    char *data = NULL;
    size_t size = 0;
    int rc = file_read(path, GATES_FILE_MAX, &data, &size, fault);
    if (rc && fault) fault->field[0] = '\0'; /* the message names the path */
    if (!rc) rc = gates_parse(data, size, &shape, &gates, fault);
    if (rc == ERR_INVALID) rc = refuse_sizes(&shape, fault);
    if (rc) goto out;
    rc = check_base(model, weights, &gates.header.base, from, fault);
    if (!rc) rc = load_gate_layers(model, &gates, options->check_only, fault);
    if (!rc) {
        model->gates = gates.header;
        model->gates_from = from;
        snprintf(model->gates_path, sizeof model->gates_path, "%s", path);
    }
    gates_close(&gates);
out:
    mem_free(data);
    return rc ? in_gates_file(rc, path, from, fault) : 0;
}

/* ---- Finding them ---- */

static int too_long(struct fault *fault, const char *field) {
    return fault_set(fault, ERR_INVALID, field, "the name is too long");
}

static int load_beside(struct model *model, const struct model_options *options,
                       const struct weights *weights, struct fault *fault) {
    static const char suffix[] = ".gguf";
    const bool file = gguf_is_path(options->dir);
    size_t length = strlen(options->dir);
    if (file && length > strlen(suffix) &&
        strcmp(options->dir + length - strlen(suffix), suffix) == 0)
        length -= strlen(suffix);
    char path[PATH_MAX];
    const int n = snprintf(path, sizeof path, "%.*s%sgates.safetensors", (int)length, options->dir,
                           file ? "." : "/");
    if (n < 0 || (size_t)n >= sizeof path) return too_long(fault, "model");
    if (access(path, F_OK) != 0) return 0;
    return load_gates_file(model, options, weights, path, GATES_BESIDE, fault);
}

static int name_cached(struct model *model, const struct model_options *options,
                       const struct weights *weights, struct fault *fault) {
    struct base_digest base;
    struct stat info;
    if (!options->gates_cache || !options->gates_cache[0] || !weights) return 0;
    if (stat(options->gates_cache, &info) == 0 && !S_ISDIR(info.st_mode))
        return fault_set(fault, ERR_INVALID, "gates-cache",
                         "%.200s is no folder; name one, in which fitted gates are kept",
                         options->gates_cache);
    int rc = base_digest(&model->config, weights, &base);
    if (rc) return fault_set(fault, rc, "model", "%s", err_text(rc));
    const int n =
        snprintf(model->gates_cached, sizeof model->gates_cached, "%s/%.16s-%.16s.safetensors",
                 options->gates_cache, base.vectors, base.matrices);
    return n < 0 || (size_t)n >= sizeof model->gates_cached ? too_long(fault, "gates-cache") : 0;
}

static int load_cached(struct model *model, const struct model_options *options,
                       const struct weights *weights, struct fault *fault) {
    const char *path = model->gates_cached;
    struct fault inside = {0};
    if (!path[0] || access(path, F_OK) != 0) return 0;
    int rc = load_gates_file(model, options, weights, path, GATES_CACHED, &inside);
    if (rc == ERR_NOMEM || rc == ERR_DEVICE)
        return fault_set(fault, rc, "gates", "%s", inside.text);
    if (rc) log_warn("gates that were fitted here are left out: %s", inside.text);
    return 0;
}

int model_load_gates(struct model *model, const struct model_options *options,
                     const struct weights *weights, struct fault *fault) {
    const char *given = options->gates;
    int rc = name_cached(model, options, weights, fault);
    if (rc || (given && !given[0])) return rc;
    if (given) return load_gates_file(model, options, weights, given, GATES_GIVEN, fault);
    rc = load_beside(model, options, weights, fault);
    if (rc || model->gates_from != GATES_NONE) return rc;
    if (!options->random_weights) return load_cached(model, options, weights, fault);
    if (!options->check_only) return random_gates(model, fault);
    model->gates_from = GATES_RANDOM;
    return 0;
}
