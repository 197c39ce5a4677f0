/* The steps of the scheduler: which sequences evict, which rows a batch has, how samples become
 * tokens, and how sequences and jobs end. Admission is sched_admit.c, conversations are
 * sched_keep.c, sched_checkpoint.c and engine/kept/keeper.h.
 *
 * A step costs time in proportion to the running sequences, never to the waiting jobs. Scratch
 * arrays are taken at sched_open, so a step allocates nothing of its own. Every order in a step is
 * a function of the jobs and of earlier steps, never of time. Measured times decide how many prompt
 * rows and how many drafted rows a step has, and whose turn it is; without options.step_stretch
 * nothing depends on time, and a run can be repeated exactly. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "engine/steps/publish.h"
#include "engine/steps/sched_int.h"
#include "kernels/alternatives.h"

static const double eviction_bounds[] = {1e-5,   2.5e-5, 5e-5, 1e-4,   2.5e-4, 5e-4, 1e-3,
                                         2.5e-3, 5e-3,   1e-2, 2.5e-2, 5e-2,   0.1,  0.25};
static const double mask_bounds[] = {1e-6, 1e-5,   2.5e-5, 5e-5, 1e-4,   2.5e-4, 5e-4,
                                     1e-3, 2.5e-3, 5e-3,   1e-2, 2.5e-2, 5e-2};
static const double iteration_bounds[] = {1,   8,    16,   32,   64,   128,  256,
                                          512, 1024, 2048, 4096, 8192, 16384};
#define COUNT_OF(a) ((int)(sizeof(a) / sizeof((a)[0])))

/* ---- Life ---- */

void sched_open(struct sched *sched, const struct sched_options *options) {
    CHECK(options->rows_max > options->sequences_max); /* prompts always find room beside decode */
    CHECK(options->logits_max >= options->sequences_max + 1);
    *sched = (struct sched){.options = *options,
                            .admission = {.wait_ends = UINT64_MAX},
                            .turns = {.number = PACE_TURNS}};
    size_t sequences = (size_t)options->sequences_max, logits = (size_t)options->logits_max;
    sched->sequences = mem_must_alloc(sequences, sizeof *sched->sequences);
    sched->order = mem_must_alloc(sequences, sizeof *sched->order);
    sched->spans = mem_must_alloc(sequences, sizeof *sched->spans);
    sched->span_sequences = mem_must_alloc(sequences, sizeof *sched->span_sequences);
    sched->sorted = mem_must_alloc(sequences, sizeof *sched->sorted);
    sched->rows = mem_must_alloc((size_t)options->rows_max, sizeof *sched->rows);
    sched->want = mem_must_alloc(logits, sizeof *sched->want);
    sched->wants = mem_must_alloc(logits, sizeof *sched->wants);
    sched->samples = mem_must_alloc(logits, sizeof *sched->samples);
    sched->sampled = mem_must_alloc(logits, sizeof *sched->sampled);
    if (options->width > 0)
        sched->pool_rows =
            mem_must_alloc((size_t)options->width * SCHED_POOL_ROWS, sizeof *sched->pool_rows);
    if (options->end_vector)
        sched->pool_vector =
            mem_must_alloc((size_t)options->vector_width, sizeof *sched->pool_vector);
    if (options->top_max > KERN_TOP_MAX) {
        sched->wide_row = mem_must_alloc((size_t)options->vocab, sizeof *sched->wide_row);
        sched->wide_scratch = mem_must_alloc(kern_alternatives_scratch(options->vocab), 1);
    }
    drafter_open(&sched->drafter, &options->drafter, options->vocab);
    pictures_open(&sched->pictures, &options->pictures);
    if (options->pictures.encoder)
        sched->given = mem_must_alloc((size_t)options->rows_max, sizeof *sched->given);
    if (options->pictures.encoder && options->kv.axes)
        sched->places = mem_must_alloc((size_t)options->rows_max, sizeof *sched->places);
    queue_open(&sched->queue, options->clients_max, options->sequences_max);
    keeper_open(
        &sched->keeper,
        &(struct keeper_options){.kern = options->kern,
                                 .store = options->store,
                                 .save_idle_ns = options->save_idle_ns,
                                 .copy_bytes = options->copy_bytes,
                                 .shape = options->shape,
                                 .pages_total = options->pages_total,
                                 .page_bytes = options->page_bytes,
                                 .slots = options->sequences_max + options->conversations_max,
                                 .conversations_max = options->conversations_max,
                                 .positions = options->kv.positions,
                                 .whole = options->kv.defaults.whole},
        &sched->counters);
    hist_open(&sched->counters.eviction_seconds, eviction_bounds, COUNT_OF(eviction_bounds));
    hist_open(&sched->counters.mask_seconds, mask_bounds, COUNT_OF(mask_bounds));
    hist_open(&sched->counters.iteration_tokens, iteration_bounds, COUNT_OF(iteration_bounds));
}

