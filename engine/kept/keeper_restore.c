/* Finds the conversation that serves a request best, and reads it back from disk.
 *
 * Only the head of the queue has a file read. The store reads and checks it; then a conversation
 * with all its pages and its place is added to the table, marked `arriving`, and its streams are
 * copied into the cache over steps. The request is tried again after changes, not in every step. */
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "engine/kept/keeper_int.h"

#define LIST_NS 500000000 /* the longest wait for a listing of the directory */

/* ---- Copying in ---- */

void keeper_end_import(struct keeper *keeper) {
    if (keeper->import.id == 0) return;
    store_unload(keeper->options.store);
    keeper->import = (struct keeper_import){0};
    keeper_note_head_change(keeper); /* a request that waits for it searches again */
}

static void log_unusable(struct keeper *keeper, uint64_t id, const char *why) {
    log_warn("conversation=%016llx on disk cannot be used now: %s", (unsigned long long)id, why);
    keeper->search.lost = ENGINE_MISS_UNREADABLE;
}

void keeper_continue_import(struct keeper *keeper, size_t most) {
    struct kern *kern = keeper->options.kern;
    struct keeper_import *import = &keeper->import;
    struct conversation *conv = conversation_by_id(&keeper->table, import->id);
    const int blocks = keeper_block_count(keeper);
    CHECK(conv && conv->arriving); /* dropping a conversation ends its import */
    for (size_t copied = 0; import->block < blocks && copied < most; import->block++) {
        const struct kern_block *block = &import->view->blocks[import->block];
        int rc = kern->ops->snapshot_import(kern, conv->slot, import->block, block);
        if (rc != 0) {
            if (import->for_head) log_unusable(keeper, conv->id, err_text(rc));
            keeper_drop(keeper, conv, "not restored");
            return;
        }
        copied += block->size;
        keeper->counters->copied++;
    }
    if (import->block < blocks) return;
    conv->arriving = false;
    keeper->counters->state_restored++;
    keeper_end_import(keeper);
}

/* Adds the conversation that arrives; it counts for the quota of the request that asked for it. */
static bool add_arriving(struct keeper *keeper, const struct keeper_claim *claim,
                         const struct state_view *view) {
    const struct state_head *head = &view->head;
    size_t count = (size_t)head->token_count;
    int32_t *tokens = mem_try_alloc(count, sizeof *tokens);
    if (!tokens) return false;
    memcpy(tokens, view->tokens, count * sizeof *tokens);
    struct conversation conv = {.id = head->id,
                                .hint = head->hint,
                                .ttl = head->ttl,
                                .kv = head->kv,
                                .tokens = tokens,
                                .token_count = head->token_count,
                                .prompt_end = head->prompt_end,
                                .slot = keeper_alloc_slot(keeper),
                                .evicted_at = head->evicted_at,
                                .exact = head->fresh,
                                .saved = CONVERSATION_SAVED,
                                .arriving = true};
    keeper_measure(keeper, &view->report, &conv);
    memcpy(conv.space, head->space, sizeof conv.space);
    memcpy(conv.client, claim->client, sizeof conv.client);
    conv.kv.whole = keeper->options.whole;
    if (keeper_shifts(keeper, conv.token_count) > 0) conv.kv.places = keeper->options.positions;
    conversation_add(&keeper->table, &conv, clock_ns());
    return true;
}

/* ---- One file ---- */

/* Results of an attempt to restore a conversation. WAIT: it is not there yet. START_WITHOUT: the
 * request starts without it, and the file stays as it is. */
enum restored { RESTORED, NOT_THIS_ONE, WAIT, START_WITHOUT };

/* Begins to import a file that was read and checked. Its pages and its place must be free before
 * anything is copied. */
