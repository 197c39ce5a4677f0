#include "model/packed.h"

#include <float.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "kernels/blocks.h"
#include "kernels/number.h"
#include "kernels/quantize.h"
#include "model/blocks.h"
#include "model/weights.h"

#define WORD 8 /* numbers in an I32 */

struct packed {
    enum packing_kind kind;
    const char *codes, *zeros; /* zeros NULL: all zero points are 8 */
    int less_one;              /* is added to stored zero points */
    struct tensor scales;
    int64_t rows, cols, group, groups; /* FP8: inputs of a block, and blocks side by side */
    int64_t block_rows;                /* FP8: outputs of a block */
    bool narrow;                       /* FP8: bf16 holds every product of a code and its scale */
    float unit;                        /* NVFP4: half the scale of the matrix */
};

/* The memory that the entries of a joined table refer to. */
struct packed_set {
    struct packed *matrices;
    char *names;
};

/* The tensors that a matrix of one kind consists of, by the ends of their names. */
struct parts {
    const char *type, *codes, *zeros, *scales, *index, *shape, *whole;
};

static const struct parts parts_of[] = {
    [PACKING_AWQ] = {"AWQ", ".qweight", ".qzeros", ".scales", NULL, NULL, NULL},
    [PACKING_GPTQ] = {"GPTQ", ".qweight", ".qzeros", ".scales", ".g_idx", NULL, NULL},
    [PACKING_TENSORS] = {"INT4", ".weight_packed", ".weight_zero_point", ".weight_scale",
                         ".weight_g_idx", ".weight_shape", NULL},
    [PACKING_FP8] = {"F8_E4M3", ".weight", NULL, ".weight_scale_inv", NULL, NULL, NULL},
    [PACKING_NVFP4] = {"NVFP4", ".weight", NULL, ".weight_scale", .whole = ".weight_scale_2"},
    [PACKING_NVFP4_TENSORS] = {"NVFP4", ".weight_packed", NULL, ".weight_scale",
                               .whole = ".weight_global_scale"},
};

struct joining {
    const struct packing *how;
    const struct parts *parts;
    struct tensor *tensors;
    size_t count;
    bool *used; /* [count] the entry is part of a matrix */
    struct packed_set *set;
    struct tensor *made; /* [made_count] entries for the matrices */
    size_t made_count;
    char *name; /* where the next name goes in set->names */
    struct fault *fault;
};

/* ---- Numbers ---- */

static uint32_t word_at(const char *words, int64_t index) {
    uint32_t word;
    memcpy(&word, words + (size_t)index * sizeof word, sizeof word); /* aligned to nothing */
    return word;
}

static int number_at(const char *words, int64_t index, int place) {
    return (int)(word_at(words, index) >> 4 * place & 15);
}

/* Returns the place of an output inside a word in which AWQ packs eight. */
static int awq_place(int64_t row) {
    const int in_word = (int)(row % WORD);
    return in_word / 2 + in_word % 2 * 4;
}

static int zero_at(const struct packed *p, int64_t row, int64_t group) {
    if (!p->zeros) return 8;
    if (p->kind == PACKING_TENSORS)
        return number_at(p->zeros, row / WORD * p->groups + group, (int)(row % WORD));
    const int place = p->kind == PACKING_AWQ ? awq_place(row) : (int)(row % WORD);
    return number_at(p->zeros, group * (p->rows / WORD) + row / WORD, place) + p->less_one;
}

static float scale_at(const struct packed *p, int64_t row, int64_t group) {
    const int64_t at = p->kind == PACKING_TENSORS ? row * p->groups + group : group * p->rows + row;
    float scale = 0;
    (void)tensor_read_floats(&p->scales, (size_t)at, 1, &scale);
    return scale;
}

