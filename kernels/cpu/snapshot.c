/* What a slot holds, as bytes that do not depend on how pages are laid out (kernels/kern.h).
 *
 * Block 0, the slot: version, next position, window, then a description of every side array (bytes
 * per entry) and every slot array (bytes in all) in the order of the lists below, then the slot
 * arrays. Block 1 + stream: length, the side arrays, keys, values, each [length] in the stream's
 * order. All numbers little-endian. A cache takes a snapshot only if it would describe its own
 * slot in the same words, so a new side record is a new line in a list and old files are refused.
 */
#include <string.h>

#include "base/check.h"
#include "kernels/cpu/cache.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "snapshots are little-endian");

enum { VERSION = 2, DESCRIPTIONS_MAX = 16 };

struct description {
    char name[12];
    uint32_t bytes;
};

struct slot_head {
    uint32_t version;
    int32_t next_pos, window;
    uint32_t measured; /* do the layers have their weights? */
    uint32_t count;    /* descriptions in use */
    struct description descriptions[DESCRIPTIONS_MAX];
};

static size_t query_bytes(const struct cpu_cache *cache) {
    const struct kern_cache_options *o = &cache->options;
    return (size_t)o->heads_q * (size_t)o->head_dim * sizeof(float);
}

/* Nothing without a window. */
static size_t ring_bytes(const struct cpu_cache *cache, int32_t window) {
    return (size_t)window * (sizeof(int32_t) + (size_t)cache->options.layers * query_bytes(cache));
}

static size_t weights_bytes(const struct cpu_cache *cache) {
    return (size_t)cache->options.layers * sizeof *cache->weights;
}

static size_t tau_bytes(const struct cpu_cache *cache) {
    return (size_t)cache->streams * sizeof *cache->tau;
}

static size_t arrays_bytes(const struct cpu_cache *cache, int32_t window) {
    return weights_bytes(cache) + tau_bytes(cache) + ring_bytes(cache, window);
}

static void describe(struct slot_head *head, const char *name, size_t bytes) {
    CHECK(head->count < DESCRIPTIONS_MAX);
    struct description *to = &head->descriptions[head->count++];
    memcpy(to->name, name, strlen(name));
    to->bytes = (uint32_t)bytes;
}

static void fill_head(const struct cpu_cache *cache, const struct cpu_cache_slot *state,
                      struct slot_head *head) {
    memset(head, 0, sizeof *head);
    head->version = VERSION;
    head->next_pos = state->next_pos;
    head->window = state->window;
    head->measured = state->measured;
    for (int i = 0; i < CPU_CACHE_SIDES; i++)
        describe(head, cpu_cache_sides[i].name, cpu_cache_sides[i].bytes);
    describe(head, "weights", weights_bytes(cache));
    describe(head, "tau", tau_bytes(cache));
    describe(head, "ring", ring_bytes(cache, state->window));
}

static size_t entry_bytes(const struct cpu_cache *cache) {
    size_t bytes = 2 * cache->row_size;
    for (int i = 0; i < CPU_CACHE_SIDES; i++) bytes += cpu_cache_sides[i].bytes;
    return bytes;
}

/* ---- Out ------------------------------------------------------------------------------------ */

size_t cpu_cache_snapshot_size(const struct cpu_cache *cache, int slot, int block) {
    CHECK(slot >= 0 && slot < cache->options.slots && block >= 0 && block <= cache->streams);
    if (block == 0)
        return sizeof(struct slot_head) + arrays_bytes(cache, cache->slots[slot].window);
    size_t length = (size_t)*cpu_cache_length(cache, slot, block - 1);
    return sizeof(int32_t) + length * entry_bytes(cache);
}

static char *put(char *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes);
    return to + bytes;
}

static void export_slot(const struct cpu_cache *cache, int slot, char *to) {
    const struct cpu_cache_slot *state = &cache->slots[slot];
    struct slot_head head;
    size_t window = (size_t)state->window;
    fill_head(cache, state, &head);
    to = put(to, &head, sizeof head);
    to = put(to, cpu_cache_weights(cache, slot), weights_bytes(cache));
    to = put(to, cpu_cache_tau(cache, slot), tau_bytes(cache));
    if (window == 0) return;
    to = put(to, cache->ring_pos + (size_t)slot * KERN_WINDOW_MAX, window * sizeof(int32_t));
    for (int layer = 0; layer < cache->options.layers; layer++)
        to = put(to, cpu_cache_query(cache, slot, layer, 0), window * query_bytes(cache));
}

