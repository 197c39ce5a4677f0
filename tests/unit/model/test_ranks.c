/* Tensor parallelism: everything a model leaves behind, logits, kept and evicted positions, reports
 * and snapshots, has the same bits with 2, 4 and 8 ranks as with one. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "kernels/blocks.h"
#include "kernels/ranks.h"
#include "paging/policy.h"
#include "tests/golden/replay.h"
#include "tests/sample.h"
#include "tests/unit/record.h"

#define MODELS KEEPD_SOURCE_DIR "/tests/data/models/"
#define NANO   KEEPD_SOURCE_DIR "/bundled/keepd-nano"

/* ---- A run ---- */

enum { CHUNK = 37, CHUNKS = 4, POSITIONS = 256, SLOTS = 4, BUDGET = 24 };

struct run {
    struct replay replay;
    struct record *record;
    const struct kv_params *kv;
    int32_t ids[POSITIONS];
    float *logits;
};

static void step(struct run *run, const struct replay_part *parts, int count) {
    size_t rows = 0;
    for (int i = 0; i < count; i++) rows += (size_t)parts[i].count;
    cr_assert_eq(replay_step(&run->replay, parts, count, run->logits), 0);
    note(run->record, "logits", run->logits,
         rows * (size_t)run->replay.vocab * sizeof *run->logits);
}

static void append(struct run *run, int slot, int pos, int count) {
    const struct replay_part part = {slot, pos, count, run->ids + pos, &run->kv->rule};
    step(run, &part, 1);
}

static void note_report(struct run *run, int slot) {
    struct kern *kern = run->replay.kern;
    int streams = run->replay.streams;
    int32_t lengths[256], *positions = calloc((size_t)streams * POSITIONS, sizeof *positions);
    float *log_beta = calloc((size_t)streams * POSITIONS, sizeof *log_beta);
    struct kern_report report = {.lengths = lengths,
                                 .positions = positions,
                                 .log_beta = log_beta,
                                 .entries_max = (size_t)streams * POSITIONS};
    cr_assert_eq(kern->ops->report(kern, slot, &report), 0);
    note(run->record, "lengths", lengths, (size_t)streams * sizeof *lengths);
    note(run->record, "positions", positions, report.entries * sizeof *positions);
    note(run->record, "log_beta", log_beta, report.entries * sizeof *log_beta);
    if (run->replay.states > 0) report.pages = 0; /* each rank rounds its parts of states up */
    note(run->record, "pages", &report.pages, sizeof report.pages);
    free(positions), free(log_beta);
}

static void evict(struct run *run, int slot, int tokens) {
    struct kern *kern = run->replay.kern;
    int streams = run->replay.streams;
    int32_t lengths[256], *positions = calloc((size_t)streams * POSITIONS, sizeof *positions);
    struct kern_trace trace = {
        .lengths = lengths, .positions = positions, .entries_max = (size_t)streams * POSITIONS};
    struct kern_evict due = {
        .slot = slot, .tokens = tokens, .budget = BUDGET, .rule = &run->kv->rule};
    due.trace = slot == 0 ? &trace : NULL;
    cr_assert_eq(kern->ops->evict(kern, &due, 1), 0);
    if (due.trace) {
        note(run->record, "evicted lengths", lengths, (size_t)streams * sizeof *lengths);
        note(run->record, "evicted positions", positions, trace.entries * sizeof *positions);
    }
    free(positions);
    note_report(run, slot);
}

/* Expects the counts in the blocks, of all ranks and of the fullest, to equal the slot's own. */
static void expect_counts_of(struct run *run, int slot, const struct kern_report *blocks) {
    struct kern *kern = run->replay.kern;
    struct kern_report report = {0};
    cr_assert_eq(kern->ops->report(kern, slot, &report), 0);
    cr_assert(blocks->entries == report.entries && blocks->pages == report.pages);
    cr_assert(blocks->rank_entries == report.rank_entries &&
              blocks->rank_pages == report.rank_pages);
    cr_assert(report.rank_pages > 0 && report.rank_pages <= report.pages);
}

