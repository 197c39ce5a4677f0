#include "engine/encoder.h"

#include <string.h>

#include "base/check.h"
#include "base/log.h"
#include "engine/engine_pictures.h"

/* Encoded tiles are kept within so many bytes, or two of the largest tiles: while a prompt reads
 * one, the next is encoded. */
#define KEPT_BYTES ((int64_t)64 << 20)

static bool is_asked_for(const struct engine_options *options) {
    return options->mmproj && options->mmproj[0];
}

static int check_encoder_place(const struct encoder_side *side, struct fault *fault) {
    if (model_config(side->model)->both_ways)
        return fault_set(fault, ERR_UNSUPPORTED, "mmproj",
                         "%s models make vectors of texts: they take no pictures",
                         model_config(side->model)->family);
    if (side->options->random_weights)
        return fault_set(fault, ERR_UNSUPPORTED, "mmproj", "not with random weights");
    return 0;
}

/* Opens a backend on the CPU for each replica. */
static int open_encoder_kerns(const struct encoder_side *side, int replicas, struct kern **kerns,
                              struct fault *fault) {
    struct backend_options backend = engine_backend(side->options, replicas);
    backend.device = "cpu";
    backend.ranks = 1;
    return backend_open(&backend, kerns, fault);
}

/* Text models of the same width may be of another family: their answers would be about nothing. */
static int check_text_model(const struct encoder_side *side, const struct vision_config *encoder,
                            struct fault *fault) {
    const struct model_config *text = model_config(side->model);
    if (encoder->axes != AXES_ONE && encoder->axes != text->axes_order)
        return fault_set(fault, ERR_UNSUPPORTED, "mmproj",
                         "the encoder is for another family of models than %s: places of its "
                         "pictures' tokens are rotated otherwise",
                         text->family);
    return encoder->deep < text->layers
               ? 0
               : fault_set(fault, ERR_UNSUPPORTED, "mmproj",
                           "rows for the first %d layers of a model that has %d", encoder->deep,
                           text->layers);
}

/* `owner`: another encoder of the same weights, or NULL. */
static int load_encoder(const struct encoder_side *side, struct kern *kern, struct vision *owner,
                        struct vision **out, struct fault *fault) {
    const struct model_config *text = model_config(side->model);
    const struct vision_options options = {.dir = side->options->model_dir,
                                           .mmproj = side->options->mmproj,
                                           .text_width = text->d_model,
                                           .threads = side->options->threads,
                                           .check_only = side->options->check_only,
                                           .owner = owner};
    if (kern->ops->bind) kern->ops->bind(kern);
    int rc = vision_open(kern, &options, out, fault);
    if (rc != 0 || !*out) return rc;
    return check_text_model(side, vision_config(*out), fault);
}

int encoder_open_alone(const struct encoder_side *side, struct encoder *out, struct fault *fault) {
    *out = (struct encoder){0};
    int rc = check_encoder_place(side, fault);
    if (rc == 0) rc = open_encoder_kerns(side, 1, &out->kern, fault);
    if (rc == 0) rc = load_encoder(side, out->kern, NULL, &out->vision, fault);
    if (rc != 0) encoder_close(out);
    return rc;
}

static void plan_tiles(struct engine *e) {
    const struct vision *first = e->replicas[0].encoder.vision;
    const struct vision_config *config = vision_config(first);
    struct encoder_plan *plan = &e->encoder;
    const int64_t largest =
        (int64_t)config->form.tile_tokens_max * vision_row_width(config) * (int64_t)sizeof(float);
    plan->kept_bytes = KEPT_BYTES > 2 * largest ? KEPT_BYTES : 2 * largest;
    plan->bytes = plan->kept_bytes + (int64_t)vision_step_bytes(first);
    plan->weight_bytes = (int64_t)vision_weight_bytes(first);
}

/* A step holds all rows of a tile that see each other, beside a row of every answer. */
static int check_step_rows(const struct engine *e, struct fault *fault) {
    const struct picture_form *form = &vision_config(e->replicas[0].encoder.vision)->form;
    const int least = form->tile_tokens_max + e->options.max_num_seqs - 1;
    if (!form->together || e->options.max_num_batched_tokens >= least) return 0;
    return fault_set(fault, ERR_LIMIT, "max_num_batched_tokens",
                     "%d, but a step holds the %d rows of a picture and one of each of "
                     "max_num_seqs %d sequences: at least %d are needed",
                     e->options.max_num_batched_tokens, form->tile_tokens_max,
                     e->options.max_num_seqs, least);
}

/* Families whose places are alike have other marks of pictures. */
static int check_mark(const struct engine *e, struct fault *fault) {
    const struct model_config *text = model_config(e->replicas[0].model);
    const enum picture_kind kind = vision_config(e->replicas[0].encoder.vision)->form.kind;
    struct fault why = {0};
    int rc = text_check_pictures(&e->text, kind, &why);
    return rc == 0 ? 0
                   : fault_set(fault, rc, "mmproj",
                               "the encoder is for another family of models than %s: %s",
                               text->family, why.text);
}

