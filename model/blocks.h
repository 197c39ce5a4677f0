/* Numbers that lie in blocks with a common scale, as GGUF files have them, to float32. Pure; the
 * order of operations is the one of ggml's reference functions, so the bits are the same. */
#ifndef KEEPD_MODEL_BLOCKS_H
#define KEEPD_MODEL_BLOCKS_H

#include <stddef.h>
#include <stdint.h>

/* Writes the numbers of `blocks` blocks; `from` is aligned to nothing. */
typedef void block_reader(const uint8_t *from, size_t blocks, float *out);

/* By enum gguf_format; NULL where it is no block format or none that is read. */
block_reader *block_reader_of(uint32_t format);

#endif
