/* Weights as E4M3 with one scale per output, float32: what products of `--quantization fp8` take on
 * every backend. */
#ifndef KEEPD_KERNELS_QUANTIZE_H
#define KEEPD_KERNELS_QUANTIZE_H

#ifdef __cplusplus
extern "C" {
#endif

#include "kernels/kern.h"

#define QUANTIZE_MOST  448.0f    /* the largest E4M3 number */
#define QUANTIZE_LEAST 0x1p-120f /* scales go no lower, so that they have an inverse */

struct cpu_pool; /* kernels/cpu/pool.h */

/* scales[r] = quantize_scale(largest magnitude of row r), codes[r][c] = the E4M3 number nearest to
 * element * (1 / scales[r]). `team` shares the rows; NULL: the caller does them alone. Neither it
 * nor the processor changes a bit. ERR_INVALID, some of the rows written: one has a number that is
 * not finite; the first is named. `from` of F32, F16 or BF16; codes [rows][cols] without gaps. Any
 * thread, a team one at a time. */
int quantize_rows(const struct kern_matrix *from, uint8_t *codes, float *scales,
                  struct cpu_pool *team, struct fault *fault);

/* The scale of numbers whose largest magnitude is `most`. */
static inline float quantize_scale(float most) {
    float scale = most / QUANTIZE_MOST;
    return scale > QUANTIZE_LEAST ? scale : QUANTIZE_LEAST;
}

#ifdef __cplusplus
}
#endif

#endif
