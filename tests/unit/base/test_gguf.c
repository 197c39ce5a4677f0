/* GGUF files: what is read, and that hostile ones are refused by name. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/mem.h"
#include "tests/unit/gguf_file.h"

static struct buf file;
static struct gguf gguf;
static struct fault fault;

static void begin(void) {
    buf_open(&file, (size_t)1 << 20);
    fault = (struct fault){0};
}

static void end(void) {
    gguf_close(&gguf);
    buf_close(&file);
    mem_fail_after(-1);
}

TestSuite(gguf, .init = begin, .fini = end);

/* From memory of exactly that size, so that a sanitizer sees what is read beyond it. */
static int parse_bytes(size_t size) {
    char *exact = malloc(size ? size : 1);
    memcpy(exact, file.data, size);
    fault = (struct fault){0};
    int rc = gguf_parse(exact, size, &gguf, &fault);
    cr_expect_eq(rc, fault.code);
    free(exact);
    return rc;
}

static int parse(void) {
    return gguf_parse(file.data, file.size, &gguf, &fault);
}

static void refused(int expected, const char *field, const char *text) {
    int rc = parse();
    cr_expect_eq(rc, expected, "%s: %s", fault.field, fault.text);
    cr_expect_str_eq(fault.field, field, "%s", fault.text);
    cr_expect_not_null(strstr(fault.text, text), "%s", fault.text);
    cr_expect_eq(gguf.value_count + gguf.tensor_count, 0);
}

/* A value of every type, an array of strings, two tensors with a padding between them. */
static void put_sample(uint32_t version) {
    static const int64_t block[] = {32, 2}, vector[] = {3};
    put_head(&file, version, 2, 14);
    put_int(&file, "u8", GGUF_U8, 1, 200);
    put_int(&file, "i8", GGUF_I8, 1, -3);
    put_int(&file, "u16", GGUF_U16, 2, 60000);
    put_int(&file, "i16", GGUF_I16, 2, -300);
    put_int(&file, "u32", GGUF_U32, 4, 4000000000);
    put_int(&file, "i32", GGUF_I32, 4, -70000);
    put_int(&file, "u64", GGUF_U64, 8, -1);
    put_int(&file, "i64", GGUF_I64, 8, INT64_MIN);
    put_f32(&file, "f32", 0.5f);
    put_int(&file, "f64", GGUF_F64, 8, 0x3fd0000000000000);
    put_int(&file, "bool", GGUF_BOOL, 1, 1);
    put_text(&file, "text", "caf\xc3\xa9");
    put_array(&file, "list", GGUF_STRING, 3);
    put_string(&file, "a");
    put_string(&file, "");
    put_string(&file, "bcd");
    put_array(&file, "ids", GGUF_I32, 2);
    put(&file, 7, 4);
    put(&file, (uint64_t)-8, 4);
    put_tensor(&file, "quantised", 2, block, GGUF_FORMAT_Q4_0, 0);
    put_tensor(&file, "floats", 1, vector, GGUF_FORMAT_F32, 64);
    put_padding(&file, 32);
    for (int i = 0; i < 36; i++) put(&file, (uint64_t)i, 1);
    put_padding(&file, 32);
    for (int i = 0; i < 12; i++) put(&file, 0x80 + (uint64_t)i, 1);
}

static int64_t int_of(const char *key) {
    int64_t value = 42;
    cr_expect_eq(gguf_int(&gguf, key, INT64_MIN, INT64_MAX, &value, &fault), 0, "%s", fault.text);
    return value;
}

static double num_of(const char *key) {
    double value = 42;
    cr_expect_eq(gguf_num(&gguf, key, -1, 1, &value, &fault), 0, "%s", fault.text);
    return value;
}

