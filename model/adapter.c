#include "model/adapter.h"

#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "model/config_family.h"
#include "model/config_gguf.h"
#include "model/internal.h"
#include "model/rows.h"
#include "model/weights.h"

#define ADAPTER_CONFIG_MAX ((size_t)1 << 20)
#define ADAPTER_HEADER_MAX ((size_t)16 << 20)
#define ADAPTER_NAME_MAX   (TENSOR_NAME_MAX + 32)
#define TARGETS                                                                                    \
    "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj of layers that have them "   \
    "as matrices of their own"

/* The two tensors of a matrix. */
enum half { HALF_A, HALF_B };

struct adapter_reader {
    const struct model_config *config;
    struct model_config order_config; /* shallow: how the adapter's files order rows of heads */
    const struct weights *weights;
    enum naming naming;
    bool is_gguf;
    double alpha; /* 0: the scale is 1 */
    bool by_root; /* the scale is alpha / sqrt(r) */
    int64_t rank; /* the rank that the configuration promises; 0: none */
    bool *used;   /* [tensors] */
    int64_t most;
    struct adapter *adapter;
    struct fault *fault;
};

/* ---- Configurations ---- */

/* Values that mean "none" in PEFT's files. */
static bool means_none(const cJSON *node) {
    if (!node || cJSON_IsFalse(node) || cJSON_IsNull(node)) return true;
    if (cJSON_IsNumber(node)) return node->valuedouble == 0;
    return (cJSON_IsArray(node) || cJSON_IsObject(node)) && !node->child;
}

/* Fields that change what is computed. PEFT writes all of its fields, most of them with a value
 * that means none. */
static int refuse_peft_fields(const cJSON *root, struct fault *fault) {
    static const char *const fields[] = {"use_dora",
                                         "lora_bias",
                                         "modules_to_save",
                                         "fan_in_fan_out",
                                         "rank_pattern",
                                         "alpha_pattern",
                                         "layer_replication",
                                         "target_parameters",
                                         "use_qalora",
                                         "use_bdlora",
                                         "alora_invocation_tokens",
                                         "arrow_config",
                                         "trainable_token_indices",
                                         "monteclora_config",
                                         "kappa_tuner_config"};
    const cJSON *bias = json_get(root, "bias"), *init = json_get(root, "init_lora_weights");
    static const char *const inits[] = {"pissa", "olora", "corda", "loftq", "lora_ga"};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (!means_none(json_get(root, fields[i])))
            return fault_set(fault, ERR_UNSUPPORTED, fields[i],
                             "adapters with %s are not supported", fields[i]);
    if (bias && !(cJSON_IsString(bias) && strcmp(bias->valuestring, "none") == 0))
        return fault_set(fault, ERR_UNSUPPORTED, "bias",
                         "adapters with biases are not supported: expected \"none\"");
    for (size_t i = 0; cJSON_IsString(init) && i < sizeof inits / sizeof *inits; i++)
        if (strncmp(init->valuestring, inits[i], strlen(inits[i])) == 0)
            return fault_set(fault, ERR_UNSUPPORTED, "init_lora_weights",
                             "'%.40s' changes the model's own weights; save the adapter as a plain "
                             "one (path_initial_model_for_weight_conversion)",
                             init->valuestring);
    return 0;
}

static int parse_peft(struct adapter_reader *r, const cJSON *root) {
    const char *type = "";
    int rc = json_str(root, NULL, "peft_type", &type, r->fault);
    if (!rc && strcmp(type, "LORA") != 0)
        rc = fault_set(r->fault, ERR_UNSUPPORTED, "peft_type", "'%.40s': only LORA is supported",
                       type);
    if (!rc) rc = refuse_peft_fields(root, r->fault);
    if (!rc) rc = json_int(root, NULL, "r", 1, ADAPTER_RANK_MAX, &r->rank, r->fault);
    if (!rc && !r->rank) rc = fault_set(r->fault, ERR_INVALID, "r", "missing");
    if (!rc) rc = json_num(root, NULL, "lora_alpha", 0, 1e6, &r->alpha, r->fault);
    if (!rc && !(r->alpha > 0))
        rc = fault_set(r->fault, ERR_INVALID, "lora_alpha", "expected a number above 0");
    return rc ? rc : json_bool(root, NULL, "use_rslora", &r->by_root, r->fault);
}

