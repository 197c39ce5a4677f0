/* Admission: the pages of a request, the order of waiting jobs, and what a job gets at its start.
 *
 * Admission is first by fair shares between clients (engine/steps/queue.h), then by arrival. The
 * job whose turn it is, the head, is admitted when its places and its pages are free; until then it
 * stays the head, so a later job cannot take its turn. For SCHED_PASS_STEPS steps, other jobs that
 * fit are admitted before it; for as many steps again, only jobs that are expected to end before
 * the head can start; then none of them, until the head fits. Jobs for which places and pages are
 * left when the head has its own delay nothing, and pass at any time. So the head waits no longer
 * than these steps and the longest running job, and a small job does not wait for a large one that
 * is far from fitting, or that leaves room for it. After the first interval, each place that stays
 * empty while another client's job waits is charged to the head's client, one token per step: a
 * client that asks for every place pays for the time in which they drain. A job that would take
 * places that are kept for other clients (engine/steps/queue.h) is not the head and does not pass;
 * nor is one for which its client's quota of pages has no room beside what the client runs. For the
 * quota, the client's own conversations give way.
 *
 * Where there are several clients, a job whose client runs something starts only if a place and the
 * pages of a request stay free beside it (queue->guest). So a client that comes after any time away
 * need not wait for the longest answer of another. A head leaves that much once: what such clients
 * took while it waited counts, so that a stream of them does not keep it waiting. A job that fits
 * only without leaving anything leaves nothing.
 *
 * Only the head uses the store: a job that may find its conversation on disk does not pass. All is
 * counted in steps and tokens, never in time, so that a run can be repeated exactly. */
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "engine/steps/sched_int.h"

/* ---- Pages ---- */

/* Returns the pages, on every rank, of a turn that begins like this. The last token of an answer is
 * sampled and never appended. */
static int64_t turn_pages(const struct sched_options *options, const struct kv_params *kv,
                          const struct reserve_turn *began, const struct engine_request *request) {
    int32_t appended = request->max_tokens > 0 ? request->max_tokens - 1 : 0;
    int64_t prompt_new = request->prompt_count - began->tokens;
    struct reserve_turn turn = *began;
    turn.added = prompt_new + appended;
    int64_t peak = reserve_peak(kv, turn.held, prompt_new, appended);
    const int64_t all = turn.held + turn.added, late = sched_most_together(request);
    if (late > 1) peak = peak + late - 1 < all ? peak + late - 1 : all;
    return reserve_turn_pages(&options->shape, kv, &turn, peak);
}

static const struct reserve_turn from_nothing;

int sched_check(const struct sched_options *options, const struct engine_job *job,
                struct fault *fault) {
    if (options->whole_texts && (!job->request.pooling || job->request.pooling == ENGINE_POOL_NEXT))
        return fault_set(fault, ERR_UNSUPPORTED, "model",
                         "this model makes vectors of texts and does not write");
    int choices = seq_job_choices(&job->request);
    int64_t pages = turn_pages(options, job->params, &from_nothing, &job->request);
    int64_t quota = job->request.pages_max;
    if (job->request.pooling && (pages > options->pages_total || (quota > 0 && pages > quota)))
        return fault_set(fault, ERR_LIMIT, "prompt",
                         "a text of %d tokens needs %lld pages of cache until it is read, and "
                         "%s %lld",
                         job->request.prompt_count, (long long)pages,
                         pages > options->pages_total ? "the pool has" : "its API key may have",
                         (long long)(pages > options->pages_total ? options->pages_total : quota));
    if (quota > 0 && pages > quota / choices)
        return fault_set(fault, ERR_LIMIT, choices > 1 ? "n" : "kv.budget",
                         "this request may need %lld pages of cache for each of its choices and "
                         "its API key may have %lld in all",
                         (long long)pages, (long long)quota);
    if (pages <= options->pages_total / choices) return 0;
    if (pages <= options->pages_total)
        return fault_set(fault, ERR_LIMIT, "n",
                         "each of %d choices may need %lld pages of cache and the pool has %lld; "
                         "ask for fewer choices",
                         choices, (long long)pages, (long long)options->pages_total);
    return fault_set(fault, ERR_LIMIT, job->params->policy->bounded ? "kv.budget" : "max_tokens",
                     "this request may need %lld pages of cache and the pool has %lld; lower "
                     "kv.budget or max_tokens, or use a bounded kv.policy",
                     (long long)pages, (long long)options->pages_total);
}

