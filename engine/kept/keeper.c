/* Slots, pages, and which conversations stay: what is removed when pages or places are needed, what
 * an answered turn supersedes, pins, and deletion by clients and by time. */
#include "engine/kept/keeper_int.h"

#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "engine/engine_job.h"

void keeper_open(struct keeper *keeper, const struct keeper_options *options,
                 struct engine_counters *counters) {
    *keeper = (struct keeper){.options = *options, .counters = counters, .changes = 1, .saves = 1};
    keeper->free_slots = mem_must_alloc((size_t)options->slots, sizeof *keeper->free_slots);
    for (int i = 0; i < options->slots; i++) keeper->free_slots[i] = options->slots - 1 - i;
    keeper->free_slot_count = options->slots;
    /* A conversation that must go is written first, in parts and one at a time; until then the
     * table may hold more than conversations_max, up to one for every slot. */
    bool more = options->store && options->conversations_max > 0;
    conversation_table_open(&keeper->table, more ? options->slots : options->conversations_max,
                            options->shape.sliding_layers > 0);
}

void keeper_close(struct keeper *keeper) {
    for (int i = 0; i < keeper->table.capacity; i++)
        if (keeper->table.all[i].id != 0) keeper_release_slot(keeper, keeper->table.all[i].slot);
    keeper_end_saving(keeper);
    conversation_table_close(&keeper->table);
    mem_free(keeper->free_slots);
}

/* ---- Slots ---- */

int32_t keeper_alloc_slot(struct keeper *keeper) {
    CHECK(keeper->free_slot_count > 0); /* there are as many as sequences and conversations */
    return keeper->free_slots[--keeper->free_slot_count];
}

void keeper_release_slot(struct keeper *keeper, int32_t slot) {
    struct kern *kern = keeper->options.kern;
    CHECK(slot >= 0 && keeper->free_slot_count < keeper->options.slots);
    kern->ops->release(kern, slot);
    keeper->free_slots[keeper->free_slot_count++] = slot;
    keeper_note_change(keeper); /* a waiting request may fit now */
}

/* ---- Removal ---- */

void keeper_drop(struct keeper *keeper, struct conversation *conv, const char *why) {
    keeper_cancel_copies(keeper, conv);
    struct conversation gone = conversation_remove(&keeper->table, conv);
    log_debug("conversation=%016llx gone reason=%s tokens=%d pages=%lld",
              (unsigned long long)gone.id, why, gone.token_count, (long long)gone.pages);
    keeper_release_slot(keeper, gone.slot);
    mem_free(gone.tokens);
}

void keeper_displace(struct keeper *keeper, struct conversation *conv, const char *why) {
    /* The store may have deleted the file of a saved conversation meanwhile. */
    bool on_disk =
        conv->saved == CONVERSATION_WRITING ||
        (conv->saved == CONVERSATION_SAVED && store_has(keeper->options.store, conv->id));
    keeper->counters->prefixes_dropped += conv->prefix;
    if (!on_disk)
        conversation_note_gone(&keeper->table, conv->space, conv->prompt_end, conv->prompt_hash);
    if (conv->saved == CONVERSATION_WRITING) keeper->export.displaced = true;
    if (conv->saved == CONVERSATION_FAILED || conv->saved == CONVERSATION_NOT_SAVABLE)
        keeper_count_lost(keeper, conv->id);
    keeper_drop(keeper, conv, why);
}

/* Drops the checkpoint of a turn that is removed, unless other dialogues continued it. */
static void drop_own_checkpoint(struct keeper *keeper, struct conversation *conv) {
    struct conversation *checkpoint = conversation_by_id(&keeper->table, conv->left);
    conv->left = 0;
    if (checkpoint && conversation_superseded(checkpoint))
        keeper_drop(keeper, checkpoint, "superseded");
}

