/* Matrices of a directory in 4-bit numbers, as quantisers publish them, and in keepd's own blocks.
 * In the table of tensors they become one tensor "X.weight" of dtype TENSOR_BLOCKS, so that the
 * loader sees no difference from a GGUF file.
 *
 * AWQ, GPTQ and compressed-tensors' "pack-quantized" hold eight numbers q of 0..15 in an I32,
 * lowest bits first. Each output has a scale s and a zero point z for every group of inputs, and
 * w = s (q - z). With O outputs, I inputs and G groups:
 *
 *   AWQ      X.qweight [I, O/8], X.qzeros [G, O/8]; the eight are outputs 0 2 4 6 1 3 5 7
 *            X.scales [G, O]
 *   GPTQ     X.qweight [I/8, O], X.qzeros [G, O/8], z less 1 unless the format is "gptq_v2"
 *            X.scales [G, O], X.g_idx [I] the group of each input
 *   tensors  X.weight_packed [O, I/8], X.weight_zero_point [O/8, G], X.weight_scale [O, G];
 *            X.weight_shape [2]; without zero points z is 8
 *
 * As blocks (kernels/blocks.h): where all z are 8, KERN_Q4 with n = q - 8, otherwise KERN_Q4M with
 * n = q and least = -z s. Both are exact for scales in F16 or BF16. Some quantisers name the format
 * "gptq" and write z without subtracting 1; with "sym" the zero points themselves say which it is.
 * Inputs that are not in the order of their groups ("desc_act") are refused.
 *
 * keepd's own: X.weight.Q8_0 or X.weight.Q4_1, U8 [.., rows, bytes of a row], with the blocks of
 * that GGUF type.
 *
 * Pure. Sources: AutoAWQ, GPTQModel, vLLM and compressed-tensors, as of 2026. */
#ifndef KEEPD_MODEL_PACKED_H
#define KEEPD_MODEL_PACKED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/sha256.h"
#include "kernels/kern.h"

enum packing_kind {
    PACKING_NONE,
    PACKING_AWQ,
    PACKING_GPTQ,
    PACKING_TENSORS, /* compressed-tensors */
    PACKING_OWN      /* keepd's */
};

/* The description of such matrices in config.json. */
struct packing {
    enum packing_kind kind;
    int group;             /* inputs of a group, a multiple of 32; 0: all inputs */
    bool symmetric;        /* z is 8 */
    bool less_one;         /* GPTQ: zero points are stored less 1 */
    bool reordered;        /* GPTQ: desc_act */
    enum kern_dtype dtype; /* keepd's own: of the embeddings before they were rounded */
    /* keepd's own: base_digest.matrices before they were rounded; "" = unknown */
    char base_matrices[SHA256_HEX];
};

struct tensor; /* model/weights.h */
struct packed; /* one matrix of AWQ, GPTQ or compressed-tensors */
struct block;

/* Joins the tensors of each matrix in place. The table is sorted by name, before and after, and
 * becomes shorter. *out, which entries refer to, is given to packed_close after their last use,
 * also after a failure; the table is then of no use. Errors name the tensor. */
struct packed_set;
int packed_join(const struct packing *how, struct tensor *tensors, size_t *count,
                struct packed_set **out, struct fault *fault);
void packed_close(struct packed_set *set);

/* Are all zero points 8? The matrix is then KERN_Q4, else KERN_Q4M. */
bool packed_is_symmetric(const struct packed *packed);
/* Writes blocks [first, first + count) of a row. */
void packed_blocks(const struct packed *packed, int64_t row, int64_t first, int64_t count,
                   struct block *out);
/* Numbers [at, at + count) of a row, whole blocks, as float32. */
void packed_read(const struct packed *packed, int64_t row, int64_t at, int64_t count, float *out);

#endif
