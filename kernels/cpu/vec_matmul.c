/* Matrix products over simd.h: a block of rows times a few panels of 16 outputs, sums in registers,
 * over all inputs of a leaf in ascending order. The order of additions into one output is the same
 * in every block shape, so a row's result does not depend on the rows beside it. */
#include "kernels/cpu/block.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/vec.h"

/* The largest block. An input is broadcast once for all panels of a block, which costs more than
 * unpacking a weight once for all its rows: panels are increased first, as far as registers
 * allow. */
#if defined(__AVX512F__)
#define ROWS           6 /* x 4 panels: 24 of 32 registers hold sums */
#define PANELS         4
#define PANELS_ONE_ROW 4
#else
#define ROWS           4 /* x 1 panel of two registers (AVX2): 8 of 16 */
#define PANELS         1
#define PANELS_ONE_ROW 2
#endif

#define AHEAD 2048 /* bytes: covers the latency of memory at one core's share of its bandwidth */

#define EACH(count, i) _Pragma("GCC unroll 8") for (int i = 0; i < (count); i++)

/* One k-step of every row and panel of the block. */
#define STEP(sum, rows, panels, x, stride, w)                                                      \
    EACH(rows, r_) {                                                                               \
        v16 x_ = v16_set((x)[(r_) * (stride)]);                                                    \
        EACH(panels, p_) sum[r_][p_] = v16_fma(x_, w[p_], sum[r_][p_]);                            \
    }

/* A leaf's data for a block: inputs `stride` apart from row to row, panels `next` bytes. `packed`:
 * where the path rounds activations to bf16, the inputs of the leaf so rounded, [rows][depth]. */
struct leaf_data {
    const float *x;
    const char *packed;
    int64_t stride, depth, count;
    const char *panel;
    size_t next;
};

typedef v16 block_sums[ROWS][4];

/* Loads the weights of two inputs: bf16 of two bytes, or E4M3 of one. */
SIMD void load_pairs(const struct leaf_data *in, int64_t k, v16 *first, v16 *second, const int size,
                     const int panels) {
    const char *at = in->panel + k * PANEL * size;
    EACH(panels, p) {
        __builtin_prefetch(at + (size_t)p * in->next + AHEAD);
        if (size == 2)
            v16_load_pairs(at + (size_t)p * in->next, &first[p], &second[p]);
        else
            v16_load_e4m3_pairs(at + (size_t)p * in->next, &first[p], &second[p]);
    }
}

SIMD void store_sums(block_sums to, v16 (*sum)[4], const int size, const int rows,
                     const int panels) {
    EACH(rows, r)
    EACH(panels, p) to[r][p] = size == 2 ? sum[r][p] : v16_mul(sum[r][p], v16_set(1 / E4M3_UNIT));
}

#if defined(__AVX512BF16__)

/* Loads the weights of two inputs as pairs of bf16, which represents all numbers of E4M3. */
SIMD void load_stored(const struct leaf_data *in, int64_t k, __m512i *w, const int panels) {
    const char *at = in->panel + k * PANEL * 2;
    EACH(panels, p) {
        __builtin_prefetch(at + (size_t)p * in->next + AHEAD);
        w[p] = _mm512_loadu_si512(at + (size_t)p * in->next);
    }
}

SIMD void load_e4m3(const struct leaf_data *in, int64_t k, __m512i *w, const int panels) {
    v16 first[4], second[4];
    load_pairs(in, k, first, second, 1, panels);
    EACH(panels, p)
    w[p] = _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(first[p]), 16),
                           _mm512_castps_si512(second[p]));
}

/* Reads two inputs at a time, because weights and inputs are pairs of bf16. If a leaf has an odd
 * number of inputs, the last one is paired with a zero. */
SIMD void sum_pairs(block_sums to, const struct leaf_data *in, const int size, const int rows,
                    const int panels) {
    v16 sum[ROWS][4];
    __m512i w[4];
    EACH(rows, r) EACH(panels, p) sum[r][p] = v16_set(0);
    for (int64_t k = 0; k < in->count; k += 2) {
        if (size == 2)
            load_stored(in, k, w, panels);
        else
            load_e4m3(in, k, w, panels);
        EACH(rows, r) {
            int32_t pair;
            memcpy(&pair, in->packed + 2 * (r * in->depth + k), sizeof pair);
            const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
            EACH(panels, p) sum[r][p] = _mm512_dpbf16_ps(sum[r][p], (__m512bh)w[p], x);
        }
    }
    store_sums(to, sum, size, rows, panels);
}

