#include "daemon/fit.h"

#include <dirent.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "daemon/fit_chats.h"
#include "engine/engine_pictures.h"

#define FIT_TEXT_BYTES_MAX ((size_t)64 << 20)
#define FIT_MEASURED_MAX   6 /* texts of the table */

/* ---- Arguments ---- */

void fit_help(FILE *out) {
    fputs(
        "Usage: keepd fit MODEL [--text FILE...] [--chats FILE...] [--minutes N] [--out FILE] "
        "[--seed N] [options]\n"
        "\n"
        "Fits retention gates, which the policy global needs, to a model on this machine, and\n"
        "prints what they lose beside other policies, on texts that were held out: these only "
        "chose\n"
        "when the fit stopped.\n"
        "\n"
        "  --text FILE...  plain text (UTF-8) of the kinds that the model will read, 20,000 "
        "tokens\n"
        "                  or more in all; may be given several times\n"
        "  --chats FILE... chats, rendered with the model's template: JSON lines with \"messages\" "
        "and\n"
        "                  \"tools\" as in the API, pictures as data: addresses; may be given\n"
        "                  several times\n"
        "                  [neither: the texts and chats that come with keepd]\n"
        "  --minutes N     ends measuring after three quarters of this time, and the fit with it\n"
        "                  [as long as it takes]\n"
        "  --out FILE      the gates; must not exist [in --gates-cache, where every start with "
        "this\n"
        "                  model finds them; takes the place of those that are there]\n"
        "  --seed N        of the fit [1]\n"
        "\n"
        "A fit that was interrupted goes on where it was, as long as model, texts and seed are "
        "the\n"
        "same: what it has measured is kept in --gates-cache until the gates are written. It "
        "takes\n"
        "at most 4.3 GB, and at most half of what the disk has free.\n"
        "\n"
        "All options of the daemon that concern the engine apply, such as --threads and\n"
        "--quantization: keepd --help. Serve with: keepd --model MODEL --kv-budget N\n",
        out);
}

static int parse_fit_number(const char *name, const char *text, uint64_t most, uint64_t *value,
                            struct fault *fault) {
    char *end = NULL;
    unsigned long long number = text && text[0] != '-' ? strtoull(text, &end, 10) : 0;
    if (!text || !end || end == text || *end || number > most)
        return fault_set(fault, ERR_INVALID, name, "must be a whole number from 0 to %llu",
                         (unsigned long long)most);
    *value = number;
    return 0;
}

/* Reads the names after --text or --chats, up to the next option; *at becomes the last one. */
static int parse_files(int argc, char **argv, int *at, struct fit_command *command,
                       struct fault *fault) {
    const char *name = argv[*at];
    const int first = *at + 1;
    for (; *at + 1 < argc && argv[*at + 1][0] != '-'; ++*at) {
        if (command->text_count == FIT_FILES_MAX)
            return fault_set(fault, ERR_INVALID, name, "at most %d files", FIT_FILES_MAX);
        command->chats[command->text_count] = strcmp(name, "--chats") == 0;
        command->texts[command->text_count++] = argv[*at + 1];
    }
    return *at + 1 > first ? 0 : fault_set(fault, ERR_INVALID, name, "needs a file");
}

/* Returns 1 if the argument belongs to this command, 0 if not. */
static int parse_own(int argc, char **argv, int *at, struct fit_command *command,
                     struct fault *fault) {
    const char *name = argv[*at], *value = argv[*at + 1];
    uint64_t number = 0;
    int rc = 0;
    if (strcmp(name, "--help") == 0) {
        command->help = true;
        return 1;
    }
    if (strcmp(name, "--text") == 0 || strcmp(name, "--chats") == 0) {
        rc = parse_files(argc, argv, at, command, fault);
        return rc ? rc : 1;
    }
    if (strcmp(name, "--out") == 0) {
        command->out = value;
        if (!value) rc = fault_set(fault, ERR_INVALID, name, "needs a file");
    } else if (strcmp(name, "--minutes") == 0) {
        rc = parse_fit_number(name, value, FIT_MINUTES_MAX, &number, fault);
        command->minutes = (int)number;
    } else if (strcmp(name, "--seed") == 0) {
        rc = parse_fit_number(name, value, UINT64_MAX, &command->seed, fault);
    } else {
        return 0;
    }
    ++*at;
    return rc ? rc : 1;
}

