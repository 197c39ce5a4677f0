/* From decoded pixels to tiles, as the published processors that work with Pillow make them.
 *
 * Idefics3: the longer side is resized to longest_edge, the shorter one in proportion, to an even
 * number. Both are then stretched to multiples of a tile. Of more than one tile, the grid is cut
 * and the whole picture, resized to one tile, comes last.
 *
 * Qwen2-VL: the whole picture is the only tile, of about its own size.
 *
 * Gemma 3: the whole picture is the only tile, a square.
 *
 * Pixtral: the whole picture is the only tile. If it is too large it is first made smaller in
 * proportion; then its sides are rounded up to whole tokens. */
#include "picture/prepare.h"

#include <math.h>

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

/* Returns the next multiple that is not 0. */
static int next_multiple(int value, int of) {
    return value < of ? of : (value + of - 1) / of * of;
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
    picture->together = form->together;
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

/* Cuts the grid, if there is one, out of a picture that was stretched to tiles, then adds the whole
 * as the last. */
static int fill_tiles(const struct picture_rgb *from, const struct picture_form *form,
                      struct picture *picture, struct fault *fault) {
    const int width = picture->tile_width, height = picture->tile_height;
    struct picture_rgb whole;
    uint8_t *tile = picture->pixels;
    for (int row = 0; row < picture->rows; row++)
        for (int column = 0; column < picture->columns; column++, tile += tile_bytes(picture))
            cut_tile(from, column * width, row * height, picture, tile);
    if (picture_resize(from, width, height, form->filter, &whole)) return no_memory(fault);
    cut_tile(&whole, 0, 0, picture, tile);
    mem_free(whole.pixels);
    digest_tiles(picture);
    return 0;
}

/* --- plans --- */

/* The sizes through which a picture goes on its way to tiles. */
struct picture_plan {
    int resizes; /* sizes of the whole picture in front of the tiles, one after another */
    int widths[2], heights[2];
    struct picture shape; /* tiles, their grid and size */
};

static void add_resize(struct picture_plan *plan, int width, int height) {
    plan->widths[plan->resizes] = width;
    plan->heights[plan->resizes++] = height;
}

static int plan_idefics3(const struct picture_rgb *rgb, const struct picture_form *form, bool low,
                         struct picture_plan *plan, struct fault *fault) {
    int width = rgb->width, height = rgb->height, rows = 0, columns = 0;
    (void)fault;
    scale_longest(form->longest_edge, &width, &height);
    add_resize(plan, width, height);
    if (form->splits && !low) {
        stretch_to_tiles(form->tile_edge, &width, &height);
        add_resize(plan, width, height);
        rows = height / form->tile_edge;
        columns = width / form->tile_edge;
    }
    if (rows * columns == 1) rows = columns = 0;
    plan->shape = (struct picture){.tiles = rows * columns + 1,
                                   .rows = rows,
                                   .columns = columns,
                                   .tile_width = form->tile_edge,
                                   .tile_height = form->tile_edge};
    return 0;
}

/* Returns a side in whole tokens, with divisions in the order of the published processor. */
static int round_side(int side, double by, int token, double (*round)(double)) {
    const int whole = (int)round(side / by / token) * token;
    return whole < token ? token : whole;
}

/* transformers, smart_resize of Qwen2-VL: sides are multiples of a token's, the number of pixels is
 * within the bounds, and the ratio of the sides stays as it is within these. */
static int plan_smart(const struct picture_rgb *rgb, const struct picture_form *form, bool low,
                      struct picture_plan *plan, struct fault *fault) {
    const int token = form->token_edge, width = rgb->width, height = rgb->height;
    const double pixels = (double)width * height;
    int most = form->max_pixels;
    if (low && most > PICTURE_LOW_PIXELS)
        most = form->min_pixels > PICTURE_LOW_PIXELS ? form->min_pixels : PICTURE_LOW_PIXELS;
    if (width > (int64_t)PICTURE_RATIO_MAX * height || height > (int64_t)PICTURE_RATIO_MAX * width)
        return fault_set(fault, ERR_LIMIT, NULL,
                         "the picture has %d x %d pixels; one side may be at most %d times as long "
                         "as the other",
                         width, height, PICTURE_RATIO_MAX);
    int wide = (int)rint((double)width / token) * token,
        high = (int)rint((double)height / token) * token;
    if ((int64_t)wide * high > most) {
        const double by = sqrt(pixels / most);
        wide = round_side(width, by, token, floor);
        high = round_side(height, by, token, floor);
    } else if ((int64_t)wide * high < form->min_pixels) {
        const double by = sqrt(form->min_pixels / pixels);
        wide = (int)ceil(width * by / token) * token;
        high = (int)ceil(height * by / token) * token;
    }
    plan->shape = (struct picture){.tiles = 1, .tile_width = wide, .tile_height = high};
    return 0;
}

static int plan_stretched(const struct picture_rgb *rgb, const struct picture_form *form, bool low,
                          struct picture_plan *plan, struct fault *fault) {
    (void)rgb;
    (void)low;
    (void)fault;
    plan->shape =
        (struct picture){.tiles = 1, .tile_width = form->tile_edge, .tile_height = form->tile_edge};
    return 0;
}

/* transformers, get_resize_output_image_size of Pixtral. A side that this would leave no pixel of
 * keeps one. */
static int plan_lines(const struct picture_rgb *rgb, const struct picture_form *form, bool low,
                      struct picture_plan *plan, struct fault *fault) {
    int width = rgb->width, height = rgb->height, longest = form->longest_edge;
    (void)fault;
    if (low && longest > PICTURE_LOW_EDGE) longest = PICTURE_LOW_EDGE;
    const double by = fmax((double)height / longest, (double)width / longest);
    if (by > 1) {
        width = (int)floor(width / by);
        height = (int)floor(height / by);
    }
    plan->shape = (struct picture){.tiles = 1,
                                   .tile_width = next_multiple(width, form->token_edge),
                                   .tile_height = next_multiple(height, form->token_edge)};
    return 0;
}

static int (*const planners[])(const struct picture_rgb *rgb, const struct picture_form *form,
                               bool low, struct picture_plan *plan, struct fault *fault) = {
    [PICTURE_IDEFICS3] = plan_idefics3,
    [PICTURE_SMART] = plan_smart,
    [PICTURE_STRETCHED] = plan_stretched,
    [PICTURE_LINES] = plan_lines,
};

int picture_prepare(const struct picture_rgb *rgb, const struct picture_form *form, bool low,
                    struct picture **out, struct fault *fault) {
    struct picture_rgb resized[2] = {0};
    struct picture_plan plan = {0};
    const struct picture_rgb *from = rgb;
    *out = NULL;
    CHECK((size_t)form->kind < sizeof planners / sizeof *planners && planners[form->kind]);
    int rc = planners[form->kind](rgb, form, low, &plan, fault);
    if (!rc) rc = open_picture(rgb, form, &plan.shape, out, fault);
    for (int i = 0; i < plan.resizes && !rc; i++, from = &resized[i - 1])
        if (picture_resize(from, plan.widths[i], plan.heights[i], form->filter, &resized[i]))
            rc = no_memory(fault);
    if (!rc) rc = fill_tiles(from, form, *out, fault);
    mem_free(resized[0].pixels);
    mem_free(resized[1].pixels);
    if (!rc) return 0;
    picture_drop(*out);
    *out = NULL;
    return rc;
}

/* --- counts --- */

int64_t picture_bytes_held(void) {
    return atomic_load(&prepared_bytes);
}

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