/* Parts 0..sides-1 are side arrays, then keys, then values. */
static char *part_at(const struct cpu_cache *cache, uint32_t page, int part) {
    if (part < CPU_CACHE_SIDES) return cpu_cache_side(cache, part, page);
    return part == CPU_CACHE_SIDES ? cpu_cache_k(cache, page) : cpu_cache_v(cache, page);
}

static size_t part_bytes(const struct cpu_cache *cache, int part) {
    return part < CPU_CACHE_SIDES ? cpu_cache_sides[part].bytes : cache->row_size;
}

enum { PARTS = CPU_CACHE_SIDES + 2 };

/* Entries of page `i` of a stream of this length. */
static size_t entries_of_page(const struct cpu_cache *cache, int32_t length, int32_t i) {
    int32_t left = length - i * cache->page_slots;
    return (size_t)(left < cache->page_slots ? left : cache->page_slots);
}

static void export_stream(const struct cpu_cache *cache, int slot, int stream, char *to) {
    const uint32_t *table = cpu_cache_table(cache, slot, stream);
    int32_t length = *cpu_cache_length(cache, slot, stream);
    int32_t pages = cpu_cache_pages_for(cache, length);
    to = put(to, &length, sizeof length);
    for (int part = 0; part < PARTS; part++)
        for (int32_t i = 0; i < pages; i++)
            to = put(to, part_at(cache, table[i], part),
                     entries_of_page(cache, length, i) * part_bytes(cache, part));
}

void cpu_cache_snapshot_export(const struct cpu_cache *cache, int slot, int block, void *to) {
    CHECK(slot >= 0 && slot < cache->options.slots && block >= 0 && block <= cache->streams);
    if (block == 0)
        export_slot(cache, slot, to);
    else
        export_stream(cache, slot, block - 1, to);
}

/* ---- In ------------------------------------------------------------------------------------- */

static int malformed(struct fault *fault, const char *what, int block) {
    return fault_set(fault, ERR_MALFORMED, "snapshot", "block %d: %s", block, what);
}

static int check_slot(const struct cpu_cache *cache, const struct kern_block *block,
                      struct slot_head *head, struct fault *fault) {
    struct slot_head own;
    if (block->size < sizeof *head) return malformed(fault, "too short", 0);
    memcpy(head, block->data, sizeof *head);
    if (head->window < 0 || head->window > KERN_WINDOW_MAX)
        return malformed(fault, "a window out of range", 0);
    if (head->next_pos < 0 || head->next_pos > cache->options.max_positions)
        return fault_set(fault, ERR_LIMIT, "snapshot", "its positions end at %d, ours at %d",
                         head->next_pos, cache->options.max_positions);
    struct cpu_cache_slot state = {
        .next_pos = head->next_pos, .window = head->window, .measured = head->measured == 1};
    fill_head(cache, &state, &own);
    if (memcmp(&own, head, sizeof own) != 0)
        return fault_set(fault, ERR_UNSUPPORTED, "snapshot",
                         "entries carry other side records than this version's");
    if (block->size != sizeof *head + arrays_bytes(cache, head->window))
        return malformed(fault, "not the size of its arrays", 0);
    const char *ring_pos =
        (const char *)block->data + sizeof *head + weights_bytes(cache) + tau_bytes(cache);
    for (int32_t i = 0; i < head->window; i++) {
        int32_t pos;
        memcpy(&pos, ring_pos + (size_t)i * sizeof pos, sizeof pos);
        if (pos < -1 || pos >= head->next_pos || (pos >= 0 && pos % head->window != i))
            return malformed(fault, "a query at a wrong place", 0);
    }
    return 0;
}

