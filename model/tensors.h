/* The tensors of a model as data: how a file names each, its shape in terms of the configuration,
 * and how tensors become the matrices and vectors that a step uses. A format of files is a column
 * of names, a family a set of rows. Pure. */
#ifndef KEEPD_MODEL_TENSORS_H
#define KEEPD_MODEL_TENSORS_H

#include "kernels/kern.h"
#include "model/model.h"

/* Conventions for the names of tensors. */
enum naming {
    NAMING_HF,
    NAMING_HF_FUSED,
    NAMING_GGUF,
    NAMING_GGUF_FUSED,
    NAMING_HF_POST_NORMS,
    NAMING_HF_MIXTRAL,
    NAMING_HF_GPT_OSS,
    NAMING_HF_GLM,
    NAMING_GGUF_AFTER_ATTENTION, /* the norm of the network's inputs is named after attention */
    NAMING_GGUF_GLM,
    NAMING_HF_QWEN2_MOE,
    NAMING_HF_ERNIE_MOE,
    NAMING_HF_STACKED, /* one tensor has the matrices of all experts */
    NAMING_HF_LFM2,
    NAMING_GGUF_LFM2,
    NAMING_HF_QWEN35,
    NAMING_HF_QWEN35_STACKED,
    NAMING_HF_QWEN3_NEXT, /* the inputs of a key head lie side by side */
    NAMING_GGUF_QWEN35,   /* value heads lie in another order */
    NAMING_GGUF_QWEN3_NEXT,
    NAMING_HF_GRANITE_HYBRID,
    NAMING_HF_GRANITE_HYBRID_DENSE, /* the network beside experts is the only one */
    NAMING_GGUF_MAMBA,
    NAMING_HF_GEMMA4,
    NAMING_GGUF_LATENT_JOINED,
    NAMING_GGUF_EXPERTS_JOINED,
    NAMING_GGUF_BOTH_JOINED, /* keys with values, and gate with up */
    NAMING_HF_NEMOTRON_H,
    NAMING_HF_FALCON_H1,
    NAMING_GGUF_FALCON_H1,
    NAMING_HF_GEMMA4_MOE, /* the network beside experts has the names of the only one */
    NAMING_GGUF_GEMMA4_MOE,
    NAMING_HF_BERT,
    NAMING_HF_ROBERTA, /* another classifier */
    NAMING_HF_NOMIC_BERT,
    NAMING_GGUF_BERT,
    NAMING_GGUF_NOMIC_BERT, /* q, k and v are one tensor */
    NAMING_HF_MODERN_BERT,
    NAMING_GGUF_MODERN_BERT,
    NAMING_COUNT
};

