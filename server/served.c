#include "server/served.h"

#include <inttypes.h>
#include <malloc.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/loop.h"

#define SAVING_NS 60000000000ll /* for a model that leaves to write its conversations */
#define SAVING_US 2000

const char *served_state_name(enum served_state state) {
    static const char *const names[] = {[SERVED_UNLOADED] = "unloaded",
                                        [SERVED_LOADING] = "loading",
                                        [SERVED_LOADED] = "loaded",
                                        [SERVED_UNLOADING] = "unloading",
                                        [SERVED_FAILED] = "failed"};
    return names[state];
}

/* Splits "name, alias". An empty list is a fault. */
static int set_names(struct served_model *model, const char *names, struct fault *fault) {
    char *save = NULL;
    model->names = mem_must_strdup(names);
    for (char *name = strtok_r(model->names, ",", &save); name; name = strtok_r(NULL, ",", &save)) {
        name += strspn(name, " ");
        if (!*name) continue;
        if (model->rules.name_count == OAI_NAMES_MAX || strlen(name) > 256)
            return fault_set(fault, ERR_LIMIT, "served-model-name",
                             "at most %d names of at most 256 bytes", OAI_NAMES_MAX);
        model->rules.names[model->rules.name_count++] = name;
    }
    if (model->rules.name_count) return 0;
    return fault_set(fault, ERR_INVALID, "served-model-name", "the name is empty");
}

/* Adapters of a model that is not loaded: those are known that come with it. */
static bool served_has_adapter(const struct served_model *model, const char *name) {
    const struct engine_options *options = &model->engine_options;
    const size_t size = strlen(name);
    if (model->engine) return engine_adapter_take(model->engine, name, NULL);
    for (size_t i = 0; i < options->adapter_count; i++)
        if (strncmp(options->adapters[i], name, size) == 0 && options->adapters[i][size] == '=')
            return true;
    return false;
}

bool served_has_name(const struct served_model *model, const char *name, const char **adapter) {
    const struct oai_rules *rules = &model->rules;
    *adapter = NULL;
    for (int i = 0; i < rules->name_count; i++)
        if (strcmp(rules->names[i], name) == 0) return true;
    const char *part = oai_adapter_part(rules->names, rules->name_count, name);
    if (part && served_has_adapter(model, part))
        *adapter = part;
    else if (served_has_adapter(model, name))
        *adapter = name;
    return *adapter != NULL;
}

static bool note_progress(void *arg, uint64_t done, uint64_t total, const char *what) {
    struct served_model *model = arg;
    (void)what;
    atomic_store_explicit(&model->read, done, memory_order_relaxed);
    atomic_store_explicit(&model->size, total, memory_order_relaxed);
    return !atomic_load_explicit(&model->unwanted, memory_order_relaxed);
}

/* Defined here, because loop.c, which answers it, calls this file. */
void server_wake(void *arg) {
    struct server *server = arg;
    uv_async_send(&server->wake);
}

static void on_served_wake(void *arg) {
    const struct served_model *model = arg;
    server_wake(model->server);
}

/* Counts stay from the first engine on; later engines of the model have the same shape. */
static void open_counts(struct served_model *model, int replicas, int max_model_len) {
    model->max_model_len = max_model_len;
    if (model->loads) return;
    stats_close(&model->stats);
    mem_free(model->past);
    stats_open(&model->stats, replicas, max_model_len);
    model->past = mem_must_alloc((size_t)replicas, sizeof *model->past);
}

int served_open(struct served_model *model, struct server *server,
                const struct server_model *options, struct fault *fault) {
    model->server = server;
    model->options = options;
    model->waiting_end = &model->waiting;
    buf_open(&model->props, SIZE_MAX / 2);
    buf_open(&model->slots, SIZE_MAX / 2);
    return set_names(model, options->names, fault);
}

void served_prepare(struct served_model *model) {
    struct engine_options *engine = &model->engine_options;
    *engine = *model->options->engine;
    engine->progress = note_progress;
    engine->wake = on_served_wake;
    engine->arg = model;
    engine->space_key = model->server->secret;
    open_counts(model, engine->data_parallel_size > 1 ? engine->data_parallel_size : 1, 0);
}

/* ---- Rules ---- */

