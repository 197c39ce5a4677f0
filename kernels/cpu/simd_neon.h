/* The vectors of simd.h in four registers of NEON. Include only simd.h. */
#ifndef KEEPD_KERNELS_CPU_SIMD_NEON_H
#define KEEPD_KERNELS_CPU_SIMD_NEON_H

#include <arm_neon.h>

typedef struct {
    float32x4_t a, b, c, d;
} v16;

#define V16_EACH(f, x) ((v16){f((x).a), f((x).b), f((x).c), f((x).d)})
#define V16_EACH_TWO(f, x, y)                                                                      \
    ((v16){f((x).a, (y).a), f((x).b, (y).b), f((x).c, (y).c), f((x).d, (y).d)})

SIMD v16 v16_set(float x) {
    const float32x4_t all = vdupq_n_f32(x);
    return (v16){all, all, all, all};
}
SIMD v16 v16_load(const float *p) {
    return (v16){vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)};
}
SIMD void v16_store(float *p, v16 x) {
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
    vst1q_f32(p + 8, x.c);
    vst1q_f32(p + 12, x.d);
}
SIMD v16 v16_add(v16 x, v16 y) {
    return V16_EACH_TWO(vaddq_f32, x, y);
}
SIMD v16 v16_sub(v16 x, v16 y) {
    return V16_EACH_TWO(vsubq_f32, x, y);
}
SIMD v16 v16_mul(v16 x, v16 y) {
    return V16_EACH_TWO(vmulq_f32, x, y);
}
SIMD v16 v16_div(v16 x, v16 y) {
    return V16_EACH_TWO(vdivq_f32, x, y);
}
/* As on x86, the second if either is NaN: NEON's own maximum gives NaN then. */
SIMD float32x4_t quarter_max(float32x4_t x, float32x4_t y) {
    return vbslq_f32(vcgtq_f32(x, y), x, y);
}
SIMD float32x4_t quarter_min(float32x4_t x, float32x4_t y) {
    return vbslq_f32(vcltq_f32(x, y), x, y);
}
SIMD v16 v16_max(v16 x, v16 y) {
    return V16_EACH_TWO(quarter_max, x, y);
}
SIMD v16 v16_min(v16 x, v16 y) {
    return V16_EACH_TWO(quarter_min, x, y);
}
SIMD v16 v16_fma(v16 x, v16 y, v16 z) {
    return (v16){vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c),
                 vfmaq_f32(z.d, x.d, y.d)};
}
SIMD v16 v16_load_n(const float *p, int n) {
    float room[16] = {0};
    memcpy(room, p, (size_t)n * sizeof *room);
    return v16_load(room);
}
SIMD void v16_store_n(float *p, v16 x, int n) {
    float room[16];
    v16_store(room, x);
    memcpy(p, room, (size_t)n * sizeof *room);
}
SIMD v16 row8_floats(int8x16_t codes) {
    const int16x8_t low = vmovl_s8(vget_low_s8(codes)), high = vmovl_high_s8(codes);
    return (v16){vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
                 vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))};
}
SIMD v16 v16_load_row8(const int8_t *p) {
    return row8_floats(vld1q_s8(p));
}
/* Four floats by the bits of each number, from bit `to` on. */
SIMD float32x4_t quarter_bits(uint16x4_t x, const int to) {
    return vreinterpretq_f32_u32(vmovl_u16(x) << to);
}
SIMD v16 v16_load_power(const uint8_t *p) {
    const uint8x16_t exponents = vld1q_u8(p);
    const uint16x8_t low = vmovl_u8(vget_low_u8(exponents)), high = vmovl_high_u8(exponents);
    return (v16){quarter_bits(vget_low_u16(low), 23), quarter_bits(vget_high_u16(low), 23),
                 quarter_bits(vget_low_u16(high), 23), quarter_bits(vget_high_u16(high), 23)};
}
SIMD uint8x16_t nibbles(const uint8_t *p, bool high) {
    const uint8x16_t pairs = vld1q_u8(p);
    return high ? vshrq_n_u8(pairs, 4) : vandq_u8(pairs, vdupq_n_u8(15));
}
SIMD v16 v16_load_nibble(const uint8_t *p, bool high) {
    return row8_floats(vreinterpretq_s8_u8(nibbles(p, high)));
}
SIMD v16 v16_load_row4(const uint8_t *p, bool high) {
    return row8_floats(vqtbl1q_s8(vld1q_s8(row_levels), nibbles(p, high)));
}
SIMD v16 v16_load_bf16(const uint16_t *p) {
    return (v16){quarter_bits(vld1_u16(p), 16), quarter_bits(vld1_u16(p + 4), 16),
                 quarter_bits(vld1_u16(p + 8), 16), quarter_bits(vld1_u16(p + 12), 16)};
}
SIMD float32x4_t quarter_first(uint32x4_t pairs) {
    return vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16));
}
SIMD float32x4_t quarter_second(uint32x4_t pairs) {
    return vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000u)));
}
SIMD void v16_load_pairs(const void *p, v16 *first, v16 *second) {
    const uint32_t *at = p;
    const struct {
        uint32x4_t a, b, c, d;
    } pairs = {vld1q_u32(at), vld1q_u32(at + 4), vld1q_u32(at + 8), vld1q_u32(at + 12)};
    *first = V16_EACH(quarter_first, pairs);
    *second = V16_EACH(quarter_second, pairs);
}
SIMD v16 f16_wide(uint16x8_t low, uint16x8_t high) {
    const float16x8_t x = vreinterpretq_f16_u16(low), y = vreinterpretq_f16_u16(high);
    return (v16){vcvt_f32_f16(vget_low_f16(x)), vcvt_high_f32_f16(x), vcvt_f32_f16(vget_low_f16(y)),
                 vcvt_high_f32_f16(y)};
}
SIMD v16 v16_load_f16(const uint16_t *p) {
    return f16_wide(vld1q_u16(p), vld1q_u16(p + 8));
}
/* Converts eight e4m3 numbers in the high bytes to f16, scaled by 2^-8, as f16_of_e4m3 does; NaN
 * only by that. */
