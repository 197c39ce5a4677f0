#include <criterion/criterion.h>

#include "server/watchdog.h"

#define SECOND 1000000000ll

static bool look(struct watchdog *w, int replica, int jobs, int64_t progress_ns) {
    const struct engine_status status = {.jobs = jobs, .progress_ns = progress_ns};
    return watchdog_check(w, replica, &status);
}

Test(watchdog, due) {
    struct watchdog w = {.every_ns = 40 * SECOND}, none = {0};
    cr_assert(watchdog_due(&w, 100 * SECOND) && !watchdog_due(&none, 100 * SECOND));
    watchdog_fed(&w, 100 * SECOND);
    cr_assert(!watchdog_due(&w, 139 * SECOND) && watchdog_due(&w, 140 * SECOND));
}

/* Steps may take longer than the interval between two checks. */
Test(watchdog, replicas_need_not_step_together) {
    struct watchdog w = {.every_ns = SECOND};
    watchdog_fed(&w, SECOND);
    cr_assert_not(look(&w, 0, 1, SECOND));
    cr_assert_not(look(&w, 1, 1, SECOND / 2));
    cr_assert(look(&w, 0, 1, SECOND + 1));
    cr_assert_not(look(&w, 1, 1, SECOND / 2));
    cr_assert(look(&w, 0, 1, SECOND + 1));
    cr_assert(look(&w, 1, 1, SECOND + 2));
    watchdog_fed(&w, 2 * SECOND);
    cr_assert_not(look(&w, 0, 1, SECOND + 1));
    cr_assert(look(&w, 1, 1, 3 * SECOND));
}

/* Neither the progress of other replicas nor its own past hides a replica that hangs. */
Test(watchdog, each_replica_works) {
    struct watchdog w = {.every_ns = SECOND};
    watchdog_fed(&w, SECOND);
    cr_assert(look(&w, 0, 1, SECOND + 1));
    cr_assert(look(&w, 1, 0, 0));
    watchdog_fed(&w, 2 * SECOND);
    for (int64_t i = 1; i < 50; i++) {
        cr_assert(look(&w, 0, 1, 2 * SECOND + i));
        cr_assert_not(look(&w, 1, 1, SECOND));
    }
    const struct engine_status stopped = {.jobs = 0, .stopped = true};
    cr_assert_not(watchdog_check(&w, 0, &stopped));
}
