/* Where a model's gates are found, and which files of gates are refused or left out. */
#include <criterion/criterion.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mem.h"
#include "kernels/cpu/cpu.h"
#include "kernels/ranks.h"
#include "model/base_digest.h"
#include "model/gates.h"
#include "model/save_gates.h"

enum { WIDTH = 2 };

/* A model in a folder of its own, and a folder for gates that were fitted. */
struct place {
    char dir[PATH_MAX / 4], model[PATH_MAX / 2], cache[PATH_MAX / 2];
    struct base_digest base;
    int layers, heads, d_model;
};

static struct model *open_model(const struct place *p, const char *gates, struct kern **kern,
                                struct fault *fault) {
    const struct cpu_options cpu = {.path = "reference", .threads = 1};
    const struct model_options options = {.dir = p->model,
                                          .gates = gates,
                                          .gates_cache = p->cache,
                                          .rows_max = 8,
                                          .logits_max = 8,
                                          .threads = 1};
    struct model *model = NULL;
    *fault = (struct fault){0};
    cr_assert_eq(ranks_open_cpu(&cpu, 1, kern, fault), 0);
    if (model_open(*kern, &options, &model, fault)) {
        (*kern)->ops->close(*kern);
        return NULL;
    }
    return model;
}

static void close_model(struct model *model, struct kern *kern) {
    model_close(model);
    kern->ops->close(kern);
}

static void link_into(const char *folder, const char *name) {
    char from[PATH_MAX], to[PATH_MAX];
    snprintf(from, sizeof from, "%s/tests/data/models/qwen3/%s", KEEPD_SOURCE_DIR, name);
    snprintf(to, sizeof to, "%s/%s", folder, name);
    cr_assert_eq(symlink(from, to), 0);
}

static struct place open_place(void) {
    struct place p = {.dir = "/tmp/keepd-test-XXXXXX"};
    struct fault fault = {0};
    struct kern *kern;
    cr_assert_not_null(mkdtemp(p.dir));
    snprintf(p.model, sizeof p.model, "%s/model", p.dir);
    snprintf(p.cache, sizeof p.cache, "%s/cache", p.dir);
    cr_assert_eq(mkdir(p.model, 0700), 0);
    cr_assert_eq(mkdir(p.cache, 0700), 0);
    link_into(p.model, "config.json");
    link_into(p.model, "model.safetensors");
    cr_assert_eq(base_digest_of(p.model, 0, &p.base, &fault), 0, "%s", fault.text);
    struct model *model = open_model(&p, NULL, &kern, &fault);
    cr_assert_not_null(model, "%s", fault.text);
    p.layers = model_config(model)->layers;
    p.heads = model_config(model)->heads_kv;
    p.d_model = model_config(model)->d_model;
    close_model(model, kern);
    return p;
}

static void close_place(const struct place *p) {
    char command[PATH_MAX];
    snprintf(command, sizeof command, "rm -r %s", p->dir);
    cr_assert_eq(system(command), 0);
}

static void give(void *arg, int layer, float *w1, float *b1, float *last, float *bias) {
    const struct place *p = arg;
    (void)layer;
    memset(w1, 0, (size_t)(WIDTH * p->d_model) * sizeof *w1);
    memset(b1, 0, WIDTH * sizeof *b1);
    memset(last, 0, (size_t)(p->heads * WIDTH) * sizeof *last);
    memset(bias, 0, (size_t)p->heads * sizeof *bias);
}

static void write_gates(struct place *p, const char *path, const struct base_digest *base) {
    struct save_gates gates = {
        .header = gates_header_unknown, .d_model = p->d_model, .layer = give, .arg = p};
    struct save_files files;
    struct fault fault = {0};
    gates.header.width = WIDTH;
    gates.header.layers = p->layers;
    gates.header.heads = p->heads;
    gates.header.base = *base;
    cr_assert_eq(save_files_replace(&files, "out", path, &fault), 0, "%s", fault.text);
    int rc = save_files_close(&files, save_gates(&files, &gates, &fault), &fault);
    cr_assert_eq(rc, 0, "%s", fault.text);
}