SIMD uint16x8_t f16_of_high(uint16x8_t codes) {
    return vandq_u16(vreinterpretq_u16_s16(vshrq_n_s16(vreinterpretq_s16_u16(codes), 1)),
                     vdupq_n_u16(0xbf80));
}
SIMD void v16_load_e4m3_pairs(const void *p, v16 *first, v16 *second) {
    const uint16x8_t low = vld1q_u16(p), high = vld1q_u16((const uint16_t *)p + 8);
    *first = f16_wide(f16_of_high(vshlq_n_u16(low, 8)), f16_of_high(vshlq_n_u16(high, 8)));
    *second = f16_wide(f16_of_high(low), f16_of_high(high));
}
SIMD uint16x8_t f16_of_e4m3(uint8x8_t codes) {
    const uint16x8_t bits = f16_of_high(vshlq_n_u16(vmovl_u8(codes), 8));
    const uint16x8_t nan = vceqq_u16(vandq_u16(bits, vdupq_n_u16(0x7fff)), vdupq_n_u16(0x3f80));
    return vorrq_u16(bits, vandq_u16(nan, vdupq_n_u16(0x7c00)));
}
SIMD v16 v16_load_e4m3(const uint8_t *p) {
    return v16_mul(f16_wide(f16_of_e4m3(vld1_u8(p)), f16_of_e4m3(vld1_u8(p + 8))), v16_set(0x1p8f));
}
SIMD uint16x4_t bf16_round_quarter(float32x4_t x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16);
}
SIMD void v16_store_bf16(uint16_t *p, v16 x) {
    vst1_u16(p, bf16_round_quarter(x.a));
    vst1_u16(p + 4, bf16_round_quarter(x.b));
    vst1_u16(p + 8, bf16_round_quarter(x.c));
    vst1_u16(p + 12, bf16_round_quarter(x.d));
}
/* Vector form of number_to_e4m3. */
SIMD uint16x4_t e4m3_round_quarter(float32x4_t x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t size = vandq_u32(bits, vdupq_n_u32(0x7fffffff));
    const uint32x4_t sign = vandq_u32(vshrq_n_u32(bits, 24), vdupq_n_u32(0x80));
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(size, 20), vdupq_n_u32(1));
    const uint32x4_t up = vaddq_u32(size, vaddq_u32(odd, vdupq_n_u32(0x7ffff)));
    const uint32x4_t normal = vsubq_u32(vshrq_n_u32(up, 20), vdupq_n_u32(120 << 3));
    const float32x4_t step = vdupq_n_f32(0x1p14f);
    const uint32x4_t tiny =
        vsubq_u32(vreinterpretq_u32_f32(vaddq_f32(vreinterpretq_f32_u32(size), step)),
                  vreinterpretq_u32_f32(step));
    const uint32x4_t below = vcltq_u32(size, vdupq_n_u32(121 << 23));
    const uint32x4_t code = vminq_u32(vbslq_u32(below, tiny, normal), vdupq_n_u32(0x7e));
    return vmovn_u32(vbslq_u32(vceqq_f32(x, x), vorrq_u32(code, sign), vdupq_n_u32(0x7f)));
}
SIMD void v16_store_e4m3(uint8_t *p, v16 x) {
    vst1_u8(p, vmovn_u16(vcombine_u16(e4m3_round_quarter(x.a), e4m3_round_quarter(x.b))));
    vst1_u8(p + 8, vmovn_u16(vcombine_u16(e4m3_round_quarter(x.c), e4m3_round_quarter(x.d))));
}
SIMD float32x4_t keep_quarter(float32x4_t x, int lo, int hi, float32x4_t other) {
    static const int32_t lanes[4] = {0, 1, 2, 3};
    const int32x4_t lane = vld1q_s32(lanes);
    return vbslq_f32(vandq_u32(vcgeq_s32(lane, vdupq_n_s32(lo)), vcltq_s32(lane, vdupq_n_s32(hi))),
                     x, other);
}
SIMD v16 v16_keep(v16 x, int lo, int hi, float other) {
    const float32x4_t fill = vdupq_n_f32(other);
    return (v16){keep_quarter(x.a, lo, hi, fill), keep_quarter(x.b, lo - 4, hi - 4, fill),
                 keep_quarter(x.c, lo - 8, hi - 8, fill),
                 keep_quarter(x.d, lo - 12, hi - 12, fill)};
}
SIMD float32x4_t quarter_unless_below(float32x4_t x, float32x4_t limit, float32x4_t y) {
    return vreinterpretq_f32_u32(vandq_u32(vcgeq_f32(x, limit), vreinterpretq_u32_f32(y)));
}
SIMD v16 v16_unless_below(v16 x, float limit, v16 y) {
    const float32x4_t least = vdupq_n_f32(limit);
    return (v16){quarter_unless_below(x.a, least, y.a), quarter_unless_below(x.b, least, y.b),
                 quarter_unless_below(x.c, least, y.c), quarter_unless_below(x.d, least, y.d)};
}
SIMD v16 v16_round(v16 x) {
    return V16_EACH(vrndnq_f32, x);
}
SIMD float32x4_t exp2_quarter(float32x4_t n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
}
SIMD v16 v16_exp2_whole(v16 n) {
    return V16_EACH(exp2_quarter, n);
}
/* Adds lanes 8 apart, then 4. */
SIMD float32x4_t sum_quarters(v16 x) {
    return vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
}
SIMD float v16_sum(v16 x) {
    const float32x4_t four = sum_quarters(x);
    return vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)));
}
/* Adds lanes 2 apart of two vectors. */
SIMD float32x4_t sum_pairs_of(float32x4_t x, float32x4_t y) {
    return vaddq_f32(vcombine_f32(vget_low_f32(x), vget_low_f32(y)),
                     vcombine_f32(vget_high_f32(x), vget_high_f32(y)));
}
SIMD void v16_sum4(const v16 x[4], float to[4]) {
    vst1q_f32(to, vpaddq_f32(sum_pairs_of(sum_quarters(x[0]), sum_quarters(x[1])),
                             sum_pairs_of(sum_quarters(x[2]), sum_quarters(x[3]))));
}
SIMD float v16_most(v16 x) {
    const float32x4_t four = quarter_max(quarter_max(x.a, x.c), quarter_max(x.b, x.d));
    const float32x4_t two = quarter_max(four, vextq_f32(four, four, 2));
    return vgetq_lane_f32(quarter_max(two, vextq_f32(two, two, 1)), 0);
}
/* Transposes four by four. */
SIMD void transpose_quarter(float32x4_t *x, float32x4_t *y, float32x4_t *z, float32x4_t *w) {
    const float32x4_t a = vzip1q_f32(*x, *z), b = vzip2q_f32(*x, *z);
    const float32x4_t c = vzip1q_f32(*y, *w), d = vzip2q_f32(*y, *w);
    *x = vzip1q_f32(a, c), *y = vzip2q_f32(a, c);
    *z = vzip1q_f32(b, d), *w = vzip2q_f32(b, d);
}
/* Transposes sixteen vectors. */
SIMD void v16_transpose(v16 x[16]) {
    for (int i = 0; i < 16; i += 4) {
        transpose_quarter(&x[i].a, &x[i + 1].a, &x[i + 2].a, &x[i + 3].a);
        transpose_quarter(&x[i].b, &x[i + 1].b, &x[i + 2].b, &x[i + 3].b);
        transpose_quarter(&x[i].c, &x[i + 1].c, &x[i + 2].c, &x[i + 3].c);
        transpose_quarter(&x[i].d, &x[i + 1].d, &x[i + 2].d, &x[i + 3].d);
    }
    for (int i = 0; i < 4; i++) {
        const v16 p = x[i], q = x[i + 4], r = x[i + 8], s = x[i + 12];
        x[i] = (v16){p.a, q.a, r.a, s.a};
        x[i + 4] = (v16){p.b, q.b, r.b, s.b};
        x[i + 8] = (v16){p.c, q.c, r.c, s.c};
        x[i + 12] = (v16){p.d, q.d, r.d, s.d};
    }
}

#endif
