#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "config_parse.h"

#define EXPERTS(experts, used, width)                                                              \
    "\"num_experts\": " experts ", \"num_experts_per_tok\": " used                                 \
    ", \"moe_intermediate_size\": " width ","

/* A published file begins with these two members. */
#define NAMED(architecture, type)                                                                  \
    "{\"architectures\": [\"" architecture "\"], \"model_type\": \"" type "\", "

#define SIZES(d, ff, layers, q, kv, vocab, positions)                                              \
    "\"hidden_size\": " d ", \"intermediate_size\": " ff ", \"num_hidden_layers\": " layers        \
    ", \"num_attention_heads\": " q ", \"num_key_value_heads\": " kv ", \"vocab_size\": " vocab    \
    ", \"max_position_embeddings\": " positions ", "

/* As published. */
Test(model_config, mixtures_of_today) {
    static const struct {
        const char *text;
        int experts, used, expert_ff, shared_ff, routed, rotary_dims, mtp;
        bool sigmoid, selects, normalised, qkv_bias, qk_norm;
        double scale;
    } cases[] = {
        {/* 4.5-Air */ NAMED("Glm4MoeForCausalLM", "glm4_moe") SIZES(
             "4096", "10944", "46", "96", "8", "151552",
             "131072") "\"head_dim\": 128, \"attention_bias\": true, \"first_k_dense_replace\": 1, "
                       "\"moe_intermediate_size\": 1408, \"n_group\": 1, \"n_routed_experts\": "
                       "128, "
                       "\"n_shared_experts\": 1, \"norm_topk_prob\": true, "
                       "\"num_experts_per_tok\": 8, \"num_nextn_predict_layers\": 1, "
                       "\"partial_rotary_factor\": 0.5, \"rope_theta\": 1000000, "
                       "\"routed_scaling_factor\": 1.0, \"topk_group\": 1, \"use_qk_norm\": false}",
         128, 8, 1408, 1408, 45, 64, 1, true, true, true, true, false, 1},
        {/* 4.6 */ NAMED("Glm4MoeForCausalLM", "glm4_moe") SIZES(
             "5120", "12288", "92", "96", "8", "151552",
             "202752") "\"head_dim\": 128, \"attention_bias\": true, \"first_k_dense_replace\": 3, "
                       "\"moe_intermediate_size\": 1536, \"n_group\": 1, \"n_routed_experts\": "
                       "160, "
                       "\"n_shared_experts\": 1, \"norm_topk_prob\": true, "
                       "\"num_experts_per_tok\": 8, \"num_nextn_predict_layers\": 1, "
                       "\"partial_rotary_factor\": 0.5, \"rope_theta\": 1000000, "
                       "\"routed_scaling_factor\": 2.5, \"topk_group\": 1, \"use_qk_norm\": true}",
         160, 8, 1536, 1536, 89, 64, 1, true, true, true, true, true, 2.5},
        {NAMED("MiniMaxM2ForCausalLM", "minimax_m2") SIZES(
             "3072", "1536", "62", "48", "8", "200064",
             "196608") "\"head_dim\": 128, \"num_local_experts\": 256, \"num_experts_per_tok\": 8, "
                       "\"rope_theta\": 5000000, \"rotary_dim\": 64, \"use_qk_norm\": true, "
                       "\"shared_intermediate_size\": 0, \"attn_type_list\": [1, 1], "
                       "\"scoring_func\": \"sigmoid\", \"quantization_config\": {\"quant_method\": "
                       "\"fp8\", \"fmt\": \"float8_e4m3fn\", \"weight_block_size\": [128, 128]}}",
         256, 8, 1536, 0, 62, 64, 0, true, true, true, false, true, 1},
        {NAMED("Ernie4_5_MoeForCausalLM", "ernie4_5_moe") SIZES(
             "2560", "12288", "28", "20", "4", "103424",
             "131072") "\"moe_intermediate_size\": 1536, \"moe_k\": 6, \"moe_layer_end_index\": "
                       "27, "
                       "\"moe_layer_interval\": 1, \"moe_layer_start_index\": 1, "
                       "\"moe_num_experts\": 64, \"moe_num_shared_experts\": 2, "
                       "\"rope_theta\": 500000.0, \"use_bias\": false}",
         64, 6, 1536, 3072, 27, 128, 0, false, true, true, false, false, 1},
        {NAMED("Qwen2MoeForCausalLM", "qwen2_moe")
             SIZES("2048", "5632", "24", "16", "16", "151936",
                   "8192") "\"decoder_sparse_step\": 1, \"max_window_layers\": 21, "
                           "\"moe_intermediate_size\": 1408, \"norm_topk_prob\": false, "
                           "\"num_experts\": 60, \"num_experts_per_tok\": 4, "
                           "\"shared_expert_intermediate_size\": 5632, \"sliding_window\": 32768, "
                           "\"use_sliding_window\": false}",
         60, 4, 1408, 5632, 24, 128, 0, false, false, false, true, false, 1},
        {NAMED("Dots1ForCausalLM", "dots1")
             SIZES("4096", "10944", "62", "32", "32", "152064",
                   "32768") "\"first_k_dense_replace\": 1, \"moe_intermediate_size\": 1408, "
                            "\"n_group\": 1, \"n_routed_experts\": 128, \"n_shared_experts\": 2, "
                            "\"norm_topk_prob\": true, \"num_experts_per_tok\": 6, "
                            "\"routed_scaling_factor\": 2.5, \"scoring_func\": \"noaux_tc\", "
                            "\"sliding_window\": null, \"topk_group\": 1}",
         128, 6, 1408, 2816, 61, 128, 0, true, true, true, false, true, 2.5},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model_config c;
        struct fault fault;
        cr_assert_eq(parse(cases[i].text, &c, &fault), 0, "%zu: %s: %s", i, fault.field,
                     fault.text);
        int routed = 0;
        for (int l = 0; l < c.layers; l++) routed += c.per_layer[l].routed;
        cr_expect(c.experts == cases[i].experts && c.experts_used == cases[i].used &&
                      c.expert_ff == cases[i].expert_ff && c.shared_ff == cases[i].shared_ff,
                  "%s", c.family);
        cr_expect(routed == cases[i].routed && c.rotary_dims == cases[i].rotary_dims, "%s",
                  c.family);
        cr_expect(c.mtp_layers == cases[i].mtp && c.experts_sigmoid == cases[i].sigmoid &&
                      c.select_bias == cases[i].selects,
                  "%s", c.family);
        cr_expect(c.experts_normalised == cases[i].normalised && c.qkv_bias == cases[i].qkv_bias &&
                      c.qk_norm == cases[i].qk_norm && !c.o_bias,
                  "%s", c.family);
        cr_expect_float_eq((double)c.expert_scale, cases[i].scale, 1e-6, "%s", c.family);
        model_config_close(&c);
    }
}

