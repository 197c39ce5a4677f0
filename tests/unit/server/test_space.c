/* Tests prepare_space in server/prepare.c: which requests share conversations. */
#include <criterion/criterion.h>
#include <string.h>

#include "server/loop.h"

static void space_of(const char *salt, const char *model, uint8_t space[16]) {
    static struct served_model served;
    static struct exchange exchange;
    static struct engine_info info;
    served.rules.names[0] = model;
    served.rules.info = &info;
    exchange.model = &served;
    cr_assert_eq(prepare_space(&exchange, salt, space), 0);
}

/* Joined, both pairs are the same bytes; their lengths keep them apart. */
Test(space, salts_and_models_do_not_run_into_each_other) {
    uint8_t a[16], b[16], again[16];
    space_of("tenant-a", "bc", a);
    space_of("tenant-ab", "c", b);
    space_of("tenant-a", "bc", again);
    cr_assert_neq(memcmp(a, b, sizeof a), 0);
    cr_assert_eq(memcmp(a, again, sizeof a), 0);
}
