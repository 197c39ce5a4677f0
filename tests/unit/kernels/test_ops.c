/* Every operation on rows, on every path, against double arithmetic; and the promise that a row's
 * result does not depend on the rows beside it, bit by bit. */
#include <criterion/criterion.h>

#include "paths.h"
#include "tests/sample.h"

#define MUST(rc) cr_assert_eq((rc), 0)

static struct kern_weight *load_as(struct kern *kern, const struct kern_matrix *m,
                                   enum kern_shard shard) {
    struct kern_weight *w = NULL;
    struct fault fault = {0};
    MUST(kern->ops->weight_load(kern, m, 1, shard, &w, &fault));
    return w;
}

static struct kern_weight *load(struct kern *kern, const struct test_matrix *m) {
    return load_as(kern, &m->file, KERN_SHARD_NONE);
}

/* ---- Products ---- */

struct product {
    int rows, outputs, cols;
    enum kern_dtype dtype;
    bool bias, add;
};

/* Odd sizes on purpose: outputs around panels of 16, inputs around tiles of 32, rows around tiles
 * of 16 and passes of 256. */
static const struct product products[] = {
    {1, 16, 32, KERN_BF16, false, false},    {1, 1, 1, KERN_BF16, true, true},
    {3, 17, 33, KERN_BF16, true, false},     {16, 48, 64, KERN_BF16, false, true},
    {17, 31, 96, KERN_BF16, true, true},     {33, 130, 100, KERN_BF16, false, false},
    {32, 64, 512, KERN_BF16, false, false},  {70, 40, 1024, KERN_BF16, true, false},
    {300, 50, 70, KERN_BF16, false, true},   {257, 33, 31, KERN_BF16, true, false},
    {1, 300, 3072, KERN_BF16, false, false}, {5, 96, 2048, KERN_BF16, true, true},
    {1, 16, 32, KERN_F32, false, false},     {2, 1, 1, KERN_F32, true, true},
    {9, 19, 77, KERN_F32, true, false},      {40, 64, 256, KERN_F32, false, true},
    {261, 35, 45, KERN_F32, true, true},     {1, 130, 1000, KERN_F32, false, false},
    {1, 33, 65, KERN_F16, true, false},      {18, 48, 128, KERN_F16, false, true},
    {1, 16, 32, KERN_E4M3, false, false},    {1, 1, 1, KERN_E4M3, true, true},
    {1, 300, 3072, KERN_E4M3, true, false},  {3, 17, 33, KERN_E4M3, true, false},
    {40, 130, 1000, KERN_E4M3, false, true}, {261, 35, 45, KERN_E4M3, true, true},
};

/* E4M3 with factors of `group` inputs. */
static const struct {
    struct product product;
    int group, skipped;
} grouped[] = {
    {{1, 16, 32, KERN_E4M3, false, false}, 128, 0},
    {{1, 300, 3072, KERN_E4M3, true, false}, 128, 0},
    {{3, 17, 97, KERN_E4M3, false, false}, 32, 0},
    {{40, 130, 1000, KERN_E4M3, false, true}, 64, 0},
    {{261, 35, 450, KERN_E4M3, true, true}, 128, 96},
};

/* Rounding error of a float32 sum of n products is at most n * 2^-24 times the sum of their
 * magnitudes whatever the order. Rounded activations add to that: tiles take them as two bf16, of
 * 16 bits together, 2^-17 of each product; one bf16 has 8 bits. */
static double rounded_x(const struct kern *kern, enum kern_dtype weights) {
    const bool wide = weights == KERN_BF16 || weights == KERN_E4M3;
    if (!strcmp(kern->ops->name, "cpu-amx") && wide) return 0x1.02p-17;
    if (!strcmp(kern->ops->name, "cpu-amx-bf16") && wide) return 0x1.02p-9;
    return !strcmp(kern->ops->name, "cpu-avx512-bf16") && wide ? 0x1.02p-9 : 0;
}

static void check_product(const struct product *c, const struct kern *kern, const float *x,
                          const struct test_matrix *m, const float *bias, const float *was,
                          const float *y) {
    const double unit = (c->cols + 4) * 0x1p-24 + rounded_x(kern, c->dtype);
    for (int r = 0; r < c->rows; r++) {
        for (int o = 0; o < c->outputs; o++) {
            size_t at = (size_t)r * (size_t)c->outputs + (size_t)o;
            double sum = 0, magnitude = 0;
            for (int k = 0; k < c->cols; k++) {
                double p = (double)x[r * c->cols + k] * m->value[o * c->cols + k];
                sum += p;
                magnitude += fabs(p);
            }
            if (c->bias) sum += bias[o], magnitude += fabs(bias[o]);
            if (c->add) sum += was[at], magnitude += fabs(was[at]);
            cr_assert(fabs(y[at] - sum) <= magnitude * unit,
                      "%s: %d x %d x %d dtype %d: row %d output %d: %.9g, exact %.9g",
                      kern->ops->name, c->rows, c->outputs, c->cols, (int)c->dtype, r, o, y[at],
                      sum);
        }
    }
}

static void run_product_of(struct kern *kern, const struct product *c, struct test_matrix m,
                           enum kern_shard shard) {
    size_t outs = (size_t)c->rows * (size_t)c->outputs;
    float *x = fresh((size_t)c->rows * (size_t)c->cols, 12);
    float *bias = fresh((size_t)c->outputs, 13), *was = fresh(outs, 14), *y = fresh(outs, 14);
    struct kern_weight *w = load_as(kern, &m.file, shard);
    kern->ops->matmul(kern, y, x, w, c->bias ? bias : NULL, c->rows, c->add ? KERN_ADD : KERN_SET);
    check_product(c, kern, x, &m, bias, was, y);
    kern->ops->weight_free(kern, w);
    matrix_close(&m);
    free(x), free(bias), free(was), free(y);
}

static void run_product(struct kern *kern, const struct product *c, enum kern_shard shard) {
    run_product_of(kern, c, matrix_make(c->outputs, c->cols, c->dtype, 11), shard);
}

