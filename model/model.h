/* The model: configuration as data, one layer loop, no knowledge of requests.
 *
 * Families differ only in `struct model_config`. Thread: the engine
 * thread, after opening. Owns its weights in the backend; borrows `kern`. */
#ifndef KEEPD_MODEL_MODEL_H
#define KEEPD_MODEL_MODEL_H

#include <stdbool.h>

#include "base/buf.h"
#include "base/err.h"
#include "kernels/kern.h"
#include "kernels/quantize.h"
#include "model/packed.h"
#include "model/pooling.h"

#define MODEL_EOS_MAX      16
#define MODEL_ADAPTERS_MAX 64 /* placed in a model at once; numbered from 1 on */

/* How a layer mixes a token with those before it. All but attention have a recurrent state; a layer
 * with NONE is a feed-forward network alone. */
enum mixer { MIXER_ATTENTION, MIXER_CONV, MIXER_DELTA, MIXER_MAMBA, MIXER_NONE };

struct model_layer_config {
    enum mixer mixer;
    bool
        attends_too; /* attention beside a recurrent state, to the same inputs; outputs are added */
    int index;       /* number among the layers with entries of their own; else -1 */
    int state;       /* number among the layers with a recurrent state; else -1 */
    int heads_kv, head_dim; /* KV heads, where the layer has attention */
    bool reads; /* the layer has no entries of its own and attends to those that `index` says */
    bool keys_are_values; /* values are the keys before norm and rotation */
    bool wide_ff;         /* a dense network twice as wide as d_ff */
    int sliding_window;   /* tokens a query sees, its own included; 0: all before it */
    bool rotated;         /* queries and keys are rotated by their positions */
    bool local;           /* by inv_freq_local, without rope_scale */
    bool routed;          /* the feed-forward network is a mixture of experts */
    bool no_network;      /* the layer has no feed-forward network */
    bool plain_inputs;    /* attention has no norm of its inputs, whatever pre_norms says */
};

static inline bool layer_attends(const struct model_layer_config *layer) {
    return layer->mixer == MIXER_ATTENTION || layer->attends_too;
}

static inline bool layer_has_state(const struct model_layer_config *layer) {
    return layer->mixer != MIXER_ATTENTION && layer->mixer != MIXER_NONE;
}

/* Factors on the products of matrices; 0: 1. Files of GGUF have them in their numbers. */
struct model_factors {
    float q, k, v, o, z, x, b, c, dt, state_out, gate, down;
};

#define MODEL_ENDING_MAX POOLING_DENSE_MAX

/* Products of a text's pooled hidden states, one behind another: those of a classifier, or of Dense
 * modules. */
struct model_ending {
    int count;
    int width[MODEL_ENDING_MAX]; /* numbers that each gives */
    bool tanh[MODEL_ENDING_MAX]; /* and their tanh is taken */
};

/* A classifier of the first token's output: a product of d_model numbers, their tanh, and a product
 * that gives one number for each label. */
struct model_classifier {
    int labels;   /* 0: there is none */
    bool sigmoid; /* the score of a single label is its sigmoid */
    bool roberta_names;
};

/* Places of three dimensions (kern_rope.axes), where pairs j = 0, 1, ... are divided among time,
 * height and width by the three numbers of "mrope_section". */
enum model_axes {
    AXES_ONE,   /* places have one dimension */
    AXES_APART, /* the first s[0] pairs, the next s[1], the last s[2] (Qwen2-VL, arXiv 2409.12191)
                 */
    AXES_INTERLEAVED /* below 3 s[1], j = 3 i + 1 is height's; below 3 s[2], j = 3 i + 2 width's;
                        all others are time's (Qwen3-VL) */
};

