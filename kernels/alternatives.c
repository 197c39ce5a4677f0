#include "kernels/alternatives.h"

#include <math.h>
#include <string.h>

/* A radix sort: its time does not depend on the values, and one row of a large vocabulary takes
 * about a millisecond inside a step. */
enum { DIGIT_BITS = 11, DIGITS = 3, DIGIT_VALUES = 1 << DIGIT_BITS };

struct pair {
    uint32_t key; /* ascending keys are descending logits */
    int32_t token;
};

size_t kern_alternatives_scratch(int vocab) {
    return 2 * (size_t)vocab * sizeof(struct pair);
}

static uint32_t key_of(float logit) {
    uint32_t bits;
    if (isnan(logit)) return UINT32_MAX;
    logit += 0.0f; /* both zeros are equal */
    memcpy(&bits, &logit, sizeof bits);
    return bits >> 31 ? bits : ~bits & 0x7fffffffu;
}

static uint32_t digit_of(uint32_t key, int digit) {
    return key >> (digit * DIGIT_BITS) & (DIGIT_VALUES - 1);
}

/* Sorts the pairs by one digit of their keys; pairs with the same digit keep their order. */
static void sort_by(const struct pair *from, struct pair *to, int count, int digit) {
    int32_t begin[DIGIT_VALUES] = {0};
    for (int i = 0; i < count; i++) begin[digit_of(from[i].key, digit)]++;
    for (int32_t value = 0, sum = 0; value < DIGIT_VALUES; value++) {
        int32_t size = begin[value];
        begin[value] = sum;
        sum += size;
    }
    for (int i = 0; i < count; i++) to[begin[digit_of(from[i].key, digit)]++] = from[i];
}

/* The logarithm of the sum of all exponentials; the order of the sum is that of the ids. */
static double alternatives_log_sum(const float *logits, int vocab) {
    double top = -INFINITY, sum = 0;
    for (int i = 0; i < vocab; i++)
        if ((double)logits[i] > top) top = (double)logits[i];
    for (int i = 0; i < vocab; i++) sum += exp((double)logits[i] - top);
    return top + log(sum);
}

void kern_alternatives(const float *logits, int vocab, void *scratch, struct kern_alternative *list,
                       int count) {
    struct pair *from = scratch, *to = from + vocab;
    double norm = alternatives_log_sum(logits, vocab);
    for (int32_t i = 0; i < vocab; i++) from[i] = (struct pair){key_of(logits[i]), i};
    for (int digit = 0; digit < DIGITS; digit++) {
        struct pair *swap = from;
        sort_by(from, to, vocab, digit);
        from = to;
        to = swap;
    }
    for (int i = 0; i < count; i++) {
        if (i < vocab)
            list[i] = (struct kern_alternative){from[i].token,
                                                (float)((double)logits[from[i].token] - norm)};
        else
            list[i] = (struct kern_alternative){-1, -INFINITY};
    }
}