static void run_grouped(struct kern *kern) {
    for (size_t i = 0; i < sizeof grouped / sizeof *grouped; i++)
        for (int cols = 0; cols < 2; cols++) {
            const struct product *c = &grouped[i].product;
            run_product_of(
                kern, c,
                matrix_of_groups(c->outputs, c->cols, grouped[i].group, grouped[i].skipped, 11),
                cols ? KERN_SHARD_COLS : KERN_SHARD_NONE);
        }
}

static void run_products(struct kern *kern) {
    run_grouped(kern);
    for (size_t i = 0; i < sizeof products / sizeof *products; i++) {
        run_product(kern, &products[i], KERN_SHARD_NONE);
        run_product(kern, &products[i], KERN_SHARD_COLS);
    }
}

Test(ops, matmul) {
    for (int way = 0; way < WAYS; way++) {
        struct kern *kern = way_open(way, 2);
        if (!kern) continue;
        run_products(kern);
        kern->ops->close(kern);
    }
}

/* A part's factor multiplies whole sums, and looked-up rows. */
static void check_factors(struct kern *kern, enum kern_dtype dtype, enum kern_shard shard) {
    enum { FIRST = 19, ALL = 33, COLS = 70, ROWS = 21 };
    const float factor = 0.3f;
    float *x = fresh((size_t)ROWS * COLS, 12), row[2][COLS];
    float *plain = fresh((size_t)ROWS * ALL, 0), *scaled = fresh((size_t)ROWS * ALL, 0);
    struct test_matrix m[] = {matrix_make(FIRST, COLS, dtype, 11),
                              matrix_make(ALL - FIRST, COLS, dtype, 15)};
    struct kern_matrix parts[] = {m[0].file, m[1].file};
    struct kern_weight *w[2] = {NULL, NULL};
    for (int i = 0; i < 2; i++) {
        parts[1].factor = i ? factor : 0;
        MUST(kern->ops->weight_load(kern, parts, 2, shard, &w[i], NULL));
        kern->ops->matmul(kern, i ? scaled : plain, x, w[i], NULL, ROWS, KERN_SET);
    }
    for (int i = 0; i < ROWS * ALL; i++) {
        const float expected = i % ALL < FIRST ? plain[i] : plain[i] * factor;
        cr_assert_eq(scaled[i], expected, "%s, dtype %d: %g, not %g", kern->ops->name, (int)dtype,
                     (double)scaled[i], (double)expected);
    }
    for (int32_t r = 0; r < ALL; r++) {
        for (int i = 0; i < 2; i++) kern->ops->embed(kern, row[i], w[i], 1, &r, 1);
        for (int k = 0; k < COLS; k++)
            cr_assert_eq(row[1][k], row[0][k] * (r < FIRST ? 1 : factor));
    }
    for (int i = 0; i < 2; i++) kern->ops->weight_free(kern, w[i]), matrix_close(&m[i]);
    free(x), free(plain), free(scaled);
}

Test(ops, factors_of_parts) {
    static const enum kern_dtype dtypes[] = {KERN_F32, KERN_BF16, KERN_F16, KERN_E4M3};
    for (int path = 0; path < PATH_COUNT; path++) {
        struct kern *kern = path_open(path, 2);
        if (!kern) continue;
        for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++) {
            check_factors(kern, dtypes[d], KERN_SHARD_ROWS);
            check_factors(kern, dtypes[d], KERN_SHARD_COLS);
        }
        kern->ops->close(kern);
    }
}

/* Each number by itself, so that the smallest count as much as the largest: rows of the identity
 * give the columns of the matrix back. */
static void every_e4m3_number(struct kern *kern, int rows_each) {
    enum { CODES = 256, OUT = 18 };
    uint8_t codes[OUT][CODES];
    float scale[OUT], *x = calloc(CODES * CODES, sizeof *x), *y = calloc(CODES * OUT, sizeof *y);
    for (int o = 0; o < OUT; o++) {
        scale[o] = 1;
        for (int i = 0; i < CODES; i++) {
            int code = (i + 15 * o) & 255;
            codes[o][i] = (code & 0x7f) == 0x7f ? 0 : (uint8_t)code;
        }
    }
    for (int i = 0; i < CODES; i++) x[i * CODES + i] = 1;
    const struct kern_matrix file = {
        .data = codes, .dtype = KERN_E4M3, .rows = OUT, .cols = CODES, .scale = scale};
    struct kern_weight *w = load_as(kern, &file, KERN_SHARD_NONE);
    for (int r = 0; r < CODES; r += rows_each)
        kern->ops->matmul(kern, y + r * OUT, x + r * CODES, w, NULL, rows_each, KERN_SET);
    for (int i = 0; i < CODES * OUT; i++) {
        float want = number_from_e4m3(codes[i % OUT][i / OUT]);
        cr_assert_eq(y[i], want, "%s: %d rows, code %d: %g, not %g", kern->ops->name, rows_each,
                     codes[i % OUT][i / OUT], (double)y[i], (double)want);
    }
    kern->ops->weight_free(kern, w);
    free(x), free(y);
}

Test(ops, every_e4m3_number_is_multiplied_exactly) {
    for (int way = 0; way < WAYS; way++) {
        struct kern *kern = way_open(way, 1);
        if (!kern) continue;
        every_e4m3_number(kern, 1);
        every_e4m3_number(kern, 64);
        every_e4m3_number(kern, 256);
        kern->ops->close(kern);
    }
}

/* ---- The order of sums that ranks share ---- */

