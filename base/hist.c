#include "base/hist.h"

#include <string.h>

#include "base/check.h"

void hist_open(struct hist *hist, const double *bounds, int bound_count) {
    CHECK(bound_count >= 0 && bound_count <= HIST_MAX_BOUNDS);
    memset(hist, 0, sizeof *hist);
    hist->bounds = bounds;
    hist->bound_count = bound_count;
}

void hist_add(struct hist *hist, double value) {
    int bucket = 0;
    while (bucket < hist->bound_count && !(value <= hist->bounds[bucket])) bucket++;
    hist->counts[bucket]++;
    hist->sum += value;
}

void hist_merge(struct hist *into, const struct hist *from) {
    CHECK(into->bounds == from->bounds && into->bound_count == from->bound_count);
    for (int i = 0; i <= from->bound_count; i++) into->counts[i] += from->counts[i];
    into->sum += from->sum;
}

uint64_t hist_count(const struct hist *hist) {
    uint64_t count = 0;
    for (int i = 0; i <= hist->bound_count; i++) count += hist->counts[i];
    return count;
}
