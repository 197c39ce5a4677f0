/* Weights in blocks (kernels/blocks.h): products with rounded activations against double
 * arithmetic and bit by bit between paths, row counts and types of factors; with activations in
 * float32 bit by bit against the same numbers in float32. */
#include <criterion/criterion.h>

#include "base/mem.h"
#include "kernels/cpu/block.h"
#include "paths.h"
#include "tests/sample.h"

/* Numbers that matrices may have: a type, its codes or a part of them, the kind of factors that it
 * can have in memory, and the values that n has. Bits of a number in memory, with factors in
 * float32 and float16. */
static const struct kind {
    const char *name;
    enum kern_dtype dtype;
    int least, most;
    enum cpu_factors factors;
    double bits[2];
    enum cpu_values values;
} kinds[] = {{"q8", KERN_Q8, -128, 127, CPU_FLOATS, {9, 8.5}, CPU_NO_VALUES},
             {"q8m", KERN_Q8M, -128, 127, CPU_FLOATS, {10, 9}, CPU_NO_VALUES},
             {"q4", KERN_Q4, -8, 7, CPU_FLOATS, {5, 4.5}, CPU_NO_VALUES},
             {"q4m", KERN_Q4M, 0, 15, CPU_FLOATS, {6, 5}, CPU_NO_VALUES},
             {"q8s", KERN_Q8S, -128, 127, CPU_FLOATS, {10, 9}, CPU_NO_VALUES},
             {"q8sm", KERN_Q8SM, -128, 127, CPU_FLOATS, {12, 10}, CPU_NO_VALUES},
             {"q5_0", KERN_Q8, -16, 15, CPU_FLOATS, {6, 5.5}, CPU_NO_VALUES},
             {"q5_1", KERN_Q8M, 0, 31, CPU_FLOATS, {7, 6}, CPU_NO_VALUES},
             {"q4_k", KERN_Q4M, 0, 15, CPU_GROUPED, {4.625, 4.625}, CPU_NO_VALUES},
             {"q5_k", KERN_Q8M, 0, 31, CPU_GROUPED, {5.625, 5.625}, CPU_NO_VALUES},
             {"q6_k", KERN_Q8S, -32, 31, CPU_GROUPED, {6.5625, 6.5625}, CPU_NO_VALUES},
             {"q3_k", KERN_Q8S, -4, 3, CPU_GROUPED, {3.5625, 3.5625}, CPU_NO_VALUES},
             {"q2_k", KERN_Q8SM, 0, 3, CPU_PAIRED, {2.625, 2.625}, CPU_NO_VALUES},
             {"iq4_nl", KERN_Q8, -127, 113, CPU_FLOATS, {5, 4.5}, CPU_IQ4},
             {"iq4_xs", KERN_Q8, -127, 113, CPU_GROUPED, {4.3125, 4.3125}, CPU_IQ4},
             {"mxfp4", KERN_Q8, -12, 12, CPU_POWERS, {4.25, 4.25}, CPU_E2M1},
             {"nvfp4", KERN_Q8S, -12, 12, CPU_E4M3, {4.625, 4.625}, CPU_E2M1}};

#define KINDS ((int)(sizeof kinds / sizeof *kinds))

static struct kern *open_as(int path, enum cpu_activations activations) {
    struct cpu_options options = {
        .path = path_names[path], .threads = 2, .activations = activations};
    struct kern *kern = path_open(path, 1); /* says what is skipped */
    if (!kern) return NULL;
    kern->ops->close(kern);
    const int rc = cpu_open(&options, &kern, NULL);
    if (rc && activations == CPU_BF16) return NULL; /* not on every path */
    cr_assert_eq(rc, 0);
    return kern;
}

/* A matrix in blocks; `halves`: factors are numbers of float16, otherwise of 17 bits, as the
 * products of a float16 and 6 bits in files are. */
struct blocks {
    struct kern_matrix file;
    const struct kind *kind;
    struct block *data;
    float *value; /* [rows][cols] */
};

static float factor(uint64_t seed, uint64_t place, bool halves) {
    float x = 0.01f * noise(seed, place);
    return halves ? number_from_f16(number_to_f16(x)) : number_from_bits(number_bits(x) & ~0x7fu);
}

