/* Activations of gated products (enum kern_activation), of dense networks and of experts. */
#ifndef KEEPD_KERNELS_CUDA_ACTIVATION_CUH
#define KEEPD_KERNELS_CUDA_ACTIVATION_CUH

#include "kernels/cuda/internal.h"

/* g sigmoid(1.702 g) (u + 1), clamped; a NaN stays one. */
static __device__ __forceinline__ float clamped_times(float gate, float up) {
    gate = gate > 7 ? 7 : gate;
    up = up > 7 ? 7 : up < -7 ? -7 : up;
    return gate / (1.0f + expf(-1.702f * gate)) * (up + 1.0f);
}

static __device__ __forceinline__ float gated(float gate, float up,
                                              enum kern_activation activation) {
    if (activation == KERN_SWIGLU_CLAMPED) return clamped_times(gate, up);
    if (activation == KERN_SIGMOID) return up / (1.0f + expf(-gate));
    if (activation == KERN_RELU) return (gate < 0 ? 0 : gate) * up; /* a NaN stays one */
    float inner = gate;
    if (activation == KERN_GELU_TANH) inner = 1.59576912f * (gate + 0.044715f * gate * gate * gate);
    return gate / (1.0f + expf(-inner)) * up;
}

#endif
