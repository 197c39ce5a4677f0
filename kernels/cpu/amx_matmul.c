/* bf16 matrix products on AMX tiles. Each activation is split once per pass into two bf16, x = high
 * + low, and stored as pairs of A tiles (pack_x); weights are stored as B tiles. The split keeps 16
 * bits of the activations: rounding them to a single bf16 moved log-probabilities of a trained
 * model by up to 0.08, the split by less than the bf16 cache does. Up to sixteen rows it costs
 * nothing, because such products wait for memory. Rounding to one bf16, which halves the products,
 * is an option (CPU_BF16): loops are compiled for one and for two `parts`.
 *
 * The sum of an output runs over all inputs of a leaf in ascending order, high before low, in one
 * tile or, of many rows, in memory between chunks. So every number of rows gives a row the same
 * bits.
 *
 * Weights that are not stored in bf16 are converted before use: up to sixteen rows tile by tile in
 * the first-level cache, otherwise a chunk of two panels at a time for all rows of the pass. Both
 * ways sum the same numbers. bf16 represents all numbers of E4M3. With activations rounded to one
 * bf16, those of blocks (block.h) are rounded, too: scale n + least in float32, then to nearest
 * even. A block is as deep as a tile, so a block of a panel is one tile. */
#include "kernels/cpu/amx.h"
#include "kernels/cpu/block.h"
#include "kernels/cpu/vec.h"
#include "kernels/cpu/vec_factor.h"

/* Parts of an activation: a high and a low bf16, or just one. The tiles of both parts, for the same
 * sixteen rows and depth, follow each other. */
#define SPLIT   2
#define ROUNDED 1

/* Returns the bytes that packed rows take for the job's weight. */
static size_t amx_matmul_rows_bytes(const struct cpu_matmul_job *job, int rows, int parts) {
    return (size_t)rows * (size_t)job->weight->depth * 2 * (size_t)parts;
}

size_t cpu_packed_bytes_amx(int64_t depth) {
    return (size_t)depth * MATMUL_ROWS * 2 * SPLIT;
}

static size_t packed_bytes_rounded(int64_t depth) {
    return (size_t)depth * MATMUL_ROWS * 2 * ROUNDED;
}

/* Returns the start of a leaf in a panel, or the end of the last one, in bytes of bf16. */
static size_t leaf_start(const struct kern_weight *w, int leaf) {
    int64_t place = leaf < w->leaves ? cpu_leaf_of(w, leaf).place : w->depth;
    return (size_t)place / TILE_DEPTH * TILE_BYTES;
}

/* ---- Activations ---- */

static inline __m512 pack_load(const float *x, int64_t left) {
    return left >= 16 ? v16_load(x) : v16_load_n(x, left > 0 ? (int)left : 0);
}

static inline __m512 from_bf16(__m256i half) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* Packs one row of A tiles: first the rounded values, then, if split, the remainders of the
 * rounding. */
SIMD void amx_matmul_pack_row(const float *x, int64_t cols, int64_t depth, char *to,
                              const int parts) {
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
        size_t start = leaf_start(w, l), bytes = leaf_start(w, l + 1) - start;
        amx_matmul_pack_row(x + leaf.first, leaf.count, (int64_t)(bytes / TILE_BYTES * TILE_DEPTH),
                            to + start * (size_t)parts, parts);
    }
}

SIMD void amx_matmul_pack_block(const struct cpu_matmul_job *job, int row, char *packed,
                                const int parts) {
    const struct kern_weight *w = job->weight;
    char *block = packed + amx_matmul_rows_bytes(job, row, parts);
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
    amx_matmul_pack_block(job, row, packed, SPLIT);
}

static void pack_x_rounded(const struct cpu_matmul_job *job, int row, char *packed) {
    amx_matmul_pack_block(job, row, packed, ROUNDED);
}

/* ---- Weights that are converted ---- */

/* Converts tiles [first, first + count) of a panel to pairs of bf16. */
typedef void widener(const struct kern_weight *w, const char *panel, size_t first, size_t count,
                     char *to);

/* Converts E4M3; no number is NaN. Codes below 2^-6 are m 2^-9, with a different exponent for each
 * m. */
