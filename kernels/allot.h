/* Splits a total into whole parts, the same way for every backend: the entries that a sequence may
 * keep into allotments of layers and streams (kern_rule.h, enum kern_layers and kern_rule.floor).
 * Pure. Computed in double, without a product that is added to, so that no compiler can fuse
 * operations: device and host agree. */
#ifndef KEEPD_KERNELS_ALLOT_H
#define KEEPD_KERNELS_ALLOT_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__
#define ALLOT_FUNCTION static inline __host__ __device__
#else
#define ALLOT_FUNCTION static inline
#endif

struct allot_part {
    double weight, rest;
    int64_t most, least;
    int64_t part; /* out */
    bool settled;
};

ALLOT_FUNCTION double allot_usable(double weight) {
    return isfinite(weight) && weight > 0 ? weight : 0;
}

/* Gives `room` to the open parts by largest remainder, regardless of bounds. */
ALLOT_FUNCTION void allot_by_remainder(struct allot_part *parts, int count, int64_t room) {
    double sum = 0, ones = 0;
    int64_t left = room;
    for (int i = 0; i < count; i++) {
        if (parts[i].settled) continue;
        sum += allot_usable(parts[i].weight);
        ones++;
    }
    for (int i = 0; i < count; i++) {
        struct allot_part *p = &parts[i];
        if (p->settled) continue;
        /* A remainder is exact, so that equal ones stay equal: with whole weights as long as the
         * product is below 2^53. */
        double weight = sum > 0 ? allot_usable(p->weight) : 1, whole = sum > 0 ? sum : ones;
        double product = (double)room * weight;
        p->rest = fmod(product, whole);
        p->part = (int64_t)rint((product - p->rest) / whole);
        left -= p->part;
    }
    for (; left > 0; left--) {
        struct allot_part *best = NULL;
        for (int i = 0; i < count; i++)
            if (!parts[i].settled && (!best || parts[i].rest > best->rest)) best = &parts[i];
        if (!best) return;
        best->part++;
        best->rest = -1;
    }
}

/* Settles the open parts that violate a bound, on the side with the larger excess; false if none
 * does. */
ALLOT_FUNCTION bool allot_settle(struct allot_part *parts, int count) {
    int64_t over = 0, under = 0;
    for (int i = 0; i < count; i++) {
        const struct allot_part *p = &parts[i];
        if (p->settled) continue;
        if (p->part > p->most) over += p->part - p->most;
        if (p->part < p->least) under += p->least - p->part;
    }
    if (over == 0 && under == 0) return false;
    for (int i = 0; i < count; i++) {
        struct allot_part *p = &parts[i];
        bool out = over >= under ? p->part > p->most : p->part < p->least;
        if (p->settled || !out) continue;
        p->part = over >= under ? p->most : p->least;
        p->settled = true;
    }
    return true;
}

/* Splits `total` into whole parts by weight, none above its `most` or below its `least`, by largest
 * remainder (ties: the lower index). Excess and deficit at the bounds are passed to the other parts
 * by weight; the side with the larger sum is settled first. The parts add up to exactly `total`, as
 * far as the bounds allow. Weights that are not positive numbers count as 0; if all do, all count
 * as 1. */
ALLOT_FUNCTION void allot_split(struct allot_part *parts, int count, int64_t total) {
    int64_t least = 0, most = 0;
    for (int i = 0; i < count; i++) {
        if (parts[i].least > parts[i].most) parts[i].least = parts[i].most;
        parts[i].settled = false;
        least += parts[i].least;
        most += parts[i].most;
    }
    total = total < least ? least : total > most ? most : total;
    do {
        int64_t room = total;
        for (int i = 0; i < count; i++)
            if (parts[i].settled) room -= parts[i].part;
        allot_by_remainder(parts, count, room < 0 ? 0 : room);
    } while (allot_settle(parts, count));
}

#undef ALLOT_FUNCTION

#endif
