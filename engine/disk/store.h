/* The store keeps conversations on disk, one file each (engine/disk/state.h), in the state
 * directory, so that they outlive the process. A thread of its own reads and writes the files.
 *
 * - key: 32 random bytes, mode 0600, created at the first start. Anyone with the key can write
 *   files that are accepted. A copy of the directory with its key can be used on another machine.
 * - daemons/: a lease of each daemon that uses the directory (engine/disk/state_lease.h).
 * - lock: keeps daemons away that share a directory with nobody, because they are of an earlier
 *   version.
 * - <16 hex digits>.state: a conversation; the digits are its id, and follow from what the
 *   conversation is: model, gates, space, kv parameters and tokens (state_name).
 * - <16 hex digits>.bad: a file that was refused: torn, forged or damaged.
 * - .<16 hex digits>.<16 hex digits>.tmp: a file that the daemon with the second number is writing.
 *   It is deleted when that daemon's lease has expired. With the suffix "part": an upload.
 *
 * A file appears whole or not at all: it is written under another name, synced and renamed. A
 * refused file is logged, counted and put aside; nothing else follows from it. The directory is
 * opened once. File names are made of ids only, and links are never followed. All files together
 * stay within a number of bytes: where room is needed, a file is deleted that was used long ago, or
 * whose client holds much (store_index_first_to_go), whichever model it belongs to.
 *
 * Several daemons may use one directory, also on different machines, if its file system renames
 * atomically. Files never change, so no lock is needed. Each daemon keeps an index of its own.
 * While others are there, it lists the directory again before it searches it, if the directory has
 * changed, and before it writes. Two daemons that write the same conversation write the same name.
 * A daemon that has continued a conversation deletes the file that its own replaces, unless another
 * daemon has used that file in the last minute. All daemons delete the same files for room, so the
 * bytes stay within their bound, but for one file that each daemon may begin to write at the same
 * time, and for uploads: they have a bound of their own and displace nothing before they are
 * checked. What a daemon misses or deletes too early costs only the time to compute a prompt again.
 *
 * An index in memory describes the files: space, kv parameters, lengths and hashes of tokens, from
 * the files' heads. The index suffices to find a conversation; a file is checked when it is read,
 * before any of its contents is used.
 *
 * Several replicas of a model use one directory, each through its own store; one thread serves the
 * stores in turn. A conversation belongs to the store that wrote its file or found it first, for as
 * long as that store is open. No other store finds, reads or deletes it, so it is never in the
 * memory of two replicas. Each store writes at most one conversation and reads at most one at a
 * time, and holds each whole in memory meanwhile.
 *
 * A store's calls come from its replica's thread, except store_affinity, store_stats and store_list
 * (any thread). Open, join and close are called by the owner of all stores. */
#ifndef KEEPD_ENGINE_DISK_STORE_H
#define KEEPD_ENGINE_DISK_STORE_H

#include "engine/disk/conversation_key.h"
#include "engine/disk/state.h"
#include "engine/disk/state_dir.h"
#include "engine/engine_conversations.h"

#define STORE_FILES_MAX 65536
#define STORES_MAX      64 /* stores of one directory */

struct store;

struct store_options {
    const char *dir;
    int64_t bytes;        /* bound on all files together */
    uint64_t state_bytes; /* bytes of a conversation's recurrent states; 0: it has none */
    struct state_identity identity;
    bool inline_io; /* the calls read and write themselves, without a thread: for simulations */
    /* Checks, on the directory's thread, that the blocks of a file that was read can be imported
     * (kern.h, snapshot_check). NULL: the importer checks them. */
    int (*check)(void *backend, struct state_view *view, struct fault *fault);
    void *backend;
    void (*done)(void *arg); /* called on the directory's thread after a write or a read */
    void *arg;
};

/* Opens the directory: creates it, its key and its lease if they are missing, and reads the heads
 * of its files. ERR_BUSY: a daemon that shares nothing uses it. fault->field is "state-dir". */
