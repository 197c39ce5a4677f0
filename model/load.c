/* Loads weights into the backend, from files or from a generator. tensors.h says which tensors
 * there are. */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/log.h"
#include "base/mem.h"
#include "kernels/blocks.h"
#include "kernels/quantize.h"
#include "model/blocks.h"
#include "model/internal.h"
#include "model/packed.h"
#include "model/rounding.h"
#include "model/rows.h"
#include "model/tensors.h"
#include "model/weights.h"

/* Memory that is kept from one matrix to the next and only grows: touching fresh memory takes as
 * long as computing its content. */
struct room {
    char *data;
    size_t bytes;
};

/* The source of tensors: mapped files or, without any, a seeded generator. */
struct loader {
    struct model *model;
    const struct model_options *options;
    const struct weights *weights; /* NULL: random */
    enum naming naming;            /* how the files name tensors */
    uint64_t random;
    struct cpu_team *team; /* computes what the files do not have; NULL: nothing is computed */
    struct room codes;     /* a matrix that was rounded, until the backend has it */
    struct room rows;      /* rows that must be changed before the backend takes them */
    struct rows_reader readers[SLOT_PARTS_MAX]; /* for a slot's matrices that become blocks */
    bool *used; /* [tensors] GGUF: which tensors were read; else NULL */
    int *order; /* [head_dim] for each row of a head of q or k, its row in the file; NULL: the same
                   row */
    int expert; /* the expert whose matrices are being loaded */
    size_t read, total; /* bytes of the files, for progress */
    struct fault *fault;
};

static void name_of(const struct loader *loader, enum role role, int layer,
                    char out[TENSOR_NAME_MAX]) {
    tensor_name(out, loader->naming, role, layer + loader->model->block_layer, loader->expert);
}

static void room_free(struct room *room) {
    mem_free(room->data);
    *room = (struct room){0};
}

/* Returns memory for count * size bytes; NULL: there is none. */
static char *room_of(struct room *room, size_t count, size_t size) {
    size_t bytes = 0;
    if (__builtin_mul_overflow(count, size, &bytes)) return NULL;
    if (bytes <= room->bytes) return room->data;
    mem_free(room->data);
    room->data = mem_try_alloc(bytes, 1);
    room->bytes = room->data ? bytes : 0;
    return room->data;
}

/* ---- One tensor ---- */

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

static void note_used(struct loader *loader, const struct tensor *tensor) {
    if (loader->used && tensor) loader->used[tensor - weights_at(loader->weights, 0)] = true;
}

/* Finds a tensor and checks its shape. `cols` 0: it is a vector of `rows` numbers. `experts` above
 * 0: it holds so many matrices. `matrix`: any type that matrices have is allowed. */
static int find_tensor(struct loader *loader, const char *name, int experts, int64_t rows,
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
    note_used(loader, tensor);
    *out = tensor;
    return 0;
}

/* Reports progress; the backend received `bytes` more. ERR_STOPPED: nobody wants the rest. */
static int report_progress(struct loader *loader, size_t bytes) {
    loader->model->weight_bytes += bytes;
    const struct model_options *options = loader->options;
    if (!options->progress) return 0;
    size_t read = loader->read < loader->total ? loader->read : loader->total;
    if (options->progress(options->progress_arg, read, loader->total, "weights")) return 0;
    return fault_set(loader->fault, ERR_STOPPED, "model", "loading was stopped");
}

/* ---- Rows of heads ---- */

/* Makes loader->order. It stays NULL if files have the rows in the backend's order. */
static int make_order(struct loader *loader) {
    const struct model_config *config = &loader->model->config;
    if (!tensor_heads_reordered(config)) return 0;
    loader->order = mem_try_alloc((size_t)config->head_dim, sizeof *loader->order);
    if (!loader->order)
        return fault_set(loader->fault, ERR_NOMEM, "model", "no memory for a table");
    for (int i = 0; i < config->head_dim; i++) loader->order[i] = tensor_loaded_row(config, i);
    return 0;
}

static const int *order_of(const struct loader *loader, enum role role) {
    return tensor_is_rotated(role) ? loader->order : NULL;
}

/* ---- Matrices ---- */

static int no_room_for(struct loader *loader, const char *name, size_t rows, size_t cols) {
    return fault_set(loader->fault, ERR_NOMEM, name, "no memory for [%zu, %zu] in fewer bits", rows,
                     cols);
}

/* Rounds the matrices to E4M3. `scales`: [rows] of all matrices together. */
static int make_e4m3(struct loader *loader, const char *name, struct kern_matrix *matrices,
                     int count, size_t rows, float *scales) {
    size_t cols = (size_t)matrices[0].cols, row = 0;
    uint8_t *codes = (uint8_t *)room_of(&loader->codes, rows, cols);
    if (!codes) return no_room_for(loader, name, rows, cols);
    for (int i = 0; i < count; i++) {
        struct kern_matrix *m = &matrices[i];
        struct fault fault = {0};
        if (m->dtype == KERN_E4M3) continue;
        int rc = quantize_rows(m, codes + row * cols, scales + row, loader->team, &fault);
        if (rc) return fault_set(loader->fault, rc, name, "%s", fault.text);
        m->data = codes + row * cols;
        m->scale = scales + row;
        m->dtype = KERN_E4M3;
        row += (size_t)m->rows;
    }
    return 0;
}