int fit_parse(int argc, char **argv, struct fit_command *command, char **rest,
              struct fault *fault) {
    int count = 0, first = 2;
    *command = (struct fit_command){.seed = 1};
    rest[count++] = argv[0];
    if (argc > 2 && argv[2][0] != '-') {
        rest[count++] = "--model";
        rest[count++] = argv[2];
        first = 3;
    }
    for (int i = first; i < argc; i++) {
        int taken = parse_own(argc, argv, &i, command, fault);
        if (taken < 0) return taken;
        if (!taken) rest[count++] = argv[i];
    }
    rest[count] = NULL;
    return 0;
}

/* ---- The text that comes with keepd ---- */

static bool has_file_ending(const char *name, const char *end) {
    const size_t size = strlen(name), tail = strlen(end);
    return size > tail && strcmp(name + size - tail, end) == 0;
}

static int calibration_names(const struct dirent *entry) {
    return has_file_ending(entry->d_name, ".txt") || has_file_ending(entry->d_name, ".jsonl");
}

/* Finds the folder of the calibration texts from the program's own folder, installed or built. A
 * test may name another folder. */
static int scan_calibration(char folder[4096], struct dirent ***names) {
    static const char *const places[] = {"/../share/keepd/calibration",
                                         "/../../../bundled/calibration"};
    const char *given = getenv("KEEPD_TEST_CALIBRATION");
    if (given) {
        snprintf(folder, 4096, "%s", given);
        return scandir(folder, names, calibration_names, alphasort);
    }
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        const ssize_t size = readlink("/proc/self/exe", folder, 4000);
        char *end = size > 0 ? memrchr(folder, '/', (size_t)size) : NULL;
        if (!end) return -1;
        snprintf(end, 96, "%s", places[i]);
        const int count = scandir(folder, names, calibration_names, alphasort);
        if (count >= 0) return count;
    }
    return -1;
}

int fit_use_calibration(struct fit_command *command, struct fault *fault) {
    struct dirent **names = NULL;
    char folder[4096];
    const int count = scan_calibration(folder, &names);
    for (int i = 0; i < count; i++) {
        char *path = NULL;
        if (command->text_count < FIT_FILES_MAX &&
            asprintf(&path, "%s/%s", folder, names[i]->d_name) > 0) {
            command->chats[command->text_count] = has_file_ending(path, ".jsonl");
            command->texts[command->text_count++] = path; /* is in use until the process ends */
        }
        free(names[i]);
    }
    free(names);
    if (command->text_count) return 0;
    return fault_set(fault, ERR_NOTFOUND, "--text",
                     "the text that comes with keepd is not installed: name files with text of the "
                     "kinds that the model will read");
}

/* ---- Progress ---- */

struct fit_progress {
    const struct fit_command *command; /* NULL: progress has no other reader */
    FILE *log;
    bool terminal;
    const char *work; /* the work of the last line; NULL: none has begun */
    int first;        /* parts that were done when `began_ns` was taken */
    int64_t began_ns;
    int tenths; /* log lines that this work has had */
    bool open;  /* a terminal's line, which the next text must not continue */
};

static struct fit_progress fit_progress_to(const struct fit_command *command, FILE *log) {
    return (struct fit_progress){
        .command = command, .log = log, .terminal = isatty(fileno(log)) == 1};
}

/* Shows progress: on a terminal by drawing the line again, in a log with at most eleven lines for
 * each work. The first line comes before the first part is done, so it has no time. */
static void fit_progress_show(struct fit_progress *p, const char *work, int done, int total,
                              double lost) {
    const int64_t now = clock_ns();
    char line[128], left[32] = "", tail[64] = "";
    const bool begins = p->work != work, last = done == total;
    if (begins) {
        p->work = work;
        p->first = done;
        p->began_ns = now;
        p->tenths = 0;
    } else {
        const double each = (double)(now - p->began_ns) * 1e-9 / (done - p->first);
        snprintf(left, sizeof left, ", %.0f s left", each * (total - done));
    }
    snprintf(line, sizeof line, "%s %d of %d%s", work, done, total, left);
    if (isfinite(lost)) snprintf(tail, sizeof tail, ", held-out loss %.4f", lost);
    if (p->terminal) {
        fprintf(p->log, "\r\033[K%s%s%s", line, tail, last ? "\n" : "");
        p->open = !last;
    } else if (begins || last || done * 10 / total > p->tenths) {
        p->tenths = done * 10 / total;
        fprintf(p->log, "%s%s\n", line, tail);
    }
    fflush(p->log);
    if (p->command && p->command->note) p->command->note(p->command->arg, line);
}

