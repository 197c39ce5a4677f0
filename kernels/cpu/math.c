/* The arithmetic of observing attention in plain C: used by the reference path and by
 * simulations. */
#include <math.h>

#include "kernels/cpu/internal.h"

/* Number d of row j. */
static float element(const struct cpu_rows *rows, int j, int d) {
    const char *row =
        (const char *)rows->at + (size_t)j * row_code_bytes(rows->dtype, cpu_rows_stride(rows));
    if (row_scaled(rows->dtype))
        return number_from_bf16(rows->factors[j]) * (float)row_level(row, d, rows->dtype);
    return number_element(row + (size_t)d * kern_dtype_bytes(rows->dtype), rows->dtype);
}

static void plain_dots(float *out, size_t stride, const float *q, int lanes, struct cpu_rows rows,
                       int count) {
    for (int l = 0; l < lanes; l++)
        for (int j = 0; j < count; j++) {
            double sum = 0;
            for (int d = 0; d < rows.dim; d++)
                sum += (double)q[(size_t)l * (size_t)rows.dim + (size_t)d] *
                       (double)element(&rows, j, d);
            out[(size_t)l * stride + (size_t)j] = (float)sum;
        }
}

static void plain_softmax(float *x, int count, float sink) {
    float most = sink;
    for (int i = 0; i < count; i++) most = fmaxf(most, x[i]);
    double sum = exp((double)sink - (double)most);
    for (int i = 0; i < count; i++) sum += exp((double)x[i] - (double)most);
    for (int i = 0; i < count; i++) x[i] = (float)(exp((double)x[i] - (double)most) / sum);
}

static void plain_soft_cap(float *x, int count, float cap) {
    for (int i = 0; i < count; i++) x[i] = cap * tanhf(x[i] / cap);
}

static void plain_weigh(float *out, size_t stride, const float *p, size_t p_stride, int lanes,
                        struct cpu_rows rows, int count) {
    for (int l = 0; l < lanes; l++, out += stride, p += p_stride)
        for (int j = 0; j < count; j++)
            for (int d = 0; d < rows.dim; d++) out[d] += p[j] * element(&rows, j, d);
}

const struct cpu_math cpu_math_plain = {
    .dots = plain_dots,
    .softmax = plain_softmax,
    .soft_cap = plain_soft_cap,
    .weigh = plain_weigh,
    .row_rotate = row_rotate,
    .row_write = row_write,
};