/* Reads the numbers of KERN_BLOCK inputs, from `col` on. */
static void read_codes(const struct packed *p, int64_t row, int64_t col, int offset, int8_t *n) {
    const int place = awq_place(row);
    for (int i = 0; p->kind == PACKING_AWQ && i < KERN_BLOCK; i++)
        n[i] = (int8_t)(number_at(p->codes, (col + i) * (p->rows / WORD) + row / WORD, place) -
                        offset);
    for (int i = 0; p->kind != PACKING_AWQ && i < KERN_BLOCK; i += WORD) {
        const int64_t word = (col + i) / WORD;
        const uint32_t eight =
            word_at(p->codes,
                    p->kind == PACKING_GPTQ ? word * p->rows + row : row * (p->cols / WORD) + word);
        for (int k = 0; k < WORD; k++) n[i + k] = (int8_t)((int)(eight >> 4 * k & 15) - offset);
    }
}

static bool is_nvfp4(enum packing_kind kind) {
    return kind == PACKING_NVFP4 || kind == PACKING_NVFP4_TENSORS;
}

bool packed_blocks_dtype(const struct packed *packed, enum kern_dtype *dtype) {
    *dtype = is_nvfp4(packed->kind) ? KERN_Q8S : packed->zeros ? KERN_Q4M : KERN_Q4;
    return packed->kind != PACKING_FP8;
}

uint32_t packed_format(const struct packed *packed) {
    return is_nvfp4(packed->kind) ? GGUF_FORMAT_NVFP4 : GGUF_FORMAT_F32;
}

enum kern_dtype packed_dtype(const struct packed *packed) {
    return packed->narrow ? KERN_BF16 : KERN_F32;
}

static float block_scale(const struct packed *p, int64_t row, int64_t group) {
    float scale = 0;
    (void)tensor_read_floats(&p->scales, (size_t)(row / p->block_rows * p->groups + group), 1,
                             &scale);
    return scale;
}

int64_t packed_row_scales(const struct packed *p, int64_t *group) {
    const bool taken = p->kind == PACKING_FP8 && (p->groups == 1 || p->group % KERN_BLOCK == 0);
    *group = taken && p->groups > 1 ? p->group : 0;
    return taken ? p->groups : 0;
}

bool packed_read_scales(const struct packed *p, int64_t row, float *out) {
    bool valid = true;
    for (int64_t g = 0; g < p->groups; g++) {
        out[g] = block_scale(p, row, g);
        valid &= out[g] >= 0 && out[g] <= FLT_MAX / QUANTIZE_MOST;
    }
    return valid;
}

static void read_e4m3(const struct packed *p, int64_t row, int64_t at, int64_t count, float *out) {
    const uint8_t *codes = (const uint8_t *)p->codes + row * p->cols;
    for (int64_t i = at, end; i < at + count; i = end) {
        const int64_t group = i / p->group;
        const float scale = block_scale(p, row, group);
        end = (group + 1) * p->group < at + count ? (group + 1) * p->group : at + count;
        for (int64_t k = i; k < end; k++) *out++ = scale * number_from_e4m3(codes[k]);
    }
}

static void nvfp4_block(const struct packed *p, int64_t row, int64_t b, struct block *out) {
    const uint8_t *scales = (const uint8_t *)p->scales.data + row * p->groups + 2 * b;
    block_set_factors(out, 0, BLOCK_NO_LEAST);
    out->unit[0] = p->unit;
    for (int half = 0; half < 2; half++)
        out->scale[half] = number_from_e4m3(scales[half]) * p->unit;
    block_put_e2m1((const uint8_t *)p->codes + (row * p->cols + b * KERN_BLOCK) / 2, out->n);
}

void packed_blocks(const struct packed *p, int64_t row, int64_t first, int64_t count,
                   struct block *out) {
    for (int64_t b = first; b < first + count; b++, out++) {
        if (is_nvfp4(p->kind)) {
            nvfp4_block(p, row, b, out);
            continue;
        }
        const int64_t group = b * KERN_BLOCK / p->group;
        const float scale = scale_at(p, row, group);
        block_set_factors(out, scale,
                          p->zeros ? -(scale * (float)zero_at(p, row, group)) : BLOCK_NO_LEAST);
        read_codes(p, row, b * KERN_BLOCK, p->zeros ? 0 : 8, out->n);
    }
}

