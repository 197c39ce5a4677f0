/* The table of tensors: the names of each naming convention, the shapes, the places of rows. Files
 * and families differ only in this table and in that of slots.c. */
#include "model/tensors.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "model/internal.h"

/* ---- Tensors ---- */

enum width {
    WIDTH_NONE,
    WIDTH_MODEL,
    WIDTH_MODEL_TWICE,
    WIDTH_Q,
    WIDTH_KV,
    WIDTH_Q_NORM,
    WIDTH_K_NORM,
    WIDTH_FF,
    WIDTH_VOCAB,
    WIDTH_HEADS,
    WIDTH_EXPERTS,
    WIDTH_EXPERT_FF,
    WIDTH_EXPERT_MODEL, /* the inputs of experts */
    WIDTH_SHARED_FF,
    WIDTH_TAPS,
    WIDTH_ONE,
    WIDTH_KEYS, /* gated delta rules */
    WIDTH_KEYS_TWICE,
    WIDTH_VALUES,
    WIDTH_VALUE,
    WIDTH_VALUE_HEADS,
    WIDTH_MAMBA, /* Mamba-2 */
    WIDTH_MAMBA_HEADS,
    WIDTH_MAMBA_GROUPS,
    WIDTH_MAMBA_OF_GROUP,
    WIDTH_MAMBA_STATES,
    WIDTH_MAMBA_CHANNELS,
    WIDTH_EACH, /* embeddings of one layer, and of all */
    WIDTH_EACH_ALL,
    WIDTH_HEADS_OUT, /* all heads' numbers that attention hands on */
    WIDTH_LATENT_Q_DOWN,
    WIDTH_LATENT_ENTRY,
    WIDTH_LATENT,
    WIDTH_LATENT_STILL,
    WIDTH_LATENT_VALUE,
    WIDTH_POSITIONS,
    WIDTH_TYPES,
    WIDTH_LABELS,
    WIDTH_DENSE_1,
    WIDTH_DENSE_2
};

/* Names of a role of Mamba-2. */
#define MAMBA(granite, nemotron, gguf)                                                             \
    {                                                                                              \
        [NAMING_HF_GRANITE_HYBRID] = granite, [NAMING_HF_NEMOTRON_H] = nemotron,                   \
        [NAMING_GGUF_MAMBA] = gguf                                                                 \
    }

