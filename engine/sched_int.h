/* Shared by the files of the scheduler: sched.c (steps), sched_admit.c (who begins), sched_keep.c
 * (what stays), sched_save.c (what is written). No other file includes this. */
#ifndef KEEPD_ENGINE_SCHED_INT_H
#define KEEPD_ENGINE_SCHED_INT_H

#include "engine/sched.h"

/* Findings of admission about one waiting job. */
struct sched_entry {
    struct engine_job *job;
    struct kv_params kv;
    bool passing; /* the job is not the head: it may not use the store */
    bool wants_conversation;
    struct conversation_match match; /* what to go on from */
    struct reserve_turn began;       /* where its turn begins */
    int64_t pages;                   /* reserved for each choice, of every rank's pool */
};

static inline int64_t sched_streams(const struct sched *sched) {
    return (int64_t)sched->options.shape.layers * sched->options.shape.heads_kv;
}

/* Entries per stream, on average and rounded up, of the rank that has most. */
static inline int32_t sched_fullest(const struct sched *sched, const struct kern_report *report) {
    int64_t streams = reserve_streams(&sched->options.shape);
    return (int32_t)(((int64_t)report->rank_entries + streams - 1) / streams);
}

static inline const struct kern_ops *sched_ops(const struct sched *sched) {
    return sched->options.kern->ops;
}

/* Something has changed that waiting jobs may wait for: they are tried again. */
static inline void sched_changed(struct sched *sched) {
    sched->head_waits = sched->others_wait = false;
    sched->round++;
}

int32_t sched_take_slot(struct sched *sched);
void sched_release_slot(struct sched *sched, int32_t slot);

/* Ends a job that waited and never ran. */
void sched_finish_job(struct sched *sched, struct engine_job *job, enum engine_finish finish);

/* ---- sched_admit.c --------------------------------------------------------------------------- */

void sched_drop_cancelled(struct sched *sched); /* ends cancelled jobs that wait */
/* Admits the heads that fit, then others that may pass, see there. */
void sched_admit_waiting(struct sched *sched);
/* Takes a job out of the queue and gives its place back: it runs now, or it is about to end. */
void sched_stop_waiting(struct sched *sched, struct engine_job *job);

/* ---- sched_keep.c ---------------------------------------------------------------------------- */

/* Looks for the conversation that serves the job's prompt best, in memory and on disk: fills
 * match. False: it is being read, or needs room that somebody must leave first. */
bool sched_find(struct sched *sched, struct sched_entry *entry);

/* Makes `pages` fit beside what runs, or returns false: somebody must leave, or a conversation be
 * written, first. Forgets conversations, those that go first first, and the entry's own row last:
 * then the row's pages become part of the reservation and *used_up is set. */
bool sched_make_room(struct sched *sched, int64_t pages, const struct conversation *row,
                     bool *used_up);

/* The turn that the sequence follows, if it does: also where it has to start from nothing. */
void sched_note_origin(struct sched *sched, struct sequence *seq, uint64_t from);

/* Gives `seq` a slot with the entry's conversation in it, less what the prompt does not repeat: a
 * fork of the row, or the row's own slot when it is used up. */
int sched_go_on(struct sched *sched, struct sequence *seq, const struct sched_entry *entry,
                bool used_up);

/* Makes sure that there are `more` conversations less than there may be; false: one that is to go
 * has to be written first. */
bool sched_make_place(struct sched *sched, int more);
/* Takes a row out of the table and gives its slot back. */
void sched_drop(struct sched *sched, struct conversation *row, const char *why);

/* The sequence is about to evict: leaves a snapshot behind where that is of use and there is room.
 */
void sched_leave_snapshot(struct sched *sched, struct sequence *seq);
/* It leaves nothing else behind: its snapshots go, too, but those that others went on from. */
void sched_drop_snapshots(struct sched *sched, const struct sequence *seq);

/* Keeps an answered sequence's streams as a conversation: takes its slot and its tokens. */
void sched_retain(struct sched *sched, struct sequence *seq, const struct kern_report *report);

/* ---- sched_save.c ---------------------------------------------------------------------------- */

bool sched_wants_saving(const struct sched *sched, const struct conversation *row);
/* May the row go? If it is still to be written, that begins now, or when the store can. */
bool sched_save_for_room(struct sched *sched, struct conversation *row);
void sched_forget_copying(struct sched *sched, const struct conversation *row); /* it goes */
/* Brings what the query would use from disk. False: not yet; the head is woken when it is there. */
bool sched_restore(struct sched *sched, struct sched_entry *entry,
                   const struct conversation_query *query);
/* Nobody waits any more for what the store has read, or reads. */
void sched_end_waiting(struct sched *sched);
void sched_save_close(struct sched *sched);
/* It is in no memory, and in no file although it was to be. */
void sched_count_lost(struct sched *sched, uint64_t id);

#endif
