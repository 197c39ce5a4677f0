/* bf16 matrix products on AMX tiles. Each activation is split once per pass into two bf16, x = high
 * + low, and stored as pairs of A tiles (pack_x); weights are stored as B tiles. The split keeps 16
 * bits of the activations: rounding them to a single bf16 moved log-probabilities of a trained
 * model by up to 0.08, the split by less than the bf16 cache does. Up to sixteen rows it costs
 * nothing, because such products wait for memory. Rounding to one bf16, which halves the products,
 * is an option (CPU_BF16): loops are compiled for one and for two `parts`. Sums run over all inputs
 * of a leaf in ascending order, high before low, in one register, so every block shape gives a row
 * the same bits: one to sixteen rows (decoding, bound by memory: four streams of weights,
 * prefetched) and 32 x 32 blocks (prefill, bound by the tile unit: six loads per eight products).
 *
 * E4M3 weights are converted to bf16, which represents all of their numbers, before use: up to
 * sixteen rows tile by tile in the first-level cache, otherwise two panels at a time for all rows
 * of the pass. Both ways sum the same numbers. */
#include "kernels/cpu/amx.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/vec.h"

/* Parts of an activation: a high and a low bf16, or one. Their tiles of sixteen rows and one depth
 * follow each other. */
#define SPLIT   2
#define ROUNDED 1

/* Packed rows of the job's weight take this many bytes. */
static size_t rows_bytes(const struct cpu_matmul_job *job, int rows, int parts) {
    return (size_t)rows * (size_t)job->weight->depth * 2 * (size_t)parts;
}

size_t cpu_packed_bytes_amx(int64_t depth) {
    return (size_t)depth * MATMUL_ROWS * 2 * SPLIT;
}

static size_t packed_bytes_rounded(int64_t depth) {
    return (size_t)depth * MATMUL_ROWS * 2 * ROUNDED;
}

/* ---- Activations --------------------------------------------------------------------------------
 */

static inline __m512 pack_load(const float *x, int64_t left) {
    return left >= 16 ? v16_load(x) : v16_load_n(x, left > 0 ? (int)left : 0);
}

static inline __m512 from_bf16(__m256i half) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* Packs one row of A tiles: first the rounded values, then, if split, the remainders of the
 * rounding. */
SIMD void pack_row(const float *x, int64_t cols, int64_t depth, char *to, const int parts) {
    for (int64_t k = 0; k < depth; k += TILE_DEPTH, to += (ptrdiff_t)parts * TILE_BYTES) {
        __m512 first = pack_load(x + k, cols - k), second = pack_load(x + k + 16, cols - k - 16);
        __m512i high = (__m512i)_mm512_cvtne2ps_pbh(second, first);
        _mm512_store_si512(to, high);
        if (parts == ROUNDED) continue;
        first = _mm512_sub_ps(first, from_bf16(_mm512_castsi512_si256(high)));
        second = _mm512_sub_ps(second, from_bf16(_mm512_extracti64x4_epi64(high, 1)));
        _mm512_store_si512(to + TILE_BYTES, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    }
}

SIMD void pack_leaves(const struct kern_weight *w, const float *x, char *to, const int parts) {
    for (int l = 0; l < w->leaves; l++) {
        struct cpu_leaf leaf = cpu_leaf_of(w, l);
        pack_row(x + leaf.first, leaf.count, w->leaf_depth,
                 to + leaf.place / TILE_DEPTH * parts * TILE_BYTES, parts);
    }
}

SIMD void pack_block(const struct cpu_matmul_job *job, int row, char *packed, const int parts) {
    const struct kern_weight *w = job->weight;
    char *block = packed + rows_bytes(job, row, parts);
    for (int64_t r = 0; r < 16; r++) {
        if (row + r < job->rows) {
            pack_leaves(w, job->x + (row + r) * w->cols, block + 64 * r, parts);
        } else if (job->rows >
                   16) { /* up to 16 rows, the tile configuration already ends with the last row */
            for (int64_t t = 0; t < parts * w->depth / TILE_DEPTH; t++)
                _mm512_store_si512(block + t * TILE_BYTES + 64 * r, _mm512_setzero_si512());
        }
    }
}

void cpu_pack_x_amx(const struct cpu_matmul_job *job, int row, char *packed) {
    pack_block(job, row, packed, SPLIT);
}

static void pack_x_rounded(const struct cpu_matmul_job *job, int row, char *packed) {
    pack_block(job, row, packed, ROUNDED);
}

/* ---- Weights in E4M3 ----------------------------------------------------------------------------
 */

/* Converts `count` numbers, none of them NaN, to bf16 in the same order. Codes below 2^-6 are m
 * 2^-9, with a different exponent for each m. */
static inline void widen(const char *from, char *to, size_t count) {
    const __m512i tiny = _mm512_broadcast_i32x4(
        _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    const __m512i exponent = _mm512_set1_epi16(0x78), sign = _mm512_set1_epi16((short)0x8000);
    for (size_t i = 0; i < count; i += 32) {
        __m512i code = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(from + i)));
        __m512i size = _mm512_and_si512(_mm512_slli_epi16(code, 4), _mm512_set1_epi16(0x7f0));
        size = _mm512_add_epi16(size, _mm512_set1_epi16(120 << 7));
        size = _mm512_mask_permutexvar_epi16(size, _mm512_testn_epi16_mask(code, exponent), code,
                                             tiny);
        _mm512_store_si512(to + 2 * i, _mm512_or_si512(size, _mm512_and_si512(code, sign)));
    }
}

