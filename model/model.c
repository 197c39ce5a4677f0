#include "model/model.h"

#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "base/file.h"
#include "base/log.h"
#include "base/mem.h"
#include "kernels/cpu/pool.h"
#include "kernels/quantize.h"
#include "model/gates.h"
#include "model/weights.h"

#define CONFIG_FILE_MAX   ((size_t)16 << 20)
#define GATES_FILE_MAX    ((size_t)4 << 30)
#define HASH_FILE_MAX     ((size_t)64 << 20) /* hashing more would delay the start for a warning */
#define RANDOM_GATE_WIDTH 64
#define RANDOM_SEED       0x6b65657064ull
#define RANDOM_TAKEN      ((int64_t)1 << 12) /* words that a worker makes at a time */
#define CODES_LOOKED_AT   ((size_t)4096)     /* together, before one of them is looked for */

struct layer {
    struct kern_weight *qkv, *o, *gate_up, *down;
    struct kern_gate *gate;
    /* backend memory, float32; NULL where the family has none */
    float *attn_norm, *ffn_norm, *q_norm, *k_norm, *qkv_bias, *o_bias;
};

/* Activations of one step, backend memory. */
struct scratch {
    float *x;          /* [rows_max, d_model] residual stream */
    float *norm;       /* [rows_max, d_model] */
    float *qkv;        /* [rows_max, (heads_q + 2 heads_kv) * head_dim] */
    float *heads;      /* [rows_max, heads_q * head_dim] */
    float *gate_up;    /* [rows_max, 2 d_ff] */
    float *ff;         /* [rows_max, d_ff] */
    float *log_beta;   /* [rows_max, heads_kv] */
    float *last_x;     /* [logits_max, d_model] wanted rows, from the last layer's attention on */
    float *last_heads; /* [logits_max, heads_q * head_dim] */
    float *logits;     /* [logits_max, vocab] */
};

struct model {
    struct kern *kern;
    struct model_config config;
    struct kern_weight *embed, *head; /* the same matrix when tied */
    float *final_norm;
    struct layer *layers;
    struct scratch scratch;
    int rows_max, logits_max;
    bool has_gates;
    bool borrowed; /* everything but the scratch is another model's */
    int trained_budget;
    float gate_horizon;
    size_t weight_bytes;
};

static int q_width(const struct model_config *c) {
    return c->heads_q * c->head_dim;
}
static int kv_width(const struct model_config *c) {
    return c->heads_kv * c->head_dim;
}
static int qkv_width(const struct model_config *c) {
    return q_width(c) + 2 * kv_width(c);
}

/* ---- Loading ------------------------------------------------------------------------------- */

/* Where tensors come from: mapped files or, without any, a seeded generator. */
struct loader {
    struct model *model;
    const struct model_options *options;
    const struct weights *weights; /* NULL: random */
    uint64_t random;
    struct cpu_pool *team; /* NULL: nothing is made */
    uint8_t *codes;        /* [codes_room] a matrix in fp8 on its way to the backend; grows */
    size_t codes_room;
    size_t done, total; /* bytes, for progress */
    struct fault *fault;
};

/* One tensor of a joined matrix or vector. */
struct part {
    const char *suffix; /* "self_attn.q_proj.weight" */
    int64_t rows;
    int64_t groups; /* see struct kern_matrix */
};

#define TENSOR_NAME_MAX 96

static void tensor_name(char out[TENSOR_NAME_MAX], int layer, const char *suffix) {
    if (layer < 0)
        snprintf(out, TENSOR_NAME_MAX, "%s", suffix);
    else
        snprintf(out, TENSOR_NAME_MAX, "model.layers.%d.%s", layer, suffix);
}

static void shape_text(const int64_t *shape, int dims, char *out, size_t size) {
    size_t used = 0;
    out[0] = '\0';
    for (int i = 0; i < dims && used < size; i++) {
        int n = snprintf(out + used, size - used, "%s%lld", i ? ", " : "", (long long)shape[i]);
        used += n > 0 ? (size_t)n : 0;
    }
}

/* The tensor, checked: `cols` 0 means a vector of `rows`. */
static int find_tensor(struct loader *loader, const char *name, int64_t rows, int64_t cols,
                       const struct tensor **out) {
    const int64_t shape[2] = {rows, cols};
    const int dims = cols ? 2 : 1;
    char expected[48], found[96];
    const struct tensor *tensor = weights_find(loader->weights, name);
    shape_text(shape, dims, expected, sizeof expected);
    if (!tensor)
        return fault_set(loader->fault, ERR_NOTFOUND, name, "tensor is missing, expected [%s]",
                         expected);
    shape_text(tensor->shape, tensor->dims, found, sizeof found);
    if (tensor->dims != dims || memcmp(tensor->shape, shape, (size_t)dims * sizeof shape[0]) != 0)
        return fault_set(loader->fault, ERR_INVALID, name, "shape is [%s], expected [%s]", found,
                         expected);
    if (!tensor_is_float(tensor->dtype) && !(cols && tensor->dtype == TENSOR_E4M3))
        return fault_set(loader->fault, ERR_UNSUPPORTED, name, "type must be F32, F16%s",
                         cols ? ", BF16 or, in a layer, F8_E4M3" : " or BF16");
    *out = tensor;
    return 0;
}

