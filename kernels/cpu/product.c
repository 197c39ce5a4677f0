#include "kernels/product.h"

#include "kernels/cpu/built.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/vec_product.h"

typedef void tile(const struct product *product, int64_t count);

static tile *product_tile_fastest(void) {
    const struct cpu_isa isa = cpu_isa_detect();
    if (CPU_HAS_AVX512 && isa.avx512) return cpu_product_tile_avx512;
    if (CPU_HAS_AVX2 && isa.avx2) return cpu_product_tile_avx2;
    return cpu_product_tile_portable;
}

void product_add(const struct product *product, int64_t rows, int64_t cols, int64_t count) {
    tile *add = product_tile_fastest();
    for (int64_t j = 0; j < cols; j += 16)
        for (int64_t i = 0; i < rows; i += 4) {
            struct product part = *product;
            part.to += i * product->to_stride + j;
            part.a += i;
            part.b += j;
            add(&part, count);
        }
}
