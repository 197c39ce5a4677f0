/* Encoders of pictures: loading, and the work of a tile. */
#include "model/vision.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "kernels/cpu/team.h"
#include "model/rows.h"
#include "model/tensors.h"
#include "model/weights.h"

struct vision_layer {
    struct kern_weight *qkv, *o, *up, *down;
    float *attn_norm, *attn_norm_bias, *qkv_bias, *o_bias;
    float *ff_norm, *ff_norm_bias, *up_bias, *down_bias;
};

/* Backend memory of one tile; `patches` rows where no other number is given. */
struct vision_scratch {
    float *pixels;           /* [3 patch^2] of each patch: all red, all green, all blue ones */
    float *x, *norm, *heads; /* [width] */
    float *qkv;              /* [3 width] */
    float *up, *ff;          /* [ff] */
    float *rows;             /* [tile_tokens, text_width] */
};

/* Multiplications of a part: 10 to 20 ms on two cores, which is a step of a small model. Parts of
 * fewer than PART_BLOCK rows would read the weights too often. */
#define VISION_PART_COST ((int64_t)1 << 29)
#define PART_BLOCK       32

/* Work of one call of vision_advance: a stage of a layer for rows [row, row + at most
 * part_rows) of the tile. */
enum vision_stage { STAGE_PATCHES, STAGE_QKV, STAGE_ATTEND, STAGE_FF, STAGE_CONNECT, STAGES };

struct vision_part {
    enum vision_stage stage;
    int layer, row;
};

/* Beginnings of the names of the encoder and of the connector. Gemma's files of different age have
 * different ones. */
struct vision_fronts {
    const char *encoder, *connector;
};

struct vision {
    struct kern *kern;
    struct vision_config config;
    struct vision_fronts fronts;
    bool borrowed; /* another encoder owns all but the scratch */
    struct kern_weight *patch, *connector;
    float *patch_bias, *last_norm, *last_norm_bias;
    float *pool_norm; /* [width], or NULL */
    float *places;    /* [patches, width] the positions' embeddings */
    float *ones;      /* [ff] */
    struct vision_layer *layers;
    uint8_t identity[SHA256_BYTES];
    size_t weight_bytes, step_bytes;
    struct vision_scratch scratch;
    float values[3][256];    /* picture_fill_values */
    float *pixels;           /* host memory, as scratch.pixels */
    int32_t *order;          /* [patches] the patches that a row of embeddings joins, side by side;
                                of those it pools first the first one of each row */
    struct vision_part part; /* the present tile's next one */
    int64_t part_cost;       /* multiplications of a part */
};

static int patch_pixels(const struct vision_config *c) {
    return 3 * c->patch * c->patch;
}

/* ---- Names ---- */

enum part {
    PART_PATCH,
    PART_PLACES,
    PART_LAST_NORM,
    PART_CONNECTOR, /* or the next two: vision_config.pools */
    PART_POOL_NORM,
    PART_PROJECTION,
    PART_ATTN_NORM, /* one for each layer from here on */
    PART_Q,
    PART_K,
    PART_V,
    PART_O,
    PART_FF_NORM,
    PART_UP,
    PART_DOWN
};

static const struct vision_fronts gguf_fronts = {"v.", "mm."},
                                  idefics3_fronts = {"model.vision_model.",
                                                     "model.connector.modality_projection."},
                                  gemma_fronts[] = {
                                      {"vision_tower.vision_model.", "multi_modal_projector."},
                                      {"vision_tower.", "multi_modal_projector."},
                                      {"model.vision_tower.vision_model.",
                                       "model.multi_modal_projector."},
                                      {"model.vision_tower.", "model.multi_modal_projector."},
};

/* Names in a directory and in a GGUF file, behind these and those of a layer. */
static const char *const names[][2] = {
    [PART_PATCH] = {"embeddings.patch_embedding", "patch_embd"},
    [PART_PLACES] = {"embeddings.position_embedding", "position_embd"},
    [PART_LAST_NORM] = {"post_layernorm", "post_ln"},
    [PART_CONNECTOR] = {"proj", "model.fc"},
    [PART_POOL_NORM] = {"mm_soft_emb_norm", "soft_emb_norm"},
    [PART_PROJECTION] = {"mm_input_projection", "input_projection"},
    [PART_ATTN_NORM] = {"layer_norm1", "ln1"},
    [PART_Q] = {"self_attn.q_proj", "attn_q"},
    [PART_K] = {"self_attn.k_proj", "attn_k"},
    [PART_V] = {"self_attn.v_proj", "attn_v"},
    [PART_O] = {"self_attn.out_proj", "attn_out"},
    [PART_FF_NORM] = {"layer_norm2", "ln2"},
    [PART_UP] = {"mlp.fc1", "ffn_up"},
    [PART_DOWN] = {"mlp.fc2", "ffn_down"},
};
static const char *const layer_names[2] = {"encoder.layers.", "blk."};