void packed_read(const struct packed *p, int64_t row, int64_t at, int64_t count, float *out) {
    if (p->kind == PACKING_FP8) {
        read_e4m3(p, row, at, count, out);
        return;
    }
    for (const int64_t end = at + count; at < end; at += KERN_BLOCK) {
        struct block block;
        packed_blocks(p, row, at / KERN_BLOCK, 1, &block);
        for (int i = 0; i < KERN_BLOCK; i++) *out++ = block_number(&block, i);
    }
}

/* ---- One matrix ---- */

static int packed_compare_names(const void *a, const void *b) {
    return strcmp(((const struct tensor *)a)->name, ((const struct tensor *)b)->name);
}

/* Finds the tensor whose name is that of the codes with another end, and marks it as used; NULL:
 * there is none. */
static struct tensor *packed_part_of(struct joining *j, const struct tensor *codes,
                                     const char *end) {
    char name[512];
    const int stem = (int)(strlen(codes->name) - strlen(j->parts->codes));
    const int n = end ? snprintf(name, sizeof name, "%.*s%s", stem, codes->name, end) : -1;
    const struct tensor key = {.name = name};
    if (n < 0 || (size_t)n >= sizeof name) return NULL;
    struct tensor *found = bsearch(&key, j->tensors, j->count, sizeof key, packed_compare_names);
    if (found) j->used[found - j->tensors] = true;
    return found;
}

static int missing(struct joining *j, const struct tensor *codes, const char *end) {
    char name[160];
    const int stem = (int)(strlen(codes->name) - strlen(j->parts->codes));
    snprintf(name, sizeof name, "%.*s%s", stem, codes->name, end);
    return fault_set(j->fault, ERR_NOTFOUND, name, "tensor is missing: weights of %s",
                     j->parts->type);
}

static int expect(struct joining *j, const struct tensor *tensor, const char *type, int64_t first,
                  int64_t second) {
    const int64_t shape[2] = {first, second};
    char found[96];
    const bool type_fits = type ? strcmp(tensor->type, type) == 0 : tensor_is_float(tensor->dtype);
    if (type_fits && tensor->dims == 2 && memcmp(tensor->shape, shape, sizeof shape) == 0) return 0;
    tensor_shape_text(tensor->shape, tensor->dims, found, sizeof found);
    return fault_set(j->fault, ERR_INVALID, tensor->name, "%s [%s], expected %s [%lld, %lld]",
                     tensor->type, found, type ? type : "F32, F16 or BF16", (long long)first,
                     (long long)second);
}

/* Checks that the groups follow the order of the inputs. Older files have zeros in that case. */
static int check_index(struct joining *j, const struct packed *p, const struct tensor *index) {
    bool zeros = !j->how->reordered, ordered = true;
    if (strcmp(index->type, "I32") != 0 || index->dims != 1 || index->shape[0] != p->cols)
        return fault_set(j->fault, ERR_INVALID, index->name, "expected I32 [%lld]",
                         (long long)p->cols);
    for (int64_t i = 0; i < p->cols; i++) {
        const uint32_t group = word_at(index->data, i);
        zeros &= group == 0;
        ordered &= group == (uint64_t)(i / p->group);
    }
    if (zeros || ordered) return 0;
    return fault_set(j->fault, ERR_UNSUPPORTED, index->name,
                     "inputs are not in the order of their groups (desc_act)");
}

/* Finds the zero points. Symmetric files have 8 in every place, or 7 if it is stored less 1; both
 * are found under either name of the format. p->zeros stays NULL if all zero points are 8. */