void keeper_drop_checkpoint(struct keeper *keeper, uint64_t id) {
    struct conversation *conv = conversation_by_id(&keeper->table, id);
    if (conv && conversation_superseded(conv)) keeper_drop(keeper, conv, "left alone");
}

/* ---- Pages ---- */

/* Returns the memory in pages. The lists of tokens and the pages share one bound, the size of the
 * pool. With several ranks, pages are those of one rank, and the lists exist once. If all lists
 * together take less than a page, they do not count. */
int64_t keeper_pages_with(const struct keeper *keeper, int64_t pages, int64_t tokens) {
    const struct keeper_options *options = &keeper->options;
    int64_t bytes = options->page_bytes * (options->shape.ranks > 1 ? options->shape.ranks : 1);
    return pages + (bytes > 0 ? tokens * (int64_t)sizeof(int32_t) / bytes : 0);
}

/* Returns the pages that are not reserved and that conversations other than `except` (NULL: none)
 * leave; below 0: a conversation that has just been kept has more tokens than the pool allows. */
static int64_t pages_free_without(const struct keeper *keeper, const struct conversation *except) {
    const struct conversation_table *table = &keeper->table;
    return keeper->options.pages_total - keeper->pages_reserved -
           keeper_pages_with(keeper, table->pages - (except ? except->pages : 0),
                             table->tokens - (except ? except->token_count : 0));
}

int64_t keeper_pages_free(const struct keeper *keeper) {
    return pages_free_without(keeper, NULL);
}

int64_t keeper_quota_free(const struct keeper *keeper, const struct keeper_claim *claim) {
    if (claim->quota == INT64_MAX) return claim->quota;
    return claim->quota - conversation_pages_of(&keeper->table, claim->client);
}

static bool is_clients(const struct conversation *conv, const uint8_t client[16]) {
    return memcmp(conv->client, client, sizeof conv->client) == 0;
}

/* Removes the next conversation in order but `except`, one of the client's own unless `client` is
 * NULL. Otherwise returns the reason to wait: there is none, or it has to be written first. */
static enum engine_wait displace_next(struct keeper *keeper, const uint8_t *client,
                                      const struct conversation *except, bool pinned) {
    struct conversation *next =
        conversation_next_victim(&keeper->table, except, client, pinned, CONVERSATION_PAGES);
    if (!next) return ENGINE_WAIT_PAGES;
    if (!keeper_save_first(keeper, next)) return ENGINE_WAIT_STORE;
    keeper_displace(keeper, next, client ? "quota" : "pages");
    return ENGINE_WAIT_NOTHING;
}

/* Frees pages of the client's quota. Tokens of conversations do not count for quotas. */
static enum engine_wait reclaim_quota(struct keeper *keeper, struct keeper_claim *claim,
                                      int64_t pages, const struct conversation *conv,
                                      bool *consumed) {
    int64_t own = conv && is_clients(conv, claim->client) ? conv->pages : 0;
    if (claim->quota == INT64_MAX) return ENGINE_WAIT_NOTHING;
    if (own > 0 && pages + own > claim->quota) *consumed = true;
    if (!*consumed) own = 0;
    if (pages > claim->quota) return ENGINE_WAIT_QUOTA;
    while (pages > keeper_quota_free(keeper, claim) + own) {
        if (displace_next(keeper, claim->client, conv, true) == ENGINE_WAIT_NOTHING) continue;
        claim->saves = keeper->saves;
        return ENGINE_WAIT_QUOTA;
    }
    return ENGINE_WAIT_NOTHING;
}

/* Frees pages for a request. Other clients' pins are spared, unless the request could not fit
 * beside them even if nothing ran. Everything else may be removed except `conv`, which is consumed
 * if the request does not fit beside it and the pins. So once nothing runs, the request fits. */
