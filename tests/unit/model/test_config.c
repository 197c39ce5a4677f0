#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "config_parse.h"

Test(model_config, llama_defaults) {
    struct model_config c;
    struct fault fault;
    cr_assert_eq(parse_llama("", &c, &fault), 0, "%s: %s", fault.field, fault.text);
    cr_assert_str_eq(c.family, "llama");
    cr_assert(c.layers == 3 && c.d_model == 64 && c.d_ff == 96 && c.vocab == 128);
    cr_assert(c.heads_q == 4 && c.heads_kv == 2 && c.head_dim == 16);
    cr_assert(!c.qkv_bias && !c.o_bias && !c.qk_norm && !c.tied_embeddings);
    cr_assert_eq(c.max_positions, 4096);
    cr_assert_float_eq(c.rms_eps, 1e-5f, 1e-12f);
    cr_assert(c.bos == -1 && c.eos_count == 0 && c.top_k == -1);
    cr_assert(isnan(c.temperature) && isnan(c.top_p) && isnan(c.min_p) && isnan(c.repetition));
    cr_assert_eq(c.dtype, KERN_F32);
    cr_assert_eq(c.rope_scale, 1.0f);
    for (int j = 0; j < 8; j++)
        cr_assert_float_eq(c.inv_freq[j], (float)pow(10000, -j / 8.0), 1e-9);
    model_config_close(&c);
}

Test(model_config, families_differ_in_norms_biases_and_head_size) {
    struct model_config c;
    struct fault fault;
    cr_assert_eq(parse_with("", "Qwen3ForCausalLM", "qwen3", NULL, &c, &fault), 0);
    cr_assert(c.qk_norm && !c.qkv_bias && !c.o_bias);
    cr_assert_eq(c.head_dim, 128, "the class default of Qwen3 is 128, found %d", c.head_dim);
    model_config_close(&c);

    cr_assert_eq(parse_with("\"head_dim\": 32,", "Qwen3ForCausalLM", "qwen3", NULL, &c, &fault), 0);
    cr_assert_eq(c.head_dim, 32);
    model_config_close(&c);

    cr_assert_eq(
        parse_with("\"attention_bias\": false,", "Qwen2ForCausalLM", "qwen2", NULL, &c, &fault), 0);
    cr_assert(c.qkv_bias && !c.o_bias && !c.qk_norm, "Qwen2 always has q, k, v biases");
    cr_assert_eq(c.head_dim, 16);
    model_config_close(&c);

    cr_assert_eq(
        parse_llama("\"attention_bias\": true, \"tie_word_embeddings\": true,", &c, &fault), 0);
    cr_assert(c.qkv_bias && c.o_bias && c.tied_embeddings);
    model_config_close(&c);
}

Test(model_config, both_spellings_of_dtype) {
    struct model_config c;
    struct fault fault;
    cr_assert_eq(parse_llama("\"torch_dtype\": \"bfloat16\",", &c, &fault), 0);
    cr_assert_eq(c.dtype, KERN_BF16);
    model_config_close(&c);
    cr_assert_eq(parse_llama("\"dtype\": \"float16\", \"torch_dtype\": null,", &c, &fault), 0);
    cr_assert_eq(c.dtype, KERN_F16);
    model_config_close(&c);
}

Test(model_config, unused_windows_are_ignored) {
    struct model_config c;
    struct fault fault;
    const char *text = "\"use_sliding_window\": false, \"sliding_window\": 64,"
                       "\"max_window_layers\": 3, \"layer_types\": [\"full_attention\", "
                       "\"full_attention\", \"full_attention\"],";
    cr_assert_eq(parse_with(text, "Qwen2ForCausalLM", "qwen2", NULL, &c, &fault), 0);
    model_config_close(&c);
}

static void check_windows(const char *text, const char *architecture, const char *type,
                          const int windows[3]) {
    struct model_config c;
    struct fault fault;
    cr_assert_eq(parse_with(text, architecture, type, NULL, &c, &fault), 0, "%s: %s", fault.field,
                 fault.text);
    for (int i = 0; i < 3; i++)
        cr_expect_eq(c.per_layer[i].sliding_window, windows[i], "%s: %d", text, i);
    model_config_close(&c);
}

Test(model_config, windows_of_layers) {
    check_windows("\"sliding_window\": 64,", "MistralForCausalLM", "mistral", (int[]){64, 64, 64});
    check_windows("\"sliding_window\": null,", "MistralForCausalLM", "mistral", (int[]){0, 0, 0});
    check_windows("\"sliding_window\": 64, \"use_sliding_window\": true, \"max_window_layers\": 1,",
                  "Qwen2ForCausalLM", "qwen2", (int[]){0, 64, 64});
    check_windows("\"sliding_window\": 64, \"use_sliding_window\": true, \"layer_types\": "
                  "[\"sliding_attention\", \"full_attention\", \"sliding_attention\"],",
                  "Qwen3ForCausalLM", "qwen3", (int[]){64, 0, 64});
    check_windows("", "LlamaForCausalLM", "llama", (int[]){0, 0, 0});
    check_windows("", "MistralForCausalLM", "mistral", (int[]){4096, 4096, 4096}); /* the class's */
}

