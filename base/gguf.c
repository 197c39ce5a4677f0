/* Parses a GGUF file in one pass over its bytes. The parser takes one field after the other and
 * checks each count against the bytes that are left; arrays are skipped, not copied, and read by
 * their accessors later. Values and tensors are then sorted, so that duplicates are found next to
 * each other and a search is a bisection. */
#include "base/gguf.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/check.h"
#include "base/kind.h"
#include "base/mem.h"

#define VALUES_MAX    ((uint64_t)1 << 16)
#define TENSORS_MAX   ((uint64_t)1 << 20)
#define NAME_MAX      ((uint64_t)255)
#define ALIGNMENT     32 /* the default of the format */
#define ALIGNMENT_MAX ((int64_t)1 << 16)
#define VALUE_LEAST   13 /* the fewest bytes of a value: an empty key, a type, one byte */
#define TENSOR_LEAST  24 /* bytes of a tensor's shortest description: no name, no dimension */

static const size_t type_bytes[] = {
    [GGUF_U8] = 1,  [GGUF_I8] = 1,   [GGUF_U16] = 2, [GGUF_I16] = 2, [GGUF_U32] = 4, [GGUF_I32] = 4,
    [GGUF_F32] = 4, [GGUF_BOOL] = 1, [GGUF_U64] = 8, [GGUF_I64] = 8, [GGUF_F64] = 8,
};

static const char *const type_names[] = {
    [GGUF_U8] = "u8",         [GGUF_I8] = "i8",       [GGUF_U16] = "u16", [GGUF_I16] = "i16",
    [GGUF_U32] = "u32",       [GGUF_I32] = "i32",     [GGUF_F32] = "f32", [GGUF_BOOL] = "bool",
    [GGUF_STRING] = "string", [GGUF_ARRAY] = "array", [GGUF_U64] = "u64", [GGUF_I64] = "i64",
    [GGUF_F64] = "f64",
};

static const struct {
    const char *name;
    int block;
    size_t bytes;
} formats[] = {
    [0] = {"F32", 1, 4},         [1] = {"F16", 1, 2},         [2] = {"Q4_0", 32, 18},
    [3] = {"Q4_1", 32, 20},      [6] = {"Q5_0", 32, 22},      [7] = {"Q5_1", 32, 24},
    [8] = {"Q8_0", 32, 34},      [10] = {"Q2_K", 256, 84},    [11] = {"Q3_K", 256, 110},
    [12] = {"Q4_K", 256, 144},   [13] = {"Q5_K", 256, 176},   [14] = {"Q6_K", 256, 210},
    [16] = {"IQ2_XXS", 256, 66}, [17] = {"IQ2_XS", 256, 74},  [18] = {"IQ3_XXS", 256, 98},
    [19] = {"IQ1_S", 256, 50},   [20] = {"IQ4_NL", 32, 18},   [21] = {"IQ3_S", 256, 110},
    [22] = {"IQ2_S", 256, 82},   [23] = {"IQ4_XS", 256, 136}, [24] = {"I8", 1, 1},
    [25] = {"I16", 1, 2},        [26] = {"I32", 1, 4},        [27] = {"I64", 1, 8},
    [28] = {"F64", 1, 8},        [29] = {"IQ1_M", 256, 56},   [30] = {"BF16", 1, 2},
    [34] = {"TQ1_0", 256, 54},   [35] = {"TQ2_0", 256, 66},   [39] = {"MXFP4", 32, 17},
    [40] = {"NVFP4", 64, 36},
};
#define FORMATS (sizeof formats / sizeof formats[0])

bool gguf_is_path(const char *path) {
    struct stat info;
    const size_t size = strlen(path);
    if (stat(path, &info) == 0) return S_ISREG(info.st_mode);
    return size >= 5 && strcmp(path + size - 5, ".gguf") == 0;
}

const char *gguf_format_name(uint32_t format) {
    return format < FORMATS ? formats[format].name : NULL;
}

int gguf_format_block(uint32_t format, size_t *bytes) {
    *bytes = format < FORMATS ? formats[format].bytes : 0;
    return format < FORMATS ? formats[format].block : 0;
}

/* ---- Bytes ---- */

struct parser {
    const char *begin, *at, *end;
    struct gguf *gguf;
    struct fault *fault;
};

static size_t bytes_left(const struct parser *p) {
    return (size_t)(p->end - p->at);
}

static int refuse_incomplete(const struct parser *p, const char *what) {
    return kind_incomplete(what, (size_t)(p->end - p->begin), 0, p->fault);
}

