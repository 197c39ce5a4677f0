/* Tests model/identity.c: two models share a digest only if every weight file is the same. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "model/identity.h"

static char dir[64];

static const char *path_of(const char *name) {
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static void write_file(const char *name, const char *text) {
    FILE *file = fopen(path_of(name), "w");
    cr_assert(file && fputs(text, file) >= 0 && fclose(file) == 0);
}

static void make_dir(void) {
    strcpy(dir, "/tmp/keepd-identity-XXXXXX");
    cr_assert_not_null(mkdtemp(dir));
    write_file("config.json", "{}");
}

static void remove_dir(void) {
    static const char *const names[] = {
        "config.json", "a.safetensors", "model.safetensors",     "gates.safetensors",
        "notes.txt",   "a.gguf",        "b-00001-of-00002.gguf", "b-00002-of-00002.gguf"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) unlink(path_of(names[i]));
    cr_assert_eq(rmdir(dir), 0);
}

TestSuite(identity, .init = make_dir, .fini = remove_dir);

static enum quantization quantization;

/* Does the model read differently from before? */
static bool differs(void) {
    static uint8_t last[SHA256_BYTES];
    uint8_t now[SHA256_BYTES];
    struct fault fault = {0};
    cr_assert_eq(identity_model(dir, false, quantization, now, &fault), 0, "%s", fault.text);
    bool other = memcmp(now, last, sizeof now) != 0;
    memcpy(last, now, sizeof now);
    return other;
}

Test(identity, every_weight_file_counts_however_short_its_name) {
    static const char *const names[] = {"model.safetensors", "a.safetensors"};
    differs();
    for (int i = 0; i < 2; i++) {
        write_file(names[i], "weights");
        cr_assert(differs(), "%s was not read", names[i]);
        write_file(names[i], "others!");
        cr_assert(differs(), "%s was not read", names[i]);
    }
    cr_assert_not(differs());
}

Test(identity, gates_and_other_files_are_not_the_model) {
    differs();
    write_file("gates.safetensors", "gates");
    write_file("notes.txt", "notes");
    cr_assert_not(differs());
    write_file("config.json", "{\"layers\": 2}");
    cr_assert(differs());
}

Test(identity, quantised_weights_are_others) {
    differs();
    for (int q = QUANTIZE_FP8; q <= QUANTIZE_Q4; q++) {
        quantization = (enum quantization)q;
        cr_assert(differs());
        cr_assert_not(differs());
    }
}

Test(identity, a_model_without_a_config_has_none) {
    uint8_t digest[SHA256_BYTES];
    struct fault fault = {0};
    unlink(path_of("config.json"));
    cr_assert_eq(identity_model(dir, false, QUANTIZE_NONE, digest, &fault), ERR_IO);
}

/* The file itself, without its name; all files of a split model. */
Test(identity, gguf_files_count_by_content) {
    uint8_t one[SHA256_BYTES], other[SHA256_BYTES];
    char path[128];
    struct fault fault = {0};
    write_file("a.gguf", "content");
    snprintf(path, sizeof path, "%s", path_of("a.gguf"));
    cr_assert_eq(identity_model(path, false, QUANTIZE_NONE, one, &fault), 0, "%s", fault.text);
    write_file("a.gguf", "another");
    cr_assert_eq(identity_model(path, false, QUANTIZE_NONE, other, &fault), 0);
    cr_expect(memcmp(one, other, sizeof one) != 0);
    write_file("b-00001-of-00002.gguf", "content");
    snprintf(path, sizeof path, "%s", path_of("b-00001-of-00002.gguf"));
    cr_expect_eq(identity_model(path, false, QUANTIZE_NONE, one, &fault), ERR_IO);
    write_file("b-00002-of-00002.gguf", "more");
    cr_assert_eq(identity_model(path, false, QUANTIZE_NONE, one, &fault), 0);
    write_file("b-00002-of-00002.gguf", "less");
    cr_assert_eq(identity_model(path, false, QUANTIZE_NONE, other, &fault), 0);
    cr_expect(memcmp(one, other, sizeof one) != 0);
    cr_assert_eq(identity_gates("", one, &fault), 0);
    cr_expect_eq(one[0] | one[31], 0);
}
