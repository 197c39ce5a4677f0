/* Names and loading of the weights of encoders of pictures. */
#include "model/vision_weights.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "kernels/cpu/team.h"
#include "model/rows.h"
#include "model/tensors.h"
#include "model/weights.h"

/* ---- Names ---- */

enum part {
    PART_PATCH,
    PART_PATCH_NORM,
    PART_PLACES,
    PART_CONNECTOR_NORM,
    PART_CONNECTOR_FIRST,
    PART_CONNECTOR_LAST,
    PART_JOIN, /* the file has patch after patch of each number of a patch */
    PART_POOL_NORM,
    PART_PROJECTION, /* pooled patches', whose file has a row for each input */
    PART_DEEP_NORM,  /* numbered from here on */
    PART_DEEP_FIRST,
    PART_DEEP_LAST,
    PART_ATTN_NORM,
    PART_QKV,
    PART_Q,
    PART_K,
    PART_V,
    PART_O,
    PART_FF_NORM,
    PART_GATE,
    PART_UP,
    PART_DOWN,
    PARTS
};

/* Names of GGUF files that only this family has. */
static const char *const gguf_names[VISION_NAMINGS][PARTS] = {
    [VISION_IDEFICS3] = {[PART_CONNECTOR_LAST] = "mm.model.fc"},
    [VISION_PIXTRAL] =
        {
            [PART_CONNECTOR_NORM] = "mm.input_norm",
            [PART_CONNECTOR_FIRST] = "mm.1",
        },
};