static bool fit_progress_note(void *arg, enum engine_fit_work work, int done, int total,
                              double lost) {
    struct fit_progress *p = arg;
    if (work != ENGINE_FIT_WAITING) {
        const char *name = work == ENGINE_FIT_MEASURING ? "measuring" : "fitting";
        fit_progress_show(p, name, done, total, lost);
        return true;
    }
    const char *line = "waiting for another process that fits gates to this model";
    fprintf(p->log, "%s\n", line);
    fflush(p->log);
    if (p->command->note) p->command->note(p->command->arg, line);
    return true;
}

/* ---- The fit ---- */

/* The files of a fit. */
struct fit_files {
    char *texts[FIT_FILES_MAX];
    struct fit_chats chats[FIT_FILES_MAX];
    struct engine_fit_source sources[FIT_FILES_MAX];
    struct fit_form form;
};

static int fit_read_file(const struct fit_command *command, int index, struct fit_files *files,
                         struct fault *fault) {
    struct engine_fit_source *source = &files->sources[index];
    char **text = &files->texts[index];
    struct fit_chats *chats = &files->chats[index];
    size_t size;
    int rc = file_read(command->texts[index], FIT_TEXT_BYTES_MAX, text, &size, fault);
    if (rc) return rc;
    *source = (struct engine_fit_source){.text = *text, .size = size};
    if (!command->chats[index]) return 0;
    rc = fit_read_chats(*text, size, &files->form, chats, fault);
    mem_free(*text);
    *text = NULL;
    *source = (struct engine_fit_source){.text = chats->lines.data,
                                         .size = chats->lines.size,
                                         .chats = true,
                                         .pictures = chats->pictures,
                                         .picture_count = chats->picture_count};
    return rc;
}

static int fit_read_files(const struct fit_command *command, struct fit_files *files,
                          struct fault *fault) {
    for (int i = 0; i < command->text_count; i++) {
        struct fault inner = {0};
        int rc = fit_read_file(command, i, files, &inner);
        if (rc)
            return fault_set(fault, rc, command->chats[i] ? "--chats" : "--text", "%.200s: %.250s",
                             command->texts[i], inner.text);
    }
    return 0;
}

/* Finds out how the model takes chats, if there are any. A template of its own for chats with tools
 * stands for both. */
static int fit_find_form(const struct fit_command *command, const struct engine_options *options,
                         struct fit_form *form, struct fault *fault) {
    struct engine_options own = *options;
    struct engine_found found = {0};
    bool chats = false;
    for (int i = 0; i < command->text_count; i++) chats = chats || command->chats[i];
    if (!chats) return 0;
    own.gates = ""; /* gates that are there do not matter */
    int rc = engine_find_gates(&own, &found, fault);
    if (!rc) form->pictures = found.pictures;
    if (!rc) form->turns = oai_turns_of(found.tool_template);
    mem_free(found.tool_template);
    return rc;
}

/* The steps of a fit for tests, which need gates, not good ones; 0: as many as fits take. The log
 * says so, because nobody should serve such gates. */
static int fit_test_steps(FILE *log, int *steps, struct fault *fault) {
    const char *name = "KEEPD_TEST_FIT_STEPS", *text = getenv(name);
    uint64_t number = 0;
    if (text && *text && parse_fit_number(name, text, 10000, &number, fault)) return ERR_INVALID;
    if (number)
        fprintf(log, "%s: the fit takes at most %d steps: gates for tests\n", name, (int)number);
    *steps = (int)number;
    return 0;
}

