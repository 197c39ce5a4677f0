/* Copies conversations to state files and back.
 *
 * A conversation is written when it was idle for a while, when the engine drains, and when its
 * pages or its place are needed. In the last case the job that needs them waits until the
 * conversation is copied out, not until it is on disk. A conversation's slot never changes, so the
 * copy is spread over steps: each step copies whole streams until options.copy_bytes are reached,
 * and answers continue meanwhile.
 *
 * A conversation is read back for the first job that waits. The store reads and checks the file;
 * then a conversation with all its pages and its place is added to the table, marked `arriving`,
 * and its streams are copied in over steps. The job is tried again after a change, not in every
 * step. */
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "engine/steps/sched_int.h"

#define LOOK_NS 100000000 /* between searches of the table */
#define LIST_NS 500000000 /* the longest wait for a listing of the directory */

static struct kern *kern_of(const struct sched *sched) {
    return sched->options.kern;
}

static int block_count(const struct sched *sched) {
    return 1 + (int)sched_streams(sched) + sched->options.shape.states;
}

bool sched_wants_saving(const struct sched *sched, const struct conversation *conv) {
    return sched->options.store && !sched->saving_ended && conv->saved == CONVERSATION_UNSAVED &&
           !conversation_superseded(conv) && !conv->checkpoint && state_holds(&conv->kv);
}

/* ---- Out ---- */

/* Has the jobs tried again that wait until a conversation may be removed. */
static void save_went_on(struct sched *sched) {
    sched_retry_head(sched);
    sched->saves++;
}

/* Drops an unfinished copy. Once the store has the file, the other members of `export` stay,
 * because take_saved needs them. */
static void cancel_export(struct sched *sched) {
    if (!sched->export.data) return;
    mem_free(sched->export.data);
    sched->export = (struct sched_export){0};
    save_went_on(sched);
}

static void give_up(struct sched *sched, struct conversation *conv, const char *why) {
    log_warn("conversation=%016llx cannot be written: %s", (unsigned long long)conv->id, why);
    conv->saved = CONVERSATION_FAILED;
    sched->counters.state_failed++;
    save_went_on(sched);
}

static void fill_head(const struct sched *sched, const struct conversation *conv,
                      struct state_head *head) {
    *head = (struct state_head){.identity = *store_identity(sched->options.store),
                                .id = conv->id,
                                .hint = conv->hint,
                                .saved_unix = clock_unix_seconds(),
                                .ttl = conv->ttl,
                                .kv = conv->kv,
                                .token_count = conv->token_count,
                                .prompt_end = conv->prompt_end,
                                .evicted_at = conv->evicted_at,
                                .fresh = conv->exact && conv->began.tokens == 0,
                                .block_count = block_count(sched)};
    memcpy(head->space, conv->space, sizeof head->space);
    memcpy(&head->client, conv->client, sizeof head->client);
    head->prompt_hash = conversation_hash(CONVERSATION_HASH, conv->tokens, conv->prompt_end);
    head->token_hash = conversation_hash(head->prompt_hash, conv->tokens + conv->prompt_end,
                                         conv->token_count - conv->prompt_end);
}

/* Fills in the size of every block; returns their sum, 0 when the backend fails. */
static size_t measure(struct sched *sched, const struct conversation *conv, uint64_t *sizes) {
    struct kern *kern = kern_of(sched);
    size_t total = 0;
    for (int i = 0; i < block_count(sched); i++) {
        sizes[i] = kern->ops->snapshot_size(kern, conv->slot, i);
        if (sizes[i] == 0) return 0;
        total += (size_t)sizes[i];
    }
    return total;
}

uint64_t sched_name(const struct sched *sched, const struct conversation *conv) {
    struct state_head head;
    if (!sched->options.store || !state_holds(&conv->kv)) return 0;
    fill_head(sched, conv, &head);
    return state_name(&head);
}

/* The bytes of a conversation whose file made room for others and has room again, with `more` bytes
 * beside it; 0 for any other conversation. */