static void widen_e4m3(const struct kern_weight *w, const char *panel, size_t first, size_t count,
                       char *to) {
    const __m512i tiny = _mm512_broadcast_i32x4(
        _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    const __m512i exponent = _mm512_set1_epi16(0x78), sign = _mm512_set1_epi16((short)0x8000);
    const char *from = panel + first * TILE_BYTES / 2;
    (void)w;
    for (size_t i = 0; i < count * TILE_BYTES / 2; i += 32) {
        __m512i code = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(from + i)));
        __m512i size = _mm512_and_si512(_mm512_slli_epi16(code, 4), _mm512_set1_epi16(0x7f0));
        size = _mm512_add_epi16(size, _mm512_set1_epi16(120 << 7));
        size = _mm512_mask_permutexvar_epi16(size, _mm512_testn_epi16_mask(code, exponent), code,
                                             tiny);
        _mm512_store_si512(to + 2 * i, _mm512_or_si512(size, _mm512_and_si512(code, sign)));
    }
}

/* A row of a tile is made in two halves of eight outputs, each output's pair of inputs side by
 * side. So factors are doubled: [half of the block's inputs][half of the outputs]. */
struct factors {
    v16 scale[2][2], term[2][2];
};

SIMD void twice(v16 to[2], v16 x) {
    const __m512i eight = _mm512_set1_epi32(8);
    const __m512i lanes = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    to[0] = _mm512_permutexvar_ps(lanes, x);
    to[1] = _mm512_permutexvar_ps(_mm512_add_epi32(lanes, eight), x);
}

/* Read as the low bits of a float32, a code is 2^15 + code; subtracting 2^15 + code_base leaves n.
 * Where scale * code_base is exact as the term, as with scales of float16, fused multiplication
 * makes the subtraction unnecessary. */
#define CODE_HIGH 0x1p15f

SIMD float code_base(const struct cpu_form form) {
    return CODE_HIGH + (float)form.offset;
}

/* Factors of a block: `at` in memory, `units` those of its group. */
SIMD void factors_load(struct factors *f, const char *at, const char *units, bool halves,
                       const bool folded, const struct cpu_form form) {
    UNROLL for (int i = 0; i < 2; i++) twice(
        f->scale[i], factor_load(at, units, halves, i % form.parts, form.parts, form.factors));
    for (int i = 0; i < 2 && form.least; i++)
        twice(f->term[i], factor_load(at, units, halves, form.parts + i % form.parts, form.parts,
                                      form.factors));
    for (int i = 0; i < 4 && folded; i++)
        f->term[i / 2][i % 2] = v16_mul(f->scale[i / 2][i % 2], v16_set(-code_base(form)));
}

/* Returns the numbers of eight outputs for two inputs. Each quarter of `codes` has two outputs, as
 * integers of four bytes; the two inputs are the bytes `first` and first + 1 of each integer. */
SIMD v16 amx_matmul_block_numbers(__m512i codes, const int first, v16 scale, v16 term,
                                  const bool folded, const struct cpu_form form) {
    const char a = (char)first, b = (char)(first + 1), c = (char)(first + 4), d = (char)(first + 5);
    const __m512i from =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, a, 0, 0, 0, b, 0, 0, 0, c, 0, 0, 0, d, 0, 0));
    const __m512i high = _mm512_castps_si512(v16_set(CODE_HIGH));
    const v16 code =
        _mm512_castsi512_ps(_mm512_mask_shuffle_epi8(high, 0x2222222222222222, codes, from));
    if (folded) return v16_fma(scale, code, term);
    const v16 n = v16_sub(code, v16_set(code_base(form)));
    return form.least ? v16_fma(scale, n, term) : v16_mul(scale, n);
}

/* Makes two rows of a tile from 64 codes. Each quarter of `codes` has two outputs of the first half
 * and then two of the second. */
