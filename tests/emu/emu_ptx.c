/* The machine instructions of kernels/cuda/ptx.cuh, each alone, against their definition in plain
 * C: bit by bit, except for the power of two, which the device approximates. What differs here
 * explains what differs everywhere else, so bench/gpu/check runs this suite first. */
#include <criterion/criterion.h>

#include "both.h"
#include "kernels/number.h"
#include "ptx_play.h"

#define WORDS 4096

static struct kern *open_device(void) {
    const struct cuda_options cuda = {.device = 0};
    struct fault fault = {0};
    struct kern *kern;
    cr_assert_eq(cuda_open(&cuda, &kern, &fault), 0, "%s", fault.text);
    return kern;
}

static void *put_bytes(struct kern *kern, const void *from, size_t bytes) {
    void *to = kern->ops->mem_alloc(kern, bytes);
    cr_assert_not_null(to);
    MUST(kern->ops->upload(kern, to, from, bytes));
    return to;
}

/* The instruction's results for all words. */
static void play_words(struct kern *kern, enum ptx_word which, uint32_t *out, const uint32_t *a,
                       const uint32_t *b) {
    uint32_t *there[3] = {put_bytes(kern, a, WORDS * 4), put_bytes(kern, b, WORDS * 4),
                          put_bytes(kern, a, WORDS * 4)};
    ptx_play_words(kern, which, there[2], there[0], there[1], WORDS);
    MUST(kern->ops->download(kern, out, there[2], WORDS * 4));
    for (int i = 0; i < 3; i++) kern->ops->mem_free(kern, there[i]);
}

static uint32_t pair(uint32_t low, uint32_t high, int bits) {
    return low | high << bits;
}

/* Numbers of all sizes that the narrow formats hold and more: ties, the smallest, the largest, both
 * zeros; at `i` below 64 whole halves. */
static float any_number(uint64_t seed, int i) {
    if (i < 64) return (float)(i - 32) * 0.5f;
    int exponent = (int)(mix(seed + (uint64_t)i) % 60) - 32;
    uint32_t fraction = (uint32_t)mix(seed ^ (uint64_t)i) & 0x7fffff;
    if (i % 3 == 0) fraction &= 0x7f0000; /* exact in bf16 */
    if (i % 3 == 1) fraction = (fraction & 0x7ff000) | 0x1000;
    float x = ldexpf(1 + (float)fraction * 0x1p-23f, exponent);
    return mix(seed * 7 + (uint64_t)i) & 1 ? -x : x;
}

static float clamped(float x, float most) {
    return fminf(fmaxf(x, -most), most);
}

/* Two numbers in float32 become one word. */
static uint32_t packed(enum ptx_word which, float low, float high) {
    if (which == PTX_PACK_BF16) return pair(number_to_bf16(low), number_to_bf16(high), 16);
    if (which == PTX_PACK_F16)
        return pair(number_to_f16(clamped(low, 65504)), number_to_f16(clamped(high, 65504)), 16);
    return pair(number_to_e4m3(clamped(low, 448)), number_to_e4m3(clamped(high, 448)), 8);
}

Test(emu_ptx, conversions_to_narrow_numbers) {
    static uint32_t a[WORDS], b[WORDS], out[WORDS];
    struct kern *kern = open_device();
    for (int i = 0; i < WORDS; i++) {
        a[i] = number_bits(any_number(1, i));
        b[i] = number_bits(any_number(2, i));
    }
    for (enum ptx_word which = PTX_PACK_BF16; which <= PTX_PACK_E4M3; which++) {
        play_words(kern, which, out, a, b);
        for (int i = 0; i < WORDS; i++) {
            float low = number_from_bits(a[i]), high = number_from_bits(b[i]);
            cr_assert_eq(out[i], packed(which, low, high), "instruction %d of %.9g and %.9g: %08x",
                         which, (double)low, (double)high, out[i]);
        }
    }
    kern->ops->close(kern);
}

