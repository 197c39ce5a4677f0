#include <criterion/criterion.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
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

/* Requests that were not made are saved up to the rate of one minute. */
Test(keys, an_allowance_is_full_after_a_minute) {
    const int64_t hour_ns = 3600000000000;
    struct key key = {0};
    cr_assert_eq(key_spend(&key, 3, 1), 0);
    for (int i = 0; i < 3; i++) cr_assert_eq(key_spend(&key, 3, hour_ns), 0, "request %d", i);
    cr_assert_eq(key_spend(&key, 3, hour_ns), 20001, "a third of a minute, in milliseconds");
}

static sigjmp_buf touched;

static void on_touch(int number) {
    (void)number;
    siglongjmp(touched, 1);
}

/* Whether keys_find reads the page, which allows no access. */
static bool finds_page(struct keys *keys, const char *text) {
    struct sigaction action = {.sa_handler = on_touch, .sa_flags = SA_NODEFER};
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);
    if (sigsetjmp(touched, 1)) return true;
    keys_find(keys, text);
    return false;
}

/* The time of a comparison must not tell how much of a key is right. A comparison that reads to the
 * last byte, whatever the first one is, runs into a page that cannot be read. */
Test(keys, comparing_reads_every_byte_of_every_key) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *room = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct keys keys, two;
    cr_assert_neq(room, MAP_FAILED);
    list_keys(0, 2, false);
    open_keys(&keys, 2, NULL);
    for (size_t split = 8; split <= sizeof(struct key) + 8; split += sizeof(struct key)) {
        /* The first or the second key's digest lies across the end of the first page. */
        two = keys;
        two.items = (struct key *)(void *)(room + page - split);
        cr_assert_eq(mprotect(room + page, page, PROT_READ | PROT_WRITE), 0);
        memcpy(two.items, keys.items, 2 * sizeof *keys.items);
        cr_assert(keys_find(&two, names[0]) && keys_find(&two, names[1]));
        cr_assert_eq(mprotect(room + page, page, PROT_NONE), 0);
        cr_assert(finds_page(&two, "wrong"), "a wrong key, byte %zu", split);
        cr_assert(finds_page(&two, names[0]) && finds_page(&two, names[1]), "byte %zu", split);
    }
    munmap(room, 2 * page);
    keys_close(&keys);
}

/* ---- Settings ---- */

static int open_text(struct keys *keys, const char *text, const struct keys *before,
                     struct fault *fault) {
    char path[] = "/tmp/test_keys_XXXXXX";
    int fd = mkstemp(path);
    cr_assert(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
    close(fd);
    int rc = keys_open(keys, NULL, 0, path, before, fault);
    unlink(path);
    return rc;
}

Test(keys, settings_follow_a_key) {
    struct keys keys;
    struct fault fault = {0};
    cr_assert_eq(open_text(&keys,
                           "plain\n"
                           "# name=comment\n"
                           "  full \tname=a.b-C_9 requests=3  weight=1000 pages=123456789012 \r\n"
                           "last weight=2",
                           NULL, &fault),
                 0, "%s", fault.text);
    const struct key_settings *plain = &keys_find(&keys, "plain")->settings;
    const struct key_settings *full = &keys_find(&keys, "full")->settings;
    cr_assert(plain->weight == 1 && plain->pages_max == 0 && plain->requests_max == 0);
    cr_assert_str_empty(plain->name);
    cr_assert(full->weight == 1000 && full->pages_max == 123456789012 && full->requests_max == 3);
    cr_assert_str_eq(full->name, "a.b-C_9");
    cr_assert_eq(keys_find(&keys, "last")->settings.weight, 2);
    cr_assert_null(keys_find(&keys, "name=comment"));
    keys_close(&keys);
}

Test(keys, wrong_settings_are_refused_without_the_secret) {
    static const char *const lines[] = {
        "secret weight=0",    "secret weight=1001",
        "secret weight=",     "secret weight=2x",
        "secret pages=-1",    "secret pages=99999999999999999999",
        "secret requests=0",  "secret requests=1e3",
        "secret name=",       "secret name=a b",
        "secret name=\"x\"",  "secret name=aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "secret othersecret", "secret colour=secret",
        "secret =3"};
    struct keys keys;
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        struct fault fault = {0};
        cr_assert_eq(open_text(&keys, lines[i], NULL, &fault), ERR_INVALID, "%s", lines[i]);
        cr_assert(strstr(fault.text, "after a key") && !strstr(fault.text, "secret"), "%s: %s",
                  lines[i], fault.text);
    }
}

