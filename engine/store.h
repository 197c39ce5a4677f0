/* The state directory: conversations on disk, one file each (engine/state.h), written and read by a
 * thread of its own.
 *
 * - key: 32 random bytes, mode 0600, made at the first start. Whoever has it can make files that
 *   are believed. Copied with the directory, the states go with it to another machine.
 * - lock: held by the daemon that uses the directory.
 * - <16 hex digits>.state: a conversation; the digits are its id.
 * - <16 hex digits>.bad: a file that was refused: torn, forged or damaged.
 * - .<16 hex digits>.tmp: being written; leftovers go at the next start.
 *
 * A file appears whole or not at all: written under another name, synced, renamed. A refused file
 * is logged and counted and put aside, and never more than that. The directory is opened once;
 * names are made of ids only and never followed when they are links. All files together stay within
 * a number of bytes: the one used longest ago goes first, whichever model it is of.
 *
 * What is there is known by an index in memory: space, kv parameters, lengths and hashes of tokens,
 * from the files' heads. That suffices to find a conversation; whether a file is genuine is checked
 * when it is read, before anything in it is used.
 *
 * Several replicas of a model use one directory, each through a store of its own; one thread serves
 * them in turn. A conversation belongs to the store that made its file or found it first, for as
 * long as that store is open: nobody else finds it, reads it or deletes it, so that it is never in
 * the memory of two replicas. For each store one conversation is written and one is read at a time,
 * each held in memory as a whole meanwhile.
 *
 * A store's calls come from its replica's thread, but for store_affinity, store_stats and
 * store_list (any thread); open, join and close from whoever owns them all. */
#ifndef KEEPD_ENGINE_STORE_H
#define KEEPD_ENGINE_STORE_H

#include "engine/conversation.h"
#include "engine/state.h"

#define STORE_FILES_MAX 65536
#define STORES_MAX      64 /* of one directory */

struct store;

struct store_options {
    const char *dir;
    int64_t bytes; /* of all files together */
    struct state_identity identity;
    bool inline_io; /* reading and writing happen inside the calls: for simulations */
    /* On the directory's thread, of a file that is read: can its blocks be taken in (kern.h,
     * snapshot_check)? NULL: whoever takes them in looks for himself. */
    int (*check)(void *backend, struct state_view *view, struct fault *fault);
    void *backend;
    void (*done)(void *arg); /* on the directory's thread, when something was written or read */
    void *arg;
};

/* Takes the directory: makes it, key and lock where they are missing, reads the heads of what is
 * there. ERR_BUSY: another daemon uses it. fault->field is "state-dir". */
int store_open(const struct store_options *options, struct store **out, struct fault *fault);
/* Another store of the same directory; they are numbered in this order, the opened one is 0. */
struct store *store_join(struct store *with, void (*done)(void *arg), void *arg);
/* Waits for what it is writing; the last one releases the directory. NULL is fine. */
void store_close(struct store *store);

const struct state_identity *store_identity(const struct store *store);
/* Derived from the key, the same for everybody who has it. */
void store_space_key(const struct store *store, uint8_t out[16]);

/* ---- Finding ------------------------------------------------------------------------------- */

/* The conversation on disk that serves a query best, if its use of tokens would exceed `least`; it
 * belongs to this store from now on. 0: there is none. */
uint64_t store_find(struct store *store, const struct conversation_query *query, int32_t least);
/* Notes for every store, by its number, how well the conversations on disk that belong to it serve
 * the search. */
void store_affinity(struct store *store, struct conversation_search *search,
                    struct conversation_affinity *of /* [STORES_MAX] */);
/* Grows when a search may find something else than before. */
uint64_t store_changes(struct store *store);
bool store_has(struct store *store, uint64_t id);
/* Not for this process: it needs more than there is, or another version. */
void store_ignore(struct store *store, uint64_t id);

/* ---- Writing ------------------------------------------------------------------------------- */

bool store_can_save(struct store *store); /* nothing is being written */
/* Takes `data`, a whole file but for its seal, and writes it. */
void store_save(struct store *store, const struct state_head *head, char *data, size_t size);
/* True once for each save that ended: whose, and how. */
bool store_saved(struct store *store, uint64_t *id, int *code);
/* Deletes the file, also one that is being written or read. ERR_NOTFOUND, also for those that
 * belong to another store. */
int store_remove(struct store *store, uint64_t id);

/* ---- Reading ------------------------------------------------------------------------------- */

/* Starts or goes on reading a conversation: ERR_BUSY until it is there, 0 when *view is: valid
 * until store_unload. Other codes once, when it cannot be had: ERR_MALFORMED, ERR_INVALID (it was
 * bad and is put aside), ERR_UNSUPPORTED, ERR_LIMIT (it is not for this process and ignored from
 * now on), ERR_NOTFOUND, ERR_IO, ERR_NOMEM (it stays as it is: trouble here, not there). */
int store_load(struct store *store, uint64_t id, const struct state_view **view);
bool store_loading(struct store *store, uint64_t id); /* store_load would still say ERR_BUSY */
/* Frees the file that was read, or stops waiting for it. */
void store_unload(struct store *store);

/* ---- Observation --------------------------------------------------------------------------- */

/* Grows while the directory's thread gets on with its work, for whichever store: with every piece
 * of a file. When it does not, and somebody waits, the disk hangs. */
uint64_t store_progress(struct store *store);

struct store_stats {
    int files;     /* conversations of this model and these gates */
    int64_t bytes; /* all files */
    uint64_t written, read, refused, failed;
};
void store_stats(struct store *store, struct store_stats *out);

struct store_row {
    uint64_t id, hint;
    uint8_t space[16];
    struct kv_params kv;
    int32_t tokens;
    int64_t bytes;
    int64_t used_unix;
};
/* Rows used last come first. */
int store_list(struct store *store, const struct engine_conversation_filter *filter,
               struct store_row *rows, int max);

#endif
