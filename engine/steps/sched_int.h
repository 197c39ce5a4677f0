/* Declarations shared by the files of the scheduler: sched.c (steps), sched_evict.c (evictions and
 * shifts), sched_turns.c (who takes part in a step), sched_batch.c (the rows of a step),
 * sched_admit.c (admission), sched_keep.c (sequences that continue conversations and become some),
 * sched_checkpoint.c (conversations that running sequences leave), sched_end.c (ends),
 * sched_draft.c (drafted tokens), sched_drafter.c (those of the draft model), sched_pool.c (vectors
 * of texts), sched_pictures.c (pictures in prompts). No other file includes this. */
#ifndef KEEPD_ENGINE_STEPS_SCHED_INT_H
#define KEEPD_ENGINE_STEPS_SCHED_INT_H

#include "base/clock.h"
#include "engine/steps/sched.h"

/* The results of admission for one waiting job. */
struct sched_entry {
    struct engine_job *job;
    bool passing; /* the job is not the head: it may not use the store */
    bool wants_conversation;
    struct conversation_match match; /* the conversation to continue */
    struct reserve_turn began;       /* where its turn begins */
    int64_t pages;                   /* reserved for each choice, of every rank's pool */
};

/* The head was tried, and nothing has changed since. */
static inline bool sched_head_waits(const struct sched *sched) {
    const struct keeper *keeper = &sched->keeper;
    return sched->head && sched->head->round == keeper->changes &&
           sched->admission.head_changes == keeper->head_changes;
}

/* Adds the sequence to the first `count` of sched->sorted, which ascend by key; of equal keys the
 * one that was added first comes first. */
static inline void sched_sort_in(const struct sched *sched, int count, struct sequence *seq,
                                 int64_t key) {
    seq->sort_key = key;
    for (; count > 0 && sched->sorted[count - 1]->sort_key > key; count--)
        sched->sorted[count] = sched->sorted[count - 1];
    sched->sorted[count] = seq;
}

/* The time by which steps are measured. */
static inline int64_t sched_clock(const struct sched *sched) {
    return sched->options.clock ? sched->options.clock(sched->options.model) : clock_ns();
}

/* ---- A step ---- */

/* A row whose logits are wanted: the next token of a sequence, or the score of a prompt token. */
struct sched_want {
    struct sequence *seq;
    int32_t scored; /* index of the prompt token this row's logits score; -1 = sample; -2 - i: the
                       token number i of those that the request judges */
};

/* Returns the number of the token that is judged; -1: none is. */
static inline int32_t sched_judged(const struct sched_want *want) {
    return want->scored <= -2 ? -2 - want->scored : -1;
}

struct sched_step {
    struct kern_batch batch;
    int want_count;
    int rounds[DRAFT_MAX + 2]; /* wants of round i of the samples: [rounds[i], rounds[i + 1]) */
    int streams;               /* sequences that generate: their spans come first */
    int32_t stream_rows;       /* rows of these spans, drafts included */
    int32_t rows_most;         /* rows that the step may have */
    int spare_logits;          /* for drafts or scores: beyond one row for every running sequence */
};

/* ---- sched_evict.c ---- */

/* Pays for evictions of earlier steps. */
void sched_pay_evictions(struct sched *sched);
/* Decides which sequences may evict in this step, and evicts those that must do so before their
 * next token; then shifts those whose next token has no position. */
int sched_evict_before_rows(struct sched *sched);
/* Evicts the sequences that have reached an eviction point in their prompt. */
int sched_evict_after_rows(struct sched *sched);
bool sched_evicts_after_rows(const struct sched *sched); /* there are some */

/* Returns whether the sequence's next token has no position. */
bool sched_wants_shift(const struct sequence *seq);
/* Returns the entries per stream with which an eviction in this step would begin; 0: none can be.
 */
int64_t sched_held_if_due(const struct sequence *seq);
/* Returns how many prompt rows the sequence appends until its next eviction or shift, as
 * due_prompt_limit and the rows that stay together say. */
int32_t sched_rows_to_eviction(const struct sequence *seq);
/* Returns whether a choice that begins after the leader's prompt waits for its first mask. */
bool sched_first_waits(const struct sched *sched, const struct sequence *leader);

/* ---- sched_end.c ---- */

/* Ends a job that waited and never ran. */
void sched_finish_job(struct sched *sched, struct engine_job *job, enum engine_finish finish);
/* Takes the sequences out that have finished or are cancelled. */
void sched_end_finished(struct sched *sched);
/* The sequences of a job whose fault is set finish with an error. */
void sched_end_failed(struct sched *sched, const struct engine_job *job);
/* Sets the job's fault, too. */
void sched_fail_job(struct sched *sched, struct engine_job *job, int rc, const char *what);

/* ---- sched_turns.c ---- */

/* Decides which running sequences sit out this step (seq->sits_out). Returns whether some do. */
bool sched_plan_turns(struct sched *sched);
/* Lets every sequence take part, because those whose turn it was have no row. */
void sched_skip_turns(struct sched *sched);
/* Returns how many prompt rows a step with this many answers may have. */
int32_t sched_prompt_rows(const struct sched *sched, int streams);

/* ---- sched_batch.c ---- */

void sched_build_step(struct sched *sched, struct sched_step *step);

/* ---- sched_draft.c ---- */