static void report_progress(struct loader *loader, size_t bytes) {
    loader->done += bytes;
    const struct model_options *options = loader->options;
    if (!options->progress) return;
    double fraction = loader->total ? (double)loader->done / (double)loader->total : 1;
    options->progress(options->progress_arg, fraction < 1 ? fraction : 1, "weights");
}

static enum kern_dtype dtype_of(const struct tensor *tensor) {
    return tensor->dtype == TENSOR_F32    ? KERN_F32
           : tensor->dtype == TENSOR_F16  ? KERN_F16
           : tensor->dtype == TENSOR_E4M3 ? KERN_E4M3
                                          : KERN_BF16;
}

/* splitmix64, public domain: one word makes four bf16 numbers of random sign and mantissa, with
 * one of two exponents around 1/sqrt(cols). Speed matters, the distribution does not. */
struct filling {
    uint64_t seed, base;
    uint64_t *words;
    struct cpu_share share;
};

#define RANDOM_STEP  0x9e3779b97f4a7c15ull
#define RANDOM_LANES 0x0001000100010001ull

static void fill_some(void *arg, int worker) {
    (void)worker;
    struct filling *job = arg;
    int64_t end;
    for (int64_t i; (i = cpu_share_take(&job->share, RANDOM_TAKEN, &end)) >= 0;) {
        for (; i < end; i++) {
            uint64_t z = job->seed + ((uint64_t)i + 1) * RANDOM_STEP;
            z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
            z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
            z ^= z >> 31;
            job->words[i] = (z & (0x80ff * RANDOM_LANES)) + job->base * RANDOM_LANES;
        }
    }
}

static void fill_random(struct loader *loader, uint64_t *words, size_t count, int64_t cols) {
    const int exponent = 126 + (int)lrint(log2(1 / sqrt((double)cols)));
    struct filling job = {.seed = loader->random, .base = (uint64_t)exponent << 7, .words = words};
    cpu_share_set(&job.share, (int64_t)count);
    cpu_pool_run(loader->team, fill_some, &job);
    loader->random += count * RANDOM_STEP;
}

/* The first code that is not a number, or `count`. */
static size_t find_nan(const uint8_t *codes, size_t count) {
    for (size_t at = 0, end; at < count; at = end) {
        unsigned any = 0;
        end = count - at < CODES_LOOKED_AT ? count : at + CODES_LOOKED_AT;
        for (size_t i = at; i < end; i++) any |= (codes[i] & 0x7f) == 0x7f;
        for (size_t i = at; any && i < end; i++)
            if ((codes[i] & 0x7f) == 0x7f) return i;
    }
    return count;
}

/* The scales of an E4M3 matrix: one for all, or one per output, in the tensor that has its name and
 * "_scale". What is no number, or becomes none with its scale, is refused here: no backend looks
 * for it. Where only the description is checked, the elements are not read. */
static int read_scales(struct loader *loader, const char *name, const struct tensor *codes,
                       float *out) {
    char scale_name[TENSOR_NAME_MAX + 8];
    size_t rows = (size_t)codes->shape[0], count = 1;
    snprintf(scale_name, sizeof scale_name, "%s_scale", name);
    const struct tensor *scale = weights_find(loader->weights, scale_name);
    if (!scale)
        return fault_set(loader->fault, ERR_NOTFOUND, scale_name,
                         "tensor is missing: the scale of an F8_E4M3 matrix");
    for (int i = 0; i < scale->dims; i++) count *= (size_t)scale->shape[i];
    if ((count != 1 && (count != rows || scale->shape[0] != codes->shape[0])) ||
        !tensor_read_floats(scale, 0, count, out))
        return fault_set(loader->fault, ERR_UNSUPPORTED, scale_name,
                         "expected one number or %zu, F32, F16 or BF16", rows);
    for (size_t i = count; i < rows; i++) out[i] = out[0];
    for (size_t i = 0; i < count; i++)
        if (!(out[i] >= 0 && out[i] <= FLT_MAX / QUANTIZE_MOST))
            return fault_set(loader->fault, ERR_INVALID, scale_name, "%g is no scale",
                             (double)out[i]);
    size_t nan = loader->options->check_only ? codes->bytes : find_nan(codes->data, codes->bytes);
    if (nan == codes->bytes) return 0;
    return fault_set(loader->fault, ERR_INVALID, name, "element %zu is not a number", nan);
}