static const struct {
    /* NULL: as base_of the naming; "": none; # is the expert's number. */
    const char *names[NAMING_COUNT];
    enum width rows, cols;
    bool in_layer;
} tensors[ROLE_COUNT] = {
    [ROLE_EMBED] = {{"model.embed_tokens.weight", NULL,
                     "token_embd.weight", [NAMING_HF_NEMOTRON_H] = "model.embeddings.weight",
                     [NAMING_HF_BERT] = "embeddings.word_embeddings.weight",
                     [NAMING_HF_MODERN_BERT] = "model.embeddings.tok_embeddings.weight"},
                    WIDTH_VOCAB,
                    WIDTH_MODEL,
                    false},
    [ROLE_FINAL_NORM] = {{"model.norm.weight", NULL,
                          "output_norm.weight", [NAMING_HF_LFM2] = "model.embedding_norm.weight",
                          [NAMING_GGUF_LFM2] = "token_embd_norm.weight",
                          [NAMING_HF_NEMOTRON_H] = "model.norm_f.weight",
                          [NAMING_HF_FALCON_H1] = "model.final_layernorm.weight",
                          [NAMING_HF_MODERN_BERT] = "model.final_norm.weight"},
                         WIDTH_MODEL,
                         WIDTH_NONE,
                         false},
    [ROLE_EMBED_NORM] = {{[NAMING_HF_BERT] = "embeddings.LayerNorm.weight",
                          [NAMING_HF_NOMIC_BERT] = "emb_ln.weight",
                          [NAMING_GGUF_BERT] = "token_embd_norm.weight",
                          [NAMING_HF_MODERN_BERT] = "model.embeddings.norm.weight",
                          [NAMING_GGUF_MODERN_BERT] = "token_embd_norm.weight"},
                         WIDTH_MODEL,
                         WIDTH_NONE,
                         false},
    [ROLE_EMBED_NORM_BIAS] = {{[NAMING_HF_BERT] = "embeddings.LayerNorm.bias",
                               [NAMING_HF_NOMIC_BERT] = "emb_ln.bias",
                               [NAMING_GGUF_BERT] = "token_embd_norm.bias"},
                              WIDTH_MODEL,
                              WIDTH_NONE,
                              false},
    [ROLE_POSITIONS] = {{[NAMING_HF_BERT] = "embeddings.position_embeddings.weight",
                         [NAMING_GGUF_BERT] = "position_embd.weight"},
                        WIDTH_POSITIONS,
                        WIDTH_MODEL,
                        false},
    [ROLE_TYPES] = {{[NAMING_HF_BERT] = "embeddings.token_type_embeddings.weight",
                     [NAMING_GGUF_BERT] = "token_types.weight"},
                    WIDTH_TYPES,
                    WIDTH_MODEL,
                    false},
    [ROLE_CLASSIFIER_IN] = {{[NAMING_HF_BERT] = "pooler.dense.weight",
                             [NAMING_HF_ROBERTA] = "classifier.dense.weight",
                             [NAMING_GGUF_BERT] = "cls.weight"},
                            WIDTH_MODEL,
                            WIDTH_MODEL,
                            false},
    [ROLE_CLASSIFIER_IN_BIAS] = {{[NAMING_HF_BERT] = "pooler.dense.bias",
                                  [NAMING_HF_ROBERTA] = "classifier.dense.bias",
                                  [NAMING_GGUF_BERT] = "cls.bias"},
                                 WIDTH_MODEL,
                                 WIDTH_NONE,
                                 false},
    [ROLE_CLASSIFIER_OUT] = {{[NAMING_HF_BERT] = "classifier.weight",
                              [NAMING_HF_ROBERTA] = "classifier.out_proj.weight",
                              [NAMING_GGUF_BERT] = "cls.output.weight"},
                             WIDTH_LABELS,
                             WIDTH_MODEL,
                             false},
    [ROLE_CLASSIFIER_OUT_BIAS] = {{[NAMING_HF_BERT] = "classifier.bias",
                                   [NAMING_HF_ROBERTA] = "classifier.out_proj.bias",
                                   [NAMING_GGUF_BERT] = "cls.output.bias"},
                                  WIDTH_LABELS,
                                  WIDTH_NONE,
                                  false},
    [ROLE_DENSE_1] = {{"dense.0.linear.weight", NULL, "dense_2.weight"},
                      WIDTH_DENSE_1,
                      WIDTH_MODEL,
                      false},
    [ROLE_DENSE_1_BIAS] = {{"dense.0.linear.bias", NULL, "dense_2.bias"},
                           WIDTH_DENSE_1,
                           WIDTH_NONE,
                           false},
    [ROLE_DENSE_2] = {{"dense.1.linear.weight", NULL, "dense_3.weight"},
                      WIDTH_DENSE_2,
                      WIDTH_DENSE_1,
                      false},
    [ROLE_DENSE_2_BIAS] = {{"dense.1.linear.bias", NULL, "dense_3.bias"},
                           WIDTH_DENSE_2,
                           WIDTH_NONE,
                           false},
    [ROLE_HEAD] = {{"lm_head.weight", NULL, "output.weight"}, WIDTH_VOCAB, WIDTH_MODEL, false},
    [ROLE_ATTN_NORM] =
        {{"input_layernorm.weight", NULL,
          "attn_norm.weight", [NAMING_HF_LFM2] = "operator_norm.weight",
          [NAMING_HF_NEMOTRON_H] = "norm.weight", [NAMING_HF_MODERN_BERT] = "attn_norm.weight"},
         WIDTH_MODEL,
         WIDTH_NONE,
         true},
    [ROLE_Q] =
        {{"self_attn.q_proj.weight", "self_attn.qkv_proj.weight", "attn_q.weight",
          [NAMING_GGUF_FUSED] = "attn_qkv.weight", [NAMING_HF_NEMOTRON_H] = "mixer.q_proj.weight",
          [NAMING_HF_BERT] = "attention.self.query.weight",
          [NAMING_HF_NOMIC_BERT] = "attn.Wqkv.weight", [NAMING_GGUF_NOMIC_BERT] = "attn_qkv.weight",
          [NAMING_HF_MODERN_BERT] = "attn.Wqkv.weight"},
         WIDTH_Q,
         WIDTH_MODEL,
         true},
    [ROLE_K] =
        {{"self_attn.k_proj.weight", "self_attn.qkv_proj.weight", "attn_k.weight",
          [NAMING_GGUF_FUSED] = "attn_qkv.weight", [NAMING_HF_NEMOTRON_H] = "mixer.k_proj.weight",
          [NAMING_HF_BERT] = "attention.self.key.weight",
          [NAMING_HF_NOMIC_BERT] = "attn.Wqkv.weight", [NAMING_GGUF_NOMIC_BERT] = "attn_qkv.weight",
          [NAMING_HF_MODERN_BERT] = "attn.Wqkv.weight"},
         WIDTH_KV,
         WIDTH_MODEL,
         true},
    [ROLE_V] =
        {{"self_attn.v_proj.weight", "self_attn.qkv_proj.weight", "attn_v.weight",
          [NAMING_GGUF_FUSED] = "attn_qkv.weight", [NAMING_HF_NEMOTRON_H] = "mixer.v_proj.weight",
          [NAMING_HF_BERT] = "attention.self.value.weight",
          [NAMING_HF_NOMIC_BERT] = "attn.Wqkv.weight", [NAMING_GGUF_NOMIC_BERT] = "attn_qkv.weight",
          [NAMING_HF_MODERN_BERT] = "attn.Wqkv.weight"},
         WIDTH_KV,
         WIDTH_MODEL,
         true},
    [ROLE_Q_BIAS] = {{"self_attn.q_proj.bias", NULL,
                      "attn_q.bias", [NAMING_GGUF_FUSED] = "attn_qkv.bias",
                      [NAMING_HF_NEMOTRON_H] = "mixer.q_proj.bias",
                      [NAMING_HF_BERT] = "attention.self.query.bias",
                      [NAMING_HF_MODERN_BERT] = "attn.Wqkv.bias"},
                     WIDTH_Q,
                     WIDTH_NONE,
                     true},
    [ROLE_K_BIAS] = {{"self_attn.k_proj.bias", NULL,
                      "attn_k.bias", [NAMING_GGUF_FUSED] = "attn_qkv.bias",
                      [NAMING_HF_NEMOTRON_H] = "mixer.k_proj.bias",
                      [NAMING_HF_BERT] = "attention.self.key.bias"},
                     WIDTH_KV,
                     WIDTH_NONE,
                     true},
    [ROLE_V_BIAS] = {{"self_attn.v_proj.bias", NULL,
                      "attn_v.bias", [NAMING_GGUF_FUSED] = "attn_qkv.bias",
                      [NAMING_HF_NEMOTRON_H] = "mixer.v_proj.bias",
                      [NAMING_HF_BERT] = "attention.self.value.bias"},
                     WIDTH_KV,
                     WIDTH_NONE,
                     true},
    [ROLE_Q_NORM] = {{"self_attn.q_norm.weight", NULL,
                      "attn_q_norm.weight", [NAMING_HF_LFM2] = "self_attn.q_layernorm.weight"},
                     WIDTH_Q_NORM,
                     WIDTH_NONE,
                     true},
    [ROLE_K_NORM] = {{"self_attn.k_norm.weight", NULL,
                      "attn_k_norm.weight", [NAMING_HF_LFM2] = "self_attn.k_layernorm.weight"},
                     WIDTH_K_NORM,
                     WIDTH_NONE,
                     true},
    [ROLE_O] = {{"self_attn.o_proj.weight", NULL,
                 "attn_output.weight", [NAMING_HF_LFM2] = "self_attn.out_proj.weight",
                 [NAMING_HF_NEMOTRON_H] = "mixer.o_proj.weight",
                 [NAMING_HF_BERT] = "attention.output.dense.weight",
                 [NAMING_HF_NOMIC_BERT] = "attn.out_proj.weight",
                 [NAMING_HF_MODERN_BERT] = "attn.Wo.weight"},
                WIDTH_MODEL,
                WIDTH_HEADS_OUT,
                true},
    [ROLE_O_BIAS] = {{"self_attn.o_proj.bias", NULL,
                      "attn_output.bias", [NAMING_HF_NEMOTRON_H] = "mixer.o_proj.bias",
                      [NAMING_HF_BERT] = "attention.output.dense.bias",
                      [NAMING_HF_MODERN_BERT] = "attn.Wo.bias"},
                     WIDTH_MODEL,
                     WIDTH_NONE,
                     true},
    [ROLE_ATTN_GATE] = {{"self_attn.gate_proj.weight", NULL,
                         "attn_gate.weight", [NAMING_HF_QWEN35] = "self_attn.q_proj.weight",
                         [NAMING_GGUF_QWEN35] = "attn_q.weight"},
                        WIDTH_Q,
                        WIDTH_MODEL,
                        true},
    [ROLE_ATTN_POST_NORM] = {{[NAMING_GGUF] = "post_attention_norm.weight",
                              [NAMING_GGUF_AFTER_ATTENTION] = "",
                              [NAMING_HF_POST_NORMS] = "post_attention_layernorm.weight",
                              [NAMING_HF_GLM] = "post_self_attn_layernorm.weight",
                              [NAMING_HF_BERT] = "attention.output.LayerNorm.weight",
                              [NAMING_HF_NOMIC_BERT] = "norm1.weight",
                              [NAMING_GGUF_BERT] = "attn_output_norm.weight"},
                             WIDTH_MODEL,
                             WIDTH_NONE,
                             true},
    [ROLE_ATTN_POST_BIAS] = {{[NAMING_HF_BERT] = "attention.output.LayerNorm.bias",
                              [NAMING_HF_NOMIC_BERT] = "norm1.bias",
                              [NAMING_GGUF_BERT] = "attn_output_norm.bias"},
                             WIDTH_MODEL,
                             WIDTH_NONE,
                             true},
    [ROLE_FFN_POST_NORM] = {{[NAMING_GGUF] = "post_ffw_norm.weight",
                             [NAMING_HF_POST_NORMS] = "post_feedforward_layernorm.weight",
                             [NAMING_HF_GLM] = "post_mlp_layernorm.weight",
                             [NAMING_HF_BERT] = "output.LayerNorm.weight",
                             [NAMING_HF_NOMIC_BERT] = "norm2.weight",
                             [NAMING_GGUF_BERT] = "layer_output_norm.weight"},
                            WIDTH_MODEL,
                            WIDTH_NONE,
                            true},
    [ROLE_FFN_POST_BIAS] = {{[NAMING_HF_BERT] = "output.LayerNorm.bias",
                             [NAMING_HF_NOMIC_BERT] = "norm2.bias",
                             [NAMING_GGUF_BERT] = "layer_output_norm.bias"},
                            WIDTH_MODEL,
                            WIDTH_NONE,
                            true},
    [ROLE_UP_BIAS] =
        {{[NAMING_HF_BERT] = "intermediate.dense.bias", [NAMING_GGUF_BERT] = "ffn_up.bias"},
         WIDTH_FF,
         WIDTH_NONE,
         true},
    [ROLE_DOWN_BIAS] =
        {{[NAMING_HF_BERT] = "output.dense.bias", [NAMING_GGUF_BERT] = "ffn_down.bias"},
         WIDTH_MODEL,
         WIDTH_NONE,
         true},
    [ROLE_FFN_NORM] =
        {{"post_attention_layernorm.weight", NULL,
          "ffn_norm.weight", [NAMING_HF_POST_NORMS] = "pre_feedforward_layernorm.weight",
          [NAMING_GGUF_AFTER_ATTENTION] = "post_attention_norm.weight",
          [NAMING_HF_LFM2] = "ffn_norm.weight", [NAMING_HF_NEMOTRON_H] = "",
          [NAMING_HF_FALCON_H1] = "pre_ff_layernorm.weight", [NAMING_GGUF_FALCON_H1] = "ffn_norm",
          [NAMING_HF_MODERN_BERT] = "mlp_norm.weight"},
         WIDTH_MODEL,
         WIDTH_NONE,
         true},
    [ROLE_GATE] =
        {{"mlp.gate_proj.weight", "mlp.gate_up_proj.weight", "ffn_gate.weight",
          [NAMING_GGUF_FUSED] = "ffn_up.weight", [NAMING_GGUF_GLM] = "ffn_up.weight",
          [NAMING_HF_GLM] = "mlp.gate_up_proj.weight", [NAMING_HF_LFM2] = "feed_forward.w1.weight",
          [NAMING_HF_GRANITE_HYBRID_DENSE] = "shared_mlp.input_linear.weight",
          [NAMING_HF_NEMOTRON_H] = "", [NAMING_HF_FALCON_H1] = "feed_forward.gate_proj.weight",
          [NAMING_HF_GEMMA4_MOE] = "", [NAMING_GGUF_GEMMA4_MOE] = "", [NAMING_HF_BERT] = "",
          [NAMING_HF_NOMIC_BERT] = "mlp.fc12.weight", [NAMING_HF_MODERN_BERT] = "mlp.Wi.weight"},
         WIDTH_FF,
         WIDTH_MODEL,
         true},
    [ROLE_UP] =
        {{"mlp.up_proj.weight", "mlp.gate_up_proj.weight", "ffn_up.weight",
          [NAMING_HF_GLM] = "mlp.gate_up_proj.weight", [NAMING_HF_LFM2] = "feed_forward.w3.weight",
          [NAMING_HF_GRANITE_HYBRID_DENSE] = "shared_mlp.input_linear.weight",
          [NAMING_HF_NEMOTRON_H] = "mixer.up_proj.weight",
          [NAMING_HF_FALCON_H1] = "feed_forward.up_proj.weight", [NAMING_HF_GEMMA4_MOE] = "",
          [NAMING_GGUF_GEMMA4_MOE] = "", [NAMING_HF_BERT] = "intermediate.dense.weight",
          [NAMING_HF_NOMIC_BERT] = "mlp.fc11.weight", [NAMING_HF_MODERN_BERT] = "mlp.Wi.weight"},
         WIDTH_FF,
         WIDTH_MODEL,
         true},
    [ROLE_DOWN] =
        {{"mlp.down_proj.weight", NULL,
          "ffn_down.weight", [NAMING_HF_LFM2] = "feed_forward.w2.weight",
          [NAMING_HF_GRANITE_HYBRID_DENSE] = "shared_mlp.output_linear.weight",
          [NAMING_HF_NEMOTRON_H] = "mixer.down_proj.weight",
          [NAMING_HF_FALCON_H1] = "feed_forward.down_proj.weight", [NAMING_HF_GEMMA4_MOE] = "",
          [NAMING_GGUF_GEMMA4_MOE] = "", [NAMING_HF_BERT] = "output.dense.weight",
          [NAMING_HF_NOMIC_BERT] = "mlp.fc2.weight", [NAMING_HF_MODERN_BERT] = "mlp.Wo.weight"},
         WIDTH_MODEL,
         WIDTH_FF,
         true},
    [ROLE_ROUTER] =
        {{"mlp.gate.weight", NULL,
          "ffn_gate_inp.weight", [NAMING_HF_MIXTRAL] = "block_sparse_moe.gate.weight",
          [NAMING_HF_GPT_OSS] = "mlp.router.weight", [NAMING_HF_LFM2] = "feed_forward.gate.weight",
          [NAMING_HF_GRANITE_HYBRID] = "block_sparse_moe.router.layer.weight",
          [NAMING_HF_NEMOTRON_H] = "mixer.gate.weight",
          [NAMING_HF_GEMMA4_MOE] = "router.proj.weight"},
         WIDTH_EXPERTS,
         WIDTH_MODEL,
         true},
    [ROLE_EXPERT_GATE] =
        {{"mlp.experts.#.gate_proj.weight", NULL,
          "ffn_gate_exps.weight", [NAMING_GGUF_EXPERTS_JOINED] = "ffn_gate_up_exps.weight",
          [NAMING_GGUF_BOTH_JOINED] = "ffn_gate_up_exps.weight",
          [NAMING_HF_MIXTRAL] = "block_sparse_moe.experts.#.w1.weight",
          [NAMING_HF_GPT_OSS] = "mlp.experts.gate_up_proj_blocks",
          [NAMING_HF_STACKED] = "mlp.experts.gate_up_proj",
          [NAMING_HF_LFM2] = "feed_forward.experts.#.w1.weight",
          [NAMING_HF_GRANITE_HYBRID] = "block_sparse_moe.input_linear.weight",
          [NAMING_HF_QWEN35_STACKED] = "mlp.experts.gate_up_proj", [NAMING_HF_NEMOTRON_H] = "",
          [NAMING_HF_GEMMA4_MOE] = "experts.gate_up_proj",
          [NAMING_GGUF_GEMMA4_MOE] = "ffn_gate_up_exps.weight"},
         WIDTH_EXPERT_FF,
         WIDTH_EXPERT_MODEL,
         true},
    [ROLE_EXPERT_UP] =
        {{"mlp.experts.#.up_proj.weight", NULL,
          "ffn_up_exps.weight", [NAMING_GGUF_EXPERTS_JOINED] = "ffn_gate_up_exps.weight",
          [NAMING_GGUF_BOTH_JOINED] = "ffn_gate_up_exps.weight",
          [NAMING_HF_MIXTRAL] = "block_sparse_moe.experts.#.w3.weight",
          [NAMING_HF_GPT_OSS] = "mlp.experts.gate_up_proj_blocks",
          [NAMING_HF_STACKED] = "mlp.experts.gate_up_proj",
          [NAMING_HF_LFM2] = "feed_forward.experts.#.w3.weight",
          [NAMING_HF_GRANITE_HYBRID] = "block_sparse_moe.input_linear.weight",
          [NAMING_HF_QWEN35_STACKED] = "mlp.experts.gate_up_proj",
          [NAMING_HF_NEMOTRON_H] = "mixer.experts.#.up_proj.weight",
          [NAMING_HF_GEMMA4_MOE] = "experts.gate_up_proj",
          [NAMING_GGUF_GEMMA4_MOE] = "ffn_gate_up_exps.weight"},
         WIDTH_EXPERT_FF,
         WIDTH_EXPERT_MODEL,
         true},
    [ROLE_EXPERT_DOWN] =
        {{"mlp.experts.#.down_proj.weight", NULL,
          "ffn_down_exps.weight", [NAMING_HF_MIXTRAL] = "block_sparse_moe.experts.#.w2.weight",
          [NAMING_HF_GPT_OSS] = "mlp.experts.down_proj_blocks",
          [NAMING_HF_STACKED] = "mlp.experts.down_proj",
          [NAMING_HF_LFM2] = "feed_forward.experts.#.w2.weight",
          [NAMING_HF_GRANITE_HYBRID] = "block_sparse_moe.output_linear.weight",
          [NAMING_HF_QWEN35_STACKED] = "mlp.experts.down_proj",
          [NAMING_HF_NEMOTRON_H] = "mixer.experts.#.down_proj.weight",
          [NAMING_HF_GEMMA4_MOE] = "experts.down_proj"},
         WIDTH_EXPERT_MODEL,
         WIDTH_EXPERT_FF,
         true},
    [ROLE_EACH_EMBED] = {{[NAMING_HF_GEMMA4] = "model.embed_tokens_per_layer.weight",
                          [NAMING_GGUF] = "per_layer_token_embd.weight"},
                         WIDTH_VOCAB,
                         WIDTH_EACH_ALL,
                         false},
    [ROLE_EACH_IN] = {{[NAMING_HF_GEMMA4] = "model.per_layer_model_projection.weight",
                       [NAMING_GGUF] = "per_layer_model_proj.weight"},
                      WIDTH_EACH_ALL,
                      WIDTH_MODEL,
                      false},
    [ROLE_EACH_IN_NORM] = {{[NAMING_HF_GEMMA4] = "model.per_layer_projection_norm.weight",
                            [NAMING_GGUF] = "per_layer_proj_norm.weight"},
                           WIDTH_EACH,
                           WIDTH_NONE,
                           false},
    [ROLE_V_NORM] = {{NULL}, WIDTH_K_NORM, WIDTH_NONE, true},
    [ROLE_EACH_GATE] =
        {{[NAMING_HF_GEMMA4] = "per_layer_input_gate.weight", [NAMING_GGUF] = "inp_gate.weight"},
         WIDTH_EACH,
         WIDTH_MODEL,
         true},
    [ROLE_EACH_OUT] =
        {{[NAMING_HF_GEMMA4] = "per_layer_projection.weight", [NAMING_GGUF] = "proj.weight"},
         WIDTH_MODEL,
         WIDTH_EACH,
         true},
    [ROLE_EACH_POST_NORM] = {{[NAMING_HF_GEMMA4] = "post_per_layer_input_norm.weight",
                              [NAMING_GGUF] = "post_norm.weight"},
                             WIDTH_MODEL,
                             WIDTH_NONE,
                             true},
    [ROLE_LAYER_SCALE] =
        {{[NAMING_HF_GEMMA4] = "layer_scalar", [NAMING_GGUF] = "layer_output_scale.weight"},
         WIDTH_ONE,
         WIDTH_NONE,
         true},
    [ROLE_SINKS] = {{"self_attn.sinks", NULL, "attn_sinks.weight"}, WIDTH_HEADS, WIDTH_NONE, true},
    [ROLE_CONV_B] = {{"conv.in_proj.weight", NULL, "shortconv.in_proj.weight"},
                     WIDTH_MODEL,
                     WIDTH_MODEL,
                     true},
    [ROLE_CONV_C] = {{"conv.in_proj.weight", NULL, "shortconv.in_proj.weight"},
                     WIDTH_MODEL,
                     WIDTH_MODEL,
                     true},
    [ROLE_CONV_X] = {{"conv.in_proj.weight", NULL, "shortconv.in_proj.weight"},
                     WIDTH_MODEL,
                     WIDTH_MODEL,
                     true},
    [ROLE_CONV_TAPS] = {{"conv.conv.weight", NULL, "shortconv.conv.weight"},
                        WIDTH_MODEL,
                        WIDTH_TAPS,
                        true},
    [ROLE_CONV_OUT] = {{"conv.out_proj.weight", NULL, "shortconv.out_proj.weight"},
                       WIDTH_MODEL,
                       WIDTH_MODEL,
                       true},
    [ROLE_DELTA_Q] = {{[NAMING_HF_QWEN35] = "linear_attn.in_proj_qkv.weight",
                       [NAMING_HF_QWEN3_NEXT] = "linear_attn.in_proj_qkvz.weight",
                       [NAMING_GGUF_QWEN35] = "attn_qkv.weight"},
                      WIDTH_KEYS,
                      WIDTH_MODEL,
                      true},
    [ROLE_DELTA_K] = {{[NAMING_HF_QWEN35] = "linear_attn.in_proj_qkv.weight",
                       [NAMING_HF_QWEN3_NEXT] = "linear_attn.in_proj_qkvz.weight",
                       [NAMING_GGUF_QWEN35] = "attn_qkv.weight"},
                      WIDTH_KEYS,
                      WIDTH_MODEL,
                      true},
    [ROLE_DELTA_V] = {{[NAMING_HF_QWEN35] = "linear_attn.in_proj_qkv.weight",
                       [NAMING_HF_QWEN3_NEXT] = "linear_attn.in_proj_qkvz.weight",
                       [NAMING_GGUF_QWEN35] = "attn_qkv.weight"},
                      WIDTH_VALUES,
                      WIDTH_MODEL,
                      true},
    [ROLE_DELTA_Z] = {{[NAMING_HF_QWEN35] = "linear_attn.in_proj_z.weight",
                       [NAMING_HF_QWEN3_NEXT] = "linear_attn.in_proj_qkvz.weight",
                       [NAMING_GGUF_QWEN35] = "attn_gate.weight"},
                      WIDTH_VALUES,
                      WIDTH_MODEL,
                      true},
    [ROLE_DELTA_B] = {{[NAMING_HF_QWEN35] = "linear_attn.in_proj_b.weight",
                       [NAMING_HF_QWEN3_NEXT] = "linear_attn.in_proj_ba.weight",
                       [NAMING_GGUF_QWEN3_NEXT] = "ssm_ba.weight",
                       [NAMING_GGUF_QWEN35] = "ssm_beta.weight"},
                      WIDTH_VALUE_HEADS,
                      WIDTH_MODEL,
                      true},
    [ROLE_DELTA_A] = {{[NAMING_HF_QWEN35] = "linear_attn.in_proj_a.weight",
                       [NAMING_HF_QWEN3_NEXT] = "linear_attn.in_proj_ba.weight",
                       [NAMING_GGUF_QWEN3_NEXT] = "ssm_ba.weight",
                       [NAMING_GGUF_QWEN35] = "ssm_alpha.weight"},
                      WIDTH_VALUE_HEADS,
                      WIDTH_MODEL,
                      true},
    [ROLE_DELTA_TAPS_QK] = {{[NAMING_HF_QWEN35] = "linear_attn.conv1d.weight",
                             [NAMING_GGUF_QWEN35] = "ssm_conv1d.weight"},
                            WIDTH_KEYS_TWICE,
                            WIDTH_TAPS,
                            true},
    [ROLE_DELTA_TAPS_V] = {{[NAMING_HF_QWEN35] = "linear_attn.conv1d.weight",
                            [NAMING_GGUF_QWEN35] = "ssm_conv1d.weight"},
                           WIDTH_VALUES,
                           WIDTH_TAPS,
                           true},
    [ROLE_DELTA_DECAY] =
        {{[NAMING_HF_QWEN35] = "linear_attn.A_log", [NAMING_GGUF_QWEN35] = "ssm_a"},
         WIDTH_VALUE_HEADS,
         WIDTH_NONE,
         true},
    [ROLE_DELTA_BIAS] =
        {{[NAMING_HF_QWEN35] = "linear_attn.dt_bias", [NAMING_GGUF_QWEN35] = "ssm_dt.bias"},
         WIDTH_VALUE_HEADS,
         WIDTH_NONE,
         true},
    [ROLE_DELTA_NORM] =
        {{[NAMING_HF_QWEN35] = "linear_attn.norm.weight", [NAMING_GGUF_QWEN35] = "ssm_norm.weight"},
         WIDTH_VALUE,
         WIDTH_NONE,
         true},
    [ROLE_DELTA_OUT] = {{[NAMING_HF_QWEN35] = "linear_attn.out_proj.weight",
                         [NAMING_GGUF_QWEN35] = "ssm_out.weight"},
                        WIDTH_MODEL,
                        WIDTH_VALUES,
                        true},
    [ROLE_MAMBA_Z] = {MAMBA("mamba.in_proj.weight", "mixer.in_proj.weight", "ssm_in.weight"),
                      WIDTH_MAMBA, WIDTH_MODEL, true},
    [ROLE_MAMBA_X] = {MAMBA("mamba.in_proj.weight", "mixer.in_proj.weight", "ssm_in.weight"),
                      WIDTH_MAMBA, WIDTH_MODEL, true},
    [ROLE_MAMBA_B] = {MAMBA("mamba.in_proj.weight", "mixer.in_proj.weight", "ssm_in.weight"),
                      WIDTH_MAMBA_STATES, WIDTH_MODEL, true},
    [ROLE_MAMBA_C] = {MAMBA("mamba.in_proj.weight", "mixer.in_proj.weight", "ssm_in.weight"),
                      WIDTH_MAMBA_STATES, WIDTH_MODEL, true},
    [ROLE_MAMBA_DT] = {MAMBA("mamba.in_proj.weight", "mixer.in_proj.weight", "ssm_in.weight"),
                       WIDTH_MAMBA_HEADS, WIDTH_MODEL, true},
    [ROLE_MAMBA_TAPS] = {MAMBA("mamba.conv1d.weight", "mixer.conv1d.weight", "ssm_conv1d.weight"),
                         WIDTH_MAMBA_CHANNELS, WIDTH_TAPS, true},
    [ROLE_MAMBA_CONV_BIAS] = {MAMBA("mamba.conv1d.bias", "mixer.conv1d.bias", "ssm_conv1d.bias"),
                              WIDTH_MAMBA_CHANNELS, WIDTH_NONE, true},
    [ROLE_MAMBA_DECAY] = {MAMBA("mamba.A_log", "mixer.A_log", "ssm_a"), WIDTH_MAMBA_HEADS,
                          WIDTH_NONE, true},
    [ROLE_MAMBA_BIAS] = {MAMBA("mamba.dt_bias", "mixer.dt_bias", "ssm_dt.bias"), WIDTH_MAMBA_HEADS,
                         WIDTH_NONE, true},
    [ROLE_MAMBA_SKIP] = {MAMBA("mamba.D", "mixer.D", "ssm_d"), WIDTH_MAMBA_HEADS, WIDTH_NONE, true},
    [ROLE_MAMBA_NORM] = {MAMBA("mamba.norm.weight", "mixer.norm.weight", "ssm_norm.weight"),
                         WIDTH_MAMBA_GROUPS, WIDTH_MAMBA_OF_GROUP, true},
    [ROLE_MAMBA_OUT] = {MAMBA("mamba.out_proj.weight", "mixer.out_proj.weight", "ssm_out.weight"),
                        WIDTH_MODEL, WIDTH_MAMBA, true},
    [ROLE_LATENT_Q_DOWN] = {{"self_attn.q_a_proj.weight", NULL, "attn_q_a.weight"},
                            WIDTH_LATENT_Q_DOWN,
                            WIDTH_MODEL,
                            true},
    [ROLE_LATENT_Q_NORM] = {{"self_attn.q_a_layernorm.weight", NULL, "attn_q_a_norm.weight"},
                            WIDTH_LATENT_Q_DOWN,
                            WIDTH_NONE,
                            true},
    [ROLE_LATENT_Q_UP] = {{"self_attn.q_b_proj.weight", NULL, "attn_q_b.weight"},
                          WIDTH_Q,
                          WIDTH_LATENT_Q_DOWN,
                          true},
    [ROLE_LATENT_ENTRY] = {{"self_attn.kv_a_proj_with_mqa.weight", NULL, "attn_kv_a_mqa.weight"},
                           WIDTH_LATENT_ENTRY,
                           WIDTH_MODEL,
                           true},
    [ROLE_LATENT_NORM] = {{"self_attn.kv_a_layernorm.weight", NULL, "attn_kv_a_norm.weight"},
                          WIDTH_LATENT,
                          WIDTH_NONE,
                          true},
    [ROLE_LATENT_K] = {{"self_attn.kv_b_proj.weight", NULL,
                        "attn_k_b.weight", [NAMING_GGUF_LATENT_JOINED] = "attn_kv_b.weight"},
                       WIDTH_LATENT,
                       WIDTH_LATENT_STILL,
                       true},
    [ROLE_LATENT_V] = {{"self_attn.kv_b_proj.weight", NULL,
                        "attn_v_b.weight", [NAMING_GGUF_LATENT_JOINED] = "attn_kv_b.weight"},
                       WIDTH_LATENT_VALUE,
                       WIDTH_LATENT,
                       true},
    [ROLE_ROUTER_BIAS] = {{"mlp.router.bias", NULL, "ffn_gate_inp.bias"},
                          WIDTH_EXPERTS,
                          WIDTH_NONE,
                          true},
    [ROLE_SELECT_BIAS] =
        {{"mlp.gate.e_score_correction_bias", NULL,
          "exp_probs_b.bias", [NAMING_HF_MIXTRAL] = "block_sparse_moe.e_score_correction_bias",
          [NAMING_HF_ERNIE_MOE] = "mlp.moe_statics.e_score_correction_bias",
          [NAMING_HF_LFM2] = "feed_forward.expert_bias",
          [NAMING_HF_NEMOTRON_H] = "mixer.gate.e_score_correction_bias"},
         WIDTH_EXPERTS,
         WIDTH_NONE,
         true},
    [ROLE_SHARED_GATE] =
        {{"mlp.shared_experts.gate_proj.weight", NULL,
          "ffn_gate_shexp.weight", [NAMING_HF_QWEN2_MOE] = "mlp.shared_expert.gate_proj.weight",
          [NAMING_HF_GRANITE_HYBRID] = "shared_mlp.input_linear.weight",
          [NAMING_HF_GRANITE_HYBRID_DENSE] = "", [NAMING_HF_NEMOTRON_H] = "",
          [NAMING_HF_GEMMA4_MOE] = "mlp.gate_proj.weight",
          [NAMING_GGUF_GEMMA4_MOE] = "ffn_gate.weight"},
         WIDTH_SHARED_FF,
         WIDTH_MODEL,
         true},
    [ROLE_SHARED_UP] =
        {{"mlp.shared_experts.up_proj.weight", NULL,
          "ffn_up_shexp.weight", [NAMING_HF_QWEN2_MOE] = "mlp.shared_expert.up_proj.weight",
          [NAMING_HF_GRANITE_HYBRID] = "shared_mlp.input_linear.weight",
          [NAMING_HF_GRANITE_HYBRID_DENSE] = "",
          [NAMING_HF_NEMOTRON_H] = "mixer.shared_experts.up_proj.weight",
          [NAMING_HF_GEMMA4_MOE] = "mlp.up_proj.weight",
          [NAMING_GGUF_GEMMA4_MOE] = "ffn_up.weight"},
         WIDTH_SHARED_FF,
         WIDTH_MODEL,
         true},
    [ROLE_SHARED_DOWN] =
        {{"mlp.shared_experts.down_proj.weight", NULL,
          "ffn_down_shexp.weight", [NAMING_HF_QWEN2_MOE] = "mlp.shared_expert.down_proj.weight",
          [NAMING_HF_GRANITE_HYBRID] = "shared_mlp.output_linear.weight",
          [NAMING_HF_GRANITE_HYBRID_DENSE] = "",
          [NAMING_HF_NEMOTRON_H] = "mixer.shared_experts.down_proj.weight",
          [NAMING_HF_GEMMA4_MOE] = "mlp.down_proj.weight",
          [NAMING_GGUF_GEMMA4_MOE] = "ffn_down.weight"},
         WIDTH_MODEL,
         WIDTH_SHARED_FF,
         true},
    [ROLE_EXPERTS_IN] = {{[NAMING_HF_NEMOTRON_H] = "mixer.fc1_latent_proj.weight",
                          [NAMING_GGUF] = "ffn_latent_down.weight"},
                         WIDTH_EXPERT_MODEL,
                         WIDTH_MODEL,
                         true},
    [ROLE_EXPERTS_OUT] = {{[NAMING_HF_NEMOTRON_H] = "mixer.fc2_latent_proj.weight",
                           [NAMING_GGUF] = "ffn_latent_up.weight"},
                          WIDTH_MODEL,
                          WIDTH_EXPERT_MODEL,
                          true},
    [ROLE_SHARED_OPEN] = {{"mlp.shared_expert_gate.weight", NULL, "ffn_gate_inp_shexp.weight"},
                          WIDTH_ONE,
                          WIDTH_MODEL,
                          true},
    [ROLE_SHARED_POST_NORM] = {{[NAMING_HF_GEMMA4_MOE] = "post_feedforward_layernorm_1.weight",
                                [NAMING_GGUF_GEMMA4_MOE] = "post_ffw_norm_1.weight"},
                               WIDTH_MODEL,
                               WIDTH_NONE,
                               true},
    [ROLE_ROUTER_NORM] =
        {{[NAMING_HF_GEMMA4_MOE] = "router.scale", [NAMING_GGUF_GEMMA4_MOE] = "ffn_gate_inp.scale"},
         WIDTH_MODEL,
         WIDTH_NONE,
         true},
    [ROLE_EXPERTS_NORM] = {{[NAMING_HF_GEMMA4_MOE] = "pre_feedforward_layernorm_2.weight",
                            [NAMING_GGUF_GEMMA4_MOE] = "pre_ffw_norm_2.weight"},
                           WIDTH_MODEL,
                           WIDTH_NONE,
                           true},
    [ROLE_EXPERTS_POST_NORM] = {{[NAMING_HF_GEMMA4_MOE] = "post_feedforward_layernorm_2.weight",
                                 [NAMING_GGUF_GEMMA4_MOE] = "post_ffw_norm_2.weight"},
                                WIDTH_MODEL,
                                WIDTH_NONE,
                                true},
    [ROLE_EXPERTS_FACTORS] = {{[NAMING_HF_GEMMA4_MOE] = "router.per_expert_scale",
                               [NAMING_GGUF_GEMMA4_MOE] = "ffn_down_exps.scale"},
                              WIDTH_EXPERTS,
                              WIDTH_NONE,
                              true},
    [ROLE_EXPERT_GATE_BIAS] = {{"mlp.experts.gate_up_proj_bias", NULL, "ffn_gate_exps.bias"},
                               WIDTH_EXPERT_FF,
                               WIDTH_NONE,
                               true},
    [ROLE_EXPERT_UP_BIAS] = {{"mlp.experts.gate_up_proj_bias", NULL, "ffn_up_exps.bias"},
                             WIDTH_EXPERT_FF,
                             WIDTH_NONE,
                             true},
    [ROLE_BLOCK_IN] = {{"eh_proj.weight", NULL, "nextn.eh_proj.weight"},
                       WIDTH_MODEL,
                       WIDTH_MODEL_TWICE,
                       true},
    [ROLE_BLOCK_EMBED_NORM] = {{"enorm.weight", NULL, "nextn.enorm.weight"},
                               WIDTH_MODEL,
                               WIDTH_NONE,
                               true},
    [ROLE_BLOCK_HIDDEN_NORM] = {{"hnorm.weight", NULL, "nextn.hnorm.weight"},
                                WIDTH_MODEL,
                                WIDTH_NONE,
                                true},
    [ROLE_BLOCK_NORM] = {{"shared_head.norm.weight", NULL, "nextn.shared_head_norm.weight"},
                         WIDTH_MODEL,
                         WIDTH_NONE,
                         true},
    [ROLE_EXPERT_DOWN_BIAS] = {{"mlp.experts.down_proj_bias", NULL, "ffn_down_exps.bias"},
                               WIDTH_MODEL,
                               WIDTH_NONE,
                               true},
};