/* Finds how the adapter's files order the rows of heads; see tensor_stored_row. */
static int find_head_order(struct adapter_reader *r, const char *architecture) {
    struct model_config *order = &r->order_config;
    const char *family = r->config->family;
    *order = *r->config;
    if (r->is_gguf && model_gguf_permutes(architecture, family, &order->permuted_qk)) return 0;
    /* a GGUF file has these factors in its numbers, which the adapter's lack */
    if (!r->is_gguf && r->config->falcon_names && !(r->config->factors.q > 0))
        return fault_set(r->fault, ERR_UNSUPPORTED, "model",
                         "adapters of %s models in GGUF files are not supported", family);
    if (!r->is_gguf && model_family_interleaves(family, &order->permuted_qk)) return 0;
    if (r->is_gguf)
        return fault_set(r->fault, ERR_UNSUPPORTED, "general.architecture",
                         "an adapter of '%.32s' in a GGUF file does not fit this model, of family "
                         "%s",
                         architecture, family);
    return fault_set(r->fault, ERR_UNSUPPORTED, "model", "adapters of %s models are not supported",
                     family);
}

static int read_peft_config(struct adapter_reader *r, const char *path) {
    static const struct json_limits limits = {
        .bytes = ADAPTER_CONFIG_MAX, .depth = 16, .nodes = 100000, .file = true};
    static const char name[] = "adapter_config.json";
    char file[PATH_MAX], *data = NULL;
    size_t size = 0;
    cJSON *root = NULL;
    struct fault inner = {0};
    const int n = snprintf(file, sizeof file, "%s/%s", path, name);
    if (n < 0 || (size_t)n >= sizeof file)
        return fault_set(r->fault, ERR_INVALID, name, "the path is too long");
    int rc = file_read(file, ADAPTER_CONFIG_MAX, &data, &size, r->fault);
    if (!rc) rc = json_parse(data, size, &limits, &root, &inner);
    if (inner.code) fault_set(r->fault, rc, name, "%s", inner.text);
    if (!rc && !cJSON_IsObject(root))
        rc = fault_set(r->fault, ERR_MALFORMED, name, "expected a JSON object");
    if (!rc) rc = parse_peft(r, root);
    json_free(root);
    mem_free(data);
    return rc ? rc : find_head_order(r, NULL);
}

static int gguf_word(struct adapter_reader *r, const char *key, char out[64]) {
    struct gguf_string text = {.data = ""};
    int rc = gguf_str(weights_gguf(r->weights), key, &text, r->fault);
    snprintf(out, 64, "%.*s", rc || text.size > 63 ? 0 : (int)text.size, text.data);
    return rc;
}

static int expect_gguf_word(struct adapter_reader *r, const char *key, const char *expected) {
    char found[64];
    int rc = gguf_word(r, key, found);
    if (rc || strcmp(found, expected) == 0) return rc;
    return fault_set(r->fault, ERR_UNSUPPORTED, key, "'%s': expected \"%s\"", found, expected);
}

static int read_gguf_config(struct adapter_reader *r) {
    static const char other[] = "adapter.alora.invocation_tokens";
    char architecture[64];
    const struct gguf *gguf = weights_gguf(r->weights);
    int rc = expect_gguf_word(r, "general.type", "adapter");
    if (!rc) rc = expect_gguf_word(r, "adapter.type", "lora");
    if (!rc && gguf_find(gguf, other))
        rc = fault_set(r->fault, ERR_UNSUPPORTED, other,
                       "adapters that begin at certain tokens are not supported");
    if (!rc) rc = gguf_num(gguf, "adapter.lora.alpha", 0, 1e6, &r->alpha, r->fault);
    if (!rc) rc = gguf_word(r, "general.architecture", architecture);
    return rc ? rc : find_head_order(r, architecture);
}

/* ---- Tensors ---- */

static void name_half(const struct adapter_reader *r, enum role role, int layer, enum half half,
                      char out[ADAPTER_NAME_MAX]) {
    static const char end[] = ".weight";
    char name[TENSOR_NAME_MAX];
    tensor_name(name, r->naming, role, layer, 0);
    size_t size = strlen(name);
    if (r->is_gguf) {
        snprintf(out, ADAPTER_NAME_MAX, "%s.lora_%c", name, half == HALF_A ? 'a' : 'b');
        return;
    }
    if (size > strlen(end) && strcmp(name + size - strlen(end), end) == 0) size -= strlen(end);
    snprintf(out, ADAPTER_NAME_MAX, "base_model.model.%.*s.lora_%c.weight", (int)size, name,
             half == HALF_A ? 'A' : 'B');
}

