/* The configuration of an encoder of pictures, from its files. */
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "model/json_file.h"
#include "model/vision.h"

#define VISION_LAYERS_MAX 512
#define VISION_EDGE_MAX   4096 /* pixels of a tile's side */
#define VISION_SIDE_MAX   64   /* patches of a tile's side */

static const struct vision_family {
    const char *architecture, *model_type;
    const char *projector; /* in GGUF files */
    enum picture_kind kind;
    /* transformers, Idefics3VisionConfig and SiglipVisionConfig: the defaults. */
    int layers, width, ff, heads, edge, patch;
    int merge;  /* where a GGUF file does not say it; 0: it must */
    bool pools; /* vision_config */
} families[] = {
    {"Idefics3ForConditionalGeneration", "idefics3", "idefics3", PICTURE_IDEFICS3, 12, 1152, 3072,
     16, 224, 32, 0, false},
    {"SmolVLMForConditionalGeneration", "smolvlm", "idefics3", PICTURE_IDEFICS3, 12, 1152, 3072, 16,
     224, 32, 0, false},
    {"Gemma3ForConditionalGeneration", "gemma3", "gemma3", PICTURE_STRETCHED, 12, 768, 3072, 12,
     224, 16, 4, true},
};

static int refuse(struct fault *fault, const char *field, const char *what) {
    return fault_set(fault, ERR_UNSUPPORTED, field, "%s", what);
}

/* ---- Numbers that follow ---- */

/* Sizes of the tile in patches, and of the rows of embeddings. */
static int fill_sides(struct vision_config *out, int table_edge, struct fault *fault) {
    struct picture_form *form = &out->form;
    if (form->tile_edge % out->patch || table_edge < out->patch ||
        (out->pools && table_edge != form->tile_edge))
        return fault_set(fault, ERR_INVALID, "patch_size",
                         "tiles of %d pixels and positions for %d cannot be cut into patches of %d",
                         form->tile_edge, table_edge, out->patch);
    out->side = form->tile_edge / out->patch;
    out->table_side = table_edge / out->patch;
    if (out->side > VISION_SIDE_MAX)
        return fault_set(fault, ERR_LIMIT, "patch_size", "%d patches in a row; at most %d",
                         out->side, VISION_SIDE_MAX);
    if (out->side % out->merge)
        return fault_set(fault, ERR_INVALID, "scale_factor",
                         "%d patches in a row cannot be joined by %d", out->side, out->merge);
    if (out->width % out->heads || out->width / out->heads % 2)
        return fault_set(fault, ERR_INVALID, "hidden_size",
                         "%d numbers in %d heads: expected an even number for each", out->width,
                         out->heads);
    form->token_edge = out->patch * out->merge;
    form->tile_tokens_max = out->side / out->merge * (out->side / out->merge);
    return picture_check_form(form, fault);
}

int vision_position(const struct vision_config *config, int at) {
    const float step = 1.0f / (float)config->side, most = 1.0f - 1e-6f;
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
    const cJSON *list = json_get(root, "architectures");
    const char *architecture = NULL, *type = NULL;
    if (cJSON_IsArray(list) && cJSON_IsString(list->child)) architecture = list->child->valuestring;
    *rc = json_str(root, NULL, "model_type", &type, fault);
    for (size_t i = 0; i < sizeof families / sizeof *families && !*rc; i++)
        if (architecture ? !strcmp(architecture, families[i].architecture)
                         : type && !strcmp(type, families[i].model_type))
            return &families[i];
    return NULL;
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
    return side * side == tokens && *merge * side * patch == edge
               ? 0
               : fault_set(fault, ERR_INVALID, name,
                           "%lld rows cannot be made of patches of %d pixels in %d x %d pixels",
                           (long long)tokens, patch, edge, edge);
}