/* Rounds the matrices to blocks. `inputs`: see quantize_blocks. */
static int round_to_blocks(struct loader *loader, const char *name, struct kern_matrix *matrices,
                           int count, enum kern_dtype dtype, const float *inputs) {
    size_t each = (size_t)blocks_of(matrices[0].cols), rows = 0;
    for (int i = 0; i < count; i++) rows += (size_t)matrices[i].rows;
    struct block *to =
        (struct block *)(void *)room_of(&loader->codes, rows, each * sizeof(struct block));
    if (!to) return no_room_for(loader, name, rows, (size_t)matrices[0].cols);
    for (int i = 0; i < count; i++) {
        struct kern_matrix *m = &matrices[i];
        struct fault fault = {0};
        int rc = quantize_blocks(m, dtype, inputs, to, loader->team, &fault);
        if (rc) return fault_set(loader->fault, rc, name, "%s", fault.text);
        m->data = to;
        m->scale = NULL;
        m->stride = 0;
        m->dtype = dtype;
        to += (size_t)m->rows * each;
    }
    return 0;
}

/* Rounds a slot's matrices to Q8 or Q4. */
static int round_slot(struct loader *loader, const char *name, struct kern_matrix *matrices,
                      const struct slot *slot, int layer, enum quantization to) {
    const struct rounding rounding = {.config = &loader->model->config,
                                      .weights = loader->weights,
                                      .naming = loader->naming,
                                      .team = loader->team};
    if (to == QUANTIZE_Q8 || !loader->weights)
        return round_to_blocks(loader, name, matrices, slot->count,
                               to == QUANTIZE_Q8 ? KERN_Q8 : KERN_Q4M, NULL);
    float *inputs = mem_try_alloc((size_t)matrices[0].cols, sizeof *inputs);
    if (!inputs) return no_room_for(loader, name, 1, (size_t)matrices[0].cols);
    const bool known = rounding_inputs(&rounding, slot, layer, loader->expert, inputs);
    int rc = round_to_blocks(loader, name, matrices, slot->count, KERN_Q4M, known ? inputs : NULL);
    mem_free(inputs);
    return rc;
}

/* Hands the matrices to the backend, rounded if the options ask for that and they are not in blocks
 * already. `name`: names them in faults. */
static int give_matrix(struct loader *loader, const char *name, struct kern_matrix *matrices,
                       const struct slot *slot, int layer, struct kern_weight **out) {
    const struct kern_ops *ops = loader->model->kern->ops;
    const int count = slot->count;
    const enum quantization to =
        rounding_format(&loader->model->config, slot, layer, loader->options->quantization);
    size_t rows = 0;
    int rc = 0;
    for (int i = 0; i < count; i++) rows += (size_t)matrices[i].rows;
    float *scales = mem_try_alloc(rows, sizeof *scales);
    if (!scales) return no_room_for(loader, name, rows, 1);
    if (to == QUANTIZE_FP8)
        rc = make_e4m3(loader, name, matrices, count, rows, scales);
    else if (to != QUANTIZE_NONE && !kern_dtype_blocks(matrices[0].dtype))
        rc = round_slot(loader, name, matrices, slot, layer, to);
    if (!rc)
        rc =
            ops->weight_load(loader->model->kern, matrices, count, slot->shard, out, loader->fault);
    mem_free(scales);
    return rc;
}

static int load_random_matrix(struct loader *loader, struct kern_matrix *matrices,
                              const struct slot *slot, int layer, struct kern_weight **out) {
    int64_t rows = 0, cols = matrices[0].cols;
    for (int i = 0; i < slot->count; i++) rows += matrices[i].rows;
    size_t words = ((size_t)rows * (size_t)cols + 3) / 4;
    uint64_t *data = mem_try_alloc(words, sizeof *data);
    if (!data)
        return fault_set(loader->fault, ERR_NOMEM, "random weights", "no memory for [%lld, %lld]",
                         (long long)rows, (long long)cols);
    random_fill(loader->team, &loader->random, data, words, cols);
    const uint16_t *at = (const uint16_t *)data;
    for (int i = 0; i < slot->count; at += matrices[i].rows * cols, i++) {
        matrices[i].data = at;
        matrices[i].dtype = KERN_BF16;
    }
    int rc = give_matrix(loader, "random weights", matrices, slot, layer, out);
    mem_free(data);
    loader->read += words * sizeof *data;
    if (!rc) rc = report_progress(loader, words * sizeof *data);
    return rc;
}

static int refuse_element(struct loader *loader, const char *name, int64_t element) {
    return fault_set(loader->fault, ERR_INVALID, name, "element %lld is not a finite number",
                     (long long)element);
}

/* Returns whether the backend takes the slot's matrices in the file's own blocks. */
static bool in_blocks(const struct loader *loader, const struct slot *slot, int layer) {
    const struct tensor_rows columns =
        tensor_columns_of(&loader->model->config, loader->naming, slot->parts[0], layer);
    return loader->model->kern->ops->blocks && columns.unit % KERN_BLOCK == 0 &&
           rounding_format(&loader->model->config, slot, layer, loader->options->quantization) !=
               QUANTIZE_FP8 &&
           rounding_is_done(loader->weights, loader->naming, slot, layer, loader->expert);
}

/* Returns how many factors each row has, of *group inputs each, if the backend takes the tensor's
 * E4M3 codes as they are; 0: it takes other numbers. */
static int64_t row_scales(const struct loader *loader, const struct slot *slot, int layer,
                          const struct tensor *tensor, int64_t *group) {
    const enum quantization to =
        rounding_format(&loader->model->config, slot, layer, loader->options->quantization);
    *group = 0;
    if (!tensor->packed || !loader->model->kern->ops->scale_groups ||
        (to != QUANTIZE_NONE && to != QUANTIZE_FP8) || slot->shard == KERN_SHARD_VOCAB ||
        slot->shard == KERN_SHARD_NONE)
        return 0;
    return packed_row_scales(tensor->packed, group);
}

