/* Describes a model's files in words. */
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "model/blocks.h"
#include "model/internal.h"
#include "model/packed.h"

#define TYPES_MAX 64

/* Rows are filled up to panels, and vectors become float32. */
#define LOADED_EXTRA 1.02

struct type_count {
    const char *name;
    size_t tensors;
};

static void count_type(struct type_count *types, size_t *count, const char *name) {
    size_t i = 0;
    while (i < *count && strcmp(types[i].name, name) != 0) i++;
    if (i == TYPES_MAX) return; /* no format has so many types */
    if (i == *count) types[(*count)++] = (struct type_count){.name = name};
    types[i].tensors++;
}

static bool ends_with(const char *name, const char *end) {
    const size_t size = strlen(name), tail = strlen(end);
    return size >= tail && strcmp(name + size - tail, end) == 0;
}

/* Returns the number of elements. Split MXFP4 (tensors.h) has two numbers in a byte, and its scales
 * are not elements. */
static double elements_of(const struct tensor *tensor) {
    const bool bytes = strcmp(tensor->type, "U8") == 0;
    if (bytes && ends_with(tensor->name, "_scales")) return 0;
    double count = bytes && ends_with(tensor->name, "_blocks") ? 2 : 1;
    for (int i = 0; i < tensor->dims; i++) count *= (double)tensor->shape[i];
    return count;
}

/* Returns the tensor's bytes in a CPU's memory. */
static double loaded_bytes(const struct tensor *tensor) {
    enum kern_dtype dtype;
    const bool split = strcmp(tensor->type, "U8") == 0;
    if (tensor->dtype != TENSOR_BLOCKS && !split) return (double)tensor->bytes;
    int64_t group;
    if (tensor->packed && packed_row_scales(tensor->packed, &group))
        return elements_of(tensor) * (group ? 1 + 4.0 / (double)group : 1);
    if (tensor->packed && !block_dtype_of(tensor, &dtype))
        return (double)kern_dtype_bytes(packed_dtype(tensor->packed)) * elements_of(tensor);
    return elements_of(tensor) * block_loaded_bits(tensor) / 8;
}

size_t model_loaded_bytes(const struct weights *weights, enum quantization quantization) {
    static const double bits[] = {[QUANTIZE_FP8] = 16, [QUANTIZE_Q8] = 8.5, [QUANTIZE_Q4] = 8.5};
    double sum = 0;
    for (size_t i = 0; i < weights_count(weights); i++) {
        const struct tensor *tensor = weights_at(weights, i);
        const double loaded = loaded_bytes(tensor);
        const double rounded = elements_of(tensor) * bits[quantization] / 8;
        sum += quantization && tensor->dims > 1 && rounded < loaded ? rounded : loaded;
    }
    return (size_t)(sum * LOADED_EXTRA);
}

/* Returns whether the tensor belongs to experts, by the names that formats have for them. */
static bool is_of_experts(const struct tensor *tensor) {
    return strstr(tensor->name, ".experts.") || strstr(tensor->name, "_exps.") ||
           strstr(tensor->name, "block_sparse_moe.input_linear") ||
           strstr(tensor->name, "block_sparse_moe.output_linear");
}

/* Describes the weights that one token reads in a mixture of experts. */
static void describe_active(const struct model_config *c, const struct weights *weights,
                            struct buf *out) {
    double numbers = 0, bytes = 0, part = (double)c->experts_used / c->experts;
    for (size_t i = 0; i < weights_count(weights); i++) {
        const struct tensor *tensor = weights_at(weights, i);
        const double share = is_of_experts(tensor) ? part : 1;
        numbers += share * elements_of(tensor);
        bytes += share * loaded_bytes(tensor);
    }
    buf_fmt(out, "active       %.1f million numbers, %.1f MB for each token\n", numbers * 1e-6,
            bytes * 1e-6);
}

static void describe_weights(const struct model_config *c, const struct weights *weights,
                             struct buf *out) {
    struct type_count types[TYPES_MAX];
    size_t type_count = 0;
    double numbers = 0, loaded = 0, bytes = (double)weights_bytes(weights);
    for (size_t i = 0; i < weights_count(weights); i++) {
        const struct tensor *tensor = weights_at(weights, i);
        count_type(types, &type_count, tensor->type);
        numbers += elements_of(tensor);
        loaded += loaded_bytes(tensor);
    }
    buf_fmt(out, "weights      %zu tensors, %.1f million numbers, %.1f MB, %.2f bits per number\n",
            weights_count(weights), numbers * 1e-6, bytes * 1e-6,
            numbers > 0 ? bytes * 8 / numbers : 0);
    buf_str(out, "types       ");
    for (size_t i = 0; i < type_count; i++)
        buf_fmt(out, "%s %s: %zu", i ? "," : "", types[i].name, types[i].tensors);
    buf_fmt(out, "\nmemory       %.1f MB of weights\n", loaded * 1e-6);
    if (c->experts) describe_active(c, weights, out);
}

