/* Encoders of pictures: opening, and the work of a tile. */
#include "model/vision.h"

#include <math.h>
#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "model/vision_weights.h"
#include "model/weights.h"

/* Multiplications of a part: 10 to 20 ms on two cores, which is a step of a small model. Parts of
 * fewer than PART_BLOCK rows would read the weights too often. */
#define VISION_PART_COST ((int64_t)1 << 29)
#define PART_BLOCK       32
/* Rows of the memory that a part needs beside the tile's own: a window is never parted. */
#define PART_ROWS_MAX VISION_WINDOW_MAX

/* Backend memory: of a tile, a row for each patch; of a part, a row for each of its patches. */
struct vision_scratch {
    float *x;            /* [patches, width] */
    float *qkv;          /* [patches, 3 width] */
    float *pixels;       /* [part, 3 patch^2]: all red, all green, all blue ones */
    float *places;       /* [part, width] embeddings of positions */
    float *norm, *heads; /* [part, width] */
    float *up, *ff;      /* [part, ff], up with gates [part, 2 ff] */
    float *rows;         /* [part, text_width] of rows of embeddings */
    float *middle;       /* the same, between two products; NULL without `projects` */
};

/* Work of one call of vision_advance: a stage of a layer for rows [row, row + at most
 * part_rows) of the tile. */
enum vision_stage { STAGE_PATCHES, STAGE_QKV, STAGE_ATTEND, STAGE_FF, STAGE_MERGE, STAGES };

struct vision_part {
    enum vision_stage stage;
    int layer, row;
    int merger; /* in STAGE_MERGE */
};

/* The present tile. Rows of its patches are in the order of windows; in a window, in that of rows
 * of embeddings, whose patches follow each other. Host memory. */
struct vision_tile {
    int rows, columns;         /* patches */
    int patches, tokens;       /* patches, rows of embeddings */
    uint8_t *pixels;           /* [3][height][width] */
    struct kern_place *places; /* [patches] axis 1: row of the patch, axis 2: its column */
    int32_t *order;            /* [tokens] where a row of embeddings belongs */
    int32_t *picked;           /* [patches] scratch: one patch of each row of embeddings */
    int32_t *ends;             /* [windows] behind the last patch of each window */
    int windows;
};

struct vision {
    struct kern *kern;
    struct vision_config config;
    struct vision_weights own; /* nothing where another encoder's weights are used */
    const struct vision_weights *weights;
    size_t step_bytes;
    int patches_max;    /* patches of a tile, at most */
    int rows_max;       /* patches of a part, at most */
    float *frequencies; /* [head_dim / 2]; NULL: patches are not rotated */
    uint8_t *axes;      /* [head_dim / 2] */
    struct vision_scratch scratch;
    float values[3][256]; /* picture_fill_values */
    float *staging;       /* host memory of a part: [part, the widest of pixels, places, rows] */
    struct vision_tile tile;
    struct vision_part part; /* the present tile's next one */
    int64_t part_cost;       /* multiplications of a part */
};

static int patch_pixels(const struct vision_config *c) {
    return 3 * c->patch * c->patch;
}

static int max_int(int a, int b) {
    return a > b ? a : b;
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
                                       .max_positions = vision->patches_max,
                                       .rows_max = vision->patches_max};
    vision->kern->ops->cache_info(&cache, info);
    const int64_t each = (vision->patches_max + info->page_slots - 1) / info->page_slots;
    cache.pages = c->heads * (each + 1);
    return cache;
}

/* Pairs of a head rotate by the patch's row, the second half of them by its column. Sources:
 * transformers, Qwen2_5_VisionRotaryEmbedding, PixtralVisionRotaryEmbedding. */
static void fill_frequencies(struct vision *vision) {
    const struct vision_config *c = &vision->config;
    const int half = c->width / c->heads / 2, each = half / 2;
    if (c->theta == 0) return;
    vision->frequencies = mem_must_alloc((size_t)half, sizeof *vision->frequencies);
    vision->axes = mem_must_alloc((size_t)half, sizeof *vision->axes);
    for (int i = 0; i < half; i++) {
        const int step = 2 * (i % each) + (c->between && i >= each);
        vision->frequencies[i] = 1 / powf(c->theta, (float)step / (float)half);
        vision->axes[i] = i < each ? 1 : 2;
    }
}