/* transformers 5.24 pads the numbers of layers. */
Test(model_config, layers_by_numbers_with_zeros) {
    static const char *const spellings[] = {"\"2\"", "\"02\""};
    for (size_t i = 0; i < sizeof spellings / sizeof *spellings; i++) {
        struct model_config c;
        struct fault fault;
        char text[256];
        snprintf(text, sizeof text,
                 "\"head_dim\": 16, \"global_head_dim\": 16, \"per_layer_config\": "
                 "{%s: {\"head_dim\": 32}},",
                 spellings[i]);
        cr_assert_eq(parse_with(text, "Gemma4ForCausalLM", "gemma4_text", NULL, &c, &fault), 0,
                     "%s: %s", fault.field, fault.text);
        cr_expect(c.per_layer[1].head_dim == 16 && c.per_layer[2].head_dim == 32, "%s",
                  spellings[i]);
        model_config_close(&c);
    }
}

#define LFM2(more) more "\"conv_L_cache\": 3, \"norm_eps\": 2e-5, \"block_multiple_of\": 32,"

/* The layers with a convolution are numbered by themselves, as are those with attention. */
Test(model_config, layers_with_a_short_convolution) {
    static const char *const spellings[] = {
        LFM2("\"layer_types\": [\"conv\", \"full_attention\", \"conv\"],"),
        LFM2("\"full_attn_idxs\": [1],"), LFM2("\"layer_types\": null, \"full_attn_idxs\": [1],")};
    for (size_t i = 0; i < sizeof spellings / sizeof *spellings; i++) {
        struct model_config c;
        struct fault fault;
        cr_assert_eq(parse_with(spellings[i], "Lfm2ForCausalLM", "lfm2", NULL, &c, &fault), 0,
                     "%s: %s", fault.field, fault.text);
        cr_assert(c.layers == 3 && c.cache_layers == 1 && c.state_layers == 2 && c.conv_width == 3);
        cr_assert(c.per_layer[0].mixer == MIXER_CONV && c.per_layer[1].mixer == MIXER_ATTENTION &&
                  c.per_layer[2].mixer == MIXER_CONV);
        cr_assert(c.per_layer[1].index == 0 && c.per_layer[2].state == 1);
        cr_assert_eq(c.rotations[0], c.inv_freq);
        cr_assert_eq(c.d_ff, 64); /* 2/3 of 96 */
        cr_assert_float_eq(c.rms_eps, 2e-5f, 1e-10f);
        cr_assert(c.qk_norm && model_config_rotates_alike(&c));
        const struct kern_cache_options cache = model_cache_options(&c);
        cr_assert(cache.layers == 1 && cache.states == 2 && cache.state_floats == 128);
        cr_assert_eq(model_state_bytes(&c), 2 * 128 * sizeof(float));
        model_config_close(&c);
    }
}

Test(model_config, lfm2_says_how_wide_its_networks_are) {
    static const struct {
        const char *text;
        int d_ff;
    } cases[] = {{"\"block_auto_adjust_ff_dim\": false,", 96},
                 {"\"block_ff_dim\": 200,", 160},
                 {"\"block_ffn_dim_multiplier\": 1.5,", 96},
                 {"\"block_ffn_dim_multiplier\": 1.51,", 96}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model_config c;
        struct fault fault;
        char text[256];
        snprintf(text, sizeof text, "%s%s", cases[i].text, LFM2(""));
        cr_assert_eq(parse_with(text, "Lfm2ForCausalLM", "lfm2", NULL, &c, &fault), 0, "%s: %s",
                     fault.field, fault.text);
        cr_assert_eq(c.d_ff, cases[i].d_ff, "%s: %d", cases[i].text, c.d_ff);
        model_config_close(&c);
    }
}

Test(model_config, convolutions_that_are_refused) {
    static const struct {
        const char *text, *architecture, *type, *field;
        int rc;
    } cases[] = {
        {"\"conv_bias\": true,", "Lfm2ForCausalLM", "lfm2", "conv_bias", ERR_UNSUPPORTED},
        {"\"conv_L_cache\": 1,", "Lfm2ForCausalLM", "lfm2", "conv_L_cache", ERR_INVALID},
        {"\"conv_L_cache\": 99,", "Lfm2ForCausalLM", "lfm2", "conv_L_cache", ERR_INVALID},
        {"\"full_attn_idxs\": [7],", "Lfm2ForCausalLM", "lfm2", "layer_types", ERR_UNSUPPORTED},
        {"\"layer_types\": [\"conv\", \"mamba\", \"conv\"],", "Lfm2ForCausalLM", "lfm2",
         "layer_types", ERR_UNSUPPORTED},
        {"\"conv_L_cache\": 3,", "LlamaForCausalLM", "llama", "conv_L_cache", ERR_UNSUPPORTED},
        {"\"layer_types\": [\"conv\", \"full_attention\", \"conv\"],", "LlamaForCausalLM", "llama",
         "layer_types", ERR_UNSUPPORTED},
        {"\"num_dense_layers\": 1,", "LlamaForCausalLM", "llama", "num_dense_layers",
         ERR_UNSUPPORTED},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model_config c;
        struct fault fault;
        cr_assert_eq(
            parse_with(cases[i].text, cases[i].architecture, cases[i].type, NULL, &c, &fault),
            cases[i].rc, "%s: %s: %s", cases[i].text, fault.field, fault.text);
        cr_assert_str_eq(fault.field, cases[i].field);
    }
}

#define EVERY_SECOND "\"full_attention_interval\": 2,"
#define DELTA                                                                                      \
    "\"head_dim\": 16, \"linear_num_key_heads\": 2, \"linear_num_value_heads\": 6, "               \
    "\"linear_key_head_dim\": 8, \"linear_value_head_dim\": 20," EVERY_SECOND

Test(model_config, layers_with_a_gated_delta_rule) {
    static const char *const spellings[] = {DELTA,
                                            DELTA "\"layer_types\": [\"linear_attention\", "
                                                  "\"full_attention\", \"linear_attention\"],"};
    for (size_t i = 0; i < sizeof spellings / sizeof *spellings; i++) {
        struct model_config c;
        struct fault fault;
        cr_assert_eq(
            parse_with(spellings[i], "Qwen3_5ForCausalLM", "qwen3_5_text", NULL, &c, &fault), 0,
            "%s: %s", fault.field, fault.text);
        cr_assert(c.cache_layers == 1 && c.state_layers == 2 && c.conv_width == 4);
        cr_assert(c.per_layer[0].mixer == MIXER_DELTA && c.per_layer[1].mixer == MIXER_ATTENTION);
        cr_assert(c.attn_gate && c.qk_norm && c.norm_offset == 1 && c.rotary_dims == 4);
        cr_assert(c.qwen35_names && !c.qwen3_next_names && c.delta.heads_v == 6);
        /* A key head has three numbers of each channel, and three matrices of 8 rows and of 20
         * columns in two blocks. */
        const int floats = 2 * (3 * (8 + 8 + 3 * 20) + 3 * 8 * 32);
        cr_assert_eq(model_cache_options(&c).state_floats, floats);
        model_config_close(&c);
    }
}

