/* engine/engine.h without a model: a real thread, real queues, made-up tokens.
 *
 * Token ids are bytes, then three special ones. The answer to a prompt is the text of its last user
 * message (completions: the whole prompt), then the end token; with temperature above 0 the seed
 * (that of the choice) follows as " #xxxxxxxx", so answers show whether seeds arrive. With
 * ignore_eos it repeats. One step gives every running choice a token.
 * Prompts that contain "fail now" or "fail later" end in an error before or after three tokens;
 * "engine dies" ends the thread. "stamp" makes each token's text the time it was made at: 16
 * digits, hexadecimal, of clock_ns.
 *
 * KEEPD_FAKE_END is a text that ends answers, so that no form of calls may hold it.
 * With KEEPD_FAKE_THINK the vocabulary has the tokens <think> and </think>; an answer's bytes 1 and
 * 2 become them, and with the value 2 the chat template opens the first one itself.
 *
 * With KEEPD_FAKE_CHANNELS it has the tokens of channels, from <|start|> to <|return|>, which an
 * answer's bytes 1 to 7 become; the last two end it, and a prompt opens a message.
 * With KEEPD_FAKE_TOOLS=hermes or another name of --tool-call-parser the model's template knows
 * tools and calls of that form; it writes the calls of messages as Qwen's does. A file of
 * --chat-template takes its place: prompts are the bytes of what it renders.
 *
 * With KEEPD_FAKE_SCRIPT, a JSON file of pairs [text, answer], a prompt that contains a pair's text
 * gets the answer of the first such pair, without a seed.
 *
 * Constraints are compiled, so that their faults show, and not obeyed. Adapters are in
 * fake_adapters.c.
 *
 * Environment: KEEPD_FAKE_STEP_US, time per step (0); KEEPD_FAKE_PREFILL_STEPS, steps before the
 * first token (1); KEEPD_FAKE_NO_TEMPLATE, a model without a chat template; KEEPD_FAKE_SUBMITS,
 * jobs taken before one is refused for lack of memory, once those have a token;
 * KEEPD_FAKE_MEMORY, MiB that a model takes (100), and a model in a directory with a file `large`
 * three times as many; KEEPD_FAKE_UNUSED, MiB that are free where models are held (65,536);
 * KEEPD_FAKE_LOAD_MS, the time that loading one takes; a model whose path holds "broken" is
 * refused, and one in a directory with a file `fails` cannot be loaded;
 * KEEPD_FAKE_PICTURES, a model that sees pictures, of which its template shows what they are;
 * KEEPD_FAKE_NO_VECTORS, a model that has none; KEEPD_FAKE_GATE, a path: messages that contain "at
 * the gate" are rendered, uploads refused, and adapters loaded whose path holds "gated", once a
 * file is there.
 */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/json.h"
#include "base/mem.h"
#include "engine/engine_conversations.h"
#include "engine/engine_fit.h"
#include "engine/engine_stats.h"
#include "engine/engine_text.h"
#include "engine/steps/constraint.h"
#include "engine/steps/publish.h"
#include "tests/fake_answer.h"
#include "tests/fake_engine.h"

enum { PAGE_SLOTS = 16, PAGE_BYTES = 8192, MODEL_LEN = 8192 };
enum { CONVERSATIONS_MAX = 2048, LOAD_PARTS = 10 };

struct sequence {
    struct engine_job *job;
    struct sequence *next;
    struct fake_answer answer;
    uint64_t origin; /* the conversation it goes on from; 0 = none */
    int prefill_left;
    int64_t pages_reserved;
    int32_t budget; /* -1 full */
};

struct conversation {
    uint64_t id;
    uint8_t space[16];
    int32_t *tokens;
    int32_t count, prompt_count;
    int32_t budget;
    char policy[32];
    int64_t pages, used_ns;
    uint64_t hint, origin;
    bool superseded, pinned;
    int32_t ttl;
};

static const int32_t fake_end = IM_END;

struct engine {
    struct engine_options options;
    struct engine_info info;
    char *model_dir;
    int step_us, prefill_steps, think;
    bool channels;
    struct fake_template template;
    cJSON *script;    /* NULL without KEEPD_FAKE_SCRIPT */
    int submits_left; /* until one fails; -1 never */
    atomic_int places;
    pthread_t thread;
    bool started, draining, stop;
    struct fake_adapters adapters;
    pthread_mutex_t mutex; /* all below */
    pthread_cond_t work;
    struct sequence *running, *waiting, **waiting_end;
    struct constraint_table constraints; /* compiled, and not obeyed */
    struct engine_order *orders[ENGINE_ORDERS_MAX];
    int order_count;
    struct conversation conversations[CONVERSATIONS_MAX];
    uint64_t next_conversation;
    struct engine_status status;
};

/* --- opening --- */

static int env_int(const char *name, int preset) {
    const char *text = getenv(name);
    return text ? atoi(text) : preset;
}

static const struct engine_prompt fake_prompts[] = {{"query", "search: "}, {"document", ""}};