/* Weights that random ones take the place of, in the format of these. */
static void describe_implied(const struct model_config *c, struct buf *out) {
    const struct model_numbers numbers = model_count_numbers(c);
    buf_fmt(out, "weights      %.1f million numbers, %.1f MB in bf16\n", (double)numbers.all * 1e-6,
            (double)numbers.all * 2e-6);
    if (numbers.active == numbers.all) return;
    buf_fmt(out, "active       %.1f million numbers, %.1f MB for each token\n",
            (double)numbers.active * 1e-6, (double)numbers.active * 2e-6);
}

static void describe_rotation(const struct model_config *c, struct buf *out) {
    int unrotated = 0, pairs = 0;
    while (pairs < c->head_dim / 2 && c->inv_freq[pairs] > 0) pairs++;
    for (int i = 0; i < c->layers; i++) unrotated += !c->per_layer[i].rotated;
    if (unrotated == c->layers) {
        buf_str(out, "rotation     none\n");
        return;
    }
    buf_fmt(out, "rotation     %d of %d dimensions, one turn in %.4g to %.4g tokens", 2 * pairs,
            c->global_dim ? c->global_dim : c->head_dim, 2 * M_PI / (double)c->inv_freq[0],
            2 * M_PI / (double)c->inv_freq[pairs - 1]);
    if (c->rope_scale != 1) buf_fmt(out, ", cosine and sine times %.4g", (double)c->rope_scale);
    if (unrotated) buf_fmt(out, ", none in %d of %d layers", unrotated, c->layers);
    buf_char(out, '\n');
}

/* Describes layers without a window, and layers that read the entries of others. */
static void describe_kinds(const struct model_config *c, struct buf *out) {
    const struct model_layer_config *last = &c->per_layer[c->layers - 1];
    int full = 0, reading = 0;
    for (int i = 0; i < c->layers; i++) {
        full += c->per_layer[i].sliding_window == 0;
        reading += c->per_layer[i].reads;
    }
    if (c->global_dim)
        buf_fmt(out, "heads        %d key/value heads of %d in %d of %d layers%s\n", last->heads_kv,
                last->head_dim, full, c->layers,
                last->keys_are_values ? ", where values are the keys" : "");
    if (c->latent.rank)
        buf_fmt(out,
                "latent       one entry for each token and layer, %d numbers and %d that rotate\n",
                c->latent.rank, c->latent.turned);
    if (reading)
        buf_fmt(out, "sharing      %d of %d layers read the keys and values of others\n", reading,
                c->layers);
    if (c->each_embed)
        buf_fmt(out, "embeddings   %d numbers more for each token in each layer\n", c->each_embed);
}

static void describe_windows(const struct model_config *c, struct buf *out) {
    int windowed = 0, window = 0;
    for (int i = 0; i < c->layers; i++) {
        windowed += c->per_layer[i].sliding_window > 0;
        if (c->per_layer[i].sliding_window > window) window = c->per_layer[i].sliding_window;
    }
    if (windowed)
        buf_fmt(out, "windows      %d tokens in %d of %d layers\n", window, windowed, c->layers);
}

static void describe_attention(const struct model_config *c, struct buf *out) {
    const struct {
        bool has;
        const char *what;
    } rows[] = {{c->qkv_bias, "biases on q, k and v"},
                {c->o_bias, "a bias on the output"},
                {c->qk_norm && !c->qk_norm_wide, "norms on q and k"},
                {c->qk_norm_wide, "norms on q and k over all heads"},
                {c->attn_gate, "a gate on the output"},
                {c->query_scale.beta > 0, "queries that grow with their place"},
                {c->post_norms,
                 c->pre_norms ? "norms before and after the blocks" : "norms after the blocks"}};
    bool any = false;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        if (!rows[i].has) continue;
        buf_fmt(out, "%s%s", any ? ", " : "attention    ", rows[i].what);
        any = true;
    }
    if (any) buf_char(out, '\n');
}

static void describe_caps(const struct model_config *c, struct buf *out) {
    if (c->attend_cap > 0) buf_fmt(out, "soft caps    %g in attention", (double)c->attend_cap);
    if (c->logit_cap > 0)
        buf_fmt(out, "%s%g on logits", c->attend_cap > 0 ? ", " : "soft caps    ",
                (double)c->logit_cap);
    if (c->attend_cap > 0 || c->logit_cap > 0) buf_char(out, '\n');
}

