/* Instruction sets of this processor that the system lets keepd use, detected at run time. */
#ifndef KEEPD_KERNELS_CPU_ISA_H
#define KEEPD_KERNELS_CPU_ISA_H

#include <stdbool.h>

struct cpu_isa {
    bool avx2;   /* with FMA and F16C, usable (the system saves the registers) */
    bool avx512; /* F, BW, DQ, VL */
    bool vnni;   /* avx512, with VNNI */
    bool bf16;   /* avx512, with VNNI and AVX512_BF16 */
    bool amx;    /* TILE and BF16, AVX-512 and AVX512_BF16, and the system lets us use the tiles */
    bool neon;   /* ARM64: with dot products of int8 */
    bool i8mm;   /* neon, with products of unsigned and signed bytes, also of small matrices */
};

struct cpu_isa cpu_isa_detect(void);

#endif
