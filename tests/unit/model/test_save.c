/* Saved models: loaded again they have bitwise the weights of a start with `--quantization`; errors
 * leave nothing behind. */
#include <criterion/criterion.h>
#include <dirent.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "model/base_digest.h"
#include "model/internal.h"
#include "model/save.h"
#include "model/save_files.h"
#include "tests/golden/replay.h"
#include "tests/sample.h"
#include "tests/unit/model/gguf_model.h"
#include "tests/unit/parts.h"

#define MODELS KEEPD_SOURCE_DIR "/tests/data/models"
#define COUNT  24

static void clear(const char *path) {
    char command[160];
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    cr_expect_eq(system(command), 0);
}

static bool exists(const char *folder, const char *name) {
    char path[160];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return access(path, F_OK) == 0;
}

static float *logits_of(const char *model, enum quantization quantization, enum kern_dtype *dtype,
                        size_t *size) {
    struct replay replay;
    struct fault fault = {0};
    int32_t ids[COUNT];
    const int whole = COUNT;
    const struct replay_options options = {.dir = model,
                                           .gates = "",
                                           .path = "auto",
                                           .threads = 2,
                                           .rows_max = COUNT,
                                           .positions_max = COUNT,
                                           .slots = 1,
                                           .quantization = quantization};
    for (int i = 0; i < COUNT; i++) ids[i] = i * 37 % 64;
    cr_assert_eq(replay_open(&options, &replay, &fault), 0, "%s: %s: %s", model, fault.field,
                 fault.text);
    *size = COUNT * (size_t)replay.vocab * sizeof(float);
    *dtype = model_config(replay.model)->dtype;
    float *logits = malloc(*size);
    cr_assert_eq(replay_run(&replay, 0, ids, COUNT, &whole, 1, logits), 0);
    replay_close(&replay);
    return logits;
}

static int save_calibrated(const char *model, const char *to, enum quantization quantization,
                           int tokens, struct fault *fault) {
    const struct model_options options = {
        .dir = model, .gates = "", .quantization = quantization, .calibrate = tokens, .threads = 2};
    size_t bytes;
    *fault = (struct fault){0};
    return model_save(&options, to, &bytes, fault);
}

static int save(const char *model, const char *to, enum quantization quantization,
                struct fault *fault) {
    return save_calibrated(model, to, quantization, 0, fault);
}

static struct base_digest digest_of(const char *model) {
    struct base_digest digest;
    struct model_config config = {0};
    struct weights *weights = NULL;
    struct fault fault = {0};
    cr_assert_eq(model_read(model, 0, false, &config, &weights, &fault), 0, "%s", fault.text);
    cr_assert_eq(base_digest(&config, weights, &digest), 0);
    weights_close(weights);
    model_config_close(&config);
    return digest;
}

/* Gates fit a saved model as they fit the model that it was made from. */
static void check_digests(const char *model, const char *to) {
    const struct base_digest source = digest_of(model), saved = digest_of(to);
    cr_expect_str_eq(saved.vectors, source.vectors, "%s", model);
    cr_expect_str_eq(saved.matrices, source.matrices, "%s", model);
}

/* False: the model has rows that are no whole blocks, which is an error. */
static bool check_saved(const char *model, const char *end, enum quantization quantization) {
    char folder[] = "/tmp/keepd-save-XXXXXX", to[64];
    struct fault fault;
    enum kern_dtype dtypes[2];
    size_t sizes[2];
    cr_assert_not_null(mkdtemp(folder));
    snprintf(to, sizeof to, "%s/saved%s", folder, end);
    int rc = save(model, to, quantization, &fault);
    if (rc == ERR_UNSUPPORTED && strstr(fault.text, "no whole blocks")) {
        clear(folder);
        return false;
    }
    cr_assert_eq(rc, 0, "%s: %s: %s", model, fault.field, fault.text);
    float *rounded = logits_of(model, quantization, &dtypes[0], &sizes[0]);
    float *saved = logits_of(to, QUANTIZE_NONE, &dtypes[1], &sizes[1]);
    float *exact = logits_of(model, QUANTIZE_NONE, &dtypes[0], &sizes[0]);
    cr_expect(sizes[0] == sizes[1] && !memcmp(rounded, saved, sizes[0]), "%s to %d", model,
              quantization);
    cr_expect(memcmp(rounded, exact, sizes[0]) != 0, "%s was not rounded", model);
    cr_expect(end[0] || dtypes[0] == dtypes[1], "%s: the cache would have another type", model);
    free(rounded), free(saved), free(exact);
    check_digests(model, to);
    clear(folder);
    return true;
}

