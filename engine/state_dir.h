/* The state directory on disk (its layout: engine/store.h): its key, its lock, and one file for
 * each conversation, by id. Knows names and bytes; which files there are, and whose, the store
 * remembers (engine/store_index.h).
 *
 * Opened once, by whoever owns the store; then any thread may call, of one file one at a time. */
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
    const char *path;  /* the caller's, as long as it is open */
    int fd, lock_file; /* descriptors, -1: none */
    uint8_t key[SHA256_BYTES];
    atomic_uint_fast64_t progress; /* pieces read and written; others may count on */
};

/* Makes the directory and its key where they are missing and takes the lock. ERR_BUSY: another
 * daemon has it. fault->field is "state-dir". Whatever it returns, close it. */
int state_dir_open(struct state_dir *dir, const char *path, struct fault *fault);
void state_dir_close(struct state_dir *dir);
/* Reports the faults that opening would report, in the same words, without making anything and
 * whoever has the lock. */
int state_dir_check(const char *path, struct fault *fault);

/* Calls `visit` for each state file, `bad` for one that was put aside, until it returns an error,
 * which is returned; deletes what was never finished. ERR_IO: it cannot be listed, see *fault. */
typedef int state_dir_visit(void *arg, uint64_t id, bool bad);
int state_dir_list(const struct state_dir *dir, state_dir_visit *visit, void *arg,
                   struct fault *fault);

struct state_dir_file {
    int64_t bytes, used_unix;
};
bool state_dir_stat(const struct state_dir *dir, uint64_t id, bool bad, struct state_dir_file *out);
/* The head of a file; *out also where the head is refused. Errors as of state_parse_head, and
 * ERR_IO. fault->field is the file's name. */
int state_dir_read_head(struct state_dir *dir, uint64_t id, struct state_dir_file *out,
                        struct state_head *head, struct fault *fault);
/* A whole file, whose seal is good and which says that it is of this id: in *data, to be freed also
 * after an error, and *view. Says that it was used. Errors as of state_parse, and ERR_NOTFOUND,
 * ERR_IO, ERR_NOMEM. */
int state_dir_read(struct state_dir *dir, uint64_t id, char **data, struct state_view *view,
                   struct fault *fault);
/* Seals and writes a file, whole or not at all. ERR_IO, which is logged. */
int state_dir_write(struct state_dir *dir, uint64_t id, char *data, size_t size);
/* Renames a refused file, and logs why. False: it keeps its name, and is refused again at the next
 * start. */
bool state_dir_put_aside(const struct state_dir *dir, uint64_t id, const char *why);
void state_dir_delete(const struct state_dir *dir, uint64_t id, bool bad);
/* Makes deletions durable. */
void state_dir_sync(struct state_dir *dir);

#endif