/* The naming that has the names which a naming does not change. */
static const enum naming bases[NAMING_COUNT] = {
    [NAMING_HF] = NAMING_HF,
    [NAMING_GGUF] = NAMING_GGUF,
    [NAMING_GGUF_FUSED] = NAMING_GGUF,
    [NAMING_GGUF_AFTER_ATTENTION] = NAMING_GGUF,
    [NAMING_GGUF_GLM] = NAMING_GGUF,
    [NAMING_GGUF_LFM2] = NAMING_GGUF,
    [NAMING_HF_GEMMA4] = NAMING_HF_POST_NORMS,
    [NAMING_HF_QWEN35] = NAMING_HF_QWEN2_MOE,
    [NAMING_HF_QWEN35_STACKED] = NAMING_HF_QWEN35,
    [NAMING_HF_QWEN3_NEXT] = NAMING_HF_QWEN35,
    [NAMING_GGUF_QWEN35] = NAMING_GGUF_AFTER_ATTENTION,
    [NAMING_GGUF_QWEN3_NEXT] = NAMING_GGUF_QWEN35,
    [NAMING_HF_GRANITE_HYBRID_DENSE] = NAMING_HF_GRANITE_HYBRID,
    [NAMING_GGUF_MAMBA] = NAMING_GGUF,
    [NAMING_GGUF_LATENT_JOINED] = NAMING_GGUF,
    [NAMING_GGUF_EXPERTS_JOINED] = NAMING_GGUF,
    [NAMING_GGUF_BOTH_JOINED] = NAMING_GGUF_LATENT_JOINED,
    [NAMING_HF_FALCON_H1] = NAMING_HF_GRANITE_HYBRID,
    [NAMING_GGUF_FALCON_H1] = NAMING_GGUF_MAMBA,
    [NAMING_HF_GEMMA4_MOE] = NAMING_HF_GEMMA4,
    [NAMING_GGUF_GEMMA4_MOE] = NAMING_GGUF,
    [NAMING_HF_ROBERTA] = NAMING_HF_BERT,
    [NAMING_HF_NOMIC_BERT] = NAMING_HF_BERT,
    [NAMING_GGUF_BERT] = NAMING_GGUF,
    [NAMING_GGUF_NOMIC_BERT] = NAMING_GGUF_BERT,
    [NAMING_GGUF_MODERN_BERT] = NAMING_GGUF_FUSED,
}; /* NAMING_HF, which is 0, is that of the others */

