/* A state file, its seal taken for granted: the parser, and what the cache makes of the blocks. The
 * first byte picks the cache's shape; what is accepted must leave a cache whose own check holds. */
#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "engine/disk/state.h"
#include "kernels/cpu/cache.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void try_blocks(const struct state_view *view, uint8_t shape) {
    struct kern_cache_options options = {.layers = 1 + (shape & 1),
                                         .heads_q = 4,
                                         .heads_kv = 1 + (shape >> 1 & 1),
                                         .head_dim = 16,
                                         .dtype = shape & 4 ? KERN_BF16 : KERN_F32,
                                         .pages = 40,
                                         .slots = 2,
                                         .max_positions = 500};
    struct cpu_cache cache;
    struct kern_report report = {0};
    struct fault fault = {0};
    CHECK(cpu_cache_open(&cache, &options, 1, &fault) == 0);
    int rc = cpu_cache_snapshot_check(&cache, view->blocks, view->head.block_count,
                                      view->head.token_count, &report, &fault);
    bool checked = rc == 0;
    for (int i = 0; i < view->head.block_count && rc == 0; i++)
        rc = cpu_cache_snapshot_import(&cache, 1, i, &view->blocks[i]);
    if (checked && report.pages > options.pages) CHECK(rc == ERR_FULL);
    if (checked && report.pages <= options.pages) CHECK(rc == 0);
    CHECK_MSG(cpu_cache_check(&cache, &fault) == 0, "%s", fault.text);
    cpu_cache_release(&cache, 1);
    cpu_cache_close(&cache);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!size) return 0;
    struct state_view view;
    struct fault fault = {0};
    char *copy = mem_must_alloc(size, 1); /* a separate block, so that overruns are detected */
    memcpy(copy, data + 1, size - 1);
    int rc = state_parse(copy, size - 1, &view, &fault);
    CHECK(rc == fault.code);
    if (rc == 0) {
        CHECK(view.head.prompt_end <= view.head.token_count && view.head.file_size == size - 1);
        try_blocks(&view, data[0]);
        state_view_close(&view);
    }
    mem_free(copy);
    return 0;
}
