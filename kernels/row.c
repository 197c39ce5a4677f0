#include "kernels/row.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "kernels/number.h"

/* Compiled for every processor, and once more for each path of the CPU backend, with that path's
 * instructions. The operations are the same, in the same order, and none is fused: so are the
 * bits. */
#ifdef CPU_PATH
#include "kernels/cpu/vec.h"
#else
#define VEC(name) name
const int8_t row_levels[16] = {-127, -96, -75, -58, -44, -31, -18, -6,
                               6,    18,  31,  44,  58,  75,  96,  127};
#endif

/* The least whole number that is nearer to level i + 1 than to level i, or as near. */
static const int8_t bounds[15] = {-111, -85, -66, -51, -37, -24, -12, 0,
                                  12,   25,  38,  51,  67,  86,  112};

#define RMS_LEVEL 46.476f /* the levels' root mean square, for normally distributed numbers */

/* The loops over numbers have this many lanes, so that compilers vectorise them. */
#define STEP 16

/* A number below 2^22 that is added to this loses its fraction: float32 rounds to the nearest whole
 * number, ties to the even one. Unlike rintf, compilers vectorise it for every processor. */
#define ROUNDING 12582912.0f /* 3 * 2^22 */

/* Sums and differences of numbers `half` apart, within STEP numbers. */
static inline void add_partners(float *x, const int half) {
    float sums[STEP];
    for (int i = 0; i < STEP; i++) {
        const float partner = x[i ^ half];
        sums[i] = (i & half) != 0 ? partner - x[i] : x[i] + partner;
    }
    memcpy(x, sums, sizeof sums);
}

/* Sums and differences of numbers up to STEP / 2 apart, for whole steps. */
static void rotate_near(float *x, int dim) {
    for (int i = 0; i < dim; i += STEP) {
        add_partners(x + i, 1);
        add_partners(x + i, 2);
        add_partners(x + i, 4);
        add_partners(x + i, 8);
    }
}

void VEC(row_rotate)(float *x, int dim) {
    const int block = dim & -dim;
    const float scale = 1 / sqrtf((float)block);
    if (block >= STEP) rotate_near(x, dim);
    for (int half = block >= STEP ? STEP : 1; half < block; half *= 2)
        for (int i = 0; i < dim; i += 2 * half)
            for (int j = i; j < i + half; j++) {
                const float a = x[j], b = x[j + half];
                x[j] = a + b;
                x[j + half] = a - b;
            }
    for (int i = 0; i < dim; i++) x[i] *= scale;
}

/* ---- To codes ---- */

/* Sixteen running sums over i mod 16, added from the first to the last. */
static float sum_products(const float *a, const float *b, int count) {
    float sum[16] = {0}, all = 0;
    const int whole = count / 16 * 16;
    for (int i = 0; i < whole; i += 16)
        for (int j = 0; j < 16; j++) sum[j] += a[i + j] * b[i + j];
    for (int i = whole; i < count; i++) sum[i % 16] += a[i] * b[i];
    for (int i = 0; i < 16; i++) all += sum[i];
    return all;
}

/* The largest magnitude; a NaN is greater than all numbers. Magnitudes compare as their bits do,
 * and compilers vectorise the maximum of integers. */
static float magnitude(const float *x, int dim) {
    int32_t most = 0;
    for (int i = 0; i < dim; i++) {
        const int32_t bits = (int32_t)(number_bits(x[i]) & 0x7fffffff);
        most = bits > most ? bits : most;
    }
    return number_from_bits((uint32_t)most);
}

/* The whole numbers nearest to x / factor, within the levels; ties: the even one. */
static void row_nearest(int8_t *to, const float *x, float factor, int dim) {
    for (int i = 0; i < dim; i++) {
        float t = x[i] / factor;
        t = t > ROW_LEVEL ? ROW_LEVEL : t;
        t = t < -ROW_LEVEL ? -ROW_LEVEL : t;
        to[i] = (int8_t)(int32_t)(t + ROUNDING - ROUNDING);
    }
}

static void write8(int8_t *codes, uint16_t *factor, const float *x, float most, int dim) {
    *factor = (uint16_t)((number_bits(most / ROW_LEVEL) + 0xffff) >> 16); /* rounded up */
    if (*factor > 0) row_nearest(codes, x, number_from_bf16(*factor), dim);
}

/* Codes of the levels nearest to x / factor, one in a byte. */
static void choose_levels(uint8_t *chosen, const float *x, float factor, int dim) {
    int8_t whole[ROW_DIM_MAX];
    row_nearest(whole, x, factor, dim);
    for (int i = 0; i < dim; i++) chosen[i] = 0;
    for (int b = 0; b < 15; b++)
        for (int i = 0; i < dim; i++) chosen[i] = (uint8_t)(chosen[i] + (whole[i] >= bounds[b]));
}

/* The factor with the least squared error for these codes, x . level / level . level. */
static float best_factor(const float *x, const uint8_t *chosen, int dim) {
    float levels[ROW_DIM_MAX];
    for (int i = 0; i < dim; i++) levels[i] = row_levels[chosen[i]];
    return sum_products(x, levels, dim) / sum_products(levels, levels, dim);
}

static void write4(uint8_t *codes, uint16_t *factor, const float *x, int dim) {
    uint8_t chosen[ROW_DIM_MAX + ROW_STEP] = {0};
    float squares = sum_products(x, x, dim);
    float by = sqrtf(squares / (float)dim) / RMS_LEVEL;
    for (int round = 0; round < 2 && by > 0; round++) {
        choose_levels(chosen, x, by, dim);
        by = best_factor(x, chosen, dim);
    }
    *factor = number_to_bf16(by);
    for (int i = 0; i < dim; i += ROW_STEP)
        for (int j = 0; j < 16; j++) *codes++ = (uint8_t)(chosen[i + j] | chosen[i + j + 16] << 4);
}

void VEC(row_write)(void *codes, uint16_t *factor, const float *from, int dim,
                    enum kern_dtype dtype) {
    const float most = magnitude(from, dim);
    const bool finite = most <= FLT_MAX;
    memset(codes, 0, row_code_bytes(dtype, dim));
    *factor = finite ? 0 : number_to_bf16(NAN);
    if (!finite || dim < 1 || dim > ROW_DIM_MAX) return;
    if (dtype == KERN_ROW8)
        write8(codes, factor, from, most, dim);
    else
        write4(codes, factor, from, dim);
}

#ifndef CPU_PATH
void row_read(float *to, const void *codes, uint16_t factor, int dim, enum kern_dtype dtype) {
    const float by = number_from_bf16(factor);
    for (int i = 0; i < dim; i++) to[i] = by * (float)row_level(codes, i, dtype);
}
#endif