static void name_part(char out[TENSOR_NAME_MAX], const struct vision *vision, enum part part,
                      int layer, const char *end) {
    const bool gguf = vision->config.gguf, connects = part >= PART_CONNECTOR;
    const char joint = !gguf && part == PART_PROJECTION ? '_' : '.';
    const struct vision_fronts *fronts = &vision->fronts;
    if (part < PART_ATTN_NORM)
        snprintf(out, TENSOR_NAME_MAX, "%s%s%c%s", connects ? fronts->connector : fronts->encoder,
                 names[part][gguf], joint, end);
    else
        snprintf(out, TENSOR_NAME_MAX, "%s%s%d.%s.%s", fronts->encoder, layer_names[gguf], layer,
                 names[part][gguf], end);
}

/* Finds out which names the files have; the first ones, if they have none. */
static void find_fronts(struct vision *vision, const struct weights *weights) {
    char name[TENSOR_NAME_MAX];
    vision->fronts = vision->config.gguf ? gguf_fronts : idefics3_fronts;
    if (vision->config.gguf || !vision->config.pools) return;
    for (size_t i = sizeof gemma_fronts / sizeof *gemma_fronts; i-- > 0;) {
        vision->fronts = gemma_fronts[i];
        name_part(name, vision, PART_PATCH, 0, "weight");
        if (weights_find(weights, name)) return;
    }
}

/* ---- Loading ---- */

struct vision_loader {
    struct vision *vision;
    const struct weights *weights;
    struct cpu_team *team; /* NULL: names, shapes and types are checked alone */
    struct sha256_stream sum;
    struct fault *fault;
};

/* Finds a tensor of rows * cols numbers whose first dimension is the rows, and adds it to the sum.
 * The copy has the shape [rows, cols], or [rows] with cols 0. */
static int find_part(struct vision_loader *loader, const char *name, int64_t rows, int64_t cols,
                     struct tensor *out) {
    const struct tensor *tensor = weights_find(loader->weights, name);
    int64_t numbers = 1;
    char found[96];
    if (!tensor) return fault_set(loader->fault, ERR_NOTFOUND, name, "tensor is missing");
    for (int i = 0; i < tensor->dims; i++) numbers *= tensor->shape[i];
    tensor_shape_text(tensor->shape, tensor->dims, found, sizeof found);
    if (tensor->dims < 1 || tensor->shape[0] != rows || numbers != rows * (cols ? cols : 1))
        return fault_set(loader->fault, ERR_INVALID, name,
                         "shape is [%s], expected %lld rows of %lld", found, (long long)rows,
                         (long long)(cols ? cols : 1));
    if (!tensor_is_float(tensor->dtype) && !(cols && tensor->dtype == TENSOR_BLOCKS))
        return fault_set(loader->fault, ERR_UNSUPPORTED, name, "type %s is not supported",
                         tensor->type);
    *out = *tensor;
    out->dims = cols ? 2 : 1;
    out->shape[0] = rows;
    out->shape[1] = cols;
    loader->vision->weight_bytes += tensor->bytes;
    if (loader->team) sha256_add(&loader->sum, tensor->data, tensor->bytes);
    return 0;
}

/* Reads one matrix; *room, which mem_free frees, is memory for rows that are not in the file as the
 * backend takes them. */
static int read_matrix(struct vision_loader *loader, const char *name, const struct tensor *tensor,
                       char **room, struct kern_matrix *out) {
    const struct rows rows = {.tensor = tensor, .count = tensor->shape[0]};
    *out = (struct kern_matrix){.data = rows_at(&rows),
                                .dtype = rows_dtype(&rows),
                                .rows = tensor->shape[0],
                                .cols = tensor->shape[1]};
    if (rows_need_room(&rows)) {
        *room = mem_try_alloc((size_t)(out->rows * out->cols), sizeof(float));
        if (!*room) return fault_set(loader->fault, ERR_NOMEM, name, "no memory to read it");
        out->data = *room;
    }
    const int64_t bad = rows_read(&rows, *room, loader->team);
    return bad < 0 ? 0
                   : fault_set(loader->fault, ERR_INVALID, name,
                               "element %lld is not a finite number", (long long)bad);
}

