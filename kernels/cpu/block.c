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
    if (!strcmp(path, "cpu-neon"))
        return isa.i8mm ? CPU_IF_BUILT(CPU_HAS_I8MM, &cpu_block_kernels_i8mm)
                        : CPU_IF_BUILT(CPU_HAS_NEON, &cpu_block_kernels_neon);
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

/* Returns how many bytes a panel takes: whole cache lines. */
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

/* Returns the address of a factor: a half's scale or its term. */
static char *factor_at(const struct kern_weight *w, int64_t row, int64_t block, int half,
                       bool least) {
    const int which = half % w->form->parts + (least ? w->form->parts : 0);
    const size_t place =
        (size_t)(which % cpu_factor_places(w->form)) * PANEL + (size_t)(row % PANEL);
    return panel_of(w, row) + (size_t)w->blocks * cpu_block_codes(w) +
           (size_t)block * cpu_block_factors(w) + place * cpu_factor_bytes(w);
}

/* Returns the address of the unit of scales or, if `least`, that of terms. */
static char *block_unit_at(const struct kern_weight *w, int64_t row, int64_t block, bool least) {
    const size_t each = cpu_block_units(w->form) / (size_t)(1 + w->form->least);
    return panel_of(w, row) + cpu_block_units_at(w) +
           (size_t)(block / BLOCK_GROUP) * cpu_block_units(w->form) + (least ? each : 0) +
           (size_t)(row % PANEL) * (each / PANEL);
}

static void put_unit(const struct kern_weight *w, char *at, float x) {
    const uint16_t half = number_to_f16(x);
    if (w->form->factors == CPU_E4M3)
        memcpy(at, &x, sizeof x);
    else
        memcpy(at, &half, sizeof half);
}

static float get_unit(const struct kern_weight *w, const char *at) {
    return number_element(at, w->form->factors == CPU_E4M3 ? KERN_F32 : KERN_F16);
}

/* Returns the whole number whose product with the unit is nearest the factor; 0 if the unit is 0.
 */
static float multiple(float factor, float unit) {
    return unit == 0 ? 0 : rintf(factor / unit);
}

static bool is_multiple(float factor, float unit, int lowest, int highest) {
    const float number = multiple(factor, unit);
    return factor == 0 ||
           (number >= (float)lowest && number <= (float)highest && number * unit == factor);
}

/* Writes a factor of a form; `unit` counts only in forms that have units. The scale of a pair must
 * be written before its term, which shares its byte. */
static void put_factor(const struct kern_weight *w, char *at, float x, float unit, bool least) {
    const uint16_t half = number_to_f16(x);
    if (w->form->factors == CPU_GROUPED)
        *at = (char)(int8_t)multiple(x, unit);
    else if (w->form->factors == CPU_PAIRED)
        *at = (char)(least ? *at | (int)multiple(x, unit) << 4 : (int)multiple(x, unit));
    else if (w->form->factors == CPU_E4M3)
        *at = (char)number_to_e4m3(unit == 0 ? 0 : x / unit);
    else if (w->form->factors == CPU_POWERS)
        *at = (char)(number_bits(x) >> 23);
    else if (w->halves)
        memcpy(at, &half, sizeof half);
    else
        memcpy(at, &x, sizeof x);
}

static float get_factor(const struct kern_weight *w, const char *at, float unit, bool least) {
    if (w->form->factors == CPU_GROUPED) return (float)(int8_t)*at * unit;
    if (w->form->factors == CPU_PAIRED) return (float)((uint8_t)*at >> (least ? 4 : 0) & 15) * unit;
    if (w->form->factors == CPU_E4M3) return number_from_e4m3((uint8_t)*at) * unit;
    if (w->form->factors == CPU_POWERS) return number_from_bits((uint32_t)(uint8_t)*at << 23);
    return number_element(at, w->halves ? KERN_F16 : KERN_F32);
}

/* ---- Codes ---- */

