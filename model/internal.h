/* The model's parts, for the files of this folder: model.c opens and closes, load.c fills in the
 * weights, load_gates.c the gates, forward.c computes a step. */
#ifndef KEEPD_MODEL_INTERNAL_H
#define KEEPD_MODEL_INTERNAL_H

#include <cjson/cJSON.h>
#include <limits.h>

#include "kernels/cpu/team.h"
#include "model/adapter.h"
#include "model/gates.h"
#include "model/model.h"
#include "model/tensors.h"
#include "model/weights.h"

struct layer {
    struct kern_weight *qkv, *o;
    struct kern_weight *attn_gate;      /* NULL where the family has none */
    struct kern_weight *gate_up, *down; /* dense layers; in routed layers, the shared experts */
    struct kern_weight *shared_gate;    /* [1, d_model]; NULL where the family has none */
    /* Routed layers. The arrays, [experts], are host memory. */
    struct kern_weight *router, **expert_gate_up, **expert_down;
    struct kern_weight *experts_in, *experts_out; /* NULL where experts are not narrower */
    float *router_bias, *expert_gate_up_bias, *expert_down_bias; /* as in kern_experts_spec */
    float *select_bias;
    struct kern_experts *experts;
    float *shared_post_norm, *router_norm, *experts_norm, *experts_post_norm, *experts_factors;
    struct kern_gate *gate;
    /* backend memory, float32; NULL where the family has none */
    float *sinks;
    float *attn_norm, *attn_post_norm, *ffn_norm, *ffn_post_norm, *q_norm, *k_norm, *v_norm,
        *qkv_bias, *o_bias, *up_bias, *down_bias, *attn_post_bias, *ffn_post_bias;
    /* The branch of the layer's own embeddings, and the factor on the layer's output. */
    struct kern_weight *each_gate, *each_out;
    float *each_post_norm, *out_scale;
    /* Layers with a recurrent state: the products of its inputs, the convolution's weights,
     * [channels, conv_width], and the other vectors of struct kern_delta or kern_mamba; state_out
     * is the product of its outputs. */
    struct kern_weight *state_in, *state_rates, *state_out;
    float *taps, *conv_bias, *decay, *state_bias, *skip, *state_norm;
    /* Latent attention: the products that give the queries' vector, the queries, and the vector
     * that is cached; for each head, [heads_q], in host memory, the products that would give keys
     * and values. */
    struct kern_weight *q_down, *q_up, *entry, **up_k, **up_v;
    float *q_down_norm, *entry_norm;
};

/* Activations of one step, backend memory. */
struct scratch {
    float *x;       /* [rows_max, d_model] residual stream */
    float *norm;    /* [rows_max, d_model] */
    float *qkv;     /* [rows_max, (heads_q + 2 heads_kv) * head_dim], or the product state_in */
    float *heads;   /* [rows_max, heads_width] */
    float *mixed;   /* [rows_max, mixed_width] */
    float *gates;   /* [rows_max, the widest of its users] product of attn_gate, shared_gate,
                       state_rates, or q_down and entry */
    float *gate_up; /* [rows_max, 2 d_ff], or shared_ff where that is more */
    float *ff;      /* [rows_max, d_ff] */
    float *beside;  /* [2, rows_max, d_model] outputs of a network and of the experts beside it; or
                         [2, rows_max, expert_latent] inputs and outputs of narrow experts */
    float *router;  /* [rows_max, experts] */
    float *latent;  /* [rows_max, heads_q * max(size of a query, size of the cached vector)] queries
                       before their products, then attention's outputs */
    float *log_beta;   /* [rows_max, heads_kv] */
    float *each;       /* [rows_max, layers * each_embed] embeddings for each layer */
    float *each_in;    /* [as each] the product that is added to `each` */
    float *last_each;  /* [logits_max, as each] */
    float *last_x;     /* [logits_max, d_model] wanted rows, from the last layer's attention on */
    float *last_heads; /* [logits_max, as heads] */
    float *last_mixed; /* [logits_max, as mixed] */
    float *logits;     /* [logits_max, vocab] */
    float *pairs;  /* [2, rows_max, d_model] a block's inputs: norms of embeddings, then of hidden
                      states */
    float *joined; /* [rows_max, 2 d_model] the same, side by side */
    float *pooled, *ended; /* [the widest of its users] input and output of a product of `ending` */
    float *between;        /* [the first of them] host memory: what it hands on */
    int32_t *rows; /* [rows_max] host memory: rows of a table that are added to embeddings */
};

/* The inputs of recurrent states of the last step's spans that peeked, backend memory. */
struct peeked {
    int32_t *rows; /* [peek_rows] these rows in the step */
    int count;
    /* [state_layers], each [peek_rows, state_width], and [peek_rows, rates_width]; rates are NULL
     * where the layer has none. */
    float **in, **rates;
};

