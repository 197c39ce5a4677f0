#include "server/ledger.h"

#include <criterion/criterion.h>

#include "base/mem.h"

enum { REQUESTS = 100, TOTAL = 4000 }; /* so each request's own part is 10, and 3000 are shared */

static const uint8_t anna[16] = {1}, bert[16] = {2}, carl[16] = {1, 0, 0, 0, 0, 0, 0, 0, 1};
static struct ledger ledger;

static void open_ledger(void) {
    ledger_open(&ledger, TOTAL, REQUESTS);
    cr_assert_eq(ledger.own, 10);
    cr_assert_eq(ledger.shared, 3000);
}

static struct ledger_entry enter(const uint8_t client[16]) {
    struct ledger_entry entry = {0};
    cr_assert(ledger_enter(&ledger, &entry, client));
    return entry;
}

static void leave(struct ledger_entry *entry) {
    ledger_leave(&ledger, entry);
    ledger_leave(&ledger, entry); /* once is enough */
}

TestSuite(ledger, .init = open_ledger);

Test(ledger, a_client_holds_at_most_twice_as_much_as_is_free) {
    struct ledger_entry a = enter(anna), again = enter(anna), b = enter(bert);
    cr_assert_eq(ledger_hold(&ledger, &a, 2011), LEDGER_FULL, "beyond two thirds");
    cr_assert_eq(ledger_hold(&ledger, &a, 2010), LEDGER_HELD);
    cr_assert_eq(ledger_hold(&ledger, &again, 11), LEDGER_CLIENT_FULL);
    cr_assert_eq(ledger_hold(&ledger, &b, 677), LEDGER_FULL, "others are the reason");
    cr_assert_eq(ledger_hold(&ledger, &b, 676), LEDGER_HELD, "two thirds of the rest");
    cr_assert_eq(ledger.held, 2010 + 676);
    ledger_give_back(&ledger, &a);
    cr_assert_eq(ledger_hold(&ledger, &again, 1566), LEDGER_HELD);
    cr_assert_eq(ledger_hold(&ledger, &again, 1), LEDGER_FULL);
    leave(&a), leave(&again), leave(&b);
    ledger_close(&ledger);
}

/* However little is left, every request gets its own part, once. */
Test(ledger, own_parts_are_always_free) {
    struct ledger_entry large[16], small[REQUESTS - 16];
    for (uint8_t i = 0; i < 16; i++) {
        large[i] = enter((uint8_t[16]){i});
        while (ledger_hold(&ledger, &large[i], 1) == LEDGER_HELD) continue;
    }
    for (uint8_t i = 0; i < REQUESTS - 16; i++) {
        small[i] = enter((uint8_t[16]){i, 1});
        cr_assert_eq(ledger_hold(&ledger, &small[i], 4), LEDGER_HELD);
        cr_assert_eq(ledger_hold(&ledger, &small[i], 6), LEDGER_HELD);
        while (ledger_hold(&ledger, &small[i], 1) == LEDGER_HELD) continue;
        ledger_give_back(&ledger, &small[i]);
        cr_assert_eq(ledger_hold(&ledger, &small[i], 10), LEDGER_HELD);
    }
    cr_assert_leq(ledger.held, TOTAL);
    for (int i = 0; i < 16; i++) leave(&large[i]);
    for (int i = 0; i < REQUESTS - 16; i++) leave(&small[i]);
    ledger_close(&ledger);
}

/* An answer that is computed is kept, and its client gets nothing more until it is read. */
Test(ledger, answers_are_charged_and_never_refused) {
    struct ledger_entry a = enter(anna), again = enter(anna), b = enter(bert);
    ledger_charge(&ledger, &a, 5000);
    cr_assert_eq(ledger.shared_held, 4990);
    cr_assert_eq(ledger_hold(&ledger, &again, 1), LEDGER_CLIENT_FULL);
    cr_assert_eq(ledger_hold(&ledger, &b, 10), LEDGER_HELD);
    cr_assert_eq(ledger_hold(&ledger, &b, 1), LEDGER_FULL);
    leave(&a);
    cr_assert_eq(ledger_hold(&ledger, &again, 1), LEDGER_HELD);
    leave(&again), leave(&b);
    ledger_close(&ledger);
}

