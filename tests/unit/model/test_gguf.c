/* Models in GGUF files: numbers in blocks against an independent implementation, the same weights
 * as file and as directory with the same bits, and what is refused by name. */
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
#include "kernels/number.h"
#include "model/base_digest.h"
#include "model/blocks.h"
#include "model/config_gguf.h"
#include "model/internal.h"
#include "tests/golden/replay.h"
#include "tests/unit/gguf_file.h"

/* ---- Blocks -------------------------------------------------------------------------------- */

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
        cr_expect(memcmp(found, numbers, expected) == 0, "%s", name);
        count++;
    }
    cr_expect_eq(count, 8);
    json_free(tree);
    mem_free(text);
}

/* ---- The same weights both ways ------------------------------------------------------------ */

enum {
    EXPERTS = 3,
    USED = 2,
    LAYERS = 2,
    D = 256,
    FF = 256,
    HEADS = 4,
    HEADS_KV = 2,
    HEAD = 64,
    VOCAB = 64,
    IDS = 40
};

struct family {
    const char *architecture, *class;
    bool permuted, bias, qk_norm;
    bool fused;        /* q, k and v in one tensor, gate and up in another */
    bool post_norms;   /* norms of the blocks' outputs; `no_pre_norms`: and none of their inputs */
    bool unnormalised; /* experts: norm_topk_prob is false */
    bool no_pre_norms, wide_norms, plus_one; /* plus_one: a directory has the norms less 1 */
    bool factors;                            /* longrope's two tensors */
    void (*put)(struct buf *file);           /* further metadata, `puts` values */
    int puts;
    const char *json;       /* the same in config.json */
    const char *experts[4]; /* names in a directory: router, gate, up, down; NULL: a dense family */
};

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
    {"olmoe", "OlmoeForCausalLM", .unnormalised = true, .qk_norm = true, .wide_norms = true,
     .experts = {"mlp.gate", "mlp.experts.%d.gate_proj", "mlp.experts.%d.up_proj",
                 "mlp.experts.%d.down_proj"}},
};

struct making {
    const struct family *family;
    uint32_t format;
    bool tied;
    const char *without, *nan; /* names in the GGUF file: left out; with an element that is none */
    uint64_t random;
    struct buf infos, data;  /* parts of the GGUF file */
    struct buf header, area; /* parts of model.safetensors */
    struct buf factors;      /* part of config.json */
    int tensors;
};

static uint32_t random_bits(struct making *m) {
    m->random = m->random * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(m->random >> 33);
}

static float random_number(struct making *m) {
    return ((float)random_bits(m) * 0x1p-31f - 0.5f) * 0.2f;
}

/* Bytes of a block at random, but for its scales. */
static void random_blocks(struct making *m, uint32_t format, uint8_t *out, size_t count) {
    static const struct {
        uint32_t format;
        int at[2];
    } scales[] = {{GGUF_FORMAT_Q4_0, {0, -1}}, {GGUF_FORMAT_Q4_1, {0, 2}},
                  {GGUF_FORMAT_Q5_0, {0, -1}}, {GGUF_FORMAT_Q5_1, {0, 2}},
                  {GGUF_FORMAT_Q8_0, {0, -1}}, {GGUF_FORMAT_Q4_K, {0, 2}},
                  {GGUF_FORMAT_Q5_K, {0, 2}},  {GGUF_FORMAT_Q6_K, {208, -1}}};
    size_t bytes;
    (void)gguf_format_block(format, &bytes);
    for (size_t i = 0; i < count * bytes; i++) out[i] = (uint8_t)random_bits(m);
    for (size_t s = 0; s < sizeof scales / sizeof scales[0]; s++) {
        for (int k = 0; scales[s].format == format && k < 2 && scales[s].at[k] >= 0; k++)
            for (size_t b = 0; b < count; b++) { /* about 2^-10; Q6_K multiplies it by up to 128 */
                out[b * bytes + (size_t)scales[s].at[k]] = (uint8_t)random_bits(m);
                out[b * bytes + (size_t)scales[s].at[k] + 1] =
                    format == GGUF_FORMAT_Q6_K ? 0x04 : 0x14;
            }
    }
}