/* The names of the files' tensors; # stands for a number. */
static const char *const names[VISION_NAMINGS][PARTS] = {
    [VISION_GGUF] =
        {
            [PART_PATCH] = "v.patch_embd",
            [PART_PATCH_NORM] = "v.pre_ln",
            [PART_PLACES] = "v.position_embd",
            [PART_CONNECTOR_NORM] = "v.post_ln",
            [PART_CONNECTOR_FIRST] = "mm.0",
            [PART_CONNECTOR_LAST] = "mm.2",
            [PART_JOIN] = "mm.patch_merger",
            [PART_POOL_NORM] = "mm.soft_emb_norm",
            [PART_PROJECTION] = "mm.input_projection",
            [PART_DEEP_NORM] = "v.deepstack.#.norm",
            [PART_DEEP_FIRST] = "v.deepstack.#.fc1",
            [PART_DEEP_LAST] = "v.deepstack.#.fc2",
            [PART_ATTN_NORM] = "v.blk.#.ln1",
            [PART_QKV] = "v.blk.#.attn_qkv",
            [PART_Q] = "v.blk.#.attn_q",
            [PART_K] = "v.blk.#.attn_k",
            [PART_V] = "v.blk.#.attn_v",
            [PART_O] = "v.blk.#.attn_out",
            [PART_FF_NORM] = "v.blk.#.ln2",
            [PART_GATE] = "v.blk.#.ffn_gate",
            [PART_UP] = "v.blk.#.ffn_up",
            [PART_DOWN] = "v.blk.#.ffn_down",
        },
    [VISION_IDEFICS3] =
        {
            [PART_PATCH] = "model.vision_model.embeddings.patch_embedding",
            [PART_PLACES] = "model.vision_model.embeddings.position_embedding",
            [PART_CONNECTOR_NORM] = "model.vision_model.post_layernorm",
            [PART_CONNECTOR_LAST] = "model.connector.modality_projection.proj",
            [PART_ATTN_NORM] = "model.vision_model.encoder.layers.#.layer_norm1",
            [PART_Q] = "model.vision_model.encoder.layers.#.self_attn.q_proj",
            [PART_K] = "model.vision_model.encoder.layers.#.self_attn.k_proj",
            [PART_V] = "model.vision_model.encoder.layers.#.self_attn.v_proj",
            [PART_O] = "model.vision_model.encoder.layers.#.self_attn.out_proj",
            [PART_FF_NORM] = "model.vision_model.encoder.layers.#.layer_norm2",
            [PART_UP] = "model.vision_model.encoder.layers.#.mlp.fc1",
            [PART_DOWN] = "model.vision_model.encoder.layers.#.mlp.fc2",
        },
    [VISION_GEMMA3] =
        {
            [PART_PATCH] = "vision_tower.vision_model.embeddings.patch_embedding",
            [PART_PLACES] = "vision_tower.vision_model.embeddings.position_embedding",
            [PART_CONNECTOR_NORM] = "vision_tower.vision_model.post_layernorm",
            [PART_POOL_NORM] = "multi_modal_projector.mm_soft_emb_norm",
            [PART_PROJECTION] = "multi_modal_projector.mm_input_projection_",
            [PART_ATTN_NORM] = "vision_tower.vision_model.encoder.layers.#.layer_norm1",
            [PART_Q] = "vision_tower.vision_model.encoder.layers.#.self_attn.q_proj",
            [PART_K] = "vision_tower.vision_model.encoder.layers.#.self_attn.k_proj",
            [PART_V] = "vision_tower.vision_model.encoder.layers.#.self_attn.v_proj",
            [PART_O] = "vision_tower.vision_model.encoder.layers.#.self_attn.out_proj",
            [PART_FF_NORM] = "vision_tower.vision_model.encoder.layers.#.layer_norm2",
            [PART_UP] = "vision_tower.vision_model.encoder.layers.#.mlp.fc1",
            [PART_DOWN] = "vision_tower.vision_model.encoder.layers.#.mlp.fc2",
        },
    [VISION_PIXTRAL] =
        {
            [PART_PATCH] = "vision_tower.patch_conv",
            [PART_PATCH_NORM] = "vision_tower.ln_pre",
            [PART_CONNECTOR_NORM] = "multi_modal_projector.norm",
            [PART_CONNECTOR_FIRST] = "multi_modal_projector.linear_1",
            [PART_CONNECTOR_LAST] = "multi_modal_projector.linear_2",
            [PART_JOIN] = "multi_modal_projector.patch_merger.merging_layer",
            [PART_ATTN_NORM] = "vision_tower.transformer.layers.#.attention_norm",
            [PART_Q] = "vision_tower.transformer.layers.#.attention.q_proj",
            [PART_K] = "vision_tower.transformer.layers.#.attention.k_proj",
            [PART_V] = "vision_tower.transformer.layers.#.attention.v_proj",
            [PART_O] = "vision_tower.transformer.layers.#.attention.o_proj",
            [PART_FF_NORM] = "vision_tower.transformer.layers.#.ffn_norm",
            [PART_GATE] = "vision_tower.transformer.layers.#.feed_forward.gate_proj",
            [PART_UP] = "vision_tower.transformer.layers.#.feed_forward.up_proj",
            [PART_DOWN] = "vision_tower.transformer.layers.#.feed_forward.down_proj",
        },
    [VISION_QWEN2_5] =
        {
            [PART_PATCH] = "visual.patch_embed.proj",
            [PART_CONNECTOR_NORM] = "visual.merger.ln_q",
            [PART_CONNECTOR_FIRST] = "visual.merger.mlp.0",
            [PART_CONNECTOR_LAST] = "visual.merger.mlp.2",
            [PART_ATTN_NORM] = "visual.blocks.#.norm1",
            [PART_QKV] = "visual.blocks.#.attn.qkv",
            [PART_O] = "visual.blocks.#.attn.proj",
            [PART_FF_NORM] = "visual.blocks.#.norm2",
            [PART_GATE] = "visual.blocks.#.mlp.gate_proj",
            [PART_UP] = "visual.blocks.#.mlp.up_proj",
            [PART_DOWN] = "visual.blocks.#.mlp.down_proj",
        },
    [VISION_QWEN3] =
        {
            [PART_PATCH] = "visual.patch_embed.proj",
            [PART_PLACES] = "visual.pos_embed",
            [PART_CONNECTOR_NORM] = "visual.merger.norm",
            [PART_CONNECTOR_FIRST] = "visual.merger.linear_fc1",
            [PART_CONNECTOR_LAST] = "visual.merger.linear_fc2",
            [PART_DEEP_NORM] = "visual.deepstack_merger_list.#.norm",
            [PART_DEEP_FIRST] = "visual.deepstack_merger_list.#.linear_fc1",
            [PART_DEEP_LAST] = "visual.deepstack_merger_list.#.linear_fc2",
            [PART_ATTN_NORM] = "visual.blocks.#.norm1",
            [PART_QKV] = "visual.blocks.#.attn.qkv",
            [PART_O] = "visual.blocks.#.attn.proj",
            [PART_FF_NORM] = "visual.blocks.#.norm2",
            [PART_UP] = "visual.blocks.#.mlp.linear_fc1",
            [PART_DOWN] = "visual.blocks.#.mlp.linear_fc2",
        },
};

