#include "picture/resize.h"

#include <math.h>
#include <string.h>

#include "base/mem.h"

#define PRECISION 22 /* bits behind the point of a weight: 32 - 8 of a byte - 2 of sums above 1 */

/* The weights of one direction: output pixel i is the sum of `counts[i]` input pixels from
 * `firsts[i]`, each with its weight. */
struct resize_weights {
    int most; /* weights of an output pixel, at most */
    int *firsts, *counts;
    int32_t *weights; /* [output][most] */
};

/* --- filters --- */

static double lanczos_part(double x) {
    if (x == 0.0) return 1.0;
    x *= M_PI;
    return sin(x) / x;
}

static double filter_value(enum picture_filter filter, double x) {
    const double a = -0.5;
    if (filter == PICTURE_LANCZOS)
        return x >= -3.0 && x < 3.0 ? lanczos_part(x) * lanczos_part(x / 3) : 0.0;
    x = fabs(x);
    if (filter == PICTURE_BILINEAR) return x < 1.0 ? 1.0 - x : 0.0;
    if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1;
    return x < 2.0 ? (((x - 5) * x + 8) * x - 4) * a : 0.0;
}

static double filter_support(enum picture_filter filter) {
    return filter == PICTURE_LANCZOS ? 3.0 : filter == PICTURE_BICUBIC ? 2.0 : 1.0;
}

/* --- weights --- */

static void close_filter_weights(struct resize_weights *w) {
    mem_free(w->firsts);
    mem_free(w->counts);
    mem_free(w->weights);
}

static int32_t to_fixed(double weight) {
    const double scaled = weight * (1 << PRECISION);
    return (int32_t)(weight < 0 ? scaled - 0.5 : scaled + 0.5);
}

/* The weights of output pixel `i`, which lies at `center` of the input. `values` is scratch. */
static void fill_pixel(struct resize_weights *w, int i, double center, double scale, int from,
                       enum picture_filter filter, double *values) {
    const double support = filter_support(filter) * scale, inverse = 1.0 / scale;
    int first = (int)(center - support + 0.5), end = (int)(center + support + 0.5);
    double sum = 0.0;
    if (first < 0) first = 0;
    if (end > from) end = from;
    for (int k = 0; k < end - first; k++) {
        values[k] = filter_value(filter, (k + first - center + 0.5) * inverse);
        sum += values[k];
    }
    w->firsts[i] = first;
    w->counts[i] = end - first;
    for (int k = 0; k < end - first; k++)
        w->weights[(size_t)i * (size_t)w->most + (size_t)k] =
            to_fixed(sum != 0.0 ? values[k] / sum : values[k]);
}

static int open_weights(struct resize_weights *w, int from, int to, enum picture_filter filter) {
    const double step = (double)from / to, scale = step < 1.0 ? 1.0 : step;
    w->most = (int)ceil(filter_support(filter) * scale) * 2 + 1;
    w->firsts = mem_try_alloc((size_t)to, sizeof *w->firsts);
    w->counts = mem_try_alloc((size_t)to, sizeof *w->counts);
    w->weights = mem_try_alloc((size_t)to * (size_t)w->most, sizeof *w->weights);
    double *values = mem_try_alloc((size_t)w->most, sizeof *values);
    const bool made = w->firsts && w->counts && w->weights && values;
    for (int i = 0; made && i < to; i++)
        fill_pixel(w, i, (i + 0.5) * step, scale, from, filter, values);
    mem_free(values);
    return made ? 0 : ERR_NOMEM;
}

/* --- passes --- */

static uint8_t to_byte(int32_t sum) {
    const int32_t value = sum >> PRECISION;
    return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
}