/* A matrix: as the file has it, and its numbers as the type that a directory has them in. */
struct matrix {
    uint8_t *file;
    char *plain;
    size_t file_bytes, row_bytes;
};

static const char *plain_type(uint32_t format) {
    return format == GGUF_FORMAT_BF16 ? "BF16" : format == GGUF_FORMAT_F16 ? "F16" : "F32";
}

static struct matrix random_matrix(struct making *m, uint32_t format, size_t rows, size_t cols) {
    size_t bytes, count = rows * cols;
    size_t blocks = count / (size_t)gguf_format_block(format, &bytes);
    size_t size = strcmp(plain_type(format), "F32") == 0 ? 4 : 2;
    struct matrix out = {.file = calloc(count, 4), /* enough for any format */
                         .plain = malloc(count * size),
                         .file_bytes = blocks * bytes,
                         .row_bytes = cols * size};
    if (block_reader_of(format)) {
        random_blocks(m, format, out.file, blocks);
        block_reader_of(format)(out.file, blocks, (float *)(void *)out.plain);
        return out;
    }
    for (size_t i = 0; i < count; i++) {
        float number = random_number(m);
        uint16_t half = format == GGUF_FORMAT_BF16 ? number_to_bf16(number)
                                                   : (uint16_t)(0x2000 + random_bits(m) % 4096);
        memcpy(out.file + i * size, size == 4 ? (void *)&number : (void *)&half, size);
    }
    memcpy(out.plain, out.file, count * size);
    return out;
}

/* `experts` above 0: as many matrices in one tensor. */
static void add_gguf(struct making *m, const char *name, int experts, int64_t rows, int64_t cols,
                     uint32_t format, const uint8_t *data, size_t bytes) {
    if (m->without && !strcmp(m->without, name)) return;
    const int64_t shape[3] = {cols ? cols : rows, rows, experts};
    put_tensor(&m->infos, name, (cols ? 2 : 1) + (experts ? 1 : 0), shape, format, m->data.size);
    buf_add(&m->data, data, bytes);
    if (m->nan && !strcmp(m->nan, name)) { /* the first number, or the first block's scale */
        size_t size;
        bool wide = gguf_format_block(format, &size) == 1 && size == 4;
        memcpy(m->data.data + m->data.size - bytes, wide ? "\0\0\x80\x7f" : "\xff\x7f",
               wide ? 4 : 2);
    }
    put_padding(&m->data, 32);
    m->tensors++;
}

static void add_plain(struct making *m, const char *name, const char *type, int64_t rows,
                      int64_t cols, const char *data, size_t bytes) {
    char shape[32];
    snprintf(shape, sizeof shape, cols ? "%lld,%lld" : "%lld", (long long)rows, (long long)cols);
    buf_fmt(&m->header, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}",
            m->header.size > 1 ? "," : "", name, type, shape, m->area.size, m->area.size + bytes);
    buf_add(&m->area, data, bytes);
}

/* `turned`: rows 2 i and 2 i + 1 of a head in the file are rows i and i + HEAD / 2. */
static void add_matrix(struct making *m, const char *gguf, const char *hf, int rows, int cols,
                       bool turned) {
    struct matrix from = random_matrix(m, m->format, (size_t)rows, (size_t)cols);
    char *ordered = malloc((size_t)rows * from.row_bytes);
    for (int r = 0; r < rows; r++) {
        int place = r % HEAD, to = r;
        if (turned) to = r - place + place / 2 + (place % 2) * HEAD / 2;
        memcpy(ordered + (size_t)to * from.row_bytes, from.plain + (size_t)r * from.row_bytes,
               from.row_bytes);
    }
    add_gguf(m, gguf, 0, rows, cols, m->format, from.file, from.file_bytes);
    add_plain(m, hf, plain_type(m->format), rows, cols, ordered, (size_t)rows * from.row_bytes);
    free(from.file), free(from.plain), free(ordered);
}

