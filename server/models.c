#include "server/models.h"

#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/loop.h"
#include "server/quota.h"

#define SECOND_NS      1000000000ll
#define FAILED_SECONDS 10 /* before a model that could not be loaded is tried again */
#define MINUTE_SECONDS 60.0

/* ---- The set ---- */

struct served_model *models_named(const struct server *server, const char *name) {
    for (int i = 0; i < server->models.count; i++) {
        struct served_model *model = &server->models.items[i];
        for (int k = 0; k < model->rules.name_count; k++)
            if (strcmp(model->rules.names[k], name) == 0) return model;
    }
    return NULL;
}

struct served_model *models_find(const struct server *server, const char *name,
                                 const char **adapter) {
    struct served_model *found = models_named(server, name);
    *adapter = NULL;
    for (int i = 0; i < server->models.count && !found; i++)
        if (served_has_name(&server->models.items[i], name, adapter))
            found = &server->models.items[i];
    return found;
}

/* A name may stand for one model only. */
static int check_model_names(const struct server *server, const struct served_model *model,
                             struct fault *fault) {
    for (int i = 0; i < model->rules.name_count && server->models.count > 1; i++)
        if (models_named(server, model->rules.names[i]) != model)
            return fault_set(fault, ERR_INVALID, "model", "two models have the name '%.100s'",
                             model->rules.names[i]);
    return 0;
}

/* An adapter with a model's name would not be found. */
static int check_adapter_names(const struct server *server, const struct served_model *model,
                               struct fault *fault) {
    const struct server_list *adapters = &model->options->adapters;
    char name[ENGINE_ADAPTER_NAME];
    for (size_t i = 0; i < adapters->count; i++) {
        const char *text = adapters->items[i];
        snprintf(name, sizeof name, "%.*s", (int)strcspn(text, "="), text);
        if (models_named(server, name))
            return fault_set(fault, ERR_INVALID, "lora", "'%s': a model has this name", name);
    }
    return 0;
}

int models_open(struct server *server, struct fault *fault) {
    const struct server_options *options = &server->options;
    struct models *models = &server->models;
    int rc = 0;
    if (options->model_count > MODELS_MAX)
        return fault_set(fault, ERR_LIMIT, "model", "%d models; at most %d are served",
                         options->model_count, MODELS_MAX);
    models->items = mem_must_alloc((size_t)options->model_count, sizeof *models->items);
    models->listed = mem_must_alloc((size_t)options->model_count, sizeof *models->listed);
    models->adapters = mem_must_alloc((size_t)options->model_count * ENGINE_ADAPTERS_MAX,
                                      sizeof *models->adapters);
    for (int i = 0; i < options->model_count && !rc; i++) {
        rc = served_open(&models->items[models->count++], server, &options->models[i], fault);
        if (!rc) rc = check_model_names(server, &models->items[i], fault);
    }
    for (int i = 0; i < models->count && !rc; i++)
        rc = check_adapter_names(server, &models->items[i], fault);
    return rc;
}

void models_close(struct server *server) {
    struct models *models = &server->models;
    CHECK(!models->working);
    for (int i = 0; i < models->count; i++) served_close(&models->items[i]);
    mem_free(models->items);
    mem_free(models->listed);
    mem_free(models->adapters);
}

static int64_t held_memory(const struct models *models) {
    int64_t sum = 0;
    for (int i = 0; i < models->count; i++) {
        enum served_state state = models->items[i].state;
        if (state != SERVED_UNLOADED && state != SERVED_FAILED)
            sum += models->items[i].memory_bytes;
    }
    return sum;
}

static int64_t pinned_memory(const struct models *models) {
    int64_t sum = 0;
    for (int i = 0; i < models->count; i++)
        if (models->items[i].options->pinned) sum += models->items[i].memory_bytes;
    return sum;
}

/* Checks all models on this thread, before the first request: what they take is then known, and
 * what cannot be served is said. */
static int check_all_models(struct server *server, struct fault *fault) {
    struct models *models = &server->models;
    int good = 0;
    for (int i = 0; i < models->count; i++) {
        struct served_model *model = &models->items[i];
        served_begin(model, SERVED_CHECK, &models->task);
        served_run(model, &models->task);
        served_end(model, &models->task);
        good += model->state != SERVED_FAILED;
        model->wanted = model->options->pinned && model->state != SERVED_FAILED;
        if (model->state == SERVED_FAILED) *fault = model->fault;
    }
    return good ? 0 : fault->code;
}

