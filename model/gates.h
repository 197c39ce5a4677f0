/* Gates file: a safetensors file whose metadata key `keepd` describes retention gates.
 *
 *   keepd  = {version 1, type "rg" | "rg10", width m, act "silu", layers L, heads H,
 *             trained_budget, horizon, sinks, recent, parity,
 *             base: {vectors, matrices}}
 *             trained_budget to base: what the gates were trained for; each may be missing. `base`
 *             has the digests of the model's numbers (base_digest.h), in hex
 *   w1     [L, m, d], b1 [L, m]          or per head: [L*H, m, d], [L*H, m] (rg only)
 *   w2     [L, m, m], b2 [L, m]          rg10 only
 *   w_last [R, m], c [R], row [L, H]     int32: which row of w_last each head uses; of layers with
 *                                        fewer heads only the first are used
 *
 * `gates_parse` is a pure function over the file's bytes; the result reads from them, so they must
 * outlive it. Layers are converted one at a time, because backends copy them. */
#ifndef KEEPD_MODEL_GATES_H
#define KEEPD_MODEL_GATES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "kernels/kern.h"
#include "model/base_digest.h"
#include "model/weights.h"

#define GATES_WIDTH_MAX 16384

/* The shape of the model that the gates must fit. Where layers have different numbers of KV heads,
 * files have the most, `heads_kv`, for each layer; a layer with fewer has the first of them. */
struct gates_shape {
    int layers, heads_kv, d_model;
    const struct kern_heads *heads; /* [layers], outlives the gates; NULL: all have heads_kv */
};

struct gates_header {
    bool two_layers; /* rg10 */
    int width, layers, heads;
    int trained_budget;      /* 0 = unknown */
    float horizon;           /* >= 1, INFINITY allowed; 0 = unknown */
    int sinks, recent;       /* protected tokens; -1 = unknown */
    int parity;              /* 1: scores with the published offsets; -1 = unknown */
    struct base_digest base; /* members "" = unknown */
};

/* The header for gates without one: every member is unknown. */
extern const struct gates_header gates_header_unknown;

/* Parses the value of the metadata key. Pure. */
int gates_header_parse(const char *json, size_t size, struct gates_header *out,
                       struct fault *fault);

struct gates {
    struct gates_header header;
    struct gates_shape shape;
    int embeddings; /* 1, or heads_kv: an embedding per head */
    int rows;       /* R */
    struct tensor_file file;
    const struct tensor *w1, *b1, *w2, *b2, *last, *bias, *row;
    float *scratch; /* one layer as float32 */
    int32_t *layer_row;
};

/* Checks every tensor's name, type and shape against the model. Errors name the tensor. */
int gates_parse(const void *data, size_t size, const struct gates_shape *shape, struct gates *out,
                struct fault *fault);
void gates_close(struct gates *gates);

/* Reads one layer, for kern_ops.gate_load; the arrays are valid until the next call. ERR_INVALID
 * names a tensor that holds a number which is not finite. */
int gates_layer(struct gates *gates, int layer, struct kern_gate_spec *out, struct fault *fault);

#endif
