/* Copies conversations to state files.
 *
 * A conversation is written when it was idle for a while, when the engine drains, and when its
 * pages or its place are needed. In the last case the request that needs them waits until the
 * conversation is copied out, not until it is on disk. A conversation's slot never changes, so the
 * copy is spread over steps: each step copies whole streams until options.copy_bytes are reached,
 * and answers continue meanwhile. */
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "engine/kept/keeper_int.h"

#define SEARCH_NS 100000000 /* time between searches of the table */

bool keeper_wants_saving(const struct keeper *keeper, const struct conversation *conv) {
    return keeper->options.store && !keeper->saving_ended && conv->saved == CONVERSATION_UNSAVED &&
           !conversation_superseded(conv) && !conv->checkpoint && state_holds(&conv->kv);
}

/* Notes a change that may end the wait of requests for a conversation to be removed. */
static void note_save_change(struct keeper *keeper) {
    keeper_note_head_change(keeper);
    keeper->saves++;
}

/* Drops an unfinished copy. Once the store has the file, the other members of `export` stay,
 * because note_written needs them. */
static void cancel_export(struct keeper *keeper) {
    if (!keeper->export.data) return;
    mem_free(keeper->export.data);
    keeper->export = (struct keeper_export){0};
    note_save_change(keeper);
}

static void note_failed_save(struct keeper *keeper, struct conversation *conv, const char *why) {
    log_warn("conversation=%016llx cannot be written: %s", (unsigned long long)conv->id, why);
    conv->saved = CONVERSATION_FAILED;
    keeper->counters->state_failed++;
    note_save_change(keeper);
}

static void fill_state_head(const struct keeper *keeper, const struct conversation *conv,
                            struct state_head *head) {
    *head = (struct state_head){.identity = *store_identity(keeper->options.store),
                                .id = conv->id,
                                .hint = conv->hint,
                                .saved_unix = clock_unix_seconds(),
                                .ttl = conv->ttl,
                                .kv = conv->kv,
                                .token_count = conv->token_count,
                                .prompt_end = conv->prompt_end,
                                .evicted_at = conv->evicted_at,
                                .fresh = conv->exact && conv->began.tokens == 0,
                                .block_count = keeper_block_count(keeper)};
    memcpy(head->space, conv->space, sizeof head->space);
    memcpy(&head->client, conv->client, sizeof head->client);
    head->prompt_hash = conversation_hash(CONVERSATION_HASH, conv->tokens, conv->prompt_end);
    head->token_hash = conversation_hash(head->prompt_hash, conv->tokens + conv->prompt_end,
                                         conv->token_count - conv->prompt_end);
}

/* Fills in the size of every block; returns their sum, 0 when the backend fails. */
static size_t measure_blocks(struct keeper *keeper, const struct conversation *conv,
                             uint64_t *sizes) {
    struct kern *kern = keeper->options.kern;
    size_t total = 0;
    for (int i = 0; i < keeper_block_count(keeper); i++) {
        sizes[i] = kern->ops->snapshot_size(kern, conv->slot, i);
        if (sizes[i] == 0) return 0;
        total += (size_t)sizes[i];
    }
    return total;
}

uint64_t keeper_name(const struct keeper *keeper, const struct conversation *conv) {
    struct state_head head;
    if (!keeper->options.store || !state_holds(&conv->kv)) return 0;
    fill_state_head(keeper, conv, &head);
    return state_name(&head);
}

/* Returns the bytes of a conversation whose file was deleted to make room and fits again, beside
 * `more` bytes; 0 for any other conversation. */
static int64_t returning_bytes(struct keeper *keeper, const struct conversation *conv,
                               int64_t more) {
    bool on_disk = conv->id != 0 && conv->saved == CONVERSATION_SAVED && !conv->checkpoint;
    if (!on_disk || conversation_superseded(conv) || store_has(keeper->options.store, conv->id))
        return 0;
    uint64_t *sizes = mem_try_alloc((size_t)keeper_block_count(keeper), sizeof *sizes);
    size_t bytes = sizes ? measure_blocks(keeper, conv, sizes) : 0;
    mem_free(sizes);
    if (bytes == 0) return 0;
    int64_t size = (int64_t)state_file_size(conv->token_count, keeper_block_count(keeper), bytes);
    return store_may_return(keeper->options.store, conv->id, size + more) ? size : 0;
}

/* When the engine drains, marks conversations whose files were deleted to make room, and fit again,
 * to be written once more. */
static void return_deleted(struct keeper *keeper) {
    struct conversation_table *table = &keeper->table;
    int64_t sum = 0;
    for (int i = 0; i < table->capacity; i++) {
        int64_t bytes = returning_bytes(keeper, &table->all[i], sum);
        if (bytes > 0) table->all[i].saved = CONVERSATION_UNSAVED;
        sum += bytes;
    }
}