int models_start(struct server *server, struct engine *engine, struct fault *fault) {
    struct models *models = &server->models;
    const int64_t memory = server->options.models_memory;
    struct served_model *first = &models->items[0];
    int rc = 0;
    for (int i = 0; i < models->count; i++) served_prepare(&models->items[i]);
    if (engine)
        memcpy(server->secret, engine_info(engine)->space_key, sizeof server->secret);
    else
        rc = engine_space_key(first->engine_options.state_dir, server->secret, fault);
    models->allowance = server->options.model_loads;
    models->refilled_ns = clock_ns();
    if (engine) return served_use(first, engine, fault);
    if (!rc) rc = check_all_models(server, fault);
    if (!rc && memory && pinned_memory(models) > memory)
        return fault_set(fault, ERR_LIMIT, "models-memory",
                         "the pinned models take %.1f MB together, and %.1f MB are given",
                         (double)pinned_memory(models) * 1e-6, (double)memory * 1e-6);
    return rc;
}

/* ---- Refusing ---- */

static void refuse_busy(struct exchange *ex, const char *code, int64_t wait_ns, const char *why) {
    ex->reject = STATS_REJECT_MODEL;
    ex->retry_ns = wait_ns;
    oai_refuse(&ex->error, 503, code, "model", "The model `%.128s` %s", ex->model->rules.names[0],
               why);
}

/* A fault of the machine may pass; another one stays until the model's files or options change. */
static void refuse_failed(struct exchange *ex) {
    const struct served_model *model = ex->model;
    const struct fault *fault = &model->fault;
    const bool passes = fault->code == ERR_NOMEM || fault->code == ERR_IO ||
                        fault->code == ERR_DEVICE || fault->code == ERR_BUSY;
    ex->reject = STATS_REJECT_MODEL;
    ex->retry_ns = model->failed_ns + FAILED_SECONDS * SECOND_NS - clock_ns();
    oai_refuse(&ex->error, passes ? 503 : 500, "model_load_failed", "model",
               "The model `%.128s` cannot be loaded: %s%s%.200s.", model->rules.names[0],
               fault->field, fault->field[0] ? ": " : "", fault->text);
}

static bool refuse_absent(struct exchange *ex, const char *name) {
    const struct models *models = &ex->server->models;
    char served[256] = "";
    size_t used = 0;
    for (int i = 0; i < models->count && used < sizeof served; i++)
        used += (size_t)snprintf(served + used, sizeof served - used, "%s`%.64s`", i ? ", " : "",
                                 models->items[i].rules.names[0]);
    oai_refuse(&ex->error, 404, "model_not_found", "model",
               "The model `%.128s` does not exist or you do not have access to it. Served here: "
               "%s.",
               name, served);
    return false;
}

/* ---- Turns ---- */

static void hold_model(struct exchange *ex) {
    CHECK(!ex->holds && ex->model->state == SERVED_LOADED);
    ex->holds = true;
    ex->model->users++;
    served_note_use(ex);
}

void models_one_submitted(struct server *server) {
    if (--server->accepted == 0 && server->draining) models_drain(server);
}

/* Refuses a request that waits; its error is set. */
static void refuse_waiting(struct exchange *ex) {
    served_unqueue(ex);
    models_one_submitted(ex->server);
    exchange_refuse(ex);
    exchange_resume(ex);
}

static void refuse_all(struct served_model *model, void (*refuse)(struct exchange *ex)) {
    while (model->waiting) {
        refuse(model->waiting);
        refuse_waiting(model->waiting);
    }
}

static void begin_waiting(struct served_model *model) {
    while (model->waiting && model->state == SERVED_LOADED && !model->leaves) {
        struct exchange *ex = model->waiting;
        hold_model(ex);
        served_unqueue(ex);
        exchange_begin(ex);
        models_one_submitted(ex->server); /* now it is a worker's */
        if (ex->state == EXCHANGE_READY) exchange_resume(ex);
    }
}

static void refill_loads(struct server *server, int64_t now_ns) {
    struct models *models = &server->models;
    const double most = server->options.model_loads;
    models->allowance += (double)(now_ns - models->refilled_ns) / SECOND_NS * most / MINUTE_SECONDS;
    if (models->allowance > most) models->allowance = most;
    models->refilled_ns = now_ns;
}

static bool may_load(struct server *server, int64_t now_ns) {
    refill_loads(server, now_ns);
    return !server->options.model_loads || server->models.allowance >= 1;
}

static void after_work(uv_work_t *work, int status);

static void run_work(uv_work_t *work) {
    struct server *server = work->data;
    served_run(server->models.working, &server->models.task);
}