enum engine_wait keeper_reclaim(struct keeper *keeper, struct keeper_claim *claim, int64_t pages,
                                const struct conversation *conv, bool *consumed) {
    int64_t total = keeper->options.pages_total, unreserved = total - keeper->pages_reserved;
    struct conversation_pins spared = conversation_pins_of(&keeper->table, NULL), beside;
    const struct conversation_pins own = conversation_pins_of(&keeper->table, claim->client);
    spared.pages -= own.pages;
    spared.tokens -= own.tokens;
    bool spares_pins = pages <= total - keeper_pages_with(keeper, spared.pages, spared.tokens);
    if (!spares_pins) spared = (struct conversation_pins){0};
    beside = spared;
    bool may_consume = conv && !(conv->pinned && spares_pins && !is_clients(conv, claim->client));
    if (may_consume) {
        beside.pages += conv->pages;
        beside.tokens += conv->token_count;
    }
    *consumed =
        may_consume && pages > unreserved - keeper_pages_with(keeper, beside.pages, beside.tokens);
    if (pages > unreserved - keeper_pages_with(keeper, spared.pages, spared.tokens))
        return ENGINE_WAIT_PAGES;
    enum engine_wait wait = reclaim_quota(keeper, claim, pages, conv, consumed);
    while (!wait && pages > pages_free_without(keeper, *consumed ? conv : NULL)) {
        /* the client's own pinned conversations are removed when no other is left */
        bool any =
            conversation_next_victim(&keeper->table, conv, NULL, !spares_pins, CONVERSATION_PAGES);
        wait = any ? displace_next(keeper, NULL, conv, !spares_pins)
                   : displace_next(keeper, claim->client, conv, true);
    }
    return wait;
}

bool keeper_reclaim_places(struct keeper *keeper, int more) {
    struct conversation_table *table = &keeper->table;
    while (table->count > 0) {
        bool too_many = table->count + more > keeper->options.conversations_max;
        if (!too_many && keeper_pages_free(keeper) >= 0) break;
        struct conversation *next = conversation_next_victim(
            table, NULL, NULL, false, too_many ? CONVERSATION_PLACES : CONVERSATION_PAGES);
        if (!next) break; /* pins alone never exceed the bounds */
        if (!keeper_save_first(keeper, next)) return false;
        keeper_displace(keeper, next, too_many ? "count" : "tokens");
    }
    return true;
}

/* ---- Continuing ---- */

/* Forks a conversation for a request. The conversation gets the request's hint only if both belong
 * to one dialogue. */
int keeper_fork(struct keeper *keeper, const struct conversation_match *match, uint64_t hint,
                int32_t *slot) {
    struct kern *kern = keeper->options.kern;
    struct conversation *conv = match->conv;
    CHECK(!conv->arriving);
    *slot = keeper_alloc_slot(keeper);
    conversation_touch(&keeper->table, conv, match->from == conv->id ? hint : conv->hint,
                       clock_ns());
    if (conv->checkpoint) conversation_followed(&keeper->table, conv);
    keeper->counters->prefix_hits += conv->prefix;
    return kern->ops->fork(kern, conv->slot, *slot);
}

/* Removes a conversation whose slot the request takes over, and the checkpoint of its turn, which
 * nothing else would delete. */
int32_t keeper_consume(struct keeper *keeper, struct conversation *conv) {
    CHECK(!conv->arriving);
    keeper_cancel_copies(keeper, conv);
    struct conversation taken = conversation_remove(&keeper->table, conv);
    mem_free(taken.tokens);
    drop_own_checkpoint(keeper, &taken);
    return taken.slot;
}

/* ---- Retaining ---- */

void keeper_measure(const struct keeper *keeper, const struct kern_report *report,
                    struct conversation *conv) {
    int64_t all = keeper_streams(keeper), of_rank = reserve_streams(&keeper->options.shape);
    conv->entries = (int64_t)report->entries;
    conv->held = (int32_t)((conv->entries + all - 1) / all);
    conv->fullest = (int32_t)(((int64_t)report->rank_entries + of_rank - 1) / of_rank);
    conv->pages = report->rank_pages;
}

