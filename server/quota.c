#include "server/quota.h"

#include <math.h>
#include <stdlib.h>

#include "server/http.h"

#define TIMEOUT_SECONDS_MAX 86400.0

static void set_reservation(struct exchange *ex, int64_t tokens) {
    ex->server->queue_tokens += tokens - ex->queue_tokens;
    ex->queue_tokens = tokens;
}

static bool reserve(struct exchange *ex, int64_t tokens) {
    int64_t most = ex->server->options.max_queue_tokens;
    int64_t others = ex->server->queue_tokens - ex->queue_tokens;
    if (most > 0 && others > 0 && others + tokens > most) return false;
    set_reservation(ex, tokens);
    return true;
}

bool quota_reserve(struct exchange *ex) {
    int64_t tokens = (int64_t)ex->body.size, longest = ex->server->rules.info->max_model_len;
    return reserve(ex, tokens < longest ? tokens : longest);
}

bool quota_confirm(struct exchange *ex) {
    int64_t tokens = 0;
    for (int i = 0; i < ex->job_count; i++) tokens += ex->jobs[i].request.prompt_count;
    return reserve(ex, tokens);
}

void quota_settle(struct exchange *ex) {
    if (!ex->queue_tokens) return;
    int64_t tokens = 0;
    for (int i = 0; i < ex->jobs_submitted; i++)
        if (!atomic_load_explicit(&ex->jobs[i].admitted, memory_order_acquire))
            tokens += ex->jobs[i].request.prompt_count;
    set_reservation(ex, tokens);
}

void quota_release(struct exchange *ex) {
    set_reservation(ex, 0);
}

/* Returns NULL when a reload has removed the key. */
static struct key *key_of(struct exchange *ex) {
    return keys_by_digest(&ex->server->keys, ex->key_digest);
}

bool quota_enter(struct exchange *ex) {
    struct key *key = key_of(ex);
    if (!key) return true;
    if (key->settings.requests_max > 0 && key->active >= (uint64_t)key->settings.requests_max) {
        key->rejected++;
        return false;
    }
    key->active++;
    key->requests++;
    ex->entered = true;
    ex->key_added = key->added;
    return true;
}

void quota_leave(struct exchange *ex) {
    struct key *key = ex->entered ? key_of(ex) : NULL;
    ex->entered = false;
    if (!key || key->added != ex->key_added) return; /* removed, and perhaps added again */
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
