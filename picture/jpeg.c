/* JPEG by libjpeg-turbo, with its exact inverse transform and smooth upsampling. Grey becomes red,
 * green and blue; CMYK is mixed as Pillow does it. */
#include <stdio.h>

#include <jerror.h>
#include <jpeglib.h>
#include <setjmp.h>

#include "base/mem.h"
#include "picture/codec.h"

#define JPEG_SCANS_MAX 200 /* progressive files decode all pixels again in each scan */

/* A file being read. Members are reached after longjmp, so none lies in a register. */
struct jpeg_reading {
    struct jpeg_decompress_struct jpeg;
    struct jpeg_error_mgr errors;
    struct jpeg_progress_mgr progress;
    jmp_buf back;
    uint8_t *row; /* four channels, for CMYK */
    struct picture_rgb rgb;
    struct fault *fault;
    int rc;
};

static void on_jpeg_error(j_common_ptr common) {
    struct jpeg_reading *r = common->client_data;
    char text[JMSG_LENGTH_MAX];
    common->err->format_message(common, text);
    if (common->err->msg_code == JERR_OUT_OF_MEMORY)
        r->rc = fault_set(r->fault, ERR_NOMEM, NULL, "not enough memory for the picture");
    else
        r->rc = fault_set(r->fault, ERR_MALFORMED, NULL, "the JPEG file is damaged: %.100s", text);
    longjmp(r->back, 1);
}

/* Refuses a file that ends early, whose rest the library would fill with grey. */
static void on_jpeg_message(j_common_ptr common, int level) {
    if (level < 0 && common->err->msg_code == JWRN_JPEG_EOF) on_jpeg_error(common);
}

static void no_jpeg_output(j_common_ptr common) {
    (void)common;
}

static void check_jpeg_scans(j_common_ptr common) {
    struct jpeg_reading *r = common->client_data;
    if (r->jpeg.input_scan_number <= JPEG_SCANS_MAX) return;
    r->rc = fault_set(r->fault, ERR_LIMIT, NULL, "the JPEG file has more than %d scans",
                      JPEG_SCANS_MAX);
    longjmp(r->back, 1);
}

/* Inks become light: black takes away from all, a colour from its complement. `inverted`: Adobe's
 * programs store 255 for no ink. */
static void mix_inks(const uint8_t *cmyk, int width, bool inverted, uint8_t *rgb) {
    for (int x = 0; x < width; x++, cmyk += 4, rgb += 3) {
        const unsigned flip = inverted ? 255 : 0, light = 255 - (cmyk[3] ^ flip);
        for (int c = 0; c < 3; c++) {
            const unsigned product = (cmyk[c] ^ flip) * light + 128;
            const unsigned taken = ((product >> 8) + product) >> 8;
            rgb[c] = (uint8_t)(light > taken ? light - taken : 0);
        }
    }
}

static int read_jpeg_pixels(struct jpeg_reading *r) {
    struct jpeg_decompress_struct *jpeg = &r->jpeg;
    const bool inks = jpeg->out_color_space == JCS_CMYK;
    const size_t row = (size_t)r->rgb.width * 3;
    int rc = picture_open_pixels(&r->rgb, 3, r->fault);
    if (rc) return rc;
    if (inks) r->row = mem_try_alloc((size_t)r->rgb.width, 4);
    if (inks && !r->row)
        return fault_set(r->fault, ERR_NOMEM, NULL, "not enough memory for the picture");
    jpeg_start_decompress(jpeg);
    while (jpeg->output_scanline < jpeg->output_height) {
        uint8_t *to = r->rgb.pixels + (size_t)jpeg->output_scanline * row;
        JSAMPROW line = inks ? r->row : to;
        jpeg_read_scanlines(jpeg, &line, 1);
        if (inks) mix_inks(r->row, r->rgb.width, jpeg->saw_Adobe_marker, to);
    }
    jpeg_finish_decompress(jpeg);
    return 0;
}

static void read_jpeg(struct jpeg_reading *r, const uint8_t *data, size_t size) {
    if (setjmp(r->back)) return; /* r->rc says why */
    jpeg_create_decompress(&r->jpeg);
    r->jpeg.progress = &r->progress;
    r->progress.progress_monitor = check_jpeg_scans;
    jpeg_mem_src(&r->jpeg, data, size);
    jpeg_read_header(&r->jpeg, TRUE);
    r->rc = picture_check_size(r->jpeg.image_width, r->jpeg.image_height, r->fault);
    if (r->rc) return;
    r->rgb.width = (int)r->jpeg.image_width;
    r->rgb.height = (int)r->jpeg.image_height;
    const bool inks = r->jpeg.jpeg_color_space == JCS_CMYK || r->jpeg.jpeg_color_space == JCS_YCCK;
    r->jpeg.out_color_space = inks ? JCS_CMYK : JCS_RGB;
    r->jpeg.dct_method = JDCT_ISLOW;
    r->rc = read_jpeg_pixels(r);
}

int jpeg_decode(const uint8_t *data, size_t size, struct picture_rgb *out, struct fault *fault) {
    struct jpeg_reading r = {.fault = fault};
    r.jpeg.err = jpeg_std_error(&r.errors);
    r.errors.error_exit = on_jpeg_error;
    r.errors.emit_message = on_jpeg_message;
    r.errors.output_message = no_jpeg_output;
    r.jpeg.client_data = &r;
    read_jpeg(&r, data, size);
    jpeg_destroy_decompress(&r.jpeg);
    mem_free(r.row);
    *out = r.rgb;
    return r.rc;
}
