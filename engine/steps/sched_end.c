/* The ends of jobs and sequences: what becomes of an ended sequence's streams and of its places and
 * pages, and in which order ends are published. */
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/mem.h"
#include "engine/steps/publish.h"
#include "engine/steps/sched_int.h"

static void note_choice_end(struct sched *sched, struct engine_job *job,
                            struct engine_choice *choice, enum engine_finish finish) {
    choice->ending = finish;
    choice->next = NULL;
    if (sched->ended.last)
        sched->ended.last->next = choice;
    else
        sched->ended.first = choice;
    sched->ended.last = choice;
    CHECK(job->choices_left > 0 && (job->stage == SCHED_QUEUED || job->stage == SCHED_RUNNING));
    if (--job->choices_left > 0) return;
    job->stage = SCHED_ENDED;
    queue_end(&sched->queue, job);
    job->finished_ns = clock_ns();
    job->next = NULL;
    if (sched->ended.last_job)
        sched->ended.last_job->next = job;
    else
        sched->ended.first_job = job;
    sched->ended.last_job = job;
}

void sched_finish_job(struct sched *sched, struct engine_job *job, enum engine_finish finish) {
    CHECK(job->stage == SCHED_QUEUED);
    for (int i = 0; i < job->choice_count; i++)
        note_choice_end(sched, job, &job->choice[i], finish);
}

/* Ends of choices come before ends of jobs: see engine/steps/publish.h. */
void sched_publish_finished(struct sched *sched) {
    struct engine_choice *choice = sched->ended.first, *next_choice;
    struct engine_job *job = sched->ended.first_job, *next;
    sched->ended = (struct sched_ended){0};
    for (; choice; choice = next_choice) {
        next_choice = choice->next;
        publish_choice_end(choice);
    }
    for (; job; job = next) {
        next = job->next;
        CHECK(job->stage == SCHED_ENDED);
        job->stage = SCHED_SUBMITTER;
        if (sched->options.pending_jobs) atomic_fetch_sub(sched->options.pending_jobs, 1);
        if (sched->options.pending_tokens)
            atomic_fetch_sub(sched->options.pending_tokens, sched_job_tokens(job));
        publish_job_end(job);
    }
}

static void remove_sequence(struct sched *sched, struct sequence *seq) {
    int index = (int)(seq - sched->sequences), at = 0;
    while (sched->order[at] != index) at++;
    sched->running--;
    memmove(&sched->order[at], &sched->order[at + 1],
            (size_t)(sched->running - at) * sizeof *sched->order);
    sched->keeper.pages_reserved -= seq->pages_reserved;
    struct queue_client *client = queue_client_of(&sched->queue, seq->job);
    client->running--;
    client->pages -= seq->pages_reserved;
    CHECK(sched->keeper.pages_reserved >= 0 && client->running >= 0 && client->pages >= 0);
    keeper_note_change(&sched->keeper); /* pages and a place are free */
    sched_leave_drafter(sched, seq);
    seq_close(seq);
}

static void fill_details(struct sched *sched, struct sequence *seq,
                         const struct kern_report *report) {
    struct engine_kv_details *kv = &seq->job->kv;
    snprintf(kv->policy, sizeof kv->policy, "%s", seq->kv.policy->name);
    kv->budget = seq->kv.policy->bounded ? seq->kv.budget : -1;
    kv->seen_tokens = seq->due.tokens;
    kv->kept_entries = (int64_t)report->entries;
    /* Entries that a failed step appended were never counted, so they do not count as evicted. */
    int64_t appended = keeper_streams(&sched->keeper) * seq->due.tokens;
    kv->evicted_entries = appended > kv->kept_entries ? appended - kv->kept_entries : 0;
    kv->dropped_tokens = seq->dropped;
    kv->shifts = keeper_shifts(&sched->keeper, seq->due.tokens);
    kv->bytes = report->pages * sched->options.page_bytes;
    kv->state_bytes = (int64_t)report->state_bytes;
}