static void describe_pooling(const struct model_config *c, struct buf *out) {
    static const char *const names[] = {[MODEL_POOL_LAST] = "the last token",
                                        [MODEL_POOL_MEAN] = "the mean over all tokens",
                                        [MODEL_POOL_CLS] = "the first token"};
    if (c->both_ways) buf_str(out, "reading      texts both ways, each in one step; no answers\n");
    if (c->classifier.labels)
        buf_fmt(out, "labels       %d for a pair of texts%s\n", c->classifier.labels,
                c->classifier.sigmoid ? ", a score is a sigmoid" : "");
    else if (c->pooling.other[0])
        buf_fmt(out, "vectors      the files ask for %s, which keepd does not have\n",
                c->pooling.other);
    else if (c->pooling.how)
        buf_fmt(out, "vectors      of %d numbers, from %s%s\n", model_vector_width(c),
                names[c->pooling.how],
                !c->pooling.dense[0].there   ? ""
                : !c->pooling.dense[1].there ? ", through a dense layer"
                                             : ", through two dense layers");
}

static int networks_alone(const struct model_config *c) {
    int count = 0;
    for (int i = 0; i < c->layers; i++) count += c->per_layer[i].mixer == MIXER_NONE;
    return count;
}

static void describe_config(const struct model_config *c, bool gguf, struct buf *out) {
    buf_fmt(out, "family       %s, %s\n", c->family, gguf ? "a GGUF file" : "a directory");
    buf_fmt(out,
            "shape        %d layers of width %d, feed-forward %d, %d query and %d key/value heads "
            "of %d, vocabulary %d%s\n",
            c->layers, c->d_model, c->d_ff ? c->d_ff : c->expert_ff, c->heads_q,
            c->per_layer[0].heads_kv, c->per_layer[0].head_dim, c->vocab,
            c->tied_embeddings ? ", LM head tied to the embeddings" : "");
    describe_kinds(c, out);
    if (c->experts)
        buf_fmt(out, "experts      %d of width %d in %d of %d layers, %d for each token\n",
                c->experts, c->expert_ff, routed_layers(c), c->layers, c->experts_used);
    if (c->experts_narrow)
        buf_fmt(out, "             they read and write %d numbers\n", c->expert_latent);
    if (c->shared_ff)
        buf_fmt(out, "beside them  a network of width %d for every token%s\n", c->shared_ff,
                c->shared_gate ? ", gated" : "");
    if (c->state_layers)
        buf_fmt(out,
                "states       %.1f KB for each sequence: %d of %d layers have a %s over %d tokens "
                "%s attention\n",
                (double)model_state_bytes(c) * 1e-3, c->state_layers, c->layers,
                c->mamba.heads     ? "Mamba-2 scan, with a convolution"
                : c->delta.heads_k ? "gated delta rule, with a convolution"
                                   : "convolution",
                c->conv_width, c->per_layer[0].attends_too ? "beside" : "instead of");
    if (c->delta.heads_k)
        buf_fmt(out, "delta rule   %d key heads of %d, %d value heads of %d\n", c->delta.heads_k,
                c->delta.dim_k, c->delta.heads_v, c->delta.dim_v);
    if (c->mamba.heads)
        buf_fmt(out, "Mamba-2      %d heads of %d, states of %d, %d groups\n", c->mamba.heads,
                c->mamba.dim, c->mamba.dim_state, c->mamba.groups);
    if (networks_alone(c))
        buf_fmt(out, "networks     %d of %d layers have no attention and no state\n",
                networks_alone(c), c->layers);
    describe_attention(c, out);
    describe_caps(c, out);
    buf_fmt(out, "positions    %d, %.1f KB for each in a cache in bf16\n", c->max_positions,
            (double)model_entry_numbers(c) * 2e-3);
    describe_rotation(c, out);
    describe_windows(c, out);
    describe_pooling(c, out);
}

int model_inspect(const char *path, int context, bool random, struct buf *out,
                  struct fault *fault) {
    struct model_config config = {0};
    struct weights *weights = NULL;
    int rc = model_read(path, context, random, &config, &weights, fault);
    if (config.inv_freq) describe_config(&config, gguf_is_path(path), out);
    if (!rc && random) describe_implied(&config, out);
    if (weights && weights_count(weights)) describe_weights(&config, weights, out);
    weights_close(weights);
    model_config_close(&config);
    return rc;
}