/* Sets the factors of block `i` of a row, the place-th of all. Units of some groups are zero. */
static void set_factors(struct block *b, const struct kind *kind, bool halves, uint64_t seed,
                        uint64_t place, uint64_t i) {
    const uint64_t group = place - i % BLOCK_GROUP;
    const bool grouped = kind->factors == CPU_GROUPED, paired = kind->factors == CPU_PAIRED;
    for (uint64_t k = 0; k < 2; k++) {
        const bool has_unit = (grouped || paired) && mix(seed + group) % 16;
        b->unit[k] = has_unit ? factor(seed, 3 * group + k, true) : 0;
        b->scale[k] = factor(seed, 3 * place + 2 * k, halves);
        b->least[k] = factor(seed, 3 * place + k + 1, halves);
        if (kind->factors == CPU_POWERS)
            b->scale[k] = ldexpf(mix(seed + group) % 16 ? 1 : 0, -4 - (int)(mix(seed + place) % 9));
    }
    for (uint64_t k = 0; k < 2 && (grouped || paired); k++) {
        const uint64_t random = mix(seed ^ (2 * place + k));
        b->scale[k] = b->unit[0] * (grouped ? (float)(int8_t)random : (float)(random % 16));
        b->least[k] = b->unit[1] * (float)((random >> 32) % (grouped ? 64 : 16));
    }
    if (kind->factors == CPU_E4M3) {
        b->unit[0] = factor(seed, 3 * group, false);
        for (uint64_t k = 0; k < 2; k++)
            b->scale[k] =
                b->unit[0] * number_from_e4m3((uint8_t)(mix(seed ^ (2 * place + k)) % 80));
    }
    if (!block_is_split(kind->dtype)) b->scale[1] = b->scale[0], b->least[1] = b->least[0];
    if (!block_has_least(kind->dtype)) b->least[0] = b->least[1] = BLOCK_NO_LEAST;
}

static struct blocks blocks_make(int64_t rows, int64_t cols, const struct kind *kind, bool halves,
                                 uint64_t seed) {
    const int64_t each = blocks_of(cols);
    const unsigned count = (unsigned)(kind->most - kind->least + 1);
    struct blocks m = {.kind = kind,
                       .data = calloc((size_t)(rows * each), sizeof *m.data),
                       .value = calloc((size_t)(rows * cols), sizeof *m.value)};
    for (int64_t i = 0; i < rows * each; i++) {
        struct block *b = &m.data[i];
        set_factors(b, kind, halves, seed, (uint64_t)i, (uint64_t)(i % each));
        for (int k = 0; k < KERN_BLOCK && i % each * KERN_BLOCK + k < cols; k++) {
            const uint64_t random = mix(seed ^ (uint64_t)(i * KERN_BLOCK + k));
            b->n[k] = kind->values ? cpu_values[kind->values][random % 16]
                                   : (int8_t)((int)(random % count) + kind->least);
            m.value[i / each * cols + i % each * KERN_BLOCK + k] = block_number(b, k);
        }
    }
    m.file = (struct kern_matrix){.data = m.data, .dtype = kind->dtype, .rows = rows, .cols = cols};
    return m;
}

static void blocks_close(struct blocks *m) {
    free(m->data);
    free(m->value);
}

static struct kern_weight *load(struct kern *kern, const struct kern_matrix *m,
                                enum kern_shard shard) {
    struct kern_weight *w = NULL;
    struct fault fault = {0};
    cr_assert_eq(kern->ops->weight_load(kern, m, 1, shard, &w, &fault), 0, "%s", fault.text);
    return w;
}

/* Some inputs are large, so that rounding to one scale per block matters. */
static float *inputs(int64_t rows, int64_t cols) {
    float *x = fresh((size_t)(rows * cols), 71);
    for (int64_t i = 0; i < rows * cols; i += 37) x[i] *= 20;
    return x;
}

struct shape {
    int rows, outputs, cols;
    enum kern_shard shard;
    bool bias, add;
};

static const struct shape shapes[] = {
    {1, 16, 32, KERN_SHARD_NONE, false, false},    {1, 1, 1, KERN_SHARD_NONE, true, true},
    {3, 17, 33, KERN_SHARD_NONE, true, false},     {1, 130, 576, KERN_SHARD_NONE, false, false},
    {1, 130, 576, KERN_SHARD_COLS, false, true},   {7, 50, 1536, KERN_SHARD_COLS, true, true},
    {33, 118, 256, KERN_SHARD_COLS, false, false}, {261, 35, 100, KERN_SHARD_NONE, true, true},
    {40, 64, 1024, KERN_SHARD_NONE, false, true},  {40, 50, 100, KERN_SHARD_COLS, false, false},
};

static float *product(struct kern *kern, const struct shape *s, const struct kern_matrix *m) {
    float *x = inputs(s->rows, s->cols), *bias = fresh((size_t)s->outputs, 72);
    float *y = fresh((size_t)s->rows * (size_t)s->outputs, 73);
    struct kern_weight *w = load(kern, m, s->shard);
    kern->ops->matmul(kern, y, x, w, s->bias ? bias : NULL, s->rows, s->add ? KERN_ADD : KERN_SET);
    kern->ops->weight_free(kern, w);
    free(x), free(bias);
    return y;
}

/* The rounding of an input errs by at most half a step of its block, in int8 perhaps of the next
 * power of two; float32 sums add the rest. bf16 has 8 bits: the input and the weight err by 2^-8 of
 * each product. */
