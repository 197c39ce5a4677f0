#include <criterion/criterion.h>
#include <math.h>

#include "picture/prepare.h"
#include "samples.h"
#include "sums.h"

static const struct picture_form smol = {.kind = PICTURE_IDEFICS3,
                                         .filter = PICTURE_LANCZOS,
                                         .longest_edge = 256,
                                         .token_edge = 32,
                                         .tile_tokens_max = 4,
                                         .tile_edge = 64,
                                         .splits = true,
                                         .rescale = 1.0 / 255,
                                         .mean = {0.5f, 0.5f, 0.5f},
                                         .deviation = {0.5f, 0.5f, 0.5f}};

static struct picture *prepare(int width, int height, const struct picture_form *form, bool whole) {
    struct picture_rgb rgb = sample_picture(width, height);
    struct picture *picture;
    struct fault fault = {0};
    cr_assert_eq(picture_prepare(&rgb, form, whole, &picture, &fault), 0, "%s", fault.text);
    mem_free(rgb.pixels);
    return picture;
}

/* Results of the published processor. */
static const struct {
    int width, height, longest_edge, tile_edge;
    bool splits;
    int rows, columns, tiles;
    struct sums sums;
} prepared[] = {
#include "prepared.inc"
};

Test(picture_prepare, has_the_tiles_of_the_processor) {
    for (size_t i = 0; i < sizeof prepared / sizeof *prepared; i++) {
        struct picture_form form = smol;
        form.longest_edge = prepared[i].longest_edge;
        form.tile_edge = prepared[i].tile_edge;
        form.splits = prepared[i].splits;
        struct picture *p = prepare(prepared[i].width, prepared[i].height, &form, false);
        cr_expect(p->rows == prepared[i].rows && p->columns == prepared[i].columns &&
                      p->tiles == prepared[i].tiles,
                  "row %zu: %d x %d, %d", i, p->rows, p->columns, p->tiles);
        cr_expect(p->width == prepared[i].width && p->height == prepared[i].height);
        expect_sums(p->pixels, (size_t)p->tiles * 3 * (size_t)(p->tile_width * p->tile_height),
                    prepared[i].sums, "prepared", i);
        picture_drop(p);
    }
}

/* 98 * (1.0 / 98) is less than 1. */
Test(picture_prepare, a_tile_is_at_least_one_pixel_of_the_picture) {
    struct picture_form form = smol;
    form.longest_edge = 98;
    form.tile_edge = 49;
    struct picture *p = prepare(1, 500, &form, false);
    cr_expect(p->rows == 2 && p->columns == 1 && p->tiles == 3, "%d x %d", p->rows, p->columns);
    picture_drop(p);
}

/* As smart.inc has them: a picture, the form, and the size and sums of the tile. */
struct smart {
    int width, height, token_edge, min_pixels, max_pixels;
    int tile_width, tile_height;
    struct sums sums;
};
static const struct smart smarts[] = {
#include "tests/unit/picture/smart.inc"
};

static struct picture_form smart_form(int token_edge, int min_pixels, int max_pixels) {
    struct picture_form form = smol;
    form.kind = PICTURE_SMART;
    form.filter = PICTURE_BICUBIC;
    form.tile_edge = form.longest_edge = 0;
    form.token_edge = token_edge;
    form.min_pixels = min_pixels;
    form.max_pixels = max_pixels;
    form.tile_tokens_max = picture_smart_tokens(&form);
    return form;
}

Test(picture_prepare, has_the_shape_and_pixels_of_the_processor) {
    for (size_t i = 0; i < sizeof smarts / sizeof *smarts; i++) {
        const struct smart *s = &smarts[i];
        const struct picture_form form = smart_form(s->token_edge, s->min_pixels, s->max_pixels);
        cr_assert_eq(picture_check_form(&form, NULL), 0);
        struct picture *p = prepare(s->width, s->height, &form, false);
        cr_assert(p->tiles == 1 && p->rows == 0 && p->tile_width == s->tile_width &&
                      p->tile_height == s->tile_height,
                  "row %zu: %d x %d", i, p->tile_width, p->tile_height);
        cr_assert(picture_is_of_form(p, &form), "row %zu: %d tokens, at most %d", i, p->tile_tokens,
                  form.tile_tokens_max);
        expect_sums(p->pixels, 3 * (size_t)(p->tile_width * p->tile_height), s->sums, "row %zu", i);
        picture_drop(p);
    }
}

/* As stretched.inc has them: a picture, the side of its tile, and the sums of it. */
static const struct {
    int width, height, edge;
    struct sums sums;
} stretched[] = {
#include "stretched.inc"
};

static struct picture_form stretched_form(int edge) {
    struct picture_form form = smol;
    form.kind = PICTURE_STRETCHED;
    form.filter = PICTURE_BILINEAR;
    form.tile_edge = form.longest_edge = edge;
    form.token_edge = 28;
    form.tile_tokens_max = edge / 28 * (edge / 28);
    form.splits = false;
    form.together = true;
    return form;
}

