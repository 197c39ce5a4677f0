/* Gates: from their file, or random ones. */
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"
#include "base/mem.h"
#include "model/gates.h"
#include "model/internal.h"

#define GATES_FILE_MAX ((size_t)4 << 30)

/* Gates of another model are refused. Every quantisation of a model has its vectors; other matrices
 * beside them are the model in another quantisation, or fine-tuned, for which the gates may do. */
static int check_base(const struct model *model, const struct weights *weights,
                      const struct base_digest *base, struct fault *fault) {
    struct base_digest found;
    if (!weights || !base->vectors[0]) return 0;
    int rc = base_digest(&model->config, weights, &found);
    if (rc) return fault_set(fault, rc, "keepd.base", "%s", err_text(rc));
    if (strcmp(found.vectors, base->vectors) != 0)
        return fault_set(fault, ERR_INVALID, "keepd.base.vectors",
                         "the gates were trained for another base model: %.16s..., the model has "
                         "%.16s...",
                         base->vectors, found.vectors);
    if (base->matrices[0] && strcmp(found.matrices, base->matrices) != 0)
        log_warn("the gates were trained for the same base model with other matrices: this one is "
                 "quantised in another way, or fine-tuned");
    return 0;
}

static int load_gate_layers(struct model *model, struct gates *gates, struct fault *fault) {
    struct kern *kern = model->kern;
    int rc = 0;
    for (int i = 0; i < model->config.layers && !rc; i++) {
        struct kern_gate_spec spec;
        rc = gates_layer(gates, i, &spec, fault);
        if (!rc) rc = kern->ops->gate_load(kern, &spec, &model->layers[i].gate, fault);
    }
    return rc;
}

/* Prefixes an error inside the file with the file's name. */
static int in_gates_file(int rc, const char *path, struct fault *fault) {
    if (!fault) return rc;
    struct fault inside = *fault;
    return fault_set(fault, rc, "gates", "%.200s: %s%s%s", path, inside.field,
                     inside.field[0] ? ": " : "", inside.text);
}

static int load_gates_file(struct model *model, const struct model_options *options,
                           const struct weights *weights, const char *path, struct fault *fault) {
    const struct model_config *c = &model->config;
    const struct gates_shape shape = {c->layers, c->heads_kv, c->d_model};
    struct gates gates;
    char *data = NULL;
    size_t size = 0;
    int rc = file_read(path, GATES_FILE_MAX, &data, &size, fault);
    if (rc && fault) fault->field[0] = '\0'; /* the message names the path */
    if (!rc) rc = gates_parse(data, size, &shape, &gates, fault);
    if (rc) goto out;
    rc = check_base(model, weights, &gates.header.base, fault);
    if (!rc && !options->check_only) rc = load_gate_layers(model, &gates, fault);
    model->gates = gates.header;
    gates_close(&gates);
out:
    mem_free(data);
    if (!rc) model->has_gates = true;
    return rc ? in_gates_file(rc, path, fault) : 0;
}

int model_load_gates(struct model *model, const struct model_options *options,
                     const struct weights *weights, struct fault *fault) {
    char path[PATH_MAX];
    if (options->gates)
        return *options->gates ? load_gates_file(model, options, weights, options->gates, fault)
                               : 0;
    if (gguf_is_path(options->dir)) return 0; /* a file has no place for them */
    int n = snprintf(path, sizeof path, "%s/gates.safetensors", options->dir);
    if (n < 0 || (size_t)n >= sizeof path)
        return fault_set(fault, ERR_INVALID, "model", "directory name is too long");
    if (access(path, F_OK) == 0) return load_gates_file(model, options, weights, path, fault);
    if (!options->random_weights) return 0;
    if (!options->check_only) return random_gates(model, fault);
    model->has_gates = true;
    return 0;
}
