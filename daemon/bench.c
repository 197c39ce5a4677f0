#include "daemon/bench.h"

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/splitmix.h"
#include "engine/engine.h"
#include "engine/engine_text.h"

/* Repeats of a test without -r. */
#define REPEATS_LEAST   2
#define REPEATS_MOST    5
#define REPEATS_TIME_NS 10000000000

#define JSON_BYTES_MAX ((size_t)64 << 20) /* all rows; a name can be long */

/* ---- Arguments ---- */

void bench_help(FILE *out) {
    fputs(
        "Usage: keepd bench MODEL [-p N,...] [-n N,...] [-b N,...] [-r N] [--json] [options]\n"
        "\n"
        "Measures the rates at which this machine reads prompts and generates answers.\n"
        "\n"
        "  -p N,...   lengths of prompts in tokens; 0: none [512]\n"
        "  -n N,...   lengths of answers in tokens; 0: none [128]\n"
        "  -b N,...   numbers of sequences that run at once [1,8]\n"
        "  -r N       repeats of each test [2 to 5, as many as fit into ten seconds]\n"
        "  --json     print JSON instead of a table\n"
        "\n"
        "All options of the daemon that concern the engine apply, such as --threads, --kv-policy\n"
        "and --quantization: keepd --help.\n",
        out);
}

static int refuse_bench_list(struct fault *fault, const char *name, const char *text, int least,
                             int most) {
    return fault_set(fault, ERR_INVALID, name,
                     "must be whole numbers from %d to %d, separated by commas, at most %d of "
                     "them, not '%.40s'",
                     least, most, BENCH_LIST_MAX, text);
}

static int parse_bench_list(const char *name, const char *text, int least, int most,
                            struct bench_list *list, struct fault *fault) {
    const char *at = text;
    *list = (struct bench_list){0};
    do {
        char *end;
        long value = strtol(at, &end, 10);
        if (end == at || value < least || value > most || list->count == BENCH_LIST_MAX ||
            (*end && *end != ','))
            return refuse_bench_list(fault, name, text, least, most);
        list->items[list->count++] = (int)value;
        at = *end ? end + 1 : NULL;
    } while (at);
    if (list->items[0] == 0 && list->count == 1) list->count = 0;
    for (int i = 0; i < list->count; i++)
        if (list->items[i] == 0) return refuse_bench_list(fault, name, text, least, most);
    return 0;
}

static int parse_value(const char *name, const char *text, struct bench_options *options,
                       struct fault *fault) {
    struct bench_list one;
    int rc;
    if (!text) return fault_set(fault, ERR_INVALID, name, "needs a value");
    switch (name[1]) {
    case 'p':
        return parse_bench_list(name, text, 0, BENCH_TOKENS_MAX, &options->prompts, fault);
    case 'n':
        return parse_bench_list(name, text, 0, BENCH_TOKENS_MAX, &options->tokens, fault);
    case 'b':
        return parse_bench_list(name, text, 1, ENGINE_CHOICES_MAX, &options->batches, fault);
    default:
        rc = parse_bench_list(name, text, 1, BENCH_REPEAT_MAX, &one, fault);
        if (rc == 0) options->repeats = one.items[0];
        return rc;
    }
}

static bool is_own(const char *arg) {
    return arg[0] == '-' && arg[1] != '\0' && strchr("pnbr", arg[1]) && arg[2] == '\0';
}

int bench_parse(int argc, char **argv, struct bench_options *options, char **rest,
                struct fault *fault) {
    int count = 0, rc = 0, first = 2;
    *options =
        (struct bench_options){.prompts = {{512}, 1}, .tokens = {{128}, 1}, .batches = {{1, 8}, 2}};
    rest[count++] = argv[0];
    if (argc > 2 && argv[2][0] != '-') {
        rest[count++] = "--model";
        rest[count++] = argv[2];
        first = 3;
    }
    for (int i = first; i < argc && rc == 0; i++) {
        if (strcmp(argv[i], "--json") == 0) {
            options->json = true;
        } else if (strcmp(argv[i], "--help") == 0) {
            options->help = true;
        } else if (is_own(argv[i])) {
            rc = parse_value(argv[i], argv[i + 1], options, fault);
            i++;
        } else {
            rest[count++] = argv[i];
        }
    }
    rest[count] = NULL;
    return rc;
}

