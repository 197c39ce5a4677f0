/* Products of weights in blocks (kernels/blocks.h) with activations in int8 or int16.
 *
 * A panel of 16 outputs is [blocks][codes] and then [blocks][factors]:
 *
 *   codes, 8 bits   512 bytes: vector v of 0..7 has the inputs 4 v to 4 v + 3 of each output, as
 *                   unsigned n + 128
 *   codes, 4 bits   256 bytes: byte j of vector v of 0..3 has vector v of the above in its low half
 *                   and vector v + 4 in its high one, as n + 8 (Q4) or n (Q4M)
 *   factors         16 scales, then in Q8S and Q8SM those of the second halves, then in Q8M, Q4M
 *                   and Q8SM 16 terms `least`; float16 where that is exact for the whole weight,
 *                   otherwise float32
 *
 * An activation row is rounded in blocks of 32 inputs, too: x = scale c, c = x / scale to nearest
 * even.
 *
 * int16: scale = largest |x| / 32767. A block below 2^-80 is zero.
 *
 * int8: all scales of a leaf are its unit, u, times 2^-k. A block is eight quads of four
 * consecutive inputs. Groups are CPU_REST_GROUP consecutive blocks of a leaf, and the last may have
 * fewer. In each group the quad with the largest |x| (the first of several) has c of 15 bits, all
 * others of 8. A block's need is its largest |x| in quads of 8 bits or, if that is more, 2^-7 of
 * its largest. The leaf's need is the largest of them, u is the leaf's need / 127, and k of 0..30
 * is the largest with 2^k need <= the leaf's need. So |c| <= 127 or <= 127 * 128. Of a quad of 15
 * bits the block has l = c - 128 h with h = (c + 64) >> 7, and h is the group's rest: a product of
 * four inputs, with the scale 128 u 2^-k. A leaf below 2^-80 is zero.
 *
 * A block with a number that is not finite gives NaN; the need of its leaf is that of the others.
 *
 * The product of a block is a whole number and exact. The sum of an output is in float32, of int16:
 *
 *   sum = fma(least, scale * sum of c, sum)              Q8M, Q4M and Q8SM
 *   sum = fma(sum of n c, scale of w * scale, sum)       Q8S and Q8SM: of each half in turn
 *
 * with the sum of n c rounded to nearest even, and of int8, with s = 2^-k, or 128 2^-k of a rest:
 *
 *   sum = fma(least, s * sum of c, sum)                  Q8M, Q4M and Q8SM
 *   sum = fma(s * sum of n c, scale of w, sum)           Q8S and Q8SM: of each half in turn
 *
 * over the blocks of a leaf in ascending order, with each group's rest behind it. In int8 a leaf's
 * sum is then multiplied by u. Leaves are added as a tree.
 * Every instruction set, number of rows and rank computes exactly this, so all of them give the
 * same bits.
 *
 * Multiplications are what limits products of many rows. A power of two costs none: a sum of
 * integers of 22 bits and sign that begins at the bits of 1.5 2^(23 - k) is, as float32, 1.5 2^(23
 * - k) + 2^-k times the sum, exactly (`back` in struct cpu_x_block). */
#ifndef KEEPD_KERNELS_CPU_BLOCK_H
#define KEEPD_KERNELS_CPU_BLOCK_H

#include "kernels/blocks.h"
#include "kernels/cpu/internal.h"

static inline int cpu_block_bits(enum kern_dtype dtype) {
    return dtype == KERN_Q4 || dtype == KERN_Q4M ? 4 : 8;
}

/* Returns what is added to n in memory. */
static inline int cpu_block_offset(enum kern_dtype dtype) {
    return dtype == KERN_Q4M ? 0 : dtype == KERN_Q4 ? 8 : 128;
}

/* Bytes of a block of a panel. */
static inline size_t cpu_block_codes(const struct kern_weight *w) {
    return (size_t)PANEL * KERN_BLOCK * (size_t)cpu_block_bits(w->dtype) / 8;
}

static inline size_t cpu_block_factors(const struct kern_weight *w) {
    return (size_t)PANEL * (w->halves ? 2 : 4) * block_factors(w->dtype);
}

#define CPU_REST_GROUP 4
#define CPU_QUADS      (KERN_BLOCK / 4)

