/* Stored responses: found only by their owner, bounded in number and bytes, the least used first.
 */
#include <criterion/criterion.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "oai_case.h"

static const struct oai_owner nobody = {.salt = ""};
static const char model[] = "model";

static int put(struct oai_records *records, const struct oai_owner *owner, const char *id,
               const char *items, const char *answer) {
    static const int32_t tokens[] = {7, 8};
    const struct oai_record record = {.items = items,
                                      .items_size = strlen(items),
                                      .input_size = strcspn(items, "|"),
                                      .answer = answer,
                                      .answer_size = strlen(answer),
                                      .tokens = tokens,
                                      .token_count = 2,
                                      .model = model};
    return oai_records_put(records, owner, id, &record);
}

static bool has(struct oai_records *records, const struct oai_owner *owner, const char *id) {
    return oai_records_find(records, owner, id, (struct oai_record_parts){0}) == 0;
}

static int find(struct oai_records *records, const char *id, struct buf *items,
                struct buf *answer) {
    struct buf tokens;
    buf_open(&tokens, 64);
    int rc =
        oai_records_find(records, &nobody, id,
                         (struct oai_record_parts){
                             .items = items, .answer = answer, .tokens = &tokens, .model = model});
    if (rc != ERR_NOTFOUND) {
        cr_assert_eq(tokens.size, 2 * sizeof(int32_t));
        cr_assert(((const int32_t *)(const void *)tokens.data)[1] == 8);
    }
    buf_close(&tokens);
    return rc;
}

/* The ids of one model's tokens are no text of another model. */
Test(oai_records, gives_tokens_to_their_model_only) {
    struct oai_records *records = oai_records_open(1 << 20, 8);
    struct buf items, tokens;
    buf_open(&items, 64);
    buf_open(&tokens, 64);
    cr_assert_eq(put(records, &nobody, "a", "text", ""), 0);
    struct oai_record_parts parts = {.items = &items, .tokens = &tokens, .model = "other"};
    cr_assert_eq(oai_records_find(records, &nobody, "a", parts), 0);
    cr_expect_str_eq(items.data, "text");
    cr_expect_eq(tokens.size, 0);
    buf_close(&items);
    buf_close(&tokens);
    oai_records_close(records);
}

Test(oai_records, keeps_events) {
    struct oai_records *records = oai_records_open(1 << 20, 8);
    const struct oai_record record = {
        .items = "", .answer = "", .streamed = true, .events = "data\n\n", .events_size = 6};
    struct buf events;
    bool streamed = false;
    buf_open(&events, 64);
    struct oai_record_parts parts = {.events = &events, .streamed = &streamed};
    cr_assert_eq(oai_records_put(records, &nobody, "a", &record), 0);
    cr_assert_eq(put(records, &nobody, "b", "", ""), 0);
    cr_assert_eq(oai_records_find(records, &nobody, "a", parts), 0);
    cr_expect(streamed);
    cr_expect_str_eq(events.data, "data\n\n");
    cr_assert_eq(oai_records_find(records, &nobody, "b", parts), 0);
    cr_expect(!streamed && events.size == 6);
    buf_close(&events);
    oai_records_close(records);
}

Test(oai_records, gives_back_what_was_put) {
    struct oai_records *records = oai_records_open(1 << 20, 8);
    struct buf items, answer;
    buf_open(&items, 1 << 20);
    buf_open(&answer, 1 << 20);
    cr_assert_eq(put(records, &nobody, "a", "{\"x\":1}", "{}"), 0);
    cr_assert_eq(put(records, &nobody, "b", "", "two"), 0);
    buf_str(&items, "[");
    cr_assert_eq(find(records, "a", &items, &answer), 0);
    cr_expect_str_eq(items.data, "[{\"x\":1}");
    cr_expect_str_eq(answer.data, "{}");
    cr_assert_eq(find(records, "c", &items, &answer), ERR_NOTFOUND);
    cr_assert_eq(oai_records_delete(records, &nobody, "a"), 0);
    cr_assert_eq(oai_records_delete(records, &nobody, "a"), ERR_NOTFOUND);
    cr_expect(!has(records, &nobody, "a") && has(records, &nobody, "b"));
    buf_close(&items);
    buf_open(&items, 2);
    cr_assert_eq(put(records, &nobody, "long", "more than two", ""), 0);
    cr_expect_eq(find(records, "long", &items, NULL), ERR_NOMEM);
    buf_close(&items);
    buf_close(&answer);
    oai_records_close(records);
    oai_records_close(NULL);
}

