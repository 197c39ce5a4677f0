/* Model files: good ones, every way of being bad, and files that are not there. */
#include <criterion/criterion.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/file.h"
#include "base/mem.h"
#include "model/weights.h"

static void stop_failing(void) {
    mem_fail_after(-1);
}

TestSuite(weights, .fini = stop_failing);

/* ---- Files in memory ---- */

/* A file with this header and `data_size` bytes 0, 1, 2...; the caller closes it. */
static struct buf file_of(const char *header, size_t data_size) {
    struct buf file;
    uint64_t n = strlen(header);
    buf_open(&file, 1 << 20);
    for (int i = 0; i < 8; i++) buf_char(&file, (char)(n >> 8 * i & 0xFF));
    buf_str(&file, header);
    for (size_t i = 0; i < data_size; i++) buf_char(&file, (char)i);
    return file;
}

static int parse(const char *header, size_t data_size, struct tensor_file *out,
                 struct fault *fault) {
    struct buf file = file_of(header, data_size);
    /* Exactly as large as it is, so that a read past its end is seen. */
    char *exact = mem_must_alloc(file.size, 1);
    memcpy(exact, file.data, file.size);
    int rc = safetensors_parse(exact, file.size, out, fault);
    for (size_t i = 0; rc == 0 && i < out->count; i++) {
        const char *data = out->tensors[i].data;
        cr_expect(data >= exact && data + out->tensors[i].bytes <= exact + file.size);
        out->tensors[i].data = NULL;
    }
    mem_free(exact);
    buf_close(&file);
    return rc;
}

#define TENSOR(name, dtype, shape, begin, end)                                                     \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":[" shape "],\"data_offsets\":[" #begin        \
    "," #end "]}"

Test(weights, reads_tensors_by_name) {
    const char *header =
        "{\"__metadata__\":{\"format\":\"pt\",\"keepd\":\"{\\\"version\\\":1}\"}," TENSOR(
            "z", "BF16", "2,3", 4,
            16) "," TENSOR("a", "F32", "", 0,
                           4) "," TENSOR("m", "I32", "0,7", 16,
                                         16) "," TENSOR("deep", "F32", "1,1,1,1,1,1", 16,
                                                        20) "," TENSOR("q", "F4", "6", 20,
                                                                       23) "}   ";
    struct buf file = file_of(header, 23);
    struct tensor_file out;
    struct fault fault = {0};
    cr_assert_eq(safetensors_parse(file.data, file.size, &out, &fault), 0, "%s", fault.text);
    static const char *const names[] = {"a", "deep", "m", "q", "z"};
    cr_assert_eq(out.count, 5);
    for (int i = 0; i < 5; i++) cr_expect_str_eq(out.tensors[i].name, names[i]);
    const struct tensor *a = &out.tensors[0], *deep = &out.tensors[1], *m = &out.tensors[2],
                        *q = &out.tensors[3], *z = &out.tensors[4];
    cr_expect(a->dtype == TENSOR_F32 && a->dims == 0 && a->bytes == 4);
    cr_expect_eq(((const unsigned char *)a->data)[3], 3);
    cr_expect(z->dtype == TENSOR_BF16 && z->dims == 2 && z->shape[0] == 2 && z->shape[1] == 3);
    cr_expect_eq(z->bytes, 12);
    cr_expect_eq(*(const unsigned char *)z->data, 4);
    cr_expect(m->dtype == TENSOR_I32 && m->bytes == 0 && m->dims == 2);
    /* more dimensions than a tensor of ours has: nobody may take it for one */
    cr_expect(deep->dtype == TENSOR_OTHER && deep->dims == TENSOR_DIMS_MAX);
    cr_expect(q->dtype == TENSOR_OTHER && q->bytes == 3);
    cr_expect_str_eq(out.metadata_keepd, "{\"version\":1}");
    tensor_file_close(&out);
    cr_expect_null(out.tensors);
    tensor_file_close(&out);
    buf_close(&file);
}

Test(weights, reads_files_without_tensors) {
    struct tensor_file out;
    cr_expect_eq(parse("{}", 0, &out, NULL), 0);
    cr_expect_eq(out.count, 0);
    cr_expect_null(out.metadata_keepd);
    tensor_file_close(&out);
}

#define BIG "4611686018427387904" /* 2^62 */