void sched_close(struct sched *sched) {
    sched_abandon(sched, ENGINE_FINISH_ABORT, 0);
    sched_publish_finished(sched);
    drafter_close(&sched->drafter);
    pictures_close(&sched->pictures);
    keeper_close(&sched->keeper);
    queue_close(&sched->queue);
    mem_free(sched->sequences);
    mem_free(sched->order);
    mem_free(sched->spans);
    mem_free(sched->span_sequences);
    mem_free(sched->sorted);
    mem_free(sched->rows);
    mem_free(sched->given);
    mem_free(sched->places);
    mem_free(sched->want);
    mem_free(sched->wants);
    mem_free(sched->samples);
    mem_free(sched->sampled);
    mem_free(sched->pool_rows);
    mem_free(sched->pool_vector);
    mem_free(sched->wide_row);
    mem_free(sched->wide_scratch);
}

bool sched_idle(const struct sched *sched) {
    return sched->running == 0 && sched->queue.waiting == 0;
}

uint64_t sched_progress(const struct sched *sched) {
    const struct sched_options *options = &sched->options;
    uint64_t pieces = sched->counters.copied;
    if (options->store) pieces += store_progress(options->store);
    const enum engine_wait wait = sched->head ? sched->head->wait : ENGINE_WAIT_NOTHING;
    bool needs_store = wait == ENGINE_WAIT_STORE || wait == ENGINE_WAIT_LIST;
    return needs_store ? pieces : pieces + sched->counters.steps;
}

/* ---- The end of everything ---- */

static void abandon_running(struct sched *sched, enum engine_finish finish, int rc) {
    for (int i = 0; i < sched->running; i++) {
        struct sequence *seq = &sched->sequences[sched->order[i]];
        if (finish == ENGINE_FINISH_ERROR)
            fault_set(&seq->job->fault, rc, NULL, "the engine failed: %s", err_text(rc));
        seq->finish = finish;
    }
    sched_end_finished(sched);
}

void sched_abandon(struct sched *sched, enum engine_finish finish, int rc) {
    abandon_running(sched, finish, rc);
    struct engine_job *job;
    while ((job = queue_next(&sched->queue, NULL, NULL)) != NULL) {
        sched_stop_waiting(sched, job);
        if (finish == ENGINE_FINISH_ERROR)
            fault_set(&job->fault, rc, NULL, "the engine failed: %s", err_text(rc));
        sched_finish_job(sched, job, finish);
    }
}

/* ---- A step ---- */

static void count_appended(struct sched *sched, const struct sched_step *step) {
    for (int i = 0; i < step->batch.span_count; i++) {
        struct sequence *seq = sched->span_sequences[i];
        int32_t count = sched->spans[i].count;
        bool prefilling = seq_prefilling(seq);
        if (i < step->streams) count = 1; /* drafted tokens are counted once they are drawn */
        if (prefilling) {
            sched->counters.computed_tokens += (uint64_t)count;
            queue_charge(&sched->queue, seq->job, count);
        }
        due_append(&seq->due, count);
        if (prefilling)
            atomic_store_explicit(&seq->job->prompt_read, (uint_fast32_t)seq->due.tokens,
                                  memory_order_relaxed);
    }
}

