/* Who runs: admission, the batch of a step, eviction points, leaving. What stays between turns is
 * sched_keep.c. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "engine/sched_int.h"
#include "engine/trace.h"

/* A row whose logits are wanted: the next token of a sequence, or the score of a prompt token. */
struct sched_want {
    struct sequence *seq;
    int32_t scored; /* index of the prompt token this row's logits score; -1 = sample */
};

static const double eviction_bounds[] = {1e-5,   2.5e-5, 5e-5, 1e-4,   2.5e-4, 5e-4, 1e-3,
                                         2.5e-3, 5e-3,   1e-2, 2.5e-2, 5e-2,   0.1,  0.25};
static const double iteration_bounds[] = {1,   8,    16,   32,   64,   128,  256,
                                          512, 1024, 2048, 4096, 8192, 16384};
#define COUNT_OF(a) ((int)(sizeof(a) / sizeof((a)[0])))

/* ---- Life ------------------------------------------------------------------------------------ */

void sched_open(struct sched *sched, const struct sched_options *options) {
    CHECK(options->rows_max > options->sequences_max); /* prompts always find room beside decode */
    CHECK(options->logits_max >= options->sequences_max + 1);
    *sched = (struct sched){.options = *options};
    size_t sequences = (size_t)options->sequences_max, logits = (size_t)options->logits_max;
    int slots = options->sequences_max + options->conversations_max;
    sched->sequences = mem_must_alloc(sequences, sizeof *sched->sequences);
    sched->order = mem_must_alloc(sequences, sizeof *sched->order);
    sched->spans = mem_must_alloc(sequences, sizeof *sched->spans);
    sched->span_sequences = mem_must_alloc(sequences, sizeof *sched->span_sequences);
    sched->due = mem_must_alloc(sequences, sizeof *sched->due);
    sched->rows = mem_must_alloc((size_t)options->rows_max, sizeof *sched->rows);
    sched->want = mem_must_alloc(logits, sizeof *sched->want);
    sched->wants = mem_must_alloc(logits, sizeof *sched->wants);
    sched->samples = mem_must_alloc(logits, sizeof *sched->samples);
    sched->sampled = mem_must_alloc(logits, sizeof *sched->sampled);
    sched->free_slots = mem_must_alloc((size_t)slots, sizeof *sched->free_slots);
    for (int i = 0; i < slots; i++) sched->free_slots[i] = slots - 1 - i;
    sched->free_slot_count = slots;
    /* Of those that go, one after the other is written first, in parts; until then there may be
     * more of them than conversations_max, up to one for every slot. */
    bool more = options->store != NULL && options->conversations_max > 0;
    conversation_table_open(&sched->conversations, more ? slots : options->conversations_max);
    hist_open(&sched->counters.eviction_seconds, eviction_bounds, COUNT_OF(eviction_bounds));
    hist_open(&sched->counters.iteration_tokens, iteration_bounds, COUNT_OF(iteration_bounds));
}

static void end_choice(struct sched *sched, struct engine_job *job, struct engine_choice *choice,
                       enum engine_finish finish) {
    choice->ending = finish;
    choice->next = NULL;
    if (sched->ended_last != NULL)
        sched->ended_last->next = choice;
    else
        sched->ended_first = choice;
    sched->ended_last = choice;
    if (--job->choices_left > 0) return;
    job->finished_ns = clock_ns();
    job->next = NULL;
    if (sched->finished_last != NULL)
        sched->finished_last->next = job;
    else
        sched->finished_first = job;
    sched->finished_last = job;
}

/* A job that never ran. */
static void finish_job(struct sched *sched, struct engine_job *job, enum engine_finish finish) {
    for (int i = 0; i < job->choice_count; i++) end_choice(sched, job, &job->choice[i], finish);
}

/* Whoever sees a choice's `finish` sees everything before it, its count included; once a job is
 * `finished` it is the submitter's again. */
void sched_publish_finished(struct sched *sched) {
    struct engine_choice *choice = sched->ended_first, *next_choice;
    struct engine_job *job = sched->finished_first, *next;
    sched->ended_first = sched->ended_last = NULL;
    sched->finished_first = sched->finished_last = NULL;
    for (; choice != NULL; choice = next_choice) {
        next_choice = choice->next;
        atomic_store_explicit(&choice->finish, choice->ending, memory_order_release);
    }
    for (; job != NULL; job = next) {
        next = job->next;
        if (sched->pending_jobs != NULL) atomic_fetch_sub(sched->pending_jobs, 1);
        if (sched->pending_tokens != NULL)
            atomic_fetch_sub(sched->pending_tokens, sched_job_tokens(job));
        atomic_store_explicit(&job->finished, 1, memory_order_release);
    }
}

