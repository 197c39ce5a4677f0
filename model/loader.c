/* Tensors that are found and checked, memory for them, and progress. */
#include "model/loader.h"

#include "base/mem.h"

void load_name(const struct loader *loader, enum role role, int layer, char out[TENSOR_NAME_MAX]) {
    tensor_name(out, loader->naming, role, layer + loader->model->block_layer, loader->expert);
}

void load_room_free(struct room *room) {
    mem_free(room->data);
    *room = (struct room){0};
}

char *load_room(struct room *room, size_t count, size_t size) {
    size_t bytes = 0;
    if (__builtin_mul_overflow(count, size, &bytes)) return NULL;
    if (bytes <= room->bytes) return room->data;
    mem_free(room->data);
    room->data = mem_try_alloc(bytes, 1);
    room->bytes = room->data ? bytes : 0;
    return room->data;
}

static const char *supported_types(const struct loader *loader, bool matrix) {
    if (!matrix) return "F32, F16, BF16";
    return !naming_is_gguf(loader->naming)
               ? "F32, F16, BF16 and, in a layer, F8_E4M3"
               : "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, "
                 "Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4, NVFP4";
}

/* Returns whether the tensor has the shape; dimensions of 1 may be missing or extra. */
static bool has_shape(const struct tensor *tensor, const int64_t *shape, int dims) {
    int at = 0;
    for (int i = 0; i < tensor->dims; i++) {
        while (at < dims && shape[at] == 1) at++;
        if (tensor->shape[i] == 1) continue;
        if (at == dims || tensor->shape[i] != shape[at++]) return false;
    }
    while (at < dims && shape[at] == 1) at++;
    return at == dims;
}

void load_note_used(struct loader *loader, const struct tensor *tensor) {
    if (loader->used && tensor) loader->used[tensor - weights_at(loader->weights, 0)] = true;
}

int load_find_tensor(struct loader *loader, const char *name, int experts, int64_t rows,
                     int64_t cols, bool matrix, const struct tensor **out) {
    const int64_t all[3] = {experts, rows, cols}, *shape = experts ? all : all + 1;
    const int dims = (cols ? 2 : 1) + (experts ? 1 : 0);
    char expected[48], found[96];
    const struct tensor *tensor = weights_find(loader->weights, name);
    tensor_shape_text(shape, dims, expected, sizeof expected);
    const char *absent = tensor ? NULL : weights_absent(loader->weights, name);
    if (absent)
        return fault_set(loader->fault, ERR_NOTFOUND, name,
                         "tensor is missing: %.200s does not have it, although the index says so",
                         absent);
    if (!tensor)
        return fault_set(loader->fault, ERR_NOTFOUND, name, "tensor is missing, expected [%s]",
                         expected);
    tensor_shape_text(tensor->shape, tensor->dims, found, sizeof found);
    /* the rows may be joined into one vector */
    const bool joined = !matrix && cols && tensor->dims == 1 && tensor->shape[0] == rows * cols;
    if (!has_shape(tensor, shape, dims) && !joined)
        return fault_set(loader->fault, ERR_INVALID, name, "shape is [%s], expected [%s]", found,
                         expected);
    if (!tensor_is_float(tensor->dtype) &&
        !(matrix && (tensor->dtype == TENSOR_E4M3 || tensor->dtype == TENSOR_BLOCKS)))
        return fault_set(loader->fault, ERR_UNSUPPORTED, name, "type %s is not supported: %s",
                         tensor->type, supported_types(loader, matrix));
    load_note_used(loader, tensor);
    *out = tensor;
    return 0;
}

int load_report(struct loader *loader, size_t bytes) {
    loader->model->weight_bytes += bytes;
    const struct model_options *options = loader->options;
    if (!options->progress) return 0;
    size_t read = loader->read < loader->total ? loader->read : loader->total;
    if (options->progress(options->progress_arg, read, loader->total, "weights")) return 0;
    return fault_set(loader->fault, ERR_STOPPED, "model", "loading was stopped");
}

const int *load_order(const struct loader *loader, enum role role) {
    return tensor_is_rotated(role) ? loader->order : NULL;
}

int load_refuse_element(struct loader *loader, const char *name, int64_t element) {
    return fault_set(loader->fault, ERR_INVALID, name, "element %lld is not a finite number",
                     (long long)element);
}
