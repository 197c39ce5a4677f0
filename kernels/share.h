/* Splits a total into whole parts, the same way for every backend: places of a sequence over layers
 * and streams (kern.h, enum kern_layers and kern_rule.floor). Pure. Computed in double, without a
 * product that is added to, so that no compiler can fuse operations: device and host agree. */
#ifndef KEEPD_KERNELS_SHARE_H
#define KEEPD_KERNELS_SHARE_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__
#define SHARE_FUNCTION static inline __host__ __device__
#else
#define SHARE_FUNCTION static inline
#endif

struct share_part {
    double weight, rest;
    int64_t most, least;
    int64_t part; /* out */
    bool settled;
};

SHARE_FUNCTION double share_usable(double weight) {
    return isfinite(weight) && weight > 0 ? weight : 0;
}

/* Gives `room` to the open parts by largest remainder, regardless of bounds. */
SHARE_FUNCTION void share_by_remainder(struct share_part *parts, int count, int64_t room) {
    double sum = 0, ones = 0;
    int64_t left = room;
    for (int i = 0; i < count; i++) {
        if (parts[i].settled) continue;
        sum += share_usable(parts[i].weight);
        ones++;
    }
    for (int i = 0; i < count; i++) {
        struct share_part *p = &parts[i];
        if (p->settled) continue;
        /* multiplied first: if weights are the parts themselves, equal remainders stay equal */
        double exact = sum > 0 ? (double)room * share_usable(p->weight) / sum : (double)room / ones;
        p->part = (int64_t)floor(exact);
        p->rest = exact - (double)p->part;
        left -= p->part;
    }
    for (; left > 0; left--) {
        struct share_part *best = NULL;
        for (int i = 0; i < count; i++)
            if (!parts[i].settled && (!best || parts[i].rest > best->rest)) best = &parts[i];
        if (!best) return;
        best->part++;
        best->rest = -1;
    }
}

/* Settles the open parts that violate a bound, on the side with the larger excess; false if none
 * does. */
SHARE_FUNCTION bool share_settle(struct share_part *parts, int count) {
    int64_t over = 0, under = 0;
    for (int i = 0; i < count; i++) {
        const struct share_part *p = &parts[i];
        if (p->settled) continue;
        if (p->part > p->most) over += p->part - p->most;
        if (p->part < p->least) under += p->least - p->part;
    }
    if (over == 0 && under == 0) return false;
    for (int i = 0; i < count; i++) {
        struct share_part *p = &parts[i];
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
SHARE_FUNCTION void share_split(struct share_part *parts, int count, int64_t total) {
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
        share_by_remainder(parts, count, room < 0 ? 0 : room);
    } while (share_settle(parts, count));
}

#undef SHARE_FUNCTION

#endif
