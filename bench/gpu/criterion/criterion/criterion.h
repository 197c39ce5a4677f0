/* The part of Criterion that the case files of tests/emu use, for machines without it: one file of
 * cases becomes a program that runs them one after the other and stops at the first failure.
 * An argument names the cases to run, by a part of their names. */
#ifndef KEEPD_BENCH_GPU_CRITERION_H
#define KEEPD_BENCH_GPU_CRITERION_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CASES_MAX 64

struct cases {
    struct {
        const char *name;
        void (*run)(void);
    } at[CASES_MAX];
    int count;
};

static struct cases all_cases;

static inline void cases_add(const char *name, void (*run)(void)) {
    if (all_cases.count == CASES_MAX) abort();
    all_cases.at[all_cases.count].name = name;
    all_cases.at[all_cases.count++].run = run;
}

#define Test(suite, name)                                                                          \
    static void suite##_##name(void);                                                              \
    __attribute__((constructor)) static void add_##suite##_##name(void) {                          \
        cases_add(#suite "::" #name, suite##_##name);                                              \
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

__attribute__((format(printf, 5, 6))) static inline void
cases_check(bool good, const char *condition, const char *file, int line, const char *format, ...) {
    if (good) return;
    va_list args;
    va_start(args, format);
    fprintf(stderr, "%s:%d: %s\n ", file, line, condition);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    exit(1);
}

static inline char **cases_environment(char **from) {
    size_t count = 1; /* NULL at the end */
    while (from[count - 1]) count++;
    char **copy = malloc(count * sizeof *copy);
    if (!copy) abort();
    memcpy(copy, from, count * sizeof *copy);
    return copy;
}

/* With Criterion each case is a process. Here each begins with the environment of the first one,
 * because some choose an emulated device by variables. */
int main(int argc, char **argv) {
    char **begun = cases_environment(environ);
    int run = 0;
    for (int i = 0; i < all_cases.count; i++) {
        if (argc > 1 && !strstr(all_cases.at[i].name, argv[1])) continue;
        environ = cases_environment(begun);
        all_cases.at[i].run();
        printf("%s\n", all_cases.at[i].name);
        run++;
    }
    printf("%d cases passed\n", run);
    return run ? 0 : 1;
}

#endif
