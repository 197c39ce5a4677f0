/* The part of Criterion that the kernel tests use, for an emulator of one program: Criterion starts
 * each test as another program. Each test is a fork here. The program takes no arguments. */
#ifndef KEEPD_TESTS_PLAIN_CRITERION_H
#define KEEPD_TESTS_PLAIN_CRITERION_H

#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

struct plain_test {
    const char *suite, *name;
    void (*run)(void), (*init)(void), (*fini)(void);
    double timeout; /* not used */
    struct plain_test *next;
};

static struct plain_test *plain_tests;
static bool plain_failed; /* a cr_expect_ of this test */

#define Test(of, called, ...)                                                                      \
    static void test_##of##_##called(void);                                                        \
    __attribute__((constructor)) static void add_##of##_##called(void) {                           \
        static struct plain_test test = {                                                          \
            .suite = #of, .name = #called, .run = test_##of##_##called, __VA_ARGS__};              \
        struct plain_test **to = &plain_tests;                                                     \
        while (*to) to = &(*to)->next;                                                             \
        *to = &test;                                                                               \
    }                                                                                              \
    static void test_##of##_##called(void)

__attribute__((format(printf, 3, 4), unused)) static void
plain_report(const char *where, const char *what, const char *format, ...) {
    va_list args;
    fprintf(stderr, "%s: %s", where, what);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    plain_failed = true;
}

#define PLAIN_TEXT_(x) #x
#define PLAIN_TEXT(x)  PLAIN_TEXT_(x)
#define PLAIN(good, ends, what, ...)                                                               \
    do {                                                                                           \
        if (good) break;                                                                           \
        plain_report(__FILE__ ":" PLAIN_TEXT(__LINE__), what, " " __VA_ARGS__);                    \
        if (ends) exit(1);                                                                         \
    } while (0)
#define PLAIN_NEAR(a, b, by) (fabs((double)((a) - (b))) <= (double)(by))

#define cr_assert(x, ...)              PLAIN(x, true, #x, __VA_ARGS__)
#define cr_assert_not(x, ...)          PLAIN(!(x), true, "not " #x, __VA_ARGS__)
#define cr_assert_eq(a, b, ...)        PLAIN((a) == (b), true, #a " == " #b, __VA_ARGS__)
#define cr_assert_neq(a, b, ...)       PLAIN((a) != (b), true, #a " != " #b, __VA_ARGS__)
#define cr_assert_lt(a, b, ...)        PLAIN((a) < (b), true, #a " < " #b, __VA_ARGS__)
#define cr_assert_leq(a, b, ...)       PLAIN((a) <= (b), true, #a " <= " #b, __VA_ARGS__)
#define cr_assert_gt(a, b, ...)        PLAIN((a) > (b), true, #a " > " #b, __VA_ARGS__)
#define cr_assert_geq(a, b, ...)       PLAIN((a) >= (b), true, #a " >= " #b, __VA_ARGS__)
#define cr_assert_null(x, ...)         PLAIN(!(x), true, #x " is NULL", __VA_ARGS__)
#define cr_assert_not_null(x, ...)     PLAIN(!!(x), true, #x " is not NULL", __VA_ARGS__)
#define cr_assert_str_eq(a, b, ...)    PLAIN(!strcmp(a, b), true, #a " is " #b, __VA_ARGS__)
#define cr_assert_arr_eq(a, b, n, ...) PLAIN(!memcmp(a, b, n), true, #a " is " #b, __VA_ARGS__)
#define cr_assert_float_eq(a, b, by, ...)                                                          \
    PLAIN(PLAIN_NEAR(a, b, by), true, #a " ~ " #b, __VA_ARGS__)
#define cr_expect(x, ...)           PLAIN(x, false, #x, __VA_ARGS__)
#define cr_expect_not(x, ...)       PLAIN(!(x), false, "not " #x, __VA_ARGS__)
#define cr_expect_eq(a, b, ...)     PLAIN((a) == (b), false, #a " == " #b, __VA_ARGS__)
#define cr_expect_lt(a, b, ...)     PLAIN((a) < (b), false, #a " < " #b, __VA_ARGS__)
#define cr_expect_leq(a, b, ...)    PLAIN((a) <= (b), false, #a " <= " #b, __VA_ARGS__)
#define cr_expect_gt(a, b, ...)     PLAIN((a) > (b), false, #a " > " #b, __VA_ARGS__)
#define cr_expect_geq(a, b, ...)    PLAIN((a) >= (b), false, #a " >= " #b, __VA_ARGS__)
#define cr_expect_null(x, ...)      PLAIN(!(x), false, #x " is NULL", __VA_ARGS__)
#define cr_expect_not_null(x, ...)  PLAIN(!!(x), false, #x " is not NULL", __VA_ARGS__)
#define cr_expect_str_eq(a, b, ...) PLAIN(!strcmp(a, b), false, #a " is " #b, __VA_ARGS__)
#define cr_expect_float_eq(a, b, by, ...)                                                          \
    PLAIN(PLAIN_NEAR(a, b, by), false, #a " ~ " #b, __VA_ARGS__)

static int plain_run(const struct plain_test *test) {
    fflush(NULL);
    const pid_t child = fork();
    int status = 1;
    if (child == 0) {
        if (test->init) test->init();
        test->run();
        if (test->fini) test->fini();
        exit(plain_failed);
    }
    if (child < 0 || waitpid(child, &status, 0) != child) perror("a test's process");
    return status;
}

int main(void) {
    int failed = 0, count = 0;
    for (const struct plain_test *test = plain_tests; test; test = test->next, count++) {
        const int status = plain_run(test);
        if (status) fprintf(stderr, "failed: %s %s (status %d)\n", test->suite, test->name, status);
        failed += status != 0;
    }
    printf("%d tests, %d failed\n", count, failed);
    return failed > 0 || count == 0;
}

#endif
