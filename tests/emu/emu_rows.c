/* Everything that works on rows, and products: the CUDA kernels against the CPU's reference path,
 * every output checked as written. */
#include <criterion/criterion.h>

#include "both.h"
#include "kernels/number.h"
#include "kernels/quantize.h"

#define ROWS 5

static void round_all(float *x, size_t count) {
    for (size_t i = 0; i < count; i++) x[i] = number_from_bf16(number_to_bf16(x[i]));
}

/* Rounds rows of activations as a backend that multiplies in E4M3 does. */
static float *round_rows(const float *x, int64_t cols) {
    const struct kern_matrix rows = {.data = x, .dtype = KERN_F32, .rows = ROWS, .cols = cols};
    float *out = malloc((size_t)(ROWS * cols) * sizeof *out), scales[ROWS];
    uint8_t *codes = malloc((size_t)(ROWS * cols));
    MUST(quantize_rows(&rows, codes, scales, NULL, NULL));
    for (int64_t i = 0; i < ROWS * cols; i++)
        out[i] = number_from_e4m3(codes[i]) * scales[i / cols];
    free(codes);
    return out;
}

static const float row_scales[32] = {1,    0.3f, 2e-4f, 7,    1, 1,    0.11f, 1, 1, 1,   1,
                                     0.5f, 1,    1,     1,    3, 0.9f, 1,     1, 1, 1,   1,
                                     1,    1,    1,     0.7f, 1, 1,    1,     1, 1, 2.5f};

/* A matrix of a file in `dtype`, one byte off: files promise no alignment. */
static struct kern_matrix make_matrix(int64_t rows, int64_t cols, enum kern_dtype dtype,
                                      uint64_t seed, char **mem) {
    size_t count = (size_t)(rows * cols), size = kern_dtype_bytes(dtype);
    *mem = malloc(count * size + 1);
    for (size_t i = 0; i < count; i++) {
        float x = noise(seed, i);
        uint16_t half = number_to_bf16(x);
        if (dtype == KERN_F16) half = (uint16_t)(0x3800 | (mix(seed + i) & 0x83ff)); /* +-0.5..1 */
        if (dtype == KERN_E4M3)
            (*mem)[1 + i] = (char)number_to_e4m3(x);
        else if (dtype == KERN_F32)
            memcpy(*mem + 1 + i * size, &x, size);
        else
            memcpy(*mem + 1 + i * size, &half, size);
    }
    return (struct kern_matrix){.data = *mem + 1,
                                .dtype = dtype,
                                .rows = rows,
                                .cols = cols,
                                .scale = dtype == KERN_E4M3 ? row_scales : NULL};
}

struct results {
    float *of[BACKENDS];
};

static void compare(struct results *r, size_t count, double absolute, double relative,
                    const char *what) {
    expect_near(r->of[ORACLE], r->of[EMULATED], count, absolute, relative, what);
    free(r->of[ORACLE]), free(r->of[EMULATED]);
}

static void check_rows(struct kern *kern[BACKENDS], int dim) {
    static const int32_t index[] = {4, 0, 0, 3};
    size_t count = (size_t)(ROWS * dim);
    float *x = fresh(2 * count, (uint64_t)dim), *w = fresh((size_t)dim, 50);
    struct results norm, glu, gelu, apart, own, sum, gathered;
    for (int b = 0; b < BACKENDS; b++) {
        const struct kern_ops *ops = kern[b]->ops;
        float *in = put(kern[b], x, 2 * count), *weight = put(kern[b], w, (size_t)dim);
        float *y = put(kern[b], NULL, count), *z = put(kern[b], NULL, count);
        float *g = put(kern[b], NULL, (size_t)(4 * dim));
        ops->rms_norm(kern[b], y, in, weight, ROWS, dim, 1e-6f);
        float *v = put(kern[b], NULL, count), *a = put(kern[b], x + count, count);
        float *branch = put(kern[b], x, count);
        ops->glu(kern[b], z, in, ROWS, dim, KERN_SILU);
        ops->glu(kern[b], v, in, ROWS, dim, KERN_GELU_TANH);
        /* Gates and what they open apart, the latter in rows of another width; squares of what is
           above 0, scaled. */
        float *p = put(kern[b], NULL, count), *r = put(kern[b], NULL, count);
        ops->glu_apart(kern[b], p, in, in + dim / 2, dim + dim / 3, ROWS - 1, dim, KERN_GELU_TANH);
        ops->glu_apart(kern[b], p + (ROWS - 1) * dim, in, in + dim, dim, 1, dim, KERN_SILU);
        ops->glu_apart(kern[b], r, in, in, dim, ROWS, dim, KERN_RELU);
        ops->scale(kern[b], r, weight, ROWS, dim);
        ops->add(kern[b], r, in, ROWS, dim);
        ops->add_norm(kern[b], a, branch, weight, ROWS, dim, 1e-6f);
        ops->gather_rows(kern[b], g, in, index, 4, dim);
        norm.of[b] = take(kern[b], y, count);
        glu.of[b] = take(kern[b], z, count);
        gelu.of[b] = take(kern[b], v, count);
        apart.of[b] = take(kern[b], p, count);
        own.of[b] = take(kern[b], r, count);
        sum.of[b] = take(kern[b], a, count);
        gathered.of[b] = take(kern[b], g, (size_t)(4 * dim));
        ops->mem_free(kern[b], in);
        ops->mem_free(kern[b], branch);
        ops->mem_free(kern[b], weight);
    }
    compare(&norm, count, 1e-6, 1e-5, "norm");
    compare(&glu, count, 1e-7, 1e-6, "glu");
    compare(&gelu, count, 1e-7, 1e-5, "glu with gelu");
    compare(&apart, count, 1e-7, 1e-5, "glu of arrays apart");
    compare(&own, count, 1e-7, 1e-6, "squares above 0");
    compare(&sum, count, 1e-6, 1e-5, "add_norm");
    compare(&gathered, (size_t)(4 * dim), 0, 0, "gather");
    free(x), free(w);
}