static void expect_from(const struct place *p, const char *gates, enum gates_from from,
                        const char *path) {
    struct fault fault;
    struct kern *kern;
    struct model *model = open_model(p, gates, &kern, &fault);
    cr_assert_not_null(model, "%s: %s", fault.field, fault.text);
    cr_expect_eq(model_gates_from(model), from);
    cr_expect_str_eq(model_gates_path(model), path);
    cr_expect_eq(model_has_gates(model), from != GATES_NONE);
    close_model(model, kern);
}

static void expect_refused(const struct place *p, const char *gates, const char *text) {
    struct fault fault;
    struct kern *kern;
    cr_assert_null(open_model(p, gates, &kern, &fault));
    cr_expect_str_eq(fault.field, "gates");
    cr_expect_not_null(strstr(fault.text, text), "%s", fault.text);
}

static void cached_name(const struct place *p, char out[PATH_MAX]) {
    snprintf(out, PATH_MAX, "%s/%.16s-%.16s.safetensors", p->cache, p->base.vectors,
             p->base.matrices);
}

Test(find_gates, given_then_beside_then_cached) {
    struct place p = open_place();
    char given[PATH_MAX], beside[PATH_MAX], cached[PATH_MAX];
    snprintf(given, sizeof given, "%s/mine", p.dir);
    snprintf(beside, sizeof beside, "%s/gates.safetensors", p.model);
    cached_name(&p, cached);
    expect_from(&p, NULL, GATES_NONE, "");
    write_gates(&p, cached, &p.base);
    expect_from(&p, NULL, GATES_CACHED, cached);
    write_gates(&p, beside, &p.base);
    expect_from(&p, NULL, GATES_BESIDE, beside);
    write_gates(&p, given, &p.base);
    expect_from(&p, given, GATES_GIVEN, given);
    expect_from(&p, "", GATES_NONE, "");
    close_place(&p);
}

Test(find_gates, a_file_without_a_base_is_used_only_if_it_is_given) {
    const struct base_digest none = {0};
    struct place p = open_place();
    char beside[PATH_MAX];
    snprintf(beside, sizeof beside, "%s/gates.safetensors", p.model);
    write_gates(&p, beside, &none);
    expect_refused(&p, NULL, "names no base model");
    expect_from(&p, beside, GATES_GIVEN, beside);
    expect_from(&p, "", GATES_NONE, "");
    close_place(&p);
}

Test(find_gates, another_models_are_refused) {
    struct place p = open_place();
    struct base_digest other = p.base;
    char beside[PATH_MAX];
    snprintf(beside, sizeof beside, "%s/gates.safetensors", p.model);
    other.vectors[0] = other.vectors[0] == '0' ? '1' : '0';
    write_gates(&p, beside, &other);
    expect_refused(&p, NULL, "another base model");
    expect_refused(&p, beside, "another base model");
    close_place(&p);
}

/* Gates beside a model may be another quantisation's; those in the cache were fitted to exactly
 * this one, and what is there instead is no reason to refuse a start. */
Test(find_gates, what_is_wrong_in_the_cache_is_left_out) {
    const struct base_digest none = {0};
    struct place p = open_place();
    struct base_digest quantised = p.base;
    char beside[PATH_MAX], cached[PATH_MAX];
    snprintf(beside, sizeof beside, "%s/gates.safetensors", p.model);
    cached_name(&p, cached);
    quantised.matrices[20] = quantised.matrices[20] == '0' ? '1' : '0';
    write_gates(&p, cached, &quantised);
    expect_from(&p, NULL, GATES_NONE, "");
    write_gates(&p, cached, &none);
    expect_from(&p, NULL, GATES_NONE, "");
    cr_assert_eq(truncate(cached, 100), 0);
    expect_from(&p, NULL, GATES_NONE, "");
    write_gates(&p, beside, &quantised);
    expect_from(&p, NULL, GATES_BESIDE, beside);
    close_place(&p);
}
