/* PNG by libpng. Palettes, grey and 16-bit samples become 8-bit red, green and blue; colour
 * profiles and gamma are ignored, as in the published processors. */
#include <png.h>
#include <setjmp.h>
#include <string.h>

#include "base/mem.h"
#include "picture/codec.h"

#define PNG_CHUNK_BYTES_MAX ((size_t)1 << 20) /* a text or profile, which nobody reads */

/* A file being read. Members are reached after longjmp, so none lies in a register. */
struct png_reading {
    const uint8_t *data;
    size_t size, at;
    png_structp png;
    png_infop info;
    png_bytep *rows;
    struct picture_rgb rgba;
    struct fault *fault;
    int rc;
};

static void on_png_error(png_structp png, png_const_charp text) {
    struct png_reading *r = png_get_error_ptr(png);
    r->rc = fault_set(r->fault, ERR_MALFORMED, NULL, "the PNG file is damaged: %.100s", text);
    png_longjmp(png, 1);
}

static void on_png_warning(png_structp png, png_const_charp text) {
    (void)png, (void)text;
}

static void read_png_bytes(png_structp png, png_bytep to, size_t size) {
    struct png_reading *r = png_get_io_ptr(png);
    if (size > r->size - r->at) png_error(png, "it ends early");
    memcpy(to, r->data + r->at, size);
    r->at += size;
}

static void ask_for_rgba(struct png_reading *r) {
    png_set_expand(r->png);
    png_set_strip_16(r->png);
    png_set_gray_to_rgb(r->png);
    png_set_add_alpha(r->png, 0xff, PNG_FILLER_AFTER);
    png_set_interlace_handling(r->png);
    png_read_update_info(r->png, r->info);
}

static int read_png_pixels(struct png_reading *r) {
    const size_t row = (size_t)r->rgba.width * 4;
    if (png_get_rowbytes(r->png, r->info) != row)
        return fault_set(r->fault, ERR_INTERNAL, NULL, "the PNG file has an unknown layout");
    r->rows = mem_try_alloc((size_t)r->rgba.height, sizeof *r->rows);
    if (!r->rows) return fault_set(r->fault, ERR_NOMEM, NULL, "not enough memory for the picture");
    int rc = picture_open_pixels(&r->rgba, 4, r->fault);
    if (rc) return rc;
    for (int y = 0; y < r->rgba.height; y++) r->rows[y] = r->rgba.pixels + (size_t)y * row;
    png_read_image(r->png, r->rows);
    png_read_end(r->png, NULL);
    return 0;
}

static void read_png(struct png_reading *r) {
    if (setjmp(png_jmpbuf(r->png))) return; /* r->rc says why */
    png_set_chunk_malloc_max(r->png, PNG_CHUNK_BYTES_MAX);
    png_set_read_fn(r->png, r, read_png_bytes);
    png_read_info(r->png, r->info);
    const png_uint_32 width = png_get_image_width(r->png, r->info);
    const png_uint_32 height = png_get_image_height(r->png, r->info);
    r->rc = picture_check_size(width, height, r->fault);
    if (r->rc) return;
    r->rgba.width = (int)width;
    r->rgba.height = (int)height;
    ask_for_rgba(r);
    r->rc = read_png_pixels(r);
    if (!r->rc) picture_lay_on_white(&r->rgba);
}

int png_decode(const uint8_t *data, size_t size, struct picture_rgb *out, struct fault *fault) {
    struct png_reading r = {.data = data, .size = size, .fault = fault};
    r.png = png_create_read_struct(PNG_LIBPNG_VER_STRING, &r, on_png_error, on_png_warning);
    if (r.png) r.info = png_create_info_struct(r.png);
    if (r.info)
        read_png(&r);
    else
        r.rc = fault_set(fault, ERR_NOMEM, NULL, "not enough memory for the picture");
    png_destroy_read_struct(&r.png, &r.info, NULL);
    mem_free(r.rows);
    *out = r.rgba;
    return r.rc;
}
