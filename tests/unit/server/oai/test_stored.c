#include <criterion/criterion.h>
#include <string.h>

#include "base/err.h"
#include "server/oai/stored.h"

#define FIRST  "{\"id\":\"a,\\\"]}\",\"content\":[{\"text\":\"}],{\\\\\"},{\"text\":\"\\\"\"}]}"
#define SECOND "{\"id\":\"b\",\"content\":\"{\\\"id\\\":\\\"c\\\"}\"}"
#define THIRD  "{\"id\":\"b\",\"output\":[[],{}]}"

static const char items[] = FIRST "," SECOND "," THIRD;

static void expect(const struct oai_page *page, const char *wanted) {
    struct buf out;
    buf_open(&out, 4096);
    cr_assert_eq(oai_write_page(&out, items, strlen(items), page), 0);
    cr_assert_str_eq(out.data, wanted);
    buf_close(&out);
}

/* Commas, quotes and brackets within strings and within members end no item. */
Test(stored, pages_end_where_items_end) {
    expect(&(struct oai_page){.limit = 1},
           "{\"object\":\"list\",\"data\":[" FIRST "],\"first_id\":\"a,\\\"]}\","
           "\"last_id\":\"a,\\\"]}\",\"has_more\":true}");
    expect(&(struct oai_page){.after = "a,\"]}"},
           "{\"object\":\"list\",\"data\":[" SECOND "," THIRD "],\"first_id\":\"b\","
           "\"last_id\":\"b\",\"has_more\":false}");
    expect(&(struct oai_page){.limit = 2, .descending = true},
           "{\"object\":\"list\",\"data\":[" THIRD "," SECOND "],\"first_id\":\"b\","
           "\"last_id\":\"b\",\"has_more\":true}");
    expect(&(struct oai_page){.after = "b"}, "{\"object\":\"list\",\"data\":[],\"first_id\":null,"
                                             "\"last_id\":null,\"has_more\":false}");
}

/* The id of a member or of a text is no item's. */
Test(stored, only_items_are_found) {
    struct buf out;
    buf_open(&out, 4096);
    cr_assert_eq(oai_write_page(&out, items, strlen(items), &(struct oai_page){.after = "c"}),
                 ERR_NOTFOUND);
    cr_assert_eq(oai_write_page(&out, "", 0, &(struct oai_page){.after = "a"}), ERR_NOTFOUND);
    buf_close(&out);
}

Test(stored, events_are_skipped_by_their_number) {
    static const char events[] = "event: a\ndata: {}\n\nevent: b\ndata: {\"x\":\"\\n\\n\"}\n\n";
    const size_t size = sizeof events - 1, second = 19;
    cr_expect_eq(oai_skip_stored_events(events, size, 0), 0);
    cr_expect_eq(oai_skip_stored_events(events, size, 1), second);
    cr_expect_eq(oai_skip_stored_events(events, size, 2), size);
    cr_expect_eq(oai_skip_stored_events(events, size, UINT64_MAX), size);
    cr_expect_eq(oai_skip_stored_events("", 0, 3), 0);
}
