/* The cache of an engine that opens: the default policy and its settings, the dtype of keys and
 * values, and how many pages the pool has. */
#include <stdio.h>
#include <string.h>

#include "base/available.h"
#include "base/log.h"
#include "engine/open.h"
#include "model/gates.h"

/* "kv.buffer" of a request is --kv-buffer here. */
static int name_option(int rc, struct fault *fault) {
    char *dot = strchr(fault->field, '.');
    if (rc != 0 && dot && strncmp(fault->field, "kv.", 3) == 0) *dot = '-';
    return rc;
}

/* The settings that the gates' file recommends, for the policy that uses it. */
static struct kv_trained trained_of(const struct model *model) {
    const struct gates_header *gates = model_gates(model);
    return (struct kv_trained){.named = (gates->horizon > 0 ? POLICY_HORIZON : 0) |
                                        (gates->sinks >= 0 ? POLICY_SINKS : 0) |
                                        (gates->recent >= 0 ? POLICY_RECENT : 0) |
                                        (gates->parity >= 0 ? POLICY_PARITY : 0),
                               .horizon = gates->horizon,
                               .sinks = gates->sinks,
                               .recent = gates->recent,
                               .parity = gates->parity == 1};
}

/* A check without loading weights may be told that a start will have gates. */
static bool will_have_gates(const struct engine *e) {
    return model_has_gates(open_model_of(e)) || (e->options.check_only && e->options.gates_follow);
}

/* Gates that an earlier start fitted are for configurations that ask for a budget: without one,
 * what a start does may not depend on what the cache folder happens to hold. */
static bool only_offered(const struct engine *e) {
    return model_gates_from(open_model_of(e)) == GATES_CACHED &&
           engine_chooses(e->options.kv_policy) && !engine_wants_gates(&e->options);
}

/* Tells what a policy without a budget means to somebody who expects one. */
static void note_policy(const struct engine *e, const struct policy *policy, bool lacks_gates) {
    const bool declined = e->options.gates && !e->options.gates[0];
    if (policy->bounded) return;
    if (e->options.kv_budget_given)
        log_warn("kv-budget %d changes nothing: policy %s keeps everything%s. A budget needs a "
                 "policy without gates (--kv-policy snapkv, streaming, ...: docs/CHOOSING.md) or "
                 "gates that are fitted to the model (keepd fit, or --gates FILE)",
                 e->options.kv_budget, policy->name,
                 !lacks_gates ? ""
                 : declined   ? ", and --gates '' uses no retention gates for policy global"
                              : ", and the model has no retention gates for policy global");
    else if (only_offered(e))
        log_info("gates that were fitted to the model are there, and no budget was asked for: the "
                 "cache keeps everything (policy full). --kv-budget N bounds it with them");
    else if (lacks_gates && declined)
        log_info("--gates '' uses no retention gates: the cache keeps everything (policy full). "
                 "Without it, --kv-budget N bounds the cache");
    else if (lacks_gates)
        log_info("the model has no retention gates: the cache keeps everything (policy full). "
                 "--kv-budget N bounds it: a start then fits gates to the model, once, in minutes; "
                 "keepd fit also prints what a budget loses");
}

static int resolve_policy(struct engine *e, struct sched_kv *rules, struct fault *fault) {
    struct kv_params *kv = &rules->defaults;
    const char *name = e->options.kv_policy;
    bool whole_texts = model_config(open_model_of(e))->both_ways;
    bool gates = will_have_gates(e) && !whole_texts;
    bool automatic = engine_chooses(name);
    if (automatic) name = gates && !only_offered(e) ? "global" : "full";
    const struct policy *policy = policy_find(name); /* found: see check_options */
    if ((policy->needs & POLICY_NEEDS_GATES) != 0 && !gates)
        return fault_set(fault, ERR_INVALID, "kv-policy", "'%s' needs retention gates; %.200s%s",
                         name, e->options.gates ? "--gates ''" : e->options.model_dir,
                         e->options.gates
                             ? " says to use none"
                             : " has none and none were fitted to it: keepd fit MODEL");
    if (!policy->bounded && e->options.kv_budget_max > 0)
        return fault_set(fault, ERR_INVALID, "kv-budget-max",
                         "policy '%s' keeps everything, so no request could be served",
                         policy->name);
    if (!whole_texts) note_policy(e, policy, automatic && !gates);
    *kv = (struct kv_params){.budget = e->options.kv_budget,
                             .buffer = e->options.kv_buffer,
                             .chunk = e->options.kv_chunk,
                             .sliding_window =
                                 model_config_sliding_window(model_config(open_model_of(e))),
                             .whole = model_config(open_model_of(e))->state_layers > 0};
    kv_params_set_policy(kv, policy);
    kv_params_set_trained(kv, &rules->trained);
    /* The same rule as for requests that lower the budget. */
    kv_params_fit(kv, 0);
    int rc = name_option(kv_params_check(kv, fault), fault);
    if (rc == 0 && e->options.kv_budget_max > 0 && kv->budget > e->options.kv_budget_max)
        rc = fault_set(fault, ERR_INVALID, "kv-budget", "is above kv-budget-max (%d)",
                       e->options.kv_budget_max);
    return rc;
}

