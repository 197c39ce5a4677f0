#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "config/config.h"

#define MAX_ARGS 40

struct run {
    char *args[MAX_ARGS + 2];
    int count;
    char *envp[MAX_ARGS + 1];
    struct config config;
    struct fault fault;
};

/* "a b c" -> arguments; blanks separate. `env` the same way. */
static int load(struct run *run, const char *args, const char *env) {
    static char name[] = "keepd";
    char *rest, *copy = strdup(args), *env_copy = strdup(env);
    int n = 0;
    memset(run, 0, sizeof *run);
    run->args[run->count++] = name;
    for (char *arg = strtok_r(copy, " ", &rest); arg; arg = strtok_r(NULL, " ", &rest))
        run->args[run->count++] = arg;
    for (char *entry = strtok_r(env_copy, " ", &rest); entry; entry = strtok_r(NULL, " ", &rest))
        run->envp[n++] = entry;
    cr_assert(run->count <= MAX_ARGS && n <= MAX_ARGS);
    int rc = config_load(run->count, run->args, run->envp, &run->config, &run->fault);
    free(copy);
    free(env_copy);
    return rc;
}

static void refuse(const char *args, const char *env, const char *field, const char *text) {
    struct run run;
    cr_assert_eq(load(&run, args, env), ERR_INVALID, "%s %s", args, env);
    cr_assert_str_eq(run.fault.field, field);
    cr_assert_not_null(strstr(run.fault.text, text), "'%s' lacks '%s'", run.fault.text, text);
    config_close(&run.config);
}

static char file_path[] = "/tmp/keepd-config-XXXXXX";

