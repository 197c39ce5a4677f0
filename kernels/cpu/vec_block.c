/* Products of weights in blocks with activations in int8 or int16, over vectors of sixteen
 * integers; compiled for the portable path, AVX2, AVX-512 with VNNI, and NEON with products of
 * int8. block.h says what is computed, vec_sums.h has the sums of each instruction set. */
#include "base/check.h"
#include "kernels/cpu/block.h"
#include "kernels/cpu/vec.h"
#include "kernels/cpu/vec_factor.h"
#include "kernels/cpu/vec_sums.h"

/* ---- A block of outputs ---- */

#define AHEAD           4 /* blocks */
#define FETCHING_ROWS   3
#define PANELS_OF(rows) ((rows) == 1 ? PANELS_OF_ONE : (rows) == 2 ? PANELS_OF_TWO : PANELS)

typedef v16 block_sums[ROWS][PANELS_MOST];

/* A leaf of some rows and panels. Where the last panels are missing, pointers repeat those of
 * another panel. The rows of a piece lie beside each other: [places][rows]. */
struct leaf_data {
    const char *x;
    const struct cpu_x_block *x_blocks;
    int64_t count; /* blocks of the leaf */
    int64_t first; /* number of its first block in the row */
    const char *codes[PANELS_MOST], *factors[PANELS_MOST];
    const char *units[PANELS_MOST]; /* units of the row's first group */
    size_t factor_bytes;
    bool halves;
    const char *fetch; /* memory that later loops read: `lines` cache lines for each block */
    int lines;
    int merges; /* how many sums before `to` the leaf's sums are added to, the last one first */
};

/* Returns how many vectors the codes of a part have once unpacked. */
SIMD int vectors_of(const struct form f) {
    return CPU_QUADS / f.parts;
}
SIMD int block_bytes(const struct form f) {
    return PANEL * KERN_BLOCK / 8 * (f.bits < SMALL ? f.bits : 8);
}

/* Returns quad `quad` of the block at `block`, unpacked to bytes. */
SIMD codes unpack(const char *block, const int quad, const struct form f) {
    const struct cpu_quad at = cpu_quad_of(f.bits, f.parts, quad);
    codes all = codes_load(block + (ptrdiff_t)64 * at.low_vector);
    if (at.low < 8) all = codes_bits(all, at.low_bit, at.low, 0);
    if (at.high)
        all = codes_or(all, codes_bits(codes_load(block + (ptrdiff_t)64 * at.high_vector),
                                       at.high_bit, at.high, at.low));
    return f.values ? codes_values(all, f) : all;
}

/* Does the same for a quad that is not a constant. */
SIMD codes unpack_any(const char *block, int quad, const struct form f) {
    const struct cpu_quad at = cpu_quad_of(f.bits, f.parts, quad);
    codes all = codes_load(block + (ptrdiff_t)64 * at.low_vector);
    if (at.low < 8) all = codes_from(all, at.low_bit, at.low);
    if (at.high) {
        const codes high = codes_load(block + (ptrdiff_t)64 * at.high_vector);
        all = codes_or(all, codes_bits(codes_from(high, at.high_bit, at.high), 0, at.high, at.low));
    }
    return f.values ? codes_values(all, f) : all;
}

/* Returns how many rows are multiplied two at once, the first ones of a tile. Each two have their
 * sums in common from join_pairs to part_pairs. */
SIMD int paired_rows(const int rows, const struct form f) {
    return TWO_AT_ONCE && !f.wide ? rows / 2 * 2 : 0;
}

#if TWO_AT_ONCE

/* A joined vector has two sums of one row and the same two of the other, in turn: the products of a
 * matrix of two outputs with one of two rows, eight inputs each. */
