/* One request from its complete body to its answer. */
#include "server/http.h"

#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"

#define ANSWER_BYTES_MAX ((size_t)1 << 30)

/* --- life --- */

struct exchange *exchange_open(struct server *server, struct conn *conn,
                               struct MHD_Connection *connection) {
    struct exchange *ex = mem_try_alloc(1, sizeof *ex);
    if (!ex) return NULL;
    ex->server = server;
    ex->conn = conn;
    ex->connection = connection;
    ex->refs = 1;
    ex->received_ns = clock_ns();
    ex->created = clock_unix_seconds();
    buf_open(&ex->body, server->options.max_body_bytes);
    buf_open(&ex->answer.body, ANSWER_BYTES_MAX);
    conn->exchange = ex;
    server->exchanges++;
    return ex;
}

void exchange_drop_body(struct exchange *ex) {
    ex->server->body_bytes -= ex->body_held;
    ex->body_held = 0;
    buf_close(&ex->body);
}

void exchange_unref(struct exchange *ex) {
    struct server *server = ex->server;
    if (--ex->refs) return;
    CHECK(!ex->connection && (!ex->submitted || ex->finished));
    if (ex->placed) engine_queue_leave(server->engine, 1);
    if (ex->submitted) engine_job_close(&ex->job);
    exchange_drop_body(ex);
    stream_close(&ex->stream);
    oai_request_close(&ex->request);
    json_free(ex->tree);
    arena_close(&ex->arena);
    buf_close(&ex->answer.body);
    mem_free(ex);
    server->exchanges--;
    server_exchange_freed(server);
}

void exchange_suspend(struct exchange *ex) {
    ex->suspended = true;
    MHD_suspend_connection(ex->connection);
}

void exchange_resume(struct exchange *ex) {
    if (!ex->suspended) return;
    ex->suspended = false;
    MHD_resume_connection(ex->connection);
    server_pump_soon(ex->server);
}

void exchange_gone(struct exchange *ex) {
    ex->gone = true;
    if (ex->submitted && !ex->finished)
        atomic_store_explicit(&ex->job.cancel, 1, memory_order_release);
    exchange_resume(ex);
}

void exchange_refuse(struct exchange *ex, const struct oai_error *error) {
    struct answer *answer = &ex->answer;
    answer->status = error->status;
    buf_clear(&answer->body);
    oai_render_error(&answer->body, error);
    ex->phase = PHASE_READY;
    ex->refused = true;
}

/* --- the job --- */

static void jobs_add(struct exchange *ex) {
    ex->next = ex->server->jobs;
    if (ex->next) ex->next->prev = ex;
    ex->server->jobs = ex;
    ex->refs++;
}

static void jobs_remove(struct exchange *ex) {
    if (ex->prev)
        ex->prev->next = ex->next;
    else
        ex->server->jobs = ex->next;
    if (ex->next) ex->next->prev = ex->prev;
    ex->next = ex->prev = NULL;
}

static void make_id(struct exchange *ex) {
    unsigned char random[16];
    const char *prefix = ex->request.kind == OAI_CHAT ? "chatcmpl-" : "cmpl-";
    int at = snprintf(ex->id, sizeof ex->id, "%s", prefix);
    CHECK(getrandom(random, sizeof random, 0) == (ssize_t)sizeof random);
    for (size_t i = 0; i < sizeof random; i++)
        at += snprintf(ex->id + at, sizeof ex->id - (size_t)at, "%02x", random[i]);
}

static void submit(struct exchange *ex) {
    struct oai_error error;
    ex->job.request = ex->request.sampling;
    make_id(ex);
    int rc = engine_submit(ex->server->engine, &ex->job);
    if (rc) {
        struct fault fault;
        fault_set(&fault, rc, NULL, "%s", err_text(rc));
        oai_refuse_fault(&error, &fault);
        exchange_refuse(ex, &error);
        return;
    }
    ex->submitted = true;
    ex->placed = false; /* the engine gives it back when the job finishes */
    ex->phase = PHASE_WAIT;
    jobs_add(ex);
}

static void after_work(uv_work_t *work, int status) {
    struct exchange *ex = work->data;
    ex->server->works--;
    exchange_drop_body(ex);
    if (status) oai_refuse(&ex->error, 503, "overloaded", NULL, "The server is shutting down.");
    if (ex->error.status)
        exchange_refuse(ex, &ex->error);
    else if (ex->gone || ex->request.kind == OAI_TOKENIZE || ex->request.kind == OAI_DETOKENIZE)
        ex->phase = PHASE_READY;
    else
        submit(ex);
    if (ex->phase == PHASE_READY && ex->placed) {
        engine_queue_leave(ex->server->engine, 1);
        ex->placed = false;
    }
    if (ex->phase == PHASE_READY) exchange_resume(ex);
    exchange_unref(ex);
}

