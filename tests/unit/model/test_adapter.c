/* LoRA adapters: both formats give the same numbers, and everything that is no such adapter is
 * refused by its name. */
#include <criterion/criterion.h>
#include <malloc.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "model/adapter.h"
#include "model/internal.h"
#include "tests/unit/gguf_file.h"
#include "tests/unit/parts.h"

#define MOST ((int64_t)64 << 20)

static const struct {
    const char *hf, *gguf;
    enum role role;
} targets[] = {
    {"self_attn.q_proj", "attn_q", ROLE_Q},   {"self_attn.k_proj", "attn_k", ROLE_K},
    {"self_attn.v_proj", "attn_v", ROLE_V},   {"self_attn.o_proj", "attn_output", ROLE_O},
    {"mlp.gate_proj", "ffn_gate", ROLE_GATE}, {"mlp.up_proj", "ffn_up", ROLE_UP},
    {"mlp.down_proj", "ffn_down", ROLE_DOWN},
};
enum { TARGETS = sizeof targets / sizeof *targets };

/* An adapter that is written as a directory and as a GGUF file. */
struct writing {
    char dir[64];
    const char *config;       /* adapter_config.json; NULL: rank 4, alpha 8 */
    const char *architecture; /* general.architecture */
    const char *type;         /* general.type; NULL: "adapter" */
    unsigned targets;         /* bits of `targets` */
    int rank;
    bool permuted;       /* the GGUF file has rows i and i + D/2 of heads of q and k side by side */
    const char *extra;   /* name of one more tensor in the directory; NULL: none */
    const char *without; /* end of the names of tensors that are left out */
    float poison;        /* not 0: the first number of the first tensor */
    bool transposed;     /* the first tensor has its sizes in the other order */
    struct buf header, area, infos, data;
    int tensors;
    uint32_t random;
};

static void read_config(const char *model, struct model_config *config) {
    char path[512], *text = NULL;
    size_t size = 0;
    struct fault fault = {0};
    snprintf(path, sizeof path, "%s/tests/data/models/%s/config.json", KEEPD_SOURCE_DIR, model);
    cr_assert_eq(file_read(path, 1 << 20, &text, &size, &fault), 0, "%s", fault.text);
    cr_assert_eq(model_config_parse(text, size, NULL, 0, 0, config, &fault), 0, "%s: %s",
                 fault.field, fault.text);
    mem_free(text);
}

static float next_number(struct writing *w) {
    w->random = w->random * 1664525 + 1013904223;
    return (float)(int32_t)w->random / 2147483648.0f;
}

static void add_tensor(struct writing *w, const char *hf, const char *gguf, int64_t rows,
                       int64_t cols, const float *numbers, const float *permuted) {
    const size_t bytes = (size_t)(rows * cols) * sizeof *numbers;
    const bool turned = w->transposed && w->tensors == 0;
    const int64_t shape[] = {cols, rows};
    buf_fmt(&w->header,
            "%s\"%s\":{\"dtype\":\"F32\",\"shape\":[%lld,%lld],\"data_offsets\":[%zu,%zu]}",
            w->header.size > 1 ? "," : "", hf, (long long)(turned ? cols : rows),
            (long long)(turned ? rows : cols), w->area.size, w->area.size + bytes);
    buf_add(&w->area, numbers, bytes);
    put_tensor(&w->infos, gguf, 2, shape, GGUF_FORMAT_F32, w->data.size);
    buf_add(&w->data, permuted, bytes);
    put_padding(&w->data, 32);
    w->tensors++;
}

static bool ends_with(const char *text, const char *end) {
    return strlen(text) >= strlen(end) && !strcmp(text + strlen(text) - strlen(end), end);
}