Test(oai_records, belong_to_a_key_and_a_salt) {
    struct oai_records *records = oai_records_open(1 << 20, 8);
    const struct oai_owner key = {.key = {1}, .salt = ""}, salt = {.salt = "s"};
    cr_assert_eq(put(records, &nobody, "a", "", ""), 0);
    cr_expect(!has(records, &key, "a") && !has(records, &salt, "a") && has(records, &nobody, "a"));
    cr_expect_eq(oai_records_delete(records, &key, "a"), ERR_NOTFOUND);
    oai_records_close(records);
}

Test(oai_records, the_least_used_go_first) {
    struct oai_records *records = oai_records_open(1 << 20, 3);
    for (char id[] = "a"; id[0] <= 'c'; id[0]++) cr_assert_eq(put(records, &nobody, id, "", ""), 0);
    cr_assert(has(records, &nobody, "a")); /* used */
    cr_assert_eq(put(records, &nobody, "d", "", ""), 0);
    cr_expect(!has(records, &nobody, "b"));
    cr_expect(has(records, &nobody, "a") && has(records, &nobody, "c") &&
              has(records, &nobody, "d"));
    oai_records_close(records);
}

Test(oai_records, are_bounded_in_bytes) {
    static char kilobyte[1025];
    struct oai_records *records = oai_records_open(40 * 1024, 1000);
    char id[12];
    int kept = 0;
    memset(kilobyte, 'x', sizeof kilobyte - 1);
    for (int i = 0; i < 100; i++) {
        snprintf(id, sizeof id, "%d", i);
        cr_assert_eq(put(records, &nobody, id, kilobyte, kilobyte), 0);
    }
    for (int i = 0; i < 100; i++) {
        snprintf(id, sizeof id, "%d", i);
        kept += has(records, &nobody, id);
    }
    cr_expect_eq(kept, 18, "%d", kept);
    oai_records_close(records);
    records = oai_records_open(1024 * OAI_RECORD_PART, 1000);
    cr_expect_eq(put(records, &nobody, "a", kilobyte, ""), ERR_LIMIT);
    oai_records_close(records);
}

/* A key that stores much loses its own responses, not those of others. */
Test(oai_records, the_key_with_the_most_loses_its_own) {
    static char kilobyte[1025];
    struct oai_records *records[] = {oai_records_open(40 * 1024, 1000),
                                     oai_records_open(1 << 20, 10)};
    const struct oai_owner loud = {.key = {1}, .salt = ""};
    char id[12];
    memset(kilobyte, 'x', sizeof kilobyte - 1);
    for (int r = 0; r < 2; r++) {
        cr_assert_eq(put(records[r], &nobody, "mine", kilobyte, ""), 0);
        for (int i = 0; i < 100; i++) {
            snprintf(id, sizeof id, "%d", i);
            cr_assert_eq(put(records[r], &loud, id, kilobyte, kilobyte), 0);
        }
        cr_expect(has(records[r], &nobody, "mine"), "%d", r);
        cr_expect(has(records[r], &loud, "99") && !has(records[r], &loud, "0"), "%d", r);
        oai_records_close(records[r]);
    }
}

