/* A libnccl.so.2 for tests: ranks are threads, and arrays are host memory. Every collective happens
 * when all ranks have called it; a rank that aborts ends the others' waits. Joining is in progress
 * until all ranks have come.
 *
 * FAKE_NCCL_FAILS: the rank that cannot join. FAKE_NCCL_HANGS: the rank that never does. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "nccl.h"

/* The state that the ranks of one communicator share. */
struct meeting {
    std::mutex mutex;
    std::condition_variable changed;
    int ranks = 0, joined = 0, waiting = 0;
    uint64_t round = 0;
    bool aborted = false;
    std::vector<const void *> from;                   /* [rank] */
    std::vector<std::vector<std::vector<char>>> sent; /* [from][to] */
};

struct ncclComm {
    std::shared_ptr<struct meeting> meeting;
    int rank;
};

static std::mutex table_mutex;
static std::map<int, std::shared_ptr<struct meeting>> table;

/* Waits for all ranks. False: one has aborted. */
static bool meet(struct meeting *m) {
    std::unique_lock<std::mutex> lock(m->mutex);
    uint64_t round = m->round;
    if (m->aborted) return false;
    if (++m->waiting == m->ranks) {
        m->waiting = 0;
        m->round++;
        m->changed.notify_all();
        return true;
    }
    m->changed.wait(lock, [&] { return m->round != round || m->aborted; });
    return m->round != round;
}

static bool is_rank(const char *name, int rank) {
    const char *value = getenv(name);
    return value && atoi(value) == rank;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    static int last;
    std::lock_guard<std::mutex> lock(table_mutex);
    memset(id, 0, sizeof *id);
    int own = ++last;
    memcpy(id->internal, &own, sizeof own);
    table[own] = std::make_shared<struct meeting>();
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
    int own;
    memcpy(&own, id.internal, sizeof own);
    *comm = nullptr;
    if (config->blocking || is_rank("FAKE_NCCL_FAILS", rank)) return ncclSystemError;
    std::lock_guard<std::mutex> lock(table_mutex);
    std::shared_ptr<struct meeting> m = table[own];
    std::lock_guard<std::mutex> inner(m->mutex);
    m->ranks = ranks;
    m->from.resize((size_t)ranks);
    m->sent.resize((size_t)ranks, std::vector<std::vector<char>>((size_t)ranks));
    m->joined += !is_rank("FAKE_NCCL_HANGS", rank);
    *comm = new ncclComm{m, rank};
    return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    std::lock_guard<std::mutex> lock(comm->meeting->mutex);
    bool whole = comm->meeting->joined == comm->meeting->ranks;
    *error = comm->meeting->aborted ? ncclRemoteError : whole ? ncclSuccess : ncclInProgress;
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t) {
    return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    delete comm;
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    {
        std::lock_guard<std::mutex> lock(comm->meeting->mutex);
        comm->meeting->aborted = true;
        comm->meeting->changed.notify_all();
    }
    delete comm;
    return ncclSuccess;
}

/* ---- Collectives ---- */

template <class T> static T join(T a, T b, ncclRedOp_t op) {
    if (op == ncclSum) return a + b;
    bool takes = op == ncclMax ? b > a : b < a;
    return takes ? b : a;
}

template <class T>
static void reduce(const struct meeting *m, std::vector<char> *out, size_t count, ncclRedOp_t op) {
    out->resize(count * sizeof(T));
    T *to = reinterpret_cast<T *>(out->data());
    for (size_t i = 0; i < count; i++) {
        to[i] = static_cast<const T *>(m->from[0])[i];
        for (int r = 1; r < m->ranks; r++)
            to[i] = join(to[i], static_cast<const T *>(m->from[(size_t)r])[i], op);
    }
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t) {
    struct meeting *m = comm->meeting.get();
    std::vector<char> out;
    m->from[(size_t)comm->rank] = from;
    if (!meet(m)) return ncclRemoteError;
    if (type == ncclFloat32) reduce<float>(m, &out, count, op);
    if (type == ncclFloat64) reduce<double>(m, &out, count, op);
    if (type == ncclUint32) reduce<uint32_t>(m, &out, count, op);
    if (type == ncclUint64) reduce<uint64_t>(m, &out, count, op);
    if (type == ncclInt64) reduce<int64_t>(m, &out, count, op);
    if (!meet(m)) return ncclRemoteError;
    if (!out.empty()) memcpy(to, out.data(), out.size());
    return meet(m) ? ncclSuccess : ncclRemoteError;
}

ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t,
                           ncclComm_t comm, cudaStream_t) {
    struct meeting *m = comm->meeting.get();
    std::vector<char> out((size_t)m->ranks * count);
    m->from[(size_t)comm->rank] = from;
    if (!meet(m)) return ncclRemoteError;
    for (size_t r = 0; r < (size_t)m->ranks && count > 0; r++)
        memcpy(out.data() + r * count, m->from[r], count);
    if (!meet(m)) return ncclRemoteError;
    if (!out.empty()) memcpy(to, out.data(), out.size());
    return meet(m) ? ncclSuccess : ncclRemoteError;
}

/* Calls of a group are noted, and happen at its end. */
struct note {
    ncclComm_t comm;
    int peer;
    const void *from; /* NULL: received */
    void *to;
    size_t bytes;
};
static thread_local std::vector<struct note> notes;

ncclResult_t ncclGroupStart(void) {
    notes.clear();
    return ncclSuccess;
}

ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t, int peer, ncclComm_t comm,
                      cudaStream_t) {
    notes.push_back({comm, peer, from, nullptr, count});
    return ncclSuccess;
}

ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t, int peer, ncclComm_t comm,
                      cudaStream_t) {
    notes.push_back({comm, peer, nullptr, to, count});
    return ncclInProgress; /* as a communicator that does not block may say */
}

ncclResult_t ncclGroupEnd(void) {
    if (notes.empty()) return ncclSuccess;
    ncclComm_t comm = notes[0].comm;
    struct meeting *m = comm->meeting.get();
    size_t own = (size_t)comm->rank;
    for (const struct note &n : notes)
        if (n.from)
            m->sent[own][(size_t)n.peer].assign((const char *)n.from,
                                                (const char *)n.from + n.bytes);
    if (!meet(m)) return ncclRemoteError;
    for (const struct note &n : notes)
        if (n.to) memcpy(n.to, m->sent[(size_t)n.peer][own].data(), n.bytes);
    return meet(m) ? ncclSuccess : ncclRemoteError;
}

const char *ncclGetErrorString(ncclResult_t) {
    return "fake";
}

const char *ncclGetLastError(ncclComm_t) {
    return "";
}