static void give_place_back(struct sched *sched) {
    if (sched->queue_places != NULL) atomic_fetch_sub(sched->queue_places, 1);
}

/* Another job is the first to wait, or none. */
static void new_head(struct sched *sched) {
    sched->head_waits = false;
    sched->head_lost = ENGINE_MISS_NEW;
    sched->search.made = sched->needs_store = false;
    sched_end_waiting(sched);
}

static struct engine_job *pop_waiting(struct sched *sched) {
    struct engine_job *job = sched->waiting_first;
    sched->waiting_first = job->next;
    if (sched->waiting_first == NULL) sched->waiting_last = NULL;
    sched->waiting--;
    new_head(sched);
    give_place_back(sched);
    return job;
}

int32_t sched_take_slot(struct sched *sched) {
    CHECK(sched->free_slot_count > 0); /* there are as many as sequences and conversations */
    return sched->free_slots[--sched->free_slot_count];
}

void sched_release_slot(struct sched *sched, int32_t slot) {
    sched_ops(sched)->release(sched->options.kern, slot);
    sched->free_slots[sched->free_slot_count++] = slot;
    sched->head_waits = false; /* there is room for somebody */
}

static void remove_sequence(struct sched *sched, struct sequence *seq) {
    int index = (int)(seq - sched->sequences), at = 0;
    while (sched->order[at] != index) at++;
    sched->running--;
    memmove(&sched->order[at], &sched->order[at + 1],
            (size_t)(sched->running - at) * sizeof *sched->order);
    sched->pages_reserved -= seq->pages_reserved;
    sched->head_waits = false; /* its pages and its place are free */
    seq_close(seq);
}

void sched_close(struct sched *sched) {
    sched_abandon(sched, ENGINE_FINISH_ABORT, 0);
    sched_publish_finished(sched);
    for (int i = 0; i < sched->conversations.capacity; i++)
        if (sched->conversations.rows[i].id != 0)
            sched_release_slot(sched, sched->conversations.rows[i].slot);
    sched_save_close(sched);
    conversation_table_close(&sched->conversations);
    mem_free(sched->sequences);
    mem_free(sched->order);
    mem_free(sched->spans);
    mem_free(sched->span_sequences);
    mem_free(sched->due);
    mem_free(sched->rows);
    mem_free(sched->want);
    mem_free(sched->wants);
    mem_free(sched->samples);
    mem_free(sched->sampled);
    mem_free(sched->free_slots);
}

bool sched_idle(const struct sched *sched) {
    return sched->running == 0 && sched->waiting == 0;
}

bool sched_stalled(const struct sched *sched) {
    return sched->running == 0 && sched->waiting > 0 && sched->head_waits;
}

uint64_t sched_progress(const struct sched *sched) {
    const struct sched_options *options = &sched->options;
    uint64_t pieces = sched->counters.copied;
    if (options->store != NULL) pieces += store_progress(options->store);
    return sched->needs_store ? pieces : pieces + sched->counters.steps;
}

void sched_submit(struct sched *sched, struct engine_job *job) {
    job->next = NULL;
    if (sched->waiting_last != NULL)
        sched->waiting_last->next = job;
    else
        sched->waiting_first = job;
    sched->waiting_last = job;
    sched->waiting++;
}

/* ---- Parameters ------------------------------------------------------------------------------ */

/* What one request may hold is capped in all its parts: a cap on the budget alone would be stepped
 * around with a huge buffer or chunk. */
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
    for (int i = 0; i < COUNT_OF(parts); i++)
        if (parts[i].value > parts[i].most)
            return fault_set(fault, ERR_LIMIT, parts[i].field,
                             "this server allows at most %d, not %d", parts[i].most,
                             parts[i].value);
    return 0;
}

static int unknown_policy(const char *name, struct fault *fault) {
    char known[256] = "";
    for (int i = 0; policy_at(i) != NULL; i++) {
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i > 0 ? ", " : "", policy_at(i)->name);
    }
    return fault_set(fault, ERR_INVALID, "kv.policy", "unknown policy '%.40s'; there are %s", name,
                     known);
}

