/* The CPU backend. Paths, best first: amx (bf16 tiles), avx512, avx2, on ARM64 neon; portable; and
 * "reference", plain C in float32 with a fixed order of sums, against which every test compares.
 * "auto" takes the best path of the processor. Every path keeps the row independence that kern.h
 * promises by using one kernel for all row counts. */
#ifndef KEEPD_KERNELS_CPU_CPU_H
#define KEEPD_KERNELS_CPU_CPU_H

#include "kernels/comm.h"
#include "kernels/kern.h"

/* How activations are rounded for products with weights in blocks (kernels/blocks.h), whose
 * formulas kernels/cpu/block.h has, and for products with weights in bf16 and fp8. Except with
 * CPU_INT16 and CPU_F32, the path avx512 of a processor with AVX512_BF16 rounds the latter to bf16
 * and, over a cache in bf16, queries and attention weights, too (vec_attend.c). The path amx takes
 * two bf16, with CPU_BF16 one, and always rounds in attention (amx_attend.c). */
enum cpu_activations {
    CPU_INT8,      /* activations are rounded to 8 bits, with a scale for each 32 of them, and the
                      largest of them to 15 bits */
    CPU_INT16,     /* to 16 bits, with a scale for each 32 */
    CPU_BY_WEIGHT, /* weights with codes of 4 bits: as CPU_INT8, otherwise as CPU_INT16 */
    CPU_BF16,      /* to bf16, on the paths avx512 and amx only; on avx512 for weights in bf16
                      and fp8 alone, and blocks as CPU_INT16 */
    CPU_F32, /* activations are not rounded, and weights are multiplied as if they were float32 */
};

struct cpu_options {
    /* "auto", "reference", "portable", "neon", "avx2", "avx512", "amx"; NULL = auto */
    const char *path;
    enum cpu_activations activations;
    int threads; /* 0 = the cores this process may use */
    /* Tensor parallelism: the communicator of this rank. cpu_open takes ownership, even when it
     * fails; all calls are then made on the rank's thread. NULL: a single rank. */
    const struct comm *comm;
};

/* ERR_UNSUPPORTED names the path that this processor or this build (built.h) lacks. */
int cpu_open(const struct cpu_options *options, struct kern **out, struct fault *fault);

#endif