#else

SIMD void sum_pairs(block_sums to, const struct leaf_data *in, const int size, const int rows,
                    const int panels) {
    v16 sum[ROWS][4], first[4], second[4];
    int64_t k = 0;
    EACH(rows, r) EACH(panels, p) sum[r][p] = v16_set(0);
    for (; k + 1 < in->count; k += 2) {
        load_pairs(in, k, first, second, size, panels);
        STEP(sum, rows, panels, in->x + k, in->stride, first);
        STEP(sum, rows, panels, in->x + k + 1, in->stride, second);
    }
    if (k < in->count) {
        load_pairs(in, k, first, second, size, panels);
        STEP(sum, rows, panels, in->x + k, in->stride, first);
    }
    store_sums(to, sum, size, rows, panels);
}

#endif

SIMD void sum_floats(block_sums to, const struct leaf_data *in, const int rows, const int panels) {
    v16 sum[ROWS][4], w[4];
    EACH(rows, r) EACH(panels, p) sum[r][p] = v16_set(0);
    for (int64_t k = 0; k < in->count; k++) {
        const char *at = in->panel + k * PANEL * 4;
        EACH(panels, p) {
            __builtin_prefetch(at + (size_t)p * in->next + AHEAD);
            w[p] = v16_load((const float *)(at + (size_t)p * in->next));
        }
        STEP(sum, rows, panels, in->x + k, in->stride, w);
    }
    EACH(rows, r) EACH(panels, p) to[r][p] = sum[r][p];
}

/* ---- Shapes ---- */

/* A block's loops over a leaf, by layout. Each is a separate function: inlined into the leaves'
 * loop, GCC 12 keeps some of the sums in memory, which made AVX2 three times slower. */
struct shape {
    void (*pairs)(block_sums to, const struct leaf_data *in);
    void (*e4m3)(block_sums to, const struct leaf_data *in);
    void (*floats)(block_sums to, const struct leaf_data *in);
};

#define LOOP(name)                                                                                 \
    __attribute__((noinline)) static void name(block_sums to, const struct leaf_data *in)
#define SHAPE(R, P)                                                                                \
    LOOP(pairs_##R##x##P) {                                                                        \
        sum_pairs(to, in, 2, R, P);                                                                \
    }                                                                                              \
    LOOP(e4m3_##R##x##P) {                                                                         \
        sum_pairs(to, in, 1, R, P);                                                                \
    }                                                                                              \
    LOOP(floats_##R##x##P) {                                                                       \
        sum_floats(to, in, R, P);                                                                  \
    }