static void start_work(struct server *server, struct served_model *model, enum served_task task) {
    struct models *models = &server->models;
    models->working = model;
    if (task == SERVED_LOAD) models->allowance -= 1;
    if (task != SERVED_CHECK)
        log_info("model %s is being %s", model->rules.names[0],
                 task == SERVED_LOAD ? "loaded" : "unloaded");
    served_begin(model, task, &models->task);
    models->work.data = server;
    CHECK(uv_queue_work(&server->loop, &models->work, run_work, after_work) == 0);
}

/* Returns the model to be loaded next: a wanted one, or the one whose request has waited longest.
 */
static struct served_model *next_model(const struct server *server) {
    const struct models *models = &server->models;
    struct served_model *next = NULL;
    int64_t first_ns = INT64_MAX;
    for (int i = 0; i < models->count; i++) {
        struct served_model *model = &models->items[i];
        if (model->state != SERVED_UNLOADED && model->state != SERVED_FAILED) continue;
        int64_t since_ns = model->wanted && !server->draining ? 0
                           : model->waiting                   ? model->waiting->received_ns
                                                              : INT64_MAX;
        if (since_ns < first_ns) next = model, first_ns = since_ns;
    }
    return next;
}

/* Returns whether a should leave before b. */
static bool leaves_before(const struct served_model *a, const struct served_model *b) {
    if (!a->users != !b->users) return !a->users;
    return a->used_ns < b->used_ns;
}

static struct served_model *find_leaving(const struct server *server, int64_t now_ns) {
    struct served_model *found = NULL;
    for (int i = 0; i < server->models.count; i++) {
        struct served_model *model = &server->models.items[i];
        if (model->state != SERVED_LOADED || model->options->pinned || model->leaves) continue;
        if (now_ns - model->loaded_ns < server->options.model_residence * SECOND_NS) continue;
        if (!found || leaves_before(model, found)) found = model;
    }
    return found;
}

/* Marks the models that make room for `next`. false: they are not enough, now or ever. */
static bool mark_leaving(struct server *server, const struct served_model *next, int64_t now_ns) {
    struct models *models = &server->models;
    int64_t room = server->options.models_memory - held_memory(models);
    while (server->options.models_memory && room < next->memory_bytes) {
        struct served_model *model = find_leaving(server, now_ns);
        if (!model) return false;
        model->leaves = true;
        room += model->memory_bytes;
    }
    return true;
}

static void refuse_size(struct exchange *ex) {
    const struct models *models = &ex->server->models;
    char why[200];
    snprintf(why, sizeof why,
             "takes %.1f MB of memory, and all models together may take %.1f MB, of which pinned "
             "ones have %.1f MB.",
             (double)ex->model->memory_bytes * 1e-6,
             (double)ex->server->options.models_memory * 1e-6,
             (double)pinned_memory(models) * 1e-6);
    refuse_busy(ex, "model_too_large", 0, why);
}

static bool can_fit(const struct server *server, const struct served_model *model) {
    const int64_t memory = server->options.models_memory;
    const int64_t pinned = model->options->pinned ? 0 : pinned_memory(&server->models);
    return !memory || model->memory_bytes <= memory - pinned;
}

/* Has the streams rendered that the engine of a model which leaves has ended, because their clients
 * may read slowly. */
static void hurry_streams(struct server *server, const struct served_model *model) {
    for (struct conn *conn = server->conns; conn && model->users; conn = conn->next) {
        const struct exchange *owner = conn->exchange ? conn->exchange->stream.owner : NULL;
        if (owner && owner->holds && owner->model == model) stream_hurry(conn->exchange);
    }
}

/* Takes the next step towards loading `next`. */
static void make_way(struct server *server, struct served_model *next, int64_t now_ns) {
    struct models *models = &server->models;
    struct served_model *leaving = NULL;
    bool any = false;
    if (!served_is_checked(next)) {
        start_work(server, next, SERVED_CHECK);
        return;
    }
    if (!can_fit(server, next)) {
        next->wanted = false;
        refuse_all(next, refuse_size);
        return;
    }
    bool enough = may_load(server, now_ns) && mark_leaving(server, next, now_ns);
    for (int i = 0; i < models->count; i++) {
        struct served_model *model = &models->items[i];
        model->leaves = model->leaves && enough;
        any = any || model->leaves;
        if (model->leaves) hurry_streams(server, model);
        if (model->leaves && !model->users) leaving = model;
    }
    if (leaving)
        start_work(server, leaving, SERVED_UNLOAD);
    else if (enough && !any)
        start_work(server, next, SERVED_LOAD);
}

