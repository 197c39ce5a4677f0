/* Opening a model: directories that are refused, memory that fails, random weights. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "kernels/cpu/cpu.h"
#include "tests/golden/replay.h"

#define PATH_BYTES 1024

static const char *model_dir(const char *name) {
    static char dir[512];
    snprintf(dir, sizeof dir, "%s/tests/data/models/%s", KEEPD_SOURCE_DIR, name);
    return dir;
}

/* ---- Directories that must be refused ---- */

/* A copy of tests/data/models/<name> with `from` in its config.json replaced by `to`. */
struct copy {
    char dir[64];
};

static void write_text(const char *dir, const char *name, const char *data, size_t size) {
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *file = fopen(path, "wb");
    cr_assert_not_null(file);
    cr_assert_eq(fwrite(data, 1, size, file), size);
    cr_assert_eq(fclose(file), 0);
}

static void copy_open(struct copy *copy, const char *name, const char *from, const char *to) {
    char path[PATH_BYTES], link[PATH_BYTES], text[8192], *config;
    size_t size;
    snprintf(copy->dir, sizeof copy->dir, "/tmp/keepd-test-XXXXXX");
    cr_assert_not_null(mkdtemp(copy->dir));
    snprintf(path, sizeof path, "%s/config.json", model_dir(name));
    cr_assert_eq(file_read(path, sizeof text / 2, &config, &size, NULL), 0);
    char *at = strstr(config, from);
    cr_assert_not_null(at, "%s has no %s", path, from);
    int n =
        snprintf(text, sizeof text, "%.*s%s%s", (int)(at - config), config, to, at + strlen(from));
    write_text(copy->dir, "config.json", text, (size_t)n);
    mem_free(config);
    snprintf(path, sizeof path, "%s/model.safetensors", model_dir(name));
    snprintf(link, sizeof link, "%s/model.safetensors", copy->dir);
    cr_assert_eq(symlink(path, link), 0);
}

static void copy_close(const struct copy *copy) {
    static const char *const names[] = {"config.json", "model.safetensors", "gates.safetensors"};
    char path[PATH_BYTES];
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        snprintf(path, sizeof path, "%s/%s", copy->dir, names[i]);
        unlink(path);
    }
    rmdir(copy->dir);
}

static int open_dir(const char *dir, struct fault *fault) {
    struct replay replay;
    const struct replay_options options = {.dir = dir,
                                           .path = "reference",
                                           .threads = 1,
                                           .rows_max = 8,
                                           .positions_max = 8,
                                           .slots = 1};
    *fault = (struct fault){0};
    int rc = replay_open(&options, &replay, fault);
    if (!rc) replay_close(&replay);
    return rc;
}