static enum engine_pooling fake_pooling(const char *name) {
    if (getenv("KEEPD_FAKE_NO_VECTORS")) return ENGINE_POOL_NONE;
    return name && strcmp(name, "mean") == 0  ? ENGINE_POOL_MEAN
           : name && strcmp(name, "cls") == 0 ? ENGINE_POOL_CLS
                                              : ENGINE_POOL_LAST;
}

static const struct picture_form fake_form = {.kind = PICTURE_IDEFICS3,
                                              .filter = PICTURE_LANCZOS,
                                              .longest_edge = 128,
                                              .token_edge = 32,
                                              .tile_tokens_max = 4,
                                              .tile_edge = 64,
                                              .splits = true,
                                              .rescale = 1.0 / 255,
                                              .mean = {0.5f, 0.5f, 0.5f},
                                              .deviation = {0.5f, 0.5f, 0.5f}};

static void fill_info(struct engine *e) {
    const struct engine_options *o = &e->options;
    int64_t pages = o->kv_pool_bytes ? o->kv_pool_bytes / PAGE_BYTES : 1 << 16;
    const char *template = e->template.source;
    e->info =
        (struct engine_info){.model_dir = e->model_dir,
                             .family = "fake",
                             .backend = "fake",
                             .kv_budget = o->kv_budget,
                             .kv_buffer = o->kv_buffer,
                             .kv_chunk = o->kv_chunk,
                             .kv_budget_max = o->kv_budget_max,
                             .kv_dtype = "f32",
                             .has_gates = true,
                             .gates_from = "beside",
                             .layers = FAKE_LAYERS,
                             .heads_kv = FAKE_HEADS,
                             .head_dim = 64,
                             .vocab = e->channels                    ? VOCAB_CHANNELS
                                      : env_int("KEEPD_FAKE_FIM", 0) ? VOCAB_FIM
                                      : e->think                     ? VOCAB_THINK
                                                                     : VOCAB,
                             .width = FAKE_WIDTH,
                             .pooling = fake_pooling(o->pooling),
                             .pooling_other = "nothing that is there",
                             .loads_adapters = o->adapter_dir && o->adapter_dir[0],
                             .max_adapters = o->max_adapters,
                             .prompts = fake_prompts,
                             .prompt_count = 2,
                             .max_model_len = o->max_model_len ? o->max_model_len : MODEL_LEN,
                             .max_num_seqs = o->max_num_seqs,
                             .max_queue = o->max_queue,
                             .max_choices = o->max_num_seqs,
                             .space_key = "a fake secret",
                             .replicas = 1,
                             .threads = 1,
                             .pages_total = pages,
                             .page_bytes = PAGE_BYTES,
                             .page_slots = PAGE_SLOTS,
                             .token_entries = FAKE_LAYERS * FAKE_HEADS,
                             .has_chat_template = !env_int("KEEPD_FAKE_NO_TEMPLATE", 0),
                             .chat_template = template ? template : "fake",
                             .tool_template = template ? template : fake_tool_template(),
                             .pictures = getenv("KEEPD_FAKE_PICTURES") ? &fake_form : NULL,
                             .bos_token = "",
                             .eos_token = fake_special_names[END_OF_TEXT - IM_START],
                             .sampling = engine_choose_sampling(
                                 (struct engine_sampling){NAN, NAN, NAN, NAN, -1}, o->sampling)};
    if (e->info.max_choices > ENGINE_CHOICES_MAX) e->info.max_choices = ENGINE_CHOICES_MAX;
    e->info.max_logprobs = o->max_logprobs ? o->max_logprobs : ENGINE_TOP_MAX;
    if (e->info.max_logprobs > VOCAB) e->info.max_logprobs = VOCAB;
    if (o->max_choices && o->max_choices < e->info.max_choices)
        e->info.max_choices = o->max_choices;
    snprintf(e->info.kv_policy, sizeof e->info.kv_policy, "%s",
             engine_chooses(o->kv_policy) ? "global" : o->kv_policy);
}

static const char *const policy_names[] = {"full", "streaming", "trimkv", "global"};

static bool is_policy(const char *name) {
    for (size_t i = 0; i < sizeof policy_names / sizeof *policy_names; i++)
        if (strcmp(name, policy_names[i]) == 0) return true;
    return false;
}

const char *engine_policy_at(const struct engine *e, int index) {
    (void)e;
    return index < (int)(sizeof policy_names / sizeof *policy_names) ? policy_names[index] : NULL;
}

int engine_fit_gates(const struct engine_options *options, const struct engine_fit *fit,
                     struct engine_fitted *out, struct fault *fault) {
    (void)options, (void)fit, (void)out;
    return fault_set(fault, ERR_UNSUPPORTED, "", "the scripted engine has no model");
}

bool engine_wants_gates(const struct engine_options *options) {
    (void)options;
    return false;
}

int engine_find_gates(const struct engine_options *options, struct engine_found *found,
                      struct fault *fault) {
    (void)options, (void)found;
    return fault_set(fault, ERR_UNSUPPORTED, "", "the scripted engine has no model");
}

void engine_fitted_close(struct engine_fitted *fitted) {
    (void)fitted;
}

