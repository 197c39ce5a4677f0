/* The state directory on disk: its key, its lock, and one file for each conversation, by id;
 * engine/store.h describes the layout. This module knows names and bytes. The store remembers which
 * files there are and which model each belongs to (engine/store_index.h). The owner of the store
 * opens the directory once; then any thread may call, for each file one thread at a time. */
#ifndef KEEPD_ENGINE_STATE_DIR_H
#define KEEPD_ENGINE_STATE_DIR_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/sha256.h"
#include "engine/state.h"

struct state_dir {
    const char *path;  /* owned by the caller, valid while it is open */
    int fd, lock_file; /* descriptors, -1: none */
    uint8_t key[SHA256_BYTES];
    atomic_uint_fast64_t progress; /* pieces read and written; others may count on */
};

/* Creates the directory and its key if they are missing, and takes the lock. ERR_BUSY: another
 * daemon has it. fault->field is "state-dir". The caller closes the directory whatever this
 * returns. */
int state_dir_open(struct state_dir *dir, const char *path, struct fault *fault);
void state_dir_close(struct state_dir *dir);
/* Reports the faults that opening would report, in the same words, without creating anything or
 * taking the lock. */
int state_dir_check(const char *path, struct fault *fault);

/* Calls `visit` for each state file (`bad`: for each one that was put aside) until it returns an
 * error, which is returned. Deletes files that were never finished. ERR_IO: the directory cannot be
 * listed, see *fault. */
typedef int state_dir_visit(void *arg, uint64_t id, bool bad);
int state_dir_list(const struct state_dir *dir, state_dir_visit *visit, void *arg,
                   struct fault *fault);

struct state_dir_file {
    int64_t bytes, used_unix;
};
bool state_dir_stat(const struct state_dir *dir, uint64_t id, bool bad, struct state_dir_file *out);
/* Reads the head of a file; fills in *out even when the head is refused. Errors as of
 * state_parse_head, and ERR_IO. fault->field is the file's name. */
int state_dir_read_head(struct state_dir *dir, uint64_t id, struct state_dir_file *out,
                        struct state_head *head, struct fault *fault);
/* Reads a whole file and checks its seal and its id. *data must be freed also after an error; *view
 * points into it. Updates the file's time of last use. Errors as of state_parse, and ERR_NOTFOUND,
 * ERR_IO, ERR_NOMEM. */
int state_dir_read(struct state_dir *dir, uint64_t id, char **data, struct state_view *view,
                   struct fault *fault);
/* Seals and writes a file, whole or not at all. ERR_IO is logged. */
int state_dir_write(struct state_dir *dir, uint64_t id, char *data, size_t size);
/* Renames a refused file and logs why. False: the file keeps its name, and is refused again at the
 * next start. */
bool state_dir_put_aside(const struct state_dir *dir, uint64_t id, const char *why);
void state_dir_delete(const struct state_dir *dir, uint64_t id, bool bad);
/* Makes deletions durable. */
void state_dir_sync(struct state_dir *dir);

#endif
