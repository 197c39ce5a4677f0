#include "model/rows.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "model/blocks.h"

#define LOOKED_AT  ((int64_t)4096) /* together, before one of them is looked for */
#define ROWS_TAKEN 16              /* a worker reads so many at a time */

struct reading {
    const struct rows *rows;
    block_reader *blocks; /* NULL: numbers lie one by one */
    block_maker *make;    /* NULL: numbers of blocks become float32 */
    size_t from_bytes;    /* one row in the file */
    int64_t cols;
    char *to;            /* NULL: they stay in the file */
    size_t to_bytes;     /* one row there */
    _Atomic int64_t bad; /* the first element that is no finite number; INT64_MAX: none */
    struct cpu_tickets tickets;
};

int64_t rows_source(const struct rows *rows, int64_t row) {
    return rows->order ? row - row % rows->head + rows->order[row % rows->head] : row;
}

/* Numbers of a row: the dimension that varies fastest. */
static int64_t cols_of(const struct tensor *tensor) {
    return tensor->shape[tensor->dims - 1];
}

static size_t row_bytes(const struct tensor *tensor) {
    int64_t rows = 1;
    for (int i = 0; i + 1 < tensor->dims; i++) rows *= tensor->shape[i];
    return rows > 0 ? tensor->bytes / (size_t)rows : 0;
}

const void *rows_at(const struct rows *rows) {
    return (const char *)rows->tensor->data + (size_t)rows->first * row_bytes(rows->tensor);
}

/* The first number with an exponent of all ones, or `count`. */
static int64_t find_special(const char *from, int64_t count, enum tensor_dtype dtype) {
    const uint32_t ones = dtype == TENSOR_F16 ? 0x7c00 : dtype == TENSOR_BF16 ? 0x7f80 : 0x7f800000;
    const size_t size = dtype == TENSOR_F16 || dtype == TENSOR_BF16 ? 2 : 4;
    for (int64_t at = 0, end; at < count; at = end) {
        unsigned any = 0;
        end = count - at < LOOKED_AT ? count : at + LOOKED_AT;
        for (int64_t i = at; i < end && size == 2; i++) {
            uint16_t bits;
            memcpy(&bits, from + 2 * i, sizeof bits);
            any |= (bits & ones) == ones;
        }
        for (int64_t i = at; i < end && size == 4; i++) {
            uint32_t bits;
            memcpy(&bits, from + 4 * i, sizeof bits);
            any |= (bits & ones) == ones;
        }
        for (int64_t i = at; any && i < end; i++) {
            uint32_t bits = 0;
            memcpy(&bits, from + (size_t)i * size, size);
            if ((bits & ones) == ones) return i;
        }
    }
    return count;
}

/* The first number of a block whose factors are not finite, or `count`. */
static int64_t find_bad_block(const struct block *blocks, int64_t count) {
    for (int64_t b = 0; b < blocks_of(count); b++)
        if (!isfinite(blocks[b].scale) || !isfinite(blocks[b].least)) return b * KERN_BLOCK;
    return count;
}

static void read_row(struct reading *job, int64_t row) {
    const struct tensor *tensor = job->rows->tensor;
    const int64_t source = rows_source(job->rows, row);
    const char *from = (const char *)rows_at(job->rows) + (size_t)source * job->from_bytes;
    char *to = job->to ? job->to + (size_t)row * job->to_bytes : NULL;
    size_t bytes;
    const int block = job->blocks ? gguf_format_block(tensor->format, &bytes) : 1;
    if (job->make)
        job->make((const uint8_t *)from, (size_t)(job->cols / block), (struct block *)(void *)to);
    else if (job->blocks)
        job->blocks((const uint8_t *)from, (size_t)(job->cols / block), (float *)(void *)to);
    else if (to)
        memcpy(to, from, job->from_bytes);
    int64_t bad = job->make ? find_bad_block((const struct block *)(const void *)to, job->cols)
                            : find_special(to ? to : from, job->cols, tensor->dtype);
    if (bad == job->cols) return;
    bad += (job->rows->first + source) * job->cols;
    int64_t before = atomic_load(&job->bad);
    while (bad < before && !atomic_compare_exchange_weak(&job->bad, &before, bad)) continue;
}

static void read_some(void *arg, int worker) {
    (void)worker;
    struct reading *job = arg;
    int64_t end;
    for (int64_t row; (row = cpu_tickets_take(&job->tickets, ROWS_TAKEN, &end)) >= 0;)
        for (; row < end; row++) read_row(job, row);
}

bool rows_need_room(const struct rows *rows) {
    return rows->order || rows->tensor->dtype == TENSOR_BLOCKS;
}

int64_t rows_read(const struct rows *rows, char *to, struct cpu_team *team) {
    const struct tensor *tensor = rows->tensor;
    if (rows->count == 0) return -1;
    struct reading job = {.rows = rows,
                          .from_bytes = row_bytes(tensor),
                          .cols = cols_of(tensor),
                          .to = to,
                          .bad = INT64_MAX};
    if (tensor->dtype == TENSOR_BLOCKS) job.blocks = block_reader_of(tensor->format);
    job.to_bytes = job.blocks ? (size_t)job.cols * sizeof(float) : job.from_bytes;
    if (job.blocks && rows->blocks) {
        enum kern_dtype dtype;
        job.make = block_maker_of(tensor->format, &dtype);
        job.to_bytes = (size_t)blocks_of(job.cols) * sizeof(struct block);
    }
    cpu_tickets_set(&job.tickets, rows->count);
    cpu_team_run(team, read_some, &job);
    return job.bad == INT64_MAX ? -1 : job.bad;
}
