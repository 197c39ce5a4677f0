#include "model/rounding.h"

#include <float.h>
#include <stdio.h>

#include "model/blocks.h"

#define CODES_LOOKED_AT ((size_t)4096) /* together, before one of them is looked for */

enum quantization rounding_format(const struct slot *slot, enum quantization wanted) {
    if (slot->shard == KERN_SHARD_NONE) return QUANTIZE_NONE;
    if (slot->shard != KERN_SHARD_VOCAB) return wanted;
    return wanted == QUANTIZE_FP8 || wanted == QUANTIZE_NONE ? QUANTIZE_NONE : QUANTIZE_Q8;
}

bool rounding_is_done(const struct weights *weights, enum naming naming, const struct slot *slot,
                      int layer, int expert) {
    char name[TENSOR_NAME_MAX];
    enum kern_dtype dtype;
    for (int i = 0; i < slot->count; i++) {
        tensor_name(name, naming, slot->parts[i], layer, expert);
        const struct tensor *tensor = weights_find(weights, name);
        if (!tensor || !block_dtype_of(tensor, &dtype)) return false;
    }
    return true;
}

/* The first code that is not a number, or `count`. */
static size_t find_nan(const uint8_t *codes, size_t count) {
    for (size_t at = 0, end; at < count; at = end) {
        unsigned any = 0;
        end = count - at < CODES_LOOKED_AT ? count : at + CODES_LOOKED_AT;
        for (size_t i = at; i < end; i++) any |= (codes[i] & 0x7f) == 0x7f;
        for (size_t i = at; any && i < end; i++)
            if ((codes[i] & 0x7f) == 0x7f) return i;
    }
    return count;
}

int rounding_read_scales(const struct weights *weights, const char *name,
                         const struct tensor *codes, bool check_only, float *out,
                         struct fault *fault) {
    char scale_name[TENSOR_NAME_MAX + 8];
    size_t rows = (size_t)codes->shape[0], count = 1;
    snprintf(scale_name, sizeof scale_name, "%s_scale", name);
    const struct tensor *scale = weights_find(weights, scale_name);
    if (!scale)
        return fault_set(fault, ERR_NOTFOUND, scale_name,
                         "tensor is missing: the scale of an F8_E4M3 matrix");
    for (int i = 0; i < scale->dims; i++) count *= (size_t)scale->shape[i];
    if ((count != 1 && (count != rows || scale->shape[0] != codes->shape[0])) ||
        !tensor_read_floats(scale, 0, count, out))
        return fault_set(fault, ERR_UNSUPPORTED, scale_name,
                         "expected one number or %zu, F32, F16 or BF16", rows);
    for (size_t i = count; i < rows; i++) out[i] = out[0];
    for (size_t i = 0; i < count; i++)
        if (!(out[i] >= 0 && out[i] <= FLT_MAX / QUANTIZE_MOST))
            return fault_set(fault, ERR_INVALID, scale_name, "%g is no scale", (double)out[i]);
    size_t nan = check_only ? codes->bytes : find_nan(codes->data, codes->bytes);
    if (nan == codes->bytes) return 0;
    return fault_set(fault, ERR_INVALID, name, "element %zu is not a number", nan);
}