/* Loads `count` parts of `rows` each, joined by rows. */
static int load_parts(struct vision_loader *loader, enum part first, int count, int layer,
                      int64_t rows, int64_t cols, struct kern_weight **out) {
    enum { MOST = 3 };
    struct tensor tensors[MOST];
    struct kern_matrix matrices[MOST] = {0};
    char *room[MOST] = {0}, name[TENSOR_NAME_MAX] = "";
    struct kern *kern = loader->vision->kern;
    int rc = 0;
    CHECK(count <= MOST);
    for (int i = 0; i < count && !rc; i++) {
        name_part(name, loader->vision, (enum part)((int)first + i), layer, "weight");
        rc = find_part(loader, name, rows, cols, &tensors[i]);
        if (!rc && loader->team)
            rc = read_matrix(loader, name, &tensors[i], &room[i], &matrices[i]);
    }
    if (!rc && loader->team)
        rc = kern->ops->weight_load(kern, matrices, count, KERN_SHARD_NONE, out, loader->fault);
    for (int i = 0; i < count; i++) mem_free(room[i]);
    return rc;
}

static int give_floats(struct vision_loader *loader, const char *name, const float *from,
                       size_t count, float **out) {
    struct kern *kern = loader->vision->kern;
    *out = kern->ops->mem_alloc(kern, count * sizeof *from);
    if (!*out) return fault_set(loader->fault, ERR_NOMEM, name, "no memory for %zu numbers", count);
    return kern->ops->upload(kern, *out, from, count * sizeof *from);
}

/* The projection of pooled patches, whose file has a row for each input. */
static int load_projection(struct vision_loader *loader) {
    struct vision *vision = loader->vision;
    const struct vision_config *c = &vision->config;
    const size_t in = (size_t)c->width, out = (size_t)c->text_width;
    char name[TENSOR_NAME_MAX];
    struct tensor tensor;
    name_part(name, vision, PART_PROJECTION, 0, "weight");
    int rc = find_part(loader, name, c->width, c->text_width, &tensor);
    if (!rc && tensor.dtype == TENSOR_BLOCKS)
        rc = fault_set(loader->fault, ERR_UNSUPPORTED, name, "type %s is not supported",
                       tensor.type);
    if (rc || !loader->team) return rc;
    float *row = mem_must_alloc(out, sizeof *row), *host = mem_must_alloc(in * out, sizeof *host);
    for (size_t i = 0; i < in && !rc; i++) {
        CHECK(tensor_read_floats(&tensor, i * out, out, row));
        for (size_t k = 0; k < out; k++) {
            host[k * in + i] = row[k];
            if (!isfinite(row[k]))
                rc = fault_set(loader->fault, ERR_INVALID, name, "has a number that is not finite");
        }
    }
    const struct kern_matrix matrix = {
        .data = host, .dtype = KERN_F32, .rows = c->text_width, .cols = c->width};
    if (!rc)
        rc = vision->kern->ops->weight_load(vision->kern, &matrix, 1, KERN_SHARD_NONE,
                                            &vision->connector, loader->fault);
    mem_free(row);
    mem_free(host);
    return rc;
}

/* Loads the vectors of `count` parts, [width] each, one behind another. */
static int load_vectors(struct vision_loader *loader, enum part first, int count, int layer,
                        const char *end, int width, float **out) {
    char name[TENSOR_NAME_MAX] = "";
    struct tensor tensor;
    const size_t each = (size_t)width, all = each * (size_t)count;
    float *host = mem_must_alloc(all, sizeof *host);
    int rc = 0;
    for (int i = 0; i < count && !rc; i++) {
        name_part(name, loader->vision, (enum part)((int)first + i), layer, end);
        rc = find_part(loader, name, width, 0, &tensor);
        if (!rc) CHECK(tensor_read_floats(&tensor, 0, each, host + (size_t)i * each));
    }
    /* Gemma's directories have weights of norms less 1. */
    for (size_t i = 0; first == PART_POOL_NORM && !loader->vision->config.gguf && i < all; i++)
        host[i] += 1;
    for (size_t i = 0; i < all && !rc; i++)
        if (!isfinite(host[i]))
            rc = fault_set(loader->fault, ERR_INVALID, name, "has a number that is not finite");
    if (!rc && loader->team) rc = give_floats(loader, name, host, all, out);
    mem_free(host);
    return rc;
}

