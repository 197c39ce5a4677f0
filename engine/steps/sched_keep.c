/* Conversations between turns. A request looks for the conversation that saves it most tokens and
 * continues a fork of it; an answered sequence is kept as a conversation, and the one that it
 * continued becomes superseded. Conversations are removed here when their pages or their places are
 * needed. */
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "engine/steps/sched_int.h"

void sched_drop(struct sched *sched, struct conversation *conv, const char *why) {
    sched_forget_copying(sched, conv);
    struct conversation gone = conversation_take(&sched->conversations, conv);
    log_debug("conversation=%016llx gone reason=%s tokens=%d pages=%lld",
              (unsigned long long)gone.id, why, gone.token_count, (long long)gone.pages);
    sched_release_slot(sched, gone.slot);
    mem_free(gone.tokens);
}

/* Returns whether the conversation is on disk, or will be; the store may have deleted the file
 * meanwhile. */
static bool is_on_disk(const struct sched *sched, const struct conversation *conv) {
    return conv->saved == CONVERSATION_WRITING ||
           (conv->saved == CONVERSATION_SAVED && store_has(sched->options.store, conv->id));
}

/* Removes a conversation to make room. Unless it is on disk, it is noted as gone, so that a
 * later request that could have continued it reports why it cannot. */
void sched_forget(struct sched *sched, struct conversation *conv, const char *why) {
    sched->counters.prefixes_dropped += conv->prefix;
    if (!is_on_disk(sched, conv))
        conversation_note_gone(&sched->conversations, conv->space, conv->prompt_end,
                               conv->prompt_hash);
    if (conv->saved == CONVERSATION_WRITING) sched->export.made_room = true;
    if (conv->saved == CONVERSATION_FAILED || conv->saved == CONVERSATION_NOT_SAVABLE)
        sched_count_lost(sched, conv->id);
    sched_drop(sched, conv, why);
}

/* ---- Room ---- */

/* The lists of tokens and the pages share one bound, the size of the pool. With several ranks,
 * pages are those of one rank, and the lists exist once. Less than a page of lists in all is not
 * counted. */
int64_t sched_pages_with(const struct sched *sched, int64_t pages, int64_t tokens) {
    const struct sched_options *options = &sched->options;
    int64_t bytes = options->page_bytes * (options->shape.ranks > 1 ? options->shape.ranks : 1);
    return pages + (bytes > 0 ? tokens * (int64_t)sizeof(int32_t) / bytes : 0);
}

/* Returns the pages that are not reserved and that conversations other than `except` (NULL: none)
 * leave; below 0 when a conversation that has just been kept has more tokens than there is room
 * for. */
static int64_t pages_free_without(const struct sched *sched, const struct conversation *except) {
    const struct conversation_table *table = &sched->conversations;
    return sched->options.pages_total - sched->pages_reserved -
           sched_pages_with(sched, table->pages - (except ? except->pages : 0),
                            table->tokens - (except ? except->token_count : 0));
}

int64_t sched_pages_free(const struct sched *sched) {
    return pages_free_without(sched, NULL);
}

int64_t sched_quota_free(const struct sched *sched, const struct engine_job *job) {
    int64_t left = queue_pages_left(&sched->queue, job);
    if (left == INT64_MAX) return left;
    return left - conversation_pages_of(&sched->conversations, job->request.owner);
}

/* Removes the first conversation to go but `except`, one of the client's own unless `client` is
 * NULL. Returns false when there is none, or it has to be written first: then the job waits for
 * the store. */
static bool drop_first(struct sched *sched, struct engine_job *job, const uint8_t *client,
                       const struct conversation *except, bool pinned) {
    struct conversation *first =
        conversation_first_to_go(&sched->conversations, except, client, pinned, CONVERSATION_PAGES);
    if (!first) return false;
    if (!sched_save_for_room(sched, first)) {
        job->wait = SCHED_WAIT_STORE;
        return false;
    }
    sched_forget(sched, first, client ? "quota" : "pages");
    return true;
}

