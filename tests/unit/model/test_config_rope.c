#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "config_parse.h"

Test(model_config, layers_without_rotation) {
    struct model_config c;
    struct fault fault;
    cr_assert_eq(parse_with("\"no_rope_layer_interval\": 2,", "SmolLM3ForCausalLM", "smollm3", NULL,
                            &c, &fault),
                 0);
    cr_expect(c.per_layer[0].rotated && !c.per_layer[1].rotated && c.per_layer[2].rotated);
    cr_expect(!model_config_rotates_alike(&c) && c.tied_embeddings);
    model_config_close(&c);
    cr_assert_eq(parse_with("\"no_rope_layers\": [0, 1, 1],", "SmolLM3ForCausalLM", "smollm3", NULL,
                            &c, &fault),
                 0);
    cr_expect(!c.per_layer[0].rotated && c.per_layer[1].rotated && c.per_layer[2].rotated);
    model_config_close(&c);
    cr_assert_neq(parse_with("\"no_rope_layers\": [0, 2, 1],", "SmolLM3ForCausalLM", "smollm3",
                             NULL, &c, &fault),
                  0);
    cr_expect_str_eq(fault.field, "no_rope_layers");
    cr_expect_null(c.per_layer);
}

/* Defaults of the classes in transformers, where a file names no theta. */
Test(model_config, theta_of_the_family) {
    struct model_config c;
    struct fault fault;
    cr_assert_eq(parse_with("", "SmolLM3ForCausalLM", "smollm3", NULL, &c, &fault), 0);
    cr_expect_float_eq(c.inv_freq[4], 1 / sqrtf(2e6f), 1e-9);
    model_config_close(&c);
    cr_assert_eq(parse_with("\"head_dim\": 16, \"hidden_activation\": \"gelu_pytorch_tanh\",",
                            "Gemma3ForCausalLM", "gemma3_text", NULL, &c, &fault),
                 0, "%s: %s", fault.field, fault.text);
    cr_expect_float_eq(c.inv_freq[4], 1e-3f, 1e-9);
    cr_expect_float_eq(c.inv_freq_local[4], 1e-2f, 1e-8);
    cr_expect(c.per_layer[0].local && c.per_layer[0].sliding_window == 4096);
    model_config_close(&c);
    cr_assert_eq(parse_with("\"use_sliding_window\": true, \"sliding_window\": 64,",
                            "SmolLM3ForCausalLM", "smollm3", NULL, &c, &fault),
                 ERR_UNSUPPORTED);
    cr_expect_str_eq(fault.field, "use_sliding_window");
}

/* How many positions a model has whose file says 4096. */
Test(model_config, a_scaling_of_the_rotation_extends_the_positions) {
    static const struct {
        const char *text;
        int positions;
    } cases[] = {
        {"\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4},", 16384},
        {"\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4, "
         "\"original_max_position_embeddings\": 3072},",
         12288}, /* Qwen3's recipe: 40960, of which 32768 were trained */
        {"\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4.0, "
         "\"original_max_position_embeddings\": 1024},",
         4096}, /* scaled already */
        {"\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 2, "
         "\"original_max_position_embeddings\": 1024},",
         4096}, /* the file says more */
        {"\"rope_parameters\": {\"rope_type\": \"yarn\", \"factor\": 2.5, "
         "\"original_max_position_embeddings\": null},",
         10240},
        {"\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 100000},", 1 << 24},
        {"\"rope_scaling\": {\"type\": \"linear\", \"factor\": 4},", 4096},
        {"\"rope_scaling\": {\"type\": \"linear\", \"factor\": 4, "
         "\"original_max_position_embeddings\": 4096},",
         16384},
        {"\"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 32, \"low_freq_factor\": 1, "
         "\"high_freq_factor\": 4, \"original_max_position_embeddings\": 1024},",
         4096}, /* Llama 3.2: 131072 of 8192 times 32 */
        {"\"rope_scaling\": {\"rope_type\": \"longrope\", \"factor\": 32, \"long_factor\": "
         "[1,1,1,1,1,1,1,1], \"original_max_position_embeddings\": 1024},",
         4096},
        {"\"rope_scaling\": {\"rope_type\": \"default\", \"factor\": 4},", 4096},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct model_config c;
        struct fault fault;
        cr_assert_eq(parse_llama(cases[i].text, &c, &fault), 0, "%s: %s %s", cases[i].text,
                     fault.field, fault.text);
        cr_expect_eq(c.max_positions, cases[i].positions, "%s: %d", cases[i].text, c.max_positions);
        model_config_close(&c);
    }
}

