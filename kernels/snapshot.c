/* The snapshot format: positions of everything in a block, and the checks of bytes from outside. A
 * check reads nothing beyond the blocks and verifies everything that an import relies on. */
#include "kernels/snapshot.h"

#include <math.h>
#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "kernels/comm.h"
#include "kernels/places.h"
#include "kernels/row.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "snapshots are little-endian");

enum { VERSION = 2, DESCRIPTIONS_MAX = 16 };

struct description {
    char name[12];
    uint32_t bytes;
};

struct slot_head {
    uint32_t version;
    int32_t next_pos, window;
    uint32_t measured;
    uint32_t count; /* descriptions in use */
    struct description descriptions[DESCRIPTIONS_MAX];
};

/* The side records in the order of enum snapshot_part. */
static const struct {
    const char *name;
    size_t bytes;
} sides[] = {{"pos", sizeof(int32_t)}, {"log_beta", sizeof(float)}, {"score", sizeof(float)}};
_Static_assert(sizeof sides / sizeof *sides == SNAPSHOT_SIDES, "a name for every side record");

static struct snapshot_layer layer_at(const struct snapshot_shape *shape, int layer) {
    const struct kern_cache_options *o = shape->options;
    return shape->layers
               ? shape->layers[layer]
               : (struct snapshot_layer){o->heads_q, o->heads_kv, o->head_dim, shape->page_slots};
}

/* The layer of a stream; *head: which of its heads. */
static struct snapshot_layer layer_of(const struct snapshot_shape *shape, int stream, int *head) {
    struct snapshot_layer layer = layer_at(shape, 0);
    for (int i = 1; shape->layers && stream >= layer.heads_kv; i++) {
        stream -= layer.heads_kv;
        layer = layer_at(shape, i);
    }
    *head = stream % layer.heads_kv;
    return layer;
}

static size_t query_bytes(const struct snapshot_layer *layer) {
    return (size_t)layer->heads_q * (size_t)layer->head_dim * sizeof(float);
}

static size_t snapshot_stream_count(const struct snapshot_shape *shape) {
    size_t streams = 0;
    for (int i = 0; i < shape->options->layers; i++) streams += (size_t)layer_at(shape, i).heads_kv;
    return streams;
}

/* ---- The slot ---- */

struct snapshot_arrays snapshot_arrays(const struct snapshot_shape *shape, int32_t window) {
    const struct kern_cache_options *o = shape->options;
    size_t layers = (size_t)o->layers, queries = (size_t)window;
    struct snapshot_arrays at = {.weights = sizeof(struct slot_head)};
    at.tau = at.weights + layers * sizeof(float);
    at.ring_pos = at.tau + snapshot_stream_count(shape) * sizeof(float);
    at.ring = at.ring_pos + queries * sizeof(int32_t);
    at.size = at.ring;
    for (int i = 0; i < o->layers; i++) {
        const struct snapshot_layer layer = layer_at(shape, i);
        at.size += queries * query_bytes(&layer);
    }
    return at;
}

static void snapshot_describe(struct slot_head *head, const char *name, size_t bytes) {
    CHECK(head->count < DESCRIPTIONS_MAX);
    struct description *to = &head->descriptions[head->count++];
    memcpy(to->name, name, strlen(name));
    to->bytes = (uint32_t)bytes;
}

static void fill_head(const struct snapshot_shape *shape, const struct snapshot_slot *slot,
                      struct slot_head *head) {
    struct snapshot_arrays at = snapshot_arrays(shape, slot->window);
    memset(head, 0, sizeof *head);
    head->version = VERSION;
    head->next_pos = slot->next_pos;
    head->window = slot->window;
    head->measured = slot->measured;
    for (int i = 0; i < SNAPSHOT_SIDES; i++) snapshot_describe(head, sides[i].name, sides[i].bytes);
    snapshot_describe(head, "weights", at.tau - at.weights);
    snapshot_describe(head, "tau", at.ring_pos - at.tau);
    snapshot_describe(head, "ring", at.size - at.ring_pos);
    /* Keys of a text that is longer lie at places that depend on the model's positions. */
    if (slot->next_pos > shape->options->max_positions)
        snapshot_describe(head, "places", (size_t)shape->options->max_positions);
}