int sched_check_rule(const struct sched_kv *rules, const struct kv_params *kv,
                     struct fault *fault) {
    struct fault why = {0};
    if (rules->unrotated && kv->rule.merge == KERN_MERGE_CLASSES)
        return fault_set(fault, ERR_UNSUPPORTED, "kv.policy",
                         "policy '%s' cannot run here: some layers of the model do not rotate keys",
                         kv->policy->name);
    if (rules->rule_check(&kv->rule, &why) == 0) return 0;
    return fault_set(fault, ERR_UNSUPPORTED, "kv.policy", "policy '%s' cannot run here: %s",
                     kv->policy->name, why.text);
}

int sched_resolve_kv(const struct engine_kv *wanted, const struct sched_kv *rules,
                     struct kv_params *out, struct fault *fault) {
    const struct kv_params *defaults = &rules->defaults;
    *out = *defaults;
    if (wanted->policy != NULL) {
        const struct policy *policy = policy_find(wanted->policy);
        if (policy == NULL) return unknown_policy(wanted->policy, fault);
        /* another method: its own rule */
        if (policy != defaults->policy) kv_params_set_policy(out, policy);
    }
    if ((out->policy->needs & POLICY_NEEDS_GATES) != 0 && !rules->has_gates)
        return fault_set(fault, ERR_INVALID, "kv.policy",
                         "policy '%s' needs retention gates and this model has none",
                         out->policy->name);
    if (wanted->budget != -1) out->budget = wanted->budget;
    if (wanted->buffer != -1) out->buffer = wanted->buffer;
    if (wanted->chunk != -1) out->chunk = wanted->chunk;
    if (wanted->sinks != -1) out->rule.sinks = wanted->sinks;
    if (wanted->recent != -1) out->rule.recent = wanted->recent;
    for (int i = 0; i < wanted->option_count; i++) {
        const struct engine_kv_option *option = &wanted->options[i];
        int code = kv_params_choose(out, option->name, option->number, option->text, fault);
        if (code != 0) return code;
    }
    /* Default protections give way to a smaller budget; what the request names does not. A budget
     * that is no number of entries is the check's to refuse. */
    kv_params_fit(out, (wanted->sinks != -1 ? POLICY_SINKS : 0) |
                           (wanted->recent != -1 ? POLICY_RECENT : 0));
    int code = kv_params_check(out, fault);
    if (code == 0) code = sched_check_rule(rules, out, fault);
    return code == 0 && rules->budget_max > 0 ? check_cap(out, rules, fault) : code;
}

static int32_t min32(int32_t a, int32_t b) {
    return a < b ? a : b;
}

/* On every rank; from the first `cached` tokens of `row`, or from nothing. The last token of an
 * answer is sampled and never appended. */
static int64_t pages_for(const struct sched_options *options, const struct kv_params *kv,
                         const struct conversation *row, const struct engine_request *request,
                         int32_t cached) {
    int32_t appended = request->max_tokens > 0 ? request->max_tokens - 1 : 0;
    int64_t prompt_new = request->prompt_count - cached;
    struct reserve_turn turn = {.tokens = cached, .added = prompt_new + appended};
    if (row != NULL) {
        turn.held = min32(row->held, cached);
        turn.fullest = min32(row->fullest, cached);
        turn.drops = cached < row->token_count;
    }
    int64_t peak = reserve_peak(kv, turn.held, prompt_new, appended);
    int64_t fullest = reserve_rank_peak(&options->shape, kv, &turn, peak);
    return reserve_pages(&options->shape, kv, fullest) +
           reserve_members(&options->shape, kv, turn.held, turn.tokens + turn.added);
}

int sched_check(const struct sched_options *options, const struct engine_request *request,
                const struct kv_params *kv, struct fault *fault) {
    int choices = seq_job_choices(request);
    int64_t pages = pages_for(options, kv, NULL, request, 0);
    if (pages <= options->pages_total / choices) return 0;
    if (pages <= options->pages_total)
        return fault_set(fault, ERR_LIMIT, "n",
                         "each of %d choices may need %lld pages of cache and the pool has %lld; "
                         "ask for fewer choices",
                         choices, (long long)pages, (long long)options->pages_total);
    return fault_set(fault, ERR_LIMIT, kv->policy->bounded ? "kv.budget" : "max_tokens",
                     "this request may need %lld pages of cache and the pool has %lld; lower "
                     "kv.budget or max_tokens, or use a bounded kv.policy",
                     (long long)pages, (long long)options->pages_total);
}

