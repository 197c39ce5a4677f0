/* Tensor parallelism as a backend: several backends, each with its part of the model, behave as
 * one.
 *
 * Every operation is given to all ranks at once, each on its own thread (rank 0 on the caller's),
 * and returns when all have queued or finished it; ranks sum and agree among themselves
 * (kernels/comm.h). Users of the backend need no knowledge of ranks: the layer loop, the scheduler
 * and the state files stay the same, and a state file does not depend on the number of ranks.
 *
 * An allocation has rank 0's address and stands for one array on every rank. Whether the rows of an
 * array are whole or split over the ranks follows from the operation that wrote it, and is checked.
 * Reports, traces and statistics count each head once: a head that several ranks hold
 * (kernels/shard.h) counts on the lowest of them.
 *
 * Pools. Every rank has a page pool of its own, with kern_cache_options.pages pages. Where entries
 * of different heads compete, one rank may keep more than an even part, so a sequence reserves what
 * any one rank may need for it (paging/due.h): an even part if heads do not compete, all kept
 * entries if they do, rank_cap times an even part if there is a cap. Memory for N pages on each
 * rank is thus never less than admission promises, and an admitted sequence always fits.
 *
 * Errors: an error of one rank is an error of all; before ranks could take different paths, they
 * agree. */
#ifndef KEEPD_KERNELS_RANKS_H
#define KEEPD_KERNELS_RANKS_H

#include "kernels/comm.h"
#include "kernels/cpu/cpu.h"
#include "kernels/kern.h"

struct ranks_options {
    int ranks; /* 1, 2, 4 or 8 */
    /* Opens a rank's backend on the rank's thread, all ranks at once, with a communicator over all
     * of them, which the backend owns. */
    int (*open)(void *arg, int rank, struct kern **out, struct fault *fault);
    void *arg; /* valid until ranks_open returns */
};

/* On failure nothing is left behind. */
int ranks_open(const struct ranks_options *options, struct kern **out, struct fault *fault);

/* CPU backends as ranks (kernels/comm_host.h), which divide the threads of `options`, at least one
 * each. A single rank is an ordinary CPU backend. */
int ranks_open_cpu(const struct cpu_options *options, int ranks, struct kern **out,
                   struct fault *fault);

#endif
