#include <criterion/criterion.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>

#include "base/mem.h"

static bool all_zero(const char *p, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (p[i]) return false;
    return true;
}

Test(mem, memory_is_zeroed) {
    char *must = mem_must_alloc(3, 100), *try = mem_try_alloc(3, 100);
    cr_assert(all_zero(must, 300) && all_zero(try, 300));
    mem_free(must);
    mem_free(try);
    mem_free(NULL);
}

Test(mem, growing_keeps_the_old_and_zeroes_the_tail) {
    char *p = mem_must_alloc(1, 4);
    memcpy(p, "abcd", 4);
    p = mem_try_realloc(p, 4, 1000);
    cr_assert(memcmp(p, "abcd", 4) == 0 && all_zero(p + 4, 996));
    p = mem_try_realloc(p, 1000, 2);
    cr_assert(memcmp(p, "ab", 2) == 0);
    mem_free(p);
}

Test(mem, nothing_is_still_a_pointer) {
    void *a = mem_try_alloc(0, 8), *b = mem_must_alloc(0, 0), *c = mem_try_realloc(NULL, 0, 0);
    cr_assert(a && b && c);
    mem_free(a);
    mem_free(b);
    mem_free(c);
}

Test(mem, overflow_and_the_impossible_are_refused) {
    volatile size_t huge = SIZE_MAX / 2;
    cr_assert_null(mem_try_alloc(huge, 3));
}

Test(mem, must_aborts, .signal = SIGABRT) {
    volatile size_t huge = SIZE_MAX / 2;
    mem_must_alloc(huge, 3);
}

Test(mem, strdup) {
    char *s = mem_must_strdup("text");
    cr_assert_str_eq(s, "text");
    mem_free(s);
}

Test(mem, only_the_planned_call_fails) {
    mem_fail_after(1);
    cr_assert(mem_fail_pending());
    void *a = mem_try_alloc(1, 1);
    cr_assert_not_null(a);
    cr_assert_null(mem_try_realloc(a, 1, 2));
    cr_assert_not(mem_fail_pending());
    void *b = mem_try_alloc(1, 1), *c = mem_must_alloc(1, 1);
    cr_assert(b && c);
    mem_fail_after(0);
    cr_assert_null(mem_try_alloc(1, 1));
    mem_fail_after(5);
    mem_fail_after(-1);
    cr_assert_not(mem_fail_pending());
    mem_free(a);
    mem_free(b);
    mem_free(c);
}