/* Tokens of conversations do not count for quotas. While a conversation must be written first, the
 * job waits aside: only its own client waits for the disk. */
static bool fit_quota(struct sched *sched, struct engine_job *job, int64_t pages,
                      const struct conversation *conv, bool *used_up) {
    const uint8_t *client = job->request.owner;
    int64_t quota = queue_pages_left(&sched->queue, job), own = 0;
    if (quota == INT64_MAX) return true;
    if (conv && memcmp(conv->client, client, sizeof conv->client) == 0) own = conv->pages;
    if (own > 0 && pages + own > quota) *used_up = true;
    if (!*used_up) own = 0;
    bool fits = pages <= quota;
    while (fits && pages > sched_quota_free(sched, job) + own) {
        fits = drop_first(sched, job, client, conv, true);
        if (!fits) job->saves = sched->saves;
    }
    if (!fits) job->wait = SCHED_WAIT_QUOTA;
    return fits;
}

/* Adds up the pins of the client, or of all for NULL, without that of `old` (NULL: none). */
static struct conversation_pins pins_without(const struct sched *sched, const uint8_t *client,
                                             const struct conversation *old) {
    struct conversation_pins pins = conversation_pins_of(&sched->conversations, client);
    if (!old || !old->pinned) return pins;
    if (client && memcmp(old->client, client, sizeof old->client) != 0) return pins;
    pins.count--;
    pins.pages -= old->pages;
    pins.tokens -= old->token_count;
    return pins;
}

/* A pin stays within the client's quota, and all pins within half of the pool and of the places, so
 * that others always find room. The pin of `old` (NULL: none) ends with it. */
static bool may_pin(const struct sched *sched, const struct engine_request *request,
                    const struct conversation *conv, const struct conversation *old) {
    struct conversation_pins own = pins_without(sched, request->owner, old);
    struct conversation_pins all = pins_without(sched, NULL, old);
    int64_t pages = sched_pages_with(sched, conv->pages, conv->token_count);
    return pages + sched_pages_with(sched, own.pages, own.tokens) <= request->pins_max &&
           pages + sched_pages_with(sched, all.pages, all.tokens) <=
               sched->options.pages_total / 2 &&
           all.count + 1 <= sched->options.conversations_max / 2;
}

/* Removes the first conversation to go; the client's own pinned ones where no other is left. */
static bool drop_first_for(struct sched *sched, struct engine_job *job,
                           const struct conversation *except, bool pinned) {
    bool any = conversation_first_to_go(&sched->conversations, except, NULL, pinned,
                                        CONVERSATION_PAGES) != NULL;
    return any ? drop_first(sched, job, NULL, except, pinned)
               : drop_first(sched, job, job->request.owner, except, true);
}

/* Adds up the pins of all clients but this one. */
static struct conversation_pins pins_of_others(const struct sched *sched, const uint8_t *client) {
    struct conversation_pins all = conversation_pins_of(&sched->conversations, NULL);
    struct conversation_pins own = conversation_pins_of(&sched->conversations, client);
    return (struct conversation_pins){.count = all.count - own.count,
                                      .pages = all.pages - own.pages,
                                      .tokens = all.tokens - own.tokens};
}

/* Other clients' pins stay, unless the job could not fit beside them even if nothing ran.
 * Everything else may go but `conv`, which is used up if the job does not fit beside it and the
 * pins that stay. So once nothing runs, the job fits. */
bool sched_make_room(struct sched *sched, struct engine_job *job, int64_t pages,
                     const struct conversation *conv, bool *used_up) {
    const uint8_t *client = job->request.owner;
    int64_t total = sched->options.pages_total, left = total - sched->pages_reserved;
    struct conversation_pins stay = pins_of_others(sched, client), with = {0};
    bool pinned = pages > total - sched_pages_with(sched, stay.pages, stay.tokens);
    if (pinned) stay = (struct conversation_pins){0};
    with = stay;
    bool stays =
        conv && conv->pinned && !pinned && memcmp(conv->client, client, sizeof conv->client) != 0;
    if (conv && !stays) {
        with.pages += conv->pages;
        with.tokens += conv->token_count;
    }
    job->wait = SCHED_WAIT_PAGES;
    *used_up = conv && !stays && pages > left - sched_pages_with(sched, with.pages, with.tokens);
    if (pages > left - sched_pages_with(sched, stay.pages, stay.tokens)) return false;
    if (!fit_quota(sched, job, pages, conv, used_up)) return false;
    while (pages > pages_free_without(sched, *used_up ? conv : NULL))
        if (!drop_first_for(sched, job, conv, pinned)) return false;
    return true;
}