int engine_save(const struct engine_options *options, const char *to, size_t *bytes,
                struct fault *fault) {
    (void)options, (void)to, (void)bytes;
    return fault_set(fault, ERR_UNSUPPORTED, "quantize-to", "the fake engine has no weights");
}

int engine_inspect(const struct engine_options *options, struct buf *out, char **tool_template,
                   struct fault *fault) {
    buf_fmt(out, "family       none: %s is not read here\n", options->model_dir);
    *tool_template = NULL;
    *fault = (struct fault){0};
    return 0;
}

static size_t text_of_token(const void *arg, int32_t id, const char **bytes) {
    const struct engine *e = arg;
    return engine_token_is_special(e, id) ? 0 : engine_token_bytes(e, id, bytes);
}

int engine_constraint_open(struct engine *e, const struct constrain_part *part,
                           struct engine_constraint **out, struct fault *fault) {
    return constraint_open(&e->constraints, part, out, fault);
}

void engine_constraint_close(struct engine *e, struct engine_constraint *constraint) {
    constraint_close(&e->constraints, constraint);
}

/* Returns whether a file of this name is beside the model. */
static bool fake_model_has(const char *model, const char *name) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", model, name);
    return access(path, F_OK) == 0;
}

int engine_space_key(const char *state_dir, uint8_t key[16], struct fault *fault) {
    (void)state_dir, (void)fault;
    memcpy(key, "a fake secret", 14);
    return 0;
}

int64_t engine_unused_memory(const struct engine_options *options) {
    (void)options;
    return (int64_t)env_int("KEEPD_FAKE_UNUSED", 1 << 16) << 20;
}

int engine_open(const struct engine_options *options, struct engine **out, struct fault *fault) {
    static const double eviction_bounds[] = {.0001, .001, .01, .1, 1};
    static const double token_bounds[] = {1,   8,    16,   32,   64,   128,  256,
                                          512, 1024, 2048, 4096, 8192, 16384};
    *out = NULL;
    if (!engine_chooses(options->kv_policy) && !is_policy(options->kv_policy))
        return fault_set(fault, ERR_INVALID, "kv-policy",
                         "'%s' is not one of auto, full, streaming, trimkv, global",
                         options->kv_policy);
    if (strstr(options->model_dir, "broken"))
        return fault_set(fault, ERR_MALFORMED, "config.json", "the fake model is broken");
    if (options->check_only && options->found) {
        options->found->memory_bytes = (int64_t)env_int("KEEPD_FAKE_MEMORY", 100) << 20;
        if (fake_model_has(options->model_dir, "large")) options->found->memory_bytes *= 3;
        options->found->max_model_len = options->max_model_len ? options->max_model_len : MODEL_LEN;
        if (fake_tool_template())
            options->found->tool_template = mem_must_strdup(fake_tool_template());
    }
    if (options->check_only) return 0;
    for (uint64_t i = 0; i <= LOAD_PARTS; i++) {
        if (options->progress && !options->progress(options->arg, i, LOAD_PARTS, "nothing"))
            return fault_set(fault, ERR_STOPPED, "model", "loading was stopped");
        if (i < LOAD_PARTS)
            usleep((useconds_t)env_int("KEEPD_FAKE_LOAD_MS", 0) * 1000 / LOAD_PARTS);
    }
    if (fake_model_has(options->model_dir, "fails"))
        return fault_set(fault, ERR_NOMEM, "model", "no memory for the fake model");
    struct engine *e = mem_must_alloc(1, sizeof *e);
    e->options = *options;
    e->model_dir = mem_must_strdup(options->model_dir);
    e->step_us = env_int("KEEPD_FAKE_STEP_US", 0);
    e->think = env_int("KEEPD_FAKE_THINK", 0);
    e->channels = env_int("KEEPD_FAKE_CHANNELS", 0) != 0;
    e->script = fake_script_open();
    e->submits_left = env_int("KEEPD_FAKE_SUBMITS", -1);
    e->prefill_steps = env_int("KEEPD_FAKE_PREFILL_STEPS", 1);
    e->waiting_end = &e->waiting;
    pthread_mutex_init(&e->mutex, NULL);
    pthread_cond_init(&e->work, NULL);
    hist_open(&e->status.counters.eviction_seconds, eviction_bounds, 5);
    hist_open(&e->status.counters.mask_seconds, eviction_bounds, 5);
    hist_open(&e->status.counters.iteration_tokens, token_bounds, 13);
    int rc = fake_template_open(options->chat_template, &e->template, fault);
    fill_info(e);
    constraint_table_open(&e->constraints,
                          &(struct constrain_vocabulary){
                              .size = e->info.vocab, .token_bytes = text_of_token, .arg = e});
    e->info.eos = &fake_end;
    e->info.eos_count = 1;
    e->status.pages_total = e->info.pages_total;
    if (rc == 0) rc = fake_adapters_open(&e->adapters, &e->options, fault);
    if (rc)
        engine_close(e);
    else
        *out = e;
    return rc;
}

const struct engine_info *engine_info(const struct engine *e) {
    return &e->info;
}

const struct fake_template *fake_template(const struct engine *e) {
    return &e->template;
}

