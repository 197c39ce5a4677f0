/* Policies: one row each. A row names a method, says what it needs and which parameters a request
 * may choose, and holds its rule (kernels/kern.h): how entries are observed, scored, split over
 * layers, among whom they compete, what is protected and what is merged. The mechanism that does
 * all that is the backend's. A method that fits the rule is a new row. */
#ifndef KEEPD_PAGING_POLICY_H
#define KEEPD_PAGING_POLICY_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/kern.h"

#define POLICY_NEEDS_GATES 1u

/* Parameters that a request may choose; the others are part of what the method is. Budget, buffer,
 * chunk, sinks and recent are every bounded policy's. */
#define POLICY_HORIZON 1u

struct policy {
    const char *name; /* as in requests, options, metrics */
    const char *summary;
    unsigned needs, fields;
    bool bounded;          /* false: keeps everything (full) */
    struct kern_rule rule; /* defaults included */
};

const struct policy *policy_find(const char *name); /* NULL when unknown */
const struct policy *policy_at(int index);          /* NULL past the end: for lists and messages */

/* The kv parameters of one request, after defaults: constant for a sequence's life. */
struct kv_params {
    const struct policy *policy;
    int32_t budget; /* M: kept entries per stream on average; ignored by full */
    int32_t buffer; /* tokens a sequence may grow past M before it evicts */
    int32_t chunk;  /* C: prompt tokens between evictions while prefilling */
    struct kern_rule rule;
};

/* Another policy with its defaults; budget, buffer and chunk stay. */
void kv_params_set_policy(struct kv_params *params, const struct policy *policy);
/* Makes default protections give way to a budget smaller than they are: recent entries first. */
void kv_params_fit(struct kv_params *params);

/* ERR_INVALID names the field ("kv.budget", ...): 1 <= budget, sinks + recent <= budget, ...
 * Only ranges are checked for parameters that the policy does not use. */
int kv_params_check(const struct kv_params *params, struct fault *fault);
/* Would both keep the same entries of the same sequence? */
bool kv_params_equal(const struct kv_params *a, const struct kv_params *b);

#endif
