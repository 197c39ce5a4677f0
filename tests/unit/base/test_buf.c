#include <criterion/criterion.h>
#include <stdint.h>
#include <string.h>

#include "base/buf.h"
#include "base/mem.h"

Test(buf, appends) {
    struct buf buf;
    buf_open(&buf, 1000);
    cr_assert_null(buf.data);
    buf_str(&buf, "a");
    buf_char(&buf, 'b');
    buf_add(&buf, "\0c", 2);
    buf_fmt(&buf, "%d-%s", 12, "x");
    buf_int(&buf, INT64_MIN);
    cr_assert_eq(buf.size, 8 + 20);
    cr_assert(memcmp(buf.data, "ab\0c12-x-9223372036854775808", buf.size + 1) == 0);
    cr_assert_not(buf.failed);
    buf_clear(&buf);
    cr_assert_eq(buf.size, 0);
    cr_assert_str_eq(buf.data, "");
    buf_close(&buf);
    cr_assert_null(buf.data);
    buf_close(&buf);
}

Test(buf, formats_longer_than_any_guess) {
    struct buf buf;
    buf_open(&buf, 100000);
    buf_fmt(&buf, "%05000d", 7);
    cr_assert_eq(buf.size, 5000);
    cr_assert_eq(buf.data[4999], '7');
    buf_close(&buf);
}

Test(buf, the_ceiling_is_exact_and_the_error_sticks) {
    struct buf buf;
    buf_open(&buf, 10);
    buf_str(&buf, "0123456789");
    cr_assert_not(buf.failed);
    buf_char(&buf, 'x');
    cr_assert(buf.failed && buf.full);
    cr_assert_eq(buf.capacity, 11);
    buf_add(&buf, "", 0);
    cr_assert_str_eq(buf.data, "0123456789");
    buf_clear(&buf);
    buf_str(&buf, "0123456");
    buf_fmt(&buf, "%s", "long one"); /* all or nothing */
    buf_str(&buf, "x");
    cr_assert(buf.failed);
    cr_assert_str_eq(buf.data, "0123456");
    buf_close(&buf);
}

Test(buf, a_failure_is_inherited) {
    struct buf whole, part;
    buf_open(&whole, 100);
    buf_open(&part, 2);
    buf_str(&part, "ab");
    buf_inherit(&whole, &part);
    cr_assert_not(whole.failed);
    buf_str(&part, "c");
    buf_inherit(&whole, &part);
    cr_assert(whole.failed && whole.full);
    part.full = false;
    buf_inherit(&whole, &part); /* the first failure counts */
    cr_assert(whole.full);
    buf_close(&part);
    buf_close(&whole);
}

Test(buf, huge_sizes_do_not_wrap) {
    struct buf buf;
    buf_open(&buf, SIZE_MAX);
    buf_char(&buf, 'x');
    buf_add(&buf, "", SIZE_MAX - 1);
    cr_assert(buf.failed);
    cr_assert_str_eq(buf.data, "x");
    buf_close(&buf);
}

Test(buf, failed_memory_keeps_what_was_there) {
    struct buf buf;
    buf_open(&buf, 1000);
    buf_str(&buf, "kept");
    mem_fail_after(0);
    for (int i = 0; i < 20 && !buf.failed; i++) buf_str(&buf, "0123456789");
    cr_assert(buf.failed);
    cr_assert_eq(strncmp(buf.data, "kept", 4), 0);
    cr_assert_eq(buf.size, strlen(buf.data));
    buf_close(&buf);
}