/* Returns the largest number of factors of a row of the slot's matrices, at least 1. */
static size_t most_row_scales(const struct loader *loader, const struct slot *slot, int layer) {
    char name[TENSOR_NAME_MAX];
    int64_t most = 1, group;
    for (int i = 0; i < slot->count; i++) {
        name_of(loader, slot->parts[i], layer, name);
        const struct tensor *tensor = weights_find(loader->weights, name);
        const int64_t count = tensor ? row_scales(loader, slot, layer, tensor, &group) : 0;
        most = count > most ? count : most;
    }
    return (size_t)most;
}

/* Returns the bytes of a matrix on its way to the backend. */
static size_t matrix_bytes(const struct kern_matrix *m) {
    if (kern_dtype_blocks(m->dtype))
        return (size_t)(m->rows * blocks_of(m->cols)) * sizeof(struct block);
    return (size_t)(m->rows * m->cols) * kern_dtype_bytes(m->dtype);
}

static size_t loaded_bytes(const struct kern_matrix *m, const struct tensor *tensor) {
    if (!kern_dtype_blocks(m->dtype))
        return matrix_bytes(m) + (size_t)(m->rows * m->scales) * sizeof *m->scale;
    return (size_t)((double)(m->rows * m->cols) * block_loaded_bits(tensor) / 8);
}

/* Reads rows. *room: memory for rows that are not in the file as the backend takes them; it is
 * moved on by the bytes used. If rows become blocks, `reader` makes them later. */
static int read_rows(struct loader *loader, const char *name, const struct rows *rows,
                     struct rows_reader *reader, char **room, struct kern_matrix *out) {
    if (rows_are_made(rows)) {
        out->data = NULL;
        out->reader = &reader->reader;
        if (rows_reader_open(reader, loader->weights, rows) == 0) return 0;
        return fault_set(loader->fault, ERR_NOMEM, name, "no memory to read it");
    }
    char *to = rows_need_room(rows) ? *room : NULL;
    int64_t bad = rows_read(rows, to, loader->team);
    if (bad >= 0) return refuse_element(loader, name, bad);
    if (!to) return 0;
    weights_release(loader->weights, rows_at(rows), rows_bytes(rows));
    out->data = to;
    *room += matrix_bytes(out);
    return 0;
}

/* Finds the blocks and the scales of the experts' matrices; see tensor_is_split_mxfp4. */
static int find_split_mxfp4(struct loader *loader, const char *name, int64_t rows, int64_t cols,
                            const struct tensor **blocks, const struct tensor **scales) {
    const int64_t shape[4] = {loader->model->config.experts, rows, cols / BLOCK_MXFP4,
                              BLOCK_MXFP4 / 2};
    char names[2][TENSOR_NAME_MAX];
    const struct tensor *found[2];
    const int before = (int)(strlen(name) - strlen("blocks"));
    snprintf(names[0], TENSOR_NAME_MAX, "%s", name);
    snprintf(names[1], TENSOR_NAME_MAX, "%.*sscales", before, name);
    for (int i = 0; i < 2; i++) {
        const int dims = i ? 3 : 4;
        found[i] = weights_find(loader->weights, names[i]);
        if (!found[i])
            return fault_set(loader->fault, ERR_NOTFOUND, names[i], "tensor is missing: MXFP4");
        if (cols % BLOCK_MXFP4 || found[i]->dims != dims || strcmp(found[i]->type, "U8") != 0 ||
            memcmp(found[i]->shape, shape, (size_t)dims * sizeof shape[0]) != 0)
            return fault_set(loader->fault, ERR_INVALID, names[i],
                             "expected MXFP4 of %lld matrices [%lld, %lld] in U8",
                             (long long)shape[0], (long long)rows, (long long)cols);
    }
    *blocks = found[0];
    *scales = found[1];
    return 0;
}

/* Returns whether the name stands for split MXFP4. Models that keepd saved have blocks of its own
 * under that name. */
static bool is_split_mxfp4(const struct loader *loader, enum role role, const char *name) {
    const struct tensor *tensor = weights_find(loader->weights, name);
    return tensor_is_split_mxfp4(loader->naming, role) &&
           !(tensor && tensor->dtype == TENSOR_BLOCKS);
}

/* Reads the factors of an FP8 matrix whose codes the backend takes as they are. */
static int read_block_scales(struct loader *loader, const char *name, const struct rows *rows,
                             float *scales, struct kern_matrix *out) {
    const struct packed *packed = rows->tensor->packed;
    out->scale = scales;
    out->scales = packed_row_scales(packed, &out->group);
    for (int64_t i = 0; i < rows->count; i++, scales += out->scales) {
        const int64_t row = rows->first + rows_source(rows, i);
        if (!packed_read_scales(packed, row, scales))
            return fault_set(loader->fault, ERR_INVALID, name,
                             "a scale of row %lld is not a number from 0 to %g", (long long)row,
                             (double)(FLT_MAX / QUANTIZE_MOST));
    }
    return 0;
}

/* Finds one matrix. `room` NULL: only its description is checked. Adds the bytes of the loaded
 * matrix to `bytes`. */