void snapshot_write_head(const struct snapshot_shape *shape, const struct snapshot_slot *slot,
                         void *block) {
    struct slot_head head;
    fill_head(shape, slot, &head);
    memcpy(block, &head, sizeof head);
}

/* ---- A stream ---- */

size_t snapshot_part_bytes(const struct snapshot_shape *shape, int stream,
                           enum snapshot_part part) {
    const enum kern_dtype dtype = shape->options->dtype;
    int head;
    if (part < SNAPSHOT_SIDES) return sides[part].bytes;
    if (part >= SNAPSHOT_KEY_FACTOR) return row_factor_bytes(dtype);
    if (part == SNAPSHOT_VALUE && shape->options->latent) return 0;
    return row_code_bytes(dtype, layer_of(shape, stream, &head).head_dim);
}

size_t snapshot_part_at(const struct snapshot_shape *shape, int stream, int32_t length, int part) {
    size_t bytes = 0;
    for (int i = 0; i < part; i++)
        bytes += snapshot_part_bytes(shape, stream, (enum snapshot_part)i);
    return sizeof length + (size_t)length * bytes;
}

size_t snapshot_stream_size(const struct snapshot_shape *shape, int stream, int32_t length,
                            int32_t members) {
    size_t size = snapshot_part_at(shape, stream, length, SNAPSHOT_PARTS);
    if (members == 0) return size;
    return size + sizeof members + (size_t)members * sizeof(struct snapshot_member);
}

size_t snapshot_state_size(const struct snapshot_shape *shape) {
    return (size_t)shape->options->state_floats * sizeof(float);
}

int32_t snapshot_members(const struct snapshot_shape *shape, int stream,
                         const struct kern_block *block, const char **at) {
    size_t end = snapshot_part_at(shape, stream, snapshot_length(block), SNAPSHOT_PARTS);
    int32_t members = 0;
    *at = (const char *)block->data + end;
    if (block->size < end + sizeof members) return 0;
    memcpy(&members, *at, sizeof members);
    *at += sizeof members;
    return members;
}

/* ---- Checks ---- */

static int snapshot_malformed(struct fault *fault, const char *what, int block) {
    return fault_set(fault, ERR_MALFORMED, "snapshot", "block %d: %s", block, what);
}

static int check_ring(const char *ring_pos, const struct snapshot_slot *slot, struct fault *fault) {
    for (int32_t i = 0; i < slot->window; i++) {
        int32_t pos;
        memcpy(&pos, ring_pos + (size_t)i * sizeof pos, sizeof pos);
        if (pos < -1 || pos >= slot->next_pos || (pos >= 0 && pos % slot->window != i))
            return snapshot_malformed(fault, "a query at a wrong place", 0);
    }
    return 0;
}

struct snapshot_slot snapshot_read_slot(const struct kern_block *block) {
    struct slot_head head;
    memcpy(&head, block->data, sizeof head);
    return (struct snapshot_slot){
        .next_pos = head.next_pos, .window = head.window, .measured = head.measured == 1};
}

