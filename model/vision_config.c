/* The configuration of an encoder of pictures, from its files. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "model/json_file.h"
#include "model/vision.h"

#define VISION_EDGE_MAX  4096 /* pixels of a tile's side */
#define VISION_SIDE_MAX  64   /* patches of a tile's side, where all tiles are alike */
#define VISION_MERGE_MAX 16

/* Families: what all of their models have alike. */
static const struct vision_family {
    const char *architecture, *model_type;
    const char *vision_type; /* vision_config.model_type; NULL: whatever it is */
    const char *projector;   /* clip.projector_type */
    enum vision_naming naming;
    enum picture_kind kind;
    enum model_axes axes; /* the text model's */
    bool windows, rotates, between, blends, rms, gated, patch_bias, patch_norm, pools;
    bool merger_products, projects, unbiased, permuted;
    int frames, merge;          /* with `projects`: the default of spatial_merge_size */
    int feature_layer;          /* and that of vision_feature_layer, from behind */
    const char *activation;     /* by its name in config.json, whose default it is */
    const char *other;          /* another one that files may have */
    int min_pixels, max_pixels; /* the published processor's, where files do not say them */
} families[] = {
#define IDEFICS3                                                                                   \
    VISION_IDEFICS3, PICTURE_IDEFICS3, .frames = 1, .patch_bias = true,                            \
                                       .activation = "gelu_pytorch_tanh"
#define QWEN3                                                                                      \
    VISION_QWEN3, PICTURE_SMART, AXES_INTERLEAVED,                                                 \
        .rotates = true, .blends = true, .patch_bias = true, .merger_products = true, .frames = 2, \
        .activation = "gelu_pytorch_tanh", .min_pixels = 256 * 256, .max_pixels = 4096 * 4096
#define PIXTRAL                                                                                    \
    VISION_PIXTRAL, PICTURE_LINES, .rotates = true, .between = true, .rms = true, .gated = true,   \
                                   .patch_norm = true, .merger_products = true, .projects = true,  \
                                   .unbiased = true, .permuted = true, .frames = 1,                \
                                   .activation = "gelu", .other = "silu"
    {"Idefics3ForConditionalGeneration", "idefics3", NULL, "idefics3", IDEFICS3},
    {"SmolVLMForConditionalGeneration", "smolvlm", NULL, NULL, IDEFICS3},
    {"Gemma3ForConditionalGeneration", "gemma3", NULL, "gemma3", VISION_GEMMA3, PICTURE_STRETCHED,
     .frames = 1, .patch_bias = true, .pools = true, .activation = "gelu_pytorch_tanh"},
    {"LlavaForConditionalGeneration", "llava", "pixtral", NULL, PIXTRAL, .merge = 1,
     .feature_layer = -2},
    {"Mistral3ForConditionalGeneration", "mistral3", "pixtral", "pixtral", PIXTRAL, .merge = 2,
     .feature_layer = -1},
    {"Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", NULL, "qwen2.5vl_merger", VISION_QWEN2_5,
     PICTURE_SMART, AXES_APART, .windows = true, .rotates = true, .rms = true, .gated = true,
     .merger_products = true, .frames = 2, .activation = "silu", .min_pixels = 56 * 56,
     .max_pixels = 28 * 28 * 1280},
    {"Qwen3VLForConditionalGeneration", "qwen3_vl", NULL, "qwen3vl_merger", QWEN3},
    {"Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", NULL, NULL, QWEN3},
    {"Qwen3_5ForConditionalGeneration", "qwen3_5", NULL, NULL, QWEN3},
    {"Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", NULL, NULL, QWEN3},
};

static enum kern_activation activation_named(const char *name) {
    return !strcmp(name, "silu") ? KERN_SILU : !strcmp(name, "gelu") ? KERN_GELU : KERN_GELU_TANH;
}

static int refuse(struct fault *fault, const char *field, const char *what) {
    return fault_set(fault, ERR_UNSUPPORTED, field, "%s", what);
}

static void take_family(const struct vision_family *family, struct vision_config *out) {
    out->naming = family->naming;
    out->form.kind = family->kind;
    out->axes = family->axes;
    out->frames = family->frames;
    out->theta = family->rotates ? 10000 : 0;
    out->between = family->between;
    out->blends = family->blends;
    out->rms = family->rms;
    out->gated = family->gated;
    out->patch_bias = family->patch_bias;
    out->pools = out->form.together = family->pools;
    out->patch_norm = family->patch_norm;
    out->layer_bias = !family->unbiased;
    out->merger_products = family->merger_products;
    out->projects = family->projects;
    out->permuted = family->permuted;
    out->activation = activation_named(family->activation);
}

