#include <criterion/criterion.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"

#define SUITE KEEPD_SOURCE_DIR "/tests/data/json/test_parsing"

static const struct json_limits wide = {.bytes = 1 << 26, .depth = JSON_MAX_DEPTH};

static int parse(const char *text, cJSON **tree, struct fault *fault) {
    return json_parse(text, strlen(text), &wide, tree, fault);
}

/* In memory of exactly its size, so that AddressSanitizer sees a read past the end. */
static char *read_case(const char *name, size_t *size) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", SUITE, name);
    FILE *file = fopen(path, "rb");
    cr_assert_not_null(file, "%s", path);
    fseek(file, 0, SEEK_END);
    *size = (size_t)ftell(file);
    rewind(file);
    char *data = malloc(*size ? *size : 1);
    cr_assert_eq(fread(data, 1, *size, file), *size);
    fclose(file);
    return data;
}

/* Valid JSON that we refuse on purpose: text with NUL cannot go through C strings unharmed. */
static bool refused_on_purpose(const char *name) {
    return strcmp(name, "y_object_escaped_null_in_key.json") == 0 ||
           strcmp(name, "y_string_null_escape.json") == 0;
}

Test(json, test_suite) {
    DIR *dir = opendir(SUITE);
    cr_assert_not_null(dir);
    int count[256] = {0}, exceptions = 0;
    for (struct dirent *entry; (entry = readdir(dir));) {
        const char *name = entry->d_name;
        if (name[0] == '.') continue;
        size_t size;
        struct fault fault = {0};
        cJSON *tree;
        char *data = read_case(name, &size);
        int rc = json_parse(data, size, &wide, &tree, &fault);
        count[(unsigned char)name[0]]++;
        cr_assert_eq(rc == 0, tree != NULL, "%s", name);
        if (rc) cr_assert(fault.code == rc && fault.text[0], "%s", name);
        if (refused_on_purpose(name)) {
            cr_assert_eq(rc, ERR_MALFORMED, "%s", name);
            exceptions++;
        } else if (name[0] == 'y') {
            cr_assert_eq(rc, 0, "%s: %s", name, fault.text);
        } else if (name[0] == 'n') {
            cr_assert_neq(rc, 0, "%s", name);
        }
        json_free(tree);
        free(data);
    }
    closedir(dir);
    cr_assert_eq(count['y'], 95);
    cr_assert_eq(count['n'], 188);
    cr_assert_eq(count['i'], 35);
    cr_assert_eq(exceptions, 2);
}

Test(json, the_tree_is_as_cjson_builds_it) {
    struct fault fault;
    cJSON *tree;
    cr_assert_eq(parse(" {\"a\" : [1, -2.5e1, \"x\\n\\u00e9\\ud834\\udd1e\", true, false, null],"
                       " \"\" : {}, \"c\":[] } ",
                       &tree, &fault),
                 0);
    cJSON *reference = cJSON_Parse(
        "{\"a\":[1,-2.5e1,\"x\\n\\u00e9\\ud834\\udd1e\",true,false,null],\"\":{},\"c\":[]}");
    cr_assert(cJSON_Compare(tree, reference, true));
    const cJSON *list = json_get(tree, "a");
    cr_assert_eq(cJSON_GetArraySize(list), 6);
    cr_assert_eq(list->child->prev, cJSON_GetArrayItem(list, 5));
    cr_assert_eq(list->child->valueint, 1);
    cr_assert_str_eq(list->child->next->valuestring, "-2.5e1");
    cr_assert_float_eq(list->child->next->valuedouble, -25, 0);
    cJSON_Delete(reference);
    json_free(tree);
}

static void refuse(const char *text, int rc, const char *why) {
    struct fault fault = {0};
    cJSON *tree;
    cr_assert_eq(parse(text, &tree, &fault), rc, "%s", text);
    cr_assert_null(tree);
    cr_assert_str_eq(fault.text, why, "%s: %s", text, fault.text);
}

