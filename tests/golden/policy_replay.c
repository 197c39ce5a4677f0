/* policy_replay: drives the cache of the CPU backend with given queries, keys and values, and
 * writes down what every policy keeps and merges.
 *
 *   policy_replay --list           the table of policies as JSON
 *   policy_replay --has-path NAME  exits with 0 when this processor has that path, and prints how
 *                                  its attention rounds, or nothing
 *   policy_replay INPUT OUTPUT     both safetensors
 *
 * INPUT holds, for sequence s, "s.qkv" [layers, tokens, (heads_q + 2 heads_kv) D], after rotation,
 * and "s.log_beta" [layers, tokens, heads_kv], both F32; its metadata "keepd" is
 *
 *   {"path", "threads", "kv_dtype", "layers", "heads_q", "heads_kv", "head_dim", "inv_freq",
 * "sliding_windows", "sequences": [{"prompt", "splits", "kv": {"policy", "budget", ...}}, ...]}
 *
 * Sequence s lives in slot s; all run side by side, a step taking from each the next part of its
 * prompt (sizes from "splits", the last one repeated, never across an eviction point of
 * paging/due.h) or one generated token.
 *
 * "inv_freq" is what keys were rotated by, [head_dim / 2], or empty if by nothing;
 * "sliding_windows" those of each layer's attention (0: none), or empty if none has one.
 *
 * OUTPUT holds "s.out" [layers, tokens, heads_q D], the attention's results, and for eviction e, in
 * the order they happened, what it left: "e.lengths" [layers, heads_kv], "e.pos" [entries],
 * "e.keys" and "e.values" [entries, D], and the members of their classes, "e.member_lengths"
 * [layers, heads_kv], "e.member_centre", "e.member_pos" and "e.member_gain" [members], streams one
 * after the other. Its metadata "keepd" lists the evictions: {"evictions": [{"sequence", "tokens"},
 * ...]}. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/json.h"
#include "base/mem.h"
#include "kernels/cpu/internal.h"
#include "model/weights.h"
#include "paging/due.h"
#include "tests/golden/replay.h"

#define SEQUENCES_MAX 64
#define SPLITS_MAX    16
#define OUTPUT_MAX    ((size_t)2 << 30)

struct sequence {
    struct kv_params kv;
    struct due_state due;
    const float *qkv, *log_beta; /* the input's */
    float *out;                  /* [layers][count][heads_q * D] */
    int count, prompt;
    int splits[SPLITS_MAX];
    int split_count, split_at;
};

struct run {
    struct kern *kern;
    struct weights *input;
    cJSON *config;
    struct kern_cache_options cache;
    float *inv_freq;
    const float **rotations; /* [layers] inv_freq */
    int *sliding_windows;    /* [layers], or NULL */
    struct sequence sequences[SEQUENCES_MAX];
    int sequence_count;
    int qkv_width, out_width, rows_max;
    float *qkv, *log_beta, *out; /* the backend's, one layer of one step */
    float *host;                 /* [rows_max][qkv_width] */

    struct buf data, header, evictions; /* parts of the output */
    int eviction_count;
};

/* ---- Output ---- */

/* One tensor; `shape` as JSON without brackets. */
static void put(struct run *run, const char *name, const char *dtype, const char *shape,
                const void *data, size_t bytes) {
    size_t at = run->data.size;
    buf_add(&run->data, data, bytes);
    buf_fmt(&run->header, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}",
            name, dtype, shape, at, run->data.size);
}

static void put_floats(struct run *run, const char *name, const float *data, size_t rows,
                       size_t width) {
    char shape[64];
    snprintf(shape, sizeof shape, "%zu,%zu", rows, width);
    put(run, name, "F32", shape, data, rows * width * sizeof *data);
}

/* [count] of a type of four bytes. */
static void put_list(struct run *run, const char *name, const char *dtype, const void *data,
                     size_t count) {
    char shape[32];
    snprintf(shape, sizeof shape, "%zu", count);
    put(run, name, dtype, shape, data, count * 4);
}