Test(model_config, windows_that_make_no_sense_are_refused) {
    static const struct {
        const char *text, *field;
    } cases[] = {
        {"\"use_sliding_window\": true,", "sliding_window"},
        {"\"sliding_window\": -1,", "sliding_window"},
        {"\"layer_types\": [\"full_attention\"],", "layer_types"},
        {"\"layer_types\": [\"full_attention\", \"sliding_attention\", \"full_attention\"],",
         "layer_types"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model_config c;
        struct fault fault;
        cr_assert_neq(parse_with(cases[i].text, "Qwen3ForCausalLM", "qwen3", NULL, &c, &fault), 0);
        cr_assert_str_eq(fault.field, cases[i].field, "%s: %s", cases[i].text, fault.field);
    }
}

/* Null is no cap; an absent one is the class's. */
Test(model_config, soft_caps) {
    struct model_config c;
    struct fault fault;
    const char *gelu = "\"hidden_activation\": \"gelu_pytorch_tanh\",";
    cr_assert_eq(parse_with(gelu, "Gemma2ForCausalLM", "gemma2", NULL, &c, &fault), 0, "%s: %s",
                 fault.field, fault.text);
    cr_expect_eq(c.attend_cap, 50);
    cr_expect_eq(c.logit_cap, 30);
    cr_expect(c.per_layer[0].sliding_window == 4096 && c.per_layer[1].sliding_window == 0 &&
              c.per_layer[2].sliding_window == 4096 && !c.per_layer[0].local);
    cr_expect(c.pre_norms && c.post_norms && c.tied_embeddings && c.norm_offset == 1);
    model_config_close(&c);
    cr_assert_eq(parse_with("\"attn_logit_softcapping\": null, \"final_logit_softcapping\": 20,",
                            "Gemma2ForCausalLM", "gemma2", NULL, &c, &fault),
                 0, "%s: %s", fault.field, fault.text);
    cr_expect(c.attend_cap == 0 && c.logit_cap == 20);
    model_config_close(&c);
    cr_assert_eq(parse_with("\"attn_logit_softcapping\": -1,", "Gemma2ForCausalLM", "gemma2", NULL,
                            &c, &fault),
                 ERR_INVALID);
    cr_expect_str_eq(fault.field, "attn_logit_softcapping");
}

/* Every spelling of none in the fields that may have it: 0, null, false and empty lists are none.
 */
Test(model_config, none_in_every_spelling) {
    static const char *const fields[] = {
        "num_key_value_heads",
        "head_dim",
        "quantization",
        "quantization_config",
        "text_config",
        "logit_scale",
        "n_routed_experts",
        "n_shared_experts",
        "shared_expert_intermediate_size",
        "clip_qkv",
        "query_pre_attn_scalar",
        "rope_local_base_freq",
        "sliding_window",
        "sliding_window_pattern",
        "layer_types",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "no_rope_layers",
        "no_rope_layer_interval",
        "embedding_multiplier",
        "residual_multiplier",
        "attention_multiplier",
        "logits_scaling",
        "attention_out_bias",
        "swiglu_alpha",
        "swiglu_limit",
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "rope_scaling",
        "rope_parameters",
        "original_max_position_embeddings",
    };
    static const char *const spellings[] = {"null", "0", "0.0", "false", "[]", "{}"};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        for (size_t k = 0; k < sizeof spellings / sizeof spellings[0]; k++) {
            struct model_config c;
            struct fault fault;
            char text[128];
            snprintf(text, sizeof text, "\"%s\": %s,", fields[i], spellings[k]);
            cr_assert_eq(parse_llama(text, &c, &fault), 0, "%s %s: %s", text, fault.field,
                         fault.text);
            cr_expect(c.head_dim == 16 && c.experts == 0 && c.per_layer[0].sliding_window == 0 &&
                      c.per_layer[0].rotated && c.attend_cap == 0 && c.rope_scale == 1);
            cr_expect_eq(c.heads_kv, i ? 2 : 4);
            model_config_close(&c);
        }
    }
}