static int find_matrix(struct loader *loader, const struct slot *slot, int part, int layer,
                       bool blocks, float *scales, char **room, struct kern_matrix *out,
                       size_t *bytes) {
    char name[TENSOR_NAME_MAX];
    const struct tensor *tensor = NULL; /* NULL only after an error */
    const struct model_config *config = &loader->model->config;
    const enum role role = slot->parts[part];
    const struct tensor_rows place = tensor_rows_of(config, loader->naming, role, layer);
    const struct tensor_rows columns = tensor_columns_of(config, loader->naming, role, layer);
    const int64_t all = place.all;
    name_of(loader, role, layer, name);
    const bool stacked = tensor_is_stacked(loader->naming, role);
    const int64_t experts = stacked ? config->experts : 1;
    const struct tensor *scale_bytes = NULL;
    int rc =
        is_split_mxfp4(loader, role, name)
            ? find_split_mxfp4(loader, name, all, out->cols, &tensor, &scale_bytes)
            : find_tensor(loader, name, stacked ? (int)experts : 0, all, out->cols, true, &tensor);
    if (rc) return rc;
    const struct rows rows = {.tensor = tensor,
                              .scales = scale_bytes,
                              .first = place.first + (stacked ? loader->expert * all : 0),
                              .count = out->rows,
                              .place = &place,
                              .columns = columns.unit ? &columns : NULL,
                              .order = order_of(loader, role),
                              .head = config->head_dim,
                              .blocks = blocks,
                              .codes = row_scales(loader, slot, layer, tensor, &out->group) > 0};
    out->data = rows_at(&rows);
    out->reader = NULL;
    out->dtype = rows_dtype(&rows);
    if (blocks && !block_dtype_of(tensor, &out->dtype)) out->dtype = KERN_Q8; /* split MXFP4 */
    if (rows.codes && (rc = read_block_scales(loader, name, &rows, scales, out))) return rc;
    *bytes += loaded_bytes(out, tensor);
    loader->read += tensor->bytes / (size_t)experts * (size_t)out->rows / (size_t)all;
    if (tensor->dtype != TENSOR_E4M3)
        return room ? read_rows(loader, name, &rows, &loader->readers[part], room, out) : 0;
    bool whole = slot->shard == KERN_SHARD_VOCAB || slot->shard == KERN_SHARD_NONE;
    if (whole || all != out->rows || stacked || rows.order || rows.columns)
        return fault_set(loader->fault, ERR_UNSUPPORTED, name,
                         "type F8_E4M3 is not supported here: F32, F16, BF16");
    out->scale = scales;
    return rounding_read_scales(loader->weights, name, tensor, loader->options->check_only, scales,
                                loader->fault);
}

/* Returns whether the slot's matrices must be changed before the backend takes them. */
static bool is_made(const struct loader *loader, const struct slot *slot, int layer) {
    char name[TENSOR_NAME_MAX];
    if (naming_is_gguf(loader->naming) || (tensor_is_rotated(slot->parts[0]) && loader->order) ||
        tensor_is_split_mxfp4(loader->naming, slot->parts[0]))
        return true;
    for (int i = 0; i < slot->count; i++) {
        const struct tensor_rows place =
            tensor_rows_of(&loader->model->config, loader->naming, slot->parts[i], layer);
        if (!tensor_rows_follow(&place)) return true;
        name_of(loader, slot->parts[i], layer, name);
        const struct tensor *tensor = weights_find(loader->weights, name);
        int64_t group;
        if (tensor && (tensor->turned || (tensor->dtype == TENSOR_BLOCKS &&
                                          !row_scales(loader, slot, layer, tensor, &group))))
            return true;
    }
    return false;
}

/* Finds all matrices of a slot. `scales`: [rows][most_scales]. */
static int find_matrices(struct loader *loader, int layer, const struct slot *slot, bool blocks,
                         float *scales, size_t most_scales, struct kern_matrix *matrices,
                         size_t *bytes) {
    size_t row = 0, rows = 0;
    char *room = NULL;
    const bool check_only = loader->options->check_only;
    for (int i = 0; i < slot->count; i++) rows += (size_t)matrices[i].rows;
    if (!check_only && is_made(loader, slot, layer)) {
        room = room_of(&loader->rows, rows, (size_t)matrices[0].cols * sizeof(float));
        if (!room)
            return fault_set(loader->fault, ERR_NOMEM, "model", "no memory for rows of [%zu, %lld]",
                             rows, (long long)matrices[0].cols);
    }
    for (int i = 0; i < slot->count; i++) {
        struct kern_matrix *m = &matrices[i];
        int rc = find_matrix(loader, slot, i, layer, blocks, scales + row * most_scales,
                             check_only ? NULL : &room, m, bytes);
        if (rc) return rc;
        row += (size_t)m->rows;
    }
    return 0;
}

/* Refuses numbers that are not finite, after the backend has read all rows. Their pages of the file
 * may be released. */
static int check_reader(struct loader *loader, enum role role, int layer,
                        const struct rows_reader *reader) {
    const int64_t bad = rows_reader_bad(reader);
    char name[TENSOR_NAME_MAX];
    weights_release(loader->weights, rows_at(&reader->rows), rows_bytes(&reader->rows));
    if (bad < 0) return 0;
    name_of(loader, role, layer, name);
    return refuse_element(loader, name, bad);
}

/* Reads the slot's tensors and hands them to the backend; with `blocks`, as blocks. */
static int take_matrices(struct loader *loader, int layer, const struct slot *slot, bool blocks,
                         float *scales, size_t most_scales, struct kern_matrix *matrices,
                         struct kern_weight **out) {
    char name[TENSOR_NAME_MAX];
    size_t bytes = 0;
    name_of(loader, slot->parts[0], layer, name);
    int rc = find_matrices(loader, layer, slot, blocks, scales, most_scales, matrices, &bytes);
    if (rc || loader->options->check_only) return rc;
    struct kern_matrix found[SLOT_PARTS_MAX];
    memcpy(found, matrices, sizeof found);
    rc = give_matrix(loader, name, matrices, slot, layer, out);
    for (int i = 0; i < slot->count && !rc; i++)
        if (found[i].reader)
            rc = check_reader(loader, slot->parts[i], layer, &loader->readers[i]);
        else
            weights_release(loader->weights, found[i].data, matrix_bytes(&found[i]));
    if (!rc) rc = report_progress(loader, bytes);
    return rc;
}

