/* Pictures for tests: pixels from a formula, and files that are written with the libraries. */
#ifndef KEEPD_TESTS_UNIT_PICTURE_SAMPLES_H
#define KEEPD_TESTS_UNIT_PICTURE_SAMPLES_H

#include <png.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "picture/picture.h"

/* The formula of tests/python/test_pictures.py. */
static inline uint8_t sample_byte(int x, int y, int channel) {
    return (uint8_t)((x * 7 + y * 13 + channel * 71 + (x * y) / 3) & 0xff);
}

static inline struct picture_rgb sample_picture(int width, int height) {
    struct picture_rgb rgb = {width, height, mem_must_alloc((size_t)width * (size_t)height, 3)};
    for (int y = 0; y < height; y++)
        for (int x = 0; x < width; x++)
            for (int c = 0; c < 3; c++)
                rgb.pixels[((size_t)y * (size_t)width + (size_t)x) * 3 + (size_t)c] =
                    sample_byte(x, y, c);
    return rgb;
}

/* A PNG file of these pixels; the caller frees it. */
static inline uint8_t *sample_png(const void *pixels, int width, int height, uint32_t format,
                                  size_t *size) {
    png_image image = {.version = PNG_IMAGE_VERSION,
                       .width = (png_uint_32)width,
                       .height = (png_uint_32)height,
                       .format = format};
    png_alloc_size_t bytes = 0;
    uint8_t *file = NULL;
    if (png_image_write_to_memory(&image, NULL, &bytes, 0, pixels, 0, NULL))
        file = mem_must_alloc(bytes, 1);
    if (file) png_image_write_to_memory(&image, file, &bytes, 0, pixels, 0, NULL);
    *size = bytes;
    return file;
}

#endif