/* Converters add the 1 of Gemma's norms; a number about 1 less 1 is exact. */
static void add_vector(struct making *m, const char *gguf, const char *hf, int rows, float around) {
    float *numbers = calloc((size_t)rows, sizeof *numbers);
    for (int i = 0; i < rows; i++) numbers[i] = around + random_number(m);
    size_t bytes = (size_t)rows * sizeof *numbers;
    add_gguf(m, gguf, 0, rows, 0, GGUF_FORMAT_F32, (const uint8_t *)numbers, bytes);
    for (int i = 0; i < rows && m->family->plus_one; i++) numbers[i] -= 1;
    add_plain(m, hf, "F32", rows, 0, (const char *)numbers, bytes);
    free(numbers);
}

/* `hf` with a %d for the expert. */
static void add_stacked(struct making *m, const char *gguf, const char *hf, int rows, int cols) {
    struct matrix from = random_matrix(m, m->format, (size_t)EXPERTS * (size_t)rows, (size_t)cols);
    const size_t bytes = (size_t)rows * from.row_bytes;
    add_gguf(m, gguf, EXPERTS, rows, cols, m->format, from.file, from.file_bytes);
    for (int e = 0; e < EXPERTS; e++) {
        char name[96];
        const char *at = strstr(hf, "%d");
        snprintf(name, sizeof name, "%.*s%d%s", (int)(at - hf), hf, e, at + 2);
        add_plain(m, name, plain_type(m->format), rows, cols, from.plain + (size_t)e * bytes,
                  bytes);
    }
    free(from.file), free(from.plain);
}

static void add_experts(struct making *m, int layer) {
    static const struct {
        const char *gguf;
        int rows, cols;
    } matrices[] = {{"ffn_gate_inp", EXPERTS, D},
                    {"ffn_gate_exps", FF, D},
                    {"ffn_up_exps", FF, D},
                    {"ffn_down_exps", D, FF}};
    char gguf[64], hf[96];
    for (size_t i = 0; i < sizeof matrices / sizeof matrices[0]; i++) {
        snprintf(gguf, sizeof gguf, "blk.%d.%s.weight", layer, matrices[i].gguf);
        snprintf(hf, sizeof hf, "model.layers.%d.%s.weight", layer, m->family->experts[i]);
        if (i)
            add_stacked(m, gguf, hf, matrices[i].rows, matrices[i].cols);
        else
            add_matrix(m, gguf, hf, matrices[i].rows, matrices[i].cols, false);
    }
}