static void add_half(struct writing *w, const struct model_config *config, int target, int layer,
                     bool b) {
    char hf[160], gguf[160];
    int64_t rows, cols;
    const enum role role = targets[target].role;
    const int head = config->head_dim;
    tensor_shape(config, role, layer, &rows, &cols);
    if (b)
        cols = w->rank;
    else
        rows = w->rank;
    snprintf(hf, sizeof hf, "base_model.model.model.layers.%d.%s.lora_%c.weight", layer,
             targets[target].hf, b ? 'B' : 'A');
    snprintf(gguf, sizeof gguf, "blk.%d.%s.weight.lora_%c", layer, targets[target].gguf,
             b ? 'b' : 'a');
    if (w->without && ends_with(hf, w->without)) return;
    float *numbers = mem_must_alloc((size_t)(rows * cols), sizeof *numbers);
    float *permuted = mem_must_alloc((size_t)(rows * cols), sizeof *permuted);
    for (int64_t i = 0; i < rows * cols; i++) numbers[i] = next_number(w);
    if (w->poison != 0 && w->tensors == 0) numbers[0] = w->poison;
    for (int64_t i = 0; i < rows; i++) {
        const int64_t at = i % head, pair = 2 * (at % (head / 2)) + at / (head / 2);
        const int64_t to = b && w->permuted && tensor_is_rotated(role) ? i - at + pair : i;
        memcpy(permuted + to * cols, numbers + i * cols, (size_t)cols * sizeof *numbers);
    }
    add_tensor(w, hf, gguf, rows, cols, numbers, permuted);
    mem_free(numbers);
    mem_free(permuted);
}

static void write_files(struct writing *w) {
    struct buf size, head, config;
    buf_open(&size, 64);
    buf_open(&head, 1 << 20);
    buf_open(&config, 1 << 20);
    buf_str(&config, w->config ? w->config
                               : "{\"peft_type\":\"LORA\",\"r\":4,\"lora_alpha\":8,"
                                 "\"bias\":\"none\",\"use_dora\":false,\"modules_to_save\":null}");
    put(&size, w->header.size, 8);
    put_head(&head, 3, (uint64_t)w->tensors, 4);
    put_text(&head, "general.architecture", w->architecture);
    put_text(&head, "general.type", w->type ? w->type : "adapter");
    put_text(&head, "adapter.type", "lora");
    put_f32(&head, "adapter.lora.alpha", 8);
    buf_add(&head, w->infos.data, w->infos.size);
    put_padding(&head, 32);
    write_parts(w->dir, "adapter_config.json", &config, 1);
    write_parts(w->dir, "adapter_model.safetensors", (const struct buf[]){size, w->header, w->area},
                3);
    write_parts(w->dir, "adapter.gguf", (const struct buf[]){head, w->data}, 2);
    buf_close(&size);
    buf_close(&head);
    buf_close(&config);
}

static void write_adapter(struct writing *w, const struct model_config *config) {
    struct buf *const all[] = {&w->header, &w->area, &w->infos, &w->data};
    snprintf(w->dir, sizeof w->dir, "/tmp/keepd-test-XXXXXX");
    cr_assert_not_null(mkdtemp(w->dir));
    for (size_t i = 0; i < 4; i++) buf_open(all[i], 16 << 20);
    w->rank = w->rank ? w->rank : 4;
    w->tensors = 0;
    w->random = 1;
    buf_char(&w->header, '{');
    for (int l = 0; l < config->layers; l++)
        for (int t = 0; t < TARGETS; t++)
            for (int b = 0; b < 2 && (w->targets >> t & 1); b++) add_half(w, config, t, l, b);
    const float one = 1;
    if (w->extra) add_tensor(w, w->extra, w->extra, 1, 1, &one, &one);
    buf_char(&w->header, '}');
    write_files(w);
    for (size_t i = 0; i < 4; i++) buf_close(all[i]);
}

static void remove_adapter(const struct writing *w) {
    static const char *const names[] = {"adapter_config.json", "adapter_model.safetensors",
                                        "adapter.gguf"};
    char path[128];
    for (size_t i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", w->dir, names[i]);
        unlink(path);
    }
    rmdir(w->dir);
}

static int read_as(const struct writing *w, const struct model_config *config, bool gguf,
                   int64_t most, struct adapter **out, struct fault *fault) {
    char path[128];
    *fault = (struct fault){0};
    snprintf(path, sizeof path, "%s%s", w->dir, gguf ? "/adapter.gguf" : "");
    return adapter_read(config, path, most, out, fault);
}

