/* The loss of the fit: how much of the measured worth one eviction loses if the entries of all
 * layers and heads are ranked together, as `global` ranks them.
 *
 * Before a window of queries, the entries that are not protected compete for `wanted` places. The
 * rank of an entry is log(age) + rate (fit/net.h); entries with the lowest ranks stay. The cutoff
 * is soft, so that it has a gradient: of an entry, the part p = sigmoid((cut - rank) /
 * FIT_SOFTNESS) stays, and `cut` is chosen so that the sum of p is `wanted`. The loss is the sum of
 * worth (1 - p). With s = p (1 - p) / FIT_SOFTNESS, its derivative by the rank of entry k is
 *
 *   worth_k s_k - s_k (sum of worth s) / (sum of s)
 *
 * The second term is there because an entry that stays more lowers the cut for all others. Pure;
 * sums are in double, in order. */
#ifndef KEEPD_FIT_RANK_H
#define KEEPD_FIT_RANK_H

#include <stdint.h>

#define FIT_SOFTNESS 0.3f /* in units of log(age) */
#define FIT_SINKS    4    /* protected first and last tokens */
#define FIT_RECENT   16

/* One eviction, before the query at `pos`. */
struct fit_eviction {
    int streams, entries;
    const int32_t *at;   /* [entries] positions, ascending */
    const float *worths; /* [streams][entries] to the queries that follow */
    const float *rates;  /* [streams][entries] */
    int32_t pos;
    double budget; /* tokens that a stream keeps on average, protected ones included */
};

/* Entries [*from, *to) are not protected. */
void fit_rank_range(const struct fit_eviction *e, int *from, int *to);
/* The worth of the entries that are not protected. */
double fit_rank_worth(const struct fit_eviction *e);
/* The loss. slopes: [streams][entries], of the loss by the rates; NULL: not wanted. log_ages:
 * scratch, [entries]. */
double fit_rank_loss(const struct fit_eviction *e, float *log_ages, float *slopes);

#endif
