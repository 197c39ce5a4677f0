/* Encoded tiles of pictures: rows of embeddings that stand in prompts in place of tokens'.
 *
 * A tile is known by its picture's digest and its number, so a picture is encoded once for all
 * requests that show it, as long as its rows are kept: of `tiles_max` tiles those that were used
 * last. They are encoded one at a time, part by part, between steps (sched_pictures.c). A tile that
 * was begun is finished, whoever asked for it: the encoder has its pixels.
 *
 * Thread: the engine thread. */
#ifndef KEEPD_ENGINE_STEPS_PICTURES_H
#define KEEPD_ENGINE_STEPS_PICTURES_H

#include <stdbool.h>
#include <stdint.h>

#include "picture/picture.h"

struct pictures_options {
    void *encoder; /* NULL: the model sees no pictures */
    /* Begins a tile, and does the next part of it: vision_begin, vision_advance (model/vision.h).
     */
    int (*begin)(void *encoder, const struct picture *picture, int tile);
    int (*advance)(void *encoder, float *out, bool *done);
    int tile_tokens, width; /* rows of a tile, numbers of a row */
    int tiles_max;          /* at least 2 */
};

struct picture_tile {
    uint8_t digest[SHA256_BYTES];
    int tile;
    float *rows;  /* [tile_tokens, width]; owned. NULL: the place was never used */
    bool ready;   /* the rows are there */
    uint64_t use; /* the number of its last use; 0: the place is free */
};

struct pictures {
    struct pictures_options options;
    struct picture_tile *tiles; /* [tiles_max] */
    uint64_t uses;
    struct picture_tile *present; /* is being encoded; NULL: none is */
};

void pictures_open(struct pictures *pictures, const struct pictures_options *options);
void pictures_close(struct pictures *pictures);

/* Returns the rows of a tile, valid until the next pictures_begin; NULL: it must be encoded. */
const float *pictures_find(struct pictures *pictures, const struct picture *picture, int tile);
/* Begins a tile that is not there, while none is present, in the place of the one that was used
 * least recently. ERR_NOMEM: there is no memory for its rows. Another error is the encoder's. */
int pictures_begin(struct pictures *pictures, const struct picture *picture, int tile);
/* Does the next part of the present tile. On an error no tile is present. */
int pictures_advance(struct pictures *pictures);

#endif