/* One leaf by itself: a matrix of its columns, read from the whole one. */
static void leaf_product(struct kern *kern, const struct kern_matrix *whole, int leaf, int rows,
                         const float *x, float *y) {
    struct kern_matrix part = *whole;
    part.cols /= CPU_LEAVES;
    part.stride = whole->cols;
    const size_t first = (size_t)(leaf * part.cols);
    part.scale += whole->group ? (int64_t)first / whole->group : 0;
    part.skipped = whole->group ? (int64_t)first % whole->group : 0;
    part.data = (const char *)whole->data + (kern_dtype_blocks(whole->dtype)
                                                 ? first / KERN_BLOCK * sizeof(struct block)
                                                 : first * kern_dtype_bytes(whole->dtype));
    float *own = fresh((size_t)rows * (size_t)part.cols, 1);
    for (int r = 0; r < rows; r++)
        memcpy(own + r * part.cols, x + r * whole->cols + leaf * part.cols,
               (size_t)part.cols * sizeof *own);
    struct kern_weight *w = load_as(kern, &part, KERN_SHARD_NONE);
    kern->ops->matmul(kern, y, own, w, NULL, rows, KERN_SET);
    kern->ops->weight_free(kern, w);
    free(own);
}

/* seven panels and a bit: every shape of block */
#define LEAF_OUTPUTS 118

static void leaves_are_a_tree(struct kern *kern, struct test_matrix m, int rows) {
    const int cols = (int)m.file.cols;
    size_t count = (size_t)rows * LEAF_OUTPUTS;
    float *x = fresh((size_t)rows * (size_t)cols, 52), *bias = fresh(LEAF_OUTPUTS, 53);
    float *y = fresh(count, 54), *was = fresh(count, 54), *level[CPU_LEAVES];
    for (int l = 0; l < CPU_LEAVES; l++)
        leaf_product(kern, &m.file, l, rows, x, level[l] = fresh(count, 1));
    for (int left = CPU_LEAVES / 2; left > 0; left /= 2)
        for (int l = 0; l < left; l++)
            for (size_t i = 0; i < count; i++) {
                float sum = level[2 * l][i] + level[2 * l + 1][i];
                level[l][i] = sum;
            }
    struct kern_weight *w = load_as(kern, &m.file, KERN_SHARD_COLS);
    kern->ops->matmul(kern, y, x, w, bias, rows, KERN_ADD);
    for (size_t i = 0; i < count; i++) {
        float want = level[0][i] + bias[i % LEAF_OUTPUTS];
        want = was[i] + want;
        cr_assert(!memcmp(&y[i], &want, sizeof want), "%s: %d rows, %d inputs: %zu: %.9g, %.9g",
                  kern->ops->name, rows, cols, i, y[i], want);
    }
    for (int l = 0; l < CPU_LEAVES; l++) free(level[l]);
    kern->ops->weight_free(kern, w);
    matrix_close(&m);
    free(x), free(bias), free(y), free(was);
}

Test(ops, sums_that_ranks_share_are_a_tree_of_leaves) {
    static const int rows[] = {1, 2, 5, 16, 17, 40, 70};
    for (int way = 0; way < WAYS; way++) {
        struct kern *kern = way_open(way, 2);
        if (!kern) continue;
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
            if (test_leaves_out(i, 2)) continue;
            leaves_are_a_tree(kern, matrix_make(LEAF_OUTPUTS, CPU_LEAVES * 64, KERN_BF16, 51),
                              rows[i]);
            leaves_are_a_tree(kern, matrix_make(LEAF_OUTPUTS, CPU_LEAVES * 21, KERN_BF16, 51),
                              rows[i]); /* padded, and odd */
            leaves_are_a_tree(kern, matrix_make(LEAF_OUTPUTS, CPU_LEAVES * 21, KERN_F32, 51),
                              rows[i]);
            leaves_are_a_tree(kern, matrix_make(LEAF_OUTPUTS, CPU_LEAVES * 21, KERN_E4M3, 51),
                              rows[i]);
            leaves_are_a_tree(kern, matrix_of_groups(LEAF_OUTPUTS, CPU_LEAVES * 96, 128, 0, 51),
                              rows[i]);
        }
        kern->ops->close(kern);
    }
}

/* Parts joined by rows behave as the matrix they make; of unlike types too. Those become float32,
 * and its activations are not rounded as those of a part in bf16 alone may be. */
static void joined_matrices(struct kern *kern, struct test_matrix a, struct test_matrix b) {
    struct kern_matrix parts[] = {a.file, b.file};
    struct kern_weight *w, *wa = load(kern, &a), *wb = load(kern, &b);
    MUST(kern->ops->weight_load(kern, parts, 2, KERN_SHARD_ROWS, &w, NULL));
    float *row = fresh(40, 1);
    for (int r = 0; r < 33; r++) {
        int32_t token = r;
        kern->ops->embed(kern, row, w, 1, &token, 1);
        const float *want = r < 20 ? a.value + r * 40 : b.value + (r - 20) * 40;
        cr_assert(!memcmp(row, want, 40 * sizeof *row), "part row %d", r);
    }
    float *x = fresh((size_t)3 * 40, 23), *y = fresh((size_t)3 * 33, 1),
          *ya = fresh((size_t)3 * 20, 1);
    float *yb = fresh(3 * 13, 1);
    kern->ops->matmul(kern, y, x, w, NULL, 3, KERN_SET);
    kern->ops->matmul(kern, ya, x, wa, NULL, 3, KERN_SET);
    kern->ops->matmul(kern, yb, x, wb, NULL, 3, KERN_SET);
    for (int r = 0; r < 3; r++)
        for (int o = 0; o < 33; o++) {
            const float want = o < 20 ? ya[r * 20 + o] : yb[r * 13 + o - 20];
            const struct test_matrix *part = o < 20 ? &a : &b;
            const float *value = part->value + (ptrdiff_t)(o < 20 ? o : o - 20) * 40;
            double magnitude = 0;
            for (int k = 0; k < 40; k++) magnitude += fabs((double)x[r * 40 + k] * value[k]);
            cr_assert(fabsf(y[r * 33 + o] - want) <
                          1e-3 * (1 + fabs((double)want)) +
                              magnitude * rounded_x(kern, part->file.dtype),
                      "%s: part product %d", kern->ops->name, o);
        }
    free(x), free(y), free(ya), free(yb);
    kern->ops->weight_free(kern, w);
    kern->ops->weight_free(kern, wa);
    kern->ops->weight_free(kern, wb);
    matrix_close(&a);
    matrix_close(&b);
    free(row);
}

