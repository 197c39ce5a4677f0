/* Sums over bytes, as training/make_pictures.py has them: of each byte, and of each byte times its
 * place modulo 251. */
#ifndef KEEPD_TESTS_UNIT_PICTURE_SUMS_H
#define KEEPD_TESTS_UNIT_PICTURE_SUMS_H

#include <criterion/criterion.h>
#include <stddef.h>
#include <stdint.h>

struct sums {
    unsigned long plain, weighted;
};

static inline void expect_sums(const uint8_t *bytes, size_t size, struct sums expected,
                               const char *name, size_t row) {
    struct sums sums = {0};
    for (size_t i = 0; i < size; i++) {
        sums.plain += bytes[i];
        sums.weighted += bytes[i] * (i % 251);
    }
    cr_expect(sums.plain == expected.plain && sums.weighted == expected.weighted,
              "%s, row %zu: %lu, %lu", name, row, sums.plain, sums.weighted);
}

#endif