/* ---- Going on ---- */

bool sched_find(struct sched *sched, struct sched_entry *entry) {
    const struct engine_request *request = &entry->job->request;
    struct conversation_query query = {.space = request->space,
                                       .kv = entry->job->params,
                                       .prompt = request->prompt,
                                       .prompt_count = request->prompt_count,
                                       .hint = request->hint};
    entry->wants_conversation = request->kv.reuse && !request->prompt_logprobs;
    if (!entry->wants_conversation) return true;
    entry->match = conversation_find(&sched->conversations, &query);
    sched->counters.searches++;
    return sched_restore(sched, entry, &query);
}

/* Forks the conversation's streams into a slot of the sequence. It takes the request's hint only
 * when both are of one dialogue. */
static int fork_row(struct sched *sched, struct sequence *seq,
                    const struct conversation_match *match) {
    struct kern *kern = sched->options.kern;
    struct conversation *conv = match->conv;
    seq->slot = sched_take_slot(sched);
    conversation_touch(&sched->conversations, conv,
                       match->from == conv->id ? seq->job->request.hint : conv->hint, clock_ns());
    if (conv->checkpoint) conversation_followed(&sched->conversations, conv);
    sched->counters.prefix_hits += conv->prefix;
    return kern->ops->fork(kern, conv->slot, seq->slot);
}

/* Drops a checkpoint with its turn, unless other dialogues continued the checkpoint. */
static void drop_left(struct sched *sched, struct conversation *conv) {
    struct conversation *checkpoint = conversation_by_id(&sched->conversations, conv->left);
    conv->left = 0;
    if (checkpoint && conversation_superseded(checkpoint))
        sched_drop(sched, checkpoint, "superseded");
}

/* The checkpoint of a turn that is used up goes with it: nothing else would delete it. */
static void take_row(struct sched *sched, struct sequence *seq, struct conversation *conv) {
    sched_forget_copying(sched, conv);
    struct conversation taken = conversation_take(&sched->conversations, conv);
    seq->slot = taken.slot;
    mem_free(taken.tokens);
    drop_left(sched, &taken);
}

/* Returns the file to delete when a successor of `conv` is on disk: its own, or the one it
 * replaces. */
static uint64_t file_of(const struct conversation *conv) {
    bool has_one = conv->saved == CONVERSATION_SAVED || conv->saved == CONVERSATION_WRITING;
    return has_one ? conv->id : conv->replaces;
}

void sched_note_origin(struct sched *sched, struct sequence *seq, uint64_t id) {
    const struct conversation *from = conversation_by_id(&sched->conversations, id);
    if (!from) return;
    seq->origin = from->id;
    seq->origin_file = from->turns == 0 ? file_of(from) : 0;
}

/* Sets the eviction state of a sequence that continues a conversation: that of the turn it
 * continues, or that of a new turn. */
static int begin_due(struct sched *sched, struct sequence *seq,
                     const struct conversation_match *match) {
    struct kern *kern = sched->options.kern;
    struct kern_report report = {0};
    int64_t streams = sched_streams(sched);
    if (match->exact) {
        seq->due = due_while_reading(&seq->kv, &seq->began, seq->began_held, seq->evicted_at,
                                     match->common, seq->prompt_count);
        return 0;
    }
    int rc = kern->ops->report(kern, seq->slot, &report);
    seq->due.tokens = match->common;
    seq->due.held =
        due_held_at(&seq->kv, (int32_t)(((int64_t)report.entries + streams - 1) / streams),
                    match->common, seq->evicted_at);
    seq->due.prompt_new = seq->prompt_count - match->common;
    seq->began_held = seq->due.held;
    return rc;
}