static struct kern_weight *load(struct kern *kern, int64_t rows, int64_t cols,
                                enum kern_dtype dtype) {
    char *mem;
    struct kern_weight *weight;
    const struct kern_matrix file = make_matrix(rows, cols, dtype, 3, &mem);
    MUST(kern->ops->weight_load(kern, &file, 1, KERN_SHARD_ROWS, &weight, NULL));
    free(mem);
    return weight;
}

/* For a model in bf16 and for one in fp8, which rounds other numbers on the way and not at every
 * width. */
Test(emu_rows, norm_glu_gather) {
    static const int dims[] = {1, 2, 31, 64, 257, 640, 1030, 2064, 4112};
    struct kern *kern[BACKENDS];
    struct kern_weight *fp8[BACKENDS] = {NULL};
    both_open(kern);
    for (size_t d = 0; d < 2 * sizeof dims / sizeof *dims; d++) {
        emu_set_seed(d);
        if (d == sizeof dims / sizeof *dims)
            for (int b = 0; b < BACKENDS; b++) fp8[b] = load(kern[b], 16, 16, KERN_E4M3);
        check_rows(kern, dims[d % (sizeof dims / sizeof *dims)]);
    }
    for (int b = 0; b < BACKENDS; b++) kern[b]->ops->weight_free(kern[b], fp8[b]);
    both_close(kern);
}

/* The CPU's reference multiplies the activations that it is given: those that the device rounds
 * them to, so that only the order of sums differs. */
static void check_matmul_by(struct kern *kern[BACKENDS], enum kern_dtype dtype, int64_t cols,
                            float factor) {
    enum { OUT = 32, PART = 13 };
    char *mem[2];
    struct kern_matrix parts[] = {make_matrix(PART, cols, dtype, 5, &mem[0]),
                                  make_matrix(OUT - PART, cols, dtype, 6, &mem[1])};
    parts[1].factor = factor;
    float *x = fresh((size_t)(ROWS * cols), 7), *bias = fresh(OUT, 8), *old = fresh(ROWS * OUT, 9);
    if (dtype != KERN_E4M3) round_all(x, (size_t)(ROWS * cols));
    float *rounded = dtype == KERN_E4M3 ? round_rows(x, cols) : NULL;
    struct results set, added, embedded;
    static const int32_t ids[] = {20, 0, 7, 8, 7};
    for (int b = 0; b < BACKENDS; b++) {
        const struct kern_ops *ops = kern[b]->ops;
        struct kern_weight *weight;
        MUST(ops->weight_load(kern[b], parts, 2, KERN_SHARD_ROWS, &weight, NULL));
        const float *own = rounded && b == ORACLE ? rounded : x;
        float *in = put(kern[b], own, (size_t)(ROWS * cols)), *at = put(kern[b], bias, OUT);
        float *y = put(kern[b], NULL, ROWS * OUT), *z = put(kern[b], old, ROWS * OUT);
        float *e = put(kern[b], NULL, (size_t)(ROWS * cols));
        ops->matmul(kern[b], y, in, weight, at, ROWS, KERN_SET);
        ops->matmul(kern[b], z, in, weight, NULL, ROWS, KERN_ADD);
        const bool table = !rounded && factor == 0; /* factors are of products alone */
        if (table) ops->embed(kern[b], e, weight, 3, ids, ROWS);
        if (!table) MUST(ops->upload(kern[b], e, x, (size_t)(ROWS * cols) * sizeof *x));
        set.of[b] = take(kern[b], y, ROWS * OUT);
        added.of[b] = take(kern[b], z, ROWS * OUT);
        embedded.of[b] = take(kern[b], e, (size_t)(ROWS * cols));
        ops->mem_free(kern[b], in);
        ops->mem_free(kern[b], at);
        ops->weight_free(kern[b], weight);
    }
    compare(&set, ROWS * OUT, 1e-6 * (double)cols, 0, "product");
    compare(&added, ROWS * OUT, 1e-6 * (double)cols, 0, "product added");
    compare(&embedded, (size_t)(ROWS * cols), 0, 0, "embedding");
    free(mem[0]), free(mem[1]), free(x), free(bias), free(old), free(rounded);
}