static const struct bad {
    const char *header;
    size_t data;
    int rc;
    const char *field;
} bad[] = {
    {"", 0, ERR_MALFORMED, "header"},
    {" {}", 0, ERR_MALFORMED, "header"},
    {"[]", 0, ERR_MALFORMED, "header"},
    {"{", 0, ERR_MALFORMED, ""},
    {"{}x", 0, ERR_MALFORMED, ""},
    {"{}", 1, ERR_MALFORMED, "header"}, /* data of nobody */
    {"{\"t\":1}", 0, ERR_MALFORMED, "t"},
    {"{\"t\":{}}", 0, ERR_MALFORMED, "t"},
    {"{" TENSOR("t", "F33", "1", 0, 4) "}", 4, ERR_UNSUPPORTED, "t"},
    {"{\"t\":{\"dtype\":7,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, ERR_MALFORMED, "t"},
    {"{\"t\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, ERR_MALFORMED, "t"},
    {"{\"t\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, ERR_MALFORMED, "t"},
    {"{\"t\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", 4, ERR_MALFORMED, "t"},
    {"{\"t\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,8]}}", 4, ERR_MALFORMED, "t"},
    {"{\"t\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":{}}}", 4, ERR_MALFORMED, "t"},
    {"{" TENSOR("t", "F32", "1.5", 0, 4) "}", 4, ERR_MALFORMED, "t"},
    {"{" TENSOR("t", "F32", "-1", 0, 4) "}", 4, ERR_MALFORMED, "t"},
    {"{" TENSOR("t", "F32", "\\\"1\\\"", 0, 4) "}", 4, ERR_MALFORMED, ""},
    {"{" TENSOR("t", "F32", "1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1", 0, 4) "}", 4, ERR_MALFORMED, "t"},
    {"{" TENSOR("t", "F32", "1", 0, 5) "}", 5, ERR_MALFORMED, "t"},
    {"{" TENSOR("t", "F32", "2", 0, 4) "}", 4, ERR_MALFORMED, "t"},
    {"{" TENSOR("t", "F32", "0", 0, 4) "}", 4, ERR_MALFORMED, "t"},
    {"{" TENSOR("t", "F4", "1", 0, 0) "}", 0, ERR_MALFORMED, "t"},
    {"{" TENSOR("t", "F32", "1", 0, 4) "}", 3, ERR_MALFORMED, "t"}, /* truncated data */
    {"{" TENSOR("t", "F32", "1", 4, 0) "}", 4, ERR_MALFORMED, "t"},
    {"{" TENSOR("t", "F32", "1", -4, 0) "}", 4, ERR_MALFORMED, "t"},
    {"{" TENSOR("t", "F32", "1", 9223372036854775804, 9223372036854775807) "}", 4, ERR_MALFORMED,
     "t"},
    {"{" TENSOR("t", "F32", "1", 18446744073709551612, 18446744073709551616) "}", 4, ERR_MALFORMED,
     "t"},
    {"{" TENSOR("t", "F32", BIG "," BIG, 0, 0) "}", 0, ERR_MALFORMED, "t"},
    {"{" TENSOR("t", "F32", BIG ",4", 0, 0) "}", 0, ERR_MALFORMED, "t"},
    {"{" TENSOR("t", "F32", BIG, 0, 0) "}", 0, ERR_MALFORMED, "t"}, /* times 32 bits overflows */
    {"{" TENSOR("t", "F32", "2305843009213693953", 0, 4) "}", 4, ERR_MALFORMED, "t"},
    {"{" TENSOR("a", "F32", "1", 0, 4) "," TENSOR("b", "F32", "1", 2, 6) "}", 6, ERR_MALFORMED,
     "b"},
    {"{" TENSOR("a", "F32", "1", 0, 4) "," TENSOR("b", "F32", "1", 0, 4) "}", 4, ERR_MALFORMED,
     NULL},
    {"{" TENSOR("a", "F32", "1", 0, 4) "," TENSOR("b", "F32", "1", 5, 9) "}", 9, ERR_MALFORMED,
     "b"},
    {"{" TENSOR("a", "F32", "1", 1, 5) "}", 5, ERR_MALFORMED, "a"},
    {"{" TENSOR("a", "F32", "1", 0, 4) "}", 5, ERR_MALFORMED, "header"},
    {"{" TENSOR("a", "F32", "1", 0, 4) "," TENSOR("a", "F32", "1", 4, 8) "}", 8, ERR_MALFORMED,
     "a"},
    {"{\"__metadata__\":[]}", 0, ERR_MALFORMED, "__metadata__"},
    {"{\"__metadata__\":{\"x\":1}}", 0, ERR_MALFORMED, "__metadata__"},
    {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, ERR_MALFORMED, "__metadata__"},
    {"{\"__metadata__\":{\"keepd\":\"1\",\"keepd\":\"2\"}}", 0, ERR_MALFORMED, "__metadata__"},
    {"{\"a\":[[[[[[[[[]]]]]]]]]}", 0, ERR_LIMIT, ""},
};

Test(weights, refuses_malformed_files) {
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct tensor_file out;
        struct fault fault = {0};
        int rc = parse(bad[i].header, bad[i].data, &out, &fault);
        cr_expect_eq(rc, bad[i].rc, "case %zu %s: %s %s", i, bad[i].header, err_name(rc),
                     fault.text);
        cr_expect_eq(fault.code, rc);
        cr_expect(fault.text[0]);
        if (bad[i].field)
            cr_expect_str_eq(fault.field, bad[i].field, "case %zu: %s", i, fault.field);
        cr_expect(!out.tensors && !out.names && !out.metadata_keepd && !out.count);
    }
}

/* A file truncated anywhere, even to nothing, is rejected; nothing past the end is read. */
Test(weights, refuses_every_truncation) {
    struct buf file = file_of("{" TENSOR("t", "F32", "2", 0, 8) "}", 8);
    for (size_t size = 0; size < file.size; size++) {
        struct tensor_file out;
        char *exact = mem_must_alloc(size, 1);
        memcpy(exact, file.data, size);
        cr_expect_eq(safetensors_parse(exact, size, &out, NULL), ERR_MALFORMED, "%zu bytes", size);
        mem_free(exact);
    }
    buf_close(&file);
}

Test(weights, refuses_huge_headers) {
    unsigned char file[16] = {0, 0, 0, 0, 0, 0, 0, 0, '{', '}'};
    struct tensor_file out;
    file[4] = 1; /* 4 GiB */
    cr_expect_eq(safetensors_parse(file, sizeof file, &out, NULL), ERR_LIMIT);
    memset(file, 0xFF, 8);
    cr_expect_eq(safetensors_parse(file, sizeof file, &out, NULL), ERR_LIMIT);
    memset(file, 0, 8);
    file[0] = 9;
    cr_expect_eq(safetensors_parse(file, sizeof file, &out, NULL), ERR_MALFORMED);
}

Test(weights, survives_failing_memory_in_the_parser) {
    struct buf file =
        file_of("{\"__metadata__\":{\"keepd\":\"{}\"}," TENSOR("t", "F32", "2", 0, 8) "}", 8);
    int rc = ERR_NOMEM;
    long n = 0;
    for (; rc == ERR_NOMEM && n < 1000; n++) {
        struct tensor_file out;
        mem_fail_after(n);
        rc = safetensors_parse(file.data, file.size, &out, NULL);
        mem_fail_after(-1);
        cr_assert(rc == 0 || rc == ERR_NOMEM, "allocation %ld: %s", n, err_name(rc));
        cr_expect(rc == 0 || (!out.tensors && !out.names && !out.metadata_keepd));
        tensor_file_close(&out);
    }
    cr_expect_eq(rc, 0);
    cr_expect_gt(n, 10);
    buf_close(&file);
}

/* ---- Files on disk ---- */

struct folder {
    char path[64];
};

static struct folder new_folder(void) {
    struct folder folder = {"/tmp/keepd-weights.XXXXXX"};
    cr_assert(mkdtemp(folder.path));
    return folder;
}

static void remove_folder(const struct folder *folder) {
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", folder->path);
    cr_expect_eq(system(command), 0);
}

static void write_bytes(const struct folder *folder, const char *name, const void *data,
                        size_t size) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder->path, name);
    FILE *file = fopen(path, "wb");
    cr_assert(file);
    cr_assert_eq(fwrite(data, 1, size, file), size);
    cr_assert_eq(fclose(file), 0);
}

