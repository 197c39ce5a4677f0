/* The program: reads the options, opens the server and the engine of a single model (the server
 * opens those of several), runs until a signal, and closes them. Every request ends in server_run,
 * before an engine is closed under it. `keepd bench` and `keepd fit` open the same engine without a
 * server; `keepd pull` fetches a model; `keepd chat` starts the client. The only file that includes
 * config/. */
#include <dirent.h>
#include <errno.h>
#include <malloc.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "config/config.h"
#include "daemon/bench.h"
#include "daemon/fit.h"
#include "daemon/fit_start.h"
#include "daemon/hub.h"
#include "daemon/progress.h"
#include "picture/decoder.h"
#include "server/oai/oai.h"
#include "server/oai/tool_calls.h"
#include "server/server.h"
#include "server/systemd.h"

#define INSPECT_MAX ((size_t)1 << 20)
#define EXIT_CONFIG 78 /* sysexits.h: a model or option is refused; a restart will not help */

/* --- callbacks of the engine --- */

/* The argument of all callbacks, because engine_open takes only one. */
struct callbacks {
    struct progress progress;
    struct server *server;
    struct bench *bench; /* set for `keepd bench` and `keepd fit`, which have no server */
    char gates_cache[4096];
    char model[4096];       /* path of a model that was named by its place in the hub; "" = none */
    char draft_model[4096]; /* the same of the draft model */
};

static bool on_load_progress(void *arg, uint64_t done, uint64_t total, const char *what) {
    progress_note(&((struct callbacks *)arg)->progress, done, total, what);
    return true;
}

static void on_engine_wake(void *arg) {
    const struct callbacks *callbacks = arg;
    if (callbacks->bench)
        bench_wake(callbacks->bench);
    else
        server_wake(callbacks->server);
}

/* --- options --- */

/* Returns the options of the engine. `arg` holds the folder of gates and the models' paths until
 * the engine is open. */
static struct engine_options engine_options(const struct config *config, struct callbacks *arg) {
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

static void set_log(const struct config *config) {
    log_set_level(config->log_level);
    log_set_format(config->log_format);
}

static void log_notes(const struct config *config) {
    for (size_t i = 0; i < config->notes.count; i++) log_warn("%s", config->notes.items[i]);
}

/* --- SIGHUP --- */

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
    set_log(reload->config);
    config_close(&fresh);
}

/* --- refusing --- */

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

static int report_fault(const char *what, const struct fault *fault) {
    fprintf(stderr, "keepd: %s%s%s%s%s\n", what, what[0] ? ": " : "", fault->field,
            fault->field[0] ? ": " : "", fault->text);
    systemd_notify("STATUS=%s: %.200s", fault->field, fault->text);
    return exit_status(fault);
}

/* Reports that `what` failed, or, where the fault names an option, only that option. */
static int refuse_start(const char *what, const struct fault *fault) {
    bool option = config_is_option(fault->field);
    int status = report_fault(option ? "" : what, fault);
    return fault->code == ERR_IO ? EXIT_CONFIG : status; /* an unreadable file: no restart helps */
}

/* Whether a path that does not exist is the name of a model in the hub: OWNER/NAME, also behind a
 * host or as an address. A relative path has the same form, but its first folder exists. */
static bool is_hub_id(const char *text, struct hub_name *name) {
    static const char *const fronts[] = {"huggingface.co/", "hf.co/"};
    char folder[128];
    struct stat info;
    struct fault ignored;
    bool of_hub = strncmp(text, "hf://", 5) == 0;
    const char *host = strstr(text, "://") ? strstr(text, "://") + 3 : text;
    for (size_t i = 0; i < sizeof fronts / sizeof *fronts; i++)
        of_hub = of_hub || strncmp(host, fronts[i], strlen(fronts[i])) == 0;
    if ((host != text && !of_hub) || hub_name_parse(text, name, &ignored)) return false;
    snprintf(folder, sizeof folder, "%.*s", (int)strcspn(text, "/"), text);
    return of_hub || stat(folder, &info) != 0 || !S_ISDIR(info.st_mode);
}

/* Explains how to fetch a model that does not exist here: keepd downloads nothing that was not
 * named as a model of the hub. */
