#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "base/json.h"

static cJSON *tree_of(const char *text) {
    static const struct json_limits limits = {.bytes = 100000, .depth = 20};
    struct fault fault;
    cJSON *tree;
    int rc = json_parse(text, strlen(text), &limits, &tree, &fault);
    cr_assert_eq(rc, 0, "%s: %s", text, fault.text);
    return tree;
}

/* As Python's json reads files of models. */
Test(json_get, the_last_of_double_keys_counts) {
    cJSON *tree = cJSON_Parse("{\"a\":1,\"b\":2,\"a\":3,\"b\":null}");
    cr_assert_eq(json_get(tree, "a")->valueint, 3);
    cr_assert_null(json_get(tree, "b"));
    cJSON_Delete(tree);
}

Test(json_get, case_matters_and_null_is_absent) {
    cJSON *tree = tree_of("{\"A\":1,\"n\":null,\"a\":2}");
    cr_assert_eq(json_get(tree, "a")->valueint, 2);
    cr_assert_eq(json_get(tree, "A")->valueint, 1);
    cr_assert_null(json_get(tree, "n"));
    cr_assert_null(json_get(tree, "b"));
    cr_assert_null(json_get(json_get(tree, "a"), "b"));
    cr_assert_null(json_get(NULL, "a"));
    json_free(tree);
}

Test(json_get, absent_leaves_the_default) {
    cJSON *tree = tree_of("{\"n\":null}");
    int64_t i = 7;
    double d = 0.5;
    bool b = true;
    const char *s = "default";
    cr_assert_eq(json_int(tree, NULL, "n", 0, 1, &i, NULL), 0);
    cr_assert_eq(json_num(tree, NULL, "x", 0, 1, &d, NULL), 0);
    cr_assert_eq(json_bool(tree, NULL, "n", &b, NULL), 0);
    cr_assert_eq(json_str(tree, NULL, "x", &s, NULL), 0);
    cr_assert(i == 7 && d == 0.5 && b && strcmp(s, "default") == 0);
    json_free(tree);
}

static int as_int(const char *number, int64_t *value) {
    cJSON *tree = tree_of(number);
    int rc = json_node_int(tree, INT64_MIN, INT64_MAX, value);
    json_free(tree);
    return rc;
}

Test(json_get, integers_keep_64_bits) {
    int64_t value;
    cr_assert(as_int("9223372036854775807", &value) == 0 && value == INT64_MAX);
    cr_assert(as_int("-9223372036854775808", &value) == 0 && value == INT64_MIN);
    cr_assert(as_int("9007199254740993", &value) == 0 && value == 9007199254740993);
    cr_assert(as_int("3.0", &value) == 0 && value == 3);
    cr_assert(as_int("1e2", &value) == 0 && value == 100);
    cr_assert(as_int("-0", &value) == 0 && value == 0);
    cr_assert(as_int("-0.0", &value) == 0 && value == 0);
    cr_assert_eq(as_int("9223372036854775808", &value), ERR_INVALID);
    cr_assert_eq(as_int("99999999999999999999999999", &value), ERR_INVALID);
    cr_assert_eq(as_int("1.5", &value), ERR_INVALID);
    cr_assert_eq(as_int("1e300", &value), ERR_INVALID);
    cr_assert_eq(as_int("\"1\"", &value), ERR_INVALID);
    cr_assert_eq(as_int("true", &value), ERR_INVALID);
}

Test(json_get, made_nodes_have_no_text) {
    cJSON *node = cJSON_CreateNumber(5);
    int64_t value;
    cr_assert(json_node_int(node, 0, 9, &value) == 0 && value == 5);
    cr_assert_eq(json_node_int(node, 0, 4, &value), ERR_INVALID);
    cJSON_Delete(node);
}

Test(json_get, faults_name_the_path_and_both_sides) {
    cJSON *tree =
        tree_of("{\"i\":\"3\",\"big\":12,\"f\":1.5,\"num\":[],\"b\":1,\"s\":{},\"n\":2.5}");
    struct fault fault;
    int64_t i;
    double d;
    bool b;
    const char *s;
    cr_assert_eq(json_int(tree, "kv", "i", 0, 9, &i, &fault), ERR_INVALID);
    cr_assert_str_eq(fault.field, "kv.i");
    cr_assert_str_eq(fault.text, "expected an integer, found string");
    cr_assert_eq(json_int(tree, "", "big", 0, 9, &i, &fault), ERR_INVALID);
    cr_assert_str_eq(fault.field, "big");
    cr_assert_str_eq(fault.text, "expected an integer from 0 to 9, found 12");
    cr_assert_eq(json_int(tree, NULL, "f", 0, 9, &i, &fault), ERR_INVALID);
    cr_assert_str_eq(fault.text, "expected an integer from 0 to 9, found 1.5");
    cr_assert_eq(json_num(tree, NULL, "num", 0, 1, &d, &fault), ERR_INVALID);
    cr_assert_str_eq(fault.text, "expected a number, found array");
    cr_assert_eq(json_num(tree, NULL, "n", 0, 2, &d, &fault), ERR_INVALID);
    cr_assert_str_eq(fault.text, "expected a number from 0 to 2, found 2.5");
    cJSON *near = cJSON_Parse("{\"n\":1.0000001}");
    cr_assert_eq(json_num(near, NULL, "n", 0, 1, &d, &fault), ERR_INVALID);
    cr_assert_str_eq(fault.text, "expected a number from 0 to 1, found 1.0000001");
    cJSON_Delete(near);
    cr_assert_eq(json_bool(tree, NULL, "b", &b, &fault), ERR_INVALID);
    cr_assert_str_eq(fault.text, "expected a boolean, found number");
    cr_assert_eq(json_str(tree, NULL, "s", &s, &fault), ERR_INVALID);
    cr_assert_str_eq(fault.text, "expected a string, found object");
    json_free(tree);
}

Test(json_get, values) {
    cJSON *tree = tree_of("{\"i\":-3,\"d\":0.25,\"b\":true,\"s\":\"text\"}");
    int64_t i = 0;
    double d = 0;
    bool b = false;
    const char *s = NULL;
    cr_assert_eq(json_int(tree, NULL, "i", -3, -3, &i, NULL), 0);
    cr_assert_eq(json_num(tree, NULL, "d", 0, INFINITY, &d, NULL), 0);
    cr_assert_eq(json_bool(tree, NULL, "b", &b, NULL), 0);
    cr_assert_eq(json_str(tree, NULL, "s", &s, NULL), 0);
    cr_assert(i == -3 && d == 0.25 && b && strcmp(s, "text") == 0);
    json_free(tree);
}

Test(json_get, type_names) {
    cJSON *tree = tree_of("[null,true,1,\"\",[],{}]");
    static const char *const names[] = {"null", "boolean", "number", "string", "array", "object"};
    const cJSON *node;
    int i = 0;
    cJSON_ArrayForEach(node, tree) cr_assert_str_eq(json_type_name(node), names[i++]);
    cr_assert_str_eq(json_type_name(NULL), "nothing");
    json_free(tree);
}
