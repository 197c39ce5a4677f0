/* Row operations over simd.h, and the table of the path. */
#include "kernels/cpu/simd.h"
#include "kernels/cpu/vec.h"

/* Visits the vectors of a row: whole ones, then one whose remaining lanes are zero. */
#define EACH_VECTOR(i, n, dim)                                                                     \
    for (int i = 0, n; n = (dim)-i < 16 ? (dim)-i : 16, i < (dim); i += 16)

static float sum_of_squares(const float *x, int dim) {
    v16 sum = v16_set(0);
    EACH_VECTOR(i, n, dim) {
        v16 a = n == 16 ? v16_load(x + i) : v16_load_n(x + i, n);
        sum = v16_fma(a, a, sum);
    }
    return v16_sum(sum);
}

void VEC(rms_norm)(float *y, const float *x, const float *weight, int dim, float eps) {
    v16 scale = v16_set(1.0f / sqrtf(sum_of_squares(x, dim) / (float)dim + eps));
    EACH_VECTOR(i, n, dim) {
        if (n == 16) {
            v16_store(y + i, v16_mul(v16_mul(v16_load(x + i), scale), v16_load(weight + i)));
        } else {
            v16 a = v16_mul(v16_mul(v16_load_n(x + i, n), scale), v16_load_n(weight + i, n));
            v16_store_n(y + i, a, n);
        }
    }
}

static v16 silu_times(v16 gate, v16 up) {
    v16 e = v16_exp(v16_sub(v16_set(0), gate));
    return v16_mul(v16_div(gate, v16_add(v16_set(1), e)), up);
}

/* g * sigmoid(2 sqrt(2 / pi) (g + 0.044715 g^3)) */
static v16 gelu_times(v16 gate, v16 up) {
    v16 cubic = v16_mul(v16_mul(gate, gate), v16_mul(gate, v16_set(0.044715f)));
    v16 inner = v16_mul(v16_set(1.59576912f), v16_add(gate, cubic));
    v16 e = v16_exp(v16_sub(v16_set(0), inner));
    return v16_mul(v16_div(gate, v16_add(v16_set(1), e)), up);
}

/* g sigmoid(1.702 g) (u + 1), clamped. */
static v16 clamped_times(v16 gate, v16 up) {
    gate = v16_min(v16_set(7), gate); /* in this order a NaN stays one */
    up = v16_max(v16_set(-7), v16_min(v16_set(7), up));
    v16 e = v16_exp(v16_mul(gate, v16_set(-1.702f)));
    return v16_mul(v16_div(gate, v16_add(v16_set(1), e)), v16_add(up, v16_set(1)));
}

static v16 sigmoid_times(v16 gate, v16 up) {
    return v16_div(up, v16_add(v16_set(1), v16_exp(v16_sub(v16_set(0), gate))));
}

/* The distribution's function is erfc(z) / 2 at z = |gate| / sqrt(2), or 1 less that above 0. erfc
 * is e^(-z^2) times a polynomial in 1 / (1 + p z): Abramowitz and Stegun, Handbook of Mathematical
 * Functions, 7.1.26, within 1.5e-7. */
static v16 normal_times(v16 gate, v16 up) {
    static const float a[] = {1.061405429f, -1.453152027f, 1.421413741f, -0.284496736f,
                              0.254829592f};
    const v16 size = v16_max(gate, v16_sub(v16_set(0), gate));
    const v16 z = v16_mul(size, v16_set(0.707106781f));
    const v16 t = v16_div(v16_set(1), v16_fma(z, v16_set(0.3275911f), v16_set(1)));
    v16 sum = v16_set(a[0]);
    for (int i = 1; i < 5; i++) sum = v16_fma(sum, t, v16_set(a[i]));
    const v16 tail = v16_mul(v16_mul(v16_mul(sum, t), v16_exp(v16_sub(v16_set(0), v16_mul(z, z)))),
                             v16_set(0.5f));
    /* Behind the mean the tail is taken from 1, before it not. A NaN stays one. */
    const v16 behind = v16_div(v16_max(gate, v16_set(0)), v16_max(size, v16_set(1e-30f)));
    const v16 value = v16_fma(behind, v16_sub(v16_set(1), v16_add(tail, tail)), tail);
    return v16_mul(v16_add(value, v16_sub(gate, gate)), up);
}

