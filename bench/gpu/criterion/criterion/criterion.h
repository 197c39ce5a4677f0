/* The part of Criterion that the case files of tests/emu use, for machines without it. All files
 * are linked into one program (bench/gpu/gpu_cases.c), which runs the cases one after the other. A
 * failed assertion ends the process of the case. */
#ifndef KEEPD_BENCH_GPU_CRITERION_H
#define KEEPD_BENCH_GPU_CRITERION_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Registers a case; called before main. */
void cases_add(const char *suite, const char *name, void (*run)(void));
/* If `good` is false: writes where and why to standard error, and ends the process. */
__attribute__((format(printf, 5, 6))) void
cases_check(bool good, const char *condition, const char *file, int line, const char *format, ...);

#define Test(suite, name)                                                                          \
    static void suite##_##name(void);                                                              \
    __attribute__((constructor)) static void add_##suite##_##name(void) {                          \
        cases_add(#suite, #name, suite##_##name);                                                  \
    }                                                                                              \
    static void suite##_##name(void)

#define cr_assert(condition, ...)                                                                  \
    cases_check((condition), #condition, __FILE__, __LINE__, " " __VA_ARGS__)
#define cr_assert_eq(a, b, ...)     cr_assert((a) == (b), __VA_ARGS__)
#define cr_assert_geq(a, b, ...)    cr_assert((a) >= (b), __VA_ARGS__)
#define cr_assert_gt(a, b, ...)     cr_assert((a) > (b), __VA_ARGS__)
#define cr_assert_leq(a, b, ...)    cr_assert((a) <= (b), __VA_ARGS__)
#define cr_assert_lt(a, b, ...)     cr_assert((a) < (b), __VA_ARGS__)
#define cr_assert_neq(a, b, ...)    cr_assert((a) != (b), __VA_ARGS__)
#define cr_assert_not_null(a, ...)  cr_assert((a) != NULL, __VA_ARGS__)
#define cr_assert_str_eq(a, b, ...) cr_assert(strcmp((a), (b)) == 0, __VA_ARGS__)

#endif