/* The embedding of each patch's position. */
static int load_places(struct vision_loader *loader) {
    const struct vision_config *c = &loader->vision->config;
    const size_t width = (size_t)c->width;
    char name[TENSOR_NAME_MAX];
    struct tensor tensor;
    name_part(name, loader->vision, PART_PLACES, 0, "weight");
    int rc = find_part(loader, name, (int64_t)c->table_side * c->table_side, c->width, &tensor);
    if (!rc && tensor.dtype == TENSOR_BLOCKS)
        rc = fault_set(loader->fault, ERR_UNSUPPORTED, name, "type %s is not supported",
                       tensor.type);
    if (rc || !loader->team) return rc;
    float *host = mem_must_alloc((size_t)vision_patches(c) * width, sizeof *host);
    for (int y = 0; y < c->side; y++)
        for (int x = 0; x < c->side; x++) {
            const int row = vision_position(c, y) * c->table_side + vision_position(c, x);
            CHECK(tensor_read_floats(&tensor, (size_t)row * width, width,
                                     host + (size_t)(y * c->side + x) * width));
        }
    rc =
        give_floats(loader, name, host, (size_t)vision_patches(c) * width, &loader->vision->places);
    mem_free(host);
    return rc;
}

/* Older GGUF files have the names of both matrices of a network exchanged. */
static bool is_exchanged(const struct vision_loader *loader, int layer) {
    const struct vision_config *c = &loader->vision->config;
    char name[TENSOR_NAME_MAX];
    name_part(name, loader->vision, PART_UP, layer, "weight");
    const struct tensor *up = weights_find(loader->weights, name);
    return c->gguf && up && up->dims == 2 && up->shape[0] == c->width && up->shape[1] == c->ff &&
           c->ff != c->width;
}

static int load_vision_layer(struct vision_loader *loader, int at) {
    const struct vision_config *c = &loader->vision->config;
    struct vision_layer *layer = &loader->vision->layers[at];
    const int width = c->width;
    const bool exchanged = is_exchanged(loader, at);
    const enum part up = exchanged ? PART_DOWN : PART_UP, down = exchanged ? PART_UP : PART_DOWN;
    int rc = load_vectors(loader, PART_ATTN_NORM, 1, at, "weight", width, &layer->attn_norm);
    if (!rc)
        rc = load_vectors(loader, PART_ATTN_NORM, 1, at, "bias", width, &layer->attn_norm_bias);
    if (!rc) rc = load_parts(loader, PART_Q, 3, at, width, width, &layer->qkv);
    if (!rc) rc = load_vectors(loader, PART_Q, 3, at, "bias", width, &layer->qkv_bias);
    if (!rc) rc = load_parts(loader, PART_O, 1, at, width, width, &layer->o);
    if (!rc) rc = load_vectors(loader, PART_O, 1, at, "bias", width, &layer->o_bias);
    if (!rc) rc = load_vectors(loader, PART_FF_NORM, 1, at, "weight", width, &layer->ff_norm);
    if (!rc) rc = load_vectors(loader, PART_FF_NORM, 1, at, "bias", width, &layer->ff_norm_bias);
    if (!rc) rc = load_parts(loader, up, 1, at, c->ff, width, &layer->up);
    if (!rc) rc = load_vectors(loader, up, 1, at, "bias", c->ff, &layer->up_bias);
    if (!rc) rc = load_parts(loader, down, 1, at, width, c->ff, &layer->down);
    if (!rc) rc = load_vectors(loader, down, 1, at, "bias", width, &layer->down_bias);
    return rc;
}

static int load_connector(struct vision_loader *loader) {
    struct vision *vision = loader->vision;
    const struct vision_config *c = &vision->config;
    const int64_t joined = (int64_t)c->merge * c->merge * c->width;
    if (!c->pools)
        return load_parts(loader, PART_CONNECTOR, 1, 0, c->text_width, joined, &vision->connector);
    int rc = load_vectors(loader, PART_POOL_NORM, 1, 0, "weight", c->width, &vision->pool_norm);
    return rc ? rc : load_projection(loader);
}

static int load_ones(struct vision_loader *loader) {
    const size_t count = (size_t)loader->vision->config.ff;
    if (!loader->team) return 0;
    float *host = mem_must_alloc(count, sizeof *host);
    for (size_t i = 0; i < count; i++) host[i] = 1;
    int rc = give_floats(loader, "model", host, count, &loader->vision->ones);
    mem_free(host);
    return rc;
}

/* The numbers that the weights are used with. */
static void add_config(struct sha256_stream *sum, const struct vision_config *c) {
    const int32_t sizes[] = {c->layers,     c->width, c->ff,    c->heads,      c->patch,
                             c->table_side, c->side,  c->merge, c->text_width, c->pools};
    float values[3][256];
    picture_fill_values(&c->form, values);
    sha256_add(sum, sizes, sizeof sizes);
    sha256_add(sum, &c->eps, sizeof c->eps);
    sha256_add(sum, values, sizeof values);
}

