/* A gates file for a model whose shape the first byte picks; every accepted layer is converted. */
#include <math.h>
#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "model/gates.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_layers(struct gates *gates) {
    for (int i = 0; i < gates->shape.layers; i++) {
        struct kern_gate_spec spec;
        struct fault fault = {0};
        int rc = gates_layer(gates, i, &spec, &fault);
        CHECK(rc == fault.code);
        if (rc) continue;
        CHECK(spec.row_count >= 1 && spec.row_count <= spec.heads_kv);
        for (int h = 0; h < spec.heads_kv; h++) CHECK(spec.row[h] < spec.row_count);
        size_t w1 = (size_t)spec.embeddings * (size_t)spec.width * (size_t)spec.d_model;
        for (size_t j = 0; j < w1; j++) CHECK(isfinite(spec.w1[j]));
        size_t last = (size_t)spec.row_count * (size_t)spec.width;
        for (size_t j = 0; j < last; j++) CHECK(isfinite(spec.last[j]));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const struct gates_shape shapes[] = {
        {2, 2, 4, NULL}, {1, 1, 1, NULL}, {6, 4, 256, NULL}, {3, 2, 64, NULL}};
    if (!size) return 0;
    struct gates gates;
    struct fault fault = {0};
    char *copy = mem_must_alloc(size, 1); /* a separate block, so that overruns are detected */
    memcpy(copy, data + 1, size - 1);
    int rc = gates_parse(copy, size - 1, &shapes[data[0] & 3], &gates, &fault);
    CHECK(rc == fault.code);
    if (!rc) {
        check_layers(&gates);
        gates_close(&gates);
    }
    mem_free(copy);
    return 0;
}