/* The word's meaning in the wider format. */
static uint32_t widened(enum ptx_word which, uint32_t a) {
    if (which == PTX_F16_OF_E4M3)
        return pair(number_to_f16(number_from_e4m3((uint8_t)a)),
                    number_to_f16(number_from_e4m3((uint8_t)(a >> 8))), 16);
    if (which == PTX_UNPACK_F16_LOW) return number_bits(number_from_f16((uint16_t)a));
    if (which == PTX_UNPACK_F16_HIGH) return number_bits(number_from_f16((uint16_t)(a >> 16)));
    if (which == PTX_F16_OF_HIGH_BYTES) a >>= 16;
    return pair(number_to_f16(1024 + (float)(a & 0xff)),
                number_to_f16(1024 + (float)(a >> 8 & 0xff)), 16);
}

/* All codes of a byte, without NaN; float16 without infinity and NaN. */
static uint32_t any_word(enum ptx_word which, int i) {
    uint32_t word = (uint32_t)mix((uint64_t)i);
    if (which == PTX_F16_OF_E4M3) word = pair((uint32_t)i & 0xff, word & 0xff, 8);
    if (which == PTX_F16_OF_E4M3 && (word & 0x7f) == 0x7f) word ^= 1;
    if (which == PTX_F16_OF_E4M3 && (word >> 8 & 0x7f) == 0x7f) word ^= 0x100;
    if (which == PTX_UNPACK_F16_LOW || which == PTX_UNPACK_F16_HIGH) {
        if ((word & 0x7c00) == 0x7c00) word ^= 0x4000;
        if ((word >> 16 & 0x7c00) == 0x7c00) word ^= 0x40000000;
    }
    return word;
}

Test(emu_ptx, conversions_to_wide_numbers) {
    static const enum ptx_word all[] = {PTX_F16_OF_E4M3, PTX_UNPACK_F16_LOW, PTX_UNPACK_F16_HIGH,
                                        PTX_F16_OF_LOW_BYTES, PTX_F16_OF_HIGH_BYTES};
    static uint32_t a[WORDS], out[WORDS];
    struct kern *kern = open_device();
    for (size_t k = 0; k < sizeof all / sizeof *all; k++) {
        for (int i = 0; i < WORDS; i++) a[i] = any_word(all[k], i);
        play_words(kern, all[k], out, a, a);
        for (int i = 0; i < WORDS; i++)
            cr_assert_eq(out[i], widened(all[k], a[i]), "instruction %d of %08x: %08x", all[k],
                         a[i], out[i]);
    }
    kern->ops->close(kern);
}

/* A number of a size at which products and differences are exact in float32. */
static float middle_number(uint64_t seed, int i) {
    return any_number(seed, i % 64) + noise(seed, (uint64_t)i);
}

static uint32_t computed(enum ptx_word which, uint32_t a, uint32_t b, int shift) {
    uint16_t x = (uint16_t)(a >> shift), y = (uint16_t)(b >> shift);
    if (which == PTX_MUL_F16) return number_to_f16(number_from_f16(x) * number_from_f16(y));
    if (which == PTX_SUB_F16) return number_to_f16(number_from_f16(x) - number_from_f16(y));
    return number_to_bf16(number_from_bf16(x) - number_from_bf16(y));
}

Test(emu_ptx, arithmetic_of_pairs) {
    static uint32_t a[WORDS], b[WORDS], out[WORDS];
    struct kern *kern = open_device();
    for (enum ptx_word which = PTX_MUL_F16; which <= PTX_SUB_BF16; which++) {
        enum ptx_word to = which == PTX_SUB_BF16 ? PTX_PACK_BF16 : PTX_PACK_F16;
        for (int i = 0; i < WORDS; i++) {
            a[i] = packed(to, middle_number(1, i), middle_number(2, i));
            b[i] = packed(to, middle_number(3, i), middle_number(4, i));
        }
        play_words(kern, which, out, a, b);
        for (int i = 0; i < WORDS; i++)
            cr_assert_eq(out[i],
                         pair(computed(which, a[i], b[i], 0), computed(which, a[i], b[i], 16), 16),
                         "instruction %d of %08x and %08x: %08x", which, a[i], b[i], out[i]);
    }
    kern->ops->close(kern);
}