/* Out of slot `from`, into slot `to`. */
static void copy_by_snapshot(struct run *run, int from, int to, int tokens) {
    const struct kern_ops *ops = run->replay.kern->ops;
    struct kern *kern = run->replay.kern;
    int count = 1 + run->replay.streams + run->replay.states;
    struct kern_block blocks[257];
    struct kern_report report = {0};
    struct fault fault = {0};
    for (int b = 0; b < count; b++) {
        size_t size = ops->snapshot_size(kern, from, b);
        char *data = malloc(size);
        cr_assert(data && ops->snapshot_export(kern, from, b, data) == 0);
        blocks[b] = (struct kern_block){data, size};
        note(run->record, b ? "stream block" : "slot block", data, size);
    }
    cr_assert_eq(ops->snapshot_check(kern, blocks, count, tokens, &report, &fault), 0, "%s",
                 fault.text);
    expect_counts_of(run, from, &report);
    if (run->replay.states > 0) report.pages = 0;
    note(run->record, "snapshot's pages", &report.pages, sizeof report.pages);
    for (int b = 0; b < count; b++) {
        cr_assert_eq(ops->snapshot_import(kern, to, b, &blocks[b]), 0);
        free((void *)(uintptr_t)blocks[b].data);
    }
}

/* A prompt in chunks, then a fork that goes another way beside it, tokens dropped, and a copy by
 * snapshot that goes on. */
static void live(struct run *run) {
    struct kern *kern = run->replay.kern;
    int pos = 0;
    for (int i = 0; i < CHUNKS; i++, pos += CHUNK) {
        append(run, 0, pos, CHUNK);
        if (run->kv->policy->bounded) evict(run, 0, pos + CHUNK);
    }
    cr_assert_eq(kern->ops->fork(kern, 0, 1), 0);
    for (int i = 0; i < 5; i++, pos++) {
        const struct replay_part parts[] = {{0, pos, 1, run->ids + pos, &run->kv->rule},
                                            {1, pos, 1, run->ids + pos + 7, &run->kv->rule}};
        step(run, parts, 2);
    }
    if (run->kv->policy->bounded) evict(run, 1, pos);
    cr_assert_eq(kern->ops->truncate(kern, 1, pos - 3),
                 run->replay.states > 0 ? ERR_UNSUPPORTED : 0);
    note_report(run, 1);
    copy_by_snapshot(run, 0, 2, pos);
    kern->ops->release(kern, 0);
    append(run, 2, pos, 3);
    note_report(run, 2);
}

struct setting {
    const char *dir, *path;
    int ranks, threads;
    bool random;
    enum quantization quantization;
    const struct replay *owner; /* shares its weights */
};

static void run_once(const struct setting *s, const char *policy, struct record *record) {
    struct fault fault = {0};
    struct kv_params kv = {.budget = BUDGET, .buffer = 8, .chunk = CHUNK};
    struct run run = {.record = record, .kv = &kv};
    const struct replay_options options = {.dir = s->dir,
                                           .path = s->path,
                                           .threads = s->threads,
                                           .ranks = s->ranks,
                                           .kv_dtype = s->random ? KERN_F32 : KERN_BF16,
                                           .rows_max = CHUNK,
                                           .positions_max = POSITIONS,
                                           .slots = SLOTS,
                                           .random_weights = s->random,
                                           .quantization = s->quantization,
                                           .owner = s->owner};
    *record = (struct record){0};
    kv_params_set_policy(&kv, policy_find(policy));
    kv_params_fit(&kv, 0);
    cr_assert_eq(kv_params_check(&kv, &fault), 0, "%s: %s", policy, fault.text);
    cr_assert_eq(replay_open(&options, &run.replay, &fault), 0, "%s: %s", fault.field, fault.text);
    cr_assert(1 + run.replay.streams + run.replay.states < 256);
    uint32_t seed = 9;
    for (int i = 0; i < POSITIONS; i++) {
        seed = seed * 1664525u + 1013904223u;
        run.ids[i] = (int32_t)((seed >> 8) % (uint32_t)run.replay.vocab);
    }
    run.logits = malloc((size_t)CHUNK * (size_t)run.replay.vocab * sizeof *run.logits);
    live(&run);
    struct kern_cache_stats stats;
    run.replay.kern->ops->cache_stats(run.replay.kern, &stats);
    cr_assert(stats.rank_pages_used > 0 && stats.rank_pages_used <= stats.pages_used);
    stats.rank_pages_used = 0; /* the more ranks, the fewer on each */
    if (run.replay.states > 0) stats.pages_used = 0;
    note(record, "statistics", &stats, sizeof stats);
    cr_assert_eq(run.replay.kern->ops->cache_check(run.replay.kern, &fault), 0, "%s", fault.text);
    free(run.logits);
    replay_close(&run.replay);
}