static int load_weights(struct vision *vision, const struct weights *weights,
                        const struct vision_options *options, struct fault *fault) {
    const struct vision_config *c = &vision->config;
    struct vision_loader loader = {.vision = vision, .weights = weights, .fault = fault};
    if (!options->check_only && cpu_team_open(options->threads, &loader.team))
        return fault_set(fault, ERR_NOMEM, "threads", "cannot start the threads that load weights");
    sha256_begin(&loader.sum);
    add_config(&loader.sum, c);
    vision->layers = mem_must_alloc((size_t)c->layers, sizeof *vision->layers);
    find_fronts(vision, weights);
    int rc = load_parts(&loader, PART_PATCH, 1, 0, c->width, patch_pixels(c), &vision->patch);
    if (!rc) rc = load_vectors(&loader, PART_PATCH, 1, 0, "bias", c->width, &vision->patch_bias);
    if (!rc) rc = load_places(&loader);
    for (int i = 0; i < c->layers && !rc; i++) rc = load_vision_layer(&loader, i);
    if (!rc)
        rc = load_vectors(&loader, PART_LAST_NORM, 1, 0, "weight", c->width, &vision->last_norm);
    if (!rc)
        rc = load_vectors(&loader, PART_LAST_NORM, 1, 0, "bias", c->width, &vision->last_norm_bias);
    if (!rc) rc = load_connector(&loader);
    if (!rc) rc = load_ones(&loader);
    sha256_end(&loader.sum, vision->identity);
    cpu_team_close(loader.team);
    return rc;
}

/* ---- Opening ---- */

static struct kern_cache_options cache_of(const struct vision *vision,
                                          struct kern_cache_info *info) {
    const struct vision_config *c = &vision->config;
    struct kern_cache_options cache = {.layers = 1,
                                       .heads_q = c->heads,
                                       .heads_kv = c->heads,
                                       .head_dim = c->width / c->heads,
                                       .dtype = KERN_F32,
                                       .slots = 1,
                                       .max_positions = vision_patches(c),
                                       .rows_max = vision_patches(c)};
    vision->kern->ops->cache_info(&cache, info);
    const int64_t each = (vision_patches(c) + info->page_slots - 1) / info->page_slots;
    cache.pages = c->heads * (each + 1);
    return cache;
}

/* With `check_only` counts the memory alone. */
static int open_scratch(struct vision *vision, bool check_only, struct fault *fault) {
    const struct vision_config *c = &vision->config;
    struct vision_scratch *s = &vision->scratch;
    struct kern *kern = vision->kern;
    const int patches = vision_patches(c);
    const struct {
        float **out;
        int rows, width;
    } arrays[] = {
        {&s->pixels, patches, patch_pixels(c)},
        {&s->x, patches, c->width},
        {&s->norm, patches, c->width},
        {&s->heads, patches, c->width},
        {&s->qkv, patches, 3 * c->width},
        {&s->up, patches, c->ff},
        {&s->ff, patches, c->ff},
        {&s->rows, c->form.tile_tokens_max, c->text_width},
    };
    struct kern_cache_info info = {0};
    const struct kern_cache_options cache = cache_of(vision, &info);
    vision->step_bytes = (size_t)(cache.pages * info.page_bytes);
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        const size_t bytes = (size_t)arrays[i].rows * (size_t)arrays[i].width * sizeof(float);
        vision->step_bytes += i ? bytes : 2 * bytes; /* the pixels lie in host memory, too */
        if (check_only) continue;
        *arrays[i].out = kern->ops->mem_alloc(kern, bytes);
        if (!*arrays[i].out)
            return fault_set(fault, ERR_NOMEM, "mmproj", "no memory to encode a tile of %d patches",
                             patches);
    }
    if (check_only) return 0;
    picture_fill_values(&c->form, vision->values);
    vision->pixels = mem_must_alloc((size_t)patches * (size_t)patch_pixels(c), sizeof(float));
    vision->order = mem_must_alloc((size_t)patches, sizeof *vision->order);
    const int each = c->merge * c->merge, tokens = patches / each;
    for (int row = 0; row < tokens; row++)
        for (int i = 0; i < each; i++) {
            const int across = c->side / c->merge, y = row / across, x = row % across;
            vision->order[c->pools ? i * tokens + row : row * each + i] =
                (y * c->merge + i / c->merge) * c->side + x * c->merge + i % c->merge;
        }
    return kern->ops->cache_open(kern, &cache, fault);
}

