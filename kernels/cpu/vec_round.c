/* Rounds activations to int8 and int16 for products of weights in blocks; block.h says to what.
 * Every path finds the same numbers: a maximum is the same in any order, and a code concerns one
 * number alone. */
#include "kernels/cpu/block.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/vec.h"

#define LEAST  0x1p-80f
#define HALF   (KERN_BLOCK / 2)
#define MAGIC  0x1.8p23f
#define SHIFTS 30 /* the largest k */
#define FINE   7  /* bits of codes of 15 bits that are not in the rest */

/* A row's inputs, and the places of its blocks. */
struct rounding {
    const struct kern_weight *weight;
    const float *x;
    char *to;
    struct cpu_x_block *blocks;
    int64_t cols, step; /* step: from place to place */
    int offset;
    bool wide, split; /* split: halves of blocks have scales of their own */
};

/* Returns the numbers of a block: in place, or the last of a row with zeros behind, in `room`. */
static const float *numbers_of(const struct rounding *row, int64_t block, float *room) {
    const float *from = row->x + block * KERN_BLOCK;
    const int64_t left = row->cols - block * KERN_BLOCK;
    if (left >= KERN_BLOCK) return from;
    memset(room, 0, KERN_BLOCK * sizeof *room);
    return memcpy(room, from, (size_t)left * sizeof *room);
}

/* Returns whether the bits are those of a number that is finite. */
static inline bool is_finite(uint32_t bits) {
    return bits < 0x7f800000u;
}

/* Rounds to nearest even: adding 1.5 * 2^23 leaves the integer in the low bits. */
static inline int32_t nearest(float x) {
    return (int32_t)(number_bits(x + MAGIC) - number_bits(MAGIC));
}

/* Returns the bits of the largest magnitude; those of NaN are the largest of all. */
static inline uint32_t largest_of(const float *x, int count) {
    uint32_t largest = 0;
    for (int i = 0; i < count; i++) {
        uint32_t size = number_bits(x[i]) & 0x7fffffffu;
        largest = size > largest ? size : largest;
    }
    return largest;
}

/* ---- int16 --------------------------------------------------------------------------------------
 */

/* The codes lie in the order in which the weights are unpacked: of four inputs the first, the
 * third, the second, the fourth. */
static void round_wide(const struct rounding *row, int64_t at) {
    float room[KERN_BLOCK];
    int32_t code[KERN_BLOCK], sums[2] = {0, 0};
    const float *x = numbers_of(row, at, room), most = INT16_MAX;
    int16_t *to = (int16_t *)(void *)(row->to + (int64_t)2 * KERN_BLOCK * row->step * at);
    struct cpu_x_block *block = &row->blocks[at * row->step];
    const uint32_t largest = largest_of(x, KERN_BLOCK);
    const float top = number_from_bits(largest);
    const bool number = is_finite(largest), some = number && top >= LEAST;
    const float by = some ? most / top : 0;
    for (int i = 0; i < KERN_BLOCK; i++) code[i] = some ? nearest(x[i] * by) : 0;
    for (int i = 0; i < HALF; i++) sums[0] += code[i], sums[1] += code[HALF + i];
    for (int i = 0; i < KERN_BLOCK; i++) to[i] = (int16_t)code[i / 4 * 4 + i % 2 * 2 + i / 2 % 2];
    block->scale = some ? top / most : number ? 0 : NAN;
    block->sum = block->scale * (float)(sums[0] + sums[1]);
    if (!row->split) sums[0] += sums[1];
    for (int half = 0; half < 2; half++) block->start[half] = -row->offset * sums[half];
}

/* ---- int8 ---------------------------------------------------------------------------------------
 * A leaf is examined first, then written, group by group. */

#define GROUP CPU_REST_GROUP

/* A group: its first block and place, and the number of its blocks. */
struct group {
    int64_t block, place;
    int count;
};

/* The blocks of a group: sums of their codes and, with halves, of the second ones. */
struct group_codes {
    int32_t sums[GROUP], second[GROUP];
    uint32_t need[GROUP];
    int32_t shift[GROUP];
    float by[GROUP]; /* makes codes of numbers */
};

/* The unit of a leaf, the inverse, and the bits of the leaf's need. */
struct unit {
    float unit, by;
    uint32_t need;
};