/* Returns which of the sixteen values n is; 16: none. */
static int value_place(enum cpu_values values, int n) {
    int i = 0;
    while (i < 16 && cpu_values[values][i] != n) i++;
    return i;
}

/* Returns where the codes of output `row` begin in a block. */
static uint8_t *packed_codes(const struct kern_weight *w, int64_t row, int64_t block) {
    return (uint8_t *)panel_of(w, row) + (size_t)block * cpu_block_codes(w) +
           (size_t)(row % PANEL) * 4;
}

/* Says where a form puts each code. Every start packs all weights, so put_codes moves four codes at
 * once and looks nothing up in the form. */
struct code_places {
    uint8_t of_value[256]; /* forms with values: the code of each number; 16: the number has none */
    struct cpu_quad quads[KERN_BLOCK / 4];
};

static void find_places(struct code_places *places, const struct cpu_form *form) {
    memset(places->of_value, 16, sizeof places->of_value);
    for (int i = 16; form->values && i-- > 0;)
        places->of_value[(uint8_t)cpu_values[form->values][i]] = (uint8_t)i;
    for (int i = 0; i < KERN_BLOCK / 4; i++)
        places->quads[i] = cpu_quad_of(form->bits, form->parts, i);
}

static void put_codes(const struct cpu_form *form, const struct code_places *places, uint8_t *to,
                      const int8_t *n) {
    uint8_t codes[KERN_BLOCK];
    uint32_t vectors[8] = {0};
    unsigned beyond = 0;
    for (int i = 0; i < KERN_BLOCK; i++) {
        const int code = form->values ? places->of_value[(uint8_t)n[i]] : n[i] + form->offset;
        beyond |= (unsigned)code >> form->bits;
        codes[i] = (uint8_t)code;
    }
    CHECK(beyond == 0);
    /* Four bytes can be shifted at once, because no code grows beyond its byte. */
    for (int i = 0; i < KERN_BLOCK / 4; i++) {
        const struct cpu_quad at = places->quads[i];
        uint32_t four;
        memcpy(&four, codes + (ptrdiff_t)4 * i, sizeof four);
        const uint32_t low = four & 0x01010101u * ((1u << at.low) - 1);
        vectors[at.low_vector] |= low << at.low_bit;
        if (at.high) vectors[at.high_vector] |= (four ^ low) >> at.low << at.high_bit;
    }
    for (int v = 0; v < form->bits; v++)
        memcpy(to + (ptrdiff_t)64 * v, &vectors[v], sizeof vectors[v]);
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

/* Returns whether the block's factors are multiples of the units of its group's first block, within
 * the given range. */
static bool is_of_group(const struct block *block, const struct block *first, int lowest,
                        int highest) {
    for (int i = 0; i < 2; i++)
        if (block->unit[i] != first->unit[i] || !exact_half(block->unit[i]) ||
            !is_multiple(block->scale[i], block->unit[0], lowest, highest) ||
            !is_multiple(block->least[i], block->unit[1], lowest, highest))
            return false;
    return true;
}

static bool is_e4m3_of(float factor, float unit) {
    return factor == 0 ||
           (unit != 0 && number_from_e4m3(number_to_e4m3(factor / unit)) * unit == factor);
}

/* Returns whether x is 0 or a power of two that is neither infinite nor subnormal. */
static bool is_power(float x) {
    const uint32_t bits = number_bits(x);
    return !(bits & 0x807fffffu) && bits < 0x7f800000u;
}

/* Returns whether factors of this kind can represent those of the block; CPU_FLOATS: as float16.
 * `first` is the first block of its group. */
static bool factors_fit(enum cpu_factors factors, const struct block *block,
                        const struct block *first) {
    switch (factors) {
    case CPU_FLOATS:
        return exact_half(block->scale[0]) && exact_half(block->scale[1]) &&
               exact_half(block->least[0]) && exact_half(block->least[1]);
    case CPU_GROUPED:
        return is_of_group(block, first, INT8_MIN, INT8_MAX);
    case CPU_PAIRED:
        return is_of_group(block, first, 0, 15);
    case CPU_E4M3:
        return block->unit[0] == first->unit[0] && is_e4m3_of(block->scale[0], block->unit[0]) &&
               is_e4m3_of(block->scale[1], block->unit[0]);
    case CPU_POWERS:
        return is_power(block->scale[0]) && is_power(block->scale[1]);
    default:
        return false;
    }
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
                needs->others[v] = value_place(v, block.n[i]) == 16;
        for (enum cpu_factors f = CPU_FLOATS; f < CPU_FACTOR_KINDS; f++)
            if (!needs->unfit[f]) needs->unfit[f] = !factors_fit(f, &block, first);
    }
}

