/* The keeper owns what outlives a request: the table of retained conversations, the cache slots,
 * and the ledger of the pool's pages, which running sequences reserve and conversations hold. It
 * frees pages and places by removing conversations in the order of engine/kept/conversation.h, and
 * copies conversations to the store and back (keeper_save.c, keeper_restore.c). It knows nothing of
 * sequences, jobs or steps.
 *
 * Waiting. A request that cannot have what it needs gets a reason (enum engine_wait). The keeper
 * calls nobody when that reason ends; it counts instead, and the scheduler compares:
 * - `changes` grows when any waiting request may be served now;
 * - `head_changes` grows when only the one that waits for the store may be: the store serves one
 *   request at a time, that of the head of the queue.
 *
 * Thread: the engine thread. */
#ifndef KEEPD_ENGINE_KEPT_KEEPER_H
#define KEEPD_ENGINE_KEPT_KEEPER_H

#include "engine/disk/store.h"
#include "engine/engine_job.h"
#include "engine/kept/conversation.h"
#include "kernels/kern.h"
#include "kernels/places.h"

/* The longest wait for a listing of the directory, in steps, while others run. */
#define KEEPER_LIST_STEPS 128

struct keeper_options {
    struct kern *kern;    /* with an open cache of `slots` slots */
    struct store *store;  /* conversations go there and come back; NULL: nowhere */
    int64_t save_idle_ns; /* idle time after which a conversation is written */
    size_t copy_bytes;    /* copied out of the cache, and into it, in one step, at least */
    struct reserve_shape shape;
    int64_t pages_total, page_bytes;
    int slots, conversations_max;
    int32_t positions; /* number of the model's positions */
    bool whole;        /* kv_params.whole of all conversations */
};

/* A conversation that is being copied into a file, which the store then writes. */
struct keeper_export {
    char *data; /* the file, sized as a whole; NULL = none, or the store has it */
    size_t size, at;
    int block; /* the block that is copied next */
    struct state_head head;
    uint64_t replaces; /* conversation whose file is deleted when this one is on disk; 0 = none */
    bool displaced;    /* the conversation has left memory meanwhile */
};

/* A conversation that is being copied in: one of the table that is `arriving`. */
struct keeper_import {
    uint64_t id;                   /* 0 = none */
    const struct state_view *view; /* borrowed from the store until it is unloaded */
    int block;                     /* the block that is copied next */
    bool for_head;                 /* the request that asked for it is still the head */
};

/* The listing of the directory that requests wait for. */
struct keeper_listing {
    int64_t after_ns;    /* the listing must begin after this time; 0: no request waits for one */
    int64_t asked_ns;    /* when the present wait was first seen; 0: not yet */
    uint64_t asked_step; /* counters.steps then */
    int64_t forgone_ns;  /* requests that came before this time no longer wait for a listing */
};

/* The head's search on disk. */
struct keeper_search {
    bool made;        /* the members below are valid until `changes` or `least` change */
    uint64_t changes; /* store_changes before it */
    int32_t least;
    uint64_t id;           /* the file found; 0 = none */
    enum engine_miss lost; /* why a file that was found cannot be used; NEW: there was none */
    uint64_t awaited;      /* the conversation that the store is reading; 0 = none */
};

struct keeper {
    struct keeper_options options;
    struct engine_counters *counters; /* the scheduler's */
    struct conversation_table table;
    int32_t *free_slots;
    int free_slot_count;
    int64_t pages_reserved; /* by running sequences */
    uint64_t changes, head_changes;
    uint64_t saves; /* grows with each write that went on, ended or failed; begins with 1 */
    struct keeper_export export;
    struct keeper_import import;
    struct keeper_listing listing;
    struct keeper_search search;
    bool saving_all;     /* see keeper_save */
    bool saving_ended;   /* nothing more will be written */
    int64_t searched_ns; /* last search of the table for conversations to write */
};

void keeper_open(struct keeper *keeper, const struct keeper_options *options,
                 struct engine_counters *counters);
void keeper_close(struct keeper *keeper); /* releases the conversations' slots */

static inline int64_t keeper_streams(const struct keeper *keeper) {
    return reserve_all_streams(&keeper->options.shape);
}

/* Returns how often the streams of a sequence or conversation with so many tokens were shifted. */
static inline int32_t keeper_shifts(const struct keeper *keeper, int32_t tokens) {
    return places_shifts(keeper->options.positions, tokens);
}

static inline void keeper_note_change(struct keeper *keeper) {
    keeper->changes++;
}

/* ---- Slots and pages ---- */

int32_t keeper_alloc_slot(struct keeper *keeper);
void keeper_release_slot(struct keeper *keeper, int32_t slot);

/* Returns the memory of a conversation in pages, of which its list of tokens takes some. */
int64_t keeper_pages_with(const struct keeper *keeper, int64_t pages, int64_t tokens);
/* Returns the pages that are neither reserved nor retained. */
int64_t keeper_pages_free(const struct keeper *keeper);

