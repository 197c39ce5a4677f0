/* For the emulator's tests: the CPU's reference path, the oracle, and the CUDA backend run by the
 * emulator, side by side, fed the same. */
#ifndef KEEPD_TESTS_EMU_BOTH_H
#define KEEPD_TESTS_EMU_BOTH_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cuda/cuda.h"
#include "tests/unit/kernels/noise.h"

void emu_set_seed(uint64_t seed); /* see emu_seed in emu.h */

#define MUST(rc) cr_assert_eq((rc), 0)

enum { ORACLE, EMULATED, BACKENDS };

static inline void both_open(struct kern *kern[BACKENDS]) {
    struct fault fault = {0};
    struct cpu_options cpu = {.path = "reference", .threads = 1};
    struct cuda_options cuda = {.device = 0};
    cr_assert_eq(cpu_open(&cpu, &kern[ORACLE], &fault), 0, "%s", fault.text);
    cr_assert_eq(cuda_open(&cuda, &kern[EMULATED], &fault), 0, "%s", fault.text);
}

static inline void both_close(struct kern *kern[BACKENDS]) {
    for (int b = 0; b < BACKENDS; b++) kern[b]->ops->close(kern[b]);
}

/* The pool is given in entries, since page sizes need not agree. */
static inline void both_cache(struct kern *kern[BACKENDS], struct kern_cache_options options,
                              int64_t entries) {
    for (int b = 0; b < BACKENDS; b++) {
        struct kern_cache_info info;
        struct fault fault = {0};
        kern[b]->ops->cache_info(&options, &info);
        options.pages = entries / info.page_slots;
        cr_assert_eq(kern[b]->ops->cache_open(kern[b], &options, &fault), 0, "%s: %s", fault.field,
                     fault.text);
    }
}

/* A copy of `from` in the backend's memory; NULL: NaN, to see what is not written. */
static inline float *put(struct kern *kern, const float *from, size_t count) {
    float *to = kern->ops->mem_alloc(kern, count * sizeof *to), *nan = NULL;
    cr_assert_not_null(to);
    if (!from) {
        from = nan = malloc(count * sizeof *nan);
        memset(nan, 0xff, count * sizeof *nan);
    }
    MUST(kern->ops->upload(kern, to, from, count * sizeof *to));
    free(nan);
    return to;
}

/* Back to the host; every number was written. */
static inline float *take(struct kern *kern, float *from, size_t count) {
    float *to = malloc((count ? count : 1) * sizeof *to);
    MUST(kern->ops->sync(kern));
    MUST(kern->ops->download(kern, to, from, count * sizeof *to));
    for (size_t i = 0; i < count; i++)
        cr_assert(!isnan(to[i]), "%s: number %zu of %zu was not written", kern->ops->name, i,
                  count);
    kern->ops->mem_free(kern, from);
    return to;
}

/* Largest |a - b| / (bound of this place), places where both are equal aside. */
static inline void expect_near(const float *want, const float *got, size_t count, double absolute,
                               double relative, const char *what) {
    for (size_t i = 0; i < count; i++) {
        double off = fabs((double)want[i] - (double)got[i]);
        cr_assert(off <= absolute + relative * fabs((double)want[i]), "%s [%zu]: %.8g, not %.8g",
                  what, i, (double)got[i], (double)want[i]);
    }
}

static inline void expect_sound(struct kern *kern) {
    struct fault fault = {0};
    MUST(kern->ops->sync(kern));
    cr_assert_eq(kern->ops->cache_check(kern, &fault), 0, "%s: %s", kern->ops->name, fault.text);
}

#define HELD_MAX 65536

struct held {
    int32_t lengths[256], positions[HELD_MAX];
    float log_beta[HELD_MAX];
    struct kern_report report;
};

static inline void read_held(struct kern *kern, int slot, struct held *h) {
    h->report = (struct kern_report){.lengths = h->lengths,
                                     .positions = h->positions,
                                     .log_beta = h->log_beta,
                                     .entries_max = HELD_MAX};
    MUST(kern->ops->report(kern, slot, &h->report));
}

/* Both hold the same entries of the slot, and both caches are sound. */
static inline void expect_same_held(struct kern *kern[BACKENDS], int slot, int streams,
                                    const char *what) {
    static struct held a, b;
    for (int i = 0; i < BACKENDS; i++) expect_sound(kern[i]);
    read_held(kern[ORACLE], slot, &a);
    read_held(kern[EMULATED], slot, &b);
    cr_assert_eq(a.report.entries, b.report.entries, "%s: %zu entries, not %zu", what,
                 b.report.entries, a.report.entries);
    cr_assert_eq(a.report.pages, b.report.pages, "%s: %lld pages, not %lld", what,
                 (long long)b.report.pages, (long long)a.report.pages);
    for (int s = 0; s < streams; s++)
        cr_assert_eq(a.lengths[s], b.lengths[s], "%s: stream %d has %d entries, not %d", what, s,
                     b.lengths[s], a.lengths[s]);
    for (size_t i = 0; i < a.report.entries; i++) {
        cr_assert_eq(a.positions[i], b.positions[i], "%s: entry %zu", what, i);
        cr_assert(!memcmp(&a.log_beta[i], &b.log_beta[i], sizeof(float)), "%s: log_beta of %zu",
                  what, i);
    }
}

#endif