static void joined_parts(struct kern *kern, enum kern_dtype first, enum kern_dtype second) {
    joined_matrices(kern, matrix_make(20, 40, first, 21), matrix_make(13, 40, second, 22));
}

Test(ops, weight_parts) {
    for (int path = 0; path < PATH_COUNT; path++) {
        struct kern *kern = path_open(path, 2);
        if (!kern) continue;
        joined_parts(kern, KERN_BF16, KERN_BF16);
        joined_parts(kern, KERN_BF16, KERN_F32);
        joined_parts(kern, KERN_BF16, KERN_F16);
        joined_parts(kern, KERN_BF16, KERN_E4M3);
        joined_parts(kern, KERN_E4M3, KERN_E4M3);
        joined_matrices(kern, matrix_of_groups(20, 40, 32, 0, 21),
                        matrix_of_groups(13, 40, 32, 0, 22));
        joined_matrices(kern, matrix_of_groups(20, 40, 32, 0, 21),
                        matrix_make(13, 40, KERN_E4M3, 22));
        joined_matrices(kern, matrix_make(20, 40, KERN_BF16, 21),
                        matrix_of_groups(13, 40, 32, 0, 22));
        kern->ops->close(kern);
    }
}

Test(ops, weight_shapes_refused) {
    struct kern *kern = path_open(1, 1);
    struct kern_weight *w = NULL;
    float data[8] = {0};
    struct kern_matrix bad[][2] = {
        {{.data = data, .rows = 0, .cols = 4}, {.data = data, .rows = 1, .cols = 4}},
        {{.data = data, .rows = 1, .cols = 0}, {.data = data, .rows = 1, .cols = 0}},
        {{.data = data, .rows = 1, .cols = 4}, {.data = data, .rows = 1, .cols = 5}},
        {{.data = data, .rows = INT64_MAX / 2, .cols = 4}, {.data = data, .rows = 1, .cols = 4}},
        {{.data = data, .rows = 1, .cols = INT64_MAX / 2},
         {.data = data, .rows = 1, .cols = INT64_MAX / 2}},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct fault fault = {0};
        int rc = kern->ops->weight_load(kern, bad[i], 2, KERN_SHARD_NONE, &w, &fault);
        cr_assert_eq(rc, ERR_UNSUPPORTED, "case %zu: %d", i, rc);
        cr_assert_eq(fault.code, ERR_UNSUPPORTED);
    }
    kern->ops->close(kern);
}

/* ---- Rows do not see each other ---- */

static const int row_counts[] = {1, 2, 7, 16, 128, 512};

static void same_rows_of(struct kern *kern, struct test_matrix m, enum kern_shard shard) {
    enum { ALL = 530 };
    const int outputs = (int)m.file.rows, cols = (int)m.file.cols;
    struct kern_weight *w = load_as(kern, &m.file, shard);
    float *x = fresh((size_t)ALL * (size_t)cols, 32);
    float *all = fresh((size_t)ALL * (size_t)outputs, 0);
    float *some = fresh((size_t)ALL * (size_t)outputs, 0);
    kern->ops->matmul(kern, all, x, w, NULL, ALL, KERN_SET);
    for (size_t i = 0; i < sizeof row_counts / sizeof *row_counts; i++) {
        if (test_leaves_out(i, 2)) continue;
        int count = row_counts[i], first = (ALL - count) / 2 | 1;
        if (first + count > ALL) first = ALL - count;
        kern->ops->matmul(kern, some, x + first * cols, w, NULL, count, KERN_SET);
        size_t bytes = (size_t)count * (size_t)outputs * sizeof *some;
        cr_assert(!memcmp(some, all + first * outputs, bytes),
                  "%s, dtype %d, %d outputs, %d inputs: %d rows differ from the same among %d",
                  kern->ops->name, (int)m.file.dtype, outputs, cols, count, ALL);
    }
    kern->ops->weight_free(kern, w);
    matrix_close(&m);
    free(x), free(all), free(some);
}

static void same_rows(struct kern *kern, enum kern_dtype dtype, int outputs, int cols,
                      enum kern_shard shard) {
    same_rows_of(kern, matrix_make(outputs, cols, dtype, 31), shard);
}

static void same_rows_in_bf16(struct kern *kern) {
    same_rows(kern, KERN_BF16, 72, 1000, KERN_SHARD_NONE);
    same_rows(kern, KERN_BF16, 64, 3072, KERN_SHARD_NONE);
    same_rows(kern, KERN_BF16, 64, 3072, KERN_SHARD_COLS);
    same_rows(kern, KERN_BF16, 21, 33, KERN_SHARD_COLS);
}

Test(ops, rows_are_independent) {
    for (int way = 0; way < WAYS; way++) {
        struct kern *kern = way_open(way, 2);
        if (!kern) continue;
        same_rows_in_bf16(kern);
        same_rows(kern, KERN_F32, 72, 300, KERN_SHARD_NONE);
        same_rows(kern, KERN_F32, 72, 300, KERN_SHARD_COLS);
        same_rows_of(kern, matrix_of_groups(72, 1000, 128, 32, 31), KERN_SHARD_COLS);
        same_rows(kern, KERN_E4M3, 72, 1000, KERN_SHARD_NONE);
        same_rows(kern, KERN_E4M3, 21, 33, KERN_SHARD_COLS);
        kern->ops->close(kern);
    }
}

