/* From decoded pixels to tiles, as Idefics3's processor makes them.
 *
 * The longer side is resized to longest_edge, the shorter one in proportion, to an even number.
 * Both are then stretched to multiples of a tile. Of more than one tile, the grid is cut and the
 * whole picture, resized to one tile, comes last. */
#include "picture/prepare.h"

#include "base/check.h"
#include "base/mem.h"
#include "picture/resize.h"

/* --- sizes --- */

/* Sizes are computed with divisions in double precision and cut off, as in the published processor:
 * in integers some would differ by a pixel. */
static void scale_longest(int longest, int *width, int *height) {
    const double ratio = (double)*width / *height;
    if (*width >= *height) {
        *width = longest;
        *height = (int)(longest / ratio);
        *height += *height % 2;
    } else {
        *height = longest;
        *width = (int)(longest * ratio);
        *width += *width % 2;
    }
    if (*width < 1) *width = 1;
    if (*height < 1) *height = 1;
}

static int next_multiple(int value, int of) {
    return (value + of - 1) / of * of;
}

static void stretch_to_tiles(int edge, int *width, int *height) {
    const double ratio = (double)*width / *height;
    if (*width >= *height) {
        *width = next_multiple(*width, edge);
        *height = next_multiple((int)(*width / ratio), edge);
    } else {
        *height = next_multiple(*height, edge);
        *width = next_multiple((int)(*height * ratio), edge);
    }
}

/* --- tiles --- */

/* Copies a part of `from`, of a tile's size, into the tile, channel after channel. */
static void cut_tile(const struct picture_rgb *from, int left, int top,
                     const struct picture *picture, uint8_t *tile) {
    const size_t width = (size_t)picture->tile_width, height = (size_t)picture->tile_height;
    for (size_t y = 0; y < height; y++) {
        const uint8_t *row =
            from->pixels + (((size_t)top + y) * (size_t)from->width + (size_t)left) * 3;
        for (size_t c = 0; c < 3; c++) {
            uint8_t *to = tile + (c * height + y) * width;
            for (size_t x = 0; x < width; x++) to[x] = row[x * 3 + c];
        }
    }
}

static void add_digest_number(struct sha256_stream *stream, int number) {
    const uint8_t bytes[4] = {(uint8_t)number, (uint8_t)(number >> 8), (uint8_t)(number >> 16),
                              (uint8_t)(number >> 24)};
    sha256_add(stream, bytes, sizeof bytes);
}

static size_t tile_bytes(const struct picture *picture) {
    return 3 * (size_t)picture->tile_width * (size_t)picture->tile_height;
}

static void digest_tiles(struct picture *picture) {
    struct sha256_stream stream;
    sha256_begin(&stream);
    add_digest_number(&stream, picture->rows);
    add_digest_number(&stream, picture->columns);
    add_digest_number(&stream, picture->tile_width);
    add_digest_number(&stream, picture->tile_height);
    add_digest_number(&stream, picture->tile_tokens);
    sha256_add(&stream, picture->pixels, (size_t)picture->tiles * tile_bytes(picture));
    sha256_end(&stream, picture->digest);
}

atomic_int_fast64_t prepared_bytes;

static int64_t picture_bytes(const struct picture *picture) {
    return (int64_t)picture->tiles * (int64_t)tile_bytes(picture);
}

static int no_memory(struct fault *fault) {
    return fault_set(fault, ERR_NOMEM, NULL, "not enough memory for the picture");
}

/* Allocates a picture of `shape`, which says how many tiles of which size it has. */
static int open_picture(const struct picture_rgb *rgb, const struct picture_form *form,
                        const struct picture *shape, struct picture **out, struct fault *fault) {
    if (shape->tiles > PICTURE_TILES_MAX)
        return fault_set(fault, ERR_LIMIT, NULL, "the picture has %d tiles, at most %d are read",
                         shape->tiles, PICTURE_TILES_MAX);
    struct picture *picture = mem_try_alloc(1, sizeof *picture);
    if (!picture) return no_memory(fault);
    *picture = *shape;
    picture->tile_rows = shape->tile_height / form->token_edge;
    picture->tile_columns = shape->tile_width / form->token_edge;
    picture->tile_tokens = picture->tile_rows * picture->tile_columns;
    picture->width = rgb->width;
    picture->height = rgb->height;
    picture->counts = 1;
    const int64_t bytes = picture_bytes(picture);
    const bool fits = atomic_fetch_add(&prepared_bytes, bytes) + bytes <= PICTURE_MEMORY_MAX;
    if (fits) picture->pixels = mem_try_alloc((size_t)picture->tiles, tile_bytes(picture));
    *out = picture;
    if (picture->pixels) return 0;
    picture_drop(picture);
    *out = NULL;
    return fits ? no_memory(fault)
                : fault_set(fault, ERR_BUSY, NULL, "too many pictures are being read");
}

/* Cuts the grid out of a picture that was stretched to tiles, then adds the whole as the last. */
static int fill_tiles(const struct picture_rgb *from, const struct picture_form *form,
                      struct picture *picture, struct fault *fault) {
    const int edge = form->tile_edge;
    struct picture_rgb whole;
    uint8_t *tile = picture->pixels;
    for (int row = 0; row < picture->rows; row++)
        for (int column = 0; column < picture->columns; column++, tile += tile_bytes(picture))
            cut_tile(from, column * edge, row * edge, picture, tile);
    if (picture_resize(from, edge, edge, form->filter, &whole)) return no_memory(fault);
    cut_tile(&whole, 0, 0, picture, tile);
    mem_free(whole.pixels);
    digest_tiles(picture);
    return 0;
}

int picture_prepare(const struct picture_rgb *rgb, const struct picture_form *form, bool whole,
                    struct picture **out, struct fault *fault) {
    struct picture_rgb scaled = {0}, stretched = {0};
    int width = rgb->width, height = rgb->height, rows = 0, columns = 0;
    const bool splits = form->splits && !whole;
    *out = NULL;
    CHECK(form->kind == PICTURE_IDEFICS3);
    scale_longest(form->longest_edge, &width, &height);
    if (picture_resize(rgb, width, height, form->filter, &scaled)) return no_memory(fault);
    if (splits) {
        stretch_to_tiles(form->tile_edge, &width, &height);
        rows = height / form->tile_edge;
        columns = width / form->tile_edge;
    }
    if (rows * columns == 1) rows = columns = 0;
    const struct picture shape = {.tiles = rows * columns + 1,
                                  .rows = rows,
                                  .columns = columns,
                                  .tile_width = form->tile_edge,
                                  .tile_height = form->tile_edge};
    int rc = open_picture(rgb, form, &shape, out, fault);
    if (!rc && splits && picture_resize(&scaled, width, height, form->filter, &stretched))
        rc = no_memory(fault);
    if (!rc) rc = fill_tiles(splits ? &stretched : &scaled, form, *out, fault);
    mem_free(scaled.pixels);
    mem_free(stretched.pixels);
    if (!rc) return 0;
    picture_drop(*out);
    *out = NULL;
    return rc;
}

/* --- counts --- */

struct picture *picture_hold(struct picture *picture) {
    __atomic_fetch_add(&picture->counts, 1, __ATOMIC_RELAXED);
    return picture;
}

void picture_drop(struct picture *picture) {
    if (!picture || __atomic_fetch_sub(&picture->counts, 1, __ATOMIC_ACQ_REL) > 1) return;
    atomic_fetch_sub(&prepared_bytes, picture_bytes(picture));
    mem_free(picture->pixels);
    mem_free(picture);
}
