#include "fit/rank.h"

#include <math.h>
#include <string.h>

#define CUT_LEAST -30.0
#define CUT_MOST  30.0
#define CUT_STEPS 40
#define CUT_NEAR  1e-4 /* relative error of the sum that is near enough */

void fit_rank_range(const struct fit_eviction *e, int *from, int *to) {
    *from = 0;
    while (*from < e->entries && e->at[*from] < FIT_SINKS) ++*from;
    *to = *from;
    while (*to < e->entries && e->pos - e->at[*to] > FIT_RECENT) ++*to;
}

double fit_rank_worth(const struct fit_eviction *e) {
    int from, to;
    double sum = 0;
    fit_rank_range(e, &from, &to);
    for (int s = 0; s < e->streams; s++)
        for (int i = from; i < to; i++) sum += (double)e->worths[s * e->entries + i];
    return sum;
}

static float rank_kept_part(const struct fit_eviction *e, const float *log_ages, int s, int i,
                            float cut) {
    const float rank = log_ages[i] + e->rates[s * e->entries + i];
    return 1 / (1 + expf((rank - cut) / FIT_SOFTNESS));
}

/* The sum of p at `cut`, and its derivative. */
static double rank_places_at(const struct fit_eviction *e, const float *log_ages, int from, int to,
                             double cut, double *slope) {
    double sum = 0;
    *slope = 0;
    for (int s = 0; s < e->streams; s++)
        for (int i = from; i < to; i++) {
            const float p = rank_kept_part(e, log_ages, s, i, (float)cut);
            sum += (double)p;
            *slope += (double)(p * (1 - p) / FIT_SOFTNESS);
        }
    return sum;
}

/* Newton's steps within an interval that holds the cut. */
static double rank_find_cut(const struct fit_eviction *e, const float *log_ages, int from, int to,
                            double wanted) {
    double low = CUT_LEAST, high = CUT_MOST, cut = 0, slope;
    for (int i = 0; i < CUT_STEPS; i++) {
        const double over = rank_places_at(e, log_ages, from, to, cut, &slope) - wanted;
        if (fabs(over) <= CUT_NEAR * wanted) break;
        *(over > 0 ? &high : &low) = cut;
        cut -= over / fmax(slope, 1e-12);
        if (!(cut > low && cut < high)) cut = (low + high) / 2;
    }
    return cut;
}

/* Returns how many of the measured unprotected entries are kept. The part of them that is kept is
 * the part of all unprotected entries for which the budget has places. */
static double rank_places_wanted(const struct fit_eviction *e, int from, int to) {
    const double protected = FIT_SINKS + FIT_RECENT, free = (double)e->pos - protected;
    const double part = free > 0 ? fmax(e->budget - protected, 0) / free : 0;
    return fmin(part, 0.999) * (double)e->streams * (double)(to - from);
}

double fit_rank_loss(const struct fit_eviction *e, float *log_ages, float *slopes) {
    int from, to;
    double lost = 0, lost_slope = 0, slope = 0;
    fit_rank_range(e, &from, &to);
    for (int i = from; i < to; i++) log_ages[i] = logf((float)(e->pos - e->at[i]));
    const double wanted = rank_places_wanted(e, from, to);
    const float cut = (float)rank_find_cut(e, log_ages, from, to, wanted);
    for (int s = 0; s < e->streams; s++)
        for (int i = from; i < to; i++) {
            const int at = s * e->entries + i;
            const float p = rank_kept_part(e, log_ages, s, i, cut), by = p * (1 - p) / FIT_SOFTNESS;
            lost += (double)e->worths[at] * (double)(1 - p);
            lost_slope += (double)(e->worths[at] * by);
            slope += (double)by;
            if (slopes) slopes[at] = by;
        }
    if (!slopes) return lost;
    const float shared = slope > 0 ? (float)(lost_slope / slope) : 0;
    for (int s = 0; s < e->streams; s++)
        for (int i = 0; i < e->entries; i++) {
            const int at = s * e->entries + i;
            slopes[at] = i < from || i >= to ? 0 : slopes[at] * (e->worths[at] - shared);
        }
    return lost;
}
