/* Whole parts of a total, in one place for every backend: how a sequence's places are split over
 * layers and streams (kern.h, enum kern_layers and kern_rule.floor). Pure. In double and without a
 * product that is added to, so that no compiler can fuse anything: a device splits as a host. */
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

/* Gives `room` to the open parts, whatever their bounds. */
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
        /* multiplied first: where weights are the parts themselves, equal remainders stay equal */
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

/* Settles the open parts that are out of bounds on the worse side; false when none is. */
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

/* Whole parts of `total` by weight, none above its `most` nor below its `least`, by largest
 * remainder (ties: the lower index). What one cannot use, or must have besides, goes to or comes
 * from the others by weight; the side that is further out is settled first. Together exactly
 * `total`, as far as the bounds allow. Weights that are no positive number count as 0; are all 0,
 * all count as 1. */
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
