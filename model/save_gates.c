#include "model/save_gates.h"

#include <math.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "kernels/number.h"

#define HEADER_BYTES_MAX ((size_t)1 << 16)

/* ---- The header ---- */

static void describe_gates(const struct save_gates *g, struct buf *out) {
    const struct gates_header *h = &g->header;
    buf_fmt(out,
            "{\"version\": 1, \"type\": \"rg\", \"width\": %d, \"act\": \"silu\", \"layers\": %d, "
            "\"heads\": %d, \"d_model\": %d, \"tying\": \"untied\"",
            h->width, h->layers, h->heads, g->d_model);
    if (h->trained_budget > 0) buf_fmt(out, ", \"trained_budget\": %d", h->trained_budget);
    if (h->horizon > 0) {
        buf_str(out, ", \"horizon\": ");
        if (isfinite(h->horizon))
            json_write_num(out, (double)h->horizon);
        else
            buf_str(out, "\"inf\"");
    }
    if (h->sinks >= 0) buf_fmt(out, ", \"sinks\": %d", h->sinks);
    if (h->recent >= 0) buf_fmt(out, ", \"recent\": %d", h->recent);
    if (h->parity >= 0) buf_fmt(out, ", \"parity\": %s", h->parity ? "true" : "false");
    if (h->base.vectors[0])
        buf_fmt(out, ", \"base\": {\"vectors\": \"%s\", \"matrices\": \"%s\"}", h->base.vectors,
                h->base.matrices);
    buf_char(out, '}');
}

static void gates_add_tensor(struct buf *out, const char *name, const char *type, size_t element,
                             const int64_t shape[3], size_t *at) {
    size_t count = 1;
    buf_fmt(out, ", \"%s\": {\"dtype\": \"%s\", \"shape\": [", name, type);
    for (int i = 0; i < 3 && shape[i]; i++) {
        buf_fmt(out, "%s%lld", i ? ", " : "", (long long)shape[i]);
        count *= (size_t)shape[i];
    }
    buf_fmt(out, "], \"data_offsets\": [%zu, %zu]}", *at, *at + count * element);
    *at += count * element;
}

/* Writes the header. The tensors follow in this order. */
static void gates_write_header(const struct save_gates *g, struct buf *out) {
    const int64_t layers = g->header.layers, heads = g->header.heads, width = g->header.width;
    const int64_t rows = layers * heads;
    struct buf about;
    size_t at = 0;
    buf_open(&about, HEADER_BYTES_MAX);
    describe_gates(g, &about);
    buf_str(out, "{\"__metadata__\": {\"keepd\": ");
    json_write_str(out, about.data ? about.data : "", about.size);
    buf_str(out, "}");
    buf_inherit(out, &about);
    buf_close(&about);
    gates_add_tensor(out, "b1", "F32", 4, (const int64_t[3]){layers, width}, &at);
    gates_add_tensor(out, "c", "F32", 4, (const int64_t[3]){rows}, &at);
    gates_add_tensor(out, "w_last", "F32", 4, (const int64_t[3]){rows, width}, &at);
    gates_add_tensor(out, "row", "I32", 4, (const int64_t[3]){layers, heads}, &at);
    gates_add_tensor(out, "w1", "BF16", 2, (const int64_t[3]){layers, width, g->d_model}, &at);
    buf_char(out, '}');
    while (out->size % 8 && !out->failed) buf_char(out, ' ');
}

/* ---- The numbers ---- */

struct gates_arrays {
    float *b1, *bias, *last, *w1; /* b1, bias, last; w1 of one layer */
    uint16_t *narrow;             /* w1 of one layer in bf16 */
    int32_t *row;
};

static void gates_close_arrays(struct gates_arrays *a) {
    mem_free(a->b1);
    mem_free(a->bias);
    mem_free(a->last);
    mem_free(a->w1);
    mem_free(a->narrow);
    mem_free(a->row);
}

static bool gates_open_arrays(const struct save_gates *g, struct gates_arrays *a) {
    const size_t layers = (size_t)g->header.layers, width = (size_t)g->header.width;
    const size_t rows = layers * (size_t)g->header.heads, matrix = width * (size_t)g->d_model;
    *a = (struct gates_arrays){.b1 = mem_try_alloc(layers * width, sizeof *a->b1),
                               .bias = mem_try_alloc(rows, sizeof *a->bias),
                               .last = mem_try_alloc(rows * width, sizeof *a->last),
                               .w1 = mem_try_alloc(matrix, sizeof *a->w1),
                               .narrow = mem_try_alloc(matrix, sizeof *a->narrow),
                               .row = mem_try_alloc(rows, sizeof *a->row)};
    for (size_t i = 0; a->row && i < rows; i++) a->row[i] = (int32_t)i;
    return a->b1 && a->bias && a->last && a->w1 && a->narrow && a->row;
}

static void gates_read_layer(const struct save_gates *g, struct gates_arrays *a, int layer) {
    const size_t l = (size_t)layer, width = (size_t)g->header.width;
    const size_t heads = (size_t)g->header.heads;
    g->layer(g->arg, layer, a->w1, a->b1 + l * width, a->last + l * heads * width,
             a->bias + l * heads);
}

static int gates_put_numbers(const struct save_gates *g, struct gates_arrays *a,
                             const struct save_file *file, struct fault *fault) {
    const size_t layers = (size_t)g->header.layers, width = (size_t)g->header.width;
    const size_t rows = layers * (size_t)g->header.heads, matrix = width * (size_t)g->d_model;
    for (int l = 0; l < g->header.layers; l++) gates_read_layer(g, a, l);
    int rc = save_files_put(file, a->b1, layers * width * sizeof *a->b1, fault);
    if (!rc) rc = save_files_put(file, a->bias, rows * sizeof *a->bias, fault);
    if (!rc) rc = save_files_put(file, a->last, rows * width * sizeof *a->last, fault);
    if (!rc) rc = save_files_put(file, a->row, rows * sizeof *a->row, fault);
    for (int l = 0; l < g->header.layers && !rc; l++) {
        gates_read_layer(g, a, l);
        for (size_t i = 0; i < matrix; i++) a->narrow[i] = number_to_bf16(a->w1[i]);
        rc = save_files_put(file, a->narrow, matrix * sizeof *a->narrow, fault);
    }
    return rc;
}

int save_gates(const struct save_files *files, const struct save_gates *gates,
               struct fault *fault) {
    struct gates_arrays arrays;
    struct save_file file;
    struct buf header;
    buf_open(&header, HEADER_BYTES_MAX);
    gates_write_header(gates, &header);
    int rc = 0;
    if (!gates_open_arrays(gates, &arrays) || header.failed)
        rc = fault_set(fault, ERR_NOMEM, "", "no memory for a file of gates");
    if (!rc) rc = save_files_begin(files, NULL, &file, fault);
    if (!rc) {
        const uint64_t size = header.size;
        rc = save_files_put(&file, &size, sizeof size, fault);
        if (!rc) rc = save_files_put(&file, header.data, header.size, fault);
        if (!rc) rc = gates_put_numbers(gates, &arrays, &file, fault);
        rc = save_files_end(&file, rc, fault);
    }
    gates_close_arrays(&arrays);
    buf_close(&header);
    return rc;
}
