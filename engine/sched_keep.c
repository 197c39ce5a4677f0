/* What stays: conversations between turns, found, continued, superseded and forgotten. */
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "engine/sched_int.h"

void sched_drop(struct sched *sched, struct conversation *row, const char *why) {
    sched_forget_copying(sched, row);
    struct conversation gone = conversation_take(&sched->conversations, row);
    log_debug("conversation=%016llx gone reason=%s tokens=%d pages=%lld",
              (unsigned long long)gone.id, why, gone.token_count, (long long)gone.pages);
    sched_release_slot(sched, gone.slot);
    mem_free(gone.tokens);
}

/* Its file may have had to go meanwhile. */
static bool is_on_disk(const struct sched *sched, const struct conversation *row) {
    return row->saved == CONVERSATION_WRITING ||
           (row->saved == CONVERSATION_SAVED && store_has(sched->options.store, row->id));
}

/* For lack of room: unless it is on disk, a later request may miss it, and shall learn why. */
static void forget(struct sched *sched, struct conversation *row, const char *why) {
    if (!is_on_disk(sched, row))
        conversation_note_gone(&sched->conversations, row->space, row->prompt_end,
                               row->prompt_hash);
    if (row->saved == CONVERSATION_WRITING) sched->export.made_room = true;
    if (row->saved == CONVERSATION_FAILED || row->saved == CONVERSATION_NOT_SAVABLE)
        sched_count_lost(sched, row->id);
    sched_drop(sched, row, why);
}

/* ---- Room ------------------------------------------------------------------------------------ */

/* Pages not promised to anybody: retained conversations hold theirs. */
static int64_t pages_free(const struct sched *sched) {
    return sched->options.pages_total - sched->pages_reserved - sched->conversations.pages;
}

bool sched_make_room(struct sched *sched, int64_t pages, const struct conversation *row,
                     bool *used_up) {
    int64_t left = sched->options.pages_total - sched->pages_reserved;
    *used_up = row != NULL && pages + row->pages > left;
    int64_t own = *used_up ? row->pages : 0;
    if (pages > left) return false;
    while (pages > pages_free(sched) + own) {
        struct conversation *first = conversation_first_to_go(&sched->conversations, row);
        if (first == NULL) return false;
        if (!sched_save_for_room(sched, first)) {
            sched->needs_store = true;
            return false;
        }
        forget(sched, first, "pages");
    }
    return true;
}

/* ---- Going on -------------------------------------------------------------------------------- */

bool sched_find(struct sched *sched, struct sched_entry *entry) {
    const struct engine_request *request = &entry->job->request;
    struct conversation_query query = {.space = request->space,
                                       .kv = &entry->kv,
                                       .prompt = request->prompt,
                                       .prompt_count = request->prompt_count,
                                       .hint = request->hint};
    entry->wants_conversation = request->kv.reuse && !request->prompt_logprobs;
    if (!entry->wants_conversation) return true;
    entry->row = conversation_find(&sched->conversations, &query, &entry->common, &entry->miss);
    return sched_restore(sched, entry, &query);
}

/* The row's streams in a slot of the sequence's own. */
static int fork_row(struct sched *sched, struct sequence *seq, struct conversation *row) {
    struct kern *kern = sched->options.kern;
    seq->slot = sched_take_slot(sched);
    conversation_touch(&sched->conversations, row, seq->job->request.hint, clock_ns());
    return kern->ops->fork(kern, row->slot, seq->slot);
}

static void take_row(struct sched *sched, struct sequence *seq, struct conversation *row) {
    sched_forget_copying(sched, row);
    struct conversation taken = conversation_take(&sched->conversations, row);
    seq->slot = taken.slot;
    mem_free(taken.tokens);
}

/* Whose file goes when a successor of `row` is on disk: its own, or what it was to replace. */
static uint64_t file_of(const struct conversation *row) {
    bool has_one = row->saved == CONVERSATION_SAVED || row->saved == CONVERSATION_WRITING;
    return has_one ? row->id : row->replaces;
}