Test(picture_prepare, a_stretched_picture_is_that_of_the_processor) {
    for (size_t i = 0; i < sizeof stretched / sizeof *stretched; i++) {
        const struct picture_form form = stretched_form(stretched[i].edge);
        cr_assert_eq(picture_check_form(&form, NULL), 0);
        struct picture *p = prepare(stretched[i].width, stretched[i].height, &form, i % 2);
        cr_assert(p->tiles == 1 && p->rows == 0 && p->together && picture_is_of_form(p, &form));
        expect_sums(p->pixels, 3 * (size_t)(p->tile_width * p->tile_height), stretched[i].sums,
                    "stretched", i);
        picture_drop(p);
    }
}

/* As lined.inc has them: a picture, the form, and the size and sums of the tile. */
static const struct {
    int width, height, longest_edge, token_edge;
    int tile_width, tile_height;
    struct sums sums;
} lined[] = {
#include "lined.inc"
};

static struct picture_form lined_form(int longest_edge, int token_edge) {
    struct picture_form form = smol;
    form.kind = PICTURE_LINES;
    form.filter = PICTURE_BICUBIC;
    form.tile_edge = 0;
    form.longest_edge = longest_edge;
    form.token_edge = token_edge;
    form.tile_tokens_max = PICTURE_TOKENS_MAX;
    return form;
}

Test(picture_prepare, a_picture_in_lines_is_that_of_the_processor) {
    for (size_t i = 0; i < sizeof lined / sizeof *lined; i++) {
        const struct picture_form form = lined_form(lined[i].longest_edge, lined[i].token_edge);
        cr_assert_eq(picture_check_form(&form, NULL), 0);
        struct picture *p = prepare(lined[i].width, lined[i].height, &form, false);
        cr_assert(p->tiles == 1 && p->rows == 0 && p->tile_width == lined[i].tile_width &&
                      p->tile_height == lined[i].tile_height && picture_is_of_form(p, &form),
                  "row %zu: %d x %d", i, p->tile_width, p->tile_height);
        expect_sums(p->pixels, 3 * (size_t)(p->tile_width * p->tile_height), lined[i].sums, "lined",
                    i);
        picture_drop(p);
    }
}

Test(picture_prepare, a_line_of_a_picture_is_never_empty) {
    const struct picture_form form = lined_form(1024, 16);
    struct picture *thin = prepare(2, 4000, &form, false), *low = prepare(700, 2000, &form, true);
    cr_expect(thin->tile_width == 16 && thin->tile_height == 1024, "%d x %d", thin->tile_width,
              thin->tile_height);
    cr_expect(low->tile_width == 192 && low->tile_height == 512, "%d x %d", low->tile_width,
              low->tile_height);
    picture_drop(thin);
    picture_drop(low);
}

Test(picture_prepare, low_detail_is_a_small_tile) {
    const struct picture_form form = smart_form(28, 56 * 56, 28 * 28 * 4096),
                              least = smart_form(28, 600 * 600, 28 * 28 * 4096);
    struct picture *high = prepare(1500, 1000, &form, false),
                   *low = prepare(1500, 1000, &form, true),
                   *large = prepare(1500, 1000, &least, true);
    cr_expect(high->tile_width == 1512 && high->tile_height == 1008);
    cr_expect(low->tile_width == 616 && low->tile_height == 392, "%d x %d", low->tile_width,
              low->tile_height);
    cr_expect(low->tile_width * low->tile_height <= PICTURE_LOW_PIXELS);
    cr_expect(large->tile_width * large->tile_height > PICTURE_LOW_PIXELS);
    cr_expect(large->tile_width * large->tile_height <= least.min_pixels);
    picture_drop(high);
    picture_drop(low);
    picture_drop(large);
}

static void expect_shape_refused(int width, int height, const struct picture_form *form) {
    struct picture_rgb rgb = sample_picture(width, height);
    struct picture *picture;
    struct fault fault = {0};
    cr_expect_eq(picture_prepare(&rgb, form, false, &picture, &fault), ERR_LIMIT, "%d x %d", width,
                 height);
    cr_expect_null(picture);
    mem_free(rgb.pixels);
}

Test(picture_prepare, refuses_shapes_that_are_too_long) {
    const struct picture_form form = smart_form(28, 56 * 56, 28 * 28 * 1280);
    expect_shape_refused(201, 1, &form);
    expect_shape_refused(1, 201, &form);
    picture_drop(prepare(200, 1, &form, false));
}

