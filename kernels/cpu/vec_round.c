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
#define FINE   7  /* bits of a code of 15 bits that the block keeps; the others are the rest's */

/* A row's inputs, and the places of its blocks. */
struct rounding {
    const struct kern_weight *weight;
    const float *x;
    char *to;
    struct cpu_x_block *blocks;
    int64_t cols, step; /* step: blocks from one place to the next */
    int offset;
    bool split;             /* halves of blocks have scales of their own */
    float last[KERN_BLOCK]; /* the last block with zeros behind, if it is not whole */
};

/* Returns the numbers of a block; those of a last one that is not whole have been copied. */
static inline const float *numbers_of(const struct rounding *row, int64_t block) {
    return (block + 1) * KERN_BLOCK <= row->cols ? row->x + block * KERN_BLOCK : row->last;
}

/* Returns whether the bits are those of a number that is finite. */
static inline bool is_finite(uint32_t bits) {
    return bits < 0x7f800000u;
}

/* Rounds to nearest even: adding 1.5 * 2^23 leaves the integer in the low bits. */
static inline int32_t vec_round_nearest(float x) {
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

/* ---- int16 ---- */

/* The codes lie in the order in which the weights are unpacked: of four inputs the first, the
 * third, the second, the fourth. */
static void round_wide(const struct rounding *row, int64_t at) {
    int32_t code[KERN_BLOCK], sums[2] = {0, 0};
    const float *x = numbers_of(row, at), most = INT16_MAX;
    int16_t *to = (int16_t *)(void *)(row->to + (int64_t)2 * KERN_BLOCK * row->step * at);
    struct cpu_x_block *block = &row->blocks[at * row->step];
    const uint32_t largest = largest_of(x, KERN_BLOCK);
    const float top = number_from_bits(largest);
    const bool number = is_finite(largest), some = number && top >= LEAST;
    const float by = some ? most / top : 0;
    for (int i = 0; i < KERN_BLOCK; i++) code[i] = some ? vec_round_nearest(x[i] * by) : 0;
    for (int i = 0; i < HALF; i++) sums[0] += code[i], sums[1] += code[HALF + i];
    for (int i = 0; i < KERN_BLOCK; i++) to[i] = (int16_t)code[i / 4 * 4 + i % 2 * 2 + i / 2 % 2];
    block->scale = some ? top / most : number ? 0 : NAN;
    if (!row->split) sums[0] += sums[1];
    for (int half = 0; half < 2; half++) {
        block->part[half].sum = block->scale * (float)sums[half];
        block->part[half].start = -row->offset * sums[half];
    }
}

/* ---- int8 ---- */
/* Every leaf is first examined and then written, both one group after the other. */

#define GROUP CPU_REST_GROUP

/* A group: its first block and place, and the number of its blocks. */
struct group {
    int64_t block, place;
    int count;
};

/* The results of examining a group: the needs of its blocks, and which quad the rest belongs to, as
 * GROUP times the quad's number in its block plus the block's number. Until the group is written,
 * this lies in the memory of the rest's description. */
struct needs {
    uint32_t need[GROUP];
    uint32_t quad;
};

_Static_assert(sizeof(struct needs) <= sizeof(struct cpu_x_block), "lies in a block's memory");

/* The unit of a leaf, its inverse, and the bits of the leaf's need. */
struct unit {
    float unit, by;
    uint32_t need;
};

static struct cpu_x_block *vec_round_place_of(const struct rounding *row, int64_t place) {
    return &row->blocks[place * row->step];
}

static struct cpu_x_block *vec_round_rest_of(const struct rounding *row, const struct group *g) {
    return vec_round_place_of(row, g->place + g->count);
}

static int8_t *codes_at(const struct rounding *row, int64_t place) {
    return (int8_t *)row->to + KERN_BLOCK * row->step * place;
}

/* Writes in a rest which quad of its group it belongs to (struct needs). */
SIMD void locate_rest(struct cpu_x_block *rest, uint32_t at) {
    rest->block = (int32_t)(at % GROUP);
    rest->quad = (int32_t)(at / GROUP);
}

#if defined(__AVX512VNNI__)

_Static_assert(GROUP == 4 && CPU_QUADS == 8, "vectors of four blocks and of four quads of each");

/* Numbers of a group's quads lie in two vectors, one for the first halves of the blocks and one for
 * the second: element GROUP q + i belongs to quad q of that half of block i. Missing blocks of a
 * group are zeros. `whole` is the result of is_whole for the group, and a constant in each of the
 * two versions that the compiler makes of these functions. */

/* Loads the halves of a group's blocks. */
SIMD void load_group(const struct rounding *row, const struct group *g, __m512 *low, __m512 *high,
                     const bool whole) {
    UNROLL for (int i = 0; i < GROUP; i++) {
        low[i] = high[i] = _mm512_setzero_ps();
        if (!whole && i >= g->count) continue;
        const float *x =
            whole ? row->x + (g->block + i) * KERN_BLOCK : numbers_of(row, g->block + i);
        low[i] = _mm512_loadu_ps(x);
        high[i] = _mm512_loadu_ps(x + HALF);
    }
}

/* Returns the largest magnitude in each quad. */
SIMD __m512i largest_of_quads(const __m512 *half) {
    __m512i a[GROUP];
    UNROLL for (int i = 0; i < GROUP; i++) a[i] =
        _mm512_and_si512(_mm512_castps_si512(half[i]), _mm512_set1_epi32(0x7fffffff));
    const __m512i b = _mm512_max_epu32(_mm512_unpacklo_epi32(a[0], a[1]),
                                       _mm512_unpackhi_epi32(a[0], a[1])),
                  c = _mm512_max_epu32(_mm512_unpacklo_epi32(a[2], a[3]),
                                       _mm512_unpackhi_epi32(a[2], a[3]));
    return _mm512_max_epu32(_mm512_unpacklo_epi64(b, c), _mm512_unpackhi_epi64(b, c));
}

/* Returns the largest of the quads of each block. */
SIMD __m128i largest_of_blocks(__m512i a) {
    const __m256i b = _mm256_max_epu32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
    return _mm_max_epu32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
}

/* Returns the sum of the codes of each block's half. */
SIMD __m128i sums_of_blocks(__m512i codes) {
    const __m512i a = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), codes);
    const __m256i b = _mm256_add_epi32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
}