static size_t staging_numbers(const struct vision *vision) {
    const struct vision_config *c = &vision->config;
    const int widest = max_int(patch_pixels(c), max_int(c->width, c->text_width));
    return (size_t)vision->rows_max * (size_t)widest;
}

/* Bytes of a tile in host memory. */
static size_t host_bytes(const struct vision *vision) {
    const struct vision_tile *tile = &vision->tile;
    const size_t each = (size_t)patch_pixels(&vision->config) + sizeof *tile->places +
                        sizeof *tile->order + sizeof *tile->picked + sizeof *tile->ends;
    return (size_t)vision->patches_max * each + staging_numbers(vision) * sizeof(float);
}

static void open_host(struct vision *vision) {
    const struct vision_config *c = &vision->config;
    struct vision_tile *tile = &vision->tile;
    const size_t patches = (size_t)vision->patches_max;
    picture_fill_values(&c->form, vision->values);
    fill_frequencies(vision);
    vision->staging = mem_must_alloc(staging_numbers(vision), sizeof(float));
    tile->pixels = mem_must_alloc(patches, (size_t)patch_pixels(c));
    tile->places = mem_must_alloc(patches, sizeof *tile->places);
    tile->order = mem_must_alloc(patches, sizeof *tile->order);
    tile->picked = mem_must_alloc(patches, sizeof *tile->picked);
    tile->ends = mem_must_alloc(patches, sizeof *tile->ends);
}

/* With `check_only` counts the memory alone. */
static int open_scratch(struct vision *vision, bool check_only, struct fault *fault) {
    const struct vision_config *c = &vision->config;
    struct vision_scratch *s = &vision->scratch;
    struct kern *kern = vision->kern;
    vision->patches_max = c->form.tile_tokens_max * c->merge * c->merge;
    const int patches = vision->patches_max,
              part = patches < PART_ROWS_MAX ? patches : PART_ROWS_MAX;
    vision->rows_max = part;
    const struct {
        float **out;
        int rows, width;
    } arrays[] = {
        {&s->x, patches, c->width},
        {&s->qkv, patches, 3 * c->width},
        {&s->pixels, part, patch_pixels(c)},
        {&s->places, part, c->width},
        {&s->norm, part, c->width},
        {&s->heads, part, c->width},
        {&s->up, part, (c->gated ? 2 : 1) * c->ff},
        {&s->ff, part, c->ff},
        {&s->rows, part, c->text_width},
        {&s->middle, c->projects ? part : 0, c->text_width},
    };
    struct kern_cache_info info = {0};
    const struct kern_cache_options cache = cache_of(vision, &info);
    vision->step_bytes = (size_t)(cache.pages * info.page_bytes) + host_bytes(vision);
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        const size_t bytes = (size_t)arrays[i].rows * (size_t)arrays[i].width * sizeof(float);
        vision->step_bytes += bytes;
        if (check_only || !bytes) continue;
        *arrays[i].out = kern->ops->mem_alloc(kern, bytes);
        if (!*arrays[i].out)
            return fault_set(fault, ERR_NOMEM, "mmproj", "no memory to encode a tile of %d patches",
                             patches);
    }
    if (check_only) return 0;
    open_host(vision);
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
    if (!rc && weights)
        rc = vision_weights_load(vision->kern, &vision->config, weights, options, &vision->own,
                                 fault);
    weights_close(weights);
    vision->weights = &vision->own;
    return rc;
}

