/* Communicator between the ranks of one model (tensor parallelism). Each rank is a backend of its
 * own with a thread of its own, all in one process; kernels/ranks.h makes them one backend. A rank
 * holds some KV heads of every layer with their pages, and its part of the weights.
 *
 * Every rank calls the same collectives in the same order with the same counts. Arrays are memory
 * of the rank's backend and results are in place; a backend may queue a collective like any other
 * operation, and it is then done when the work queued after it sees it. `agree` alone is about the
 * host: it takes and returns a number, waits for all, and says nothing of what is queued.
 *
 * The order of a floating-point sum is fixed where the communicator says so (`ordered`): a balanced
 * binary tree over ranks, ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). Backends that cut their own
 * share of a sum into 8 / ranks leaves and add those the same way therefore give the same bits for
 * 1, 2, 4 and 8 ranks. Integer sums are exact everywhere; they carry everything that decides what
 * is kept.
 *
 * Errors: a rank that fails between collectives calls `abort`; whoever waits then, or calls later,
 * gets ERR_STOPPED at once and for good, so nobody waits for a rank that will not come. What the
 * arrays hold after an error is undefined. The backend that was opened with a communicator owns
 * its rank's handle and closes it on the rank's thread. */
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
    bool ordered;     /* are floating-point sums the tree above? */
    /* x[i] <- op over ranks of x[i]. Any op for integers and floats; NaN only passes through a sum.
     */
    int (*all_reduce)(const struct comm *comm, void *x, size_t count, enum comm_type type,
                      enum comm_op op);
    /* x is [ranks][bytes]; each rank comes with its own piece in its place. */
    int (*all_gather)(const struct comm *comm, void *x, size_t bytes);
    /* The lowest `code` of all ranks: one rank's error is everybody's. */
    int (*agree)(const struct comm *comm, int code);
    void (*abort)(const struct comm *comm); /* any thread */
    /* For arrays on a device, else NULL. The rank's device (kernels/cuda/device.h), of which its
     * thread has bound it; before its first collective, by all ranks at once, and it outlives
     * them. */
    int (*attach)(const struct comm *comm, void *device, struct fault *fault);
    /* Has what is queued failed, so that waiting for it may never end? Asked by who waits for the
     * device, does not wait itself. NULL: what is queued always ends. */
    int (*check)(const struct comm *comm);
    void (*close)(const struct comm *comm);
};

struct comm {
    const struct comm_ops *ops;
    int rank, ranks;
};

/* One rank: every sum is whole already. Never closed. */
extern const struct comm comm_none;

#endif