static int64_t returning_bytes(struct sched *sched, const struct conversation *conv, int64_t more) {
    bool on_disk = conv->id != 0 && conv->saved == CONVERSATION_SAVED && !conv->checkpoint;
    if (!on_disk || conversation_superseded(conv) || store_has(sched->options.store, conv->id))
        return 0;
    uint64_t *sizes = mem_try_alloc((size_t)block_count(sched), sizeof *sizes);
    size_t bytes = sizes ? measure(sched, conv, sizes) : 0;
    mem_free(sizes);
    if (bytes == 0) return 0;
    int64_t size = (int64_t)state_file_size(conv->token_count, block_count(sched), bytes);
    return store_may_return(sched->options.store, conv->id, size + more) ? size : 0;
}

/* When the engine drains, writes those again that were deleted to make room and have room now. */
static void return_deleted(struct sched *sched) {
    struct conversation_table *table = &sched->conversations;
    int64_t sum = 0;
    for (int i = 0; i < table->capacity; i++) {
        int64_t bytes = returning_bytes(sched, &table->all[i], sum);
        if (bytes > 0) table->all[i].saved = CONVERSATION_UNSAVED;
        sum += bytes;
    }
}

static void begin_export(struct sched *sched, struct conversation *conv) {
    struct sched_export *export = &sched->export;
    CHECK(!export->data);
    conv->asked = false; /* an order to write is for this write */
    uint64_t *sizes = mem_try_alloc((size_t)block_count(sched), sizeof *sizes);
    size_t bytes = sizes ? measure(sched, conv, sizes) : 0;
    size_t size = bytes > 0 ? state_file_size(conv->token_count, block_count(sched), bytes) : 0;
    char *data = size > 0 ? mem_try_alloc(size, 1) : NULL;
    if (!data) {
        give_up(sched, conv, "no memory for the copy, or the backend failed");
    } else {
        fill_head(sched, conv, &export->head);
        export->head.file_size = size;
        export->at = state_write_head(&export->head, conv->tokens, sizes, data);
        export->size = size;
        export->block = 0;
        export->replaces = conv->replaces;
        export->made_room = false;
        export->data = data;
    }
    mem_free(sizes);
}

/* Copies blocks until `most` bytes are copied; with the last block the file is handed to the store.
 */
static void go_on_exporting(struct sched *sched, size_t most) {
    struct sched_export *export = &sched->export;
    struct kern *kern = kern_of(sched);
    struct conversation *conv = conversation_by_id(&sched->conversations, export->head.id);
    CHECK(conv); /* dropping a conversation cancels its export */
    for (size_t copied = 0; export->block < block_count(sched) && copied < most; export->block++) {
        size_t size = kern->ops->snapshot_size(kern, conv->slot, export->block);
        int rc =
            kern->ops->snapshot_export(kern, conv->slot, export->block, export->data + export->at);
        if (rc != 0) {
            give_up(sched, conv, err_text(rc));
            cancel_export(sched);
            return;
        }
        export->at += size;
        copied += size;
        sched->counters.copied++;
    }
    if (export->block < block_count(sched)) return;
    CHECK(export->at + STATE_SEAL_BYTES == export->size);
    store_save(sched->options.store, &export->head, export->data, export->size);
    export->data = NULL;
    conv->saved = CONVERSATION_WRITING;
    save_went_on(sched); /* the pages may be freed now */
}

/* Deletes the file of a superseded state, which is useless once its successor is on disk. */
static void remove_replaced(struct sched *sched, uint64_t id) {
    struct conversation *old = conversation_by_id(&sched->conversations, id);
    if (id == 0 || (old && !conversation_superseded(old))) return;
    if (old) old->saved = CONVERSATION_UNSAVED; /* a request may still continue it */
    store_remove_replaced(sched->options.store, id);
}

/* Lets failed conversations be written again: after a write that succeeded, and once when the
 * engine drains. */
static void retry_failed(struct sched *sched) {
    struct conversation_table *table = &sched->conversations;
    for (int i = 0; i < table->capacity; i++)
        if (table->all[i].saved == CONVERSATION_FAILED) table->all[i].saved = CONVERSATION_UNSAVED;
}

void sched_count_lost(struct sched *sched, uint64_t id) {
    sched->counters.state_lost++;
    log_warn("conversation=%016llx is lost: it made room and could not be written",
             (unsigned long long)id);
}

