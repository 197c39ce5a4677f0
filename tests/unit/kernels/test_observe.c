/* Compares observed attention with a plain computation in double: every form of grouping, reducing,
 * smoothing and history. */
#include <criterion/criterion.h>

#include "tests/unit/kernels/eviction.h"

enum { MOST = 400, GROUP = 3, DIM = 24, WINDOW = 12 };

struct oracle {
    const struct bed *bed;
    int stream, count, candidates;
    double p[WINDOW][GROUP][MOST]; /* logits, then what they become */
    int heads;                     /* rows in use per query: 1 after grouping */
};

static int candidates_of(const struct bed *bed, int stream) {
    const struct cpu_stream view = cpu_cache_stream_at(&bed->cache, 0, stream);
    int count = 0;
    for (int i = 0; i < view.length; i++)
        count += cpu_cache_entry_pos(&bed->cache, &view, i) < bed->tokens - bed->rule.recent;
    return count;
}

static void fill_logits(struct oracle *o) {
    const struct bed *bed = o->bed;
    int layer = o->stream / bed->heads, head = o->stream % bed->heads;
    const struct cpu_stream view = cpu_cache_stream_at(&bed->cache, 0, o->stream);
    for (int t = 0; t < WINDOW; t++) {
        int32_t pos = bed->tokens - WINDOW + t;
        for (int r = 0; r < GROUP; r++)
            for (int i = 0; i < o->count; i++) {
                double sum = 0;
                bool seen = cpu_cache_entry_pos(&bed->cache, &view, i) <= pos;
                if (bed->rule.observe.support == KERN_SUPPORT_CANDIDATES)
                    seen = seen && i < o->candidates;
                for (int d = 0; d < DIM; d++)
                    sum += (double)bed_query(layer, pos, (head * GROUP + r) * DIM + d) *
                           (double)bed_row(bed, 0, o->stream, i, false)[d];
                o->p[t][r][i] = seen ? sum : -INFINITY;
            }
    }
}

/* One for each query head of a layer, in the range of the logits. */
static const float sink_table[2 * GROUP] = {1, -2, 0.5f, 3, -0.25f, 2};

static double sink_of(const struct bed *bed, int head) {
    return bed->sinks ? (double)bed->sinks[head] : -INFINITY;
}

static void softmax(double *x, int count, double sink) {
    double sum = 0, most = sink;
    for (int i = 0; i < count; i++) most = fmax(most, x[i]);
    for (int i = 0; i < count; i++) sum += exp(x[i] - most);
    sum += exp(sink - most);
    for (int i = 0; i < count; i++) x[i] = exp(x[i] - most) / sum;
}

static double grouped(enum kern_group group, double (*p)[MOST], int i) {
    double max = -INFINITY, sum = 0, squares = 0;
    for (int r = 0; r < GROUP; r++) {
        max = fmax(max, p[r][i]);
        sum += p[r][i];
        squares += p[r][i] * p[r][i];
    }
    switch (group) {
    case KERN_GROUP_MAX:
    case KERN_GROUP_MAX_LOGIT:
        return max;
    case KERN_GROUP_MEAN:
        return sum / GROUP;
    case KERN_GROUP_SQUARES:
        return squares;
    default:
        return sum;
    }
}

static void group_heads(struct oracle *o) {
    enum kern_group group = o->bed->rule.observe.group;
    bool logits = group == KERN_GROUP_MAX_LOGIT || group == KERN_GROUP_SUM_LOGIT;
    double sinks[GROUP][MOST];
    int first = o->stream % o->bed->heads * GROUP;
    for (int r = 0; r < GROUP; r++) sinks[r][0] = sink_of(o->bed, first + r);
    for (int t = 0; t < WINDOW; t++) {
        for (int r = 0; r < GROUP && !logits; r++) softmax(o->p[t][r], o->count, sinks[r][0]);
        if (group == KERN_GROUP_EACH) continue;
        for (int i = 0; i < o->count; i++) o->p[t][0][i] = grouped(group, o->p[t], i);
        if (logits) softmax(o->p[t][0], o->count, grouped(group, sinks, 0));
    }
    o->heads = group == KERN_GROUP_EACH ? GROUP : 1;
}

