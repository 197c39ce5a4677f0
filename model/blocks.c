/* The layouts. d and m are float16, numbers little-endian; nibbles: of 32 numbers, byte i has
 * number i in its low half and number i + 16 in its high half.
 *
 *   Q4_0  32: d, nibbles                    d (n - 8)
 *   Q4_1  32: d, m, nibbles                 d n + m
 *   Q5_0  32: d, u32 fifth bits, nibbles    d (n - 16)
 *   Q5_1  32: d, m, u32 fifth bits, nibbles d n + m
 *   Q8_0  32: d, int8                       d n
 *   Q4_K, Q5_K 256: d, m, 12 bytes with a scale s and a minimum t of 6 bits for each 32 numbers,
 *                   (Q5_K: 32 bytes of fifth bits,) 4 x 32 bytes of nibbles; d s n - m t
 *   Q6_K 256: 128 bytes of low halves, 64 bytes of two high bits, 16 int8 scales s, d; d s (n - 32)
 *   Q3_K 256: 32 bytes of third bits, 64 bytes of two low bits, 12 bytes with 16 scales s of 6
 *             bits, d; d (s - 32) (n - 4)
 *   Q2_K 256: 16 bytes with a scale s in the low and a minimum t in the high half for each 16
 *             numbers, 64 bytes of two bits, d, m; d s n - m t
 *   IQ4_NL 32: d, nibbles                   d BLOCK_IQ4[n]
 *   IQ4_XS 256: d, u16 and 4 bytes with 8 scales s of 6 bits, 8 x 16 bytes of nibbles;
 *               d (s - 32) BLOCK_IQ4[n]
 *   MXFP4 32: e, nibbles                    2^(e - 127) E2M1[n]
 *   NVFP4 64: 4 scales d of E4M3 without a sign, for 16 numbers each, and 4 x 8 bytes of nibbles:
 *             byte i has number i in its low half, i + 8 in its high half; d E2M1[n]
 */
#include "model/blocks.h"

#include <math.h>
#include <string.h>

#include "base/check.h"
#include "base/gguf.h"
#include "kernels/number.h"
#include "model/weights.h"

static float half_at(const uint8_t *from) {
    return number_from_f16((uint16_t)(from[0] | from[1] << 8));
}

/* Writes 32 numbers: each nibble, with its fifth bit from `fifth`, plus `offset`. */
static void put_nibbles(const uint8_t *nibbles, uint32_t fifth, int offset, int8_t *n) {
    for (int i = 0; i < 16; i++) {
        n[i] = (int8_t)((nibbles[i] & 15) + (int)(fifth >> i & 1) * 16 + offset);
        n[i + 16] = (int8_t)((nibbles[i] >> 4) + (int)(fifth >> (i + 16) & 1) * 16 + offset);
    }
}

static uint32_t bits_at(const uint8_t *from) {
    return from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16 | (uint32_t)from[3] << 24;
}

static void make_q4_0(const uint8_t *from, size_t blocks, struct block *out) {
    for (; blocks; blocks--, from += 18, out++) {
        block_set_factors(out, half_at(from), BLOCK_NO_LEAST);
        put_nibbles(from + 2, 0, -8, out->n);
    }
}

static void make_q4_1(const uint8_t *from, size_t blocks, struct block *out) {
    for (; blocks; blocks--, from += 20, out++) {
        block_set_factors(out, half_at(from), half_at(from + 2));
        put_nibbles(from + 4, 0, 0, out->n);
    }
}

static void make_q5_0(const uint8_t *from, size_t blocks, struct block *out) {
    for (; blocks; blocks--, from += 22, out++) {
        block_set_factors(out, half_at(from), BLOCK_NO_LEAST);
        put_nibbles(from + 6, bits_at(from + 2), -16, out->n);
    }
}

static void make_q5_1(const uint8_t *from, size_t blocks, struct block *out) {
    for (; blocks; blocks--, from += 24, out++) {
        block_set_factors(out, half_at(from), half_at(from + 2));
        put_nibbles(from + 8, bits_at(from + 4), 0, out->n);
    }
}

