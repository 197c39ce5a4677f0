/* Model files: safetensors (one file or a sharded index) memory-mapped and checked.
 * safetensors_parse is a pure function over (data, size); weights_open maps a directory. */
#ifndef KEEPD_MODEL_WEIGHTS_H
#define KEEPD_MODEL_WEIGHTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "kernels/kern.h"

#define TENSOR_DIMS_MAX 4

enum tensor_dtype { TENSOR_F32, TENSOR_F16, TENSOR_BF16, TENSOR_E4M3, TENSOR_I32, TENSOR_OTHER };

struct tensor {
    const char *name; /* NUL-terminated, owned by the file table */
    enum tensor_dtype dtype;
    int dims;
    int64_t shape[TENSOR_DIMS_MAX];
    const void *data; /* points into the mapping; aligned to nothing */
    size_t bytes;
};

struct tensor_file {
    struct tensor *tensors; /* sorted by name */
    size_t count;
    char *metadata_keepd; /* __metadata__.keepd or NULL */
    char *names;          /* storage */
};

/* Bounds-checked, overflow-safe; refuses overlapping tensors, holes at odd sizes, duplicate names,
 * headers above 100 MB. Allocates only what the file's size justifies. */
int safetensors_parse(const void *data, size_t size, struct tensor_file *out, struct fault *fault);
void tensor_file_close(struct tensor_file *file);

struct weights; /* one or more mapped files */
int weights_open_dir(const char *dir, struct weights **out, struct fault *fault);
int weights_open_file(const char *path, struct weights **out, struct fault *fault);
void weights_close(struct weights *weights);
const struct tensor *weights_find(const struct weights *weights, const char *name); /* or NULL */
const char *weights_metadata_keepd(const struct weights *weights);
size_t weights_bytes(const struct weights *weights);

/* Elements as float32: norms, biases and gates, which backends take in float32. */
bool tensor_is_float(enum tensor_dtype dtype); /* F32, F16, BF16 */
/* Elements [first, first + count) of a tensor whose dtype is a float; false, with nothing written,
 * when they lie outside it. */
bool tensor_read_floats(const struct tensor *tensor, size_t first, size_t count, float *out);

#endif