static void compare(const struct setting *one, const char *policy, const int *ranks, int count) {
    struct record single, many;
    char name[256];
    run_once(one, policy, &single);
    for (int i = 0; i < count; i++) {
        struct setting s = *one;
        s.ranks = ranks[i];
        snprintf(name, sizeof name, "%s, %s, %s, %d ranks", s.dir, s.path, policy, s.ranks);
        run_once(&s, policy, &many);
        check_same(&single, &many, name);
        free(many.data);
    }
    free(single.data);
}

/* ---- Every policy, heads more and fewer than ranks ---- */

Test(ranks, every_policy_keeps_the_same) {
    static const int ranks[] = {8, 4, 2}; /* keepd-nano has four key/value heads */
    const struct setting one = {.dir = NANO, .path = "auto", .threads = 1};
    for (int i = 0; policy_at(i); i++)
        if (!test_leaves_out((size_t)i, 2))
            compare(&one, policy_at(i)->name, ranks, test_sample() ? 1 : 3);
}

/* Scales are of whole rows, whatever part of their inputs a rank has. */
Test(ranks, weights_in_fp8_are_split_alike) {
    static const int ranks[] = {2, 8};
    const struct setting one = {
        .dir = NANO, .path = "auto", .threads = 1, .quantization = QUANTIZE_FP8};
    compare(&one, "global", ranks, 2);
}

Test(ranks, weights_in_blocks_are_split_alike) {
    static const int ranks[] = {2, 4};
    for (int q = test_sample() ? QUANTIZE_Q4 : QUANTIZE_Q8; q <= QUANTIZE_Q4; q++) {
        const struct setting one = {
            .dir = NANO, .path = "auto", .threads = 1, .quantization = (enum quantization)q};
        compare(&one, "global", ranks, 2);
    }
}

enum { INPUTS = 32, MIDDLE = 8 * 96, OUTPUTS = 21, GROUP = 128 };

static struct kern_weight *load_grouped(struct kern *kern, int rows, int cols, int group,
                                        enum kern_shard shard) {
    const int groups = (cols + group - 1) / group;
    uint8_t *codes = malloc((size_t)(rows * cols));
    float *scales = malloc((size_t)(rows * groups) * sizeof *scales);
    struct kern_weight *w;
    const struct kern_matrix m = {.data = codes,
                                  .dtype = KERN_E4M3,
                                  .rows = rows,
                                  .cols = cols,
                                  .scale = scales,
                                  .scales = groups,
                                  .group = group};
    for (int i = 0; i < rows * cols; i++) codes[i] = (uint8_t)(i * 37 % 127);
    for (int i = 0; i < rows * groups; i++) scales[i] = 0.001f * (float)(i % 13 + 1);
    cr_assert_eq(kern->ops->weight_load(kern, &m, 1, shard, &w, NULL), 0);
    free(codes), free(scales);
    return w;
}

