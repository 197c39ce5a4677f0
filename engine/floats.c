#include "engine/floats.h"

#include <string.h>

static float float_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

float float_from_bf16(uint16_t bits) {
    return float_from_bits((uint32_t)bits << 16);
}

float float_from_f16(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16;
    uint32_t exponent = (bits >> 10) & 0x1f, mantissa = bits & 0x3ff;
    if (exponent == 0x1f) return float_from_bits(sign | 0x7f800000 | mantissa << 13);
    if (exponent == 0) { /* zero or subnormal: mantissa * 2^-24, exact in float32 */
        float value = (float)mantissa * 0x1p-24f;
        return sign ? -value : value;
    }
    return float_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

bool floats_can_read(enum tensor_dtype dtype) {
    return dtype == TENSOR_F32 || dtype == TENSOR_F16 || dtype == TENSOR_BF16;
}

bool floats_read(const struct tensor *tensor, size_t first, size_t count, float *out) {
    size_t size = tensor->dtype == TENSOR_F32 ? 4 : 2, total = tensor->bytes / size;
    if (!floats_can_read(tensor->dtype) || first > total || count > total - first) return false;
    const char *data = (const char *)tensor->data + first * size;
    if (tensor->dtype == TENSOR_F32) {
        memcpy(out, data, count * sizeof *out);
        return true;
    }
    for (size_t i = 0; i < count; i++) {
        uint16_t bits; /* the data is aligned to nothing */
        memcpy(&bits, data + i * sizeof bits, sizeof bits);
        out[i] = tensor->dtype == TENSOR_F16 ? float_from_f16(bits) : float_from_bf16(bits);
    }
    return true;
}