/* ---- The same numbers ---- */

static void check_alike(const char *model, const char *architecture, bool permuted,
                        unsigned which) {
    struct model_config config;
    struct writing w = {.architecture = architecture, .permuted = permuted, .targets = which};
    struct adapter *a, *b;
    struct fault fault;
    read_config(model, &config);
    write_adapter(&w, &config);
    cr_assert_eq(read_as(&w, &config, false, MOST, &a, &fault), 0, "%s: %s: %s", model, fault.field,
                 fault.text);
    cr_assert_eq(read_as(&w, &config, true, MOST, &b, &fault), 0, "%s: %s: %s", model, fault.field,
                 fault.text);
    cr_assert_arr_eq(a->digest, b->digest, SHA256_BYTES, "%s", model);
    cr_assert(a->rank == 4 && a->bytes == b->bytes && a->bytes > 0);
    adapter_close(a);
    adapter_close(b);
    remove_adapter(&w);
    model_config_close(&config);
}

Test(adapter, both_formats_give_the_same_numbers) {
    check_alike("llama", "llama", true, 0x7f);
    check_alike("llama", "llama", true, 0x1);
    check_alike("qwen3", "qwen3", false, 0x7f);
    check_alike("qwen2", "qwen2", false, 0x52);
    check_alike("granite", "granite", true, 0x0f);
    check_alike("smollm3", "smollm3", true, 0x03);
}

/* y = B A x of each part, from the files, against the joined matrices. */
Test(adapter, parts_lie_beside_each_other) {
    struct model_config config;
    struct writing w = {.architecture = "qwen3", .targets = 0x5}; /* q and v */
    struct adapter *a;
    struct fault fault;
    read_config("qwen3", &config);
    write_adapter(&w, &config);
    cr_assert_eq(read_as(&w, &config, false, MOST, &a, &fault), 0, "%s", fault.text);
    const struct adapter_product *p = &a->products[ADAPTER_QKV];
    const int64_t q = p->part_rows[0], k = p->part_rows[1];
    cr_assert(p->rank == 8 && p->part_count == 3 && p->splits_rows);
    cr_assert(p->factors[0] == 2 && p->factors[1] == 1 && p->factors[2] == 2);
    for (int64_t row = 0; row < p->rows; row++)
        for (int64_t r = 0; r < p->rank; r++) {
            const bool own = row < q ? r < 4 : row >= q + k && r >= 4;
            cr_assert_eq(p->up[row * p->rank + r] != 0, own);
        }
    cr_assert_null(a->products[ADAPTER_O].down);
    cr_assert_null(a->products[ADAPTER_DOWN].down);
    adapter_close(a);
    remove_adapter(&w);
    model_config_close(&config);
}

Test(adapter, the_scale_follows_the_configuration) {
    static const struct {
        const char *config;
        float scale;
    } rows[] = {
        {"{\"peft_type\":\"LORA\",\"r\":4,\"lora_alpha\":6}", 1.5f},
        {"{\"peft_type\":\"LORA\",\"r\":4,\"lora_alpha\":6,\"use_rslora\":true}", 3},
    };
    struct model_config config;
    read_config("qwen3", &config);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct writing w = {.architecture = "qwen3", .targets = 0x8, .config = rows[i].config};
        struct adapter *a;
        struct fault fault;
        write_adapter(&w, &config);
        cr_assert_eq(read_as(&w, &config, false, MOST, &a, &fault), 0, "%s", fault.text);
        cr_assert_eq(a->products[ADAPTER_O].factors[0], rows[i].scale);
        adapter_close(a);
        remove_adapter(&w);
    }
    model_config_close(&config);
}

/* ---- Refused ---- */

static void check_refused(const char *model, struct writing w, bool gguf, int64_t most, int code,
                          const char *field) {
    struct model_config config;
    struct adapter *a = NULL;
    struct fault fault;
    read_config(model, &config);
    if (!w.architecture) w.architecture = model;
    write_adapter(&w, &config);
    const int rc = read_as(&w, &config, gguf, most, &a, &fault);
    cr_expect_eq(rc, code, "%s: %d, not %d: %s: %s", field, rc, code, fault.field, fault.text);
    cr_expect_str_eq(fault.field, field, "%s, not %s: %s", fault.field, field, fault.text);
    cr_expect_null(a);
    remove_adapter(&w);
    model_config_close(&config);
}

