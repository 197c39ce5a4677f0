/* Handles a request from its complete body to its answer: a worker prepares it, its jobs or its
 * order go to the engine, and the answer is rendered when the engine has finished. */
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "server/loop.h"
#include "server/move.h"
#include "server/quota.h"

#define VALUE_BYTES 100 /* approximate memory of a JSON value in a tree */

/* --- the jobs --- */

static bool is_in_engine(const struct exchange *ex) {
    return ex->state == EXCHANGE_RUNNING || ex->state == EXCHANGE_STREAMING ||
           ex->state == EXCHANGE_BACKGROUND || ex->state == EXCHANGE_CANCELLED;
}

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
        if (!ex->submits) models_one_submitted(ex->server);
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
    if (accepted && !ex->submits) models_one_submitted(server);
    if (ex->state == EXCHANGE_READY || ex->request.background ||
        exchange_stream_ready(ex, clock_ns()))
        exchange_resume(ex);
    exchange_unref(ex);
}

/* --- the body is complete --- */

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