static int check_slot(const struct snapshot_shape *shape, const struct kern_block *block,
                      int32_t tokens, struct snapshot_slot *slot, struct fault *fault) {
    struct slot_head head, own;
    int32_t most = shape->options->max_positions;
    if (block->size < sizeof head) return snapshot_malformed(fault, "too short", 0);
    memcpy(&head, block->data, sizeof head);
    if (head.window < 0 || head.window > KERN_WINDOW_MAX)
        return snapshot_malformed(fault, "a window out of range", 0);
    if (head.next_pos < 0) return snapshot_malformed(fault, "a negative number of tokens", 0);
    if (head.next_pos != tokens)
        return snapshot_malformed(fault, "it has seen another number of tokens", 0);
    *slot = snapshot_read_slot(block);
    fill_head(shape, slot, &own);
    if (head.next_pos > most && (!shape->shifts || memcmp(&own, &head, sizeof own) != 0))
        return fault_set(fault, ERR_LIMIT, "snapshot", "its positions end at %d, ours at %d",
                         head.next_pos, most);
    if (memcmp(&own, &head, sizeof own) != 0)
        return fault_set(fault, ERR_UNSUPPORTED, "snapshot",
                         "entries carry other side records than this version's");
    struct snapshot_arrays at = snapshot_arrays(shape, slot->window);
    if (block->size != at.size) return snapshot_malformed(fault, "not the size of its arrays", 0);
    return check_ring((const char *)block->data + at.ring_pos, slot, fault);
}

/* Has the stream an entry at this position? */
static bool has_entry(const char *positions, int32_t length, int32_t pos) {
    int32_t lo = 0, hi = length, found;
    while (lo < hi) {
        int32_t mid = lo + (hi - lo) / 2;
        memcpy(&found, positions + (size_t)mid * sizeof found, sizeof found);
        if (found == pos) return true;
        if (found < pos)
            lo = mid + 1;
        else
            hi = mid;
    }
    return false;
}

/* Marks the token's position as taken; false if it already was. */
static bool take_position(uint8_t *taken, int32_t pos) {
    uint8_t bit = (uint8_t)(1u << pos % 8);
    if (taken[pos / 8] & bit) return false;
    taken[pos / 8] |= bit;
    return true;
}

/* Checks the members at `at`, one by one; `taken` has a bit for every position, none of them
 * set. */
static bool are_members(const struct kern_block *block, const char *at, int32_t count,
                        int32_t next_pos, uint8_t *taken) {
    const char *entries = (const char *)block->data + sizeof(int32_t);
    int32_t length = snapshot_length(block), pos;
    struct snapshot_member last = {-1, -1, 0}, member;
    for (int32_t i = 0; i < length; i++) {
        memcpy(&pos, entries + (size_t)i * sizeof pos, sizeof pos);
        (void)take_position(taken, pos);
    }
    for (int32_t i = 0; i < count; i++, last = member) {
        memcpy(&member, at + (size_t)i * sizeof member, sizeof member);
        bool ascends =
            member.centre > last.centre || (member.centre == last.centre && member.pos > last.pos);
        if (!ascends || member.pos < 0 || member.pos >= next_pos || !(member.gain >= 0) ||
            !isfinite(member.gain) || !has_entry(entries, length, member.centre) ||
            !take_position(taken, member.pos))
            return false;
    }
    return true;
}

/* The most entries of a stream: as many as there are places below the next token's. */
static int32_t length_most(const struct snapshot_shape *shape, int32_t next_pos) {
    int32_t positions = shape->options->max_positions;
    return next_pos - places_shifts(positions, next_pos) * places_room(positions);
}

/* Checks the members behind the entries. A position belongs to one token, so entries and members
 * together never exceed the number of positions, also after later ones are dropped: buffers for a
 * stream rely on it. */
static int snapshot_check_members(const struct snapshot_shape *shape,
                                  const struct kern_block *block, int index, int32_t next_pos,
                                  struct fault *fault) {
    const char *at;
    const int stream = index - 1;
    int32_t length = snapshot_length(block), count = snapshot_members(shape, stream, block, &at);
    if (block->size == snapshot_part_at(shape, stream, length, SNAPSHOT_PARTS)) return 0;
    if (count < 1 || count > next_pos - length ||
        block->size != snapshot_stream_size(shape, stream, length, count))
        return snapshot_malformed(fault, "not the size of its members", index);
    if (next_pos > shape->options->max_positions)
        return snapshot_malformed(fault, "members of classes that cannot be shifted", index);
    if (shape->member_slots == 0)
        return fault_set(fault, ERR_UNSUPPORTED, "snapshot",
                         "its entries have classes, which this backend does not keep");
    uint8_t *taken = mem_try_alloc((size_t)next_pos / 8 + 1, 1);
    if (!taken) return fault_set(fault, ERR_NOMEM, "snapshot", "no memory for the check");
    bool sound = are_members(block, at, count, next_pos, taken);
    mem_free(taken);
    return sound ? 0 : snapshot_malformed(fault, "a member that cannot be", index);
}