int store_open(const struct store_options *options, struct store **out, struct fault *fault);
/* Opens another store of the same directory. Stores are numbered in the order of opening; that of
 * store_open is 0. */
struct store *store_join(struct store *with, void (*done)(void *arg), void *arg);
/* Waits for the store's reads and writes. Closing the last store releases the directory. NULL is
 * allowed. */
void store_close(struct store *store);

const struct state_identity *store_identity(const struct store *store);
/* Derives the space key from the directory's key: equal for all processes that use the directory or
 * a copy of it. */
void store_derive_space_key(const struct state_dir *dir, uint8_t out[16]);
void store_space_key(const struct store *store, uint8_t out[16]);

/* ---- Finding ---- */

/* Returns whether the index shows everything that other daemons had written at this time
 * (clock_ns). If not, the directory's thread is asked to list the directory, and calls `done` after
 * that. Without other daemons the answer is always true. */
bool store_fresh(struct store *store, int64_t since_ns);
/* Returns the id of the conversation on disk that serves the query best, if the query would use
 * more than `least` of its tokens; 0: there is none. The conversation belongs to this store from
 * now on. */
uint64_t store_find(struct store *store, const struct conversation_query *query, int32_t least);
/* Notes for every store, by its number, how well its conversations on disk serve the search. */
void store_affinity(struct store *store, struct conversation_search *search,
                    struct conversation_affinity *of /* [STORES_MAX] */);
/* Grows when the result of a search may have changed. */
uint64_t store_changes(struct store *store);
bool store_has(struct store *store, uint64_t id);
/* Returns whether the file was deleted to make room, and `size` bytes would have room now. Only a
 * daemon that is alone knows why a file has gone: another daemon may have deleted it for a client.
 */
bool store_may_return(struct store *store, uint64_t id, int64_t size);
/* Ignores a conversation that this process cannot use: it needs more pages than there are, or has
 * another version. */
void store_ignore(struct store *store, uint64_t id);

/* Notes that a conversation with a time to live was used in memory, so that its file, if it has
 * one, lives longer, too, for other daemons and after a restart. */
void store_touch(struct store *store, uint64_t id);

/* ---- Writing ---- */

bool store_can_save(struct store *store); /* the store is not writing */
/* Takes over `data`, a whole file except its seal, and writes it. */
void store_save(struct store *store, const struct state_head *head, char *data, size_t size);
/* Returns true once for each save that has ended, with its id and its result. */
bool store_saved(struct store *store, uint64_t *id, int *rc);
/* Deletes the file, even while it is written or read. ERR_NOTFOUND: there is none, or it belongs to
 * another store. */
int store_remove(struct store *store, uint64_t id);
/* Deletes the file of a conversation that a newer turn replaced, unless another daemon continues
 * the conversation, too. */
void store_remove_replaced(struct store *store, uint64_t id);

/* ---- Reading ---- */

/* Starts or continues to read a conversation. ERR_BUSY: not read yet. 0: *view is valid until
 * store_unload. Other codes are returned once, when the conversation cannot be had: ERR_MALFORMED,
 * ERR_INVALID (the file was bad and is put aside), ERR_UNSUPPORTED, ERR_LIMIT (this process cannot
 * use the file and ignores it from now on), ERR_NOTFOUND, ERR_IO, ERR_NOMEM (the fault is not in
 * the file, which stays). */
int store_load(struct store *store, uint64_t id, const struct state_view **view);
bool store_loading(struct store *store, uint64_t id); /* store_load would still return ERR_BUSY */
/* Frees the file that was read, or gives up a read that has not ended. */
void store_unload(struct store *store);

/* ---- Observation ---- */

/* Grows with every piece of a file that the directory's thread reads or writes, for any store. When
 * it does not grow while a store waits, the disk hangs. */
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
    int32_t tokens, ttl;
    int64_t bytes;
    int64_t used_unix;
};
/* Lists conversations on disk, the most recently used first; returns the number of rows. */
int store_list(struct store *store, const struct engine_conversation_filter *filter,
               struct store_row *rows, int max);

#endif
