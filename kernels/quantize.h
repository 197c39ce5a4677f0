/* Weights in fewer bits, the formats of `--quantization`: E4M3 with one float32 scale per output,
 * and blocks (kernels/blocks.h). */
#ifndef KEEPD_KERNELS_QUANTIZE_H
#define KEEPD_KERNELS_QUANTIZE_H

#ifdef __cplusplus
extern "C" {
#endif

#include "base/err.h"
#include "kernels/blocks.h"

/* The format that matrices become while a model loads. */
enum quantization { QUANTIZE_NONE, QUANTIZE_FP8, QUANTIZE_Q8, QUANTIZE_Q4 };

#define QUANTIZE_MOST  448.0f    /* the largest E4M3 number */
#define QUANTIZE_LEAST 0x1p-120f /* lower bound of scales, so that every scale has an inverse */

struct cpu_team; /* kernels/cpu/team.h */

/* scales[r] = quantize_scale(largest magnitude of row r), codes[r][c] = the E4M3 number nearest to
 * element * (1 / scales[r]). `team` computes the rows in parallel; NULL: the caller computes them
 * alone. The result does not depend on it, nor on the processor. ERR_INVALID names the first row
 * with a number that is not finite; some rows are then written. `from` is F32, F16 or BF16; codes
 * are [rows][cols] without gaps. Any thread; a team runs one call at a time. */
int quantize_rows(const struct kern_matrix *from, uint8_t *codes, float *scales,
                  struct cpu_team *team, struct fault *fault);

/* Makes blocks of KERN_Q8 (8.5 bits per number in memory) or KERN_Q4M (5 bits). Factors are
 * float16. Q8: the scale is the largest magnitude / 127. Q4M: of several ranges inside the block's,
 * each with the factors that fit its numbers n best (least squares), those with the smallest
 * squared error. `inputs`: [cols] weights of the squared errors, at least 0, for Q4M; NULL: all are
 * alike. `from` may also be E4M3; `to` is [rows][blocks_of(cols)]. Otherwise as
 * quantize_rows; besides, a number beyond float16's range is an error. */
int quantize_blocks(const struct kern_matrix *from, enum kern_dtype dtype, const float *inputs,
                    struct block *to, struct cpu_team *team, struct fault *fault);

/* The scale of numbers whose largest magnitude is `most`. */
static inline float quantize_scale(float most) {
    float scale = most / QUANTIZE_MOST;
    return scale > QUANTIZE_LEAST ? scale : QUANTIZE_LEAST;
}

#ifdef __cplusplus
}
#endif

#endif
