/* Conversions from and to e4m3: all codes, and every place where rounding changes its mind, against
 * the format's definition; the paths of the CPU backend against kernels/number.h. */
#include <criterion/criterion.h>

#include "tests/unit/kernels/paths.h"

/* The value of a code below 0x7f: OCP 8-bit floating point, section 5.1. */
static double worth(int code) {
    int exponent = code >> 3, mantissa = code & 7;
    return exponent ? ldexp(1 + mantissa / 8.0, exponent - 7) : ldexp(mantissa / 8.0, -6);
}

/* The code nearest to x >= 0, by looking at all: ties to the even mantissa, the largest beyond. */
static int nearest(double x) {
    int best = 0;
    for (int code = 1; code < 0x7f; code++) {
        double old = fabs(worth(best) - x), now = fabs(worth(code) - x);
        if (now < old || (now == old && code % 2 == 0)) best = code;
    }
    return best;
}

Test(number, every_code_of_e4m3) {
    for (int code = 0; code < 0x7f; code++) {
        cr_assert_float_eq((double)number_from_e4m3((uint8_t)code), worth(code), 0, "%d", code);
        cr_assert_float_eq((double)number_from_e4m3((uint8_t)(code | 0x80)), -worth(code), 0);
        cr_assert_eq(signbit(number_from_e4m3((uint8_t)(code | 0x80))) != 0, true);
        cr_assert_eq(number_to_e4m3((float)worth(code)), code);
        cr_assert_eq(number_to_e4m3(-(float)worth(code)), code | 0x80);
    }
    cr_assert(isnan(number_from_e4m3(0x7f)) && isnan(number_from_e4m3(0xff)));
    cr_assert_float_eq((double)number_from_e4m3(0x7e), 448, 0);
    cr_assert_float_eq((double)number_from_e4m3(1), 0x1p-9, 0);
}

static void check_rounding(float x) {
    int want = nearest((double)x);
    cr_assert_eq(number_to_e4m3(x), want, "%a: %d, not %d", (double)x, number_to_e4m3(x), want);
    cr_assert_eq(number_to_e4m3(-x), want | 0x80, "%a", (double)-x);
}

Test(number, e4m3_takes_the_nearest) {
    for (int code = 0; code < 0x7e; code++) {
        float middle = (float)((worth(code) + worth(code + 1)) / 2);
        check_rounding(middle);
        check_rounding(nextafterf(middle, 0));
        check_rounding(nextafterf(middle, 1000));
        check_rounding(nextafterf((float)worth(code), 1000));
    }
    for (uint32_t bits = 0; bits < 0x7f800000u; bits += 0x7fedb)
        check_rounding(number_from_bits(bits));
}

Test(number, e4m3_saturates) {
    static const float large[] = {448, 463.9f, 464, 464.1f, 480, 500, 1e30f, 3.4e38f, INFINITY};
    for (size_t i = 0; i < sizeof large / sizeof *large; i++) {
        cr_assert_eq(number_to_e4m3(large[i]), 0x7e);
        cr_assert_eq(number_to_e4m3(-large[i]), 0xfe);
    }
    cr_assert_eq(number_to_e4m3(NAN), 0x7f);
    cr_assert_eq(number_to_e4m3(-NAN), 0x7f);
    cr_assert_eq(number_to_e4m3(0x1p-149f), 0);
    cr_assert_eq(number_to_e4m3(-0x1p-149f), 0x80);
}

/* Every number, halfway to the next, and next to that. */
Test(number, float16) {
    for (uint32_t code = 0; code < 0x7c00; code++) {
        float x = number_from_f16((uint16_t)code), next = number_from_f16((uint16_t)(code + 1));
        cr_assert_eq(number_to_f16(x), code);
        cr_assert_eq(number_to_f16(-x), code | 0x8000);
        if (code == 0x7bff) next = 65536;
        float half = x + (next - x) / 2;
        cr_assert_eq(number_to_f16(half), code + (code & 1), "%x", code);
        cr_assert_eq(number_to_f16(nextafterf(half, 0)), code, "%x", code);
        cr_assert_eq(number_to_f16(nextafterf(half, INFINITY)), code + 1, "%x", code);
    }
    cr_assert_eq(number_to_f16(INFINITY), 0x7c00);
    cr_assert_eq(number_to_f16(-1e30f), 0xfc00);
    cr_assert_eq(number_to_f16(NAN) & 0x7fff, 0x7e00);
}