static void smooth(const struct kern_observe *observe, double *x, int count) {
    double out[MOST];
    int side = observe->smooth_width / 2;
    for (int i = 0; i < count; i++) {
        double max = -INFINITY, sum = 0;
        for (int j = i - side; j <= i + side; j++)
            if (j >= 0 && j < count) max = fmax(max, x[j]), sum += x[j];
        out[i] = observe->smooth == KERN_SMOOTH_MAX ? max : sum / observe->smooth_width;
    }
    memcpy(x, out, (size_t)count * sizeof *x);
}

static double reduced(const struct oracle *o, int r, int i) {
    const struct kern_observe *observe = &o->bed->rule.observe;
    double sum = 0, max = 0, squares = 0;
    for (int t = 0; t < WINDOW; t++) sum += o->p[t][r][i], max = fmax(max, o->p[t][r][i]);
    double mean = sum / WINDOW;
    for (int t = 0; t < WINDOW; t++) squares += (o->p[t][r][i] - mean) * (o->p[t][r][i] - mean);
    double variance = squares / (WINDOW - 1), gamma = (double)observe->gamma;
    switch (observe->reduce) {
    case KERN_REDUCE_SUM:
        return sum;
    case KERN_REDUCE_MAX:
        return max;
    case KERN_REDUCE_MEAN:
        return mean;
    case KERN_REDUCE_MEAN_VAR:
        return mean + gamma * variance;
    default:
        return mean + gamma * sqrt(variance);
    }
}

static void observe(struct oracle *o, double *out) {
    const struct kern_observe *rule = &o->bed->rule.observe;
    fill_logits(o);
    group_heads(o);
    for (int t = 0; t < WINDOW && rule->smooth_first; t++)
        for (int r = 0; r < o->heads; r++) smooth(rule, o->p[t][r], o->candidates);
    for (int i = 0; i < o->candidates; i++) {
        out[i] = 0;
        for (int r = 0; r < o->heads; r++) out[i] += reduced(o, r, i) / o->heads;
    }
}

/* A cache that has been through an eviction, so that streams have gaps and entries a history. */
static struct bed open_bed(const struct kern_observe *observe) {
    struct kern_rule rule = {
        .score = KERN_SCORE_ATTENTION, .sinks = 2, .recent = WINDOW, .observe = *observe};
    struct bed bed = bed_open(2, 2 * GROUP, 2, DIM, &rule);
    bed_append(&bed, 0, 150);
    bed.tokens = 150;
    cr_assert_eq(bed_evict(&bed, 0, 90), 0);
    for (int part = 0; part < 4; part++) {
        bed_append(&bed, 0, 13);
        bed.tokens += 13;
    }
    return bed;
}

static void check_forms(const float *sinks) {
    static struct oracle o;
    int cases = 0;
    for (int group = 0; group <= KERN_GROUP_EACH; group++)
        for (int reduce = 0; reduce <= KERN_REDUCE_MEAN_STD; reduce++) {
            struct kern_observe form = {.window = WINDOW,
                                        .group = (enum kern_group)group,
                                        .reduce = (enum kern_reduce)reduce,
                                        .support = (enum kern_support)(cases % 2),
                                        .gamma = 20,
                                        .smooth = (enum kern_smooth)(cases % 3),
                                        .smooth_width = 5,
                                        .smooth_first = cases % 3 > 0};
            struct bed bed = open_bed(&form);
            struct evict_job job = bed_job(&bed, 90);
            bed.sinks = sinks;
            for (int layer = 0; layer < 2; layer++) bed.cache.attended[layer].sinks = sinks;
            for (int stream = 0; stream < 4; stream++) {
                double want[MOST], top = 0;
                float got[MOST];
                struct cpu_work work = cpu_cache_work(&bed.cache, 0);
                o.bed = &bed;
                o.stream = stream;
                o.count = *cpu_cache_length(&bed.cache, 0, stream);
                o.candidates = candidates_of(&bed, stream);
                cr_assert_eq(o.candidates, bed.cache.evict[stream].candidates);
                observe(&o, want);
                evict_observe(&job, stream, o.candidates, &work, got);
                for (int i = 0; i < o.candidates; i++) top = fmax(top, want[i]);
                for (int i = 0; i < o.candidates; i++)
                    cr_assert_float_eq((double)got[i], want[i], 2e-5 * top,
                                       "group %d reduce %d stream %d entry %d: %g, not %g", group,
                                       reduce, stream, i, (double)got[i], want[i]);
            }
            cpu_cache_close(&bed.cache);
            cases++;
        }
    cr_assert_eq(cases, 35);
}

