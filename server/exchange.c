/* The states and the life of an exchange: who holds it, what it reserves, how it is refused. The
 * way of a request through them is dispatch.c. */
#include "server/loop.h"

#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/move.h"
#include "server/quota.h"

/* --- states --- */

#define TO(name) (1u << EXCHANGE_##name)

/* The states that may follow each state. Every state but OVER can lose its client. */
static const unsigned states_after[] = {
    /* clang-format off */
    [EXCHANGE_RECEIVING]  = TO(WAITING) | TO(PREPARING) | TO(RUNNING) | TO(READY) | TO(OVER), /* RUNNING: orders */
    [EXCHANGE_WAITING]    = TO(PREPARING) | TO(READY) | TO(OVER),
    [EXCHANGE_PREPARING]  = TO(RUNNING) | TO(READY) | TO(OVER),
    [EXCHANGE_RUNNING]    = TO(FINISHED) | TO(STREAMING) | TO(CANCELLED),
    [EXCHANGE_FINISHED]   = TO(PREPARING) | TO(READY) | TO(SENDING) | TO(OVER), /* PREPARING: a worker moves the file */
    [EXCHANGE_READY]      = TO(READY) | TO(SENDING) | TO(OVER), /* READY: another error replaces it */
    [EXCHANGE_STREAMING]  = TO(SENDING) | TO(BACKGROUND) | TO(CANCELLED),
    [EXCHANGE_SENDING]    = TO(OVER),
    [EXCHANGE_BACKGROUND] = TO(OVER),
    [EXCHANGE_CANCELLED]  = TO(OVER),
    [EXCHANGE_OVER]       = 0,
    /* clang-format on */
};

void exchange_set_state(struct exchange *ex, enum exchange_state state) {
    CHECK_MSG(states_after[ex->state] & 1u << state, "from state %d to %d", ex->state, state);
    ex->state = state;
}

/* Nobody waits for the answer when the client is gone, and a response in the background is answered
 * while the engine works for it. */
void exchange_ready(struct exchange *ex) {
    if (exchange_is_gone(ex) || ex->state == EXCHANGE_RUNNING) return;
    exchange_set_state(ex, EXCHANGE_READY);
}

void exchange_queued(struct exchange *ex) {
    exchange_set_state(ex, ex->state == EXCHANGE_RUNNING ? EXCHANGE_STREAMING : EXCHANGE_SENDING);
}

void exchange_gone(struct exchange *ex) {
    bool running = ex->state == EXCHANGE_RUNNING || ex->state == EXCHANGE_STREAMING;
    if (ex->state == EXCHANGE_WAITING) served_forget(ex);
    if (background_stays(ex, false)) exchange_set_state(ex, EXCHANGE_BACKGROUND);
    if (ex->state != EXCHANGE_BACKGROUND) {
        if (!exchange_is_gone(ex))
            exchange_set_state(ex, running ? EXCHANGE_CANCELLED : EXCHANGE_OVER);
        atomic_store_explicit(&ex->left, true, memory_order_relaxed);
        exchange_cancel(ex);
    }
    exchange_resume(ex);
}

/* --- life --- */

struct exchange *exchange_open(struct server *server, struct conn *conn,
                               struct MHD_Connection *connection) {
    struct exchange *ex = mem_try_alloc(1, sizeof *ex);
    if (!ex) return NULL;
    ex->server = server;
    ex->model = &server->models.items[0];
    ex->conn = conn;
    ex->connection = connection;
    ex->refs = 1;
    ex->received_ns = clock_ns();
    ex->created = clock_unix_seconds();
    buf_open(&ex->body, server->options.max_body_bytes);
    buf_open(&ex->answer.body, server->options.max_answer_bytes);
    conn->exchange = ex;
    server->exchanges++;
    return ex;
}

void exchange_refuse_memory(struct exchange *ex) {
    ex->reject = STATS_REJECT_MEMORY;
    oai_refuse(&ex->error, 503, "overloaded", NULL, "The server is short of memory.");
}

void exchange_refuse_draining(struct exchange *ex) {
    ex->reject = STATS_REJECT_DRAINING;
    oai_refuse(&ex->error, 503, "overloaded", NULL, "The server is shutting down.");
}

bool exchange_hold(struct exchange *ex, size_t size) {
    struct ledger *ledger = &ex->server->ledger;
    switch (ledger_hold(ledger, &ex->entry, size)) {
    case LEDGER_HELD:
        return true;
    case LEDGER_FULL:
        exchange_refuse_memory(ex);
        break;
    case LEDGER_CLIENT_FULL:
        ex->reject = STATS_REJECT_CLIENT_MEMORY;
        oai_refuse(&ex->error, 429, "too_many_requests", NULL,
                   "Other requests of this client hold too much memory: bodies that are not "
                   "complete, or answers that nobody reads. Please finish those first.");
        break;
    }
    return false;
}

void exchange_drop_body(struct exchange *ex) {
    ledger_give_back(&ex->server->ledger, &ex->entry);
    buf_close(&ex->body);
}

/* No function of the model's engine is called for the exchange from here on. */
static void leave_engine(struct exchange *ex) {
    if (ex->places) engine_queue_leave(ex->model->engine, ex->places);
    ex->places = 0;
    if (ex->constraint) engine_constraint_close(ex->model->engine, ex->constraint);
    ex->constraint = NULL;
    if (ex->adapter.number) engine_adapter_leave(ex->model->engine, ex->adapter.number);
    ex->adapter.number = 0;
    served_leave(ex);
}