Test(emu_ptx, powers_of_two) {
    static uint32_t a[WORDS], out[WORDS];
    struct kern *kern = open_device();
    for (int i = 0; i < WORDS; i++) a[i] = number_bits((float)i * -0.03f);
    play_words(kern, PTX_EXP2, out, a, a);
    for (int i = 0; i < WORDS; i++) {
        double want = exp2((double)number_from_bits(a[i]));
        cr_assert(fabs(number_from_bits(out[i]) - want) <= 0x1p-21 * want, "2^%g: %.9g",
                  (double)number_from_bits(a[i]), (double)number_from_bits(out[i]));
    }
    kern->ops->close(kern);
}

/* Small whole numbers, so that every sum is exact in any order. */
static int whole(enum ptx_product which, uint64_t seed, int i) {
    int n = (int)(mix(seed + (uint64_t)i) % 15) - 7;
    return which == PTX_MMA_U8 && seed == 1 ? n + 200 : n;
}

/* One matrix as the instruction takes it. */
static void write_matrix(enum ptx_product which, uint64_t seed, int count, void *to) {
    for (int i = 0; i < count; i++) {
        int n = whole(which, seed, i);
        if (which == PTX_MMA_BF16) ((uint16_t *)to)[i] = number_to_bf16((float)n);
        if (which == PTX_MMA_F16) ((uint16_t *)to)[i] = number_to_f16((float)n);
        if (which >= PTX_MMA_S8) ((uint8_t *)to)[i] = (uint8_t)n;
    }
}

static void check_product(struct kern *kern, enum ptx_product which) {
    bool bytes = which >= PTX_MMA_S8;
    int inner = bytes ? 32 : 16;
    uint8_t a[512], b[256];
    uint32_t c[128];
    write_matrix(which, 1, 16 * inner, a);
    write_matrix(which, 2, 8 * inner, b);
    for (int i = 0; i < 128; i++) c[i] = bytes ? (uint32_t)(i - 64) : number_bits((float)(i - 64));
    void *there[3] = {put_bytes(kern, a, sizeof a), put_bytes(kern, b, sizeof b),
                      put_bytes(kern, c, sizeof c)};
    ptx_play_product(kern, which, there[2], there[0], there[1]);
    MUST(kern->ops->download(kern, c, there[2], sizeof c));
    for (int i = 0; i < 128; i++) {
        int sum = i - 64, row = i / 8, column = i % 8;
        for (int k = 0; k < inner; k++)
            sum += whole(which, 1, row * inner + k) *
                   whole(which, 2, bytes ? column * inner + k : k * 8 + column);
        int got = bytes ? (int)c[i] : (int)number_from_bits(c[i]);
        cr_assert_eq(got, sum, "product %d, row %d, column %d: %d, not %d", which, row, column, got,
                     sum);
    }
    for (int i = 0; i < 3; i++) kern->ops->mem_free(kern, there[i]);
}

Test(emu_ptx, products_of_one_warp) {
    struct kern *kern = open_device();
    for (enum ptx_product which = PTX_MMA_BF16; which <= PTX_MMA_U8; which++)
        check_product(kern, which);
    kern->ops->close(kern);
}

Test(emu_ptx, copies_into_shared_memory) {
    enum { MOST = 16384 };
    static char from[2 * MOST], to[2 * MOST];
    static const int sizes[] = {16, 48, 1024, MOST};
    struct kern *kern = open_device();
    for (size_t i = 0; i < sizeof from; i++) from[i] = (char)mix(i);
    for (int i = 0; i < 8; i++) {
        size_t bytes = 2 * (size_t)sizes[i / 2];
        void *source = put_bytes(kern, from, bytes), *target = put_bytes(kern, to, bytes);
        ptx_play_copy(kern, i % 2, target, source, sizes[i / 2]);
        MUST(kern->ops->download(kern, to, target, bytes));
        cr_assert(!memcmp(from, to, bytes), "%d bytes, %s", sizes[i / 2],
                  i % 2 ? "in bulk" : "by all threads");
        memset(to, 0, sizeof to);
        kern->ops->mem_free(kern, source), kern->ops->mem_free(kern, target);
    }
    kern->ops->close(kern);
}
