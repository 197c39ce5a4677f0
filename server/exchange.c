/* One request from its complete body to its answer. */
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

#define VALUE_BYTES 100 /* approximate memory of a JSON value in a tree */

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
    if (ex->state == EXCHANGE_WAITING) models_forget(ex);
    if (background_stays(ex, false)) exchange_set_state(ex, EXCHANGE_BACKGROUND);
    if (ex->state != EXCHANGE_BACKGROUND) {
        if (!exchange_is_gone(ex))
            exchange_set_state(ex, running ? EXCHANGE_CANCELLED : EXCHANGE_OVER);
        atomic_store_explicit(&ex->left, true, memory_order_relaxed);
        exchange_cancel(ex);
    }
    exchange_resume(ex);
}

static bool is_in_engine(const struct exchange *ex) {
    return (TO(RUNNING) | TO(STREAMING) | TO(BACKGROUND) | TO(CANCELLED)) & 1u << ex->state;
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
    models_leave(ex);
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
    exchange_drop_pictures(ex);
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

/* --- the jobs --- */

/* The engine works for this exchange: exchange_poll checks it after every wake, until the engine
 * has finished. */
static void wait_for_engine(struct exchange *ex) {
    CHECK(!ex->next && !ex->prev);
    exchange_set_state(ex, EXCHANGE_RUNNING);
    ex->next = ex->server->jobs;
    if (ex->next) ex->next->prev = ex;
    ex->server->jobs = ex;
    ex->refs++;
}

static void end_wait(struct exchange *ex) {
    if (ex->prev)
        ex->prev->next = ex->next;
    else
        ex->server->jobs = ex->next;
    if (ex->next) ex->next->prev = ex->prev;
    ex->next = ex->prev = NULL;
    exchange_unref(ex);
}

static void open_facts(struct exchange *ex) {
    exchange_make_id(ex->id, sizeof ex->id, ex->request.kind->form->id_prefix);
    ex->facts = (struct oai_answer){
        .engine = ex->model->engine,
        .rules = &ex->model->rules,
        .request = &ex->request,
        .jobs = ex->jobs,
        .job_count = ex->job_count,
        .id = ex->id,
        .model = ex->adapter.number ? ex->adapter_name : ex->model->rules.names[0],
        .created = ex->created,
    };
}

/* For functions of the engine that return a code without a fault. */
static void refuse_code(struct exchange *ex, int rc) {
    struct fault fault;
    fault_set(&fault, rc, NULL, "%s", err_text(rc));
    oai_refuse_fault(&ex->error, &fault);
}

/* Many texts that become vectors take at most a quarter of the queue's places and tokens, but at
 * least one place. */
static int find_jobs_at_once(const struct exchange *ex) {
    const int64_t tokens = ex->server->ledger.stock[LEDGER_TOKENS].total / 4;
    int64_t longest = 1, most = ex->model->rules.info->max_queue / 4;
    if (!ex->request.sampling.pooling) return ex->job_count;
    for (int i = 0; i < ex->job_count; i++)
        if (ex->jobs[i].request.prompt_count > longest) longest = ex->jobs[i].request.prompt_count;
    if (most > OAI_INPUTS_AT_ONCE) most = OAI_INPUTS_AT_ONCE;
    if (tokens && most > tokens / longest) most = tokens / longest;
    if (most < 1) most = 1;
    return ex->job_count < most ? ex->job_count : (int)most;
}

/* Submits the next of many jobs in the places of those that have ended. A failure ends the request,
 * as in submit_jobs. */
static void submit_more(struct exchange *ex) {
    struct server *server = ex->server;
    while (ex->submits && ex->jobs_submitted - ex->jobs_finished < ex->jobs_at_once) {
        const bool cut = ex->error.status || ex->cut || exchange_is_gone(ex);
        if (!cut && !engine_queue_enter(ex->model->engine, 1)) return;
        int rc = cut ? 0 : engine_submit(ex->model->engine, &ex->jobs[ex->jobs_submitted]);
        if (rc) {
            engine_queue_leave(ex->model->engine, 1);
            refuse_code(ex, rc);
            exchange_cancel(ex);
        }
        if (!cut && !rc) {
            ex->jobs_submitted++;
            stats_submitted(&ex->model->stats, clock_ns());
        }
        ex->submits = !cut && !rc && ex->jobs_submitted < ex->job_count;
        if (!ex->submits && --server->accepted == 0) server_all_submitted(server);
    }
    if (ex->cut == EXCHANGE_CUT_TIME && ex->jobs_submitted < ex->job_count && !ex->error.status)
        oai_refuse(&ex->error, 408, "request_timeout", NULL,
                   "The request took longer than the time it was given.");
}

/* Submits all jobs of a request or none: when one fails, the jobs before it are cancelled, and the
 * refusal waits for their end. Of many texts the first ones are submitted, see submit_more. */
static void submit_jobs(struct exchange *ex) {
    const int count = ex->jobs_at_once = find_jobs_at_once(ex);
    if (!quota_confirm(ex)) {
        exchange_refuse(ex);
        return;
    }
    open_facts(ex);
    for (; ex->jobs_submitted < count; ex->jobs_submitted++) {
        int rc = engine_submit(ex->model->engine, &ex->jobs[ex->jobs_submitted]);
        if (rc) {
            refuse_code(ex, rc);
            break;
        }
        CHECK(ex->places > 0);
        ex->places--; /* the engine gives it back */
        stats_submitted(&ex->model->stats, clock_ns());
    }
    quota_settle(ex); /* the tokens are known now */
    if (!ex->error.status) {
        ex->submits = count < ex->job_count;
        wait_for_engine(ex);
    } else if (ex->jobs_submitted) {
        exchange_cancel(ex);
        wait_for_engine(ex);
    } else {
        exchange_refuse(ex);
    }
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

/* The texts that a response stores and repeats outlive the body, so they are held in its place. A
 * request without jobs has freed them with its arena. */
static void hold_repeated(struct exchange *ex) {
    const struct oai_request *request = &ex->request;
    if (ex->error.status || !ex->job_count) return;
    size_t size = request->own_items ? strlen(request->own_items) : 0;
    if (request->repeated) size += strlen(request->repeated);
    (void)exchange_hold(ex, size); /* a refusal is in ex->error */
}

void exchange_prepared(struct exchange *ex) {
    struct server *server = ex->server;
    bool accepted = ex->places > 0;
    CHECK(ex->state == EXCHANGE_PREPARING || exchange_is_gone(ex));
    CHECK(server->works > 0);
    server->works--;
    exchange_drop_body(ex);
    hold_repeated(ex);
    if (ex->error.status)
        exchange_refuse(ex);
    else if (exchange_is_gone(ex) || !ex->job_count)
        exchange_ready(ex);
    else
        submit_jobs(ex);
    if (ex->answer.status == 200) exchange_hold_text(ex);
    if (ex->places) engine_queue_leave(ex->model->engine, ex->places);
    ex->places = 0;
    if (!is_in_engine(ex)) quota_release(ex); /* the engine has nothing of it */
    if (accepted && !ex->submits && --server->accepted == 0) server_all_submitted(server);
    if (ex->state == EXCHANGE_READY || ex->request.background ||
        exchange_stream_ready(ex, clock_ns()))
        exchange_resume(ex);
    exchange_unref(ex);
}

/* The tree of a body is many times its size. One that is larger than those of usual requests shares
 * the memory of bodies until it is freed, with the body. */
static bool hold_tree(struct exchange *ex) {
    size_t most = oai_json_nodes(&ex->model->rules); /* more are refused while they are read */
    size_t values = ex->values < most ? ex->values : most;
    return values <= OAI_JSON_VALUES || exchange_hold(ex, (values - OAI_JSON_VALUES) * VALUE_BYTES);
}

static void start_preparing(struct exchange *ex) {
    if (!hold_tree(ex)) {
        exchange_refuse(ex);
        return;
    }
    ex->refs++;
    ex->server->works++;
    ex->server->accepted += ex->places > 0;
    exchange_set_state(ex, EXCHANGE_PREPARING);
    conn_watch(ex->conn);
    if (!ex->suspended) exchange_suspend(ex);
    works_add(ex);
}

/* Copies the header that the worker needs: the connection may be gone by then. */
static void copy_session(struct exchange *ex) {
    const char *session =
        MHD_lookup_connection_value(ex->connection, MHD_HEADER_KIND, "X-Session-ID");
    if (session && strlen(session) < sizeof ex->session)
        snprintf(ex->session, sizeof ex->session, "%s", session);
}

void exchange_dispatch(struct exchange *ex) {
    if (ex->route->act) {
        ex->answer.status = 200; /* unless `act` refuses */
        ex->route->act(ex);
        if (ex->state == EXCHANGE_RECEIVING) exchange_ready(ex);
        return;
    }
    if (!ex->route->kind) {
        move_finish(ex);
        return;
    }
    ex->request.kind = ex->route->kind;
    if (ex->request.kind->form) copy_session(ex);
    if (ex->request.kind->form && ex->server->draining) {
        exchange_refuse_draining(ex);
        exchange_refuse(ex);
        return;
    }
    enum models_entry entry = models_choose(ex) ? models_enter(ex) : MODELS_REFUSED;
    if (entry == MODELS_REFUSED)
        exchange_refuse(ex);
    else if (entry == MODELS_ENTERED)
        exchange_begin(ex);
}

void exchange_begin(struct exchange *ex) {
    if (!ex->request.kind->form)
        ex->answer.body.limit =
            ex->server->ledger.total / WORKS_AT_ONCE - 1; /* -1: the NUL at the buffer's end */
    else if (!quota_reserve(ex)) {
        exchange_refuse(ex);
        return;
    }
    start_preparing(ex);
}

void exchange_order(struct exchange *ex, enum engine_order_kind kind, uint64_t conversation) {
    ex->order.kind = kind;
    ex->order.id = conversation;
    int rc = engine_conversation_order(ex->model->engine, &ex->order);
    if (rc) {
        if (rc == ERR_FULL)
            oai_refuse(&ex->error, 503, "overloaded", NULL,
                       kind == ENGINE_ORDER_DELETE
                           ? "Too many conversations are being deleted, please try again."
                           : "Too many conversations are being written, please try again.");
        else
            refuse_code(ex, rc);
        exchange_refuse(ex);
        return;
    }
    wait_for_engine(ex);
    conn_watch(ex->conn);
    exchange_suspend(ex);
}

/* --- after a wake --- */

/* A failure before the header can still be an HTTP error, so the header waits for the first token,
 * but not for long: proxies close streams that send nothing while a prompt is read. A client that
 * asks for progress gets the header at once; so does one of a response in the background, which
 * must know the id to come back. */
bool exchange_stream_ready(const struct exchange *ex, int64_t now_ns) {
    int64_t patience =
        ex->request.include_progress ? 0 : (int64_t)ex->server->options.timeouts.first * 1000000;
    if (!ex->request.stream || !ex->job_count) return false;
    if (ex->jobs_submitted < ex->job_count) return false; /* refused: not every job has choices */
    if (ex->tokens_counted || ex->request.background) return true;
    if (ex->error.status) return false;
    return ex->state == EXCHANGE_FINISHED || now_ns - ex->received_ns > patience;
}

static bool wants_resume(struct exchange *ex, int64_t now_ns) {
    if (ex->state == EXCHANGE_FINISHED || ex->state == EXCHANGE_SENDING) return true;
    if (!ex->request.stream) return ex->request.background;
    if (ex->state == EXCHANGE_RUNNING) return exchange_stream_ready(ex, now_ns);
    return stream_is_due(ex, now_ns);
}

/* The first failure ends the request, because an answer needs all its jobs. */
static void note_job_failure(struct exchange *ex, const struct engine_job *job) {
    for (int i = 0; i < job->choice_count; i++) {
        int finish = atomic_load_explicit(&job->choice[i].finish, memory_order_acquire);
        if (finish != ENGINE_FINISH_ABORT && finish != ENGINE_FINISH_ERROR) continue;
        if (ex->error.status) return;
        if (ex->cut == EXCHANGE_CUT_TIME)
            oai_refuse(&ex->error, 408, "request_timeout", NULL,
                       "The request took longer than the time it was given.");
        else if (finish == ENGINE_FINISH_ABORT)
            oai_refuse(&ex->error, 503, "aborted", NULL,
                       "The server is shutting down and gave this request up.");
        else if (job->fault.code)
            oai_refuse_fault(&ex->error, &job->fault);
        else
            oai_refuse(&ex->error, 500, "ERR_INTERNAL", NULL,
                       "The engine failed without a reason.");
        oai_rename_field(&ex->request, &ex->error);
        exchange_cancel(ex);
        return;
    }
}

static void poll_job(struct exchange *ex, int i, int64_t now_ns) {
    struct job_progress *progress = &ex->progress[i];
    const struct engine_job *job = &ex->jobs[i];
    uint32_t count;
    bool finished = engine_see_job(job, &count);
    if (count > progress->tokens_counted) {
        uint32_t fresh = count - progress->tokens_counted;
        stats_tokens(&ex->model->stats, job, fresh, ex->received_ns, progress->last_token_ns,
                     now_ns);
        ex->tokens_counted += fresh;
        progress->tokens_counted = count;
        progress->last_token_ns = now_ns;
    }
    if (!finished) return;
    progress->finished = true;
    ex->jobs_finished++;
    stats_finished(&ex->model->stats, job, ex->received_ns);
    note_job_failure(ex, job);
}

void exchange_poll(struct exchange *ex, int64_t now_ns) {
    for (int i = 0; i < ex->jobs_submitted; i++)
        if (!ex->progress[i].finished) poll_job(ex, i, now_ns);
    submit_more(ex);
    bool finished = ex->jobs_submitted
                        ? ex->jobs_finished == ex->jobs_submitted && !ex->submits
                        : atomic_load_explicit(&ex->order.done, memory_order_acquire) != 0;
    if (finished && ex->request.background) background_end(ex);
    if (finished)
        exchange_set_state(ex, ex->state == EXCHANGE_RUNNING     ? EXCHANGE_FINISHED
                               : ex->state == EXCHANGE_STREAMING ? EXCHANGE_SENDING
                                                                 : EXCHANGE_OVER);
    if (ex->suspended && wants_resume(ex, now_ns)) exchange_resume(ex);
    background_wake(ex, now_ns);
    if (!finished) return;
    exchange_rendered(ex); /* where the answer ended before the work */
    end_wait(ex);
}

/* --- answers --- */

static void refuse_order(struct exchange *ex) {
    switch (ex->order.result) {
    case ERR_UNSUPPORTED:
        oai_refuse(&ex->error, 409, "conversation_not_written", "id",
                   "This conversation has no file: a later turn continued it, or its policy keeps "
                   "everything, or there is no state directory (--state-dir).");
        break;
    case ERR_LIMIT:
    case ERR_IO:
        oai_refuse(&ex->error, 409, "conversation_not_written", "id",
                   "This conversation could not be written: %s.", err_text(ex->order.result));
        break;
    case ERR_STOPPED:
        oai_refuse(&ex->error, 503, "stopped", NULL, "The server is shutting down.");
        break;
    default:
        oai_refuse(&ex->error, 404, "conversation_not_found", "id",
                   "There is no such conversation.");
        break;
    }
    exchange_refuse(ex);
}

static void render_order_answer(struct exchange *ex) {
    if (ex->order.result != 0) {
        refuse_order(ex);
    } else if (ex->order.kind == ENGINE_ORDER_WRITE) {
        move_send(ex, ex->order.id);
    } else {
        oai_render_deleted(&ex->answer.body, ex->order.id);
        ex->answer.status = 200;
    }
}

void exchange_answer_wait(struct exchange *ex) {
    if (ex->error.status) {
        exchange_fail(ex);
    } else if (!ex->job_count) {
        render_order_answer(ex);
    } else {
        const struct oai_form *form = ex->request.kind->form;
        form->answer(&ex->answer.body, &ex->facts);
        ledger_charge(&ex->server->ledger, &ex->entry, ex->answer.body.capacity);
        if (form->keep) (void)form->keep(&ex->facts, NULL, NULL);
        ex->answer.status = 200;
    }
    if (ex->state == EXCHANGE_FINISHED) exchange_ready(ex);
}