static void check_near(const struct shape *s, const struct blocks *m, const float *y,
                       enum cpu_activations activations, const char *what) {
    const bool bf16 = activations == CPU_BF16;
    const double steps = activations == CPU_INT16 ? 2 * 32767 : 127;
    float *x = inputs(s->rows, s->cols), *bias = fresh((size_t)s->outputs, 72);
    float *was = fresh((size_t)s->rows * (size_t)s->outputs, 73);
    for (int i = 0; i < s->rows * s->outputs; i++) {
        double sum = (s->bias ? bias[i % s->outputs] : 0) + (s->add ? (double)was[i] : 0);
        double bound = 1e-5 * fabs(sum);
        for (int k = 0; k < s->cols; k += KERN_BLOCK) {
            double most = 0, magnitude = 0;
            for (int j = k; j < k + KERN_BLOCK && j < s->cols; j++) {
                double a = x[i / s->outputs * s->cols + j];
                double b = m->value[i % s->outputs * s->cols + j];
                if (bf16) bound += fabs(a * b) * (0x1.02p-7 + s->cols * 0x1p-24);
                most = fmax(most, fabs(a));
                magnitude += fabs(b);
                sum += a * b;
            }
            if (bf16) continue;
            bound += (most / steps + 1e-5 * most) * magnitude + 1e-4 * most * 0.01;
        }
        cr_assert(fabs(y[i] - sum) <= bound, "%s: %d x %d x %d: %d: %.9g, exact %.9g +- %g", what,
                  s->rows, s->outputs, s->cols, i, (double)y[i], sum, bound);
    }
    free(x), free(bias), free(was);
}

/* Weights of a shape; `form` of 2 * KINDS: each kind, with factors of 17 bits and then of
 * float16. */
static struct blocks blocks_of_form(const struct shape *s, int form) {
    return blocks_make(s->outputs, s->cols, &kinds[form / 2], form % 2, 5);
}

/* The portable path's products are near the exact ones, and those of every other path. A sample
 * (tests/sample.h) has every kind and every shape on each path, with a third of each other: kinds
 * differ where blocks are read, shapes where products are cut. */
static void same_bits(enum cpu_activations activations) {
    struct kern *kerns[PATH_COUNT];
    for (int path = 0; path < PATH_COUNT; path++) kerns[path] = open_as(path, activations);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        for (int d = 0; d < 2 * KINDS; d++) {
            const struct shape *s = &shapes[i];
            if (test_leaves_out(i + (size_t)d, 3)) continue;
            struct blocks m = blocks_of_form(s, d);
            float *want = product(kerns[1], s, &m.file);
            check_near(s, &m, want, activations, kinds[d / 2].name);
            for (int path = 0; path < PATH_COUNT; path++) {
                if (path == 1 || !kerns[path]) continue;
                float *got = product(kerns[path], s, &m.file);
                cr_assert(!memcmp(want, got, sizeof *got * (size_t)(s->rows * s->outputs)),
                          "%s, %s: %d x %d x %d", kerns[path]->ops->name, kinds[d / 2].name,
                          s->rows, s->outputs, s->cols);
                free(got);
            }
            free(want);
            blocks_close(&m);
        }
    }
    for (int path = 0; path < PATH_COUNT; path++)
        if (kerns[path]) kerns[path]->ops->close(kerns[path]);
}

Test(blocks, every_path_computes_the_same_bits) {
    same_bits(CPU_INT8);
    same_bits(CPU_INT16);
}

Test(blocks, by_weight_rounds_to_int8_beside_four_bits_alone) {
    const struct shape *s = &shapes[3];
    struct kern *by_weight = open_as(1, CPU_BY_WEIGHT);
    for (int d = 0; d < KINDS; d++) {
        const enum kern_dtype dtype = kinds[d].dtype;
        struct kern *narrow = open_as(1, CPU_INT8), *wide = open_as(1, CPU_INT16);
        struct blocks m = blocks_make(s->outputs, s->cols, &kinds[d], true, 5);
        float *got = product(by_weight, s, &m.file);
        float *as[2] = {product(narrow, s, &m.file), product(wide, s, &m.file)};
        const int want = block_is_narrow(dtype) ? 0 : 1;
        for (int i = 0; i < 2; i++)
            cr_assert_eq(!memcmp(as[i], got, sizeof *got * (size_t)s->outputs), i == want, "%s",
                         kinds[d].name);
        free(got), free(as[0]), free(as[1]);
        blocks_close(&m);
        narrow->ops->close(narrow);
        wide->ops->close(wide);
    }
    by_weight->ops->close(by_weight);
}

