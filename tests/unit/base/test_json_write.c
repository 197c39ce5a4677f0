#include <criterion/criterion.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"

static const struct json_limits limits = {.bytes = 1 << 20, .depth = 100};

static void expect_string(const char *s, size_t n, const char *json) {
    struct buf buf;
    buf_open(&buf, 1000);
    json_write_str(&buf, s, n);
    cr_assert_str_eq(buf.data, json);
    buf_close(&buf);
}

Test(json_write, strings) {
    expect_string("", 0, "\"\"");
    expect_string("a\"b\\c/", 6, "\"a\\\"b\\\\c/\"");
    expect_string("\b\f\n\r\t\x01\x1f\x7f", 8, "\"\\b\\f\\n\\r\\t\\u0001\\u001f\x7f\"");
    expect_string("a\0b", 3, "\"a\\u0000b\"");
    expect_string("\xC3\xA9\xF0\x9D\x84\x9E", 6, "\"\xC3\xA9\xF0\x9D\x84\x9E\"");
}

/* A tree holds U+0000 as C0 80. */
Test(json_write, nuls_come_back) {
    static const char text[] = "{\"\\u0000k\":[\"\\u0000\",\"a\\u0000\\u0000b\",\"\xC3\xA9\"]}";
    static const struct json_limits nuls = {.bytes = 100, .depth = 9, .nuls = true};
    struct fault fault;
    struct arena arena;
    struct buf buf;
    cJSON *tree;
    size_t size;
    cr_assert_eq(json_parse(text, strlen(text), &nuls, &tree, &fault), 0, "%s", fault.text);
    buf_open(&buf, 1000);
    json_write_node(&buf, tree);
    cr_assert_str_eq(buf.data, text);
    const cJSON *list = tree->child;
    arena_open(&arena, 1000);
    const char *both = json_arena_text(&arena, list->child->next->valuestring, &size);
    cr_assert(size == 4 && memcmp(both, "a\0\0b", 4) == 0);
    const char *one = json_arena_text(&arena, list->child->valuestring, &size);
    cr_assert(size == 1 && one[0] == '\0');
    const char *none = json_arena_text(&arena, list->child->prev->valuestring, &size);
    cr_assert(size == 2 && none == list->child->prev->valuestring);
    json_text(tree->child->string, tree->child->string, &size);
    cr_assert(size == 2 && memcmp(tree->child->string, "\0k", 2) == 0);
    arena_close(&arena);
    buf_close(&buf);
    json_free(tree);
}

#define REPLACEMENT "\xEF\xBF\xBD"

/* One U+FFFD per maximal faulty part, as Unicode recommends and browsers do. */
Test(json_write, invalid_utf8_becomes_the_replacement_character) {
    expect_string("a\xFF"
                  "b",
                  3, "\"a" REPLACEMENT "b\"");
    expect_string("\xE2\x82", 2, "\"" REPLACEMENT "\"");
    expect_string("\xE2\x82"
                  "x",
                  3, "\"" REPLACEMENT "x\"");
    expect_string("\xF0\x80\x80\x41", 4, "\"" REPLACEMENT REPLACEMENT REPLACEMENT "A\"");
    expect_string("\xED\xA0\x80", 3, "\"" REPLACEMENT REPLACEMENT REPLACEMENT "\"");
    expect_string("\xF1\x80\x80\xE1\x80\xC2"
                  "b",
                  7, "\"" REPLACEMENT REPLACEMENT REPLACEMENT "b\"");
}

/* Random bytes are written so that they are read back as the repaired text. */
Test(json_write, random_bytes_are_always_valid_json) {
    unsigned state = 1;
    for (int round = 0; round < 3000; round++) {
        char bytes[24];
        struct buf buf, again;
        cJSON *tree;
        struct fault fault;
        for (size_t i = 0; i < sizeof bytes; i++) {
            state = state * 1664525 + 1013904223;
            bytes[i] = (char)(state >> 24);
            if (!bytes[i]) bytes[i] = 'x'; /* NUL is written escaped and then refused */
        }
        buf_open(&buf, 1000);
        buf_open(&again, 1000);
        json_write_str(&buf, bytes, sizeof bytes);
        cr_assert_eq(json_parse(buf.data, buf.size, &limits, &tree, &fault), 0, "%s", fault.text);
        json_write_node(&again, tree);
        cr_assert_str_eq(buf.data, again.data);
        json_free(tree);
        buf_close(&buf);
        buf_close(&again);
    }
}

static void expect_number(double value, const char *json) {
    struct buf buf;
    buf_open(&buf, 100);
    json_write_num(&buf, value);
    cr_assert_str_eq(buf.data, json);
    buf_close(&buf);
}

Test(json_write, numbers_are_short_and_exact) {
    expect_number(0, "0");
    expect_number(-0.0, "-0");
    expect_number(0.1, "0.1");
    expect_number(-1.5, "-1.5");
    expect_number(1e20, "1e+20");
    expect_number(123456789, "123456789");
    expect_number(0.1 + 0.2, "0.30000000000000004");
    expect_number(NAN, "null");
    expect_number(-INFINITY, "null");
    const double hard[] = {DBL_MAX, DBL_MIN, DBL_TRUE_MIN, DBL_EPSILON, 0x1p53 + 2, M_PI, 1 / 3.0};
    for (size_t i = 0; i < sizeof hard / sizeof *hard; i++) {
        struct buf buf;
        buf_open(&buf, 100);
        json_write_num(&buf, hard[i]);
        cr_assert_eq(strtod(buf.data, NULL), hard[i]);
        buf_close(&buf);
    }
}

Test(json_write, nodes_come_back_as_they_were) {
    const char *text = "{\"a\":[1,2.50,-0,1E5,12345678901234567890],\"b\":{\"\":\"\\n\"},"
                       "\"c\":[true,false,null,[],{}],\"\xC3\xA9\":\"x\"}";
    cJSON *tree;
    struct buf buf;
    cr_assert_eq(json_parse(text, strlen(text), &limits, &tree, NULL), 0);
    buf_open(&buf, 1000);
    json_write_node(&buf, tree);
    cr_assert_str_eq(buf.data, text);
    buf_close(&buf);
    json_free(tree);
}

Test(json_write, made_nodes) {
    cJSON *tree = cJSON_CreateObject();
    struct buf buf;
    cJSON_AddNumberToObject(tree, "n", 0.1);
    cJSON_AddStringToObject(tree, "s", "\xFF");
    buf_open(&buf, 1000);
    json_write_node(&buf, tree);
    cr_assert_str_eq(buf.data, "{\"n\":0.1,\"s\":\"" REPLACEMENT "\"}");
    buf_close(&buf);
    cJSON_Delete(tree);
}

Test(json_write, a_full_buffer_sticks) {
    struct buf buf;
    buf_open(&buf, 4);
    json_write_str(&buf, "abcdef", 6);
    cr_assert(buf.failed);
    cr_assert_leq(buf.size, 4);
    buf_close(&buf);
}
