/* CUDA backends as ranks of one model: assignment of devices, and choice of the communicator. */
#include "kernels/cuda/comm_local.h"
#include "kernels/cuda/comm_nccl.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/device.h"

extern "C" {
#include "kernels/ranks.h"
}

struct cuda_ranks {
    struct cuda_options options; /* options of all ranks, except the device */
    const int *devices;
    const struct comm *comm[COMM_RANKS_MAX]; /* until the rank's backend owns it */
};

/* ---- Where ---- */

static int check_ranks(int ranks, struct fault *fault) {
    if (ranks >= 1 && ranks <= COMM_RANKS_MAX && !(ranks & (ranks - 1))) return 0;
    return fault_set(fault, ERR_INVALID, "tensor-parallel-size", "%d ranks: 1, 2, 4 or 8", ranks);
}

int cuda_place_ranks(int replicas, int ranks, int replica, int devices[COMM_RANKS_MAX],
                     struct fault *fault) {
    int rc = check_ranks(ranks, fault), count = rc ? 0 : device_count(fault);
    if (rc) return rc;
    if (count == 0) return ERR_NOTFOUND;
    if (ranks > count)
        return fault_set(fault, ERR_NOTFOUND, "tensor-parallel-size",
                         "%d ranks need a GPU each; this machine shows %d", ranks, count);
    if (replicas > count / ranks && ranks == 1)
        return fault_set(fault, ERR_NOTFOUND, "data-parallel-size",
                         "%d replicas need a GPU each; this machine shows %d", replicas, count);
    if (replicas > count / ranks)
        return fault_set(fault, ERR_NOTFOUND, "data-parallel-size",
                         "%d replicas of %d ranks need %lld GPUs; this machine shows %d", replicas,
                         ranks, (long long)replicas * ranks, count);
    for (int r = 0; r < ranks; r++) devices[r] = replica * ranks + r;
    return 0;
}

int64_t cuda_unused_memory(int replicas, int ranks) {
    int devices[COMM_RANKS_MAX];
    int64_t unused = 0;
    struct fault ignored = {};
    for (int i = 0; i < replicas; i++) {
        if (cuda_place_ranks(replicas, ranks, i, devices, &ignored)) return 0;
        for (int r = 0; r < ranks; r++) {
            struct device *device = NULL;
            if (device_open(devices[r], &device, &ignored)) return 0;
            unused += (int64_t)device_memory(device).unused;
            device_close(device);
        }
    }
    return unused;
}

/* ---- Opening ---- */

static int open_rank(void *arg, int rank, struct kern **out, struct fault *fault) {
    struct cuda_ranks *all = static_cast<struct cuda_ranks *>(arg);
    struct cuda_options own = all->options;
    own.comm = all->comm[rank];
    own.device = all->devices[rank];
    all->comm[rank] = NULL; /* the backend closes it, also when opening fails */
    return cuda_open(&own, out, fault);
}

static int open_comm(struct cuda_ranks *all, int ranks, struct fault *fault) {
    bool together = true;
    for (int r = 1; r < ranks; r++) together = together && all->devices[r] == all->devices[0];
    bool local = together || device_reaches_others();
    int rc = local ? comm_local_open(ranks, all->comm) : comm_nccl_open(ranks, all->comm, fault);
    if (!rc || fault->code) return rc;
    return fault_set(fault, rc, "tensor-parallel-size", "no communicator for %d ranks: %s", ranks,
                     err_text(rc));
}

int cuda_open_ranks(const struct cuda_options *options, const int *devices, int ranks,
                    struct kern **out, struct fault *fault) {
    struct cuda_ranks all = {};
    struct fault why = {};
    int rc = check_ranks(ranks, fault);
    if (rc) return rc;
    all.options = *options;
    all.devices = devices;
    if (ranks == 1) return open_rank(&all, 0, out, fault);
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