static uint64_t little_endian_at(const char *from, size_t bytes) {
    uint64_t value = 0;
    while (bytes-- > 0) value = value << 8 | (unsigned char)from[bytes];
    return value;
}

static int read_gguf_number(struct parser *p, size_t bytes, const char *what, uint64_t *value) {
    if (bytes_left(p) < bytes) return refuse_incomplete(p, what);
    *value = little_endian_at(p->at, bytes);
    p->at += bytes;
    return 0;
}

static int take_u32(struct parser *p, const char *what, uint32_t *value) {
    uint64_t wide = 0;
    int rc = read_gguf_number(p, 4, what, &wide);
    *value = (uint32_t)wide;
    return rc;
}

/* Reads a key or a tensor's name; messages call it `what`. */
static int read_gguf_name(struct parser *p, const char *what, char **out) {
    uint64_t size = 0;
    int rc = read_gguf_number(p, 8, what, &size);
    if (rc) return rc;
    if (size > bytes_left(p)) return refuse_incomplete(p, what);
    if (size == 0 || size > NAME_MAX || memchr(p->at, '\0', (size_t)size))
        return fault_set(p->fault, ERR_MALFORMED, what,
                         "expected 1 to %d bytes and no zero among them", (int)NAME_MAX);
    *out = mem_try_alloc((size_t)size + 1, 1);
    if (!*out) return fault_set(p->fault, ERR_NOMEM, what, "not enough memory for names");
    memcpy(*out, p->at, (size_t)size);
    p->at += size;
    return 0;
}

/* ---- Values ---- */

static int skip_gguf_string(struct parser *p, const char *key) {
    uint64_t size = 0;
    int rc = read_gguf_number(p, 8, key, &size);
    if (!rc && size > bytes_left(p)) rc = refuse_incomplete(p, key);
    if (!rc) p->at += size;
    return rc;
}

static int skip_elements(struct parser *p, const struct gguf_value *value) {
    if (value->type == GGUF_STRING) {
        int rc = 0;
        for (size_t i = 0; i < value->count && !rc; i++) rc = skip_gguf_string(p, value->key);
        return rc;
    }
    size_t size = type_bytes[value->type];
    if (value->count > bytes_left(p) / size) return refuse_incomplete(p, value->key);
    for (size_t i = 0; value->type == GGUF_BOOL && i < value->count; i++)
        if ((unsigned char)p->at[i] > 1)
            return fault_set(p->fault, ERR_MALFORMED, value->key, "a bool is neither 0 nor 1");
    p->at += value->count * size;
    return 0;
}

static int take_value(struct parser *p, struct gguf_value *value) {
    uint32_t type = 0;
    uint64_t count = 1;
    int rc = read_gguf_name(p, "key", &value->key);
    if (!rc) rc = take_u32(p, value->key, &type);
    value->array = type == GGUF_ARRAY;
    if (!rc && value->array) rc = take_u32(p, value->key, &type);
    if (!rc && value->array) rc = read_gguf_number(p, 8, value->key, &count);
    if (rc) return rc;
    if (type == GGUF_ARRAY)
        return fault_set(p->fault, ERR_UNSUPPORTED, value->key,
                         "an array of arrays is not supported");
    if (type > GGUF_F64)
        return fault_set(p->fault, ERR_MALFORMED, value->key, "type %" PRIu32 " is not known",
                         type);
    if (count > bytes_left(p)) return refuse_incomplete(p, value->key);
    value->type = (enum gguf_type)type;
    value->count = (size_t)count;
    value->data = p->at;
    rc = skip_elements(p, value);
    value->bytes = (size_t)(p->at - value->data);
    return rc;
}

static int compare_metadata_keys(const void *a, const void *b) {
    return strcmp(((const struct gguf_value *)a)->key, ((const struct gguf_value *)b)->key);
}

static int take_values(struct parser *p, uint64_t count) {
    struct gguf *gguf = p->gguf;
    int rc = 0;
    if (count > VALUES_MAX)
        return fault_set(p->fault, ERR_LIMIT, "metadata", "more than %d values", (int)VALUES_MAX);
    if (count > bytes_left(p) / VALUE_LEAST) return refuse_incomplete(p, "metadata");
    gguf->values = mem_try_alloc((size_t)count, sizeof *gguf->values);
    if (!gguf->values)
        return fault_set(p->fault, ERR_NOMEM, "metadata", "not enough memory for its values");
    while (gguf->value_count < count && !rc) rc = take_value(p, &gguf->values[gguf->value_count++]);
    if (rc) return rc;
    if (count) qsort(gguf->values, (size_t)count, sizeof *gguf->values, compare_metadata_keys);
    for (size_t i = 1; i < gguf->value_count; i++)
        if (!compare_metadata_keys(&gguf->values[i - 1], &gguf->values[i]))
            return fault_set(p->fault, ERR_MALFORMED, gguf->values[i].key, "is there twice");
    return 0;
}