/* ---- Admission ------------------------------------------------------------------------------- */

enum admission { ADMITTED, WAIT, REFUSED /* with the reason in the job's fault */ };

static enum admission refuse(struct engine_job *job, int code, const char *text) {
    fault_set(&job->fault, code, NULL, "%s", text);
    return REFUSED;
}

static struct sequence *free_sequence(struct sched *sched) {
    struct sequence *seq = sched->sequences;
    while (seq->job != NULL) seq++;
    return seq;
}

/* A sequence for every choice, or none. */
static int open_sequences(struct sched *sched, const struct sched_entry *entry,
                          struct sequence **opened) {
    for (int i = 0; i < entry->job->choice_count; i++) {
        opened[i] = free_sequence(sched);
        int code = seq_open(opened[i], entry->job, i, &entry->kv, &sched->options.text);
        if (code == 0) continue;
        while (i > 0) seq_close(opened[--i]);
        return code;
    }
    return 0;
}

static void count_start(struct sched *sched, const struct sched_entry *entry) {
    struct engine_counters *counters = &sched->counters;
    const struct engine_job *job = entry->job;
    counters->cached_tokens += (uint64_t)job->cached_tokens;
    if (entry->row != NULL) counters->conversation_hits++;
    if (entry->row != NULL || !entry->wants_conversation) return;
    counters->conversation_misses++;
    counters->conversation_lost[entry->miss]++;
    if (entry->miss != ENGINE_MISS_NEW)
        log_debug("conversation missed: reason=%s prompt_tokens=%d", engine_miss_name(entry->miss),
                  job->request.prompt_count);
}

static void start(struct sched *sched, const struct sched_entry *entry, struct sequence **opened) {
    struct engine_job *job = entry->job;
    for (int i = 0; i < job->choice_count; i++) {
        struct sequence *seq = opened[i];
        if (i > 0) seq->leader = opened[0];
        seq->pages_reserved = entry->pages;
        sched->pages_reserved += entry->pages;
        sched->order[sched->running++] = (int)(seq - sched->sequences);
    }
    count_start(sched, entry);
    job->admitted_ns = clock_ns();
    atomic_store_explicit(&job->admitted, 1, memory_order_release);
}

/* What each choice needs, going on from the conversation that was found or from nothing. */
static void plan_pages(const struct sched *sched, struct sched_entry *entry) {
    const struct engine_request *request = &entry->job->request;
    int64_t most = sched->options.pages_total / entry->job->choice_count;
    if (entry->row != NULL) {
        entry->pages = pages_for(&sched->options, &entry->kv, entry->row, request, entry->common);
        if (entry->pages <= most) return;
        entry->row = NULL; /* only a fresh start can ever fit */
        entry->miss = ENGINE_MISS_TOO_LARGE;
    }
    entry->pages = pages_for(&sched->options, &entry->kv, NULL, request, 0);
}

/* What the rule needs beside pages, for every choice, so that neither a step nor a fork can fail
 * for want of it. */
static int prepare(struct sched *sched, struct sequence **opened, int count) {
    struct kern *kern = sched->options.kern;
    int code = 0;
    for (int i = 1; i < count; i++) opened[i]->slot = sched_take_slot(sched);
    for (int i = 0; kern->ops->prepare && i < count && code == 0; i++)
        code = kern->ops->prepare(kern, opened[i]->slot, &opened[i]->kv.rule);
    return code;
}

static enum admission enter(struct sched *sched, const struct sched_entry *entry, bool used_up) {
    struct sequence *opened[ENGINE_CHOICES_MAX];
    struct engine_job *job = entry->job;
    int code = open_sequences(sched, entry, opened);
    if (code != 0) return refuse(job, code, "no memory for the request");
    if (entry->row == NULL)
        opened[0]->slot = sched_take_slot(sched);
    else
        code = sched_go_on(sched, opened[0], entry, used_up);
    if (code == 0) code = prepare(sched, opened, job->choice_count);
    if (code == 0) {
        start(sched, entry, opened);
        return ADMITTED;
    }
    for (int i = 0; i < job->choice_count; i++) {
        if (opened[i]->slot >= 0) sched_release_slot(sched, opened[i]->slot);
        seq_close(opened[i]);
    }
    return refuse(job, code,
                  code == ERR_NOMEM ? "no memory for the request"
                                    : "the conversation's cache could not be continued");
}

