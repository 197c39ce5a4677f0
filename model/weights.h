/* Model files: safetensors (one file or a sharded index) or GGUF (one file or split), memory-mapped
 * and checked, as one table of tensors. safetensors_parse is a pure function over (data, size). */
#ifndef KEEPD_MODEL_WEIGHTS_H
#define KEEPD_MODEL_WEIGHTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/gguf.h"
#include "kernels/kern.h"
#include "model/packed.h"

#define TENSOR_DIMS_MAX 5

/* BLOCKS: numbers in blocks with a common scale, of a GGUF type that model/blocks.h reads or of a
 * directory (model/packed.h). */
enum tensor_dtype {
    TENSOR_F32,
    TENSOR_F16,
    TENSOR_BF16,
    TENSOR_E4M3,
    TENSOR_BLOCKS,
    TENSOR_I32,
    TENSOR_OTHER
};

struct tensor {
    const char *name; /* NUL-terminated, owned by the file table */
    const char *type; /* the name in the file's format, "BF16", "Q4_K"; static */
    enum tensor_dtype dtype;
    uint32_t format; /* BLOCKS: enum gguf_format, where `packed` is NULL */
    const struct packed *packed;
    int dims;
    int64_t shape[TENSOR_DIMS_MAX]; /* the last varies fastest, unless `turned` */
    bool turned;      /* the last dimension but one varies fastest: see weights_turn */
    const void *data; /* points into the mapping; aligned to nothing */
    size_t bytes;
};

struct tensor_file {
    struct tensor *tensors; /* sorted by name */
    size_t count;
    char *metadata_keepd; /* __metadata__.keepd or NULL */
    char *names;          /* storage */
};

/* Parses a file. Checks all bounds without overflow, and refuses overlapping tensors, holes,
 * duplicate names, and headers above 100 MB. Allocates no more than the file's size justifies. */
int safetensors_parse(const void *data, size_t size, struct tensor_file *out, struct fault *fault);
void tensor_file_close(struct tensor_file *file);

/* Returns the number of files of a split GGUF model, by the name of the first,
 * "...-00001-of-00004.gguf"; 1 for other names. */
size_t weights_gguf_count(const char *first);
/* Writes the name of file `index`, from 0; false: it does not fit. */
bool weights_gguf_path(const char *first, size_t index, char *out, size_t size);

struct weights; /* one or more mapped files */
/* Opens a directory, or a GGUF file by its name (gguf_is_path); of a split model, the first. */
int weights_open(const char *path, struct weights **out, struct fault *fault);
int weights_open_file(const char *path, struct weights **out, struct fault *fault);
/* Opens a GGUF or safetensors file as a copy of at most `most` bytes: a file that is mapped ends
 * the process if somebody shortens it meanwhile. */
int weights_copy(const char *path, bool gguf, size_t most, struct weights **out,
                 struct fault *fault);
/* Joins the tensors of packed matrices in the table of a directory (packed_join). Called once,
 * before the table is used. */
int weights_join(struct weights *weights, const struct packing *how, struct fault *fault);
/* Gives the tensors of a directory's language model the names that they have in a model without
 * other parts; tensors of the other parts keep theirs. */
int weights_take_text(struct weights *weights, struct fault *fault);
/* The same for names behind `front`, as adapters have them; others stay. */
int weights_take_text_behind(struct weights *weights, const char *front, struct fault *fault);
/* Adds the tensors of a Dense module, model.safetensors in that folder of the directory, by names
 * that begin with "dense.INDEX."; nothing where the table has them, as in directories that keepd
 * saved. Called before weights_join. */
int weights_add_dense(struct weights *weights, const char *dir, const char *folder, int index,
                      struct fault *fault);
/* Gives the tensors of a directory's block that predicts further tokens, which Qwen3.5 names
 * "mtp...", the names that other families give it: those of layer `layer`. Called once. */
int weights_take_block(struct weights *weights, int layer, struct fault *fault);
/* Transposes float tensors whose name ends with `end` and whose matrices do not have rows of `cols`
 * numbers. From now on their shapes are those of the model. */
void weights_turn(struct weights *weights, const char *end, int64_t cols);
void weights_close(struct weights *weights);
const struct tensor *weights_find(const struct weights *weights, const char *name); /* or NULL */
const struct tensor *weights_at(const struct weights *weights, size_t index);       /* by name */
/* Returns the file in which an index promises the tensor that it does not have; NULL: none. */
const char *weights_absent(const struct weights *weights, const char *name);
/* Releases memory of the files that is not needed for now; bytes that are in no file are ignored.
 */
void weights_release(const struct weights *weights, const void *from, size_t bytes);
size_t weights_count(const struct weights *weights);
/* The metadata of a GGUF file; NULL for safetensors. */
const struct gguf *weights_gguf(const struct weights *weights);
const char *weights_metadata_keepd(const struct weights *weights);
size_t weights_bytes(const struct weights *weights);

/* Writes a shape as "2, 3" into `out`, which has room for `size` bytes. */
void tensor_shape_text(const int64_t *shape, int dims, char *out, size_t size);
bool tensor_is_float(enum tensor_dtype dtype); /* F32, F16, BF16 */
/* Reads elements [first, first + count) of a float tensor as float32, as backends take norms,
 * biases and gates. false: they lie outside of the tensor, and nothing is written. */
bool tensor_read_floats(const struct tensor *tensor, size_t first, size_t count, float *out);

#endif
