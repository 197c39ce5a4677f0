/* Weights: from the files, or the generator, into the backend. Which tensors there are is said by
 * tensors.h. */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/log.h"
#include "base/mem.h"
#include "kernels/quantize.h"
#include "model/internal.h"
#include "model/tensors.h"
#include "model/weights.h"

#define CODES_LOOKED_AT ((size_t)4096) /* together, before one of them is looked for */

/* Where tensors come from: mapped files or, without any, a seeded generator. */
struct loader {
    struct model *model;
    const struct model_options *options;
    const struct weights *weights; /* NULL: random */
    enum naming naming;            /* of the tensors in the files */
    uint64_t random;
    struct cpu_pool *team; /* NULL: nothing is made */
    uint8_t *codes;        /* [codes_room] a matrix in fp8 on its way to the backend; grows */
    size_t codes_room;
    size_t done, total; /* bytes, for progress */
    struct fault *fault;
};

/* ---- One tensor ---------------------------------------------------------------------------- */

static void shape_text(const int64_t *shape, int dims, char *out, size_t size) {
    size_t used = 0;
    out[0] = '\0';
    for (int i = 0; i < dims && used < size; i++) {
        int n = snprintf(out + used, size - used, "%s%lld", i ? ", " : "", (long long)shape[i]);
        used += n > 0 ? (size_t)n : 0;
    }
}

/* The tensor, checked: `cols` 0 means a vector of `rows`. */
static int find_tensor(struct loader *loader, const char *name, int64_t rows, int64_t cols,
                       const struct tensor **out) {
    const int64_t shape[2] = {rows, cols};
    const int dims = cols ? 2 : 1;
    char expected[48], found[96];
    const struct tensor *tensor = weights_find(loader->weights, name);
    shape_text(shape, dims, expected, sizeof expected);
    if (!tensor)
        return fault_set(loader->fault, ERR_NOTFOUND, name, "tensor is missing, expected [%s]",
                         expected);
    shape_text(tensor->shape, tensor->dims, found, sizeof found);
    if (tensor->dims != dims || memcmp(tensor->shape, shape, (size_t)dims * sizeof shape[0]) != 0)
        return fault_set(loader->fault, ERR_INVALID, name, "shape is [%s], expected [%s]", found,
                         expected);
    if (!tensor_is_float(tensor->dtype) && !(cols && tensor->dtype == TENSOR_E4M3))
        return fault_set(loader->fault, ERR_UNSUPPORTED, name, "type must be F32, F16%s",
                         cols ? ", BF16 or, in a layer, F8_E4M3" : " or BF16");
    *out = tensor;
    return 0;
}

static void report_progress(struct loader *loader, size_t bytes) {
    loader->done += bytes;
    const struct model_options *options = loader->options;
    if (!options->progress) return;
    double fraction = loader->total ? (double)loader->done / (double)loader->total : 1;
    options->progress(options->progress_arg, fraction < 1 ? fraction : 1, "weights");
}

static enum kern_dtype dtype_of(const struct tensor *tensor) {
    return tensor->dtype == TENSOR_F32    ? KERN_F32
           : tensor->dtype == TENSOR_F16  ? KERN_F16
           : tensor->dtype == TENSOR_E4M3 ? KERN_E4M3
                                          : KERN_BF16;
}

/* ---- Matrices ------------------------------------------------------------------------------ */

/* The first code that is not a number, or `count`. */
static size_t find_nan(const uint8_t *codes, size_t count) {
    for (size_t at = 0, end; at < count; at = end) {
        unsigned any = 0;
        end = count - at < CODES_LOOKED_AT ? count : at + CODES_LOOKED_AT;
        for (size_t i = at; i < end; i++) any |= (codes[i] & 0x7f) == 0x7f;
        for (size_t i = at; any && i < end; i++)
            if ((codes[i] & 0x7f) == 0x7f) return i;
    }
    return count;
}

/* The scales of an E4M3 matrix: one for all, or one per output, in the tensor that has its name and
 * "_scale". What is no number, or becomes none with its scale, is refused here: no backend looks
 * for it. Where only the description is checked, the elements are not read. */
