/* Models in GGUF files: numbers in blocks against an independent implementation, the same weights
 * as file and as directory with the same bits, and tensors that are refused by name. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "kernels/cpu/cpu.h"
#include "model/base_digest.h"
#include "model/blocks.h"
#include "model/internal.h"
#include "model/save_gates.h"
#include "tests/golden/replay.h"
#include "tests/sample.h"
#include "tests/unit/model/gguf_model.h"
#include "tests/unit/parts.h"

/* ---- Blocks ---- */

static size_t unhex(const char *text, uint8_t *out, size_t room) {
    size_t size = strlen(text) / 2;
    cr_assert(size <= room);
    for (size_t i = 0; i < size; i++) {
        unsigned byte;
        cr_assert_eq(sscanf(text + 2 * i, "%2x", &byte), 1);
        out[i] = (uint8_t)byte;
    }
    return size;
}

/* Each block of the file as a row of a weight of the CPU, and back as float32. */
static void through_backend(const uint8_t *from, size_t count, uint32_t format, float *out) {
    const struct cpu_options options = {.threads = 1};
    struct block made[64];
    struct kern *kern;
    struct kern_weight *w;
    size_t bytes;
    struct kern_matrix m = {
        .data = made, .rows = (int64_t)count, .cols = gguf_format_block(format, &bytes)};
    block_maker_of(format, &m.dtype)(from, count, made);
    cr_assert_eq(cpu_open(&options, &kern, NULL), 0);
    cr_assert_eq(kern->ops->weight_load(kern, &m, 1, KERN_SHARD_NONE, &w, NULL), 0);
    for (int32_t row = 0; row < (int32_t)count; row++)
        kern->ops->embed(kern, out + row * m.cols, w, 1, &row, 1);
    kern->ops->weight_free(kern, w);
    kern->ops->close(kern);
}

/* Zeros may differ in their signs: the package has none in MXFP4. */
static bool same_numbers(const float *found, const uint8_t *numbers, size_t count) {
    for (size_t i = 0; i < count; i++) {
        float number;
        memcpy(&number, numbers + i * sizeof number, sizeof number);
        if (found[i] != number) return false;
    }
    return true;
}

/* tests/data/gguf/make_blocks.py made the numbers with the package `gguf`. */
Test(gguf, blocks_as_the_python_package_reads_them) {
    char *text;
    size_t size;
    cJSON *tree;
    const cJSON *item;
    const struct json_limits limits = {.bytes = 1 << 20, .depth = 8};
    int count = 0;
    cr_assert_eq(
        file_read(KEEPD_SOURCE_DIR "/tests/data/gguf/blocks.json", 1 << 20, &text, &size, NULL), 0);
    cr_assert_eq(json_parse(text, size, &limits, &tree, NULL), 0);
    cJSON_ArrayForEach(item, tree) {
        static uint8_t blocks[4096], numbers[16384];
        static float found[4096];
        uint32_t format = (uint32_t)json_get(item, "format")->valuedouble;
        const char *name = json_get(item, "name")->valuestring;
        size_t bytes, expected = unhex(json_get(item, "numbers")->valuestring, numbers, 16384);
        size_t length = unhex(json_get(item, "blocks")->valuestring, blocks, sizeof blocks);
        int block = gguf_format_block(format, &bytes);
        cr_assert_str_eq(gguf_format_name(format), name);
        cr_assert_eq(length / bytes * (size_t)block * sizeof(float), expected, "%s", name);
        block_reader_of(format)(blocks, length / bytes, found);
        cr_expect(same_numbers(found, numbers, expected / sizeof *found), "%s", name);
        through_backend(blocks, length / bytes, format, found);
        cr_expect(memcmp(found, numbers, expected) == 0, "%s on the CPU", name);
        count++;
    }
    cr_expect_eq(count, 14);
    json_free(tree);
    mem_free(text);
}

/* ---- The same weights both ways ---- */

static void put_gemma2(struct buf *file) {
    put_f32(file, "gemma2.attn_logit_softcapping", 1.5f);
    put_f32(file, "gemma2.final_logit_softcapping", 2.5f);
    put_u32(file, "gemma2.attention.sliding_window", 16);
}