/* Kept from one matrix to the next: touching fresh memory takes as long as making the codes. */
static uint8_t *codes_room(struct loader *loader, size_t bytes) {
    if (bytes <= loader->codes_room) return loader->codes;
    mem_free(loader->codes);
    loader->codes = mem_try_alloc(bytes, 1);
    loader->codes_room = loader->codes ? bytes : 0;
    return loader->codes;
}

/* Hands the matrix to the backend; with `fp8` as E4M3, but for the vocabulary's, whose errors are
 * seen in every token. `name`: of what is at fault. */
static int give_matrix(struct loader *loader, const char *name, struct kern_matrix *matrices,
                       int count, enum kern_shard shard, struct kern_weight **out) {
    struct kern *kern = loader->model->kern;
    size_t rows = 0, cols = (size_t)matrices[0].cols, row = 0;
    for (int i = 0; i < count; i++)
        if (matrices[i].dtype != KERN_E4M3) rows += (size_t)matrices[i].rows;
    if (!loader->options->fp8 || shard == KERN_SHARD_VOCAB || rows == 0)
        return kern->ops->weight_load(kern, matrices, count, shard, out, loader->fault);
    uint8_t *codes = codes_room(loader, rows * cols);
    float *scales = mem_try_alloc(rows, sizeof *scales);
    int err = codes && scales ? 0 : ERR_NOMEM;
    if (err) fault_set(loader->fault, err, name, "no memory for [%zu, %zu] in fp8", rows, cols);
    for (int i = 0; i < count && !err; i++) {
        struct kern_matrix *m = &matrices[i];
        struct fault fault = {0};
        if (m->dtype == KERN_E4M3) continue;
        err = quantize_rows(m, codes + row * cols, scales + row, loader->team, &fault);
        if (err) fault_set(loader->fault, err, name, "%s", fault.text);
        m->data = codes + row * cols;
        m->scale = scales + row;
        m->dtype = KERN_E4M3;
        row += (size_t)m->rows;
    }
    if (!err) err = kern->ops->weight_load(kern, matrices, count, shard, out, loader->fault);
    mem_free(scales);
    return err;
}

static int load_random_matrix(struct loader *loader, struct kern_matrix *matrices, int count,
                              enum kern_shard shard, struct kern_weight **out) {
    int64_t rows = 0, cols = matrices[0].cols;
    for (int i = 0; i < count; i++) rows += matrices[i].rows;
    size_t words = ((size_t)rows * (size_t)cols + 3) / 4;
    uint64_t *data = mem_try_alloc(words, sizeof *data);
    if (!data)
        return fault_set(loader->fault, ERR_NOMEM, "random weights", "no memory for [%lld, %lld]",
                         (long long)rows, (long long)cols);
    fill_random(loader, data, words, cols);
    const uint16_t *at = (const uint16_t *)data;
    for (int i = 0; i < count; at += matrices[i].rows * cols, i++) {
        matrices[i].data = at;
        matrices[i].dtype = KERN_BF16;
    }
    int err = give_matrix(loader, "random weights", matrices, count, shard, out);
    mem_free(data);
    if (!err) report_progress(loader, words * sizeof *data);
    return err;
}

#define PARTS_MAX 3

static int find_matrix(struct loader *loader, int layer, const struct part *part,
                       enum kern_shard shard, float *scales, struct kern_matrix *out) {
    char name[TENSOR_NAME_MAX];
    const struct tensor *tensor = NULL; /* set where there is no error */
    tensor_name(name, layer, part->suffix);
    int err = find_tensor(loader, name, part->rows, out->cols, &tensor);
    if (err) return err;
    out->data = tensor->data;
    out->dtype = dtype_of(tensor);
    if (tensor->dtype != TENSOR_E4M3) return 0;
    if (shard == KERN_SHARD_VOCAB)
        return fault_set(loader->fault, ERR_UNSUPPORTED, name, "type must be F32, F16 or BF16");
    out->scale = scales;
    return read_scales(loader, name, tensor, scales);
}

/* Tensors of equal columns joined by rows; `layer` -1 for those outside the layers. */
static int load_matrix(struct loader *loader, int layer, const struct part *parts, int count,
                       int64_t cols, enum kern_shard shard, struct kern_weight **out) {
    struct kern_matrix matrices[PARTS_MAX];
    char name[TENSOR_NAME_MAX];
    size_t bytes = 0, rows = 0, row = 0;
    for (int i = 0; i < count; i++) {
        matrices[i] =
            (struct kern_matrix){.rows = parts[i].rows, .cols = cols, .groups = parts[i].groups};
        rows += (size_t)parts[i].rows;
    }
    if (!loader->weights && loader->options->check_only) return 0;
    if (!loader->weights) return load_random_matrix(loader, matrices, count, shard, out);
    tensor_name(name, layer, parts[0].suffix);
    float *scales = mem_try_alloc(rows, sizeof *scales);
    if (!scales) return fault_set(loader->fault, ERR_NOMEM, name, "no memory for its scales");
    int err = 0;
    for (int i = 0; i < count && !err; i++) {
        struct kern_matrix *m = &matrices[i];
        err = find_matrix(loader, layer, &parts[i], shard, scales + row, m);
        bytes += (size_t)(m->rows * cols) * kern_dtype_bytes(m->dtype);
        row += (size_t)m->rows;
    }
    if (!err && !loader->options->check_only)
        err = give_matrix(loader, name, matrices, count, shard, out);
    mem_free(scales);
    if (!err && !loader->options->check_only) report_progress(loader, bytes);
    return err;
}