static void check_matmul(struct kern *kern[BACKENDS], enum kern_dtype dtype, int64_t cols) {
    check_matmul_by(kern, dtype, cols, 0);
}

/* One part has a factor; the device multiplies it into the numbers, which a power of 2 does not
 * round. */
Test(emu_rows, products_with_a_factor) {
    static const enum kern_dtype dtypes[] = {KERN_BF16, KERN_F16, KERN_F32};
    struct kern *kern[BACKENDS];
    both_open(kern);
    for (int d = 0; d < 3; d++) check_matmul_by(kern, dtypes[d], 33, 0.25f);
    check_matmul_by(kern, KERN_F32, 33, 0.3f);
    check_matmul_by(kern, KERN_E4M3, 48, 0.3f);
    both_close(kern);
}

Test(emu_rows, products_and_embedding) {
    static const enum kern_dtype dtypes[] = {KERN_BF16, KERN_F16, KERN_F32};
    struct kern *kern[BACKENDS];
    both_open(kern);
    for (int d = 0; d < 3; d++) {
        check_matmul(kern, dtypes[d], 33);
        check_matmul(kern, dtypes[d], 128);
    }
    check_matmul(kern, KERN_E4M3, 48);
    check_matmul(kern, KERN_E4M3, 1040);
    both_close(kern);
}

/* Inputs that are cut into parts: two of 1,024 and eight of 1,024. Beside the reference, a row's
 * bits are the same in any company: with the parts multiplied at once, and one after the other;
 * added to y, and with a bias. */
static void check_parts(struct kern *kern[BACKENDS], int64_t cols, enum kern_matmul_mode mode) {
    enum { OUT = 16, MOST = 300 };
    static const int counts[] = {1, 7, 256, 257};
    char *mem;
    const struct kern_matrix file = make_matrix(OUT, cols, KERN_BF16, 3, &mem);
    float *x = fresh((size_t)(MOST * cols), 7), *bias = fresh(OUT, 8), *old = fresh(MOST * OUT, 9);
    float *all[BACKENDS], *some;
    round_all(x, (size_t)(MOST * cols));
    for (int b = 0; b < BACKENDS; b++) {
        const struct kern_ops *ops = kern[b]->ops;
        struct kern_weight *weight;
        MUST(ops->weight_load(kern[b], &file, 1, KERN_SHARD_COLS, &weight, NULL));
        float *in = put(kern[b], x, (size_t)(MOST * cols)), *at = put(kern[b], bias, OUT);
        float *y = put(kern[b], old, MOST * OUT);
        ops->matmul(kern[b], y, in, weight, at, MOST, mode);
        all[b] = take(kern[b], y, MOST * OUT);
        for (size_t c = 0; b == EMULATED && c < sizeof counts / sizeof *counts; c++) {
            int first = MOST - counts[c];
            float *part = put(kern[b], x + first * cols, (size_t)(counts[c] * cols));
            y = put(kern[b], old + (size_t)(first * OUT), (size_t)(counts[c] * OUT));
            ops->matmul(kern[b], y, part, weight, at, counts[c], mode);
            some = take(kern[b], y, (size_t)(counts[c] * OUT));
            cr_assert(!memcmp(some, all[b] + (size_t)(first * OUT),
                              (size_t)(counts[c] * OUT) * sizeof *some),
                      "%d rows", counts[c]);
            ops->mem_free(kern[b], part);
            free(some);
        }
        ops->mem_free(kern[b], in);
        ops->mem_free(kern[b], at);
        ops->weight_free(kern[b], weight);
    }
    expect_near(all[ORACLE], all[EMULATED], MOST * OUT, 1e-6 * (double)cols, 0, "product");
    free(mem), free(x), free(bias), free(old), free(all[ORACLE]), free(all[EMULATED]);
}

