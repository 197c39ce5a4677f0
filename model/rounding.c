#include "model/rounding.h"

#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "model/blocks.h"
#include "model/rows.h"

#define CODES_LOOKED_AT ((size_t)4096) /* checked together, before a bad code is located */

static bool is_sensitive(const struct model_config *config, const struct slot *slot, int layer) {
    const int eighth = config->layers / 8;
    if (slot->parts[0] != ROLE_DOWN && slot->parts[0] != ROLE_EXPERT_DOWN) return false;
    return layer < eighth || layer >= config->layers - eighth || (layer - eighth) % 3 == 2;
}

enum quantization rounding_format(const struct model_config *config, const struct slot *slot,
                                  int layer, enum quantization wanted) {
    const enum role first = slot->parts[0];
    /* Mamba-2's rates lie in one tensor with its other inputs, and 4 bits would not be enough for
     * them. */
    if (wanted > QUANTIZE_FP8 && (first == ROLE_MAMBA_Z || first == ROLE_MAMBA_B))
        return QUANTIZE_Q8;
    if (slot->shard == KERN_SHARD_NONE) return QUANTIZE_NONE;
    if (wanted == QUANTIZE_Q4 && is_sensitive(config, slot, layer)) return QUANTIZE_Q8;
    if (slot->shard != KERN_SHARD_VOCAB) return wanted;
    return wanted == QUANTIZE_FP8 || wanted == QUANTIZE_NONE ? QUANTIZE_NONE : QUANTIZE_Q8;
}

bool rounding_is_done(const struct weights *weights, enum naming naming, const struct slot *slot,
                      int layer, int expert) {
    char name[TENSOR_NAME_MAX];
    enum kern_dtype dtype;
    for (int i = 0; i < slot->count; i++) {
        tensor_name(name, naming, slot->parts[i], layer, expert);
        const struct tensor *tensor = weights_find(weights, name);
        if (!tensor) return false;
        if (!block_dtype_of(tensor, &dtype) && !tensor_is_split_mxfp4(naming, slot->parts[i]))
            return false;
    }
    return true;
}

/* ---- Sizes of inputs ---- */

#define LEAST_SHARE 1e-3f /* the smallest estimate, as a part of the mean */
#define ROWS_TAKEN  16

/* The computation of the squared lengths of a matrix's rows. */
struct lengths {
    const struct tensor *tensor;
    const struct tensor_rows *place;
    int64_t first, rows, cols;
    const float *inputs; /* [cols] weights of the squares */
    float *out;          /* [rows] factors, which are multiplied by the rows' squared lengths */
    float *room;         /* [threads][cols] */
    struct cpu_tickets tickets;
    _Atomic bool failed;
};

static void measure_some(void *arg, int worker) {
    struct lengths *job = arg;
    float *row = job->room + worker * job->cols;
    int64_t end;
    for (int64_t i; (i = cpu_tickets_take(&job->tickets, ROWS_TAKEN, &end)) >= 0;)
        for (; i < end; i++) {
            float sum = 0;
            if (!rows_read_one(job->tensor, job->first + tensor_row(job->place, i), job->cols,
                               row)) {
                atomic_store(&job->failed, true);
                return;
            }
            for (int64_t c = 0; c < job->cols; c++) sum += job->inputs[c] * row[c] * row[c];
            job->out[i] *= sum;
        }
}

/* Multiplies out[i] by the squared length of row i of the role's matrix. */
static bool multiply_lengths(const struct rounding *r, enum role role, int layer, int expert,
                             const float *inputs, float *out) {
    char name[TENSOR_NAME_MAX];
    const struct tensor_rows place = tensor_rows_of(r->config, r->naming, role, layer);
    struct lengths job = {.inputs = inputs, .out = out, .place = &place};
    tensor_name(name, r->naming, role, layer, expert);
    tensor_shape(r->config, role, layer, &job.rows, &job.cols);
    job.tensor = weights_find(r->weights, name);
    if (!job.tensor) return false;
    job.first = place.first + (tensor_is_stacked(r->naming, role) ? expert * place.all : 0);
    job.room = mem_try_alloc((size_t)cpu_team_threads(r->team) * (size_t)job.cols, sizeof(float));
    if (!job.room) return false;
    cpu_tickets_set(&job.tickets, job.rows);
    cpu_team_run(r->team, measure_some, &job);
    mem_free(job.room);
    return !job.failed;
}

/* Reads the squares of a norm's factors. */
static bool read_norm(const struct rounding *r, enum role role, int layer, float *out) {
    char name[TENSOR_NAME_MAX];
    const int64_t count = r->config->d_model;
    tensor_name(name, r->naming, role, layer, 0);
    const struct tensor *tensor = weights_find(r->weights, name);
    if (!r->config->pre_norms || !tensor || tensor->dims != 1 || tensor->shape[0] != count ||
        !tensor_read_floats(tensor, 0, (size_t)count, out))
        return false;
    for (int64_t i = 0; i < count; i++) {
        const float factor = out[i] + r->config->norm_offset;
        out[i] = factor * factor;
    }
    return true;
}

/* Copies the values of a KV head to each query head that shares it: those read the mean of its
 * values. */