struct vision_loader {
    struct kern *kern;
    const struct vision_config *config;
    struct vision_weights *to;
    const struct weights *weights;
    struct cpu_team *team; /* NULL: names, shapes and types are checked alone */
    int *order; /* [head_dim] for each row of a head of q or k, its row in the file; NULL:
                   the same */
    struct sha256_stream sum;
    struct fault *fault;
};

static const char *part_name(const struct vision_config *c, enum part part) {
    if (c->gguf && gguf_names[c->naming][part]) return gguf_names[c->naming][part];
    return names[c->gguf ? VISION_GGUF : c->naming][part];
}

/* Returns the first component of a name, behind "model.", and its length. */
static const char *first_component(const char *name, size_t *length) {
    static const char front[] = "model.";
    if (strncmp(name, front, sizeof front - 1) == 0) name += sizeof front - 1;
    *length = strcspn(name, ".");
    return name;
}

bool vision_weights_own(const struct vision_config *config, const char *tensor) {
    size_t length, wanted;
    const char *component = first_component(tensor, &length);
    for (int part = 0; part < PARTS; part++) {
        const char *name = part_name(config, (enum part)part);
        if (!name) continue;
        name = first_component(name, &wanted);
        if (length == wanted && memcmp(component, name, length) == 0) return true;
    }
    return false;
}

/* Removes the first occurrence of a part of a name; false: there is none. */
static bool shorten_name(char *name, const char *by) {
    char *at = strstr(name, by);
    if (at) memmove(at, at + strlen(by), strlen(at + strlen(by)) + 1);
    return at != NULL;
}

/* Published files of some families have "model." in front of their names, or have
 * "vision_model." in them, or not. */
static void name_part(const struct vision_loader *loader, enum part part, int number,
                      const char *end, char out[TENSOR_NAME_MAX]) {
    static const char front[] = "model.", middle[] = "vision_model.";
    const char *name = part_name(loader->config, part), *mark = strchr(name, '#');
    const char *joint = name[strlen(name) - 1] == '_' ? "" : ".";
    char full[TENSOR_NAME_MAX];
    if (mark)
        snprintf(full, sizeof full, "%s%.*s%d%s%s%s", front, (int)(mark - name), name, number,
                 mark + 1, joint, end);
    else
        snprintf(full, sizeof full, "%s%s%s%s", front, name, joint, end);
    memcpy(out, full, sizeof full);
    if (weights_find(loader->weights, out)) return;
    if (shorten_name(out, front) && weights_find(loader->weights, out)) return;
    if (loader->config->naming != VISION_GEMMA3) return;
    if (shorten_name(out, middle) && weights_find(loader->weights, out)) return;
    memcpy(out, full, sizeof full);
    if (shorten_name(out, middle) && weights_find(loader->weights, out)) return;
    snprintf(out, TENSOR_NAME_MAX, "%s", full + strlen(front));
}

static bool has_vision_part(const struct vision_loader *loader, enum part part, int number,
                            const char *end) {
    char name[TENSOR_NAME_MAX];
    if (!part_name(loader->config, part)) return false;
    name_part(loader, part, number, end, name);
    return weights_find(loader->weights, name) != NULL;
}