/* Vectors joined, as float32 backend memory. Without files all elements are `random`. */
static int load_vector(struct loader *loader, int layer, const struct part *parts, int count,
                       float random, float **out) {
    struct kern *kern = loader->model->kern;
    size_t total = 0, at = 0, bytes = 0;
    int err = 0;
    for (int i = 0; i < count; i++) total += (size_t)parts[i].rows;
    float *host = mem_try_alloc(total, sizeof *host);
    if (!host) return fault_set(loader->fault, ERR_NOMEM, parts[0].suffix, "out of memory");
    for (size_t i = 0; i < total; i++) host[i] = random;
    for (int i = 0; loader->weights && i < count && !err; i++) {
        char name[TENSOR_NAME_MAX];
        const struct tensor *tensor;
        tensor_name(name, layer, parts[i].suffix);
        err = find_tensor(loader, name, parts[i].rows, 0, &tensor);
        if (err) break;
        CHECK(tensor_read_floats(tensor, 0, (size_t)parts[i].rows, host + at));
        at += (size_t)parts[i].rows;
        bytes += tensor->bytes;
    }
    if (!err) {
        *out = kern->ops->mem_alloc(kern, total * sizeof *host);
        err = *out ? kern->ops->upload(kern, *out, host, total * sizeof *host) : ERR_NOMEM;
        if (err) fault_set(loader->fault, err, parts[0].suffix, "%s", err_text(err));
    }
    mem_free(host);
    if (!err) report_progress(loader, bytes);
    return err;
}

static int load_norm(struct loader *loader, int layer, const char *suffix, int size, float **out) {
    const struct part part = {suffix, size, 0};
    return load_vector(loader, layer, &part, 1, 1, out);
}

/* Tensors that the configuration says are not there: files that have them belong to another
 * computation, and ignoring them would give wrong answers silently. */
static int refuse_extra(struct loader *loader, int layer) {
    const struct model_config *c = &loader->model->config;
    const struct {
        const char *suffix;
        bool wanted;
    } rows[] = {
        {"self_attn.q_proj.bias", c->qkv_bias},  {"self_attn.k_proj.bias", c->qkv_bias},
        {"self_attn.v_proj.bias", c->qkv_bias},  {"self_attn.o_proj.bias", c->o_bias},
        {"self_attn.q_norm.weight", c->qk_norm}, {"self_attn.k_norm.weight", c->qk_norm},
        {"mlp.gate_proj.bias", false},           {"mlp.up_proj.bias", false},
        {"mlp.down_proj.bias", false},           {"pre_feedforward_layernorm.weight", false},
    };
    char name[TENSOR_NAME_MAX];
    for (size_t i = 0; loader->weights && i < sizeof rows / sizeof rows[0]; i++) {
        tensor_name(name, layer, rows[i].suffix);
        if (!rows[i].wanted && weights_find(loader->weights, name))
            return fault_set(loader->fault, ERR_UNSUPPORTED, name,
                             "tensor is in the file but config.json has no use for it");
    }
    return 0;
}

static int load_attention(struct loader *loader, int index, struct layer *layer) {
    const struct model_config *c = &loader->model->config;
    const struct part qkv[] = {{"self_attn.q_proj.weight", q_width(c), c->heads_kv},
                               {"self_attn.k_proj.weight", kv_width(c), c->heads_kv},
                               {"self_attn.v_proj.weight", kv_width(c), c->heads_kv}};
    const struct part bias[] = {{"self_attn.q_proj.bias", q_width(c), 0},
                                {"self_attn.k_proj.bias", kv_width(c), 0},
                                {"self_attn.v_proj.bias", kv_width(c), 0}};
    const struct part o = {"self_attn.o_proj.weight", c->d_model, 0};
    const struct part o_bias = {"self_attn.o_proj.bias", c->d_model, 0};
    int err = load_norm(loader, index, "input_layernorm.weight", c->d_model, &layer->attn_norm);
    if (!err) err = load_matrix(loader, index, qkv, 3, c->d_model, KERN_SHARD_ROWS, &layer->qkv);
    if (!err && c->qkv_bias) err = load_vector(loader, index, bias, 3, 0, &layer->qkv_bias);
    if (!err && c->qk_norm)
        err = load_norm(loader, index, "self_attn.q_norm.weight", c->head_dim, &layer->q_norm);
    if (!err && c->qk_norm)
        err = load_norm(loader, index, "self_attn.k_norm.weight", c->head_dim, &layer->k_norm);
    if (!err) err = load_matrix(loader, index, &o, 1, q_width(c), KERN_SHARD_COLS, &layer->o);
    if (!err && c->o_bias) err = load_vector(loader, index, &o_bias, 1, 0, &layer->o_bias);
    return err;
}