/* ---- Numbers that follow ---- */

static int fill_tokens(struct vision_config *out, struct fault *fault) {
    struct picture_form *form = &out->form;
    const int side = form->tile_edge / out->patch;
    form->token_edge = out->patch * out->merge;
    if (form->kind == PICTURE_SMART) {
        int64_t most = (int64_t)PICTURE_TOKENS_MAX * form->token_edge * form->token_edge;
        if (most > PICTURE_PIXELS_MAX) most = PICTURE_PIXELS_MAX;
        if (form->max_pixels > most) form->max_pixels = (int)most;
        form->tile_tokens_max = picture_smart_tokens(form);
        return 0;
    }
    if (form->kind == PICTURE_LINES) {
        const int most = (int)sqrt(PICTURE_TOKENS_MAX) * form->token_edge;
        if (form->longest_edge > most) form->longest_edge = most;
        const int lines = (form->longest_edge + form->token_edge - 1) / form->token_edge;
        form->tile_tokens_max = lines * lines;
        return 0;
    }
    if (form->tile_edge % out->patch || (out->pools && out->table_side != side))
        return fault_set(fault, ERR_INVALID, "patch_size",
                         "tiles of %d pixels and %d positions in a row cannot be cut into patches "
                         "of %d",
                         form->tile_edge, out->table_side, out->patch);
    if (side > VISION_SIDE_MAX)
        return fault_set(fault, ERR_LIMIT, "patch_size", "%d patches in a row; at most %d", side,
                         VISION_SIDE_MAX);
    if (side % out->merge)
        return fault_set(fault, ERR_INVALID, "scale_factor",
                         "%d patches in a row cannot be joined by %d", side, out->merge);
    form->tile_tokens_max = side / out->merge * (side / out->merge);
    return 0;
}

/* Checks what both kinds of files say, and fills in what follows from it. */
static int fill_sides(struct vision_config *out, struct fault *fault) {
    const int head_dim = out->width / out->heads, even = out->theta != 0 ? 4 : 2;
    if (out->width % out->heads || head_dim % even)
        return fault_set(fault, ERR_INVALID, "hidden_size",
                         "%d numbers in %d heads: expected a multiple of %d for each", out->width,
                         out->heads, even);
    if ((int64_t)out->window * out->window * out->merge * out->merge > VISION_WINDOW_MAX)
        return fault_set(fault, ERR_LIMIT, "window_size", "a window has more than %d patches",
                         VISION_WINDOW_MAX);
    int rc = fill_tokens(out, fault);
    return rc ? rc : picture_check_form(&out->form, fault);
}

int vision_position(const struct vision_config *config, int at, int side) {
    const float step = 1.0f / (float)side, most = 1.0f - 1e-6f;
    const double table = 1.0 / config->table_side;
    float place = (float)at * step;
    int row = 0;
    if (config->pools) return at;
    if (place > most) place = most;
    while (row + 1 < config->table_side && (float)(table + row * table) <= place) row++;
    return row;
}

/* ---- A directory ---- */

static const struct vision_family *find_family(const cJSON *root, struct fault *fault, int *rc) {
    const cJSON *list = json_get(root, "architectures"), *vision = json_get(root, "vision_config");
    const cJSON *encoder = json_get(vision, "model_type");
    const char *architecture = NULL, *type = NULL;
    if (cJSON_IsArray(list) && cJSON_IsString(list->child)) architecture = list->child->valuestring;
    *rc = json_str(root, NULL, "model_type", &type, fault);
    for (size_t i = 0; i < sizeof families / sizeof *families && !*rc; i++) {
        const struct vision_family *family = &families[i];
        if (architecture ? strcmp(architecture, family->architecture) != 0
                         : !type || strcmp(type, family->model_type) != 0)
            continue;
        const bool fits =
            !family->vision_type ||
            (cJSON_IsString(encoder) && !strcmp(encoder->valuestring, family->vision_type));
        return fits ? family : NULL;
    }
    return NULL;
}

/* A number of vision_config by its names in the families, with transformers' defaults. */
struct vision_number {
    const char *name, *qwen;
    int64_t idefics3, gemma3, pixtral, qwen2_5, qwen3, most;
    int *out;
};

