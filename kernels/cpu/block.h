/* Products of weights in blocks (kernels/blocks.h) with activations in int8 or int16.
 *
 * A matrix has the smallest form of the list below that holds its numbers. A panel of 16 outputs is
 * [blocks][codes], then [blocks][factors] and, in forms with units, [groups of 8 blocks][units]. A
 * code is n plus the form's offset, and not negative; in forms with values it is the place of n
 * among them. The codes of a block are vectors of 64 bytes: vector q, of eight, has quad q, the
 * inputs 4 q to 4 q + 3 of each output.
 *
 * The low L bits of codes come first: 8 of 8, 4 of 4 to 6, 2 of 2 and 3. The quads of a block or,
 * where its halves have scales of their own, of each half are V; they share V L / 8 vectors, of
 * which vector v % (V L / 8) has those of quad v of the V, from bit L (v / (V L / 8)) of each byte
 * on. The H bits that are left follow: quad q's from bit q H of the eight vectors' bytes on, eight
 * bits of a byte before those of the same byte of the next vector.
 *
 *   factors  16 scales, in halves those of the second halves, then as many terms `least` where the
 *            form has them, as enum cpu_factors says
 *   units    16 of scales, then 16 of terms; float16, of E4M3 float32
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
 *   sum = fma(least, scale * sum of c, sum)              forms with terms
 *   sum = fma(sum of n c, scale of w * scale, sum)       halves: both of each in turn
 *
 * with the sum of n c rounded to nearest even, and of int8, with s = 2^-k, or 128 2^-k of a rest:
 *
 *   sum = fma(least, s * sum of c, sum)                  forms with terms
 *   sum = fma(s * sum of n c, scale of w, sum)           halves: both of each in turn
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

#define CPU_QUADS (KERN_BLOCK / 4)

enum cpu_factors {
    CPU_FLOATS,  /* float16 where that is exact for the whole weight, otherwise float32 */
    CPU_GROUPED, /* whole numbers of 8 bits, to be multiplied by the group's units */
    CPU_PAIRED,  /* the same of 4 bits and not negative: a scale in the low half of a byte and its
                    term in the high one */
    CPU_E4M3,    /* numbers of E4M3, to be multiplied by the group's units */
    CPU_POWERS,  /* powers of two, or 0: the exponents of float32, 8 bits */
    CPU_FACTOR_KINDS
};

/* Numbers that codes of 4 bits stand for. */
enum cpu_values { CPU_NO_VALUES, CPU_IQ4, CPU_E2M1, CPU_VALUES };

static const int8_t cpu_values[CPU_VALUES][16] = {
    [CPU_IQ4] = {BLOCK_IQ4}, [CPU_E2M1] = {BLOCK_E2M1}};

/* The forms of matrices: name, bits of a code; offset, of forms with values that of the numbers;
 * are there terms; the number of scales of a block; enum cpu_factors; enum cpu_values. Panels of
 * dense forms are unpacked before several rows are multiplied with them. */
#define CPU_DENSE_MAP(X)                                                                           \
    X(q2k, 2, 0, true, 2, CPU_PAIRED, CPU_NO_VALUES)                                               \
    X(q3k, 3, 4, false, 2, CPU_GROUPED, CPU_NO_VALUES)                                             \
    X(q4e, 4, 12, false, 1, CPU_POWERS, CPU_E2M1)                                                  \
    X(q4k, 4, 0, true, 1, CPU_GROUPED, CPU_NO_VALUES)                                              \
    X(q4se, 4, 12, false, 2, CPU_E4M3, CPU_E2M1)                                                   \
    X(q4v, 4, 128, false, 1, CPU_FLOATS, CPU_IQ4)                                                  \
    X(q4vk, 4, 128, false, 1, CPU_GROUPED, CPU_IQ4)                                                \
    X(q5, 5, 16, false, 1, CPU_FLOATS, CPU_NO_VALUES)                                              \
    X(q5k, 5, 0, true, 1, CPU_GROUPED, CPU_NO_VALUES)                                              \
    X(q5m, 5, 0, true, 1, CPU_FLOATS, CPU_NO_VALUES)                                               \
    X(q6k, 6, 32, false, 2, CPU_GROUPED, CPU_NO_VALUES)