/* The client of a request, and what it may have. */
struct keeper_claim {
    const uint8_t *client; /* [16] */
    int64_t quota;  /* pages that its running requests leave of its quota; INT64_MAX: any number */
    uint64_t saves; /* set if a conversation of the client must be written first: the wait ends when
                       keeper.saves differs from it. Otherwise unchanged */
};

/* Returns the pages that the client may reserve or retain beside all that it has. */
int64_t keeper_quota_free(const struct keeper *keeper, const struct keeper_claim *claim);

/* Frees pages until `pages` fit in the pool beside the running sequences, and in the client's
 * quota. Removes conversations in their order of removal, for the quota only the client's own.
 * `conv`, the conversation to continue, is removed last: its pages then become part of the
 * reservation, and *consumed is set. If that is not possible now, returns the reason to wait: a
 * sequence must end, or a conversation be written, first. */
enum engine_wait keeper_reclaim(struct keeper *keeper, struct keeper_claim *claim, int64_t pages,
                                const struct conversation *conv, bool *consumed);
/* Removes conversations until there are places for `more` and their memory fits the pool. Returns
 * false if the next one must be written first. */
bool keeper_reclaim_places(struct keeper *keeper, int more);

/* ---- Conversations ---- */

/* A request that looks for a conversation, and what it finds. */
struct keeper_find {
    struct keeper_claim claim;
    const struct conversation_query *query;
    int64_t queued_ns; /* when the request came */
    bool is_head;      /* the store reads for it */
    struct conversation_match match;
};

/* Finds the conversation that serves the request best, in memory and on disk. Returns the reason to
 * wait while it is read, or needs pages that have to be freed first. */
enum engine_wait keeper_find(struct keeper *keeper, struct keeper_find *find);
/* Ends the head's search: another request will be the head, and nobody waits for the store's read
 * any more. */
void keeper_end_search(struct keeper *keeper);

/* Forks the conversation's streams into a slot. *slot is taken even if the fork fails. */
int keeper_fork(struct keeper *keeper, const struct conversation_match *match, uint64_t hint,
                int32_t *slot);
/* Removes a conversation from the table and returns its slot; the checkpoint of its turn is
 * removed, too. */
int32_t keeper_consume(struct keeper *keeper, struct conversation *conv);

/* Fills in what the conversation holds: held, fullest, entries and pages. */
void keeper_measure(const struct keeper *keeper, const struct kern_report *report,
                    struct conversation *conv);
/* Adds a copy of an answered turn, which has its slot and its tokens, in place of an equal one; the
 * turn that it continued becomes superseded. `replaces`: the file that goes with it when that turn
 * has left memory. Returns whether it is pinned. */
bool keeper_retain(struct keeper *keeper, struct conversation *conv, uint64_t replaces,
                   const struct engine_request *request);

/* Removes a conversation from the table and gives its slot back. */
void keeper_drop(struct keeper *keeper, struct conversation *conv, const char *why);
/* Removes a conversation because its memory or its place is needed. Unless it is on disk, the
 * removal is remembered, so that a request that could have continued it reports the reason. */
void keeper_displace(struct keeper *keeper, struct conversation *conv, const char *why);
/* Drops a checkpoint whose sequence is not kept as a conversation, unless other requests continued
 * it. */
void keeper_drop_checkpoint(struct keeper *keeper, uint64_t id);

/* Deletes a conversation and the superseded one that it continued, also on disk. ERR_NOTFOUND.
 * Called between steps. */
int keeper_delete(struct keeper *keeper, uint64_t id);
/* Deletes the conversations whose time to live has ended, in memory and on disk, and nothing of the
 * turns that they continued. Between steps. */
void keeper_expire(struct keeper *keeper, int64_t now_ns);

/* ---- The store ---- */

/* Writes a conversation soon, because somebody waits for its file. ERR_BUSY: not written yet; 0:
 * the file is there; ERR_NOTFOUND: the conversation is neither in memory nor on disk;
 * ERR_UNSUPPORTED: it is never written (superseded, or its policy keeps everything); ERR_LIMIT: its
 * file would be too large; ERR_IO: it could not be written. Called between steps. */
int keeper_write(struct keeper *keeper, uint64_t id);

/* Continues to write and restore conversations, a few blocks at a time. Called before every step
 * and while there is nothing else to do. `all`: conversations that were used just now are written,
 * too, and failed writes are tried once more. Does nothing without a store. */
void keeper_save(struct keeper *keeper, int64_t now_ns, bool all);
/* Called when the backend has failed: conversations that are not written yet are lost, and nothing
 * waits for them. */
void keeper_end_saving(struct keeper *keeper);
bool keeper_copying(const struct keeper *keeper); /* there is more to copy right now */
bool keeper_saving(const struct keeper *keeper);  /* the next write must wait for the present one */
bool keeper_unsaved(struct keeper *keeper); /* something that can be written is not on disk yet */
bool keeper_wants_saving(const struct keeper *keeper, const struct conversation *conv);
int64_t
keeper_next_save_ns(const struct keeper *keeper); /* time of the next write; INT64_MAX: none */

#endif