static void put_gemma3(struct buf *file) {
    put_u32(file, "gemma3.attention.sliding_window", 16);
    put_u32(file, "gemma3.attention.sliding_window_pattern", 2);
    put_f32(file, "gemma3.rope.freq_base_swa", 5000);
    put_text(file, "gemma3.rope.scaling.type", "linear");
    put_f32(file, "gemma3.rope.scaling.factor", 4);
}

static void put_granite(struct buf *file) {
    put_f32(file, "granite.embedding_scale", 12);
    put_f32(file, "granite.residual_scale", 0.25f);
    put_f32(file, "granite.attention.scale", 0.5f);
    put_f32(file, "granite.logit_scale", 4);
}

static void put_phi3(struct buf *file) {
    put_u32(file, "phi3.attention.sliding_window", 16);
    put_u32(file, "phi3.rope.scaling.original_context_length", 32);
    put_f32(file, "phi3.rope.scaling.attn_factor", 1.25f);
}

/* The first layer has the window. */
static void put_layers(struct buf *file, const char *key) {
    put_array(file, key, GGUF_BOOL, LAYERS);
    for (int i = 0; i < LAYERS; i++) put(file, i == 0, 1);
}

static void put_olmo3(struct buf *file) {
    put_u32(file, "olmo2.attention.sliding_window", 16);
    put_layers(file, "olmo2.attention.sliding_window_pattern");
    put_text(file, "olmo2.rope.scaling.type", "yarn");
    put_f32(file, "olmo2.rope.scaling.factor", 4);
    put_u32(file, "olmo2.rope.scaling.original_context_length", 32);
    put_f32(file, "olmo2.rope.scaling.attn_factor", 1.25f);
}

static void put_exaone4(struct buf *file) {
    put_u32(file, "exaone4.attention.sliding_window", 16);
    put_layers(file, "exaone4.attention.sliding_window_pattern");
}

static void put_sections(struct buf *file, const char *architecture) {
    char key[64];
    snprintf(key, sizeof key, "%s.rope.dimension_sections", architecture);
    put_array(file, key, GGUF_I32, 4);
    for (int i = 0; i < 4; i++) put(file, (uint64_t)(i < 2 ? 16 : 0), 4);
}

static void put_qwen2vl(struct buf *file) {
    put_sections(file, "qwen2vl");
}

static void put_qwen3vl(struct buf *file) {
    put_sections(file, "qwen3vl");
}

static void put_mistral3(struct buf *file) {
    put_text(file, "mistral3.rope.scaling.type", "yarn");
    put_f32(file, "mistral3.rope.scaling.factor", 16);
    put_u32(file, "mistral3.rope.scaling.original_context_length", 8);
    put_f32(file, "mistral3.rope.scaling.yarn_log_multiplier", 1);
    put_f32(file, "mistral3.attention.temperature_scale", 0.5f);
}

#define FIRST_LAYER                                                                                \
    "\"sliding_window\":16,\"layer_types\":[\"sliding_attention\",\"full_attention\"]"

