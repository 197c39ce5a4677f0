/* golden_logits: replays given tokens through a model and prints log-probabilities as JSON.
 *
 *   golden_logits --model DIR --tokens 1,2,3 [options]
 *
 * --tokens   ids separated by commas, or @FILE with such a list
 * --prompt   how many of them are the prompt (default all); the rest are appended one by one, as
 *            if they had been generated
 * --splits   step sizes of the prompt, e.g. 7,1,40; the last one repeats
 * --greedy   continue with this many most likely tokens
 * --rows     "next" (log-probability of the token that follows) or "all" (every token's)
 * --exact    yes: CPU_F32 (cpu_options.activations)
 * --quantization q8, q4: as in model_options
 * --random-weights yes: only config.json is read, for timing
 * --policy, --budget, --buffer, --chunk, --sinks, --recent, --horizon: as in requests; evictions
 *            happen where paging/due.h says, and each one is reported before and after
 * --entries  yes: with the keys and values that are left
 * --given    file with the float32 rows of the tokens that are ids of pictures (engine_picture_id),
 *            each with --deep further vectors (struct kern_given)
 *
 * With this, a reference in another language can check logits, log_beta and every selection. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "engine/steps/grid.h"
#include "model/weights.h"
#include "paging/due.h"
#include "tests/golden/replay.h"

#define TOKENS_MAX 1000000
#define GREEDY_MAX 4096
#define SPLITS_MAX 64
#define OUTPUT_MAX ((size_t)1 << 30)

struct args {
    struct replay_options replay;
    struct kv_params kv;
    int32_t *tokens;
    int count, prompt, greedy;
    int splits[SPLITS_MAX];
    int split_count;
    bool all_rows, entries;
    char *given; /* floats; NULL: none */
    size_t given_bytes;
    int deep;
};

struct run {
    const struct args *args;
    struct replay replay;
    struct due_state due;
    struct buf *out;
    struct buf evictions; /* JSON objects, comma separated */
    float *logits;        /* [rows_max, vocab] */
    const float *last;    /* the newest row in it */
    struct grid_cursor grid;
    struct kern_given *given;  /* [rows_max] of the step */
    struct kern_place *places; /* [rows_max] */
    int32_t *ids;              /* [rows_max] tokens, zeros for given rows */
    size_t given_rows;         /* so far */
    int printed;               /* log-probability rows so far */
};

/* ---- Arguments ---- */

static int parse_list(const char *text, int32_t *out, int max) {
    int count = 0;
    while (*text && count < max) {
        char *end;
        long value = strtol(text, &end, 10);
        if (end == text) { /* separators and brackets */
            text++;
            continue;
        }
        out[count++] = (int32_t)value;
        text = end;
    }
    return count;
}

static int read_tokens(struct args *args, const char *text) {
    char *data = NULL;
    size_t size = 0;
    struct fault fault = {0};
    if (*text == '@' && file_read(text + 1, (size_t)64 << 20, &data, &size, &fault)) {
        fprintf(stderr, "%s: %s\n", fault.field, fault.text);
        return ERR_IO;
    }
    mem_free(args->tokens);
    args->tokens = mem_must_alloc(TOKENS_MAX + GREEDY_MAX, sizeof *args->tokens);
    args->count = parse_list(data ? data : text, args->tokens, TOKENS_MAX);
    mem_free(data);
    return args->count > 0 ? 0 : ERR_INVALID;
}

static int read_given(struct args *args, const char *path) {
    struct fault fault = {0};
    int rc = file_read(path, (size_t)64 << 20, &args->given, &args->given_bytes, &fault);
    if (rc) fprintf(stderr, "%s: %s\n", fault.field, fault.text);
    return rc;
}

static int read_policy(struct args *args, const char *name) {
    const struct policy *policy = policy_find(name);
    if (!policy) return ERR_INVALID;
    kv_params_set_policy(&args->kv, policy);
    return 0;
}