/* Returns the largest element, in all four. */
SIMD __m128i largest_of_four(__m128i a) {
    a = _mm_max_epu32(a, _mm_shuffle_epi32(a, 0x4e));
    return _mm_max_epu32(a, _mm_shuffle_epi32(a, 0xb1));
}

SIMD __mmask8 are_finite(__m128i bits) {
    return _mm_cmplt_epu32_mask(bits, _mm_set1_epi32(0x7f800000));
}

/* Finds a group's needs. Returns the largest that is finite. */
SIMD uint32_t examine_group(const struct rounding *row, const struct group *g, struct needs *to,
                            const bool whole) {
    __m512 low[GROUP], high[GROUP];
    load_group(row, g, low, high, whole);
    const __m512i a = largest_of_quads(low), b = largest_of_quads(high);
    const __m128i of_blocks = largest_of_blocks(_mm512_max_epu32(a, b));
    const __m128i top = largest_of_four(of_blocks);
    const __m512i tops = _mm512_broadcastd_epi32(top);
    const uint32_t tops_at =
        _mm512_cmpeq_epi32_mask(a, tops) | (uint32_t)_mm512_cmpeq_epi32_mask(b, tops) << 16;
    /* the first block that has the largest, and its first quad that has it */
    const int block = __builtin_ctz(_mm_cmpeq_epi32_mask(of_blocks, top));
    const int quad = __builtin_ctz(tops_at & 0x11111111u << block);
    /* The quad of the rest has more bits, so it adds less to its block's need. */
    const uint32_t others = ~(1u << quad);
    __m128i need =
        largest_of_blocks(_mm512_max_epu32(_mm512_maskz_mov_epi32((__mmask16)others, a),
                                           _mm512_maskz_mov_epi32((__mmask16)(others >> 16), b)));
    /* a block with a number that is not finite gives NaN, whatever its codes */
    const __m128 size = _mm_castsi128_ps(top),
                 coarse =
                     _mm_mask_mul_ps(size, are_finite(top), size, _mm_set1_ps(1.0f / (1 << FINE)));
    need = _mm_mask_max_epu32(need, (__mmask8)(1u << block), need, _mm_castps_si128(coarse));
    _mm_storeu_si128((__m128i *)to->need, need);
    to->quad = (uint32_t)quad;
    need = _mm_maskz_mov_epi32(are_finite(need), need);
    return (uint32_t)_mm_cvtsi128_si32(largest_of_four(need));
}