#define GRANITE_HYBRID                                                                             \
    "\"layer_types\": [\"mamba\", \"attention\", \"mamba\"], \"position_embedding_type\": "        \
    "\"nope\", "                                                                                   \
    "\"mamba_n_heads\": 8, \"mamba_n_groups\": 2, \"mamba_d_state\": 24, \"mamba_d_head\": "       \
    "\"auto\", "                                                                                   \
    "\"mamba_expand\": 3, \"embedding_multiplier\": 12, \"logits_scaling\": 8, "                   \
    "\"residual_multiplier\": 0.5, \"attention_multiplier\": 0.25, \"shared_intermediate_size\": " \
    "40, "                                                                                         \
    "\"rms_norm_eps\": 1e-5,"
#define ROUTED "\"num_local_experts\": 6, \"num_experts_per_tok\": 2,"

static int parse_granite(const char *more, struct model_config *c, struct fault *fault) {
    char text[1024];
    snprintf(text, sizeof text, "%s%s", more, GRANITE_HYBRID);
    return parse_with(text, "GraniteMoeHybridForCausalLM", "granitemoehybrid", NULL, c, fault);
}

Test(model_config, layers_of_mamba) {
    static const char *const spellings[] = {ROUTED, "\"num_local_experts\": 0,",
                                            ROUTED "\"time_step_limit\": [0.0, Infinity],"};
    for (size_t i = 0; i < sizeof spellings / sizeof *spellings; i++) {
        struct model_config c;
        struct fault fault;
        const bool routed = i != 1;
        cr_assert_eq(parse_granite(spellings[i], &c, &fault), 0, "%s: %s", fault.field, fault.text);
        cr_assert(c.layers == 3 && c.cache_layers == 1 && c.state_layers == 2 && c.conv_width == 4);
        cr_assert(c.per_layer[0].mixer == MIXER_MAMBA && !c.per_layer[1].rotated && c.conv_bias);
        cr_assert(c.mamba.heads == 8 && c.mamba.groups == 2 && c.mamba.dim_state == 24);
        cr_assert_eq(c.mamba.dim, 3 * c.d_model / 8);
        cr_assert_float_eq(c.mamba.eps, 1e-5f, 1e-10f); /* the layers' is divided by 0.5^2 */
        cr_assert_float_eq(c.rms_eps, 4e-5f, 1e-9f);
        cr_assert(c.experts == (routed ? 6 : 0) && c.shared_ff == (routed ? 40 : 0));
        cr_assert_eq(c.d_ff, 40);
        /* Three numbers of each channel; matrices of 24 rows, and of 24 columns in two blocks. */
        const int shared = 3 * 2 * 2 * 24, head = 3 * 24 + 24 * 32;
        const struct kern_cache_options cache = model_cache_options(&c);
        cr_assert_eq(cache.state_floats, shared + 8 * head);
        cr_assert(cache.state_shared == shared && kern_state_part(&cache, 4) == shared + 2 * head);
        model_config_close(&c);
    }
}

Test(model_config, mamba_that_is_refused) {
    static const struct {
        const char *text, *field;
        int rc;
    } cases[] = {
        {ROUTED "\"mamba_proj_bias\": true,", "mamba_proj_bias", ERR_UNSUPPORTED},
        {ROUTED "\"time_step_limit\": [0.001, null],", "time_step_limit", ERR_UNSUPPORTED},
        {ROUTED "\"time_step_limit\": [0, 1],", "time_step_limit", ERR_UNSUPPORTED},
        {ROUTED "\"mamba_d_conv\": 1,", "mamba_d_conv", ERR_INVALID},
        {"\"num_experts_per_tok\": 2,", "num_local_experts", ERR_INVALID},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model_config c;
        struct fault fault;
        cr_assert_eq(parse_granite(cases[i].text, &c, &fault), cases[i].rc, "%s: %s: %s",
                     cases[i].text, fault.field, fault.text);
        cr_assert_str_eq(fault.field, cases[i].field);
    }
}

#define NEMOTRON                                                                                   \
    "\"mlp_hidden_act\": \"relu2\", \"layer_norm_epsilon\": 1e-4, \"head_dim\": 24, "              \
    "\"mamba_num_heads\": 6, \"mamba_head_dim\": 20, \"n_groups\": 3, \"ssm_state_size\": 16, "    \
    "\"conv_kernel\": 3, \"use_conv_bias\": false, \"time_step_limit\": [0.0, Infinity], "
#define NEMOTRON_ROUTED                                                                            \
    "\"n_routed_experts\": 8, \"num_experts_per_tok\": 2, \"moe_intermediate_size\": 40, "         \
    "\"moe_shared_expert_intermediate_size\": 56, \"n_shared_experts\": 1, \"n_group\": 1, "       \
    "\"topk_group\": 1, \"routed_scaling_factor\": 2.5, \"norm_topk_prob\": true, "

static int parse_nemotron(const char *more, struct model_config *c, struct fault *fault) {
    char text[2048];
    snprintf(text, sizeof text, "%s%s", more, NEMOTRON);
    return parse_with(text, "NemotronHForCausalLM", "nemotron_h", NULL, c, fault);
}

/* The list of layers decides how many there are. */
Test(model_config, layers_that_are_a_network) {
    static const char *const spellings[] = {
        "\"hybrid_override_pattern\": \"M-M*-\",",
        "\"hybrid_override_pattern\": \"MEM*E\"," NEMOTRON_ROUTED,
        "\"layers_block_type\": [\"mamba\", \"moe\", \"linear_attention\", \"attention\", \"moe\"],"
        "\"num_hidden_layers\": 9," NEMOTRON_ROUTED};
    for (size_t i = 0; i < sizeof spellings / sizeof *spellings; i++) {
        struct model_config c;
        struct fault fault;
        const bool routed = i > 0;
        cr_assert_eq(parse_nemotron(spellings[i], &c, &fault), 0, "%s: %s", fault.field,
                     fault.text);
        cr_assert(c.layers == 5 && c.cache_layers == 1 && c.state_layers == 2);
        static const enum mixer mixers[] = {MIXER_MAMBA, MIXER_NONE, MIXER_MAMBA, MIXER_ATTENTION,
                                            MIXER_NONE};
        for (int l = 0; l < 5; l++) {
            const struct model_layer_config *layer = &c.per_layer[l];
            const bool alone = mixers[l] == MIXER_NONE;
            cr_assert(layer->mixer == mixers[l] && layer->no_network == !alone);
            cr_assert(layer->routed == (alone && routed) && !layer->rotated);
        }
        cr_assert(c.per_layer[3].index == 0 && c.per_layer[2].state == 1);
        cr_assert(c.per_layer[1].index == -1 && c.per_layer[1].state == -1);
        cr_assert(c.ungated && c.activation == KERN_RELU && !c.conv_bias && c.head_dim == 24);
        cr_assert(c.mamba.heads == 6 && c.mamba.dim == 20 && c.mamba.groups == 3);
        cr_assert(c.mamba.dim_state == 16 && c.mamba.width == 3 && c.conv_width == 3);
        cr_assert(c.rms_eps == 1e-4f && c.mamba.eps == 1e-4f);
        cr_assert(c.experts == (routed ? 8 : 0) && c.shared_ff == (routed ? 56 : 0));
        cr_assert(!routed || (c.experts_sigmoid && c.select_bias && c.expert_scale == 2.5f));
        model_config_close(&c);
    }
}

