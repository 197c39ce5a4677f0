/* Encoded tiles of pictures: rows of embeddings that stand in prompts in place of tokens'.
 *
 * A tile is known by its picture's digest and its number, so a picture is encoded once for all
 * requests that show it, as long as its rows are kept: within `bytes_max` those that were used
 * last. They are encoded one at a time, part by part, between steps (sched_pictures.c). A tile that
 * was begun is finished, whoever asked for it: the encoder has its pixels.
 *
 * Thread: the engine thread. */
#ifndef KEEPD_ENGINE_STEPS_PICTURES_H
#define KEEPD_ENGINE_STEPS_PICTURES_H

#include <stdbool.h>
#include <stdint.h>

#include "picture/picture.h"

#define PICTURES_BUCKETS 1024 /* a power of 2 */

struct pictures_options {
    void *encoder; /* NULL: the model sees no pictures */
    /* Begins a tile, and does the next part of it: vision_begin, vision_advance (model/vision.h).
     */
    int (*begin)(void *encoder, const struct picture *picture, int tile);
    int (*advance)(void *encoder, float *out, bool *done);
    int width;         /* numbers of a row, those of its further vectors included */
    int deep;          /* further vectors (struct kern_given) */
    int64_t bytes_max; /* all tiles' rows together; at least two of the largest tile */
};

struct picture_tile {
    uint8_t digest[SHA256_BYTES];
    int tile;
    float *rows; /* [tile_tokens, width]; owned */
    int64_t bytes;
    uint64_t needed_in;        /* pictures.round of the last pictures_need */
    struct picture_tile *next; /* in its bucket */
    struct picture_tile *older, *newer;
};

struct pictures {
    struct pictures_options options;
    struct picture_tile *buckets[PICTURES_BUCKETS]; /* all encoded tiles */
    struct picture_tile *oldest, *newest;           /* the same, by their last use */
    struct picture_tile *present;                   /* is being encoded; NULL: none is */
    int64_t bytes; /* the rows of all encoded tiles and of the present one */
    uint64_t round;
    int64_t needed; /* bytes of the tiles that are needed in this round */
};

void pictures_open(struct pictures *pictures, const struct pictures_options *options);
void pictures_close(struct pictures *pictures);

/* Returns the rows of a tile, valid until the next pictures_begin; NULL: it must be encoded. */
const float *pictures_find(struct pictures *pictures, const struct picture *picture, int tile);

/* Ends the needs of the earlier calls of pictures_need. A tile that is begun takes the place of
 * none that was needed since: one that a prompt is reading is not encoded twice for it. */
void pictures_release(struct pictures *pictures);
/* Returns whether the tile is encoded. */
bool pictures_need(struct pictures *pictures, const struct picture *picture, int tile);
/* Returns whether a tile of the picture fits beside those that are needed. */
bool pictures_have_room(const struct pictures *pictures, const struct picture *picture);
/* Begins a tile that is not there, while none is present and it has room, in the place of those
 * that were used least recently. ERR_NOMEM: there is no memory for its rows. Another error is the
 * encoder's. */
int pictures_begin(struct pictures *pictures, const struct picture *picture, int tile);
/* Does the next part of the present tile. On an error no tile is present. */
int pictures_advance(struct pictures *pictures);

#endif