static struct cpu_x_block *place_of(const struct rounding *row, int64_t place) {
    return &row->blocks[place * row->step];
}

static int8_t *codes_at(const struct rounding *row, int64_t place) {
    return (int8_t *)row->to + KERN_BLOCK * row->step * place;
}

/* Returns whether the group has GROUP blocks, all whole. */
static bool is_whole(const struct rounding *row, const struct group *g) {
    return g->count == GROUP && (g->block + GROUP) * KERN_BLOCK <= row->cols;
}

#if defined(__AVX512F__)

_Static_assert(GROUP == 4, "a vector of four blocks");

static inline __m512i magnitudes(const float *x) {
    return _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi32(0x7fffffff));
}

/* Combines the sixteen elements of each of four vectors, halving them in each step, and puts the
 * four results in order. */
#define COMBINE(op, v, to)                                                                         \
    do {                                                                                           \
        __m512i a_ = op(_mm512_shuffle_i32x4((v)[0], (v)[1], 0x44),                                \
                        _mm512_shuffle_i32x4((v)[0], (v)[1], 0xee));                               \
        __m512i b_ = op(_mm512_shuffle_i32x4((v)[2], (v)[3], 0x44),                                \
                        _mm512_shuffle_i32x4((v)[2], (v)[3], 0xee));                               \
        a_ = op(_mm512_shuffle_i32x4(a_, b_, 0x88), _mm512_shuffle_i32x4(a_, b_, 0xdd));           \
        a_ = op(a_, _mm512_shuffle_epi32(a_, _MM_PERM_BADC));                                      \
        a_ = op(a_, _mm512_shuffle_epi32(a_, _MM_PERM_CDAB));                                      \
        a_ = _mm512_maskz_compress_epi32(0x1111, a_);                                              \
        _mm_storeu_si128((__m128i *)(to), _mm512_castsi512_si128(a_));                             \
    } while (0)

/* The bits of the largest magnitude of each of GROUP whole blocks. */
static void largest_of_blocks(const float *x, uint32_t *to) {
    __m512i most[GROUP];
    for (int i = 0; i < GROUP; i++, x += (ptrdiff_t)KERN_BLOCK)
        most[i] = _mm512_max_epu32(magnitudes(x), magnitudes(x + HALF));
    COMBINE(_mm512_max_epu32, most, to);
}

/* Writes the codes of GROUP whole blocks, `next` bytes from block to block, and their sums. */
static void codes_of_blocks(const float *x, int8_t *to, int64_t next, bool split,
                            struct group_codes *codes) {
    __m512i low[GROUP], high[GROUP];
    for (int i = 0; i < GROUP; i++, x += (ptrdiff_t)KERN_BLOCK, to += next) {
        const __m512 by = _mm512_set1_ps(codes->by[i]);
        low[i] = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), by));
        high[i] = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + HALF), by));
        _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(low[i]));
        _mm_storeu_si128((__m128i *)(to + HALF), _mm512_cvtepi32_epi8(high[i]));
        if (!split) low[i] = _mm512_add_epi32(low[i], high[i]);
    }
    COMBINE(_mm512_add_epi32, low, codes->sums);
    if (split) COMBINE(_mm512_add_epi32, high, codes->second);
}

/* Returns the first quad of a block that has its largest magnitude, whose bits are `all`; `next`:
 * those of the other quads' largest. */
static int coarsest_quad(const float *x, uint32_t all, uint32_t *next) {
    const __m512i low = magnitudes(x), high = magnitudes(x + HALF);
    const __m512i most = _mm512_set1_epi32((int32_t)all);
    const uint32_t at =
        _mm512_cmpeq_epu32_mask(low, most) | (uint32_t)_mm512_cmpeq_epu32_mask(high, most) << HALF;
    const int quad = __builtin_ctz(at) / 4;
    const uint32_t others = ~(15u << 4 * quad);
    *next = _mm512_reduce_max_epu32(
        _mm512_max_epu32(_mm512_maskz_mov_epi32((__mmask16)others, low),
                         _mm512_maskz_mov_epi32((__mmask16)(others >> HALF), high)));
    return quad;
}

#else

static void largest_of_blocks(const float *x, uint32_t *to) {
    for (int i = 0; i < GROUP; i++) to[i] = largest_of(x + (ptrdiff_t)KERN_BLOCK * i, KERN_BLOCK);
}