void cpu_needs_add(struct cpu_needs *to, const struct cpu_needs *other) {
    to->lowest = other->lowest < to->lowest ? other->lowest : to->lowest;
    to->highest = other->highest > to->highest ? other->highest : to->highest;
    for (int f = 0; f < CPU_FACTOR_KINDS; f++) to->unfit[f] = to->unfit[f] || other->unfit[f];
    for (int v = 0; v < CPU_VALUES; v++) to->others[v] = to->others[v] || other->others[v];
}

void cpu_block_choose(struct kern_weight *w, const struct cpu_needs *needs) {
    const int parts = block_is_split(w->dtype) ? 2 : 1;
    const struct cpu_form *best = NULL;
    size_t least = SIZE_MAX;
    w->halves = !needs->unfit[CPU_FLOATS];
    for (int i = 0; i < CPU_FORMS; i++) {
        const struct cpu_form *f = w->form = &cpu_forms[i];
        const bool codes = f->values ? !needs->others[f->values]
                                     : needs->lowest + f->offset >= 0 &&
                                           (needs->highest + f->offset) >> f->bits == 0;
        const bool factors = f->factors == CPU_FLOATS || !needs->unfit[f->factors];
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
    struct code_places places;
    find_places(&places, form);
    for (int64_t b = 0; b < w->blocks; b++) {
        const struct block block = from[b];
        put_codes(form, &places, packed_codes(w, row, b), block.n);
        for (int i = 0; i < form->parts; i++) {
            put_factor(w, factor_at(w, row, b, i, false), block.scale[i], block.unit[0], false);
            if (form->least)
                put_factor(w, factor_at(w, row, b, i, true), block.least[i], block.unit[1], true);
        }
        if (!cpu_block_units(form) || b % BLOCK_GROUP) continue;
        put_unit(w, block_unit_at(w, row, b, false), block.unit[0]);
        if (form->least) put_unit(w, block_unit_at(w, row, b, true), block.unit[1]);
    }
}

struct block cpu_block_at(const struct kern_weight *w, int64_t row, int64_t block) {
    const struct cpu_form *form = w->form;
    struct block out;
    const bool has_units = cpu_block_units(form) > 0;
    block_set_factors(&out, 0, BLOCK_NO_LEAST);
    if (has_units) out.unit[0] = get_unit(w, block_unit_at(w, row, block, false));
    if (has_units && form->least) out.unit[1] = get_unit(w, block_unit_at(w, row, block, true));
    for (int i = 0; i < 2; i++) {
        out.scale[i] = get_factor(w, factor_at(w, row, block, i, false), out.unit[0], false);
        if (form->least)
            out.least[i] = get_factor(w, factor_at(w, row, block, i, true), out.unit[1], true);
    }
    get_codes(form, packed_codes(w, row, block), out.n);
    return out;
}

void cpu_block_widen(const struct kern_weight *w, int64_t panel, float *to) {
    for (int64_t b = 0; b < w->blocks; b++) {
        for (int lane = 0; lane < PANEL; lane++) { /* rows past the last are stored as zeros */
            struct block block = cpu_block_at(w, panel * PANEL + lane, b);
            float *at = to + b * KERN_BLOCK * PANEL + lane;
            for (int64_t i = 0; i < KERN_BLOCK && b * KERN_BLOCK + i < w->cols; i++)
                at[i * PANEL] = block_number(&block, (int)i);
        }
    }
}