static int read_encoder(const cJSON *root, const struct vision_family *family,
                        struct vision_config *out, int *table_edge, struct fault *fault) {
    static const char path[] = "vision_config";
    const cJSON *vision = json_get(root, path);
    int64_t layers = family->layers, width = family->width, ff = family->ff, heads = family->heads,
            edge = family->edge, patch = family->patch, channels = 3, merge = 2;
    double eps = 1e-6;
    const char *act = "gelu_pytorch_tanh";
    if (vision && !cJSON_IsObject(vision))
        return fault_set(fault, ERR_INVALID, path, "expected an object, found %s",
                         json_type_name(vision));
    int rc = json_int(vision, path, "num_hidden_layers", 1, VISION_LAYERS_MAX, &layers, fault);
    if (!rc) rc = json_int(vision, path, "hidden_size", 2, 1 << 16, &width, fault);
    if (!rc) rc = json_int(vision, path, "intermediate_size", 1, 1 << 20, &ff, fault);
    if (!rc) rc = json_int(vision, path, "num_attention_heads", 1, 1024, &heads, fault);
    if (!rc) rc = json_int(vision, path, "image_size", 1, VISION_EDGE_MAX, &edge, fault);
    if (!rc) rc = json_int(vision, path, "patch_size", 1, 256, &patch, fault);
    if (!rc) rc = json_int(vision, path, "num_channels", 1, 16, &channels, fault);
    if (!rc) rc = json_num(vision, path, "layer_norm_eps", 0, 1, &eps, fault);
    if (!rc) rc = json_str(vision, path, "hidden_act", &act, fault);
    if (!rc && family->pools)
        rc = read_pooling(root, (int)edge, (int)patch, &merge, fault);
    else if (!rc)
        rc = json_int(root, NULL, "scale_factor", 1, VISION_SIDE_MAX, &merge, fault);
    if (rc) return rc;
    if (channels != 3) return refuse(fault, "vision_config.num_channels", "only 3 are supported");
    if (strcmp(act, "gelu_pytorch_tanh") != 0)
        return refuse(fault, "vision_config.hidden_act", "only gelu_pytorch_tanh is supported");
    out->layers = (int)layers;
    out->width = (int)width;
    out->ff = (int)ff;
    out->heads = (int)heads;
    out->patch = (int)patch;
    out->merge = (int)merge;
    out->eps = (float)eps;
    out->pools = out->form.together = family->pools;
    *table_edge = (int)edge;
    return 0;
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

static int read_processor(const cJSON *config, struct picture_form *form, struct fault *fault) {
    static const char *const always[] = {"do_resize", "do_rescale", "do_normalize"};
    const bool stretches = form->kind == PICTURE_STRETCHED;
    int64_t filter = stretches ? PICTURE_BILINEAR : PICTURE_LANCZOS;
    form->rescale = 1.0 / 255;
    for (int i = 0; i < 3; i++) form->mean[i] = form->deviation[i] = 0.5f;
    for (size_t i = 0; i < sizeof always / sizeof *always; i++) {
        bool does = true;
        int rc = json_bool(config, NULL, always[i], &does, fault);
        if (rc) return rc;
        if (!does) return refuse(fault, always[i], "false is not supported");
    }
    int rc = stretches ? read_stretch(config, form, fault) : read_tiles(config, form, fault);
    if (!rc) rc = json_int(config, NULL, "resample", 0, 8, &filter, fault);
    if (!rc) rc = json_num(config, NULL, "rescale_factor", 0, 1e6, &form->rescale, fault);
    if (!rc) rc = read_three(config, "image_mean", form->mean, fault);
    if (!rc) rc = read_three(config, "image_std", form->deviation, fault);
    form->filter = (enum picture_filter)filter;
    return rc;
}

/* Newer directories have the processor's numbers in a member of processor_config.json. */
static int find_processor(const char *dir, struct picture_form *form, struct fault *fault) {
    static const char *const names[] = {"preprocessor_config.json", "processor_config.json"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        cJSON *root = NULL;
        struct fault inner = {0};
        int rc = json_file_read(dir, names[i], &root, fault);
        const cJSON *config = i ? json_get(root, "image_processor") : root;
        if (!rc && config) {
            rc = read_processor(config, form, &inner);
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
    int table_edge = 0;
    *out = (struct vision_config){0};
    int rc = json_file_read(dir, "config.json", &root, fault);
    if (rc || !root) return rc;
    struct fault inner = {0};
    const struct vision_family *family = find_family(root, &inner, &rc);
    if (!rc && family) rc = read_encoder(root, family, out, &table_edge, &inner);
    json_free(root);
    if (rc) return fault_set(fault, rc, "config.json", "%s: %s", inner.field, inner.text);
    if (!family) return 0;
    out->form.kind = family->kind;
    rc = find_processor(dir, &out->form, fault);
    if (rc) return rc;
    rc = fill_sides(out, table_edge, &inner);
    return rc ? fault_set(fault, rc, "config.json", "%s: %s", inner.field, inner.text) : 0;
}

/* ---- A GGUF file ---- */

static bool is_string(const struct gguf_string *string, const char *text) {
    return string->size == strlen(text) && memcmp(string->data, text, string->size) == 0;
}

static int check_kind(const struct gguf *gguf, const struct vision_family **family,
                      struct fault *fault) {
    struct gguf_string architecture = {"", 0}, projector = {"", 0};
    bool gelu = false;
    int rc = gguf_str(gguf, "general.architecture", &architecture, fault);
    if (!rc) rc = gguf_str(gguf, "clip.vision.projector_type", &projector, fault);
    if (!rc) rc = gguf_str(gguf, "clip.projector_type", &projector, fault);
    if (!rc) rc = gguf_bool(gguf, "clip.use_gelu", &gelu, fault);
    if (rc) return rc;
    if (!is_string(&architecture, "clip"))
        return fault_set(fault, ERR_UNSUPPORTED, "general.architecture",
                         "'%.*s': expected a file with an encoder of pictures, 'clip'",
                         (int)(architecture.size > 40 ? 40 : architecture.size), architecture.data);
    *family = NULL;
    for (size_t i = 0; i < sizeof families / sizeof *families && !*family; i++)
        if (is_string(&projector, families[i].projector)) *family = &families[i];
    if (!*family)
        return fault_set(fault, ERR_UNSUPPORTED, "clip.projector_type",
                         "'%.*s' is not supported: idefics3, gemma3",
                         (int)(projector.size > 40 ? 40 : projector.size), projector.data);
    return gelu ? 0 : refuse(fault, "clip.use_gelu", "only true is supported");
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

int vision_config_of_gguf(const struct gguf *gguf, struct vision_config *out, struct fault *fault) {
    *out = (struct vision_config){.gguf = true};
    struct picture_form *form = &out->form;
    const struct {
        const char *key;
        int64_t most;
        int *out;
    } keys[] = {
        {"clip.vision.block_count", VISION_LAYERS_MAX, &out->layers},
        {"clip.vision.embedding_length", 1 << 16, &out->width},
        {"clip.vision.feed_forward_length", 1 << 20, &out->ff},
        {"clip.vision.attention.head_count", 1024, &out->heads},
        {"clip.vision.image_size", VISION_EDGE_MAX, &form->tile_edge},
        {"clip.vision.patch_size", 256, &out->patch},
        {"clip.vision.projector.scale_factor", VISION_SIDE_MAX, &out->merge},
        {"clip.vision.preproc_image_size", 1 << 16, &form->longest_edge},
    };
    const struct vision_family *family = NULL;
    double eps = -1;
    int rc = check_kind(gguf, &family, fault);
    if (rc) return rc;
    const bool stretches = family->kind == PICTURE_STRETCHED;
    out->merge = family->merge;
    form->longest_edge = stretches; /* no key of such files */
    for (size_t i = 0; i < sizeof keys / sizeof *keys && !rc; i++)
        rc = read_key(gguf, keys[i].key, keys[i].most, keys[i].out, fault);
    if (!rc) rc = read_key_three(gguf, "clip.vision.image_mean", form->mean, fault);
    if (!rc) rc = read_key_three(gguf, "clip.vision.image_std", form->deviation, fault);
    static const char eps_key[] = "clip.vision.attention.layer_norm_epsilon";
    if (!rc) rc = gguf_num(gguf, eps_key, 0, 1, &eps, fault);
    if (!rc && eps < 0) rc = fault_set(fault, ERR_INVALID, eps_key, "missing");
    if (rc) return rc;
    /* The file leaves out what all published processors of the family have alike. */
    form->kind = family->kind;
    form->filter = stretches ? PICTURE_BILINEAR : PICTURE_LANCZOS;
    form->splits = !stretches;
    form->together = out->pools = family->pools;
    form->rescale = 1.0 / 255;
    out->eps = (float)eps;
    return fill_sides(out, form->tile_edge, fault);
}