bool naming_is_gguf(enum naming naming) {
    while (bases[naming] != naming) naming = bases[naming];
    return naming == NAMING_GGUF;
}

static void name_in_layer(char out[TENSOR_NAME_MAX], enum naming naming, const char *name,
                          int layer, int expert) {
    const int before = (int)strcspn(name, "#");
    const char *prefix = naming_is_gguf(naming)           ? "blk"
                         : naming == NAMING_HF_NOMIC_BERT ? "encoder.layers"
                         : bases[naming] == NAMING_HF_BERT || naming == NAMING_HF_BERT
                             ? "encoder.layer"
                             : "model.layers";
    int n = snprintf(out, TENSOR_NAME_MAX, "%s.%d.%.*s", prefix, layer, before, name);
    if (name[before] && n > 0 && n < TENSOR_NAME_MAX)
        snprintf(out + n, TENSOR_NAME_MAX - (size_t)n, "%d%s", expert, name + before + 1);
}

enum naming tensor_naming(const struct model_config *config, bool gguf) {
    if (gguf)
        return config->fused                  ? NAMING_GGUF_FUSED
               : config->norm_after_attention ? NAMING_GGUF_AFTER_ATTENTION
               : config->glm_names            ? NAMING_GGUF_GLM
               : config->lfm2_names           ? NAMING_GGUF_LFM2
               : config->qwen3_next_names     ? NAMING_GGUF_QWEN3_NEXT
               : config->qwen35_names         ? NAMING_GGUF_QWEN35
               : config->mamba_names          ? NAMING_GGUF_MAMBA
               : config->gemma4_experts       ? NAMING_GGUF_GEMMA4_MOE
               : config->latent_joined
                   ? config->experts_joined ? NAMING_GGUF_BOTH_JOINED : NAMING_GGUF_LATENT_JOINED
               : config->experts_joined ? NAMING_GGUF_EXPERTS_JOINED
               : config->nemotron_names ? NAMING_GGUF_MAMBA
               : config->falcon_names   ? NAMING_GGUF_FALCON_H1
               : config->nomic_names    ? NAMING_GGUF_NOMIC_BERT
               : config->modern_names   ? NAMING_GGUF_MODERN_BERT
               : config->bert_names     ? NAMING_GGUF_BERT
                                        : NAMING_GGUF;
    if (config->qwen35_names)
        return config->qwen3_next_names  ? NAMING_HF_QWEN3_NEXT
               : config->stacked_experts ? NAMING_HF_QWEN35_STACKED
                                         : NAMING_HF_QWEN35;
    if (config->mamba_names)
        return config->experts ? NAMING_HF_GRANITE_HYBRID : NAMING_HF_GRANITE_HYBRID_DENSE;
    if (config->nemotron_names) return NAMING_HF_NEMOTRON_H;
    if (config->nomic_names) return NAMING_HF_NOMIC_BERT;
    if (config->modern_names) return NAMING_HF_MODERN_BERT;
    if (config->bert_names)
        return config->classifier.roberta_names ? NAMING_HF_ROBERTA : NAMING_HF_BERT;
    if (config->falcon_names) return NAMING_HF_FALCON_H1;
    if (config->gemma4_experts) return NAMING_HF_GEMMA4_MOE;
    return config->gpt_oss_names     ? NAMING_HF_GPT_OSS
           : config->layer_scales    ? NAMING_HF_GEMMA4
           : config->fused           ? NAMING_HF_FUSED
           : config->stacked_experts ? NAMING_HF_STACKED
           : config->glm_names       ? NAMING_HF_GLM
           : config->post_norms      ? NAMING_HF_POST_NORMS
           : config->mixtral_names   ? NAMING_HF_MIXTRAL
           : config->shared_gate     ? NAMING_HF_QWEN2_MOE
           : config->ernie_names     ? NAMING_HF_ERNIE_MOE
           : config->lfm2_names      ? NAMING_HF_LFM2
                                     : NAMING_HF;
}