static void close_readers(struct loader *loader) {
    for (int i = 0; i < SLOT_PARTS_MAX; i++) rows_reader_close(&loader->readers[i]);
}

/* Returns whether the slot's matrices are in MXFP4. */
static bool is_mxfp4(const struct loader *loader, const struct slot *slot, int layer) {
    char name[TENSOR_NAME_MAX];
    name_of(loader, slot->parts[0], layer, name);
    const struct tensor *tensor = weights_find(loader->weights, name);
    return is_split_mxfp4(loader, slot->parts[0], name) ||
           (tensor && tensor->dtype == TENSOR_BLOCKS && tensor->format == GGUF_FORMAT_MXFP4);
}

/* Loads a slot's tensors as one matrix: they have the same columns, and their rows are joined. */
static int load_matrix(struct loader *loader, int layer, const struct slot *slot,
                       struct kern_weight **out) {
    const struct model_config *config = &loader->model->config;
    struct kern_matrix matrices[SLOT_PARTS_MAX] = {0};
    size_t rows = 0;
    for (int i = 0; i < slot->count; i++) {
        struct kern_matrix *m = &matrices[i];
        tensor_shape(config, slot->parts[i], layer, &m->rows, &m->cols);
        m->groups = slot_groups(slot, config, layer);
        if (!naming_is_gguf(loader->naming)) m->factor = role_factor(config, slot->parts[i]);
        rows += (size_t)m->rows;
    }
    if (!loader->weights && loader->options->check_only) return 0;
    if (!loader->weights) return load_random_matrix(loader, matrices, slot, layer, out);
    const size_t most_scales = most_row_scales(loader, slot, layer);
    float *scales = mem_try_alloc(rows, most_scales * sizeof *scales);
    if (!scales) return fault_set(loader->fault, ERR_NOMEM, "model", "no memory for scales");
    const bool blocks = in_blocks(loader, slot, layer);
    const size_t read = loader->read;
    int rc = take_matrices(loader, layer, slot, blocks, scales, most_scales, matrices, out);
    close_readers(loader);
    /* a rank's share of the inputs would cut blocks, and bf16 holds the same numbers */
    if (rc == ERR_UNSUPPORTED && blocks && is_mxfp4(loader, slot, layer)) {
        loader->read = read;
        rc = take_matrices(loader, layer, slot, false, scales, most_scales, matrices, out);
    }
    mem_free(scales);
    return rc;
}

/* Loads a matrix for each expert. */
static int load_experts(struct loader *loader, int layer, const struct slot *slot,
                        struct kern_weight ***out) {
    const int experts = loader->model->config.experts;
    int rc = 0;
    *out = mem_try_alloc((size_t)experts, sizeof **out);
    if (!*out) return fault_set(loader->fault, ERR_NOMEM, "model", "no memory for a table");
    for (int e = 0; e < experts && !rc; e++) {
        loader->expert = e;
        rc = load_matrix(loader, layer, slot, &(*out)[e]);
    }
    loader->expert = 0;
    return rc;
}

/* ---- A matrix for each head ---- */

/* Finds a head's matrix: in a tensor with one matrix for each head or, if `joined`, in one with
 * rows for a head's keys, then for its values. In a joined tensor `up_k` is transposed. */
static int find_head(struct loader *loader, const char *name, enum role role, int head, bool joined,
                     const struct kern_matrix *matrix, struct rows *rows) {
    const struct kern_latent *latent = &loader->model->config.latent;
    const int each = latent->still + latent->dim_v;
    int rc = joined ? find_tensor(loader, name, 0, (int64_t)latent->heads * each, latent->rank,
                                  true, &rows->tensor)
                    : find_tensor(loader, name, latent->heads, matrix->rows, matrix->cols, true,
                                  &rows->tensor);
    if (!rc && rows->tensor->dtype == TENSOR_E4M3)
        rc = fault_set(loader->fault, ERR_UNSUPPORTED, name,
                       "type F8_E4M3 with a scale for each row is not supported here");
    rows->first = (int64_t)head * (joined ? each : matrix->rows);
    if (joined && role == ROLE_LATENT_V) rows->first += latent->still;
    rows->count = !joined ? matrix->rows : role == ROLE_LATENT_K ? latent->still : latent->dim_v;
    return rc;
}

/* Transposes a matrix; `from` has [cols, rows]. */
static void turn_matrix(const struct kern_matrix *matrix, const char *from, char *to) {
    const size_t size = kern_dtype_bytes(matrix->dtype);
    const size_t rows = (size_t)matrix->rows, cols = (size_t)matrix->cols;
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < cols; c++, to += size)
            memcpy(to, from + (c * rows + r) * size, size);
}

