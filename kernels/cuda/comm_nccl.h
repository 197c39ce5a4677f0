/* Communicator of ranks on separate GPUs, over NCCL. NCCL only moves the bytes of floating-point
 * sums; they are added in the order of kernels/comm.h, so that they depend neither on the number of
 * rows in a step nor on the algorithm that NCCL chooses. */
#ifndef KEEPD_KERNELS_CUDA_COMM_NCCL_H
#define KEEPD_KERNELS_CUDA_COMM_NCCL_H

#ifdef __cplusplus
extern "C" {
#endif

#include "kernels/comm.h"

/* Handles of `ranks` ranks -> out[ranks]. ERR_NOMEM; ERR_INVALID: not 2, 4 or 8; ERR_DEVICE,
 * ERR_UNSUPPORTED: NCCL does not start, or this build has none. */
int comm_nccl_open(int ranks, const struct comm **out, struct fault *fault);

#ifdef __cplusplus
}
#endif

#endif