static void begin_export(struct keeper *keeper, struct conversation *conv) {
    struct keeper_export *export = &keeper->export;
    CHECK(!export->data);
    conv->asked = false; /* this write carries out an order to write */
    uint64_t *sizes = mem_try_alloc((size_t)keeper_block_count(keeper), sizeof *sizes);
    size_t bytes = sizes ? measure_blocks(keeper, conv, sizes) : 0;
    size_t size =
        bytes > 0 ? state_file_size(conv->token_count, keeper_block_count(keeper), bytes) : 0;
    char *data = size > 0 ? mem_try_alloc(size, 1) : NULL;
    if (!data) {
        note_failed_save(keeper, conv, "no memory for the copy, or the backend failed");
    } else {
        fill_state_head(keeper, conv, &export->head);
        export->head.file_size = size;
        export->at = state_write_head(&export->head, conv->tokens, sizes, data);
        export->size = size;
        export->block = 0;
        export->replaces = conv->replaces;
        export->displaced = false;
        export->data = data;
    }
    mem_free(sizes);
}

/* Copies blocks until `most` bytes are copied; after the last block the store gets the file. */
static void continue_export(struct keeper *keeper, size_t most) {
    struct keeper_export *export = &keeper->export;
    struct kern *kern = keeper->options.kern;
    struct conversation *conv = conversation_by_id(&keeper->table, export->head.id);
    CHECK(conv); /* dropping a conversation cancels its export */
    for (size_t copied = 0; export->block < keeper_block_count(keeper) && copied < most;
         export->block++) {
        size_t size = kern->ops->snapshot_size(kern, conv->slot, export->block);
        int rc =
            kern->ops->snapshot_export(kern, conv->slot, export->block, export->data + export->at);
        if (rc != 0) {
            note_failed_save(keeper, conv, err_text(rc));
            cancel_export(keeper);
            return;
        }
        export->at += size;
        copied += size;
        keeper->counters->copied++;
    }
    if (export->block < keeper_block_count(keeper)) return;
    CHECK(export->at + STATE_SEAL_BYTES == export->size);
    store_save(keeper->options.store, &export->head, export->data, export->size);
    export->data = NULL;
    conv->saved = CONVERSATION_WRITING;
    note_save_change(keeper); /* the pages may be freed now */
}

/* Lets failed conversations be written again: after a write that succeeded, and once when the
 * engine drains. */
static void retry_failed(struct keeper *keeper) {
    struct conversation_table *table = &keeper->table;
    for (int i = 0; i < table->capacity; i++)
        if (table->all[i].saved == CONVERSATION_FAILED) table->all[i].saved = CONVERSATION_UNSAVED;
}

void keeper_count_lost(struct keeper *keeper, uint64_t id) {
    keeper->counters->state_lost++;
    log_warn("conversation=%016llx is lost: it made room and could not be written",
             (unsigned long long)id);
}

static void note_written(struct keeper *keeper) {
    const struct keeper_export *export = &keeper->export;
    const struct state_head *head = &export->head;
    uint64_t id;
    int rc;
    if (!store_saved(keeper->options.store, &id, &rc)) return;
    note_save_change(keeper); /* the next conversation can be written now */
    struct conversation *conv = conversation_by_id(&keeper->table, id);
    if (conv) {
        /* A conversation that was repeated meanwhile has the same name and is written again. */
        if (conv->saved == CONVERSATION_WRITING)
            conv->saved = rc == 0           ? CONVERSATION_SAVED
                          : rc == ERR_LIMIT ? CONVERSATION_NOT_SAVABLE
                                            : CONVERSATION_FAILED;
    } else if (rc != 0 && export->displaced) {
        conversation_note_gone(&keeper->table, head->space, head->prompt_end, head->prompt_hash);
        keeper_count_lost(keeper, id);
    }
    if (rc != 0) return;
    /* The file of a superseded state is useless now that its successor is on disk. */
    struct conversation *old = conversation_by_id(&keeper->table, export->replaces);
    if (export->replaces != 0 && (!old || conversation_superseded(old))) {
        if (old) old->saved = CONVERSATION_UNSAVED; /* a request may still continue it */
        store_remove_replaced(keeper->options.store, export->replaces);
    }
    retry_failed(keeper);
}

bool keeper_save_first(struct keeper *keeper, struct conversation *conv) {
    struct keeper_export *export = &keeper->export;
    if (!keeper_wants_saving(keeper, conv)) return true;
    note_written(keeper);
    if (!export->data && store_can_save(keeper->options.store)) {
        begin_export(keeper, conv);
        if (export->data) continue_export(keeper, keeper->options.copy_bytes);
    }
    return !keeper_wants_saving(keeper, conv);
}