static void close_encoders(struct engine *e) {
    for (int i = e->replica_count - 1; i >= 0; i--) encoder_close(&e->replicas[i].encoder);
    e->encoder = (struct encoder_plan){0};
}

static int open_encoders(struct engine *e, const struct encoder_side *side, struct fault *fault) {
    struct kern *kerns[ENGINE_REPLICAS_MAX] = {0};
    struct encoder *first = &e->replicas[0].encoder;
    int rc = open_encoder_kerns(side, e->replica_count, kerns, fault);
    for (int i = 0; i < e->replica_count; i++) e->replicas[i].encoder.kern = kerns[i];
    if (rc == 0) rc = load_encoder(side, first->kern, NULL, &first->vision, fault);
    if (rc != 0) return rc;
    CHECK(first->vision);
    rc = check_mark(e, fault);
    if (rc == 0) rc = check_step_rows(e, fault);
    if (rc != 0) return rc;
    plan_tiles(e);
    for (int i = 1; i < e->replica_count && rc == 0 && !e->options.check_only; i++) {
        struct encoder *encoder = &e->replicas[i].encoder;
        rc = load_encoder(side, encoder->kern, first->vision, &encoder->vision, fault);
    }
    if (rc == 0 && !e->options.check_only) {
        const struct picture_form *form = &vision_config(e->replicas[0].encoder.vision)->form;
        log_info("pictures: at most %d tokens for a tile; %.1f MB of weights, %.1f MB of encoded "
                 "tiles are kept",
                 form->tile_tokens_max, (double)e->encoder.weight_bytes * 1e-6,
                 (double)e->encoder.kept_bytes * 1e-6);
    }
    return rc;
}

/* Finds out whether the model's own directory has an encoder that can be used here. */
static int find_encoder(const struct encoder_side *side, bool *found, struct fault *fault) {
    struct vision_config config;
    struct fault ignored = {0};
    const char *dir = side->options->model_dir;
    *found = false;
    if (gguf_is_path(dir) || check_encoder_place(side, &ignored) != 0) return 0;
    int rc = vision_config_of_directory(dir, &config, fault);
    *found = config.form.kind != PICTURE_NONE;
    return rc || !*found ? rc : check_text_model(side, &config, fault);
}

int encoder_open(struct engine *e, struct fault *fault) {
    const struct encoder_side side = {&e->options, e->replicas[0].model};
    struct fault why = {0};
    const bool asked = is_asked_for(&e->options);
    bool found = true;
    int rc = asked ? check_encoder_place(&side, &why) : find_encoder(&side, &found, &why);
    if (rc == 0 && found) rc = open_encoders(e, &side, &why);
    if (rc == 0) return 0;
    close_encoders(e);
    if (asked)
        return strcmp(why.field, "mmproj") == 0
                   ? fault_set(fault, rc, "mmproj", "%s", why.text)
                   : fault_set(fault, rc, "mmproj", "%s%s%s", why.field, why.field[0] ? ": " : "",
                               why.text);
    log_warn("pictures are not taken: %s%s%s", why.field, why.field[0] ? ": " : "", why.text);
    return 0;
}

void encoder_close(struct encoder *encoder) {
    vision_close(encoder->vision);
    if (encoder->kern) encoder->kern->ops->close(encoder->kern);
    *encoder = (struct encoder){0};
}

static int begin_encoder_tile(void *encoder, const struct picture *picture, int tile) {
    return vision_begin(encoder, picture, tile);
}

static int advance_encoder_tile(void *encoder, float *out, bool *done) {
    return vision_advance(encoder, out, done);
}

struct pictures_options encoder_options(const struct engine *e, const struct replica *replica) {
    struct vision *vision = replica->encoder.vision;
    if (!vision) return (struct pictures_options){0};
    const struct vision_config *config = vision_config(vision);
    return (struct pictures_options){.encoder = vision,
                                     .begin = begin_encoder_tile,
                                     .advance = advance_encoder_tile,
                                     .width = vision_row_width(config),
                                     .deep = config->deep,
                                     .bytes_max = e->encoder.kept_bytes};
}

void encoder_write_ids(const struct vision *encoder, const struct picture *picture,
                       const struct picture_rows *rows, int32_t *ids) {
    const struct engine_grid grid = {picture->tile_rows, picture->tile_columns};
    uint32_t words[SHA256_BYTES / sizeof(uint32_t)];
    const int each = (int)(sizeof words / sizeof *words);
    for (int k = 0; k < rows->count; k++) {
        const int i = rows->first + k;
        if (k == 0 || i % each == 0) {
            const uint32_t place[2] = {(uint32_t)rows->tile, (uint32_t)(i / each)};
            uint8_t digest[SHA256_BYTES];
            struct sha256_stream sum;
            sha256_begin(&sum);
            sha256_add(&sum, vision_identity(encoder), SHA256_BYTES);
            sha256_add(&sum, picture->digest, sizeof picture->digest);
            sha256_add(&sum, place, sizeof place);
            sha256_end(&sum, digest);
            memcpy(words, digest, sizeof words);
        }
        ids[k] = engine_picture_id(grid, i, words[i % each]);
    }
}