/* NULL: the naming has none. */
static const char *pattern_of(enum naming naming, enum role role) {
    const char *name = tensors[role].names[naming];
    for (; !name && bases[naming] != naming; name = tensors[role].names[naming])
        naming = bases[naming];
    return name && *name ? name : NULL;
}

bool tensor_is_stacked(enum naming naming, enum role role) {
    const char *name = pattern_of(naming, role);
    bool of_expert = role >= ROLE_EXPERT_GATE && role <= ROLE_EXPERT_DOWN_BIAS;
    return of_expert && name && !strchr(name, '#');
}

bool tensor_is_split_mxfp4(enum naming naming, enum role role) {
    return naming == NAMING_HF_GPT_OSS &&
           (role == ROLE_EXPERT_GATE || role == ROLE_EXPERT_UP || role == ROLE_EXPERT_DOWN);
}

bool tensor_is_rotated(enum role role) {
    return role == ROLE_Q || role == ROLE_K || role == ROLE_Q_BIAS || role == ROLE_K_BIAS ||
           role == ROLE_Q_NORM || role == ROLE_K_NORM;
}

int tensor_stored_row(const struct model_config *config, int row) {
    int half = config->rotary_dims / 2;
    return config->permuted_qk && row < 2 * half ? 2 * (row % half) + row / half : row;
}

