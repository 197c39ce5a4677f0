/* Products of weights in blocks with activations in int8 or int16, over vectors of sixteen
 * integers; compiled for the portable path, AVX2, and AVX-512 with VNNI. block.h says what is
 * computed. */
#include "base/check.h"
#include "kernels/cpu/block.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/vec.h"

/* A vector of the portable path fills four registers: its sums are in memory anyway, and unrolled
 * loops are no faster but take ten times as long to compile. */
#if defined(__AVX2__)
#define UNROLL_8 _Pragma("GCC unroll 8")
#else
#define UNROLL_8
#endif
#define EACH(count, i) UNROLL_8 for (int i = 0; i < (count); i++)

/* ---- Sixteen sums ---- */
/* `whole`: sixteen running sums. `codes`: 64 bytes of a panel. One of the vectors that they unpack
 * to has for each sum four numbers of 8 bits or, where activations are `wide` (int16), two of 16
 * bits: those at even bytes or those at odd ones, of the low or the high half of the byte where
 * codes have 4 bits. `input`: the activations that all sums multiply with them. Numbers are
 * unsigned, so the sums contain an offset. `start` is its correction; whole_open or whole_close
 * applies it. A sum of int16 is converted to float32; one of int8 begins or ends with the bits of
 * `back`, which is then subtracted (block.h). */

/* A type's layout of blocks, the part of a block: half `part` of 2, or all of it, and whether
 * activations are int16. A constant in every compiled loop. */
struct form {
    int bits;
    bool least;
    int parts, part;
    bool wide;
};

#if defined(__AVX512VNNI__)

/* An input is broadcast once for all panels of a tile. 24 of 32 registers hold sums. */
#define ROWS          6
#define PANELS        2
#define PANELS_OF_TWO 4

typedef __m512i whole;
typedef __m512i codes;
typedef __m512i input;

SIMD whole whole_open(int32_t start, float back, const struct form f) {
    (void)back, (void)f;
    return _mm512_set1_epi32(start);
}
SIMD input input_load(const char *x) {
    int32_t some;
    memcpy(&some, x, sizeof some);
    return _mm512_set1_epi32(some);
}
SIMD codes codes_load(const char *at) {
    return _mm512_loadu_si512(at);
}
SIMD codes codes_unpack(codes all, const int which, const struct form f) {
    const codes mask = f.wide ? _mm512_set1_epi16(f.bits == 4 ? 15 : 255) : _mm512_set1_epi8(15);
    const int shift = f.wide ? f.bits * (which / 2) + 8 * (which % 2) : 4 * which;
    if (f.bits == 8 && !f.wide) return all;
    if (shift) all = _mm512_srli_epi16(all, (unsigned)shift);
    return f.wide && shift == 16 - f.bits ? all : _mm512_and_si512(all, mask);
}
/* Unpacks codes beside int8; `shift`: 0, or 4 for the high halves of the bytes. */
SIMD codes codes_shift(codes all, int shift, const struct form f) {
    if (f.bits == 8) return all;
    return _mm512_and_si512(_mm512_srl_epi16(all, _mm_cvtsi32_si128(shift)), _mm512_set1_epi8(15));
}
SIMD whole whole_dot(whole sum, codes w, input x, const struct form f) {
    return f.wide ? _mm512_dpwssd_epi32(sum, w, x) : _mm512_dpbusd_epi32(sum, w, x);
}
SIMD v16 whole_close(whole sum, int32_t start, float back, const struct form f) {
    (void)start;
    return f.wide ? _mm512_cvtepi32_ps(sum) : v16_sub(_mm512_castsi512_ps(sum), v16_set(back));
}
SIMD v16 factor_load(const char *at, bool halves) {
    return __builtin_expect(halves, 1) ? v16_load_f16((const uint16_t *)at)
                                       : v16_load((const float *)at);
}
SIMD v16 fused(v16 a, v16 b, v16 c) {
    return v16_fma(a, b, c);
}

#elif defined(__AVX2__)

#define ROWS          3
#define PANELS        1
#define PANELS_OF_TWO 1

typedef struct {
    __m256i lo, hi;
} whole;
typedef whole codes;
typedef __m256i input;

/* Products of 4-bit codes with int8 are summed in 16 bits until they are closed: at most 8 x 2 x 15
 * x 127 = 30480. */