Test(json, refusals_say_where) {
    refuse("", ERR_MALFORMED, "expected a value at byte 0");
    refuse("  ", ERR_MALFORMED, "expected a value at byte 2, where the text ends");
    refuse("[1,]", ERR_MALFORMED, "expected a value at byte 3");
    refuse("[1 2]", ERR_MALFORMED, "expected ',' or ']' at byte 3");
    refuse("{\"a\"1}", ERR_MALFORMED, "expected ':' at byte 4");
    refuse("{1:2}", ERR_MALFORMED, "expected a string at byte 1");
    refuse("{\"a\":1", ERR_MALFORMED, "expected ',' or '}' at byte 6, where the text ends");
    refuse("1 2", ERR_MALFORMED, "text after the JSON value at byte 2");
    refuse("tru", ERR_MALFORMED, "expected a value at byte 0");
    refuse("-01", ERR_MALFORMED, "text after the JSON value at byte 2");
    refuse("1.", ERR_MALFORMED, "expected a digit at byte 2, where the text ends");
    refuse("1e999", ERR_MALFORMED, "number too large at byte 5, where the text ends");
    refuse("\"a", ERR_MALFORMED, "unfinished string at byte 2, where the text ends");
    refuse("\"\\", ERR_MALFORMED, "unknown escape at byte 2, where the text ends");
    refuse("\"\\x\"", ERR_MALFORMED, "unknown escape at byte 2");
    refuse("\"\\u12g4\"", ERR_MALFORMED, "\\u needs four hexadecimal digits at byte 5");
    refuse("\"\\u0000\"", ERR_MALFORMED, "\\u0000 is not accepted at byte 7");
    refuse("\"\\ud800\"", ERR_MALFORMED, "lone surrogate at byte 7");
    refuse("\"\\udc00\"", ERR_MALFORMED, "lone surrogate at byte 7");
    refuse("\"\\ud800\\u0041\"", ERR_MALFORMED, "lone surrogate at byte 13");
    refuse("\"a\tb\"", ERR_MALFORMED, "raw control character in a string at byte 2");
    refuse("\"\xC3(\"", ERR_MALFORMED, "invalid UTF-8 at byte 1");
    refuse("\xEF\xBB\xBF{}", ERR_MALFORMED, "expected a value at byte 0");
}

Test(json, a_byte_order_mark_where_it_is_expected) {
    const struct json_limits files = {.bytes = 64, .depth = 4, .file = true};
    cJSON *tree;
    cr_assert_eq(json_parse("\xEF\xBB\xBF{}", 5, &files, &tree, NULL), 0);
    json_free(tree);
    cr_assert_eq(json_parse("\xEF\xBB\xBF", 3, &files, &tree, NULL), ERR_MALFORMED);
    cr_assert_eq(json_parse("\xEF\xBB", 2, &files, &tree, NULL), ERR_MALFORMED);
    cr_assert_eq(json_parse("\xEF\xBB\xBF\xEF\xBB\xBF{}", 8, &files, &tree, NULL), ERR_MALFORMED);
}

Test(json, nul_bytes_are_no_end) {
    cJSON *tree;
    cr_assert_eq(json_parse("1\0", 2, &wide, &tree, NULL), ERR_MALFORMED);
    cr_assert_eq(json_parse("\"\0\"", 3, &wide, &tree, NULL), ERR_MALFORMED);
    cr_assert_eq(json_parse("\"\\\0\"", 4, &wide, &tree, NULL), ERR_MALFORMED);
    cr_assert_eq(json_parse("[1]garbage", 3, &wide, &tree, NULL), 0);
    json_free(tree);
}

