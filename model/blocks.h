/* Numbers that lie in blocks with a common scale, as GGUF files have them, as float32 or as blocks
 * of the backend (kernels/blocks.h). Pure; the order of operations is the one of ggml's reference
 * functions, so the bits are the same. */
#ifndef KEEPD_MODEL_BLOCKS_H
#define KEEPD_MODEL_BLOCKS_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/blocks.h"

/* Writes the numbers of `blocks` blocks of a file as float32; `from` need not be aligned. */
typedef void block_reader(const uint8_t *from, size_t blocks, float *out);

#define BLOCK_MXFP4 32 /* numbers of a block of MXFP4 */

/* Returns the reader of an enum gguf_format; NULL: not a format with blocks, or not supported. */
block_reader *block_reader_of(uint32_t format);

/* Writes the numbers of `blocks` blocks of a file as blocks of 32, exactly. */
typedef void block_maker(const uint8_t *from, size_t blocks, struct block *out);

/* Returns the maker of a format; *dtype: the type of its blocks. NULL in the same cases as
 * block_reader_of. */
block_maker *block_maker_of(uint32_t format, enum kern_dtype *dtype);

/* Writes the n of a block whose numbers are E2M1: number 2 j in the low half of byte j of 16, and
 * 2 j + 1 in the high one. They are twice E2M1. */
void block_put_e2m1(const uint8_t *nibbles, int8_t *n);

/* Makes blocks from MXFP4 as safetensors have it: 16 bytes for each block (block_put_e2m1), and the
 * scales in a tensor of their own. The type of the blocks is that of MXFP4. */
void block_make_split_mxfp4(const uint8_t *nibbles, const uint8_t *scales, size_t blocks,
                            struct block *out);

/* Returns the GGUF type that stores the numbers of KERN_Q8 (GGUF_FORMAT_Q8_0) or KERN_Q4M
 * (GGUF_FORMAT_Q4_1) exactly, if their factors are float16. The second function writes such blocks
 * in it. */
uint32_t block_format_of(enum kern_dtype dtype);
void block_write(enum kern_dtype dtype, const struct block *from, size_t blocks, uint8_t *out);

/* Returns the type of a tensor's blocks. false: the tensor has none, or blocks cannot hold its
 * numbers. */
struct tensor;
bool block_dtype_of(const struct tensor *tensor, enum kern_dtype *dtype);
/* Returns the bits that a number of such a tensor, or of split MXFP4, takes in a CPU's memory. */
double block_loaded_bits(const struct tensor *tensor);

#endif