static int check_stream(const struct cpu_cache *cache, const struct kern_block *block, int index,
                        int32_t next_pos, int32_t *length, struct fault *fault) {
    const char *data = block->data;
    if (block->size < sizeof *length) return malformed(fault, "too short", index);
    memcpy(length, data, sizeof *length);
    if (*length < 0 || *length > cache->options.max_positions)
        return malformed(fault, "a length out of range", index);
    if (block->size != sizeof *length + (size_t)*length * entry_bytes(cache))
        return malformed(fault, "not the size of its entries", index);
    int32_t last = -1;
    for (int32_t i = 0; i < *length; i++) { /* positions are the first side array */
        int32_t pos;
        memcpy(&pos, data + sizeof *length + (size_t)i * sizeof pos, sizeof pos);
        if (pos <= last || pos >= next_pos)
            return malformed(fault, "positions out of order", index);
        last = pos;
    }
    return 0;
}

int cpu_cache_snapshot_check(const struct cpu_cache *cache, const struct kern_block *blocks,
                             int count, struct kern_report *report, struct fault *fault) {
    struct slot_head head;
    report->entries = 0;
    report->pages = 0;
    if (count != 1 + cache->streams)
        return fault_set(fault, ERR_MALFORMED, "snapshot", "%d blocks for %d streams", count,
                         cache->streams);
    int code = check_slot(cache, &blocks[0], &head, fault);
    for (int i = 1; i < count && code == 0; i++) {
        int32_t length = 0;
        code = check_stream(cache, &blocks[i], i, head.next_pos, &length, fault);
        if (code != 0) break;
        report->entries += (size_t)length;
        report->pages += cpu_cache_pages_for(cache, length);
    }
    return code;
}

static void import_stream(struct cpu_cache *cache, int slot, int stream, const char *from) {
    uint32_t *table = cpu_cache_table(cache, slot, stream);
    int32_t *length = cpu_cache_length(cache, slot, stream);
    memcpy(length, from, sizeof *length);
    from += sizeof *length;
    int32_t pages = cpu_cache_pages_for(cache, *length);
    for (int32_t i = 0; i < pages; i++) table[i] = cpu_cache_take_page(cache);
    for (int part = 0; part < PARTS; part++)
        for (int32_t i = 0; i < pages; i++) {
            size_t bytes = entries_of_page(cache, *length, i) * part_bytes(cache, part);
            memcpy(part_at(cache, table[i], part), from, bytes);
            from += bytes;
        }
}

static void import_arrays(struct cpu_cache *cache, int slot, const char *from) {
    size_t window = (size_t)cache->slots[slot].window;
    memcpy(cpu_cache_weights(cache, slot), from, weights_bytes(cache));
    from += weights_bytes(cache);
    memcpy(cpu_cache_tau(cache, slot), from, tau_bytes(cache));
    from += tau_bytes(cache);
    if (window == 0) return;
    memcpy(cache->ring_pos + (size_t)slot * KERN_WINDOW_MAX, from, window * sizeof(int32_t));
    from += window * sizeof(int32_t);
    for (int layer = 0; layer < cache->options.layers; layer++) {
        memcpy(cpu_cache_query(cache, slot, layer, 0), from, window * query_bytes(cache));
        from += window * query_bytes(cache);
    }
}

int cpu_cache_snapshot_import(struct cpu_cache *cache, int slot, const struct kern_block *blocks,
                              int count, struct fault *fault) {
    struct kern_report report;
    struct slot_head head;
    CHECK(slot >= 0 && slot < cache->options.slots && !cache->slots[slot].in_use);
    int code = cpu_cache_snapshot_check(cache, blocks, count, &report, fault);
    if (code != 0) return code;
    if (report.pages > cache->free_count)
        return fault_set(fault, ERR_FULL, "snapshot", "it needs %lld pages and %lld are free",
                         (long long)report.pages, (long long)cache->free_count);
    memcpy(&head, blocks[0].data, sizeof head);
    cache->slots[slot] =
        (struct cpu_cache_slot){.in_use = true, .next_pos = head.next_pos, .window = head.window};
    cache->slots[slot].measured = head.measured;
    import_arrays(cache, slot, (const char *)blocks[0].data + sizeof head);
    for (int i = 1; i < count; i++) import_stream(cache, slot, i - 1, blocks[i].data);
    return 0;
}
