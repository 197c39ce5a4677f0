/* Measures the cost of a conversation on disk: bytes, and milliseconds of every part of writing and
 * reading it, for a cache of a real model's shape, beside the full cache of the same dialogue.
 *
 * Usage: bench_state DIR [BUDGET [TOKENS]]. The defaults are Qwen3-0.6B (28 layers, 8 KV heads of
 * 128, bf16), budget 1024, a dialogue of 32,768 tokens. DIR must be empty or missing; it stays. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/mem.h"
#include "engine/disk/store.h"
#include "kernels/cpu/cache.h"

enum { LAYERS = 28, HEADS = 8, DIM = 128, BLOCKS = 1 + LAYERS * HEADS };

static double milliseconds(int64_t since) {
    return (double)(clock_ns() - since) * 1e-6;
}

static struct cpu_cache open_cache(int budget) {
    int64_t pages = (int64_t)LAYERS * HEADS * ((budget + 15) / 16 + 1) * 2;
    struct kern_cache_options options = {.layers = LAYERS,
                                         .heads_q = 2 * HEADS,
                                         .heads_kv = HEADS,
                                         .head_dim = DIM,
                                         .dtype = KERN_BF16,
                                         .pages = pages,
                                         .slots = 2,
                                         .max_positions = budget};
    struct cpu_cache cache;
    struct fault fault = {0};
    CHECK_MSG(cpu_cache_open(&cache, &options, 1, &fault) == 0, "%s", fault.text);
    struct kern_span span = {.slot = 0, .count = budget};
    struct kern_batch batch = {.spans = &span, .span_count = 1, .rows = budget};
    CHECK(cpu_cache_begin_step(&cache, &batch) == 0);
    for (int64_t page = 0; page < pages / 2; page++) /* not zero: zeros could be compressed */
        for (size_t i = 0; i < cache.page_size; i++)
            ((char *)cpu_cache_k(&cache, (uint32_t)page))[i] = (char)(i * 31 + (size_t)page * 7);
    return cache;
}

static char *export_all(const struct cpu_cache *cache, struct state_head *head,
                        const int32_t *tokens, size_t *size) {
    uint64_t sizes[BLOCKS];
    size_t bytes = 0;
    for (int i = 0; i < BLOCKS; i++) {
        sizes[i] = cpu_cache_snapshot_size(cache, 0, i);
        bytes += (size_t)sizes[i];
    }
    *size = state_file_size(head->token_count, BLOCKS, bytes);
    CHECK(*size > 0);
    head->file_size = *size;
    char *data = mem_must_alloc(*size, 1);
    size_t at = state_write_head(head, tokens, sizes, data);
    for (int i = 0; i < BLOCKS; at += (size_t)sizes[i++])
        cpu_cache_snapshot_export(cache, 0, i, data + at);
    return data;
}

int main(int argc, char **argv) {
    int budget = argc > 2 ? atoi(argv[2]) : 1024, count = argc > 3 ? atoi(argv[3]) : 32768;
    struct store_options options = {
        .dir = argc > 1 ? argv[1] : "bench-state",
        .bytes = (int64_t)1 << 40,
        .identity = {.dtype = KERN_BF16, .layers = LAYERS, .heads_kv = HEADS, .head_dim = DIM},
        .inline_io = true};
    struct store *store;
    struct fault fault = {0};
    if (store_open(&options, &store, &fault) != 0) {
        fprintf(stderr, "%s: %s\n", fault.field, fault.text);
        return 1;
    }
    struct cpu_cache cache = open_cache(budget);
    int32_t *tokens = mem_must_alloc((size_t)count, sizeof *tokens);
    struct state_head head = {.identity = options.identity,
                              .id = (uint64_t)clock_ns(),
                              .kv = {.budget = budget, .buffer = 128, .chunk = 512},
                              .token_count = count,
                              .prompt_end = count,
                              .block_count = BLOCKS};
    kv_params_set_policy(&head.kv, policy_find("global"));
    head.prompt_hash = head.token_hash = conversation_hash(CONVERSATION_HASH, tokens, count);
    size_t size;
    uint64_t id;
    int rc;
    const struct state_view *view = NULL;
    int64_t start = clock_ns();
    char *data = export_all(&cache, &head, tokens, &size);
    double copied = milliseconds(start);
    start = clock_ns();
    store_save(store, &head, data, size);
    CHECK(store_saved(store, &id, &rc) && rc == 0);
    double written = milliseconds(start);
    start = clock_ns();
    CHECK(store_load(store, id, &view) == 0);
    double read = milliseconds(start);
    start = clock_ns();
    struct kern_report report;
    CHECK(cpu_cache_snapshot_check(&cache, view->blocks, BLOCKS, budget, &report, &fault) == 0);
    for (int i = 0; i < BLOCKS; i++)
        CHECK(cpu_cache_snapshot_import(&cache, 1, i, &view->blocks[i]) == 0);
    double imported = milliseconds(start);
    double full = 2.0 * LAYERS * HEADS * DIM * 2 * count;
    printf("budget %d, %d tokens: file %.1f MB; the full cache would be %.1f MB (%.1f x)\n", budget,
           count, (double)size * 1e-6, full * 1e-6, full / (double)size);
    printf("copied out in %.0f ms; sealed, written and synced in %.0f ms; read and checked in %.0f "
           "ms; taken in in %.0f ms\n",
           copied, written, read, imported);
    store_unload(store);
    mem_free(tokens);
    cpu_cache_close(&cache);
    store_close(store);
    return 0;
}