static int load_head_matrix(struct loader *loader, int layer, const struct slot *slot, int head,
                            struct kern_weight **out) {
    const enum role role = slot->parts[0];
    char name[TENSOR_NAME_MAX], other[TENSOR_NAME_MAX];
    struct kern_matrix matrices[SLOT_PARTS_MAX] = {0}, *m = &matrices[0];
    struct rows rows = {0};
    tensor_shape(&loader->model->config, role, layer, &m->rows, &m->cols);
    if (!loader->weights && loader->options->check_only) return 0;
    if (!loader->weights) return load_random_matrix(loader, matrices, slot, layer, out);
    name_of(loader, role, layer, name);
    name_of(loader, role == ROLE_LATENT_K ? ROLE_LATENT_V : ROLE_LATENT_K, layer, other);
    const bool joined = strcmp(name, other) == 0, turned = joined && role == ROLE_LATENT_K;
    int rc = find_head(loader, name, role, head, joined, m, &rows);
    if (rc || loader->options->check_only) return rc;
    rows.blocks = !turned && in_blocks(loader, slot, layer);
    m->dtype = rows_dtype(&rows);
    if (rows.blocks) (void)block_dtype_of(rows.tensor, &m->dtype);
    const size_t numbers = (size_t)(m->rows * m->cols);
    char *room = room_of(&loader->rows, 2 * numbers, sizeof(float)), *at = room;
    if (!room) return no_room_for(loader, name, (size_t)m->rows, (size_t)m->cols);
    m->data = rows_at(&rows);
    rc = read_rows(loader, name, &rows, &loader->readers[0], &at, m);
    if (rc) return rc;
    char *other_half = room + numbers * sizeof(float);
    if (turned) turn_matrix(m, m->data, other_half);
    if (turned) m->data = other_half;
    const size_t bytes = loaded_bytes(m, rows.tensor);
    loader->read += rows_bytes(&rows);
    rc = give_matrix(loader, name, matrices, slot, layer, out);
    if (!rc && rows_are_made(&rows)) rc = check_reader(loader, role, layer, &loader->readers[0]);
    close_readers(loader);
    weights_release(loader->weights, rows_at(&rows), rows_bytes(&rows));
    if (!rc) rc = report_progress(loader, bytes);
    return rc;
}

static int load_head_matrices(struct loader *loader, int layer, const struct slot *slot,
                              struct kern_weight ***out) {
    const int heads = loader->model->config.heads_q;
    int rc = 0;
    *out = mem_try_alloc((size_t)heads, sizeof **out);
    if (!*out) return fault_set(loader->fault, ERR_NOMEM, "model", "no memory for a table");
    for (int h = 0; h < heads && !rc; h++)
        rc = load_head_matrix(loader, layer, slot, h, &(*out)[h]);
    if (!rc && !loader->options->check_only &&
        loader->model->kern->ops->latent_reserve(loader->model->kern, *out, heads))
        rc = fault_set(loader->fault, ERR_NOMEM, "model", "no memory for products of heads");
    return rc;
}

/* ---- Vectors ---- */

/* Reads rows of `width` numbers each. */
static int read_floats(struct loader *loader, const char *name, const struct rows *rows,
                       int64_t width, float *out) {
    for (int64_t i = 0; i < rows->count; i++, out += width) {
        const int64_t from = (rows->first + rows_source(rows, i)) * width;
        CHECK(tensor_read_floats(rows->tensor, (size_t)from, (size_t)width, out));
        for (int64_t k = 0; k < width; k++)
            if (!isfinite(out[k])) return refuse_element(loader, name, from + k);
    }
    return 0;
}

/* Returns the length of the slot's vector, for one expert or for the layer. */
static int64_t vector_width(const struct loader *loader, const struct slot *slot, int layer) {
    int64_t rows, cols, width = 0;
    for (int i = 0; i < slot->count; i++) {
        tensor_shape(&loader->model->config, slot->parts[i], layer, &rows, &cols);
        width += cols ? rows * cols : rows;
    }
    return width;
}

/* Reads one part of the slot's vector into `host`, for every expert if the slot belongs to experts.
 */
static int read_part(struct loader *loader, int layer, const struct slot *slot, int part,
                     float *host, size_t *bytes) {
    const struct model_config *config = &loader->model->config;
    const int experts = slot->experts ? config->experts : 1;
    const enum role role = slot->parts[part];
    const struct tensor_rows place = tensor_rows_of(config, loader->naming, role, layer);
    const int64_t width = vector_width(loader, slot, layer);
    struct rows rows = {.place = &place, .order = order_of(loader, role), .head = config->head_dim};
    char name[TENSOR_NAME_MAX];
    int64_t cols;
    name_of(loader, role, layer, name);
    tensor_shape(config, role, layer, &rows.count, &cols);
    int rc = find_tensor(loader, name, slot->experts ? experts : 0, place.all, cols, false,
                         &rows.tensor);
    for (int e = 0; e < experts && !rc; e++) {
        rows.first = e * place.all + place.first;
        rc = read_floats(loader, name, &rows, cols ? cols : 1, host + e * width);
    }
    if (rc) return rc;
    const size_t read = rows.tensor->bytes / (size_t)place.all * (size_t)rows.count;
    loader->read += read;
    *bytes += read;
    return 0;
}

static int read_vector(struct loader *loader, int layer, const struct slot *slot, float *host,
                       size_t *bytes) {
    int rc = 0;
    for (int i = 0; i < slot->count && !rc; i++) {
        int64_t rows, cols;
        rc = read_part(loader, layer, slot, i, host, bytes);
        tensor_shape(&loader->model->config, slot->parts[i], layer, &rows, &cols);
        host += cols ? rows * cols : rows;
    }
    return rc;
}