static void start_work(struct exchange *ex) {
    ex->work.data = ex;
    if (uv_queue_work(&ex->server->loop, &ex->work, prepare_run, after_work)) {
        struct oai_error error;
        oai_refuse(&error, 503, "overloaded", NULL, "The server cannot take more work.");
        exchange_refuse(ex, &error);
        return;
    }
    ex->refs++;
    ex->server->works++;
    ex->phase = PHASE_WORK;
    conn_watch(ex->conn);
    exchange_suspend(ex);
}

static void refuse_busy(struct exchange *ex, enum stats_reject reason, const char *text) {
    struct oai_error error;
    oai_refuse(&error, 503, "overloaded", NULL, "%s", text);
    exchange_refuse(ex, &error);
    ex->answer.retry_ms = stats_retry_ms(&ex->server->stats);
    ex->server->stats.rejected[reason]++;
}

void exchange_dispatch(struct exchange *ex) {
    enum oai_kind kind = ex->route->kind;
    if (ex->route->get) {
        ex->phase = PHASE_READY;
        ex->route->get(ex);
        return;
    }
    ex->request.kind = kind;
    if (kind == OAI_CHAT || kind == OAI_COMPLETION) {
        if (ex->server->draining) {
            refuse_busy(ex, STATS_REJECT_DRAINING, "The server is shutting down.");
            return;
        }
        ex->placed = engine_queue_enter(ex->server->engine, 1);
        if (!ex->placed) {
            refuse_busy(ex, STATS_REJECT_FULL, "The request queue is full, please try again.");
            return;
        }
    }
    start_work(ex);
}

/* --- after a wake --- */

bool exchange_stream_ready(const struct exchange *ex, int64_t now_ns) {
    int64_t patience = (int64_t)ex->server->options.timeouts.ping * 1000000;
    return ex->finished || ex->tokens_counted > 0 ||
           (atomic_load_explicit(&ex->job.admitted, memory_order_acquire) &&
            now_ns - ex->received_ns > patience);
}

static bool wants_resume(struct exchange *ex, int64_t now_ns) {
    if (!ex->request.stream) return ex->finished;
    if (ex->phase == PHASE_WAIT) return exchange_stream_ready(ex, now_ns);
    if (stream_has_news(ex)) return true;
    ex->stream.ping =
        now_ns - ex->last_output_ns > (int64_t)ex->server->options.timeouts.ping * 1000000;
    return ex->stream.ping;
}

/* `finish` is loaded before the count: the other order loses tokens. */
void exchange_poll(struct exchange *ex, int64_t now_ns) {
    const struct engine_choice *choice = &ex->job.choice[0];
    bool finished = atomic_load_explicit(&ex->job.finished, memory_order_acquire) != 0;
    uint32_t count = (uint32_t)atomic_load_explicit(&choice->token_count, memory_order_acquire);
    if (count > ex->tokens_counted) {
        stats_tokens(&ex->server->stats, count - ex->tokens_counted, ex->received_ns,
                     ex->last_token_ns, now_ns);
        ex->tokens_counted = count;
        ex->last_token_ns = now_ns;
    }
    ex->finished = finished;
    if (ex->suspended && wants_resume(ex, now_ns)) exchange_resume(ex);
    if (!finished) return;
    stats_finished(&ex->server->stats, &ex->job, ex->received_ns);
    jobs_remove(ex);
    exchange_unref(ex);
}

/* --- answers --- */

struct oai_answer exchange_answer_facts(const struct exchange *ex) {
    const struct server *server = ex->server;
    return (struct oai_answer){
        .engine = server->engine,
        .info = server->rules.info,
        .request = &ex->request,
        .job = &ex->job,
        .id = ex->id,
        .model = server->rules.names[0],
        .created = ex->created,
    };
}

void exchange_job_error(const struct exchange *ex, struct oai_error *error) {
    const struct engine_choice *choice = &ex->job.choice[0];
    if (atomic_load_explicit(&choice->finish, memory_order_acquire) == ENGINE_FINISH_ABORT)
        oai_refuse(error, 503, "aborted", NULL,
                   "The server is shutting down and gave this request up.");
    else if (ex->job.fault.code)
        oai_refuse_fault(error, &ex->job.fault);
    else
        oai_refuse(error, 500, "ERR_INTERNAL", NULL, "The engine failed without a reason.");
}

void exchange_answer_job(struct exchange *ex) {
    struct oai_answer facts = exchange_answer_facts(ex);
    struct oai_error error;
    int finish = atomic_load_explicit(&ex->job.choice[0].finish, memory_order_acquire);
    if (finish == ENGINE_FINISH_ABORT || finish == ENGINE_FINISH_ERROR) {
        exchange_job_error(ex, &error);
        exchange_refuse(ex, &error);
        return;
    }
    oai_render_answer(&ex->answer.body, &facts);
    ex->answer.status = 200;
    ex->phase = PHASE_READY;
}