Test(gguf, values_of_every_type) {
    put_sample(3);
    cr_assert_eq(parse(), 0, "%s: %s", fault.field, fault.text);
    cr_expect_eq(gguf.version, 3);
    cr_expect_eq(int_of("u8"), 200);
    cr_expect_eq(int_of("i8"), -3);
    cr_expect_eq(int_of("u16"), 60000);
    cr_expect_eq(int_of("i16"), -300);
    cr_expect_eq(int_of("u32"), 4000000000);
    cr_expect_eq(int_of("i32"), -70000);
    cr_expect_eq(int_of("u64"), INT64_MAX);
    cr_expect_eq(int_of("i64"), INT64_MIN);
    cr_expect_eq(int_of("absent"), 42);
    cr_expect_eq(num_of("f32"), 0.5);
    cr_expect_eq(num_of("f64"), 0.25);
    cr_expect_eq(num_of("absent"), 42);
    bool flag = false;
    struct gguf_string text = {0};
    cr_expect_eq(gguf_bool(&gguf, "bool", &flag, &fault), 0);
    cr_expect(flag);
    cr_expect_eq(gguf_str(&gguf, "text", &text, &fault), 0);
    cr_expect_eq(text.size, 5);
    cr_expect_arr_eq(text.data, "caf\xc3\xa9", 5);
}

Test(gguf, arrays) {
    const struct gguf_value *list, *ids;
    const char *at = NULL;
    struct gguf_string s;
    put_sample(2);
    cr_assert_eq(parse(), 0, "%s: %s", fault.field, fault.text);
    cr_assert_eq(gguf_array(&gguf, "list", GGUF_STRING, &list, &fault), 0);
    cr_assert_not_null(list);
    cr_expect_eq(list->count, 3);
    static const char *const expected[] = {"a", "", "bcd"};
    for (int i = 0; i < 3; i++) {
        cr_assert(gguf_next(list, &at, &s));
        cr_expect_eq(s.size, strlen(expected[i]));
        cr_expect_arr_eq(s.data, expected[i], s.size);
    }
    cr_expect_not(gguf_next(list, &at, &s));
    cr_assert_eq(gguf_array(&gguf, "ids", GGUF_I32, &ids, &fault), 0);
    cr_expect_eq(gguf_element_int(ids, 1), -8);
    cr_expect_eq(gguf_array(&gguf, "absent", GGUF_I32, &ids, &fault), 0);
    cr_expect_null(ids);
}

Test(gguf, tensors) {
    put_sample(3);
    cr_assert_eq(parse(), 0, "%s: %s", fault.field, fault.text);
    cr_assert_eq(gguf.tensor_count, 2);
    const struct gguf_tensor *floats = &gguf.tensors[0], *blocks = &gguf.tensors[1];
    cr_expect_str_eq(floats->name, "floats");
    cr_expect_eq(floats->bytes, 12);
    cr_expect_eq((unsigned char)floats->data[0], 0x80);
    cr_expect_str_eq(blocks->name, "quantised");
    cr_expect_eq(blocks->bytes, 36);
    cr_expect_eq(blocks->shape[0], 32);
    cr_expect_eq(blocks->shape[1], 2);
    cr_expect_eq(blocks->data[35], 35);
}

Test(gguf, a_wrong_type_names_the_key) {
    int64_t number = 1;
    double real;
    bool flag;
    struct gguf_string text;
    const struct gguf_value *list;
    put_sample(3);
    cr_assert_eq(parse(), 0);
    cr_expect_eq(gguf_int(&gguf, "text", 0, 9, &number, &fault), ERR_INVALID);
    cr_expect_str_eq(fault.field, "text");
    cr_expect_str_eq(fault.text, "expected an integer, found string");
    cr_expect_eq(gguf_int(&gguf, "ids", 0, 9, &number, &fault), ERR_INVALID);
    cr_expect_str_eq(fault.text, "expected an integer, found an array of i32");
    cr_expect_eq(gguf_int(&gguf, "u8", 0, 199, &number, &fault), ERR_INVALID);
    cr_expect_str_eq(fault.text, "expected 0 to 199, found 200");
    cr_expect_eq(number, 1);
    cr_expect_eq(gguf_num(&gguf, "f32", 0, 0.25, &real, &fault), ERR_INVALID);
    cr_expect_eq(gguf_num(&gguf, "u8", 0, 1, &real, &fault), ERR_INVALID);
    cr_expect_eq(gguf_bool(&gguf, "u8", &flag, &fault), ERR_INVALID);
    cr_expect_eq(gguf_str(&gguf, "u8", &text, &fault), ERR_INVALID);
    cr_expect_eq(gguf_array(&gguf, "ids", GGUF_U32, &list, &fault), ERR_INVALID);
    cr_expect_str_eq(fault.text, "expected an array of u32, found an array of i32");
}

