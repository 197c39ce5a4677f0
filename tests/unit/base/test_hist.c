#include <criterion/criterion.h>
#include <math.h>
#include <signal.h>

#include "base/clock.h"
#include "base/hist.h"

static const double bounds[] = {0.1, 1, 10};

Test(hist, a_value_on_a_bound_belongs_below) {
    struct hist hist;
    hist_open(&hist, bounds, 3);
    const double values[] = {0, 0.1, 0.11, 1, 5, 10, 10.5};
    for (size_t i = 0; i < 7; i++) hist_add(&hist, values[i]);
    cr_assert_eq(hist.counts[0], 2);
    cr_assert_eq(hist.counts[1], 2);
    cr_assert_eq(hist.counts[2], 2);
    cr_assert_eq(hist.counts[3], 1);
    cr_assert_eq(hist_count(&hist), 7);
    cr_assert_float_eq(hist.sum, 26.71, 1e-9);
}

Test(hist, nan_counts_as_above_all) {
    struct hist hist;
    hist_open(&hist, bounds, 3);
    hist_add(&hist, NAN);
    cr_assert_eq(hist.counts[3], 1);
}

Test(hist, merging_adds_up) {
    struct hist a, b;
    hist_open(&a, bounds, 3);
    hist_open(&b, bounds, 3);
    hist_add(&a, bounds[0]);
    hist_add(&b, bounds[0]);
    hist_add(&b, bounds[2] + 1);
    hist_merge(&a, &b);
    cr_assert(a.counts[0] == 2 && a.counts[3] == 1 && hist_count(&a) == 3);
    cr_assert_float_eq(a.sum, 2 * bounds[0] + bounds[2] + 1, 1e-9);
    cr_assert_eq(hist_count(&b), 2);
}

Test(hist, too_many_bounds, .signal = SIGABRT) {
    struct hist hist;
    hist_open(&hist, bounds, HIST_MAX_BOUNDS + 1);
}

Test(clock, does_not_go_back) {
    int64_t before = clock_ns();
    cr_assert_leq(before, clock_ns());
    cr_assert_gt(clock_unix_seconds(), 1700000000);
}