static const struct cpu_kernels *kernels_of(int path) {
    struct kern *kern = path_open(path, 1);
    if (!kern) return NULL;
    const struct cpu_kernels *kernels = ((struct cpu *)kern)->kernels;
    kern->ops->close(kern);
    return kernels;
}

/* Element by element, as products with unit vectors. */
static void check_reading(const struct cpu_kernels *kernels, const char *row, int count,
                          enum kern_dtype dtype) {
    for (int i = 0; i < count; i++) {
        float unit[512] = {0}, got;
        float want = number_element(row + (size_t)i * kern_dtype_bytes(dtype), dtype);
        unit[i] = 1;
        kernels->math->dots(&got, 1, unit, 1, (struct cpu_rows){row, NULL, count, dtype, count}, 1);
        cr_assert(got == want, "%s dtype %d: %g not %g", kernels->name, dtype, (double)got,
                  (double)want);
    }
}

static void check_path(const struct cpu_kernels *kernels, const float *from, int count,
                       enum kern_dtype dtype) {
    _Alignas(64) char want[512 * 4], got[512 * 4];
    const char guard = 77;
    size_t size = (size_t)count * kern_dtype_bytes(dtype);
    number_write_row(want, from, count, dtype);
    got[size] = guard;
    kernels->write_row(got, from, count, dtype);
    cr_assert_eq(memcmp(want, got, size), 0, "%s: %d of dtype %d", kernels->name, count, dtype);
    cr_assert_eq(got[size], guard);
}

/* All codes but NaN, then a row with one NaN. */
Test(number, every_path_reads_what_is_there) {
    for (int path = 0; path < PATH_COUNT; path++) {
        const struct cpu_kernels *kernels = kernels_of(path);
        if (!kernels) continue;
        char codes[254];
        for (int i = 0; i < 254; i++) codes[i] = (char)(i < 127 ? i : i + 1);
        check_reading(kernels, codes, 254, KERN_E4M3);
        for (int count = 1; count < 40; count++)
            check_reading(kernels, codes + 254 - count, count, KERN_E4M3);
        for (int i = 0; i < 2; i++) {
            float ones[254], got;
            for (int d = 0; d < 254; d++) ones[d] = 1;
            codes[200 * i] = (char)(i ? 0xff : 0x7f);
            kernels->math->dots(&got, 1, ones, 1,
                                (struct cpu_rows){codes + 100 * i, NULL, 150, KERN_E4M3, 150}, 1);
            cr_assert(isnan(got), "%s: NaN became %g", kernels->name, (double)got);
        }
    }
}

/* Codes and their neighbourhoods, in rows of many lengths. */
Test(number, every_path_writes_alike) {
    for (int path = 0; path < PATH_COUNT; path++) {
        const struct cpu_kernels *kernels = kernels_of(path);
        if (!kernels) continue;
        for (int part = 0; part < 8; part++) {
            float x[508];
            for (int i = 0; i < 254; i++) {
                float value = number_from_e4m3((uint8_t)(i < 127 ? i : i + 1));
                float off = 1 + (float)(part % 4) * 0.0208334f;
                x[2 * i] = part < 4 ? value * off : nextafterf(value * 1.0625f, part % 2 ? 0 : 999);
                x[2 * i + 1] = part == 0 ? NAN : value * 0x1p-3f;
            }
            x[17] = INFINITY, x[18] = -INFINITY, x[19] = 0x1p-140f, x[20] = 464, x[21] = -1e9f;
            for (int count = 1; count <= 508; count += count < 34 ? 1 : 79)
                check_path(kernels, x + 508 - count, count, KERN_E4M3);
            check_path(kernels, x, 508, KERN_E4M3);
            check_path(kernels, x, 500, KERN_BF16);
            check_path(kernels, x, 500, KERN_F32);
        }
    }
}
