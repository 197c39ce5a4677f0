/* The safetensors format: u64 header size, a JSON header, the data area. None of it is trusted:
 * sizes are checked before they are used, and tensors must fill the data area without gaps. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/kind.h"
#include "base/mem.h"
#include "model/weights.h"

#define HEADER_MAX    ((uint64_t)100 << 20)
#define HEADER_NODES  ((size_t)4 << 20) /* JSON values in the header */
#define FILE_DIMS_MAX 16

static const struct {
    const char *name;
    unsigned bits;
    enum tensor_dtype dtype;
} dtypes[] = {
    {"F32", 32, TENSOR_F32},      {"F16", 16, TENSOR_F16},      {"BF16", 16, TENSOR_BF16},
    {"I32", 32, TENSOR_I32},      {"F64", 64, TENSOR_OTHER},    {"I64", 64, TENSOR_OTHER},
    {"U64", 64, TENSOR_OTHER},    {"U32", 32, TENSOR_OTHER},    {"I16", 16, TENSOR_OTHER},
    {"U16", 16, TENSOR_OTHER},    {"I8", 8, TENSOR_OTHER},      {"U8", 8, TENSOR_OTHER},
    {"BOOL", 8, TENSOR_OTHER},    {"F8_E4M3", 8, TENSOR_E4M3},  {"F8_E5M2", 8, TENSOR_OTHER},
    {"F8_E8M0", 8, TENSOR_OTHER}, {"F6_E2M3", 6, TENSOR_OTHER}, {"F6_E3M2", 6, TENSOR_OTHER},
    {"F4", 4, TENSOR_OTHER},      {"C64", 64, TENSOR_OTHER},
};

struct parser {
    const char *start, *data; /* the file, and its data area */
    size_t data_size;
    struct tensor_file *file;
    char *names;         /* where the next name goes in file->names */
    const char *outside; /* a tensor whose data are not all in the file */
    size_t needed;       /* bytes of the data area, by the header */
    struct fault *fault;
};

static int malformed(struct parser *p, const char *tensor, const char *why) {
    return fault_set(p->fault, ERR_MALFORMED, tensor, "%s", why);
}

/* Reads a shape and counts the elements. Dimensions beyond TENSOR_DIMS_MAX are counted but not
 * kept. ERR_MALFORMED. */
static int safetensors_read_shape(struct parser *p, const cJSON *node, struct tensor *tensor,
                                  int64_t *count) {
    const cJSON *shape = json_get(node, "shape"), *item;
    int dims = 0;
    *count = 1;
    if (!cJSON_IsArray(shape)) return malformed(p, tensor->name, "expected an array 'shape'");
    cJSON_ArrayForEach(item, shape) {
        int64_t size;
        if (dims == FILE_DIMS_MAX) return malformed(p, tensor->name, "too many dimensions");
        if (json_node_int(item, 0, INT64_MAX, &size))
            return malformed(p, tensor->name, "a size in 'shape' is not an integer >= 0");
        if (__builtin_mul_overflow(*count, size, count))
            return malformed(p, tensor->name, "the product of 'shape' overflows");
        if (dims < TENSOR_DIMS_MAX) tensor->shape[dims] = size;
        dims++;
    }
    tensor->dims = dims < TENSOR_DIMS_MAX ? dims : TENSOR_DIMS_MAX;
    if (dims > TENSOR_DIMS_MAX) tensor->dtype = TENSOR_OTHER;
    return 0;
}

static int safetensors_read_dtype(struct parser *p, const cJSON *node, struct tensor *tensor,
                                  unsigned *bits) {
    const cJSON *dtype = json_get(node, "dtype");
    if (!cJSON_IsString(dtype)) return malformed(p, tensor->name, "expected a string 'dtype'");
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
        if (strcmp(dtype->valuestring, dtypes[i].name) != 0) continue;
        tensor->dtype = dtypes[i].dtype;
        tensor->type = dtypes[i].name;
        *bits = dtypes[i].bits;
        return 0;
    }
    return fault_set(p->fault, ERR_UNSUPPORTED, tensor->name, "dtype '%.32s' is not known",
                     dtype->valuestring);
}

