#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "server/keys.h"

enum { NAME_BYTES = 16 };

static char names[2 * KEYS_MAX][NAME_BYTES];
static char *texts[KEYS_MAX];

/* `count` keys from number `first` on, listed forwards or backwards. */
static void list_keys(size_t first, size_t count, bool backwards) {
    for (size_t i = 0; i < 2 * KEYS_MAX; i++) snprintf(names[i], NAME_BYTES, "key-%zu", i);
    for (size_t i = 0; i < count; i++) texts[i] = names[first + (backwards ? count - 1 - i : i)];
}

static void open_keys(struct keys *keys, size_t count, const struct keys *before) {
    struct fault fault = {0};
    cr_assert_eq(keys_open(keys, texts, count, NULL, before, &fault), 0, "%s", fault.text);
}

/* For any difference between the lists, in order and in content. */
Test(keys, inheriting_compares_each_key_once) {
    static const struct {
        size_t first;
        bool backwards;
    } lists[] = {{0, false}, {0, true}, {KEYS_MAX / 2, true}, {KEYS_MAX, false}};
    struct keys before, keys;
    list_keys(0, KEYS_MAX, false);
    open_keys(&before, KEYS_MAX, NULL);
    for (size_t i = 0; i < KEYS_MAX; i++)
        before.items[i].allowance = 1 + (double)(i % 7); /* so that they can be told apart */
    for (size_t l = 0; l < sizeof lists / sizeof *lists; l++) {
        list_keys(lists[l].first, KEYS_MAX, lists[l].backwards);
        open_keys(&keys, KEYS_MAX, &before);
        cr_assert_lt(keys_inherit(&keys, &before), 2 * KEYS_MAX);
        for (size_t i = l; i < KEYS_MAX; i += 37) { /* a search compares all keys */
            struct key *key = keys_find(&keys, texts[i]), *was = keys_find(&before, texts[i]);
            cr_assert_not_null(key);
            cr_assert_eq(key->allowance, was ? was->allowance : 0, "%s", texts[i]);
        }
        keys_close(&keys);
    }
    keys_close(&before);
}

Test(keys, one_that_is_listed_twice_keeps_what_it_may_spend) {
    struct keys before, keys;
    list_keys(0, 3, false);
    open_keys(&before, 3, NULL);
    cr_assert_eq(key_spend(keys_find(&before, texts[1]), 1, 1), 0);
    texts[0] = texts[2] = texts[1];
    open_keys(&keys, 3, &before);
    cr_assert_gt(key_spend(keys_find(&keys, texts[1]), 1, 2), 0);
    cr_assert_null(keys_find(&keys, "key-0"));
    keys_close(&keys);
    keys_close(&before);
}