bool fake_has_channels(const struct engine *e) {
    return e->channels;
}

bool fake_opens_thought(const struct engine *e) {
    return e->think == 2;
}

struct fake_adapters *fake_adapters(struct engine *e) {
    return &e->adapters;
}

/* --- the queue --- */

bool engine_queue_enter(struct engine *e, int jobs) {
    if (atomic_fetch_add(&e->places, jobs) <= e->options.max_queue - jobs) return true;
    atomic_fetch_sub(&e->places, jobs);
    return false;
}

void engine_queue_leave(struct engine *e, int jobs) {
    atomic_fetch_sub(&e->places, jobs);
}

static int32_t budget_of(const struct engine *e, const struct engine_request *r) {
    const char *policy = r->kv.policy ? r->kv.policy : e->info.kv_policy;
    if (strcmp(policy, "full") == 0) return -1;
    return r->kv.budget >= 0 ? r->kv.budget : e->info.kv_budget;
}

static int64_t pages_for(const struct engine *e, int64_t tokens, int32_t budget) {
    int64_t held =
        budget < 0 || tokens < budget + e->info.kv_buffer ? tokens : budget + e->info.kv_buffer;
    return (held + PAGE_SLOTS - 1) / PAGE_SLOTS * FAKE_LAYERS * FAKE_HEADS;
}

int engine_longest(const struct engine *e, const struct engine_kv *kv) {
    return kv->overflow == ENGINE_OVERFLOW_SHIFT ? ENGINE_SHIFTED_TOKENS : e->info.max_model_len;
}

int engine_check(const struct engine *e, struct engine_job *job, struct fault *fault) {
    const struct engine_request *r = &job->request;
    if (r->prompt_count < 1) return fault_set(fault, ERR_INVALID, "prompt", "no tokens");
    int longest = engine_longest(e, &r->kv);
    if (r->prompt_count + (int64_t)r->max_tokens > longest)
        return fault_set(fault, ERR_CONTEXT, "prompt", "maximum context length is %d tokens",
                         longest);
    if (r->choices < 0 || r->choices > e->info.max_choices)
        return fault_set(fault, ERR_LIMIT, "n", "n is %d, this server allows %d", r->choices,
                         e->info.max_choices);
    if (r->kv.policy && !is_policy(r->kv.policy))
        return fault_set(fault, ERR_INVALID, "kv.policy",
                         "unknown policy '%s'; there are full, streaming, trimkv, global",
                         r->kv.policy);
    if (e->info.kv_budget_max && budget_of(e, r) < 0)
        return fault_set(fault, ERR_INVALID, "kv.policy", "budgets are capped on this server");
    if (e->info.kv_budget_max && budget_of(e, r) > e->info.kv_budget_max)
        return fault_set(fault, ERR_INVALID, "kv.budget", "at most %d on this server",
                         e->info.kv_budget_max);
    if (pages_for(e, r->prompt_count + (int64_t)r->max_tokens, budget_of(e, r)) * fake_choices(r) >
        e->info.pages_total)
        return fault_set(fault, ERR_LIMIT, "max_tokens", "it can never fit the page pool");
    return 0;
}

/* --- jobs --- */

static struct sequence *open_sequence(const struct engine *e, struct engine_job *job) {
    const struct engine_request *r = &job->request;
    struct sequence *s = mem_try_alloc(1, sizeof *s);
    if (!s) return NULL;
    s->answer.thinks = e->think != 0;
    s->answer.channels = e->channels;
    s->answer.script = e->script;
    if (!fake_answer_open(&s->answer, r)) {
        mem_free(s);
        return NULL;
    }
    s->job = job;
    s->prefill_left = e->prefill_steps;
    s->budget = budget_of(e, r);
    s->pages_reserved =
        pages_for(e, r->prompt_count + (int64_t)r->max_tokens, s->budget) * fake_choices(r);
    return s;
}

static void close_sequence(struct sequence *s) {
    fake_answer_close(&s->answer);
    mem_free(s);
}

/* The worst moment to refuse a job: when those before it have tokens already. The mutex is held. */
static void await_token(struct engine *e) {
    const struct timespec moment = {.tv_nsec = 1000000};
    for (int i = 0; i < 5000 && !e->status.counters.generation_tokens; i++) {
        pthread_mutex_unlock(&e->mutex);
        nanosleep(&moment, NULL);
        pthread_mutex_lock(&e->mutex);
    }
}

int engine_submit(struct engine *e, struct engine_job *job) {
    struct sequence *s = NULL;
    int rc = 0;
    pthread_mutex_lock(&e->mutex);
    if (e->draining || e->stop || e->status.stopped) rc = ERR_STOPPED;
    if (!rc && e->submits_left >= 0 && e->submits_left-- == 0) {
        await_token(e);
        rc = ERR_NOMEM;
    }
    if (!rc && (!fake_outputs_open(job) || !(s = open_sequence(e, job)))) rc = ERR_NOMEM;
    if (!rc) {
        job->queued_ns = clock_ns();
        *e->waiting_end = s;
        e->waiting_end = &s->next;
        e->status.waiting++;
        e->status.jobs++;
        pthread_cond_signal(&e->work);
    }
    pthread_mutex_unlock(&e->mutex);
    if (rc) engine_job_close(job);
    return rc;
}