static int read_vision_numbers(const cJSON *vision, enum vision_naming naming,
                               const struct vision_number *numbers, size_t count,
                               struct fault *fault) {
    for (size_t i = 0; i < count; i++) {
        const struct vision_number *n = &numbers[i];
        const int64_t presets[] = {[VISION_IDEFICS3] = n->idefics3,
                                   [VISION_GEMMA3] = n->gemma3,
                                   [VISION_PIXTRAL] = n->pixtral,
                                   [VISION_QWEN2_5] = n->qwen2_5,
                                   [VISION_QWEN3] = n->qwen3};
        int64_t value = presets[naming];
        const char *name = naming < VISION_QWEN2_5 ? n->name : n->qwen;
        int rc = name ? json_int(vision, "vision_config", name, 1, n->most, &value, fault) : 0;
        if (rc) return rc;
        *n->out = (int)value;
    }
    return 0;
}

/* Reads the numbers of layers that are listed. `what` gets each, ascending. */
static int read_layers(const cJSON *vision, const char *key, const int *preset, int presets,
                       int layers, int most, int *out, int *count, struct fault *fault) {
    const cJSON *list = json_get(vision, key), *item;
    char field[64];
    snprintf(field, sizeof field, "vision_config.%s", key);
    *count = 0;
    for (int i = 0; !list && i < presets && preset[i] < layers; i++) out[(*count)++] = preset[i];
    if (list && !cJSON_IsArray(list))
        return fault_set(fault, ERR_INVALID, field, "expected a list of layers");
    cJSON_ArrayForEach(item, list) {
        const int before = *count ? out[*count - 1] : -1;
        int64_t layer = 0;
        if (json_node_int(item, before + 1, layers - 1, &layer))
            return fault_set(fault, ERR_INVALID, field, "expected ascending layers below %d",
                             layers);
        if (*count == most)
            return fault_set(fault, ERR_LIMIT, field, "expected at most %d layers", most);
        out[(*count)++] = (int)layer;
    }
    return 0;
}

/* transformers, Qwen2_5_VLVisionConfig: the defaults. */
static int read_vision_windows(const cJSON *vision, struct vision_config *out,
                               struct fault *fault) {
    static const int preset[] = {7, 15, 23, 31};
    int full[VISION_LAYERS_MAX], count;
    int64_t window = 112;
    int rc = json_int(vision, "vision_config", "window_size", 1, 1 << 16, &window, fault);
    if (!rc)
        rc = read_layers(vision, "fullatt_block_indexes", preset, 4, out->layers, VISION_LAYERS_MAX,
                         full, &count, fault);
    if (rc) return rc;
    out->window = (int)window / out->merge / out->patch;
    if (out->window < 1)
        return fault_set(fault, ERR_INVALID, "vision_config.window_size",
                         "a window of %d pixels has no row of embeddings", (int)window);
    for (int i = 0; i < count; i++) out->full[full[i]] = true;
    return 0;
}

/* transformers, Qwen3VLVisionConfig: the defaults. Qwen3.5's has no merger in between. */
static int read_vision_positions(const cJSON *vision, const struct vision_family *family,
                                 struct vision_config *out, struct fault *fault) {
    static const int preset[] = {8, 16, 24};
    const bool deep = strncmp(family->model_type, "qwen3_vl", 8) == 0;
    int64_t positions = 2304;
    int rc =
        json_int(vision, "vision_config", "num_position_embeddings", 1, 1 << 20, &positions, fault);
    if (rc) return rc;
    out->table_side = (int)sqrt((double)positions);
    if ((int64_t)out->table_side * out->table_side != positions)
        return fault_set(fault, ERR_INVALID, "vision_config.num_position_embeddings",
                         "%d positions are no square", (int)positions);
    return read_layers(vision, "deepstack_visual_indexes", preset, deep ? 3 : 0, out->layers,
                       VISION_DEEP_MAX, out->deep_layers, &out->deep, fault);
}

/* Patches that are pooled are counted by the rows that are left. */
static int read_pooling(const cJSON *root, int edge, int patch, int64_t *merge,
                        struct fault *fault) {
    static const char name[] = "mm_tokens_per_image";
    int64_t tokens = 256, side = 1;
    int rc = json_int(root, NULL, name, 1, PICTURE_TOKENS_MAX, &tokens, fault);
    if (rc) return rc;
    while (side * side < tokens) side++;
    *merge = edge / patch / side;
    return side * side == tokens && *merge * side * patch == edge && *merge <= VISION_MERGE_MAX
               ? 0
               : fault_set(fault, ERR_INVALID, name,
                           "%lld rows cannot be made of patches of %d pixels in %d x %d pixels",
                           (long long)tokens, patch, edge, edge);
}