static int read_number(struct args *args, const char *name, const char *value) {
    const struct {
        const char *name;
        int *out;
    } numbers[] = {
        {"--prompt", &args->prompt},
        {"--greedy", &args->greedy},
        {"--threads", &args->replay.threads},
        {"--budget", &args->kv.budget},
        {"--buffer", &args->kv.buffer},
        {"--chunk", &args->kv.chunk},
        {"--sinks", &args->kv.rule.sinks},
        {"--recent", &args->kv.rule.recent},
        {"--deep", &args->deep},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        if (strcmp(name, numbers[i].name) != 0) continue;
        *numbers[i].out = atoi(value);
        return 0;
    }
    return ERR_INVALID;
}

static int read_option(struct args *args, const char *name, const char *value) {
    if (!strcmp(name, "--model"))
        args->replay.dir = value;
    else if (!strcmp(name, "--gates"))
        args->replay.gates = value;
    else if (!strcmp(name, "--path"))
        args->replay.path = value;
    else if (!strcmp(name, "--kv-dtype"))
        return replay_kv_dtype(value, &args->replay.kv_dtype, NULL);
    else if (!strcmp(name, "--exact"))
        args->replay.exact = !strcmp(value, "yes");
    else if (!strcmp(name, "--quantization"))
        args->replay.quantization = !strcmp(value, "q8")   ? QUANTIZE_Q8
                                    : !strcmp(value, "q4") ? QUANTIZE_Q4
                                                           : QUANTIZE_NONE;
    else if (!strcmp(name, "--random-weights"))
        args->replay.random_weights = !strcmp(value, "yes");
    else if (!strcmp(name, "--horizon"))
        args->kv.rule.horizon = strtof(value, NULL);
    else if (!strcmp(name, "--rows"))
        args->all_rows = !strcmp(value, "all");
    else if (!strcmp(name, "--entries"))
        args->entries = !strcmp(value, "yes");
    else if (!strcmp(name, "--tokens"))
        return read_tokens(args, value);
    else if (!strcmp(name, "--given"))
        return read_given(args, value);
    else if (!strcmp(name, "--policy"))
        return read_policy(args, value);
    else if (!strcmp(name, "--splits"))
        args->split_count = parse_list(value, args->splits, SPLITS_MAX);
    else
        return read_number(args, name, value);
    return 0;
}

static int read_args(int argc, char **argv, struct args *args) {
    *args = (struct args){.prompt = -1, .splits = {512}, .split_count = 1};
    args->replay = (struct replay_options){.path = "reference", .threads = 1, .slots = 1};
    args->kv = (struct kv_params){.budget = 1024, .buffer = 128, .chunk = 512};
    int rc = read_policy(args, "full");
    for (int i = 1; i < argc && !rc; i += 2) {
        rc = i + 1 < argc ? read_option(args, argv[i], argv[i + 1]) : ERR_INVALID;
        if (rc) fprintf(stderr, "bad option or value: %s\n", argv[i]);
    }
    if (rc) return rc;
    if (!args->replay.dir || !args->count || !args->split_count || args->greedy < 0 ||
        args->greedy > GREEDY_MAX) {
        fprintf(stderr, "needs --model and --tokens\n");
        return ERR_INVALID;
    }
    if (args->prompt < 1 || args->prompt > args->count) args->prompt = args->count;
    for (int i = 0; i < args->split_count; i++) {
        if (args->splits[i] < 1) return ERR_INVALID;
        if (args->splits[i] > args->replay.rows_max) args->replay.rows_max = args->splits[i];
    }
    if (args->replay.rows_max > args->count) args->replay.rows_max = args->count;
    args->replay.positions_max = args->count + args->greedy + 1;
    return 0;
}

/* ---- Output ---- */

