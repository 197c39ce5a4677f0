/* Reads gates files: parses the header, checks every tensor's type and shape against it, and
 * converts the weights one layer at a time, because backends copy them. */
#include "model/gates.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "kernels/score.h"
#include "model/digest_field.h"

/* ---- Header ---- */

const struct gates_header gates_header_unknown = {.sinks = -1, .recent = -1, .parity = -1};

static int read_type(const cJSON *root, struct gates_header *out, struct fault *fault) {
    const char *type = "", *act = "silu";
    int rc = json_str(root, "keepd", "type", &type, fault);
    if (!rc) rc = json_str(root, "keepd", "act", &act, fault);
    if (rc) return rc;
    if (strcmp(type, "rg") != 0 && strcmp(type, "rg10") != 0)
        return fault_set(fault, ERR_UNSUPPORTED, "keepd.type",
                         "\"%.64s\" is not supported: rg, rg10", type);
    if (strcmp(act, "silu") != 0)
        return fault_set(fault, ERR_UNSUPPORTED, "keepd.act",
                         "\"%.64s\" is not supported, only \"silu\"", act);
    out->two_layers = !strcmp(type, "rg10");
    return 0;
}

static int gates_read_sizes(const cJSON *root, struct gates_header *out, struct fault *fault) {
    int64_t version = 0, width = 0, layers = 0, heads = 0, budget = 0;
    int rc = json_int(root, "keepd", "version", INT32_MIN, INT32_MAX, &version, fault);
    if (rc) return rc;
    if (version != 1)
        return fault_set(fault, ERR_UNSUPPORTED, "keepd.version",
                         "version %d is not supported, only 1", (int)version);
    rc = json_int(root, "keepd", "width", 1, GATES_WIDTH_MAX, &width, fault);
    if (!rc) rc = json_int(root, "keepd", "layers", 1, 1 << 16, &layers, fault);
    if (!rc) rc = json_int(root, "keepd", "heads", 1, 1 << 16, &heads, fault);
    if (!rc) rc = json_int(root, "keepd", "trained_budget", 0, INT32_MAX, &budget, fault);
    if (rc) return rc;
    if (!width || !layers || !heads)
        return fault_set(fault, ERR_INVALID, "keepd", "width, layers and heads must be given");
    out->width = (int)width;
    out->layers = (int)layers;
    out->heads = (int)heads;
    out->trained_budget = (int)budget;
    return 0;
}

/* JSON has no infinity: the string "inf" stands for it. */
static int read_horizon(const cJSON *root, struct gates_header *out, struct fault *fault) {
    const cJSON *node = json_get(root, "horizon");
    double horizon = 0;
    if (node && cJSON_IsString(node) && !strcmp(node->valuestring, "inf")) {
        out->horizon = INFINITY;
        return 0;
    }
    int rc = json_num(root, "keepd", "horizon", 1, SCORE_HORIZON_MAX, &horizon, fault);
    out->horizon = (float)horizon;
    return rc;
}

/* Reads the default numbers of protected tokens and the form of the score. */
static int read_rule(const cJSON *root, struct gates_header *out, struct fault *fault) {
    int64_t sinks = out->sinks, recent = out->recent;
    bool parity = false;
    int rc = json_int(root, "keepd", "sinks", 0, INT32_MAX, &sinks, fault);
    if (!rc) rc = json_int(root, "keepd", "recent", 0, INT32_MAX, &recent, fault);
    if (!rc) rc = json_bool(root, "keepd", "parity", &parity, fault);
    if (rc) return rc;
    out->sinks = (int)sinks;
    out->recent = (int)recent;
    if (json_get(root, "parity")) out->parity = parity;
    return 0;
}

static int gates_read_base(const cJSON *root, struct gates_header *out, struct fault *fault) {
    const cJSON *base = json_get(root, "base");
    if (!base) return 0;
    if (!cJSON_IsObject(base))
        return fault_set(fault, ERR_INVALID, "keepd.base", "expected an object");
    int rc = digest_field_read(base, "keepd.base", "vectors", out->base.vectors, fault);
    return rc ? rc : digest_field_read(base, "keepd.base", "matrices", out->base.matrices, fault);
}

int gates_header_parse(const char *json, size_t size, struct gates_header *out,
                       struct fault *fault) {
    const struct json_limits limits = {.bytes = (size_t)1 << 20, .depth = 32, .nodes = 1000};
    cJSON *root = NULL;
    struct fault inner = {0};
    *out = gates_header_unknown;
    int rc = json_parse(json, size, &limits, &root, &inner);
    if (rc) return fault_set(fault, rc, "keepd", "%s", inner.text);
    if (!cJSON_IsObject(root)) rc = fault_set(fault, ERR_MALFORMED, "keepd", "expected an object");
    if (!rc) rc = read_type(root, out, fault);
    if (!rc) rc = gates_read_sizes(root, out, fault);
    if (!rc) rc = read_horizon(root, out, fault);
    if (!rc) rc = read_rule(root, out, fault);
    if (!rc) rc = gates_read_base(root, out, fault);
    json_free(root);
    return rc;
}