#define SCHED_DRAFT_ROWS    48   /* in one step */
#define SCHED_DRAFT_STRETCH 5    /* percent */
#define SCHED_DRAFT_GAIN    1.02 /* fewer more tokens for the time are not worth it */

/* Prepares a new sequence for drafts, if it may have some. */
void sched_open_draft(const struct sched *sched, struct sequence *seq);
/* Chooses the drafts of the first `streams` sequences of sched->sorted, which generate in this
 * step, at most `most` tokens in all: seq->drafted of each, written behind its tokens. */
void sched_plan_drafts(struct sched *sched, int streams, int32_t most);
/* After the samples: takes back the entries of drafted tokens that were not drawn, and counts. */
int sched_end_drafts(struct sched *sched, const struct sched_step *step);

/* ---- sched_pictures.c ---- */

/* Encodes a part of a tile that some prompt has come to: sched->encoded says whether there was one.
 * An error is the backend's. */
int sched_encode(struct sched *sched);
/* Returns how many of the next `most` rows of the prompt lie in front of a tile that is not
 * encoded.
 */
int32_t sched_rows_to_picture(struct sched *sched, const struct sequence *seq, int32_t most);
/* Rows [first, end) of the prompt stay together. */
struct sched_together {
    int32_t first, end;
};
/* Returns those that a step would part which ends in front of row `at`; end 0: none. */
struct sched_together sched_parted_at(const struct sequence *seq, int32_t at);
/* Fills step->batch.given for the span's rows that show tiles, which are all encoded. */
void sched_give_pictures(struct sched *sched, struct sched_step *step, const struct sequence *seq,
                         const struct kern_span *span);

/* ---- sched_drafter.c ---- */

/* Lets the draft model guess for those of the first `streams` sequences of sched->sorted whose
 * drafts it can better, at most `most` of them. Returns the time that it took over that of a step
 * with as many answers. */
double sched_ask_drafter(struct sched *sched, int streams, int32_t most);
/* Hands the hidden state of a wanted row, from which the sequence's next token is drawn, to a block
 * that predicts further tokens. Before the token is added. */
void sched_hold_hidden(struct sched *sched, struct sequence *seq, int want);
/* The sequence ends: the draft model forgets it. */
void sched_leave_drafter(struct sched *sched, struct sequence *seq);

/* ---- sched_pool.c ---- */

#define SCHED_POOL_ROWS 64 /* hidden states that are taken from the backend at once */

/* Returns whether the step has rows of a sequence that wants a vector. */
bool sched_pools(const struct sched *sched, const struct sched_step *step);
/* Takes these rows' hidden states [batch.rows, width], in the backend's memory, into the vectors of
 * their jobs. After the samples and before the rows are counted. */
int sched_pool_rows(struct sched *sched, const struct sched_step *step, const float *hidden);

/* ---- sched_admit.c ---- */

void sched_drop_cancelled(struct sched *sched); /* ends cancelled jobs that wait */
/* Admits the heads that fit, then other jobs that may pass (see sched_admit.c). */
void sched_admit_waiting(struct sched *sched);
/* Takes a job that begins to run, or is about to end, out of the queue and gives its place back. */
void sched_stop_waiting(struct sched *sched, struct engine_job *job);

/* ---- sched_keep.c ---- */

/* Returns what the job's client may have. */
struct keeper_claim sched_claim(const struct sched *sched, const struct engine_job *job);

/* Finds the conversation that serves the job's prompt best, in memory and on disk, and fills in
 * entry->match. Returns the reason to wait while the conversation is being read, or needs pages
 * that must be freed first. */
enum engine_wait sched_find(struct sched *sched, struct sched_entry *entry);

/* Gives `seq` a slot with the entry's conversation in it, without the tokens that the prompt does
 * not repeat: a fork of the conversation, or its own slot when it is consumed. */
int sched_continue(struct sched *sched, struct sequence *seq, const struct sched_entry *entry,
                   bool consumed);

/* Keeps an answered sequence's streams as a conversation: takes its slot and its tokens. */
void sched_retain(struct sched *sched, struct sequence *seq, const struct kern_report *report);

/* ---- sched_checkpoint.c ---- */

/* Adds a checkpoint of a sequence that is about to evict, if it is useful and pages are free. */
void sched_add_checkpoint(struct sched *sched, struct sequence *seq);

/* Notes the borders at which prefixes of a new sequence are added. */
void sched_plan_borders(struct sched *sched, struct sequence *seq, const struct sched_entry *entry);
/* Returns how many prompt tokens the sequence may append before its next prefix is added. */
int32_t sched_rows_to_border(const struct sequence *seq);
/* Adds the prefixes of all sequences that have reached a border. */
void sched_add_prefixes(struct sched *sched);
/* Returns whether the waiting job finds more of its prompt read if it waits for a running sequence.
 * Then a prefix of that sequence is added for it. */
bool sched_awaits_prefix(struct sched *sched, const struct sched_entry *entry);
/* Returns whether the prefix is still being read that the job was found to wait for, and the job
 * may wait longer. Costs no search. */
bool sched_still_awaits(const struct sched *sched, const struct engine_job *job);
/* Number of the step from which on the job waits for no prefix. */
static inline uint64_t sched_wait_end(const struct engine_job *job) {
    return job->prefix.since + SCHED_PASS_STEPS;
}

#endif