Test(emu_rows, parts_of_products_are_added_in_order) {
    struct kern *kern[BACKENDS];
    both_open(kern);
    check_parts(kern, 2048, KERN_SET);
    check_parts(kern, 2048, KERN_ADD);
    check_parts(kern, 8192, KERN_ADD);
    both_close(kern);
}

/* A library that multiplies parts at once alone, and one that never does: then inputs stay whole.
 */
Test(emu_rows, products_are_cut_as_the_library_allows) {
    static const char *const batches[] = {"only", "none"};
    for (size_t i = 0; i < sizeof batches / sizeof *batches; i++) {
        struct kern *kern[BACKENDS];
        setenv("KEEPD_EMU_BATCHES", batches[i], 1);
        both_open(kern);
        check_parts(kern, 2048, KERN_SET);
        check_parts(kern, 8192, KERN_ADD);
        both_close(kern);
    }
    unsetenv("KEEPD_EMU_BATCHES");
}

/* Writes y, multiplies it, and says how many operations that took. */
struct turn {
    struct kern *kern;
    const struct kern_weight *weight;
    float *in, *norm, *y; /* norm NULL: an activation */
    int cols;
};

static void write_y(const struct turn *t) {
    const struct kern_ops *ops = t->kern->ops;
    if (t->norm)
        ops->rms_norm(t->kern, t->y, t->in, t->norm, ROWS, t->cols, 1e-6f);
    else
        ops->glu(t->kern, t->y, t->in, ROWS, t->cols, KERN_SILU);
}

/* y as it is, or what `other` has, written by the host: in any case no longer what was rounded. */
static void write_again(const struct turn *t, const float *other) {
    size_t bytes = (size_t)(ROWS * t->cols) * sizeof(float);
    float *same = malloc(bytes);
    MUST(t->kern->ops->download(t->kern, same, t->y, bytes));
    MUST(t->kern->ops->upload(t->kern, t->y, other ? other : same, bytes));
    free(same);
}

enum { TURN_OUT = 16 };

static float *multiply_y(const struct turn *t, float *z, int rows, int *operations) {
    uint64_t before = cuda_queued(t->kern);
    t->kern->ops->matmul(t->kern, z, t->y, t->weight, NULL, rows, KERN_SET);
    *operations = (int)(cuda_queued(t->kern) - before);
    return take(t->kern, z, (size_t)(rows * TURN_OUT));
}

static void check_rounding(const struct turn *t, const float *other, int product) {
    enum { FUSED, APART, CHANGED, FEWER, TURNS };
    float *got[TURNS];
    int operations[TURNS];
    free(multiply_y(t, put(t->kern, NULL, ROWS * TURN_OUT), ROWS,
                    operations)); /* allocates the memory of its sums */
    for (int i = 0; i < TURNS; i++) {
        int rows = i == FEWER ? 2 : ROWS;
        float *z = put(t->kern, NULL, (size_t)(rows * TURN_OUT));
        write_y(t);
        if (i == APART) write_again(t, NULL);
        if (i == CHANGED) write_again(t, other);
        got[i] = multiply_y(t, z, rows, &operations[i]);
    }
    cr_assert_eq(operations[FUSED], product, "%d operations", operations[FUSED]);
    for (int i = APART; i < TURNS; i++) cr_assert_gt(operations[i], product);
    cr_assert(!memcmp(got[FUSED], got[APART], ROWS * TURN_OUT * sizeof(float)));
    cr_assert(!memcmp(got[FUSED], got[FEWER], 2 * TURN_OUT * sizeof(float)));
    cr_assert(memcmp(got[FUSED], got[CHANGED], ROWS * TURN_OUT * sizeof(float)) != 0);
    for (int i = 0; i < TURNS; i++) free(got[i]);
}

/* A product of what the last norm or activation wrote takes what they rounded on the way: the same
 * bits as when it rounds by itself, and never those of anything else. */
static void check_products_after(enum kern_dtype dtype, int cols) {
    struct fault fault = {0};
    struct cuda_options cuda = {.device = 0};
    struct kern *kern;
    cr_assert_eq(cuda_open(&cuda, &kern, &fault), 0, "%s", fault.text);
    const struct kern_ops *ops = kern->ops;
    size_t count = (size_t)(ROWS * cols);
    float *x = fresh(2 * count, 4), *w = fresh((size_t)cols, 5), *other = fresh(count, 6);
    for (int i = 0; i < cols; i++) x[cols + i] = 0; /* a row without a scale of its own */
    float *norm = put(kern, w, (size_t)cols);
    struct turn t = {.kern = kern,
                     .weight = load(kern, TURN_OUT, cols, dtype),
                     .in = put(kern, x, 2 * count),
                     .y = put(kern, NULL, count),
                     .cols = cols};
    int product = dtype != KERN_E4M3 && cols > 2048 ? 2 : 1; /* with parts, their sum is one more */
    write_y(&t);
    check_rounding(&t, other, product);
    t.norm = norm;
    check_rounding(&t, other, product);
    ops->mem_free(kern, t.in);
    ops->mem_free(kern, t.y);
    ops->mem_free(kern, norm);
    ops->weight_free(kern, (struct kern_weight *)t.weight);
    ops->close(kern);
    free(x), free(w), free(other);
}