SIMD void join_quarters(int32x4_t *x, int32x4_t *y) {
    const int32x4_t first = *x;
    *x = vzip1q_s32(first, *y);
    *y = vzip2q_s32(first, *y);
}
SIMD void part_quarters(int32x4_t *x, int32x4_t *y) {
    const int32x4_t first = *x;
    *x = vuzp1q_s32(first, *y);
    *y = vuzp2q_s32(first, *y);
}
SIMD void join_pairs(whole (*sum)[PANELS_MOST], const int rows, const int panels) {
    UNROLL_8 for (int r = 0; r < rows; r += 2) {
        EACH(panels, p) {
            whole *x = &sum[r][p], *y = &sum[r + 1][p];
            join_quarters(&x->a, &y->a), join_quarters(&x->b, &y->b);
            join_quarters(&x->c, &y->c), join_quarters(&x->d, &y->d);
        }
    }
}
SIMD void part_pairs(whole (*sum)[PANELS_MOST], const int rows, const int panels) {
    UNROLL_8 for (int r = 0; r < rows; r += 2) {
        EACH(panels, p) {
            whole *x = &sum[r][p], *y = &sum[r + 1][p];
            part_quarters(&x->a, &y->a), part_quarters(&x->b, &y->b);
            part_quarters(&x->c, &y->c), part_quarters(&x->d, &y->d);
        }
    }
}
/* Adds the products of quads x and y of four outputs, of two rows: those of two outputs to either
 * sum. */
SIMD void dot_matrices(int32x4_t *first, int32x4_t *second, uint8x16_t x, uint8x16_t y,
                       int8x16_t inputs) {
    const uint32x4_t a = vreinterpretq_u32_u8(x), b = vreinterpretq_u32_u8(y);
    *first = vusmmlaq_s32(*first, vreinterpretq_u8_u32(vzip1q_u32(a, b)), inputs);
    *second = vusmmlaq_s32(*second, vreinterpretq_u8_u32(vzip2q_u32(a, b)), inputs);
}
/* Returns quads of a row's part at x: v and v + vectors / 2 for an even v, the same of v + 1. */
SIMD int64x2_t inputs_of_row(const char *x, const int v, const int vectors) {
    const int32x4_t low = vreinterpretq_s32_s8(vld1q_s8((const int8_t *)x));
    const int32x4_t high = vectors == CPU_QUADS
                               ? vreinterpretq_s32_s8(vld1q_s8((const int8_t *)x + 16))
                               : vextq_s32(low, low, 2);
    return vreinterpretq_s64_s32(v < 2 ? vzip1q_s32(low, high) : vzip2q_s32(low, high));
}
/* Adds to joined sums the products of vectors v and v + vectors / 2, of each of `count` panels.
 * `x`: the inputs of the part. */
SIMD void dot_pairs(whole (*sum)[PANELS_MOST], const int first, const int count, const codes *a,
                    const codes *b, const char *x, const int v, const struct form f,
                    const int rows) {
    UNROLL_8 for (int r = 0; r < rows; r += 2) {
        const char *row = x + (ptrdiff_t)r * KERN_BLOCK;
        const int64x2_t one = inputs_of_row(row, v, vectors_of(f));
        const int64x2_t other = inputs_of_row(row + KERN_BLOCK, v, vectors_of(f));
        const int8x16_t both =
            vreinterpretq_s8_s64(v % 2 ? vzip2q_s64(one, other) : vzip1q_s64(one, other));
        EACH(count, p) {
            whole *low = &sum[r][first + p], *high = &sum[r + 1][first + p];
            dot_matrices(&low->a, &high->a, a[p].a, b[p].a, both);
            dot_matrices(&low->b, &high->b, a[p].b, b[p].b, both);
            dot_matrices(&low->c, &high->c, a[p].c, b[p].c, both);
            dot_matrices(&low->d, &high->d, a[p].d, b[p].d, both);
        }
    }
}

#endif

/* Adds to the sums of rows from `from` on the products of two vectors of each of `count` panels. */
SIMD void dot_panels(whole (*sum)[PANELS_MOST], const int first, const int count, const codes *a,
                     const codes *b, const char *xa, const char *xb, const struct form f,
                     const int from, const int rows) {
    const ptrdiff_t x_bytes = f.wide ? 2 * KERN_BLOCK : KERN_BLOCK;
    UNROLL_8 for (int r = from; r < rows; r++) {
        const input some = input_load(xa + r * x_bytes), other = input_load(xb + r * x_bytes);
        EACH(count, p)
        sum[r][first + p] = whole_dots(sum[r][first + p], a[p], some, b[p], other, f);
    }
}

