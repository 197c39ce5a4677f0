/* Opening the CUDA backend's cache with every allocation failing in turn, device memory included:
 * the emulated device takes part in mem_fail_after, a real one cannot. */
#include <criterion/criterion.h>

#include "both.h"

/* Every allocation of opening may fail; nothing stays behind (the leak checker looks). */
Test(emu_alloc, opening_survives_every_failed_allocation) {
    struct kern_cache_options options = {.layers = 1,
                                         .heads_q = 2,
                                         .heads_kv = 1,
                                         .head_dim = 64,
                                         .dtype = KERN_BF16,
                                         .pages = 10,
                                         .slots = 2,
                                         .max_positions = 100};
    int failures = 0;
    for (int n = 0; n < 40; n++) {
        struct kern *kern;
        struct fault fault = {0};
        struct cuda_options cuda = {.device = 0};
        MUST(cuda_open(&cuda, &kern, &fault));
        mem_fail_after(n);
        int rc = kern->ops->cache_open(kern, &options, &fault);
        bool pending = mem_fail_pending();
        mem_fail_after(-1);
        cr_assert_eq(rc, pending ? 0 : ERR_NOMEM, "allocation %d", n);
        failures += rc != 0;
        kern->ops->close(kern);
    }
    cr_assert(failures > 5);
}
