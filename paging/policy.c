#include "paging/policy.h"

#include <string.h>

/* `streaming` keeps entries at their true positions; StreamingLLM (arXiv 2309.17453) re-rotates
 * them to their place in the cache. `trimkv` is arXiv 2512.03324, `global` arXiv 2605.09649; both
 * papers protect nothing, but losing the first tokens has turned other engines' output to garbage.
 */
static const struct policy policies[] = {
    {
        .name = "full",
        .summary = "keeps every entry; memory grows with the conversation",
        .score = KERN_SCORE_RECENCY,
        .pool = KERN_POOL_STREAM,
        .horizon = 1,
    },
    {
        .name = "streaming",
        .summary = "keeps the first and the most recent tokens",
        .bounded = true,
        .score = KERN_SCORE_RECENCY,
        .pool = KERN_POOL_STREAM,
        .sinks = 4,
        .horizon = 1,
    },
    {
        .name = "trimkv",
        .summary = "retention gates; every head keeps its own best entries",
        .needs = POLICY_NEEDS_GATES,
        .bounded = true,
        .score = KERN_SCORE_RETENTION,
        .pool = KERN_POOL_STREAM,
        .sinks = 4,
        .horizon = 1,
        .horizon_fixed = true,
    },
    {
        .name = "global",
        .summary = "retention gates; one ranking across all layers and heads",
        .needs = POLICY_NEEDS_GATES,
        .bounded = true,
        .score = KERN_SCORE_RETENTION,
        .pool = KERN_POOL_SEQUENCE,
        .sinks = 4,
        .horizon = 128,
    },
};

#define POLICY_COUNT ((int)(sizeof policies / sizeof *policies))

const struct policy *policy_at(int index) {
    return index >= 0 && index < POLICY_COUNT ? &policies[index] : NULL;
}

const struct policy *policy_find(const char *name) {
    for (int i = 0; i < POLICY_COUNT; i++)
        if (strcmp(policies[i].name, name) == 0) return &policies[i];
    return NULL;
}

static int check_ranges(const struct kv_params *params, struct fault *fault) {
    if (params->buffer < 0)
        return fault_set(fault, ERR_INVALID, "kv.buffer", "kv.buffer is %d, must be at least 0",
                         params->buffer);
    if (params->chunk < 1)
        return fault_set(fault, ERR_INVALID, "kv.chunk", "kv.chunk is %d, must be at least 1",
                         params->chunk);
    if (params->sinks < 0)
        return fault_set(fault, ERR_INVALID, "kv.sinks", "kv.sinks is %d, must be at least 0",
                         params->sinks);
    if (params->recent < 0)
        return fault_set(fault, ERR_INVALID, "kv.recent", "kv.recent is %d, must be at least 0",
                         params->recent);
    if (!(params->horizon >= 1)) /* so that NaN fails too */
        return fault_set(fault, ERR_INVALID, "kv.horizon", "kv.horizon is %g, must be at least 1",
                         (double)params->horizon);
    return 0;
}

static int check_budget(const struct kv_params *params, struct fault *fault) {
    if (params->budget < 1)
        return fault_set(fault, ERR_INVALID, "kv.budget", "kv.budget is %d, must be at least 1",
                         params->budget);
    if (params->sinks > params->budget)
        return fault_set(fault, ERR_INVALID, "kv.sinks", "kv.sinks is %d, above kv.budget %d",
                         params->sinks, params->budget);
    if (params->recent > params->budget - params->sinks)
        return fault_set(fault, ERR_INVALID, "kv.recent",
                         "kv.recent is %d; with %d sinks it exceeds kv.budget %d", params->recent,
                         params->sinks, params->budget);
    return 0;
}

int kv_params_check(const struct kv_params *params, struct fault *fault) {
    const struct policy *policy = params->policy;
    int rc = check_ranges(params, fault);
    if (rc < 0) return rc;
    if (policy->horizon_fixed && params->horizon != policy->horizon)
        return fault_set(fault, ERR_INVALID, "kv.horizon", "policy '%s' has a fixed horizon of %g",
                         policy->name, (double)policy->horizon);
    return policy->bounded ? check_budget(params, fault) : 0;
}

bool kv_params_equal(const struct kv_params *a, const struct kv_params *b) {
    if (a->policy != b->policy) return false;
    if (!a->policy->bounded) return true;
    bool horizon = a->policy->score == KERN_SCORE_RECENCY || a->horizon == b->horizon;
    return horizon && a->budget == b->budget && a->buffer == b->buffer && a->chunk == b->chunk &&
           a->sinks == b->sinks && a->recent == b->recent;
}
