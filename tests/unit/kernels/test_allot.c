/* Totals split into whole parts: published examples, and bounds over random cases. */
#include <criterion/criterion.h>

#include "tests/unit/kernels/eviction.h"

static void split(const double *weights, const int64_t *most, int count, int64_t total,
                  struct allot_part *parts) {
    for (int i = 0; i < count; i++)
        parts[i] = (struct allot_part){.weight = weights[i], .most = most ? most[i] : 1 << 20};
    allot_split(parts, count, total);
}

static void expect(const struct allot_part *parts, int count, const int64_t *want) {
    for (int i = 0; i < count; i++)
        cr_expect_eq(parts[i].part, want[i], "part %d is %lld", i, (long long)parts[i].part);
}

Test(allot, largest_remainder_and_ties) {
    struct allot_part parts[4];
    split((double[]){1, 1, 1}, NULL, 3, 10, parts);
    expect(parts, 3, (int64_t[]){4, 3, 3});
    split((double[]){.3531, .2891, .2142, .1436}, NULL, 4, 1000, parts); /* D2O's example */
    expect(parts, 4, (int64_t[]){353, 289, 214, 144});
    split((double[]){0, 0, NAN, -1}, NULL, 4, 10, parts); /* nothing usable: equal parts */
    expect(parts, 4, (int64_t[]){3, 3, 2, 2});
    split((double[]){INFINITY, 1, 0, 1}, NULL, 4, 10, parts);
    expect(parts, 4, (int64_t[]){0, 5, 0, 5});
}

Test(allot, what_one_cannot_use_goes_to_the_others) {
    struct allot_part parts[3];
    split((double[]){8, 1, 1}, (int64_t[]){10, 100, 100}, 3, 100, parts);
    expect(parts, 3, (int64_t[]){10, 45, 45});
    split((double[]){8, 1, 1}, (int64_t[]){10, 20, 30}, 3, 100, parts); /* more than all hold */
    expect(parts, 3, (int64_t[]){10, 20, 30});
    for (int i = 0; i < 3; i++)
        parts[i] = (struct allot_part){.weight = i == 0, .most = 50, .least = 7};
    allot_split(parts, 3, 40);
    expect(parts, 3, (int64_t[]){26, 7, 7});
}

Test(allot, bounds_hold_and_the_total_is_met) {
    for (uint64_t seed = 1; seed <= 20000; seed++) {
        uint64_t random = seed;
        struct allot_part parts[9];
        int count = 1 + (int)content_random(&random, 9);
        int64_t total = content_random(&random, 300), least = 0, most = 0, sum = 0;
        for (int i = 0; i < count; i++) {
            parts[i] = (struct allot_part){.weight = content_random(&random, 50),
                                           .most = content_random(&random, 80)};
            parts[i].least = content_random(&random, (uint32_t)parts[i].most + 1);
            least += parts[i].least;
            most += parts[i].most;
        }
        allot_split(parts, count, total);
        for (int i = 0; i < count; i++) {
            sum += parts[i].part;
            cr_assert(parts[i].part >= parts[i].least && parts[i].part <= parts[i].most);
        }
        cr_assert_eq(sum,
                     total < least  ? least
                     : total > most ? most
                                    : total,
                     "seed %d", (int)seed);
    }
}

/* PyramidKV's own integers overshoot the total (4,272 of 4,096); the line is the same. */
Test(allot, pyramid_follows_the_published_line) {
    struct kern_rule rule = {.score = KERN_SCORE_ATTENTION,
                             .layers = KERN_LAYERS_PYRAMID,
                             .pyramid_beta = 20,
                             .recent = 8,
                             .observe = {.window = 8}};
    struct bed bed = bed_open(32, 1, 1, 4, &rule);
    bed_append(&bed, 0, 300);
    bed.tokens = 300;
    struct evict_job job = bed_job(&bed, 128);
    int64_t sum = 0;
    evict_measure(&job, NULL);
    evict_allot(&job);
    for (int layer = 0; layer < 32; layer++) {
        int64_t got = bed.cache.evict[layer].allotment, published = 242 - 7 * layer;
        cr_assert(llabs(got - published) <= 31, "layer %d: %lld", layer, (long long)got);
        cr_assert(layer == 0 || got < bed.cache.evict[layer - 1].allotment);
        sum += got;
    }
    cr_assert_eq(sum, 32 * 128);
    cr_assert_eq(bed.cache.evict[0].allotment, 242);
    cr_assert_eq(bed.cache.evict[31].allotment, 8 + 6);
    cpu_cache_close(&bed.cache);
}