/* KiB; "VmRSS:" or, since clear_refs was written, "VmHWM:". */
static long memory_of_process(const char *key) {
    FILE *status = fopen("/proc/self/status", "r");
    char line[256];
    long size = -1;
    cr_assert(status);
    while (size < 0 && fgets(line, sizeof line, status))
        if (strncmp(line, key, strlen(key)) == 0) size = strtol(line + strlen(key), NULL, 10);
    fclose(status);
    return size;
}

/* Parts of the copied file are given back as soon as their numbers are read. */
Test(adapter, reading_takes_little_more_memory_than_the_numbers) {
    struct model_config config;
    struct writing w = {.architecture = "qwen3",
                        .targets = 0x7f,
                        .rank = 512,
                        .config = "{\"peft_type\":\"LORA\",\"r\":512,\"lora_alpha\":8}"};
    struct adapter *a;
    struct fault fault;
    read_config("qwen3", &config);
    write_adapter(&w, &config);
    malloc_trim(0);
    FILE *clear = fopen("/proc/self/clear_refs", "w");
    if (!clear || fputs("5", clear) < 0 || fclose(clear) != 0) cr_skip("no clear_refs");
    const long before = memory_of_process("VmRSS:");
    cr_assert_eq(read_as(&w, &config, false, MOST, &a, &fault), 0, "%s", fault.text);
    const long peak = memory_of_process("VmHWM:") - before, numbers = (long)(a->bytes >> 10);
    cr_expect(peak < numbers + numbers / 2, "%ld KiB for %ld KiB of numbers", peak, numbers);
    adapter_close(a);
    remove_adapter(&w);
    model_config_close(&config);
}

Test(adapter, other_computations_are_refused_by_field) {
    static const struct {
        const char *fields, *field;
        int code;
    } rows[] = {
        {"\"use_dora\":true", "use_dora", ERR_UNSUPPORTED},
        {"\"bias\":\"all\"", "bias", ERR_UNSUPPORTED},
        {"\"modules_to_save\":[\"lm_head\"]", "modules_to_save", ERR_UNSUPPORTED},
        {"\"rank_pattern\":{\"q_proj\":2}", "rank_pattern", ERR_UNSUPPORTED},
        {"\"alpha_pattern\":{\"q_proj\":2}", "alpha_pattern", ERR_UNSUPPORTED},
        {"\"fan_in_fan_out\":true", "fan_in_fan_out", ERR_UNSUPPORTED},
        {"\"lora_bias\":true", "lora_bias", ERR_UNSUPPORTED},
        {"\"layer_replication\":[[0,1]]", "layer_replication", ERR_UNSUPPORTED},
        {"\"target_parameters\":[\"x\"]", "target_parameters", ERR_UNSUPPORTED},
        {"\"trainable_token_indices\":[1]", "trainable_token_indices", ERR_UNSUPPORTED},
        {"\"init_lora_weights\":\"pissa_niter_4\"", "init_lora_weights", ERR_UNSUPPORTED},
        {"\"r\":0", "r", ERR_INVALID},
        {"\"r\":1000000", "r", ERR_INVALID},
        {"\"r\":\"4\"", "r", ERR_INVALID},
        {"\"lora_alpha\":0", "lora_alpha", ERR_INVALID},
        {"\"lora_alpha\":-1", "lora_alpha", ERR_INVALID},
        {"\"peft_type\":\"LOHA\"", "peft_type", ERR_UNSUPPORTED},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char config[256];
        snprintf(config, sizeof config, "{\"peft_type\":\"LORA\",\"r\":4,\"lora_alpha\":8,%s}",
                 rows[i].fields);
        check_refused("qwen3", (struct writing){.targets = 1, .config = config}, false, MOST,
                      rows[i].code, rows[i].field);
    }
}

