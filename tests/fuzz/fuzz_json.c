/* Parsed JSON must survive writing and parsing again. The first byte selects the limits. */
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/json.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0) return 0;
    struct json_limits limits = {.bytes = 1 << 16, .depth = 64, .unique_keys = data[0] & 1};
    if (data[0] & 2) limits.nodes = 20;
    struct fault fault = {0};
    cJSON *tree, *again;
    int rc = json_parse((const char *)data + 1, size - 1, &limits, &tree, &fault);
    CHECK(rc == fault.code && (rc == 0) == (tree != NULL));
    if (rc) return 0;
    CHECK(utf8_valid((const char *)data + 1, size - 1));
    struct buf first, second;
    buf_open(&first, 1 << 20);
    buf_open(&second, 1 << 20);
    json_write_node(&first, tree);
    limits.bytes = 1 << 20;
    CHECK(!first.failed && json_parse(first.data, first.size, &limits, &again, NULL) == 0);
    json_write_node(&second, again);
    CHECK(first.size == second.size && memcmp(first.data, second.data, first.size) == 0);
    int64_t value;
    json_node_int(tree, INT64_MIN, INT64_MAX, &value);
    buf_close(&first);
    buf_close(&second);
    json_free(tree);
    json_free(again);
    return 0;
}