#define ADAPTED_ROWS 256 /* rows of a step whose products are computed at once */

/* The placed adapters of a model, and the rows of the step that they change (adapt.c). */
struct adapted {
    /* By number, from 1 on: [layers * ADAPTER_SITES], `down` NULL where there is no product. */
    struct kern_low_rank *adapters[MODEL_ADAPTERS_MAX];
    float *in, *low, *out; /* rooms of struct kern_low_rank for ADAPTED_ROWS rows */
    int32_t *of_row;       /* [rows_max] number of each row's adapter; NULL: none can be placed */
    int32_t *rows;         /* [rows_max] the rows of the groups below */
    struct adapted_group {
        const struct kern_low_rank *products;
        const int32_t *rows; /* [count] */
        int count;
    } groups[MODEL_ADAPTERS_MAX];
    int group_count;
};

struct model {
    struct kern *kern;
    struct model_config config;
    struct kern_weight *embed, *head; /* the same matrix when tied */
    float *final_norm;
    float *embed_norm, *embed_norm_bias;   /* NULL where the family has none */
    struct kern_weight *positions, *types; /* tables, whose rows are added to the embeddings */
    struct kern_weight
        *ending[MODEL_ENDING_MAX]; /* struct model_ending; NULL where there is none */
    float *ending_bias[MODEL_ENDING_MAX];
    struct kern_weight *each_embed, *each_in; /* embeddings for each layer */
    float *each_in_norm;
    struct layer *layers;
    struct scratch scratch;
    size_t step_bytes; /* memory of `scratch` and `peeked` */
    /* A block that predicts further tokens: the model whose embeddings and head it uses, the
     * product and the norms of its inputs, and the order of `joined`. NULL: a whole model. */
    const struct model *block_of;
    struct kern_weight *block_in;
    float *block_embed_norm, *block_hidden_norm;
    int32_t *block_order;      /* [2 rows_max] */
    const float *block_hidden; /* the step's, host memory */
    int block_layer;           /* the files' number of the block's layer; 0 for a whole model */
    bool has_block;
    int rows_max, logits_max, peek_rows;
    struct peeked peeked;
    struct adapted adapted;
    bool borrowed;             /* another model owns everything but the scratch */
    struct gates_header gates; /* gates_header_unknown if there are none */
    enum gates_from gates_from;
    char gates_path[PATH_MAX], gates_cached[PATH_MAX];
    size_t weight_bytes;
    /* Is called with the inputs of each dense product of a layer, in backend memory, before it is
     * computed; `role` is the first of the product's parts. The last layer computes the products
     * after attention for the wanted rows only, so only these rows are passed; ROLE_O gets all
     * rows. Until the call for ROLE_O returns, scratch.x is the residual stream before the layer,
     * scratch.qkv holds the rotated queries and, in layers with entries of their own, the keys and
     * the values, scratch.gates the gates of attention's output, and scratch.mixed the output of a
     * recurrent state beside attention; scratch.norm may be overwritten then. NULL: no callback. */
    void (*watch)(void *arg, int layer, enum role role, const float *inputs, int rows);
    void *watch_arg;
};

/* Returns the inner width of the dense layers; 0 if there are none. */
int dense_width(const struct model_config *config);
int routed_layers(const struct model_config *config);

static inline int q_width(const struct model_config *c, int layer) {
    return c->heads_q * c->per_layer[layer].head_dim;
}
static inline int kv_width(const struct model_config *c, int layer) {
    return c->per_layer[layer].heads_kv * c->per_layer[layer].head_dim;
}
static inline int qkv_width(const struct model_config *c, int layer) {
    return q_width(c, layer) + (c->latent.rank ? 1 : 2) * kv_width(c, layer);
}

static inline int latent_query_dim(const struct model_config *c) {
    return c->latent.still + c->latent.turned;
}

static inline bool holds_entries(const struct model_layer_config *layer) {
    return layer_attends(layer) && !layer->reads;
}

static inline int ff_width(const struct model_config *c, int layer) {
    return c->per_layer[layer].wide_ff ? 2 * c->d_ff : c->d_ff;
}

static inline bool has_dense(const struct model_layer_config *layer) {
    return !layer->routed && !layer->no_network;
}

static inline int experts_width(const struct model_config *c) {
    return c->expert_latent ? c->expert_latent : c->d_model;
}

/* Returns how many products a network has before its activation. */
static inline int network_products(const struct model_config *c) {
    return c->ungated ? 2 : 3;
}

static inline int delta_width(const struct model_config *c) {
    return c->delta.heads_v * c->delta.dim_v;
}

static inline int mamba_width(const struct model_config *c) {
    return c->mamba.heads * c->mamba.dim;
}

/* Returns how many numbers attention or a recurrent state computes from a layer's inputs for each
 * token. */