/* Products of activations are those of the same activations rounded to bf16. */
static void rounds_activations(struct kern *kern, enum kern_dtype dtype) {
    enum { ROWS = 37, OUTPUTS = 72, COLS = 333 };
    struct test_matrix m = matrix_make(OUTPUTS, COLS, dtype, 33);
    struct kern_weight *w = load_as(kern, &m.file, KERN_SHARD_NONE);
    float *x = fresh(ROWS * COLS, 34);
    float *was = fresh(ROWS * OUTPUTS, 0), *is = fresh(ROWS * OUTPUTS, 0);
    kern->ops->matmul(kern, was, x, w, NULL, ROWS, KERN_SET);
    for (int i = 0; i < ROWS * COLS; i++) x[i] = number_from_bf16(number_to_bf16(x[i]));
    kern->ops->matmul(kern, is, x, w, NULL, ROWS, KERN_SET);
    cr_assert(!memcmp(was, is, ROWS * OUTPUTS * sizeof *was), "%s, dtype %d", kern->ops->name,
              (int)dtype);
    kern->ops->weight_free(kern, w);
    matrix_close(&m);
    free(x), free(was), free(is);
}

Test(ops, the_backend_says_how_it_rounds) {
    static const struct {
        const char *path;
        enum cpu_activations activations;
        const char *said;
    } cases[] = {
        {"portable", CPU_INT8,
         "int8 with 4-bit blocks, int8 with 8-bit blocks, f32 with bf16 and fp8, f32 with others"},
        {"portable", CPU_BY_WEIGHT,
         "int8 with 4-bit blocks, int16 with 8-bit blocks, f32 with bf16 and fp8, f32 with others"},
        {"reference", CPU_F32,
         "f32 with 4-bit blocks, f32 with 8-bit blocks, f32 with bf16 and fp8, f32 with others"},
        {"avx512", CPU_INT16,
         "int16 with 4-bit blocks, int16 with 8-bit blocks, f32 with bf16 and fp8, f32 with "
         "others"},
        {"avx512", CPU_BF16,
         "int16 with 4-bit blocks, int16 with 8-bit blocks, bf16 with bf16 and fp8, f32 with "
         "others, bf16 in attention with bf16 caches"},
        {"amx", CPU_INT16,
         "int16 with 4-bit blocks, int16 with 8-bit blocks, two bf16 with bf16 and fp8, f32 with "
         "others, bf16 in attention with narrow caches"},
        {"amx", CPU_BF16,
         "bf16 with 4-bit blocks, bf16 with 8-bit blocks, bf16 with bf16 and fp8, f32 with "
         "others, bf16 in attention with narrow caches"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct cpu_options options = {
            .path = cases[i].path, .activations = cases[i].activations, .threads = 1};
        struct fault fault = {0};
        struct kern *kern = NULL;
        if (cpu_open(&options, &kern, &fault)) continue; /* this processor lacks the path */
        cr_assert_str_eq(kern->ops->activations, cases[i].said);
        kern->ops->close(kern);
    }
}

Test(ops, activations_in_bf16) {
    static const char *const paths[] = {"avx512", "amx"};
    struct cpu_options options = {.activations = CPU_BF16, .threads = 2};
    struct fault fault = {0};
    struct kern *kern = NULL;
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        options.path = paths[i];
        if (cpu_open(&options, &kern, &fault)) {
            fprintf(stderr, "skip: activations in bf16: %s\n", fault.text);
            continue;
        }
        run_products(kern);
        rounds_activations(kern, KERN_BF16);
        rounds_activations(kern, KERN_E4M3);
        same_rows_in_bf16(kern);
        same_rows(kern, KERN_E4M3, 72, 1000, KERN_SHARD_NONE);
        same_rows(kern, KERN_E4M3, 21, 33, KERN_SHARD_COLS);
        same_rows(kern, KERN_Q4, 72, 1000, KERN_SHARD_NONE);
        same_rows(kern, KERN_Q8M, 21, 1100, KERN_SHARD_COLS);
        same_rows(kern, KERN_Q4, 72, 100, KERN_SHARD_COLS); /* fewer blocks than leaves */
        for (int rows = 1; rows < 80; rows += 13) {
            leaves_are_a_tree(kern, matrix_make(LEAF_OUTPUTS, 2048, KERN_Q4M, 51), rows);
            leaves_are_a_tree(kern, matrix_make(LEAF_OUTPUTS, CPU_LEAVES * KERN_BLOCK, KERN_Q8, 51),
                              rows);
        }
        kern->ops->close(kern);
    }
    options.path = "portable";
    cr_assert_eq(cpu_open(&options, &kern, &fault), ERR_UNSUPPORTED);
    cr_assert_str_eq(fault.field, "cpu-activations");
}

/* ---- Norm, activation, gathering ---- */

static const int dims[] = {1, 2, 15, 16, 17, 64, 100, 1024};

#define EACH_DIM(d) for (size_t d##_ = 0, d; d##_ < 8 && (d = (size_t)dims[d##_], 1); d##_++)

static void check_norm(struct kern *kern, size_t dim, int rows) {
    size_t count = dim * (size_t)rows;
    float *x = fresh(count, 41), *w = fresh(dim, 42), *y = fresh(count, 0);
    kern->ops->rms_norm(kern, y, x, w, rows, (int)dim, 1e-6f);
    for (size_t i = 0; i < count; i++) {
        double squares = 0;
        for (size_t j = 0; j < dim; j++) squares += pow(x[i / dim * dim + j], 2);
        double exact = x[i] / sqrt(squares / (double)dim + 1e-6) * w[i % dim];
        cr_assert_float_eq(y[i], exact, 4e-6 * fabs(exact) + 1e-30, "%s dim %zu", kern->ops->name,
                           dim);
    }
    float *sum = fresh(count, 44), *branch = fresh(count, 41);
    for (size_t i = 0; i < count; i++) y[i] += sum[i];
    kern->ops->add_norm(kern, sum, branch, w, rows, (int)dim, 1e-6f);
    cr_assert(!memcmp(sum, y, count * sizeof *y));
    kern->ops->rms_norm(kern, x, x, w, rows, (int)dim, 1e-6f); /* in place */
    cr_assert(!memcmp(x, branch, count * sizeof *x));
    free(sum), free(branch);
    free(x), free(w), free(y);
}

