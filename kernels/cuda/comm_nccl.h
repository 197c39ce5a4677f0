/* Ranks on a GPU each, joined by NCCL, which carries the bytes; sums are made in the order of
 * kernels/comm.h all the same, so that they depend neither on how many rows share a step nor on
 * what NCCL makes of the machine. */
#ifndef KEEPD_KERNELS_CUDA_COMM_NCCL_H
#define KEEPD_KERNELS_CUDA_COMM_NCCL_H

#ifdef __cplusplus
extern "C" {
#endif

#include "kernels/comm.h"

/* The handles of `ranks` ranks -> out[ranks]. ERR_NOMEM; ERR_INVALID: not 2, 4 or 8; ERR_DEVICE,
 * ERR_UNSUPPORTED: NCCL does not start, or this build has none. */
int comm_nccl_open(int ranks, const struct comm **out, struct fault *fault);

#ifdef __cplusplus
}
#endif

#endif