static void make_q8_0(const uint8_t *from, size_t blocks, struct block *out) {
    for (; blocks; blocks--, from += 34, out++) {
        block_set_factors(out, half_at(from), BLOCK_NO_LEAST);
        memcpy(out->n, from + 2, sizeof out->n);
    }
}

/* Returns the scale and minimum of group g of a K block. The high bits of the last four groups are
 * stored with the first four groups. */
static void scale_of(const uint8_t *s, int g, int *scale, int *minimum) {
    if (g < 4) {
        *scale = s[g] & 63;
        *minimum = s[g + 4] & 63;
    } else {
        *scale = (s[g + 4] & 15) | s[g - 4] >> 6 << 4;
        *minimum = s[g + 4] >> 4 | s[g] >> 6 << 4;
    }
}

/* Makes group g of 32 numbers, from the low halves of its bytes if g is even, else from the high
 * halves; `fifth` NULL: there are no fifth bits. */
static void make_group(const uint8_t *head, const uint8_t *nibbles, const uint8_t *fifth, int g,
                       struct block *out) {
    int scale, minimum;
    const float d = half_at(head), m = -half_at(head + 2);
    scale_of(head + 4, g, &scale, &minimum);
    block_set_factors(out, d * (float)scale, m * (float)minimum);
    out->unit[0] = d;
    out->unit[1] = m;
    for (int i = 0; i < 32; i++) {
        int n = nibbles[i] >> 4 * (g & 1) & 15;
        if (fifth) n += (fifth[i] >> g & 1) << 4;
        out->n[i] = (int8_t)n;
    }
}

static void make_q4_k(const uint8_t *from, size_t blocks, struct block *out) {
    for (; blocks; blocks--, from += 144)
        for (int g = 0; g < 8; g++)
            make_group(from, from + 16 + (ptrdiff_t)(g / 2 * 32), NULL, g, out++);
}

static void make_q5_k(const uint8_t *from, size_t blocks, struct block *out) {
    for (; blocks; blocks--, from += 176)
        for (int g = 0; g < 8; g++)
            make_group(from, from + 48 + (ptrdiff_t)(g / 2 * 32), from + 16, g, out++);
}

/* Makes quarter q of 128 numbers. The low halves of its numbers are in the bytes (q & 1) 32 + i. */
static void make_quarter(const uint8_t *low, const uint8_t *high, const uint8_t *scales, float d,
                         int q, struct block *out) {
    block_set_factors(out, 0, BLOCK_NO_LEAST);
    out->unit[0] = d;
    for (int half = 0; half < 2; half++) out->scale[half] = d * (float)(int8_t)scales[2 * q + half];
    for (int i = 0; i < 32; i++) {
        int n = (low[(q & 1) * 32 + i] >> (q & 2) * 2 & 15) | (high[i] >> 2 * q & 3) << 4;
        out->n[i] = (int8_t)(n - 32);
    }
}

static void make_q6_k(const uint8_t *from, size_t blocks, struct block *out) {
    for (; blocks; blocks--, from += 210)
        for (ptrdiff_t half = 0; half < 2; half++)
            for (int q = 0; q < 4; q++)
                make_quarter(from + 64 * half, from + 128 + 32 * half, from + 192 + 8 * half,
                             half_at(from + 208), q, out++);
}

/* Returns scale g of a Q3_K block. One byte has the low halves of two groups' scales, another the
 * high bits of four. */
static int q3_scale(const uint8_t *s, int g) {
    return ((s[g % 8] >> (g / 8 * 4) & 15) | (s[8 + g % 4] >> (g / 4 * 2) & 3) << 4) - 32;
}

