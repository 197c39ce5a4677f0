/* Factors of a block of a panel (block.h) as float32. Include only from files compiled per path. */
#ifndef KEEPD_KERNELS_CPU_VEC_FACTOR_H
#define KEEPD_KERNELS_CPU_VEC_FACTOR_H

#include "kernels/cpu/block.h"
#include "kernels/cpu/simd.h"

/* Returns factor `which` of the block whose factors are at `at`: a part's scale or, behind those of
 * all `parts`, the term. `units`: those of the block's group. */
SIMD v16 factor_load(const char *at, const char *units, bool halves, const int which,
                     const int parts, const enum cpu_factors factors) {
    if (factors == CPU_POWERS)
        return v16_load_power((const uint8_t *)at + (ptrdiff_t)which * PANEL);
    if (factors == CPU_GROUPED) {
        const char *unit = units + (which < parts ? 0 : 2 * PANEL);
        return v16_mul(v16_load_row8((const int8_t *)at + (ptrdiff_t)which * PANEL),
                       v16_load_f16((const uint16_t *)(const void *)unit));
    }
    return __builtin_expect(halves, 1)
               ? v16_load_f16((const uint16_t *)(const void *)at + (ptrdiff_t)which * PANEL)
               : v16_load((const float *)(const void *)at + (ptrdiff_t)which * PANEL);
}

#endif