/* Unloads a model that nobody has used for a while. */
static void unload_idle(struct server *server, int64_t now_ns) {
    const int64_t idle_ns = server->options.model_idle * SECOND_NS;
    for (int i = 0; i < server->models.count && idle_ns; i++) {
        struct served_model *model = &server->models.items[i];
        if (model->state != SERVED_LOADED || model->options->pinned || model->users) continue;
        if (now_ns - model->used_ns < idle_ns) continue;
        start_work(server, model, SERVED_UNLOAD);
        return;
    }
}

/* Decides what happens next; called after everything on which that depends. */
static void plan_models(struct server *server) {
    struct models *models = &server->models;
    const int64_t now_ns = clock_ns();
    if (server->closing) return;
    if (!models->working) {
        struct served_model *next = next_model(server);
        for (int i = 0; i < models->count; i++) models->items[i].leaves = false;
        if (next)
            make_way(server, next, now_ns);
        else if (!server->draining)
            unload_idle(server, now_ns);
    }
    for (int i = 0; i < models->count; i++) begin_waiting(&models->items[i]);
}

static void after_work(uv_work_t *work, int status) {
    struct server *server = work->data;
    struct models *models = &server->models;
    struct served_model *model = models->working;
    (void)status; /* nobody cancels it */
    served_end(model, &models->task);
    models->working = NULL;
    if (model->state == SERVED_FAILED) refuse_all(model, refuse_failed);
    begin_waiting(model); /* before it may have to leave again */
    plan_models(server);
    server_may_end(server);
}

/* ---- Requests ---- */

/* Adds the exchange to those that wait for its model. */
static enum models_entry wait_for_model(struct exchange *ex) {
    struct served_model *model = ex->model;
    struct server *server = ex->server;
    if (server->draining) {
        exchange_refuse_draining(ex);
        return MODELS_REFUSED;
    }
    if (model->waiting_count >= model->engine_options.max_queue) {
        refuse_busy(ex, "overloaded", 0, "is not loaded, and its queue is full, please try again.");
        return MODELS_REFUSED;
    }
    if (!quota_wait(ex)) return MODELS_REFUSED;
    exchange_set_state(ex, EXCHANGE_WAITING);
    *model->waiting_end = ex;
    model->waiting_end = &ex->work_next;
    model->waiting_count++;
    server->accepted++;
    exchange_suspend(ex);
    plan_models(server);
    return MODELS_WAITS;
}

static bool is_coming(const struct served_model *model) {
    return model->state == SERVED_LOADED || model->state == SERVED_LOADING || model->waiting ||
           model->wanted;
}

enum models_entry models_enter(struct exchange *ex) {
    struct served_model *model = ex->model;
    const int64_t now_ns = clock_ns();
    if (model->state == SERVED_LOADED && !model->leaves) {
        hold_model(ex);
        return MODELS_ENTERED;
    }
    if (model->state == SERVED_FAILED && now_ns - model->failed_ns < FAILED_SECONDS * SECOND_NS) {
        refuse_failed(ex);
        return MODELS_REFUSED;
    }
    if (!is_coming(model) && !may_load(ex->server, now_ns)) {
        const double left = 1 - ex->server->models.allowance;
        const double seconds = left * MINUTE_SECONDS / ex->server->options.model_loads;
        refuse_busy(ex, "model_loads_exceeded", (int64_t)(seconds * SECOND_NS),
                    "is not loaded, and this server has loaded as many models as it may in a "
                    "minute (--model-loads), please try again.");
        return MODELS_REFUSED;
    }
    return wait_for_model(ex);
}

bool models_choose(struct exchange *ex) {
    char name[OAI_NAME_BYTES], other[OAI_NAME_BYTES];
    const char *adapter;
    if (ex->server->models.count == 1) return true; /* the worker checks the name */
    oai_find_model(ex->body.data ? ex->body.data : "", ex->body.size, name);
    if (!name[0]) return true;
    memcpy(other, name, sizeof other);
    struct served_model *model = models_find(ex->server, name, &adapter);
    if (!model && ex->route->kind->has_tags && oai_other_tag(other))
        model = models_find(ex->server, other, &adapter);
    if (!model) return refuse_absent(ex, name);
    ex->model = model;
    return true;
}

static struct served_model *first_loaded(const struct models *models) {
    for (int i = 0; i < models->count; i++)
        if (models->items[i].state == SERVED_LOADED) return &models->items[i];
    return NULL;
}

static const char *name_asked(struct exchange *ex) {
    return MHD_lookup_connection_value(ex->connection, MHD_GET_ARGUMENT_KIND, "model");
}

