/* The number formats of weights, activations and caches, and the names that all parts of the
 * backend's interface (kernels/kern.h) share. */
#ifndef KEEPD_KERNELS_KERN_TYPES_H
#define KEEPD_KERNELS_KERN_TYPES_H

#include <stdbool.h>
#include <stddef.h>

/* E4M3: one byte, sign, 4 bits of exponent (bias 7), 3 bits of mantissa, no infinities, NaN is 0x7f
 * and 0xff, largest 448 (OCP 8-bit floating point, "FP8 E4M3"). Q8 to Q8SM: blocks of whole numbers
 * with common factors (kernels/blocks.h), for weights only. ROW8 and ROW4: rows of codes with one
 * factor each (kernels/row.h), for caches only. State files contain these enum values. */
enum kern_dtype {
    KERN_F32,
    KERN_F16,
    KERN_BF16,
    KERN_E4M3,
    KERN_Q8,
    KERN_Q8M,
    KERN_Q4,
    KERN_Q4M,
    KERN_Q8S,
    KERN_Q8SM,
    KERN_ROW8,
    KERN_ROW4
};

#define KERN_BLOCK 32 /* numbers in a block */

static inline bool kern_dtype_blocks(enum kern_dtype dtype) {
    return dtype >= KERN_Q8 && dtype <= KERN_Q8SM;
}

/* Bytes of a number stored by itself (F32, BF16, F16, E4M3). Blocks and rows hold many numbers and
 * their factors together: their sizes are in kernels/blocks.h and kernels/row.h. */
static inline size_t kern_dtype_bytes(enum kern_dtype dtype) {
    return dtype == KERN_F32 ? 4 : dtype == KERN_E4M3 ? 1 : 2;
}

struct kern;        /* a backend instance: begins with `const struct kern_ops *ops` */
struct kern_weight; /* a matrix in the backend's own layout */

/* Activation of gated products. GELU in its tanh form: g * sigmoid(1.5957691 (g + 0.044715 g^3)).
 * SWIGLU_CLAMPED (gpt-oss, arXiv 2508.10925): g sigmoid(1.702 g) (u + 1), g at most 7, u within
 * -7..7. SIGMOID: sigmoid(g) u. RELU: max(g, 0) u. NORMAL: u times the standard normal
 * distribution's function at g, which of one product for both is GELU in its exact form
 * (arXiv 1606.08415). GELU: that form of g, times u. The last two are only for backends with
 * kern_ops.layer_norm. */
enum kern_activation {
    KERN_SILU,
    KERN_GELU_TANH,
    KERN_SWIGLU_CLAMPED,
    KERN_SIGMOID,
    KERN_RELU,
    KERN_NORMAL,
    KERN_GELU
};

#endif