/* ---- Loading ---- */

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
    loader->to->bytes += tensor->bytes;
    if (loader->team) sha256_add(&loader->sum, tensor->data, tensor->bytes);
    return 0;
}

/* Reads one matrix; *room, which mem_free frees, is memory for rows that are not in the file as the
 * backend takes them. */
static int read_matrix(struct vision_loader *loader, enum part part, const char *name,
                       const struct tensor *tensor, char **room, struct kern_matrix *out) {
    const struct rows rows = {.tensor = tensor,
                              .count = tensor->shape[0],
                              .order = part == PART_Q || part == PART_K ? loader->order : NULL,
                              .head = loader->config->width / loader->config->heads};
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
static int load_vision_parts(struct vision_loader *loader, enum part first, int count, int layer,
                             int64_t rows, int64_t cols, struct kern_weight **out) {
    enum { MOST = 3 };
    struct tensor tensors[MOST];
    struct kern_matrix matrices[MOST] = {0};
    char *room[MOST] = {0}, name[TENSOR_NAME_MAX] = "";
    struct kern *kern = loader->kern;
    int rc = 0;
    CHECK(count <= MOST);
    for (int i = 0; i < count && !rc; i++) {
        const enum part part = (enum part)((int)first + i);
        name_part(loader, part, layer, "weight", name);
        rc = find_part(loader, name, rows, cols, &tensors[i]);
        if (!rc && loader->team)
            rc = read_matrix(loader, part, name, &tensors[i], &room[i], &matrices[i]);
    }
    if (!rc && loader->team)
        rc = kern->ops->weight_load(kern, matrices, count, KERN_SHARD_NONE, out, loader->fault);
    for (int i = 0; i < count; i++) mem_free(room[i]);
    return rc;
}

static int give_floats(struct vision_loader *loader, const char *name, const float *from,
                       size_t count, float **out) {
    struct kern *kern = loader->kern;
    *out = kern->ops->mem_alloc(kern, count * sizeof *from);
    if (!*out) return fault_set(loader->fault, ERR_NOMEM, name, "no memory for %zu numbers", count);
    return kern->ops->upload(kern, *out, from, count * sizeof *from);
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
        name_part(loader, (enum part)((int)first + i), layer, end, name);
        rc = find_part(loader, name, width, 0, &tensor);
        if (!rc) CHECK(tensor_read_floats(&tensor, 0, each, host + (size_t)i * each));
    }
    /* Gemma's directories have weights of norms less 1. */
    for (size_t i = 0; first == PART_POOL_NORM && !loader->config->gguf && i < all; i++)
        host[i] += 1;
    for (size_t i = 0; i < all && !rc; i++)
        if (!isfinite(host[i]))
            rc = fault_set(loader->fault, ERR_INVALID, name, "has a number that is not finite");
    if (!rc && loader->team) rc = give_floats(loader, name, host, all, out);
    mem_free(host);
    return rc;
}

/* ---- Single parts ---- */

static int refuse_blocks(struct vision_loader *loader, const char *name,
                         const struct tensor *tensor) {
    return tensor->dtype == TENSOR_BLOCKS ? fault_set(loader->fault, ERR_UNSUPPORTED, name,
                                                      "type %s is not supported", tensor->type)
                                          : 0;
}

/* Adds `frames` products that a tensor's rows have for each channel, [3][frames][patch^2], into
 * `to`, [width][3 patch^2]. */
static void add_frames(const struct tensor *tensor, const struct vision_config *c, int frames,
                       float *to) {
    const size_t area = (size_t)c->patch * (size_t)c->patch, count = 3 * (size_t)frames * area;
    float *row = mem_must_alloc(count, sizeof *row);
    for (int i = 0; i < c->width; i++, to += 3 * area) {
        CHECK(tensor_read_floats(tensor, (size_t)i * count, count, row));
        for (size_t k = 0; k < count; k++)
            to[k / (area * (size_t)frames) * area + k % area] += row[k];
    }
    mem_free(row);
}