/* --- conversations --- */

static void drop_conversation(struct engine *e, struct conversation *c) {
    e->status.pages_retained -= c->pages;
    e->status.pages_used -= c->pages;
    e->status.conversations--;
    mem_free(c->tokens);
    *c = (struct conversation){0};
}

static struct conversation *find_conversation(struct engine *e, uint64_t id) {
    for (int i = 0; id && i < CONVERSATIONS_MAX; i++)
        if (e->conversations[i].tokens && e->conversations[i].id == id) return &e->conversations[i];
    return NULL;
}

/* Superseded ones go first, then the least recently used. */
static bool goes_before(const struct conversation *a, const struct conversation *b) {
    if (a->superseded != b->superseded) return a->superseded;
    return a->used_ns < b->used_ns;
}

/* An empty place, or the one that goes first. */
static struct conversation *free_conversation(struct engine *e) {
    struct conversation *oldest = NULL;
    for (int i = 0; i < e->options.max_conversations && i < CONVERSATIONS_MAX; i++) {
        struct conversation *c = &e->conversations[i];
        if (!c->tokens) return c;
        if (!oldest || goes_before(c, oldest)) oldest = c;
    }
    if (oldest) drop_conversation(e, oldest);
    return oldest;
}

/* The turn it came from is superseded now, and the one before that goes. */
static void supersede(struct engine *e, uint64_t origin) {
    struct conversation *from = find_conversation(e, origin);
    struct conversation *before = from ? find_conversation(e, from->origin) : NULL;
    if (before && before->superseded) drop_conversation(e, before);
    if (from) from->superseded = true;
}

static void retain(struct engine *e, const struct sequence *s, uint32_t answer) {
    const struct engine_job *job = s->job;
    const struct engine_request *r = &job->request;
    struct conversation *c = r->kv.retain ? free_conversation(e) : NULL;
    int32_t count = r->prompt_count + (int32_t)answer;
    if (!c || !(c->tokens = mem_try_alloc((size_t)count, sizeof *c->tokens))) return;
    memcpy(c->tokens, r->prompt, (size_t)r->prompt_count * sizeof *c->tokens);
    for (uint32_t i = 0; i < answer; i++)
        c->tokens[(uint32_t)r->prompt_count + i] = job->choice[0].tokens[i].token;
    memcpy(c->space, r->space, sizeof c->space);
    snprintf(c->policy, sizeof c->policy, "%s", job->kv.policy);
    c->id = fake_mix(++e->next_conversation);
    c->hint = r->hint;
    c->origin = s->origin;
    c->ttl = r->kv.ttl;
    c->pinned = r->kv.pin;
    s->job->kv.pinned = c->pinned;
    supersede(e, s->origin);
    c->count = count;
    c->prompt_count = r->prompt_count;
    c->budget = s->budget;
    c->used_ns = clock_ns();
    c->pages = pages_for(e, count, s->budget);
    e->status.pages_retained += c->pages;
    e->status.pages_used += c->pages;
    e->status.conversations++;
}

static int32_t common_prefix(const struct conversation *c, const struct engine_request *r) {
    int32_t n = 0;
    while (n < c->count && n < r->prompt_count - 1 && c->tokens[n] == r->prompt[n]) n++;
    return n;
}

static void continue_conversation(struct engine *e, struct sequence *s) {
    struct engine_job *job = s->job;
    const struct engine_request *r = &job->request;
    struct conversation *best = NULL;
    int32_t longest = 0;
    for (int i = 0; r->kv.reuse && !r->prompt_logprobs && i < CONVERSATIONS_MAX; i++) {
        struct conversation *c = &e->conversations[i];
        if (!c->tokens || memcmp(c->space, r->space, sizeof c->space)) continue;
        int32_t n = common_prefix(c, r);
        if (n < c->prompt_count || n < longest) continue;
        if (best && n == longest && c->hint != r->hint) continue;
        longest = n;
        best = c;
    }
    if (!best) {
        e->status.counters.conversation_misses++;
        e->status.counters.conversation_lost[ENGINE_MISS_NEW] += r->kv.reuse;
        return;
    }
    e->status.counters.conversation_hits++;
    e->status.counters.cached_tokens += (uint64_t)longest;
    job->cached_tokens = longest;
    job->kv.dropped_tokens = best->count - longest;
    best->used_ns = clock_ns();
    s->origin = best->id;
}

/* --- steps (the mutex is held) --- */

static void fill_report(const struct engine_job *job, struct engine_kv_details *kv,
                        int32_t per_stream) {
    if (job->request.kv.report == ENGINE_REPORT_NONE) return;
    kv->lengths = mem_try_alloc((size_t)FAKE_LAYERS * FAKE_HEADS, sizeof *kv->lengths);
    for (int i = 0; kv->lengths && i < FAKE_LAYERS * FAKE_HEADS; i++) kv->lengths[i] = per_stream;
    if (job->request.kv.report != ENGINE_REPORT_POSITIONS) return;
    kv->positions =
        mem_try_alloc((size_t)per_stream * FAKE_LAYERS * FAKE_HEADS + 1, sizeof *kv->positions);
    for (int32_t i = 0; kv->positions && i < per_stream * FAKE_LAYERS * FAKE_HEADS; i++)
        kv->positions[i] = kv->seen_tokens - per_stream + i % per_stream;
}

