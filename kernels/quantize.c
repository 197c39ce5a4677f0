#include "kernels/quantize.h"

#include <math.h>

#include "kernels/number.h"

#define SLICE 1024 /* elements converted at a time */

/* `count` elements from `at` on, as float32. */
static void read_slice(const char *at, enum kern_dtype dtype, int count, float *out) {
    size_t size = kern_dtype_bytes(dtype);
    for (int i = 0; i < count; i++) out[i] = number_element(at + (size_t)i * size, dtype);
}

/* The largest magnitude; not finite if any number is not. */
static float largest(const float *x, int count) {
    uint32_t most = 0; /* magnitudes are ordered as their bits are, NaN last */
    for (int i = 0; i < count; i++) {
        uint32_t bits = number_bits(x[i]) & 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    return number_from_bits(most);
}

static float row_scale(const char *row, const struct kern_matrix *m) {
    float slice[SLICE], most = 0;
    size_t size = kern_dtype_bytes(m->dtype);
    for (int64_t i = 0; i < m->cols && isfinite(most); i += SLICE) {
        int count = m->cols - i < SLICE ? (int)(m->cols - i) : SLICE;
        read_slice(row + (size_t)i * size, m->dtype, count, slice);
        float here = largest(slice, count);
        if (!(here <= most)) most = here;
    }
    return isfinite(most) ? quantize_scale(most) : most;
}

static void row_codes(const char *row, const struct kern_matrix *m, float scale, uint8_t *codes) {
    float slice[SLICE], by = 1 / scale;
    size_t size = kern_dtype_bytes(m->dtype);
    for (int64_t i = 0; i < m->cols; i += SLICE) {
        int count = m->cols - i < SLICE ? (int)(m->cols - i) : SLICE;
        read_slice(row + (size_t)i * size, m->dtype, count, slice);
        for (int k = 0; k < count; k++) codes[i + k] = number_to_e4m3(slice[k] * by);
    }
}

int quantize_rows(const struct kern_matrix *from, uint8_t *codes, float *scales,
                  struct fault *fault) {
    int64_t stride = from->stride > 0 ? from->stride : from->cols;
    for (int64_t r = 0; r < from->rows; r++) {
        const char *row =
            (const char *)from->data + (size_t)(r * stride) * kern_dtype_bytes(from->dtype);
        scales[r] = row_scale(row, from);
        if (!isfinite(scales[r]))
            return fault_set(fault, ERR_INVALID, "",
                             "row %lld has a number that is not finite, which has no E4M3 scale",
                             (long long)r);
        row_codes(row, from, scales[r], codes + r * from->cols);
    }
    return 0;
}
