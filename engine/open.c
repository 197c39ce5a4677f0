/* Opens an engine: turns the options into its parts. Checks come in the order that fails early:
 * options, text, backend, model, cache, state directory. A check alone (check_only) goes the same
 * way and stops before weights and pools are allocated. Every fault names its option or its file.
 *
 * Runs on one thread, before the replicas' threads exist. The calls of the running engine are in
 * engine.c. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/available.h"
#include "base/check.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "engine/disk/state_dir.h"
#include "engine/draft_model.h"
#include "engine/encoder.h"
#include "engine/engine_int.h"
#include "kernels/comm.h"
#include "model/gates.h"
#include "model/identity.h"
#include "model/path.h"
#include "model/save.h"

#define ENCODE_BYTES_MAX ((size_t)1 << 20) /* memory for the tokens of a short text */

/* Constant facts come from the first replica: all replicas have the same model and the same kind of
 * backend. */
static const struct model *model_of(const struct engine *e) {
    return e->replicas[0].model;
}

static const struct kern_ops *ops_of(const struct engine *e) {
    return e->replicas[0].kern->ops;
}

static size_t text_token_bytes(const void *arg, int32_t id, const char **bytes) {
    const struct tok *tok = arg;
    if (tok_is_special(tok, id)) return 0; /* markers are not part of an answer */
    return tok_bytes(tok, id, bytes);
}

/* A text may end inside a character, which is left out. A tokenizer may put a space in front of a
 * text or change it otherwise: what is not the text ends the tokens. */
static int32_t text_encode(const void *arg, const char *text, size_t size, int32_t *ids,
                           int32_t most) {
    struct arena arena;
    struct fault fault = {0};
    struct tok_ids found = {0};
    int32_t count = 0;
    for (int i = 0; i < 3 && size > 0 && !utf8_valid(text, size); i++) size--;
    arena_open(&arena, ENCODE_BYTES_MAX);
    (void)tok_encode(arg, text, size, 0, NULL, 0, SIZE_MAX, &arena, &found, &fault);
    for (size_t i = 0, at = 0; i < found.count && count < most; i++) {
        const char *bytes;
        size_t length = text_token_bytes(arg, found.ids[i], &bytes);
        if (length == 0 || length > size - at || memcmp(bytes, text + at, length) != 0) break;
        ids[count++] = found.ids[i];
        at += length;
    }
    arena_close(&arena);
    return count;
}

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

static const char *gates_from(const struct engine *e) {
    static const char *const names[] = {[GATES_NONE] = "none",
                                        [GATES_GIVEN] = "given",
                                        [GATES_BESIDE] = "beside",
                                        [GATES_CACHED] = "cache",
                                        [GATES_RANDOM] = "random"};
    const enum gates_from from = model_gates_from(model_of(e));
    return e->options.gates_fitted && from != GATES_NONE ? "fitted" : names[from];
}

/* A check without loading weights may be told that a start will have gates. */
static bool will_have_gates(const struct engine *e) {
    return model_has_gates(model_of(e)) || (e->options.check_only && e->options.gates_follow);
}

/* Gates that an earlier start fitted are for configurations that ask for a budget: without one,
 * what a start does may not depend on what the cache folder happens to hold. */
static bool only_offered(const struct engine *e) {
    return model_gates_from(model_of(e)) == GATES_CACHED && engine_chooses(e->options.kv_policy) &&
           !engine_wants_gates(&e->options);
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
    bool whole_texts = model_config(model_of(e))->both_ways;
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
    *kv =
        (struct kv_params){.budget = e->options.kv_budget,
                           .buffer = e->options.kv_buffer,
                           .chunk = e->options.kv_chunk,
                           .sliding_window = model_config_sliding_window(model_config(model_of(e))),
                           .whole = model_config(model_of(e))->state_layers > 0};
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
    *dtype = model_config(model_of(e))->dtype == KERN_F32 ? KERN_F32 : KERN_BF16;
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
    const struct model_config *config = model_config(model_of(e));
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
    if (ops_of(e)->cache_fit)
        rc = ops_of(e)->cache_fit(e->replicas[0].kern, &cache, &so->pages_total, fault);
    else
        so->pages_total = choose_host_pages(e, &so->shape, &so->kv.defaults, so->page_bytes);
    if (most > 0 && so->pages_total > most / so->page_bytes)
        so->pages_total = most / so->page_bytes;
    return rc;
}

/* Checks with the first replica's backend: every replica's cache has the same shape. */
static int check_state(void *backend, struct state_view *view, struct fault *fault) {
    struct kern *kern = backend;
    const struct state_head *head = &view->head;
    return kern->ops->snapshot_check(kern, view->blocks, head->block_count, head->token_count,
                                     &view->report, fault);
}

