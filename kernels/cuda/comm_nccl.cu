/* NCCL between GPUs of one process, with a thread each (NVIDIA's user guide, "Thread Safety" and
 * "Fault Tolerance"). Sums of integers, and sums of two numbers, are the same in every order, so
 * NCCL adds them; other floating-point sums are exchanged and added here: every rank receives all
 * ranks' parts of its portion of the elements, adds them as a tree, and distributes the result,
 * which moves as many bytes as a ring does.
 *
 * A rank that fails reports it through the hosts' communicator; each rank then aborts its own NCCL
 * communicator, from its own thread, at the next call or while it waits (`check`). */
#include "kernels/cuda/comm_nccl.h"

#include "kernels/cuda/device.h"

#ifdef KEEPD_NCCL
#include <cuda_runtime.h>
#include <nccl.h>

#include "kernels/comm_host.h"
#include "kernels/cuda/reduce.h"

extern "C" {
#include "base/log.h"
}

struct nccl {
    struct comm base; /* first: a struct comm * is a struct nccl * */
    const struct comm *host;
    ncclUniqueId id;
    ncclComm_t comm; /* valid from attach until it is aborted */
    struct device *device;
    char *room; /* device memory for parts of other ranks; grows */
    size_t room_bytes;
};

static struct nccl *nccl_of(const struct comm *comm) {
    return reinterpret_cast<struct nccl *>(const_cast<struct comm *>(comm));
}

/* ---- Failures -------------------------------------------------------------------------------- */

static int give_up(struct nccl *nccl) {
    nccl->host->ops->abort(nccl->host);
    if (nccl->comm) ncclCommAbort(nccl->comm);
    nccl->comm = NULL;
    return ERR_STOPPED;
}

static bool stands(struct nccl *nccl) {
    if (!nccl->comm || comm_host_stopped(nccl->host)) give_up(nccl);
    return nccl->comm;
}

static int result_of(struct nccl *nccl, ncclResult_t result, const char *what) {
    if (result == ncclSuccess) return 0;
    log_error("nccl: %s: %s: %s", what, ncclGetErrorString(result), ncclGetLastError(nccl->comm));
    return give_up(nccl);
}

static int nccl_check(const struct comm *comm) {
    struct nccl *nccl = nccl_of(comm);
    ncclResult_t late = ncclSuccess;
    if (!stands(nccl)) return ERR_STOPPED;
    ncclResult_t asked = ncclCommGetAsyncError(nccl->comm, &late);
    if (late == ncclInProgress) late = ncclSuccess;
    return result_of(nccl, asked != ncclSuccess ? asked : late, "a collective");
}

/* ---- Sums of floats -------------------------------------------------------------------------- */

/* A rank's portion of the elements. */
struct portion {
    size_t first, count;
};

static struct portion portion_of(const struct comm *comm, size_t count, int rank) {
    size_t ranks = static_cast<size_t>(comm->ranks), r = static_cast<size_t>(rank);
    size_t first = count * r / ranks;
    return {first, count * (r + 1) / ranks - first};
}

/* An array in pieces, one for each rank; NULL where nothing is sent or received. */
struct pieces {
    char *at[COMM_RANKS_MAX];
    size_t bytes[COMM_RANKS_MAX];
};

/* Every rank sends every rank a piece. */
static ncclResult_t exchange(struct nccl *nccl, const struct pieces *out, const struct pieces *in) {
    cudaStream_t stream = static_cast<cudaStream_t>(device_stream(nccl->device));
    ncclResult_t result = ncclGroupStart();
    for (int r = 0; r < nccl->base.ranks && result == ncclSuccess; r++) {
        if (r == nccl->base.rank) continue;
        if (out->bytes[r])
            result = ncclSend(out->at[r], out->bytes[r], ncclChar, r, nccl->comm, stream);
        if (in->bytes[r] && result == ncclSuccess)
            result = ncclRecv(in->at[r], in->bytes[r], ncclChar, r, nccl->comm, stream);
    }
    ncclResult_t ended = ncclGroupEnd();
    return result == ncclSuccess ? ended : result;
}

static bool room_for(struct nccl *nccl, size_t bytes) {
    if (bytes <= nccl->room_bytes) return true;
    device_free(nccl->device, nccl->room);
    nccl->room = static_cast<char *>(device_alloc(nccl->device, bytes));
    nccl->room_bytes = nccl->room ? bytes : 0;
    return nccl->room;
}

static int sum_as_tree(struct nccl *nccl, char *x, size_t count, enum comm_type type) {
    const struct comm *comm = &nccl->base;
    size_t size = comm_type_bytes(type);
    struct portion own = portion_of(comm, count, comm->rank);
    struct pieces whole = {}, parts = {}, mine = {};
    struct reduce_args args = {};
    if (!room_for(nccl, static_cast<size_t>(comm->ranks) * own.count * size)) return give_up(nccl);
    for (int r = 0; r < comm->ranks; r++) {
        struct portion other = portion_of(comm, count, r);
        whole.at[r] = x + other.first * size;
        whole.bytes[r] = other.count * size;
        parts.at[r] = nccl->room + static_cast<size_t>(r) * own.count * size;
        mine.at[r] = x + own.first * size;
        parts.bytes[r] = mine.bytes[r] = own.count * size;
        args.from[r] = r == comm->rank ? mine.at[r] : parts.at[r];
    }
    int rc = result_of(nccl, exchange(nccl, &whole, &parts), "an exchange");
    if (rc) return rc;
    args.to[0] = mine.at[0];
    args.count = static_cast<int64_t>(own.count);
    args.ranks = comm->ranks;
    args.to_count = 1;
    args.op = COMM_SUM;
    device_reduce(nccl->device, &args, type);
    return result_of(nccl, exchange(nccl, &mine, &whole), "an exchange");
}