static void write_ints(struct buf *out, const char *name, const int32_t *values, size_t count) {
    buf_fmt(out, "\"%s\":[", name);
    for (size_t i = 0; i < count; i++) buf_fmt(out, i ? ",%d" : "%d", values[i]);
    buf_str(out, "]");
}

static void write_floats(struct buf *out, const float *values, size_t count) {
    buf_str(out, "[");
    for (size_t i = 0; i < count; i++) buf_fmt(out, i ? ",%.9g" : "%.9g", (double)values[i]);
    buf_str(out, "]");
}

static void write_entries(struct run *run, struct buf *out, size_t count) {
    size_t floats = count * (size_t)model_config(run->replay.model)->head_dim;
    float *rows = mem_must_alloc(floats + 1, sizeof *rows);
    for (int values = 0; values < 2; values++) {
        replay_entries(run->replay.kern, 0, values, rows);
        buf_str(out, values ? ",\"values\":" : ",\"keys\":");
        write_floats(out, rows, floats);
    }
    mem_free(rows);
}

static void write_members(struct run *run, struct buf *out) {
    struct replay_members members;
    replay_members_open(run->replay.kern, 0, &members);
    buf_str(out, ",\"members\":{");
    write_ints(out, "lengths", members.lengths, members.streams);
    buf_str(out, ",");
    write_ints(out, "centre", members.centre, members.count);
    buf_str(out, ",");
    write_ints(out, "pos", members.pos, members.count);
    buf_str(out, ",\"gain\":");
    write_floats(out, members.gain, members.count);
    buf_str(out, "}");
    replay_members_close(&members);
}

/* {"lengths": ..., "positions": ..., "log_beta": ...} of slot 0, on demand with what it holds. */
static int write_state(struct run *run, struct buf *out, bool entries) {
    size_t streams = (size_t)run->replay.streams;
    size_t room = streams * (size_t)run->args->replay.positions_max;
    struct kern_report report = {.lengths = mem_must_alloc(streams, sizeof(int32_t)),
                                 .positions = mem_must_alloc(room, sizeof(int32_t)),
                                 .log_beta = mem_must_alloc(room, sizeof(float)),
                                 .entries_max = room};
    int rc = run->replay.kern->ops->report(run->replay.kern, 0, &report);
    if (!rc) {
        buf_str(out, "{");
        write_ints(out, "lengths", report.lengths, streams);
        buf_str(out, ",");
        write_ints(out, "positions", report.positions, report.entries);
        buf_str(out, ",\"log_beta\":");
        write_floats(out, report.log_beta, report.entries);
        if (entries) write_entries(run, out, report.entries);
        if (entries) write_members(run, out);
        buf_str(out, "}");
    }
    mem_free(report.lengths);
    mem_free(report.positions);
    mem_free(report.log_beta);
    return rc;
}

static void write_row(struct run *run, const float *logits, int32_t next) {
    int vocab = run->replay.vocab;
    double zero = replay_logprob(logits, vocab, 0) - logits[0];
    buf_str(run->out, run->printed++ ? "," : "");
    if (!run->args->all_rows) {
        buf_fmt(run->out, "%.9g", logits[next] + zero);
        return;
    }
    for (int i = 0; i < vocab; i++) buf_fmt(run->out, i ? ",%.7g" : "[%.7g", logits[i] + zero);
    buf_str(run->out, "]");
}

/* ---- The run ---- */

static int evict(struct run *run) {
    const struct kv_params *kv = &run->args->kv;
    const struct kern_evict due = {
        .slot = 0,
        .tokens = run->due.tokens,
        .budget = due_budget(kv, &run->due),
        .rule = &kv->rule,
    };
    buf_fmt(&run->evictions, "%s{\"tokens\":%d,\"before\":", run->evictions.size ? "," : "",
            run->due.tokens);
    int rc = write_state(run, &run->evictions, false);
    if (!rc) rc = run->replay.kern->ops->evict(run->replay.kern, &due, 1);
    buf_str(&run->evictions, ",\"after\":");
    if (!rc) rc = write_state(run, &run->evictions, run->args->entries);
    buf_str(&run->evictions, "}");
    due_evicted(kv, &run->due);
    return rc;
}