/* Divides the codes of the group's quad, x times `by`, between its block and the rest; `finite`:
 * the block is. Returns the block's as element 0 and the rest's as element 1, four each. */
SIMD __m128i divide_quad(const struct rounding *row, const struct group *g, uint32_t quad,
                         __m128 by, __mmask8 finite) {
    const float *x = numbers_of(row, g->block + quad % GROUP) + (ptrdiff_t)4 * (quad / GROUP);
    const __m128i code = _mm_maskz_cvtps_epi32(finite, _mm_mul_ps(_mm_loadu_ps(x), by));
    const __m128i part = _mm_srai_epi32(_mm_add_epi32(code, _mm_set1_epi32(1 << (FINE - 1))), FINE);
    const __m128i low = _mm_sub_epi32(code, _mm_slli_epi32(part, FINE));
    const __m128i words = _mm_packs_epi32(low, part);
    return _mm_packs_epi16(words, words);
}

/* Returns the codes of halves, four of a quad in each element; `mask`: the quad that has the codes
 * `other` instead, as its own have 15 bits. */
SIMD __m512i vec_round_codes_of(const __m512 *half, const __m512 *by, __mmask16 mask,
                                __m128i other) {
    __m512i a[GROUP];
    UNROLL for (int i = 0; i < GROUP; i++) a[i] = _mm512_cvtps_epi32(_mm512_mul_ps(half[i], by[i]));
    const __m512i bytes =
        _mm512_packs_epi16(_mm512_packs_epi32(a[0], a[1]), _mm512_packs_epi32(a[2], a[3]));
    return _mm512_mask_broadcastd_epi32(bytes, mask, other);
}

/* Writes the codes of a group's blocks and its rest. */
SIMD void vec_round_write_codes(const struct rounding *row, const struct group *g, __m512i low,
                                __m512i high, int32_t rest, const bool whole) {
    const __m512i order =
        _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    const __m512i a = _mm512_permutex2var_epi32(low, order, high);
    const __m512i b =
        _mm512_permutex2var_epi32(low, _mm512_add_epi32(order, _mm512_set1_epi32(2)), high);
    const __m256i codes[GROUP] = {_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1),
                                  _mm512_castsi512_si256(b), _mm512_extracti64x4_epi64(b, 1)};
    int8_t *to = codes_at(row, g->place);
    UNROLL for (int i = 0; i < GROUP; i++) {
        if (!whole && i == g->count) break;
        _mm256_storeu_si256((__m256i *)to, codes[i]);
        to += KERN_BLOCK * row->step;
    }
    memcpy(to, &rest, sizeof rest);
}

/* Describes a group's blocks and its rest, element GROUP of each vector. `power`: 2^-k; `finite`:
 * others give NaN; `first` and `second`: sums of the codes of halves. */
SIMD void vec_round_describe(const struct rounding *row, const struct group *g, float unit,
                             __m256 power, __mmask8 finite, __m256i first, __m256i second,
                             const bool whole) {
    const __m256i all = _mm256_add_epi32(first, second), offset = _mm256_set1_epi32(row->offset);
    const __m256 back = _mm256_mul_ps(_mm256_set1_ps(MAGIC), power), nan = _mm256_set1_ps(NAN);
    const __m256i bits = _mm256_castps_si256(back);
    const __m256i own = row->split ? first : all;
    const __m256 scale = _mm256_set1_ps(unit), good = _mm256_mask_mov_ps(nan, finite, back),
                 sum = _mm256_mask_mul_ps(nan, finite, power, _mm256_cvtepi32_ps(own)),
                 start =
                     _mm256_castsi256_ps(_mm256_sub_epi32(bits, _mm256_mullo_epi32(offset, own)));
    /* transposed, each is the first four members of a block, and behind them of the rest in [0] */
    const __m256 a = _mm256_unpacklo_ps(scale, good), b = _mm256_unpacklo_ps(sum, start),
                 c = _mm256_unpackhi_ps(scale, good), d = _mm256_unpackhi_ps(sum, start);
    const __m256 four[GROUP] = {_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee),
                                _mm256_shuffle_ps(c, d, 0x44), _mm256_shuffle_ps(c, d, 0xee)};
    float sums[2 * GROUP];
    int32_t starts[2 * GROUP];
    _mm256_storeu_ps(sums, _mm256_mask_mul_ps(nan, finite, power, _mm256_cvtepi32_ps(second)));
    _mm256_storeu_si256((__m256i *)starts,
                        _mm256_sub_epi32(bits, _mm256_mullo_epi32(offset, second)));
    struct cpu_x_block *block = vec_round_place_of(row, g->place);
    UNROLL for (int i = 0; i < GROUP; i++) {
        if (!whole && i == g->count) break;
        _mm_storeu_ps((float *)block, _mm256_castps256_ps128(four[i]));
        if (row->split) block->part[1].sum = sums[i], block->part[1].start = starts[i];
        block += row->step;
    }
    _mm_storeu_ps((float *)block, _mm256_extractf128_ps(four[0], 1));
    if (row->split) block->part[1].sum = sums[GROUP], block->part[1].start = starts[GROUP];
}