SIMD void block_rows(char *to, __m512i codes, const struct factors *f, const int half,
                     const bool folded, const struct cpu_form form) {
    _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++) {
        v16 low = amx_matmul_block_numbers(codes, 2 * i, f->scale[half][0], f->term[half][0],
                                           folded, form);
        v16 high = amx_matmul_block_numbers(codes, 8 + 2 * i, f->scale[half][1], f->term[half][1],
                                            folded, form);
        _mm512_store_si512(to + (ptrdiff_t)64 * i, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
}

/* Loads 64 bytes of codes in the order of block_rows. */
SIMD __m512i amx_matmul_codes_load(const char *at) {
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    return _mm512_permutexvar_epi64(order, _mm512_loadu_si512(at));
}

/* Moves `count` bits of each byte that begin at `from` to `to`. */
SIMD __m512i amx_matmul_codes_bits(__m512i all, const int from, const int count, const int to) {
    if (from > to) all = _mm512_srli_epi16(all, (unsigned)(from - to));
    if (from < to) all = _mm512_slli_epi16(all, (unsigned)(to - from));
    return _mm512_and_si512(all, _mm512_set1_epi8((char)(((1 << count) - 1) << to)));
}

/* Returns the codes of quad `quad` of a block as bytes, or their values plus the offset. */
SIMD __m512i amx_matmul_codes_of(const char *block, const int quad, const struct cpu_form form) {
    const struct cpu_quad at = cpu_quad_of(form.bits, form.parts, quad);
    __m512i all = amx_matmul_codes_load(block + (ptrdiff_t)64 * at.low_vector);
    if (at.low < 8) all = amx_matmul_codes_bits(all, at.low_bit, at.low, 0);
    if (at.high)
        all = _mm512_or_si512(
            all,
            amx_matmul_codes_bits(amx_matmul_codes_load(block + (ptrdiff_t)64 * at.high_vector),
                                  at.high_bit, at.high, at.low));
    if (!form.values) return all;
    const __m128i values = _mm_add_epi8(_mm_loadu_si128((const __m128i *)cpu_values[form.values]),
                                        _mm_set1_epi8((char)form.offset));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), all);
}

SIMD void widen_some(const struct kern_weight *w, const char *panel, size_t first, size_t count,
                     char *to, const bool folded, const struct cpu_form form) {
    const size_t codes_bytes = cpu_block_codes(w), factor_bytes = cpu_block_factors(w);
    const char *units = panel + cpu_block_units_at(w);
    struct factors f;
    for (size_t b = first; b < first + count; b++, to += TILE_BYTES) {
        const char *codes = panel + b * codes_bytes;
        const char *factors = panel + (size_t)w->blocks * codes_bytes + b * factor_bytes;
        factors_load(&f, factors, units + b / BLOCK_GROUP * cpu_block_units(&form), w->halves,
                     folded, form);
        _Pragma("GCC unroll 8") for (int quad = 0; quad < CPU_QUADS; quad++)
            block_rows(to + (ptrdiff_t)128 * quad, amx_matmul_codes_of(codes, quad, form), &f,
                       quad / 4, folded, form);
    }
}

/* Converts blocks, without the subtraction where that is exact. */
SIMD void widen_blocks(const struct kern_weight *w, const char *panel, size_t first, size_t count,
                       char *to, const struct cpu_form form) {
    if (w->halves && !form.least && form.factors == CPU_FLOATS)
        widen_some(w, panel, first, count, to, true, form);
    else
        widen_some(w, panel, first, count, to, false, form);
}

#define X(name, ...)                                                                               \
    static void widen_##name(const struct kern_weight *w, const char *panel, size_t first,         \
                             size_t count, char *to) {                                             \
        widen_blocks(w, panel, first, count, to, (struct cpu_form){__VA_ARGS__});                  \
    }
CPU_FORM_MAP(X)
#undef X

static widener *const block_wideners[CPU_FORMS] = {
#define X(name, ...) widen_##name,
    CPU_FORM_MAP(X)
#undef X
};

/* NULL: the weight is stored in pairs of bf16. */
static widener *widener_of(const struct kern_weight *w) {
    if (w->layout == CPU_BLOCKS) return block_wideners[w->form - cpu_forms];
    return w->dtype == KERN_E4M3 ? widen_e4m3 : NULL;
}

/* Converts tiles of `panels` panels that follow each other; `stride`: bytes between their tiles. */
static void widen_panels(const struct kern_weight *w, const char *panel, size_t panels,
                         size_t first, size_t count, char *to, size_t stride) {
    widener *widen = widener_of(w);
    for (size_t p = 0; p < panels; p++)
        widen(w, panel + p * w->panel_bytes, first, count, to + p * stride);
    __asm__ volatile("" : : : "memory"); /* _tile_loadd does not tell the compiler that it reads */
}

static size_t wide_bytes(const struct kern_weight *w) {
    return (size_t)w->depth * PANEL * 2;
}

/* ---- Results ---- */

/* Results of many rows exceed the caches: non-temporal stores save reading each line before it is
 * overwritten (a fifth of the time of a wide product). */