static void fail_constraint(struct sched *sched, struct engine_job *job, int rc) {
    fault_set(&job->fault, rc, job->request.constraint_field, "%s",
              rc == ERR_LIMIT
                  ? "too complex: the next token of the answer would cost more work than "
                    "one answer may; use fewer alternatives, counts and lengths"
              : rc == ERR_NOMEM ? "no memory for the answer's constraint"
                                : "the model has no token with which the answer could go on");
    sched_end_failed(sched, job);
}

/* Finds out how a constrained answer may continue, if the step can afford it. */
static void settle_mask(struct sched *sched, struct sequence *seq) {
    int64_t start = clock_ns();
    int rc = seq_settle(seq, &sched->mask_work, sched->options.mask_wake);
    sched->mask_ns += clock_ns() - start;
    if (rc == ERR_BUSY && !seq->deferred) sched->counters.masks_deferred++;
    seq->deferred = rc == ERR_BUSY;
    if (rc != 0 && rc != ERR_BUSY) fail_constraint(sched, seq->job, rc);
}

/* Returns whether the sequence's drafted tokens were drawn up to this round and its answer is not
 * at its end. */
static bool is_in_round(const struct sequence *seq, int round) {
    return seq->finish == ENGINE_RUNNING &&
           (round == 0 || (seq->confirmed == round && !seq_waits(seq)));
}

/* Returns whether a row of the round is to be sampled. The others, which lie between, are sampled
 * as cheaply as can be. */
static bool prepare_samples(struct sched *sched, const struct sched_step *step, int round) {
    bool any = false;
    for (int i = step->rounds[round]; i < step->rounds[round + 1]; i++) {
        const struct sched_want *want = &sched->wants[i];
        if (!is_in_round(want->seq, round)) {
            sched->samples[i] = (struct kern_sample){.repetition = 1, .top_count = -1, .forced = 0};
            continue;
        }
        any = true;
        if (round > 0) due_append(&want->seq->due, 1);
        if (sched_judged(want) >= 0)
            seq_judge_params(want->seq, sched_judged(want), &sched->samples[i]);
        else if (want->scored >= 0)
            seq_score_params(want->seq, want->scored, &sched->samples[i]);
        else
            seq_sample_params(want->seq, &sched->samples[i]);
    }
    return any;
}

/* After the prompt, each choice continues on its own, if its first token has not ended it. */
static void fork_choices(struct sched *sched) {
    struct kern *kern = sched->options.kern;
    for (int i = 0; i < sched->running; i++) {
        struct sequence *seq = &sched->sequences[sched->order[i]];
        if (!seq->leader || seq_prefilling(seq->leader)) continue;
        if (seq->finish != ENGINE_RUNNING) continue;
        int rc = kern->ops->fork(kern, seq->leader->slot, seq->slot);
        if (rc != 0) {
            sched_fail_job(sched, seq->job, rc, err_text(rc));
            continue;
        }
        seq->due = seq->leader->due;
        seq->evicted_at = seq->leader->evicted_at;
        seq->exact = seq->leader->exact;
        seq->began = seq->leader->began;
        seq->began_held = seq->leader->began_held;
        seq->leader = NULL;
    }
}

/* Returns whether there was a logit to sample: overflow or broken weights may leave only NaN. */
static bool is_number(const struct kern_sampled *sampled) {
    return sampled->rank == 0 || (sampled->rank > 0 && isfinite(sampled->logprob));
}

_Static_assert(sizeof(struct engine_top) == sizeof(struct kern_alternative) &&
                   offsetof(struct engine_top, logprob) ==
                       offsetof(struct kern_alternative, logprob),
               "alternatives are written into the job's list as they are");

/* Fills the list of a token that wants more alternatives than the backend reports. `logits`: its
 * row, in the backend's memory. */
static int list_alternatives(struct sched *sched, const struct sched_want *want,
                             const float *logits) {
    const struct sched_options *options = &sched->options;
    int32_t count;
    struct engine_top *top = seq_wide_top(want->seq, want->scored, &count);
    if (!top) return 0;
    CHECK(sched->wide_row && count <= options->top_max);
    int rc = options->kern->ops->download(options->kern, sched->wide_row, logits,
                                          (size_t)options->vocab * sizeof *logits);
    if (rc != 0) return rc;
    kern_alternatives(sched->wide_row, options->vocab, sched->wide_scratch,
                      (struct kern_alternative *)top, count);
    return 0;
}