#define LAYERS_32  "MMMMMMMMMMMMMMMMMMMMMMMMMMMMMMMM"
#define LAYERS_128 LAYERS_32 LAYERS_32 LAYERS_32 LAYERS_32
#define MANY_LAYERS                                                                                \
    LAYERS_128 LAYERS_128 LAYERS_128 LAYERS_128 "*" /* one more than there may be                  \
                                                     */

Test(model_config, networks_alone_that_are_refused) {
    static const struct {
        const char *text, *field;
        int rc;
    } cases[] = {
        {"", "layers_block_type", ERR_INVALID},
        {"\"hybrid_override_pattern\": \"M?*\",", "layer_types", ERR_UNSUPPORTED},
        {"\"hybrid_override_pattern\": \"M-M\",", "layer_types", ERR_UNSUPPORTED},
        {"\"hybrid_override_pattern\": 3,", "hybrid_override_pattern", ERR_INVALID},
        {"\"hybrid_override_pattern\": \"ME*\",", "num_local_experts", ERR_INVALID},
        {"\"hybrid_override_pattern\": \"ME*\", \"n_routed_experts\": 8, "
         "\"num_experts_per_tok\": 2, \"moe_intermediate_size\": 40,",
         "moe_shared_expert_intermediate_size", ERR_INVALID},
        {"\"hybrid_override_pattern\": \"" MANY_LAYERS "\",", "hybrid_override_pattern",
         ERR_INVALID},
        {"\"hybrid_override_pattern\": \"M*\", \"use_bias\": true,", "use_bias", ERR_UNSUPPORTED},
        {"\"hybrid_override_pattern\": \"M*\", \"n_shared_experts\": 2,", "n_shared_experts",
         ERR_UNSUPPORTED},
        {"\"hybrid_override_pattern\": \"ME*\", \"n_routed_experts\": 8, "
         "\"num_experts_per_tok\": 2, \"moe_intermediate_size\": 40, \"moe_latent_size\": -1,",
         "moe_latent_size", ERR_INVALID},
        {"\"hybrid_override_pattern\": \"M*\", \"mamba_hidden_act\": \"gelu\",", "mamba_hidden_act",
         ERR_UNSUPPORTED},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model_config c;
        struct fault fault;
        cr_assert_eq(parse_nemotron(cases[i].text, &c, &fault), cases[i].rc, "%s: %s: %s",
                     cases[i].text, fault.field, fault.text);
        cr_assert_str_eq(fault.field, cases[i].field);
    }
}

static int parse_falcon(const char *more, struct model_config *c, struct fault *fault) {
    char text[1024];
    snprintf(text, sizeof text,
             "%s\"mamba_n_heads\": 8, \"mamba_d_ssm\": 96, \"mamba_d_head\": \"auto\", "
             "\"mamba_n_groups\": 2, \"mamba_d_state\": 12, ",
             more);
    return parse_with(text, "FalconH1ForCausalLM", "falcon_h1", NULL, c, fault);
}

/* Both in each layer: entries and a state. */
Test(model_config, mamba_beside_attention) {
    struct model_config c;
    struct fault fault;
    cr_assert_eq(parse_falcon("\"embedding_multiplier\": 5, \"lm_head_multiplier\": 0.5, "
                              "\"attention_in_multiplier\": 2, \"attention_out_multiplier\": 3, "
                              "\"key_multiplier\": 0.25, \"ssm_in_multiplier\": 4, "
                              "\"ssm_out_multiplier\": 6, \"ssm_multipliers\": [1, 2, 3, 4, 5], "
                              "\"mlp_multipliers\": [0.75, 7], ",
                              &c, &fault),
                 0, "%s: %s", fault.field, fault.text);
    cr_assert(c.cache_layers == 3 && c.state_layers == 3 && c.mamba.dim == 12 && !c.mamba_norm);
    for (int l = 0; l < 3; l++) {
        const struct model_layer_config *layer = &c.per_layer[l];
        cr_assert(layer->mixer == MIXER_MAMBA && layer_attends(layer) && layer_has_state(layer));
        cr_assert(layer->index == l && layer->state == l && layer->rotated && !layer->no_network);
    }
    const struct model_factors f = c.factors;
    cr_assert(c.embed_scale == 5 && c.logit_scale == 0.5f);
    cr_assert(f.q == 2 && f.k == 0.5f && f.v == 2 && f.o == 3);
    cr_assert(f.z == 4 && f.x == 8 && f.b == 12 && f.c == 16 && f.dt == 20 && f.state_out == 6);
    cr_assert(f.gate == 0.75f && f.down == 7);
    model_config_close(&c);
    cr_assert_eq(
        parse_falcon("\"mamba_rms_norm\": true, \"mamba_norm_before_gate\": false, ", &c, &fault),
        0);
    cr_assert(c.mamba_norm && c.factors.q == 1 && c.embed_scale == 1);
    model_config_close(&c);
}

Test(model_config, mamba_beside_attention_that_is_refused) {
    static const struct {
        const char *text, *field;
        int rc;
    } cases[] = {
        {"\"mamba_rms_norm\": true, ", "mamba_norm_before_gate", ERR_UNSUPPORTED},
        {"\"attention_bias\": true, \"key_multiplier\": 0.5, ", "attention_bias", ERR_UNSUPPORTED},
        {"\"attention_bias\": true, \"attention_out_multiplier\": 0.5, ", "attention_bias",
         ERR_UNSUPPORTED},
        {"\"projectors_bias\": true, ", "projectors_bias", ERR_UNSUPPORTED},
        {"\"ssm_multipliers\": [1, 2, 3, 4], ", "ssm_multipliers", ERR_INVALID},
        {"\"mlp_multipliers\": [1, 0], ", "mlp_multipliers", ERR_INVALID},
        {"\"mlp_multipliers\": 2, ", "mlp_multipliers", ERR_INVALID},
        {"\"key_multiplier\": -1, ", "key_multiplier", ERR_INVALID},
        {"\"residual_multiplier\": 2, ", "residual_multiplier", ERR_UNSUPPORTED},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model_config c;
        struct fault fault;
        cr_assert_eq(parse_falcon(cases[i].text, &c, &fault), cases[i].rc, "%s: %s: %s",
                     cases[i].text, fault.field, fault.text);
        cr_assert_str_eq(fault.field, cases[i].field);
    }
    struct model_config c;
    struct fault fault;
    cr_assert_eq(parse_llama("\"key_multiplier\": 2,", &c, &fault), ERR_UNSUPPORTED);
    cr_assert_str_eq(fault.field, "key_multiplier");
}

