/* Test files that are written from several buffers. */
#ifndef KEEPD_TESTS_UNIT_PARTS_H
#define KEEPD_TESTS_UNIT_PARTS_H

#include <criterion/criterion.h>
#include <stdio.h>

#include "base/buf.h"

/* Writes the buffers, one behind another, to the file `name` of a directory. */
static inline void write_parts(const char *dir, const char *name, const struct buf *parts,
                               int count) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *file = fopen(path, "wb");
    cr_assert_not_null(file);
    for (int i = 0; i < count; i++) {
        if (!parts[i].size) continue; /* an empty buffer has no data to point at */
        cr_assert_eq(fwrite(parts[i].data, 1, parts[i].size, file), parts[i].size);
    }
    cr_assert_eq(fclose(file), 0);
}

#endif