static void write_tensors(const struct folder *folder, const char *name, const char *header,
                          size_t data_size) {
    struct buf file = file_of(header, data_size);
    write_bytes(folder, name, file.data, file.size);
    buf_close(&file);
}

static void write_index(const struct folder *folder, const char *text) {
    write_bytes(folder, "model.safetensors.index.json", text, strlen(text));
}

Test(weights, opens_one_file) {
    struct folder folder = new_folder();
    struct weights *w;
    struct fault fault = {0};
    char path[128];
    write_tensors(&folder, "model.safetensors",
                  "{\"__metadata__\":{\"keepd\":\"k\"}," TENSOR("b", "F16", "2", 0, 4) "," TENSOR(
                      "a", "F32", "1", 4, 8) "}",
                  8);
    cr_assert_eq(weights_open(folder.path, &w, &fault), 0, "%s", fault.text);
    cr_expect_eq(weights_bytes(w), 8);
    cr_expect_str_eq(weights_metadata_keepd(w), "k");
    cr_expect_eq(*(const unsigned char *)weights_find(w, "a")->data, 4);
    cr_expect_eq(weights_find(w, "b")->dtype, TENSOR_F16);
    cr_expect_null(weights_find(w, "c"));
    cr_expect_null(weights_find(w, ""));
    weights_close(w);
    snprintf(path, sizeof path, "%s/model.safetensors", folder.path);
    cr_assert_eq(weights_open_file(path, &w, &fault), 0);
    weights_close(w);
    weights_close(NULL);
    remove_folder(&folder);
}