static int refuse_missing(const char *path, const char *why, struct fault *fault) {
    struct hub_name name;
    char id[700];
    if (is_hub_id(path, &name)) {
        hub_name_write(&name, id, sizeof id);
        return fault_set(fault, ERR_NOTFOUND, "model",
                         "no such file or directory; for the model of the Hugging Face Hub: keepd "
                         "%.150s, or fetch it first with keepd pull %.150s",
                         id, id + strlen("hf:"));
    }
    if (strstr(path, "://"))
        return fault_set(fault, ERR_NOTFOUND, "model",
                         "%.200s is a URL, and keepd downloads only from the Hugging Face Hub: "
                         "fetch a GGUF file with curl -fLO, and name the file",
                         path);
    if (path[0] == '~')
        return fault_set(fault, ERR_NOTFOUND, "model",
                         "%.200s: %s; the shell replaces ~ only at the start of a word without "
                         "quotes",
                         path, why);
    return fault_set(fault, ERR_NOTFOUND, "model",
                     "%.200s: %s; a model is a directory or a GGUF file (make serve MODEL=smollm2 "
                     "fetches a small one)",
                     path, why);
}

/* Checks that the path is a directory or a file. The engine checks what is in it. */
static int check_model_path(const char *path, struct fault *fault) {
    struct stat info;
    if (stat(path, &info) == 0 && S_ISREG(info.st_mode)) return 0;
    DIR *dir = opendir(path);
    if (!dir) return refuse_missing(path, strerror(errno), fault);
    closedir(dir);
    return 0;
}

/* Finds a draft model that is named by its place in the hub; the engine checks a path. On failure
 * prints the reason and returns the exit status. */
static int find_draft_model(const struct config *config, enum hub_use use,
                            struct callbacks *callbacks) {
    const char *draft = config->engine.draft_model;
    struct fault fault = {0};
    if (!draft || !hub_is_name(draft)) return 0;
    if (!hub_find(draft, use, callbacks->draft_model, sizeof callbacks->draft_model, &fault))
        return 0;
    if (strcmp(fault.field, "model") == 0) strcpy(fault.field, "draft-model");
    return report_fault(
        use == HUB_CACHED && fault.code == ERR_NOTFOUND ? "draft-model: a start fetches it" : "",
        &fault);
}

static bool names_hub(const struct config *config) {
    const char *draft = config->engine.draft_model;
    return hub_is_name(config->engine.model_dir) || (draft && hub_is_name(draft));
}

/* Finds the model: a path that is there, or a name of the hub; then the draft model. On failure
 * prints the reason and returns the exit status. */
static int find_model(const struct config *config, enum hub_use use, struct callbacks *callbacks) {
    const char *model = config->engine.model_dir;
    struct fault fault = {0};
    if (!hub_is_name(model))
        return check_model_path(model, &fault) ? refuse_start("the model is refused", &fault)
                                               : find_draft_model(config, use, callbacks);
    if (!hub_find(model, use, callbacks->model, sizeof callbacks->model, &fault))
        return find_draft_model(config, use, callbacks);
    if (config->inspect && fault.code == ERR_NOTFOUND) {
        struct fault why = {0};
        if (hub_list(model, stdout, &why)) fault = why;
    } else if (use == HUB_CACHED && fault.code == ERR_NOTFOUND) {
        return report_fault("model: a start fetches it", &fault);
    }
    return report_fault("", &fault);
}

/* Refuses several models for a command that takes one: which of them is meant is not guessed. On
 * failure prints the reason and returns the exit status. */
static int refuse_several(const struct config *config, const char *command) {
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
    return report_fault("", &fault);
}

/* Leaves the options of the only model in *config, which a section may give. The arguments are
 * those from which *config was loaded. On failure prints the reason and returns the exit status. */
static int take_only_model(struct config *config, const char *command, int argc, char **argv) {
    extern char **environ;
    struct config own;
    struct fault fault = {0};
    int status = refuse_several(config, command);
    if (status || !config->sections) return status;
    if (config_load_model(argc, argv, environ, config, 0, &own, &fault))
        return refuse_start("", &fault);
    config_close(config);
    *config = own;
    return EXIT_SUCCESS;
}

/* --- running --- */

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

static int open_engine(const struct engine_options *options, struct callbacks *callbacks,
                       struct engine **engine, struct fault *fault) {
    progress_open(&callbacks->progress, PROGRESS_LOADING, isatty(STDERR_FILENO));
    int rc = engine_open(options, engine, fault);
    progress_close(&callbacks->progress, rc == 0);
    return rc;
}

static int start_engine(struct engine *engine, struct fault *fault) {
    int rc = engine_start(engine);
    return rc ? fault_set(fault, rc, "engine", "does not start: %s", err_text(rc)) : 0;
}

