/* Devices that only the emulator can be, chosen by its environment (device_emu.cc): what the
 * backend refuses on them and how it assigns several. The other emu_*.c run on a real device as
 * well (bench/gpu). */
#include <criterion/criterion.h>

#include "both.h"

Test(emu_devices, devices_that_are_refused) {
    const struct cuda_options cuda = {.device = 0};
    struct fault fault = {0};
    struct kern *kern;
    setenv("KEEPD_EMU_CAPABILITY", "75", 1);
    cr_assert_eq(cuda_open(&cuda, &kern, &fault), ERR_UNSUPPORTED);
    cr_assert_str_eq(fault.field, "device");
    cr_assert_str_eq(fault.text, "the device has compute capability 7.5; 8.0 (Ampere) or later is "
                                 "needed");
}

Test(emu_devices, what_needs_more_shared_memory_is_refused) {
    static const struct kern_rule adds = {.score = KERN_SCORE_ATTENTION};
    static const struct kern_rule looks = {.score = KERN_SCORE_ATTENTION,
                                           .observe = {.window = 32}};
    struct kern_cache_options options = {.layers = 1,
                                         .heads_q = 16,
                                         .heads_kv = 1,
                                         .head_dim = 256,
                                         .dtype = KERN_BF16,
                                         .pages = 16,
                                         .slots = 1,
                                         .max_positions = 64};
    const struct cuda_options cuda = {.device = 0};
    struct fault fault = {0};
    struct kern *kern;
    setenv("KEEPD_EMU_CAPABILITY", "120", 1);
    MUST(cuda_open(&cuda, &kern, NULL));
    cr_assert_eq(kern->ops->cache_open(kern, &options, &fault), ERR_UNSUPPORTED);
    cr_assert_str_eq(fault.field, "device");
    cr_assert_str_eq(fault.text, "a block of the device has 99 KiB of shared memory; heads of 256 "
                                 "numbers need 132 KiB");
    struct kern_cache_options latent = options;
    latent.heads_q = 128;
    latent.head_dim = 576;
    latent.latent = 512;
    cr_assert_eq(kern->ops->cache_open(kern, &latent, &fault), ERR_UNSUPPORTED);
    cr_assert_str_eq(fault.field, "device");
    options.head_dim = 128;
    MUST(kern->ops->cache_open(kern, &options, &fault));
    MUST(kern->ops->prepare(kern, 0, &adds, 10));
    cr_assert_eq(kern->ops->prepare(kern, 0, &looks, 10), ERR_UNSUPPORTED);
    MUST(kern->ops->prepare(kern, 0, NULL, 10));
    kern->ops->close(kern);
}

Test(emu_devices, devices_without_e4m3_products_refuse_them) {
    static const char *const others[] = {"80", "89", "120"};
    static const char *const names[] = {"8.0", "8.9", "12.0"};
    static const uint8_t numbers[32 * 64];
    static const float scales[32];
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        const struct cuda_options options = {.device = 0};
        struct kern_weight *weight;
        struct fault fault = {0};
        struct kern *kern;
        char text[200];
        const struct kern_matrix file = {
            .data = numbers, .dtype = KERN_E4M3, .rows = 32, .cols = 64, .scale = scales};
        setenv("KEEPD_EMU_CAPABILITY", others[i], 1);
        MUST(cuda_open(&options, &kern, NULL));
        cr_assert_eq(kern->ops->weight_load(kern, &file, 1, KERN_SHARD_ROWS, &weight, &fault),
                     ERR_UNSUPPORTED);
        snprintf(text, sizeof text,
                 "fp8 products with a scale per row need compute capability 9.0 (Hopper); the "
                 "device has %s",
                 names[i]);
        cr_assert_str_eq(fault.field, "quantization");
        cr_assert_str_eq(fault.text, text);
        kern->ops->close(kern);
    }
}

/* Every rank of every replica has a device that no other has. */
Test(emu_devices, devices_are_given_out_once) {
    setenv("KEEPD_EMU_DEVICES", "8", 1);
    for (int ranks = 1; ranks <= 8; ranks *= 2) {
        bool taken[8] = {false};
        for (int replica = 0; replica < 8 / ranks; replica++) {
            int devices[COMM_RANKS_MAX];
            MUST(cuda_place_ranks(8 / ranks, ranks, replica, devices, NULL));
            for (int r = 0; r < ranks; r++) {
                cr_assert(devices[r] >= 0 && devices[r] < 8 && !taken[devices[r]]);
                cr_assert(r == 0 || devices[r] == devices[r - 1] + 1); /* neighbours */
                taken[devices[r]] = true;
            }
        }
        for (int i = 0; i < 8; i++) cr_assert(taken[i]);
    }
}

Test(emu_devices, too_few_devices_are_the_trouble_of_the_option_that_wants_them) {
    static const struct {
        const char *devices;
        int replicas, ranks;
        const char *field, *text;
    } cases[] = {
        {"0", 1, 1, "device", "no CUDA device: none is visible"},
        {"1", 1, 2, "tensor-parallel-size", "2 ranks need a GPU each; this machine shows 1"},
        {"3", 2, 4, "tensor-parallel-size", "4 ranks need a GPU each; this machine shows 3"},
        {"3", 2, 2, "data-parallel-size",
         "2 replicas of 2 ranks need 4 GPUs; this machine shows 3"},
        {"1", 2, 1, "data-parallel-size", "2 replicas need a GPU each; this machine shows 1"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct fault fault = {0};
        int devices[COMM_RANKS_MAX];
        setenv("KEEPD_EMU_DEVICES", cases[i].devices, 1);
        cr_assert_eq(cuda_place_ranks(cases[i].replicas, cases[i].ranks, 0, devices, &fault),
                     ERR_NOTFOUND, "case %zu", i);
        cr_assert_str_eq(fault.field, cases[i].field);
        cr_assert_str_eq(fault.text, cases[i].text);
    }
}

/* Models can share the memory of the devices that they use, whatever the host has. */
Test(emu_devices, unused_memory_is_that_of_the_devices) {
    setenv("KEEPD_EMU_DEVICES", "2", 1);
    setenv("KEEPD_EMU_MEMORY", "10", 1);
    cr_assert_eq(cuda_unused_memory(1, 1), 10 << 20);
    cr_assert_eq(cuda_unused_memory(2, 1), 20 << 20);
    cr_assert_eq(cuda_unused_memory(1, 2), 20 << 20);
    cr_assert_eq(cuda_unused_memory(2, 2), 0);
    setenv("KEEPD_EMU_DEVICES", "0", 1);
    cr_assert_eq(cuda_unused_memory(1, 1), 0);
}
