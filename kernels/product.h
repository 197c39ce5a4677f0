/* Products of float32 matrices in host memory, for what is computed beside the model. Pure: the
 * result does not depend on how a product is divided into parts by rows and columns. */
#ifndef KEEPD_KERNELS_PRODUCT_H
#define KEEPD_KERNELS_PRODUCT_H

#include <stdint.h>

/* to[i][j] += the sum over r of a[r][i] b[r][j]. Strides are floats from one row to the next. */
struct product {
    float *to;
    const float *a, *b;
    int64_t to_stride, a_stride, b_stride;
};

/* `rows` and `cols` of `to`: multiples of 4 and of 16. `count`: rows of a and b, whose products are
 * added in order. */
void product_add(const struct product *product, int64_t rows, int64_t cols, int64_t count);

#endif
