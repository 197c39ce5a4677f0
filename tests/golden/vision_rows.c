/* vision_rows: the rows of embeddings that an encoder of pictures makes of tiles.
 *
 *   vision_rows MODEL MMPROJ WIDTH PIXELS PATH THREADS PART_COST TILE_WIDTH TILE_HEIGHT
 *
 * MODEL is a directory, whose encoder is used if MMPROJ is "". WIDTH is that of the text model.
 * PIXELS is a file with the bytes of a picture's tiles, [tiles][3][height][width]. Writes the rows
 * of all tiles as float32. Tiles are computed in descending order. Before each tile another one is
 * begun and left after some of its parts. Run by tests/python/test_vision.py. */
#include <stdio.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/file.h"
#include "base/mem.h"
#include "kernels/cpu/cpu.h"
#include "model/vision.h"

static int fail(const struct fault *fault) {
    fprintf(stderr, "%s: %s\n", fault->field, fault->text);
    return 1;
}

int main(int argc, char **argv) {
    struct fault fault = {0};
    struct kern *kern = NULL;
    struct vision *vision = NULL;
    char *pixels = NULL;
    size_t size = 0;
    if (argc != 10) return 2;
    const int width = (int)strtol(argv[3], NULL, 10), threads = (int)strtol(argv[6], NULL, 10);
    const struct cpu_options cpu = {.path = argv[5], .activations = CPU_F32, .threads = threads};
    const struct vision_options options = {.dir = argv[1],
                                           .mmproj = argv[2],
                                           .text_width = width,
                                           .threads = threads,
                                           .part_cost = strtoll(argv[7], NULL, 10)};
    if (cpu_open(&cpu, &kern, &fault) || vision_open(kern, &options, &vision, &fault))
        return fail(&fault);
    CHECK(vision);
    if (file_read(argv[4], (size_t)64 << 20, &pixels, &size, &fault)) return fail(&fault);
    const struct picture_form *form = &vision_config(vision)->form;
    const int wide = (int)strtol(argv[8], NULL, 10), high = (int)strtol(argv[9], NULL, 10);
    const size_t tile = 3 * (size_t)wide * (size_t)high;
    CHECK(size > 0 && size % tile == 0);
    struct picture picture = {.tiles = (int)(size / tile),
                              .tile_width = wide,
                              .tile_height = high,
                              .tile_rows = high / form->token_edge,
                              .tile_columns = wide / form->token_edge,
                              .pixels = (uint8_t *)pixels};
    picture.tile_tokens = picture.tile_rows * picture.tile_columns;
    const size_t rows =
        (size_t)picture.tile_tokens * (size_t)vision_row_width(vision_config(vision));
    float *out = mem_must_alloc((size_t)picture.tiles * rows, sizeof *out);
    for (int i = picture.tiles - 1; i >= 0; i--) {
        bool done = false;
        CHECK(vision_begin(vision, &picture, 0) == 0);
        for (int part = 0; part <= i; part++)
            CHECK(vision_advance(vision, out, &done) == 0 && !done);
        CHECK(vision_begin(vision, &picture, i) == 0);
        while (!done) CHECK(vision_advance(vision, out + (size_t)i * rows, &done) == 0);
    }
    fwrite(out, sizeof *out, (size_t)picture.tiles * rows, stdout);
    mem_free(out);
    mem_free(pixels);
    vision_close(vision);
    kern->ops->close(kern);
    return 0;
}