int tensor_loaded_row(const struct model_config *config, int row) {
    int half = config->head_dim / 2, turning = config->rotary_dims / 2, j = row % half;
    bool second = row >= half;
    if (j < turning) return tensor_stored_row(config, second ? turning + j : j);
    return tensor_stored_row(config,
                             config->rotary_dims + j - turning + (second ? half - turning : 0));
}

bool tensor_heads_reordered(const struct model_config *config) {
    const bool all = config->rotary_dims == config->head_dim || config->latent.rank;
    return config->permuted_qk || !all;
}

void tensor_name(char out[TENSOR_NAME_MAX], enum naming naming, enum role role, int layer,
                 int expert) {
    const char *name = pattern_of(naming, role);
    if (!name)
        out[0] = '\0';
    else if (tensors[role].in_layer)
        name_in_layer(out, naming, name, layer, expert);
    else
        snprintf(out, TENSOR_NAME_MAX, "%s", name);
}

/* Widths of what mixes tokens: gated delta rules, Mamba-2, latent attention. */
static int64_t mixer_width(const struct model_config *config, enum width width) {
    switch (width) {
    case WIDTH_KEYS:
        return (int64_t)config->delta.heads_k * config->delta.dim_k;
    case WIDTH_KEYS_TWICE:
        return (int64_t)2 * config->delta.heads_k * config->delta.dim_k;
    case WIDTH_VALUES:
        return delta_width(config);
    case WIDTH_VALUE:
        return config->delta.dim_v;
    case WIDTH_VALUE_HEADS:
        return config->delta.heads_v;
    case WIDTH_MAMBA:
        return mamba_width(config);
    case WIDTH_MAMBA_HEADS:
        return config->mamba.heads;
    case WIDTH_MAMBA_GROUPS:
        return config->mamba.groups;
    case WIDTH_MAMBA_OF_GROUP:
        return config->mamba.groups ? mamba_width(config) / config->mamba.groups : 0;
    case WIDTH_MAMBA_STATES:
        return (int64_t)config->mamba.groups * config->mamba.dim_state;
    case WIDTH_LATENT_Q_DOWN:
        return config->q_rank;
    case WIDTH_LATENT_ENTRY:
        return config->latent.rank + config->latent.turned;
    case WIDTH_LATENT:
        return config->latent.rank;
    case WIDTH_LATENT_STILL:
        return config->latent.still;
    case WIDTH_LATENT_VALUE:
        return config->latent.dim_v;
    case WIDTH_MAMBA_CHANNELS:
        return mamba_width(config) + (int64_t)2 * config->mamba.groups * config->mamba.dim_state;
    default:
        CHECK(false);
    }
}

