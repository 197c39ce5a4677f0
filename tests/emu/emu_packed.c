/* Weights in blocks on the emulated device: products, embeddings and joined parts beside the CPU's
 * reference path, and a row's bits in any company. */
#include <criterion/criterion.h>

#include "both.h"
#include "kernels/number.h"
#include "tests/unit/kernels/paths.h"

enum { ROWS_MAX = 75 };

static const enum kern_dtype formats[] = {KERN_Q8,  KERN_Q8M, KERN_Q4,
                                          KERN_Q4M, KERN_Q8S, KERN_Q8SM};

/* Activations that float16 represents, so that the device rounds none. */
static float *make_rows(size_t count, uint64_t seed) {
    float *x = fresh(count, seed);
    for (size_t i = 0; i < count; i++) x[i] = number_from_f16(to_f16(x[i]));
    return x;
}

/* y (+)= x w^T (+ bias) for rows [first, first + rows); the caller frees it. */
static float *multiply(struct kern *kern, const struct kern_weight *w, const float *x,
                       const float *bias, int first, int rows, int64_t cols, int64_t outputs,
                       enum kern_matmul_mode mode) {
    size_t count = (size_t)(rows * outputs);
    float *in = put(kern, x + first * cols, (size_t)(rows * cols));
    float *to = put(kern, x + first, count),
          *added = bias ? put(kern, bias, (size_t)outputs) : NULL;
    kern->ops->matmul(kern, to, in, w, added, rows, mode);
    float *found = take(kern, to, count);
    kern->ops->mem_free(kern, in);
    if (added) kern->ops->mem_free(kern, added);
    return found;
}

static struct kern_weight *load(struct kern *kern, const struct kern_matrix *parts, int count) {
    struct kern_weight *weight;
    struct fault fault = {0};
    MUST(kern->ops->weight_load(kern, parts, count, KERN_SHARD_NONE, &weight, &fault));
    return weight;
}

/* Products of all row counts equal the reference, which has the same numbers in float32, and every
 * row has the bits that it has alone. */
static void check_products(struct kern *kern[BACKENDS], const struct test_matrix *m, int count) {
    struct kern_matrix parts[3], wide[3];
    static const int row_counts[] = {8, 9, 32, 33, 64, ROWS_MAX};
    int64_t cols = m->file.cols, outputs = 0;
    struct kern_weight *w[BACKENDS];
    float *one[ROWS_MAX];
    for (int i = 0; i < count; i++) {
        parts[i] = m[i].file;
        wide[i] = matrix_wide(&m[i]);
        wide[i].factor = parts[i].factor;
        outputs += parts[i].rows;
    }
    float *x = make_rows((size_t)(ROWS_MAX * (cols + outputs)), 5),
          *bias = fresh((size_t)outputs, 6);
    for (int b = 0; b < BACKENDS; b++) w[b] = load(kern[b], b == ORACLE ? wide : parts, count);
    for (int r = 0; r < ROWS_MAX; r++)
        one[r] = multiply(kern[EMULATED], w[EMULATED], x, bias, r, 1, cols, outputs, KERN_SET);
    for (size_t i = 0; i < sizeof row_counts / sizeof *row_counts; i++) {
        float *all = multiply(kern[EMULATED], w[EMULATED], x, bias, 0, row_counts[i], cols, outputs,
                              KERN_SET);
        for (int r = 0; r < row_counts[i]; r++)
            cr_assert_eq(memcmp(all + r * outputs, one[r], (size_t)outputs * sizeof *all), 0,
                         "row %d of %d", r, row_counts[i]);
        free(all);
    }
    for (int add = 0; add < 2; add++) {
        float *found[BACKENDS];
        for (int b = 0; b < BACKENDS; b++)
            found[b] = multiply(kern[b], w[b], x, add ? NULL : bias, 0, 5, cols, outputs,
                                add ? KERN_ADD : KERN_SET);
        expect_near(found[ORACLE], found[EMULATED], (size_t)(5 * outputs), 2e-5, 2e-5, "product");
        for (int b = 0; b < BACKENDS; b++) free(found[b]);
    }
    for (int r = 0; r < ROWS_MAX; r++) free(one[r]);
    for (int b = 0; b < BACKENDS; b++) kern[b]->ops->weight_free(kern[b], w[b]);
    free(x), free(bias);
}