/* ---- Tensors ---- */

static const struct tensor *gates_find(const struct tensor_file *file, const char *name) {
    size_t low = 0, high = file->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(file->tensors[middle].name, name);
        if (order == 0) return &file->tensors[middle];
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

struct want {
    const char *name;
    const struct tensor **out;
    int dims;
    int64_t shape[3];
};

static int gates_take(const struct tensor_file *file, const struct want *want,
                      struct fault *fault) {
    char expected[96], found[96];
    const struct tensor *tensor = gates_find(file, want->name);
    tensor_shape_text(want->shape, want->dims, expected, sizeof expected);
    if (!tensor)
        return fault_set(fault, ERR_NOTFOUND, want->name, "tensor is missing, expected [%s]",
                         expected);
    tensor_shape_text(tensor->shape, tensor->dims, found, sizeof found);
    if (tensor->dims != want->dims ||
        memcmp(tensor->shape, want->shape, (size_t)want->dims * sizeof want->shape[0]) != 0)
        return fault_set(fault, ERR_INVALID, want->name, "shape is [%s], expected [%s]", found,
                         expected);
    bool integers = !strcmp(want->name, "row");
    if (integers ? tensor->dtype != TENSOR_I32 : !tensor_is_float(tensor->dtype))
        return fault_set(fault, ERR_UNSUPPORTED, want->name, "type must be %s",
                         integers ? "I32" : "F32, F16 or BF16");
    *want->out = tensor;
    return 0;
}

/* Finds how many embeddings w1 has per layer, and how many rows w_last has; both are the file's
 * choice. */
static int find_tying(struct gates *gates, struct fault *fault) {
    const struct tensor *w1 = gates_find(&gates->file, "w1"),
                        *last = gates_find(&gates->file, "w_last");
    int64_t streams = (int64_t)gates->shape.layers * gates->shape.heads_kv;
    gates->embeddings = 1;
    if (w1 && w1->dims > 0 && w1->shape[0] == streams) gates->embeddings = gates->shape.heads_kv;
    if (gates->embeddings > 1 && gates->header.two_layers)
        return fault_set(fault, ERR_UNSUPPORTED, "w1",
                         "an embedding per head is supported for type rg only");
    int64_t rows = last && last->dims > 0 ? last->shape[0] : 0;
    if (last && (rows < 1 || rows > streams))
        return fault_set(fault, ERR_INVALID, "w_last", "%lld rows, expected 1 to %lld",
                         (long long)rows, (long long)streams);
    gates->rows = last ? (int)rows : 1;
    return 0;
}

static int take_all(struct gates *gates, struct fault *fault) {
    const int64_t layers = gates->shape.layers, heads = gates->shape.heads_kv;
    const int64_t d = gates->shape.d_model, m = gates->header.width, rows = gates->rows;
    const int64_t blocks = layers * gates->embeddings;
    const struct want wants[] = {
        {"w1", &gates->w1, 3, {blocks, m, d}},    {"b1", &gates->b1, 2, {blocks, m}},
        {"w_last", &gates->last, 2, {rows, m}},   {"c", &gates->bias, 1, {rows}},
        {"row", &gates->row, 2, {layers, heads}}, {"w2", &gates->w2, 3, {layers, m, m}},
        {"b2", &gates->b2, 2, {layers, m}},
    };
    size_t count = sizeof wants / sizeof wants[0] - (gates->header.two_layers ? 0 : 2);
    for (size_t i = 0; i < count; i++) {
        int rc = gates_take(&gates->file, &wants[i], fault);
        if (rc) return rc;
    }
    return 0;
}

static int32_t gates_row_at(const struct gates *gates, int layer, int head) {
    int32_t row;
    size_t index = (size_t)layer * (size_t)gates->shape.heads_kv + (size_t)head;
    memcpy(&row, (const char *)gates->row->data + index * sizeof row, sizeof row);
    return row;
}

static int check_rows(const struct gates *gates, struct fault *fault) {
    for (int l = 0; l < gates->shape.layers; l++) {
        for (int h = 0; h < gates->shape.heads_kv; h++) {
            int32_t row = gates_row_at(gates, l, h);
            if (row < 0 || row >= gates->rows)
                return fault_set(fault, ERR_INVALID, "row",
                                 "layer %d head %d uses row %d of %d in w_last", l, h, row,
                                 gates->rows);
        }
    }
    return 0;
}

static int check_header(const struct gates *gates, struct fault *fault) {
    const struct gates_header *header = &gates->header;
    if (header->layers != gates->shape.layers)
        return fault_set(fault, ERR_INVALID, "keepd.layers", "%d, the model has %d", header->layers,
                         gates->shape.layers);
    if (header->heads != gates->shape.heads_kv)
        return fault_set(fault, ERR_INVALID, "keepd.heads", "%d, the model has %d", header->heads,
                         gates->shape.heads_kv);
    return 0;
}

/* Sizes of one layer's parts in floats. The tensors were checked, so the file's size bounds their
 * sum. */
struct layer_sizes {
    size_t w1, b1, w2, b2, last, bias;
};

static struct layer_sizes layer_sizes(const struct gates *gates) {
    size_t m = (size_t)gates->header.width, e = (size_t)gates->embeddings;
    size_t h = (size_t)gates->shape.heads_kv, d = (size_t)gates->shape.d_model;
    struct layer_sizes s = {.w1 = e * m * d, .b1 = e * m, .last = h * m, .bias = h};
    if (gates->header.two_layers) {
        s.w2 = m * m;
        s.b2 = m;
    }
    return s;
}

static int gates_open_scratch(struct gates *gates, struct fault *fault) {
    struct layer_sizes s = layer_sizes(gates);
    gates->scratch =
        mem_try_alloc(s.w1 + s.b1 + s.w2 + s.b2 + s.last + s.bias, sizeof *gates->scratch);
    gates->layer_row = mem_try_alloc((size_t)gates->shape.heads_kv, sizeof *gates->layer_row);
    if (!gates->scratch || !gates->layer_row)
        return fault_set(fault, ERR_NOMEM, "w1", "no memory for one layer of gates");
    return 0;
}

int gates_parse(const void *data, size_t size, const struct gates_shape *shape, struct gates *out,
                struct fault *fault) {
    *out = (struct gates){.shape = *shape};
    int rc = safetensors_parse(data, size, &out->file, fault);
    if (rc) {
        *out = (struct gates){0};
        return rc;
    }
    const char *json = out->file.metadata_keepd;
    if (!json)
        rc = fault_set(fault, ERR_INVALID, "__metadata__.keepd",
                       "missing: this is not a gates file");
    if (!rc) rc = gates_header_parse(json, strlen(json), &out->header, fault);
    if (!rc) rc = find_tying(out, fault);
    if (!rc) rc = take_all(out, fault);
    if (!rc) rc = check_header(out, fault);
    if (!rc) rc = check_rows(out, fault);
    if (!rc) rc = gates_open_scratch(out, fault);
    if (rc) gates_close(out);
    return rc;
}

void gates_close(struct gates *gates) {
    mem_free(gates->scratch);
    mem_free(gates->layer_row);
    tensor_file_close(&gates->file);
    *gates = (struct gates){0};
}

/* ---- One layer ---- */

/* Reads block `index` of `count` floats. A number that is not finite would make every later
 * comparison of scores false, so it is refused here. */
static int gates_read_block(const struct tensor *tensor, size_t index, size_t count, float *out,
                            struct fault *fault) {
    bool finite = tensor_read_floats(tensor, index * count, count, out);
    for (size_t i = 0; finite && i < count; i++) finite = isfinite(out[i]);
    if (!finite)
        return fault_set(fault, ERR_INVALID, tensor->name, "holds a number that is not finite");
    return 0;
}

/* Reads only the rows that this layer uses, so that untied gates do not copy all of w_last to every
 * layer. */
static int read_last(struct gates *gates, int layer, struct kern_gate_spec *spec, float *last,
                     float *bias, struct fault *fault) {
    const int heads = spec->heads_kv;
    const size_t m = (size_t)gates->header.width;
    spec->row_count = 0;
    for (int h = 0; h < heads; h++) {
        int32_t row = gates_row_at(gates, layer, h);
        int same = 0;
        while (same < h && gates_row_at(gates, layer, same) != row) same++;
        if (same < h) {
            gates->layer_row[h] = gates->layer_row[same];
            continue;
        }
        int slot = spec->row_count++;
        int rc = gates_read_block(gates->last, (size_t)row, m, last + (size_t)slot * m, fault);
        if (!rc) rc = gates_read_block(gates->bias, (size_t)row, 1, bias + slot, fault);
        if (rc) return rc;
        gates->layer_row[h] = slot;
    }
    return 0;
}

int gates_layer(struct gates *gates, int layer, struct kern_gate_spec *out, struct fault *fault) {
    struct layer_sizes s = layer_sizes(gates);
    float *w1 = gates->scratch, *b1 = w1 + s.w1, *w2 = b1 + s.b1, *b2 = w2 + s.w2;
    float *last = b2 + s.b2, *bias = last + s.last;
    const int heads = gates->shape.heads ? gates->shape.heads[layer].kv : gates->shape.heads_kv;
    *out = (struct kern_gate_spec){.w1 = w1,
                                   .b1 = b1,
                                   .last = last,
                                   .bias = bias,
                                   .row = gates->layer_row,
                                   .width = gates->header.width,
                                   .d_model = gates->shape.d_model,
                                   .heads_kv = heads,
                                   .embeddings = gates->embeddings > 1 ? heads : 1};
    int rc = gates_read_block(gates->w1, (size_t)layer, s.w1, w1, fault);
    if (!rc) rc = gates_read_block(gates->b1, (size_t)layer, s.b1, b1, fault);
    if (!rc && gates->header.two_layers) {
        out->w2 = w2;
        out->b2 = b2;
        rc = gates_read_block(gates->w2, (size_t)layer, s.w2, w2, fault);
        if (!rc) rc = gates_read_block(gates->b2, (size_t)layer, s.b2, b2, fault);
    }
    return rc ? rc : read_last(gates, layer, out, last, bias, fault);
}