static enum admission admit(struct sched *sched, struct engine_job *job) {
    const struct sched_options *options = &sched->options;
    struct sched_entry entry = {.job = job};
    int choices = job->choice_count;
    bool used_up = false;
    /* engine_check refused such requests before; a caller that skips it fails alone */
    if (choices > options->sequences_max || choices > ENGINE_CHOICES_MAX)
        return refuse(job, ERR_LIMIT, "more choices than can run at once");
    sched->needs_store = false;
    if (sched->running + choices > options->sequences_max) return WAIT;
    if (sched->free_slot_count < choices) { /* those that are still to be written have them */
        sched->needs_store = true;
        return WAIT;
    }
    if (sched_resolve_kv(&job->request.kv, &options->kv, &entry.kv, &job->fault) != 0)
        return REFUSED;
    if (!sched_find(sched, &entry)) return WAIT;
    plan_pages(sched, &entry);
    if (entry.pages > options->pages_total / choices)
        return refuse(job, ERR_LIMIT, "the request can never fit the cache's pool");
    if (!sched_make_room(sched, entry.pages * choices, entry.row, &used_up)) return WAIT;
    return enter(sched, &entry, used_up);
}

static bool cancelled(const struct engine_job *job) {
    return atomic_load_explicit(&job->cancel, memory_order_relaxed) != 0;
}

/* First come, first served: the head waits for its pages and nobody passes it, so a large request
 * cannot starve. It is not tried again before somebody leaves: looking for its conversation costs.
 */
static void admit_waiting(struct sched *sched) {
    while (sched->waiting_first != NULL && !sched->head_waits) {
        struct engine_job *job = sched->waiting_first;
        enum admission result = admit(sched, job);
        sched->head_waits = result == WAIT;
        if (result == WAIT) return;
        pop_waiting(sched);
        if (result == REFUSED) finish_job(sched, job, ENGINE_FINISH_ERROR);
    }
}

/* Wherever in the queue they are: their clients are gone. */
static void drop_cancelled_waiting(struct sched *sched) {
    struct engine_job **link = &sched->waiting_first, *last = NULL;
    while (*link != NULL) {
        struct engine_job *job = *link;
        if (!cancelled(job)) {
            last = job;
            link = &job->next;
            continue;
        }
        if (last == NULL) new_head(sched);
        *link = job->next;
        sched->waiting--;
        give_place_back(sched);
        finish_job(sched, job, ENGINE_FINISH_ABORT);
    }
    sched->waiting_last = last;
}

/* ---- Leaving --------------------------------------------------------------------------------- */

static void fill_details(struct sched *sched, struct sequence *seq,
                         const struct kern_report *report) {
    struct engine_kv_details *kv = &seq->job->kv;
    snprintf(kv->policy, sizeof kv->policy, "%s", seq->kv.policy->name);
    kv->budget = seq->kv.policy->bounded ? seq->kv.budget : -1;
    kv->seen_tokens = seq->due.tokens;
    kv->kept_entries = (int64_t)report->entries;
    /* Nothing is evicted of what a failed step appended and nobody counted. */
    int64_t appended = sched_streams(sched) * seq->due.tokens;
    kv->evicted_entries = appended > kv->kept_entries ? appended - kv->kept_entries : 0;
    kv->dropped_tokens = seq->dropped;
    kv->bytes = report->pages * sched->options.page_bytes;
}

/* Reads what the sequence holds, with as much detail as the request asked for. */
static int report_sequence(struct sched *sched, struct sequence *seq, struct kern_report *report) {
    struct engine_job *job = seq->job;
    struct kern *kern = sched->options.kern;
    enum engine_report wanted = job->request.kv.report;
    *report = (struct kern_report){0};
    if (wanted >= ENGINE_REPORT_LENGTHS)
        job->kv.lengths = mem_try_alloc((size_t)sched_streams(sched), sizeof *job->kv.lengths);
    report->lengths = job->kv.lengths;
    int code = kern->ops->report(kern, seq->slot, report);
    if (code != 0 || wanted < ENGINE_REPORT_POSITIONS || job->kv.lengths == NULL) return code;
    job->kv.positions = mem_try_alloc(report->entries, sizeof *job->kv.positions);
    if (job->kv.positions == NULL) return 0; /* the answer goes out without the long report */
    report->positions = job->kv.positions;
    report->entries_max = report->entries;
    code = kern->ops->report(kern, seq->slot, report);
    if (code != ERR_NOMEM) return code;
    mem_free(job->kv.positions); /* likewise, where the backend has no room for it */
    job->kv.positions = report->positions = NULL;
    return 0;
}