#define SHAPE_OF(R, P)                                                                             \
    { pairs_##R##x##P, e4m3_##R##x##P, floats_##R##x##P }

SHAPE(1, 1)
SHAPE(2, 1)
SHAPE(3, 1)
SHAPE(4, 1)
#if defined(__AVX512F__)
SHAPE(5, 1)
SHAPE(6, 1)
SHAPE(1, 4)
SHAPE(2, 4)
SHAPE(3, 4)
SHAPE(4, 4)
SHAPE(5, 4)
SHAPE(6, 4)
static const struct shape one_panel[ROWS] = {SHAPE_OF(1, 1), SHAPE_OF(2, 1), SHAPE_OF(3, 1),
                                             SHAPE_OF(4, 1), SHAPE_OF(5, 1), SHAPE_OF(6, 1)};
static const struct shape more_panels[ROWS] = {SHAPE_OF(1, 4), SHAPE_OF(2, 4), SHAPE_OF(3, 4),
                                               SHAPE_OF(4, 4), SHAPE_OF(5, 4), SHAPE_OF(6, 4)};
#else
SHAPE(1, 2)
static const struct shape one_panel[ROWS] = {SHAPE_OF(1, 1), SHAPE_OF(2, 1), SHAPE_OF(3, 1),
                                             SHAPE_OF(4, 1)};
static const struct shape more_panels[1] = {SHAPE_OF(1, 2)};
#endif

static const struct shape *vec_matmul_shape_of(int rows, int panels) {
    return panels == 1 ? &one_panel[rows - 1] : &more_panels[rows - 1];
}

/* ---- Blocks ---- */

static void vec_matmul_put(const struct cpu_matmul_job *job, int64_t row, int64_t output, v16 sum) {
    int64_t left = job->weight->rows - output;
    int n = left < 16 ? (int)left : 16;
    float *y = job->y + row * job->width + output;
    if (job->scale) sum = v16_mul(sum, v16_load_n(job->scale + output, n));
    if (job->bias) sum = v16_add(sum, v16_load_n(job->bias + output, n));
    if (job->mode == KERN_ADD) sum = v16_add(v16_load_n(y, n), sum);
    v16_store_n(y, sum, n);
}

/* A block has at most ROWS rows and 1 or PANELS panels or, of one row, PANELS_ONE_ROW. */
struct block_of_outputs {
    int row, rows;
    int64_t panel;
    int panels;
    const float *wide; /* the panel in float32, of a weight in blocks; otherwise NULL */
};

/* A leaf of a weight with factors of groups: the sums of each group times its factors. */
static void add_groups(block_sums sum, const struct cpu_matmul_job *job,
                       const struct block_of_outputs *b, struct cpu_leaf leaf,
                       struct leaf_data in) {
    const struct kern_weight *w = job->weight;
    const struct shape *shape = vec_matmul_shape_of(b->rows, b->panels);
    const int64_t row_scales = w->panels * PANEL;
    block_sums part;
    memset(sum, 0, sizeof part);
    for (int64_t at = 0, count; at < leaf.count; at += count) {
        const int64_t from = w->skipped + leaf.first + at, left = w->group - from % w->group;
        const float *scale = w->group_scale + from / w->group * row_scales + b->panel * PANEL;
        count = in.count = leaf.count - at < left ? leaf.count - at : left;
        shape->e4m3(part, &in);
        for (int r = 0; r < b->rows; r++)
            for (int p = 0; p < b->panels; p++)
                sum[r][p] = v16_fma(part[r][p], v16_load(scale + (ptrdiff_t)p * PANEL), sum[r][p]);
        in.x += count;
        in.packed += in.packed ? 2 * count : 0;
        in.panel += count * PANEL;
    }
}

static void vec_matmul_one_leaf(block_sums sum, const struct cpu_matmul_job *job,
                                const struct block_of_outputs *b, struct cpu_leaf leaf) {
    const struct kern_weight *w = job->weight;
    const struct shape *shape = vec_matmul_shape_of(b->rows, b->panels);
    struct leaf_data in = {.x = job->x + b->row * w->cols + leaf.first,
                           .stride = w->cols,
                           .depth = w->depth,
                           .count = leaf.count,
                           .panel = w->data + (size_t)b->panel * w->panel_bytes,
                           .next = w->panel_bytes};
    if (job->packed) in.packed = job->packed + 2 * (b->row * w->depth + leaf.place);
    if (w->layout == CPU_PANEL_PAIRS) {
        in.panel += leaf.place * PANEL * 2;
        shape->pairs(sum, &in);
    } else if (w->layout == CPU_PANEL_E4M3) {
        in.panel += leaf.place * PANEL;
        if (w->group)
            add_groups(sum, job, b, leaf, in);
        else
            shape->e4m3(sum, &in);
    } else {
        if (b->wide) in.panel = (const char *)b->wide;
        in.panel += leaf.place * PANEL * 4;
        shape->floats(sum, &in);
    }
}

static void vec_matmul_add_sums(block_sums to, block_sums other, const struct block_of_outputs *b) {
    for (int r = 0; r < b->rows; r++)
        for (int p = 0; p < b->panels; p++) to[r][p] = v16_add(to[r][p], other[r][p]);
}

static void multiply_block(const struct cpu_matmul_job *job, const struct block_of_outputs *b) {
    block_sums level[CPU_LEAF_LEVELS];
    for (int l = 0; l < job->weight->leaves; l++) {
        int top = cpu_leaf_level(l);
        vec_matmul_one_leaf(level[top], job, b, cpu_leaf_of(job->weight, l));
        for (int n = l; n & 1; n >>= 1, top--) vec_matmul_add_sums(level[top - 1], level[top], b);
    }
    for (int r = 0; r < b->rows; r++)
        for (int p = 0; p < b->panels; p++)
            vec_matmul_put(job, b->row + r, (b->panel + p) * PANEL, level[0][r][p]);
}

/* Processes all rows, in the fewest blocks of about equal size. */
static void vec_matmul_all_rows(const struct cpu_matmul_job *job, int64_t panel, int panels,
                                const float *wide) {
    struct block_of_outputs b = {.panel = panel, .panels = panels, .wide = wide};
    for (int left = (job->rows + ROWS - 1) / ROWS; left; left--, b.row += b.rows) {
        b.rows = (job->rows - b.row + left - 1) / left;
        multiply_block(job, &b);
    }
}

void VEC(matmul)(const struct cpu_matmul_job *job, int64_t first, int64_t count, int64_t next,
                 void *scratch) {
    (void)next;
    int panels = job->rows == 1 ? PANELS_ONE_ROW : PANELS;
    if (job->weight->layout == CPU_BLOCKS) {
        for (; count; count--, first++) {
            cpu_block_widen(job->weight, first, scratch);
            vec_matmul_all_rows(job, first, 1, scratch);
        }
        return;
    }
    for (; count >= panels; count -= panels, first += panels)
        vec_matmul_all_rows(job, first, panels, NULL);
    for (; count; count--, first++) vec_matmul_all_rows(job, first, 1, NULL);
}

/* Returns the bytes of a panel of blocks in float32. */
size_t VEC(matmul_scratch)(const struct kern_weight *weight) {
    if (weight->layout != CPU_BLOCKS) return 0;
    return (size_t)weight->cols * PANEL * sizeof(float);
}

#if defined(__AVX512BF16__)

/* ---- Activations in bf16 ---- */

static size_t packed_bytes(int64_t depth) {
    return (size_t)depth * MATMUL_ROWS * 2;
}

/* Rounds rows [row, row + 16) to bf16, each leaf at its place and padded with zeros. */
static void pack_x(const struct cpu_matmul_job *job, int row, char *packed) {
    const struct kern_weight *w = job->weight;
    for (int r = row; r < row + 16 && r < job->rows; r++) {
        uint16_t *to = (uint16_t *)(void *)packed + r * w->depth;
        memset(to, 0, (size_t)w->depth * sizeof *to);
        for (int l = 0; l < w->leaves; l++) {
            const struct cpu_leaf leaf = cpu_leaf_of(w, l);
            const float *x = job->x + r * w->cols + leaf.first;
            int64_t i = 0;
            for (; i + 16 <= leaf.count; i += 16)
                v16_store_bf16(to + leaf.place + i, v16_load(x + i));
            for (; i < leaf.count; i++) to[leaf.place + i] = number_to_bf16(x[i]);
        }
    }
}

const struct cpu_kernels VEC(kernels) = {
    .name = "cpu-avx512-bf16",
    .layout_bf16 = CPU_PANEL_PAIRS,
    .layout_e4m3 = CPU_PANEL_E4M3,
    .layout_other = CPU_PANEL_F32,
    .matmul = VEC(matmul),
    .matmul_scratch = VEC(matmul_scratch),
    .packed_bytes = packed_bytes,
    .pack_x = pack_x,
    .packs_groups = true,
    .rms_norm = cpu_rms_norm_avx512,
    .glu = cpu_glu_avx512,
    .rope = cpu_rope_avx512,
    .write_row = cpu_write_row_avx512,
    .delta = cpu_delta_avx512,
    .math = &cpu_math_avx512,
    .attend_scratch = VEC(attend_scratch),
    .attend_lanes = VEC(attend_lanes),
    .attend = VEC(attend),
    .attention = "bf16 in attention with bf16 caches",
    .stored = "bf16",
};

#endif
