/* The page pool of the CPU backend: opening, pages and references, steps, truncation, forks,
 * reports and the consistency check. Eviction is in evict.c and snapshots in snapshot.c. Every
 * operation first counts the pages it needs and then takes them, so that a refusal leaves the cache
 * unchanged. */
#include "kernels/cpu/cache.h"

#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/check.h"
#include "base/mem.h"
#include "kernels/cpu/evict.h"
#include "kernels/cpu/internal.h"

#define MEMORY_PAGE 4096
#define HUGE_PAGE   ((size_t)2 << 20)

/* ---- Open and close ---- */

static size_t cache_round_up(size_t n, size_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

/* Sizes of the pages of a cache. */
struct page_shape {
    size_t row_size, size;
    int slots, least; /* entries of a page; over all layers the most and the fewest */
};

static struct page_shape page_shape_of(const struct kern_cache_options *options, int head_dim) {
    const enum kern_dtype dtype = options->dtype;
    const size_t rows = options->latent ? 1 : 2; /* rows of an entry: key and value */
    struct page_shape shape = {.row_size = row_code_bytes(dtype, head_dim)};
    size_t slots = CPU_PAGE_BYTES / (rows * shape.row_size);
    if (slots < 1) slots = 1;
    shape.slots = (int)slots;
    shape.size = cache_round_up(rows * slots * (shape.row_size + row_factor_bytes(dtype)), 64);
    shape.least = shape.slots;
    return shape;
}

/* Returns the sizes that suit all layers: pages are as large as the largest layer needs. */
static struct page_shape page_shape_of_all(const struct kern_cache_options *options) {
    struct page_shape all = page_shape_of(options, options->head_dim);
    for (int i = 0; i < options->layers && options->heads; i++) {
        const struct page_shape shape = page_shape_of(options, options->heads[i].dim);
        if (shape.size > all.size) all.size = shape.size;
        if (shape.slots > all.slots) all.slots = shape.slots;
        if (shape.slots < all.least) all.least = shape.slots;
    }
    return all;
}

static int page_members(const struct page_shape *shape) {
    return (int)(shape->size / sizeof(struct cpu_member));
}

static int page_floats(const struct page_shape *shape) {
    return (int)(shape->size / sizeof(float));
}

void cpu_cache_info(const struct kern_cache_options *options, struct kern_cache_info *info) {
    const struct page_shape shape = page_shape_of_all(options);
    size_t side = 0;
    for (int i = 0; i < CPU_CACHE_SIDES; i++) side += cpu_cache_sides[i].bytes;
    info->page_slots = shape.slots;
    info->page_slots_least = shape.least;
    info->member_slots = page_members(&shape);
    info->state_slots = page_floats(&shape);
    info->page_bytes = (int64_t)(shape.size + (size_t)shape.slots * side);
}

static int cache_check_options(const struct kern_cache_options *options, struct fault *fault) {
    const bool scaled = row_scaled(options->dtype);
    if (options->dtype != KERN_F32 && options->dtype != KERN_BF16 && options->dtype != KERN_E4M3 &&
        !scaled)
        return fault_set(fault, ERR_UNSUPPORTED, "kv_dtype",
                         "the CPU cache holds f32, bf16, fp8 (e4m3), q8 or q4");
    if (options->layers < 1 || options->heads_kv < 1 || options->head_dim < 1)
        return fault_set(fault, ERR_INVALID, "cache",
                         "layers, heads and head_dim must be positive");
    if (scaled && options->latent)
        return fault_set(fault, ERR_UNSUPPORTED, "kv_dtype",
                         "q8 and q4 do not hold latent vectors, whose numbers are keys and values: "
                         "f32, bf16 and fp8 do");
    if (options->latent < 0 || options->latent >= options->head_dim || options->latent % 2)
        return fault_set(fault, ERR_INVALID, "cache", "a latent vector of %d in keys of %d",
                         options->latent, options->head_dim);
    if (scaled && options->head_dim > ROW_DIM_MAX)
        return fault_set(fault, ERR_UNSUPPORTED, "kv_dtype",
                         "q8 and q4 hold heads of up to %d numbers; this model's have %d",
                         ROW_DIM_MAX, options->head_dim);
    if (options->rank_cap != 0 && !(options->rank_cap >= 1))
        return fault_set(fault, ERR_INVALID, "cache", "rank_cap must be 0 or at least 1");
    if (options->rank_cap > 0 && options->heads)
        return fault_set(fault, ERR_UNSUPPORTED, "rank_cap",
                         "layers whose heads differ have no cap of ranks");
    if (options->states < 0 || (options->states > 0 && options->state_floats < 1))
        return fault_set(fault, ERR_INVALID, "cache", "states without numbers");
    if (options->slots < 1 || options->max_positions < 1)
        return fault_set(fault, ERR_INVALID, "cache", "slots and max_positions must be positive");
    if (options->pages < 1 || options->pages > UINT32_MAX)
        return fault_set(fault, ERR_INVALID, "kv_pool_bytes",
                         "the pool would have %lld pages; 1 to %u are possible",
                         (long long)options->pages, UINT32_MAX);
    return 0;
}

int cpu_cache_lanes(int group) {
    if (group < 1) return CPU_ROWS_BLOCK;
    return group >= CPU_ROWS_BLOCK ? group : CPU_ROWS_BLOCK / group * group;
}

/* Vectors with one value per entry in a worker's scratch memory, in addition to the logits. */
#define WORK_VECTORS 6

/* The longest stream, at least one page. */
static size_t work_stride(const struct cpu_cache *cache) {
    size_t slots = (size_t)cache->page_slots, most = (size_t)cache->options.max_positions;
    return cache_round_up(most > slots ? most : slots, 16);
}

static size_t work_rows(const struct cpu_cache *cache) {
    return (size_t)(cache->lanes > CPU_ROWS_BLOCK ? cache->lanes : CPU_ROWS_BLOCK);
}

static size_t work_size(const struct cpu_cache *cache) {
    size_t vectors = work_rows(cache) + WORK_VECTORS;
    size_t floats =
        vectors * work_stride(cache) +
        (3 * work_rows(cache) + 1) * cache_round_up((size_t)cache->options.head_dim, 16);
    return cache_round_up(floats, MEMORY_PAGE / sizeof(float));
}

/* Returns how this rank divides a layer of the model, all but its place among the other layers. */
static struct cpu_layer layer_of_model(const struct comm *comm,
                                       const struct kern_cache_options *whole, int layer) {
    const struct kern_heads heads = kern_heads_of(whole, layer);
    const struct page_shape page = page_shape_of(whole, heads.dim);
    const struct shard_heads shard = shard_heads(comm, whole->heads_q, heads.kv);
    return (struct cpu_layer){.heads_kv = shard.heads_kv,
                              .heads_model = heads.kv,
                              .heads_q = shard.heads_q,
                              .group = whole->heads_q / heads.kv,
                              .shard = shard,
                              .head_dim = heads.dim,
                              .latent = whole->latent,
                              .page_slots = page.slots,
                              .row_size = page.row_size};
}

static int most_of(int a, int b) {
    return a > b ? a : b;
}

/* Sums up the layers. */
static void count_layers(struct cpu_cache *cache, const struct kern_cache_options *whole) {
    struct kern_cache_options *own = &cache->options;
    *own = *whole;
    own->heads_q = own->heads_kv = 0;
    own->state_floats = kern_state_part(whole, cache->comm->ranks);
    for (int i = 0; i < whole->layers; i++) {
        const struct cpu_layer layer = layer_of_model(cache->comm, whole, i);
        own->heads_q = most_of(own->heads_q, layer.heads_q);
        own->heads_kv = most_of(own->heads_kv, layer.heads_kv);
        cache->lanes = most_of(cache->lanes, cpu_cache_lanes(layer.group));
        cache->streams += layer.heads_kv;
        cache->streams_model += layer.heads_model;
        cache->ring_slot += KERN_WINDOW_MAX * (size_t)layer.heads_q * (size_t)layer.head_dim;
    }
}

static void place_layers(struct cpu_cache *cache, const struct kern_cache_options *whole) {
    int stream = 0, stream_model = 0;
    size_t query = 0;
    for (int i = 0; i < whole->layers; i++) {
        struct cpu_layer *layer = &cache->layers[i];
        *layer = layer_of_model(cache->comm, whole, i);
        layer->first = stream;
        layer->first_model = stream_model;
        layer->query = query;
        for (int head = 0; head < layer->heads_kv; head++) cache->layer_of[stream++] = i;
        stream_model += layer->heads_model;
        query += KERN_WINDOW_MAX * (size_t)layer->heads_q * (size_t)layer->head_dim;
        cache->shapes[i] = (struct snapshot_layer){layer->heads_q, layer->heads_kv, layer->head_dim,
                                                   layer->page_slots};
    }
}

/* The limits keep products of two shape numbers far from overflow. */
static int cache_set_shape(struct cpu_cache *cache, const struct kern_cache_options *options,
                           struct fault *fault) {
    if ((int64_t)options->layers * options->heads_kv > 1 << 20 || options->head_dim > 1 << 20 ||
        options->max_positions > 1 << 30 || options->states > 1 << 20 ||
        options->state_floats > 1 << 30)
        return fault_set(fault, ERR_LIMIT, "cache",
                         "more than 2^20 streams, states or dimensions, or 2^30 positions or "
                         "numbers of a state");
    count_layers(cache, options);
    cache->rows = cpu_cache_states(cache) + options->states;
    const struct page_shape page = page_shape_of_all(options);
    const int floats = page_floats(&page);
    cache->state_pages = (cache->options.state_floats + floats - 1) / floats;
    cache->page_slots = page.slots;
    cache->page_size = page.size;
    cache->member_slots = page_members(&page);
    cache->stream_pages = (size_t)((options->max_positions + page.least - 1) / page.least);
    cache->member_pages =
        (size_t)cpu_cache_row_pages(cache, cache->streams, options->max_positions);
    /* A slot's table fills whole memory pages, so that a release can return them to the system. */
    cache->slot_pages =
        cache_round_up((size_t)cache->streams * (cache->stream_pages + cache->member_pages) +
                           (size_t)options->states * (size_t)cache->state_pages,
                       MEMORY_PAGE / sizeof(uint32_t));
    cache->ring_slot = cache_round_up(cache->ring_slot, MEMORY_PAGE / sizeof(float));
    cache->work_size = work_size(cache);
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

/* NORESERVE: untouched memory costs nothing, and the tables of short sequences and the scratch
 * memory of small evictions stay untouched. */
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
    char *start = (char *)cache_round_up((size_t)map, HUGE_PAGE);
    for (int i = 0; i < count; i++) *regions[i].array = start + offsets[i];
    return 0;
}

struct cpu_work cpu_cache_work(const struct cpu_cache *cache, int worker) {
    CHECK(worker >= 0 && worker < cache->workers);
    struct cpu_work work = {.stride = work_stride(cache)};
    work.logits = cache->work + (size_t)worker * cache->work_size;
    work.sum = work.logits + work_rows(cache) * work.stride;
    work.squares = work.sum + work.stride;
    work.smooth = work.squares + work.stride;
    work.norm = work.smooth + work.stride;
    work.rho = work.norm + work.stride;
    work.centres = (int32_t *)(work.rho + work.stride);
    work.rows = work.rho + 2 * work.stride;
    work.turned =
        work.rows + (work_rows(cache) + 1) * cache_round_up((size_t)cache->options.head_dim, 16);
    return work;
}

/* `heads`: the largest number of heads that a layer of the model has. */
static int map_arrays(struct cpu_cache *cache, size_t heads) {
    size_t pages = (size_t)cache->options.pages, slots = (size_t)cache->options.slots;
    size_t dim = (size_t)cache->options.head_dim, positions = (size_t)cache->options.max_positions;
    size_t streams = (size_t)cache->streams, page_slots = (size_t)cache->page_slots;
    size_t layers = (size_t)cache->options.layers;
    size_t ranks = (size_t)cache->comm->ranks;
    size_t pool_entries, entries = streams * positions;
    if (__builtin_mul_overflow(pages, page_slots, &pool_entries)) return ERR_NOMEM;
    if (entries > pool_entries) entries = pool_entries;
    if (entries > UINT32_MAX / ranks)
        return ERR_NOMEM; /* the bins of eviction's radix select count in 32 bits */
    const struct region regions[] = {
        {(void **)&cache->pool, pages, cache->page_size},
        {(void **)&cache->pos, pool_entries, sizeof *cache->pos},
        {(void **)&cache->log_beta, pool_entries, sizeof *cache->log_beta},
        {(void **)&cache->score, pool_entries, sizeof *cache->score},
        {(void **)&cache->layers, layers, sizeof *cache->layers},
        {(void **)&cache->shapes, layers, sizeof *cache->shapes},
        {(void **)&cache->layer_of, streams, sizeof *cache->layer_of},
        {(void **)&cache->refs, pages, sizeof *cache->refs},
        {(void **)&cache->free_pages, pages, sizeof *cache->free_pages},
        {(void **)&cache->slots, slots, sizeof *cache->slots},
        {(void **)&cache->lengths, slots, (size_t)cache->rows * sizeof *cache->lengths},
        {(void **)&cache->tables, slots, cache->slot_pages * sizeof *cache->tables},
        {(void **)&cache->ring, slots, cache->ring_slot * sizeof *cache->ring},
        {(void **)&cache->ring_pos, slots, KERN_WINDOW_MAX * sizeof *cache->ring_pos},
        {(void **)&cache->attended, layers, sizeof *cache->attended},
        {(void **)&cache->weights, slots, layers * sizeof *cache->weights},
        {(void **)&cache->tau, slots, streams * sizeof *cache->tau},
        {(void **)&cache->keys, entries, sizeof *cache->keys},
        {(void **)&cache->fresh, entries, sizeof *cache->fresh},
        {(void **)&cache->alike, entries, sizeof *cache->alike},
        {(void **)&cache->links, entries, sizeof *cache->links},
        {(void **)&cache->parts, layers + heads, sizeof *cache->parts},
        {(void **)&cache->evict, streams + 1, sizeof *cache->evict},
        {(void **)&cache->facts, ranks * streams, sizeof *cache->facts},
        {(void **)&cache->scopes, layers, sizeof *cache->scopes},
        {(void **)&cache->bins, layers, CPU_EVICT_BINS * sizeof *cache->bins},
        {(void **)&cache->angles, positions, dim * sizeof *cache->angles},
        {(void **)&cache->work, (size_t)cache->workers, cache->work_size * sizeof *cache->work},
    };
    int rc = map_regions(cache, regions, sizeof regions / sizeof *regions);
    if (rc < 0) return rc;
    /* Advice only: the cache also works without huge pages. */
    (void)madvise(cache->pool, (size_t)((char *)cache->refs - cache->pool), MADV_HUGEPAGE);
    return 0;
}

int cpu_cache_open_rank(struct cpu_cache *cache, const struct kern_cache_options *options,
                        const struct comm *comm, int workers, struct fault *fault) {
    memset(cache, 0, sizeof *cache);
    cache->comm = comm;
    cache->workers = workers;
    int rc = cache_check_options(options, fault);
    if (rc == 0) rc = cache_set_shape(cache, options, fault);
    cache->math = &cpu_math_plain;
    if (rc == 0 && map_arrays(cache, (size_t)options->heads_kv) < 0)
        rc = fault_set(
            fault, ERR_NOMEM, "kv_pool_bytes",
            "no memory for %lld pages of %zu bytes: give fewer bytes (--kv-pool-bytes), or "
            "raise the limit of the process (ulimit -v)",
            (long long)options->pages, cache->page_size);
    if (rc < 0) {
        memset(cache, 0, sizeof *cache);
        return rc;
    }
    place_layers(cache, options);
    cache->free_count = options->pages;
    for (int64_t i = 0; i < options->pages; i++)
        cache->free_pages[i] = (uint32_t)(options->pages - 1 - i); /* page 0 is taken first */
    return 0;
}

int cpu_cache_open(struct cpu_cache *cache, const struct kern_cache_options *options, int workers,
                   struct fault *fault) {
    return cpu_cache_open_rank(cache, options, &comm_none, workers, fault);
}

void cpu_cache_close(struct cpu_cache *cache) {
    if (cache->map) munmap(cache->map, cache->map_size);
    memset(cache, 0, sizeof *cache);
}

/* ---- Pages ---- */

uint32_t cpu_cache_take_page(struct cpu_cache *cache) {
    CHECK(cache->free_count > 0); /* callers count before they take */
    uint32_t page = cache->free_pages[--cache->free_count];
    CHECK(cache->refs[page] == 0);
    cache->refs[page] = 1;
    return page;
}

static void drop_page(struct cpu_cache *cache, uint32_t page) {
    CHECK(cache->refs[page] > 0 && cache->free_count < cache->options.pages);
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

void cpu_cache_shorten(struct cpu_cache *cache, int slot, int row, int32_t length) {
    uint32_t *table = cpu_cache_row(cache, slot, row);
    int32_t *old = cpu_cache_length(cache, slot, row);
    CHECK(length >= 0 && length <= *old);
    int32_t kept = cpu_cache_row_pages(cache, row, length);
    for (int32_t i = cpu_cache_row_pages(cache, row, *old); i > kept; i--)
        drop_page(cache, table[i - 1]);
    *old = length;
}

int64_t cpu_cache_lacks(const struct cpu_cache *cache, int slot, int row, int32_t length) {
    const uint32_t *table = cpu_cache_row(cache, slot, row);
    int32_t held = cpu_cache_row_pages(cache, row, *cpu_cache_length(cache, slot, row));
    int64_t need = cpu_cache_row_pages(cache, row, length) - held;
    for (int32_t i = 0; i < held; i++) need += cache->refs[table[i]] > 1;
    return need;
}

void cpu_cache_extend(struct cpu_cache *cache, int slot, int row, int32_t length) {
    uint32_t *table = cpu_cache_row(cache, slot, row);
    int32_t *old = cpu_cache_length(cache, slot, row);
    CHECK(length >= *old &&
          (row >= cpu_cache_states(cache) ? length == cache->state_pages
                                          : length <= cache->options.max_positions));
    int32_t held = cpu_cache_row_pages(cache, row, *old);
    for (int32_t i = 0; i < held; i++) cpu_cache_own_page(cache, &table[i]);
    for (int32_t i = held; i < cpu_cache_row_pages(cache, row, length); i++)
        table[i] = cpu_cache_take_page(cache);
    *old = length;
}

void cpu_cache_wide_row(const struct cpu_cache *cache, const struct cpu_layer *layer, uint32_t page,
                        bool values, int at, float *to) {
    const struct cpu_rows row = cpu_cache_rows(cache, layer, page, values, at);
    if (row_scaled(row.dtype))
        row_read(to, row.at, *row.factors, row.dim, row.dtype);
    else
        number_read_row(to, row.at, row.dim, row.dtype);
}

void cpu_cache_store_row(const struct cpu_cache *cache, const struct cpu_layer *layer,
                         uint32_t page, bool values, int at, const float *from) {
    const enum kern_dtype dtype = cache->options.dtype;
    CHECK(!values || !layer->latent);
    char *row = (char *)(values ? cpu_cache_v(cache, layer, page) : cpu_cache_k(cache, page)) +
                (size_t)at * layer->row_size;
    if (row_scaled(dtype))
        cache->math->row_write(row, cpu_cache_factors(cache, layer, page, values) + at, from,
                               layer->head_dim, dtype);
    else
        number_write_row(row, from, layer->head_dim, dtype);
}

/* Copies between consecutive numbers and the pages that hold them. */
static void copy_state(const struct cpu_cache *cache, int slot, int state, int first, int count,
                       float *out, const float *in) {
    const uint32_t *table = cpu_cache_row(cache, slot, cpu_cache_states(cache) + state);
    const int each = (int)(cache->page_size / sizeof(float));
    CHECK(first >= 0 && first + count <= cache->options.state_floats);
    for (int done = 0, part; done < count; done += part) {
        const int page = (first + done) / each, at = (first + done) % each;
        part = count - done < each - at ? count - done : each - at;
        float *held = (float *)cpu_cache_k(cache, table[page]) + at;
        if (out)
            memcpy(out + done, held, (size_t)part * sizeof *held);
        else
            memcpy(held, in + done, (size_t)part * sizeof *held);
    }
}

void cpu_cache_state_read(const struct cpu_cache *cache, int slot, int state, int first, int count,
                          float *to) {
    copy_state(cache, slot, state, first, count, to, NULL);
}

void cpu_cache_state_write(const struct cpu_cache *cache, int slot, int state, int first, int count,
                           const float *from) {
    copy_state(cache, slot, state, first, count, NULL, from);
}

int32_t cpu_cache_find(const struct cpu_cache *cache, const struct cpu_stream *entries,
                       int32_t pos) {
    int32_t lo = 0, hi = entries->length;
    while (lo < hi) {
        int32_t mid = lo + (hi - lo) / 2;
        if (cpu_cache_entry_pos(cache, entries, mid) < pos)
            lo = mid + 1;
        else
            hi = mid;
    }
    if (lo < entries->length && cpu_cache_entry_pos(cache, entries, lo) == pos) return lo;
    return entries->length;
}

static struct cpu_cache_slot *slot_at(const struct cpu_cache *cache, int slot) {
    CHECK(slot >= 0 && slot < cache->options.slots);
    return &cache->slots[slot];
}

/* ---- A step ---- */

/* Returns the first page of a stream or state into which the span writes. Of a stream this is the
 * partly filled page, if there is one; page 0 if the rule adds up attention, and of a state. */
static int32_t first_written(const struct cpu_cache *cache, const struct kern_span *span, int row) {
    if (rule_adds(span->rule) || row >= cpu_cache_states(cache)) return 0;
    return *cpu_cache_length(cache, span->slot, row) / cpu_cache_layer(cache, row)->page_slots;
}

static int32_t pages_held(const struct cpu_cache *cache, const struct kern_span *span, int row) {
    return cpu_cache_row_pages(cache, row, *cpu_cache_length(cache, span->slot, row));
}

/* Returns whether span `index` must copy page `at` of its stream or state. When several forks of a
 * page write in one step, each copies it except the last, which keeps it; so earlier spans that
 * copy it are counted here. A shared page has the same place in every table. */
static bool must_copy(const struct cpu_cache *cache, const struct kern_batch *batch, int index,
                      int row, int32_t at) {
    uint32_t page = cpu_cache_row(cache, batch->spans[index].slot, row)[at];
    int refs = cache->refs[page];
    for (int i = 0; i < index && refs > 1; i++) {
        const struct kern_span *other = &batch->spans[i];
        if (at < first_written(cache, other, row) || at >= pages_held(cache, other, row)) continue;
        if (cpu_cache_row(cache, other->slot, row)[at] == page) refs--;
    }
    return refs > 1;
}

/* Returns how many pages span `index` must take so that a row has `pages`, copies of shared pages
 * included. */
static int64_t row_needs(const struct cpu_cache *cache, const struct kern_batch *batch, int index,
                         int row, int32_t pages) {
    int32_t held = pages_held(cache, &batch->spans[index], row);
    int64_t need = pages - held;
    for (int32_t at = first_written(cache, &batch->spans[index], row); at < held; at++)
        need += must_copy(cache, batch, index, row, at);
    return need;
}

static int64_t pages_needed(const struct cpu_cache *cache, const struct kern_batch *batch,
                            int index) {
    const struct kern_span *span = &batch->spans[index];
    int64_t need = 0;
    for (int stream = 0; stream < cache->streams; stream++) {
        int32_t length = *cpu_cache_length(cache, span->slot, stream) + span->count;
        need += row_needs(cache, batch, index, stream, cpu_cache_row_pages(cache, stream, length));
    }
    for (int row = cpu_cache_states(cache); row < cache->rows; row++)
        need += row_needs(cache, batch, index, row, cache->state_pages);
    return need;
}

/* Gives a state its own pages; before the first token they contain zeros. */
static void begin_state(struct cpu_cache *cache, int slot, int row) {
    const bool fresh = *cpu_cache_length(cache, slot, row) == 0;
    cpu_cache_extend(cache, slot, row, cache->state_pages);
    const uint32_t *table = cpu_cache_row(cache, slot, row);
    for (int i = 0; fresh && i < cache->state_pages; i++)
        memset(cpu_cache_k(cache, table[i]), 0, cache->page_size);
}

static void append_stream(struct cpu_cache *cache, const struct kern_span *span, int stream) {
    uint32_t *table = cpu_cache_table(cache, span->slot, stream);
    int32_t *length = cpu_cache_length(cache, span->slot, stream);
    bool scored = span->rule && span->rule->score == KERN_SCORE_ATTENTION;
    float score = rule_adds(span->rule) ? 0 : CPU_SCORE_NONE;
    int32_t pages = pages_held(cache, span, stream);
    for (int32_t i = first_written(cache, span, stream); i < pages; i++)
        cpu_cache_own_page(cache, &table[i]);
    const int32_t slots = cpu_cache_layer(cache, stream)->page_slots;
    int32_t page = *length / slots, at = *length % slots;
    for (int32_t i = 0; i < span->count; i++) {
        if (at == 0) table[page] = cpu_cache_take_page(cache);
        cpu_cache_pos(cache, table[page])[at] = span->pos + i;
        if (scored) cpu_cache_score(cache, table[page])[at] = score;
        if (++at == slots) page++, at = 0;
    }
    *length += span->count;
    CHECK(*length <= cache->options.max_positions && page == *length / slots);
    /* Without a rule of classes the members are dropped: nothing would keep their centres. Only a
     * snapshot made under another rule can bring them here. */
    if (!rule_classes(span->rule)) cpu_cache_shorten(cache, span->slot, cache->streams + stream, 0);
}

/* Updates which queries the ring holds after this step. A ring of another size is discarded; only a
 * snapshot made under another rule can bring one. */
static void note_queries(struct cpu_cache *cache, const struct kern_span *span) {
    struct cpu_cache_slot *state = &cache->slots[span->slot];
    int32_t window = rule_window(span->rule);
    int32_t *pos = cache->ring_pos + (size_t)span->slot * KERN_WINDOW_MAX;
    CHECK(window >= 0 && window <= KERN_WINDOW_MAX);
    if (window != state->window) memset(pos, 0xff, KERN_WINDOW_MAX * sizeof *pos); /* -1 */
    state->window = window;
    for (int32_t i = span->count > window ? span->count - window : 0; i < span->count; i++)
        pos[(span->pos + i) % window] = span->pos + i;
}

/* Computes the angles of positions up to `count`, by which the members of classes are rotated. */
static void make_angles(struct cpu_cache *cache, int32_t count) {
    int dim = cache->options.head_dim, half = dim / 2;
    const float *inv_freq = cache->options.inv_freq;
    for (; cache->angles_made < count; cache->angles_made++) {
        float *row = cache->angles + (size_t)cache->angles_made * (size_t)dim;
        for (int j = 0; j < half; j++) {
            double angle = inv_freq ? (double)cache->angles_made * (double)inv_freq[j] : 0;
            row[j] = (float)cos(angle);
            row[half + j] = (float)sin(angle);
        }
    }
}

static void begin_slot(struct cpu_cache *cache, int slot) {
    float *tau = cpu_cache_tau(cache, slot);
    cache->slots[slot].in_use = true;
    memset(cpu_cache_weights(cache, slot), 0, (size_t)cache->options.layers * sizeof(float));
    for (int stream = 0; stream < cache->streams; stream++) tau[stream] = NAN;
}

int cpu_cache_begin_step(struct cpu_cache *cache, const struct kern_batch *batch) {
    int64_t need = 0;
    for (int i = 0; i < batch->span_count; i++) {
        const struct kern_span *span = &batch->spans[i];
        CHECK(span->count > 0 && span->pos >= slot_at(cache, span->slot)->next_pos);
        CHECK(slot_at(cache, span->slot)->peeked == 0);
        CHECK(span->behind >= 0 && span->behind <= span->pos);
        if (span->pos - span->behind > cache->options.max_positions - span->count) return ERR_LIMIT;
        need += pages_needed(cache, batch, i);
    }
    int64_t free_before = cache->free_count;
    int rc = cache->comm->ops->agree(cache->comm, need > free_before ? ERR_FULL : 0);
    if (rc) return rc;
    for (int i = 0; i < batch->span_count; i++) {
        const struct kern_span *span = &batch->spans[i];
        for (int stream = 0; stream < cache->streams; stream++) append_stream(cache, span, stream);
        for (int row = cpu_cache_states(cache); row < cache->rows; row++)
            begin_state(cache, span->slot, row);
        struct cpu_cache_slot *state = slot_at(cache, span->slot);
        if (!state->in_use) begin_slot(cache, span->slot);
        state->next_pos = span->pos + span->count;
        state->peeked = span->peeks ? span->count : 0;
        note_queries(cache, span);
        if (rule_classes(span->rule)) make_angles(cache, state->next_pos);
    }
    CHECK(free_before - cache->free_count <= need);
    return 0;
}

/* ---- Slots ---- */

/* Returns the number of entries before position `pos`. Positions ascend, and entries to be dropped
 * are near the end. */
static int32_t entries_before(const struct cpu_cache *cache, int slot, int stream, int32_t pos) {
    const struct cpu_stream view = cpu_cache_stream_at(cache, slot, stream);
    int32_t length = view.length;
    while (length > 0 && cpu_cache_entry_pos(cache, &view, length - 1) >= pos) length--;
    return length;
}

/* Returns the first member that is dropped with the tokens from position `pos` on, because of its
 * own position or its centre's. */
static int32_t members_before(const struct cpu_cache *cache, int slot, int row, int32_t pos) {
    const uint32_t *table = cpu_cache_row(cache, slot, row);
    int32_t length = *cpu_cache_length(cache, slot, row);
    for (int32_t i = 0; i < length; i++) {
        const struct cpu_member *member = cpu_cache_member(cache, table, i);
        if (member->pos >= pos || member->centre >= pos) return i;
    }
    return length;
}

static void truncate_members(struct cpu_cache *cache, int slot, int row, int32_t pos) {
    int32_t length = *cpu_cache_length(cache, slot, row);
    int32_t kept = members_before(cache, slot, row, pos);
    if (kept == length) return;
    cpu_cache_extend(cache, slot, row, length);
    const uint32_t *table = cpu_cache_row(cache, slot, row);
    for (int32_t i = kept; i < length; i++) {
        const struct cpu_member *member = cpu_cache_member(cache, table, i);
        if (member->pos < pos && member->centre < pos)
            *cpu_cache_member(cache, table, kept++) = *member;
    }
    cpu_cache_shorten(cache, slot, row, kept);
}

int cpu_cache_truncate(struct cpu_cache *cache, int slot, int32_t pos) {
    struct cpu_cache_slot *state = slot_at(cache, slot);
    int64_t need = 0;
    CHECK(pos >= 0);
    if (cache->options.states > 0 && state->next_pos - state->peeked > pos) return ERR_UNSUPPORTED;
    for (int row = cache->streams; row < cpu_cache_states(cache); row++) {
        int32_t length = *cpu_cache_length(cache, slot, row);
        if (members_before(cache, slot, row, pos) < length)
            need += cpu_cache_lacks(cache, slot, row, length);
    }
    int rc = cache->comm->ops->agree(cache->comm, need > cache->free_count ? ERR_FULL : 0);
    if (rc) return rc;
    for (int row = cache->streams; row < cpu_cache_states(cache); row++)
        truncate_members(cache, slot, row, pos);
    /* Entries end with the last one kept: shared pages need no copy. */
    for (int stream = 0; stream < cache->streams; stream++)
        cpu_cache_shorten(cache, slot, stream, entries_before(cache, slot, stream, pos));
    if (state->next_pos > pos) state->next_pos = pos;
    state->peeked = 0;
    return 0;
}

static bool can_share(const struct cpu_cache *cache, int slot) {
    for (int row = 0; row < cache->rows; row++) {
        const uint32_t *table = cpu_cache_row(cache, slot, row);
        int32_t count = cpu_cache_row_pages(cache, row, *cpu_cache_length(cache, slot, row));
        for (int32_t i = 0; i < count; i++)
            if (cache->refs[table[i]] == UINT16_MAX) return false;
    }
    return true;
}

static void copy_ring(struct cpu_cache *cache, int from, int to) {
    size_t window = (size_t)cache->slots[from].window;
    if (window == 0) return;
    for (int layer = 0; layer < cache->options.layers; layer++)
        memcpy(cpu_cache_query(cache, to, layer, 0), cpu_cache_query(cache, from, layer, 0),
               window * cpu_cache_query_bytes(cache, layer));
    memcpy(cache->ring_pos + (size_t)to * KERN_WINDOW_MAX,
           cache->ring_pos + (size_t)from * KERN_WINDOW_MAX, window * sizeof *cache->ring_pos);
}

int cpu_cache_fork(struct cpu_cache *cache, int from, int to) {
    CHECK(slot_at(cache, from)->in_use && !slot_at(cache, to)->in_use);
    int rc = cache->comm->ops->agree(cache->comm, can_share(cache, from) ? 0 : ERR_LIMIT);
    if (rc) return rc;
    for (int row = 0; row < cache->rows; row++) {
        const uint32_t *table = cpu_cache_row(cache, from, row);
        int32_t length = *cpu_cache_length(cache, from, row);
        int32_t count = cpu_cache_row_pages(cache, row, length);
        for (int32_t i = 0; i < count; i++) cache->refs[table[i]]++;
        memcpy(cpu_cache_row(cache, to, row), table, (size_t)count * sizeof *table);
        *cpu_cache_length(cache, to, row) = length;
    }
    cache->slots[to] = cache->slots[from];
    memcpy(cpu_cache_weights(cache, to), cpu_cache_weights(cache, from),
           (size_t)cache->options.layers * sizeof(float));
    memcpy(cpu_cache_tau(cache, to), cpu_cache_tau(cache, from),
           (size_t)cache->streams * sizeof(float));
    copy_ring(cache, from, to);
    return 0;
}

void cpu_cache_release(struct cpu_cache *cache, int slot) {
    struct cpu_cache_slot *state = slot_at(cache, slot);
    if (!state->in_use) return;
    for (int row = 0; row < cache->rows; row++) cpu_cache_shorten(cache, slot, row, 0);
    /* Returns a long sequence's table and queries to the system; failure is harmless. */
    (void)madvise(cpu_cache_table(cache, slot, 0), cache->slot_pages * sizeof *cache->tables,
                  MADV_DONTNEED);
    if (state->window > 0)
        (void)madvise(cpu_cache_query(cache, slot, 0, 0), cache->ring_slot * sizeof *cache->ring,
                      MADV_DONTNEED);
    *state = (struct cpu_cache_slot){0};
}

/* ---- Reports and checks ---- */

static void report_stream(const struct cpu_cache *cache, int slot, int stream, size_t first,
                          struct kern_report *report) {
    const uint32_t *table = cpu_cache_table(cache, slot, stream);
    int32_t length = *cpu_cache_length(cache, slot, stream);
    int32_t slots = cpu_cache_layer(cache, stream)->page_slots;
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
    }
    for (int row = 0; row < cache->rows; row++)
        report->pages += cpu_cache_row_pages(cache, row, *cpu_cache_length(cache, slot, row));
    report->rank_entries = report->entries;
    report->rank_pages = report->pages;
    report->state_bytes =
        cache->slots[slot].in_use
            ? (size_t)cache->options.states * (size_t)cache->options.state_floats * sizeof(float)
            : 0;
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
    stats->pages_used = stats->rank_pages_used = cache->options.pages - cache->free_count;
    stats->entries_evicted = cache->entries_evicted;
    stats->rank_cap_hits = cache->rank_cap_hits;
}

static int cache_check_stream(const struct cpu_cache *cache, int slot, int stream, uint32_t *seen,
                              struct fault *fault) {
    const uint32_t *table = cpu_cache_table(cache, slot, stream);
    int32_t length = *cpu_cache_length(cache, slot, stream), last = -1;
    const int32_t slots = cpu_cache_layer(cache, stream)->page_slots;
    bool in_use = cache->slots[slot].in_use;
    if (length < 0 || length > cache->options.max_positions || (length > 0 && !in_use))
        return fault_set(fault, ERR_INTERNAL, "cache", "slot %d stream %d has length %d", slot,
                         stream, length);
    for (int32_t i = 0; i < length; i++) {
        uint32_t page = table[i / slots];
        if (page >= cache->options.pages)
            return fault_set(fault, ERR_INTERNAL, "cache", "slot %d stream %d names page %u", slot,
                             stream, page);
        if (i % slots == 0) seen[page]++;
        int32_t pos = cpu_cache_pos(cache, page)[i % slots];
        if (pos <= last || pos >= cache->slots[slot].next_pos)
            return fault_set(fault, ERR_INTERNAL, "cache",
                             "slot %d stream %d entry %d: position %d after %d", slot, stream, i,
                             pos, last);
        last = pos;
    }
    return 0;
}

/* Members ascend, their centres are entries, and they are not entries themselves. */
static int check_member(const struct cpu_cache *cache, int slot, int stream, int32_t index,
                        struct fault *fault) {
    const uint32_t *table = cpu_cache_row(cache, slot, cache->streams + stream);
    const struct cpu_member *member = cpu_cache_member(cache, table, index);
    const struct cpu_stream entries = cpu_cache_stream_at(cache, slot, stream);
    bool ascends = true;
    if (index > 0) {
        const struct cpu_member *last = cpu_cache_member(cache, table, index - 1);
        ascends = member->centre > last->centre ||
                  (member->centre == last->centre && member->pos > last->pos);
    }
    if (ascends && member->pos >= 0 && member->pos < cache->slots[slot].next_pos &&
        member->gain >= 0 && isfinite(member->gain) &&
        cpu_cache_find(cache, &entries, member->centre) < entries.length &&
        cpu_cache_find(cache, &entries, member->pos) == entries.length)
        return 0;
    return fault_set(fault, ERR_INTERNAL, "cache",
                     "slot %d stream %d member %d: position %d in the class of %d, gain %g", slot,
                     stream, index, member->pos, member->centre, (double)member->gain);
}

/* `taken` has a byte for every position: a position in several classes is an error, too. */
static int cache_check_members(const struct cpu_cache *cache, int slot, int stream, uint32_t *seen,
                               uint8_t *taken, struct fault *fault) {
    int row = cache->streams + stream;
    const uint32_t *table = cpu_cache_row(cache, slot, row);
    int32_t length = *cpu_cache_length(cache, slot, row);
    if (length < 0 || length > cache->options.max_positions)
        return fault_set(fault, ERR_INTERNAL, "cache", "slot %d stream %d has %d members", slot,
                         stream, length);
    if (length > 0) memset(taken, 0, (size_t)cache->options.max_positions);
    for (int32_t i = 0; i < length; i++) {
        uint32_t page = table[i / cache->member_slots];
        if (page >= cache->options.pages)
            return fault_set(fault, ERR_INTERNAL, "cache", "slot %d stream %d names page %u", slot,
                             stream, page);
        if (i % cache->member_slots == 0) seen[page]++;
        int rc = check_member(cache, slot, stream, i, fault);
        if (rc < 0) return rc;
        int32_t pos = cpu_cache_member(cache, table, i)->pos;
        if (taken[pos]++ > 0)
            return fault_set(fault, ERR_INTERNAL, "cache",
                             "slot %d stream %d: position %d is in two classes", slot, stream, pos);
    }
    return 0;
}

static int check_state_pages(const struct cpu_cache *cache, int slot, int row, uint32_t *seen,
                             struct fault *fault) {
    const uint32_t *table = cpu_cache_row(cache, slot, row);
    int32_t length = *cpu_cache_length(cache, slot, row);
    if (length != 0 && (length != cache->state_pages || !cache->slots[slot].in_use))
        return fault_set(fault, ERR_INTERNAL, "cache", "slot %d row %d: a state of %d pages", slot,
                         row, length);
    for (int32_t i = 0; i < length; i++) {
        if (table[i] >= cache->options.pages)
            return fault_set(fault, ERR_INTERNAL, "cache", "slot %d row %d names page %u", slot,
                             row, table[i]);
        seen[table[i]]++;
    }
    return 0;
}

static int cache_check_free(const struct cpu_cache *cache, uint32_t *seen, struct fault *fault) {
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
    uint8_t *taken = mem_try_alloc((size_t)cache->options.max_positions, 1);
    int rc = seen && taken ? 0 : fault_set(fault, ERR_NOMEM, "cache", "no memory for the check");
    for (int slot = 0; slot < cache->options.slots && rc == 0; slot++) {
        for (int stream = 0; stream < cache->streams && rc == 0; stream++) {
            rc = cache_check_stream(cache, slot, stream, seen, fault);
            if (rc == 0) rc = cache_check_members(cache, slot, stream, seen, taken, fault);
        }
        for (int row = cpu_cache_states(cache); row < cache->rows && rc == 0; row++)
            rc = check_state_pages(cache, slot, row, seen, fault);
    }
    if (rc == 0) rc = cache_check_free(cache, seen, fault);
    mem_free(seen);
    mem_free(taken);
    return rc;
}