/* *adapter: as of models_find. */
static struct served_model *find_asked(struct exchange *ex, const char **adapter) {
    const char *name = name_asked(ex);
    struct served_model *model =
        name ? models_find(ex->server, name, adapter) : first_loaded(&ex->server->models);
    if (model || !name) return ex->model = model ? model : ex->model;
    (void)refuse_absent(ex, name);
    exchange_refuse(ex);
    return NULL;
}

struct served_model *models_ask(struct exchange *ex) {
    const char *adapter;
    return find_asked(ex, &adapter);
}

struct served_model *models_take(struct exchange *ex) {
    if (ex->holds) return ex->model;
    const char *adapter = NULL;
    struct served_model *model = find_asked(ex, &adapter);
    if (!model) return NULL;
    if (model->state != SERVED_LOADED) {
        refuse_busy(ex, "model_not_loaded", 0, "is not loaded: a request that uses it loads it.");
        exchange_refuse(ex);
        return NULL;
    }
    hold_model(ex);
    if (adapter && !exchange_take_adapter(ex, adapter)) {
        (void)refuse_absent(ex, name_asked(ex));
        exchange_refuse(ex);
        return NULL;
    }
    return model;
}

void models_look(struct server *server) {
    if (!server->models.changed) return;
    server->models.changed = false;
    if (server->draining && server->accepted == 0) models_drain(server);
    plan_models(server);
}

/* ---- Life ---- */

static void refuse_late(struct exchange *ex) {
    oai_refuse(&ex->error, 408, "request_timeout", NULL,
               "The request took longer than the time it was given: its model is not loaded yet.");
}

static void refuse_stopping(struct exchange *ex) {
    oai_refuse(&ex->error, 503, "aborted", NULL,
               "The server is shutting down and gave this request up.");
}

void models_tick(struct server *server, int64_t now_ns) {
    for (int i = 0; i < server->models.count; i++) {
        for (struct exchange *ex = server->models.items[i].waiting, *next; ex; ex = next) {
            next = ex->work_next;
            if (!ex->deadline_ns || now_ns < ex->deadline_ns) continue;
            refuse_late(ex);
            refuse_waiting(ex);
        }
    }
    plan_models(server);
}

void models_drain(struct server *server) {
    if (server->models.working) atomic_store(&server->models.working->unwanted, true);
    for (int i = 0; i < server->models.count; i++)
        if (server->models.items[i].engine) engine_drain(server->models.items[i].engine);
}

void models_abort(struct server *server) {
    for (int i = 0; i < server->models.count; i++)
        refuse_all(&server->models.items[i], refuse_stopping);
}

bool models_idle(const struct server *server) {
    bool idle = !server->models.working;
    for (int i = 0; i < server->models.count; i++) {
        struct engine *engine = server->models.items[i].engine;
        idle = idle && (!engine || engine_idle(engine));
    }
    return idle;
}

bool models_busy(const struct server *server) {
    return server->models.working != NULL;
}

/* Describes the models as they are now, one row for each. */
static const struct oai_listed *list_models(const struct models *models) {
    struct oai_listed *rows = models->listed;
    for (int i = 0; i < models->count; i++) {
        const struct served_model *model = &models->items[i];
        const double size = (double)atomic_load(&model->size);
        struct engine_adapter_row *adapters = models->adapters + (size_t)i * ENGINE_ADAPTERS_MAX;
        rows[i] =
            (struct oai_listed){.names = model->rules.names,
                                .name_count = model->rules.name_count,
                                .max_model_len = model->max_model_len,
                                .state = served_state_name(model->state),
                                .progress = size > 0 ? (double)atomic_load(&model->read) / size : 0,
                                .loading = model->state == SERVED_LOADING,
                                .memory_bytes = model->memory_bytes,
                                .pinned = model->options->pinned,
                                .waiting = model->waiting_count,
                                .fault = model->state == SERVED_FAILED ? &model->fault : NULL,
                                .info = model->state == SERVED_LOADED ? model->rules.info : NULL,
                                .adapters = adapters};
        if (model->state == SERVED_LOADED)
            rows[i].adapter_count = engine_adapters(model->engine, adapters, ENGINE_ADAPTERS_MAX);
    }
    return rows;
}

void models_render(struct buf *out, const struct server *server, models_list_fn *write) {
    write(out, list_models(&server->models), server->models.count, server->start_seconds);
}

bool models_render_one(struct buf *out, const struct server *server, const char *id) {
    return oai_render_model(out, list_models(&server->models), server->models.count, id,
                            server->start_seconds);
}
