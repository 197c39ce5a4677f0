/* Opens an engine: turns the options into its parts. Checks come in the order that fails early:
 * options, text, backend, model, cache, state directory. A check alone (check_only) goes the same
 * way and stops before weights and pools are allocated. Every fault names its option or its file.
 *
 * Runs on one thread, before the replicas' threads exist. The calls of the running engine are in
 * engine.c. */
#include <string.h>
#include <sys/random.h>

#include "base/check.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "engine/disk/state_dir.h"
#include "engine/draft_model.h"
#include "engine/encoder.h"
#include "engine/open.h"
#include "model/identity.h"
#include "model/path.h"
#include "model/save.h"

#define ENCODE_BYTES_MAX ((size_t)1 << 20) /* memory for the tokens of a short text */

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

/* Checks with the first replica's backend: every replica's cache has the same shape. */
static int check_state(void *backend, struct state_view *view, struct fault *fault) {
    struct kern *kern = backend;
    const struct state_head *head = &view->head;
    return kern->ops->snapshot_check(kern, view->blocks, head->block_count, head->token_count,
                                     &view->report, fault);
}

/* The first replica's store opens the directory; the stores of the others join it. */
static int open_store(struct engine *e, struct sched_options *so, enum kern_dtype dtype,
                      struct fault *fault) {
    struct replica *first = &e->replicas[0];
    const struct model_config *config = model_config(open_model_of(e));
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
    int rc = identity_model(o->model_dir, o->random_weights, engine_quantization(o),
                            identity->weights, fault);
    if (rc == 0) rc = identity_gates(model_gates_path(open_model_of(e)), identity->gates, fault);
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
    options.adapts = e->options.adapter_count > 0 || engine_may_load_adapters(&e->options);
    if (kern->ops->bind) kern->ops->bind(kern);
    return model_open(kern, &options, &replica->model, fault);
}

static int prepare_caches(struct engine *e, struct sched_options *so, struct fault *fault) {
    enum kern_dtype dtype = KERN_F32;
    int rc = open_plan_cache(e, so, &dtype, fault);
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

/* Checks the options against the model, and the tokenizer against the model. */
static int check_against_model(struct engine *e, struct fault *fault) {
    const struct engine_options *o = &e->options;
    const struct model_config *config = model_config(open_model_of(e));
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
    const struct model_config *config = model_config(open_model_of(e));
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
        rc = adapters_read(&e->adapters, model_config(open_model_of(e)), name, path, &number,
                           &inner);
        for (int k = 0; k < e->replica_count && !rc && !o->check_only; k++) {
            if (open_ops_of(e)->bind) open_ops_of(e)->bind(e->replicas[k].kern);
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
    const struct model_config *config = model_config(open_model_of(e));
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
    int rc = engine_options_check(options, fault);
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
    if (rc == 0 && options->check_only && options->found) open_fill_found(e, &so, options->found);
    if (rc != 0 || options->check_only) {
        engine_close(e);
        return rc;
    }
    open_fill_info(e, &so);
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