Test(emu_rows, norms_and_activations_round_for_the_product_after_them) {
    static const int widths[] = {16, 48, 1040, 4112};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        emu_set_seed(i);
        check_products_after(KERN_BF16, widths[i]);
        check_products_after(KERN_E4M3, widths[i]);
        check_products_after(KERN_F16, widths[i]);
    }
}

/* Numbers rounded for fp8 layers are not used by a bf16 product, such as the LM head's. */
Test(emu_rows, a_product_takes_its_own_numbers_alone) {
    enum { COLS = 48, OUT = 16 };
    struct kern *kern[BACKENDS];
    struct kern_weight *fp8[BACKENDS], *head[BACKENDS];
    float *x = fresh(ROWS * COLS, 4), *w = fresh(COLS, 5);
    struct results r;
    both_open(kern);
    for (int b = 0; b < BACKENDS; b++) {
        const struct kern_ops *ops = kern[b]->ops;
        head[b] = load(kern[b], OUT, COLS, KERN_BF16);
        fp8[b] = load(kern[b], OUT, COLS, KERN_E4M3);
        float *in = put(kern[b], x, ROWS * COLS), *norm = put(kern[b], w, COLS);
        float *y = put(kern[b], NULL, ROWS * COLS), *z = put(kern[b], NULL, ROWS * OUT);
        ops->rms_norm(kern[b], y, in, norm, ROWS, COLS, 1e-6f);
        ops->matmul(kern[b], z, y, head[b], NULL, ROWS, KERN_SET);
        r.of[b] = take(kern[b], z, ROWS * OUT);
        float *buffers[] = {in, norm, y};
        for (int i = 0; i < 3; i++) ops->mem_free(kern[b], buffers[i]);
        ops->weight_free(kern[b], head[b]);
        ops->weight_free(kern[b], fp8[b]);
    }
    compare(&r, ROWS * OUT, 0.05, 0, "product"); /* activations in bf16, not in fp8 */
    both_close(kern);
    free(x), free(w);
}

/* Rows of zeros, of numbers too small for a scale, and of one large number. */
Test(emu_rows, activations_in_e4m3) {
    enum { OUT = 16, COLS = 32 };
    struct kern *kern[BACKENDS];
    both_open(kern);
    char *mem;
    const struct kern_matrix file = make_matrix(OUT, COLS, KERN_E4M3, 3, &mem);
    float *x = calloc(ROWS * COLS, sizeof *x);
    for (int i = 0; i < COLS; i++) x[COLS + i] = 1e-42f, x[2 * COLS + i] = noise(4, (uint64_t)i);
    x[2 * COLS + 5] = 3e30f;
    x[3 * COLS] = -1;
    float *rounded = round_rows(x, COLS);
    struct results r;
    for (int b = 0; b < BACKENDS; b++) {
        struct kern_weight *weight;
        MUST(kern[b]->ops->weight_load(kern[b], &file, 1, KERN_SHARD_ROWS, &weight, NULL));
        float *in = put(kern[b], b == ORACLE ? rounded : x, ROWS * COLS);
        float *y = put(kern[b], NULL, ROWS * OUT);
        kern[b]->ops->matmul(kern[b], y, in, weight, NULL, ROWS, KERN_SET);
        r.of[b] = take(kern[b], y, ROWS * OUT);
        kern[b]->ops->mem_free(kern[b], in);
        kern[b]->ops->weight_free(kern[b], weight);
    }
    compare(&r, ROWS * OUT, 1e-7, 1e-5, "product");
    free(mem), free(x), free(rounded);
    both_close(kern);
}

/* Shapes for which cuBLASLt has no fp8 products are rejected when they are loaded. */
Test(emu_rows, sizes_that_have_no_e4m3_product_are_refused) {
    static const int64_t sizes[][2] = {{16, 40}, {24, 32}, {1, 16}};
    struct kern *kern[BACKENDS];
    both_open(kern);
    for (int i = 0; i < 3; i++) {
        char *mem;
        struct fault fault = {0};
        struct kern_weight *weight = NULL;
        const struct kern_matrix file = make_matrix(sizes[i][0], sizes[i][1], KERN_E4M3, 3, &mem);
        int rc = kern[EMULATED]->ops->weight_load(kern[EMULATED], &file, 1, KERN_SHARD_ROWS,
                                                  &weight, &fault);
        cr_assert_eq(rc, ERR_UNSUPPORTED);
        cr_assert_str_eq(fault.field, "quantization");
        cr_assert(strstr(fault.text, "multiples of 16"), "%s", fault.text);
        free(mem);
    }
    both_close(kern);
}