static void fill_details(struct engine *e, const struct sequence *s, uint32_t answer) {
    struct engine_job *job = s->job;
    struct engine_kv_details *kv = &job->kv;
    int32_t seen = job->request.prompt_count + (int32_t)answer;
    int32_t held = s->budget >= 0 && seen > s->budget + e->info.kv_buffer ? s->budget : seen;
    snprintf(kv->policy, sizeof kv->policy, "%s",
             job->request.kv.policy ? job->request.kv.policy : e->info.kv_policy);
    kv->budget = s->budget;
    kv->seen_tokens = seen;
    kv->kept_entries = (int64_t)held * FAKE_LAYERS * FAKE_HEADS;
    kv->evicted_entries = (int64_t)(seen - held) * FAKE_LAYERS * FAKE_HEADS;
    kv->bytes = pages_for(e, seen, s->budget) * PAGE_BYTES;
    e->status.entries_evicted += (uint64_t)kv->evicted_entries;
    e->status.counters.evictions += kv->evicted_entries > 0;
    if (kv->evicted_entries) hist_add(&e->status.counters.eviction_seconds, 0.0005);
    fill_report(job, kv, held);
}

/* The job is the client's again after the last store. */
static void finish(struct engine *e, struct sequence *s, enum engine_finish how) {
    struct engine_job *job = s->job;
    uint32_t answer = (uint32_t)atomic_load(&job->choice[0].token_count);
    int first = atomic_load(&job->choice[0].finish);
    if (first == ENGINE_RUNNING) first = (int)how;
    if (atomic_load(&job->admitted)) {
        e->status.pages_reserved -= s->pages_reserved;
        e->status.pages_used -= s->pages_reserved;
        e->status.running -= job->choice_count;
        fill_details(e, s, answer);
        if (first == ENGINE_FINISH_STOP || first == ENGINE_FINISH_LENGTH) retain(e, s, answer);
    } else {
        e->status.waiting--;
        engine_queue_leave(e, 1);
    }
    e->status.jobs--;
    job->finished_ns = clock_ns();
    close_sequence(s);
    for (int i = 0; i < job->choice_count; i++)
        if (!atomic_load(&job->choice[i].finish))
            atomic_store_explicit(&job->choice[i].finish, how, memory_order_release);
    atomic_store_explicit(&job->finished, 1, memory_order_release);
}

/* A token for every choice that has not ended. The last one's finish is stored by finish(), after
 * all else. */
static enum engine_finish append_all(struct engine *e, struct sequence *s) {
    struct engine_job *job = s->job;
    int left = 0;
    enum engine_finish last = ENGINE_RUNNING;
    for (int i = 0; i < job->choice_count; i++) left += !atomic_load(&job->choice[i].finish);
    for (int i = 0; i < job->choice_count; i++) {
        struct engine_choice *choice = &job->choice[i];
        if (atomic_load(&choice->finish)) continue;
        enum engine_finish how = fake_answer_append(&s->answer, e, job, i);
        e->status.counters.generation_tokens++;
        if (how == ENGINE_RUNNING) continue;
        if (--left == 0)
            last = how;
        else
            atomic_store_explicit(&choice->finish, how, memory_order_release);
    }
    return last;
}

/* Every head holds the whole prompt when it is read. */
static void report_held(struct engine_job *job) {
    struct engine_held *held = publish_held_next(job);
    if (!held) return;
    held->tokens = job->request.prompt_count;
    for (int i = 0; i < FAKE_LAYERS * FAKE_HEADS; i++) held->lengths[i] = held->tokens;
    publish_held(job);
}

static enum engine_finish step_sequence(struct engine *e, struct sequence *s) {
    struct engine_job *job = s->job;
    if (atomic_load_explicit(&job->cancel, memory_order_acquire)) return ENGINE_FINISH_ABORT;
    if (s->prefill_left > 0) {
        int32_t done = e->prefill_steps - --s->prefill_left;
        atomic_store(&job->prompt_read,
                     (uint_fast32_t)(job->request.prompt_count * done / e->prefill_steps));
        if (s->prefill_left > 0) return ENGINE_RUNNING;
    }
    atomic_store(&job->prompt_read, (uint_fast32_t)job->request.prompt_count);
    if (atomic_load(&job->choice[0].token_count) == 0) report_held(job);
    if (s->answer.fail_at == (int32_t)atomic_load(&job->choice[0].token_count)) {
        fault_set(&job->fault, ERR_INTERNAL, NULL, "the fake engine was told to fail");
        return ENGINE_FINISH_ERROR;
    }
    if (s->answer.kill) e->status.stopped = true;
    if (job->request.pooling) return ENGINE_FINISH_STOP;
    return job->request.max_tokens == 0 ? ENGINE_FINISH_LENGTH : append_all(e, s);
}