struct model_config {
    char family[32]; /* model_type of config.json: "qwen3", "llama", ... */
    int layers, d_model, d_ff, heads_q, vocab;
    int heads_kv, head_dim;   /* the largest of per_layer */
    struct kern_heads *heads; /* [cache_layers], owned: per_layer's, where they differ; else NULL */
    int cache_layers; /* layers with entries of their own, which the cache and gates are about */
    int global_dim,
        local_dim;    /* heads of layers without and with a window, where they differ; else 0 */
    int state_layers; /* layers with a recurrent state */
    int conv_width;   /* tokens that a convolution sees, its own included; 0: none */
    struct kern_delta delta; /* sizes of gated delta rules; all 0: there is none */
    struct kern_mamba mamba; /* sizes of Mamba-2 layers, and eps; all 0: there is none */
    /* Sizes of latent attention, and eps; all 0: there is none. heads_kv is 1 then, and head_dim
     * that of what is cached. */
    struct kern_latent latent;
    int q_rank; /* numbers of the vector that queries are products of; 0: the inputs */
    bool q_latent, q_from_input; /* with latent attention: q_rank is above 0; it is 0 */
    /* A GGUF file joins up_k and up_v in one tensor, as directories do; gate and up of experts. */
    bool latent_joined, experts_joined;
    bool conv_bias;      /* kern_mamba.conv_bias */
    bool mamba_names;    /* files name tensors as Granite 4-H's do */
    bool nemotron_names; /* as Nemotron-H's do */
    bool falcon_names;   /* as Falcon-H1's do */
    bool mamba_norm;     /* kern_mamba.norm */
    bool gemma4_experts; /* the network beside experts has norms of its own, as they have; see
                            step_beside */
    float router_scale;  /* factor on the router's inputs then */
    struct model_factors factors;
    bool lfm2_names;       /* files name tensors as LFM2's do */
    bool qwen35_names;     /* as Qwen3.5's: q's projection has queries and gates of each head */
    bool qwen3_next_names; /* and as Qwen3-Next's */
    /* Layers that are routed: experts, how many of them a token uses, and their inner width, which
     * is d_ff in the others. 0: no layer is routed. */
    int experts, experts_used, expert_ff;
    int expert_latent;                 /* width of what experts read and hand on; 0: d_model */
    bool experts_narrow;               /* expert_latent is above 0 */
    bool experts_normalised;           /* kern_experts_spec.normalise */
    bool experts_sigmoid, select_bias; /* kern_experts_spec.sigmoid, .select_bias */
    int expert_groups, expert_groups_used;
    bool expert_group_best; /* kern_experts_spec.group_best */
    float expert_scale;
    bool shared_experts; /* routed layers have a dense network for every token, too */
    bool shared_gate;    /* times the sigmoid of a product of its inputs */
    int shared_ff;       /* inner width of that network; 0: there is none */
    int mtp_layers;      /* layers behind the last, which predict further tokens and are not read */
    bool mixtral_names;  /* files name experts as Mixtral's do */
    bool expert_bias;    /* routers and experts have biases */
    bool sinks;          /* kern_attend_options.sinks */
    bool gpt_oss_names;  /* files name tensors as gpt-oss's do */
    bool stacked_experts; /* a directory has the matrices of all experts in one tensor, gate and
                             up together, perhaps with rows and columns in each other's places */
    int max_positions;
    int rotary_dims; /* dimensions of each head that rotate, even; the others do not */
    float rms_eps;
    float post_eps;     /* the same of norms of outputs */
    float embed_scale;  /* factor on embeddings as they enter the first layer */
    float attend_scale; /* factor on products of queries and keys */
    float logit_scale;
    float attend_cap, logit_cap; /* soft caps of attention's and of the last logits; 0: none */
    float norm_offset;           /* added to the weights of norms */
    bool final_norm_plain;       /* but not to those of the last one */
    /* Above 0: a norm of the embeddings, and of queries and keys, whose weights are all this number
     * where files have none. */
    float embed_norm, q_norm, k_norm;
    bool embed_norms; /* there is a norm of the embeddings */
    bool v_norms;     /* norms of values, with v_norm as weights */
    float v_norm;
    /* Embeddings for each layer (Gemma 4): numbers of each, 0: none; see embeds_each.
     * Each layer adds a gated product of its own ones behind its network. */
    int each_embed;
    bool embeds_each;
    float each_norm_scale;
    bool layer_scales; /* a factor on what each layer hands on */
    enum kern_activation activation;
    /* A text is read in one step, in which every token sees all others; there are vectors of texts
     * alone, no LM head, and no answers. */
    bool both_ways;
    bool bert_names, nomic_names; /* files name tensors as BERT's, and as nomic-bert's do */
    bool modern_names;            /* as ModernBERT's do */
    bool layer_norms; /* norms are LayerNorm, with norm_bias plus a vector; else RMSNorm */
    bool norm_bias;
    bool norms_of_sums; /* norms of outputs are of the sum of inputs and outputs, and there is no
                           norm behind the last layer */
    bool ff_bias;       /* biases of networks' products */
    /* Rows of the tables of positions and of types, 0: there is none; the row of the first
     * position. */
    bool learned_positions, typed;
    int position_rows, position_first, type_rows;
    bool classifies; /* there is a classifier: the model makes no vectors */
    struct model_classifier classifier;
    bool ungated;               /* networks have one product in front, which is its own gate */
    bool pre_norms, post_norms; /* attention and the feed-forward network have norms of their
                                   inputs, of their outputs */
    bool fused;                /* files join q, k and v in one tensor, and gate and up in another */
    bool norm_after_attention; /* GGUF files name the norm of the network's inputs as Gemma's name
                                  the norm of attention's output */
    bool ernie_names;          /* a directory names select_bias as ERNIE's do */
    bool glm_names; /* files join gate and up; norms of outputs have names of their own */
    bool qkv_bias, o_bias, qk_norm, tied_embeddings;
    bool attn_gate;    /* attention's output times the sigmoid of a product of its inputs */
    bool qk_norm_wide; /* norms of all heads of q, and of k, together; else of each head */
    bool permuted_qk;  /* in the files: rows 2 i and 2 i + 1 of a head of q and k, of the R that
                          rotate, are i and i + R/2 */
    int32_t bos;       /* -1: none */
    int32_t eos[MODEL_EOS_MAX]; /* union of config.json and generation_config.json */
    int eos_count;
    /* request defaults from generation_config.json; NAN / -1 where absent */
    float temperature, top_p, min_p, repetition;
    int top_k;
    enum kern_dtype dtype;  /* format of the weights */
    struct packing packing; /* form of matrices in 4 bits in a directory */
    struct pooling pooling; /* how texts become vectors */
    float rope_scale;
    struct kern_query_scale query_scale;
    /* [head_dim / 2], owned. With rotary_dims below head_dim, rows of q and k are permuted as they
     * are loaded, so that the pairs that rotate come first; the others have 0 here. */
    float *inv_freq;
    /* The one of a token's three places by which each pair rotates (kern_rope.axes), owned;
     * NULL: places have one dimension. */
    uint8_t *axes;
    enum model_axes axes_order;           /* AXES_ONE: axes is NULL */
    float *inv_freq_local;                /* [head_dim / 2], owned; NULL: no layer is local */
    float *inv_freq_none;                 /* [head_dim / 2] zeros, owned; NULL: all layers rotate */
    struct model_layer_config *per_layer; /* [layers], owned */
    const float **rotations; /* [cache_layers], owned: of the tables above that by which
                                the layer rotates; NULL: it does not */
};