static int read_offsets(struct parser *p, const cJSON *node, struct tensor *tensor) {
    const cJSON *offsets = json_get(node, "data_offsets");
    int64_t begin, end;
    if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2 ||
        json_node_int(offsets->child, 0, INT64_MAX, &begin) ||
        json_node_int(offsets->child->next, 0, INT64_MAX, &end))
        return malformed(p, tensor->name, "expected 'data_offsets' of two integers >= 0");
    if (begin > end) return malformed(p, tensor->name, "its data ends before it begins");
    if ((uint64_t)end > p->data_size && !p->outside) p->outside = tensor->name;
    if ((uint64_t)end > p->needed) p->needed = (size_t)end;
    tensor->data = p->data + ((uint64_t)begin < p->data_size ? (size_t)begin : p->data_size);
    tensor->bytes = (size_t)(end - begin);
    return 0;
}

static int read_tensor(struct parser *p, const cJSON *node, struct tensor *tensor) {
    int64_t count, total;
    unsigned bits = 0;
    size_t name_size = strlen(node->string) + 1;
    tensor->name = memcpy(p->names, node->string, name_size);
    p->names += name_size;
    if (!cJSON_IsObject(node)) return malformed(p, tensor->name, "expected an object");
    int rc = safetensors_read_dtype(p, node, tensor, &bits);
    if (!rc) rc = safetensors_read_shape(p, node, tensor, &count);
    if (!rc) rc = read_offsets(p, node, tensor);
    if (rc) return rc;
    if (__builtin_mul_overflow(count, (int64_t)bits, &total))
        return malformed(p, tensor->name, "the product of 'shape' overflows");
    if (total % 8 || (uint64_t)total / 8 != tensor->bytes)
        return malformed(p, tensor->name, "'shape' and 'data_offsets' disagree");
    return 0;
}

/* Reads the metadata, which may have strings only; keeps "keepd". */
static int safetensors_read_metadata(struct parser *p, const cJSON *metadata) {
    const cJSON *item;
    if (!cJSON_IsObject(metadata)) return malformed(p, "__metadata__", "expected an object");
    cJSON_ArrayForEach(item, metadata) {
        if (!cJSON_IsString(item))
            return malformed(p, "__metadata__", "expected strings and nothing else");
        if (strcmp(item->string, "keepd") != 0) continue;
        if (p->file->metadata_keepd) return malformed(p, "__metadata__", "'keepd' is there twice");
        size_t size = strlen(item->valuestring) + 1;
        p->file->metadata_keepd = mem_try_alloc(size, 1);
        if (!p->file->metadata_keepd)
            return fault_set(p->fault, ERR_NOMEM, NULL, "not enough memory for the metadata");
        memcpy(p->file->metadata_keepd, item->valuestring, size);
    }
    return 0;
}

static bool is_metadata(const cJSON *node) {
    return strcmp(node->string, "__metadata__") == 0;
}

static int safetensors_reserve(struct parser *p, const cJSON *header) {
    const cJSON *node;
    size_t count = 0, name_bytes = 0;
    cJSON_ArrayForEach(node, header) {
        if (is_metadata(node)) continue;
        count++;
        name_bytes += strlen(node->string) + 1;
    }
    p->file->tensors = mem_try_alloc(count, sizeof *p->file->tensors);
    p->file->names = p->names = mem_try_alloc(name_bytes, 1);
    if (!p->file->tensors || !p->names)
        return fault_set(p->fault, ERR_NOMEM, NULL, "not enough memory for %zu tensors", count);
    return 0;
}