static int64_t width_of(const struct model_config *config, int layer, enum width width) {
    switch (width) {
    case WIDTH_NONE:
        return 0;
    case WIDTH_MODEL:
        return config->d_model;
    case WIDTH_MODEL_TWICE:
        return (int64_t)2 * config->d_model;
    case WIDTH_Q:
        return config->latent.rank ? (int64_t)config->heads_q * latent_query_dim(config)
                                   : q_width(config, layer);
    case WIDTH_KV:
        return kv_width(config, layer);
    case WIDTH_Q_NORM:
        return config->qk_norm_wide ? q_width(config, layer) : config->per_layer[layer].head_dim;
    case WIDTH_K_NORM:
        return config->qk_norm_wide ? kv_width(config, layer) : config->per_layer[layer].head_dim;
    case WIDTH_FF:
        return ff_width(config, layer);
    case WIDTH_EACH:
        return config->each_embed;
    case WIDTH_EACH_ALL:
        return (int64_t)config->layers * config->each_embed;
    case WIDTH_VOCAB:
        return config->vocab;
    case WIDTH_HEADS:
        return config->heads_q;
    case WIDTH_EXPERTS:
        return config->experts;
    case WIDTH_EXPERT_FF:
        return config->expert_ff;
    case WIDTH_EXPERT_MODEL:
        return experts_width(config);
    case WIDTH_SHARED_FF:
        return config->shared_ff;
    case WIDTH_POSITIONS:
        return config->position_rows;
    case WIDTH_TYPES:
        return config->type_rows;
    case WIDTH_LABELS:
        return config->classifier.labels;
    case WIDTH_DENSE_1:
        return config->pooling.dense[0].width;
    case WIDTH_DENSE_2:
        return config->pooling.dense[1].width;
    case WIDTH_TAPS:
        return config->conv_width;
    case WIDTH_ONE:
        return 1;
    case WIDTH_HEADS_OUT:
        return heads_width(config, layer);
    default:
        return mixer_width(config, width);
    }
}