/* Fills in the rows that are given, and the places of all rows where they have three dimensions. */
static int show_pictures(struct run *run, struct replay_part *part, struct replay_pictures *out) {
    const struct args *args = run->args;
    const size_t width = (size_t)model_config(run->replay.model)->d_model,
                 each = width * (1 + (size_t)args->deep);
    for (int i = 0; i < part->count; i++) {
        run->ids[i] = part->tokens[i];
        if (!engine_is_picture_id(part->tokens[i])) continue;
        if ((run->given_rows + 1) * each * sizeof(float) > args->given_bytes) return ERR_INVALID;
        run->ids[i] = 0;
        run->given[out->given_count++] = (struct kern_given){
            .row = i,
            .count = 1,
            .deep = args->deep,
            .rows = (const float *)(const void *)args->given + run->given_rows++ * each};
    }
    out->given = run->given;
    if (model_config(run->replay.model)->axes) {
        grid_seek(&run->grid, args->tokens, part->pos);
        out->behind = run->grid.behind;
        if (grid_places(run->grid, args->tokens, part->pos, part->count, run->places))
            out->places = run->places;
    }
    part->tokens = run->ids;
    return 0;
}

/* Appends `count` given tokens from index `at` and prints what each predicted. */
static int append(struct run *run, int at, int count) {
    const struct args *args = run->args;
    const size_t vocab = (size_t)run->replay.vocab;
    struct replay_part part = {
        .pos = at, .count = count, .tokens = args->tokens + at, .rule = &args->kv.rule};
    struct replay_pictures pictures = {0};
    int rc = show_pictures(run, &part, &pictures);
    if (!rc) rc = replay_step_pictures(&run->replay, &part, &pictures, run->logits);
    if (rc) return rc;
    due_append(&run->due, count);
    for (int i = 0; i < count; i++) {
        bool has_next = at + i + 1 < args->count;
        if (at + i < args->count && (has_next || args->all_rows))
            write_row(run, run->logits + (size_t)i * vocab,
                      has_next && args->tokens[at + i + 1] < run->replay.vocab
                          ? args->tokens[at + i + 1]
                          : 0);
    }
    run->last = run->logits + (size_t)(count - 1) * vocab;
    return 0;
}

static int run_prompt(struct run *run) {
    const struct args *args = run->args;
    int rc = 0;
    run->due.prompt_new = args->prompt;
    for (int at = 0, i = 0; at < args->prompt && !rc; i++) {
        int size = args->splits[i < args->split_count ? i : args->split_count - 1];
        int room = due_prompt_limit(&args->kv, &run->due);
        if (size > room) size = room;
        rc = append(run, at, size);
        at += size;
        if (!rc && due_after_append(&args->kv, &run->due)) rc = evict(run);
    }
    return rc;
}

static int run_generated(struct run *run, int at) {
    int rc = due_before_generate(&run->args->kv, &run->due) ? evict(run) : 0;
    return rc ? rc : append(run, at, 1);
}

/* The last row's most likely token, appended like a generated one; its logprob and its lead over
 * the runner-up are printed, so that a reader knows near ties. */
static int run_greedy(struct run *run, struct buf *tokens, struct buf *logprobs,
                      struct buf *margins) {
    const struct args *args = run->args;
    const int vocab = run->replay.vocab;
    int rc = 0;
    for (int i = 0; i < args->greedy && !rc; i++) {
        int32_t best = replay_argmax(run->last, vocab);
        float second = -INFINITY;
        for (int t = 0; t < vocab; t++) {
            if (t != best) second = fmaxf(second, run->last[t]);
        }
        buf_fmt(tokens, i ? ",%d" : "%d", best);
        buf_fmt(logprobs, i ? ",%.9g" : "%.9g", replay_logprob(run->last, vocab, best));
        buf_fmt(margins, i ? ",%.9g" : "%.9g", (double)(run->last[best] - second));
        args->tokens[args->count + i] = best;
        if (i + 1 < args->greedy) rc = run_generated(run, args->count + i);
    }
    return rc;
}