static int read_header(struct parser *p, const cJSON *header) {
    const cJSON *node;
    bool metadata = false;
    if (!cJSON_IsObject(header)) return malformed(p, "header", "expected an object");
    int rc = safetensors_reserve(p, header);
    if (rc) return rc;
    cJSON_ArrayForEach(node, header) {
        if (!is_metadata(node))
            rc = read_tensor(p, node, &p->file->tensors[p->file->count++]);
        else if (metadata)
            rc = malformed(p, "__metadata__", "is there twice");
        else
            rc = safetensors_read_metadata(p, node);
        if (rc) return rc;
        metadata |= is_metadata(node);
    }
    const size_t before = (size_t)(p->data - p->start);
    return p->outside
               ? kind_incomplete(p->outside, before + p->data_size, before + p->needed, p->fault)
               : 0;
}

static int compare_places(const void *a, const void *b) {
    const struct tensor *x = a, *y = b;
    if (x->data != y->data) return (const char *)x->data < (const char *)y->data ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

static int safetensors_compare_names(const void *a, const void *b) {
    return strcmp(((const struct tensor *)a)->name, ((const struct tensor *)b)->name);
}

/* Checks that the tensors, in the order of their data, follow each other without overlap or hole.
 */
static int check_places(struct parser *p) {
    struct tensor_file *file = p->file;
    const char *next = p->data;
    if (file->count) qsort(file->tensors, file->count, sizeof *file->tensors, compare_places);
    for (size_t i = 0; i < file->count; i++) {
        const struct tensor *tensor = &file->tensors[i];
        if ((const char *)tensor->data < next)
            return malformed(p, tensor->name, "its data overlaps another tensor's");
        if ((const char *)tensor->data > next)
            return malformed(p, tensor->name, "there is a hole before its data");
        next += tensor->bytes;
    }
    return next == p->data + p->data_size ? 0
                                          : malformed(p, "header", "data of no tensor at the end");
}

static int safetensors_check_names(struct parser *p) {
    struct tensor_file *file = p->file;
    if (file->count)
        qsort(file->tensors, file->count, sizeof *file->tensors, safetensors_compare_names);
    for (size_t i = 1; i < file->count; i++)
        if (strcmp(file->tensors[i - 1].name, file->tensors[i].name) == 0)
            return malformed(p, file->tensors[i].name, "is there twice");
    return 0;
}

static int header_size(const char *data, size_t size, size_t *header, struct fault *fault) {
    uint64_t n = 0;
    int rc = kind_check(data, size, KIND_SAFETENSORS, "header", "the file", fault);
    if (rc) return rc;
    if (size < 8) return kind_incomplete("header", size, 0, fault);
    for (int i = 7; i >= 0; i--) n = n << 8 | (unsigned char)data[i];
    if (n > HEADER_MAX)
        return fault_set(fault, ERR_LIMIT, "header", "of more than %zu bytes", (size_t)HEADER_MAX);
    if (n > size - 8) return kind_incomplete("header", size, 0, fault);
    if (n == 0 || data[8] != '{')
        return fault_set(fault, ERR_MALFORMED, "header", "does not begin with '{'");
    *header = (size_t)n;
    return 0;
}

int safetensors_parse(const void *data, size_t size, struct tensor_file *out, struct fault *fault) {
    static const struct json_limits limits = {
        .bytes = HEADER_MAX, .depth = 8, .nodes = HEADER_NODES};
    cJSON *header = NULL;
    size_t n = 0;
    *out = (struct tensor_file){0};
    int rc = header_size(data, size, &n, fault);
    if (rc) return rc;
    struct parser p = {.start = data,
                       .data = (const char *)data + 8 + n,
                       .data_size = size - 8 - n,
                       .file = out,
                       .fault = fault};
    rc = json_parse((const char *)data + 8, n, &limits, &header, fault);
    if (!rc) rc = read_header(&p, header);
    if (!rc) rc = check_places(&p);
    if (!rc) rc = safetensors_check_names(&p);
    json_free(header);
    if (rc) tensor_file_close(out);
    return rc;
}

void tensor_file_close(struct tensor_file *file) {
    mem_free(file->tensors);
    mem_free(file->metadata_keepd);
    mem_free(file->names);
    *file = (struct tensor_file){0};
}