static bool passes_caches(const struct cpu_matmul_job *job, const float *y) {
    return job->rows > 64 && job->mode == KERN_SET && job->weight->rows % 16 == 0 &&
           job->width % 16 == 0 && (uintptr_t)y % 64 == 0;
}

/* Stores tiles of sums: up to sixteen rows of one panel or, side by side, of several. Rows are
 * stored one by one: memory takes neighbouring lines together in half of the time. */
SIMD void amx_matmul_put(const struct cpu_matmul_job *job, int row, int64_t panel,
                         const float (*sums)[16][16], const int panels) {
    const int64_t outputs = job->weight->rows, first = panel * PANEL;
    const int rows = job->rows - row < 16 ? job->rows - row : 16;
    float *y = job->y + row * job->width + first;
    const bool past = passes_caches(job, y);
    for (int r = 0; r < rows; r++, y += job->width) {
        for (int p = 0; p < panels; p++) {
            const int64_t at = (int64_t)p * PANEL, left = outputs - first - at;
            const int n = left < 16 ? (int)left : 16;
            __m512 sum = v16_load(sums[p][r]);
            if (job->scale) sum = v16_mul(sum, v16_load_n(job->scale + first + at, n));
            if (job->bias) sum = v16_add(sum, v16_load_n(job->bias + first + at, n));
            if (job->mode == KERN_ADD) sum = v16_add(v16_load_n(y + at, n), sum);
            if (past)
                _mm512_stream_ps(y + at, sum);
            else
                v16_store_n(y + at, sum, n);
        }
    }
}

/* ---- Up to sixteen rows ---- */

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

static inline void amx_matmul_fold(struct tree *tree, int leaf, int tiles, int rows) {
    int top = cpu_leaf_level(leaf);
    for (int n = leaf; n & 1; n >>= 1, top--)
        for (int t = 0; t < tiles; t++)
            for (int r = 0; r < rows; r++)
                v16_store(tree->level[top - 1][t][r], v16_add(v16_load(tree->level[top - 1][t][r]),
                                                              v16_load(tree->level[top][t][r])));
}

static inline void zero_four(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

/* Computes one depth of four panels. */
SIMD void four_by_one(const char *a, const char *b, size_t stride, const int parts) {
    _tile_loadd(4, a, 64);
    if (parts == SPLIT) _tile_loadd(5, a + TILE_BYTES, 64);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + stride, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (parts == SPLIT) _tile_dpbf16ps(0, 5, 6);
    _tile_loadd(6, b + 2 * stride, 64);
    _tile_dpbf16ps(2, 4, 6);
    if (parts == SPLIT) _tile_dpbf16ps(1, 5, 7);
    _tile_loadd(7, b + 3 * stride, 64);
    _tile_dpbf16ps(3, 4, 7);
    if (parts == SPLIT) _tile_dpbf16ps(2, 5, 6);
    if (parts == SPLIT) _tile_dpbf16ps(3, 5, 7);
}

SIMD void one_by_one(const char *a, const char *b, const int parts) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (parts == ROUNDED) return;
    _tile_loadd(5, a + TILE_BYTES, 64);
    _tile_dpbf16ps(0, 5, 6);
}

/* Computes one leaf of four panels, from `at` to `end` in bytes of bf16. */
SIMD void few_rows_leaf(const char *a, struct group b, size_t at, size_t end, const int parts) {
    zero_four();
    for (; at < end; at += TILE_BYTES) {
        size_t ahead = at + AHEAD;
        const char *fetch = ahead < b.stride ? b.panel + ahead : b.after + (ahead - b.stride);
        for (size_t t = 0; t < 4; t++) fetch_tile(fetch + t * b.stride);
        four_by_one(a + (size_t)parts * at, b.panel + at, b.stride, parts);
    }
}

/* Memory to prefetch: `step` bytes at a time from `from`. */
struct fetch {
    const char *from;
    size_t step;
};

SIMD void amx_matmul_fetch_next(struct fetch *fetch) {
    for (size_t line = 0; line < fetch->step; line += 64)
        _mm_prefetch(fetch->from + line, _MM_HINT_T1);
    fetch->from += fetch->step;
}

static inline void store_four(float (*to)[16][16]) {
    _tile_stored(0, to[0], 64);
    _tile_stored(1, to[1], 64);
    _tile_stored(2, to[2], 64);
    _tile_stored(3, to[3], 64);
}

