/* Tests kernels/snapshot.c with the CPU cache: what goes out comes back, into another page layout
 * too, and bytes that are not a snapshot are refused without being believed. */
#include <criterion/criterion.h>

#include "base/mem.h"
#include "tests/unit/kernels/cache_content.h"

#define STREAMS 6
#define BLOCKS  (1 + STREAMS)
#define WINDOW  5
#define LENGTH  23

static const struct kern_heads *unequal; /* heads of the layers; NULL: equal ones */

/* `page_slots` 0: as many as there are. */
static struct cpu_cache open_cache(enum kern_dtype dtype, int page_slots) {
    struct kern_cache_options options = {.layers = 2,
                                         .heads_q = unequal ? 4 : 6,
                                         .heads_kv = unequal ? 4 : 3,
                                         .head_dim = unequal ? 512 : 256,
                                         .heads = unequal,
                                         .dtype = dtype,
                                         .pages = 200,
                                         .slots = 4,
                                         .max_positions = 100};
    struct cpu_cache cache;
    struct fault fault = {0};
    cr_assert_eq(cpu_cache_open(&cache, &options, 1, &fault), 0, "%s", fault.text);
    if (page_slots == 0) return cache;
    cr_assert_leq(page_slots, cache.page_slots);
    cache.page_slots = page_slots; /* another layout: the rest of each page stays unused */
    for (int i = 0; i < cache.options.layers; i++)
        cache.layers[i].page_slots = cache.shapes[i].page_slots = page_slots;
    return cache;
}

/* A sequence that has evicted, so that its streams differ in length, with queries in its ring. */
static void fill(struct cpu_cache *cache, int slot, int32_t count, int32_t window) {
    struct kern_rule observing = {.score = KERN_SCORE_ATTENTION, .observe = {.window = window}};
    struct kern_rule rule = {
        .score = KERN_SCORE_RETENTION, .scope = KERN_SCOPE_SEQUENCE, .horizon = 9};
    struct kern_span span = {
        .slot = slot, .count = count, .pos = 0, .rule = window > 0 ? &observing : &rule};
    struct kern_batch batch = {.spans = &span, .span_count = 1, .rows = count};
    cr_assert_eq(cpu_cache_begin_step(cache, &batch), 0);
    content_write(cache, slot, 8, count);
    for (int layer = 0; layer < 2 && window > 0; layer++)
        for (int i = 0; i < window * (int)(cpu_cache_query_bytes(cache, layer) / sizeof(float));
             i++)
            cpu_cache_query(cache, slot, layer, 0)[i] = (float)(layer * 7919 + i);
    struct kern_evict due = {.slot = slot, .tokens = count, .budget = count / 2 + 1, .rule = &rule};
    cr_assert_eq(cpu_cache_evict(cache, &due, 1), 0);
}

static size_t export_all(const struct cpu_cache *cache, int slot, struct kern_block *blocks) {
    size_t total = 0;
    for (int i = 0; i < BLOCKS; i++) {
        size_t size = cpu_cache_snapshot_size(cache, slot, i);
        char *data = mem_must_alloc(size, 1); /* a block of its own: overruns are seen */
        cpu_cache_snapshot_export(cache, slot, i, data);
        blocks[i] = (struct kern_block){data, size};
        total += size;
    }
    return total;
}

static void free_all(struct kern_block *blocks) {
    for (int i = 0; i < BLOCKS; i++) mem_free((void *)(uintptr_t)blocks[i].data);
}

/* Checked as the snapshot of so many tokens, then taken in block by block; what fails goes again.
 */
static int import_all(struct cpu_cache *cache, int slot, const struct kern_block *blocks,
                      int32_t tokens) {
    struct kern_report report;
    struct fault fault = {0};
    int rc = cpu_cache_snapshot_check(cache, blocks, BLOCKS, tokens, &report, &fault);
    for (int i = 0; i < BLOCKS && rc == 0; i++)
        rc = cpu_cache_snapshot_import(cache, slot, i, &blocks[i]);
    if (rc != 0) cpu_cache_release(cache, slot);
    return rc;
}

static int64_t pages_used(const struct cpu_cache *cache) {
    struct kern_cache_stats stats;
    cpu_cache_stats(cache, &stats);
    return stats.pages_used;
}

static void expect_same(const struct kern_block *a, const struct kern_block *b) {
    for (int i = 0; i < BLOCKS; i++) {
        cr_assert_eq(a[i].size, b[i].size);
        cr_assert_eq(memcmp(a[i].data, b[i].data, a[i].size), 0, "block %d", i);
    }
}