static const struct tensor *find_half(const struct adapter_reader *r, enum role role, int layer,
                                      enum half half) {
    char name[ADAPTER_NAME_MAX];
    name_half(r, role, layer, half, name);
    return weights_find(r->weights, name);
}

/* Does the file have the role's tensor to itself? */
static bool has_own_tensor(const struct adapter_reader *r, enum role role, int layer) {
    const struct tensor_rows place = tensor_rows_of(r->config, r->naming, role, layer);
    char name[TENSOR_NAME_MAX];
    int64_t rows, cols;
    tensor_name(name, r->naming, role, layer, 0);
    tensor_shape(r->config, role, layer, &rows, &cols);
    return name[0] && place.all == rows && tensor_rows_follow(&place);
}

static int check_half(struct adapter_reader *r, const struct tensor *tensor, int64_t rows,
                      int64_t cols) {
    char found[96];
    if (!tensor_is_float(tensor->dtype) && !(r->is_gguf && tensor->dtype == TENSOR_BLOCKS))
        return fault_set(r->fault, ERR_UNSUPPORTED, tensor->name, "type %s is not supported",
                         tensor->type);
    tensor_shape_text(tensor->shape, tensor->dims, found, sizeof found);
    if (tensor->dims != 2 || tensor->shape[0] != rows || tensor->shape[1] != cols)
        return fault_set(r->fault, ERR_INVALID, tensor->name,
                         "shape is [%s], expected [%lld, %lld]", found, (long long)rows,
                         (long long)cols);
    r->used[tensor - weights_at(r->weights, 0)] = true;
    return 0;
}

/* The two tensors of a part; both NULL: the adapter leaves it as it is. */
struct pair {
    const struct tensor *a, *b;
    int64_t rows, rank;
};

static int find_pair(struct adapter_reader *r, enum role role, int layer, int64_t cols,
                     struct pair *out) {
    int64_t own_cols;
    tensor_shape(r->config, role, layer, &out->rows, &own_cols);
    out->a = out->b = NULL;
    out->rank = 0;
    if (!has_own_tensor(r, role, layer)) return 0; /* such tensors are refused by name */
    out->a = find_half(r, role, layer, HALF_A);
    out->b = find_half(r, role, layer, HALF_B);
    if (!out->a && !out->b) return 0;
    if (!out->a || !out->b) {
        char name[ADAPTER_NAME_MAX];
        name_half(r, role, layer, out->a ? HALF_B : HALF_A, name);
        return fault_set(r->fault, ERR_NOTFOUND, name, "tensor is missing");
    }
    out->rank = out->a->dims == 2 ? out->a->shape[0] : 0;
    if (out->rank < 1 || out->rank > ADAPTER_RANK_MAX)
        return fault_set(r->fault, ERR_INVALID, out->a->name, "a rank of 1 to %d is supported",
                         ADAPTER_RANK_MAX);
    if (r->rank && out->rank != r->rank)
        return fault_set(r->fault, ERR_INVALID, out->a->name,
                         "its rank is %lld, and \"r\" says %lld", (long long)out->rank,
                         (long long)r->rank);
    int rc = check_half(r, out->a, out->rank, cols);
    return rc ? rc : check_half(r, out->b, out->rows, out->rank);
}

static int read_adapter_row(struct adapter_reader *r, const struct tensor *tensor, int64_t row,
                            int64_t cols, float *to) {
    if (!rows_read_one(tensor, row, cols, to))
        return fault_set(r->fault, ERR_INVALID, tensor->name, "row %lld cannot be read",
                         (long long)row);
    for (int64_t i = 0; i < cols; i++)
        if (!isfinite(to[i]))
            return fault_set(r->fault, ERR_INVALID, tensor->name,
                             "element %lld of row %lld is not a finite number", (long long)i,
                             (long long)row);
    return 0;
}

/* The row of the adapter's tensor that becomes the role's row `row`. */
static int64_t adapter_source_row(const struct adapter_reader *r, enum role role, int64_t row) {
    const int head = r->config->head_dim;
    if (!tensor_is_rotated(role) || !tensor_heads_reordered(&r->order_config)) return row;
    return row - row % head + tensor_loaded_row(&r->order_config, (int)(row % head));
}

/* ---- Products ---- */

