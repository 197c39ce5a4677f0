/* NCCL between GPUs of one process, with a thread each (NVIDIA's user guide, "Thread Safety" and
 * "Fault Tolerance"). Sums of integers, and sums of two numbers, are the same in every order, so
 * NCCL adds them; other floating-point sums are exchanged and added here: every rank receives all
 * ranks' parts of its portion of the elements, adds them as a tree, and distributes the result,
 * which moves as many bytes as a ring does.
 *
 * A rank that fails reports it through the hosts' communicator; each rank then aborts its own NCCL
 * communicator, from its own thread, at the next call or while it waits (`check`). Communicators do
 * not block: what a call leaves in progress is polled, so that no rank waits for one that failed.
 *
 * The library is loaded when several GPUs are asked for: a machine without it serves from one. */
#include "kernels/cuda/comm_nccl.h"

#include "kernels/cuda/device.h"

#ifdef KEEPD_NCCL
#include <dlfcn.h>
#include <nccl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "kernels/comm_host.h"
#include "kernels/cuda/reduce.h"

extern "C" {
#include "base/log.h"
}

#define LIBRARY      "libnccl.so.2"
#define POLL_US      200
#define JOIN_SECONDS 120 /* until all ranks are joined, or have ended */

/* The functions of the library, without their prefix. */
#define FUNCTIONS(X)                                                                               \
    X(GetUniqueId)                                                                                 \
    X(CommInitRankConfig)                                                                          \
    X(CommGetAsyncError)                                                                           \
    X(CommFinalize)                                                                                \
    X(CommDestroy)                                                                                 \
    X(CommAbort)                                                                                   \
    X(GroupStart)                                                                                  \
    X(GroupEnd)                                                                                    \
    X(Send)                                                                                        \
    X(Recv)                                                                                        \
    X(AllReduce)                                                                                   \
    X(AllGather)                                                                                   \
    X(GetErrorString)                                                                              \
    X(GetLastError)

static struct {
#define MEMBER(name) decltype(&nccl##name) name;
    FUNCTIONS(MEMBER)
#undef MEMBER
    char missing[200]; /* why it is not loaded; "": it is */
} lib;

