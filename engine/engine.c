/* The engine thread and what stands around it: start-up in the order that fails early, the bounded
 * queue in, the published snapshot out. Deciding is sched.c, computing model.c, words text.c. */
#include "engine/engine.h"

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/ring.h"
#include "engine/backend.h"
#include "engine/identity.h"
#include "engine/model.h"
#include "engine/sched.h"
#include "engine/text.h"

struct engine {
    struct engine_options options;
    struct engine_info info;
    char *model_dir;
    uint8_t space_key[16];
    struct text text;
    struct kern *kern;
    struct model *model;
    struct store *store; /* NULL without a state directory */
    struct sched sched;  /* the engine thread's, after engine_start */
    struct ring submits; /* loop -> engine */
    struct ring deletes; /* loop -> engine */
    atomic_int places;   /* taken in the bounded queue */
    atomic_int pending;  /* submitted jobs that have not finished: what drain waits for */
    atomic_bool draining, stopping;
    atomic_bool unsaved; /* something is not on disk yet that could be */
    bool started;
    pthread_t thread;
    /* Only for sleeping while idle and for the published copies below. */
    pthread_mutex_t lock;
    pthread_cond_t work;
    struct engine_snapshot snapshot;
    struct engine_sequence_row *sequence_rows;
    int sequence_count;
    bool drain_seen; /* by the engine thread: it has begun to write everything */
    bool store_done; /* since the engine thread looked last */
    struct conversation_copy *conversation_copies; /* as they lie in the table; id 0 = none */
    uint64_t conversation_changes;                 /* of the table, when it was copied */
};

struct conversation_copy {
    struct engine_conversation_row row;
    int64_t last_used_ns;
    uint64_t change; /* of the row that was copied */
};

/* ---- Opening --------------------------------------------------------------------------------- */

static size_t text_token_bytes(const void *arg, int32_t id, const char **bytes) {
    const struct tok *tok = arg;
    if (tok_is_special(tok, id)) return 0; /* markers are not part of an answer */
    return tok_bytes(tok, id, bytes);
}

/* The number after `prefix` in the first line that begins with it; -1 when there is none. */
static int64_t find_number(const char *path, const char *prefix) {
    char line[256], *end;
    int64_t number = -1;
    FILE *file = fopen(path, "re");
    while (file != NULL && number < 0 && fgets(line, sizeof line, file) != NULL) {
        if (strncmp(line, prefix, strlen(prefix)) != 0) continue;
        long long value = strtoll(line + strlen(prefix), &end, 10);
        if (end > line + strlen(prefix)) number = value;
    }
    if (file != NULL) fclose(file);
    return number;
}

/* What the system has left, and no more than a container's limit leaves beside what is in use
 * there; files it has read do not count, they make way. */
static int64_t memory_available(void) {
    int64_t kib = find_number("/proc/meminfo", "MemAvailable:");
    int64_t bytes = kib > 0 ? kib * 1024 : (int64_t)1 << 30;
    int64_t limit = find_number("/sys/fs/cgroup/memory.max", "");
    int64_t used = find_number("/sys/fs/cgroup/memory.stat", "anon ");
    if (limit < 0 || used < 0) return bytes;
    int64_t left = limit > used ? limit - used : 0;
    return left < bytes ? left : bytes;
}

static int refuse_policy(const char *name, struct fault *fault) {
    char known[256] = "auto";
    for (int i = 0; policy_at(i) != NULL; i++)
        snprintf(known + strlen(known), sizeof known - strlen(known), ", %s", policy_at(i)->name);
    return fault_set(fault, ERR_INVALID, "kv-policy", "'%.40s' is not one of %s", name, known);
}

/* "kv.buffer" of a request is --kv-buffer here. */
static int name_option(int code, struct fault *fault) {
    char *dot = strchr(fault->field, '.');
    if (code != 0 && dot != NULL && strncmp(fault->field, "kv.", 3) == 0) *dot = '-';
    return code;
}