Test(json, limits) {
    struct fault fault;
    cJSON *tree;
    struct json_limits limits = {.bytes = 10, .depth = 3, .nodes = 5};
    cr_assert_eq(json_parse("[[[0]]]   ", 10, &limits, &tree, &fault), 0);
    json_free(tree);
    cr_assert_eq(json_parse("[[[0]]]    ", 11, &limits, &tree, &fault), ERR_LIMIT);
    cr_assert_eq(json_parse("[[[[]]]]", 8, &limits, &tree, &fault), ERR_LIMIT);
    cr_assert_str_eq(fault.text, "JSON nested deeper than 3 at byte 3");
    cr_assert_eq(json_parse("[1,2,3,4]", 9, &limits, &tree, &fault), 0);
    json_free(tree);
    cr_assert_eq(json_parse("[1,2,3,4,5]", 10, &limits, &tree, &fault), ERR_LIMIT);
    limits.depth = 0;
    cr_assert_eq(json_parse("0", 1, &limits, &tree, &fault), 0);
    json_free(tree);
    cr_assert_eq(json_parse("[]", 2, &limits, &tree, &fault), ERR_LIMIT);
}

Test(json, depth_has_a_ceiling_whatever_is_asked) {
    char text[2 * JSON_MAX_DEPTH + 3];
    cJSON *tree;
    struct json_limits limits = {.bytes = sizeof text, .depth = 1 << 30};
    memset(text, '[', JSON_MAX_DEPTH + 1);
    memset(text + JSON_MAX_DEPTH + 1, ']', JSON_MAX_DEPTH + 1);
    cr_assert_eq(json_parse(text, 2 * JSON_MAX_DEPTH + 2, &limits, &tree, NULL), ERR_LIMIT);
    cr_assert_eq(json_parse(text + 1, 2 * JSON_MAX_DEPTH, &limits, &tree, NULL), 0);
    json_free(tree);
}

Test(json, duplicate_keys) {
    struct fault fault;
    cJSON *tree;
    struct json_limits unique = {.bytes = 1000, .depth = 9, .unique_keys = true};
    const char *twice = "[{\"b\":1,\"key\":2,\"a\":3,\"k\\u0065y\":4}]";
    cr_assert_eq(parse(twice, &tree, &fault), 0);
    json_free(tree);
    cr_assert_eq(json_parse(twice, strlen(twice), &unique, &tree, &fault), ERR_MALFORMED);
    cr_assert_str_eq(fault.field, "key");
    const char *apart = "{\"a\":{\"b\":1},\"b\":{\"a\":1},\"A\":[{\"a\":1},{\"a\":1}]}";
    cr_assert_eq(json_parse(apart, strlen(apart), &unique, &tree, &fault), 0);
    json_free(tree);
}

/* 300,000 members: comparing all pairs would take minutes, so the test's own time limit decides. */
Test(json, many_keys_stay_cheap, .timeout = 60) {
    struct buf buf;
    cJSON *tree;
    struct json_limits unique = {.bytes = 1 << 24, .depth = 9, .unique_keys = true};
    buf_open(&buf, 1 << 24);
    for (int i = 0; i < 300000; i++) buf_fmt(&buf, "%c\"%d\":0", i ? ',' : '{', i);
    buf_char(&buf, '}');
    cr_assert_eq(json_parse(buf.data, buf.size, &unique, &tree, NULL), 0);
    json_free(tree);
    buf_close(&buf);
}

Test(json, every_allocation_may_fail) {
    const char *text = "{\"a\":[1,\"x\",{\"b\":null,\"c\":true}],\"d\":\"y\"}";
    struct json_limits unique = {.bytes = 1000, .depth = 9, .unique_keys = true};
    for (long n = 0;; n++) {
        struct fault fault = {0};
        cJSON *tree;
        mem_fail_after(n);
        int rc = json_parse(text, strlen(text), &unique, &tree, &fault);
        if (mem_fail_pending()) {
            mem_fail_after(-1);
            cr_assert_eq(rc, 0);
            cr_assert_geq(n, 10);
            json_free(tree);
            break;
        }
        cr_assert_eq(rc, ERR_NOMEM);
        cr_assert_eq(fault.code, ERR_NOMEM);
        cr_assert_null(tree);
    }
}