Test(model_config, none_where_the_family_has_a_default) {
    struct model_config c;
    struct fault fault;
    check_windows("\"sliding_window\": 0,", "MistralForCausalLM", "mistral", (int[]){0, 0, 0});
    check_windows("\"sliding_window\": 64, \"layer_types\": [],", "MistralForCausalLM", "mistral",
                  (int[]){64, 64, 64});
    cr_assert_eq(parse_with("\"hidden_activation\": \"gelu_pytorch_tanh\", "
                            "\"attn_logit_softcapping\": 0.0, \"query_pre_attn_scalar\": null,",
                            "Gemma2ForCausalLM", "gemma2", NULL, &c, &fault),
                 0, "%s: %s", fault.field, fault.text);
    cr_expect(c.attend_cap == 0 && c.logit_cap == 30 && c.attend_scale == 0.0625f);
    model_config_close(&c);
    cr_assert_eq(parse_with("\"no_rope_layers\": [], \"no_rope_layer_interval\": 2,",
                            "SmolLM3ForCausalLM", "smollm3", NULL, &c, &fault),
                 0, "%s: %s", fault.field, fault.text);
    cr_expect(c.per_layer[0].rotated && !c.per_layer[1].rotated);
    model_config_close(&c);
    cr_assert_eq(parse_with("\"num_experts\": 0, \"num_experts_per_tok\": 0, "
                            "\"shared_expert_intermediate_size\": 0,",
                            "Qwen3MoeForCausalLM", "qwen3_moe",
                            "{\"repetition_penalty\": 0, \"top_k\": 0}", &c, &fault),
                 0, "%s: %s", fault.field, fault.text);
    cr_expect(c.experts == 0 && !c.per_layer[0].routed && isnan(c.repetition) && c.top_k == 0);
    model_config_close(&c);
    cr_assert_eq(parse_with("", "Qwen3MoeForCausalLM", "qwen3_moe", NULL, &c, &fault), ERR_INVALID);
    cr_expect_str_eq(fault.field, "num_local_experts");
}

/* Some editors begin a file with a byte-order mark. */
Test(model_config, files_with_a_byte_order_mark) {
    static const char config[] =
        "\xEF\xBB\xBF{\"model_type\": \"llama\", \"hidden_size\": 64, \"intermediate_size\": 96,"
        "\"num_attention_heads\": 4, \"num_hidden_layers\": 1, \"vocab_size\": 128,"
        "\"max_position_embeddings\": 64}";
    static const char generation[] = "\xEF\xBB\xBF{\"top_k\": 7}";
    struct model_config c;
    struct fault fault = {0};
    cr_assert_eq(
        model_config_parse(config, strlen(config), generation, strlen(generation), 0, &c, &fault),
        0, "%s: %s", fault.field, fault.text);
    cr_expect_eq(c.top_k, 7);
    model_config_close(&c);
}

/* As transformers' generate does: without sampling the file's temperature has no say. */
Test(model_config, do_sample_false_means_greedy) {
    static const struct {
        const char *text;
        float temperature;
    } cases[] = {{"{\"do_sample\": false}", 0},
                 {"{\"do_sample\": false, \"temperature\": 0.6}", 0},
                 {"{\"do_sample\": true, \"temperature\": 0.6}", 0.6f},
                 {"{\"do_sample\": true}", NAN},
                 {"{\"do_sample\": null}", NAN}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct model_config c;
        struct fault fault;
        cr_assert_eq(parse_with("", "Qwen3ForCausalLM", "qwen3", cases[i].text, &c, &fault), 0);
        cr_expect(isnan(cases[i].temperature) ? isnan(c.temperature)
                                              : c.temperature == cases[i].temperature,
                  "case %zu: %g", i, (double)c.temperature);
        model_config_close(&c);
    }
}

Test(model_config, end_tokens_are_the_union_of_both_files) {
    struct model_config c;
    struct fault fault;
    const char *generation = "{\"eos_token_id\": [5, 2, 7], \"temperature\": 0.6, \"top_p\": 0.95,"
                             "\"top_k\": 20, \"min_p\": 0.1, \"repetition_penalty\": 1.05}";
    cr_assert_eq(parse_with("\"eos_token_id\": 2, \"bos_token_id\": 1,", "Qwen3ForCausalLM",
                            "qwen3", generation, &c, &fault),
                 0);
    cr_assert_eq(c.eos_count, 3);
    cr_assert(c.eos[0] == 2 && c.eos[1] == 5 && c.eos[2] == 7);
    cr_assert_eq(c.bos, 1);
    cr_assert_float_eq(c.temperature, 0.6f, 1e-6f);
    cr_assert_float_eq(c.top_p, 0.95f, 1e-6f);
    cr_assert_float_eq(c.min_p, 0.1f, 1e-6f);
    cr_assert_float_eq(c.repetition, 1.05f, 1e-6f);
    cr_assert_eq(c.top_k, 20);
    model_config_close(&c);

    cr_assert_eq(parse_with("\"eos_token_id\": [2, 2, 3],", "LlamaForCausalLM", "llama",
                            "{\"top_k\": -1}", &c, &fault),
                 0);
    cr_assert_eq(c.eos_count, 2);
    cr_assert_eq(c.top_k, 0, "-1 in the file means off");
    model_config_close(&c);
}

Test(model_config, minus_one_is_no_token) {
    struct model_config c;
    struct fault fault;
    cr_assert_eq(parse_with("\"bos_token_id\": -1, \"eos_token_id\": [-1, 2],", "LlamaForCausalLM",
                            "llama", "{\"eos_token_id\": -1}", &c, &fault),
                 0, "%s: %s", fault.field, fault.text);
    cr_expect(c.bos == -1 && c.eos_count == 1 && c.eos[0] == 2);
    model_config_close(&c);
}