/* Returns the tile that is `at` bytes of bf16 into a panel whose numbers have `size` bytes; `wide`
 * has room for one tile. */
SIMD const char *tile_at(const char *panel, size_t at, char *wide, const size_t size) {
    if (size == 2) return panel + at;
    widen(panel + at / 2, wide, TILE_BYTES / 2);
    /* tells the compiler of the read, which _tile_loadd does not */
    __asm__ volatile("" : : "m"(*(const char(*)[TILE_BYTES])wide));
    return wide;
}

static size_t number_bytes(const struct kern_weight *w) {
    return w->layout == CPU_PANEL_E4M3 ? 1 : 2;
}

/* Scratch for two panels, which are twice as large in bf16. */
size_t cpu_matmul_scratch_amx(const struct kern_weight *weight) {
    return weight->layout == CPU_PANEL_E4M3 ? 4 * weight->panel_bytes
                                            : cpu_matmul_scratch_avx512(weight);
}

/* ---- Results ------------------------------------------------------------------------------------
 */

/* Results of many rows exceed the caches: non-temporal stores save reading each line before it is
 * overwritten (a fifth of the time of a wide product). */
static bool passes_caches(const struct cpu_matmul_job *job, const float *y) {
    return job->rows > 64 && job->mode == KERN_SET && job->weight->rows % 16 == 0 &&
           (uintptr_t)y % 64 == 0;
}

static void put(const struct cpu_matmul_job *job, int row, int64_t panel, const float (*sums)[16]) {
    int64_t outputs = job->weight->rows, output = panel * PANEL;
    int n = outputs - output < 16 ? (int)(outputs - output) : 16;
    int rows = job->rows - row < 16 ? job->rows - row : 16;
    __m512 scale = job->scale ? v16_load_n(job->scale + output, n) : v16_set(1);
    __m512 bias = job->bias ? v16_load_n(job->bias + output, n) : v16_set(0);
    float *y = job->y + row * outputs + output;
    bool past = passes_caches(job, y);
    for (int r = 0; r < rows; r++, y += outputs) {
        __m512 sum = v16_load(sums[r]);
        if (job->scale) sum = v16_mul(sum, scale);
        if (job->bias) sum = v16_add(sum, bias);
        if (job->mode == KERN_ADD) sum = v16_add(v16_load_n(y, n), sum);
        if (past)
            _mm512_stream_ps(y, sum);
        else
            v16_store_n(y, sum, n);
    }
}