/* Qwen3.5's mixtures have no width of dense layers, and may lie in "text_config". */
Test(model_config, mixtures_with_a_gated_delta_rule) {
    static const char text[] =
        "{\"architectures\": [\"Qwen3_5MoeForConditionalGeneration\"], \"model_type\": "
        "\"qwen3_5_moe\", \"text_config\": {\"model_type\": \"qwen3_5_moe_text\", "
        "\"hidden_size\": 64, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, "
        "\"num_hidden_layers\": 4, \"vocab_size\": 128, \"max_position_embeddings\": 64, "
        "\"num_experts\": 8, \"num_experts_per_tok\": 2, \"moe_intermediate_size\": 24, "
        "\"shared_expert_intermediate_size\": 40%s}}";
    char whole[1024];
    struct model_config c;
    struct fault fault = {0};
    snprintf(whole, sizeof whole, text, "");
    cr_assert_eq(model_config_parse(whole, strlen(whole), NULL, 0, 0, &c, &fault), 0, "%s: %s",
                 fault.field, fault.text);
    cr_assert(c.experts == 8 && c.shared_ff == 40 && c.shared_gate && c.stacked_experts);
    cr_assert(c.experts_normalised && c.d_ff == 0 && c.head_dim == 256 && c.rotary_dims == 64);
    cr_assert(c.state_layers == 3 && c.delta.heads_k == 16 && c.delta.dim_v == 128);
    model_config_close(&c);
    snprintf(whole, sizeof whole, text, ", \"mlp_only_layers\": [1]");
    cr_assert_eq(model_config_parse(whole, strlen(whole), NULL, 0, 0, &c, &fault), ERR_INVALID);
    cr_assert_str_eq(fault.field, "intermediate_size");
}

Test(model_config, delta_rules_that_are_refused) {
    static const struct {
        const char *text, *architecture, *type, *field;
        int rc;
    } cases[] = {
        {DELTA "\"attn_output_gate\": false,", "Qwen3_5ForCausalLM", "qwen3_5_text",
         "attn_output_gate", ERR_UNSUPPORTED},
        {DELTA "\"attention_bias\": true,", "Qwen3_5ForCausalLM", "qwen3_5_text", "attention_bias",
         ERR_UNSUPPORTED},
        {DELTA "\"linear_num_key_heads\": 4,", "Qwen3_5ForCausalLM", "qwen3_5_text",
         "linear_num_value_heads", ERR_INVALID},
        {EVERY_SECOND "\"linear_key_head_dim\": 6,", "Qwen3_5ForCausalLM", "qwen3_5_text",
         "linear_key_head_dim", ERR_UNSUPPORTED},
        {EVERY_SECOND "\"linear_key_head_dim\": 512,", "Qwen3_5ForCausalLM", "qwen3_5_text",
         "linear_key_head_dim", ERR_INVALID},
        {"\"layer_types\": [\"linear_attention\", \"conv\", \"full_attention\"],",
         "Qwen3_5ForCausalLM", "qwen3_5_text", "layer_types", ERR_UNSUPPORTED},
        {"", "Qwen3_5ForCausalLM", "qwen3_5_text", "layer_types", ERR_UNSUPPORTED},
        {"\"linear_num_key_heads\": 3,", "Qwen3ForCausalLM", "qwen3", "linear_num_key_heads",
         ERR_UNSUPPORTED},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model_config c;
        struct fault fault;
        cr_assert_eq(
            parse_with(cases[i].text, cases[i].architecture, cases[i].type, NULL, &c, &fault),
            cases[i].rc, "%s: %s: %s", cases[i].text, fault.field, fault.text);
        cr_assert_str_eq(fault.field, cases[i].field, "%s: %s", cases[i].text, fault.text);
    }
}

