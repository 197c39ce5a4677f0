/* Loads matrices into the backend: as the files have them, rounded, unpacked, of experts, or one
 * for each head. */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "kernels/blocks.h"
#include "kernels/quantize.h"
#include "model/blocks.h"
#include "model/loader.h"
#include "model/packed.h"
#include "model/rounding.h"

static int no_room_for(struct loader *loader, const char *name, size_t rows, size_t cols) {
    return fault_set(loader->fault, ERR_NOMEM, name, "no memory for [%zu, %zu] in fewer bits", rows,
                     cols);
}

/* Rounds the matrices to E4M3. `scales`: [rows] of all matrices together. */
static int make_e4m3(struct loader *loader, const char *name, struct kern_matrix *matrices,
                     int count, size_t rows, float *scales) {
    size_t cols = (size_t)matrices[0].cols, row = 0;
    uint8_t *codes = (uint8_t *)load_room(&loader->codes, rows, cols);
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
        (struct block *)(void *)load_room(&loader->codes, rows, each * sizeof(struct block));
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
    if (!rc) rc = load_report(loader, words * sizeof *data);
    return rc;
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
        load_name(loader, slot->parts[i], layer, name);
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

static size_t matrix_loaded_bytes(const struct kern_matrix *m, const struct tensor *tensor) {
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
    if (bad >= 0) return load_refuse_element(loader, name, bad);
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
    load_name(loader, role, layer, name);
    const bool stacked = tensor_is_stacked(loader->naming, role);
    const int64_t experts = stacked ? config->experts : 1;
    const struct tensor *scale_bytes = NULL;
    int rc = is_split_mxfp4(loader, role, name)
                 ? find_split_mxfp4(loader, name, all, out->cols, &tensor, &scale_bytes)
                 : load_find_tensor(loader, name, stacked ? (int)experts : 0, all, out->cols, true,
                                    &tensor);
    if (rc) return rc;
    const struct rows rows = {.tensor = tensor,
                              .scales = scale_bytes,
                              .first = place.first + (stacked ? loader->expert * all : 0),
                              .count = out->rows,
                              .place = &place,
                              .columns = columns.unit ? &columns : NULL,
                              .order = load_order(loader, role),
                              .head = config->head_dim,
                              .blocks = blocks,
                              .codes = row_scales(loader, slot, layer, tensor, &out->group) > 0};
    out->data = rows_at(&rows);
    out->reader = NULL;
    out->dtype = rows_dtype(&rows);
    if (blocks && !block_dtype_of(tensor, &out->dtype)) out->dtype = KERN_Q8; /* split MXFP4 */
    if (rows.codes && (rc = read_block_scales(loader, name, &rows, scales, out))) return rc;
    *bytes += matrix_loaded_bytes(out, tensor);
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
        load_name(loader, slot->parts[i], layer, name);
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
        room = load_room(&loader->rows, rows, (size_t)matrices[0].cols * sizeof(float));
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
    load_name(loader, role, layer, name);
    return load_refuse_element(loader, name, bad);
}

/* Reads the slot's tensors and hands them to the backend; with `blocks`, as blocks. */
static int take_matrices(struct loader *loader, int layer, const struct slot *slot, bool blocks,
                         float *scales, size_t most_scales, struct kern_matrix *matrices,
                         struct kern_weight **out) {
    char name[TENSOR_NAME_MAX];
    size_t bytes = 0;
    load_name(loader, slot->parts[0], layer, name);
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
    if (!rc) rc = load_report(loader, bytes);
    return rc;
}

static void close_readers(struct loader *loader) {
    for (int i = 0; i < SLOT_PARTS_MAX; i++) rows_reader_close(&loader->readers[i]);
}

/* Returns whether the slot's matrices are in MXFP4. */
static bool is_mxfp4(const struct loader *loader, const struct slot *slot, int layer) {
    char name[TENSOR_NAME_MAX];
    load_name(loader, slot->parts[0], layer, name);
    const struct tensor *tensor = weights_find(loader->weights, name);
    return is_split_mxfp4(loader, slot->parts[0], name) ||
           (tensor && tensor->dtype == TENSOR_BLOCKS && tensor->format == GGUF_FORMAT_MXFP4);
}

int load_matrix(struct loader *loader, int layer, const struct slot *slot,
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

int load_experts(struct loader *loader, int layer, const struct slot *slot,
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
    int rc = joined ? load_find_tensor(loader, name, 0, (int64_t)latent->heads * each, latent->rank,
                                       true, &rows->tensor)
                    : load_find_tensor(loader, name, latent->heads, matrix->rows, matrix->cols,
                                       true, &rows->tensor);
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
    load_name(loader, role, layer, name);
    load_name(loader, role == ROLE_LATENT_K ? ROLE_LATENT_V : ROLE_LATENT_K, layer, other);
    const bool joined = strcmp(name, other) == 0, turned = joined && role == ROLE_LATENT_K;
    int rc = find_head(loader, name, role, head, joined, m, &rows);
    if (rc || loader->options->check_only) return rc;
    rows.blocks = !turned && in_blocks(loader, slot, layer);
    m->dtype = rows_dtype(&rows);
    if (rows.blocks) (void)block_dtype_of(rows.tensor, &m->dtype);
    const size_t numbers = (size_t)(m->rows * m->cols);
    char *room = load_room(&loader->rows, 2 * numbers, sizeof(float)), *at = room;
    if (!room) return no_room_for(loader, name, (size_t)m->rows, (size_t)m->cols);
    m->data = rows_at(&rows);
    rc = read_rows(loader, name, &rows, &loader->readers[0], &at, m);
    if (rc) return rc;
    char *other_half = room + numbers * sizeof(float);
    if (turned) turn_matrix(m, m->data, other_half);
    if (turned) m->data = other_half;
    const size_t bytes = matrix_loaded_bytes(m, rows.tensor);
    loader->read += rows_bytes(&rows);
    rc = give_matrix(loader, name, matrices, slot, layer, out);
    if (!rc && rows_are_made(&rows)) rc = check_reader(loader, role, layer, &loader->readers[0]);
    close_readers(loader);
    weights_release(loader->weights, rows_at(&rows), rows_bytes(&rows));
    if (!rc) rc = load_report(loader, bytes);
    return rc;
}

int load_head_matrices(struct loader *loader, int layer, const struct slot *slot,
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