static int take_zeros(struct joining *j, struct packed *p, const struct tensor *zeros) {
    const size_t words = zeros->bytes / sizeof(uint32_t);
    const uint32_t eights = 0x88888888u, sevens = 0x77777777u;
    const uint32_t first = words ? word_at(zeros->data, 0) : eights;
    bool alike = true;
    for (size_t i = 0; i < words; i++) alike &= word_at(zeros->data, (int64_t)i) == first;
    if (j->how->kind == PACKING_GPTQ && j->how->symmetric) {
        if (alike && (first == eights || first == sevens)) return 0;
        return fault_set(j->fault, ERR_INVALID, zeros->name,
                         "zero points are not all alike, although \"sym\" is true");
    }
    p->less_one = j->how->kind == PACKING_GPTQ && j->how->less_one;
    if (!alike || first != (p->less_one ? sevens : eights)) p->zeros = zeros->data;
    return 0;
}

static int check_shape_tensor(struct joining *j, const struct packed *p,
                              const struct tensor *shape) {
    int64_t sizes[2] = {0};
    if (shape && shape->bytes == sizeof sizes) memcpy(sizes, shape->data, sizeof sizes);
    if (!shape || (strcmp(shape->type, "I64") == 0 && sizes[0] == p->rows && sizes[1] == p->cols))
        return 0;
    return fault_set(j->fault, ERR_INVALID, shape->name, "expected I64 of %lld and %lld",
                     (long long)p->rows, (long long)p->cols);
}

static int set_sizes(struct joining *j, struct packed *p, const struct tensor *codes) {
    if (strcmp(codes->type, "I32") != 0 || codes->dims != 2 || codes->shape[0] > INT32_MAX ||
        codes->shape[1] > INT32_MAX)
        return fault_set(j->fault, ERR_INVALID, codes->name, "expected I32 of two dimensions");
    const int64_t a = codes->shape[0], b = codes->shape[1];
    p->rows = j->how->kind == PACKING_AWQ ? b * WORD : j->how->kind == PACKING_GPTQ ? b : a;
    p->cols = j->how->kind == PACKING_AWQ ? a : (j->how->kind == PACKING_GPTQ ? a : b) * WORD;
    p->group = j->how->group ? j->how->group : p->cols;
    if (p->rows < 1 || p->cols < 1 || p->cols % p->group || p->group % KERN_BLOCK || p->rows % WORD)
        return fault_set(j->fault, ERR_UNSUPPORTED, codes->name,
                         "%lld outputs of %lld inputs in groups of %lld: groups must be whole, of "
                         "multiples of %d inputs, and outputs a multiple of %d",
                         (long long)p->rows, (long long)p->cols, (long long)p->group, KERN_BLOCK,
                         WORD);
    p->groups = p->cols / p->group;
    return 0;
}

static int make_packed(struct joining *j, const struct tensor *codes, struct packed *p) {
    const bool by_output = j->how->kind == PACKING_TENSORS;
    const struct tensor *scales = packed_part_of(j, codes, j->parts->scales);
    const struct tensor *zeros = packed_part_of(j, codes, j->parts->zeros);
    const struct tensor *index = packed_part_of(j, codes, j->parts->index);
    const struct tensor *shape = packed_part_of(j, codes, j->parts->shape);
    *p = (struct packed){.kind = j->how->kind, .codes = codes->data};
    int rc = set_sizes(j, p, codes);
    if (!rc && !scales) rc = missing(j, codes, j->parts->scales);
    if (!rc && !zeros && !(by_output && j->how->symmetric)) rc = missing(j, codes, j->parts->zeros);
    if (!rc && !index && j->how->reordered) rc = missing(j, codes, j->parts->index);
    if (rc) return rc;
    p->scales = *scales;
    rc = by_output ? expect(j, scales, NULL, p->rows, p->groups)
                   : expect(j, scales, NULL, p->groups, p->rows);
    if (!rc && zeros)
        rc = by_output ? expect(j, zeros, "I32", p->rows / WORD, p->groups)
                       : expect(j, zeros, "I32", p->groups, p->rows / WORD);
    if (!rc && zeros) rc = take_zeros(j, p, zeros);
    if (!rc && index) rc = check_index(j, p, index);
    return rc ? rc : check_shape_tensor(j, p, shape);
}

