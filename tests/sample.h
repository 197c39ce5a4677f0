/* Where kernels have sanitizers, tests of many cases that are alike run a sample of them
 * (KEEPD_TEST_SAMPLE, set by CMake): a case takes ten times as long there, builds without
 * sanitizers compare the numbers of all of them, and accesses and arithmetic show in one case of
 * each kind. */
#ifndef KEEPD_TESTS_SAMPLE_H
#define KEEPD_TESTS_SAMPLE_H

#include <stdbool.h>
#include <stdlib.h>

static inline bool test_sample(void) {
    return getenv("KEEPD_TEST_SAMPLE") != NULL;
}

/* Returns whether a sample that has every n-th case leaves out this one. */
static inline bool test_leaves_out(size_t index, size_t n) {
    return test_sample() && index % n != 0;
}

#endif