static int load_layer(struct loader *loader, int index, struct layer *layer) {
    const struct model_config *c = &loader->model->config;
    const struct part gate_up[] = {{"mlp.gate_proj.weight", c->d_ff, 0},
                                   {"mlp.up_proj.weight", c->d_ff, 0}};
    const struct part down = {"mlp.down_proj.weight", c->d_model, 0};
    int err = refuse_extra(loader, index);
    if (!err) err = load_attention(loader, index, layer);
    if (!err)
        err = load_norm(loader, index, "post_attention_layernorm.weight", c->d_model,
                        &layer->ffn_norm);
    if (!err)
        err = load_matrix(loader, index, gate_up, 2, c->d_model, KERN_SHARD_ROWS, &layer->gate_up);
    if (!err) err = load_matrix(loader, index, &down, 1, c->d_ff, KERN_SHARD_COLS, &layer->down);
    return err;
}

static int load_ends(struct loader *loader) {
    struct model *model = loader->model;
    struct model_config *c = &model->config;
    const struct part embed = {"model.embed_tokens.weight", c->vocab, 0};
    const struct part head = {"lm_head.weight", c->vocab, 0};
    char next[TENSOR_NAME_MAX];
    tensor_name(next, c->layers, "input_layernorm.weight");
    if (loader->weights && weights_find(loader->weights, next))
        return fault_set(loader->fault, ERR_INVALID, next,
                         "tensor is in the file but config.json has %d layers", c->layers);
    int err = load_matrix(loader, -1, &embed, 1, c->d_model, KERN_SHARD_VOCAB, &model->embed);
    if (!err) err = load_norm(loader, -1, "model.norm.weight", c->d_model, &model->final_norm);
    if (err) return err;
    if (!c->tied_embeddings && loader->weights && !weights_find(loader->weights, head.suffix)) {
        log_warn("no lm_head.weight in the model files: using model.embed_tokens.weight");
        c->tied_embeddings = true;
    }
    if (c->tied_embeddings) {
        model->head = model->embed;
        return 0;
    }
    return load_matrix(loader, -1, &head, 1, c->d_model, KERN_SHARD_VOCAB, &model->head);
}

static size_t random_bytes(const struct model_config *c) {
    size_t d = (size_t)c->d_model, per_layer = d * (size_t)(qkv_width(c) + q_width(c));
    per_layer += 3 * d * (size_t)c->d_ff;
    size_t ends = d * (size_t)c->vocab * (c->tied_embeddings ? 1 : 2);
    return 2 * (per_layer * (size_t)c->layers + ends);
}

static int open_team(struct loader *loader) {
    const struct model_options *options = loader->options;
    int err = options->check_only ? 0 : cpu_pool_open(options->threads, &loader->team);
    return err ? fault_set(loader->fault, err, "threads", "cannot start those that make weights")
               : 0;
}

static int load_weights(struct model *model, const struct model_options *options,
                        struct fault *fault) {
    struct weights *weights = NULL;
    struct loader loader = {
        .model = model, .options = options, .random = RANDOM_SEED, .fault = fault};
    int err = options->random_weights ? 0 : weights_open_dir(options->dir, &weights, fault);
    if (!err) err = open_team(&loader);
    if (err) goto out;
    loader.weights = weights;
    loader.total = weights ? weights_bytes(weights) : random_bytes(&model->config);
    if (weights) {
        const struct tensor *embed = weights_find(weights, "model.embed_tokens.weight");
        if (embed && tensor_is_float(embed->dtype)) model->config.dtype = dtype_of(embed);
    } else {
        model->config.dtype = KERN_BF16;
    }
    err = load_ends(&loader);
    for (int i = 0; i < model->config.layers && !err; i++)
        err = load_layer(&loader, i, &model->layers[i]);
    model->weight_bytes = loader.done;
out:
    mem_free(loader.codes);
    cpu_pool_close(loader.team);
    weights_close(weights);
    return err;
}

/* ---- Gates --------------------------------------------------------------------------------- */

/* Gates name their base by the digest of its one weight file, or of a sharded model's index. */
static void warn_other_base(const struct model_options *options, const char *expected) {
    static const char *const names[] = {"model.safetensors", "model.safetensors.index.json"};
    char path[PATH_MAX], found[SHA256_HEX], *data = NULL;
    size_t size = 0;
    struct stat info;
    bool exists = false;
    for (size_t i = 0; i < sizeof names / sizeof names[0] && !exists; i++) {
        int n = snprintf(path, sizeof path, "%s/%s", options->dir, names[i]);
        exists = n > 0 && (size_t)n < sizeof path && stat(path, &info) == 0;
    }
    if (!*expected || !exists || info.st_size >= (off_t)HASH_FILE_MAX) return;
    if (file_read(path, HASH_FILE_MAX, &data, &size, NULL)) return;
    sha256_hex(data, size, found);
    mem_free(data);
    if (strcmp(found, expected) != 0)
        log_warn("gates were trained for another base model: base_sha256 is %.16s..., the weights "
                 "have %.16s...",
                 expected, found);
}

