#include "daemon/start.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"
#include "daemon/fit_start.h"
#include "server/systemd.h"

/* ---- Options ---- */

static bool on_load_progress(void *arg, uint64_t done, uint64_t total, const char *what) {
    progress_note(&((struct start *)arg)->progress, done, total, what);
    return true;
}

static void on_engine_wake(void *arg) {
    const struct start *start = arg;
    if (start->bench)
        bench_wake(start->bench);
    else
        server_wake(start->server);
}

struct engine_options start_engine_options(const struct config *config, struct start *arg) {
    struct engine_options options = config->engine;
    if (!fit_cache_folder(options.gates_cache, arg->gates_cache, sizeof arg->gates_cache))
        arg->gates_cache[0] = '\0';
    options.gates_cache = arg->gates_cache;
    if (arg->model[0]) options.model_dir = arg->model;
    if (arg->draft_model[0]) options.draft_model = arg->draft_model;
    options.sampling = &config->sampling;
    options.adapters = config->model.adapters.items;
    options.adapter_count = config->model.adapters.count;
    options.progress = on_load_progress;
    options.wake = on_engine_wake;
    options.arg = arg;
    return options;
}

int start_load_options(int rc, int count, char **args, const char *more, struct config *config,
                       struct fault *fault) {
    extern char **environ;
    if (!rc) rc = config_load(count, args, environ, config, fault);
    if (rc)
        fprintf(stderr, "keepd: %s%s%s (keepd %s)\n", fault->field, fault->field[0] ? ": " : "",
                fault->text, more);
    return rc ? EXIT_CONFIG : EXIT_SUCCESS;
}

void start_set_log(const struct config *config) {
    log_set_level(config->log_level);
    log_set_format(config->log_format);
}

void start_log_notes(const struct config *config) {
    for (size_t i = 0; i < config->notes.count; i++) log_warn("%s", config->notes.items[i]);
}

/* ---- Refusing ---- */

/* Returns the exit status of a fault. A restart may help against a fault of the machine, but not
 * against a wrong option or model. */
static int exit_status(const struct fault *fault) {
    switch (fault->code) {
    case ERR_NOMEM:
    case ERR_DEVICE:
    case ERR_INTERNAL:
    case ERR_IO:
        return EXIT_FAILURE;
    default:
        return EXIT_CONFIG;
    }
}

int start_report(const char *what, const struct fault *fault) {
    fprintf(stderr, "keepd: %s%s%s%s%s\n", what, what[0] ? ": " : "", fault->field,
            fault->field[0] ? ": " : "", fault->text);
    systemd_notify("STATUS=%s: %.200s", fault->field, fault->text);
    return exit_status(fault);
}

int start_refuse(const char *what, const struct fault *fault) {
    bool option = config_is_option(fault->field);
    int status = start_report(option ? "" : what, fault);
    return fault->code == ERR_IO ? EXIT_CONFIG : status; /* an unreadable file: no restart helps */
}

/* ---- One model ---- */

int start_refuse_several(const struct config *config, const char *command) {
    struct fault fault = {0};
    char names[256] = "";
    size_t used = 0;
    if (config->model_count == 1) return EXIT_SUCCESS;
    for (size_t i = 0; i < config->model_count && used < sizeof names; i++) {
        const char *all = config->models[i].names;
        used += (size_t)snprintf(names + used, sizeof names - used, "%s%.*s", i ? ", " : "",
                                 (int)strcspn(all, ","), all);
    }
    fault_set(&fault, ERR_INVALID, "model",
              "%s takes one model, and %zu are given: %s; name its path alone", command,
              config->model_count, names);
    return start_report("", &fault);
}

int start_take_only_model(struct config *config, const char *command, int argc, char **argv) {
    extern char **environ;
    struct config own;
    struct fault fault = {0};
    int status = start_refuse_several(config, command);
    if (status || !config->sections) return status;
    if (config_load_model(argc, argv, environ, config, 0, &own, &fault))
        return start_refuse("", &fault);
    config_close(config);
    *config = own;
    return EXIT_SUCCESS;
}

/* ---- The engine ---- */

int start_open_engine(const struct engine_options *options, struct start *start,
                      struct engine **engine, struct fault *fault) {
    progress_open(&start->progress, PROGRESS_LOADING, isatty(STDERR_FILENO));
    int rc = engine_open(options, engine, fault);
    progress_close(&start->progress, rc == 0);
    return rc;
}

int start_run_engine(struct engine *engine, struct fault *fault) {
    int rc = engine_start(engine);
    return rc ? fault_set(fault, rc, "engine", "does not start: %s", err_text(rc)) : 0;
}