static int read_rest(const cJSON *root, const cJSON *vision, const struct vision_family *family,
                     struct vision_config *out, struct fault *fault) {
    static const char path[] = "vision_config";
    int64_t edge = 224, merge = 2;
    double eps = 1e-6, theta = 10000;
    int rc = 0;
    if (family->kind != PICTURE_SMART) {
        rc = json_int(vision, path, "image_size", 1, VISION_EDGE_MAX, &edge, fault);
        if (!rc) rc = json_num(vision, path, "layer_norm_eps", 0, 1, &eps, fault);
        if (!rc && family->pools)
            rc = read_pooling(root, (int)edge, out->patch, &merge, fault);
        else if (!rc)
            rc = json_int(root, NULL, "scale_factor", 1, VISION_MERGE_MAX, &merge, fault);
        out->table_side = (int)edge / out->patch;
        if (!rc && out->table_side < 1)
            rc = fault_set(fault, ERR_INVALID, "vision_config.patch_size",
                           "positions for %d pixels are none for patches of %d", (int)edge,
                           out->patch);
    } else {
        rc = json_int(vision, path, "spatial_merge_size", 1, VISION_MERGE_MAX, &merge, fault);
        if (!rc)
            rc = json_num(json_get(vision, "rope_parameters"), "vision_config.rope_parameters",
                          "rope_theta", 1, 1e9, &theta, fault);
        out->theta = (float)theta;
    }
    out->merge = (int)merge;
    out->eps = (float)eps;
    if (!rc && family->windows) rc = read_vision_windows(vision, out, fault);
    if (!rc && family->blends) rc = read_vision_positions(vision, family, out, fault);
    return rc;
}

/* transformers, LlavaConfig, Mistral3Config, PixtralVisionModel, whose norms have a fixed epsilon.
 * Layers behind the one whose rows are used are left out. */
static int read_projector(const cJSON *root, const cJSON *vision,
                          const struct vision_family *family, struct vision_config *out,
                          struct fault *fault) {
    static const char path[] = "vision_config", layer_name[] = "vision_feature_layer";
    const cJSON *text = json_get(root, "text_config"), *layer = json_get(root, layer_name);
    const char *strategy = "full", *act = "gelu";
    int64_t merge = family->merge, from_behind = family->feature_layer;
    double theta = 10000, eps = 1e-6;
    int rc = json_num(vision, path, "rope_theta", 1, 1e9, &theta, fault);
    if (!rc)
        rc = json_num(json_get(vision, "rope_parameters"), "vision_config.rope_parameters",
                      "rope_theta", 1, 1e9, &theta, fault);
    if (!rc) rc = json_num(text, "text_config", "rms_norm_eps", 0, 1, &eps, fault);
    if (!rc && family->merge > 1)
        rc = json_int(root, NULL, "spatial_merge_size", 1, VISION_MERGE_MAX, &merge, fault);
    if (!rc) rc = json_str(root, NULL, "projector_hidden_act", &act, fault);
    if (!rc) rc = json_str(root, NULL, "vision_feature_select_strategy", &strategy, fault);
    if (rc) return rc;
    if (strcmp(act, "gelu") != 0)
        return refuse(fault, "projector_hidden_act", "only gelu is supported");
    if (strcmp(strategy, "full") != 0)
        return refuse(fault, "vision_feature_select_strategy", "only full is supported");
    if (layer && json_node_int(layer, -out->layers, -1, &from_behind))
        return fault_set(fault, ERR_UNSUPPORTED, layer_name, "expected -%d to -1", out->layers);
    out->layers += 1 + (int)from_behind;
    out->merge = (int)merge;
    out->theta = (float)theta;
    out->eps = 1e-5f;
    out->norm_eps = (float)eps;
    return 0;
}

/* transformers, Idefics3VisionConfig, SiglipVisionConfig, Qwen2_5_VLVisionConfig,
 * Qwen3VLVisionConfig, PixtralVisionConfig. */
