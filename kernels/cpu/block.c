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

const struct cpu_form cpu_forms[CPU_FORMS] = {
#define X(name, ...) {__VA_ARGS__},
    CPU_FORM_MAP(X)
#undef X
};

/* Returns the bytes of a panel, in whole cache lines. */
size_t cpu_block_panel_bytes(const struct kern_weight *w) {
    const size_t groups = ((size_t)w->blocks + BLOCK_GROUP - 1) / BLOCK_GROUP;
    const size_t bytes = cpu_block_units_at(w) + groups * cpu_block_units(w->form);
    return (bytes + 63) / 64 * 64;
}

/* ---- Factors ---- */

static bool exact_half(float x) {
    return number_bits(number_from_f16(number_to_f16(x))) == number_bits(x);
}

static char *panel_of(const struct kern_weight *w, int64_t row) {
    return w->data + (size_t)(row / PANEL) * w->panel_bytes;
}

/* Returns the address of a factor; `which`: its place in a block of a panel. */
static char *factor_at(const struct kern_weight *w, int64_t row, int64_t block, int which) {
    const size_t size = cpu_block_factors(w) / (size_t)(w->form->parts + w->form->least);
    return panel_of(w, row) + (size_t)w->blocks * cpu_block_codes(w) +
           (size_t)block * cpu_block_factors(w) + (size_t)which * size +
           (size_t)(row % PANEL) * (size / PANEL);
}

/* Returns the address of a unit, of scales or of terms. */
static char *unit_at(const struct kern_weight *w, int64_t row, int64_t block, bool least) {
    return panel_of(w, row) + cpu_block_units_at(w) +
           (size_t)(block / BLOCK_GROUP) * cpu_block_units(w->form) +
           ((least ? PANEL : 0) + (size_t)(row % PANEL)) * 2;
}

/* Returns the whole number which, times the unit, may be the factor; with 0 as the unit 0. */
static float multiple(float factor, float unit) {
    return unit == 0 ? 0 : rintf(factor / unit);
}

static bool is_multiple(float factor, float unit) {
    const float number = multiple(factor, unit);
    return number >= INT8_MIN && number <= INT8_MAX && number * unit == factor;
}

/* `unit`: of grouped forms. */
static void put_factor(const struct kern_weight *w, char *at, float x, float unit) {
    const uint16_t half = number_to_f16(x);
    if (w->form->factors == CPU_GROUPED)
        *at = (char)(int8_t)multiple(x, unit);
    else if (w->form->factors == CPU_POWERS)
        *at = (char)(number_bits(x) >> 23);
    else if (w->halves)
        memcpy(at, &half, sizeof half);
    else
        memcpy(at, &x, sizeof x);
}

static float get_factor(const struct kern_weight *w, const char *at, float unit) {
    if (w->form->factors == CPU_GROUPED) return (float)(int8_t)*at * unit;
    if (w->form->factors == CPU_POWERS) return number_from_bits((uint32_t)(uint8_t)*at << 23);
    return number_element(at, w->halves ? KERN_F16 : KERN_F32);
}

/* ---- Codes ---- */

/* Returns the place of n among the values, or 16. */
static int place_of(enum cpu_values values, int n) {
    int i = 0;
    while (i < 16 && cpu_values[values][i] != n) i++;
    return i;
}

/* Returns the codes of an output's block. */
static uint8_t *packed_codes(const struct kern_weight *w, int64_t row, int64_t block) {
    return (uint8_t *)panel_of(w, row) + (size_t)block * cpu_block_codes(w) +
           (size_t)(row % PANEL) * 4;
}

static void put_codes(const struct cpu_form *form, uint8_t *to, const int8_t *n) {
    for (int v = 0; v < form->bits; v++) memset(to + (ptrdiff_t)64 * v, 0, 4);
    for (int i = 0; i < KERN_BLOCK; i++) {
        const struct cpu_quad at = cpu_quad_of(form->bits, form->parts, i / 4);
        const int code = form->values ? place_of(form->values, n[i]) : n[i] + form->offset;
        CHECK(code >= 0 && code >> form->bits == 0);
        to[64 * at.low_vector + i % 4] |= (uint8_t)((code & ((1 << at.low) - 1)) << at.low_bit);
        if (at.high) to[64 * at.high_vector + i % 4] |= (uint8_t)(code >> at.low << at.high_bit);
    }
}

static void get_codes(const struct cpu_form *form, const uint8_t *from, int8_t *n) {
    for (int i = 0; i < KERN_BLOCK; i++) {
        const struct cpu_quad at = cpu_quad_of(form->bits, form->parts, i / 4);
        int code = from[64 * at.low_vector + i % 4] >> at.low_bit & ((1 << at.low) - 1);
        if (at.high)
            code |= (from[64 * at.high_vector + i % 4] >> at.high_bit & ((1 << at.high) - 1))
                    << at.low;
        n[i] = form->values ? cpu_values[form->values][code] : (int8_t)(code - form->offset);
    }
}