/* transformers: two factors make a quotient, one alone or 0 counts as none. */
Test(model_config, yarn_with_factors_of_attention) {
    static const struct {
        const char *more;
        double scale;
    } cases[] = {
        {"\"mscale\": 1.0, \"mscale_all_dim\": 1.0", 1},
        {"\"mscale\": 0.707, \"mscale_all_dim\": 1.0", 0.964326918},
        {"\"mscale\": 0.707", 1.138629436},
        {"\"mscale\": 1, \"mscale_all_dim\": 0, \"beta_fast\": 0, \"beta_slow\": null",
         1.138629436},
        {"\"mscale\": 0.707, \"mscale_all_dim\": 1.0, \"attention_factor\": 1.5", 1.5},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct model_config c;
        struct fault fault;
        char text[256];
        snprintf(text, sizeof text,
                 "\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4, %s},", cases[i].more);
        cr_assert_eq(parse_llama(text, &c, &fault), 0, "%s: %s %s", text, fault.field, fault.text);
        cr_expect_float_eq(c.rope_scale, cases[i].scale, 1e-6, "%s: %.9g", text,
                           (double)c.rope_scale);
        model_config_close(&c);
    }
}

/* EXAONE 4: layers without a window stop rotating where the file has a window at all. */
Test(model_config, layers_that_stand_still_beside_windows) {
    struct model_config c;
    struct fault fault;
    cr_assert_eq(parse_with("\"sliding_window\": null, \"sliding_window_pattern\": null,",
                            "Exaone4ForCausalLM", "exaone4", NULL, &c, &fault),
                 0, "%s: %s", fault.field, fault.text);
    cr_expect(model_config_rotates_alike(&c) && c.per_layer[0].sliding_window == 0 &&
              !c.inv_freq_none);
    cr_expect(!c.pre_norms && c.post_norms && c.qk_norm && !c.qk_norm_wide);
    model_config_close(&c);
    cr_assert_eq(parse_with("\"sliding_window\": 64, \"sliding_window_pattern\": \"LG\", "
                            "\"layer_types\": [\"sliding_attention\", \"full_attention\", "
                            "\"full_attention\"],",
                            "Exaone4ForCausalLM", "exaone4", NULL, &c, &fault),
                 0, "%s: %s", fault.field, fault.text);
    cr_expect(c.per_layer[0].rotated && !c.per_layer[1].rotated && !c.per_layer[2].rotated);
    cr_expect(c.per_layer[0].sliding_window == 64 && c.per_layer[1].sliding_window == 0);
    cr_expect(c.inv_freq_none && c.inv_freq_none[0] == 0);
    model_config_close(&c);
}

/* OLMo 3: the scaling is of layers without a window alone. */
Test(model_config, windows_rotate_without_scaling) {
    struct model_config c;
    struct fault fault;
    cr_assert_eq(parse_with("\"rope_theta\": 1e6, \"rope_scaling\": {\"rope_type\": \"linear\", "
                            "\"factor\": 4}, \"sliding_window_pattern\": 3,",
                            "Olmo3ForCausalLM", "olmo3", NULL, &c, &fault),
                 0, "%s: %s", fault.field, fault.text);
    cr_expect(c.per_layer[1].local && !c.per_layer[2].local && c.qk_norm_wide && !c.pre_norms);
    cr_expect_float_eq(c.inv_freq[0], 0.25f, 1e-7);
    cr_expect_float_eq(c.inv_freq_local[0], 1, 1e-7);
    cr_expect_float_eq(c.inv_freq_local[1], 4 * c.inv_freq[1], 1e-6);
    model_config_close(&c);
}