/* Reports use the first name of a dtype. */
static const struct {
    const char *name;
    enum kern_dtype dtype;
} kv_dtypes[] = {{"f32", KERN_F32},       {"bf16", KERN_BF16}, {"fp8", KERN_E4M3},
                 {"fp8_e4m3", KERN_E4M3}, {"q8", KERN_ROW8},   {"q4", KERN_ROW4}};
enum { KV_DTYPES = sizeof kv_dtypes / sizeof *kv_dtypes };

static int resolve_kv_dtype(struct engine *e, enum kern_dtype *dtype, struct fault *fault) {
    const char *name = e->options.kv_dtype;
    bool chosen = !engine_chooses(name);
    int i = 0;
    *dtype = model_config(open_model_of(e))->dtype == KERN_F32 ? KERN_F32 : KERN_BF16;
    while (chosen && i < KV_DTYPES && strcmp(name, kv_dtypes[i].name) != 0) i++;
    if (i == KV_DTYPES)
        return fault_set(fault, ERR_INVALID, "kv-dtype",
                         "'%.20s' is not auto, f32, bf16, fp8, q8 or q4", name);
    if (chosen) *dtype = kv_dtypes[i].dtype;
    for (i = 0; kv_dtypes[i].dtype != *dtype;) i++;
    snprintf(e->info.kv_dtype, sizeof e->info.kv_dtype, "%s", kv_dtypes[i].name);
    return 0;
}

/* Returns the pages that a running conversation needs at most on a rank: of any length with a
 * budget, else of the longest text. */
static int64_t conversation_pages(const struct engine *e, const struct reserve_shape *shape,
                                  const struct kv_params *kv) {
    int64_t longest = e->info.max_model_len;
    const struct reserve_turn turn = {.added = longest};
    return reserve_turn_pages(shape, kv, &turn, reserve_whole(kv, longest));
}

/* Memory beside the pools, in which weights are not counted: they are loaded already. */
static int64_t beside_bytes(const struct engine *e) {
    return (e->draft.bytes + e->encoder.bytes) * e->replica_count;
}

/* Chooses the pages of one rank in host memory, which is shared with other processes: enough for
 * every place to run at the default budget and for as many retained conversations, bounded by half
 * of the free memory. The pool is reserved address space; pages cost memory when first used. */
static int64_t choose_host_pages(const struct engine *e, const struct reserve_shape *shape,
                                 const struct kv_params *kv, int64_t page_bytes) {
    int64_t wanted = conversation_pages(e, shape, kv) * e->options.max_num_seqs * 2;
    int ranks = e->options.tensor_parallel_size > 1 ? e->options.tensor_parallel_size : 1;
    int64_t free_bytes = available_memory("") - beside_bytes(e);
    int64_t most = free_bytes / 2 / e->replica_count / ranks / page_bytes;
    return wanted < most ? wanted : most;
}

static struct kern_cache_options cache_options(const struct engine *e, enum kern_dtype dtype,
                                               const struct sched_options *so) {
    const struct model_config *config = model_config(open_model_of(e));
    struct kern_cache_options cache = model_cache_options(config);
    cache.dtype = dtype;
    cache.pages = so->pages_total;
    cache.slots = so->sequences_max + so->conversations_max;
    cache.max_positions = e->info.max_model_len;
    cache.rank_cap = so->shape.rank_cap;
    cache.rows_max = so->rows_max;
    cache.logits_max = so->logits_max;
    return cache;
}

/* Chooses the number of pages: kv_pool_bytes if given; on a dedicated device, all that fits beside
 * the weights; otherwise as choose_host_pages. */