SIMD whole whole_open(int32_t start, float back, const struct form f) {
    const __m256i all = f.wide        ? _mm256_set1_epi32(start)
                        : f.bits == 8 ? _mm256_set1_epi32((int32_t)number_bits(back))
                                      : _mm256_setzero_si256();
    return (whole){all, all};
}
SIMD input input_load(const char *x) {
    int32_t some;
    memcpy(&some, x, sizeof some);
    return _mm256_set1_epi32(some);
}
SIMD codes codes_load(const char *at) {
    return (codes){_mm256_loadu_si256((const __m256i *)at),
                   _mm256_loadu_si256((const __m256i *)at + 1)};
}
SIMD __m256i unpack_half(__m256i all, const int which, const struct form f) {
    const __m256i mask = f.wide ? _mm256_set1_epi16(f.bits == 4 ? 15 : 255) : _mm256_set1_epi8(15);
    const int shift = f.wide ? f.bits * (which / 2) + 8 * (which % 2) : 4 * which;
    if (f.bits == 8 && !f.wide) return all;
    if (shift) all = _mm256_srli_epi16(all, shift);
    return f.wide && shift == 16 - f.bits ? all : _mm256_and_si256(all, mask);
}
SIMD codes codes_unpack(codes all, const int which, const struct form f) {
    return (codes){unpack_half(all.lo, which, f), unpack_half(all.hi, which, f)};
}
SIMD codes codes_shift(codes all, int shift, const struct form f) {
    const __m128i by = _mm_cvtsi32_si128(shift);
    const __m256i mask = _mm256_set1_epi8(15);
    if (f.bits == 8) return all;
    return (codes){_mm256_and_si256(_mm256_srl_epi16(all.lo, by), mask),
                   _mm256_and_si256(_mm256_srl_epi16(all.hi, by), mask)};
}
/* With int8, a sum of two products would overflow 16 bits with unsigned codes (255 x 127 x 2), but
 * not with signed ones (128 x 127 x 2). So the offset is taken off the code and its sign moved to
 * x, and there is nothing to correct. */
SIMD __m256i dot_half(__m256i sum, __m256i w, input x, const struct form f) {
    if (f.wide) return _mm256_add_epi32(sum, _mm256_madd_epi16(w, x));
    if (f.bits == 4) return _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x));
    __m256i n = _mm256_xor_si256(w, _mm256_set1_epi8((char)0x80));
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(n), _mm256_sign_epi8(x, n));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
SIMD whole whole_dot(whole sum, codes w, input x, const struct form f) {
    return (whole){dot_half(sum.lo, w.lo, x, f), dot_half(sum.hi, w.hi, x, f)};
}
SIMD __m256 close_half(__m256i sum, int32_t start, float back, const struct form f) {
    if (f.wide) return _mm256_cvtepi32_ps(sum);
    if (f.bits == 4)
        sum = _mm256_add_epi32(_mm256_madd_epi16(sum, _mm256_set1_epi16(1)),
                               _mm256_set1_epi32(start));
    return _mm256_sub_ps(_mm256_castsi256_ps(sum), _mm256_set1_ps(back));
}
SIMD v16 whole_close(whole sum, int32_t start, float back, const struct form f) {
    return V16(close_half(sum.lo, start, back, f), close_half(sum.hi, start, back, f));
}
SIMD v16 factor_load(const char *at, bool halves) {
    return __builtin_expect(halves, 1) ? v16_load_f16((const uint16_t *)at)
                                       : v16_load((const float *)at);
}
SIMD v16 fused(v16 a, v16 b, v16 c) {
    return v16_fma(a, b, c);
}

#else

#define ROWS          1
#define PANELS        1
#define PANELS_OF_TWO 1

typedef struct {
    int32_t at[16];
} whole;
typedef struct {
    uint8_t at[64];
} codes;
typedef const char *input;

SIMD whole whole_open(int32_t start, float back, const struct form f) {
    whole sum;
    (void)back, (void)f;
    for (int i = 0; i < 16; i++) sum.at[i] = start;
    return sum;
}
SIMD input input_load(const char *x) {
    return x;
}
SIMD codes codes_load(const char *at) {
    codes w;
    memcpy(w.at, at, sizeof w.at);
    return w;
}
/* Unpacked numbers have one byte each, also beside int16: sum i has those from 4 i or, of 2, from
 * 2 i. */