/* A picture is every frame of a video alike, so the products of its frames are added up. */
static int load_patch(struct vision_loader *loader) {
    const struct vision_config *c = loader->config;
    const int64_t pixels = 3 * (int64_t)c->patch * c->patch;
    char name[TENSOR_NAME_MAX];
    struct tensor tensor;
    int rc = 0;
    if (c->frames == 1)
        return load_vision_parts(loader, PART_PATCH, 1, 0, c->width, pixels, &loader->to->patch);
    float *sums = NULL; /* no larger than the first tensor */
    const int tensors = c->gguf ? c->frames : 1;
    for (int i = 0; i < tensors && !rc; i++) {
        name_part(loader, PART_PATCH, 0, i ? "weight.1" : "weight", name);
        rc = find_part(loader, name, c->width, pixels * c->frames / tensors, &tensor);
        if (!rc) rc = refuse_blocks(loader, name, &tensor);
        if (!rc && !sums) sums = mem_must_alloc((size_t)(c->width * pixels), sizeof *sums);
        if (!rc) add_frames(&tensor, c, c->frames / tensors, sums);
    }
    for (int64_t i = 0; i < c->width * pixels && !rc; i++)
        if (!isfinite(sums[i]))
            rc = fault_set(loader->fault, ERR_INVALID, name, "has a number that is not finite");
    const struct kern_matrix matrix = {
        .data = sums, .dtype = KERN_F32, .rows = c->width, .cols = pixels};
    if (!rc && loader->team)
        rc = loader->kern->ops->weight_load(loader->kern, &matrix, 1, KERN_SHARD_NONE,
                                            &loader->to->patch, loader->fault);
    mem_free(sums);
    return rc;
}

/* Loads a matrix whose file has `blocks` matrices of rows x cols numbers, each of which is wanted
 * with rows and columns exchanged. */
static int load_turned(struct vision_loader *loader, enum part part, int blocks, int rows, int cols,
                       const struct kern_matrix *shape, struct kern_weight **out) {
    const size_t in = (size_t)rows, wide = (size_t)cols;
    char name[TENSOR_NAME_MAX];
    struct tensor tensor;
    name_part(loader, part, 0, "weight", name);
    int rc = blocks > 1 ? find_part(loader, name, blocks, in * wide, &tensor)
                        : find_part(loader, name, rows, cols, &tensor);
    if (!rc) rc = refuse_blocks(loader, name, &tensor);
    if (rc || !loader->team) return rc;
    float *row = mem_must_alloc(wide, sizeof *row),
          *host = mem_must_alloc((size_t)blocks * in * wide, sizeof *host), *to = host;
    for (int block = 0; block < blocks; block++, to += in * wide)
        for (size_t i = 0; i < in && !rc; i++) {
            CHECK(tensor_read_floats(&tensor, ((size_t)block * in + i) * wide, wide, row));
            for (size_t k = 0; k < wide; k++) {
                to[k * in + i] = row[k];
                if (!isfinite(row[k]))
                    rc = fault_set(loader->fault, ERR_INVALID, name,
                                   "has a number that is not finite");
            }
        }
    struct kern_matrix matrix = *shape;
    matrix.data = host;
    if (!rc)
        rc = loader->kern->ops->weight_load(loader->kern, &matrix, 1, KERN_SHARD_NONE, out,
                                            loader->fault);
    mem_free(row);
    mem_free(host);
    return rc;
}

static int load_projection(struct vision_loader *loader, struct vision_merger *merger) {
    const struct vision_config *c = loader->config;
    const struct kern_matrix shape = {.dtype = KERN_F32, .rows = c->text_width, .cols = c->width};
    return load_turned(loader, PART_PROJECTION, 1, c->width, c->text_width, &shape, &merger->last);
}

/* torch's unfold puts all patches' first numbers in front of their second ones. */
static int load_join(struct vision_loader *loader, struct vision_merger *merger) {
    const struct vision_config *c = loader->config;
    const int each = c->merge * c->merge;
    const struct kern_matrix shape = {
        .dtype = KERN_F32, .rows = c->width, .cols = (int64_t)each * c->width};
    return load_turned(loader, PART_JOIN, c->width, c->width, each, &shape, &merger->join);
}