static int read_encoder(const cJSON *root, const struct vision_family *family,
                        struct vision_config *out, struct fault *fault) {
    static const char path[] = "vision_config";
    const cJSON *vision = json_get(root, path);
    int channels = 3;
    const struct vision_number numbers[] = {
        {"num_hidden_layers", "depth", 12, 12, 24, 32, 27, VISION_LAYERS_MAX, &out->layers},
        {"hidden_size", "hidden_size", 1152, 768, 1024, 3584, 1152, 1 << 16, &out->width},
        {"intermediate_size", "intermediate_size", 3072, 3072, 4096, 3420, 4304, 1 << 20, &out->ff},
        {"num_attention_heads", "num_heads", 16, 12, 16, 16, 16, 1024, &out->heads},
        {"patch_size", "patch_size", 32, 16, 16, 14, 16, 256, &out->patch},
        {"num_channels", "in_channels", 3, 3, 3, 3, 3, 16, &channels},
        {NULL, "temporal_patch_size", 1, 1, 1, 2, 2, 2, &out->frames},
    };
    const char *act = family->activation;
    if (vision && !cJSON_IsObject(vision))
        return fault_set(fault, ERR_INVALID, path, "expected an object, found %s",
                         json_type_name(vision));
    int rc = read_vision_numbers(vision, family->naming, numbers, sizeof numbers / sizeof *numbers,
                                 fault);
    if (!rc) rc = json_str(vision, path, "hidden_act", &act, fault);
    if (rc) return rc;
    if (channels != 3)
        return refuse(fault,
                      family->kind == PICTURE_SMART ? "vision_config.in_channels"
                                                    : "vision_config.num_channels",
                      "only 3 are supported");
    const bool other = family->other && strcmp(act, family->other) == 0;
    if (strcmp(act, family->activation) != 0 && !other)
        return fault_set(fault, ERR_UNSUPPORTED, "vision_config.hidden_act",
                         "only %s%s%s is supported", family->activation,
                         family->other ? " or " : "", family->other ? family->other : "");
    out->activation = activation_named(act);
    return family->projects ? read_projector(root, vision, family, out, fault)
                            : read_rest(root, vision, family, out, fault);
}

static int read_three(const cJSON *config, const char *key, float out[3], struct fault *fault) {
    const cJSON *list = json_get(config, key), *item;
    int count = 0;
    if (!list) return 0;
    cJSON_ArrayForEach(item, list) {
        if (count < 3 && cJSON_IsNumber(item)) out[count] = (float)item->valuedouble;
        count += cJSON_IsNumber(item) ? 1 : 4;
    }
    return cJSON_IsArray(list) && count == 3
               ? 0
               : fault_set(fault, ERR_INVALID, key, "expected three numbers");
}

/* transformers, Idefics3ImageProcessor: the defaults. */
static int read_tiles(const cJSON *config, struct picture_form *form, struct fault *fault) {
    int64_t tile = 364, longest = 4 * tile;
    int rc =
        json_int(json_get(config, "size"), "size", "longest_edge", 1, 1 << 16, &longest, fault);
    if (!rc)
        rc = json_int(json_get(config, "max_image_size"), "max_image_size", "longest_edge", 1,
                      VISION_EDGE_MAX, &tile, fault);
    form->splits = true;
    if (!rc) rc = json_bool(config, NULL, "do_image_splitting", &form->splits, fault);
    form->longest_edge = (int)longest;
    form->tile_edge = (int)tile;
    return rc;
}

/* transformers, Gemma3ImageProcessor. */
static int read_stretch(const cJSON *config, struct picture_form *form, struct fault *fault) {
    const cJSON *size = json_get(config, "size"), *pan = json_get(config, "do_pan_and_scan");
    int64_t width = 224, height = 224;
    int rc = json_int(size, "size", "width", 1, VISION_EDGE_MAX, &width, fault);
    if (!rc) rc = json_int(size, "size", "height", 1, VISION_EDGE_MAX, &height, fault);
    if (!rc && width != height) rc = refuse(fault, "size.width", "only squares are supported");
    if (!rc && pan && !cJSON_IsNull(pan) && !cJSON_IsFalse(pan))
        rc = refuse(fault, "do_pan_and_scan", "only false is supported");
    form->longest_edge = form->tile_edge = (int)width;
    return rc;
}

/* transformers, PixtralImageProcessor. Its patches' size is the encoder's. */
static int read_lines(const cJSON *config, struct picture_form *form, struct fault *fault) {
    int64_t longest = 1024;
    int rc =
        json_int(json_get(config, "size"), "size", "longest_edge", 1, 1 << 16, &longest, fault);
    form->longest_edge = (int)longest;
    return rc;
}

/* transformers, Qwen2VLImageProcessor: min_pixels and max_pixels are older names, and have
 * priority.
 */