static int adapter_site_of(const struct slot *slot) {
    static const size_t members[] = {[ADAPTER_QKV] = offsetof(struct layer, qkv),
                                     [ADAPTER_O] = offsetof(struct layer, o),
                                     [ADAPTER_GATE_UP] = offsetof(struct layer, gate_up),
                                     [ADAPTER_DOWN] = offsetof(struct layer, down)};
    if (!slot->matrix || slot->layers == SLOT_ROUTED || slot->source == SLOT_K) return -1;
    for (int i = 0; i < ADAPTER_SITES; i++)
        if (slot->offset == members[i]) return i;
    return -1;
}

static float adapter_scale_of(const struct adapter_reader *r, enum role role, int64_t rank) {
    const double root = r->by_root ? sqrt((double)rank) : (double)rank;
    const float factor = r->is_gguf ? 0 : role_factor(r->config, role);
    return (float)(r->alpha > 0 ? r->alpha / root : 1) * (factor > 0 ? factor : 1);
}

/* Takes memory for the product's numbers, within what the adapter may take. */
static int reserve_product(struct adapter_reader *r, struct adapter_product *product) {
    const size_t floats = (size_t)(product->rank * (product->rows + product->cols));
    struct adapter *adapter = r->adapter;
    if ((int64_t)(adapter->bytes + floats * sizeof(float)) > r->most)
        return fault_set(r->fault, ERR_LIMIT, "lora-memory",
                         "it takes more than the %.1f MB that are left for adapters",
                         (double)r->most * 1e-6);
    adapter->bytes += floats * sizeof(float);
    product->down = mem_try_alloc((size_t)(product->rank * product->cols), sizeof(float));
    product->up = mem_try_alloc((size_t)(product->rank * product->rows), sizeof(float));
    if (product->down && product->up) return 0;
    return fault_set(r->fault, ERR_NOMEM, "", "no memory for an adapter's numbers");
}

static int fill_product(struct adapter_reader *r, const struct slot *slot, const struct pair *pairs,
                        struct adapter_product *product) {
    int64_t first_rank = 0, first_row = 0;
    int rc = 0;
    for (int k = 0; k < slot->count; k++) {
        const struct pair *pair = &pairs[k];
        for (int64_t i = 0; i < pair->rank && !rc; i++)
            rc = read_adapter_row(r, pair->a, i, product->cols,
                                  product->down + (first_rank + i) * product->cols);
        for (int64_t i = 0; i < pair->rows && pair->rank && !rc; i++)
            rc = read_adapter_row(r, pair->b, adapter_source_row(r, slot->parts[k], i), pair->rank,
                                  product->up + (first_row + i) * product->rank + first_rank);
        first_rank += pair->rank;
        first_row += pair->rows;
        if (!pair->rank) continue;
        /* Numbers are read once: the copy gets smaller as the products grow. */
        weights_release(r->weights, pair->a->data, pair->a->bytes);
        weights_release(r->weights, pair->b->data, pair->b->bytes);
    }
    return rc;
}

static int read_product(struct adapter_reader *r, const struct slot *slot, int layer,
                        struct adapter_product *product) {
    struct pair pairs[SLOT_PARTS_MAX];
    int64_t rows, cols;
    int rc = 0;
    tensor_shape(r->config, slot->parts[0], layer, &rows, &cols);
    *product = (struct adapter_product){.cols = cols, .part_count = slot->count};
    for (int k = 0; k < slot->count && !rc; k++) {
        rc = find_pair(r, slot->parts[k], layer, cols, &pairs[k]);
        product->rank += pairs[k].rank;
        product->rows += pairs[k].rows;
        product->part_rows[k] = pairs[k].rows;
        product->factors[k] =
            pairs[k].rank ? adapter_scale_of(r, slot->parts[k], pairs[k].rank) : 1;
        if (!rc && pairs[k].rank > r->adapter->rank) r->adapter->rank = (int)pairs[k].rank;
    }
    if (rc || !product->rank) return rc;
    product->groups = slot_groups(slot, r->config, layer);
    product->splits_rows = slot->shard == KERN_SHARD_ROWS;
    rc = reserve_product(r, product);
    return rc ? rc : fill_product(r, slot, pairs, product);
}