/* Pure: config.json and generation_config.json (NULL when absent). `context`: the most tokens that
 * a sequence will have, 0 = the model's own; longrope chooses its factors by it. ERR_UNSUPPORTED
 * names the field. */
int model_config_parse(const char *config, size_t config_size, const char *generation,
                       size_t generation_size, int context, struct model_config *out,
                       struct fault *fault);
void model_config_close(struct model_config *config);

struct model;
struct gates_header;

/* Where gates come from. Without model_options.gates they are looked for in this order:
 *   BESIDE  gates.safetensors in the model's directory; beside NAME.gguf NAME.gates.safetensors. A
 *           file that cannot be used, or names no base model (gates.h), is refused.
 *   CACHED  in model_options.gates_cache, under a name made of the base model's digests. A file
 *           that cannot be used is left out with a warning.
 *   RANDOM  with random_weights */
enum gates_from { GATES_NONE, GATES_GIVEN, GATES_BESIDE, GATES_CACHED, GATES_RANDOM };

struct model_options {
    const char *dir;         /* or a GGUF file, of several the first */
    const char *gates;       /* path, "" = none, NULL = found (enum gates_from) */
    const char *gates_cache; /* folder of gates that were fitted here; NULL or "" = none */
    int context;             /* see model_config_parse */
    int rows_max;            /* largest step */
    int logits_max;          /* most rows that want logits in one step */
    int peek_rows;           /* most rows of a step's spans that peek, if states and backend can */
    bool check_only;         /* names, shapes, types, gates; the model cannot be used */
    /* Not NULL: opens the block that predicts further tokens in the same files as this open model,
     * which outlives it: see model_has_block. */
    const struct model *block_of;
    const struct model *owner;      /* the same model, open, outlives this one: its weights are used
                                       where the backend can share them. NULL: they are loaded */
    enum quantization quantization; /* FP8: of the layers' matrices alone. Q8, Q4: of all matrices
                                       but routers, the vocabulary's in Q8; those of a GGUF file
                                       that are in blocks stay what they are */
    int calibrate;                  /* model_save to Q4: tokens by which rounding is calibrated
                                       (model/calibrate.h); 0: it is as while loading */
    bool random_weights; /* take only config.json; weights, and gates where no file gives them, from
                            a seeded generator (timing) */
    bool adapts;         /* adapters can be placed */
    int threads; /* threads that convert weights while loading; 0 = the cores this process may use
                  */
    /* Bytes read, of all bytes; false: no more of them are wanted (ERR_STOPPED). May be NULL. */
    bool (*progress)(void *arg, uint64_t done, uint64_t total, const char *what);
    void *progress_arg;
};