/* Marks the turn `origin` as superseded and drops the superseded turn before it, so that a dialogue
 * keeps its last state and one to retry from. Returns the id of the file that the new turn will
 * replace, 0: none. */
static uint64_t supersede(struct keeper *keeper, uint64_t origin, uint64_t origin_file) {
    struct conversation_table *table = &keeper->table;
    struct conversation *from = conversation_by_id(table, origin);
    if (!from) return origin_file;
    struct conversation *before = conversation_by_id(table, from->origin);
    if (before && conversation_superseded(before) && !before->pinned)
        keeper_drop(keeper, before, "superseded");
    drop_own_checkpoint(keeper, from);
    conversation_followed(table, from);
    if (!conversation_superseded(from)) {
        /* Several turns continued it: it stays, and its file, when one of those is on disk. */
        for (int i = 0; i < table->capacity; i++)
            if (table->all[i].replaces == from->id) table->all[i].replaces = 0;
        if (keeper->export.replaces == from->id) keeper->export.replaces = 0;
        return 0;
    }
    if (from->saved == CONVERSATION_UNSAVED) keeper_cancel_copies(keeper, from);
    return conversation_file(from);
}

/* Adds up the pins of the client, or of all for NULL, without that of `old` (NULL: none). */
static struct conversation_pins pins_without(const struct keeper *keeper, const uint8_t *client,
                                             const struct conversation *old) {
    struct conversation_pins pins = conversation_pins_of(&keeper->table, client);
    if (!old || !old->pinned || (client && !is_clients(old, client))) return pins;
    pins.count--;
    pins.pages -= old->pages;
    pins.tokens -= old->token_count;
    return pins;
}

/* Returns whether a pin is allowed: within the client's quota, and all pins within half of the pool
 * and of the places, so that others always find some. `old` (NULL: none) loses its pin. */
static bool may_pin(const struct keeper *keeper, const struct engine_request *request,
                    const struct conversation *conv, const struct conversation *old) {
    struct conversation_pins own = pins_without(keeper, request->owner, old);
    struct conversation_pins all = pins_without(keeper, NULL, old);
    int64_t pages = keeper_pages_with(keeper, conv->pages, conv->token_count);
    return pages + keeper_pages_with(keeper, own.pages, own.tokens) <= request->pins_max &&
           pages + keeper_pages_with(keeper, all.pages, all.tokens) <=
               keeper->options.pages_total / 2 &&
           all.count + 1 <= keeper->options.conversations_max / 2;
}

/* Pins a turn that asks for it, within the bounds. The pin of the turn that it continued moves to
 * it, if that belongs to the same client; a refused pin leaves that one as it is. */
static void pin_turn(struct keeper *keeper, const struct engine_request *request,
                     struct conversation *conv) {
    struct conversation *from = conversation_by_id(&keeper->table, conv->origin);
    bool takes_over =
        from && from->pinned && conversation_superseded(from) && is_clients(from, request->owner);
    conv->pinned = may_pin(keeper, request, conv, takes_over ? from : NULL);
    if (conv->pinned && takes_over) conversation_unpin(&keeper->table, from);
}

/* Keeps the pin of an equal turn that is replaced, unless the new one has more pages and these are
 * too many for the client. */
static void pin_repetition(struct keeper *keeper, const struct engine_request *request,
                           const struct conversation *same, struct conversation *conv) {
    bool inherits = same->pinned && conv->pages <= same->pages;
    bool asks = request->kv.pin || (same->pinned && is_clients(same, request->owner));
    if (inherits) memcpy(conv->client, same->client, sizeof conv->client);
    conv->pinned = inherits || (asks && may_pin(keeper, request, conv, same));
}