static enum quantization quantization_of(const struct engine_options *o) {
    static const char *const names[] = {
        [QUANTIZE_FP8] = "fp8", [QUANTIZE_Q8] = "q8", [QUANTIZE_Q4] = "q4"};
    for (int i = QUANTIZE_FP8; o->quantization && i <= QUANTIZE_Q4; i++)
        if (!strcmp(o->quantization, names[i])) return (enum quantization)i;
    return QUANTIZE_NONE;
}

/* Adapters may be loaded after the start. */
static bool may_load_adapters(const struct engine_options *o) {
    return o->adapter_dir && o->adapter_dir[0];
}

struct model_options engine_model_options(const struct engine_options *o) {
    return (struct model_options){.dir = o->model_dir,
                                  .context = o->max_model_len,
                                  .gates = o->gates,
                                  .gates_cache = o->gates_cache,
                                  .check_only = o->check_only,
                                  .quantization = quantization_of(o),
                                  .calibrate = o->calibrate,
                                  .random_weights = o->random_weights,
                                  .threads = o->threads,
                                  .progress = o->progress,
                                  .progress_arg = o->arg};
}

/* The first replica's store opens the directory; the stores of the others join it. */
static int open_store(struct engine *e, struct sched_options *so, enum kern_dtype dtype,
                      struct fault *fault) {
    struct replica *first = &e->replicas[0];
    const struct model_config *config = model_config(model_of(e));
    const struct engine_options *o = &e->options;
    struct store_options store = {.dir = o->state_dir,
                                  .bytes = o->state_bytes,
                                  .identity = {.dtype = (int32_t)dtype,
                                               .layers = config->cache_layers,
                                               .heads_kv = config->heads_kv,
                                               .head_dim = config->head_dim},
                                  .state_bytes = model_state_bytes(config),
                                  .check = check_state,
                                  .backend = e->replicas[0].kern,
                                  .done = replica_wake,
                                  .arg = first};
    if (!o->state_dir || o->state_dir[0] == '\0') return 0;
    if (o->check_only) return state_dir_check(o->state_dir, fault);
    struct state_identity *identity = &store.identity;
    int rc = identity_model(o->model_dir, o->random_weights, quantization_of(o), identity->weights,
                            fault);
    if (rc == 0) rc = identity_gates(model_gates_path(model_of(e)), identity->gates, fault);
    if (rc == 0) rc = store_open(&store, &first->store, fault);
    if (rc != 0) return rc;
    for (int i = 1; i < e->replica_count; i++)
        e->replicas[i].store = store_join(first->store, replica_wake, &e->replicas[i]);
    store_space_key(first->store, e->space_key);
    so->save_idle_ns = (int64_t)o->state_idle_seconds * 1000000000;
    so->copy_bytes = SCHED_COPY_BYTES;
    struct store_stats stats;
    store_stats(first->store, &stats);
    log_info("state directory: %d conversations of this model, %lld bytes in all", stats.files,
             (long long)stats.bytes);
    if (!so->kv.defaults.policy->bounded && !config->both_ways)
        log_warn("state directory: conversations with policy %s, the default here, are not "
                 "written; --kv-budget N, with gates or with --kv-policy snapkv, streaming, ..., "
                 "gives one whose are",
                 so->kv.defaults.policy->name);
    return 0;
}

static int all_ranks(const struct engine *e) {
    return e->options.tensor_parallel_size < 1 ? 1 : e->options.tensor_parallel_size;
}

/* Returns the number of ranks that hold different heads: ranks beyond the number of heads share
 * them (kernels/shard.h). */
static int pool_ranks(const struct engine *e) {
    int ranks = all_ranks(e), heads = model_config(model_of(e))->heads_kv;
    return ranks < heads ? ranks : heads;
}

/* Refuses sizes that this machine cannot hold, where the cache is in its memory; a device has its
 * own checks. */
