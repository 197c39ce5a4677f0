/* Each file format has one decoding function. This header is for decode.c and the formats' own
 * files alone. Errors are those of picture_decode; on failure *out is empty. */
#ifndef KEEPD_PICTURE_CODEC_H
#define KEEPD_PICTURE_CODEC_H

#include "picture/picture.h"

int png_decode(const uint8_t *data, size_t size, struct picture_rgb *out, struct fault *fault);
int jpeg_decode(const uint8_t *data, size_t size, struct picture_rgb *out, struct fault *fault);
int gif_decode(const uint8_t *data, size_t size, struct picture_rgb *out, struct fault *fault);
int webp_decode(const uint8_t *data, size_t size, struct picture_rgb *out, struct fault *fault);

/* Checks the size that a file's header has: before anything is allocated for its pixels. */
int picture_check_size(uint64_t width, uint64_t height, struct fault *fault);
/* Allocates `channels` bytes for each pixel of the size in *out. */
int picture_open_pixels(struct picture_rgb *out, int channels, struct fault *fault);
/* Lays pixels of red, green, blue and alpha over white, in place: 3 bytes a pixel are left. */
void picture_lay_on_white(struct picture_rgb *rgba);
void picture_close_rgb(struct picture_rgb *rgb);

#endif
