/* Policies: one row each. A row says what a method needs, how entries are scored, among whom they
 * compete and what is protected; the mechanism that scores, ranks, moves and frees is the
 * backend's. A method that fits the columns is a new row. */
#ifndef KEEPD_PAGING_POLICY_H
#define KEEPD_PAGING_POLICY_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/kern.h"

#define POLICY_NEEDS_GATES 1u

struct policy {
    const char *name; /* as in requests, options, metrics */
    const char *summary;
    unsigned needs;
    bool bounded; /* false: keeps everything (full) */
    enum kern_score score;
    enum kern_pool pool;
    int sinks, recent;  /* defaults, entries protected per stream */
    float horizon;      /* default */
    bool horizon_fixed; /* requests may not choose another: the method is defined with this one */
};

const struct policy *policy_find(const char *name); /* NULL when unknown */
const struct policy *policy_at(int index);          /* NULL past the end: for lists and messages */

/* The kv parameters of one request, after defaults: constant for a sequence's life. */
struct kv_params {
    const struct policy *policy;
    int32_t budget; /* M: kept entries per stream on average; ignored by full */
    int32_t buffer; /* tokens a sequence may grow past M before it evicts */
    int32_t chunk;  /* C: prompt tokens between evictions while prefilling */
    int32_t sinks, recent;
    float horizon;
};

/* ERR_INVALID names the field ("kv.budget", ...): 1 <= budget, sinks + recent <= budget, ...
 * Only ranges are checked for parameters that the policy does not use. */
int kv_params_check(const struct kv_params *params, struct fault *fault);
/* Would both keep the same entries of the same sequence? */
bool kv_params_equal(const struct kv_params *a, const struct kv_params *b);

#endif