static int run_server(const struct config *config, struct server *server, struct engine *engine) {
    const struct engine_info *info = engine ? engine_info(engine) : NULL;
    struct fault fault = {0};
    if (server_start(server, engine, &fault)) return report_fault("cannot serve", &fault);
    log_habits(server, info);
    print_ready(config, server, info);
    bool served = server_run(server);
    log_info(served ? "stopped" : "stopped: the backend failed");
    return served ? EXIT_SUCCESS : EXIT_FAILURE;
}

/* Serves one model, which is loaded first. */
static int serve_model(const struct config *config, struct server *server,
                       struct callbacks *callbacks, const struct engine_options *options) {
    struct engine_options own = *options; /* fitting changes them for this start */
    struct engine *engine = NULL;
    struct fit_start fit = {0};
    struct fault fault = {0};
    if (config->fit == CONFIG_FIT_AUTO && fit_at_start(&own, &fit) == FIT_START_STOPPED) {
        fit_start_close(&fit);
        return EXIT_SUCCESS;
    }
    int rc = open_engine(&own, callbacks, &engine, &fault);
    fit_start_close(&fit);
    if (rc) return refuse_start("the model is refused", &fault);
    rc = start_engine(engine, &fault);
    if (!rc) return run_server(config, server, engine);
    engine_close(engine);
    return report_fault("cannot serve", &fault);
}

/* Returns whether this start fits gates if it finds none. */
static bool may_fit(const struct config *config, const struct engine_options *options) {
    return config->fit == CONFIG_FIT_AUTO && !options->gates && engine_wants_gates(options);
}

/* Reports what a start would reject, without loading weights or binding the address. */
static int check_start(const struct config *config, struct callbacks *callbacks) {
    struct engine_options options = engine_options(config, callbacks);
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
    if (rc) return refuse_start("the model is refused", &fault);
    if (options.gates_follow && strcmp(found.gates_from, "none") == 0)
        log_info("a start fits retention gates to the model first (--fit auto)");
    return EXIT_SUCCESS;
}

/* Describes the model on stdout, with the form of tool calls that its template shows. */
static int inspect_model(const struct config *config, struct callbacks *callbacks) {
    struct engine_options options = engine_options(config, callbacks);
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

static int save_rounded(const struct config *config, struct callbacks *callbacks) {
    struct engine_options options = engine_options(config, callbacks);
    struct fault fault = {0};
    size_t bytes = 0;
    progress_open(&callbacks->progress, PROGRESS_ROUNDING, isatty(STDERR_FILENO));
    int rc = engine_save(&options, config->quantize_to, &bytes, &fault);
    progress_close(&callbacks->progress, rc == 0);
    if (rc) return refuse_start("the model is refused", &fault);
    printf("%s: %.1f MB of weights\n", config->quantize_to, (double)bytes * 1e-6);
    return EXIT_SUCCESS;
}

/* --- the models --- */

/* A model that is served, and the options that are its own. */
struct entry {
    struct config own; /* empty: `config` is that of all models */
    const struct config *config;
    struct callbacks callbacks;
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
        if (names_hub(entry->config) == hub)
            status = find_model(entry->config, use, &entry->callbacks);
    }
    return status;
}

/* Fills in the options of the engines. Several models share what memory there is: an automatic pool
 * takes half of an equal part at most. */