/* Two sets of factors, chosen by the longest context. */
Test(model_config, longrope_chooses_by_the_context) {
    static const char text[] =
        "{\"architectures\": [\"Phi3ForCausalLM\"], \"model_type\": \"phi3\", \"hidden_size\": 64,"
        "\"intermediate_size\": 96, \"num_attention_heads\": 4, \"num_key_value_heads\": 2,"
        "\"num_hidden_layers\": 3, \"vocab_size\": 128, \"max_position_embeddings\": 4096,"
        "\"original_max_position_embeddings\": 256, \"partial_rotary_factor\": 0.5,"
        "\"rope_scaling\": {\"type\": \"longrope\", \"short_factor\": [1, 2, 3, 4],"
        "\"long_factor\": [5, 6, 7, 8]}}";
    static const struct {
        int context;
        float first, last;
    } cases[] = {{0, 1 / 5.0f, 0.001f / 8}, {256, 1, 0.001f / 4}, {257, 1 / 5.0f, 0.001f / 8}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model_config c;
        struct fault fault = {0};
        cr_assert_eq(model_config_parse(text, strlen(text), NULL, 0, cases[i].context, &c, &fault),
                     0, "%s: %s", fault.field, fault.text);
        cr_expect(c.fused && c.rotary_dims == 8);
        cr_expect_float_eq(c.inv_freq[0], cases[i].first, 1e-6);
        cr_expect_float_eq(c.inv_freq[3], cases[i].last, 1e-7);
        for (int j = 4; j < 8; j++) cr_expect_eq(c.inv_freq[j], 0);
        cr_expect_float_eq(c.rope_scale, 1.22474487f, 1e-6); /* sqrt(1 + ln 16 / ln 256) */
        model_config_close(&c);
    }
}

/* The logarithm of one position is no divisor, but a given attention_factor needs none. */
Test(model_config, longrope_of_one_position_takes_its_attention_factor) {
    struct model_config c;
    struct fault fault;
    cr_assert_eq(parse_llama("\"rope_scaling\": {\"rope_type\": \"longrope\","
                             "\"original_max_position_embeddings\": 1, \"attention_factor\": 1.5,"
                             "\"long_factor\": [1,1,1,1,1,1,1,1]},",
                             &c, &fault),
                 0, "%s: %s", fault.field, fault.text);
    cr_expect_eq(c.rope_scale, 1.5f);
    model_config_close(&c);
}

