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

static void check_dots(const struct cpu_math *math, int dim, enum kern_dtype dtype) {
    float *q = fresh((size_t)LANES * (size_t)dim, 3), *rows = fresh((size_t)ROWS * (size_t)dim, 4);
    char *data = malloc((size_t)ROWS * (size_t)dim * sizeof(float));
    float want[LANES * ROWS], got[LANES * 40], one;
    number_write_row(data, rows, ROWS * dim, dtype);
    cpu_math_plain.dots(want, ROWS, q, LANES, data, ROWS, dim, dtype);
    math->dots(got, 40, q, LANES, data, ROWS, dim, dtype);
    for (int l = 0; l < LANES; l++)
        for (int j = 0; j < ROWS; j++) {
            const char *row = data + (size_t)(j * dim) * kern_dtype_bytes(dtype);
            cr_assert_float_eq(got[l * 40 + j], want[l * ROWS + j], 1e-5 * sqrt(dim));
            math->dots(&one, 1, q + l * dim, 1, row, 1, dim, dtype);
            cr_assert_float_eq(one, got[l * 40 + j], 0, "lane %d row %d: alone %g", l, j,
                               (double)one);
        }
    free(q), free(rows), free(data);
}

/* Lanes together and alone, all rows at once and in two parts. */
static void check_weigh(const struct cpu_math *math, int dim, enum kern_dtype dtype) {
    size_t row = (size_t)dim * kern_dtype_bytes(dtype), all = (size_t)LANES * (size_t)dim;
    float *p = fresh(LANES * ROWS, 5), *rows = fresh((size_t)ROWS * (size_t)dim, 6);
    float *want = fresh(all, 7), *got = fresh(all, 7), *one = fresh(all, 7);
    char *data = malloc((size_t)ROWS * row);
    number_write_row(data, rows, ROWS * dim, dtype);
    cpu_math_plain.weigh(want, (size_t)dim, p, ROWS, LANES, data, ROWS, dim, dtype);
    math->weigh(got, (size_t)dim, p, ROWS, LANES, data, ROWS, dim, dtype);
    for (int l = 0; l < LANES; l++) {
        float *out = one + l * dim;
        math->weigh(out, 1, p + l * ROWS, 1, 1, data, 20, dim, dtype);
        math->weigh(out, 1, p + l * ROWS + 20, 1, 1, data + 20 * row, ROWS - 20, dim, dtype);
    }
    for (size_t i = 0; i < all; i++) {
        cr_assert_float_eq(got[i], want[i], 1e-4);
        cr_assert_float_eq(one[i], got[i], 0, "dim %d [%zu]: alone %g", dim, i, (double)one[i]);
    }
    free(p), free(rows), free(want), free(got), free(one), free(data);
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
    static const enum kern_dtype dtypes[] = {KERN_F32, KERN_BF16, KERN_E4M3};
    for (int path = 0; path < PATH_COUNT; path++) {
        const struct cpu_math *math = math_of(path);
        if (!math) continue;
        for (size_t i = 0; i < sizeof dims / sizeof *dims; i++)
            for (int t = 0; t < 3; t++) {
                check_dots(math, dims[i], dtypes[t]);
                check_weigh(math, dims[i], dtypes[t]);
            }
        check_softmax(math, -INFINITY);
        check_softmax(math, 2);
        check_softmax(math, 70);
    }
}