static int load_table(struct vision_loader *loader) {
    const struct vision_config *c = loader->config;
    const size_t rows = (size_t)c->table_side * (size_t)c->table_side,
                 count = rows * (size_t)c->width;
    char name[TENSOR_NAME_MAX];
    struct tensor tensor;
    if (!rows) return 0;
    name_part(loader, PART_PLACES, 0, "weight", name);
    int rc = find_part(loader, name, (int64_t)rows, c->width, &tensor);
    if (!rc) rc = refuse_blocks(loader, name, &tensor);
    if (rc || !loader->team) return rc;
    float *table = mem_must_alloc(count, sizeof *table);
    loader->to->table = table;
    CHECK(tensor_read_floats(&tensor, 0, count, table));
    for (size_t i = 0; i < count; i++)
        if (!isfinite(table[i]))
            return fault_set(loader->fault, ERR_INVALID, name, "has a number that is not finite");
    return 0;
}

static int load_norm(struct vision_loader *loader, enum part part, int number, int width,
                     float **norm, float **bias) {
    int rc = load_vectors(loader, part, 1, number, "weight", width, norm);
    return rc || loader->config->rms ? rc
                                     : load_vectors(loader, part, 1, number, "bias", width, bias);
}

/* A product of `count` parts that are joined by rows. `bias` NULL: it has none. */
static int load_product(struct vision_loader *loader, enum part first, int count, int number,
                        int rows, int cols, struct kern_weight **weight, float **bias) {
    int rc = load_vision_parts(loader, first, count, number, rows, cols, weight);
    return rc || !bias ? rc : load_vectors(loader, first, count, number, "bias", rows, bias);
}

static int load_layer_product(struct vision_loader *loader, enum part first, int count, int layer,
                              int rows, int cols, struct kern_weight **weight, float **bias) {
    return load_product(loader, first, count, layer, rows, cols, weight,
                        loader->config->layer_bias ? bias : NULL);
}

/* Older GGUF files have the names of both matrices of a network exchanged. */
static bool is_exchanged(const struct vision_loader *loader, int layer) {
    const struct vision_config *c = loader->config;
    char name[TENSOR_NAME_MAX];
    name_part(loader, PART_UP, layer, "weight", name);
    const struct tensor *up = weights_find(loader->weights, name);
    return c->gguf && !c->gated && up && up->dims == 2 && up->shape[0] == c->width &&
           up->shape[1] == c->ff && c->ff != c->width;
}

static int load_vision_layer(struct vision_loader *loader, int at) {
    const struct vision_config *c = loader->config;
    struct vision_layer *layer = &loader->to->layers[at];
    const int width = c->width;
    int rc =
        load_norm(loader, PART_ATTN_NORM, at, width, &layer->attn_norm, &layer->attn_norm_bias);
    const bool joined = has_vision_part(loader, PART_QKV, at, "weight") || !part_name(c, PART_Q);
    if (!rc && joined)
        rc = load_layer_product(loader, PART_QKV, 1, at, 3 * width, width, &layer->qkv,
                                &layer->qkv_bias);
    if (!rc && !joined)
        rc = load_layer_product(loader, PART_Q, 3, at, width, width, &layer->qkv, &layer->qkv_bias);
    if (!rc)
        rc = load_layer_product(loader, PART_O, 1, at, width, width, &layer->o, &layer->o_bias);
    if (!rc) rc = load_norm(loader, PART_FF_NORM, at, width, &layer->ff_norm, &layer->ff_norm_bias);
    const bool exchanged = is_exchanged(loader, at);
    const enum part first = c->gated ? PART_GATE : exchanged ? PART_DOWN : PART_UP;
    if (!rc)
        rc = load_layer_product(loader, first, c->gated ? 2 : 1, at, c->ff, width, &layer->up,
                                &layer->up_bias);
    if (!rc)
        rc = load_layer_product(loader, exchanged ? PART_UP : PART_DOWN, 1, at, width, c->ff,
                                &layer->down, &layer->down_bias);
    return rc;
}