static void check_layer_norm(struct kern *kern, size_t dim, int rows) {
    const size_t count = dim * (size_t)rows;
    float *x = fresh(count, 41), *w = fresh(dim, 42), *b = fresh(dim, 43), *y = fresh(count, 0);
    for (int biased = 0; biased < 2; biased++) {
        kern->ops->layer_norm(kern, y, x, w, biased ? b : NULL, rows, (int)dim, 1e-5f);
        for (size_t i = 0; i < count; i++) {
            double mean = 0, squares = 0;
            const float *row = x + i / dim * dim;
            for (size_t j = 0; j < dim; j++) mean += (double)row[j] / (double)dim;
            for (size_t j = 0; j < dim; j++) squares += pow((double)row[j] - mean, 2);
            double exact =
                ((double)x[i] - mean) / sqrt(squares / (double)dim + 1e-5) * (double)w[i % dim];
            if (biased) exact += (double)b[i % dim];
            cr_assert_float_eq(y[i], exact, 1e-5, "%s dim %zu: %g not %g", kern->ops->name, dim,
                               (double)y[i], exact);
        }
    }
    float *own = fresh(count, 0);
    memcpy(own, x, count * sizeof *own);
    kern->ops->layer_norm(kern, own, own, w, b, rows, (int)dim, 1e-5f);
    cr_assert_eq(memcmp(own, y, count * sizeof *own), 0, "%s: in place", kern->ops->name);
    kern->ops->add(kern, y, x, rows, (int)dim);
    for (size_t i = 0; i < count; i++) cr_assert_eq(y[i], own[i] + x[i], "%s", kern->ops->name);
    free(x), free(w), free(b), free(y), free(own);
}

/* A product that is its own gate has GELU in its exact form. */
static void check_gelu(struct kern *kern, int dim, int rows) {
    const size_t count = (size_t)(dim * rows);
    float *x = fresh(count, 43), *y = fresh(count, 0);
    for (size_t i = 0; i < count; i++) x[i] *= i % 3 ? 4 : 30;
    x[0] = 200, x[count - 1] = -200;
    kern->ops->glu_apart(kern, y, x, x, dim, rows, dim, KERN_NORMAL);
    for (size_t i = 0; i < count; i++) {
        const double exact = 0.5 * erfc(-(double)x[i] * M_SQRT1_2) * (double)x[i];
        cr_assert_float_eq(y[i], exact, 4e-7 * fmax(1, fabs((double)x[i])), "%s: %g -> %g not %g",
                           kern->ops->name, (double)x[i], (double)y[i], exact);
    }
    free(x), free(y);
}

static void check_glu(struct kern *kern, size_t dim, int rows, enum kern_activation activation) {
    size_t count = dim * (size_t)rows;
    float *x = fresh(2 * count, 43), *y = fresh(count, 0);
    for (size_t i = 0; i < 2 * count; i++) x[i] *= 30;
    x[0] = 200, x[dim - 1] = -200; /* e^-x overflows or vanishes: still finite */
    kern->ops->glu(kern, y, x, rows, (int)dim, activation);
    for (size_t i = 0; i < count; i++) {
        double gate = x[i / dim * 2 * dim + i % dim], up = x[i / dim * 2 * dim + dim + i % dim];
        if (activation == KERN_SWIGLU_CLAMPED) {
            gate = fmin(gate, 7);
            up = fmin(fmax(up, -7), 7) + 1;
        }
        double inner = activation == KERN_SWIGLU_CLAMPED ? 1.702 * gate : gate;
        if (activation == KERN_GELU_TANH)
            inner = 2 * sqrt(M_2_PI) * (gate + 0.044715 * gate * gate * gate);
        double exact = activation == KERN_RELU ? fmax(gate, 0) * up : gate / (1 + exp(-inner)) * up;
        double slack = activation == KERN_SILU ? 1e-6 : 1e-6 + 4e-7 * fabs(inner);
        /* exp is right to 2 ulp; its clamps show only below 1e-35. */
        cr_assert_float_eq(y[i], exact, slack * fabs(exact) + 1e-33, "%s: %g %g -> %g not %g",
                           kern->ops->name, gate, up, y[i], exact);
    }
    free(x), free(y);
}

Test(ops, norm_and_glu) {
    for (int path = 0; path < PATH_COUNT; path++) {
        struct kern *kern = path_open(path, 2);
        if (!kern) continue;
        EACH_DIM(dim) {
            check_norm(kern, dim, 1);
            check_norm(kern, dim, 67);
            check_glu(kern, dim, 1, KERN_SILU);
            check_glu(kern, dim, 67, KERN_SILU);
            check_glu(kern, dim, 67, KERN_GELU_TANH);
            check_glu(kern, dim, 67, KERN_SWIGLU_CLAMPED);
            check_glu(kern, dim, 67, KERN_RELU);
            check_layer_norm(kern, dim, 1);
            check_layer_norm(kern, dim, 67);
            check_gelu(kern, (int)dim, 67);
        }
        kern->ops->close(kern);
    }
}

Test(ops, gather) {
    struct kern *kern = path_open(1, 2);
    float *x = fresh(50 * 900, 44), *y = fresh(60 * 900, 0);
    int32_t index[60];
    for (int i = 0; i < 60; i++) index[i] = (i * 7 + 3) % 50;
    kern->ops->gather_rows(kern, y, x, index, 60, 900);
    for (int i = 0; i < 60; i++)
        cr_assert(!memcmp(y + i * 900, x + index[i] * 900, 900 * sizeof *x));
    kern->ops->close(kern);
    free(x), free(y);
}

/* A row's bits do not depend on the rows beside it, and rows that are not named stay as they are.
 */
