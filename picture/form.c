#include <limits.h>
#include <math.h>

#include "picture/prepare.h"

/* The tiles of a picture whose longer side is `longest`: one more pixel for the rounding of the
 * shorter side to an even number. */
static bool has_too_many_tiles(const struct picture_form *form) {
    const int side = (form->longest_edge + form->tile_edge) / form->tile_edge;
    return form->splits && side * side + 1 > PICTURE_TILES_MAX;
}

/* ---- Checks of sizes ---- */

static int check_tiles(const struct picture_form *form, struct fault *fault) {
    if (form->tile_edge < 8 || form->tile_edge > 4096)
        return fault_set(fault, ERR_INVALID, "max_image_size.longest_edge",
                         "expected 8 to 4096 pixels, found %d", form->tile_edge);
    if (form->longest_edge < 1 || form->longest_edge > 4096)
        return fault_set(fault, ERR_INVALID, "size.longest_edge",
                         "expected 1 to 4096 pixels, found %d", form->longest_edge);
    if (has_too_many_tiles(form))
        return fault_set(fault, ERR_INVALID, "size.longest_edge",
                         "a picture of %d pixels has more than %d tiles of %d pixels",
                         form->longest_edge, PICTURE_TILES_MAX, form->tile_edge);
    if (form->token_edge < 1 || form->token_edge > form->tile_edge)
        return fault_set(fault, ERR_INVALID, "max_image_size.longest_edge",
                         "a tile of %d pixels has no token", form->tile_edge);
    return 0;
}

static int check_smart(const struct picture_form *form, struct fault *fault) {
    const int token = form->token_edge;
    if (token < 1 || token > 4096)
        return fault_set(fault, ERR_INVALID, "patch_size", "expected 1 to 4096 pixels, found %d",
                         token);
    if (form->min_pixels < 1 || form->min_pixels > form->max_pixels)
        return fault_set(fault, ERR_INVALID, "size.shortest_edge",
                         "expected 1 to %d pixels, found %d", form->max_pixels, form->min_pixels);
    if (form->tile_tokens_max > PICTURE_TOKENS_MAX)
        return fault_set(fault, ERR_LIMIT, "size.longest_edge",
                         "a picture of %d pixels has more than %d tokens of %d x %d pixels",
                         form->max_pixels, PICTURE_TOKENS_MAX, token, token);
    return 0;
}

static int check_lines(const struct picture_form *form, struct fault *fault) {
    if (form->token_edge < 1 || form->token_edge > 4096)
        return fault_set(fault, ERR_INVALID, "patch_size", "expected 1 to 4096 pixels, found %d",
                         form->token_edge);
    if (form->longest_edge < 1 || form->longest_edge > PICTURE_LINE_MAX)
        return fault_set(fault, ERR_INVALID, "size.longest_edge",
                         "expected 1 to %d pixels, found %d", PICTURE_LINE_MAX, form->longest_edge);
    if (form->tile_tokens_max > PICTURE_TOKENS_MAX)
        return fault_set(fault, ERR_LIMIT, "size.longest_edge",
                         "a picture of %d x %d pixels has more than %d tokens of %d x %d pixels",
                         form->longest_edge, form->longest_edge, PICTURE_TOKENS_MAX,
                         form->token_edge, form->token_edge);
    return 0;
}

/* Sides are rounded down behind the upper bound, but not to 0, and up in front of the lower one. */
int picture_smart_tokens(const struct picture_form *form) {
    const double token = form->token_edge, least = form->min_pixels, most = form->max_pixels;
    const double ratio = sqrt(PICTURE_RATIO_MAX);
    const double area = most / (token * token), line = sqrt(most) * ratio / token,
                 enlarged = least / (token * token) + sqrt(least) * (ratio + 1) / token + 1;
    return (int)fmin(fmax(area, fmax(line, enlarged)), INT_MAX);
}

int picture_check_form(const struct picture_form *form, struct fault *fault) {
    if (form->kind == PICTURE_NONE || form->kind > PICTURE_LINES)
        return fault_set(fault, ERR_UNSUPPORTED, "image_processor_type",
                         "pictures for this processor are not made");
    if (form->filter != PICTURE_LANCZOS && form->filter != PICTURE_BILINEAR &&
        form->filter != PICTURE_BICUBIC)
        return fault_set(fault, ERR_UNSUPPORTED, "resample",
                         "expected 1 (Lanczos), 2 (bilinear) or 3 (bicubic), found %d",
                         (int)form->filter);
    int rc = form->kind == PICTURE_SMART   ? check_smart(form, fault)
             : form->kind == PICTURE_LINES ? check_lines(form, fault)
                                           : check_tiles(form, fault);
    if (rc) return rc;
    if (!isfinite(form->rescale))
        return fault_set(fault, ERR_INVALID, "rescale_factor", "is no finite number");
    for (int c = 0; c < 3; c++) {
        if (!isfinite(form->mean[c]))
            return fault_set(fault, ERR_INVALID, "image_mean", "is no finite number");
        if (!isfinite(form->deviation[c]) || form->deviation[c] == 0)
            return fault_set(fault, ERR_INVALID, "image_std",
                             "expected finite numbers other than 0");
    }
    return 0;
}

/* ---- Use ---- */

bool picture_is_of_form(const struct picture *picture, const struct picture_form *form) {
    const bool fixed = form->tile_edge > 0;
    return picture->tile_rows == picture->tile_height / form->token_edge &&
           picture->tile_columns == picture->tile_width / form->token_edge &&
           picture->tile_tokens == picture->tile_rows * picture->tile_columns &&
           picture->tile_tokens <= form->tile_tokens_max &&
           (!fixed ||
            (picture->tile_width == form->tile_edge && picture->tile_height == form->tile_edge));
}

void picture_fill_values(const struct picture_form *form, float values[3][256]) {
    for (int c = 0; c < 3; c++)
        for (int byte = 0; byte < 256; byte++)
            values[c][byte] = ((float)(byte * form->rescale) - form->mean[c]) / form->deviation[c];
}