static int choose_pages(const struct engine *e, enum kern_dtype dtype, struct sched_options *so,
                        struct fault *fault) {
    const struct kern_cache_options cache = cache_options(e, dtype, so);
    const int64_t bytes = e->options.kv_pool_bytes, most = e->options.kv_pool_most;
    int rc = 0;
    if (bytes > 0) {
        so->pages_total = bytes / so->page_bytes;
        return 0;
    }
    if (open_ops_of(e)->cache_fit)
        rc = open_ops_of(e)->cache_fit(e->replicas[0].kern, &cache, &so->pages_total, fault);
    else
        so->pages_total = choose_host_pages(e, &so->shape, &so->kv.defaults, so->page_bytes);
    if (most > 0 && so->pages_total > most / so->page_bytes)
        so->pages_total = most / so->page_bytes;
    return rc;
}

/* Returns the number of ranks that hold different heads: ranks beyond the number of heads share
 * them (kernels/shard.h). */
static int pool_ranks(const struct engine *e) {
    int ranks = open_ranks(e), heads = model_config(open_model_of(e))->heads_kv;
    return ranks < heads ? ranks : heads;
}

/* Refuses sizes that this machine cannot hold, where the cache is in its memory; a device has its
 * own checks. */
static int check_sizes(const struct engine *e, const struct sched_options *so,
                       struct fault *fault) {
    const struct kv_params *kv = &so->kv.defaults;
    const struct model_config *config = model_config(open_model_of(e));
    int64_t total = total_memory("") - beside_bytes(e), ranks = so->shape.ranks;
    if (open_ops_of(e)->cache_fit) return 0;
    if (e->options.kv_pool_bytes > total / ranks / e->replica_count)
        return fault_set(fault, ERR_INVALID, "kv-pool-bytes",
                         "%.1f GB are more than this machine or its container has: %.1f GB in all, "
                         "%.1f GB of them free%s; without the option a size is chosen",
                         (double)e->options.kv_pool_bytes * 1e-9, (double)total * 1e-9,
                         (double)available_memory("") * 1e-9,
                         ranks * e->replica_count > 1 ? ", and each rank has a pool" : "");
    struct reserve_shape whole = so->shape;
    whole.ranks = 1;
    double held = (double)so->page_bytes * (double)reserve_even_pages(&whole, kv->budget);
    if (kv->policy->bounded && held > (double)total)
        return fault_set(
            fault, ERR_INVALID, "kv-budget",
            "a conversation with %d entries per head takes %.1f GB; this machine or its "
            "container has %.1f GB in all, and the model %d positions. To evict nothing "
            "use --kv-policy full",
            kv->budget, held * 1e-9, (double)total * 1e-9, config->max_positions);
    if (kv->policy->bounded && kv->budget > e->info.max_model_len && e->options.kv_budget_given)
        log_warn("kv-budget %d is more than the %d positions that a text may have: nothing is ever "
                 "evicted",
                 kv->budget, e->info.max_model_len);
    return 0;
}

/* The heads of the layers without, and with, a sliding window. */
static void fill_heads(const struct engine *e, enum kern_dtype dtype, struct reserve_shape *shape) {
    const struct model_config *config = model_config(open_model_of(e));
    for (int i = 0; i < config->layers && config->heads; i++) {
        const struct model_layer_config *layer = &config->per_layer[i];
        const struct kern_cache_options alone = {.dtype = dtype, .head_dim = layer->head_dim};
        struct kern_cache_info info = {0};
        if (!layer_attends(layer)) continue;
        open_ops_of(e)->cache_info(&alone, &info);
        if (layer->sliding_window) {
            shape->sliding_heads_kv = layer->heads_kv;
            shape->sliding_page_slots = info.page_slots;
        } else {
            shape->heads_kv = layer->heads_kv;
            shape->page_slots = info.page_slots;
        }
    }
}

/* Sets the shape and the size of the pool on each rank of each replica. */
static int plan_pool(const struct engine *e, enum kern_dtype dtype, struct sched_options *so,
                     struct fault *fault) {
    const struct model_config *config = model_config(open_model_of(e));
    struct kern_cache_info info = {0};
    struct kern_cache_options cache = model_cache_options(config);
    cache.dtype = dtype;
    open_ops_of(e)->cache_info(&cache, &info);
    so->shape =
        (struct reserve_shape){.layers = config->cache_layers,
                               .heads_kv = config->heads_kv,
                               .page_slots = info.page_slots,
                               .member_slots = info.member_slots,
                               .ranks = pool_ranks(e),
                               .rank_cap = (float)e->options.kv_rank_cap / 100,
                               .states = config->state_layers,
                               .state_pages = model_state_pages(config, &info, open_ranks(e)),
                               .sliding_layers = model_config_sliding_layers(config)};
    fill_heads(e, dtype, &so->shape);
    so->page_bytes = info.page_bytes;
    int rc = check_sizes(e, so, fault);
    if (rc == 0) rc = choose_pages(e, dtype, so, fault);
    if (rc != 0) return rc;
    int64_t least = reserve_streams(&so->shape) + so->shape.state_pages;
    if (so->pages_total >= least) return 0;
    return fault_set(
        fault, ERR_INVALID, "kv-pool-bytes",
        "the pool has %lld pages of %lld bytes; one token needs %lld: at least %.1f MB",
        (long long)so->pages_total, (long long)info.page_bytes, (long long)least,
        (double)(least * info.page_bytes) * 1e-6);
}