static int read_scales(struct loader *loader, const char *name, const struct tensor *codes,
                       float *out) {
    char scale_name[TENSOR_NAME_MAX + 8];
    size_t rows = (size_t)codes->shape[0], count = 1;
    snprintf(scale_name, sizeof scale_name, "%s_scale", name);
    const struct tensor *scale = weights_find(loader->weights, scale_name);
    if (!scale)
        return fault_set(loader->fault, ERR_NOTFOUND, scale_name,
                         "tensor is missing: the scale of an F8_E4M3 matrix");
    for (int i = 0; i < scale->dims; i++) count *= (size_t)scale->shape[i];
    if ((count != 1 && (count != rows || scale->shape[0] != codes->shape[0])) ||
        !tensor_read_floats(scale, 0, count, out))
        return fault_set(loader->fault, ERR_UNSUPPORTED, scale_name,
                         "expected one number or %zu, F32, F16 or BF16", rows);
    for (size_t i = count; i < rows; i++) out[i] = out[0];
    for (size_t i = 0; i < count; i++)
        if (!(out[i] >= 0 && out[i] <= FLT_MAX / QUANTIZE_MOST))
            return fault_set(loader->fault, ERR_INVALID, scale_name, "%g is no scale",
                             (double)out[i]);
    size_t nan = loader->options->check_only ? codes->bytes : find_nan(codes->data, codes->bytes);
    if (nan == codes->bytes) return 0;
    return fault_set(loader->fault, ERR_INVALID, name, "element %zu is not a number", nan);
}

/* Kept from one matrix to the next: touching fresh memory takes as long as making the codes. */
static uint8_t *codes_room(struct loader *loader, size_t bytes) {
    if (bytes <= loader->codes_room) return loader->codes;
    mem_free(loader->codes);
    loader->codes = mem_try_alloc(bytes, 1);
    loader->codes_room = loader->codes ? bytes : 0;
    return loader->codes;
}

/* Hands the matrix to the backend; with `fp8` as E4M3, but for the vocabulary's, whose errors are
 * seen in every token. `name`: of what is at fault. */
static int give_matrix(struct loader *loader, const char *name, struct kern_matrix *matrices,
                       int count, enum kern_shard shard, struct kern_weight **out) {
    struct kern *kern = loader->model->kern;
    size_t rows = 0, cols = (size_t)matrices[0].cols, row = 0;
    for (int i = 0; i < count; i++)
        if (matrices[i].dtype != KERN_E4M3) rows += (size_t)matrices[i].rows;
    if (!loader->options->fp8 || shard == KERN_SHARD_VOCAB || rows == 0)
        return kern->ops->weight_load(kern, matrices, count, shard, out, loader->fault);
    uint8_t *codes = codes_room(loader, rows * cols);
    float *scales = mem_try_alloc(rows, sizeof *scales);
    int err = codes && scales ? 0 : ERR_NOMEM;
    if (err) fault_set(loader->fault, err, name, "no memory for [%zu, %zu] in fp8", rows, cols);
    for (int i = 0; i < count && !err; i++) {
        struct kern_matrix *m = &matrices[i];
        struct fault fault = {0};
        if (m->dtype == KERN_E4M3) continue;
        err = quantize_rows(m, codes + row * cols, scales + row, loader->team, &fault);
        if (err) fault_set(loader->fault, err, name, "%s", fault.text);
        m->data = codes + row * cols;
        m->scale = scales + row;
        m->dtype = KERN_E4M3;
        row += (size_t)m->rows;
    }
    if (!err) err = kern->ops->weight_load(kern, matrices, count, shard, out, loader->fault);
    mem_free(scales);
    return err;
}

static int load_random_matrix(struct loader *loader, struct kern_matrix *matrices, int count,
                              enum kern_shard shard, struct kern_weight **out) {
    int64_t rows = 0, cols = matrices[0].cols;
    for (int i = 0; i < count; i++) rows += matrices[i].rows;
    size_t words = ((size_t)rows * (size_t)cols + 3) / 4;
    uint64_t *data = mem_try_alloc(words, sizeof *data);
    if (!data)
        return fault_set(loader->fault, ERR_NOMEM, "random weights", "no memory for [%lld, %lld]",
                         (long long)rows, (long long)cols);
    random_fill(loader->team, &loader->random, data, words, cols);
    const uint16_t *at = (const uint16_t *)data;
    for (int i = 0; i < count; at += matrices[i].rows * cols, i++) {
        matrices[i].data = at;
        matrices[i].dtype = KERN_BF16;
    }
    int err = give_matrix(loader, "random weights", matrices, count, shard, out);
    mem_free(data);
    if (!err) report_progress(loader, words * sizeof *data);
    return err;
}