/* Tokens that were dropped may have used up places: the streams return to those of `to` tokens. */
static int shift_back(struct sched *sched, const struct sequence *seq, int32_t from, int32_t to) {
    struct kern *kern = sched->options.kern;
    const struct kern_shift shift = {.slot = seq->slot,
                                     .rule = &seq->kv.rule,
                                     .tokens = to,
                                     .from = sched_shifts(sched, from),
                                     .to = sched_shifts(sched, to)};
    return shift.from == shift.to ? 0 : kern->ops->shift(kern, &shift);
}

int sched_go_on(struct sched *sched, struct sequence *seq, const struct sched_entry *entry,
                bool used_up) {
    struct kern *kern = sched->options.kern;
    const struct conversation_match *match = &entry->match;
    int32_t count = match->conv->token_count, dropped = count - match->common;
    bool own = match->from == match->conv->id;
    int rc = 0;
    /* An eviction behind the common tokens belongs to what is dropped. */
    seq->evicted_at = match->conv->evicted_at;
    if (!match->exact && seq->evicted_at > match->common) seq->evicted_at = match->common;
    seq->began = entry->began;
    seq->began_held = match->conv->began_held;
    if (match->conv->ttl > 0 && match->conv->saved == CONVERSATION_SAVED)
        store_touch(sched->options.store, match->conv->id);
    if (used_up)
        take_row(sched, seq, match->conv);
    else
        rc = fork_row(sched, seq, match);
    if (rc == 0 && dropped > 0) rc = kern->ops->truncate(kern, seq->slot, match->common);
    if (rc == 0) rc = shift_back(sched, seq, count, match->common);
    if (rc == 0) rc = begin_due(sched, seq, match);
    if (rc != 0) return rc;
    seq->due.shifts = sched_shifts(sched, match->common);
    seq->dropped = own ? dropped : 0;
    seq->job->cached_tokens = match->common;
    atomic_store_explicit(&seq->job->prompt_read, (uint_fast32_t)match->common,
                          memory_order_relaxed);
    seq->job->cut = match->cut;
    return 0;
}

/* ---- Keeping ---- */

/* Several turns continued this conversation: it stays, and its file stays when one of those turns
 * is on disk. */
static void keep_file(struct sched *sched, uint64_t id) {
    struct conversation_table *table = &sched->conversations;
    for (int i = 0; i < table->capacity; i++)
        if (table->all[i].replaces == id) table->all[i].replaces = 0;
    if (sched->export.replaces == id) sched->export.replaces = 0;
}

void sched_drop_checkpoint(struct sched *sched, const struct sequence *seq) {
    struct conversation *conv = conversation_by_id(&sched->conversations, seq->left);
    if (conv && conversation_superseded(conv)) sched_drop(sched, conv, "left alone");
}

/* Marks the turn that the sequence continued as superseded and drops the superseded turn before it,
 * so that a dialogue keeps its last state and one to retry from. Returns the id of the file that
 * the new conversation will replace, 0: none. */
static uint64_t supersede(struct sched *sched, const struct sequence *seq) {
    struct conversation_table *table = &sched->conversations;
    struct conversation *from = conversation_by_id(table, seq->origin);
    if (!from) return seq->origin_file;
    struct conversation *before = conversation_by_id(table, from->origin);
    if (before && conversation_superseded(before) && !before->pinned)
        sched_drop(sched, before, "superseded");
    drop_left(sched, from);
    conversation_followed(table, from);
    if (!conversation_superseded(from)) {
        keep_file(sched, from->id);
        return 0;
    }
    if (from->saved == CONVERSATION_UNSAVED) sched_forget_copying(sched, from);
    return file_of(from);
}