/* ---- Tensors ---- */

/* Reads the sizes of a tensor, and computes its bytes from the sizes and the format. */
static int take_shape(struct parser *p, struct gguf_tensor *tensor) {
    uint32_t dims = 0;
    int64_t count = 1;
    int rc = take_u32(p, tensor->name, &dims);
    if (rc) return rc;
    if (dims > GGUF_DIMS_MAX)
        return fault_set(p->fault, ERR_MALFORMED, tensor->name, "more than %d dimensions",
                         GGUF_DIMS_MAX);
    tensor->dims = (int)dims;
    for (int i = 0; i < tensor->dims && !rc; i++) {
        uint64_t size = 0;
        rc = read_gguf_number(p, 8, tensor->name, &size);
        tensor->shape[i] = (int64_t)(size & INT64_MAX);
        if (!rc && (size > INT64_MAX || __builtin_mul_overflow(count, (int64_t)size, &count)))
            rc = fault_set(p->fault, ERR_MALFORMED, tensor->name,
                           "the product of its dimensions overflows");
    }
    if (!rc) rc = take_u32(p, tensor->name, &tensor->format);
    if (rc) return rc;
    size_t bytes = 0;
    int64_t block = gguf_format_block(tensor->format, &bytes), row = dims ? tensor->shape[0] : 1;
    if (!block)
        return fault_set(p->fault, ERR_UNSUPPORTED, tensor->name, "type %" PRIu32 " is not known",
                         tensor->format);
    if (row % block)
        return fault_set(p->fault, ERR_MALFORMED, tensor->name,
                         "rows of %lld are no whole blocks of %s", (long long)row,
                         gguf_format_name(tensor->format));
    if (__builtin_mul_overflow((size_t)(count / block), bytes, &tensor->bytes))
        return fault_set(p->fault, ERR_MALFORMED, tensor->name, "the size overflows");
    return 0;
}

static int compare_tensors(const void *a, const void *b) {
    return strcmp(((const struct gguf_tensor *)a)->name, ((const struct gguf_tensor *)b)->name);
}