/* The rows of a tensor that several parts of a slot share: those before the part's own, and all. */
static void shared_rows(const struct loader *loader, const struct slot *slot, int part, int layer,
                        int64_t *before, int64_t *all) {
    char name[TENSOR_NAME_MAX], other[TENSOR_NAME_MAX];
    int64_t rows, cols;
    *before = *all = 0;
    tensor_name(name, loader->naming, slot->parts[part], layer);
    for (int i = 0; i < slot->count; i++) {
        tensor_name(other, loader->naming, slot->parts[i], layer);
        if (strcmp(name, other) != 0) continue;
        tensor_shape(&loader->model->config, slot->parts[i], &rows, &cols);
        *all += rows;
        if (i < part) *before += rows;
    }
}

static int find_matrix(struct loader *loader, const struct slot *slot, int part, int layer,
                       float *scales, struct kern_matrix *out) {
    char name[TENSOR_NAME_MAX];
    const struct tensor *tensor = NULL; /* set where there is no error */
    int64_t before, all;
    tensor_name(name, loader->naming, slot->parts[part], layer);
    shared_rows(loader, slot, part, layer, &before, &all);
    int err = find_tensor(loader, name, all, out->cols, &tensor);
    if (err) return err;
    out->dtype = dtype_of(tensor);
    out->data = (const char *)tensor->data +
                (size_t)before * (size_t)out->cols * kern_dtype_bytes(out->dtype);
    if (tensor->dtype != TENSOR_E4M3) return 0;
    if (slot->shard == KERN_SHARD_VOCAB || all != out->rows)
        return fault_set(loader->fault, ERR_UNSUPPORTED, name, "type must be F32, F16 or BF16");
    out->scale = scales;
    return read_scales(loader, name, tensor, scales);
}

/* ---- Heads that rotate in part --------------------------------------------------------------- */

/* Backends rotate pairs (j, j + D/2) of a head; a file whose heads rotate in their first R numbers
 * only has the pairs (j, j + R/2), and the others behind. The file's row of a head that becomes the
 * backend's row `to`: */
static int rotary_row(const struct model_config *config, int to) {
    int half = config->head_dim / 2, turning = config->rotary_dims / 2, j = to % half;
    bool second = to >= half;
    if (j < turning) return second ? turning + j : j;
    return config->rotary_dims + j - turning + (second ? half - turning : 0);
}

static void permute_heads(const struct model_config *config, int64_t rows, size_t row_bytes,
                          const char *from, char *to) {
    int dim = config->head_dim;
    for (int64_t row = 0; row < rows; row++) {
        int64_t source = row - row % dim + rotary_row(config, (int)(row % dim));
        memcpy(to + (size_t)row * row_bytes, from + (size_t)source * row_bytes, row_bytes);
    }
}

/* Queries and keys get their rows in the backend's order. *room: what their data is in from now on,
 * freed by the caller; NULL where nothing had to move. */
static int order_heads(struct loader *loader, const struct slot *slot, const char *name,
                       struct kern_matrix *matrices, char **room) {
    const struct model_config *config = &loader->model->config;
    size_t bytes = 0, at = 0;
    *room = NULL;
    if (!slot->heads || config->rotary_dims == config->head_dim) return 0;
    for (int i = 0; i < slot->count; i++) {
        const struct kern_matrix *m = &matrices[i];
        if (m->scale)
            return fault_set(loader->fault, ERR_UNSUPPORTED, name,
                             "type must be F32, F16 or BF16 where heads rotate in part");
        bytes += (size_t)(m->rows * m->cols) * kern_dtype_bytes(m->dtype);
    }
    *room = mem_try_alloc(bytes, 1);
    if (!*room) return fault_set(loader->fault, ERR_NOMEM, name, "no memory to order its rows");
    for (int i = 0; i < slot->count; i++) {
        struct kern_matrix *m = &matrices[i];
        size_t row_bytes = (size_t)m->cols * kern_dtype_bytes(m->dtype);
        if (slot->parts[i] == ROLE_V) continue;
        permute_heads(config, m->rows, row_bytes, m->data, *room + at);
        m->data = *room + at;
        at += (size_t)m->rows * row_bytes;
    }
    return 0;
}