static int load_gate_layers(struct model *model, struct gates *gates, struct fault *fault) {
    struct kern *kern = model->kern;
    int err = 0;
    for (int i = 0; i < model->config.layers && !err; i++) {
        struct kern_gate_spec spec;
        err = gates_layer(gates, i, &spec, fault);
        if (!err) err = kern->ops->gate_load(kern, &spec, &model->layers[i].gate, fault);
    }
    return err;
}

/* What is wrong inside, with the file's name in front. */
static int in_gates_file(int err, const char *path, struct fault *fault) {
    if (!fault) return err;
    struct fault inside = *fault;
    return fault_set(fault, err, "gates", "%.200s: %s%s%s", path, inside.field,
                     inside.field[0] ? ": " : "", inside.text);
}

static int load_gates_file(struct model *model, const struct model_options *options,
                           const char *path, struct fault *fault) {
    const struct model_config *c = &model->config;
    const struct gates_shape shape = {c->layers, c->heads_kv, c->d_model};
    struct gates gates;
    char *data = NULL;
    size_t size = 0;
    int err = file_read(path, GATES_FILE_MAX, &data, &size, fault);
    if (err && fault) fault->field[0] = '\0'; /* it names the path, as what follows does */
    if (!err) err = gates_parse(data, size, &shape, &gates, fault);
    if (err) goto out;
    if (!options->check_only) warn_other_base(options, gates.header.base_sha256);
    if (!options->check_only) err = load_gate_layers(model, &gates, fault);
    model->trained_budget = gates.header.trained_budget;
    model->gate_horizon = gates.header.horizon;
    gates_close(&gates);
out:
    mem_free(data);
    if (!err) model->has_gates = true;
    return err ? in_gates_file(err, path, fault) : 0;
}

/* Gates for timing: as costly as real ones, and their scores spread over entries. */
static int load_random_gates(struct model *model, struct fault *fault) {
    const struct model_config *c = &model->config;
    const size_t m = RANDOM_GATE_WIDTH, d = (size_t)c->d_model, h = (size_t)c->heads_kv;
    uint64_t random = RANDOM_SEED + 1;
    int32_t *row = mem_must_alloc(h, sizeof *row);
    float *data = mem_must_alloc(m * d + m + h * m + h, sizeof *data);
    float *w1 = data, *b1 = w1 + m * d, *last = b1 + m, *bias = last + h * m;
    int err = 0;
    for (size_t i = 0; i < h; i++) row[i] = (int32_t)i;
    for (int l = 0; l < c->layers && !err; l++) {
        for (size_t i = 0; i < m * d + m + h * m; i++) {
            random = random * 6364136223846793005ull + 1442695040888963407ull;
            float scale = i < m * d ? 1 / sqrtf((float)d) : 1 / sqrtf((float)m);
            data[i] = ((float)(random >> 40) * 0x1p-23f - 1) * scale;
        }
        for (size_t i = 0; i < h; i++) bias[i] = 6;
        const struct kern_gate_spec spec = {.w1 = w1,
                                            .b1 = b1,
                                            .last = last,
                                            .bias = bias,
                                            .row = row,
                                            .width = RANDOM_GATE_WIDTH,
                                            .d_model = c->d_model,
                                            .heads_kv = c->heads_kv,
                                            .row_count = c->heads_kv,
                                            .embeddings = 1};
        err = model->kern->ops->gate_load(model->kern, &spec, &model->layers[l].gate, fault);
    }
    mem_free(data);
    mem_free(row);
    if (!err) model->has_gates = true;
    return err;
}

static int load_gates(struct model *model, const struct model_options *options,
                      struct fault *fault) {
    char path[PATH_MAX];
    if (options->gates)
        return *options->gates ? load_gates_file(model, options, options->gates, fault) : 0;
    int n = snprintf(path, sizeof path, "%s/gates.safetensors", options->dir);
    if (n < 0 || (size_t)n >= sizeof path)
        return fault_set(fault, ERR_INVALID, "model", "directory name is too long");
    if (access(path, F_OK) == 0) return load_gates_file(model, options, path, fault);
    if (!options->random_weights) return 0;
    if (!options->check_only) return load_random_gates(model, fault);
    model->has_gates = true;
    return 0;
}

/* ---- Opening ------------------------------------------------------------------------------- */