static void set_rules(struct served_model *model) {
    const struct server_options *server = &model->server->options;
    const struct server_model *options = model->options;
    struct oai_rules *rules = &model->rules;
    struct engine *engine = model->engine;
    rules->engine = engine;
    rules->info = engine_info(engine);
    rules->default_max_tokens = options->default_max_tokens;
    rules->repetition_count = options->repetition_count;
    rules->seed = options->seed;
    rules->strict = server->strict_params;
    rules->include_usage = server->include_usage;
    rules->fetches = server->image_hosts.count > 0;
    rules->body_bytes = server->max_body_bytes;
    rules->records = model->server->records;
    rules->think = options->split_reasoning ? oai_find_think(engine) : (struct oai_think){-1, -1};
    rules->channels = oai_find_channels(engine);
    rules->channels.split = rules->channels.known && options->split_reasoning;
    rules->fim = oai_find_fim(engine);
    rules->verdict = oai_find_verdict(engine);
    rules->turns = oai_find_turns(engine);
    rules->tools = oai_find_tools(engine, options->tool_call_parser);
}

static void clear_rules(struct served_model *model) {
    oai_close_tools(&model->rules.tools);
    model->rules.tools = (struct oai_tool_style){0};
    model->rules.engine = NULL;
    model->rules.info = NULL;
}

/* Keeps what routes that only describe the model answer while it sleeps. */
static void keep_descriptions(struct served_model *model) {
    buf_clear(&model->props);
    buf_clear(&model->slots);
    oai_render_props(&model->props, &model->rules, true);
    oai_render_slots(&model->slots, model->rules.info, NULL, 0);
}

int served_use(struct served_model *model, struct engine *engine, struct fault *fault) {
    const struct engine_info *info = engine_info(engine);
    int rc = oai_check_parser(info->tool_template, model->options->tool_call_parser, fault);
    if (rc) {
        engine_close(engine);
        return rc;
    }
    model->engine = engine;
    set_rules(model);
    open_counts(model, info->replicas, info->max_model_len);
    model->engine_options.kv_pool_bytes = info->pages_total * info->page_bytes;
    model->state = SERVED_LOADED;
    model->loaded_ns = model->used_ns = clock_ns();
    model->loads++;
    return 0;
}

void served_close(struct served_model *model) {
    engine_close(model->engine);
    oai_close_tools(&model->rules.tools);
    stats_close(&model->stats);
    buf_close(&model->props);
    buf_close(&model->slots);
    mem_free(model->past);
    mem_free(model->names);
}

/* ---- Counts ---- */

/* Adds counts, not states. */
static void add_counts(struct engine_status *sum, const struct engine_status *one) {
    /* The first status brings the histograms' bounds. */
    if (!sum->counters.iteration_tokens.bound_count) {
        sum->counters = one->counters;
    } else {
        engine_counters_add(&sum->counters, &one->counters);
    }
    sum->entries_evicted += one->entries_evicted;
    sum->rank_cap_hits += one->rank_cap_hits;
    sum->state_written += one->state_written;
    sum->state_refused += one->state_refused;
}

void served_status(struct served_model *model, int replica, struct engine_status *out) {
    *out = (struct engine_status){0};
    if (model->state == SERVED_LOADED) engine_replica_status(model->engine, replica, out);
    if (model->past[replica].counters.iteration_tokens.bound_count)
        add_counts(out, &model->past[replica]);
}

/* ---- Work ---- */

static struct stat stat_path(const struct served_model *model) {
    struct stat of_path;
    if (stat(model->engine_options.model_dir, &of_path)) return (struct stat){0};
    return of_path;
}

bool served_is_checked(const struct served_model *model) {
    const struct stat now = stat_path(model), *then = &model->of_path;
    return model->checked && now.st_dev == then->st_dev && now.st_ino == then->st_ino &&
           now.st_size == then->st_size && now.st_mtim.tv_sec == then->st_mtim.tv_sec &&
           now.st_mtim.tv_nsec == then->st_mtim.tv_nsec;
}

void served_begin(struct served_model *model, enum served_task task, struct served_work *work) {
    *work = (struct served_work){.task = task};
    if (task == SERVED_CHECK) {
        model->of_path = stat_path(model);
    } else if (task == SERVED_LOAD) {
        model->state = SERVED_LOADING;
        model->read = model->size = 0;
    } else if (task == SERVED_UNLOAD) {
        for (int i = 0; i < model->stats.replica_count; i++) {
            struct engine_status status;
            engine_replica_status(model->engine, i, &status);
            add_counts(&model->past[i], &status);
            if (i == 0) work->counted = status;
        }
        model->state = SERVED_UNLOADING;
        work->engine = model->engine;
        keep_descriptions(model);
        model->engine = NULL;
        clear_rules(model);
    }
}

