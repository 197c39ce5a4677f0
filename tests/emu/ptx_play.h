/* Kernels that run the machine instructions of kernels/cuda/ptx.cuh on given numbers, for
 * emu_ptx.c. Every function queues on the backend's stream; arrays are in the backend's memory. */
#ifndef KEEPD_TESTS_EMU_PTX_PLAY_H
#define KEEPD_TESTS_EMU_PTX_PLAY_H

#ifdef __cplusplus
extern "C" {
#endif

#include "kernels/kern.h"

enum ptx_word { /* instructions of one or two words each */
                PTX_EXP2,
                PTX_PACK_BF16, /* low, high in float32 */
                PTX_PACK_F16,
                PTX_PACK_E4M3,
                PTX_F16_OF_E4M3,
                PTX_UNPACK_F16_LOW,
                PTX_UNPACK_F16_HIGH,
                PTX_MUL_F16,
                PTX_SUB_F16,
                PTX_SUB_BF16,
                PTX_F16_OF_LOW_BYTES,
                PTX_F16_OF_HIGH_BYTES,
};

/* out[i] = the instruction of a[i] and b[i]. */
void ptx_play_words(struct kern *kern, enum ptx_word which, uint32_t *out, const uint32_t *a,
                    const uint32_t *b, int count);

enum ptx_product { PTX_MMA_BF16, PTX_MMA_F16, PTX_MMA_S8, PTX_MMA_U8 };

/* One product by one warp: c[16][8] += a[16][k] b, with k = 16 numbers of 16 bits or 32 bytes; b is
 * [16][8] for numbers of 16 bits and [8][32], transposed, for bytes. c has words of 32 bits. */
void ptx_play_product(struct kern *kern, enum ptx_product which, uint32_t *c, const void *a,
                      const void *b);

/* Copies two parts of `bytes` bytes each through shared memory, each announced by a phase of one
 * barrier: by one thread in bulk, or by all threads. A multiple of 16. */
void ptx_play_copy(struct kern *kern, bool bulk, void *to, const void *from, int bytes);

#ifdef __cplusplus
}
#endif

#endif
