/* GGUF files (versions 2 and 3, little-endian): the metadata and where tensors lie.
 *
 * gguf_parse is a pure function over (data, size). Nothing is copied but keys and tensor names;
 * values and tensor data point into `data`, aligned to nothing, which must outlive the result.
 * Bounds-checked and overflow-safe: every count is held against the bytes that are left before
 * anything is allocated or walked. Immutable after parsing; any thread.
 *
 * Source: the format's specification (ggml, docs/gguf.md):
 *   "GGUF" u32 version u64 tensors u64 values
 *   values:  key, u32 type, value; an array is u32 type of elements, u64 count, elements
 *   tensors: name, u32 dimensions, u64 size of each (the first varies fastest), u32 type, u64
 *            offset in the data area
 *   zeros up to a multiple of general.alignment, then the data area
 * A string is u64 bytes and the bytes, without a zero at the end. */
#ifndef KEEPD_BASE_GGUF_H
#define KEEPD_BASE_GGUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

/* The type numbers that files use. */
enum gguf_type {
    GGUF_U8,
    GGUF_I8,
    GGUF_U16,
    GGUF_I16,
    GGUF_U32,
    GGUF_I32,
    GGUF_F32,
    GGUF_BOOL,
    GGUF_STRING,
    GGUF_ARRAY,
    GGUF_U64,
    GGUF_I64,
    GGUF_F64
};

/* A string of the file: not checked for UTF-8, and it may hold zeros. */
struct gguf_string {
    const char *data; /* in the file; not NUL-terminated */
    size_t size;
};

struct gguf_value {
    char *key;           /* NUL-terminated, without zeros inside; owned by struct gguf */
    enum gguf_type type; /* an array: type of the elements, never GGUF_ARRAY */
    bool array;
    size_t count; /* number of elements; 1 if the value is not an array */
    const char *data;
    size_t bytes; /* size of all elements */
};

/* The formats of tensors: `block` numbers take `bytes` bytes. The values of the enum are those in
 * files. */
enum gguf_format {
    GGUF_FORMAT_F32 = 0,
    GGUF_FORMAT_F16 = 1,
    GGUF_FORMAT_Q4_0 = 2,
    GGUF_FORMAT_Q4_1 = 3,
    GGUF_FORMAT_Q5_0 = 6,
    GGUF_FORMAT_Q5_1 = 7,
    GGUF_FORMAT_Q8_0 = 8,
    GGUF_FORMAT_Q2_K = 10,
    GGUF_FORMAT_Q3_K = 11,
    GGUF_FORMAT_Q4_K = 12,
    GGUF_FORMAT_Q5_K = 13,
    GGUF_FORMAT_Q6_K = 14,
    GGUF_FORMAT_IQ4_NL = 20,
    GGUF_FORMAT_IQ4_XS = 23,
    GGUF_FORMAT_MXFP4 = 39,
    GGUF_FORMAT_NVFP4 = 40,
    GGUF_FORMAT_BF16 = 30
};

#define GGUF_DIMS_MAX 4

struct gguf_tensor {
    char *name;      /* NUL-terminated, without zeros inside; owned by struct gguf */
    uint32_t format; /* enum gguf_format, or another that gguf_format_name knows */
    int dims;
    int64_t shape[GGUF_DIMS_MAX]; /* as in the file: the first varies fastest; a multiple of the
                                     format's block */
    uint64_t offset;              /* in the data area */
    const char *data;
    size_t bytes;
};

struct gguf {
    int version;
    struct gguf_value *values; /* sorted by key, no two alike */
    size_t value_count;
    struct gguf_tensor *tensors; /* sorted by name, no two alike */
    size_t tensor_count;
};

/* Tensors lie in the file one after the other, each at the next multiple of the alignment: no
 * overlap and no hole. Errors name the key or the tensor; *out is then empty. */
int gguf_parse(const void *data, size_t size, struct gguf *out, struct fault *fault);
void gguf_close(struct gguf *gguf);

/* Returns whether the path is to be read as a GGUF file, not as a folder: a file is there, whatever
 * its name, or nothing is there and the name ends in ".gguf". */
bool gguf_is_path(const char *path);

/* Returns NULL for an unknown format. Q8_1 and Q8_K never occur in files. */
const char *gguf_format_name(uint32_t format);
/* Returns 0 for an unknown format. */
int gguf_format_block(uint32_t format, size_t *bytes);

const struct gguf_value *gguf_find(const struct gguf *gguf, const char *key); /* NULL: absent */

/* Typed getters, as in base/json.h. If the key is absent, they return 0 and leave *value unchanged.
 * A wrong type or a value out of range is ERR_INVALID, and fault->field is the key. */
int gguf_int(const struct gguf *gguf, const char *key, int64_t min, int64_t max, int64_t *value,
             struct fault *fault); /* any integer type */
/* A token's id, at most INT32_MAX. -1 means that there is none, and counts as absent; files write
 * it in numbers without a sign, too (4294967295). */
int gguf_token(const struct gguf *gguf, const char *key, int64_t *id, struct fault *fault);
int gguf_num(const struct gguf *gguf, const char *key, double min, double max, double *value,
             struct fault *fault); /* F32, F64; finite */
int gguf_bool(const struct gguf *gguf, const char *key, bool *value, struct fault *fault);
int gguf_str(const struct gguf *gguf, const char *key, struct gguf_string *value,
             struct fault *fault);
/* *value is the array, or NULL if it is absent. */
int gguf_array(const struct gguf *gguf, const char *key, enum gguf_type type,
               const struct gguf_value **out, struct fault *fault);

/* Returns an element of a value. The index must be below the value's count, and the type must fit.
 */
int64_t gguf_element_int(const struct gguf_value *value, size_t index); /* integers; a U64 beyond
                                                                           INT64_MAX is that */
double gguf_element_num(const struct gguf_value *value, size_t index);  /* F32, F64 */

/* Returns the strings of a value in order: begin with *at == NULL, which each call moves on; false
 * after the last.
 *   const char *at = NULL;
 *   struct gguf_string s;
 *   while (gguf_next(value, &at, &s)) ... */
bool gguf_next(const struct gguf_value *value, const char **at, struct gguf_string *out);

#endif
