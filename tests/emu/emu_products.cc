/* kernels/cuda/products.h with a library whose algorithms are numbers: each has a set of bits, and
 * the largest number of rows that it accepts. */
#include "kernels/cuda/products.h"

#include <stdio.h>
#include <stdlib.h>

extern "C" {
#include "base/check.h"
}

struct fake {
    /* Algorithms proposed for up to 16, 64, 256 and more rows; 0 ends the list. */
    uint64_t proposed[PRODUCT_BUCKETS][PRODUCT_FOUND];
    int bits[16];
    int64_t rows_max[16];
    int asked, multiplied;
    int64_t parts_max; /* most parts of a batch; 0: any number */
    bool turns;        /* parts in turn have the bits of the ordered sum */
    int turned;
};

static int find(void *arg, const struct product_shape *wanted, int64_t rows,
                struct product_algorithm found[PRODUCT_FOUND]) {
    struct fake *fake = static_cast<struct fake *>(arg);
    const uint64_t *proposed = fake->proposed[product_bucket(rows)];
    int count = 0;
    fake->asked++;
    if (fake->parts_max && wanted->parts > fake->parts_max) return 0;
    for (; proposed[count]; count++) found[count] = {{proposed[count]}};
    return count;
}

static bool same(void *arg, const struct product_shape *, int64_t rows,
                 const struct product_algorithm *a, const struct product_algorithm *b) {
    struct fake *fake = static_cast<struct fake *>(arg);
    fake->multiplied++;
    return fake->bits[a->data[0]] == fake->bits[b->data[0]] && rows <= fake->rows_max[a->data[0]] &&
           rows <= fake->rows_max[b->data[0]];
}

static bool in_turn(void *arg, const struct product_shape *) {
    struct fake *fake = static_cast<struct fake *>(arg);
    fake->turned++;
    return fake->turns;
}

static struct fake open_fake(const uint64_t few, const uint64_t own, const uint64_t more,
                             const uint64_t many) {
    struct fake fake = {};
    const uint64_t first[PRODUCT_BUCKETS] = {few, own, more, many};
    for (int b = 0; b < PRODUCT_BUCKETS; b++) fake.proposed[b][0] = first[b];
    for (int64_t &rows : fake.rows_max) rows = INT64_MAX;
    return fake;
}

static const struct product_shape shape = {4096, 1024, KERN_BF16, false, 1024, 1};
static struct products products;

static uint64_t chosen(const struct product_library *library, int64_t rows) {
    const struct product_algorithm *algorithm = products_find(&products, library, &shape, rows);
    return algorithm ? algorithm->data[0] : 0;
}

/* An algorithm proposed for a bucket is used there if its bits are those of the shape's own. */
static void only_equal_bits_are_used() {
    struct fake fake = open_fake(2, 1, 3, 4);
    const struct product_library library = {&fake, find, same, in_turn};
    fake.bits[3] = 1;        /* 256 rows: other bits, */
    fake.proposed[2][1] = 5; /* but the next one has equal ones */
    fake.bits[4] = fake.bits[6] = 1;
    fake.proposed[3][1] = 6; /* more rows: no algorithm has */
    products = {};
    CHECK(chosen(&library, 1) == 1 && chosen(&library, 5000) == 1); /* nothing is compared yet */
    products_compare(&products, &library, &shape);
    const struct {
        int64_t rows;
        uint64_t algorithm;
    } wanted[] = {{1, 2}, {16, 2}, {17, 1}, {64, 1}, {65, 5}, {256, 5}, {257, 1}, {100000, 1}};
    for (const auto &want : wanted) CHECK(chosen(&library, want.rows) == want.algorithm);
    int asked = fake.asked, multiplied = fake.multiplied;
    products_compare(&products, &library, &shape);
    for (int64_t rows = 1; rows < 3000; rows++) (void)chosen(&library, rows);
    CHECK(fake.asked == asked && fake.multiplied == multiplied);
}

/* An algorithm whose rows the library refuses gives way to the shape's own; if that is refused, to
 * another one, whose bits may be others; and if there is none, nobody asks again. */
static void refused_algorithms_are_not_asked_again() {
    struct fake fake = open_fake(2, 1, 2, 3);
    const struct product_library library = {&fake, find, same, in_turn};
    products = {};
    products_compare(&products, &library, &shape);
    CHECK(chosen(&library, 300) == 3);
    CHECK(!products_refused(&products, &library, &shape, 300) && chosen(&library, 300) == 1);
    fake.proposed[3][0] = 1;
    fake.proposed[3][1] = 7;
    CHECK(products_refused(&products, &library, &shape, 300) && chosen(&library, 300) == 7);
    CHECK(!products_refused(&products, &library, &shape, 300) && chosen(&library, 300) == 0);
    CHECK(chosen(&library, 20) == 1 && chosen(&library, 100) == 2);
    int asked = fake.asked;
    for (int i = 0; i < 10; i++) CHECK(chosen(&library, 300 + i) == 0);
    CHECK(fake.asked == asked);
}

