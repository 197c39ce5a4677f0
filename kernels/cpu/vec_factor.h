/* Factors of a block of a panel (block.h) as float32. Include only from files compiled per path. */
#ifndef KEEPD_KERNELS_CPU_VEC_FACTOR_H
#define KEEPD_KERNELS_CPU_VEC_FACTOR_H

#include "kernels/cpu/block.h"
#include "kernels/cpu/simd.h"

/* Returns factor `which` of the block whose factors are at `at`: a part's scale or, behind those of
 * all `parts`, its term. `units`: those of the block's group. */
SIMD v16 factor_load(const char *at, const char *units, bool halves, const int which,
                     const int parts, const enum cpu_factors factors) {
    const bool least = which >= parts;
    const int8_t *bytes = (const int8_t *)at + (ptrdiff_t)which * PANEL;
    const uint16_t *unit = (const uint16_t *)(const void *)units + (least ? PANEL : 0);
    if (factors == CPU_POWERS) return v16_load_power((const uint8_t *)bytes);
    if (factors == CPU_E4M3)
        return v16_mul(v16_load_e4m3((const uint8_t *)bytes),
                       v16_load((const float *)(const void *)units));
    if (factors == CPU_GROUPED) return v16_mul(v16_load_row8(bytes), v16_load_f16(unit));
    if (factors == CPU_PAIRED) {
        if (least) bytes -= (ptrdiff_t)parts * PANEL;
        return v16_mul(v16_load_nibble((const uint8_t *)bytes, least), v16_load_f16(unit));
    }
    return __builtin_expect(halves, 1)
               ? v16_load_f16((const uint16_t *)(const void *)at + (ptrdiff_t)which * PANEL)
               : v16_load((const float *)(const void *)at + (ptrdiff_t)which * PANEL);
}

#endif
