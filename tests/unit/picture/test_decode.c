#include <criterion/criterion.h>

#include "base/clock.h"
#include "samples.h"
#include "sums.h"

/* Files written by Pillow, and their pixels as it reads them. */
static const struct {
    const char *name;
    size_t size;
    int width, height;
    struct sums sums;
    const char *data;
} decoded[] = {
#include "decoded.inc"
};

#define DECODED (sizeof decoded / sizeof *decoded)

Test(picture_decode, has_the_pixels_of_pillow) {
    for (size_t i = 0; i < DECODED; i++) {
        struct picture_rgb rgb;
        struct fault fault = {0};
        cr_assert_eq(picture_decode(decoded[i].data, decoded[i].size, &rgb, &fault), 0, "%s: %s",
                     decoded[i].name, fault.text);
        cr_expect(rgb.width == decoded[i].width && rgb.height == decoded[i].height);
        expect_sums(rgb.pixels, (size_t)rgb.width * (size_t)rgb.height * 3, decoded[i].sums,
                    decoded[i].name, i);
        mem_free(rgb.pixels);
    }
}

/* A file that ends early is refused wherever it ends, unless only what nobody needs is missing. */
Test(picture_decode, refuses_files_that_end_early) {
    for (size_t i = 0; i < DECODED; i++) {
        int refused = 0;
        for (size_t size = 0; size < decoded[i].size; size++) {
            struct picture_rgb rgb;
            uint8_t *part = mem_must_alloc(size + 1, 1); /* so that reading beyond it shows */
            struct fault fault = {0};
            memcpy(part, decoded[i].data, size);
            const int rc = picture_decode(part, size, &rgb, &fault);
            cr_expect(rc == fault.code && (rc != 0) == (rgb.pixels == NULL));
            refused += rc != 0;
            mem_free(rgb.pixels);
            mem_free(part);
        }
        const bool whole = !strstr(decoded[i].name, "frames"); /* later ones are not read */
        cr_expect_geq(refused, whole ? (int)decoded[i].size - 12 : 200, "%s: %d of %zu",
                      decoded[i].name, refused, decoded[i].size);
    }
}

static int64_t expect_refusal(const void *data, size_t size, int rc, const char *text) {
    struct picture_rgb rgb;
    struct fault fault = {0};
    const int64_t begun = clock_ns();
    cr_expect_eq(picture_decode(data, size, &rgb, &fault), rc, "%s: %s", text, fault.text);
    cr_expect(strstr(fault.text, text), "%s: %s", text, fault.text);
    cr_expect_null(rgb.pixels);
    return clock_ns() - begun;
}

static void expect_size(const void *data, size_t size, int width, int height) {
    struct picture_rgb rgb;
    struct fault fault = {0};
    cr_expect_eq(picture_decode(data, size, &rgb, &fault), 0, "%s", fault.text);
    cr_expect(rgb.width == width && rgb.height == height);
    mem_free(rgb.pixels);
}

Test(picture_decode, names_other_formats) {
    expect_refusal("BM......", 8, ERR_UNSUPPORTED, "BMP");
    expect_refusal("II*.....", 8, ERR_UNSUPPORTED, "TIFF");
    expect_refusal("....ftypavif", 12, ERR_UNSUPPORTED, "AVIF");
    expect_refusal("<svg>", 5, ERR_UNSUPPORTED, "SVG");
    expect_refusal("RIFF....WAVE", 12, ERR_MALFORMED, "no picture");
    expect_refusal("hello", 5, ERR_MALFORMED, "no picture");
    expect_refusal("", 0, ERR_MALFORMED, "no picture");
}

/* A PNG file's header with this size and the begin of its pixels. */
static void png_header(uint32_t width, uint32_t height, uint8_t out[41]) {
    static const uint8_t begin[] = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n',
                                    0,    0,   0,   13,  'I',  'H',  'D',  'R'};
    const uint32_t sizes[2] = {width, height};
    memcpy(out, begin, sizeof begin);
    for (int i = 0; i < 8; i++) out[16 + i] = (uint8_t)(sizes[i / 4] >> (8 * (3 - i % 4)));
    memcpy(out + 24, "\x08\x02\0\0\0", 5);
    uint32_t crc = 0xffffffffu;
    for (int i = 12; i < 29; i++) {
        crc ^= out[i];
        for (int k = 0; k < 8; k++) crc = (crc >> 1) ^ (crc & 1 ? 0xedb88320u : 0);
    }
    crc = ~crc;
    for (int i = 0; i < 4; i++) out[29 + i] = (uint8_t)(crc >> (8 * (3 - i)));
    memcpy(out + 33, "\0\0\x01\0IDAT", 8);
}