Test(model_open, files_that_do_not_fit_the_config_are_refused_by_tensor) {
    static const struct {
        const char *from, *to;
        int rc;
        const char *field, *text, *model; /* NULL: "qwen3" */
    } cases[] = {
        {"\"hidden_size\": 64", "\"hidden_size\": 128", ERR_INVALID, "model.embed_tokens.weight",
         "shape is [512, 64], expected [512, 128]", NULL},
        {"\"vocab_size\": 512", "\"vocab_size\": 600", ERR_INVALID, "model.embed_tokens.weight",
         "expected [600, 64]", NULL},
        {"\"intermediate_size\": 96", "\"intermediate_size\": 97", ERR_INVALID,
         "model.layers.0.mlp.gate_proj.weight", "shape is [96, 64], expected [97, 64]", NULL},
        {"\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3", ERR_NOTFOUND,
         "model.layers.2.input_layernorm.weight", "expected [64]", "llama"},
        {"\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1", ERR_INVALID,
         "model.layers.1.self_attn.o_proj.weight", "1 layers", "llama"},
        {"\"num_hidden_layers\": 3", "\"num_hidden_layers\": 4", ERR_INVALID, "layer_types",
         "expected 4 types, found 3", NULL},
        {"\"num_key_value_heads\": 2", "\"num_key_value_heads\": 1", ERR_INVALID,
         "model.layers.0.self_attn.k_proj.weight", "expected [32, 64]", NULL},
        {"\"attention_bias\": false", "\"attention_bias\": true", ERR_NOTFOUND,
         "model.layers.0.self_attn.q_proj.bias", "expected [128]", NULL},
        {"\"hidden_act\": \"silu\"", "\"hidden_act\": \"relu\"", ERR_UNSUPPORTED, "hidden_act",
         "relu", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct copy copy;
        struct fault fault;
        copy_open(&copy, cases[i].model ? cases[i].model : "qwen3", cases[i].from, cases[i].to);
        cr_assert_eq(open_dir(copy.dir, &fault), cases[i].rc, "%s: %s: %s", cases[i].to,
                     fault.field, fault.text);
        cr_assert_str_eq(fault.field, cases[i].field);
        cr_assert_not_null(strstr(fault.text, cases[i].text), "%s", fault.text);
        copy_close(&copy);
    }
}

/* Qwen3's q_norm in a directory that says it is Llama: silently leaving it out would be wrong. */
Test(model_open, tensors_the_config_does_not_know_are_refused) {
    struct copy copy;
    struct fault fault;
    copy_open(&copy, "qwen3", "Qwen3ForCausalLM\"", "LlamaForCausalLM\"");
    char path[PATH_BYTES], *config;
    size_t size;
    snprintf(path, sizeof path, "%s/config.json", copy.dir);
    cr_assert_eq(file_read(path, 8192, &config, &size, NULL), 0);
    char *type = strstr(config, "\"model_type\": \"qwen3\"");
    cr_assert_not_null(type);
    memcpy(type, "\"model_type\": \"llama\"", strlen("\"model_type\": \"llama\""));
    write_text(copy.dir, "config.json", config, size);
    mem_free(config);
    cr_assert_eq(open_dir(copy.dir, &fault), ERR_UNSUPPORTED, "%s: %s", fault.field, fault.text);
    cr_assert_str_eq(fault.field, "model.layers.0.self_attn.q_norm.weight");
    copy_close(&copy);
}

Test(model_open, missing_head_means_tied) {
    struct copy copy;
    struct fault fault;
    copy_open(&copy, "qwen3", "\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false");
    cr_assert_eq(open_dir(copy.dir, &fault), 0, "%s: %s", fault.field, fault.text);
    copy_close(&copy);
}

/* An index that lists lm_head.weight, which no file has: of a tied model that is no fault. */
Test(model_open, an_index_with_a_tied_head) {
    static const char index[] = "{\"weight_map\": {\"model.norm.weight\": \"all.safetensors\", "
                                "\"lm_head.weight\": \"all.safetensors\"}}";
    for (int tied = 0; tied < 2; tied++) {
        struct copy copy;
        struct fault fault;
        char from[PATH_BYTES], to[PATH_BYTES];
        copy_open(&copy, "llama", "\"tie_word_embeddings\": true",
                  tied ? "\"tie_word_embeddings\": true" : "\"tie_word_embeddings\": false");
        snprintf(from, sizeof from, "%s/model.safetensors", copy.dir);
        snprintf(to, sizeof to, "%s/all.safetensors", copy.dir);
        cr_assert_eq(rename(from, to), 0);
        write_text(copy.dir, "model.safetensors.index.json", index, strlen(index));
        cr_expect_eq(open_dir(copy.dir, &fault), tied ? 0 : ERR_NOTFOUND, "%s: %s", fault.field,
                     fault.text);
        cr_expect(tied || (strcmp(fault.field, "lm_head.weight") == 0 &&
                           strstr(fault.text, "all.safetensors")));
        unlink(to);
        snprintf(to, sizeof to, "%s/model.safetensors.index.json", copy.dir);
        unlink(to);
        copy_close(&copy);
    }
}

Test(model_open, missing_files_are_named) {
    struct copy copy;
    struct fault fault;
    cr_assert_neq(open_dir("/nonexistent", &fault), 0);
    cr_assert(strstr(fault.text, "config.json") || strstr(fault.field, "config.json"), "%s: %s",
              fault.field, fault.text);
    copy_open(&copy, "qwen3", "\"head_dim\": 32", "\"head_dim\": 32");
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%s/model.safetensors", copy.dir);
    unlink(path);
    cr_assert_neq(open_dir(copy.dir, &fault), 0);
    cr_assert(fault.text[0] != '\0');
    write_text(copy.dir, "gates.safetensors", "short", 5);
    snprintf(path, sizeof path, "%s/model.safetensors", model_dir("qwen3"));
    char link[PATH_BYTES];
    snprintf(link, sizeof link, "%s/model.safetensors", copy.dir);
    cr_assert_eq(symlink(path, link), 0);
    cr_assert_neq(open_dir(copy.dir, &fault), 0, "broken gates beside a model must be noticed");
    cr_assert_str_eq(fault.field, "gates");
    cr_assert_not_null(strstr(fault.text, "gates.safetensors: "), "%s", fault.text);
    copy_close(&copy);
}

Test(model_open, every_allocation_may_fail) {
    long failures = 0;
    for (long n = 0;; n++) {
        struct fault fault;
        mem_fail_after(n);
        int rc = open_dir(model_dir("qwen3"), &fault);
        bool pending = mem_fail_pending();
        mem_fail_after(-1);
        if (!rc) {
            cr_assert(pending, "failure %ld went unnoticed", n);
            break;
        }
        cr_assert_eq(rc, ERR_NOMEM, "failure %ld gave %s (%s: %s)", n, err_name(rc), fault.field,
                     fault.text);
        failures++;
    }
    cr_assert(failures > 20);
}

/* ---- Random weights ---- */

static uint64_t seen_bytes, all_bytes;

static bool note_progress(void *arg, uint64_t done, uint64_t total, const char *what) {
    (void)what;
    ++*(int *)arg;
    cr_assert(done >= seen_bytes && done <= total);
    seen_bytes = done;
    all_bytes = total;
    return true;
}

static bool stop_at_5(void *arg, uint64_t done, uint64_t total, const char *what) {
    (void)done, (void)total, (void)what;
    return ++*(int *)arg < 5;
}

Test(model_open, loading_ends_where_nobody_wants_the_rest) {
    static const bool random[] = {false, true};
    for (size_t i = 0; i < sizeof random / sizeof *random; i++) {
        struct copy copy;
        struct kern *kern;
        struct model *model = NULL;
        struct fault fault = {0};
        int calls = 0;
        copy_open(&copy, "qwen3", "\"head_dim\": 32", "\"head_dim\": 32");
        const struct model_options options = {.dir = copy.dir,
                                              .gates = "",
                                              .rows_max = 8,
                                              .logits_max = 1,
                                              .random_weights = random[i],
                                              .progress = stop_at_5,
                                              .progress_arg = &calls};
        cr_assert_eq(
            cpu_open(&(struct cpu_options){.path = "reference", .threads = 1}, &kern, &fault), 0);
        cr_assert_eq(model_open(kern, &options, &model, &fault), ERR_STOPPED, "%s", fault.text);
        cr_assert_str_eq(fault.text, "loading was stopped");
        cr_assert(!model && calls == 5);
        kern->ops->close(kern);
        copy_close(&copy);
    }
}

Test(model_open, random_weights_need_only_the_config) {
    struct copy copy;
    struct kern *kern;
    struct fault fault = {0};
    int calls = 0;
    copy_open(&copy, "qwen3", "\"head_dim\": 32", "\"head_dim\": 32");
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%s/model.safetensors", copy.dir);
    unlink(path);
    float *logits[2];
    int32_t ids[20];
    for (int run = 0; run < 2; run++) {
        struct replay replay;
        const struct replay_options options = {.dir = copy.dir,
                                               .path = "reference",
                                               .threads = 1,
                                               .rows_max = 32,
                                               .positions_max = 32,
                                               .slots = 1,
                                               .random_weights = true};
        const int whole = 20;
        cr_assert_eq(replay_open(&options, &replay, &fault), 0, "%s", fault.text);
        cr_assert(model_has_gates(replay.model), "random gates make global eviction timeable");
        for (int i = 0; i < 20; i++) ids[i] = 31 * i % replay.vocab;
        logits[run] = mem_must_alloc((size_t)(20 * replay.vocab), sizeof(float));
        cr_assert_eq(replay_run(&replay, 0, ids, 20, &whole, 1, logits[run]), 0);
        for (int i = 0; i < 20 * replay.vocab; i++) cr_assert(isfinite(logits[run][i]));
        replay_close(&replay);
    }
    cr_assert(!memcmp(logits[0], logits[1], 20 * 512 * sizeof(float)), "two openings differ");
    cr_assert_neq(logits[0][0], logits[0][512], "rows must differ");
    mem_free(logits[0]);
    mem_free(logits[1]);

    struct model *model;
    const struct model_options options = {.dir = copy.dir,
                                          .gates = "",
                                          .rows_max = 8,
                                          .logits_max = 1,
                                          .random_weights = true,
                                          .progress = note_progress,
                                          .progress_arg = &calls};
    cr_assert_eq(cpu_open(&(struct cpu_options){.path = "reference", .threads = 1}, &kern, &fault),
                 0);
    seen_bytes = 0;
    cr_assert_eq(model_open(kern, &options, &model, &fault), 0, "%s", fault.text);
    cr_assert(!model_has_gates(model) && calls > 10);
    cr_assert(seen_bytes == all_bytes && all_bytes > 0);
    cr_assert_eq(model_config(model)->dtype, KERN_BF16);
    model_close(model);
    kern->ops->close(kern);
    copy_close(&copy);
}
