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
