/* Index of the files in a state directory, by id, by prompt and by the time of their last use. The
 * index is only in memory: it is built from the files' heads, and every change of a file updates
 * it.
 *
 * The index belongs to the stores of one directory. Calls are made under their lock, or before a
 * second thread can see the index. Entries are found, added and removed in constant time. */
#ifndef KEEPD_ENGINE_DISK_STORE_INDEX_H
#define KEEPD_ENGINE_DISK_STORE_INDEX_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/disk/state.h"
#include "engine/disk/store.h"

/* The files of one client together. */
struct store_holder {
    struct store_holder *next; /* in its bucket */
    uint64_t client;
    int files;
    int64_t bytes;
};

/* One file of the directory, as described by its head. */
struct store_file {
    struct state_head head;
    struct store_file *next_of_id, *next_of_prompt; /* in their buckets */
    struct store_file *older, *newer;               /* by their last use */
    int64_t bytes, used_unix;
    int64_t used_ns;           /* the file's time stamp when this daemon looked last */
    int64_t own_ns;            /* time stamp when this daemon used the file; 0: never */
    uint64_t seen;             /* number of the last listing that showed it */
    bool bad;                  /* <id>.bad */
    bool ours;                 /* written by this model with these gates, and not bad */
    bool ignored;              /* this process cannot use it */
    const struct store *owner; /* the store that made or found it; NULL: none yet */
    struct store_holder *holder;
};

enum { STORE_HOLDER_BUCKETS = 1024 };

struct store_index {
    struct store_file *by_id[STORE_FILES_MAX], *by_prompt[STORE_FILES_MAX]; /* buckets */
    struct store_holder *holders[STORE_HOLDER_BUCKETS];
    struct store_file *oldest, *newest;
    int count, ours;
    int64_t bytes;
    uint64_t changes; /* grows when the result of a search may have changed */
};

struct store_file *store_index_find(const struct store_index *index, uint64_t id, bool bad);
/* Returns the first file whose prompt may have this hash; next_of_prompt links the others. */
struct store_file *store_index_of_prompt(const struct store_index *index, const uint8_t space[16],
                                         uint64_t hash);
/* Adds a copy of the entry as the newest. ERR_LIMIT, ERR_NOMEM. */
int store_index_add(struct store_index *index, const struct store_file *copy);
void store_index_drop(struct store_index *index, struct store_file *file); /* frees it, too */
/* Marks a file as refused, so that no search returns it; `aside`: it was renamed to <id>.bad. */
void store_index_refuse(struct store_index *index, struct store_file *file, bool aside);
/* Makes a file the newest that was used at this time, by whichever daemon. 0: unknown. */
void store_index_touch(struct store_index *index, struct store_file *file, int64_t used_unix,
                       int64_t used_ns);
/* Returns the file that goes first where room is needed: that for which the seconds since its last
 * use, times the bytes of its client, are most; of equal ones the oldest. NULL: there is no file.
 * So a client that holds much deletes its own files first, and files of clients that are away do
 * not stay for ever. Reads the files that are older. */
const struct store_file *store_index_first_to_go(const struct store_index *index, int64_t now_unix);
/* Sorts by last use, after files were added in any order. ERR_NOMEM: they stay in the order of
 * adding. */
int store_index_sort(struct store_index *index);
void store_index_close(struct store_index *index); /* drops all entries */

#endif
