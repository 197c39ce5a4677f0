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

static void check_softmax(const struct cpu_math *math) {
    for (int count = 1; count <= MOST; count += count < 40 ? 1 : 61) {
        float got[MOST], want[MOST], sum = 0;
        fill(got, MOST, (uint64_t)count);
        for (int i = 0; i < MOST; i++) want[i] = got[i] *= i % 50 == 3 ? 60 : 5;
        math->softmax(got, count);
        cpu_math_plain.softmax(want, count);
        for (int i = 0; i < count; i++) {
            cr_assert_float_eq(got[i], want[i], 1e-6f * want[i] * 10 + 1e-12f, "%d of %d", i,
                               count);
            sum += got[i];
        }
        cr_assert_float_eq(sum, 1, 1e-5);
        for (int i = count; i < MOST; i++) cr_assert_float_eq(got[i], want[i], 0);
    }
}

Test(math, every_path_agrees_with_the_plain_one) {
    static const int dims[] = {2, 16, 20, 64, 128};
    for (int path = 0; path < PATH_COUNT; path++) {
        const struct cpu_math *math = math_of(path);
        if (!math) continue;
        for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) {
            check_dots(math, dims[i], KERN_F32);
            check_dots(math, dims[i], KERN_BF16);
            check_dots(math, dims[i], KERN_E4M3);
        }
        check_softmax(math);
    }
}