/* The activations of some rows at one place. */
struct inputs {
    const char *x;
    const struct cpu_x_block *blocks;
};

SIMD struct inputs inputs_at(struct inputs in, int64_t place, const struct form f, const int rows) {
    const int64_t bytes = f.wide ? 2 * KERN_BLOCK : KERN_BLOCK;
    return (struct inputs){in.x + place * rows * bytes, in.blocks + place * rows};
}

/* Computes the integer products of a part of block b. */
SIMD void dot_block(whole (*sum)[PANELS_MOST], const struct leaf_data *in, int64_t b,
                    struct inputs from, const struct form f, const int rows, const int panels) {
    const int vectors = vectors_of(f), size = f.wide ? 2 : 1;
    /* The panels of one row are read in turn: sharing its few inputs is not worth the registers. */
    const int together = rows == 1 ? 1 : panels;
    const int groups = panels / together;
    const char *x = from.x + (ptrdiff_t)size * f.part * (KERN_BLOCK / 2);
    const int64_t at = block_bytes(f) * b;
    const int quad = f.part * vectors, paired = paired_rows(rows, f);
    EACH(rows, r) {
        const struct cpu_x_block *block = &from.blocks[r];
        EACH(panels, p) sum[r][p] = whole_open(block->part[f.part].start, block->back, f);
    }
#if TWO_AT_ONCE
    join_pairs(sum, paired, panels);
#endif
    UNROLL_8 for (int v = 0; v < vectors / 2; v++) {
        const char *low = x + (ptrdiff_t)4 * size * v;
        const char *high = low + (ptrdiff_t)4 * size * (vectors / 2);
        EACH(groups, g) {
            codes a[PANELS_MOST], c[PANELS_MOST], even[PANELS_MOST], odd[PANELS_MOST];
            const int first = g * together;
            EACH(together, p) a[p] = unpack(in->codes[first + p] + at, quad + v, f);
            EACH(together, p)
            c[p] = unpack(in->codes[first + p] + at, quad + v + vectors / 2, f);
            if (f.wide) {
                EACH(together, p) even[p] = codes_wide(a[p], 0), odd[p] = codes_wide(a[p], 1);
                dot_panels(sum, first, together, even, odd, low, low + 4, f, 0, rows);
                EACH(together, p) even[p] = codes_wide(c[p], 0), odd[p] = codes_wide(c[p], 1);
                dot_panels(sum, first, together, even, odd, high, high + 4, f, 0, rows);
            } else {
#if TWO_AT_ONCE
                dot_pairs(sum, first, together, a, c, x, v, f, paired);
#endif
                dot_panels(sum, first, together, a, c, low, high, f, paired, rows);
            }
        }
    }
#if TWO_AT_ONCE
    part_pairs(sum, paired, panels);
#endif
}

/* Returns factor `which` of block b of a panel (factor_load). */
SIMD v16 vec_block_factor_of(const struct leaf_data *in, const int p, int64_t b, const int which,
                             const struct form f) {
    const uint64_t group = (uint64_t)(in->first + b) / BLOCK_GROUP;
    return factor_load(in->factors[p] + (size_t)b * in->factor_bytes,
                       in->units[p] + group * cpu_unit_bytes(f.least, f.factors), in->halves, which,
                       f.parts, f.factors);
}

/* Adds the integer sum of a part of a block, times its scale, to a sum in float32. */
SIMD v16 add_part(v16 to, whole sum, const struct cpu_x_block *x, v16 scale, v16 least,
                  int32_t start, const struct form f) {
    const v16 value = whole_close(sum, start, x->back, f);
    if (f.least) to = fused(least, v16_set(x->part[f.part].sum), to);
    return fused(value, f.wide ? v16_mul(scale, v16_set(x->scale)) : scale, to);
}