static void put_ints(struct run *run, const char *name, const int32_t *data, size_t count) {
    put_list(run, name, "I32", data, count);
}

static void put_rows(struct run *run, int slot, const char *what, size_t entries) {
    char name[32];
    size_t width = (size_t)run->cache.head_dim;
    float *rows = mem_must_alloc(entries * width, sizeof *rows);
    replay_entries(run->kern, slot, !strcmp(what, "values"), rows);
    snprintf(name, sizeof name, "%d.%s", run->eviction_count, what);
    put_floats(run, name, rows, entries, width);
    mem_free(rows);
}

static void put_members(struct run *run, int slot) {
    struct replay_members members;
    char name[4][32];
    static const char *const what[] = {"lengths", "centre", "pos", "gain"};
    replay_members_open(run->kern, slot, &members);
    for (int i = 0; i < 4; i++)
        snprintf(name[i], sizeof name[i], "%d.member_%s", run->eviction_count, what[i]);
    put_ints(run, name[0], members.lengths, members.streams);
    put_ints(run, name[1], members.centre, members.count);
    put_ints(run, name[2], members.pos, members.count);
    put_list(run, name[3], "F32", members.gain, members.count);
    replay_members_close(&members);
}

/* Writes the sequence's content after an eviction. */
static int put_state(struct run *run, int slot) {
    size_t streams = (size_t)run->cache.layers * (size_t)run->cache.heads_kv;
    size_t room = streams * (size_t)run->cache.max_positions;
    struct kern_report report = {.lengths = mem_must_alloc(streams, sizeof(int32_t)),
                                 .positions = mem_must_alloc(room, sizeof(int32_t)),
                                 .entries_max = room};
    int rc = run->kern->ops->report(run->kern, slot, &report);
    if (!rc) {
        char name[32];
        snprintf(name, sizeof name, "%d.lengths", run->eviction_count);
        put_ints(run, name, report.lengths, streams);
        snprintf(name, sizeof name, "%d.pos", run->eviction_count);
        put_ints(run, name, report.positions, report.entries);
        put_rows(run, slot, "keys", report.entries);
        put_rows(run, slot, "values", report.entries);
        put_members(run, slot);
        buf_fmt(&run->evictions, "%s{\\\"sequence\\\":%d,\\\"tokens\\\":%d}",
                run->eviction_count ? "," : "", slot, run->sequences[slot].due.tokens);
        run->eviction_count++;
    }
    mem_free(report.lengths);
    mem_free(report.positions);
    return rc;
}

static void put_results(struct run *run) {
    for (int i = 0; i < run->sequence_count; i++) {
        char name[32];
        snprintf(name, sizeof name, "%d.out", i);
        put_floats(run, name, run->sequences[i].out,
                   (size_t)run->cache.layers * (size_t)run->sequences[i].count,
                   (size_t)run->out_width);
    }
}

static int write_output(struct run *run, const char *path) {
    put_results(run);
    struct buf text;
    buf_open(&text, OUTPUT_MAX);
    buf_str(&text, "{\"__metadata__\":{\"keepd\":\"{\\\"evictions\\\":[");
    buf_add(&text, run->evictions.data, run->evictions.size);
    buf_str(&text, "]}\"}");
    buf_add(&text, run->header.data, run->header.size);
    buf_str(&text, "}");
    bool failed = text.failed || run->data.failed || run->header.failed || run->evictions.failed;
    uint64_t size = text.size;
    FILE *file = failed ? NULL : fopen(path, "wb");
    bool written = file && fwrite(&size, sizeof size, 1, file) == 1 &&
                   fwrite(text.data, 1, text.size, file) == text.size &&
                   fwrite(run->data.data, 1, run->data.size, file) == run->data.size;
    if (file && fclose(file) != 0) written = false;
    buf_close(&text);
    return written ? 0 : ERR_IO;
}