/* ---- Admission ---- */

/* WAIT: the reason is in job->wait. REFUSED: it is in job->fault. */
enum admission { ADMITTED, WAIT, REFUSED };

static enum admission wait_with(struct engine_job *job, enum engine_wait wait) {
    job->wait = wait;
    return WAIT;
}

static enum admission refuse_job(struct engine_job *job, int rc, const char *text) {
    fault_set(&job->fault, rc, NULL, "%s", text);
    return REFUSED;
}

/* Opens a sequence for every choice, or none. */
static int open_sequences(struct sched *sched, const struct sched_entry *entry,
                          struct sequence **opened) {
    for (int i = 0; i < entry->job->choice_count; i++) {
        opened[i] = sched->sequences;
        while (opened[i]->job) opened[i]++;
        int rc = seq_open(opened[i], entry->job, i, entry->job->params, &sched->options.text);
        if (rc == 0) sched_open_draft(sched, opened[i]);
        if (rc == 0) continue;
        while (i > 0) seq_close(opened[--i]);
        return rc;
    }
    return 0;
}

static void count_start(struct sched *sched, const struct sched_entry *entry) {
    struct engine_counters *counters = &sched->counters;
    const struct engine_job *job = entry->job;
    const struct conversation_match *match = &entry->match;
    if (!entry->wants_conversation) return;
    counters->cached_tokens += (uint64_t)job->cached_tokens;
    if (!match->conv)
        counters->conversation_misses++;
    else
        counters->conversation_hits++;
    if (match->conv && match->cut) counters->conversation_cuts++;
    if (!match->conv || match->miss != ENGINE_MISS_NEW) counters->conversation_lost[match->miss]++;
    if (match->miss != ENGINE_MISS_NEW)
        log_debug("conversation missed: reason=%s prompt_tokens=%d cached_tokens=%d",
                  engine_miss_name(match->miss), job->request.prompt_count, job->cached_tokens);
}

static void note_start(struct sched *sched, const struct sched_entry *entry,
                       struct sequence **opened) {
    struct engine_job *job = entry->job;
    for (int i = 0; i < job->choice_count; i++) {
        struct sequence *seq = opened[i];
        if (i > 0) seq->leader = opened[0];
        seq->pages_reserved = entry->pages;
        sched->keeper.pages_reserved += entry->pages;
        sched->order[sched->running++] = (int)(seq - sched->sequences);
    }
    queue_client_of(&sched->queue, job)->running += job->choice_count;
    queue_client_of(&sched->queue, job)->pages += entry->pages * job->choice_count;
    queue_note_prompt(&sched->queue, job, job->request.prompt_count - job->cached_tokens);
    CHECK(sched->running <= sched->options.sequences_max);
    CHECK(sched->keeper.pages_reserved + sched->keeper.table.pages <= sched->options.pages_total);
    count_start(sched, entry);
    CHECK(job->stage == SCHED_QUEUED);
    job->stage = SCHED_RUNNING;
    job->admitted_ns = clock_ns();
    atomic_store_explicit(&job->admitted, 1, memory_order_release);
}

/* Gives up the conversation that was found, because it cannot be continued. */
static void start_afresh(struct sched_entry *entry) {
    entry->match =
        (struct conversation_match){.from = entry->match.from, .miss = ENGINE_MISS_TOO_LARGE};
}

/* Computes the pages of each choice: from the conversation that was found or from nothing. A cut
 * needs the pages of the turn that it continues. */
static void plan_pages(const struct sched *sched, struct sched_entry *entry) {
    const struct engine_request *request = &entry->job->request;
    int64_t quota = queue_pages_left(&sched->queue, entry->job);
    int64_t all = sched->options.pages_total;
    int64_t most = (quota < all ? quota : all) / entry->job->choice_count;
    const struct conversation_match *match = &entry->match;
    const struct conversation *conv = match->conv;
    entry->began = from_nothing;
    if (conv && match->exact)
        entry->began = conv->began;
    else if (conv)
        entry->began = (struct reserve_turn){
            .held = due_held_at(&conv->kv, conv->held, match->common, conv->evicted_at),
            .fullest = conv->fullest < match->common ? conv->fullest : match->common,
            .drops = match->common < conv->token_count,
            .tokens = match->common};
    entry->pages = turn_pages(&sched->options, entry->job->params, &entry->began, request);
    if (!conv || entry->pages <= most) return;
    start_afresh(entry);
    entry->began = from_nothing;
    entry->pages = turn_pages(&sched->options, entry->job->params, &entry->began, request);
}