static int fit_gates_of_files(const struct fit_command *command,
                              const struct engine_options *options, struct fit_files *files,
                              FILE *log, struct engine_fitted *fitted, struct fault *fault) {
    struct fit_progress progress = fit_progress_to(command, log);
    struct engine_fit fit = {.sources = files->sources,
                             .source_count = command->text_count,
                             .out = command->out,
                             .how = command->how,
                             .work = command->work,
                             .minutes = command->minutes,
                             .seed = command->seed,
                             .progress = fit_progress_note,
                             .arg = &progress};
    int rc = fit_test_steps(log, &fit.steps, fault);
    if (!rc) rc = fit_find_form(command, options, &files->form, fault);
    if (!rc) rc = fit_read_files(command, files, fault);
    if (!rc) rc = engine_fit_gates(options, &fit, fitted, fault);
    if (progress.open) fputc('\n', log); /* The fit ended early. */
    return rc;
}

int fit_run(const struct fit_command *command, const struct engine_options *options, FILE *log,
            struct engine_fitted *fitted, struct fault *fault) {
    struct fit_files *files = mem_must_alloc(1, sizeof *files);
    int rc = fit_gates_of_files(command, options, files, log, fitted, fault);
    for (int i = 0; i < command->text_count; i++) {
        mem_free(files->texts[i]);
        fit_chats_close(&files->chats[i]);
    }
    mem_free(files);
    if (rc || fitted->found) return rc;
    if (fitted->resumed)
        fprintf(log, "%d of the texts were measured by a fit that was interrupted\n",
                fitted->resumed);
    fprintf(log,
            "%d texts, %d entries per head of each; best after step %d of %d: of what entries of "
            "held-out texts are worth, evictions lose %.4f (newest kept: %.4f)\n",
            fitted->texts, fitted->entries, fitted->best, fitted->steps, fitted->lost,
            fitted->before);
    if (fitted->lost >= fitted->before)
        fputs("warning: these gates rank no better than keeping the newest entries does. Give the "
              "fit "
              "more time or more texts (20,000 tokens) before you use them.\n",
              log);
    return 0;
}

/* ---- The table ---- */

static const char *const fit_policies[] = {"global", "snapkv", "streaming"};
static const int fit_parts[] = {2, 4, 8};
enum { FIT_POLICIES = 3, FIT_PARTS = 3 };

/* How much worse than the full cache a policy is, for each text. */
struct fit_cell {
    double nats[FIT_MEASURED_MAX];
    int count;
};

static struct engine_request fit_request(const struct engine_fit_text *text, const char *policy,
                                         int part) {
    const int32_t held = part ? text->count / part : 0, chunk = held / 4;
    return (struct engine_request){
        .prompt = text->ids,
        .prompt_count = text->count,
        .pictures = (const struct picture *const *)text->pictures,
        .picture_count = text->picture_count,
        .picture_rows = text->picture_rows,
        .picture_row_count = text->picture_row_count,
        .top_p = 1,
        .repetition = 1,
        .choices = 1,
        .top_logprobs = -1,
        .prompt_logprobs = true,
        .think_begin = -1,
        .think_end = -1,
        .kv = {.policy = policy,
               .budget = part ? held - chunk : -1,
               .buffer = part ? chunk : -1,
               .chunk = part ? chunk : -1,
               .sinks = -1,
               .recent = -1},
    };
}

/* Returns whether the engine can score a text: it takes its pictures, and the second half has a
 * token that is no row of a picture. */
static bool fit_can_score(const struct engine *engine, const struct engine_fit_text *text) {
    bool scored = false;
    for (int i = text->count / 2; i < text->count; i++)
        scored = scored || !engine_is_picture_id(text->ids[i]);
    return scored && (text->picture_row_count == 0 || engine_info(engine)->pictures);
}

/* Computes the nats per token of the second half of a text that the engine can score. */
static int fit_score(struct bench *bench, struct engine *engine, const struct engine_fit_text *text,
                     const char *policy, int part, double *nats, struct fault *fault) {
    struct engine_job *job = mem_must_alloc(1, sizeof *job);
    job->request = fit_request(text, policy, part);
    int rc = bench_run_jobs(bench, engine, job, 1, fault);
    double sum = 0;
    int count = 0;
    for (int i = text->count / 2; i < text->count && !rc; i++) {
        if (engine_is_picture_id(text->ids[i])) continue;
        sum -= (double)job->prompt_tokens[i].logprob;
        count++;
    }
    *nats = sum / count;
    engine_job_close(job);
    mem_free(job);
    return rc;
}

static double cell_mean(const struct fit_cell *cell) {
    double sum = 0;
    for (int i = 0; i < cell->count; i++) sum += cell->nats[i];
    return sum / cell->count;
}