/* Returns the pinned conversation whose pin the turn takes over if it gets one; NULL: none. */
static struct conversation *pin_before(struct sched *sched, const struct sequence *seq) {
    const uint8_t *client = seq->job->request.owner;
    struct conversation *from = conversation_by_id(&sched->conversations, seq->origin);
    if (!from || !from->pinned || !conversation_superseded(from)) return NULL;
    return memcmp(from->client, client, sizeof from->client) == 0 ? from : NULL;
}

/* Pins a turn that asks for it, within the bounds; a pin that is refused moves nothing. */
static void take_pin(struct sched *sched, const struct sequence *seq, struct conversation *conv) {
    struct conversation *from = pin_before(sched, seq);
    conv->pinned = may_pin(sched, &seq->job->request, conv, from);
    if (conv->pinned && from) conversation_unpin(&sched->conversations, from);
}

/* A repetition leaves a pin to the client that has it, unless it has more pages and they are too
 * many for that client. */
static void keep_pin(struct sched *sched, const struct engine_request *request,
                     const struct conversation *same, struct conversation *conv) {
    bool own = memcmp(same->client, request->owner, sizeof same->client) == 0;
    bool stays = same->pinned && conv->pages <= same->pages;
    if (stays) memcpy(conv->client, same->client, sizeof conv->client);
    bool asks = request->kv.pin || (same->pinned && own);
    conv->pinned = stays || (asks && may_pin(sched, request, conv, same));
}

/* Shrinks the token list, which had room for the longest answer. If that fails, it only costs
 * memory. */
static int32_t *take_tokens(struct sequence *seq) {
    size_t used = (size_t)seq->due.tokens * sizeof *seq->tokens;
    int32_t *tokens = mem_try_realloc(seq->tokens, used, used);
    if (!tokens) tokens = seq->tokens;
    seq->tokens = NULL;
    return tokens;
}

void sched_retain(struct sched *sched, struct sequence *seq, const struct kern_report *report) {
    struct conversation_table *table = &sched->conversations;
    int64_t entries = (int64_t)report->entries, count = sched_streams(sched);
    const struct engine_request *request = &seq->job->request;
    struct conversation conv = {.kv = seq->kv,
                                .hint = request->hint,
                                .ttl = request->kv.ttl,
                                .tokens = take_tokens(seq),
                                .token_count = seq->due.tokens,
                                .prompt_end = seq->prompt_count,
                                .evicted_at = seq->evicted_at,
                                .exact = seq->exact,
                                .began = seq->began,
                                .began_held = seq->began_held,
                                .held = (int32_t)((entries + count - 1) / count),
                                .fullest = sched_fullest(sched, report),
                                .entries = entries,
                                .pages = report->rank_pages,
                                .slot = seq->slot,
                                .left = seq->left,
                                .origin = seq->origin};
    memcpy(conv.space, request->space, sizeof conv.space);
    memcpy(conv.client, request->owner, sizeof conv.client);
    conv.id = sched_name(sched, &conv);
    struct conversation *same = conversation_same(table, &conv);
    if (same) {
        conv.turns = same->turns; /* successors of the old one are successors of this one */
        conv.replaces = file_of(same);
        keep_pin(sched, request, same, &conv);
        if (same->left != conv.left) drop_left(sched, same);
        sched_drop(sched, same, "repeated");
    } else {
        conv.replaces = supersede(sched, seq);
        if (request->kv.pin) take_pin(sched, seq, &conv);
    }
    if (conversation_by_id(table, conv.id)) conv.id = 0; /* taken: it gets a random one */
    if (conv.replaces == conv.id) conv.replaces = 0;     /* the file is written over */
    sched->counters.pins_refused += request->kv.pin && !conv.pinned;
    seq->job->kv.pinned = conv.pinned;
    (void)sched_make_place(sched, 1); /* may fail now; tried again later, see sched_open */
    conversation_add(table, &conv, clock_ns());
}

/* ---- Room for one more ---- */