/* ---- FP8 ---- */

static int64_t blocks_across(int64_t count, int64_t block) {
    return (count + block - 1) / block;
}

/* Finds the scales of a matrix. `mark`: they become part of it. */
static const struct tensor *fp8_scales(struct joining *j, const struct tensor *codes, bool mark) {
    static const char *const ends[] = {".weight_scale_inv", ".weight_scale"};
    const struct tensor *scales = NULL;
    for (size_t i = 0; i < 2 && !scales; i++) {
        scales = packed_part_of(j, codes, ends[i]);
        if (scales && !mark) j->used[scales - j->tensors] = false;
    }
    return scales;
}

/* Returns whether the scales have the sizes of one for each block, not of one for each output. */
static bool has_block_scales(const struct joining *j, const struct tensor *codes,
                             const struct tensor *scales) {
    int64_t count = 1;
    for (int i = 0; i < scales->dims; i++) count *= scales->shape[i];
    return count > 1 &&
           !(count == codes->shape[0] && scales->shape[0] == count && j->how->block_rows > 1);
}

static bool is_fp8_matrix(struct joining *j, const struct tensor *tensor) {
    if (tensor->dtype != TENSOR_E4M3 || tensor->dims != 2 || tensor->shape[0] < 1 ||
        tensor->shape[1] < 1)
        return false;
    const struct tensor *scales = fp8_scales(j, tensor, false);
    return scales && has_block_scales(j, tensor, scales);
}

/* Returns whether bf16 holds all products: bf16 has 8 bits of mantissa and E4M3 has 4, so it does
 * if the scales have at most 4. */
static bool is_narrow(const struct packed *p, int64_t scales) {
    for (int64_t i = 0; i < scales; i++) {
        float scale = 0;
        (void)tensor_read_floats(&p->scales, (size_t)i, 1, &scale);
        if (number_bits(scale) & 0xfffff || !(scale >= 0x1p-100f && scale <= 0x1p100f))
            return false;
    }
    return true;
}

static int make_fp8(struct joining *j, const struct tensor *codes, struct packed *p) {
    const struct tensor *scales = fp8_scales(j, codes, true);
    const int64_t block_rows = j->how->block_rows, block_cols = j->how->block_cols;
    const int64_t wanted[2] = {blocks_across(codes->shape[0], block_rows),
                               blocks_across(codes->shape[1], block_cols)};
    char found[96];
    int64_t beside[2] = {1, 1};
    int given = 0, needed = 0;
    for (int i = 0; i < scales->dims; i++)
        if (scales->shape[i] != 1 && given++ < 2) beside[given - 1] = scales->shape[i];
    bool fits = tensor_is_float(scales->dtype);
    for (int i = 0; i < 2; i++)
        if (wanted[i] != 1) fits = fits && wanted[i] == beside[needed++];
    tensor_shape_text(scales->shape, scales->dims, found, sizeof found);
    if (!fits || needed != given)
        return fault_set(j->fault, ERR_UNSUPPORTED, scales->name,
                         "%s [%s], expected F32, F16 or BF16 [%lld, %lld]: a scale for each block "
                         "of %lld outputs and %lld inputs",
                         scales->type, found, (long long)wanted[0], (long long)wanted[1],
                         (long long)block_rows, (long long)block_cols);
    *p = (struct packed){.kind = PACKING_FP8,
                         .codes = codes->data,
                         .scales = *scales,
                         .rows = codes->shape[0],
                         .cols = codes->shape[1],
                         .group = block_cols,
                         .groups = wanted[1],
                         .block_rows = block_rows};
    p->narrow = is_narrow(p, wanted[0] * wanted[1]);
    return 0;
}