SIMD void few_rows_four(const struct cpu_matmul_job *job, int64_t panel, struct group b,
                        const int parts) {
    struct tree tree;
    const struct kern_weight *w = job->weight;
    for (int l = 0; l < w->leaves; l++) {
        const size_t at = leaf_start(w, l), end = leaf_start(w, l + 1);
        few_rows_leaf(job->packed, b, at, end, parts);
        store_four(tree.level[cpu_leaf_level(l)]);
        amx_matmul_fold(&tree, l, 4, job->rows);
    }
    amx_matmul_put(job, 0, panel, tree.level[0], 4);
}

SIMD void few_rows_stored(const char *a, const char *b, size_t at, size_t end, const int parts) {
    for (; at < end; at += TILE_BYTES) {
        fetch_tile(b + at + AHEAD);
        one_by_one(a + (size_t)parts * at, b + at, parts);
    }
}

/* Each tile is multiplied after the next one has been converted, because its load waits for its
 * stores. The processor's time goes to converting, so there is nothing to gain from four panels at
 * a time, and one at a time reads memory in its order. Meanwhile the next panel is fetched. */
SIMD void few_rows_wide(const struct kern_weight *w, const char *a, const char *b,
                        struct fetch *fetch, size_t at, size_t end, const int parts) {
    _Alignas(64) char wide[2][TILE_BYTES];
    const size_t start = at;
    for (; at < end + TILE_BYTES; at += TILE_BYTES) {
        const size_t tile = at / TILE_BYTES;
        if (at < end) {
            amx_matmul_fetch_next(fetch);
            widen_panels(w, b, 1, tile, 1, wide[tile % 2], 0);
        }
        if (at > start)
            one_by_one(a + (size_t)parts * (at - TILE_BYTES), wide[(tile + 1) % 2], parts);
    }
}

SIMD void few_rows_one(const struct cpu_matmul_job *job, int64_t panel, const int parts) {
    struct tree tree;
    const struct kern_weight *w = job->weight;
    const char *b = w->data + (size_t)panel * w->panel_bytes;
    const size_t tiles = wide_bytes(w) / TILE_BYTES;
    struct fetch fetch = {b + w->panel_bytes, (w->panel_bytes / 64 + tiles - 1) / tiles * 64};
    for (int l = 0; l < w->leaves; l++) {
        const size_t at = leaf_start(w, l), end = leaf_start(w, l + 1);
        _tile_zero(0);
        if (widener_of(w))
            few_rows_wide(w, job->packed, b, &fetch, at, end, parts);
        else
            few_rows_stored(job->packed, b, at, end, parts);
        _tile_stored(0, tree.level[cpu_leaf_level(l)][0], 64);
        amx_matmul_fold(&tree, l, 1, job->rows);
    }
    amx_matmul_put(job, 0, panel, tree.level[0], 1);
}

/* ---- Many rows ---- */
/* Many rows are multiplied in blocks of two tiles of rows and two panels, which need four loads for
 * each four products of a part. A chunk of the two panels is converted once and multiplied with all
 * rows of the pass while it is in the first-level cache; between chunks, the sums of all blocks lie
 * in memory. */

/* Bytes of a panel's chunk in bf16: few enough that a chunk stays in the first-level cache beside
 * the activations that it is multiplied with. Split activations use each tile twice, which hides
 * reading it from the second-level cache; so tiles that are stored in bf16 need no chunks, and sums
 * stay in tiles. */
#define CHUNK_MOST ((size_t)16 * TILE_BYTES)

SIMD size_t chunk_bytes(const struct kern_weight *w, const int parts) {
    if (parts == ROUNDED) return CHUNK_MOST / 2;
    return widener_of(w) ? CHUNK_MOST : wide_bytes(w);
}

/* Two panels, or a single last one. */
struct many {
    const struct cpu_matmul_job *job;
    int64_t panel;
    struct fetch fetch;
    struct tree *trees; /* one for every two tiles of rows; a tree's tiles are [rows][panels] */
    char *wide;
};

/* Adds the products of one depth to two tiles of rows by two panels. `stride`: bytes from a tile of
 * the first panel to that of the second; `a_stride`: bytes from a tile of rows to the next. Each
 * sum gets the high part of the weights before the low one. */
