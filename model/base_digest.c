#include "model/base_digest.h"

#include <nettle/sha2.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "model/internal.h"
#include "model/rows.h"
#include "model/tensors.h"

struct summing {
    const struct model_config *config;
    const struct weights *weights;
    enum naming naming;
    struct sha256_ctx vectors, matrices;
    float *row; /* [width] */
    int64_t width;
};

/* ---- One tensor ---- */

static const struct tensor *find(const struct summing *s, enum role role, int layer) {
    char name[TENSOR_NAME_MAX];
    tensor_name(name, s->naming, role, layer, 0);
    return weights_find(s->weights, name);
}

static void add_numbers(struct sha256_ctx *sum, const float *numbers, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint8_t bytes[4];
        uint32_t bits;
        memcpy(&bits, &numbers[i], sizeof bits);
        for (int b = 0; b < 4; b++) bytes[b] = (uint8_t)(bits >> 8 * b);
        sha256_update(sum, sizeof bytes, bytes);
    }
}

static int64_t stored_row(const struct model_config *config, enum role role, int64_t row) {
    const int place = (int)(row % config->head_dim);
    return tensor_is_rotated(role) ? row - place + tensor_stored_row(config, place) : row;
}

/* Number of rows that earlier parts of the slot have in the same tensor. */
static int64_t rows_before(const struct summing *s, const struct slot *slot, int part, int layer) {
    const struct tensor *tensor = find(s, slot->parts[part], layer);
    int64_t before = 0, rows, cols;
    for (int i = 0; i < part; i++) {
        if (find(s, slot->parts[i], layer) != tensor) continue;
        tensor_shape(s->config, slot->parts[i], &rows, &cols);
        before += rows;
    }
    return before;
}

static void add_vector(struct summing *s, const struct slot *slot, int part, int layer) {
    const enum role role = slot->parts[part];
    const struct tensor *tensor = find(s, role, layer);
    const int64_t before = rows_before(s, slot, part, layer);
    int64_t rows, cols;
    tensor_shape(s->config, role, &rows, &cols);
    if (cols) rows *= cols;
    for (int64_t i = 0; tensor && i < rows; i++) {
        const size_t row = (size_t)(before + stored_row(s->config, role, i));
        float number;
        if (!tensor_read_floats(tensor, row, 1, &number)) return;
        if (slot->norm && !(slot == &slot_final_norm && s->config->final_norm_plain))
            number += s->config->norm_offset;
        add_numbers(&s->vectors, &number, 1);
    }
}

static void add_matrix(struct summing *s, const struct slot *slot, int part, int layer) {
    const enum role role = slot->parts[part];
    const struct tensor *tensor = find(s, role, layer);
    const int64_t before = rows_before(s, slot, part, layer);
    int64_t rows, cols;
    tensor_shape(s->config, role, &rows, &cols);
    const int64_t sample[] = {0, rows / 2, rows - 1};
    for (int i = 0; tensor && cols <= s->width && i < 3; i++)
        if (rows_read_one(tensor, before + stored_row(s->config, role, sample[i]), cols, s->row))
            add_numbers(&s->matrices, s->row, cols);
}

/* ---- The model ---- */

static void add_slot(struct summing *s, const struct slot *slot, int layer) {
    const bool fixed = slot_fixed(slot, s->config) > 0;
    for (int i = 0; !slot->experts && !fixed && i < slot->count; i++) {
        if (slot->matrix)
            add_matrix(s, slot, i, layer);
        else
            add_vector(s, slot, i, layer);
    }
}

static int64_t widest_row(const struct model_config *config) {
    const int64_t widths[] = {config->d_model, q_width(config), dense_width(config),
                              config->shared_ff};
    int64_t most = 0;
    for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++)
        if (widths[i] > most) most = widths[i];
    return most;
}

static void write_digest(struct sha256_ctx *sum, char out[SHA256_HEX]) {
    uint8_t bytes[SHA256_BYTES];
    sha256_digest(sum, sizeof bytes, bytes);
    for (size_t i = 0; i < sizeof bytes; i++) snprintf(out + 2 * i, 3, "%02x", bytes[i]);
}

int base_digest(const struct model_config *config, const struct weights *weights,
                struct base_digest *out) {
    struct summing s = {.config = config,
                        .weights = weights,
                        .naming = tensor_naming(config, weights_gguf(weights) != NULL),
                        .width = widest_row(config)};
    *out = (struct base_digest){0};
    s.row = mem_try_alloc((size_t)s.width, sizeof *s.row);
    if (!s.row) return ERR_NOMEM;
    sha256_init(&s.vectors);
    sha256_init(&s.matrices);
    add_slot(&s, &slot_embed, -1);
    add_slot(&s, &slot_final_norm, -1);
    for (int l = 0; l < config->layers; l++)
        for (size_t i = 0; i < layer_slot_count; i++)
            if (slot_wanted(&layer_slots[i], config, l)) add_slot(&s, &layer_slots[i], l);
    write_digest(&s.vectors, out->vectors);
    write_digest(&s.matrices, out->matrices);
    if (config->packing.base_matrices[0])
        memcpy(out->matrices, config->packing.base_matrices, SHA256_HEX);
    mem_free(s.row);
    return 0;
}

int base_digest_of(const char *path, int context, struct base_digest *out, struct fault *fault) {
    struct model_config config = {0};
    struct weights *weights = NULL;
    int rc = model_read(path, context, false, &config, &weights, fault);
    if (!rc) {
        rc = base_digest(&config, weights, out);
        if (rc) fault_set(fault, rc, "model", "%s", err_text(rc));
    }
    weights_close(weights);
    model_config_close(&config);
    return rc;
}
