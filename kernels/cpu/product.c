#include "kernels/product.h"

#include <stdatomic.h>
#include <stdbool.h>

#include "kernels/cpu/built.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/vec_product.h"

typedef void tile(const struct product *product, int64_t count);

/* `wide`: a tile of 32 columns, or that of 16 where the path has no other. */
static tile *product_tile_fastest(bool wide) {
    const struct cpu_isa isa = cpu_isa_detect();
    if (CPU_HAS_AVX512 && isa.avx512)
        return wide ? cpu_product_wide_tile_avx512 : cpu_product_tile_avx512;
    if (CPU_HAS_AVX2 && isa.avx2) return cpu_product_tile_avx2;
    if (CPU_HAS_NEON && isa.neon) return cpu_product_tile_neon;
    return cpu_product_tile_portable;
}

/* The choice asks the processor, which takes longer than a small product. Any thread may make it:
 * all of them choose the same. */
static tile *product_tile(bool wide) {
    static _Atomic(tile *) chosen[2];
    tile *found = atomic_load_explicit(&chosen[wide], memory_order_relaxed);
    if (!found) {
        found = product_tile_fastest(wide);
        atomic_store_explicit(&chosen[wide], found, memory_order_relaxed);
    }
    return found;
}

void product_add(const struct product *product, int64_t rows, int64_t cols, int64_t count) {
    tile *const narrow = product_tile(false), *const wide = product_tile(true);
    for (int64_t j = 0; j < cols;) {
        const bool fits = wide != narrow && cols - j >= 32;
        for (int64_t i = 0; i < rows; i += 4) {
            struct product part = *product;
            part.to += i * product->to_stride + j;
            part.a += i;
            part.b += j;
            (fits ? wide : narrow)(&part, count);
        }
        j += fits ? 32 : 16;
    }
}
