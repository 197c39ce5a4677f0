/* Files of pictures: each is decoded, or refused with a reason. What is decoded becomes tiles,
 * whose digest is the same a second time. */
#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "picture/picture.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define COMMON .rescale = 1.0 / 255, .deviation = {1, 1, 1}

/* Forms of all kinds, with small tiles. */
static const struct picture_form fuzz_forms[] = {
    {.kind = PICTURE_IDEFICS3,
     .filter = PICTURE_LANCZOS,
     .longest_edge = 32,
     .token_edge = 16,
     .tile_tokens_max = 1,
     .tile_edge = 16,
     .splits = true,
     COMMON},
    {.kind = PICTURE_SMART,
     .filter = PICTURE_BICUBIC,
     .token_edge = 4,
     .tile_tokens_max = 256,
     .min_pixels = 64,
     .max_pixels = 1024,
     COMMON},
    {.kind = PICTURE_STRETCHED,
     .filter = PICTURE_BILINEAR,
     .longest_edge = 32,
     .token_edge = 16,
     .tile_tokens_max = 4,
     .tile_edge = 32,
     .together = true,
     COMMON},
    {.kind = PICTURE_LINES,
     .filter = PICTURE_BICUBIC,
     .longest_edge = 32,
     .token_edge = 4,
     .tile_tokens_max = 64,
     COMMON},
};

static void prepare_twice(const struct picture_rgb *rgb, const struct picture_form *form) {
    uint8_t digest[SHA256_BYTES];
    for (int i = 0; i < 4; i++) {
        struct picture *picture;
        struct fault fault = {0};
        const int rc = picture_prepare(rgb, form, i < 2, &picture, &fault);
        /* Only the kind that keeps a picture's ratio refuses some of them. */
        CHECK_MSG(rc == 0 || (rc == ERR_LIMIT && form->kind == PICTURE_SMART), "%s", fault.text);
        if (rc) return;
        CHECK(picture->tiles == picture->rows * picture->columns + 1);
        CHECK(picture_is_of_form(picture, form));
        if (i % 2) CHECK(memcmp(digest, picture->digest, sizeof digest) == 0);
        memcpy(digest, picture->digest, sizeof digest);
        picture_drop(picture);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct picture_rgb rgb;
    struct fault fault = {0};
    const int rc = picture_decode(data, size, &rgb, &fault);
    CHECK(rc == fault.code && (rc == 0) == (rgb.pixels != NULL));
    if (rc) {
        CHECK(fault.text[0]);
        return 0;
    }
    CHECK((uint64_t)rgb.width * (uint64_t)rgb.height <= PICTURE_PIXELS_MAX);
    for (size_t i = 0; i < sizeof fuzz_forms / sizeof *fuzz_forms; i++)
        prepare_twice(&rgb, &fuzz_forms[i]);
    mem_free(rgb.pixels);
    return 0;
}