/* Returns the standard error of the mean; NAN for one text. */
static double cell_error(const struct fit_cell *cell) {
    double mean = cell_mean(cell), sum = 0;
    for (int i = 0; i < cell->count; i++) sum += (cell->nats[i] - mean) * (cell->nats[i] - mean);
    return sqrt(sum / (cell->count - 1) / cell->count);
}

static void print_table(FILE *out, struct fit_cell cells[FIT_POLICIES][FIT_PARTS]) {
    fprintf(out,
            "\nNats per token over the full cache, second half of %d texts that were held out:\n\n"
            "| part of the tokens, newest included |",
            cells[0][0].count);
    for (int i = 0; i < FIT_PARTS; i++) fprintf(out, " 1/%d |", fit_parts[i]);
    fprintf(out, "\n|---|--:|--:|--:|\n");
    for (int p = 0; p < FIT_POLICIES; p++) {
        fprintf(out, "| `%s` |", fit_policies[p]);
        for (int i = 0; i < FIT_PARTS; i++) {
            fprintf(out, " %.3f", cell_mean(&cells[p][i]));
            if (cells[p][i].count > 1) fprintf(out, " ± %.3f", cell_error(&cells[p][i]));
            fputs(" |", out);
        }
        fputc('\n', out);
    }
}

/* Prints the smallest part of the tokens at which `global` loses no more than `most`. */
static void print_advice(FILE *out, const struct fit_cell global[FIT_PARTS], double most) {
    int part = 1;
    for (int i = 0; i < FIT_PARTS && cell_mean(&global[i]) <= most; i++) part = fit_parts[i];
    if (part == 1)
        fprintf(out, "For at most %.2f nats per token: more than half of the tokens\n", most);
    else
        fprintf(out, "For at most %.2f nats per token: --kv-budget of 1/%d of the tokens\n", most,
                part);
}

/* Compares the policies on a text, whose number among those that are compared is `t`. */
static int fit_compare(struct bench *bench, struct engine *engine,
                       const struct engine_fit_text *text, int t, int count,
                       struct fit_cell cells[FIT_POLICIES][FIT_PARTS],
                       struct fit_progress *progress, struct fault *fault) {
    const int each = FIT_POLICIES * FIT_PARTS;
    double full = 0;
    fit_progress_show(progress, "comparing", t * each, count * each, NAN);
    int rc = fit_score(bench, engine, text, "full", 0, &full, fault);
    for (int i = 0; i < each && !rc; i++) {
        struct fit_cell *cell = &cells[i / FIT_PARTS][i % FIT_PARTS];
        rc = fit_score(bench, engine, text, fit_policies[i / FIT_PARTS], fit_parts[i % FIT_PARTS],
                       &cell->nats[t], fault);
        cell->nats[t] -= full;
        cell->count = t + 1;
        if (!rc) fit_progress_show(progress, "comparing", t * each + i + 1, count * each, NAN);
    }
    return rc;
}

int fit_measure(struct bench *bench, struct engine *engine, const struct engine_fitted *fitted,
                FILE *log, FILE *out, struct fault *fault) {
    const struct engine_fit_text *texts[FIT_MEASURED_MAX];
    struct fit_cell cells[FIT_POLICIES][FIT_PARTS] = {0};
    struct fit_progress progress = fit_progress_to(NULL, log);
    int count = 0, rc = 0;
    for (int i = 0; i < fitted->held_out_count && count < FIT_MEASURED_MAX; i++)
        if (fit_can_score(engine, &fitted->held_out[i])) texts[count++] = &fitted->held_out[i];
    if (!count) {
        fputs("There is no table: the second halves of the texts that were held out are pictures, "
              "or this engine takes none.\n",
              log);
        return 0;
    }
    for (int t = 0; t < count && !rc; t++)
        rc = fit_compare(bench, engine, texts[t], t, count, cells, &progress, fault);
    if (rc) return rc;
    print_table(out, cells);
    fputc('\n', out);
    print_advice(out, cells[0], 0.02);
    print_advice(out, cells[0], 0.05);
    if (fflush(out) != 0 || ferror(out))
        return fault_set(fault, ERR_IO, NULL, "the table cannot be written");
    return 0;
}
