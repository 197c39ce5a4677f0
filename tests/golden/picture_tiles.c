/* picture_tiles: the tiles that a picture's file becomes.
 *
 *   picture_tiles KIND FILTER TOKEN_EDGE TILE_EDGE LONGEST_EDGE MIN_PIXELS MAX_PIXELS FILE...
 *
 * KIND and FILTER are numbers of enum picture_kind and picture_filter; the others are members of
 * struct picture_form. Writes of each file a line with the numbers of tiles, their height and
 * width, and then the bytes, [tiles][3][height][width]; or a line that begins with "refused". Run
 * by bench/compare_pictures.py and tests/python/test_vision.py. */
#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/mem.h"
#include "picture/picture.h"

static int write_tiles(const struct picture_form *form, const char *path, struct fault *fault) {
    struct picture_rgb rgb = {0};
    struct picture *picture = NULL;
    char *data = NULL;
    size_t size = 0;
    int rc = file_read(path, PICTURE_FILE_MAX, &data, &size, fault);
    if (!rc) rc = picture_decode(data, size, &rgb, fault);
    if (!rc) rc = picture_prepare(&rgb, form, false, &picture, fault);
    if (!rc) {
        printf("%d %d %d\n", picture->tiles, picture->tile_height, picture->tile_width);
        fwrite(picture->pixels, 3 * (size_t)picture->tile_width,
               (size_t)picture->tiles * (size_t)picture->tile_height, stdout);
    }
    picture_drop(picture);
    mem_free(rgb.pixels);
    mem_free(data);
    return rc;
}

int main(int argc, char **argv) {
    enum { NUMBERS = 7 };
    int numbers[NUMBERS];
    if (argc <= 1 + NUMBERS) return 2;
    for (int i = 0; i < NUMBERS; i++) numbers[i] = (int)strtol(argv[1 + i], NULL, 10);
    const struct picture_form form = {.kind = (enum picture_kind)numbers[0],
                                      .filter = (enum picture_filter)numbers[1],
                                      .token_edge = numbers[2],
                                      .tile_edge = numbers[3],
                                      .longest_edge = numbers[4],
                                      .min_pixels = numbers[5],
                                      .max_pixels = numbers[6],
                                      .splits = true,
                                      .tile_tokens_max = PICTURE_TOKENS_MAX,
                                      .rescale = 1.0 / 255,
                                      .deviation = {1, 1, 1}};
    for (int i = 1 + NUMBERS; i < argc; i++) {
        struct fault fault = {0};
        if (write_tiles(&form, argv[i], &fault)) printf("refused: %s\n", fault.text);
    }
    return 0;
}
