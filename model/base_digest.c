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

static const struct tensor *base_digest_find(const struct summing *s, enum role role, int layer) {
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

/* Returns the row of the tensor that holds the role's row `row`. */
static int64_t stored_row(const struct summing *s, const struct tensor_rows *place, enum role role,
                          int layer, int64_t row) {
    const int at = (int)(row % s->config->per_layer[layer < 0 ? 0 : layer].head_dim);
    if (tensor_is_rotated(role)) row += tensor_stored_row(s->config, at) - at;
    return place->first + tensor_row(place, row);
}

static void add_vector(struct summing *s, const struct slot *slot, int part, int layer) {
    const enum role role = slot->parts[part];
    const struct tensor *tensor = base_digest_find(s, role, layer);
    const struct tensor_rows place = tensor_rows_of(s->config, s->naming, role, layer);
    const float offset = slot_offset(slot, s->config);
    int64_t rows, cols;
    tensor_shape(s->config, role, layer, &rows, &cols);
    const int64_t width = cols ? cols : 1;
    for (int64_t i = 0; tensor && i < rows * width; i++) {
        const int64_t row = stored_row(s, &place, role, layer, i / width);
        float number;
        if (!tensor_read_floats(tensor, (size_t)(row * width + i % width), 1, &number)) return;
        number += offset;
        add_numbers(&s->vectors, &number, 1);
    }
}

static void add_matrix(struct summing *s, const struct slot *slot, int part, int layer) {
    const enum role role = slot->parts[part];
    const struct tensor *tensor = base_digest_find(s, role, layer);
    const struct tensor_rows place = tensor_rows_of(s->config, s->naming, role, layer);
    const struct tensor_rows columns = tensor_columns_of(s->config, s->naming, role, layer);
    int64_t rows, cols;
    tensor_shape(s->config, role, layer, &rows, &cols);
    const int64_t sample[] = {0, rows / 2, rows - 1};
    for (int i = 0; tensor && cols <= s->width && i < 3; i++) {
        if (!rows_read_one(tensor, stored_row(s, &place, role, layer, sample[i]), cols, s->row))
            continue;
        for (int64_t c = 0; c < cols; c++)
            add_numbers(&s->matrices, &s->row[tensor_row(&columns, c)], 1);
    }
}

/* ---- The model ---- */

static void add_slot(struct summing *s, const struct slot *slot, int layer) {
    const bool fixed = slot_fixed(slot, s->config) > 0;
    /* Left out because formats store it differently: some as an exponential, others as its
     * logarithm. */
    const bool left_out = slot->experts || slot->heads || fixed || slot->negated_exp;
    for (int i = 0; !left_out && i < slot->count; i++) {
        if (slot->matrix)
            add_matrix(s, slot, i, layer);
        else
            add_vector(s, slot, i, layer);
    }
}

static int64_t widest_row(const struct model_config *config) {
    const int64_t widths[] = {config->d_model,     (int64_t)config->heads_q * config->head_dim,
                              dense_width(config), config->shared_ff,
                              delta_width(config), mamba_width(config),
                              config->q_rank,      heads_width(config, 0)};
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
    add_slot(&s, &end_slots[END_EMBED], -1);
    add_slot(&s, &end_slots[END_FINAL_NORM], -1);
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
