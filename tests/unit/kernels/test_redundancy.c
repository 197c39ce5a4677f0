/* Key redundancy: published numbers, and the whole matrix in double beside random streams. */
#include <criterion/criterion.h>

#include "tests/unit/kernels/eviction.h"

static const float golden_keys[6][2] = {{1, 0},     {.9f, .1f}, {0, 1},
                                        {.1f, .9f}, {1, .05f},  {-1, -1}};

static struct bed open_golden(int count) {
    struct kern_rule rule = {0};
    struct bed bed = bed_open(1, 1, 1, 2, &rule);
    bed_append(&bed, 0, count);
    bed.tokens = count;
    for (int i = 0; i < count; i++) memcpy(bed_row(&bed, 0, 0, i, false), golden_keys[i], 8);
    return bed;
}

static void expect_golden(int count, bool index_zero, bool normalise, const float *want) {
    struct bed bed = open_golden(count);
    struct kern_redundancy rule = {
        .on = true, .threshold = 0.5f, .normalise = normalise, .index_zero = index_zero};
    struct cpu_stream stream = cpu_cache_stream(&bed.cache, 0, 0, 0);
    struct cpu_work work = cpu_cache_work(&bed.cache, 0);
    float got[6];
    evict_redundancy(&bed.cache, &rule, &stream, count, &work, got);
    for (int i = 0; i < count; i++)
        cr_expect_float_eq(got[i], want[i], 6e-5, "entry %d is %.5f", i, (double)got[i]);
    cpu_cache_close(&bed.cache);
}

Test(redundancy, published_numbers) {
    expect_golden(5, false, false, (float[]){.2536f, .2170f, .1720f, .1837f, .1737f});
    expect_golden(5, false, true, (float[]){1, .8557f, .6780f, .7242f, .6848f});
}

/* With a sixth key that is like none: rho of entry 0 is 0.2327, with the artefact 0.3505. */
Test(redundancy, the_artefact_is_a_switch) {
    float rho[6] = {.2327f, .0905f, -.0911f, -.0485f, -.0886f, -.6196f}, want[6];
    for (int artefact = 0; artefact < 2; artefact++) {
        if (artefact) rho[0] = .3505f;
        for (int i = 0; i < 6; i++) want[i] = expf(rho[i] - rho[0]);
        expect_golden(6, artefact, true, want);
    }
}

/* ---- The whole matrix ---- */

static double cosine(const struct bed *bed, int stream, int i, int j, double eps) {
    const float *a = bed_row(bed, 0, stream, i, false), *b = bed_row(bed, 0, stream, j, false);
    double ab = 0, aa = 0, bb = 0;
    for (int d = 0; d < bed->dim; d++) {
        ab += (double)a[d] * (double)b[d];
        aa += (double)a[d] * (double)a[d];
        bb += (double)b[d] * (double)b[d];
    }
    return aa > 0 && bb > 0 ? ab / ((sqrt(aa) + eps) * (sqrt(bb) + eps)) : 0;
}

static void oracle(const struct bed *bed, int stream, int count, int candidates,
                   const struct kern_redundancy *rule, double *out) {
    double *rho = calloc((size_t)count, sizeof *rho), sum = 0, most = -INFINITY;
    for (int i = 0; i < count; i++) {
        int newest = -1;
        for (int j = 0; j < count; j++)
            if (j != i && cosine(bed, stream, i, j, (double)rule->eps) > (double)rule->threshold)
                newest = j;
        if (newest < 0 && rule->index_zero) newest = 0;
        for (int j = 0; j < count; j++)
            if (j != i && j != newest)
                rho[rule->own ? i : j] += cosine(bed, stream, i, j, (double)rule->eps) / count;
    }
    for (int i = 0; i < count; i++) sum += exp(rho[i]);
    for (int i = 0; i < candidates; i++) most = fmax(most, exp(rho[i]));
    for (int i = 0; i < candidates; i++) out[i] = exp(rho[i]) / (rule->normalise ? most : sum);
    free(rho);
}

Test(redundancy, equals_the_whole_matrix) {
    struct kern_rule none = {0};
    for (uint32_t seed = 1; seed <= 12; seed++) {
        struct bed bed = bed_open(1, 2, 2, seed % 3 == 0 ? 20 : 32, &none);
        int count = 1 + (int)(content_mix(seed) % 300), candidates = count - count / 5;
        bed.tokens = (int32_t)seed * 1000;
        bed.tokens = (int32_t)seed * 100;
        bed_append(&bed, 0, count);
        if (count > 4) memset(bed_row(&bed, 0, 1, 3, false), 0, (size_t)bed.dim * sizeof(float));
        struct kern_redundancy rule = {.on = true,
                                       .threshold = seed % 4 == 1 ? 0.9f : 0.5f,
                                       .eps = 1e-6f,
                                       .normalise = seed % 2,
                                       .candidates_only = seed % 5 == 2,
                                       .own = seed % 4 >= 2,
                                       .index_zero = seed % 3 == 1};
        for (int head = 0; head < 2; head++) {
            struct cpu_stream stream = cpu_cache_stream(&bed.cache, 0, 0, head);
            struct cpu_work work = cpu_cache_work(&bed.cache, 0);
            float got[300];
            double want[300];
            evict_redundancy(&bed.cache, &rule, &stream, candidates, &work, got);
            oracle(&bed, head, rule.candidates_only ? candidates : count, candidates, &rule, want);
            for (int i = 0; i < candidates; i++)
                cr_assert_float_eq((double)got[i], want[i], 1e-5 * want[i] + 1e-9,
                                   "seed %u entry %d: %g, not %g", seed, i, (double)got[i],
                                   want[i]);
        }
        cpu_cache_close(&bed.cache);
    }
}

/* Weighted alone, redundancy decides what an eviction keeps: the entries that are least redundant.
 */
Test(redundancy, alone_it_decides_what_is_kept) {
    struct kern_rule rule = {.score = KERN_SCORE_ATTENTION,
                             .scope = KERN_SCOPE_STREAM,
                             .recent = 10,
                             .observe = {.window = 8, .group = KERN_GROUP_MEAN},
                             .redundancy = {.on = true, .threshold = 0.5f, .normalise = true}};
    enum { COUNT = 120, CANDIDATES = 110, KEEP = 50 };
    struct bed bed = bed_open(1, 2, 1, 32, &rule);
    struct cpu_stream stream;
    float redundant[CANDIDATES], most_kept = -INFINITY, least_gone = INFINITY;
    bed_append(&bed, 0, COUNT);
    bed.tokens = COUNT;
    stream = cpu_cache_stream(&bed.cache, 0, 0, 0);
    struct cpu_work work = cpu_cache_work(&bed.cache, 0);
    evict_redundancy(&bed.cache, &rule.redundancy, &stream, CANDIDATES, &work, redundant);
    cr_assert_eq(bed_evict(&bed, 0, KEEP), 0);
    stream = cpu_cache_stream(&bed.cache, 0, 0, 0);
    cr_assert_eq(stream.length, KEEP);
    for (int i = 0, at = 0; i < CANDIDATES; i++) {
        bool kept = cpu_cache_entry_pos(&bed.cache, &stream, at) == i;
        at += kept;
        if (kept) most_kept = fmaxf(most_kept, redundant[i]);
        if (!kept) least_gone = fminf(least_gone, redundant[i]);
    }
    cr_assert_leq(most_kept, least_gone);
    cpu_cache_close(&bed.cache);
}
