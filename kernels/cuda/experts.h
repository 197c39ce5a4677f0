/* Mixtures of experts of the CUDA backend: experts.cu. */
#ifndef KEEPD_KERNELS_CUDA_EXPERTS_H
#define KEEPD_KERNELS_CUDA_EXPERTS_H

#include "kernels/cuda/internal.h"

int op_experts_load(struct kern *kern, const struct kern_experts_spec *spec,
                    struct kern_experts **out, struct fault *fault);
void op_experts_free(struct kern *kern, struct kern_experts *experts);
void op_experts(struct kern *kern, float *y, const float *x, const float *logits,
                const struct kern_experts *experts, int rows);

/* weight.cu: memory of matmul_reserve for products that ranks sum; NULL: no memory, and the device
 * is lost for all ranks. */
float *partial_take(struct cuda *cuda, size_t floats);

#endif
