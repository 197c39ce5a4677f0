/* Weights in blocks: packing into panels, and back. */
#include "kernels/cpu/block.h"

#include <string.h>

#include "base/check.h"
#include "kernels/cpu/built.h"
#include "kernels/cpu/isa.h"

const struct cpu_block_kernels *cpu_block_kernels_of(const char *path) {
    struct cpu_isa isa = cpu_isa_detect();
    bool wide = !strncmp(path, "cpu-avx512", strlen("cpu-avx512")) ||
                !strncmp(path, "cpu-amx", strlen("cpu-amx"));
    if (wide && isa.vnni) return CPU_IF_BUILT(CPU_HAS_VNNI, &cpu_block_kernels_vnni);
    if (wide || !strcmp(path, "cpu-avx2"))
        return CPU_IF_BUILT(CPU_HAS_AVX2, &cpu_block_kernels_avx2);
    return CPU_IF_BUILT(CPU_HAS_PORTABLE, &cpu_block_kernels_portable);
}

size_t cpu_codes_bytes(const struct kern_weight *w, int rows, bool wide) {
    return (size_t)rows * (size_t)cpu_x_places(w, wide) *
           ((size_t)KERN_BLOCK * (wide ? 2 : 1) + sizeof(struct cpu_x_block));
}

/* Returns the bytes of a panel, in whole cache lines. */
size_t cpu_block_panel_bytes(const struct kern_weight *w) {
    size_t bytes = (size_t)w->blocks * (cpu_block_codes(w) + cpu_block_factors(w));
    return (bytes + 63) / 64 * 64;
}

/* ---- Factors ---- */

static bool exact_half(float x) {
    return number_bits(number_from_f16(number_to_f16(x))) == number_bits(x);
}

/* Returns the address of a factor; `which`: its place in a block of a panel. */
static char *factor_at(const struct kern_weight *w, int64_t row, int64_t block, int which) {
    size_t size = w->halves ? 2 : 4;
    char *panel = w->data + (size_t)(row / PANEL) * w->panel_bytes;
    return panel + (size_t)w->blocks * cpu_block_codes(w) + (size_t)block * cpu_block_factors(w) +
           ((size_t)which * PANEL + (size_t)(row % PANEL)) * size;
}

static int least_at(const struct kern_weight *w) {
    return block_is_split(w->dtype) ? 2 : 1;
}

static void put_factor(const struct kern_weight *w, char *at, float x) {
    uint16_t half = number_to_f16(x);
    if (w->halves)
        memcpy(at, &half, sizeof half);
    else
        memcpy(at, &x, sizeof x);
}

static float get_factor(const struct kern_weight *w, const char *at) {
    return number_element(at, w->halves ? KERN_F16 : KERN_F32);
}

/* ---- Codes ---- */

/* Returns the codes of an output's block: input i of 8 bits is at 64 (i / 4) + i % 4. */
static uint8_t *codes_at(const struct kern_weight *w, int64_t row, int64_t block) {
    return (uint8_t *)w->data + (size_t)(row / PANEL) * w->panel_bytes +
           (size_t)block * cpu_block_codes(w) + (size_t)(row % PANEL) * 4;
}

static void put_codes(const struct kern_weight *w, uint8_t *to, const int8_t *n, int offset) {
    if (cpu_block_bits(w->dtype) == 8) {
        for (int i = 0; i < KERN_BLOCK; i++) to[64 * (i / 4) + i % 4] = (uint8_t)(n[i] + offset);
        return;
    }
    for (int i = 0; i < KERN_BLOCK / 2; i++) {
        int low = n[i] + offset, high = n[i + KERN_BLOCK / 2] + offset;
        CHECK((low & 15) == low && (high & 15) == high);
        to[64 * (i / 4) + i % 4] = (uint8_t)(low | high << 4);
    }
}

static void get_codes(const struct kern_weight *w, const uint8_t *from, int8_t *n) {
    int offset = cpu_block_offset(w->dtype);
    for (int i = 0; i < KERN_BLOCK; i++) {
        if (cpu_block_bits(w->dtype) == 8)
            n[i] = (int8_t)(from[64 * (i / 4) + i % 4] - offset);
        else
            n[i] = (int8_t)((from[64 * (i % 16 / 4) + i % 4] >> i / 16 * 4 & 15) - offset);
    }
}

/* Converts a block to the weight's type. Q4 becomes Q4M by n + 8 and least = -8 scale, which is
 * exact. */
static struct block block_as(const struct block *block, enum kern_dtype from, enum kern_dtype to) {
    struct block out = *block;
    if (from != KERN_Q4 || to != KERN_Q4M) return out;
    for (int i = 0; i < KERN_BLOCK; i++) out.n[i] = (int8_t)(out.n[i] + 8);
    out.least = -8 * out.scale[0];
    return out;
}

bool cpu_block_halves(const struct kern_weight *w, const struct block *from,
                      enum kern_dtype dtype) {
    for (int64_t b = 0; b < w->blocks; b++) {
        struct block block = block_as(&from[b], dtype, w->dtype);
        if (!exact_half(block.scale[0]) || !exact_half(block.scale[1]) || !exact_half(block.least))
            return false;
    }
    return true;
}

void cpu_block_pack(struct kern_weight *w, int64_t row, const struct block *from,
                    enum kern_dtype dtype) {
    for (int64_t b = 0; b < w->blocks; b++) {
        struct block block = block_as(&from[b], dtype, w->dtype);
        put_codes(w, codes_at(w, row, b), block.n, cpu_block_offset(w->dtype));
        put_factor(w, factor_at(w, row, b, 0), block.scale[0]);
        if (block_is_split(w->dtype)) put_factor(w, factor_at(w, row, b, 1), block.scale[1]);
        if (block_has_least(w->dtype))
            put_factor(w, factor_at(w, row, b, least_at(w)), block.least);
    }
}

struct block cpu_block_at(const struct kern_weight *w, int64_t row, int64_t block) {
    struct block out = {.least = BLOCK_NO_LEAST};
    const int second = block_is_split(w->dtype) ? 1 : 0;
    out.scale[0] = get_factor(w, factor_at(w, row, block, 0));
    out.scale[1] = get_factor(w, factor_at(w, row, block, second));
    if (block_has_least(w->dtype)) out.least = get_factor(w, factor_at(w, row, block, least_at(w)));
    get_codes(w, codes_at(w, row, block), out.n);
    return out;
}

void cpu_block_widen(const struct kern_weight *w, int64_t panel, float *to) {
    for (int64_t b = 0; b < w->blocks; b++) {
        for (int lane = 0; lane < PANEL; lane++) { /* rows past the last are zeros in memory */
            struct block block = cpu_block_at(w, panel * PANEL + lane, b);
            float *at = to + b * KERN_BLOCK * PANEL + lane;
            for (int64_t i = 0; i < KERN_BLOCK && b * KERN_BLOCK + i < w->cols; i++)
                at[i * PANEL] = block_number(&block, (int)i);
        }
    }
}