SIMD codes codes_unpack(codes all, const int which, const struct form f) {
    codes out = all;
    if (f.wide)
        for (int i = 0; i < 32; i++) out.at[i] = all.at[2 * i + which % 2];
    if (f.bits == 8) return out;
    for (int i = 0; i < 64; i++) out.at[i] = out.at[i] >> (which / (f.wide ? 2 : 1) ? 4 : 0) & 15;
    return out;
}
SIMD codes codes_shift(codes all, int shift, const struct form f) {
    return codes_unpack(all, shift / 4, f);
}
SIMD whole whole_dot(whole sum, codes w, input x, const struct form f) {
    int16_t pair[2] = {0, 0};
    if (f.wide) memcpy(pair, x, sizeof pair);
    for (ptrdiff_t i = 0; i < 16 && f.wide; i++)
        sum.at[i] += w.at[2 * i] * pair[0] + w.at[2 * i + 1] * pair[1];
    for (ptrdiff_t i = 0; i < 16 && !f.wide; i++)
        for (ptrdiff_t j = 0; j < 4; j++) sum.at[i] += w.at[4 * i + j] * (int8_t)x[j];
    return sum;
}
SIMD v16 whole_close(whole sum, int32_t start, float back, const struct form f) {
    float to[16];
    (void)start;
    for (int i = 0; i < 16; i++)
        to[i] = f.wide ? (float)sum.at[i] : number_from_bits((uint32_t)sum.at[i]) - back;
    return v16_load(to);
}
SIMD v16 factor_load(const char *at, bool halves) {
    return __builtin_expect(halves, 1) ? v16_load_f16((const uint16_t *)at)
                                       : v16_load((const float *)at);
}
SIMD v16 fused(v16 a, v16 b, v16 c) {
    float x[16], y[16], z[16];
    v16_store(x, a), v16_store(y, b), v16_store(z, c);
    for (int i = 0; i < 16; i++) z[i] = fmaf(x[i], y[i], z[i]);
    return v16_load(z);
}

#endif

/* ---- A block of outputs ---- */

#define AHEAD           4 /* blocks */
#define FETCHING_ROWS   3
#define PANELS_MOST     4
#define PANELS_OF(rows) ((rows) == 1 ? PANELS_MOST : (rows) == 2 ? PANELS_OF_TWO : PANELS)

typedef v16 block_sums[ROWS][PANELS_MOST];

/* A leaf of some rows and panels. Panels that are missing at the end repeat another. The rows of a
 * piece lie beside each other: [places][rows]. */
struct leaf_data {
    const char *x;
    const struct cpu_x_block *x_blocks;
    int64_t count; /* blocks of the leaf */
    const char *codes[PANELS_MOST], *factors[PANELS_MOST];
    size_t factor_bytes;
    bool halves;
    const char *fetch; /* memory that later loops read: `lines` cache lines for each block */
    int lines;
    int merges; /* sums before `to` that the leaf's are added to, the last one first */
};

SIMD void dot_step(whole (*sum)[PANELS_MOST], const codes *w, const int which, const char *x,
                   const struct form f, const int rows, const int panels) {
    const ptrdiff_t x_bytes = f.wide ? 2 * KERN_BLOCK : KERN_BLOCK;
    codes unpacked[PANELS_MOST];
    EACH(panels, p) unpacked[p] = codes_unpack(w[p], which, f);
    EACH(rows, r) {
        input some = input_load(x + r * x_bytes);
        EACH(panels, p) sum[r][p] = whole_dot(sum[r][p], unpacked[p], some, f);
    }
}

/* A place of some rows. */
struct inputs {
    const char *x;
    const struct cpu_x_block *blocks;
};

SIMD struct inputs inputs_at(struct inputs in, int64_t place, const struct form f, const int rows) {
    const int64_t bytes = f.wide ? 2 * KERN_BLOCK : KERN_BLOCK;
    return (struct inputs){in.x + place * rows * bytes, in.blocks + place * rows};
}

