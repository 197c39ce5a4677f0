/* The arithmetic of observing attention (struct cpu_math) over simd.h. */
#include "kernels/cpu/vec.h"
#include "kernels/cpu/vec_dots.h"

#define DIM_MANY 256 /* longer rows meet queries few at a time: the result is the same */

/* Multiplies up to sixteen queries with packed rows: the rows are read once, and the results are
 * already in the wanted order. */
static void vec_observe_side_by_side(float *out, size_t stride, const float *q, int lanes,
                                     struct rows rows, int count) {
    float packed[DIM_MANY * MANY], wide[MANY * DIM_MANY], score[MANY * MANY];
    const struct rows queries = {q, rows.dim, rows.dim, KERN_F32, NULL};
    const struct rows widened = {widen_rows(&queries, lanes, wide), padded(rows.dim),
                                 padded(rows.dim), KERN_F32, NULL};
    size_t size = (size_t)rows.dim * kern_dtype_bytes(rows.dtype);
    for (int j = 0; j < count; j += MANY) {
        int n = count - j < MANY ? count - j : MANY;
        pack_many(packed, &rows, n);
        dots_many(score, packed, &widened, lanes);
        for (int l = 0; l < lanes; l++)
            v16_store_n(out + (size_t)l * stride + j, v16_load(score + (int64_t)l * MANY), n);
        rows.at = (const char *)rows.at + MANY * size;
    }
}

static void dots_typed(float *out, size_t stride, const float *q, int lanes, struct rows rows,
                       int count) {
    for (int n; lanes >= MANY_MIN && rows.dim <= DIM_MANY; lanes -= n) {
        n = lanes < MANY ? lanes : MANY;
        vec_observe_side_by_side(out, stride, q, n, rows, count);
        out += (size_t)n * stride;
        q += (size_t)n * (size_t)rows.dim;
    }
    dots_few(&(struct dots){out, (int64_t)stride, q, rows.dim, &rows}, lanes, count);
}

/* Up to sixteen rows with factors from `first` on as floats, in `wide`. */
static struct rows widened(struct cpu_rows rows, int first, int count, float *wide) {
    struct rows some = rows_of(rows);
    some.at = (const char *)rows.at + (size_t)first * row_code_bytes(rows.dtype, rows.dim);
    some.factors += first;
    return (struct rows){widen_rows(&some, count, wide), padded(rows.dim), rows.dim, KERN_F32,
                         NULL};
}

static void dots(float *out, size_t stride, const float *q, int lanes, struct cpu_rows rows,
                 int count) {
    float wide[MANY * ROW_DIM_MAX];
    if (!row_scaled(rows.dtype)) dots_typed(out, stride, q, lanes, rows_of(rows), count);
    for (int j = 0; j < count && row_scaled(rows.dtype); j += MANY) {
        int n = count - j < MANY ? count - j : MANY;
        dots_typed(out + j, stride, q, lanes, widened(rows, j, n, wide), n);
    }
}

static void softmax(float *x, int count, float sink) {
    v16 most = v16_set(sink), sum = v16_set(0);
    int i = 0;
    for (; i + 16 <= count; i += 16) most = v16_max(most, v16_load(x + i));
    float top = v16_most(most);
    for (int j = i; j < count; j++) top = x[j] > top ? x[j] : top;
    v16 peak = v16_set(top);
    for (i = 0; i < count; i += 16) {
        int n = count - i < 16 ? count - i : 16;
        v16 weight = v16_exp(v16_sub(v16_load_n(x + i, n), peak));
        if (n < 16) weight = v16_keep(weight, 0, n, 0);
        sum = v16_add(sum, weight);
        v16_store_n(x + i, weight, n);
    }
    v16 scale = v16_set(1 / (v16_sum(sum) + expf(sink - top)));
    for (i = 0; i < count; i += 16) {
        int n = count - i < 16 ? count - i : 16;
        v16_store_n(x + i, v16_mul(v16_load_n(x + i, n), scale), n);
    }
}

static void soft_cap(float *x, int count, float cap) {
    for (int i = 0; i < count; i += 16) {
        int n = count - i < 16 ? count - i : 16;
        v16_store_n(x + i, v16_soft_cap(v16_load_n(x + i, n), cap), n);
    }
}

static void vec_observe_weigh(float *out, size_t stride, const float *p, size_t p_stride, int lanes,
                              struct cpu_rows rows, int count) {
    float wide[MANY * ROW_DIM_MAX];
    struct rows some = rows_of(rows);
    struct weighing w = {.out = out,
                         .out_stride = (int64_t)stride,
                         .p = p,
                         .p_lane = (int64_t)p_stride,
                         .p_row = 1,
                         .rows = &some};
    if (!row_scaled(rows.dtype)) weigh_rows(&w, lanes, 0, count);
    for (int j = 0; j < count && row_scaled(rows.dtype); j += MANY, w.p += MANY) {
        int n = count - j < MANY ? count - j : MANY;
        some = widened(rows, j, n, wide);
        weigh_rows(&w, lanes, 0, n);
    }
}

const struct cpu_math VEC(math) = {
    .dots = dots,
    .softmax = softmax,
    .soft_cap = soft_cap,
    .weigh = vec_observe_weigh,
    .row_rotate = VEC(row_rotate),
    .row_write = VEC(row_write),
};