/* 500 megapixels cost nothing: the header is enough to refuse them. */
Test(picture_decode, refuses_bombs_by_their_headers) {
    uint8_t file[1024] = {0};
    png_header(25000, 20000, file);
    cr_expect_lt(expect_refusal(file, sizeof file, ERR_LIMIT, "25000 x 20000"), 50000000);
    png_header(PICTURE_EDGE_MAX, PICTURE_PIXELS_MAX / PICTURE_EDGE_MAX + 1, file);
    expect_refusal(file, sizeof file, ERR_LIMIT, "pixels");
    png_header(PICTURE_EDGE_MAX + 1, 1, file);
    expect_refusal(file, sizeof file, ERR_LIMIT, "pixels");
    png_header(0x7fffffff, 0x7fffffff, file);
    expect_refusal(file, sizeof file, ERR_MALFORMED, "IHDR");
    static const uint8_t jpeg[] = {0xff, 0xd8, 0xff, 0xc0, 0,    17, 8, 0x61, 0xa8, 0x4e, 0x20, 3,
                                   1,    0x11, 0,    2,    0x11, 0,  3, 0x11, 0,    0xff, 0xda, 0,
                                   12,   3,    1,    0,    2,    0,  3, 0,    0,    63,   0};
    cr_expect_lt(expect_refusal(jpeg, sizeof jpeg, ERR_LIMIT, "20000 x 25000"), 50000000);
    static const uint8_t webp[] =
        "RIFF\x1e\0\0\0WEBPVP8L\x11\0\0\0\x2f\xff\xff\xff\x0f\0\0\0\0\0\0";
    cr_expect_lt(expect_refusal(webp, sizeof webp, ERR_LIMIT, "16384 x 16384"), 50000000);
    static const uint8_t gif[] = "GIF89a\xa8\x61\x20\x4e\0\0\0,\0\0\0\0\1\0\1\0\0\2\2\x44\1\0;";
    cr_expect_lt(expect_refusal(gif, sizeof gif, ERR_LIMIT, "25000 x 20000"), 50000000);
    expect_refusal(file, PICTURE_FILE_MAX + 1, ERR_LIMIT, "bytes");
}

/* A GIF file being written, whose codes are all pixels of their own. */
struct gif_writer {
    uint8_t *file;
    size_t size, block; /* the place of the present block's count */
    uint32_t bits;
    int bit_count;
};

static void put_gif_byte(struct gif_writer *w, uint8_t byte) {
    if (w->file[w->block] == 255) w->file[w->block = w->size++] = 0;
    w->file[w->size++] = byte;
    w->file[w->block]++;
}

static void put_gif_code(struct gif_writer *w, int code, int width) {
    w->bits |= (uint32_t)code << w->bit_count;
    for (w->bit_count += width; w->bit_count >= 8; w->bit_count -= 8, w->bits >>= 8)
        put_gif_byte(w, (uint8_t)w->bits);
}

static void put_gif_pixels(struct gif_writer *w, int count) {
    w->file[w->size++] = 8;
    w->block = w->size++;
    put_gif_code(w, 256, 9);
    for (int i = 0, next = 257, width = 9; i < count; i++) {
        put_gif_code(w, i * 7 % 251, width);
        if (next < 4096 && ++next == 1 << width && width < 12) width++;
    }
    put_gif_code(w, 257, 12);
    put_gif_byte(w, (uint8_t)w->bits);
}

Test(picture_decode, gif_dictionaries_may_be_full) {
    uint8_t file[16384] = "GIF89a\x64\0\x64\0\0\0\0,\0\0\0\0\x64\0\x64\0";
    struct gif_writer w = {.file = file, .size = 23};
    struct picture_rgb rgb;
    struct fault fault = {0};
    put_gif_pixels(&w, 100 * 100);
    cr_assert_eq(picture_decode(file, w.size, &rgb, &fault), 0, "%s", fault.text);
    for (int i = 0; i < 100 * 100 * 3; i++) cr_assert_eq(rgb.pixels[i], i / 3 * 7 % 251, "%d", i);
    mem_free(rgb.pixels);
}

/* A frame of 2 x 1 pixels in black and white, whose bytes a test changes. */
#define SMALL_GIF "GIF89a\2\0\1\0\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\2\0\1\0\0\2\2\x44\x0a\0;"

static void expect_gif_refusal(size_t at, uint8_t byte, int rc, const char *text) {
    uint8_t file[sizeof SMALL_GIF - 1];
    memcpy(file, SMALL_GIF, sizeof file);
    expect_size(file, sizeof file, 2, 1);
    file[at] = byte;
    expect_refusal(file, sizeof file, rc, text);
}

Test(picture_decode, refuses_damaged_gif_files) {
    expect_gif_refusal(19, ';', ERR_MALFORMED, "no frame");
    expect_gif_refusal(19, 'x', ERR_MALFORMED, "no frame");
    expect_gif_refusal(19, '!', ERR_MALFORMED, "no frame");
    expect_gif_refusal(24, 0, ERR_MALFORMED, "no pixels");
    expect_gif_refusal(25, 0xff, ERR_LIMIT, "pixels");
    expect_gif_refusal(21, 0xff, ERR_LIMIT, "pixels");
    expect_gif_refusal(24, 9, ERR_MALFORMED, "ends early");
    expect_gif_refusal(29, 0, ERR_MALFORMED, "impossible size");
    expect_gif_refusal(29, 9, ERR_MALFORMED, "impossible size");
    expect_gif_refusal(31, 0x74, ERR_MALFORMED, "unknown code");
    expect_gif_refusal(31, 0x6c, ERR_MALFORMED, "ends early");
}

Test(picture_decode, reports_lack_of_memory) {
    for (size_t i = 0; i < DECODED; i++) {
        struct picture_rgb rgb;
        struct fault fault = {0};
        mem_fail_after(0);
        cr_expect_eq(picture_decode(decoded[i].data, decoded[i].size, &rgb, &fault), ERR_NOMEM,
                     "%s", decoded[i].name);
        mem_fail_after(-1);
        cr_expect_null(rgb.pixels);
    }
}