Test(picture_prepare, makes_one_tile_where_the_client_or_the_model_wants_one) {
    struct picture_form plain = smol, small = smol;
    plain.splits = false;
    small.longest_edge = 64;
    struct picture *whole = prepare(200, 100, &smol, true);
    struct picture *unsplit = prepare(200, 100, &plain, false);
    struct picture *fitting = prepare(64, 64, &small, false);
    struct picture *const all[] = {whole, unsplit, fitting};
    for (size_t i = 0; i < 3; i++)
        cr_expect(all[i]->tiles == 1 && all[i]->rows == 0 && all[i]->columns == 0);
    cr_expect_arr_eq(whole->digest, unsplit->digest, SHA256_BYTES);
    cr_expect_eq(fitting->pixels[64 + 3], sample_byte(3, 1, 0),
                 "a tile of its size is not resized");
    cr_expect_eq(fitting->pixels[2 * 64 * 64 + 64 + 3], sample_byte(3, 1, 2));
    for (size_t i = 0; i < 3; i++) picture_drop(all[i]);
}

Test(picture_prepare, a_digest_is_that_of_the_tiles) {
    struct picture *a = prepare(90, 50, &smol, false), *b = prepare(90, 50, &smol, false);
    struct picture *c = prepare(90, 51, &smol, false);
    cr_expect_arr_eq(a->digest, b->digest, SHA256_BYTES);
    cr_expect(memcmp(a->digest, c->digest, SHA256_BYTES) != 0);
    cr_expect_eq(picture_hold(a), a);
    picture_drop(a);
    cr_expect_eq(a->tiles, 13, "held once more");
    picture_drop(a);
    picture_drop(b);
    picture_drop(c);
    picture_drop(NULL);
}

Test(picture_prepare, values_are_those_of_the_processor) {
    float values[3][256];
    picture_fill_values(&smol, values);
    cr_expect_float_eq(values[0][0], -1.0f, 0);
    cr_expect_float_eq(values[1][255], 1.0f, 1e-7);
    cr_expect_float_eq(values[2][128], ((float)(128 * (1.0 / 255)) - 0.5f) / 0.5f, 0);
}

Test(picture_prepare, writes_the_prompt_of_the_processor) {
    struct picture picture = {.tiles = 3, .rows = 1, .columns = 2, .tile_tokens = 2};
    struct buf text;
    buf_open(&text, 1 << 16);
    picture_write_prompt(PICTURE_IDEFICS3, &picture, &text);
    cr_expect_str_eq(text.data, "<fake_token_around_image><row_1_col_1><image><image>"
                                "<fake_token_around_image><row_1_col_2><image><image>\n"
                                "\n<fake_token_around_image><global-img><image><image>"
                                "<fake_token_around_image>");
    buf_clear(&text);
    picture = (struct picture){.tiles = 1, .tile_tokens = 1};
    picture_write_prompt(PICTURE_IDEFICS3, &picture, &text);
    cr_expect_str_eq(text.data,
                     "<fake_token_around_image><global-img><image><fake_token_around_image>");
    cr_expect_str_eq(picture_mark(PICTURE_IDEFICS3), "<image>");
    buf_clear(&text);
    picture.tile_tokens = 2;
    picture_write_prompt(PICTURE_SMART, &picture, &text);
    cr_expect_str_eq(text.data, "<|image_pad|><|image_pad|>");
    buf_clear(&text);
    picture_write_prompt(PICTURE_STRETCHED, &picture, &text);
    cr_expect_eq(picture_marks_before(PICTURE_STRETCHED), 1); /* and two rows */
    cr_expect_str_eq(text.data, "\n\n<start_of_image><start_of_image><start_of_image>"
                                "<end_of_image>\n\n");
    buf_clear(&text);
    picture = (struct picture){.tiles = 1, .tile_rows = 2, .tile_columns = 2, .tile_tokens = 4};
    picture_write_prompt(PICTURE_LINES, &picture, &text);
    cr_expect_str_eq(text.data, "[IMG][IMG][IMG_BREAK][IMG][IMG][IMG_END]");
    cr_expect(picture_run(PICTURE_LINES, &picture) == 2 &&
              picture_run(PICTURE_SMART, &picture) == 4);
    buf_close(&text);
}