/* Frequencies as transformers 5.2 computes them for head_dim 16, theta 10000, context 4096. */
Test(model_config, rope_scaling_matches_transformers) {
    static const struct {
        const char *text;
        double scale, inv[8];
    } cases[] = {
        {"\"rope_theta\": 1e4, \"rope_scaling\": {\"type\": \"linear\", \"factor\": 4},",
         1,
         {0.25, 0.079056941, 0.0250000004, 0.00790569466, 0.00249999994, 0.000790569466,
          0.000250000012, 7.90569466e-05}},
        {"\"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8, \"low_freq_factor\": 1,"
         "\"high_freq_factor\": 4, \"original_max_position_embeddings\": 64},",
         1,
         {1, 0.244384587, 0.0130422562, 0.00395284733, 0.00124999997, 0.000395284733,
          0.000125000006, 3.95284733e-05}},
        {"\"rope_parameters\": {\"rope_type\": \"yarn\", \"rope_theta\": 1e4, \"factor\": 4,"
         "\"original_max_position_embeddings\": 1024}, \"rope_theta\": 5,",
         1.138629436111989,
         {1, 0.316227764, 0.0812500045, 0.0197642371, 0.00437500002, 0.000790569466, 0.000250000012,
          7.90569466e-05}},
        {"\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4, \"attention_factor\": 1.25,"
         "\"beta_fast\": 8, \"beta_slow\": 2, \"original_max_position_embeddings\": 1024},",
         1.25,
         {1, 0.316227764, 0.100000001, 0.0197642371, 0.00249999994, 0.000790569466, 0.000250000012,
          7.90569466e-05}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct model_config c;
        struct fault fault;
        char text[512];
        snprintf(text, sizeof text, "\"head_dim\": 16, %s", cases[i].text);
        cr_assert_eq(parse_llama(text, &c, &fault), 0, "case %zu: %s", i, fault.text);
        cr_assert_float_eq(c.rope_scale, cases[i].scale, 1e-6);
        for (int j = 0; j < 8; j++)
            cr_assert_float_eq(c.inv_freq[j] / cases[i].inv[j], 1, 1e-6, "case %zu j %d: %.9g", i,
                               j, (double)c.inv_freq[j]);
        model_config_close(&c);
    }
}

static void expect_axes(const char *overrides, const char *architecture, const char *type,
                        const char *axes) {
    struct model_config c;
    struct fault fault;
    cr_assert_eq(parse_with(overrides, architecture, type, NULL, &c, &fault), 0, "%s: %s",
                 fault.field, fault.text);
    cr_assert_not_null(c.axes);
    for (int j = 0; axes[j]; j++) cr_expect_eq(c.axes[j], axes[j] - '0', "%s, pair %d", type, j);
    model_config_close(&c);
}

/* The place by which each pair rotates. */
Test(model_config, sections_of_the_rotation) {
    static const char two[] = "Qwen2_5_VLForConditionalGeneration",
                      three[] = "Qwen3VLForConditionalGeneration",
                      five[] = "Qwen3_5ForConditionalGeneration";
    expect_axes("\"rope_scaling\": {\"type\": \"mrope\", \"mrope_section\": [2, 3, 3]},", two,
                "qwen2_5_vl", "00111222");
    expect_axes("\"rope_scaling\": {\"type\": \"default\", \"mrope_section\": [5, 3, 0]},", two,
                "qwen2_5_vl", "00000111");
    expect_axes("\"head_dim\": 16, \"rope_parameters\": {\"rope_type\": \"default\", "
                "\"mrope_interleaved\": true, \"mrope_section\": [4, 2, 2]},",
                three, "qwen3_vl", "01201200");
    expect_axes("\"head_dim\": 128,", three, "qwen3_vl",
                "0120120120120120120120120120120120120120120120120120120120120000");
    expect_axes("\"head_dim\": 16, \"num_experts\": 4, \"num_experts_per_tok\": 2, "
                "\"moe_intermediate_size\": 32, \"rope_parameters\": {\"rope_type\": \"default\", "
                "\"mrope_section\": [4, 2, 2]},",
                "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", "01201200");
    expect_axes("\"num_hidden_layers\": 4, \"head_dim\": 64, \"rope_parameters\": {\"rope_type\": "
                "\"default\", "
                "\"mrope_section\": [4, 2, 2], \"partial_rotary_factor\": 0.25},",
                five, "qwen3_5", "01201200000000000000000000000000");
}

Test(model_config, sections_that_cannot_be) {
    static const struct {
        const char *text, *field;
    } cases[] = {
        {"\"mrope_section\": [2, 3]", "rope_scaling.mrope_section"},
        {"\"mrope_section\": [2, 3, 3, 0]", "rope_scaling.mrope_section"},
        {"\"mrope_section\": [2, 3, -1]", "rope_scaling.mrope_section"},
        {"\"mrope_section\": [2, 3, \"3\"]", "rope_scaling.mrope_section"},
        {"\"mrope_section\": [2, 3, 9]", "rope_scaling.mrope_section"},
        {"\"mrope_section\": 8", "rope_scaling.mrope_section"},
        {"\"mrope_section\": [2, 3, 4]", "rope_scaling.mrope_section"},
        {"\"factor\": 1", "rope_scaling.mrope_section"}, /* published models have more */
        {"\"mrope_section\": [2, 3, 3], \"mrope_interleaved\": true",
         "rope_scaling.mrope_interleaved"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model_config c;
        struct fault fault;
        char text[256];
        snprintf(text, sizeof text, "\"rope_scaling\": {\"type\": \"mrope\", %s},", cases[i].text);
        cr_expect_neq(
            parse_with(text, "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", NULL, &c, &fault),
            0, "%s", cases[i].text);
        cr_expect_str_eq(fault.field, cases[i].field, "%s: %s", cases[i].text, fault.field);
        cr_expect_null(c.axes);
    }
}