static void independent_rows(enum cpu_activations activations, enum kern_shard shard) {
    enum { ALL = 270, OUT = 67, COLS = 800 };
    static const int counts[] = {1, 2, 3, 4, 5, 6, 7, 16, 17, 33, 64, 257};
    for (int path = 1; path < PATH_COUNT; path++) {
        struct kern *kern = open_as(path, activations);
        if (!kern) continue;
        for (int d = 0; d < KINDS; d++) {
            if (test_leaves_out((size_t)(d + path), 3)) continue;
            struct blocks m = blocks_make(OUT, COLS, &kinds[d], true, 6);
            struct kern_weight *w = load(kern, &m.file, shard);
            float *x = inputs(ALL, COLS), *all = fresh((size_t)ALL * OUT, 0);
            float *some = fresh((size_t)ALL * OUT, 0);
            kern->ops->matmul(kern, all, x, w, NULL, ALL, KERN_SET);
            for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
                int first = (ALL - counts[i]) / 2;
                kern->ops->matmul(kern, some, x + first * COLS, w, NULL, counts[i], KERN_SET);
                cr_assert(
                    !memcmp(some, all + first * OUT, sizeof *some * (size_t)(counts[i] * OUT)),
                    "%s, %s: %d rows differ from the same among %d", kern->ops->name, kinds[d].name,
                    counts[i], ALL);
            }
            kern->ops->weight_free(kern, w);
            blocks_close(&m);
            free(x), free(all), free(some);
        }
        kern->ops->close(kern);
    }
}

Test(blocks, rows_are_independent) {
    independent_rows(CPU_INT8, KERN_SHARD_COLS);
    independent_rows(CPU_INT16, KERN_SHARD_COLS);
    independent_rows(CPU_BF16, KERN_SHARD_COLS);
    independent_rows(CPU_BF16, KERN_SHARD_NONE); /* leaves in several chunks (amx_matmul.c) */
}

/* ---- Activations in bf16 ---- */
/* Without tiles weights are multiplied as with int16. */

static bool on_tiles(const struct kern *kern) {
    return !strcmp(kern->ops->name, "cpu-amx-bf16");
}

/* Rows of the identity give each weight back, rounded to bf16. `rows_each`: in one product. */
static void every_number(struct kern *kern, const struct blocks *m, int rows_each) {
    const int64_t outputs = m->file.rows, cols = m->file.cols;
    float *x = calloc((size_t)(rows_each * cols), sizeof *x);
    float *y = calloc((size_t)(rows_each * outputs), sizeof *y);
    struct kern_weight *w = load(kern, &m->file, KERN_SHARD_NONE);
    for (int64_t k = 0; k < cols; k += rows_each) {
        memset(x, 0, (size_t)(rows_each * cols) * sizeof *x);
        for (int64_t r = 0; r < rows_each && k + r < cols; r++) x[r * cols + k + r] = 1;
        kern->ops->matmul(kern, y, x, w, NULL, rows_each, KERN_SET);
        for (int64_t i = 0; i < rows_each * outputs && k + i / outputs < cols; i++) {
            const float number = m->value[i % outputs * cols + k + i / outputs];
            const float want = number_from_bf16(number_to_bf16(number));
            cr_assert_eq(y[i], want, "%s: %d rows: %.9g, not %.9g", m->kind->name, rows_each,
                         (double)y[i], (double)want);
        }
    }
    kern->ops->weight_free(kern, w);
    free(x), free(y);
}

Test(blocks, bf16_rounds_each_number_once) {
    for (int path = 1; path < PATH_COUNT; path++) {
        struct kern *kern = open_as(path, CPU_BF16);
        if (!kern) continue;
        for (int d = 0; d < 2 * KINDS && on_tiles(kern); d++) {
            struct blocks m = blocks_make(118, 100, &kinds[d / 2], d % 2, 16);
            every_number(kern, &m, 1);
            every_number(kern, &m, 50);
            blocks_close(&m);
        }
        kern->ops->close(kern);
    }
}

Test(blocks, bf16_is_near_the_products_of_the_numbers) {
    for (int path = 1; path < PATH_COUNT; path++) {
        struct kern *kern = open_as(path, CPU_BF16);
        if (!kern) continue;
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
            for (int d = 0; d < 2 * KINDS; d++) {
                const struct shape *s = &shapes[i];
                if (test_leaves_out(i + (size_t)d, 3)) continue;
                struct blocks m = blocks_of_form(s, d);
                float *got = product(kern, s, &m.file);
                check_near(s, &m, got, on_tiles(kern) ? CPU_BF16 : CPU_INT16, kinds[d / 2].name);
                free(got);
                blocks_close(&m);
            }
        }
        kern->ops->close(kern);
    }
}