static enum conversation_saved saved_by(int rc) {
    if (rc == 0) return CONVERSATION_SAVED;
    return rc == ERR_LIMIT ? CONVERSATION_NOT_SAVABLE : CONVERSATION_FAILED;
}

static void take_saved(struct sched *sched) {
    const struct sched_export *export = &sched->export;
    const struct state_head *head = &export->head;
    uint64_t id;
    int rc;
    if (!store_saved(sched->options.store, &id, &rc)) return;
    save_went_on(sched); /* the next conversation can be written now */
    struct conversation *conv = conversation_by_id(&sched->conversations, id);
    if (conv) {
        /* A conversation that was repeated meanwhile has the same name and is written again. */
        if (conv->saved == CONVERSATION_WRITING) conv->saved = saved_by(rc);
    } else if (rc != 0 && export->made_room) {
        conversation_note_gone(&sched->conversations, head->space, head->prompt_end,
                               head->prompt_hash);
        sched_count_lost(sched, id);
    }
    if (rc != 0) return;
    remove_replaced(sched, export->replaces);
    retry_failed(sched);
}

bool sched_save_for_room(struct sched *sched, struct conversation *conv) {
    struct sched_export *export = &sched->export;
    if (!sched_wants_saving(sched, conv)) return true;
    take_saved(sched);
    if (!export->data && store_can_save(sched->options.store)) {
        begin_export(sched, conv);
        if (export->data) go_on_exporting(sched, sched->options.copy_bytes);
    }
    return !sched_wants_saving(sched, conv);
}

bool sched_saves(const struct sched *sched) {
    return sched->export.data || !store_can_save(sched->options.store);
}

static void end_import(struct sched *sched) {
    store_unload(sched->options.store);
    sched->import = (struct sched_import){0};
    sched_retry_head(sched); /* a job that waits for it searches again */
}

void sched_forget_copying(struct sched *sched, const struct conversation *conv) {
    if (sched->export.data && sched->export.head.id == conv->id) cancel_export(sched);
    if (sched->import.id == conv->id) end_import(sched);
}

/* Returns the conversation to write next: the least recently used of those that were idle for long
 * enough, or of all. */
static struct conversation *next_to_save(struct sched *sched, int64_t now_ns, bool all) {
    struct conversation_table *table = &sched->conversations;
    struct conversation *next = NULL;
    int64_t idle = sched->options.save_idle_ns;
    for (int i = 0; i < table->capacity; i++) {
        struct conversation *conv = &table->all[i];
        if (conv->id == 0) continue;
        if (!all && !conv->asked && now_ns - conv->last_used_ns < idle) continue;
        if (!sched_wants_saving(sched, conv)) continue;
        if (!next || conv->use < next->use) next = conv;
    }
    return next;
}

