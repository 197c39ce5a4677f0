/* Tiles of kernels/product.h, 4 rows and 16 columns, one function for each path; and of 32 columns
 * where there are registers for them. */
#ifndef KEEPD_KERNELS_CPU_VEC_PRODUCT_H
#define KEEPD_KERNELS_CPU_VEC_PRODUCT_H

#include "kernels/product.h"

void cpu_product_tile_portable(const struct product *p, int64_t count);
void cpu_product_tile_neon(const struct product *p, int64_t count);
void cpu_product_tile_avx2(const struct product *p, int64_t count);
void cpu_product_tile_avx512(const struct product *p, int64_t count);
void cpu_product_wide_tile_avx512(const struct product *p, int64_t count);

#endif
