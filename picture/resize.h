/* Resizing of pictures as Pillow's Image.resize does it, bit for bit, for bytes of three channels.
 *
 * Each output pixel is a weighted sum over the input pixels under a filter whose width grows with
 * the reduction. Rows are resized first and rounded to bytes, then columns; the other way
 * round where the picture is more than a hundred times as high as wide and becomes lower (Pillow up
 * to version 12; version 13 chooses by another rule). Weights are rounded to
 * fixed point with 22 bits behind the point. A direction whose size stays is left out. */
#ifndef KEEPD_PICTURE_RESIZE_H
#define KEEPD_PICTURE_RESIZE_H

#include "picture/picture.h"

/* *out is new, also where the size stays. Sizes are 1 to PICTURE_EDGE_MAX. ERR_NOMEM. */
int picture_resize(const struct picture_rgb *from, int width, int height,
                   enum picture_filter filter, struct picture_rgb *out);

#endif