static void check_low_rank(struct kern *kern, int rank) {
    enum { IN = 70, OUT = 45, ROWS = 37 };
    float *a = fresh((size_t)(rank * IN), 5), *b = fresh((size_t)(OUT * rank), 6);
    float *x = fresh((size_t)(ROWS * IN), 7), *y = fresh((size_t)(ROWS * OUT), 8);
    float *was = fresh((size_t)(ROWS * OUT), 8), *alone = fresh((size_t)(ROWS * OUT), 8);
    float *in = fresh((size_t)(ROWS * IN), 0), *low = fresh((size_t)(ROWS * rank), 0);
    float *out = fresh((size_t)(ROWS * OUT), 0);
    const struct kern_matrix down = {.data = a, .dtype = KERN_F32, .rows = rank, .cols = IN};
    const struct kern_matrix up = {
        .data = b, .dtype = KERN_F32, .rows = OUT, .cols = rank, .factor = 1.5f};
    struct kern_weight *weights[2];
    int32_t rows[ROWS];
    int count = 0;
    MUST(kern->ops->weight_load(kern, &down, 1, KERN_SHARD_COLS, &weights[0], NULL));
    MUST(kern->ops->weight_load(kern, &up, 1, KERN_SHARD_NONE, &weights[1], NULL));
    const struct kern_low_rank pair = {weights[0], weights[1], in, low, out};
    for (int i = 0; i < ROWS; i++)
        if (i % 3) rows[count++] = i;
    kern->ops->low_rank(kern, y, x, &pair, rows, count);
    for (int i = count - 1; i >= 0; i--) kern->ops->low_rank(kern, alone, x, &pair, &rows[i], 1);
    cr_assert_eq(memcmp(y, alone, (size_t)(ROWS * OUT) * sizeof *y), 0, "%s", kern->ops->name);
    for (int r = 0; r < ROWS; r++)
        for (int o = 0; o < OUT; o++) {
            double sum = was[r * OUT + o];
            for (int k = 0; k < rank && r % 3; k++) {
                double dot = 0;
                for (int i = 0; i < IN; i++) dot += (double)a[k * IN + i] * x[r * IN + i];
                sum += 1.5 * (double)b[o * rank + k] * dot;
            }
            cr_assert_float_eq(y[r * OUT + o], sum, r % 3 ? 1e-4 : 0, "%s: row %d: %g not %g",
                               kern->ops->name, r, y[r * OUT + o], sum);
        }
    kern->ops->weight_free(kern, weights[0]);
    kern->ops->weight_free(kern, weights[1]);
    free(a), free(b), free(x), free(y), free(was), free(alone), free(in), free(low), free(out);
}

Test(ops, low_rank) {
    for (int path = 0; path < PATH_COUNT; path++) {
        struct kern *kern = path_open(path, 2);
        if (!kern) continue;
        check_low_rank(kern, 1);
        check_low_rank(kern, 8);
        check_low_rank(kern, 40);
        kern->ops->close(kern);
    }
}

/* ---- Rotation ---- */

static void norm_exact(double *x, const float *w, int dim, double eps) {
    double squares = 0;
    for (int i = 0; i < dim; i++) squares += x[i] * x[i];
    for (int i = 0; i < dim; i++) x[i] = x[i] / sqrt(squares / dim + eps) * w[i];
}

static void check_head(const float *was, const float *now, int dim, const float *norm,
                       const struct kern_rope *rope, bool query, struct kern_place place,
                       const char *name) {
    const struct kern_query_scale *by = &rope->query_scale;
    const int pos = place.axis[0];
    const double grown =
        query && by->beta > 0 ? 1 + (double)by->beta * log(1 + pos / by->period) : 1;
    double x[256];
    for (int i = 0; i < dim; i++) x[i] = was[i];
    if (norm) norm_exact(x, norm, dim, 1e-6);
    for (int j = 0; j < dim / 2; j++) {
        /* The angle is a float32 product, as in the models' own code; the rest is exact. */
        double angle = (float)place.axis[rope->axes ? rope->axes[j] : 0] * rope->inv_freq[j];
        double c = cos(angle) * rope->scale * grown, s = sin(angle) * rope->scale * grown;
        double a = x[j] * c - x[j + dim / 2] * s, b = x[j + dim / 2] * c + x[j] * s;
        cr_assert_float_eq(now[j], a, 1e-5, "%s dim %d pos %d", name, dim, pos);
        cr_assert_float_eq(now[j + dim / 2], b, 1e-5, "%s dim %d pos %d", name, dim, pos);
    }
}

/* The place of a row, one of a grid of three columns behind which places go on. */
static struct kern_place place_in_grid(int start, int row) {
    if (row >= 6) return (struct kern_place){{start + row - 3, start + row - 3, start + row - 3}};
    return (struct kern_place){{start, start + row / 3, start + row % 3}};
}

static void check_rope(struct kern *kern, int dim, bool norm, float scale) {
    struct kern_cache_options cache = {.layers = 1,
                                       .heads_q = 4,
                                       .heads_kv = 2,
                                       .head_dim = dim,
                                       .dtype = KERN_F32,
                                       .pages = 4,
                                       .slots = 2,
                                       .max_positions = 100000};
    struct kern_span spans[] = {{.slot = 0, .row = 0, .count = 9, .pos = 31990},
                                {.slot = 1, .row = 9, .count = 1, .pos = 7}};
    struct kern_batch batch = {.spans = spans, .rows = 10, .span_count = 2};
    struct kern_place places[10];
    uint8_t axes[128];
    float freq[128];
    for (int j = 0; j < dim / 2; j++) freq[j] = (float)pow(10000, -2.0 * j / dim);
    for (int j = 0; j < dim / 2; j++) axes[j] = (uint8_t)(j % 3);
    struct kern_rope rope = {.inv_freq = freq, .axes = axes, .scale = scale};
    if (scale == 1 && !norm) rope.query_scale = (struct kern_query_scale){0.1f, 100};
    MUST(kern->ops->cache_open(kern, &cache, NULL));
    int stride = 8 * dim;
    float *qkv = fresh((size_t)(10 * stride), 51), *was = fresh((size_t)(10 * stride), 51);
    float *qn = fresh((size_t)dim, 52), *kn = fresh((size_t)dim, 53);
    /* The second time from remembered angles, the third at other positions, then with places of
     * their own, and once more without. */
    for (int again = 0; again < 5; again++) {
        if (again == 2) spans[0].pos -= 1000, spans[1].pos = 0;
        for (int row = 0; row < 10; row++) {
            const int pos = row < 9 ? spans[0].pos + row : spans[1].pos;
            places[row] = again == 3 ? place_in_grid(spans[0].pos, row)
                                     : (struct kern_place){{pos, pos, pos}};
        }
        if (again == 3) rope.query_scale.beta = 0;
        batch.places = again == 3 ? places : NULL;
        fill(qkv, (size_t)(10 * stride), 51);
        kern->ops->qk_rope(kern, qkv, norm ? qn : NULL, norm ? kn : NULL, 1e-6f, &rope, &batch);
        for (int row = 0; row < 10; row++) {
            for (int h = 0; h < 6; h++)
                check_head(was + row * stride + h * dim, qkv + row * stride + h * dim, dim,
                           !norm   ? NULL
                           : h < 4 ? qn
                                   : kn,
                           &rope, h < 4, places[row], kern->ops->name);
            size_t v = (size_t)(row * stride + 6 * dim);
            cr_assert(!memcmp(qkv + v, was + v, 2 * (size_t)dim * sizeof *qkv), "values move");
        }
    }
    free(qkv), free(was), free(qn), free(kn);
}