static int read_config(const struct vision_options *options, struct weights **weights,
                       struct vision_config *config, struct fault *fault) {
    struct fault inner = {0};
    int rc;
    *weights = NULL;
    if (!options->mmproj || !options->mmproj[0]) {
        rc = gguf_is_path(options->dir) ? 0
                                        : vision_config_of_directory(options->dir, config, fault);
        if (!rc && config->form.kind != PICTURE_NONE)
            rc = weights_open(options->dir, weights, fault);
        return rc;
    }
    rc = gguf_is_path(options->mmproj) ? weights_open(options->mmproj, weights, &inner)
                                       : fault_set(&inner, ERR_UNSUPPORTED, "", "is a folder");
    if (!rc) rc = vision_config_of_gguf(weights_gguf(*weights), config, &inner);
    return rc ? fault_set(fault, rc, "mmproj", "%s%s%s", inner.field, inner.field[0] ? ": " : "",
                          inner.text)
              : 0;
}

static int load_vision(struct vision *vision, const struct vision_options *options,
                       struct fault *fault) {
    struct weights *weights;
    int rc = read_config(options, &weights, &vision->config, fault);
    vision->config.text_width = options->text_width;
    if (!rc && weights) rc = load_weights(vision, weights, options, fault);
    weights_close(weights);
    return rc;
}

static int borrow_vision(struct vision *vision, const struct vision *owner, struct fault *fault) {
    struct kern *kern = vision->kern;
    int rc = kern->ops->borrow(kern, owner->kern);
    if (rc) return fault_set(fault, rc, "mmproj", "its weights cannot be shared");
    *vision = *owner;
    vision->kern = kern;
    vision->borrowed = true;
    vision->scratch = (struct vision_scratch){0};
    vision->pixels = NULL;
    vision->order = NULL;
    return 0;
}

int vision_open(struct kern *kern, const struct vision_options *options, struct vision **out,
                struct fault *fault) {
    *out = NULL;
    struct vision *vision = mem_must_alloc(1, sizeof *vision);
    vision->kern = kern;
    int rc = options->owner && kern->ops->borrow ? borrow_vision(vision, options->owner, fault)
                                                 : load_vision(vision, options, fault);
    const bool sees = vision->config.form.kind != PICTURE_NONE;
    vision->part_cost = options->part_cost ? options->part_cost : VISION_PART_COST;
    if (!rc && sees) rc = open_scratch(vision, options->check_only, fault);
    if (rc || !sees)
        vision_close(vision);
    else
        *out = vision;
    return rc;
}

static void free_vector(struct kern *kern, float *vector) {
    if (vector) kern->ops->mem_free(kern, vector);
}

static void free_weight(struct kern *kern, struct kern_weight *weight) {
    if (weight) kern->ops->weight_free(kern, weight);
}

static void close_vision_layer(struct kern *kern, struct vision_layer *layer) {
    float *vectors[] = {layer->attn_norm, layer->attn_norm_bias, layer->qkv_bias, layer->o_bias,
                        layer->ff_norm,   layer->ff_norm_bias,   layer->up_bias,  layer->down_bias};
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) free_vector(kern, vectors[i]);
    free_weight(kern, layer->qkv);
    free_weight(kern, layer->o);
    free_weight(kern, layer->up);
    free_weight(kern, layer->down);
}

void vision_close(struct vision *vision) {
    if (!vision) return;
    struct kern *kern = vision->kern;
    const struct vision_scratch *s = &vision->scratch;
    float *scratch[] = {s->pixels, s->x, s->norm, s->heads, s->qkv, s->up, s->ff, s->rows};
    for (size_t i = 0; i < sizeof scratch / sizeof *scratch; i++) free_vector(kern, scratch[i]);
    mem_free(vision->pixels);
    mem_free(vision->order);
    if (!vision->borrowed) {
        float *vectors[] = {vision->patch_bias, vision->last_norm, vision->last_norm_bias,
                            vision->pool_norm,  vision->places,    vision->ones};
        for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) free_vector(kern, vectors[i]);
        for (int i = 0; vision->layers && i < vision->config.layers; i++)
            close_vision_layer(kern, &vision->layers[i]);
        free_weight(kern, vision->patch);
        free_weight(kern, vision->connector);
        mem_free(vision->layers);
    }
    mem_free(vision);
}

const struct vision_config *vision_config(const struct vision *vision) {
    return &vision->config;
}
const uint8_t *vision_identity(const struct vision *vision) {
    return vision->identity;
}
size_t vision_weight_bytes(const struct vision *vision) {
    return vision->weight_bytes;
}
size_t vision_step_bytes(const struct vision *vision) {
    return vision->step_bytes;
}

/* ---- A tile ---- */

/* Makes a row of each patch's pixels. */
static void cut_patches(struct vision *vision, const uint8_t *pixels) {
    const struct vision_config *c = &vision->config;
    const size_t edge = (size_t)c->form.tile_edge;
    float *to = vision->pixels;
    for (int patch = 0; patch < vision_patches(c); patch++)
        for (int channel = 0; channel < 3; channel++)
            for (int y = 0; y < c->patch; y++) {
                const int row = patch / c->side * c->patch + y;
                const uint8_t *from = pixels + ((size_t)channel * edge + (size_t)row) * edge +
                                      (size_t)(patch % c->side * c->patch);
                for (int x = 0; x < c->patch; x++) *to++ = vision->values[channel][from[x]];
            }
}