/* Leaves of 256 inputs are the same with and without blocks. */
Test(blocks, float_activations_give_the_products_of_the_numbers) {
    static const struct shape exact[] = {{1, 35, 2048, KERN_SHARD_COLS, true, true},
                                         {1, 130, 100, KERN_SHARD_NONE, false, false},
                                         {20, 67, 2048, KERN_SHARD_COLS, false, false},
                                         {300, 40, 96, KERN_SHARD_NONE, true, false}};
    for (int path = 0; path < PATH_COUNT; path++) {
        struct kern *kern = open_as(path, CPU_F32);
        if (!kern) continue;
        for (size_t i = 0; i < sizeof exact / sizeof *exact; i++) {
            for (int d = 0; d < KINDS; d++) {
                const struct shape *s = &exact[i];
                struct blocks m = blocks_make(s->outputs, s->cols, &kinds[d], i % 2, 7);
                struct kern_matrix floats = m.file;
                floats.data = m.value;
                floats.dtype = KERN_F32;
                float *want = product(kern, s, &floats), *got = product(kern, s, &m.file);
                cr_assert(!memcmp(want, got, sizeof *got * (size_t)(s->rows * s->outputs)),
                          "%s, %s: %d x %d x %d", kern->ops->name, kinds[d].name, s->rows,
                          s->outputs, s->cols);
                free(want), free(got);
                blocks_close(&m);
            }
        }
        kern->ops->close(kern);
    }
}

/* Every code with every sign of input at the ends of their ranges: sums that would overflow 16
 * bits. */
Test(blocks, extremes_do_not_overflow) {
    enum { OUT = 16, COLS = 64 };
    for (int path = 1; path < PATH_COUNT; path++) {
        struct kern *kern = open_as(path, CPU_INT8);
        if (!kern) continue;
        for (int d = 0; d < KINDS; d++) {
            struct blocks m = blocks_make(OUT, COLS, &kinds[d], true, 8);
            const int least = kinds[d].least, most = kinds[d].most;
            float x[2 * COLS], y[2 * OUT];
            for (int i = 0; i < OUT * COLS / KERN_BLOCK; i++) {
                block_set_factors(&m.data[i], 1, BLOCK_NO_LEAST);
                m.data[i].unit[0] = m.data[i].unit[1] = 1;
                for (int k = 0; k < KERN_BLOCK; k++)
                    m.data[i].n[k] = (int8_t)(i / (COLS / KERN_BLOCK) % 2 ? least : most);
            }
            for (int k = 0; k < COLS; k++) x[k] = 127, x[COLS + k] = -127;
            struct kern_weight *w = load(kern, &m.file, KERN_SHARD_NONE);
            kern->ops->matmul(kern, y, x, w, NULL, 2, KERN_SET);
            for (int o = 0; o < 2 * OUT; o++) {
                float want = (float)((o % 2 ? least : most) * COLS * 127 * (o < OUT ? 1 : -1));
                cr_assert_eq(y[o], want, "%s, %s: %d: %g not %g", kern->ops->name, kinds[d].name, o,
                             (double)y[o], (double)want);
            }
            kern->ops->weight_free(kern, w);
            blocks_close(&m);
        }
        kern->ops->close(kern);
    }
}

/* Blocks of zeros and of numbers too small for a scale are zero; one number that is not finite
 * makes its row NaN and no other. */
static void unusual_rows(enum cpu_activations activations) {
    enum { OUT = 20, COLS = 96, ROWS = 5 };
    for (int path = 1; path < PATH_COUNT; path++) {
        struct kern *kern = open_as(path, activations);
        if (!kern) continue;
        struct blocks m = blocks_make(OUT, COLS, &kinds[0], true, 9);
        struct kern_weight *w = load(kern, &m.file, KERN_SHARD_NONE);
        float x[ROWS * COLS] = {0}, y[ROWS * OUT];
        for (int k = 0; k < COLS; k++) x[COLS + k] = 0x1p-149f * (float)k, x[4 * COLS + k] = 1;
        x[2 * COLS + 40] = INFINITY;
        x[3 * COLS + 95] = NAN;
        kern->ops->matmul(kern, y, x, w, NULL, ROWS, KERN_SET);
        for (int o = 0; o < OUT; o++) {
            cr_assert(y[o] == 0 && y[OUT + o] == 0, "%s", kern->ops->name);
            const float infinite = y[2 * OUT + o]; /* in bf16 perhaps still */
            cr_assert(isnan(y[3 * OUT + o]), "%s", kern->ops->name);
            cr_assert(activations == CPU_BF16 ? !isfinite(infinite) : isnan(infinite), "%s",
                      kern->ops->name);
            cr_assert(isfinite(y[4 * OUT + o]), "%s", kern->ops->name);
        }
        kern->ops->weight_free(kern, w);
        blocks_close(&m);
        kern->ops->close(kern);
    }
}

Test(blocks, unusual_inputs) {
    unusual_rows(CPU_INT8);
    unusual_rows(CPU_INT16);
    unusual_rows(CPU_BF16);
}

/* In int8 the largest numbers of a group have 15 bits, so they leave the 8 bits of all others their
 * full range. Here each group has one, in another block and quad each time, the last group being
 * short. */
