/* Products of weights in blocks with activations in int8 or int16, over vectors of sixteen
 * integers; compiled for the portable path, AVX2, and AVX-512 with VNNI. block.h says what is
 * computed. */
#include "base/check.h"
#include "kernels/cpu/block.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/vec.h"

#define EACH(count, i) _Pragma("GCC unroll 8") for (int i = 0; i < (count); i++)

/* ---- Sixteen sums -------------------------------------------------------------------------------
 * `whole`: sixteen running sums. `codes`: 64 bytes of a panel. One of the vectors that they unpack
 * to has for each sum four numbers of 8 bits or, where activations are `wide` (int16), two of 16
 * bits: those at even bytes or those at odd ones, of the low or the high half of the byte where
 * codes have 4 bits. `input`: the activations that all sums multiply with them. Numbers are
 * unsigned, so the sums contain an offset. `start` is its correction; whole_open or whole_close
 * applies it. */

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

SIMD whole whole_open(int32_t start, const struct form f) {
    (void)f;
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
SIMD whole whole_dot(whole sum, codes w, input x, const struct form f) {
    return f.wide ? _mm512_dpwssd_epi32(sum, w, x) : _mm512_dpbusd_epi32(sum, w, x);
}
SIMD v16 whole_close(whole sum, int32_t start, const struct form f) {
    (void)start, (void)f;
    return _mm512_cvtepi32_ps(sum);
}
SIMD v16 factor_load(const char *at, bool halves) {
    return halves ? v16_load_f16((const uint16_t *)at) : v16_load((const float *)at);
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
SIMD whole whole_open(int32_t start, const struct form f) {
    const __m256i all = f.wide ? _mm256_set1_epi32(start) : _mm256_setzero_si256();
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
/* With int8, a sum of two products would overflow 16 bits with unsigned codes (255 x 127 x 2), but
 * not with signed ones (128 x 127 x 2). So the offset is taken off the code and its sign moved to
 * x, and `start` has nothing to correct. */
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
SIMD __m256 close_half(__m256i sum, int32_t start, const struct form f) {
    if (f.bits == 4 && !f.wide)
        sum = _mm256_add_epi32(_mm256_madd_epi16(sum, _mm256_set1_epi16(1)),
                               _mm256_set1_epi32(start));
    return _mm256_cvtepi32_ps(sum);
}
SIMD v16 whole_close(whole sum, int32_t start, const struct form f) {
    return V16(close_half(sum.lo, start, f), close_half(sum.hi, start, f));
}
SIMD v16 factor_load(const char *at, bool halves) {
    return halves ? v16_load_f16((const uint16_t *)at) : v16_load((const float *)at);
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

SIMD whole whole_open(int32_t start, const struct form f) {
    whole sum;
    (void)f;
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
SIMD whole whole_dot(whole sum, codes w, input x, const struct form f) {
    int16_t pair[2] = {0, 0};
    if (f.wide) memcpy(pair, x, sizeof pair);
    for (ptrdiff_t i = 0; i < 16 && f.wide; i++)
        sum.at[i] += w.at[2 * i] * pair[0] + w.at[2 * i + 1] * pair[1];
    for (ptrdiff_t i = 0; i < 16 && !f.wide; i++)
        for (ptrdiff_t j = 0; j < 4; j++) sum.at[i] += w.at[4 * i + j] * (int8_t)x[j];
    return sum;
}
SIMD v16 whole_close(whole sum, int32_t start, const struct form f) {
    float to[16];
    (void)start, (void)f;
    for (int i = 0; i < 16; i++) to[i] = (float)sum.at[i];
    return v16_load(to);
}
SIMD v16 factor_load(const char *at, bool halves) {
    return halves ? v16_load_f16((const uint16_t *)at) : v16_load((const float *)at);
}
SIMD v16 fused(v16 a, v16 b, v16 c) {
    float x[16], y[16], z[16];
    v16_store(x, a), v16_store(y, b), v16_store(z, c);
    for (int i = 0; i < 16; i++) z[i] = fmaf(x[i], y[i], z[i]);
    return v16_load(z);
}

#endif

/* ---- A block of outputs -------------------------------------------------------------------------
 */

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

SIMD int32_t start_of(const struct cpu_x_block *x, const struct form f) {
    return f.parts == 1 ? x->start : f.part == 0 ? x->first : x->start - x->first;
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
        int32_t start = start_of(&from.blocks[r], f);
        EACH(panels, p) sum[r][p] = whole_open(start, f);
    }
    _Pragma("GCC unroll 8") for (int v = 0; v < count; v++) {
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

/* Adds a part of block b to sums in float32. They are in registers, too: stores to memory would
 * wait for those of results, which miss the caches. */
SIMD void scale_block(v16 (*to)[PANELS_MOST], whole (*sum)[PANELS_MOST], const struct leaf_data *in,
                      int64_t b, struct inputs from, const struct form f, const int rows,
                      const int panels) {
    const bool least = f.least && f.part == 0;
    const size_t each = in->factor_bytes / (size_t)(f.parts + f.least);
    EACH(panels, p) {
        const char *at = in->factors[p] + (size_t)b * in->factor_bytes;
        v16 scale = factor_load(at + (size_t)f.part * each, in->halves), term = scale;
        if (least) term = factor_load(at + (size_t)f.parts * each, in->halves);
        EACH(rows, r) {
            const struct cpu_x_block *x = &from.blocks[r];
            v16 value = whole_close(sum[r][p], start_of(x, f), f), all = to[r][p];
            if (least) all = fused(term, v16_set(x->sum), all);
            to[r][p] = fused(value, v16_mul(scale, v16_set(x->scale)), all);
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

/* Adds the rests of the group that begins with block b: each row has the rest of another block. The
 * weights are still in the first-level cache. */
SIMD void add_rests(v16 (*to)[PANELS_MOST], const struct leaf_data *in, int64_t b,
                    struct inputs from, const struct form f, const int rows, const int panels) {
    EACH(rows, r) {
        struct inputs one = {from.x + (ptrdiff_t)r * KERN_BLOCK, from.blocks + r};
        add_block(to + r, in, b + one.blocks->of, one, f, 1, panels);
    }
}

/* Fetches the activations of a place, perhaps of the next piece, from the second-level cache. */
SIMD void fetch_inputs(struct inputs from, const struct form f, const int rows) {
    const int64_t x_bytes = (int64_t)rows * KERN_BLOCK * (f.wide ? 2 : 1);
    const int64_t block_bytes = rows * (int64_t)sizeof *from.blocks;
    for (int at = 0; at < x_bytes; at += 64) __builtin_prefetch(from.x + at);
    for (int at = 0; at < block_bytes; at += 64) __builtin_prefetch((const char *)from.blocks + at);
}

SIMD void sum_leaf(block_sums to, const struct leaf_data *in, const struct form f, const int rows,
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
    EACH(rows, r) EACH(panels, p) to[r][p] = total[r][p];
}

/* Each loop is a function of its own, so that its sums stay in registers. */
typedef void leaf_loop(block_sums to, const struct leaf_data *in);

#define LOOP(name, bits, least, parts, rows)                                                       \
    __attribute__((noinline)) static void name(block_sums to, const struct leaf_data *in) {        \
        sum_leaf(to, in, (struct form){bits, least, parts, 0, false}, rows, PANELS_OF(rows));      \
    }                                                                                              \
    __attribute__((noinline)) static void name##_wide(block_sums to, const struct leaf_data *in) { \
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

/* ---- A product ----------------------------------------------------------------------------------
 */

/* Rows and panels that are multiplied together. */
struct tile {
    struct cpu_piece piece;
    int64_t panel;
    int panels;
    const char *fetch; /* as in leaf_data, for the tile's first leaf */
    int lines;
};

static void one_leaf(block_sums sum, const struct cpu_matmul_job *job, const struct tile *at,
                     int number) {
    const struct kern_weight *w = job->weight;
    const struct cpu_leaf leaf = cpu_leaf_of(w, number);
    const int64_t first = leaf.first / KERN_BLOCK, rows = at->piece.rows;
    const int64_t place =
        at->piece.row * cpu_x_places(w, job->wide) + cpu_x_place(first, number, job->wide) * rows;
    struct leaf_data in = {.x = job->codes + place * KERN_BLOCK * (job->wide ? 2 : 1),
                           .x_blocks = job->x_blocks + place,
                           .count = blocks_of(leaf.count),
                           .factor_bytes = cpu_block_factors(w),
                           .halves = w->halves,
                           .fetch = at->fetch + first * at->lines * 64,
                           .lines = at->lines};
    for (int p = 0; p < PANELS_MOST; p++) {
        const int64_t panel = at->panel + (p < at->panels ? p : 0);
        const char *data = w->data + (size_t)panel * w->panel_bytes;
        in.codes[p] = data + (size_t)first * cpu_block_codes(w);
        in.factors[p] =
            data + (size_t)w->blocks * cpu_block_codes(w) + (size_t)first * cpu_block_factors(w);
    }
    loops[rows - 1][job->wide][w->dtype - KERN_Q8](sum, &in);
}

static void put(const struct cpu_matmul_job *job, int64_t row, int64_t output, v16 sum) {
    int64_t left = job->weight->rows - output;
    int n = left < 16 ? (int)left : 16;
    float *y = job->y + row * job->weight->rows + output;
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
    for (int l = 0; l < job->weight->leaves; l++) {
        int top = cpu_leaf_level(l);
        one_leaf(level[top], job, at, l);
        for (int n = l; n & 1; n >>= 1, top--)
            for (int r = 0; r < at->piece.rows; r++)
                for (int p = 0; p < at->panels; p++)
                    level[top - 1][r][p] = v16_add(level[top - 1][r][p], level[top][r][p]);
    }
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
    const char *fetch = w->data + (size_t)(next < 0 ? panel : next) * w->panel_bytes;
    for (int i = 0; i < pieces; i++) {
        const int64_t start = i * w->blocks * each;
        struct tile at = {.piece = cpu_piece_of(job->rows, ROWS, i),
                          .panel = panel,
                          .panels = panels,
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

/* ---- Activations --------------------------------------------------------------------------------
 */

#define LEAST 0x1p-100f
#define HALF  (KERN_BLOCK / 2)

/* Rounds to nearest even: adding 1.5 * 2^23 leaves the integer in the low bits. */
static inline int32_t nearest(float x) {
    return (int32_t)(number_bits(x + 0x1.8p23f) - number_bits(0x1.8p23f));
}

/* `most`: the largest code. The codes of int16 lie in the order in which the weights are unpacked:
 * of four inputs the first, the third, the second, the fourth. */
static void round_block(const float *x, char *to, struct cpu_x_block *block, int offset,
                        const int most) {
    uint32_t largest = 0;
    int32_t code[KERN_BLOCK], sums[2] = {0, 0};
    for (int i = 0; i < KERN_BLOCK; i++) {
        uint32_t size = number_bits(x[i]) & 0x7fffffffu;
        largest = size > largest ? size : largest;
    }
    const float top = number_from_bits(largest), all = (float)most;
    const bool number = largest < 0x7f800000u, some = number && top >= LEAST;
    const float by = some ? all / top : 0;
    for (int i = 0; i < KERN_BLOCK; i++) code[i] = some ? nearest(x[i] * by) : 0;
    for (int i = 0; i < HALF; i++) sums[0] += code[i], sums[1] += code[HALF + i];
    for (int i = 0; i < KERN_BLOCK; i++) {
        const int from = i / 4 * 4 + i % 2 * 2 + i / 2 % 2;
        if (most == INT8_MAX)
            ((int8_t *)to)[i] = (int8_t)code[i];
        else
            ((int16_t *)(void *)to)[i] = (int16_t)code[from];
    }
    block->scale = some ? top / all : number ? 0 : NAN;
    block->sum = block->scale * (float)(sums[0] + sums[1]);
    block->start = -offset * (sums[0] + sums[1]);
    block->first = -offset * sums[0];
}

/* A row's inputs, and the places of its blocks. */
struct rounding {
    const float *x;
    char *to;
    struct cpu_x_block *blocks;
    int64_t cols, step; /* step: from place to place */
    int offset;
    bool wide;
};

/* Returns the numbers of a block: in place, or the last of a row with zeros behind, in `room`. */
static const float *numbers_of(const struct rounding *row, int64_t block, float *room) {
    const float *from = row->x + block * KERN_BLOCK;
    const int64_t left = row->cols - block * KERN_BLOCK;
    if (left >= KERN_BLOCK) return from;
    memset(room, 0, KERN_BLOCK * sizeof *room);
    return memcpy(room, from, (size_t)left * sizeof *room);
}

/* Rounds block `from` to a place; what it leaves, to another. */
static void round_at(const struct rounding *row, int64_t block, int64_t place) {
    float room[KERN_BLOCK];
    round_block(numbers_of(row, block, room),
                row->to + KERN_BLOCK * row->step * place * (row->wide ? 2 : 1),
                &row->blocks[place * row->step], row->offset, row->wide ? INT16_MAX : INT8_MAX);
}

static void round_rest(const struct rounding *row, int64_t block, int64_t from, int64_t place) {
    float room[KERN_BLOCK], rest[KERN_BLOCK];
    const float *x = numbers_of(row, block, room);
    const int8_t *code = (const int8_t *)row->to + KERN_BLOCK * row->step * from;
    const float scale = row->blocks[from * row->step].scale;
    for (int i = 0; i < KERN_BLOCK; i++) rest[i] = x[i] - scale * (float)code[i];
    round_block(rest, row->to + KERN_BLOCK * row->step * place, &row->blocks[place * row->step],
                row->offset, INT8_MAX);
}

/* Rounds `count` blocks from `block` on to int8, and behind them the rest of the coarsest. */
static void round_group(const struct rounding *row, int64_t block, int count, int64_t place) {
    int of = 0;
    for (int i = 0; i < count; i++) {
        round_at(row, block + i, place + i);
        if (row->blocks[(place + i) * row->step].scale >
            row->blocks[(place + of) * row->step].scale)
            of = i;
    }
    round_rest(row, block + of, place + of, place + count);
    row->blocks[(place + count) * row->step].of = of;
}

static void block_round_row(const struct kern_weight *w, const float *x, bool wide, char *to,
                            struct cpu_x_block *blocks, int64_t step) {
    const struct rounding row = {x, to, blocks, w->cols, step, cpu_block_offset(w->dtype), wide};
    for (int64_t b = 0; b < w->blocks && wide; b++) round_at(&row, b, b);
    for (int l = 0; l < w->leaves && !wide; l++) {
        const struct cpu_leaf leaf = cpu_leaf_of(w, l);
        const int64_t first = leaf.first / KERN_BLOCK, count = blocks_of(leaf.count);
        int64_t place = cpu_x_place(first, l, false);
        for (int64_t b = 0; b < count; b += CPU_REST_GROUP, place += CPU_REST_GROUP + 1)
            round_group(&row, first + b,
                        (int)(count - b < CPU_REST_GROUP ? count - b : CPU_REST_GROUP), place);
    }
}

const struct cpu_block_kernels VEC(block_kernels) = {
    .rows = ROWS, .round_row = block_round_row, .multiply = block_multiply};