static void add_layer(struct making *m, int layer) {
    static const struct {
        const char *gguf, *hf;
        int rows, cols;
        bool turned;
    } matrices[] = {
        {"attn_q", "self_attn.q_proj", HEADS * HEAD, D, true},
        {"attn_k", "self_attn.k_proj", HEADS_KV * HEAD, D, true},
        {"attn_v", "self_attn.v_proj", HEADS_KV * HEAD, D, false},
        {"attn_output", "self_attn.o_proj", D, HEADS * HEAD, false},
        {"ffn_gate", "mlp.gate_proj", FF, D, false},
        {"ffn_up", "mlp.up_proj", FF, D, false},
        {"ffn_down", "mlp.down_proj", D, FF, false},
        {"attn_qkv", "self_attn.qkv_proj", (HEADS + 2 * HEADS_KV) * HEAD, D, false},
        {"attn_output", "self_attn.o_proj", D, HEADS * HEAD, false},
        {"ffn_up", "mlp.gate_up_proj", 2 * FF, D, false},
        {"ffn_down", "mlp.down_proj", D, FF, false},
    };
    enum { SPLIT = 7, ALL = sizeof matrices / sizeof matrices[0] };
    const bool before = !m->family->no_pre_norms, behind = m->family->post_norms;
    const int q_norm = m->family->wide_norms ? HEADS * HEAD : HEAD;
    const int k_norm = m->family->wide_norms ? HEADS_KV * HEAD : HEAD;
    char gguf[64], hf[96];
#define NAMES(g, h, kind)                                                                          \
    (snprintf(gguf, sizeof gguf, "blk.%d.%s.%s", layer, g, kind),                                  \
     snprintf(hf, sizeof hf, "model.layers.%d.%s.%s", layer, h, kind))
    const size_t first = m->family->fused ? SPLIT : 0;
    const size_t dense = m->family->experts[0] ? 4 : m->family->fused ? ALL : SPLIT;
    if (m->family->experts[0]) add_experts(m, layer);
    for (size_t i = first; i < dense; i++) {
        NAMES(matrices[i].gguf, matrices[i].hf, "weight");
        add_matrix(m, gguf, hf, matrices[i].rows, matrices[i].cols,
                   matrices[i].turned && m->family->permuted);
        NAMES(matrices[i].gguf, matrices[i].hf, "bias");
        if (m->family->bias && i < 3) add_vector(m, gguf, hf, matrices[i].rows, 0);
    }
    NAMES("attn_norm", "input_layernorm", "weight");
    if (before) add_vector(m, gguf, hf, D, 1);
    NAMES("ffn_norm", behind ? "pre_feedforward_layernorm" : "post_attention_layernorm", "weight");
    if (before) add_vector(m, gguf, hf, D, 1);
    NAMES("post_attention_norm", "post_attention_layernorm", "weight");
    if (behind) add_vector(m, gguf, hf, D, 1);
    NAMES("post_ffw_norm", "post_feedforward_layernorm", "weight");
    if (behind) add_vector(m, gguf, hf, D, 1);
    NAMES("attn_q_norm", "self_attn.q_norm", "weight");
    if (m->family->qk_norm) add_vector(m, gguf, hf, q_norm, 1);
    NAMES("attn_k_norm", "self_attn.k_norm", "weight");
    if (m->family->qk_norm) add_vector(m, gguf, hf, k_norm, 1);
#undef NAMES
}

/* longrope's factors: 1 + i / 16 for contexts within the original one, 2 + i / 16 beyond. */
static void add_factors(struct making *m, struct buf *config) {
    static const char *const names[] = {"short", "long"};
    for (int n = 0; n < 2; n++) {
        float numbers[HEAD / 2];
        char name[64];
        snprintf(name, sizeof name, "rope_factors_%s.weight", names[n]);
        for (int i = 0; i < HEAD / 2; i++) numbers[i] = (float)(n + 1) + (float)i / 16;
        add_gguf(m, name, 0, HEAD / 2, 0, GGUF_FORMAT_F32, (const uint8_t *)numbers,
                 sizeof numbers);
        buf_fmt(config, "%s\"%s_factor\":[", n ? "," : ",\"rope_scaling\":{", names[n]);
        for (int i = 0; i < HEAD / 2; i++)
            buf_fmt(config, "%s%.4f", i ? "," : "", (double)numbers[i]);
        buf_char(config, ']');
    }
    buf_fmt(config, ",\"rope_type\":\"longrope\",\"attention_factor\":1.25},"
                    "\"original_max_position_embeddings\":32");
}

static void put_sizes(struct buf *file, const char *architecture, bool experts) {
    const struct {
        const char *key;
        uint32_t value;
    } sizes[] = {{"block_count", LAYERS},         {"context_length", 128},
                 {"embedding_length", D},         {"feed_forward_length", FF},
                 {"attention.head_count", HEADS}, {"attention.head_count_kv", HEADS_KV},
                 {"attention.key_length", HEAD},  {"attention.value_length", HEAD},
                 {"rope.dimension_count", HEAD},  {"expert_count", experts ? EXPERTS : 0},
                 {"expert_used_count", USED},     {"expert_feed_forward_length", FF}};
    char key[64];
    for (size_t i = 0; i < (experts ? 12 : 9); i++) {
        snprintf(key, sizeof key, "%s.%s", architecture, sizes[i].key);
        put_u32(file, key, sizes[i].value);
    }
    snprintf(key, sizeof key, "%s.attention.layer_norm_rms_epsilon", architecture);
    put_f32(file, key, 1e-5f);
    snprintf(key, sizeof key, "%s.rope.freq_base", architecture);
    put_f32(file, key, 500000);
}
enum { VALUES = 12 };