int bench_widest(const struct bench_options *options) {
    int most = 1;
    for (int i = 0; i < options->batches.count; i++)
        if (options->batches.items[i] > most) most = options->batches.items[i];
    return most;
}

/* ---- Waiting ---- */

struct bench {
    pthread_mutex_t lock;
    pthread_cond_t woken;
    uint64_t wakes;
    uint64_t random;
};

struct bench *bench_open(void) {
    struct bench *bench = mem_must_alloc(1, sizeof *bench);
    bench->random = SPLITMIX_STEP;
    CHECK(pthread_mutex_init(&bench->lock, NULL) == 0);
    CHECK(pthread_cond_init(&bench->woken, NULL) == 0);
    return bench;
}

void bench_close(struct bench *bench) {
    pthread_cond_destroy(&bench->woken);
    pthread_mutex_destroy(&bench->lock);
    mem_free(bench);
}

void bench_wake(struct bench *bench) {
    pthread_mutex_lock(&bench->lock);
    bench->wakes++;
    pthread_cond_signal(&bench->woken);
    pthread_mutex_unlock(&bench->lock);
}

static bool all_finished(const struct engine_job *jobs, int count) {
    for (int i = 0; i < count; i++)
        if (atomic_load_explicit(&jobs[i].finished, memory_order_acquire) == 0) return false;
    return true;
}

static void wait_for_bench_jobs(struct bench *bench, const struct engine_job *jobs, int count) {
    pthread_mutex_lock(&bench->lock);
    for (uint64_t seen = bench->wakes; !all_finished(jobs, count); seen = bench->wakes)
        while (seen == bench->wakes) pthread_cond_wait(&bench->woken, &bench->lock);
    pthread_mutex_unlock(&bench->lock);
}

/* ---- One run ---- */

/* A row of the table. */
struct test {
    bool generates;
    int tokens; /* the length of each prompt or answer */
    int batch;
};

static void fill_prompt(struct bench *bench, const struct engine *engine, int32_t *prompt,
                        int count) {
    uint64_t vocab = (uint64_t)engine_info(engine)->vocab;
    for (int i = 0; i < count; i++) {
        int tries = 0;
        do prompt[i] = (int32_t)(splitmix_next(&bench->random) % vocab);
        while (engine_token_is_special(engine, prompt[i]) && ++tries < 100);
    }
}

static struct engine_request request_of(const struct test *test, const int32_t *prompt) {
    return (struct engine_request){
        .prompt = prompt,
        .prompt_count = test->generates ? 1 : test->tokens,
        .max_tokens = test->generates ? test->tokens + 1 : 1,
        .top_p = 1,
        .repetition = 1,
        .choices = 1,
        .top_logprobs = -1,
        .ignore_eos = true,
        .think_begin = -1,
        .think_end = -1,
        .kv = {.budget = -1, .buffer = -1, .chunk = -1, .sinks = -1, .recent = -1},
    };
}

static int submit_bench_jobs(struct engine *engine, struct engine_job *jobs, int count,
                             struct fault *fault) {
    int rc = 0;
    for (int i = 0; i < count && rc == 0; i++) rc = engine_check(engine, &jobs[i], fault);
    if (rc != 0) return rc;
    if (!engine_queue_enter(engine, count))
        return fault_set(fault, ERR_FULL, "max-queue", "%d requests at once do not fit", count);
    for (int i = 0; i < count; i++) {
        rc = engine_submit(engine, &jobs[i]);
        if (rc == 0) continue;
        engine_queue_leave(engine, count - i);
        for (int k = 0; k < count; k++) {
            atomic_store_explicit(&jobs[k].cancel, 1, memory_order_release);
            if (k >= i) atomic_store_explicit(&jobs[k].finished, 1, memory_order_release);
        }
        return fault_set(fault, rc, "engine", "%s", err_text(rc));
    }
    return 0;
}