#define FIRST "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

Test(adapter, hostile_tensors_are_refused_by_name) {
    static const char missing[] = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight";
    static const char head[] = "base_model.model.lm_head.lora_A.weight";
    static const char magnitude[] =
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector";
    static const char behind[] = "base_model.model.model.layers.99.self_attn.q_proj.lora_A.weight";
    const struct writing one = {.targets = 1};
    struct writing w = one;
    w.extra = head;
    check_refused("qwen3", w, false, MOST, ERR_UNSUPPORTED, head);
    w.extra = magnitude;
    check_refused("qwen3", w, false, MOST, ERR_UNSUPPORTED, magnitude);
    w.extra = behind;
    check_refused("qwen3", w, false, MOST, ERR_UNSUPPORTED, behind);
    w = one;
    w.without = "layers.0.self_attn.q_proj.lora_B.weight";
    check_refused("qwen3", w, false, MOST, ERR_NOTFOUND, missing);
    w = one;
    w.rank = 5;
    check_refused("qwen3", w, false, MOST, ERR_INVALID, FIRST);
    w = one;
    w.transposed = true;
    check_refused("qwen3", w, false, MOST, ERR_INVALID, FIRST);
    w = one;
    w.poison = INFINITY;
    check_refused("qwen3", w, false, MOST, ERR_INVALID, FIRST);
    check_refused("qwen3", (struct writing){.targets = 0}, false, MOST, ERR_INVALID, "");
    check_refused("qwen3", one, false, 1000, ERR_LIMIT, "lora-memory");
}

Test(adapter, other_gguf_files_are_refused_by_key) {
    check_refused("qwen3", (struct writing){.targets = 1, .type = "model"}, true, MOST,
                  ERR_UNSUPPORTED, "general.type");
    check_refused("qwen3", (struct writing){.targets = 1, .architecture = "llama"}, true, MOST,
                  ERR_UNSUPPORTED, "general.architecture");
    check_refused("qwen3", (struct writing){.targets = 1, .architecture = "none"}, true, MOST,
                  ERR_UNSUPPORTED, "general.architecture");
    check_refused("qwen3", (struct writing){.targets = 1, .extra = "token_embd.weight.lora_a"},
                  true, MOST, ERR_UNSUPPORTED, "token_embd.weight.lora_a");
}

/* Parts of joined tensors, experts and latent attention are such products. */
Test(adapter, fused_and_expert_targets_are_refused_by_name) {
    check_refused("phi3", (struct writing){.targets = 1}, false, MOST, ERR_UNSUPPORTED, FIRST);
    check_refused("qwen3moe", (struct writing){.targets = 0x10}, false, MOST, ERR_UNSUPPORTED,
                  "base_model.model.model.layers.0.mlp.gate_proj.lora_A.weight");
    check_refused("deepseekv3", (struct writing){.targets = 4}, false, MOST, ERR_UNSUPPORTED,
                  "base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight");
}

Test(adapter, a_directory_without_files_is_refused) {
    struct model_config config;
    struct adapter *a;
    struct fault fault = {0};
    read_config("qwen3", &config);
    cr_expect_eq(adapter_read(&config, "/nowhere", MOST, &a, &fault), ERR_NOTFOUND);
    cr_expect_null(a);
    model_config_close(&config);
}

Test(adapter, lack_of_memory_leaves_nothing) {
    struct model_config config;
    struct writing w = {.architecture = "qwen3", .targets = 0x7f};
    bool failed = true;
    read_config("qwen3", &config);
    write_adapter(&w, &config);
    for (long n = 0; failed; n++) {
        struct adapter *a = NULL;
        struct fault fault;
        mem_fail_after(n);
        const int rc = read_as(&w, &config, false, MOST, &a, &fault);
        failed = !mem_fail_pending();
        mem_fail_after(-1);
        cr_assert(rc == 0 || (failed && rc == ERR_NOMEM && !a), "%ld: %d: %s", n, rc, fault.text);
        adapter_close(a);
    }
    remove_adapter(&w);
    model_config_close(&config);
}
