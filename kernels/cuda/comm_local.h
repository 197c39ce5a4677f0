/* Ranks whose devices reach each other's memory: virtual ranks on one device, which is how several
 * are tested where there is one, and those of the emulator. Sums are made by a kernel over all
 * ranks' arrays, in the order of kernels/comm.h. */
#ifndef KEEPD_KERNELS_CUDA_COMM_LOCAL_H
#define KEEPD_KERNELS_CUDA_COMM_LOCAL_H

#ifdef __cplusplus
extern "C" {
#endif

#include "kernels/comm.h"

/* The handles of `ranks` ranks -> out[ranks]. ERR_NOMEM; ERR_INVALID: not 2, 4 or 8. */
int comm_local_open(int ranks, const struct comm **out);

#ifdef __cplusplus
}
#endif

#endif