Test(model_config, refused_mixtures_say_why) {
    static const struct {
        const char *architecture, *type, *why;
    } cases[] = {
        {"DeepseekV32ForCausalLM", "deepseek_v32", "(attention to tokens that an index chooses)"},
        {"DeepseekV4ForCausalLM", "deepseek_v4", "compressed entries"},
        {"Llama4ForConditionalGeneration", "llama4", "(its shared expert, and attention in"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model_config c;
        struct fault fault;
        cr_assert_eq(parse_with("", cases[i].architecture, cases[i].type, NULL, &c, &fault),
                     ERR_UNSUPPORTED);
        cr_expect_not_null(strstr(fault.text, cases[i].why), "%s", fault.text);
    }
}

#define LATENT(rank, still, turned, value)                                                         \
    "\"kv_lora_rank\": " rank ", \"qk_nope_head_dim\": " still ", \"qk_rope_head_dim\": " turned   \
    ", \"v_head_dim\": " value ", "
#define YARN(factor, original, mscale, more)                                                       \
    "\"rope_scaling\": {\"beta_fast\": 32, \"beta_slow\": 1, \"factor\": " factor                  \
    ", \"mscale\": " mscale ", \"mscale_all_dim\": " mscale                                        \
    ", \"original_max_position_embeddings\": " original more ", \"type\": \"yarn\"}"

/* As published. */
Test(model_config, latent_attention) {
    static const struct {
        const char *text;
        const char *family;
        int heads, rank, still, turned, dim_v, q_rank;
        int experts, used, groups, routed, shared_ff, positions;
        bool sigmoid, best;
        double scale;    /* factor of experts */
        double products; /* factor of queries and keys, times sqrt(still + turned) */
    } cases[] = {
        {/* V2-Lite */ NAMED("DeepseekV2ForCausalLM", "deepseek_v2")
             SIZES("2048", "10944", "27", "16", "16", "102400", "163840")
                 LATENT("512", "128", "64",
                        "128") "\"q_lora_rank\": null, \"first_k_dense_replace\": 1, "
                               "\"moe_intermediate_size\": 1408, "
                               "\"moe_layer_freq\": 1, \"n_group\": 1, \"n_routed_experts\": "
                               "64, \"n_shared_experts\": "
                               "2, \"norm_topk_prob\": false, \"num_experts_per_tok\": 6, "
                               "\"routed_scaling_factor\": "
                               "1.0, \"scoring_func\": \"softmax\", \"topk_group\": 1, "
                               "\"topk_method\": \"greedy\", "
                               "\"rope_theta\": 10000, " YARN("40", "4096", "0.707", "") "}",
         "deepseek_v2", 16, 512, 128, 64, 128, 0, 64, 6, 1, 26, 2816, 163840, false, false, 1,
         1.589622},
        {/* V2 */ NAMED("DeepseekV2ForCausalLM", "deepseek_v2")
             SIZES("5120", "12288", "60", "128", "128", "102400", "163840")
                 LATENT("512", "128", "64",
                        "128") "\"q_lora_rank\": 1536, \"first_k_dense_replace\": 1, "
                               "\"moe_intermediate_size\": 1536, "
                               "\"n_group\": 8, \"n_routed_experts\": 160, "
                               "\"n_shared_experts\": 2, \"norm_topk_prob\": "
                               "false, \"num_experts_per_tok\": 6, \"routed_scaling_factor\": "
                               "16.0, \"topk_group\": 3, "
                               "\"topk_method\": \"group_limited_greedy\", " YARN("40", "4096",
                                                                                  "0.707", "") "}",
         "deepseek_v2", 128, 512, 128, 64, 128, 1536, 160, 6, 8, 59, 3072, 163840, false, true, 16,
         1.589622},
        {/* V3 */ NAMED("DeepseekV3ForCausalLM", "deepseek_v3") SIZES("7168", "18432", "61", "128",
                                                                      "128", "129280", "163840")
             LATENT("512", "128", "64",
                    "128") "\"q_lora_rank\": 1536, \"first_k_dense_replace\": 3, "
                           "\"moe_intermediate_size\": 2048, "
                           "\"n_group\": 8, \"n_routed_experts\": 256, \"n_shared_experts\": 1, "
                           "\"norm_topk_prob\": "
                           "true, \"num_experts_per_tok\": 8, \"num_nextn_predict_layers\": 1, "
                           "\"routed_scaling_factor\": 2.5, \"scoring_func\": \"sigmoid\", "
                           "\"topk_group\": 4, "
                           "\"topk_method\": \"noaux_tc\", " YARN(
                               "40", "4096", "1.0",
                               "") ", "
                                   "\"quantization_config\": {\"activation_scheme\": \"dynamic\", "
                                   "\"fmt\": \"e4m3\", "
                                   "\"quant_method\": \"fp8\", \"weight_block_size\": [128, "
                                   "128]}}",
         "deepseek_v3", 128, 512, 128, 64, 128, 1536, 256, 8, 8, 58, 2048, 163840, true, false, 2.5,
         1.873854},
        {NAMED("DeepseekV3ForCausalLM", "kimi_k2")
             SIZES("7168", "18432", "61", "64", "64", "163840", "131072")
                 LATENT("512", "128", "64",
                        "128") "\"q_lora_rank\": 1536, \"first_k_dense_replace\": 1, "
                               "\"moe_intermediate_size\": 2048, "
                               "\"n_group\": 1, \"n_routed_experts\": 384, "
                               "\"n_shared_experts\": 1, \"norm_topk_prob\": "
                               "true, \"num_experts_per_tok\": 8, "
                               "\"num_nextn_predict_layers\": 0, "
                               "\"routed_scaling_factor\": 2.827, \"scoring_func\": "
                               "\"sigmoid\", \"topk_group\": 1, "
                               "\"topk_method\": \"noaux_tc\", \"rope_theta\": 50000.0, " YARN(
                                   "32", "4096", "1.0", "") "}",
         "kimi_k2", 64, 512, 128, 64, 128, 1536, 384, 8, 1, 60, 2048, 131072, true, false, 2.827,
         1.813254},
        {NAMED("Glm4MoeLiteForCausalLM", "glm4_moe_lite")
             SIZES("2048", "10240", "47", "20", "20", "154880", "202752") LATENT(
                 "512", "192", "64", "256") "\"q_lora_rank\": 768, \"first_k_dense_replace\": 1, "
                                            "\"moe_intermediate_size\": 1536, "
                                            "\"n_group\": 1, \"n_routed_experts\": 64, "
                                            "\"n_shared_experts\": 1, \"norm_topk_prob\": "
                                            "true, \"num_experts_per_tok\": 4, "
                                            "\"num_nextn_predict_layers\": 1, "
                                            "\"routed_scaling_factor\": 1.8, \"topk_group\": 1, "
                                            "\"topk_method\": \"noaux_tc\", "
                                            "\"rope_scaling\": null, \"rope_theta\": 1000000}",
         "glm4_moe_lite", 20, 512, 192, 64, 256, 768, 64, 4, 1, 46, 1536, 202752, true, false, 1.8,
         1},
        {NAMED("Mistral3ForConditionalGeneration",
               "mistral3") "\"text_config\": {\"model_type\": \"mistral4\", " SIZES("4096", "12288",
                                                                                    "36", "32",
                                                                                    "32", "131072",
                                                                                    "1048576")
             LATENT("256", "64", "64",
                    "128") "\"q_lora_rank\": 1024, \"first_k_dense_replace\": 0, "
                           "\"moe_intermediate_size\": 2048, "
                           "\"n_routed_experts\": 128, \"num_experts_per_tok\": 4, "
                           "\"rope_parameters\": {\"type\": \"yarn\", \"rope_theta\": "
                           "10000.0, \"factor\": 128.0, "
                           "\"original_max_position_embeddings\": 8192, \"mscale\": 1.0, "
                           "\"mscale_all_dim\": 1.0, "
                           "\"llama_4_scaling_beta\": 0.1, \"partial_rotary_factor\": 0.5}}}",
         "mistral4", 32, 256, 64, 64, 128, 1024, 128, 4, 1, 36, 2048, 1048576, false, false, 1,
         2.205836},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model_config c;
        struct fault fault;
        cr_assert_eq(parse(cases[i].text, &c, &fault), 0, "%s: %s: %s", cases[i].family,
                     fault.field, fault.text);
        const struct kern_latent *latent = &c.latent;
        int routed = 0;
        for (int l = 0; l < c.layers; l++) routed += c.per_layer[l].routed;
        const struct kern_cache_options cache = model_cache_options(&c);
        cr_expect_str_eq(c.family, cases[i].family);
        cr_expect(latent->heads == cases[i].heads && latent->rank == cases[i].rank &&
                      latent->still == cases[i].still && latent->turned == cases[i].turned &&
                      latent->dim_v == cases[i].dim_v && c.q_rank == cases[i].q_rank,
                  "%s", c.family);
        cr_expect(c.heads_kv == 1 && c.head_dim == latent->rank + latent->turned, "%s", c.family);
        cr_expect(cache.latent == latent->rank && kern_streams(&cache) == c.layers, "%s", c.family);
        cr_expect(c.experts == cases[i].experts && c.experts_used == cases[i].used &&
                      c.expert_groups == cases[i].groups && routed == cases[i].routed &&
                      c.shared_ff == cases[i].shared_ff,
                  "%s", c.family);
        cr_expect(c.experts_sigmoid == cases[i].sigmoid && c.select_bias == cases[i].sigmoid &&
                      c.expert_group_best == cases[i].best,
                  "%s", c.family);
        cr_expect_eq(c.max_positions, cases[i].positions, "%s: %d", c.family, c.max_positions);
        cr_expect_float_eq((double)c.expert_scale, cases[i].scale, 1e-6, "%s", c.family);
        cr_expect_float_eq((double)c.attend_scale * sqrt(latent->still + latent->turned),
                           cases[i].products, 1e-5, "%s: %.6f", c.family,
                           (double)c.attend_scale * sqrt(latent->still + latent->turned));
        cr_expect(c.rope_scale == 1 && c.rotary_dims == latent->turned, "%s", c.family);
        model_config_close(&c);
    }
}

Test(model_config, latent_attention_that_is_refused) {
    static const char sizes[] = LATENT("512", "128", "64", "128") EXPERTS("8", "2", "24");
    static const struct {
        const char *text, *architecture, *type, *field;
        int rc;
    } cases[] = {
        {"\"kv_lora_rank\": 512,", "DeepseekV3ForCausalLM", "deepseek_v3", "qk_nope_head_dim",
         ERR_INVALID},
        {"\"kv_lora_rank\": 512,", "Qwen3ForCausalLM", "qwen3", "kv_lora_rank", ERR_UNSUPPORTED},
        {LATENT("511", "128", "64", "128"), "DeepseekV3ForCausalLM", "deepseek_v3", "kv_lora_rank",
         ERR_UNSUPPORTED},
        {LATENT("1000", "128", "64", "128"), "DeepseekV3ForCausalLM", "deepseek_v3", "head_dim",
         ERR_INVALID},
        {"\"attention_bias\": true,", "DeepseekV3ForCausalLM", "deepseek_v3", "attention_bias",
         ERR_UNSUPPORTED},
        {"\"topk_method\": \"noaux_tc\",", "DeepseekV2ForCausalLM", "deepseek_v2", "topk_method",
         ERR_UNSUPPORTED},
        {"\"norm_topk_prob\": true,", "DeepseekV2ForCausalLM", "deepseek_v2", "norm_topk_prob",
         ERR_UNSUPPORTED},
        {"\"moe_layer_freq\": 2,", "DeepseekV2ForCausalLM", "deepseek_v2", "moe_layer_freq",
         ERR_UNSUPPORTED},
        {"\"mlp_layer_types\": [\"dense\", \"sparse\", \"other\"],", "Glm4MoeLiteForCausalLM",
         "glm4_moe_lite", "mlp_layer_types", ERR_UNSUPPORTED},
        {"\"mlp_layer_types\": [\"dense\"],", "Glm4MoeLiteForCausalLM", "glm4_moe_lite",
         "mlp_layer_types", ERR_INVALID},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model_config c;
        struct fault fault;
        char text[1024];
        const bool own = strstr(cases[i].text, "kv_lora_rank") != NULL;
        snprintf(text, sizeof text, "%s%s", own ? "" : sizes, cases[i].text);
        cr_assert_eq(parse_with(text, cases[i].architecture, cases[i].type, NULL, &c, &fault),
                     cases[i].rc, "%s: %s: %s", cases[i].text, fault.field, fault.text);
        cr_expect_str_eq(fault.field, cases[i].field, "%s: %s", cases[i].text, fault.text);
    }
}

Test(model_config, heads_of_latent_attention) {
    static const char form[] =
        "{\"architectures\": [\"DeepseekV3ForCausalLM\"], \"model_type\": \"deepseek_v3\","
        "\"hidden_size\": 64, \"intermediate_size\": 96, \"num_attention_heads\": %d,"
        "\"num_hidden_layers\": 3, \"vocab_size\": 128, \"max_position_embeddings\": 4096,"
        "\"n_group\": 1, \"topk_group\": 1, %s \"transformers_version\": \"5\"}";
    struct model_config c;
    struct fault fault = {0};
    char text[1024];
    for (int heads = KERN_LATENT_HEADS_MAX; heads <= KERN_LATENT_HEADS_MAX + 1; heads++) {
        const bool fits = heads <= KERN_LATENT_HEADS_MAX;
        snprintf(text, sizeof text, form, heads,
                 LATENT("512", "128", "64", "128") EXPERTS("8", "2", "24"));
        cr_assert_eq(model_config_parse(text, strlen(text), NULL, 0, 0, &c, &fault),
                     fits ? 0 : ERR_UNSUPPORTED, "%s: %s", fault.field, fault.text);
        if (fits) model_config_close(&c);
    }
    cr_expect_str_eq(fault.field, "num_attention_heads");
    cr_expect_not_null(strstr(fault.text, "at most 256"), "%s", fault.text);
}

Test(model_config, layers_with_experts) {
    static const struct {
        const char *text;
        bool routed[3];
    } cases[] = {
        {EXPERTS("8", "2", "24"), {true, true, true}},
        {EXPERTS("8", "2", "24") "\"decoder_sparse_step\": 2,", {false, true, false}},
        {EXPERTS("8", "2", "24") "\"mlp_only_layers\": [0, 2],", {false, true, false}},
        {EXPERTS("8", "2", "24") "\"mlp_only_layers\": [0, 1, 2, 9],", {false, false, false}},
    };
    struct model_config c;
    struct fault fault;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cr_assert_eq(
            parse_with(cases[i].text, "Qwen3MoeForCausalLM", "qwen3_moe", NULL, &c, &fault), 0,
            "%s: %s", fault.field, fault.text);
        bool any = false;
        for (int l = 0; l < c.layers; l++) {
            cr_expect_eq(c.per_layer[l].routed, cases[i].routed[l], "case %zu, layer %d", i, l);
            any = any || c.per_layer[l].routed;
        }
        cr_expect_eq(c.experts, any ? 8 : 0);
        cr_expect_eq(c.expert_ff, any ? 24 : 0);
        cr_expect(!c.experts_normalised);
        model_config_close(&c);
    }
    static const char *const wrong[] = {EXPERTS("8", "9", "24"),
                                        EXPERTS("-1", "1", "24"),
                                        EXPERTS("8", "2", "0"),
                                        EXPERTS("8", "2", "24") "\"mlp_only_layers\": [-1],",
                                        EXPERTS("8", "2", "24") "\"mlp_only_layers\": 3,",
                                        EXPERTS("8", "2", "24") "\"decoder_sparse_step\": 0,"};
    static const char *const fields[] = {"num_experts_per_tok",   "num_experts",
                                         "moe_intermediate_size", "mlp_only_layers",
                                         "mlp_only_layers",       "decoder_sparse_step"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        cr_assert_eq(parse_with(wrong[i], "Qwen3MoeForCausalLM", "qwen3_moe", NULL, &c, &fault),
                     ERR_INVALID, "%s", wrong[i]);
        cr_expect_str_eq(fault.field, fields[i], "%s: %s", wrong[i], fault.field);
    }
}