#define CPU_PLAIN_MAP(X)                                                                           \
    X(q4, 4, 8, false, 1, CPU_FLOATS, CPU_NO_VALUES)                                               \
    X(q4m, 4, 0, true, 1, CPU_FLOATS, CPU_NO_VALUES)                                               \
    X(q8, 8, 128, false, 1, CPU_FLOATS, CPU_NO_VALUES)                                             \
    X(q8m, 8, 128, true, 1, CPU_FLOATS, CPU_NO_VALUES)                                             \
    X(q8s, 8, 128, false, 2, CPU_FLOATS, CPU_NO_VALUES)                                            \
    X(q8sm, 8, 128, true, 2, CPU_FLOATS, CPU_NO_VALUES)
#define CPU_FORM_MAP(X) CPU_DENSE_MAP(X) CPU_PLAIN_MAP(X)

enum {
#define X(name, ...) CPU_FORM_##name,
    CPU_FORM_MAP(X)
#undef X
        CPU_FORMS
};
#define CPU_FORM_PLAIN CPU_FORM_q4 /* the first that is not dense */

struct cpu_form {
    int bits, offset;
    bool least;
    int parts;
    enum cpu_factors factors;
    enum cpu_values values;
};

extern const struct cpu_form cpu_forms[CPU_FORMS];

/* Returns the bits of the numbers that are multiplied, n plus the offset. */
static inline __attribute__((always_inline)) int cpu_number_bits(const int bits,
                                                                 const enum cpu_values values) {
    return values == CPU_IQ4 ? 8 : values == CPU_E2M1 ? 5 : bits;
}

/* Says where the codes of a quad lie in a block: the vector and the bit at which their low bits
 * begin, the same for their high bits, and how many bits each has. The compiler knows all of them
 * if `bits`, `parts` and `quad` are constants. */
struct cpu_quad {
    int low_vector, low_bit, low;
    int high_vector, high_bit, high; /* high 0: no high bits */
};

static inline __attribute__((always_inline)) struct cpu_quad
cpu_quad_of(const int bits, const int parts, const int quad) {
    const int low = bits > 6 ? 8 : bits < 4 ? 2 : 4, high = (bits > 6 ? 8 : bits) - low;
    const int quads = CPU_QUADS / parts, vectors = quads * low / 8, v = quad % quads;
    return (struct cpu_quad){.low_vector = quad / quads * vectors + v % vectors,
                             .low_bit = v / vectors * low,
                             .low = low,
                             .high_vector = low + quad * high / 8,
                             .high_bit = quad * high % 8,
                             .high = high};
}

/* Returns the bytes of codes of a block of a panel. */
static inline size_t cpu_block_codes(const struct kern_weight *w) {
    return (size_t)PANEL * KERN_BLOCK * (size_t)w->form->bits / 8;
}

/* Returns how many factors a block of an output has; cpu_factor_places how many have bytes of their
 * own. */
static inline int cpu_factor_count(const struct cpu_form *form) {
    return form->parts * (1 + form->least);
}

static inline int cpu_factor_places(const struct cpu_form *form) {
    return form->factors == CPU_PAIRED ? form->parts : cpu_factor_count(form);
}

static inline size_t cpu_factor_bytes(const struct kern_weight *w) {
    return w->form->factors != CPU_FLOATS ? 1 : w->halves ? 2 : 4;
}

static inline size_t cpu_block_factors(const struct kern_weight *w) {
    return PANEL * cpu_factor_bytes(w) * (size_t)cpu_factor_places(w->form);
}

/* Returns the bytes of units that a group has in a panel. */
static inline __attribute__((always_inline)) size_t cpu_unit_bytes(const bool least,
                                                                   const enum cpu_factors factors) {
    const bool halves = factors == CPU_GROUPED || factors == CPU_PAIRED;
    return halves ? (size_t)2 * PANEL * (size_t)(1 + least) : factors == CPU_E4M3 ? 4 * PANEL : 0;
}

static inline size_t cpu_block_units(const struct cpu_form *form) {
    return cpu_unit_bytes(form->least, form->factors);
}

/* Returns where the units begin in a panel. */
static inline size_t cpu_block_units_at(const struct kern_weight *w) {
    return (size_t)w->blocks * (cpu_block_codes(w) + cpu_block_factors(w));
}

#define CPU_REST_GROUP 4

/* Describes a block of an activation row, or a rest. The codes of a rest are the first four at its
 * place; `block` and `quad` say which weights it is multiplied with. */