static void write_file(const char *text) {
    strcpy(strrchr(file_path, '-'), "-XXXXXX");
    int fd = mkstemp(file_path);
    cr_assert_geq(fd, 0);
    cr_assert_eq(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    close(fd);
}

static int load_file(struct run *run, const char *text, const char *args) {
    char line[256];
    write_file(text);
    snprintf(line, sizeof line, "--config %s %s", file_path, args);
    int rc = load(run, line, "");
    unlink(file_path);
    return rc;
}

Test(config, defaults) {
    struct run run;
    cr_assert_eq(load(&run, "--model /some/where/nano//", ""), 0, "%s", run.fault.text);
    const struct config *config = &run.config;
    cr_assert_str_eq(config->engine.model_dir, "/some/where/nano//");
    cr_assert_str_eq(config->model.names, "nano");
    cr_assert_str_eq(config->server.host, "127.0.0.1");
    cr_assert_eq(config->server.port, 8080);
    cr_assert_eq(config->server.now.api_keys.count, 0);
    cr_assert_null(config->engine.gates);
    cr_assert_str_eq(config->engine.kv_policy, "auto");
    cr_assert_eq(config->engine.kv_budget, 1024);
    cr_assert_eq(config->engine.kv_budget_max, 0);
    cr_assert_eq(config->engine.kv_buffer, 128);
    cr_assert_eq(config->engine.kv_chunk, 512);
    cr_assert_eq(config->engine.max_num_seqs, 64);
    cr_assert_eq(config->engine.max_num_batched_tokens, 2048);
    cr_assert_eq(config->model.default_max_tokens, 1024);
    cr_assert_eq(config->model.seed, -1);
    cr_assert_eq(config->server.max_body_bytes, 8 << 20);
    cr_assert_str_eq(config->engine.cpu_path, "auto");
    cr_assert_str_eq(config->engine.cpu_activations, "int8");
    cr_assert_str_eq(config->engine.quantization, "none");
    cr_assert_eq(config->log_level, LOG_LEVEL_INFO);
    cr_assert_not(config->server.strict_params || config->engine.random_weights ||
                  config->check_config);
    config_close(&run.config);
}

Test(config, a_model_that_is_dot_is_named_by_its_directory) {
    struct run run;
    cr_assert_eq(chdir("/usr/lib"), 0);
    cr_assert_eq(load(&run, "--model .", ""), 0);
    cr_assert_str_eq(run.config.model.names, "lib");
    config_close(&run.config);
}

Test(config, values_of_each_type) {
    struct run run;
    cr_assert_eq(load(&run,
                      "--model=m --port 0 --kv-pool-bytes=3G --max-body-bytes 100k --strict-params"
                      " --random-weights=no --kv-dtype bf16 --served-model-name x --api-key k=v"
                      " --kv-buffer=0",
                      ""),
                 0, "%s", run.fault.text);
    cr_assert_eq(run.config.server.port, 0);
    cr_assert_eq(run.config.engine.kv_pool_bytes, (int64_t)3 << 30);
    cr_assert_eq(run.config.server.max_body_bytes, 100 << 10);
    cr_assert(run.config.server.strict_params);
    cr_assert_not(run.config.engine.random_weights);
    cr_assert_str_eq(run.config.engine.kv_dtype, "bf16");
    cr_assert_eq(run.config.engine.kv_buffer, 0); /* as a request may say */
    cr_assert_str_eq(run.config.model.names, "x");
    cr_assert_eq(run.config.server.now.api_keys.count, 1);
    cr_assert_str_eq(run.config.server.now.api_keys.items[0], "k=v");
    config_close(&run.config);
}

Test(config, flags_over_environment_over_file) {
    struct run run;
    char args[128];
    write_file("model = from-file\nkv-budget = 1\nkv-chunk = 1\nthreads = 1\n");
    snprintf(args, sizeof args, "--kv-budget 3 --kv-budget=4 --config=%s", file_path);
    cr_assert_eq(load(&run, args, "KEEPD_KV_BUDGET=2 KEEPD_KV_CHUNK=2 KEEPD_UNKNOWN=5"), 0, "%s",
                 run.fault.text);
    cr_assert_eq(run.config.engine.kv_budget, 4);
    cr_assert_eq(run.config.engine.kv_chunk, 2);
    cr_assert_eq(run.config.engine.threads, 1);
    cr_assert_str_eq(run.config.engine.model_dir, "from-file");
    config_close(&run.config);
    snprintf(args, sizeof args, "KEEPD_CONFIG=%s", file_path);
    cr_assert_eq(load(&run, "", args), 0);
    cr_assert_eq(run.config.engine.kv_budget, 1);
    config_close(&run.config);
    unlink(file_path);
}

Test(config, unknown_names_get_the_nearest) {
    refuse("--kv-bugdet 3", "", "kv-bugdet", "did you mean 'kv-budget'?");
    refuse("--max-model-length=3", "", "max-model-length", "'max-model-len'");
    refuse("--ports", "", "ports", "'port'");
    refuse("--budget 3", "", "budget", "did you mean 'kv-budget'?");
    refuse("--seqs 3", "", "seqs", "did you mean 'max-num-seqs'?");
    refuse("serv m", "", "serv", "not a command of keepd; did you mean 'serve'?");
    refuse("--model server m", "", "m", "named already; did you mean 'serve' by the word before?");
    refuse("vresion", "", "vresion", "did you mean 'version'?");
    refuse("--", "", "", "unknown option");
    refuse("-x", "", "x", "unknown option 'x'");
    char args[500] = "--";
    memset(args + 2, 'x', 400);
    struct run run;
    cr_assert_eq(load(&run, args, ""), ERR_INVALID);
}

Test(config, a_name_far_from_all_gets_no_hint) {
    struct run run;
    cr_assert_eq(load(&run, "--model m --nonsense 3", ""), ERR_INVALID);
    cr_assert(strstr(run.fault.text, "unknown option 'nonsense'"));
    cr_assert_not(strstr(run.fault.text, "did you mean"), "%s", run.fault.text);
    config_close(&run.config);
}

Test(config, wrong_values_say_what_was_expected) {
    refuse("--model m --port 65536", "", "port", "from 0 to 65535, not '65536'");
    refuse("--model m --port -1", "", "port", "not '-1'");
    refuse("--model m --port 80x", "", "port", "not '80x'");
    refuse("--model m --port +80", "", "port", "not '+80'");
    refuse("--model m --port=", "", "port", "not ''");
    refuse("--model m --port 1K", "", "port", "not '1K'");
    refuse("--model m --threads 99999999999999999999", "", "threads", "whole number");
    refuse("--model m --kv-pool-bytes 9223372036854775807K", "", "kv-pool-bytes", "K, M or G");
    refuse("--model m --kv-pool-bytes 17179869185G", "", "kv-pool-bytes",
           "K, M or G"); /* 2^64 + 1G */
    refuse("--model m --kv-pool-bytes 1KB", "", "kv-pool-bytes", "not '1KB'");
    refuse("--model m --kv-dtype f16", "", "kv-dtype",
           "one of auto|f32|bf16|fp8|fp8_e4m3|q8|q4, not 'f16'");
    refuse("--model m --kv-dtype aut", "", "kv-dtype", "not 'aut'");
    refuse("--model m --strict-params=maybe", "", "strict-params", "true or false");
    refuse("--model m --api-key=", "", "api-key", "must not be empty");
    refuse("--model m --port", "", "port", "--port needs a value");
    refuse("--model m --temperature 2.1", "", "temperature", "a number from 0 to 2, not '2.1'");
    refuse("--model m --temperature hot", "", "temperature", "not 'hot'");
    refuse("--model m --top-p -0.1", "", "top-p", "not '-0.1'");
    refuse("--model m --min-p nan", "", "min-p", "not 'nan'");
    refuse("--model m --top-k 1.5", "", "top-k", "a whole number from 0");
    refuse("--model m", "KEEPD_PORT=tcp://10.0.0.1", "port", "KEEPD_PORT: ");
    refuse("--model m --port 1", "KEEPD_PORT=x", "port", "KEEPD_PORT: "); /* even if unused */
}

Test(config, secrets_stay_out_of_messages) {
    struct run run;
    FILE *out = tmpfile();
    char text[8192];
    cr_assert_eq(load(&run, "--model m --api-key hush", ""), 0);
    config_print(&run.config, out);
    rewind(out);
    text[fread(text, 1, sizeof text - 1, out)] = '\0';
    cr_assert_null(strstr(text, "hush"));
    cr_assert_not_null(strstr(text, "api-key = (hidden)\n"));
    fclose(out);
    config_close(&run.config);
}

Test(config, what_belongs_together) {
    refuse("", "", "model", "no model given: keepd MODEL");
    refuse("--model m --kv-budget-max 512", "", "kv-budget", "above kv-budget-max 512");
    refuse("--model m --max-num-batched-tokens 63", "", "max-num-batched-tokens", "below");
}

Test(config, help_and_version_need_nothing_else) {
    struct run run;
    cr_assert_eq(load(&run, "--help", "KEEPD_PORT=bad"), 0);
    cr_assert(run.config.help);
    config_close(&run.config);
    cr_assert_eq(load(&run, "-h", ""), 0);
    cr_assert(run.config.help);
    config_close(&run.config);
    cr_assert_eq(load(&run, "--version", ""), 0);
    cr_assert(run.config.version);
    config_close(&run.config);
    config_close(&run.config);
}

/* Every model has the options of its section, and else those of all. */
Test(config, models_have_sections) {
    static const char text[] =
        "kv-budget = 300\npin = b\nmodel = in/file\n"
        "[b]\nmodel = /models/b.gguf\nkv-budget = 100\nserved-model-name = bb\n"
        "[file]\ntemperature = 0.5\nkv-chunk = 64\n";
    static const char *const paths[] = {"in/file", "/models/b.gguf"};
    static const char *const names[] = {"file", "b,bb"};
    static const int budgets[] = {300, 100}, chunks[] = {64, 512};
    static char program[] = "keepd", option[] = "--config";
    char *args[] = {program, option, file_path, NULL}, *none[] = {NULL};
    struct config all;
    struct fault fault = {0};
    write_file(text);
    cr_assert_eq(config_load(3, args, none, &all, &fault), 0, "%s", fault.text);
    cr_assert(all.model_count == 2 && all.sections);
    for (size_t i = 0; i < 2; i++) {
        struct config own;
        cr_assert_str_eq(all.models[i].names, names[i]);
        cr_assert_eq(config_load_model(3, args, none, &all, i, &own, &fault), 0, "%s", fault.text);
        cr_assert_str_eq(own.engine.model_dir, paths[i]);
        cr_assert_str_eq(own.model.names, names[i]);
        cr_assert(own.engine.kv_budget == budgets[i] && own.engine.kv_chunk == chunks[i]);
        cr_assert(own.engine.kv_budget_given);
        config_close(&own);
    }
    config_close(&all);
    unlink(file_path);
}

Test(config, models_are_named) {
    struct run run;
    cr_assert_eq(load(&run, "--model a,b=/x/y --model z/w.gguf --model ./p=q/r", ""), 0);
    cr_assert_eq(run.config.model_count, 3);
    cr_assert_str_eq(run.config.models[0].names, "a,b");
    cr_assert_str_eq(run.config.models[0].path, "/x/y");
    cr_assert_str_eq(run.config.models[1].names, "w");
    cr_assert_str_eq(run.config.models[2].names, "r"); /* a path with a sign is a path */
    cr_assert_str_eq(run.config.models[2].path, "./p=q/r");
    config_close(&run.config);
    cr_assert_eq(load(&run, "--model org/name=/x --model=/y/p=q/r --model hf:o/n:q", ""), 0);
    cr_assert_str_eq(run.config.models[0].names, "org/name");
    cr_assert_str_eq(run.config.models[0].path, "/x");
    cr_assert_str_eq(run.config.models[1].path, "/y/p=q/r");
    cr_assert_str_eq(run.config.models[2].names, "o/n:q");
    config_close(&run.config);
    cr_assert_eq(load(&run, "--model /x --served-model-name chat,c --pin chat", ""), 0, "%s",
                 run.fault.text);
    cr_assert(run.config.models[0].pinned);
    config_close(&run.config);
    refuse("--model /x --served-model-name chat,c --pin c", "", "pin", "no model has the name");
    refuse("--model a= --model b", "", "model", "expected a path, or a name");
    refuse("--model a --model b --served-model-name c", "", "served-model-name", "names one model");
    cr_assert_eq(load(&run, "--models-dir /does/not/exist", ""), ERR_IO);
    cr_assert_str_eq(run.fault.field, "models-dir");
}

static void refuse_file(const char *text, int rc, const char *why) {
    struct run run;
    cr_assert_eq(load_file(&run, text, "--model m"), rc, "%s", text);
    cr_assert_not_null(strstr(run.fault.text, why), "'%s' lacks '%s'", run.fault.text, why);
}

Test(config, files_that_are_refused) {
    refuse_file("# fine\nkv-bugdet = 3\n", ERR_INVALID, "line 2: unknown option 'kv-bugdet'");
    refuse_file("port = 1\nport = 2\n", ERR_INVALID, "line 2: port is given twice");
    refuse_file("port = 1\n  2\n", ERR_INVALID, "line 2: port is given twice");
    refuse_file("[x]\nport = 1\n", ERR_INVALID, "line 2: port is an option of the server");
    refuse_file("[x]\nkv-budget = 1\n", ERR_INVALID, "line 2: no model has the name 'x'");
    refuse_file("[m]\nmodel = n\n", ERR_INVALID, "line 2: two models have the name 'm'");
    refuse_file("[m]\nkv-budget = x\n", ERR_INVALID, "line 2: kv-budget must be");
    refuse_file("[m]\nkv-budget = 1\nkv-budget = 2\n", ERR_INVALID, "line 3: kv-budget is given");
    refuse_file("[a-name-of-more-bytes-than-the-reader-of-files-has-for-one]\nmodel = n\n",
                ERR_LIMIT, "line 2: the name of the section has more than 48 bytes");
    refuse_file("pin = x\n", ERR_INVALID, "no model has the name 'x'");
    refuse_file("port\n", ERR_MALFORMED, "line 1: expected `name = value`");
    refuse_file("port = x\nthreads = y\n", ERR_INVALID, "line 1: port must be");
    refuse_file("config = other\n", ERR_INVALID, "cannot stand in a configuration file");
    refuse_file("help = true\n", ERR_INVALID, "cannot stand in a configuration file");
    struct run run;
    cr_assert_eq(load(&run, "--model m --config /does/not/exist", ""), ERR_IO);
    cr_assert_str_eq(run.fault.field, "config");
    cr_assert_eq(load(&run, "--model m --config /tmp", ""), ERR_IO);
}

Test(config, long_lines_are_refused_not_cut) {
    char text[5000] = "served-model-name = ";
    memset(text + strlen(text), 'x', 4000);
    refuse_file(text, ERR_LIMIT, "line 1: line too long");
    strcat(text, "\nport = 1\n");
    refuse_file(text, ERR_LIMIT, "line 1: line too long");
}

Test(config, last_line_may_lack_its_newline) {
    struct run run;
    cr_assert_eq(load_file(&run, "gates =\nport = 7", "--model m"), 0);
    cr_assert_eq(run.config.server.port, 7);
    cr_assert_str_eq(run.config.engine.gates, "");
    config_close(&run.config);
}

static void note_change(void *arg, const char *option, bool taken) {
    char *notes = arg;
    sprintf(notes + strlen(notes), "%s%s ", option, taken ? "!" : "");
}

Test(config, reload_takes_only_what_may_change) {
    struct run run, fresh;
    char notes[256] = "";
    cr_assert_eq(load(&run, "--model m --log-level warn --port 1 --api-key a", ""), 0);
    cr_assert_eq(load(&fresh, "--model n --log-level debug --port 2 --api-key b --api-key a", ""),
                 0);
    config_reload(&run.config, &fresh.config, note_change, notes);
    cr_assert_str_eq(notes, "model served-model-name port api-key! log-level! ");
    cr_assert_eq(run.config.log_level, LOG_LEVEL_DEBUG);
    cr_assert_str_eq(run.config.engine.model_dir, "m");
    cr_assert_eq(run.config.server.port, 1);
    cr_assert_eq(run.config.server.now.api_keys.count, 2);
    cr_assert_str_eq(run.config.server.now.api_keys.items[0], "b");
    config_close(&run.config);
    config_close(&fresh.config);
}

Test(config, reload_reports_what_changed_in_sections) {
    static const char before[] = "[a]\nmodel = x\nkv-budget = 5\nkv-chunk = 64\n[b]\nmodel = y\n";
    static const char after[] = "[a]\nmodel = x\nkv-budget = 6\ntemperature = 1\n[c]\nmodel = y\n";
    struct run run, fresh;
    char notes[256] = "";
    cr_assert_eq(load_file(&run, before, ""), 0, "%s", run.fault.text);
    cr_assert_eq(load_file(&fresh, before, ""), 0);
    config_reload(&run.config, &fresh.config, note_change, notes);
    cr_assert_null(strchr(notes, '['), "%s", notes);
    config_close(&fresh.config);
    cr_assert_eq(load_file(&fresh, after, ""), 0, "%s", fresh.fault.text);
    for (int i = 0; i < 2; i++) { /* a second time, too: nothing was taken */
        notes[0] = '\0';
        config_reload(&run.config, &fresh.config, note_change, notes);
        cr_assert_str_eq(strchr(notes, '['),
                         "[a] kv-budget [a] temperature [c] model [a] kv-chunk [b] model ");
    }
    config_close(&run.config);
    config_close(&fresh.config);
}

Test(config, a_list_grows_and_the_strongest_source_gives_all_of_it) {
    struct run run;
    cr_assert_eq(load_file(&run, "api-key = a\napi-key = b\n", "--model m"), 0, "%s",
                 run.fault.text);
    cr_assert_eq(run.config.server.now.api_keys.count, 2);
    cr_assert_str_eq(run.config.server.now.api_keys.items[1], "b");
    config_close(&run.config);
    cr_assert_eq(load_file(&run, "api-key = a\napi-key = b\n", "--model m --api-key c"), 0);
    cr_assert_eq(run.config.server.now.api_keys.count, 1);
    cr_assert_str_eq(run.config.server.now.api_keys.items[0], "c");
    config_close(&run.config);
    cr_assert_eq(load(&run, "--model m --api-key c --api-key=d", "KEEPD_API_KEY=e"), 0);
    cr_assert_eq(run.config.server.now.api_keys.count, 2);
    cr_assert_str_eq(run.config.server.now.api_keys.items[1], "d");
    config_close(&run.config);
}

/* --- sampling --- */

Test(config, sampling_is_the_models_unless_it_is_set) {
    struct run run;
    cr_assert_eq(load(&run, "--model m", ""), 0);
    cr_assert(isnan(run.config.sampling.temperature) && isnan(run.config.sampling.top_p) &&
              run.config.sampling.top_k == -1);
    cr_assert(isnan(run.config.sampling.min_p) && isnan(run.config.sampling.repetition));
    config_close(&run.config);
    cr_assert_eq(load(&run,
                      "--model m --temperature 0 --top-p .9 --top-k 40 --min-p=0.05"
                      " --repetition-penalty 1.1",
                      "KEEPD_TEMPERATURE=2"),
                 0, "%s", run.fault.text);
    cr_assert_eq(run.config.sampling.temperature, 0);
    cr_assert_eq(run.config.sampling.top_p, .9f);
    cr_assert_eq(run.config.sampling.top_k, 40);
    cr_assert_eq(run.config.sampling.min_p, .05f);
    cr_assert_eq(run.config.sampling.repetition, 1.1f);
    config_close(&run.config);
}

/* --- habits --- */

static void accept(struct run *run, const char *args) {
    cr_assert_eq(load(run, args, ""), 0, "%s: %s", args, run->fault.text);
}

Test(config, a_model_needs_no_option) {
    static const char *const each[] = {"m", "serve m", "--port 1 m", "serve --port 1 m", "-m m"};
    struct run run;
    for (size_t i = 0; i < sizeof each / sizeof *each; i++) {
        accept(&run, each[i]);
        cr_assert_str_eq(run.config.engine.model_dir, "m");
        config_close(&run.config);
    }
    refuse("m n", "", "n", "unexpected argument 'n': the model is named already");
    refuse("--model m n", "", "n", "the model is named already");
    refuse("m --model n", "", "model", "named twice");
    refuse("m -m n", "", "model", "named twice");
    refuse("serve", "", "model", "no model given");
}

Test(config, commands_of_others) {
    struct run run;
    refuse("download org/name", "", "download", "use keepd pull");
    refuse("pul org/name", "", "pul", "did you mean 'pull'?");
    refuse("run m", "", "run", "keepd serve MODEL");
    refuse("list", "", "list", "/v1/models");
    accept(&run, "help");
    cr_assert(run.config.help);
    config_close(&run.config);
    accept(&run, "version");
    cr_assert(run.config.version);
    config_close(&run.config);
}

Test(config, options_of_others_with_the_same_meaning) {
    struct run run;
    accept(&run, "serve m -c 4096 -np 8 -t 2 -b 512 -s 7 --temp 0.2 --repeat-penalty 1.1 --alias x"
                 " -tp 2 --kv_cache_dtype bfloat16 --no-webui -v");
    cr_assert_eq(run.config.engine.max_model_len, 4096);
    cr_assert_eq(run.config.engine.max_num_seqs, 8);
    cr_assert_eq(run.config.engine.threads, 2);
    cr_assert_eq(run.config.engine.max_num_batched_tokens, 512);
    cr_assert_eq(run.config.model.seed, 7);
    cr_assert_eq(run.config.sampling.temperature, .2f);
    cr_assert_eq(run.config.sampling.repetition, 1.1f);
    cr_assert_str_eq(run.config.model.names, "x");
    cr_assert_eq(run.config.engine.tensor_parallel_size, 2);
    cr_assert_str_eq(run.config.engine.kv_dtype, "bf16");
    cr_assert_eq(run.config.log_level, LOG_LEVEL_DEBUG);
    cr_assert(run.config.server.no_ui);
    cr_assert_eq(run.config.notes.count, 0);
    config_close(&run.config);
    accept(&run, "m --ctx-size=2048 --max_num_seqs 4 --context-shift");
    cr_assert_eq(run.config.engine.max_model_len, 2048);
    cr_assert_eq(run.config.engine.max_num_seqs, 4);
    cr_assert_eq(run.config.engine.kv_overflow, ENGINE_OVERFLOW_SHIFT);
    config_close(&run.config);
    refuse("m -c many", "", "max-model-len", "not 'many'");
    refuse("m -c", "", "max-model-len", "-c needs a value");
}

Test(config, models_of_the_hub) {
    struct run run;
    accept(&run, "-hf org/name:Q4_K_M --port 1");
    cr_assert_str_eq(run.config.engine.model_dir, "hf:org/name:Q4_K_M");
    cr_assert_str_eq(run.config.model.names, "org/name:Q4_K_M");
    cr_assert_eq(run.config.server.port, 1);
    config_close(&run.config);
    accept(&run, "--hf-repo=org/name");
    cr_assert_str_eq(run.config.engine.model_dir, "hf:org/name");
    config_close(&run.config);
    accept(&run, "hf://org/name@v1");
    cr_assert_str_eq(run.config.model.names, "org/name@v1");
    config_close(&run.config);
    refuse("-hf", "", "-hf", "needs a value");
    refuse("m -hf org/name", "", "model", "named twice");
}

/* A file of the hub's cache is a link to a file that is named by its sum. */
Test(config, a_link_has_its_own_name) {
    char dir[] = "/tmp/keepd-test-XXXXXX", link[64], words[80];
    struct run run;
    cr_assert_not_null(mkdtemp(dir));
    snprintf(link, sizeof link, "%s/nice.gguf", dir);
    cr_assert_eq(symlink("/dev/null", link), 0);
    snprintf(words, sizeof words, "%s", link);
    accept(&run, words);
    cr_assert_str_eq(run.config.model.names, "nice");
    config_close(&run.config);
    unlink(link);
    rmdir(dir);
}

Test(config, options_of_others_that_change_nothing_leave_a_note) {
    struct run run;
    accept(&run, "m -ngl 99 -fa --jinja --flash-attn on --trust-remote-code --dtype auto"
                 " --reasoning-parser qwen3 --port 1");
    cr_assert_eq(run.config.server.port, 1);
    cr_assert_eq(run.config.reasoning_parser, CONFIG_REASONING_AUTO);
    cr_assert_eq(run.config.notes.count, 7);
    cr_assert_not_null(strstr(run.config.notes.items[0], "-ngl changes nothing here: "));
    cr_assert_not_null(strstr(run.config.notes.items[6], "reasoning-parser is auto here"));
    config_close(&run.config);
}

/* --mmproj-offload and its like stand beside --mmproj, which means the same here. */
Test(config, options_of_others_about_pictures) {
    struct run run;
    accept(&run, "m -mm eyes.gguf --mmproj-offload --no-mmproj-auto --limit-mm-per-prompt image=4");
    cr_assert_str_eq(run.config.engine.mmproj, "eyes.gguf");
    cr_assert_eq(run.config.notes.count, 3);
    config_close(&run.config);
    refuse("m --mmproj-url x", "", "--mmproj-*", "use --mmproj FILE");
}

Test(config, the_option_of_vllm_that_streams_have_their_usage) {
    struct run run;
    accept(&run, "m --enable-force-include-usage");
    cr_assert(run.config.server.include_usage);
    config_close(&run.config);
    refuse("m --return-tokens-as-token-ids", "", "--return-tokens-as-token-ids",
           "requests give it");
}

Test(config, options_of_others_that_keepd_lacks_say_what_to_do) {
    refuse("m --xtc-probability 0.5", "", "--xtc-*", "requests");
    refuse("m --gpu-memory-utilization 0.9", "", "--gpu-memory-utilization", "use --kv-pool-bytes");
    refuse("-hff file", "", "-hff", "hf:OWNER/NAME:FILE.gguf");
    refuse("m --offline", "", "--offline", "HF_HUB_OFFLINE=1");
    refuse("m --rope-freq-base=1e6", "", "--rope-*", "--rope-freq-base is not an option of keepd");
    refuse("m -ctk q8_0", "", "-ctk", "use --kv-dtype q8");
    refuse_file("ctx-size = 1\n", ERR_INVALID, "did you mean 'max-model-len'?");
}

Test(config, variables_that_are_nearly_options_leave_a_note) {
    struct run run;
    cr_assert_eq(load(&run, "m",
                      "KEEPD_KV_BUGDET=64 KEEPD_URL=x KEEPD_PORT_8080_TCP=y KEEPD_X=1 KEEPD_BIN=z"
                      " KEEPD_CTX_SIZE=4096 KEEPD_KV_CHUNK=3 HOME=/"),
                 0, "%s", run.fault.text);
    cr_assert_eq(run.config.engine.kv_chunk, 3);
    cr_assert_eq(run.config.notes.count, 2);
    cr_assert_not_null(strstr(run.config.notes.items[0],
                              "KEEPD_KV_BUGDET is no option of keepd and is ignored; did you mean "
                              "KEEPD_KV_BUDGET?"));
    cr_assert_not_null(strstr(run.config.notes.items[1], "did you mean KEEPD_MAX_MODEL_LEN?"));
    config_close(&run.config);
}

Test(config, whether_a_budget_was_asked_for) {
    struct run run;
    accept(&run, "m");
    cr_assert_not(run.config.engine.kv_budget_given);
    config_close(&run.config);
    accept(&run, "m --kv-budget 1024");
    cr_assert(run.config.engine.kv_budget_given);
    config_close(&run.config);
    cr_assert_eq(load(&run, "m", "KEEPD_KV_BUDGET=64"), 0);
    cr_assert(run.config.engine.kv_budget_given);
    config_close(&run.config);
}

Test(config, names_of_options) {
    cr_assert(config_is_option("kv-policy"));
    cr_assert_not(config_is_option("kv-polic"));
    cr_assert_not(config_is_option("config.json"));
    cr_assert_not(config_is_option(""));
}

static char *read_all(FILE *file) {
    char *text = calloc(1, 1 << 16);
    size_t n = fread(text, 1, (1 << 16) - 1, file);
    cr_assert_gt(n, 0);
    fclose(file);
    return text;
}

/* The output of --check-config names every option that a file may hold, so it represents the table.
 */
Test(config, the_example_file_has_every_option_at_its_default) {
    struct run run;
    char *rest, *example = read_all(fopen(KEEPD_SOURCE_DIR "/deploy/keepd.conf", "r"));
    cr_assert_eq(load(&run, "--model /var/lib/keepd/model", ""), 0);
    free((char *)(uintptr_t)run.config.model.names);
    run.config.model.names = NULL;
    FILE *out = tmpfile();
    config_print(&run.config, out);
    rewind(out);
    char *table = read_all(out);
    int options = 0;
    for (char *line = strtok_r(table, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        char wanted[256];
        snprintf(wanted, sizeof wanted, "\n# %s\n", line[0] == '#' ? line + 2 : line);
        cr_assert_not_null(strstr(example, wanted), "deploy/keepd.conf lacks '%s'", line);
        options++;
    }
    cr_assert_geq(options, 25);
    config_close(&run.config);
    free(table);
    free(example);
}

/* With its lines taken out of their comments the example is accepted as it is. */
Test(config, the_example_file_is_accepted) {
    struct run run;
    char *example = read_all(fopen(KEEPD_SOURCE_DIR "/deploy/keepd.conf", "r")), *p = example;
    cr_assert_eq(load_file(&run, example, "--model m"), 0, "%s", run.fault.text);
    config_close(&run.config);
    while ((p = strstr(p, "\n# "))) {
        size_t name = strspn(p + 3, "abcdefghijklmnopqrstuvwxyz-");
        bool option = name && strncmp(p + 3 + name, " =", 2) == 0 && p[3 + name + 2] == ' ';
        if (option) memcpy(p, "\n  ", 3);
        p += 3;
    }
    for (p = example; (p = strstr(p, "\n  "));) memmove(p + 1, p + 3, strlen(p + 3) + 1);
    cr_assert_eq(load_file(&run, example, ""), 0, "%s", run.fault.text);
    cr_assert_str_eq(run.config.engine.model_dir, "/var/lib/keepd/model");
    config_close(&run.config);
    free(example);
}

Test(config, help_names_every_option) {
    FILE *out = tmpfile();
    config_help(out);
    rewind(out);
    char *text = read_all(out), *rest;
    cr_assert_not_null(strstr(text, "  --kv-budget N "));
    cr_assert_not_null(strstr(text, "[1024]"));
    cr_assert_not_null(strstr(text, "  --kv-dtype auto|f32|bf16|fp8|fp8_e4m3|q8|q4\n"));
    cr_assert_not_null(strstr(text, "  --check-config "));
    /* The ends of the longest texts. */
    cr_assert_not_null(strstr(text, "for weights in bf16 and"));
    cr_assert_not_null(strstr(text, "for a cache in bf16. [int8]\n"));
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        cr_assert_leq(strlen(line), 96);
        cr_assert_neq(line[strlen(line) - 1], ' ', "'%s'", line);
    }
    free(text);
}
