/* Tensor parallelism as a backend: several backends, each with its part of the model, behave as
 * one.
 *
 * Every operation is given to all ranks at once, each on its own thread (rank 0 on the caller's),
 * and returns when all have queued or done theirs; what must be summed or agreed upon is the ranks'
 * own business (kernels/comm.h). So whoever uses it needs to know nothing of ranks: the layer loop,
 * the scheduler and the state files stay the same, and a state file does not tell how many ranks
 * wrote it.
 *
 * Memory is handed out under rank 0's addresses and stands for one array on every rank. Whether the
 * rows of an array are whole or split over the ranks follows from the operation that wrote it, and
 * is checked. Reports, traces and statistics count each head once: a head that several ranks hold
 * (kernels/shard.h) counts where its lowest rank has it.
 *
 * Pools. A rank's pages are its own, kern_cache_options.pages of them on each. Where entries of
 * different heads compete one rank may keep more than an even share, so a sequence reserves what
 * any one rank may need for it (paging/due.h): an even share if heads do not compete, all that is
 * kept if they do, rank_cap times an even share if that holds. Memory for N pages on each rank is
 * thus never more than admission can promise away, and what is admitted always fits.
 *
 * Errors: a rank's error is everybody's; where ranks could part ways they agree first. */
#ifndef KEEPD_KERNELS_RANKS_H
#define KEEPD_KERNELS_RANKS_H

#include "kernels/comm.h"
#include "kernels/cpu/cpu.h"
#include "kernels/kern.h"

struct ranks_options {
    int ranks; /* 1, 2, 4 or 8 */
    /* Opens a rank's backend, on its thread, all ranks at once. With a communicator over all of
     * them, which it owns. */
    int (*open)(void *arg, int rank, struct kern **out, struct fault *fault);
    void *arg; /* until ranks_open returns */
};

/* On failure nothing is left. */
int ranks_open(const struct ranks_options *options, struct kern **out, struct fault *fault);

/* CPU backends as ranks (kernels/comm_host.h), which share the threads of `options`; each has one
 * at least. One rank is a CPU backend like any other. */
int ranks_open_cpu(const struct cpu_options *options, int ranks, struct kern **out,
                   struct fault *fault);

#endif
