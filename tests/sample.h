/* Where kernels have sanitizers, tests of many cases that are alike run a sample of them
 * (KEEPD_TEST_SAMPLE is 1, set by CMake): a case takes ten times as long there, builds without
 * sanitizers compare the numbers of all of them, and accesses and arithmetic show in one case of
 * each kind. So do tests that CMake names with keepd_sampled_test, in `make test`. In an emulator
 * (tests/arm64/run.py) it is larger, and divides the cases once more. */
#ifndef KEEPD_TESTS_SAMPLE_H
#define KEEPD_TESTS_SAMPLE_H

#include <stdbool.h>
#include <stdlib.h>

static inline size_t test_sample(void) {
    const char *set = getenv("KEEPD_TEST_SAMPLE");
    return set ? strtoul(set, NULL, 10) : 0;
}

/* Returns whether a sample that has every n-th case, or fewer, leaves out this one. */
static inline bool test_leaves_out(size_t index, size_t n) {
    return test_sample() && index % (n * test_sample()) != 0;
}

#endif