static void make_q3_k(const uint8_t *from, size_t blocks, struct block *out) {
    for (; blocks; blocks--, from += 110) {
        const float d = half_at(from + 108);
        for (int b = 0; b < 8; b++, out++) {
            block_set_factors(out, 0, BLOCK_NO_LEAST);
            out->unit[0] = d;
            for (int half = 0; half < 2; half++)
                out->scale[half] = d * (float)q3_scale(from + 96, 2 * b + half);
            for (int i = 0; i < 32; i++)
                out->n[i] = (int8_t)((from[32 + b / 4 * 32 + i] >> (b % 4 * 2) & 3) +
                                     (from[i] >> b & 1) * 4 - 4);
        }
    }
}

static void make_q2_k(const uint8_t *from, size_t blocks, struct block *out) {
    for (; blocks; blocks--, from += 84) {
        const float d = half_at(from + 80), m = -half_at(from + 82);
        for (int b = 0; b < 8; b++, out++) {
            *out = (struct block){.unit = {d, m}};
            for (int half = 0; half < 2; half++) {
                const int factors = from[2 * b + half];
                out->scale[half] = d * (float)(factors & 15);
                out->least[half] = m * (float)(factors >> 4);
            }
            for (int i = 0; i < 32; i++)
                out->n[i] = (int8_t)(from[16 + b / 4 * 32 + i] >> (b % 4 * 2) & 3);
        }
    }
}

static const int8_t iq4[16] = {BLOCK_IQ4};

static void put_values(const uint8_t *nibbles, const int8_t values[16], int8_t *n) {
    for (int i = 0; i < 16; i++) {
        n[i] = values[nibbles[i] & 15];
        n[i + 16] = values[nibbles[i] >> 4];
    }
}

static void make_iq4_nl(const uint8_t *from, size_t blocks, struct block *out) {
    for (; blocks; blocks--, from += 18, out++) {
        block_set_factors(out, half_at(from), BLOCK_NO_LEAST);
        put_values(from + 2, iq4, out->n);
    }
}

static void make_iq4_xs(const uint8_t *from, size_t blocks, struct block *out) {
    for (; blocks; blocks--, from += 136) {
        const float d = half_at(from);
        const int high = from[2] | from[3] << 8;
        for (int b = 0; b < 8; b++, out++) {
            const int low = from[4 + b / 2] >> (b % 2 * 4) & 15;
            const float scale = d * (float)((low | (high >> 2 * b & 3) << 4) - 32);
            block_set_factors(out, scale, BLOCK_NO_LEAST);
            out->unit[0] = d;
            put_values(from + 8 + (ptrdiff_t)16 * b, iq4, out->n);
        }
    }
}

/* Sets the scales of a block of MXFP4 whose n are set. They are twice E2M1, so the scale is half of
 * 2^(e - 127); e = 255 is NaN (OCP Microscaling Formats 1.0). Files give blocks of zeros the
 * smallest e, whose half is a subnormal number, which needs float32 (kernels/cpu/block.h). */
static void set_mxfp4_scale(uint8_t e, struct block *out) {
    const uint32_t bits = e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23;
    bool any = false;
    for (int i = 0; i < KERN_BLOCK; i++) any |= out->n[i] != 0;
    block_set_factors(out, e == 255 ? NAN : any ? number_from_bits(bits) : 0, BLOCK_NO_LEAST);
}

static const int8_t e2m1[16] = {BLOCK_E2M1};

static void make_mxfp4(const uint8_t *from, size_t blocks, struct block *out) {
    for (; blocks; blocks--, from += 17, out++) {
        put_values(from + 1, e2m1, out->n);
        set_mxfp4_scale(from[0], out);
    }
}

void block_put_e2m1(const uint8_t *nibbles, int8_t *n) {
    for (int i = 0; i < KERN_BLOCK; i++) n[i] = e2m1[nibbles[i / 2] >> (i % 2 * 4) & 15];
}

void block_make_split_mxfp4(const uint8_t *nibbles, const uint8_t *scales, size_t blocks,
                            struct block *out) {
    for (; blocks; blocks--, nibbles += 16, scales++, out++) {
        block_put_e2m1(nibbles, out->n);
        set_mxfp4_scale(*scales, out);
    }
}