int sched_write(struct sched *sched, uint64_t id) {
    struct conversation *conv = conversation_by_id(&sched->conversations, id);
    if (!sched->options.store) return ERR_NOTFOUND;
    if (!conv || conv->arriving) return store_has(sched->options.store, id) ? 0 : ERR_NOTFOUND;
    switch (conv->saved) {
    case CONVERSATION_SAVED:
        if (store_has(sched->options.store, id)) return 0;
        conv->saved = CONVERSATION_UNSAVED; /* the file made room for others */
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
    conv->asked = sched_wants_saving(sched, conv);
    return conv->asked ? ERR_BUSY : ERR_UNSUPPORTED;
}

static void go_on_importing(struct sched *sched, size_t most);

/* Wakes the head once the store has read the file that it waits for, or failed to. */
static void wake_head(struct sched *sched) {
    if (sched->awaited == 0 || store_loading(sched->options.store, sched->awaited)) return;
    sched->awaited = 0;
    sched_retry_head(sched);
}

/* Has the wait for a listing lasted too long? The thread that lists may be writing to a slow disk,
 * or one that hangs, and others wait behind the head. The steps are those for which others may pass
 * it; the time counts when nothing runs. Either decides only whether a conversation is found. */
static bool list_overdue(const struct sched *sched, int64_t now_ns) {
    return sched->counters.steps - sched->listing.asked_step >= SCHED_PASS_STEPS ||
           now_ns - sched->listing.asked_ns >= LIST_NS;
}

/* Tries the waiting jobs again once the directory is listed, or without a listing in the end. */
static void wake_listed(struct sched *sched, int64_t now_ns) {
    struct sched_listing *listing = &sched->listing;
    if (listing->after_ns == 0) return;
    if (listing->asked_ns == 0) {
        listing->asked_ns = now_ns;
        listing->asked_step = sched->counters.steps;
    }
    if (!store_fresh(sched->options.store, listing->after_ns)) {
        if (!list_overdue(sched, now_ns)) return;
        listing->forgone_ns = now_ns;
    }
    listing->after_ns = listing->asked_ns = 0;
    sched_changed(sched);
}

/* May the index be searched for the job? It may not while it lacks what other daemons had written
 * when the job came, unless the job has waited too long for that. */
static bool is_listed(struct sched *sched, struct engine_job *job) {
    if (job->queued_ns <= sched->listing.forgone_ns) return true;
    if (store_fresh(sched->options.store, job->queued_ns)) return true;
    int64_t *after = &sched->listing.after_ns; /* the oldest job's: newer ones delay nobody */
    if (*after == 0 || job->queued_ns < *after) *after = job->queued_ns;
    job->wait = SCHED_WAIT_LIST;
    return false;
}

void sched_save(struct sched *sched, int64_t now_ns, bool all) {
    struct store *store = sched->options.store;
    if (!store) return;
    wake_head(sched);
    wake_listed(sched, now_ns);
    take_saved(sched);
    if (all && !sched->saving_all) {
        retry_failed(sched);
        return_deleted(sched);
    }
    sched->saving_all = all;
    bool look = all || sched->options.save_idle_ns == 0 || now_ns - sched->looked_ns > LOOK_NS;
    if (look && !sched->export.data && store_can_save(store)) {
        struct conversation *conv = next_to_save(sched, now_ns, all);
        sched->looked_ns = now_ns;
        if (conv) begin_export(sched, conv);
    }
    if (sched->export.data) go_on_exporting(sched, sched->options.copy_bytes);
    if (sched->import.id != 0) go_on_importing(sched, sched->options.copy_bytes);
    (void)sched_make_place(sched, 0);
}

void sched_end_saving(struct sched *sched) {
    cancel_export(sched);
    if (sched->import.id != 0) end_import(sched);
    sched->saving_ended = true;
}

bool sched_copying(const struct sched *sched) {
    return sched->export.data || sched->import.id != 0;
}

bool sched_unsaved(struct sched *sched) {
    const struct conversation_table *table = &sched->conversations;
    if (!sched->options.store) return false;
    if (sched->export.data || !store_can_save(sched->options.store)) return true;
    for (int i = 0; i < table->capacity; i++) {
        const struct conversation *conv = &table->all[i];
        if (conv->id != 0 && sched_wants_saving(sched, conv)) return true;
        if (sched->saving_all) continue;
        if (conv->saved == CONVERSATION_FAILED) return true; /* once more */
        if (!sched->saving_ended && returning_bytes(sched, conv, 0) > 0) return true;
    }
    return false;
}

int64_t sched_next_save_ns(const struct sched *sched) {
    const struct conversation_table *table = &sched->conversations;
    int64_t next = INT64_MAX;
    if (!sched->options.store || sched->saving_ended) return next;
    if (!store_can_save(sched->options.store)) return next;
    if (table->count > sched->options.conversations_max) return 0;
    for (int i = 0; i < table->capacity; i++) {
        const struct conversation *conv = &table->all[i];
        if (conv->id == 0 || !sched_wants_saving(sched, conv)) continue;
        int64_t due = conv->asked ? 0 : conv->last_used_ns + sched->options.save_idle_ns;
        if (due < next) next = due;
    }
    int64_t look = sched->looked_ns + LOOK_NS + 1;
    return next < look ? look : next;
}

void sched_save_close(struct sched *sched) {
    cancel_export(sched);
    if (sched->import.id != 0) end_import(sched);
}

/* ---- Back ---- */

enum restored { RESTORED, NOT_THIS_ONE, NOT_YET, GIVE_UP };

static int32_t *copy_tokens(const struct state_view *view) {
    size_t count = (size_t)view->head.token_count;
    int32_t *tokens = mem_try_alloc(count, sizeof *tokens);
    if (tokens) memcpy(tokens, view->tokens, count * sizeof *tokens);
    return tokens;
}

/* The conversation counts for the quota of the job that asked for it, the head. */
static void add_row(struct sched *sched, const struct state_view *view, int32_t *tokens) {
    int64_t entries = (int64_t)view->report.entries, count = sched_streams(sched);
    const struct state_head *head = &view->head;
    struct conversation conv = {.id = head->id,
                                .hint = head->hint,
                                .ttl = head->ttl,
                                .kv = head->kv,
                                .tokens = tokens,
                                .token_count = head->token_count,
                                .prompt_end = head->prompt_end,
                                .held = (int32_t)((entries + count - 1) / count),
                                .fullest = sched_fullest(sched, &view->report),
                                .entries = entries,
                                .pages = view->report.rank_pages,
                                .slot = sched_take_slot(sched),
                                .evicted_at = head->evicted_at,
                                .exact = head->fresh,
                                .saved = CONVERSATION_SAVED,
                                .arriving = true};
    memcpy(conv.space, head->space, sizeof conv.space);
    memcpy(conv.client, sched->head->request.owner, sizeof conv.client);
    conv.kv.whole = sched->options.kv.defaults.whole;
    if (sched_shifts(sched, conv.token_count) > 0) conv.kv.places = sched->options.kv.positions;
    conversation_add(&sched->conversations, &conv, clock_ns());
}

/* Gives up restoring: the request starts without the conversation, and the file stays as it is. */
static enum restored give_up_restoring(struct sched *sched, uint64_t id, const char *why) {
    log_warn("conversation=%016llx on disk cannot be used now: %s", (unsigned long long)id, why);
    sched->head_lost = ENGINE_MISS_UNREADABLE;
    return GIVE_UP;
}

/* Copies blocks until `most` bytes are copied. After the last block the conversation is like
 * any other, and the file stays as its copy. */
static void go_on_importing(struct sched *sched, size_t most) {
    struct kern *kern = kern_of(sched);
    struct sched_import *import = &sched->import;
    struct conversation *conv = conversation_by_id(&sched->conversations, import->id);
    CHECK(conv); /* dropping a conversation ends its import */
    for (size_t copied = 0; import->block < block_count(sched) && copied < most; import->block++) {
        const struct kern_block *block = &import->view->blocks[import->block];
        int rc = kern->ops->snapshot_import(kern, conv->slot, import->block, block);
        if (rc != 0) {
            if (import->for_head) (void)give_up_restoring(sched, conv->id, err_text(rc));
            sched_drop(sched, conv, "not restored");
            return;
        }
        copied += block->size;
        sched->counters.copied++;
    }
    if (import->block < block_count(sched)) return;
    conv->arriving = false;
    sched->counters.state_restored++;
    end_import(sched);
}

/* Begins to import a file that was read and checked. Its pages and its place must be free before
 * anything is copied. */
static enum restored begin_import(struct sched *sched, const struct state_view *view) {
    bool used_up;
    uint64_t id = view->head.id;
    int64_t pages = sched_pages_with(sched, view->report.rank_pages, view->head.token_count);
    if (pages > sched->options.pages_total) {
        log_warn("conversation=%016llx on disk has more pages than the pool",
                 (unsigned long long)id);
        sched->head_lost = ENGINE_MISS_TOO_LARGE;
        store_ignore(sched->options.store, id);
        return NOT_THIS_ONE;
    }
    /* The head must not wait for running requests of its own client: others wait for the head. */
    if (pages > queue_pages_left(&sched->queue, sched->head)) {
        sched->head_lost = ENGINE_MISS_TOO_LARGE;
        return GIVE_UP;
    }
    if (!sched_make_room(sched, sched->head, pages, NULL, &used_up)) return NOT_YET;
    if (!sched_make_place(sched, 1)) {
        sched->head->wait = SCHED_WAIT_STORE;
        return NOT_YET;
    }
    int32_t *tokens = copy_tokens(view);
    if (!tokens) return give_up_restoring(sched, id, err_text(ERR_NOMEM));
    add_row(sched, view, tokens);
    sched->import = (struct sched_import){.id = id, .view = view, .for_head = true};
    sched->head->wait = SCHED_WAIT_ARRIVAL;
    go_on_importing(sched, sched->options.copy_bytes);
    if (sched->import.id != 0) return NOT_YET;
    return sched->head_lost == ENGINE_MISS_UNREADABLE ? GIVE_UP : RESTORED;
}

/* Handles an error of store_load. */
static enum restored not_loaded(struct sched *sched, uint64_t id, int rc) {
    switch (rc) {
    case ERR_BUSY:
        sched->awaited = id;
        sched->head->wait = SCHED_WAIT_STORE;
        return NOT_YET;
    case ERR_MALFORMED:
    case ERR_INVALID:
    case ERR_UNSUPPORTED:
        sched->head_lost = ENGINE_MISS_DAMAGED;
        return NOT_THIS_ONE;
    case ERR_LIMIT:
        sched->head_lost = ENGINE_MISS_TOO_LARGE;
        return NOT_THIS_ONE;
    case ERR_NOTFOUND: /* deleted meanwhile */
        return NOT_THIS_ONE;
    default:
        return give_up_restoring(sched, id, err_text(rc));
    }
}

static enum restored restore_one(struct sched *sched, uint64_t id) {
    struct store *store = sched->options.store;
    const struct state_view *view = NULL;
    if (conversation_by_id(&sched->conversations, id)) {
        store_ignore(store, id); /* a hash collision: equal hashes, different tokens */
        return NOT_THIS_ONE;
    }
    if (sched->import.id != 0) return NOT_YET; /* one import at a time; its end wakes the head */
    int rc = store_load(store, id, &view);
    if (rc != 0) return not_loaded(sched, id, rc);
    enum restored result = begin_import(sched, view);
    if (result == NOT_THIS_ONE || result == GIVE_UP) store_unload(store);
    return result;
}

/* Searches the disk once for the first waiting job, and again only after a change that may change
 * the result. */
static uint64_t find_on_disk(struct sched *sched, const struct conversation_query *query,
                             int32_t least) {
    struct sched_search *search = &sched->search;
    struct store *store = sched->options.store;
    uint64_t changes = store_changes(store);
    if (search->made && search->changes == changes && search->least == least) return search->id;
    uint64_t id = store_find(store, query, least);
    *search = (struct sched_search){true, changes, least, id};
    return id;
}

void sched_end_waiting(struct sched *sched) {
    sched->awaited = 0;
    sched->import.for_head = false;
    if (sched->options.store && sched->import.id == 0) store_unload(sched->options.store);
}

bool sched_restore(struct sched *sched, struct sched_entry *entry,
                   const struct conversation_query *query) {
    if (!sched->options.store || sched->conversations.capacity == 0) return true;
    if (!is_listed(sched, entry->job)) return false;
    entry->job->wait = SCHED_WAIT_ARRIVAL;
    /* The store reads only for the head; a passing job that could use a file waits until it is the
     * head. */
    if (entry->passing)
        return (!entry->match.conv || !entry->match.conv->arriving) &&
               store_find(sched->options.store, query,
                          entry->match.conv ? entry->match.common : 0) == 0;
    for (enum restored result = RESTORED; result != GIVE_UP;) {
        const struct conversation_match *match = &entry->match;
        if (match->conv && match->conv->arriving) return false;
        if (sched->head_lost == ENGINE_MISS_UNREADABLE) break;
        uint64_t id = find_on_disk(sched, query, match->common);
        if (id == 0) break;
        result = restore_one(sched, id);
        if (result == NOT_YET) return false;
        entry->match = conversation_find(&sched->conversations, query);
    }
    if ((!entry->match.conv || entry->match.cut) && sched->head_lost != ENGINE_MISS_NEW)
        entry->match.miss = sched->head_lost;
    return true;
}