Test(ops, rope) {
    static const int sizes[] = {2, 16, 64, 80, 128};
    for (int path = 0; path < PATH_COUNT; path++) {
        for (int i = 0; i < 5; i++) {
            struct kern *kern = path_open(path, 2);
            if (!kern) break;
            check_rope(kern, sizes[i], i % 2 == 0, i == 3 ? 1.5f : 1.0f);
            kern->ops->close(kern);
        }
    }
}

/* ---- Gates ---- */

struct gate_case {
    int d_model, width, heads, embeddings, row_count;
    bool second;
};

static const struct gate_case gate_cases[] = {
    {64, 16, 4, 1, 4, false},
    {100, 33, 2, 1, 1, false},
    {64, 64, 8, 1, 8, true},
    {48, 8, 3, 3, 3, false},
};

static void silu_exact(double *h, int count) {
    for (int i = 0; i < count; i++) h[i] = h[i] / (1 + exp(-h[i]));
}

static double gate_exact(const struct gate_case *c, const struct kern_gate_spec *s, const float *x,
                         int head) {
    double h[512], g[512];
    int first = c->embeddings * c->width;
    for (int i = 0; i < first; i++) {
        h[i] = s->b1[i];
        for (int k = 0; k < c->d_model; k++) h[i] += (double)s->w1[i * c->d_model + k] * x[k];
    }
    silu_exact(h, first);
    for (int i = 0; c->second && i < c->width; i++) {
        g[i] = s->b2[i];
        for (int k = 0; k < c->width; k++) g[i] += s->w2[i * c->width + k] * h[k];
    }
    if (c->second) silu_exact(g, c->width), memcpy(h, g, sizeof g);
    double z = s->bias[s->row[head]];
    for (int i = 0; i < c->width; i++)
        z +=
            s->last[s->row[head] * c->width + i] * h[(c->embeddings > 1 ? head * c->width : 0) + i];
    return fmin(z, 0) - log1p(exp(-fabs(z)));
}

static void check_gate(struct kern *kern, const struct gate_case *c) {
    enum { ROWS = 300 };
    size_t first = (size_t)(c->embeddings * c->width), d = (size_t)c->d_model;
    size_t width = (size_t)c->width, heads = (size_t)c->heads;
    float *w1 = fresh(first * d, 61), *b1 = fresh(first, 62), *w2 = fresh(width * width, 63);
    float *b2 = fresh(width, 64), *last = fresh((size_t)c->row_count * width, 65);
    float *bias = fresh((size_t)c->row_count, 66), *x = fresh(ROWS * d, 67);
    float *all = fresh(ROWS * heads, 0), *one = fresh(heads, 0);
    int32_t row[8];
    for (int h = 0; h < c->heads; h++) row[h] = (c->heads - 1 - h) % c->row_count;
    struct kern_gate_spec spec = {.w1 = w1,
                                  .b1 = b1,
                                  .w2 = c->second ? w2 : NULL,
                                  .b2 = c->second ? b2 : NULL,
                                  .last = last,
                                  .bias = bias,
                                  .row = row,
                                  .width = c->width,
                                  .d_model = c->d_model,
                                  .heads_kv = c->heads,
                                  .row_count = c->row_count,
                                  .embeddings = c->embeddings};
    struct kern_gate *gate;
    MUST(kern->ops->gate_load(kern, &spec, &gate, NULL));
    kern->ops->gate(kern, all, x, gate, ROWS);
    for (size_t r = 0; r < ROWS; r++) {
        kern->ops->gate(kern, one, x + r * d, gate, 1);
        cr_assert(!memcmp(one, all + r * heads, heads * sizeof *one), "row %zu alone differs", r);
        for (int h = 0; h < c->heads; h += r < 20 ? 1 : c->heads) {
            double exact = gate_exact(c, &spec, x + r * d, h);
            cr_assert_float_eq(all[r * heads + (size_t)h], exact, 2e-5 * fabs(exact) + 1e-6,
                               "%s: %.9g not %.9g", kern->ops->name, all[r * heads + (size_t)h],
                               exact);
            cr_assert(all[r * heads + (size_t)h] <= 0);
        }
    }
    kern->ops->gate_free(kern, gate);
    free(w1), free(b1), free(w2), free(b2), free(last), free(bias), free(x), free(all), free(one);
}

Test(ops, gate) {
    for (int path = 0; path < PATH_COUNT; path++) {
        struct kern *kern = path_open(path, 2);
        if (!kern) continue;
        for (size_t i = 0; i < sizeof gate_cases / sizeof *gate_cases; i++)
            check_gate(kern, &gate_cases[i]);
        kern->ops->close(kern);
    }
}