static void log_pool(const struct engine *e, const struct sched_options *so) {
    const struct kv_params *kv = &so->kv.defaults;
    char ranks[40] = "", each[64];
    if (e->options.tensor_parallel_size > 1)
        snprintf(ranks, sizeof ranks, " on each of %d ranks", e->options.tensor_parallel_size);
    if (kv->policy->bounded)
        snprintf(each, sizeof each, "with a budget of %d entries per head", kv->budget);
    else
        snprintf(each, sizeof each, "of %d tokens", e->info.max_model_len);
    log_info("cache: %.1f GB%s, %lld conversations %s",
             (double)(so->pages_total * so->page_bytes) * 1e-9, ranks,
             (long long)(so->pages_total / conversation_pages(e, &so->shape, kv)), each);
    log_debug("cache: %lld pages of %lld bytes%s", (long long)so->pages_total,
              (long long)so->page_bytes, ranks);
}

int open_plan_cache(struct engine *e, struct sched_options *so, enum kern_dtype *dtype,
                    struct fault *fault) {
    int rc = resolve_kv_dtype(e, dtype, fault);
    so->kv.trained = trained_of(open_model_of(e));
    if (rc == 0) rc = resolve_policy(e, &so->kv, fault);
    so->kv.backend = open_ops_of(e)->name;
    so->kv.rule_check = open_ops_of(e)->rule_check;
    so->kv.has_gates = will_have_gates(e);
    so->kv.positions = e->info.max_model_len;
    so->kv.can_shift = open_ops_of(e)->shift != NULL;
    so->kv.unrotated = !model_config_rotates_alike(model_config(open_model_of(e)));
    so->kv.axes = model_config(open_model_of(e))->axes != NULL;
    so->kv.latent = model_config(open_model_of(e))->latent.rank > 0;
    so->kv.latent_unread = so->kv.latent && !open_ops_of(e)->reads_latent;
    if (rc == 0) rc = name_option(sched_check_rule(&so->kv, &so->kv.defaults, fault), fault);
    so->kv.shifts = e->options.kv_overflow != ENGINE_OVERFLOW_ERROR;
    if (rc == 0 && e->options.kv_overflow == ENGINE_OVERFLOW_SHIFT)
        rc = name_option(sched_check_shift(&so->kv, &so->kv.defaults, fault), fault);
    if (rc != 0) return rc;
    so->kv.budget_max = e->options.kv_budget_max;
    rc = plan_pool(e, *dtype, so, fault);
    if (rc == 0 && !e->options.check_only) {
        if (model_gates_path(open_model_of(e))[0])
            log_info("retention gates: %s", model_gates_path(open_model_of(e)));
        if (open_ops_of(e)->activations) log_info("activations: %s", open_ops_of(e)->activations);
        log_pool(e, so);
    }
    return rc;
}

/* Without this check the daemon would start and refuse every request that names no policy. It needs
 * the cache: the limits of a device depend on the shape of heads and pages. */
static int check_default(struct kern *kern, const struct kv_params *defaults, struct fault *fault) {
    if (!kern->ops->prepare) return 0;
    int rc = kern->ops->prepare(kern, 0, &defaults->rule, 0);
    kern->ops->release(kern, 0);
    if (rc != ERR_UNSUPPORTED) return 0; /* a lack of memory ends the request that meets it */
    return name_option(sched_refuse_policy(defaults, fault), fault);
}

int open_pool(const struct engine *e, struct replica *replica, enum kern_dtype dtype,
              const struct sched_options *so, struct fault *fault) {
    const struct kern_cache_options cache = cache_options(e, dtype, so);
    struct kern *kern = replica->kern;
    if (kern->ops->bind) kern->ops->bind(kern);
    int rc = kern->ops->cache_open(kern, &cache, fault);
    return rc == 0 ? check_default(kern, &so->kv.defaults, fault) : rc;
}
