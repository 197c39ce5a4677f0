/* The algorithms of a matrix library for each shape of product.
 *
 * A row's bits must not depend on how many rows are multiplied with it (kern.h). The algorithm that
 * the library proposes for PRODUCT_ROWS rows, without a split of the inner dimension, is the
 * shape's own. Few rows and many are faster with other tiles, so for each bucket of row counts
 * another algorithm takes its place, but only one that was seen to give the shape's own bits, on
 * random rows, when the first weight of the shape was loaded. What the library refuses once is not
 * asked again. Host code; device_blas.cu passes cuBLASLt. */
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

struct product_shape {
    int64_t n, k;
    enum kern_dtype dtype;
    bool bias;
};

/* cublasLtMatmulAlgo_t, opaque. */
struct product_algorithm {
    uint64_t data[8];
};

/* The functions of a library. `find`: algorithms for so many rows that do not split the inner
 * dimension, best first; returns their number. `same`: multiplies random rows with both; do both
 * accept the rows, and are all bits equal? */
struct product_library {
    void *arg;
    int (*find)(void *arg, const struct product_shape *shape, int64_t rows,
                struct product_algorithm found[PRODUCT_FOUND]);
    bool (*same)(void *arg, const struct product_shape *shape, int64_t rows,
                 const struct product_algorithm *a, const struct product_algorithm *b);
};

/* The algorithm of a bucket. */
struct product_choice {
    struct product_algorithm algorithm;
    bool refuses; /* the library has none for so many rows */
    bool odd;     /* the bits may be others than those of the shape's own algorithm */
};

struct product {
    struct product_shape shape;
    bool compared; /* products_compare has been here */
    struct product_choice choices[PRODUCT_BUCKETS];
};

struct products {
    struct product list[PRODUCT_SHAPES];
    int count;
};

/* The bucket of a number of rows, and the largest number in a bucket for which its algorithm is
 * chosen. */
int product_bucket(int64_t rows);
int64_t product_bucket_rows(int bucket);

/* The algorithm for so many rows; NULL: there is none. Valid until the next call. */
const struct product_algorithm *products_find(struct products *products,
                                              const struct product_library *library,
                                              const struct product_shape *shape, int64_t rows);
/* The library has refused what products_find returned. Afterwards that returns another algorithm,
 * or NULL. True: it is one whose bits may be others, which is new. */
bool products_refused(struct products *products, const struct product_library *library,
                      const struct product_shape *shape, int64_t rows);
/* Chooses for every bucket; the first call for a shape only. */
void products_compare(struct products *products, const struct product_library *library,
                      const struct product_shape *shape);

#endif