static void set_engines(struct entries *entries, int64_t memory) {
    for (size_t i = 0; i < entries->count; i++) {
        struct entry *entry = &entries->items[i];
        entry->engine = engine_options(entry->config, &entry->callbacks);
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

static int with_each(struct entries *entries,
                     int (*task)(const struct config *, struct callbacks *)) {
    int status = 0;
    for (size_t i = 0; i < entries->count && !status; i++)
        status = task(entries->items[i].config, &entries->items[i].callbacks);
    return status;
}

static int serve_entries(const struct config *config, struct entries *entries,
                         struct server *server, int64_t memory) {
    struct fault fault = {0};
    if (server_bind(server, &fault)) return report_fault("cannot serve", &fault);
    int status = find_entries(entries, true, HUB_SERVE);
    if (status) return status;
    set_engines(entries, memory);
    for (size_t i = 0; i < entries->count; i++) entries->items[i].callbacks.server = server;
    if (entries->count > 1) return run_server(config, server, NULL);
    return serve_model(entries->items[0].config, server, &entries->items[0].callbacks,
                       &entries->items[0].engine);
}

static int run_models(const struct config *config, struct entries *entries,
                      struct server_options *options, struct reload *reload) {
    const bool only_cached = config->check_config || config->inspect;
    struct server *server = NULL;
    struct fault fault = {0};
    int status = config->quantize_to ? refuse_several(config, "--quantize-to") : EXIT_SUCCESS;
    if (!status) status = find_entries(entries, false, only_cached ? HUB_CACHED : HUB_SERVE);
    if (!status && (only_cached || config->quantize_to))
        status = find_entries(entries, true, only_cached ? HUB_CACHED : HUB_SERVE);
    if (status) return status;
    options->models = entries->models;
    options->model_count = (int)entries->count;
    if (entries->count > 1 && !options->models_memory)
        options->models_memory = choose_models_memory(entries);
    if (server_open(options, &server, &fault)) return refuse_start("the model is refused", &fault);
    reload->server = server;
    if (config->check_config)
        status = with_each(entries, check_start);
    else if (config->inspect)
        status = with_each(entries, inspect_model);
    else if (config->quantize_to)
        status = save_rounded(entries->items[0].config, &entries->items[0].callbacks);
    else
        status = serve_entries(config, entries, server, options->models_memory);
    server_close(server);
    if (config->check_config && !status) config_print(config, stdout);
    return status;
}

static int run_daemon(struct config *config, int argc, char **argv) {
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
        status = refuse_start("", &fault);
    else
        status = run_models(config, &entries, &options, &reload);
    close_entries(&entries);
    return status;
}

/* Makes glibc return memory. A long dialogue resends its whole history each turn, and by default
 * glibc answers growing blocks with more heaps and a growing threshold: the process grows by a few
 * per cent in twenty turns although nothing is in use. With one heap, large blocks are returned at
 * once. */
static void give_memory_back(void) {
    mallopt(M_ARENA_MAX, 1);
    mallopt(M_MMAP_THRESHOLD, 64 << 10);
    mallopt(M_TRIM_THRESHOLD, 64 << 10);
}

/* Reads the options. `rc` is the result of the command's own parser, with `fault`. On failure
 * prints the reason, and where to read more. */
static int load_options(int rc, int count, char **args, const char *more, struct config *config,
                        struct fault *fault) {
    extern char **environ;
    if (!rc) rc = config_load(count, args, environ, config, fault);
    if (rc)
        fprintf(stderr, "keepd: %s%s%s (keepd %s)\n", fault->field, fault->field[0] ? ": " : "",
                fault->text, more);
    return rc ? EXIT_CONFIG : EXIT_SUCCESS;
}

/* --- keepd bench --- */

static int measure_rates(const struct config *config, const struct bench_options *tests) {
    struct callbacks callbacks = {.bench = bench_open()};
    struct engine *engine = NULL;
    struct fault fault = {0};
    int status = find_model(config, HUB_SERVE, &callbacks), widest = bench_widest(tests);
    struct engine_options options = engine_options(config, &callbacks);
    if (status) {
        bench_close(callbacks.bench);
        return status;
    }
    if (options.max_num_seqs < widest) options.max_num_seqs = widest;
    if (open_engine(&options, &callbacks, &engine, &fault)) {
        status = refuse_start("the model is refused", &fault);
    } else {
        int rc = start_engine(engine, &fault);
        if (!rc)
            rc = bench_run(callbacks.bench, engine, tests, config->model.names, stdout, &fault);
        if (rc) status = report_fault("cannot measure", &fault);
        engine_close(engine);
    }
    bench_close(callbacks.bench);
    return status;
}

static int run_bench(int argc, char **argv) {
    char **rest = mem_must_alloc((size_t)argc + 2, sizeof *rest);
    struct config config = {0};
    struct bench_options tests;
    struct fault fault = {0};
    int status = EXIT_SUCCESS, count = 0;
    int rc = bench_parse(argc, argv, &tests, rest, &fault);
    while (!rc && rest[count]) count++;
    if (!rc && tests.help)
        bench_help(stdout);
    else if (!(status = load_options(rc, count, rest, "bench --help describes the arguments",
                                     &config, &fault))) {
        set_log(&config);
        log_notes(&config);
        status = take_only_model(&config, "bench", count, rest);
        if (!status) status = measure_rates(&config, &tests);
    }
    config_close(&config);
    mem_free(rest);
    return status;
}

/* --- keepd fit --- */

/* Measures the gates that were written, with an engine of its own, after the fit has freed its
 * memory. */
static int measure_gates(struct engine_options options, struct callbacks *callbacks,
                         const char *gates, const struct engine_fitted *fitted,
                         struct fault *fault) {
    struct engine *engine = NULL;
    options.gates = gates;
    engine_fit_options(&options);
    options.kv_policy = "auto";
    int rc = open_engine(&options, callbacks, &engine, fault);
    if (rc) return rc;
    rc = start_engine(engine, fault);
    if (!rc) rc = fit_measure(callbacks->bench, engine, fitted, stderr, stdout, fault);
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

static int fit_and_measure(const struct config *config, struct fit_command *command) {
    struct callbacks callbacks = {.bench = bench_open()};
    int status = find_model(config, HUB_SERVE, &callbacks), rc = 0;
    const struct engine_options options = engine_options(config, &callbacks);
    struct engine_fitted fitted = {0};
    struct fault fault = {0};
    char cached[4096], work[4200];
    if (status) {
        bench_close(callbacks.bench);
        return status;
    }
    if (!command->text_count) rc = fit_use_calibration(command, &fault);
    if (!rc) rc = find_cached(&options, command, cached, work, &fault);
    if (!rc) rc = fit_run(command, &options, stderr, &fitted, &fault);
    const bool inputs = strncmp(fault.field, "--", 2) == 0 || strcmp(fault.field, "text") == 0 ||
                        strcmp(fault.field, "out") == 0;
    if (rc) {
        status = refuse_start(inputs ? "cannot fit" : "the model is refused", &fault);
    } else {
        printf("%s\n", command->out);
        fflush(stdout);
        warn_hidden(&options, command);
        rc = measure_gates(options, &callbacks, command->out, &fitted, &fault);
        if (rc) status = report_fault("cannot measure", &fault);
    }
    engine_fitted_close(&fitted);
    bench_close(callbacks.bench);
    return status;
}

static int run_fit(int argc, char **argv) {
    char **rest = mem_must_alloc((size_t)argc + 2, sizeof *rest);
    struct config config = {0};
    struct fit_command command;
    struct fault fault = {0};
    int status = EXIT_SUCCESS, count = 0;
    int rc = fit_parse(argc, argv, &command, rest, &fault);
    while (!rc && rest[count]) count++;
    if (!rc && command.help)
        fit_help(stdout);
    else if (!(status = load_options(rc, count, rest, "fit --help describes the arguments", &config,
                                     &fault))) {
        set_log(&config);
        status = take_only_model(&config, "fit", count, rest);
        if (!status) status = fit_and_measure(&config, &command);
    }
    config_close(&config);
    mem_free(rest);
    return status;
}

/* --- keepd chat --- */

/* Starts the client, which is a program of its own in the daemon's folder (client/chat.c). */
static int run_chat(char **argv) {
    static const char name[] = "/keepd-chat";
    char path[4096];
    ssize_t size = readlink("/proc/self/exe", path, sizeof path - sizeof name);
    char *end = size > 0 ? memrchr(path, '/', (size_t)size) : NULL;
    snprintf(end ? end : path, sizeof name, "%s", name);
    execv(path, argv + 1);
    fprintf(stderr, "keepd: chat: cannot start %s: %s\n", path, strerror(errno));
    return EXIT_FAILURE;
}

int main(int argc, char **argv) {
    struct config config = {0};
    struct fault fault = {0};
    if (argc > 1 && strcmp(argv[1], PICTURE_DECODER) == 0) _exit(picture_decoder_main());
    give_memory_back();
    if (argc > 1 && strcmp(argv[1], "chat") == 0) return run_chat(argv);
    if (argc > 1 && strcmp(argv[1], "bench") == 0) return run_bench(argc, argv);
    if (argc > 1 && strcmp(argv[1], "fit") == 0) return run_fit(argc, argv);
    if (argc > 1 && strcmp(argv[1], "pull") == 0) return hub_command(argc, argv);
    int status = load_options(0, argc, argv, "--help lists the options", &config, &fault);
    if (status) return status;
    if (config.help) {
        config_help(stdout);
    } else if (config.man) {
        config_man(stdout, KEEPD_VERSION);
    } else if (config.completion) {
        config_complete(stdout, config.completion);
    } else if (config.version) {
        printf("keepd %s\n", KEEPD_VERSION);
    } else {
        set_log(&config);
        log_notes(&config);
        status = run_daemon(&config, argc, argv);
    }
    config_close(&config);
    return status;
}
