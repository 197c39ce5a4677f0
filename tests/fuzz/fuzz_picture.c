/* Files of pictures: each is decoded, or refused with a reason. What is decoded becomes tiles,
 * whose digest is the same a second time. */
#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "picture/picture.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const struct picture_form fuzz_form = {.kind = PICTURE_IDEFICS3,
                                              .filter = PICTURE_LANCZOS,
                                              .longest_edge = 32,
                                              .token_edge = 16,
                                              .tile_tokens_max = 1,
                                              .tile_edge = 16,
                                              .splits = true,
                                              .rescale = 1.0 / 255,
                                              .deviation = {1, 1, 1}};

static void prepare_twice(const struct picture_rgb *rgb) {
    uint8_t digest[SHA256_BYTES];
    for (int i = 0; i < 2; i++) {
        struct picture *picture;
        struct fault fault = {0};
        CHECK_MSG(picture_prepare(rgb, &fuzz_form, false, &picture, &fault) == 0, "%s", fault.text);
        CHECK(picture->tiles == picture->rows * picture->columns + 1);
        if (i) CHECK(memcmp(digest, picture->digest, sizeof digest) == 0);
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
    prepare_twice(&rgb);
    mem_free(rgb.pixels);
    return 0;
}