struct gate_shape {
    int width, model, heads, embeddings;
    bool second;
};

enum { GATE_ROWS = 5 }; /* rows of `last` */

static struct kern_gate *load_gate(struct kern *kern, const struct gate_shape *g) {
    size_t width = (size_t)g->width, first = width * (size_t)g->embeddings;
    float *w1 = fresh(first * (size_t)g->model, 1), *b1 = fresh(first, 2);
    float *w2 = fresh(width * width, 3), *b2 = fresh(width, 4);
    float *last = fresh(GATE_ROWS * width, 5), *bias = fresh(GATE_ROWS, 6);
    const int32_t row[] = {4, 0, 4, 1, 2, 3, 0, 1};
    const struct kern_gate_spec spec = {.w1 = w1,
                                        .b1 = b1,
                                        .w2 = g->second ? w2 : NULL,
                                        .b2 = g->second ? b2 : NULL,
                                        .last = last,
                                        .bias = bias,
                                        .row = row,
                                        .width = g->width,
                                        .d_model = g->model,
                                        .heads_kv = g->heads,
                                        .row_count = GATE_ROWS,
                                        .embeddings = g->embeddings};
    struct kern_gate *gate;
    MUST(kern->ops->gate_load(kern, &spec, &gate, NULL));
    free(w1), free(b1), free(w2), free(b2), free(last), free(bias);
    return gate;
}

static float *run_gate(struct kern *kern, const struct kern_gate *gate, const struct gate_shape *g,
                       const float *x, int rows) {
    size_t scores = (size_t)(rows * g->heads);
    float *in = put(kern, x, (size_t)(rows * g->model)), *out = put(kern, NULL, scores);
    kern->ops->gate(kern, out, in, gate, rows);
    float *got = take(kern, out, scores);
    kern->ops->mem_free(kern, in);
    return got;
}

/* Odd sizes, so that rows begin anywhere; parts of 128 inputs, the last one shorter. */
Test(emu_rows, gates) {
    static const struct gate_shape shapes[] = {
        {41, 65, 3, 1, false},  {41, 65, 3, 1, true},   {41, 65, 3, 3, false},
        {70, 1030, 2, 1, true}, {64, 640, 3, 3, false}, {150, 260, 3, 1, true},
    };
    struct kern *kern[BACKENDS];
    both_open(kern);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const struct gate_shape *g = &shapes[i];
        float *x = fresh((size_t)(ROWS * g->model), 7);
        struct results r;
        for (int b = 0; b < BACKENDS; b++) {
            struct kern_gate *gate = load_gate(kern[b], g);
            r.of[b] = run_gate(kern[b], gate, g, x, ROWS);
            kern[b]->ops->gate_free(kern[b], gate);
        }
        compare(&r, (size_t)(ROWS * g->heads), 1e-5, 1e-4, "gate");
        free(x);
    }
    both_close(kern);
}

/* A row's scores are the same bits in any company: in blocks of eight rows and of 64, with the
 * parts of a sum in blocks of their own and all in one. */
Test(emu_rows, scores_of_gates_do_not_depend_on_other_rows) {
    static const struct gate_shape shapes[] = {{130, 146, 8, 8, false}, {70, 260, 3, 1, true}};
    static const int counts[] = {1, 8, 9, 64, 65, 200};
    enum { MOST = 200 };
    struct kern *kern[BACKENDS];
    both_open(kern);
    for (int i = 0; i < 2; i++) {
        const struct gate_shape *g = &shapes[i];
        float *x = fresh((size_t)(MOST * g->model), 7), *all;
        struct kern_gate *gate = load_gate(kern[EMULATED], g);
        all = run_gate(kern[EMULATED], gate, g, x, MOST);
        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
            for (int end = 0; end < 2; end++) {
                int first = end ? MOST - counts[c] : 0;
                float *got = run_gate(kern[EMULATED], gate, g, x + first * g->model, counts[c]);
                cr_assert(!memcmp(got, all + first * g->heads,
                                  (size_t)(counts[c] * g->heads) * sizeof *got),
                          "%d rows from %d", counts[c], first);
                free(got);
            }
        kern[EMULATED]->ops->gate_free(kern[EMULATED], gate);
        free(x), free(all);
    }
    both_close(kern);
}