/* Two products: ranks share the outputs of the first, which are the inputs of the second. With 8
 * ranks each has 96 of them, and a factor is for 128. */
static void product_of_groups(int ranks, float *out) {
    const struct cpu_options cpu = {.path = "auto", .threads = 1};
    struct kern *kern;
    float x[INPUTS];
    for (int i = 0; i < INPUTS; i++) x[i] = (float)(i % 29 - 14) / 16;
    cr_assert_eq(ranks_open_cpu(&cpu, ranks, &kern, NULL), 0);
    struct kern_weight *first = load_grouped(kern, MIDDLE, INPUTS, INPUTS, KERN_SHARD_ROWS);
    struct kern_weight *second = load_grouped(kern, OUTPUTS, MIDDLE, GROUP, KERN_SHARD_COLS);
    float *in = kern->ops->mem_alloc(kern, sizeof x);
    float *middle = kern->ops->mem_alloc(kern, MIDDLE * sizeof *middle);
    float *y = kern->ops->mem_alloc(kern, OUTPUTS * sizeof *y);
    cr_assert_eq(kern->ops->upload(kern, in, x, sizeof x), 0);
    kern->ops->matmul(kern, middle, in, first, NULL, 1, KERN_SET);
    kern->ops->matmul(kern, y, middle, second, NULL, 1, KERN_SET);
    cr_assert_eq(kern->ops->download(kern, out, y, OUTPUTS * sizeof *y), 0);
    kern->ops->mem_free(kern, in);
    kern->ops->mem_free(kern, middle);
    kern->ops->mem_free(kern, y);
    kern->ops->weight_free(kern, first);
    kern->ops->weight_free(kern, second);
    kern->ops->close(kern);
}

Test(ranks, factors_of_groups_are_split_alike) {
    float one[OUTPUTS], many[OUTPUTS];
    product_of_groups(1, one);
    for (int ranks = 2; ranks <= 8; ranks *= 2) {
        product_of_groups(ranks, many);
        cr_assert(!memcmp(one, many, sizeof one), "%d ranks", ranks);
    }
}

enum { MADE_ROWS = 256, MADE_COLS = MADE_ROWS, MADE_BLOCKS = MADE_COLS / KERN_BLOCK };

static struct block made_blocks[MADE_ROWS * MADE_BLOCKS];

static void made_read(struct kern_reader *reader, int64_t row, struct block *to) {
    (void)reader;
    memcpy(to, made_blocks + row * MADE_BLOCKS, MADE_BLOCKS * sizeof *to);
}

static void made_done(struct kern_reader *reader, int64_t first, int64_t count) {
    (void)reader;
    cr_assert(first >= 0 && first + count <= MADE_ROWS);
}

/* y = W W x, with W in memory or made row by row. */
static void product_of_blocks(int ranks, bool made, float *out) {
    struct kern_reader reader = {made_read, made_done, MADE_BLOCKS};
    const struct cpu_options cpu = {.path = "auto", .threads = 1};
    const struct kern_matrix m = {.data = made ? NULL : made_blocks,
                                  .reader = made ? &reader : NULL,
                                  .dtype = KERN_Q8,
                                  .rows = MADE_ROWS,
                                  .cols = MADE_COLS};
    struct kern *kern;
    struct kern_weight *first, *second;
    float x[MADE_COLS];
    for (int i = 0; i < MADE_COLS; i++) x[i] = (float)(i % 29 - 14) / 16;
    cr_assert_eq(ranks_open_cpu(&cpu, ranks, &kern, NULL), 0);
    cr_assert_eq(kern->ops->weight_load(kern, &m, 1, KERN_SHARD_ROWS, &first, NULL), 0);
    cr_assert_eq(kern->ops->weight_load(kern, &m, 1, KERN_SHARD_COLS, &second, NULL), 0);
    float *in = kern->ops->mem_alloc(kern, sizeof x);
    float *middle = kern->ops->mem_alloc(kern, sizeof x);
    float *y = kern->ops->mem_alloc(kern, sizeof x);
    cr_assert_eq(kern->ops->upload(kern, in, x, sizeof x), 0);
    kern->ops->matmul(kern, middle, in, first, NULL, 1, KERN_SET);
    kern->ops->matmul(kern, y, middle, second, NULL, 1, KERN_SET);
    cr_assert_eq(kern->ops->download(kern, out, y, MADE_ROWS * sizeof *y), 0);
    kern->ops->mem_free(kern, in);
    kern->ops->mem_free(kern, middle);
    kern->ops->mem_free(kern, y);
    kern->ops->weight_free(kern, first);
    kern->ops->weight_free(kern, second);
    kern->ops->close(kern);
}

