#include "model/rows.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "base/gguf.h"
#include "base/mem.h"
#include "kernels/number.h"
#include "model/blocks.h"

#define LOOKED_AT  ((int64_t)4096) /* checked together, before a bad number is located */
#define ROWS_TAKEN 16              /* rows that a worker reads at a time */

#define HEADS_MAX      1024 /* most value heads, and most bytes of one in a row */
#define HEAD_BYTES_MAX 4096

#define AT_ONCE 256 /* numbers that are narrowed together: whole blocks */

struct rows_reading {
    const struct rows *rows;
    block_reader *blocks; /* reader of the tensor's GGUF type, or NULL */
    block_maker *make;    /* maker of the same, or NULL */
    bool wide;            /* numbers of blocks become floats */
    bool made;            /* blocks become struct block */
    size_t from_bytes;    /* one row in the file */
    int64_t cols;
    char *to;        /* NULL: the rows stay in the file */
    size_t to_bytes; /* bytes of one row in `to` */
    enum kern_dtype dtype;
    _Atomic int64_t bad; /* the first element that is not a finite number; INT64_MAX: none */
    struct cpu_tickets tickets;
};

int64_t rows_source(const struct rows *rows, int64_t row) {
    if (rows->order) row = row - row % rows->head + rows->order[row % rows->head];
    return rows->place ? tensor_row(rows->place, row) : row;
}

/* Returns how many dimensions number the rows; the others are those of a row. */
static int row_dims(const struct rows *rows) {
    return rows->tensor->dims - (rows->scales ? 2 : 1);
}

static int64_t cols_of(const struct rows *rows) {
    const int64_t last = rows->tensor->shape[row_dims(rows)];
    return rows->scales ? last * BLOCK_MXFP4 : last;
}

static size_t rows_row_bytes(const struct rows *rows) {
    int64_t count = 1;
    for (int i = 0; i < row_dims(rows); i++) count *= rows->tensor->shape[i];
    return count > 0 ? rows->tensor->bytes / (size_t)count : 0;
}

const void *rows_at(const struct rows *rows) {
    return (const char *)rows->tensor->data + (size_t)rows->first * rows_row_bytes(rows);
}

size_t rows_bytes(const struct rows *rows) {
    const struct tensor_rows *place = rows->place;
    if (rows->tensor->turned) return 0;
    int64_t last = place ? (rows->count - 1) / place->run * place->pitch + place->run : rows->count;
    return (size_t)last * rows_row_bytes(rows);
}

enum kern_dtype rows_dtype(const struct rows *rows) {
    const struct tensor *tensor = rows->tensor;
    if (rows->scales) return KERN_BF16;
    if (rows->codes) return KERN_E4M3;
    if (tensor->packed) return packed_dtype(tensor->packed);
    if (tensor->dtype == TENSOR_BLOCKS)
        return tensor->format == GGUF_FORMAT_MXFP4 ? KERN_BF16 : KERN_F32;
    return tensor->dtype == TENSOR_F32    ? KERN_F32
           : tensor->dtype == TENSOR_F16  ? KERN_F16
           : tensor->dtype == TENSOR_E4M3 ? KERN_E4M3
                                          : KERN_BF16;
}

/* Returns the first number that is infinite or NaN (in E4M3: NaN), or `count`. */
static int64_t find_special(const char *from, int64_t count, enum kern_dtype dtype) {
    const uint32_t ones = dtype == KERN_F16    ? 0x7c00
                          : dtype == KERN_BF16 ? 0x7f80
                          : dtype == KERN_E4M3 ? 0x7f
                                               : 0x7f800000;
    const size_t size = kern_dtype_bytes(dtype);
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
        for (int64_t i = at; i < end && size == 1; i++) any |= ((uint8_t)from[i] & ones) == ones;
        for (int64_t i = at; any && i < end; i++) {
            uint32_t bits = 0;
            memcpy(&bits, from + (size_t)i * size, size);
            if ((bits & ones) == ones) return i;
        }
    }
    return count;
}

/* Returns the first number of the blocks that is not finite, or `count`. */
static int64_t find_bad_block(const struct block *blocks, int64_t count) {
    for (int64_t b = 0; b < blocks_of(count); b++) {
        bool bad = false;
        for (int i = 0; i < KERN_BLOCK; i++) bad |= !isfinite(block_number(&blocks[b], i));
        for (int i = 0; bad && i < KERN_BLOCK; i++)
            if (!isfinite(block_number(&blocks[b], i))) return b * KERN_BLOCK + i;
    }
    return count;
}

/* Returns the scales of a row of split MXFP4. */
static const uint8_t *scales_at(const struct rows_reading *job, int64_t source) {
    return (const uint8_t *)job->rows->scales->data +
           (job->rows->first + source) * (job->cols / BLOCK_MXFP4);
}

/* Reads the numbers [at, at + count) of a row as float32; they are whole blocks. `source`: the row,
 * counted from rows->first. */