static void *use(void *arg) {
    struct oai_records *records = arg;
    struct buf items, answer;
    char json[32];
    for (int i = 0; i < 2000; i++) {
        char id[2] = {(char)('a' + i % 7), 0};
        buf_open(&items, 64);
        buf_open(&answer, 64);
        put(records, &nobody, id, id, id);
        if (find(records, id, &items, &answer) == 0)
            cr_assert(items.data[0] == id[0] && answer.data[0] == id[0]);
        snprintf(json, sizeof json, "{\"id\":\"%s\",\"n\":%d}", id, i);
        put(records, &nobody, "items", json, "");
        buf_clear(&items);
        size_t effort = 1 << 20;
        if (oai_records_find_item(records, &nobody, id, &effort, &items) == 0)
            cr_assert(memcmp(items.data, json, 9) == 0 && items.data[items.size - 1] == '}');
        if (i % 5 == 0) oai_records_delete(records, &nobody, i % 2 ? id : "items");
        buf_close(&items);
        buf_close(&answer);
    }
    return NULL;
}

Test(oai_records, any_thread) {
    struct oai_records *records = oai_records_open(1 << 20, 5);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) cr_assert_eq(pthread_create(&threads[i], NULL, use, records), 0);
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    oai_records_close(records);
}

/* A stored response's trees go before the chat that was made of them. */
Test(oai_records, are_continued_as_messages) {
    struct oai_case c;
    case_open(&c);
    c.rules.records = oai_records_open(1 << 20, 8);
    c.rules.names[0] = model;
    const struct oai_owner owner = {.salt = ""};
    cr_assert_eq(
        put(c.rules.records, &owner, "r",
            "{\"role\":\"user\",\"content\":\"weather?\"},"
            "{\"type\":\"reasoning\",\"content\":[{\"type\":\"reasoning_text\","
            "\"text\":\"hm\"}]},{\"type\":\"function_call\",\"call_id\":\"c\",\"name\":\"f\","
            "\"arguments\":\"{\\\"city\\\": \\\"Oslo\\\"}\"}",
            "{}"),
        0);
    cr_assert_eq(case_parse(&c, &oai_responses,
                            "{\"previous_response_id\":\"r\",\"input\":[{\"type\":"
                            "\"function_call_output\",\"call_id\":\"c\",\"output\":\"rain\"}]}"),
                 0, "%s", c.error.message);
    struct buf out;
    buf_open(&out, 1 << 16);
    json_write_node(&out, json_get(c.request.context, "messages"));
    cr_expect_str_eq(
        out.data,
        "[{\"role\":\"user\",\"content\":\"weather?\"},{\"role\":\"assistant\",\"content\":\"\","
        "\"reasoning_content\":\"hm\",\"tool_calls\":[{\"id\":\"c\",\"type\":\"function\","
        "\"function\":{\"name\":\"f\",\"arguments\":{\"city\":\"Oslo\"}}}],"
        "\"thinking\":\"hm\"},"
        "{\"role\":\"tool\",\"content\":\"rain\",\"tool_call_id\":\"c\"}]");
    cr_expect(c.request.earlier_count == 2 && c.request.earlier[0] == 7);
    buf_close(&out);
    oai_records_close(c.rules.records);
    case_close(&c);
}

/* A chain cannot make a tree larger than those of usual requests. */
Test(oai_records, are_bounded_in_values) {
    struct oai_case c;
    struct buf items;
    case_open(&c);
    c.rules.records = oai_records_open(16 << 20, 8);
    buf_open(&items, 1 << 20);
    buf_str(&items, "{}");
    for (int i = 0; i < 110000; i++) buf_str(&items, ",{}");
    cr_assert_eq(put(c.rules.records, &nobody, "r", items.data, "{}"), 0);
    cr_assert_eq(case_parse(&c, &oai_responses, "{\"previous_response_id\":\"r\",\"input\":\"x\"}"),
                 -1);
    cr_expect(c.error.status == 400 && strcmp(c.error.param, "previous_response_id") == 0);
    cr_expect(strstr(c.error.message, "limit of this server"), "%s", c.error.message);
    buf_close(&items);
    oai_records_close(c.rules.records);
    case_close(&c);
}
