/* gpt-oss as a GGUF file: the tiny model of tests/data is written as llama.cpp's converter writes
 * such a model, and must give the same bits as the directory that transformers was compared with.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "kernels/cpu/cpu.h"
#include "model/weights.h"
#include "tests/golden/replay.h"
#include "tests/unit/gguf_file.h"

#define DIRECTORY KEEPD_SOURCE_DIR "/tests/data/models/gptoss"

enum { LAYERS = 3, D = 64, FF = 64, EXPERTS = 5, BLOCK = 32, HALF = BLOCK / 2, IDS = 90 };

struct writing {
    struct weights *from;
    struct buf infos, data;
    int tensors;
};

static const struct tensor *find(const struct writing *w, const char *name) {
    const struct tensor *tensor = weights_find(w->from, name);
    cr_assert_not_null(tensor, "%s", name);
    return tensor;
}

/* The shape of `like` from its last size on, as GGUF orders sizes. */
static void add(struct writing *w, const char *name, const struct tensor *like, int64_t cols,
                int64_t rows, uint32_t format, const void *data, size_t bytes) {
    const int dims = like->dims > 3 ? 3 : like->dims;
    const int64_t shape[3] = {cols, rows, EXPERTS};
    put_tensor(&w->infos, name, dims, shape, format, w->data.size);
    buf_add(&w->data, data, bytes);
    put_padding(&w->data, 32);
    w->tensors++;
}

static void add_matrix(struct writing *w, const char *gguf, const char *hf) {
    const struct tensor *from = find(w, hf);
    add(w, gguf, from, from->shape[1], from->shape[0], GGUF_FORMAT_BF16, from->data, from->bytes);
}

/* Numbers `first`, `first + step`, ... of each of EXPERTS vectors, or the one vector whole.
 * Converters write vectors and the router as float32. */
static void add_vector(struct writing *w, const char *gguf, const char *hf, int first, int step) {
    const struct tensor *from = find(w, hf);
    const int length = (int)from->shape[from->dims - 1], count = (int)(from->bytes / 2);
    float numbers[EXPERTS * 2 * FF], taken[EXPERTS * 2 * FF];
    int kept = 0;
    cr_assert(count <= EXPERTS * 2 * FF && tensor_read_floats(from, 0, (size_t)count, numbers));
    for (int i = 0; i < count; i++)
        if (i % length % step == first) taken[kept++] = numbers[i];
    add(w, gguf, from, length / step, EXPERTS, GGUF_FORMAT_F32, taken,
        (size_t)kept * sizeof *taken);
}

/* A block is its scale and then the codes: of the first half of the numbers in the low halves of
 * the bytes, of the second half in the high ones. In a directory, neighbours share a byte. */
static void repack(const uint8_t *nibbles, uint8_t scale, uint8_t out[1 + HALF]) {
    uint8_t codes[BLOCK];
    for (int j = 0; j < HALF; j++) {
        codes[2 * j] = nibbles[j] & 15;
        codes[2 * j + 1] = nibbles[j] >> 4;
    }
    out[0] = scale;
    for (int j = 0; j < HALF; j++) out[1 + j] = (uint8_t)(codes[j] | codes[j + HALF] << 4);
}

static void add_experts(struct writing *w, const char *gguf, const char *hf, int layer, int first,
                        int step) {
    char name[96];
    snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%s_blocks", layer, hf);
    const struct tensor *blocks = find(w, name);
    snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%s_scales", layer, hf);
    const struct tensor *scales = find(w, name);
    const int rows = (int)blocks->shape[1], count = (int)blocks->shape[2];
    static uint8_t out[EXPERTS * 2 * FF * (D / BLOCK) * (1 + HALF)];
    size_t kept = 0;
    for (int row = 0; row < EXPERTS * rows; row++)
        for (int b = 0; row % rows % step == first && b < count; b++) {
            const size_t at = (size_t)row * (size_t)count + (size_t)b;
            repack((const uint8_t *)blocks->data + at * HALF, ((const uint8_t *)scales->data)[at],
                   out + kept);
            kept += 1 + HALF;
        }
    snprintf(name, sizeof name, "blk.%d.%s.weight", layer, gguf);
    add(w, name, blocks, (int64_t)count * BLOCK, rows / step, GGUF_FORMAT_MXFP4, out, kept);
}