/* ---- Up to sixteen rows -------------------------------------------------------------------------
 */

#define AHEAD 4096 /* bytes prefetched ahead in each stream */

static inline void fetch_bytes(const char *at, size_t bytes) {
    for (size_t line = 0; line < bytes; line += 64) _mm_prefetch(at + line, _MM_HINT_T0);
}

static inline void fetch_tile(const char *at) {
    fetch_bytes(at, TILE_BYTES);
}

/* Four panels of B, and the next four, which are prefetched near the end of the first four. */
struct group {
    const char *panel, *after;
    size_t stride;
};

static struct group group_of(const struct kern_weight *w, int64_t panel, int64_t after) {
    return (struct group){.panel = w->data + (size_t)panel * w->panel_bytes,
                          .after = w->data + (size_t)(after < 0 ? panel : after) * w->panel_bytes,
                          .stride = w->panel_bytes};
}

/* A leaf's sums are stored at the leaf's level of the stack and added to the level's earlier
 * sums. */
struct tree {
    _Alignas(64) float level[CPU_LEAF_LEVELS][4][16][16]; /* up to four tiles per level */
};

static inline void fold(struct tree *tree, int leaf, int tiles, int rows) {
    int top = cpu_leaf_level(leaf);
    for (int n = leaf; n & 1; n >>= 1, top--)
        for (int t = 0; t < tiles; t++)
            for (int r = 0; r < rows; r++)
                v16_store(tree->level[top - 1][t][r], v16_add(v16_load(tree->level[top - 1][t][r]),
                                                              v16_load(tree->level[top][t][r])));
}

static size_t leaf_bytes(const struct kern_weight *w) {
    return (size_t)w->leaf_depth / TILE_DEPTH * TILE_BYTES;
}