static void round_trip(enum kern_dtype dtype, int from_slots, int to_slots, int32_t window) {
    struct cpu_cache from = open_cache(dtype, from_slots), to = open_cache(dtype, to_slots);
    struct kern_block out[BLOCKS], back[BLOCKS];
    struct kern_report before = {0}, checked = {0}, after = {0};
    struct fault fault = {0};
    fill(&from, 1, LENGTH, window);
    export_all(&from, 1, out);
    cpu_cache_report(&from, 1, &before);
    cr_assert_eq(cpu_cache_snapshot_check(&to, out, BLOCKS, LENGTH, &checked, &fault), 0, "%s",
                 fault.text);
    cr_assert_eq(checked.entries, before.entries);
    cr_assert_eq(import_all(&to, 3, out, LENGTH), 0);
    cr_assert_eq(cpu_cache_check(&to, &fault), 0, "%s", fault.text);
    cpu_cache_report(&to, 3, &after);
    cr_assert(after.pages == checked.pages && pages_used(&to) == after.pages);
    for (int stream = 0; stream < STREAMS; stream++) {
        int32_t length = *cpu_cache_length(&to, 3, stream);
        cr_assert_eq(length, *cpu_cache_length(&from, 1, stream));
        for (int32_t i = 0; i < length; i++) cr_assert(content_holds(&to, 3, stream, i, 8));
    }
    export_all(&to, 3, back);
    expect_same(out, back);
    cpu_cache_release(&to, 3);
    cr_assert_eq(pages_used(&to), 0);
    free_all(out);
    free_all(back);
    cpu_cache_close(&from);
    cpu_cache_close(&to);
}

/* Layers whose heads differ. */
Test(snapshot, comes_back_with_unequal_layers) {
    static const struct kern_heads heads[][2] = {{{4, 256}, {2, 512}}, {{2, 512}, {4, 256}}};
    for (int i = 0; i < 2; i++) {
        unequal = heads[i];
        round_trip(KERN_F32, 0, 0, 0);
        round_trip(KERN_BF16, 0, 0, WINDOW);
        round_trip(KERN_ROW8, 0, 0, WINDOW);
    }
    unequal = NULL;
}

Test(snapshot, comes_back_bit_for_bit_in_any_layout) {
    round_trip(KERN_F32, 4, 4, 0);
    round_trip(KERN_F32, 4, 3, 0);
    round_trip(KERN_F32, 2, 4, WINDOW);
    round_trip(KERN_BF16, 8, 3, WINDOW);
    round_trip(KERN_BF16, 5, 8, 0);
    round_trip(KERN_E4M3, 16, 5, WINDOW);
    round_trip(KERN_ROW8, 7, 16, WINDOW);
    round_trip(KERN_ROW4, 32, 5, 0);
}

/* The slot goes on where it was: appending, truncating and forking work as on the original. */
Test(snapshot, an_imported_slot_goes_on) {
    struct cpu_cache from = open_cache(KERN_F32, 4), to = open_cache(KERN_F32, 3);
    struct kern_block out[BLOCKS], a[BLOCKS], b[BLOCKS];
    struct fault fault = {0};
    fill(&from, 0, LENGTH, 0);
    export_all(&from, 0, out);
    cr_assert_eq(import_all(&to, 2, out, LENGTH), 0);
    cr_assert_eq(cpu_cache_fork(&to, 2, 0), 0);
    struct cpu_cache *caches[] = {&from, &to};
    for (int i = 0; i < 2; i++) {
        struct kern_span span = {.slot = 0, .count = 4, .pos = LENGTH - 3};
        struct kern_batch batch = {.spans = &span, .span_count = 1, .rows = 4};
        cr_assert_eq(cpu_cache_truncate(caches[i], 0, LENGTH - 3), 0);
        cr_assert_eq(cpu_cache_begin_step(caches[i], &batch), 0);
        content_write(caches[i], 0, 4, 4);
        cr_assert_eq(cpu_cache_check(caches[i], &fault), 0, "%s", fault.text);
    }
    export_all(&from, 0, a);
    export_all(&to, 0, b);
    expect_same(a, b);
    free_all(a);
    export_all(&to, 2, a); /* the fork's writing did not reach what it came from */
    expect_same(a, out);
    free_all(out);
    free_all(a);
    free_all(b);
    cpu_cache_close(&from);
    cpu_cache_close(&to);
}

