/* E4M3 weights: every number is the nearest, the largest uses the whole range, what has no scale is
 * refused by its row, and neither the processor nor the number of threads changes a bit. */
#include <criterion/criterion.h>

#include "kernels/cpu/built.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/team.h"
#include "kernels/cpu/vec.h"
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
    cr_assert_eq(quantize_rows(&m.file, codes, scales, NULL, NULL), 0);
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
    cr_assert_eq(quantize_rows(&m, codes, scales, NULL, NULL), 0);
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
        cr_assert_eq(quantize_rows(&m, codes, scales, NULL, &fault), ERR_INVALID);
        cr_assert(strstr(fault.text, "row 2"), "%s", fault.text);
        free(x), free(codes);
    }
}

/* ---- Every path and every team ---- */

typedef float quantize_row(uint8_t *codes, const void *row, int64_t cols, enum kern_dtype dtype);

/* A number at a time. */
static float plain_row(uint8_t *codes, const void *row, int64_t cols, enum kern_dtype dtype) {
    const char *at = row;
    float most = 0;
    for (int64_t i = 0; i < cols; i++) {
        float x = fabsf(number_element(at + (size_t)i * kern_dtype_bytes(dtype), dtype));
        most = x > most ? x : most;
    }
    float by = 1 / quantize_scale(most);
    for (int64_t i = 0; i < cols; i++)
        codes[i] =
            number_to_e4m3(number_element(at + (size_t)i * kern_dtype_bytes(dtype), dtype) * by);
    return quantize_scale(most);
}

static void check_row(quantize_row *quantize, const char *path, enum kern_dtype dtype,
                      int64_t cols) {
    struct test_matrix m = matrix_make(1, cols, dtype, (uint64_t)cols);
    uint8_t *want = malloc((size_t)cols), *got = malloc((size_t)cols + 1);
    got[cols] = 0x55;
    float scale = plain_row(want, m.file.data, cols, dtype);
    cr_assert_eq(quantize(got, m.file.data, cols, dtype), scale, "%s", path);
    cr_assert(!memcmp(got, want, (size_t)cols), "%s: %d numbers", path, (int)cols);
    cr_assert_eq(got[cols], 0x55, "%s: beyond %d numbers", path, (int)cols);
    matrix_close(&m);
    free(want), free(got);
}

static void check_path(quantize_row *quantize, const char *path) {
    static const enum kern_dtype dtypes[] = {KERN_F32, KERN_BF16, KERN_F16};
    static const int64_t widths[] = {1, 3, 15, 16, 17, 31, 32, 129, 1000, COLS};
    for (size_t d = 0; d < 3; d++)
        for (size_t w = 0; w < sizeof widths / sizeof *widths; w++)
            check_row(quantize, path, dtypes[d], widths[w]);
    for (int last = 0; last < 2; last++) { /* in a whole vector, and in the rest */
        float x[20] = {0};
        uint8_t codes[20];
        x[last ? 19 : 3] = NAN;
        cr_assert(!isfinite(quantize(codes, x, 20, KERN_F32)), "%s", path);
        x[last ? 19 : 3] = -INFINITY;
        cr_assert(!isfinite(quantize(codes, x, 20, KERN_F32)), "%s", path);
    }
}

Test(quantize, every_path_makes_the_same_numbers) {
    struct cpu_isa isa = cpu_isa_detect();
    check_path(cpu_quantize_row_portable, "portable");
    if (CPU_HAS_NEON && isa.neon) check_path(cpu_quantize_row_neon, "neon");
    if (CPU_HAS_AVX2 && isa.avx2) check_path(cpu_quantize_row_avx2, "avx2");
    if (CPU_HAS_AVX512 && isa.avx512) check_path(cpu_quantize_row_avx512, "avx512");
}

static struct cpu_team *open_team(int threads) {
    struct cpu_team *team;
    cr_assert_eq(cpu_team_open(threads, &team), 0);
    return team;
}

#define MANY 201

Test(quantize, threads_change_no_bit) {
    struct test_matrix m = matrix_make(MANY, COLS, KERN_BF16, 5);
    uint8_t *want = malloc((size_t)MANY * COLS), *got = malloc((size_t)MANY * COLS);
    float want_scales[MANY], scales[MANY];
    cr_assert_eq(quantize_rows(&m.file, want, want_scales, NULL, NULL), 0);
    for (int threads = 1; threads <= 5; threads += 2) {
        struct cpu_team *team = open_team(threads);
        memset(got, 0xff, (size_t)MANY * COLS);
        cr_assert_eq(quantize_rows(&m.file, got, scales, team, NULL), 0);
        cr_assert(!memcmp(got, want, (size_t)MANY * COLS), "%d threads", threads);
        cr_assert(!memcmp(scales, want_scales, sizeof scales), "%d threads", threads);
        cpu_team_close(team);
    }
    matrix_close(&m);
    free(want), free(got);
}