/* Has this small model rows that are no whole blocks? */
static bool is_narrow(const char *name) {
    static const char *const names[] = {
        "deepseekv2",  "deepseekv2lite", "deepseekv3",  "gemma4",
        "gemma4dense", "granitehybrid",  "glm4moelite", "granitehybriddense",
        "mistral4",    "mixtral",        "olmoe",       "qwen3moe"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (!strcmp(name, names[i])) return true;
    return false;
}

Test(save, every_family_is_loaded_as_it_was_rounded) {
    DIR *models = opendir(MODELS);
    const struct dirent *entry;
    int count = 0;
    cr_assert_not_null(models);
    while ((entry = readdir(models))) {
        char model[512];
        snprintf(model, sizeof model, MODELS "/%s", entry->d_name);
        if (!exists(model, "config.json") || entry->d_name[0] == '.') continue;
        if (!test_leaves_out((size_t)count, 5))
            cr_expect(check_saved(model, "", count % 2 ? QUANTIZE_Q8 : QUANTIZE_Q4) !=
                          is_narrow(entry->d_name),
                      "%s", model);
        count++;
    }
    closedir(models);
    cr_expect(count >= 20, "%d models", count);
}

/* The mean square of the differences between log-probabilities' logits. */
static double distance(const char *model, const char *saved) {
    enum kern_dtype dtype;
    size_t sizes[2];
    double sum = 0;
    float *exact = logits_of(model, QUANTIZE_NONE, &dtype, &sizes[0]);
    float *rounded = logits_of(saved, QUANTIZE_NONE, &dtype, &sizes[1]);
    cr_assert_eq(sizes[0], sizes[1]);
    for (size_t i = 0; i < sizes[0] / sizeof *exact; i++)
        sum += ((double)exact[i] - rounded[i]) * ((double)exact[i] - rounded[i]);
    free(exact), free(rounded);
    return sum / ((double)sizes[0] / sizeof *exact);
}

/* How much closer to the model calibration comes: the ratio of the distances. */
static double check_calibrated(const char *model) {
    char folder[] = "/tmp/keepd-save-XXXXXX", to[2][64];
    struct fault fault;
    double ratio = NAN;
    cr_assert_not_null(mkdtemp(folder));
    for (int i = 0; i < 2; i++) snprintf(to[i], sizeof to[i], "%s/%d", folder, i);
    if (save(model, to[0], QUANTIZE_Q4, &fault) == 0) {
        cr_assert_eq(save_calibrated(model, to[1], QUANTIZE_Q4, 512, &fault), 0, "%s: %s: %s",
                     model, fault.field, fault.text);
        ratio = distance(model, to[1]) / distance(model, to[0]);
        check_digests(model, to[1]);
    }
    clear(folder);
    return ratio;
}

/* A sample (tests/sample.h) leaves this out: families_can_be_calibrated runs the same code on short
 * texts. */
Test(save, calibration_comes_closer_to_a_model) {
    if (test_sample()) return;
    const double ratio = check_calibrated(KEEPD_SOURCE_DIR "/bundled/keepd-nano");
    cr_expect(ratio < 0.8, "%g", ratio);
}

/* Sandwiched norms, windows, biases, fused and routed matrices. The weights are random: their
 * inputs say nothing, and how close a rounded model comes is chance. */
Test(save, families_can_be_calibrated) {
    static const char *const names[] = {"gemma2",   "gptoss",    "llama",          "olmoe",
                                        "phi3",     "qwen2",     "nemotronh",      "nemotronhmoe",
                                        "falconh1", "gemma4moe", "nemotronhlatent"};
    int saved = 0;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char model[512];
        if (test_leaves_out(i, 4)) continue;
        snprintf(model, sizeof model, MODELS "/%s", names[i]);
        const double ratio = check_calibrated(model);
        saved += !isnan(ratio);
        cr_expect(isnan(ratio) || (ratio != 1 && ratio < 2), "%s: %g", names[i], ratio);
    }
    cr_expect(saved >= (test_sample() ? 1 : 4), "%d", saved);
}