static bool answered(const struct sequence *seq) {
    return seq->finish == ENGINE_FINISH_STOP || seq->finish == ENGINE_FINISH_LENGTH;
}

static bool retains(const struct sched *sched, const struct sequence *seq) {
    const struct engine_request *request = &seq->job->request;
    return sched->conversations.capacity > 0 && request->kv.retain && !request->prompt_logprobs &&
           answered(seq);
}

/* Choice 0 tells what it holds; what it holds may stay. */
static bool leave_conversation(struct sched *sched, struct sequence *seq) {
    struct engine_job *job = seq->job;
    struct kern_report report = {0};
    int code = report_sequence(sched, seq, &report);
    if (code != 0 && answered(seq)) {
        fault_set(&job->fault, code, NULL, "the backend could not report the cache");
        seq->finish = ENGINE_FINISH_ERROR;
    }
    fill_details(sched, seq, &report);
    if (!retains(sched, seq)) return false;
    sched_retain(sched, seq, &report);
    return true;
}

/* Takes a sequence out of the running set. Aborted and failed requests leave no state. */
static void leave(struct sched *sched, struct sequence *seq) {
    struct engine_job *job = seq->job;
    struct engine_choice *choice = seq->choice;
    if (seq->index > 0 || !leave_conversation(sched, seq)) sched_release_slot(sched, seq->slot);
    enum engine_finish finish = seq->finish;
    remove_sequence(sched, seq);
    end_choice(sched, job, choice, finish);
}

static void leave_finished(struct sched *sched) {
    for (int i = 0; i < sched->running;) {
        struct sequence *seq = &sched->sequences[sched->order[i]];
        if (seq->finish == ENGINE_RUNNING && cancelled(seq->job)) seq->finish = ENGINE_FINISH_ABORT;
        if (seq->finish != ENGINE_RUNNING)
            leave(sched, seq); /* order closes up: the same index is the next sequence */
        else
            i++;
    }
}

static void abandon_running(struct sched *sched, enum engine_finish finish, int code) {
    for (int i = 0; i < sched->running; i++) {
        struct sequence *seq = &sched->sequences[sched->order[i]];
        if (finish == ENGINE_FINISH_ERROR)
            fault_set(&seq->job->fault, code, NULL, "the engine failed: %s", err_text(code));
        seq->finish = finish;
    }
    leave_finished(sched);
}

void sched_abandon(struct sched *sched, enum engine_finish finish, int code) {
    abandon_running(sched, finish, code);
    while (sched->waiting_first != NULL) {
        struct engine_job *job = pop_waiting(sched);
        if (finish == ENGINE_FINISH_ERROR)
            fault_set(&job->fault, code, NULL, "the engine failed: %s", err_text(code));
        finish_job(sched, job, finish);
    }
}

/* ---- Eviction -------------------------------------------------------------------------------- */

static void add_due(struct sched *sched, int *count, struct sequence *seq) {
    sched->due[(*count)++] = (struct kern_evict){.slot = seq->slot,
                                                 .tokens = seq->due.tokens,
                                                 .keep = seq->kv.budget,
                                                 .rule = &seq->kv.rule,
                                                 .trace = trace_begin(seq, sched_streams(sched))};
}

static int evict_due(struct sched *sched, int count, struct sequence **who) {
    struct kern *kern = sched->options.kern;
    if (count == 0) return 0;
    int64_t start = clock_ns();
    int code = kern->ops->evict(kern, sched->due, count);
    if (code == 0) code = kern->ops->sync(kern);
    int64_t spent = clock_ns() - start;
    if (code != 0) return code;
    hist_add(&sched->counters.eviction_seconds, (double)spent * 1e-9);
    sched->counters.evictions += (uint64_t)count;
    for (int i = 0; i < count; i++) {
        trace_end(who[i]);
        due_evicted(&who[i]->kv, &who[i]->due);
        who[i]->job->evict_ns += spent / count;
    }
    return 0;
}