void tensor_shape(const struct model_config *config, enum role role, int layer, int64_t *rows,
                  int64_t *cols) {
    *rows = width_of(config, layer, tensors[role].rows);
    *cols = width_of(config, layer, tensors[role].cols);
}

/* ---- Rows ---- */

/* The groups of rows that roles with one name have by turns; 1: all of a role's follow each other.
 */
static int64_t turns_of(const struct model_config *config, enum naming naming, enum role role) {
    const bool next = naming == NAMING_HF_QWEN3_NEXT || naming == NAMING_GGUF_QWEN3_NEXT;
    if (naming == NAMING_HF_GPT_OSS &&
        (role == ROLE_EXPERT_GATE || role == ROLE_EXPERT_UP || role == ROLE_EXPERT_GATE_BIAS ||
         role == ROLE_EXPERT_UP_BIAS))
        return config->expert_ff;
    if (config->qwen35_names && (role == ROLE_Q || role == ROLE_ATTN_GATE)) return config->heads_q;
    if (role == ROLE_DELTA_B || role == ROLE_DELTA_A) return next ? config->delta.heads_k : 1;
    return naming == NAMING_HF_QWEN3_NEXT && role >= ROLE_DELTA_Q && role <= ROLE_DELTA_Z
               ? config->delta.heads_k
               : 1;
}

/* The order of value heads in Qwen3.5's GGUF files, for `rows` rows of all of them. */
static void order_heads(const struct model_config *config, enum naming naming, int64_t rows,
                        struct tensor_rows *out) {
    const struct kern_delta *delta = &config->delta;
    if (naming != NAMING_GGUF_QWEN35 || delta->heads_v == delta->heads_k) return;
    out->unit = rows / delta->heads_v;
    out->outer = delta->heads_k;
    out->inner = delta->heads_v / delta->heads_k;
}

static bool is_of_value_heads(enum role role) {
    return role == ROLE_DELTA_V || role == ROLE_DELTA_Z || role == ROLE_DELTA_B ||
           role == ROLE_DELTA_A || role == ROLE_DELTA_TAPS_V || role == ROLE_DELTA_DECAY ||
           role == ROLE_DELTA_BIAS;
}

struct tensor_rows tensor_rows_of(const struct model_config *config, enum naming naming,
                                  enum role role, int layer) {
    const char *name = pattern_of(naming, role);
    const int64_t rows = width_of(config, layer, tensors[role].rows);
    struct tensor_rows out = {.run = rows, .pitch = rows};
    for (enum role other = 0; name && other < ROLE_COUNT; other++) {
        const char *its = pattern_of(naming, other);
        if (!its || strcmp(its, name) != 0) continue;
        if (other < role) out.first += width_of(config, layer, tensors[other].rows);
        out.all += width_of(config, layer, tensors[other].rows);
    }
    const int64_t turns = turns_of(config, naming, role);
    if (turns > 1) {
        out.run = rows / turns;
        out.pitch = out.all / turns;
        out.first /= turns;
    }
    if (is_of_value_heads(role)) order_heads(config, naming, rows, &out);
    return out;
}

struct tensor_rows tensor_columns_of(const struct model_config *config, enum naming naming,
                                     enum role role, int layer) {
    const int64_t cols = width_of(config, layer, tensors[role].cols);
    struct tensor_rows out = {.all = cols, .run = cols, .pitch = cols};
    if (role == ROLE_DELTA_OUT) order_heads(config, naming, cols, &out);
    return out;
}

int64_t tensor_row(const struct tensor_rows *rows, int64_t row) {
    if (rows->unit) {
        const int64_t head = row / rows->unit;
        row += (head % rows->inner * rows->outer + head / rows->inner - head) * rows->unit;
    }
    return row / rows->run * rows->pitch + row % rows->run;
}

bool tensor_rows_follow(const struct tensor_rows *rows) {
    return !rows->unit && rows->run == rows->pitch;
}

/* ---- Refused ---- */

bool tensor_refused(char out[TENSOR_NAME_MAX], enum naming naming, size_t index, int layer) {
    static const char *const names[NAMING_COUNT][8] = {
        [NAMING_HF] = {"mlp.gate_proj.bias", "mlp.up_proj.bias", "mlp.down_proj.bias",
                       "pre_feedforward_layernorm.weight"},
        [NAMING_HF_NEMOTRON_H] = {"mixer.up_proj.bias", "mixer.down_proj.bias",
                                  "mixer.in_proj.bias", "mixer.out_proj.bias",
                                  "mixer.fc1_latent_proj.bias"},
    };
    if (naming == NAMING_HF_FUSED || naming == NAMING_HF_GLM) naming = NAMING_HF;
    if (index >= 8 || !names[naming][index]) return false;
    name_in_layer(out, naming, names[naming][index], layer, 0);
    return true;
}