static void write_parts(const char *dir, const char *name, const struct buf *parts, int count) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *file = fopen(path, "wb");
    cr_assert_not_null(file);
    for (int i = 0; i < count; i++)
        cr_assert_eq(fwrite(parts[i].data, 1, parts[i].size, file), parts[i].size);
    cr_assert_eq(fclose(file), 0);
}

static void write_gguf(struct making *m, const char *dir) {
    struct buf parts[2];
    buf_open(&parts[0], 1 << 20);
    const bool experts = m->family->experts[0];
    put_head(&parts[0], 3, (uint64_t)m->tensors,
             (uint64_t)(VALUES + (experts ? 3 : 0) + m->family->puts));
    put_text(&parts[0], "general.architecture", m->family->architecture);
    put_sizes(&parts[0], m->family->architecture, experts);
    if (m->family->put) m->family->put(&parts[0]);
    buf_add(&parts[0], m->infos.data, m->infos.size);
    put_padding(&parts[0], 32);
    parts[1] = m->data;
    write_parts(dir, "model.gguf", parts, 2);
    buf_close(&parts[0]);
}

static void write_directory(struct making *m, const char *dir) {
    struct buf parts[3], config;
    uint64_t size;
    buf_char(&m->header, '}');
    size = m->header.size;
    buf_open(&parts[0], 8);
    buf_add(&parts[0], &size, sizeof size);
    parts[1] = m->header;
    parts[2] = m->area;
    write_parts(dir, "model.safetensors", parts, 3);
    buf_close(&parts[0]);
    buf_open(&config, 4096);
    buf_fmt(&config,
            "{\"architectures\":[\"%s\"],\"hidden_size\":%d,\"intermediate_size\":%d,"
            "\"num_hidden_layers\":%d,\"num_attention_heads\":%d,\"num_key_value_heads\":%d,"
            "\"head_dim\":%d,\"vocab_size\":%d,\"max_position_embeddings\":128,"
            "\"rms_norm_eps\":1e-5,\"rope_theta\":500000,\"tie_word_embeddings\":%s%s%s%s%s%.*s}",
            m->family->class, D, FF, LAYERS, HEADS, HEADS_KV, HEAD, VOCAB,
            m->tied ? "true" : "false",
            m->family->experts[0] ? ",\"num_local_experts\":3,\"num_experts_per_tok\":2,"
                                    "\"moe_intermediate_size\":256,\"norm_topk_prob\":"
                                  : "",
            !m->family->experts[0]    ? ""
            : m->family->unnormalised ? "false"
                                      : "true",
            m->family->json ? "," : "", m->family->json ? m->family->json : "",
            (int)m->factors.size, m->factors.size ? m->factors.data : "");
    write_parts(dir, "config.json", &config, 1);
    buf_close(&config);
}

/* model.gguf and a directory's files, in a new directory. */
static void make(char dir[64], struct making *m) {
    struct buf *all[] = {&m->infos, &m->data, &m->header, &m->area, &m->factors};
    snprintf(dir, 64, "/tmp/keepd-gguf-XXXXXX");
    cr_assert_not_null(mkdtemp(dir));
    for (size_t i = 0; i < 5; i++) buf_open(all[i], (size_t)1 << 26);
    buf_char(&m->header, '{');
    add_matrix(m, "token_embd.weight", "model.embed_tokens.weight", VOCAB, D, false);
    add_vector(m, "output_norm.weight", "model.norm.weight", D, 1);
    if (!m->tied) add_matrix(m, "output.weight", "lm_head.weight", VOCAB, D, false);
    for (int l = 0; l < LAYERS; l++) add_layer(m, l);
    if (m->family->factors) add_factors(m, &m->factors);
    write_gguf(m, dir);
    write_directory(m, dir);
    for (size_t i = 0; i < 5; i++) buf_close(all[i]);
}

