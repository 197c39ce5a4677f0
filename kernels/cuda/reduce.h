/* Sums, maxima and minima over the same elements of several arrays, in the order that
 * kernels/comm.h fixes. C++, for the communicators of this folder. */
#ifndef KEEPD_KERNELS_CUDA_REDUCE_H
#define KEEPD_KERNELS_CUDA_REDUCE_H

#include "kernels/cuda/device.h"

/* to[j][i] <- op over r of from[r][i], for i < count. Every element of `from` is read before it is
 * overwritten, so the arrays may be the same. */
struct reduce_args {
    const void *from[COMM_RANKS_MAX]; /* `ranks` arrays: 2, 4 or 8 */
    void *to[COMM_RANKS_MAX];
    int64_t count;
    int32_t ranks, to_count;
    int32_t op, pad;
};

void device_reduce(struct device *device, const struct reduce_args *args, enum comm_type type);

/* y[count] = parts[0][count] + parts[1][count] + ..., in this order; add: y + parts[0] + ...
 * count is a multiple of 4. */
void device_add_parts(struct device *device, float *y, const float *parts, int part_count,
                      int64_t count, bool add);

#endif
