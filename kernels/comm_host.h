/* Ranks that are threads with memory in common: pointers, a barrier, and sums in the order that
 * kernels/comm.h promises. For the CPU backend, and to test tensor parallelism anywhere. */
#ifndef KEEPD_KERNELS_COMM_HOST_H
#define KEEPD_KERNELS_COMM_HOST_H

#ifdef __cplusplus
extern "C" {
#endif

#include "kernels/comm.h"

/* The handles of `ranks` ranks -> out[ranks]; the last one that is closed frees what they share.
 * ERR_NOMEM; ERR_INVALID: not 1, 2, 4 or 8. */
int comm_host_open(int ranks, const struct comm **out);

/* For communicators of other arrays, whose ranks meet here. Who has begun sees what all ranks show,
 * which stays until it has ended, and must end; ending waits for all. ERR_STOPPED: not begun. */
int comm_host_begin(const struct comm *comm, void *shown);
void *comm_host_shown(const struct comm *comm, int rank);
void comm_host_end(const struct comm *comm);
bool comm_host_stopped(const struct comm *comm); /* has a rank given up? Any thread */

#ifdef __cplusplus
}
#endif

#endif