/* LLaVA's projector. Its products have biases in files that say so; those of Mistral Small 3.1 have
 * none, and a product in front of them. */
static int load_projector(struct vision_loader *loader, struct vision_merger *merger) {
    const struct vision_config *c = loader->config;
    const bool joins = c->merge > 1 || has_vision_part(loader, PART_JOIN, 0, "weight"),
               biased = has_vision_part(loader, PART_CONNECTOR_FIRST, 0, "bias");
    int rc = joins ? load_norm(loader, PART_CONNECTOR_NORM, 0, c->width, &merger->norm, NULL) : 0;
    if (!rc && joins) rc = load_join(loader, merger);
    if (!rc)
        rc = load_product(loader, PART_CONNECTOR_FIRST, 1, 0, c->text_width, c->width,
                          &merger->first, biased ? &merger->first_bias : NULL);
    if (!rc)
        rc = load_product(loader, PART_CONNECTOR_LAST, 1, 0, c->text_width, c->text_width,
                          &merger->last, biased ? &merger->last_bias : NULL);
    return rc;
}

/* The connector, or merger `deep` - 1 of those in between. */
static int load_merger(struct vision_loader *loader, int deep) {
    const struct vision_config *c = loader->config;
    struct vision_merger *merger = &loader->to->mergers[deep];
    const int joined = c->merge * c->merge * c->width;
    /* Files number the mergers in between by their layers, or from 0. */
    const int number = !deep ? 0 : c->gguf ? c->deep_layers[deep - 1] : deep - 1;
    const int behind = deep ? PART_DEEP_NORM - PART_CONNECTOR_NORM : 0;
    const enum part first = (enum part)(PART_CONNECTOR_FIRST + behind),
                    last = (enum part)(PART_CONNECTOR_LAST + behind);
    if (c->projects) return load_projector(loader, merger);
    int rc = load_norm(loader, (enum part)(PART_CONNECTOR_NORM + behind), number,
                       deep ? joined : c->width, &merger->norm, &merger->norm_bias);
    if (!rc && c->pools) {
        rc = load_vectors(loader, PART_POOL_NORM, 1, 0, "weight", c->width, &merger->pool_norm);
        return rc ? rc : load_projection(loader, merger);
    }
    if (!rc && !c->merger_products)
        return load_vision_parts(loader, last, 1, number, c->text_width, joined, &merger->last);
    if (!rc)
        rc = load_product(loader, first, 1, number, joined, joined, &merger->first,
                          &merger->first_bias);
    if (!rc)
        rc = load_product(loader, last, 1, number, c->text_width, joined, &merger->last,
                          &merger->last_bias);
    return rc;
}

static int load_ones(struct vision_loader *loader) {
    const struct vision_config *c = loader->config;
    const int joined = c->merge * c->merge * c->width;
    const int most = c->ff > joined ? c->ff : joined;
    const size_t count = (size_t)(c->projects && c->text_width > most ? c->text_width : most);
    if (!loader->team) return 0;
    float *host = mem_must_alloc(count, sizeof *host);
    for (size_t i = 0; i < count; i++) host[i] = 1;
    int rc = give_floats(loader, "model", host, count, &loader->to->ones);
    mem_free(host);
    return rc;
}

/* ---- All ---- */

/* The numbers that the weights are used with. */
static void add_config(struct sha256_stream *sum, const struct vision_config *c) {
    const int32_t sizes[] = {c->layers,     c->width,      c->ff,         c->heads,
                             c->patch,      c->table_side, c->merge,      c->frames,
                             c->window,     c->deep,       c->rms,        c->gated,
                             c->activation, c->blends,     c->text_width, c->pools};
    float values[3][256];
    picture_fill_values(&c->form, values);
    sha256_add(sum, sizes, sizeof sizes);
    sha256_add(sum, &c->eps, sizeof c->eps);
    sha256_add(sum, &c->theta, sizeof c->theta);
    sha256_add(sum, c->full, sizeof c->full);
    sha256_add(sum, c->deep_layers, sizeof c->deep_layers);
    sha256_add(sum, values, sizeof values);
    if (c->projects) sha256_add(sum, &c->norm_eps, sizeof c->norm_eps);
}