static const struct family llama = {"llama", "LlamaForCausalLM", .permuted = true};

static const struct family experts = {"qwen3moe", "Qwen3MoeForCausalLM", .qk_norm = true,
                                      .experts = {"mlp.gate", "mlp.experts.%d.gate_proj",
                                                  "mlp.experts.%d.up_proj",
                                                  "mlp.experts.%d.down_proj"}};

/* The same numbers both ways. */
Test(save, gguf_files_become_gguf_files) {
    static const struct {
        const struct family *family;
        uint32_t format;
    } cases[] = {{&llama, GGUF_FORMAT_F32},
                 {&llama, GGUF_FORMAT_BF16},
                 {&llama, GGUF_FORMAT_F16},
                 {&experts, GGUF_FORMAT_BF16}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct making m = {
            .family = cases[i].family, .format = cases[i].format, .tied = i == 1, .random = i + 1};
        char dir[64], model[80];
        gguf_model_make(dir, &m);
        snprintf(model, sizeof model, "%s/model.gguf", dir);
        if (!test_leaves_out(i, 3))
            (void)check_saved(model, ".gguf", i ? QUANTIZE_Q4 : QUANTIZE_Q8);
        if (!test_leaves_out(i, 3)) (void)check_saved(dir, "", i ? QUANTIZE_Q8 : QUANTIZE_Q4);
        gguf_model_remove(dir);
    }
}

static void put_file_type(struct buf *file) {
    put_u32(file, "general.file_type", GGUF_FORMAT_F32);
}

static int64_t file_type_of(const char *model) {
    struct model_config config = {0};
    struct weights *weights = NULL;
    struct fault fault = {0};
    int64_t type = -1;
    cr_assert_eq(model_read(model, 0, false, &config, &weights, &fault), 0, "%s", fault.text);
    cr_assert_eq(gguf_int(weights_gguf(weights), "general.file_type", 0, 100, &type, &fault), 0);
    weights_close(weights);
    model_config_close(&config);
    return type;
}

/* Matrices in blocks stay what they are: a file that has no others is refused, and the type that
 * the file names is that of most matrices. */
Test(save, a_file_names_the_type_of_most_of_its_matrices) {
    static const struct family typed = {"llama", "LlamaForCausalLM", .permuted = true,
                                        .put = put_file_type, .puts = 1};
    static const struct {
        uint32_t format;
        const char *plain;
        int rc;
        int64_t type;
    } cases[] = {{GGUF_FORMAT_BF16, NULL, 0, 7},
                 {GGUF_FORMAT_Q4_0, "token_embd.weight", 0, 0},
                 {GGUF_FORMAT_Q4_0, NULL, ERR_UNSUPPORTED, 0}};
    char folder[] = "/tmp/keepd-save-XXXXXX", to[64];
    cr_assert_not_null(mkdtemp(folder));
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct making m = {
            .family = &typed, .format = cases[i].format, .plain = cases[i].plain, .random = i + 1};
        struct fault fault;
        char from[64], model[80];
        gguf_model_make(from, &m);
        snprintf(model, sizeof model, "%s/model.gguf", from);
        snprintf(to, sizeof to, "%s/%zu.gguf", folder, i);
        cr_expect_eq(save(model, to, QUANTIZE_Q8, &fault), cases[i].rc, "%zu", i);
        if (cases[i].rc)
            cr_expect(access(to, F_OK) && strstr(fault.text, "in few bits already"));
        else
            cr_expect_eq(file_type_of(to), cases[i].type, "%zu", i);
        gguf_model_remove(from);
    }
    clear(folder);
}