/* Each rank makes the rows, or the part of every row, that are its own. */
Test(ranks, blocks_may_be_made_when_they_are_wanted) {
    float there[MADE_ROWS], made[MADE_ROWS];
    for (int i = 0; i < MADE_ROWS * MADE_BLOCKS; i++) {
        block_set_factors(&made_blocks[i], 0.001f * (float)(i % 13 + 1), BLOCK_NO_LEAST);
        for (int k = 0; k < KERN_BLOCK; k++)
            made_blocks[i].n[k] = (int8_t)((i * 7 + k * 5) % 200 - 100);
    }
    product_of_blocks(1, false, there);
    for (int ranks = 1; ranks <= 8; ranks *= 2) {
        product_of_blocks(ranks, true, made);
        cr_assert(!memcmp(there, made, sizeof made), "%d ranks", ranks);
    }
}

/* Half of 96 inputs would cut a block. */
Test(ranks, blocks_are_not_cut) {
    enum { ROWS = 16, COLS = 96 };
    static struct block data[ROWS * COLS / KERN_BLOCK];
    const struct cpu_options cpu = {.path = "portable", .threads = 1};
    const struct kern_matrix m = {.data = data, .dtype = KERN_Q8, .rows = ROWS, .cols = COLS};
    struct kern *kern;
    struct kern_weight *w;
    struct fault fault = {0};
    cr_assert_eq(ranks_open_cpu(&cpu, 2, &kern, &fault), 0);
    cr_assert_eq(kern->ops->weight_load(kern, &m, 1, KERN_SHARD_COLS, &w, &fault), ERR_UNSUPPORTED);
    cr_assert_str_eq(fault.field, "tensor-parallel-size");
    cr_assert_eq(kern->ops->weight_load(kern, &m, 1, KERN_SHARD_ROWS, &w, &fault), 0);
    kern->ops->weight_free(kern, w);
    kern->ops->close(kern);
}

Test(ranks, families_with_their_biases_and_norms) {
    static const char *const names[] = {"qwen2",        "qwen3",          "llama",
                                        "mistral",      "phi3",           "smollm3",
                                        "granite",      "gemma3",         "qwen3moe",
                                        "mixtral",      "gptoss",         "gemma2",
                                        "olmo2",        "olmo3",          "exaone4",
                                        "seedoss",      "ernie45",        "glm",
                                        "glm4",         "olmoe",          "qwen3vl",
                                        "qwen3vlmoe",   "qwen25vl",       "gemma3vl",
                                        "mistral3",     "ministral3",     "museglimmer",
                                        "qwen2moe",     "glm4moe",        "dots1",
                                        "ernie45moe",   "minimaxm2",      "lfm2",
                                        "lfm2moe",      "qwen3next",      "qwen35",
                                        "qwen35moe",    "granitehybrid",  "granitehybriddense",
                                        "gemma4",       "gemma4dense",    "nemotronh",
                                        "nemotronhmoe", "falconh1",       "falconh1norm",
                                        "gemma4moe",    "nemotronhlatent"};
    static const char *const paths[] = {"reference", "portable", "auto"};
    static const int ranks[] = {2, 4};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char dir[512];
        if (test_leaves_out(i, 3)) continue;
        snprintf(dir, sizeof dir, MODELS "%s", names[i]);
        for (size_t p = 0; p < sizeof paths / sizeof *paths; p++) {
            const struct setting one = {.dir = dir, .path = paths[p], .threads = 1};
            if (test_leaves_out(i / 3 + p, 3)) continue;
            /* four ranks would cut gpt-oss's blocks of MXFP4 (test_gguf_gptoss.c) */
            compare(&one, "snapkv", ranks, strcmp(names[i], "gptoss") == 0 ? 1 : 2);
        }
    }
}