SIMD __m128 powers_of_two(__m128i exponent) {
    return _mm_castsi128_ps(_mm_slli_epi32(_mm_add_epi32(exponent, _mm_set1_epi32(127)), 23));
}

SIMD void write_examined(const struct rounding *row, const struct group *g, const struct unit *leaf,
                         const struct needs *needs, const bool whole) {
    const uint32_t quad = needs->quad;
    const __m128i need = _mm_loadu_si128((const __m128i *)needs->need);
    const __mmask8 finite = are_finite(need);
    const __m128i apart =
        _mm_srai_epi32(_mm_sub_epi32(_mm_set1_epi32((int32_t)leaf->need), need), 23);
    const __m128i shift = _mm_maskz_min_epi32(finite, apart, _mm_set1_epi32(SHIFTS));
    const __m128 by = _mm_mul_ps(powers_of_two(shift), _mm_set1_ps(leaf->by));
    const __m512 by_all = _mm512_broadcast_f32x4(by);
    const __m512 bys[GROUP] = {_mm512_permute_ps(by_all, 0x00), _mm512_permute_ps(by_all, 0x55),
                               _mm512_permute_ps(by_all, 0xaa), _mm512_permute_ps(by_all, 0xff)};
    const __m128i of = _mm_set1_epi32((int32_t)(quad % GROUP));
    const __m128 of_need = _mm_permutevar_ps(_mm_castsi128_ps(need), of);
    const __m128i parts =
        divide_quad(row, g, quad, _mm_permutevar_ps(by, of), are_finite(_mm_castps_si128(of_need)));
    __m512 low[GROUP], high[GROUP];
    load_group(row, g, low, high, whole);
    const __m512i first = vec_round_codes_of(low, bys, (__mmask16)(1u << quad), parts);
    const __m512i second = vec_round_codes_of(high, bys, (__mmask16)(1u << quad >> 16), parts);
    vec_round_write_codes(row, g, first, second, _mm_extract_epi32(parts, 1), whole);
    /* element GROUP: the rest's sum, and its power, which is 128 times that of its block */
    const __m128i rest_sum =
        _mm_dpbusd_epi32(_mm_setzero_si128(), _mm_set1_epi8(1), _mm_srli_epi64(parts, 32));
    const __m128 power = powers_of_two(_mm_sub_epi32(_mm_setzero_si128(), shift));
    const __m128 rest_power = _mm_mul_ps(_mm_permutevar_ps(power, of), _mm_set1_ps(1 << FINE));
    const __m128i sums = _mm_maskz_mov_epi32(finite, sums_of_blocks(first));
    vec_round_describe(
        row, g, leaf->unit, _mm256_insertf128_ps(_mm256_castps128_ps256(power), rest_power, 1),
        (__mmask8)(finite | 1u << GROUP),
        _mm256_inserti128_si256(_mm256_castsi128_si256(sums), rest_sum, 1),
        _mm256_zextsi128_si256(_mm_maskz_mov_epi32(finite, sums_of_blocks(second))), whole);
    locate_rest(vec_round_rest_of(row, g), quad);
}

/* Returns whether the group has GROUP blocks, all whole. */
SIMD bool is_whole(const struct rounding *row, const struct group *g) {
    return g->count == GROUP && (g->block + GROUP) * KERN_BLOCK <= row->cols;
}