/* ---- NVFP4 ---- */

static int join_nvfp4(struct joining *j, const struct tensor *codes, struct packed *p) {
    const struct tensor *scales = packed_part_of(j, codes, j->parts->scales);
    const struct tensor *whole = packed_part_of(j, codes, j->parts->whole);
    float scale = 0, more;
    if (!scales || !whole) return missing(j, codes, scales ? j->parts->whole : j->parts->scales);
    if (strcmp(codes->type, "U8") != 0 || codes->dims != 2 || codes->shape[0] < 1 ||
        codes->shape[1] < 1 || codes->shape[1] % (KERN_BLOCK / 2))
        return fault_set(j->fault, ERR_UNSUPPORTED, codes->name,
                         "expected U8 of two dimensions: outputs, and half a multiple of %d inputs",
                         KERN_BLOCK);
    *p = (struct packed){.kind = j->how->kind,
                         .codes = codes->data,
                         .scales = *scales,
                         .rows = codes->shape[0],
                         .cols = 2 * codes->shape[1],
                         .groups = codes->shape[1] / 8};
    const int rc = expect(j, scales, "F8_E4M3", p->rows, p->groups);
    if (rc) return rc;
    if (!tensor_is_float(whole->dtype) || !tensor_read_floats(whole, 0, 1, &scale) ||
        tensor_read_floats(whole, 1, 1, &more) || !(scale > 0 && scale <= FLT_MAX))
        return fault_set(j->fault, ERR_INVALID, whole->name, "expected one number above 0");
    p->unit = j->how->kind == PACKING_NVFP4 ? 0.5f * scale : 0.5f / scale;
    return 0;
}

/* ---- keepd's own blocks ---- */

static bool packed_ends_with(const char *name, const char *end) {
    const size_t size = strlen(name), tail = strlen(end);
    return size > tail && strcmp(name + size - tail, end) == 0;
}

/* Finds the format with which the name ends; `end` becomes that part of the name. */
static bool own_format(const char *name, char end[16], uint32_t *format) {
    static const uint32_t formats[] = {GGUF_FORMAT_Q8_0, GGUF_FORMAT_Q4_1};
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++) {
        *format = formats[i];
        snprintf(end, 16, ".%s", gguf_format_name(formats[i]));
        if (packed_ends_with(name, end)) return true;
    }
    return false;
}

static int make_own(struct joining *j, const struct tensor *from, uint32_t format,
                    struct tensor *out) {
    size_t bytes;
    const int block = gguf_format_block(format, &bytes), last = from->dims - 1;
    if (strcmp(from->type, "U8") != 0 || last < 1 || last > 2 || from->shape[last] % (int64_t)bytes)
        return fault_set(j->fault, ERR_INVALID, from->name,
                         "expected U8 of two or three dimensions, the last of whole blocks of %zu",
                         bytes);
    *out = *from;
    out->shape[last] = from->shape[last] / (int64_t)bytes * block;
    out->dtype = TENSOR_BLOCKS;
    out->format = format;
    out->type = gguf_format_name(format);
    return 0;
}

/* ---- The table ---- */

/* Returns whether the entry stands for a matrix. `end`: the part of its name that does not name the
 * matrix. */
static bool is_main(struct joining *j, const struct tensor *tensor, char end[16],
                    uint32_t *format) {
    if (j->how->kind == PACKING_OWN) return own_format(tensor->name, end, format);
    snprintf(end, 16, "%s", j->parts->codes);
    if (!packed_ends_with(tensor->name, end)) return false;
    if (j->how->kind == PACKING_NVFP4) return strcmp(tensor->type, "U8") == 0;
    return j->how->kind != PACKING_FP8 || is_fp8_matrix(j, tensor);
}

