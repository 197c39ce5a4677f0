/* What a slot holds, as bytes that do not depend on the backend nor on how its pages lie (kern.h,
 * snapshot_*): where everything is in them, and what must be true of bytes from outside. Pure: a
 * backend copies between these places and its own memory.
 *
 * Block 0, the slot: version, next position, window, measured, then a description of every side
 * array (bytes per entry) and every slot array (bytes in all), then the slot arrays: the layers'
 * weights, the streams' thresholds of merging, and, with a window, the positions of the remembered
 * queries and the queries, layer after layer. Block 1 + stream: length, then the parts, each
 * [length] in the stream's order; then, where classes have members (kern.h), their number, above 0,
 * and a snapshot_member each, ascending by centre, then by position. All numbers little-endian. A
 * cache takes a snapshot only if it would describe its own slot in the same words, so a new side
 * record is a new line in a list and old files are refused.
 */
#ifndef KEEPD_KERNELS_SNAPSHOT_H
#define KEEPD_KERNELS_SNAPSHOT_H

#ifdef __cplusplus
extern "C" {
#endif

#include "kernels/kern.h"

/* What an entry consists of: side records, then key and value in the cache's dtype. */
enum snapshot_part {
    SNAPSHOT_POS, /* first: checked */
    SNAPSHOT_LOG_BETA,
    SNAPSHOT_SCORE,
    SNAPSHOT_KEY,
    SNAPSHOT_VALUE,
    SNAPSHOT_PARTS
};
#define SNAPSHOT_SIDES SNAPSHOT_KEY

struct snapshot_member {
    int32_t centre, pos;
    float gain;
};

/* The cache in question. */
struct snapshot_shape {
    const struct kern_cache_options *options;
    int page_slots;   /* entries per page, to count the pages that an import needs */
    int member_slots; /* members per page; 0: this backend keeps none */
    int ranks;        /* that hold different heads */
};

struct snapshot_slot {
    int32_t next_pos; /* positions below this may be held */
    int32_t window;   /* queries remembered, 0 = none */
    bool measured;    /* do the layers have their weights? */
};

/* Where the arrays of block 0 begin, and its size. ring_pos int32 [window]; ring float32
 * [layers][window][heads_q * head_dim]; weights float32 [layers]; tau float32 [streams]. */
struct snapshot_arrays {
    size_t weights, tau, ring_pos, ring, size;
};
struct snapshot_arrays snapshot_arrays(const struct snapshot_shape *shape, int32_t window);

/* Writes what stands before the arrays. */
void snapshot_write_head(const struct snapshot_shape *shape, const struct snapshot_slot *slot,
                         void *block);

/* Bytes of one part of one entry. */
size_t snapshot_part_bytes(const struct snapshot_shape *shape, enum snapshot_part part);
/* Where a part begins in the block of a stream of this length; for SNAPSHOT_PARTS, its size. */
size_t snapshot_part_at(const struct snapshot_shape *shape, int32_t length, int part);
/* Size of the block of a stream. Its members' number stands at snapshot_part_at(SNAPSHOT_PARTS). */
size_t snapshot_stream_size(const struct snapshot_shape *shape, int32_t length, int32_t members);

/* Reads nothing beyond the blocks, whatever they hold. Fills *slot and in *report entries,
 * pages (of all and of one rank) and members; ERR_MALFORMED (it has not seen so many tokens, too),
 * ERR_LIMIT (positions beyond max_positions), ERR_UNSUPPORTED (described in other words) or
 * ERR_NOMEM with the reason.
 */
int snapshot_check(const struct snapshot_shape *shape, const struct kern_block *blocks, int count,
                   int32_t tokens, struct snapshot_slot *slot, struct kern_report *report,
                   struct fault *fault);

/* Of block 0, and of a stream's block, that were checked. */
struct snapshot_slot snapshot_read_slot(const struct kern_block *block);
static inline int32_t snapshot_length(const struct kern_block *block) {
    int32_t length;
    __builtin_memcpy(&length, block->data, sizeof length);
    return length;
}

/* The same; in *at its first member, aligned to nothing. */
int32_t snapshot_members(const struct snapshot_shape *shape, const struct kern_block *block,
                         const char **at);

/* Block 0 of a sequence whose heads lie apart (tensor parallelism): `part` holds the KV heads from
 * `first` on of `whole`, with their groups. Join: what the part's block says of them goes into the
 * whole's, and so does what both say; when all parts have come, the block is complete. Split: a
 * block for the part. */
void snapshot_join(const struct snapshot_shape *whole, const struct snapshot_shape *part, int first,
                   const void *part_block, void *whole_block);
void snapshot_split(const struct snapshot_shape *whole, const struct snapshot_shape *part,
                    int first, const void *whole_block, void *part_block);

#ifdef __cplusplus
}
#endif

#endif
