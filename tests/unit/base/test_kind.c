/* Tests which kind a file is, by its first bytes, and what a message about it says. */
#include <criterion/criterion.h>
#include <string.h>

#include "base/kind.h"

static void expect_kind(const char *data, size_t size, enum file_kind wanted, const char *said) {
    struct fault fault = {0};
    int rc = kind_check(data, size, wanted, "model", "m", &fault);
    if (!said) {
        cr_expect_eq(rc, 0, "%s", fault.text);
        return;
    }
    cr_expect(rc == ERR_UNSUPPORTED || rc == ERR_MALFORMED, "%d", rc);
    cr_expect_not_null(strstr(fault.text, said), "'%s' does not say '%s'", fault.text, said);
    cr_expect_str_eq(fault.field, "model");
}
#define EXPECT(bytes, wanted, said) expect_kind((bytes), sizeof(bytes) - 1, wanted, said)

Test(kind, files_that_are_no_model) {
    EXPECT("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 98765432\n",
           KIND_SAFETENSORS, "m is a Git LFS pointer to a file of 98.8 MB, not safetensors: run");
    EXPECT("version https://git-lfs.github.com/spec/v1\n", KIND_JSON,
           "a Git LFS pointer, not JSON");
    EXPECT("%PDF-1.7\n", KIND_GGUF, "m is a PDF document, not a GGUF file");
    EXPECT("\n <!DOCTYPE html><html>", KIND_GGUF, "a web page, not a GGUF file: the download");
    EXPECT("<HTML>", KIND_JSON, "a web page");
    EXPECT("\xEF\xBB\xBF<?xml version=\"1.0\"?><Error>", KIND_SAFETENSORS, "a web page");
    EXPECT("PK\3\4\0\0\0\0", KIND_GGUF, "a zip archive, as PyTorch's checkpoints");
    EXPECT("\x80\2}q", KIND_GGUF, "pickle");
    EXPECT("\x1f\x8b\b", KIND_GGUF, "gzip archive, not a GGUF file: unpack it");
    EXPECT("\x80\2\0\0\0\0\0\0{", KIND_SAFETENSORS, NULL); /* a header of 640 bytes */
    EXPECT("", KIND_GGUF, "m is empty: download it again");
    EXPECT("GGUF\3\0\0\0", KIND_JSON, "is a GGUF file, not JSON: name it");
    EXPECT("\x10\0\0\0\0\0\0\0{\"a\"", KIND_GGUF,
           "is a file in safetensors, not a GGUF file: name");
    EXPECT("Invalid username or password.", KIND_GGUF,
           "a text that begins with \"Invalid username or password.\", not a GGUF file");
    EXPECT("{\"error\":\"Entry not found\"}", KIND_SAFETENSORS, "begins with \"{\"error\"");
    char zeros[128] = {0};
    expect_kind(zeros, sizeof zeros, KIND_GGUF, "begins with zeros: its download did not finish");
    char tar[300] = "config.json";
    memcpy(tar + 257, "ustar", 5);
    expect_kind(tar, sizeof tar, KIND_SAFETENSORS, "a tar archive");
}

Test(kind, what_is_wanted_or_not_known) {
    EXPECT("GGUF\3\0\0\0", KIND_GGUF, NULL);
    EXPECT("\x10\0\0\0\0\0\0\0{\"a\"", KIND_SAFETENSORS, NULL);
    EXPECT("{\"a\": 1}", KIND_JSON, NULL);
    EXPECT(" nonsense", KIND_JSON, NULL); /* the parser says where */
    EXPECT("\1\2\3\4\5", KIND_GGUF, NULL);
    EXPECT("GGU", KIND_GGUF, NULL);
    EXPECT("\0\0\0", KIND_GGUF, NULL);
}

Test(kind, what_is_missing_of_a_file) {
    static const struct {
        size_t size, needed;
        const char *said;
    } cases[] = {
        {93000000, 98000000, "the file is incomplete: 93 of 98 MB; download it again"},
        {97900000, 98000000, "97.900 of 98.000 MB"},
        {1, 4000000000, "0 of 4 GB"},
        {128, 132, "128 of 132 bytes"},
        {128, 0, "the file is incomplete: it ends here"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct fault fault = {0};
        cr_expect_eq(kind_incomplete("t", cases[i].size, cases[i].needed, &fault), ERR_MALFORMED);
        cr_expect_str_eq(fault.field, "t");
        cr_expect_not_null(strstr(fault.text, cases[i].said), "%s", fault.text);
    }
}
