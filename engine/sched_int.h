/* What sched.c (who runs) and sched_keep.c (what stays) share. Nobody else includes this. */
#ifndef KEEPD_ENGINE_SCHED_INT_H
#define KEEPD_ENGINE_SCHED_INT_H

#include "engine/sched.h"

/* What admission has found out about one waiting job. */
struct sched_entry {
    struct engine_job *job;
    struct kv_params kv;
    bool wants_conversation;
    struct conversation *row; /* to go on from; NULL = from nothing */
    int32_t common;           /* tokens of it that stay */
    enum engine_miss miss;    /* why there is no row */
    int64_t pages;            /* reserved for each choice */
};

static inline int64_t sched_streams(const struct sched *sched) {
    return (int64_t)sched->options.shape.layers * sched->options.shape.heads_kv;
}

static inline const struct kern_ops *sched_ops(const struct sched *sched) {
    return sched->options.kern->ops;
}

int32_t sched_take_slot(struct sched *sched);
void sched_release_slot(struct sched *sched, int32_t slot);

/* ---- sched_keep.c ---------------------------------------------------------------------------- */

/* Looks for the conversation that the job's prompt extends: fills row, common and miss. */
void sched_find(struct sched *sched, struct sched_entry *entry);

/* Makes `pages` fit beside what runs, or returns false: only somebody who leaves can help. Forgets
 * conversations, those that go first first, and the entry's own row last: then the row's pages
 * become part of the reservation and *used_up is set. */
bool sched_make_room(struct sched *sched, int64_t pages, const struct conversation *row,
                     bool *used_up);

/* Gives `seq` a slot with the entry's conversation in it, less what the prompt does not repeat: a
 * fork of the row, or the row's own slot when it is used up. */
int sched_go_on(struct sched *sched, struct sequence *seq, const struct sched_entry *entry,
                bool used_up);

/* Keeps an answered sequence's streams as a conversation: takes its slot and its tokens. */
void sched_retain(struct sched *sched, struct sequence *seq, const struct kern_report *report);

#endif
