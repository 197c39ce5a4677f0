/* Tests which backend a device option opens. On a machine without a GPU, a build with CUDA gives
 * the same results, except for the error code. */
#include <criterion/criterion.h>
#include <string.h>

#include "engine/backend.h"

static struct kern *open_as(const char *device) {
    struct kern *kern = NULL;
    struct fault fault = {0};
    const struct backend_options options = {
        .device = device, .cpu_path = "reference", .threads = 1};
    cr_assert_eq(backend_open(&options, &kern, &fault), 0, "%s", fault.text);
    return kern;
}

Test(backend, cpu_is_always_there) {
    struct kern *kern = open_as("cpu");
    cr_assert_str_eq(kern->ops->name, "cpu-reference");
    kern->ops->close(kern);
}

Test(backend, auto_opens_one) {
    struct kern *kern = open_as("auto");
    kern->ops->close(kern);
    kern = open_as(NULL);
    kern->ops->close(kern);
}

Test(backend, cuda_is_opened_or_refused_by_name) {
    struct kern *kern = NULL;
    struct fault fault = {0};
    const struct backend_options options = {.device = "cuda", .cpu_path = "reference"};
    int rc = backend_open(&options, &kern, &fault);
    if (rc == 0) {
        cr_assert_str_eq(kern->ops->name, "cuda");
        kern->ops->close(kern);
        return;
    }
    cr_assert(rc == ERR_UNSUPPORTED || rc == ERR_NOTFOUND);
    cr_assert_str_eq(fault.field, "device");
    cr_assert(strlen(fault.text) > 10);
}

Test(backend, ranks_are_one_backend) {
    struct kern *kern[2] = {NULL};
    struct fault fault = {0};
    struct backend_options options = {
        .device = "cpu", .cpu_path = "portable", .threads = 2, .replicas = 2, .ranks = 4};
    cr_assert_eq(backend_open(&options, kern, &fault), 0, "%s", fault.text);
    for (int i = 0; i < 2; i++) {
        cr_assert_str_eq(kern[i]->ops->name, "cpu-portable, 4 ranks");
        kern[i]->ops->close(kern[i]);
    }
    options.ranks = 3;
    cr_assert_eq(backend_open(&options, kern, &fault), ERR_INVALID);
    cr_assert_str_eq(fault.field, "tensor-parallel-size");
}

Test(backend, an_unknown_cpu_path_is_named) {
    struct kern *kern = NULL;
    struct fault fault = {0};
    const struct backend_options options = {.device = "cpu", .cpu_path = "abacus"};
    cr_assert_eq(backend_open(&options, &kern, &fault), ERR_UNSUPPORTED);
    cr_assert_str_eq(fault.field, "abacus");
}