/* Describes the files of a model for people, a line for each fact, as far as they can be read; no
 * element of a tensor is. `random`: of config.json alone, as model_options.random_weights. Failure:
 * what start would refuse. */
int model_inspect(const char *path, int context, bool random, struct buf *out, struct fault *fault);

/* The numbers of a model's weights, as config.json implies them, and how many of them are left
 * without the experts that a token does not use. Embeddings count as a whole in both. */
struct model_numbers {
    int64_t all, active;
};
struct model_numbers model_count_numbers(const struct model_config *config);
/* The numbers that a token adds to the cache, in all layers. */
int64_t model_entry_numbers(const struct model_config *config);

/* Loads weights into the backend, or shares the owner's. Errors name field, tensor or file. */
int model_open(struct kern *kern, const struct model_options *options, struct model **out,
               struct fault *fault);
void model_close(struct model *model);
const struct model_config *model_config(const struct model *model);
/* Every layer rotates, by the same frequencies. */
bool model_config_rotates_alike(const struct model_config *config);
/* The layers that have a sliding window, and the longest of their windows (0: none). */
int model_config_sliding_layers(const struct model_config *config);
int model_config_sliding_window(const struct model_config *config);
/* Describes the model to a cache: layers, heads, states, rotations. The caller adds the rest. */
struct kern_cache_options model_cache_options(const struct model_config *config);
/* Pages of the recurrent states of a sequence on each of `ranks` ranks; their numbers; and all
 * pages, at most, of one that has so many entries in each stream, with one rank. */