static void load_library() {
    void *handle = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    const char *missing = handle ? NULL : dlerror();
#define LOAD(name)                                                                                 \
    lib.name = reinterpret_cast<decltype(lib.name)>(handle ? dlsym(handle, "nccl" #name) : NULL);  \
    if (!lib.name && !missing) missing = LIBRARY " lacks nccl" #name;
    FUNCTIONS(LOAD)
#undef LOAD
    snprintf(lib.missing, sizeof lib.missing, "%s", missing ? missing : "");
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

/* ---- Failures ---- */

static int give_up(struct nccl *nccl) {
    nccl->host->ops->abort(nccl->host);
    if (nccl->comm) lib.CommAbort(nccl->comm);
    nccl->comm = NULL;
    return ERR_STOPPED;
}

static bool stands(struct nccl *nccl) {
    if (!nccl->comm || comm_host_stopped(nccl->host)) give_up(nccl);
    return nccl->comm;
}

static double seconds() {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Returns the time limit of a join. Tests on the emulator set a shorter one. */
static double join_seconds() {
#ifdef KEEPD_EMU
    const char *seconds = getenv("KEEPD_EMU_JOIN_SECONDS");
    if (seconds) return atof(seconds);
#endif
    return JOIN_SECONDS;
}

/* Polls what a call has left in progress, for JOIN_SECONDS at most: a call that only queues work
 * takes no time, one that joins or leaves waits for the other ranks. Ends early when another rank
 * has failed. */
static ncclResult_t settle(struct nccl *nccl, ncclResult_t result) {
    const double end = seconds() + join_seconds();
    while (result == ncclInProgress) {
        if (comm_host_stopped(nccl->host) || seconds() > end) return ncclInProgress;
        usleep(POLL_US);
        ncclResult_t asked = lib.CommGetAsyncError(nccl->comm, &result);
        if (asked != ncclSuccess) return asked;
    }
    return result;
}

static int result_of(struct nccl *nccl, ncclResult_t result, const char *what) {
    result = settle(nccl, result);
    if (result == ncclSuccess) return 0;
    log_error("nccl: %s: %s: %s", what, lib.GetErrorString(result), lib.GetLastError(nccl->comm));
    return give_up(nccl);
}

static int nccl_check(const struct comm *comm) {
    struct nccl *nccl = nccl_of(comm);
    ncclResult_t late = ncclSuccess;
    if (!stands(nccl)) return ERR_STOPPED;
    ncclResult_t asked = lib.CommGetAsyncError(nccl->comm, &late);
    if (late == ncclInProgress) late = ncclSuccess;
    return result_of(nccl, asked != ncclSuccess ? asked : late, "a collective");
}

/* ---- Sums of floats ---- */

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

/* Within a group, calls are only noted. */
static bool goes_on(ncclResult_t result) {
    return result == ncclSuccess || result == ncclInProgress;
}

/* Every rank sends every rank a piece. */
static ncclResult_t exchange(struct nccl *nccl, const struct pieces *out, const struct pieces *in) {
    cudaStream_t stream = static_cast<cudaStream_t>(device_stream(nccl->device));
    ncclResult_t result = lib.GroupStart();
    for (int r = 0; r < nccl->base.ranks && goes_on(result); r++) {
        if (r == nccl->base.rank) continue;
        if (out->bytes[r])
            result = lib.Send(out->at[r], out->bytes[r], ncclChar, r, nccl->comm, stream);
        if (in->bytes[r] && goes_on(result))
            result = lib.Recv(in->at[r], in->bytes[r], ncclChar, r, nccl->comm, stream);
    }
    ncclResult_t ended = lib.GroupEnd();
    return goes_on(result) ? ended : result;
}

static bool room_for(struct nccl *nccl, size_t bytes) {
    if (bytes <= nccl->room_bytes) return true;
    device_free(nccl->device, nccl->room);
    nccl->room = static_cast<char *>(device_alloc(nccl->device, bytes));
    nccl->room_bytes = nccl->room ? bytes : 0;
    return nccl->room;
}

static int nccl_reserve(const struct comm *comm, size_t bytes) {
    const size_t ranks = static_cast<size_t>(comm->ranks);
    const size_t portion = (bytes + ranks - 1) / ranks + sizeof(double);
    return comm->ranks <= 2 || room_for(nccl_of(comm), ranks * portion) ? 0 : ERR_NOMEM;
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

/* ---- Collectives ---- */

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
    return result_of(nccl, lib.AllReduce(x, x, count, types[type], ops[op], nccl->comm, stream),
                     "a reduction");
}

static int nccl_all_gather(const struct comm *comm, void *x, size_t bytes) {
    struct nccl *nccl = nccl_of(comm);
    const char *own = static_cast<char *>(x) + static_cast<size_t>(comm->rank) * bytes;
    if (!stands(nccl)) return ERR_STOPPED;
    cudaStream_t stream = static_cast<cudaStream_t>(device_stream(nccl->device));
    return result_of(nccl, lib.AllGather(own, x, bytes, ncclChar, nccl->comm, stream),
                     "a gathering");
}

static int nccl_agree(const struct comm *comm, int rc) {
    const struct comm *host = nccl_of(comm)->host;
    return host->ops->agree(host, rc);
}

/* ---- Open and close ---- */

static int nccl_attach(const struct comm *comm, void *device, struct fault *fault) {
    struct nccl *nccl = nccl_of(comm);
    nccl->device = static_cast<struct device *>(device);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclResult_t result =
        lib.CommInitRankConfig(&nccl->comm, comm->ranks, nccl->id, comm->rank, &config);
    if (nccl->comm) result = settle(nccl, result);
    device_watch(nccl->device, comm);
    if (result == ncclSuccess) return 0;
    bool late = result == ncclInProgress;
    bool stopped = comm_host_stopped(nccl->host);
    give_up(nccl);
    if (stopped)
        return fault_set(fault, ERR_STOPPED, "tensor-parallel-size",
                         "another rank than %d could not be joined", comm->rank);
    return fault_set(fault, ERR_DEVICE, "tensor-parallel-size", "NCCL cannot join rank %d: %s: %s",
                     comm->rank,
                     late ? "the other ranks did not answer" : lib.GetErrorString(result),
                     lib.GetLastError(NULL));
}

static void nccl_abort(const struct comm *comm) {
    const struct comm *host = nccl_of(comm)->host;
    host->ops->abort(host);
}

/* A communicator that does not block is finalized before it is destroyed. */
static void leave(struct nccl *nccl) {
    if (settle(nccl, lib.CommFinalize(nccl->comm)) == ncclSuccess)
        (void)lib.CommDestroy(nccl->comm);
    else
        (void)lib.CommAbort(nccl->comm);
    nccl->comm = NULL;
}

static void nccl_close(const struct comm *comm) {
    struct nccl *nccl = nccl_of(comm);
    if (nccl->device) {
        if (nccl->comm && stands(nccl)) leave(nccl);
        device_watch(nccl->device, NULL);
        device_free(nccl->device, nccl->room);
    }
    nccl->host->ops->close(nccl->host);
    mem_free(nccl);
}

static const struct comm_ops nccl_ops = {"nccl",     true,        nccl_all_reduce, nccl_all_gather,
                                         nccl_agree, nccl_abort,  nccl_attach,     nccl_check,
                                         nccl_close, nccl_reserve};

int comm_nccl_open(int ranks, const struct comm **out, struct fault *fault) {
    const struct comm *host[COMM_RANKS_MAX];
    struct nccl *nccl[COMM_RANKS_MAX] = {};
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    ncclUniqueId id;
    (void)pthread_once(&once, load_library);
    if (lib.missing[0])
        return fault_set(fault, ERR_UNSUPPORTED, "tensor-parallel-size",
                         "NCCL, which joins GPUs, is not there: %s", lib.missing);
    if (ranks < 2) return ERR_INVALID;
    ncclResult_t result = lib.GetUniqueId(&id);
    if (result != ncclSuccess)
        return fault_set(fault, ERR_DEVICE, "tensor-parallel-size", "NCCL does not start: %s",
                         lib.GetErrorString(result));
    int rc = comm_host_open(ranks, host);
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
                     "header is installed");
}
#endif
