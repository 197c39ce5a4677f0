/* Reads rows of a matrix in a file in the form that a backend takes: numbers of blocks as float32,
 * bf16 or blocks of the backend, and the rows of heads in order. Also checks that all numbers are
 * finite. Pure. */
#ifndef KEEPD_MODEL_ROWS_H
#define KEEPD_MODEL_ROWS_H

#include "kernels/cpu/team.h"
#include "kernels/kern.h"
#include "model/tensors.h"
#include "model/weights.h"

/* Rows [first, first + count) of a matrix, or of several that follow each other in one tensor, of
 * F32, F16, BF16, E4M3 or BLOCKS. */
struct rows {
    const struct tensor *tensor;
    const struct tensor *scales; /* scales of split MXFP4 (tensors.h), or NULL */
    int64_t first, count;
    const struct tensor_rows *place;   /* where the rows lie from `first` on; NULL: side by side */
    const struct tensor_rows *columns; /* where their columns lie; NULL: as in the model */
    const int *order; /* [head] for each row of a head, its row in the file; NULL: the same */
    int head;
    bool blocks; /* a matrix in blocks becomes struct block, otherwise rows_dtype */
    bool codes;  /* an FP8 matrix of `packed` remains in E4M3 */
};

int64_t rows_source(const struct rows *rows, int64_t row); /* the file's, from `first` on */
const void *rows_at(const struct rows *rows);              /* the first in the file */
size_t rows_bytes(const struct rows *rows); /* from the first to the last in the file; 0: they do
                                               not follow each other */

/* Returns whether the rows need memory; otherwise they are used where they are in the file. */
bool rows_need_room(const struct rows *rows);

/* Returns the type of the rows' numbers, if they do not become struct block: float32 for BLOCKS, or
 * bf16 if that holds them exactly (MXFP4, and see packed_dtype). */
enum kern_dtype rows_dtype(const struct rows *rows);

/* Reads the rows with `team`. `to`: memory for their numbers, as struct block or in rows_dtype;
 * NULL if none is needed. Returns -1, or the first element of the tensor that is not a finite
 * number. */
int64_t rows_read(const struct rows *rows, char *to, struct cpu_team *team);

/* Makes the rows in blocks for a backend, one at a time (kern_reader), and notes numbers that are
 * not finite: such a row is passed on as zeros. */
struct rows_reader {
    struct kern_reader reader;
    const struct weights *weights;
    struct rows rows;
    struct tensor_rows place, columns; /* copies: rows.place and rows.columns point here */
    struct rows_reading *reading;
};

/* Returns whether the rows become blocks, so that a rows_reader can pass them on. */
bool rows_are_made(const struct rows *rows);

/* Opens a reader with copies of `rows` and its places; the tensors and the order must outlive it.
 * ERR_NOMEM. */
int rows_reader_open(struct rows_reader *reader, const struct weights *weights,
                     const struct rows *rows);
/* Returns the first element, of those that were read, that is not a finite number; -1: none. */
int64_t rows_reader_bad(const struct rows_reader *reader);
void rows_reader_close(struct rows_reader *reader); /* may be closed already, or zero */

/* Reads row `row` of a matrix, or of several that follow each other, as float32. false: the tensor
 * has no such row, or its numbers need a scale from another tensor. */
bool rows_read_one(const struct tensor *tensor, int64_t row, int64_t cols, float *out);

#endif