/* Rotation with and without norms of queries, keys and values, at positions that change from step
 * to step; behind `latent` numbers that do not rotate, and that no row repeats as values. `alone`:
 * rows have queries alone. */
static void check_rope(int head_dim, int latent, bool norm, bool alone) {
    enum { HQ = 3, HKV = 1, COUNT = 4 };
    const int turned = head_dim - latent;
    const bool scaled = norm || latent;
    struct kern *kern[BACKENDS];
    struct kern_cache_options options = {.layers = 1,
                                         .heads_q = HQ,
                                         .heads_kv = HKV,
                                         .head_dim = head_dim,
                                         .latent = latent,
                                         .dtype = KERN_BF16,
                                         .slots = 2,
                                         .max_positions = 200000};
    const int sides = alone ? 0 : latent ? 1 : 2;
    size_t width = (size_t)((HQ + sides * HKV) * head_dim), count = COUNT * width;
    float *x = fresh(count, 11), *freq = fresh((size_t)turned / 2, 12);
    float *nq = fresh((size_t)head_dim, 13), *nk = fresh((size_t)head_dim, 14);
    for (int j = 0; j < turned / 2; j++) freq[j] = powf(1e4f, -2.0f * (float)j / (float)turned);
    struct kern_rope rope = {
        .inv_freq = freq, .scale = 1.25f, .query_scale = {scaled ? 0.1f : 0, 16}, .queries = alone};
    both_open(kern);
    both_cache(kern, options, 1024);
    static const int starts[] = {0, 17, 17, 130000};
    for (int s = 0; s < 4; s++) {
        struct kern_span spans[] = {{.slot = 1, .row = 0, .count = 1, .pos = starts[s] + 5},
                                    {.slot = 0, .row = 1, .count = 3, .pos = starts[s]}};
        struct kern_batch batch = {.spans = spans, .span_count = 2, .rows = COUNT};
        struct results r;
        for (int b = 0; b < BACKENDS; b++) {
            float *qkv = put(kern[b], x, count), *q = put(kern[b], nq, (size_t)head_dim);
            float *k = put(kern[b], nk, (size_t)head_dim);
            rope.v_norm = norm && !alone ? q : NULL;
            kern[b]->ops->qk_rope(kern[b], qkv, norm ? q : NULL, norm && !alone ? k : NULL, 1e-6f,
                                  &rope, &batch);
            r.of[b] = take(kern[b], qkv, count);
            kern[b]->ops->mem_free(kern[b], q);
            kern[b]->ops->mem_free(kern[b], k);
        }
        compare(&r, count, 1e-5, 1e-5, "rotation");
    }
    both_close(kern);
    free(x), free(freq), free(nq), free(nk);
}

/* Places in three dimensions, in every other step; all steps have spans that are behind. */
static void check_places(bool axes) {
    enum { HQ = 3, HKV = 1, COUNT = 4, HALF = 32 };
    const size_t count = COUNT * (HQ + 2 * HKV) * 2 * HALF;
    const struct kern_cache_options options = {.layers = 1,
                                               .heads_q = HQ,
                                               .heads_kv = HKV,
                                               .head_dim = 2 * HALF,
                                               .dtype = KERN_BF16,
                                               .slots = 2,
                                               .max_positions = 1000};
    struct kern_place places[COUNT];
    uint8_t axis[HALF];
    float *x = fresh(count, 15), freq[HALF];
    struct kern *kern[BACKENDS];
    for (int j = 0; j < HALF; j++) {
        freq[j] = powf(1e4f, -(float)j / HALF);
        axis[j] = (uint8_t)(j % KERN_AXES);
    }
    const struct kern_rope rope = {.inv_freq = freq, .scale = 1, .axes = axes ? axis : NULL};
    both_open(kern);
    both_cache(kern, options, 64);
    for (int s = 0; s < 6; s++) {
        const struct kern_span spans[] = {
            {.slot = 1, .count = 1, .pos = 90, .behind = 7 * s},
            {.slot = 0, .row = 1, .count = 3, .pos = 200, .behind = 40}};
        for (int i = 0; i < COUNT; i++) places[i] = (struct kern_place){{50 + s, 60 + i, 70 - i}};
        struct kern_batch batch = {.spans = spans, .span_count = 2, .rows = COUNT};
        struct results r;
        if (s % 2) batch.places = places;
        for (int b = 0; b < BACKENDS; b++) {
            float *qkv = put(kern[b], x, count);
            MUST(kern[b]->ops->begin_step(kern[b], &batch));
            kern[b]->ops->qk_rope(kern[b], qkv, NULL, NULL, 0, &rope, &batch);
            r.of[b] = take(kern[b], qkv, count);
            kern[b]->ops->release(kern[b], 0);
            kern[b]->ops->release(kern[b], 1);
        }
        compare(&r, count, 1e-5, 1e-5, "places");
    }
    both_close(kern);
    free(x);
}