Test(blocks, the_largest_numbers_of_a_group_have_fifteen_bits) {
    enum { OUT = 16, GROUPS = 3, COLS = ((GROUPS - 1) * CPU_REST_GROUP + 3) * KERN_BLOCK };
    for (int path = 1; path < PATH_COUNT; path++) {
        struct kern *kern = open_as(path, CPU_INT8);
        if (!kern) continue;
        for (int d = 0; d < KINDS; d++) {
            struct blocks m = blocks_make(OUT, COLS, &kinds[d], true, 14);
            float x[COLS] = {0}, y[OUT];
            for (int k = 0; k < COLS; k++) x[k] = noise(15, (uint64_t)k);
            for (int g = 0; g < GROUPS; g++)
                x[(g * CPU_REST_GROUP + g) * KERN_BLOCK + 13 * g + 1] = g % 2 ? 100.0f : -99.5f;
            struct kern_weight *w = load(kern, &m.file, KERN_SHARD_NONE);
            kern->ops->matmul(kern, y, x, w, NULL, 1, KERN_SET);
            for (int o = 0; o < OUT; o++) {
                double sum = 0, magnitude = 0;
                for (int k = 0; k < COLS; k++) {
                    sum += (double)x[k] * (double)m.value[o * COLS + k];
                    magnitude += fabs((double)m.value[o * COLS + k]);
                }
                cr_assert(fabs(y[o] - sum) <= magnitude / 127, "%s, %s: %.9g not %.9g",
                          kern->ops->name, kinds[d].name, (double)y[o], sum);
            }
            kern->ops->weight_free(kern, w);
            blocks_close(&m);
        }
        kern->ops->close(kern);
    }
}

/* Rows of the product of a joined weight's part, with those of the other in between. */
static void check_part(struct kern *kern, const struct blocks *m, const float *x, const float *y,
                       const float *bias, int rows, int64_t all, const char *other) {
    const int64_t outputs = m->file.rows;
    float *own = fresh((size_t)(rows * outputs), 0);
    struct kern_weight *w = load(kern, &m->file, KERN_SHARD_ROWS);
    kern->ops->matmul(kern, own, x, w, bias, rows, KERN_SET);
    for (int r = 0; r < rows; r++)
        cr_assert(!memcmp(y + r * all, own + r * outputs, (size_t)outputs * sizeof *y),
                  "%s, %s beside %s: row %d of %d", kern->ops->name, m->kind->name, other, r, rows);
    kern->ops->weight_free(kern, w);
    free(own);
}

/* Parts of unlike types keep all of their numbers, and their products. */
Test(blocks, parts_are_joined_exactly) {
    enum { COLS = 72, ROWS = 19, INPUTS = 70 };
    for (int path = 0; path < PATH_COUNT; path++) {
        struct kern *kern = open_as(path, CPU_INT8);
        if (!kern) continue;
        float *x = inputs(INPUTS, COLS), *bias = fresh((size_t)2 * ROWS, 72);
        float *y = fresh((size_t)INPUTS * 2 * ROWS, 0);
        for (int pair = 0; pair < KINDS * KINDS; pair++) {
            if (test_leaves_out((size_t)(pair / KINDS + pair % KINDS), 4)) continue;
            const struct kind *first = &kinds[pair / KINDS];
            const struct kind *second = &kinds[pair % KINDS];
            struct blocks a = blocks_make(ROWS, COLS, first, true, 10);
            struct blocks b = blocks_make(ROWS, COLS, second, pair % 2, 11);
            struct kern_matrix parts[] = {a.file, b.file};
            struct kern_weight *w;
            float row[COLS];
            cr_assert_eq(kern->ops->weight_load(kern, parts, 2, KERN_SHARD_ROWS, &w, NULL), 0);
            for (int32_t r = 0; r < 2 * ROWS; r++) {
                const float *want = r < ROWS ? a.value + r * COLS : b.value + (r - ROWS) * COLS;
                kern->ops->embed(kern, row, w, 1, &r, 1);
                for (int k = 0; k < COLS; k++)
                    cr_assert(row[k] == want[k], "%s and %s, row %d: %g not %g", first->name,
                              second->name, r, (double)row[k], (double)want[k]);
            }
            const int rows = pair % 3 == 0 ? 1 : pair % 3 == 1 ? 5 : INPUTS;
            kern->ops->matmul(kern, y, x, w, bias, rows, KERN_SET);
            check_part(kern, &a, x, y, bias, rows, 2 * ROWS, second->name);
            check_part(kern, &b, x, y + ROWS, bias + ROWS, rows, 2 * ROWS, first->name);
            kern->ops->weight_free(kern, w);
            blocks_close(&a);
            blocks_close(&b);
        }
        kern->ops->close(kern);
        free(x), free(bias), free(y);
    }
}

/* Hands on blocks that lie in memory, as a reader of a file does that makes them. */
struct copying {
    struct kern_reader reader;
    const struct blocks *from;
    _Atomic int64_t done;
};

static void copying_read(struct kern_reader *base, int64_t row, struct block *to) {
    struct copying *reader = (struct copying *)(void *)base;
    cr_assert(row >= 0 && row < reader->from->file.rows);
    memcpy(to, reader->from->data + row * base->row_blocks, (size_t)base->row_blocks * sizeof *to);
}