static void make_nvfp4(const uint8_t *from, size_t blocks, struct block *out) {
    for (; blocks; blocks--, from += 36)
        for (int b = 0; b < 2; b++, out++) {
            block_set_factors(out, 0, BLOCK_NO_LEAST);
            out->unit[0] = 0.5f; /* n is twice E2M1 */
            for (int half = 0; half < 2; half++) {
                const int at = 2 * b + half;
                const uint8_t *nibbles = from + 4 + (ptrdiff_t)8 * at;
                out->scale[half] = 0.5f * number_from_e4m3(from[at] & 0x7f);
                for (int i = 0; i < 16; i++)
                    out->n[16 * half + i] = e2m1[nibbles[i % 8] >> (i / 8 * 4) & 15];
            }
        }
}

static const struct format {
    uint32_t format;
    enum kern_dtype dtype;
    block_maker *make;
    size_t blocks, bytes; /* blocks of 32 in a block of the file, and that block's bytes */
    size_t loaded;        /* bytes of that block in a CPU's memory (kernels/cpu/block.h) */
} formats[] = {{GGUF_FORMAT_Q4_0, KERN_Q4, make_q4_0, 1, 18, 18},
               {GGUF_FORMAT_Q4_1, KERN_Q4M, make_q4_1, 1, 20, 20},
               {GGUF_FORMAT_Q5_0, KERN_Q8, make_q5_0, 1, 22, 22},
               {GGUF_FORMAT_Q5_1, KERN_Q8M, make_q5_1, 1, 24, 24},
               {GGUF_FORMAT_Q8_0, KERN_Q8, make_q8_0, 1, 34, 34},
               {GGUF_FORMAT_Q4_K, KERN_Q4M, make_q4_k, 8, 144, 148},
               {GGUF_FORMAT_Q5_K, KERN_Q8M, make_q5_k, 8, 176, 180},
               {GGUF_FORMAT_Q6_K, KERN_Q8S, make_q6_k, 8, 210, 210},
               {GGUF_FORMAT_Q3_K, KERN_Q8S, make_q3_k, 8, 110, 114},
               {GGUF_FORMAT_Q2_K, KERN_Q8SM, make_q2_k, 8, 84, 84},
               {GGUF_FORMAT_IQ4_NL, KERN_Q8, make_iq4_nl, 1, 18, 18},
               {GGUF_FORMAT_IQ4_XS, KERN_Q8, make_iq4_xs, 8, 136, 138},
               {GGUF_FORMAT_MXFP4, KERN_Q8, make_mxfp4, 1, 17, 17},
               {GGUF_FORMAT_NVFP4, KERN_Q8S, make_nvfp4, 2, 36, 37}};

static const struct format *format_of(uint32_t format) {
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (formats[i].format == format) return &formats[i];
    return NULL;
}

block_maker *block_maker_of(uint32_t format, enum kern_dtype *dtype) {
    const struct format *found = format_of(format);
    if (!found) return NULL;
    *dtype = found->dtype;
    return found->make;
}

bool block_dtype_of(const struct tensor *tensor, enum kern_dtype *dtype) {
    if (tensor->dtype != TENSOR_BLOCKS) return false;
    if (!tensor->packed) return block_maker_of(tensor->format, dtype) != NULL;
    return packed_blocks_dtype(tensor->packed, dtype);
}

double block_loaded_bits(const struct tensor *tensor) {
    enum kern_dtype dtype;
    const bool split = tensor->dtype != TENSOR_BLOCKS;
    CHECK(split || block_dtype_of(tensor, &dtype));
    const struct format *format = format_of(split             ? GGUF_FORMAT_MXFP4
                                            : !tensor->packed ? tensor->format
                                                              : packed_format(tensor->packed));
    if (format) return (double)format->loaded / (double)format->blocks * 8 / KERN_BLOCK;
    return (double)blocks_bytes(dtype, KERN_BLOCK) * 8 / KERN_BLOCK;
}

uint32_t block_format_of(enum kern_dtype dtype) {
    return dtype == KERN_Q8 ? GGUF_FORMAT_Q8_0 : GGUF_FORMAT_Q4_1;
}