static int load_config(struct model *model, const char *dir, struct fault *fault) {
    char path[PATH_MAX], *config = NULL, *generation = NULL;
    size_t config_size = 0, generation_size = 0;
    int n = snprintf(path, sizeof path, "%s/generation_config.json", dir);
    if (n < 0 || (size_t)n >= sizeof path)
        return fault_set(fault, ERR_INVALID, "model", "directory name is too long");
    int err = 0;
    if (access(path, F_OK) == 0)
        err = file_read(path, CONFIG_FILE_MAX, &generation, &generation_size, fault);
    snprintf(path, sizeof path, "%s/config.json", dir);
    if (!err) err = file_read(path, CONFIG_FILE_MAX, &config, &config_size, fault);
    if (!err)
        err = model_config_parse(config, config_size, generation, generation_size, &model->config,
                                 fault);
    mem_free(config);
    mem_free(generation);
    return err;
}

static int check_shape(const struct model *model, struct fault *fault) {
    const struct model_config *c = &model->config;
    const struct kern_shape shape = {.layers = c->layers,
                                     .d_model = c->d_model,
                                     .d_ff = c->d_ff,
                                     .heads_q = c->heads_q,
                                     .heads_kv = c->heads_kv,
                                     .head_dim = c->head_dim,
                                     .vocab = c->vocab};
    const struct kern_ops *ops = model->kern->ops;
    return ops->shape_check ? ops->shape_check(model->kern, &shape, fault) : 0;
}

static int open_scratch(struct model *model, struct fault *fault) {
    const struct model_config *c = &model->config;
    struct scratch *s = &model->scratch;
    const struct {
        float **out;
        int rows, width;
    } arrays[] = {
        {&s->x, model->rows_max, c->d_model},
        {&s->norm, model->rows_max, c->d_model},
        {&s->qkv, model->rows_max, qkv_width(c)},
        {&s->heads, model->rows_max, q_width(c)},
        {&s->gate_up, model->rows_max, 2 * c->d_ff},
        {&s->ff, model->rows_max, c->d_ff},
        {&s->log_beta, model->rows_max, c->heads_kv},
        {&s->last_x, model->logits_max, c->d_model},
        {&s->last_heads, model->logits_max, q_width(c)},
        {&s->logits, model->logits_max, c->vocab},
    };
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) {
        size_t bytes = (size_t)arrays[i].rows * (size_t)arrays[i].width * sizeof(float);
        *arrays[i].out = model->kern->ops->mem_alloc(model->kern, bytes);
        if (!*arrays[i].out)
            return fault_set(fault, ERR_NOMEM, "max-num-batched-tokens",
                             "no memory for activations of %d tokens", model->rows_max);
    }
    return 0;
}

static int load_all(struct model *model, const struct model_options *options, struct fault *fault) {
    int err = load_config(model, options->dir, fault);
    if (!err) err = check_shape(model, fault);
    if (!err) model->layers = mem_must_alloc((size_t)model->config.layers, sizeof *model->layers);
    if (!err) err = load_weights(model, options, fault);
    return err ? err : load_gates(model, options, fault);
}

static int borrow_all(struct model *model, const struct model *owner, struct fault *fault) {
    struct kern *kern = model->kern;
    int err = kern->ops->share(kern, owner->kern);
    if (err) return fault_set(fault, err, "model", "its weights cannot be shared");
    *model = *owner;
    model->kern = kern;
    model->borrowed = true;
    model->scratch = (struct scratch){0};
    return 0;
}

int model_open(struct kern *kern, const struct model_options *options, struct model **out,
               struct fault *fault) {
    CHECK(options->rows_max > 0 && options->logits_max > 0);
    *out = NULL;
    struct model *model = mem_must_alloc(1, sizeof *model);
    model->kern = kern;
    bool share = options->owner && kern->ops->share;
    int err = share ? borrow_all(model, options->owner, fault) : load_all(model, options, fault);
    model->rows_max = options->rows_max;
    model->logits_max = options->logits_max;
    if (!err && !options->check_only) err = open_scratch(model, fault);
    if (err)
        model_close(model);
    else
        *out = model;
    return err;
}

static void close_layer(struct kern *kern, struct layer *layer) {
    struct kern_weight *matrices[] = {layer->qkv, layer->o, layer->gate_up, layer->down};
    float *vectors[] = {layer->attn_norm, layer->ffn_norm, layer->q_norm,
                        layer->k_norm,    layer->qkv_bias, layer->o_bias};
    for (size_t i = 0; i < sizeof matrices / sizeof matrices[0]; i++) {
        if (matrices[i]) kern->ops->weight_free(kern, matrices[i]);
    }
    for (size_t i = 0; i < sizeof vectors / sizeof vectors[0]; i++) {
        if (vectors[i]) kern->ops->mem_free(kern, vectors[i]);
    }
    if (layer->gate) kern->ops->gate_free(kern, layer->gate);
}

static void close_weights(struct model *model) {
    struct kern *kern = model->kern;
    for (int i = 0; model->layers && i < model->config.layers; i++)
        close_layer(kern, &model->layers[i]);
    if (model->final_norm) kern->ops->mem_free(kern, model->final_norm);
    if (model->head && model->head != model->embed) kern->ops->weight_free(kern, model->head);
    if (model->embed) kern->ops->weight_free(kern, model->embed);
    mem_free(model->layers);
    model_config_close(&model->config);
}