/* The slot's tensors, of equal columns, joined by rows. */
static int load_matrix(struct loader *loader, int layer, const struct slot *slot,
                       struct kern_weight **out) {
    const struct model_config *config = &loader->model->config;
    struct kern_matrix matrices[SLOT_PARTS_MAX] = {0};
    char name[TENSOR_NAME_MAX], *room = NULL;
    size_t bytes = 0, rows = 0, row = 0;
    for (int i = 0; i < slot->count; i++) {
        struct kern_matrix *m = &matrices[i];
        tensor_shape(config, slot->parts[i], &m->rows, &m->cols);
        m->groups = slot->heads ? config->heads_kv : 0;
        rows += (size_t)m->rows;
    }
    if (!loader->weights && loader->options->check_only) return 0;
    if (!loader->weights)
        return load_random_matrix(loader, matrices, slot->count, slot->shard, out);
    tensor_name(name, loader->naming, slot->parts[0], layer);
    float *scales = mem_try_alloc(rows, sizeof *scales);
    if (!scales) return fault_set(loader->fault, ERR_NOMEM, name, "no memory for its scales");
    int err = 0;
    for (int i = 0; i < slot->count && !err; i++) {
        struct kern_matrix *m = &matrices[i];
        err = find_matrix(loader, slot, i, layer, scales + row, m);
        bytes += (size_t)(m->rows * m->cols) * kern_dtype_bytes(m->dtype);
        row += (size_t)m->rows;
    }
    if (!err && !loader->options->check_only)
        err = order_heads(loader, slot, name, matrices, &room);
    if (!err && !loader->options->check_only)
        err = give_matrix(loader, name, matrices, slot->count, slot->shard, out);
    mem_free(room);
    mem_free(scales);
    if (!err && !loader->options->check_only) report_progress(loader, bytes);
    return err;
}

/* ---- Vectors ------------------------------------------------------------------------------- */

static int read_vector(struct loader *loader, int layer, const struct slot *slot, float *host,
                       size_t *bytes) {
    for (int i = 0; i < slot->count; i++) {
        char name[TENSOR_NAME_MAX];
        const struct tensor *tensor;
        int64_t rows, cols;
        tensor_name(name, loader->naming, slot->parts[i], layer);
        tensor_shape(&loader->model->config, slot->parts[i], &rows, &cols);
        int err = find_tensor(loader, name, rows, 0, &tensor);
        if (err) return err;
        CHECK(tensor_read_floats(tensor, 0, (size_t)rows, host));
        host += rows;
        *bytes += tensor->bytes;
    }
    return 0;
}

/* The slot's vectors joined, as float32 backend memory. */
static int load_vector(struct loader *loader, int layer, const struct slot *slot, float **out) {
    struct kern *kern = loader->model->kern;
    char name[TENSOR_NAME_MAX];
    size_t total = 0, bytes = 0;
    for (int i = 0; i < slot->count; i++) {
        int64_t rows, cols;
        tensor_shape(&loader->model->config, slot->parts[i], &rows, &cols);
        total += (size_t)rows;
    }
    tensor_name(name, loader->naming, slot->parts[0], layer);
    float *host = mem_try_alloc(total, sizeof *host);
    if (!host) return fault_set(loader->fault, ERR_NOMEM, name, "out of memory");
    for (size_t i = 0; i < total; i++) host[i] = slot->random;
    int err = loader->weights ? read_vector(loader, layer, slot, host, &bytes) : 0;
    float scale = slot_scale(slot, &loader->model->config);
    for (size_t i = 0; i < total && !err; i++) host[i] *= scale;
    if (!err) {
        *out = kern->ops->mem_alloc(kern, total * sizeof *host);
        err = *out ? kern->ops->upload(kern, *out, host, total * sizeof *host) : ERR_NOMEM;
        if (err) fault_set(loader->fault, err, name, "%s", err_text(err));
    }
    mem_free(host);
    if (!err) report_progress(loader, bytes);
    return err;
}

/* ---- The whole ----------------------------------------------------------------------------- */

/* `owner`: the struct layer or struct model that the slot is a member of. */
static int load_slot(struct loader *loader, int layer, const struct slot *slot, void *owner) {
    void *member = (char *)owner + slot->offset;
    return slot->shard == KERN_SHARD_NONE ? load_vector(loader, layer, slot, member)
                                          : load_matrix(loader, layer, slot, member);
}