Test(keys, a_reload_keeps_counts_and_takes_settings) {
    struct keys before, keys;
    struct fault fault = {0};
    cr_assert_eq(open_text(&before, "one name=a weight=2\ntwo", NULL, &fault), 0);
    keys_find(&before, "one")->active = 3;
    keys_find(&before, "one")->requests = 7;
    cr_assert_eq(open_text(&keys, "one name=b requests=4\nthree", &before, &fault), 0);
    const struct key *one = keys_find(&keys, "one");
    cr_assert(one->active == 3 && one->requests == 7 && one->settings.requests_max == 4);
    cr_assert(one->settings.weight == 1 && strcmp(one->settings.name, "b") == 0);
    cr_assert_eq(keys_by_digest(&keys, one->digest), one);
    cr_assert_null(keys_by_digest(&keys, keys_find(&before, "two")->digest));
    keys_close(&keys);
    keys_close(&before);
}

Test(keys, one_that_comes_back_is_another) {
    static const char *const texts_of[] = {"one\ntwo", "one", "one\ntwo"};
    struct keys keys[3];
    struct fault fault = {0};
    for (int i = 0; i < 3; i++)
        cr_assert_eq(open_text(&keys[i], texts_of[i], i ? &keys[i - 1] : NULL, &fault), 0);
    cr_assert_eq(keys_find(&keys[2], "one")->added, keys_find(&keys[0], "one")->added);
    cr_assert_neq(keys_find(&keys[2], "two")->added, keys_find(&keys[0], "two")->added);
    for (int i = 0; i < 3; i++) keys_close(&keys[i]);
}

/* The usual case: --api-key and the file have the same one. */
Test(keys, a_key_that_is_listed_twice_is_one) {
    static char *given[] = {"one", "two"};
    static const char text[] = "one name=b requests=2\n\none requests=2  name=b\n";
    char path[] = "/tmp/test_keys_XXXXXX";
    struct keys before, keys;
    struct fault fault = {0};
    int fd = mkstemp(path);
    cr_assert(fd >= 0 && write(fd, text, sizeof text - 1) == (ssize_t)sizeof text - 1);
    close(fd);
    cr_assert_eq(keys_open(&before, given, 2, path, NULL, &fault), 0, "%s", fault.text);
    cr_assert(before.count == 2 && before.named == 1);
    struct key *one = keys_find(&before, "one");
    cr_assert_str_eq(one->settings.name, "b", "the file holds");
    one->active = 3;
    one->requests = 7;
    cr_assert_eq(key_spend(one, 1, 1), 0);
    cr_assert_eq(keys_open(&keys, given, 2, path, &before, &fault), 0, "%s", fault.text);
    one = keys_find(&keys, "one");
    cr_assert(one->active == 3 && one->requests == 7 && one->settings.requests_max == 2);
    cr_assert_gt(key_spend(one, 1, 2), 0);
    cr_assert_eq(keys_by_digest(&keys, one->digest), one);
    unlink(path);
    keys_close(&keys);
    keys_close(&before);
}

Test(keys, lines_of_one_key_that_differ_are_refused) {
    static const char *const files[] = {"one\ntwo\n# a remark\none name=a",
                                        "two\none weight=2\n\none",
                                        "two\none pages=2\n\none pages=3"};
    struct keys keys;
    for (int i = 0; i < 3; i++) {
        struct fault fault = {0};
        cr_assert_eq(open_text(&keys, files[i], NULL, &fault), ERR_INVALID, "%s", files[i]);
        cr_expect_str_eq(fault.field, "api-key-file");
        cr_expect_str_eq(fault.text, i == 0 ? "line 4 has the key of line 1 with other settings"
                                            : "line 4 has the key of line 2 with other settings");
        cr_expect_null(keys.items);
    }
}

Test(keys, names_are_bounded) {
    static char text[(KEY_NAMES_MAX + 1) * 24];
    struct keys keys;
    struct fault fault = {0};
    int at = 0, first = 0;
    for (int i = 0; i <= KEY_NAMES_MAX; i++) {
        if (i == KEY_NAMES_MAX) first = at;
        at += snprintf(text + at, sizeof text - (size_t)at, "key%d name=n%d\n", i, i);
    }
    cr_assert_eq(open_text(&keys, text, NULL, &fault), ERR_LIMIT);
    text[first] = '\0';
    cr_assert_eq(open_text(&keys, text, NULL, &fault), 0);
    for (int i = 0; i < KEY_NAMES_MAX; i++) {
        char name[24];
        snprintf(name, sizeof name, "key%d", i);
        cr_assert_eq(keys_by_digest(&keys, keys_find(&keys, name)->digest), keys_find(&keys, name));
    }
    keys_close(&keys);
}