enum role {
    ROLE_EMBED,
    ROLE_FINAL_NORM,
    ROLE_HEAD,
    ROLE_EMBED_NORM, /* only in files of encoders, as those that follow */
    ROLE_EMBED_NORM_BIAS,
    ROLE_POSITIONS,
    ROLE_TYPES,
    ROLE_CLASSIFIER_IN, /* struct model_classifier */
    ROLE_CLASSIFIER_IN_BIAS,
    ROLE_CLASSIFIER_OUT,
    ROLE_CLASSIFIER_OUT_BIAS,
    ROLE_DENSE_1, /* struct pooling_dense */
    ROLE_DENSE_1_BIAS,
    ROLE_DENSE_2,
    ROLE_DENSE_2_BIAS,
    /* embeddings for each layer: their table, and the product of the others and its norm */
    ROLE_EACH_EMBED,
    ROLE_EACH_IN,
    ROLE_EACH_IN_NORM,
    /* one for each layer */
    ROLE_ATTN_NORM,
    ROLE_Q,
    ROLE_K,
    ROLE_V,
    ROLE_Q_BIAS,
    ROLE_K_BIAS,
    ROLE_V_BIAS,
    ROLE_Q_NORM,
    ROLE_K_NORM,
    ROLE_V_NORM, /* in no file */
    ROLE_O,
    ROLE_O_BIAS,
    ROLE_ATTN_GATE,
    ROLE_ATTN_POST_NORM,
    ROLE_ATTN_POST_BIAS,
    ROLE_FFN_NORM,
    ROLE_GATE,
    ROLE_UP,
    ROLE_DOWN,
    ROLE_UP_BIAS,
    ROLE_DOWN_BIAS,
    ROLE_FFN_POST_NORM,
    ROLE_FFN_POST_BIAS,
    ROLE_EACH_GATE, /* the branch that a layer's own embeddings enter by */
    ROLE_EACH_OUT,
    ROLE_EACH_POST_NORM,
    ROLE_LAYER_SCALE,
    ROLE_SINKS,
    ROLE_CONV_B, /* the three parts of a short convolution's inputs */
    ROLE_CONV_C,
    ROLE_CONV_X,
    ROLE_CONV_TAPS, /* a vector here, a matrix in the files */
    ROLE_CONV_OUT,
    ROLE_DELTA_Q, /* the inputs of a gated delta rule: queries, keys, values and gates, */
    ROLE_DELTA_K,
    ROLE_DELTA_V,
    ROLE_DELTA_Z,
    ROLE_DELTA_B, /* rates and decays of each value head */
    ROLE_DELTA_A,
    ROLE_DELTA_TAPS_QK, /* vectors here, matrices in the files */
    ROLE_DELTA_TAPS_V,
    ROLE_DELTA_DECAY,
    ROLE_DELTA_BIAS,
    ROLE_DELTA_NORM,
    ROLE_DELTA_OUT,
    ROLE_MAMBA_Z, /* the inputs of Mamba-2: gates, inputs, B and C of each group, rates */
    ROLE_MAMBA_X,
    ROLE_MAMBA_B,
    ROLE_MAMBA_C,
    ROLE_MAMBA_DT,
    ROLE_MAMBA_TAPS, /* a vector here, a matrix in the files */
    ROLE_MAMBA_CONV_BIAS,
    ROLE_MAMBA_DECAY,
    ROLE_MAMBA_BIAS,
    ROLE_MAMBA_SKIP,
    ROLE_MAMBA_NORM, /* a vector here, and in some files a row for each group */
    ROLE_MAMBA_OUT,
    ROLE_LATENT_Q_DOWN, /* latent attention: a vector that queries are products of, its norm,
                           queries */
    ROLE_LATENT_Q_NORM,
    ROLE_LATENT_Q_UP,
    ROLE_LATENT_ENTRY, /* the vector that is cached beside numbers that rotate, and its norm */
    ROLE_LATENT_NORM,
    ROLE_LATENT_K, /* one for each head: struct kern_latent's up_k and up_v */
    ROLE_LATENT_V,
    ROLE_ROUTER,
    ROLE_ROUTER_BIAS,
    ROLE_SELECT_BIAS,
    ROLE_SHARED_GATE, /* gate, up and down of the network that every token uses beside experts */
    ROLE_SHARED_UP,
    ROLE_SHARED_DOWN,
    ROLE_SHARED_OPEN, /* the product whose sigmoid multiplies it */
    ROLE_SHARED_POST_NORM,
    ROLE_ROUTER_NORM,
    ROLE_EXPERTS_NORM,
    ROLE_EXPERTS_POST_NORM,
    ROLE_EXPERTS_FACTORS,
    ROLE_EXPERTS_IN, /* products in front of experts in a narrower space, and behind them */
    ROLE_EXPERTS_OUT,
    /* one for each expert of a layer */
    ROLE_EXPERT_GATE,
    ROLE_EXPERT_UP,
    ROLE_EXPERT_DOWN,
    ROLE_EXPERT_GATE_BIAS,
    ROLE_EXPERT_UP_BIAS,
    ROLE_EXPERT_DOWN_BIAS,
    /* the block that predicts further tokens: the product in front of its layer, the norms of the
       product's inputs, and the norm behind the layer */
    ROLE_BLOCK_IN,
    ROLE_BLOCK_EMBED_NORM,
    ROLE_BLOCK_HIDDEN_NORM,
    ROLE_BLOCK_NORM,
    ROLE_COUNT
};

#define TENSOR_NAME_MAX 96

bool naming_is_gguf(enum naming naming);

enum naming tensor_naming(const struct model_config *config, bool gguf);

/* "" where the naming has no such tensor. `layer` is not read for tensors outside the layers, nor
 * `expert` for those that are no expert's. Several roles may have one name: tensor_rows_of. */
void tensor_name(char out[TENSOR_NAME_MAX], enum naming naming, enum role role, int layer,
                 int expert);
/* The matrices or vectors of all experts of a layer are one tensor, [experts, ...]. */
bool tensor_is_stacked(enum naming naming, enum role role);
/* Where the rows of a role lie in its tensor. Roles with one name follow each other, in their
 * order; or their rows alternate: `run` of the first, as many as it has of the second, ... */
struct tensor_rows {
    int64_t first, all; /* the role's first row, the tensor's rows */
    int64_t run, pitch; /* the role's rows side by side, and from one such run to the next */
    int64_t unit;       /* rows of a head; 0: heads lie in the model's order */
    int outer, inner;   /* else head g * inner + i of the model is i * outer + g there */
};
struct tensor_rows tensor_rows_of(const struct model_config *config, enum naming naming,
                                  enum role role, int layer);
/* The same of the columns: only the order of heads may be another. */
struct tensor_rows tensor_columns_of(const struct model_config *config, enum naming naming,
                                     enum role role, int layer);
/* The place of the role's row, counted from `first`. */
int64_t tensor_row(const struct tensor_rows *rows, int64_t row);
/* Do all rows follow each other as in the model? */
bool tensor_rows_follow(const struct tensor_rows *rows);
/* The matrix's tensor has blocks of MXFP4 without their scales, [..., cols / 32, 16] U8. Its name
 * ends with "_blocks"; the scales are in a tensor whose name ends with "_scales", [..., cols / 32]
 * U8. */