/* Adds the integer products of a part of block b. */
SIMD void dot_block(whole (*sum)[PANELS_MOST], const struct leaf_data *in, int64_t b,
                    struct inputs from, const struct form f, const int rows, const int panels) {
    const int count = PANEL * KERN_BLOCK / 8 * f.bits / 64 / f.parts, size = f.wide ? 2 : 1;
    const size_t bytes = (size_t)(PANEL * KERN_BLOCK / 8 * f.bits);
    const char *x = from.x + (ptrdiff_t)size * f.part * (KERN_BLOCK / 2);
    codes w[PANELS_MOST];
    EACH(rows, r) {
        const struct cpu_x_block *block = &from.blocks[r];
        EACH(panels, p) sum[r][p] = whole_open(block->start[f.part], block->back, f);
    }
    UNROLL_8 for (int v = 0; v < count; v++) {
        EACH(panels, p)
        w[p] = codes_load(in->codes[p] + (size_t)b * bytes + (ptrdiff_t)64 * (f.part * count + v));
        const char *low = x + (ptrdiff_t)4 * size * v;
        const char *high = low + (ptrdiff_t)size * KERN_BLOCK / 2;
        dot_step(sum, w, 0, low, f, rows, panels);
        if (f.wide) dot_step(sum, w, 1, low + 4, f, rows, panels);
        if (f.bits == 8) continue;
        dot_step(sum, w, size, high, f, rows, panels);
        if (f.wide) dot_step(sum, w, 3, high + 4, f, rows, panels);
    }
}

/* Adds the sum of a part of a block to one in float32. */
SIMD v16 add_part(v16 to, whole sum, const struct cpu_x_block *x, v16 scale, v16 least,
                  int32_t start, const struct form f) {
    const v16 value = whole_close(sum, start, x->back, f);
    if (f.least && f.part == 0) to = fused(least, v16_set(x->sum), to);
    return fused(value, f.wide ? v16_mul(scale, v16_set(x->scale)) : scale, to);
}

/* Adds a part of block b to sums in float32. They are in registers, too: stores to memory would
 * wait for those of results, which miss the caches. */
SIMD void scale_block(v16 (*to)[PANELS_MOST], whole (*sum)[PANELS_MOST], const struct leaf_data *in,
                      int64_t b, struct inputs from, const struct form f, const int rows,
                      const int panels) {
    const size_t each = in->factor_bytes / (size_t)(f.parts + f.least);
    EACH(panels, p) {
        const char *at = in->factors[p] + (size_t)b * in->factor_bytes;
        v16 scale = factor_load(at + (size_t)f.part * each, in->halves), least = scale;
        if (f.least) least = factor_load(at + (size_t)f.parts * each, in->halves);
        EACH(rows, r) {
            const struct cpu_x_block *x = &from.blocks[r];
            to[r][p] = add_part(to[r][p], sum[r][p], x, scale, least, x->start[f.part], f);
        }
    }
}

/* Adds block b of the weights times a place of the activations. */
SIMD void add_block(v16 (*to)[PANELS_MOST], const struct leaf_data *in, int64_t b,
                    struct inputs from, const struct form first, const int rows, const int panels) {
    whole sum[ROWS][PANELS_MOST];
    struct form second = first;
    second.part = 1;
    dot_block(sum, in, b, from, first, rows, panels);
    scale_block(to, sum, in, b, from, first, rows, panels);
    if (first.parts == 1) return;
    dot_block(sum, in, b, from, second, rows, panels);
    scale_block(to, sum, in, b, from, second, rows, panels);
}

/* Adds a rest of each row: the group that begins with block b, and each row has another quad of it.
 * The weights are still in the first-level cache. */
SIMD void add_rests(v16 (*to)[PANELS_MOST], const struct leaf_data *in, int64_t b,
                    struct inputs from, const struct form f, const int rows, const int panels) {
    const size_t bytes = (size_t)(PANEL * KERN_BLOCK / 8 * f.bits);
    EACH(rows, r) {
        const struct cpu_x_block *x = &from.blocks[r];
        const input some = input_load(from.x + (ptrdiff_t)r * KERN_BLOCK);
        EACH(panels, p) {
            const char *codes_of = in->codes[p] + (size_t)b * bytes + (x->codes & ~63u);
            const char *factors_of = in->factors[p] + (size_t)b * in->factor_bytes;
            codes w = codes_shift(codes_load(codes_of), (int)(x->codes & 63), f);
            whole sum = whole_dot(whole_open(x->start[0], x->back, f), w, some, f);
            v16 scale = factor_load(factors_of + x->factors, in->halves), least = scale;
            if (f.least) least = factor_load(factors_of + x->least, in->halves);
            to[r][p] = add_part(to[r][p], sum, x, scale, least, x->start[0], f);
        }
    }
}