static void copying_done(struct kern_reader *base, int64_t first, int64_t count) {
    struct copying *reader = (struct copying *)(void *)base;
    cr_assert(first >= 0 && first + count <= reader->from->file.rows);
    reader->done += count;
}

static struct kern_matrix copying_open(struct copying *reader, const struct blocks *from) {
    struct kern_matrix m = from->file;
    *reader =
        (struct copying){.reader = {copying_read, copying_done, blocks_of(m.cols)}, .from = from};
    m.data = NULL;
    m.reader = &reader->reader;
    return m;
}

/* Two matrices that lie alike and one that does not, made row by row, are those in memory. */
Test(blocks, rows_may_be_made_when_they_are_wanted) {
    enum { COLS = 72, ROWS = 600, PARTS = 3 };
    for (int path = 0; path < PATH_COUNT; path++) {
        struct kern *kern = open_as(path, CPU_INT8);
        if (!kern) continue;
        struct blocks from[PARTS] = {blocks_make(ROWS, COLS, &kinds[0], true, 21),
                                     blocks_make(ROWS, COLS, &kinds[0], true, 22),
                                     blocks_make(ROWS, COLS, &kinds[2], true, 23)};
        struct copying readers[PARTS];
        struct kern_matrix parts[PARTS];
        struct kern_weight *w;
        float row[COLS];
        for (int i = 0; i < PARTS; i++) parts[i] = copying_open(&readers[i], &from[i]);
        cr_assert_eq(kern->ops->weight_load(kern, parts, PARTS, KERN_SHARD_ROWS, &w, NULL), 0);
        for (int32_t r = 0; r < PARTS * ROWS; r++) {
            kern->ops->embed(kern, row, w, 1, &r, 1);
            for (int k = 0; k < COLS; k++)
                cr_assert(row[k] == from[r / ROWS].value[r % ROWS * COLS + k], "row %d", r);
        }
        kern->ops->weight_free(kern, w);
        for (int i = 0; i < PARTS; i++) {
            cr_assert_eq(readers[i].done, ROWS);
            blocks_close(&from[i]);
        }
        kern->ops->close(kern);
    }
}

/* A part's factor multiplies whole sums, and looked-up rows. */
Test(blocks, factors_of_parts) {
    enum { COLS = 72, ROWS = 19, INPUTS = 7 };
    const float factor = 0.3f;
    for (int path = 0; path < PATH_COUNT; path++) {
        struct kern *kern = open_as(path, CPU_INT8);
        if (!kern) continue;
        float *x = inputs(INPUTS, COLS), row[2][COLS];
        float *y[] = {fresh((size_t)INPUTS * 2 * ROWS, 0), fresh((size_t)INPUTS * 2 * ROWS, 0)};
        for (int k = 0; k < KINDS; k++) {
            struct blocks a = blocks_make(ROWS, COLS, &kinds[k], true, 10);
            struct blocks b = blocks_make(ROWS, COLS, &kinds[KINDS - 1 - k], true, 11);
            struct kern_matrix parts[] = {a.file, b.file};
            struct kern_weight *w[2];
            for (int i = 0; i < 2; i++) {
                parts[1].factor = i ? factor : 0;
                cr_assert_eq(kern->ops->weight_load(kern, parts, 2, KERN_SHARD_ROWS, &w[i], NULL),
                             0);
                kern->ops->matmul(kern, y[i], x, w[i], NULL, INPUTS, KERN_SET);
            }
            for (int i = 0; i < INPUTS * 2 * ROWS; i++)
                cr_assert_eq(y[1][i], i % (2 * ROWS) < ROWS ? y[0][i] : y[0][i] * factor);
            const int32_t last = 2 * ROWS - 1;
            for (int i = 0; i < 2; i++) kern->ops->embed(kern, row[i], w[i], 1, &last, 1);
            for (int i = 0; i < COLS; i++) cr_assert_eq(row[1][i], row[0][i] * factor);
            for (int i = 0; i < 2; i++) kern->ops->weight_free(kern, w[i]);
            blocks_close(&a), blocks_close(&b);
        }
        kern->ops->close(kern);
        free(x), free(y[0]), free(y[1]);
    }
}

/* Each head's matrix has the form that holds its numbers; the memory of products is enough for all.
 */