static int read_pixels(const cJSON *config, struct vision_config *out, struct fault *fault) {
    static const struct {
        const char *old, *name;
    } names[] = {{"min_pixels", "shortest_edge"}, {"max_pixels", "longest_edge"}};
    struct picture_form *form = &out->form;
    int64_t pixels[] = {INT64_C(56) * 56, INT64_C(28) * 28 * 1280}, patch = out->patch,
            merge = out->merge;
    int rc = 0;
    for (int i = 0; i < 2 && !rc; i++) {
        rc = json_int(json_get(config, "size"), "size", names[i].name, 1, INT32_MAX, &pixels[i],
                      fault);
        if (!rc) rc = json_int(config, NULL, names[i].old, 1, INT32_MAX, &pixels[i], fault);
    }
    if (!rc) rc = json_int(config, NULL, "patch_size", 1, 256, &patch, fault);
    if (!rc) rc = json_int(config, NULL, "merge_size", 1, VISION_MERGE_MAX, &merge, fault);
    if (rc) return rc;
    if (patch != out->patch || merge != out->merge)
        return fault_set(fault, ERR_INVALID, patch != out->patch ? "patch_size" : "merge_size",
                         "the encoder of config.json has patches of %d pixels, joined by %d",
                         out->patch, out->merge);
    form->min_pixels = (int)pixels[0];
    form->max_pixels = (int)pixels[1];
    return 0;
}

static int read_processor(const cJSON *config, struct vision_config *out, struct fault *fault) {
    static const char *const always[] = {"do_resize", "do_rescale", "do_normalize"};
    static const float clip_mean[] = {0.48145466f, 0.4578275f, 0.40821073f},
                       clip_deviation[] = {0.26862954f, 0.26130258f, 0.27577711f};
    struct picture_form *form = &out->form;
    const bool smart = form->kind == PICTURE_SMART, stretches = form->kind == PICTURE_STRETCHED;
    const bool lines = form->kind == PICTURE_LINES, clip = smart || lines;
    int64_t filter = clip ? PICTURE_BICUBIC : stretches ? PICTURE_BILINEAR : PICTURE_LANCZOS;
    form->rescale = 1.0 / 255;
    for (int i = 0; i < 3; i++) {
        form->mean[i] = clip ? clip_mean[i] : 0.5f;
        form->deviation[i] = clip ? clip_deviation[i] : 0.5f;
    }
    for (size_t i = 0; i < sizeof always / sizeof *always; i++) {
        bool does = true;
        int rc = json_bool(config, NULL, always[i], &does, fault);
        if (rc) return rc;
        if (!does) return refuse(fault, always[i], "false is not supported");
    }
    int rc = smart       ? read_pixels(config, out, fault)
             : stretches ? read_stretch(config, form, fault)
             : lines     ? read_lines(config, form, fault)
                         : read_tiles(config, form, fault);
    if (!rc) rc = json_int(config, NULL, "resample", 0, 8, &filter, fault);
    if (!rc) rc = json_num(config, NULL, "rescale_factor", 0, 1e6, &form->rescale, fault);
    if (!rc) rc = read_three(config, "image_mean", form->mean, fault);
    if (!rc) rc = read_three(config, "image_std", form->deviation, fault);
    form->filter = (enum picture_filter)filter;
    return rc;
}

/* Newer directories have the processor's numbers in a member of processor_config.json. */
static int find_processor(const char *dir, struct vision_config *out, struct fault *fault) {
    static const char *const names[] = {"preprocessor_config.json", "processor_config.json"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        cJSON *root = NULL;
        struct fault inner = {0};
        int rc = json_file_read(dir, names[i], &root, fault);
        const cJSON *config = i ? json_get(root, "image_processor") : root;
        if (!rc && config) {
            rc = read_processor(config, out, &inner);
            if (rc) fault_set(fault, rc, names[i], "%s: %s", inner.field, inner.text);
        }
        const bool found = config != NULL;
        json_free(root);
        if (rc || found) return rc;
    }
    return fault_set(fault, ERR_NOTFOUND, names[0],
                     "missing: it says how pictures are prepared for the model");
}

int vision_config_of_directory(const char *dir, struct vision_config *out, struct fault *fault) {
    cJSON *root = NULL;
    *out = (struct vision_config){0};
    int rc = json_file_read(dir, "config.json", &root, fault);
    if (rc || !root) return rc;
    struct fault inner = {0};
    const struct vision_family *family = find_family(root, &inner, &rc);
    if (!rc && family) {
        take_family(family, out);
        rc = read_encoder(root, family, out, &inner);
    }
    json_free(root);
    if (rc) return fault_set(fault, rc, "config.json", "%s: %s", inner.field, inner.text);
    if (!family) return 0;
    rc = find_processor(dir, out, fault);
    if (rc) return rc;
    rc = fill_sides(out, &inner);
    return rc ? fault_set(fault, rc, "config.json", "%s: %s", inner.field, inner.text) : 0;
}

/* ---- A GGUF file ---- */

static bool is_string(const struct gguf_string *string, const char *text) {
    return string->size == strlen(text) && memcmp(string->data, text, string->size) == 0;
}

static const struct vision_family *find_projector(const struct gguf_string *projector) {
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        if (families[i].projector && is_string(projector, families[i].projector))
            return &families[i];
    return NULL;
}

