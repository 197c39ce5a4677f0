/* CUDA backends as ranks of one: which devices, and what joins them. */
#include "kernels/cuda/comm_local.h"
#include "kernels/cuda/comm_nccl.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/device.h"

extern "C" {
#include "kernels/ranks.h"
}

struct cuda_ranks {
    struct cuda_options options; /* of rank 0 */
    bool together;
    const struct comm *comm[COMM_RANKS_MAX]; /* until the rank's backend has it */
};

static int open_rank(void *arg, int rank, struct kern **out, struct fault *fault) {
    struct cuda_ranks *all = static_cast<struct cuda_ranks *>(arg);
    struct cuda_options own = all->options;
    own.comm = all->comm[rank];
    if (!all->together) own.device += rank;
    all->comm[rank] = NULL; /* closed with the backend, also when that does not open */
    return cuda_open(&own, out, fault);
}

static int check_count(int first, int ranks, bool together, struct fault *fault) {
    int devices = device_count(fault), wanted = together ? 1 : ranks;
    if (devices == 0) return ERR_NOTFOUND;
    if (ranks < 1 || ranks > COMM_RANKS_MAX || ranks & (ranks - 1))
        return fault_set(fault, ERR_INVALID, "tensor-parallel-size", "%d ranks: 1, 2, 4 or 8",
                         ranks);
    if (first + wanted <= devices) return 0;
    return fault_set(fault, ERR_NOTFOUND, "tensor-parallel-size",
                     "%d ranks need a GPU each, from number %d on; this machine shows %d", ranks,
                     first, devices);
}

static int open_comm(struct cuda_ranks *all, int ranks, struct fault *fault) {
    bool local = all->together || device_reaches_others();
    int rc = local ? comm_local_open(ranks, all->comm) : comm_nccl_open(ranks, all->comm, fault);
    if (!rc || fault->code) return rc;
    return fault_set(fault, rc, "tensor-parallel-size", "no communicator for %d ranks: %s", ranks,
                     err_text(rc));
}

int cuda_open_ranks(const struct cuda_options *options, int ranks, bool together, struct kern **out,
                    struct fault *fault) {
    struct cuda_ranks all = {};
    struct fault why = {};
    int rc = check_count(options->device, ranks, together, fault);
    if (rc || ranks == 1) return rc ? rc : cuda_open(options, out, fault);
    all.options = *options;
    all.together = together;
    rc = open_comm(&all, ranks, &why);
    if (rc) return fault_set(fault, rc, why.field, "%s", why.text);
    struct ranks_options own = {};
    own.ranks = ranks;
    own.open = open_rank;
    own.arg = &all;
    rc = ranks_open(&own, out, fault);
    for (int r = 0; r < ranks; r++)
        if (all.comm[r]) all.comm[r]->ops->close(all.comm[r]);
    return rc;
}