Test(blocks, heads_may_have_unlike_forms) {
    enum { RANK = 1024, OUT = 16, HEADS = 3, ROWS = 70 };
    const int of_head[HEADS] = {0, 6, 2}; /* kinds: q8, then numbers of 5 and of 4 bits */
    for (int path = 0; path < PATH_COUNT; path++) {
        struct kern *kern = open_as(path, CPU_INT8);
        if (!kern) continue;
        struct blocks from[HEADS];
        struct kern_weight *weights[HEADS];
        const struct kern_latent latent = {
            .heads = HEADS, .rank = RANK, .dim_v = OUT, .up_v = weights};
        float *x = inputs(ROWS, HEADS * RANK), *y = fresh((size_t)ROWS * HEADS * OUT, 0);
        float *own = fresh((size_t)ROWS * RANK, 0), *want = fresh((size_t)ROWS * OUT, 0);
        for (int h = 0; h < HEADS; h++) {
            from[h] = blocks_make(OUT, RANK, &kinds[of_head[h]], true, 30 + (uint64_t)h);
            weights[h] = load(kern, &from[h].file, KERN_SHARD_NONE);
        }
        cr_assert_eq(kern->ops->latent_reserve(kern, weights, HEADS), 0);
        kern->ops->latent_out(kern, y, x, &latent, ROWS);
        for (int h = 0; h < HEADS; h++) {
            for (int r = 0; r < ROWS; r++)
                memcpy(own + r * RANK, x + (r * HEADS + h) * RANK, RANK * sizeof *own);
            kern->ops->matmul(kern, want, own, weights[h], NULL, ROWS, KERN_SET);
            for (int r = 0; r < ROWS; r++)
                cr_assert(!memcmp(y + (r * HEADS + h) * OUT, want + r * OUT, OUT * sizeof *y),
                          "%s: head %d row %d", kern->ops->name, h, r);
            kern->ops->weight_free(kern, weights[h]);
            blocks_close(&from[h]);
        }
        free(x), free(y), free(own), free(want);
        kern->ops->close(kern);
    }
}

/* A joined weight that is partly loaded is freed. */
Test(blocks, every_allocation_of_a_joined_weight_may_fail) {
    struct blocks a = blocks_make(19, 72, &kinds[0], true, 10);
    struct blocks b = blocks_make(19, 72, &kinds[2], true, 11);
    struct copying reader;
    struct kern_matrix parts[] = {a.file, copying_open(&reader, &b)};
    int failures = 0;
    for (bool loaded = false; !loaded; failures++) {
        struct kern *kern = open_as(1, CPU_INT8);
        struct kern_weight *w = NULL;
        struct fault fault = {0};
        mem_fail_after(failures);
        const int rc = kern->ops->weight_load(kern, parts, 2, KERN_SHARD_ROWS, &w, &fault);
        loaded = mem_fail_pending();
        mem_fail_after(-1);
        cr_assert_eq(rc, loaded ? 0 : ERR_NOMEM, "allocation %d: %d", failures, rc);
        cr_assert_eq(fault.code, rc);
        if (loaded) kern->ops->weight_free(kern, w);
        kern->ops->close(kern);
    }
    cr_assert_gt(failures, 6);
    blocks_close(&a);
    blocks_close(&b);
}

/* A layout is as small as its name says. */
Test(blocks, bits_per_number) {
    struct kern *kern = open_as(1, CPU_INT8);
    for (int d = 0; d < 2 * KINDS; d++) {
        struct blocks m = blocks_make(32, 1024, &kinds[d / 2], d % 2, 12);
        struct kern_weight *w = load(kern, &m.file, KERN_SHARD_NONE);
        cr_assert_eq((double)w->panel_bytes * 8 / (1024 * PANEL), kinds[d / 2].bits[d % 2], "%s",
                     kinds[d / 2].name);
        kern->ops->weight_free(kern, w);
        blocks_close(&m);
    }
    kern->ops->close(kern);
}

/* The layout is chosen by the numbers of a whole matrix, and a rank has a part of it. */
static void same_in_other_layouts(enum cpu_activations activations, const struct kind *kind) {
    const struct shape *s = &shapes[5];
    struct kern *kern = open_as(1, activations);
    struct blocks m = blocks_make(s->outputs, s->cols, kind, true, 17);
    float *want = product(kern, s, &m.file);
    for (int64_t i = 0; i < s->outputs * blocks_of(s->cols); i++)
        m.data[i].unit[0] = m.data[i].unit[1] = 0;
    float *single = product(kern, s, &m.file);
    m.data[0].n[0] = (int8_t)(kind->least - 1); /* changes the first output alone */
    float *wide = product(kern, s, &m.file);
    for (int i = 0; i < s->rows * s->outputs; i++) {
        cr_assert_eq(number_bits(single[i]), number_bits(want[i]), "%s: %d", kind->name, i);
        cr_assert(i % s->outputs == 0 || number_bits(wide[i]) == number_bits(want[i]), "%s: %d",
                  kind->name, i);
    }
    free(want), free(single), free(wide);
    blocks_close(&m);
    kern->ops->close(kern);
}

Test(blocks, layouts_do_not_change_products) {
    for (int d = 6; d < KINDS; d++) {
        if (block_is_narrow(kinds[d].dtype)) continue; /* narrow types have no wider layout */
        same_in_other_layouts(CPU_INT8, &kinds[d]);
        same_in_other_layouts(CPU_INT16, &kinds[d]);
    }
}