static void remove_all(const char *dir) {
    static const char *const names[] = {"model.gguf", "model.safetensors", "config.json", ""};
    char path[128];
    for (size_t i = 0; i < 4; i++) {
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        (void)remove(path);
    }
}

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

static void check_both_ways(size_t family, uint32_t format, bool tied) {
    static const char *const paths[] = {"reference", "portable", "avx2", "avx512", "amx"};
    static float file[IDS * VOCAB], directory[IDS * VOCAB];
    struct making m = {
        .family = &families[family], .format = format, .tied = tied, .random = format};
    char dir[64];
    make(dir, &m);
    check_digests(dir, families[family].class);
    for (size_t i = 0; i < 5; i++) {
        if (!replay_path_available(paths[i])) continue;
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
        bool rounded = block_maker_of(format, &(enum kern_dtype){0}) != NULL;
        cr_expect(rounded ? moved > 0 && moved < 1.6e-3 * size : moved == 0,
                  "%s of %s on %s: activations in int8 move logits by %g of their size",
                  families[family].architecture, gguf_format_name(format), paths[i],
                  sqrt(moved / size));
    }
    remove_all(dir);
}

Test(gguf, formats_answer_as_their_numbers_in_a_directory) {
    static const uint32_t formats[] = {GGUF_FORMAT_F32,  GGUF_FORMAT_F16,  GGUF_FORMAT_BF16,
                                       GGUF_FORMAT_Q4_0, GGUF_FORMAT_Q4_1, GGUF_FORMAT_Q5_0,
                                       GGUF_FORMAT_Q5_1, GGUF_FORMAT_Q8_0, GGUF_FORMAT_Q4_K,
                                       GGUF_FORMAT_Q5_K, GGUF_FORMAT_Q6_K};
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

/* ---- Split files --------------------------------------------------------------------------- */

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

/* ---- Metadata ------------------------------------------------------------------------------ */

/* A file with nothing but an embedding and, `factors`, frequencies of the rotation. */
struct described {
    void (*more)(struct buf *file); /* further values */
    int values;
    bool factors;
};

static int describe(const struct described *d, struct model_config *out, struct fault *fault) {
    static const int64_t embed[] = {D, VOCAB}, half[] = {HEAD / 2};
    static const char zeros[D * VOCAB * 4];
    char dir[] = "/tmp/keepd-meta-XXXXXX", path[64];
    struct buf file;
    struct weights *w = NULL;
    cr_assert_not_null(mkdtemp(dir));
    buf_open(&file, 1 << 20);
    put_head(&file, 3, 1 + d->factors, (uint64_t)(VALUES + d->values));
    put_text(&file, "general.architecture", "llama");
    put_sizes(&file, "llama", false);
    if (d->more) d->more(&file);
    put_tensor(&file, "token_embd.weight", 2, embed, GGUF_FORMAT_F32, 0);
    if (d->factors) put_tensor(&file, "rope_freqs.weight", 1, half, GGUF_FORMAT_F32, sizeof zeros);
    put_padding(&file, 32);
    buf_add(&file, zeros, sizeof zeros);
    for (int i = 0; d->factors && i < HEAD / 2; i++) put(&file, number_bits(i < 20 ? 1 : 8), 4);
    write_parts(dir, "m.gguf", &file, 1);
    snprintf(path, sizeof path, "%s/m.gguf", dir);
    *fault = (struct fault){0};
    cr_assert_eq(weights_open(path, &w, fault), 0, "%s", fault->text);
    int rc = model_config_from_gguf(w, 0, out, fault);
    weights_close(w);
    buf_close(&file);
    remove(path), rmdir(dir);
    return rc;
}

static void put_tokens(struct buf *file) {
    static const char *const tokens[] = {"a", "<s>", "</s>", "<|im_end|>", "<|eot_id|>", "<|end|>"};
    static const int types[] = {1, 3, 3, 3, 3, 1};
    put_array(file, "tokenizer.ggml.tokens", GGUF_STRING, 6);
    for (int i = 0; i < 6; i++) put_string(file, tokens[i]);
    put_array(file, "tokenizer.ggml.token_type", GGUF_I32, 6);
    for (int i = 0; i < 6; i++) put(file, (uint64_t)types[i], 4);
    put_u32(file, "tokenizer.ggml.bos_token_id", 1);
    put_u32(file, "tokenizer.ggml.eos_token_id", 2);
    put_u32(file, "tokenizer.ggml.eot_token_id", 4);
    put_f32(file, "general.sampling.temp", 0.5f);
}

static void put_channel_tokens(struct buf *file) {
    static const char *const tokens[] = {"a",       "<|start|>", "<|channel|>",
                                         "<|end|>", "<|call|>",  "<|return|>"};
    put_array(file, "tokenizer.ggml.tokens", GGUF_STRING, 6);
    for (int i = 0; i < 6; i++) put_string(file, tokens[i]);
    put_array(file, "tokenizer.ggml.token_type", GGUF_I32, 6);
    for (int i = 0; i < 6; i++) put(file, i ? 3 : 1, 4);
    put_u32(file, "tokenizer.ggml.eos_token_id", 5);
}

/* In answers with channels <|end|> ends one message of several. */
Test(gguf, the_end_of_a_message_in_a_channel_ends_no_turn) {
    struct model_config c;
    struct fault fault;
    const struct described plain = {put_channel_tokens, 3, .factors = false};
    cr_assert_eq(describe(&plain, &c, &fault), 0, "%s: %s", fault.field, fault.text);
    cr_expect_eq(c.eos_count, 2);
    cr_expect(c.eos[0] == 5 && c.eos[1] == 4);
    model_config_close(&c);
}

Test(gguf, metadata_is_a_configuration) {
    struct model_config c;
    struct fault fault;
    const struct described plain = {put_tokens, 6, .factors = false};
    cr_assert_eq(describe(&plain, &c, &fault), 0, "%s: %s", fault.field, fault.text);
    cr_expect_str_eq(c.family, "llama");
    cr_expect(c.layers == LAYERS && c.d_model == D && c.d_ff == FF && c.heads_q == HEADS &&
              c.heads_kv == HEADS_KV && c.head_dim == HEAD && c.vocab == VOCAB);
    cr_expect_eq(c.max_positions, 128);
    cr_expect_eq(c.rms_eps, 1e-5f);
    cr_expect(c.tied_embeddings && !c.qkv_bias && c.permuted_qk);
    cr_expect_eq(c.inv_freq[1], (float)pow(500000, -2.0 / HEAD));
    cr_expect_eq(c.bos, 1);
    cr_expect_eq(c.eos_count, 3, "what ends a turn, each once, no ordinary token");
    cr_expect(c.eos[0] == 2 && c.eos[1] == 4 && c.eos[2] == 3);
    cr_expect_eq(c.temperature, 0.5f);
    model_config_close(&c);
}

Test(gguf, frequencies_are_divided_by_the_tensor) {
    struct model_config plain, divided;
    struct fault fault;
    cr_assert_eq(describe(&(struct described){.factors = false}, &plain, &fault), 0);
    cr_assert_eq(describe(&(struct described){.factors = true}, &divided, &fault), 0, "%s: %s",
                 fault.field, fault.text);
    for (int i = 0; i < HEAD / 2; i++)
        cr_expect_eq(divided.inv_freq[i], plain.inv_freq[i] / (i < 20 ? 1 : 8));
    model_config_close(&plain);
    model_config_close(&divided);
}

static void put_yarn(struct buf *file) {
    put_text(file, "llama.rope.scaling.type", "yarn");
    put_f32(file, "llama.rope.scaling.factor", 4);
    put_u32(file, "llama.rope.scaling.original_context_length", 32);
}

Test(gguf, yarn) {
    struct model_config c;
    struct fault fault;
    cr_assert_eq(describe(&(struct described){put_yarn, 3, .factors = false}, &c, &fault), 0,
                 "%s: %s", fault.field, fault.text);
    cr_expect_float_eq(c.rope_scale, 0.1 * log(4) + 1, 1e-6);
    cr_expect_float_eq(c.inv_freq[HEAD / 2 - 1], pow(500000, -62.0 / HEAD) / 4, 1e-9);
    model_config_close(&c);
}

static void put_experts(struct buf *file) {
    put_u32(file, "llama.expert_count", 8);
}
static void put_shared_experts(struct buf *file) {
    put_u32(file, "llama.expert_count", 8);
    put_u32(file, "llama.expert_used_count", 2);
    put_u32(file, "llama.expert_shared_count", 1);
}
static void put_expert_scale(struct buf *file) {
    put_f32(file, "llama.expert_weights_scale", 2.5f);
}
static void put_softcap(struct buf *file) {
    put_f32(file, "llama.attn_logit_softcapping", 50);
}
static void put_dynamic(struct buf *file) {
    put_text(file, "llama.rope.scaling.type", "dynamic");
}
static void put_longrope(struct buf *file) {
    put_text(file, "llama.rope.scaling.type", "longrope");
}
static void put_attention_factor(struct buf *file) {
    put_f32(file, "llama.rope.scaling.attn_factor", 1.5f);
}
static void put_text_count(struct buf *file) {
    put_text(file, "tokenizer.ggml.bos_token_id", "1");
}
static void put_far_token(struct buf *file) {
    put_u32(file, "tokenizer.ggml.eos_token_id", VOCAB);
}

Test(gguf, metadata_is_refused_by_its_key) {
    static const struct {
        struct described d;
        int rc;
        const char *field;
    } rows[] = {
        {{put_experts, 1, false}, ERR_INVALID, "llama.expert_used_count"},
        {{put_shared_experts, 3, false}, ERR_UNSUPPORTED, "llama.expert_shared_count"},
        {{put_expert_scale, 1, false}, ERR_UNSUPPORTED, "llama.expert_weights_scale"},
        {{put_softcap, 1, false}, ERR_UNSUPPORTED, "llama.attn_logit_softcapping"},
        {{put_dynamic, 1, false}, ERR_UNSUPPORTED, "llama.rope.scaling.type"},
        {{put_longrope, 1, false}, ERR_UNSUPPORTED, "llama.rope.scaling.type"},
        {{put_attention_factor, 1, false}, ERR_UNSUPPORTED, "llama.rope.scaling.attn_factor"},
        {{put_yarn, 3, true}, ERR_UNSUPPORTED, "rope_freqs.weight"},
        {{put_text_count, 1, false}, ERR_INVALID, "tokenizer.ggml.bos_token_id"},
        {{put_far_token, 1, false}, ERR_INVALID, "tokenizer.ggml.eos_token_id"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct model_config c;
        struct fault fault;
        cr_expect_eq(describe(&rows[i].d, &c, &fault), rows[i].rc, "%s: %s", fault.field,
                     fault.text);
        cr_expect_str_eq(fault.field, rows[i].field, "%s", fault.text);
    }
}

/* ---- Refused ------------------------------------------------------------------------------- */

static void refused(struct making *m, int expected, const char *field, const char *text) {
    struct replay replay;
    struct fault fault;
    char dir[64];
    make(dir, m);
    int rc = open_model(dir, "/model.gguf", "portable", true, &replay, &fault);
    cr_expect_eq(rc, expected, "%s: %s", fault.field, fault.text);
    cr_expect_str_eq(fault.field, field);
    cr_expect_not_null(strstr(fault.text, text), "%s", fault.text);
    if (!rc) replay_close(&replay);
    remove_all(dir);
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
    struct making m = {.family = &families[0], .format = 23}; /* IQ4_XS, any bytes */
    refused(&m, ERR_UNSUPPORTED, "token_embd.weight", "type IQ4_XS is not supported: F32");
}