SIMD void two_by_two(const char *a, size_t a_stride, const char *b, size_t stride, const int high,
                     const int panels, const int parts) {
    _tile_loadd(6, b, 64);
    _tile_loadd(4, a, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (panels > 1) _tile_loadd(7, b + stride, 64);
    if (panels > 1) _tile_dpbf16ps(1, 4, 7);
    if (high > 1) _tile_loadd(5, a + a_stride, 64);
    if (high > 1) _tile_dpbf16ps(2, 5, 6);
    if (high > 1 && panels > 1) _tile_dpbf16ps(3, 5, 7);
    if (parts == ROUNDED) return;
    _tile_loadd(4, a + TILE_BYTES, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (panels > 1) _tile_dpbf16ps(1, 4, 7);
    if (high > 1) _tile_loadd(5, a + a_stride + TILE_BYTES, 64);
    if (high > 1) _tile_dpbf16ps(2, 5, 6);
    if (high > 1 && panels > 1) _tile_dpbf16ps(3, 5, 7);
}

static inline void load_four(float (*from)[16][16]) {
    _tile_loadd(0, from[0], 64);
    _tile_loadd(1, from[1], 64);
    _tile_loadd(2, from[2], 64);
    _tile_loadd(3, from[3], 64);
}

/* Adds tiles [at, end), in bytes of bf16, of two panels, which begin at `b`, to the sums of a block
 * of rows. Tiles of sums that the block lacks are loaded and stored, too. */
SIMD void add_chunk(struct many *many, int row, const char *b, size_t stride, size_t at, size_t end,
                    float (*sums)[16][16], bool first, const int high, const int panels,
                    const int parts) {
    const size_t a_stride = amx_matmul_rows_bytes(many->job, 16, parts);
    const char *a = many->job->packed + amx_matmul_rows_bytes(many->job, row, parts);
    struct fetch fetch = many->fetch;
    if (first)
        zero_four();
    else
        load_four(sums);
    for (; at < end; at += TILE_BYTES, b += TILE_BYTES) {
        amx_matmul_fetch_next(&fetch);
        two_by_two(a + (size_t)parts * at, a_stride, b, stride, high, panels, parts);
    }
    store_four(sums);
    many->fetch = fetch;
}

/* Completes a leaf, and the results behind the last one. */
SIMD void close_leaf(const struct many *many, int leaf, int row, const int high, const int panels) {
    struct tree *tree = &many->trees[row / 32];
    amx_matmul_fold(tree, leaf, 4, 16);
    if (leaf + 1 < many->job->weight->leaves) return;
    for (int h = 0; h < high; h++)
        amx_matmul_put(many->job, row + 16 * h, many->panel, tree->level[0] + (ptrdiff_t)2 * h,
                       panels);
}

/* Multiplies tiles [at, end) of a leaf, in bytes of bf16, with all rows. */
SIMD void amx_matmul_all_rows(struct many *many, int leaf, size_t at, size_t end, const int panels,
                              const int parts) {
    const struct cpu_matmul_job *job = many->job;
    const struct kern_weight *w = job->weight;
    const char *b = w->data + (size_t)many->panel * w->panel_bytes;
    size_t stride = w->panel_bytes;
    if (widener_of(w)) {
        stride = end - at;
        widen_panels(w, b, panels, at / TILE_BYTES, stride / TILE_BYTES, many->wide, stride);
        b = many->wide;
    } else {
        b += at;
    }
    const bool first = at == leaf_start(w, leaf), last = end == leaf_start(w, leaf + 1);
    for (int row = 0; row < job->rows; row += 32) {
        float(*sums)[16][16] = many->trees[row / 32].level[cpu_leaf_level(leaf)];
        if (row + 16 < job->rows)
            add_chunk(many, row, b, stride, at, end, sums, first, 2, panels, parts);
        else
            add_chunk(many, row, b, stride, at, end, sums, first, 1, panels, parts);
        if (last) close_leaf(many, leaf, row, row + 16 < job->rows ? 2 : 1, panels);
    }
}

/* Every step of a block fetches its share of the panels that come next, `after`. */
SIMD void many_rows_some(const struct cpu_matmul_job *job, int64_t panel, int64_t after,
                         char *scratch, const int panels, const int parts) {
    const struct kern_weight *w = job->weight;
    const size_t tiles = (size_t)w->depth / TILE_DEPTH,
                 steps = tiles * (((size_t)job->rows + 31) / 32);
    const size_t lines = (size_t)panels * w->panel_bytes / 64;
    struct many many = {
        .job = job,
        .panel = panel,
        .fetch = {w->data + (size_t)(after < 0 ? panel : after) * w->panel_bytes,
                  after < 0 ? 0 : (lines + steps - 1) / steps * 64},
        .trees = (struct tree *)(void *)scratch,
        .wide = scratch + MATMUL_ROWS / 32 * sizeof(struct tree),
    };
    const size_t chunk = chunk_bytes(w, parts);
    for (int l = 0; l < w->leaves; l++) {
        const size_t end = leaf_start(w, l + 1);
        size_t at = leaf_start(w, l), next;
        do { /* once for a leaf without inputs, too: its sums are zeros */
            next = end - at > chunk ? at + chunk : end;
            amx_matmul_all_rows(&many, l, at, next, panels, parts);
            at = next;
        } while (at < end);
    }
}

SIMD void amx_matmul_few_rows(const struct cpu_matmul_job *job, int64_t first, int64_t count,
                              int64_t next, const int parts) {
    for (; count >= 4 && !widener_of(job->weight); count -= 4, first += 4)
        few_rows_four(job, first, group_of(job->weight, first, count >= 8 ? first + 4 : next),
                      parts);
    for (; count; count--, first++) few_rows_one(job, first, parts);
}

SIMD void amx_matmul_many_rows(const struct cpu_matmul_job *job, int64_t first, int64_t count,
                               int64_t next, char *scratch, const int parts) {
    for (; count >= 2; count -= 2, first += 2)
        many_rows_some(job, first, count > 2 ? first + 2 : next, scratch, 2, parts);
    if (count) many_rows_some(job, first, next, scratch, 1, parts);
}

/* Scratch for the trees of a pass and a chunk of two panels. */
size_t cpu_matmul_scratch_amx(const struct kern_weight *weight) {
    const size_t tiles = MATMUL_ROWS / 32 * sizeof(struct tree) + 2 * CHUNK_MOST;
    const size_t other = cpu_matmul_scratch_avx512(weight);
    return tiles > other ? tiles : other;
}

SIMD void amx_matmul_multiply(const struct cpu_matmul_job *job, int64_t first, int64_t count,
                              int64_t next, void *scratch, const int parts) {
    if (!job->packed) {
        cpu_matmul_avx512(job, first, count, next, scratch);
        return;
    }
    amx_configure(job->rows < 16 ? job->rows : 16, 6);
    if (job->rows > 16)
        amx_matmul_many_rows(job, first, count, next, scratch, parts);
    else
        amx_matmul_few_rows(job, first, count, next, parts);
    _tile_release();
    _mm_sfence(); /* completes the non-temporal stores before the barrier */
}

void cpu_matmul_amx(const struct cpu_matmul_job *job, int64_t first, int64_t count, int64_t next,
                    void *scratch) {
    amx_matmul_multiply(job, first, count, next, scratch, SPLIT);
}

static void matmul_rounded(const struct cpu_matmul_job *job, int64_t first, int64_t count,
                           int64_t next, void *scratch) {
    amx_matmul_multiply(job, first, count, next, scratch, ROUNDED);
}

/* Entries that the tables of both forms of activations share. */
#define TILES                                                                                      \
    .layout_bf16 = CPU_PANEL_PAIRS, .layout_e4m3 = CPU_PANEL_E4M3, .layout_other = CPU_PANEL_F32,  \
    .rms_norm = cpu_rms_norm_avx512, .glu = cpu_glu_avx512, .rope = cpu_rope_avx512,               \
    .write_row = cpu_write_row_avx512, .delta = cpu_delta_avx512,                                  \
    .matmul_scratch = cpu_matmul_scratch_amx, .math = &cpu_math_avx512,                            \
    .attend_scratch = cpu_attend_scratch_amx, .attend_lanes = cpu_attend_lanes_amx,                \
    .attend = cpu_attend_amx, .attention = "bf16 in attention with narrow caches"

const struct cpu_kernels cpu_kernels_amx = {
    .name = "cpu-amx",
    .matmul = cpu_matmul_amx,
    .packed_bytes = cpu_packed_bytes_amx,
    .pack_x = cpu_pack_x_amx,
    .stored = "two bf16",
    TILES,
};

const struct cpu_kernels cpu_kernels_amx_bf16 = {
    .name = "cpu-amx-bf16",
    .matmul = matmul_rounded,
    .packed_bytes = packed_bytes_rounded,
    .pack_x = pack_x_rounded,
    .packs_blocks = true,
    .stored = "bf16",
    TILES,
};