/* Every rank holds the stream that all heads share, and evicts from it alike, whatever the policy
 * observes. */
Test(ranks, latent_attention) {
    static const char *const names[] = {"deepseekv2lite", "deepseekv2", "deepseekv3", "glm4moelite",
                                        "mistral4"};
    static const char *const policies[] = {"snapkv", "trimkv", "h2o", "full"};
    static const char *const paths[] = {"reference", "portable", "auto"};
    static const int ranks[] = {2, 4};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char dir[512];
        snprintf(dir, sizeof dir, MODELS "%s", names[i]);
        for (size_t p = 0; p < sizeof paths / sizeof *paths; p++) {
            const struct setting one = {.dir = dir, .path = paths[p], .threads = 1};
            for (size_t k = 0; k < (i ? 1 : sizeof policies / sizeof *policies); k++)
                compare(&one, policies[k], ranks, 2);
        }
    }
}

/* ---- Shapes ---- */

struct shape {
    const char *family, *more;
    int heads_q, heads_kv, head_dim, d_model, d_ff, layers, vocab;
};

static void write_config(const char *dir, const struct shape *s) {
    char path[512];
    snprintf(path, sizeof path, "%s/config.json", dir);
    FILE *file = fopen(path, "w");
    cr_assert_not_null(file);
    fprintf(file,
            "{\"model_type\": \"%s\", \"hidden_size\": %d, \"intermediate_size\": %d,"
            " \"num_hidden_layers\": %d, \"num_attention_heads\": %d, \"num_key_value_heads\": %d,"
            " \"head_dim\": %d, \"vocab_size\": %d, \"max_position_embeddings\": 512,"
            " \"rms_norm_eps\": 1e-6, \"rope_theta\": 10000.0, \"eos_token_id\": 1, %s}",
            s->family, s->d_model, s->d_ff, s->layers, s->heads_q, s->heads_kv, s->head_dim,
            s->vocab, s->more);
    cr_assert_eq(fclose(file), 0);
}

static void make_dir(char dir[64]) {
    snprintf(dir, 64, "/tmp/keepd-ranks-XXXXXX");
    cr_assert_not_null(mkdtemp(dir));
}

static void remove_dir(const char *dir) {
    char path[512];
    snprintf(path, sizeof path, "%s/config.json", dir);
    unlink(path);
    rmdir(dir);
}

Test(ranks, shapes_of_every_kind) {
    static const struct shape shapes[] = {
        {"qwen3", "\"tie_word_embeddings\": false", 16, 8, 16, 72, 88, 2, 203},
        {"llama", "\"tie_word_embeddings\": true", 8, 1, 32, 96, 136, 3, 97},
        {"qwen2", "\"tie_word_embeddings\": true", 8, 8, 12, 96, 40, 2, 64},
    };
    static const int ranks[] = {2, 4, 8};
    char dir[64];
    make_dir(dir);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        write_config(dir, &shapes[i]);
        const struct setting one = {.dir = dir, .path = "auto", .threads = 1, .random = true};
        compare(&one, "global", ranks, 3);
        compare(&one, "cake", ranks, 3);
        compare(&one, "d2o", ranks, 3);
    }
    remove_dir(dir);
}