int vision_begin(struct vision *vision, const struct picture *picture, int tile) {
    const struct vision_config *c = &vision->config;
    const struct vision_scratch *s = &vision->scratch;
    struct kern *kern = vision->kern;
    const size_t edge = (size_t)c->form.tile_edge;
    const int patches = vision_patches(c);
    CHECK(picture_is_of_form(picture, &c->form) && tile >= 0 && tile < picture->tiles);
    cut_patches(vision, picture->pixels + (size_t)tile * 3 * edge * edge);
    if (vision->part.stage == STAGE_ATTEND)
        kern->ops->release(kern, 0); /* entries of a tile that was left */
    vision->part = (struct vision_part){0};
    return kern->ops->upload(kern, s->pixels, vision->pixels,
                             (size_t)patches * (size_t)patch_pixels(c) * sizeof(float));
}

/* Returns row `row` of an array with `width` numbers a row. */
static float *row_of(float *array, int row, int width) {
    return array + (size_t)row * (size_t)width;
}

static int embed_patches(struct vision *vision, int row, int rows) {
    const struct vision_config *c = &vision->config;
    const struct vision_scratch *s = &vision->scratch;
    struct kern *kern = vision->kern;
    float *x = row_of(s->x, row, c->width);
    kern->ops->matmul(kern, x, row_of(s->pixels, row, patch_pixels(c)), vision->patch,
                      vision->patch_bias, rows, KERN_SET);
    kern->ops->add(kern, x, row_of(vision->places, row, c->width), rows, c->width);
    return 0;
}

static struct kern_batch batch_of(const struct kern_span *span) {
    return (struct kern_batch){.spans = span, .rows = span->count, .span_count = 1};
}

/* Writes the tile's keys and values of a layer into the cache. */
static int write_patches(struct vision *vision) {
    const struct kern_span span = {.count = vision_patches(&vision->config)};
    const struct kern_batch batch = batch_of(&span);
    struct kern *kern = vision->kern;
    int rc = kern->ops->begin_step(kern, &batch);
    if (!rc) kern->ops->write_kv(kern, 0, vision->scratch.qkv, NULL, &batch);
    return rc;
}

static int compute_qkv(struct vision *vision, int row, int rows) {
    const struct vision_config *c = &vision->config;
    const struct vision_scratch *s = &vision->scratch;
    const struct vision_layer *layer = &vision->layers[vision->part.layer];
    struct kern *kern = vision->kern;
    float *norm = row_of(s->norm, row, c->width);
    kern->ops->layer_norm(kern, norm, row_of(s->x, row, c->width), layer->attn_norm,
                          layer->attn_norm_bias, rows, c->width, c->eps);
    kern->ops->matmul(kern, row_of(s->qkv, row, 3 * c->width), norm, layer->qkv, layer->qkv_bias,
                      rows, KERN_SET);
    return row + rows < vision_patches(c) ? 0 : write_patches(vision);
}

/* Attention of some patches to all patches: the cache has one layer's entries of this tile. */
static int attend_patches(struct vision *vision, int row, int rows) {
    const struct vision_config *c = &vision->config;
    const struct vision_scratch *s = &vision->scratch;
    const struct vision_layer *layer = &vision->layers[vision->part.layer];
    struct kern *kern = vision->kern;
    const struct kern_span span = {.count = rows, .pos = row};
    const struct kern_batch batch = batch_of(&span);
    const int head_dim = c->width / c->heads;
    const struct kern_attend_options options = {.scale = 1 / sqrtf((float)head_dim),
                                                .both_ways = true};
    float *heads = row_of(s->heads, row, c->width);
    kern->ops->attend(kern, 0, heads, row_of(s->qkv, row, 3 * c->width), &batch, &options);
    kern->ops->matmul(kern, row_of(s->x, row, c->width), heads, layer->o, layer->o_bias, rows,
                      KERN_ADD);
    if (row + rows < vision_patches(c)) return 0;
    int rc = kern->ops->sync(kern);
    kern->ops->release(kern, 0);
    return rc;
}

