/* Responses in the background: answered at once, computed without a client, stored at their end. */
#include <inttypes.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "server/loop.h"
#include "server/oai/records.h"
#include "server/quota.h"

/* Each reader renders the events for itself, the last ones with the whole answer. */
#define FOLLOWERS_MAX 16

void background_answer(struct exchange *ex) {
    ex->request.kind->form->unfinished(&ex->answer.body, &ex->facts, false);
    ex->answer.status = 200;
    exchange_ready(ex);
}

bool background_stays(const struct exchange *ex, bool answered) {
    /* In other states a worker may be writing the request. */
    return ex->state == EXCHANGE_STREAMING && ex->request.background &&
           (answered || ex->request.stream);
}

struct exchange *background_find(const struct server *server, const struct oai_owner *owner,
                                 const char *id) {
    for (struct exchange *ex = server->jobs; ex; ex = ex->next) {
        const struct oai_owner *own = &ex->request.owner;
        if (ex->request.background && ex->cut != EXCHANGE_CUT_DELETED && strcmp(ex->id, id) == 0 &&
            memcmp(own->key, owner->key, sizeof own->key) == 0 &&
            strcmp(own->salt, owner->salt) == 0)
            return ex;
    }
    return NULL;
}

void background_render(struct buf *out, const struct exchange *ex) {
    bool begun = atomic_load_explicit(&ex->jobs[0].admitted, memory_order_acquire) != 0;
    ex->request.kind->form->unfinished(out, &ex->facts, begun);
}

void background_cancel(struct exchange *ex) {
    ex->facts.cancelled = true;
    exchange_cancel(ex);
}

static const char *outcome_name(const struct exchange *ex, bool kept) {
    if (ex->cut == EXCHANGE_CUT_DELETED) return "deleted";
    if (ex->facts.cancelled || exchange_is_gone(ex)) return "cancelled";
    if (!kept) return "lost";
    return ex->error.status ? "failed" : "stored";
}

/* Logs the end of the response; the line of its request was written when the client was answered.
 */
static void log_end(const struct exchange *ex, bool kept) {
    const struct log_field fields[] = {
        {"request_id", ex->request_id, 0},
        {"id", ex->id, 0},
        {"outcome", outcome_name(ex, kept), 0},
        {"ms", NULL, (clock_ns() - ex->received_ns) / 1000000},
        {"prompt_tokens", NULL, (int64_t)oai_prompt_total(&ex->facts)},
        {"completion_tokens", NULL, (int64_t)oai_tokens_total(&ex->facts)},
    };
    log_event(LOG_LEVEL_INFO, "background", fields, sizeof fields / sizeof *fields);
}

void background_end(struct exchange *ex) {
    const struct oai_error *error = ex->error.status ? &ex->error : NULL;
    struct buf events;
    bool kept = false;
    buf_open(&events, OAI_RECORD_BYTES / OAI_RECORD_PART);
    if (ex->cut != EXCHANGE_CUT_DELETED && !exchange_is_gone(ex)) {
        if (ex->request.stream) stream_write(&events, ex);
        kept = ex->request.kind->form->keep(&ex->facts, error, &events);
    }
    buf_close(&events);
    log_end(ex, kept);
    /* Clients that still read its events are bounded by the connections. */
    (void)ledger_set(&ex->server->ledger, &ex->entry, LEDGER_BACKGROUND, 0);
    background_release(ex);
}

void background_release(struct exchange *ex) {
    const bool streamed = ex->stream.owner == ex;
    if (!streamed || ex->connection || !exchange_has_finished(ex)) return;
    quota_leave(ex);
    exchange_rendered(ex);
}

/* --- followers --- */

/* Refuses a reader beyond FOLLOWERS_MAX, or one whose first events have no room: they repeat the
 * texts of the request twice. */
static bool has_room(struct exchange *ex, const struct exchange *owner) {
    int count = 0;
    for (const struct exchange *each = owner->followers; each; each = each->next_follower) count++;
    if (count < FOLLOWERS_MAX) return exchange_hold(ex, 2 * strlen(owner->request.repeated));
    ex->reject = STATS_REJECT_BACKGROUND;
    oai_refuse(&ex->error, 429, "too_many_requests", "stream",
               "%d clients already read this response, please try again when one has left.", count);
    return false;
}

void background_follow(struct exchange *ex, struct exchange *owner, uint64_t from) {
    if (!has_room(ex, owner)) {
        exchange_refuse(ex);
        return;
    }
    ex->stream.owner = owner;
    ex->stream.events.from = from;
    ex->next_follower = owner->followers;
    owner->followers = ex;
    owner->refs++;
}

void background_unfollow(struct exchange *ex) {
    struct exchange *owner = ex->stream.owner;
    if (!owner || owner == ex) return;
    struct exchange **at = &owner->followers;
    while (*at != ex) at = &(*at)->next_follower;
    *at = ex->next_follower;
    exchange_rendered(owner);
    exchange_unref(owner);
}

void background_wake(struct exchange *owner, int64_t now_ns) {
    for (struct exchange *ex = owner->followers; ex; ex = ex->next_follower)
        if (ex->suspended && stream_is_due(ex, now_ns)) exchange_resume(ex);
}