Test(observe, every_form_equals_double_arithmetic) {
    check_forms(NULL);
    check_forms(sink_table);
}

/* ---- History ---- */

/* The example of the G-KV section: F = [0.9, 0.2, 0.5], S as below; two entries are new. */
Test(observe, history_follows_the_published_forms) {
    static const float past[] = {.9f, .2f, .5f, CPU_SCORE_NONE, CPU_SCORE_NONE};
    static const float want[][5] = {{.72f, .16f, 1, .6667f, .2f},
                                    {.7867f, .1733f, .6f, .6667f, .2f},
                                    {1.0533f, .2267f, 1.4f, .6667f, .2f}};
    for (int form = KERN_HISTORY_MAX; form <= KERN_HISTORY_SUM; form++) {
        struct kern_observe observe = {
            .normalise = true, .history = (enum kern_history)form, .decay = .8f};
        float now[] = {.10f, .02f, .30f, .20f, .06f};
        evict_remember(&observe, past, now, 5);
        for (int i = 0; i < 5; i++)
            cr_expect_float_eq(now[i], want[form - 1][i], 5e-5, "form %d entry %d: %g", form, i,
                               (double)now[i]);
    }
}

Test(observe, scores_move_with_their_entries) {
    struct kern_observe form = {
        .window = WINDOW, .normalise = true, .history = KERN_HISTORY_MAX, .decay = 0.8f};
    struct bed bed = open_bed(&form);
    int remembered = 0;
    for (int stream = 0; stream < 4; stream++) {
        const struct cpu_stream view = cpu_cache_stream_at(&bed.cache, 0, stream);
        const int slots = bed.cache.page_slots;
        for (int i = 0; i < view.length; i++) {
            float score = cpu_cache_score(&bed.cache, view.pages[i / slots])[i % slots];
            int32_t pos = cpu_cache_entry_pos(&bed.cache, &view, i);
            cr_assert_eq(score >= 0, pos < 150 - WINDOW, "position %d: %g", pos, (double)score);
            remembered += score == 1;
        }
    }
    cr_assert(remembered >= 4); /* the largest of each stream is 1 by definition, and stays */
    cpu_cache_close(&bed.cache);
}

/* A ring of another size, as from a snapshot, is not read as if it were one of this. */
Test(observe, a_ring_of_another_size_counts_as_none) {
    struct kern_observe form = {.window = WINDOW};
    struct bed bed = open_bed(&form);
    struct cpu_work work = cpu_cache_work(&bed.cache, 0);
    float got[MOST];
    bed.rule.observe.window = 7;
    bed_append(&bed, 0, 1);
    bed.tokens++;
    for (int i = 0; i < 7; i++)
        cr_assert_eq(bed.cache.ring_pos[i], i == (bed.tokens - 1) % 7 ? bed.tokens - 1 : -1);
    struct evict_job job = bed_job(&bed, 90);
    evict_observe(&job, 0, bed.cache.evict[0].candidates, &work, got); /* one query: sums to 1 */
    float sum = 0;
    for (int i = 0; i < bed.cache.evict[0].candidates; i++) sum += got[i];
    cr_assert(sum > 0.5f && sum <= 1.0001f, "%g", (double)sum);
    cpu_cache_close(&bed.cache);
}

/* ---- Accumulated mass ---- */

static struct bed open_mass(enum kern_group group, const float *sinks, const int *parts,
                            int count) {
    struct kern_rule rule = {.score = KERN_SCORE_ATTENTION,
                             .recent = 8,
                             .observe = {.group = group, .reduce = KERN_REDUCE_SUM}};
    struct bed bed = bed_open(1, 2 * GROUP, 2, DIM, &rule);
    bed.sinks = sinks;
    for (int i = 0; i < count; i++) {
        bed_append(&bed, 0, parts[i]);
        bed.tokens += parts[i];
    }
    return bed;
}