static int snapshot_check_stream(const struct snapshot_shape *shape, const struct kern_block *block,
                                 int index, int32_t next_pos, struct fault *fault) {
    if (block->size < sizeof(int32_t)) return snapshot_malformed(fault, "too short", index);
    int32_t length = snapshot_length(block), last = -1;
    if (length < 0 || length > length_most(shape, next_pos))
        return snapshot_malformed(fault, "a length out of range", index);
    if (block->size < snapshot_part_at(shape, index - 1, length, SNAPSHOT_PARTS))
        return snapshot_malformed(fault, "not the size of its entries", index);
    const char *at =
        (const char *)block->data + snapshot_part_at(shape, index - 1, length, SNAPSHOT_POS);
    for (int32_t i = 0; i < length; i++) {
        int32_t pos;
        memcpy(&pos, at + (size_t)i * sizeof pos, sizeof pos);
        if (pos <= last || pos >= next_pos)
            return snapshot_malformed(fault, "positions out of order", index);
        last = pos;
    }
    return snapshot_check_members(shape, block, index, next_pos, fault);
}

/* Entries and pages that each rank will have. */
struct rank_counts {
    int64_t pages[COMM_RANKS_MAX];
    size_t entries[COMM_RANKS_MAX];
};

/* Counts a checked block of a stream. */
static void snapshot_count_stream(const struct snapshot_shape *shape,
                                  const struct kern_block *block, int stream,
                                  struct rank_counts *counts, struct kern_report *report) {
    const char *at;
    int head;
    const struct snapshot_layer layer = layer_of(shape, stream, &head);
    const int rank = head * shape->ranks / layer.heads_kv;
    int32_t length = snapshot_length(block), members = snapshot_members(shape, stream, block, &at);
    int64_t pages = (length + layer.page_slots - 1) / layer.page_slots;
    if (members > 0) pages += (members - 1) / shape->member_slots + 1;
    report->entries += (size_t)length;
    report->pages += pages;
    if (members > report->members) report->members = members;
    counts->entries[rank] += (size_t)length;
    counts->pages[rank] += pages;
    if (counts->entries[rank] > report->rank_entries) report->rank_entries = counts->entries[rank];
    if (counts->pages[rank] > report->rank_pages) report->rank_pages = counts->pages[rank];
}

int snapshot_check(const struct snapshot_shape *shape, const struct kern_block *blocks, int count,
                   int32_t tokens, struct snapshot_slot *slot, struct kern_report *report,
                   struct fault *fault) {
    const int streams = (int)snapshot_stream_count(shape), states = shape->options->states;
    const int64_t state_pages = (int64_t)states * shape->state_pages;
    struct rank_counts counts = {0};
    report->entries = report->rank_entries = 0;
    report->pages = report->rank_pages = 0;
    report->members = 0;
    report->state_bytes = (size_t)states * snapshot_state_size(shape);
    if (count != 1 + streams + states)
        return fault_set(fault, ERR_MALFORMED, "snapshot", "%d blocks for %d streams and %d states",
                         count, streams, states);
    int rc = check_slot(shape, &blocks[0], tokens, slot, fault);
    for (int i = 1; i <= streams && rc == 0; i++) {
        rc = snapshot_check_stream(shape, &blocks[i], i, slot->next_pos, fault);
        if (rc == 0) snapshot_count_stream(shape, &blocks[i], i - 1, &counts, report);
    }
    for (int i = 1 + streams; i < count && rc == 0; i++)
        if (blocks[i].size != snapshot_state_size(shape))
            rc = snapshot_malformed(fault, "not the size of a state", i);
    report->pages += shape->ranks * state_pages;
    report->rank_pages += state_pages;
    return rc;
}