static void add_drawn_token(struct sched *sched, struct sequence *seq,
                            const struct kern_sampled *sampled) {
    int32_t drafted = seq->confirmed < seq->drafted ? seq->tokens[seq->token_count] : -1;
    seq_add_token(seq, &sched->options.text, sampled);
    if (drafted == sampled->token) seq->confirmed++;
    sched->counters.generation_tokens++;
    queue_charge(&sched->queue, seq->job, 1);
    if (seq_waits(seq)) settle_mask(sched, seq);
}

/* Returns whether some sample was the first token of a job. */
static bool record_samples(struct sched *sched, const struct sched_step *step, int round,
                           const float *logits) {
    bool began = false;
    for (int i = step->rounds[round]; i < step->rounds[round + 1]; i++) {
        const struct sched_want *want = &sched->wants[i];
        if (!is_in_round(want->seq, round)) continue; /* also if the job has just failed */
        if (!is_number(&sched->sampled[i])) {
            sched_fail_job(sched, want->seq->job, ERR_INTERNAL,
                           "the model's logits are not numbers");
            continue;
        }
        if (sched_judged(want) >= 0) {
            want->seq->job->pooled[sched_judged(want)] = sched->sampled[i].logprob;
            continue;
        }
        int rc = list_alternatives(sched, want, logits + (size_t)i * (size_t)sched->options.vocab);
        if (rc != 0) {
            sched_fail_job(sched, want->seq->job, rc, err_text(rc));
            continue;
        }
        if (want->scored >= 0) {
            seq_add_prompt_score(want->seq, want->scored, &sched->sampled[i]);
            continue;
        }
        struct engine_job *job = want->seq->job;
        began = began || job->first_token_ns == 0;
        if (job->first_token_ns == 0) job->first_token_ns = clock_ns(); /* announced by the token */
        sched_hold_hidden(sched, want->seq, i);
        add_drawn_token(sched, want->seq, &sched->sampled[i]);
    }
    return began;
}

static int sample_round(struct sched *sched, const struct sched_step *step, int round,
                        const float *logits) {
    struct kern *kern = sched->options.kern;
    int first = step->rounds[round], count = step->rounds[round + 1] - first;
    int vocab = sched->options.vocab;
    if (count == 0) return kern->ops->sync(kern);
    return kern->ops->sample(kern, logits + (size_t)first * (size_t)vocab, count, vocab,
                             sched->samples + first, sched->sampled + first);
}

/* Goes on with the drafted tokens while some sequence has drawn all of them so far. */
static int draw_drafts(struct sched *sched, const struct sched_step *step, const float *logits) {
    for (int round = 1; round <= DRAFT_MAX && prepare_samples(sched, step, round); round++) {
        int rc = sample_round(sched, step, round, logits);
        if (rc != 0) return rc;
        record_samples(sched, step, round, logits);
    }
    return sched_end_drafts(sched, step);
}

/* A request for no tokens (echo alone, or a vector) ends with its prompt. */
static void finish_scored(struct sched *sched) {
    for (int i = 0; i < sched->running; i++) {
        struct sequence *seq = &sched->sequences[sched->order[i]];
        if (seq_generating(seq) && seq->job->request.max_tokens == 0 &&
            seq->finish == ENGINE_RUNNING)
            seq->finish = seq->job->request.pooling ? ENGINE_FINISH_STOP : ENGINE_FINISH_LENGTH;
    }
}

/* The tokens of prompts and answers, which vLLM counts for each step. */
static uint64_t tokens_so_far(const struct engine_counters *counters) {
    return counters->computed_tokens + counters->generation_tokens;
}

/* Reports what the jobs that asked for it hold, where more has changed than that each stream has
 * one entry more for each token: a step in which nothing is evicted needs no report. A report that
 * fails is left out. */
static void report_changed(struct sched *sched) {
    struct kern *kern = sched->options.kern;
    for (int i = 0; i < sched->running; i++) {
        struct sequence *seq = &sched->sequences[sched->order[i]];
        if (!seq->changed || seq->index > 0 || seq->due.tokens == 0) continue;
        struct engine_held *held = publish_held_next(seq->job);
        seq->changed = false;
        if (!held) continue;
        struct kern_report report = {.lengths = held->lengths};
        held->tokens = seq->due.tokens;
        if (kern->ops->report(kern, seq->slot, &report) == 0) publish_held(seq->job);
    }
}