static inline void zero_four(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

/* Computes one leaf of four panels, starting `at` bytes of bf16 into them. */
SIMD void few_rows_leaf(const char *a, struct group b, size_t at, size_t end, const size_t size,
                        const int parts) {
    _Alignas(64) char wide[4][TILE_BYTES];
    zero_four();
    for (; at < end; at += TILE_BYTES) {
        size_t ahead = at * size / 2 + AHEAD;
        const char *fetch = ahead < b.stride ? b.panel + ahead : b.after + (ahead - b.stride);
        const char *tile[4];
        for (size_t t = 0; t < 4; t++) {
            fetch_bytes(fetch + t * b.stride, TILE_BYTES * size / 2);
            tile[t] = tile_at(b.panel + t * b.stride, at, wide[t], size);
        }
        _tile_loadd(4, a + parts * at, 64);
        if (parts == SPLIT) _tile_loadd(5, a + parts * at + TILE_BYTES, 64);
        _tile_loadd(6, tile[0], 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, tile[1], 64);
        _tile_dpbf16ps(1, 4, 7);
        if (parts == SPLIT) _tile_dpbf16ps(0, 5, 6);
        _tile_loadd(6, tile[2], 64);
        _tile_dpbf16ps(2, 4, 6);
        if (parts == SPLIT) _tile_dpbf16ps(1, 5, 7);
        _tile_loadd(7, tile[3], 64);
        _tile_dpbf16ps(3, 4, 7);
        if (parts == SPLIT) _tile_dpbf16ps(2, 5, 6);
        if (parts == SPLIT) _tile_dpbf16ps(3, 5, 7);
    }
}

static inline void store_four(float (*to)[16][16]) {
    _tile_stored(0, to[0], 64);
    _tile_stored(1, to[1], 64);
    _tile_stored(2, to[2], 64);
    _tile_stored(3, to[3], 64);
}

SIMD void few_rows_four(const struct cpu_matmul_job *job, int64_t panel, struct group b,
                        const size_t size, const int parts) {
    struct tree tree;
    size_t leaf = leaf_bytes(job->weight);
    for (int l = 0; l < job->weight->leaves; l++) {
        few_rows_leaf(job->packed, b, (size_t)l * leaf, ((size_t)l + 1) * leaf, size, parts);
        store_four(tree.level[cpu_leaf_level(l)]);
        fold(&tree, l, 4, job->rows);
    }
    for (int t = 0; t < 4; t++) put(job, 0, panel + t, tree.level[0][t]);
}

SIMD void few_rows_one(const struct cpu_matmul_job *job, int64_t panel, const size_t size,
                       const int parts) {
    _Alignas(64) char wide[TILE_BYTES];
    struct tree tree;
    const struct kern_weight *w = job->weight;
    const char *b = w->data + (size_t)panel * w->panel_bytes, *a = job->packed;
    size_t at = 0;
    for (int l = 0; l < w->leaves; l++) {
        _tile_zero(0);
        for (size_t end = at + leaf_bytes(w); at < end; at += TILE_BYTES) {
            fetch_bytes(b + at * size / 2 + AHEAD, TILE_BYTES * size / 2);
            _tile_loadd(4, a + parts * at, 64);
            _tile_loadd(6, tile_at(b, at, wide, size), 64);
            _tile_dpbf16ps(0, 4, 6);
            if (parts == ROUNDED) continue;
            _tile_loadd(5, a + parts * at + TILE_BYTES, 64);
            _tile_dpbf16ps(0, 5, 6);
        }
        _tile_stored(0, tree.level[cpu_leaf_level(l)][0], 64);
        fold(&tree, l, 1, job->rows);
    }
    put(job, 0, panel, tree.level[0][0]);
}

/* ---- Many rows ----------------------------------------------------------------------------------
 */

/* Memory to prefetch while a block is computed: `step` bytes per tile step from `from`. */
struct fetch {
    const char *from;
    size_t step;
};

/* Computes one depth of 32 x 32 outputs: six loads and eight products, or four of each. High
 * precedes low in each sum. */
SIMD void two_by_two(const char *a, const char *b, size_t stride, const int parts) {
    const size_t a_stride = (size_t)parts * stride;
    _tile_loadd(6, b, 64);
    _tile_loadd(4, a, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + stride, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + a_stride, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    if (parts == ROUNDED) return;
    _tile_loadd(4, a + TILE_BYTES, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + a_stride + TILE_BYTES, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

static void put_two_by_two(const struct cpu_matmul_job *job, int row, int64_t panel,
                           const struct tree *tree) {
    put(job, row, panel, tree->level[0][0]);
    put(job, row, panel + 1, tree->level[0][1]);
    put(job, row + 16, panel, tree->level[0][2]);
    put(job, row + 16, panel + 1, tree->level[0][3]);
}

SIMD void block_two_by_two(const struct cpu_matmul_job *job, int row, int64_t panel, struct group b,
                           struct fetch fetch, const int parts) {
    struct tree tree;
    const struct kern_weight *w = job->weight;
    const char *a = job->packed + rows_bytes(job, row, parts);
    size_t at = 0, leaf = leaf_bytes(w);
    for (int l = 0; l < w->leaves; l++) {
        zero_four();
        for (size_t end = at + leaf; at < end; at += TILE_BYTES, fetch.from += fetch.step) {
            for (size_t line = 0; line < fetch.step; line += 64)
                _mm_prefetch(fetch.from + line, _MM_HINT_T1);
            two_by_two(a + parts * at, b.panel + at, b.stride, parts);
        }
        store_four(tree.level[cpu_leaf_level(l)]);
        fold(&tree, l, 4, 16);
    }
    put_two_by_two(job, row, panel, &tree);
}

/* The same for panels that come from memory: 17 to 64 rows do not compute long enough to hide
 * fetching two whole panels, so each prefetches its own panel a few KiB ahead, and the start of the
 * next. */
SIMD void block_streaming(const struct cpu_matmul_job *job, int row, int64_t panel, struct group b,
                          const int parts) {
    struct tree tree;
    const char *a = job->packed + rows_bytes(job, row, parts);
    size_t at = 0, leaf = leaf_bytes(job->weight);
    for (int l = 0; l < job->weight->leaves; l++) {
        zero_four();
        for (size_t end = at + leaf; at < end; at += TILE_BYTES) {
            size_t ahead = at + (size_t)2 * AHEAD;
            const char *fetch = ahead < b.stride ? b.panel + ahead : b.after + (ahead - b.stride);
            fetch_tile(fetch);
            fetch_tile(fetch + b.stride);
            two_by_two(a + parts * at, b.panel + at, b.stride, parts);
        }
        store_four(tree.level[cpu_leaf_level(l)]);
        fold(&tree, l, 4, 16);
    }
    put_two_by_two(job, row, panel, &tree);
}

SIMD void block_one_by_one(const struct cpu_matmul_job *job, int row, int64_t panel, struct group b,
                           const int parts) {
    struct tree tree;
    const struct kern_weight *w = job->weight;
    const char *a = job->packed + rows_bytes(job, row, parts);
    size_t at = 0;
    for (int l = 0; l < w->leaves; l++) {
        _tile_zero(0);
        for (size_t end = at + leaf_bytes(w); at < end; at += TILE_BYTES) {
            _tile_loadd(6, b.panel + at, 64);
            _tile_loadd(4, a + parts * at, 64);
            _tile_dpbf16ps(0, 4, 6);
            if (parts == ROUNDED) continue;
            _tile_loadd(5, a + parts * at + TILE_BYTES, 64);
            _tile_dpbf16ps(0, 5, 6);
        }
        _tile_stored(0, tree.level[cpu_leaf_level(l)][0], 64);
        fold(&tree, l, 1, 16);
    }
    put(job, row, panel, tree.level[0][0]);
}

SIMD void block_one_by_two(const struct cpu_matmul_job *job, int row, int64_t panel, struct group b,
                           const int parts) {
    struct tree tree;
    const struct kern_weight *w = job->weight;
    const char *a = job->packed + rows_bytes(job, row, parts);
    size_t at = 0;
    for (int l = 0; l < w->leaves; l++) {
        _tile_zero(0);
        _tile_zero(1);
        for (size_t end = at + leaf_bytes(w); at < end; at += TILE_BYTES) {
            _tile_loadd(6, b.panel + at, 64);
            _tile_loadd(4, a + parts * at, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, b.panel + b.stride + at, 64);
            _tile_dpbf16ps(1, 4, 7);
            if (parts == ROUNDED) continue;
            _tile_loadd(5, a + parts * at + TILE_BYTES, 64);
            _tile_dpbf16ps(0, 5, 6);
            _tile_dpbf16ps(1, 5, 7);
        }
        _tile_stored(0, tree.level[cpu_leaf_level(l)][0], 64);
        _tile_stored(1, tree.level[cpu_leaf_level(l)][1], 64);
        fold(&tree, l, 2, 16);
    }
    put(job, row, panel, tree.level[0][0]);
    put(job, row, panel + 1, tree.level[0][1]);
}

/* `count` panels of bf16, as stored or converted into `wide`. */
static struct group panels_wide(const struct kern_weight *w, int64_t panel, size_t count,
                                int64_t after, char *wide) {
    struct group group = group_of(w, panel, after);
    if (number_bytes(w) == 2) return group;
    widen(group.panel, wide, count * w->panel_bytes);
    return (struct group){wide, wide, 2 * w->panel_bytes};
}

/* Multiplies two panels with all rows; `after`: the next two panels, or < 0. */
SIMD void many_rows_two(const struct cpu_matmul_job *job, int64_t panel, int64_t after, char *wide,
                        const int parts) {
    const struct kern_weight *w = job->weight;
    struct group b = panels_wide(w, panel, 2, after, wide);
    int row = 0, blocks = (job->rows + 15) / 32;
    if (blocks <= 2) {
        block_streaming(job, 0, panel, b, parts);
        row = 32;
    }
    /* Every step of a block prefetches its part of the 2 KiB (E4M3: 1 KiB) that the next panels
     * need per step. */
    int lines = 16 * (int)number_bytes(w);
    size_t step = after < 0 || blocks <= 2 ? 0 : (size_t)((lines + blocks - 1) / blocks) * 64;
    struct fetch fetch = {w->data + (size_t)(after < 0 ? panel : after) * w->panel_bytes, step};
    for (; row + 16 < job->rows; row += 32) {
        block_two_by_two(job, row, panel, b, fetch, parts);
        fetch.from += step * (size_t)(w->depth / TILE_DEPTH);
    }
    if (row < job->rows) block_one_by_two(job, row, panel, b, parts);
}

SIMD void few_rows(const struct cpu_matmul_job *job, int64_t first, int64_t count, int64_t next,
                   const size_t size, const int parts) {
    for (; count >= 4; count -= 4, first += 4)
        few_rows_four(job, first, group_of(job->weight, first, count >= 8 ? first + 4 : next), size,
                      parts);
    for (; count; count--, first++) few_rows_one(job, first, size, parts);
}

SIMD void many_rows(const struct cpu_matmul_job *job, int64_t first, int64_t count, int64_t next,
                    char *wide, const int parts) {
    for (; count >= 2; count -= 2, first += 2)
        many_rows_two(job, first, count >= 4 ? first + 2 : next, wide, parts);
    if (count == 0) return;
    struct group b = panels_wide(job->weight, first, 1, -1, wide);
    for (int row = 0; row < job->rows; row += 16) block_one_by_one(job, row, first, b, parts);
}

SIMD void multiply(const struct cpu_matmul_job *job, int64_t first, int64_t count, int64_t next,
                   void *scratch, const int parts) {
    if (job->weight->layout < CPU_PANEL_PAIRS) {
        cpu_matmul_avx512(job, first, count, next, scratch);
        return;
    }
    amx_configure(job->rows < 16 ? job->rows : 16, 6);
    if (job->rows > 16)
        many_rows(job, first, count, next, scratch, parts);
    else if (number_bytes(job->weight) == 1)
        few_rows(job, first, count, next, 1, parts);
    else
        few_rows(job, first, count, next, 2, parts);
    _tile_release();
    _mm_sfence(); /* completes the non-temporal stores before the barrier */
}

void cpu_matmul_amx(const struct cpu_matmul_job *job, int64_t first, int64_t count, int64_t next,
                    void *scratch) {
    multiply(job, first, count, next, scratch, SPLIT);
}

static void matmul_rounded(const struct cpu_matmul_job *job, int64_t first, int64_t count,
                           int64_t next, void *scratch) {
    multiply(job, first, count, next, scratch, ROUNDED);
}

/* Entries that the tables of both forms of activations share. */
#define TILES                                                                                      \
    .layout_bf16 = CPU_PANEL_PAIRS, .layout_e4m3 = CPU_PANEL_E4M3, .layout_other = CPU_PANEL_F32,  \
    .rms_norm = cpu_rms_norm_avx512, .glu = cpu_glu_avx512, .rope = cpu_rope_avx512,               \
    .write_row = cpu_write_row_avx512, .matmul_scratch = cpu_matmul_scratch_amx,                   \
    .math = &cpu_math_avx512, .attend_scratch = cpu_attend_scratch_amx,                            \
    .attend_lanes = cpu_attend_lanes_amx, .attend = cpu_attend_amx

const struct cpu_kernels cpu_kernels_amx = {
    .name = "cpu-amx",
    .matmul = cpu_matmul_amx,
    .packed_bytes = cpu_packed_bytes_amx,
    .pack_x = cpu_pack_x_amx,
    TILES,
};

const struct cpu_kernels cpu_kernels_amx_bf16 = {
    .name = "cpu-amx-bf16",
    .matmul = matmul_rounded,
    .packed_bytes = packed_bytes_rounded,
    .pack_x = pack_x_rounded,
    TILES,
};
