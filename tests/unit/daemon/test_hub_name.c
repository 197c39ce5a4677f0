#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "daemon/hub_name.h"

#define OID "0123456789012345678901234567890123456789"

static void expect_name(const char *text, const char *repo, const char *revision,
                        const char *pick) {
    struct hub_name name;
    struct fault fault = {0};
    cr_assert_eq(hub_name_parse(text, &name, &fault), 0, "%s: %s", text, fault.text);
    cr_expect_str_eq(name.repo, repo, "%s: %s", text, name.repo);
    cr_expect_str_eq(name.revision, revision, "%s: %s", text, name.revision);
    cr_expect_str_eq(name.pick, pick, "%s: %s", text, name.pick);
}

Test(hub_name, forms) {
    expect_name("hf:Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "main", "");
    expect_name("Qwen/Qwen3-0.6B-GGUF:Q4_K_M", "Qwen/Qwen3-0.6B-GGUF", "main", "Q4_K_M");
    expect_name("hf:a/b@v1.0:x/y.gguf", "a/b", "v1.0", "x/y.gguf");
    expect_name("hf:a/b:Q8_0@refs/pr/3", "a/b", "refs/pr/3", "Q8_0");
    expect_name("hf://a/b@v1", "a/b", "v1", "");
    expect_name("hf.co/a/b:Q8_0", "a/b", "main", "Q8_0");
    expect_name("https://huggingface.co/a/b", "a/b", "main", "");
    expect_name("https://huggingface.co/a/b/", "a/b", "main", "");
    expect_name("https://huggingface.co/a/b?not-for-all-audiences=true", "a/b", "main", "");
    expect_name("https://huggingface.co/a/b/tree/v2", "a/b", "v2", "");
    expect_name("https://hf.co/a/b/resolve/main/x/y.gguf?download=true", "a/b", "main", "x/y.gguf");
}

Test(hub_name, what_is_none) {
    static const char *const texts[] = {"",
                                        "hf:",
                                        "hf:a",
                                        "hf:a/",
                                        "hf:/a",
                                        "hf:a/b/c",
                                        "hf:a/b:",
                                        "hf:a/b@",
                                        "hf:a/b@:Q8_0",
                                        "hf:../b",
                                        "hf:a/..",
                                        "hf:a--b/c",
                                        "hf:a..b/c",
                                        "hf:-a/b",
                                        "hf:a/b.",
                                        "hf:a b/c",
                                        "hf:a/b:../c.gguf",
                                        "hf:a/b:/c.gguf",
                                        "hf:a/b:c/./d.gguf",
                                        "hf:a/b:c//d.gguf",
                                        "hf:a/b:c\n.gguf",
                                        "hf:a/b@x/../../y",
                                        "hf:a/b@x y",
                                        "https://example.org/a/b",
                                        "https://huggingface.co/a/b/discussions",
                                        "https://huggingface.co/a/b/blob/main"};
    char large[600];
    struct hub_name name;
    struct fault fault = {0};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        cr_expect_eq(hub_name_parse(texts[i], &name, &fault), ERR_INVALID, "%s", texts[i]);
    memset(large, 'a', sizeof large);
    large[sizeof large - 1] = '\0';
    memcpy(large, "hf:a/b:", 7);
    cr_expect_eq(hub_name_parse(large, &name, &fault), ERR_INVALID);
    memcpy(large, "hf:a/bb", 7);
    cr_expect_eq(hub_name_parse(large, &name, &fault), ERR_INVALID);
}

Test(hub_name, is_written_as_it_is_read) {
    struct hub_name name, again;
    char text[700];
    struct fault fault;
    cr_assert_eq(hub_name_parse("a/b:Q8_0@v1", &name, &fault), 0);
    hub_name_write(&name, text, sizeof text);
    cr_expect_str_eq(text, "hf:a/b@v1:Q8_0");
    cr_assert_eq(hub_name_parse(text, &again, &fault), 0);
    cr_expect_eq(memcmp(&name, &again, sizeof name), 0);
}

/* ---- Trees ---- */

static struct hub_tree tree;

/* Files "path size", separated by blanks. */
static void make_tree(const char *text) {
    char path[200];
    long long size;
    int used;
    struct fault fault = {0};
    hub_tree_close(&tree);
    for (; sscanf(text, " %199s %lld%n", path, &size, &used) == 2; text += used)
        cr_assert_eq(hub_tree_add(&tree, path, size, OID, &fault), 0, "%s", fault.text);
}

/* The path that a pick chooses, "directory", or the fault. */
static const char *chosen(const char *pick) {
    static struct fault fault;
    struct hub_name name = {.repo = "a/b", .revision = "main"};
    struct hub_choice choice;
    snprintf(name.pick, sizeof name.pick, "%s", pick);
    if (hub_choose(&name, &tree, &choice, &fault)) return fault.text;
    return choice.format == HUB_DIRECTORY ? "directory" : tree.files[choice.file].path;
}

static size_t wanted_count(void) {
    size_t count = 0;
    for (size_t i = 0; i < tree.count; i++) count += tree.files[i].wanted;
    return count;
}

Test(hub_name, quantisations) {
    make_tree("Qwen3-0.6B-IQ4_XS.gguf 10 Qwen3-0.6B-Q4_K_M.gguf 11 Qwen3-0.6B-UD-Q4_K_XL.gguf 12 "
              "Qwen3-0.6B-Q4_K_S.gguf 9 Qwen3-0.6B.Q8_0.gguf 20 mmproj-Qwen3-Q8_0.gguf 3 "
              "Qwen3-0.6B-F16.gguf 40 imatrix.gguf 1");
    cr_expect_str_eq(chosen("Q4_K_M"), "Qwen3-0.6B-Q4_K_M.gguf");
    cr_expect_str_eq(chosen("q4_k_m"), "Qwen3-0.6B-Q4_K_M.gguf");
    cr_expect_str_eq(chosen("Q4_K_XL"), "Qwen3-0.6B-UD-Q4_K_XL.gguf");
    cr_expect_str_eq(chosen("UD-Q4_K_XL"), "Qwen3-0.6B-UD-Q4_K_XL.gguf");
    cr_expect_str_eq(chosen("Q8_0"), "Qwen3-0.6B.Q8_0.gguf");
    cr_expect_str_eq(chosen("f16"), "Qwen3-0.6B-F16.gguf");
    cr_expect_str_eq(chosen("Qwen3-0.6B-F16.gguf"), "Qwen3-0.6B-F16.gguf");
    cr_expect_str_eq(chosen(""), "Qwen3-0.6B-Q4_K_M.gguf");
    cr_expect_eq(wanted_count(), 1);
    cr_expect_str_eq(chosen("Q4_K"), "a/b has no GGUF file for 'Q4_K'");
    cr_expect_str_eq(chosen("4_XS"), "a/b has no GGUF file for '4_XS'");
    hub_tree_close(&tree);
}

Test(hub_name, defaults_without_the_usual_one) {
    make_tree("x-Q8_0.gguf 8 x-Q5_K_M.gguf 5 x-Q2_K.gguf 2");
    cr_expect_str_eq(chosen(""), "x-Q5_K_M.gguf");
    make_tree("b.gguf 8 a.gguf 9");
    cr_expect_str_eq(chosen(""), "b.gguf");
    make_tree("README.md 3 x.bin 8");
    cr_expect_not_null(strstr(chosen(""), "no model that keepd reads"));
    hub_tree_close(&tree);
}

Test(hub_name, split_models) {
    struct hub_model models[HUB_MODELS_MAX];
    make_tree("Q4_K_M/m-00002-of-00003.gguf 2 Q4_K_M/m-00001-of-00003.gguf 1 "
              "Q4_K_M/m-00003-of-00003.gguf 3 Q8_0/m-00001-of-00002.gguf 10 m-00001-of-2.gguf 7");
    cr_expect_str_eq(chosen("Q4_K_M"), "Q4_K_M/m-00001-of-00003.gguf");
    cr_expect_eq(wanted_count(), 3);
    cr_expect_str_eq(chosen("Q8_0"), "Q8_0/m-00001-of-00002.gguf: the repository has 1 of 2 parts");
    cr_assert_eq(hub_models(&tree, models), 3);
    cr_expect_eq(models[0].bytes, 6);
    cr_expect_eq(models[0].found, 3);
    cr_expect_eq(models[2].parts, 2);
    hub_tree_close(&tree);
}

Test(hub_name, directories) {
    make_tree("config.json 1 model.safetensors 100 adapter_model.safetensors 7 tokenizer.json 2 "
              "pytorch_model.bin 100 README.md 3 x-Q4_K_M.gguf 50 sub/config.json 1");
    cr_expect_str_eq(chosen(""), "directory");
    cr_expect_eq(wanted_count(), 3);
    cr_expect_str_eq(chosen("Q4_K_M"), "x-Q4_K_M.gguf");
    make_tree("config.json 1 consolidated.safetensors 100");
    cr_expect_not_null(strstr(chosen(""), "no model that keepd reads"));
    make_tree("config.json 1 a-1.safetensors 10 a-2.safetensors 10");
    cr_expect_not_null(strstr(chosen(""), "neither model.safetensors nor"));
    hub_tree_close(&tree);
}

/* The settings of vectors: modules.json may name any folder. */
Test(hub_name, modules) {
    make_tree("config.json 1 model.safetensors 100 1_Pooling/config.json 1 2_Dense/config.json 1");
    cr_expect_str_eq(chosen(""), "directory");
    cr_expect_eq(wanted_count(), 3);
    make_tree("config.json 1 model.safetensors 100 1_Pooling/config.json 1 2_Dense/config.json 1 "
              "modules.json 1 2_Dense/model.safetensors 50 a/b/config.json 1 a/xconfig.json 1");
    cr_expect_str_eq(chosen(""), "directory");
    cr_expect_eq(wanted_count(), 7);
    hub_tree_close(&tree);
}

Test(hub_name, shards_by_the_index) {
    static const char index[] =
        "{\"weight_map\": {\"a\": \"2.safetensors\", \"b\": \"1.safetensors\","
        "\"c\": \"2.safetensors\"}}";
    static const char *const wrong[] = {"",
                                        "[]",
                                        "{}",
                                        "{\"weight_map\": []}",
                                        "{\"weight_map\": {\"a\": 1}}",
                                        "{\"weight_map\": {\"a\": \"3.safetensors\"}}"};
    int64_t bytes = 0;
    struct fault fault;
    make_tree("config.json 1 model.safetensors.index.json 5 1.safetensors 10 2.safetensors 20");
    cr_expect_str_eq(chosen(""), "directory");
    cr_expect_eq(wanted_count(), 2);
    cr_expect_eq(hub_want_shards(&tree, index, sizeof index - 1, &bytes, &fault), 0);
    cr_expect_eq(wanted_count(), 4);
    cr_expect_eq(bytes, 30);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        cr_expect_neq(hub_want_shards(&tree, wrong[i], strlen(wrong[i]), &bytes, &fault), 0);
    hub_tree_close(&tree);
}

Test(hub_name, lists_of_files) {
    static const char list[] =
        "[{\"type\":\"directory\",\"oid\":\"x\",\"size\":0,\"path\":\"d\"},"
        "{\"type\":\"file\",\"oid\":\"" OID "\",\"size\":7,\"path\":\"d/a\"},"
        "{\"type\":\"file\",\"oid\":\"" OID "\",\"size\":130,\"path\":\"b\",\"lfs\":{\"oid\":\"" OID
        "012345678901234567890123\",\"size\":9000000000,\"pointerSize\":135}}]";
    struct fault fault = {0};
    hub_tree_close(&tree);
    cr_assert_eq(hub_tree_read(&tree, list, sizeof list - 1, &fault), 0, "%s", fault.text);
    cr_assert_eq(tree.count, 2);
    cr_expect_str_eq(tree.files[0].path, "d/a");
    cr_expect_str_eq(tree.files[0].oid, OID);
    cr_expect_eq(tree.files[1].size, 9000000000);
    cr_expect_eq(strlen(tree.files[1].oid), 64);
    cr_expect_eq(hub_tree_read(&tree, "{}", 2, &fault), ERR_MALFORMED);
    hub_tree_close(&tree);
}

/* Sizes are the hub's word: those that no file has are refused, and sums of the others fit. */
Test(hub_name, sizes_that_no_file_has) {
    static const char *const sizes[] = {"17592186044417", "4611686018427387903",
                                        "9223372036854775807", "1e300", "-1"};
    struct hub_model models[HUB_MODELS_MAX];
    struct fault fault = {0};
    char list[200];
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        snprintf(list, sizeof list,
                 "[{\"type\":\"file\",\"oid\":\"" OID "\",\"size\":%s,\"path\":\"a.gguf\"}]",
                 sizes[i]);
        cr_expect_neq(hub_tree_read(&tree, list, strlen(list), &fault), 0, "%s", sizes[i]);
    }
    cr_expect_eq(tree.count, 0);
    cr_expect_eq(hub_tree_add(&tree, "a", INT64_MAX, OID, &fault), ERR_MALFORMED);
    make_tree("m-00001-of-00002.gguf 17592186044416 m-00002-of-00002.gguf 17592186044416");
    cr_assert_eq(hub_models(&tree, models), 1);
    cr_expect_eq(models[0].bytes, 35184372088832);
    cr_expect_gt(hub_need(models[0].bytes), models[0].bytes);
    hub_tree_close(&tree);
}

