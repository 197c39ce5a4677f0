/* Snapshots of the CPU's cache; kernels/snapshot.h defines the format. A block holds either the
 * head of a slot or one stream's entries, so that a large snapshot is copied over many steps. */
#include "kernels/snapshot.h"

#include <string.h>

#include "base/check.h"
#include "kernels/cpu/cache.h"

_Static_assert((int)CPU_CACHE_SIDES == (int)SNAPSHOT_SIDES, "every side record is in snapshots");
_Static_assert(sizeof(struct cpu_member) == sizeof(struct snapshot_member) &&
                   offsetof(struct cpu_member, pos) == offsetof(struct snapshot_member, pos) &&
                   offsetof(struct cpu_member, gain) == offsetof(struct snapshot_member, gain),
               "members are copied as they lie");

static struct snapshot_shape snapshot_shape_of(const struct cpu_cache *cache) {
    return (struct snapshot_shape){.options = &cache->options,
                                   .layers = cache->shapes,
                                   .member_slots = cache->member_slots,
                                   .state_pages = cache->state_pages,
                                   .ranks = 1,
                                   .shifts = true};
}

/* ---- Out ---- */

size_t cpu_cache_snapshot_size(const struct cpu_cache *cache, int slot, int block) {
    CHECK(slot >= 0 && slot < cache->options.slots && block >= 0 &&
          block <= cache->streams + cache->options.states);
    struct snapshot_shape shape = snapshot_shape_of(cache);
    if (block == 0) return snapshot_arrays(&shape, cache->slots[slot].window).size;
    if (block > cache->streams) return snapshot_state_size(&shape);
    return snapshot_stream_size(&shape, block - 1, *cpu_cache_length(cache, slot, block - 1),
                                *cpu_cache_length(cache, slot, cache->streams + block - 1));
}

static void snapshot_export_slot(const struct cpu_cache *cache, int slot, char *to) {
    const struct cpu_cache_slot *state = &cache->slots[slot];
    const struct snapshot_slot head = {state->next_pos, state->window, state->measured};
    struct snapshot_shape shape = snapshot_shape_of(cache);
    struct snapshot_arrays at = snapshot_arrays(&shape, state->window);
    size_t window = (size_t)state->window;
    snapshot_write_head(&shape, &head, to);
    memcpy(to + at.weights, cpu_cache_weights(cache, slot), at.tau - at.weights);
    memcpy(to + at.tau, cpu_cache_tau(cache, slot), at.ring_pos - at.tau);
    if (window == 0) return;
    memcpy(to + at.ring_pos, cache->ring_pos + (size_t)slot * KERN_WINDOW_MAX,
           at.ring - at.ring_pos);
    to += at.ring;
    for (int layer = 0; layer < cache->options.layers; layer++) {
        const size_t bytes = window * cpu_cache_query_bytes(cache, layer);
        memcpy(to, cpu_cache_query(cache, slot, layer, 0), bytes);
        to += bytes;
    }
}

/* Address of one part's records in a page. */
static char *page_part(const struct cpu_cache *cache, const struct cpu_layer *layer, uint32_t page,
                       int part) {
    if (part < SNAPSHOT_SIDES) return cpu_cache_side(cache, part, page);
    const bool values = part == SNAPSHOT_VALUE || part == SNAPSHOT_VALUE_FACTOR;
    if (part >= SNAPSHOT_KEY_FACTOR) return (char *)cpu_cache_factors(cache, layer, page, values);
    return values ? cpu_cache_v(cache, layer, page) : cpu_cache_k(cache, page);
}

/* Entries of page `i` of a stream of this length. */
static size_t entries_of_page(const struct cpu_layer *layer, int32_t length, int32_t i) {
    int32_t left = length - i * layer->page_slots;
    return (size_t)(left < layer->page_slots ? left : layer->page_slots);
}

static void export_members(const struct cpu_cache *cache, int slot, int stream, char *to) {
    struct cpu_stream members = cpu_cache_members(cache, slot, stream);
    if (members.length == 0) return;
    memcpy(to, &members.length, sizeof members.length);
    to += sizeof members.length;
    for (int32_t i = 0; i < members.length; i++, to += sizeof(struct cpu_member))
        memcpy(to, cpu_cache_member(cache, members.pages, i), sizeof(struct cpu_member));
}

static void export_stream(const struct cpu_cache *cache, int slot, int stream, char *to) {
    struct snapshot_shape shape = snapshot_shape_of(cache);
    const struct cpu_stream view = cpu_cache_stream_at(cache, slot, stream);
    const int32_t length = view.length, pages = cpu_cache_pages_for(view.layer, length);
    memcpy(to, &length, sizeof length);
    to += sizeof length;
    for (int part = 0; part < SNAPSHOT_PARTS; part++)
        for (int32_t i = 0; i < pages; i++) {
            size_t bytes = entries_of_page(view.layer, length, i) *
                           snapshot_part_bytes(&shape, stream, (enum snapshot_part)part);
            memcpy(to, page_part(cache, view.layer, view.pages[i], part), bytes);
            to += bytes;
        }
    export_members(cache, slot, stream, to);
}

