#include "engine/fit_pictures.h"

#include "base/mem.h"
#include "engine/engine_fit.h"
#include "engine/steps/grid.h"
#include "model/vision.h"

int fit_pictures_open(const struct encoder_side *side, struct fit_pictures *out,
                      struct fault *fault) {
    *out = (struct fit_pictures){0};
    int rc = encoder_open_alone(side, &out->encoder, fault);
    if (rc) return rc;
    out->width = vision_row_width(vision_config(out->encoder.vision));
    out->dimensions = model_config(side->model)->axes_order != AXES_ONE;
    return 0;
}

static void drop_present(struct fit_pictures *pictures) {
    mem_free(pictures->tokens);
    mem_free(pictures->places);
    mem_free(pictures->given);
    mem_free(pictures->rows);
    pictures->tokens = NULL;
    pictures->places = NULL;
    pictures->given = NULL;
    pictures->rows = NULL;
}

void fit_pictures_close(struct fit_pictures *pictures) {
    drop_present(pictures);
    encoder_close(&pictures->encoder);
}

void fit_pictures_write_ids(const struct fit_pictures *pictures, struct engine_fit_text *text) {
    for (int i = 0; i < text->picture_row_count; i++) {
        const struct picture_rows *rows = &text->picture_rows[i];
        encoder_write_ids(pictures->encoder.vision, text->pictures[rows->picture], rows,
                          text->ids + rows->at);
    }
}

static int encode_tile(struct fit_pictures *pictures, const struct picture *picture, int tile,
                       float *out) {
    bool done = false;
    int rc = vision_begin(pictures->encoder.vision, picture, tile);
    while (!rc && !done) rc = vision_advance(pictures->encoder.vision, out, &done);
    return rc;
}

/* Returns whether rows show another tile than those in front of them. */
static bool begins_tile(const struct engine_fit_text *text, int i) {
    const struct picture_rows *rows = &text->picture_rows[i];
    return i == 0 || rows->picture != rows[-1].picture || rows->tile != rows[-1].tile;
}

/* Encodes the tiles, and writes what the measurement is given in place of their tokens. */
static int encode_tiles(struct fit_pictures *pictures, const struct engine_fit_text *text) {
    const int deep = vision_config(pictures->encoder.vision)->deep;
    float *out = pictures->rows, *tile = out;
    int rc = 0;
    for (int i = 0; i < text->picture_row_count && !rc; i++) {
        const struct picture_rows *rows = &text->picture_rows[i];
        const struct picture *picture = text->pictures[rows->picture];
        if (begins_tile(text, i)) {
            tile = out;
            rc = encode_tile(pictures, picture, rows->tile, tile);
            out += (size_t)picture->tile_tokens * (size_t)pictures->width;
        }
        pictures->given[i] =
            (struct kern_given){.row = (int32_t)rows->at,
                                .count = rows->count,
                                .together = picture->together,
                                .deep = deep,
                                .rows = tile + (size_t)rows->first * (size_t)pictures->width};
        for (int k = 0; k < rows->count; k++) pictures->tokens[rows->at + (size_t)k] = 0;
    }
    return rc;
}

static int open_present(struct fit_pictures *pictures, const struct engine_fit_text *text) {
    const size_t count = (size_t)text->count;
    size_t rows = 0;
    for (int i = 0; i < text->picture_row_count; i++)
        if (begins_tile(text, i))
            rows += (size_t)text->pictures[text->picture_rows[i].picture]->tile_tokens;
    pictures->tokens = mem_try_alloc(count, sizeof *pictures->tokens);
    pictures->given = mem_try_alloc((size_t)text->picture_row_count, sizeof *pictures->given);
    pictures->rows = mem_try_alloc(rows, (size_t)pictures->width * sizeof *pictures->rows);
    if (pictures->dimensions) {
        pictures->places = mem_try_alloc(count, sizeof *pictures->places);
        if (!pictures->places) return ERR_NOMEM;
    }
    return pictures->tokens && pictures->given && pictures->rows ? 0 : ERR_NOMEM;
}

int fit_pictures_encode(struct fit_pictures *pictures, const struct engine_fit_text *text,
                        struct worth_input *input) {
    drop_present(pictures);
    int rc = open_present(pictures, text);
    if (rc) return rc;
    for (int i = 0; i < text->count; i++) pictures->tokens[i] = text->ids[i];
    if (pictures->places)
        grid_places((struct grid_cursor){0}, text->ids, 0, text->count, pictures->places);
    rc = encode_tiles(pictures, text);
    *input = (struct worth_input){.tokens = pictures->tokens,
                                  .count = text->count,
                                  .places = pictures->places,
                                  .given = pictures->given,
                                  .given_count = text->picture_row_count};
    return rc;
}