/* Adds the integer sums of a part of block b to the sums in float32, which stay in registers:
 * stores to memory would wait behind those of results, which miss the caches. */
SIMD void scale_block(v16 (*to)[PANELS_MOST], whole (*sum)[PANELS_MOST], const struct leaf_data *in,
                      int64_t b, struct inputs from, const struct form f, const int rows,
                      const int panels) {
    EACH(panels, p) {
        v16 scale = vec_block_factor_of(in, p, b, f.part, f), least = scale;
        if (f.least) least = vec_block_factor_of(in, p, b, f.parts + f.part, f);
        EACH(rows, r) {
            const struct cpu_x_block *x = &from.blocks[r];
            to[r][p] = add_part(to[r][p], sum[r][p], x, scale, least, x->part[f.part].start, f);
        }
    }
}

/* Adds the product of block b of the weights and the activations at one place. */
SIMD void vec_block_add_block(v16 (*to)[PANELS_MOST], const struct leaf_data *in, int64_t b,
                              struct inputs from, const struct form first, const int rows,
                              const int panels) {
    whole sum[ROWS][PANELS_MOST];
    struct form second = first;
    second.part = 1;
    dot_block(sum, in, b, from, first, rows, panels);
    scale_block(to, sum, in, b, from, first, rows, panels);
    if (first.parts == 1) return;
    dot_block(sum, in, b, from, second, rows, panels);
    scale_block(to, sum, in, b, from, second, rows, panels);
}

/* Adds the product of the weights and each row's rest (struct cpu_x_block) for the group that
 * begins with block b. The quad of the rest differs between rows. The weights are still in the
 * first-level cache. */
SIMD void add_rests(v16 (*to)[PANELS_MOST], const struct leaf_data *in, int64_t b,
                    struct inputs from, const struct form f, const int rows, const int panels) {
    const int vectors = vectors_of(f);
    EACH(rows, r) {
        const struct cpu_x_block *x = &from.blocks[r];
        const input some = input_load(from.x + (ptrdiff_t)r * KERN_BLOCK);
        const int part = x->quad / vectors;
        const int64_t block = b + x->block, at = block_bytes(f) * block;
        EACH(panels, p) {
            const codes w = unpack_any(in->codes[p] + at, x->quad, f);
            whole sum = whole_dot(whole_open(x->part[0].start, x->back, f), w, some, f);
            v16 scale = vec_block_factor_of(in, p, block, part, f), least = scale;
            if (f.least) least = vec_block_factor_of(in, p, block, f.parts + part, f);
            to[r][p] = add_part(to[r][p], sum, x, scale, least, x->part[0].start, f);
        }
    }
}

/* Fetches the activations of a place into the first-level cache, perhaps those of the next piece.
 */
SIMD void fetch_inputs(struct inputs from, const struct form f, const int rows) {
    const int64_t x_bytes = (int64_t)rows * KERN_BLOCK * (f.wide ? 2 : 1);
    const int64_t block_bytes = rows * (int64_t)sizeof *from.blocks;
    for (int at = 0; at < x_bytes; at += 64) __builtin_prefetch(from.x + at);
    for (int at = 0; at < block_bytes; at += 64) __builtin_prefetch((const char *)from.blocks + at);
}

/* In the loops below the form is a constant, so that the compiler removes all decisions about it.
 * Builds with sanitizers use one function for all forms where that is possible, because compiling a
 * function for each would take many minutes. */
#if (defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)) && !defined(__AVX2__)
#define LEAF static __attribute__((noipa))
#else
#define LEAF SIMD
#endif

/* Fetches a line of weights for a later tile of the same number of rows. */
SIMD void fetch_line(const char *line, const int rows) {
    if (rows == 1)
        __builtin_prefetch(line, 0, ONE_ROW_FETCH);
    else
        __builtin_prefetch(line, 0, 2);
}

