/* A random model written twice with the same numbers: as a GGUF file, as llama.cpp's converter
 * writes such a model, and as a directory. */
#ifndef KEEPD_TESTS_UNIT_MODEL_GGUF_MODEL_H
#define KEEPD_TESTS_UNIT_MODEL_GGUF_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "tests/unit/gguf_file.h"

enum {
    EXPERTS = 3,
    USED = 2,
    LAYERS = 2,
    D = 256,
    FF = 256,
    HEADS = 4,
    HEADS_KV = 2,
    HEAD = 64,
    VOCAB = 64,
    IDS = 40
};

struct family {
    const char *architecture, *class;
    bool permuted, bias, qk_norm;
    bool fused;           /* q, k and v in one tensor, gate and up in another */
    bool glm;             /* gate and up in one tensor, and names of a directory's norms */
    bool fused_file;      /* q, k and v in one tensor of the GGUF file, but not of the directory */
    bool after_attention; /* the GGUF file names the norm of the network's inputs after attention */
    bool half_rotates;
    bool post_norms;   /* norms of the blocks' outputs; `no_pre_norms`: and none of their inputs */
    bool unnormalised; /* experts: norm_topk_prob is false */
    bool no_pre_norms, wide_norms, plus_one; /* plus_one: a directory has the norms less 1 */
    bool factors;                            /* longrope's two tensors */
    void (*put)(struct buf *file);           /* further metadata, `puts` values */
    int puts;
    const char *json;       /* the same in config.json */
    const char *experts[4]; /* names in a directory: router, gate, up, down; NULL: a dense family */
};

struct making {
    const struct family *family;
    uint32_t format;
    bool tied;
    /* Names in the GGUF file: left out; with an element that is none; a matrix in F32. */
    const char *without, *nan, *plain;
    uint64_t random;
    struct buf infos, data;  /* parts of the GGUF file */
    struct buf header, area; /* parts of model.safetensors */
    struct buf factors;      /* part of config.json */
    int tensors;
};

/* Writes model.gguf and a directory's files to a new directory. */
void gguf_model_make(char dir[64], struct making *m);
void gguf_model_remove(const char *dir);

/* The metadata of the sizes above: GGUF_SIZES values, three more with experts. */
enum { GGUF_SIZES = 11 };
void gguf_put_sizes(struct buf *file, const char *architecture, int rotated, bool experts);

#endif
