#include <criterion/criterion.h>
#include <string.h>

#include "daemon/progress.h"

#define SECOND 1000000000ll

Test(progress, line) {
    char line[PROGRESS_LINE];
    progress_line(line, 0, 0, 0, "weights");
    cr_assert_str_eq(line, "weights [################] 100 %  0 bytes of 0 bytes");
    progress_line(line, 1200000000, 3400000000, 2 * SECOND, "weights");
    cr_assert_str_eq(line,
                     "weights [#####           ]  35 %  1.2 GB of 3.4 GB  600 MB/s  4 s left");
    progress_line(line, 999, 1000, SECOND / 4, "weights");
    cr_assert_str_eq(line, "weights [############### ]  99 %  999 bytes of 1.0 kB");
    progress_line(line, 1000000, 8000000000, 60 * SECOND, "weights");
    cr_assert(strstr(line, "16.7 kB/s  133.3 h left"), "%s", line);
}

/* Sizes that round up take the next unit; nothing is longer than the line. */
Test(progress, extremes) {
    char line[PROGRESS_LINE];
    progress_line(line, 999950, 999950, SECOND, "weights");
    cr_assert(strstr(line, "1.0 MB of 1.0 MB  1.0 MB/s  0 s left"), "%s", line);
    progress_line(line, 1, UINT64_MAX, INT64_MAX, "a very long name of what is loaded");
    cr_assert(strlen(line) < PROGRESS_LINE && strstr(line, "1 bytes of "), "%s", line);
}
