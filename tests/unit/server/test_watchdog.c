#include <criterion/criterion.h>

#include "server/watchdog.h"

#define SECOND 1000000000ll

static bool look(struct watchdog *w, int replica, int jobs, uint64_t steps) {
    const struct engine_snapshot snapshot = {.jobs = jobs, .steps = steps};
    return watchdog_look(w, replica, &snapshot);
}

Test(watchdog, due) {
    struct watchdog w = {.every_ns = 40 * SECOND}, none = {0};
    cr_assert(watchdog_due(&w, 100 * SECOND) && !watchdog_due(&none, 100 * SECOND));
    watchdog_fed(&w, 100 * SECOND);
    cr_assert(!watchdog_due(&w, 139 * SECOND) && watchdog_due(&w, 140 * SECOND));
}

/* Steps may take longer than the time between two looks, and begin when they like. */
Test(watchdog, replicas_need_not_step_together) {
    struct watchdog w = {.every_ns = SECOND};
    cr_assert_not(look(&w, 0, 1, 0));
    cr_assert_not(look(&w, 1, 1, 0));
    cr_assert(look(&w, 0, 1, 1));
    cr_assert_not(look(&w, 1, 1, 0));
    cr_assert(look(&w, 0, 1, 1));
    cr_assert(look(&w, 1, 1, 1));
    watchdog_fed(&w, SECOND);
    cr_assert_not(look(&w, 0, 1, 1));
    cr_assert(look(&w, 1, 1, 2));
}

/* One that hangs is not hidden by the others, nor by what it did before. */
Test(watchdog, each_replica_works) {
    struct watchdog w = {.every_ns = SECOND};
    cr_assert(look(&w, 0, 1, 5));
    cr_assert(look(&w, 1, 0, 0));
    watchdog_fed(&w, SECOND);
    for (uint64_t i = 6; i < 50; i++) {
        cr_assert(look(&w, 0, 1, i));
        cr_assert_not(look(&w, 1, 1, 0));
    }
    const struct engine_snapshot stopped = {.jobs = 0, .steps = 60, .stopped = true};
    cr_assert_not(watchdog_look(&w, 0, &stopped));
}