/* Puts pairs of numbers that rotate, which lie side by side in the file, half a head apart. */
static void make_pair_order(struct vision_loader *loader) {
    const struct vision_config *c = loader->config;
    const int head = c->width / c->heads;
    if (!c->gguf || !c->permuted) return;
    loader->order = mem_must_alloc((size_t)head, sizeof *loader->order);
    for (int i = 0; i < head; i++) loader->order[i] = i % (head / 2) * 2 + i / (head / 2);
}

int vision_weights_load(struct kern *kern, const struct vision_config *config,
                        const struct weights *weights, const struct vision_options *options,
                        struct vision_weights *out, struct fault *fault) {
    struct vision_loader loader = {
        .kern = kern, .config = config, .to = out, .weights = weights, .fault = fault};
    if (!options->check_only && cpu_team_open(options->threads, &loader.team))
        return fault_set(fault, ERR_NOMEM, "threads", "cannot start the threads that load weights");
    sha256_begin(&loader.sum);
    add_config(&loader.sum, config);
    out->layers = mem_must_alloc((size_t)config->layers, sizeof *out->layers);
    make_pair_order(&loader);
    int rc = load_patch(&loader);
    if (!rc && config->patch_bias)
        rc = load_vectors(&loader, PART_PATCH, 1, 0, "bias", config->width, &out->patch_bias);
    if (!rc && config->patch_norm)
        rc =
            load_vectors(&loader, PART_PATCH_NORM, 1, 0, "weight", config->width, &out->patch_norm);
    if (!rc) rc = load_table(&loader);
    for (int i = 0; i < config->layers && !rc; i++) rc = load_vision_layer(&loader, i);
    for (int deep = 0; deep <= config->deep && !rc; deep++) rc = load_merger(&loader, deep);
    if (!rc) rc = load_ones(&loader);
    sha256_end(&loader.sum, out->identity);
    cpu_team_close(loader.team);
    mem_free(loader.order);
    return rc;
}

/* ---- Closing ---- */

static void free_vector(struct kern *kern, float *vector) {
    if (vector) kern->ops->mem_free(kern, vector);
}

static void free_weight(struct kern *kern, struct kern_weight *weight) {
    if (weight) kern->ops->weight_free(kern, weight);
}

static void close_vision_layer(struct kern *kern, const struct vision_layer *layer) {
    float *vectors[] = {layer->attn_norm, layer->attn_norm_bias, layer->qkv_bias, layer->o_bias,
                        layer->ff_norm,   layer->ff_norm_bias,   layer->up_bias,  layer->down_bias};
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) free_vector(kern, vectors[i]);
    free_weight(kern, layer->qkv);
    free_weight(kern, layer->o);
    free_weight(kern, layer->up);
    free_weight(kern, layer->down);
}

static void close_merger(struct kern *kern, const struct vision_merger *merger) {
    float *vectors[] = {merger->norm, merger->norm_bias, merger->pool_norm, merger->first_bias,
                        merger->last_bias};
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) free_vector(kern, vectors[i]);
    free_weight(kern, merger->join);
    free_weight(kern, merger->first);
    free_weight(kern, merger->last);
}

void vision_weights_close(struct kern *kern, const struct vision_config *config,
                          struct vision_weights *weights) {
    free_weight(kern, weights->patch);
    free_vector(kern, weights->patch_bias);
    free_vector(kern, weights->patch_norm);
    free_vector(kern, weights->ones);
    for (int i = 0; weights->layers && i < config->layers; i++)
        close_vision_layer(kern, &weights->layers[i]);
    for (int deep = 0; deep <= config->deep; deep++) close_merger(kern, &weights->mergers[deep]);
    mem_free(weights->layers);
    mem_free(weights->table);
}