static void resize_row(const struct resize_weights *w, const uint8_t *from, int width,
                       uint8_t *to) {
    for (int x = 0; x < width; x++) {
        const int32_t *weights = w->weights + (size_t)x * (size_t)w->most;
        const uint8_t *pixel = from + (size_t)w->firsts[x] * 3;
        int32_t sums[3] = {1 << (PRECISION - 1), 1 << (PRECISION - 1), 1 << (PRECISION - 1)};
        for (int k = 0; k < w->counts[x]; k++, pixel += 3)
            for (int c = 0; c < 3; c++) sums[c] += pixel[c] * weights[k];
        for (int c = 0; c < 3; c++) to[x * 3 + c] = to_byte(sums[c]);
    }
}

/* Computes one row of the output from several rows of the input. `sums` is scratch memory of a row.
 */
static void blend_rows(const struct resize_weights *w, int y, const uint8_t *from, size_t row,
                       int32_t *sums, uint8_t *to) {
    const int32_t *weights = w->weights + (size_t)y * (size_t)w->most;
    for (size_t i = 0; i < row; i++) sums[i] = 1 << (PRECISION - 1);
    for (int k = 0; k < w->counts[y]; k++) {
        const uint8_t *line = from + (size_t)(w->firsts[y] + k) * row;
        for (size_t i = 0; i < row; i++) sums[i] += line[i] * weights[k];
    }
    for (size_t i = 0; i < row; i++) to[i] = to_byte(sums[i]);
}

static int resize_rows(const struct picture_rgb *from, int width, enum picture_filter filter,
                       struct picture_rgb *out) {
    struct resize_weights w = {0};
    *out = (struct picture_rgb){width, from->height, NULL};
    int rc = open_weights(&w, from->width, width, filter);
    if (!rc) out->pixels = mem_try_alloc((size_t)width * (size_t)from->height, 3);
    for (int y = 0; out->pixels && y < from->height; y++)
        resize_row(&w, from->pixels + (size_t)y * (size_t)from->width * 3, width,
                   out->pixels + (size_t)y * (size_t)width * 3);
    close_filter_weights(&w);
    return out->pixels ? 0 : ERR_NOMEM;
}

static int resize_columns(const struct picture_rgb *from, int height, enum picture_filter filter,
                          struct picture_rgb *out) {
    const size_t row = (size_t)from->width * 3;
    struct resize_weights w = {0};
    *out = (struct picture_rgb){from->width, height, NULL};
    int rc = open_weights(&w, from->height, height, filter);
    int32_t *sums = mem_try_alloc(row, sizeof *sums);
    if (!rc && sums) out->pixels = mem_try_alloc((size_t)height, row);
    for (int y = 0; out->pixels && y < height; y++)
        blend_rows(&w, y, from->pixels, row, sums, out->pixels + (size_t)y * row);
    mem_free(sums);
    close_filter_weights(&w);
    return out->pixels ? 0 : ERR_NOMEM;
}

static int copy_picture(const struct picture_rgb *from, struct picture_rgb *out) {
    const size_t size = (size_t)from->width * (size_t)from->height * 3;
    *out = (struct picture_rgb){from->width, from->height, mem_try_alloc(size, 1)};
    if (out->pixels) memcpy(out->pixels, from->pixels, size);
    return out->pixels ? 0 : ERR_NOMEM;
}

int picture_resize(const struct picture_rgb *from, int width, int height,
                   enum picture_filter filter, struct picture_rgb *out) {
    struct picture_rgb between = {0};
    *out = (struct picture_rgb){0};
    if (width == from->width && height == from->height) return copy_picture(from, out);
    if (width == from->width) return resize_columns(from, height, filter, out);
    if (height == from->height) return resize_rows(from, width, filter, out);
    const bool columns_first = from->height > 100 * from->width && height < from->height;
    int rc = columns_first ? resize_columns(from, height, filter, &between)
                           : resize_rows(from, width, filter, &between);
    if (!rc)
        rc = columns_first ? resize_rows(&between, width, filter, out)
                           : resize_columns(&between, height, filter, out);
    mem_free(between.pixels);
    return rc;
}
