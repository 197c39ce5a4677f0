/* Index of the files in a state directory, by id, by prompt and by the time of their last use. In
 * memory only; the files' heads tell, whoever changes a file tells the index.
 *
 * It belongs to the stores of one directory; calls are made under their lock, or before they share
 * it. Entries are found, added and removed in constant time. */
#ifndef KEEPD_ENGINE_STORE_INDEX_H
#define KEEPD_ENGINE_STORE_INDEX_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/state.h"
#include "engine/store.h"

/* One file of the directory, as its head tells. */
struct store_file {
    struct state_head head;
    struct store_file *next_of_id, *next_of_prompt; /* in their buckets */
    struct store_file *older, *newer;               /* by their last use */
    int64_t bytes, used_unix;
    bool bad;                  /* <id>.bad */
    bool ours;                 /* written by this model with these gates, and not bad */
    bool ignored;              /* by this process */
    const struct store *owner; /* the store that made or found it; NULL: none yet */
};

struct store_index {
    struct store_file *by_id[STORE_FILES_MAX], *by_prompt[STORE_FILES_MAX]; /* buckets */
    struct store_file *oldest, *newest;
    int count, ours;
    int64_t bytes;
    uint64_t changes; /* grows when a search may find something else */
};

struct store_file *store_index_find(const struct store_index *index, uint64_t id, bool bad);
/* The first of those whose prompt may have this hash; more by next_of_prompt. */
struct store_file *store_index_of_prompt(const struct store_index *index, const uint8_t space[16],
                                         uint64_t hash);
/* A copy of the entry, as the newest. ERR_LIMIT, ERR_NOMEM. */
int store_index_add(struct store_index *index, const struct store_file *copy);
void store_index_drop(struct store_index *index, struct store_file *file); /* and frees it */
/* It serves nobody any more; `aside`: it has the other name. */
void store_index_refuse(struct store_index *index, struct store_file *file, bool aside);
void store_index_touch(struct store_index *index, struct store_file *file, int64_t now_unix);
/* After files were added in any order. ERR_NOMEM: the order is that of adding. */
int store_index_sort(struct store_index *index);
void store_index_close(struct store_index *index); /* drops all */

#endif