/* Published files describe their language model; Gemma 3 leaves much of it to the class. */
Test(model_config, text_of_multimodal_checkpoints) {
    static const struct {
        const char *text, *family;
        int layers, d_model, d_ff, heads_q, heads_kv, head_dim, vocab, positions, windowed, experts;
        bool tied;
    } cases[] = {
        {"{\"architectures\": [\"Gemma3ForConditionalGeneration\"], \"model_type\": \"gemma3\","
         "\"eos_token_id\": [1, 106], \"vision_config\": {\"hidden_size\": 1152}, "
         "\"text_config\": {\"hidden_size\": 2560, \"intermediate_size\": 10240, \"model_type\": "
         "\"gemma3_text\", \"num_hidden_layers\": 34, \"rope_scaling\": {\"factor\": 8.0, "
         "\"rope_type\": \"linear\"}, \"sliding_window\": 1024}}",
         "gemma3_text", 34, 2560, 10240, 8, 4, 256, 262208, 131072, 29, 0, true},
        {"{\"architectures\": [\"Mistral3ForConditionalGeneration\"], \"model_type\": \"mistral3\","
         "\"text_config\": {\"head_dim\": 128, \"hidden_act\": \"silu\", \"hidden_size\": 5120, "
         "\"intermediate_size\": 32768, \"max_position_embeddings\": 131072, \"model_type\": "
         "\"mistral\", \"num_attention_heads\": 32, \"num_hidden_layers\": 40, "
         "\"num_key_value_heads\": 8, \"rms_norm_eps\": 1e-05, \"rope_theta\": 1000000000.0, "
         "\"sliding_window\": null, \"vocab_size\": 131072}}",
         "mistral", 40, 5120, 32768, 32, 8, 128, 131072, 131072, 0, 0, false},
        {"{\"architectures\": [\"Mistral3ForConditionalGeneration\"], \"model_type\": \"mistral3\","
         "\"tie_word_embeddings\": true, \"text_config\": {\"head_dim\": 128, \"hidden_size\": "
         "3072, \"intermediate_size\": 9216, \"max_position_embeddings\": 262144, \"model_type\": "
         "\"ministral3\", \"num_attention_heads\": 32, \"num_hidden_layers\": 26, "
         "\"num_key_value_heads\": 8, \"rms_norm_eps\": 1e-05, \"rope_parameters\": {"
         "\"beta_fast\": 32.0, \"beta_slow\": 1.0, \"factor\": 16.0, \"llama_4_scaling_beta\": "
         "0.1, "
         "\"mscale\": 1.0, \"mscale_all_dim\": 1.0, \"original_max_position_embeddings\": 16384, "
         "\"rope_theta\": 1000000.0, \"rope_type\": \"yarn\", \"type\": \"yarn\"}, "
         "\"sliding_window\": null, \"vocab_size\": 131072}}",
         "ministral3", 26, 3072, 9216, 32, 8, 128, 131072, 262144, 0, 0, true},
        {"{\"architectures\": [\"Qwen3VLMoeForConditionalGeneration\"], \"model_type\": "
         "\"qwen3_vl_moe\", \"tie_word_embeddings\": false, \"text_config\": "
         "{\"decoder_sparse_step\""
         ": 1, \"head_dim\": 128, \"hidden_act\": \"silu\", \"hidden_size\": 2048, "
         "\"intermediate_size\": 6144, \"max_position_embeddings\": 262144, \"mlp_only_layers\": "
         "[],"
         "\"model_type\": \"qwen3_vl_moe_text\", \"moe_intermediate_size\": 768, "
         "\"norm_topk_prob\": "
         "true, \"num_attention_heads\": 32, \"num_experts\": 128, \"num_experts_per_tok\": 8, "
         "\"num_hidden_layers\": 48, \"num_key_value_heads\": 4, \"rope_scaling\": {"
         "\"mrope_interleaved\": true, \"mrope_section\": [24, 20, 20], \"rope_type\": "
         "\"default\"}, "
         "\"rope_theta\": 5000000, \"vocab_size\": 151936}}",
         "qwen3_vl_moe_text", 48, 2048, 6144, 32, 4, 128, 151936, 262144, 0, 128, false},
        {"{\"architectures\": [\"Qwen2_5_VLForConditionalGeneration\"], \"model_type\": "
         "\"qwen2_5_vl\", \"hidden_act\": \"silu\", \"hidden_size\": 3584, \"intermediate_size\": "
         "18944, \"max_position_embeddings\": 128000, \"max_window_layers\": 28, "
         "\"num_attention_heads\": 28, \"num_hidden_layers\": 28, \"num_key_value_heads\": 4, "
         "\"rms_norm_eps\": 1e-06, \"rope_theta\": 1000000.0, \"sliding_window\": 32768, "
         "\"tie_word_embeddings\": false, \"use_sliding_window\": false, \"vision_config\": {"
         "\"depth\": 32}, \"rope_scaling\": {\"type\": \"mrope\", \"mrope_section\": [16, 24, "
         "24]}, "
         "\"vocab_size\": 152064}",
         "qwen2_5_vl_text", 28, 3584, 18944, 28, 4, 128, 152064, 128000, 0, 0, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model_config c;
        struct fault fault;
        cr_assert_eq(parse(cases[i].text, &c, &fault), 0, "%s: %s", fault.field, fault.text);
        cr_expect_str_eq(c.family, cases[i].family);
        cr_expect(c.layers == cases[i].layers && c.d_model == cases[i].d_model &&
                      c.d_ff == cases[i].d_ff && c.vocab == cases[i].vocab,
                  "%s", c.family);
        cr_expect(c.heads_q == cases[i].heads_q && c.heads_kv == cases[i].heads_kv &&
                      c.head_dim == cases[i].head_dim,
                  "%s", c.family);
        cr_expect_eq(c.max_positions, cases[i].positions, "%s: %d", c.family, c.max_positions);
        cr_expect_eq(model_config_sliding_layers(&c), cases[i].windowed, "%s", c.family);
        cr_expect(c.experts == cases[i].experts && c.tied_embeddings == cases[i].tied, "%s",
                  c.family);
        cr_expect_eq(c.query_scale.period, i == 2 ? 16384 : 0);
        cr_expect_eq(c.rope_scale, 1);
        model_config_close(&c);
    }
}

Test(model_config, multimodal_checkpoints_that_are_refused) {
    static const struct {
        const char *text;
        int rc;
        const char *field;
    } cases[] = {
        {"{\"model_type\": \"gemma3\", \"text_config\": 3}", ERR_INVALID, "text_config"},
        {"{\"model_type\": \"gemma3\", \"text_config\": {\"hidden_size\": 64}}", ERR_INVALID,
         "num_hidden_layers"},
        {"{\"model_type\": \"mistral3\", \"text_config\": {\"model_type\": \"mistral9\"}}",
         ERR_UNSUPPORTED, "model_type"},
        {"{\"model_type\": \"mistral3\", \"quantization_config\": {\"quant_method\": \"x\"}, "
         "\"text_config\": {\"hidden_size\": 64, \"num_hidden_layers\": 2, \"intermediate_size\": "
         "64,"
         "\"num_attention_heads\": 8, \"vocab_size\": 64, \"max_position_embeddings\": 64}}",
         ERR_UNSUPPORTED, "quantization_config"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model_config c;
        struct fault fault;
        cr_expect_eq(parse(cases[i].text, &c, &fault), cases[i].rc, "%zu: %s", i, fault.text);
        cr_expect_str_eq(fault.field, cases[i].field, "%zu: %s: %s", i, fault.field, fault.text);
    }
}

/* Unread by transformers' classes, and alike in all published files. */
Test(model_config, fields_that_would_mean_another_computation) {
    static const char *const fields[][2] = {
        {"qk_norm_type", "\"per_head\""}, {"use_routing_bias", "false"}, {"use_mrope", "true"}};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        struct model_config c;
        struct fault fault;
        char text[64];
        snprintf(text, sizeof text, "\"%s\": %s,", fields[i][0], fields[i][1]);
        cr_expect_eq(parse_llama(text, &c, &fault), ERR_UNSUPPORTED, "%s", text);
        cr_expect_str_eq(fault.field, fields[i][0]);
    }
}

struct refusal {
    const char *text;
    int rc;
    const char *field;
};

/* As llm-compressor writes it, in short. */
#define COMPRESSED(format, weights, inputs, dynamic)                                               \
    "\"quantization_config\": {\"quant_method\": \"compressed-tensors\", \"format\": \"" format    \
    "\", \"ignore\": [\"lm_head\"], \"kv_cache_scheme\": null, \"config_groups\": {\"group_0\": {" \
    "\"targets\": [\"Linear\"], \"output_activations\": null, "                                    \
    "\"weights\": {\"num_bits\": 8, \"type\": \"float\", \"symmetric\": true, \"dynamic\": "       \
    "false, "                                                                                      \
    "\"strategy\": \"" weights "\"}, "                                                             \
    "\"input_activations\": {\"num_bits\": 8, \"type\": \"float\", \"symmetric\": true, "          \
    "\"dynamic\": " dynamic ", \"strategy\": \"" inputs "\"}}}},"

static const struct refusal refusals[] = {
    {"\"architectures\": [\"FalconForCausalLM\"],", ERR_UNSUPPORTED, "architectures"},
    {"\"architectures\": [],", ERR_INVALID, "architectures"},
    {"\"architectures\": \"LlamaForCausalLM\",", ERR_INVALID, "architectures"},
    {"\"model_type\": \"mistral\",", ERR_UNSUPPORTED, "model_type"},
    {"\"model_type\": 3,", ERR_INVALID, "model_type"},
    {"\"quantization_config\": {\"quant_method\": \"gguf\"},", ERR_UNSUPPORTED,
     "quantization_config"},
    {"\"quantization_config\": {\"quant_method\": \"gptq\"},", ERR_UNSUPPORTED,
     "quantization_config.bits"},
    {"\"quantization_config\": {\"quant_method\": \"awq\", \"bits\": 4, \"group_size\": 0},",
     ERR_UNSUPPORTED, "quantization_config.group_size"},
    {"\"quantization_config\": {\"quant_method\": \"awq\", \"w_bit\": \"4\"},", ERR_INVALID,
     "quantization_config.w_bit"},
    {"\"quantization_config\": {\"quant_method\": \"keepd\", \"format\": \"blocks\", "
     "\"base_matrices\": \"12\"},",
     ERR_INVALID, "quantization_config.base_matrices"},
    {"\"quantization_config\": {\"quant_method\": 8},", ERR_INVALID,
     "quantization_config.quant_method"},
    {"\"quantization_config\": {\"bits\": 8},", ERR_UNSUPPORTED,
     "quantization_config.quant_method"},
    {"\"quantization_config\": {\"quant_method\": \"fp8\", \"fmt\": \"e5m2\"},", ERR_UNSUPPORTED,
     "quantization_config.fmt"},
    {"\"quantization_config\": {\"quant_method\": \"fp8\", \"weight_block_size\": [128]},",
     ERR_INVALID, "quantization_config.weight_block_size"},
    {"\"quantization_config\": {\"quant_method\": \"fp8\", \"weight_block_size\": [0, 128]},",
     ERR_INVALID, "quantization_config.weight_block_size"},
    {"\"quantization_config\": {\"quant_method\": \"modelopt\", \"quant_algo\": \"NVFP4_AWQ\"},",
     ERR_UNSUPPORTED, "quantization_config.quant_algo"},
    {"\"quantization_config\": {\"quant_algo\": \"MIXED_PRECISION\"},", ERR_UNSUPPORTED,
     "quantization_config.quant_algo"},
    {COMPRESSED("int-quantized", "channel", "token", "true"), ERR_UNSUPPORTED,
     "quantization_config"},
    {COMPRESSED("float-quantized", "group", "token", "true"), ERR_UNSUPPORTED,
     "quantization_config.config_groups.weights"},
    {"\"quantization_config\": {\"quant_method\": \"fp8\", \"transform_config\": "
     "{\"config_groups\": {}}},",
     ERR_UNSUPPORTED, "quantization_config.transform_config"},
    {"\"quantization\": {\"bits\": 4},", ERR_UNSUPPORTED, "quantization"},
    {"\"final_logit_softcapping\": 30,", ERR_UNSUPPORTED, "final_logit_softcapping"},
    {"\"mlp_bias\": true,", ERR_UNSUPPORTED, "mlp_bias"},
    {"\"text_config\": {\"hidden_size\": 8},", ERR_UNSUPPORTED, "text_config"},
    {"\"rope_parameters\": {\"llama_4_scaling_beta\": 0.1},", ERR_UNSUPPORTED,
     "llama_4_scaling_beta"},
    {"\"hidden_act\": \"gelu\",", ERR_UNSUPPORTED, "hidden_act"},
    {"\"partial_rotary_factor\": 0.1,", ERR_UNSUPPORTED, "partial_rotary_factor"},
    {"\"use_sliding_window\": true,", ERR_UNSUPPORTED, "use_sliding_window"},
    {"\"sliding_window\": 4096,", ERR_UNSUPPORTED, "sliding_window"},
    {"\"layer_types\": [\"full_attention\", \"full_attention\", \"sliding_attention\"],",
     ERR_UNSUPPORTED, "layer_types"},
    {"\"layer_types\": 3,", ERR_INVALID, "layer_types"},
    {"\"torch_dtype\": \"float8_e4m3fn\",", ERR_UNSUPPORTED, "torch_dtype"},
    {"\"num_hidden_layers\": 513,", ERR_INVALID, "num_hidden_layers"},
    {"\"num_hidden_layers\": 0,", ERR_INVALID, "num_hidden_layers"},
    {"\"hidden_size\": 9223372036854775807,", ERR_INVALID, "hidden_size"},
    {"\"hidden_size\": -64,", ERR_INVALID, "hidden_size"},
    {"\"hidden_size\": \"64\",", ERR_INVALID, "hidden_size"},
    {"\"hidden_size\": 63,", ERR_INVALID, "hidden_size"},
    {"\"intermediate_size\": 1048577,", ERR_INVALID, "intermediate_size"},
    {"\"num_attention_heads\": 3,", ERR_INVALID, "num_key_value_heads"},
    {"\"num_key_value_heads\": 8,", ERR_INVALID, "num_key_value_heads"},
    {"\"head_dim\": 15,", ERR_INVALID, "head_dim"},
    {"\"head_dim\": 2048,", ERR_INVALID, "head_dim"},
    {"\"vocab_size\": 1e9,", ERR_INVALID, "vocab_size"},
    {"\"max_position_embeddings\": 0,", ERR_INVALID, "max_position_embeddings"},
    {"\"max_position_embeddings\": null,", ERR_INVALID, "max_position_embeddings"},
    {"\"rms_norm_eps\": -1,", ERR_INVALID, "rms_norm_eps"},
    {"\"attention_bias\": 1,", ERR_INVALID, "attention_bias"},
    {"\"eos_token_id\": 128,", ERR_INVALID, "eos_token_id"},
    {"\"eos_token_id\": [1, \"2\"],", ERR_INVALID, "eos_token_id"},
    {"\"eos_token_id\": [1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17],", ERR_LIMIT, "eos_token_id"},
    {"\"bos_token_id\": 128,", ERR_INVALID, "bos_token_id"},
    {"\"rope_theta\": 0,", ERR_INVALID, "rope_theta"},
    {"\"rope_scaling\": 3,", ERR_INVALID, "rope_scaling"},
    {"\"rope_scaling\": {\"type\": \"dynamic\", \"factor\": 2},", ERR_UNSUPPORTED,
     "rope_scaling.type"},
    {"\"rope_scaling\": {\"rope_type\": \"longrope\"},", ERR_INVALID, "rope_scaling.short_factor"},
    {"\"rope_parameters\": {\"rope_type\": \"su\", \"original_max_position_embeddings\": 64,"
     "\"long_factor\": [1, 2, 3]},",
     ERR_INVALID, "rope_parameters.long_factor"},
    {"\"rope_scaling\": {\"rope_type\": \"longrope\", \"short_factor\": [1,1,1,1,1,1,1,0]},",
     ERR_INVALID, "rope_scaling.short_factor"},
    {"\"rope_scaling\": {\"rope_type\": \"longrope\", \"original_max_position_embeddings\": 1,"
     "\"long_factor\": [1,1,1,1,1,1,1,1]},",
     ERR_INVALID, "original_max_position_embeddings"},
    {"\"original_max_position_embeddings\": 1, \"rope_scaling\": {\"rope_type\": \"longrope\","
     "\"long_factor\": [1,1,1,1,1,1,1,1]},",
     ERR_INVALID, "original_max_position_embeddings"},
    {"\"no_rope_layers\": [1, 0, 1],", ERR_UNSUPPORTED, "no_rope_layers"},
    {"\"num_experts\": 8,", ERR_UNSUPPORTED, "num_experts"},
    {"\"num_local_experts\": 8,", ERR_UNSUPPORTED, "num_local_experts"},
    {"\"n_routed_experts\": 8,", ERR_UNSUPPORTED, "n_routed_experts"},
    {"\"shared_expert_intermediate_size\": 8,", ERR_UNSUPPORTED, "shared_expert_intermediate_size"},
    {"\"residual_multiplier\": 0.5,", ERR_UNSUPPORTED, "residual_multiplier"},
    {"\"attention_out_bias\": true,", ERR_UNSUPPORTED, "attention_out_bias"},
    {"\"clip_qkv\": 8,", ERR_UNSUPPORTED, "clip_qkv"},
    {"\"use_bias\": true,", ERR_UNSUPPORTED, "use_bias"},
    {"\"logits_scaling\": 8,", ERR_UNSUPPORTED, "logits_scaling"},
    {"\"rope_parameters\": {\"full_attention\": {\"rope_type\": \"default\"}},", ERR_UNSUPPORTED,
     "rope_parameters"},
    {"\"rope_parameters\": {\"partial_rotary_factor\": 0.2},", ERR_UNSUPPORTED,
     "partial_rotary_factor"},
    {"\"rope_scaling\": {\"type\": \"linear\"},", ERR_INVALID, "rope_scaling.factor"},
    {"\"rope_scaling\": {\"type\": \"linear\", \"factor\": 0},", ERR_INVALID,
     "rope_scaling.factor"},
    {"\"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8},", ERR_INVALID,
     "rope_scaling.low_freq_factor"},
    {"\"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8, \"low_freq_factor\": 4,"
     "\"high_freq_factor\": 4, \"original_max_position_embeddings\": 64},",
     ERR_INVALID, "high_freq_factor"},
    {"\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4, \"mscale\": -1},", ERR_INVALID,
     "rope_scaling.mscale"},
    {"\"eos_token_id\": -2,", ERR_INVALID, "eos_token_id"},
};

Test(model_config, fp8) {
    static const char *const texts[] = {
        "\"quantization_config\": {\"quant_method\": \"fp8\", \"activation_scheme\": \"dynamic\"},",
        "\"quantization_config\": {\"quant_method\": \"fp8\", \"weight_block_size\": null},",
        "\"quantization_config\": {\"quant_method\": \"fp8\", \"transform_config\": {}},",
        "\"quantization_config\": {\"quant_method\": \"fp8\", \"transform_config\": null},",
        COMPRESSED("float-quantized", "channel", "token", "true"),
        COMPRESSED("float-quantized", "tensor", "token", "true"),
        COMPRESSED("float-quantized", "block", "token", "true"),
        COMPRESSED("float-quantized", "channel", "tensor", "false"),
        "\"quantization_config\": {\"quant_method\": \"fp8\", \"activation_scheme\": \"static\"},",
        "\"quantization_config\": {\"quant_method\": \"fp8\", \"fmt\": \"e4m3\", "
        "\"activation_scheme\": \"dynamic\", \"weight_block_size\": [128, 128]},",
        "\"quantization_config\": {\"quant_method\": \"modelopt\", \"quant_algo\": \"FP8\", "
        "\"producer\": {\"name\": \"modelopt\"}, \"ignore\": [\"lm_head\"]},",
        "\"quantization_config\": {\"producer\": {\"name\": \"modelopt\"}, \"quantization\": "
        "{\"quant_algo\": \"FP8\", \"kv_cache_quant_algo\": \"FP8\"}},",
        "\"quantization_config\": {\"quant_algo\": \"FP8_PB_WO\"},",
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        struct model_config c;
        struct fault fault;
        cr_assert_eq(parse_llama(texts[i], &c, &fault), 0, "%s: %s", texts[i], fault.text);
        cr_expect_eq(c.packing.kind, PACKING_FP8);
        cr_expect(c.packing.block_rows == 128 && c.packing.block_cols == 128);
        model_config_close(&c);
    }
}

/* A refusal says what the file has. */
Test(model_config, refused_weights_are_named) {
    static const char *const cases[][2] = {
        {"{\"quant_method\": \"bitsandbytes\", \"load_in_4bit\": true}", "\"bitsandbytes\""},
        {"{\"quant_method\": \"compressed-tensors\", \"format\": \"marlin-24\"}",
         "\"compressed-tensors\" in the format \"marlin-24\""},
        {"{\"quant_algo\": \"NVFP4_AWQ\"}", "modelopt's \"NVFP4_AWQ\""},
        {"{\"quant_algo\": null, \"bits\": 3}", "missing"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct model_config c;
        struct fault fault;
        char text[256];
        snprintf(text, sizeof text, "\"quantization_config\": %s,", cases[i][0]);
        cr_assert_eq(parse_llama(text, &c, &fault), ERR_UNSUPPORTED, "%s", text);
        cr_expect_not_null(strstr(fault.text, cases[i][1]), "%s", fault.text);
    }
}

Test(model_config, refuses_by_name) {
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
        struct model_config c;
        struct fault fault;
        int rc = parse_llama(refusals[i].text, &c, &fault);
        cr_assert_eq(rc, refusals[i].rc, "%s gave %s (%s: %s)", refusals[i].text, err_name(rc),
                     fault.field, fault.text);
        cr_assert_eq(fault.code, rc);
        cr_assert_str_eq(fault.field, refusals[i].field, "%s named %s", refusals[i].text,
                         fault.field);
        cr_assert(fault.text[0] != '\0');
        cr_assert_null(c.inv_freq);
    }
}

Test(model_config, generation_errors_name_their_file) {
    struct model_config c;
    struct fault fault;
    cr_assert_eq(parse_with("", "LlamaForCausalLM", "llama", "{\"temperature\": -1}", &c, &fault),
                 ERR_INVALID);
    cr_assert_str_eq(fault.field, "generation_config.temperature");
    cr_assert_eq(parse_with("", "LlamaForCausalLM", "llama", "{\"eos_token_id\": 500}", &c, &fault),
                 ERR_INVALID);
    cr_assert_str_eq(fault.field, "generation_config.eos_token_id");
    cr_assert_eq(parse_with("", "LlamaForCausalLM", "llama", "[]", &c, &fault), ERR_MALFORMED);
    cr_assert_str_eq(fault.field, "generation_config.json");
}

Test(model_config, broken_files) {
    static const char *const texts[] = {"", "{", "[]", "null", "{\"a\": 1} x", "{}"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        struct model_config c;
        struct fault fault = {0};
        int rc = model_config_parse(texts[i], strlen(texts[i]), NULL, 0, 0, &c, &fault);
        cr_assert(rc == ERR_MALFORMED || rc == ERR_INVALID, "%s gave %s", texts[i], err_name(rc));
        cr_assert(fault.field[0] != '\0');
    }
}

Test(model_config, every_allocation_may_fail) {
    int failures = 0;
    for (long n = 0;; n++) {
        struct model_config c;
        struct fault fault;
        mem_fail_after(n);
        int rc =
            parse_llama("\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2},", &c, &fault);
        bool pending = mem_fail_pending();
        mem_fail_after(-1);
        if (!rc) {
            cr_assert(pending, "allocation %ld failed unnoticed", n);
            model_config_close(&c);
            break;
        }
        cr_assert_eq(rc, ERR_NOMEM);
        failures++;
    }
    cr_assert(failures > 0);
}