void model_close(struct model *model) {
    if (!model) return;
    struct kern *kern = model->kern;
    const struct scratch *s = &model->scratch;
    float *arrays[] = {s->x,  s->norm,     s->qkv,    s->heads,      s->gate_up,
                       s->ff, s->log_beta, s->last_x, s->last_heads, s->logits};
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) {
        if (arrays[i]) kern->ops->mem_free(kern, arrays[i]);
    }
    if (!model->borrowed) close_weights(model);
    mem_free(model);
}

/* ---- Facts --------------------------------------------------------------------------------- */

const struct model_config *model_config(const struct model *model) {
    return &model->config;
}
bool model_has_gates(const struct model *model) {
    return model->has_gates;
}
int model_trained_budget(const struct model *model) {
    return model->trained_budget;
}
float model_gate_horizon(const struct model *model) {
    return model->gate_horizon;
}
size_t model_weight_bytes(const struct model *model) {
    return model->weight_bytes;
}

/* ---- A step -------------------------------------------------------------------------------- */

/* Appends the batch to the layer's streams and leaves attention's output in scratch.heads. */
static void step_attention(struct model *model, int index, const struct kern_batch *batch) {
    const struct model_config *c = &model->config;
    const struct layer *layer = &model->layers[index];
    struct scratch *s = &model->scratch;
    struct kern *kern = model->kern;
    const struct kern_rope rope = {c->inv_freq, c->rope_scale};
    const struct kern_attend_options attend = {.scale = 1 / sqrtf((float)c->head_dim)};
    const float *log_beta = NULL;
    kern->ops->rms_norm(kern, s->norm, s->x, layer->attn_norm, batch->rows, c->d_model, c->rms_eps);
    kern->ops->matmul(kern, s->qkv, s->norm, layer->qkv, layer->qkv_bias, batch->rows, KERN_SET);
    if (layer->gate) {
        kern->ops->gate(kern, s->log_beta, s->norm, layer->gate, batch->rows);
        log_beta = s->log_beta;
    }
    kern->ops->qk_rope(kern, s->qkv, layer->q_norm, layer->k_norm, c->rms_eps, &rope, batch);
    kern->ops->write_kv(kern, index, s->qkv, log_beta, batch);
    kern->ops->attend(kern, index, s->heads, s->qkv, batch, &attend);
}

/* From attention's output to the end of the layer, in place in x. */
static void step_feed_forward(struct model *model, int index, float *x, const float *heads,
                              int rows) {
    const struct model_config *c = &model->config;
    const struct layer *layer = &model->layers[index];
    struct scratch *s = &model->scratch;
    struct kern *kern = model->kern;
    kern->ops->matmul(kern, x, heads, layer->o, layer->o_bias, rows, KERN_ADD);
    kern->ops->rms_norm(kern, s->norm, x, layer->ffn_norm, rows, c->d_model, c->rms_eps);
    kern->ops->matmul(kern, s->gate_up, s->norm, layer->gate_up, NULL, rows, KERN_SET);
    kern->ops->glu(kern, s->ff, s->gate_up, rows, c->d_ff);
    kern->ops->matmul(kern, x, s->ff, layer->down, NULL, rows, KERN_ADD);
}

int model_step(struct model *model, const struct kern_batch *batch, const int32_t *want,
               int want_count, const float **logits) {
    CHECK(batch->rows > 0 && batch->rows <= model->rows_max);
    CHECK(want_count >= 0 && want_count <= model->logits_max && want_count <= model->rows_max);
    const struct model_config *c = &model->config;
    struct scratch *s = &model->scratch;
    struct kern *kern = model->kern;
    *logits = s->logits;
    int err = kern->ops->begin_step(kern, batch);
    if (err) return err;
    kern->ops->embed(kern, s->x, model->embed, batch->tokens, batch->rows);
    for (int i = 0; i < c->layers; i++) {
        step_attention(model, i, batch);
        if (i < c->layers - 1) {
            step_feed_forward(model, i, s->x, s->heads, batch->rows);
        } else if (want_count) {
            /* Nothing reads the other rows once the last layer's entries are written. */
            kern->ops->gather_rows(kern, s->last_x, s->x, want, want_count, c->d_model);
            kern->ops->gather_rows(kern, s->last_heads, s->heads, want, want_count, q_width(c));
            step_feed_forward(model, i, s->last_x, s->last_heads, want_count);
        }
    }
    if (want_count) {
        kern->ops->rms_norm(kern, s->norm, s->last_x, model->final_norm, want_count, c->d_model,
                            c->rms_eps);
        kern->ops->matmul(kern, s->logits, s->norm, model->head, NULL, want_count, KERN_SET);
    }
    return 0;
}