static const struct family families[] = {
    {"llama", "LlamaForCausalLM", .permuted = true},
    {"qwen2", "Qwen2ForCausalLM", .bias = true},
    {"qwen3", "Qwen3ForCausalLM", .qk_norm = true},
    {"qwen3moe", "Qwen3MoeForCausalLM", .qk_norm = true,
     .experts = {"mlp.gate", "mlp.experts.%d.gate_proj", "mlp.experts.%d.up_proj",
                 "mlp.experts.%d.down_proj"}},
    {"llama", "MixtralForCausalLM", .permuted = true,
     .experts = {"block_sparse_moe.gate", "block_sparse_moe.experts.%d.w1",
                 "block_sparse_moe.experts.%d.w3", "block_sparse_moe.experts.%d.w2"}},
    {"phi3", "Phi3ForCausalLM", .fused = true, .factors = true, .put = put_phi3, .puts = 3,
     .json = "\"sliding_window\":16"},
    {"gemma2", "Gemma2ForCausalLM", .post_norms = true, .plus_one = true, .put = put_gemma2,
     .puts = 3,
     .json = "\"sliding_window\":16,\"attn_logit_softcapping\":1.5,\"query_pre_attn_scalar\":64,"
             "\"final_logit_softcapping\":2.5"},
    {"gemma3", "Gemma3ForCausalLM", .post_norms = true, .plus_one = true, .qk_norm = true,
     .put = put_gemma3, .puts = 5,
     .json = FIRST_LAYER ",\"query_pre_attn_scalar\":64,\"rope_local_base_freq\":5000,"
                         "\"rope_scaling\":{\"rope_type\":\"linear\",\"factor\":4}"},
    {"granite", "GraniteForCausalLM", .permuted = true, .put = put_granite, .puts = 4,
     .json = "\"embedding_multiplier\":12,\"residual_multiplier\":0.25,"
             "\"attention_multiplier\":0.5,\"logits_scaling\":4"},
    {"smollm3", "SmolLM3ForCausalLM", .permuted = true},
    {"olmo2", "Olmo2ForCausalLM", .qk_norm = true, .wide_norms = true, .post_norms = true,
     .no_pre_norms = true},
    {"olmo2", "Olmo3ForCausalLM", .qk_norm = true, .wide_norms = true, .post_norms = true,
     .no_pre_norms = true, .put = put_olmo3, .puts = 6,
     .json = FIRST_LAYER ",\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":4,"
                         "\"original_max_position_embeddings\":32,\"attention_factor\":1.25}"},
    {"exaone4", "Exaone4ForCausalLM", .qk_norm = true, .post_norms = true, .no_pre_norms = true,
     .put = put_exaone4, .puts = 2, .json = FIRST_LAYER},
    {"exaone4", "Exaone4ForCausalLM", .qk_norm = true, .post_norms = true, .no_pre_norms = true,
     .json = "\"sliding_window\":null"},
    {"ernie4_5", "Ernie4_5ForCausalLM", .permuted = false},
    {"seed_oss", "SeedOssForCausalLM", .bias = true, .after_attention = true,
     .json = "\"attention_bias\":true"},
    {"chatglm", "GlmForCausalLM", .bias = true, .glm = true, .half_rotates = true,
     .json = "\"attention_bias\":true"},
    {"chatglm", "GlmForCausalLM", .glm = true, .fused_file = true, .half_rotates = true,
     .json = "\"attention_bias\":true"},
    {"glm4", "Glm4ForCausalLM", .glm = true, .post_norms = true, .half_rotates = true,
     .json = "\"attention_bias\":false"},
    {"olmoe", "OlmoeForCausalLM", .unnormalised = true, .qk_norm = true, .wide_norms = true,
     .experts = {"mlp.gate", "mlp.experts.%d.gate_proj", "mlp.experts.%d.up_proj",
                 "mlp.experts.%d.down_proj"}},
    {"qwen2vl", "Qwen2_5_VLForConditionalGeneration", .bias = true, .put = put_qwen2vl, .puts = 1,
     .json = "\"rope_scaling\":{\"type\":\"mrope\",\"mrope_section\":[16,16,0]}"},
    {"qwen3vl", "Qwen3VLForConditionalGeneration", .qk_norm = true, .put = put_qwen3vl, .puts = 1},
    {"mistral3", "Ministral3ForCausalLM", .permuted = true, .put = put_mistral3, .puts = 5,
     .json = "\"sliding_window\":null,\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":16,"
             "\"original_max_position_embeddings\":8,\"mscale\":1,\"mscale_all_dim\":1,"
             "\"llama_4_scaling_beta\":0.5}"},
    {"mistral3", "Ministral3ForCausalLM", .permuted = true, /* Mistral Small 3: a plain rotation */
     .json = "\"sliding_window\":null,\"rope_scaling\":{\"rope_type\":\"default\"}"},
};

static int open_model(const char *dir, const char *name, const char *path, bool exact,
                      struct replay *out, struct fault *fault) {
    char model[128];
    snprintf(model, sizeof model, "%s%s", dir, name);
    const struct replay_options options = {.dir = model,
                                           .path = path,
                                           .exact = exact,
                                           .threads = 2,
                                           .kv_dtype = KERN_F32,
                                           .rows_max = IDS,
                                           .positions_max = IDS,
                                           .slots = 1};
    *fault = (struct fault){0};
    return replay_open(&options, out, fault);
}