static int refuse_tensor(struct loader *loader, const char *name) {
    if (!weights_find(loader->weights, name)) return 0;
    return fault_set(loader->fault, ERR_UNSUPPORTED, name,
                     "tensor is in the file but config.json has no use for it");
}

/* Tensors that the configuration says are not there: files that have them belong to another
 * computation, and ignoring them would give wrong answers silently. */
static int refuse_extra(struct loader *loader, int layer) {
    char name[TENSOR_NAME_MAX];
    int err = 0;
    for (size_t i = 0; i < layer_slot_count && !err; i++) {
        const struct slot *slot = &layer_slots[i];
        if (slot_wanted(slot, &loader->model->config)) continue;
        for (int k = 0; k < slot->count && !err; k++) {
            tensor_name(name, loader->naming, slot->parts[k], layer);
            err = refuse_tensor(loader, name);
        }
    }
    for (size_t i = 0; !err && tensor_refused(name, loader->naming, i, layer); i++)
        err = refuse_tensor(loader, name);
    return err;
}

static int load_layer(struct loader *loader, int index, struct layer *layer) {
    int err = loader->weights ? refuse_extra(loader, index) : 0;
    for (size_t i = 0; i < layer_slot_count && !err; i++)
        if (slot_wanted(&layer_slots[i], &loader->model->config))
            err = load_slot(loader, index, &layer_slots[i], layer);
    return err;
}

static bool has_tensor(const struct loader *loader, enum role role, int layer) {
    char name[TENSOR_NAME_MAX];
    tensor_name(name, loader->naming, role, layer);
    return weights_find(loader->weights, name) != NULL;
}

static int load_ends(struct loader *loader) {
    struct model *model = loader->model;
    struct model_config *c = &model->config;
    if (loader->weights && has_tensor(loader, ROLE_ATTN_NORM, c->layers)) {
        char next[TENSOR_NAME_MAX];
        tensor_name(next, loader->naming, ROLE_ATTN_NORM, c->layers);
        return fault_set(loader->fault, ERR_INVALID, next,
                         "tensor is in the file but config.json has %d layers", c->layers);
    }
    int err = load_slot(loader, -1, &slot_embed, model);
    if (!err) err = load_slot(loader, -1, &slot_final_norm, model);
    if (err) return err;
    if (!c->tied_embeddings && loader->weights && !has_tensor(loader, ROLE_HEAD, -1)) {
        log_warn("no lm_head.weight in the model files: using model.embed_tokens.weight");
        c->tied_embeddings = true;
    }
    if (!c->tied_embeddings) return load_slot(loader, -1, &slot_head, model);
    model->head = model->embed;
    return 0;
}

static int open_team(struct loader *loader) {
    const struct model_options *options = loader->options;
    int err = options->check_only ? 0 : cpu_pool_open(options->threads, &loader->team);
    return err ? fault_set(loader->fault, err, "threads", "cannot start those that make weights")
               : 0;
}

int model_load_weights(struct model *model, const struct model_options *options,
                       struct fault *fault) {
    struct weights *weights = NULL;
    struct loader loader = {
        .model = model, .options = options, .random = RANDOM_SEED, .fault = fault};
    int err = options->random_weights ? 0 : weights_open_dir(options->dir, &weights, fault);
    if (!err) err = open_team(&loader);
    if (err) goto out;
    loader.weights = weights;
    loader.naming = model->config.fused ? NAMING_HF_FUSED : NAMING_HF;
    loader.total = weights ? weights_bytes(weights) : random_bytes(&model->config);
    if (weights) {
        char name[TENSOR_NAME_MAX];
        tensor_name(name, loader.naming, ROLE_EMBED, -1);
        const struct tensor *embed = weights_find(weights, name);
        if (embed && tensor_is_float(embed->dtype)) model->config.dtype = dtype_of(embed);
    } else {
        model->config.dtype = KERN_BF16;
    }
    err = load_ends(&loader);
    for (int i = 0; i < model->config.layers && !err; i++)
        err = load_layer(&loader, i, &model->layers[i]);
    model->weight_bytes = loader.done;
out:
    mem_free(loader.codes);
    cpu_pool_close(loader.team);
    weights_close(weights);
    return err;
}
