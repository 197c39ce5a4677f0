/* The state directory on disk: its key, its leases, and one file for each conversation, by id;
 * engine/disk/store.h describes the layout. This module knows names and bytes. The store remembers
 * which files there are and which model each belongs to (engine/disk/store_index.h). The owner of
 * the store opens the directory once; then any thread may call, for each file one thread at a time.
 */
#ifndef KEEPD_ENGINE_DISK_STATE_DIR_H
#define KEEPD_ENGINE_DISK_STATE_DIR_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/sha256.h"
#include "engine/disk/state.h"
#include "engine/disk/state_lease.h"

struct state_dir {
    const char *path;     /* owned by the caller, valid while it is open */
    int fd, lock_file;    /* descriptors, -1: none */
    uint64_t state_bytes; /* recurrent states of a conversation of this model; set after opening */
    uint8_t key[SHA256_BYTES];
    struct state_lease lease;      /* renewed by one thread, see engine/disk/state_lease.h */
    atomic_uint_fast64_t progress; /* pieces read and written; others may count on */
};

/* Creates the directory and its key if they are missing, and makes the daemon's lease. ERR_BUSY: a
 * daemon of a version without leases uses the directory. fault->field is "state-dir". The caller
 * closes the directory whatever this returns. */
int state_dir_open(struct state_dir *dir, const char *path, struct fault *fault);
void state_dir_close(struct state_dir *dir);
/* Reports the faults that opening would report, in the same words, without creating anything or
 * looking for other daemons. */
int state_dir_check(const char *path, struct fault *fault);

/* Calls `visit` for each state file (`bad`: for each one that was put aside) until it returns an
 * error, which is returned. Deletes the unfinished files of daemons that have ended; *unfinished is
 * the size of those that other daemons are writing, without uploads. ERR_IO: the directory cannot
 * be listed, see *fault. */
typedef int state_dir_visit(void *arg, uint64_t id, bool bad);
int state_dir_list(const struct state_dir *dir, state_dir_visit *visit, void *arg,
                   int64_t *unfinished, struct fault *fault);
/* Returns the time of the directory's last change, by the file system's clock; 0: unknown. */
int64_t state_dir_changed_ns(const struct state_dir *dir);

struct state_dir_file {
    int64_t bytes;
    int64_t used_unix, used_ns; /* time stamp: the last use by any daemon */
};
bool state_dir_stat(const struct state_dir *dir, uint64_t id, bool bad, struct state_dir_file *out);
/* Sets the file's time of last use to now, and tells it in *out. False: there is no such file. */
bool state_dir_touch(const struct state_dir *dir, uint64_t id, struct state_dir_file *out);
/* Reads the head of a file; fills in *out even when the head is refused. Errors as of
 * state_parse_head, and ERR_IO. fault->field is the file's name. */
int state_dir_read_head(struct state_dir *dir, uint64_t id, struct state_dir_file *out,
                        struct state_head *head, struct fault *fault);
/* Reads a whole file and checks its seal and its id. *data must be freed also after an error; *view
 * points into it. Sets the file's time of last use, which is the conversation's lease, and tells
 * it in *taken. Errors as of state_parse, and ERR_NOTFOUND, ERR_IO, ERR_NOMEM. */
int state_dir_read(struct state_dir *dir, uint64_t id, char **data, struct state_view *view,
                   struct state_dir_file *taken, struct fault *fault);
/* Seals and writes a file, whole or not at all. ERR_IO is logged; a file that had the name before
 * is still there then, or an equal one in its place. */
int state_dir_write(struct state_dir *dir, uint64_t id, char *data, size_t size);
/* Makes a file under a temporary name with this number, for bytes that come in pieces; returns its
 * descriptor, -1: errno says why. Any thread. */
int state_dir_create(const struct state_dir *dir, uint64_t number);
/* Appends bytes and syncs them now and then: *unsynced, 0 at first, counts those that are not
 * synced. ERR_IO. */
int state_dir_append(struct state_dir *dir, int fd, const char *data, size_t size,
                     size_t *unsynced);
/* Gives the synced file its name. ERR_IO: *fault says why, and the temporary file is gone. */
int state_dir_adopt(struct state_dir *dir, uint64_t number, uint64_t id, struct fault *fault);
void state_dir_discard(const struct state_dir *dir, uint64_t number);
/* Opens a conversation's file for reading; *bytes is its size. -1: errno says why. Any thread. */
int state_dir_open_file(const struct state_dir *dir, uint64_t id, uint64_t *bytes);

/* Renames a refused file and logs why. False: the file keeps its name, and is refused again at the
 * next start. */
bool state_dir_put_aside(const struct state_dir *dir, uint64_t id, const char *why);
/* Deletes a file. One that cannot be deleted is emptied, so that a deleted conversation leaves no
 * text; the log says so. */
void state_dir_delete(const struct state_dir *dir, uint64_t id, bool bad);
/* Has another daemon used the file after this time, and may it still be continuing it? */
bool state_dir_taken(const struct state_dir *dir, uint64_t id, int64_t since_ns);
/* Makes deletions durable. */
void state_dir_sync(struct state_dir *dir);

#endif
