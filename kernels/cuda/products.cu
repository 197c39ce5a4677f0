#include "kernels/cuda/products.h"

#include <string.h>

/* The last bucket has all larger numbers, too. */
static const int64_t bucket_rows[PRODUCT_BUCKETS] = {16, PRODUCT_ROWS, 256, 2048};

int product_bucket(int64_t rows) {
    int bucket = 0;
    while (bucket < PRODUCT_BUCKETS - 1 && rows > bucket_rows[bucket]) bucket++;
    return bucket;
}

int64_t product_bucket_rows(int bucket) {
    return bucket_rows[bucket];
}

#define PROCESSORS 132 /* multiprocessors of an H100 or H200 */
#define TILE       64  /* outputs of the narrowest tiles that few rows have */

int product_parts(int64_t n, int64_t k, enum kern_dtype dtype) {
    const int64_t tiles = (n + TILE - 1) / TILE;
    int parts = 1;
    if ((dtype != KERN_BF16 && dtype != KERN_F16) || n % 4) return 1;
    while (parts < PRODUCT_PARTS && 2 * parts * tiles <= PROCESSORS && k % (16 * parts) == 0 &&
           k / (2 * parts) >= PRODUCT_PART_LEAST)
        parts *= 2;
    return parts;
}

static bool same_shape(const struct product_shape *a, const struct product_shape *b) {
    return a->n == b->n && a->k == b->k && a->dtype == b->dtype && a->bias == b->bias &&
           a->stride == b->stride && a->parts == b->parts;
}

static bool same_algorithm(const struct product_algorithm *a, const struct product_algorithm *b) {
    return memcmp(a, b, sizeof *a) == 0;
}

/* The shape's entry, which begins with its own algorithm for every number of rows. NULL: the table
 * is full. */
static struct product_entry *entry_of(struct products *products,
                                      const struct product_library *library,
                                      const struct product_shape *shape) {
    struct product_algorithm found[PRODUCT_FOUND];
    for (int i = 0; i < products->count; i++)
        if (same_shape(&products->list[i].shape, shape)) return &products->list[i];
    if (products->count == PRODUCT_SHAPES) return NULL;
    struct product_entry *product = &products->list[products->count++];
    *product = {};
    product->shape = *shape;
    int count = library->find(library->arg, shape, PRODUCT_ROWS, found);
    for (struct product_choice &choice : product->choices) {
        if (count > 0) choice.algorithm = found[0];
        choice.refuses = count == 0;
    }
    return product;
}

const struct product_algorithm *products_find(struct products *products,
                                              const struct product_library *library,
                                              const struct product_shape *shape, int64_t rows) {
    struct product_entry *product = entry_of(products, library, shape);
    if (!product) return NULL;
    const struct product_choice *choice = &product->choices[product_bucket(rows)];
    return choice->refuses ? NULL : &choice->algorithm;
}

bool products_refused(struct products *products, const struct product_library *library,
                      const struct product_shape *shape, int64_t rows) {
    struct product_algorithm found[PRODUCT_FOUND];
    struct product_entry *product = entry_of(products, library, shape);
    if (!product) return false;
    struct product_choice *choice = &product->choices[product_bucket(rows)];
    const struct product_algorithm *own = &product->choices[product_bucket(PRODUCT_ROWS)].algorithm;
    /* The own one gives the same bits. */
    if (!choice->odd && !same_algorithm(&choice->algorithm, own)) {
        choice->algorithm = *own;
        return false;
    }
    int count = choice->odd ? 0 : library->find(library->arg, shape, rows, found);
    choice->odd = true;
    for (int i = 0; i < count; i++)
        if (!same_algorithm(&found[i], &choice->algorithm)) {
            choice->algorithm = found[i];
            return true;
        }
    choice->refuses = true;
    return false;
}

void products_compare(struct products *products, const struct product_library *library,
                      const struct product_shape *shape) {
    struct product_algorithm found[PRODUCT_FOUND];
    struct product_entry *product = entry_of(products, library, shape);
    if (!product || product->compared || product->choices[0].refuses) return;
    product->compared = true;
    const int base = product_bucket(PRODUCT_ROWS);
    const struct product_algorithm own = product->choices[base].algorithm;
    for (int b = 0; b < PRODUCT_BUCKETS; b++) {
        if (b == base) continue;
        int count = library->find(library->arg, shape, bucket_rows[b], found);
        for (int i = 0; i < count && i < PRODUCT_TRIES; i++) {
            if (!same_algorithm(&found[i], &own) &&
                !library->same(library->arg, shape, bucket_rows[b], &own, &found[i]))
                continue;
            product->choices[b].algorithm = found[i];
            break;
        }
    }
    if (shape->parts > 1) product->in_turn = library->in_turn(library->arg, shape);
}

bool products_has(struct products *products, const struct product_library *library,
                  const struct product_shape *shape) {
    const struct product_entry *product = entry_of(products, library, shape);
    if (!product) return false;
    for (const struct product_choice &choice : product->choices)
        if (choice.refuses) return false;
    return true;
}

bool products_in_turn(const struct products *products, const struct product_shape *shape) {
    for (int i = 0; i < products->count; i++)
        if (same_shape(&products->list[i].shape, shape)) return products->list[i].in_turn;
    return false;
}