static int coarsest_quad(const float *x, uint32_t all, uint32_t *next) {
    int quad = 0;
    *next = 0;
    while (largest_of(x + (ptrdiff_t)4 * quad, 4) != all) quad++;
    for (int i = 0; i < CPU_QUADS; i++) {
        const uint32_t largest = i == quad ? 0 : largest_of(x + (ptrdiff_t)4 * i, 4);
        *next = largest > *next ? largest : *next;
    }
    return quad;
}

#endif

/* Writes the codes of block i, and their sums, which wrap around if a number is not finite. */
static void codes_of_block(const float *x, int8_t *to, bool split, struct group_codes *codes,
                           int i) {
    int32_t code[KERN_BLOCK];
    uint32_t sums[2] = {0, 0};
    for (int k = 0; k < KERN_BLOCK; k++) code[k] = nearest(x[k] * codes->by[i]);
    for (int k = 0; k < KERN_BLOCK; k++) to[k] = (int8_t)code[k];
    for (int k = 0; k < HALF; k++)
        sums[0] += (uint32_t)code[k], sums[1] += (uint32_t)code[HALF + k];
    codes->sums[i] = (int32_t)(split ? sums[0] : sums[0] + sums[1]);
    codes->second[i] = (int32_t)sums[1];
}

#if !defined(__AVX512F__)

static void codes_of_blocks(const float *x, int8_t *to, int64_t next, bool split,
                            struct group_codes *codes) {
    for (int i = 0; i < GROUP; i++, x += (ptrdiff_t)KERN_BLOCK, to += next)
        codes_of_block(x, to, split, codes, i);
}

#endif

/* Finds the needs of a group's blocks, which lie in `back` until the group is written, and the quad
 * of its rest, counted from the first of the group. Returns the largest need. */
static uint32_t examine(const struct rounding *row, const struct group *g, int32_t *rest) {
    float room[KERN_BLOCK];
    uint32_t need[GROUP] = {0}, next, most = 0;
    int of = 0;
    if (is_whole(row, g))
        largest_of_blocks(row->x + g->block * KERN_BLOCK, need);
    else
        for (int i = 0; i < g->count; i++)
            need[i] = largest_of(numbers_of(row, g->block + i, room), KERN_BLOCK);
    for (int i = 1; i < g->count; i++) of = need[i] > need[of] ? i : of;
    const int quad = coarsest_quad(numbers_of(row, g->block + of, room), need[of], &next);
    *rest = of * CPU_QUADS + quad;
    if (is_finite(need[of])) { /* otherwise it gives NaN, with any codes */
        const float coarse = number_from_bits(need[of]) / (1 << FINE);
        need[of] = number_bits(coarse) > next ? number_bits(coarse) : next;
    }
    for (int i = 0; i < g->count; i++) {
        place_of(row, g->place + i)->back = number_from_bits(need[i]);
        most = is_finite(need[i]) && need[i] > most ? need[i] : most;
    }
    return most;
}

static inline float power_of_two(int exponent) {
    return number_from_bits((uint32_t)(127 + exponent) << 23);
}

/* Describes a block of codes or a rest; `sum` and `second`: of its codes, with halves of each
 * half's. */
static void describe(const struct rounding *row, struct cpu_x_block *block, float unit, int shift,
                     int32_t sum, int32_t second) {
    const float power = power_of_two(-shift), back = MAGIC * power;
    block->scale = unit;
    block->back = back;
    block->sum = power * (float)(row->split ? sum + second : sum);
    block->start[0] = (int32_t)number_bits(back) - row->offset * sum;
    block->start[1] = (int32_t)number_bits(back) - row->offset * second;
}