Test(model_config, gpt_oss) {
    static const char rope[] = "\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4,"
                               "\"original_max_position_embeddings\": 1024},"
                               "\"num_local_experts\": 4, \"num_experts_per_tok\": 2,";
    static const struct {
        const char *more, *field;
        int rc;
    } cases[] = {
        {"\"quantization_config\": {\"quant_method\": \"mxfp4\"},", NULL, 0},
        {"\"swiglu_limit\": 7.0, \"swiglu_alpha\": 1.702,", NULL, 0},
        {"\"swiglu_limit\": 8.0,", "swiglu_limit", ERR_UNSUPPORTED},
        {"\"swiglu_alpha\": 1.0,", "swiglu_alpha", ERR_UNSUPPORTED},
    };
    struct model_config c;
    struct fault fault;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[1024];
        snprintf(text, sizeof text, "%s%s", rope, cases[i].more);
        cr_assert_eq(parse_with(text, "GptOssForCausalLM", "gpt_oss", NULL, &c, &fault),
                     cases[i].rc, "%s: %s", fault.field, fault.text);
        if (cases[i].field) cr_expect_str_eq(fault.field, cases[i].field);
        if (cases[i].rc) continue;
        cr_expect(c.sinks && c.expert_bias && c.qkv_bias && c.o_bias && c.experts_normalised);
        cr_expect_eq(c.activation, KERN_SWIGLU_CLAMPED);
        cr_expect(c.per_layer[0].sliding_window == 128 && c.per_layer[1].sliding_window == 0);
        cr_expect_eq(c.head_dim, 64);
        model_config_close(&c);
    }
    cr_assert_eq(
        parse_with(rope + strlen(rope) - 49, "GptOssForCausalLM", "gpt_oss", NULL, &c, &fault),
        ERR_INVALID, "%s", rope + strlen(rope) - 49);
    cr_expect_str_eq(fault.field, "rope_scaling");
    cr_assert_eq(parse_with("\"quantization_config\": {\"quant_method\": \"mxfp4\"},",
                            "LlamaForCausalLM", "llama", NULL, &c, &fault),
                 ERR_UNSUPPORTED);
    cr_expect_str_eq(fault.field, "quantization_config");
}

