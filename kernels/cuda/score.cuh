/* The retention score as kernels compute it: the formula of kernels/score.h, operation by operation
 * (nothing fused), so that it ranks as the CPU does. logf and expm1f are the device's: where they
 * round differently from the host's, entries whose scores are neighbouring floats may swap. */
#ifndef KEEPD_KERNELS_CUDA_SCORE_CUH
#define KEEPD_KERNELS_CUDA_SCORE_CUH

#include <math.h>
#include <string.h>

#include "kernels/cuda/ptx.cuh"

static __device__ __forceinline__ float cuda_score_horizon(float log_beta, float horizon) {
    float lb = log_beta > 0 ? 0 : log_beta; /* NaN stays NaN */
    if (horizon == 1) return 0;
    if (isinf(horizon)) return -logf(-expm1f(lb));
    float x = __fmul_rn(horizon, lb);
    if (-x < 0.01f)
        return __fadd_rn(__fdiv_rn(__fadd_rn(x, -lb), 2),
                         __fdiv_rn(__fadd_rn(__fmul_rn(x, x), -__fmul_rn(lb, lb)), 24));
    return logf(__fdiv_rn(expm1f(x), __fmul_rn(horizon, expm1f(lb))));
}

static __device__ __forceinline__ float cuda_score_retention(float log_beta, int32_t age,
                                                             float horizon) {
    float lb = log_beta > 0 ? 0 : log_beta;
    return __fadd_rn(__fmul_rn((float)age, lb), cuda_score_horizon(log_beta, horizon));
}

static __device__ __forceinline__ float cuda_log1mexp(float x) { /* x < 0 */
    return x < -0.69314718f ? log1pf(-expf(x)) : logf(-expm1f(x));
}

/* With the published offsets. */
static __device__ __forceinline__ float cuda_score_published(float log_beta, int32_t age,
                                                             float horizon) {
    float lb = log_beta > 0 ? -1e-9f : log_beta, ahead;
    if (horizon == 1) return __fmul_rn((float)(age + 1), lb);
    if (lb > -1e-7f)
        ahead = logf(horizon);
    else
        ahead = __fadd_rn(isinf(horizon) ? 0 : cuda_log1mexp(__fmul_rn(horizon, lb)),
                          -cuda_log1mexp(lb));
    return __fadd_rn(__fmul_rn((float)(age + 2), lb), ahead);
}

#define KEY_EXPIRED 0u /* below every score */
#define KEY_LEAST   1u /* NaN, and the lowest key that may be kept */

/* a < b as floats exactly if key(a) < key(b); NaN ranks lowest. Adding 0 turns -0 into 0. */
static __host__ __device__ __forceinline__ uint32_t float_key(float x) {
    uint32_t bits;
    x += 0.0f;
    if (!(x == x)) return KEY_LEAST;
    memcpy(&bits, &x, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

#endif
