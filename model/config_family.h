/* The families that config.json may be of, and what the files that read it have in common:
 *
 *   config.c         the whole: sizes, flags, tokens, defaults of requests
 *   config_family.c  the table of families, and the fields that only some of them may have
 *   config_words.c   the text part of multimodal checkpoints, families' own names of fields
 *   config_layers.c  kinds of layers: windows, rotation, heads that differ, shared entries
 *   config_moe.c     mixtures of experts
 *   config_latent.c  latent attention
 *   config_state.c   recurrent states: LFM2, gated delta rules, Mamba-2
 *   config_encoder.c encoders: BERT, RoBERTa, nomic-bert, ModernBERT; Gemma 3 as one
 *   config_scales.c  factors, caps, norms and activations of single families
 *   config_rope.c, config_quant.c  the rotation, the format of weights (headers of their own)
 *   config_shape.c   consequences of a configuration
 */
#ifndef KEEPD_MODEL_CONFIG_FAMILY_H
#define KEEPD_MODEL_CONFIG_FAMILY_H

#include <cjson/cJSON.h>

#include "model/config_rope.h"
#include "model/model.h"

#define LAYERS_MAX 512

/* The layers that have the sliding window in files without "layer_types". */
enum windows {
    WINDOWS_NONE,       /* the family has no sliding windows */
    WINDOWS_ALL,        /* every layer */
    WINDOWS_PATTERN,    /* all but every n-th layer, sliding_window_pattern */
    WINDOWS_BY_FLAG,    /* with use_sliding_window, layers from max_window_layers on */
    WINDOWS_LATE,       /* layers from max_window_layers on */
    WINDOWS_BY_TYPES,   /* only as "layer_types" says */
    WINDOWS_ALL_BY_FLAG /* with use_sliding_window, every layer */
};

/* Says which layers have experts. Unless said otherwise, experts have a width of their own
 * (moe_intermediate_size), and norm_topk_prob says whether the chosen weights sum to 1. */
enum experts {
    EXPERTS_NONE,
    EXPERTS_SOME_LAYERS, /* decoder_sparse_step and mlp_only_layers say which layers have experts */
    EXPERTS_ALL_LAYERS,  /* every layer, of width intermediate_size; the chosen weights sum to 1 */
    EXPERTS_ALL_BY_FLAG, /* the same, but norm_topk_prob says whether the weights sum to 1 */
    EXPERTS_AFTER_DENSE, /* every layer but the first ones */
    EXPERTS_ERNIE,       /* every n-th layer between a first and a last one; the weights sum to 1 */
    EXPERTS_BESIDE,      /* every layer beside its own network, if enable_moe_block is set */
    EXPERTS_BY_TYPES     /* the layers that "layer_types" names */
};