static void run_check(const struct served_model *model, struct served_work *work) {
    struct engine_options options = model->engine_options;
    struct engine *none = NULL;
    options.check_only = true;
    options.progress = NULL;
    options.found = &work->found;
    work->rc = engine_open(&options, &none, &work->fault);
    if (!work->rc)
        work->rc = oai_check_parser(work->found.tool_template, model->options->tool_call_parser,
                                    &work->fault);
    mem_free(work->found.tool_template);
    work->found.tool_template = NULL;
}

static void run_load(const struct served_model *model, struct served_work *work) {
    work->rc = engine_open(&model->engine_options, &work->engine, &work->fault);
    if (work->rc) return;
    work->rc = engine_start(work->engine);
    if (!work->rc) return;
    fault_set(&work->fault, work->rc, "engine", "does not start: %s", err_text(work->rc));
    engine_close(work->engine);
    work->engine = NULL;
}

/* Conversations are written before the engine ends, if there is a directory for them, and counted
 * with the first replica. */
static void run_unload(struct served_work *work) {
    const int64_t end_ns = clock_ns() + SAVING_NS;
    struct engine_status last;
    engine_drain(work->engine);
    while (!engine_idle(work->engine) && clock_ns() < end_ns) usleep(SAVING_US);
    engine_replica_status(work->engine, 0, &last);
    work->written = last.state_written - work->counted.state_written;
    work->refused = last.state_refused - work->counted.state_refused;
    engine_close(work->engine);
    work->engine = NULL;
    malloc_trim(0); /* memory of many small parts goes back to the system, too */
}

void served_run(struct served_model *model, struct served_work *work) {
    if (work->task == SERVED_CHECK)
        run_check(model, work);
    else if (work->task == SERVED_LOAD)
        run_load(model, work);
    else
        run_unload(work);
}

static void note_failure(struct served_model *model, const struct served_work *work) {
    model->state = SERVED_FAILED;
    model->wanted = model->checked = false;
    model->fault = work->fault;
    model->failed_ns = clock_ns();
    model->failures++;
    log_error("model %s cannot be served: %s%s%s", model->rules.names[0], work->fault.field,
              work->fault.field[0] ? ": " : "", work->fault.text);
}

static void end_check(struct served_model *model, const struct served_work *work) {
    model->checked = true;
    model->memory_bytes = work->found.memory_bytes;
    open_counts(model, model->stats.replica_count, work->found.max_model_len);
    if (work->found.pool_bytes > 0) model->engine_options.kv_pool_bytes = work->found.pool_bytes;
    model->state = SERVED_UNLOADED;
}

void served_end(struct served_model *model, struct served_work *work) {
    if (!work->rc && work->task == SERVED_LOAD)
        work->rc = served_use(model, work->engine, &work->fault);
    if (work->rc == ERR_STOPPED) {
        model->state = SERVED_UNLOADED;
        log_info("model %s is not loaded any further", model->rules.names[0]);
    } else if (work->rc) {
        note_failure(model, work);
    } else if (work->task == SERVED_CHECK) {
        end_check(model, work);
    } else if (work->task == SERVED_LOAD) {
        model->wanted = false;
        log_info("model %s is loaded", model->rules.names[0]);
    } else {
        model->state = SERVED_UNLOADED;
        model->unloads++;
        model->past[0].state_written += work->written;
        model->past[0].state_refused += work->refused;
        log_info("model %s is unloaded", model->rules.names[0]);
    }
}

/* ---- Exchanges ---- */

void served_note_use(const struct exchange *ex) {
    if (!ex->route->act && !ex->model->leaves) ex->model->used_ns = clock_ns();
}

static void look_soon(struct server *server) {
    server->models.changed = true;
    server_pump_soon(server);
}

void served_leave(struct exchange *ex) {
    if (!ex->holds) return;
    ex->holds = false;
    ex->model->users--;
    served_note_use(ex);
    if (!ex->model->users) look_soon(ex->server);
}

void served_unqueue(struct exchange *ex) {
    struct served_model *model = ex->model;
    struct exchange **link = &model->waiting;
    while (*link != ex) link = &(*link)->work_next;
    *link = ex->work_next;
    if (model->waiting_end == &ex->work_next) model->waiting_end = link;
    ex->work_next = NULL;
    model->waiting_count--;
}

void served_forget(struct exchange *ex) {
    served_unqueue(ex);
    ex->server->accepted--;
    look_soon(ex->server);
}