/* A shape for which the library has nothing is asked for once. */
static void shapes_without_an_algorithm_are_remembered() {
    struct fake fake = open_fake(0, 0, 2, 2);
    const struct product_library library = {&fake, find, same, in_turn};
    products = {};
    for (int64_t rows = 1; rows < 5000; rows *= 3) CHECK(chosen(&library, rows) == 0);
    products_compare(&products, &library, &shape);
    CHECK(fake.asked == 1 && fake.multiplied == 0);
}

/* Shapes that differ in one property have algorithms of their own; a full table has room for no
 * more. */
static void every_shape_is_its_own() {
    struct fake fake = open_fake(1, 1, 1, 1);
    const struct product_library library = {&fake, find, same, in_turn};
    const struct product_shape others[] = {
        {4096, 1024, KERN_BF16, true, 1024, 1},  {4096, 1024, KERN_F16, false, 1024, 1},
        {4096, 1025, KERN_BF16, false, 1025, 1}, {4097, 1024, KERN_BF16, false, 1024, 1},
        {4096, 1024, KERN_BF16, false, 2048, 1}, {4096, 1024, KERN_BF16, false, 2048, 2}};
    products = {};
    CHECK(chosen(&library, 1) == 1);
    fake.proposed[1][0] = 9;
    for (const struct product_shape &other : others)
        CHECK(products_find(&products, &library, &other, 1)->data[0] == 9);
    CHECK(chosen(&library, 1) == 1 && fake.asked == 7);
    struct product_shape next = shape;
    for (int i = products.count; i < PRODUCT_SHAPES; i++) {
        next.n = 10000 + i;
        CHECK(products_find(&products, &library, &next, 1));
    }
    next.n = 1;
    CHECK(!products_find(&products, &library, &next, 1));
    CHECK(!products_refused(&products, &library, &next, 1));
}

/* Inputs are cut until the tiles of few rows occupy a GPU's 132 multiprocessors, by the shape
 * alone; other formats and short inputs are not. */
static void few_outputs_have_parts() {
    const struct {
        int64_t n, k;
        enum kern_dtype dtype;
        int parts;
    } wanted[] = {
        {4096, 4096, KERN_BF16, 2},  {4096, 14336, KERN_BF16, 2}, {4096, 14336, KERN_F16, 2},
        {6144, 4096, KERN_BF16, 1},  {28672, 4096, KERN_BF16, 1}, {2048, 8192, KERN_BF16, 4},
        {2048, 2048, KERN_BF16, 2},  {1024, 1024, KERN_BF16, 1},  {1024, 16384, KERN_BF16, 8},
        {16, 100000, KERN_BF16, 4},  {16, 65536, KERN_BF16, 8},   {4096, 4096, KERN_E4M3, 1},
        {4096, 4096, KERN_F32, 1},   {4098, 4096, KERN_BF16, 1},  {4096, 4104, KERN_BF16, 1},
        {8192, 28672, KERN_BF16, 1},
    };
    for (const auto &want : wanted) CHECK(product_parts(want.n, want.k, want.dtype) == want.parts);
}

/* Parts are multiplied one after the other only where that was seen to give the same bits; it is
 * tried once, and for shapes with parts alone. */
static void parts_in_turn_are_tried_once() {
    static const struct product_shape cut = {4096, 2048, KERN_BF16, false, 4096, 2};
    for (int turns = 0; turns < 2; turns++) {
        struct fake fake = open_fake(1, 1, 1, 1);
        const struct product_library library = {&fake, find, same, in_turn};
        fake.turns = turns;
        products = {};
        CHECK(!products_in_turn(&products, &cut));
        products_compare(&products, &library, &shape);
        CHECK(fake.turned == 0);
        for (int i = 0; i < 2; i++) products_compare(&products, &library, &cut);
        CHECK(fake.turned == 1 && products_in_turn(&products, &cut) == turns);
        CHECK(!products_in_turn(&products, &shape));
    }
}

/* A library that multiplies no batches is known to when the weight is loaded, and a shape whose
 * last algorithm is refused later is not one that it has. */
static void batches_that_the_library_lacks_are_known() {
    static const struct product_shape cut = {4096, 2048, KERN_BF16, false, 4096, 2};
    static const struct product_shape part = {4096, 2048, KERN_BF16, false, 4096, 1};
    struct fake fake = open_fake(1, 1, 1, 1);
    const struct product_library library = {&fake, find, same, in_turn};
    products = {};
    CHECK(products_has(&products, &library, &cut) && products_has(&products, &library, &part));
    CHECK(!products_refused(&products, &library, &cut, 300));
    CHECK(!products_has(&products, &library, &cut) && products_has(&products, &library, &part));
    products = {};
    fake.parts_max = 1;
    CHECK(!products_has(&products, &library, &cut) && products_has(&products, &library, &part));
    const int asked = fake.asked;
    CHECK(!products_has(&products, &library, &cut) && fake.asked == asked);
    products_compare(&products, &library, &cut);
    CHECK(fake.turned == 0 && fake.multiplied == 0);
}

int main() {
    batches_that_the_library_lacks_are_known();
    few_outputs_have_parts();
    parts_in_turn_are_tried_once();
    only_equal_bits_are_used();
    refused_algorithms_are_not_asked_again();
    shapes_without_an_algorithm_are_remembered();
    every_shape_is_its_own();
    return 0;
}