Test(weights, copies_stay_when_their_file_is_shortened) {
    struct folder folder = new_folder();
    struct weights *w;
    struct fault fault = {0};
    char path[128];
    snprintf(path, sizeof path, "%s/model.safetensors", folder.path);
    write_tensors(&folder, "model.safetensors", "{" TENSOR("a", "F32", "1", 0, 4) "}", 4);
    cr_expect_eq(weights_copy(path, false, 16, &w, &fault), ERR_LIMIT);
    cr_expect_null(w);
    cr_assert_eq(weights_copy(path, false, 4096, &w, &fault), 0, "%s", fault.text);
    cr_assert_eq(truncate(path, 0), 0);
    cr_expect_eq(((const unsigned char *)weights_find(w, "a")->data)[3], 3);
    weights_close(w);
    cr_expect_eq(weights_copy(path, false, 4096, &w, &fault), ERR_MALFORMED);
    remove_folder(&folder);
}

/* Returns how many KiB of the mapping that has the address are in this process's memory. */
static long resident_at(const void *address) {
    FILE *maps = fopen("/proc/self/smaps", "r");
    char line[512];
    bool found = false;
    long size = -1;
    cr_assert(maps);
    while (size < 0 && fgets(line, sizeof line, maps)) {
        unsigned long first, end;
        if (sscanf(line, "%lx-%lx ", &first, &end) == 2)
            found = (uintptr_t)address >= first && (uintptr_t)address < end;
        else if (found && sscanf(line, "Rss: %ld", &size) != 1)
            size = -1;
    }
    fclose(maps);
    return size;
}

Test(weights, gives_memory_of_files_back) {
    enum { SIZE = 768 << 10 };
    struct folder folder = new_folder();
    struct weights *w;
    write_tensors(&folder, "model.safetensors", "{" TENSOR("a", "U8", "786432", 0, 786432) "}",
                  SIZE);
    cr_assert_eq(weights_open(folder.path, &w, NULL), 0);
    const struct tensor *a = weights_find(w, "a");
    const volatile unsigned char *data = a->data;
    unsigned sum = 0;
    for (int i = 0; i < SIZE; i += 512) sum += data[i + 7];
    cr_expect(resident_at(a->data) >= SIZE / 1024);
    weights_release(w, a->data, a->bytes);
    weights_release(w, &sum, sizeof sum); /* belongs to no file */
    cr_expect(resident_at(a->data) < 128);
    for (int i = 0; i < SIZE; i += 512) sum -= data[i + 7];
    cr_expect_eq(sum, 0);
    weights_close(w);
    remove_folder(&folder);
}

Test(weights, opens_shards) {
    struct folder folder = new_folder();
    struct weights *w;
    struct fault fault = {0};
    write_tensors(&folder, "one.safetensors",
                  "{" TENSOR("b", "F32", "1", 0, 4) "," TENSOR("d", "F32", "1", 4, 8) "}", 8);
    write_tensors(&folder, "two.safetensors", "{" TENSOR("a", "F32", "2", 0, 8) "}", 8);
    write_tensors(&folder, "three.safetensors", "{" TENSOR("c", "F32", "1", 0, 4) "}", 4);
    write_index(&folder,
                "{\"metadata\":{\"total_size\":99},\"weight_map\":{\"a\":\"two.safetensors\","
                "\"b\":\"one.safetensors\",\"c\":\"three.safetensors\","
                "\"d\":\"one.safetensors\"}}");
    cr_assert_eq(weights_open(folder.path, &w, &fault), 0, "%s: %s", fault.field, fault.text);
    cr_expect_eq(weights_bytes(w), 20);
    cr_expect_null(weights_metadata_keepd(w));
    cr_expect_eq(weights_find(w, "a")->bytes, 8);
    cr_expect_eq(*(const unsigned char *)weights_find(w, "d")->data, 4);
    cr_expect_not_null(weights_find(w, "c"));
    weights_close(w);
    remove_folder(&folder);
}