/* Text beside the weights, in a folder of its own, too; but no sums of files that are written anew,
 * and no link to a file that is not there. */
Test(save, other_files_are_carried_over) {
    char folder[] = "/tmp/keepd-save-XXXXXX", from[64], to[80], templates[128];
    struct buf text;
    struct fault fault;
    char *found;
    size_t size;
    struct making m = {.family = &llama, .format = GGUF_FORMAT_BF16, .random = 1};
    gguf_model_make(from, &m);
    cr_assert_not_null(mkdtemp(folder));
    snprintf(to, sizeof to, "%s/saved", folder);
    snprintf(templates, sizeof templates, "%s/additional_chat_templates", from);
    cr_assert_eq(mkdir(templates, 0700), 0);
    buf_open(&text, 64);
    buf_str(&text, "text");
    write_parts(from, "tokenizer.json", &text, 1);
    write_parts(from, "gates.safetensors", &text, 1);
    write_parts(from, "pytorch_model.bin", &text, 1);
    write_parts(from, "SHA256SUMS", &text, 1);
    write_parts(from, "model.safetensors.sha256", &text, 1);
    snprintf(to, sizeof to, "%s/link.txt", from);
    cr_assert_eq(symlink("nowhere", to), 0);
    snprintf(to, sizeof to, "%s/saved", folder);
    write_parts(templates, "tool_use.jinja", &text, 1);
    cr_assert_eq(save(from, to, QUANTIZE_Q8, &fault), 0, "%s", fault.text);
    cr_expect(exists(to, "tokenizer.json") &&
              exists(to, "additional_chat_templates/tool_use.jinja"));
    cr_expect(!exists(to, "gates.safetensors") && !exists(to, "pytorch_model.bin") &&
              !exists(to, "model.gguf") && !exists(to, "SHA256SUMS") &&
              !exists(to, "model.safetensors.sha256") && !exists(to, "link.txt"));
    const struct model_options options = {.dir = from, .quantization = QUANTIZE_Q8, .threads = 1};
    snprintf(to, sizeof to, "%s/with gates/", folder);
    cr_assert_eq(model_save(&options, to, &size, &fault), 0, "%s", fault.text);
    snprintf(to, sizeof to, "%s/with gates/gates.safetensors", folder);
    cr_assert_eq(file_read(to, 64, &found, &size, NULL), 0);
    cr_expect_str_eq(found, "text");
    mem_free(found);
    buf_close(&text);
    clear(folder);
    clear(from);
}

Test(save, errors_leave_nothing_behind) {
    char folder[] = "/tmp/keepd-save-XXXXXX", from[64], model[80], to[64];
    struct fault fault;
    struct making m = {
        .family = &llama, .format = GGUF_FORMAT_BF16, .random = 1, .nan = "blk.1.ffn_down.weight"};
    gguf_model_make(from, &m);
    cr_assert_not_null(mkdtemp(folder));
    snprintf(model, sizeof model, "%s/model.gguf", from);
    snprintf(to, sizeof to, "%s/saved.gguf", folder);
    cr_expect_eq(save(model, to, QUANTIZE_Q4, &fault), ERR_INVALID);
    cr_expect_str_eq(fault.field, "blk.1.ffn_down.weight");
    cr_expect(!exists(folder, "saved.gguf") && !exists(folder, "saved.gguf.partial"));
    cr_expect_eq(save(from, to, QUANTIZE_Q4, &fault), ERR_INVALID);
    cr_expect_not_null(strstr(fault.text, "must not end in .gguf"));
    cr_expect_eq(save(from, folder, QUANTIZE_Q4, &fault), ERR_INVALID);
    cr_expect_not_null(strstr(fault.text, "is not overwritten"));
    snprintf(to, sizeof to, "%s/saved", folder);
    cr_expect_eq(save(from, to, QUANTIZE_FP8, &fault), ERR_INVALID);
    cr_expect_not_null(strstr(fault.text, "q8 or q4"));
    cr_assert_eq(save(from, to, QUANTIZE_Q4, &fault), 0, "%s", fault.text);
    char again[80];
    snprintf(again, sizeof again, "%s/again", folder);
    cr_expect_eq(save(to, again, QUANTIZE_Q4, &fault), ERR_UNSUPPORTED);
    cr_expect_not_null(strstr(fault.text, "in few bits already"));
    cr_assert_eq(mkdir(strcat(again, ".partial"), 0700), 0);
    again[strlen(again) - strlen(".partial")] = '\0';
    cr_expect_eq(save(from, again, QUANTIZE_Q4, &fault), ERR_INVALID);
    cr_expect_not_null(strstr(fault.text, "another run"));
    clear(folder);
    gguf_model_remove(from);
}