static void run(const char *dir, const char *name, const char *path, bool exact, float *logits) {
    struct replay replay;
    struct fault fault;
    int32_t ids[IDS];
    const int whole = IDS;
    cr_assert_eq(open_model(dir, name, path, exact, &replay, &fault), 0, "%s%s: %s: %s", dir, name,
                 fault.field, fault.text);
    for (int i = 0; i < IDS; i++) ids[i] = (i * 37 + 11) % VOCAB;
    cr_assert_eq(replay_run(&replay, 0, ids, IDS, &whole, 1, logits), 0);
    replay_close(&replay);
}

/* Gates name their base by these, however it is stored. */
static void check_digests(const char *dir, const char *what) {
    struct base_digest found[2];
    for (int i = 0; i < 2; i++) {
        struct model_config config = {0};
        struct weights *weights = NULL;
        struct fault fault = {0};
        char path[128];
        snprintf(path, sizeof path, "%s%s", dir, i ? "/model.gguf" : "");
        cr_assert_eq(model_read(path, 0, false, &config, &weights, &fault), 0, "%s", fault.text);
        cr_assert_eq(base_digest(&config, weights, &found[i]), 0);
        weights_close(weights);
        model_config_close(&config);
    }
    cr_expect_str_eq(found[0].vectors, found[1].vectors, "%s", what);
    cr_expect_str_eq(found[0].matrices, found[1].matrices, "%s", what);
}

/* A sample (tests/sample.h) has each case on one path, the next case on the next path: test_blocks
 * has every kind of block on each. */
static void check_both_ways(size_t family, uint32_t format, bool tied) {
    static const char *const paths[] = {"reference", "portable", "neon", "avx2", "avx512", "amx"};
    static float file[IDS * VOCAB], directory[IDS * VOCAB];
    struct making m = {
        .family = &families[family], .format = format, .tied = tied, .random = format};
    char dir[64];
    gguf_model_make(dir, &m);
    check_digests(dir, families[family].class);
    static size_t cases; /* every test is a process of its own */
    size_t available = 0, number = cases++;
    for (size_t i = 0; i < 5; i++) available += replay_path_available(paths[i]);
    for (size_t i = 0; i < 5; i++) {
        if (!replay_path_available(paths[i])) continue;
        if (test_leaves_out(number++, available)) continue;
        run(dir, "/model.gguf", paths[i], true, file);
        run(dir, "", paths[i], true, directory);
        cr_expect(isfinite(file[0]) && file[0] != file[1]);
        cr_expect(memcmp(file, directory, sizeof file) == 0, "%s of %s on %s",
                  families[family].architecture, gguf_format_name(format), paths[i]);
        run(dir, "/model.gguf", paths[i], false, file);
        double moved = 0, size = 0;
        for (int j = 0; j < IDS * VOCAB; j++) {
            moved += pow(file[j] - directory[j], 2);
            size += pow(directory[j], 2);
        }
        const bool blocks = block_maker_of(format, &(enum kern_dtype){0}) != NULL;
        const double bf16 = format == GGUF_FORMAT_BF16 ? 4e-4 : 0; /* avx512 may round to it */
        cr_expect(blocks ? moved > 0 && moved < 1.6e-3 * size : moved <= bf16 * size,
                  "%s of %s on %s: rounded activations move logits by %g of their size",
                  families[family].architecture, gguf_format_name(format), paths[i],
                  sqrt(moved / size));
    }
    gguf_model_remove(dir);
}

Test(gguf, formats_answer_as_their_numbers_in_a_directory) {
    static const uint32_t formats[] = {GGUF_FORMAT_F32,   GGUF_FORMAT_F16,    GGUF_FORMAT_BF16,
                                       GGUF_FORMAT_Q4_0,  GGUF_FORMAT_Q4_1,   GGUF_FORMAT_Q5_0,
                                       GGUF_FORMAT_Q5_1,  GGUF_FORMAT_Q8_0,   GGUF_FORMAT_Q4_K,
                                       GGUF_FORMAT_Q5_K,  GGUF_FORMAT_Q6_K,   GGUF_FORMAT_Q2_K,
                                       GGUF_FORMAT_Q3_K,  GGUF_FORMAT_IQ4_NL, GGUF_FORMAT_IQ4_XS,
                                       GGUF_FORMAT_MXFP4, GGUF_FORMAT_NVFP4};
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++)
        check_both_ways(0, formats[i], i % 2 != 0);
}