static int check_sizes(const struct engine *e, const struct sched_options *so,
                       struct fault *fault) {
    const struct kv_params *kv = &so->kv.defaults;
    const struct model_config *config = model_config(model_of(e));
    int64_t total = total_memory("") - beside_bytes(e), ranks = so->shape.ranks;
    if (ops_of(e)->cache_fit) return 0;
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
    const struct model_config *config = model_config(model_of(e));
    for (int i = 0; i < config->layers && config->heads; i++) {
        const struct model_layer_config *layer = &config->per_layer[i];
        const struct kern_cache_options alone = {.dtype = dtype, .head_dim = layer->head_dim};
        struct kern_cache_info info = {0};
        if (!layer_attends(layer)) continue;
        ops_of(e)->cache_info(&alone, &info);
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
    const struct model_config *config = model_config(model_of(e));
    struct kern_cache_info info = {0};
    struct kern_cache_options cache = model_cache_options(config);
    cache.dtype = dtype;
    ops_of(e)->cache_info(&cache, &info);
    so->shape =
        (struct reserve_shape){.layers = config->cache_layers,
                               .heads_kv = config->heads_kv,
                               .page_slots = info.page_slots,
                               .member_slots = info.member_slots,
                               .ranks = pool_ranks(e),
                               .rank_cap = (float)e->options.kv_rank_cap / 100,
                               .states = config->state_layers,
                               .state_pages = model_state_pages(config, &info, all_ranks(e)),
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

/* Without this check the daemon would start and refuse every request that names no policy. It needs
 * the cache: the limits of a device depend on the shape of heads and pages. */
static int check_default(struct kern *kern, const struct kv_params *defaults, struct fault *fault) {
    if (!kern->ops->prepare) return 0;
    int rc = kern->ops->prepare(kern, 0, &defaults->rule, 0);
    kern->ops->release(kern, 0);
    if (rc != ERR_UNSUPPORTED) return 0; /* a lack of memory ends the request that meets it */
    return name_option(sched_refuse_policy(defaults, fault), fault);
}

static int open_pool(const struct engine *e, struct replica *replica, enum kern_dtype dtype,
                     const struct sched_options *so, struct fault *fault) {
    const struct kern_cache_options cache = cache_options(e, dtype, so);
    struct kern *kern = replica->kern;
    if (kern->ops->bind) kern->ops->bind(kern);
    int rc = kern->ops->cache_open(kern, &cache, fault);
    return rc == 0 ? check_default(kern, &so->kv.defaults, fault) : rc;
}

static enum cpu_activations cpu_activations_of(const char *name) {
    if (name && !strcmp(name, "int16")) return CPU_INT16;
    if (name && !strcmp(name, "bf16")) return CPU_BF16;
    if (name && !strcmp(name, "int8")) return CPU_INT8;
    return name && !strcmp(name, "f32") ? CPU_F32 : CPU_BY_WEIGHT;
}

struct backend_options engine_backend(const struct engine_options *o, int replicas) {
    return (struct backend_options){.device = o->device,
                                    .cpu_path = o->cpu_path,
                                    .cpu_activations = cpu_activations_of(o->cpu_activations),
                                    .threads = o->threads,
                                    .replicas = replicas,
                                    .ranks = o->tensor_parallel_size};
}

int64_t engine_unused_memory(const struct engine_options *options) {
    const struct backend_options backend = engine_backend(options, options->data_parallel_size);
    return backend_unused_memory(&backend);
}

static int open_backends(struct engine *e, struct fault *fault) {
    const struct backend_options backend = engine_backend(&e->options, e->replica_count);
    struct kern *kerns[ENGINE_REPLICAS_MAX] = {0};
    int rc = backend_open(&backend, kerns, fault);
    for (int i = 0; i < e->replica_count; i++) e->replicas[i].kern = kerns[i];
    return rc;
}

/* The first replica's weights serve all of them where the backend can share. */
static int open_model(struct engine *e, struct replica *replica, int logits_max,
                      struct fault *fault) {
    struct kern *kern = replica->kern;
    struct model_options options = engine_model_options(&e->options);
    options.rows_max = e->options.max_num_batched_tokens;
    options.logits_max = logits_max;
    options.peek_rows = e->options.drafts != 0 ? SCHED_PEEK_ROWS : 0;
    options.owner = e->replicas[0].model;
    options.adapts = e->options.adapter_count > 0 || may_load_adapters(&e->options);
    if (kern->ops->bind) kern->ops->bind(kern);
    return model_open(kern, &options, &replica->model, fault);
}

static int prepare_caches(struct engine *e, struct sched_options *so, struct fault *fault) {
    enum kern_dtype dtype = KERN_F32;
    int rc = resolve_kv_dtype(e, &dtype, fault);
    so->kv.trained = trained_of(model_of(e));
    if (rc == 0) rc = resolve_policy(e, &so->kv, fault);
    so->kv.backend = ops_of(e)->name;
    so->kv.rule_check = ops_of(e)->rule_check;
    so->kv.has_gates = will_have_gates(e);
    so->kv.positions = e->info.max_model_len;
    so->kv.can_shift = ops_of(e)->shift != NULL;
    so->kv.unrotated = !model_config_rotates_alike(model_config(model_of(e)));
    so->kv.axes = model_config(model_of(e))->axes != NULL;
    so->kv.latent = model_config(model_of(e))->latent.rank > 0;
    so->kv.latent_unread = so->kv.latent && !ops_of(e)->reads_latent;
    if (rc == 0) rc = name_option(sched_check_rule(&so->kv, &so->kv.defaults, fault), fault);
    so->kv.shifts = e->options.kv_overflow != ENGINE_OVERFLOW_ERROR;
    if (rc == 0 && e->options.kv_overflow == ENGINE_OVERFLOW_SHIFT)
        rc = name_option(sched_check_shift(&so->kv, &so->kv.defaults, fault), fault);
    if (rc != 0) return rc;
    so->kv.budget_max = e->options.kv_budget_max;
    rc = plan_pool(e, dtype, so, fault);
    if (rc == 0 && !e->options.check_only) {
        if (model_gates_path(model_of(e))[0])
            log_info("retention gates: %s", model_gates_path(model_of(e)));
        if (ops_of(e)->activations) log_info("activations: %s", ops_of(e)->activations);
        log_pool(e, so);
    }
    for (int i = 0; i < e->replica_count && rc == 0 && !e->options.check_only; i++) {
        if (i > 0) rc = open_model(e, &e->replicas[i], so->logits_max, fault);
        if (rc == 0) rc = open_pool(e, &e->replicas[i], dtype, so, fault);
    }
    return rc == 0 ? open_store(e, so, dtype, fault) : rc;
}

static int max_logprobs(const struct engine_options *options, int vocab) {
    int wanted = options->max_logprobs ? options->max_logprobs : ENGINE_TOP_MAX;
    return wanted < vocab ? wanted : vocab;
}

static int max_choices(const struct engine_options *options) {
    int most =
        options->max_num_seqs < ENGINE_CHOICES_MAX ? options->max_num_seqs : ENGINE_CHOICES_MAX;
    int wanted = options->max_choices;
    return wanted > 0 && wanted < most ? wanted : most;
}

/* Names of enum engine_pooling, as --pooling has them. */
static const char *const pooling_names[] = {
    [ENGINE_POOL_LAST] = "last", [ENGINE_POOL_MEAN] = "mean", [ENGINE_POOL_CLS] = "cls"};

/* The last token of a model that only writes has seen all others, so it stands for the text where
 * the files say nothing; of one that reads both ways, all tokens do. NONE: they ask for what is not
 * there. */
static enum engine_pooling find_pooling(const struct engine_options *options,
                                        const struct model_config *config) {
    static const enum engine_pooling own[] = {[MODEL_POOL_UNSAID] = ENGINE_POOL_LAST,
                                              [MODEL_POOL_LAST] = ENGINE_POOL_LAST,
                                              [MODEL_POOL_MEAN] = ENGINE_POOL_MEAN,
                                              [MODEL_POOL_CLS] = ENGINE_POOL_CLS};
    if (config->classifier.labels) return ENGINE_POOL_LABELS;
    for (int i = ENGINE_POOL_LAST; i <= ENGINE_POOL_CLS; i++)
        if (!engine_chooses(options->pooling) && strcmp(options->pooling, pooling_names[i]) == 0)
            return (enum engine_pooling)i;
    if (config->pooling.other[0]) return ENGINE_POOL_NONE;
    return config->both_ways && !config->pooling.how ? ENGINE_POOL_MEAN : own[config->pooling.how];
}

static void fill_draft_info(struct engine *e) {
    struct engine_info *info = &e->info;
    info->speculate = e->options.drafts;
    if (e->draft.texts == 0) return;
    info->draft_model = e->draft_path =
        mem_must_strdup(e->draft.is_block ? "mtp" : e->options.draft_model);
    info->draft_tokens = e->draft.places;
    info->draft_bytes = (int64_t)model_weight_bytes(e->replicas[0].draft_model) + e->draft.bytes;
}

static void fill_vectors(struct engine *e, const struct model_config *config,
                         struct engine_info *info) {
    const struct pooling *pooling = &config->pooling;
    const size_t prompts = (size_t)pooling->prompt_count;
    e->prompts = mem_must_alloc(prompts, sizeof *e->prompts);
    for (size_t i = 0; i < prompts; i++)
        e->prompts[i] = (struct engine_prompt){pooling->prompts[i].name, pooling->prompts[i].text};
    info->prompts = e->prompts;
    info->prompt_count = pooling->prompt_count;
    info->width = model_vector_width(config);
    info->labels = config->classifier.labels;
    info->label_sigmoid = config->classifier.sigmoid;
    info->whole_texts = config->both_ways;
    info->pooling = find_pooling(&e->options, config);
    info->pooling_other = pooling->other;
}

static void fill_info(struct engine *e, const struct sched_options *so) {
    const struct model_config *config = model_config(model_of(e));
    struct engine_info *info = &e->info;
    info->model_dir = e->model_dir;
    snprintf(info->family, sizeof info->family, "%s", config->family);
    snprintf(info->backend, sizeof info->backend, "%s", ops_of(e)->name);
    info->activations = ops_of(e)->activations;
    snprintf(info->kv_policy, sizeof info->kv_policy, "%s", so->kv.defaults.policy->name);
    info->kv_budget = kv_params_shown_budget(&so->kv.defaults);
    info->kv_buffer = so->kv.defaults.buffer;
    info->kv_chunk = so->kv.defaults.chunk;
    info->kv_budget_max = so->kv.budget_max;
    fill_draft_info(e);
    info->has_gates = so->kv.has_gates;
    info->gates_from = gates_from(e);
    info->trained_budget = model_gates(model_of(e))->trained_budget;
    info->layers = config->cache_layers;
    info->heads_kv = config->heads_kv;
    if (config->heads) /* layers differ */
        e->layer_heads = mem_must_alloc((size_t)config->cache_layers, sizeof *e->layer_heads);
    for (int i = 0; config->heads && i < config->cache_layers; i++)
        e->layer_heads[i] = config->heads[i].kv;
    info->layer_heads = e->layer_heads;
    info->head_dim = config->head_dim;
    info->vocab = config->vocab;
    fill_vectors(e, config, info);
    info->loads_adapters = may_load_adapters(&e->options);
    info->max_adapters = e->adapters.most;
    info->max_num_seqs = e->options.max_num_seqs;
    info->max_queue = e->options.max_queue;
    info->max_choices = max_choices(&e->options);
    info->max_logprobs = so->top_max;
    memcpy(info->space_key, e->space_key, sizeof info->space_key);
    info->replicas = e->replica_count;
    info->threads = backend_threads(e->options.threads);
    info->pages_total = so->pages_total;
    info->page_bytes = so->page_bytes;
    info->page_slots = so->shape.sliding_page_slots > so->shape.page_slots
                           ? so->shape.sliding_page_slots
                           : so->shape.page_slots;
    info->token_entries = reserve_token_entries(&so->shape);
    info->pool_ranks = so->shape.ranks;
    info->weight_bytes = model_weight_bytes(model_of(e));
    info->has_chat_template = e->text.chat != NULL;
    info->chat_template = e->text.source;
    info->tool_template = e->text.tool_source ? e->text.tool_source : e->text.source;
    if (e->replicas[0].encoder) info->pictures = &vision_config(e->replicas[0].encoder)->form;
    info->bos_token = e->text.bos;
    info->eos_token = e->text.eos;
    info->eos = e->ends;
    info->eos_count = e->end_count;
    const struct engine_sampling own = {config->temperature, config->top_p, config->min_p,
                                        config->repetition, config->top_k};
    info->sampling = engine_choose_sampling(own, e->options.sampling);
}

/* Memory beside weights, activations and pages: threads, tables of pages, texts of answers; and of
 * each token of the vocabulary, in the tokenizer and in masks. */
#define MEMORY_BASE      ((int64_t)16 << 20)
#define MEMORY_TABLES    16 /* tables take 1/16 of the pool's size in addition */
#define MEMORY_PER_TOKEN 256

/* The most memory that the engine takes. Weights are shared by replicas, where the backend can.
 * Every rank has a pool of its own, and activations of full width. */
static int64_t memory_of(const struct engine *e, const struct sched_options *so) {
    const struct model *model = model_of(e), *draft = e->replicas[0].draft_model;
    const int64_t pool = so->pages_total * so->page_bytes, ranks = all_ranks(e);
    const int64_t copies = ops_of(e)->borrow ? 1 : e->replica_count;
    const int64_t weights = (int64_t)model_weight_bytes(model) +
                            (draft ? (int64_t)model_weight_bytes(draft) : 0) +
                            e->encoder.weight_bytes;
    const int64_t adapters =
        may_load_adapters(&e->options) ? e->options.adapter_bytes : e->adapters.bytes;
    const int64_t each = (pool + pool / MEMORY_TABLES + (int64_t)model_step_bytes(model)) * ranks +
                         e->draft.bytes + (draft ? (int64_t)model_step_bytes(draft) : 0) +
                         e->encoder.bytes + adapters;
    return weights * copies + each * e->replica_count + MEMORY_BASE +
           model_config(model)->vocab * (int64_t)MEMORY_PER_TOKEN;
}

/* conversation_bytes spreads the entries evenly over the streams; reserve_pages bounds any spread
 * during a whole turn. */
static void fill_found(struct engine *e, const struct sched_options *so,
                       struct engine_found *found) {
    fill_info(e, so);
    *found = (struct engine_found){.kv_budget = e->info.kv_budget,
                                   .has_gates = e->info.has_gates,
                                   .gates_from = e->info.gates_from,
                                   .trained_budget = e->info.trained_budget,
                                   .whole_texts = e->info.whole_texts,
                                   .max_model_len = e->info.max_model_len,
                                   .eos_count = e->end_count};
    memcpy(found->kv_policy, e->info.kv_policy, sizeof found->kv_policy);
    memcpy(found->kv_dtype, e->info.kv_dtype, sizeof found->kv_dtype);
    memcpy(found->eos, e->ends, sizeof found->eos);
    snprintf(found->gates_cached, sizeof found->gates_cached, "%s",
             model_gates_cached(model_of(e)));
    found->pool_bytes = so->pages_total * so->page_bytes;
    found->memory_bytes = memory_of(e, so);
    if (e->info.pictures) found->tile_tokens_max = e->info.pictures->tile_tokens_max;
    found->draft_places = e->draft.places;
    found->draft_text_bytes = e->draft.text_pages * e->draft.page_bytes;
    found->tool_template = e->info.tool_template ? mem_must_strdup(e->info.tool_template) : NULL;
    int64_t longest = found->max_model_len, held = found->kv_budget;
    const struct reserve_turn turn = {.added = longest};
    struct reserve_shape whole = so->shape;
    whole.ranks = 1;
    whole.state_pages *= all_ranks(e);
    found->conversation_bytes =
        so->page_bytes * (so->kv.defaults.policy->bounded
                              ? whole.state_pages + reserve_even_pages(&whole, held)
                              : reserve_turn_pages(&whole, &so->kv.defaults, &turn,
                                                   reserve_whole(&so->kv.defaults, longest)));
}

bool engine_wants_gates(const struct engine_options *options) {
    if (engine_chooses(options->kv_policy)) return options->kv_budget_given;
    const struct policy *policy = policy_find(options->kv_policy);
    return policy && (policy->needs & POLICY_NEEDS_GATES) != 0;
}

static int refuse_policy(const char *name, struct fault *fault) {
    char known[256] = "auto";
    for (int i = 0; policy_at(i); i++)
        snprintf(known + strlen(known), sizeof known - strlen(known), ", %s", policy_at(i)->name);
    return fault_set(fault, ERR_INVALID, "kv-policy", "'%.40s' is not one of %s", name, known);
}

static int check_engine_options(const struct engine_options *o, struct fault *fault) {
    if (o->max_num_seqs < 1)
        return fault_set(fault, ERR_INVALID, "max-num-seqs", "must be at least 1");
    if (o->max_num_batched_tokens <= o->max_num_seqs)
        return fault_set(fault, ERR_INVALID, "max-num-batched-tokens",
                         "must exceed max-num-seqs (%d), so that prompts progress beside answers",
                         o->max_num_seqs);
    if (o->max_queue < 1) return fault_set(fault, ERR_INVALID, "max-queue", "must be at least 1");
    if (o->max_conversations < 0)
        return fault_set(fault, ERR_INVALID, "max-conversations", "must be at least 0");
    if (o->max_logprobs < 0)
        return fault_set(fault, ERR_INVALID, "max-logprobs", "must be at least 0");
    if (o->max_choices < 0)
        return fault_set(fault, ERR_INVALID, "max-choices", "must be at least 0");
    if (o->data_parallel_size < 0 || o->data_parallel_size > ENGINE_REPLICAS_MAX)
        return fault_set(fault, ERR_INVALID, "data-parallel-size", "must be 1 to %d",
                         ENGINE_REPLICAS_MAX);
    if (o->tensor_parallel_size < 0 || o->tensor_parallel_size > COMM_RANKS_MAX ||
        (o->tensor_parallel_size & (o->tensor_parallel_size - 1)) != 0)
        return fault_set(fault, ERR_INVALID, "tensor-parallel-size", "must be 1, 2, 4 or 8");
    if (o->kv_rank_cap != 0 && o->kv_rank_cap < 100)
        return fault_set(fault, ERR_INVALID, "kv-rank-cap", "must be 0 or at least 100 percent");
    if (!engine_chooses(o->kv_policy) && !policy_find(o->kv_policy))
        return refuse_policy(o->kv_policy, fault);
    return 0;
}

/* Checks the options against the model, and the tokenizer against the model. */
static int check_against_model(struct engine *e, struct fault *fault) {
    const struct engine_options *o = &e->options;
    const struct model_config *config = model_config(model_of(e));
    e->info.max_model_len = config->max_positions;
    if (o->max_model_len > config->max_positions)
        return fault_set(
            fault, ERR_INVALID, "max-model-len",
            "the model's positions end at %d: that is the most. With a budget a longer "
            "text may go on all the same (--kv-overflow)",
            config->max_positions);
    if (o->max_model_len > 0) e->info.max_model_len = o->max_model_len;
    if (config->both_ways && o->max_model_len > o->max_num_batched_tokens)
        return fault_set(fault, ERR_INVALID, "max-model-len",
                         "a text is read in one step by this model: at most "
                         "max-num-batched-tokens, %d",
                         o->max_num_batched_tokens);
    if (config->both_ways && e->info.max_model_len > o->max_num_batched_tokens) {
        e->info.max_model_len = o->max_num_batched_tokens;
        log_info("a text has at most %d tokens, which --max-num-batched-tokens bounds; the model "
                 "has %d positions",
                 e->info.max_model_len, config->max_positions);
    }
    if (tok_vocab_size(e->text.tok) > config->vocab)
        return fault_set(fault, ERR_INVALID, "tokenizer.json",
                         "has token ids up to %d but the model's vocab_size is %d",
                         tok_vocab_size(e->text.tok) - 1, config->vocab);
    return 0;
}

/* An answer ends where any of the model's files says so: its configuration, its tokenizer or its
 * chat template. */
static void find_ends(struct engine *e) {
    _Static_assert(ENGINE_ENDS_MAX >= MODEL_EOS_MAX + TEXT_ENDS_MAX, "all ends fit");
    const struct model_config *config = model_config(model_of(e));
    int32_t more[TEXT_ENDS_MAX];
    const size_t count = text_ends(&e->text, more);
    memcpy(e->ends, config->eos, (size_t)config->eos_count * sizeof *e->ends);
    e->end_count = config->eos_count;
    for (size_t i = 0; i < count; i++) {
        int at = 0;
        while (at < e->end_count && e->ends[at] != more[i]) at++;
        if (at < e->end_count) continue;
        const char *name = "";
        const size_t size = tok_name(e->text.tok, more[i], &name);
        log_info("answers also end with %.*s, which the tokenizer or the chat template names",
                 (int)size, name);
        e->ends[e->end_count++] = more[i];
    }
}

static void random_key(uint8_t key[16]) {
    CHECK(getrandom(key, 16, 0) == 16);
}

int engine_space_key(const char *state_dir, uint8_t key[16], struct fault *fault) {
    struct state_dir dir;
    if (!state_dir || !state_dir[0]) {
        random_key(key);
        return 0;
    }
    int rc = state_dir_open(&dir, state_dir, fault);
    if (rc == 0) store_derive_space_key(&dir, key);
    state_dir_close(&dir);
    return rc;
}

static struct engine *new_engine(const struct engine_options *options) {
    struct engine *e = mem_must_alloc(1, sizeof *e);
    e->options = *options;
    e->model_dir = mem_must_strdup(options->model_dir);
    e->common.wake = options->wake;
    e->common.arg = options->arg;
    e->common.max_queue = options->max_queue;
    e->common.adapters = &e->adapters;
    adapters_open(&e->adapters, options->max_adapters, options->adapter_bytes);
    e->replica_count = options->data_parallel_size > 0 ? options->data_parallel_size : 1;
    e->replicas = mem_must_alloc((size_t)e->replica_count, sizeof *e->replicas);
    for (int i = 0; i < e->replica_count; i++) replica_open(&e->replicas[i], i, &e->common);
    if (options->space_key)
        memcpy(e->space_key, options->space_key, sizeof e->space_key);
    else
        random_key(e->space_key);
    return e;
}

/* Loads the adapters of the options, or checks them alone. */
static int open_adapters(struct engine *e, struct fault *fault) {
    const struct engine_options *o = &e->options;
    int rc = 0;
    if ((size_t)o->max_adapters < o->adapter_count)
        rc = fault_set(fault, ERR_LIMIT, "max-loras", "%d, and %zu adapters are given",
                       o->max_adapters, o->adapter_count);
    for (size_t i = 0; i < o->adapter_count && !rc; i++) {
        char name[ENGINE_ADAPTER_NAME];
        const char *path;
        struct fault inner = {0};
        int number = 0;
        rc = adapters_split(o->adapters[i], name, &path, fault);
        if (rc) return rc;
        rc = adapters_read(&e->adapters, model_config(model_of(e)), name, path, &number, &inner);
        for (int k = 0; k < e->replica_count && !rc && !o->check_only; k++) {
            if (ops_of(e)->bind) ops_of(e)->bind(e->replicas[k].kern);
            adapters_attend(&e->adapters, k, e->replicas[k].model);
        }
        if (!rc && !o->check_only)
            rc = adapters_wait(&e->adapters, number, e->replica_count, &inner);
        if (rc)
            return fault_set(fault, rc, "lora", "%.100s: %s%s%s", path, inner.field,
                             inner.field[0] ? ": " : "", inner.text);
    }
    return rc;
}

/* Opens the parts that all replicas share and fills in the scheduler options that they have in
 * common. */
static int open_parts(struct engine *e, struct sched_options *so, struct fault *fault) {
    int rc = model_path_check(e->options.model_dir, e->options.random_weights, fault);
    if (rc == 0) rc = text_open(e->options.model_dir, e->options.chat_template, &e->text, fault);
    if (rc == 0) rc = open_backends(e, fault);
    if (rc == 0) rc = open_model(e, &e->replicas[0], so->logits_max, fault);
    if (rc == 0) rc = check_against_model(e, fault);
    if (rc == 0) rc = draft_model_open(e, fault);
    if (rc == 0) rc = encoder_open(e, fault);
    if (rc == 0) rc = prepare_caches(e, so, fault);
    if (rc == 0) rc = open_adapters(e, fault);
    if (rc != 0) return rc;
    find_ends(e);
    const struct model_config *config = model_config(model_of(e));
    so->vocab = config->vocab;
    so->width = config->d_model;
    so->vector_width = model_vector_width(config);
    so->whole_texts = config->both_ways;
    so->top_max = max_logprobs(&e->options, config->vocab);
    so->text = (struct seq_text){.token_bytes = text_token_bytes,
                                 .encode = text_encode,
                                 .arg = e->text.tok,
                                 .token_bytes_max = tok_bytes_max(e->text.tok),
                                 .eos = e->ends,
                                 .eos_count = e->end_count};
    constraint_table_open(&e->constraints,
                          &(struct constrain_vocabulary){.size = config->vocab,
                                                         .token_bytes = text_token_bytes,
                                                         .arg = e->text.tok});
    return 0;
}

/* Returns the bound on records of clients: one for each job that can be here at once, so that no
 * two clients share a record; at most 4096, because a larger table takes too long to search. */
static int clients_max(const struct engine_options *options) {
    int64_t jobs = (int64_t)options->max_queue + options->max_num_seqs;
    return jobs < 4096 ? (int)jobs : 4096;
}

int engine_open(const struct engine_options *options, struct engine **out, struct fault *fault) {
    *out = NULL;
    int rc = check_engine_options(options, fault);
    if (rc != 0) return rc;
    struct engine *e = new_engine(options);
    int logits_max = options->max_num_seqs + 64; /* room for drafts, and to score prompts */
    if (logits_max > options->max_num_batched_tokens) logits_max = options->max_num_batched_tokens;
    struct sched_options so = {.sequences_max = options->max_num_seqs,
                               .conversations_max = options->max_conversations,
                               .rows_max = options->max_num_batched_tokens,
                               .step_stretch = options->step_stretch,
                               .logits_max = logits_max,
                               .drafts = options->drafts < DRAFT_MAX ? options->drafts : DRAFT_MAX,
                               .row_entries = KV_ROW_ENTRIES,
                               .clients_max = clients_max(options)};
    rc = open_parts(e, &so, fault);
    if (rc == 0 && options->check_only && options->found) fill_found(e, &so, options->found);
    if (rc != 0 || options->check_only) {
        engine_close(e);
        return rc;
    }
    fill_info(e, &so);
    for (int i = 0; i < e->replica_count; i++) {
        so.drafter = draft_model_options(e, &e->replicas[i]);
        so.pictures = encoder_options(e, &e->replicas[i]);
        replica_ready(&e->replicas[i], &so);
    }
    *out = e;
    return 0;
}

int engine_save(const struct engine_options *options, const char *to, size_t *bytes,
                struct fault *fault) {
    struct engine_options check = *options;
    struct engine *engine;
    check.check_only = true;
    check.progress = NULL;
    check.device = "cpu";
    int rc = engine_open(&check, &engine, fault);
    const struct model_options model = engine_model_options(options);
    return rc ? rc : model_save(&model, to, bytes, fault);
}
