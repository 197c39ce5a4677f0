/* Merging: the published example, a brute-force merge in double, thresholds over time, forks. */
#include <criterion/criterion.h>

#include "tests/unit/kernels/eviction.h"

static struct kern_rule rule_of(enum kern_merge merge) {
    return (struct kern_rule){.score = KERN_SCORE_ATTENTION,
                              .merge = merge,
                              .merge_beta = 0.7f,
                              .observe = {.group = KERN_GROUP_SUM, .reduce = KERN_REDUCE_SUM}};
}

static void set_scores(struct bed *bed, int slot, int stream, int count, const float *scores) {
    for (int i = 0; i < count; i++) {
        uint32_t page = cpu_cache_table(&bed->cache, slot, stream)[i / bed->cache.page_slots];
        cpu_cache_score(&bed->cache, page)[i % bed->cache.page_slots] = scores[i];
    }
}

/* k_j = (1, 0) takes in k_i = (0.8, 0.6), u = 0.8. */
static void expect_published(enum kern_merge merge, float x, float y) {
    struct kern_rule rule = rule_of(merge);
    struct bed bed = bed_open(1, 1, 1, 2, &rule);
    bed_append(&bed, 0, 2);
    bed.tokens = 2;
    memcpy(bed_row(&bed, 0, 0, 0, false), (float[]){.8f, .6f}, 8);
    memcpy(bed_row(&bed, 0, 0, 1, false), (float[]){1, 0}, 8);
    memcpy(bed_row(&bed, 0, 0, 0, true), (float[]){.8f, .6f}, 8);
    memcpy(bed_row(&bed, 0, 0, 1, true), (float[]){1, 0}, 8);
    set_scores(&bed, 0, 0, 2, (float[]){1, 2});
    cr_assert_eq(bed_evict(&bed, 0, 1), 0);
    for (int values = 0; values < 2; values++) {
        const float *row = bed_row(&bed, 0, 0, 0, values);
        cr_expect_float_eq(row[0], x, 5e-5, "%.5f", (double)row[0]);
        cr_expect_float_eq(row[1], y, 5e-5, "%.5f", (double)row[1]);
    }
    const struct cpu_stream view = cpu_cache_stream_at(&bed.cache, 0, 0);
    cr_assert_eq(cpu_cache_entry_pos(&bed.cache, &view, 0), 1);
    cr_assert_float_eq(bed.cache.tau[0], 0.8f, 1e-6);
    cpu_cache_close(&bed.cache);
}

Test(merge, published_numbers) {
    expect_published(KERN_MERGE_CODE, .82f, .24f);
    expect_published(KERN_MERGE_PAPER, .9100f, .2701f);
}

/* ---- Brute force ---- */

enum { DIM = 24, MOST = 400 };

struct copy {
    float k[MOST][DIM], v[MOST][DIM];
    int32_t pos[MOST];
    int count;
};

static void read_stream(const struct bed *bed, int slot, int stream, struct copy *to) {
    const struct cpu_stream view = cpu_cache_stream_at(&bed->cache, slot, stream);
    to->count = *cpu_cache_length(&bed->cache, slot, stream);
    for (int i = 0; i < to->count; i++) {
        memcpy(to->k[i], bed_row(bed, slot, stream, i, false), sizeof to->k[i]);
        memcpy(to->v[i], bed_row(bed, slot, stream, i, true), sizeof to->v[i]);
        to->pos[i] = cpu_cache_entry_pos(&bed->cache, &view, i);
    }
}

static double alike(const float *a, const float *b) {
    double ab = 0, aa = 0, bb = 0;
    for (int d = 0; d < DIM; d++) {
        ab += (double)a[d] * (double)b[d];
        aa += (double)a[d] * (double)a[d];
        bb += (double)b[d] * (double)b[d];
    }
    return ab / sqrt(aa * bb);
}

static int place_of(const struct copy *after, int32_t pos) {
    for (int i = 0; i < after->count; i++)
        if (after->pos[i] == pos) return i;
    return -1;
}