static void check_mass(const float *sinks) {
    for (int group = KERN_GROUP_MEAN; group <= KERN_GROUP_SQUARES; group++) {
        struct bed bed = open_mass((enum kern_group)group, sinks, (int[]){60, 1, 19}, 3);
        for (int head = 0; head < 2; head++) {
            double want[80] = {0};
            static double p[GROUP][MOST];
            for (int t = 0; t < 80; t++) {
                for (int r = 0; r < GROUP; r++) {
                    for (int i = 0; i <= t; i++) {
                        p[r][i] = 0;
                        for (int d = 0; d < DIM; d++)
                            p[r][i] += (double)bed_query(0, t, (head * GROUP + r) * DIM + d) *
                                       (double)bed_row(&bed, 0, head, i, false)[d];
                    }
                    softmax(p[r], t + 1, sink_of(&bed, head * GROUP + r));
                }
                for (int i = 0; i <= t; i++) want[i] += grouped((enum kern_group)group, p, i);
            }
            for (int i = 0; i < 80; i++) {
                uint32_t page = cpu_cache_table(&bed.cache, 0, head)[i / bed.cache.page_slots];
                float got = cpu_cache_score(&bed.cache, page)[i % bed.cache.page_slots];
                cr_assert_float_eq((double)got, want[i], 1e-5 * (1 + want[i]), "entry %d", i);
            }
        }
        cpu_cache_close(&bed.cache);
    }
}

Test(observe, mass_is_the_sum_over_all_queries) {
    check_mass(NULL);
    check_mass(sink_table);
}

Test(observe, mass_does_not_depend_on_how_tokens_come) {
    struct bed whole = open_mass(KERN_GROUP_SUM, NULL, (int[]){90}, 1);
    struct bed parts = open_mass(KERN_GROUP_SUM, NULL, (int[]){7, 40, 1, 1, 41}, 5);
    for (int head = 0; head < 2; head++)
        for (int i = 0; i < 90; i++) {
            int slots = whole.cache.page_slots;
            uint32_t a = cpu_cache_table(&whole.cache, 0, head)[i / slots];
            uint32_t b = cpu_cache_table(&parts.cache, 0, head)[i / slots];
            cr_assert_float_eq(cpu_cache_score(&whole.cache, a)[i % slots],
                               cpu_cache_score(&parts.cache, b)[i % slots], 0);
        }
    cpu_cache_close(&whole.cache);
    cpu_cache_close(&parts.cache);
}

/* Two forks that add up different attention share no page in the end; what a fork holds is what a
 * sequence of its own would hold. */
Test(observe, forks_add_up_by_themselves) {
    struct bed bed = open_mass(KERN_GROUP_SUM, NULL, (int[]){50}, 1);
    struct bed alone = open_mass(KERN_GROUP_SUM, NULL, (int[]){50, 10}, 2);
    struct fault fault = {0};
    cr_assert_eq(cpu_cache_fork(&bed.cache, 0, 1), 0);
    bed_append(&bed, 0, 10);
    cr_assert_eq(cpu_cache_check(&bed.cache, &fault), 0, "%s", fault.text);
    bed_append(&bed, 1, 10);
    cr_assert_eq(cpu_cache_check(&bed.cache, &fault), 0, "%s", fault.text);
    for (int slot = 0; slot < 2; slot++)
        for (int i = 0; i < 60; i++) {
            int slots = bed.cache.page_slots;
            uint32_t a = cpu_cache_table(&bed.cache, slot, 1)[i / slots];
            uint32_t b = cpu_cache_table(&alone.cache, 0, 1)[i / slots];
            cr_assert_float_eq(cpu_cache_score(&bed.cache, a)[i % slots],
                               cpu_cache_score(&alone.cache, b)[i % slots], 0);
        }
    cpu_cache_close(&bed.cache);
    cpu_cache_close(&alone.cache);
}
