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
#define FINE   7  /* bits of a rest's codes below those of int8 */

/* A row's inputs, and the places of its blocks. */
struct rounding {
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
static inline bool finite_bits(uint32_t bits) {
    return bits < 0x7f800000u;
}

/* ---- Thirty-two numbers -------------------------------------------------------------------------
 */

#if defined(__AVX512F__)

/* Returns the bits of the largest magnitude; those of NaN are the largest of all. */
static inline uint32_t largest_of(const float *x) {
    const __m512i mask = _mm512_set1_epi32(0x7fffffff);
    __m512i a = _mm512_and_si512(_mm512_loadu_si512(x), mask);
    __m512i b = _mm512_and_si512(_mm512_loadu_si512(x + HALF), mask);
    return _mm512_reduce_max_epu32(_mm512_max_epu32(a, b));
}

/* Writes codes x * by, to nearest even; returns the sums of each half. */
static inline void codes_of(const float *x, float by, int8_t *to, int32_t *sums) {
    for (int half = 0; half < 2; half++) {
        __m512i code = _mm512_cvtps_epi32(
            _mm512_mul_ps(_mm512_loadu_ps(x + (ptrdiff_t)HALF * half), _mm512_set1_ps(by)));
        _mm_storeu_si128((__m128i *)(to + (ptrdiff_t)HALF * half), _mm512_cvtepi32_epi8(code));
        sums[half] = _mm512_reduce_add_epi32(code);
    }
}

#else

static inline uint32_t largest_of(const float *x) {
    uint32_t largest = 0;
    for (int i = 0; i < KERN_BLOCK; i++) {
        uint32_t size = number_bits(x[i]) & 0x7fffffffu;
        largest = size > largest ? size : largest;
    }
    return largest;
}

#endif

/* Rounds to nearest even: adding 1.5 * 2^23 leaves the integer in the low bits. */
static inline int32_t nearest(float x) {
    return (int32_t)(number_bits(x + MAGIC) - number_bits(MAGIC));
}

#if !defined(__AVX512F__)

static inline void codes_of(const float *x, float by, int8_t *to, int32_t *sums) {
    int32_t code[KERN_BLOCK];
    sums[0] = sums[1] = 0;
    for (int i = 0; i < KERN_BLOCK; i++) code[i] = nearest(x[i] * by);
    for (int i = 0; i < KERN_BLOCK; i++) to[i] = (int8_t)code[i];
    for (int i = 0; i < HALF; i++) sums[0] += code[i], sums[1] += code[HALF + i];
}

#endif

/* ---- int16 --------------------------------------------------------------------------------------
 */

/* The codes lie in the order in which the weights are unpacked: of four inputs the first, the
 * third, the second, the fourth. */
static void round_wide(const struct rounding *row, int64_t at) {
    float room[KERN_BLOCK];
    int32_t code[KERN_BLOCK], sums[2] = {0, 0};
    const float *x = numbers_of(row, at, room), most = INT16_MAX;
    int16_t *to = (int16_t *)(void *)(row->to + 2 * KERN_BLOCK * row->step * at);
    struct cpu_x_block *block = &row->blocks[at * row->step];
    const uint32_t largest = largest_of(x);
    const float top = number_from_bits(largest);
    const bool number = finite_bits(largest), some = number && top >= LEAST;
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
 */

/* A group, its first place, and the number of its blocks. */
struct group {
    int64_t block, place;
    int count;
};

static struct cpu_x_block *place_of(const struct rounding *row, int64_t place) {
    return &row->blocks[place * row->step];
}

/* A block's need lies in `back` until its codes are written. */
static uint32_t need_of(const struct cpu_x_block *block) {
    return number_bits(block->back);
}

/* Returns the largest magnitude of a quad. */
static uint32_t largest_of_quad(const float *x) {
    uint32_t largest = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t size = number_bits(x[i]) & 0x7fffffffu;
        largest = size > largest ? size : largest;
    }
    return largest;
}

/* Is the quad one of the group's first `rests`? */
static bool is_taken(const struct rounding *row, const struct group *g, int rests, int quad) {
    bool found = false;
    for (int i = 0; i < rests; i++)
        found = found || place_of(row, g->place + g->count + i)->of == quad;
    return found;
}

/* Gives 15 bits to the largest quad of 8 bits in block `of` of the group, which has the largest
 * number, and finds the block's need without it. */
static void take_quad(const struct rounding *row, const struct group *g, int of, int rest) {
    float room[KERN_BLOCK];
    const float *x = numbers_of(row, g->block + of, room);
    uint32_t all = 0, most = 0, next = 0;
    int best = of * CPU_QUADS;
    for (int quad = 0; quad < CPU_QUADS; quad++) {
        const uint32_t largest = largest_of_quad(x + (ptrdiff_t)4 * quad);
        all = largest > all ? largest : all;
        if (is_taken(row, g, rest, of * CPU_QUADS + quad)) continue;
        next = largest > most ? most : largest > next ? largest : next;
        if (largest > most) best = of * CPU_QUADS + quad, most = largest;
    }
    place_of(row, g->place + g->count + rest)->of = best;
    if (!finite_bits(all)) return; /* it is NaN with any codes */
    const float coarse = number_from_bits(all) / (1 << FINE), fine = number_from_bits(next);
    place_of(row, g->place + of)->back = coarse > fine ? coarse : fine;
}

/* Finds the needs of a group's blocks and its quads of 15 bits; returns the largest need. */
static uint32_t examine(const struct rounding *row, const struct group *g) {
    uint32_t need = 0;
    for (int i = 0; i < g->count; i++) {
        float room[KERN_BLOCK];
        const uint32_t largest = largest_of(numbers_of(row, g->block + i, room));
        place_of(row, g->place + i)->back = number_from_bits(largest);
    }
    for (int rest = 0; rest < CPU_RESTS; rest++) {
        int of = 0;
        for (int i = 1; i < g->count; i++)
            if (need_of(place_of(row, g->place + i)) > need_of(place_of(row, g->place + of)))
                of = i;
        take_quad(row, g, of, rest);
    }
    for (int i = 0; i < g->count; i++) {
        const uint32_t bits = need_of(place_of(row, g->place + i));
        if (finite_bits(bits) && bits > need) need = bits;
    }
    return need;
}

/* Describes a block of codes with sums of each half; `shift`: its k. */
static void describe(const struct rounding *row, struct cpu_x_block *block, float unit, int shift,
                     const int32_t *sums) {
    const float power = number_from_bits((uint32_t)(127 - shift) << 23);
    const int32_t both = sums[0] + sums[1];
    block->scale = unit;
    block->back = MAGIC * power;
    block->sum = power * (float)both;
    block->start[0] =
        (int32_t)number_bits(block->back) - row->offset * (row->split ? sums[0] : both);
    block->start[1] = (int32_t)number_bits(block->back) - row->offset * sums[1];
}

/* Divides the codes of a quad between its block and its rest; `by` makes them of its numbers.
 * `sums`: of the block's codes, which included the whole ones. */
static void divide_quad(const float *x, float by, int8_t *low, int8_t *high, int32_t *sums,
                        int32_t *rest_sum) {
    for (int i = 0; i < 4; i++) {
        const int32_t code = nearest(x[i] * by), part = (code + (1 << (FINE - 1))) >> FINE;
        low[i] = (int8_t)(code - part * (1 << FINE));
        high[i] = (int8_t)part;
        *sums -= part * (1 << FINE);
        *rest_sum += part;
    }
}

/* The unit of a leaf, and the bits of its need. */
struct unit {
    float unit, by;
    uint32_t need;
};

/* Writes block i of a group and the rests of its quads. */
static void write_block(const struct rounding *row, const struct group *g, int i,
                        const struct unit *leaf) {
    struct cpu_x_block *block = place_of(row, g->place + i);
    const uint32_t need = need_of(block);
    const bool number = finite_bits(need);
    const int32_t apart = number ? (int32_t)(leaf->need - need) >> 23 : 0;
    const int shift = apart > SHIFTS ? SHIFTS : apart;
    const float by = leaf->by * number_from_bits((uint32_t)(127 + shift) << 23);
    float room[KERN_BLOCK];
    const float *x = numbers_of(row, g->block + i, room);
    int8_t *to = (int8_t *)row->to + KERN_BLOCK * row->step * (g->place + i);
    int32_t sums[2] = {0, 0};
    if (number)
        codes_of(x, by, to, sums);
    else
        memset(to, 0, KERN_BLOCK);
    for (int r = 0; r < CPU_RESTS; r++) {
        struct cpu_x_block *rest = place_of(row, g->place + g->count + r);
        int8_t *high = (int8_t *)row->to + KERN_BLOCK * row->step * (g->place + g->count + r);
        const int quad = rest->of % CPU_QUADS;
        int32_t rest_sums[2] = {0, 0};
        if (rest->of / CPU_QUADS != i) continue;
        memset(high, 0, 4);
        if (number)
            divide_quad(x + (ptrdiff_t)4 * quad, by, to + (ptrdiff_t)4 * quad, high,
                        &sums[quad / (CPU_QUADS / 2)], rest_sums);
        describe(row, rest, leaf->unit, shift - FINE, rest_sums);
    }
    describe(row, block, leaf->unit, shift, sums);
    if (!number) block->back = block->sum = NAN;
}

static void round_leaf(const struct rounding *row, int64_t first, int64_t count, int64_t place) {
    const int64_t groups = (count + CPU_REST_GROUP - 1) / CPU_REST_GROUP;
    struct unit leaf = {0};
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t i = 0; i < groups; i++) {
            const int64_t left = count - i * CPU_REST_GROUP;
            const struct group g = {first + i * CPU_REST_GROUP,
                                    place + i * (CPU_REST_GROUP + CPU_RESTS),
                                    (int)(left < CPU_REST_GROUP ? left : CPU_REST_GROUP)};
            const uint32_t need = pass ? 0 : examine(row, &g);
            if (need > leaf.need) leaf.need = need;
            for (int b = 0; b < g.count && pass; b++) write_block(row, &g, b, &leaf);
        }
        const float top = number_from_bits(leaf.need);
        if (top >= LEAST) leaf.unit = top / INT8_MAX, leaf.by = INT8_MAX / top;
    }
}

void VEC(round_row)(const struct kern_weight *w, const float *x, bool wide, char *to,
                    struct cpu_x_block *blocks, int64_t step) {
    const struct rounding row = {
        x, to, blocks, w->cols, step, cpu_block_offset(w->dtype), wide, block_is_split(w->dtype)};
    for (int64_t b = 0; b < w->blocks && wide; b++) round_wide(&row, b);
    for (int l = 0; l < w->leaves && !wide; l++) {
        const struct cpu_leaf leaf = cpu_leaf_of(w, l);
        const int64_t first = leaf.first / KERN_BLOCK;
        round_leaf(&row, first, blocks_of(leaf.count), cpu_x_place(first, l, false));
    }
}
