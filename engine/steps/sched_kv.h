/* The kv settings of requests: resolved against the server's defaults, and checked against its
 * limits and its backend. Pure functions, but for the memory that sched_resolve_job takes; any
 * thread. */
#ifndef KEEPD_ENGINE_STEPS_SCHED_KV_H
#define KEEPD_ENGINE_STEPS_SCHED_KV_H

#include "engine/engine_job.h"
#include "paging/policy.h"

/* The defaults and limits that a request's kv object is resolved against. */
struct sched_kv {
    struct kv_params defaults;
    int budget_max; /* cap for requests; 0 = none */
    bool has_gates;
    struct kv_trained trained; /* the settings for which the gates were trained */
    bool unrotated;            /* some layers rotate no keys, or by other frequencies */
    bool latent;               /* keys hold the values */
    bool latent_unread;        /* and the backend has no rules then that read keys */
    bool axes;                 /* places of rows of pictures have three dimensions */
    bool shifts;               /* requests that do not say otherwise, and can, are shifted */
    bool can_shift;            /* the backend can */
    int32_t positions;         /* number of the model's positions */
    const char *backend;       /* name of the backend, for messages */
    int (*rule_check)(const struct kern_rule *rule, struct fault *fault); /* the backend's */
};

/* Resolves a request's kv object: absent members take the defaults, another policy brings its own
 * protections. ERR_INVALID, ERR_LIMIT or ERR_UNSUPPORTED name the kv field. */
int sched_resolve_kv(const struct engine_kv *wanted, const struct sched_kv *rules,
                     struct kv_params *out, struct fault *fault);
/* Resolves the job's kv object into job->params, unless that was done before. Errors as above, and
 * ERR_NOMEM. */
int sched_resolve_job(const struct sched_kv *rules, struct engine_job *job, struct fault *fault);

/* ERR_UNSUPPORTED or ERR_INVALID name the obstacle to shifts with these parameters. */
int sched_check_shift(const struct sched_kv *rules, const struct kv_params *kv,
                      struct fault *fault);

/* The policies that the backend can run and the model has what they need for; NULL past the end.
 * */
const struct policy *sched_policy_at(const struct sched_kv *rules, int index);

/* ERR_UNSUPPORTED names kv.policy: the backend cannot run the rule. The text says why, and names
 * the policies that it can run. */
int sched_check_rule(const struct sched_kv *rules, const struct kv_params *kv, struct fault *fault);

/* The fault of a policy whose rule the backend's `prepare` refused: ERR_UNSUPPORTED, with kv.policy
 * named. */
int sched_refuse_policy(const struct kv_params *kv, struct fault *fault);

/* Returns the most rows of the request's prompt that stay together in a step: those of a tile whose
 * rows see each other (struct picture). 0: none do. */
int32_t sched_most_together(const struct engine_request *request);

#endif