/* Reads what the sequence holds, with as much detail as the request asked for. */
static int report_sequence(struct sched *sched, struct sequence *seq, struct kern_report *report) {
    struct engine_job *job = seq->job;
    struct kern *kern = sched->options.kern;
    enum engine_report wanted = job->request.kv.report;
    *report = (struct kern_report){0};
    if (wanted >= ENGINE_REPORT_LENGTHS)
        job->kv.lengths =
            mem_try_alloc((size_t)keeper_streams(&sched->keeper), sizeof *job->kv.lengths);
    report->lengths = job->kv.lengths;
    int rc = kern->ops->report(kern, seq->slot, report);
    if (rc != 0 || wanted < ENGINE_REPORT_POSITIONS || !job->kv.lengths) return rc;
    job->kv.positions = mem_try_alloc(report->entries, sizeof *job->kv.positions);
    if (!job->kv.positions) return 0; /* the answer goes out without the long report */
    report->positions = job->kv.positions;
    report->entries_max = report->entries;
    rc = kern->ops->report(kern, seq->slot, report);
    if (rc != ERR_NOMEM) return rc;
    mem_free(job->kv.positions); /* likewise, where the backend has no room for it */
    job->kv.positions = report->positions = NULL;
    return 0;
}

static bool answered(const struct sequence *seq) {
    return seq->finish == ENGINE_FINISH_STOP || seq->finish == ENGINE_FINISH_LENGTH ||
           seq->finish == ENGINE_FINISH_REPETITION;
}

/* Reports what choice 0 holds; its streams may become a conversation. */
static bool retain_streams(struct sched *sched, struct sequence *seq) {
    struct engine_job *job = seq->job;
    struct kern_report report = {0};
    int rc = report_sequence(sched, seq, &report);
    CHECK(rc != 0 || report.rank_pages <= seq->pages_reserved); /* reservations are exact */
    if (rc != 0 && answered(seq)) {
        fault_set(&job->fault, rc, NULL, "the backend could not report the cache");
        seq->finish = ENGINE_FINISH_ERROR;
    }
    fill_details(sched, seq, &report);
    const struct engine_request *request = &job->request;
    if (sched->keeper.table.capacity == 0 || !request->kv.retain || request->prompt_logprobs ||
        !answered(seq))
        return false;
    sched_retain(sched, seq, &report);
    return true;
}

/* Takes a sequence out of the running set. Aborted and failed requests are not kept, but prefixes
 * of their prompts that were added are: other prompts begin like them. */
static void end_sequence(struct sched *sched, struct sequence *seq) {
    struct engine_job *job = seq->job;
    struct engine_choice *choice = seq->choice;
    if (seq->index > 0 || !retain_streams(sched, seq)) {
        keeper_drop_checkpoint(&sched->keeper, seq->left);
        keeper_release_slot(&sched->keeper, seq->slot);
    }
    enum engine_finish finish = seq->finish;
    remove_sequence(sched, seq);
    /* The list of tokens takes memory, too. This may fail: keeper_save tries again. */
    (void)keeper_reclaim_places(&sched->keeper, 0);
    note_choice_end(sched, job, choice, finish);
}

void sched_end_finished(struct sched *sched) {
    for (int i = 0; i < sched->running;) {
        struct sequence *seq = &sched->sequences[sched->order[i]];
        if (seq->finish == ENGINE_RUNNING &&
            atomic_load_explicit(&seq->job->cancel, memory_order_relaxed) != 0)
            seq->finish = ENGINE_FINISH_ABORT;
        if (seq->finish != ENGINE_RUNNING)
            end_sequence(sched, seq); /* now the index is that of the next sequence */
        else
            i++;
    }
}

void sched_end_failed(struct sched *sched, const struct engine_job *job) {
    for (int i = 0; i < sched->running; i++) {
        struct sequence *seq = &sched->sequences[sched->order[i]];
        if (seq->job == job) seq->finish = ENGINE_FINISH_ERROR;
    }
}

void sched_fail_job(struct sched *sched, struct engine_job *job, int rc, const char *what) {
    fault_set(&job->fault, rc, NULL, "the engine failed: %s", what);
    sched_end_failed(sched, job);
}