/* Frees the pages of all choices. Reads the whole prompt rather than consume another dialogue's
 * conversation. */
static enum engine_wait reclaim_for(struct sched *sched, struct sched_entry *entry,
                                    bool *consumed) {
    struct engine_job *job = entry->job;
    struct keeper_claim claim = sched_claim(sched, job);
    const struct conversation *conv = entry->match.conv;
    enum engine_wait wait =
        keeper_reclaim(&sched->keeper, &claim, entry->pages * job->choice_count, conv, consumed);
    if (!wait && *consumed && conv->id != entry->match.from && !conv->checkpoint) {
        start_afresh(entry);
        plan_pages(sched, entry);
        wait = keeper_reclaim(&sched->keeper, &claim, entry->pages * job->choice_count, NULL,
                              consumed);
    }
    if (claim.saves != 0) job->saves = claim.saves;
    return wait;
}

/* Takes the memory that the rule needs beside a choice's pages, for every choice, so that no step
 * or fork can fail for lack of it. */
static int prepare_slots(struct sched *sched, struct sequence **opened, int count, int64_t pages) {
    struct kern *kern = sched->options.kern;
    int rc = 0;
    for (int i = 1; i < count; i++) opened[i]->slot = keeper_alloc_slot(&sched->keeper);
    for (int i = 0; kern->ops->prepare && i < count && rc == 0; i++)
        rc = kern->ops->prepare(kern, opened[i]->slot, &opened[i]->kv.rule, pages);
    return rc;
}

static enum admission admit_job(struct sched *sched, const struct sched_entry *entry,
                                bool consumed) {
    struct sequence *opened[ENGINE_CHOICES_MAX];
    struct engine_job *job = entry->job;
    int rc = open_sequences(sched, entry, opened);
    if (rc != 0) return refuse_job(job, rc, "no memory for the request");
    const struct conversation *from = conversation_by_id(&sched->keeper.table, entry->match.from);
    if (from) { /* the turn that is continued, also one that has to be read again */
        opened[0]->origin = from->id;
        opened[0]->origin_file = from->turns == 0 ? conversation_file(from) : 0;
    }
    if (!entry->match.conv)
        opened[0]->slot = keeper_alloc_slot(&sched->keeper);
    else
        rc = sched_continue(sched, opened[0], entry, consumed);
    if (rc == 0) rc = prepare_slots(sched, opened, job->choice_count, entry->pages);
    if (rc == 0) {
        sched_plan_borders(sched, opened[0], entry);
        note_start(sched, entry, opened);
        return ADMITTED;
    }
    for (int i = 0; i < job->choice_count; i++) {
        if (opened[i]->slot >= 0) keeper_release_slot(&sched->keeper, opened[i]->slot);
        seq_close(opened[i]);
    }
    if (rc == ERR_UNSUPPORTED) {
        sched_refuse_policy(job->params, &job->fault);
        return REFUSED;
    }
    return refuse_job(job, rc,
                      rc == ERR_NOMEM ? "no memory for the request"
                                      : "the conversation's cache could not be continued");
}

/* A quota may have been lowered since the request was checked. */
static bool outgrows_quota(const struct sched *sched, const struct engine_job *job) {
    int64_t most = queue_client_of(&sched->queue, job)->pages_max;
    return most > 0 && job->pages * job->choice_count > most;
}

/* Until its client's running requests leave room in the quota, or a conversation of its client is
 * written that makes room there, a job waits aside: it is not the head, so it delays no other
 * client. */
static bool suits_quota(const struct sched *sched, const struct engine_job *job) {
    if (sched->keeper.options.store && job->saves == sched->keeper.saves &&
        keeper_saving(&sched->keeper))
        return false;
    return job->pages * job->choice_count <= queue_pages_left(&sched->queue, job) ||
           outgrows_quota(sched, job);
}

