/* Declarations shared by the files of the scheduler: sched.c (steps), sched_turns.c (who takes part
 * in a step), sched_batch.c (the rows of a step), sched_admit.c (admission), sched_keep.c
 * (conversations that stay), sched_checkpoint.c (those that running sequences leave), sched_save.c
 * (state files), sched_draft.c (drafted tokens). No other file includes this.
 */
#ifndef KEEPD_ENGINE_STEPS_SCHED_INT_H
#define KEEPD_ENGINE_STEPS_SCHED_INT_H

#include "engine/steps/sched.h"
#include "kernels/places.h"

/* The results of admission for one waiting job. */
struct sched_entry {
    struct engine_job *job;
    bool passing; /* the job is not the head: it may not use the store */
    bool wants_conversation;
    struct conversation_match match; /* the conversation to continue */
    struct reserve_turn began;       /* where its turn begins */
    int64_t pages;                   /* reserved for each choice, of every rank's pool */
};

static inline int64_t sched_streams(const struct sched *sched) {
    return reserve_all_streams(&sched->options.shape);
}

/* Entries per stream, on average and rounded up, of the rank that has most. */
static inline int32_t sched_fullest(const struct sched *sched, const struct kern_report *report) {
    int64_t streams = reserve_streams(&sched->options.shape);
    return (int32_t)(((int64_t)report->rank_entries + streams - 1) / streams);
}

static inline const struct kern_ops *sched_ops(const struct sched *sched) {
    return sched->options.kern->ops;
}

/* How often the streams of a sequence or conversation with this many tokens have been shifted. */
static inline int32_t sched_shifts(const struct sched *sched, int32_t tokens) {
    return places_shifts(sched->options.kv.positions, tokens);
}

/* Notes a change that waiting jobs may wait for: they are tried again. */
static inline void sched_changed(struct sched *sched) {
    sched->others_wait = false;
    sched->round++;
}

/* The head is tried again, whatever the others wait for. */
static inline void sched_retry_head(struct sched *sched) {
    if (sched->head) sched->head->round = 0;
}