bool exchange_take_adapter(struct exchange *ex, const char *name) {
    if (!engine_adapter_take(ex->model->engine, name, &ex->adapter)) return false;
    snprintf(ex->adapter_name, sizeof ex->adapter_name, "%s", name);
    return true;
}

/* Returns whether the engine has ended its work for the exchange, and the exchange's own stream, if
 * it has one, is rendered or has lost its client. */
static bool own_is_rendered(const struct exchange *ex) {
    const bool streams = ex->stream.owner == ex;
    if (ex->state == EXCHANGE_SENDING) return !streams || ex->stream.ended;
    return ex->state == EXCHANGE_OVER && streams;
}

void exchange_rendered(struct exchange *ex) {
    struct exchange *owner = ex->stream.owner ? ex->stream.owner : ex;
    if (!own_is_rendered(owner) || owner->move) return;
    for (const struct exchange *each = owner->followers; each; each = each->next_follower)
        if (!each->stream.ended) return;
    leave_engine(owner);
}

static void drop_pictures(struct exchange *ex) {
    for (int i = 0; i < ex->picture_count; i++) picture_drop(ex->pictures[i]);
    mem_free(ex->pictures);
    ex->pictures = NULL;
    ex->picture_count = 0;
}

void exchange_unref(struct exchange *ex) {
    struct server *server = ex->server;
    CHECK(ex->refs > 0);
    if (--ex->refs) return;
    CHECK(ex->state == EXCHANGE_OVER && !ex->connection);
    CHECK(ex->jobs_submitted == ex->jobs_finished);
    spans_send(ex);
    quota_leave(ex);
    for (int i = 0; i < ex->job_count; i++) engine_job_close(&ex->jobs[i]);
    mem_free(ex->jobs);
    mem_free(ex->progress);
    drop_pictures(ex);
    move_close(ex);
    exchange_drop_body(ex);
    ledger_leave(&server->ledger, &ex->entry);
    background_unfollow(ex);
    stream_close(&ex->stream);
    oai_request_close(&ex->request);
    json_free(ex->tree);
    arena_close(&ex->arena);
    buf_close(&ex->answer.body);
    leave_engine(ex);
    mem_free(ex);
    server->exchanges--;
    server_may_end(server);
}

void exchange_make_id(char *id, size_t size, const char *prefix) {
    unsigned char random[16];
    int at = snprintf(id, size, "%s", prefix);
    CHECK(getrandom(random, sizeof random, 0) == (ssize_t)sizeof random);
    for (size_t i = 0; i < sizeof random; i++)
        at += snprintf(id + at, size - (size_t)at, "%02x", random[i]);
}

void exchange_suspend(struct exchange *ex) {
    CHECK(ex->connection && !ex->suspended);
    ex->suspended = true;
    MHD_suspend_connection(ex->connection);
}

void exchange_resume(struct exchange *ex) {
    if (!ex->suspended) return;
    ex->suspended = false;
    MHD_resume_connection(ex->connection);
    server_pump_soon(ex->server);
}

void exchange_cancel(struct exchange *ex) {
    for (int i = 0; i < ex->jobs_submitted; i++)
        if (!ex->progress[i].finished)
            atomic_store_explicit(&ex->jobs[i].cancel, 1, memory_order_release);
}

void exchange_fail(struct exchange *ex) {
    const struct oai_error *error = &ex->error;
    struct answer *answer = &ex->answer;
    answer->status = error->status;
    answer->content_type = NULL;
    if (error->status == 503 || error->status == 429)
        answer->retry_ms = ex->retry_ns > 0 ? (int)(ex->retry_ns / 1000000) + 1
                                            : stats_retry_ms(&ex->model->stats);
    buf_clear(&answer->body);
    oai_error_fn *const write =
        ex->route && ex->route->kind ? ex->route->kind->error : oai_error_of_path(ex->path);
    if (write)
        write(&answer->body, error, ex->request_id);
    else
        oai_render_error(&answer->body, error);
    exchange_ready(ex);
}

int exchange_refuse(struct exchange *ex) {
    bool busy = ex->error.status == 503 || ex->error.status == 429;
    if (busy && ex->answer.status < 400) ex->server->rejected[ex->reject]++;
    exchange_fail(ex);
    return -1;
}

void exchange_refuse_text(struct exchange *ex) {
    struct buf *body = &ex->answer.body;
    bool too_long = body->full;
    size_t most = body->limit;
    buf_close(body);
    buf_open(body, ex->server->options.max_answer_bytes);
    if (!too_long) {
        exchange_refuse_memory(ex);
        exchange_refuse(ex);
        return;
    }
    oai_refuse(&ex->error, 400, "invalid_value", NULL,
               "The answer would be longer than %zu bytes, the memory for one such answer. Please "
               "send a shorter text, or ask for fewer choices, tokens or logprobs.",
               most);
    exchange_refuse(ex);
}

/* A text counts as held once it is complete. While a worker writes it, its size is bounded by the
 * worker's part of the ledger's bytes (exchange_begin), so all texts have at most twice these
 * bytes together. */
void exchange_hold_text(struct exchange *ex) {
    struct buf *body = &ex->answer.body;
    if (body->failed) {
        exchange_refuse_text(ex);
    } else if (!exchange_hold(ex, body->capacity)) {
        buf_close(body);
        buf_open(body, ex->server->options.max_answer_bytes);
        exchange_refuse(ex);
    }
}