/* The fields that published files of Gemma 4 have, and what follows for each layer. */
static void check_gemma4(const char *fields, int shared, int kv, bool equal, int each) {
    struct model_config c;
    struct fault fault = {0};
    char text[2048];
    snprintf(
        text, sizeof text,
        "{\"architectures\": [\"Gemma4ForConditionalGeneration\"], \"model_type\": \"gemma4\", "
        "\"vision_config\": {\"hidden_size\": 9}, \"text_config\": {\"model_type\": "
        "\"gemma4_text\", \"hidden_size\": 96, \"num_hidden_layers\": 12, "
        "\"intermediate_size\": 64, \"num_attention_heads\": 8, \"num_key_value_heads\": 4, "
        "\"use_bidirectional_attention\": \"vision\", \"head_dim\": 256, "
        "\"final_logit_softcapping\": 30.0, \"sliding_window\": 512, %s}}",
        fields);
    cr_assert_eq(model_config_parse(text, strlen(text), NULL, 0, 0, &c, &fault), 0, "%s: %s",
                 fault.field, fault.text);
    cr_expect(c.cache_layers == 12 - shared && c.head_dim == 512 && c.each_embed == each);
    cr_expect(c.attend_scale == 1 && c.logit_cap == 30 && c.norm_offset == 0);
    for (int i = 0; i < 12; i++) {
        const struct model_layer_config *layer = &c.per_layer[i];
        const bool full = i % 6 == 5;
        cr_expect_eq(layer->sliding_window, full ? 0 : 512);
        cr_expect_eq(layer->head_dim, full ? 512 : 256);
        cr_expect_eq(layer->heads_kv, full ? kv : 4);
        cr_expect_eq(layer->keys_are_values, full && equal);
        cr_expect_eq(layer->reads, i >= 12 - shared);
        cr_expect_eq(layer->index, i < 12 - shared ? i : full ? 5 : 11 - shared);
    }
    /* A quarter of the pairs of the wide heads turn, all of the others. */
    cr_expect(c.inv_freq[63] > 0 && c.inv_freq[64] == 0 && c.inv_freq[255] == 0);
    cr_expect_float_eq(c.inv_freq[1], (float)pow(1e6, -2.0 / 512), 1e-6);
    cr_expect_float_eq(c.inv_freq_local[127], (float)pow(1e4, -254.0 / 256), 1e-9);
    model_config_close(&c);
}

Test(model_config, gemma4_has_kinds_of_layers) {
    check_gemma4("\"num_kv_shared_layers\": 5, \"use_double_wide_mlp\": true", 5, 4, false, 256);
    check_gemma4("\"hidden_size_per_layer_input\": 0, \"attention_k_eq_v\": true, "
                 "\"num_global_key_value_heads\": 2",
                 0, 2, true, 0);
    /* As transformers 5.24 writes it. */
    check_gemma4("\"hidden_size_per_layer_input\": 0, \"attention_k_eq_v\": true, "
                 "\"per_layer_config\": {\"5\": {\"head_dim\": 512, \"num_key_value_heads\": 1}, "
                 "\"11\": {\"head_dim\": 512, \"num_key_value_heads\": 1}}",
                 0, 1, true, 0);
}

Test(model_config, gemma4_refuses_what_it_does_not_compute) {
    static const struct {
        const char *fields, *field;
        int rc;
    } cases[] = {
        {"\"enable_moe_block\": true", "num_local_experts", ERR_INVALID},
        {"\"enable_moe_block\": true, \"num_experts\": 4, \"top_k_experts\": 5, "
         "\"moe_intermediate_size\": 8",
         "top_k_experts", ERR_INVALID},
        {"\"enable_moe_block\": true, \"num_experts\": 4, \"top_k_experts\": 2, "
         "\"moe_intermediate_size\": 8, \"num_kv_shared_layers\": 1, \"use_double_wide_mlp\": "
         "true, "
         "\"layer_types\": [\"full_attention\", \"full_attention\", \"full_attention\"]",
         "use_double_wide_mlp", ERR_UNSUPPORTED},
        {"\"use_bidirectional_attention\": \"all\"", "use_bidirectional_attention", ERR_INVALID},
        {"\"attention_bias\": true", "attention_bias", ERR_UNSUPPORTED},
        {"\"num_kv_shared_layers\": 2", "num_kv_shared_layers", ERR_INVALID},
        {"\"vocab_size_per_layer_input\": 5", "vocab_size_per_layer_input", ERR_UNSUPPORTED},
        {"\"global_head_dim\": 33", "global_head_dim", ERR_INVALID},
        {"\"rope_parameters\": {\"full_attention\": {\"rope_type\": \"proportional\", "
         "\"partial_rotary_factor\": 0.001}}",
         "partial_rotary_factor", ERR_UNSUPPORTED},
        {"\"rope_parameters\": {\"full_attention\": {\"rope_type\": \"default\", "
         "\"partial_rotary_factor\": 0.25}}",
         "rope_type", ERR_UNSUPPORTED},
        {"\"per_layer_config\": {\"0\": {\"head_dim\": 8}}", "per_layer_config", ERR_UNSUPPORTED},
        {"\"per_layer_config\": [{}]", "per_layer_config", ERR_INVALID},
        {"\"per_layer_config\": 3", "per_layer_config", ERR_INVALID},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model_config c;
        struct fault fault = {0};
        char text[1024];
        snprintf(text, sizeof text,
                 "{\"model_type\": \"gemma4_text\", \"hidden_size\": 96, \"num_hidden_layers\": 3, "
                 "\"intermediate_size\": 64, %s}",
                 cases[i].fields);
        cr_expect_eq(model_config_parse(text, strlen(text), NULL, 0, 0, &c, &fault), cases[i].rc,
                     "%s: %s", cases[i].fields, fault.text);
        cr_expect(strstr(fault.field, cases[i].field), "%s: %s", cases[i].fields, fault.field);
    }
}