static void admit(struct engine *e, struct sequence *s) {
    struct engine_job *job = s->job;
    e->status.waiting--;
    e->status.running += job->choice_count;
    e->status.pages_reserved += s->pages_reserved;
    e->status.pages_used += s->pages_reserved;
    continue_conversation(e, s);
    e->status.counters.computed_tokens +=
        (uint64_t)(job->request.prompt_count - job->cached_tokens);
    job->admitted_ns = clock_ns();
    s->next = e->running;
    e->running = s;
    engine_queue_leave(e, 1);
    atomic_store_explicit(&job->admitted, 1, memory_order_release);
}

/* In order; what is cancelled leaves the queue wherever it stands. */
static void admit_waiting(struct engine *e) {
    struct sequence **link = &e->waiting;
    bool blocked = false;
    while (*link) {
        struct sequence *s = *link;
        bool cancelled = atomic_load_explicit(&s->job->cancel, memory_order_acquire);
        blocked |= e->status.running + s->job->choice_count > e->options.max_num_seqs ||
                   e->status.pages_reserved + s->pages_reserved > e->info.pages_total;
        if (!cancelled && blocked) {
            link = &s->next;
            continue;
        }
        *link = s->next;
        if (cancelled)
            finish(e, s, ENGINE_FINISH_ABORT);
        else
            admit(e, s);
    }
    e->waiting_end = link;
}

/* The conversation, and the superseded one it came from. */
static void apply_orders(struct engine *e) {
    for (int i = 0; i < e->order_count; i++) {
        struct engine_order *order = e->orders[i];
        struct conversation *c = find_conversation(e, order->id);
        struct conversation *before = c ? find_conversation(e, c->origin) : NULL;
        bool deletes = order->kind == ENGINE_ORDER_DELETE;
        order->result = !c ? ERR_NOTFOUND : deletes ? 0 : ERR_UNSUPPORTED;
        if (deletes && before && before->superseded) drop_conversation(e, before);
        if (deletes && c) drop_conversation(e, c);
        atomic_store_explicit(&order->done, 1, memory_order_release);
    }
    e->order_count = 0;
}

int engine_conversation_order(struct engine *e, struct engine_order *order) {
    int rc = 0;
    pthread_mutex_lock(&e->mutex);
    if (!e->started || e->stop || e->status.stopped) rc = ERR_STOPPED;
    if (!rc && e->order_count == ENGINE_ORDERS_MAX) rc = ERR_FULL;
    if (!rc) {
        atomic_store(&order->done, 0);
        e->orders[e->order_count++] = order;
        pthread_cond_signal(&e->work);
    }
    pthread_mutex_unlock(&e->mutex);
    return rc;
}

/* There is no state directory. */
static int no_directory(struct fault *fault) {
    return fault_set(fault, ERR_UNSUPPORTED, "state-dir", "this server has no state directory");
}

int engine_state_open(struct engine *e, uint64_t id, int *fd, uint64_t *bytes,
                      struct fault *fault) {
    (void)e, (void)id, (void)fd, (void)bytes;
    return no_directory(fault);
}

int64_t engine_upload_max(const struct engine *e) {
    (void)e;
    return -1;
}

int engine_upload_open(struct engine *e, const uint8_t space[16], struct engine_upload **out,
                       struct fault *fault) {
    (void)e, (void)space;
    *out = NULL;
    fake_wait_at_gate();
    return no_directory(fault);
}

int engine_upload_add(struct engine_upload *upload, const char *data, size_t size,
                      struct fault *fault) {
    (void)upload, (void)data, (void)size;
    return no_directory(fault);
}

int engine_upload_end(struct engine_upload *upload, struct engine_conversation_row *row,
                      struct fault *fault) {
    (void)upload, (void)row;
    return no_directory(fault);
}

void engine_upload_close(struct engine_upload *upload) {
    (void)upload;
}

static void step(struct engine *e) {
    struct sequence **link = &e->running;
    apply_orders(e);
    admit_waiting(e);
    hist_add(&e->status.counters.iteration_tokens, e->status.running);
    while (*link) {
        struct sequence *s = *link;
        enum engine_finish how = step_sequence(e, s);
        if (how == ENGINE_RUNNING) {
            link = &s->next;
            continue;
        }
        *link = s->next;
        finish(e, s, how);
    }
    e->status.counters.steps++;
    e->status.progress_ns = clock_ns();
}

static void finish_list(struct engine *e, struct sequence *s, enum engine_finish how) {
    for (struct sequence *next; s; s = next) {
        next = s->next;
        if (how == ENGINE_FINISH_ERROR)
            fault_set(&s->job->fault, ERR_INTERNAL, NULL, "the engine has stopped");
        finish(e, s, how);
    }
}

static void finish_all(struct engine *e, enum engine_finish how) {
    finish_list(e, e->running, how);
    finish_list(e, e->waiting, how);
    e->running = e->waiting = NULL;
    e->waiting_end = &e->waiting;
}

