#include "engine/steps/pictures.h"

#include <string.h>

#include "base/check.h"
#include "base/mem.h"

void pictures_open(struct pictures *pictures, const struct pictures_options *options) {
    *pictures = (struct pictures){.options = *options, .round = 1};
    if (options->encoder) CHECK(options->bytes_max > 0 && options->width > 0);
}

/* ---- The kept tiles ---- */

static struct picture_tile **tile_bucket(struct pictures *pictures, const uint8_t *digest,
                                         int tile) {
    uint32_t hash;
    memcpy(&hash, digest, sizeof hash);
    return &pictures->buckets[(hash + (uint32_t)tile) % PICTURES_BUCKETS];
}

static void free_tile(struct pictures *pictures, struct picture_tile *tile) {
    if (!tile) return;
    pictures->bytes -= tile->bytes;
    mem_free(tile->rows);
    mem_free(tile);
}

static void unlink_tile(struct pictures *pictures, struct picture_tile *tile) {
    *(tile->older ? &tile->older->newer : &pictures->oldest) = tile->newer;
    *(tile->newer ? &tile->newer->older : &pictures->newest) = tile->older;
}

static void link_newest_tile(struct pictures *pictures, struct picture_tile *tile) {
    tile->older = pictures->newest;
    tile->newer = NULL;
    *(tile->older ? &tile->older->newer : &pictures->oldest) = tile;
    pictures->newest = tile;
}

static void keep_tile(struct pictures *pictures, struct picture_tile *tile) {
    struct picture_tile **bucket = tile_bucket(pictures, tile->digest, tile->tile);
    tile->next = *bucket;
    *bucket = tile;
    link_newest_tile(pictures, tile);
}

static void drop_tile(struct pictures *pictures, struct picture_tile *tile) {
    struct picture_tile **at = tile_bucket(pictures, tile->digest, tile->tile);
    while (*at != tile) at = &(*at)->next;
    *at = tile->next;
    unlink_tile(pictures, tile);
    free_tile(pictures, tile);
}

void pictures_close(struct pictures *pictures) {
    while (pictures->oldest) drop_tile(pictures, pictures->oldest);
    free_tile(pictures, pictures->present);
    *pictures = (struct pictures){0};
}

/* Finds an encoded tile, which is used now. */
static struct picture_tile *use_tile(struct pictures *pictures, const struct picture *picture,
                                     int tile) {
    struct picture_tile *found = *tile_bucket(pictures, picture->digest, tile);
    while (found && (found->tile != tile ||
                     memcmp(found->digest, picture->digest, sizeof found->digest) != 0))
        found = found->next;
    if (!found) return NULL;
    unlink_tile(pictures, found);
    link_newest_tile(pictures, found);
    return found;
}

const float *pictures_find(struct pictures *pictures, const struct picture *picture, int tile) {
    const struct picture_tile *found = use_tile(pictures, picture, tile);
    return found ? found->rows : NULL;
}

/* ---- Room ---- */

static int64_t rows_bytes(const struct pictures *pictures, const struct picture *picture) {
    return (int64_t)picture->tile_tokens * pictures->options.width * (int64_t)sizeof(float);
}

void pictures_release(struct pictures *pictures) {
    pictures->round++;
    pictures->needed = 0;
}

bool pictures_need(struct pictures *pictures, const struct picture *picture, int tile) {
    struct picture_tile *found = use_tile(pictures, picture, tile);
    if (found && found->needed_in != pictures->round) {
        found->needed_in = pictures->round;
        pictures->needed += found->bytes;
    }
    return found != NULL;
}

bool pictures_have_room(const struct pictures *pictures, const struct picture *picture) {
    return pictures->needed + rows_bytes(pictures, picture) <= pictures->options.bytes_max;
}

/* Drops tiles that are not needed, first those that were used least recently, until `bytes` fit. */
static void make_room(struct pictures *pictures, int64_t bytes) {
    struct picture_tile *tile = pictures->oldest, *newer;
    for (; tile && pictures->bytes + bytes > pictures->options.bytes_max; tile = newer) {
        newer = tile->newer;
        if (tile->needed_in != pictures->round) drop_tile(pictures, tile);
    }
}

/* ---- Encoding ---- */

static int open_tile(struct pictures *pictures, const struct picture *picture, int tile) {
    const int64_t bytes = rows_bytes(pictures, picture);
    make_room(pictures, bytes);
    struct picture_tile *to = mem_try_alloc(1, sizeof *to);
    if (!to) return ERR_NOMEM;
    *to = (struct picture_tile){.tile = tile, .bytes = bytes};
    memcpy(to->digest, picture->digest, sizeof to->digest);
    pictures->bytes += bytes;
    pictures->present = to;
    to->rows = mem_try_alloc((size_t)bytes, 1);
    return to->rows ? 0 : ERR_NOMEM;
}

static void give_up_present(struct pictures *pictures) {
    free_tile(pictures, pictures->present);
    pictures->present = NULL;
}

int pictures_begin(struct pictures *pictures, const struct picture *picture, int tile) {
    const struct pictures_options *options = &pictures->options;
    CHECK(!pictures->present && pictures_have_room(pictures, picture));
    int rc = open_tile(pictures, picture, tile);
    if (rc == 0) rc = options->begin(options->encoder, picture, tile);
    if (rc != 0) give_up_present(pictures);
    return rc;
}

int pictures_advance(struct pictures *pictures) {
    struct picture_tile *present = pictures->present;
    bool done = false;
    int rc = pictures->options.advance(pictures->options.encoder, present->rows, &done);
    if (rc != 0) {
        give_up_present(pictures);
    } else if (done) {
        pictures->present = NULL;
        keep_tile(pictures, present);
    }
    return rc;
}
