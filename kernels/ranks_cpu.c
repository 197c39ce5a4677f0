#include "base/available.h"
#include "kernels/comm_host.h"
#include "kernels/ranks.h"

struct cpu_ranks {
    struct cpu_options options;              /* options of one rank */
    const struct comm *comm[COMM_RANKS_MAX]; /* until the rank's backend owns it */
};

static int ranks_cpu_open_rank(void *arg, int rank, struct kern **out, struct fault *fault) {
    struct cpu_ranks *all = arg;
    struct cpu_options own = all->options;
    own.comm = all->comm[rank];
    all->comm[rank] = NULL; /* the backend closes it, also when opening fails */
    return cpu_open(&own, out, fault);
}

int ranks_open_cpu(const struct cpu_options *options, int ranks, struct kern **out,
                   struct fault *fault) {
    if (ranks == 1) return cpu_open(options, out, fault);
    struct cpu_ranks all = {.options = *options};
    int threads = options->threads > 0 ? options->threads : available_cores("");
    int rc = comm_host_open(ranks, all.comm);
    if (rc)
        return fault_set(fault, rc, "tensor-parallel-size", "no communicator for %d ranks: %s",
                         ranks, err_text(rc));
    all.options.threads = threads > ranks ? threads / ranks : 1;
    const struct ranks_options own = {.ranks = ranks, .open = ranks_cpu_open_rank, .arg = &all};
    rc = ranks_open(&own, out, fault);
    for (int r = 0; r < ranks; r++)
        if (all.comm[r]) all.comm[r]->ops->close(all.comm[r]);
    return rc;
}