static void spread_heads(const struct model_config *c, int layer, const float *values, float *out) {
    const struct model_layer_config *its = &c->per_layer[layer];
    const int shared = c->heads_q / its->heads_kv, dim = its->head_dim;
    for (int head = 0; head < c->heads_q; head++)
        memcpy(out + (int64_t)head * dim, values + (int64_t)(head / shared) * dim,
               (size_t)dim * sizeof *out);
}

static bool rounding_measure(const struct rounding *r, enum role role, int layer, int expert,
                             float *norm, float *values, float *out) {
    const bool attention = role == ROLE_Q || role == ROLE_ATTN_GATE || role == ROLE_O;
    const bool routed = role >= ROLE_EXPERT_GATE;
    const bool alone = r->config->per_layer[layer].mixer == MIXER_NONE;
    const enum role in = attention || alone                    ? ROLE_ATTN_NORM
                         : routed && r->config->gemma4_experts ? ROLE_EXPERTS_NORM
                                                               : ROLE_FFN_NORM;
    if (routed && r->config->experts_narrow) return false; /* a product makes the inputs */
    if (!read_norm(r, in, layer, norm)) return false;
    if (role == ROLE_O) {
        const struct model_layer_config *its = &r->config->per_layer[layer];
        const enum role source = its->keys_are_values ? ROLE_K : ROLE_V;
        if (its->reads) return false; /* another layer makes the values */
        if (!multiply_lengths(r, source, layer, 0, norm, values)) return false;
        spread_heads(r->config, layer, values, out);
        return true;
    }
    if (role != ROLE_DOWN && role != ROLE_EXPERT_DOWN) {
        memcpy(out, norm, (size_t)r->config->d_model * sizeof *out);
        return true;
    }
    const enum role up = routed ? ROLE_EXPERT_UP : ROLE_UP;
    const enum role gate = r->config->ungated ? up : routed ? ROLE_EXPERT_GATE : ROLE_GATE;
    return multiply_lengths(r, gate, layer, expert, norm, out) &&
           multiply_lengths(r, up, layer, expert, norm, out);
}

bool rounding_inputs(const struct rounding *r, const struct slot *slot, int layer, int expert,
                     float *out) {
    const struct model_config *c = r->config;
    const enum role role = slot->parts[0];
    int64_t rows, cols;
    double sum = 0;
    tensor_shape(c, role, layer, &rows, &cols);
    if (role != ROLE_Q && role != ROLE_ATTN_GATE && role != ROLE_O && role != ROLE_GATE &&
        role != ROLE_UP && role != ROLE_DOWN && role != ROLE_EXPERT_GATE &&
        role != ROLE_EXPERT_UP && role != ROLE_EXPERT_DOWN)
        return false;
    int64_t values, width;
    tensor_shape(c, ROLE_V, layer, &values, &width);
    float *room = mem_try_alloc((size_t)(c->d_model + values), sizeof *room);
    if (!room) return false;
    for (int64_t i = 0; i < cols; i++) out[i] = 1;
    for (int64_t i = 0; i < values; i++) room[c->d_model + i] = 1;
    const bool found = rounding_measure(r, role, layer, expert, room, room + c->d_model, out);
    mem_free(room);
    for (int64_t i = 0; found && i < cols; i++) sum += (double)out[i];
    if (!found || !(sum > 0) || !isfinite(sum)) return false;
    for (int64_t i = 0; i < cols; i++)
        out[i] = fmaxf(out[i] * (float)((double)cols / sum), LEAST_SHARE);
    return true;
}

/* ---- Scales of E4M3 ---- */

/* Returns the first code that is not a number, or `count`. */
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

int rounding_read_scales(const struct weights *weights, const char *name,
                         const struct tensor *codes, bool check_only, float *out,
                         struct fault *fault) {
    char scale_name[TENSOR_NAME_MAX + 16];
    size_t rows = (size_t)codes->shape[0], count = 1;
    snprintf(scale_name, sizeof scale_name, "%s_scale", name);
    const struct tensor *scale = weights_find(weights, scale_name);
    if (!scale) { /* files with blocks use this name if the matrix is one block */
        char other[sizeof scale_name];
        snprintf(other, sizeof other, "%s_scale_inv", name);
        scale = weights_find(weights, other);
    }
    if (!scale)
        return fault_set(fault, ERR_NOTFOUND, scale_name,
                         "tensor is missing: the scale of an F8_E4M3 matrix");
    for (int i = 0; i < scale->dims; i++) count *= (size_t)scale->shape[i];
    if ((count != 1 && (count != rows || scale->shape[0] != codes->shape[0])) ||
        !tensor_read_floats(scale, 0, count, out))
        return fault_set(fault, ERR_UNSUPPORTED, scale_name,
                         "expected one number or %zu, F32, F16 or BF16", rows);
    for (size_t i = count; i < rows; i++) out[i] = out[0];
    for (size_t i = 0; i < count; i++)
        if (!(out[i] >= 0 && out[i] <= FLT_MAX / QUANTIZE_MOST))
            return fault_set(fault, ERR_INVALID, scale_name, "%g is no scale", (double)out[i]);
    size_t nan = check_only ? codes->bytes : find_nan(codes->data, codes->bytes);
    if (nan == codes->bytes) return 0;
    return fault_set(fault, ERR_INVALID, name, "element %zu is not a number", nan);
}