Test(quantize, the_first_row_without_a_scale_is_named_whoever_finds_it) {
    float *x = fresh((size_t)MANY * COLS, 9), scales[MANY];
    uint8_t *codes = malloc((size_t)MANY * COLS);
    const struct kern_matrix m = {.data = x, .dtype = KERN_F32, .rows = MANY, .cols = COLS};
    for (int row = 77; row < MANY; row++) x[row * COLS + 5] = NAN;
    for (int threads = 1; threads <= 5; threads++) {
        struct cpu_team *team = open_team(threads);
        struct fault fault = {0};
        cr_assert_eq(quantize_rows(&m, codes, scales, team, &fault), ERR_INVALID);
        cr_assert(strstr(fault.text, "row 77 "), "%d threads: %s", threads, fault.text);
        cpu_team_close(team);
    }
    free(x), free(codes);
}

/* ---- Blocks ---- */

/* The squared error of a matrix, and of the plain way: the block's whole range in even steps. */
static double squared_error(const struct test_matrix *m, const struct block *blocks, int steps,
                            double *plain) {
    const int64_t cols = m->file.cols, each = blocks_of(cols);
    double sum = 0;
    *plain = 0;
    for (int64_t b = 0; b < m->file.rows * each; b++) {
        const float *x = m->value + b / each * cols + b % each * KERN_BLOCK;
        int64_t count = cols - b % each * KERN_BLOCK;
        if (count > KERN_BLOCK) count = KERN_BLOCK;
        double low = 0, high = 0;
        for (int64_t i = 0; i < count; i++) low = fmin(low, x[i]), high = fmax(high, x[i]);
        if (steps == 254) high = fmax(high, -low), low = -high;
        for (int64_t i = 0; i < count; i++) {
            double step = (high - low) / steps;
            sum += pow((double)x[i] - block_number(&blocks[b], (int)i), 2);
            *plain += pow(x[i] - low - step * round((x[i] - low) / (step > 0 ? step : 1)), 2);
        }
    }
    return sum;
}

static void check_blocks(const struct test_matrix *m, enum kern_dtype dtype, double most) {
    const int64_t cols = m->file.cols, count = m->file.rows * blocks_of(cols);
    struct block *blocks = calloc((size_t)count, sizeof *blocks);
    double plain;
    cr_assert_eq(quantize_blocks(&m->file, dtype, NULL, blocks, NULL, NULL), 0);
    for (int64_t b = 0; b < count; b++) {
        int64_t used = cols - b % blocks_of(cols) * KERN_BLOCK;
        cr_assert_eq(number_from_f16(number_to_f16(blocks[b].scale[0])), blocks[b].scale[0]);
        cr_assert_eq(number_from_f16(number_to_f16(blocks[b].least[0])), blocks[b].least[0]);
        cr_assert(dtype == KERN_Q4M || blocks[b].least[0] == 0);
        for (int64_t i = 0; i < KERN_BLOCK; i++) {
            int n = blocks[b].n[i];
            cr_assert(dtype == KERN_Q4M ? n >= 0 && n <= 15 : n >= -127);
            cr_assert(i < used || n == 0);
        }
    }
    double error = squared_error(m, blocks, dtype == KERN_Q4M ? 15 : 254, &plain);
    cr_assert(error <= most * plain, "dtype %d: squared error %g, plainly %g", dtype, error, plain);
    free(blocks);
}

/* The search for four bits saves an eighth of the squared error of even noise. */
Test(quantize, blocks_are_near_their_numbers) {
    static const enum kern_dtype dtypes[] = {KERN_F32, KERN_BF16, KERN_F16, KERN_E4M3};
    for (int d = 0; d < 4; d++) {
        struct test_matrix m = matrix_make(37, 100, dtypes[d], 21);
        check_blocks(&m, KERN_Q8, 1.02);
        check_blocks(&m, KERN_Q4M, 0.95);
        matrix_close(&m);
    }
}

/* The sum of the squared errors times the weights of the inputs. */
static double weighted_error(const struct test_matrix *m, const struct block *blocks,
                             const float *inputs) {
    const int64_t cols = m->file.cols;
    double sum = 0;
    for (int64_t r = 0; r < m->file.rows; r++)
        for (int64_t c = 0; c < cols; c++) {
            const struct block *block = &blocks[r * blocks_of(cols) + c / KERN_BLOCK];
            const float x =
                number_element((const char *)m->file.data + 4 * (r * cols + c), KERN_F32);
            sum +=
                (double)inputs[c] * pow((double)x - block_number(block, (int)(c % KERN_BLOCK)), 2);
        }
    return sum;
}