Test(weights, refuses_bad_indexes) {
    static const struct {
        const char *index;
        int rc;
        const char *field;
    } cases[] = {
        {"{\"weight_map\":{\"a\":\"../one.safetensors\"}}", ERR_MALFORMED, "a"},
        {"{\"weight_map\":{\"a\":\"/etc/passwd\"}}", ERR_MALFORMED, "a"},
        {"{\"weight_map\":{\"a\":\"x/one.safetensors\"}}", ERR_MALFORMED, "a"},
        {"{\"weight_map\":{\"a\":\"..\"}}", ERR_MALFORMED, "a"},
        {"{\"weight_map\":{\"a\":\"a..b\"}}", ERR_MALFORMED, "a"},
        {"{\"weight_map\":{\"a\":\".hidden\"}}", ERR_MALFORMED, "a"},
        {"{\"weight_map\":{\"a\":\"\"}}", ERR_MALFORMED, "a"},
        {"{\"weight_map\":{\"a\":1}}", ERR_MALFORMED, "a"},
        {"{\"weight_map\":{}}", ERR_MALFORMED, "weight_map"},
        {"{\"weight_map\":[]}", ERR_MALFORMED, "weight_map"},
        {"{}", ERR_MALFORMED, "weight_map"},
        {"", ERR_MALFORMED, ""},
        {"{\"weight_map\":{\"a\":\"one.safetensors\",\"b\":\"same.safetensors\"}}", ERR_MALFORMED,
         "a"},
        {"{\"weight_map\":{\"a\":\"one.safetensors\",\"a\":\"same.safetensors\"}}", ERR_MALFORMED,
         "a"}, /* the same tensor in two files */
        {"{\"weight_map\":{\"a\":\"bad.safetensors\"}}", ERR_MALFORMED, "header"},
        {"{\"weight_map\":{\"a\":\"empty.safetensors\"}}", ERR_MALFORMED, NULL},
        {"{\"weight_map\":{\"a\":\"gone.safetensors\"}}", ERR_NOTFOUND, NULL},
    };
    struct folder folder = new_folder();
    write_tensors(&folder, "one.safetensors", "{" TENSOR("a", "F32", "1", 0, 4) "}", 4);
    write_tensors(&folder, "same.safetensors", "{" TENSOR("a", "F32", "1", 0, 4) "}", 4);
    write_bytes(&folder, "bad.safetensors", "x", 1);
    write_bytes(&folder, "empty.safetensors", "", 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct weights *w = (struct weights *)1;
        struct fault fault = {0};
        write_index(&folder, cases[i].index);
        int rc = weights_open(folder.path, &w, &fault);
        cr_expect_eq(rc, cases[i].rc, "%s: %s %s", cases[i].index, err_name(rc), fault.text);
        if (cases[i].field) cr_expect_str_eq(fault.field, cases[i].field, "%s", cases[i].index);
        cr_expect_null(w);
    }
    remove_folder(&folder);
}

/* Indexes list tensors that were left out of the files, such as an LM head that is tied. */
Test(weights, remembers_what_an_index_promises_in_vain) {
    struct folder folder = new_folder();
    struct weights *w = NULL;
    struct fault fault = {0};
    write_tensors(&folder, "one.safetensors", "{" TENSOR("a", "F32", "1", 0, 4) "}", 4);
    write_index(&folder, "\xEF\xBB\xBF{\"weight_map\":{\"a\":\"one.safetensors\","
                         "\"lm_head.weight\":\"one.safetensors\"}}");
    cr_assert_eq(weights_open(folder.path, &w, &fault), 0, "%s: %s", fault.field, fault.text);
    cr_expect_eq(weights_count(w), 1);
    cr_expect_str_eq(weights_absent(w, "lm_head.weight"), "one.safetensors");
    cr_expect_null(weights_absent(w, "a"));
    weights_close(w);
    remove_folder(&folder);
}