static int run_all(struct run *run) {
    const struct args *args = run->args;
    struct buf parts[3];
    static const char *const names[] = {"greedy", "greedy_logprobs", "greedy_margins"};
    for (int i = 0; i < 3; i++) buf_open(&parts[i], OUTPUT_MAX);
    buf_fmt(run->out, "{\"family\":\"%s\",\"backend\":\"%s\",\"layers\":%d,\"heads_kv\":%d,",
            model_config(run->replay.model)->family, run->replay.kern->ops->name,
            run->replay.layers, run->replay.heads_kv);
    buf_str(run->out, "\"logprobs\":[");
    int rc = run_prompt(run);
    for (int at = args->prompt; at < args->count && !rc; at++) rc = run_generated(run, at);
    if (!rc) rc = run_greedy(run, &parts[0], &parts[1], &parts[2]);
    buf_str(run->out, "]");
    for (int i = 0; i < 3; i++) {
        buf_fmt(run->out, ",\"%s\":[%s]", names[i], parts[i].size ? parts[i].data : "");
        buf_close(&parts[i]);
    }
    buf_fmt(run->out, ",\"evictions\":[");
    buf_add(run->out, run->evictions.data, run->evictions.size);
    buf_str(run->out, "],\"final\":");
    if (!rc) rc = write_state(run, run->out, false);
    buf_str(run->out, "}\n");
    return rc || run->out->failed || run->evictions.failed ? ERR_LIMIT : 0;
}

static int run_open(struct run *run, const struct args *args, struct buf *out,
                    struct fault *fault) {
    *run = (struct run){.args = args, .out = out};
    buf_open(&run->evictions, OUTPUT_MAX);
    int rc = kv_params_check(&args->kv, fault);
    if (!rc) rc = replay_open(&args->replay, &run->replay, fault);
    if (rc) return rc;
    for (int i = 0; i < args->count; i++) {
        if (args->given && engine_is_picture_id(args->tokens[i])) continue;
        if (args->tokens[i] < 0 || args->tokens[i] >= run->replay.vocab)
            return fault_set(fault, ERR_INVALID, "--tokens", "%d is not in the vocabulary",
                             args->tokens[i]);
    }
    run->logits = mem_must_alloc((size_t)args->replay.rows_max * (size_t)run->replay.vocab,
                                 sizeof *run->logits);
    const size_t rows = (size_t)args->replay.rows_max;
    run->given = mem_must_alloc(rows, sizeof *run->given);
    run->places = mem_must_alloc(rows, sizeof *run->places);
    run->ids = mem_must_alloc(rows, sizeof *run->ids);
    return 0;
}

int main(int argc, char **argv) {
    struct args args;
    struct run run = {0};
    struct buf out;
    struct fault fault = {0};
    buf_open(&out, OUTPUT_MAX);
    int rc = read_args(argc, argv, &args);
    if (!rc) rc = run_open(&run, &args, &out, &fault);
    if (!rc) rc = run_all(&run);
    if (fault.code)
        fprintf(stderr, "%s: %s\n", fault.field, fault.text);
    else if (rc)
        fprintf(stderr, "%s\n", err_text(rc));
    if (!rc && fwrite(out.data, 1, out.size, stdout) != out.size) rc = ERR_IO;
    mem_free(run.logits);
    mem_free(run.given);
    mem_free(run.places);
    mem_free(run.ids);
    mem_free(args.tokens);
    mem_free(args.given);
    buf_close(&run.evictions);
    buf_close(&out);
    replay_close(&run.replay);
    return rc ? 1 : 0;
}
