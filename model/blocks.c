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
 */
#include "model/blocks.h"

#include <string.h>

#include "base/gguf.h"
#include "kernels/number.h"

static float half_at(const uint8_t *from) {
    return number_from_f16((uint16_t)(from[0] | from[1] << 8));
}

static void read_q4_0(const uint8_t *from, size_t blocks, float *out) {
    for (size_t b = 0; b < blocks; b++, from += 18, out += 32) {
        const float d = half_at(from);
        for (int i = 0; i < 16; i++) {
            out[i] = (float)((from[2 + i] & 15) - 8) * d;
            out[i + 16] = (float)((from[2 + i] >> 4) - 8) * d;
        }
    }
}

static void read_q4_1(const uint8_t *from, size_t blocks, float *out) {
    for (size_t b = 0; b < blocks; b++, from += 20, out += 32) {
        const float d = half_at(from), m = half_at(from + 2);
        for (int i = 0; i < 16; i++) {
            out[i] = (float)(from[4 + i] & 15) * d + m;
            out[i + 16] = (float)(from[4 + i] >> 4) * d + m;
        }
    }
}

static uint32_t bits_at(const uint8_t *from) {
    return from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16 | (uint32_t)from[3] << 24;
}

static void read_q5_0(const uint8_t *from, size_t blocks, float *out) {
    for (size_t b = 0; b < blocks; b++, from += 22, out += 32) {
        const float d = half_at(from);
        const uint32_t fifth = bits_at(from + 2);
        for (int i = 0; i < 16; i++) {
            int low = (from[6 + i] & 15) | (int)(fifth >> i & 1) << 4;
            int high = (from[6 + i] >> 4) | (int)(fifth >> (i + 16) & 1) << 4;
            out[i] = (float)(low - 16) * d;
            out[i + 16] = (float)(high - 16) * d;
        }
    }
}

static void read_q5_1(const uint8_t *from, size_t blocks, float *out) {
    for (size_t b = 0; b < blocks; b++, from += 24, out += 32) {
        const float d = half_at(from), m = half_at(from + 2);
        const uint32_t fifth = bits_at(from + 4);
        for (int i = 0; i < 16; i++) {
            int low = (from[8 + i] & 15) | (int)(fifth >> i & 1) << 4;
            int high = (from[8 + i] >> 4) | (int)(fifth >> (i + 16) & 1) << 4;
            out[i] = (float)low * d + m;
            out[i + 16] = (float)high * d + m;
        }
    }
}

static void read_q8_0(const uint8_t *from, size_t blocks, float *out) {
    for (size_t b = 0; b < blocks; b++, from += 34, out += 32) {
        const float d = half_at(from);
        for (int i = 0; i < 32; i++) out[i] = (float)(int8_t)from[2 + i] * d;
    }
}

/* Scale and minimum of group g of a K block: the last four groups' high bits lie with the first
 * four's. */
static void scale_of(const uint8_t *s, int g, int *scale, int *minimum) {
    if (g < 4) {
        *scale = s[g] & 63;
        *minimum = s[g + 4] & 63;
    } else {
        *scale = (s[g + 4] & 15) | s[g - 4] >> 6 << 4;
        *minimum = s[g + 4] >> 4 | s[g] >> 6 << 4;
    }
}

/* 64 numbers, in group 2 c the low halves and in 2 c + 1 the high ones; `fifth` NULL: none. */
static void read_chunk(const uint8_t *head, const uint8_t *nibbles, const uint8_t *fifth, int c,
                       float *out) {
    const float d = half_at(head), m = half_at(head + 2);
    for (int half = 0; half < 2; half++) {
        int scale, minimum;
        scale_of(head + 4, 2 * c + half, &scale, &minimum);
        const float step = d * (float)scale, least = m * (float)minimum;
        for (int i = 0; i < 32; i++) {
            int n = nibbles[i] >> 4 * half & 15;
            if (fifth) n += (fifth[i] >> (2 * c + half) & 1) << 4;
            *out++ = step * (float)n - least;
        }
    }
}

static void read_q4_k(const uint8_t *from, size_t blocks, float *out) {
    for (size_t b = 0; b < blocks; b++, from += 144)
        for (int c = 0; c < 4; c++, out += 64)
            read_chunk(from, from + 16 + (ptrdiff_t)32 * c, NULL, c, out);
}

static void read_q5_k(const uint8_t *from, size_t blocks, float *out) {
    for (size_t b = 0; b < blocks; b++, from += 176)
        for (int c = 0; c < 4; c++, out += 64)
            read_chunk(from, from + 48 + (ptrdiff_t)32 * c, from + 16, c, out);
}

/* 128 numbers: quarter q has numbers 32 q + i, its low half in byte (q & 1) 32 + i. */
static void read_half_q6_k(const uint8_t *low, const uint8_t *high, const uint8_t *scales, float d,
                           float *out) {
    for (int q = 0; q < 4; q++) {
        for (int i = 0; i < 32; i++) {
            int n = (low[(q & 1) * 32 + i] >> (q & 2) * 2 & 15) | (high[i] >> 2 * q & 3) << 4;
            *out++ = d * (float)(int8_t)scales[2 * q + i / 16] * (float)(n - 32);
        }
    }
}

static void read_q6_k(const uint8_t *from, size_t blocks, float *out) {
    for (size_t b = 0; b < blocks; b++, from += 210) {
        const float d = half_at(from + 208);
        for (ptrdiff_t half = 0; half < 2; half++, out += 128)
            read_half_q6_k(from + 64 * half, from + 128 + 32 * half, from + 192 + 8 * half, d, out);
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
    default:
        return NULL;
    }
}