LEAF void sum_leaf(block_sums *to, const struct leaf_data *in, const struct form f, const int rows,
                   const int panels) {
    v16 total[ROWS][PANELS_MOST];
    const int64_t group = f.wide ? in->count : CPU_REST_GROUP;
    struct inputs from = {in->x, in->x_blocks};
    const char *fetch = in->fetch;
    EACH(rows, r) EACH(panels, p) total[r][p] = v16_set(0);
    for (int64_t first = 0, end; first < in->count; first = end) {
        end = first + group < in->count ? first + group : in->count;
        for (int64_t b = first; b < end; b++, from = inputs_at(from, 1, f, rows)) {
            for (int i = 0; i < in->lines; i++, fetch += 64) fetch_line(fetch, rows);
            if (rows >= FETCHING_ROWS) fetch_inputs(inputs_at(from, AHEAD, f, rows), f, rows);
            vec_block_add_block(total, in, b, from, f, rows, panels);
        }
        if (f.wide) continue;
        add_rests(total, in, first, from, f, rows, panels);
        from = inputs_at(from, 1, f, rows);
    }
    EACH(rows, r) {
        v16 unit = v16_set(in->count ? in->x_blocks[r].scale : 0);
        EACH(panels, p) total[r][p] = f.wide ? total[r][p] : v16_mul(total[r][p], unit);
    }
    for (int i = 0; i < in->merges; i++) {
        to--;
        EACH(rows, r) EACH(panels, p) total[r][p] = v16_add((*to)[r][p], total[r][p]);
    }
    EACH(rows, r) EACH(panels, p)(*to)[r][p] = total[r][p];
}

/* Each loop is a function of its own, so that its sums stay in registers. */
typedef void leaf_loop(block_sums *to, const struct leaf_data *in);

#define LOOP(name, rows, ...)                                                                      \
    __attribute__((noinline)) static void name(block_sums *to, const struct leaf_data *in) {       \
        sum_leaf(to, in, (struct form){__VA_ARGS__, 0, false}, rows, PANELS_OF(rows));             \
    }                                                                                              \
    __attribute__((noinline)) static void name##_wide(block_sums *to,                              \
                                                      const struct leaf_data *in) {                \
        sum_leaf(to, in, (struct form){__VA_ARGS__, 0, true}, rows, PANELS_OF(rows));              \
    }