struct cpu_x_block {
    float scale;   /* int16: the scale; int8: the leaf's unit u, in each of its blocks */
    float back;    /* int8: 1.5 2^23 times the power of two, as above */
    struct {       /* sums of the block, or of each half where halves have scales of their own */
        float sum; /* int16: scale times the sum of codes; int8: the power of two times it */
        int32_t start; /* minus the form's offset times the sum of codes, in int8 added to the bits
                          of `back` */
    } part[2];
    int32_t block; /* a rest: the number of its block in the group */
    int32_t quad;  /* a rest: its place in the block */
};

/* Returns the place of a block of an activation row. The row has a place for each block and, in
 * int8, one more behind each group for its rest. The places of a leaf follow each other; a few
 * places between leaves may be unused. */
static inline int64_t cpu_x_place(int64_t block, int leaf, bool wide) {
    return wide ? block : block + block / CPU_REST_GROUP + leaf;
}

static inline int64_t cpu_x_places(const struct kern_weight *w, bool wide) {
    return cpu_x_place(w->blocks, w->leaves, wide);
}

/* The rows of a pass are divided into pieces, as few as possible and of about equal size; the rows
 * of a piece are multiplied together. */
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

/* Returns the bytes of the activations of a pass. Each piece has [places][rows][KERN_BLOCK] codes
 * of 8 bits or, if `wide`, of 16; behind all codes, each piece has [places][rows] struct
 * cpu_x_block. */
size_t cpu_codes_bytes(const struct kern_weight *w, int rows, bool wide);

struct cpu_block_kernels {
    int rows; /* the most rows of a piece */
    /* Rounds a row of w->cols numbers to int8 or, if `wide`, to int16. `step`: how many rows its
     * piece has. The memory at `blocks` needs no declared type: round_row first stores other things
     * there. */
    void (*round_row)(const struct kern_weight *w, const float *x, bool wide, char *codes,
                      struct cpu_x_block *blocks, int64_t step);
    /* Does what cpu_kernels.matmul does, from job->codes and job->x_blocks. */
    void (*multiply)(const struct cpu_matmul_job *job, int64_t first, int64_t count, int64_t next,
                     void *scratch);
    size_t (*scratch)(const struct kern_weight *weight); /* bytes */
};

/* round_row of each path, in vec_round.c */
#define CPU_ROUND_ROW(path)                                                                        \
    void cpu_round_row_##path(const struct kern_weight *w, const float *x, bool wide, char *codes, \
                              struct cpu_x_block *blocks, int64_t step);
CPU_ROUND_ROW(portable)
CPU_ROUND_ROW(avx2)
CPU_ROUND_ROW(vnni)
CPU_ROUND_ROW(neon)
CPU_ROUND_ROW(i8mm)

extern const struct cpu_block_kernels cpu_block_kernels_portable;
/* built.h says which of these a build contains. */
extern const struct cpu_block_kernels cpu_block_kernels_avx2;
extern const struct cpu_block_kernels cpu_block_kernels_vnni; /* AVX-512 */
extern const struct cpu_block_kernels cpu_block_kernels_neon;
extern const struct cpu_block_kernels cpu_block_kernels_i8mm; /* NEON */

/* block.c */
/* Returns the best kernels whose instructions the path may use; cpu.c has checked the build. */
const struct cpu_block_kernels *cpu_block_kernels_of(const char *path);
size_t cpu_block_panel_bytes(const struct kern_weight *w);
/* Converts a panel's numbers to float32, [cols][16]. */
void cpu_block_widen(const struct kern_weight *w, int64_t panel, float *to);
/* The requirements of the blocks read so far on a form; all zeros at first. */
struct cpu_needs {
    int lowest, highest; /* the smallest and the largest number */
    /* Whether a kind of factors cannot represent a factor. CPU_FLOATS: not exactly in float16. */
    bool unfit[CPU_FACTOR_KINDS];
    bool others[CPU_VALUES]; /* whether a number is none of these values */
};

/* Adds what the blocks `from` of a row need. */
void cpu_block_look(struct cpu_needs *needs, const struct kern_weight *w, const struct block *from);
void cpu_needs_add(struct cpu_needs *to, const struct cpu_needs *other);
/* Chooses the smallest form that satisfies `needs` for a weight with blocks of its type. */
void cpu_block_choose(struct kern_weight *w, const struct cpu_needs *needs);
void cpu_block_pack(struct kern_weight *w, int64_t row, const struct block *from);
/* Returns block `block` of the weights of output `row`. */
struct block cpu_block_at(const struct kern_weight *w, int64_t row, int64_t block);

#endif