int bench_run_jobs(struct bench *bench, struct engine *engine, struct engine_job *jobs, int count,
                   struct fault *fault) {
    int rc = submit_bench_jobs(engine, jobs, count, fault);
    bool submitted = jobs[0].choice != NULL;
    if (submitted) wait_for_bench_jobs(bench, jobs, count);
    for (int i = 0; i < count && rc == 0; i++)
        if (jobs[i].fault.code) {
            *fault = jobs[i].fault;
            rc = fault->code;
        }
    return rc;
}

static double rate_of(const struct test *test, const struct engine_job *jobs) {
    int64_t begin = INT64_MAX, end = 0;
    for (int i = 0; i < test->batch; i++) {
        int64_t from = test->generates ? jobs[i].first_token_ns : jobs[i].queued_ns;
        int64_t to = test->generates ? jobs[i].finished_ns : jobs[i].first_token_ns;
        if (from < begin) begin = from;
        if (to > end) end = to;
    }
    return end > begin ? (double)test->tokens * test->batch * 1e9 / (double)(end - begin) : 0;
}

static int run_once(struct bench *bench, struct engine *engine, const struct test *test,
                    double *rate, struct fault *fault) {
    int length = test->generates ? 1 : test->tokens, count = test->batch;
    struct engine_job *jobs = mem_must_alloc((size_t)count, sizeof *jobs);
    int32_t *prompts = mem_must_alloc((size_t)count * (size_t)length, sizeof *prompts);
    for (int i = 0; i < count; i++) {
        int32_t *prompt = prompts + (size_t)i * (size_t)length;
        fill_prompt(bench, engine, prompt, length);
        jobs[i].request = request_of(test, prompt);
    }
    int rc = bench_run_jobs(bench, engine, jobs, count, fault);
    if (rc == 0) *rate = rate_of(test, jobs);
    for (int i = 0; i < count; i++) engine_job_close(&jobs[i]);
    mem_free(prompts);
    mem_free(jobs);
    return rc;
}

/* ---- The table ---- */

struct figures {
    double rates[BENCH_REPEAT_MAX];
    int count;
};

static double mean_of(const struct figures *figures) {
    double sum = 0;
    for (int i = 0; i < figures->count; i++) sum += figures->rates[i];
    return sum / figures->count;
}

/* The standard deviation of one run; 0 where there was only one. */
static double spread_of(const struct figures *figures) {
    double mean = mean_of(figures), sum = 0;
    for (int i = 0; i < figures->count; i++)
        sum += (figures->rates[i] - mean) * (figures->rates[i] - mean);
    return figures->count > 1 ? sqrt(sum / (figures->count - 1)) : 0;
}

static const char *settings_of(const struct engine_info *info, char *out, size_t size) {
    if (strcmp(info->kv_policy, "full") == 0)
        snprintf(out, size, "full %s", info->kv_dtype);
    else
        snprintf(out, size, "%s %d %s", info->kv_policy, info->kv_budget, info->kv_dtype);
    return out;
}

static void print_row(FILE *out, const struct engine_info *info, const char *name,
                      const struct test *test, const struct figures *figures) {
    char cache[64];
    fprintf(out, "| %s | %.1f MB | %s | %d | %s | %s %d | %d | %.1f ± %.1f |\n", name,
            (double)info->weight_bytes * 1e-6, info->backend, info->threads,
            settings_of(info, cache, sizeof cache), test->generates ? "generate" : "prompt",
            test->tokens, test->batch, mean_of(figures), spread_of(figures));
    fflush(out);
}

static void write_result_text(struct buf *buf, const char *key, const char *text) {
    buf_fmt(buf, "\"%s\": ", key);
    json_write_str(buf, text, strlen(text));
    buf_str(buf, ", ");
}

static void write_result_number(struct buf *buf, const char *key, double value) {
    buf_fmt(buf, "\"%s\": ", key);
    json_write_num(buf, value);
    buf_str(buf, ", ");
}