/* ---- Parts ---- */

/* Copies rows of `width` bytes, which are parts of longer rows on one of the sides. */
static void snapshot_copy_rows(char *to, size_t to_stride, const char *from, size_t from_stride,
                               size_t rows, size_t width) {
    for (size_t i = 0; i < rows; i++) memcpy(to + i * to_stride, from + i * from_stride, width);
}

/* Where an array is in the two blocks. */
struct sides_of {
    char *whole, *part;
};

/* Copies `rows` rows between the whole, which has `all` bytes of each, and a part, which has `own`.
 * Both places then point behind these rows. */
static void copy_part(struct sides_of *at, size_t rows, size_t all, size_t own, int place,
                      bool join) {
    char *there = at->whole + (size_t)place * own, *here = at->part;
    if (join)
        snapshot_copy_rows(there, all, here, own, rows, own);
    else
        snapshot_copy_rows(here, own, there, all, rows, own);
    at->whole += rows * all;
    at->part += rows * own;
}

/* Copies the arrays that have a row for every head, layer by layer, between the two blocks.
 * `place`: the number of the part. */
static void copy_heads(const struct snapshot_shape *whole, const struct snapshot_shape *part,
                       int place, int32_t window, char *whole_block, char *part_block, bool join) {
    const struct snapshot_arrays at = snapshot_arrays(whole, window),
                                 part_at = snapshot_arrays(part, window);
    struct sides_of tau = {whole_block + at.tau, part_block + part_at.tau},
                    ring = {whole_block + at.ring, part_block + part_at.ring};
    for (int i = 0; i < whole->options->layers; i++) {
        const struct snapshot_layer all = layer_at(whole, i), own = layer_at(part, i);
        copy_part(&tau, 1, (size_t)all.heads_kv * sizeof(float),
                  (size_t)own.heads_kv * sizeof(float), place, join);
        copy_part(&ring, (size_t)window, query_bytes(&all), query_bytes(&own), place, join);
    }
}

/* Copies what is equal in both blocks. */
static void copy_common(const struct snapshot_shape *to_shape, char *to,
                        const struct snapshot_shape *from_shape, const char *from) {
    struct kern_block block = {.data = from};
    struct snapshot_slot slot = snapshot_read_slot(&block);
    struct snapshot_arrays to_at = snapshot_arrays(to_shape, slot.window);
    struct snapshot_arrays from_at = snapshot_arrays(from_shape, slot.window);
    snapshot_write_head(to_shape, &slot, to);
    memcpy(to + to_at.weights, from + from_at.weights, to_at.tau - to_at.weights);
    memcpy(to + to_at.ring_pos, from + from_at.ring_pos, to_at.ring - to_at.ring_pos);
}

void snapshot_join(const struct snapshot_shape *whole, const struct snapshot_shape *part, int place,
                   const void *part_block, void *whole_block) {
    const struct kern_block block = {.data = part_block};
    copy_common(whole, whole_block, part, part_block);
    copy_heads(whole, part, place, snapshot_read_slot(&block).window, whole_block,
               (char *)(uintptr_t)part_block, true);
}

void snapshot_split(const struct snapshot_shape *whole, const struct snapshot_shape *part,
                    int place, const void *whole_block, void *part_block) {
    const struct kern_block block = {.data = whole_block};
    copy_common(part, part_block, whole, whole_block);
    copy_heads(whole, part, place, snapshot_read_slot(&block).window,
               (char *)(uintptr_t)whole_block, part_block, false);
}
