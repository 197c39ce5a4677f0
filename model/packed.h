/* Matrices of a directory in few bits, as quantisers publish them, and in keepd's own blocks.
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
 * FP8 has X.weight [O, I] in E4M3, with a scale in X.weight_scale_inv or X.weight_scale for each
 * block of inputs and outputs, [O / rows of a block, I / its cols], rounded up. Dimensions of 1 may
 * stand between. w = s times the code. Backends take codes and scales as they are, or w as float32,
 * or as bf16 where that holds every product. A matrix with one scale, or one per output, is not
 * joined.
 *
 * NVFP4 has numbers E2M1 in U8 [O, I/2], as block_put_e2m1 (blocks.h) reads them, scales in E4M3
 * [O, I/16] and one for the matrix: w = E2M1 s g.
 *
 *   modelopt X.weight, X.weight_scale, X.weight_scale_2 with g
 *   tensors  X.weight_packed, X.weight_scale, X.weight_global_scale with 1 / g
 *
 * As blocks: KERN_Q8S with n twice E2M1 and s g / 2 as scales, rounded to float32.
 *
 * keepd's own: X.weight.Q8_0 or X.weight.Q4_1, U8 [.., rows, bytes of a row], with the blocks of
 * that GGUF type.
 *
 * Pure. Sources: AutoAWQ, GPTQModel, vLLM, modelopt and compressed-tensors, as of 2026. */
#ifndef KEEPD_MODEL_PACKED_H
#define KEEPD_MODEL_PACKED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/sha256.h"
#include "kernels/kern_weights.h"

enum packing_kind {
    PACKING_NONE,
    PACKING_AWQ,
    PACKING_GPTQ,
    PACKING_TENSORS, /* compressed-tensors */
    PACKING_FP8,
    PACKING_NVFP4,         /* modelopt's */
    PACKING_NVFP4_TENSORS, /* compressed-tensors' */
    PACKING_OWN            /* keepd's */
};

/* How config.json describes such matrices. */
struct packing {
    enum packing_kind kind;
    int group;                  /* inputs of a group, a multiple of 32; 0: all inputs */
    bool symmetric;             /* z is 8 */
    bool less_one;              /* GPTQ: zero points are stored less 1 */
    bool reordered;             /* GPTQ: desc_act */
    int block_rows, block_cols; /* FP8: outputs and inputs that share a scale */
    enum kern_dtype dtype;      /* keepd's own: of the embeddings before they were rounded */
    /* keepd's own: base_digest.matrices before they were rounded; "" = unknown */
    char base_matrices[SHA256_HEX];
};

struct tensor; /* model/weights.h */
struct packed; /* one matrix of AWQ, GPTQ, compressed-tensors or FP8 */
struct block;

/* Joins the tensors of each matrix in place. The table is sorted by name before and after, and
 * becomes shorter. Its entries refer to *out, which the caller closes by packed_close after their
 * last use, also after a failure; the table cannot be used then. Errors name the tensor. */
struct packed_set;
int packed_join(const struct packing *how, struct tensor *tensors, size_t *count,
                struct packed_set **out, struct fault *fault);
void packed_close(struct packed_set *set);

/* Returns the type of the matrix in blocks: KERN_Q8S for NVFP4, else KERN_Q4 if all zero points are
 * 8, and KERN_Q4M otherwise. false: FP8, which has no such form. */
bool packed_blocks_dtype(const struct packed *packed, enum kern_dtype *dtype);
/* Returns the GGUF type whose blocks are of the same kind; for FP8, one that has no blocks. */
uint32_t packed_format(const struct packed *packed);
/* Returns the narrowest type that holds all its numbers: F32; for FP8 perhaps BF16. */
enum kern_dtype packed_dtype(const struct packed *packed);
/* FP8: returns how many factors a row has, each of *group inputs; *group 0: one factor for all
 * inputs. Returns 0 for other kinds, and if the groups are not multiples of KERN_BLOCK. */
int64_t packed_row_scales(const struct packed *packed, int64_t *group);
/* Reads the factors of a row. false: one of them is not a number of at least 0. */
bool packed_read_scales(const struct packed *packed, int64_t row, float *out);
/* Writes blocks [first, first + count) of a row; not for FP8. */
void packed_blocks(const struct packed *packed, int64_t row, int64_t first, int64_t count,
                   struct block *out);
/* Writes the numbers [at, at + count) of a row as float32; whole blocks, except for FP8. */
void packed_read(const struct packed *packed, int64_t row, int64_t at, int64_t count, float *out);

#endif
