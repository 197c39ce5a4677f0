#include <criterion/criterion.h>
#include <stdint.h>

#include "base/ring.h"

Test(ring, first_in_first_out_and_full_is_a_result) {
    struct ring ring;
    int items[4];
    ring_open(&ring, 3);
    cr_assert_eq(ring.capacity, 4);
    cr_assert_null(ring_pop(&ring));
    for (int i = 0; i < 4; i++) cr_assert(ring_push(&ring, &items[i]));
    cr_assert_not(ring_push(&ring, &items[0]));
    for (int i = 0; i < 4; i++) cr_assert_eq(ring_pop(&ring), &items[i]);
    cr_assert_null(ring_pop(&ring));
    ring_close(&ring);
}

Test(ring, counters_may_wrap) {
    struct ring ring;
    int items[2];
    ring_open(&ring, 2);
    atomic_store(&ring.head, SIZE_MAX);
    atomic_store(&ring.tail, SIZE_MAX);
    for (int round = 0; round < 5; round++) {
        cr_assert(ring_push(&ring, &items[0]) && ring_push(&ring, &items[1]));
        cr_assert_not(ring_push(&ring, &items[0]));
        cr_assert_eq(ring_pop(&ring), &items[0]);
        cr_assert_eq(ring_pop(&ring), &items[1]);
    }
    ring_close(&ring);
}