static void add_layer(struct writing *w, int layer) {
    static const struct {
        const char *gguf, *hf;
        int first, step; /* step 0: a matrix as it is */
    } plain[] = {
        {"attn_q.weight", "self_attn.q_proj.weight", 0, 0},
        {"attn_k.weight", "self_attn.k_proj.weight", 0, 0},
        {"attn_v.weight", "self_attn.v_proj.weight", 0, 0},
        {"attn_output.weight", "self_attn.o_proj.weight", 0, 0},
        {"ffn_gate_inp.weight", "mlp.router.weight", 0, 1},
        {"attn_q.bias", "self_attn.q_proj.bias", 0, 1},
        {"attn_k.bias", "self_attn.k_proj.bias", 0, 1},
        {"attn_v.bias", "self_attn.v_proj.bias", 0, 1},
        {"attn_output.bias", "self_attn.o_proj.bias", 0, 1},
        {"attn_sinks.weight", "self_attn.sinks", 0, 1},
        {"ffn_gate_inp.bias", "mlp.router.bias", 0, 1},
        {"attn_norm.weight", "input_layernorm.weight", 0, 1},
        {"post_attention_norm.weight", "post_attention_layernorm.weight", 0, 1},
        {"ffn_gate_exps.bias", "mlp.experts.gate_up_proj_bias", 0, 2},
        {"ffn_up_exps.bias", "mlp.experts.gate_up_proj_bias", 1, 2},
        {"ffn_down_exps.bias", "mlp.experts.down_proj_bias", 0, 1},
    };
    for (size_t i = 0; i < sizeof plain / sizeof plain[0]; i++) {
        char gguf[96], hf[96];
        snprintf(gguf, sizeof gguf, "blk.%d.%s", layer, plain[i].gguf);
        snprintf(hf, sizeof hf, "model.layers.%d.%s", layer, plain[i].hf);
        if (plain[i].step)
            add_vector(w, gguf, hf, plain[i].first, plain[i].step);
        else
            add_matrix(w, gguf, hf);
    }
    add_experts(w, "ffn_gate_exps", "gate_up_proj", layer, 0, 2);
    add_experts(w, "ffn_up_exps", "gate_up_proj", layer, 1, 2);
    add_experts(w, "ffn_down_exps", "down_proj", layer, 0, 1);
}

static void put_metadata(struct buf *file) {
    put_text(file, "general.architecture", "gpt-oss");
    put_u32(file, "gpt-oss.block_count", LAYERS);
    put_u32(file, "gpt-oss.context_length", 1024);
    put_u32(file, "gpt-oss.embedding_length", D);
    put_u32(file, "gpt-oss.feed_forward_length", FF);
    put_u32(file, "gpt-oss.attention.head_count", 4);
    put_u32(file, "gpt-oss.attention.head_count_kv", 2);
    put_u32(file, "gpt-oss.attention.key_length", 16);
    put_u32(file, "gpt-oss.attention.value_length", 16);
    put_f32(file, "gpt-oss.attention.layer_norm_rms_epsilon", 1e-5f);
    put_u32(file, "gpt-oss.attention.sliding_window", 40);
    put_u32(file, "gpt-oss.expert_count", EXPERTS);
    put_u32(file, "gpt-oss.expert_used_count", 2);
    put_u32(file, "gpt-oss.expert_feed_forward_length", FF);
    put_f32(file, "gpt-oss.rope.freq_base", 150000);
    put_text(file, "gpt-oss.rope.scaling.type", "yarn");
    put_f32(file, "gpt-oss.rope.scaling.factor", 8);
    put_u32(file, "gpt-oss.rope.scaling.original_context_length", 64);
    put_f32(file, "gpt-oss.rope.scaling.yarn_beta_fast", 32);
    put_f32(file, "gpt-oss.rope.scaling.yarn_beta_slow", 1);
    put_u32(file, "tokenizer.ggml.eos_token_id", 511);
}
enum { VALUES = 21 };

