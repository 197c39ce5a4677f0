/* A random model as a GGUF file and as a directory. Tensors are made once and added to both. */
#include "tests/unit/model/gguf_model.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/number.h"
#include "model/blocks.h"
#include "tests/unit/parts.h"

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
        uint8_t high; /* byte of a scale: what multiplies it makes numbers of about one size */
    } scales[] = {{GGUF_FORMAT_Q4_0, {0, -1}, 0x14},   {GGUF_FORMAT_Q4_1, {0, 2}, 0x14},
                  {GGUF_FORMAT_Q5_0, {0, -1}, 0x14},   {GGUF_FORMAT_Q5_1, {0, 2}, 0x14},
                  {GGUF_FORMAT_Q8_0, {0, -1}, 0x14},   {GGUF_FORMAT_Q4_K, {0, 2}, 0x14},
                  {GGUF_FORMAT_Q5_K, {0, 2}, 0x14},    {GGUF_FORMAT_Q6_K, {208, -1}, 0x04},
                  {GGUF_FORMAT_Q3_K, {108, -1}, 0x14}, {GGUF_FORMAT_Q2_K, {80, 82}, 0x1c},
                  {GGUF_FORMAT_IQ4_NL, {0, -1}, 0x14}, {GGUF_FORMAT_IQ4_XS, {0, -1}, 0x00}};
    size_t bytes;
    (void)gguf_format_block(format, &bytes);
    for (size_t i = 0; i < count * bytes; i++) out[i] = (uint8_t)random_bits(m);
    for (size_t b = 0; format == GGUF_FORMAT_NVFP4 && b < count; b++)
        for (size_t i = 0; i < 4; i++) out[b * bytes + i] = (uint8_t)(8 + random_bits(m) % 8);
    for (size_t b = 0; format == GGUF_FORMAT_MXFP4 && b < count; b++)
        out[b * bytes] = (uint8_t)(118 + random_bits(m) % 4);
    for (size_t s = 0; s < sizeof scales / sizeof scales[0]; s++) {
        for (int k = 0; scales[s].format == format && k < 2 && scales[s].at[k] >= 0; k++)
            for (size_t b = 0; b < count; b++) {
                out[b * bytes + (size_t)scales[s].at[k]] = (uint8_t)random_bits(m);
                out[b * bytes + (size_t)scales[s].at[k] + 1] = scales[s].high;
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
    const bool plain = m->plain && !strcmp(m->plain, gguf);
    const uint32_t format = plain ? GGUF_FORMAT_F32 : m->format;
    struct matrix from = random_matrix(m, format, (size_t)rows, (size_t)cols);
    char *ordered = malloc((size_t)rows * from.row_bytes);
    for (int r = 0; r < rows; r++) {
        int place = r % HEAD, to = r;
        if (turned) to = r - place + place / 2 + (place % 2) * HEAD / 2;
        memcpy(ordered + (size_t)to * from.row_bytes, from.plain + (size_t)r * from.row_bytes,
               from.row_bytes);
    }
    add_gguf(m, gguf, 0, rows, cols, format, from.file, from.file_bytes);
    add_plain(m, hf, plain_type(format), rows, cols, ordered, (size_t)rows * from.row_bytes);
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

enum { QKV = (HEADS + 2 * HEADS_KV) * HEAD };

/* q, k and v with biases: one tensor in the file, three in the directory. */
static void add_qkv(struct making *m, int layer) {
    static const struct {
        const char *name;
        int rows;
    } parts[] = {
        {"q_proj", HEADS * HEAD}, {"k_proj", HEADS_KV * HEAD}, {"v_proj", HEADS_KV * HEAD}};
    struct matrix from = random_matrix(m, m->format, QKV, D);
    float bias[QKV];
    char name[96];
    for (int i = 0; i < QKV; i++) bias[i] = random_number(m);
    snprintf(name, sizeof name, "blk.%d.attn_qkv.weight", layer);
    add_gguf(m, name, 0, QKV, D, m->format, from.file, from.file_bytes);
    snprintf(name, sizeof name, "blk.%d.attn_qkv.bias", layer);
    add_gguf(m, name, 0, QKV, 0, GGUF_FORMAT_F32, (const uint8_t *)bias, sizeof bias);
    for (int i = 0, row = 0; i < 3; row += parts[i++].rows) {
        snprintf(name, sizeof name, "model.layers.%d.self_attn.%s.weight", layer, parts[i].name);
        add_plain(m, name, plain_type(m->format), parts[i].rows, D,
                  from.plain + (size_t)row * from.row_bytes,
                  (size_t)parts[i].rows * from.row_bytes);
        snprintf(name, sizeof name, "model.layers.%d.self_attn.%s.bias", layer, parts[i].name);
        add_plain(m, name, "F32", parts[i].rows, 0, (const char *)(bias + row),
                  (size_t)parts[i].rows * sizeof *bias);
    }
    free(from.file), free(from.plain);
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
        {"attn_qkv", "self_attn.qkv_proj", QKV, D, false},
        {"ffn_up", "mlp.gate_up_proj", 2 * FF, D, false},
    };
    enum { ALL = sizeof matrices / sizeof matrices[0] };
    const bool before = !m->family->no_pre_norms, behind = m->family->post_norms;
    const int q_norm = m->family->wide_norms ? HEADS * HEAD : HEAD;
    const int k_norm = m->family->wide_norms ? HEADS_KV * HEAD : HEAD;
    char gguf[64], hf[96];
#define NAMES(g, h, kind)                                                                          \
    (snprintf(gguf, sizeof gguf, "blk.%d.%s.%s", layer, g, kind),                                  \
     snprintf(hf, sizeof hf, "model.layers.%d.%s.%s", layer, h, kind))
    const bool apart = !m->family->fused && !m->family->fused_file;
    const bool dense = !m->family->experts[0], joined = m->family->fused || m->family->glm;
    const bool wanted[ALL] = {apart,
                              apart,
                              apart,
                              true,
                              dense && !joined,
                              dense && !joined,
                              dense,
                              m->family->fused,
                              dense && joined};
    if (!dense) add_experts(m, layer);
    if (m->family->fused_file) add_qkv(m, layer);
    for (size_t i = 0; i < ALL; i++) {
        if (!wanted[i]) continue;
        NAMES(matrices[i].gguf, matrices[i].hf, "weight");
        add_matrix(m, gguf, hf, matrices[i].rows, matrices[i].cols,
                   matrices[i].turned && m->family->permuted);
        NAMES(matrices[i].gguf, matrices[i].hf, "bias");
        if (m->family->bias && i < 3) add_vector(m, gguf, hf, matrices[i].rows, 0);
    }
    NAMES("attn_norm", "input_layernorm", "weight");
    if (before) add_vector(m, gguf, hf, D, 1);
    const bool glm = m->family->glm, named_apart = behind && !glm;
    NAMES(m->family->after_attention ? "post_attention_norm" : "ffn_norm",
          named_apart ? "pre_feedforward_layernorm" : "post_attention_layernorm", "weight");
    if (before) add_vector(m, gguf, hf, D, 1);
    NAMES("post_attention_norm", glm ? "post_self_attn_layernorm" : "post_attention_layernorm",
          "weight");
    if (behind) add_vector(m, gguf, hf, D, 1);
    NAMES("post_ffw_norm", glm ? "post_mlp_layernorm" : "post_feedforward_layernorm", "weight");
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

void gguf_put_sizes(struct buf *file, const char *architecture, int rotated, bool experts) {
    const struct {
        const char *key;
        uint32_t value;
    } sizes[] = {{"block_count", LAYERS},
                 {"context_length", 128},
                 {"embedding_length", D},
                 {"feed_forward_length", FF},
                 {"attention.head_count", HEADS},
                 {"attention.head_count_kv", HEADS_KV},
                 {"attention.key_length", HEAD},
                 {"attention.value_length", HEAD},
                 {"rope.dimension_count", (uint32_t)rotated},
                 {"expert_count", experts ? EXPERTS : 0},
                 {"expert_used_count", USED},
                 {"expert_feed_forward_length", FF}};
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

static void write_gguf(struct making *m, const char *dir) {
    struct buf parts[2];
    buf_open(&parts[0], 1 << 20);
    const bool experts = m->family->experts[0];
    put_head(&parts[0], 3, (uint64_t)m->tensors,
             (uint64_t)(1 + GGUF_SIZES + (experts ? 3 : 0) + m->family->puts));
    put_text(&parts[0], "general.architecture", m->family->architecture);
    gguf_put_sizes(&parts[0], m->family->architecture, m->family->half_rotates ? HEAD / 2 : HEAD,
                   experts);
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

void gguf_model_make(char dir[64], struct making *m) {
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

void gguf_model_remove(const char *dir) {
    static const char *const names[] = {"model.gguf", "model.safetensors", "config.json", ""};
    char path[128];
    for (size_t i = 0; i < 4; i++) {
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        (void)remove(path);
    }
}
