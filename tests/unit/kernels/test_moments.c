/* Second moments against sums written out, their factors against the matrix that they make, and
 * rounding with them: as without where inputs are independent, closer where they are not. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/team.h"
#include "kernels/moments.h"
#include "kernels/quantize.h"

#define COLS (MOMENTS_WINDOW + 96) /* a whole window and a part of one */
#define SEEN 40
#define ROWS 13

/* Evenly within +-1. */
static float noise(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return (float)(int32_t)*state * 0x1p-31f;
}

/* Neighbours resemble each other, and some inputs are larger. */
static float *inputs_make(void) {
    float *x = malloc(SEEN * COLS * sizeof *x);
    uint32_t state = 1;
    for (int r = 0; r < SEEN; r++) {
        float last = 0;
        for (int c = 0; c < COLS; c++) {
            last = 0.9f * last + noise(&state);
            x[r * COLS + c] = last * (c % 50 == 0 ? 4 : 1);
        }
    }
    return x;
}

static float *moments_make(const float *x, int threads) {
    struct cpu_team *team;
    float *moments = calloc(1, moments_bytes(COLS));
    cr_assert_eq(cpu_team_open(threads, &team), 0);
    moments_add(moments, COLS, x, SEEN / 2, team);
    moments_add(moments, COLS, x + SEEN / 2 * COLS, SEEN - SEEN / 2, team);
    cpu_team_close(team);
    return moments;
}

static double product(const float *x, int64_t c, int64_t d) {
    double sum = 0;
    for (int r = 0; r < SEEN; r++) sum += (double)x[r * COLS + c] * (double)x[r * COLS + d];
    return sum;
}

Test(moments, sums_of_products) {
    float *x = inputs_make(), *moments = moments_make(x, 1), *again = moments_make(x, 3);
    for (int64_t c = 0; c < COLS; c++)
        for (int64_t place = moments_place(c), d = 0; d <= place; d++) {
            const size_t at = (size_t)(c * MOMENTS_WINDOW + d);
            const double want = product(x, c, c - place + d);
            cr_assert(fabs((double)moments[at] - want) <= 1e-4 * (1 + fabs(want)), "%d %d: %g, %g",
                      (int)c, (int)d, (double)moments[at], want);
            cr_assert_eq(memcmp(&moments[at], &again[at], sizeof *moments), 0);
        }
    free(x), free(moments), free(again);
}

static float *factors_make(float *moments) {
    struct cpu_team *team;
    cr_assert_eq(cpu_team_open(2, &team), 0);
    moments_factor(moments, COLS, team);
    cpu_team_close(team);
    return moments;
}

/* The factors' product at c and d <= c, counted from the start of a window. */
static double factored(const float *factors, int64_t count, int64_t c, int64_t d) {
    double sum = 0;
    for (int64_t k = c; k < count; k++) {
        const float *row = factors + k * MOMENTS_WINDOW;
        const double uc = k == c ? 1 : (double)row[c], ud = k == d ? 1 : (double)row[d];
        sum += uc * ud * (double)row[k];
    }
    return sum;
}

Test(moments, factors_make_the_damped_moments) {
    float *x = inputs_make(), *factors = factors_make(moments_make(x, 1));
    double damp = 0;
    for (int64_t c = 0; c < COLS; c++) damp += MOMENTS_DAMP * product(x, c, c) / COLS;
    for (int64_t first = 0; first < COLS; first += MOMENTS_WINDOW) {
        const int64_t count = COLS - first < MOMENTS_WINDOW ? COLS - first : MOMENTS_WINDOW;
        for (int64_t c = 0; c < count; c += 7)
            for (int64_t d = 0; d <= c; d += 3) {
                const double found = factored(factors + first * MOMENTS_WINDOW, count, c, d);
                const double want = product(x, first + c, first + d) + (c == d ? damp : 0);
                cr_assert(fabs(found - want) <= 1e-2 * damp, "%d %d: %g, expected %g", (int)c,
                          (int)d, found, want);
            }
    }
    free(x), free(factors);
}

Test(moments, inputs_that_are_always_zero_have_factors) {
    float *factors = factors_make(calloc(1, moments_bytes(COLS)));
    for (int64_t c = 0; c < COLS; c++)
        cr_assert_eq(factors[c * MOMENTS_WINDOW + moments_place(c)], 1);
    free(factors);
}

