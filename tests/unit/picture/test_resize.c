#include <criterion/criterion.h>

#include "picture/resize.h"
#include "samples.h"
#include "sums.h"

/* Results of Pillow. */
static const struct {
    int width, height, to_width, to_height;
    enum picture_filter filter;
    struct sums sums;
} resized[] = {
#include "resized.inc"
};

Test(picture_resize, has_the_bytes_of_pillow) {
    for (size_t i = 0; i < sizeof resized / sizeof *resized; i++) {
        struct picture_rgb from = sample_picture(resized[i].width, resized[i].height), to;
        cr_assert_eq(picture_resize(&from, resized[i].to_width, resized[i].to_height,
                                    resized[i].filter, &to),
                     0);
        expect_sums(to.pixels, (size_t)to.width * (size_t)to.height * 3, resized[i].sums, "resized",
                    i);
        mem_free(from.pixels);
        mem_free(to.pixels);
    }
}

Test(picture_resize, reports_each_lack_of_memory) {
    struct picture_rgb from = sample_picture(20, 30), to;
    int failures = 0;
    for (long n = 0;; n++) {
        mem_fail_after(n);
        const int rc = picture_resize(&from, 10, 12, PICTURE_LANCZOS, &to);
        const bool pending = mem_fail_pending();
        mem_fail_after(-1);
        if (rc == 0) {
            cr_expect(pending);
            mem_free(to.pixels);
            break;
        }
        cr_expect_eq(rc, ERR_NOMEM);
        mem_free(to.pixels);
        failures++;
    }
    cr_expect_eq(failures, 11);
    mem_free(from.pixels);
}
