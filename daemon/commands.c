#include "daemon/commands.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "daemon/bench.h"
#include "daemon/find_model.h"
#include "daemon/fit.h"
#include "daemon/fit_start.h"
#include "daemon/start.h"

/* ---- Commands on one model ---- */

typedef int run_command(const struct config *config, void *own);

/* Runs a command with the options in `rest` that are not its own: `rc` is the result of its parser,
 * with `fault`. Returns an exit status. */
static int run_on_model(const char *name, int rc, char **rest, struct fault *fault,
                        run_command *run, void *own) {
    struct config config = {0};
    char more[64];
    int count = 0;
    while (!rc && rest[count]) count++;
    snprintf(more, sizeof more, "%s --help describes the arguments", name);
    int status = start_load_options(rc, count, rest, more, &config, fault);
    if (status) return status;
    start_set_log(&config);
    start_log_notes(&config);
    status = start_take_only_model(&config, name, count, rest);
    if (!status) status = run(&config, own);
    config_close(&config);
    return status;
}

/* ---- keepd bench ---- */

static int measure_rates(const struct config *config, void *own) {
    const struct bench_options *tests = own;
    struct start start = {.bench = bench_open()};
    struct engine *engine = NULL;
    struct fault fault = {0};
    int status = find_model(config, HUB_SERVE, &start), widest = bench_widest(tests);
    struct engine_options options = start_engine_options(config, &start);
    if (status) {
        bench_close(start.bench);
        return status;
    }
    if (options.max_num_seqs < widest) options.max_num_seqs = widest;
    if (start_open_engine(&options, &start, &engine, &fault)) {
        status = start_refuse("the model is refused", &fault);
    } else {
        int rc = start_run_engine(engine, &fault);
        if (!rc) rc = bench_run(start.bench, engine, tests, config->model.names, stdout, &fault);
        if (rc) status = start_report("cannot measure", &fault);
        engine_close(engine);
    }
    bench_close(start.bench);
    return status;
}

int command_bench(int argc, char **argv) {
    char **rest = mem_must_alloc((size_t)argc + 2, sizeof *rest);
    struct bench_options tests;
    struct fault fault = {0};
    int status = EXIT_SUCCESS, rc = bench_parse(argc, argv, &tests, rest, &fault);
    if (!rc && tests.help)
        bench_help(stdout);
    else
        status = run_on_model("bench", rc, rest, &fault, measure_rates, &tests);
    mem_free(rest);
    return status;
}

/* ---- keepd fit ---- */

/* Measures the gates that were written, with an engine of its own, after the fit has freed its
 * memory. */
static int measure_gates(struct engine_options options, struct start *start, const char *gates,
                         const struct engine_fitted *fitted, struct fault *fault) {
    struct engine *engine = NULL;
    options.gates = gates;
    engine_fit_options(&options);
    options.kv_policy = "auto";
    int rc = start_open_engine(&options, start, &engine, fault);
    if (rc) return rc;
    rc = start_run_engine(engine, fault);
    if (!rc) rc = fit_measure(start->bench, engine, fitted, stderr, stdout, fault);
    engine_close(engine);
    return rc;
}

/* Names the files in the folder of gates: the work file, and without --out the gates. */
static int find_cached(const struct engine_options *options, struct fit_command *command,
                       char cached[4096], char work[4200], struct fault *fault) {
    struct engine_options own = *options;
    struct engine_found found = {0};
    own.gates = "";
    int rc = engine_find_gates(&own, &found, fault);
    mem_free(found.tool_template);
    if (rc) return rc;
    snprintf(cached, 4096, "%s", found.gates_cached);
    const bool there = cached[0] && fit_make_folder(cached);
    fit_work_file(cached, work, 4200);
    if (there) command->work = work;
    if (command->out) return 0;
    if (!there)
        return fault_set(fault, ERR_INVALID, "--out",
                         "is required: no folder of gates can be written%s%.200s",
                         cached[0] ? ": " : " (--gates-cache)", cached);
    command->out = cached;
    command->how = ENGINE_FIT_REPLACE;
    return 0;
}

/* Warns if a start would find other gates before those that were written to the cache. */
static void warn_hidden(const struct engine_options *options, const struct fit_command *command) {
    struct engine_options own = *options;
    struct engine_found found = {0};
    struct fault ignored;
    own.gates = NULL;
    if (command->how != ENGINE_FIT_REPLACE) return;
    if (engine_find_gates(&own, &found, &ignored) || strcmp(found.gates_from, "cache") != 0)
        log_warn("a start finds the gates beside the model first: --gates %s", command->out);
    mem_free(found.tool_template);
}

static int fit_and_measure(const struct config *config, void *own) {
    struct fit_command *command = own;
    struct start start = {.bench = bench_open()};
    int status = find_model(config, HUB_SERVE, &start), rc = 0;
    const struct engine_options options = start_engine_options(config, &start);
    struct engine_fitted fitted = {0};
    struct fault fault = {0};
    char cached[4096], work[4200];
    if (status) {
        bench_close(start.bench);
        return status;
    }
    if (!command->text_count) rc = fit_use_calibration(command, &fault);
    if (!rc) rc = find_cached(&options, command, cached, work, &fault);
    if (!rc) rc = fit_run(command, &options, stderr, &fitted, &fault);
    const bool inputs = strncmp(fault.field, "--", 2) == 0 ||
                        strncmp(fault.field, "KEEPD_", 6) == 0 ||
                        strcmp(fault.field, "text") == 0 || strcmp(fault.field, "out") == 0;
    if (rc) {
        status = start_refuse(inputs ? "cannot fit" : "the model is refused", &fault);
    } else {
        printf("%s\n", command->out);
        fflush(stdout);
        warn_hidden(&options, command);
        rc = measure_gates(options, &start, command->out, &fitted, &fault);
        if (rc) status = start_report("cannot measure", &fault);
    }
    engine_fitted_close(&fitted);
    bench_close(start.bench);
    return status;
}

int command_fit(int argc, char **argv) {
    char **rest = mem_must_alloc((size_t)argc + 2, sizeof *rest);
    struct fit_command command;
    struct fault fault = {0};
    int status = EXIT_SUCCESS, rc = fit_parse(argc, argv, &command, rest, &fault);
    if (!rc && command.help)
        fit_help(stdout);
    else
        status = run_on_model("fit", rc, rest, &fault, fit_and_measure, &command);
    mem_free(rest);
    return status;
}