Test(weights, names_what_is_missing) {
    struct folder folder = new_folder();
    struct weights *w;
    struct fault fault = {0};
    cr_expect_eq(weights_open(folder.path, &w, &fault), ERR_NOTFOUND);
    cr_expect_str_eq(fault.field, "model.safetensors");
    cr_expect_null(w);
    cr_expect_eq(weights_open_file("/nowhere/at/all", &w, &fault), ERR_NOTFOUND);
    cr_expect_str_eq(fault.field, "/nowhere/at/all");
    cr_expect_eq(weights_open_file(folder.path, &w, &fault), ERR_IO); /* a directory */
    remove_folder(&folder);
}

Test(weights, survives_failing_memory_at_open) {
    struct folder folder = new_folder();
    int rc = ERR_NOMEM;
    long n = 0;
    write_tensors(&folder, "one.safetensors", "{" TENSOR("b", "F32", "1", 0, 4) "}", 4);
    write_tensors(&folder, "two.safetensors",
                  "{\"__metadata__\":{\"keepd\":\"x\"}," TENSOR("a", "F32", "2", 0, 8) "}", 8);
    write_index(&folder, "{\"weight_map\":{\"a\":\"two.safetensors\",\"b\":\"one.safetensors\"}}");
    for (; rc == ERR_NOMEM && n < 1000; n++) {
        struct weights *w;
        struct fault fault = {0};
        mem_fail_after(n);
        rc = weights_open(folder.path, &w, &fault);
        mem_fail_after(-1);
        cr_assert(rc == 0 || rc == ERR_NOMEM, "allocation %ld: %s", n, err_name(rc));
        cr_expect_eq(fault.code, rc);
        cr_expect_eq(w != NULL, rc == 0);
        weights_close(w);
    }
    cr_expect_eq(rc, 0);
    cr_expect_gt(n, 30);
    remove_folder(&folder);
}

/* ---- file_read ---- */

Test(weights, reads_whole_files) {
    struct folder folder = new_folder();
    struct fault fault = {0};
    char path[128], *data;
    size_t size;
    write_bytes(&folder, "f", "ab\0cd", 5);
    snprintf(path, sizeof path, "%s/f", folder.path);
    cr_assert_eq(file_read(path, 5, &data, &size, &fault), 0);
    cr_expect_eq(size, 5);
    cr_expect_eq(memcmp(data, "ab\0cd", 6), 0);
    mem_free(data);
    cr_expect_eq(file_read(path, 4, &data, &size, &fault), ERR_LIMIT);
    cr_expect_null(data);
    mem_fail_after(0);
    cr_expect_eq(file_read(path, 5, &data, &size, &fault), ERR_NOMEM);
    cr_expect_null(data);
    write_bytes(&folder, "f", "", 0);
    cr_assert_eq(file_read(path, 5, &data, &size, &fault), 0);
    cr_expect(size == 0 && data[0] == '\0');
    mem_free(data);
    cr_expect_eq(file_read(folder.path, 5, &data, &size, &fault), ERR_IO);
    cr_expect_eq(file_read("/nowhere/at/all", 5, &data, &size, NULL), ERR_NOTFOUND);
    /* A pipe would be waited for until someone writes to it. */
    cr_assert_eq(unlink(path), 0);
    cr_assert_eq(mkfifo(path, 0600), 0);
    cr_expect_eq(file_read(path, 5, &data, &size, &fault), ERR_IO);
    remove_folder(&folder);
}

/* ---- Real files, where there is more data ---- */

Test(weights, opens_real_directories) {
    const char *folder = getenv("KEEPD_TEST_DATA");
    static const struct {
        const char *name, *tensor;
        enum tensor_dtype dtype;
    } models[] = {{"qwen3", "model.layers.0.self_attn.q_norm.weight", TENSOR_BF16},
                  {"llama3", "model.norm.weight", TENSOR_BF16}, /* two shards */
                  {"qwen2", "model.layers.1.self_attn.k_proj.bias", TENSOR_BF16}};
    if (!folder || !*folder) {
        fprintf(stderr, "skip: real model directories need KEEPD_TEST_DATA\n");
        return;
    }
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        char path[512];
        struct weights *w;
        struct fault fault = {0};
        snprintf(path, sizeof path, "%s/tiny-models/%s/hf", folder, models[i].name);
        cr_assert_eq(weights_open(path, &w, &fault), 0, "%s: %s", path, fault.text);
        const struct tensor *tensor = weights_find(w, models[i].tensor);
        cr_assert_not_null(tensor, "%s", models[i].tensor);
        cr_expect_eq(tensor->dtype, models[i].dtype);
        cr_expect_eq(tensor->dims, 1);
        cr_expect_gt(weights_bytes(w), 100000);
        weights_close(w);
    }
}