/* Divides the codes of the group's quad between its block and the rest. */
static void write_rest(const struct rounding *row, const struct group *g, const struct unit *leaf,
                       struct group_codes *codes) {
    const struct kern_weight *w = row->weight;
    struct cpu_x_block *rest = place_of(row, g->place + g->count);
    const int quads = CPU_QUADS * cpu_block_bits(w->dtype) / 8;
    const int i = rest->start[0] / CPU_QUADS, quad = rest->start[0] % CPU_QUADS;
    int8_t *low = codes_at(row, g->place + i) + (ptrdiff_t)4 * quad;
    int8_t *high = codes_at(row, g->place + g->count);
    const bool second = row->split && quad >= CPU_QUADS / 2;
    int32_t *sum = second ? &codes->second[i] : &codes->sums[i], parts = 0;
    float room[KERN_BLOCK];
    const float *x = numbers_of(row, g->block + i, room) + (ptrdiff_t)4 * quad;
    for (int k = 0; k < 4; k++) {
        const int32_t code = is_finite(codes->need[i]) ? nearest(x[k] * codes->by[i]) : 0;
        const int32_t part = (code + (1 << (FINE - 1))) >> FINE;
        low[k] = (int8_t)(code - part * (1 << FINE));
        high[k] = (int8_t)part;
        parts += part;
    }
    *sum -= parts * (1 << FINE);
    describe(row, rest, leaf->unit, codes->shift[i] - FINE, parts, 0);
    const size_t vector = (size_t)PANEL * (w->halves ? 2 : 4),
                 factors = (size_t)i * cpu_block_factors(w);
    rest->codes = (uint32_t)((size_t)i * cpu_block_codes(w)) +
                  (uint32_t)(64 * (quad % quads) + 4 * (quad / quads));
    rest->factors = (uint32_t)(factors + (second ? vector : 0));
    rest->least = (uint32_t)(factors + vector * (row->split ? 2 : 1));
}

static void write_group(const struct rounding *row, const struct group *g,
                        const struct unit *leaf) {
    struct group_codes codes = {0};
    float room[KERN_BLOCK];
    for (int i = 0; i < g->count; i++) {
        codes.need[i] = number_bits(place_of(row, g->place + i)->back);
        const int apart = (int32_t)(leaf->need - codes.need[i]) >> 23;
        codes.shift[i] = !is_finite(codes.need[i]) ? 0 : apart > SHIFTS ? SHIFTS : apart;
        codes.by[i] = leaf->by * power_of_two(codes.shift[i]);
    }
    if (is_whole(row, g))
        codes_of_blocks(row->x + g->block * KERN_BLOCK, codes_at(row, g->place),
                        KERN_BLOCK * row->step, row->split, &codes);
    else
        for (int i = 0; i < g->count; i++)
            codes_of_block(numbers_of(row, g->block + i, room), codes_at(row, g->place + i),
                           row->split, &codes, i);
    for (int i = 0; i < g->count; i++) /* codes of such a block are of no number */
        if (!is_finite(codes.need[i])) codes.sums[i] = codes.second[i] = 0;
    write_rest(row, g, leaf, &codes);
    for (int i = 0; i < g->count; i++) {
        struct cpu_x_block *block = place_of(row, g->place + i);
        describe(row, block, leaf->unit, codes.shift[i], codes.sums[i], codes.second[i]);
        if (!is_finite(codes.need[i])) block->back = block->sum = NAN;
    }
}

static void round_leaf(const struct rounding *row, int64_t first, int64_t count, int64_t place) {
    const int64_t groups = (count + GROUP - 1) / GROUP;
    struct unit leaf = {0};
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t i = 0; i < groups; i++) {
            const int64_t left = count - i * GROUP;
            const struct group g = {first + i * GROUP, place + i * (GROUP + 1),
                                    (int)(left < GROUP ? left : GROUP)};
            const uint32_t need =
                pass ? (write_group(row, &g, &leaf), 0)
                     : examine(row, &g, &place_of(row, g.place + g.count)->start[0]);
            if (need > leaf.need) leaf.need = need;
        }
        const float top = number_from_bits(leaf.need);
        if (top >= LEAST) leaf.unit = top / INT8_MAX, leaf.by = INT8_MAX / top;
    }
}

void VEC(round_row)(const struct kern_weight *w, const float *x, bool wide, char *to,
                    struct cpu_x_block *blocks, int64_t step) {
    const struct rounding row = {w,
                                 x,
                                 to,
                                 blocks,
                                 w->cols,
                                 step,
                                 cpu_block_offset(w->dtype),
                                 wide,
                                 block_is_split(w->dtype)};
    for (int64_t b = 0; b < w->blocks && wide; b++) round_wide(&row, b);
    for (int l = 0; l < w->leaves && !wide; l++) {
        const struct cpu_leaf leaf = cpu_leaf_of(w, l);
        const int64_t first = leaf.first / KERN_BLOCK;
        round_leaf(&row, first, blocks_of(leaf.count), cpu_x_place(first, l, false));
    }
}