int sched_go_on(struct sched *sched, struct sequence *seq, const struct sched_entry *entry,
                bool used_up) {
    struct kern *kern = sched->options.kern;
    struct kern_report report = {0};
    int64_t streams = sched_streams(sched);
    int code = 0;
    seq->origin = entry->row->id;
    seq->origin_file = entry->row->turns == 0 ? file_of(entry->row) : 0;
    seq->dropped = entry->row->token_count - entry->common;
    if (used_up)
        take_row(sched, seq, entry->row);
    else
        code = fork_row(sched, seq, entry->row);
    if (code == 0 && seq->dropped > 0) code = kern->ops->truncate(kern, seq->slot, entry->common);
    if (code == 0) code = kern->ops->report(kern, seq->slot, &report);
    if (code != 0) return code;
    seq->due.tokens = entry->common;
    seq->due.held = (int32_t)(((int64_t)report.entries + streams - 1) / streams);
    seq->due.prompt_new = seq->prompt_count - entry->common;
    seq->job->cached_tokens = entry->common;
    return 0;
}

/* ---- Keeping --------------------------------------------------------------------------------- */

/* Several went on from it: it stays, and so does its file when one of them is on disk. */
static void keep_file(struct sched *sched, uint64_t id) {
    struct conversation_table *table = &sched->conversations;
    for (int i = 0; i < table->capacity; i++)
        if (table->rows[i].replaces == id) table->rows[i].replaces = 0;
    if (sched->export.replaces == id) sched->export.replaces = 0;
}

/* The turn a new one came from: once it is superseded, the one before it goes, so that a dialogue
 * keeps its last state and one to retry from. Returns whose file the new one will replace. */
static uint64_t supersede(struct sched *sched, const struct sequence *seq) {
    struct conversation_table *table = &sched->conversations;
    struct conversation *from = conversation_by_id(table, seq->origin);
    if (from == NULL) return seq->origin_file;
    struct conversation *before = conversation_by_id(table, from->origin);
    if (before != NULL && conversation_superseded(before)) sched_drop(sched, before, "superseded");
    conversation_followed(table, from);
    if (!conversation_superseded(from)) {
        keep_file(sched, from->id);
        return 0;
    }
    if (from->saved == CONVERSATION_UNSAVED) sched_forget_copying(sched, from);
    return file_of(from);
}

/* The list had room for the longest answer; failing to give the rest back costs only memory. */
static int32_t *take_tokens(struct sequence *seq) {
    size_t used = (size_t)seq->due.tokens * sizeof *seq->tokens;
    int32_t *tokens = mem_try_realloc(seq->tokens, used, used);
    if (tokens == NULL) tokens = seq->tokens;
    seq->tokens = NULL;
    return tokens;
}

void sched_retain(struct sched *sched, struct sequence *seq, const struct kern_report *report) {
    struct conversation_table *table = &sched->conversations;
    int64_t entries = (int64_t)report->entries, count = sched_streams(sched);
    struct conversation row = {.kv = seq->kv,
                               .hint = seq->job->request.hint,
                               .tokens = take_tokens(seq),
                               .token_count = seq->due.tokens,
                               .prompt_end = seq->prompt_count,
                               .held = (int32_t)((entries + count - 1) / count),
                               .fullest = sched_fullest(sched, report),
                               .entries = entries,
                               .pages = report->rank_pages,
                               .slot = seq->slot,
                               .origin = seq->origin};
    memcpy(row.space, seq->job->request.space, sizeof row.space);
    struct conversation *same = conversation_same(table, &row);
    if (same != NULL) {
        row.turns = same->turns; /* whoever went on from it goes on from this one, too */
        row.replaces = file_of(same);
        sched_drop(sched, same, "repeated");
    } else {
        row.replaces = supersede(sched, seq);
    }
    (void)sched_make_place(sched, 1); /* if not now, then later: see sched_open */
    conversation_add(table, &row, clock_ns());
}

bool sched_make_place(struct sched *sched, int more) {
    struct conversation_table *table = &sched->conversations;
    while (table->count + more > sched->options.conversations_max) {
        struct conversation *first = conversation_first_to_go(table, NULL);
        if (!sched_save_for_room(sched, first)) return false;
        forget(sched, first, "count");
    }
    return true;
}

static int remove_from_disk(struct sched *sched, uint64_t id) {
    struct store *store = sched->options.store;
    return store != NULL && id != 0 ? store_remove(store, id) : ERR_NOTFOUND;
}

int sched_delete(struct sched *sched, uint64_t id) {
    struct conversation_table *table = &sched->conversations;
    struct conversation *row = conversation_by_id(table, id);
    int code = remove_from_disk(sched, id);
    if (row == NULL) return code;
    struct conversation *before = conversation_by_id(table, row->origin);
    if (before == NULL || conversation_superseded(before)) {
        (void)remove_from_disk(sched, row->replaces);
        if (before != NULL) sched_drop(sched, before, "deleted");
    }
    sched_drop(sched, row, "deleted");
    return 0;
}