/* Heads of one layer that compete, with a floor of 0.2: counts[h] entries of head h are kept when
 * `budget` are to be kept per head on average. scores[heads][entries]. */
static void compete(int heads, int entries, const float *scores, int budget, const int *counts) {
    struct kern_rule rule = {
        .score = KERN_SCORE_ATTENTION, .scope = KERN_SCOPE_LAYER, .floor = 0.2f};
    struct bed bed = bed_open(1, heads, heads, 4, &rule);
    bed_append(&bed, 0, entries);
    bed.tokens = entries;
    for (int head = 0; head < heads; head++)
        for (int i = 0; i < entries; i++)
            cpu_cache_score(&bed.cache, *cpu_cache_table(&bed.cache, 0, head))[i] =
                scores[head * entries + i];
    cr_assert_eq(bed_evict(&bed, 0, budget), 0);
    for (int head = 0; head < heads; head++)
        cr_assert_eq(*cpu_cache_length(&bed.cache, 0, head), counts[head], "head %d", head);
    cpu_cache_close(&bed.cache);
}

/* Base 3, floor 0.2 as in Ada-KV's example: counts 1 and 5, and all six are given. */
Test(allot, heads_of_a_layer_compete) {
    static const float scores[2][6] = {{.50f, .20f, .10f, .05f, .01f, .01f},
                                       {.30f, .28f, .26f, .24f, .22f, .20f}};
    compete(2, 6, scores[0], 3, (int[]){1, 5});
}

/* Counts 0, 1 and 5 of three heads: parts 0.4, 1.2 and 4.4. The remainders of the first and the
 * last are equal, so the lower head gets the sixth entry, also if 0.2 has no exact binary form. */
Test(allot, equal_remainders_go_to_the_lower_head) {
    static const float scores[3][5] = {{0}, {1}, {1, 1, 1, 1, 1}};
    compete(3, 5, scores[0], 2, (int[]){1, 1, 4});
}

/* The counts are those of the whole layer's best, 4 and 16 of 20, then mixed with an even part. */
Test(allot, a_floor_mixes_counts_with_even_parts) {
    struct kern_rule rule = {
        .score = KERN_SCORE_ATTENTION, .scope = KERN_SCOPE_LAYER, .floor = 0.5f};
    struct bed bed = bed_open(1, 2, 2, 4, &rule);
    bed_append(&bed, 0, 20);
    bed.tokens = 20;
    for (int i = 0; i < 20; i++) {
        cpu_cache_score(&bed.cache, *cpu_cache_table(&bed.cache, 0, 0))[i] = i < 4 ? 9 : 0;
        cpu_cache_score(&bed.cache, *cpu_cache_table(&bed.cache, 0, 1))[i] = (float)i;
    }
    cr_assert_eq(bed_evict(&bed, 0, 10), 0);
    cr_assert_eq(*cpu_cache_length(&bed.cache, 0, 0), 7);
    cr_assert_eq(*cpu_cache_length(&bed.cache, 0, 1), 13);
    cpu_cache_close(&bed.cache);
}

Test(allot, a_floor_keeps_every_head_alive) {
    struct kern_rule rule = {
        .score = KERN_SCORE_ATTENTION, .scope = KERN_SCOPE_SEQUENCE, .floor = 0.5f};
    struct bed bed = bed_open(2, 2, 2, 4, &rule);
    bed_append(&bed, 0, 40);
    bed.tokens = 40;
    for (int stream = 0; stream < 4; stream++) /* one stream is above all others */
        for (int i = 0; i < 40; i++)
            cpu_cache_score(&bed.cache, cpu_cache_table(&bed.cache, 0, stream)[i / 128])[i] =
                (float)(stream == 2);
    cr_assert_eq(bed_evict(&bed, 0, 10), 0);
    for (int stream = 0; stream < 4; stream++) /* 5 each, and the 20 best all of stream 2 */
        cr_assert_eq(*cpu_cache_length(&bed.cache, 0, stream), stream == 2 ? 25 : 5);
    cpu_cache_close(&bed.cache);
}