static enum restored begin_import(struct keeper *keeper, struct keeper_claim *claim,
                                  const struct state_view *view, enum engine_wait *wait) {
    bool consumed;
    uint64_t id = view->head.id;
    int64_t pages = keeper_pages_with(keeper, view->report.rank_pages, view->head.token_count);
    if (pages > keeper->options.pages_total) {
        log_warn("conversation=%016llx on disk has more pages than the pool",
                 (unsigned long long)id);
        keeper->search.lost = ENGINE_MISS_TOO_LARGE;
        store_ignore(keeper->options.store, id);
        return NOT_THIS_ONE;
    }
    /* The head must not wait for running requests of its own client, because others wait for the
     * head. */
    if (pages > claim->quota) {
        keeper->search.lost = ENGINE_MISS_TOO_LARGE;
        return START_WITHOUT;
    }
    *wait = keeper_reclaim(keeper, claim, pages, NULL, &consumed);
    if (!*wait && !keeper_reclaim_places(keeper, 1)) *wait = ENGINE_WAIT_STORE;
    if (*wait) return WAIT;
    if (!add_arriving(keeper, claim, view)) {
        log_unusable(keeper, id, err_text(ERR_NOMEM));
        return START_WITHOUT;
    }
    keeper->import = (struct keeper_import){.id = id, .view = view, .for_head = true};
    *wait = ENGINE_WAIT_ARRIVAL;
    keeper_continue_import(keeper, keeper->options.copy_bytes);
    if (keeper->import.id != 0) return WAIT;
    return keeper->search.lost == ENGINE_MISS_UNREADABLE ? START_WITHOUT : RESTORED;
}

/* Handles an error of store_load. */
static enum restored note_not_loaded(struct keeper *keeper, uint64_t id, int rc,
                                     enum engine_wait *wait) {
    switch (rc) {
    case ERR_BUSY:
        keeper->search.awaited = id;
        *wait = ENGINE_WAIT_STORE;
        return WAIT;
    case ERR_MALFORMED:
    case ERR_INVALID:
    case ERR_UNSUPPORTED:
        keeper->search.lost = ENGINE_MISS_DAMAGED;
        return NOT_THIS_ONE;
    case ERR_LIMIT:
        keeper->search.lost = ENGINE_MISS_TOO_LARGE;
        return NOT_THIS_ONE;
    case ERR_NOTFOUND: /* deleted meanwhile */
        return NOT_THIS_ONE;
    default:
        log_unusable(keeper, id, err_text(rc));
        return START_WITHOUT;
    }
}

static enum restored restore_one(struct keeper *keeper, struct keeper_claim *claim, uint64_t id,
                                 enum engine_wait *wait) {
    struct store *store = keeper->options.store;
    const struct state_view *view = NULL;
    *wait = ENGINE_WAIT_ARRIVAL;
    if (conversation_by_id(&keeper->table, id)) {
        store_ignore(store, id); /* a hash collision: equal hashes, different tokens */
        return NOT_THIS_ONE;
    }
    if (keeper->import.id != 0) return WAIT; /* one import at a time; its end wakes the head */
    int rc = store_load(store, id, &view);
    if (rc != 0) return note_not_loaded(keeper, id, rc, wait);
    enum restored result = begin_import(keeper, claim, view, wait);
    if (result == NOT_THIS_ONE || result == START_WITHOUT) store_unload(store);
    return result;
}

/* ---- The search ---- */

/* Returns whether the index may be searched for the request. It may not while it lacks what other
 * daemons had written when the request came, unless the request has waited too long for that. */
static bool is_listed(struct keeper *keeper, int64_t queued_ns) {
    if (queued_ns <= keeper->listing.forgone_ns) return true;
    if (store_fresh(keeper->options.store, queued_ns)) return true;
    int64_t *after = &keeper->listing.after_ns; /* the oldest request's */
    if (*after == 0 || queued_ns < *after) *after = queued_ns;
    return false;
}