Test(gguf, tokens_that_are_none) {
    static const struct {
        enum gguf_type type;
        size_t bytes;
        int64_t value;
    } none[] = {{GGUF_I8, 1, -1},          {GGUF_I32, 4, -1},         {GGUF_I64, 8, -1},
                {GGUF_U32, 4, UINT32_MAX}, {GGUF_U64, 8, UINT32_MAX}, {GGUF_U64, 8, -1}};
    const size_t count = sizeof none / sizeof none[0];
    put_head(&file, 3, 0, count + 3);
    for (size_t i = 0; i < count; i++) {
        char key[] = {'a' + (char)i, '\0'};
        put_int(&file, key, none[i].type, none[i].bytes, none[i].value);
    }
    put_u32(&file, "some", 65535);
    put_int(&file, "negative", GGUF_I32, 4, -2);
    put_u32(&file, "large", (uint32_t)INT32_MAX + 1);
    cr_assert_eq(parse(), 0, "%s", fault.text);
    for (size_t i = 0; i < count; i++) {
        char key[] = {'a' + (char)i, '\0'};
        int64_t id = 7;
        cr_expect_eq(gguf_token(&gguf, key, &id, &fault), 0, "%s: %s", key, fault.text);
        cr_expect_eq(id, 7, "%s", key);
    }
    int64_t id = 7;
    cr_expect(gguf_token(&gguf, "some", &id, &fault) == 0 && id == 65535);
    cr_expect(gguf_token(&gguf, "absent", &id, &fault) == 0 && id == 65535);
    cr_expect_eq(gguf_token(&gguf, "negative", &id, &fault), ERR_INVALID);
    cr_expect_eq(gguf_token(&gguf, "large", &id, &fault), ERR_INVALID);
}

/* A file cut anywhere is rejected. A file without tensors must be complete. */
Test(gguf, cut_anywhere) {
    put_sample(3);
    for (size_t size = 0; size < file.size; size++)
        cr_expect_eq(parse_bytes(size), ERR_MALFORMED, "%zu: %s", size, fault.text);
    cr_expect_eq(parse_bytes(file.size), 0);
}

Test(gguf, out_of_memory_at_any_call) {
    put_sample(3);
    for (long n = 0;; n++) {
        mem_fail_after(n);
        int rc = parse();
        bool failed = !mem_fail_pending();
        mem_fail_after(-1);
        cr_expect_eq(rc, failed ? ERR_NOMEM : 0);
        gguf_close(&gguf);
        if (!failed) break;
    }
}

Test(gguf, an_empty_file_and_other_files) {
    refused(ERR_MALFORMED, "GGUF", "is empty");
    buf_str(&file, "lmgg\1");
    refused(ERR_UNSUPPORTED, "GGUF", "older format");
    buf_clear(&file);
    buf_str(&file, "\3\1\2\3");
    refused(ERR_MALFORMED, "GGUF", "does not begin with it");
}
Test(gguf, version_1) {
    put_head(&file, 1, 0, 0);
    refused(ERR_UNSUPPORTED, "GGUF", "version 1 is not supported");
}
Test(gguf, big_endian) {
    put_head(&file, 3u << 24, 0, 0);
    refused(ERR_UNSUPPORTED, "GGUF", "big-endian");
}

/* ---- Metadata ---- */

