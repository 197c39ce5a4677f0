#include "daemon/serve.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"
#include "daemon/find_model.h"
#include "daemon/fit_start.h"
#include "daemon/start.h"
#include "server/oai/oai.h"
#include "server/oai/tool_calls.h"
#include "server/server.h"

#define INSPECT_MAX ((size_t)1 << 20)

/* For tests that wait for time-outs: "header=500,stall=500", milliseconds. */
static struct server_timeouts timeouts_of(const char *text) {
    struct server_timeouts t = {0};
    const struct {
        const char *name;
        int *value;
    } rows[] = {{"handshake=", &t.handshake}, {"header=", &t.header}, {"idle=", &t.idle},
                {"body=", &t.body},           {"stall=", &t.stall},   {"ping=", &t.ping},
                {"health=", &t.health},       {"first=", &t.first}};
    for (size_t i = 0; text && i < sizeof rows / sizeof *rows; i++) {
        const char *at = strstr(text, rows[i].name);
        if (at) *rows[i].value = atoi(at + strlen(rows[i].name));
    }
    return t;
}

/* ---- SIGHUP ---- */

struct reload {
    int argc;
    char **argv;
    struct config *config; /* the configuration in force */
    struct server *server;
};

static void log_change(void *arg, const char *option, bool taken) {
    (void)arg;
    if (taken)
        log_info("reload: %s changed", option);
    else
        log_warn("reload: %s changed; restart to apply", option);
}

/* Reloads the configuration. The server checks keys and certificate before anything changes. */
static void on_reload(void *arg) {
    extern char **environ;
    const struct reload *reload = arg;
    struct config fresh;
    struct fault fault = {0};
    int rc = config_load(reload->argc, reload->argv, environ, &fresh, &fault);
    if (!rc) {
        rc = server_reload(reload->server, &fresh.server.now, &fault);
        if (rc) config_close(&fresh);
    }
    if (rc) {
        log_error("reload rejected, nothing changed: %s: %s", fault.field, fault.text);
        return;
    }
    log_set_level(LOG_LEVEL_INFO); /* logged at every log level */
    log_info("reload: the configuration was read again");
    config_reload(reload->config, &fresh, log_change, NULL);
    start_set_log(reload->config);
    config_close(&fresh);
}

/* ---- One model ---- */

/* Prints a request with curl. A Unix socket needs a flag, and a model without a chat template can
 * only complete text. */
static void print_example(const char *url, bool chat, bool needs_key) {
    bool path = strncmp(url, "unix:", 5) == 0;
    printf("curl %s%s%s/v1/%s -H 'Content-Type: application/json' %s-d '{\n",
           path ? "--unix-socket " : "", path ? url + 5 : url, path ? " http://localhost" : "",
           chat ? "chat/completions" : "completions",
           needs_key ? "-H \"Authorization: Bearer $KEEPD_API_KEY\" " : "");
    if (chat)
        printf(
            "  \"messages\": [\n"
            "    {\"role\": \"user\", \"content\": \"My sister Nora lives in Lisbon. The code of "
            "the garage is 4815.\"},\n"
            "    {\"role\": \"assistant\", \"content\": \"Noted.\"},\n"
            "    {\"role\": \"user\", \"content\": \"What is the code of the garage?\"}\n"
            "  ]}'\n");
    else
        printf("  \"prompt\": \"My sister Nora lives in\", \"max_tokens\": 32}'\n");
}

/* `info` NULL: several models, which are loaded when they are asked for. */
static void print_ready(const struct config *config, const struct server *server,
                        const struct engine_info *info) {
    const char *url = server_url(server);
    bool page = !config->server.no_ui && strncmp(url, "http", 4) == 0;
    if (info) {
        printf("keepd ready at %s (model %s, policy %s, ", url, server_model(server),
               info->kv_policy);
        if (strcmp(info->kv_policy, "full") == 0)
            printf("no budget");
        else
            printf("budget %d", info->kv_budget);
        printf(", %s)\n\n", info->backend);
    } else {
        printf("keepd ready at %s (%zu models, each loaded when a request names it)\n\n", url,
               config->model_count);
    }
    if (page)
        printf("Open %s/ in a browser, or try:\n", url);
    else
        printf("Try:\n");
    print_example(url, !info || info->has_chat_template, server_needs_key(server));
    fflush(stdout);
}

/* Logs facts about the defaults that a new user would otherwise find out late. `info` as in
 * print_ready. */
static void log_habits(const struct server *server, const struct engine_info *info) {
    if (server_is_open(server))
        log_warn("everybody who reaches %s may use this server: set --api-key-file, or --host "
                 "127.0.0.1",
                 server_url(server));
    if (info && isnan(info->sampling.temperature))
        log_info("the model's files name no temperature: requests without one are sampled at 1; "
                 "--temperature sets another");
}