struct family {
    const char *architecture, *model_type;
    int head_dim; /* when the file has none; 0 = hidden_size / num_attention_heads */
    bool qk_norm;
    bool qkv_bias_always; /* else attention_bias decides for q, k, v and o alike */
    bool qkv_bias;        /* attention_bias, when the file does not say */
    bool o_bias_apart;    /* attention_out_bias decides for o; absent: it has none */
    bool interleaved;     /* rotation turns the numbers 2 i and 2 i + 1 of a head together */
    enum windows windows;
    bool fused;                 /* see struct model_config */
    bool factors;               /* Granite's four multipliers */
    int unrotated_layers_every; /* without "no_rope_layers": every n-th layer; 0 = none */
    double rms_eps;             /* when the file has none; 0 = 1e-6 */
    double rope_theta;          /* when the file has none; 0 = 10000 */
    double partial_rotary;      /* the same, partial_rotary_factor; 0 = 1 */
    int sliding_window;         /* when the file has no "sliding_window"; null in it means none */
    bool tied_embeddings;       /* when the file does not say */
    enum experts experts;
    bool experts_normalised; /* norm_topk_prob, when the file does not say */
    bool glm_names;          /* see struct model_config */
    bool norms_around;       /* norms of the inputs and of the outputs of both blocks */
    bool gemma;              /* norms by 1 + w, on both sides of a block; scaled embeddings; GELU */
    int pattern;             /* WINDOWS_PATTERN, when the file has no sliding_window_pattern */
    bool local_rope;         /* layers with windows rotate without scaling */
    double local_theta;      /* theirs; 0 = as the others */
    bool still_globals;      /* where layers have windows, those without one do not rotate */
    double attend_cap, logit_cap; /* soft caps, when the file does not say; 0: it has none */
    bool norms_behind;    /* norms of the outputs of attention and feed-forward network, not their
                             inputs */
    bool wide_qk_norm;    /* see struct model_config */
    bool gpt_oss;         /* biases, learned sinks, clamped SwiGLU, experts in MXFP4 */
    bool stacked_experts; /* see struct model_config */
    bool query_scale;     /* rope_parameters may have "llama_4_scaling_beta" */
    struct model_sections sections;
    bool from_last;            /* every n-th layer is counted from the last one */
    bool from_first;           /* the first layer is one of them */
    bool sigmoid, select_bias; /* see struct model_config */
    bool shared_experts;       /* n_shared_experts, which together are that many times as wide */
    int shared_gate_ff;   /* one shared expert with a gate: shared_expert_intermediate_size when the
                             file does not say; 0: none */
    bool groups;          /* n_group, topk_group */
    bool scaled;          /* routed_scaling_factor */
    bool dense_first;     /* first_k_dense_replace */
    int first_dense;      /* EXPERTS_AFTER_DENSE, when the file does not say */
    int shared_count;     /* the same, of shared experts */
    bool qk_norm_by_flag; /* use_qk_norm decides */
    bool mixtral_names;   /* see struct model_config */
    bool lfm2;            /* layers with a short convolution; names of its own */
    bool delta;           /* gated delta rules; a gate beside each head's query; norms by 1 + w */
    bool qwen3_next;      /* see struct model_config */
    bool mamba;           /* layers of Mamba-2 */
    bool granite_hybrid; /* names of its own, and position_embedding_type says whether layers rotate
                          */
    bool falcon;         /* Mamba-2 beside attention in every layer, and factors */
    bool embed_factor;   /* embedding_multiplier */
    bool nemotron;       /* layers have either a mixer or a network, which has no gate */
    const char *shared_width; /* the field that has the width of the network beside experts */
    int shared_ff;            /* the width, when the file does not say */
    bool
        gemma4; /* heads by kind of layer, keys and values that layers share, embeddings for each */
    bool latent;     /* latent attention */
    bool group_best; /* topk_method says whether groups are chosen, by their best expert; the
                        weights of the chosen experts are as they are */
    bool bert; /* an encoder: LayerNorm behind the blocks, biases, tables of positions and types */
    bool padded_positions; /* the first position has the row behind pad_token_id */
    bool labels;           /* with a classifier behind the first token's output */
    bool nomic;            /* an encoder that rotates, without biases of products, with gates */
    bool modern;           /* the same with norms of inputs, without biases of norms */
    bool muse;             /* gates, fixed norms of embeddings, queries and keys, scaled logits */
    /* sizes of a file that has none */
    int each_embed; /* hidden_size_per_layer_input */
    int heads_q, heads_kv, vocab, positions, d_ff;
    int q_rank;                   /* q_lora_rank */
    int group_count, groups_used; /* n_group, topk_group; 0 = 1 */
    double expert_scale;          /* routed_scaling_factor; 0 = 1 */
    int mtp_layers;               /* num_nextn_predict_layers */
};

/* A field that says none has been made null. */
static inline bool model_config_has(const cJSON *root, const char *name) {
    return cJSON_GetObjectItemCaseSensitive(root, name) != NULL;
}

int model_config_no_memory(struct fault *fault);

/* *name stays what it is where the file names no architecture. */
int model_config_find_architecture(const cJSON *root, const char **name, struct fault *fault);
int model_config_find_family(const cJSON *root, const struct family **out, struct fault *fault);
/* Finds whether a directory of this family (model_config.family) has the two numbers that a
 * rotation turns side by side. false: there is no such family. */
bool model_family_interleaves(const char *type, bool *interleaves);
/* Refuses fields that mean a computation which the family does not have. */
int model_config_refuse_fields(const cJSON *root, const struct family *family, struct fault *fault);

/* One tree is made of what files say in several ways, in this order: every way to say "none"
 * becomes null, down to `depth` objects inside each other, so that the readers know one, and tell
 * null from a field that is absent where the family has a default; the text part takes the place of
 * the whole checkpoint; fields get the names that other families have for them. */
void model_config_none_to_null(cJSON *object, int depth);
int model_config_take_text(cJSON *root, struct fault *fault);
int model_config_rename(cJSON *root, const struct family *family, struct fault *fault);

/* Fill in parts of *out, in this order, but model_config_read_direction before the layers, and
 * model_config_read_latent before heads are checked. */
int model_config_read_latent(const cJSON *root, const struct family *family,
                             struct model_config *out, struct fault *fault);
int model_config_read_layers(const cJSON *root, const struct family *family,
                             struct model_config *out, struct fault *fault);
int model_config_check_latent(const struct family *family, struct model_config *out,
                              struct fault *fault);
int model_config_read_scales(const cJSON *root, const struct family *family,
                             struct model_config *out, struct fault *fault);
int model_config_read_direction(const cJSON *root, const struct family *family,
                                struct model_config *out, struct fault *fault);
int model_config_read_encoder(const cJSON *root, const struct family *family,
                              struct model_config *out, struct fault *fault);
int model_config_read_states(const cJSON *root, const struct family *family,
                             struct model_config *out, struct fault *fault);
int model_config_read_experts(const cJSON *root, const struct family *family,
                              struct model_config *out, struct fault *fault);

#endif
