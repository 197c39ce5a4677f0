#include <string.h>

#include "base/mem.h"
#include "picture/codec.h"

int picture_check_size(uint64_t width, uint64_t height, struct fault *fault) {
    if (width < 1 || height < 1)
        return fault_set(fault, ERR_MALFORMED, NULL, "the picture has no pixels");
    if (width > PICTURE_EDGE_MAX || height > PICTURE_EDGE_MAX ||
        width * height > PICTURE_PIXELS_MAX)
        return fault_set(fault, ERR_LIMIT, NULL,
                         "the picture has %llu x %llu pixels; at most %u pixels, and %d in a side, "
                         "are read",
                         (unsigned long long)width, (unsigned long long)height, PICTURE_PIXELS_MAX,
                         PICTURE_EDGE_MAX);
    return 0;
}

int picture_open_pixels(struct picture_rgb *out, int channels, struct fault *fault) {
    out->pixels = mem_try_alloc((size_t)out->width * (size_t)out->height, (size_t)channels);
    if (out->pixels) return 0;
    return fault_set(fault, ERR_NOMEM, NULL, "not enough memory for the picture");
}

void picture_close_rgb(struct picture_rgb *rgb) {
    mem_free(rgb->pixels);
    *rgb = (struct picture_rgb){0};
}

/* The sum of a colour and of white by alpha, with Pillow's rounding of a division by 255. */
static uint8_t over_white(unsigned value, unsigned alpha) {
    const unsigned sum = (value * alpha + 255 * (255 - alpha)) * 128 + (128 << 7);
    return (uint8_t)((((sum >> 8) + sum) >> 8) >> 7);
}

void picture_lay_on_white(struct picture_rgb *rgba) {
    const size_t count = (size_t)rgba->width * (size_t)rgba->height;
    uint8_t *to = rgba->pixels;
    for (size_t i = 0; i < count; i++, to += 3) {
        const uint8_t *from = rgba->pixels + 4 * i, alpha = from[3];
        const uint8_t rgb[3] = {over_white(from[0], alpha), over_white(from[1], alpha),
                                over_white(from[2], alpha)};
        memcpy(to, rgb, sizeof rgb);
    }
}

/* --- formats --- */

/* A format and the bytes with which its files begin. `more` stand at byte 8. */
struct picture_format {
    const char *name, *magic, *more;
    size_t size;
    int (*decode)(const uint8_t *data, size_t size, struct picture_rgb *out, struct fault *fault);
};

static const struct picture_format formats[] = {
    {"PNG", "\x89PNG\r\n\x1a\n", "", 8, png_decode},
    {"JPEG", "\xff\xd8\xff", "", 3, jpeg_decode},
    {"WebP", "RIFF", "WEBP", 4, webp_decode},
    {"GIF", "GIF87a", "", 6, gif_decode},
    {"GIF", "GIF89a", "", 6, gif_decode},
    {"BMP", "BM", "", 2, NULL},
    {"TIFF", "II*", "", 3, NULL},
    {"TIFF", "MM", "", 2, NULL},
    {"AVIF or HEIC", "", "", 0, NULL}, /* found by `ftyp`, see find_format */
    {"SVG", "<", "", 1, NULL},
};

static const struct picture_format *find_format(const uint8_t *data, size_t size) {
    const bool boxed = size >= 12 && memcmp(data + 4, "ftyp", 4) == 0;
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        const struct picture_format *f = &formats[i];
        const size_t more = strlen(f->more);
        if (f->size == 0 && boxed) return f;
        if (f->size && size >= f->size && memcmp(data, f->magic, f->size) == 0 &&
            (!more || (size >= 8 + more && memcmp(data + 8, f->more, more) == 0)))
            return f;
    }
    return NULL;
}

int picture_decode(const void *data, size_t size, struct picture_rgb *out, struct fault *fault) {
    *out = (struct picture_rgb){0};
    if (size > PICTURE_FILE_MAX)
        return fault_set(fault, ERR_LIMIT, NULL, "the picture's file has %zu bytes, at most %zu",
                         size, PICTURE_FILE_MAX);
    const struct picture_format *format = find_format(data, size);
    if (!format)
        return fault_set(fault, ERR_MALFORMED, NULL,
                         "this is no picture: PNG, JPEG, WebP and GIF files are read");
    if (!format->decode)
        return fault_set(fault, ERR_UNSUPPORTED, NULL,
                         "%s files are not read: send the picture as PNG, JPEG, WebP or GIF",
                         format->name);
    int rc = format->decode(data, size, out, fault);
    if (rc) picture_close_rgb(out);
    return rc;
}