static inline int attend_width(const struct model_config *c, int layer) {
    const struct model_layer_config *its = &c->per_layer[layer];
    return !layer_attends(its) ? 0 : its->reads ? q_width(c, layer) : qkv_width(c, layer);
}
static inline int state_width(const struct model_config *c, int layer) {
    const enum mixer mixer = c->per_layer[layer].mixer;
    const int keys = 2 * c->delta.heads_k * c->delta.dim_k;
    return mixer == MIXER_CONV    ? 3 * c->d_model
           : mixer == MIXER_DELTA ? keys + 2 * delta_width(c)
           : mixer == MIXER_MAMBA ? 2 * mamba_width(c)
                                  : 0;
}
/* Returns the numbers of state_rates for each token; every rank computes all of them. */
static inline int rates_width(const struct model_config *c, int layer) {
    const enum mixer mixer = c->per_layer[layer].mixer;
    return mixer == MIXER_DELTA   ? 2 * c->delta.heads_v
           : mixer == MIXER_MAMBA ? 2 * c->mamba.groups * c->mamba.dim_state + c->mamba.heads
                                  : 0;
}
/* Returns how many numbers attention passes to the product `o`, or a recurrent state to state_out.
 */
static inline int heads_width(const struct model_config *c, int layer) {
    if (!layer_attends(&c->per_layer[layer])) return 0;
    return c->latent.rank ? c->heads_q * c->latent.dim_v : q_width(c, layer);
}
static inline int mixed_width(const struct model_config *c, int layer) {
    const enum mixer mixer = c->per_layer[layer].mixer;
    return mixer == MIXER_CONV    ? c->d_model
           : mixer == MIXER_DELTA ? delta_width(c)
           : mixer == MIXER_MAMBA ? mamba_width(c)
                                  : 0;
}

/* Returns how a layer attends. */
struct kern_attend_options model_attend_options(const struct model *model, int layer);
/* Returns latent attention of a layer. */
struct kern_latent model_latent(const struct model *model, int layer);

/* Reads the configuration and, unless the weights are `random`, the table of tensors. The caller
 * closes both, also after a failure. */
int model_read(const char *path, int context, bool random, struct model_config *config,
               struct weights **weights, struct fault *fault);

/* Parses config.json's tree, and generation_config.json's or NULL; see model_config_parse. In both
 * trees, values that mean "none" become null. */
int model_config_read(cJSON *config, cJSON *generation, int context, struct model_config *out,
                      struct fault *fault);

/* Load the weights and the gates. On failure the model is partly loaded; model_close frees it.
 * `weights` NULL: random ones. */
int model_load_weights(struct model *model, const struct model_options *options,
                       const struct weights *weights, struct fault *fault);
int model_load_gates(struct model *model, const struct model_options *options,
                     const struct weights *weights, struct fault *fault);

/* Memory that the weights take at most once they are loaded. */
size_t model_loaded_bytes(const struct weights *weights, enum quantization quantization);

/* ---- Adapters (adapt.c) ---- */

/* Takes the memory that products of adapters need; with `check_only` counts it alone. */
int model_open_adapted(struct model *model, bool check_only, struct fault *fault);
void model_close_adapted(struct model *model); /* removes all adapters */
/* Notes which rows of the step have which adapter. */
void model_adapt_batch(struct model *model, const struct kern_batch *batch);
/* From now on the rows of arrays are these of the step. */
void model_adapt_wanted(struct model *model, const int32_t *want, int count);
/* Adds the adapters' products of `x`, the inputs of the site's own product, to `y`, its outputs. */
void model_adapt(struct model *model, int layer, enum adapter_site site, float *y, const float *x);

/* ---- Blocks that predict further tokens (block.c) ---- */

/* Returns whether the files have one that can be used. */
bool model_find_block(const struct model_config *config, const struct weights *weights);
/* Changes the configuration to that of the block alone. The block's tensors get the names of a
 * layer behind the model's last one; *layer is its number. */
int model_take_block(struct model_config *config, struct weights *weights, int *layer,
                     struct fault *fault);
/* Computes the layer's inputs into scratch.x, which has the embeddings of the step's tokens. */
int model_enter_block(struct model *model, int rows);

/* ---- Random weights (random.c) ---- */

#define RANDOM_SEED 0x6b65657064ull

/* Fills `count` words with four bf16 numbers each, as large as the weights of a trained matrix with
 * `cols` columns. Advances *random. */
void random_fill(struct cpu_team *team, uint64_t *random, uint64_t *words, size_t count,
                 int64_t cols);
size_t random_bytes(const struct model_config *config); /* bytes of all matrices of a model */
/* Fills `out` with numbers within 1/4 of `around`. Advances *random. */
void random_vector(uint64_t *random, float *out, size_t count, float around);
/* Makes gates for timing: they cost as much as real ones, and their scores spread over the entries.
 */
int random_gates(struct model *model, struct fault *fault);

#endif
