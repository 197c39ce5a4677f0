/* Any bytes as a GGUF file: what is given out lies inside the file, whole, and can be read. */
#include <string.h>

#include "base/check.h"
#include "base/gguf.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static volatile uint64_t seen;

static void check_inside(const char *begin, size_t bytes, const uint8_t *data, size_t size) {
    const uint8_t *at = (const uint8_t *)begin;
    CHECK(at >= data && at <= data + size && bytes <= (size_t)(data + size - at));
    if (bytes) seen += (uint64_t)(at[0] ^ at[bytes - 1]);
}

static void read_value(const struct gguf *gguf, const struct gguf_value *value) {
    int64_t number = 0;
    double real = 0;
    bool flag = false;
    struct gguf_string text = {0};
    const struct gguf_value *list;
    const char *at = NULL;
    size_t count = 0;
    (void)gguf_int(gguf, value->key, INT64_MIN, INT64_MAX, &number, NULL);
    (void)gguf_num(gguf, value->key, -1, 1, &real, NULL);
    (void)gguf_bool(gguf, value->key, &flag, NULL);
    (void)gguf_str(gguf, value->key, &text, NULL);
    (void)gguf_array(gguf, value->key, value->type, &list, NULL);
    if (value->type == GGUF_STRING) {
        while (gguf_next(value, &at, &text)) count++;
        CHECK(count == value->count);
        return;
    }
    for (size_t i = 0; i < value->count; i++) {
        if (value->type == GGUF_F32 || value->type == GGUF_F64)
            seen += gguf_element_num(value, i) > 0;
        else if (value->type != GGUF_BOOL)
            seen += (uint64_t)gguf_element_int(value, i);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct gguf gguf;
    struct fault fault = {0};
    size_t total = 0;
    int rc = gguf_parse(data, size, &gguf, &fault);
    CHECK((rc == 0) == (fault.code == 0));
    for (size_t i = 0; i < gguf.value_count; i++) {
        const struct gguf_value *value = &gguf.values[i];
        CHECK(i == 0 || strcmp(gguf.values[i - 1].key, value->key) < 0);
        CHECK(gguf_find(&gguf, value->key) == value);
        check_inside(value->data, value->bytes, data, size);
        read_value(&gguf, value);
    }
    for (size_t i = 0; i < gguf.tensor_count; i++) {
        const struct gguf_tensor *tensor = &gguf.tensors[i];
        CHECK(i == 0 || strcmp(gguf.tensors[i - 1].name, tensor->name) < 0);
        CHECK(gguf_format_name(tensor->format));
        check_inside(tensor->data, tensor->bytes, data, size);
        total += tensor->bytes;
    }
    CHECK(total <= size);
    gguf_close(&gguf);
    return 0;
}