static int run_server(const struct config *config, struct server *server, struct engine *engine) {
    const struct engine_info *info = engine ? engine_info(engine) : NULL;
    struct fault fault = {0};
    if (server_start(server, engine, &fault)) return start_report("cannot serve", &fault);
    log_habits(server, info);
    print_ready(config, server, info);
    bool served = server_run(server);
    log_info(served ? "stopped" : "stopped: the backend failed");
    return served ? EXIT_SUCCESS : EXIT_FAILURE;
}

/* Serves one model, which is loaded first. */
static int serve_model(const struct config *config, struct server *server, struct start *start,
                       const struct engine_options *options) {
    struct engine_options own = *options; /* fitting changes them for this start */
    struct engine *engine = NULL;
    struct fit_start fit = {0};
    struct fault fault = {0};
    if (config->fit == CONFIG_FIT_AUTO && fit_at_start(&own, &fit) == FIT_START_STOPPED) {
        fit_start_close(&fit);
        return EXIT_SUCCESS;
    }
    int rc = start_open_engine(&own, start, &engine, &fault);
    fit_start_close(&fit);
    if (rc) return start_refuse("the model is refused", &fault);
    rc = start_run_engine(engine, &fault);
    if (!rc) return run_server(config, server, engine);
    engine_close(engine);
    return start_report("cannot serve", &fault);
}

/* ---- Questions about a model, without serving it ---- */

/* Returns whether this start fits gates if it finds none. */
static bool may_fit(const struct config *config, const struct engine_options *options) {
    return config->fit == CONFIG_FIT_AUTO && !options->gates && engine_wants_gates(options);
}

/* Reports what a start would reject, without loading weights or binding the address. */
static int check_start(const struct config *config, struct start *start) {
    struct engine_options options = start_engine_options(config, start);
    struct engine *engine = NULL;
    struct engine_found found = {0};
    struct fault fault = {0};
    options.check_only = true;
    options.found = &found;
    options.progress = NULL;
    options.gates_follow = may_fit(config, &options);
    int rc = engine_open(&options, &engine, &fault);
    if (!rc) rc = oai_check_parser(found.tool_template, config->model.tool_call_parser, &fault);
    mem_free(found.tool_template);
    if (rc) return start_refuse("the model is refused", &fault);
    if (options.gates_follow && strcmp(found.gates_from, "none") == 0)
        log_info("a start fits retention gates to the model first (--fit auto)");
    return EXIT_SUCCESS;
}

/* Describes the model on stdout, with the form of tool calls that its template shows. */
static int inspect_model(const struct config *config, struct start *start) {
    struct engine_options options = start_engine_options(config, start);
    struct fault fault = {0};
    struct buf out;
    char *template = NULL;
    options.gates_follow = may_fit(config, &options);
    buf_open(&out, INSPECT_MAX);
    int rc = engine_inspect(&options, &out, &template, &fault);
    if (rc == 0) buf_fmt(&out, "tools        %s\n", oai_tool_style_of(template));
    if (out.data) fputs(out.data, stdout);
    buf_close(&out);
    mem_free(template);
    return rc == 0 ? EXIT_SUCCESS : EXIT_CONFIG;
}

static int save_rounded(const struct config *config, struct start *start) {
    struct engine_options options = start_engine_options(config, start);
    struct fault fault = {0};
    size_t bytes = 0;
    progress_open(&start->progress, PROGRESS_ROUNDING, isatty(STDERR_FILENO));
    int rc = engine_save(&options, config->quantize_to, &bytes, &fault);
    progress_close(&start->progress, rc == 0);
    if (rc) return start_refuse("the model is refused", &fault);
    printf("%s: %.1f MB of weights\n", config->quantize_to, (double)bytes * 1e-6);
    return EXIT_SUCCESS;
}

/* ---- The models ---- */

/* A model that is served, and the options that are its own. */
struct entry {
    struct config own; /* empty: `config` is that of all models */
    const struct config *config;
    struct start start;
    struct engine_options engine;
};

struct entries {
    struct entry *items; /* [count] */
    struct server_model *models;
    size_t count;
};

/* A single model without a section has the options that were read. Any other model's are read anew:
 * its path and names differ from those of the first at least. */
static int open_entry(struct entry *entry, const struct config *config, size_t model, int argc,
                      char **argv, struct fault *fault) {
    extern char **environ;
    entry->config = config;
    if (config->model_count == 1 && !config->sections) return 0;
    int rc = config_load_model(argc, argv, environ, config, model, &entry->own, fault);
    entry->config = &entry->own;
    return rc;
}

static void close_entries(struct entries *entries) {
    for (size_t i = 0; i < entries->count; i++) config_close(&entries->items[i].own);
    mem_free(entries->items);
    mem_free(entries->models);
}

