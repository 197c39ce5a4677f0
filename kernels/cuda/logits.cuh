/* Logits of attention, in units of log 2. */
#ifndef KEEPD_KERNELS_CUDA_LOGITS_CUH
#define KEEPD_KERNELS_CUDA_LOGITS_CUH

#include "kernels/cuda/ptx.cuh"

#define LOG2_E 1.4426950408889634f

/* The logit of the product of a query and a key. `scale` and `cap` as in kern_attend_options, times
 * LOG2_E; cap tanh(z / cap) is cap (e - 1) / (e + 1) with e = exp(2 z / cap). NaN stays NaN. */
static __device__ __forceinline__ float logit_of(float dot, float scale, float cap) {
    float z = __fmul_rn(dot, scale);
    if (!(cap > 0)) return z;
    float power = __fmul_rn(z, __fdiv_rn(2 * LOG2_E, cap));
    float e = ptx_exp2(power > 126 ? 126 : power);
    return __fmul_rn(cap, __fdiv_rn(__fadd_rn(e, -1), __fadd_rn(e, 1)));
}

#endif