static int resolve_policy(struct engine *e, struct kv_params *kv, struct fault *fault) {
    const char *name = e->options.kv_policy;
    bool gates = model_has_gates(e->model);
    bool automatic = name == NULL || strcmp(name, "auto") == 0;
    if (automatic) name = gates ? "global" : "full";
    const struct policy *policy = policy_find(name);
    if (policy == NULL) return refuse_policy(name, fault);
    if ((policy->needs & POLICY_NEEDS_GATES) != 0 && !gates)
        return fault_set(fault, ERR_INVALID, "kv-policy", "'%s' needs retention gates; %.200s%s",
                         name, e->options.gates != NULL ? "--gates ''" : e->options.model_dir,
                         e->options.gates != NULL
                             ? " says to use none"
                             : " has no gates.safetensors and --gates was not given");
    if (!policy->bounded && e->options.kv_budget_max > 0)
        return fault_set(fault, ERR_INVALID, "kv-budget-max",
                         "policy '%s' keeps everything, so no request could be served",
                         policy->name);
    if (automatic && !gates)
        log_info("the model has no retention gates: the cache keeps everything (policy full)");
    *kv = (struct kv_params){.budget = e->options.kv_budget,
                             .buffer = e->options.kv_buffer,
                             .chunk = e->options.kv_chunk};
    kv_params_set_policy(kv, policy);
    /* The same give-way rule as for requests that lower the budget. */
    kv_params_fit(kv, 0);
    int code = name_option(kv_params_check(kv, fault), fault);
    if (code == 0 && e->options.kv_budget_max > 0 && kv->budget > e->options.kv_budget_max)
        code = fault_set(fault, ERR_INVALID, "kv-budget", "is above kv-budget-max (%d)",
                         e->options.kv_budget_max);
    return code;
}

static int resolve_kv_dtype(const struct engine *e, enum kern_dtype *dtype, struct fault *fault) {
    const char *name = e->options.kv_dtype;
    if (name == NULL || strcmp(name, "auto") == 0)
        *dtype = model_config(e->model)->dtype == KERN_F32 ? KERN_F32 : KERN_BF16;
    else if (strcmp(name, "f32") == 0)
        *dtype = KERN_F32;
    else if (strcmp(name, "bf16") == 0)
        *dtype = KERN_BF16;
    else
        return fault_set(fault, ERR_INVALID, "kv-dtype", "'%.20s' is not auto, f32 or bf16", name);
    return 0;
}

/* Pages so that every place can run at the default budget and as many conversations rest, bounded
 * by half the free memory. The pool is reserved address space; pages cost memory when first used.
 */
static int64_t choose_pages(const struct engine *e, const struct reserve_shape *shape,
                            const struct kv_params *kv, int64_t page_bytes) {
    if (e->options.kv_pool_bytes > 0) return e->options.kv_pool_bytes / page_bytes;
    int64_t longest = e->info.max_model_len;
    int64_t peak = kv->policy->bounded ? (int64_t)kv->budget + kv->buffer + kv->chunk : longest;
    if (peak > longest) peak = longest;
    int64_t wanted = reserve_pages(shape, kv, peak) * e->options.max_num_seqs * 2;
    int64_t most = memory_available() / 2 / page_bytes;
    return wanted < most ? wanted : most;
}

/* The store wakes whoever waits for it. */
static void on_store_done(void *arg) {
    struct engine *e = arg;
    pthread_mutex_lock(&e->lock);
    e->store_done = true;
    pthread_cond_signal(&e->work);
    pthread_mutex_unlock(&e->lock);
}

static int open_store(struct engine *e, struct sched_options *so, enum kern_dtype dtype,
                      struct fault *fault) {
    const struct model_config *config = model_config(e->model);
    const struct engine_options *o = &e->options;
    struct store_options store = {.dir = o->state_dir,
                                  .bytes = o->state_bytes,
                                  .identity = {.dtype = (int32_t)dtype,
                                               .layers = config->layers,
                                               .heads_kv = config->heads_kv,
                                               .head_dim = config->head_dim},
                                  .done = on_store_done,
                                  .arg = e};
    if (o->state_dir == NULL || o->state_dir[0] == '\0') return 0;
    if (e->kern->ops->snapshot_export == NULL)
        return fault_set(fault, ERR_UNSUPPORTED, "state-dir",
                         "the %s backend cannot write conversations; leave state-dir empty or use "
                         "device cpu",
                         e->kern->ops->name);
    if (o->check_only) return 0;
    struct state_identity *identity = &store.identity;
    int code = identity_model(o->model_dir, o->random_weights, identity->weights, fault);
    if (code == 0) code = identity_gates(o->model_dir, o->gates, identity->gates, fault);
    if (code == 0) code = store_open(&store, &e->store, fault);
    if (code != 0) return code;
    store_space_key(e->store, e->space_key);
    so->store = e->store;
    so->save_idle_ns = (int64_t)o->state_idle_seconds * 1000000000;
    so->export_bytes = SCHED_EXPORT_BYTES;
    struct store_stats stats;
    store_stats(e->store, &stats);
    log_info("state directory: %d conversations of this model, %lld bytes in all", stats.files,
             (long long)stats.bytes);
    return 0;
}