Test(picture_prepare, refuses_impossible_forms) {
    static const struct {
        const char *field;
        struct picture_form change; /* members that are not 0 */
    } rows[] = {{"image_processor_type", {.kind = 77}},
                {"resample", {.filter = 5}},
                {"max_image_size.longest_edge", {.tile_edge = 7}},
                {"max_image_size.longest_edge", {.tile_edge = 4097}},
                {"size.longest_edge", {.longest_edge = 4097}},
                {"size.longest_edge", {.longest_edge = -1}},
                {"size.longest_edge", {.longest_edge = 4096, .tile_edge = 64}},
                {"max_image_size.longest_edge", {.token_edge = 65}},
                {"rescale_factor", {.rescale = (double)INFINITY}},
                {"image_mean", {.mean = {NAN}}},
                {"image_std", {.deviation = {INFINITY}}}};
    cr_expect_eq(picture_check_form(&smol, NULL), 0);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct picture_form form = smol, change = rows[i].change;
        struct fault fault = {0};
        if (change.kind) form.kind = change.kind;
        if (change.filter) form.filter = change.filter;
        if (change.tile_edge) form.tile_edge = change.tile_edge;
        if (change.longest_edge) form.longest_edge = change.longest_edge;
        if (change.token_edge) form.token_edge = change.token_edge;
        if (change.rescale != 0) form.rescale = change.rescale;
        if (change.mean[0] != 0) form.mean[0] = change.mean[0];
        if (change.deviation[0] != 0) form.deviation[0] = change.deviation[0];
        cr_expect_neq(picture_check_form(&form, &fault), 0, "row %zu", i);
        cr_expect_str_eq(fault.field, rows[i].field, "row %zu: %s", i, fault.field);
    }
    const struct picture_form smart = smart_form(28, 56 * 56, 28 * 28 * 4096);
    static const struct {
        const char *field;
        int token_edge, min_pixels, max_pixels;
    } smart_rows[] = {{"patch_size", -1, 0, 0},
                      {"patch_size", 4097, 0, 0},
                      {"size.shortest_edge", 0, -1, 0},
                      {"size.shortest_edge", 0, 0, 55 * 56},
                      {"size.longest_edge", 0, 0, 28 * 28 * 4097}};
    cr_expect_eq(picture_check_form(&smart, NULL), 0);
    for (size_t i = 0; i < sizeof smart_rows / sizeof *smart_rows; i++) {
        struct picture_form form = smart;
        struct fault fault = {0};
        if (smart_rows[i].token_edge) form.token_edge = smart_rows[i].token_edge;
        if (smart_rows[i].min_pixels) form.min_pixels = smart_rows[i].min_pixels;
        if (smart_rows[i].max_pixels) form.max_pixels = smart_rows[i].max_pixels;
        form.tile_tokens_max = picture_smart_tokens(&form);
        cr_expect_neq(picture_check_form(&form, &fault), 0, "row %zu", i);
        cr_expect_str_eq(fault.field, smart_rows[i].field, "row %zu: %s", i, fault.field);
    }
    static const struct {
        const char *field;
        int longest_edge, token_edge, tokens;
    } line_rows[] = {{"patch_size", 64, 0, 16},
                     {"size.longest_edge", 0, 16, 16},
                     {"size.longest_edge", PICTURE_LINE_MAX + 1, 128, 16},
                     {"size.longest_edge", 64, 16, PICTURE_TOKENS_MAX + 1}};
    for (size_t i = 0; i < sizeof line_rows / sizeof *line_rows; i++) {
        struct picture_form form = lined_form(line_rows[i].longest_edge, line_rows[i].token_edge);
        struct fault fault = {0};
        form.tile_tokens_max = line_rows[i].tokens;
        cr_expect_neq(picture_check_form(&form, &fault), 0, "row %zu", i);
        cr_expect_str_eq(fault.field, line_rows[i].field, "row %zu: %s", i, fault.field);
    }
    struct picture_form flat = smol;
    flat.deviation[2] = 0;
    cr_expect_eq(picture_check_form(&flat, NULL), ERR_INVALID);
}

Test(picture_prepare, bounds_the_memory_of_all_pictures) {
    struct picture_rgb rgb = sample_picture(8, 8);
    struct picture *picture;
    struct fault fault = {0};
    const int64_t bytes = 3 * 64 * 64;
    atomic_store(&prepared_bytes, PICTURE_MEMORY_MAX - bytes + 1);
    cr_expect_eq(picture_prepare(&rgb, &smol, true, &picture, &fault), ERR_BUSY);
    cr_expect_null(picture);
    atomic_store(&prepared_bytes, PICTURE_MEMORY_MAX - bytes);
    cr_expect_eq(picture_prepare(&rgb, &smol, true, &picture, &fault), 0);
    picture_drop(picture);
    cr_expect_eq(atomic_load(&prepared_bytes), PICTURE_MEMORY_MAX - bytes);
    mem_free(rgb.pixels);
}

Test(picture_prepare, reports_each_lack_of_memory) {
    struct picture_rgb rgb = sample_picture(90, 70);
    struct picture *picture;
    long n = 0;
    for (;; n++) {
        struct fault fault = {0};
        mem_fail_after(n);
        const int rc = picture_prepare(&rgb, &smol, false, &picture, &fault);
        mem_fail_after(-1);
        if (rc == 0) break;
        cr_expect_eq(rc, ERR_NOMEM);
        cr_expect_null(picture);
    }
    cr_expect_gt(n, 20);
    picture_drop(picture);
    mem_free(rgb.pixels);
}
