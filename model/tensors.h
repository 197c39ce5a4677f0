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
    NAMING_COUNT
};

enum role {
    ROLE_EMBED,
    ROLE_FINAL_NORM,
    ROLE_HEAD,
    ROLE_EMBED_NORM, /* in no file */
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
    ROLE_O,
    ROLE_O_BIAS,
    ROLE_ATTN_GATE,
    ROLE_ATTN_POST_NORM,
    ROLE_FFN_NORM,
    ROLE_GATE,
    ROLE_UP,
    ROLE_DOWN,
    ROLE_FFN_POST_NORM,
    ROLE_SINKS,
    ROLE_CONV_B, /* the three parts of a short convolution's inputs */
    ROLE_CONV_C,
    ROLE_CONV_X,
    ROLE_CONV_TAPS, /* a vector here, a matrix in the files */
    ROLE_CONV_OUT,
    ROLE_ROUTER,
    ROLE_ROUTER_BIAS,
    ROLE_SELECT_BIAS,
    ROLE_SHARED_GATE, /* gate, up and down of the network that every token uses beside experts */
    ROLE_SHARED_UP,
    ROLE_SHARED_DOWN,
    ROLE_SHARED_OPEN, /* the product whose sigmoid multiplies it */
    /* one for each expert of a layer */
    ROLE_EXPERT_GATE,
    ROLE_EXPERT_UP,
    ROLE_EXPERT_DOWN,
    ROLE_EXPERT_GATE_BIAS,
    ROLE_EXPERT_UP_BIAS,
    ROLE_EXPERT_DOWN_BIAS,
    ROLE_COUNT
};

#define TENSOR_NAME_MAX 96

static inline bool naming_is_gguf(enum naming naming) {
    return naming == NAMING_GGUF || naming == NAMING_GGUF_FUSED ||
           naming == NAMING_GGUF_AFTER_ATTENTION || naming == NAMING_GGUF_GLM ||
           naming == NAMING_GGUF_LFM2;
}

enum naming tensor_naming(const struct model_config *config, bool gguf);

/* "" where the naming has no such tensor. `layer` is not read for tensors outside the layers, nor
 * `expert` for those that are no expert's.
 * Several roles may have one name: their rows follow each other in that tensor, in the order of the
 * roles. */
void tensor_name(char out[TENSOR_NAME_MAX], enum naming naming, enum role role, int layer,
                 int expert);
/* The matrices or vectors of all experts of a layer are one tensor, [experts, ...]. */
bool tensor_is_stacked(enum naming naming, enum role role);
/* Roles with one name: their rows alternate, instead of following each other. */
bool tensor_alternates(enum naming naming, enum role role);
/* The matrix's tensor has blocks of MXFP4 without their scales, [..., cols / 32, 16] U8. Its name
 * ends with "_blocks"; the scales are in a tensor whose name ends with "_scales", [..., cols / 32]
 * U8. */
bool tensor_is_split_mxfp4(enum naming naming, enum role role);
bool tensor_is_rotated(enum role role); /* q, k, their biases and norms: rows of heads that rotate
                                         */
/* The row of the files that is a head's row `row` in the model. Converters to GGUF store
 * the rows i and i + D/2 of llama's heads as 2 i and 2 i + 1. */
int tensor_stored_row(const struct model_config *config, int row);
/* cols 0: a vector of `rows`. Taps are rows * cols numbers. */
void tensor_shape(const struct model_config *config, enum role role, int64_t *rows, int64_t *cols);

#define SLOT_PARTS_MAX 3

/* The layers that have a slot. */
enum slot_layers { SLOT_ALL, SLOT_DENSE, SLOT_ROUTED, SLOT_ATTENTION, SLOT_CONV };

/* A member of struct layer (in_layer) or struct model: tensors joined by rows into a matrix, or
 * joined into a vector. */
struct slot {
    size_t offset; /* offset of the pointer: struct kern_weight *, of experts **, or float * */
    bool matrix;
    bool experts; /* a matrix for each expert; a vector of all experts, one behind another */
    enum slot_layers layers;
    enum role parts[SLOT_PARTS_MAX];
    int count;
    enum kern_shard shard; /* how a matrix is split */
    bool heads;            /* rows of a key/value head stay together over ranks */
    bool norm;             /* a vector of factors, else of terms: 1 or 0 where weights are random */
    size_t wanted;         /* offset of a bool in struct model_config; 0: always */
    size_t scaled;         /* offset of a float there that multiplies the vector; 0: none */
    size_t fixed;          /* offset of a float there, above 0: all numbers of the vector, where the
                              files have none; 0: they have them */
};

extern const struct slot slot_embed, slot_embed_norm, slot_final_norm, slot_head;
/* In the order of loading, and of the digests that name a base (base_digest.h). */
extern const struct slot layer_slots[];
extern const size_t layer_slot_count;

bool slot_wanted(const struct slot *slot, const struct model_config *config, int layer);
/* The rows of a tensor that several parts of a slot share: those before the part's own, and all. */
void slot_shared_rows(const struct model_config *config, enum naming naming,
                      const struct slot *slot, int part, int layer, int64_t *before, int64_t *all);
float slot_scale(const struct slot *slot,
                 const struct model_config *config); /* factor on a vector */
float slot_fixed(const struct slot *slot, const struct model_config *config); /* or 0 */

/* The names of a layer's tensors that mean another computation, by index; false at the end. */
bool tensor_refused(char out[TENSOR_NAME_MAX], enum naming naming, size_t index, int layer);

#endif