bool tensor_is_split_mxfp4(enum naming naming, enum role role);
bool tensor_is_rotated(enum role role); /* q, k, their biases and norms: rows of heads that rotate
                                         */
/* The row of the files that is a head's row `row` in the model. Converters to GGUF store
 * the rows i and i + D/2 of llama's heads as 2 i and 2 i + 1. */
int tensor_stored_row(const struct model_config *config, int row);
/* The row of the files that becomes the backend's row `row` of a head. Backends rotate the pairs
 * (j, j + D/2) of a head; where a head rotates in its first R numbers only, the model has the pairs
 * (j, j + R/2), and the other numbers after them. */
int tensor_loaded_row(const struct model_config *config, int row);
/* Is it another row for some of a head's rows? */
bool tensor_heads_reordered(const struct model_config *config);
/* cols 0: a vector of `rows`. Some are rows * cols numbers. */
void tensor_shape(const struct model_config *config, enum role role, int layer, int64_t *rows,
                  int64_t *cols);

#define SLOT_PARTS_MAX 4

/* The layers that have a slot; those from SLOT_ATTENTION on in the order of enum mixer. */
enum slot_layers {
    SLOT_ALL,
    SLOT_NORMED, /* layers with a mixer whose inputs have a norm */
    SLOT_BEHIND, /* layers with a network behind a mixer */
    SLOT_ALONE,  /* layers that are a network alone */
    SLOT_DENSE,
    SLOT_ROUTED,
    SLOT_ATTENTION,
    SLOT_CONV,
    SLOT_DELTA,
    SLOT_MAMBA
};

/* The layers with attention that have a slot. */
enum slot_source {
    SLOT_ANY,
    SLOT_KV,    /* with keys and values of their own */
    SLOT_K,     /* with keys of their own, which are their values, too */
    SLOT_OWN,   /* either of both */
    SLOT_READS, /* with those of another layer */
    SLOT_LATENT /* with latent attention, which has none of those before */
};

/* A member of struct layer (in_layer) or struct model: tensors joined by rows into a matrix, or
 * joined into a vector. */
struct slot {
    size_t offset; /* offset of the pointer: struct kern_weight *, of experts **, or float * */
    bool matrix;
    bool experts; /* a matrix for each expert; a vector of all experts, one behind another */
    bool heads;   /* a matrix for each query head */
    enum slot_layers layers;
    enum slot_source source;
    enum role parts[SLOT_PARTS_MAX];
    int count;
    enum kern_shard shard; /* how a matrix is split */
    size_t groups;         /* offset of an int in struct model_config: the heads whose rows stay
                              together over ranks; 0: every row may be cut off */
    bool norm;             /* a vector of factors, else of terms: 1 or 0 where weights are random */
    bool plain;            /* factors without model_config.norm_offset */
    bool negated_exp;      /* directories have x for -exp(x) */
    size_t wanted;         /* offset of a bool in struct model_config; 0: always */
    size_t unwanted;       /* offset of a bool there that must be false; 0: always */
    size_t scaled;         /* offset of a float there that multiplies the vector; 0: none */
    size_t fixed;          /* offset of a float there, above 0: all numbers of the vector, where the
                              files have none; 0: they have them */
};

extern const struct slot slot_head;
/* Outside the layers, but for the head, in the order of loading. */
enum { END_EMBED, END_FINAL_NORM };
extern const struct slot end_slots[];
extern const size_t end_slot_count;
extern const struct slot slot_block[]; /* in front of a block's layer (model_options.block_of) */
#define SLOT_BLOCK_COUNT 3
extern const struct slot slot_block_norm;
/* In the order of loading, and of the digests that name a base (base_digest.h). */
extern const struct slot layer_slots[];
extern const size_t layer_slot_count;

bool slot_wanted(const struct slot *slot, const struct model_config *config, int layer);
bool slot_wanted_outside(const struct slot *slot, const struct model_config *config);
/* Returns whether a slot of the layer has such a tensor. */
bool role_wanted(enum role role, const struct model_config *config, int layer);
/* Returns the number of heads: the rows of a head are on one rank. 0: rows may be divided anywhere.
 */
int slot_groups(const struct slot *slot, const struct model_config *config, int layer);
/* Returns what is added to the numbers of a vector that a directory stores. */
float slot_offset(const struct slot *slot, const struct model_config *config);
float slot_scale(const struct slot *slot,
                 const struct model_config *config); /* factor on a vector */
/* See struct model_factors; 0: none. */
float role_factor(const struct model_config *config, enum role role);
float slot_fixed(const struct slot *slot, const struct model_config *config); /* or 0 */

/* The names of a layer's tensors that mean another computation, by index; false at the end. */
bool tensor_refused(char out[TENSOR_NAME_MAX], enum naming naming, size_t index, int layer);

#endif
