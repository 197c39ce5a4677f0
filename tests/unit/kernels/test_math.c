/* Every path's arithmetic of observing attention beside the plain one. */
#include <criterion/criterion.h>

#include "tests/unit/kernels/paths.h"

enum { ROWS = 37, LANES = 19, MOST = 600 };

static const struct cpu_math *math_of(int path) {
    struct kern *kern = path_open(path, 1);
    if (!kern) return NULL;
    const struct cpu_math *math = ((struct cpu *)kern)->kernels->math;
    kern->ops->close(kern);
    return math;
}

/* ROWS random rows as a cache stores them. */
struct stored {
    char *data;
    uint16_t factors[ROWS];
    struct cpu_rows rows;
};

static struct stored *store(int dim, enum kern_dtype dtype, uint64_t seed) {
    struct stored *s = calloc(1, sizeof *s);
    float *from = fresh((size_t)ROWS * (size_t)dim, seed);
    size_t bytes = row_code_bytes(dtype, dim);
    s->data = malloc(ROWS * bytes);
    for (int i = 0; i < ROWS; i++)
        if (row_scaled(dtype))
            row_write(s->data + (size_t)i * bytes, &s->factors[i], from + i * dim, dim, dtype);
        else
            number_write_row(s->data + (size_t)i * bytes, from + i * dim, dim, dtype);
    s->rows = (struct cpu_rows){s->data, s->factors, dim, dtype, dim};
    free(from);
    return s;
}

static void store_free(struct stored *s) {
    free(s->data), free(s);
}

static struct cpu_rows rows_from(const struct stored *s, int first) {
    struct cpu_rows rows = s->rows;
    rows.at = s->data + (size_t)first * row_code_bytes(rows.dtype, rows.dim);
    rows.factors += first;
    return rows;
}

static void check_dots(const struct cpu_math *math, int dim, enum kern_dtype dtype) {
    float *q = fresh((size_t)LANES * (size_t)dim, 3);
    struct stored *s = store(dim, dtype, 4);
    float want[LANES * ROWS], got[LANES * 40], one;
    cpu_math_plain.dots(want, ROWS, q, LANES, s->rows, ROWS);
    math->dots(got, 40, q, LANES, s->rows, ROWS);
    for (int l = 0; l < LANES; l++)
        for (int j = 0; j < ROWS; j++) {
            cr_assert_float_eq(got[l * 40 + j], want[l * ROWS + j], 1e-5 * sqrt(dim));
            math->dots(&one, 1, q + l * dim, 1, rows_from(s, j), 1);
            cr_assert_float_eq(one, got[l * 40 + j], 0, "lane %d row %d: alone %g", l, j,
                               (double)one);
        }
    free(q), store_free(s);
}

/* Lanes together and alone, all rows at once and in two parts. */
static void check_weigh(const struct cpu_math *math, int dim, enum kern_dtype dtype) {
    size_t all = (size_t)LANES * (size_t)dim;
    float *p = fresh(LANES * ROWS, 5);
    float *want = fresh(all, 7), *got = fresh(all, 7), *one = fresh(all, 7);
    struct stored *s = store(dim, dtype, 6);
    cpu_math_plain.weigh(want, (size_t)dim, p, ROWS, LANES, s->rows, ROWS);
    math->weigh(got, (size_t)dim, p, ROWS, LANES, s->rows, ROWS);
    for (int l = 0; l < LANES; l++) {
        float *out = one + l * dim;
        math->weigh(out, 1, p + l * ROWS, 1, 1, s->rows, 20);
        math->weigh(out, 1, p + l * ROWS + 20, 1, 1, rows_from(s, 20), ROWS - 20);
    }
    for (size_t i = 0; i < all; i++) {
        cr_assert_float_eq(got[i], want[i], 1e-4);
        cr_assert_float_eq(one[i], got[i], 0, "dim %d [%zu]: alone %g", dim, i, (double)one[i]);
    }
    free(p), free(want), free(got), free(one), store_free(s);
}