/* A block of an activation row, or a rest. A rest's codes are the first four of its place; it says
 * where its weights are. */
struct cpu_x_block {
    float scale;      /* in int8 the unit, in every block of a leaf */
    float back;       /* int8: 1.5 2^23 times the power of two, as above */
    float sum;        /* int16: scale times the sum of codes; int8: the power of two times it */
    int32_t start[2]; /* -cpu_block_offset times the sum of codes, in int8 added to the bits of
                         `back`; [1]: of the second half, where halves have scales of their own */
    uint32_t codes;   /* a rest: bytes from its group's codes in a panel to its 64, plus 4 if they
                         are in the high halves of the bytes */
    uint32_t factors; /* a rest: bytes from its group's factors to the scales */
    uint32_t least;   /* a rest: bytes from its group's factors to the terms */
};

/* Places of an activation row: a place for each block and, in int8, for the rest of each group,
 * behind the group. A leaf's places follow each other; a few between leaves may be unused. */
static inline int64_t cpu_x_place(int64_t block, int leaf, bool wide) {
    return wide ? block : block + block / CPU_REST_GROUP + leaf;
}

static inline int64_t cpu_x_places(const struct kern_weight *w, bool wide) {
    return cpu_x_place(w->blocks, w->leaves, wide);
}

/* The rows of a pass are divided into pieces, which are multiplied together: the fewest of about
 * equal size. */
struct cpu_piece {
    int row, rows;
};

static inline int cpu_piece_count(int rows, int most) {
    return (rows + most - 1) / most;
}

static inline struct cpu_piece cpu_piece_of(int rows, int most, int i) {
    const int count = cpu_piece_count(rows, most), row = rows * i / count;
    return (struct cpu_piece){row, rows * (i + 1) / count - row};
}

/* Bytes of the activations of a pass: of each piece [places][rows][KERN_BLOCK] codes of 8 or, if
 * `wide`, 16 bits; then, of each piece, [places][rows] struct cpu_x_block. */
size_t cpu_codes_bytes(const struct kern_weight *w, int rows, bool wide);

struct cpu_block_kernels {
    int rows; /* the most rows of a piece */
    /* Rounds one row of `cols` numbers to int8 or, if `wide`, int16. `step`: rows of its piece.
     * `blocks`: memory without a declared type, which first holds something else. */
    void (*round_row)(const struct kern_weight *w, const float *x, bool wide, char *codes,
                      struct cpu_x_block *blocks, int64_t step);
    /* As cpu_kernels.matmul, from job->codes and job->x_blocks. */
    void (*multiply)(const struct cpu_matmul_job *job, int64_t first, int64_t count, int64_t next);
};

/* vec_round.c: round_row of each path. */
#define CPU_ROUND_ROW(path)                                                                        \
    void cpu_round_row_##path(const struct kern_weight *w, const float *x, bool wide, char *codes, \
                              struct cpu_x_block *blocks, int64_t step);
CPU_ROUND_ROW(portable)
CPU_ROUND_ROW(avx2)
CPU_ROUND_ROW(vnni)

extern const struct cpu_block_kernels cpu_block_kernels_portable;
/* A build contains those of built.h. */
extern const struct cpu_block_kernels cpu_block_kernels_avx2;
extern const struct cpu_block_kernels cpu_block_kernels_vnni; /* AVX-512 */
/* cpu_block_kernels_of chooses. */

/* block.c */
/* Returns the best kernels whose instructions the path may use; cpu.c has checked the build. */
const struct cpu_block_kernels *cpu_block_kernels_of(const char *path);
size_t cpu_block_panel_bytes(const struct kern_weight *w);
/* Converts a panel's numbers to float32, [cols][16]. */
void cpu_block_widen(const struct kern_weight *w, int64_t panel, float *to);
/* `from`: the blocks of a row. The weight's type can represent all numbers of their type. */
bool cpu_block_halves(const struct kern_weight *w, const struct block *from,
                      enum kern_dtype dtype); /* are its factors exact in float16? */
void cpu_block_pack(struct kern_weight *w, int64_t row, const struct block *from,
                    enum kern_dtype dtype);
/* Returns block `block` of the weights of output `row`. */
struct block cpu_block_at(const struct kern_weight *w, int64_t row, int64_t block);

#endif