/* Joins the slot's vectors and loads them as float32 into backend memory. */
static int load_vector(struct loader *loader, int layer, const struct slot *slot, float **out) {
    struct kern *kern = loader->model->kern;
    char name[TENSOR_NAME_MAX];
    size_t total = (size_t)vector_width(loader, slot, layer), bytes = 0;
    if (slot->experts) total *= (size_t)loader->model->config.experts;
    name_of(loader, slot->parts[0], layer, name);
    float *host = mem_try_alloc(total, sizeof *host);
    if (!host) return fault_set(loader->fault, ERR_NOMEM, name, "out of memory");
    const float fixed = slot_fixed(slot, &loader->model->config);
    const bool read = loader->weights && !(fixed > 0 && !weights_find(loader->weights, name));
    for (size_t i = 0; fixed > 0 && i < total; i++) host[i] = fixed;
    if (!loader->weights && !(fixed > 0))
        random_vector(&loader->random, host, total, slot->norm ? 1 : 0);
    int rc = read ? read_vector(loader, layer, slot, host, &bytes) : 0;
    float scale = slot_scale(slot, &loader->model->config);
    const float offset = read ? slot_offset(slot, &loader->model->config) : 0;
    const bool exp_of = slot->negated_exp && !naming_is_gguf(loader->naming);
    for (size_t i = 0; i < total && !rc; i++) {
        host[i] = (host[i] + offset) * scale;
        if (exp_of) host[i] = (float)-exp((double)host[i]);
    }
    if (!rc) {
        *out = kern->ops->mem_alloc(kern, total * sizeof *host);
        rc = *out ? kern->ops->upload(kern, *out, host, total * sizeof *host) : ERR_NOMEM;
        if (rc) fault_set(loader->fault, rc, name, "%s", err_text(rc));
    }
    mem_free(host);
    if (!rc) rc = report_progress(loader, bytes);
    return rc;
}

/* ---- The whole ---- */

/* Loads a slot. `owner`: the struct layer or struct model that has it as a member. */
static int load_slot(struct loader *loader, int layer, const struct slot *slot, void *owner) {
    void *member = (char *)owner + slot->offset;
    if (!slot->matrix) return load_vector(loader, layer, slot, member);
    if (slot->heads) return load_head_matrices(loader, layer, slot, member);
    return slot->experts ? load_experts(loader, layer, slot, member)
                         : load_matrix(loader, layer, slot, member);
}

static const char *description(const struct loader *loader) {
    return naming_is_gguf(loader->naming) ? "its metadata" : "config.json";
}

static int refuse_tensor(struct loader *loader, const char *name) {
    if (!weights_find(loader->weights, name)) return 0;
    return fault_set(loader->fault, ERR_UNSUPPORTED, name,
                     "tensor is in the file but %s has no use for it", description(loader));
}

/* Refuses tensors that should not exist, by the configuration. Files that have them belong to
 * another computation, and ignoring them would silently give wrong answers. The exception: a layer
 * with attention that reads the entries of another layer may have keys and values of its own, which
 * are not used. */
static int refuse_extra(struct loader *loader, int layer) {
    char name[TENSOR_NAME_MAX];
    int rc = 0;
    for (size_t i = 0; i < layer_slot_count && !rc; i++) {
        const struct slot *slot = &layer_slots[i];
        if (slot_wanted(slot, &loader->model->config, layer)) continue;
        for (int k = 0; k < slot->count && !rc; k++) {
            if (role_wanted(slot->parts[k], &loader->model->config, layer)) continue;
            name_of(loader, slot->parts[k], layer, name);
            if (slot->source && layer_attends(&loader->model->config.per_layer[layer]))
                note_used(loader, weights_find(loader->weights, name));
            else
                rc = refuse_tensor(loader, name);
        }
    }
    layer += loader->model->block_layer;
    for (size_t i = 0; !rc && tensor_refused(name, loader->naming, i, layer); i++)
        rc = refuse_tensor(loader, name);
    return rc;
}

/* Makes a routed layer's stage of experts from its loaded matrices. */
static int make_experts(struct loader *loader, struct layer *layer) {
    const struct model_config *c = &loader->model->config;
    struct kern *kern = loader->model->kern;
    const struct kern_experts_spec spec = {.count = c->experts,
                                           .used = c->experts_used,
                                           .d_model = experts_width(c),
                                           .d_ff = c->expert_ff,
                                           .normalise = c->experts_normalised,
                                           .sigmoid = c->experts_sigmoid,
                                           .scale = c->expert_scale,
                                           .groups = c->expert_groups,
                                           .groups_used = c->expert_groups_used,
                                           .group_best = c->expert_group_best,
                                           .select_bias = layer->select_bias,
                                           .activation = c->activation,
                                           .ungated = c->ungated,
                                           .sets = c->gemma4_experts || c->experts_narrow,
                                           .factors = layer->experts_factors,
                                           .gate_up = layer->expert_gate_up,
                                           .down = layer->expert_down,
                                           .gate_up_bias = layer->expert_gate_up_bias,
                                           .down_bias = layer->expert_down_bias};
    return kern->ops->experts_load(kern, &spec, &layer->experts, loader->fault);
}

static int load_layer(struct loader *loader, int index, struct layer *layer) {
    int rc = loader->weights ? refuse_extra(loader, index) : 0;
    for (size_t i = 0; i < layer_slot_count && !rc; i++)
        if (slot_wanted(&layer_slots[i], &loader->model->config, index))
            rc = load_slot(loader, index, &layer_slots[i], layer);
    bool routed = loader->model->config.per_layer[index].routed;
    return rc || !routed || loader->options->check_only ? rc : make_experts(loader, layer);
}

static bool has_tensor(const struct loader *loader, enum role role, int layer) {
    char name[TENSOR_NAME_MAX];
    name_of(loader, role, layer, name);
    return weights_find(loader->weights, name) != NULL;
}

