/* The algorithms of a matrix library for each shape of product.
 *
 * A row's bits must not depend on how many rows are multiplied with it (kern.h). The algorithm that
 * the library proposes for PRODUCT_ROWS rows, without a split of the inner dimension, is the
 * shape's own. Few rows and many are faster with other tiles, so for each bucket of row counts
 * another algorithm takes its place, but only one that was seen to give the shape's own bits, on
 * random rows, when the first weight of the shape was loaded. What the library refuses once is not
 * asked again.
 *
 * A shape with few outputs would occupy few multiprocessors. Its inputs are cut into parts, a
 * number that depends on the shape alone, and the parts' sums are added in order: ((y + p0) + p1) +
 * ... With few rows all parts are multiplied at once, as a batch; with many, one after the other,
 * each added to y, if that was seen to give the same bits. A weight's inputs stay whole, for every
 * number of rows, if the library had no algorithm for the batch when the weight was loaded. Host
 * code; device_blas.cu passes cuBLASLt. */
#ifndef KEEPD_KERNELS_CUDA_PRODUCTS_H
#define KEEPD_KERNELS_CUDA_PRODUCTS_H

#include <stdint.h>

extern "C" {
#include "kernels/kern.h"
}

#define PRODUCT_SHAPES  256 /* different shapes of a model: a handful */
#define PRODUCT_ROWS    64  /* the number of rows for which a shape's own algorithm is chosen */
#define PRODUCT_BUCKETS 4
#define PRODUCT_FOUND   32 /* algorithms that the library proposes at a time */
#define PRODUCT_TRIES   4  /* algorithms compared for a bucket */

#define PRODUCT_PARTS      8    /* most parts of a shape's inputs */
#define PRODUCT_PART_LEAST 1024 /* least inputs of a part */
#define PRODUCT_PARTS_ROWS 256  /* up to so many rows, parts are multiplied at once */

struct product_shape {
    int64_t n, k; /* k: inputs of a part */
    enum kern_dtype dtype;
    bool bias;
    int64_t stride, parts; /* stride: inputs of all parts; parts: multiplied at once */
};

/* The number of parts of a weight of n outputs and k inputs. 1: its inputs are not cut. */
int product_parts(int64_t n, int64_t k, enum kern_dtype dtype);

/* cublasLtMatmulAlgo_t, opaque. */
struct product_algorithm {
    uint64_t data[8];
};

/* The functions of a library. `find` returns the number of algorithms for this number of rows that
 * do not split the inner dimension, and lists them, the best first. `same` multiplies random rows
 * with both, and returns whether both accept the rows and all bits are equal. `in_turn`, for a
 * shape with several parts, returns whether adding one part after the other to y gives the bits of
 * the ordered sum of all. */
struct product_library {
    void *arg;
    int (*find)(void *arg, const struct product_shape *shape, int64_t rows,
                struct product_algorithm found[PRODUCT_FOUND]);
    bool (*same)(void *arg, const struct product_shape *shape, int64_t rows,
                 const struct product_algorithm *a, const struct product_algorithm *b);
    bool (*in_turn)(void *arg, const struct product_shape *shape);
};

/* The algorithm of a bucket. */
struct product_choice {
    struct product_algorithm algorithm;
    bool refuses; /* the library has none for these numbers of rows */
    bool odd;     /* the bits may be others than those of the shape's own algorithm */
};

struct product_entry {
    struct product_shape shape;
    bool compared; /* products_compare has been here */
    bool in_turn;  /* parts may be multiplied one after the other */
    struct product_choice choices[PRODUCT_BUCKETS];
};

struct products {
    struct product_entry list[PRODUCT_SHAPES];
    int count;
};

/* The bucket of a number of rows, and the largest number in a bucket for which its algorithm is
 * chosen. */
int product_bucket(int64_t rows);
int64_t product_bucket_rows(int bucket);

/* Returns the algorithm for a number of rows; NULL: there is none. Valid until the next call. */
const struct product_algorithm *products_find(struct products *products,
                                              const struct product_library *library,
                                              const struct product_shape *shape, int64_t rows);
/* The library has refused what products_find returned. Afterwards that returns another algorithm,
 * or NULL. Returns true if the bits of that algorithm may differ from the shape's own, and no
 * earlier one's did. */
bool products_refused(struct products *products, const struct product_library *library,
                      const struct product_shape *shape, int64_t rows);
/* Chooses for every bucket; the first call for a shape only. */
void products_compare(struct products *products, const struct product_library *library,
                      const struct product_shape *shape);
/* Returns whether the library has an algorithm for the shape, for every number of rows that is
 * known. */
bool products_has(struct products *products, const struct product_library *library,
                  const struct product_shape *shape);
/* Returns whether the shape's parts may be multiplied one after the other; false before
 * products_compare. */
bool products_in_turn(const struct products *products, const struct product_shape *shape);

#endif