/* The head was tried, and nothing has changed since. */
static inline bool sched_head_waits(const struct sched *sched) {
    return sched->head && sched->head->round == sched->round;
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

int32_t sched_take_slot(struct sched *sched);
void sched_release_slot(struct sched *sched, int32_t slot);

/* Ends a job that waited and never ran. */
void sched_finish_job(struct sched *sched, struct engine_job *job, enum engine_finish finish);

/* ---- sched.c ---- */

/* A row whose logits are wanted: the next token of a sequence, or the score of a prompt token. */
struct sched_want {
    struct sequence *seq;
    int32_t scored; /* index of the prompt token this row's logits score; -1 = sample */
};

struct sched_step {
    struct kern_batch batch;
    int want_count;
    int rounds[DRAFT_MAX + 2]; /* wants of round i of the samples: [rounds[i], rounds[i + 1]) */
    int streams;               /* sequences that generate: their spans come first */
    int32_t stream_rows;       /* rows of these spans, drafts included */
    int32_t rows_most;         /* rows that the step may have */
    int spare_logits;          /* for drafts or scores: beyond one row for every running sequence */
};

/* The sequence's next token has no place. */
bool sched_wants_shift(const struct sequence *seq);
/* Returns the entries per stream that an eviction in this step would begin with; 0: none can come.
 */
int64_t sched_held_if_due(const struct sequence *seq);
/* Returns whether a choice that begins after the leader's prompt waits for its first mask. */
bool sched_first_waits(const struct sched *sched, const struct sequence *leader);

/* ---- sched_turns.c ---- */

/* Decides which running sequences sit out this step (seq->sits_out). Returns whether some do. */
bool sched_plan_turns(struct sched *sched);
/* Nobody sits out: those whose turn it was have no row. */
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

/* ---- sched_admit.c ---- */

void sched_drop_cancelled(struct sched *sched); /* ends cancelled jobs that wait */
/* Admits the heads that fit, then other jobs that may pass (see sched_admit.c). */
void sched_admit_waiting(struct sched *sched);
/* Takes a job that begins to run, or is about to end, out of the queue and gives its place back. */
void sched_stop_waiting(struct sched *sched, struct engine_job *job);

/* ---- sched_keep.c ---- */

/* Finds the conversation that serves the job's prompt best, in memory and on disk, and fills in
 * entry->match. Returns false, with the reason in the job, while the conversation is being read, or
 * needs room that must be freed first. */
bool sched_find(struct sched *sched, struct sched_entry *entry);

/* Frees pages until `pages` fit beside the running sequences, in the quota of the job's client and
 * in the pool. Removes conversations, for the quota the client's own, in their order of removal,
 * and `conv`, the one to continue, last: then its pages become part of the reservation and *used_up
 * is set. Returns false, with the reason in job->wait, when a sequence must end, or a conversation
 * be written, first. If the quota needs that write, the job waits aside until then (job->saves).
 */
bool sched_make_room(struct sched *sched, struct engine_job *job, int64_t pages,
                     const struct conversation *conv, bool *used_up);

/* Pages that the job's client may reserve or retain beside all that it has. */
int64_t sched_quota_free(const struct sched *sched, const struct engine_job *job);

/* Records the turn that the sequence follows, if any; also for a sequence that has to start from
 * nothing. */
void sched_note_origin(struct sched *sched, struct sequence *seq, uint64_t from);

/* Gives `seq` a slot with the entry's conversation in it, without the tokens that the prompt does
 * not repeat: a fork of the conversation, or its own slot when it is used up. */
int sched_go_on(struct sched *sched, struct sequence *seq, const struct sched_entry *entry,
                bool used_up);

/* Removes conversations until there are places for `more`, and until their memory fits the pool.
 * Returns false when the next one to remove has to be written first. */
bool sched_make_place(struct sched *sched, int more);
/* Takes a conversation out of the table and gives its slot back. */
void sched_drop(struct sched *sched, struct conversation *conv, const char *why);

/* Takes a conversation out to make room, and notes that it was there. */
void sched_forget(struct sched *sched, struct conversation *conv, const char *why);

/* Pages that are neither reserved nor retained. */
int64_t sched_pages_free(const struct sched *sched);
/* The retained memory of a conversation: its pages and, counted in pages, its list of tokens. */
int64_t sched_pages_with(const struct sched *sched, int64_t pages, int64_t tokens);

/* Drops the checkpoint of a sequence that is not kept as a conversation, unless other requests
 * continued it. */
void sched_drop_checkpoint(struct sched *sched, const struct sequence *seq);

/* Keeps an answered sequence's streams as a conversation: takes its slot and its tokens. */
void sched_retain(struct sched *sched, struct sequence *seq, const struct kern_report *report);

/* ---- sched_checkpoint.c ---- */

/* Leaves a checkpoint of a sequence that is about to evict, if it is useful and there is room. */
void sched_leave_checkpoint(struct sched *sched, struct sequence *seq);

/* Notes where a new sequence leaves prefixes. */
void sched_plan_borders(struct sched *sched, struct sequence *seq, const struct sched_entry *entry);
/* How many prompt tokens the sequence may append before it leaves its next prefix. */
int32_t sched_border_room(const struct sequence *seq);
/* Leaves the prefixes of all sequences that have reached a border. */
void sched_leave_prefixes(struct sched *sched);
/* Does the waiting job find more of its prompt read if it waits for a running sequence? Then that
 * sequence leaves a prefix for it. */
bool sched_awaits_prefix(struct sched *sched, const struct sched_entry *entry);
/* Is the prefix still being read that the job was found to wait for, and may it wait longer? Costs
 * no search. */
bool sched_still_awaits(const struct sched *sched, const struct engine_job *job);
/* Number of the step from which on the job waits for no prefix. */
static inline uint64_t sched_wait_end(const struct engine_job *job) {
    return job->prefix.since + SCHED_PASS_STEPS;
}

/* ---- sched_save.c ---- */

bool sched_wants_saving(const struct sched *sched, const struct conversation *conv);
/* Returns the id that a conversation has by its content; 0: it has none, because it is never
 * written. */
uint64_t sched_name(const struct sched *sched, const struct conversation *conv);
/* May the conversation be removed? If it must be written before, begins to write it, at once or
 * when the store can. */
bool sched_save_for_room(struct sched *sched, struct conversation *conv);
/* Is a conversation being copied or written? The next one cannot begin yet. */
bool sched_saves(const struct sched *sched);
void sched_forget_copying(struct sched *sched,
                          const struct conversation *conv); /* before removal */
/* Restores the conversation on disk that the query would use. Returns false while it is not there
 * yet; the head is woken then. */
bool sched_restore(struct sched *sched, struct sched_entry *entry,
                   const struct conversation_query *query);
/* Ends the wait for a file: no job waits for the store's read any more. */
void sched_end_waiting(struct sched *sched);
void sched_save_close(struct sched *sched);
/* Counts and logs a conversation that left memory and could not be written to its file. */
void sched_count_lost(struct sched *sched, uint64_t id);

#endif