static int compare_tensor_offsets(const void *a, const void *b) {
    const struct gguf_tensor *x = a, *y = b;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

static uint64_t align_up(uint64_t place, uint64_t alignment) {
    return (place + alignment - 1) / alignment * alignment;
}

/* Checks that the tensors lie in the data area, which begins at the next aligned byte. A file
 * without tensors may end before that byte. */
static int check_tensor_places(struct parser *p, uint64_t alignment) {
    struct gguf *gguf = p->gguf;
    const uint64_t size = (uint64_t)(p->end - p->begin);
    const uint64_t area = align_up((uint64_t)(p->at - p->begin), alignment);
    const struct gguf_tensor *outside = NULL;
    uint64_t next = 0, end = 0;
    qsort(gguf->tensors, gguf->tensor_count, sizeof *gguf->tensors, compare_tensor_offsets);
    for (size_t i = 0; i < gguf->tensor_count; i++) {
        struct gguf_tensor *tensor = &gguf->tensors[i];
        if (tensor->offset != next)
            return fault_set(p->fault, ERR_MALFORMED, tensor->name,
                             tensor->offset < next
                                 ? "its data overlaps another tensor's"
                                 : "there is a hole before its data, or it is not aligned");
        if (tensor->bytes > (UINT64_MAX >> 2) - next)
            return fault_set(p->fault, ERR_MALFORMED, tensor->name, "the size overflows");
        if (!outside && area + next + tensor->bytes > size) outside = tensor;
        if (!outside) tensor->data = p->begin + area + next;
        end = area + next + tensor->bytes;
        next = align_up(next + tensor->bytes, alignment);
    }
    return outside ? kind_incomplete(outside->name, size, end, p->fault) : 0;
}

static int take_tensors(struct parser *p, uint64_t count) {
    struct gguf *gguf = p->gguf;
    int64_t alignment = ALIGNMENT;
    int rc = gguf_int(gguf, "general.alignment", 1, ALIGNMENT_MAX, &alignment, p->fault);
    if (rc) return rc;
    if (alignment & (alignment - 1))
        return fault_set(p->fault, ERR_INVALID, "general.alignment", "%lld is no power of two",
                         (long long)alignment);
    if (count > TENSORS_MAX)
        return fault_set(p->fault, ERR_LIMIT, "tensors", "more than %d", (int)TENSORS_MAX);
    if (count > bytes_left(p) / TENSOR_LEAST) return refuse_incomplete(p, "tensors");
    if (count == 0) return 0;
    gguf->tensors = mem_try_alloc((size_t)count, sizeof *gguf->tensors);
    if (!gguf->tensors)
        return fault_set(p->fault, ERR_NOMEM, "tensors", "not enough memory for their table");
    while (gguf->tensor_count < count && !rc) {
        struct gguf_tensor *tensor = &gguf->tensors[gguf->tensor_count++];
        rc = read_gguf_name(p, "tensor name", &tensor->name);
        if (!rc) rc = take_shape(p, tensor);
        if (!rc) rc = read_gguf_number(p, 8, tensor->name, &tensor->offset);
    }
    if (!rc) rc = check_tensor_places(p, (uint64_t)alignment);
    if (rc) return rc;
    qsort(gguf->tensors, gguf->tensor_count, sizeof *gguf->tensors, compare_tensors);
    for (size_t i = 1; i < gguf->tensor_count; i++)
        if (!compare_tensors(&gguf->tensors[i - 1], &gguf->tensors[i]))
            return fault_set(p->fault, ERR_MALFORMED, gguf->tensors[i].name, "is there twice");
    return 0;
}

/* ---- The whole ---- */

static int check_version(struct parser *p, uint32_t version) {
    p->gguf->version = (int)(version & 0xff);
    if (version == 2 || version == 3) return 0;
    if (version == 2u << 24 || version == 3u << 24)
        return fault_set(p->fault, ERR_UNSUPPORTED, "GGUF", "big-endian files are not supported");
    return fault_set(p->fault, ERR_UNSUPPORTED, "GGUF",
                     "version %" PRIu32 " is not supported: 2, 3", version);
}

static int parse_gguf(struct parser *p) {
    uint32_t version = 0;
    uint64_t tensors = 0, values = 0;
    int rc = kind_check(p->at, bytes_left(p), KIND_GGUF, "GGUF", "the file", p->fault);
    if (rc) return rc;
    if (bytes_left(p) < 4 || memcmp(p->at, "GGUF", 4) != 0)
        return fault_set(p->fault, ERR_MALFORMED, "GGUF",
                         "the file does not begin with it: it is no GGUF file");
    p->at += 4;
    rc = take_u32(p, "GGUF", &version);
    if (!rc) rc = check_version(p, version);
    if (!rc) rc = read_gguf_number(p, 8, "GGUF", &tensors);
    if (!rc) rc = read_gguf_number(p, 8, "GGUF", &values);
    if (!rc) rc = take_values(p, values);
    if (!rc) rc = take_tensors(p, tensors);
    return rc;
}

int gguf_parse(const void *data, size_t size, struct gguf *out, struct fault *fault) {
    struct parser p = {.begin = data, .at = data, .gguf = out, .fault = fault};
    p.end = p.begin + size;
    *out = (struct gguf){0};
    int rc = parse_gguf(&p);
    if (rc) gguf_close(out);
    return rc;
}

void gguf_close(struct gguf *gguf) {
    for (size_t i = 0; i < gguf->value_count; i++) mem_free(gguf->values[i].key);
    for (size_t i = 0; i < gguf->tensor_count; i++) mem_free(gguf->tensors[i].name);
    mem_free(gguf->values);
    mem_free(gguf->tensors);
    *gguf = (struct gguf){0};
}

/* ---- Values, read ---- */

const struct gguf_value *gguf_find(const struct gguf *gguf, const char *key) {
    size_t low = 0, high = gguf->value_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(gguf->values[middle].key, key);
        if (order == 0) return &gguf->values[middle];
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

static bool is_int(const struct gguf_value *value) {
    return value->type != GGUF_F32 && value->type != GGUF_F64 && value->type != GGUF_BOOL &&
           value->type != GGUF_STRING;
}

static bool is_num(const struct gguf_value *value) {
    return value->type == GGUF_F32 || value->type == GGUF_F64;
}

int64_t gguf_element_int(const struct gguf_value *value, size_t index) {
    CHECK(is_int(value) && index < value->count);
    size_t size = type_bytes[value->type];
    uint64_t bits = little_endian_at(value->data + index * size, size);
    switch (value->type) {
    case GGUF_I8:
        return (int8_t)bits;
    case GGUF_I16:
        return (int16_t)bits;
    case GGUF_I32:
        return (int32_t)bits;
    case GGUF_U64:
        return bits > INT64_MAX ? INT64_MAX : (int64_t)bits;
    default:
        return (int64_t)bits;
    }
}

double gguf_element_num(const struct gguf_value *value, size_t index) {
    CHECK(is_num(value) && index < value->count);
    float narrow;
    double wide;
    if (value->type == GGUF_F64) {
        memcpy(&wide, value->data + index * sizeof wide, sizeof wide);
        return wide;
    }
    memcpy(&narrow, value->data + index * sizeof narrow, sizeof narrow);
    return (double)narrow;
}

bool gguf_next(const struct gguf_value *value, const char **at, struct gguf_string *out) {
    CHECK(value->type == GGUF_STRING);
    if (!*at) *at = value->data;
    if (*at == value->data + value->bytes) return false;
    out->size = (size_t)little_endian_at(*at, 8); /* checked by gguf_parse */
    out->data = *at + 8;
    *at = out->data + out->size;
    return true;
}

static int refuse_value_type(struct fault *fault, const struct gguf_value *value,
                             const char *expected) {
    return fault_set(fault, ERR_INVALID, value->key, "expected %s, found %s%s", expected,
                     value->array ? "an array of " : "", type_names[value->type]);
}

int gguf_int(const struct gguf *gguf, const char *key, int64_t min, int64_t max, int64_t *value,
             struct fault *fault) {
    const struct gguf_value *found = gguf_find(gguf, key);
    if (!found) return 0;
    if (found->array || !is_int(found)) return refuse_value_type(fault, found, "an integer");
    int64_t number = gguf_element_int(found, 0);
    if (number < min || number > max)
        return fault_set(fault, ERR_INVALID, key, "expected %lld to %lld, found %lld",
                         (long long)min, (long long)max, (long long)number);
    *value = number;
    return 0;
}

int gguf_token(const struct gguf *gguf, const char *key, int64_t *id, struct fault *fault) {
    const struct gguf_value *found = gguf_find(gguf, key);
    int64_t number = -1;
    int rc = gguf_int(gguf, key, INT64_MIN, INT64_MAX, &number, fault);
    const bool unsigned_none =
        found && ((found->type == GGUF_U64 && number == INT64_MAX) || number == UINT32_MAX);
    if (rc || number == -1 || unsigned_none) return rc;
    return gguf_int(gguf, key, 0, INT32_MAX, id, fault);
}

int gguf_num(const struct gguf *gguf, const char *key, double min, double max, double *value,
             struct fault *fault) {
    const struct gguf_value *found = gguf_find(gguf, key);
    if (!found) return 0;
    if (found->array || !is_num(found)) return refuse_value_type(fault, found, "a number");
    double number = gguf_element_num(found, 0);
    if (!(number >= min && number <= max))
        return fault_set(fault, ERR_INVALID, key, "expected %g to %g, found %g", min, max, number);
    *value = number;
    return 0;
}

int gguf_bool(const struct gguf *gguf, const char *key, bool *value, struct fault *fault) {
    const struct gguf_value *found = gguf_find(gguf, key);
    if (!found) return 0;
    if (found->array || found->type != GGUF_BOOL) return refuse_value_type(fault, found, "a bool");
    *value = found->data[0] != 0;
    return 0;
}

int gguf_str(const struct gguf *gguf, const char *key, struct gguf_string *value,
             struct fault *fault) {
    const struct gguf_value *found = gguf_find(gguf, key);
    const char *at = NULL;
    if (!found) return 0;
    if (found->array || found->type != GGUF_STRING)
        return refuse_value_type(fault, found, "a string");
    (void)gguf_next(found, &at, value);
    return 0;
}

int gguf_array(const struct gguf *gguf, const char *key, enum gguf_type type,
               const struct gguf_value **out, struct fault *fault) {
    const struct gguf_value *found = gguf_find(gguf, key);
    char expected[32] = "an array of ";
    *out = NULL;
    if (!found) return 0;
    strcat(expected, type_names[type]);
    if (!found->array || found->type != type) return refuse_value_type(fault, found, expected);
    *out = found;
    return 0;
}