Test(gguf, families_answer_as_their_directory) {
    check_both_ways(1, GGUF_FORMAT_BF16, false);
    check_both_ways(1, GGUF_FORMAT_Q4_K, true);
    check_both_ways(2, GGUF_FORMAT_F32, true);
    check_both_ways(2, GGUF_FORMAT_Q6_K, false);
    check_both_ways(3, GGUF_FORMAT_F16, true);
    check_both_ways(3, GGUF_FORMAT_Q4_K, false);
    check_both_ways(4, GGUF_FORMAT_BF16, false);
    check_both_ways(4, GGUF_FORMAT_Q8_0, true);
    for (size_t family = 5; family < sizeof families / sizeof families[0]; family++)
        check_both_ways(family, family % 2 ? GGUF_FORMAT_Q4_K : GGUF_FORMAT_BF16, family % 3 > 0);
}

/* ---- Split files ---- */

static void write_split(const char *dir, const char *name, int number, int count, int promised,
                        const char *tensor) {
    static const int64_t shape[] = {2};
    struct buf file;
    buf_open(&file, 4096);
    put_head(&file, 3, 1, 3);
    put_int(&file, "split.no", GGUF_U16, 2, number);
    put_int(&file, "split.count", GGUF_U16, 2, count);
    put_int(&file, "split.tensors.count", GGUF_I32, 4, promised);
    put_tensor(&file, tensor, 1, shape, GGUF_FORMAT_F32, 0);
    put_padding(&file, 32);
    put(&file, (uint64_t)number, 8);
    write_parts(dir, name, &file, 1);
    buf_close(&file);
}

static int open_split(const char *dir, const char *name, struct weights **out,
                      struct fault *fault) {
    char path[128];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    *fault = (struct fault){0};
    return weights_open(path, out, fault);
}

#define FIRST  "m-00001-of-00002.gguf"
#define SECOND "m-00002-of-00002.gguf"

Test(gguf, split_files_are_one_table) {
    char dir[] = "/tmp/keepd-split-XXXXXX", path[128];
    struct weights *w = NULL;
    struct fault fault;
    cr_assert_not_null(mkdtemp(dir));
    write_split(dir, FIRST, 0, 2, 2, "a");
    cr_expect_eq(open_split(dir, FIRST, &w, &fault), ERR_NOTFOUND);
    write_split(dir, SECOND, 1, 2, 2, "b");
    cr_assert_eq(open_split(dir, FIRST, &w, &fault), 0, "%s: %s", fault.field, fault.text);
    cr_expect_eq(weights_count(w), 2);
    cr_expect_eq(*(const char *)weights_find(w, "b")->data, 1);
    weights_close(w);
    cr_expect_eq(open_split(dir, SECOND, &w, &fault), ERR_INVALID);
    cr_expect_not_null(strstr(fault.text, "name the first, ...-00001-of-00002.gguf"));
    write_split(dir, SECOND, 0, 2, 2, "b");
    cr_expect_eq(open_split(dir, FIRST, &w, &fault), ERR_MALFORMED);
    cr_expect_str_eq(fault.field, "split.no");
    write_split(dir, SECOND, 1, 2, 2, "a");
    cr_expect_eq(open_split(dir, FIRST, &w, &fault), ERR_MALFORMED);
    cr_expect_str_eq(fault.text, "is in two files");
    write_split(dir, FIRST, 0, 2, 3, "c");
    cr_expect_eq(open_split(dir, FIRST, &w, &fault), ERR_MALFORMED);
    cr_expect_str_eq(fault.field, "split.tensors.count");
    write_split(dir, "whole.gguf", 0, 2, 2, "a");
    cr_expect_eq(open_split(dir, "whole.gguf", &w, &fault), ERR_INVALID);
    static const char *const names[] = {FIRST, SECOND, "whole.gguf", ""};
    for (size_t i = 0; i < 4; i++) {
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        (void)remove(path);
    }
}

/* ---- Gates ---- */

static void give_zeros(void *arg, int layer, float *w1, float *b1, float *last, float *bias) {
    (void)arg, (void)layer;
    *b1 = 0;
    memset(w1, 0, D * sizeof *w1);
    memset(last, 0, HEADS_KV * sizeof *last);
    memset(bias, 0, HEADS_KV * sizeof *bias);
}