static void write_result_row(struct buf *buf, const struct engine_info *info, const char *name,
                             const struct test *test, const struct figures *figures) {
    bool bounded = strcmp(info->kv_policy, "full") != 0;
    buf_str(buf, buf->size > 0 ? ",\n {" : "[{");
    write_result_text(buf, "model", name);
    write_result_number(buf, "weight_bytes", (double)info->weight_bytes);
    write_result_text(buf, "backend", info->backend);
    write_result_number(buf, "threads", info->threads);
    write_result_text(buf, "policy", info->kv_policy);
    write_result_number(buf, "budget", bounded ? info->kv_budget : NAN);
    write_result_text(buf, "kv_dtype", info->kv_dtype);
    write_result_text(buf, "test", test->generates ? "generate" : "prompt");
    write_result_number(buf, "tokens", test->tokens);
    write_result_number(buf, "batch", test->batch);
    write_result_number(buf, "mean", mean_of(figures));
    write_result_number(buf, "deviation", spread_of(figures));
    buf_str(buf, "\"rates\": [");
    for (int i = 0; i < figures->count; i++) {
        if (i > 0) buf_str(buf, ", ");
        json_write_num(buf, figures->rates[i]);
    }
    buf_str(buf, "]}");
}

/* ---- All tests ---- */

struct table {
    struct bench *bench;
    struct engine *engine;
    const struct bench_options *options;
    const char *name;
    FILE *out;
    struct buf json;
};

/* Returns whether a test is repeated once more. Without -r a slow machine has fewer repeats. */
static bool is_repeated(const struct bench_options *options, int count, int64_t began_ns) {
    if (options->repeats) return count < options->repeats;
    return count < REPEATS_LEAST ||
           (count < REPEATS_MOST && clock_ns() - began_ns < REPEATS_TIME_NS);
}

static int run_test(struct table *table, const struct test *test, struct fault *fault) {
    const struct engine_info *info = engine_info(table->engine);
    struct figures figures = {0};
    double rate = 0;
    int rc = run_once(table->bench, table->engine, test, &rate, fault);
    const int64_t began_ns = clock_ns();
    while (rc == 0 && is_repeated(table->options, figures.count, began_ns)) {
        rc = run_once(table->bench, table->engine, test, &rate, fault);
        if (rc == 0) figures.rates[figures.count++] = rate;
    }
    if (rc != 0) return rc;
    if (table->options->json)
        write_result_row(&table->json, info, table->name, test, &figures);
    else
        print_row(table->out, info, table->name, test, &figures);
    return 0;
}

static int run_tests(struct table *table, bool generates, const struct bench_list *lengths,
                     struct fault *fault) {
    const struct bench_list *batches = &table->options->batches;
    int rc = 0;
    for (int i = 0; i < lengths->count; i++)
        for (int k = 0; k < batches->count && rc == 0; k++) {
            const struct test test = {generates, lengths->items[i], batches->items[k]};
            rc = run_test(table, &test, fault);
        }
    return rc;
}

int bench_run(struct bench *bench, struct engine *engine, const struct bench_options *options,
              const char *name, FILE *out, struct fault *fault) {
    struct table table = {
        .bench = bench, .engine = engine, .options = options, .name = name, .out = out};
    buf_open(&table.json, JSON_BYTES_MAX);
    if (!options->json)
        fputs("| model | weights | backend | threads | cache | test | batch | tokens/s |\n"
              "|---|--:|---|--:|---|---|--:|--:|\n",
              out);
    int rc = run_tests(&table, false, &options->prompts, fault);
    if (rc == 0) rc = run_tests(&table, true, &options->tokens, fault);
    if (rc == 0 && table.json.failed)
        rc = fault_set(fault, ERR_NOMEM, "json", "no memory for the rows");
    if (rc == 0 && options->json) fprintf(out, "%s]\n", table.json.data ? table.json.data : "[");
    if (rc == 0 && (fflush(out) != 0 || ferror(out)))
        rc = fault_set(fault, ERR_IO, NULL, "the table cannot be written");
    buf_close(&table.json);
    return rc;
}