static float *weights_make(struct kern_matrix *m) {
    float *w = malloc(ROWS * COLS * sizeof *w);
    uint32_t state = 7;
    for (int i = 0; i < ROWS * COLS; i++) w[i] = noise(&state) * noise(&state);
    *m = (struct kern_matrix){.data = w, .dtype = KERN_F32, .rows = ROWS, .cols = COLS};
    return w;
}

static struct block *quantized(const struct kern_matrix *m, const float *factors, int threads) {
    struct block *blocks = calloc(ROWS * COLS / KERN_BLOCK, sizeof *blocks);
    struct cpu_team *team;
    struct fault fault = {0};
    cr_assert_eq(cpu_team_open(threads, &team), 0);
    cr_assert_eq(moments_quantize(m, factors, blocks, team, &fault), 0, "%s", fault.text);
    cpu_team_close(team);
    return blocks;
}

Test(moments, independent_inputs_need_no_compensation) {
    struct kern_matrix m;
    float *w = weights_make(&m), *factors = calloc(1, moments_bytes(COLS)), sizes[COLS];
    for (int c = 0; c < COLS; c++) {
        sizes[c] = (float)(1 + c % 5);
        factors[c * MOMENTS_WINDOW + moments_place(c)] = sizes[c];
    }
    struct block *found = quantized(&m, factors, 2);
    struct block *plain = calloc(ROWS * COLS / KERN_BLOCK, sizeof *plain);
    cr_assert_eq(quantize_blocks(&m, KERN_Q4M, sizes, plain, NULL, NULL), 0);
    cr_expect_eq(memcmp(found, plain, ROWS * COLS / KERN_BLOCK * sizeof *plain), 0);
    free(w), free(factors), free(found), free(plain);
}

/* The sum over inputs and outputs of the squared errors of products. */
static double error_of(const float *w, const struct block *blocks, const float *x) {
    double sum = 0;
    for (int i = 0; i < SEEN; i++)
        for (int r = 0; r < ROWS; r++) {
            double error = 0;
            for (int c = 0; c < COLS; c++) {
                const struct block *block = &blocks[(r * COLS + c) / KERN_BLOCK];
                error += (double)x[i * COLS + c] *
                         (double)(w[r * COLS + c] - block_number(block, c % KERN_BLOCK));
            }
            sum += error * error;
        }
    return sum;
}

Test(moments, errors_make_up_for_each_other) {
    struct kern_matrix m;
    float *w = weights_make(&m), *x = inputs_make(), *factors = moments_make(x, 1), sizes[COLS];
    for (int c = 0; c < COLS; c++) sizes[c] = factors[c * MOMENTS_WINDOW + moments_place(c)];
    factors_make(factors);
    struct block *found = quantized(&m, factors, 1), *again = quantized(&m, factors, 3);
    struct block *plain = calloc(ROWS * COLS / KERN_BLOCK, sizeof *plain);
    cr_assert_eq(quantize_blocks(&m, KERN_Q4M, sizes, plain, NULL, NULL), 0);
    cr_expect_eq(memcmp(found, again, ROWS * COLS / KERN_BLOCK * sizeof *plain), 0);
    cr_expect_lt(error_of(w, found, x), 0.25 * error_of(w, plain, x), "%g, %g",
                 error_of(w, found, x), error_of(w, plain, x));
    free(w), free(x), free(factors), free(found), free(again), free(plain);
}

Test(moments, a_row_without_a_scale_is_named) {
    struct kern_matrix m;
    struct cpu_team *team;
    struct fault fault = {0};
    float *w = weights_make(&m), *factors = factors_make(calloc(1, moments_bytes(COLS)));
    struct block *blocks = calloc(ROWS * COLS / KERN_BLOCK, sizeof *blocks);
    w[6 * COLS + 3] = NAN;
    w[11 * COLS] = INFINITY;
    cr_assert_eq(cpu_team_open(2, &team), 0);
    cr_expect_eq(moments_quantize(&m, factors, blocks, team, &fault), ERR_INVALID);
    cr_expect(strstr(fault.text, "row 6 "), "%s", fault.text);
    cpu_team_close(team);
    free(w), free(factors), free(blocks);
}