static int check_kind(const struct gguf *gguf, const struct vision_family **family,
                      struct fault *fault) {
    struct gguf_string architecture = {"", 0}, projector = {"", 0};
    int rc = gguf_str(gguf, "general.architecture", &architecture, fault);
    if (!rc) rc = gguf_str(gguf, "clip.vision.projector_type", &projector, fault);
    if (!rc) rc = gguf_str(gguf, "clip.projector_type", &projector, fault);
    if (rc) return rc;
    if (!is_string(&architecture, "clip"))
        return fault_set(fault, ERR_UNSUPPORTED, "general.architecture",
                         "'%.*s': expected a file with an encoder of pictures, 'clip'",
                         (int)(architecture.size > 40 ? 40 : architecture.size), architecture.data);
    *family = find_projector(&projector);
    if (!*family)
        return fault_set(fault, ERR_UNSUPPORTED, "clip.projector_type",
                         "'%.*s' is not supported: idefics3, gemma3, pixtral, qwen2.5vl_merger, "
                         "qwen3vl_merger",
                         (int)(projector.size > 40 ? 40 : projector.size), projector.data);
    return 0;
}

static int read_gguf_activation(const struct gguf *gguf, const struct vision_family *family,
                                struct vision_config *out, struct fault *fault) {
    const char *const names[] = {family->activation, family->other}, *key = NULL;
    for (int i = 1; i >= 0; i--) {
        bool activates = false;
        if (!names[i]) continue;
        key = strcmp(names[i], "silu") == 0 ? "clip.use_silu" : "clip.use_gelu";
        int rc = gguf_bool(gguf, key, &activates, fault);
        if (!rc && activates) out->activation = activation_named(names[i]);
        if (rc || activates) return rc;
    }
    return refuse(fault, key, "only true is supported");
}

/* *out, if it is not 0, stays where the file leaves the key out. */
static int read_key(const struct gguf *gguf, const char *key, int64_t most, int *out,
                    struct fault *fault) {
    int64_t value = *out;
    int rc = gguf_int(gguf, key, 1, most, &value, fault);
    if (rc) return rc;
    *out = (int)value;
    return value ? 0 : fault_set(fault, ERR_INVALID, key, "missing");
}

static int read_key_three(const struct gguf *gguf, const char *key, float out[3],
                          struct fault *fault) {
    const struct gguf_value *list = NULL;
    int rc = gguf_array(gguf, key, GGUF_F32, &list, fault);
    if (rc) return rc;
    if (!list || list->count != 3)
        return fault_set(fault, ERR_INVALID, key, "expected three numbers");
    for (size_t i = 0; i < 3; i++) out[i] = (float)gguf_element_num(list, i);
    return 0;
}

/* llama.cpp's converter writes every which layer sees all, and not the default of the size. */
static int read_gguf_windows(const struct gguf *gguf, struct vision_config *out,
                             struct fault *fault) {
    int64_t window = 112;
    int each = 0;
    int rc = read_key(gguf, "clip.vision.n_wa_pattern", VISION_LAYERS_MAX, &each, fault);
    if (!rc) rc = gguf_int(gguf, "clip.vision.window_size", 1, 1 << 16, &window, fault);
    if (rc) return rc;
    out->window = (int)window / out->merge / out->patch;
    if (out->window < 1)
        return fault_set(fault, ERR_INVALID, "clip.vision.window_size",
                         "a window of %d pixels has no row of embeddings", (int)window);
    for (int i = each - 1; i < out->layers; i += each) out->full[i] = true;
    return 0;
}

static int read_gguf_deep(const struct gguf *gguf, struct vision_config *out, struct fault *fault) {
    static const char key[] = "clip.vision.is_deepstack_layers";
    const struct gguf_value *list = NULL;
    int rc = gguf_array(gguf, key, GGUF_BOOL, &list, fault);
    for (size_t i = 0; !rc && list && i < list->count; i++) {
        if (!list->data[i]) continue;
        if (i >= (size_t)out->layers || out->deep == VISION_DEEP_MAX)
            return fault_set(fault, ERR_LIMIT, key, "expected at most %d of %d layers",
                             VISION_DEEP_MAX, out->layers);
        out->deep_layers[out->deep++] = (int)i;
    }
    return rc;
}