bool keeper_saving(const struct keeper *keeper) {
    CHECK(keeper->options.store);
    return keeper->export.data || !store_can_save(keeper->options.store);
}

void keeper_cancel_copies(struct keeper *keeper, const struct conversation *conv) {
    if (keeper->export.data && keeper->export.head.id == conv->id) cancel_export(keeper);
    if (keeper->import.id == conv->id) keeper_end_import(keeper);
}

/* Returns the conversation to write next: the least recently used of those that were idle for long
 * enough, or of all. */
static struct conversation *next_to_save(struct keeper *keeper, int64_t now_ns, bool all) {
    struct conversation_table *table = &keeper->table;
    struct conversation *next = NULL;
    int64_t idle = keeper->options.save_idle_ns;
    for (int i = 0; i < table->capacity; i++) {
        struct conversation *conv = &table->all[i];
        if (conv->id == 0) continue;
        if (!all && !conv->asked && now_ns - conv->last_used_ns < idle) continue;
        if (!keeper_wants_saving(keeper, conv)) continue;
        if (!next || conv->use < next->use) next = conv;
    }
    return next;
}

int keeper_write(struct keeper *keeper, uint64_t id) {
    struct conversation *conv = conversation_by_id(&keeper->table, id);
    if (!keeper->options.store) return ERR_NOTFOUND;
    if (!conv || conv->arriving) return store_has(keeper->options.store, id) ? 0 : ERR_NOTFOUND;
    switch (conv->saved) {
    case CONVERSATION_SAVED:
        if (store_has(keeper->options.store, id)) return 0;
        conv->saved = CONVERSATION_UNSAVED; /* the file was deleted to make room */
        break;
    case CONVERSATION_WRITING:
        return ERR_BUSY;
    case CONVERSATION_FAILED:
        return ERR_IO;
    case CONVERSATION_NOT_SAVABLE:
        return ERR_LIMIT;
    case CONVERSATION_UNSAVED:
        break;
    }
    conv->asked = keeper_wants_saving(keeper, conv);
    return conv->asked ? ERR_BUSY : ERR_UNSUPPORTED;
}

void keeper_save(struct keeper *keeper, int64_t now_ns, bool all) {
    struct store *store = keeper->options.store;
    if (!store) return;
    keeper_end_waits(keeper, now_ns);
    note_written(keeper);
    if (all && !keeper->saving_all) {
        retry_failed(keeper);
        return_deleted(keeper);
    }
    keeper->saving_all = all;
    bool search =
        all || keeper->options.save_idle_ns == 0 || now_ns - keeper->searched_ns > SEARCH_NS;
    if (search && !keeper->export.data && store_can_save(store)) {
        struct conversation *conv = next_to_save(keeper, now_ns, all);
        keeper->searched_ns = now_ns;
        if (conv) begin_export(keeper, conv);
    }
    if (keeper->export.data) continue_export(keeper, keeper->options.copy_bytes);
    if (keeper->import.id != 0) keeper_continue_import(keeper, keeper->options.copy_bytes);
    (void)keeper_reclaim_places(keeper, 0);
}

void keeper_end_saving(struct keeper *keeper) {
    cancel_export(keeper);
    keeper_end_import(keeper);
    keeper->saving_ended = true;
}

bool keeper_copying(const struct keeper *keeper) {
    return keeper->export.data || keeper->import.id != 0;
}

bool keeper_unsaved(struct keeper *keeper) {
    const struct conversation_table *table = &keeper->table;
    if (!keeper->options.store) return false;
    if (keeper->export.data || !store_can_save(keeper->options.store)) return true;
    for (int i = 0; i < table->capacity; i++) {
        const struct conversation *conv = &table->all[i];
        if (conv->id != 0 && keeper_wants_saving(keeper, conv)) return true;
        if (keeper->saving_all) continue;
        if (conv->saved == CONVERSATION_FAILED) return true; /* once more */
        if (!keeper->saving_ended && returning_bytes(keeper, conv, 0) > 0) return true;
    }
    return false;
}

int64_t keeper_next_save_ns(const struct keeper *keeper) {
    const struct conversation_table *table = &keeper->table;
    int64_t next = INT64_MAX;
    if (!keeper->options.store || keeper->saving_ended) return next;
    if (!store_can_save(keeper->options.store)) return next;
    if (table->count > keeper->options.conversations_max) return 0;
    for (int i = 0; i < table->capacity; i++) {
        const struct conversation *conv = &table->all[i];
        if (conv->id == 0 || !keeper_wants_saving(keeper, conv)) continue;
        int64_t due = conv->asked ? 0 : conv->last_used_ns + keeper->options.save_idle_ns;
        if (due < next) next = due;
    }
    int64_t search = keeper->searched_ns + SEARCH_NS + 1;
    return next < search ? search : next;
}