Test(gguf, gates_are_found_beside_the_file_by_its_name) {
    struct making m = {.family = &families[0], .format = GGUF_FORMAT_F32};
    struct save_gates gates = {.header = gates_header_unknown, .d_model = D, .layer = give_zeros};
    struct save_files files;
    struct fault fault = {0};
    struct replay replay;
    char dir[64], path[128], beside[128];
    gguf_model_make(dir, &m);
    snprintf(path, sizeof path, "%s/model.gguf", dir);
    snprintf(beside, sizeof beside, "%s/model.gates.safetensors", dir);
    gates.header.width = 1;
    gates.header.layers = LAYERS;
    gates.header.heads = HEADS_KV;
    cr_assert_eq(base_digest_of(path, 0, &gates.header.base, &fault), 0, "%s", fault.text);
    cr_assert_eq(save_files_open(&files, "out", beside, false, &fault), 0, "%s", fault.text);
    int rc = save_files_close(&files, save_gates(&files, &gates, &fault), &fault);
    cr_assert_eq(rc, 0, "%s", fault.text);
    const struct replay_options options = {.dir = path,
                                           .path = "reference",
                                           .threads = 1,
                                           .rows_max = 8,
                                           .positions_max = 8,
                                           .slots = 1};
    cr_assert_eq(replay_open(&options, &replay, &fault), 0, "%s: %s", fault.field, fault.text);
    cr_expect_eq(model_gates_from(replay.model), GATES_BESIDE);
    cr_expect_str_eq(model_gates_path(replay.model), beside);
    replay_close(&replay);
    (void)remove(beside);
    gguf_model_remove(dir);
}

/* ---- Refused ---- */

static void refused(struct making *m, int expected, const char *field, const char *text) {
    struct replay replay;
    struct fault fault;
    char dir[64];
    gguf_model_make(dir, m);
    int rc = open_model(dir, "/model.gguf", "portable", true, &replay, &fault);
    cr_expect_eq(rc, expected, "%s: %s", fault.field, fault.text);
    cr_expect_str_eq(fault.field, field);
    cr_expect_not_null(strstr(fault.text, text), "%s", fault.text);
    if (!rc) replay_close(&replay);
    gguf_model_remove(dir);
}

Test(gguf, a_tensor_that_is_missing) {
    struct making m = {.family = &families[0], .without = "blk.1.ffn_up.weight"};
    refused(&m, ERR_NOTFOUND, "blk.1.ffn_up.weight", "tensor is missing, expected [256, 256]");
    m = (struct making){.family = &families[0], .without = "token_embd.weight"};
    refused(&m, ERR_NOTFOUND, "token_embd.weight", "tensor is missing");
}

/* Biases in a file that says llama are taken; norms of q and k have no place there. */
Test(gguf, tensors_that_nobody_uses) {
    static const struct family odd = {"llama", "", .permuted = true, .qk_norm = true};
    struct making m = {.family = &odd};
    refused(&m, ERR_UNSUPPORTED, "blk.0.attn_q_norm.weight", "its metadata has no use for it");
}

Test(gguf, numbers_that_are_none) {
    static const uint32_t formats[] = {GGUF_FORMAT_F32, GGUF_FORMAT_F16, GGUF_FORMAT_BF16,
                                       GGUF_FORMAT_Q4_1, GGUF_FORMAT_Q4_K};
    for (size_t i = 0; i < 5; i++) {
        struct making m = {
            .family = &families[0], .format = formats[i], .nan = "blk.1.ffn_down.weight"};
        refused(&m, ERR_INVALID, "blk.1.ffn_down.weight", "element 0 is not a finite number");
    }
    struct making m = {.family = &families[0], .nan = "blk.0.ffn_norm.weight"};
    refused(&m, ERR_INVALID, "blk.0.ffn_norm.weight", "element 0 is not a finite number");
}

Test(gguf, another_architecture) {
    static const struct family other = {"gptneox", "", .bias = false};
    struct making m = {.family = &other};
    refused(&m, ERR_UNSUPPORTED, "general.architecture", "gptneox is not supported");
}

Test(gguf, a_type_that_is_not_read) {
    struct making m = {.family = &families[0], .format = 16}; /* IQ2_XXS, any bytes */
    refused(&m, ERR_UNSUPPORTED, "token_embd.weight", "type IQ2_XXS is not supported: F32");
}
