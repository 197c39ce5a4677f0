#include "engine/disk/store_index.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

static struct store_file **bucket_of_id(struct store_index *index, uint64_t id) {
    return &index->by_id[id % STORE_FILES_MAX];
}

/* Spaces are secret hashes. A client may learn its own, but not that of another, so it cannot
 * choose prompts that fill the bucket of one. */
static size_t prompt_bucket(const uint8_t space[16], uint64_t hash) {
    uint64_t secret;
    memcpy(&secret, space, sizeof secret);
    return (hash ^ secret) % STORE_FILES_MAX;
}

static struct store_file **bucket_of_prompt(struct store_index *index,
                                            const struct store_file *file) {
    return &index->by_prompt[prompt_bucket(file->head.space, file->head.prompt_hash)];
}

struct store_file *store_index_find(const struct store_index *index, uint64_t id, bool bad) {
    struct store_file *file = index->by_id[id % STORE_FILES_MAX];
    while (file && (file->head.id != id || file->bad != bad)) file = file->next_of_id;
    return file;
}

struct store_file *store_index_of_prompt(const struct store_index *index, const uint8_t space[16],
                                         uint64_t hash) {
    return index->by_prompt[prompt_bucket(space, hash)];
}

static void unlink_age(struct store_index *index, struct store_file *file) {
    *(file->older ? &file->older->newer : &index->oldest) = file->newer;
    *(file->newer ? &file->newer->older : &index->newest) = file->older;
}

static void link_newest(struct store_index *index, struct store_file *file) {
    file->older = index->newest;
    file->newer = NULL;
    *(index->newest ? &index->newest->newer : &index->oldest) = file;
    index->newest = file;
}

static struct store_holder **find_file_holder(struct store_index *index, uint64_t client) {
    struct store_holder **link = &index->holders[client % STORE_HOLDER_BUCKETS];
    while (*link && (*link)->client != client) link = &(*link)->next;
    return link;
}

/* Adds a file to the sums of its client. false: no memory. */
static bool join_file_holder(struct store_index *index, struct store_file *file) {
    struct store_holder **link = find_file_holder(index, file->head.client);
    if (!*link) {
        *link = mem_try_alloc(1, sizeof **link);
        if (!*link) return false;
        (*link)->client = file->head.client;
    }
    (*link)->files++;
    (*link)->bytes += file->bytes;
    file->holder = *link;
    return true;
}

static void release_file_holder(struct store_index *index, const struct store_file *file) {
    struct store_holder *holder = file->holder;
    holder->bytes -= file->bytes;
    if (--holder->files > 0) return;
    *find_file_holder(index, holder->client) = holder->next;
    mem_free(holder);
}

void store_index_drop(struct store_index *index, struct store_file *file) {
    struct store_file **link = bucket_of_id(index, file->head.id);
    while (*link != file) link = &(*link)->next_of_id;
    *link = file->next_of_id;
    link = bucket_of_prompt(index, file);
    while (*link != file) link = &(*link)->next_of_prompt;
    *link = file->next_of_prompt;
    unlink_age(index, file);
    release_file_holder(index, file);
    index->count--;
    index->changes++;
    index->bytes -= file->bytes;
    index->ours -= file->ours;
    mem_free(file);
}

int store_index_add(struct store_index *index, const struct store_file *copy) {
    if (index->count >= STORE_FILES_MAX) return ERR_LIMIT;
    struct store_file *file = mem_try_alloc(1, sizeof *file);
    if (!file) return ERR_NOMEM;
    *file = *copy;
    if (!join_file_holder(index, file)) {
        mem_free(file);
        return ERR_NOMEM;
    }
    struct store_file **of_id = bucket_of_id(index, file->head.id);
    struct store_file **of_prompt = bucket_of_prompt(index, file);
    file->next_of_id = *of_id;
    *of_id = file;
    file->next_of_prompt = *of_prompt;
    *of_prompt = file;
    link_newest(index, file);
    index->count++;
    index->changes++;
    index->bytes += file->bytes;
    index->ours += file->ours;
    return 0;
}

static int compare_age(const void *a, const void *b) {
    const struct store_file *x = *(struct store_file *const *)a,
                            *y = *(struct store_file *const *)b;
    if (x->used_unix != y->used_unix) return x->used_unix < y->used_unix ? -1 : 1;
    return (x->used_ns > y->used_ns) - (x->used_ns < y->used_ns);
}

int store_index_sort(struct store_index *index) {
    size_t count = 0;
    if (index->count == 0) return 0;
    struct store_file **all = mem_try_alloc((size_t)index->count, sizeof(struct store_file *));
    if (!all) return ERR_NOMEM;
    for (struct store_file *file = index->oldest; file; file = file->newer) all[count++] = file;
    qsort(all, count, sizeof *all, compare_age);
    index->oldest = index->newest = NULL;
    for (size_t i = 0; i < count; i++) link_newest(index, all[i]);
    mem_free(all);
    return 0;
}

void store_index_refuse(struct store_index *index, struct store_file *file, bool aside) {
    index->ours -= file->ours;
    index->changes++;
    file->bad = aside;
    file->ours = false;
}

void store_index_touch(struct store_index *index, struct store_file *file, int64_t used_unix,
                       int64_t used_ns) {
    file->used_unix = used_unix;
    if (used_ns > 0) file->used_ns = used_ns;
    unlink_age(index, file);
    link_newest(index, file);
}

const struct store_file *store_index_first_to_go(const struct store_index *index,
                                                 int64_t now_unix) {
    const struct store_file *first = NULL;
    double most = 0;
    for (const struct store_file *file = index->oldest; file; file = file->newer) {
        double age = now_unix > file->used_unix ? (double)(now_unix - file->used_unix) + 1 : 1;
        double weight = age * (double)file->holder->bytes;
        if (weight > most || !first) {
            first = file;
            most = weight;
        }
        if (age * (double)index->bytes <= most) break; /* the others are newer */
    }
    return first;
}

void store_index_close(struct store_index *index) {
    while (index->oldest) store_index_drop(index, index->oldest);
}
