#include "kernels/comm.h"

static int none_all_reduce(const struct comm *comm, void *x, size_t count, enum comm_type type,
                           enum comm_op op) {
    (void)comm, (void)x, (void)count, (void)type, (void)op;
    return 0;
}

static int none_all_gather(const struct comm *comm, void *x, size_t bytes) {
    (void)comm, (void)x, (void)bytes;
    return 0;
}

static int none_agree(const struct comm *comm, int rc) {
    (void)comm;
    return rc;
}

static void none_do(const struct comm *comm) {
    (void)comm;
}

static const struct comm_ops none = {.name = "none",
                                     .ordered = true,
                                     .all_reduce = none_all_reduce,
                                     .all_gather = none_all_gather,
                                     .agree = none_agree,
                                     .abort = none_do,
                                     .close = none_do};

const struct comm comm_none = {.ops = &none, .rank = 0, .ranks = 1};
