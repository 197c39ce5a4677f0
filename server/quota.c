#include "server/quota.h"

#include <math.h>
#include <stdlib.h>

#include "server/loop.h"

#define TIMEOUT_SECONDS_MAX 86400.0

static bool refuse_item(struct exchange *ex, enum ledger_item item, enum ledger_verdict verdict) {
    if (item == LEDGER_BACKGROUND && verdict == LEDGER_CLIENT_FULL) {
        ex->reject = STATS_REJECT_BACKGROUND;
        oai_refuse(&ex->error, 429, "too_many_requests", "background",
                   "This client's responses take up its share of the background, please try again "
                   "when some of them have ended.");
    } else if (item == LEDGER_BACKGROUND) {
        ex->reject = STATS_REJECT_BACKGROUND;
        oai_refuse(&ex->error, 503, "overloaded", "background",
                   "Too many responses are in the background, please try again.");
    } else if (verdict == LEDGER_CLIENT_FULL) {
        ex->reject = STATS_REJECT_CLIENT_QUEUE;
        oai_refuse(&ex->error, 429, "too_many_requests", NULL,
                   "This client's waiting requests take up its share of the queue, please try "
                   "again when some of them have begun.");
    } else if (item == LEDGER_TOKENS) {
        ex->reject = STATS_REJECT_TOKENS;
        oai_refuse(&ex->error, 503, "overloaded", NULL,
                   "Too many prompt tokens are waiting, please try again.");
    } else {
        ex->reject = STATS_REJECT_FULL;
        oai_refuse(&ex->error, 503, "overloaded", NULL,
                   "The request queue is full, please try again.");
    }
    return false;
}

static bool hold_item(struct exchange *ex, enum ledger_item item, int64_t amount) {
    struct ledger *ledger = &ex->server->ledger;
    enum ledger_verdict verdict = ledger_set(ledger, &ex->entry, item, amount);
    if (verdict == LEDGER_HELD) return true;
    /* Jobs that began to run since the last poll wait no longer. */
    for (struct exchange *each = ex->server->jobs; each; each = each->next) quota_settle(each);
    verdict = ledger_set(ledger, &ex->entry, item, amount);
    return verdict == LEDGER_HELD || refuse_item(ex, item, verdict);
}

/* Takes places of the engine's queue, which counts what waits on every replica. */
static bool reserve_places(struct exchange *ex, int count) {
    int more = count - ex->places;
    if (!hold_item(ex, LEDGER_PLACES, count)) return false;
    if (more > 0 && !engine_queue_enter(ex->model->engine, more))
        return refuse_item(ex, LEDGER_PLACES, LEDGER_FULL);
    ex->places = count;
    return true;
}

/* The length of a model that could not be checked yet is 0: not known. */
static bool hold_tokens(struct exchange *ex) {
    int64_t tokens = (int64_t)ex->body.size, longest = ex->model->max_model_len;
    return hold_item(ex, LEDGER_TOKENS, longest > 0 && longest < tokens ? longest : tokens);
}

bool quota_reserve(struct exchange *ex) {
    return hold_tokens(ex) && reserve_places(ex, 1);
}

bool quota_wait(struct exchange *ex) {
    return hold_tokens(ex) && hold_item(ex, LEDGER_PLACES, 1);
}

bool quota_confirm(struct exchange *ex) {
    int64_t tokens = 0;
    for (int i = 0; i < ex->jobs_at_once; i++) tokens += ex->jobs[i].request.prompt_count;
    if (ex->request.background && !hold_item(ex, LEDGER_BACKGROUND, 1)) return false;
    return hold_item(ex, LEDGER_TOKENS, tokens) && reserve_places(ex, ex->jobs_at_once);
}

static void set_held(struct exchange *ex, int64_t places, int64_t tokens) {
    struct ledger *ledger = &ex->server->ledger;
    (void)ledger_set(ledger, &ex->entry, LEDGER_PLACES, places);
    (void)ledger_set(ledger, &ex->entry, LEDGER_TOKENS, tokens);
}

void quota_settle(struct exchange *ex) {
    int64_t places = ex->places, tokens = 0;
    if (!ex->entry.items[LEDGER_PLACES]) return;
    for (int i = 0; i < ex->jobs_submitted; i++) {
        if (atomic_load_explicit(&ex->jobs[i].admitted, memory_order_acquire)) continue;
        places++;
        tokens += ex->jobs[i].request.prompt_count;
    }
    set_held(ex, places, tokens);
}

void quota_release(struct exchange *ex) {
    if (ex->entry.account) set_held(ex, 0, 0);
}

/* Returns NULL when a reload has removed the key. */
static struct key *exchange_key(struct exchange *ex) {
    return keys_by_digest(&ex->server->keys, ex->client.key_digest);
}

bool quota_enter(struct exchange *ex) {
    struct key *key = exchange_key(ex);
    if (!key) return true;
    if (key->settings.requests_max > 0 && key->active >= (uint64_t)key->settings.requests_max) {
        key->rejected++;
        return false;
    }
    key->active++;
    key->requests++;
    ex->client.key_added = key->added;
    return true;
}

void quota_leave(struct exchange *ex) {
    struct key *key = ex->client.key_added ? exchange_key(ex) : NULL;
    if (!key || key->added != ex->client.key_added) return; /* removed, perhaps added again */
    ex->client.key_added = 0;
    key->active--;
    for (int i = 0; i < ex->jobs_submitted; i++) {
        key->prompt_tokens += (uint64_t)ex->jobs[i].request.prompt_count;
        key->generation_tokens += ex->progress[i].tokens_counted;
    }
}

bool quota_deadline(const char *header, int64_t cap_seconds, int64_t now_ns, int64_t *deadline_ns) {
    double seconds = cap_seconds > 0 ? (double)cap_seconds : INFINITY;
    if (header) {
        char *end;
        double asked = strtod(header, &end);
        if (end == header || *end || !(asked > 0 && asked <= TIMEOUT_SECONDS_MAX)) return false;
        if (asked < seconds) seconds = asked;
    }
    *deadline_ns = isinf(seconds) ? 0 : now_ns + (int64_t)(seconds * 1e9);
    return true;
}