static int open_cache(struct engine *e, struct sched_options *so, struct fault *fault) {
    const struct model_config *config = model_config(e->model);
    struct kern_cache_info info;
    enum kern_dtype dtype = KERN_F32;
    int code = resolve_kv_dtype(e, &dtype, fault);
    if (code == 0) code = resolve_policy(e, &so->kv.defaults, fault);
    so->kv.rule_check = e->kern->ops->rule_check;
    if (code == 0) code = name_option(sched_check_rule(&so->kv, &so->kv.defaults, fault), fault);
    if (code != 0) return code;
    so->kv.budget_max = e->options.kv_budget_max;
    so->kv.has_gates = model_has_gates(e->model);
    e->kern->ops->cache_info(dtype, config->head_dim, &info);
    so->shape = (struct reserve_shape){config->layers, config->heads_kv, info.page_slots};
    so->page_bytes = info.page_bytes;
    so->pages_total = choose_pages(e, &so->shape, &so->kv.defaults, info.page_bytes);
    int64_t least = (int64_t)config->layers * config->heads_kv;
    if (so->pages_total < least)
        return fault_set(fault, ERR_INVALID, "kv-pool-bytes",
                         "the pool has %lld pages of %lld bytes; one token needs %lld",
                         (long long)so->pages_total, (long long)info.page_bytes, (long long)least);
    struct kern_cache_options cache = {.layers = config->layers,
                                       .heads_q = config->heads_q,
                                       .heads_kv = config->heads_kv,
                                       .head_dim = config->head_dim,
                                       .dtype = dtype,
                                       .pages = so->pages_total,
                                       .slots = so->sequences_max + so->conversations_max,
                                       .max_positions = e->info.max_model_len};
    snprintf(e->info.kv_dtype, sizeof e->info.kv_dtype, "%s", dtype == KERN_F32 ? "f32" : "bf16");
    if (!e->options.check_only) code = e->kern->ops->cache_open(e->kern, &cache, fault);
    return code == 0 ? open_store(e, so, dtype, fault) : code;
}

