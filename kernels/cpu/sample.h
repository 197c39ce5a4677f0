/* Samples one row of logits on the CPU: a pure function, so rows may run on any worker. */
#ifndef KEEPD_KERNELS_CPU_SAMPLE_H
#define KEEPD_KERNELS_CPU_SAMPLE_H

#include "kernels/kern.h"

/* Bytes of scratch that one call needs; contents are arbitrary, alignment is 16 bytes. */
size_t cpu_sample_scratch_bytes(int vocab);

/* See struct kern_sample for the order of operations. `logits` are read only. */
void cpu_sample_row(const float *logits, int vocab, const struct kern_sample *params, void *scratch,
                    struct kern_sampled *out);

/* Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), word 0 of
 * the block with key = seed and counter = (token, position, 0, 0). */
uint32_t cpu_philox(uint64_t seed, uint32_t position, uint32_t token);

#endif