static void refuse(struct cpu_cache *cache, const struct kern_block *blocks, int count,
                   int32_t tokens, int rc) {
    struct kern_report report = {0};
    struct fault fault = {0};
    int found = cpu_cache_snapshot_check(cache, blocks, count, tokens, &report, &fault);
    cr_assert_eq(found, rc, "%d %s", found, fault.text);
    cr_assert(fault.code == rc && fault.text[0] != '\0');
}

Test(snapshot, other_shapes_are_refused) {
    struct cpu_cache from = open_cache(KERN_F32, 4), bf16 = open_cache(KERN_BF16, 4);
    struct cpu_cache short_one = open_cache(KERN_F32, 4), fp8 = open_cache(KERN_E4M3, 4);
    struct kern_block out[BLOCKS + 1] = {{0}};
    fill(&from, 0, LENGTH, WINDOW);
    export_all(&from, 0, out);
    refuse(&bf16, out, BLOCKS, LENGTH, ERR_MALFORMED);
    refuse(&fp8, out, BLOCKS, LENGTH, ERR_MALFORMED);
    refuse(&short_one, out, BLOCKS - 1, LENGTH, ERR_MALFORMED);
    out[BLOCKS] = (struct kern_block){"", 0};
    refuse(&short_one, out, BLOCKS + 1, LENGTH, ERR_MALFORMED);
    short_one.options.max_positions = LENGTH - 1;
    refuse(&short_one, out, BLOCKS, LENGTH, ERR_LIMIT);
    short_one.options.max_positions = LENGTH;
    short_one.free_count = 3;
    cr_assert_eq(import_all(&short_one, 0, out, LENGTH), ERR_FULL);
    cr_assert(short_one.free_count == 3 && !short_one.slots[0].in_use);
    free_all(out);
    cpu_cache_close(&from);
    cpu_cache_close(&bf16);
    cpu_cache_close(&fp8);
    cpu_cache_close(&short_one);
}

/* A slot that would go on at another position than its tokens say. */
Test(snapshot, another_number_of_tokens_is_refused) {
    struct cpu_cache from = open_cache(KERN_F32, 4), to = open_cache(KERN_F32, 4);
    struct kern_block out[BLOCKS];
    fill(&from, 0, LENGTH, 0);
    export_all(&from, 0, out);
    refuse(&to, out, BLOCKS, LENGTH - 1, ERR_MALFORMED);
    refuse(&to, out, BLOCKS, LENGTH + 1, ERR_MALFORMED);
    free_all(out);
    cpu_cache_close(&from);
    cpu_cache_close(&to);
}

/* Every block cut at every length. */
Test(snapshot, cut_blocks_are_refused) {
    struct cpu_cache from = open_cache(KERN_F32, 4), to = open_cache(KERN_F32, 4);
    struct kern_block out[BLOCKS];
    fill(&from, 0, 5, 2);
    export_all(&from, 0, out);
    for (int i = 0; i < BLOCKS; i++) {
        struct kern_block whole = out[i];
        for (size_t size = 0; size < whole.size; size++) {
            char *cut = mem_must_alloc(size > 0 ? size : 1, 1);
            memcpy(cut, whole.data, size);
            out[i] = (struct kern_block){cut, size};
            refuse(&to, out, BLOCKS, 5, ERR_MALFORMED);
            mem_free(cut);
        }
        out[i] = whole;
    }
    free_all(out);
    cpu_cache_close(&from);
    cpu_cache_close(&to);
}

/* A flipped bit either is refused or gives a cache whose own check holds: numbers that lead the
 * reader (lengths, positions, names, sizes) are never believed. */
Test(snapshot, flipped_bits_do_no_harm) {
    struct cpu_cache from = open_cache(KERN_F32, 4), to = open_cache(KERN_F32, 4);
    struct kern_block out[BLOCKS];
    struct fault fault = {0};
    int refused = 0;
    fill(&from, 0, 9, 2);
    export_all(&from, 0, out);
    for (int i = 0; i < BLOCKS; i++) {
        char *data = (char *)(uintptr_t)out[i].data;
        size_t end = out[i].size < 600 ? out[i].size : 600; /* headers and positions come first */
        for (size_t bit = 0; bit < end * 8; bit++) {
            data[bit / 8] = (char)(data[bit / 8] ^ 1 << bit % 8);
            if (import_all(&to, 0, out, 9) != 0)
                refused++;
            else
                cr_assert_eq(cpu_cache_check(&to, &fault), 0, "%s", fault.text);
            cpu_cache_release(&to, 0);
            data[bit / 8] = (char)(data[bit / 8] ^ 1 << bit % 8);
        }
    }
    cr_assert_gt(refused, 1000);
    free_all(out);
    cpu_cache_close(&from);
    cpu_cache_close(&to);
}
