/* E4M3 weights: every number is the nearest, the largest uses the whole range, and what has no
 * scale is refused by its row. */
#include <criterion/criterion.h>

#include "kernels/number.h"
#include "kernels/quantize.h"
#include "paths.h"

#define ROWS 7
#define COLS 2100 /* more than two slices */

/* The code whose value lies nearest to x: tried one by one. */
static double nearest(double x) {
    double best = INFINITY;
    for (int code = 0; code < 256; code++) {
        double value = number_from_e4m3((uint8_t)code);
        if (fabs(value - x) < fabs(best - x)) best = value;
    }
    return best;
}

static void check_matrix(enum kern_dtype dtype, int64_t stride) {
    struct test_matrix m = matrix_make(ROWS, stride, dtype, 3);
    uint8_t *codes = malloc((size_t)ROWS * COLS);
    float scales[ROWS];
    m.file.cols = COLS;
    m.file.stride = stride;
    cr_assert_eq(quantize_rows(&m.file, codes, scales, NULL), 0);
    for (int r = 0; r < ROWS; r++) {
        float most = 0;
        uint8_t top = 0;
        for (int c = 0; c < COLS; c++) {
            float x = m.value[r * stride + c];
            uint8_t code = codes[r * COLS + c];
            double off = fabs(number_from_e4m3(code) - (double)x / scales[r]);
            most = fmaxf(most, fabsf(x));
            if ((code & 0x7f) > top) top = code & 0x7f;
            /* a little more than the nearest's: x times the inverse of the scale is rounded, too */
            cr_assert(off <= fabs(nearest((double)x / scales[r]) - (double)x / scales[r]) + 1e-4,
                      "row %d, %d: %.9g is %.9g", r, c, (double)x / scales[r],
                      (double)number_from_e4m3(code));
        }
        cr_assert_eq(top, 0x7e, "row %d does not reach the largest number", r);
        cr_assert_float_eq(scales[r], most / QUANTIZE_MOST, 0);
    }
    matrix_close(&m);
    free(codes);
}

Test(quantize, every_number_is_the_nearest) {
    check_matrix(KERN_BF16, COLS);
    check_matrix(KERN_F32, COLS);
    check_matrix(KERN_F16, COLS + 5);
}

Test(quantize, zeros_and_the_smallest_numbers_have_a_scale) {
    const float x[2][3] = {{0, -0.0f, 0}, {1e-45f, -1e-41f, 0}};
    const struct kern_matrix m = {.data = x, .dtype = KERN_F32, .rows = 2, .cols = 3};
    uint8_t codes[6];
    float scales[2];
    cr_assert_eq(quantize_rows(&m, codes, scales, NULL), 0);
    for (int i = 0; i < 6; i++) cr_assert_eq(codes[i] & 0x7f, 0, "%d: %#x", i, codes[i]);
    for (int r = 0; r < 2; r++) cr_assert(scales[r] > 0 && isfinite(1 / scales[r]));
}

Test(quantize, what_is_not_finite_is_refused_by_its_row) {
    static const float bad[] = {INFINITY, -INFINITY, NAN};
    for (int i = 0; i < 3; i++) {
        float *x = fresh(3 * COLS, 9), scales[3];
        uint8_t *codes = malloc(3 * COLS);
        struct fault fault = {0};
        const struct kern_matrix m = {.data = x, .dtype = KERN_F32, .rows = 3, .cols = COLS};
        x[2 * COLS + 1500] = bad[i];
        cr_assert_eq(quantize_rows(&m, codes, scales, &fault), ERR_INVALID);
        cr_assert(strstr(fault.text, "row 2"), "%s", fault.text);
        free(x), free(codes);
    }
}