static int feed_forward(struct vision *vision, int row, int rows) {
    const struct vision_config *c = &vision->config;
    const struct vision_scratch *s = &vision->scratch;
    const struct vision_layer *layer = &vision->layers[vision->part.layer];
    struct kern *kern = vision->kern;
    float *x = row_of(s->x, row, c->width), *norm = row_of(s->norm, row, c->width);
    float *up = row_of(s->up, row, c->ff), *ff = row_of(s->ff, row, c->ff);
    kern->ops->layer_norm(kern, norm, x, layer->ff_norm, layer->ff_norm_bias, rows, c->width,
                          c->eps);
    kern->ops->matmul(kern, up, norm, layer->up, layer->up_bias, rows, KERN_SET);
    kern->ops->glu_apart(kern, ff, up, vision->ones, 0, rows, c->ff, KERN_GELU_TANH);
    kern->ops->matmul(kern, x, ff, layer->down, layer->down_bias, rows, KERN_ADD);
    return 0;
}

/* The norm of the means of the patches of each row. An RMSNorm of sums is that of means where its
 * eps grows with the square of their number. */
static void pool_patches(struct vision *vision) {
    const struct vision_config *c = &vision->config;
    const struct vision_scratch *s = &vision->scratch;
    struct kern *kern = vision->kern;
    const int each = c->merge * c->merge, rows = vision_patches(c) / each;
    float *sums = s->heads, *next = row_of(s->heads, rows, c->width);
    for (int i = 0; i < each; i++) {
        kern->ops->gather_rows(kern, i ? next : sums, s->norm, vision->order + (ptrdiff_t)i * rows,
                               rows, c->width);
        if (i) kern->ops->add(kern, sums, next, rows, c->width);
    }
    kern->ops->rms_norm(kern, sums, sums, vision->pool_norm, rows, c->width,
                        c->eps * (float)each * (float)each);
}

/* The connector. Rows of s->norm in order are rows of joined patches. */
static int connect_patches(struct vision *vision, float *out) {
    const struct vision_config *c = &vision->config;
    const struct vision_scratch *s = &vision->scratch;
    struct kern *kern = vision->kern;
    const int patches = vision_patches(c), rows = c->form.tile_tokens_max;
    kern->ops->layer_norm(kern, s->norm, s->x, vision->last_norm, vision->last_norm_bias, patches,
                          c->width, c->eps);
    if (c->pools)
        pool_patches(vision);
    else
        kern->ops->gather_rows(kern, s->heads, s->norm, vision->order, patches, c->width);
    kern->ops->matmul(kern, s->rows, s->heads, vision->connector, NULL, rows, KERN_SET);
    int rc =
        kern->ops->download(kern, out, s->rows, (size_t)rows * (size_t)c->text_width * sizeof *out);
    return rc ? rc : kern->ops->sync(kern);
}

/* Returns the multiplications of a stage for one row. */
static int64_t row_cost(const struct vision_config *c, enum vision_stage stage) {
    const int64_t width = c->width;
    const int64_t costs[STAGES] = {
        [STAGE_PATCHES] = width * patch_pixels(c),
        [STAGE_QKV] = 3 * width * width,
        [STAGE_ATTEND] = 2 * width * vision_patches(c) + width * width,
        [STAGE_FF] = 2 * width * c->ff,
        [STAGE_CONNECT] = width * c->text_width,
    };
    return costs[stage];
}

/* Returns the rows of a part: whole blocks, which the kernels of products are fastest with. */
static int part_rows(const struct vision *vision) {
    const struct vision_config *c = &vision->config;
    const struct vision_part *part = &vision->part;
    const int64_t most = vision->part_cost / row_cost(c, part->stage) / PART_BLOCK * PART_BLOCK;
    const int left = vision_patches(c) - part->row;
    if (part->stage == STAGE_CONNECT) return left;
    return left <= PART_BLOCK || left <= most ? left : most < PART_BLOCK ? PART_BLOCK : (int)most;
}

static void go_on(struct vision *vision, int rows) {
    const struct vision_config *c = &vision->config;
    struct vision_part *part = &vision->part;
    part->row += rows;
    if (part->row < vision_patches(c)) return;
    part->row = 0;
    if (part->stage == STAGE_FF && ++part->layer < c->layers)
        part->stage = STAGE_QKV;
    else
        part->stage++;
}

int vision_advance(struct vision *vision, float *out, bool *done) {
    static int (*const stages[STAGES])(struct vision *, int row, int rows) = {
        [STAGE_PATCHES] = embed_patches,
        [STAGE_QKV] = compute_qkv,
        [STAGE_ATTEND] = attend_patches,
        [STAGE_FF] = feed_forward,
    };
    const struct vision_part *part = &vision->part;
    const int rows = part_rows(vision);
    *done = part->stage == STAGE_CONNECT;
    if (*done) return connect_patches(vision, out);
    int rc = stages[part->stage](vision, part->row, rows);
    go_on(vision, rows);
    return rc;
}
