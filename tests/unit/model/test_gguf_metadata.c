/* The metadata of a GGUF file, read as a model configuration: the same as config.json gives, or a
 * refusal by the name of the key. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "kernels/number.h"
#include "model/config_gguf.h"
#include "model/internal.h"
#include "tests/unit/model/gguf_model.h"
#include "tests/unit/parts.h"

/* A file with nothing but an embedding and, `factors`, frequencies of the rotation. */
struct described {
    void (*more)(struct buf *file); /* further values */
    int values;
    bool factors;
    float later;              /* the factor from the 21st pair on; 0: 8 */
    const char *architecture; /* NULL: llama */
};

static int describe(const struct described *d, struct model_config *out, struct fault *fault) {
    static const int64_t embed[] = {D, VOCAB}, half[] = {HEAD / 2};
    static const char zeros[D * VOCAB * 4];
    char dir[] = "/tmp/keepd-meta-XXXXXX", path[64];
    struct buf file;
    struct weights *w = NULL;
    cr_assert_not_null(mkdtemp(dir));
    buf_open(&file, 1 << 20);
    put_head(&file, 3, 1 + d->factors, (uint64_t)(1 + GGUF_SIZES + d->values));
    const char *architecture = d->architecture ? d->architecture : "llama";
    put_text(&file, "general.architecture", architecture);
    gguf_put_sizes(&file, architecture, HEAD, false);
    if (d->more) d->more(&file);
    put_tensor(&file, "token_embd.weight", 2, embed, GGUF_FORMAT_F32, 0);
    if (d->factors) put_tensor(&file, "rope_freqs.weight", 1, half, GGUF_FORMAT_F32, sizeof zeros);
    put_padding(&file, 32);
    buf_add(&file, zeros, sizeof zeros);
    for (int i = 0; d->factors && i < HEAD / 2; i++)
        put(&file, number_bits(i < 20 ? 1 : d->later > 0 ? d->later : 8), 4);
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
Test(gguf_metadata, the_end_of_a_message_in_a_channel_ends_no_turn) {
    struct model_config c;
    struct fault fault;
    const struct described plain = {put_channel_tokens, 3, .factors = false};
    cr_assert_eq(describe(&plain, &c, &fault), 0, "%s: %s", fault.field, fault.text);
    cr_expect_eq(c.eos_count, 2);
    cr_expect(c.eos[0] == 5 && c.eos[1] == 4);
    model_config_close(&c);
}

Test(gguf_metadata, metadata_is_a_configuration) {
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

Test(gguf_metadata, frequencies_are_divided_by_the_tensor) {
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

Test(gguf_metadata, yarn) {
    struct model_config c;
    struct fault fault;
    cr_assert_eq(describe(&(struct described){put_yarn, 3, .factors = false}, &c, &fault), 0,
                 "%s: %s", fault.field, fault.text);
    cr_expect_float_eq(c.rope_scale, 0.1 * log(4) + 1, 1e-6);
    cr_expect_float_eq(c.inv_freq[HEAD / 2 - 1], pow(500000, -62.0 / HEAD) / 4, 1e-9);
    model_config_close(&c);
}

static void put_yarn_of_the_context(struct buf *file) {
    put_yarn(file);
    put_f32(file, "llama.rope.scaling.yarn_beta_fast", 0);
}

/* The file says 128 positions, of which 32 times 4 were scaled; without that length, 128 times 4.
 */
static void put_yarn_without_length(struct buf *file) {
    put_text(file, "llama.rope.scaling.type", "yarn");
    put_f32(file, "llama.rope.scaling.factor", 4);
    put_u32(file, "llama.rope.scaling.original_context_length", 0);
}

Test(gguf_metadata, yarn_extends_the_positions) {
    struct model_config c;
    struct fault fault;
    cr_assert_eq(
        describe(&(struct described){put_yarn_of_the_context, 4, .factors = false}, &c, &fault), 0,
        "%s: %s", fault.field, fault.text);
    cr_expect_eq(c.max_positions, 128);
    model_config_close(&c);
    cr_assert_eq(
        describe(&(struct described){put_yarn_without_length, 3, .factors = false}, &c, &fault), 0,
        "%s: %s", fault.field, fault.text);
    cr_expect_eq(c.max_positions, 512);
    model_config_close(&c);
}

/* Files state what a model is without by 0, and by -1 where it is a token, also as 2^32 - 1. */
static void put_nothing(struct buf *file) {
    put_f32(file, "llama.rope.scaling.factor", 0);
    put_text(file, "llama.rope.scaling.type", "linear");
    put_u32(file, "llama.expert_count", 0);
    put_u32(file, "llama.expert_used_count", 0);
    put_u32(file, "llama.attention.sliding_window", 0);
    put_f32(file, "llama.attn_logit_softcapping", 0);
    put_f32(file, "llama.final_logit_softcapping", 0);
    put_f32(file, "llama.logit_scale", 0);
    put_f32(file, "llama.embedding_scale", 0);
    put_f32(file, "llama.residual_scale", 0);
    put_u32(file, "tokenizer.ggml.bos_token_id", UINT32_MAX);
    put_int(file, "tokenizer.ggml.eot_token_id", GGUF_I32, 4, -1);
    put_int(file, "tokenizer.ggml.eom_token_id", GGUF_U64, 8, -1);
    put_u32(file, "tokenizer.ggml.eos_token_id", 2);
}

Test(gguf_metadata, none) {
    struct model_config c;
    struct fault fault;
    cr_assert_eq(describe(&(struct described){put_nothing, 14, .factors = false}, &c, &fault), 0,
                 "%s: %s", fault.field, fault.text);
    cr_expect(c.experts == 0 && c.attend_cap == 0 && c.logit_cap == 0 && c.logit_scale == 1 &&
              c.embed_scale == 1);
    cr_expect(c.rotary_dims == HEAD && c.inv_freq[0] == 1 && c.max_positions == 128);
    cr_expect(c.bos == -1 && c.eos_count == 1 && c.eos[0] == 2);
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
static void put_sections(struct buf *file) {
    put_u32(file, "llama.rope.dimension_sections", 8);
}
static void put_text_count(struct buf *file) {
    put_text(file, "tokenizer.ggml.bos_token_id", "1");
}
static void put_far_token(struct buf *file) {
    put_u32(file, "tokenizer.ggml.eos_token_id", VOCAB);
}

/* Gemma 4: a layer with a window and narrow heads, and one without, whose values are its keys. */
static void put_kinds(struct buf *file) {
    put_u32(file, "gemma4.attention.key_length_swa", 32);
    put_u32(file, "gemma4.attention.value_length_swa", 32);
    put_u32(file, "gemma4.attention.sliding_window", 16);
    put_u32(file, "gemma4.embedding_length_per_layer_input", 0);
    put_f32(file, "gemma4.rope.freq_base_swa", 10000);
    put_array(file, "gemma4.attention.sliding_window_pattern", GGUF_BOOL, LAYERS);
    put(file, 1, 1), put(file, 0, 1);
}
static void put_kinds_and_experts(struct buf *file) {
    put_kinds(file);
    put_u32(file, "gemma4.expert_count", 4);
}
static void put_kinds_of_values(struct buf *file) {
    put_u32(file, "gemma4.attention.key_length_swa", 32);
    put_u32(file, "gemma4.attention.value_length_swa", 64);
}
static void put_kinds_that_share(struct buf *file) {
    put_kinds(file);
    put_u32(file, "gemma4.attention.shared_kv_layers", LAYERS);
}

Test(gguf_metadata, layers_of_two_kinds) {
    struct model_config c;
    struct fault fault;
    const struct described d = {put_kinds, 6, true, 1e30f, "gemma4"};
    cr_assert_eq(describe(&d, &c, &fault), 0, "%s: %s", fault.field, fault.text);
    cr_expect_str_eq(c.family, "gemma4_text");
    cr_expect(c.per_layer[0].sliding_window == 16 && c.per_layer[0].head_dim == 32);
    cr_expect(c.per_layer[1].sliding_window == 0 && c.per_layer[1].head_dim == HEAD);
    cr_expect(c.per_layer[0].heads_kv == HEADS_KV && c.per_layer[1].heads_kv == HEADS_KV);
    cr_expect(!c.per_layer[0].keys_are_values && c.per_layer[1].keys_are_values);
    cr_expect_eq(c.each_embed, 0);
    for (int i = 0; i < HEAD / 2; i++)
        cr_expect_eq(c.inv_freq[i], i < 20 ? (float)pow(500000, -2.0 * i / HEAD) : 0, "%d", i);
    cr_expect_eq(c.inv_freq_local[1], (float)pow(10000, -2.0 / 32));
    model_config_close(&c);
}

Test(gguf_metadata, metadata_is_refused_by_its_key) {
    static const struct {
        struct described d;
        int rc;
        const char *field;
    } rows[] = {
        {{put_experts, 1, .factors = false}, ERR_INVALID, "llama.expert_used_count"},
        {{put_shared_experts, 3, .factors = false}, ERR_UNSUPPORTED, "llama.expert_shared_count"},
        {{put_expert_scale, 1, .factors = false}, ERR_UNSUPPORTED, "llama.expert_weights_scale"},
        {{put_softcap, 1, .factors = false}, ERR_UNSUPPORTED, "llama.attn_logit_softcapping"},
        {{put_dynamic, 1, .factors = false}, ERR_UNSUPPORTED, "llama.rope.scaling.type"},
        {{put_longrope, 1, .factors = false}, ERR_UNSUPPORTED, "llama.rope.scaling.type"},
        {{put_attention_factor, 1, .factors = false},
         ERR_UNSUPPORTED,
         "llama.rope.scaling.attn_factor"},
        {{put_sections, 1, .factors = false}, ERR_UNSUPPORTED, "llama.rope.dimension_sections"},
        {{put_yarn, 3, .factors = true}, ERR_UNSUPPORTED, "rope_freqs.weight"},
        {{put_text_count, 1, .factors = false}, ERR_INVALID, "tokenizer.ggml.bos_token_id"},
        {{put_far_token, 1, .factors = false}, ERR_INVALID, "tokenizer.ggml.eos_token_id"},
        {{put_kinds, 6, true, 8, "gemma4"}, ERR_UNSUPPORTED, "rope_freqs.weight"},
        {{put_kinds, 6, false, 0, "gemma4"}, ERR_NOTFOUND, "rope_freqs.weight"},
        {{put_kinds_and_experts, 7, true, 1e30f, "gemma4"},
         ERR_INVALID,
         "gemma4.expert_used_count"},
        {{put_kinds_of_values, 2, true, 1e30f, "gemma4"},
         ERR_UNSUPPORTED,
         "gemma4.attention.value_length_swa"},
        {{NULL, 0, .architecture = "nemotron_h"},
         ERR_INVALID,
         "nemotron_h.attention.head_count_kv"},
        {{put_kinds_that_share, 7, true, 1e30f, "gemma4"},
         ERR_INVALID,
         "gemma4.attention.shared_kv_layers"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct model_config c;
        struct fault fault;
        cr_expect_eq(describe(&rows[i].d, &c, &fault), rows[i].rc, "%s: %s", fault.field,
                     fault.text);
        cr_expect_str_eq(fault.field, rows[i].field, "%s", fault.text);
    }
}