static int64_t larger_count(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* Returns the capacity that a job with these pages leaves to clients that run nothing. Their pages
 * are at least an even part of the pool for each place, and at most a quarter of it. */
static struct queue_capacity guest_part(const struct sched *sched, const struct engine_job *job,
                                        int64_t pages) {
    const struct sched_options *options = &sched->options;
    struct queue_capacity left = sched->queue.guest;
    if (left.places == 0 || queue_client_of(&sched->queue, job)->running == 0)
        return (struct queue_capacity){0};
    if (left.pages > options->pages_total / 4) left.pages = options->pages_total / 4;
    left.pages = larger_count(left.pages, options->pages_total / options->sequences_max);
    if (job == sched->head) {
        left.places = (int)larger_count(0, left.places - sched->admission.passed.places);
        left.pages = larger_count(0, left.pages - sched->admission.passed.pages);
    }
    if (job->choice_count + left.places > options->sequences_max) left.places = 0;
    if (pages * job->choice_count + left.pages > options->pages_total) left.pages = 0;
    return left;
}

static enum admission admit(struct sched *sched, struct engine_job *job) {
    const struct sched_options *options = &sched->options;
    struct sched_entry entry = {.job = job, .passing = job != sched->head};
    int choices = job->choice_count;
    bool consumed = false;
    /* engine_check refused such requests before; a caller that skips it fails alone. */
    if (choices > options->sequences_max || choices > ENGINE_CHOICES_MAX)
        return refuse_job(job, ERR_LIMIT, "more choices than can run at once");
    if (sched->running + choices + guest_part(sched, job, 0).places > options->sequences_max)
        return wait_with(job, ENGINE_WAIT_PLACES);
    /* Conversations that are still to be written hold the slots. */
    if (sched->keeper.free_slot_count < choices) return wait_with(job, ENGINE_WAIT_STORE);
    enum engine_wait wait = sched_find(sched, &entry);
    if (wait) return wait_with(job, wait);
    if (sched_awaits_prefix(sched, &entry)) return wait_with(job, ENGINE_WAIT_PREFIX);
    plan_pages(sched, &entry);
    if (entry.pages > options->pages_total / choices)
        return refuse_job(job, ERR_LIMIT, "the request can never fit the cache's pool");
    if (outgrows_quota(sched, job))
        return refuse_job(job, ERR_LIMIT, "the request can never fit the quota of its API key");
    int64_t wanted = entry.pages * choices + guest_part(sched, job, entry.pages).pages;
    if (sched->keeper.pages_reserved + wanted > options->pages_total)
        return wait_with(job, ENGINE_WAIT_PAGES);
    wait = reclaim_for(sched, &entry, &consumed);
    if (wait) return wait_with(job, wait);
    return admit_job(sched, &entry, consumed);
}

/* ---- Waiting ---- */

void sched_submit(struct sched *sched, struct engine_job *job) {
    CHECK(job->stage == SCHED_SUBMITTER && job->choice_count > 0);
    CHECK(job->choices_left == job->choice_count && job->params);
    job->stage = SCHED_QUEUED;
    job->round = job->saves = 0;
    job->wait = ENGINE_WAIT_NOTHING;
    job->pages = turn_pages(&sched->options, job->params, &from_nothing, &job->request);
    queue_join(&sched->queue, job);
    sched->admission.others_tried = 0;
}

/* Resets the admission state, because another job will be the head. */
static void clear_head(struct sched *sched) {
    sched->head = NULL;
    keeper_note_change(&sched->keeper);
    keeper_end_search(&sched->keeper);
}

void sched_stop_waiting(struct sched *sched, struct engine_job *job) {
    CHECK(job->stage == SCHED_QUEUED || job->stage == SCHED_RUNNING);
    queue_remove(&sched->queue, job);
    if (job == sched->head) clear_head(sched);
    if (job == sched->admission.past_head) sched->admission.past_head = NULL;
    if (sched->options.queue_places) atomic_fetch_sub(sched->options.queue_places, 1);
}

void sched_drop_cancelled(struct sched *sched) {
    struct engine_job *job;
    while ((job = queue_cancelled(&sched->queue)) != NULL) {
        sched_stop_waiting(sched, job);
        sched_finish_job(sched, job, ENGINE_FINISH_ABORT);
    }
}

static int places_free(const struct sched *sched) {
    return sched->options.sequences_max - sched->running;
}

static bool may_be_head(const void *arg, const struct engine_job *job) {
    const struct sched *sched = arg;
    return queue_may_start(&sched->queue, job, places_free(sched), true) && suits_quota(sched, job);
}

/* A head beyond its client's share of places is deferred when others have come. Its time as the
 * head counts when it is the next one again: it does not let others pass twice. */
static void choose_head(struct sched *sched) {
    struct sched_admission *admission = &sched->admission;
    if (sched->head && may_be_head(sched, sched->head)) return;
    if (sched->head) {
        admission->past_head = sched->head;
        admission->past_head_step = admission->head_step;
        clear_head(sched);
    }
    sched->head = queue_next(&sched->queue, may_be_head, sched);
    if (sched->head) { /* the head may use the store: search again */
        sched->head->prefix.border = 0;
        sched->head->round = 0;
        sched->head->wait = ENGINE_WAIT_NOTHING;
    }
    bool again = sched->head && sched->head == admission->past_head;
    if (!again) admission->passed = (struct queue_capacity){0};
    admission->head_step = again ? admission->past_head_step : sched->counters.steps;
}

/* Returns false if the job waits. */
static bool try_to_admit(struct sched *sched, struct engine_job *job) {
    enum admission result = admit(sched, job);
    if (result == WAIT) return false;
    sched_stop_waiting(sched, job);
    if (result == REFUSED) sched_finish_job(sched, job, ENGINE_FINISH_ERROR);
    return true;
}

_Static_assert(KEEPER_LIST_STEPS == SCHED_PASS_STEPS,
               "a head waits for a listing while it is passed");

static bool passing_allowed(const struct sched *sched) {
    return sched->counters.steps - sched->admission.head_step < SCHED_PASS_STEPS;
}

/* Returns for how many more steps a sequence runs if nothing stops it; the rest of its prompt
 * counts as one. */
static int32_t steps_left(const struct sequence *seq) {
    return seq->job->request.max_tokens - seq_output_count(seq) + seq_prefilling(seq);
}

/* Returns in how many steps a waiting job would end, if its prompt gets all rows but the answers'.
 */
static int32_t steps_needed(const struct sched *sched, const struct engine_job *job) {
    int32_t rows = sched->options.rows_max - sched->options.sequences_max;
    return job->request.max_tokens + (job->request.prompt_count + rows - 1) / rows;
}

/* Capacity that other jobs may use without delaying the head. */
struct spare {
    int32_t steps; /* jobs that end within this number of steps may use everything */
    int places;    /* places that other jobs may use */
    int64_t pages; /* pages that other jobs may use */
};

/* Returns in how many steps the head fits if the running sequences generate all they may, and what
 * it leaves then: they leave, the shortest first, until there is room. Jobs that end before then do
 * not delay the head, and neither do jobs that fit beside it (backfilling, as in batch systems). */
static struct spare spare_of_head(const struct sched *sched) {
    const struct engine_job *head = sched->head;
    int64_t head_pages = head->pages * head->choice_count;
    struct queue_capacity left_free = guest_part(sched, head, head->pages);
    int left = 0;
    struct spare spare = {.places = sched->options.sequences_max - sched->running,
                          .pages = sched->options.pages_total - sched->keeper.pages_reserved};
    for (int i = 0; i < sched->running; i++)
        sched_sort_in(sched, i, &sched->sequences[sched->order[i]],
                      steps_left(&sched->sequences[sched->order[i]]));
    for (; left < sched->running; left++) {
        int32_t steps = steps_left(sched->sorted[left]);
        bool fits = spare.places >= head->choice_count + left_free.places &&
                    spare.pages >= head_pages + left_free.pages;
        if (fits && steps > spare.steps) break;
        spare.steps = steps;
        spare.places++;
        spare.pages += sched->sorted[left]->pages_reserved;
    }
    spare.places -= head->choice_count;
    spare.pages -= head_pages;
    return spare;
}

/* Returns whether the job waits for a prefix, and notes when that is over at the latest. */
static bool awaits(struct sched *sched, const struct engine_job *job) {
    if (!sched_still_awaits(sched, job)) return false;
    if (sched_wait_end(job) < sched->admission.wait_ends)
        sched->admission.wait_ends = sched_wait_end(job);
    return true;
}

/* Bounds of a job that passes the head: what is free, and what is spare beside the head. */
struct passing {
    struct sched *sched;
    int places;
    int64_t pages;
    struct spare spare; /* the job ends within spare.steps, or fits the rest */
};

static bool ends_or_fits(const struct passing *passing, const struct engine_job *job) {
    return steps_needed(passing->sched, job) <= passing->spare.steps ||
           (job->choice_count <= passing->spare.places &&
            job->pages * job->choice_count <= passing->spare.pages);
}

static bool may_pass(const void *arg, const struct engine_job *job) {
    const struct passing *passing = arg;
    struct queue_capacity left = guest_part(passing->sched, job, job->pages);
    return job != passing->sched->head && !awaits(passing->sched, job) &&
           job->round != passing->sched->keeper.changes &&
           job->choice_count + left.places <= passing->places &&
           job->pages * job->choice_count + left.pages <= passing->pages &&
           ends_or_fits(passing, job) &&
           queue_may_start(&passing->sched->queue, job, passing->places, false) &&
           suits_quota(passing->sched, job);
}

/* A job may take any number of steps to pass the head at first, then as many as the head waits
 * anyway, and finally none, because that wait is an estimate. */
static struct spare spare_to_pass(const struct sched *sched) {
    uint64_t waited = sched->counters.steps - sched->admission.head_step;
    if (passing_allowed(sched)) return (struct spare){.steps = INT32_MAX};
    struct spare spare = spare_of_head(sched);
    if (spare.steps > SCHED_PASS_STEPS) spare.steps = SCHED_PASS_STEPS;
    if (waited >= 2ull * SCHED_PASS_STEPS) spare.steps = 0;
    return spare;
}

/* Returns whether every job that may pass the head was tried, and nothing has changed since. */
static bool others_wait(const struct sched *sched) {
    return sched->admission.others_tried == sched->keeper.changes;
}

/* Admits every job that fits, in the order of the queue; once, until something changes. */
static void admit_others(struct sched *sched) {
    while (!others_wait(sched)) {
        const struct passing passing = {.sched = sched,
                                        .places = places_free(sched),
                                        .pages = sched->options.pages_total -
                                                 sched->keeper.pages_reserved,
                                        .spare = spare_to_pass(sched)};
        struct engine_job *job =
            passing.places > 0 ? queue_next(&sched->queue, may_pass, &passing) : NULL;
        if (!job) {
            sched->admission.others_tried = sched->keeper.changes;
            return;
        }
        job->round = sched->keeper.changes;
        bool runs_nothing = queue_client_of(&sched->queue, job)->running == 0;
        struct queue_capacity passed = {job->choice_count, job->pages * job->choice_count};
        if (try_to_admit(sched, job) && runs_nothing) {
            sched->admission.passed.places += passed.places;
            sched->admission.passed.pages += passed.pages;
        }
        (void)queue_plan_places(&sched->queue, sched->counters.steps);
    }
}

static void charge_empty_places(struct sched *sched) {
    int empty = places_free(sched);
    if (sched->head) empty -= guest_part(sched, sched->head, sched->head->pages).places;
    int others = sched->head ? queue_others(&sched->queue, sched->head) : 0;
    if (empty <= 0 || others == 0 || sched->running == 0 || passing_allowed(sched)) return;
    queue_charge(&sched->queue, sched->head, empty < others ? empty : others);
}

void sched_admit_waiting(struct sched *sched) {
    if (queue_plan_places(&sched->queue, sched->counters.steps)) keeper_note_change(&sched->keeper);
    if (sched->counters.steps + 1 >= sched->admission.wait_ends) {
        sched->admission.wait_ends = UINT64_MAX;
        keeper_note_change(&sched->keeper); /* some job waits for a prefix no longer */
    }
    for (choose_head(sched); sched->head && !sched_head_waits(sched); choose_head(sched)) {
        if (!awaits(sched, sched->head)) {
            bool is_admitted = try_to_admit(sched, sched->head);
            (void)queue_plan_places(&sched->queue, sched->counters.steps);
            if (is_admitted || !suits_quota(sched, sched->head)) continue;
            keeper_note_change(&sched->keeper); /* the head is only tried after a change */
        }
        sched->head->round = sched->keeper.changes;
        sched->admission.head_changes = sched->keeper.head_changes;
    }
    if (!sched->head) { /* everybody waits aside */
        sched->admission.others_tried = sched->keeper.changes;
        return;
    }
    admit_others(sched);
    charge_empty_places(sched);
}

bool sched_stalled(const struct sched *sched) {
    if (sched->running > 0 && !sched->all_wait) return false;
    if (sched->queue.waiting == 0 && !sched->head) return sched->running > 0;
    return others_wait(sched) && (!sched->head || sched_head_waits(sched));
}