#define LOOPS(name, rows)                                                                          \
    { name##_##rows, name##_##rows##_wide }
#define ONE_ROW(name, ...) LOOP(name##_1, 1, __VA_ARGS__)
#define TO_THREE_ROWS(name, ...)                                                                   \
    ONE_ROW(name, __VA_ARGS__)                                                                     \
    LOOP(name##_2, 2, __VA_ARGS__)                                                                 \
    LOOP(name##_3, 3, __VA_ARGS__)
#define TO_FOUR_ROWS(name, ...)                                                                    \
    TO_THREE_ROWS(name, __VA_ARGS__)                                                               \
    LOOP(name##_4, 4, __VA_ARGS__)
#if ROWS == 6
#define ALL_ROWS(name, ...)                                                                        \
    TO_FOUR_ROWS(name, __VA_ARGS__)                                                                \
    LOOP(name##_5, 5, __VA_ARGS__)                                                                 \
    LOOP(name##_6, 6, __VA_ARGS__)
#define OF_ROWS(name)                                                                              \
    {                                                                                              \
        LOOPS(name, 1), LOOPS(name, 2), LOOPS(name, 3), LOOPS(name, 4), LOOPS(name, 5),            \
            LOOPS(name, 6)                                                                         \
    }
#elif ROWS == 4
#define ALL_ROWS TO_FOUR_ROWS
#define OF_ROWS(name)                                                                              \
    { LOOPS(name, 1), LOOPS(name, 2), LOOPS(name, 3), LOOPS(name, 4) }
#elif ROWS == 3
#define ALL_ROWS TO_THREE_ROWS
#define OF_ROWS(name)                                                                              \
    { LOOPS(name, 1), LOOPS(name, 2), LOOPS(name, 3) }
#else
#define ALL_ROWS ONE_ROW
#define OF_ROWS(name)                                                                              \
    { LOOPS(name, 1) }
#endif

CPU_DENSE_MAP(ONE_ROW)
CPU_PLAIN_MAP(ALL_ROWS)

/* Loops by form, by number of rows, and by int8 or int16. */
static leaf_loop *const loops[CPU_FORMS][ROWS][2] = {
#define X(name, ...) {{name##_1, name##_1_wide}},
    CPU_DENSE_MAP(X)
#undef X
#define X(name, ...) OF_ROWS(name),
        CPU_PLAIN_MAP(X)
#undef X
};

/* ---- Unpacked panels ---- */
/* Several rows are multiplied with a panel of a dense form after its codes have been unpacked to
 * bytes, in the order of vectors, and its factors to float32: [blocks][codes], then
 * [blocks][factors]. It stays in the second-level cache. */

#define UNPACKED_BLOCK ((size_t)PANEL * KERN_BLOCK)

/* Loops by the number of scales of a block, by whether it has terms, then as above. Numbers of 8
 * bits use the loops of q8; smaller numbers use them, too, where they are as fast. */
#if !MIXED
ALL_ROWS(small, SMALL, 0, false, 1, CPU_FLOATS, CPU_NO_VALUES)
ALL_ROWS(smallm, SMALL, 0, true, 1, CPU_FLOATS, CPU_NO_VALUES)
ALL_ROWS(smalls, SMALL, 0, false, 2, CPU_FLOATS, CPU_NO_VALUES)
ALL_ROWS(smallsm, SMALL, 0, true, 2, CPU_FLOATS, CPU_NO_VALUES)
static leaf_loop *const unpacked_loops[2][2][ROWS][2] = {{OF_ROWS(small), OF_ROWS(smallm)},
                                                         {OF_ROWS(smalls), OF_ROWS(smallsm)}};
#else
static leaf_loop *const unpacked_loops[2][2][ROWS][2] = {{OF_ROWS(q8), OF_ROWS(q8m)},
                                                         {OF_ROWS(q8s), OF_ROWS(q8sm)}};
#endif

static bool is_dense(const struct kern_weight *w) {
    return w->form < cpu_forms + CPU_FORM_PLAIN;
}

static size_t unpacked_factors(const struct kern_weight *w) {
    return (size_t)PANEL * sizeof(float) * (size_t)cpu_factor_count(w->form);
}

static size_t unpacked_bytes(const struct kern_weight *w) {
    return (size_t)w->blocks * (UNPACKED_BLOCK + unpacked_factors(w));
}

static size_t block_scratch(const struct kern_weight *w) {
    return is_dense(w) ? PANELS_MOST * unpacked_bytes(w) : 0;
}

SIMD void unpack_panel(const struct kern_weight *w, const char *panel, char *to,
                       const struct form f) {
    const struct leaf_data in = {.factors = {panel + (size_t)w->blocks * cpu_block_codes(w)},
                                 .units = {panel + cpu_block_units_at(w)},
                                 .factor_bytes = cpu_block_factors(w),
                                 .halves = w->halves};
    float *factors = (float *)(void *)(to + (size_t)w->blocks * UNPACKED_BLOCK);
    for (int64_t b = 0; b < w->blocks; b++) {
        UNROLL_8 for (int quad = 0; quad < CPU_QUADS; quad++, to += 64)
            codes_store(to, unpack(panel, quad, f));
        panel += block_bytes(f);
        for (int which = 0; which < f.parts * (1 + f.least); which++, factors += PANEL)
            v16_store(factors, vec_block_factor_of(&in, 0, b, which, f));
    }
}

typedef void unpacker(const struct kern_weight *w, const char *panel, char *to);

#define X(name, ...)                                                                               \
    static void unpack_##name(const struct kern_weight *w, const char *panel, char *to) {          \
        unpack_panel(w, panel, to, (struct form){__VA_ARGS__, 0, false});                          \
    }
CPU_DENSE_MAP(X)
#undef X

static unpacker *const unpackers[CPU_FORM_PLAIN] = {
#define X(name, ...) unpack_##name,
    CPU_DENSE_MAP(X)
#undef X
};

/* ---- A product ---- */

/* A leaf of a weight: its blocks, their places, and where the blocks begin in a panel. */
struct leaf_part {
    int64_t first, count, place;
    size_t codes, factors;
    int merges; /* how many levels of the stack its sums complete (cpu_leaf_level) */
};

/* Rows and panels that are multiplied together. */
struct tile {
    struct cpu_piece piece;
    int64_t panel;
    int panels;
    const struct leaf_part *leaves;
    const char *unpacked; /* the panels with their codes unpacked; NULL: they are read as stored */
    const char *fetch;    /* as in leaf_data, for the tile's first leaf */
    int lines;
};

static void find_leaves(const struct cpu_matmul_job *job, struct leaf_part *to) {
    const struct kern_weight *w = job->weight;
    for (int l = 0; l < w->leaves; l++) {
        const struct cpu_leaf leaf = cpu_leaf_of(w, l);
        const int64_t first = leaf.first / KERN_BLOCK;
        to[l] = (struct leaf_part){
            .first = first,
            .count = blocks_of(leaf.count),
            .place = cpu_x_place(first, l, job->wide),
            .codes = (size_t)first * cpu_block_codes(w),
            .factors =
                (size_t)w->blocks * cpu_block_codes(w) + (size_t)first * cpu_block_factors(w),
            .merges = __builtin_ctz(~(unsigned)l),
        };
    }
}

/* Adds leaf `number` to the stack of sums (cpu_leaf_of). */
static void vec_block_one_leaf(block_sums *level, const struct cpu_matmul_job *job,
                               const struct tile *at, int number) {
    const struct kern_weight *w = job->weight;
    const struct leaf_part *leaf = &at->leaves[number];
    const int64_t rows = at->piece.rows;
    const int64_t place = at->piece.row * cpu_x_places(w, job->wide) + leaf->place * rows;
    struct leaf_data in = {.x = job->codes + place * KERN_BLOCK * (job->wide ? 2 : 1),
                           .x_blocks = job->x_blocks + place,
                           .count = leaf->count,
                           .first = leaf->first,
                           .factor_bytes = cpu_block_factors(w),
                           .halves = w->halves,
                           .fetch = at->fetch + leaf->first * at->lines * 64,
                           .lines = at->lines,
                           .merges = leaf->merges};
    for (int p = 0; p < PANELS_MOST; p++) {
        const int64_t panel = p < at->panels ? p : 0;
        const char *data = w->data + (size_t)(at->panel + panel) * w->panel_bytes;
        in.codes[p] = data + leaf->codes;
        in.factors[p] = data + leaf->factors;
        in.units[p] = data + cpu_block_units_at(w);
        if (!at->unpacked) continue;
        in.codes[p] =
            at->unpacked + (size_t)panel * unpacked_bytes(w) + (size_t)leaf->first * UNPACKED_BLOCK;
        in.factors[p] = at->unpacked + (size_t)panel * unpacked_bytes(w) +
                        (size_t)w->blocks * UNPACKED_BLOCK +
                        (size_t)leaf->first * unpacked_factors(w);
    }
    leaf_loop *const(*of_form)[2] = loops[w->form - cpu_forms];
    if (at->unpacked) {
        in.factor_bytes = unpacked_factors(w);
        in.halves = false;
        of_form = cpu_number_bits(w->form->bits, w->form->values) == 8
                      ? loops[CPU_FORM_q8]
                      : unpacked_loops[w->form->parts - 1][w->form->least];
    }
    of_form[rows - 1][job->wide](level + cpu_leaf_level(number), &in);
}

static void vec_block_put(const struct cpu_matmul_job *job, int64_t row, int64_t output, v16 sum) {
    int64_t left = job->weight->rows - output;
    int n = left < 16 ? (int)left : 16;
    float *y = job->y + row * job->width + output;
    if (n == 16 && !job->bias && !job->scale) {
        v16_store(y, job->mode == KERN_ADD ? v16_add(v16_load(y), sum) : sum);
        return;
    }
    if (job->scale) sum = v16_mul(sum, v16_load_n(job->scale + output, n));
    if (job->bias) sum = v16_add(sum, v16_load_n(job->bias + output, n));
    if (job->mode == KERN_ADD) sum = v16_add(v16_load_n(y, n), sum);
    v16_store_n(y, sum, n);
}

/* Fetches the lines of the tile's results; otherwise the tile's last stores would wait for them. */
static void fetch_results(const struct cpu_matmul_job *job, const struct tile *at) {
    for (int r = 0; r < at->piece.rows; r++) {
        const float *y = job->y + (at->piece.row + r) * job->width + at->panel * PANEL;
        for (int p = 0; p < at->panels; p++) __builtin_prefetch(y + (ptrdiff_t)p * PANEL, 1);
    }
}

static void multiply_tile(const struct cpu_matmul_job *job, const struct tile *at) {
    block_sums level[CPU_LEAF_LEVELS];
    if (at->piece.rows >= FETCHING_ROWS) fetch_results(job, at);
    for (int l = 0; l < job->weight->leaves; l++) vec_block_one_leaf(level, job, at, l);
    for (int r = 0; r < at->piece.rows; r++)
        for (int p = 0; p < at->panels; p++)
            vec_block_put(job, at->piece.row + r, (at->panel + p) * PANEL, level[0][r][p]);
}

/* Multiplies all rows with some panels. Meanwhile it fetches the panels that come next, in the
 * order of memory and in even shares: the read bandwidth needs one long stream, and a tile that
 * waited for memory would leave the memory idle while the other tiles compute. */
static void multiply_panels(const struct cpu_matmul_job *job, int64_t panel, int panels,
                            int64_t next, char *scratch) {
    const struct kern_weight *w = job->weight;
    const int pieces = cpu_piece_count(job->rows, ROWS);
    const int64_t lines = panels * (int64_t)(w->panel_bytes / 64);
    const int64_t steps = pieces * w->blocks, each = (lines + steps - 1) / steps;
    struct leaf_part leaves[CPU_LEAVES];
    const char *fetch = w->data + (size_t)(next < 0 ? panel : next) * w->panel_bytes;
    const bool unpacks = is_dense(w) && job->rows > 1;
    for (int p = 0; p < panels && unpacks; p++)
        unpackers[w->form - cpu_forms](w, w->data + (size_t)(panel + p) * w->panel_bytes,
                                       scratch + (size_t)p * unpacked_bytes(w));
    find_leaves(job, leaves);
    for (int i = 0; i < pieces; i++) {
        const int64_t start = i * w->blocks * each;
        struct tile at = {.piece = cpu_piece_of(job->rows, ROWS, i),
                          .panel = panel,
                          .panels = panels,
                          .leaves = leaves,
                          .unpacked = unpacks ? scratch : NULL,
                          .fetch = fetch + 64 * start,
                          .lines = next >= 0 && start < lines ? (int)each : 0};
        multiply_tile(job, &at);
    }
}

static void block_multiply(const struct cpu_matmul_job *job, int64_t first, int64_t count,
                           int64_t next, void *scratch) {
    const int last = cpu_piece_count(job->rows, ROWS) - 1;
    const int most = PANELS_OF(cpu_piece_of(job->rows, ROWS, last).rows); /* the longest piece */
    while (count > 0) {
        const int panels = count < most ? (int)count : most;
        first += panels, count -= panels;
        multiply_panels(job, first - panels, panels, count ? first : next, scratch);
    }
}

const struct cpu_block_kernels VEC(block_kernels) = {.rows = ROWS,
                                                     .round_row = VEC(round_row),
                                                     .multiply = block_multiply,
                                                     .scratch = block_scratch};
