/* Numbers that lie in blocks with a common scale, as GGUF files have them, as float32 or as blocks
 * of the backend (kernels/blocks.h). Pure; the order of operations is the one of ggml's reference
 * functions, so the bits are the same. */
#ifndef KEEPD_MODEL_BLOCKS_H
#define KEEPD_MODEL_BLOCKS_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/blocks.h"

/* Writes the numbers of `blocks` blocks; `from` is aligned to nothing. */
typedef void block_reader(const uint8_t *from, size_t blocks, float *out);

#define BLOCK_MXFP4 32 /* numbers of a block of MXFP4 */

/* Returns the reader of an enum gguf_format; NULL: it is not a block format, or not supported. */
block_reader *block_reader_of(uint32_t format);

/* Writes the blocks of 32 of `blocks` blocks of the file, with exactly the same numbers. */
typedef void block_maker(const uint8_t *from, size_t blocks, struct block *out);

/* *dtype: the type of the blocks. NULL where block_reader_of is. */
block_maker *block_maker_of(uint32_t format, enum kern_dtype *dtype);

/* Writes the n of a block whose numbers are E2M1: number 2 j in the low half of byte j of 16, and
 * 2 j + 1 in the high one. They are twice E2M1. */
void block_put_e2m1(const uint8_t *nibbles, int8_t *n);

/* MXFP4 as in safetensors: 16 bytes of each block (block_put_e2m1), and the blocks' scales apart.
 * The type of the blocks is that of MXFP4. */
void block_make_split_mxfp4(const uint8_t *nibbles, const uint8_t *scales, size_t blocks,
                            struct block *out);

/* The GGUF type that has exactly the numbers of KERN_Q8 (GGUF_FORMAT_Q8_0) or KERN_Q4M
 * (GGUF_FORMAT_Q4_1) whose factors are float16; and writes such blocks in it. */
uint32_t block_format_of(enum kern_dtype dtype);
void block_write(enum kern_dtype dtype, const struct block *from, size_t blocks, uint8_t *out);

/* The type of a tensor's blocks. False: it has none, or the numbers have no such form. */
struct tensor;
bool block_dtype_of(const struct tensor *tensor, enum kern_dtype *dtype);
/* Bits of a number of such a tensor, or of one of split MXFP4, in a CPU's memory. */
double block_loaded_bits(const struct tensor *tensor);

#endif