/* Refuses tensors that belong to no product. */
static int refuse_unused_halves(struct adapter_reader *r) {
    for (size_t i = 0; i < weights_count(r->weights); i++)
        if (!r->used[i])
            return fault_set(r->fault, ERR_UNSUPPORTED, weights_at(r->weights, i)->name,
                             "an adapter of this model may change " TARGETS);
    if (r->adapter->rank) return 0;
    return fault_set(r->fault, ERR_INVALID, "", "the adapter has no tensors");
}

static int read_products(struct adapter_reader *r) {
    int rc = 0;
    for (int l = 0; l < r->adapter->layers && !rc; l++)
        for (size_t i = 0; i < layer_slot_count && !rc; i++) {
            const int site = adapter_site_of(&layer_slots[i]);
            if (site >= 0 && slot_wanted(&layer_slots[i], r->config, l))
                rc = read_product(r, &layer_slots[i], l,
                                  &r->adapter->products[l * ADAPTER_SITES + site]);
        }
    return rc ? rc : refuse_unused_halves(r);
}

static void make_digest(struct adapter *adapter) {
    struct sha256_stream sum;
    sha256_begin(&sum);
    for (int32_t i = 0; i < adapter->layers * ADAPTER_SITES; i++) {
        const struct adapter_product *p = &adapter->products[i];
        const int64_t head[] = {i, p->rank, p->rows, p->cols};
        if (!p->down) continue;
        sha256_add(&sum, head, sizeof head);
        sha256_add(&sum, p->factors, (size_t)p->part_count * sizeof *p->factors);
        sha256_add(&sum, p->down, (size_t)(p->rank * p->cols) * sizeof *p->down);
        sha256_add(&sum, p->up, (size_t)(p->rank * p->rows) * sizeof *p->up);
    }
    sha256_end(&sum, adapter->digest);
}

/* ---- The whole ---- */

static int open_adapter_files(struct adapter_reader *r, const char *path, struct weights **out) {
    static const char name[] = "adapter_model.safetensors";
    char file[PATH_MAX];
    /* The numbers take at least as much as the file has, except for its header. */
    const size_t most = (size_t)(r->most > 0 ? r->most : 0) + ADAPTER_HEADER_MAX;
    if (r->is_gguf) return weights_copy(path, true, most, out, r->fault);
    int rc = read_peft_config(r, path);
    if (rc) return rc;
    const int n = snprintf(file, sizeof file, "%s/%s", path, name);
    if (n < 0 || (size_t)n >= sizeof file)
        return fault_set(r->fault, ERR_INVALID, name, "the path is too long");
    rc = weights_copy(file, false, most, out, r->fault);
    if (!rc) rc = weights_take_text_behind(*out, "base_model.model.", r->fault);
    return rc != ERR_NOTFOUND
               ? rc
               : fault_set(r->fault, rc, name,
                           "is not in %.200s; files of pickled tensors are not read", path);
}

int adapter_read(const struct model_config *config, const char *path, int64_t most,
                 struct adapter **out, struct fault *fault) {
    struct weights *weights = NULL;
    struct adapter_reader r = {.config = config,
                               .is_gguf = gguf_is_path(path),
                               .naming = tensor_naming(config, gguf_is_path(path)),
                               .most = most,
                               .fault = fault};
    *out = NULL;
    int rc = open_adapter_files(&r, path, &weights);
    r.weights = weights;
    if (!rc && r.is_gguf) rc = read_gguf_config(&r);
    if (!rc) {
        r.adapter = mem_try_alloc(1, sizeof *r.adapter);
        r.used = mem_try_alloc(weights_count(weights) + 1, sizeof *r.used);
        if (r.adapter)
            r.adapter->products =
                mem_try_alloc((size_t)config->layers * ADAPTER_SITES, sizeof *r.adapter->products);
        if (!r.adapter || !r.used || !r.adapter->products)
            rc = fault_set(fault, ERR_NOMEM, "", "no memory for an adapter");
    }
    if (!rc) {
        r.adapter->layers = config->layers;
        rc = read_products(&r);
    }
    if (!rc) make_digest(r.adapter);
    weights_close(weights);
    mem_free(r.used);
    if (rc)
        adapter_close(r.adapter);
    else
        *out = r.adapter;
    return rc;
}

void adapter_close(struct adapter *adapter) {
    if (!adapter) return;
    for (int i = 0; i < adapter->layers * ADAPTER_SITES; i++) {
        mem_free(adapter->products[i].down);
        mem_free(adapter->products[i].up);
    }
    mem_free(adapter->products);
    mem_free(adapter);
}