SIMD uint32_t examine(const struct rounding *row, const struct group *g, struct needs *to) {
    return is_whole(row, g) ? examine_group(row, g, to, true) : examine_group(row, g, to, false);
}

SIMD void write_group(const struct rounding *row, const struct group *g, const struct unit *leaf,
                      const struct needs *needs) {
    if (is_whole(row, g))
        write_examined(row, g, leaf, needs, true);
    else
        write_examined(row, g, leaf, needs, false);
}

#else

static inline float power_of_two(int exponent) {
    return number_from_bits((uint32_t)(127 + exponent) << 23);
}

/* Returns the k of a block. */
static inline int shift_of(const struct unit *leaf, uint32_t need) {
    const int apart = (int32_t)(leaf->need - need) >> 23;
    return !is_finite(need) ? 0 : apart > SHIFTS ? SHIFTS : apart;
}

/* Describes a block of codes, or a rest. `sum`: the sum of its codes; where halves have scales of
 * their own, `sum` and `second` are the sums of the halves. If it is not `finite`, products with it
 * are NaN. */
static void vec_round_describe(const struct rounding *row, struct cpu_x_block *block, float unit,
                               int shift, int32_t sum, int32_t second, bool finite) {
    const float power = power_of_two(-shift), back = MAGIC * power;
    const int32_t sums[2] = {sum, second};
    block->scale = unit;
    block->back = finite ? back : NAN;
    for (int i = 0; i < 2; i++) {
        block->part[i].sum = finite ? power * (float)sums[i] : NAN;
        block->part[i].start = (int32_t)number_bits(back) - row->offset * sums[i];
    }
}

/* Returns the first quad of a block that has its largest magnitude, whose bits are `all`; `next`:
 * those of the other quads' largest. */
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

/* Finds a group's needs. Returns the largest that is finite. */
static uint32_t examine(const struct rounding *row, const struct group *g, struct needs *to) {
    uint32_t need[GROUP] = {0}, next, most = 0;
    int of = 0;
    for (int i = 0; i < g->count; i++)
        need[i] = largest_of(numbers_of(row, g->block + i), KERN_BLOCK);
    for (int i = 1; i < g->count; i++) of = need[i] > need[of] ? i : of;
    const int quad = coarsest_quad(numbers_of(row, g->block + of), need[of], &next);
    to->quad = (uint32_t)(GROUP * quad + of);
    if (is_finite(need[of])) { /* a block with a number that is not finite gives NaN, whatever its
                                  codes */
        const float coarse = number_from_bits(need[of]) / (1 << FINE);
        need[of] = number_bits(coarse) > next ? number_bits(coarse) : next;
    }
    for (int i = 0; i < g->count; i++) {
        to->need[i] = need[i];
        most = is_finite(need[i]) && need[i] > most ? need[i] : most;
    }
    return most;
}

/* Writes the codes of a block, times `by`, and finds the sums of its halves, which wrap around if a
 * number is not finite. Compilers make worse code of it inside another function. */
__attribute__((noinline)) static void vec_round_write_codes(const float *x, float by, int8_t *to,
                                                            uint32_t *sums) {
    int32_t code[KERN_BLOCK];
    sums[0] = sums[1] = 0;
    for (int k = 0; k < KERN_BLOCK; k++) code[k] = vec_round_nearest(x[k] * by);
    for (int k = 0; k < KERN_BLOCK; k++) to[k] = (int8_t)code[k];
    for (int k = 0; k < HALF; k++)
        sums[0] += (uint32_t)code[k], sums[1] += (uint32_t)code[HALF + k];
}

/* Computes the codes of a group's largest quad, x times `by`. Their low bits become codes of the
 * block, at `low`, and their high bits codes of the rest, at `high`. Returns the sum of the rest's
 * codes. `finite`: the numbers of the block are finite. */
static int32_t divide_quad(const float *x, float by, bool finite, int8_t *low, int8_t *high) {
    int32_t parts = 0;
    for (int k = 0; k < 4; k++) {
        const int32_t code = finite ? vec_round_nearest(x[k] * by) : 0;
        const int32_t part = (code + (1 << (FINE - 1))) >> FINE;
        low[k] = (int8_t)(code - part * (1 << FINE));
        high[k] = (int8_t)part;
        parts += part;
    }
    return parts;
}

