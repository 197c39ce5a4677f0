/* The arithmetic of observing attention (struct cpu_math) over simd.h. */
#include "kernels/cpu/simd.h"
#include "kernels/cpu/vec.h"

/* Lanes and rows that are multiplied together: as many sums as there are registers for. */
#if defined(__AVX512F__)
#define LANES 4
#define ROWS  4
#else
#define LANES 2
#define ROWS  2
#endif

struct product {
    float *out;
    size_t stride;
    const float *q;
    const char *rows;
    int dim;
    enum kern_dtype dtype;
};

/* Sixteen elements of row j from column d; what lies past the row's end counts as 0. */
SIMD v16 load_row(const struct product *p, int j, int d) {
    return v16_load_row(p->rows, (int64_t)j * p->dim + d, p->dim - d, p->dtype);
}

SIMD v16 load_query(const struct product *p, int l, int d) {
    const float *q = p->q + (size_t)l * (size_t)p->dim + (size_t)d;
    return p->dim - d >= 16 ? v16_load(q) : v16_load_n(q, p->dim - d);
}

/* Every pair sums its products in the same order, whatever the size of its block. */
SIMD void block(const struct product *p, int lane, const int lanes, int row, const int rows) {
    v16 sum[LANES][ROWS];
    _Pragma("GCC unroll 4") for (int l = 0; l < lanes; l++)
        _Pragma("GCC unroll 4") for (int j = 0; j < rows; j++) sum[l][j] = v16_set(0);
    for (int d = 0; d < p->dim; d += 16) {
        v16 key[ROWS];
        _Pragma("GCC unroll 4") for (int j = 0; j < rows; j++) key[j] = load_row(p, row + j, d);
        _Pragma("GCC unroll 4") for (int l = 0; l < lanes; l++) {
            v16 q = load_query(p, lane + l, d);
            _Pragma("GCC unroll 4") for (int j = 0; j < rows; j++) sum[l][j] =
                v16_fma(q, key[j], sum[l][j]);
        }
    }
    _Pragma("GCC unroll 4") for (int l = 0; l < lanes; l++) {
        float *out = p->out + (size_t)(lane + l) * p->stride + (size_t)row;
        if (rows == 4)
            v16_sum4(sum[l], out);
        else
            for (int j = 0; j < rows; j++) out[j] = v16_sum(sum[l][j]);
    }
}

SIMD void row_block(const struct product *p, int lanes, int row, const int rows) {
    int lane = 0;
    for (; lane + LANES <= lanes; lane += LANES) block(p, lane, LANES, row, rows);
    for (; lane + 2 <= lanes; lane += 2) block(p, lane, 2, row, rows);
    for (; lane < lanes; lane++) block(p, lane, 1, row, rows);
}

static void dots(float *out, size_t stride, const float *q, int lanes, const void *rows, int count,
                 int dim, enum kern_dtype dtype) {
    struct product p = {out, stride, q, rows, dim, dtype};
    int row = 0;
    for (; row + ROWS <= count; row += ROWS) row_block(&p, lanes, row, ROWS);
    for (; row < count; row++) row_block(&p, lanes, row, 1);
}

static void softmax(float *x, int count) {
    v16 most = v16_set(-INFINITY), sum = v16_set(0);
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
    v16 scale = v16_set(1 / v16_sum(sum));
    for (i = 0; i < count; i += 16) {
        int n = count - i < 16 ? count - i : 16;
        v16_store_n(x + i, v16_mul(v16_load_n(x + i, n), scale), n);
    }
}

static void weigh(float *out, const float *p, const void *rows, int count, int dim,
                  enum kern_dtype dtype) {
    const struct product v = {.rows = rows, .dim = dim, .dtype = dtype};
    for (int d = 0; d < dim; d += 16) {
        int n = dim - d < 16 ? dim - d : 16;
        v16 sum = v16_load_n(out + d, n);
        for (int j = 0; j < count; j++) sum = v16_fma(v16_set(p[j]), load_row(&v, j, d), sum);
        v16_store_n(out + d, sum, n);
    }
}

const struct cpu_math VEC(math) = {.dots = dots, .softmax = softmax, .weigh = weigh};