bool sched_make_place(struct sched *sched, int more) {
    struct conversation_table *table = &sched->conversations;
    while (table->count > 0) {
        bool too_many = table->count + more > sched->options.conversations_max;
        if (!too_many && sched_pages_free(sched) >= 0) break;
        struct conversation *first = conversation_first_to_go(
            table, NULL, NULL, false, too_many ? CONVERSATION_PLACES : CONVERSATION_PAGES);
        if (!first) break; /* pins alone never exceed the bounds */
        if (!sched_save_for_room(sched, first)) return false;
        sched_forget(sched, first, too_many ? "count" : "tokens");
    }
    return true;
}

static int remove_from_disk(struct sched *sched, uint64_t id) {
    struct store *store = sched->options.store;
    return store && id != 0 ? store_remove(store, id) : ERR_NOTFOUND;
}

/* Returns whether a kept conversation other than `of` begins with the prefix. */
static bool begins_another(const struct conversation_table *table,
                           const struct conversation *prefix, const struct conversation *of) {
    for (int i = 0; i < table->capacity; i++) {
        const struct conversation *conv = &table->all[i];
        if (conv == of || conv->id == 0 || conv->checkpoint) continue;
        if (memcmp(conv->space, prefix->space, sizeof conv->space) != 0) continue;
        if (!kv_params_equal(&conv->kv, &prefix->kv)) continue;
        if (conversation_common(prefix->tokens, prefix->token_count, conv->tokens,
                                conv->token_count) == prefix->token_count)
            return true;
    }
    return false;
}

/* Drops the prefixes with which this conversation begins and no other that is kept. Whether they
 * were used does not count: the same dialogue may have used them, with a retry. */
static void delete_prefixes(struct sched *sched, const struct conversation *of) {
    struct conversation_table *table = &sched->conversations;
    for (int i = 0; i < table->capacity; i++) {
        struct conversation *conv = &table->all[i];
        if (conv == of || conv->id == 0 || !conv->prefix) continue;
        if (memcmp(conv->space, of->space, sizeof conv->space) != 0) continue;
        if (conversation_common(conv->tokens, conv->token_count, of->tokens, of->token_count) ==
                conv->token_count &&
            !begins_another(table, conv, of))
            sched_drop(sched, conv, "deleted");
    }
}

/* Drops a conversation and the checkpoints that its turn left. */
static void delete_row(struct sched *sched, uint64_t id) {
    struct conversation_table *table = &sched->conversations;
    struct conversation *conv = conversation_by_id(table, id);
    if (!conv) return;
    uint64_t left = conv->left;
    delete_prefixes(sched, conv);
    sched_drop(sched, conv, "deleted");
    struct conversation *checkpoint = conversation_by_id(table, left);
    if (checkpoint) sched_drop(sched, checkpoint, "deleted");
}

int sched_delete(struct sched *sched, uint64_t id) {
    struct conversation_table *table = &sched->conversations;
    struct conversation *conv = conversation_by_id(table, id);
    int rc = remove_from_disk(sched, id);
    if (!conv) return rc;
    struct conversation *before = conversation_by_id(table, conv->origin);
    if (!before || conversation_superseded(before)) {
        (void)remove_from_disk(sched, conv->replaces);
        if (before) delete_row(sched, before->id);
    }
    delete_row(sched, id);
    return 0;
}

/* The turn that an expired one continued is the last of its dialogue again, with the file that it
 * may have. */
static void expire(struct sched *sched, const struct conversation *conv) {
    struct conversation_table *table = &sched->conversations;
    struct conversation *before = conversation_by_id(table, conv->origin);
    (void)remove_from_disk(sched, conv->id);
    if (sched->export.head.id == conv->id) sched->export.replaces = 0;
    if (before && !before->checkpoint && conversation_superseded(before))
        conversation_unfollowed(table, before);
    delete_row(sched, conv->id);
}

void sched_expire(struct sched *sched, int64_t now_ns) {
    const struct conversation *conv;
    while ((conv = conversation_expired(&sched->conversations, now_ns)) != NULL) {
        log_debug("conversation=%016llx gone reason=expired", (unsigned long long)conv->id);
        sched->counters.conversations_expired++;
        expire(sched, conv);
    }
}