int64_t model_state_pages(const struct model_config *config, const struct kern_cache_info *info,
                          int ranks);
uint64_t model_state_bytes(const struct model_config *config);
int64_t model_pages(const struct model_config *config, const struct kern_cache_info *info,
                    int64_t entries);
bool model_has_gates(const struct model *model);
enum gates_from model_gates_from(const struct model *model);
/* The file that gates were read from, "" = none; and where gates_cache has this model's, whether or
 * not it is there, "" = nowhere or not looked for. */
const char *model_gates_path(const struct model *model);
const char *model_gates_cached(const struct model *model);
/* The header of the gates' file (model/gates.h); all unknown if there are no gates. */
const struct gates_header *model_gates(const struct model *model);
/* Memory of the weights, and of the activations of a step. With check_only that of the weights is
 * what loading them takes at most. */
size_t model_weight_bytes(const struct model *model);
size_t model_step_bytes(const struct model *model);

/* One step: appends batch->rows tokens to their streams (begin_step was called by this function)
 * and leaves logits of rows `want[0..want_count)`, a row perhaps several times, in *logits, backend
 * memory [want_count, vocab], valid until the next call. Queued: what fails later is said by the
 * backend's sync or sample, which every step ends with. Otherwise the error of begin_step, with
 * nothing appended. */
int model_step(struct model *model, const struct kern_batch *batch, const int32_t *want,
               int want_count, const float **logits);
/* The same; with `hidden` not NULL it also leaves the outputs of the final norm for every row of
 * the step in *hidden, backend memory [batch->rows, d_model], valid until the next call. */
int model_step_hidden(struct model *model, const struct kern_batch *batch, const int32_t *want,
                      int want_count, const float **logits, const float **hidden);

struct model_ending model_ending(const struct model_config *config);
/* Numbers that a text's vector has, or one for each label where there is a classifier. */
int model_vector_width(const struct model_config *config);
/* Computes the ending's products for one text: `pooled`, its pooled hidden states [d_model], and
 * `out` [model_vector_width] are host memory. Waits for the backend. */
int model_end_vector(struct model *model, const float *pooled, float *out);

struct adapter; /* model/adapter.h */
/* Makes the adapter's products part of the rows with its number (kern_span.adapter) from the next
 * step on; the number is free. Copies all numbers to the backend, during which the model makes no
 * step, and keeps nothing of *adapter. Removed between steps, too.
 * ERR_NOMEM leaves nothing behind. */
int model_place_adapter(struct model *model, int number, const struct adapter *adapter,
                        struct fault *fault);
void model_remove_adapter(struct model *model, int number);

/* The outputs of the final norm for the rows that the last step wanted, backend memory
 * [want_count, d_model], valid until the next step. */
const float *model_wanted_hidden(const struct model *model);

/* A block that predicts further tokens (multi-token prediction, DeepSeek-V3, arXiv 2412.19437,
 * section 2.2): a layer with attention whose input is a product of two norms, side by side: of a
 * token's embedding, and of the hidden state (model_wanted_hidden) from which that token was drawn.
 * It guesses the token after. Embeddings and head are the model's. It opens as a model with one
 * layer (model_options.block_of), whose hidden states take the place of the model's where it goes
 * on from its own guesses. False: the files have none that can be used. */
bool model_has_block(const struct model *model);
/* The same as model_step for a block; `hidden`: [batch->rows, d_model] host memory, the hidden
 * states that belong to the batch's tokens. */
int model_step_block(struct model *block, const struct kern_batch *batch, const float *hidden,
                     const int32_t *want, int want_count, const float **logits);

/* Brings the recurrent states forward by the first tokens of the spans of the last step that
 * peeked. In each of `spans`, `row` counts from the first row of these spans, in the order of the
 * step, and `count` says how many tokens are left. The slots have been truncated. Queued, as
 * model_step. */
void model_bring_states(struct model *model, const struct kern_span *spans, int count);

#endif
