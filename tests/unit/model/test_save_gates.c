/* Files of gates that keepd writes: read back as they were given. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "kernels/number.h"
#include "model/save_gates.h"

enum { LAYERS = 3, HEADS = 2, WIDTH = 16, D_MODEL = 24 };

static float number_at(int kind, int layer, int i) {
    return sinf((float)(kind * 1000 + layer * 100 + i)) * 3;
}

static void give(void *arg, int layer, float *w1, float *b1, float *last, float *bias) {
    cr_assert_null(arg);
    for (int i = 0; i < WIDTH * D_MODEL; i++) w1[i] = number_at(0, layer, i);
    for (int i = 0; i < WIDTH; i++) b1[i] = number_at(1, layer, i);
    for (int i = 0; i < HEADS * WIDTH; i++) last[i] = number_at(2, layer, i);
    for (int i = 0; i < HEADS; i++) bias[i] = number_at(3, layer, i);
}

static struct save_gates sample(void) {
    struct save_gates gates = {.header = gates_header_unknown, .d_model = D_MODEL, .layer = give};
    gates.header.width = WIDTH;
    gates.header.layers = LAYERS;
    gates.header.heads = HEADS;
    gates.header.trained_budget = 128;
    gates.header.horizon = 1;
    gates.header.sinks = 4;
    gates.header.recent = 16;
    memset(gates.header.base.vectors, 'a', SHA256_HEX - 1);
    memset(gates.header.base.matrices, 'b', SHA256_HEX - 1);
    return gates;
}

static int save(const char *to, const struct save_gates *gates, struct fault *fault) {
    struct save_files files;
    int rc = save_files_open(&files, "out", to, false, fault);
    return rc ? rc : save_files_close(&files, save_gates(&files, gates, fault), fault);
}

Test(save_gates, are_read_back) {
    char dir[] = "/tmp/keepd-test-XXXXXX", path[64], *data;
    const struct gates_shape shape = {LAYERS, HEADS, D_MODEL, NULL};
    const struct save_gates given = sample();
    struct fault fault = {0};
    struct gates gates;
    size_t size;
    cr_assert_not_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/gates", dir);
    cr_assert_eq(save(path, &given, &fault), 0, "%s", fault.text);
    cr_assert_eq(save(path, &given, &fault), ERR_INVALID);
    cr_assert_str_eq(fault.field, "out");
    cr_assert_eq(file_read(path, 1 << 20, &data, &size, &fault), 0);
    cr_assert_eq(gates_parse(data, size, &shape, &gates, &fault), 0, "%s: %s", fault.field,
                 fault.text);
    cr_assert(gates.header.trained_budget == 128 && gates.header.horizon == 1);
    cr_assert(gates.header.sinks == 4 && gates.header.recent == 16 && gates.header.parity == -1);
    cr_assert_str_eq(gates.header.base.vectors, given.header.base.vectors);
    cr_assert_str_eq(gates.header.base.matrices, given.header.base.matrices);
    for (int l = 0; l < LAYERS; l++) {
        struct kern_gate_spec spec;
        cr_assert_eq(gates_layer(&gates, l, &spec, &fault), 0);
        cr_assert(spec.width == WIDTH && spec.embeddings == 1);
        for (int i = 0; i < WIDTH * D_MODEL; i++)
            cr_assert_eq(spec.w1[i], number_from_bf16(number_to_bf16(number_at(0, l, i))));
        for (int i = 0; i < WIDTH; i++) cr_assert_eq(spec.b1[i], number_at(1, l, i));
        for (int i = 0; i < HEADS * WIDTH; i++)
            cr_assert_eq(spec.last[spec.row[i / WIDTH] * WIDTH + i % WIDTH], number_at(2, l, i));
        for (int i = 0; i < HEADS; i++) cr_assert_eq(spec.bias[spec.row[i]], number_at(3, l, i));
    }
    gates_close(&gates);
    mem_free(data);
    unlink(path);
    rmdir(dir);
}

/* A file appears whole or not at all. */
Test(save_gates, lack_of_memory_leaves_nothing) {
    char dir[] = "/tmp/keepd-test-XXXXXX", path[64];
    const struct save_gates given = sample();
    struct fault fault = {0};
    cr_assert_not_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/gates", dir);
    for (int n = 0; n < 6; n++) {
        mem_fail_after(n);
        const int rc = save(path, &given, &fault);
        cr_assert(mem_fail_pending() || rc == ERR_NOMEM, "%d: %d", n, rc);
        mem_fail_after(-1);
        if (rc == 0) unlink(path);
        cr_assert_neq(access(path, F_OK), 0);
    }
    cr_assert_eq(rmdir(dir), 0);
}