static int make_matrix(struct joining *j, size_t index, const char *end, uint32_t format) {
    static const char weight[] = ".weight";
    const struct tensor *from = &j->tensors[index];
    const bool own = j->how->kind == PACKING_OWN;
    struct packed *packed = &j->set->matrices[j->made_count];
    struct tensor *out = &j->made[j->made_count++];
    const size_t stem = strlen(from->name) - strlen(end);
    int rc = own                           ? make_own(j, from, format, out)
             : j->how->kind == PACKING_FP8 ? make_fp8(j, from, packed)
             : is_nvfp4(j->how->kind)      ? join_nvfp4(j, from, packed)
                                           : make_packed(j, from, packed);
    if (rc) return rc;
    if (!own)
        *out = (struct tensor){.type = j->parts->type,
                               .dtype = TENSOR_BLOCKS,
                               .packed = packed,
                               .dims = 2,
                               .shape = {packed->rows, packed->cols},
                               .data = from->data,
                               .bytes = from->bytes};
    out->name = j->name;
    memcpy(j->name, from->name, stem);
    memcpy(j->name + stem, own ? "" : weight, own ? 1 : sizeof weight);
    j->name += stem + (own ? 1 : sizeof weight);
    j->used[index] = true;
    return 0;
}

/* Allocates memory for all matrices of the table. */
static int packed_reserve(struct joining *j, size_t matrices, size_t name_bytes) {
    j->set = mem_try_alloc(1, sizeof *j->set);
    if (!j->set) return ERR_NOMEM;
    j->set->matrices = mem_try_alloc(matrices, sizeof *j->set->matrices);
    j->set->names = j->name = mem_try_alloc(name_bytes, 1);
    j->made = mem_try_alloc(matrices, sizeof *j->made);
    return j->set->matrices && j->name && j->made ? 0 : ERR_NOMEM;
}

static int packed_join_parts(struct joining *j) {
    char end[16];
    uint32_t format = 0;
    size_t matrices = 0, name_bytes = 0;
    j->used = mem_try_alloc(j->count, sizeof *j->used);
    for (size_t i = 0; j->used && i < j->count; i++) {
        if (!is_main(j, &j->tensors[i], end, &format)) continue;
        matrices++;
        name_bytes += strlen(j->tensors[i].name) + sizeof ".weight";
    }
    int rc = j->used ? packed_reserve(j, matrices, name_bytes) : ERR_NOMEM;
    if (rc) return fault_set(j->fault, rc, NULL, "not enough memory for the tensor table");
    for (size_t i = 0; i < j->count && !rc; i++)
        if (is_main(j, &j->tensors[i], end, &format)) rc = make_matrix(j, i, end, format);
    return rc;
}

/* Replaces the parts by the matrices. Returns the number of entries. */
static size_t replace(struct joining *j) {
    size_t kept = 0;
    for (size_t i = 0; i < j->count; i++)
        if (!j->used[i]) j->tensors[kept++] = j->tensors[i];
    if (j->made_count) memcpy(j->tensors + kept, j->made, j->made_count * sizeof *j->made);
    kept += j->made_count;
    if (kept) qsort(j->tensors, kept, sizeof *j->tensors, packed_compare_names);
    return kept;
}

int packed_join(const struct packing *how, struct tensor *tensors, size_t *count,
                struct packed_set **out, struct fault *fault) {
    struct joining j = {.how = how, .tensors = tensors, .count = *count, .fault = fault};
    if (how->kind != PACKING_OWN) j.parts = &parts_of[how->kind];
    int rc = packed_join_parts(&j);
    if (!rc) *count = replace(&j);
    for (size_t i = 1; !rc && i < *count; i++)
        if (strcmp(tensors[i - 1].name, tensors[i].name) == 0)
            rc = fault_set(fault, ERR_MALFORMED, tensors[i].name, "is there twice");
    mem_free(j.made);
    mem_free(j.used);
    *out = j.set;
    return rc;
}

void packed_close(struct packed_set *set) {
    if (!set) return;
    mem_free(set->matrices);
    mem_free(set->names);
    mem_free(set);
}