static v16 gated(v16 gate, v16 up, enum kern_activation activation) {
    if (activation == KERN_NORMAL) return normal_times(gate, up);
    if (activation == KERN_GELU) return normal_times(gate, v16_mul(gate, up));
    if (activation == KERN_SIGMOID) return sigmoid_times(gate, up);
    if (activation == KERN_RELU) return v16_mul(v16_max(v16_set(0), gate), up); /* keeps NaN */
    if (activation == KERN_SWIGLU_CLAMPED) return clamped_times(gate, up);
    return activation == KERN_SILU ? silu_times(gate, up) : gelu_times(gate, up);
}

void VEC(glu)(float *y, const float *gate, const float *up, int count,
              enum kern_activation activation) {
    EACH_VECTOR(i, n, count) {
        v16 g = n == 16 ? v16_load(gate + i) : v16_load_n(gate + i, n);
        v16 u = n == 16 ? v16_load(up + i) : v16_load_n(up + i, n);
        v16 value = gated(g, u, activation);
        if (n == 16)
            v16_store(y + i, value);
        else
            v16_store_n(y + i, value, n);
    }
}

static void vec_ops_rotate(float *a, float *b, const float *cosine, const float *sine, int n) {
    v16 x = v16_load_n(a, n), y = v16_load_n(b, n);
    v16 c = v16_load_n(cosine, n), s = v16_load_n(sine, n);
    v16_store_n(a, v16_sub(v16_mul(x, c), v16_mul(y, s)), n);
    v16_store_n(b, v16_add(v16_mul(y, c), v16_mul(x, s)), n);
}

void VEC(rope)(float *x, int half, const float *cosine, const float *sine, const float *norm,
               float eps) {
    if (norm) VEC(rms_norm)(x, x, norm, 2 * half, eps);
    EACH_VECTOR(i, n, half) {
        if (n < 16) {
            vec_ops_rotate(x + i, x + half + i, cosine + i, sine + i, n);
            continue;
        }
        v16 a = v16_load(x + i), b = v16_load(x + half + i);
        v16 c = v16_load(cosine + i), s = v16_load(sine + i);
        v16_store(x + i, v16_sub(v16_mul(a, c), v16_mul(b, s)));
        v16_store(x + half + i, v16_add(v16_mul(b, c), v16_mul(a, s)));
    }
}

void VEC(write_row)(void *row, const float *from, int count, enum kern_dtype dtype) {
    size_t size = kern_dtype_bytes(dtype);
    EACH_VECTOR(i, n, count) {
        char *to = (char *)row + (size_t)i * size;
        if (n < 16 || dtype == KERN_F32)
            number_write_row(to, from + i, n, dtype);
        else if (dtype == KERN_BF16)
            v16_store_bf16((uint16_t *)to, v16_load(from + i));
        else
            v16_store_e4m3((uint8_t *)to, v16_load(from + i));
    }
}

#define VEC_TEXT_(path) "cpu-" #path
#define VEC_TEXT(path)  VEC_TEXT_(path)

const struct cpu_kernels VEC(kernels) = {
    .name = VEC_TEXT(CPU_PATH),
    .layout_bf16 = CPU_PANEL_PAIRS,
    .layout_e4m3 = CPU_PANEL_E4M3,
    .layout_other = CPU_PANEL_F32,
    .rms_norm = VEC(rms_norm),
    .glu = VEC(glu),
    .rope = VEC(rope),
    .write_row = VEC(write_row),
    .delta = VEC(delta),
    .matmul = VEC(matmul),
    .matmul_scratch = VEC(matmul_scratch),
    .math = &VEC(math),
    .attend_scratch = VEC(attend_scratch),
    .attend_lanes = VEC(attend_lanes),
    .attend = VEC(attend),
};