/* Steps begin step_us apart, however long each takes; who is late does not hurry afterwards. */
static void await_step(const struct engine *e, int64_t *due_ns) {
    const int64_t second_ns = 1000000000, now_ns = clock_ns();
    if (!e->step_us) return;
    *due_ns += e->step_us * 1000ll;
    if (*due_ns < now_ns) *due_ns = now_ns;
    const struct timespec due = {*due_ns / second_ns, *due_ns % second_ns};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL);
}

static void *run(void *arg) {
    struct engine *e = arg;
    int64_t due_ns = clock_ns();
    pthread_mutex_lock(&e->mutex);
    while (!e->stop && !e->status.stopped) {
        e->status.progress_ns = clock_ns();
        if (!e->running && !e->waiting && !e->order_count) {
            pthread_cond_wait(&e->work, &e->mutex);
            due_ns = clock_ns();
            continue;
        }
        step(e);
        pthread_mutex_unlock(&e->mutex);
        e->options.wake(e->options.arg);
        await_step(e, &due_ns);
        pthread_mutex_lock(&e->mutex);
    }
    apply_orders(e);
    finish_all(e, e->stop ? ENGINE_FINISH_ABORT : ENGINE_FINISH_ERROR);
    pthread_mutex_unlock(&e->mutex);
    e->options.wake(e->options.arg);
    return NULL;
}

/* --- life --- */

int engine_start(struct engine *e) {
    e->started = pthread_create(&e->thread, NULL, run, e) == 0;
    return e->started ? 0 : ERR_NOMEM;
}

void engine_drain(struct engine *e) {
    pthread_mutex_lock(&e->mutex);
    e->draining = true;
    pthread_mutex_unlock(&e->mutex);
}

bool engine_idle(struct engine *e) {
    pthread_mutex_lock(&e->mutex);
    bool idle = !e->running && !e->waiting;
    pthread_mutex_unlock(&e->mutex);
    return idle;
}

void engine_close(struct engine *e) {
    if (!e) return;
    pthread_mutex_lock(&e->mutex);
    e->stop = true;
    pthread_cond_signal(&e->work);
    pthread_mutex_unlock(&e->mutex);
    if (e->started) pthread_join(e->thread, NULL);
    for (int i = 0; i < CONVERSATIONS_MAX; i++) mem_free(e->conversations[i].tokens);
    constraint_table_close(&e->constraints);
    pthread_mutex_destroy(&e->mutex);
    pthread_cond_destroy(&e->work);
    mem_free(e->model_dir);
    fake_template_close(&e->template);
    json_free(e->script);
    mem_free(e);
}

/* --- observation --- */

void engine_status(struct engine *e, struct engine_status *out) {
    pthread_mutex_lock(&e->mutex);
    *out = e->status;
    pthread_mutex_unlock(&e->mutex);
}

void engine_replica_status(struct engine *e, int replica, struct engine_status *out) {
    CHECK(replica == 0);
    engine_status(e, out);
}

static int32_t held_of(const struct engine *e, int32_t tokens, int32_t budget) {
    return budget >= 0 && tokens > budget + e->info.kv_buffer ? budget : tokens;
}

int engine_sequences(struct engine *e, struct engine_sequence_row *rows, int max) {
    int count = 0;
    pthread_mutex_lock(&e->mutex);
    for (struct sequence *s = e->running; s && count < max; s = s->next) {
        const struct engine_job *job = s->job;
        struct engine_sequence_row *row = &rows[count++];
        int32_t answer = (int32_t)atomic_load(&job->choice[0].token_count);
        *row = (struct engine_sequence_row){.tokens = job->request.prompt_count + answer,
                                            .prompt_count = job->request.prompt_count,
                                            .output_count = answer,
                                            .budget = s->budget,
                                            .pages_reserved = s->pages_reserved,
                                            .prefilling = answer == 0};
        row->held = held_of(e, row->tokens, s->budget);
        snprintf(row->policy, sizeof row->policy, "%s",
                 job->request.kv.policy ? job->request.kv.policy : e->info.kv_policy);
    }
    pthread_mutex_unlock(&e->mutex);
    return count;
}

int engine_conversations(struct engine *e, const struct engine_conversation_filter *filter,
                         struct engine_conversation_row *rows, int max) {
    int count = 0;
    pthread_mutex_lock(&e->mutex);
    for (int i = 0; i < CONVERSATIONS_MAX && count < max; i++) {
        const struct conversation *c = &e->conversations[i];
        if (!c->tokens || !engine_conversation_is(filter, c->space, c->id)) continue;
        rows[count] = (struct engine_conversation_row){.id = c->id,
                                                       .tokens = c->count,
                                                       .held = held_of(e, c->count, c->budget),
                                                       .budget = c->budget,
                                                       .pages = c->pages,
                                                       .idle_ns = clock_ns() - c->used_ns,
                                                       .hint = c->hint,
                                                       .superseded = c->superseded,
                                                       .pinned = c->pinned,
                                                       .ttl = c->ttl};
        memcpy(rows[count].space, c->space, sizeof c->space);
        snprintf(rows[count++].policy, sizeof rows->policy, "%s", c->policy);
    }
    pthread_mutex_unlock(&e->mutex);
    return count;
}
