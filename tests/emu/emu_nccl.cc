/* The communicator over NCCL (kernels/cuda/comm_nccl.cu) on emulated devices, with the library of
 * fake_nccl.cc: what every communicator does, ranks that cannot be joined, memory of sums. */
#include "kernels/cuda/comm_nccl.h"

#include <string.h>

#include "tests/emu/comm_devices.h"

static int open(int ranks, const struct comm **comm) {
    struct fault fault = {};
    return comm_nccl_open(ranks, comm, &fault);
}

static void *begin(const struct comm *comm) {
    return attach_to(comm, comm->rank);
}

static const struct comm_kind kind = {"nccl", 1, open, begin, end, alloc, release, put, take};

/* The reserved memory is enough: a sum frees and allocates nothing between collectives, which NCCL
 * warns of. */
static void sums_take_no_memory(const struct comm_seat *seat) {
    enum { COUNT = 1001 };
    const struct comm *comm = seat->comm;
    float x[COUNT] = {1};
    MUST(comm->ops->reserve(comm, sizeof x) == 0);
    char *array = comm_put(seat, x, sizeof x);
    MUST(comm->ops->agree(comm, 0) == 0);
    size_t before = emu_allocated();
    MUST(comm->ops->agree(comm, 0) == 0);
    for (size_t count = 1; count <= COUNT; count += 250)
        MUST(comm->ops->all_reduce(comm, array, count, COMM_F32, COMM_SUM) == 0);
    MUST(comm->ops->agree(comm, 0) == 0);
    MUST(emu_allocated() == before);
    MUST(comm->ops->agree(comm, 0) == 0);
    comm_drop(seat, array);
}

/* ---- Ranks that cannot be joined ---- */

struct joining {
    const struct comm *comm;
    int rc;
    struct fault fault;
};

static void *join_one(void *arg) {
    struct joining *j = static_cast<struct joining *>(arg);
    struct device *device = nullptr;
    MUST(device_open(j->comm->rank, &device, &j->fault) == 0);
    j->rc = j->comm->ops->attach(j->comm, device, &j->fault);
    j->comm->ops->close(j->comm);
    device_close(device);
    return nullptr;
}

/* All ranks learn it, and none waits for ever. */
static void expect_no_joining(const char *name, const char *text) {
    const struct comm *comm[4];
    struct joining all[4] = {};
    pthread_t threads[4];
    bool told = false;
    setenv(name, "2", 1);
    MUST(open(4, comm) == 0);
    for (int r = 0; r < 4; r++) {
        all[r].comm = comm[r];
        MUST(pthread_create(&threads[r], nullptr, join_one, &all[r]) == 0);
    }
    for (int r = 0; r < 4; r++) {
        pthread_join(threads[r], nullptr);
        MUST(all[r].rc == ERR_DEVICE || all[r].rc == ERR_STOPPED);
        told = told || strstr(all[r].fault.text, text);
    }
    MUST(told);
    unsetenv(name);
}

int main() {
    setenv("KEEPD_EMU_DEVICES", "8", 1);
    comm_opening_fails_cleanly(&kind);
    for (int ranks = 2; ranks <= COMM_RANKS_MAX; ranks *= 2) {
        comm_run_cases(&kind, ranks);
        comm_run(&kind, ranks, sums_take_no_memory, nullptr);
    }
    expect_no_joining("FAKE_NCCL_FAILS", "NCCL cannot join rank 2: fake");
    setenv("KEEPD_EMU_JOIN_SECONDS", "0.3", 1);
    expect_no_joining("FAKE_NCCL_HANGS", "the other ranks did not answer");
    puts("communicators over NCCL: the cases of all, and ranks that cannot be joined");
    return 0;
}
