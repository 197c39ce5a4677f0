/* Gates: from their file, or random ones. */
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
#define HASH_FILE_MAX  ((size_t)64 << 20) /* hashing more would delay the start for a warning */

/* Gates name their base by the digest of its one weight file, or of a sharded model's index. */
static void warn_other_base(const struct model_options *options, const char *expected) {
    static const char *const names[] = {"model.safetensors", "model.safetensors.index.json"};
    char path[PATH_MAX], found[SHA256_HEX], *data = NULL;
    size_t size = 0;
    struct stat info;
    bool exists = false;
    for (size_t i = 0; i < sizeof names / sizeof names[0] && !exists; i++) {
        int n = snprintf(path, sizeof path, "%s/%s", options->dir, names[i]);
        exists = n > 0 && (size_t)n < sizeof path && stat(path, &info) == 0;
    }
    if (*expected && gguf_is_path(options->dir))
        log_info("gates name their base by its safetensors file: not compared with a GGUF file");
    if (!*expected || !exists || info.st_size >= (off_t)HASH_FILE_MAX) return;
    if (file_read(path, HASH_FILE_MAX, &data, &size, NULL)) return;
    sha256_hex(data, size, found);
    mem_free(data);
    if (strcmp(found, expected) != 0)
        log_warn("gates were trained for another base model: base_sha256 is %.16s..., the weights "
                 "have %.16s...",
                 expected, found);
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
                           const char *path, struct fault *fault) {
    const struct model_config *c = &model->config;
    const struct gates_shape shape = {c->layers, c->heads_kv, c->d_model};
    struct gates gates;
    char *data = NULL;
    size_t size = 0;
    int rc = file_read(path, GATES_FILE_MAX, &data, &size, fault);
    if (rc && fault) fault->field[0] = '\0'; /* the message names the path */
    if (!rc) rc = gates_parse(data, size, &shape, &gates, fault);
    if (rc) goto out;
    if (!options->check_only) warn_other_base(options, gates.header.base_sha256);
    if (!options->check_only) rc = load_gate_layers(model, &gates, fault);
    model->gates = gates.header;
    gates_close(&gates);
out:
    mem_free(data);
    if (!rc) model->has_gates = true;
    return rc ? in_gates_file(rc, path, fault) : 0;
}

int model_load_gates(struct model *model, const struct model_options *options,
                     struct fault *fault) {
    char path[PATH_MAX];
    if (options->gates)
        return *options->gates ? load_gates_file(model, options, options->gates, fault) : 0;
    if (gguf_is_path(options->dir)) return 0; /* a file has no place for them */
    int n = snprintf(path, sizeof path, "%s/gates.safetensors", options->dir);
    if (n < 0 || (size_t)n >= sizeof path)
        return fault_set(fault, ERR_INVALID, "model", "directory name is too long");
    if (access(path, F_OK) == 0) return load_gates_file(model, options, path, fault);
    if (!options->random_weights) return 0;
    if (!options->check_only) return random_gates(model, fault);
    model->has_gates = true;
    return 0;
}
