/* Paths that are no model: what is said of them. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "model/path.h"

static char folder[64];

static void make_folder(void) {
    strcpy(folder, "/tmp/keepd-path.XXXXXX");
    cr_assert_not_null(mkdtemp(folder));
}

static void remove_folder(void) {
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    cr_expect_eq(system(command), 0);
}

TestSuite(model_path, .init = make_folder, .fini = remove_folder);

static void write_file(const char *name, const char *content) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    cr_assert_not_null(file);
    cr_assert_geq(fputs(content, file), 0);
    cr_assert_eq(fclose(file), 0);
}

Test(model_path, folders_that_hold_something_else) {
    static const struct {
        const char *files[5];
        const char *said; /* NULL: a model, or nothing to say */
    } cases[] = {
        {{"config.json", "tokenizer.json", "model.safetensors"}, NULL},
        {{"config.json", "vocab.json", "model.safetensors.index.json"}, NULL},
        {{"config.json", "model.safetensors"}, NULL}, /* the tokenizer's opener says it */
        {{"config.json", "tokenizer.json", "model.safetensors", "a.gguf"}, NULL},
        {{"a.Q4_0.gguf"}, "holds a GGUF file: name it, "},
        {{"a.gguf", "a.gates.safetensors"}, "holds a GGUF file: name it, "},
        {{"b.gguf", "a.gguf", "README.md"}, "/a.gguf (or one of 1 others"},
        {{"m-00002-of-00002.gguf", "m-00001-of-00002.gguf"}, "/m-00001-of-00002.gguf"},
        {{"config.json", "a.gguf"}, "holds a GGUF file"},
        {{"tokenizer.json", "tokenizer_config.json"}, "holds a tokenizer and no model"},
        {{"config.json", "tokenizer.json"}, "holds config.json and no weights"},
        {{"config.json", "tokenizer.json", "gates.safetensors"}, "no weights"},
        {{"config.json", "pytorch_model.bin"}, "weights of PyTorch (pytorch_model.bin)"},
        {{"config.json", "model.safetensors.incomplete"}, "an unfinished download, model.safe"},
        {{"model.safetensors", "tokenizer.json"}, "holds weights and no config.json"},
        {{"adapter_config.json", "adapter_model.safetensors"}, "an adapter (LoRA)"},
        {{"params.json", "consolidated.safetensors"}, "Mistral's own form"},
        {{"config.json", "model.onnx"}, "a format that is not read (model.onnx)"},
        {{"config.json", "model.safetensors", "tokenizer.model"}, "and no tokenizer.json"},
        {{"README.md"}, "holds no model"},
        {{NULL}, "holds no model"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct fault fault = {0};
        make_folder();
        for (size_t k = 0; k < 5 && cases[i].files[k]; k++) write_file(cases[i].files[k], "x");
        int rc = model_path_check(folder, false, &fault);
        cr_expect_eq(rc != 0, cases[i].said != NULL, "case %zu: %s", i, fault.text);
        if (cases[i].said) {
            cr_expect_str_eq(fault.field, "model");
            cr_expect_not_null(strstr(fault.text, cases[i].said), "%s", fault.text);
            cr_expect_not_null(strstr(fault.text, folder), "%s", fault.text);
        }
        remove_folder();
    }
    make_folder();
}

Test(model_path, a_folder_of_the_hugging_face_cache) {
    struct fault fault = {0};
    char path[128];
    snprintf(path, sizeof path, "%s/snapshots", folder);
    cr_assert_eq(mkdir(path, 0700), 0);
    cr_assert_neq(model_path_check(folder, false, &fault), 0);
    cr_expect_not_null(strstr(fault.text, "/snapshots/..."), "%s", fault.text);
}

Test(model_path, random_weights_need_config_alone) {
    struct fault fault = {0};
    write_file("config.json", "{}");
    cr_expect_eq(model_path_check(folder, true, &fault), 0, "%s", fault.text);
}

Test(model_path, files) {
    struct fault fault = {0};
    char path[128];
    write_file("m", "<!doctype html>");
    snprintf(path, sizeof path, "%s/m", folder);
    cr_expect_eq(model_path_check(path, false, &fault), ERR_UNSUPPORTED);
    cr_expect_not_null(strstr(fault.text, path), "%s", fault.text);
    cr_expect_not_null(strstr(fault.text, "a web page"), "%s", fault.text);
    write_file("config.json", "{}");
    cr_expect_eq(model_path_check(path, false, &fault), ERR_INVALID);
    cr_expect_not_null(strstr(fault.text, "name its directory"), "%s", fault.text);
    write_file("m", "GGUF");
    cr_expect_eq(model_path_check(path, false, &fault), 0);
    cr_expect_eq(model_path_check("/nowhere/at/all", false, &fault), 0);
    cr_expect_eq(model_path_check("/dev/null", false, &fault), 0);
}