/* Every allocation may fail. */
Test(hub_name, short_memory) {
    static const char list[] =
        "[{\"type\":\"file\",\"oid\":\"" OID "\",\"size\":7,\"path\":\"a\"}]";
    struct fault fault;
    for (long n = 0;; n++) {
        mem_fail_after(n);
        const int rc = hub_tree_read(&tree, list, sizeof list - 1, &fault);
        const bool whole = mem_fail_pending();
        mem_fail_after(-1);
        hub_tree_close(&tree);
        if (whole) {
            cr_expect_eq(rc, 0);
            cr_expect_gt(n, 1);
            return;
        }
        cr_expect_eq(rc, ERR_NOMEM);
    }
}

Test(hub_name, what_fits) {
    struct buf out;
    buf_open(&out, 4096);
    make_tree("x-Q4_K_M.gguf 1000000000 x-IQ2_XS.gguf 500000000 x-UD-IQ1_S.gguf 400000000 "
              "x-Q8_0-00001-of-00002.gguf 1000000000 y-F16.gguf 3000000000");
    (void)chosen("Q4_K_M");
    hub_describe(&tree, 2000000000, SIZE_MAX, &out);
    cr_expect_str_eq(
        out.data, "  UD-IQ1_S             0.40 GB, needs 0.73 GB of memory: is not read by keepd\n"
                  "  IQ2_XS               0.50 GB, needs 0.83 GB of memory: is not read by keepd\n"
                  "  Q4_K_M               1.00 GB, needs 1.33 GB of memory: fits\n"
                  "  Q8_0                 1.00 GB, needs 1.33 GB of memory: is not complete\n"
                  "  F16                  3.00 GB, needs 3.33 GB of memory: does not fit\n");
    buf_close(&out);
    hub_tree_close(&tree);
}