/* Layers whose KV heads differ: every rank has the same part of each, whichever comes first. */
Test(ranks, the_first_layer_may_have_the_fewest_heads) {
    static const struct shape shape = {
        "gemma4_text",
        "\"tie_word_embeddings\": true, \"hidden_size_per_layer_input\": 0, \"sliding_window\": 40,"
        " \"layer_types\": [\"full_attention\", \"sliding_attention\", \"full_attention\"],"
        " \"global_head_dim\": 32, \"num_global_key_value_heads\": 4, \"attention_k_eq_v\": true,"
        " \"num_kv_shared_layers\": 0",
        16,
        8,
        16,
        64,
        32,
        3,
        64};
    static const char *const policies[] = {"snapkv", "streaming", "d2o"};
    static const int ranks[] = {2, 4};
    char dir[64];
    make_dir(dir);
    write_config(dir, &shape);
    const struct setting one = {.dir = dir, .path = "auto", .threads = 1, .random = true};
    for (int i = 0; i < 3; i++) compare(&one, policies[i], ranks, 2);
    remove_dir(dir);
}

Test(ranks, threads_change_nothing) {
    static const int ranks[] = {1, 2};
    struct record first, other;
    for (size_t i = 0; i < sizeof ranks / sizeof *ranks; i++) {
        struct setting s = {.dir = NANO, .path = "auto", .ranks = ranks[i], .threads = 1};
        run_once(&s, "rkv", &first);
        s.threads = 6;
        run_once(&s, "rkv", &other);
        check_same(&first, &other, "threads");
        free(first.data), free(other.data);
    }
}

/* Data parallelism beside it: another instance of as many ranks uses the first one's weights. */
Test(ranks, instances_share_weights_rank_by_rank) {
    struct record one, other;
    struct replay owner;
    struct fault fault = {0};
    const struct replay_options options = {.dir = MODELS "qwen2",
                                           .path = "auto",
                                           .threads = 1,
                                           .ranks = 2,
                                           .kv_dtype = KERN_BF16,
                                           .rows_max = CHUNK,
                                           .positions_max = POSITIONS,
                                           .slots = 1};
    struct setting s = {.dir = MODELS "qwen2", .path = "auto", .ranks = 2, .threads = 1};
    cr_assert_eq(replay_open(&options, &owner, &fault), 0, "%s", fault.text);
    run_once(&s, "h2o", &one);
    s.owner = &owner;
    run_once(&s, "h2o", &other);
    check_same(&one, &other, "a second instance");
    replay_close(&owner);
    free(one.data), free(other.data);
}

/* ---- Refusals ---- */

Test(ranks, a_model_that_cannot_be_split_is_refused_by_name) {
    static const struct {
        struct shape shape;
        int ranks;
        const char *why;
    } cases[] = {
        {{"qwen3", "\"tie_word_embeddings\": true", 12, 3, 16, 64, 64, 1, 64},
         2,
         "3 key/value heads"},
        {{"qwen3", "\"tie_word_embeddings\": true", 6, 2, 16, 64, 64, 1, 64}, 4, "6 query heads"},
        {{"qwen3", "\"tie_word_embeddings\": true", 8, 2, 16, 64, 60, 1, 64}, 8, "60 feed-forward"},
        {{"qwen3", "\"tie_word_embeddings\": true", 8, 2, 16, 64, 64, 1, 7}, 8, "7 tokens"},
    };
    char dir[64];
    make_dir(dir);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_config(dir, &cases[i].shape);
        for (int check = 0; check < 2; check++) {
            struct kern *kern = NULL;
            struct model *model = NULL;
            struct fault fault = {0};
            const struct cpu_options cpu = {.path = "portable", .threads = 1};
            const struct model_options options = {.dir = dir,
                                                  .rows_max = 8,
                                                  .logits_max = 1,
                                                  .check_only = check,
                                                  .random_weights = true};
            cr_assert_eq(ranks_open_cpu(&cpu, cases[i].ranks, &kern, &fault), 0);
            cr_assert_eq(model_open(kern, &options, &model, &fault), ERR_UNSUPPORTED);
            cr_assert_str_eq(fault.field, "tensor-parallel-size");
            cr_assert_not_null(strstr(fault.text, cases[i].why), "%s", fault.text);
            kern->ops->close(kern);
        }
    }
    remove_dir(dir);
}