static int load_ends(struct loader *loader) {
    struct model *model = loader->model;
    struct model_config *c = &model->config;
    const int behind = c->layers + c->mtp_layers;
    static const enum role last[] = {ROLE_O, ROLE_CONV_OUT, ROLE_DELTA_OUT, ROLE_MAMBA_OUT};
    for (size_t i = 0; i < sizeof last / sizeof last[0]; i++) {
        char next[TENSOR_NAME_MAX];
        if (!loader->weights || !has_tensor(loader, last[i], behind)) continue;
        name_of(loader, last[i], behind, next);
        return fault_set(loader->fault, ERR_INVALID, next,
                         "tensor is in the file but %s has %d layers", description(loader),
                         c->layers);
    }
    int rc = 0;
    for (size_t i = 0; i < end_slot_count && !rc; i++)
        if (slot_wanted_outside(&end_slots[i], c)) rc = load_slot(loader, -1, &end_slots[i], model);
    if (rc || c->both_ways) return rc;
    char head[TENSOR_NAME_MAX];
    name_of(loader, ROLE_HEAD, -1, head);
    if (!c->tied_embeddings && loader->weights && !has_tensor(loader, ROLE_HEAD, -1) &&
        !weights_absent(loader->weights, head)) {
        log_warn("no lm_head.weight in the model files: using model.embed_tokens.weight");
        c->tied_embeddings = true;
    }
    if (!c->tied_embeddings) return load_slot(loader, -1, &slot_head, model);
    model->head = model->embed;
    return 0;
}

/* Loads what is in front of a block's layer and behind it. */
static int load_block_ends(struct loader *loader) {
    struct model *model = loader->model;
    int rc = 0;
    model->embed = model->block_of->embed;
    model->head = model->block_of->head;
    for (int i = 0; i < SLOT_BLOCK_COUNT && !rc; i++)
        rc = load_slot(loader, 0, &slot_block[i], model);
    if (rc) return rc;
    const bool own = has_tensor(loader, ROLE_BLOCK_NORM, 0);
    return load_slot(loader, own ? 0 : -1, own ? &slot_block_norm : &end_slots[END_FINAL_NORM],
                     model);
}

static int open_team(struct loader *loader) {
    const struct model_options *options = loader->options;
    int rc = options->check_only ? 0 : cpu_team_open(options->threads, &loader->team);
    return rc ? fault_set(loader->fault, rc, "threads",
                          "cannot start the threads that load weights")
              : 0;
}

/* Returns whether the configuration has read the tensor. */
static bool is_known_beside(const char *name) {
    static const char *const names[] = {"rope_freqs.weight", "rope_factors_long.weight",
                                        "rope_factors_short.weight"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strcmp(name, names[i]) == 0) return true;
    return false;
}

/* Returns whether the tensor belongs to layers that predict further tokens; they follow the model's
 * layers. */
static bool is_of_mtp(const struct loader *loader, const char *name) {
    const struct model_config *c = &loader->model->config;
    int layer = -1;
    return sscanf(name, "blk.%d.", &layer) == 1 && layer >= c->layers &&
           layer < c->layers + c->mtp_layers;
}

/* Refuses tensors of a GGUF file that nothing has used: they belong to a computation that keepd
 * does not do. */
static int refuse_unused(struct loader *loader) {
    for (size_t i = 0; loader->used && i < weights_count(loader->weights); i++) {
        const char *name = weights_at(loader->weights, i)->name;
        if (!loader->used[i] && !is_known_beside(name) && !is_of_mtp(loader, name))
            return refuse_tensor(loader, name);
    }
    return 0;
}

static int open_loader(struct loader *loader) {
    const struct kern_ops *ops = loader->model->kern->ops;
    if (loader->options->quantization > QUANTIZE_FP8 && !ops->blocks)
        return fault_set(loader->fault, ERR_UNSUPPORTED, "quantization",
                         "the %s backend has no weights in blocks of 8 or 4 bits", ops->name);
    const struct weights *weights = loader->weights;
    struct model_config *config = &loader->model->config;
    int rc = open_team(loader);
    loader->total = weights ? weights_bytes(weights) : random_bytes(config);
    if (rc || !weights) {
        config->dtype = weights ? config->dtype : KERN_BF16;
        return rc;
    }
    char name[TENSOR_NAME_MAX];
    loader->naming = tensor_naming(config, weights_gguf(weights) != NULL);
    name_of(loader, ROLE_EMBED, -1, name);
    const struct tensor *embed = weights_find(weights, name);
    if (embed && tensor_is_float(embed->dtype))
        config->dtype = rows_dtype(&(struct rows){.tensor = embed});
    if (embed && embed->dtype == TENSOR_BLOCKS)
        config->dtype = config->packing.kind == PACKING_OWN
                            ? config->packing.dtype
                            : KERN_BF16; /* the cache needs no wider type */
    rc = make_order(loader);
    if (rc || !naming_is_gguf(loader->naming)) return rc;
    loader->used = mem_try_alloc(weights_count(weights), sizeof *loader->used);
    return loader->used ? 0 : fault_set(loader->fault, ERR_NOMEM, "model", "no memory for a table");
}

int model_load_weights(struct model *model, const struct model_options *options,
                       const struct weights *weights, struct fault *fault) {
    struct loader loader = {.model = model,
                            .options = options,
                            .weights = weights,
                            .random = RANDOM_SEED,
                            .fault = fault};
    int rc = open_loader(&loader);
    if (!rc) rc = model->block_of ? load_block_ends(&loader) : load_ends(&loader);
    room_free(&loader.codes); /* the layers need much less */
    room_free(&loader.rows);
    for (int i = 0; i < model->config.layers && !rc; i++)
        rc = load_layer(&loader, i, &model->layers[i]);
    if (!rc && !model->block_of) rc = refuse_unused(&loader);
    room_free(&loader.codes);
    room_free(&loader.rows);
    mem_free(loader.used);
    mem_free(loader.order);
    cpu_team_close(loader.team);
    return rc;
}
