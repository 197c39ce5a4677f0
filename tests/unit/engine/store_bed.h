/* Stores in a temporary directory, for tests: their files, and what is asked of them. */
#ifndef KEEPD_TESTS_STORE_BED_H
#define KEEPD_TESTS_STORE_BED_H

#include <criterion/criterion.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "engine/disk/store.h"

/* ---- A directory ---- */

static char dir[64];

static inline void make_dir(void) {
    strcpy(dir, "/tmp/keepd-store-XXXXXX");
    cr_assert_not_null(mkdtemp(dir));
}

static inline const char *path_of(const char *name) {
    static char path[512];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static inline void remove_dir(void) {
    DIR *list = opendir(dir);
    const struct dirent *entry;
    while ((entry = readdir(list)) != NULL)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
            if (unlink(path_of(entry->d_name)) != 0) rmdir(path_of(entry->d_name));
        }
    closedir(list);
    cr_assert_eq(rmdir(dir), 0);
}

static inline int files_with(const char *suffix) {
    DIR *list = opendir(dir);
    const struct dirent *entry;
    int count = 0;
    while ((entry = readdir(list)) != NULL) {
        const char *dot = strrchr(entry->d_name, '.');
        count += dot && strcmp(dot, suffix) == 0;
    }
    closedir(list);
    return count;
}

/* ---- A store ---- */

static inline struct store_options options_of(void) {
    return (struct store_options){
        .dir = dir,
        .bytes = 1 << 20,
        .identity = {.weights = "w", .dtype = KERN_F32, .layers = 1, .heads_kv = 1, .head_dim = 16},
        .inline_io = true};
}

static inline struct store *open_store(void) {
    struct store_options options = options_of();
    struct store *store;
    struct fault fault = {0};
    cr_assert_eq(store_open(&options, &store, &fault), 0, "%s", fault.text);
    return store;
}

static inline struct kv_params kv_of(int budget) {
    struct kv_params kv = {.budget = budget, .buffer = 8, .chunk = 16};
    kv_params_set_policy(&kv, policy_find("global"));
    return kv;
}

enum { PROMPT = 20, TOKENS = 30 };

static inline void fill_tokens(int32_t *tokens, int seed, int count) {
    for (int i = 0; i < count; i++) tokens[i] = seed * 1000 + i;
}

static uint64_t file_client; /* the client of the next files */

/* The file of conversation `seed`, of `room` bytes beside its head. */
static inline char *make_living_file(struct store *store, int seed, size_t room, int32_t ttl,
                                     struct state_head *head) {
    int32_t tokens[TOKENS];
    uint64_t sizes[] = {room, 0};
    fill_tokens(tokens, seed, TOKENS);
    *head = (struct state_head){.identity = *store_identity(store),
                                .id = 500 + (uint64_t)seed,
                                .space = "space",
                                .client = file_client,
                                .ttl = ttl,
                                .kv = kv_of(32),
                                .token_count = TOKENS,
                                .prompt_end = PROMPT,
                                .block_count = 2,
                                .file_size = state_file_size(TOKENS, 2, room)};
    head->prompt_hash = conversation_hash(CONVERSATION_HASH, tokens, PROMPT);
    head->token_hash = conversation_hash(CONVERSATION_HASH, tokens, TOKENS);
    char *data = mem_must_alloc(head->file_size, 1);
    memset(data + state_write_head(head, tokens, sizes, data), seed, room);
    return data;
}

static inline char *make_file(struct store *store, int seed, size_t room, struct state_head *head) {
    return make_living_file(store, seed, room, 0, head);
}

static inline int save(struct store *store, int seed, size_t room) {
    struct state_head head;
    uint64_t id = 0;
    int rc = 1;
    char *data = make_file(store, seed, room, &head);
    cr_assert(store_can_save(store));
    store_save(store, &head, data, head.file_size);
    cr_assert(store_saved(store, &id, &rc) && !store_saved(store, &id, &rc));
    cr_assert_eq(id, 500 + (uint64_t)seed);
    return rc;
}

/* Searches with a prompt of the first `count` tokens of conversation `seed` and one more. */
static inline uint64_t find(struct store *store, int seed, int count, const char *space, int budget,
                            int32_t least) {
    uint8_t bytes[16] = {0};
    int32_t prompt[TOKENS + 1];
    struct kv_params kv = kv_of(budget);
    memcpy(bytes, space, strlen(space));
    fill_tokens(prompt, seed, count);
    prompt[count] = 7;
    struct conversation_query query = {
        .space = bytes, .kv = &kv, .prompt = prompt, .prompt_count = count + 1};
    return store_find(store, &query, least);
}

static inline int load(struct store *store, uint64_t id) {
    const struct state_view *view = NULL;
    int rc = store_load(store, id, &view);
    if (rc != 0) return rc;
    cr_assert_eq(view->head.id, id);
    cr_assert_eq(((const char *)view->blocks[0].data)[0], (char)(id - 500));
    store_unload(store);
    return 0;
}

static inline struct store_stats stats_of(struct store *store) {
    struct store_stats stats;
    store_stats(store, &stats);
    return stats;
}

#endif