/* Are the factors multiples of the units that the first block of the group has? */
static bool is_of_group(const struct block *block, const struct block *first, bool is_first) {
    for (int i = 0; i < 2; i++)
        if (block->unit[i] != first->unit[i] || (is_first && !exact_half(block->unit[i])))
            return false;
    return is_multiple(block->scale[0], block->unit[0]) &&
           is_multiple(block->scale[1], block->unit[0]) &&
           (block->least == 0 || is_multiple(block->least, block->unit[1]));
}

/* Is it a finite power of two that is no subnormal number, or 0? */
static bool is_power(float x) {
    const uint32_t bits = number_bits(x);
    return !(bits & 0x807fffffu) && bits < 0x7f800000u;
}

void cpu_block_look(struct cpu_needs *needs, const struct kern_weight *w,
                    const struct block *from) {
    for (int64_t b = 0; b < w->blocks; b++) {
        const struct block block = from[b], *first = &from[b - b % BLOCK_GROUP];
        int lowest = needs->lowest, highest = needs->highest;
        for (int i = 0; i < KERN_BLOCK; i++) {
            lowest = block.n[i] < lowest ? block.n[i] : lowest;
            highest = block.n[i] > highest ? block.n[i] : highest;
        }
        needs->lowest = lowest, needs->highest = highest;
        for (enum cpu_values v = CPU_IQ4; v < CPU_VALUES; v++)
            for (int i = 0; i < KERN_BLOCK && !needs->others[v]; i++)
                needs->others[v] = place_of(v, block.n[i]) == 16;
        if (!needs->between)
            needs->between = !is_power(block.scale[0]) || !is_power(block.scale[1]);
        if (!needs->single)
            needs->single = !exact_half(block.scale[0]) || !exact_half(block.scale[1]) ||
                            !exact_half(block.least);
        if (!needs->apart) needs->apart = !is_of_group(&block, first, b % BLOCK_GROUP == 0);
    }
}

void cpu_needs_add(struct cpu_needs *to, const struct cpu_needs *other) {
    to->lowest = other->lowest < to->lowest ? other->lowest : to->lowest;
    to->highest = other->highest > to->highest ? other->highest : to->highest;
    to->single = to->single || other->single;
    to->apart = to->apart || other->apart;
    to->between = to->between || other->between;
    for (int v = 0; v < CPU_VALUES; v++) to->others[v] = to->others[v] || other->others[v];
}

void cpu_block_choose(struct kern_weight *w, const struct cpu_needs *needs) {
    const int parts = block_is_split(w->dtype) ? 2 : 1;
    const struct cpu_form *best = NULL;
    size_t least = SIZE_MAX;
    w->halves = !needs->single;
    for (int i = 0; i < CPU_FORMS; i++) {
        const struct cpu_form *f = w->form = &cpu_forms[i];
        const bool codes = f->values ? !needs->others[f->values]
                                     : needs->lowest + f->offset >= 0 &&
                                           (needs->highest + f->offset) >> f->bits == 0;
        const bool factors = f->factors == CPU_GROUPED  ? !needs->apart
                             : f->factors == CPU_POWERS ? !needs->between
                                                        : true;
        const bool holds =
            codes && factors && f->least == block_has_least(w->dtype) && f->parts == parts;
        if (!holds || cpu_block_panel_bytes(w) >= least) continue;
        best = f;
        least = cpu_block_panel_bytes(w);
    }
    CHECK(best);
    w->form = best;
}

void cpu_block_pack(struct kern_weight *w, int64_t row, const struct block *from) {
    const struct cpu_form *form = w->form;
    for (int64_t b = 0; b < w->blocks; b++) {
        const struct block block = from[b];
        const uint16_t units[2] = {number_to_f16(block.unit[0]), number_to_f16(block.unit[1])};
        put_codes(form, packed_codes(w, row, b), block.n);
        for (int i = 0; i < form->parts; i++)
            put_factor(w, factor_at(w, row, b, i), block.scale[i], block.unit[0]);
        if (form->least)
            put_factor(w, factor_at(w, row, b, form->parts), block.least, block.unit[1]);
        if (form->factors != CPU_GROUPED || b % BLOCK_GROUP) continue;
        memcpy(unit_at(w, row, b, false), &units[0], sizeof units[0]);
        if (form->least) memcpy(unit_at(w, row, b, true), &units[1], sizeof units[1]);
    }
}

struct block cpu_block_at(const struct kern_weight *w, int64_t row, int64_t block) {
    const struct cpu_form *form = w->form;
    struct block out = {.least = BLOCK_NO_LEAST};
    const bool grouped = form->factors == CPU_GROUPED;
    if (grouped) out.unit[0] = number_element(unit_at(w, row, block, false), KERN_F16);
    if (grouped && form->least)
        out.unit[1] = number_element(unit_at(w, row, block, true), KERN_F16);
    for (int i = 0; i < 2; i++)
        out.scale[i] =
            get_factor(w, factor_at(w, row, block, form->parts == 2 ? i : 0), out.unit[0]);
    if (form->least) out.least = get_factor(w, factor_at(w, row, block, form->parts), out.unit[1]);
    get_codes(form, packed_codes(w, row, block), out.n);
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
