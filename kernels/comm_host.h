/* Communicator of ranks that are threads with common memory: pointers, a barrier, and sums in the
 * order that kernels/comm.h promises. Used by the CPU backend, and to test tensor parallelism
 * without several devices. */
#ifndef KEEPD_KERNELS_COMM_HOST_H
#define KEEPD_KERNELS_COMM_HOST_H

#ifdef __cplusplus
extern "C" {
#endif

#include "kernels/comm.h"

/* Handles of `ranks` ranks -> out[ranks]; closing the last one frees the shared state. ERR_NOMEM;
 * ERR_INVALID: not 1, 2, 4 or 8. */
int comm_host_open(int ranks, const struct comm **out);

/* For communicators of other arrays that synchronise here. Between begin and end, a rank sees what
 * all ranks have shown; a rank that has begun must end, and ending waits for all ranks.
 * ERR_STOPPED: not begun. */
int comm_host_begin(const struct comm *comm, void *shown);
void *comm_host_shown(const struct comm *comm, int rank);
void comm_host_end(const struct comm *comm);
bool comm_host_stopped(const struct comm *comm); /* has a rank aborted? Any thread */

#ifdef __cplusplus
}
#endif

#endif