static int borrow_vision(struct vision *vision, const struct vision *owner, struct fault *fault) {
    int rc = vision->kern->ops->borrow(vision->kern, owner->kern);
    if (rc) return fault_set(fault, rc, "mmproj", "its weights cannot be shared");
    vision->config = owner->config;
    vision->weights = owner->weights;
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

void vision_close(struct vision *vision) {
    if (!vision) return;
    const struct vision_scratch *s = &vision->scratch;
    float *scratch[] = {s->x,     s->qkv, s->pixels, s->places, s->norm,
                        s->heads, s->up,  s->ff,     s->rows,   s->middle};
    for (size_t i = 0; i < sizeof scratch / sizeof *scratch; i++)
        if (scratch[i]) vision->kern->ops->mem_free(vision->kern, scratch[i]);
    vision_weights_close(vision->kern, &vision->config, &vision->own);
    mem_free(vision->frequencies);
    mem_free(vision->axes);
    mem_free(vision->staging);
    mem_free(vision->tile.pixels);
    mem_free(vision->tile.places);
    mem_free(vision->tile.order);
    mem_free(vision->tile.picked);
    mem_free(vision->tile.ends);
    mem_free(vision);
}

const struct vision_config *vision_config(const struct vision *vision) {
    return &vision->config;
}
const uint8_t *vision_identity(const struct vision *vision) {
    return vision->weights->identity;
}
size_t vision_weight_bytes(const struct vision *vision) {
    return vision->weights->bytes;
}
size_t vision_step_bytes(const struct vision *vision) {
    return vision->step_bytes;
}

/* ---- A tile ---- */

/* Adds the patches of a row of embeddings. */
static void order_token_patches(struct vision *vision, int row, int column) {
    const int merge = vision->config.merge;
    struct vision_tile *tile = &vision->tile;
    for (int i = 0; i < merge * merge; i++)
        tile->places[tile->patches++] =
            (struct kern_place){{0, row * merge + i / merge, column * merge + i % merge}};
    tile->order[tile->tokens++] = row * (tile->columns / merge) + column;
}

/* Puts the patches in order: window after window, those at the right and at the bottom cut off. */
static void order_patches(struct vision *vision) {
    const struct vision_config *c = &vision->config;
    struct vision_tile *tile = &vision->tile;
    const int rows = tile->rows / c->merge, columns = tile->columns / c->merge,
              side = c->window ? c->window : max_int(rows, columns);
    tile->patches = tile->tokens = tile->windows = 0;
    for (int top = 0; top < rows; top += side)
        for (int left = 0; left < columns; left += side) {
            for (int y = top; y < top + side && y < rows; y++)
                for (int x = left; x < left + side && x < columns; x++)
                    order_token_patches(vision, y, x);
            tile->ends[tile->windows++] = tile->patches;
        }
}

int vision_begin(struct vision *vision, const struct picture *picture, int at) {
    const struct vision_config *c = &vision->config;
    struct vision_tile *tile = &vision->tile;
    const size_t bytes = 3 * (size_t)picture->tile_width * (size_t)picture->tile_height;
    CHECK(picture_is_of_form(picture, &c->form) && at >= 0 && at < picture->tiles);
    if (vision->part.stage == STAGE_ATTEND)
        vision->kern->ops->release(vision->kern, 0); /* entries of a tile that was left */
    memcpy(tile->pixels, picture->pixels + (size_t)at * bytes, bytes);
    tile->rows = picture->tile_height / c->patch;
    tile->columns = picture->tile_width / c->patch;
    order_patches(vision);
    vision->part = (struct vision_part){0};
    return 0;
}

/* Returns row `row` of an array with `width` numbers a row. */
static float *array_row(float *array, int row, int width) {
    return array + (size_t)row * (size_t)width;
}

static void norm_patches(const struct vision *vision, float *y, const float *x, const float *weight,
                         const float *bias, int rows, int dim) {
    const struct vision_config *c = &vision->config;
    const struct kern_ops *ops = vision->kern->ops;
    const bool before_products = c->projects && vision->part.stage == STAGE_MERGE;
    if (c->rms)
        ops->rms_norm(vision->kern, y, x, weight, rows, dim,
                      before_products ? c->norm_eps : c->eps);
    else
        ops->layer_norm(vision->kern, y, x, weight, bias, rows, dim, c->eps);
}

/* ---- Patches ---- */

/* Makes a row of the pixels of a patch. */
static void cut_patch(const struct vision *vision, const struct kern_place *place, float *to) {
    const int side = vision->config.patch;
    const struct vision_tile *tile = &vision->tile;
    const size_t width = (size_t)tile->columns * (size_t)side,
                 height = (size_t)tile->rows * (size_t)side;
    for (size_t channel = 0; channel < 3; channel++)
        for (int y = 0; y < side; y++) {
            const size_t row = channel * height + (size_t)(place->axis[1] * side + y);
            const uint8_t *from = tile->pixels + row * width + (size_t)(place->axis[2] * side);
            for (int x = 0; x < side; x++) *to++ = vision->values[channel][from[x]];
        }
}

/* A place in the table of positions between two of its rows, or columns. */
struct table_place {
    int first, second;
    float part; /* the second one's share */
};

static struct table_place table_place(const struct vision_config *c, int at, int side) {
    const float most = (float)(c->table_side - 1),
                place = (float)at * most / (float)max_int(side - 1, 1);
    const int first = c->blends ? (int)place : vision_position(c, at, side);
    return (struct table_place){.first = first,
                                .second = first + 1 < c->table_side ? first + 1 : first,
                                .part = c->blends ? place - (float)first : 0};
}

/* The embedding of a patch's position. */
static void fill_place(const struct vision *vision, const struct kern_place *place, float *to) {
    const struct vision_config *c = &vision->config;
    const struct table_place y = table_place(c, place->axis[1], vision->tile.rows),
                             x = table_place(c, place->axis[2], vision->tile.columns);
    const float *rows[4], shares[4] = {(1 - y.part) * (1 - x.part), (1 - y.part) * x.part,
                                       y.part * (1 - x.part), y.part * x.part};
    for (int i = 0; i < 4; i++) {
        const int row = i < 2 ? y.first : y.second, column = i % 2 ? x.second : x.first;
        rows[i] = array_row(vision->weights->table, row * c->table_side + column, c->width);
    }
    if (!c->blends) {
        memcpy(to, rows[0], (size_t)c->width * sizeof *to);
        return;
    }
    for (int k = 0; k < c->width; k++)
        to[k] = rows[0][k] * shares[0] + rows[1][k] * shares[1] + rows[2][k] * shares[2] +
                rows[3][k] * shares[3];
}

static int upload_rows(struct vision *vision, float *to, int rows, int width) {
    return vision->kern->ops->upload(vision->kern, to, vision->staging,
                                     (size_t)rows * (size_t)width * sizeof *to);
}

static int embed_patches(struct vision *vision, float *out, int row, int rows) {
    const struct vision_config *c = &vision->config;
    const struct vision_scratch *s = &vision->scratch;
    const struct kern_place *places = vision->tile.places + row;
    struct kern *kern = vision->kern;
    float *x = array_row(s->x, row, c->width);
    (void)out;
    for (int i = 0; i < rows; i++)
        cut_patch(vision, &places[i], array_row(vision->staging, i, patch_pixels(c)));
    int rc = upload_rows(vision, s->pixels, rows, patch_pixels(c));
    if (rc) return rc;
    kern->ops->matmul(kern, x, s->pixels, vision->weights->patch, vision->weights->patch_bias, rows,
                      KERN_SET);
    if (c->patch_norm)
        norm_patches(vision, x, x, vision->weights->patch_norm, NULL, rows, c->width);
    if (!c->table_side) return 0;
    for (int i = 0; i < rows; i++)
        fill_place(vision, &places[i], array_row(vision->staging, i, c->width));
    rc = upload_rows(vision, s->places, rows, c->width);
    if (!rc) kern->ops->add(kern, x, s->places, rows, c->width);
    return rc;
}

/* ---- Layers ---- */

static bool has_windows(const struct vision *vision) {
    return vision->config.window && !vision->config.full[vision->part.layer];
}

static struct kern_batch batch_of(const struct kern_span *span) {
    return (struct kern_batch){.spans = span, .rows = span->count, .span_count = 1};
}

/* Writes keys and values of `count` patches from `row` into the cache, which is empty. */
static int write_patches(struct vision *vision, int row, int count) {
    const struct kern_span span = {.count = count};
    const struct kern_batch batch = batch_of(&span);
    struct kern *kern = vision->kern;
    int rc = kern->ops->begin_step(kern, &batch);
    if (!rc)
        kern->ops->write_kv(kern, 0, array_row(vision->scratch.qkv, row, 3 * vision->config.width),
                            NULL, &batch);
    return rc;
}

static void rotate_patches(struct vision *vision, int row, int rows) {
    const struct kern_span span = {.count = rows};
    struct kern_batch batch = batch_of(&span);
    const struct kern_rope rope = {
        .inv_freq = vision->frequencies, .axes = vision->axes, .scale = 1};
    if (!vision->frequencies) return;
    batch.places = vision->tile.places + row;
    vision->kern->ops->qk_rope(vision->kern,
                               array_row(vision->scratch.qkv, row, 3 * vision->config.width), NULL,
                               NULL, 0, &rope, &batch);
}

static int compute_qkv(struct vision *vision, float *out, int row, int rows) {
    const struct vision_config *c = &vision->config;
    const struct vision_scratch *s = &vision->scratch;
    const struct vision_layer *layer = &vision->weights->layers[vision->part.layer];
    (void)out;
    norm_patches(vision, s->norm, array_row(s->x, row, c->width), layer->attn_norm,
                 layer->attn_norm_bias, rows, c->width);
    vision->kern->ops->matmul(vision->kern, array_row(s->qkv, row, 3 * c->width), s->norm,
                              layer->qkv, layer->qkv_bias, rows, KERN_SET);
    rotate_patches(vision, row, rows);
    const bool last = row + rows == vision->tile.patches;
    return last && !has_windows(vision) ? write_patches(vision, 0, row + rows) : 0;
}

/* Attention of patches [row, row + rows), whose first is number `pos` of the cache's entries, to
 * all of these. */
static void attend_rows(struct vision *vision, float *heads, int row, int rows, int pos) {
    const struct vision_config *c = &vision->config;
    const struct kern_span span = {.count = rows, .pos = pos};
    const struct kern_batch batch = batch_of(&span);
    const int head_dim = c->width / c->heads;
    const struct kern_attend_options options = {.scale = 1 / sqrtf((float)head_dim),
                                                .both_ways = true};
    vision->kern->ops->attend(vision->kern, 0, heads,
                              array_row(vision->scratch.qkv, row, 3 * c->width), &batch, &options);
}

static int release_patches(struct vision *vision) {
    int rc = vision->kern->ops->sync(vision->kern);
    vision->kern->ops->release(vision->kern, 0);
    return rc;
}

/* Returns the number of the window that a patch is in. */
static int window_at(const struct vision_tile *tile, int row) {
    int low = 0, high = tile->windows;
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (tile->ends[middle] > row)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* The cache has the entries of one window at a time. */
static int attend_windows(struct vision *vision, int row, int rows) {
    const struct vision_tile *tile = &vision->tile;
    int rc = 0;
    for (int at = row, window = window_at(tile, row); at < row + rows && !rc; window++) {
        const int count = tile->ends[window] - at;
        rc = write_patches(vision, at, count);
        if (rc) break;
        attend_rows(vision, array_row(vision->scratch.heads, at - row, vision->config.width), at,
                    count, 0);
        rc = release_patches(vision);
        at += count;
    }
    return rc;
}

static int attend_patches(struct vision *vision, float *out, int row, int rows) {
    const struct vision_config *c = &vision->config;
    const struct vision_scratch *s = &vision->scratch;
    const struct vision_layer *layer = &vision->weights->layers[vision->part.layer];
    const bool windows = has_windows(vision);
    int rc = windows ? attend_windows(vision, row, rows) : 0;
    (void)out;
    if (rc) return rc;
    if (!windows) attend_rows(vision, s->heads, row, rows, row);
    vision->kern->ops->matmul(vision->kern, array_row(s->x, row, c->width), s->heads, layer->o,
                              layer->o_bias, rows, KERN_ADD);
    return windows || row + rows < vision->tile.patches ? 0 : release_patches(vision);
}

static int feed_forward(struct vision *vision, float *out, int row, int rows) {
    const struct vision_config *c = &vision->config;
    const struct vision_scratch *s = &vision->scratch;
    const struct vision_layer *layer = &vision->weights->layers[vision->part.layer];
    struct kern *kern = vision->kern;
    float *x = array_row(s->x, row, c->width);
    (void)out;
    norm_patches(vision, s->norm, x, layer->ff_norm, layer->ff_norm_bias, rows, c->width);
    kern->ops->matmul(kern, s->up, s->norm, layer->up, layer->up_bias, rows, KERN_SET);
    if (c->gated)
        kern->ops->glu(kern, s->ff, s->up, rows, c->ff, c->activation);
    else
        kern->ops->glu_apart(kern, s->ff, s->up, vision->weights->ones, 0, rows, c->ff,
                             c->activation);
    kern->ops->matmul(kern, x, s->ff, layer->down, layer->down_bias, rows, KERN_ADD);
    return 0;
}

/* ---- Mergers ---- */

/* Puts the staged rows of embeddings into their places in the tile's. */
static void put_rows(const struct vision *vision, float *out, int first, int count) {
    const struct vision_config *c = &vision->config;
    float *to = array_row(out, vision->part.merger, c->text_width);
    for (int i = 0; i < count; i++)
        memcpy(array_row(to, vision->tile.order[first + i], vision_row_width(c)),
               array_row(vision->staging, i, c->text_width), (size_t)c->text_width * sizeof *to);
}

/* The norm of the means of the patches of each row. An RMSNorm of sums is that of means where its
 * eps grows with the square of their number. */
static void pool_patches(struct vision *vision, const float *norm, int count) {
    const struct vision_config *c = &vision->config;
    const int each = c->merge * c->merge;
    int32_t *picked = vision->tile.picked;
    struct kern *kern = vision->kern;
    float *sums = vision->scratch.heads, *next = array_row(sums, count, c->width);
    for (int i = 0; i < each; i++) {
        for (int row = 0; row < count; row++) picked[row] = row * each + i;
        kern->ops->gather_rows(kern, i ? next : sums, vision->scratch.norm, picked, count,
                               c->width);
        if (i) kern->ops->add(kern, sums, next, count, c->width);
    }
    kern->ops->rms_norm(kern, sums, sums, norm, count, c->width,
                        c->eps * (float)each * (float)each);
}

/* Returns what LLaVA's projector (arXiv 2310.03744, section 3.3) makes of patches, in Mistral Small
 * 3.1 of the product of all patches of a row: the input of its last product. */
static const float *project_patches(struct vision *vision, const float *x, int rows) {
    const struct vision_config *c = &vision->config;
    const struct vision_scratch *s = &vision->scratch;
    const struct vision_merger *merger = &vision->weights->mergers[0];
    const int count = rows / (c->merge * c->merge);
    struct kern *kern = vision->kern;
    if (merger->join) {
        norm_patches(vision, s->norm, x, merger->norm, NULL, rows, c->width);
        kern->ops->matmul(kern, s->heads, s->norm, merger->join, NULL, count, KERN_SET);
        x = s->heads;
    }
    kern->ops->matmul(kern, s->rows, x, merger->first, merger->first_bias, count, KERN_SET);
    kern->ops->glu_apart(kern, s->middle, s->rows, vision->weights->ones, 0, count, c->text_width,
                         KERN_GELU);
    return s->middle;
}

/* Returns the input of the last product. The connector's norm is that of each patch, those of the
 * others of all patches of a row. */
static const float *join_patches(struct vision *vision, const float *x, int rows) {
    const struct vision_config *c = &vision->config;
    const struct vision_scratch *s = &vision->scratch;
    const struct vision_merger *merger = &vision->weights->mergers[vision->part.merger];
    const int each = c->merge * c->merge, joined = each * c->width, count = rows / each;
    const bool apart = vision->part.merger == 0;
    struct kern *kern = vision->kern;
    norm_patches(vision, s->norm, x, merger->norm, merger->norm_bias, apart ? rows : count,
                 apart ? c->width : joined);
    if (merger->first) {
        kern->ops->matmul(kern, s->heads, s->norm, merger->first, merger->first_bias, count,
                          KERN_SET);
        kern->ops->glu_apart(kern, s->norm, s->heads, vision->weights->ones, 0, count, joined,
                             KERN_GELU);
    }
    if (!merger->pool_norm) return s->norm;
    pool_patches(vision, merger->pool_norm, count);
    return s->heads;
}

static int merge_patches(struct vision *vision, float *out, int row, int rows) {
    const struct vision_config *c = &vision->config;
    const struct vision_scratch *s = &vision->scratch;
    const struct vision_merger *merger = &vision->weights->mergers[vision->part.merger];
    const int each = c->merge * c->merge, count = rows / each;
    const float *x = array_row(s->x, row, c->width);
    struct kern *kern = vision->kern;
    x = c->projects ? project_patches(vision, x, rows) : join_patches(vision, x, rows);
    kern->ops->matmul(kern, s->rows, x, merger->last, merger->last_bias, count, KERN_SET);
    int rc = kern->ops->download(kern, vision->staging, s->rows,
                                 (size_t)count * (size_t)c->text_width * sizeof *out);
    if (!rc) rc = kern->ops->sync(kern);
    if (!rc) put_rows(vision, out, row / each, count);
    return rc;
}

/* ---- Parts ---- */

/* Returns the multiplications of the present stage for one row. */
static int64_t row_cost(const struct vision *vision) {
    const struct vision_config *c = &vision->config;
    const int64_t width = c->width, joined = width * c->merge * c->merge, text = c->text_width;
    const int64_t seen = has_windows(vision) ? (int64_t)c->window * c->window * c->merge * c->merge
                                             : vision->tile.patches;
    switch (vision->part.stage) {
    case STAGE_PATCHES:
        return width * patch_pixels(c);
    case STAGE_QKV:
        return 3 * width * width;
    case STAGE_ATTEND:
        return 2 * width * seen + width * width;
    case STAGE_FF:
        return (c->gated ? 3 : 2) * width * c->ff;
    default:
        if (c->projects) return width * width + text * (width + text) * width / joined;
        return width * (text + (c->merger_products ? joined : 0));
    }
}

/* Returns the patches of whole windows from the present row, at most `most`, at least one window.
 */
static int window_rows(const struct vision *vision, int64_t most) {
    const struct vision_tile *tile = &vision->tile;
    const int row = vision->part.row;
    int window = window_at(tile, row);
    while (window + 1 < tile->windows && tile->ends[window + 1] - row <= most) window++;
    return tile->ends[window] - row;
}

/* Returns the rows of a part: whole blocks, which the kernels of products are fastest with, whole
 * windows, or whole rows of embeddings. */
static int part_rows(const struct vision *vision) {
    const struct vision_config *c = &vision->config;
    const struct vision_part *part = &vision->part;
    const int left = vision->tile.patches - part->row,
              block = part->stage == STAGE_MERGE ? c->merge * c->merge : PART_BLOCK;
    int64_t most = vision->part_cost / row_cost(vision);
    if (most < PART_BLOCK) most = PART_BLOCK;
    if (most > vision->rows_max) most = vision->rows_max;
    if (part->stage == STAGE_ATTEND && has_windows(vision)) return window_rows(vision, most);
    if (left <= most) return left;
    return most < block ? block : (int)most / block * block;
}

/* Returns the number of the merger behind a layer; 0: there is none. */
static int merger_behind(const struct vision_config *c, int layer) {
    for (int i = 0; i < c->deep; i++)
        if (c->deep_layers[i] == layer) return 1 + i;
    return 0;
}

/* Behind the last layer comes the connector, which is merger 0. */
static void begin_stage(struct vision *vision) {
    struct vision_part *part = &vision->part;
    const int merger = merger_behind(&vision->config, part->layer);
    part->row = 0;
    if (part->stage < STAGE_FF) {
        part->stage++;
    } else if (part->stage == STAGE_FF && merger) {
        part->stage = STAGE_MERGE;
        part->merger = merger;
    } else if (part->layer + 1 == vision->config.layers) {
        part->stage = STAGE_MERGE;
        part->merger = 0;
    } else {
        part->layer++;
        part->stage = STAGE_QKV;
    }
}

int vision_advance(struct vision *vision, float *out, bool *done) {
    static int (*const stages[STAGES])(struct vision *, float *out, int row, int rows) = {
        [STAGE_PATCHES] = embed_patches, [STAGE_QKV] = compute_qkv,
        [STAGE_ATTEND] = attend_patches, [STAGE_FF] = feed_forward,
        [STAGE_MERGE] = merge_patches,
    };
    struct vision_part *part = &vision->part;
    const int rows = part_rows(vision);
    int rc = stages[part->stage](vision, out, part->row, rows);
    part->row += rows;
    *done = false;
    if (rc || part->row < vision->tile.patches) return rc;
    *done = part->stage == STAGE_MERGE && part->merger == 0;
    if (!*done) begin_stage(vision);
    return 0;
}
