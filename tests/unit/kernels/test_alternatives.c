/* The order and the numbers of all alternatives, against a sort by comparison. */
#include "kernels/alternatives.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>

enum { VOCAB = 5000 };

static float logits[VOCAB];

static int by_rank(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    if (logits[x] != logits[y]) return logits[x] > logits[y] ? -1 : 1;
    return x - y;
}

/* Ties, both zeros, infinities and both signs. */
static void fill(uint32_t trial) {
    uint32_t state = trial * 2654435761u + 1;
    for (int i = 0; i < VOCAB; i++) {
        state = state * 1664525u + 1013904223u;
        float x = (float)(int32_t)state / 1e8f;
        logits[i] = trial % 2 ? roundf(x) : x;
    }
    logits[7] = -0.0f;
    logits[9] = 0.0f;
    logits[11] = -0.0f;
    logits[13] = -INFINITY;
    logits[17] = -1e-40f;
}

Test(alternatives, all_in_order) {
    static int32_t sorted[VOCAB];
    static struct kern_alternative list[VOCAB + 2];
    void *scratch = malloc(kern_alternatives_scratch(VOCAB));
    cr_assert_not_null(scratch);
    for (uint32_t trial = 0; trial < 6; trial++) {
        double sum = 0;
        fill(trial);
        for (int i = 0; i < VOCAB; i++) {
            sorted[i] = i;
            sum += exp((double)logits[i]);
        }
        qsort(sorted, VOCAB, sizeof *sorted, by_rank);
        kern_alternatives(logits, VOCAB, scratch, list, VOCAB + 2);
        for (int i = 0; i < VOCAB; i++) {
            cr_assert_eq(list[i].token, sorted[i], "trial %u: place %d", trial, i);
            double expected = (double)logits[sorted[i]] - log(sum);
            cr_assert(list[i].logprob == (float)expected ||
                      fabs((double)list[i].logprob - expected) < 1e-5);
        }
        cr_assert(list[VOCAB].token == -1 && isinf(list[VOCAB + 1].logprob));
        kern_alternatives(logits, VOCAB, scratch, list, 3);
        cr_assert(list[0].token == sorted[0] && list[2].token == sorted[2]);
    }
    free(scratch);
}

Test(alternatives, no_numbers_come_last) {
    float few[] = {NAN, 1, NAN, 3};
    _Alignas(8) char scratch[64];
    struct kern_alternative list[4];
    cr_assert_leq(kern_alternatives_scratch(4), sizeof scratch);
    kern_alternatives(few, 4, scratch, list, 4);
    cr_assert(list[0].token == 3 && list[1].token == 1 && list[2].token == 0 && list[3].token == 2);
}