/* Computes the expected content of `after` from its kept positions; returns the new threshold. */
static double expect_merged(const struct copy *before, const struct copy *after,
                            const struct kern_rule *rule, double tau) {
    static double sum[2][MOST][DIM], total[MOST], best[MOST];
    static int target[MOST];
    double mean = 0;
    int gone = 0;
    for (int i = 0; i < before->count; i++) {
        target[i] = place_of(after, before->pos[i]);
        best[i] = 2;
        if (target[i] >= 0) continue;
        best[i] = -2;
        for (int j = 0; j < before->count; j++) {
            int place = place_of(after, before->pos[j]);
            double u = place < 0 ? -3 : alike(before->k[i], before->k[j]);
            if (u >= best[i]) best[i] = u, target[i] = place;
        }
        mean += best[i];
        gone++;
    }
    mean /= gone;
    double beta = (double)rule->merge_beta,
           limit = isnan(tau) ? mean : beta * mean + (1 - beta) * tau;
    bool paper = rule->merge == KERN_MERGE_PAPER;
    memset(sum, 0, sizeof sum);
    memset(total, 0, sizeof total);
    for (int i = 0; i < before->count; i++) {
        bool own = best[i] == 2;
        if (!own && best[i] < limit) continue;
        double weight = paper ? exp(own ? 1 : best[i]) : own ? 1 : best[i];
        total[target[i]] += paper ? weight : 1;
        for (int d = 0; d < DIM; d++) {
            sum[0][target[i]][d] += weight * (double)before->k[i][d];
            sum[1][target[i]][d] += weight * (double)before->v[i][d];
        }
    }
    for (int j = 0; j < after->count; j++)
        for (int d = 0; d < DIM; d++) {
            cr_assert_float_eq((double)after->k[j][d], sum[0][j][d] / total[j], 1e-5);
            cr_assert_float_eq((double)after->v[j][d], sum[1][j][d] / total[j], 1e-5);
        }
    return limit;
}

Test(merge, equals_brute_force_over_several_evictions) {
    static struct copy before[2], after;
    for (int merge = KERN_MERGE_PAPER; merge <= KERN_MERGE_CODE; merge++) {
        struct kern_rule rule = rule_of((enum kern_merge)merge);
        rule.sinks = 2;
        rule.recent = 9;
        struct bed bed = bed_open(1, 4, 2, DIM, &rule);
        double tau[2] = {NAN, NAN};
        for (int round = 0; round < 4; round++) {
            bed_append(&bed, 0, 70);
            bed.tokens += 70;
            for (int head = 0; head < 2; head++) read_stream(&bed, 0, head, &before[head]);
            cr_assert_eq(bed_evict(&bed, 0, 40), 0);
            for (int head = 0; head < 2; head++) {
                read_stream(&bed, 0, head, &after);
                cr_assert_eq(after.count, 40);
                tau[head] = expect_merged(&before[head], &after, &rule, tau[head]);
                cr_assert_float_eq((double)bed.cache.tau[head], tau[head], 1e-5);
            }
        }
        cpu_cache_close(&bed.cache);
    }
}

/* ---- Forks ---- */

Test(merge, a_fork_is_left_as_it_was) {
    static struct copy before, after;
    struct kern_rule rule = rule_of(KERN_MERGE_PAPER);
    struct bed bed = bed_open(1, 2, 2, DIM, &rule);
    struct fault fault = {0};
    bed_append(&bed, 0, 100);
    bed.tokens = 100;
    read_stream(&bed, 0, 1, &before);
    cr_assert_eq(cpu_cache_fork(&bed.cache, 0, 1), 0);
    cr_assert_eq(bed_evict(&bed, 1, 30), 0);
    cr_assert_eq(cpu_cache_check(&bed.cache, &fault), 0, "%s", fault.text);
    read_stream(&bed, 0, 1, &after);
    cr_assert_eq(memcmp(&before, &after, sizeof before), 0);
    read_stream(&bed, 1, 1, &after);
    cr_assert_eq(after.count, 30);
    expect_merged(&before, &after, &rule, (double)NAN);
    cr_assert(isnan(bed.cache.tau[0]) && !isnan(bed.cache.tau[bed.cache.streams]));
    cpu_cache_close(&bed.cache);
}
