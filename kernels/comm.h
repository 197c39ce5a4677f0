/* Communicator between the ranks of one model (tensor parallelism). Each rank is a separate backend
 * with its own thread, all in one process; kernels/ranks.h makes them one backend. A rank holds
 * some KV heads of every layer with their pages, and its part of the weights.
 *
 * Every rank calls the same collectives in the same order with the same counts. Arrays are memory
 * of the rank's backend and results are in place. A backend may queue a collective like any other
 * operation; it is complete before work queued after it runs. `agree` is different: it takes and
 * returns a number on the host, waits for all ranks, and says nothing about queued work.
 *
 * The order of a floating-point sum is fixed if the communicator says so (`ordered`): a balanced
 * binary tree over ranks, ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). Backends that cut their own
 * part of a sum into 8 / ranks leaves and add those the same way therefore give the same bits for
 * 1, 2, 4 and 8 ranks. Integer sums are exact everywhere; everything that decides which entries are
 * kept is an integer sum.
 *
 * Errors: a rank that fails between collectives calls `abort`. From then on every collective
 * returns ERR_STOPPED on all ranks, also to those that wait in one, so no rank waits for the failed
 * one. The contents of arrays after an error are undefined. The backend that was opened with a
 * communicator owns its rank's handle and closes it on the rank's thread. */
#ifndef KEEPD_KERNELS_COMM_H
#define KEEPD_KERNELS_COMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

#define COMM_RANKS_MAX 8 /* a power of two: ranks are 1, 2, 4 or 8 */

enum comm_type { COMM_F32, COMM_F64, COMM_U32, COMM_U64, COMM_I64 };
enum comm_op { COMM_SUM, COMM_MAX, COMM_MIN };

static inline size_t comm_type_bytes(enum comm_type type) {
    return type == COMM_F32 || type == COMM_U32 ? 4 : 8;
}

struct comm;

struct comm_ops {
    const char *name; /* "none", "host", "local", "nccl" */
    bool ordered;     /* are floating-point sums added by the tree above? */
    /* x[i] <- op over ranks of x[i]. Any op for integers and floats; only a sum propagates NaN. */
    int (*all_reduce)(const struct comm *comm, void *x, size_t count, enum comm_type type,
                      enum comm_op op);
    /* x is [ranks][bytes]; each rank has filled in its own piece. */
    int (*all_gather)(const struct comm *comm, void *x, size_t bytes);
    /* Returns the lowest `rc` of all ranks: an error of one rank is an error of all. */
    int (*agree)(const struct comm *comm, int rc);
    void (*abort)(const struct comm *comm); /* any thread */
    /* Only for communicators of arrays on a device, otherwise NULL. `device` is the rank's device
     * (kernels/cuda/device.h), bound by the rank's thread. Called by all ranks at once, before the
     * first collective; the device outlives the communicator. */
    int (*attach)(const struct comm *comm, void *device, struct fault *fault);
    /* Has queued work failed, so that waiting for it may never end? Called while waiting for the
     * device; does not block. NULL: queued work always ends. */
    int (*check)(const struct comm *comm);
    void (*close)(const struct comm *comm);
    /* Allocates what a sum of `bytes` bytes of floats needs beside its array, so that no collective
     * has to: ERR_NOMEM. NULL: nothing. */
    int (*reserve)(const struct comm *comm, size_t bytes);
};

struct comm {
    const struct comm_ops *ops;
    int rank, ranks;
};

/* A single rank: every sum is already complete. Never closed. */
extern const struct comm comm_none;

#endif
