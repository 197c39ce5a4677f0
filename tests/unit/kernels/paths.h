/* For the kernel tests: every CPU path this machine has, random numbers, and double arithmetic to
 * judge them by. */
#ifndef KEEPD_TESTS_UNIT_KERNELS_PATHS_H
#define KEEPD_TESTS_UNIT_KERNELS_PATHS_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/blocks.h"
#include "kernels/cpu/internal.h"
#include "tests/unit/kernels/noise.h"

static const char *const path_names[] = {"reference", "portable", "neon", "avx2", "avx512", "amx"};

#define PATH_COUNT ((int)(sizeof path_names / sizeof *path_names))

/* NULL where the processor lacks the path, after saying so once. */
static inline struct kern *path_open(int path, int threads) {
    struct cpu_options options = {.path = path_names[path], .threads = threads};
    struct kern *kern;
    struct fault fault = {0};
    int rc = cpu_open(&options, &kern, &fault);
    if (rc == 0) return kern;
    static bool told[PATH_COUNT];
    if (!told[path]) fprintf(stderr, "skip: path %s: %s\n", path_names[path], fault.text);
    told[path] = true;
    return NULL;
}

/* The paths, and the path avx512 with float32 beside weights in bf16 and fp8 and in attention,
 * where it would round to bf16. */
#define WAYS (PATH_COUNT + 1)

static inline struct kern *way_open(int way, int threads) {
    const struct cpu_options options = {
        .path = "avx512", .activations = CPU_INT16, .threads = threads};
    struct kern *kern = NULL;
    if (way < PATH_COUNT) return path_open(way, threads);
    return cpu_open(&options, &kern, NULL) == 0 ? kern : NULL;
}

static inline bool path_is(int path, const char *name) {
    return !strcmp(path_names[path], name);
}

/* A matrix as a file has it, and what its elements are worth. */
struct test_matrix {
    struct kern_matrix file;
    float *value; /* [rows * cols] */
    float *scale; /* E4M3: [rows], powers of two, so that it does not matter when they multiply */
    void *bytes;
};

static inline uint16_t to_f16(float x) { /* for normal results only */
    uint32_t bits = number_bits(x);
    if (fabsf(x) < 0x1p-14f) return 0;
    return (uint16_t)((bits >> 16 & 0x8000) | ((((bits >> 23 & 255) - 112) << 10 & 0x7c00)) |
                      (bits >> 13 & 1023));
}

/* A matrix in blocks: numbers of the format's range, halves with scales of their own where it has
 * them. */
static inline struct test_matrix matrix_of_blocks(int64_t rows, int64_t cols, enum kern_dtype dtype,
                                                  uint64_t seed) {
    size_t each = (size_t)blocks_of(cols), count = (size_t)rows * each;
    struct block *blocks = calloc(count, sizeof *blocks);
    struct test_matrix m = {.value = fresh((size_t)(rows * cols), seed), .bytes = (void *)blocks};
    const int lowest = dtype == KERN_Q4 ? -8 : dtype == KERN_Q4M ? 0 : -128;
    const int numbers = dtype == KERN_Q4 || dtype == KERN_Q4M ? 16 : 256;
    if (!blocks) abort();
    for (size_t b = 0; b < count; b++) {
        uint64_t random = mix(seed + b);
        block_set_factors(&blocks[b], ldexpf(1 + (float)(random % 8) / 8, -7),
                          block_has_least(dtype) ? -0.25f - (float)(random >> 8 & 7) / 32
                                                 : BLOCK_NO_LEAST);
        if (block_is_split(dtype)) blocks[b].scale[1] *= 0.75f, blocks[b].least[1] *= 0.5f;
        for (int i = 0; i < KERN_BLOCK && (int64_t)(b % each) * KERN_BLOCK + i < cols; i++) {
            blocks[b].n[i] =
                (int8_t)(lowest + (int)(mix(random + (uint64_t)i) % (uint64_t)numbers));
            m.value[(b / each) * (size_t)cols + b % each * KERN_BLOCK + (size_t)i] =
                block_number(&blocks[b], i);
        }
    }
    m.file = (struct kern_matrix){.data = blocks, .dtype = dtype, .rows = rows, .cols = cols};
    return m;
}

/* The file's data starts one byte off: files promise no alignment. */
static inline struct test_matrix matrix_make(int64_t rows, int64_t cols, enum kern_dtype dtype,
                                             uint64_t seed) {
    if (kern_dtype_blocks(dtype)) return matrix_of_blocks(rows, cols, dtype, seed);
    size_t count = (size_t)(rows * cols), size = kern_dtype_bytes(dtype);
    struct test_matrix m = {.value = fresh(count, seed),
                            .scale = malloc((size_t)rows * sizeof *m.scale),
                            .bytes = malloc(count * size + 1)};
    if (!m.bytes || !m.scale) abort();
    char *to = (char *)m.bytes + 1;
    for (int64_t r = 0; r < rows; r++) m.scale[r] = ldexpf(1, (int)(r % 5) - 9);
    for (size_t i = 0; i < count; i++) {
        float scale = m.scale[i / (size_t)cols];
        uint8_t code = number_to_e4m3(m.value[i] / scale);
        if (dtype == KERN_E4M3) {
            m.value[i] = scale * number_from_e4m3(code);
            to[i] = (char)code;
            continue;
        }
        uint16_t half = dtype == KERN_BF16 ? number_to_bf16(m.value[i]) : to_f16(m.value[i]);
        if (dtype == KERN_BF16) m.value[i] = number_from_bf16(half);
        if (dtype == KERN_F16) m.value[i] = number_from_f16(half);
        memcpy(to + i * size, dtype == KERN_F32 ? (void *)&m.value[i] : (void *)&half, size);
    }
    m.file = (struct kern_matrix){.data = to, .dtype = dtype, .rows = rows, .cols = cols};
    if (dtype == KERN_E4M3) m.file.scale = m.scale;
    return m;
}

/* E4M3 with a factor for each `group` inputs of a row, of which the first has but `group -
 * skipped`.
 */
static inline struct test_matrix matrix_of_groups(int64_t rows, int64_t cols, int64_t group,
                                                  int64_t skipped, uint64_t seed) {
    struct test_matrix m = matrix_make(rows, cols, KERN_E4M3, seed);
    const int64_t scales = (skipped + cols + group - 1) / group;
    free(m.scale);
    m.scale = malloc((size_t)(rows * scales) * sizeof *m.scale);
    if (!m.scale) abort();
    for (int64_t i = 0; i < rows * scales; i++)
        m.scale[i] = 0.001f + (float)(mix(seed + (uint64_t)i) % 64) / 4096;
    for (int64_t i = 0; i < rows * cols; i++)
        m.value[i] = m.scale[i / cols * scales + (skipped + i % cols) / group] *
                     number_from_e4m3(((const uint8_t *)m.file.data)[i]);
    m.file.scale = m.scale;
    m.file.scales = scales;
    m.file.group = group;
    m.file.skipped = skipped;
    return m;
}

/* The same numbers in float32: for backends that round the activations of blocks. */
static inline struct kern_matrix matrix_wide(const struct test_matrix *m) {
    return (struct kern_matrix){
        .data = m->value, .dtype = KERN_F32, .rows = m->file.rows, .cols = m->file.cols};
}

static inline void matrix_close(struct test_matrix *m) {
    free(m->value);
    free(m->scale);
    free(m->bytes);
}

#endif