/* Three inputs of each block count a hundred times as much as the others, and one does not. */
Test(quantize, errors_of_larger_inputs_are_smaller) {
    struct test_matrix m = matrix_make(37, 96, KERN_F32, 21);
    const size_t count = 37 * 3;
    struct block *alike = calloc(count, sizeof *alike), *weighted = calloc(count, sizeof *weighted);
    float inputs[96], ones[96];
    for (int i = 0; i < 96; i++) {
        ones[i] = 1;
        inputs[i] = i % 32 == 7 ? 0 : i % 32 < 3 ? 100 : 1;
    }
    cr_assert_eq(quantize_blocks(&m.file, KERN_Q4M, NULL, alike, NULL, NULL), 0);
    cr_assert_eq(quantize_blocks(&m.file, KERN_Q4M, ones, weighted, NULL, NULL), 0);
    cr_assert(!memcmp(alike, weighted, count * sizeof *alike), "equal weights change nothing");
    cr_assert_eq(quantize_blocks(&m.file, KERN_Q4M, inputs, weighted, NULL, NULL), 0);
    const double before = weighted_error(&m, alike, inputs);
    const double after = weighted_error(&m, weighted, inputs);
    cr_assert(after < 0.5 * before, "weighted error %g, %g without weights", after, before);
    matrix_close(&m);
    free(alike), free(weighted);
}

/* Blocks of one number, of zeros, and of numbers below float16's. */
Test(quantize, blocks_of_unusual_numbers) {
    static const float values[] = {0, 0.25f, -3, 0x1p-30f, 60000};
    for (size_t v = 0; v < sizeof values / sizeof *values; v++) {
        float x[KERN_BLOCK];
        struct block q8, q4;
        for (int i = 0; i < KERN_BLOCK; i++) x[i] = values[v];
        const struct kern_matrix m = {.data = x, .dtype = KERN_F32, .rows = 1, .cols = KERN_BLOCK};
        cr_assert_eq(quantize_blocks(&m, KERN_Q8, NULL, &q8, NULL, NULL), 0);
        cr_assert_eq(quantize_blocks(&m, KERN_Q4M, NULL, &q4, NULL, NULL), 0);
        for (int i = 0; i < KERN_BLOCK; i++) {
            float bound = fabsf(x[i]) * 0x1p-10f + 0x1p-25f;
            cr_assert(fabsf(block_number(&q8, i) - x[i]) <= bound, "q8 of %g", (double)x[i]);
            cr_assert(fabsf(block_number(&q4, i) - x[i]) <= bound, "q4 of %g", (double)x[i]);
        }
    }
}

Test(quantize, threads_change_no_block) {
    struct test_matrix m = matrix_make(MANY, COLS, KERN_BF16, 5);
    const size_t bytes = (size_t)(MANY * blocks_of(COLS)) * sizeof(struct block);
    struct block *want = calloc(1, bytes), *got = malloc(bytes);
    cr_assert_eq(quantize_blocks(&m.file, KERN_Q4M, NULL, want, NULL, NULL), 0);
    for (int threads = 1; threads <= 5; threads += 2) {
        struct cpu_team *team = open_team(threads);
        memset(got, 0xff, bytes);
        cr_assert_eq(quantize_blocks(&m.file, KERN_Q4M, NULL, got, team, NULL), 0);
        cr_assert(!memcmp(got, want, bytes), "%d threads", threads);
        cpu_team_close(team);
    }
    matrix_close(&m);
    free(want), free(got);
}

Test(quantize, the_first_row_without_blocks_is_named) {
    static const float bad[] = {NAN, INFINITY, 70000};
    struct block *blocks = calloc((size_t)(MANY * blocks_of(COLS)), sizeof *blocks);
    for (int i = 0; i < 3; i++) {
        float *x = fresh((size_t)MANY * COLS, 9);
        const struct kern_matrix m = {.data = x, .dtype = KERN_F32, .rows = MANY, .cols = COLS};
        struct cpu_team *team = open_team(3);
        struct fault fault = {0};
        for (int row = 77; row < MANY; row++) x[row * COLS + 5] = bad[i];
        cr_assert_eq(quantize_blocks(&m, KERN_Q8, NULL, blocks, team, &fault), ERR_INVALID);
        cr_assert(strstr(fault.text, "row 77 "), "%s", fault.text);
        cpu_team_close(team);
        free(x);
    }
    free(blocks);
}