Test(gguf, hostile_counts) {
    static const uint64_t counts[] = {1, 60000, 1ull << 32, 1ull << 62, UINT64_MAX};
    for (size_t i = 0; i < 5; i++) {
        buf_clear(&file);
        put_head(&file, 3, 0, counts[i]);
        cr_expect_neq(parse(), 0);
        buf_clear(&file);
        put_head(&file, 3, counts[i], 0);
        cr_expect_neq(parse(), 0);
        for (int type = GGUF_U8; type <= GGUF_F64; type++) {
            buf_clear(&file);
            put_head(&file, 3, 0, 1);
            put_array(&file, "k", (enum gguf_type)type, counts[i]);
            cr_expect_neq(parse(), 0);
        }
        buf_clear(&file);
        put_head(&file, 3, 0, 1);
        put(&file, counts[i], 8);
        cr_expect_neq(parse(), 0);
        buf_clear(&file);
        put_head(&file, 3, 0, 1);
        put_key(&file, "k", GGUF_STRING);
        put(&file, counts[i], 8);
        cr_expect_neq(parse(), 0);
    }
}
/* Nothing after an array that is cut is read, not even by a count that fits the file in bytes. */
Test(gguf, an_array_longer_than_the_file) {
    put_head(&file, 3, 0, 1);
    put_array(&file, "k", GGUF_U64, 3);
    for (int i = 0; i < 2; i++) put(&file, 1, 8);
    refused(ERR_MALFORMED, "k", "the file is incomplete: it ends here");
}
Test(gguf, a_key_twice) {
    put_head(&file, 3, 0, 2);
    put_u32(&file, "k", 1);
    put_u32(&file, "k", 2);
    refused(ERR_MALFORMED, "k", "twice");
}
Test(gguf, an_unknown_type) {
    put_head(&file, 3, 0, 1);
    put_key(&file, "k", 13);
    put(&file, 0, 8);
    refused(ERR_MALFORMED, "k", "type 13");
}
Test(gguf, an_array_of_arrays) {
    put_head(&file, 3, 0, 1);
    put_array(&file, "k", GGUF_ARRAY, 1);
    put(&file, 0, 8);
    refused(ERR_UNSUPPORTED, "k", "array of arrays");
}
Test(gguf, a_bool_of_two) {
    put_head(&file, 3, 0, 1);
    put_int(&file, "k", GGUF_BOOL, 1, 2);
    refused(ERR_MALFORMED, "k", "neither 0 nor 1");
}
Test(gguf, a_key_with_a_zero_inside) {
    put_head(&file, 3, 0, 1);
    put(&file, 3, 8);
    buf_add(&file, "a\0b", 3);
    put(&file, GGUF_U32, 4);
    put(&file, 0, 4);
    refused(ERR_MALFORMED, "key", "no zero");
}
Test(gguf, a_key_too_long) {
    char key[300];
    memset(key, 'k', sizeof key - 1);
    key[sizeof key - 1] = '\0';
    put_head(&file, 3, 0, 1);
    put_u32(&file, key, 1);
    refused(ERR_MALFORMED, "key", "1 to 255 bytes");
}

/* ---- Tensors ---- */

static void put_one(int dims, const int64_t *shape, uint32_t format, uint64_t offset) {
    put_head(&file, 3, 1, 0);
    put_tensor(&file, "t", dims, shape, format, offset);
    put_padding(&file, 32);
    for (int i = 0; i < 64; i++) put(&file, 0, 1);
}