static int thread_count(int wanted) {
    cpu_set_t cores;
    if (wanted > 0) return wanted;
    return sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

static int max_choices(const struct engine_options *options) {
    int most =
        options->max_num_seqs < ENGINE_CHOICES_MAX ? options->max_num_seqs : ENGINE_CHOICES_MAX;
    int wanted = options->max_choices;
    return wanted > 0 && wanted < most ? wanted : most;
}

static void fill_info(struct engine *e, const struct sched_options *so) {
    const struct model_config *config = model_config(e->model);
    struct engine_info *info = &e->info;
    info->model_dir = e->model_dir;
    snprintf(info->family, sizeof info->family, "%s", config->family);
    snprintf(info->backend, sizeof info->backend, "%s", e->kern->ops->name);
    snprintf(info->kv_policy, sizeof info->kv_policy, "%s", so->kv.defaults.policy->name);
    info->kv_budget = so->kv.defaults.policy->bounded ? so->kv.defaults.budget : -1;
    info->kv_buffer = so->kv.defaults.buffer;
    info->kv_chunk = so->kv.defaults.chunk;
    info->kv_budget_max = so->kv.budget_max;
    info->has_gates = so->kv.has_gates;
    info->trained_budget = model_trained_budget(e->model);
    info->layers = config->layers;
    info->heads_kv = config->heads_kv;
    info->head_dim = config->head_dim;
    info->vocab = config->vocab;
    info->max_num_seqs = e->options.max_num_seqs;
    info->max_queue = e->options.max_queue;
    info->max_choices = max_choices(&e->options);
    memcpy(info->space_key, e->space_key, sizeof info->space_key);
    info->threads = thread_count(e->options.threads);
    info->pages_total = so->pages_total;
    info->page_bytes = so->page_bytes;
    info->page_slots = so->shape.page_slots;
    info->weight_bytes = model_weight_bytes(e->model);
    info->has_chat_template = e->text.chat != NULL;
    info->chat_template = e->text.source;
    info->bos_token = e->text.bos;
    info->eos_token = e->text.eos;
    info->temperature = config->temperature;
    info->top_p = config->top_p;
    info->min_p = config->min_p;
    info->repetition = config->repetition;
    info->top_k = config->top_k;
}

static int check_options(const struct engine_options *o, struct fault *fault) {
    if (o->max_num_seqs < 1)
        return fault_set(fault, ERR_INVALID, "max-num-seqs", "must be at least 1");
    if (o->max_num_batched_tokens <= o->max_num_seqs)
        return fault_set(fault, ERR_INVALID, "max-num-batched-tokens",
                         "must exceed max-num-seqs (%d), so that prompts progress beside answers",
                         o->max_num_seqs);
    if (o->max_queue < 1) return fault_set(fault, ERR_INVALID, "max-queue", "must be at least 1");
    if (o->max_conversations < 0)
        return fault_set(fault, ERR_INVALID, "max-conversations", "must be at least 0");
    if (o->max_choices < 0)
        return fault_set(fault, ERR_INVALID, "max-choices", "must be at least 0");
    return 0;
}

static int open_model(struct engine *e, int logits_max, struct fault *fault) {
    const struct engine_options *o = &e->options;
    const struct backend_options backend = {
        .device = o->device, .cpu_path = o->cpu_path, .threads = o->threads};
    int code = backend_open(&backend, &e->kern, fault);
    if (code != 0) return code;
    struct model_options options = {.dir = o->model_dir,
                                    .gates = o->gates,
                                    .rows_max = o->max_num_batched_tokens,
                                    .logits_max = logits_max,
                                    .random_weights = o->random_weights,
                                    .check_only = o->check_only,
                                    .progress = o->progress,
                                    .progress_arg = o->arg};
    code = model_open(e->kern, &options, &e->model, fault);
    if (code != 0) return code;
    int longest = model_config(e->model)->max_positions;
    e->info.max_model_len = longest;
    if (o->max_model_len > longest)
        return fault_set(fault, ERR_INVALID, "max-model-len", "the model's positions end at %d",
                         longest);
    if (o->max_model_len > 0) e->info.max_model_len = o->max_model_len;
    if (tok_vocab_size(e->text.tok) > model_config(e->model)->vocab)
        return fault_set(fault, ERR_INVALID, "tokenizer.json",
                         "has token ids up to %d but the model's vocab_size is %d",
                         tok_vocab_size(e->text.tok) - 1, model_config(e->model)->vocab);
    return 0;
}

static int model_step_of(void *model, const struct kern_batch *batch, const int32_t *want,
                         int want_count, const float **logits) {
    return model_step(model, batch, want, want_count, logits);
}

static void publish(struct engine *e);

int engine_open(const struct engine_options *options, struct engine **out, struct fault *fault) {
    *out = NULL;
    int code = check_options(options, fault);
    if (code != 0) return code;
    struct engine *e = mem_must_alloc(1, sizeof *e);
    e->options = *options;
    e->model_dir = mem_must_strdup(options->model_dir);
    pthread_mutex_init(&e->lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&e->work, &monotonic);
    pthread_condattr_destroy(&monotonic);
    ring_open(&e->submits, (size_t)options->max_queue);
    ring_open(&e->deletes, ENGINE_DELETES_MAX);
    CHECK(getrandom(e->space_key, sizeof e->space_key, 0) == (ssize_t)sizeof e->space_key);
    int logits_max = options->max_num_seqs + 64; /* room to score prompts beside decoding */
    if (logits_max > options->max_num_batched_tokens) logits_max = options->max_num_batched_tokens;
    struct sched_options so = {.sequences_max = options->max_num_seqs,
                               .conversations_max = options->max_conversations,
                               .rows_max = options->max_num_batched_tokens,
                               .logits_max = logits_max};
    code = text_open(options->model_dir, &e->text, fault);
    if (code == 0) code = open_model(e, logits_max, fault);
    if (code == 0) code = open_cache(e, &so, fault);
    if (code != 0 || options->check_only) {
        engine_close(e);
        return code;
    }
    const struct model_config *config = model_config(e->model);
    so.kern = e->kern;
    so.model = e->model;
    so.model_step = model_step_of;
    so.vocab = config->vocab;
    so.text = (struct seq_text){.token_bytes = text_token_bytes,
                                .arg = e->text.tok,
                                .token_bytes_max = tok_bytes_max(e->text.tok),
                                .eos = config->eos,
                                .eos_count = config->eos_count};
    fill_info(e, &so);
    sched_open(&e->sched, &so);
    e->sched.queue_places = &e->places;
    e->sched.pending_jobs = &e->pending;
    e->sequence_rows = mem_must_alloc((size_t)options->max_num_seqs, sizeof *e->sequence_rows);
    e->conversation_copies =
        mem_must_alloc((size_t)options->max_conversations + 1, sizeof *e->conversation_copies);
    publish(e);
    *out = e;
    return 0;
}

/* ---- The thread ------------------------------------------------------------------------------ */

static int32_t budget_of(const struct kv_params *kv) {
    return kv->policy->bounded ? kv->budget : -1;
}

static void copy_sequences(struct engine *e) {
    const struct sched *s = &e->sched;
    e->sequence_count = s->running;
    for (int i = 0; i < s->running; i++) {
        const struct sequence *seq = &s->sequences[s->order[i]];
        struct engine_sequence_row *row = &e->sequence_rows[i];
        *row = (struct engine_sequence_row){.tokens = seq->due.tokens,
                                            .held = seq->due.held,
                                            .prompt_count = seq->prompt_count,
                                            .output_count = seq_output_count(seq),
                                            .budget = budget_of(&seq->kv),
                                            .pages_reserved = seq->pages_reserved,
                                            .prefilling = seq_prefilling(seq)};
        stpncpy(row->policy, seq->kv.policy->name, sizeof row->policy - 1);
    }
}

/* There may be a thousand conversations and a thousand steps a second, so only what changed. */
static void copy_conversations(struct engine *e) {
    const struct conversation_table *table = &e->sched.conversations;
    if (e->conversation_changes == table->changes) return;
    e->conversation_changes = table->changes;
    for (int i = 0; i < table->capacity; i++) {
        const struct conversation *c = &table->rows[i];
        struct conversation_copy *copy = &e->conversation_copies[i];
        if (copy->change == c->change) continue;
        copy->change = c->change;
        copy->row = (struct engine_conversation_row){
            .id = c->id, .hint = c->hint, .superseded = conversation_superseded(c)};
        if (c->id == 0) continue;
        memcpy(copy->row.space, c->space, sizeof copy->row.space);
        copy->row.tokens = c->token_count;
        copy->row.held = c->held;
        copy->row.budget = budget_of(&c->kv);
        copy->row.pages = c->pages;
        stpncpy(copy->row.policy, c->kv.policy->name, sizeof copy->row.policy - 1);
        copy->last_used_ns = c->last_used_ns;
    }
}

/* Copies what others may see. Running sequences count their entries by formula. */
static void publish(struct engine *e) {
    const struct sched *s = &e->sched;
    struct kern_cache_stats stats = {0};
    e->kern->ops->cache_stats(e->kern, &stats);
    int64_t streams = (int64_t)e->info.layers * e->info.heads_kv, held = 0, now = clock_ns();
    for (int i = 0; i < s->running; i++) held += s->sequences[s->order[i]].due.held;
    bool may_save = e->store != NULL && !e->snapshot.stopped; /* looked at only for drain's sake */
    atomic_store(&e->unsaved, may_save && (!atomic_load(&e->draining) || sched_unsaved(s)));
    pthread_mutex_lock(&e->lock);
    copy_sequences(e);
    copy_conversations(e);
    e->snapshot = (struct engine_snapshot){
        .running = s->running,
        .waiting = s->waiting,
        .conversations = s->conversations.count,
        .pages_total = s->options.pages_total,
        .pages_used = stats.pages_used,
        .pages_reserved = s->pages_reserved,
        .pages_retained = s->conversations.pages,
        .steps = s->counters.steps,
        .last_step_ns = now,
        .stopped = e->snapshot.stopped,
        .prompt_tokens = s->counters.prompt_tokens,
        .cached_tokens = s->counters.cached_tokens,
        .generation_tokens = s->counters.generation_tokens,
        .entries_kept = (uint64_t)(held * streams + s->conversations.entries),
        .entries_evicted = stats.entries_evicted,
        .evictions = s->counters.evictions,
        .preemptions = s->counters.preemptions,
        .conversation_hits = s->counters.conversation_hits,
        .conversation_misses = s->counters.conversation_misses,
        .eviction_seconds = s->counters.eviction_seconds,
        .iteration_tokens = s->counters.iteration_tokens,
    };
    memcpy(e->snapshot.conversation_lost, s->counters.conversation_lost,
           sizeof e->snapshot.conversation_lost);
    e->snapshot.state_restored = s->counters.state_restored;
    e->snapshot.state_failed = s->counters.state_failed;
    pthread_mutex_unlock(&e->lock);
}

static void take_submits(struct engine *e) {
    struct engine_job *job;
    while ((job = ring_pop(&e->submits)) != NULL) sched_submit(&e->sched, job);
}

/* Orders to delete, between steps; who waits for one sees the lists without it. */
static void take_deletes(struct engine *e) {
    struct engine_delete *orders[ENGINE_DELETES_MAX];
    int count = 0;
    while (count < ENGINE_DELETES_MAX && (orders[count] = ring_pop(&e->deletes)) != NULL) {
        orders[count]->result = sched_delete(&e->sched, orders[count]->id);
        count++;
    }
    if (count == 0) return;
    publish(e);
    for (int i = 0; i < count; i++)
        atomic_store_explicit(&orders[i]->done, 1, memory_order_release);
    e->options.wake(e->options.arg);
}

/* Sleeps, the lock held, until somebody signals or the time has come. */
static void sleep_until(struct engine *e, int64_t ns) {
    struct timespec at = {ns / 1000000000, ns % 1000000000};
    if (ns == INT64_MAX)
        pthread_cond_wait(&e->work, &e->lock);
    else
        (void)pthread_cond_timedwait(&e->work, &e->lock, &at);
}

/* Sleeps until there is work or the end, or a conversation has been idle for so long that it is to
 * be written; the snapshot then shows that work waits. While jobs wait for the store alone, only
 * new work, cancelling and the store end it; cancelling does not signal, so that is looked for. */
static void wait_for_work(struct engine *e) {
    int64_t next = sched_next_save_ns(&e->sched);
    bool idle = sched_idle(&e->sched);
    if (atomic_load(&e->draining) && next != INT64_MAX) return; /* nothing is too young then */
    if (!idle) next = clock_ns() + 50000000;
    pthread_mutex_lock(&e->lock);
    while (!atomic_load(&e->stopping)) {
        take_submits(e); /* under the lock: a submit after this look finds us waiting and signals */
        if (sched_idle(&e->sched) != idle || !ring_empty(&e->deletes) || e->store_done) break;
        if (clock_ns() >= next || (atomic_load(&e->draining) && !e->drain_seen)) break;
        sleep_until(e, next);
    }
    e->drain_seen = atomic_load(&e->draining);
    e->store_done = false;
    pthread_mutex_unlock(&e->lock);
}

/* A device error is sticky: never continue on a poisoned context. Whoever still asks is told. */
static void stop_serving(struct engine *e) {
    log_error("the backend failed; the engine takes no more work and the process must restart");
    pthread_mutex_lock(&e->lock);
    e->snapshot.stopped = true;
    pthread_mutex_unlock(&e->lock);
}

static void *engine_main(void *arg) {
    struct engine *e = arg;
    bool failed = false;
    while (!atomic_load(&e->stopping)) {
        take_submits(e);
        take_deletes(e);
        if (!failed) sched_save(&e->sched, clock_ns(), atomic_load(&e->draining));
        if (sched_idle(&e->sched)) {
            publish(e);
            if (atomic_load(&e->draining) && !atomic_load(&e->unsaved))
                e->options.wake(e->options.arg); /* engine_idle holds now */
            if (!sched_exporting(&e->sched)) wait_for_work(e);
            publish(e);
            continue;
        }
        bool fails_now = false;
        if (failed)
            sched_abandon(&e->sched, ENGINE_FINISH_ERROR, ERR_DEVICE);
        else
            sched_step(&e->sched, &fails_now);
        if (fails_now) stop_serving(e);
        failed |= fails_now;
        publish(e);
        /* After the snapshot: who has an answer sees its pages back. */
        sched_publish_finished(&e->sched);
        e->options.wake(e->options.arg);
        if (sched_stalled(&e->sched) && !sched_exporting(&e->sched)) wait_for_work(e);
    }
    take_deletes(e);
    pthread_mutex_lock(&e->lock);
    e->snapshot.stopped = true;
    pthread_mutex_unlock(&e->lock);
    e->options.wake(e->options.arg);
    return NULL;
}

int engine_start(struct engine *e) {
    CHECK(!e->started && e->options.wake != NULL);
    if (pthread_create(&e->thread, NULL, engine_main, e) != 0) return ERR_NOMEM;
    e->started = true;
    return 0;
}

void engine_drain(struct engine *e) {
    atomic_store(&e->draining, true);
    pthread_mutex_lock(&e->lock);
    pthread_cond_signal(&e->work);
    pthread_mutex_unlock(&e->lock);
}

bool engine_idle(struct engine *e) {
    if (atomic_load(&e->pending) > 0) return false;
    return !e->started || !atomic_load(&e->draining) || !atomic_load(&e->unsaved);
}

void engine_close(struct engine *e) {
    if (e == NULL) return;
    atomic_store(&e->draining, true);
    pthread_mutex_lock(&e->lock);
    atomic_store(&e->stopping, true);
    pthread_cond_signal(&e->work);
    pthread_mutex_unlock(&e->lock);
    if (e->started) pthread_join(e->thread, NULL);
    if (e->sched.sequences != NULL) {
        take_submits(e);
        sched_close(&e->sched);
    }
    store_close(e->store);
    model_close(e->model);
    if (e->kern != NULL) e->kern->ops->close(e->kern);
    text_close(&e->text);
    ring_close(&e->submits);
    ring_close(&e->deletes);
    pthread_cond_destroy(&e->work);
    pthread_mutex_destroy(&e->lock);
    mem_free(e->sequence_rows);
    mem_free(e->conversation_copies);
    mem_free(e->model_dir);
    mem_free(e);
}

/* ---- Requests -------------------------------------------------------------------------------- */

const struct engine_info *engine_info(const struct engine *e) {
    return &e->info;
}

bool engine_queue_enter(struct engine *e, int jobs) {
    if (atomic_fetch_add(&e->places, jobs) <= e->options.max_queue - jobs) return true;
    atomic_fetch_sub(&e->places, jobs);
    return false;
}

void engine_queue_leave(struct engine *e, int jobs) {
    atomic_fetch_sub(&e->places, jobs);
}

static int check_tokens(const struct engine *e, const struct engine_request *r,
                        struct fault *fault) {
    int32_t vocab = e->info.vocab;
    for (int32_t i = 0; i < r->prompt_count; i++)
        if (r->prompt[i] < 0 || r->prompt[i] >= vocab)
            return fault_set(fault, ERR_INVALID, "prompt",
                             "token id %d at index %d is not in the vocabulary (0..%d)",
                             r->prompt[i], i, vocab - 1);
    for (int32_t i = 0; i < r->bias_count; i++)
        if (r->bias[i].token < 0 || r->bias[i].token >= vocab)
            return fault_set(fault, ERR_INVALID, "logit_bias",
                             "token id %d is not in the vocabulary", r->bias[i].token);
    for (int32_t i = 0; i < r->stop_id_count; i++)
        if (r->stop_ids[i] < 0 || r->stop_ids[i] >= vocab)
            return fault_set(fault, ERR_INVALID, "stop_token_ids",
                             "token id %d is not in the vocabulary", r->stop_ids[i]);
    return 0;
}

static int check_counts(const struct engine *e, const struct engine_request *r,
                        struct fault *fault) {
    if (r->prompt_count < 1)
        return fault_set(fault, ERR_INVALID, "prompt", "the prompt has no tokens");
    if (r->max_tokens < 0) return fault_set(fault, ERR_INVALID, "max_tokens", "must be at least 0");
    if (r->choices < 0) return fault_set(fault, ERR_INVALID, "n", "must be at least 1");
    if (r->choices > e->info.max_choices)
        return fault_set(fault, ERR_LIMIT, "n", "n is %d, this server allows %d", r->choices,
                         e->info.max_choices);
    if (r->top_logprobs < -1 || r->top_logprobs > ENGINE_TOP_MAX)
        return fault_set(fault, ERR_INVALID, "top_logprobs", "must be at most %d", ENGINE_TOP_MAX);
    return 0;
}

int engine_check(const struct engine *e, const struct engine_request *r, struct fault *fault) {
    struct kv_params kv;
    int code = check_counts(e, r, fault);
    if (code != 0) return code;
    if ((int64_t)r->prompt_count + r->max_tokens > e->info.max_model_len)
        return fault_set(
            fault, ERR_CONTEXT, "prompt",
            "maximum context length is %d tokens; the prompt has %d and %d were asked for",
            e->info.max_model_len, r->prompt_count, r->max_tokens);
    code = check_tokens(e, r, fault);
    if (code == 0) code = sched_resolve_kv(&r->kv, &e->sched.options.kv, &kv, fault);
    if (code == 0) code = sched_check(&e->sched.options, r, &kv, fault);
    return code;
}

int engine_submit(struct engine *e, struct engine_job *job) {
    if (atomic_load(&e->draining)) return ERR_STOPPED;
    int code = seq_job_alloc(job, e->sched.options.text.token_bytes_max);
    if (code != 0) return code;
    job->queued_ns = clock_ns();
    atomic_fetch_add(&e->pending, 1);
    bool pushed = ring_push(&e->submits, job);
    CHECK(pushed); /* the ring holds every place of the queue */
    pthread_mutex_lock(&e->lock);
    pthread_cond_signal(&e->work);
    pthread_mutex_unlock(&e->lock);
    return 0;
}

int engine_conversation_delete(struct engine *e, struct engine_delete *order) {
    int code = 0;
    atomic_store(&order->done, 0);
    pthread_mutex_lock(&e->lock); /* the thread's last look happens before it says it has stopped */
    if (!e->started || e->snapshot.stopped || atomic_load(&e->stopping))
        code = ERR_STOPPED;
    else if (!ring_push(&e->deletes, order))
        code = ERR_FULL;
    pthread_cond_signal(&e->work);
    pthread_mutex_unlock(&e->lock);
    return code;
}

/* ---- Text ------------------------------------------------------------------------------------ */

/* A prompt can never be longer than this many tokens, whatever the context: bounds the work. */
static size_t ids_max(const struct engine *e) {
    return (size_t)e->info.max_model_len * 4 + 65536;
}

int engine_tokenize(const struct engine *e, const char *text, size_t size, bool add_special,
                    bool parse_special, struct arena *arena, struct engine_ids *out,
                    struct fault *fault) {
    unsigned flags = (add_special ? TOK_TEMPLATE : 0) | (parse_special ? TOK_SPECIALS : 0);
    struct tok_ids ids = {0};
    int code = tok_encode(e->text.tok, text, size, flags, NULL, 0, ids_max(e), arena, &ids, fault);
    *out = (struct engine_ids){ids.ids, ids.count};
    return code;
}

int engine_render_chat(const struct engine *e, const cJSON *context, struct arena *arena,
                       struct engine_ids *out, struct fault *fault) {
    return text_render_chat(&e->text, context, ids_max(e), arena, out, fault);
}

size_t engine_token_bytes(const struct engine *e, int32_t id, const char **bytes) {
    return tok_bytes(e->text.tok, id, bytes);
}

bool engine_token_is_special(const struct engine *e, int32_t id) {
    return tok_is_special(e->text.tok, id);
}

/* ---- Observation ----------------------------------------------------------------------------- */

void engine_snapshot(struct engine *e, struct engine_snapshot *out) {
    struct store_stats stats = {0};
    pthread_mutex_lock(&e->lock);
    *out = e->snapshot;
    pthread_mutex_unlock(&e->lock);
    if (e->store != NULL) store_stats(e->store, &stats);
    out->conversations_on_disk = stats.files;
    out->state_bytes = stats.bytes;
    out->state_written = stats.written;
    out->state_refused = stats.refused;
    out->state_failed += stats.failed;
}

int engine_sequences(struct engine *e, struct engine_sequence_row *rows, int max) {
    pthread_mutex_lock(&e->lock);
    int count = e->sequence_count < max ? e->sequence_count : max;
    memcpy(rows, e->sequence_rows, (size_t)count * sizeof *rows);
    pthread_mutex_unlock(&e->lock);
    return count;
}

/* Those in memory; the lock is held. */
static int list_memory(struct engine *e, struct engine_conversation_row *rows, int max) {
    int count = 0;
    int64_t now = clock_ns();
    for (int i = 0; i < e->options.max_conversations && count < max; i++) {
        const struct conversation_copy *copy = &e->conversation_copies[i];
        if (copy->row.id == 0) continue;
        rows[count] = copy->row;
        rows[count++].idle_ns = now - copy->last_used_ns;
    }
    return count;
}

static struct engine_conversation_row *row_with(struct engine_conversation_row *rows, int count,
                                                uint64_t id) {
    for (int i = 0; i < count; i++)
        if (rows[i].id == id) return &rows[i];
    return NULL;
}

/* Adds what is on disk: the size of the file, or a row of its own. */
static int list_disk(struct engine *e, struct engine_conversation_row *rows, int count, int max) {
    struct store_row *files = mem_try_alloc((size_t)max, sizeof *files);
    int file_count = files != NULL ? store_list(e->store, files, max) : 0, in_memory = count;
    int64_t now = clock_unix_seconds();
    for (int i = 0; i < file_count; i++) {
        struct engine_conversation_row *row = row_with(rows, in_memory, files[i].id);
        if (row == NULL && count == max) continue;
        if (row == NULL) {
            row = &rows[count++];
            *row = (struct engine_conversation_row){.id = files[i].id,
                                                    .hint = files[i].hint,
                                                    .tokens = files[i].tokens,
                                                    .budget = budget_of(&files[i].kv),
                                                    .idle_ns =
                                                        (now - files[i].used_unix) * 1000000000};
            memcpy(row->space, files[i].space, sizeof row->space);
            stpncpy(row->policy, files[i].kv.policy->name, sizeof row->policy - 1);
        }
        row->disk_bytes = files[i].bytes;
    }
    mem_free(files);
    return count;
}

int engine_conversations(struct engine *e, struct engine_conversation_row *rows, int max) {
    pthread_mutex_lock(&e->lock);
    int count = list_memory(e, rows, max);
    pthread_mutex_unlock(&e->lock);
    return e->store != NULL && max > 0 ? list_disk(e, rows, count, max) : count;
}