/* The second of two runs that write the same file is refused, and leaves the first one alone. */
Test(save, two_runs_do_not_write_one_file) {
    char folder[] = "/tmp/keepd-save-XXXXXX", to[64];
    struct save_files first, second;
    struct save_file file;
    struct fault fault = {0};
    cr_assert_not_null(mkdtemp(folder));
    for (int directory = 0; directory < 2; directory++) {
        snprintf(to, sizeof to, "%s/%d.gguf", folder, directory);
        cr_assert_eq(save_files_open(&first, "quantize-to", to, directory, &fault), 0, "%s",
                     fault.text);
        cr_expect_eq(save_files_open(&second, "quantize-to", to, directory, &fault), ERR_INVALID);
        cr_expect_not_null(strstr(fault.text, "another run"));
        int rc = save_files_begin(&first, directory ? "part" : NULL, &file, &fault);
        cr_assert_eq(rc, 0, "%s", fault.text);
        rc = save_files_end(&file, save_files_put(&file, "text", 4, &fault), &fault);
        cr_assert_eq(save_files_close(&first, rc, &fault), 0, "%s", fault.text);
        cr_expect_eq(access(to, F_OK), 0);
    }
    clear(folder);
}

/* The limit on a file's size stands for a full disk. */
Test(save, a_write_that_fails_names_its_file_and_the_reason) {
    char folder[] = "/tmp/keepd-save-XXXXXX", from[64], path[128];
    struct fault fault;
    struct making m = {.family = &llama, .format = GGUF_FORMAT_BF16, .random = 1};
    gguf_model_make(from, &m);
    cr_assert_not_null(mkdtemp(folder));
    cr_assert_neq(signal(SIGXFSZ, SIG_IGN), SIG_ERR);
    for (int i = 0; i < 2; i++) {
        char model[80], to[64];
        const struct rlimit limit = {.rlim_cur = 4096, .rlim_max = RLIM_INFINITY};
        const struct rlimit none = {.rlim_cur = RLIM_INFINITY, .rlim_max = RLIM_INFINITY};
        snprintf(model, sizeof model, "%s%s", from, i ? "/model.gguf" : "");
        snprintf(to, sizeof to, "%s/saved%s", folder, i ? ".gguf" : "");
        snprintf(path, sizeof path, "%s.partial%s", to, i ? "" : "/model.safetensors");
        cr_assert_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
        const int rc = save(model, to, QUANTIZE_Q8, &fault);
        cr_assert_eq(setrlimit(RLIMIT_FSIZE, &none), 0);
        cr_expect_eq(rc, ERR_IO);
        cr_expect(strstr(fault.text, path) && strstr(fault.text, "File too large"), "%s",
                  fault.text);
        cr_expect(!exists(folder, "saved") && !exists(folder, "saved.partial") &&
                  !exists(folder, "saved.gguf") && !exists(folder, "saved.gguf.partial"));
    }
    clear(folder);
    gguf_model_remove(from);
}