static int open_entries(struct entries *entries, const struct config *config, int argc, char **argv,
                        struct fault *fault) {
    int rc = 0;
    entries->items = mem_must_alloc(config->model_count, sizeof *entries->items);
    entries->models = mem_must_alloc(config->model_count, sizeof *entries->models);
    for (size_t i = 0; i < config->model_count && !rc; i++) {
        struct entry *entry = &entries->items[i];
        rc = open_entry(entry, config, i, argc, argv, fault);
        if (rc) break;
        entries->count++;
        entries->models[i] = entry->config->model;
        entries->models[i].pinned = config->models[i].pinned;
        entries->models[i].split_reasoning =
            entry->config->reasoning_parser == CONFIG_REASONING_AUTO;
        entries->models[i].engine = &entry->engine;
    }
    return rc;
}

/* Finds the files of all models that are named by paths (`hub` false), or by the hub. */
static int find_entries(struct entries *entries, bool hub, enum hub_use use) {
    int status = 0;
    for (size_t i = 0; i < entries->count && !status; i++) {
        struct entry *entry = &entries->items[i];
        if (find_names_hub(entry->config) == hub)
            status = find_model(entry->config, use, &entry->start);
    }
    return status;
}

/* Fills in the options of the engines. Several models share what memory there is: an automatic pool
 * takes half of an equal part at most. */
static void set_engines(struct entries *entries, int64_t memory) {
    for (size_t i = 0; i < entries->count; i++) {
        struct entry *entry = &entries->items[i];
        entry->engine = start_engine_options(entry->config, &entry->start);
        if (entries->count > 1) entry->engine.kv_pool_most = memory / 2 / (int64_t)entries->count;
    }
}

/* Returns what several models may take together where no option says it: three quarters of what is
 * free where they are held; if they are held in different places, of the least. */
static int64_t choose_models_memory(const struct entries *entries) {
    int64_t least = INT64_MAX;
    for (size_t i = 0; i < entries->count; i++) {
        const int64_t unused = engine_unused_memory(&entries->items[i].config->engine);
        if (unused < least) least = unused;
    }
    return least / 4 * 3;
}

static int with_each(struct entries *entries, int (*task)(const struct config *, struct start *)) {
    int status = 0;
    for (size_t i = 0; i < entries->count && !status; i++)
        status = task(entries->items[i].config, &entries->items[i].start);
    return status;
}

static int serve_entries(const struct config *config, struct entries *entries,
                         struct server *server, int64_t memory) {
    struct fault fault = {0};
    if (server_bind(server, &fault)) return start_report("cannot serve", &fault);
    int status = find_entries(entries, true, HUB_SERVE);
    if (status) return status;
    set_engines(entries, memory);
    for (size_t i = 0; i < entries->count; i++) entries->items[i].start.server = server;
    if (entries->count > 1) return run_server(config, server, NULL);
    return serve_model(entries->items[0].config, server, &entries->items[0].start,
                       &entries->items[0].engine);
}

static int run_models(const struct config *config, struct entries *entries,
                      struct server_options *options, struct reload *reload) {
    const bool only_cached = config->check_config || config->inspect;
    struct server *server = NULL;
    struct fault fault = {0};
    int status = config->quantize_to ? start_refuse_several(config, "--quantize-to") : EXIT_SUCCESS;
    if (!status) status = find_entries(entries, false, only_cached ? HUB_CACHED : HUB_SERVE);
    if (!status && (only_cached || config->quantize_to))
        status = find_entries(entries, true, only_cached ? HUB_CACHED : HUB_SERVE);
    if (status) return status;
    options->models = entries->models;
    options->model_count = (int)entries->count;
    if (entries->count > 1 && !options->models_memory)
        options->models_memory = choose_models_memory(entries);
    if (server_open(options, &server, &fault)) return start_refuse("the model is refused", &fault);
    reload->server = server;
    if (config->check_config)
        status = with_each(entries, check_start);
    else if (config->inspect)
        status = with_each(entries, inspect_model);
    else if (config->quantize_to)
        status = save_rounded(entries->items[0].config, &entries->items[0].start);
    else
        status = serve_entries(config, entries, server, options->models_memory);
    server_close(server);
    if (config->check_config && !status) config_print(config, stdout);
    return status;
}

int serve_run(struct config *config, int argc, char **argv) {
    struct entries entries = {0};
    struct fault fault = {0};
    struct server_options options = config->server;
    struct reload reload = {argc, argv, config, NULL};
    const char *answer_bytes = getenv("KEEPD_TEST_ANSWER_BYTES");
    int status;
    /* Without a file nothing can have changed: a closed terminal ends the daemon as SIGTERM does.
     */
    if (config->config_file || config->server.now.api_key_file || config->server.now.tls_cert) {
        options.reload = on_reload;
        signal(SIGHUP, SIG_IGN); /* until the event loop runs; a signal before that is lost */
    }
    options.arg = &reload;
    options.timeouts = timeouts_of(getenv("KEEPD_TEST_TIMEOUTS"));
    if (answer_bytes) options.max_answer_bytes = (size_t)atoll(answer_bytes);
    if (open_entries(&entries, config, argc, argv, &fault))
        status = start_refuse("", &fault);
    else
        status = run_models(config, &entries, &options, &reload);
    close_entries(&entries);
    return status;
}