Test(emu_rows, places) {
    check_places(true);
    check_places(false);
}

Test(emu_rows, rotation) {
    for (int norm = 0; norm < 2; norm++) {
        check_rope(64, 0, norm, false);
        check_rope(128, 0, norm, false);
        check_rope(256, 0, norm, false);
        check_rope(512, 0, norm, false);
        check_rope(64, 0, norm, true);
        check_rope(512, 0, norm, true);
    }
    check_rope(576, 512, false, false);
    check_rope(32, 24, false, false);
}

/* ---- Latent attention ---- */

enum { LATENT_HEADS = 3, RANK = 72, STILL = 40, TURNED = 8, VALUES = 20 };

/* The products of some heads, of each head or of the last ones alone, as one of several ranks has
 * them. */
static void check_latent_products(enum kern_dtype dtype, bool neighbours, int first) {
    enum { QUERY = STILL + TURNED, KEY = RANK + TURNED, HEADS = LATENT_HEADS };
    const int heads = HEADS - first;
    float *q = fresh((size_t)(ROWS * heads * QUERY), 1), *entries = fresh(ROWS * KEY, 2);
    float *x = fresh((size_t)(ROWS * heads * RANK), 4), *norm = fresh(RANK, 5);
    struct kern *kern[BACKENDS];
    struct results in, out;
    both_open(kern);
    for (int b = 0; b < BACKENDS; b++) {
        const struct kern_ops *ops = kern[b]->ops;
        struct kern_weight *up_k[HEADS], *up_v[HEADS];
        for (int h = 0; h < HEADS; h++) {
            char *mem[2];
            const struct kern_matrix k = make_matrix(RANK, STILL, dtype, (uint64_t)h + 6, &mem[0]);
            const struct kern_matrix v = make_matrix(VALUES, RANK, dtype, (uint64_t)h + 9, &mem[1]);
            MUST(ops->weight_load(kern[b], &k, 1, KERN_SHARD_NONE, &up_k[h], NULL));
            MUST(ops->weight_load(kern[b], &v, 1, KERN_SHARD_NONE, &up_v[h], NULL));
            free(mem[0]), free(mem[1]);
        }
        MUST(ops->latent_reserve(kern[b], up_k, HEADS));
        MUST(ops->latent_reserve(kern[b], up_v, HEADS));
        float *weights = put(kern[b], norm, RANK);
        const struct kern_latent latent = {.heads = heads,
                                           .rank = RANK,
                                           .still = STILL,
                                           .turned = TURNED,
                                           .dim_v = VALUES,
                                           .neighbours = neighbours,
                                           .eps = 1e-6f,
                                           .norm = weights,
                                           .up_k = up_k + first,
                                           .up_v = up_v + first};
        float *of_q = put(kern[b], q, (size_t)(ROWS * heads * QUERY));
        float *of_entries = put(kern[b], entries, ROWS * KEY);
        float *of_x = put(kern[b], x, (size_t)(ROWS * heads * RANK));
        float *qkv = put(kern[b], NULL, (size_t)(ROWS * (heads + 1) * KEY));
        float *y = put(kern[b], NULL, (size_t)(ROWS * heads * VALUES));
        ops->latent_in(kern[b], qkv, of_q, of_entries, &latent, ROWS);
        ops->latent_out(kern[b], y, of_x, &latent, ROWS);
        in.of[b] = take(kern[b], qkv, (size_t)(ROWS * (heads + 1) * KEY));
        out.of[b] = take(kern[b], y, (size_t)(ROWS * heads * VALUES));
        ops->mem_free(kern[b], of_q);
        ops->mem_free(kern[b], of_entries);
        ops->mem_free(kern[b], of_x);
        ops->mem_free(kern[b], weights);
        for (int h = 0; h < HEADS; h++) {
            ops->weight_free(kern[b], up_k[h]);
            ops->weight_free(kern[b], up_v[h]);
        }
    }
    compare(&in, (size_t)(ROWS * (heads + 1) * KEY), 1e-4, 1e-5, "queries and entries");
    compare(&out, (size_t)(ROWS * heads * VALUES), 1e-4, 1e-5, "results");
    both_close(kern);
    free(q), free(entries), free(x), free(norm);
}

Test(emu_rows, latent_products) {
    static const enum kern_dtype dtypes[] = {KERN_BF16, KERN_F16, KERN_F32};
    for (int i = 0; i < 3; i++) check_latent_products(dtypes[i], i != 1, i == 2);
}
