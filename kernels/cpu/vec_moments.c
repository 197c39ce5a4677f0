/* The sums of kernels/moments.h, over simd.h. */
#include "kernels/cpu/simd.h"
#include "kernels/cpu/vec.h"

/* Rows are added in order, so a sum does not depend on the tile that it is in. */
void VEC(moments_tile)(float *to, int64_t to_stride, const float *x, const float *of,
                       int64_t stride, int rows) {
    v16 sum[4];
    for (int i = 0; i < 4; i++) sum[i] = v16_load(to + i * to_stride);
    for (int r = 0; r < rows; r++, x += stride, of += stride) {
        const v16 row = v16_load(x);
        for (int i = 0; i < 4; i++) sum[i] = v16_fma(v16_set(of[i]), row, sum[i]);
    }
    for (int i = 0; i < 4; i++) v16_store(to + i * to_stride, sum[i]);
}

void VEC(moments_dots)(const float *u, const float *e, int64_t stride, int64_t count, float *to) {
    v16 sum[4] = {v16_set(0), v16_set(0), v16_set(0), v16_set(0)};
    for (int64_t c = 0; c < count; c += 16) {
        const v16 by = v16_load(u + c);
        for (int i = 0; i < 4; i++) sum[i] = v16_fma(by, v16_load(e + i * stride + c), sum[i]);
    }
    for (int i = 0; i < 4; i++) to[i] = v16_sum(sum[i]);
}

void VEC(moments_subtract)(float *to, const float *from, float times, int64_t count) {
    const int64_t whole = count / 16 * 16;
    for (int64_t i = 0; i < whole; i += 16)
        v16_store(to + i, v16_fma(v16_set(-times), v16_load(from + i), v16_load(to + i)));
    for (int64_t i = whole; i < count; i++) to[i] -= times * from[i];
}