/* Searches the disk once for the head, and again only after a change that may change the result. */
static uint64_t search_disk(struct keeper *keeper, const struct conversation_query *query,
                            int32_t least) {
    struct keeper_search *search = &keeper->search;
    struct store *store = keeper->options.store;
    uint64_t changes = store_changes(store);
    if (search->made && search->changes == changes && search->least == least) return search->id;
    search->id = store_find(store, query, least);
    search->made = true;
    search->changes = changes;
    search->least = least;
    return search->id;
}

/* Restores the conversation on disk that the head of the queue would use. */
static enum engine_wait restore_for_head(struct keeper *keeper, struct keeper_find *find) {
    enum engine_wait wait = ENGINE_WAIT_ARRIVAL;
    for (enum restored result = RESTORED; result != START_WITHOUT;) {
        if (find->match.conv && find->match.conv->arriving) return ENGINE_WAIT_ARRIVAL;
        if (keeper->search.lost == ENGINE_MISS_UNREADABLE) break;
        uint64_t id = search_disk(keeper, find->query, find->match.common);
        if (id == 0) break;
        result = restore_one(keeper, &find->claim, id, &wait);
        if (result == WAIT) return wait;
        find->match = conversation_find(&keeper->table, find->query);
    }
    if ((!find->match.conv || find->match.cut) && keeper->search.lost != ENGINE_MISS_NEW)
        find->match.miss = keeper->search.lost;
    return ENGINE_WAIT_NOTHING;
}

enum engine_wait keeper_find(struct keeper *keeper, struct keeper_find *find) {
    const struct conversation_match *match = &find->match;
    find->match = conversation_find(&keeper->table, find->query);
    keeper->counters->searches++;
    if (!keeper->options.store || keeper->table.capacity == 0) return ENGINE_WAIT_NOTHING;
    if (!is_listed(keeper, find->queued_ns)) return ENGINE_WAIT_LIST;
    if (find->is_head) return restore_for_head(keeper, find);
    /* A request that could use a file waits until it is the head. */
    bool waits = (match->conv && match->conv->arriving) ||
                 store_find(keeper->options.store, find->query, match->conv ? match->common : 0);
    return waits ? ENGINE_WAIT_ARRIVAL : ENGINE_WAIT_NOTHING;
}

void keeper_end_search(struct keeper *keeper) {
    keeper->search = (struct keeper_search){.lost = ENGINE_MISS_NEW};
    keeper->import.for_head = false;
    if (keeper->options.store && keeper->import.id == 0) store_unload(keeper->options.store);
}

/* ---- Ends of waits ---- */

/* Lets waiting requests be tried once the directory is listed, or in the end without a listing. */
static void end_list_wait(struct keeper *keeper, int64_t now_ns) {
    struct keeper_listing *listing = &keeper->listing;
    if (listing->after_ns == 0) return;
    if (listing->asked_ns == 0) {
        listing->asked_ns = now_ns;
        listing->asked_step = keeper->counters->steps;
    }
    if (!store_fresh(keeper->options.store, listing->after_ns)) {
        /* The thread that lists may be writing to a slow disk, or one that hangs, and others wait
         * behind the head. The steps are those for which others may pass it; the time counts when
         * nothing runs. Either decides only whether a conversation is found. */
        if (keeper->counters->steps - listing->asked_step < KEEPER_LIST_STEPS &&
            now_ns - listing->asked_ns < LIST_NS)
            return;
        listing->forgone_ns = now_ns;
    }
    listing->after_ns = listing->asked_ns = 0;
    keeper_note_change(keeper);
}

void keeper_end_waits(struct keeper *keeper, int64_t now_ns) {
    uint64_t awaited = keeper->search.awaited;
    if (awaited != 0 && !store_loading(keeper->options.store, awaited)) {
        keeper->search.awaited = 0; /* the store has read the file, or failed to */
        keeper_note_head_change(keeper);
    }
    end_list_wait(keeper, now_ns);
}
