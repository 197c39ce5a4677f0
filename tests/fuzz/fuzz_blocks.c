/* Any bytes as blocks of each GGUF format with blocks: packed for the CPU they keep their numbers.
 * Some products of one format are computed, too, which have the same bits on this processor's path
 * as on the portable one. The first byte chooses that format and the length of rows, the second one
 * whether there are products and how their inputs are rounded. */
#include <math.h>
#include <string.h>

#include "base/check.h"
#include "base/gguf.h"
#include "kernels/cpu/block.h"
#include "kernels/cpu/cpu.h"
#include "kernels/number.h"
#include "model/blocks.h"

#define ROWS_MOST   4   /* outputs */
#define COLS_MOST   512 /* inputs */
#define BLOCKS_MOST (COLS_MOST / KERN_BLOCK)
#define INPUT_ROWS  5

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const uint32_t formats[] = {
    GGUF_FORMAT_Q4_0,   GGUF_FORMAT_Q4_1,   GGUF_FORMAT_Q5_0,  GGUF_FORMAT_Q5_1, GGUF_FORMAT_Q8_0,
    GGUF_FORMAT_Q2_K,   GGUF_FORMAT_Q3_K,   GGUF_FORMAT_Q4_K,  GGUF_FORMAT_Q5_K, GGUF_FORMAT_Q6_K,
    GGUF_FORMAT_IQ4_NL, GGUF_FORMAT_IQ4_XS, GGUF_FORMAT_MXFP4, GGUF_FORMAT_NVFP4};

#define FORMATS (sizeof formats / sizeof *formats)

static struct kern *open_path(const char *path, enum cpu_activations activations) {
    const struct cpu_options options = {.path = path, .threads = 1, .activations = activations};
    struct kern *kern = NULL;
    CHECK(cpu_open(&options, &kern, NULL) == 0);
    return kern;
}

/* Zeros may differ in their signs: numbers of MXFP4 in files have one, those of blocks do not. */
static bool same_number(float x, float y) {
    return x == y || (isnan(x) && isnan(y));
}

static bool same(float x, float y) {
    return number_bits(x) == number_bits(y) || (isnan(x) && isnan(y));
}

/* Loads the matrix, and compares each number with the file's. */
static struct kern_weight *load(struct kern *kern, const struct kern_matrix *m, const float *want) {
    struct kern_weight *w;
    const struct block *from = m->data;
    CHECK(kern->ops->weight_load(kern, m, 1, KERN_SHARD_NONE, &w, NULL) == 0);
    for (int64_t row = 0; row < m->rows; row++)
        for (int64_t b = 0; b < m->cols / KERN_BLOCK; b++, from++) {
            const struct block got = cpu_block_at(w, row, b);
            for (int i = 0; i < KERN_BLOCK; i++, want++) {
                CHECK(same_number(*want, block_number(from, i)));
                CHECK(same_number(*want, block_number(&got, i)));
            }
        }
    return w;
}

/* Inputs of many sizes, one of which is not finite if `broken`. */
static void make_inputs(float *x, int64_t count, const uint8_t *data, size_t size, bool broken) {
    for (int64_t i = 0; i < count; i++) {
        const uint8_t byte = size ? data[(size_t)i % size] : 0;
        x[i] = ldexpf((float)((i * 37 + byte) % 255 - 127), byte % 16 - 8);
    }
    if (broken) x[data[0] % count] = data[0] % 2 ? INFINITY : NAN;
}

static void same_products(const struct kern_matrix *m, const float *want, int how,
                          const uint8_t *data, size_t size) {
    static struct kern *kerns[2][2];
    const bool wide = how & 4;
    float x[INPUT_ROWS * COLS_MOST], y[2][INPUT_ROWS * ROWS_MOST];
    make_inputs(x, INPUT_ROWS * m->cols, data, size, (how & 24) == 0);
    for (int k = 0; k < 2; k++) {
        struct kern **kern = &kerns[wide][k];
        if (!*kern) *kern = open_path(k ? "auto" : "portable", wide ? CPU_INT16 : CPU_INT8);
        struct kern_weight *w = load(*kern, m, want);
        (*kern)->ops->matmul(*kern, y[k], x, w, NULL, INPUT_ROWS, KERN_SET);
        (*kern)->ops->weight_free(*kern, w);
    }
    for (int64_t i = 0; i < INPUT_ROWS * m->rows; i++) CHECK(same(y[0][i], y[1][i]));
}

/* `how`: the second byte if products are to be computed, otherwise -1. */
static void check_format(uint32_t format, int cols, int how, const uint8_t *data, size_t size) {
    static struct kern *kern;
    static struct block made[ROWS_MOST * BLOCKS_MOST];
    static float numbers[ROWS_MOST * COLS_MOST];
    struct kern_matrix m = {.data = made};
    size_t bytes;
    const int block = gguf_format_block(format, &bytes);
    m.cols = cols / block * block;
    if (m.cols == 0) m.cols = block;
    const size_t row = (size_t)(m.cols / block) * bytes, rows = size / row;
    m.rows = rows < ROWS_MOST ? (int64_t)rows : ROWS_MOST;
    if (!rows) return;
    const size_t blocks = (size_t)(m.rows * m.cols / block);
    block_maker_of(format, &m.dtype)(data, blocks, made);
    block_reader_of(format)(data, blocks, numbers);
    if (how >= 0) {
        same_products(&m, numbers, how, data, size);
        return;
    }
    if (!kern) kern = open_path("auto", CPU_INT8);
    kern->ops->weight_free(kern, load(kern, &m, numbers));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 3) return 0;
    const size_t chosen = data[1] % 4 ? FORMATS : data[0] % FORMATS;
    const int cols = KERN_BLOCK * (1 + data[0] / (int)FORMATS % BLOCKS_MOST);
    for (size_t i = 0; i < FORMATS; i++)
        check_format(formats[i], cols, i == chosen ? data[1] : -1, data + 2, size - 2);
    return 0;
}