/* Another request has the connection, and with it the own part. */
Test(ledger, a_request_without_connection_has_no_own_part) {
    struct ledger_entry a = enter(anna);
    struct ledger_entry outside = {0};
    cr_assert_eq(ledger_hold(&ledger, &a, 8), LEDGER_HELD);
    ledger_detach(&ledger, &a);
    cr_assert_eq(ledger.shared_held, 8);
    cr_assert_eq(ledger_hold(&ledger, &a, 2), LEDGER_HELD);
    cr_assert_eq(ledger.shared_held, 10);
    ledger_give_back(&ledger, &a);
    cr_assert_eq(ledger.held, 0);
    ledger_detach(&ledger, &outside); /* a request that was refused before */
    leave(&a);
    ledger_close(&ledger);
}

Test(ledger, accounts_end_with_their_entries) {
    struct ledger_entry a = enter(anna), b = enter(carl), again = enter(carl), none = {0};
    cr_assert_neq(a.account, b.account, "in one bucket");
    cr_assert_eq(b.account, again.account);
    leave(&a), leave(&b);
    cr_assert_eq(ledger_hold(&ledger, &again, 20), LEDGER_HELD);
    mem_fail_after(0);
    cr_assert_not(ledger_enter(&ledger, &none, bert));
    leave(&none), leave(&again);
    ledger_close(&ledger);
}

Test(ledger, own_parts_have_a_limit) {
    ledger_open(&ledger, (size_t)1 << 30, 1);
    cr_assert_eq(ledger.own, LEDGER_OWN_MAX);
    cr_assert_eq(ledger.shared, ((size_t)1 << 30) - LEDGER_OWN_MAX);
    ledger_open(&ledger, 4, 100);
    cr_assert_eq(ledger.own, 0);
    cr_assert_eq(ledger.shared, 4);
}

/* An entry's amount of any item may grow within its client's share, and always shrink. */
Test(ledger, items_are_divided) {
    struct ledger_stock *places = &ledger.stock[LEDGER_PLACES];
    *places = (struct ledger_stock){.total = 9, .times = 2};
    struct ledger_entry a = enter(anna), again = enter(anna), b = enter(bert), c = enter(carl);
    cr_assert_eq(ledger_set(&ledger, &a, LEDGER_PLACES, 5), LEDGER_HELD);
    cr_assert_eq(ledger_set(&ledger, &again, LEDGER_PLACES, 2), LEDGER_CLIENT_FULL);
    cr_assert_eq(ledger_set(&ledger, &again, LEDGER_PLACES, 1), LEDGER_HELD);
    cr_assert_eq(ledger_of_client(&a, LEDGER_PLACES), 6);
    cr_assert_eq(ledger_set(&ledger, &a, LEDGER_PLACES, 6), LEDGER_CLIENT_FULL);
    cr_assert_eq(ledger_set(&ledger, &b, LEDGER_PLACES, 4), LEDGER_FULL, "there are three");
    cr_assert_eq(ledger_set(&ledger, &b, LEDGER_PLACES, 3), LEDGER_HELD, "one request may fill it");
    cr_assert_eq(ledger_set(&ledger, &c, LEDGER_PLACES, 1), LEDGER_FULL);
    cr_assert_eq(ledger_set(&ledger, &b, LEDGER_PLACES, 1), LEDGER_HELD);
    cr_assert_eq(ledger_set(&ledger, &c, LEDGER_PLACES, 1), LEDGER_HELD);
    leave(&a);
    cr_assert_eq(places->held, 3);
    leave(&again), leave(&b), leave(&c);
    ledger_close(&ledger);
}

/* Where nobody holds anything one request may have more than all; without a total, so may each. */
Test(ledger, one_request_is_never_too_large) {
    ledger.stock[LEDGER_PLACES] = (struct ledger_stock){.total = 4, .times = 2};
    struct ledger_entry a = enter(anna), again = enter(anna);
    cr_assert_eq(ledger_set(&ledger, &a, LEDGER_PLACES, 100), LEDGER_HELD);
    cr_assert_eq(ledger_set(&ledger, &again, LEDGER_PLACES, 1), LEDGER_FULL);
    cr_assert_eq(ledger_set(&ledger, &a, LEDGER_TOKENS, 100), LEDGER_HELD);
    cr_assert_eq(ledger_set(&ledger, &again, LEDGER_TOKENS, 1), LEDGER_HELD);
    leave(&a), leave(&again);
    ledger_close(&ledger);
}
