#include "engine/steps/sched_kv.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "kernels/rule.h"

/* The cap applies to budget, buffer and chunk: with a cap on the budget alone, a huge buffer or
 * chunk would circumvent it. */
static int check_cap(const struct kv_params *kv, const struct sched_kv *rules,
                     struct fault *fault) {
    if (!kv->policy->bounded)
        return fault_set(fault, ERR_LIMIT, "kv.policy",
                         "this server caps the kv budget, so an unbounded policy is not allowed");
    const struct {
        const char *field;
        int32_t value, most;
    } parts[] = {{"kv.budget", kv->budget, rules->budget_max},
                 {"kv.buffer", kv->buffer, rules->defaults.buffer},
                 {"kv.chunk", kv->chunk, rules->defaults.chunk}};
    for (int i = 0; i < (int)(sizeof parts / sizeof *parts); i++)
        if (parts[i].value > parts[i].most)
            return fault_set(fault, ERR_LIMIT, parts[i].field,
                             "this server allows at most %d, not %d", parts[i].most,
                             parts[i].value);
    return 0;
}

/* Returns the reason for which the backend cannot run the rule; code 0: it can. */
static struct fault rule_obstacle(const struct sched_kv *rules, const struct kern_rule *rule) {
    struct fault why = {0};
    if (rules->unrotated && rule->merge == KERN_MERGE_CLASSES)
        fault_set(&why, ERR_UNSUPPORTED, "",
                  "the layers of the model do not all rotate keys alike");
    else if (rules->latent && rule->merge != KERN_MERGE_NONE)
        fault_set(&why, ERR_UNSUPPORTED, "",
                  "the model's keys hold its values, which cannot be merged apart");
    else if (rules->latent_unread && rule_reads_keys(rule))
        fault_set(&why, ERR_UNSUPPORTED, "",
                  "attention to the model's latent vectors is not observed, nor are they compared");
    else
        (void)rules->rule_check(rule, &why);
    return why;
}

const struct policy *sched_policy_at(const struct sched_kv *rules, int index) {
    const struct policy *policy;
    for (int i = 0; (policy = policy_at(i)); i++) {
        bool gated = (policy->needs & POLICY_NEEDS_GATES) != 0;
        if ((gated && !rules->has_gates) || rule_obstacle(rules, &policy->rule).code) continue;
        if (index-- == 0) break;
    }
    return policy;
}

#define POLICY_LIST_BYTES 256

static const char *list_policies(const struct sched_kv *rules, char list[POLICY_LIST_BYTES]) {
    const struct policy *policy;
    list[0] = '\0';
    for (int i = 0; (policy = sched_policy_at(rules, i)); i++) {
        size_t used = strlen(list);
        snprintf(list + used, POLICY_LIST_BYTES - used, "%s%s", i > 0 ? ", " : "", policy->name);
    }
    return list;
}

int sched_check_rule(const struct sched_kv *rules, const struct kv_params *kv,
                     struct fault *fault) {
    const struct fault why = rule_obstacle(rules, &kv->rule);
    char list[POLICY_LIST_BYTES];
    if (!why.code) return 0;
    return fault_set(fault, ERR_UNSUPPORTED, "kv.policy",
                     "policy '%s' cannot run on the backend '%s': %s; choose one of %s",
                     kv->policy->name, rules->backend, why.text, list_policies(rules, list));
}

int sched_refuse_policy(const struct kv_params *kv, struct fault *fault) {
    return fault_set(fault, ERR_UNSUPPORTED, "kv.policy", "policy '%s' cannot run on this device",
                     kv->policy->name);
}

int sched_check_shift(const struct sched_kv *rules, const struct kv_params *kv,
                      struct fault *fault) {
    if (!rules->can_shift)
        return fault_set(fault, ERR_UNSUPPORTED, "kv.overflow",
                         "\"shift\" is not possible on this server's device");
    return kv_params_check_shift(kv, rules->positions, fault);
}

/* A server's default gives way to settings that cannot be shifted, a request's wish does not. */
static int resolve_overflow(const struct engine_kv *wanted, const struct sched_kv *rules,
                            struct kv_params *out, struct fault *fault) {
    struct fault why = {0};
    bool asked = wanted->overflow == ENGINE_OVERFLOW_SHIFT;
    out->places = 0;
    if (!asked && (wanted->overflow == ENGINE_OVERFLOW_ERROR || !rules->shifts)) return 0;
    int rc = sched_check_shift(rules, out, &why);
    if (rc == 0) out->places = rules->positions;
    return rc != 0 && asked ? fault_set(fault, rc, why.field, "%s", why.text) : 0;
}

