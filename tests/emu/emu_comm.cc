/* The communicator between ranks whose devices reach each other's memory, on the emulated ones:
 * what every communicator does (tests/unit/kernels/comm_cases.h), several ranks on one device, and
 * devices that are lost. */
#include "kernels/cuda/comm_local.h"

#include "tests/emu/comm_devices.h"

static void *begin_together(const struct comm *comm) {
    return attach_to(comm, 0);
}

static void *begin_apart(const struct comm *comm) {
    return attach_to(comm, comm->rank);
}

static const struct comm_kind together = {
    "on one device", 1, comm_local_open, begin_together, end, alloc, release, put, take};
static const struct comm_kind apart = {
    "on a device each", 1, comm_local_open, begin_apart, end, alloc, release, put, take};

/* ---- Devices that are lost ---- */

/* Before anything, or after some rounds: all learn it, at the next collective at the latest, and
 * waiting for the lost device says so for good. */
static void one_is_lost(const struct comm_seat *seat) {
    const struct comm *comm = seat->comm;
    int turn = *static_cast<const int *>(seat->arg), rc = 0;
    bool mine = comm->rank == turn % comm->ranks;
    char *array = comm_put(seat, &turn, sizeof turn);
    for (int i = 0; !rc; i++) {
        MUST(i <= turn);
        if (mine && i == turn) device_lose(device_of(seat->device));
        rc = comm->ops->all_reduce(comm, array, 1, COMM_U32, COMM_SUM);
        MUST(rc == 0 || rc == ERR_STOPPED);
    }
    MUST(device_sync(device_of(seat->device)) == (mine ? ERR_DEVICE : 0));
    MUST(device_sync(device_of(seat->device)) == (mine ? ERR_DEVICE : 0));
    comm_drop(seat, array);
    comm_expect_stopped(seat);
}

/* Results queued before the communicator ended are still delivered. */
static void results_outlive_it(const struct comm_seat *seat) {
    const struct comm *comm = seat->comm;
    int64_t x[3] = {1, comm->rank, -1};
    char *array = comm_put(seat, x, sizeof x);
    MUST(comm->ops->all_reduce(comm, array, 3, COMM_I64, COMM_SUM) == 0);
    comm->ops->abort(comm);
    comm_take(seat, x, array, sizeof x);
    MUST(x[0] == comm->ranks && x[1] == comm->ranks * (comm->ranks - 1) / 2 && x[2] == -x[0]);
}

int main() {
    static const struct comm_kind *const kinds[] = {&together, &apart};
    const struct comm *comm[COMM_RANKS_MAX];
    setenv("KEEPD_EMU_DEVICES", "8", 1);
    MUST(comm_local_open(1, comm) == ERR_INVALID); /* one rank needs none */
    comm_opening_fails_cleanly(&together);
    for (const struct comm_kind *kind : kinds)
        for (int ranks = 2; ranks <= COMM_RANKS_MAX; ranks *= 2) {
            comm_run_cases(kind, ranks);
            comm_run(kind, ranks, results_outlive_it, nullptr);
            for (int turn = 0; turn < 2 * ranks; turn++) comm_run(kind, ranks, one_is_lost, &turn);
        }
    puts("local communicators: the cases of all, on one device and on several");
    return 0;
}