/* ---- Rules ---- */
/* Every parameter of struct kern_rule by name: printed by --list, and set by "rule" in the input.
 */

enum kind { KIND_INT, KIND_FLOAT, KIND_BOOL, KIND_ENUM };

#define NAMES_MAX 8

struct field {
    const char *name;
    size_t offset;
    enum kind kind;
    const char *const *names; /* names of an enum's values, in order, then NULL */
};

#define FIELD_NAMES(...) ((const char *const[]){__VA_ARGS__, NULL})
#define FIELD(kind, member, ...)                                                                   \
    { #member, offsetof(struct kern_rule, member), kind, FIELD_NAMES(__VA_ARGS__) }

static const char *const score_names[] = {
#define X(name, text) text,
    KERN_SCORE_MAP(X)
#undef X
        NULL};

static const struct field fields[] = {
    {"score", offsetof(struct kern_rule, score), KIND_ENUM, score_names},
    FIELD(KIND_ENUM, scope, "stream", "layer", "sequence"),
    FIELD(KIND_ENUM, layers, "uniform", "pyramid", "preference", "density"),
    FIELD(KIND_ENUM, merge, "none", "paper", "code", "classes"),
    FIELD(KIND_INT, sinks, NULL),
    FIELD(KIND_INT, recent, NULL),
    FIELD(KIND_FLOAT, horizon, NULL),
    FIELD(KIND_BOOL, published, NULL),
    FIELD(KIND_FLOAT, retain, NULL),
    FIELD(KIND_FLOAT, floor, NULL),
    FIELD(KIND_FLOAT, merge_beta, NULL),
    FIELD(KIND_FLOAT, classes.gamma, NULL),
    FIELD(KIND_FLOAT, classes.tau, NULL),
    FIELD(KIND_BOOL, classes.positions, NULL),
    FIELD(KIND_FLOAT, pyramid_beta, NULL),
    FIELD(KIND_FLOAT, tau1, NULL),
    FIELD(KIND_FLOAT, tau2, NULL),
    FIELD(KIND_INT, observe.window, NULL),
    FIELD(KIND_ENUM, observe.support, "all", "candidates"),
    FIELD(KIND_ENUM, observe.group, "mean", "max", "sum", "squares", "max_logit", "sum_logit",
          "each"),
    FIELD(KIND_ENUM, observe.reduce, "mean", "sum", "max", "mean_var", "mean_std"),
    FIELD(KIND_FLOAT, observe.gamma, NULL),
    FIELD(KIND_BOOL, observe.normalise, NULL),
    FIELD(KIND_ENUM, observe.history, "none", "max", "mean", "sum"),
    FIELD(KIND_FLOAT, observe.decay, NULL),
    FIELD(KIND_ENUM, observe.smooth, "none", "average", "max"),
    FIELD(KIND_INT, observe.smooth_width, NULL),
    FIELD(KIND_BOOL, observe.smooth_first, NULL),
    FIELD(KIND_INT, observe.expect, NULL),
    FIELD(KIND_BOOL, observe.global, NULL),
    FIELD(KIND_BOOL, redundancy.on, NULL),
    FIELD(KIND_ENUM, redundancy.measure, "likeness", "length", "lag"),
    FIELD(KIND_INT, redundancy.lag, NULL),
    FIELD(KIND_FLOAT, redundancy.lambda, NULL),
    FIELD(KIND_FLOAT, redundancy.threshold, NULL),
    FIELD(KIND_FLOAT, redundancy.eps, NULL),
    FIELD(KIND_BOOL, redundancy.normalise, NULL),
    FIELD(KIND_BOOL, redundancy.candidates_only, NULL),
    FIELD(KIND_BOOL, redundancy.own, NULL),
    FIELD(KIND_BOOL, redundancy.index_zero, NULL),
};

#define FIELD_COUNT (sizeof fields / sizeof *fields)

static void print_field(const struct field *field, const struct kern_rule *rule) {
    const char *at = (const char *)rule + field->offset;
    printf("\"%s\":", field->name);
    if (field->kind == KIND_FLOAT && isinf(*(const float *)at))
        printf("null");
    else if (field->kind == KIND_FLOAT)
        printf("%.9g", (double)*(const float *)at);
    else if (field->kind == KIND_INT)
        printf("%" PRId32, *(const int32_t *)at);
    else if (field->kind == KIND_BOOL)
        printf(*(const bool *)at ? "true" : "false");
    else
        printf("\"%s\"", field->names[*(const unsigned *)at]);
}

static void print_policies(void) {
    printf("[");
    for (int i = 0; policy_at(i); i++) {
        const struct policy *policy = policy_at(i);
        printf("%s{\"name\":\"%s\",\"bounded\":%s,\"rule\":{", i ? "," : "", policy->name,
               policy->bounded ? "true" : "false");
        for (size_t f = 0; f < FIELD_COUNT; f++) {
            if (f) printf(",");
            print_field(&fields[f], &policy->rule);
        }
        printf("}}");
    }
    printf("]\n");
}

static int read_enum(const struct field *field, const cJSON *rule, unsigned *value,
                     struct fault *fault) {
    const char *name = field->names[*value];
    int rc = json_str(rule, "rule", field->name, &name, fault);
    for (unsigned i = 0; !rc && field->names[i]; i++) {
        if (strcmp(field->names[i], name) != 0) continue;
        *value = i;
        return 0;
    }
    return rc ? rc : fault_set(fault, ERR_INVALID, field->name, "no such value: %s", name);
}

static int read_field(const struct field *field, const cJSON *json, struct kern_rule *rule,
                      struct fault *fault) {
    char *at = (char *)rule + field->offset;
    if (field->kind == KIND_BOOL) return json_bool(json, "rule", field->name, (bool *)at, fault);
    if (field->kind == KIND_ENUM) return read_enum(field, json, (unsigned *)at, fault);
    double value = field->kind == KIND_INT ? (double)*(int32_t *)at : (double)*(float *)at;
    int rc = json_num(json, "rule", field->name, -1e30, 1e30, &value, fault);
    if (rc) return rc;
    if (field->kind == KIND_INT)
        *(int32_t *)at = (int32_t)value;
    else /* JSON knows no infinity: 0 stands for it where nothing smaller than 1 makes sense */
        *(float *)at = value == 0 && !strcmp(field->name, "horizon") ? INFINITY : (float)value;
    return 0;
}

static int read_kv(const cJSON *json, struct kv_params *kv, struct fault *fault) {
    const char *name = "full";
    int64_t budget = 1024, buffer = 128, chunk = 512;
    int rc = json_str(json, "kv", "policy", &name, fault);
    if (!rc) rc = json_int(json, "kv", "budget", 1, INT32_MAX, &budget, fault);
    if (!rc) rc = json_int(json, "kv", "buffer", 0, INT32_MAX, &buffer, fault);
    if (!rc) rc = json_int(json, "kv", "chunk", 1, INT32_MAX, &chunk, fault);
    const struct policy *policy = policy_find(name);
    if (!rc && !policy) rc = fault_set(fault, ERR_INVALID, "kv.policy", "no policy '%s'", name);
    if (rc) return rc;
    kv_params_set_policy(kv, policy);
    kv->budget = (int32_t)budget;
    kv->buffer = (int32_t)buffer;
    kv->chunk = (int32_t)chunk;
    const cJSON *rule = json_get(json, "rule");
    for (size_t f = 0; f < FIELD_COUNT && rule && !rc; f++)
        rc = read_field(&fields[f], rule, &kv->rule, fault);
    return rc;
}

/* ---- Input ---- */

static const float *find_floats(struct run *run, int sequence, const char *what, int64_t width,
                                int *count, struct fault *fault) {
    char name[32];
    snprintf(name, sizeof name, "%d.%s", sequence, what);
    const struct tensor *tensor = weights_find(run->input, name);
    if (!tensor || tensor->dtype != TENSOR_F32 || tensor->dims != 3 ||
        tensor->shape[0] != run->cache.layers || tensor->shape[2] != width ||
        tensor->shape[1] > INT32_MAX || (uintptr_t)tensor->data % sizeof(float) != 0) {
        fault_set(fault, ERR_INVALID, name, "must be F32 [layers, tokens, %" PRId64 "], aligned",
                  width);
        return NULL;
    }
    *count = (int)tensor->shape[1];
    return tensor->data;
}

static int read_splits(struct sequence *sequence, const cJSON *json, struct fault *fault) {
    const cJSON *item;
    cJSON_ArrayForEach(item, json_get(json, "splits")) {
        int64_t size;
        if (sequence->split_count == SPLITS_MAX || json_node_int(item, 1, INT32_MAX, &size))
            return fault_set(fault, ERR_INVALID, "splits", "1 to %d sizes", SPLITS_MAX);
        sequence->splits[sequence->split_count++] = (int)size;
    }
    if (!sequence->split_count) sequence->splits[sequence->split_count++] = INT32_MAX;
    return 0;
}

static int read_sequence(struct run *run, int index, const cJSON *json, struct fault *fault) {
    struct sequence *sequence = &run->sequences[index];
    int count = 0;
    sequence->qkv = find_floats(run, index, "qkv", run->qkv_width, &sequence->count, fault);
    sequence->log_beta = find_floats(run, index, "log_beta", run->cache.heads_kv, &count, fault);
    if (!sequence->qkv || !sequence->log_beta) return ERR_INVALID;
    if (count != sequence->count || count < 1)
        return fault_set(fault, ERR_INVALID, "log_beta", "must have as many tokens as qkv");
    int64_t prompt = count;
    int rc = json_int(json, "sequences", "prompt", 1, count, &prompt, fault);
    if (!rc) rc = read_splits(sequence, json, fault);
    if (!rc) rc = read_kv(json_get(json, "kv"), &sequence->kv, fault);
    for (int i = 0; i < run->cache.layers && run->sliding_windows; i++)
        if (run->sliding_windows[i] > sequence->kv.sliding_window)
            sequence->kv.sliding_window = run->sliding_windows[i];
    sequence->prompt = (int)prompt;
    sequence->due.prompt_new = sequence->prompt;
    sequence->out = mem_must_alloc((size_t)run->cache.layers * (size_t)count,
                                   (size_t)run->out_width * sizeof(float));
    if (count > run->cache.max_positions) run->cache.max_positions = count;
    run->rows_max += count;
    return rc;
}

static int read_shape(struct run *run, struct fault *fault) {
    struct kern_cache_options *cache = &run->cache;
    const struct {
        const char *name;
        int *out;
    } sizes[] = {{"layers", &cache->layers},
                 {"heads_q", &cache->heads_q},
                 {"heads_kv", &cache->heads_kv},
                 {"head_dim", &cache->head_dim}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        int64_t value = 0;
        int rc = json_int(run->config, "", sizes[i].name, 1, 4096, &value, fault);
        if (rc) return rc;
        if (!value) return fault_set(fault, ERR_INVALID, sizes[i].name, "is missing");
        *sizes[i].out = (int)value;
    }
    const char *dtype = "f32";
    int rc = json_str(run->config, "", "kv_dtype", &dtype, fault);
    if (!rc) rc = replay_kv_dtype(dtype, &cache->dtype, fault);
    run->qkv_width = (cache->heads_q + 2 * cache->heads_kv) * cache->head_dim;
    run->out_width = cache->heads_q * cache->head_dim;
    return rc;
}

static int read_rotation(struct run *run, struct fault *fault) {
    const cJSON *list = json_get(run->config, "inv_freq"), *item;
    int half = run->cache.head_dim / 2, count = 0;
    if (cJSON_GetArraySize(list) == 0) return 0;
    run->inv_freq = mem_must_alloc((size_t)half, sizeof *run->inv_freq);
    cJSON_ArrayForEach(item, list) {
        if (count == half || !cJSON_IsNumber(item)) break;
        run->inv_freq[count++] = (float)item->valuedouble;
    }
    if (count != half || count != cJSON_GetArraySize(list))
        return fault_set(fault, ERR_INVALID, "inv_freq", "must be %d numbers", half);
    run->cache.inv_freq = run->inv_freq;
    run->rotations = mem_must_alloc((size_t)run->cache.layers, sizeof *run->rotations);
    for (int layer = 0; layer < run->cache.layers; layer++) run->rotations[layer] = run->inv_freq;
    run->cache.rotations = run->rotations;
    return 0;
}

static int read_sliding_windows(struct run *run, struct fault *fault) {
    const cJSON *list = json_get(run->config, "sliding_windows"), *item;
    int count = 0;
    if (cJSON_GetArraySize(list) == 0) return 0;
    run->sliding_windows = mem_must_alloc((size_t)run->cache.layers, sizeof *run->sliding_windows);
    cJSON_ArrayForEach(item, list) {
        int64_t sliding_window;
        if (count == run->cache.layers || json_node_int(item, 0, INT32_MAX, &sliding_window)) break;
        run->sliding_windows[count++] = (int)sliding_window;
    }
    if (count != run->cache.layers || count != cJSON_GetArraySize(list))
        return fault_set(fault, ERR_INVALID, "sliding_windows", "must be one of each layer");
    return 0;
}

static int read_input(struct run *run, const char *path, struct fault *fault) {
    static const struct json_limits limits = {.bytes = 1 << 20, .depth = 8};
    int rc = weights_open_file(path, &run->input, fault);
    if (rc) return rc;
    const char *text = weights_metadata_keepd(run->input);
    if (!text) return fault_set(fault, ERR_INVALID, path, "has no metadata \"keepd\"");
    rc = json_parse(text, strlen(text), &limits, &run->config, fault);
    if (!rc) rc = read_shape(run, fault);
    if (!rc) rc = read_rotation(run, fault);
    if (!rc) rc = read_sliding_windows(run, fault);
    const cJSON *item;
    cJSON_ArrayForEach(item, json_get(run->config, "sequences")) {
        if (rc || run->sequence_count == SEQUENCES_MAX) break;
        rc = read_sequence(run, run->sequence_count++, item, fault);
    }
    return rc;
}

/* ---- The run ---- */

static int open_backend(struct run *run, struct fault *fault) {
    struct cpu_options options = {.path = "reference", .threads = 1};
    int64_t threads = 1;
    int rc = json_str(run->config, "", "path", &options.path, fault);
    if (!rc) rc = json_int(run->config, "", "threads", 1, 64, &threads, fault);
    options.threads = (int)threads;
    if (!rc) rc = cpu_open(&options, &run->kern, fault);
    if (rc) return rc;
    struct kern_cache_info info;
    const struct kern_ops *ops = run->kern->ops;
    ops->cache_info(&run->cache, &info);
    run->cache.slots = run->sequence_count;
    run->cache.pages = (int64_t)(run->cache.max_positions / info.page_slots + 1 +
                                 run->cache.max_positions / info.member_slots + 1) *
                       run->cache.layers * run->cache.heads_kv * run->cache.slots;
    rc = ops->cache_open(run->kern, &run->cache, fault);
    if (rc) return rc;
    size_t rows = (size_t)run->rows_max;
    run->qkv = ops->mem_alloc(run->kern, rows * (size_t)run->qkv_width * sizeof(float));
    run->out = ops->mem_alloc(run->kern, rows * (size_t)run->out_width * sizeof(float));
    run->log_beta = ops->mem_alloc(run->kern, rows * (size_t)run->cache.heads_kv * sizeof(float));
    run->host = mem_must_alloc(rows * (size_t)run->qkv_width, sizeof(float));
    return run->qkv && run->out && run->log_beta ? 0 : ERR_NOMEM;
}

/* Evicts the sequences marked in `due` together, and writes down what each one holds then. */
static int evict(struct run *run, const bool *due) {
    struct kern_evict list[SEQUENCES_MAX];
    int count = 0;
    for (int i = 0; i < run->sequence_count; i++) {
        const struct sequence *sequence = &run->sequences[i];
        if (due[i])
            list[count++] = (struct kern_evict){.slot = i,
                                                .tokens = sequence->due.tokens,
                                                .budget = due_budget(&sequence->kv, &sequence->due),
                                                .rule = &sequence->kv.rule};
    }
    int rc = count ? run->kern->ops->evict(run->kern, list, count) : 0;
    for (int i = 0; i < run->sequence_count && !rc; i++) {
        if (!due[i]) continue;
        due_evicted(&run->sequences[i].kv, &run->sequences[i].due);
        rc = put_state(run, i);
    }
    return rc;
}

/* The sequence's part of the next step, in tokens. */
static int next_part(struct sequence *sequence) {
    int left = sequence->count - sequence->due.tokens;
    int room = due_prompt_limit(&sequence->kv, &sequence->due);
    if (room == 0 || left == 0) return left > 0 ? 1 : 0;
    int size = sequence->splits[sequence->split_at];
    if (sequence->split_at + 1 < sequence->split_count) sequence->split_at++;
    return size < room ? size : room;
}

static void copy_rows(float *to, const float *from, const struct sequence *sequence, int layer,
                      const struct kern_span *span, int width) {
    size_t first = (size_t)layer * (size_t)sequence->count + (size_t)span->pos;
    memcpy(to + (size_t)span->row * (size_t)width, from + first * (size_t)width,
           (size_t)span->count * (size_t)width * sizeof *to);
}

static int run_layer(struct run *run, int layer, const struct kern_batch *batch) {
    const struct kern_ops *ops = run->kern->ops;
    const struct kern_attend_options options = {
        .scale = 1 / sqrtf((float)run->cache.head_dim),
        .sliding_window = run->sliding_windows ? run->sliding_windows[layer] : 0};
    const size_t rows = (size_t)batch->rows * sizeof(float);
    for (int i = 0; i < batch->span_count; i++) {
        const struct sequence *sequence = &run->sequences[batch->spans[i].slot];
        copy_rows(run->host, sequence->qkv, sequence, layer, &batch->spans[i], run->qkv_width);
    }
    int rc = ops->upload(run->kern, run->qkv, run->host, rows * (size_t)run->qkv_width);
    for (int i = 0; i < batch->span_count; i++) {
        const struct sequence *sequence = &run->sequences[batch->spans[i].slot];
        copy_rows(run->host, sequence->log_beta, sequence, layer, &batch->spans[i],
                  run->cache.heads_kv);
    }
    if (!rc)
        rc = ops->upload(run->kern, run->log_beta, run->host, rows * (size_t)run->cache.heads_kv);
    if (rc) return rc;
    ops->write_kv(run->kern, layer, run->qkv, run->log_beta, batch);
    ops->attend(run->kern, layer, run->out, run->qkv, batch, &options);
    rc = ops->download(run->kern, run->host, run->out, rows * (size_t)run->out_width);
    for (int i = 0; i < batch->span_count && !rc; i++) {
        const struct kern_span *span = &batch->spans[i];
        const struct sequence *sequence = &run->sequences[span->slot];
        size_t width = (size_t)run->out_width;
        size_t first = (size_t)layer * (size_t)sequence->count + (size_t)span->pos;
        memcpy(sequence->out + first * width, run->host + (size_t)span->row * width,
               (size_t)span->count * width * sizeof(float));
    }
    return rc;
}

/* One part of every sequence that has tokens left; *more says whether there was any. */
static int step(struct run *run, bool *more) {
    struct kern_span spans[SEQUENCES_MAX];
    struct kern_batch batch = {.spans = spans};
    bool due[SEQUENCES_MAX] = {false};
    for (int i = 0; i < run->sequence_count; i++) {
        struct sequence *sequence = &run->sequences[i];
        bool generating = sequence->due.tokens >= sequence->prompt;
        due[i] = generating && sequence->due.tokens < sequence->count &&
                 due_before_generate(&sequence->kv, &sequence->due);
        int count = next_part(sequence);
        if (!count) continue;
        spans[batch.span_count++] = (struct kern_span){.slot = i,
                                                       .row = batch.rows,
                                                       .count = count,
                                                       .pos = sequence->due.tokens,
                                                       .rule = &sequence->kv.rule};
        batch.rows += count;
    }
    *more = batch.rows > 0;
    int rc = evict(run, due);
    if (!rc && *more) rc = run->kern->ops->begin_step(run->kern, &batch);
    for (int layer = 0; layer < run->cache.layers && *more && !rc; layer++)
        rc = run_layer(run, layer, &batch);
    memset(due, 0, sizeof due);
    for (int i = 0; i < batch.span_count && !rc; i++) {
        struct sequence *sequence = &run->sequences[spans[i].slot];
        due_append(&sequence->due, spans[i].count);
        due[spans[i].slot] = due_after_append(&sequence->kv, &sequence->due);
    }
    return rc ? rc : evict(run, due);
}

static int replay(struct run *run, const char *input, struct fault *fault) {
    int rc = read_input(run, input, fault);
    if (!rc) rc = open_backend(run, fault);
    bool more = !rc;
    while (more && !rc) {
        rc = step(run, &more);
        if (!rc) rc = run->kern->ops->cache_check(run->kern, fault);
    }
    return rc ? rc : run->kern->ops->sync(run->kern);
}

static void close_run(struct run *run) {
    if (run->kern) {
        run->kern->ops->mem_free(run->kern, run->qkv);
        run->kern->ops->mem_free(run->kern, run->out);
        run->kern->ops->mem_free(run->kern, run->log_beta);
        run->kern->ops->close(run->kern);
    }
    for (int i = 0; i < run->sequence_count; i++) mem_free(run->sequences[i].out);
    mem_free(run->host);
    mem_free(run->inv_freq);
    mem_free(run->rotations);
    mem_free(run->sliding_windows);
    json_free(run->config);
    weights_close(run->input);
    buf_close(&run->data);
    buf_close(&run->header);
    buf_close(&run->evictions);
}

static int has_path(const char *name) {
    const struct cpu_options options = {.path = name, .threads = 1};
    struct kern *kern = NULL;
    struct fault fault = {0};
    int rc = cpu_open(&options, &kern, &fault);
    if (rc) return 1;
    const char *attention = cpu_of(kern)->kernels->attention;
    if (attention) printf("%s\n", attention);
    kern->ops->close(kern);
    return 0;
}

int main(int argc, char **argv) {
    struct run run = {0};
    struct fault fault = {0};
    if (argc == 2 && !strcmp(argv[1], "--list")) {
        print_policies();
        return 0;
    }
    if (argc == 3 && !strcmp(argv[1], "--has-path")) return has_path(argv[2]);
    if (argc != 3) {
        fprintf(stderr, "policy_replay --list | --has-path NAME | INPUT OUTPUT\n");
        return 1;
    }
    buf_open(&run.data, OUTPUT_MAX);
    buf_open(&run.header, OUTPUT_MAX);
    buf_open(&run.evictions, OUTPUT_MAX);
    int rc = replay(&run, argv[1], &fault);
    if (!rc) rc = write_output(&run, argv[2]);
    if (fault.code)
        fprintf(stderr, "%s: %s\n", fault.field, fault.text);
    else if (rc)
        fprintf(stderr, "%s\n", err_text(rc));
    close_run(&run);
    return rc ? 1 : 0;
}