Test(gguf, data_outside_the_file) {
    put_one(1, (int64_t[]){17}, GGUF_FORMAT_F32, 0);
    refused(ERR_MALFORMED, "t", "the file is incomplete: 128 of 132 bytes");
}
Test(gguf, dimensions_that_overflow) {
    put_one(3, (int64_t[]){1ll << 31, 1ll << 31, 4}, GGUF_FORMAT_F32, 0);
    refused(ERR_MALFORMED, "t", "overflows");
}
Test(gguf, bytes_that_overflow) {
    put_one(2, (int64_t[]){1ll << 31, 1ll << 31}, GGUF_FORMAT_F32, 0);
    refused(ERR_MALFORMED, "t", "overflows");
}
Test(gguf, a_negative_size) {
    put_one(1, (int64_t[]){-1}, GGUF_FORMAT_F32, 0);
    refused(ERR_MALFORMED, "t", "overflows");
}
Test(gguf, five_dimensions) {
    put_one(5, (int64_t[]){1, 1, 1, 1, 1}, GGUF_FORMAT_F32, 0);
    refused(ERR_MALFORMED, "t", "more than 4 dimensions");
}
Test(gguf, rows_of_half_a_block) {
    put_one(2, (int64_t[]){16, 2}, GGUF_FORMAT_Q8_0, 0);
    refused(ERR_MALFORMED, "t", "no whole blocks of Q8_0");
}
Test(gguf, an_unknown_format) {
    put_one(1, (int64_t[]){1}, 4, 0);
    refused(ERR_UNSUPPORTED, "t", "type 4 is not known");
}
Test(gguf, an_offset_in_a_hole) {
    put_one(1, (int64_t[]){1}, GGUF_FORMAT_F32, 32);
    refused(ERR_MALFORMED, "t", "hole");
}
Test(gguf, an_offset_that_is_not_aligned) {
    put_one(1, (int64_t[]){1}, GGUF_FORMAT_F32, 4);
    refused(ERR_MALFORMED, "t", "not aligned");
}

static void put_two(const char *second, uint64_t offset) {
    static const int64_t shape[] = {1};
    put_head(&file, 3, 2, 0);
    put_tensor(&file, "a", 1, shape, GGUF_FORMAT_F32, 0);
    put_tensor(&file, second, 1, shape, GGUF_FORMAT_F32, offset);
    put_padding(&file, 32);
    for (int i = 0; i < 64; i++) put(&file, 0, 1);
}

Test(gguf, tensors_that_overlap) {
    put_two("b", 0);
    refused(ERR_MALFORMED, "b", "overlaps");
}
Test(gguf, a_tensor_twice) {
    put_two("a", 32);
    refused(ERR_MALFORMED, "a", "twice");
}

static void put_alignment(uint32_t alignment) {
    static const int64_t shape[] = {1};
    put_head(&file, 3, 2, 1);
    put_u32(&file, "general.alignment", alignment);
    put_tensor(&file, "a", 1, shape, GGUF_FORMAT_F32, 0);
    put_tensor(&file, "b", 1, shape, GGUF_FORMAT_F32, alignment);
    for (int i = 0; i < 400; i++) put(&file, 0, 1);
}

Test(gguf, an_alignment_of_its_own) {
    put_alignment(128);
    cr_assert_eq(parse(), 0, "%s: %s", fault.field, fault.text);
    cr_expect_eq(gguf.tensors[0].data - file.data, 128);
    cr_expect_eq(gguf.tensors[1].data - file.data, 256);
}
Test(gguf, an_alignment_that_is_no_power_of_two) {
    put_alignment(48);
    refused(ERR_INVALID, "general.alignment", "power of two");
}
Test(gguf, an_alignment_of_zero) {
    put_alignment(0);
    refused(ERR_INVALID, "general.alignment", "expected 1 to");
}

/* ---- Files of others ---- */

/* Vocabularies that llama.cpp wrote: no tensors, everything else. */
Test(gguf, files_of_llama_cpp) {
    static const char *const names[] = {"gpt-2", "llama-spm", "deepseek-coder"};
    const char *root = getenv("KEEPD_TEST_DATA");
    for (size_t i = 0; root && *root && i < 3; i++) {
        char path[1024];
        const void *data;
        size_t size;
        const struct gguf_value *tokens;
        snprintf(path, sizeof path, "%s/tokenizers/ggml-vocab-%s.gguf", root, names[i]);
        cr_assert_eq(file_map(path, &data, &size, &fault), 0, "%s", fault.text);
        cr_assert_eq(gguf_parse(data, size, &gguf, &fault), 0, "%s: %s", path, fault.text);
        cr_assert_eq(gguf_array(&gguf, "tokenizer.ggml.tokens", GGUF_STRING, &tokens, &fault), 0);
        cr_assert_not_null(tokens);
        cr_expect_gt(tokens->count, 30000);
        gguf_close(&gguf);
        file_unmap(data, size);
    }
    if (!root || !*root) printf("skip: KEEPD_TEST_DATA is not set\n");
}
