/* Communicator between the ranks of one model. Tensor parallelism splits the rows of qkv and
 * gate_up and the columns of o and down; each rank then holds a partial sum, and
 * `all_reduce_sum` makes it whole where the layer loop calls it. With one rank a sum is whole
 * already. Only rank 0 adds to the residual and adds biases of column-split matrices, so that the
 * sum counts both once. */
#ifndef KEEPD_KERNELS_COMM_H
#define KEEPD_KERNELS_COMM_H

#include <stddef.h>

struct comm {
    const char *name;
    int rank, ranks;
    /* Sums `count` floats of backend memory over all ranks, in place, in rank order. */
    int (*all_reduce_sum)(const struct comm *comm, float *x, size_t count);
};

static inline int comm_none_all_reduce_sum(const struct comm *comm, float *x, size_t count) {
    (void)comm, (void)x, (void)count;
    return 0;
}

static inline struct comm comm_none(void) {
    return (struct comm){
        .name = "none", .rank = 0, .ranks = 1, .all_reduce_sum = comm_none_all_reduce_sum};
}

#endif