/* Outputs that fill no tile, more blocks than warps, a single block. */
Test(emu_packed, products_of_every_format) {
    static const struct { int64_t outputs, cols; } shapes[] = {{40, 288}, {7, 32}, {64, 512}};
    struct kern *kern[BACKENDS];
    both_open(kern);
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++)
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
            struct test_matrix m =
                matrix_make(shapes[s].outputs, shapes[s].cols, formats[f], 10 * f + s);
            check_products(kern, &m, 1);
            matrix_close(&m);
        }
    both_close(kern);
}

/* Query, key and value projections of a file may have different formats: joined, without loss. */
Test(emu_packed, parts_of_different_formats) {
    static const enum kern_dtype joins[][3] = {
        {KERN_Q4M, KERN_Q4M, KERN_Q8S}, {KERN_Q4, KERN_Q4M, KERN_Q4}, {KERN_Q4, KERN_Q8, KERN_Q8}};
    struct kern *kern[BACKENDS];
    both_open(kern);
    for (size_t j = 0; j < sizeof joins / sizeof *joins; j++) {
        struct test_matrix m[3];
        for (int i = 0; i < 3; i++)
            m[i] = matrix_make(i ? 9 : 22, 96, joins[j][i], 30 + (uint64_t)i);
        m[1].file.factor = 0.3f; /* concerns this part's products alone */
        check_products(kern, m, 3);
        for (int i = 0; i < 3; i++) matrix_close(&m[i]);
    }
    both_close(kern);
}

/* Looked-up rows are the numbers themselves. */
Test(emu_packed, embeddings_are_exact) {
    enum { VOCAB = 50, COLS = 64, LOOKED_UP = 6 };
    static const int32_t tokens[LOOKED_UP] = {0, 49, 17, 16, 15, 17};
    struct kern *kern[BACKENDS];
    both_open(kern);
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++) {
        struct test_matrix m = matrix_make(VOCAB, COLS, formats[f], 50 + f);
        float *found[BACKENDS];
        for (int b = 0; b < BACKENDS; b++) {
            struct kern_weight *table;
            MUST(kern[b]->ops->weight_load(kern[b], &m.file, 1, KERN_SHARD_VOCAB, &table, NULL));
            float *to = put(kern[b], NULL, LOOKED_UP * COLS);
            kern[b]->ops->embed(kern[b], to, table, 1.5f, tokens, LOOKED_UP);
            found[b] = take(kern[b], to, LOOKED_UP * COLS);
            kern[b]->ops->weight_free(kern[b], table);
        }
        cr_assert_eq(memcmp(found[ORACLE], found[EMULATED], LOOKED_UP * COLS * sizeof(float)), 0,
                     "format %zu", f);
        for (int b = 0; b < BACKENDS; b++) free(found[b]);
        matrix_close(&m);
    }
    both_close(kern);
}

/* Inputs that fill no block are refused when they are loaded. */
Test(emu_packed, rows_of_half_a_block_are_refused) {
    struct kern *kern[BACKENDS];
    struct kern_weight *weight;
    struct fault fault = {0};
    struct test_matrix m = matrix_make(4, 48, KERN_Q8, 1);
    both_open(kern);
    cr_assert_eq(kern[EMULATED]->ops->weight_load(kern[EMULATED], &m.file, 1, KERN_SHARD_NONE,
                                                  &weight, &fault),
                 ERR_UNSUPPORTED);
    cr_assert_str_eq(fault.text,
                     "weights in blocks need multiples of 32 inputs on every rank, not 48");
    matrix_close(&m);
    both_close(kern);
}