static int read_gguf_smart(const struct gguf *gguf, const struct vision_family *family,
                           struct vision_config *out, struct fault *fault) {
    struct picture_form *form = &out->form;
    int64_t least = family->min_pixels, most = family->max_pixels, merge = 2, edge = 0;
    int rc = gguf_int(gguf, "clip.vision.image_min_pixels", 1, INT32_MAX, &least, fault);
    if (!rc) rc = gguf_int(gguf, "clip.vision.image_max_pixels", 1, INT32_MAX, &most, fault);
    if (!rc)
        rc = gguf_int(gguf, "clip.vision.spatial_merge_size", 1, VISION_MERGE_MAX, &merge, fault);
    if (!rc) rc = gguf_int(gguf, "clip.vision.image_size", 1, 1 << 16, &edge, fault);
    if (rc) return rc;
    form->min_pixels = (int)least;
    form->max_pixels = (int)most;
    form->filter = PICTURE_BICUBIC;
    out->merge = (int)merge;
    if (family->windows) return read_gguf_windows(gguf, out, fault);
    out->table_side = (int)edge / out->patch;
    if (out->table_side < 1)
        return fault_set(fault, ERR_INVALID, "clip.vision.image_size", "%d pixels have no position",
                         (int)edge);
    return read_gguf_deep(gguf, out, fault);
}

static int read_gguf_lines(const struct gguf *gguf, struct vision_config *out,
                           struct fault *fault) {
    struct picture_form *form = &out->form;
    int64_t merge = 1;
    int rc = read_key(gguf, "clip.vision.image_size", 1 << 16, &form->longest_edge, fault);
    if (!rc)
        rc = gguf_int(gguf, "clip.vision.spatial_merge_size", 1, VISION_MERGE_MAX, &merge, fault);
    form->filter = PICTURE_BICUBIC;
    out->merge = (int)merge;
    out->norm_eps = out->eps;
    return rc;
}

/* The file leaves out what all published processors of the family have alike. */
static int read_gguf_tiles(const struct gguf *gguf, struct vision_config *out,
                           struct fault *fault) {
    struct picture_form *form = &out->form;
    int rc = read_key(gguf, "clip.vision.image_size", VISION_EDGE_MAX, &form->tile_edge, fault);
    if (out->pools) out->merge = 4; /* some files leave it out */
    if (!rc)
        rc = read_key(gguf, "clip.vision.projector.scale_factor", VISION_MERGE_MAX, &out->merge,
                      fault);
    form->longest_edge = form->tile_edge;
    if (!rc && !out->pools) {
        form->longest_edge = 0;
        rc = read_key(gguf, "clip.vision.preproc_image_size", 1 << 16, &form->longest_edge, fault);
    }
    form->filter = out->pools ? PICTURE_BILINEAR : PICTURE_LANCZOS;
    form->splits = !out->pools;
    out->table_side = form->tile_edge / out->patch;
    return rc;
}

int vision_config_of_gguf(const struct gguf *gguf, struct vision_config *out, struct fault *fault) {
    static const char eps_key[] = "clip.vision.attention.layer_norm_epsilon";
    *out = (struct vision_config){.gguf = true};
    struct picture_form *form = &out->form;
    const struct vision_family *family = NULL;
    const struct {
        const char *key;
        int64_t most;
        int *out;
    } keys[] = {
        {"clip.vision.block_count", VISION_LAYERS_MAX, &out->layers},
        {"clip.vision.embedding_length", 1 << 16, &out->width},
        {"clip.vision.feed_forward_length", 1 << 20, &out->ff},
        {"clip.vision.attention.head_count", 1024, &out->heads},
        {"clip.vision.patch_size", 256, &out->patch},
    };
    double eps = -1;
    int rc = check_kind(gguf, &family, fault);
    for (size_t i = 0; i < sizeof keys / sizeof *keys && !rc; i++)
        rc = read_key(gguf, keys[i].key, keys[i].most, keys[i].out, fault);
    if (!rc) rc = read_key_three(gguf, "clip.vision.image_mean", form->mean, fault);
    if (!rc) rc = read_key_three(gguf, "clip.vision.image_std", form->deviation, fault);
    if (!rc) rc = gguf_num(gguf, eps_key, 0, 1, &eps, fault);
    if (!rc && eps < 0) rc = fault_set(fault, ERR_INVALID, eps_key, "missing");
    if (rc) return rc;
    take_family(family, out);
    form->rescale = 1.0 / 255;
    out->eps = (float)eps;
    rc = read_gguf_activation(gguf, family, out, fault);
    if (rc) return rc;
    rc = form->kind == PICTURE_SMART   ? read_gguf_smart(gguf, family, out, fault)
         : form->kind == PICTURE_LINES ? read_gguf_lines(gguf, out, fault)
                                       : read_gguf_tiles(gguf, out, fault);
    return rc ? rc : fill_sides(out, fault);
}
