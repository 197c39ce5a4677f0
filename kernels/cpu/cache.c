#include "kernels/cpu/cache.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/check.h"
#include "base/mem.h"

#define MEMORY_PAGE 4096
#define HUGE_PAGE   ((size_t)2 << 20)

/* ---- Open and close ------------------------------------------------------------------------- */

static size_t round_up(size_t n, size_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

static int slots_per_page(size_t row_size) {
    size_t slots = CPU_PAGE_BYTES / (2 * row_size);
    return slots > 0 ? (int)slots : 1;
}

static size_t page_kv_size(size_t row_size) {
    return round_up(2 * row_size * (size_t)slots_per_page(row_size), 64);
}

void cpu_cache_info(enum kern_dtype dtype, int head_dim, struct kern_cache_info *info) {
    size_t row_size = (size_t)head_dim * kern_dtype_bytes(dtype);
    int slots = slots_per_page(row_size);
    size_t side = 0;
    for (int i = 0; i < CPU_CACHE_SIDES; i++) side += cpu_cache_sides[i].bytes;
    info->page_slots = slots;
    info->page_bytes = (int64_t)(page_kv_size(row_size) + (size_t)slots * side);
}

static int check_options(const struct kern_cache_options *options, struct fault *fault) {
    if (options->dtype != KERN_F32 && options->dtype != KERN_BF16)
        return fault_set(fault, ERR_UNSUPPORTED, "kv_dtype", "the CPU cache holds f32 or bf16");
    if (options->layers < 1 || options->heads_kv < 1 || options->head_dim < 1)
        return fault_set(fault, ERR_INVALID, "cache",
                         "layers, heads and head_dim must be positive");
    if (options->slots < 1 || options->max_positions < 1)
        return fault_set(fault, ERR_INVALID, "cache", "slots and max_positions must be positive");
    if (options->pages < 1 || options->pages > UINT32_MAX)
        return fault_set(fault, ERR_INVALID, "kv_pool_bytes",
                         "the pool would have %lld pages; 1 to %u are possible",
                         (long long)options->pages, UINT32_MAX);
    return 0;
}

/* The limits leave every product of two shape numbers far from overflow. */
static int set_shape(struct cpu_cache *cache, const struct kern_cache_options *options,
                     struct fault *fault) {
    int64_t streams = (int64_t)options->layers * options->heads_kv;
    if (streams > 1 << 20 || options->head_dim > 1 << 20 || options->max_positions > 1 << 30)
        return fault_set(fault, ERR_LIMIT, "cache",
                         "more than 2^20 streams or dimensions, or 2^30 positions");
    cache->options = *options;
    cache->streams = (int)streams;
    cache->row_size = (size_t)options->head_dim * kern_dtype_bytes(options->dtype);
    cache->page_slots = slots_per_page(cache->row_size);
    cache->page_size = page_kv_size(cache->row_size);
    cache->stream_pages = (size_t)cpu_cache_pages_for(cache, options->max_positions);
    /* A slot's table fills whole memory pages so that a release can hand them back. */
    cache->slot_pages =
        round_up((size_t)streams * cache->stream_pages, MEMORY_PAGE / sizeof(uint32_t));
    size_t query = (size_t)options->heads_q * (size_t)options->head_dim;
    cache->ring_slot =
        round_up((size_t)options->layers * KERN_WINDOW_MAX * query, MEMORY_PAGE / sizeof(float));
    return 0;
}

/* One array of the mapping. */
struct region {
    void **array;
    size_t count, size;
};

static int place_regions(const struct region *regions, int count, size_t *offsets, size_t *total) {
    for (int i = 0; i < count; i++) {
        size_t bytes;
        offsets[i] = *total;
        if (__builtin_mul_overflow(regions[i].count, regions[i].size, &bytes)) return ERR_NOMEM;
        if (__builtin_add_overflow(*total, bytes, total)) return ERR_NOMEM;
        if (__builtin_add_overflow(*total, MEMORY_PAGE - 1, total)) return ERR_NOMEM;
        *total -= *total % MEMORY_PAGE;
    }
    return 0;
}

/* NORESERVE: what is never touched costs nothing, and the tables of sequences that stay short,
 * like the scratch of evictions that stay small, are never touched. */
static int map_regions(struct cpu_cache *cache, const struct region *regions, int count) {
    size_t offsets[32], total = 0;
    CHECK(count <= 32);
    if (place_regions(regions, count, offsets, &total) < 0) return ERR_NOMEM;
    if (__builtin_add_overflow(total, HUGE_PAGE, &total)) return ERR_NOMEM;
    void *map = mmap(NULL, total, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) return ERR_NOMEM;
    cache->map = map;
    cache->map_size = total;
    char *start = (char *)round_up((size_t)map, HUGE_PAGE);
    for (int i = 0; i < count; i++) *regions[i].array = start + offsets[i];
    return 0;
}

static int map_arrays(struct cpu_cache *cache) {
    size_t pages = (size_t)cache->options.pages, slots = (size_t)cache->options.slots;
    size_t streams = (size_t)cache->streams, page_slots = (size_t)cache->page_slots;
    size_t pool_entries, entries = streams * (size_t)cache->options.max_positions;
    if (__builtin_mul_overflow(pages, page_slots, &pool_entries)) return ERR_NOMEM;
    if (entries > pool_entries) entries = pool_entries;
    if (entries > UINT32_MAX)
        return ERR_NOMEM; /* eviction counts the bins of its select in 32 bits */
    const struct region regions[] = {
        {(void **)&cache->pool, pages, cache->page_size},
        {(void **)&cache->pos, pool_entries, sizeof *cache->pos},
        {(void **)&cache->log_beta, pool_entries, sizeof *cache->log_beta},
        {(void **)&cache->refs, pages, sizeof *cache->refs},
        {(void **)&cache->free_pages, pages, sizeof *cache->free_pages},
        {(void **)&cache->slots, slots, sizeof *cache->slots},
        {(void **)&cache->lengths, slots, streams * sizeof *cache->lengths},
        {(void **)&cache->tables, slots, cache->slot_pages * sizeof *cache->tables},
        {(void **)&cache->ring, slots, cache->ring_slot * sizeof *cache->ring},
        {(void **)&cache->ring_pos, slots, KERN_WINDOW_MAX * sizeof *cache->ring_pos},
        {(void **)&cache->keys, entries, sizeof *cache->keys},
        {(void **)&cache->ties, entries, sizeof *cache->ties},
        {(void **)&cache->evict, streams + 1, sizeof *cache->evict},
    };
    int rc = map_regions(cache, regions, sizeof regions / sizeof *regions);
    if (rc < 0) return rc;
    /* Only advice: a kernel without huge pages works as well. */
    (void)madvise(cache->pool, (size_t)((char *)cache->refs - cache->pool), MADV_HUGEPAGE);
    return 0;
}

int cpu_cache_open(struct cpu_cache *cache, const struct kern_cache_options *options,
                   struct fault *fault) {
    memset(cache, 0, sizeof *cache);
    int rc = check_options(options, fault);
    if (rc == 0) rc = set_shape(cache, options, fault);
    if (rc == 0 && map_arrays(cache) < 0)
        rc = fault_set(fault, ERR_NOMEM, "kv_pool_bytes", "no memory for %lld pages of %zu bytes",
                       (long long)options->pages, cache->page_size);
    if (rc < 0) {
        memset(cache, 0, sizeof *cache);
        return rc;
    }
    cache->free_count = options->pages;
    for (int64_t i = 0; i < options->pages; i++)
        cache->free_pages[i] = (uint32_t)(options->pages - 1 - i); /* page 0 is taken first */
    return 0;
}

void cpu_cache_close(struct cpu_cache *cache) {
    if (cache->map) munmap(cache->map, cache->map_size);
    memset(cache, 0, sizeof *cache);
}

/* ---- Pages ---------------------------------------------------------------------------------- */

uint32_t cpu_cache_take_page(struct cpu_cache *cache) {
    CHECK(cache->free_count > 0); /* every caller counted before it began */
    uint32_t page = cache->free_pages[--cache->free_count];
    cache->refs[page] = 1;
    return page;
}

static void drop_page(struct cpu_cache *cache, uint32_t page) {
    CHECK(cache->refs[page] > 0);
    if (--cache->refs[page] == 0) cache->free_pages[cache->free_count++] = page;
}

void cpu_cache_own_page(struct cpu_cache *cache, uint32_t *page) {
    uint32_t shared = *page;
    if (cache->refs[shared] == 1) return;
    size_t slots = (size_t)cache->page_slots;
    *page = cpu_cache_take_page(cache);
    memcpy(cpu_cache_k(cache, *page), cpu_cache_k(cache, shared), cache->page_size);
    for (int i = 0; i < CPU_CACHE_SIDES; i++)
        memcpy(cpu_cache_side(cache, i, *page), cpu_cache_side(cache, i, shared),
               slots * cpu_cache_sides[i].bytes);
    drop_page(cache, shared);
}

void cpu_cache_shorten(struct cpu_cache *cache, int slot, int stream, int32_t length) {
    uint32_t *table = cpu_cache_table(cache, slot, stream);
    int32_t *old = cpu_cache_length(cache, slot, stream);
    CHECK(length >= 0 && length <= *old);
    for (int32_t i = cpu_cache_pages_for(cache, *old); i > cpu_cache_pages_for(cache, length); i--)
        drop_page(cache, table[i - 1]);
    *old = length;
}

static struct cpu_cache_slot *slot_at(const struct cpu_cache *cache, int slot) {
    CHECK(slot >= 0 && slot < cache->options.slots);
    return &cache->slots[slot];
}

/* ---- A step --------------------------------------------------------------------------------- */

/* The page the next entry goes to, if it is begun already; else NULL. */
static uint32_t *open_page(const struct cpu_cache *cache, int slot, int stream) {
    int32_t length = *cpu_cache_length(cache, slot, stream);
    if (length % cache->page_slots == 0) return NULL;
    return &cpu_cache_table(cache, slot, stream)[length / cache->page_slots];
}

/* Will span `index` have to copy this page? Forks appending in one step leave a page one by one,
 * and the last one keeps it: so count who leaves before. */
static bool must_copy(const struct cpu_cache *cache, const struct kern_batch *batch, int index,
                      int stream, uint32_t page) {
    int refs = cache->refs[page];
    for (int i = 0; i < index && refs > 1; i++) {
        const uint32_t *other = open_page(cache, batch->spans[i].slot, stream);
        if (other && *other == page) refs--;
    }
    return refs > 1;
}

static int64_t pages_needed(const struct cpu_cache *cache, const struct kern_batch *batch,
                            int index) {
    const struct kern_span *span = &batch->spans[index];
    int64_t need = 0;
    for (int stream = 0; stream < cache->streams; stream++) {
        int32_t length = *cpu_cache_length(cache, span->slot, stream);
        need +=
            cpu_cache_pages_for(cache, length + span->count) - cpu_cache_pages_for(cache, length);
        const uint32_t *page = open_page(cache, span->slot, stream);
        if (page && must_copy(cache, batch, index, stream, *page)) need++;
    }
    return need;
}

static void append_stream(struct cpu_cache *cache, const struct kern_span *span, int stream) {
    uint32_t *table = cpu_cache_table(cache, span->slot, stream);
    int32_t *length = cpu_cache_length(cache, span->slot, stream);
    uint32_t *open = open_page(cache, span->slot, stream);
    if (open) cpu_cache_own_page(cache, open);
    int32_t page = *length / cache->page_slots, at = *length % cache->page_slots;
    for (int32_t i = 0; i < span->count; i++) {
        if (at == 0) table[page] = cpu_cache_take_page(cache);
        cpu_cache_pos(cache, table[page])[at] = span->pos + i;
        if (++at == cache->page_slots) page++, at = 0;
    }
    *length += span->count;
}

/* Which queries the ring will hold after this step. */
static void note_queries(struct cpu_cache *cache, const struct kern_span *span) {
    struct cpu_cache_slot *state = &cache->slots[span->slot];
    int32_t window = cpu_rule_window(span->rule);
    int32_t *pos = cache->ring_pos + (size_t)span->slot * KERN_WINDOW_MAX;
    CHECK(window >= 0 && window <= KERN_WINDOW_MAX && (!state->window || state->window == window));
    if (window > 0 && state->window == 0) memset(pos, 0xff, KERN_WINDOW_MAX * sizeof *pos); /* -1 */
    state->window = window;
    for (int32_t i = span->count > window ? span->count - window : 0; i < span->count; i++)
        pos[(span->pos + i) % window] = span->pos + i;
}

int cpu_cache_begin_step(struct cpu_cache *cache, const struct kern_batch *batch) {
    int64_t need = 0;
    for (int i = 0; i < batch->span_count; i++) {
        const struct kern_span *span = &batch->spans[i];
        CHECK(span->count > 0 && span->pos >= slot_at(cache, span->slot)->next_pos);
        if (span->pos > cache->options.max_positions - span->count) return ERR_LIMIT;
        need += pages_needed(cache, batch, i);
    }
    if (need > cache->free_count) return ERR_FULL;
    for (int i = 0; i < batch->span_count; i++) {
        const struct kern_span *span = &batch->spans[i];
        for (int stream = 0; stream < cache->streams; stream++) append_stream(cache, span, stream);
        struct cpu_cache_slot *state = slot_at(cache, span->slot);
        state->in_use = true;
        state->next_pos = span->pos + span->count;
        note_queries(cache, span);
    }
    return 0;
}

/* ---- Slots ---------------------------------------------------------------------------------- */

/* Entries of a stream before position `pos`; they ascend, and what goes is near the end. */
static int32_t entries_before(const struct cpu_cache *cache, int slot, int stream, int32_t pos) {
    const uint32_t *table = cpu_cache_table(cache, slot, stream);
    int32_t length = *cpu_cache_length(cache, slot, stream);
    while (length > 0 && cpu_cache_entry_pos(cache, table, length - 1) >= pos) length--;
    return length;
}

int cpu_cache_truncate(struct cpu_cache *cache, int slot, int32_t pos) {
    struct cpu_cache_slot *state = slot_at(cache, slot);
    CHECK(pos >= 0);
    /* Shared pages need no copy: only the table and the length change. */
    for (int stream = 0; stream < cache->streams; stream++)
        cpu_cache_shorten(cache, slot, stream, entries_before(cache, slot, stream, pos));
    if (state->next_pos > pos) state->next_pos = pos;
    return 0;
}

static bool can_share(const struct cpu_cache *cache, int slot) {
    for (int stream = 0; stream < cache->streams; stream++) {
        const uint32_t *table = cpu_cache_table(cache, slot, stream);
        int32_t count = cpu_cache_pages_for(cache, *cpu_cache_length(cache, slot, stream));
        for (int32_t i = 0; i < count; i++)
            if (cache->refs[table[i]] == UINT16_MAX) return false;
    }
    return true;
}

static void copy_ring(struct cpu_cache *cache, int from, int to) {
    const struct kern_cache_options *o = &cache->options;
    size_t window = (size_t)cache->slots[from].window;
    size_t bytes = window * (size_t)o->heads_q * (size_t)o->head_dim * sizeof(float);
    if (window == 0) return;
    for (int layer = 0; layer < o->layers; layer++)
        memcpy(cpu_cache_query(cache, to, layer, 0), cpu_cache_query(cache, from, layer, 0), bytes);
    memcpy(cache->ring_pos + (size_t)to * KERN_WINDOW_MAX,
           cache->ring_pos + (size_t)from * KERN_WINDOW_MAX, window * sizeof *cache->ring_pos);
}

int cpu_cache_fork(struct cpu_cache *cache, int from, int to) {
    CHECK(slot_at(cache, from)->in_use && !slot_at(cache, to)->in_use);
    if (!can_share(cache, from)) return ERR_LIMIT;
    for (int stream = 0; stream < cache->streams; stream++) {
        const uint32_t *table = cpu_cache_table(cache, from, stream);
        int32_t length = *cpu_cache_length(cache, from, stream);
        int32_t count = cpu_cache_pages_for(cache, length);
        for (int32_t i = 0; i < count; i++) cache->refs[table[i]]++;
        memcpy(cpu_cache_table(cache, to, stream), table, (size_t)count * sizeof *table);
        *cpu_cache_length(cache, to, stream) = length;
    }
    cache->slots[to] = cache->slots[from];
    copy_ring(cache, from, to);
    return 0;
}

void cpu_cache_release(struct cpu_cache *cache, int slot) {
    struct cpu_cache_slot *state = slot_at(cache, slot);
    if (!state->in_use) return;
    for (int stream = 0; stream < cache->streams; stream++)
        cpu_cache_shorten(cache, slot, stream, 0);
    /* A long sequence's table and queries go back to the system; failing to is no error. */
    (void)madvise(cpu_cache_table(cache, slot, 0), cache->slot_pages * sizeof *cache->tables,
                  MADV_DONTNEED);
    if (state->window > 0)
        (void)madvise(cpu_cache_query(cache, slot, 0, 0), cache->ring_slot * sizeof *cache->ring,
                      MADV_DONTNEED);
    *state = (struct cpu_cache_slot){0};
}

/* ---- Reports and checks --------------------------------------------------------------------- */

static void report_stream(const struct cpu_cache *cache, int slot, int stream, size_t first,
                          struct kern_report *report) {
    const uint32_t *table = cpu_cache_table(cache, slot, stream);
    int32_t length = *cpu_cache_length(cache, slot, stream), slots = cache->page_slots;
    for (int32_t i = 0; i < length; i++) {
        uint32_t page = table[i / slots];
        if (report->positions)
            report->positions[first + (size_t)i] = cpu_cache_pos(cache, page)[i % slots];
        if (report->log_beta)
            report->log_beta[first + (size_t)i] = cpu_cache_log_beta(cache, page)[i % slots];
    }
}

int cpu_cache_report(const struct cpu_cache *cache, int slot, struct kern_report *report) {
    (void)slot_at(cache, slot);
    report->entries = 0;
    report->pages = 0;
    for (int stream = 0; stream < cache->streams; stream++) {
        int32_t length = *cpu_cache_length(cache, slot, stream);
        if (report->lengths) report->lengths[stream] = length;
        report->entries += (size_t)length;
        report->pages += cpu_cache_pages_for(cache, length);
    }
    if (!report->positions && !report->log_beta) return 0;
    if (report->entries > report->entries_max) return ERR_LIMIT;
    size_t first = 0;
    for (int stream = 0; stream < cache->streams; stream++) {
        report_stream(cache, slot, stream, first, report);
        first += (size_t)*cpu_cache_length(cache, slot, stream);
    }
    return 0;
}

void cpu_cache_stats(const struct cpu_cache *cache, struct kern_cache_stats *stats) {
    stats->pages_used = cache->options.pages - cache->free_count;
    stats->entries_evicted = cache->entries_evicted;
}

static int check_stream(const struct cpu_cache *cache, int slot, int stream, uint32_t *seen,
                        struct fault *fault) {
    const uint32_t *table = cpu_cache_table(cache, slot, stream);
    int32_t length = *cpu_cache_length(cache, slot, stream), last = -1;
    bool in_use = cache->slots[slot].in_use;
    if (length < 0 || length > cache->options.max_positions || (length > 0 && !in_use))
        return fault_set(fault, ERR_INTERNAL, "cache", "slot %d stream %d has length %d", slot,
                         stream, length);
    for (int32_t i = 0; i < length; i++) {
        uint32_t page = table[i / cache->page_slots];
        if (page >= cache->options.pages)
            return fault_set(fault, ERR_INTERNAL, "cache", "slot %d stream %d names page %u", slot,
                             stream, page);
        if (i % cache->page_slots == 0) seen[page]++;
        int32_t pos = cpu_cache_pos(cache, page)[i % cache->page_slots];
        if (pos <= last || pos >= cache->slots[slot].next_pos)
            return fault_set(fault, ERR_INTERNAL, "cache",
                             "slot %d stream %d entry %d: position %d after %d", slot, stream, i,
                             pos, last);
        last = pos;
    }
    return 0;
}

static int check_free(const struct cpu_cache *cache, uint32_t *seen, struct fault *fault) {
    for (int64_t i = 0; i < cache->free_count; i++) {
        uint32_t page = cache->free_pages[i];
        if (page >= cache->options.pages || seen[page]++ > 0 || cache->refs[page] > 0)
            return fault_set(fault, ERR_INTERNAL, "cache", "page %u is free and used", page);
    }
    for (int64_t page = 0; page < cache->options.pages; page++) {
        uint32_t expected = cache->refs[page] > 0 ? cache->refs[page] : 1;
        if (seen[page] != expected)
            return fault_set(fault, ERR_INTERNAL, "cache", "page %lld: %u references, %u seen",
                             (long long)page, cache->refs[page], seen[page]);
    }
    return 0;
}

int cpu_cache_check(const struct cpu_cache *cache, struct fault *fault) {
    uint32_t *seen = mem_try_alloc((size_t)cache->options.pages, sizeof *seen);
    if (!seen) return fault_set(fault, ERR_NOMEM, "cache", "no memory for the check");
    int rc = 0;
    for (int slot = 0; slot < cache->options.slots && rc == 0; slot++)
        for (int stream = 0; stream < cache->streams && rc == 0; stream++)
            rc = check_stream(cache, slot, stream, seen, fault);
    if (rc == 0) rc = check_free(cache, seen, fault);
    mem_free(seen);
    return rc;
}