/* ---- Collectives ----------------------------------------------------------------------------- */

static int nccl_all_reduce(const struct comm *comm, void *x, size_t count, enum comm_type type,
                           enum comm_op op) {
    static const ncclDataType_t types[] = {ncclFloat32, ncclFloat64, ncclUint32, ncclUint64,
                                           ncclInt64};
    static const ncclRedOp_t ops[] = {ncclSum, ncclMax, ncclMin};
    struct nccl *nccl = nccl_of(comm);
    bool floats = type == COMM_F32 || type == COMM_F64;
    if (!stands(nccl)) return ERR_STOPPED;
    if (floats && op == COMM_SUM && comm->ranks > 2)
        return sum_as_tree(nccl, static_cast<char *>(x), count, type);
    cudaStream_t stream = static_cast<cudaStream_t>(device_stream(nccl->device));
    return result_of(nccl, ncclAllReduce(x, x, count, types[type], ops[op], nccl->comm, stream),
                     "a reduction");
}

static int nccl_all_gather(const struct comm *comm, void *x, size_t bytes) {
    struct nccl *nccl = nccl_of(comm);
    const char *own = static_cast<char *>(x) + static_cast<size_t>(comm->rank) * bytes;
    if (!stands(nccl)) return ERR_STOPPED;
    cudaStream_t stream = static_cast<cudaStream_t>(device_stream(nccl->device));
    return result_of(nccl, ncclAllGather(own, x, bytes, ncclChar, nccl->comm, stream),
                     "a gathering");
}

static int nccl_agree(const struct comm *comm, int rc) {
    const struct comm *host = nccl_of(comm)->host;
    return host->ops->agree(host, rc);
}

/* ---- Open and close -------------------------------------------------------------------------- */

static int nccl_attach(const struct comm *comm, void *device, struct fault *fault) {
    struct nccl *nccl = nccl_of(comm);
    nccl->device = static_cast<struct device *>(device);
    ncclResult_t result = ncclCommInitRank(&nccl->comm, comm->ranks, nccl->id, comm->rank);
    device_watch(nccl->device, comm);
    if (result == ncclSuccess) return 0;
    nccl->comm = NULL;
    give_up(nccl);
    return fault_set(fault, ERR_DEVICE, "tensor-parallel-size", "NCCL cannot join rank %d: %s: %s",
                     comm->rank, ncclGetErrorString(result), ncclGetLastError(NULL));
}

static void nccl_abort(const struct comm *comm) {
    const struct comm *host = nccl_of(comm)->host;
    host->ops->abort(host);
}

static void nccl_close(const struct comm *comm) {
    struct nccl *nccl = nccl_of(comm);
    if (nccl->device) {
        if (nccl->comm && stands(nccl)) ncclCommDestroy(nccl->comm);
        device_watch(nccl->device, NULL);
        device_free(nccl->device, nccl->room);
    }
    nccl->host->ops->close(nccl->host);
    mem_free(nccl);
}

static const struct comm_ops nccl_ops = {"nccl",          true,       nccl_all_reduce,
                                         nccl_all_gather, nccl_agree, nccl_abort,
                                         nccl_attach,     nccl_check, nccl_close};

int comm_nccl_open(int ranks, const struct comm **out, struct fault *fault) {
    const struct comm *host[COMM_RANKS_MAX];
    struct nccl *nccl[COMM_RANKS_MAX] = {};
    ncclUniqueId id;
    ncclResult_t result = ncclGetUniqueId(&id);
    if (result != ncclSuccess)
        return fault_set(fault, ERR_DEVICE, "tensor-parallel-size", "NCCL does not start: %s",
                         ncclGetErrorString(result));
    int rc = ranks > 1 ? comm_host_open(ranks, host) : ERR_INVALID;
    if (rc) return rc;
    bool all = true;
    for (int r = 0; r < ranks; r++) {
        nccl[r] = static_cast<struct nccl *>(mem_try_alloc(1, sizeof **nccl));
        all = all && nccl[r];
    }
    for (int r = 0; r < ranks; r++) {
        if (!all) {
            host[r]->ops->close(host[r]);
            mem_free(nccl[r]);
            continue;
        }
        nccl[r]->base = {&nccl_ops, r, ranks};
        nccl[r]->host = host[r];
        nccl[r]->id = id;
        out[r] = &nccl[r]->base;
    }
    return all ? 0 : ERR_NOMEM;
}
#else
int comm_nccl_open(int, const struct comm **, struct fault *fault) {
    return fault_set(fault, ERR_UNSUPPORTED, "tensor-parallel-size",
                     "this build has no NCCL, which joins GPUs; it is found by CMake where its "
                     "header and library are installed");
}
#endif
