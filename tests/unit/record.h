/* Records the results of a run as tagged bytes, so that two runs can be compared bit by bit. */
#ifndef KEEPD_TESTS_UNIT_RECORD_H
#define KEEPD_TESTS_UNIT_RECORD_H

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

struct record {
    char *data;
    size_t size, room;
    struct {
        const char *what;
        size_t end;
    } mark[400];
    int marks;
};

static inline void note(struct record *record, const char *what, const void *data, size_t size) {
    cr_assert(record->marks < 400);
    if (record->size + size > record->room) {
        record->room = 2 * (record->size + size);
        record->data = realloc(record->data, record->room);
        cr_assert_not_null(record->data);
    }
    if (size) memcpy(record->data + record->size, data, size);
    record->size += size;
    record->mark[record->marks].what = what;
    record->mark[record->marks++].end = record->size;
}

static inline void check_same(const struct record *one, const struct record *many,
                              const char *name) {
    size_t from = 0;
    cr_assert_eq(one->marks, many->marks, "%s", name);
    for (int i = 0; i < one->marks; i++) {
        cr_assert_eq(one->mark[i].end, many->mark[i].end, "%s: %s, number %d, has another size",
                     name, one->mark[i].what, i);
        cr_assert(!memcmp(one->data + from, many->data + from, one->mark[i].end - from),
                  "%s: %s, number %d, differs", name, one->mark[i].what, i);
        from = one->mark[i].end;
    }
}

#endif
