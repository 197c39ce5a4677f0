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
    },
    {
        .name = "streaming",
        .summary = "keeps the first and the most recent tokens",
        .bounded = true,
        .rule = {.score = KERN_SCORE_RECENCY, .pool = KERN_POOL_STREAM, .sinks = 4},
    },
    {
        .name = "trimkv",
        .summary = "retention gates; every head keeps its own best entries",
        .needs = POLICY_NEEDS_GATES,
        .bounded = true,
        .rule = {.score = KERN_SCORE_RETENTION, .sinks = 4, .horizon = 1},
    },
    {
        .name = "global",
        .summary = "retention gates; one ranking across all layers and heads",
        .needs = POLICY_NEEDS_GATES,
        .fields = POLICY_HORIZON,
        .bounded = true,
        .rule =
            {.score = KERN_SCORE_RETENTION, .pool = KERN_POOL_SEQUENCE, .sinks = 4, .horizon = 128},
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

void kv_params_set_policy(struct kv_params *params, const struct policy *policy) {
    params->policy = policy;
    params->rule = policy->rule;
}

void kv_params_fit(struct kv_params *params) {
    struct kern_rule *rule = &params->rule;
    if (params->budget < 0 || rule->sinks + rule->recent <= params->budget) return;
    if (rule->sinks > params->budget) rule->sinks = params->budget;
    rule->recent = params->budget - rule->sinks;
}

static int check_ranges(const struct kv_params *params, struct fault *fault) {
    const struct {
        const char *field;
        int32_t value, least;
    } fields[] = {{"kv.buffer", params->buffer, 0},
                  {"kv.chunk", params->chunk, 1},
                  {"kv.sinks", params->rule.sinks, 0},
                  {"kv.recent", params->rule.recent, 0}};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (fields[i].value < fields[i].least)
            return fault_set(fault, ERR_INVALID, fields[i].field, "%s is %d, must be at least %d",
                             fields[i].field, fields[i].value, fields[i].least);
    return 0;
}

static int check_budget(const struct kv_params *params, struct fault *fault) {
    const struct kern_rule *rule = &params->rule;
    if (params->budget < 1)
        return fault_set(fault, ERR_INVALID, "kv.budget", "kv.budget is %d, must be at least 1",
                         params->budget);
    if (rule->sinks > params->budget)
        return fault_set(fault, ERR_INVALID, "kv.sinks", "kv.sinks is %d, above kv.budget %d",
                         rule->sinks, params->budget);
    if (rule->recent > params->budget - rule->sinks)
        return fault_set(fault, ERR_INVALID, "kv.recent",
                         "kv.recent is %d; with %d sinks it exceeds kv.budget %d", rule->recent,
                         rule->sinks, params->budget);
    return 0;
}

/* What the policy does not use is as in its row, so that nobody believes to have chosen it. */
static int check_rule(const struct kv_params *params, struct fault *fault) {
    const struct policy *policy = params->policy;
    const struct kern_rule *rule = &params->rule;
    if (policy->rule.score == KERN_SCORE_RETENTION && !(rule->horizon >= 1)) /* NaN fails too */
        return fault_set(fault, ERR_INVALID, "kv.horizon", "kv.horizon is %g, must be at least 1",
                         (double)rule->horizon);
    if ((policy->fields & POLICY_HORIZON) == 0 && rule->horizon != policy->rule.horizon)
        return fault_set(fault, ERR_INVALID, "kv.horizon", "policy '%s' has no horizon to choose",
                         policy->name);
    return 0;
}

int kv_params_check(const struct kv_params *params, struct fault *fault) {
    int rc = check_ranges(params, fault);
    if (rc == 0) rc = check_rule(params, fault);
    return rc == 0 && params->policy->bounded ? check_budget(params, fault) : rc;
}

bool kv_params_equal(const struct kv_params *a, const struct kv_params *b) {
    if (a->policy != b->policy) return false;
    if (!a->policy->bounded) return true;
    const struct kern_rule *x = &a->rule, *y = &b->rule;
    return a->budget == b->budget && a->buffer == b->buffer && a->chunk == b->chunk &&
           x->sinks == y->sinks && x->recent == y->recent && x->horizon == y->horizon;
}