/* Fetches the activations of a place, perhaps of the next piece, from the second-level cache. */
SIMD void fetch_inputs(struct inputs from, const struct form f, const int rows) {
    const int64_t x_bytes = (int64_t)rows * KERN_BLOCK * (f.wide ? 2 : 1);
    const int64_t block_bytes = rows * (int64_t)sizeof *from.blocks;
    for (int at = 0; at < x_bytes; at += 64) __builtin_prefetch(from.x + at);
    for (int at = 0; at < block_bytes; at += 64) __builtin_prefetch((const char *)from.blocks + at);
}

SIMD void sum_leaf(block_sums *to, const struct leaf_data *in, const struct form f, const int rows,
                   const int panels) {
    v16 total[ROWS][PANELS_MOST];
    const int64_t group = f.wide ? in->count : CPU_REST_GROUP;
    struct inputs from = {in->x, in->x_blocks};
    const char *fetch = in->fetch;
    EACH(rows, r) EACH(panels, p) total[r][p] = v16_set(0);
    for (int64_t first = 0, end; first < in->count; first = end) {
        end = first + group < in->count ? first + group : in->count;
        for (int64_t b = first; b < end; b++, from = inputs_at(from, 1, f, rows)) {
            for (int i = 0; i < in->lines; i++, fetch += 64) __builtin_prefetch(fetch, 0, 2);
            if (rows >= FETCHING_ROWS) fetch_inputs(inputs_at(from, AHEAD, f, rows), f, rows);
            add_block(total, in, b, from, f, rows, panels);
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

#define LOOP(name, bits, least, parts, rows)                                                       \
    __attribute__((noinline)) static void name(block_sums *to, const struct leaf_data *in) {       \
        sum_leaf(to, in, (struct form){bits, least, parts, 0, false}, rows, PANELS_OF(rows));      \
    }                                                                                              \
    __attribute__((noinline)) static void name##_wide(block_sums *to,                              \
                                                      const struct leaf_data *in) {                \
        sum_leaf(to, in, (struct form){bits, least, parts, 0, true}, rows, PANELS_OF(rows));       \
    }
#define SHAPE(R)                                                                                   \
    LOOP(q8_##R, 8, false, 1, R)                                                                   \
    LOOP(q8m_##R, 8, true, 1, R)                                                                   \
    LOOP(q4_##R, 4, false, 1, R)                                                                   \
    LOOP(q4m_##R, 4, true, 1, R)                                                                   \
    LOOP(q8s_##R, 8, false, 2, R)                                                                  \
    LOOP(q8sm_##R, 8, true, 2, R)
#define SHAPE_OF(R)                                                                                \
    {                                                                                              \
        {q8_##R, q8m_##R, q4_##R, q4m_##R, q8s_##R, q8sm_##R}, {                                   \
            q8_##R##_wide, q8m_##R##_wide, q4_##R##_wide, q4m_##R##_wide, q8s_##R##_wide,          \
                q8sm_##R##_wide                                                                    \
        }                                                                                          \
    }

SHAPE(1)
#if ROWS > 1
SHAPE(2)
SHAPE(3)
#endif
#if ROWS > 3
SHAPE(4)
SHAPE(5)
SHAPE(6)
#endif

/* Loops by number of rows, then for int8 and int16, then in the order of kern_dtype. */
static leaf_loop *const loops[ROWS][2][KERN_Q8SM - KERN_Q8 + 1] = {
    SHAPE_OF(1),
#if ROWS > 1
    SHAPE_OF(2), SHAPE_OF(3),
#endif
#if ROWS > 3
    SHAPE_OF(4), SHAPE_OF(5), SHAPE_OF(6),
#endif
};

/* ---- A product ---- */

/* A leaf of a weight: its blocks, their places, and where they begin in a panel. */
struct leaf_part {
    int64_t first, count, place;
    size_t codes, factors;
    int merges; /* levels that its sums complete (cpu_leaf_level) */
};

/* Rows and panels that are multiplied together. */
struct tile {
    struct cpu_piece piece;
    int64_t panel;
    int panels;
    const struct leaf_part *leaves;
    const char *fetch; /* as in leaf_data, for the tile's first leaf */
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
static void one_leaf(block_sums *level, const struct cpu_matmul_job *job, const struct tile *at,
                     int number) {
    const struct kern_weight *w = job->weight;
    const struct leaf_part *leaf = &at->leaves[number];
    const int64_t rows = at->piece.rows;
    const int64_t place = at->piece.row * cpu_x_places(w, job->wide) + leaf->place * rows;
    struct leaf_data in = {.x = job->codes + place * KERN_BLOCK * (job->wide ? 2 : 1),
                           .x_blocks = job->x_blocks + place,
                           .count = leaf->count,
                           .factor_bytes = cpu_block_factors(w),
                           .halves = w->halves,
                           .fetch = at->fetch + leaf->first * at->lines * 64,
                           .lines = at->lines,
                           .merges = leaf->merges};
    for (int p = 0; p < PANELS_MOST; p++) {
        const int64_t panel = at->panel + (p < at->panels ? p : 0);
        const char *data = w->data + (size_t)panel * w->panel_bytes;
        in.codes[p] = data + leaf->codes;
        in.factors[p] = data + leaf->factors;
    }
    loops[rows - 1][job->wide][w->dtype - KERN_Q8](level + cpu_leaf_level(number), &in);
}

static void put(const struct cpu_matmul_job *job, int64_t row, int64_t output, v16 sum) {
    int64_t left = job->weight->rows - output;
    int n = left < 16 ? (int)left : 16;
    float *y = job->y + row * job->weight->rows + output;
    if (n == 16 && !job->bias) {
        v16_store(y, job->mode == KERN_ADD ? v16_add(v16_load(y), sum) : sum);
        return;
    }
    if (job->bias) sum = v16_add(sum, v16_load_n(job->bias + output, n));
    if (job->mode == KERN_ADD) sum = v16_add(v16_load_n(y, n), sum);
    v16_store_n(y, sum, n);
}

/* Fetches the lines of the tile's results, which would make its last stores wait. */
static void fetch_results(const struct cpu_matmul_job *job, const struct tile *at) {
    for (int r = 0; r < at->piece.rows; r++) {
        const float *y = job->y + (at->piece.row + r) * job->weight->rows + at->panel * PANEL;
        for (int p = 0; p < at->panels; p++) __builtin_prefetch(y + (ptrdiff_t)p * PANEL, 1);
    }
}

static void multiply_tile(const struct cpu_matmul_job *job, const struct tile *at) {
    block_sums level[CPU_LEAF_LEVELS];
    if (at->piece.rows >= FETCHING_ROWS) fetch_results(job, at);
    for (int l = 0; l < job->weight->leaves; l++) one_leaf(level, job, at, l);
    for (int r = 0; r < at->piece.rows; r++)
        for (int p = 0; p < at->panels; p++)
            put(job, at->piece.row + r, (at->panel + p) * PANEL, level[0][r][p]);
}

/* Multiplies all rows with some panels. Meanwhile it fetches the panels that come next, in the
 * order of memory and in even shares: the read bandwidth needs one long stream, and a tile that
 * waited for memory would leave the memory idle while the other tiles compute. */
static void multiply_panels(const struct cpu_matmul_job *job, int64_t panel, int panels,
                            int64_t next) {
    const struct kern_weight *w = job->weight;
    const int pieces = cpu_piece_count(job->rows, ROWS);
    const int64_t lines = panels * (int64_t)(w->panel_bytes / 64);
    const int64_t steps = pieces * w->blocks, each = (lines + steps - 1) / steps;
    struct leaf_part leaves[CPU_LEAVES];
    const char *fetch = w->data + (size_t)(next < 0 ? panel : next) * w->panel_bytes;
    find_leaves(job, leaves);
    for (int i = 0; i < pieces; i++) {
        const int64_t start = i * w->blocks * each;
        struct tile at = {.piece = cpu_piece_of(job->rows, ROWS, i),
                          .panel = panel,
                          .panels = panels,
                          .leaves = leaves,
                          .fetch = fetch + 64 * start,
                          .lines = next >= 0 && start < lines ? (int)each : 0};
        multiply_tile(job, &at);
    }
}

static void block_multiply(const struct cpu_matmul_job *job, int64_t first, int64_t count,
                           int64_t next) {
    CHECK(!job->scale); /* blocks have their own */
    const int last = cpu_piece_count(job->rows, ROWS) - 1;
    const int most = PANELS_OF(cpu_piece_of(job->rows, ROWS, last).rows); /* the longest piece */
    while (count > 0) {
        const int panels = count < most ? (int)count : most;
        first += panels, count -= panels;
        multiply_panels(job, first - panels, panels, count ? first : next);
    }
}

const struct cpu_block_kernels VEC(block_kernels) = {
    .rows = ROWS, .round_row = VEC(round_row), .multiply = block_multiply};
