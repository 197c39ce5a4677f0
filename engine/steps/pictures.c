#include "engine/steps/pictures.h"

#include <string.h>

#include "base/check.h"
#include "base/mem.h"

void pictures_open(struct pictures *pictures, const struct pictures_options *options) {
    *pictures = (struct pictures){.options = *options};
    if (!options->encoder) return;
    CHECK(options->tiles_max >= 2 && options->tile_tokens > 0 && options->width > 0);
    pictures->tiles = mem_must_alloc((size_t)options->tiles_max, sizeof *pictures->tiles);
}

void pictures_close(struct pictures *pictures) {
    for (int i = 0; pictures->tiles && i < pictures->options.tiles_max; i++)
        mem_free(pictures->tiles[i].rows);
    mem_free(pictures->tiles);
    *pictures = (struct pictures){0};
}

static bool is_tile(const struct picture_tile *of, const struct picture *picture, int tile) {
    return of->use > 0 && of->tile == tile &&
           memcmp(of->digest, picture->digest, sizeof of->digest) == 0;
}

const float *pictures_find(struct pictures *pictures, const struct picture *picture, int tile) {
    for (int i = 0; i < pictures->options.tiles_max; i++) {
        struct picture_tile *of = &pictures->tiles[i];
        if (!is_tile(of, picture, tile) || !of->ready) continue;
        of->use = ++pictures->uses;
        return of->rows;
    }
    return NULL;
}

int pictures_begin(struct pictures *pictures, const struct picture *picture, int tile) {
    const struct pictures_options *options = &pictures->options;
    struct picture_tile *to = &pictures->tiles[0];
    CHECK(!pictures->present);
    for (int i = 1; i < options->tiles_max; i++)
        if (pictures->tiles[i].use < to->use) to = &pictures->tiles[i];
    if (!to->rows)
        to->rows =
            mem_try_alloc((size_t)options->tile_tokens * (size_t)options->width, sizeof *to->rows);
    if (!to->rows) return ERR_NOMEM;
    to->ready = false;
    to->use = 0;
    int rc = options->begin(options->encoder, picture, tile);
    if (rc != 0) return rc;
    memcpy(to->digest, picture->digest, sizeof to->digest);
    to->tile = tile;
    to->use = ++pictures->uses;
    pictures->present = to;
    return 0;
}

int pictures_advance(struct pictures *pictures) {
    struct picture_tile *present = pictures->present;
    bool done = false;
    int rc = pictures->options.advance(pictures->options.encoder, present->rows, &done);
    if (rc != 0) present->use = 0;
    present->ready = rc == 0 && done;
    if (rc != 0 || done) pictures->present = NULL;
    return rc;
}