static int begin_step(struct sched *sched, struct sched_step *step) {
    int rc = sched_evict_before_rows(sched);
    if (rc == 0) sched_build_step(sched, step);
    return rc;
}

static int compute_step(struct sched *sched) {
    struct sched_step step;
    const float *logits = NULL, *hidden = NULL;
    int64_t begin;
    uint64_t before = tokens_so_far(&sched->counters);
    bool some_sit_out = sched_plan_turns(sched);
    int rc = begin_step(sched, &step);
    if (rc == 0 && step.batch.rows == 0 && some_sit_out) {
        sched_skip_turns(sched);
        rc = begin_step(sched, &step);
    }
    if (rc != 0) return rc;
    sched->all_wait = step.batch.rows == 0 && !sched->encoded;
    if (step.batch.rows == 0) return 0;
    begin = sched_clock(sched);
    rc = sched->options.model_step(sched->options.model, &step.batch, sched->want, step.want_count,
                                   &logits, sched_pools(sched, &step) ? &hidden : NULL);
    if (rc != 0) return rc;
    prepare_samples(sched, &step, 0);
    rc = sample_round(sched, &step, 0, logits);
    if (rc == 0 && hidden) rc = sched_pool_rows(sched, &step, hidden);
    if (rc != 0) return rc;
    const int32_t prompt_rows = step.batch.rows - step.stream_rows;
    if (step.stream_rows == step.streams)
        pace_note(&sched->pace, step.streams, prompt_rows, sched_clock(sched) - begin);
    count_appended(sched, &step);
    /* The first tokens come from logits that the eviction at the prompt's end does not change. */
    if (record_samples(sched, &step, 0, logits) && sched->options.answered &&
        sched_evicts_after_rows(sched))
        sched->options.answered(sched->options.answered_arg);
    rc = draw_drafts(sched, &step, logits);
    if (rc != 0) return rc;
    if (prompt_rows == 0)
        pace_note_drafts(&sched->pace, step.stream_rows, sched_clock(sched) - begin);
    rc = sched_evict_after_rows(sched);
    if (rc != 0) return rc;
    sched_add_prefixes(sched);
    fork_choices(sched);
    report_changed(sched);
    finish_scored(sched);
    hist_add(&sched->counters.iteration_tokens, (double)(tokens_so_far(&sched->counters) - before));
    return 0;
}

bool sched_step(struct sched *sched, bool *device_failed) {
    *device_failed = false;
    bool had_work = !sched_idle(sched);
    sched_end_finished(sched);
    sched_drop_cancelled(sched);
    int before = sched->running;
    sched_admit_waiting(sched);
    if (sched->running > before && sched->options.admitted)
        sched->options.admitted(sched->options.admitted_arg);
    sched->mask_work = (struct constraint_work){.left = CONSTRAINT_STEP_WORK};
    sched->mask_ns = 0;
    for (int i = 0; i < sched->running; i++)
        if (seq_waits(&sched->sequences[sched->order[i]]))
            settle_mask(sched, &sched->sequences[sched->order[i]]);
    int rc = sched_encode(sched);
    sched_end_finished(sched);
    if (rc == 0 && sched->running == 0) return had_work;
    sched_pay_evictions(sched);
    if (rc == 0) rc = compute_step(sched);
    sched->counters.steps++;
    sched->counters.mask_work += sched->mask_work.spent;
    if (sched->mask_ns > 0) hist_add(&sched->counters.mask_seconds, (double)sched->mask_ns * 1e-9);
    if (rc != 0) {
        if (rc == ERR_FULL) sched->counters.preemptions++; /* a reservation was wrong: a bug */
        log_error("step failed: %s; %d running requests end with an error", err_text(rc),
                  sched->running);
        *device_failed = rc == ERR_DEVICE;
        abandon_running(sched, ENGINE_FINISH_ERROR, rc);
        return true;
    }
    sched_end_finished(sched);
    return true;
}