/* Sequences for which `is_due` holds, in running order. */
static int evict_where(struct sched *sched, bool (*is_due)(const struct sequence *)) {
    struct sequence *who[64];
    int count = 0, code = 0;
    for (int i = 0; i < sched->running && code == 0; i++) {
        struct sequence *seq = &sched->sequences[sched->order[i]];
        if (!is_due(seq)) continue;
        who[count] = seq;
        add_due(sched, &count, seq);
        if (count == COUNT_OF(who)) {
            code = evict_due(sched, count, who);
            count = 0;
        }
    }
    return code == 0 ? evict_due(sched, count, who) : code;
}

static bool due_to_generate(const struct sequence *seq) {
    return seq_generating(seq) && due_before_generate(&seq->kv, &seq->due);
}

static bool due_in_prompt(const struct sequence *seq) {
    return due_after_append(&seq->kv, &seq->due);
}

/* ---- The batch ------------------------------------------------------------------------------- */

struct step {
    struct kern_batch batch;
    int want_count;
    int spare_logits; /* for scores: beyond one row for every running sequence */
};

static void add_rows(struct sched *sched, struct step *step, struct sequence *seq, int32_t count) {
    sched->span_sequences[step->batch.span_count] = seq;
    sched->spans[step->batch.span_count++] = (struct kern_span){.slot = seq->slot,
                                                                .row = step->batch.rows,
                                                                .count = count,
                                                                .pos = seq->due.tokens,
                                                                .rule = &seq->kv.rule};
    memcpy(sched->rows + step->batch.rows, seq->tokens + seq->due.tokens,
           (size_t)count * sizeof *sched->rows);
    step->batch.rows += count;
}

static void add_want(struct sched *sched, struct step *step, struct sequence *seq, int32_t row,
                     int32_t scored) {
    sched->want[step->want_count] = row;
    sched->wants[step->want_count++] = (struct sched_want){seq, scored};
}

/* The prompt's last row gives the first token of every choice. */
static void add_first_wants(struct sched *sched, struct step *step, struct sequence *leader,
                            int32_t row) {
    add_want(sched, step, leader, row, -1);
    for (int i = 0; i < sched->running; i++) {
        struct sequence *seq = &sched->sequences[sched->order[i]];
        if (seq->leader == leader) add_want(sched, step, seq, row, -1);
    }
}

/* How many of `count` rows a prompt that wants scores gets: every row but the prompt's last scores
 * the token after it. */
static int32_t scored_rows(struct step *step, const struct sequence *seq, int32_t count) {
    int32_t scores = seq->prompt_count - 1 - seq->due.tokens;
    if (scores > count) scores = count;
    if (scores > step->spare_logits) scores = count = step->spare_logits;
    step->spare_logits -= scores;
    return count;
}

/* Rows of a prefilling sequence this step, and the logits it wants. */
static void add_prompt(struct sched *sched, struct step *step, struct sequence *seq) {
    const struct engine_request *request = &seq->job->request;
    int32_t count = due_prompt_room(&seq->kv, &seq->due);
    int32_t left = sched->options.rows_max - step->batch.rows;
    if (count > left) count = left;
    if (request->prompt_logprobs) count = scored_rows(step, seq, count);
    if (count <= 0) return;
    int32_t row = step->batch.rows, pos = seq->due.tokens;
    add_rows(sched, step, seq, count);
    for (int32_t i = 0; request->prompt_logprobs && i < count; i++)
        if (pos + i + 1 < seq->prompt_count) add_want(sched, step, seq, row + i, pos + i + 1);
    if (pos + count == seq->prompt_count && request->max_tokens > 0)
        add_first_wants(sched, step, seq, row + count - 1);
}

static void build_step(struct sched *sched, struct step *step) {
    const struct sched_options *options = &sched->options;
    int logits = options->logits_max < options->rows_max ? options->logits_max : options->rows_max;
    *step = (struct step){.batch = {.tokens = sched->rows, .spans = sched->spans},
                          .spare_logits = logits - sched->running};
    for (int i = 0; i < sched->running; i++) {
        struct sequence *seq = &sched->sequences[sched->order[i]];
        if (!seq_generating(seq)) continue;
        add_want(sched, step, seq, step->batch.rows, -1);
        add_rows(sched, step, seq, 1);
    }
    for (int i = 0; i < sched->running; i++) {
        struct sequence *seq = &sched->sequences[sched->order[i]];
        if (seq_prefilling(seq)) add_prompt(sched, step, seq);
    }
}

