/* A communicator of local devices. The hosts' threads exchange their arrays (kernels/comm_host.h);
 * the devices' streams wait for each other's marks. No host thread waits for a device here. */
#include "kernels/cuda/comm_local.h"

#include "kernels/comm_host.h"
#include "kernels/cuda/reduce.h"

/* A rank's contribution to a collective. */
struct shown {
    char *array;
    struct device *device; /* once it is attached */
};

struct local {
    struct comm base; /* first: a struct comm * is a struct local * */
    const struct comm *host;
    struct shown own;
};

static struct local *local_of(const struct comm *comm) {
    return reinterpret_cast<struct local *>(const_cast<struct comm *>(comm));
}

/* ---- Meetings ---- */

/* Afterwards all ranks' arrays are ready for the work that this rank queues. */
static int meet(const struct comm *comm, void *x, struct shown all[COMM_RANKS_MAX]) {
    struct local *local = local_of(comm);
    local->own.array = static_cast<char *>(x);
    device_mark(local->own.device, DEVICE_READY);
    int rc = comm_host_begin(local->host, &local->own);
    if (rc) return rc;
    for (int r = 0; r < comm->ranks; r++) {
        all[r] = *static_cast<const struct shown *>(comm_host_shown(local->host, r));
        device_await(local->own.device, all[r].device, DEVICE_READY);
    }
    return 0;
}

/* Afterwards all ranks have finished with all arrays. */
static void part(const struct comm *comm, const struct shown all[COMM_RANKS_MAX]) {
    struct local *local = local_of(comm);
    device_mark(local->own.device, DEVICE_DONE);
    comm_host_end(local->host);
    for (int r = 0; r < comm->ranks; r++)
        device_await(local->own.device, all[r].device, DEVICE_DONE);
}

/* ---- Collectives ---- */

/* Each rank computes a part of the elements for all ranks. */
static int local_all_reduce(const struct comm *comm, void *x, size_t count, enum comm_type type,
                            enum comm_op op) {
    struct shown all[COMM_RANKS_MAX];
    int rc = meet(comm, x, all);
    if (rc) return rc;
    size_t ranks = static_cast<size_t>(comm->ranks), rank = static_cast<size_t>(comm->rank);
    size_t from = count * rank / ranks, to = count * (rank + 1) / ranks;
    struct reduce_args args = {};
    args.count = static_cast<int64_t>(to - from);
    args.ranks = args.to_count = comm->ranks;
    args.op = op;
    for (int r = 0; r < comm->ranks; r++)
        args.from[r] = args.to[r] = all[r].array + from * comm_type_bytes(type);
    device_reduce(local_of(comm)->own.device, &args, type);
    part(comm, all);
    return 0;
}

static int local_all_gather(const struct comm *comm, void *x, size_t bytes) {
    struct shown all[COMM_RANKS_MAX];
    int rc = meet(comm, x, all);
    if (rc) return rc;
    for (int r = 0; r < comm->ranks; r++) {
        size_t at = static_cast<size_t>(r) * bytes;
        if (r != comm->rank)
            device_copy(local_of(comm)->own.device, static_cast<char *>(x) + at, all[r].array + at,
                        bytes);
    }
    part(comm, all);
    return 0;
}

static int local_agree(const struct comm *comm, int rc) {
    const struct comm *host = local_of(comm)->host;
    return host->ops->agree(host, rc);
}

/* ---- Open and close ---- */

static int local_attach(const struct comm *comm, void *device, struct fault *) {
    local_of(comm)->own.device = static_cast<struct device *>(device);
    device_watch(local_of(comm)->own.device, comm);
    return 0;
}

static void local_abort(const struct comm *comm) {
    const struct comm *host = local_of(comm)->host;
    host->ops->abort(host);
}

static void local_close(const struct comm *comm) {
    const struct comm *host = local_of(comm)->host;
    if (local_of(comm)->own.device) device_watch(local_of(comm)->own.device, NULL);
    host->ops->close(host);
    mem_free(local_of(comm));
}

static const struct comm_ops local_ops = {
    "local",     true,        local_all_reduce, local_all_gather,
    local_agree, local_abort, local_attach,     NULL,
    local_close, NULL};

int comm_local_open(int ranks, const struct comm **out) {
    const struct comm *host[COMM_RANKS_MAX];
    struct local *local[COMM_RANKS_MAX] = {};
    bool all = ranks > 1;
    int rc = all ? comm_host_open(ranks, host) : ERR_INVALID;
    if (rc) return rc;
    for (int r = 0; r < ranks; r++) {
        local[r] = static_cast<struct local *>(mem_try_alloc(1, sizeof **local));
        all = all && local[r];
    }
    for (int r = 0; r < ranks && !all; r++) {
        host[r]->ops->close(host[r]);
        mem_free(local[r]);
    }
    for (int r = 0; r < ranks && all; r++) {
        *local[r] = {{&local_ops, r, ranks}, host[r], {}};
        out[r] = &local[r]->base;
    }
    return all ? 0 : ERR_NOMEM;
}
