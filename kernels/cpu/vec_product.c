#include "kernels/cpu/vec_product.h"

#include "kernels/cpu/simd.h"
#include "kernels/cpu/vec.h"

/* Terms are added in order, so a sum does not depend on the tile that it is in. */
void VEC(product_tile)(const struct product *p, int64_t count) {
    const float *a = p->a, *b = p->b;
    v16 sum[4];
    for (int i = 0; i < 4; i++) sum[i] = v16_load(p->to + i * p->to_stride);
    for (int64_t r = 0; r < count; r++, a += p->a_stride, b += p->b_stride) {
        const v16 row = v16_load(b);
        for (int i = 0; i < 4; i++) sum[i] = v16_fma(v16_set(a[i]), row, sum[i]);
    }
    for (int i = 0; i < 4; i++) v16_store(p->to + i * p->to_stride, sum[i]);
}

#if defined(__AVX512F__)
/* Twice as many sums at once: with fewer, each addition would wait for the one before it. */
void VEC(product_wide_tile)(const struct product *p, int64_t count) {
    const float *a = p->a, *b = p->b;
    v16 sum[4][2];
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 2; k++)
            sum[i][k] = v16_load(p->to + i * p->to_stride + (ptrdiff_t)16 * k);
    for (int64_t r = 0; r < count; r++, a += p->a_stride, b += p->b_stride) {
        const v16 row[2] = {v16_load(b), v16_load(b + 16)};
        for (int i = 0; i < 4; i++) {
            const v16 by = v16_set(a[i]);
            for (int k = 0; k < 2; k++) sum[i][k] = v16_fma(by, row[k], sum[i][k]);
        }
    }
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 2; k++)
            v16_store(p->to + i * p->to_stride + (ptrdiff_t)16 * k, sum[i][k]);
}
#endif
