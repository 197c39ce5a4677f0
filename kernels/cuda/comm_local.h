/* Communicator of ranks whose devices reach each other's memory: virtual ranks on one device, for
 * tests of several ranks on a machine with one, and the ranks of the emulator. A kernel computes
 * sums over all ranks' arrays, in the order of kernels/comm.h. */
#ifndef KEEPD_KERNELS_CUDA_COMM_LOCAL_H
#define KEEPD_KERNELS_CUDA_COMM_LOCAL_H

#ifdef __cplusplus
extern "C" {
#endif

#include "kernels/comm.h"

/* Handles of `ranks` ranks -> out[ranks]. ERR_NOMEM; ERR_INVALID: not 2, 4 or 8. */
int comm_local_open(int ranks, const struct comm **out);

#ifdef __cplusplus
}
#endif

#endif
