/* Ranks that are threads with memory in common: pointers, a barrier, and sums in the order that
 * kernels/comm.h promises. For the CPU backend, and to test tensor parallelism anywhere. */
#ifndef KEEPD_KERNELS_COMM_HOST_H
#define KEEPD_KERNELS_COMM_HOST_H

#include "kernels/comm.h"

/* The handles of `ranks` ranks -> out[ranks]; the last one that is closed frees what they share.
 * ERR_NOMEM; ERR_INVALID: not 1, 2, 4 or 8. */
int comm_host_open(int ranks, const struct comm **out);

#endif