static void check_softmax(const struct cpu_math *math, float sink) {
    for (int count = 1; count <= MOST; count += count < 40 ? 1 : 61) {
        float got[MOST], want[MOST];
        double sum = 0, all = exp((double)sink);
        fill(got, MOST, (uint64_t)count);
        for (int i = 0; i < MOST; i++) want[i] = got[i] *= i % 50 == 3 ? 60 : 5;
        for (int i = 0; i < count; i++) all += exp((double)got[i]);
        math->softmax(got, count, sink);
        cpu_math_plain.softmax(want, count, sink);
        for (int i = 0; i < count; i++) {
            cr_assert_float_eq(got[i], want[i], 1e-6f * want[i] * 10 + 1e-12f, "%d of %d", i,
                               count);
            sum += (double)got[i];
        }
        cr_assert_float_eq(sum, 1 - exp((double)sink) / all, 1e-5);
        for (int i = count; i < MOST; i++) cr_assert_float_eq(got[i], want[i], 0);
    }
}

Test(math, every_path_agrees_with_the_plain_one) {
    static const int dims[] = {2, 16, 20, 64, 80, 128, 300};
    static const enum kern_dtype dtypes[] = {KERN_F32, KERN_BF16, KERN_E4M3, KERN_ROW8, KERN_ROW4};
    for (int path = 0; path < PATH_COUNT; path++) {
        const struct cpu_math *math = math_of(path);
        if (!math) continue;
        for (size_t i = 0; i < sizeof dims / sizeof *dims; i++)
            for (size_t t = 0; t < sizeof dtypes / sizeof *dtypes; t++) {
                check_dots(math, dims[i], dtypes[t]);
                check_weigh(math, dims[i], dtypes[t]);
            }
        check_softmax(math, -INFINITY);
        check_softmax(math, 2);
        check_softmax(math, 70);
    }
}

/* A row whose last number is special: so is the end that vectors may treat separately. */
static void fill_row(float *row, int dim, int kind) {
    static const float last[] = {1, 0, -0.0f, 0x1p-149f, -0x1.fffffep127f, INFINITY, -INFINITY};
    const int kinds = sizeof last / sizeof *last;
    fill(row, (size_t)dim, (uint64_t)(dim + kind));
    if (kind == 0) memset(row, 0, (size_t)dim * sizeof *row);
    row[dim - 1] = kind < kinds ? last[kind] : NAN;
}

static void check_row_write(const struct cpu_math *math, const float *row, int dim,
                            enum kern_dtype dtype) {
    uint8_t want[ROW_DIM_MAX + 1], got[ROW_DIM_MAX + 1];
    uint16_t want_factor = 1, got_factor = 2;
    memset(want, 77, sizeof want);
    memset(got, 77, sizeof got);
    row_write(want, &want_factor, row, dim, dtype);
    math->row_write(got, &got_factor, row, dim, dtype);
    cr_assert_eq(memcmp(want, got, sizeof want), 0, "dim %d, dtype %d", dim, dtype);
    cr_assert_eq(want_factor, got_factor, "dim %d, dtype %d", dim, dtype);
}

/* Rows of a cache file are the same on every path. */
Test(math, every_path_rotates_and_writes_rows_with_the_same_bits) {
    static const int dims[] = {1, 2, 3, 17, 20, 32, 48, 64, 80, 96, 128, 300, 512};
    for (int path = 0; path < PATH_COUNT; path++) {
        const struct cpu_math *math = math_of(path);
        if (!math) continue;
        for (size_t i = 0; i < sizeof dims / sizeof *dims; i++)
            for (int kind = 0; kind < 8; kind++) {
                float row[ROW_DIM_MAX], turned[ROW_DIM_MAX], want[ROW_DIM_MAX];
                const size_t bytes = (size_t)dims[i] * sizeof *row;
                fill_row(row, dims[i], kind);
                check_row_write(math, row, dims[i], KERN_ROW8);
                check_row_write(math, row, dims[i], KERN_ROW4);
                if (kind >= 4) continue; /* sums may be NaN, and these have more than one form */
                memcpy(want, row, bytes);
                memcpy(turned, row, bytes);
                row_rotate(want, dims[i]);
                math->row_rotate(turned, dims[i]);
                cr_assert_eq(memcmp(want, turned, bytes), 0, "dim %d, row %d", dims[i], kind);
            }
    }
}