void cpu_cache_snapshot_export(const struct cpu_cache *cache, int slot, int block, void *to) {
    CHECK(slot >= 0 && slot < cache->options.slots && block >= 0 &&
          block <= cache->streams + cache->options.states);
    if (block == 0)
        snapshot_export_slot(cache, slot, to);
    else if (block > cache->streams)
        cpu_cache_state_read(cache, slot, block - 1 - cache->streams, 0,
                             cache->options.state_floats, to);
    else
        export_stream(cache, slot, block - 1, to);
}

/* ---- In ---- */

int cpu_cache_snapshot_check(const struct cpu_cache *cache, const struct kern_block *blocks,
                             int count, int32_t tokens, struct kern_report *report,
                             struct fault *fault) {
    struct snapshot_shape shape = snapshot_shape_of(cache);
    struct snapshot_slot slot;
    return snapshot_check(&shape, blocks, count, tokens, &slot, report, fault);
}

static int import_members(struct cpu_cache *cache, int slot, int stream,
                          const struct kern_block *block) {
    struct snapshot_shape shape = snapshot_shape_of(cache);
    const char *from;
    int row = cache->streams + stream;
    int32_t count = snapshot_members(&shape, stream, block, &from);
    if (cpu_cache_lacks(cache, slot, row, count) > cache->free_count) return ERR_FULL;
    cpu_cache_extend(cache, slot, row, count);
    const uint32_t *table = cpu_cache_row(cache, slot, row);
    for (int32_t i = 0; i < count; i++, from += sizeof(struct cpu_member))
        memcpy(cpu_cache_member(cache, table, i), from, sizeof(struct cpu_member));
    return 0;
}

static int snapshot_import_stream(struct cpu_cache *cache, int slot, int stream,
                                  const struct kern_block *block) {
    struct snapshot_shape shape = snapshot_shape_of(cache);
    uint32_t *table = cpu_cache_table(cache, slot, stream);
    const struct cpu_layer *layer = cpu_cache_layer(cache, stream);
    int32_t length = snapshot_length(block);
    int32_t pages = cpu_cache_pages_for(layer, length);
    const char *from = (const char *)block->data + sizeof length;
    CHECK(length >= 0 && length <= cache->options.max_positions);
    CHECK(*cpu_cache_length(cache, slot, stream) == 0);
    if (pages > cache->free_count) return ERR_FULL;
    *cpu_cache_length(cache, slot, stream) = length;
    for (int32_t i = 0; i < pages; i++) table[i] = cpu_cache_take_page(cache);
    for (int part = 0; part < SNAPSHOT_PARTS; part++)
        for (int32_t i = 0; i < pages; i++) {
            size_t bytes = entries_of_page(layer, length, i) *
                           snapshot_part_bytes(&shape, stream, (enum snapshot_part)part);
            memcpy(page_part(cache, layer, table[i], part), from, bytes);
            from += bytes;
        }
    return import_members(cache, slot, stream, block);
}

static int snapshot_import_state(struct cpu_cache *cache, int slot, int state,
                                 const struct kern_block *block) {
    const int row = cpu_cache_states(cache) + state;
    CHECK(*cpu_cache_length(cache, slot, row) == 0);
    if (cache->state_pages > cache->free_count) return ERR_FULL;
    cpu_cache_extend(cache, slot, row, cache->state_pages);
    cpu_cache_state_write(cache, slot, state, 0, cache->options.state_floats, block->data);
    return 0;
}

static void import_arrays(struct cpu_cache *cache, int slot, const char *from) {
    struct snapshot_shape shape = snapshot_shape_of(cache);
    int32_t window = cache->slots[slot].window;
    struct snapshot_arrays at = snapshot_arrays(&shape, window);
    memcpy(cpu_cache_weights(cache, slot), from + at.weights, at.tau - at.weights);
    memcpy(cpu_cache_tau(cache, slot), from + at.tau, at.ring_pos - at.tau);
    if (window == 0) return;
    memcpy(cache->ring_pos + (size_t)slot * KERN_WINDOW_MAX, from + at.ring_pos,
           at.ring - at.ring_pos);
    from += at.ring;
    for (int layer = 0; layer < cache->options.layers; layer++) {
        const size_t bytes = (size_t)window * cpu_cache_query_bytes(cache, layer);
        memcpy(cpu_cache_query(cache, slot, layer, 0), from, bytes);
        from += bytes;
    }
}

int cpu_cache_snapshot_import(struct cpu_cache *cache, int slot, int block,
                              const struct kern_block *from) {
    CHECK(slot >= 0 && slot < cache->options.slots && block >= 0 &&
          block <= cache->streams + cache->options.states);
    CHECK(cache->slots[slot].in_use == (block > 0));
    if (block > cache->streams)
        return snapshot_import_state(cache, slot, block - 1 - cache->streams, from);
    if (block > 0) return snapshot_import_stream(cache, slot, block - 1, from);
    struct snapshot_slot head = snapshot_read_slot(from);
    CHECK(head.window >= 0 && head.window <= KERN_WINDOW_MAX);
    cache->slots[slot] = (struct cpu_cache_slot){.in_use = true,
                                                 .next_pos = head.next_pos,
                                                 .window = head.window,
                                                 .measured = head.measured};
    import_arrays(cache, slot, from->data);
    return 0;
}
