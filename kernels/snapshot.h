/* The contents of a slot as bytes that do not depend on the backend nor on the arrangement of its
 * pages (kern.h, snapshot_*): the position of everything in them, and the conditions that bytes
 * from outside must meet. Pure: a backend copies between these positions and its own memory.
 *
 * Block 0, the slot: version, next position, window, measured, then a description of every side
 * array (bytes per entry) and every slot array (bytes in all), and, of a slot that was shifted, the
 * number of its model's positions (kernels/places.h); then the slot arrays: the layers'
 * weights, the streams' merge thresholds, and, with a window, the positions of the stored queries
 * and the queries, layer after layer. Block 1 + stream: length, then the parts, each [length] in
 * the stream's order; then, where classes have members (kern_rule.h), their number, above 0, and a
 * snapshot_member each, ascending by centre, then by position. Then a block for each recurrent
 * state: its float32 numbers. All numbers are little-endian. A cache accepts a snapshot only if its
 * description equals that of its own slots, so a new side record is a new line in a list and old
 * files are refused. */
#ifndef KEEPD_KERNELS_SNAPSHOT_H
#define KEEPD_KERNELS_SNAPSHOT_H

#ifdef __cplusplus
extern "C" {
#endif

#include "kernels/kern.h"

/* The parts of an entry: side records, then key and value in the cache's dtype, then their factors,
 * of 0 bytes in a dtype without factors (kernels/row.h). A value that its key holds has 0 bytes. */
enum snapshot_part {
    SNAPSHOT_POS, /* first, because it is checked */
    SNAPSHOT_LOG_BETA,
    SNAPSHOT_SCORE,
    SNAPSHOT_KEY,
    SNAPSHOT_VALUE,
    SNAPSHOT_KEY_FACTOR,
    SNAPSHOT_VALUE_FACTOR,
    SNAPSHOT_PARTS
};
#define SNAPSHOT_SIDES SNAPSHOT_KEY

struct snapshot_member {
    int32_t centre, pos;
    float gain;
};

struct snapshot_layer {
    int heads_q, heads_kv, head_dim;
    int page_slots; /* entries per page, to count the pages of an import */
};

/* Shape of the cache that a snapshot belongs to. */
struct snapshot_shape {
    const struct kern_cache_options *options;
    int page_slots;
    const struct snapshot_layer *layers; /* [layers]; NULL: all as in options, with page_slots */
    int member_slots;                    /* members per page; 0: this backend stores none */
    int state_pages;                     /* pages of a recurrent state on each rank */
    int ranks;                           /* ranks that hold different heads */
    bool shifts; /* this backend can shift slots (kern_shift), so it may take shifted ones */
};

struct snapshot_slot {
    int32_t next_pos; /* all held positions are lower */
    int32_t window;   /* number of stored queries, 0 = none */
    bool measured;    /* do the layers have measured weights? */
};

/* Offsets of the arrays in block 0, and its size. ring_pos int32 [window]; ring float32
 * of each layer [window][heads_q * head_dim]; weights float32 [layers]; tau float32 [streams]. */
struct snapshot_arrays {
    size_t weights, tau, ring_pos, ring, size;
};
struct snapshot_arrays snapshot_arrays(const struct snapshot_shape *shape, int32_t window);

/* Writes everything before the arrays. */
void snapshot_write_head(const struct snapshot_shape *shape, const struct snapshot_slot *slot,
                         void *block);

/* Bytes of one part of one entry of a stream. */
size_t snapshot_part_bytes(const struct snapshot_shape *shape, int stream, enum snapshot_part part);
/* Offset of a part in the block of a stream of this length; for SNAPSHOT_PARTS, the size of all
 * parts. */
size_t snapshot_part_at(const struct snapshot_shape *shape, int stream, int32_t length, int part);
/* Size of a stream's block. The number of members is at snapshot_part_at(SNAPSHOT_PARTS). */
size_t snapshot_stream_size(const struct snapshot_shape *shape, int stream, int32_t length,
                            int32_t members);

/* Size of the block of a recurrent state. */
size_t snapshot_state_size(const struct snapshot_shape *shape);

/* Reads nothing beyond the blocks, whatever they hold. Fills *slot and, in *report, entries, pages
 * (of all ranks and of one) and members. ERR_MALFORMED (also if the slot cannot have seen `tokens`
 * tokens), ERR_LIMIT (positions beyond max_positions), ERR_UNSUPPORTED (another description) or
 * ERR_NOMEM, with the reason. */
int snapshot_check(const struct snapshot_shape *shape, const struct kern_block *blocks, int count,
                   int32_t tokens, struct snapshot_slot *slot, struct kern_report *report,
                   struct fault *fault);

/* Read block 0, and a stream's block, after the check. */
struct snapshot_slot snapshot_read_slot(const struct kern_block *block);
static inline int32_t snapshot_length(const struct kern_block *block) {
    int32_t length;
    __builtin_memcpy(&length, block->data, sizeof length);
    return length;
}

/* The same for members; *at is the first one, which may be unaligned. */
int32_t snapshot_members(const struct snapshot_shape *shape, int stream,
                         const struct kern_block *block, const char **at);

/* Block 0 of a sequence whose heads are on several ranks (tensor parallelism). Each part holds as
 * many KV heads of a layer as the others, with their groups; `place` is its number among the parts,
 * in the order of the heads. Join: copies the part's block
 * into the whole's, including common fields; after all parts, the block is complete. Split:
 * extracts the part's block. */
void snapshot_join(const struct snapshot_shape *whole, const struct snapshot_shape *part, int place,
                   const void *part_block, void *whole_block);
void snapshot_split(const struct snapshot_shape *whole, const struct snapshot_shape *part,
                    int place, const void *whole_block, void *part_block);

#ifdef __cplusplus
}
#endif

#endif