static void read_block_numbers(const struct rows_reading *job, int64_t source, int64_t at,
                               int64_t count, float *out) {
    const struct rows *rows = job->rows;
    const uint8_t *from = (const uint8_t *)rows_at(rows) + (size_t)source * job->from_bytes;
    for (int64_t i = at; rows->scales && i < at + count; i += BLOCK_MXFP4) {
        struct block block;
        block_make_split_mxfp4(from + i / 2, scales_at(job, source) + i / BLOCK_MXFP4, 1, &block);
        for (int k = 0; k < BLOCK_MXFP4; k++) *out++ = block_number(&block, k);
    }
    if (rows->scales) return;
    if (rows->tensor->packed) {
        packed_read(rows->tensor->packed, rows->first + source, at, count, out);
        return;
    }
    size_t bytes;
    int block = gguf_format_block(rows->tensor->format, &bytes);
    job->blocks(from + (size_t)(at / block) * bytes, (size_t)(count / block), out);
}

static void read_narrow(const struct rows_reading *job, int64_t source, char *to) {
    float wide[AT_ONCE];
    for (int64_t at = 0, count; at < job->cols; at += count) {
        count = job->cols - at < AT_ONCE ? job->cols - at : AT_ONCE;
        read_block_numbers(job, source, at, count, wide);
        for (int64_t i = 0; i < count; i++) {
            const uint16_t bits = number_to_bf16(wide[i]);
            memcpy(to + 2 * (at + i), &bits, sizeof bits);
        }
    }
}

/* Writes a row as blocks of struct block. */
static void make_row_blocks(const struct rows_reading *job, int64_t source, struct block *to) {
    const struct rows *rows = job->rows;
    const uint8_t *from = (const uint8_t *)rows_at(rows) + (size_t)source * job->from_bytes;
    size_t bytes;
    if (rows->scales)
        block_make_split_mxfp4(from, scales_at(job, source), (size_t)blocks_of(job->cols), to);
    else if (rows->tensor->packed)
        packed_blocks(rows->tensor->packed, rows->first + source, 0, blocks_of(job->cols), to);
    else
        job->make(from, (size_t)(job->cols / gguf_format_block(rows->tensor->format, &bytes)), to);
}

/* Reads a row of a transposed tensor, which is a column of the stored matrix. */
static void read_turned(const struct rows_reading *job, int64_t source, char *to) {
    const struct tensor *tensor = job->rows->tensor;
    const int64_t row = job->rows->first + source, rows = tensor->shape[tensor->dims - 2];
    const size_t size = kern_dtype_bytes(job->dtype);
    const char *from =
        (const char *)tensor->data + (size_t)(row / rows * job->cols * rows + row % rows) * size;
    for (int64_t i = 0; i < job->cols; i++)
        memcpy(to + (size_t)i * size, from + (size_t)(i * rows) * size, size);
}

/* Reorders the heads in a row, each of `unit` bytes, along the cycles that the permutation consists
 * of. */
static void turn_columns(const struct tensor_rows *columns, char *row, size_t unit) {
    char held[HEAD_BYTES_MAX];
    bool done[HEADS_MAX] = {false};
    const int heads = columns->outer * columns->inner;
    for (int first = 0; first < heads; first++) {
        if (done[first]) continue;
        memcpy(held, row + (size_t)first * unit, unit);
        for (int head = first;;) {
            const int from = (int)(tensor_row(columns, head * columns->unit) / columns->unit);
            done[head] = true;
            if (from == first) {
                memcpy(row + (size_t)head * unit, held, unit);
                break;
            }
            memcpy(row + (size_t)head * unit, row + (size_t)from * unit, unit);
            head = from;
        }
    }
}

/* Reads one row. `to`: memory for it, or NULL. false: one of its numbers is not finite. */
static bool read_matrix_row(struct rows_reading *job, int64_t row, char *to) {
    const int64_t source = rows_source(job->rows, row);
    const char *from = (const char *)rows_at(job->rows) + (size_t)source * job->from_bytes;
    if (job->made)
        make_row_blocks(job, source, (struct block *)(void *)to);
    else if (job->wide && job->dtype == KERN_F32)
        read_block_numbers(job, source, 0, job->cols, (float *)(void *)to);
    else if (job->wide)
        read_narrow(job, source, to);
    else if (to && job->rows->tensor->turned)
        read_turned(job, source, to);
    else if (to)
        memcpy(to, from, job->from_bytes);
    int64_t bad = job->made ? find_bad_block((const struct block *)(const void *)to, job->cols)
                            : find_special(to ? to : from, job->cols, job->dtype);
    if (job->rows->columns && to)
        turn_columns(job->rows->columns, to,
                     job->to_bytes * (size_t)job->rows->columns->unit / (size_t)job->cols);
    if (bad == job->cols) return true;
    bad += (job->rows->first + source) * job->cols;
    int64_t before = atomic_load(&job->bad);
    while (bad < before && !atomic_compare_exchange_weak(&job->bad, &before, bad)) continue;
    return false;
}

static void read_some(void *arg, int worker) {
    (void)worker;
    struct rows_reading *job = arg;
    int64_t end;
    for (int64_t row; (row = cpu_tickets_take(&job->tickets, ROWS_TAKEN, &end)) >= 0;)
        for (; row < end; row++)
            (void)read_matrix_row(job, row, job->to ? job->to + (size_t)row * job->to_bytes : NULL);
}

