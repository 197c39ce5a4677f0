/* The search of kernels/quantize.h for the factors of one block in KERN_Q4M. */
#ifndef KEEPD_KERNELS_CPU_SEARCH_H
#define KEEPD_KERNELS_CPU_SEARCH_H

#include "kernels/blocks.h"

/* x: KERN_BLOCK numbers, w: weights of their squared errors. */
void cpu_search_q4(const float *x, const float *w, struct block *to);

#endif