int sched_resolve_kv(const struct engine_kv *wanted, const struct sched_kv *rules,
                     struct kv_params *out, struct fault *fault) {
    const struct kv_params *defaults = &rules->defaults;
    *out = *defaults;
    if (wanted->policy) {
        const struct policy *policy = policy_find(wanted->policy);
        char list[POLICY_LIST_BYTES];
        if (!policy)
            return fault_set(fault, ERR_INVALID, "kv.policy",
                             "unknown policy '%.40s'; there are %s", wanted->policy,
                             list_policies(rules, list));
        /* another method: its own rule */
        if (policy != defaults->policy) {
            kv_params_set_policy(out, policy);
            kv_params_set_trained(out, &rules->trained);
        }
    }
    if ((out->policy->needs & POLICY_NEEDS_GATES) != 0 && !rules->has_gates)
        return fault_set(fault, ERR_INVALID, "kv.policy",
                         "policy '%s' needs retention gates and this model has none: keepd fits "
                         "them at a start with --kv-budget, and with keepd fit",
                         out->policy->name);
    if (wanted->budget != -1) out->budget = wanted->budget;
    if (wanted->buffer != -1) out->buffer = wanted->buffer;
    if (wanted->chunk != -1) out->chunk = wanted->chunk;
    if (wanted->sinks != -1) out->rule.sinks = wanted->sinks;
    if (wanted->recent != -1) out->rule.recent = wanted->recent;
    for (int i = 0; i < wanted->option_count; i++) {
        const struct engine_kv_option *option = &wanted->options[i];
        int rc = kv_params_choose(out, option->name, option->number, option->text, fault);
        if (rc != 0) return rc;
    }
    /* Reduces default protections to fit a smaller budget, but not those that the request names.
     * The check refuses invalid budgets. */
    kv_params_fit(out, (wanted->sinks != -1 ? POLICY_SINKS : 0) |
                           (wanted->recent != -1 ? POLICY_RECENT : 0));
    int rc = kv_params_check(out, fault);
    if (rc == 0) rc = sched_check_rule(rules, out, fault);
    if (rc == 0) rc = resolve_overflow(wanted, rules, out, fault);
    return rc == 0 && rules->budget_max > 0 ? check_cap(out, rules, fault) : rc;
}

/* A text's vector belongs to the text alone, so it is read with all of its entries, whatever the
 * server's policy keeps of a conversation. They go when it has been read. A cap on budgets bounds
 * them as it bounds what a conversation holds: by the length of the text. */
static int resolve_pooled(const struct sched_kv *rules, const struct engine_request *request,
                          struct kv_params *out, struct fault *fault) {
    struct sched_kv own = *rules;
    struct engine_kv whole = request->kv;
    whole.policy = "full";
    whole.budget = whole.buffer = whole.chunk = whole.sinks = whole.recent = -1;
    whole.option_count = 0;
    whole.overflow = ENGINE_OVERFLOW_ERROR;
    own.budget_max = 0;
    if (rules->budget_max > 0 && request->prompt_count > rules->budget_max)
        return fault_set(fault, ERR_LIMIT, "prompt",
                         "a text has %d tokens and keeps all of them until it is read; this server "
                         "allows at most %d (--kv-budget-max)",
                         request->prompt_count, rules->budget_max);
    return sched_resolve_kv(&whole, &own, out, fault);
}

int32_t sched_most_together(const struct engine_request *request) {
    int32_t most = 0;
    for (int i = 0; i < request->picture_row_count; i++) {
        const struct picture_rows *rows = &request->picture_rows[i];
        if (request->pictures[rows->picture]->together && rows->count > most) most = rows->count;
    }
    return most;
}

/* A server's default gives way to pictures, a request's wish does not. */
static int resolve_unshifted(const struct engine_kv *wanted, const char *what,
                             struct kv_params *out, struct fault *fault) {
    out->places = 0;
    return wanted->overflow != ENGINE_OVERFLOW_SHIFT
               ? 0
               : fault_set(fault, ERR_UNSUPPORTED, "kv.overflow",
                           "\"shift\" is not possible for %s", what);
}

/* Texts with pictures have places that are no function of positions alone (engine/steps/grid.h).
 * Shifts, and rules that rotate keys or queries again, take them for one. */
static int resolve_axes(const struct engine_kv *wanted, struct kv_params *out,
                        struct fault *fault) {
    static const char what[] = "a text with pictures in a model with places of three dimensions";
    if (out->rule.observe.expect > 0 || out->rule.merge == KERN_MERGE_CLASSES)
        return fault_set(fault, ERR_UNSUPPORTED, "kv.policy", "policy '%s' is not possible for %s",
                         out->policy->name, what);
    return resolve_unshifted(wanted, what, out, fault);
}

int sched_resolve_job(const struct sched_kv *rules, struct engine_job *job, struct fault *fault) {
    if (job->params) return 0;
    struct kv_params *params = mem_try_alloc(1, sizeof *params);
    if (!params) return fault_set(fault, ERR_NOMEM, "kv", "no memory for the kv parameters");
    int rc = job->request.pooling ? resolve_pooled(rules, &job->request, params, fault)
                                  : sched_resolve_kv(&job->request.kv, rules, params, fault);
    if (rc == 0 && rules->axes && job->request.picture_row_count > 0)
        rc = resolve_axes(&job->request.kv, params, fault);
    if (rc == 0 && sched_most_together(&job->request) > 0)
        rc = resolve_unshifted(&job->request.kv, "a text with pictures whose rows see each other",
                               params, fault);
    if (rc == 0)
        job->params = params;
    else
        mem_free(params);
    return rc;
}