bool rows_need_room(const struct rows *rows) {
    return rows->order || (rows->place && !tensor_rows_follow(rows->place)) || rows->columns ||
           rows->scales || rows->tensor->turned ||
           (rows->tensor->dtype == TENSOR_BLOCKS && !rows->codes);
}

bool rows_are_made(const struct rows *rows) {
    return rows->blocks && ((rows->tensor->dtype == TENSOR_BLOCKS && !rows->codes) || rows->scales);
}

static void set_reading(struct rows_reading *job, const struct rows *rows, char *to) {
    const struct tensor *tensor = rows->tensor;
    *job = (struct rows_reading){.rows = rows,
                                 .from_bytes = rows_row_bytes(rows),
                                 .cols = cols_of(rows),
                                 .to = to,
                                 .dtype = rows_dtype(rows),
                                 .made = rows_are_made(rows),
                                 .bad = INT64_MAX};
    const bool blocks = (tensor->dtype == TENSOR_BLOCKS && !rows->codes) || rows->scales;
    enum kern_dtype dtype;
    if (tensor->dtype == TENSOR_BLOCKS && !tensor->packed) {
        job->blocks = block_reader_of(tensor->format);
        job->make = block_maker_of(tensor->format, &dtype);
    }
    job->wide = blocks && !rows->blocks;
    job->to_bytes = job->made ? (size_t)blocks_of(job->cols) * sizeof(struct block)
                              : (size_t)job->cols * kern_dtype_bytes(job->dtype);
}

int64_t rows_read(const struct rows *rows, char *to, struct cpu_team *team) {
    if (rows->count == 0) return -1;
    struct rows_reading job;
    set_reading(&job, rows, to);
    cpu_tickets_set(&job.tickets, rows->count);
    cpu_team_run(team, read_some, &job);
    return job.bad == INT64_MAX ? -1 : job.bad;
}

static void reader_read(struct kern_reader *base, int64_t row, struct block *to) {
    struct rows_reader *reader = (struct rows_reader *)(void *)base;
    if (!read_matrix_row(reader->reading, row, (char *)to))
        memset(to, 0, (size_t)base->row_blocks * sizeof *to);
}

static void reader_done(struct kern_reader *base, int64_t first, int64_t count) {
    struct rows_reader *reader = (struct rows_reader *)(void *)base;
    const struct rows_reading *reading = reader->reading;
    const struct rows *rows = &reader->rows;
    if (rows->order || rows->place || rows->scales || rows->tensor->turned) return;
    weights_release(reader->weights,
                    (const char *)rows_at(rows) + (size_t)first * reading->from_bytes,
                    (size_t)count * reading->from_bytes);
}

int rows_reader_open(struct rows_reader *reader, const struct weights *weights,
                     const struct rows *rows) {
    *reader = (struct rows_reader){
        .reader = {.read = reader_read, .done = reader_done}, .weights = weights, .rows = *rows};
    if (rows->place) {
        reader->place = *rows->place;
        reader->rows.place = tensor_rows_follow(rows->place) ? NULL : &reader->place;
    }
    if (rows->columns) {
        reader->columns = *rows->columns;
        reader->rows.columns = &reader->columns;
    }
    reader->reading = mem_try_alloc(1, sizeof *reader->reading);
    if (!reader->reading) return ERR_NOMEM;
    set_reading(reader->reading, &reader->rows, NULL);
    reader->reader.row_blocks = blocks_of(reader->reading->cols);
    return 0;
}

int64_t rows_reader_bad(const struct rows_reader *reader) {
    const int64_t bad = atomic_load(&reader->reading->bad);
    return bad == INT64_MAX ? -1 : bad;
}

void rows_reader_close(struct rows_reader *reader) {
    mem_free(reader->reading);
    reader->reading = NULL;
}

bool rows_read_one(const struct tensor *tensor, int64_t row, int64_t cols, float *out) {
    size_t block_bytes;
    if (tensor->packed) {
        if (row >= tensor->shape[0] || cols != tensor->shape[1]) return false;
        packed_read(tensor->packed, row, 0, cols, out);
        return true;
    }
    if (tensor->turned) {
        const int64_t rows = tensor->shape[tensor->dims - 2];
        const int64_t at = row / rows * cols * rows + row % rows;
        bool read = true;
        for (int64_t i = 0; i < cols && read; i++)
            read = tensor_read_floats(tensor, (size_t)(at + i * rows), 1, &out[i]);
        return read;
    }
    if (tensor->dtype != TENSOR_BLOCKS)
        return tensor_is_float(tensor->dtype) &&
               tensor_read_floats(tensor, (size_t)(row * cols), (size_t)cols, out);
    const int block = gguf_format_block(tensor->format, &block_bytes);
    const size_t count = (size_t)(cols / block), bytes = count * block_bytes;
    if (((size_t)row + 1) * bytes > tensor->bytes) return false;
    block_reader_of(tensor->format)((const uint8_t *)tensor->data + (size_t)row * bytes, count,
                                    out);
    return true;
}
