/* Histogram with fixed upper bounds, as Prometheus counts them. Plain data: the owner's thread
 * adds, a copy travels in a snapshot. */
#ifndef KEEPD_BASE_HIST_H
#define KEEPD_BASE_HIST_H

#include <stdint.h>

#define HIST_MAX_BOUNDS 32

struct hist {
    const double *bounds;                 /* static, ascending, without +Inf */
    int bound_count;                      /* <= HIST_MAX_BOUNDS */
    uint64_t counts[HIST_MAX_BOUNDS + 1]; /* per bucket, not cumulative; the last is +Inf */
    double sum;
};

void hist_open(struct hist *hist, const double *bounds, int bound_count);
void hist_add(struct hist *hist, double value);
void hist_merge(struct hist *into, const struct hist *from); /* bounds must be equal */
uint64_t hist_count(const struct hist *hist);

#endif