static void count_appended(struct sched *sched, const struct step *step) {
    for (int i = 0; i < step->batch.span_count; i++) {
        struct sequence *seq = sched->span_sequences[i];
        int32_t count = sched->spans[i].count;
        if (seq_prefilling(seq)) sched->counters.computed_tokens += (uint64_t)count;
        due_append(&seq->due, count);
    }
    hist_add(&sched->counters.iteration_tokens, step->batch.rows);
}

static void prepare_samples(struct sched *sched, const struct step *step) {
    for (int i = 0; i < step->want_count; i++) {
        const struct sched_want *want = &sched->wants[i];
        if (want->scored >= 0)
            seq_score_params(want->seq, want->scored, &sched->samples[i]);
        else
            seq_sample_params(want->seq, &sched->samples[i]);
    }
}

static void fail_job(struct sched *sched, struct engine_job *job, int code) {
    fault_set(&job->fault, code, NULL, "the engine failed: %s", err_text(code));
    for (int i = 0; i < sched->running; i++) {
        struct sequence *seq = &sched->sequences[sched->order[i]];
        if (seq->job == job) seq->finish = ENGINE_FINISH_ERROR;
    }
}

/* Choices whose prompt has been read go on by themselves. */
static void fork_choices(struct sched *sched) {
    struct kern *kern = sched->options.kern;
    for (int i = 0; i < sched->running; i++) {
        struct sequence *seq = &sched->sequences[sched->order[i]];
        if (seq->leader == NULL || seq_prefilling(seq->leader)) continue;
        if (seq->finish != ENGINE_RUNNING) continue; /* its job has just failed */
        int code = kern->ops->fork(kern, seq->leader->slot, seq->slot);
        if (code != 0) {
            fail_job(sched, seq->job, code);
            continue;
        }
        seq->due = seq->leader->due;
        seq->leader = NULL;
    }
}

static void take_samples(struct sched *sched, const struct step *step) {
    for (int i = 0; i < step->want_count; i++) {
        const struct sched_want *want = &sched->wants[i];
        if (want->seq->finish != ENGINE_RUNNING) continue; /* its job has just failed */
        if (want->scored >= 0) {
            seq_add_prompt_score(want->seq, want->scored, &sched->sampled[i]);
            continue;
        }
        seq_add_token(want->seq, &sched->options.text, &sched->sampled[i]);
        sched->counters.generation_tokens++;
        if (want->seq->job->first_token_ns == 0) want->seq->job->first_token_ns = clock_ns();
    }
}

/* A request for no tokens (echo alone) ends with its prompt. */
static void finish_scored(struct sched *sched) {
    for (int i = 0; i < sched->running; i++) {
        struct sequence *seq = &sched->sequences[sched->order[i]];
        if (seq_generating(seq) && seq->job->request.max_tokens == 0 &&
            seq->finish == ENGINE_RUNNING)
            seq->finish = ENGINE_FINISH_LENGTH;
    }
}

static int run_step(struct sched *sched) {
    struct kern *kern = sched->options.kern;
    struct step step;
    const float *logits = NULL;
    int code = evict_where(sched, due_to_generate);
    if (code != 0) return code;
    build_step(sched, &step);
    code = sched->options.model_step(sched->options.model, &step.batch, sched->want,
                                     step.want_count, &logits);
    if (code != 0) return code;
    if (step.want_count > 0) {
        prepare_samples(sched, &step);
        code = kern->ops->sample(kern, logits, step.want_count, sched->options.vocab,
                                 sched->samples, sched->sampled);
    } else {
        code = kern->ops->sync(kern);
    }
    if (code != 0) return code;
    count_appended(sched, &step);
    code = evict_where(sched, due_in_prompt);
    if (code != 0) return code;
    fork_choices(sched);
    take_samples(sched, &step);
    finish_scored(sched);
    return 0;
}

bool sched_step(struct sched *sched, bool *device_failed) {
    *device_failed = false;
    bool had_work = !sched_idle(sched);
    leave_finished(sched);
    drop_cancelled_waiting(sched);
    admit_waiting(sched);
    if (sched->running == 0) return had_work;
    int code = run_step(sched);
    sched->counters.steps++;
    if (code != 0) {
        if (code == ERR_FULL) sched->counters.preemptions++; /* a reservation was wrong: a bug */
        log_error("step failed: %s; %d running requests end with an error", err_text(code),
                  sched->running);
        *device_failed = code == ERR_DEVICE;
        abandon_running(sched, ENGINE_FINISH_ERROR, code);
        return true;
    }
    leave_finished(sched);
    return true;
}
