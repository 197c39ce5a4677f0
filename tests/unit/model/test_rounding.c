/* Sizes of inputs that are estimated from the weights: against the formulas of rounding.h, written
 * again for files of one kind (separate matrices in bf16 or f32). */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "model/internal.h"
#include "model/rounding.h"

#define MODELS KEEPD_SOURCE_DIR "/tests/data/models/"

struct opened {
    struct model_config config;
    struct weights *weights;
    struct rounding rounding;
};

static void open_model(const char *name, struct opened *o) {
    char path[512];
    struct fault fault = {0};
    *o = (struct opened){0};
    snprintf(path, sizeof path, MODELS "%s", name);
    cr_assert_eq(model_read(path, 0, false, &o->config, &o->weights, &fault), 0, "%s", fault.text);
    o->rounding = (struct rounding){
        .config = &o->config, .weights = o->weights, .naming = tensor_naming(&o->config, false)};
    cr_assert_eq(cpu_team_open(3, &o->rounding.team), 0);
}

static void close_model(struct opened *o) {
    cpu_team_close(o->rounding.team);
    weights_close(o->weights);
    model_config_close(&o->config);
}

/* All numbers of a tensor of layer 1. */
static double *numbers(const struct opened *o, const char *name, int64_t *rows, int64_t *cols) {
    char full[128];
    snprintf(full, sizeof full, "model.layers.1.%s.weight", name);
    const struct tensor *t = weights_find(o->weights, full);
    cr_assert_not_null(t, "%s", full);
    *rows = t->shape[0];
    *cols = t->dims > 1 ? t->shape[1] : 1;
    double *out = calloc((size_t)(*rows * *cols), sizeof *out);
    for (int64_t i = 0; i < *rows * *cols; i++) {
        float x;
        cr_assert(tensor_read_floats(t, (size_t)i, 1, &x));
        out[i] = x;
    }
    return out;
}

static double *norm_squares(const struct opened *o, const char *name) {
    int64_t rows, cols;
    double *out = numbers(o, name, &rows, &cols);
    for (int64_t i = 0; i < rows; i++) out[i] = pow(out[i] + o->config.norm_offset, 2);
    return out;
}

/* out[i] *= the squared length of row i. */
static void times_lengths(const struct opened *o, const char *name, const double *norm,
                          double *out) {
    int64_t rows, cols;
    double *m = numbers(o, name, &rows, &cols);
    for (int64_t r = 0; r < rows; r++) {
        double sum = 0;
        for (int64_t c = 0; c < cols; c++) sum += norm[c] * m[r * cols + c] * m[r * cols + c];
        out[r] *= sum;
    }
    free(m);
}

static void check(const struct opened *o, enum role role, const double *expected, int64_t count) {
    float *found = calloc((size_t)count, sizeof *found);
    double sum = 0;
    const struct slot *slot = NULL;
    for (size_t i = 0; i < layer_slot_count; i++)
        if (layer_slots[i].parts[0] == role) slot = &layer_slots[i];
    cr_assert(rounding_inputs(&o->rounding, slot, 1, 0, found), "role %d", role);
    for (int64_t i = 0; i < count; i++) sum += expected[i];
    for (int64_t i = 0; i < count; i++) {
        const double want = fmax(expected[i] * (double)count / sum, 1e-3);
        cr_assert(fabs(found[i] - want) <= 1e-5 * want, "role %d: input %lld is %g, expected %g",
                  role, (long long)i, (double)found[i], want);
    }
    free(found);
}

static void check_model(const char *name, const char *ffn_norm) {
    struct opened o;
    open_model(name, &o);
    const struct model_config *c = &o.config;
    const int size = c->head_dim, shared = c->heads_q / c->heads_kv;
    double *norm = norm_squares(&o, "input_layernorm");
    check(&o, ROLE_Q, norm, c->d_model);
    double *values = calloc((size_t)(c->heads_kv * size), sizeof *values);
    double *heads = calloc((size_t)(c->heads_q * size), sizeof *heads);
    for (int i = 0; i < c->heads_kv * size; i++) values[i] = 1;
    times_lengths(&o, "self_attn.v_proj", norm, values);
    for (int i = 0; i < c->heads_q * size; i++)
        heads[i] = values[i / size / shared * size + i % size];
    check(&o, ROLE_O, heads, (int64_t)c->heads_q * size);
    free(norm);
    norm = norm_squares(&o, ffn_norm);
    check(&o, ROLE_GATE, norm, c->d_model);
    double *inner = calloc((size_t)c->d_ff, sizeof *inner);
    for (int i = 0; i < c->d_ff; i++) inner[i] = 1;
    times_lengths(&o, "mlp.gate_proj", norm, inner);
    times_lengths(&o, "mlp.up_proj", norm, inner);
    check(&o, ROLE_DOWN, inner, c->d_ff);
    free(norm), free(values), free(heads), free(inner);
    close_model(&o);
}

Test(rounding, inputs_are_as_large_as_the_weights_say) {
    check_model("qwen3", "post_attention_layernorm");
    check_model("llama", "post_attention_layernorm");
    check_model("gemma2", "pre_feedforward_layernorm");
}

/* Joined tensors have the rows of gate first, then those of up. */
Test(rounding, joined_tensors_have_several_matrices) {
    struct opened o;
    int64_t rows, cols;
    open_model("phi3", &o);
    double *norm = norm_squares(&o, "post_attention_layernorm");
    double *joined = numbers(&o, "mlp.gate_up_proj", &rows, &cols);
    double *inner = calloc((size_t)o.config.d_ff, sizeof *inner);
    cr_assert_eq(rows, 2 * o.config.d_ff);
    for (int64_t i = 0; i < o.config.d_ff; i++) {
        double lengths[2] = {0};
        for (int part = 0; part < 2; part++)
            for (int64_t c = 0; c < cols; c++)
                lengths[part] += norm[c] * pow(joined[(i + part * o.config.d_ff) * cols + c], 2);
        inner[i] = lengths[0] * lengths[1];
    }
    check(&o, ROLE_DOWN, inner, o.config.d_ff);
    free(norm), free(joined), free(inner);
    close_model(&o);
}

Test(rounding, without_a_norm_of_the_inputs_there_is_no_estimate) {
    struct opened o;
    float *out;
    open_model("olmo2", &o);
    out = calloc((size_t)o.config.d_ff, sizeof *out);
    for (size_t i = 0; i < layer_slot_count; i++)
        if (layer_slots[i].matrix && !layer_slots[i].experts)
            cr_expect(!rounding_inputs(&o.rounding, &layer_slots[i], 1, 0, out));
    cr_expect(!rounding_inputs(&o.rounding, &end_slots[END_EMBED], -1, 0, out));
    free(out);
    close_model(&o);
}