static void write_group(const struct rounding *row, const struct group *g, const struct unit *leaf,
                        const struct needs *needs) {
    const uint32_t at = needs->quad, of = at % GROUP, quad = at / GROUP;
    struct cpu_x_block *rest = vec_round_rest_of(row, g);
    int8_t *low = codes_at(row, g->place + of) + (ptrdiff_t)4 * quad;
    uint32_t sums[GROUP][2];
    int shift[GROUP];
    for (int i = 0; i < g->count; i++) {
        shift[i] = shift_of(leaf, needs->need[i]);
        vec_round_write_codes(numbers_of(row, g->block + i), leaf->by * power_of_two(shift[i]),
                              codes_at(row, g->place + i), sums[i]);
    }
    const int32_t parts = divide_quad(
        numbers_of(row, g->block + of) + (ptrdiff_t)4 * quad, leaf->by * power_of_two(shift[of]),
        is_finite(needs->need[of]), low, codes_at(row, g->place + g->count));
    sums[of][quad / (CPU_QUADS / 2)] -= (uint32_t)parts << FINE;
    for (int i = 0; i < g->count; i++) {
        struct cpu_x_block *block = vec_round_place_of(row, g->place + i);
        const bool finite = is_finite(needs->need[i]); /* otherwise the codes mean nothing */
        const uint32_t first = finite ? sums[i][0] : 0, second = finite ? sums[i][1] : 0;
        vec_round_describe(row, block, leaf->unit, shift[i],
                           (int32_t)(row->split ? first : first + second), (int32_t)second, finite);
    }
    vec_round_describe(row, rest, leaf->unit, shift[of] - FINE, parts, 0,
                       true); /* `needs` lay there */
    locate_rest(rest, at);
}

#endif

/* A leaf: its first block and place, and the number of its blocks. */
struct leaf {
    int64_t block, place, count;
    struct unit unit;
};

/* Examines the groups of a leaf, or writes them if it has been examined. */
SIMD void each_group(const struct rounding *row, struct leaf *leaf, const bool write) {
    struct group g = {leaf->block, leaf->place, GROUP};
    for (int64_t left = leaf->count; left > 0; left -= GROUP) {
        if (left < GROUP) g.count = (int)left;
        struct needs *needs = (struct needs *)(void *)vec_round_rest_of(row, &g);
        if (write) {
            write_group(row, &g, &leaf->unit, needs);
        } else {
            const uint32_t need = examine(row, &g, needs);
            if (need > leaf->unit.need) leaf->unit.need = need;
        }
        g.block += GROUP;
        g.place += GROUP + 1;
    }
}

/* Examines all leaves before it writes the first. So the processor can work on several groups at a
 * time, because none waits for the unit of its leaf. */
SIMD void round_narrow(const struct rounding *row) {
    const struct kern_weight *w = row->weight;
    struct leaf leaves[CPU_LEAVES];
    for (int l = 0; l < w->leaves; l++) {
        const struct cpu_leaf leaf = cpu_leaf_of(w, l);
        const int64_t block = leaf.first / KERN_BLOCK;
        leaves[l] =
            (struct leaf){block, cpu_x_place(block, l, false), blocks_of(leaf.count), {0, 0, 0}};
        each_group(row, &leaves[l], false);
        struct unit *unit = &leaves[l].unit;
        const float top = number_from_bits(unit->need);
        if (top >= LEAST) unit->unit = top / INT8_MAX, unit->by = INT8_MAX / top;
    }
    for (int l = 0; l < w->leaves; l++) each_group(row, &leaves[l], true);
}

void VEC(round_row)(const struct kern_weight *w, const float *x, bool wide, char *to,
                    struct cpu_x_block *blocks, int64_t step) {
    struct rounding row = {.weight = w,
                           .x = x,
                           .to = to,
                           .blocks = blocks,
                           .cols = w->cols,
                           .step = step,
                           .offset = w->form->offset,
                           .split = w->form->parts == 2};
    const int64_t part = w->cols % KERN_BLOCK;
    memcpy(row.last, x + w->cols - part, (size_t)part * sizeof *x);
    for (int64_t b = 0; b < w->blocks && wide; b++) round_wide(&row, b);
    if (!wide) round_narrow(&row);
}