Test(ranks, a_number_that_is_no_tree_is_refused) {
    struct kern *kern = NULL;
    struct fault fault = {0};
    const struct cpu_options cpu = {.path = "portable", .threads = 1};
    static const int wrong[] = {3, 6, 16, -1};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        cr_assert_eq(ranks_open_cpu(&cpu, wrong[i], &kern, &fault), ERR_INVALID);
        cr_assert_str_eq(fault.field, "tensor-parallel-size");
    }
    const struct cpu_options abacus = {.path = "abacus", .threads = 1};
    cr_assert_eq(ranks_open_cpu(&abacus, 4, &kern, &fault), ERR_UNSUPPORTED);
    cr_assert_str_eq(fault.field, "abacus");
}

/* Whichever allocation fails, nothing is left: who looks for leaks sees it. */
Test(ranks, opening_may_fail_anywhere) {
    const struct cpu_options cpu = {.path = "portable", .threads = 1};
    int failures = 0;
    for (bool passed = false; !passed; failures += !passed) {
        struct kern *kern = NULL;
        struct fault fault = {0};
        mem_fail_after(failures);
        int rc = ranks_open_cpu(&cpu, 2, &kern, &fault);
        passed = mem_fail_pending();
        mem_fail_after(-1);
        cr_assert_eq(rc, passed ? 0 : ERR_NOMEM);
        if (rc == 0) kern->ops->close(kern);
    }
    cr_assert_gt(failures, 4);
}

/* Without memory for the record of what went the eviction happens all the same. */
Test(ranks, a_trace_without_memory_is_lost_and_nothing_else) {
    enum { TOKENS = 40, KEEP = 16, LAYERS = 2, HEADS = 2, STREAMS = LAYERS * HEADS };
    const struct cpu_options cpu = {.path = "portable", .threads = 1};
    const struct kern_cache_options cache = {.layers = LAYERS,
                                             .heads_q = HEADS,
                                             .heads_kv = HEADS,
                                             .head_dim = 16,
                                             .pages = 64,
                                             .slots = 1,
                                             .max_positions = 64,
                                             .rows_max = TOKENS,
                                             .vocab = 10};
    const struct kern_rule rule = {.sinks = 2};
    const struct kern_span span = {.count = TOKENS, .rule = &rule};
    const struct kern_batch batch = {.spans = &span, .rows = TOKENS, .span_count = 1};
    int32_t lengths[STREAMS], positions[STREAMS * TOKENS];
    for (int turn = 0; turn < 2; turn++) {
        struct kern *kern = NULL;
        struct fault fault = {0};
        struct kern_report held = {0};
        struct kern_trace trace = {
            .lengths = lengths, .positions = positions, .entries_max = STREAMS * TOKENS};
        const struct kern_evict due = {
            .tokens = TOKENS, .budget = KEEP, .rule = &rule, .trace = &trace};
        cr_assert_eq(ranks_open_cpu(&cpu, 2, &kern, &fault), 0);
        cr_assert_eq(kern->ops->cache_open(kern, &cache, &fault), 0, "%s", fault.text);
        mem_fail_after(0);
        cr_assert_eq(kern->ops->begin_step(kern, &batch),
                     0); /* needs no memory: it is already allocated */
        cr_assert(mem_fail_pending());
        mem_fail_after(turn - 1);
        cr_assert_eq(kern->ops->evict(kern, &due, 1), 0);
        mem_fail_after(-1);
        cr_assert_eq(trace.lost, turn == 1);
        cr_assert_eq(kern->ops->report(kern, 0, &held), 0);
        cr_assert_eq((int)held.entries, STREAMS * KEEP);
        if (!trace.lost) cr_assert_eq((int)trace.entries, STREAMS * (TOKENS - KEEP));
        kern->ops->close(kern);
    }
}