static uint8_t *put_half(float x, uint8_t *out) {
    const uint16_t half = number_to_f16(x);
    *out++ = (uint8_t)half;
    *out++ = (uint8_t)(half >> 8);
    return out;
}

void block_write(enum kern_dtype dtype, const struct block *from, size_t blocks, uint8_t *out) {
    for (; blocks; blocks--, from++) {
        out = put_half(from->scale[0], out);
        if (dtype == KERN_Q4M) out = put_half(from->least[0], out);
        for (int i = 0; dtype == KERN_Q4M && i < KERN_BLOCK / 2; i++)
            *out++ = (uint8_t)(from->n[i] | from->n[i + KERN_BLOCK / 2] << 4);
        for (int i = 0; dtype == KERN_Q8 && i < KERN_BLOCK; i++) *out++ = (uint8_t)from->n[i];
    }
}

/* ---- As float32 ---- */

static void read_blocks(uint32_t format, const uint8_t *from, size_t blocks, float *out) {
    const struct format *its = format_of(format);
    struct block made[8];
    for (; blocks; blocks--, from += its->bytes) {
        its->make(from, 1, made);
        for (size_t b = 0; b < its->blocks; b++)
            for (int i = 0; i < KERN_BLOCK; i++) *out++ = block_number(&made[b], i);
    }
}

#define READER(name, FORMAT)                                                                       \
    static void read_##name(const uint8_t *from, size_t blocks, float *out) {                      \
        read_blocks(GGUF_FORMAT_##FORMAT, from, blocks, out);                                      \
    }
READER(q4_0, Q4_0)
READER(q4_1, Q4_1)
READER(q5_0, Q5_0)
READER(q5_1, Q5_1)
READER(q8_0, Q8_0)
READER(q4_k, Q4_K)
READER(q5_k, Q5_K)
READER(q6_k, Q6_K)
READER(q2_k, Q2_K)
READER(q3_k, Q3_K)
READER(iq4_nl, IQ4_NL)
READER(iq4_xs, IQ4_XS)
READER(nvfp4, NVFP4)

/* Reads MXFP4 as float32. Zeros keep the sign that E2M1 gives them, because the digests that name a
 * base are made from these numbers (base_digest.h). */
static void read_mxfp4(const uint8_t *from, size_t blocks, float *out) {
    read_blocks(GGUF_FORMAT_MXFP4, from, blocks, out);
    for (size_t b = 0; b < blocks; b++, from += 17, out += BLOCK_MXFP4)
        for (int i = 0; i < 16; i++) {
            if ((from[1 + i] & 15) == 8) out[i] = -out[i];
            if (from[1 + i] >> 4 == 8) out[i + 16] = -out[i + 16];
        }
}

block_reader *block_reader_of(uint32_t format) {
    switch (format) {
    case GGUF_FORMAT_Q4_0:
        return read_q4_0;
    case GGUF_FORMAT_Q4_1:
        return read_q4_1;
    case GGUF_FORMAT_Q5_0:
        return read_q5_0;
    case GGUF_FORMAT_Q5_1:
        return read_q5_1;
    case GGUF_FORMAT_Q8_0:
        return read_q8_0;
    case GGUF_FORMAT_Q4_K:
        return read_q4_k;
    case GGUF_FORMAT_Q5_K:
        return read_q5_k;
    case GGUF_FORMAT_Q6_K:
        return read_q6_k;
    case GGUF_FORMAT_Q2_K:
        return read_q2_k;
    case GGUF_FORMAT_Q3_K:
        return read_q3_k;
    case GGUF_FORMAT_IQ4_NL:
        return read_iq4_nl;
    case GGUF_FORMAT_IQ4_XS:
        return read_iq4_xs;
    case GGUF_FORMAT_MXFP4:
        return read_mxfp4;
    case GGUF_FORMAT_NVFP4:
        return read_nvfp4;
    default:
        return NULL;
    }
}