static void write_model(const char *path) {
    struct writing w = {0};
    struct fault fault = {0};
    struct buf head;
    cr_assert_eq(weights_open(DIRECTORY, &w.from, &fault), 0, "%s: %s", fault.field, fault.text);
    buf_open(&w.infos, 1 << 20);
    buf_open(&w.data, 1 << 24);
    buf_open(&head, 1 << 20);
    add_matrix(&w, "token_embd.weight", "model.embed_tokens.weight");
    add_matrix(&w, "output.weight", "lm_head.weight");
    add_vector(&w, "output_norm.weight", "model.norm.weight", 0, 1);
    for (int l = 0; l < LAYERS; l++) add_layer(&w, l);
    put_head(&head, 3, (uint64_t)w.tensors, VALUES);
    put_metadata(&head);
    buf_add(&head, w.infos.data, w.infos.size);
    put_padding(&head, 32);
    FILE *file = fopen(path, "wb");
    cr_assert_not_null(file);
    cr_assert_eq(fwrite(head.data, 1, head.size, file), head.size);
    cr_assert_eq(fwrite(w.data.data, 1, w.data.size, file), w.data.size);
    cr_assert_eq(fclose(file), 0);
    buf_close(&w.infos);
    buf_close(&w.data);
    buf_close(&head);
    weights_close(w.from);
}

/* Returns the bytes of the weights. */
static size_t run(const char *model, const char *path, int ranks, float *logits) {
    struct replay replay;
    struct fault fault = {0};
    int32_t ids[IDS];
    const int splits[] = {41, 7};
    const struct replay_options options = {.dir = model,
                                           .path = path,
                                           .exact = true,
                                           .threads = 2,
                                           .ranks = ranks,
                                           .kv_dtype = KERN_F32,
                                           .rows_max = IDS,
                                           .positions_max = IDS,
                                           .slots = 1};
    cr_assert_eq(replay_open(&options, &replay, &fault), 0, "%s: %s: %s", model, fault.field,
                 fault.text);
    for (int i = 0; i < IDS; i++) ids[i] = (i * 37 + 11) % replay.vocab;
    cr_assert_eq(replay_run(&replay, 0, ids, IDS, splits, 2, logits), 0);
    const size_t bytes = model_weight_bytes(replay.model);
    replay_close(&replay);
    return bytes;
}

/* The file has routers in float32, the directory in bf16. On the amx path products with bf16 round
 * activations to 16 bits and those with float32 do not, so there the bits are not the same. */
static void check_same(const char *path, const float *file, const float *directory) {
    if (strcmp(path, "amx") != 0) {
        cr_expect(memcmp(file, directory, IDS * 512 * sizeof *file) == 0, "%s", path);
        return;
    }
    for (int i = 0; i < IDS * 512; i++) /* NaN fails */
        cr_expect(fabs((double)file[i] - directory[i]) <= 1e-3, "%d: %g, %g", i, (double)file[i],
                  (double)directory[i]);
}

Test(gguf_gptoss, file_answers_as_its_directory) {
    static const char *const paths[] = {"reference", "portable", "neon", "avx2", "avx512", "amx"};
    static float file[IDS * 512], directory[IDS * 512];
    char dir[] = "/tmp/keepd-gptoss-XXXXXX", model[64];
    cr_assert_not_null(mkdtemp(dir));
    snprintf(model, sizeof model, "%s/model.gguf", dir);
    write_model(model);
    for (size_t i = 0; i < sizeof paths / sizeof paths[0]; i++) {
        if (!replay_path_available(paths[i])) continue;
        const size_t bytes = run(model, paths[i], 1, file);
        cr_expect_lt(run(DIRECTORY, paths[i], 1, directory), bytes); /* a router in bf16 */
        cr_expect(isfinite(file[0]) && file[0] != file[1]);
        check_same(paths[i], file, directory);
    }
    (void)remove(model);
    rmdir(dir);
}

/* Experts stay in 4.25 bits for each number. A quarter of 64 inputs would cut a block, so with four
 * ranks `down` becomes bf16, which has the same numbers but sums them in another order. */
Test(gguf_gptoss, experts_stay_in_four_bits) {
    static float one[IDS * 512], four[IDS * 512];
    const size_t numbers = (size_t)LAYERS * EXPERTS * D * FF;
    const size_t split = run(DIRECTORY, "portable", 2, one);
    cr_expect_eq(run(DIRECTORY, "portable", 4, four) - split, numbers * 2 - numbers * 17 / 32);
    for (int i = 0; i < IDS * 512; i++) /* NaN fails */
        cr_expect(fabs((double)one[i] - four[i]) <= 1e-4, "%d: %g, %g", i, (double)one[i],
                  (double)four[i]);
}