bool keeper_retain(struct keeper *keeper, struct conversation *conv, uint64_t replaces,
                   const struct engine_request *request) {
    struct conversation_table *table = &keeper->table;
    CHECK(conv->id == 0 && !conv->checkpoint && !conv->arriving);
    conv->id = keeper_name(keeper, conv);
    struct conversation *same = conversation_same(table, conv);
    if (same) {
        conv->turns = same->turns; /* successors of the old one are successors of this one */
        conv->replaces = conversation_file(same);
        pin_repetition(keeper, request, same, conv);
        if (same->left != conv->left) drop_own_checkpoint(keeper, same);
        keeper_drop(keeper, same, "repeated");
    } else {
        conv->replaces = supersede(keeper, conv->origin, replaces);
        if (request->kv.pin) pin_turn(keeper, request, conv);
    }
    if (conversation_by_id(table, conv->id)) conv->id = 0; /* taken: it gets a random one */
    if (conv->replaces == conv->id) conv->replaces = 0;    /* the file is written over */
    keeper->counters->pins_refused += request->kv.pin && !conv->pinned;
    /* May fail now: then the table holds more than conversations_max until it succeeds. */
    (void)keeper_reclaim_places(keeper, 1);
    conversation_add(table, conv, clock_ns());
    return conv->pinned;
}

/* ---- Deletion ---- */

static int remove_from_disk(struct keeper *keeper, uint64_t id) {
    struct store *store = keeper->options.store;
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
static void delete_prefixes(struct keeper *keeper, const struct conversation *of) {
    struct conversation_table *table = &keeper->table;
    for (int i = 0; i < table->capacity; i++) {
        struct conversation *conv = &table->all[i];
        if (conv == of || conv->id == 0 || !conv->prefix) continue;
        if (memcmp(conv->space, of->space, sizeof conv->space) != 0) continue;
        if (conversation_common(conv->tokens, conv->token_count, of->tokens, of->token_count) ==
                conv->token_count &&
            !begins_another(table, conv, of))
            keeper_drop(keeper, conv, "deleted");
    }
}

/* Drops a conversation and the checkpoints that its turn left. */
static void delete_from_memory(struct keeper *keeper, uint64_t id) {
    struct conversation *conv = conversation_by_id(&keeper->table, id);
    if (!conv) return;
    uint64_t left = conv->left;
    delete_prefixes(keeper, conv);
    keeper_drop(keeper, conv, "deleted");
    struct conversation *checkpoint = conversation_by_id(&keeper->table, left);
    if (checkpoint) keeper_drop(keeper, checkpoint, "deleted");
}

int keeper_delete(struct keeper *keeper, uint64_t id) {
    struct conversation *conv = conversation_by_id(&keeper->table, id);
    int rc = remove_from_disk(keeper, id);
    if (!conv) return rc;
    struct conversation *before = conversation_by_id(&keeper->table, conv->origin);
    if (!before || conversation_superseded(before)) {
        (void)remove_from_disk(keeper, conv->replaces);
        if (before) delete_from_memory(keeper, before->id);
    }
    delete_from_memory(keeper, id);
    return 0;
}

/* Deletes an expired conversation. The turn that it continued is the last of its dialogue again,
 * with the file that it may have. */
static void expire_conversation(struct keeper *keeper, const struct conversation *conv) {
    struct conversation *before = conversation_by_id(&keeper->table, conv->origin);
    (void)remove_from_disk(keeper, conv->id);
    if (keeper->export.head.id == conv->id) keeper->export.replaces = 0;
    if (before && !before->checkpoint && conversation_superseded(before))
        conversation_unfollowed(&keeper->table, before);
    delete_from_memory(keeper, conv->id);
}

void keeper_expire(struct keeper *keeper, int64_t now_ns) {
    const struct conversation *conv;
    while ((conv = conversation_expired(&keeper->table, now_ns)) != NULL) {
        log_debug("conversation=%016llx gone reason=expired", (unsigned long long)conv->id);
        keeper->counters->conversations_expired++;
        expire_conversation(keeper, conv);
    }
}
